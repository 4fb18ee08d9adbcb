"The rung fsdp: two processes, each with half of the weights and of the batch, take the steps of one process."
import copy, math
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
import numpy as np, pytest, torch, torch.distributed as dist
from helpers.tiny_runs import NANO, fails
from llm_speedrun.io_utils import InputError
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.rungs.documents import within_documents
from llm_speedrun.rungs.fsdp import mesh_of
from llm_speedrun.runs import build
from llm_speedrun.stepper import StepSync, Stepper
from llm_speedrun.distributed.world import World
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.sharding import local, shards_of

CONFIG = replace(NANO, layers=3, vocab=321)    # a row more than two processes can share evenly
FUSED = ["flash", "fused_ops", "chunked_ce"]
FP8 = ["bf16", *FUSED, "fp8:parts=heads+out+mlp+head"]

def whole(run):
    "All weights, put together again: name -> array"
    return {n: getattr(p, "full_tensor", lambda: p)().detach().float().cpu().numpy().copy() for n, p in run.model.named_parameters()}

def parts_of(run):
    "What this process holds of each: name -> (start, array, whole shape, whether it is the one to write it)"
    return {n: (s.start, s.tensor.float().cpu().numpy().copy(), s.shape, s.is_writer) for n, s in shards_of(run).items()}

@torch.no_grad()
def larger(run):
    "All weights a little larger, as somebody may change them between an evaluation and what comes next"
    for p in run.model.parameters(): local(p).mul_(1.1)

def trained(world, rungs, micro=1, steps=4, config=CONFIG, change=None, batch=4):
    "Losses, norms, evaluations between them, and the weights before and after"
    run = build(config, rungs, seed=3, world=world)
    run = change(run) if change else run
    before, step = whole(run), Stepper(run, clip=.5)
    x, y = torch.randint(config.vocab, (2, batch, config.seq_len), generator=torch.Generator().manual_seed(0)).to(run.device)
    i, n = world.rank_and_size("dp")
    x, y = (t.chunk(n)[i] for t in (x, y))
    said = []
    for k in range(steps):
        said += [step(*zip(x.chunk(micro), y.chunk(micro))).item(), step.norm.item()]
        if k == 1: said.append(world.mean(step.evaluate([(x, y)]))); larger(run); said.append(world.mean(step.evaluate([(x, y)])))
    return said, before, whole(run), parts_of(run)

def copied(world):
    "What copying the model says; whether a later rung changes the model that there is, which can't be copied"
    run = build(CONFIG, ["fsdp"], world=world)
    try: said = type(copy.deepcopy(run.model)).__name__
    except Exception as e: said = str(e)
    return said, run.with_model(lambda m: None).model is run.model

# Mistakes, each of which a test must see.
def unreduced(run):
    for e in run.grad_reducers: e.micro = lambda last: torch.enable_grad(run.model.set_requires_gradient_sync(False))
    return run
def vectors_apart(run):
    for e in run.grad_reducers: e.reduce = lambda params: None
    return run
def kept_whole(run):
    run.model._forward_hooks.popitem()    # `reshard_after_eval`
    return run
def documents(run): return within_documents(run, 0)

# name -> (rungs, options of fsdp, how to train, the case of one process to compare with)
CASES = {
    "naive": ([], "", {}, "fp32"),
    "fused": (FUSED, "", {}, "fp32"),
    "fifty steps": (FUSED, "", dict(steps=50), "fifty steps"),
    "checkpoint": ([*FUSED, "checkpoint"], "", {}, "fp32"),
    "selective": ([*FUSED, "selective_checkpoint"], "", {}, "fp32"),
    "compile": (["chunked_ce", "compile:backend=aot_eager"], "", {}, "fp32"),
    "fused_adamw": ([*FUSED, "fused_adamw"], "", {}, "fp32"),
    "recompute_rope": ([*FUSED, "recompute_rope"], "", {}, "fp32"),
    "direct_update": ([*FUSED, "head_groups", "fused_adamw", "direct_update"], "", {}, "fp32"),
    "accumulated": (FUSED, "", dict(micro=2), "fp32"),
    "accumulated, each": (FUSED, ":each=yes", dict(micro=2), "fp32"),
    "not resharded": (FUSED, ":reshard=no", {}, "fp32"),
    "narrow": ([], "", dict(config=replace(CONFIG, hidden=1)), "narrow"),    # a process without a row of some weights
    "documents": (FUSED, "", dict(change=documents), "documents"),
    "adamw8bit": ([*FUSED, "adamw8bit"], "", {}, "adamw8bit"),
    "bf16": (["bf16", "flash", "chunked_ce"], "", {}, "bf16"),
    "bf16_weights": (["bf16", *FUSED, "bf16_weights"], "", {}, "bf16"),
    "reduced in bf16": (["bf16", *FUSED], ":reduce=bf16", {}, "bf16"),
    "fp8": (FP8, "", {}, "fp8"),
    "fp8, checkpoint": ([*FP8, "checkpoint"], "", {}, "fp8")}
TORCHAO = ["bf16", "chunked_ce", "torchao_fp8:layers=all"]
if find_spec("torchao"): CASES["torchao_fp8"] = TORCHAO, "", {}, "torchao_fp8"
ALONE = {"fp32": ([], {}), "fifty steps": (FUSED, dict(steps=50)), "narrow": ([], dict(config=replace(CONFIG, hidden=1))), "documents": (FUSED, dict(change=documents)),
         "adamw8bit": ([*FUSED, "adamw8bit"], {}), "bf16": (["bf16", "flash", "chunked_ce"], {}), "fp8": (FP8, {})}
if find_spec("torchao"): ALONE["torchao_fp8"] = TORCHAO, {}
BARS = dict(bf16=dict(rel=3e-3), fp8=dict(rel=1e-2), torchao_fp8=dict(rel=3e-2)) # sums of rounded numbers in another order
MISTAKES = dict(unreduced=unreduced, vectors_apart=vectors_apart, kept_whole=kept_whole)

def every(world, cases):
    "What each case says, in one of the processes"
    torch.manual_seed(world.rank)    # nothing may depend on it
    return {k: trained(world, [*rungs, "fsdp" + options], **how) for k, (rungs, options, how, _) in cases.items()} | dict(copied=copied(world))

@pytest.fixture(scope="module")
def both(once):
    cases = CASES | {k: (FUSED, "", dict(change=f, micro=2), "fp32") for k, f in MISTAKES.items()}
    return once("fsdp", lambda: run_distributed(2, every, cases))

@pytest.fixture(scope="module")
def alone(once):
    return once("fsdp_alone", lambda: {k: trained(World(), rungs, **how) for k, (rungs, how) in ALONE.items()})

def differs(got, want, bar):
    "Where two runs don't say the same: words"
    res = [i for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)) if a != pytest.approx(b, **bar)]
    return res + ([n for n in want[2] if abs(got[2][n] - want[2][n]).max() > 1e-4] if bar.get("abs") else [])

@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name, both, alone, cases=CASES):
    "Losses and norms of each step, evaluations, and in FP32 the weights at the end"
    want = alone[cases[name][3]]
    assert want[0][0] - want[0][-2] > .02    # it learns something
    for got in both:
        bar = BARS.get(cases[name][3], dict(rel=1e-4, abs=1e-4))
        if name == "adamw8bit": bar = dict(rel=1e-4)    # where blocks of 256 begin depends on the part
        if name == "fifty steps":    # norms of a batch that is known by heart are small, and so is what they have in common
            bar = dict(rel=1e-2)
            assert got[name][0][::2] == pytest.approx(want[0][::2], rel=0, abs=1e-4)    # the losses
        assert not differs(got[name], want, bar)
        rounded = (lambda t: torch.tensor(t).bfloat16().float().numpy()) if name == "bf16_weights" else np.asarray
        for n, t in want[1].items(): assert (got[name][1][n] == (rounded(t) if t.ndim > 1 else t)).all(), n    # to the bit

@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name, both, alone):
    assert differs(both[0][name], alone["fp32"], dict(rel=1e-4, abs=1e-4))

@pytest.mark.parametrize("name", ["fused", "narrow", "fp8"])
def test_the_parts_make_the_whole(name, both):
    "Each number is in the part of exactly one process that writes it"
    for n, t in both[0][name][2].items():
        res = np.full(t.shape, math.nan, t.dtype)
        for start, part, shape, mine in (p[name][3][n] for p in both):
            assert shape == t.shape
            if not mine: continue
            box = tuple(slice(i, i + k) for i, k in zip(start, part.shape))
            assert np.isnan(res[box]).all()
            res[box] = part
        assert (res == t).all(), n
    held = [sum(part.size for _, part, _, _ in p["fused"][3].values()) for p in both]
    assert max(held) < .51*sum(t.size for t in both[0]["fused"][2].values())

def test_alone_it_changes_nothing():
    run = build(CONFIG, [*FUSED, "fsdp"])
    assert not run.grad_reducers and run.sync is StepSync and type(run.model).__name__ == "GPT" and "fsdp" in run.rungs

def test_a_copy_is_refused(both):
    "It would be the same model under another name"
    for got in both:
        said, same = got["copied"]
        assert "does not support deepcopy" in said and same

@pytest.mark.parametrize("rungs, words", [(["ddp"], ["ddp", "exclude"]), (["fp16"], ["fp16", "exclude"]), (["cuda_graphs"], ["exclude"]),
    (["compile:whole=yes"], ["compiled as a whole", "without whole=yes"]), (["compile:mode=reduce-overhead"], ["CUDA graphs", "mode=default"])],
    ids=str)
def test_refused(rungs, words):
    if rungs == ["ddp"]: pytest.importorskip("llm_speedrun.rungs.ddp")
    with fails(InputError, *words): build(CONFIG, [*rungs, "fsdp"])

def test_an_option_that_there_is_not():
    with fails(InputError, "fp32", "reduction"): build(CONFIG, ["fsdp:reduce=fp31"])

# Copies of the sharded model (HSDP)

EIGHT = dict(batch=8, micro=2)    # so that each of four processes has two micro-batches
HYBRID = {
    "naive": ([], "", {}, "fp32"),
    "accumulated": (FUSED, "", EIGHT, "eight"),
    "accumulated, each": (FUSED, ":each=yes", EIGHT, "eight"),
    "not resharded": ([*FUSED, "fused_adamw"], ":reshard=no", {}, "fp32"),
    "compile": (["chunked_ce", "compile:backend=aot_eager"], "", {}, "fp32"),
    "direct_update": ([*FUSED, "head_groups", "fused_adamw", "direct_update"], "", {}, "fp32"),
    "narrow": CASES["narrow"], "adamw8bit": CASES["adamw8bit"], "bf16_weights": CASES["bf16_weights"],
    "reduced in bf16": CASES["reduced in bf16"], "fp8": CASES["fp8"]}
ALONE["eight"] = FUSED, EIGHT

def copies_apart(run):
    "The copies' gradients stay their own"
    for e in run.grad_reducers: e.micro = lambda last: torch.enable_grad(run.model.set_requires_all_reduce(False))
    return run
def mean_of_a_copy(run):
    "Divided by the processes of a copy, not by all"
    for m in [run.model, *run.model.layers]: m.set_gradient_divide_factor(2)
    return run
HYBRID_MISTAKES = dict(copies_apart=copies_apart, mean_of_a_copy=mean_of_a_copy, vectors_apart=vectors_apart, kept_whole=kept_whole)

def summed(world, micro):
    "The sharded gradients of a batch, reduced in BF16 again and again, over their number"
    run = build(CONFIG, ["bf16", *FUSED, "fsdp:reduce=bf16:each=yes:replicas=2"], seed=3, world=world)
    step, xy = Stepper(run), torch.randint(CONFIG.vocab, (2, 2, CONFIG.seq_len), generator=torch.Generator().manual_seed(world.rank)).to(run.device)
    for k in range(micro):
        with step.sync.micro(last=k == micro - 1): step.forward_backward(*xy)
    return {n: local(p.grad).cpu().numpy()/micro for n, p in run.model.named_parameters() if hasattr(p, "to_local")}

def rounded_otherwise(world):
    "Norms and parts where the second copy adds up squares in another order, as it were"
    real = dist.all_reduce
    def all_reduce(t, *args, group=None, **kw):
        work = real(t, *args, group=group, **kw)
        if world.rank > 1 and not t.ndim and group not in (None, world.group("dp")): t.mul_(1 + 2**-21)    # not the losses
        return work
    with pytest.MonkeyPatch.context() as m:
        m.setattr(dist, "all_reduce", all_reduce)
        said, _, _, parts = trained(world, [*FUSED, "fsdp:replicas=2"])
    return said, parts

def every_copy(world, cases):
    return every(world, cases) | dict(summed=[summed(world, n) for n in (1, 32)], rounded_otherwise=rounded_otherwise(world))

@pytest.fixture(scope="module")
def four(once):
    if 0 < torch.cuda.device_count() < 4: pytest.skip("four processes want as many GPUs, or none")
    cases = HYBRID | {k: (FUSED, "", dict(change=f, **EIGHT), "eight") for k, f in HYBRID_MISTAKES.items()}
    cases = {k: (rungs, f":replicas=2{options}", *more) for k, (rungs, options, *more) in cases.items()}
    return once("hsdp", lambda: run_distributed(4, every_copy, cases))

@pytest.mark.parametrize("name", HYBRID)
def test_two_copies_of_two_shards_are_one(name, four, alone): test_two_processes_are_one(name, four, alone, HYBRID)

@pytest.mark.parametrize("name", HYBRID)
def test_copies_stay_equal(name, four):
    "To the bit, on all four; neighbours have different parts, and one of each is written"
    parts = [got[name][3] for got in four]
    for n, (_, part, shape, _) in parts[0].items():
        cut = part.shape != shape or parts[1][n][1].shape != shape    # of a single row the first process has all
        assert [p[n][3] for p in parts] == [True, cut, False, False], n
        for i in (0, 1): assert parts[i][n][0] == parts[i + 2][n][0] and (parts[i][n][1] == parts[i + 2][n][1]).all(), n
        assert (four[0][name][2][n] == four[1][name][2][n]).all()

def test_copies_stay_equal_where_one_rounds_its_norm_otherwise(four):
    "They clip by the same factor"
    one, other = ([four[i]["rounded_otherwise"] for i in at] for at in ((0, 1), (2, 3)))
    for (said, parts), (same, theirs) in zip(one, other):
        assert said == same and min(said[1], said[3]) > .5    # losses and norms; gradients are clipped
        for n in parts: assert (parts[n][1] == theirs[n][1]).all(), n

def test_what_is_reduced_in_bf16_is_added_up_in_fp32(four):
    "With `each`: the same gradients again and again are a multiple of them, to the bit"
    for got in four:
        once, often = got["summed"]
        assert len(once) > 10 and any(g.any() for g in once.values())
        for n, g in once.items(): assert (often[n] == g).all(), n

@pytest.mark.parametrize("name", HYBRID_MISTAKES)
def test_a_mistake_with_copies_is_seen(name, four, alone):
    assert differs(four[0][name], alone["eight"], dict(rel=1e-4, abs=1e-4))

FOUR = SimpleNamespace(device_type="cpu", mesh_dim_names=("dp", "tp"), size=lambda i: (4, 1)[i], get_local_rank=lambda dim: 0)

@pytest.mark.parametrize("replicas", [-2, 0, 3, 4, 8])
def test_copies_that_cannot_be(replicas):
    with fails(InputError, "the 4 processes", f"{replicas} replicas", "or ddp"): mesh_of(World(0, 4, FOUR), replicas)

def test_groups_of_copies_are_made_once(monkeypatch):
    "For the next run of this world, too: NCCL keeps memory for each"
    made, world = [], World(0, 4, FOUR)
    monkeypatch.setattr(dist, "init_device_mesh", lambda *args, **kw: (made.append(args), {("dp_replicate", "dp_shard"): "mesh"})[1])
    assert mesh_of(world, 2) == mesh_of(world, 2) == "mesh" and made == [("cpu", (2, 2, 1))]
    assert replace(world, rank=1).hybrid == {}    # which may have another mesh

GPU_CASES = {"fp8": (["tf32", *FP8, "fused_adamw"], "", dict(config=WORKLOADS["tiny"]), ""),
             "fp8, bf16": (["tf32", *FP8, "fused_adamw"], ":reduce=bf16", dict(config=WORKLOADS["tiny"], micro=2), ""),
             "selective": (["bf16", *FUSED, "selective_checkpoint", "adamw8bit"], "", dict(config=WORKLOADS["tiny"]), ""),
             "compile": (["bf16", "flash", "chunked_ce", "compile", "fused_adamw"], "", dict(config=WORKLOADS["tiny"]), "")}

@pytest.mark.cuda
@pytest.mark.parametrize("gpus, more", [(2, ""), (4, ":replicas=2")])
def test_several_gpus_are_one(gpus, more):
    "The kernels of a GPU, and NCCL"
    if torch.cuda.device_count() < gpus: pytest.skip(f"needs {gpus} GPUs")
    both = run_distributed(gpus, every, {k: (rungs, options + more, *how) for k, (rungs, options, *how) in GPU_CASES.items()})
    for k, (rungs, _, how, _) in GPU_CASES.items():
        alone = trained(World(), rungs, **how)
        for got in both: assert not differs(got[k], alone, dict(rel=3e-2)), k
        for n, w in both[0][k][2].items():
            assert (w == both[1][k][2][n]).all() and np.linalg.norm(w - alone[2][n]) <= .1*np.linalg.norm(alone[2][n]), (k, n)
