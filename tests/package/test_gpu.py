"What only a GPU can show, at the real shapes: TF32's reach, the kernels' errors, determinism, memory, and no leaks."
import gc, math
from dataclasses import replace
import numpy as np, pytest, torch, torch.nn.functional as F
from llm_speedrun.rungs.chunked_ce import linear_cross_entropy
from llm_speedrun.rungs.flash import BACKENDS, attend_with, why_not
from llm_speedrun.rungs.fp8 import E4M3, E5M2, sqnr
from llm_speedrun.rungs.fp8_kernels import Scaling
from llm_speedrun.rungs.fused_fp8 import to_fp8
from llm_speedrun.rungs.fused_ops import SwiGLUDown, fused_ops
from llm_speedrun.rungs.qk_rope import QKRope
from llm_speedrun.rungs.triton import AddRMSNorm
from llm_speedrun.measure import version_of
from llm_speedrun.timing import warm_up
from llm_speedrun.roofline import has_fp8
from llm_speedrun.op_counter import OpCounter
from llm_speedrun.model import naive_attention, rope, rope_table
from llm_speedrun.model_config import matrix_params, train_flops, workload
from llm_speedrun.runs import Run, baseline, build
from llm_speedrun.step_builder import count_step, first_that_fits, micro_batch, peak_gib, make_step
from llm_speedrun.stepper import Stepper
from llm_speedrun.course import reference_errors
from llm_speedrun.rungs.tf32 import tf32
from llm_speedrun.train.presets import parse_rungs, presets
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.trainer import train
from torch.nn.attention import sdpa_kernel
from helpers.torch_globals import changed, flags
from helpers.tiny_runs import relative_error

pytestmark = pytest.mark.cuda

@pytest.fixture(autouse=True)
def memory():
    "Each test starts with the GPU's memory empty"
    gc.collect(); torch.cuda.empty_cache()

# TF32

def test_tf32_reaches_the_backward_pass():
    "A weight's gradient is here one product, of the backward pass alone: TF32 rounds it, FP32 does not"
    torch.manual_seed(0)
    x, c = torch.randn(2, 4096, 1024, device="cuda")
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    run = Run(linear, loss=lambda m, x, y: (m(x)*y).sum(), optimizer=lambda m: None)
    def grad(run):
        run.model.weight.grad, step, kept = None, Stepper(run), []
        step.update = lambda n: kept.append(run.model.weight.grad)
        step((x, c))
        return kept[0]
    exact = c.double().T @ x.double()
    before, fast, after = (relative_error(grad(r), exact) for r in (run, tf32(run), run))
    assert before < 1e-6 and 1e-5 < fast < 1e-2 and after < 1e-6

def test_precision_at_124m():
    "At 124m's shapes FP32's gradients are within 1e-4 of float64, TF32's between 1e-4 and 1e-2, with flash too"
    c = workload("124m")
    fp32, fast, flash = (reference_errors(c, r)[1] for r in ([], ["tf32"], ["flash"]))
    assert fp32 < 1e-4 < fast < 1e-2 and flash < 1e-4
    assert reference_errors(c, ["tf32", "bf16", "flash"])[1] < .05

# Attention

SHAPES = dict(mha=(2, 12, 12, 1024, 64), wide=(2, 16, 16, 2048, 128), gqa=(2, 12, 4, 1024, 64),    # B H K T D
              odd=(1, 12, 4, 1000, 64), one=(3, 4, 2, 1, 64))

def attention_errors(attend, q, k, v, do, exact):
    "The largest errors of the output and of the three gradients against `exact`"
    ins = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend(*ins)
    out.backward(do)
    return [(a.double() - b).abs().max().item() for a, b in zip([out] + [t.grad for t in ins], exact)]

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(backend, shape, dtype):
    "A kernel's output and gradients are at most twice as far from float64 as naive attention's in the same format"
    B, H, K, T, D = SHAPES[shape]
    if why := why_not(backend, B, H, K, T, D, dtype, "cuda"):
        assert backend == "cudnn" or torch.cuda.get_device_capability() < (8, 0), why   # the others run on every newer card
        pytest.skip(why)
    torch.manual_seed(0)
    q, do = torch.randn(2, B, H, T, D, device="cuda", dtype=dtype)
    k, v = torch.randn(2, B, K, T, D, device="cuda", dtype=dtype)
    ins = [t.double().requires_grad_() for t in (q, k, v)]
    out = naive_attention(*ins)
    out.backward(do.double())
    exact = [out.detach()] + [t.grad for t in ins]
    naive = attention_errors(naive_attention, q, k, v, do, exact)
    with sdpa_kernel(BACKENDS[backend]): fused = attention_errors(attend_with(backend), q, k, v, do, exact)
    eps = torch.finfo(dtype).eps        # a gradient that is zero, as with one token, may come out as a rounding
    for name, a, b in zip(("output", "dq", "dk", "dv"), fused, naive): assert a <= 2*b + eps, (name, a, b)

def test_a_kernel_runs_at_every_workload():
    "In bfloat16 a fused kernel runs the shapes of every workload"
    for name in ("tiny", "124m", "180m", "350m", "1b"):
        c = workload(name)
        shape = 8, c.heads, c.kv_heads, c.seq_len, c.head_dim, torch.bfloat16, "cuda"
        assert not all(why_not(b, *shape) for b in BACKENDS), name

def test_flash_saves_memory():
    "Without the scores the 124m step's peak is lower by at least one layer's scores for every layer"
    c, B = workload("124m"), 8
    naive, flash = (warm_up(make_step(c, r, B))[1].peak_gib for r in (["bf16"], ["bf16", "flash"]))
    scores = B * c.heads * c.seq_len**2 * 2 / 2**30     # GiB in bf16, one layer
    assert naive - flash > c.layers * scores, (naive, flash)

# Our kernels, in bfloat16, with sizes of which no block is a divisor

N = 4096 + 3    # rows
SIZES = ["124m", "1b"]

def outputs_and_gradients(f, ins):
    "What `f` returns and the gradients of all of `ins`, from a fixed random mix of the outputs"
    ins, g = [t.detach().clone().requires_grad_() for t in ins], torch.Generator("cuda").manual_seed(1)
    out = f(*ins)
    out = out if isinstance(out, tuple) else (out,)
    ups = [torch.randn(o.shape, device="cuda", generator=g).to(o.dtype) for o in out]
    return [o.detach() for o in out] + list(torch.autograd.grad(out, ins, ups))

def rand(*shape, dtype=torch.bfloat16): return torch.randn(*shape, device="cuda").to(dtype)

def norm_case(c):
    def plain(x, y, w): h = x + y; return h, F.rms_norm(h.to(w.dtype), (c.width,), w, 1e-6).to(x.dtype)
    ins = rand(N, c.width), rand(N, c.width), rand(c.width, dtype=torch.float32)
    return lambda x, y, w: AddRMSNorm.apply(x, y, w, 1e-6), plain, ins

def lone_norm_case(c):
    def plain(x, w): return F.rms_norm(x.to(w.dtype), (c.width,), w, 1e-6).to(x.dtype)
    return lambda x, w: AddRMSNorm.apply(x, None, w, 1e-6), plain, (rand(N, c.width), rand(c.width, dtype=torch.float32))

def mlp_case(c):
    def plain(ab, w): a, b = ab.chunk(2, -1); return (F.silu(a)*b) @ w.T
    return SwiGLUDown.apply, plain, (rand(N, 2*c.hidden), rand(c.width, c.hidden))

def heads_case(c, kv_heads=None):
    H, K, D, T = c.heads, kv_heads or c.kv_heads, c.head_dim, N // 3    # 4099 is a prime: here 3 sequences of 1366
    cos, sin = (t.cuda() for t in rope_table(T, D, 1e4))
    def plain(qkv, wq, wk):
        q, k, v = qkv.split([H, K, K], 2)
        def norm(t, w): return F.rms_norm(t.to(w.dtype), (D,), w, 1e-6).to(t.dtype)
        def turn(t, w): return rope(norm(t, w).transpose(1, 2), cos, sin).transpose(1, 2)
        return turn(q, wq), turn(k, wk), v
    ins = rand(3, T, H + 2*K, D), rand(D, dtype=torch.float32), rand(D, dtype=torch.float32)
    return lambda *ts: QKRope.apply(*ts, cos, sin, H, 1e-6), plain, ins

def loss_case(c):
    y = torch.randint(c.vocab, (N,), device="cuda")
    y[::5] = -100
    def auto(f):
        def loss(h, w):
            with torch.autocast("cuda", torch.bfloat16, enabled=h.dtype != torch.float64): return f(h, w)
        return loss
    def plain(h, w):
        x = F.linear(h, w)
        return F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), y)
    budget = 1000*2*c.vocab     # several chunks
    ins = rand(N, c.width), .02*rand(c.vocab, c.width, dtype=torch.float32)
    return auto(lambda h, w: linear_cross_entropy(h, w, y, budget=budget)), auto(plain), ins

CASES = dict(norm=norm_case, lone_norm=lone_norm_case, mlp=mlp_case, heads=heads_case, gqa=lambda c: heads_case(c, c.heads//4),
             loss=loss_case)

@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, name):
    "A kernel's outputs and gradients are at most twice as far from float64 as PyTorch's in the same format"
    torch.manual_seed(0)
    ours, plain, ins = CASES[case](workload(name))
    got, theirs, exact = (outputs_and_gradients(f, i) for f, i in ((ours, ins), (plain, ins), (plain, [t.double() for t in ins])))
    for i, (a, b, e) in enumerate(zip(got, theirs, exact)):
        assert a.dtype == b.dtype and a.shape == b.shape, i
        slack = 1e-5 if e.ndim else 1e-4    # errors of one number, the mean loss, may cancel by chance
        assert relative_error(a, e) <= 2*relative_error(b, e) + slack, (i, relative_error(a, e), relative_error(b, e))
        largest = [(o.double() - e).abs().max().item() for o in (a, b)]
        assert largest[0] <= 2*largest[1] + slack*e.abs().max().item(), (i, largest)

@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_kernel_repeats_itself(case, name):
    "Twenty times the same, bitwise, forward and backward"
    torch.manual_seed(0)
    ours, _, ins = CASES[case](workload(name))
    first = outputs_and_gradients(ours, ins)
    for _ in range(19): assert all(a.equal(b) for a, b in zip(outputs_and_gradients(ours, ins), first))

# FP8

def layer(c, parts, grad=E5M2):
    "What one fused layer computes on the same random numbers: a dict of its output and gradients, with `parts` in FP8"
    run, scaling = fused_ops(baseline(replace(c, layers=1, vocab=64))), Scaling(1, grad, "cuda")
    if parts: to_fp8(run.model, parts, scaling, grad)
    g, m = torch.Generator("cuda").manual_seed(0), run.model.layers[0]
    x, dx, dm = (torch.randn(4, c.seq_len, c.width, device="cuda", generator=g).bfloat16() for _ in range(3))
    for _ in range(2):      # the second time with delayed scales
        x.grad = None; run.model.zero_grad(); x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), scaling.in_step(), scaling.in_pass(): out = m((x, x), run.model.cos, run.model.sin)
        branch, = torch.autograd.grad(out, x, (0*dm, 1e-3*dm), retain_graph=True)   # none for the stream, which would pass it on
        torch.autograd.backward(out, (1e-3*dx, 1e-3*dm))
    return dict(out=out[1].detach(), dx=branch, **{k: p.grad for k, p in m.named_parameters()})

fp8_gpu = pytest.mark.skipif(not has_fp8(), reason="this GPU has no FP8")

@fp8_gpu
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("grad", [E5M2, E4M3], ids=str)
def test_fp8_layer(grad, name):
    "A layer in FP8 is within 18 dB of bf16's output and 17 dB of its gradients, also of the matrices' weights"
    exact, got = (layer(workload(name), parts, grad) for parts in ((), ("heads", "out", "mlp")))
    assert sqnr(exact["out"], got["out"]) >= 18
    for k, v in exact.items(): assert v.ndim < 2 or sqnr(v, got[k]) >= 17, (k, sqnr(v, got[k]))

@fp8_gpu
@pytest.mark.parametrize("name", SIZES)
def test_fp8_layer_repeats_itself(name):
    "Twenty times the same, bitwise, with all parts in FP8 and plain attention (PyTorch's kernels add up in any order)"
    first = layer(workload(name), ("heads", "out", "mlp"))
    for _ in range(19):
        again = layer(workload(name), ("heads", "out", "mlp"))
        assert all(v.equal(first[k]) for k, v in again.items())

# The model

@pytest.mark.parametrize("preset", presets())
def test_preset_trains(preset):
    "Every preset trains 124m: on one batch seen again, without a warm-up, five finite losses, the last one far lower"
    rungs = parse_rungs(preset)
    step, g = Stepper(build(workload("124m"), rungs)), torch.Generator("cuda").manual_seed(0)
    x = torch.randint(50304, (4, 1025), device="cuda", generator=g)
    losses = [step((x[:, :-1], x[:, 1:])).item() for _ in range(5)]     # the third is recorded, where a rung does that
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 1, losses
    assert abs(losses[0] / math.log(50304) - 1) < .05
    assert math.isfinite(step.evaluate([(x[:, :-1], x[:, 1:])]))

def test_presets_of_an_h200():
    "On Hopper, `fastest` has everything; `smallest` needs less memory than `fastest`, and that less than `safe`"
    if torch.cuda.get_device_capability() < (9, 0): pytest.skip("this GPU is older")
    most = presets()["fastest"]
    assert [r for r in most if r not in ("flash4", "fp8_epilogues")] == ("tf32 bf16 flash fused_ops tied_embedding chunked_ce fp8 "
                                                   "head_groups cuda_graphs fused_adamw direct_update").split()
    assert ("flash4" in most) == bool(version_of("flash-attn-4")) and ("fp8_epilogues" in most) == bool(version_of("quack-kernels"))
    c, gib = workload("124m"), {}
    for k in ("smallest", "fastest", "safe"):
        for _ in range(2): gib[k] = warm_up(make_step(c, presets()[k], 16))[1].peak_gib      # the first time kernels are chosen
    assert gib["smallest"] < gib["fastest"] < gib["safe"], gib

def test_first_loss():
    "The loss of 124m before the first step is within 5% of ln V, in every format"
    c = workload("124m")
    x, y = torch.randint(c.vocab, (2, 4, c.seq_len), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for rungs in ([], ["tf32"], ["bf16", "flash"], ["fp16", "flash"]):
        loss = Stepper(build(c, rungs)).evaluate([(x, y)])
        assert abs(loss / math.log(50304) - 1) < .05, (rungs, loss)

@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_nothing_leaks(half):
    "Building and stepping 124m leaves every setting, also CUDA's, and the random states as they were"
    c = workload("124m")
    x = torch.randint(c.vocab, (2, c.seq_len), device="cuda")
    was = flags()
    step = Stepper(build(c, ["tf32", half, "flash"]))
    for _ in range(3): loss = step((x, x))
    step.evaluate([(x, x)])
    assert loss.isfinite() and not changed(was)
    def fault(model, x, y): model(x, y); raise ArithmeticError
    with pytest.raises(ArithmeticError): Stepper(replace(step.run, loss=fault))((x, x))
    assert not changed(was)

def test_counted_flops():
    "A real naive step does as many FLOPs as are counted on fake tensors, and as many as the convention says"
    c, B = workload("124m"), 2
    step = make_step(c, [], B)()
    step()
    with OpCounter() as real: step()
    flops = [sum(o.flops for o in ops) for ops in (real.ops, count_step(c, [], B))]
    assert flops[0] == flops[1] == pytest.approx(train_flops(c) * B * c.seq_len, rel=1e-6)
    fast = count_step(c, ["tf32", "bf16", "flash"], B)
    matmul = sum(o.flops for o in fast if o.kind == "matrix products")
    assert matmul == pytest.approx(6*matrix_params(c) * B * c.seq_len, rel=1e-6)
    assert {o.fmt for o in fast if o.kind == "matrix products"} == {"bf16"}
    # fused attention computes the scores again in the backward pass: 7 products for the convention's 6
    fused = sum(o.flops for o in fast if o.kind == "fused attention")
    assert fused == pytest.approx(7 * c.layers * c.width * c.seq_len**2 * B, rel=1e-6)

def test_fp16_trains():
    "With float16 and its scaler a small model's loss falls as with bfloat16"
    c = replace(workload("tiny"), layers=2)
    x = torch.randint(c.vocab, (8, c.seq_len), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    def last(half):
        step = Stepper(build(c, ["tf32", half, "flash"]))
        return [step((x[:, :-1], x[:, 1:])).item() for _ in range(40)][-1]
    a, b = last("bf16"), last("fp16")
    assert a < 7 and abs(a - b) < .3

# Out of memory

def test_out_of_memory(tmp_path):
    "A micro-batch that can't fit is halved until it does, and one that is left open is found: the step's tokens stay"
    rows = int(8 * torch.cuda.get_device_properties(0).total_memory / 2**30)       # a 124m sequence takes over 0.4 GiB
    data = tmp_path/"tokens.bin"
    np.random.default_rng(0).integers(0, 50257, int(1.1 * rows * 1024), dtype=np.uint16).tofile(data)
    for batch in (rows, None):
        cfg = TrainConfig(data=str(data), model="124m", rungs="tf32,bf16,flash", step_tokens=rows*1024, micro_batch_size=batch, steps=2, num_evals=1,
                          eval_tokens=1024, sample_tokens=2, name=f"run{batch}", out=str(tmp_path/"runs"))
        trainer, res = train(cfg, progress=False)
        assert 1 < trainer.cfg.micro_batch_size < rows == trainer.cfg.micro_batch_size*trainer.cfg.grad_accum_steps
        assert res["steps"] == 2 and math.isfinite(res["val_loss"])
        del trainer; gc.collect(); torch.cuda.empty_cache()

def test_micro_batch():
    "Naive attention needs smaller pieces than flash attention, and both stay under 72 GiB"
    c, rungs = workload("124m"), ["tf32", "bf16", "flash"]
    naive, flash = micro_batch(c, rungs[:2], 64), micro_batch(c, rungs, 64)
    assert naive < flash and peak_gib(c, rungs[:2], 64, naive) <= 72
    assert not first_that_fits([2*naive], lambda n: peak_gib(c, rungs[:2], 64, n) <= 72)
