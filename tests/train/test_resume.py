"Stopped and resumed: the same bits, whatever stops a run and whenever; broken checkpoints are passed over, and say so."
import json, os, re, shutil, signal, sys, threading
from dataclasses import fields
from datetime import datetime
from pathlib import Path
import numpy as np, pytest, torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from llm_speedrun.checkpoint import format, save
from llm_speedrun.train import trainer as module, validator
from llm_speedrun.data.batches import Batches
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.recipes.schedules import lr_at
from llm_speedrun.stepper import Stepper
from llm_speedrun.cli import speedrun_train
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.run_dir import PROBE, Finished, RunDir
from llm_speedrun.checkpoint.format import checkpoints, flatten_state, newest, read_metadata, validation_error, write_checkpoint
from llm_speedrun.train.console import Signals
from llm_speedrun.train.resolve import PlanResolver, read_options, resumed
from llm_speedrun.train.trainer import train, Trainer
from llm_speedrun.train.validator import TextSampler
from tokenizers import Tokenizer, models
from helpers import quick_programs
from helpers.tiny_runs import VOCAB, fails, nano, options, texts, write_bins
from test_trainer import COMMAND, curve, names, posix, rows, start, when
from helpers.timeouts import TIMEOUT

FULL = "bf16,flash,fused_ops,chunked_ce"

def watch_updates(monkeypatch, before=lambda n, batches: None, after=lambda n, batches: None):
    "Both are called at each update of training, with its number, from 1, and its micro-batches. Those of the trial before it don't count"
    call, loop, count = Stepper.__call__, Trainer.loop, [None]
    def training(self, batches):
        count[0] = 0
        try: return loop(self, batches)
        finally: count[0] = None
    def update(self, *batches):
        if count[0] is None: return call(self, *batches)
        count[0] += 1
        n = count[0]
        before(n, batches)
        res = call(self, *batches)
        after(n, batches)
        return res
    monkeypatch.setattr(Trainer, "loop", training)
    monkeypatch.setattr(Stepper, "__call__", update)

def stop_at(monkeypatch, update, number=signal.SIGINT):
    "The signal arrives once, while that update of training is under way, from 1"
    sent = []
    def press(n, batches):
        if n == update and not sent: sent.append(n); os.kill(os.getpid(), number)
    watch_updates(monkeypatch, press)

def go(folder, **kw): return train(options(folder, **kw), progress=False)
def resume(folder, **kw): return train(TrainConfig(resume=str(folder/"runs/run"), **kw), progress=False)
def state(trainer):
    tensors = {}
    flatten_state(dict(model=trainer.run.model.state_dict(), state=trainer.checkpointer.state(trainer.done)), tensors)
    return {k: t.clone() for k, t in tensors.items()}

# What is known isn't tried

@pytest.fixture
def trials(monkeypatch):
    "A list that has an entry for each trial of rungs and a micro-batch"
    made, trial = [], PlanResolver.try_batch
    monkeypatch.setattr(PlanResolver, "try_batch", lambda self, rungs: (made.append(rungs), trial(self, rungs))[1])
    return made

def recorded_as(folder, **changes):
    "Change what `config.json` says of the conditions under which the run's micro-batch was tried"
    path = folder/"runs/run/config.json"
    config = json.loads(path.read_text())
    config["tried_on"] |= changes
    path.write_text(json.dumps(config))

def test_a_run_that_goes_on_makes_no_trial(tmp_path, trials):
    "It knows its rungs, their options and its micro-batch"
    before, _ = go(tmp_path, rungs="cpu")
    assert len(trials) == 1
    again, _ = resume(tmp_path, steps=8)
    assert len(trials) == 1 and again.cfg.rungs == before.cfg.rungs == "flash:backend=flash"
    assert (again.cfg.micro_batch_size, again.cfg.grad_accum_steps) == (4, 1)
    resume(tmp_path, steps=9, micro_batch_size=4, rungs=before.cfg.rungs) # given, and as it was
    assert len(trials) == 1

@pytest.mark.parametrize("change", [dict(micro_batch_size=2), dict(rungs="flash"), dict(memory_limit="cpu"), dict(gpu="another"), dict(gpu_gib=24.),
                                    dict(processes=2, dp=2), dict(plugins=["another"])], ids=lambda d: "+".join(d))
def test_what_has_changed_is_tried(tmp_path, trials, change):
    "Another GPU, another number of processes, another option that decides what fits"
    go(tmp_path, rungs="flash,fused_adamw")
    options = {k: v for k, v in change.items() if k in {f.name for f in fields(TrainConfig)}}
    if options != change: recorded_as(tmp_path, **change)
    resume(tmp_path, steps=8, **options)
    assert len(trials) == 2
    resume(tmp_path, steps=10)
    assert len(trials) == 2 # what was tried then is known now

def test_a_smaller_micro_batch_is_known(tmp_path, trials):
    "One that training went on with where memory ran out"
    trainer, _ = go(tmp_path)
    trainer.reducer(4)
    resume(tmp_path, steps=8)
    assert len(trials) == 1 and read_options(tmp_path/"runs/run").micro_batch_size == 2

# The same bits

DATA = dict(stream=dict(stream=True), mixture=dict(data="mixture"), average=dict(ema_decay=.9, schedule="wsd"), documents=dict(document_mask=True))

@posix
def test_the_same_bits_in_phases(tmp_path, monkeypatch):
    "As below, where a step has four updates, then two, then one, and the weights have an average"
    test_the_same_bits(tmp_path, monkeypatch, "naive", recipe="speedrun", grad_accum_steps=1, calls=4*4 + 2)

@posix
def test_the_same_bits_in_windows(tmp_path, monkeypatch):
    test_the_same_bits(tmp_path, monkeypatch, "naive", recipe="speedrun:updates=1:windows=8+0")

@posix
@pytest.mark.cuda
@pytest.mark.parametrize("recipe, rungs", [("speedrun", "bf16,flash"), ("without_muon", "bf16,flash"), ("speedrun:windows=8+0", "bf16,flash"),
                                           ("speedrun", f"{FULL},fp8,cuda_graphs")])
def test_the_same_bits_on_a_gpu(tmp_path, monkeypatch, recipe, rungs):
    "Also what PyTorch would leave on the CPU: AdamW's number of steps; and with all that `fastest` has"
    test_the_same_bits(tmp_path, monkeypatch, rungs, recipe=recipe, grad_accum_steps=1, calls=4*4 + 2)

@posix
@pytest.mark.parametrize("rungs", ["naive", "flash,fused_adamw", "bf16,bf16_weights", f"{FULL},fp8,fused_adamw",
                                   "adamw8bit"])
def test_the_same_bits(tmp_path, monkeypatch, rungs, calls=5, **more):
    "Twelve steps of two micro-batches at once, and five and seven: weights, moments, scales, losses"
    how = dict(rungs=rungs, steps=12, grad_accum_steps=2, num_evals=3, deterministic=True) | more
    whole, res = go(tmp_path/"whole", **how)
    with monkeypatch.context() as m:
        stop_at(m, calls)
        half, stopped = go(tmp_path/"parts", **how)
    assert stopped["interrupted"] and stopped["steps"] == 5 and stopped["val_loss"]
    rest, end = resume(tmp_path/"parts")
    assert end["val_loss"] == res["val_loss"] and not end["interrupted"]
    want, got = state(whole), state(rest)
    assert set(want) == set(got)
    for k in want: assert torch.equal(want[k], got[k]), k
    losses = [r["loss"] for r in rows(tmp_path/"parts/runs/run") if "loss" in r]
    assert losses == curve(whole) == curve(rest)

@posix
@pytest.mark.parametrize("rungs", [f"{FULL},tied_embedding,head_groups,fused_adamw,direct_update",
                                   f"{FULL},recompute_rope,tied_embedding,fp8,head_groups,fp8_epilogues,direct_update",
                                   f"{FULL},epilogues,head_groups,fused_ce,fused_adamw,direct_update"], ids=["bf16", "fp8", "epilogues"])
def test_the_same_bits_of_fewer_passes(tmp_path, monkeypatch, rungs):
    "The same with the rungs of notebooks 32 to 34, and the AdamW that one of them brings"
    test_the_same_bits(tmp_path, monkeypatch, rungs, recipe="adamw")

@posix
@pytest.mark.parametrize("kind", DATA)
def test_the_same_bits_with(tmp_path, monkeypatch, kind):
    "The same with a stream, a mixture, an average of the weights, and attention within documents"
    how = DATA[kind] | (dict(data=f"{write_bins(tmp_path/'a')}:2,{write_bins(tmp_path/'b')}:1") if kind == "mixture" else {})
    if kind in ("stream", "documents"): how["data"] = str(texts(tmp_path/"texts"))
    test_the_same_bits(tmp_path, monkeypatch, "naive", **how)

@posix
def test_another_micro_batch(tmp_path, monkeypatch):
    "Tokens of a step are held: the same windows in the same order, and losses to the last digits"
    seen = []
    watch_updates(monkeypatch, lambda n, batches: seen.append(torch.cat([x for x, _ in batches])))
    whole, _ = go(tmp_path/"whole", steps=8)
    windows = seen[:]; seen.clear()
    with monkeypatch.context() as m:
        stop_at(m, 3)
        go(tmp_path/"parts", steps=8)
    first = seen[:]; seen.clear()
    rest, _ = resume(tmp_path/"parts", micro_batch_size=1)
    assert (rest.cfg.micro_batch_size, rest.cfg.grad_accum_steps) == (1, 4)
    assert all(map(torch.equal, windows, first + seen))
    assert curve(rest) == pytest.approx(curve(whole), rel=1e-4)

# Signals

@posix
def test_sigterm(tmp_path):
    "The command stops with code 143 long before its last step, says how to go on, and does"
    p, run = start(tmp_path, "naive"), tmp_path/"runs/run"
    when(p, lambda: (run/"metrics.jsonl").exists() and (run/"metrics.jsonl").stat().st_size)
    p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=TIMEOUT)
    assert p.returncode == 143 and "Traceback" not in err, err
    steps = json.loads((run/"result.json").read_text())["steps"]
    assert f"stopped after step {steps}; --resume {run}" in out and load_file(run/"model.safetensors")
    cmd = [*COMMAND, "--resume", str(run), "--steps", str(steps + 3)]
    done = quick_programs.run(cmd, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in rows(run) if "loss" in r] == list(range(1, steps + 4))

@posix
def test_stopped_at_random_moments(moments=os.environ.get("KILLS", "4")):
    "SIGTERM, SIGINT and kill -9: logs, stops and final weights are those of a run that was never stopped (more with KILLS=50)"
    cmd = [sys.executable, str(Path(__file__).parents[1]/"kill_often.py"), moments]
    out = quick_programs.run(cmd, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert out.returncode == 0, out.stdout + out.stderr
    assert f"stopped {moments} times" in out.stdout

def test_a_run_with_a_result_has_all_its_checkpoints(tmp_path, nano, monkeypatch):
    "One that is killed after that isn't resumed: what it was writing would stay unfinished"
    asked, saved, there = threading.Event(), [], []
    write, saves, wait, result = save.write_checkpoint, save.Saver.save, save.Saver.wait, RunDir.write_result
    def slow(folder, *args):
        if folder.name == "step-00000004": assert asked.wait(TIMEOUT)
        return write(folder, *args)
    def saving(self, step, *args, **facts): saves(self, step, *args, **facts); saved.append(step)
    def waited(self):
        if 4 in saved: asked.set()
        return wait(self)
    def written(self, *args):
        there.append(sorted(p.name for p in (self.path/"checkpoints").iterdir()))
        asked.set()
        return result(self, *args)
    monkeypatch.setattr(save, "write_checkpoint", slow)
    monkeypatch.setattr(save.Saver, "save", saving)
    monkeypatch.setattr(save.Saver, "wait", waited)
    monkeypatch.setattr(RunDir, "write_result", written)
    train(options(tmp_path, steps=4, num_evals=2, keep_last=1), progress=False)
    assert len(there) == 1 and there[0][-1] == "step-00000004" and not any(n.endswith(".tmp") for n in there[0])

ROW = "step loss val_loss event stopped".split()
def logged(run): return [{k: r[k] for k in ROW if k in r} for r in rows(run)], [json.loads(o) for o in (run/"samples.jsonl").read_text().splitlines()]

@pytest.fixture(scope="module")
def judged_whole(tmp_path_factory, nano):
    "Options of a run that evaluates and samples after each second step and reaches its target at step 6; what it logs; its weights"
    folder, how = tmp_path_factory.mktemp("judged"), dict(steps=12, num_evals=6, num_samples=6, recipe="normuon")
    go(folder/"all", **how)
    target = [r["val_loss"] for r in rows(folder/"all/runs/run") if "val_loss" in r][2]
    how["target_loss"] = target
    _, res = go(folder/"whole", **how)
    assert res["reached"] and res["steps"] == 6
    return how, logged(folder/"whole/runs/run"), load_file(folder/"whole/runs/run/model.safetensors")

@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where, at", [("evaluate", 4), ("evaluate", 6), ("sample", 4), ("train_iteration", 2)])
def test_what_was_due_is_done(tmp_path, monkeypatch, judged_whole, where, at, number):
    "A signal in an evaluation, a sample or a step: the resumed run does what was due, once, and stops at the target as ever"
    how, want, weights = judged_whole
    signal.signal(signal.SIGINT, signal.default_int_handler)
    owner, name = (TextSampler, "__call__") if where == "sample" else (Trainer, where)
    real, sent, samples = getattr(owner, name), [], []
    def stopped(self, *args, **kw):
        if where == "sample": samples.append(self)
        if not sent and at == (2*len(samples) if samples else self.done): # a sample after each second step
            sent.append(at)
            during = dict(train_iteration=lambda f: f(), sample=self.validator.during, evaluate=self.validator.during)[where] # as while it runs
            during(lambda: signal.raise_signal(number))
        return real(self, *args, **kw)
    with monkeypatch.context() as m:
        m.setattr(owner, name, stopped)
        _, first = go(tmp_path, **how)
    assert sent and first["interrupted"]
    try: _, res = resume(tmp_path)
    except Finished: res = first # Ctrl-C where the target was just reached
    run = tmp_path/"runs/run"
    assert res["reached"] and res["steps"] == 6 and logged(run) == want
    got = load_file(run/"model.safetensors")
    assert all(torch.equal(got[k], t) for k, t in weights.items())

EDITS = dict(lr=.5, seed=7, grad_clip=.1, recipe="adamw", ema_decay=.9, model_config=dict(rope_theta=10.), eps=dict(eps=1e-2), warmup_steps=9)

@posix
@pytest.mark.parametrize("k", EDITS)
def test_an_edited_config(stopped, k):
    "An option that decides about the weights was changed by hand: it is named with both values, and nothing is touched"
    run = stopped/"runs/run"
    path, was = run/"config.json", (run/"metrics.jsonl").read_bytes()
    there = json.loads(path.read_text())
    new = EDITS[k]
    path.write_text(json.dumps(there | (dict(model_config=there["model_config"] | new) if isinstance(new, dict) else {k: new})))
    name = f"model.{[*new][0]}" if isinstance(new, dict) else k
    with fails(InputError, "config.json doesn't fit", f"{name} is .* and was"): resume(stopped)
    assert (run/"metrics.jsonl").read_bytes() == was

@posix
def test_edited_steps_are_told(stopped, capsys):
    "Another number of steps in config.json is as one on the command line"
    path = stopped/"runs/run/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(steps=20)))
    Trainer(TrainConfig(resume=str(stopped/"runs/run"))).run_dir.release()
    assert "20 steps instead of 12: the learning rate of the next step " in capsys.readouterr().out

@posix
@pytest.mark.parametrize("error", [RuntimeError("a fault"), RunError("out of GPU memory in the middle of an update")], ids=repr)
def test_an_error_in_a_step(tmp_path, monkeypatch, capsys, error):
    "Weights of half a step are never kept: the ones of the checkpoint before are those to go on from"
    def broken_off(n, batches):
        if n == 5: raise error
    def half(n, batches): # the step is under way when it fails
        if n == 5: trainer.step.params[0].data.fill_(float("nan"))
    trainer = Trainer(options(tmp_path, steps=8, save_minutes=0.))
    watch_updates(monkeypatch, half, broken_off)
    with fails(type(error), str(error)): trainer.fit()
    run = tmp_path/"runs/run"
    assert not (run/"model.safetensors").exists() and newest(run/"checkpoints").name == "step-00000004"
    assert "step 5 was broken off" in capsys.readouterr().out
    monkeypatch.undo()
    assert resume(tmp_path)[1]["steps"] == 8 and all(t.isfinite().all() for t in load_file(run/"model.safetensors").values())

@posix
def test_a_finished_run(tmp_path, capsys):
    "The command has nothing to do: exit code 0, one line, nothing touched; also where the target was reached"
    go(tmp_path)
    for more, said in (({}, "has taken its 6 steps"), (dict(target_loss=100., name="early"), "has reached its target of 100 in step 3")):
        if more: go(tmp_path, **more)
        run = tmp_path/"runs"/more.get("name", "run")
        was = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        capsys.readouterr()
        speedrun_train(["--resume", str(run)])
        out, err = capsys.readouterr()
        assert said in out and len(out.splitlines()) == 1 and not err
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == was
    with fails(Finished, "has taken its 6 steps"): resume(tmp_path)
    assert train(TrainConfig(resume=str(tmp_path/"runs/early"), target_loss=.1), progress=False)[1]["steps"] == 6

@posix
@pytest.mark.parametrize("again", ["resume", "overwrite"])
def test_what_a_killed_process_was_writing(stopped, again):
    "Its temporary files go when the run goes on, or when another one takes its place"
    run = stopped/"runs/run"
    for name in ("model.safetensors.tmp", "metrics.jsonl.tmp", "notes.tmp"): (run/name).write_bytes(b"half")
    if again == "resume": resume(stopped)
    else: go(stopped, overwrite=True)
    assert {p.name for p in run.glob("*.tmp")} == {"notes.tmp"}

@posix
def test_a_text_for_a_time(stopped, capsys):
    "A row of the log whose numbers are none is passed over, and told"
    run = stopped/"runs/run"
    with open(run/"metrics.jsonl", "a") as f: f.write('{"step": 3, "train_s": "12"}\n')
    trainer = Trainer(TrainConfig(resume=str(run)))
    trainer.fit()
    assert "train_s is '12', and no number" in capsys.readouterr().out and [r["step"] for r in rows(run) if "loss" in r] == list(range(1, 13))

# Broken checkpoints and full disks

@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, nano):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 6)
        go(folder, steps=12, save_minutes=0., keep_last=3)
    return folder

@pytest.fixture
def stopped(stopped_once, tmp_path):
    "A run that has checkpoints of its steps 4, 5 and 6, and was to take 12"
    shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)
    assert [c.name for c in checkpoints(tmp_path/"runs/run/checkpoints")] == [f"step-{i:08}" for i in (4, 5, 6)]
    return tmp_path

def damage(kind, c):
    if kind == "torn": os.truncate(c/"state.safetensors", 1000)
    if kind == "tampered": (c/"about.json").write_text((c/"about.json").read_text().replace("step", "stop"))
    if kind == "bit": b = bytearray((c/"model.safetensors").read_bytes()); b[-7] ^= 4; (c/"model.safetensors").write_bytes(b)
    if kind == "missing": (c/"state.safetensors").unlink()
    if kind == "no manifest": (c/"manifest.json").unlink()
    if kind == "nonsense": (c/"manifest.json").write_text("[1, 2")
    if kind == "empty": shutil.rmtree(c); c.mkdir()

@posix
@pytest.mark.parametrize("kind", ["torn", "tampered", "bit", "missing", "no manifest", "nonsense", "empty"])
def test_a_broken_checkpoint_is_passed_over(stopped, capsys, kind):
    "The newest is broken: it is named with the reason, the one before is taken, and the run ends as it should"
    damage(kind, stopped/"runs/run/checkpoints/step-00000006")
    trainer = Trainer(TrainConfig(resume=str(stopped/"runs/run")))
    said = capsys.readouterr().out
    assert re.search(r"passing over \S+step-00000006: \S+", said) and "going on from" in said and trainer.done == 5
    trainer.fit()
    assert [r["step"] for r in rows(stopped/"runs/run") if "loss" in r] == list(range(1, 13))

@posix
def test_nothing_to_go_on_from(stopped):
    "All are broken: said so, and nothing is touched"
    for c in checkpoints(stopped/"runs/run/checkpoints"): damage("torn", c)
    was = (stopped/"runs/run/metrics.jsonl").read_bytes()
    with fails(FileNotFoundError, "has no valid checkpoint to go on from"): resume(stopped)
    assert (stopped/"runs/run/metrics.jsonl").read_bytes() == was

def test_a_full_disk(tmp_path, monkeypatch, capsys):
    "Checkpoints that can't be written are told, training goes on, and the ones from before stay"
    real, full = format.save_file, [False]
    def save_file(*args, **kw):
        if full[0] and "checkpoints" in str(args[1]): raise SafetensorError("I/O error: No space left on device")
        return real(*args, **kw)
    monkeypatch.setattr(format, "save_file", save_file)
    def fill(n, batches): full[0] = n > 4
    watch_updates(monkeypatch, fill)
    with fails(OSError, "No space left"): train(options(tmp_path, steps=8, save_minutes=0.))
    run = tmp_path/"runs/run"
    assert "can't be written: I/O error: No space left on device" in capsys.readouterr().out
    assert [r["step"] for r in rows(run) if "loss" in r] == list(range(1, 9)) and load_file(run/"model.safetensors")
    assert not validation_error(newest(run/"checkpoints")) and not list((run/"checkpoints").glob("*.tmp"))

@pytest.mark.parametrize("full", [["step-"], ["model.safetensors.tmp"], ["step-", "model.safetensors.tmp"]], ids=" ".join)
def test_an_error_and_a_full_disk(tmp_path, monkeypatch, capsys, full):
    "What can't be written after an error is told, all of it, and the other is there; the first error is the one that is raised"
    real, trainer = format.save_file, Trainer(options(tmp_path, steps=8))
    def save_file(tensors, path, **kw):
        if any(f in str(Path(path).relative_to(tmp_path)) for f in full): raise SafetensorError("I/O error: No space left on device")
        return real(tensors, path, **kw)
    def fail(n, batches):
        if n == 4: monkeypatch.setattr(format, "save_file", save_file)
    monkeypatch.setattr(Trainer, "after_step", lambda self: 1/(self.done < 4)) # between two steps
    watch_updates(monkeypatch, fail)
    with fails(ZeroDivisionError, "division"): trainer.fit()
    said, run = capsys.readouterr().out, tmp_path/"runs/run"
    for f in full: assert f in said and "could not save" in said and f"{f}" in said.partition("could not save")[2]
    assert bool(newest(run/"checkpoints")) == ("step-" not in full) and (run/"model.safetensors").exists() == (len(full) == 1 and "step-" in full)

def test_weights_that_cannot_be_written(tmp_path, monkeypatch):
    "The run ends by the error, which names the file, after all else is there"
    real = format.save_file
    def save_file(tensors, path, **kw):
        if Path(path).name == "model.safetensors.tmp": raise SafetensorError("I/O error: No space left on device (os error 28)")
        return real(tensors, path, **kw)
    monkeypatch.setattr(format, "save_file", save_file)
    with fails(OSError, "model.safetensors.tmp can't be written: no space left"): go(tmp_path)
    assert newest(tmp_path/"runs/run/checkpoints").name == "step-00000006" and not (tmp_path/"runs/run/model.safetensors").exists()

@posix
def test_others_may_read_it(tmp_path):
    "A checkpoint's files and the weights have the mode of any new file"
    go(tmp_path)
    run = tmp_path/"runs/run"
    files = [run/"model.safetensors", *newest(run/"checkpoints").iterdir()]
    assert len(files) > 3 and {f.stat().st_mode for f in files} == {(run/"config.json").stat().st_mode}

@posix
def test_a_checkpoint_after_one_that_failed(tmp_path, monkeypatch, capsys):
    "One that couldn't be written costs none of those after it: SIGTERM in the next step leaves one"
    real, n = format.save_file, [0]
    def save_file(tensors, path, **kw):
        n[0] += PROBE not in Path(path).parts # what tries the storage, before the run begins
        if n[0] == 1: raise SafetensorError("I/O error: No space left on device")
        return real(tensors, path, **kw)
    monkeypatch.setattr(format, "save_file", save_file)
    stop_at(monkeypatch, 2, signal.SIGTERM)
    train(options(tmp_path, steps=8, save_minutes=0.))
    assert "before step 2 could not be written" in capsys.readouterr().out
    assert newest(tmp_path/"runs/run/checkpoints").name == "step-00000002"

@posix
def test_a_second_interruption(tmp_path, monkeypatch):
    "Ctrl-C in a step and again in the last evaluation: the checkpoint is there, and the run goes on from it"
    signal.signal(signal.SIGINT, signal.default_int_handler)     # jobs in a shell's background start out ignoring it
    stop_at(monkeypatch, 3)
    with monkeypatch.context() as m:
        m.setattr(Stepper, "evaluate", lambda self, batches: signal.raise_signal(signal.SIGINT))
        with fails(KeyboardInterrupt, "interrupted again"): train(options(tmp_path), progress=False)
    monkeypatch.undo()
    trainer, res = resume(tmp_path)
    assert res["steps"] == 6 and [r["step"] for r in rows(tmp_path/"runs/run") if "loss" in r] == list(range(1, 7))

@posix
@pytest.mark.parametrize("presses", [1, 2, 3])
def test_pressed_again_and_again(tmp_path, monkeypatch, capsys, presses):
    "Once: all is saved and judged. Twice: the step is taken, the run saved without a loss. Three times: the step is gone, and that is said"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def press(n, batches):
        if n == 5: # half of a step is taken, as it were
            for _ in range(presses): signal.raise_signal(signal.SIGINT)
    watch_updates(monkeypatch, after=press)
    trainer, res = train(options(tmp_path, steps=8, save_minutes=0.))
    said = capsys.readouterr().out
    assert res["interrupted"] and "stopping after this step" in said and ("val_loss" in res) == (presses == 1)
    assert res["steps"] == (4 if presses == 3 else 5) and ("step 5 was broken off" in said) == (presses == 3)
    assert newest(tmp_path/"runs/run/checkpoints").name == f"step-{res['steps']:08}"
    if presses == 3: assert "goes on from step-00000004" in said
    monkeypatch.undo()
    assert resume(tmp_path)[1]["steps"] == 8

@posix
def test_going_on_from_an_older_checkpoint(tmp_path, monkeypatch):
    "Checkpoints that couldn't be read go when the run goes on: they'd count as the newest, and push out those that are made now"
    go(tmp_path, steps=8, save_minutes=0., keep_last=4)
    run = tmp_path/"runs/run"
    for c in checkpoints(run/"checkpoints")[-2:]: (c/"about.json").write_text("{}")
    (run/"result.json").unlink()
    stop_at(monkeypatch, 1)
    _, res = resume(tmp_path, keep_last=3)
    names = [c.name for c in checkpoints(run/"checkpoints")]
    assert res["steps"] == 7 and f"step-{7:08}" in names and not any(validation_error(run/"checkpoints"/n) for n in names) and len(names) <= 5 # one is the step before the decay

def test_sigterm_is_not_forgotten():
    "SIGINT after SIGTERM changes nothing; SIGTERM after SIGINT does"
    for numbers, got in (((15, 2), 15), ((2, 15), 15), ((2,), 2)):
        s = Signals(); s.got = None
        for n in numbers: s.note(n, None)
        assert s.got == got

# Options

@pytest.mark.parametrize("option, kind, message", [
    (dict(seed=1), ValueError, "keeps its options: leave out seed"), (dict(lr=.1, seq_len=8), ValueError, "leave out lr, seq_len"),
    (dict(micro_batch_size=3), ValueError, "has 4 sequences, which micro_batch_size 3 doesn't divide"), (dict(micro_batch_size=-1), ValueError, "micro_batch_size must be a whole number from 1"),
    (dict(steps=6), ValueError, "has taken its 6 steps: choose more --steps"), (dict(keep_last=0), ValueError, "keep_last must be a whole number from 1")], ids=str)
@posix
def test_bad_option(stopped, option, kind, message):
    was = {p: p.read_bytes() for p in (stopped/"runs/run").rglob("*") if p.is_file()}
    with fails(kind, message): resume(stopped, **option)
    assert {p: p.read_bytes() for p in (stopped/"runs/run").rglob("*") if p.is_file()} == was

def test_resuming_no_run(tmp_path):
    with fails(FileNotFoundError, "is not the folder of a run: it has no config.json"): resume(tmp_path)

def test_the_options():
    "All options of a run: one more or less is a decision, and this is where it's made"
    assert [f.name for f in fields(TrainConfig)] == (
        "data text_key stream document_mask vocab model layers width heads kv_heads head_dim hidden seq_len plugin init rungs micro_batch_size grad_accum_steps memory_limit deterministic retune ladder gpus restarts "
        "steps total_tokens minutes epochs target_loss patience recipe step_tokens lr schedule warmup cooldown final_lr weight_decay grad_clip skip_spikes ema_decay seed num_evals eval_every eval_tokens score score_every sample_tokens num_samples "
        "name out overwrite loggers profile save_minutes save_every keep_last keep_every resume").split()

# Other tokens

@posix
@pytest.mark.parametrize("stream", [False, True])
def test_other_tokens(tmp_path, monkeypatch, stream):
    "Text that changed between stop and resume: an error says what, and the run's tokenizer stays; as it was, the run goes on"
    folder = texts(tmp_path/"texts")
    stop_at(monkeypatch, 3)
    go(tmp_path, data=str(folder), stream=stream, steps=8, micro_batch_size=16, seq_len=32)
    run = tmp_path/"runs/run"
    tok, was = (run/"tokenizer.json").read_bytes(), {p: p.read_text() for p in folder.iterdir()}
    for p, text in was.items(): p.write_text(text + "Something else altogether. "*20)
    with fails(InputError, "isn't what this run was trained on .*training tokens" if not stream else "the documents have changed"):
        resume(tmp_path)
    assert (run/"tokenizer.json").read_bytes() == tok and not (run/"tokenizer.json.tmp").exists()
    for p, text in was.items(): p.write_text(text)
    assert resume(tmp_path)[1]["steps"] == 8 and (run/"tokenizer.json").read_bytes() == tok

@posix
def test_new_text_trains_no_tokenizer(stopped_text, monkeypatch):
    "The text is opened with the run's own tokenizer; another one in its place is told"
    from llm_speedrun.data import corpus
    run = stopped_text/"runs/run"
    monkeypatch.setattr(corpus, "train_tokenizer", lambda *args, **kw: pytest.fail("a tokenizer was trained"))
    Trainer(TrainConfig(resume=str(run)), progress=False).run_dir.release()
    other = json.loads((run/"tokenizer.json").read_text())
    other["model"]["merges"].pop(); other["model"]["vocab"].popitem()
    (run/"tokenizer.json").write_text(json.dumps(other))
    with fails(InputError, "isn't what this run was trained on .*tokenizer"): Trainer(TrainConfig(resume=str(run)), progress=False)

@pytest.mark.parametrize("kind", ["tokens", "text", "mixture"])
def test_data_that_is_elsewhere(tmp_path, monkeypatch, nano, kind):
    "A relative path counts from where the run began; moved data is named; the fingerprint decides, not the path"
    (start := tmp_path/"start").mkdir(); (other := tmp_path/"other").mkdir()
    monkeypatch.chdir(start)
    fill = texts if kind == "text" else write_bins
    for name in ("a", "b"): fill(start/name)
    spec = "{0}/a:2,{0}/b:1" if kind == "mixture" else "{0}/a"
    go(tmp_path, data=spec.format("."), steps=2)
    monkeypatch.chdir(other)
    assert resume(tmp_path, steps=3)[1]["steps"] == 3
    start.rename(moved := tmp_path/"moved")
    with fails(FileNotFoundError, "a' is neither a corpus", "If the data was moved, add --data"): resume(tmp_path, steps=4)
    assert resume(tmp_path, steps=4, data=spec.format(moved))[1]["steps"] == 4
    if kind == "tokens":
        assert resume(tmp_path, steps=5)[1]["steps"] == 5
        write_bins(other/"a", train=5000)
        with fails(InputError, "a isn't what this run was trained on .training tokens 4,097 -> 5,000"): resume(tmp_path, steps=6, data="a")

def test_tokens_that_get_a_tokenizer(tmp_path, nano):
    "As the doctor advises where they came without one: they are the same tokens, and another tokenizer later is refused"
    bins = write_bins(tmp_path/"bins")
    go(tmp_path, steps=2, data=str(bins))
    tok = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}))
    tok.save(str(bins/"tokenizer.json"))
    assert resume(tmp_path, steps=3)[1]["steps"] == 3
    Tokenizer(models.WordLevel({f"u{i}": i for i in range(VOCAB)})).save(str(bins/"tokenizer.json"))
    with fails(InputError, "isn't what this run was trained on .tokenizer"): resume(tmp_path, steps=4)

def test_a_run_whose_data_gets_shorter(tmp_path, monkeypatch, nano):
    "An error with the file's name, and not SIGBUS; with the file back, the run goes on"
    bins = write_bins(tmp_path/"bins")
    whole = (bins/"train.bin").read_bytes()
    watch_updates(monkeypatch, lambda n, _: os.truncate(bins/"train.bin", 100) if n == 2 else None)
    with fails(RunError, "train.bin was cut off while it was in use"): go(tmp_path, steps=20, data=str(bins), save_minutes=0)
    (bins/"train.bin").write_bytes(whole)
    monkeypatch.undo()
    assert resume(tmp_path)[1]["steps"] == 20

@pytest.fixture(scope="module")
def stopped_text_once(tmp_path_factory, nano):
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 3)
        go(folder, data=str(texts(folder/"texts")), steps=8, seq_len=32)
    return folder

@pytest.fixture
def stopped_text(stopped_text_once, tmp_path):
    "A run on a folder of text, stopped after three steps of eight"
    shutil.copytree(stopped_text_once/"runs", tmp_path/"runs")
    return tmp_path

# One process a folder

def test_two_trainers_of_one_name(tmp_path):
    "The second is refused while the first is at work, also with `overwrite` and on resume; afterwards the folder is free"
    first = Trainer(options(tmp_path), progress=False)
    for cfg in (options(tmp_path), options(tmp_path, overwrite=True)):
        with fails(RunError, "another process is writing this run"): Trainer(cfg, progress=False)
    first.fit()
    kept = sorted(p.name for p in (tmp_path/"runs/run/checkpoints").iterdir())
    with fails(FileExistsError, "exists already"): Trainer(options(tmp_path), progress=False)
    assert sorted(p.name for p in (tmp_path/"runs/run/checkpoints").iterdir()) == kept
    second = Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), steps=8), progress=False)
    with fails(RunError, "another process is writing this run"): Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), steps=8))
    second.fit()

def test_default_names_differ(tmp_path, monkeypatch):
    "Runs that begin in the same second have folders of their own"
    class Then(datetime):
        @classmethod
        def now(cls): return cls(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr("llm_speedrun.train.config.datetime", Then)
    trainers = [Trainer(options(tmp_path, name=""), progress=False) for _ in range(3)]
    assert [t.folder.name for t in trainers] == [f"nano-bins-20260102-030405{s}" for s in ("", "-2", "-3")]
    for t in trainers: t.fit()
    assert all((t.folder/"model.safetensors").exists() for t in trainers)

def test_a_trainer_that_is_not_used_leaves_nothing(tmp_path):
    "Neither one that is let go nor one that fails to be made; and a folder whose process died before it trained is free"
    Trainer(options(tmp_path), progress=False).run_dir.release()
    with fails(ValueError, "tokens are fewer"): Trainer(options(tmp_path, micro_batch_size=300), progress=False)
    assert not (tmp_path/"runs").exists()
    (tmp_path/"runs/run").mkdir(parents=True); (tmp_path/"runs/run/.lock").touch()
    assert go(tmp_path)[1]["steps"] == 6

# Overwriting

@pytest.mark.parametrize("name", ["..", ".", "/etc", "a/b", "a\0b"])
def test_a_name_is_one_folder(tmp_path, name):
    with fails((InputError, ValueError), "name"): Trainer(options(tmp_path, name=name, overwrite=True), progress=False)
    assert names(tmp_path) <= {"bins"}

@pytest.mark.parametrize("config", [None, "[]", "{}", '{"model_config": "mine"}'])
def test_overwrite_takes_only_a_run(tmp_path, config):
    "A folder that is no run is left alone, whatever its files are called"
    folder = tmp_path/"runs/run"
    (folder/"checkpoints").mkdir(parents=True); (folder/"checkpoints/photo").write_text("mine"); (folder/"tokenizer.json").write_text("{}")
    if config: (folder/"config.json").write_text(config)
    was = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with fails(InputError, "is not overwritten, as it is no run", "--name"): Trainer(options(tmp_path, overwrite=True), progress=False)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == was

@posix
def test_overwrite_behind_a_link(tmp_path):
    "Checkpoints of the older run go where they really are, and what isn't a run's stays"
    go(tmp_path)
    run, far = tmp_path/"runs/run", tmp_path/"far"
    (run/"checkpoints").rename(far); (run/"checkpoints").symlink_to(far); (run/"notes.txt").write_text("mine")
    go(tmp_path, seed=1, steps=4, overwrite=True)
    assert not list(far.glob("step-*")) and (run/"notes.txt").read_text() == "mine"
    assert [c.name for c in checkpoints(run/"checkpoints")] == ["step-00000002", "step-00000004"]

@posix
def test_a_checkpoint_of_another_run(stopped, capsys):
    "It is passed over, and said so"
    run = stopped/"runs/run"
    go(stopped, name="other", steps=9)
    shutil.copytree(run.parent/"other/checkpoints/step-00000009", run/"checkpoints/step-00000009")
    trainer = Trainer(TrainConfig(resume=str(run)))
    assert trainer.done == 6 and "step-00000009: it is of another run" in capsys.readouterr().out

# Best

def each_step_takes_a_second(monkeypatch, clock):
    step = Trainer.train_iteration
    monkeypatch.setattr(Trainer, "train_iteration", lambda self, batches: (step(self, batches), clock.sleep(1)))

@pytest.mark.parametrize("losses,best", [([3., 1., 2., 2.5, 2.4, 2.3], 2), ([3., 1., float("nan"), 2., 2., 2.], 2), ([float("nan")]*5 + [1.], 6)])
def test_the_best_is_kept(tmp_path, monkeypatch, clock, losses, best):
    "The checkpoint of the step with the lowest loss stays, though none was due there; a NaN doesn't win"
    each_step_takes_a_second(monkeypatch, clock)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: clock.sleep(60) or losses[self.done//2 - 1])
    go(tmp_path, steps=12, num_evals=6, save_minutes=1000., keep_last=1)
    kept = [int(c.name[5:]) for c in checkpoints(tmp_path/"runs/run/checkpoints")]
    assert 2*best in kept and 12 in kept

@pytest.mark.parametrize("minutes, saved", [(1000., [8]), (.4, [4, 8]), (0., range(1, 9))])
def test_no_best_is_saved_in_the_first_minute(tmp_path, monkeypatch, clock, minutes, saved):
    "Nor in less than `save_minutes` after the checkpoint before, where each evaluation finds a lower loss than the one before"
    steps, write = [], save.write_checkpoint
    monkeypatch.setattr(save, "write_checkpoint", lambda folder, *args: (steps.append(int(folder.name[5:])), write(folder, *args)))
    each_step_takes_a_second(monkeypatch, clock)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: clock.sleep(12) or 9. - self.done) # 14 s, 28 s and 42 s after the start
    go(tmp_path, steps=8, num_evals=4, save_minutes=minutes, schedule="cosine") # which keeps none before a decay
    assert steps == [*saved]

def test_a_loss_is_of_its_own_step(tmp_path, monkeypatch):
    "A checkpoint between two evaluations has no loss, so it isn't kept for that of the one before"
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {4: 1., 8: 2., 12: 3.}[self.done])
    trainer, _ = go(tmp_path, steps=12, num_evals=3, save_minutes=0., keep_last=1, schedule="cosine") # which keeps none before a decay
    assert [int(c.name[5:]) for c in checkpoints(tmp_path/"runs/run/checkpoints")][-2:] == [4, 12] and trainer.checkpointer.saver.losses == {4: 1., 8: 2., 12: 3.}

# What can change

@posix
def test_given(stopped):
    "An option that is given counts, also with its default's value"
    run = stopped/"runs/run"
    config = json.loads((run/"config.json").read_text())
    (run/"config.json").write_text(json.dumps(config | dict(target_loss=.5)))
    assert resumed(TrainConfig(resume=str(run))).target_loss == .5
    assert resumed(TrainConfig(resume=str(run)), given={"resume", "target_loss"}).target_loss == 0
    with fails(InputError, "leave out seed"): resumed(TrainConfig(resume=str(run)), given={"seed"})
    with fails(InputError, "resume must be"): Trainer(TrainConfig(), progress=False, given={"resume"})

@posix
def test_the_current_folder(stopped, monkeypatch):
    "`--resume .` goes on with the run in the current folder"
    monkeypatch.chdir(stopped/"runs/run")
    trainer = Trainer(TrainConfig(resume="."), progress=False)
    assert trainer.folder.samefile(stopped/"runs/run") and trainer.done == 6

@posix
def test_more_steps(stopped, capsys):
    "The learning rate follows the new length, doesn't rise a second time, and that is said"
    run = stopped/"runs/run"
    rise = json.loads((run/"config.json").read_text())["warmup_steps"]
    trainer = Trainer(TrainConfig(resume=str(run), steps=400))
    assert re.search("400 steps instead of 12: the learning rate of the next step .* without another warm-up", capsys.readouterr().out)
    assert trainer.plan.warmup == rise == 1      # 20 of 400 steps would rise
    trainer.cfg.steps = 8; trainer.train_step.lr = trainer.plan.lr_schedule(); trainer.fit()
    lrs = [r["lr"] for r in rows(run) if "lr" in r]
    c = trainer.cfg
    assert lrs[6] == lr_at(6, 8, c.lr, rise, c.schedule, c.final_lr, c.cooldown)

@posix
@pytest.mark.parametrize("before, after, said", [
    ("bf16,flash,fused_ops,chunked_ce,fp8", "bf16,flash", "without the rung 'fp8' its state is dropped"),
    ("bf16,flash,fused_ops,chunked_ce", "bf16,flash,fused_ops,chunked_ce,fp8", "the rung 'fp8' has no state in this checkpoint"),
    ("naive", "fused_adamw", ""), ("bf16", "bf16,bf16_weights", "the optimizer is Bf16AdamW, and was AdamW: its moments begin anew")])
def test_other_rungs(tmp_path, monkeypatch, capsys, before, after, said):
    "A run goes on with other rungs; what has no place any more is dropped, what is new begins anew, and both are said"
    with monkeypatch.context() as m:
        stop_at(m, 3)
        go(tmp_path, rungs=before, steps=6, recipe="adamw")
    trainer = Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), rungs=after))
    assert said in capsys.readouterr().out and trainer.done == 3
    assert trainer.fit()["steps"] == 6 and all(map(np.isfinite, curve(trainer))) and max(curve(trainer)) < 6.5
    config = json.loads((tmp_path/"runs/run/config.json").read_text())
    assert [r.partition(":")[0] for r in config["rungs"].split(",")] == list(trainer.run.rungs) or after == "fused_adamw"

# Files that are read back

def nested(n): return '{"a":'*n + "1" + "}"*n
def patched(path, **kw): path.write_text(json.dumps(json.loads(path.read_text()) | kw))
def pipe(path): path.unlink(); os.mkfifo(path)

CONFIGS = {
    "a list": lambda p: p.write_text("[]"), "null": lambda p: p.write_text("null"), "no JSON": lambda p: p.write_text("{"),
    "no model": lambda p: patched(p, model=None), "nothing": lambda p: p.write_text("{}"), "not UTF-8": lambda p: p.write_bytes(b'{"a": "\xe9"}'),
    "text for a number": lambda p: patched(p, steps="12"), "a list for a number": lambda p: patched(p, micro_batch_size=[4]),
    "a float for a number": lambda p: patched(p, micro_batch_size=1.5), "nothing for a text": lambda p: patched(p, data=None),
    "no sequence": lambda p: patched(p, seq_len=0), "no tokens": lambda p: patched(p, step_tokens=0), "no batch": lambda p: patched(p, micro_batch_size=0),
    "no learning rate": lambda p: patched(p, lr=0.), "a warm-up of text": lambda p: patched(p, warmup_steps="5"),
    "layers without end": lambda p: patched(p, model_config=json.loads(p.read_text())["model_config"] | dict(layers=10**9)),
    "more layers": lambda p: patched(p, model_config=json.loads(p.read_text())["model_config"] | dict(layers=4000)),
    "a negative width": lambda p: patched(p, model_config=json.loads(p.read_text())["model_config"] | dict(width=-32)),
    "heads of a negative width": lambda p: patched(p, model_config=json.loads(p.read_text())["model_config"] | dict(attention_width=-32)),
    "another width": lambda p: patched(p, model_config=json.loads(p.read_text())["model_config"] | dict(width=64)),
    "a digit too many": lambda p: p.write_text(p.read_text().replace('"steps": 12', '"steps": 1' + "0"*400)),
    "nested": lambda p: p.write_text(nested(100_000)), "a pipe": pipe}

@posix
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_is_wrong(stopped, monkeypatch, kind):
    "A line that names the file, before anything is built"
    run = stopped/"runs/run"
    CONFIGS[kind](run/"config.json")
    monkeypatch.setattr(module, "build", lambda *args, **kw: pytest.fail("a model is built"))
    with fails((InputError, FileNotFoundError), "config.json|checkpoints") as e: resume(stopped)
    assert len(str(e.value).splitlines()) == 1
    assert kind != "heads of a negative width" or "attention_width must be at least 0" in str(e.value)

def rewrite(c, change=lambda about: about, tensors=lambda ts: ts):
    "A checkpoint with something else in it, whose sums are right"
    about, model, state = read_metadata(c), load_file(c/"model.safetensors"), load_file(c/"state.safetensors")
    about = change(json.loads((c/"about.json").read_text()))
    shutil.rmtree(c)
    write_checkpoint(c, dict(model=model, state=tensors(state)), about)

def entry(about, *path):
    "The node at `path` in a state that was taken apart"
    node = about["state"]
    for k in path: node = dict(map(tuple, node["dict"]))[k] if "dict" in node else node["list"][k]
    return node

def without(about, *path): node = entry(about, *path[:-1])["dict"]; node[:] = [p for p in node if p[0] != path[-1]]; return about
def with_value(about, v, *path):
    node = entry(about, *path); node.clear(); node.update(v)
    return about

NORM = "layers.0.input_layernorm.weight"
STATES = {
    "a list": lambda a: a | dict(state=[1]), "null": lambda a: a | dict(state=None), "a text": lambda a: a | dict(state=dict(value="x")),
    "no optimizer": lambda a: without(a, "optimizer"), "no random state": lambda a: without(a, "rng", "cpu"),
    "no state of a weight": lambda a: without(a, "optimizer", "state", NORM), "no moment": lambda a: without(a, "optimizer", "state", NORM, "exp_avg"),
    "another moment": lambda a: with_value(a, entry(a, "optimizer", "state", "norm.weight", "exp_avg") | {}, "optimizer", "state", "embed_tokens.weight", "exp_avg"),
    "a number for a moment": lambda a: with_value(a, dict(value=3), "optimizer", "state", NORM, "exp_avg"),
    "a text for the groups": lambda a: with_value(a, dict(value="x"), "optimizer", "groups"),
    "a random state of text": lambda a: with_value(a, dict(value="x"), "rng", "cpu"),
    "a tensor that isn't there": lambda a: with_value(a, dict(tensor="nowhere"), "rng", "cpu"),
    "8 bits of an old version": lambda a: with_value(a, dict(made_of="OptimState8bit", parts=[], attrs=[True, "torch.float32"]), "optimizer", "state", NORM, "exp_avg"),
    "by number": lambda a: {k: v for k, v in a.items() if k != "version"}, "from the future": lambda a: a | dict(version=99),
    "no corpus": lambda a: a | dict(facts={}), "nested": lambda a: json.loads('{"list": ['*400 + "]}"*400) and a | dict(state=json.loads('{"list": ['*400 + "]}"*400))}

@posix
@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_is_wrong(stopped, kind):
    "Well-formed, with its sums, and wrong: a line that names the checkpoint, and nothing is changed"
    run = stopped/"runs/run"
    rewrite(run/"checkpoints/step-00000006", STATES[kind])
    was = (run/"metrics.jsonl").read_bytes()
    with fails(InputError, "step-00000006") as e: resume(stopped)
    assert len(str(e.value).splitlines()) == 1 and (run/"metrics.jsonl").read_bytes() == was

@posix
def test_a_tensor_that_is_missing(stopped):
    c = stopped/"runs/run/checkpoints/step-00000006"
    rewrite(c, tensors=lambda ts: dict(list(ts.items())[1:]))
    with fails(InputError, "step-00000006", "has no tensor"): resume(stopped)

@posix
@pytest.mark.parametrize("step", [10**12, -1, "6", None])
def test_a_step_that_is_wrong(stopped, capsys, step):
    "The checkpoint's step isn't that of its name: it is passed over, and the one before is taken"
    rewrite(stopped/"runs/run/checkpoints/step-00000006", lambda a: a | dict(step=step))
    assert Trainer(TrainConfig(resume=str(stopped/"runs/run"))).done == 5
    assert "step-00000006" in capsys.readouterr().out

@posix
@pytest.mark.parametrize("name, text, error", [
    ("metrics.jsonl", '{"loss": 1}\n[1]\nnull\n{"step": "x"}\n{"step": 1, "loss": ' + "9"*400 + "}\n" + nested(1000) + "\n" + '{"step": 2, "loss": 3.5}\n', ""),
    ("metrics.jsonl", None, "metrics.jsonl is no regular file"), ("result.json", "[]", "result.json can't be used"),
    ("result.json", '{"steps": "6"}', "result.json can't be used"), ("result.json", None, "result.json is no regular file")])
def test_other_files_that_are_wrong(stopped, name, text, error):
    "Rows that are none are left out; whatever else is wrong is named, and a pipe isn't waited for"
    path = stopped/"runs/run"/name
    path.unlink()
    if text is None: os.mkfifo(path)
    else: path.write_text(text)
    if error:
        with fails(InputError, error): resume(stopped)
    else:
        assert resume(stopped)[1]["steps"] == 12
        assert [r["step"] for r in rows(stopped/"runs/run") if "loss" in r] == [2, *range(7, 13)]

# Signals

@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_loader_that_stalls(tmp_path, monkeypatch, number):
    "A signal doesn't wait for it: the run is saved while the loader stalls, and goes on from there"
    if signal.getsignal(number) == signal.SIG_IGN: pytest.skip("these tests were started so that they ignore it, by nohup for example")
    starts, woken, ended = Batches.starts, threading.Event(), []
    def stall(self, i):
        if i == 5: os.kill(os.getpid(), number); ended.append(woken.wait(TIMEOUT))
        return starts(self, i)
    with monkeypatch.context() as m:
        m.setattr(Batches, "starts", stall)
        trainer = Trainer(options(tmp_path, steps=8), progress=False)
        res = trainer.fit()
    assert not ended and res["interrupted"] and 4 <= res["steps"] <= 5 and trainer.signal == number
    woken.set()
    assert ("val_loss" in res) == (number == signal.SIGINT)
    assert resume(tmp_path)[1]["steps"] == 8

@posix
@pytest.mark.parametrize("where", ["evaluate", "generate"])
def test_sigterm_at_the_end(tmp_path, monkeypatch, where):
    "SIGTERM in the last evaluation or sample: the checkpoint of the last step is there, and resuming finishes the run"
    went_on = []
    def stopped(*args, **kw): signal.raise_signal(signal.SIGTERM); went_on.append(where)
    with monkeypatch.context() as m:
        if where == "evaluate": m.setattr(Stepper, "evaluate", stopped)
        else: m.setattr(validator, "generate", stopped)
        trainer = Trainer(options(tmp_path, num_evals=1), progress=False)
        res = trainer.fit()
    assert not went_on and res["interrupted"] and "val_loss" not in res and trainer.signal == signal.SIGTERM
    assert newest(tmp_path/"runs/run/checkpoints").name == "step-00000006"
    assert resume(tmp_path)[1]["val_loss"] and (tmp_path/"runs/run/report.html").exists()

@posix
def test_nohup(monkeypatch):
    "Who asked for SIGHUP to be ignored, as nohup does, meant it"
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as s: signal.raise_signal(signal.SIGHUP)
        assert s.got is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally: signal.signal(signal.SIGHUP, was)

def test_what_is_said_in_the_middle_of_a_print():
    "Python refuses to print from a handler while it prints: the run must not end of it. Several processes offer no second press"
    def refuses(text): raise RuntimeError("reentrant call")
    with Signals(refuses) as s: signal.raise_signal(signal.SIGINT)
    assert s.got == signal.SIGINT
    said = []
    with Signals(said.append) as s:
        s.alone = False
        for _ in range(4): signal.raise_signal(signal.SIGINT)
    assert said == ["stopping after this step, then saving"]*4
