"""FP8: each rounding kernel against PyTorch, what is clipped and what isn't finite, scales and their history, gradients
against float64 and what must not pass there, whole runs, and the GPU at real shapes."""
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import pytest, torch, torch.nn.functional as F
import llm_speedrun.rungs.fp8 as plain, llm_speedrun.rungs.fp8_kernels as kernel_module, llm_speedrun.rungs.fused_fp8 as module
import llm_speedrun.rungs.fp8_loss as loss_module, llm_speedrun.rungs.fp8_parts as parts_module
from llm_speedrun.rungs.chunked_ce import ChunkedCE, linear_cross_entropy
from llm_speedrun.rungs.fp8 import E4M3, E5M2, LARGEST, TORCHAO_RECIPES, choose_layers, converted, mm8, sqnr
from llm_speedrun.rungs.fp8_kernels import (by_kernel, heads_quantize, LayerScales, SLOT_NAMES, norm_quantize, quantize, quantize_weights, Scaling,
                                            sixteens, swiglu_backward_quantize, swiglu_quantize)
from llm_speedrun.rungs.fp8_loss import (HALF_MOST, Fp8LinearCE, logits_quantize, loss_lse, random_bits, random_bits_maths, round_stochastically,
                                         round_stochastically_maths)
from llm_speedrun.rungs.fp8_parts import choose_parts, misrounded, needs_fp8, rounding_cases, rounds_wrong
from llm_speedrun.rungs.fused_fp8 import FP8_PARTS
from llm_speedrun.rungs.fused_ops import swiglu_backward_maths, swiglu_maths
from llm_speedrun.rungs.qk_rope import qk_rope_backward_maths
from llm_speedrun.rungs.kernel_ops import jit, runs_kernel, tl
from llm_speedrun.measure import version_of
from llm_speedrun.roofline import has_fp8
from llm_speedrun.op_counter import main_format
from llm_speedrun.model import rope, rope_table
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.runs import Run, baseline, build
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Stepper, enter_all
from helpers.tiny_runs import NANO, relative_error

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BASE = ["bf16", "flash", "fused_ops", "chunked_ce"]
fp8_gpu = pytest.mark.skipif(not has_fp8(), reason="this GPU has no FP8")

def rand(*shape, dt=torch.bfloat16, seed=0):
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dt)

def slot(scale=16.): return torch.full((1,), scale, device=DEVICE), torch.zeros(1, device=DEVICE)

# The kernels

def normed(x, y, w):
    h = (x if y is None else (x.float() + y.float()).to(x.dtype)).float()
    return h * torch.rsqrt(h.pow(2).mean(-1) + 1e-6)[:, None] * w

def heads_inputs(B, T, H, K, D):
    cos, sin = (t.to(DEVICE) for t in rope_table(T, D, 1e4))
    ins = *(rand(B, T, h, D, seed=i) for i, h in enumerate((H, K, K))), rand(B, T, H + 2*K, D, seed=4)
    return *ins, rand(D, dt=torch.float32, seed=5), rand(D, dt=torch.float32, seed=6), cos, sin

def heads_case(*sizes):
    ins = heads_inputs(*sizes)
    want = qk_rope_backward_maths(*(t.float() for t in ins), 1e-6)[0].flatten(0, 1).flatten(1)
    return partial(heads_quantize, *ins, 1e-6), (E5M2,), want, E5M2

def cases(N, C):
    "For each rounding operation: what to call, its arguments after the maximum, the FP32 numbers to round, the format"
    x, y, w, ab = rand(N, C), rand(N, C, seed=1), rand(C, dt=torch.float32, seed=2), rand(N, 2*C, seed=3)
    return {"quantize e4m3": (partial(quantize, x), (E4M3,), x.float(), E4M3),
            "quantize e5m2": (partial(quantize, x), (E5M2,), x.float(), E5M2),
            "weights": (partial(quantize_weights, [x.float(), y.float()]), (), torch.cat([x, y]).float(), E4M3),
            "norm": (partial(norm_quantize, x, None, w, 1e-6), (), normed(x, None, w), E4M3),
            "add, norm": (partial(norm_quantize, x, y, w, 1e-6), (), normed(x, y, w), E4M3),
            "swiglu": (partial(swiglu_quantize, ab), (), swiglu_maths(ab.float()), E4M3),
            "swiglu backward": (partial(swiglu_backward_quantize, ab, x), (E5M2,),
                                swiglu_backward_maths(ab.float(), x.float()), E5M2)}

def spacing(q):
    "How far apart the 8-bit numbers are around each of `q`, in their own unit (to the interpreter subnormal ones are zero)"
    bits, step = (3, 2.**-9 if GPU else 2.**-6) if q.dtype == E4M3 else (2, 2.**-16 if GPU else 2.**-14)
    return (torch.frexp(q.float().abs())[1].float() - 1 - bits).exp2().clamp(min=step)

def right(case, scale=4., off_by_one=.02):
    """Both copies are the number rounded, or where FP32 ends up at the middle between two its neighbour, which on a GPU happens
    to a share `off_by_one` of them at most; the maximum is noted"""
    op, more, want, dt = case
    s, a = slot(scale)
    q, t = op(s, a, *more)[-2:]
    assert q.dtype == t.dtype == dt and q.is_contiguous() and t.is_contiguous()
    assert torch.equal(q.view(torch.uint8).T, t.view(torch.uint8))
    assert not q[len(want):].float().any()
    q, exact = q[:len(want)], (want*scale).clamp(-LARGEST[dt], LARGEST[dt])
    off, near = (q.float() - exact).abs(), exact.to(dt)
    fine = off <= (.51 if GPU else 1.02)*spacing(near) + (2**-8 if GPU else 2**-6)*exact.abs()     # what was bf16 before
    if not GPU: fine |= (2*q.float() - exact).abs() <= 1.1*spacing(near)     # the interpreter loses the carry into the exponent
    assert fine.all()
    if GPU: assert (q.float() != near.float()).float().mean() < off_by_one
    torch.testing.assert_close(a[0], want.abs().max(), rtol=1e-2, atol=0)

OPS = list(cases(16, 16))

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("N, C", [(16, 16), (48, 80), (144, 272), (16, 400)])
@pytest.mark.parametrize("op", OPS)
def test_rounding(op, N, C): right(cases(N, C)[op])

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("N, C", [(1, 1), (33, 70), (64, 70), (130, 24)])
@pytest.mark.parametrize("op", OPS)
def test_odd_widths(op, N, C):
    "What the tensor cores couldn't multiply anyway is rounded too, by PyTorch"
    assert not by_kernel(rand(N, C), C)
    right(cases(N, C)[op], off_by_one=.05) # they were rounded to bf16 before

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("N, C", [(1, 16), (33, 80), (130, 48)])
@pytest.mark.parametrize("op", OPS)
def test_any_number_of_rows(op, N, C):
    "Kernels fill up with rows of zeros to a multiple of 16, weights apart, whose number of rows is the model's"
    if op == "weights": N = sixteens(N)
    assert by_kernel(rand(N, C), C) or not runs_kernel(rand(1))
    case = cases(N, C)[op]
    right(case)
    assert len(case[0](*slot(), *case[1])[-2]) % 16 == 0

CASES = replace(NANO, width=64, heads=2, kv_heads=1, hidden=96)     # kernels take all of them

def strided(x): return torch.stack([x, x + 1], -1)[..., 0]
def transposed(x): return x.mT.contiguous().mT
def expanded(x): return x.flatten()[:1].expand(x.shape)     # as the gradient of a sum

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", [strided, transposed, expanded])
@pytest.mark.parametrize("name", rounding_cases(CASES))
def test_any_strides(name, form):
    "Each operation rounds a tensor of any strides as it does its contiguous copy"
    f, ins = rounding_cases(CASES)[name]
    ins = [t.to(DEVICE) if torch.is_tensor(t) else [w.to(DEVICE) for w in t] for t in ins]
    def rounded(change):
        new = [change(t) if torch.is_tensor(t) and t.ndim > 1 else [change(w) for w in t] if isinstance(t, list) else t for t in ins]
        (scale, amax) = slot()
        return [t.float() for t in f(*new, scale, amax)] + [amax]
    for a, b in zip(rounded(form), rounded(lambda t: form(t).contiguous())): torch.testing.assert_close(a, b)

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("B, T, H, K, D", [(2, 24, 4, 2, 16), (1, 80, 2, 2, 32), (1, 48, 3, 1, 64), (1, 7, 3, 1, 8), (2, 8, 2, 2, 4)])
def test_heads(B, T, H, K, D): right(heads_case(B, T, H, K, D))

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", range(3), ids=["queries", "keys", "values"])
def test_each_head_counts(kind):
    "In the maximum and in the gradients of the norms' weights: here the first of several heads is far larger than the others"
    ins = heads_inputs(3, 23, 3, 2, 16)
    ins[kind][:, :, 0] *= 1000
    s, a = slot(1.)
    dw = heads_quantize(*ins, 1e-6, s, a, E5M2)[0]
    dqkv, exact = qk_rope_backward_maths(*(t.double() for t in ins), 1e-6)
    torch.testing.assert_close(a[0].double(), dqkv.abs().max(), rtol=1e-2, atol=0)
    assert relative_error(dw, exact) < 1e-5

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dt", [E4M3, E5M2], ids=str)
def test_too_large_is_clipped(dt):
    "What a stale scale makes too large becomes the largest number, never NaN or infinity, and is noted for the next step"
    x = rand(48, 80)*100
    s, a = slot(1e4)
    q, t = quantize(x, s, a, dt)
    assert q.float().abs().max() == t.float().abs().max() == LARGEST[dt] and a[0] == x.float().abs().max()

# What is not finite

NAN, INF = float("nan"), float("inf")

def poisoned(ins):
    "For each floating-point tensor among `ins`, also in lists: `ins` on the device with this tensor's 37th number set"
    flat, spec = torch.utils._pytree.tree_flatten(ins)
    for i, t in enumerate(flat):
        if not t.is_floating_point(): continue
        def put(value, i=i, flat=flat):
            new = [t.clone() for t in flat]
            new[i].view(-1)[min(37, new[i].numel() - 1)] = value
            return torch.utils._pytree.tree_unflatten(new, spec)
        yield put

@pytest.mark.usefixtures("gpu_casts")
@pytest.mark.parametrize("name, value", [(n, v) for n in rounding_cases(CASES) if n != "logits_quantize" for v in (NAN, INF)] + [("quantize", -INF)])
def test_what_is_not_finite_shows(name, value, monkeypatch):
    "NaN stays NaN in both copies, just where PyTorch has it, and no maximum of what isn't finite is finite"
    f, ins = rounding_cases(CASES)[name]
    def results(ins, device):
        ins = torch.utils._pytree.tree_map(lambda t: t.to(device), ins)
        scale, amax = torch.full((1,), 16., device=device), torch.zeros(1, device=device)
        return *(t.float().cpu().isnan() for t in f(*ins, scale, amax)[-2:]), amax.cpu()
    for put in poisoned(ins):
        q, t, amax = results(put(value), DEVICE)
        with monkeypatch.context() as m:
            m.setenv("TRITON_INTERPRET", "0")
            want_q, _, want_amax = results(put(value), "cpu")
        assert q.equal(want_q) and t.equal(q.T) and not amax.isfinite() and not want_amax.isfinite()
        assert q.any() or value == value

@pytest.mark.usefixtures("gpu_casts")
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("options", [(-100, 0., 0.), (-100, .01, 0.), (-100, 0., 5.)], ids=str)
def test_logits_that_are_not_finite_show(options, value):
    "The row's loss isn't finite and its gradient NaN; other rows are as they were. A soft cap makes infinity finite"
    if options[2] and value == INF: pytest.skip("the cap is its value")
    x, y = rand(48, 80), torch.arange(48, device=DEVICE)
    x[5, 7] = value
    loss, lse = loss_lse(x, y, *options)
    q, t = logits_quantize(x, y, lse, *options)
    bad = q.float().isnan().any(1)
    assert not loss[5].isfinite() and loss.isfinite().sum() == 47 and bad[5] and bad.sum() == 1 and t.float().isnan().T.equal(q.float().isnan())

@pytest.mark.usefixtures("kernels")
def test_a_maximum_only_rises():
    s, a = slot()
    a.fill_(1e3); quantize(rand(48, 80), s, a, E4M3)
    assert a[0] == 1e3

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [(-100, 0., 0.), (3, 0., 0.), (-100, .01, 0.), (-100, 0., 5.), (3, .01, 5.)], ids=str)
def test_logits(options):
    "Loss, log-sum-exp and gradient of each row are autograd's"
    ignore, z, cap = options
    x, y = 3*rand(48, 80, dt=torch.float32), torch.randint(8, (48,), device=DEVICE)
    leaf = x.clone().requires_grad_()
    capped = cap*torch.tanh(leaf/cap) if cap else leaf
    lse = capped.logsumexp(1)
    each = (lse - capped.gather(1, y[:, None])[:, 0] + z*lse**2) * (y != ignore)
    each.sum().backward()
    loss, got_lse = loss_lse(x, y, *options)
    torch.testing.assert_close(loss, each.detach(), rtol=1e-4, atol=1e-4)
    q, t = logits_quantize(x, y, got_lse, *options)
    assert torch.equal(q.view(torch.uint8).T, t.view(torch.uint8))
    assert sqnr(leaf.grad, q.float()/HALF_MOST) > (24 if GPU else 14)

def bits_kernel(lse_ptr, y_ptr, x_ptr, r_ptr, q_ptr, V, N: tl.constexpr, COLS: tl.constexpr):
    offs_m = tl.arange(0, N)
    offs_n = tl.arange(0, COLS)
    mask = (offs_m >= 0)[:, None] & (offs_n < V)[None, :]
    offs = offs_m[:, None]*V + offs_n[None, :]
    r = random_bits(tl.load(lse_ptr + offs_m), tl.load(y_ptr + offs_m), offs_n)
    tl.store(r_ptr + offs, r.to(tl.int32), mask=mask)
    tl.store(q_ptr + offs, round_stochastically(tl.load(x_ptr + offs, mask=mask, other=0.), r), mask=mask)

@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(not version_of("triton"), reason="a kernel")
def test_chance_is_the_same_in_pytorch():
    "To the bit, for targets that are no tokens too; a row that isn't finite gets none, and its NaN stays one"
    lse, y = rand(32, dt=torch.float32) + 11, torch.randint(-2**20, 2**20, (32,), device=DEVICE)
    x = rand(32, 50, dt=torch.float32)*torch.logspace(-4, 4, 50, device=DEVICE)
    lse[3], lse[4], x[3, 4], x[5] = NAN, INF, NAN, 0
    r, q = torch.empty(32, 50, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    jit(bits_kernel)[(1,)](lse, y, x, r, q, 50, N=32, COLS=64)
    exact = random_bits_maths(lse, y, 50)
    assert r.equal(exact.int()) and len(r.unique()) > 1400 and not r[3:5].any()
    torch.testing.assert_close(q.to(E5M2).float(), round_stochastically_maths(x, exact).float(), rtol=0, atol=0, equal_nan=True)
    assert q[3, 4].isnan() and q.isnan().sum() == 1 and not q[5].any()

def test_chance_has_no_pattern_over_tokens():
    "Uniform, and rows, whose gradients are summed up, don't know of each other; nor do neighbours in a row lie together"
    r = random_bits_maths(rand(4096, dt=torch.float32) + 11, torch.randint(1000, (4096,), device=DEVICE), 256).double()/2**21
    z = (r - .5)*12**.5
    assert abs(z.mean()) < .02 and abs(z.std() - 1) < .01 and z.mean(0).abs().max() < 6/4096**.5
    for a, b in ((z[1:], z[:-1]), (z[16:], z[:-16])): assert abs((a*b).mean()) < .045 # six deviations: a row's places all have one start
    assert torch.histc(r[:, 7], 64).sub(64).abs().max() < 6*8 and (r[:, 1:] - r[:, :-1]).abs().min() > .3

def by_nearest(x, r): return x.to(E5M2)
@pytest.mark.parametrize("rounded, fair", [(round_stochastically_maths, True), (by_nearest, False)])
def test_rounding_has_no_bias(rounded, fair):
    "Each normal number that fp16 can hold is the mean over all bits to add; rounding to nearest is not"
    x = torch.arange(0x0400, 0x7B01, dtype=torch.int16).view(torch.half).float()
    for v in (x, -x):
        mean = sum(rounded(v, torch.full((len(v),), i << 13)).double() for i in range(256))/256
        assert mean.equal(v.double()) is fair

# Scales

def test_a_scale_follows_its_history():
    "It is made from the largest of the last steps, and forgets what is older"
    s = Scaling(1, E5M2, DEVICE, history=3)
    seen = []
    for amax in (1., 8., 2., 1., 1., 0.):
        with s.in_step(), s.in_pass(): s.forward_max[0][0] = amax
        seen.append(s.scale[0, 0].item())
    with s.in_step(), s.in_pass(): pass
    assert seen + [s.scale[0, 0].item()] == [1., 448., 56., 56., 56., 224., 448.]

def count_clipped(slot, maxima, **how):
    "What is counted after each step that notes these maxima for a slot"
    s, seen = Scaling(1, E5M2, DEVICE, history=1, **how), []
    for amax in maxima:
        with s.in_step(), s.in_pass(): (s.forward_max, s.backward_max)[slot[0] == "d"][0][SLOT_NAMES.index(slot)] = amax
        seen.append(s.clipped.item())
    return seen

@pytest.mark.parametrize("slot, maxima, seen", [
    ("n1", [1., 2., 2., 2.08, 1.], [0, 0, 1, 1, 2]), # 3.5% more is rounded down to the largest number
    ("dm", [1., 1.07, 1.15, 1., 1.], [0, 0, 0, 1, 1]), # E5M2's steps are wider
    ("ab", [1., 1.9, 3.8, 1., 1.], [0, 0, 0, 1, 1]), # what is noted is twice the largest number that was stored
    ("n1", [1., torch.inf, 1., 2., 1.], [0, 0, 0, 0, 1])], ids=str) # a step that is not taken clips nothing
def test_what_is_clipped_is_counted(slot, maxima, seen): assert count_clipped(slot, maxima) == seen

def test_scales_found_just_in_time_clip_nothing(): assert count_clipped("n1", [1., 5., 2., 1.], delayed=False) == [0]*4

def test_the_count_goes_on_with_a_run():
    a, b = (Scaling(1, E5M2, DEVICE) for _ in range(2))
    a.clipped += 3
    b.load_state_dict({k: v.clone() if torch.is_tensor(v) else v for k, v in a.state_dict().items()})
    assert b.clipped == 3

def test_an_evaluation_leaves_no_trace():
    "Neither in the scales nor in the maxima, and with the same loss twice"
    step = Stepper(build(NANO, BASE + ["fp8"]))
    b = tokens()
    for _ in range(3): step(b)
    s = step.run.model.layers[0].scales.scaling
    def state(): return [t.clone() for t in (s.scale, s.past, *s.forward_max, *s.backward_max)]
    before, first = state(), step.evaluate([b])
    assert step.evaluate([b]) == first and all(map(torch.equal, state(), before))

def scaling_of(run): return dict(run.stateful)["fp8"]

def test_a_history_of_steps():
    "Scales are made once an optimizer step, however many micro-batches it has, and from all of them"
    step = Stepper(build(NANO, BASE + ["fp8"]))
    scaling, scales = scaling_of(step.run), []
    scaling.update = lambda: (type(scaling).update(scaling), scales.append(scaling.scale.clone()))
    batches = [tokens(seed=i) for i in range(4)]
    for _ in range(3): step(*batches)
    assert len(scales) == 2 and (scaling.past.amax((1, 2)) > 0).sum() == 2
    first = []
    for b in batches:
        alone = Stepper(build(NANO, BASE + ["fp8"]))
        alone(b); first.append(scaling_of(alone.run).maxima())
    assert torch.equal(torch.stack(first).amax(0)[:, :2], scaling.past[1][:, :2])   # of the first layers' inputs and weights

def test_the_first_step_finds_its_scales_once():
    "Its first micro-batch just in time; the next ones, which may be recorded or compiled, take these scales"
    step, jit = Stepper(build(NANO, BASE + ["fp8"])), []
    scaling, loss = scaling_of(step.run), step.run.loss
    step.run = replace(step.run, loss=lambda *args: jit.append(scaling.jit) or loss(*args))
    for _ in range(2): step(tokens(), tokens(), tokens())
    assert jit == [True] + [False]*5

def test_an_evaluation_after_a_resume():
    "It has the scales that were saved, not some of its own: the same loss to the bit"
    step, b = Stepper(build(NANO, BASE + ["fp8"])), tokens()
    for i in range(3): step(tokens(seed=i))
    again = build(NANO, BASE + ["fp8"])
    again.model.load_state_dict(step.run.model.state_dict())
    scaling_of(again).load_state_dict(scaling_of(step.run).state_dict())
    assert Stepper(again).evaluate([b]) == step.evaluate([b])

@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-30, 0., 1e30, 3e38])
def test_a_scale_is_finite(amax):
    "Also for the smallest numbers: 0 times infinity would be NaN"
    s = Scaling(1, E5M2, DEVICE)
    s.seen = True; s.forward_max[0].fill_(amax); s.update()
    assert s.scale.isfinite().all() and s.inverse.isfinite().all() and (s.scale*amax <= 57344*1.001).all()

@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_step_leaves_no_trace(value):
    "Neither its maximum that isn't finite nor the others that came with it are in the history"
    s = Scaling(2, E5M2, DEVICE, history=3)
    def step(a, b):
        with s.in_step(), s.in_pass(): s.forward_max[0][0], s.backward_max[1][3] = a, b
        return s.bad().item()
    assert not step(2., 3.) and not step(1., 1.)
    assert step(1e6, value) and step(value, 1e6) and not step(4., 4.)
    with s.in_step(): pass
    assert s.past[:, 0, 0].tolist() == [4., 1., 2.] and s.past[:, 1, 3].tolist() == [4., 1., 3.]

# A whole step with a number that is not finite

HEADS = replace(NANO, vocab=64, layers=1, width=32, heads=2, kv_heads=1, hidden=32, seq_len=16)     # kernels take all of its sizes
WEIGHTS = ["embed_tokens.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.o_proj.weight",
           "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight"]

@pytest.mark.usefixtures("gpu_casts")
@pytest.mark.parametrize("value, name, delayed", [(v, n, True) for v in (NAN, INF) for n in WEIGHTS] + [(-INF, WEIGHTS[3], False)])
def test_a_step_with_a_bad_weight_is_not_taken(name, value, delayed):
    "By no tensor, and nothing of it goes into the history"
    step = GuardedStepper(RUNGS["fp8"](build(HEADS, BASE), delayed=delayed))
    b = tokens(1, HEADS)
    step(b)
    step.run.model.get_parameter(name).data.view(-1)[5] = value
    weights = [p.detach().clone() for p in step.params]
    step(b)
    assert not step.norm.isfinite()
    assert all(torch.equal(p, w) for p, w in zip(step.params, weights) if w.isfinite().all())
    scaling = scaling_of(step.run)
    past = scaling.past.clone()
    scaling.update()
    assert scaling.past.equal(past)

def test_runs_share_no_scales():
    base = build(NANO, BASE)
    a, b = (RUNGS["fp8"](base) for _ in range(2))
    assert a.model.layers[0].scales.scaling is not b.model.layers[0].scales.scaling
    assert a.with_model(lambda m: None).model.layers[0].scales.scaling is a.model.layers[0].scales.scaling

# Gradients against float64, each branch alone and the whole model

BARS = dict(output=18, gradient=17)     # dB of signal to noise
SMALL = replace(NANO, vocab=512, layers=2, width=128, heads=4, kv_heads=2, hidden=256, seq_len=64)
N_D = 4, SMALL.seq_len, SMALL.width

def weights(*shapes): return [(rand(*s, dt=torch.float32, seed=10 + i)*.05).requires_grad_() for i, s in enumerate(shapes)]
def norm_weight(n): return (1 + .1*rand(n, dt=torch.float32, seed=9)).requires_grad_()
def rms(h, w): return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w

def exact_mlp(x, y, w, wg, wu, wd):
    n = rms(x + y, w)
    return x + y, (F.silu(n @ wg.T) * (n @ wu.T)) @ wd.T

def exact_heads(x, y, w, wq, wk, wv, qn, kn):
    cos, sin = (t.to(DEVICE).double() for t in rope_table(SMALL.seq_len, SMALL.head_dim, 1e4))
    n, split = rms(x + y, w), lambda t: t.unflatten(-1, (-1, SMALL.head_dim)).transpose(1, 2)
    q, k = (rope(rms(split(n @ a.T), b), cos, sin).transpose(1, 2) for a, b in ((wq, qn), (wk, kn)))
    return x + y, q, k, split(n @ wv.T).transpose(1, 2)

def branch_cases():
    "Name -> a function in FP8 of its inputs and its slots, the same in float64, the inputs"
    d, H, K, D, F_ = SMALL.width, SMALL.heads, SMALL.kv_heads, SMALL.head_dim, SMALL.hidden
    x, y = (rand(*N_D, seed=i).requires_grad_() for i in range(2))
    turn = [t.to(DEVICE) for t in rope_table(SMALL.seq_len, D, 1e4)]
    return dict(mlp=(lambda *t: module.Fp8MLP.apply(*t[:6], 1e-6, *t[6:]), exact_mlp,
                     [x, y, norm_weight(d), *weights((F_, d), (F_, d), (d, F_))]),
                heads=(lambda *t: module.Fp8Heads.apply(*t[:8], *(c[:t[0].shape[1]] for c in turn), 1e-6, *t[8:]), exact_heads,
                       [x, y, norm_weight(d), *weights((H*D, d), (K*D, d), (K*D, d)), norm_weight(D), norm_weight(D)]),
                out=(module.Fp8Linear.apply, lambda x, w: x @ w.T, [x, *weights((d, d))]),
                head=(lambda h, w, *s: Fp8LinearCE.apply(h.flatten(0, 1), w, targets()[:h[..., 0].numel()], ChunkedCE(), True, *s),
                      lambda h, w: F.cross_entropy((h @ w.T).flatten(0, 1), targets()), [x, *weights((SMALL.vocab, d))]))

def targets(): return torch.randint(SMALL.vocab, (N_D[0]*N_D[1],), generator=torch.Generator().manual_seed(0)).to(DEVICE)

def gradients(f, ins, stream):
    "Outputs and gradients, where the stream's own gradient is `stream` times one of the others' size"
    out = f(*ins)
    out = out if isinstance(out, tuple) else (out,)
    ups = [rand(*o.shape, dt=torch.float32, seed=20 + i).to(o.dtype) if o.ndim else torch.ones_like(o) for i, o in enumerate(out)]
    if len(out) > 1: ups[0] = ups[0]*stream
    return [*(o.detach() for o in out), *torch.autograd.grad(out, ins, ups)]

def branch_results(name, stream=0.):
    "What a part of the model computes with delayed scales, and what it should: pairs of a bar's name and two tensors"
    f, exact, ins = branch_cases()[name]
    scaling = Scaling(1, E5M2, DEVICE)
    scales = LayerScales(scaling, 0, E5M2)
    for _ in range(2):
        with scaling.in_step(), scaling.in_pass(), torch.autocast(DEVICE.type, torch.bfloat16):
            got = gradients(lambda *t: f(*t, *scales()), ins, stream)
    want = gradients(exact, [t.detach().double().requires_grad_() for t in ins], stream)
    n = len(got) - len(ins)
    return [("output" if i < n else "gradient", a.double(), b) for i, (a, b) in enumerate(zip(got, want))]

def check(kind, got, want, off=.02):
    "Signal to noise, direction, and size along that direction"
    assert sqnr(want, got) >= BARS[kind], (kind, sqnr(want, got))
    assert abs((got*want).sum() / (want*want).sum() - 1) < off, (kind, (got*want).sum() / (want*want).sum())

def check_branch(name):
    for r in branch_results(name): check(*r)

BRANCHES = ["mlp", "heads", "out", "head"]

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", [strided, transposed, expanded])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_takes_any_strides(name, form):
    "As outputs' gradients and as inputs: the same as with contiguous copies of them"
    f, _, ins = branch_cases()[name]
    ins = [t.detach()[:, :4] if t.ndim == 3 else t.detach() for t in ins]
    def results(change):
        new, scaling = [change(t).requires_grad_() if t.ndim == 3 else t.clone().requires_grad_() for t in ins], Scaling(1, E5M2, DEVICE)
        with scaling.in_pass(), torch.autocast(DEVICE.type, torch.bfloat16): out = f(*new, *LayerScales(scaling, 0, E5M2)())
        out = out if isinstance(out, tuple) else (out,)
        ups = [change(rand(*o.shape, dt=torch.float32, seed=30 + i).to(o.dtype)) if o.ndim else o.detach() for i, o in enumerate(out)]
        return [*out, *torch.autograd.grad(out, new, ups)]
    for a, b in zip(results(form), results(lambda t: form(t).contiguous())): torch.testing.assert_close(a, b)

@pytest.mark.parametrize("name", BRANCHES)
def test_each_branch_against_float64(name):
    "Output, and gradients of inputs and weights without what the stream passes on, within the bars, and of the right size"
    check_branch(name)

@pytest.mark.parametrize("name", ["mlp", "heads"])
def test_the_stream_passes_on_its_gradient(name):
    "Beside the branch's: the difference between a large gradient of the stream and none is that gradient, for both summands"
    with_stream, without = (branch_results(name, s) for s in (8., 0.))
    for i in (-6, -5) if name == "mlp" else (-8, -7):
        got, want = (with_stream[i][j] - without[i][j] for j in (1, 2))
        assert sqnr(want, got) > 40

def model_gradients(run, b, warm=1):
    "Parameter -> gradient of a step on `b`, after steps that settle the scales and change no weight"
    step, grads = Stepper(run, clip=float("inf")), {}
    step.apply = lambda: grads.update({n: p.grad.double() for n, p in run.model.named_parameters()})
    for _ in range(warm + 1): step(b)
    return grads

def check_model(parts=list(FP8_PARTS), how={}):
    "Each parameter's gradient in a whole model. The embedding's is that of the head, too"
    config, b = SMALL, tokens(4, SMALL)
    exact = model_gradients(Run(baseline(config).model.double()), b, 0)
    got = model_gradients(RUNGS["fp8"](build(config, BASE), parts=parts, **how), b)
    cosine = lambda a, b: ((a*b).sum() / (a.norm()*b.norm())).item()
    for n, g in exact.items():
        assert cosine(got[n], g) > .98, (n, cosine(got[n], g))
        assert abs(got[n].norm() / g.norm() - 1) < .04, (n, got[n].norm() / g.norm())

@pytest.mark.parametrize("how", [{}, dict(grad="e4m3"), dict(delayed=False)], ids=str)
def test_each_parameter_against_float64(how): check_model(how=how)

def dropped(y): return torch.zeros_like(y)
def swapped(y): return y.roll(len(y)//2, 0)
def doubled(y): return 2*y
def negated(y): return -y
def off(y): return 1.05*y       # as a wrong scale makes it

DX, DW = dict(mlp=("dab", "wab"), heads=("dqkv", "wqkv"), out=("da", "wo")), dict(mlp=("dab", "n2"), heads=("dqkv", "n1"), out=("da", "o"))
MUTATIONS = [(p, DX[p], f) for p in DX for f in (dropped, doubled, negated, off)]
MUTATIONS += [(p, DW[p], f) for p in DW for f in (dropped, swapped, doubled, negated, off)]
MUTATIONS += [("mlp", ("dm", k), f) for k in ("wdown", "h") for f in (dropped, doubled, negated, off)]
WHOLE = [(p, which[p], f) for p in ("mlp", "heads") for which, f in ((DX, dropped), (DX, negated), (DW, swapped), (DW, doubled), (DW, negated))]
mutation_id = lambda v: "-".join(v) if isinstance(v, tuple) else getattr(v, "__name__", v)

@contextmanager
def mutated(slots, change):
    "The product of these two slots comes out changed"
    right = module.matmul
    def wrong(s, a, b, name_a, name_b, **kwargs):
        y = right(s, a, b, name_a, name_b, **kwargs)
        return change(y) if (name_a, name_b) == slots else y
    with pytest.MonkeyPatch.context() as m:
        m.setattr(module, "matmul", wrong)
        yield

@pytest.mark.parametrize("name, slots, change", MUTATIONS, ids=mutation_id)
def test_a_wrong_branch_is_found(name, slots, change):
    "Dropped, swapped, doubled, negated, 5% off: the check above fails"
    with mutated(slots, change), pytest.raises(AssertionError): check_branch(name)

@pytest.mark.parametrize("name, slots, change", WHOLE, ids=mutation_id)
def test_a_wrong_branch_is_found_in_the_model(name, slots, change):
    with mutated(slots, change), pytest.raises(AssertionError): check_model()

def test_wrong_gradients_of_the_head_are_found(monkeypatch):
    "Twice its gradients, or 5% more"
    right = loss_module.mm8
    for factor in (2, 1.05):
        monkeypatch.setattr(loss_module, "mm8", lambda *args, **kw: right(*args, **kw) * (factor if args[0].dtype == E5M2 else 1))
        with pytest.raises(AssertionError): check_branch("head")

# Accumulation

class RecordedLike(torch.autograd.Function):
    "As a recorded pass: gradients with a seed of 1, made in the forward pass, and multiplied by what comes"
    @staticmethod
    def forward(ctx, loss, model, x, y, *params):
        with torch.enable_grad(): value = loss(model, x, y)
        ctx.grads = torch.autograd.grad(value, params)
        return value.detach()
    @staticmethod
    def backward(ctx, g): return None, None, None, None, *torch._foreach_mul(ctx.grads, g)

def recorded_later(loss, plain=2):
    "A loss whose first passes are plain, as `cuda_graphs` makes one"
    passes = []
    def of(model, x, y):
        passes.append(1)
        if len(passes) <= plain: return loss(model, x, y)
        return RecordedLike.apply(loss, model, x, y, *[p for p in model.parameters() if p.requires_grad])
    return of

def matrix_error(n, recorded, steps=3):
    "How far the matrices' gradients of each of the first steps over `n` micro-batches are from bf16's: the worst, dB"
    x, y = tokens(8, SMALL)
    def gradients(run):
        if recorded: run = replace(run, loss=recorded_later(run.loss))
        step, found = Stepper(run, clip=float("inf")), []
        step.apply = lambda: found.append(torch.cat([p.grad.flatten() for p in step.params if p.ndim == 2][1:]))
        for _ in range(steps): step(*zip(x.chunk(n), y.chunk(n)))
        return found
    base = build(SMALL, BASE)
    return min(map(sqnr, gradients(base), gradients(RUNGS["fp8"](build(SMALL, BASE)))))

@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_do_not_depend_on_accumulation(recorded):
    "One, four or eight micro-batches, plain passes or recorded ones after plain ones: the same distance to bf16's"
    errors = [matrix_error(n, recorded) for n in (1, 4, 8)]
    assert min(errors) > 17 and max(errors) - min(errors) < 1.5, errors

def test_a_weighted_backward_pass_would_be_found(monkeypatch):
    "With 1/n sent through the backward pass, a recorded pass clips what plain ones have learned"
    update = Stepper.update
    def weighted(self, x, y, weight):
        with enter_all(self.run.forward_contexts): loss = self.run.loss(self.run.model, x, y) / 8
        loss.backward()
        return loss.detach()*8
    monkeypatch.setattr(Stepper, "forward_backward", weighted)
    monkeypatch.setattr(Stepper, "update", lambda self, n: update(self))
    assert matrix_error(8, False) > 17 and matrix_error(8, True) < 10

# Runs

def tokens(n=2, config=NANO, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return tuple(torch.randint(config.vocab, (2, n, config.seq_len), device=DEVICE, generator=g))

def losses(run, n=4):
    step = Stepper(run)
    return [step(tokens(), tokens()).item() for _ in range(n)]

@pytest.mark.parametrize("how", [{}, dict(grad="e4m3"), dict(delayed=False), dict(parts=["mlp"]), dict(parts=["head"]),
                                 dict(parts=["heads", "out"])], ids=str)
def test_a_run_learns_as_bf16_does(how):
    "Over micro-batches, in every form: losses within 1% of bf16's"
    base = build(NANO, BASE)
    assert losses(RUNGS["fp8"](build(NANO, BASE), **how)) == pytest.approx(losses(base), rel=.01)

@pytest.mark.parametrize("more", [["checkpoint"], ["selective_checkpoint"], ["compile"], ["cuda_graphs"]], ids=str)
def test_with_other_rungs(more):
    "Compiled, recomputed or recorded: the losses of the run without"
    config = replace(NANO, layers=3)
    want, got = (losses(build(config, BASE + ["fp8"] + m)) for m in ([], more))
    assert got == pytest.approx(want, rel=1e-2 if GPU else 2e-3)

def test_the_head_against_bf16():
    "Loss and gradients of the output projection, with tokens to ignore"
    h, w = (rand(64, 48)*.5).requires_grad_(), (rand(80, 48, dt=torch.float32, seed=1)*.1).requires_grad_()
    y = torch.randint(80, (64,), device=DEVICE); y[::5] = -100
    scaling = Scaling(1, E5M2, DEVICE)
    scales, ce = LayerScales(scaling, 0, E5M2), ChunkedCE()
    def grads(loss):
        h.grad = w.grad = None
        loss.backward()
        return loss.detach(), h.grad.float(), w.grad.float()
    with scaling.in_step(), scaling.in_pass(): got = grads(Fp8LinearCE.apply(h, w, y, ce, True, *scales()))
    want = grads(linear_cross_entropy(h, w, y))
    assert got[0].item() == pytest.approx(want[0].item(), rel=5e-3)
    for a, b in zip(want[1:], got[1:]): assert sqnr(a, b) > 17
    assert not got[1][::5].any()

@pytest.mark.parametrize("B, T", [(1, 31), (3, 7), pytest.param(1, 1, marks=pytest.mark.skipif(GPU, reason="cuDNN has no attention of one token"))])
def test_any_number_of_tokens(B, T, monkeypatch):
    "Every product gets multiples of 16, which the tensor cores take, and loss and gradients are those of bf16"
    product, sizes = loss_module.mm8, []
    def watched(a, b, *args, **kwargs):
        sizes.append((*a.shape, len(b)))
        return product(a, b, *args, **kwargs)
    for m in (kernel_module, loss_module): monkeypatch.setattr(m, "mm8", watched)
    x, y = (t[:B, :T] for t in tokens(4, SMALL))
    base, fast = (model_gradients(run, (x, y)) for run in (build(SMALL, BASE), RUNGS["fp8"](build(SMALL, BASE))))
    assert sizes and not [s for s in sizes if any(n % 16 for n in s)]
    norms = lambda g: torch.cat([v.flatten() for v in g.values()])
    assert sqnr(norms(base), norms(fast)) > 14

def test_a_chunk_that_is_no_multiple_of_16(monkeypatch):
    "The last chunk of the head's tokens, also where it has few rows"
    h, w = rand(261, 48).requires_grad_(), (rand(80, 48, dt=torch.float32, seed=1)*.1).requires_grad_()
    y, scaling = torch.randint(80, (261,), device=DEVICE), Scaling(1, E5M2, DEVICE)
    scales = LayerScales(scaling, 0, E5M2)
    def gradients(ce):
        with scaling.in_step(), scaling.in_pass(): loss = Fp8LinearCE.apply(h, w, y, ce, True, *scales())
        return loss, *torch.autograd.grad(loss, (h, w))
    for a, b in zip(gradients(ChunkedCE()), gradients(ChunkedCE(budget=1))): torch.testing.assert_close(a, b, rtol=.01, atol=1e-5)

def test_widths_that_the_tensor_cores_do_not_take():
    "They work, in FP32, and the rung says so, once, with the sizes"
    odd = replace(NANO, vocab=321, hidden=40)
    with pytest.warns(UserWarning, match="FP32.*hidden.*40.*vocab.*321") as said: run = RUNGS["fp8"](build(odd, BASE), parts=list(FP8_PARTS))
    assert len(said) == 1 and Stepper(run)(tokens(2, odd)).isfinite()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUNGS["fp8"](build(NANO, BASE), parts=list(FP8_PARTS)); RUNGS["fp8"](build(odd, BASE), parts=["out"])

# What is chosen with a stopwatch

class Elsewhere:
    "As much of a run on a GPU as a choice looks at"
    rungs, device, model = ("bf16", "fused_ops", "chunked_ce"), torch.device("cuda"), baseline(NANO, "cpu").model

def test_parts_that_break_even_are_chosen(monkeypatch):
    "Those, in their order, with the measurements in words; the head only where there is a chunked loss"
    gains = dict(heads=1.1, out=.9, mlp=1.3, head=.99)
    monkeypatch.setattr(parts_module, "part_gains", lambda c, device, to_fp8: gains)
    monkeypatch.setattr(parts_module, "misrounded", lambda c, device: [])
    assert choose_parts(Elsewhere, module.to_fp8) == (dict(parts=["heads", "mlp", "head"]), "heads 1.10x, out 0.90x, mlp 1.30x, head 0.99x")
    monkeypatch.setattr(Elsewhere, "rungs", ("bf16", "fused_ops"))
    assert choose_parts(Elsewhere, module.to_fp8)[0] == dict(parts=["heads", "mlp"])

def test_nothing_is_measured_to_be_deterministic(monkeypatch):
    "A measurement may end another way each time: all parts and layers are taken that round correctly"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(parts_module, "misrounded", lambda c, device: ["swiglu_quantize"])
    for m, name in ((parts_module, "part_gains"), (plain, "linear_gain")): monkeypatch.setattr(m, name, lambda *args: pytest.fail("measured"))
    assert choose_parts(Elsewhere, module.to_fp8) == (dict(parts=["heads", "out", "head"]), "")
    monkeypatch.setattr(plain, "linear_sizes", lambda model: ["32x16", "48x32"])
    assert choose_layers(Elsewhere, recipe="tensorwise") == (dict(layers=["32x16", "48x32"]), "")

def test_parts_that_are_rounded_wrongly_are_left_out(monkeypatch):
    "However much they gain, and the words say so"
    monkeypatch.setattr(parts_module, "part_gains", lambda c, device, to_fp8: dict.fromkeys(FP8_PARTS, 2.))
    monkeypatch.setattr(parts_module, "misrounded", lambda c, device: ["swiglu_quantize"])
    found, why = choose_parts(Elsewhere, module.to_fp8)
    assert found == dict(parts=["heads", "out", "head"]) and "mlp 2.00x but swiglu_quantize rounds wrongly" in why

@pytest.mark.parametrize("name", ["quantize", "heads_quantize"])
def test_a_wrong_copy_is_found(name):
    "A trial in which a few bytes of the device's transpose lie in another order"
    (f, ins), calls = rounding_cases(CASES)[name], []
    def mixed(*args):
        *rest, q, t = f(*args)
        calls.append(name)
        if len(calls) > 2 and len(calls) % 2 == 0: t.view(torch.uint8)[:4] = t.view(torch.uint8)[:4].flip(0)
        return *rest, q, t
    assert not rounds_wrong((mixed, ins), DEVICE) and rounds_wrong((mixed, ins), DEVICE) and len(calls) == 4

def test_layers_that_gain_are_chosen(monkeypatch):
    monkeypatch.setattr(plain, "linear_gain", lambda recipe, C, O, device: C/O + (recipe == "rowwise"))
    assert choose_layers(Elsewhere, recipe="tensorwise")[0] == dict(layers=["32x16", "48x32"])
    assert choose_layers(Elsewhere, recipe="rowwise")[0] == dict(layers=["32x16", "32x32", "32x48", "48x32"])

def test_no_answer_is_kept_from_a_mode(monkeypatch):
    "Each choice is measured anew, outside of modes: a count on fake tensors can't decide what a real run gets"
    asked = []
    def choose(run, **options):
        asked.append((torch._C._len_torch_dispatch_stack(), torch.compiler.is_compiling(), torch._dynamo.eval_frame._stance.stance))
        return dict(parts=["mlp"]), "measured"
    monkeypatch.setattr(RUNGS["fp8"], "choose", choose)
    count_step(NANO, BASE + ["fp8"])
    run = build(NANO, BASE + ["fp8"])
    assert len(asked) == 2 and set(asked) == {(0, False, "default")}
    assert str(run.specs()[-1]) == "fp8:parts=mlp" and run.why["fp8"] == "measured"

@pytest.mark.parametrize("parts", [[], ["mlp"], ["heads", "head"]], ids=str)
def test_chosen_parts_are_taken_back(parts):
    "As a run says them, also none at all"
    run = RUNGS["fp8"](build(NANO, BASE), parts=parts)
    again = build(NANO, run.specs())
    assert losses(again) == losses(run) and again.specs() == run.specs()

torchao = pytest.mark.skipif(not version_of("torchao"), reason="torchao is not installed")

@torchao
@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_torchao_is_applied(recipe):
    "The layers asked for are converted, and losses are bf16's within 1%"
    below = ["bf16", "bf16_stream"] if recipe == "rowwise_with_gw_hp" else ["bf16"] # its weight gradients are products of what the layers get
    run = build(NANO, [*below, f"torchao_fp8:recipe={recipe}:layers=all"])
    assert len(converted(run.model)) == 7*NANO.layers
    assert losses(run) == pytest.approx(losses(build(NANO, below)), rel=.01)

@torchao
@fp8_gpu
@pytest.mark.cuda
def test_torchao_multiplies_in_fp8():
    "A compiled step of a large layer, on the GPU: its products are in FP8, not only asked for"
    c = replace(workload("1b"), layers=1, vocab=64)
    ops = count_step(c, ["bf16", "flash", "compile", "torchao_fp8:layers=all"], 4)
    assert main_format(ops) == "fp8"

@fp8_gpu
@pytest.mark.cuda
def test_the_kernels_in_a_bad_step():
    "124m's layers with one NaN, then one infinity, among their weights: no tensor takes the step, recorded or not"
    c = replace(workload("124m"), layers=2)
    for more in ([], ["cuda_graphs"]):
        for value in (NAN, INF):
            step, b = GuardedStepper(build(c, BASE + ["fp8:parts=heads+out+mlp+head", *more])), tokens(4, c)
            for _ in range(4): step(b)
            step.run.model.layers[1].mlp.gate_proj.weight.data[3, 5] = value
            before = [p.detach().clone() for p in step.params]
            step(b)
            assert not step.norm.isfinite()
            assert all(torch.equal(p.nan_to_num(), w.nan_to_num()) for p, w in zip(step.params, before))

# The GPU at real shapes

SIZES = ["124m", "1b"]

@fp8_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("name", SIZES)
def test_rounding_at_real_shapes(name):
    c, N = workload(name), 8192
    for sizes in ((N, c.width), (N, c.hidden)):
        for case in cases(*sizes).values(): right(case)
    right(heads_case(N//c.seq_len, c.seq_len, c.heads, c.kv_heads, c.head_dim))

@fp8_gpu
@pytest.mark.cuda
def test_more_than_two_to_the_31():
    "Addresses of a matrix of over 2**31 numbers, at its end"
    x = torch.zeros(2**17, 2**14 + 16, dtype=torch.bfloat16, device="cuda")
    x[-16:] = tail = rand(16, x.shape[1])
    q, t = quantize(x, *slot(1.), E4M3)
    want = tail.float().clamp(-448, 448).to(E4M3).float()
    assert torch.equal(q[-16:].float(), want) and torch.equal(t[:, -16:].float().T, want) and not q[:16].float().any()

@fp8_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["124m", "1b"])
def test_kernels_are_right_here(name):
    assert misrounded(workload(name), torch.device("cuda")) == [] and not needs_fp8()

@fp8_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(16, 16, 16), (48, 80, 144), (1024, 768, 2048)])
@pytest.mark.parametrize("fmt", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_product(shape, fmt):
    "The tensor cores' product is that of the rounded numbers, to the result's rounding"
    M, N, K = shape
    (sa, a), (sb, b) = slot(32.), slot(64.)
    x, y = quantize(rand(M, K), sa, a, fmt[0])[0], quantize(rand(N, K, seed=1), sb, b, fmt[1])[0]
    want = (x.double() @ y.double().T) / (32*64)
    assert sqnr(want, mm8(x, y, 1/sa, 1/sb, torch.float32)) > 60
    assert sqnr(want, mm8(x, y, 1/sa, 1/sb, fast=True)) > 40
