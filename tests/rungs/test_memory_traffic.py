"""Fewer passes: gradients of logits in groups, the clip inside of AdamW; each against float64 or against what it replaces, with
deliberate mistakes that must not pass."""
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import pytest, torch, torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
import llm_speedrun.rungs.memory_traffic as module
from llm_speedrun.rungs import fp8_loss, fused_fp8, grouped_ce
from llm_speedrun.model_config import workload
from llm_speedrun.rungs.checkpointing import count_memory
from llm_speedrun.rungs.chunked_ce import ChunkedCE
from llm_speedrun.rungs.documents import within_documents
from llm_speedrun.rungs.grouped_ce import group_sizes, GroupedCE, logits_into, mean_loss, mul_
from llm_speedrun.rungs.memory_traffic import (ClippedAdamW, direct_update, DirectBackward, head_groups, qkv_of_values, recompute_on_unpack,
                                               recompute_rope)
from llm_speedrun.rungs.fp8 import E5M2, mm8
from llm_speedrun.rungs.fp8_kernels import LayerScales, Scaling, empty_pair
from llm_speedrun.rungs.fp8_loss import Fp8CE, logits_quantize
from llm_speedrun.rungs.multi_tensor_adamw import update_triton
from llm_speedrun.rungs.optim import update_torch
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.runs import Run, build
from llm_speedrun.rung_registry import find_rung
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Backward, PrecomputedGrads, Stepper, enter_all
from llm_speedrun.course import reference_errors
from llm_speedrun.checkpoint.format import load_named_state, named_state, flatten_state, unflatten_state
from helpers.examples import example
from helpers.tiny_runs import fails, NANO, pass_of, relative_error

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FUSED = ["bf16", "flash", "fused_ops", "chunked_ce"]
FP8 = FUSED + ["fp8:parts=heads+out+mlp+head"]

def rand(*shape, dt=torch.float32, seed=0):
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dt)

def targets(n, V): return torch.randint(V, (n,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(9))

def scales(scale=8.):
    s = Scaling(1, E5M2, DEVICE); s.jit = False
    s.scale.fill_(scale); s.inverse.fill_(1/scale)
    return LayerScales(s, 0, E5M2)

def grads(loss, h, w, y, factor=1.):
    h, w = (t.clone().requires_grad_() for t in (h, w))
    out = loss(h, w, y)
    (factor*out).backward()
    return out.detach(), h.grad, w.grad


def exactly(h, w, y, ignore=-100, z_loss=0., softcap=0.):
    x = (h.double() @ w.double().T).flatten(0, -2)
    if softcap: x = softcap*torch.tanh(x/softcap)
    y = y.flatten()
    z = z_loss*(x.logsumexp(-1)**2)[y != ignore].mean() if z_loss else 0.
    return F.cross_entropy(x, y, ignore_index=ignore) + z

# Gradients of logits in groups

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("n, V, cuts", [(43, 64, (16, 32)), (48, 48, (32,)), (1, 16, ()), (20, 50, (16,))])
def test_gradients_of_logits_go_where_they_belong(n, V, cuts):
    x, y = rand(n, V, dt=torch.bfloat16), targets(n, V)
    y[n//2:n//2 + 1] = -100
    lse, (q, t) = x.float().logsumexp(1), empty_pair(x, n, V, E5M2)
    for a, b in zip((0, *cuts), (*cuts, n)):
        logits_into(x[a:b], y[a:b], lse[a:b], q[a:b], t[:, a:b], -100, 1e-3, 5.)
    one, turned = logits_quantize(x, y, lse, -100, 1e-3, 5.)
    assert torch.equal(q.view(torch.uint8), one.view(torch.uint8)) and torch.equal(t.view(torch.uint8), turned.view(torch.uint8))

SMALL = dict(budget=2**13, group=2**16)     # at V = 96: groups of 256, chunks of 128

def case(dt=torch.bfloat16, n=300, V=96, d=32):
    h, w, y = rand(n//2, 2, d, dt=dt), rand(V, d, seed=1).to(dt if dt == torch.float64 else torch.float32), targets(n, V).view(-1, 2)
    y[0] = y[-3:] = -100
    return h, w, y

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("z_loss, softcap", [(0., 0.), (1e-2, 4.)])
@pytest.mark.parametrize("dt, V", [(torch.bfloat16, 300), (torch.float32, 257)])
def test_gradient_of_the_mean(dt, V, z_loss, softcap):
    x, y, n = rand(5, V, dt=dt), targets(5, V), torch.full((1,), 4., device=DEVICE)
    y[2] = -100
    r = x.double().requires_grad_()
    z = r if not softcap else softcap*torch.tanh(r/softcap)
    (F.cross_entropy(z, y) + z_loss*(z.logsumexp(1)**2)[y != -100].mean()).backward()
    want = z.detach().logsumexp(1) - z.detach().gather(1, y.clamp(min=0)[:, None])[:, 0]
    want = (want + z_loss*z.detach().logsumexp(1)**2).where(y != -100, 0)
    got = x.clone()
    torch.testing.assert_close(mean_loss(got, y, n, -100, z_loss, softcap).double(), want, rtol=1e-5, atol=1e-5)
    assert not got[2].any() and relative_error(got, r.grad) < (4e-3 if dt == torch.bfloat16 else 2e-6)     # the interpreter cuts off
    poisoned = x.clone(); poisoned[1, 7], poisoned[3, 0] = torch.nan, torch.inf
    loss = mean_loss(poisoned, y, n, -100, z_loss, softcap)
    assert loss[1].isnan() and poisoned[1].isnan().all() and poisoned[0].isfinite().all()
    if GPU: assert mean_loss(x.clone(), y.where(y != y[0], V + 3), n, -100, z_loss, softcap)[0].isnan()

@pytest.mark.usefixtures("kernels")
def test_groups_by_the_kernels():
    h, w, y = case(n=150)
    exact = grads(exactly, h.double(), w.double(), y)
    for e, x in zip(exact, grads(GroupedCE(**SMALL, scales=scales()), h, w, y)): assert relative_error(x, e) < .2

@pytest.mark.parametrize("z_loss, softcap", [(0., 0.), (1e-2, 4.)])
@pytest.mark.parametrize("kind", ["fp8", torch.bfloat16, torch.float32])
def test_groups_are_as_exact_as_chunks(kind, z_loss, softcap):
    h, w, y = case(torch.bfloat16 if kind == "fp8" else kind)
    if kind == torch.bfloat16: w = w.bfloat16()
    more = dict(scales=scales()) if kind == "fp8" else {}
    options = dict(z_loss=z_loss, softcap=softcap)
    exact = grads(partial(exactly, **options), h.double(), w.double(), y, 2.)
    ours = grads(GroupedCE(**SMALL, **options, **more), h, w, y, 2.)
    theirs = grads((Fp8CE if more else ChunkedCE)(**options, budget=2**15, **more), h, w, y, 2.)
    assert ours[1].dtype == h.dtype and ours[2].dtype == w.dtype
    for e, a, b in zip(exact, ours, theirs): assert relative_error(a, e) < 1.1*relative_error(b, e) + (1e-6 if kind == torch.float32 else 2e-4)

def test_sizes():
    assert group_sizes(65536, 768, 50304, 2, 2**31, 96*2**20, 132) == (16896, 896)
    assert group_sizes(300, 64, 1000, 2, 2**30, 2**30, 132) == (300, 300)
    assert group_sizes(10**4, 64, 1000, 2, 0, 0, 132) == (128, 128)
    for n in (1, 100, 129, 1000):
        g, c = group_sizes(n, 64, 1000, 2, 2**20, 2**19, 132)
        assert g == n or g % 128 == 0; assert c == g or c % 128 == 0; assert 1 <= c <= g <= n

@pytest.mark.parametrize("n", [1, 17, 129, 300])
def test_any_number_of_tokens(n):
    h, w, y = rand(n, 32, dt=torch.bfloat16), rand(96, 32, seed=1), targets(n, 96)
    for loss, most in ((GroupedCE(**SMALL, scales=scales()), .2), (GroupedCE(**SMALL), .02)):
        exact = grads(exactly, h.double(), w.double(), y)
        wide = w if loss.scales else w.bfloat16()
        for e, x in zip(exact, grads(loss, h, wide, y)): assert relative_error(x, e) < most

def test_one_chunk_of_logits_at_a_time(monkeypatch):
    "In FP8 each chunk's logits are gone before the next ones are made: they are most of the memory beside the groups"
    seen, plain = [], grouped_ce.matmul
    def matmul(*args, **how):
        assert all(s.expired() for s in seen)
        out = plain(*args, **how)
        seen.append(StorageWeakRef(out.untyped_storage()))
        return out
    monkeypatch.setattr(grouped_ce, "matmul", matmul)
    grads(GroupedCE(**SMALL, scales=scales()), *case())
    assert len(seen) == 3     # two chunks in the first group, and one in the second

def test_nothing_counts_and_nan():
    for more in (dict(scales=scales()), {}):
        h, w, y = case()
        out, dh, dw = grads(GroupedCE(**SMALL, **more), h, w if more else w.bfloat16(), torch.full_like(y, -100))
        assert out == 0 and not dh.any() and not dw.any()
        h[5] = torch.nan
        out, dh, dw = grads(GroupedCE(**SMALL, **more), h, w if more else w.bfloat16(), y)
        assert out.isnan() and dh[5].isnan().all() and dw.isnan().any() and dh[:5].isfinite().all()

@pytest.mark.usefixtures("kernels")
def test_a_factor_of_one_reads_nothing():
    x = rand(3, 5000)
    for f in (1., 3., float("nan")):
        y = x.clone(); mul_(y, torch.tensor(f, device=DEVICE))
        assert torch.equal(y.nan_to_num(7.), (x*f).nan_to_num(7.))
    mul_(x.new_empty(0), torch.ones((), device=DEVICE))

def test_handed_out_once():
    h, w, y = case()
    h.requires_grad_(); w.requires_grad_()
    loss = GroupedCE(**SMALL)(h, w.bfloat16(), y)
    loss.backward(retain_graph=True)
    with fails(RuntimeError, "backward\\(\\) once"): loss.backward()
    with torch.no_grad(): assert GroupedCE(**SMALL)(h, w, y).grad_fn is None
    frozen = w.detach()
    GroupedCE(**SMALL)(h, frozen, y).backward()
    assert frozen.grad is None

def test_wrong_groups_are_seen(monkeypatch):
    "Mistakes that a test of the loss alone would miss"
    h, w, y = case()
    exact = grads(exactly, h.double(), w.double(), y)
    def wrong(name, f):
        with monkeypatch.context() as m:
            m.setattr(grouped_ce, name, f)
            return max(relative_error(x, e) for e, x in zip(exact, grads(GroupedCE(**SMALL, scales=scales()), h, w, y)))
    into = grouped_ce.logits_into
    assert wrong("logits_into", into) < .2
    assert wrong("logits_into", lambda x, y, l, q, t, *o: (into(x, y, l, q, t, *o), t.zero_())) > .4     # no transpose
    whole = grouped_ce.mm8
    assert wrong("mm8", lambda *args, **kw: 2*whole(*args, **kw)) > .4     # another scale
    half = grouped_ce.mm8_into
    assert wrong("mm8_into", lambda to, *a: (half(to, *a), to[100:].zero_())) > .4     # rows left out

@pytest.mark.parametrize("rungs", [FP8, FUSED, ["chunked_ce"]], ids=["fp8", "bf16", "fp32"])
def test_rung_trains_as_before(rungs):
    losses = []
    for more in ([], ["head_groups:group=1"]):
        step = Stepper(build(replace(NANO, vocab=NANO.vocab), rungs + more))
        g = torch.Generator(DEVICE).manual_seed(0)
        batches = [tuple(torch.randint(NANO.vocab, (2, 2, NANO.seq_len), device=DEVICE, generator=g)) for _ in range(4)]
        losses.append([step(a, b).item() for a, b in zip(batches, batches[1:])] + [step.evaluate(batches)])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3 if "bf16" in rungs else 1e-5)

def test_rung_composes():
    base = build(NANO, FP8)
    run = head_groups(base, group=3)
    assert isinstance(run.model.loss, GroupedCE) and run.model.loss.scales is run.model.head_scales
    assert (run.model.loss.group, run.model.loss.budget) == (3*2**20, 640*2**20) and type(base.model.loss) is Fp8CE
    assert str(run.specs()[-1]) == "head_groups:group=3"
    with fails(ValueError, "builds on 'chunked_ce'"): build(NANO, ["head_groups"])
    with fails(ValueError, "no size in MiB"): head_groups(base, group=0)
    assert count_step(NANO, FUSED + ["head_groups"], 2)
    errors = [reference_errors(NANO, FUSED + r)[1] for r in ([], ["head_groups:group=1"])]
    assert errors[1] < 1.1*errors[0]

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_small_gradients_of_one_sign_are_summed_up(monkeypatch):
    """Thousands of them balance a few large ones. Sums that the tensor cores keep would lose them, and no test with random numbers shows
    that: so here is a head that knows how frequent each token is. Its gradients are those of notebook 19's, whose roundings are the same"""
    N, V, d = 8192, 4096, 256
    logp = -torch.arange(1., V + 1, device=DEVICE).log()
    h, w = rand(1, N, d, dt=torch.bfloat16), rand(V, d, seed=1)*.01
    h[..., 0], w[:, 0] = 8., logp/8
    y = torch.multinomial(logp.exp(), N, True, generator=torch.Generator(DEVICE).manual_seed(0))[None]
    theirs = grads(Fp8CE(scales=scales(32.)), h, w, y)
    ours = lambda: [relative_error(b, a.double()) for a, b in zip(theirs, grads(GroupedCE(scales=scales(32.)), h, w, y))]
    assert max(ours()) < 1e-2, ours()
    for name in ("mm8", "mm8_into"):
        right = getattr(grouped_ce, name)
        def inside(*a, **k):
            if name == "mm8": return right(*a, **k | dict(fast=True))
            a[0].copy_(mm8(*a[1:], out=a[0].dtype, fast=True)[:len(a[0])])
        with monkeypatch.context() as m:
            m.setattr(grouped_ce, name, inside)
            assert max(ours()) > 2e-2, (name, ours())

@pytest.mark.parametrize("more", [[], ["head_groups"]])
def test_logits_are_summed_in_fp32(more, monkeypatch):
    "What tensor cores truncate would be a bias of all logits, and of their gradients. The other matmuls forward may be summed inside"
    seen, right = {}, fp8_loss.matmul
    def matmul(s, a, b, name_a, name_b, **how):
        seen.setdefault(name_b, set()).add(how.get("fast", False))
        return right(s, a, b, name_a, name_b, **how)
    for m in (fused_fp8, fp8_loss, grouped_ce): monkeypatch.setattr(m, "matmul", matmul)
    model_grads([*FP8, *more])
    assert seen["head"] == {False} and True in seen["wo"]

# Queries and keys, made again

AGAIN = {"naive attention": ["fused_ops"], "flash": FUSED[1:], "bf16": FUSED, "fp8": FP8, "fp8_activations": [*FUSED, "fp8_activations"], "tied": [*FUSED, "tied_embedding"],
         "epilogues": ["bf16", "fused_ops", "flash4", "epilogues"], "fp8_epilogues": [*FP8, "head_groups", "fp8_epilogues"]}

def model_grads(rungs, change=lambda run: run, config=NANO, times=1):
    "Loss and gradients of the last of some passes"
    if why := next(filter(None, (find_rung(r.partition(":")[0]).needs() for r in rungs)), ""): pytest.skip(why)
    run = change(build(config, rungs, DEVICE))
    x, y = torch.randint(config.vocab, (2, 2, config.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    with enter_all(run.step_contexts): return [pass_of(run, x, y) for _ in range(times)][-1]

@pytest.mark.parametrize("rungs", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("documents", [False, True])
def test_remade_queries_are_the_same(rungs, documents):
    "The same bits on a CPU; a GPU may add attention's gradients in another order"
    change = (lambda run: within_documents(run, 7)) if documents else lambda run: run
    for a, b in zip(*(model_grads(r, change) for r in (rungs, [*rungs, "recompute_rope"]))):
        assert a.equal(b) if not GPU else relative_error(b, a.double()) < 1e-2

@pytest.mark.parametrize("kind", [k for k in AGAIN if k != "naive attention"])     # which copies them
def test_each_attention_is_remade(kind, monkeypatch):
    "Once in each layer and backward pass, whatever views of queries and keys it keeps"
    made, real = [], module.qk_rope
    monkeypatch.setattr(module, "qk_rope", lambda *a: (made.append(1), real(*a))[1])
    model_grads([*AGAIN[kind], "recompute_rope"], times=2)
    assert len(made) == 2*NANO.layers

@pytest.mark.parametrize("B, T", [(1, 1), (1, 5), (2, 1)])
def test_small_batches_are_remade(B, T):
    grads = []
    for more in ([], ["recompute_rope"]):
        run = build(NANO, [*FUSED[1:], *more], "cpu")
        x, y = torch.randint(NANO.vocab, (2, B, T), generator=torch.Generator().manual_seed(1))
        grads.append(torch.autograd.grad(run.loss(run.model, x, y), [*run.model.parameters()]))
    assert all(map(torch.equal, *grads))

@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1), (1, 1)])
def test_what_remaking_saves(heads, kv_heads):
    c = replace(NANO, heads=heads, kv_heads=kv_heads)
    before, after = (count_memory(partial(build, c, ["fused_ops", "flash", *r], "cpu"), 3)[0].saved for r in ([], ["recompute_rope"]))
    assert before - after == 4*3*c.seq_len*(heads + kv_heads)*c.head_dim*c.layers

def test_what_is_remade():
    "Views of one memory, also other ones than went in; once in each backward pass of a graph that is kept; and what isn't wanted doesn't harm"
    x, made = torch.arange(1., 9., requires_grad=True), []
    base = 2*x
    y, z, other = base[:4], base.view(2, 4)[1], 3*x[:4]
    def make(): made.append(1); return 2*x.detach()
    with recompute_on_unpack(base, make): out = (y*z).sum() + y.sin().sum() + (other*y).sum()
    a, b = x.detach()[:4], x.detach()[4:]
    exact = torch.cat([4*b + 2*(2*a).cos() + 12*a, 4*a])
    for n in (1, 2, 3):
        g, = torch.autograd.grad(out, x, retain_graph=True)
        torch.testing.assert_close(g, exact); assert len(made) == n
    g, = torch.autograd.grad(out, z, retain_graph=True)     # which wants one of the views
    torch.testing.assert_close(g, 2*a)
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], exact)

def test_what_is_not_remade():
    "What lies elsewhere, and the same memory as another type, is kept as ever; the memory goes when all views were handed out"
    x, w = torch.ones(6, dtype=torch.float16, requires_grad=True), torch.ones(6, requires_grad=True)
    base, seen = 2*x, []
    def make(): seen.append(torch.full((6,), 2., dtype=torch.float16)); return seen[-1]
    with recompute_on_unpack(base, make): out = (base.sin()*1).sum(), (w*w).sum(), (w*base.detach().view(torch.bfloat16).float()).sum()
    for o in out[1:]: o.backward()
    assert not seen and torch.equal(w.grad, 2 + base.detach().view(torch.bfloat16).float())
    out[0].backward()
    memory = StorageWeakRef(seen.pop().untyped_storage())
    assert memory.expired()

@pytest.mark.parametrize("wrong", [lambda qk: qk.flip(2), lambda qk: 1.1*qk, lambda qk: qk.flip(1), torch.zeros_like])
def test_other_queries_are_noticed(wrong, monkeypatch):
    c = replace(NANO, kv_heads=NANO.heads)
    plain = model_grads([*FUSED[1:], "recompute_rope"], config=c)
    real = module.recompute_on_unpack
    monkeypatch.setattr(module, "recompute_on_unpack", lambda t, make: real(t, lambda: wrong(make())))
    assert max(relative_error(b, a.double()) for a, b in zip(plain, model_grads([*FUSED[1:], "recompute_rope"], config=c))) > .05

def test_recompute_rope_refuses():
    for other in ("checkpoint", "selective_checkpoint", "compile"):
        with fails(ValueError, "exclude each other"): build(NANO, ["fused_ops", "recompute_rope", other])
    with fails(ValueError, "builds on 'fused_ops'"): build(NANO, ["recompute_rope"])
    with fails(ValueError, "order of their own", "leave it out"):
        recompute_rope(build(NANO, ["fused_ops"], model=example("modded_architecture").beyond(x0=True)))
    with fails(ValueError, "leave the rung out"): qkv_of_values(torch.zeros(1, 2, 8, 16), 4)
    with fails(ValueError, "leave the rung out"): qkv_of_values(torch.zeros(1, 8, 4, 16)[:, :, :2].transpose(1, 2), 4)    # too near the front

@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "epilogues", "fp8_epilogues"])
def test_remade_at_real_shapes(kind):
    "At 124m's width, recorded"
    c, res = replace(workload("124m"), layers=2), []
    rungs = [r for r in AGAIN[kind] if r != "flash"] + ["chunked_ce"]*("chunked_ce" not in AGAIN[kind]) + ["cuda_graphs"]
    for more in ([], ["recompute_rope"]):
        res.append(model_grads(["flash", *rungs, *more], config=c, times=4))
    for a, b in zip(*res): assert relative_error(b, a.double()) < 2e-2

# The update without detours

def steps_of(backward, kinds):
    "Gradients of a step whose micro-batches 1, 2, ... are handed out as a recording's, or made by autograd"
    model, kept = torch.nn.Linear(3, 1, bias=False, device=DEVICE), torch.zeros(1, 3, device=DEVICE)
    def loss_of(model, x, y):
        if not kinds[int(x) - 1]: return (model.weight*x).sum()
        kept.fill_(float(x))
        return PrecomputedGrads.apply(x.clone(), lambda: (kept,), model.weight)
    step = Stepper(Run(model, loss=loss_of, backward=backward))
    for i in range(len(kinds)): step.forward_backward(torch.tensor(1. + i, device=DEVICE), None)
    return model.weight.grad[0].tolist()

@pytest.mark.parametrize("kinds", ["r", "rr", "rrrr", "er", "re", "rer", "eer", "ree", "rre"])
def test_gradients_add_up(kinds):
    kinds, n = [k == "r" for k in kinds], len(kinds)
    assert steps_of(DirectBackward, kinds) == steps_of(Backward, kinds) == [n*(n + 1)/2]*3
    class Forgetful(DirectBackward):
        def prepare(self): pass
    if "rr" in "".join("r" if k else "e" for k in kinds): assert steps_of(Forgetful, kinds) != [n*(n + 1)/2]*3

def test_a_step_that_was_given_up():
    "Gradients that somebody has dropped, as the trainer does where memory runs out, aren't copied"
    p = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    step = DirectBackward()
    step.set_gradients([p], [torch.ones(2, device=DEVICE)])
    p.grad = None
    step.prepare(); step.set_gradients([p], [torch.full((2,), 3., device=DEVICE)]); step.prepare()
    assert p.grad.tolist() == [3., 3.] and not step.borrowed

def test_a_weight_without_gradient():
    model = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False, device=DEVICE) for _ in range(2))
    a, b = (m.weight for m in model)
    step = DirectBackward()
    a.grad = torch.ones_like(a)     # of an eager pass that didn't need the other one
    step.set_gradients([a, b], [torch.full_like(a, 2.), torch.full_like(b, 5.)])
    step.prepare(); step.set_gradients([a, b], [torch.ones_like(a), torch.ones_like(b)])
    assert a.grad.tolist() == [[4., 4.]] and b.grad.tolist() == [[6., 6.]]

GROUP_OF = dict(lr=.01, betas=(.9, .95), eps=1e-8, weight_decay=.1, t=3)

def weights(sizes, dt=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(3)
    new = lambda n: torch.randn(n, device=DEVICE, generator=g)
    return [tuple(t.to(dt) if t is not None else None for t in (new(n), new(n), new(n)*.1, new(n).abs()*.01, None, None)) for n in sizes]

@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", [[1, 7, 2048, 2049], [16, 64], [5000]])
def test_clipped_update_against_float64(sizes):
    factor, zero = torch.full((1,), .37, device=DEVICE), torch.zeros((), device=DEVICE)
    ours, exact, theirs = weights(sizes), weights(sizes, torch.float64), weights(sizes)
    update_triton(ours, GROUP_OF, "none", 0, zero, zero, {}, factor)
    update_torch(theirs, GROUP_OF, "none", 0, zero, zero, factor)
    for (x, g, m, v, *_), a, t in zip(exact, ours, theirs):
        g, (b1, b2), f = g*.37, GROUP_OF["betas"], 1/3
        m, v = b1*m + (1 - b1)*g, b2*v + (1 - b2)*g*g
        x = x*(1 - .01*.1) - .01*(m/(1 - b1**3)) / ((v/(1 - b2**3)).sqrt() + 1e-8)
        for e, i in ((x, 0), (m, 2), (v, 3)): assert relative_error(a[i], e) <= 2*relative_error(t[i], e) + 1e-7
        assert relative_error(a[0] + 1e-5*a[1], x) > 1e-6     # a little of the gradient more would be seen

@pytest.mark.usefixtures("kernels")
def test_steps_that_are_not_taken_and_nan():
    one, zero, bad = torch.ones(1, device=DEVICE), torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    old, new = weights([70, 5]), weights([70, 5])
    new[0][1][3] = torch.nan
    update_triton(new, GROUP_OF, "none", 0, zero, bad, {}, one)
    for a, b in zip(old, new):
        for i in (0, 2, 3): assert torch.equal(a[i], b[i])
    update_triton(new, GROUP_OF, "none", 0, zero, zero, {}, one)
    assert new[0][0].isnan().nonzero().flatten().tolist() == [3]
    a, b = weights([70]), weights([70])
    update_triton(a, GROUP_OF | dict(t=5), "none", 0, 2*bad, zero, {}, one)     # two of five weren't taken
    update_triton(b, GROUP_OF, "none", 0, zero, zero, {}, one)
    assert torch.equal(a[0][0], b[0][0])

def trained(rungs, steps=4, micro=1, recipe=None, resume=None, clip=.05, spoil=None):
    run = build(NANO, rungs)
    if recipe: run = parse_recipe(recipe)(run)
    step = GuardedStepper(run, clip=clip)
    g, start = torch.Generator(DEVICE).manual_seed(0), 0
    if resume: start = resume(run, step)
    for i in range(steps):
        x, y = torch.randint(NANO.vocab, (2, 4, NANO.seq_len), device=DEVICE, generator=g)
        if i < start: continue
        if i == spoil: step.params[0].data[int(x[0, 0])] = torch.nan
        step(*zip(x.split(4//micro), y.split(4//micro)))
        if i == spoil: step.params[0].data.nan_to_num_(.01)
    return run, step

@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("recipe", [None, "normuon", "tuned_adamw"])
def test_trains_as_before(micro, recipe):
    (_, a), (_, b) = (trained(["fused_adamw"] + more, micro=micro, recipe=recipe) for more in ([], ["direct_update"]))
    assert b.norm.item() == pytest.approx(a.norm.item(), rel=1e-4) and b.loss.item() == pytest.approx(a.loss.item(), rel=1e-5)
    for p, q in zip(a.params, b.params): assert relative_error(q, p.double()) < 1e-5
    _, c = trained(["fused_adamw", "direct_update"], micro=micro, recipe=recipe, clip=1e9)
    assert max(relative_error(q, p.double()) for p, q in zip(a.params, c.params)) > 1e-5     # the clip counts

@pytest.mark.parametrize("rungs", [["adamw8bit"], ["bf16", "bf16_weights:moments=8bit"]], ids=["8bit", "bf16"])
@pytest.mark.parametrize("micro", [1, 2])
def test_another_optimizer_gets_what_it_got(rungs, micro):
    (_, a), (_, b) = (trained(rungs + more, micro=micro) for more in ([], ["direct_update"]))
    assert b.norm.item() == pytest.approx(a.norm.item(), rel=1e-4)
    for p, q in zip(a.params, b.params): assert relative_error(q, p.double()) < 1e-5

def test_bad_step_is_left_out():
    _, step = trained(["direct_update"], spoil=2)
    assert all(p.isfinite().all() for p in step.params) and step.opt.skipped.item() == 1 and step.opt.factor is None

def test_resume_is_bitwise():
    whole, half = trained(["direct_update"], 6), trained(["direct_update"], 3)
    def resume(run, step):
        run.model.load_state_dict(half[0].model.state_dict())
        saved = named_state(half[0].model, half[1].opt)
        tensors = {}
        load_named_state(run.model, step.opt, unflatten_state(flatten_state(saved, tensors), tensors))
        return 3
    again = trained(["direct_update"], 6, resume=resume)
    for p, q in zip(whole[1].params, again[1].params): assert torch.equal(p, q)

def test_direct_update_composes():
    run = build(NANO, FP8 + ["head_groups", "direct_update"])
    assert run.backward is DirectBackward and isinstance(run.optimizer(run.model), ClippedAdamW)
    for other, kind in (("adamw8bit", "AdamW8bit"), ("bf16_weights", "Bf16AdamW")):     # their optimizers stay
        run = build(NANO, ["bf16", other, "direct_update"])
        assert run.backward is DirectBackward and type(run.optimizer(run.model)).__name__ == kind
    for hooked, kind in ((False, DirectBackward), (True, Backward)):     # gradient reducers of several processes, without hooks and with
        run = direct_update(replace(build(NANO, []), grad_reducers=(SimpleNamespace(hooked=hooked),)))
        assert run.backward is kind and type(run.optimizer(run.model)) is ClippedAdamW
    for rungs in (["fp16", "direct_update"], ["fp16", "chunked_ce", "head_groups"]):
        with fails(ValueError, "exclude each other"): build(NANO, rungs)
    with fails(ValueError, "FP32"): ClippedAdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    bytes_of = lambda rungs: sum(o.bytes for o in count_step(NANO, rungs, 2))
    assert bytes_of(["fused_adamw", "direct_update"]) < bytes_of(["fused_adamw"])
