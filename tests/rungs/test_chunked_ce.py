"The chunked loss: its kernel and its gradients against float64, odd shapes, ignored tokens, the compiler, and no leaks."
import gc, math
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from llm_speedrun.rungs.chunked_ce import (BUDGET, chunk_size, chunked_ce, ChunkedCE, linear_cross_entropy,
                                           linear_loss, linear_loss_op, loss_maths, softmax_loss)
from llm_speedrun.timing import warm_up
from llm_speedrun.roofline import by_kind
from llm_speedrun.op_counter import OpCounter, count
from llm_speedrun.model import cross_entropy
from llm_speedrun.model_config import matrix_params, workload
from llm_speedrun.runs import baseline, build
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Stepper
from llm_speedrun.course import reference_errors
from helpers.tiny_runs import fails, NANO, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = dict(plain=(-100, 0., 0.), ignored=(3, 0., 0.), z_loss=(-100, .01, 0.), softcap=(-100, 0., 5.), all=(3, .01, 5.))
cuda = pytest.mark.cuda

@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)

def by_autograd(logits, y, ignore_index, z_loss, softcap):
    "What the losses' sum is, in PyTorch's own operations and the type of `logits`"
    x = softcap*torch.tanh(logits/softcap) if softcap else logits
    z = z_loss * x.logsumexp(1)[y != ignore_index].pow(2).sum()
    return F.cross_entropy(x, y, ignore_index=ignore_index, reduction="sum") + z

def linear_by_autograd(h, w, y, ignore_index=-100, z_loss=0., softcap=0.):
    "What `linear_cross_entropy` is"
    x = F.linear(h, w)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return by_autograd(x, y, ignore_index, z_loss, softcap) / (y != ignore_index).sum().clamp(min=1)

def with_grads(loss, h, w, y, *options, up=1.):
    "The loss and its gradients of h and w, `up` arriving from above"
    h, w = (t.detach().requires_grad_() for t in (h, w))
    l = loss(h, w, y, *options)
    return [l.detach(), *torch.autograd.grad(l*up, (h, w))]

def inputs(N, d, V, dtype=torch.float32):
    h, w = torch.randn(N, d, device=DEVICE).to(dtype), .1*torch.randn(V, d, device=DEVICE)
    return h, w, torch.randint(V, (N,), device=DEVICE)

def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b))

# The kernel

@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("N, V", [(1, 1), (3, 7), (2, 255), (2, 256), (3, 300), (1, 3000), (1, 16385)])
def test_kernel(kernels, name, N, V):
    "Loss and gradient of a row of any length are float64's to FP32's rounding"
    x, y = 3*torch.randn(N, V, device=DEVICE), torch.randint(V, (N,), device=DEVICE)
    if N > 1: y[0] = min(3, V - 1)
    exact = x.double()
    losses = loss_maths(exact, y, *OPTIONS[name], True)
    got = softmax_loss(x, y, *OPTIONS[name], True)
    assert got.dtype == torch.float32 and (got.double() - losses).abs().max() < 3e-5
    assert (x.double() - exact).abs().max() < 1e-5

@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=cuda)], ids=str)   # Triton's
@pytest.mark.parametrize("name", OPTIONS)                                # interpreter cuts bits off instead of rounding to bf16
def test_kernel_in_16_bits(kernels, name, dtype):
    "The gradient is at most twice as far from float64 as PyTorch's in the same type"
    x, y = (3*torch.randn(7, 515, device=DEVICE)).to(dtype), torch.randint(5, (7,), device=DEVICE)
    o = OPTIONS[name]
    exact = x.double()
    losses = loss_maths(exact, y, *o, True)
    theirs = x.detach().requires_grad_()
    theirs, = torch.autograd.grad(by_autograd(theirs.float(), y, *o), theirs)
    got = softmax_loss(x, y, *o, True)
    assert relative_error(got, losses) < 1e-5 and relative_error(x, exact) <= 2*relative_error(theirs, exact) + 1e-6

@pytest.mark.parametrize("name", OPTIONS)
def test_maths(name):
    "The reference is autograd's result in float64"
    x, y = 3*torch.randn(9, 20, dtype=torch.float64), torch.randint(5, (9,))
    x.requires_grad_()
    ref = by_autograd(x, y, *OPTIONS[name])
    g, = torch.autograd.grad(ref, x)
    x = x.detach()
    torch.testing.assert_close(softmax_loss(x, y, *OPTIONS[name], True).sum(), ref.detach())    # float64 stays float64
    torch.testing.assert_close(x, g)

def test_kernel_without_gradient(kernels):
    "Without `grad` the logits stay as they are, and the losses are the same bits"
    x, y = torch.randn(3, 700, device=DEVICE), torch.randint(700, (3,), device=DEVICE)
    old = x.clone()
    a = softmax_loss(x, y, -100, .1, 0., False)
    assert torch.equal(x, old) and torch.equal(a, softmax_loss(x, y, -100, .1, 0., True)) and not torch.equal(x, old)

def test_kernel_overflow(kernels):
    "Logits that would overflow an exponential, in either direction, and a sure row"
    x = torch.tensor([[3e4, -3e4, 0.], [-3e4, -3e4, -3e4], [0., 100., 0.]], device=DEVICE)
    y = torch.tensor([1, 0, 1], device=DEVICE)
    losses = softmax_loss(x, y, -100, 0., 0., True)
    torch.testing.assert_close(losses.cpu(), torch.tensor([6e4, math.log(3), 0.]), rtol=1e-4, atol=4e-3)
    want = torch.tensor([[1., -1., 0.], [-2/3, 1/3, 1/3], [0., 0., 0.]])
    torch.testing.assert_close(x.cpu(), want, rtol=0, atol=2e-3)    # 3e4 is 43000 in base 2, which FP32 knows to 1/256

def test_ignored_rows(kernels):
    "An ignored row has no loss and no gradient, whether the ignored target is a word or not, and whatever its logits"
    for ignore in (-100, 2, 999):
        x = torch.randn(3, 40, device=DEVICE)
        y = torch.full((3,), ignore, device=DEVICE)
        assert not softmax_loss(x, y, ignore, .1, 5., True).any() and not x.any()

@pytest.mark.parametrize("wrong", [-1, 40, 2**33])
def test_a_target_outside_of_the_vocabulary(kernels, wrong):
    "It makes loss and gradient NaN, and touches no memory outside of its row"
    x = torch.randn(3, 40, device=DEVICE)
    losses = softmax_loss(x[1:2], torch.tensor([wrong], device=DEVICE), -100, 0., 0., True)
    assert losses.isnan().all() and x[1].isnan().all() and x[::2].isfinite().all()

# The loss

@pytest.mark.parametrize("name", OPTIONS)
def test_float64(name):
    "In float64 loss and gradients are autograd's, over several chunks"
    h, w, y = (t.double() if t.is_floating_point() else t for t in inputs(300, 12, 50))
    ref = with_grads(linear_by_autograd, h, w, y, *OPTIONS[name])
    got = with_grads(linear_cross_entropy, h, w, y, *OPTIONS[name], 0)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, ref)) and got[0].dtype == torch.float64

SHAPES = dict(one=(1, 8, 20), odd=(21, 24, 333), wide=(9, 130, 257), chunks=(130, 8, 40))   # N d V

@pytest.mark.parametrize("shape, name", [(s, n) for s in SHAPES for n in OPTIONS if s != "chunks" or n == "all"])
def test_fp32(kernels, shape, name):
    "In FP32 loss and gradients are float64's to 1e-5, relative"
    h, w, y = inputs(*SHAPES[shape])
    ref = with_grads(linear_by_autograd, h.double(), w.double(), y, *OPTIONS[name])
    got = with_grads(linear_cross_entropy, h, w, y, *OPTIONS[name], 0)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, ref)), [relative_error(a, b) for a, b in zip(got, ref)]

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide_h", [False, True], ids=["h16", "h32"])
def test_autocast(dtype, wide_h):
    "Under autocast the errors are at most twice PyTorch's, and gradients have the types of what they are gradients of"
    h, w, y = inputs(200, 64, 500, torch.float32 if wide_h else dtype)
    y[::7] = -100
    ref = with_grads(linear_by_autograd, h.double(), w.double(), y)
    def auto(f):
        def loss(*args):
            with torch.autocast(DEVICE, dtype): return f(*args)
        return loss
    theirs = [relative_error(a, b) for a, b in zip(with_grads(auto(linear_by_autograd), h, w, y), ref)]
    got = with_grads(auto(linear_cross_entropy), h, w, y, -100, 0., 0., 0)
    ours = [relative_error(a, b) for a, b in zip(got, ref)]
    assert all(o <= 2*t + 1e-4 for o, t in zip(ours, theirs)), (ours, theirs)
    assert [t.dtype for t in got] == [torch.float32, h.dtype, torch.float32]

def test_16_bit_weights():
    "With weights in bf16 no autocast is needed; the gradient of the weights is bf16, rounded once"
    h, w, y = inputs(200, 64, 500, torch.bfloat16)
    w = w.bfloat16()
    ref = with_grads(linear_by_autograd, h.double(), w.double(), y)
    got = with_grads(linear_cross_entropy, h, w, y, -100, 0., 0., 0)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(relative_error(a, b) < 6e-3 for a, b in zip(got, ref))

def test_shapes_and_strides(kernels):
    "B T d is as good as N d, and so are strided hidden states, targets and weights"
    h, w, y = inputs(18, 16, 60)
    ref = with_grads(linear_cross_entropy, h, w, y)
    got = with_grads(linear_cross_entropy, h.view(2, 9, 16), w, y.view(2, 9))
    assert same([got[0], got[1].flatten(0, 1), got[2]], ref)
    strided = [torch.stack([t, t], -1)[..., 1] for t in (h, w, y)]
    assert not any(t.is_contiguous() for t in strided)
    for a, b in zip(with_grads(linear_cross_entropy, *strided), ref): torch.testing.assert_close(a, b)
    for a, b in zip(with_grads(linear_cross_entropy, h.T.contiguous().T, w, y), ref): torch.testing.assert_close(a, b)
    with fails(ValueError, "18 hidden states and 17 targets"): linear_cross_entropy(h, w, y[1:])

def test_ignore_index_everywhere(kernels):
    "The mean is over the tokens that count; with none of them the loss and the gradients are zero"
    h, w, y = inputs(12, 16, 60)
    for kept in (slice(0, 5), slice(11, 12), slice(0, 12)):
        some = torch.full_like(y, -100)
        some[kept] = y[kept]
        ref = with_grads(linear_by_autograd, h[kept].double(), w.double(), y[kept])
        l, dh, dw = with_grads(linear_cross_entropy, h, w, some)
        assert max(relative_error(l, ref[0]), relative_error(dh[kept], ref[1]), relative_error(dw, ref[2])) < 1e-5
        assert dh.abs().sum().item() == pytest.approx(dh[kept].abs().sum().item())
    assert not any(t.any() for t in with_grads(linear_cross_entropy, h, w, torch.full_like(y, -100)))

def test_only_what_is_wanted():
    "No gradient is made that nobody asks for, and an evaluation makes none"
    h, w, y = inputs(20, 16, 60)
    ref = with_grads(linear_cross_entropy, h, w, y)
    only = h.clone().requires_grad_()
    linear_cross_entropy(only, w, y).backward()
    assert torch.equal(only.grad, ref[1])
    only = w.clone().requires_grad_()
    linear_cross_entropy(h, only, y).backward()
    assert torch.equal(only.grad, ref[2])
    with torch.no_grad(), OpCounter() as c: l = linear_cross_entropy(h, only, y)
    assert torch.equal(l, ref[0]) and sum(o.kind == "matrix products" for o in c.ops) == 1 and not l.requires_grad

def test_backward_twice_and_scaled():
    "The gradient scales with what comes from above, and can be taken again"
    h, w, y = inputs(20, 16, 60)
    h.requires_grad_()
    l = linear_cross_entropy(h, w, y)
    a, = torch.autograd.grad(l, h, retain_graph=True)
    b, = torch.autograd.grad(l, h)
    assert torch.equal(a, b)
    for x, z in zip(with_grads(linear_cross_entropy, h, w, y, up=-3.)[1:], with_grads(linear_cross_entropy, h, w, y)[1:]):
        torch.testing.assert_close(x, -3*z)

def test_scale_is_not_rounded():
    "Over 16-bit gradients the mean divides in FP32: three tokens that count give exactly a third of one, rounded once"
    h, w, y = inputs(3, 16, 60, torch.bfloat16)
    w = w.bfloat16()
    sums, dh, dw = linear_loss(h, w, y, BUDGET, -100, 0., 0., True, True)
    got = with_grads(linear_cross_entropy, h, w, y)
    assert torch.equal(got[1], (dh.float() * torch.tensor(1.).to(DEVICE).div(3)).bfloat16())

def test_accumulation():
    "Micro-batches add up to the batch, also when one of them is all ignored"
    c = replace(NANO, layers=1)
    x, y = torch.randint(c.vocab, (2, 4, c.seq_len), device=DEVICE)
    def grads(*batches):
        step = Stepper(build(c, ["chunked_ce"]))
        loss = sum(step.forward_backward(*b) for b in batches) / len(batches)
        return torch.cat([p.grad.flatten() for p in step.params]) / len(batches), loss
    whole, parts = grads((x, y)), grads(*((x[i:i + 1], y[i:i + 1]) for i in range(4)))
    for a, b in zip(whole, parts): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    half = grads((x, y), (x, torch.full_like(y, -100)))
    for a, b in zip(whole, half): torch.testing.assert_close(a, 2*b)

def test_fp16_and_its_scaler():
    "Under fp16 with its scaler the gradients are no worse than with the plain loss"
    plain, ours = (reference_errors(replace(NANO, layers=1), r)[1] for r in (["fp16"], ["fp16", "chunked_ce"]))
    assert ours < 2*plain

def test_deterministic():
    "50 repeats give the same bits"
    h, w, y = inputs(300, 16, 100, torch.bfloat16)
    def once():
        with torch.autocast(DEVICE, torch.bfloat16): return with_grads(linear_cross_entropy, h, w, y, -100, 0., 0., 0)
    first = once()
    assert all(same(once(), first) for _ in range(50))

# The size of a chunk

@pytest.mark.parametrize("sms", [1, 108, 132])
@pytest.mark.parametrize("N, d, V", [(65536, 768, 50304), (32768, 2048, 50304), (1000, 64, 300), (127, 64, 300), (1, 1, 1)])
def test_chunk_size(N, d, V, sms):
    "Chunks stay within the budget, are whole tiles, and need no more waves than any smaller size"
    waves = lambda C: sum(-(-(-(-min(C, N - i)//128) * -(-d//256)) // sms) for i in range(0, N, C))
    for budget in (0, 2**28, 640*2**20, 2**31):
        C = chunk_size(N, d, V, 2, budget, sms)
        assert C == N or C % 128 == 0 and 128 <= C < N
        assert C == 128 or 2*C*V <= budget or C == N <= 128
        assert all(waves(C) <= waves(c) for c in range(128, C, 128))

def test_memory_follows_the_budget():
    "What the loss allocates for logits is one chunk"
    shapes = []
    class Spy(OpCounter):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            shapes.extend(t.shape for t in [out] if isinstance(t, torch.Tensor) and t.ndim == 2 and t.shape[1] == 50)
            return out
    h, w, y = inputs(1000, 16, 50)
    with Spy(): linear_cross_entropy(h, w, y, budget=256*50*4)
    assert shapes and max(s[0] for s in shapes) <= 256

# The compiler and the counter

@pytest.mark.parametrize("name", OPTIONS)
def test_compiled(name):
    "Compiled in one graph, with the loop as one operation, it gives the same bits"
    h, w, y = inputs(300, 16, 60)
    graphs = []
    def backend(g, ins): graphs.append(g); return g.forward
    f = lambda h, w, y: linear_cross_entropy(h*2, w, y, *OPTIONS[name], budget=0)
    ref = with_grads(f, h, w, y)
    assert same(with_grads(torch.compile(f, backend=backend, fullgraph=True), h, w, y), ref) and len(graphs) == 1
    torch._dynamo.reset()
    assert same(with_grads(torch.compile(f, backend="aot_eager", fullgraph=True), h, w, y), ref)
    with torch.no_grad(): assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(h, w, y), ref[0])

def test_compiled_under_autocast():
    "With autocast and FP32 weights too, which Liger's does not trace"
    h, w, y = inputs(40, 16, 60)
    def f(h, w, y):
        with torch.autocast(DEVICE, torch.bfloat16): return linear_cross_entropy(h, w, y)
    assert same(with_grads(torch.compile(f, backend="aot_eager", fullgraph=True), h, w, y), with_grads(f, h, w, y))

def test_operation():
    "The operation that the compiler sees keeps PyTorch's rules for such"
    h, w, y = inputs(30, 16, 60)
    for want in ((True, True), (False, True), (True, False), (False, False)):
        torch.library.opcheck(linear_loss_op, (h, w, y, BUDGET, -100, 0., 0., *want))

def test_counted():
    "The counter sees every operation, as many FLOPs as the convention says, and each logit once in and once out"
    N, d, V = 1000, 64, 300
    def build():
        h, w = torch.randn(N, d, device=DEVICE, requires_grad=True), torch.randn(V, d, device=DEVICE, requires_grad=True)
        y = torch.randint(V, (N,), device=DEVICE)
        return lambda: linear_cross_entropy(h, w, y, budget=4*V*256).backward()
    ops = count(build)
    assert sum(o.flops for o in ops) == 6*N*d*V
    kernels = [o for o in ops if o.name == "softmax_loss"]
    assert len(kernels) == 4 and {o.kind for o in kernels} == {"softmax and loss"}
    assert sum(o.bytes for o in kernels) == pytest.approx(2*4*N*V, rel=.05)

# The rung

def test_rung():
    "The loss is replaced, the model and the run before are not touched, and the loss is the same"
    base = baseline(NANO)
    run = build(NANO, ["chunked_ce"])
    assert base.model.loss is cross_entropy and run.model.loss == ChunkedCE() and run.rungs == ("chunked_ce",)
    x, y = torch.randint(NANO.vocab, (2, 3, NANO.seq_len), device=base.device)
    torch.testing.assert_close(run.model(x, y), base.model(x, y))
    assert chunked_ce(base, z_loss=1e-4, budget=2).model.loss == ChunkedCE(z_loss=1e-4, budget=2**21)
    with fails(TypeError, "zloss"): chunked_ce(base, zloss=1.)

def test_model_errors():
    "Loss and gradients of a model with the rung are float64's to FP32's rounding, alone and with other rungs"
    for rungs in (["chunked_ce"], ["flash", "fused_ops", "chunked_ce"]): assert max(reference_errors(NANO, rungs)) < 1e-5
    plain, ours = (reference_errors(NANO, ["bf16"] + r)[1] for r in ([], ["chunked_ce"]))
    assert ours < 2*plain

def test_checkpointed_loss():
    "It can be recomputed itself"
    h, w, y = inputs(20, 16, 60)
    f = lambda h, w, y: checkpoint(linear_cross_entropy, h, w, y, use_reentrant=False)
    assert same(with_grads(f, h, w, y), with_grads(linear_cross_entropy, h, w, y))

# Real shapes, on a GPU

@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("N, d, V", [(6000, 768, 50304), (3000, 2048, 50304), (999, 768, 50257)])
def test_real_shapes(N, d, V, dtype):
    "Errors at most twice PyTorch's, in 16 bits, at the workloads' widths and vocabulary; also for one that is odd"
    h, w, y = inputs(N, d, V, dtype)
    w *= .2
    y[::9] = -100
    ref = with_grads(linear_by_autograd, h.double(), w.double(), y)
    def errors(f, *options):
        def auto(*args):
            with torch.autocast("cuda", dtype): return f(*args)
        return [relative_error(a, b) for a, b in zip(with_grads(auto, h, w, y, *options), ref)]
    theirs, ours = errors(linear_by_autograd), errors(linear_cross_entropy, -100, 0., 0., 2*V*2048)
    assert all(o <= 2*t + 1e-5 for o, t in zip(ours, theirs)), (ours, theirs)

@cuda
def test_weight_gradient_sums_in_fp32():
    "Over many chunks the gradient of the weights is nearer to float64 than sums in bf16 would be"
    h, w, y = inputs(8192, 256, 2048, torch.bfloat16)
    w = w.bfloat16()
    exact = linear_loss(h.double(), w.double(), y, 0, -100, 0., 0., False, True)[2]
    dw = linear_loss(h, w, y, 0, -100, 0., 0., False, True)[2]
    assert dw.dtype == torch.float32 and relative_error(dw, exact) < 4e-3

@cuda
def test_peak_memory():
    "At 124m with batch 64 the loss step needs at most a sixth of the plain one's memory"
    N, d, V = 65536, 768, 50304
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30: N //= 8
    def step(loss):
        def build():
            h, w, y = inputs(N, d, V, torch.bfloat16)
            h.requires_grad_(), w.requires_grad_()
            def run():
                h.grad = w.grad = None
                with torch.autocast("cuda", torch.bfloat16): l = loss(h, w, y)
                l.backward()
            return run
        return build
    gc.collect(); torch.cuda.empty_cache()
    ours, plain = (warm_up(step(f))[1].peak_gib for f in (linear_cross_entropy, linear_by_autograd))
    assert ours <= plain/6, (ours, plain)

@cuda
def test_no_waiting():
    "Neither pass makes Python wait for the GPU, and both can be captured in a CUDA graph"
    h, w, y = inputs(3000, 64, 1000, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    def step():
        with torch.autocast("cuda", torch.bfloat16): l = linear_cross_entropy(h, w, y, budget=2**21)
        grads = torch.autograd.grad(l, (h, w))
        return l.detach(), *grads       # a graph kept from the default stream would tie the recording to it
    ref = step()
    torch.cuda.set_sync_debug_mode("error")
    try: step()
    finally: torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream): step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream): out = step()
    graph.replay(); torch.cuda.synchronize()
    assert same(out, ref)

@cuda
def test_compiled_by_inductor():
    "The default compiler takes a whole loss with the rung, in one graph"
    c = replace(workload("tiny"), layers=1)
    run = build(c, ["bf16", "flash", "chunked_ce"])
    x, y = torch.randint(c.vocab, (2, 4, c.seq_len), device="cuda")
    def grads(loss):
        with torch.autocast("cuda", torch.bfloat16): l = loss(run.model, x, y)
        return [l.detach(), *torch.autograd.grad(l, list(run.model.parameters()))]
    for a, b in zip(grads(torch.compile(run.loss, fullgraph=True)), grads(run.loss)):
        torch.testing.assert_close(a, b, rtol=.05, atol=2e-3)
        assert (a - b).norm() <= .05*b.norm()     # most gradients are smaller than that atol

@cuda
def test_counted_at_124m():
    "On a GPU too the counted products are the convention's, all of them in bf16"
    c = workload("124m")
    ops = count_step(c, ["tf32", "bf16", "flash", "chunked_ce"], 2)
    products = [o for o in ops if o.kind == "matrix products"]
    assert sum(o.flops for o in products) == pytest.approx(6*matrix_params(c)*2*c.seq_len, rel=1e-6)
    assert {o.fmt for o in products} == {"bf16"} and "softmax_loss" in {o.name for o in ops} and by_kind(ops)
