"The rungs of notebook 31: attention's other backward pass, attention in FP8, less kept."
import os
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from llm_speedrun.rungs.flash4 import attention8, feed_saving_fp8, mixed_attention, MixedAttention, norm_backward_recompute, NormMatmul
from llm_speedrun.rungs.flash4_ops import attention_forward, flash4_attention_backward, flash4_error, flash4_missing
from llm_speedrun.rungs.fp8 import E4M3, sqnr
from llm_speedrun.rungs.fp8_dynamic_scaling import heads_round, swiglu_keep, swiglu_kept_backward
from llm_speedrun.rungs.fused_ops import swiglu_backward_maths, swiglu_maths
from llm_speedrun.rungs.kernel_ops import runs_kernel
from llm_speedrun.rungs.triton import add_norm_maths, norm_backward_maths
from llm_speedrun.model import naive_attention
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.runs import build
from llm_speedrun.stepper import Stepper
from helpers.tiny_runs import fails, NANO, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16     # the interpreter cuts off bits of bf16
RUNGS, NEW = ["bf16", "flash", "fused_ops", "chunked_ce"], ["flash4", "fp8_attention", "fp8_activations"]
def rand(*shape, dt=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dt)

# Attention

@pytest.mark.parametrize("B, H, K, T, D", [(2, 4, 4, 64, 16), (1, 4, 2, 33, 64), (2, 3, 1, 100, 32), (1, 2, 2, 128, 128)])
def test_attention(B, H, K, T, D):
    "Output and gradients are as near to float64 as PyTorch's in the same type"
    if DEVICE.type == "cuda" and (D < 64 or flash4_missing()): pytest.skip("FlashAttention-4 can't run this here")
    ts = [rand(B, T, h, D, dt=torch.bfloat16, seed=i).transpose(1, 2) for i, h in enumerate((H, K, K))]
    do = rand(B, H, T, D, dt=torch.bfloat16, seed=9)
    def run(f, dt):
        ins = [t.to(dt).requires_grad_() for t in ts]
        o = f(*ins)
        return [o, *torch.autograd.grad(o, ins, do.to(dt))]
    exact, theirs = run(naive_attention, torch.float64), run(lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=H != K), torch.bfloat16)
    for a, b, x in zip(run(MixedAttention.apply, torch.bfloat16), theirs, exact): assert relative_error(a, x) < 2*relative_error(b, x) + 1e-3

def test_attention_is_counted():
    "The counter sees both directions as attention, with half of the square's FLOPs"
    from llm_speedrun.op_counter import count
    def step():
        ts = [torch.empty(2, 4, 32, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        return lambda: MixedAttention.apply(*ts).sum().backward()
    ops = [o for o in count(step) if o.kind == "fused attention"]
    assert [o.flops for o in ops] == [2*2*2*4*32*32*16/2, 5*2*2*4*32*32*16/2]

def test_attention_compiles():
    "A compiler looks into it, without a break"
    ts = [rand(2, 2, 64, 64, dt=torch.bfloat16, seed=i) for i in range(3)]
    if DEVICE.type == "cuda" and flash4_missing(): pytest.skip(flash4_missing())
    f = torch.compile(mixed_attention, backend="aot_eager", fullgraph=True)
    def grads(f):
        ins = [t.clone().requires_grad_() for t in ts]
        return torch.autograd.grad(f(*ins).square().sum(), ins)
    for a, b in zip(grads(f), grads(mixed_attention)): torch.testing.assert_close(a, b, rtol=.02, atol=.02)

@pytest.mark.cuda
def test_attention_repeats():
    "With deterministic algorithms the gradients are the same to the bit"
    if flash4_missing(): pytest.skip(flash4_missing())
    ts, do = [rand(4, 1024, 12, 64, dt=torch.bfloat16, seed=i).transpose(1, 2) for i in range(3)], rand(4, 12, 1024, 64, dt=torch.bfloat16)
    o, lse = attention_forward(*ts)
    torch.use_deterministic_algorithms(True)
    try: a, *others = [flash4_attention_backward(do, *ts, o, lse, True) for _ in range(5)]
    finally: torch.use_deterministic_algorithms(False)
    for b in others: assert all(map(torch.equal, a, b))

def test_kernels_that_fail(monkeypatch):
    "What goes wrong with FlashAttention-4 is said when the run is built, and not in the middle of a step"
    if flash4_missing(): pytest.skip(flash4_missing())
    def broken(*args): raise ImportError("libcudart.so.14: cannot open shared object file")
    monkeypatch.setattr(flash4_attention_backward, "_init_fn", broken)
    flash4_error.cache_clear()
    try:
        with fails(RuntimeError, "rung 'flash4'", "libcudart.so.14", "Leave the rung out"): build(workload("tiny"), ["bf16", "flash4"])
    finally: flash4_error.cache_clear()

@pytest.mark.skipif(bool(flash4_missing()), reason="FlashAttention-4 isn't there, which is said first")
def test_heads_that_dont_fit():
    "Are refused when the run is built"
    with fails(ValueError, "multiple of 8 up to 128, not 4"):
        build(replace(workload("tiny"), width=16, heads=4), ["bf16", "flash4"])

# Attention in FP8

@pytest.mark.parametrize("B, H, K, T, D", [(2, 2, 1, 70, 32), (1, 2, 2, 128, 64), (1, 1, 1, 1, 64)])
def test_attention8(kernels, B, H, K, T, D):
    "The kernel's output and log-sum-exp are those of the rounded numbers; what is rounded has its scale"
    ts = [rand(B, T, h, D, dt=HALF, seed=i).transpose(1, 2) for i, h in enumerate((H, K, K))]
    (q, iq), (k, ik), (v, iv) = (heads_round(t, turn) for t, turn in zip(ts, (False, False, True)))
    back = [q.float()*iq, k.float()*ik, v.mT.float()*iv]
    for t, b in zip(ts, back): assert sqnr(t, b) > (28 if DEVICE.type == "cuda" else 20)
    o, lse = attention8(q, k, v, iq, ik, iv, True)
    wide = [t.repeat_interleave(H//K, 1) if i else t for i, t in enumerate(back)]
    scores = (wide[0] @ wide[1].mT / D**.5).masked_fill(torch.ones(T, T, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    assert o.shape == (B, H, T, D) and sqnr(scores.softmax(-1) @ wide[2], o.float()) > (25 if DEVICE.type == "cuda" else 18)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-3, atol=5e-3)

# Less kept

@pytest.mark.parametrize("N, n", [(8, 32), (5, 100), (3, 33)])
def test_kept_swiglu(kernels, N, n):
    "h is exact, a and b are kept within E4M3's rounding of the row, and gradients are those of what was kept"
    ab, dh = rand(N, 2*n, dt=HALF), rand(N, n, dt=HALF, seed=1)
    h, q, inverse = swiglu_keep(ab)
    back = q.float()*inverse
    assert relative_error(h, swiglu_maths(ab.double())) < 4e-3 and sqnr(ab.float(), back) > (28 if DEVICE.type == "cuda" else 20)
    assert back.abs().amax(1).allclose(ab.float().abs().amax(1), rtol=.1)
    g, w = dh.clone(), dh.double()
    got, want = swiglu_kept_backward(q, inverse, g), swiglu_backward_maths(back.double(), w)
    assert relative_error(got, want) < 5e-3 and relative_error(g, w) < 5e-3

def test_a_row_of_zeros(kernels):
    "Has nothing to be scaled by, and is kept as zeros"
    h, q, inverse = swiglu_keep(torch.zeros(2, 64, device=DEVICE, dtype=HALF))
    assert not h.any() and not q.float().any() and inverse.isfinite().all()

@pytest.mark.parametrize("add", [True, False])
def test_norm_again(kernels, add):
    "The gradients are those of the norm, and the norm is that of the forward pass"
    h, dn, dh, w = rand(37, 96), rand(37, 96, seed=1), rand(37, 96, seed=2) if add else None, rand(96, seed=3)
    _, n, r = add_norm_maths(h, None, w, 1e-6)
    dx, dw, again = norm_backward_recompute(dn, dh, h, w, r)
    for a, b in zip((dx, dw, again), (*norm_backward_maths(dn, dh, h, w, r), n)): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

# What is not finite

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, INF, -INF]

@pytest.fixture(params=["kernel", "PyTorch"])
def where(request, monkeypatch):
    "The device, for kernels; and the CPU, for PyTorch"
    if request.param == "kernel":
        request.getfixturevalue("gpu_casts")
        return DEVICE
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return torch.device("cpu")

def bad_and_good(f, ins, i, at, value):
    "What `f` makes of tensors `ins` whose i-th has `value` at an index, and of those without"
    ins = [t.clone() for t in ins]
    good = f(*ins)
    ins[i][at] = value
    return zip(f(*ins), good)

@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("turn", [False, True])
def test_a_head_that_is_not_finite_shows(where, turn, value):
    "Nothing of it is finite in 8 bits, and the other heads are as they were"
    def rounded(t):
        q, inverse = heads_round(t.transpose(1, 2), turn)
        return [q.float()*inverse]
    for bad, good in bad_and_good(rounded, [rand(2, 70, 3, 32, dt=HALF).to(where)], 0, (1, 66, 2, 7), value):
        assert not bad[1, 2].isfinite().any() and good.isfinite().all()
        assert bad[0].equal(good[0]) and bad[1, :2].equal(good[1, :2])

@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("i", range(3), ids="qkv")
@pytest.mark.parametrize("T, row", [(1, 0), (70, 0), (70, 69)])
def test_attention8_of_what_is_not_finite(where, T, row, i, value):
    "No output of such a head is finite, nor of any that shares it, and the other sequence is as it was"
    if T == 1 and not runs_kernel(torch.empty(0, device=where)): pytest.skip("PyTorch's attention for CPUs makes 0 of NaN in sequences under 16")
    def attend(q, k, v):
        (q, iq), (k, ik), (v, iv) = (heads_round(t.transpose(1, 2), turn) for t, turn in zip((q, k, v), (False, False, True)))
        return attention8(q, k, v, iq, ik, iv, True)
    ins = [rand(2, T, h, 64, dt=HALF, seed=j).to(where) for j, h in enumerate((2, 1, 1))]
    (o, good), (lse, _) = bad_and_good(attend, ins, i, (1, row, 0, 7), value)
    assert not o[1, 0].isfinite().any() and good.isfinite().all() and o[0].equal(good[0])
    assert i == 2 or not lse[1, 0].isfinite().any()
    if i: assert not o[1, 1].isfinite().any()
    else: assert o[1, 1].equal(good[1, 1])

def test_attention8_of_scores_that_overflow(gpu_casts):
    "A row whose scores are all minus infinity has no softmax. What is masked must not take its place"
    one, large = torch.ones(1, 1, 70, 64, device=DEVICE).to(E4M3), torch.full((1, 1, 1, 1), 1e30, device=DEVICE)
    o, _ = attention8(one, (-one.float()).to(E4M3), one.mT.contiguous(), large, large, large/1e30, True)
    assert o.isnan().all()

@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("col", [4, 99, 100, 150])
def test_a_row_that_is_not_finite_shows(where, col, value):
    "In h, in all that is kept of it, and in all that its way back makes of that; other rows are as they were"
    def ways(ab, dh):
        (h, q, inverse), again = swiglu_keep(ab), dh.clone()
        return h, q.float()*inverse, swiglu_kept_backward(q, inverse, again), again
    ins, others = [rand(5, 200, dt=HALF).to(where), rand(5, 100, dt=HALF, seed=1).to(where)], [0, 1, 2, 4]
    for bad, good in bad_and_good(ways, ins, 0, (3, col), value):
        assert bad[others].equal(good[others]) and good.isfinite().all() and not bad[3].isfinite().all()
    (h, _), *back = bad_and_good(ways, ins, 0, (3, col), value)
    assert not h[3, col % 100].isfinite() and not any(bad[3].isfinite().any() for bad, _ in back)

@pytest.mark.parametrize("value", VALUES)
def test_gradients_that_are_not_finite_show(where, value):
    "On the way back from what was kept, in the gradients of a and b alone"
    _, *kept = swiglu_keep(rand(5, 200, dt=HALF).to(where))
    (dab, _), (h, good) = bad_and_good(lambda dh: (swiglu_kept_backward(*kept, g := dh.clone()), g), [rand(5, 100, dt=HALF, seed=1).to(where)], 0, (3, 7), value)
    assert dab.isfinite().logical_not().nonzero().tolist() == [[3, 7], [3, 107]] and h.equal(good)

@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("i", range(3), ids=["x", "norm", "product"])
def test_norm_matmul_of_what_is_not_finite(where, i, value):
    "Shows in the output, and in each gradient"
    ins = [t.to(where).requires_grad_() for t in (rand(37, 96), rand(96, seed=3), rand(64, 96, seed=4))]
    with torch.no_grad(): ins[i].view(-1)[40] = value
    h, out = NormMatmul.apply(ins[0], None, ins[1], 1e-6, ins[2])
    grads = torch.autograd.grad(out.square().sum() + h.sum(), ins)
    assert not any(t.isfinite().all() for t in (out, *grads))

SMALL = replace(NANO, vocab=64, layers=1, width=32, heads=2, kv_heads=1, hidden=32)
WEIGHTS = [f"layers.0.{n}.weight" for n in "input_layernorm self_attn.k_proj self_attn.v_proj mlp.up_proj mlp.down_proj".split()]

def refuses_bad_weights(step, batch, names, values):
    """After a good step, none with a value among the weights is taken, nor is the loss finite in an evaluation. One that is
    infinite in the product of v or up gives infinite activations to what rounds them"""
    step(batch)
    assert step.loss.isfinite() and step.norm.isfinite()
    for name in names:
        w = step.run.model.get_parameter(name).data.view(-1)
        for value in values:
            was, w[5] = w[5].clone(), value
            before = [p.detach().clone() for p in step.params]
            step(batch)
            assert not step.loss.isfinite() and not step.norm.isfinite(), (name, value)
            assert not torch.tensor(step.evaluate([batch])).isfinite(), (name, value)
            assert all(torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(step.params, before))
            w[5] = was

@pytest.mark.parametrize("where, rung", [*(pytest.param("kernel", r, marks=pytest.mark.slow) for r in ("fp8_attention", "fp8_activations")), *(("PyTorch", r) for r in NEW)], indirect=["where"])
def test_a_step_with_a_bad_weight_is_not_taken(where, rung):
    "With any of these rungs, and its loss shows it"
    if DEVICE.type == "cuda": pytest.skip("at real sizes below")
    step = GuardedStepper(build(SMALL, RUNGS + [rung]))
    batch = torch.randint(64, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    refuses_bad_weights(step, batch, WEIGHTS, VALUES if os.environ["TRITON_INTERPRET"] == "0" else [NAN]) # in the interpreter a step takes seconds

@pytest.mark.cuda
@pytest.mark.parametrize("more", [[], ["cuda_graphs"]], ids=["", "recorded"])
@pytest.mark.parametrize("rung", NEW)
def test_the_kernels_in_a_bad_step(rung, more):
    "124m's layers"
    if rung != "fp8_activations" and flash4_missing(): pytest.skip(flash4_missing())
    c = replace(workload("124m"), layers=2)
    step = GuardedStepper(build(c, RUNGS + [rung, *more]))
    batch = torch.randint(c.vocab, (2, 4, c.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    for _ in range(3): step(batch)
    refuses_bad_weights(step, batch, [n.replace(".0.", ".1.") for n in WEIGHTS], [NAN, INF])

# The rungs

@pytest.mark.parametrize("rung, least", [("flash4", 40), ("fp8_attention", 15), ("fp8_activations", 20)])
def test_gradients(rung, least):
    "Of the whole model, beside those of the run without the rung, in dB; weights after a step are near"
    if rung != "fp8_activations" and flash4_missing(): pytest.skip(flash4_missing())
    def grads(rungs):
        step = Stepper(build(replace(workload("tiny"), layers=2), rungs))
        step.update = lambda n: None
        x, y = torch.randint(1024, (2, 2, 33), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
        step((x, y))
        return {k: p.grad.float() for k, p in step.run.model.named_parameters()}
    a, b = grads(RUNGS), grads(RUNGS + [rung])
    for k in a: assert sqnr(a[k], b[k]) > least, (k, sqnr(a[k], b[k]))

def test_what_is_kept():
    "`fp8_activations` keeps no norm, and gate and up in 8 bits"
    def kept(rungs):
        saved, run = [], build(replace(workload("tiny"), layers=1), rungs)
        x = torch.randint(1024, (2, 64), device=DEVICE)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t): Stepper(run)((x, x))
        wide = [t.dtype for t in saved if t.shape == (128, 2*run.model.config.hidden)]
        return wide, sum(t.nbytes for t in {t.data_ptr(): t for t in saved}.values())
    (wide, n), (less, m) = kept(RUNGS), kept(RUNGS + ["fp8_activations"])
    assert E4M3 not in wide and E4M3 in less and m < n - 128*128*2*2

@pytest.mark.parametrize("rungs", [["fp8_activations", "bf16", "fused_ops"], ["flash4", "bf16", "flash"]])
def test_any_order(rungs):
    "They come after what they change, wherever they stand in the list"
    if "flash4" in rungs and flash4_missing(): pytest.skip(flash4_missing())
    layer = build(NANO, rungs).model.layers[0]
    assert layer.feed is feed_saving_fp8 or layer.attend is mixed_attention

def test_they_go_together():
    "All of them in one run, which trains"
    step = Stepper(build(replace(workload("tiny"), layers=2), RUNGS + ["fp8_activations"] + ["flash4"]*(not flash4_missing())))
    x, y = torch.randint(1024, (2, 4, 64), device=DEVICE)
    losses = [step((x, y)).item() for _ in range(8)]
    assert losses[-1] < losses[0] - .1

@pytest.mark.parametrize("rungs, why", [(["flash4"], "add the rung bf16"), (["fp8_attention"], "builds on 'bf16'"),
                                        (["bf16", "fp8_activations"], "builds on 'fused_ops'"), (["bf16", "fused_ops", "fp8_activations", "fp8"], "fp8_activations")])
def test_errors(rungs, why):
    if flash4_missing() and "fp8_activations" not in rungs: pytest.skip("FlashAttention-4 isn't there, which is said first")
    with fails(ValueError, why): build(NANO, rungs)

@pytest.mark.parametrize("layout", ["B H T D", "B T H D", "a slice"])
def test_gradients_lie_as_a_compiler_is_told(layout):
    "The fake implementation's strides are those of the real one: compiled code relies on them"
    new = lambda H: torch.randn(2, 16, H, 8, device=DEVICE).bfloat16().transpose(1, 2)
    if layout == "B H T D": tensors = [new(H).contiguous() for H in (4, 2, 2)]
    elif layout == "B T H D": tensors = [new(H) for H in (4, 2, 2)]
    else: tensors = [new(8)[:, a:b] for a, b in ((0, 4), (4, 6), (6, 8))]
    o, lse = attention_forward(*tensors)
    args = torch.randn_like(o), *tensors, o, lse, True
    real = flash4_attention_backward(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = flash4_attention_backward(*(mode.from_tensor(t) if torch.is_tensor(t) else t for t in args))
    assert [t.stride() for t in real] == [t.stride() for t in fake]
