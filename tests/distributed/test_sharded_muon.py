"Muon of sharded matrices: several processes that each have a part of every matrix take the steps of one, whatever the layout; momentum takes a part of the memory."
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest, torch
from helpers.tiny_runs import NANO, fails
from llm_speedrun.checkpoint.load import OpenCheckpoint
from llm_speedrun.checkpoint.save_sharded import make_saver
from llm_speedrun.checkpoint.state import load_optimizer, load_weights, optimizer_to_save, weights_to_save
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.distributed.world import World
from llm_speedrun.io_utils import InputError
from llm_speedrun.recipes import muon_update, sharded_muon
from llm_speedrun.recipes.fast_muon import fast_muon
from llm_speedrun.recipes.muon_update import new_state
from llm_speedrun.recipes.recipe import set_groups
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.recipes.sharded_muon import map_whole, sharded_muon as update, sharded_stacks
from llm_speedrun.runs import build
from llm_speedrun.sharding import ShardMap, shards_of

CONFIG = replace(NANO, layers=3, heads=4, kv_heads=2, hidden=45, vocab=321)    # GQA; no number of rows of the MLP that two or four divide
FUSED = ["flash", "fused_ops", "chunked_ce"]
EVEN = replace(CONFIG, hidden=48, vocab=320)    # for tensor_parallel, which wants to divide it
# name -> rungs of several processes, processes, processes of a model, recipe, how to train
CASES = {
    "fsdp": (["fsdp"], 2, 1, "speedrun", {}),
    "fsdp, normuon": (["fsdp"], 2, 1, "normuon", dict(micro=2)),
    "fsdp, muon": (["fsdp"], 2, 1, "muon", {}),
    "fsdp, without variance": (["fsdp"], 2, 1, "normuon:variance=0:cautious=no", {}),
    "fsdp, each": (["fsdp:each=yes"], 2, 1, "normuon", dict(micro=2)),
    "fsdp, narrow": (["fsdp"], 2, 1, "normuon", dict(config=replace(CONFIG, hidden=1))),    # a process without a row of some matrices
    "fsdp, one layer": (["fsdp"], 2, 1, "normuon", dict(config=replace(CONFIG, layers=1))),
    "fsdp, nan": (["fsdp"], 2, 1, "normuon", dict(poison=True)),
    "fsdp, without_muon": (["fsdp"], 2, 1, "without_muon", {}),
    "tp": (["tensor_parallel"], 2, 2, "speedrun", dict(config=EVEN)),
    "tp, normuon": (["tensor_parallel"], 2, 2, "normuon", dict(config=EVEN, micro=2)),
    "tp, muon": (["tensor_parallel"], 2, 2, "muon", dict(config=EVEN)),
    "four": (["fsdp"], 4, 1, "speedrun", {}),
    "four, fewer matrices": (["fsdp"], 4, 1, "normuon", dict(config=replace(CONFIG, layers=1, kv_heads=4))),
    "four, narrow": (["fsdp"], 4, 1, "normuon", dict(config=replace(CONFIG, hidden=3))),
    "four, muon": (["fsdp"], 4, 1, "muon", dict(config=replace(CONFIG, hidden=3))),
    "fsdp and tp": (["fsdp", "tensor_parallel"], 4, 2, "speedrun", dict(config=EVEN, tp=2)),
    "ddp and tp": (["ddp", "tensor_parallel"], 4, 2, "normuon", dict(config=EVEN)),
    "ddp and tp, muon": (["ddp", "tensor_parallel"], 4, 2, "muon", dict(config=EVEN))}

def whole(world, named):
    "Name -> whole tensor of all processes' `Shard`s, float64"
    res = {}
    for mine in world.all_gather_object({n: (s.shape, s.start, s.tensor.double().numpy()) for n, s in named.items()}):
        for n, (shape, start, t) in mine.items():
            res.setdefault(n, np.full(shape, np.nan))[tuple(slice(i, i + k) for i, k in zip(start, t.shape))] = t
    return res

def made(world, rungs, recipe, config):
    run = build(config, [*FUSED, *(rungs if world.size > 1 else [])], device="cpu", seed=3, world=world)
    run = parse_recipe(recipe)(run)
    return run, GuardedStepper(replace(run, optimizer=partial(run.optimizer, weight_decay=.1)), clip=.5)

def batches(world, config, k, micro=1, poison=False):
    x, y = torch.randint(config.vocab, (2, 8, config.seq_len), generator=torch.Generator().manual_seed(k))
    i, n = world.rank_and_size("dp")
    x, y = (t.unflatten(0, (micro, n, -1))[:, i] for t in (x, y))
    return [*zip(x, y)]

def poison_grads(step, world):
    "A value of a gradient of the last process is NaN"
    if world.rank == world.size - 1:
        p = [p for p in step.opt.param_groups[0]["params"] if p.numel()][-1]
        p.grad.view(-1)[-1] = torch.nan

def trained(world, rungs, recipe, config=CONFIG, micro=1, poison=False, tp=1, steps=6):
    "Losses, norms, initial and final weights, momentum, and bytes of the optimizer's state"
    run, step = made(world, rungs, recipe, config)
    before, said = whole(world, shards_of(run)), []
    reduce_ = step.sync.reduce
    if poison:
        def poisoned(params, loss):
            loss = reduce_(params, loss)
            if len(said) == 3: loss = loss*torch.nan
            return loss
        step.sync.reduce = poisoned
    for k in range(steps):
        set_groups(run, step.opt, k, steps, .02)
        said.append((step(*batches(world, config, k % 2, micro)).item(), step.norm.item()))
    state = {(p.data_ptr(), k): t for p, s in step.opt.state.items() for k, t in s.items()}
    matrices = [s for p, s in step.opt.state.items() if "momentum" in s]
    moment = whole(world, {n: replace(s, tensor=step.opt.state[step.sync.parts.get(p, p)]["momentum"])
                           for (n, p), s in zip(run.model.named_parameters(), shards_of(run).values())
                           if "momentum" in step.opt.state.get(step.sync.parts.get(p, p), {})})
    nbytes = sum(t.nbytes for s in step.opt.state.values() for t in s.values())
    return dict(said=said, before=before, after=whole(world, shards_of(run)), momentum=moment, bytes=nbytes,
                matrices=sum(s["momentum"].nbytes for s in matrices), n=len(state))

def several(world, cases):
    torch.manual_seed(world.rank)    # nothing may depend on it
    return {name: trained(world, rungs, recipe, **how) for name, (rungs, _, _, recipe, how) in cases.items()}

def together(n, tp): return {k: c for k, c in CASES.items() if (c[1], c[2]) == (n, tp)}

@pytest.fixture(scope="module")
def results(once):
    def found():
        res = {}
        for n, tp in ((2, 1), (2, 2), (4, 1), (4, 2)):
            every = run_distributed(n, several, together(n, tp), tp=tp)
            for name in together(n, tp): res[name] = [r[name] for r in every]
        return res
    with pytest.MonkeyPatch.context() as m:
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        return once("sharded_muon", found)

@pytest.mark.parametrize("name", CASES)
def test_several_processes_are_one(results, name):
    "Initial weights to the bit; losses, norms, momentum and weights; each process says the same"
    rungs, n, tp, recipe, how = CASES[name]
    one = trained(World(), [], recipe, **how)
    assert len(results[name]) == n
    for got in results[name]:
        for k, w in one["before"].items(): assert (got["before"][k] == w).all(), k
        for (a, b), (c, d) in zip(got["said"], one["said"]):
            assert (a, b) == pytest.approx((c, d), rel=1e-4, nan_ok=True)
        for what in ("after", "momentum"):
            for k, w in one[what].items(): assert abs(got[what][k] - w).max() < 1e-4*max(1., abs(w).max()), (what, k)
