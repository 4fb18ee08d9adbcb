"The rung ddp: two processes, each with half of the batch, take the steps of one, whatever else is on the list; and the versions that must fail do."
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import pytest, torch
from small import NANO
from llm_speedrun.recipes.schedules import guarded
from llm_speedrun.runs import HandedOut, World, build, find_rung, stepper_of
from llm_speedrun.rungs import ddp as module
from llm_speedrun.rungs.cuda_graphs import RecordedLoss, RecordedPass
from llm_speedrun.world import processes

CONFIG = replace(NANO, layers=2)
STEPS, BATCH, POISON = 6, 8, 7 # a batch whose first token is POISON has a loss that is NaN
FUSED = ["flash", "fused_ops", "chunked_ce"]
CASES = dict( # rungs, micro-batches of a process
    naive=([], 1), fused=(FUSED, 1), checkpoint=([*FUSED, "checkpoint"], 2), compile=([*FUSED, "compile"], 1),
    fp8=(["bf16", *FUSED, "fp8"], 1), adamw8bit=([*FUSED, "adamw8bit"], 1), bf16_weights=(["bf16", *FUSED, "bf16_weights"], 2),
    two=([], 2), four=(FUSED, 4), at_once=(["cuda_graphs"], 1), four_at_once=([*FUSED, "cuda_graphs"], 4), replayed=(["replay"], 1),
    four_replayed=([*FUSED, "replay"], 4), nan=([], 2), nan_at_once=([*FUSED, "cuda_graphs"], 1), nan_fp8=(["bf16", *FUSED, "fp8"], 2))
LOOSE = {"fp8": 3e-3, "nan_fp8": 3e-3, "bf16_weights": 3e-3, "adamw8bit": 1e-3}
BROKEN = "naive", "two", "at_once", "replayed", "four_replayed"

# --- a recording on a CPU: marks and streams do nothing, and the replay is done when it's queued ---

class Replayed(RecordedPass):
    def __init__(self, loss, model, x, y):
        self.batch, self.replays, self.grads = (x.clone(), y.clone()), 0, None
        self.params, self.graph = [p for p in model.parameters() if p.requires_grad], self
        def run():
            out = loss(model, *self.batch)
            grads = torch.autograd.grad(out, self.params)
            if self.grads is None: self.loss, self.grads = out.detach(), grads
            self.loss.copy_(out.detach())
            for to, g in zip(self.grads, grads): to.copy_(g)
        self.replay = run
        run()

class Replays(RecordedLoss):
    def __call__(self, model, x, y):
        if not torch.is_grad_enabled(): return self.loss(model, x, y)
        of_model = self.passes.setdefault(model, {})
        p = of_model.get(x.shape, 0)
        if p == self.plain: p = of_model[x.shape] = Replayed(self.loss, model, x, y)
        if isinstance(p, RecordedPass): return p(x, y)
        of_model[x.shape] = p + 1
        return self.loss(model, x, y)

def no_gpu():
    nothing = lambda *args, **kwargs: SimpleNamespace(record=lambda: None, wait_event=lambda e: None, wait_stream=lambda s: None)
    for name in ("Event", "Stream", "current_stream"): setattr(torch.cuda, name, nothing)
    torch.cuda.stream, torch.cuda.is_current_stream_capturing = lambda s: nullcontext(), lambda: True

# --- what a process does ---

def poisoned(loss):
    return lambda model, x, y: loss(model, x, y) * torch.where((x[:, 0] == POISON).any(), torch.nan, 1.)

def steps(world, name, broken=False):
    "Losses and norms of some steps on this process's part of the same batches, the weights at the end, and an evaluation's loss"
    rungs, n = CASES[name]
    replay = "replay" in rungs
    late = replay or "nan" in name
    run = build(CONFIG, [r for r in rungs if r != "replay"] + ["ddp:mb=.02"]*(not late), device="cpu", world=world)
    if "nan" in name: run = replace(run, loss=poisoned(run.loss))
    if replay: run = replace(run, loss=Replays(run.loss), rungs=run.rungs + ("cuda_graphs",))
    if late: run = find_rung("ddp")(run, mb=.02)
    if replay and world.size > 1:
        engine = module.ReplayedLoss(run.loss.loss, world.group("dp"), .02)
        run = replace(run, loss=engine, engines=(engine,))
    if broken: leave_out(run.engines[0])
    step = guarded(stepper_of(run))(run, clip=.5)
    x, y = torch.randint(8, CONFIG.vocab, (2, STEPS, BATCH, CONFIG.seq), generator=torch.Generator().manual_seed(1))
    if "nan" in name: x[3, -1, 0] = POISON # of the last process's part
    said, i = [], world.rank
    for k in range(STEPS):
        # a process's micro-batches lie side by side in the whole batch, which one process takes in as many
        own = lambda t: t[k].unflatten(0, (n, world.size, -1))[:, i].unbind() if world.size > 1 else t[k].unflatten(0, (n, -1)).unbind()
        loss = step(*zip(own(x), own(y)))
        said.append((loss.item(), step.norm.item()))
    return said, {k: p.detach().float().clone() for k, p in run.model.named_parameters()}, step.evaluate([(x[0], y[0])])

def leave_out(engine):
    "Let `engine` forget to bring the gradients together"
    if isinstance(engine, module.HookedLoss): engine.micro = partial(quiet, engine)
    else: module.take_mean = lambda grads, group: None

def quiet(engine, last):
    engine.last = last
    return engine.ddp.no_sync() if engine.ddp else nullcontext()

def compared(world):
    "Name -> largest differences of losses, norms, weights and evaluations from those of one process; of the broken ones too"
    no_gpu()
    res, take_mean = {}, module.take_mean
    for name in CASES:
        alone, both = steps(World(), name), steps(world, name)
        res[name] = differences(alone, both), [l for l, _ in both[0]]
        if name in BROKEN:
            res[f"broken {name}"] = differences(alone, steps(world, name, broken=True)), None
            module.take_mean = take_mean
    return res

def differences(a, b):
    gap = lambda u, v: 0. if u == v or u != u and v != v else abs(u - v) # NaN and infinity are there in both
    weights = max((a[1][k] - b[1][k]).abs().max().item() for k in a[1])
    return max(gap(u[0], v[0]) for u, v in zip(a[0], b[0])), max(gap(u[1], v[1]) for u, v in zip(a[0], b[0])), weights, gap(a[2], b[2])
