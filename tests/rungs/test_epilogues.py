"Lesson 34: what its products compute at odd sizes, in a whole model, under accumulation and recordings; on a GPU by QuACK's kernels"
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from llm_speedrun.io_utils import InputError
from llm_speedrun.model import rope, rope_table
from llm_speedrun.model_config import GPTConfig, workload
from llm_speedrun.runs import build
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Stepper, enter_all
from llm_speedrun.rungs import (epilogues as e, folded_norm, fp8_block_parts as parts8, fp8_epilogues as ep8, fp8_kernels as f8, fp8_loss, fp8_matmul_ops,
                                fused_ce as ce_module, fused_ops, matmul_ops, qk_rope)
from llm_speedrun.rungs.grouped_ce import GroupedCE
from helpers.tiny_runs import fails, pass_of, relative_error

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = pytest.mark.skipif(bool(e.epilogues_missing()), reason=e.epilogues_missing() or "")
cuda = [pytest.mark.cuda, pytest.mark.skipif(not GPU, reason="no GPU")]
SMALL = GPTConfig(vocab=384, layers=2, width=64, heads=2, kv_heads=2, hidden=96, seq_len=32, name="small")
HALF = ["bf16", "fused_ops", "chunked_ce", "head_groups"]
OURS = [*HALF, "epilogues", "fused_ce"]

def rand(*shape, dt=torch.bfloat16, std=1., seed=[0]):
    seed[0] += 1
    return (torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed[0]))*std).to(dt)


SIZES = [(40, 64, 96), (33, 48, 40), (1, 64, 96), (7, 16, 24)]
LARGE = [(4096 + 37, 768, 2048), (1000, 2048, 5632), (1, 768, 2048), (65536, 768, 2048)]
SIZED = pytest.mark.parametrize("N, d, width", [*SIZES, *(pytest.param(*s, marks=cuda) for s in LARGE)])
TYPES = pytest.mark.parametrize("dt", [torch.bfloat16, torch.float16])

@TYPES
@SIZED
def test_products(N, d, width, dt):
    "With and without an addend, in both layouts, as near to float64 as PyTorch's; the stream's rows may be any number"
    x, w, c = rand(N, d, dt=dt), rand(width, d, dt=dt, std=d**-.5), rand(N, width, dt=dt)
    exact = x.double() @ w.double().T
    assert relative_error(e.matmul_add(x, w.T), exact) <= 1.1*relative_error(x @ w.T, exact) + 1e-7
    assert relative_error(e.matmul_add(x, w.T, c), exact + c.double()) <= 1.1*relative_error((x @ w.T) + c, exact + c.double()) + 1e-7
    assert relative_error(e.matmul_add(c, w), c.double() @ w.double()) <= 1.1*relative_error(c @ w, c.double() @ w.double()) + 1e-7

@TYPES
@SIZED
def test_a_product_that_tells_its_norm(N, d, width, dt):
    "The sum is that of `matmul_add`, and 1/rms of its rows as near as rounding it makes that"
    x, w, c = rand(N, d, dt=dt), rand(width, d, dt=dt, std=d**-.5), rand(N, width, dt=dt, std=3.)
    y, r = e.residual_matmul(x, w.T, c, 1e-6)
    exact = y.double().pow(2).mean(1).add(1e-6).rsqrt()
    assert y.equal(e.matmul_add(x, w.T, c)) and r.shape == (N,) and r.dtype == torch.float32 and relative_error(r, exact) < (1.2e-2 if dt == torch.bfloat16 else 1.5e-3)/width**.5

@pytest.mark.parametrize("N", [1, 257, 600])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_a_norm_from_sums(N, T, monkeypatch):
    "All rows, in several programs, small ones too, where eps counts"
    if not GPU: monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = rand(N, T, dt=torch.float32).abs()*1e-6*torch.arange(1, N + 1, device=DEVICE)[:, None]
    exact = (q.double().sum(1)/48 + 1e-6).rsqrt()
    assert torch.allclose(exact, folded_norm.sums_rstd(q, 48, 1e-6).double(), rtol=1e-5)

@TYPES
@SIZED
def test_gated(N, d, width, dt):
    "Gate and up in turn, h, their gradients and h again"
    x, w, dy = rand(N, d, dt=dt), rand(2*width, d, dt=dt, std=d**-.5), rand(N, d, dt=dt)
    v = rand(d, width, dt=dt, std=width**-.5)
    ab, h = e.gated_matmul(x, w)
    p = x.double() @ w.double().T
    assert relative_error(ab, p) <= 1.1*relative_error(x @ w.T, p) + 1e-7
    assert relative_error(h, F.silu(p[:, ::2])*p[:, 1::2]) < (6e-3 if dt == torch.bfloat16 else 1e-3)
    dab, again = e.gated_backward(dy, v, ab)
    a, b = (t.requires_grad_() for t in ab.double().unflatten(1, (-1, 2)).unbind(2))
    mid = F.silu(a)*b
    mid.backward(dy.double() @ v.double())
    assert relative_error(dab, torch.stack([a.grad, b.grad], 2).flatten(1)) < (6e-3 if dt == torch.bfloat16 else 1e-3)
    assert relative_error(again, mid.detach()) < (4e-3 if dt == torch.bfloat16 else 1e-3)

@TYPES
@SIZED
def test_products_with_a_number_for_each_row(N, d, width, dt):
    "As near to float64 as PyTorch's steps, one of which rounds; the gradient of a stream that went through a norm, too"
    h, w, dy, dh = rand(N, d, dt=dt, std=3.), rand(width, d, dt=dt, std=d**-.5), rand(N, width, dt=dt), rand(N, d, dt=dt)
    r = e.row_rstd(h, 1e-6)
    exact_r = h.double().pow(2).mean(1).add(1e-6).rsqrt()
    assert r.dtype == torch.float32 and relative_error(r, exact_r) < 1e-6
    exact = r.double()[:, None]*(h.double() @ w.double().T)
    y = e.matmul_scale_rows(h, w.T, r)
    assert relative_error(y, exact) <= 1.1*relative_error((h @ w.T)*r[:, None].to(dt), exact) + 1e-7
    g, s = (dy*r[:, None]).to(dt), torch.rand_like(r)
    exact = g.double() @ w.double() + dh.double() - h.double()*(r*s).double()[:, None]/d
    theirs = (g @ w) + dh - h*(r*s/d)[:, None].to(dt)
    assert relative_error(e.matmul_backward(g, w, dh, h, r, s), exact) <= 1.1*relative_error(theirs, exact) + 1e-7

@TYPES
@SIZED
def test_gated_with_a_number_for_each_row(N, d, width, dt):
    "Gate and up times r; their gradients times r, h again, and each row's sum of gradients times outputs"
    x, w, dy, r = rand(N, d, dt=dt), rand(2*width, d, dt=dt, std=d**-.5), rand(N, d, dt=dt), rand(N, dt=torch.float32).abs() + .2
    v, most = rand(d, width, dt=dt, std=width**-.5), (6e-3 if dt == torch.bfloat16 else 1e-3)
    ab, h = e.gated_matmul(x, w, r)
    p = r.double()[:, None]*(x.double() @ w.double().T)
    assert relative_error(ab, p) < most and relative_error(h, F.silu(p[:, ::2])*p[:, 1::2]) < most
    g, again, s = e.gated_backward(dy, v, ab, r)
    a, b = (t.requires_grad_() for t in ab.double().unflatten(1, (-1, 2)).unbind(2))
    mid = F.silu(a)*b
    mid.backward(dy.double() @ v.double())
    exact = r.double()[:, None]*torch.stack([a.grad, b.grad], 2).flatten(1)
    assert relative_error(g, exact) < most and relative_error(again, mid.detach()) < most
    assert s.shape == (N,) and s.dtype == torch.float32
    assert (s - (exact*ab).sum(1)).norm()/(exact*ab).abs().sum(1).norm() < most # what is summed may cancel

PARTS = [(65536, 2304, 768, 8), (65536, 768, 768, 8), (65528, 768, 768, 8), (65532, 768, 768, 1), (65536, 768, 2048, 1), (8192, 768, 768, 1), (65536, 4096, 768, 1)]

@pytest.mark.parametrize("N, o, i, parts", PARTS)
def test_parts_of_a_gradient(N, o, i, parts):
    assert matmul_ops.grad_splits(N, o, i) == parts

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("N, o, i", [p[:3] for p in PARTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights(N, o, i, dtype):
    "In one product or in parts, which must all be there: as near as PyTorch's in FP32, or rounded to 16 bits"
    dy, x = rand(N, o), rand(N, i)
    g, exact = e.weight_grad(dy, x, dtype), dy[:, :64].double().T @ x.double()
    assert g.shape == (o, i) and g.dtype == dtype and relative_error(g[:64], exact) < (2e-4 if dtype == torch.float32 else 4e-3)

@pytest.mark.parametrize("B, T, H, K, D", [(2, 9, 4, 2, 16), (1, 1, 2, 2, 32), (3, 5, 3, 1, 8),
    *(pytest.param(*s, marks=cuda) for s in [(8, 1024, 12, 12, 64), (3, 1000, 16, 4, 128), (64, 1024, 12, 12, 64)])])
@TYPES
def test_gradients_of_heads_times_r(B, T, H, K, D, dt, monkeypatch):
    "As notebook 16's kernel, then times r, and the sums over a token, v's among them"
    if not GPU: monkeypatch.setenv("TRITON_INTERPRET", "1")
    qkv, dq, dk, dv = (rand(B, T, n, D, dt=dt) for n in (H + 2*K, H, K, K))
    turn = [rand(D, dt=torch.float32), rand(D, dt=torch.float32), *(rand(T, D//2, dt=torch.float32) for _ in range(2))]
    r, eps = rand(B*T, dt=torch.float32).abs() + .2, 1e-6
    g, dw, s = e.heads_backward(dq, dk, dv, qkv, *turn, r, eps)
    before, dw_before = qk_rope.qk_rope_backward_maths(*(t.double() for t in (dq, dk, dv, qkv, *turn)), eps)
    exact = before*r.double().view(B, T, 1, 1)
    most = 4e-4 if dt == torch.float16 else 3e-3 if GPU else 5e-3 # Triton's interpreter cuts bf16 off
    assert relative_error(g, exact) < most and g.dtype == dt
    assert relative_error(dw, dw_before) < 1e-5 and relative_error(s, (exact*qkv).sum((2, 3)).flatten()) < 1e-5

@pytest.fixture(params=[True, False], ids=["kernel", "PyTorch"])
def kernel(request, monkeypatch):
    "Once by the kernels, on a CPU in Triton's interpreter, and once by PyTorch"
    if not GPU: monkeypatch.setenv("TRITON_INTERPRET", str(int(request.param)))
    elif not request.param: monkeypatch.setattr(folded_norm, "runs_kernel", lambda t: False)

@pytest.fixture(params=[False, True], ids=["below", "in turn"])
def turns(request): return request.param

@pytest.fixture(params=[((40, 40), 24), ((5, 5), 300), ((33, 33, 33), 64), ((64, 8, 8), 40), *(pytest.param(s, marks=cuda) for s in
    [((2048, 2048), 768), ((768, 768, 768), 768), ((2048, 512, 512), 2048), ((5632, 5632), 2048)])], ids=str)
def weights(request, turns):
    "Some weights with as many columns, and a norm's"
    sizes, d = request.param
    if turns and len({*sizes}) > 1: pytest.skip("in turn are only rows of as many")
    return [rand(n, d, dt=torch.float32) for n in sizes], rand(d, dt=torch.float32)

def in_one(ws, turns): return torch.stack(ws, 1).flatten(0, 1) if turns else torch.cat(ws)
def strided(t): return torch.stack([t, t + 1], 1)[:, 0] # the same numbers in another layout

def test_gradients_of_a_norms_weights(weights, turns, kernel):
    "By the kernel and in PyTorch, as autograd has them, rows in turn or below each other"
    ws, norm = weights
    g = rand(sum(map(len, ws)), len(norm), dt=torch.float32)
    ins = [t.double().requires_grad_() for t in (norm, *ws)]
    (in_one(ins[1:], turns)*ins[0]).backward(g.double())
    for t, a in zip(ins, e.norm_weight_grads(g, ws, strided(norm), turns), strict=True):
        assert relative_error(a, t.grad) < 1e-6 and a.is_contiguous() and a.dtype == torch.float32

def test_weights_in_one_matrix(weights, turns, kernel):
    "By the kernel and in PyTorch, the same: times a norm's weights, rows in turn or below each other"
    ws, norm = weights
    ws[0] = ws[0].T.contiguous().T # in another layout
    for dt in (torch.float32, torch.bfloat16) if GPU else (torch.float32,):
        assert all(e.placed(dt, ws, turns, n).equal((in_one(ws, turns)*norm).to(dt)) for n in (norm, strided(norm)))

def test_rows_in_turn_are_as_many(kernel):
    with pytest.raises(InputError, match="rows in turn"): e.placed(torch.float32, [rand(3, 8), rand(4, 8)], True, rand(8))
    with pytest.raises(InputError, match="rows in turn"): e.norm_weight_grads(rand(7, 8), [rand(3, 8), rand(4, 8)], rand(8), True)

EPS = 1e-6
def normed_mlp(h, norm, gate, up, down):
    n = F.rms_norm(h, norm.shape, norm, EPS)
    return h + (F.silu(n @ gate.T.to(n.dtype))*(n @ up.T.to(n.dtype))) @ down.T.to(n.dtype)

def plain_heads(h, norm, wq, wk, wv, qn, kn, turn=None):
    n, D = F.rms_norm(h, norm.shape, norm, EPS), len(qn)
    q, k, v = ((n @ w.T.to(n.dtype)).unflatten(-1, (-1, D)) for w in (wq, wk, wv))
    q, k = (rope(F.rms_norm(t, w.shape, w, EPS).transpose(1, 2), *turn).transpose(1, 2).to(n.dtype) for t, w in ((q, qn), (k, kn)))
    return torch.cat([h, *(t.flatten(2) for t in (q, k, v))], -1)

def all_grads(f, ins):
    "Output and gradients"
    ins = [t.clone().requires_grad_() for t in ins]
    out = f(*ins)
    out.backward(torch.arange(1., out.numel() + 1, device=DEVICE).sin().view_as(out).to(out.dtype))
    return [out.detach(), *(t.grad for t in ins)]

def function_errors(which, dt, B=2, T=13):
    "Errors of all outputs and gradients of one of the two functions: ours, and those of PyTorch in the same type"
    d, F_, D, H, K, wide = 48, 72, 16, 4, 2, torch.float32
    h, norm = rand(B, T, d, dt=dt, std=3.), rand(d, dt=wide) + .5
    if which == "project":
        ins = h, rand(B, T, H*D, dt=dt), rand(d, H*D, dt=wide, std=(H*D)**-.5)
        plain, ours = lambda h, o, w: h + o @ w.T.to(o.dtype), lambda *a: e.EpilogueProject.apply(*a, EPS)[0]
    elif which == "mlp":
        ins = h, norm, *(rand(a, b, dt=wide, std=b**-.5) for a, b in ((F_, d), (F_, d), (d, F_)))
        plain, ours = normed_mlp, lambda *a: e.EpilogueMLP.apply(*a, EPS)[0]
    else:
        turn = [t.to(DEVICE) for t in rope_table(T, D, 1e4)]
        ins = h, norm, *(rand(n*D, d, dt=wide, std=d**-.5) for n in (H, K, K)), rand(D, dt=wide) + .5, rand(D, dt=wide) + .5
        plain = lambda *a: plain_heads(*a, turn=turn)
        ours = lambda *a: torch.cat([t.flatten(2) for t in e.EpilogueHeads.apply(*a, *turn, EPS)], -1)
    exact = all_grads(plain, [t.double() for t in ins])
    halves = [t.to(dt) for t in ins] # PyTorch's, weights in 16 bits
    return [[relative_error(b, a) for a, b in zip(exact, res)] for res in (all_grads(ours, ins), all_grads(plain, halves))]

FUNCTIONS = pytest.mark.parametrize("which", ["mlp", "heads"])

@TYPES
@pytest.mark.parametrize("which", ["mlp", "heads", "project"])
def test_functions_with_a_norm_inside(which, dt):
    "The output and all gradients at most twice as far from float64 as PyTorch's"
    ours, theirs = function_errors(which, dt)
    assert all(a < 2*b for a, b in zip(ours, theirs)), (ours, theirs)

WRONG = {"r left out": ("row_rstd", lambda f, x, eps: torch.ones_like(f(x, eps))),
         "the part along h, its sign": ("matmul_backward", lambda f, g, w, dh, h, r, s: f(g, w, dh, h, r, -s)),
         "no part along h": ("matmul_backward", lambda f, g, w, dh, h, r, s: f(g, w, dh, h, r, 0*s)),
         "r missing there": ("matmul_backward", lambda f, g, w, dh, h, r, s: f(g, w, dh, h, torch.ones_like(r), s)),
         "nothing around": ("matmul_backward", lambda f, g, w, dh, h, r, s: f(g, w, 0*dh, h, r, s)),
         "w left out": ("placed", lambda f, dt, ws, turns, norm: f(dt, ws, turns, torch.ones_like(norm))),
         "w left out on the way back": ("norm_weight_grads", lambda f, g, ws, norm, turns: f(g, ws, torch.ones_like(norm), turns)),
         "two weights swapped": ("norm_weight_grads", lambda f, g, ws, norm, turns: [(r := f(g, ws, norm, turns))[0], *r[1:-2], r[-1], r[-2]]),
         "the norm's gradient without W": ("norm_weight_grads", lambda f, g, ws, norm, turns: [g.sum(0), *f(g, ws, norm, turns)[1:]])}
BACK = {"mlp": ("gated_backward", lambda f, dy, w, ab, r: [(t := f(dy, w, ab, r))[0]/r[:, None].to(ab.dtype), *t[1:]]),
        "heads": ("heads_backward", lambda f, *a: [(t := f(*a))[0]/a[8].view(2, -1, 1, 1).to(a[0].dtype), *t[1:]])}

@FUNCTIONS
@pytest.mark.parametrize("what", [*WRONG, "gradients without r"])
def test_wrong_norms_are_found(which, what, monkeypatch):
    "Each step of the maths that one could forget"
    name, wrong = WRONG[what] if what in WRONG else BACK[which]
    right = getattr(e, name)
    monkeypatch.setattr(e, name, lambda *a, **k: wrong(right, *a, **k))
    with pytest.raises(AssertionError): test_functions_with_a_norm_inside(which, torch.bfloat16)

@pytest.mark.parametrize("name, wrong", [("weight_grad", lambda f, *a: f(*a).roll(1, 0)), ("matmul_add", lambda f, g, w: f(g, w.roll(1, 0))),
    ("residual_matmul", lambda f, a, b, c, eps: f(a, b, 0*c, eps))], ids=["weight", "input", "output"])
def test_a_wrong_projection_is_found(name, wrong, monkeypatch):
    right = getattr(e, name)
    monkeypatch.setattr(e, name, lambda *a: wrong(right, *a))
    with pytest.raises(AssertionError): test_functions_with_a_norm_inside("project", torch.bfloat16)

def test_a_stream_that_gets_no_gradient():
    "What comes behind may be a function that returns none"
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h): return h.float().sum()
        @staticmethod
        def backward(ctx, g): return None
    h, ws = rand(2, 9, 48).requires_grad_(), [rand(a, b, dt=torch.float32).requires_grad_() for a, b in ((72, 48), (72, 48), (48, 72), (48, 48))]
    out, _ = e.EpilogueMLP.apply(h, torch.ones(48, device=DEVICE), *ws[:3], EPS)
    Ends.apply(e.EpilogueProject.apply(out, out, ws[3], EPS)[0]).backward()
    assert h.grad is None or not h.grad.any()

def test_no_n_is_kept():
    "Nothing of the stream's size but the stream is saved by either function"
    h, norm = rand(2, 17, 48).requires_grad_(), torch.ones(48, device=DEVICE, requires_grad=True)
    seen = []
    def note(t): seen.append(t); return t
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        ws = [rand(a, b, dt=torch.float32).requires_grad_() for a, b in ((72, 48), (72, 48), (48, 72))]
        e.EpilogueMLP.apply(h, norm, *ws, EPS)
        ws, turn = [rand(n, 48, dt=torch.float32).requires_grad_() for n in (64, 32, 32)], rand(17, 8, dt=torch.float32)
        e.EpilogueHeads.apply(h, norm, *ws, *(torch.ones(16, device=DEVICE, requires_grad=True) for _ in range(2)), turn, turn, EPS)
    assert {t.data_ptr() for t in seen if t.numel() == h.numel()} == {h.data_ptr()}

def test_nan_stays_in_its_row():
    "A NaN in a token's row is in all that comes of it, and in nothing else"
    x, w, v = rand(300, 64), rand(192, 64, std=.1), rand(64, 96, std=.1)
    x[5, 3] = torch.nan
    ab, h = e.gated_matmul(x, w)
    dab, again = e.gated_backward(rand(300, 64), v, ab)
    r = e.row_rstd(x, EPS)
    s = e.gated_backward(rand(300, 64), v, ab, r)[2][:, None]
    back = e.matmul_backward(rand(300, 192), w, rand(300, 64), x, r, s[:, 0])
    for t in (ab, h, dab, again, e.matmul_add(x, w.T), e.matmul_add(rand(300, 192), w, x), *(t.view(300, -1) for t in e.residual_matmul(rand(300, 192), w, x, EPS)), e.matmul_scale_rows(x, w.T, r), s, back):
        assert t[5].isnan().any() and t[:5].isfinite().all() and t[6:].isfinite().all()

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("std", [1., 6.])
@pytest.mark.parametrize("n, d, V", [(4096, 768, 50304), (1000, 2048, 50304), (257, 64, 384), (1, 64, 384), (65536, 768, 50304),
    (600, 32, 384), (768, 768, 1152), (700, 768, 1152), (2048, 2048, 1024)])
def test_fused_loss(n, d, V, std):
    """Losses as near to float64 as notebook 33's, gradients within some roundings to bf16: of the exponentials, a row's factor, and this times h.
    With large logits too, at any number of tokens, as many as the width among them, in several chunks"""
    h, w, y = rand(n, d, std=std), rand(V, d, std=d**-.5), torch.randint(V, (n,), device=DEVICE)
    y[1::7] = -100
    small = dict(group=2**28, budget=2**27)
    (l, dh, dw, count), theirs = (f(**small).grads16(h, w, y, True) for f in (ce_module.FusedCE, GroupedCE))
    assert ce_module.FusedCE(**small).fits(h, w) and count == theirs[3] and dw.dtype == torch.float32
    m = min(n, 2048) # rows for float64
    logits = h[:m].double() @ w.double().T
    loss = F.cross_entropy(logits, y[:m], reduction="none")
    p = logits.softmax(1)
    keep = (y[:m] != -100)[:, None]
    p[torch.arange(m), y[:m].clamp(min=0)] -= 1
    exact = (p*keep) @ w.double()/count
    assert relative_error(l[:m], loss) <= 1.1*relative_error(theirs[0][:m], loss) + 1e-6
    assert relative_error(dh[:m], exact) < 4e-3
    if m == n:
        dw_exact = (p*keep).T @ h.double()/count
        assert relative_error(dw, dw_exact) < (8e-3 if n == 1 else 5e-3) # the rounding of one row's factor is every element's
    else: assert relative_error(dw, theirs[2].double()) < 2e-2

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_fused_loss_of_bad_rows():
    "A target that is no token gives NaN for its loss alone, and for all gradients; a NaN stays in its row's gradient and in dw"
    h, w, y = rand(300, 64), rand(384, 64, std=.1), torch.randint(384, (300,), device=DEVICE)
    bad = y.clone()
    bad[5], bad[9] = 384, -3
    loss, dh, dw, count = ce_module.FusedCE().grads16(h, w, bad, True)
    assert loss.isnan().nonzero().flatten().tolist() == [5, 9] and dw.isnan().all() and dh.isnan().all()
    h[7, 3] = torch.nan
    loss, dh, dw, _ = ce_module.FusedCE().grads16(h, w, y, True)
    assert loss[7].isnan() and dh[7].isnan().any() and dh[8].isfinite().all() and dw.isnan().any()
    assert ce_module.FusedCE().grads16(h, w, y, False)[2].numel() == 0

def grads(rungs, micro=1, config=SMALL, evals=False):
    "Loss and gradients of a step's batch, in some micro-batches, some targets left out"
    run = build(config, rungs, DEVICE)
    x, y = torch.randint(config.vocab, (2, 4, config.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    y[:, ::5] = -100
    total = 0
    for a, b in zip(x.chunk(micro), y.chunk(micro)):
        with enter_all(run.forward_contexts): loss = run.loss(run.model, a, b)
        (loss/micro).backward(); total += loss.item()/micro
    return total, {k: p.grad.clone() for k, p in run.model.named_parameters()}

def near(rungs, others, most=1.15, **how):
    "Whether gradients by `rungs` are as near to FP32's as those by `others`; errors of n numbers differ by some 1/sqrt(n) by chance"
    _, exact = grads([r for r in ("chunked_ce",) if r in rungs], config=how.get("config", SMALL))
    (a, ga), (b, gb) = (grads(r, **how) for r in (rungs, others))
    assert abs(a - b) < 2e-3
    for k, t in exact.items(): assert relative_error(ga[k], t) <= most*(1 + 3/t.numel()**.5)*relative_error(gb[k], t) + 1e-3, k

@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("more", [[], ["checkpoint"], ["tied_embedding"]], ids=lambda m: "+".join(m) or "alone")
def test_a_models_gradients(more, micro):
    "As near to FP32's as the course's, in one pass and in several, computed again, and with the table's gradient added to the head's"
    near([*OURS, *more], [*HALF, *more], micro=micro)

def test_fewer_key_heads():
    near(OURS, HALF, config=replace(SMALL, heads=4, kv_heads=2))

def test_a_wrong_gradient_is_found(monkeypatch):
    "Such as gate's for up's"
    right = e.placed
    monkeypatch.setattr(e, "placed", lambda dt, ws, turns, norm: right(dt, ws[::-1] if turns else ws, turns, norm))
    with pytest.raises(AssertionError): near(OURS, HALF)

def test_evaluation_and_generation():
    "Without gradients the same functions run, on any number of rows"
    run, plain = (build(SMALL, r, DEVICE) for r in (OURS, HALF))
    x = torch.randint(SMALL.vocab, (1, 5), device=DEVICE)
    with torch.no_grad():
        for n in (1, 2, 5):
            with torch.autocast(DEVICE.type, torch.bfloat16): a, b = (r.model(x[:, :n]) for r in (run, plain))
            assert relative_error(a, b) < 2e-2

def test_a_norm_is_told_by_the_product_before(monkeypatch):
    "Only the first stream's 1/rms is made by a kernel; where the stream becomes another tensor, all of them are; the output is the same"
    run, made, right = build(SMALL, OURS, DEVICE), [], e.row_rstd
    monkeypatch.setattr(e, "row_rstd", lambda x, eps: made.append(x) or right(x, eps))
    x = torch.randint(SMALL.vocab, (2, SMALL.seq_len), device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        told = run.model(x)
        assert len(made) == 1
        monkeypatch.setattr(e, "with_rstd", lambda h, r, eps: h)
        anew = run.model(x)
        assert len(made) == 2 + 2*SMALL.layers - 1
    assert relative_error(told, anew) < 8e-3
    with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16): assert relative_error(run.model(x), anew) < 8e-3

def test_steps_learn():
    "Some steps of the whole list, clipped: the loss falls as it does without"
    res = []
    for rungs in (OURS, HALF):
        run = build(SMALL, [*rungs, "fused_adamw"], DEVICE)
        step = Stepper(run)
        x = torch.randint(SMALL.vocab, (2, 4, SMALL.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
        res.append([step((x[0], x[1])).item() for _ in range(8)])
    assert res[0][-1] < res[0][0] - .3 and max(abs(a - b) for a, b in zip(*res)) < 3e-2

def test_what_is_counted():
    "The counter sees the products with their FLOPs, and fewer bytes than without"
    a, b = (count_step(SMALL, r, 2) for r in (HALF, OURS))
    assert abs(sum(o.flops for o in a)/sum(o.flops for o in b) - 1) < 1e-6
    assert sum(o.bytes for o in b) < sum(o.bytes for o in a)
    assert {"matmul_add", "residual_matmul", "matmul_scale_rows", "matmul_backward", "gated_matmul", "gated_backward", "weight_grad"} <= {o.name for o in b}

def test_no_chunk_has_as_many_rows_as_columns():
    "QuACK couldn't tell a vector of one from one of the other; in whole blocks of 128, and the least of those that fill the GPU as well"
    for d in (128, 256, 768, 1000, 2048):
        for N in [*range(1, 3000, 61), 768, 1024, 2048, 2049, 65536]:
            for most in (128, 700, 768, 2048, 16896):
                c = ce_module.fused_chunk(N, d, most, 132)
                if c is None: assert d in (128, 256) and (most <= d or N <= d); continue
                rows = {-(-min(c, N - i)//128)*128 for i in range(0, N, c)}
                assert c % 128 == 0 and c < most + 128 and d not in rows
    assert ce_module.fused_chunk(65536, 768, 16896, 132) == 16384 and ce_module.fused_chunk(600, 32, 600, 132) == 640 and ce_module.fused_chunk(2048, 2048, 2048, 132) == 1024
    assert [ce_module.fused_chunk(65536, 768, g*2**20//(2*50304), 132) for g in (2048, 1024, 512)] == [16384, 8192, 4096]
    for d, most in ((768, 21345), (768, 10672), (768, 5336), (2048, 21345)):     # as few rounds as of all tokens at once
        c, cols, up = ce_module.fused_chunk(65536, d, most, 132), 4 if d == 768 else 8, lambda a, b: -(-a//b)
        assert sum(up(up(min(c, 65536 - i), 256)*cols, 66) for i in range(0, 65536, c)) == up(256*cols, 66)

@pytest.mark.parametrize("how", [dict(softcap=15.), dict(z_loss=1e-4)])
def test_what_the_fused_loss_leaves_to_the_kernel(how):
    h, w = rand(8, 64), rand(384, 64)
    assert ce_module.FusedCE().fits(h, w) == GPU and not ce_module.FusedCE(**how).fits(h, w)
    assert not ce_module.FusedCE().fits(h.half(), w) and not ce_module.FusedCE().fits(h, w[:200])

EIGHT = ["bf16", "fused_ops", "chunked_ce", "fp8"]

PARTED = "bf16", "fused_ops", "chunked_ce"

@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("more", [[], ["head_groups"], ["head_groups", "checkpoint"], ["head_groups", "tied_embedding"]], ids="+".join)
def test_in_fp8(more, micro):
    "Gradients are nearly as near to FP32's as without, though gate and up are rounded to 8 bits; in one pass and in several"
    near([*EIGHT, *more, "fp8_epilogues"], [*EIGHT, *more], micro=micro, most=1.25)

def test_in_fp8_with_fewer_key_heads():
    near([*EIGHT, "fp8_epilogues"], EIGHT, config=replace(SMALL, heads=4, kv_heads=2), most=1.25)

def test_scales_grow_with_what_they_cut_off():
    "Gate and up fill half of the format. Where they outgrow it, what is kept tells no more than that; the scale halves until they fit"
    run = build(SMALL, [*EIGHT, "head_groups", "fp8_epilogues"], DEVICE)
    step = Stepper(run)
    x = torch.randint(SMALL.vocab, (2, 4, SMALL.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    scales = run.model.layers[0].scales
    i, j = (f8.SLOT_NAMES.index(k) for k in ("ab", "h"))
    for group in step.opt.param_groups: group["lr"] = 0.
    for _ in range(3): step((x[0], x[1]))
    half, whole = scales.scale[i]*scales.forward_max[i, 0]/2, scales.scale[j]*scales.forward_max[j, 0]
    assert abs(half - 224) < 10 and abs(whole - 448) < 20
    scales.scaling.past[:, 0, i] /= 16; scales.forward_max[i, 0] /= 16      # as if gate and up had been so small until now
    seen = []
    for _ in range(7): step((x[0], x[1])); seen.append((scales.scale[i]*scales.forward_max[i, 0]/2).item())
    assert seen[0] == 448 and abs(seen[-1] - 224) < 40, seen    # cut off at first

@pytest.mark.parametrize("parts", ["heads", "out", "mlp", "heads+mlp+head", "out+mlp"])
def test_only_where_fp8_is(parts):
    "Parts that stayed in bf16 stay what they were, and go together with ours"
    base = [*PARTED, f"fp8:parts={parts}"]
    plain, ours = (build(SMALL, [*base, *r], DEVICE).model.layers[0] for r in ([], ["fp8_epilogues"]))
    for part, name in dict(heads="heads", out="project", mlp="feed").items():
        assert (getattr(plain, name) is not getattr(ours, name)) == (part in parts.split("+"))
    near([*base, "fp8_epilogues"], base, most=1.25)

def test_products_with_gradients_hand_out_their_sums(monkeypatch):
    "None of them lets the tensor cores keep its sums: those drop small numbers of one sign, and random numbers don't show that"
    seen, real = [], parts8.matmul
    def matmul(slots, a, b, name_a, name_b, **how):
        seen.append((name_a, name_b, how.get("fast", False)))
        return real(slots, a, b, name_a, name_b, **how)
    monkeypatch.setattr(parts8, "matmul", matmul)
    x, y = torch.randint(SMALL.vocab, (2, 2, SMALL.seq_len), device=DEVICE)
    run = build(SMALL, [*EIGHT, "head_groups", "fp8_epilogues"], DEVICE)
    with enter_all(run.step_contexts):
        with enter_all(run.forward_contexts): run.loss(run.model, x, y).backward()
    assert len(seen) == 8*SMALL.layers and all(a[0] == "d" and not fast for a, _, fast in seen)

@pytest.mark.parametrize("N, width", [(37, 48), (64, 128), (5, 1040), *(pytest.param(*s, marks=cuda) for s in [(65536, 2048), (3001, 5632)])])
@pytest.mark.parametrize("dt", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_the_way_back_from_8_bits(N, width, dt, monkeypatch):
    "The bytes that lesson 19's kernels make of the same numbers, but for a few that lie between two; the same maxima, and a NaN"
    if not GPU: monkeypatch.setenv("TRITON_INTERPRET", "1")
    ab, dh = rand(N, 2*width, std=16.).to(f8.E4M3), rand(N, width)
    for bad in (False, True)[:1 + GPU]: # the interpreter rounds no NaN to E5M2
        if bad: ab[N//2, 6] = torch.nan
        inverse, sh, scale = (torch.full((1,), t, device=DEVICE) for t in (1/16, 8., 4.))
        a, b = torch.zeros(2, 3, 4, device=DEVICE)[..., :1].unbind()     # maxima of gate and up, of h, of the gradient; each in 16 bytes of its own
        wide = matmul_ops.deinterleave((ab.float()*inverse).bfloat16()).contiguous()
        one = *f8.swiglu_backward_quantize(wide, dh, scale, a[2], dt), f8.swiglu_quantize(wide, sh, a[1])[1]
        two = ep8.gated8_back(ab, dh, inverse, b[0], sh, b[1], scale, b[2], dt)
        for x, y in zip(one, two):
            if GPU: assert (x.view(torch.uint8) != y.view(torch.uint8)).float().mean() < 1e-3 and (x.float().isnan() == y.float().isnan()).all()
            torch.testing.assert_close(x.float(), y.float(), rtol=.26 if GPU else 0, atol=1e-4 if dt == torch.float8_e5m2 else 2e-3, equal_nan=True)
        if bad: assert a[1:].isnan().all() and b[2].isnan()     # of the three it is enough that the gradient's tells
        else: torch.testing.assert_close(a[1:], b[1:], rtol=1e-5, atol=0); assert b[0] == 2*wide.abs().max()

@pytest.mark.parametrize("N, d", [(37, 48), (5, 768), (1, 16), *(pytest.param(*s, marks=cuda) for s in [(65536, 768), (3001, 2048)])])
def test_the_norm_of_the_stream(N, d, monkeypatch):
    if not GPU: monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, w, scale, (a, b) = rand(N, d), rand(d, dt=torch.float32), torch.full((1,), 8., device=DEVICE), torch.zeros(2, 1, device=DEVICE).unbind()
    for one, two in zip(parts8.stream_norm(x, w, 1e-6, scale, a), f8.norm_quantize(x, None, w, 1e-6, scale, b)[1:]):
        torch.testing.assert_close(one.float(), two.float(), rtol=1e-6, atol=0)
    assert a.equal(b)

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("N, d, width", [(4096, 768, 2048), (1008, 2048, 5632), (16, 64, 96), (33, 48, 48), (1, 64, 96), (65536, 768, 2048)])
def test_products_in_8_bits(N, d, width):
    "What QuACK stores are the exact numbers rounded, but for a few between two"
    x, w = rand(N, d, std=16.).to(f8.E4M3), rand(2*width, d, std=64*d**-.5).to(f8.E4M3)
    ia, ib, sab, sh = (torch.full((1,), t, device=DEVICE) for t in (1/16, 1/64, 16., 8.))
    ab, h = ep8.gated8_op._init_fn(x, w, ia, ib, sab, sh)
    rows = slice(-min(N, 512), None)
    exact = x[rows].double() @ w.double().T/1024
    for t, e8, s in zip((ab, h), (exact, F.silu(exact[:, ::2])*exact[:, 1::2]), (sab, sh)):
        assert (t[rows].float() != fp8_matmul_ops.in_e4m3(e8, s).float()).float().mean() < .06
        assert relative_error(t[rows].float(), (e8*s.double()).clamp(-448, 448)) < .04
    c, v = rand(N, d), rand(d, width, std=64*width**-.5).to(f8.E4M3)
    exact = h[rows].double() @ v.double().T/1024
    assert relative_error(ep8.matmul8_op._init_fn(h, v, ia, ib, None)[rows], exact) < 4e-3
    assert relative_error(ep8.matmul8_op._init_fn(h, v, ia, ib, c)[rows], exact + c[rows].double()) < 4e-3

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("n, d, V", [(6656, 768, 50304), (1000, 2048, 50304), (16, 64, 384), (1, 64, 128), (257, 64, 640)])
@pytest.mark.parametrize("shift", [0., 1., -1.])
def test_sums_of_exponentials(n, d, V, shift):
    "Losses and log-sum-exps as lesson 33's, also of logits whose exponentials FP32 doesn't hold"
    h, w, y = rand(n, d, std=8.).to(f8.E4M3), rand(V, d, std=16*d**-.5).to(f8.E4M3), torch.randint(V, (n,), device=DEVICE)
    if shift: h[::2, 0], w[:, 0] = 100., 100*shift     # some rows are far out of range
    y[1::7] = -100
    ia, ib = (torch.full((1,), t, device=DEVICE) for t in (1/8, 1/8))
    logits, sums = ep8.logits8(h, w, ia, ib)
    for one, two in zip(ep8.summed_loss(sums, logits, y, -100, 1e-4), fp8_loss.loss_lse(logits, y, -100, 1e-4, 0.)):
        torch.testing.assert_close(one, two, rtol=2e-4, atol=2e-3)

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("d, V", [(768, 50304), (2048, 640)])
def test_logits_are_not_truncated(d, V, monkeypatch):
    "Sums inside of the tensor cores are: all logits of one sign come out too small"
    h, w = rand(1024, d, std=8.).abs().to(f8.E4M3), rand(V, d, std=16*d**-.5).abs().to(f8.E4M3)
    exact, ia, ib = h.double() @ w.double().T/64, *(torch.full((1,), 1/8, device=DEVICE) for _ in range(2))
    def bias(): return (ep8.logits8(h, w, ia, ib)[0].double()/exact - 1).mean().abs().item()
    promoted = bias()
    monkeypatch.setattr(ep8, "PROMOTED", fp8_matmul_ops.FAST_ACCUM)
    assert promoted < bias()/4, (promoted, bias())

@pytest.mark.parametrize("weight", ["mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"])
def test_a_nan_is_noticed(weight):
    "Whatever it comes from: the norm of such a step is infinite, as without, and the trainer doesn't take it"
    run = build(SMALL, [*EIGHT, "head_groups", "fp8_epilogues", "fused_adamw"], DEVICE)
    step = Stepper(run)
    x = torch.randint(SMALL.vocab, (2, 4, SMALL.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    for _ in range(2): step((x[0], x[1])); assert step.norm.isfinite()
    with torch.no_grad(): run.model.layers[0].get_submodule(weight).weight[3, 5] = torch.nan
    step((x[0], x[1]))
    assert step.norm.isinf() and run.checks[0]()

@pytest.mark.parametrize("wrong", ["wab", "dm", "turned"])
def test_a_wrong_gradient_in_fp8_is_found(monkeypatch, wrong):
    "Such as one of another scale, or of up for gate's"
    right, back = parts8.matmul, parts8.gated8_back
    if wrong == "turned": monkeypatch.setattr(parts8, "gated8_back", lambda ab, *rest: back(ab.view(torch.uint8).unflatten(1, (-1, 2)).flip(2).flatten(1).view(ab.dtype), *rest))
    else: monkeypatch.setattr(parts8, "matmul", lambda s, a, b, na, nb, **how: right(s, a, b, na, nb, **how)*(1.3 if wrong in (na, nb) else 1))
    with pytest.raises(AssertionError): near([*EIGHT, "fp8_epilogues"], EIGHT, most=1.25)

@pytest.mark.parametrize("rungs, why", [
    ("bf16,fused_ops,fp8_epilogues", "builds on 'fp8'"), ("bf16,fused_ops,fp8,fp8_epilogues,compile", "exclude"), ("epilogues", "builds on 'fused_ops'"), ("fused_ops,epilogues", "needs 16 bits"), ("bf16,fused_ops,fp8,epilogues", "exclude"),
    ("bf16,fused_ops,epilogues,compile", "exclude"), ("bf16,fused_ce", "builds on 'head_groups'")])
def test_refusals(rungs, why):
    with fails(ValueError, why): build(SMALL, rungs.split(","), DEVICE)

def test_odd_widths_are_refused():
    with fails(ValueError, "multiples of 8", "leave it out"): build(replace(SMALL, hidden=100), OURS, DEVICE)

@pytest.mark.parametrize("check, rungs", [("fused_error", OURS), ("epilogues_error", OURS), ("fp8_epilogues_error", [*EIGHT, "fp8_epilogues"])])
def test_kernels_that_fail_are_named(check, rungs, monkeypatch):
    "And the error knows its rung, so that a preset can go on without it"
    monkeypatch.setattr(dict(fused_error=ce_module, epilogues_error=e, fp8_epilogues_error=ep8)[check], check, lambda *a: "RuntimeError: no such tile")
    with fails(RuntimeError, "no such tile", "Leave the rung out") as said: build(SMALL, rungs, DEVICE)
    assert said.value.rung == dict(fused_error="fused_ce", epilogues_error="epilogues", fp8_epilogues_error="fp8_epilogues")[check]

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_the_fused_loss_is_tried(monkeypatch):
    "Where it would run, and nowhere else"
    ce = ce_module.FusedCE()
    assert ce_module.fused_error(ce, 50304, 768, DEVICE) == ""
    with FakeTensorMode(): assert ce_module.fused_error(ce, 384, 72, DEVICE) == "" # as where options are chosen
    monkeypatch.setattr(ce_module, "fused_grads", lambda *a: 1/0)
    assert "ZeroDivisionError" in ce_module.fused_error(ce, 256, 80, DEVICE) # of a size that nothing else asks for
    for other in (dict(softcap=15.), dict(z_loss=1e-4)): assert ce_module.fused_error(ce_module.FusedCE(**other), 256, 80, DEVICE) == ""

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_recorded():
    "A recording gives what the passes before it gave, at 124m's width"
    c = replace(workload("124m"), layers=2)
    run = build(c, [*OURS, "cuda_graphs"])
    x, y = torch.randint(c.vocab, (2, 2, c.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    (first, *exact), *later = [pass_of(run, x, y) for _ in range(4)]
    for loss, *gs in later:
        assert loss.item() == pytest.approx(first.item(), abs=1e-3)     # cuBLAS may sum in another order while it is recorded, and bf16 rounds that
        for a, b in zip(exact, gs): assert relative_error(b, a) < 1e-2
