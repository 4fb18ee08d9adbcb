"All losses alike: targets that are no tokens, sure tokens, strided logits, no tokens at all."
from dataclasses import replace
import pytest, torch
from llm_speedrun.io_utils import InputError
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.rungs import chunked_ce, fp8_loss, grouped_ce, vocab_parallel
from llm_speedrun.rungs.chunked_ce import ChunkedCE, linear_cross_entropy, loss_maths, softmax_loss
from llm_speedrun.rungs.fp8_epilogues import summed_loss
from llm_speedrun.rungs.fused_ce import FusedCE
from llm_speedrun.rungs.matmul_ops import hopper_missing
from llm_speedrun.rungs.grouped_ce import GroupedCE, mean_loss, mul_
from llm_speedrun.rungs.fp8 import E5M2
from llm_speedrun.rungs.fp8_kernels import LayerScales, Scaling
from llm_speedrun.rungs.fp8_loss import HALF_MOST, Fp8CE, logits_quantize, loss_lse
from llm_speedrun.rungs.fused_ops import swiglu_backward
from llm_speedrun.rungs.vocab_parallel import CutChunkedCE, part_grads, part_stats, row_losses
from llm_speedrun.runs import build
from helpers.tiny_runs import NANO, fails

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16 # the interpreter cuts off bits of bf16
cuda = pytest.mark.cuda

@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)

# Each gives the losses of the rows (n), and the gradient of their sum (n V)

def by_softmax_loss(x, y, ignore=-100, z=0., cap=0.):
    loss = softmax_loss(g := x.clone(), y, ignore, z, cap, True)
    return loss, g

def by_mean_loss(x, y, ignore=-100, z=0., cap=0., count=4.):
    loss = mean_loss(g := x.clone(), y, torch.tensor([count], device=x.device), ignore, z, cap)
    return loss, g.float()*count

def by_parts(x, y, ignore=-100, z=0., cap=0.):
    parts, half = [t.contiguous() for t in x.chunk(2, 1)], x.shape[1]//2
    loss, lse = row_losses(torch.stack([part_stats(p, y, i*half, cap) for i, p in enumerate(parts)]), y, 2*half, ignore, z)
    for i, p in enumerate(parts): part_grads(p, y, lse, i*half, ignore, z, cap)
    return loss, torch.cat(parts, 1)

def by_fp8(x, y, ignore=-100, z=0., cap=0.):
    loss, lse = loss_lse(x, y, ignore, z, cap)
    return loss, logits_quantize(x, y, lse, ignore, z, cap)[0][:len(x)].float()/HALF_MOST

def by_sums(x, y, ignore=-100, z=0., cap=0.):
    loss, lse = summed_loss(x.float().exp().view(len(x), -1, x.shape[1]//2).sum(2), x, y, ignore, z)
    return loss, logits_quantize(x, y, lse, ignore, z, cap)[0][:len(x)].float()/HALF_MOST

def by_logits(x, y, ignore=-100, z=0., cap=0.):
    "Where no sum of exponentials is in range"
    loss, lse = summed_loss(torch.full((len(x), 3), torch.inf, device=x.device), x, y, ignore, z)
    return loss, logits_quantize(x, y, lse, ignore, z, cap)[0][:len(x)].float()/HALF_MOST

LOSSES = dict(chunked=by_softmax_loss, mean=by_mean_loss, parts=by_parts, fp8=by_fp8, sums=by_sums)
WRONG = [-1, 64, 2**31, 2**32 + 3, -2**40]

def summed_runs(name): # which is launched wherever there is Triton
    if name == "sums" and DEVICE.type != "cuda": pytest.importorskip("triton")

@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "maths"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_that_is_no_token(monkeypatch, name, kernel):
    "Makes its loss NaN and all of its row's gradient, touches no other row, and an ignored row stays zero"
    if not kernel and (name == "sums" or DEVICE.type == "cuda"): pytest.skip("the kernel is all there is")
    summed_runs(name)
    if DEVICE.type != "cuda": monkeypatch.setenv("TRITON_INTERPRET", str(int(kernel)))
    for z in (0., .01):
        x, y = torch.randn(8, 64, device=DEVICE), torch.randint(64, (8,), device=DEVICE)
        want, clean = LOSSES[name](x, y, z=z)
        y[:5], y[5] = torch.tensor(WRONG, device=DEVICE), -100
        loss, grad = LOSSES[name](x, y, z=z)
        assert loss[:5].isnan().all() and grad[:5].isnan().all()
        assert loss[5] == 0 and not grad[5].any() and loss[6:].equal(want[6:]) and grad[6:].equal(clean[6:])

@cuda
@pytest.mark.parametrize("name", LOSSES)
def test_no_token_at_the_real_vocabulary(name):
    "On a GPU, in bf16, with the vocabulary of the course"
    x, y = torch.randn(2048, 50304, device=DEVICE).bfloat16(), torch.randint(50304, (2048,), device=DEVICE)
    y[::7] = 50304
    y[1::7] = -100
    loss, grad = LOSSES[name](x, y)
    assert loss[::7].isnan().all() and grad[::7].isnan().all() and not grad[1::7].any()
    rest = [i for i in range(2048) if i % 7 > 1]
    assert loss[rest].isfinite().all() and grad[rest].isfinite().all()

@pytest.mark.parametrize("V", [512, pytest.param(50304, marks=cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_true_class_of_a_sure_token(kernels, name, dtype, V):
    "Where p nears 1, p - 1 is as exact as its type can be: it isn't the difference of two rounded numbers (Liger-Kernel#1329)"
    summed_runs(name)
    p = torch.tensor([.5, .9, .99, .999], device=DEVICE, dtype=torch.float64)
    y, x = torch.tensor([0, 7, 300, V - 1], device=DEVICE), torch.zeros(4, V, device=DEVICE, dtype=torch.float64)
    x[range(4), y] = ((V - 1)*p/(1 - p)).log()
    x = x.to(dtype)
    exact = x.double().softmax(1)[range(4), y] - 1
    got = LOSSES[name](x, y)[1][range(4), y].double()
    rounding = 2**-2 if name in ("fp8", "sums") else torch.finfo(dtype).eps/2 # E5M2 has two bits after the first, and chance decides
    assert ((got - exact).abs() <= rounding*exact.abs() + 1e-6).all() # FP32's p; 16 bits know p itself to 2e-4 at best

@pytest.mark.parametrize("name", ["chunked", "grouped", pytest.param("fused", marks=cuda)])
def test_the_true_class_in_the_gradient_of_hidden_states(kernels, name):
    "Through the whole loss: each hidden state meets its target's row of the weights alone, in a column of its own"
    ce = dict(chunked=ChunkedCE, grouped=GroupedCE, fused=FusedCE)[name]()
    if name == "fused" and (why := hopper_missing()): pytest.skip(why)
    V, dt = (50304, torch.bfloat16) if DEVICE.type == "cuda" else (384, torch.float32) # FP16 would lack exponents
    p = torch.tensor([.5, .9, .99, .999]*32, device=DEVICE, dtype=torch.float64)
    y, d = torch.arange(0, 3*128, 3, device=DEVICE), 128
    w = torch.zeros(V, d, device=DEVICE, dtype=dt)
    w[y, range(d)] = 1
    h = torch.diag(((V - 1)*p/(1 - p)).log()).to(dt).requires_grad_()
    ce(h, w.requires_grad_(), y).backward()
    exact = ((h.detach().double() @ w.detach().double().T).softmax(1)[range(d), y] - 1)/d
    assert ((h.grad.diagonal().double() - exact).abs() <= 2*torch.finfo(dt).eps*exact.abs() + 1e-6/d).all()

def in_fp8(kind): return lambda *xs: kind(scales=LayerScales(Scaling(1, E5M2, DEVICE), 0, E5M2))(*xs)

WHOLE = dict(chunked=linear_cross_entropy, grouped=GroupedCE(), fp8=in_fp8(Fp8CE), grouped8=in_fp8(GroupedCE), cut=CutChunkedCE(None, ChunkedCE()))

@pytest.mark.parametrize("name", WHOLE)
def test_no_tokens(name):
    "Their loss is 0, and all gradients are zeros"
    h, w = torch.randn(0, 8, device=DEVICE, requires_grad=True), torch.randn(16, 8, device=DEVICE, requires_grad=True)
    loss = WHOLE[name](h[None], w, torch.zeros(1, 0, dtype=torch.long, device=DEVICE))
    loss.backward()
    assert loss == 0 and loss.dtype == torch.float32 and h.grad.shape == (0, 8) and not w.grad.any()

def test_strided_logits_are_refused(kernels):
    "Their gradient would be written to other places"
    y = torch.zeros(4, dtype=torch.long, device=DEVICE)
    for x in (torch.randn(9, 4, device=DEVICE).T, torch.randn(4, 12, device=DEVICE)[:, :6], torch.randn(1, 6, device=DEVICE).expand(4, 6)):
        with fails(InputError, "softmax_loss", "logits", "contiguous"): softmax_loss(x, y, -100, 0., 0., True)
        with fails(InputError, "mean_loss", "logits"): mean_loss(x, y, torch.ones(1, device=DEVICE), -100, 0., 0.)
        with fails(InputError, "part_grads", "logits"): part_grads(x, y, y.float(), 0, -100, 0., 0.)
        with fails(InputError, "mul_", "x"): mul_(x, torch.ones(1, device=DEVICE))
    with fails(InputError, "y is a strided"): softmax_loss(torch.randn(4, 6, device=DEVICE), torch.arange(8, device=DEVICE)[::2], -100, 0., 0., True)
    with fails(InputError, "swiglu_backward", "dh"): swiglu_backward(torch.randn(3, 8), torch.randn(4, 3).T)

# Several blocks

def rows_of(V, pattern):
    "Four rows of logits in several blocks, in whose course the maximum rises, falls, or comes in the middle, and targets at both ends"
    t = torch.linspace(-1, 1, V, dtype=torch.float64, device=DEVICE)
    x = dict(rises=60*t, falls=-60*t, middle=60*(1 - t.abs()))[pattern] + torch.randn(4, V, dtype=torch.float64, device=DEVICE)
    return x.float(), torch.tensor([0, V - 1, V//2, V//3], device=DEVICE)

def loss_is_exact(name, V, pattern, z, cap):
    "Losses are float64's to FP32's rounding, and so are gradients, or to E5M2's"
    if name == "logits": cap = 0. # which it has no part in
    x, y = rows_of(V, pattern)
    exact = x.double()
    losses = loss_maths(exact, y, -100, z, cap, True)
    got, grad = (by_logits if name == "logits" else LOSSES[name])(x, y, z=z, cap=cap)
    torch.testing.assert_close(got.double(), losses, rtol=2e-6, atol=5e-5)
    if name not in ("fp8", "logits"): torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=2e-5)
    else: assert ((grad - exact).abs() <= .25*exact.abs() + 2e-5).all()

blocks_of_64 = dict(chunked=chunked_ce, mean=grouped_ce, parts=vocab_parallel, fp8=fp8_loss)
patterns = pytest.mark.parametrize("pattern", ["rises", "falls", "middle"])

@patterns
@pytest.mark.parametrize("z, cap", [(0., 0.), (.01, 0.), (0., 30.)])
@pytest.mark.parametrize("name", blocks_of_64)
def test_several_blocks(kernels, monkeypatch, name, pattern, z, cap):
    "An online softmax rescales its sum wherever the maximum rises: in whole blocks, and in the rest"
    monkeypatch.setattr(blocks_of_64[name], "loss_tile", lambda V: dict(BLOCK=64, num_warps=1))
    loss_is_exact(name, 2*336 if name == "parts" else 336, pattern, z, cap) # five blocks and a rest of sixteen, in each part

@patterns
@pytest.mark.parametrize("name", [*blocks_of_64, "logits"])
def test_a_vocabulary_of_several_blocks(kernels, name, pattern):
    "The smallest one that fills two of the largest blocks: 32,768, and a rest of one, in each part"
    if name == "logits": pytest.importorskip("triton")
    loss_is_exact(name, 2*32769 if name == "parts" else 32769, pattern, .01, 0.)

@cuda
@pytest.mark.parametrize("V", [1000, 16400, 32769, 50304])
@pytest.mark.parametrize("name", ["chunked", "mean", "parts"])
def test_the_target_is_stored_last(name, V):
    "The gradient at the target, which one thread stores, comes after what all others store there, and is of the logit that it had"
    N = 2*V if name == "parts" else V
    for _ in range(3):
        x, y = torch.randn(4096, N, device=DEVICE).bfloat16(), torch.randint(N, (4096,), device=DEVICE)
        rows, exact = torch.arange(4096, device=DEVICE), x.float().log_softmax(1)
        got = LOSSES[name](x, y)[1][rows, y].float()
        assert (got - (exact[rows, y].exp() - 1)).abs().max() < 1e-2

# In a step

RUNGS = dict(chunked=["chunked_ce"], grouped=["chunked_ce", "head_groups"], fp8=["bf16", "fused_ops", "chunked_ce", "fp8:parts=head"])

@pytest.mark.parametrize("rungs", RUNGS.values(), ids=RUNGS)
def test_the_step_is_not_taken(rungs):
    "One bad target in one of two micro-batches: all weights stay, and the next step is as if this one had not been"
    run = build(replace(NANO, width=32, hidden=32, heads=2, kv_heads=1, vocab=64), rungs, DEVICE)
    step = GuardedStepper(run)
    x, y = torch.randint(64, (2, 4, NANO.seq_len), device=DEVICE)
    before = [p.clone() for p in run.model.parameters()]
    bad = y.clone()
    bad[2, 3] = 64
    step((x[:2], bad[:2]), (x[2:], bad[2:]))
    assert step.loss.isnan() and not step.norm.isfinite()
    assert all(a.equal(b) for a, b in zip(before, run.model.parameters()))
    step((x[:2], y[:2]), (x[2:], y[2:]))
    assert step.loss.isfinite() and step.norm.isfinite() and not all(a.equal(b) for a, b in zip(before, run.model.parameters()))

def test_gradients_carry_it():
    "So processes that see only the sum of the gradients know as well"
    for ce in (ChunkedCE(), GroupedCE()):
        h, w = torch.randn(6, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
        ce(h, w, torch.tensor([1, 2, 16, 3, 4, 5])).backward()
        assert h.grad[2].isnan().all() and h.grad[:2].isfinite().all() and w.grad.isnan().all()

def test_the_plain_loss_of_a_part():
    "That of tensor_parallel without a kernel: autograd's gradient is NaN too"
    stats, y = torch.randn(2, 2, 3, requires_grad=True), torch.tensor([1, 99, -100])
    row_losses(stats, y, 8)[0].sum().backward()
    assert stats.grad[:, 0, 1].isnan().all() and stats.grad[..., [0, 2]].isfinite().all()
