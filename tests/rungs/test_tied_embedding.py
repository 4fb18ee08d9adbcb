"The rung of notebook 32: the embedding's gradient summed into the head's."
from copy import deepcopy
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
import llm_speedrun.rungs.tied_embedding as module
from llm_speedrun.rungs.embedding_rows import take_rows
from llm_speedrun.rungs.tied_embedding import add_rows, add_rows_maths, TiedGPT, TiedRows
from llm_speedrun.model import GPT, Embedding
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.architecture import NormedGPT, UntiedGPT
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.rungs.fp8 import sqnr
from llm_speedrun.runs import Run, baseline, build
from llm_speedrun.step_builder import count_step, resolve_options
from llm_speedrun.stepper import Stepper, enter_all
from llm_speedrun.generate import generate
from helpers.examples import example
from helpers.tiny_runs import NANO, fails

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16     # the interpreter cuts off bits of bf16
def gen(seed=0): return torch.Generator().manual_seed(seed)
def rand(*shape, dt=torch.float32, seed=0): return torch.randn(*shape, generator=gen(seed)).to(DEVICE, dt)
def rel(a, b): return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()

# Sums of equal tokens

MANY = 1000 if DEVICE.type == "cuda" else 150 # tokens of a large vocabulary: each is a block of its own, and takes the interpreter milliseconds

def tokens(kind, N, V):
    x = dict(random=torch.randint(V, (N,), generator=gen(1)), same=torch.full((N,), V - 1), once=torch.arange(N) % V,
             text=(V*torch.rand(N, generator=gen(1))**6).long(), two=torch.arange(N) // max(1, N//2) % V)[kind]
    return x.to(DEVICE)

@pytest.mark.parametrize("kind", ["random", "same", "once", "text", "two"])
@pytest.mark.parametrize("N, V, d", [(1, 1, 16), (16, 3, 33), (17, 300, 8), (33, 70, 64), (300, 50, 96), (MANY, 70000, 16)])
def test_add_rows(kernels, kind, N, V, d):
    "As near to float64 as PyTorch's gradient of an embedding, and rows of other tokens have the bits they had"
    x = tokens(kind, N, V)
    for g_type, dh_type in ((torch.float32, HALF), (torch.float32, torch.float32), (HALF, HALF)):
        g, dh = rand(V, d, dt=g_type), rand(N, d, dt=dh_type, seed=2)
        exact, theirs = g.double(), g + torch.ops.aten.embedding_dense_backward(dh.to(g_type), x, V, -1, False)
        add_rows_maths(exact, x, dh)
        add_rows(ours := g.clone(), x, dh)
        assert rel(ours, exact) <= 2*rel(theirs, exact) + 1e-7 and (ours - exact).abs().max() <= 2*(theirs - exact).abs().max() + 1e-5
        rest = torch.ones(V, dtype=torch.bool, device=DEVICE).index_fill(0, x, False)
        assert ours[rest].equal(g[rest])

def test_add_rows_in_double():
    "Is PyTorch's"
    g, x, dh = rand(9, 5).double(), tokens("random", 30, 9), rand(30, 5, seed=1).double()
    add_rows(ours := g.clone(), x, dh)
    torch.testing.assert_close(ours, g.index_add(0, x, dh), rtol=1e-14, atol=1e-14)

def test_nothing_to_add(kernels):
    add_rows(g := rand(5, 16), torch.zeros(0, dtype=torch.long, device=DEVICE), rand(0, 16))
    assert g.equal(rand(5, 16))

@pytest.mark.parametrize("chunk, rows", [(2, 1), (4, 4), (8, 2), (32, 8)])
def test_other_tiles(kernels, monkeypatch, chunk, rows):
    "The sums don't depend on how the work is cut"
    monkeypatch.setattr(module, "CHUNK_TILE", dict(CHUNK=chunk, ROWS=rows, num_warps=1))
    x, dh = tokens("text", 301, 40), rand(301, 64, seed=1)
    add_rows(g := rand(40, 64), x, dh)
    torch.testing.assert_close(g, rand(40, 64).index_add(0, x, dh), rtol=1e-5, atol=1e-4)

def test_the_order_is_always_the_same(kernels):
    x, dh = tokens("text", 500, 40), rand(500, 64, seed=1)
    a, b = (torch.zeros(40, 64, device=DEVICE) for _ in range(2))
    add_rows(a, x, dh); add_rows(b, x, dh)
    assert a.equal(b)

@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("i", [0, 5, 250, 300])
def test_what_is_not_finite_stays_in_its_row(kernels, value, i):
    x, dh = tokens("text", 301, 40), rand(301, 64, seed=1)
    dh[i, 7] = value
    add_rows(g := rand(40, 64), x, dh)
    assert g.isfinite().logical_not().nonzero().tolist() == [[x[i].item(), 7]]

@pytest.mark.parametrize("V", [40, 2**16 - 1, 2**16, 70000])
def test_what_is_no_token_adds_nothing(kernels, V):
    "Also where its lower 16 or 32 bits are those of a token, as those of 65,541 are 5"
    x = tokens("text", 100, 40)
    x[[3, 50, 51, 52, 53]] = torch.tensor([V, -1, 2**32 + 5, 2**16 + 5 if V <= 2**16 else V + 5, -2**16 + 5], device=DEVICE)
    add_rows(g := torch.zeros(V, 16, device=DEVICE), x, torch.ones(100, 16, device=DEVICE))
    assert g.sum().item() == 95*16

@pytest.mark.parametrize("dt", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 17), (0,)])
def test_take_rows(kernels, dt, shape):
    w, x = rand(50, 96), torch.randint(50, shape, generator=gen()).to(DEVICE)
    assert take_rows(w, x, dt).equal(F.embedding(x, w).to(dt))
    if 0 not in shape: assert take_rows(w, x.int(), dt).equal(take_rows(w, x, dt))

def test_rows_of_no_token(kernels):
    if not module.runs_kernel(torch.empty(0, device=DEVICE)): pytest.skip("PyTorch raises")
    h = take_rows(rand(50, 96), torch.tensor([50, -1, 49], device=DEVICE), HALF)
    assert h[:2].isnan().all() and h[2].isfinite().all()

# One function for both uses

def test_tied_rows_is_exact():
    "In float64, against finite differences, when both uses have a gradient, and when one has"
    x, w = torch.tensor([[1, 4, 1], [0, 1, 4]]), torch.randn(6, 5, dtype=torch.double, generator=gen()).requires_grad_()
    for use in (lambda h, w: (h**2).sum() + (w**3).sum(), lambda h, w: (h**3).sum(), lambda h, w: w.sin().sum()):
        assert torch.autograd.gradcheck(lambda w: use(*TiedRows.apply(w, x, w.dtype)), w)

BASES = dict(expanded=((1, 5), lambda t: t.expand(6, 5)), turned=((5, 6), lambda t: t.T), part=((9, 5), lambda t: t[2:8]))

@pytest.mark.parametrize("kind", BASES)
def test_a_gradient_that_is_a_view(kernels, kind):
    "Is copied, and what it shows a part of stays as it was"
    size, view = BASES[kind]
    base, w = torch.ones(size, device=DEVICE), rand(6, 5).requires_grad_()
    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w): return w.sum()
        @staticmethod
        def backward(ctx, up): return view(base)
    h, head = TiedRows.apply(w, torch.tensor([1, 1, 3], device=DEVICE), w.dtype)
    got, = torch.autograd.grad(Gives.apply(head) + h.sum(), w)
    assert got[:, 0].tolist() == [1, 3, 1, 2, 1, 1] and base.eq(1).all()

# In a model

SMALL = replace(NANO, vocab=64, width=32, heads=2, kv_heads=1, hidden=32) # sizes that FP8 can take
def batches(n=1, seed=0): return list(torch.randint(SMALL.vocab, (n, 2, 2, SMALL.seq_len), generator=gen(seed)).to(DEVICE))

def losses_and_grads(rungs, n=1, model=GPT, batches=None):
    "Of a first step on `n` micro-batches: the loss, and the gradients before they are averaged"
    step = Stepper(build(SMALL, rungs, model=model))
    step.update = lambda n: None
    loss = step(*(batches or globals()["batches"](n)))
    return loss, {k: p.grad for k, p in step.run.model.named_parameters()}

def check_same(rungs, n=1, model=GPT, least=60):
    (a, ga), (b, gb) = losses_and_grads(rungs, n, model), losses_and_grads([*rungs, "tied_embedding"], n, model)
    assert a.equal(b) and list(ga) == list(gb)
    for k in ga: assert ga[k].equal(gb[k]) or sqnr(ga[k].float(), gb[k].float()) > least, (k, sqnr(ga[k].float(), gb[k].float()))

FUSED = ["bf16", "flash", "fused_ops"]
LISTS = [[], ["chunked_ce"], ["bf16"], ["bf16", "bf16_stream"], FUSED, [*FUSED, "chunked_ce"], [*FUSED, "fp8_activations"],
         ["bf16", "fused_ops", "chunked_ce", "fp8"], [*FUSED, "chunked_ce", "checkpoint"],
         [*FUSED, "chunked_ce", "selective_checkpoint"]]
COMPILED = [["bf16", "compile"], ["bf16", "chunked_ce", "compile"], ["compile:whole=yes"]] # the first of three micro-batches takes what one alone takes

@pytest.mark.parametrize("rungs, n", [*((r, n) for r in LISTS for n in (1, 3)), *((r, 3) for r in COMPILED)],
                         ids=lambda o: str(o) if isinstance(o, int) else ",".join(o))
def test_same_gradients(rungs, n):
    "With any rungs, with one micro-batch and with several"
    check_same(rungs, n)

def test_same_gradients_in_bf16(): check_same(["bf16", "fused_ops", "bf16_weights"], 2, least=38) # PyTorch rounds each part, and their sum

def test_same_gradients_by_kernels(kernels):
    "By the kernels, which the other tests leave out on a CPU"
    step = Stepper(build(replace(SMALL, layers=1), ["tied_embedding"]))
    step.update = lambda n: None
    step(*batches(2))
    theirs = Stepper(build(replace(SMALL, layers=1)))
    theirs.update = lambda n: None
    theirs(*batches(2))
    for p, q in zip(step.params, theirs.params): torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)

@pytest.mark.parametrize("model", [UntiedGPT, NormedGPT, example("modded_architecture").beyond(x0=True, values=True, skips=True, softcap=15.)], ids=["untied", "normed", "beyond"])
@pytest.mark.parametrize("rungs", [[], [*FUSED, "chunked_ce"]], ids=["", "fused"])
def test_models_with_a_head_of_their_own(model, rungs):
    "Their embedding's gradient is the same"
    check_same(rungs, 2, model)

def test_a_test_that_fails(monkeypatch):
    "Where the rows' gradients are left out, or doubled"
    for wrong in (lambda g, x, dh: None, lambda g, x, dh: [add_rows_maths(g, x, dh) for _ in "12"]):
        monkeypatch.setattr(module, "add_rows", wrong)
        with pytest.raises(AssertionError): check_same([])

def test_logits():
    "Without targets the gradients of both uses are there, too"
    def grads(rungs):
        m, (x, _) = build(SMALL, rungs).model, batches()[0]
        return torch.autograd.grad(m(x).square().mean(), [*m.parameters()])
    for a, b in zip(grads([]), grads(["tied_embedding"])): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)

def test_hidden_alone():
    "As whoever puts a loss of his own on it may do"
    def grads(rungs):
        m, (x, _) = build(SMALL, rungs).model, batches()[0]
        loss = (m.hidden(x) @ m.embed_tokens.weight.T).square().mean()
        return torch.autograd.grad(loss, [*m.parameters()])
    for a, b in zip(grads([]), grads(["tied_embedding"])): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)

def test_it_leaves_nothing_behind():
    "After a step, and after one that broke off: the model can be copied, and the run before is as it was"
    before = build(SMALL, ["chunked_ce"])
    run = module.tied_embedding(before)
    step = Stepper(run)
    step(*batches())
    def broken(*args): raise ArithmeticError
    model, loss = run.model, run.model.loss
    model.loss = broken
    with pytest.raises(ArithmeticError): step(*batches())
    model.loss = loss
    assert model.embed_tokens.head is None and type(deepcopy(model)) is TiedGPT
    assert type(before.model) is GPT and type(before.model.embed_tokens) is Embedding
    assert before.model.embed_tokens.weight is model.embed_tokens.weight and model.roles() == before.model.roles()

def test_hooks_stay():
    "Such as the one that notes documents"
    seen, run = [], build(SMALL, [])
    run.model.embed_tokens.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    Stepper(module.tied_embedding(run))(*batches())
    assert seen == [(2, SMALL.seq_len)]

def test_evaluating_and_sampling():
    "Are as without the rung, to the bit, before and after training"
    for rungs in ([], [*FUSED, "chunked_ce"]):
        a, b = (Stepper(build(SMALL, [*rungs, *more])) for more in ([], ["tied_embedding"]))
        for _ in range(2):
            assert a.evaluate(batches(2)) == pytest.approx(b.evaluate(batches(2)), abs=1e-5)
            a(*batches()), b(*batches())
        assert torch.equal(torch.tensor(generate(a.run, [1, 2], 5)), torch.tensor(generate(b.run, [1, 2], 5)))

def test_training_is_the_same():
    "Over some steps, to rounding"
    def losses(more):
        step = Stepper(build(SMALL, [*FUSED, "chunked_ce", "fused_adamw", *more]))
        return torch.stack([step(*batches(2, seed=i % 3)) for i in range(12)])
    torch.testing.assert_close(losses([]), losses(["tied_embedding"]), rtol=2e-3, atol=2e-3)

def test_two_passes_of_one_graph():
    "A second backward pass finds what the first found: nothing that is kept was written to"
    for rungs in (["chunked_ce"], ["bf16", "fused_ops", "chunked_ce"], []):
        run, (x, y) = build(SMALL, [*rungs, "tied_embedding"]), batches()[0]
        with enter_all(run.step_contexts + run.forward_contexts): loss = run.loss(run.model, x, y)
        first, second = (torch.autograd.grad(loss, [*run.model.parameters()], retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))

def test_it_is_counted():
    "Fewer bytes, and the same products"
    rungs = ["bf16", "fused_ops", "chunked_ce"]
    with_it, without = (count_step(SMALL, [*rungs, *more], 2) for more in (["tied_embedding"], []))
    assert sum(o.flops for o in with_it) == sum(o.flops for o in without)
    assert sum(o.bytes for o in with_it) < sum(o.bytes for o in without)

@pytest.mark.parametrize("other", ["tensor_parallel", "fsdp"])
def test_it_refuses(other):
    with fails(ValueError, "exclude each other"): build(SMALL, ["tied_embedding", other])

EIGHT = ["bf16", "flash", "fused_ops", "chunked_ce", "fp8"]

# In 8 bits

def exact_grads(c, batches):
    "The gradients of the naive model in float64, summed over micro-batches"
    step = Stepper(Run(baseline(c).model.double()))
    step.update = lambda n: None
    step(*batches)
    return [p.grad for p in step.params]

def as_near(ours, theirs, exact):
    """Whether `ours` is no farther from `exact` than `theirs`, by norm, but for luck: of two errors that are noise in n numbers the norms differ by
    some 1/sqrt(n), and three times that happens"""
    far = lambda g: (g.double() - exact).norm()
    return bool(far(ours) <= 1.1*(1 + 3/exact.numel()**.5)*far(theirs) + 1e-6*exact.norm())

def test_rounding_grows_in_8_bits(monkeypatch):
    """What the test below has to do with: one matrix that is moved by a small part of its rounding changes gradients by nearly as much as FP8 rounds them,
    and they are as near to float64's as before. With a loss that is a tenth too large, or rows that are added twice, they aren't"""
    c, x = replace(SMALL, layers=3, seq_len=64), list(torch.randint(SMALL.vocab, (2, 2, 8, 64), generator=gen(3)).to(DEVICE))
    def grads(eps=0., times=1., rungs=()):
        step = Stepper(build(c, [*EIGHT, *rungs]))
        step.update = lambda n: None
        with torch.no_grad(): step.run.model.layers[-1].mlp.down_proj.weight.mul_(1 + eps*rand(c.width, c.hidden, seed=5))
        loss = step.run.loss
        step.run = replace(step.run, loss=lambda *args: times*loss(*args))
        step(*x)
        return [p.grad for p in step.params]
    exact, plain, moved = exact_grads(c, x), grads(), grads(1e-3)
    assert min(map(sqnr, plain, moved)) < 25 and all(map(as_near, moved, plain, exact))
    assert all(map(as_near, grads(rungs=["tied_embedding"]), plain, exact))
    assert not all(map(as_near, grads(times=1.1), plain, exact))
    monkeypatch.setattr(module, "add_rows", lambda g, x, dh: [add_rows_maths(g, x, dh) for _ in "12"])
    assert [*map(as_near, grads(rungs=["tied_embedding"]), plain, exact)].index(False) == 0

@pytest.mark.cuda
@pytest.mark.parametrize("more", [[], ["fp8"]], ids=["bf16", "fp8"])
def test_recorded(more):
    """At 124m's width the recorded step has the gradients of the plain one, also of several micro-batches. The rung and the recording round nothing in
    another way, so they are as near to each other as those of one list, taken twice, are to themselves; and as near to float64's"""
    c = replace(workload("124m"), layers=2)
    base = resolve_options(c, ["tf32", *EIGHT[:-1], *more])     # once: measured for each list anew, kernels and parts in FP8 may be others
    batches = [(x, y) for x, y in torch.randint(c.vocab, (4, 2, 4, c.seq_len), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))]
    def grads(rungs):
        step = Stepper(build(c, [*base, *rungs]))
        step.update = lambda n: None
        for _ in range(3):
            step.opt.zero_grad()
            loss = step(*batches)
        return loss, [p.grad.clone() for p in step.params]
    (a, ga), (_, again), (b, gb), (l, gl) = map(grads, ([], [], ["tied_embedding"], ["tied_embedding", "cuda_graphs"]))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4); torch.testing.assert_close(b, l, rtol=1e-4, atol=1e-4)
    least = min(30, min(map(sqnr, ga, again)) - 3)
    for e, x, y, z in zip(exact_grads(c, batches), ga, gb, gl, strict=True):
        assert sqnr(x, y) > least and sqnr(y, z) > least, (sqnr(x, y), sqnr(y, z), least)
        assert as_near(y, x, e) and as_near(z, x, e)

def test_a_bad_step_is_not_taken():
    "With a NaN among the weights neither loss nor norm is finite, and the weights stay; the next good step is"
    step = GuardedStepper(build(SMALL, [*EIGHT, "tied_embedding"]))
    step(*batches())
    for name in ("embed_tokens.weight", "layers.1.mlp.down_proj.weight", "layers.0.self_attn.o_proj.weight", "norm.weight"):
        w = step.run.model.get_parameter(name).data.view(-1)
        was, w[5] = w[5].clone(), float("nan")
        before = [p.detach().clone() for p in step.params]
        step(*batches())
        assert not step.norm.isfinite() and all(torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(step.params, before))
        w[5] = was
    assert step(*batches()).isfinite() and step.norm.isfinite()

def test_checkpoints_go_between():
    "A run resumed with the rung goes on from one without, to rounding, and from one with it to the bit"
    def after(first, second):
        a = Stepper(build(SMALL, first))
        for i in range(2): a(*batches(2, seed=i))
        b = Stepper(build(SMALL, second))
        b.run.model.load_state_dict(a.run.model.state_dict()); b.opt.load_state_dict(a.opt.state_dict())
        for (_, to), (_, from_) in zip(b.run.stateful, a.run.stateful): to.load_state_dict(from_.state_dict())
        return [b(*batches(2, seed=5)), *b.params]
    tied = [*EIGHT, "tied_embedding"]
    for a, b in zip(after(EIGHT, EIGHT), after(EIGHT, tied)): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(after(tied, tied), after(tied, tied)): assert a.equal(b)
