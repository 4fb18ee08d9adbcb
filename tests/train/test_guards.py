"How often to evaluate and to save, in steps; runs that end early; spikes that are skipped; scores during training."
import json
import pytest, torch
from safetensors.torch import load_file
from llm_speedrun.checkpoint.format import checkpoints, step_of_name
from llm_speedrun.io_utils import InputError
from llm_speedrun.train.config import TrainConfig, parse_options
from llm_speedrun.train.run_dir import Finished
from llm_speedrun.train.trainer import Trainer, train
from helpers.tiny_runs import fails, nano, options
from test_trainer import curve, rows

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
