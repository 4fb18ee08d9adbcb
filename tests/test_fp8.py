"FP8: each rounding kernel against PyTorch, what is clipped, scales and their history, whole runs, and the GPU at real shapes."
from dataclasses import replace
from functools import partial
import pytest, torch
from llm_speedrun.rungs.chunked_ce import ChunkedCE, linear_cross_entropy
from llm_speedrun.rungs.fp8 import *
from llm_speedrun.rungs.fused_ops import qk_rope_backward_maths, swiglu_backward_maths, swiglu_maths
from llm_speedrun.measure import has_fp8
from llm_speedrun.model import rope_table, workload
from llm_speedrun.runs import RUNGS, Stepper, build
from small import NANO, fails

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

def heads_case(B, T, H, K, D):
    cos, sin = (t.to(DEVICE) for t in rope_table(T, D, 1e4))
    ins = *(rand(B, T, h, D, seed=i) for i, h in enumerate((H, K, K))), rand(B, T, H + 2*K, D, seed=4)
    ins += rand(D, dt=torch.float32, seed=5), rand(D, dt=torch.float32, seed=6), cos, sin
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

def right(case, scale=4.):
    "Both copies are the number rounded, or where FP32 ends up at the middle between two its neighbour; the maximum is noted"
    op, more, want, dt = case
    s, a = slot(scale)
    q, t = op(s, a, *more)[-2:]
    assert q.dtype == t.dtype == dt and q.is_contiguous() and t.is_contiguous()
    assert torch.equal(q.view(torch.uint8).T, t.view(torch.uint8))
    exact = (want*scale).clamp(-LARGEST[dt], LARGEST[dt])
    off, near = (q.float() - exact).abs(), exact.to(dt)
    fine = off <= (.51 if GPU else 1.02)*spacing(near) + (2**-8 if GPU else 2**-6)*exact.abs()     # what was bf16 before
    if not GPU: fine |= (2*q.float() - exact).abs() <= 1.1*spacing(near)     # the interpreter loses the carry into the exponent
    assert fine.all()
    if GPU: assert (q.float() != near.float()).float().mean() < .02
    torch.testing.assert_close(a[0], want.abs().max(), rtol=1e-2, atol=0)

OPS = list(cases(16, 16))

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("N, C", [(16, 16), (48, 80), (144, 272), (16, 400)])
@pytest.mark.parametrize("op", OPS)
def test_rounding(op, N, C): right(cases(N, C)[op])

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("N, C", [(1, 1), (33, 70), (64, 70), (1, 16), (130, 24)])
@pytest.mark.parametrize("op", OPS)
def test_odd_sizes(op, N, C):
    "What the tensor cores couldn't multiply anyway is rounded too, by PyTorch"
    assert not by_kernel(rand(N, C), N, C)
    right(cases(N, C)[op])

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("B, T, H, K, D", [(2, 24, 4, 2, 16), (1, 80, 2, 2, 32), (1, 48, 3, 1, 64), (1, 7, 3, 1, 8), (2, 8, 2, 2, 4)])
def test_heads(B, T, H, K, D): right(heads_case(B, T, H, K, D))

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dt", [E4M3, E5M2], ids=str)
def test_too_large_is_clipped(dt):
    "What a stale scale makes too large becomes the largest number, never NaN or infinity, and is noted for the next step"
    x = rand(48, 80)*100
    s, a = slot(1e4)
    q, t = quantize(x, s, a, dt)
    assert q.float().abs().max() == t.float().abs().max() == LARGEST[dt] and a[0] == x.float().abs().max()

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

def test_an_evaluation_leaves_no_trace():
    "Neither in the scales nor in the maxima, and with the same loss twice"
    step = Stepper(build(NANO, BASE + ["fp8"]))
    b = tokens()
    for _ in range(3): step(b)
    s = step.run.model.layers[0].scales.scaling
    def state(): return [t.clone() for t in (s.scale, s.past, *s.forward_max, *s.backward_max)]
    before, first = state(), step.evaluate([b])
    assert step.evaluate([b]) == first and all(map(torch.equal, state(), before))

def test_runs_share_no_scales():
    base = build(NANO, BASE)
    a, b = (RUNGS["fp8"](base) for _ in range(2))
    assert a.model.layers[0].scales.scaling is not b.model.layers[0].scales.scaling
    assert a.with_model(lambda m: None).model.layers[0].scales.scaling is a.model.layers[0].scales.scaling

# Runs

def tokens(n=2, config=NANO):
    g = torch.Generator(DEVICE).manual_seed(0)
    return tuple(torch.randint(config.vocab, (2, n, config.seq), device=DEVICE, generator=g))

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
    with scaling.step(): got = grads(Fp8LinearCE.apply(h, w, y, ce, True, *scales()))
    want = grads(linear_cross_entropy(h, w, y))
    assert got[0] == pytest.approx(want[0].item(), rel=5e-3)
    for a, b in zip(want[1:], got[1:]): assert sqnr(a, b) > 17
    assert not got[1][::5].any()

# The GPU at real shapes

SIZES = ["124m", "1b"]

@fp8_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("name", SIZES)
def test_rounding_at_real_shapes(name):
    c, N = workload(name), 8192
    for sizes in ((N, c.width), (N, c.hidden)):
        for case in cases(*sizes).values(): right(case)
    right(heads_case(N//c.seq, c.seq, c.heads, c.kv_heads, c.head_dim))

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
def test_kernels_are_right_here():
    assert misrounded(torch.device("cuda")) == [] and not needs_fp8()

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
