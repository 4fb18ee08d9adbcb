"Stopped and resumed: the same bits, whatever stops a run and whenever; broken checkpoints are passed over, and say so."
import json, os, random, re, shutil, signal, subprocess, sys, time
from dataclasses import fields
from pathlib import Path
import pytest, torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from llm_speedrun.train import saving
from llm_speedrun.measure import version_of
from llm_speedrun.runs import Stepper
from llm_speedrun.train.options import TrainConfig
from llm_speedrun.train.saving import *
from llm_speedrun.train.trainer import *
from small import NANO, VOCAB, fails, nano, options, texts, write_bins
from test_trainer import COMMAND, curve, names, needs_command, posix, rows, start, wait_for

FULL = "bf16,flash,fused_ops,chunked_ce"

def stop_at(monkeypatch, step, number=signal.SIGINT):
    "The signal arrives while the step after `step` others is under way"
    call, count = Stepper.__call__, [0]
    def pressed(self, *batches):
        count[0] += 1
        if count[0] == step: os.kill(os.getpid(), number)
        return call(self, *batches)
    monkeypatch.setattr(Stepper, "__call__", pressed)

def go(folder, **kw): return train(options(folder, **kw), progress=False)
def resume(folder, **kw): return train(TrainConfig(resume=str(folder/"runs/run"), **kw), progress=False)
def state(trainer):
    tensors = {}
    taken_apart(dict(model=trainer.run.model.state_dict(), state=trainer.state()), tensors)
    return {k: t.clone() for k, t in tensors.items()}

# The same bits

DATA = dict(stream=dict(stream=True), mixture=dict(data="mixture"), average=dict(ema=.9, schedule="wsd"), documents=dict(documents=True))

@posix
@pytest.mark.parametrize("rungs", ["naive", "flash,fused_adamw", "bf16,bf16_weights", f"{FULL},fp8,fused_adamw",
                                   pytest.param("adamw8bit", marks=pytest.mark.skipif(not version_of("torchao"), reason="needs torchao"))])
def test_the_same_bits(tmp_path, monkeypatch, rungs, **more):
    "Twelve steps of two micro-batches at once, and five and seven: weights, moments, scales, losses"
    how = dict(rungs=rungs, steps=12, accumulate=2, evals=3, deterministic=True) | more
    whole, res = go(tmp_path/"whole", **how)
    with monkeypatch.context() as m:
        stop_at(m, 4 + 5)     # the trial before a run takes four
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
@pytest.mark.parametrize("kind", DATA)
def test_the_same_bits_with(tmp_path, monkeypatch, kind):
    "The same with a stream, a mixture, an average of the weights, and attention within documents"
    how = DATA[kind] | (dict(data=f"{write_bins(tmp_path/'a')}:2,{write_bins(tmp_path/'b')}:1") if kind == "mixture" else {})
    if kind in ("stream", "documents"): how["data"] = str(texts(tmp_path/"texts"))
    test_the_same_bits(tmp_path, monkeypatch, "naive", **how)

@posix
def test_another_micro_batch(tmp_path, monkeypatch):
    "Tokens of a step are held: the same windows in the same order, and losses to the last digits"
    seen, call = [], Stepper.__call__
    def look(self, *batches):
        seen.append(torch.cat([x for x, _ in batches]))
        return call(self, *batches)
    monkeypatch.setattr(Stepper, "__call__", look)
    whole, _ = go(tmp_path/"whole", steps=8)
    windows = seen[4:]; seen.clear()
    with monkeypatch.context() as m:
        stop_at(m, 4 + 3)
        go(tmp_path/"parts", steps=8)
    first = seen[4:]; seen.clear()
    rest, _ = resume(tmp_path/"parts", batch=1)
    assert (rest.cfg.batch, rest.cfg.accumulate) == (1, 4)
    assert all(map(torch.equal, windows, first + seen[4:]))
    assert curve(rest) == pytest.approx(curve(whole), rel=1e-4)

# Signals

@needs_command
@posix
def test_sigterm(tmp_path):
    "The command stops within ten seconds with code 143, says how to go on, and does"
    p, run = start(tmp_path, "naive"), tmp_path/"runs/run"
    wait_for(p, lambda: (run/"metrics.jsonl").exists() and (run/"metrics.jsonl").stat().st_size)
    t0 = time.time(); p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 143 and time.time() - t0 < 10 and "Traceback" not in err, err
    steps = json.loads((run/"result.json").read_text())["steps"]
    assert f"stopped after step {steps}; --resume {run}" in out and load_file(run/"model.safetensors")
    cmd = [str(COMMAND), "--resume", str(run), "--steps", str(steps + 3)]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in rows(run) if "loss" in r] == list(range(1, steps + 4))

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from llm_speedrun.model import WORKLOADS
from llm_speedrun.train.saving import checkpoints, newest
from llm_speedrun.train.trainer import TrainConfig, train
from small import NANO, options
WORKLOADS["nano"] = NANO
folder, rng, STEPS = Path(sys.argv[1]), random.Random(0), int(sys.argv[3])
run = folder/"runs/run"
def child():
    "Train, from the beginning or from where it stopped, in a process of its own; returns its number"
    pid = os.fork()
    if pid: return pid
    there = newest(run/"checkpoints", say=lambda *a: None)
    cfg = TrainConfig(resume=str(run)) if there else options(folder, steps=STEPS, save_minutes=0., overwrite=True, sample=1)
    try: train(cfg, progress=False)
    except BaseException as e: print("FAILED", type(e).__name__, e, flush=True)
    finally: os._exit(0)
def last(): return int(c[-1].name[5:]) if (c := checkpoints(run/"checkpoints")) else 0
kills = 0
while last() < STEPS and kills < 2*STEPS:
    at, goal, pid = last(), rng.randint(1, 2), child()
    end = time.time() + 60
    while time.time() < end and last() < min(STEPS, at + goal): time.sleep(.002)
    if last() >= STEPS: os.waitpid(pid, 0); break
    time.sleep(rng.random()*.02)
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0); kills += 1
if not (run/"result.json").exists(): os.waitpid(child(), 0)
print("kills", kills)
"""

@posix
def test_killed_again_and_again(tmp_path, steps=int(os.environ.get("KILLED_STEPS", 6))):
    "kill -9 at random moments, most of them while a checkpoint is written: every run resumes, on the curve of no kill (more with KILLED_STEPS)"
    whole, _ = go(tmp_path/"whole", steps=steps)
    cmd = [sys.executable, "-c", KILLS, str(tmp_path), str(Path(__file__).parent), str(steps)]
    env = os.environ | dict(OMP_NUM_THREADS="1")
    out = subprocess.run(cmd, capture_output=True, text=True, timeout=60 + 10*steps, env=env)
    assert out.returncode == 0, out.stderr[-2000:]
    print(out.stdout)
    assert int(re.search(r"kills (\d+)", out.stdout)[1]) >= steps // 4 and "FAILED" not in out.stdout, out.stdout
    got = [r for r in rows(tmp_path/"runs/run") if "loss" in r]
    assert [r["step"] for r in got] == list(range(1, steps + 1))
    assert [r["loss"] for r in got] == pytest.approx(curve(whole), rel=1e-4)
    assert not list((tmp_path/"runs/run/checkpoints").glob("*.tmp")) and len(checkpoints(tmp_path/"runs/run/checkpoints")) <= 3

# Broken checkpoints and full disks

@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, nano):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 4 + 6)
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
    assert re.search(r"passing over \S+step-00000006: \w+", said) and "going on from" in said and trainer.done == 5
    trainer.fit()
    assert [r["step"] for r in rows(stopped/"runs/run") if "loss" in r] == list(range(1, 13))

@posix
def test_nothing_to_go_on_from(stopped):
    "All are broken: said so, and nothing is touched"
    for c in checkpoints(stopped/"runs/run/checkpoints"): damage("torn", c)
    was = (stopped/"runs/run/metrics.jsonl").read_bytes()
    with fails(FileNotFoundError, "has no whole checkpoint to go on from"): resume(stopped)
    assert (stopped/"runs/run/metrics.jsonl").read_bytes() == was

def test_a_full_disk(tmp_path, monkeypatch, capsys):
    "Checkpoints that can't be written are told, training goes on, and the ones from before stay"
    real, full = saving.save_file, [False]
    def save_file(*args, **kw):
        if full[0] and "checkpoints" in str(args[1]): raise SafetensorError("I/O error: No space left on device")
        return real(*args, **kw)
    monkeypatch.setattr(saving, "save_file", save_file)
    call = Stepper.__call__
    def step(self, *batches):
        full[0] = len(done) >= 4 + 4
        done.append(1)
        return call(self, *batches)
    done = []
    monkeypatch.setattr(Stepper, "__call__", step)
    with fails(OSError, "No space left"): train(options(tmp_path, steps=8, save_minutes=0.))
    run = tmp_path/"runs/run"
    assert "can't be written: I/O error: No space left on device" in capsys.readouterr().out
    assert [r["step"] for r in rows(run) if "loss" in r] == list(range(1, 9)) and load_file(run/"model.safetensors")
    assert not broken(newest(run/"checkpoints")) and not list((run/"checkpoints").glob("*.tmp"))

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
    real, n = saving.save_file, [0]
    def save_file(*args, **kw):
        n[0] += 1
        if n[0] == 1: raise SafetensorError("I/O error: No space left on device")
        return real(*args, **kw)
    monkeypatch.setattr(saving, "save_file", save_file)
    stop_at(monkeypatch, 4 + 2, signal.SIGTERM)
    train(options(tmp_path, steps=8, save_minutes=0.))
    assert "before step 2 could not be written" in capsys.readouterr().out
    assert newest(tmp_path/"runs/run/checkpoints").name == "step-00000002"

@posix
def test_a_second_interruption(tmp_path, monkeypatch):
    "Ctrl-C in a step and again in the last evaluation: the checkpoint is there, and the run goes on from it"
    signal.signal(signal.SIGINT, signal.default_int_handler)     # jobs in a shell's background start out ignoring it
    stop_at(monkeypatch, 4 + 3)
    with monkeypatch.context() as m:
        m.setattr(Trainer, "evaluate", lambda self: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5))
        with fails(KeyboardInterrupt, "interrupted again"): train(options(tmp_path), progress=False)
    monkeypatch.undo()
    trainer, res = resume(tmp_path)
    assert res["steps"] == 6 and [r["step"] for r in rows(tmp_path/"runs/run") if "loss" in r] == list(range(1, 7))

@posix
def test_going_on_from_an_older_checkpoint(tmp_path, monkeypatch):
    "Checkpoints that couldn't be read go when the run goes on: they'd count as the newest, and push out those that are made now"
    go(tmp_path, steps=8, save_minutes=0., keep_last=4)
    run = tmp_path/"runs/run"
    for c in checkpoints(run/"checkpoints")[-2:]: (c/"about.json").write_text("{}")
    (run/"result.json").unlink()
    stop_at(monkeypatch, 4 + 1)
    _, res = resume(tmp_path, keep_last=3)
    names = [c.name for c in checkpoints(run/"checkpoints")]
    assert res["steps"] == 7 and f"step-{7:08}" in names and not any(broken(run/"checkpoints"/n) for n in names) and len(names) <= 4

def test_sigterm_is_not_forgotten():
    "SIGINT after SIGTERM changes nothing; SIGTERM after SIGINT does"
    for numbers, got in (((15, 2), 15), ((2, 15), 15), ((2,), 2)):
        s = Signals(); s.got = None
        for n in numbers: s.note(n, None)
        assert s.got == got

# Options

@pytest.mark.parametrize("option, kind, message", [
    (dict(seed=1), ValueError, "keeps its options: leave out seed"), (dict(lr=.1, rungs="flash"), ValueError, "leave out lr, rungs"),
    (dict(batch=3), ValueError, "has 4 sequences, which batches of 3 don't divide"), (dict(batch=-1), ValueError, "batch must be a whole number from 0"),
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
        "data stream documents vocab workload seq init rungs batch accumulate hardware deterministic steps total_tokens minutes epochs target "
        "step_tokens lr schedule warmup weight_decay clip ema seed evals eval_tokens sample samples name out overwrite track profile timings "
        "save_minutes keep_last resume").split()
