"One model cut among processes: two take the steps of one, four those of one with fsdp; the vocabulary's loss against float64."
from dataclasses import replace
import numpy as np, pytest, torch, torch.nn.functional as F
import llm_speedrun.rungs.tensor_parallel as tp
import llm_speedrun.rungs.vocab_parallel as vocab
from llm_speedrun.rungs.chunked_ce import ChunkedCE, loss_maths
from llm_speedrun.rungs.tp_mappings import TPGroup
from llm_speedrun.rungs.vocab_parallel import part_grads, part_grads_maths, part_stats, part_stats_maths, row_losses
from llm_speedrun.runs import build
from llm_speedrun.stepper import StepSync, Stepper, enter_all
from llm_speedrun.distributed.world import World
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.sharding import shards_of
from bench_tensor_parallel import parallel_loss, pytorch_model
from helpers.tiny_runs import NANO, fails

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = dict(plain=(-100, 0., 0.), ignored=(3, 0., 0.), z_loss=(-100, .01, 0.), softcap=(-100, 0., 5.), all=(3, .01, 5.))
FUSED = ["flash", "fused_ops", "chunked_ce"]
LISTS = {"naive": ([], 10, 1), "fused": (FUSED, 50, 2), "bf16": (["bf16", *FUSED, "fused_adamw"], 10, 1),
         "checkpoint": ([*FUSED, "checkpoint"], 5, 2), "direct_update": ([*FUSED, "fused_adamw", "direct_update"], 5, 2),
         "softcap": (["flash", "chunked_ce:z_loss=0.01:softcap=5:budget=0"], 5, 1)}     # rungs, steps, micro-batches
FP8 = ["bf16", *FUSED, "fp8:parts=heads+out+mlp"], 10, 1
if DEVICE == "cuda": LISTS["compile"] = [*FUSED, "compile"], 5, 1     # on two CPUs it takes 10 s
cuda = pytest.mark.cuda
def needs(n): return pytest.mark.skipif(0 < torch.cuda.device_count() < n, reason=f"{n} processes want as many GPUs, or none")

def data(n=4): return torch.randint(NANO.vocab, (2, n, NANO.seq_len), generator=torch.Generator().manual_seed(0)).to(DEVICE)

def joined(parts):
    "Name -> whole array, of the processes' (shape, start, tensor)"
    res = {}
    for n, (shape, start, t) in (o for mine in parts for o in mine.items()):
        res.setdefault(n, np.full(shape, np.nan))[tuple(slice(i, i + k) for i, k in zip(start, t.shape))] = t.cpu().numpy()
    return res

def whole(run):
    "Name -> each weight put together from all processes' shards"
    return joined(run.world.all_gather_object({n: (p.shape, p.start, p.tensor.float().cpu()) for n, p in shards_of(run).items()}))

def train(world, rungs, steps, micro, parallel=("tensor_parallel",), change=lambda run: None):
    "Losses and norms of some steps, whole weights, evaluation, and logits of an odd number of tokens"
    run = build(NANO, [*rungs, *parallel] if world.size > 1 else rungs, world=world)
    change(run)
    step, (i, n) = Stepper(run, clip=.5), world.rank_and_size("dp")
    x, y = (t.chunk(n)[i] for t in data())
    res = [(step(*zip(x.chunk(micro), y.chunk(micro))).item(), step.norm.item()) for _ in range(steps)]
    with torch.no_grad(), enter_all(run.step_contexts + run.forward_contexts): logits = run.model(data()[0, :3, :31]).float().tolist()
    return res, whole(run), step.evaluate([(x, y)]), logits

def check(got, want, loss=1e-4, weight=1e-4, norm=1e-4):
    "What a process of several found against what one alone did"
    (a, ws, ev, logits), (b, vs, ev1, logits1) = got, want
    assert b[0][0] - b[-1][0] > .01    # something is learned
    assert np.abs(np.subtract(a, b)).max(0)[0] < loss and abs(ev - ev1) < loss
    assert np.abs(np.subtract(a, b)).max(0)[1] < norm
    assert max(np.abs(ws[n] - vs[n]).max() for n in vs) < weight and list(ws) == list(vs)
    assert np.abs(np.subtract(logits, logits1)).max() < 50*weight

def distance(got, want): return max(np.abs(got[1][n] - want[1][n]).max() for n in want[1])

def said(f):
    "The error that `f` raises, in words"
    try: f()
    except Exception as e: return f"{type(e).__name__}: {e}"

def refusals(world):
    "What can't be cut"
    make = lambda config=NANO, *rungs: lambda: build(config, rungs, world=world)
    other = lambda **kw: make(replace(NANO, **kw), "tensor_parallel")
    run = build(NANO, ["tensor_parallel"], world=world)
    odd = torch.zeros(1, 7, dtype=torch.int64, device=DEVICE)
    return [said(f) for f in (make(NANO, "tensor_parallel:size=4"), other(kv_heads=1), other(heads=1, kv_heads=1), other(vocab=321),
        other(hidden=49), make(NANO, "bf16", "bf16_stream", "tensor_parallel"),
        make(NANO, "bf16", *FUSED, "fp8:parts=mlp+head", "tensor_parallel"), lambda: run.model(odd, odd),
        lambda: Stepper(replace(run, grad_reducers=())))]

def loss_errors(world):
    "The loss and its gradients of both processes' parts: largest relative errors against float64, ours and PyTorch's"
    share, res = TPGroup(world.rank, 2, world.group("tp").group_name), []
    off = lambda a, b: ((a.double() - b).norm()/b.norm().clamp(min=1e-30)).item()
    for dtype in (torch.float32, torch.bfloat16):
        for (ignore, z, cap), (N, d, V) in zip(OPTIONS.values(), [(6, 5, 14), (64, 16, 302), (258, 8, 62), (130, 24, 50), (8, 8, 10)]):
            g = torch.Generator().manual_seed(N)
            h, w = (2*torch.randn(n, d, generator=g).to(DEVICE, dtype) for n in (N, V))
            y = torch.randint(5, (N,), generator=g).to(DEVICE)
            def by_autograd(kind):
                a, b = (t.to(kind).requires_grad_() for t in (h, w))
                x = (a @ b.T).to(torch.promote_types(kind, torch.float32))
                if cap: x = cap*torch.tanh(x/cap)
                loss = F.cross_entropy(x, y, ignore_index=ignore, reduction="sum") + z*x.logsumexp(1)[y != ignore].pow(2).sum()
                loss = loss/(y != ignore).sum().clamp(min=1)
                return [loss.detach(), *torch.autograd.grad(loss, (a, b))]
            rows = lambda t: t.chunk(2)[world.rank].detach().requires_grad_()
            def ours(loss):
                a, b = rows(h), rows(w)
                l = loss(a, b, y)
                return [world.all_gather_object(t.detach().float().cpu()) for t in (l, *torch.autograd.grad(2*l, (a, b)))]
            exact, theirs = by_autograd(torch.float64), by_autograd(dtype)
            losses = [vocab.CutChunkedCE(share, ChunkedCE(ignore, z, cap, 1))] + [vocab.CutCrossEntropy(share)]*((ignore, z, cap) == (-100, 0., 0.))
            for loss in losses:
                (l, other), *grads = ours(loss)
                assert torch.equal(l, other)
                got = [l, *(torch.cat(g)/2 for g in grads)]
                res.append([(off(a, b.cpu()), off(t.cpu(), b.cpu())) for a, t, b in zip(got, theirs, exact)])
    return res

def shows_nan(world):
    "A weight of the second process alone is NaN: each process's loss"
    run = build(NANO, [*FUSED, "tensor_parallel"], world=world)
    with torch.no_grad(): run.model.embed_tokens.weight[-1] += torch.nan*world.rank
    x, y = data()
    return run.model(x % 100, y % 100).item()

def two(world):
    "What two processes do"
    def no_norms(run): run.grad_reducers[0].reduce = lambda params: None
    res = {k: train(world, *how) for k, how in LISTS.items()}
    cut_model, tp.cut_model = tp.cut_model, lambda model, share, whole: cut_model(model, share, True)
    res["whole stream"] = train(world, *LISTS["checkpoint"])
    tp.cut_model = cut_model
    res["fp8"] = train(world, *FP8)
    res["norms left out"] = train(world, FUSED, 10, 1, change=no_norms)
    all_rows, vocab.row_losses = vocab.row_losses, lambda stats, *args: all_rows(
        torch.stack([stats[world.rank, 0].expand(2, -1) - np.log(2), stats[:, 1]], 1), *args)
    res["own lse alone"] = train(world, FUSED, 10, 1)
    vocab.row_losses = all_rows
    return res, refusals(world), loss_errors(world), shows_nan(world)

@needs(2)
def test_two_processes_are_one():
    "Losses, norms, weights, evaluation and logits; mutations are seen; refusals; the loss by itself; NaN"
    (a, refused, errors, nan), (b, *_, nan2) = run_distributed(2, two, tp=2)
    for name, (rungs, steps, micro) in LISTS.items():
        plain = [r for r in rungs if r not in ("checkpoint", "compile")]    # which change no number
        want, bars = train(World(), plain, steps, micro), (3e-3, 2e-2, 2e-2) if name == "bf16" else (1e-4, 1e-4, 1e-4)
        for got in (a[name], b[name]): check(got, want, *bars)
    for got in (a, b):
        check(got["whole stream"], train(World(), FUSED, 5, 2))
        check(got["fp8"], train(World(), *FP8), 5e-3, 2e-2, 5e-2)
    want = train(World(), FUSED, 10, 1)
    for name in ("norms left out", "own lse alone"): assert max(distance(a[name], want), distance(b[name], want)) > 1e-3, name
    for text, part in zip(refused, ("joined with tp=2", "kv_heads 1", "heads 1", "vocab 321", "hidden 49", "naive_project", "leave out the head", "1 × 7 tokens",
                                    "add tensor_parallel")): assert part in text and text.startswith("InputError"), text
    for case in errors:
        for ours, theirs in case: assert ours <= 2*theirs + 2e-6, errors    # FP32 itself is of 1e-7
    assert np.isnan(nan) and np.isnan(nan2)

FOUR = {"fsdp": (FUSED, 50, 1), "ddp": (FUSED, 5, 2)}
EIGHT = {"fsdp:replicas=2": (FUSED, 5, 1)}

def several(world, lists):
    "What two or four times two processes do"
    return {k: train(world, *how, ("tensor_parallel", k)) for k, how in lists.items()}

@pytest.mark.parametrize("n, lists", [pytest.param(4, FOUR, marks=needs(4)), pytest.param(8, EIGHT, marks=[needs(8), pytest.mark.slow])], ids=["four", "eight"])
def test_more_processes_are_one(n, lists):
    "A model cut in two, each half in shards of two or twice there: two halves of the batch. Of eight, two copies of the four's shards"
    every = run_distributed(n, several, lists, tp=2)
    for name, how in lists.items():
        want = train(World(), *how)
        for got in every: check((*got[name][:2], want[2], got[name][3]), want)    # each evaluated its own part

def test_refused_anywhere():
    "Also where nothing would be cut"
    for rungs, parts in ((["fp16"], ["fp16", "scaler"]), (["selective_checkpoint"], ["exclude each other"]),
                         (["cuda_graphs"], ["exclude each other"])):
        with fails(ValueError, *parts): build(NANO, [*rungs, "tensor_parallel"])
    run = build(NANO, ["tensor_parallel"])
    assert run.sync is StepSync and not run.grad_reducers and run.model.embed_tokens.num_embeddings == NANO.vocab

# Next to PyTorch's `parallelize_module` and `loss_parallel`, in float64

def exact_gradients(run):
    "Loss in float64 on this process's model, and each whole parameter's gradient on the first process"
    run.model.double()
    (loss := run.loss(run.model, *data())).backward()
    for e in run.grad_reducers: e.reduce([*run.model.parameters()])
    parts = {n: replace(s, tensor=run.model.get_parameter(n).grad) for n, s in shards_of(run).items()}
    return loss.item(), joined(run.world.all_gather_object({n: (p.shape, p.start, p.tensor) for n, p in parts.items()}))

def by_pytorch(world, change=lambda model: None):
    "The same of PyTorch's cut model"
    from torch.distributed.tensor.parallel import loss_parallel # slow to import
    model = pytorch_model(NANO, world, torch.float64)
    change(model)
    with loss_parallel(): (loss := parallel_loss(model, *data())).backward()
    return getattr(loss, "full_tensor", lambda: loss)().item(), {n: p.grad.full_tensor().cpu().numpy() for n, p in model.named_parameters()}

def both_ways(world):
    "Ours and PyTorch's, and each with a mistake: norms' gradients of its own tokens or heads alone"
    def apart(run): run.grad_reducers[0].reduce = lambda params: None; return run
    def scaled(model): model.layers[1].self_attn.o_proj.register_full_backward_hook(lambda m, gx, gy: tuple(2*g for g in gx))
    ours = lambda rungs=(): build(NANO, [*rungs, "tensor_parallel"], world=world)
    return dict(naive=exact_gradients(ours()), fused=exact_gradients(ours(FUSED)), theirs=by_pytorch(world),
                apart=exact_gradients(apart(ours())), scaled=by_pytorch(world, scaled))

@needs(2)
def test_pytorch_computes_the_same():
    "Loss and gradients of every parameter, of our rung and of `parallelize_module` with `loss_parallel`, are those of one process"
    loss, want = exact_gradients(build(NANO))
    off = lambda got: max(abs(got[n] - w).max()/abs(w).max() for n, w in want.items())
    for got in run_distributed(2, both_ways, tp=2):
        for name in ("naive", "fused", "theirs"):
            assert got[name][0] == pytest.approx(loss, rel=1e-12) and got[name][1].keys() == want.keys() and off(got[name][1]) < 1e-12, name
        assert off(got["apart"][1]) > .01 and off(got["scaled"][1]) > .01

# The kernels, on both halves of some logits

def in_two(x, y, options, stats=part_stats, grads=part_grads):
    "Losses of rows, and their gradient, from two parts of the vocabulary"
    ignore, z, cap = options
    parts, V = [t.contiguous() for t in x.chunk(2, 1)], x.shape[1]
    loss, lse = row_losses(torch.stack([stats(p, y, i*V//2, cap) for i, p in enumerate(parts)]), y, V, ignore, z)
    for i, p in enumerate(parts): grads(p, y, lse, i*V//2, ignore, z, cap)
    return loss, torch.cat(parts, 1)

@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("N, V", [(1, 2), (3, 14), (2, 510), (2, 512), (3, 602), (1, 6000)])
def test_kernels(kernels, name, N, V):
    "Of any length: float64's to FP32's rounding"
    torch.manual_seed(0)
    x, y = 3*torch.randn(N, V, device=DEVICE), torch.randint(V, (N,), device=DEVICE)
    if N > 1: y[0] = min(3, V - 1)
    exact = x.double()
    losses = loss_maths(exact, y, *OPTIONS[name], True)
    loss, grad = in_two(x, y, OPTIONS[name])
    assert loss.dtype == torch.float32 and (loss.double() - losses).abs().max() < 3e-5
    assert (grad.double() - exact).abs().max() < 1e-5

def test_maths_is_exact():
    "In float64 two parts are one"
    x, y = 3*torch.randn(9, 20, dtype=torch.float64), torch.randint(5, (9,))
    for o in OPTIONS.values():
        exact = x.clone()
        losses = loss_maths(exact, y, *o, True)
        for got, want in zip(in_two(x, y, o, part_stats_maths, part_grads_maths), (losses, exact)): torch.testing.assert_close(got, want)

def test_kernels_show_bad_logits(kernels):
    "NaN in one part alone, a target that there isn't; an ignored row stays without gradient"
    x, y = torch.randn(4, 20, device=DEVICE), torch.tensor([15, 25, 3, -100], device=DEVICE)
    x[0, 2] = torch.nan
    loss, grad = in_two(x, y, OPTIONS["plain"])
    assert loss.isnan().tolist() == [True, True, False, False] and loss[3] == 0
    assert grad[:2].isnan().all() and not grad[2].isnan().any() and not grad[3].any()

def test_rows_of_no_token(monkeypatch):
    "No process has one: the stream is NaN there, not zero"
    monkeypatch.setattr(vocab, "reduce_scatter", lambda h, share: h.flatten(0, -2))
    parts = [vocab.CutEmbedding(torch.ones(4, 8), TPGroup(i, 2, ""), False, False)(torch.tensor([[0, 5, 8, -1]])) for i in (0, 1)]
    assert sum(parts)[:2].eq(1).all() and sum(parts)[2:].isnan().all()

@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_real_kernels(name, dtype):
    "At the course's vocabulary: the gradient at most twice as far from float64 as PyTorch's in the same type"
    torch.manual_seed(0)
    x, y = (3*torch.randn(2000, 50304, device="cuda")).to(dtype), torch.randint(50304, (2000,), device="cuda")
    exact, theirs = x.double(), x.clone()
    losses = loss_maths(exact, y, *OPTIONS[name], True)
    loss_maths(theirs, y, *OPTIONS[name], True)
    loss, grad = in_two(x, y, OPTIONS[name])
    off = lambda a, b: ((a.double() - b).norm()/b.norm()).item()
    assert off(loss, losses) < 1e-5 and off(grad, exact) <= 2*off(theirs, exact) + 1e-6
