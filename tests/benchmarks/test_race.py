"The clock of a race with made-up seconds, its options and its folder, before anything runs."
import json, os, textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
import pytest, torch
from helpers.tiny_runs import fails
from llm_speedrun.benchmarks import clock
from llm_speedrun.benchmarks.adapters import BATCHED, RACERS, modded_changes, nanogpt_changes
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.benchmarks.race import Contestant, Race, check_gpus
from llm_speedrun.benchmarks.clock import Job, TimeBudget
from llm_speedrun.cli import speedrun_race

# --- the clock ---

class MadeUp:
    "A clock that is told its seconds"
    gpu = False
    def __init__(self): self.seconds = 0.
    def forget(self): self.seconds = 0.
    def go(self): pass
    halt = go

COSTS = dict(flat=lambda done: .1, falls=lambda done: .1*(3 - 2*min(1, done/.4)), rises=lambda done: .1*(1 + (done > .7)))

def run(evals, cost, seconds=60.): # evaluations, a name in `COSTS`, of the clock
    "A run whose steps cost what the share of the run says that is done: its `TimeBudget`, and the numbers of steps that it was told in turn"
    plans = []
    budget = TimeBudget(Job("a", "ours", "", seconds=seconds, evals=evals), 64, lambda: dict(loss=1.), plan=plans.append)
    budget.clock = MadeUp()
    for i in budget.steps(): budget.clock.seconds += COSTS[cost](i/(plans[-1] if plans else seconds/.1))
    return budget, plans

@pytest.mark.parametrize("seconds", [6., 60.])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("evals", [1, 2, 3, 4])
def test_few_evaluations_meet_the_clock(evals, cost, seconds):
    "As many evaluations as asked for, at even distances, the last one after the last step and within 2 % of the clock"
    budget, plans = run(evals, cost, seconds)
    steps = [m["step"] for m in budget.marks]
    assert len(steps) == evals and steps == sorted(set(steps)) and steps[-1] == plans[-1]
    assert budget.marks[-1]["seconds"] == pytest.approx(seconds, rel=.02)
    if cost == "flat": assert all(abs(s - clock.WARM - k*plans[-1]/evals) < clock.GAUGE + clock.WARM for k, s in enumerate(steps, 1))

# What five and more evaluations gave when the races of nbs/site/measurements/races were recorded: steps at the evaluations, and plans
RECORDED = {
    ("falls", 5): ([53, 107, 193, 326, 495], [205, 271, 365, 460, 495, 495]),
    ("falls", 6): ([46, 89, 149, 240, 362, 492], [205, 261, 332, 424, 484, 492, 492]),
    ("falls", 8): ([38, 68, 106, 156, 224, 309, 398, 487], [205, 251, 296, 359, 431, 480, 487, 487, 487]),
    ("falls", 10): ([34, 57, 84, 118, 160, 215, 280, 347, 415, 484], [205, 246, 280, 323, 375, 437, 476, 483, 484, 484, 484]),
    ("rises", 5): ([132, 249, 366, 483, 519], [600, 600, 600, 600, 519, 519]),
    ("rises", 6): ([112, 209, 306, 404, 502, 511], [600, 600, 600, 600, 600, 511, 511]),
    ("rises", 8): ([88, 161, 234, 307, 380, 453, 493, 510], [600, 600, 600, 600, 600, 600, 533, 510, 510]),
    ("rises", 10): ([73, 131, 189, 247, 305, 364, 423, 479, 494, 510], [600, 600, 600, 600, 600, 600, 600, 592, 510, 510, 510])}

@pytest.mark.parametrize("cost, evals", RECORDED)
def test_what_was_raced_stays(cost, evals):
    budget, plans = run(evals, cost)
    assert ([m["step"] for m in budget.marks], plans) == RECORDED[cost, evals]

@pytest.mark.parametrize("evals", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("steps", range(15, 60, 3))
def test_few_steps(evals, steps):
    "Each evaluation has a step of its own, or the race says at once that there are too few"
    try: budget, plans = run(evals, "flat", steps*.1)
    except RunError as e: assert "too few to race" in str(e) and steps < clock.WARM + clock.GAUGE + 2*evals; return
    assert len({m["step"] for m in budget.marks}) == evals and abs(plans[-1] - steps) <= 1

def test_race_fails_early_when_time_is_too_short(monkeypatch):
    "On a CPU from the second step on; on a GPU the first ones may compile, and the clock begins after them"
    for gpu, most in ((False, 3), (True, clock.WARM + 2)):
        now = iter(range(100))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(now)))
        budget = clock.TimeBudget(clock.Job("a", "ours", "", seconds=1.5, evals=1), 1, lambda: dict(loss=1.))
        budget.clock = MadeUp(); budget.clock.gpu = gpu
        with fails(RunError, "time for . steps of 1 tokens, too few to race"):
            for i in budget.steps(): pass
        assert i + 1 == most, (gpu, i)

def test_a_machine_that_stops_is_not_waited_for(monkeypatch):
    "Steps that suddenly take the whole clock: one for each evaluation that is due, none for the looks between"
    monkeypatch.setitem(COSTS, "stops", lambda done: .1 if done < .5 else 100.)
    budget, plans = run(2, "stops")
    assert len(budget.marks) == 2 and plans[-1] < .5*plans[0] + 65

# --- the folder ---

FIELD = [Contestant("a", "ours", ("--recipe", "muon")), Contestant("b", "ours", ("--recipe", "adamw"))]

@pytest.fixture
def there(tmp_path): return Race(tmp_path/"race", FIELD, dict(data="stdlib", seq=64), 60*.05, 1, 0, 12*.05, 10)

def ended(r, name, seconds, clock=3.): # a `Race`, a run's name
    "Put the result of a run there, as short as can be"
    (r.folder/name).mkdir(parents=True)
    (r.folder/name/"result.json").write_text(json.dumps(dict(
        loss=3., bpb=1., seconds=seconds, clock=clock, step=20, tokens=640, epochs=.1, tok_s=9., matrices=1, tables=1, peak_gib=None,
        joules=None, lr=1., wd=1., evaluated=64, gpu="CPU", marks=[dict(step=20, tokens=640, seconds=seconds, loss=3.)])))

def test_who_missed_the_clock_is_named(there):
    "Too early and too late; what is within 5 % is not, nor what hasn't run"
    ended(there, "a/seed-0", 2.8); ended(there, "b/seed-0", 3.1)
    assert "a/seed-0 missed its clock: it trained for 2.8 s in place of 3 s, in 20 steps\n" in there.text() and "b/seed-0" not in there.text()
    there.seeds = 2
    ended(there, "a/seed-1", 2.9); ended(there, "b/seed-1", 3.2)
    assert "b/seed-1 missed its clock: it trained for 3.2 s" in there.text() and "a/seed-1" not in there.text()

def test_short_runs_that_missed_the_clock_are_named(there):
    there.tune = 1
    ended(there, "a/tune-0", .5, .6); ended(there, "a/seed-0", 3.)
    assert "a/tune-0 missed its clock: it trained for 0.5 s in place of 0.6 s" in there.text()

@pytest.mark.parametrize("change, message", [
    (dict(seconds=60*.06, tune_seconds=12*.06), "with minutes 0.05, and 0.06 was given: choose another --out"),
    (dict(tune_seconds=6.), "with tune_minutes 0.01, and 0.1 was given"), (dict(evals=3), "with evals 10, and 3 was given"),
    (dict(common=dict(data="stdlib", seq=32)), "with seq 64, and 32 was given")], ids=str)
def test_another_race_in_the_folder(there, change, message):
    "It is said in what the options differ, in the command's own words and units"
    there.folder.mkdir(); there.record_options(); there.record_options()
    with fails(InputError, f"race holds another race, {message}"): replace(there, **change).record_options()

# --- GPUs ---

@pytest.mark.parametrize("have, asked", [(0, 1), (1, 1), (2, 1), (2, 2), (8, 3)])
def test_gpus_that_are_there(monkeypatch, have, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: have)
    check_gpus(asked)

@pytest.mark.parametrize("have, asked, advice", [(0, 2, "leave it out"), (1, 2, "leave it out"), (2, 3, "choose --gpus 2")])
def test_too_few_gpus(monkeypatch, tmp_path, capsys, have, asked, advice):
    "One line, and no folder"
    monkeypatch.chdir(tmp_path); monkeypatch.setattr(torch.cuda, "device_count", lambda: have)
    with pytest.raises(SystemExit) as e: speedrun_race(["--run", "a: --recipe muon", f"--gpus={asked}", "--minutes=.1"])
    assert (e.value.code, capsys.readouterr().err) == (2, f"error: gpus is {asked}, and this machine has {have}: {advice}\n")
    assert not [*tmp_path.iterdir()]

# --- programs of others ---

def loop_of(text, muon_update): # the lines of track 3's optimizer, in a function of parameters and group
    code = "def step(self, params, group, world_size=1, rank=0):\n" + textwrap.indent(textwrap.dedent(text), "    ")
    names = dict(torch=torch, muon_update=muon_update, dist=SimpleNamespace(all_gather=lambda *a: None))
    exec(code, names)
    return names["step"]

def test_modded_in_stacks_is_the_loop():
    "The changed lines of its optimizer give the same weights as its own, for matrices of three shapes, over several steps"
    def muon_update(grad, momentum, mu): # its formula up to the iterations, which take stacks and single matrices alike
        momentum.lerp_(grad, 1 - mu)
        update = grad.lerp_(momentum, mu)
        update = (update.double()/update.double().norm(dim=(-2, -1), keepdim=True)).float()
        return update*max(1, grad.size(-2)/grad.size(-1))**.5
    own, = (k for k in BATCHED if "params_pad" in k)
    weights = []
    for text in (own, BATCHED[own]):
        torch.manual_seed(0)
        params = [torch.randn(s) for s in ((8, 8), (32, 8), (8, 32), (8, 8), (32, 8))]
        state = SimpleNamespace(state=defaultdict(dict))
        for _ in range(3):
            for p in params: p.grad = torch.randn_like(p)
            loop_of(text, muon_update)(state, params, dict(lr=.1, weight_decay=.2, mu=.9))
        weights.append(params)
    for a, b in zip(*weights): torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

def test_batches_of_all_are_ours():
    "Each program's loader is among its changes, and each kind of modded-nanogpt and nanochat can be asked for"
    like = SimpleNamespace(corpus=SimpleNamespace(vocab=500), layers=1, width=128, batch=1024, lr=1., wd=1., seq=64)
    for changes in (nanogpt_changes(0), modded_changes(like, 4)): assert sum("race_batches" in new for new in changes.values()) == 1
    assert {"modded_batched", "nanochat_scaled"} <= {*RACERS} and RACERS["modded_batched"].batched and not RACERS["modded"].batched
    assert RACERS["nanochat_scaled"].scaled and not RACERS["nanochat"].scaled

@pytest.mark.cuda
def test_positions_of_the_fastest_list(tmp_path):
    "Beginnings of rows go through the kernels of `fastest`, too: the blocks' mean is the loss"
    out = tmp_path/"race"
    speedrun_race(["--data", "stdlib", "--minutes", ".3", "--seq_len", "1024", "--num_evals", "2", "--out", str(out), "--run", "a: --recipe speedrun --rungs fastest"])
    r, = json.loads((out/"race.json").read_text())["results"]["a"]
    assert r["precision"] == "fp8" and len(r["positions"]) == 4
    if r["evaluated"] <= 512*1024: assert sum(r["positions"])/4 == pytest.approx(r["loss"], abs=2e-3)

@pytest.mark.cuda
@pytest.mark.skipif("RACE_CLONES" not in os.environ, reason="needs RACE_CLONES, a folder with modded-nanogpt")
def test_modded_in_stacks_trains(tmp_path):
    "Its script with the changes, on a GPU: it races and learns"
    out = tmp_path/"race"
    speedrun_race(["--data", "stdlib", "--minutes", ".5", "--num_evals", "2", "--out", str(out), "--peer", f"modded_batched={os.environ['RACE_CLONES']}/modded-nanogpt:batch=32768"])
    first, last = json.loads((out/"race.json").read_text())["results"]["modded_batched"][0]["marks"]
    assert last["loss"] < first["loss"] < 8
