"The rung ddp: two processes, each with half of the batch, take the steps of one, whatever else is on the list; without the mean they don't."
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial, reduce
from types import SimpleNamespace
import pytest, torch
from helpers.tiny_runs import NANO, fails
from llm_speedrun.course import spans_of
from llm_speedrun.io_utils import InputError
from llm_speedrun.model_config import GPTConfig
from llm_speedrun.recipes.recipe import set_groups
from llm_speedrun.recipes.recipe_spec import find_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import find_rung
from llm_speedrun.stepper import Backward, StepSync, Stepper, enter_all
from llm_speedrun.distributed.world import World
from llm_speedrun.rungs import ddp as module
from llm_speedrun.rungs.memory_traffic import DirectBackward
from llm_speedrun.rungs.cuda_graphs import RecordedLoss, RecordedPass
from llm_speedrun.distributed.spawn import run_distributed

CONFIG = replace(NANO, layers=2)
BATCH, POISON = 8, 7 # a batch whose first token is POISON has a loss that is NaN
STEPS = {"fused": 50} # else 5
FUSED = ["flash", "fused_ops", "chunked_ce"]
CASES = dict( # rungs, micro-batches of a process; a "replay" is a recording that works on a CPU
    naive=([], 1), fused=(FUSED, 1), checkpoint=([*FUSED, "checkpoint"], 2), compile=(["chunked_ce", "compile"], 1),
    fp8=(["bf16", *FUSED, "fp8"], 1), adamw8bit=([*FUSED, "adamw8bit"], 1), bf16_weights=(["bf16", *FUSED, "bf16_weights"], 2),
    direct=([*FUSED, "recompute_rope", "tied_embedding", "head_groups", "fused_adamw", "direct_update"], 2), two=([], 2), four=(FUSED, 4), four_at_once=([*FUSED, "cuda_graphs"], 4), replayed=(["replay"], 1),
    four_replayed=([*FUSED, "replay"], 4), nan=([], 2), nan_at_once=(["cuda_graphs"], 1), nan_fp8=(["bf16", *FUSED, "fp8"], 2))
SAME = {"compile", "checkpoint", "cuda_graphs", "replay"} # change no number: one process takes the steps without them
DIRECT = dict(hooks=([], 2), replayed=(["replay"], 2), after=(["replay", "after"], 2)) # rungs and micro-batches, each with direct_update and without
BROKEN = "naive", "two", "four_at_once", "four_replayed"

# --- a recording on a CPU: marks and streams do nothing, since a replay is over when it has been queued ---

class Replay(RecordedPass):
    def __init__(self, loss, model, x, y):
        self.loss_of, self.batch, self.replays = partial(loss, model), (x.clone(), y.clone()), 0
        self.params, self.graph = [p for p in model.parameters() if p.requires_grad], self
        self.loss, self.grads = self.passed()
    def passed(self):
        loss = self.loss_of(*self.batch)
        return loss.detach(), torch.autograd.grad(loss, self.params)
    def replay(self):
        loss, grads = self.passed()
        torch._foreach_copy_([self.loss, *self.grads], [loss, *grads])

class Replays(RecordedLoss):
    def __call__(self, model, x, y):
        if not torch.is_grad_enabled(): return self.loss(model, x, y)
        of_model = self.passes.setdefault(model, {})
        n = of_model.get(x.shape, 0)
        if n == self.plain: n = of_model[x.shape] = Replay(self.loss, model, x, y)
        if isinstance(n, Replay): return n(x, y)
        of_model[x.shape] = n + 1
        return self.loss(model, x, y)

def no_gpu():
    "Let what belongs to a GPU do nothing"
    nothing = lambda *args, **kwargs: SimpleNamespace(record=lambda: None, wait_event=lambda e: None, wait_stream=lambda s: None)
    for name in ("Event", "Stream", "current_stream"): setattr(torch.cuda, name, nothing)
    torch.cuda.stream, torch.cuda.is_current_stream_capturing = lambda s: nullcontext(), lambda: True

# --- what a process does ---

def poisoned(loss):
    return lambda model, x, y: loss(model, x, y) * torch.where((x[:, 0] == POISON).any(), torch.nan, 1.)

def built(rungs, world, poison):
    if "autograd" in rungs: return replace(built([r for r in rungs if r != "autograd"], world, poison), backward=Backward)
    replay = "replay" in rungs
    if not (poison or replay): return build(CONFIG, [*rungs, "ddp:mb=.02"], device="cpu", world=world)
    late = [r for r in rungs if r in ("fused_adamw", "direct_update")] # after ddp, which is to be given its gradient reducer here
    run = build(CONFIG, [r for r in rungs if r not in ("replay", "after", *late)], device="cpu", world=world)
    if poison: run = replace(run, loss=poisoned(run.loss))
    if not replay or world.size == 1: return reduce(lambda run, r: find_rung(r)(run), late, find_rung("ddp")(run, mb=.02))
    sync = (module.AllReduceAfterBackward if "after" in rungs else module.OverlappedGraphAllReduce)(Replays(run.loss, plain=1), world.group("dp"), .02)
    return reduce(lambda run, r: find_rung(r)(run), late, replace(find_rung("ddp")(run), loss=sync, grad_reducers=(sync,)))

def steps(world, rungs, n, poison, count, broken=False):
    "Losses and norms of some steps in `n` micro-batches, the weights at the end, and the loss of an evaluation"
    run, i = built(rungs, world, poison), world.rank
    if broken: leave_out(run.grad_reducers[0])
    step = GuardedStepper(run, clip=.5)
    x, y = torch.randint(8, CONFIG.vocab, (2, count, BATCH, CONFIG.seq_len), generator=torch.Generator().manual_seed(1))
    if poison: x[3, -1, 0] = POISON # in the last process's part
    if world.first: run.loss(run.model, x[0], y[0]) # outside of a step: nobody else need be there
    own = lambda t: t.unflatten(0, (n, world.size, -1))[:, i].unbind()
    said = []
    for k in range(count):
        loss = step(*zip(own(x[k]), own(y[k])))
        said.append((loss.item(), step.norm.item()))
        if k == 1: released(run)
    with torch.no_grad(): weights = {k: p.float().clone() for k, p in run.model.named_parameters()}
    return said, weights, step.evaluate([(x[0], y[0])])

def released(run):
    "As after a step that broke off: what was recorded or wrapped is gone"
    run.release()
    for e in run.grad_reducers:
        if isinstance(e, module.OverlappedGraphAllReduce): e.loss.forget(); e.sent = True

def leave_out(sync):
    "Let `sync` forget to bring the gradients together"
    module.all_reduce_mean_ = lambda grads, group: None
    if isinstance(sync, module.DDPLoss): sync.micro = partial(quiet, sync)

def quiet(sync, last):
    sync.last = last
    return sync.ddp.no_sync() if sync.ddp else nullcontext()

def gap(a, b): return 0. if a == b or a != a and b != b else abs(a - b) # NaN and infinity are to be in both

def gaps(a, b):
    "Largest differences of losses, norms, weights and evaluations"
    losses, norms = (max(gap(u[i], v[i]) for u, v in zip(a[0], b[0])) for i in range(2))
    return losses, norms, max((a[1][k] - b[1][k]).abs().max().item() for k in a[1]), gap(a[2], b[2])

@lru_cache
def alone(rungs, poison, count): return steps(World(), list(rungs), 1, poison, count)

TAKEN = [] # gradients that were taken where they lie

def noting_gradients():
    take = DirectBackward.set_gradients
    DirectBackward.set_gradients = lambda self, params, grads: (TAKEN.append(len(grads)), take(self, params, grads))[1]

def compared(world):
    "Name -> `gaps` to one process, the losses, and whether all have the same weights to the bit; with a True, without the mean"
    no_gpu(); noting_gradients()
    res, all_reduce_mean_ = {}, module.all_reduce_mean_
    for name, (rungs, n) in CASES.items():
        poison, count = "nan" in name, STEPS.get(name, 5)
        one = alone(tuple(r for r in rungs if r not in SAME), poison, count)
        for broken in (False, True)[:1 + (name in BROKEN)]:
            both = steps(world, rungs, n, poison, count, broken)
            sums = world.all_gather_object([p.double().sum().item() for p in both[1].values()])
            res[name, broken] = gaps(one, both), [l for l, _ in both[0]], sums[0] == sums[-1]
            module.all_reduce_mean_ = all_reduce_mean_
    for name, (rungs, n) in DIRECT.items():
        one = alone((*FUSED, "fused_adamw"), False, 5)
        bare, plain, direct = (steps(world, [*FUSED, "fused_adamw", *rungs, *more], n, False, 5)
                               for more in ([], ["direct_update", "autograd"], ["direct_update"]))
        res[name] = gaps(plain, direct), gaps(bare, direct), gaps(one, direct), len(TAKEN)
        TAKEN.clear()
    return res

@pytest.fixture(scope="module")
def results(once):
    with pytest.MonkeyPatch.context() as m:
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        return once("ddp", lambda: run_distributed(2, compared)[0])

@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(results, name):
    (loss, norm, weights, evaluated), losses, same = results[name, False]
    assert same and [l != l for l in losses] == [i == 3 and "nan" in name for i in range(len(losses))]
    rounds = {"fp8": 2e-3, "nan_fp8": 2e-3, "bf16_weights": 2e-4}.get(name, 1e-4) # in the first step FP8's scales are each process's own
    assert loss < rounds and norm < rounds and evaluated < rounds
    assert weights < (1e-4 if rounds == 1e-4 else 1e-2)

@pytest.mark.parametrize("name", DIRECT)
def test_direct_update_composes(results, name):
    """With its AdamW the bits of autograd's backward pass, and what `ddp` alone and one process find. A recording's gradients are taken where
    they lie; those that hooks send aren't"""
    plain, bare, one, taken = results[name]
    assert plain == (0, 0, 0, 0) and max(bare) < 1e-6 and max(one) < 1e-4
    assert (taken > 0) == (not name.startswith("hooks"))

@pytest.mark.parametrize("name", BROKEN)
def test_without_the_mean_they_differ(results, name):
    (loss, norm, weights, _), _, same = results[name, True]
    assert not same and loss > 2e-4 and norm > .1 and weights > 2e-3

def test_one_process_alone_has_no_gradient_reducer():
    run = build(CONFIG, ["ddp"], device="cpu")
    assert run.grad_reducers == () and run.sync is StepSync and run.loss is build(CONFIG, [], device="cpu").loss
    assert run.rungs == ("ddp",) and run.releases == ()

def test_what_does_not_go_together():
    with fails(InputError, "'fp16'", "'ddp'", "exclude"): build(CONFIG, ["fp16", "ddp"])

def test_buckets_hold_each_parameter_once_last_ones_first():
    ps = [torch.zeros(n) for n in (1000, 10, 300, 300, 5)] # of 4 bytes
    assert module.in_buckets(ps, .0012) == [[4, 3], [2], [1, 0]]
    assert module.in_buckets(ps, 1) == [[4, 3, 2, 1, 0]] and module.in_buckets(ps[:1], 1e-9) == [[0]] and module.in_buckets([], 1) == []

def event(name, start, us, device="CUDA", annotation=False, parent=None):
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), is_user_annotation=annotation, cpu_parent=parent,
                           time_range=SimpleNamespace(start=start, elapsed_us=lambda: us))

def test_spans_of_a_profile():
    events = [event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3000, 500), event("gemm", 1000, 2000), event("nccl:all_reduce", 2900, 700, annotation=True),
              event("cudaGraphLaunch", 0, 10, "CPU")]
    assert spans_of(events) == dict(compute=[(0, 2)], communication=[(2, .5)])
    events = [event("aten::mm", 1000, 1000, "CPU"), event("aten::empty", 1100, 10, "CPU", parent=1), event("gloo:all_reduce", 1500, 900, "CPU", True),
              event("c10d::allreduce_", 1400, 10, "CPU"), event("mine", 0, 9000, "CPU", True)]
    assert spans_of(events) == dict(compute=[(0, 1)], communication=[(.5, .9)])

# --- on two GPUs ---

LARGE = GPTConfig(name="large", vocab=8192, layers=6, width=768, heads=12, kv_heads=12, hidden=2048, seq_len=512)
LISTS = {"hooks": ["ddp"], "after": ["cuda_graphs", "ddp"], "during": ["cuda_graphs", "ddp:overlap=yes"],
         "during, whole": ["cuda_graphs", "ddp:overlap=yes:mb=1000"]}

def passed(run, batches, sync=None):
    "The gradients of micro-batches, in a step of `sync` or outside of one"
    for p in run.model.parameters(): p.grad = None
    for i, (x, y) in enumerate(batches, 1):
        with sync.micro(i == len(batches)) if sync else nullcontext():
            with enter_all(run.forward_contexts): loss = run.loss(run.model, x, y)
            loss.backward()
    params = [*run.model.parameters()]
    if sync: sync.reduce(params)
    return [p.grad.clone() for p in params]

def gpu_gaps(world, more):
    "Largest relative distances of the gradients in a step from the mean of those outside; and losses with all rungs"
    run = build(LARGE, ["bf16", "flash", "fused_ops", "chunked_ce", *more], world=world)
    g, res = torch.Generator("cuda").manual_seed(world.rank), {}
    for n in (1, 2):
        for k in range(5):
            x, y = torch.randint(LARGE.vocab, (2, n, 8, LARGE.seq_len), device="cuda", generator=g)
            want = passed(run, [*zip(x, y)])
            module.all_reduce_mean_(want, world.group("dp"))
            have = passed(run, [*zip(x, y)], run.grad_reducers[0])
            res[n, k] = max(((a - b).norm()/b.norm()).item() for a, b in zip(have, want))
    return res

def gpu_compared(world):
    res = {name: gpu_gaps(world, more) for name, more in LISTS.items()}
    curves = {}
    for name, more in LISTS.items():
        run = build(LARGE, ["bf16", "flash", "fused_ops", "chunked_ce", "fp8", "fused_adamw", *more], world=world)
        step, g = Stepper(run), torch.Generator("cuda").manual_seed(world.rank)
        x, y = torch.randint(LARGE.vocab, (2, 16, LARGE.seq_len), device="cuda", generator=g)
        losses = [step(*zip(x.split(n), y.split(n))) for n in (16,)*6 + (8,)*6]
        sums = world.all_gather_object([p.double().sum().item() for p in run.model.parameters()])
        curves[name] = torch.stack(losses).tolist(), sums[0] == sums[1]
    return res, curves

@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus():
    res, curves = run_distributed(2, gpu_compared)[0]
    for name, found in res.items(): assert max(found.values()) < 1e-2, (name, found)
    first = curves["hooks"][0]
    for name, (losses, same) in curves.items():
        assert same and losses[0] - losses[-1] > .1, (name, losses)
        assert losses[:6] == pytest.approx(first[:6], abs=5e-2), name # FP8's sums are in no fixed order

# --- recipes: the work on matrices is divided ---

def learned(world, name):
    "Losses and weights of some steps of a recipe, and how often its update was divided among processes"
    import llm_speedrun.recipes.normuon as normuon
    update, shares = normuon.fast_muon, []
    def noted(group, params, grads, states, found_inf, share, **more):
        shares.append(share)
        return update(group, params, grads, states, found_inf, share, **more)
    normuon.fast_muon = noted
    run = find_recipe(name)(build(CONFIG, ["ddp"], device="cpu", world=world))
    step = GuardedStepper(run, clip=.5)
    x, y = torch.randint(8, CONFIG.vocab, (2, 6, BATCH, CONFIG.seq_len), generator=torch.Generator().manual_seed(1))
    own, losses = lambda t: t.unflatten(0, (world.size, -1))[world.rank], []
    for k in range(6):
        set_groups(run, step.opt, k, 6, .02)
        losses.append(step((own(x[k]), own(y[k]))).item())
    normuon.fast_muon = update
    return losses, [p.detach().clone() for p in run.model.parameters()], [s and s[:2] for s in shares]

def divided(world):
    no_gpu()
    res = {}
    for name in ("normuon", "speedrun"):
        (losses, weights, _), (alone, whole, _) = learned(world, name), learned(World(), name)
        said = learned(world, name)[2]
        sums = world.all_gather_object([p.double().sum().item() for p in weights])
        res[name] = max(map(gap, losses, alone)), max((a - b).abs().max().item() for a, b in zip(weights, whole)), sums[0] == sums[-1], said
    return res

def test_an_update_is_divided():
    "Two processes orthogonalize half of the matrices each, have the same weights to the bit, and nearly those of one process"
    with pytest.MonkeyPatch.context() as m:
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        found = run_distributed(2, divided)
    for rank, res in enumerate(found):
        for name, (loss, weights, same, shares) in res.items():
            assert same and shares == [(rank, 2)]*6, name
            assert loss < 1e-4 and weights < 2e-3, name
