"""What a logged step measures of itself: each norm against weights and gradients that are looked at on the side, alone and in several
processes; training that doesn't notice; the other columns of a row."""
import math, re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
import pytest, torch
from helpers.tiny_runs import NANO, cache, nano, options # noqa: F401: fixtures
from llm_speedrun import measure
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.distributed.world import World
from llm_speedrun.model import GPT
from llm_speedrun.model_config import matrix_params
from llm_speedrun.recipes.architecture import UntiedGPT
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.rungs.fp8 import E5M2
from llm_speedrun.rungs.fp8_kernels import SLOT_NAMES, Scaling
from llm_speedrun.runs import build
from llm_speedrun.sharding import ParallelStepSync
from llm_speedrun.train import telemetry
from llm_speedrun.train.metrics import Breakdown, MetricsLogger
from llm_speedrun.train.telemetry import Telemetry, norm_groups
from llm_speedrun.train.trainer import train

FUSED = ["flash", "fused_ops", "chunked_ce"]
FP8 = ["bf16", *FUSED, "fp8:parts=heads+out+mlp+head"]
CONFIG = replace(NANO, layers=3, vocab=322) # what two processes can't share evenly, but for what they must
ROLES = {r"embed_tokens": "embed", r"lm_head": "head", r"self_attn\.[qkvo]_proj": "attention", r"mlp\.": "mlp", r"norm": "vector"}

def role_of(name): return next(role for r, role in ROLES.items() if re.search(r, name))

def tokens(run, seed=0): # on the run's device
    return torch.randint(run.model.config.vocab, (2, 8, 32), generator=torch.Generator().manual_seed(seed)).to(run.device)

def root_of_squares(named): # pairs of a parameter's name and a tensor
    "Role -> norm, in float64"
    total = {}
    for n, t in named: total[role_of(n)] = total.get(role_of(n), 0.) + t.double().square().sum().item()
    return {k: math.sqrt(v) for k, v in total.items()}

def values(t): return {k: v.item() for k, v in t.read().items()}
def of(found, start): return {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}

# --- one process ---

def forgets(self, groups, values): # one weight of a role
    return norms(self, {k: ps[:-1] if k == "mlp" else ps for k, ps in groups.items()}, values)
def sums(self, groups, values): # norms, which don't add up
    each = iter(torch._foreach_norm(values))
    return {k: sum(next(each) for _ in ps) for k, ps in groups.items()}
def in_other_order(self, groups, values): # each value taken for another's
    return norms(self, groups, values[::-1])

norms, MISTAKES = Telemetry.norms, dict(forgets=forgets, sums=sums, in_other_order=in_other_order)

def compared(rungs, recipe="", model=GPT, steps=3, clip=.05):
    "Pairs of what is measured and what is looked at on the side, role -> norm, of gradients and updates of some steps"
    r = parse_recipe(recipe or "adamw")
    run = r(build(r.shape(CONFIG), rungs, seed=3, model=model))
    stepper, seen = GuardedStepper(run, clip=clip), {}
    t, norm = Telemetry(stepper), stepper.sync.norm
    def look(params, values=None): # the step asks for the norm before it clips
        if values is None: seen.update({n: p.grad.clone() for n, p in run.model.named_parameters()})
        return norm(params, values)
    t.on, stepper.sync.norm, res = True, look, []
    for seed in range(steps):
        before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        stepper(*zip(*(z.split(2) for z in tokens(run, seed))))
        found, roots = values(t), root_of_squares(seen.items())
        moved = root_of_squares((n, p.double() - before[n].double()) for n, p in run.model.named_parameters())
        assert math.hypot(*roots.values())/4 == pytest.approx(stepper.norm.item(), rel=4e-3) and min(moved.values()) > 0
        res += [(of(found, "grad_norm_"), {k: v/4 for k, v in roots.items()}), (of(found, "update_norm_"), moved)]
    return res

def agree(pairs, bar): return all(got == pytest.approx(want, rel=bar) for got, want in pairs)

@pytest.mark.parametrize("rungs, how", [([], {}), ([*FUSED, "fused_adamw"], {}), (["bf16", *FUSED, "bf16_weights"], {}),
    ([*FUSED, "fused_adamw", "direct_update"], {}), ([*FUSED, "adamw8bit"], {}), (FP8, {}), (["bf16", *FUSED], dict(recipe="speedrun")),
    (["flash"], dict(recipe="normuon")), ([], dict(model=UntiedGPT))], ids=str)
def test_norms_are_those_of_what_happened(rungs, how):
    "Gradients as autograd leaves them, a mean over micro-batches and not yet clipped; updates are what the weights have moved by"
    found = compared(rungs, **how)
    assert agree(found, 2e-4)
    assert {*found[0][0]} == {*ROLES.values()} - ({"head"} if how.get("model") is not UntiedGPT else set())

@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_norms_are_found(name, monkeypatch):
    monkeypatch.setattr(Telemetry, "norms", MISTAKES[name])
    try: found = compared(FUSED, steps=1)
    except StopIteration: return
    assert not agree(found, 1e-2)

def test_a_frozen_weight_and_one_without_a_gradient_count_nowhere():
    run = build(CONFIG, [])
    run.model.embed_tokens.weight.requires_grad_(False)
    assert "embed" not in norm_groups(run.model)
    stepper = GuardedStepper(run)
    t, backward = Telemetry(stepper), stepper.backward_pass
    def leaves_out(loss):
        backward(loss)
        for ps in (run.model.layers[0].mlp, run.model.norm): # one of three of a role, and one of many
            for p in ps.parameters(): p.grad = None
    leaves_out.prepare, t.on, stepper.backward_pass = backward.prepare, True, leaves_out
    before = [p.detach().clone() for p in run.model.layers[1].mlp.parameters()] + [p.detach().clone() for p in run.model.layers[2].mlp.parameters()]
    stepper(tokens(run))
    after = [p for i in (1, 2) for p in run.model.layers[i].mlp.parameters()]
    moved = math.sqrt(sum((a.double() - b).square().sum().item() for a, b in zip(after, before)))
    assert values(t)["update_norm_mlp"] == pytest.approx(moved, rel=1e-5)

def no_room(*args, **kw): raise torch.OutOfMemoryError("no room")

@pytest.mark.parametrize("first", [0, 1]) # update that has no room
def test_without_room_for_a_copy_updates_are_not_measured_any_more(monkeypatch, first):
    "Nothing is copied elsewhere, it is said once, and the norms of gradients stay"
    run, said, room = build(CONFIG, FUSED), [], torch.empty_like
    stepper = GuardedStepper(run)
    t = Telemetry(stepper, said.append)
    t.on = True
    for i in range(3):
        with monkeypatch.context() as m:
            if i == first: m.setattr(telemetry.torch, "empty_like", lambda w: no_room() if w.ndim == 2 else room(w))
            elif i > first: m.setattr(Telemetry, "copy_weights", lambda *args: pytest.fail("weights are copied"))
            stepper(tokens(run, i))
    found = values(t) # means over three updates
    assert {*of(found, "grad_norm_")} == {*ROLES.values()} - {"head"} and not of(found, "update_norm_")
    assert len(said) == 1 and "update_norm_" in said[0] and all(math.isfinite(v) for v in found.values())

def test_halves_of_weights_are_not_taken_for_weights():
    "With master weights the lower halves are in the optimizer's state: what the upper ones move by isn't the update"
    for rounding in ("master", "stochastic"):
        run = build(CONFIG, ["bf16", *FUSED, f"bf16_weights:rounding={rounding}"])
        stepper = GuardedStepper(run)
        t = Telemetry(stepper)
        t.on = True
        stepper(tokens(run))
        found = values(t)
        assert of(found, "grad_norm_") and bool(of(found, "update_norm_")) == (rounding != "master")

def test_the_optimizers_phase_has_no_time_of_telemetry(monkeypatch):
    "By a clock that only the optimizer (1 s) and a norm (100 s) and a copy (1,000 s) move on"
    run, now = build(CONFIG, FUSED), [0.]
    stepper = GuardedStepper(run)
    t, clock = Telemetry(stepper), Breakdown("cpu")
    logger = MetricsLogger(None, stepper, World(), run.device, 1, telemetry=t)
    logger.clock = stepper.mark = clock
    clock.now = lambda: now[0]
    def slow(cls, name, seconds):
        f = getattr(cls, name)
        def slowed(*args): now[0] += seconds; return f(*args)
        monkeypatch.setattr(cls, name, slowed)
    slow(GuardedStepper, "apply", 1); slow(Telemetry, "norms", 100); slow(Telemetry, "copy_weights", 1000)
    logger.measure_step(); clock("data")
    stepper(tokens(run)); clock.stop()
    assert clock.read() == dict(ms_data=0, ms_forward=0, ms_backward=0, ms_optimizer=1e3, ms_telemetry=1.2e6)
    logger.clock = stepper.mark = clock # a step that isn't measured
    t.on = False; clock.start(); clock("data"); stepper(tokens(run)); clock.stop()
    assert clock.read() == dict(ms_data=0, ms_forward=0, ms_backward=0, ms_optimizer=1e3)

def test_without_any_gradient_there_is_nothing_to_measure():
    t = Telemetry(GuardedStepper(build(NANO, [])))
    t.on = True
    with t.watch(1): pass
    assert t.read() == {}

# --- training doesn't notice ---

@contextmanager
def unwatched(monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(Telemetry, "__init__", lambda self, *args: self.__dict__.update(read=dict, mfu=lambda tok_s: {}))
        yield

@pytest.mark.parametrize("rungs, recipe", [("naive", "adamw"), ("bf16,flash,fused_ops,chunked_ce,fp8", "adamw"), ("flash", "normuon"),
                                           ("flash,fused_ops,chunked_ce,fused_adamw,direct_update", "adamw"), ("bf16,bf16_weights", "adamw")])
def test_weights_are_the_same_to_the_bit(tmp_path, monkeypatch, rungs, recipe):
    "With steps that are measured, and without any"
    def run(name, **how):
        trainer, _ = train(options(tmp_path, rungs=rungs, recipe=recipe, steps=22, name=name, grad_clip=.1, num_evals=1), progress=False)
        rows = [r for r in trainer.rows() if "loss" in r]
        return {n: p.detach().clone() for n, p in trainer.run.model.named_parameters()}, rows
    measured, copy = [], Telemetry.copy_weights
    monkeypatch.setattr(Telemetry, "copy_weights", lambda *args: measured.append(1) or copy(*args))
    watched, rows = run("watched")
    assert len(measured) == 2 # steps, of one update each
    with unwatched(monkeypatch): plain, plain_rows = run("plain")
    assert all(watched[n].equal(p) for n, p in plain.items()) and watched.keys() == plain.keys()
    assert [r["loss"] for r in rows] == [r["loss"] for r in plain_rows]
    assert [r["step"] for r in rows if "update_norm_mlp" in r] == [10, 20] and not any("update_norm_mlp" in r for r in plain_rows)

def test_a_step_that_is_not_logged_costs_nothing(monkeypatch):
    "No norm is computed, and no weight copied"
    stepper = GuardedStepper(build(NANO, []))
    t = Telemetry(stepper)
    monkeypatch.setattr(Telemetry, "copy_weights", lambda *args: pytest.fail("weights were copied"))
    monkeypatch.setattr(telemetry, "local", lambda *args: pytest.fail("local was called"))
    stepper(torch.randint(300, (2, 2, 32), device=stepper.run.device))
    assert t.read() == {}

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [[*FUSED, "fused_adamw"], ["bf16", *FUSED, "fp8", "cuda_graphs", "fused_adamw", "direct_update"]], ids=str)
def test_a_gpu_is_never_waited_for(rungs):
    "Neither by the step that is measured nor by reading, also where the passes are a CUDA graph; and the numbers are right"
    run = build(NANO, rungs)
    stepper = GuardedStepper(run)
    t, xy = Telemetry(stepper), tokens(run)
    for _ in range(5): stepper(xy)
    t.on = True; stepper(xy); values(t)
    torch.cuda.synchronize()
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    torch.cuda.set_sync_debug_mode("error")
    try: stepper(xy); found = t.read()
    finally: torch.cuda.set_sync_debug_mode("default")
    moved = root_of_squares((n, p.double() - before[n].double()) for n, p in run.model.named_parameters())
    assert of({k: v.item() for k, v in found.items()}, "update_norm_") == pytest.approx(moved, rel=1e-4)

# --- several processes ---

def measured(world, rungs, mistake=None, recipe="adamw", micro=2, steps=2):
    "What some steps measure, a list of dicts"
    run = parse_recipe(recipe)(build(CONFIG, rungs, seed=3, world=world))
    stepper, (i, n) = GuardedStepper(run, clip=.05), world.rank_and_size("dp")
    t, res = Telemetry(stepper), []
    t.on = True
    if mistake == "own shards": stepper.sync.norm = lambda ps, values=None: ParallelStepSync.norm(alone(stepper.sync), ps, values)
    if mistake == "each counted": stepper.sync.norm = lambda ps, values=None: ParallelStepSync.norm(everywhere(stepper.sync), ps, values)
    for seed in range(steps):
        stepper(*zip(*(z.chunk(n)[i].chunk(micro) for z in tokens(run, seed))))
        res.append(values(t))
    return res

def alone(sync): # as if no parameter were sharded
    res = object.__new__(ParallelStepSync)
    res.spread = dict.fromkeys(sync.spread, ())
    return res

def everywhere(sync): # as if each were, also a replicated one
    res = object.__new__(ParallelStepSync)
    groups = max(sync.spread.values(), key=len)
    res.spread = dict.fromkeys(sync.spread, groups)
    return res

LAYOUTS = dict(muon=[*FUSED, "fsdp"], ddp=[*FUSED, "ddp"], fsdp=[*FUSED, "fused_adamw", "direct_update", "fsdp"])
TP = dict(both=[*FUSED, "fsdp", "tensor_parallel"])
WRONG = "own shards", "each counted"

def recipe_of(layout): return "muon" if layout == "muon" else "adamw"

def every(world, layouts):
    res = {k: measured(world, rungs, recipe=recipe_of(k)) for k, rungs in layouts.items()}
    last = [*layouts.values()][-1]
    return res | {k: measured(world, last, mistake=k, steps=1) for k in WRONG}

def check(found, want):
    "All processes have the norms of one; a process that looks at its own shards alone is found, and one that counts what it has twice"
    for res in found:
        for k, steps in res.items():
            right = all(got == pytest.approx(w, rel=2e-3) for got, w in zip(steps, want[recipe_of(k)]))
            assert right == (k not in WRONG), k

@pytest.fixture(scope="module")
def one(): return {recipe: measured(World(), FUSED, recipe=recipe) for recipe in ("adamw", "muon")}

def test_two_processes_measure_what_one_does(one): check(run_distributed(2, every, LAYOUTS), one)

def test_four_processes_measure_what_one_does(one): check(run_distributed(4, every, TP, tp=2), one)

@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_measure_what_one_does(one): check(run_distributed(2, every, LAYOUTS), one)

def measured_without_room(world, rungs): # on the last process
    copy, crowded = Telemetry.copy_weights, SimpleNamespace(clone=no_room)
    if world.rank: Telemetry.copy_weights = lambda t, weights: copy(t, [crowded]) # in a process of its own
    return measured(world, rungs)

def test_one_process_without_room_does_not_leave_the_others_waiting(one):
    first, last = run_distributed(2, measured_without_room, LAYOUTS["fsdp"])
    for mine, without, want in zip(first, last, one["adamw"]):
        moved = of(mine, "update_norm_")
        unknown = {k for k, v in moved.items() if math.isnan(v)}
        assert not of(without, "update_norm_") and {"embed", "attention", "mlp"} <= unknown
        assert all(moved[k] == pytest.approx(want[f"update_norm_{k}"], rel=2e-3) for k in moved.keys() - unknown) # not sharded
        for found in (mine, without): assert of(found, "grad_norm_") == pytest.approx(of(want, "grad_norm_"), rel=2e-3)

# --- other columns ---

def test_tokens_and_mfu(tmp_path, monkeypatch):
    "Tokens of all steps so far; the MFU against the dense BF16 rate of the GPU, attention counted causal"
    real = measure.machine()
    monkeypatch.setattr(measure, "machine", lambda: real | dict(gpu="NVIDIA H100 80GB HBM3"))
    trainer, _ = train(options(tmp_path, steps=20), progress=False)
    rows = [r for r in trainer.rows() if "loss" in r]
    assert [r["tokens"] for r in rows] == [r["step"]*trainer.cfg.step_tokens for r in rows]
    logged, c = [r for r in rows if "train_s" in r], trainer.run.model.config
    per_token = 6*matrix_params(c) + 6*c.layers*c.heads*c.head_dim*c.seq_len
    for r in logged: assert r["mfu"] == pytest.approx(per_token*r["tok_s"]/989.4e12) # the dense BF16 rate of an H100 SXM by its datasheet
    assert len(logged) >= 2

def test_a_cpu_has_no_mfu(tmp_path):
    trainer, _ = train(options(tmp_path, steps=10), progress=False)
    assert measure.datasheet_flops() or not any("mfu" in r for r in trainer.rows())

def test_the_loss_scale(tmp_path):
    "That of the scaler, which begins at 65,536"
    trainer, _ = train(options(tmp_path, rungs="fp16", steps=20), progress=False)
    rows = [r for r in trainer.rows() if "train_s" in r]
    assert rows[-1]["loss_scale"] == trainer.step.scaler.get_scale() and rows[0]["loss_scale"] > 1
    naive, _ = train(options(tmp_path, steps=10, name="b"), progress=False)
    assert not any("loss_scale" in r for r in naive.rows())

def overflows(kind, by):
    "What is counted of 8-bit tensors while those of a kind are suddenly larger: by kind, and how much of its range the step takes"
    s, names = Scaling(2, E5M2, "cpu"), dict(inputs="n1 o hidden", weights="wqkv wdown head", grads="dqkv dm")
    for factor in (1., 1., by):
        with s.in_step(), s.in_pass():
            for k, slots in names.items():
                for slot in slots.split():
                    side = s.backward_max if slot[0] == "d" else s.forward_max
                    for layer in side: layer[SLOT_NAMES.index(slot)] = 3.*(factor if k == kind else 1.)
    ranges = {k: f().item() for k, f in s.counts() if "range" in k}
    with s.in_step(), s.in_pass(): pass
    return {k: f().item() for k, f in s.counts() if "clipped" in k}, ranges

@pytest.mark.parametrize("kind, tensors", [("inputs", 6), ("weights", 6), ("grads", 4)])
def test_clipped_tensors_are_counted_by_kind(kind, tensors):
    clipped, ranges = overflows(kind, 4.)
    assert clipped == {"fp8_clipped": tensors, **{f"fp8_clipped_{k}": tensors*(k == kind) for k in ("inputs", "weights", "grads")}}
    full = dict(inputs=448/464, weights=448/464, grads=57344/61440)
    assert ranges == pytest.approx({f"fp8_range_{k}": v*(4 if k == kind else 1) for k, v in full.items()})
    assert not any(overflows(kind, 1.)[0].values())

def test_rows_of_a_run_in_8_bits(tmp_path):
    trainer, _ = train(options(tmp_path, rungs=",".join(FP8), steps=20), progress=False)
    rows = [r for r in trainer.rows() if "train_s" in r]
    for r in rows:
        assert r["fp8_clipped"] == sum(of(r, "fp8_clipped_").values()) and all(type(v) is int for v in of(r, "fp8_clipped_").values())
        assert {*of(r, "fp8_range_")} == {"inputs", "weights", "grads"}
    assert all(.1 < v < 8 for v in of(rows[0], "fp8_range_").values())
