"How often to evaluate and to save, in steps; runs that end early; spikes that are skipped; scores during training."
import json, os, re, signal
from dataclasses import replace
import numpy as np, pytest, torch
from safetensors.torch import load_file
from llm_speedrun.cli import speedrun_train
from llm_speedrun.checkpoint.format import checkpoints, step_of_name
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.distributed.world import World
from llm_speedrun.io_utils import AllFailed, InputError
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.spikes import SpikeGuard, make_stepper, with_spike_guard
from llm_speedrun.runs import build
from llm_speedrun.stepper import Stepper
from llm_speedrun.tools.doctor import check_run
from llm_speedrun.tools.evals import evaluate, our_lm
from llm_speedrun.tools.scores import Scores, asked_scores, train_callbacks
from llm_speedrun.train.config import TrainConfig, parse_options
from llm_speedrun.train.presets import presets
from llm_speedrun.train.run_dir import Finished
from llm_speedrun.train.train_step import TrainStep
from llm_speedrun.train.trainer import Trainer, train
from helpers import quick_programs
from helpers.timeouts import TIMEOUT
from helpers.tiny_runs import NANO, fails, nano, options, texts, words, write_bins
from test_resume import state, stop_at
from test_trainer import COMMAND, curve, posix, rows

def go(folder, **kw): return train(options(folder, **kw), progress=False)
def resume(folder, step="", **kw): return train(TrainConfig(resume=f"{folder/'runs/run'}{step}", **kw), progress=False, given={*kw, "resume"})
def evaluated(run): return [r["step"] for r in rows(run) if "val_loss" in r]
def kept(run): return [step_of_name(c) for c in checkpoints(run/"checkpoints")]
def same(a, b):
    "Whether two runs end with the same weights"
    a, b = (load_file(r/"model.safetensors") for r in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

# How often

def test_steps_and_parts(tmp_path):
    "The same syntax for all three, in a file too: whole steps, or a part of the run"
    (tmp_path/"run.toml").write_text("eval_every = 5\nsave_every = '25%'\nwarmup = 3\n")
    c, given = parse_options(TrainConfig, "speedrun_train", ["--config", str(tmp_path/"run.toml"), "--steps", "12"])
    assert given == {"eval_every", "save_every", "warmup", "steps"}
    trainer, _ = go(tmp_path, **{k: getattr(c, k) for k in given}, keep_last=9, schedule="cosine", lr=1e-3)
    run = tmp_path/"runs/run"
    assert evaluated(run) == [5, 10, 12] and kept(run) == [3, 6, 9, 12] and trainer.plan.warmup == 3
    rates = [r["lr"] for r in rows(run) if "lr" in r]
    assert rates[2] == max(rates) == pytest.approx(3*rates[0])

def test_a_part_is_what_the_number_of_steps_is(tmp_path):
    runs = [go(tmp_path, name=str(i), steps=20, lr=1e-3, **kw)[0].folder for i, kw in enumerate([dict(warmup=.1, num_evals=4), dict(warmup=2, eval_every=5), dict(warmup="10%", eval_every=.25)])]
    assert same(*runs[:2]) and same(*runs[1:]) and [evaluated(r) for r in runs] == [[5, 10, 15, 20]]*3

def test_time_is_no_reason_where_steps_are(tmp_path):
    "Saved each so many steps, no checkpoint is due in between; and a resumed run may change its mind"
    go(tmp_path, steps=6, save_every=4, keep_last=9, num_evals=1, schedule="cosine") # which keeps none before a decay
    run = tmp_path/"runs/run"
    assert kept(run) == [4, 6]
    resume(tmp_path, steps=9, save_minutes=0.)
    assert kept(run) == [4, 6, 7, 8, 9] and json.loads((run/"config.json").read_text())["save_every"] is None
    resume(tmp_path, steps=12, save_every=5)
    assert kept(run) == [4, 6, 7, 8, 9, 10, 12]

def test_evaluations_of_a_resumed_run(tmp_path):
    "They stay at their steps; a branch may have others, and its evaluations are those it was given"
    go(tmp_path, steps=6, eval_every=2, keep_every=4)
    with fails(InputError, "keeps its options: leave out eval_every"): resume(tmp_path, steps=8, eval_every=3)
    resume(tmp_path, steps=9)
    assert evaluated(tmp_path/"runs/run") == [2, 4, 6, 8, 9]
    branch, _ = resume(tmp_path, "@4", steps=12, num_evals=4)
    assert evaluated(branch.folder) == [6, 9, 12] and branch.cfg.eval_every is None
    config = tmp_path/"runs/run/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(eval_every=3)))
    with fails(InputError, "doesn't fit", "eval_every is 3.0 and was 2.0"): resume(tmp_path, steps=12)

def test_a_run_of_before_these_options_goes_on(tmp_path, monkeypatch):
    "Its config.json doesn't have them"
    go(tmp_path, steps=4)
    config = tmp_path/"runs/run/config.json"
    old = {k: v for k, v in json.loads(config.read_text()).items() if k not in ("eval_every", "save_every", "patience", "skip_spikes", "score", "score_every")}
    config.write_text(json.dumps(old))
    assert resume(tmp_path, steps=6)[1]["steps"] == 6

@pytest.mark.parametrize("kw, said", [
    (dict(eval_every=21), "eval_every 21 is longer than the run, which has 20 steps"), (dict(save_every=5000), "save_every 5000 is longer"), (dict(warmup=21), "warmup of 21 steps is longer"),
    (dict(score_every=2), "score_every has no effect without score"), (dict(patience=10, num_evals=10), "which has 9 evaluations before its last step")], ids=str)
def test_what_could_never_happen(tmp_path, kw, said):
    "An interval that is longer than the run, and what has no effect, are errors; a resumed run may be shorter than its intervals were"
    with fails(InputError, said): Trainer(options(tmp_path, steps=20, **kw), progress=False)

def test_a_shorter_run_goes_on(tmp_path):
    "With the intervals that it had, which it can't change: only what is given now is checked"
    go(tmp_path, steps=4, eval_every=4, patience=0)
    config = tmp_path/"runs/run/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(save_every=900)))
    assert resume(tmp_path, steps=6)[1]["steps"] == 6
    with fails(InputError, "save_every 900 is longer"): resume(tmp_path, steps=8, save_every=900.)

# Early stopping

LOSSES = [5., 4., 4.5, 4.2, 4.1, 3.9, 3.95, 3.92, 3.99, 3.]

@pytest.fixture
def judged(monkeypatch):
    "Each second step is evaluated, with losses that are known"
    monkeypatch.setattr(Trainer, "evaluate", lambda self: LOSSES[self.done//2 - 1])

def test_patience(tmp_path, judged, capsys):
    "Ends after the third evaluation without a lower loss, as a finished run that says why"
    trainer, res = train(options(tmp_path, steps=40, eval_every=2, patience=3))
    run = tmp_path/"runs/run"
    assert (res["steps"], res["stalled"], res["interrupted"], res["reached"]) == (10, 3, False, False)
    assert "ended early: 3 evaluations without a lower validation loss (--patience), after step 10" in capsys.readouterr().out
    assert json.loads((run/"result.json").read_text())["stalled"] == 3 and load_file(run/"model.safetensors") and kept(run)[-1] == 10
    page = (run/"report.html").read_text(encoding="utf-8")
    assert "finished early: 3 evaluations without a lower loss" in page and "ended early: 3 evaluations" in page
    with fails(Finished, "has ended at step 10, after 3 evaluations without a lower loss: choose a larger --patience"): resume(tmp_path)
    with fails(Finished, "larger --patience"): resume(tmp_path, patience=2)
    _, res = resume(tmp_path, patience=4, steps=18) # the lower loss at 12 begins a new count, which is 3 at 18
    assert (res["steps"], res["stalled"]) == (18, 0) and not any("event" in r for r in rows(run))
    assert evaluated(run) == [*range(2, 19, 2)]

def test_the_best_weights_are_kept(tmp_path, judged, capsys):
    "With patience each new best is saved, however recent the last checkpoint is, and the end names it"
    train(options(tmp_path, steps=10, eval_every=2, patience=4))
    run = tmp_path/"runs/run"
    assert kept(run) == [4, 10] and f"the best checkpoint, with the lowest validation loss: {run/'checkpoints/step-00000004'}" in re.sub(r"\n(?=\S)", "", capsys.readouterr().out)

def test_patience_counts_on(tmp_path, judged):
    "The evaluations before a stop count; without patience the run goes to its end, with the same bits"
    whole, _ = go(tmp_path/"whole", steps=20, eval_every=2)
    go(tmp_path, steps=20, eval_every=2, patience=1)
    assert evaluated(tmp_path/"runs/run") == [2, 4, 6]
    _, res = resume(tmp_path, patience=2)
    assert (res["steps"], res["stalled"]) == (8, 2)
    again, res = resume(tmp_path, patience=0)
    assert (res["steps"], res["stalled"]) == (20, 0) and curve(again) == curve(whole) and same(again.folder, whole.folder)

def test_patience_at_the_end(tmp_path, judged):
    "A run that has taken its steps has not ended early, and one that falls never does"
    _, res = go(tmp_path, steps=10, eval_every=2, patience=3)
    assert (res["steps"], res["stalled"]) == (10, 0)
    _, res = go(tmp_path, name="falls", steps=4, eval_every=2, patience=1)
    assert (res["steps"], res["stalled"]) == (4, 0)

@posix
def test_an_interrupted_run_has_not_run_out_of_patience(tmp_path, judged, monkeypatch):
    "Its last evaluation is none of those that count, and is no better: the run is interrupted, and goes on"
    with monkeypatch.context() as m:
        stop_at(m, 3)
        _, res = go(tmp_path, steps=20, eval_every=2, patience=1)
    assert (res["steps"], res["stalled"], res["interrupted"]) == (3, 0, True)
    assert resume(tmp_path)[1]["steps"] == 6

# Spikes

SPIKE = 29 # the step that is one, from 0

def small_window(m, size=16): m.setattr(SpikeGuard.__init__, "__defaults__", (World(), size))

@pytest.fixture
def spiky(monkeypatch):
    "Steps whose losses are a thousand times what they are; the guard has a small window"
    steps, now, take, backward = {SPIKE}, [0], TrainStep.__call__, Stepper.forward_backward
    monkeypatch.setattr(TrainStep, "__call__", lambda self, step, x, y: (now.append(step), take(self, step, x, y))[1])
    monkeypatch.setattr(Stepper, "forward_backward", lambda self, x, y, weight=1.: backward(self, x, y, weight*(1e3 if now[-1] in steps else 1.)))
    small_window(monkeypatch)
    return steps

HOW = dict(steps=40, recipe="adamw", lr=1e-3, schedule="constant", num_evals=2)

@pytest.mark.parametrize("micro", [4, 2])
def test_a_spike(tmp_path, spiky, capsys, micro):
    "It is skipped, and said in the console, the log, the result and the report; without a guard it is taken; steps before it are the same"
    guarded, res = train(options(tmp_path, skip_spikes=6., micro_batch_size=micro, step_tokens=64, **HOW))
    line = f"step {SPIKE + 1} skipped: a spike of the loss or of the gradients (--skip_spikes): loss "
    assert line in capsys.readouterr().out and res["spikes"] == 1
    run = tmp_path/"runs/run"
    assert [(r["step"], r["event"]) for r in rows(run) if "event" in r] == [(SPIKE + 1, line.partition(" ")[2].partition(" ")[2].removesuffix(": loss "))]
    row = next(r for r in rows(run) if "event" in r)
    assert row["loss"] > 1e3 and row["grad_norm"] > 100 # what it was
    assert json.loads((run/"result.json").read_text())["spikes"] == 1 and [r["spikes"] for r in rows(run) if "spikes" in r][-1] == 1
    page = (run/"report.html").read_text(encoding="utf-8")
    assert "Updates that were skipped as spikes: 1." in page and "updates over 6 standard deviations above the last ones skipped" in page
    plain, _ = go(tmp_path, name="plain", micro_batch_size=micro, step_tokens=64, **HOW)
    assert curve(guarded)[:SPIKE + 1] == curve(plain)[:SPIKE + 1] and curve(guarded)[SPIKE + 1:] != curve(plain)[SPIKE + 1:]
    assert "spikes" not in json.loads((plain.folder/"result.json").read_text())

def test_a_guard_that_finds_nothing_changes_nothing(tmp_path, spiky):
    spiky.clear()
    runs = [go(tmp_path, name=str(s), skip_spikes=s, **HOW) for s in (6., None, 0.)]
    assert same(runs[0][0].folder, runs[1][0].folder) and same(runs[1][0].folder, runs[2][0].folder) and curve(runs[0][0]) == curve(runs[1][0])
    assert runs[0][1]["spikes"] == 0 and "spikes" not in runs[1][1]

@posix
@pytest.mark.parametrize("more", [dict(), dict(recipe="normuon"), dict(rungs="fused_adamw", ema_decay=.9)], ids=str)
def test_the_same_bits_with_a_guard(tmp_path, monkeypatch, spiky, more):
    "Stopped in the middle of a window, before a spike that is one only by what was before the stop"
    how = HOW | dict(steps=20, skip_spikes=6.) | more
    spiky.clear(); spiky.add(14)
    whole, res = go(tmp_path/"whole", **how)
    assert res["spikes"] == 1
    with monkeypatch.context() as m:
        stop_at(m, 12)
        _, half = go(tmp_path, **how)
    assert half["interrupted"] and half["steps"] == 12 and half["spikes"] == 0
    rest, end = resume(tmp_path)
    assert end["spikes"] == 1 and end["val_loss"] == res["val_loss"] and curve(rest) == curve(whole)
    want, got = state(whole), state(rest)
    assert set(want) == set(got) and any("skip_spikes" in k for k in want)
    for k in want: assert torch.equal(want[k], got[k]), k

@posix
def test_a_spike_before_the_stop(tmp_path, monkeypatch, spiky):
    "It stays counted, and its row is the only one with an event"
    spiky.clear(); spiky.add(9)
    with monkeypatch.context() as m:
        stop_at(m, 12)
        go(tmp_path, skip_spikes=6., **HOW | dict(steps=20))
    _, end = resume(tmp_path)
    assert end["spikes"] == 1 and [r["step"] for r in rows(tmp_path/"runs/run") if "event" in r] == [10]

def test_a_branch_with_a_guard(tmp_path, spiky, capsys):
    "A run that was spoilt goes on from before, with a guard; a run that goes on keeps what it has"
    go(tmp_path, keep_every=20, **HOW)
    with fails(InputError, "leave out skip_spikes"): resume(tmp_path, steps=50, skip_spikes=6.)
    branch, res = resume(tmp_path, "@20", skip_spikes=6.)
    assert res["spikes"] == 1 and branch.cfg.skip_spikes == 6

def test_no_spike_where_losses_are_not_finite(tmp_path, spiky, monkeypatch):
    "Five of these in a row still end a run, with a guard as without"
    backward = Stepper.forward_backward
    monkeypatch.setattr(Stepper, "forward_backward", lambda self, x, y, weight=1.: backward(self, x, y, weight*(torch.nan if len(curves) else 1.)))
    curves, taken = [], TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda self, step, x, y: (curves.append(1) if step == 20 else None, taken(self, step, x, y))[1])
    with fails(AllFailed, "5 steps in a row, the last of them step 25"): go(tmp_path, skip_spikes=6., **HOW)

def test_several_updates_in_a_step(tmp_path, monkeypatch, capsys):
    "A recipe's updates are judged one by one: of four in a step one is skipped, and the step has an event"
    small_window(monkeypatch)
    calls, backward = [], Stepper.forward_backward
    monkeypatch.setattr(Stepper, "forward_backward", lambda self, x, y, weight=1.: (calls.append(1), backward(self, x, y, weight*(1e3 if len(calls) == 42 else 1.)))[1])
    monkeypatch.setattr(Trainer, "run_loop", lambda self, loop=Trainer.run_loop: (calls.clear(), loop(self))[1])
    trainer, res = train(options(tmp_path, recipe="speedrun:pieces=1:updates=4:windows=8+0", steps=20, micro_batch_size=1, step_tokens=64, skip_spikes=6., num_evals=1))
    said = "skipped: a spike of the loss or of the gradients (--skip_spikes)"
    assert res["spikes"] == 1 and [(r["step"], r["event"]) for r in trainer.rows() if "event" in r] == [(11, f"1 of 4 updates {said}")]
    assert re.search(re.escape(f"1 of 4 updates of step 11 {said}") + r"\s*$", capsys.readouterr().out, re.M) # 3 were taken: the mean isn't the loss of a spike

def stepped(world, rungs, batches, spike, sigmas):
    "Weights, losses and spikes of a run of some updates, of which this process has its part; `spike` is an update and a process whose loss is huge"
    from llm_speedrun.recipes import spikes
    spikes.SpikeGuard.__init__.__defaults__ = world, 16
    run = spikes.with_spike_guard(build(NANO, rungs, device="cpu", world=world, seed=1), sigmas[world.rank])
    step, loss, now = spikes.make_stepper(run), run.loss, [0]
    step.run = replace(run, loss=lambda *args: loss(*args)*(1e3 if spike == (now[0], world.rank) else 1.))
    losses = []
    for now[0], x in enumerate(batches):
        own = x.unflatten(0, (world.size, -1))[world.rank]
        losses.append(step((own, own)).item())
    weights = {n: getattr(p.detach(), "full_tensor", p.detach)().clone().numpy() for n, p in run.model.named_parameters()}
    return weights, losses, step.spikes.item()

@pytest.mark.parametrize("rungs", [["ddp"], ["fsdp"]], ids=str)
@pytest.mark.parametrize("sigmas", [(6., 6.), (1e9, 6.)], ids=["alike", "one sees it"])
def test_two_processes(rungs, sigmas):
    "One has a spike, or one alone notices: both skip it, and end as one process does that never saw it"
    g = torch.Generator().manual_seed(0)
    batches = [*torch.randint(40, (24, 4, 16), generator=g).unbind()]
    many = run_distributed(2, stepped, rungs, batches, (20, 1), sigmas)
    alone = stepped(World(), [], batches[:20] + batches[21:], None, [6.])
    assert [m[2] for m in many] == [1, 1] and alone[2] == 0 and many[0][1] == many[1][1]
    losses = many[0][1]
    assert losses[20] > 1e3 and losses[:20] + losses[21:] == pytest.approx(alone[1], abs=1e-5)
    for k, w in alone[0].items():
        assert np.array_equal(many[0][0][k], many[1][0][k]) and np.allclose(many[0][0][k], w, atol=1e-5), k

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", ["safe", "fastest16", "fastest"])
def test_a_guard_does_not_wait(rungs):
    "On a GPU the decision is made there: no step with a guard waits for it, and a spike is skipped by each list's optimizer"
    run = with_spike_guard(build(workload("tiny"), presets()[rungs], device="cuda"), 6.)
    step = make_stepper(run)
    step.guard.window = step.guard.window[:, :16].clone()
    x = torch.randint(8, (4, 64), device="cuda")
    for _ in range(60): step((x, x)) # captures graphs, compiles; its loss falls to a level
    torch.cuda.synchronize(); torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8): step((x, x))
    finally: torch.cuda.set_sync_debug_mode("default")
    was = [p.detach().clone() for p in step.params]
    y = torch.randint(8, 1000, (4, 64), device="cuda")
    step((y, y))
    assert step.spikes.item() == 1 and all(map(torch.equal, was, step.params))
    step((x, x))
    assert step.spikes.item() == 1 and not all(map(torch.equal, was, step.params))

# Scores

@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    "A test, a text, and what `--score` is then"
    folder = tmp_path_factory.mktemp("asked")
    answers = lambda i: dict(text=[f"{2*i}", f"{2*i + 1}", "many"], label=["A", "B", "C"])
    (folder/"arc.jsonl").write_text("".join(json.dumps(dict(question=f"{i} times 2", choices=answers(i), answerKey="A")) + "\n" for i in range(5)))
    (folder/"sums.txt").write_text("".join(f"{i} times 2 is not {3*i}.\n" for i in range(20)))
    return f"arc_easy={folder/'arc.jsonl'},{folder/'sums.txt'}"

KEYS = ["score_arc_easy_acc", "score_arc_easy_acc_norm", "score_sums_bits_per_byte"]
def scored(run): return {r["step"]: [r[k] for k in KEYS] for r in rows(run) if KEYS[0] in r}
def on_text(folder, **kw): return options(folder, **dict(data=str(texts(folder/"texts")), steps=8, num_evals=10, eval_every=2, seq_len=32, recipe="adamw", lr=1e-3) | kw)
def with_scores(folder, **kw): return train(on_text(folder, **kw), progress=False, callbacks=train_callbacks())

@pytest.mark.parametrize("more", [dict(), dict(ema_decay=.9), dict(rungs="bf16,flash,fused_ops,chunked_ce,fp8")], ids=str)
def test_scores_change_no_bit(tmp_path, asked, more):
    "Weights, losses, evaluations, samples are those of a run without scores; these are those of the weights that are saved"
    plain, p = with_scores(tmp_path, name="plain", num_samples=2, **more)
    trainer, res = with_scores(tmp_path, score=asked, num_samples=2, **more)
    assert same(trainer.folder, plain.folder) and curve(trainer) == curve(plain) and res["val_loss"] == p["val_loss"] and res["sample"] == p["sample"]
    assert [*scored(trainer.folder)] == [2, 4, 6, 8] and not scored(plain.folder) and "scores" in json.loads((trainer.folder/"result.json").read_text())["parts"]
    if "rungs" in more: return # which compute in other formats
    tasks, docs = asked_scores(asked)
    (arc, text) = evaluate(our_lm(trainer.folder), tasks.values(), docs.values())
    assert scored(trainer.folder)[8] == pytest.approx([*arc["scores"].values(), text["scores"]["bits_per_byte"]], rel=1e-5)

def test_scores_in_the_report_and_the_console(tmp_path, asked, capsys):
    speedrun_train(words(on_text(tmp_path, score=asked, score_every=3)))
    run = tmp_path/"runs/run"
    assert [*scored(run)] == [6, 8] and capsys.readouterr().out.count("sums_bits_per_byte") == 2
    page = (run/"report.html").read_text(encoding="utf-8")
    assert "Scores during training" in page and "sums bits per byte" in page and "arc easy acc norm" in page

def test_a_step_is_scored_once(tmp_path, asked):
    "Also where a run goes on from the step of its last score"
    with_scores(tmp_path, score=asked, steps=4)
    run = tmp_path/"runs/run"
    train(TrainConfig(resume=str(run), steps=8), progress=False, callbacks=train_callbacks())
    assert [r["step"] for r in rows(run) if KEYS[0] in r] == [2, 4, 6, 8]

@posix
@pytest.mark.parametrize("calls", [3, 4])
def test_scores_of_a_resumed_run(tmp_path, asked, monkeypatch, calls):
    "Stopped in a step, or in the scoring itself: the log has each score once, as without a stop"
    whole, _ = with_scores(tmp_path/"whole", score=asked)
    with monkeypatch.context() as m:
        if calls == 3: stop_at(m, 3)
        else:
            m.setattr(Scores, "evaluate", lambda self, lm, evaluate=Scores.evaluate, n=[]: (n.append(1), len(n) == 2 and os.kill(os.getpid(), signal.SIGINT), evaluate(self, lm))[2])
        _, half = with_scores(tmp_path, score=asked)
    assert half["interrupted"]
    rest, _ = train(TrainConfig(resume=str(tmp_path/"runs/run")), progress=False, callbacks=train_callbacks())
    assert scored(rest.folder) == scored(whole.folder) and curve(rest) == curve(whole)
    assert [r["step"] for r in rows(rest.folder) if KEYS[0] in r] == [2, 4, 6, 8]

def test_what_cannot_be_scored(tmp_path, asked):
    "Before the run has a folder"
    for kw, said in ((dict(score="hellaswag"), "hellaswag=FILE"), (dict(score=str(tmp_path/"nowhere")), "nowhere"), (dict(score=asked, data=str(write_bins(tmp_path/"bins"))), "no tokenizer")):
        with fails((InputError, OSError), said): with_scores(tmp_path, **kw)
        assert not (tmp_path/"runs/run").exists()
    with fails(InputError, "score needs a callback that scores"): train(on_text(tmp_path, score=asked), progress=False)
    long = tmp_path/"long.jsonl"
    long.write_text(json.dumps(dict(question="a", choices=dict(text=["b "*200, "c"], label=["A", "B"]), answerKey="A")))
    with fails(InputError, "long.jsonl line 1: an ending has .* tokens, and this model reads 32"): with_scores(tmp_path, score=f"arc_easy={long}")
    assert not (tmp_path/"runs/run").exists()
    found = [f for f in check_run(on_text(tmp_path, score=asked)) if f.level == "problem"]
    assert not found

def test_memory_that_does_not_suffice_for_scores(tmp_path, asked, monkeypatch, capsys):
    "The run goes on without"
    def crowded(self, lm): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(Scores, "evaluate", crowded)
    trainer, res = train(on_text(tmp_path, score=asked), callbacks=train_callbacks())
    assert res["steps"] == 8 and not scored(trainer.folder) and "no scores: the GPU's memory" in capsys.readouterr().out

@posix
@pytest.mark.parametrize("rungs", ["ddp", "fsdp"])
def test_scores_of_two_processes(tmp_path, asked, rungs):
    "As those of one, and the losses too"
    c = on_text(tmp_path, score=asked, vocab=300, rungs=rungs, gpus=2, micro_batch_size=2, model="tiny", lr=1e-3)
    one, _ = with_scores(tmp_path, name="one", score=asked, vocab=300, model="tiny", micro_batch_size=4)
    done = quick_programs.run([*COMMAND, *words(c)], capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    got, want = scored(tmp_path/"runs/run"), scored(one.folder)
    assert got.keys() == want.keys() and all(got[k] == pytest.approx(want[k], rel=1e-3) for k in got)
