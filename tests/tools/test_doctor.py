"The doctor finds what would fail, one failure at a time, says what to do, and writes nothing."
import os, re, shutil, sys
from collections import namedtuple
from dataclasses import replace
from itertools import cycle, repeat
from types import SimpleNamespace
import numpy as np, pytest, torch
from llm_speedrun.tools import doctor, machine_checks
from llm_speedrun.data.batches import Batches
from llm_speedrun.data.corpus import train_tokenizer, write_shards
from llm_speedrun.tools.doctor import check_resume, check_run, checkpoint_bytes, examine, first_steps
from llm_speedrun.tools.machine_checks import check_gpu, check_versions, Finding, wrong_versions
from llm_speedrun.measure import Timings, version_of
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.stepper import Stepper
from llm_speedrun.cli import speedrun_doctor
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.checkpoint.format import checkpoints
from llm_speedrun.train.resolve import TrainPlan
from llm_speedrun.train.trainer import train
from helpers import quick_programs
from helpers.tiny_runs import nano, options, words
from helpers.timeouts import TIMEOUT

def problems(found): return [f.text for f in found if f.level == "problem"]
def checkup(cfg): return [*examine(cfg)]
def notes(found, about): return [f.text for f in found if (f.level, f.about) == ("note", about)]
def tree(folder): return {p.relative_to(folder): p.is_file() and p.stat().st_mtime_ns for p in folder.rglob("*")} # a trial changes a folder's time

# A run that would work

def test_all_is_well(tmp_path):
    "Each thing is looked at and well; nothing is written, and neither options nor random state change"
    cfg = options(tmp_path, steps=40)
    before, was, state = tree(tmp_path), replace(cfg), torch.get_rng_state()
    found = checkup(cfg)
    assert not problems(found) and (tree(tmp_path), cfg) == (before, was) and torch.equal(torch.get_rng_state(), state)
    assert {f.about for f in found} >= {"software", "GPU", "rungs", "data", "run", "trial", "loader", "disk", "start", "time"}
    said = {f.about: f.text for f in found if f.level == "ok"}
    assert f"torch {version_of('torch')}" in said["software"] and "flash" in said["rungs"]
    assert any("40 steps, 2,560 tokens" in f.text for f in found if f.about == "time")
    assert re.search(r"the first step was done after [\d.]+ seconds", said["start"])
    assert any("bins: 4,097 tokens to train on, 1,025 to validate" in f.text for f in found)
    assert notes(found, "data") == ["it came without a tokenizer, so samples will be numbers and an export has none: "
                                    "put its tokenizer.json beside the .bin"]

def test_a_cpu_runs_no_rungs_of_gpus(monkeypatch):
    "Neither named as possible nor said to lack something that a CPU wouldn't help"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = [*machine_checks.check_rungs()]
    assert found[0].text.endswith("; all others need a GPU") and {"flash", "bf16", "fused_adamw", "ddp"} <= {*re.findall(r"\w+", found[0].text)}
    for name in "tf32 cuda_graphs flash4 fp8 torchao_fp8 fp8_attention fp8_activations epilogues fused_ce fp8_epilogues".split():
        assert not [f for f in found if re.search(rf"\b{name}\b", f.text)], name

def test_what_it_says_of_time_and_disk_is_so(tmp_path):
    "A run takes the steps, tokens and bytes that were predicted"
    cfg = options(tmp_path, steps=6, keep_last=1, save_minutes=0.)
    doc = doctor.Trainer(replace(cfg), progress=False)
    t = first_steps(doc)
    weights, whole = checkpoint_bytes(doc)
    doc.run_dir.release() # of the folder
    trainer, res = train(replace(cfg), progress=False)
    sizes = [sum(p.stat().st_size for p in c.glob("*.safetensors")) for c in (trainer.folder/"checkpoints").iterdir()]
    assert len(sizes) <= 2 and all(whole <= s < 1.2*whole + 20_000 for s in sizes) # headers and random states
    assert weights <= (trainer.folder/"model.safetensors").stat().st_size < weights + 5000
    assert t.tokens == 4*16 and t.losses == [r["loss"] for r in trainer.rows() if "loss" in r][:2] # the steps of training

@pytest.mark.parametrize("recipe", ["adamw", "speedrun", "without_muon"])
def test_it_takes_the_steps_of_training(tmp_path, monkeypatch, recipe):
    "Each phase of the recipe is timed as training takes it: with its updates, its shorter sequences, its micro-batches; and counts by its share"
    cfg, taken = options(tmp_path, steps=12, recipe=recipe, micro_batch_size=4, step_tokens=16*16), []
    was = Stepper.__call__
    def step(self, *batches):
        taken.append([tuple(x.shape) for x, _ in batches])
        return was(self, *batches)
    monkeypatch.setattr(Stepper, "__call__", step)
    train(replace(cfg), progress=False)
    training, n = taken[-0:], len(taken)
    doc, ms = doctor.Trainer(replace(cfg, name="b"), progress=False), {}
    taken.clear()
    def phase_ms(trainer, phase, batches, settle):
        taken.clear()
        trainer.train_step(phase.step, *next(batches))
        ms[phase.updates, phase.pieces] = [*taken]
        return 100.*len(taken), .5
    monkeypatch.setattr(doctor, "phase_ms", phase_ms)
    t = first_steps(doc)
    doc.run_dir.release()
    per_step = [dict(adamw=[1]*12).get(recipe) or [4]*4 + [2]*4 + [1]*4][0]
    want, i = [], n - sum(per_step) # what came before was the trial's
    for k in per_step: want.append(training[i:i + k]); i += k
    assert {str(v) for v in ms.values()} == {str(w) for w in want}
    assert t.ms == pytest.approx(100*sum(per_step)/12) and t.once_s >= .5*len(ms)

@pytest.mark.parametrize("more", [dict(), dict(num_samples=2, sample_tokens=20), dict(sample_tokens=0, num_evals=6)], ids=str)
def test_its_parts_are_those_of_the_run(tmp_path, more):
    "Under the same names, with as many evaluations, samples and checkpoints, and in the same form"
    cfg = options(tmp_path, **more)
    doc = doctor.Trainer(replace(cfg), progress=False)
    t = first_steps(doc)
    p, counted = doctor.pace(doc, t), replace(t, eval_s=(1., 0.), sample_s=(1., 0.), once_s=0., ms=2e3, loader_ms=0.)
    found, exact = doctor.parts(doc, t, p), doctor.parts(doc, counted, replace(p, step_s=2.))
    doc.run_dir.release()
    trainer, res = train(replace(cfg), progress=False, timings=Timings())
    run = trainer.timings.parts()
    assert found.keys() == run.keys() - {"the rest"} and min(found.values()) >= 0
    evals = sum("val_loss" in r for r in trainer.rows())
    samples = 1 + len((trainer.folder/"samples.jsonl").read_text().splitlines()) if cfg.num_samples else 1
    assert (exact["evaluations"], exact["samples"], exact["training"]) == (evals, samples, 2.*5)

def test_its_own_checks_are_not_the_start_of_a_run(tmp_path):
    "The doctor looks at software and GPU before it makes a trainer: the start that it predicts doesn't have that"
    timings = Timings()
    with timings("open the data"): pass
    with timings(doctor.CHECKS): pass
    timings.stop()
    timings.phases[-1][1], timings.total = 2., 5.
    trainer = SimpleNamespace(timings=timings)
    assert doctor.start_seconds(trainer) == 3.
    assert doctor.CHECKS not in next(doctor.check_start(trainer)).text
    asked = Timings()
    found = list(doctor.examine(options(tmp_path), timings=asked))
    assert [p[2] for p in asked.phases if p[0] == doctor.CHECKS] == [0] and asked.total and found

def test_what_comes_once_is_counted_once(tmp_path, clock, monkeypatch):
    "Recording and compiling take seconds in the first steps of a phase: a run waits for them once, not at each step"
    calls = []
    def step(*args): calls.append(args); clock.sleep(2. if len(calls) <= 3 else .1)
    trainer = SimpleNamespace(train_step=step, device=torch.device("cpu"))
    ms, once_s = doctor.phase_ms(trainer, SimpleNamespace(step=5), repeat(("x", "y")), 0.)
    assert ms == pytest.approx(100.) and once_s == pytest.approx(3*2. + .1 - 4*.1)
    doc = doctor.Trainer(options(tmp_path), progress=False)
    try:
        t = first_steps(doc)
        parts = lambda **kw: doctor.parts(doc, u := replace(t, ms=1., **kw), doctor.pace(doc, u))
        assert parts(once_s=60.)["training"] - parts(once_s=0.)["training"] == pytest.approx(60)
        monkeypatch.setattr(doctor, "checkpoint_bytes", lambda trainer: (30, 60)) # the weights' file shares the disk with the last checkpoint
        last = lambda **kw: parts(bytes_s=1., **kw)["last checkpoint and weights"]
        assert last(eval_s=(0., 9.), sample_s=(0., 9.), draw_s=(0., 9.)) == pytest.approx(90)
        assert last(eval_s=(5., 9.), sample_s=(6., 9.), draw_s=(7., 9.)) == pytest.approx(90 - 18) # what is done meanwhile
        assert last(eval_s=(95., 0.)) == 0
    finally: doc.run_dir.release()

@pytest.mark.parametrize("done, evals", [(0, 10), (30, 9), (250, 2), (290, 1)])
def test_what_is_left_of_a_resumed_run(monkeypatch, done, evals):
    "It evaluates at the steps at which it would have, so as many are left as come after `done`, at the distance that they always have"
    plan = TrainPlan(options=SimpleNamespace(steps=300, num_evals=10, eval_every=None, save_minutes=0, save_every=None), **dict.fromkeys("model recipe sequences rows_here warmup preset why".split()))
    trainer = SimpleNamespace(cfg=plan.options, plan=plan, done=done)
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda trainer: (10, 40))
    p = doctor.pace(trainer, t := SimpleNamespace(ms=100., loader_ms=0., eval_s=(1., 0.), bytes_s=4.))
    assert (p.evals, p.saves, p.between_s, p.write_s, p.wait_s) == (evals, evals - 1, 4., 10., 6.)
    plan.options.save_minutes = .1 # a best one is saved only if the last one is six seconds old
    p = doctor.pace(trainer, t)
    assert (p.evals, p.saves, p.between_s, p.wait_s) == (evals, (evals - 1)//2, 8., 2.)
    plan.options.save_minutes = 10
    assert doctor.pace(trainer, t).between_s == doctor.BEST_SECONDS == 60
    assert p.evals == sum(map(plan.eval_due, range(done + 1, 301)))
    plan.options.save_every = 20 # steps of a tenth of a second: sooner than a new best one may be saved
    p = doctor.pace(trainer, t)
    assert (p.saves, p.between_s, p.wait_s) == (15 - done//20, 2., 8.)
    plan.options.save_every = .5
    assert doctor.pace(trainer, t).between_s == 15
    plan.options.eval_every = .1
    assert doctor.pace(trainer, t).evals == evals

def test_a_gpu_is_warm_before_a_step_is_timed(monkeypatch):
    "Its clock falls as it gets warm: before the first timed step it takes steps for `SETTLE` seconds, on several batches"
    taken, timed = [], []
    def sample_ms(f, n):
        for _ in range(n): f()
        timed.append((len(taken), n))
        return [100. if len(taken) < 80 else 110.]*n    # as if it was slower from the eightieth step on
    monkeypatch.setattr(doctor, "sample_ms", sample_ms)
    trainer = SimpleNamespace(train_step=lambda *args: taken.append(args), device=torch.device("cuda"))
    ms, _ = doctor.phase_ms(trainer, SimpleNamespace(step=5), cycle([("x", "y"), ("z", "y")]), doctor.SETTLE)
    assert ms == 110. and timed[-1][1] == round(10*doctor.LONG) and {b for _, b, _ in taken} == {"x", "z"}

def test_accumulation_and_a_schedule_in_minutes(tmp_path):
    "Micro-batches are those of the run, and where steps aren't given the trainer's choice is told"
    found = checkup(options(tmp_path, steps=0, minutes=.01, grad_accum_steps=3))
    assert not problems(found) and any("192 tokens, 3 times 4 sequences of 16" in f.text for f in found)
    assert any(f.about == "time" and "steps, " in f.text for f in found)

def test_notes(tmp_path):
    "Worth knowing, and no failure: many passes, a wide vocabulary, files that will be replaced"
    train(options(tmp_path), progress=False)
    (tmp_path/"runs"/"run"/"mine").write_text("mine")
    cfg = options(tmp_path, model="tiny", steps=5000, overwrite=True)
    before = tree(tmp_path)
    found = checkup(cfg)
    assert not problems(found) and tree(tmp_path) == before
    assert "learns it by heart" in notes(found, "time")[0] and "its vocabulary is 300 and the model's 1,024" in notes(found, "data")[0]
    assert "--overwrite will replace" in notes(found, "run")[0]
    assert not notes(checkup(replace(cfg, name="new")), "run") # there is nothing to replace

def test_the_folder_is_given_back(tmp_path, monkeypatch):
    "Also after a check that fails: what was made for the run is gone while the error is still in somebody's hands"
    cfg = options(tmp_path)
    before = tree(tmp_path)
    monkeypatch.setattr(doctor, "first_steps", lambda trainer: {}["no such key"])
    with pytest.raises(KeyError) as e: [*check_run(cfg)]
    assert tree(tmp_path) == before and e.value # whose traceback holds the trainer

# A run that would fail

def shards(folder):
    "A folder of tokenized text, with its meta.json"
    docs = [f"Text {i}: {i} times 3 is {3*i}.\n" * 9 for i in range(99)]
    write_shards(docs, train_tokenizer(docs, 280), folder)
    return folder

def inject(what, folder, monkeypatch):
    "Make one thing fail; returns options"
    cfg = options(folder)
    bin, run = folder/"bins"/"train.bin", folder/"runs"/"run"
    if what == "missing data": cfg.data = str(folder/"nowhere")
    if what == "no text": (folder/"empty").mkdir(); cfg.data = str(folder/"empty")
    if what == "high token": np.full(4097, 999, "<u2").tofile(bin)
    if what == "odd shard": bin.write_bytes(bin.read_bytes()[:-1])
    if what == "short text": os.truncate(bin, 20)
    if what == "cut shard":
        cfg.data = str(shards(folder/"shards"))
        os.truncate(folder/"shards"/"train_000.bin", 2000)
    if what == "torn meta": (shards(folder/"shards")/"meta.json").write_text('{"vocab": '); cfg.data = str(folder/"shards")
    if what == "unknown rung": cfg.rungs = "flahs"
    if what == "rung can't run": monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "it is an old card"); cfg.rungs = "bf16"
    if what == "rungs clash": cfg.rungs = "checkpoint,selective_checkpoint"
    if what == "folder exists": run.mkdir(parents=True)
    if what == "out is a file": cfg.out = str(bin)
    if what == "read-only":
        def refuse(*args, **kw): raise PermissionError(13, "Permission denied")
        monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    if what == "no space":
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda p: namedtuple("usage", "total used free")(9**9, 9**9, 50_000))
    if what == "loss": cfg.lr = 1e30
    if what == "memory": monkeypatch.setattr(Stepper, "evaluate", out_of_memory)
    if what == "bad number": cfg.width = 33
    if what == "no run": cfg = TrainConfig(resume=str(folder/"nowhere"))
    if what == "no checkpoint":
        train(cfg, progress=False)
        for p in (run/"checkpoints").rglob("manifest.json"): p.unlink()
        cfg = TrainConfig(resume=str(run))
    if what == "finished run": train(cfg, progress=False); cfg = TrainConfig(resume=str(run))
    if what == "other config": run.mkdir(parents=True); (run/"config.json").write_text("{}"); cfg = TrainConfig(resume=str(run))
    if what == "a bug": monkeypatch.setattr(Batches, "__next__", lambda self: {}["no such key"])
    return cfg

def out_of_memory(*args): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

FAILURES = {
    "missing data": "nowhere' is neither a corpus", "no text": "has no text", "high token": "train.bin: token 999",
    "odd shard": "train.bin has 8193 bytes", "short text": "train.bin: 10 tokens are fewer than one batch",
    "cut shard": "train_000.bin has 1,000 tokens, and .* were written: it was cut off", "torn meta": "meta.json is no JSON",
    "unknown rung": "Did you mean 'flash'", "rung can't run": "rung 'bf16' cannot run here: it is an old card",
    "rungs clash": "exclude each other", "folder exists": "run exists already", "out is a file": "choose another --out",
    "read-only": "can't be written into .* choose another --out", "no space": "are free in .* a smaller --keep_last",
    "loss": "two steps .* gradients' norm nan: try a smaller --lr", "memory": "out of GPU memory: choose a smaller --micro_batch_size",
    "bad number": "a width of 33 is no whole number of heads", "no run": "nowhere is not the folder of a run",
    "no checkpoint": "has no valid checkpoint", "finished run": "has taken its 6 steps", "other config": r"\w",
    "a bug": "KeyError, which nobody foresaw: 'no such key'"}

@pytest.mark.parametrize("what", FAILURES)
def test_failure(tmp_path, monkeypatch, capsys, what):
    "Each failure is one problem that says what to do and exit code 1, without a traceback or a file written"
    cfg = inject(what, tmp_path, monkeypatch)
    before = tree(tmp_path)
    found = checkup(cfg)
    said = problems(found)
    assert len(said) == 1 and re.search(FAILURES[what], said[0]), said
    assert tree(tmp_path) == before
    monkeypatch.setattr(doctor, "examine", lambda *args: iter(found))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as e: speedrun_doctor(words(cfg))
    out, err = capsys.readouterr()
    assert (e.value.code, err) == (1, "") and "training would not go well: 1 problem" in out and "Traceback" not in out

def test_a_failure_ends_what_depends_on_it(tmp_path):
    "What was not looked at is said, and the machine is looked at in any case"
    found = checkup(options(tmp_path, data="nowhere"))
    assert [f.level for f in found][-2:] == ["problem", "note"] and "was not looked at" in found[-1].text
    assert {"software", "GPU", "rungs"} <= {f.about for f in found}

def test_learning_rate_that_is_too_large(tmp_path):
    "A loss that climbs above guessing is told, and the run would work"
    found = checkup(options(tmp_path, lr=10.))
    assert not problems(found) and "--lr 10 looks too large" in notes(found, "trial")[0]

def test_slow_loader(tmp_path, monkeypatch, clock):
    "A loader that is slower than the step is told, and the time is the loader's"
    def slower(kind, name, seconds):
        was = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args: (clock.sleep(seconds), was(*args))[1])
    slower(Batches, "__getitem__", .1); slower(Stepper, "__call__", .01)
    found = checkup(options(tmp_path, steps=1000))
    assert "a batch takes 100.00 ms to load and 10.0 ms to train on" in (said := notes(found, "loader")[0]) and "training may wait for its data" in said
    assert any("1 min 40 s training" in f.text for f in found if f.about == "time")

def test_resume(tmp_path):
    "A run to go on with: what is left, which checkpoint it goes on from, and the torn one that is passed over"
    train(options(tmp_path, save_minutes=0.), progress=False)
    run = tmp_path/"runs"/"run"
    last = sorted((run/"checkpoints").iterdir())[-1]
    os.truncate(last/"model.safetensors", 100)
    train(options(tmp_path, name="other", steps=9), progress=False)
    shutil.copytree(tmp_path/"runs/other/checkpoints/step-00000009", run/"checkpoints/step-00000009")
    before = tree(tmp_path)
    found = checkup(TrainConfig(resume=str(run), steps=20))
    assert not problems(found) and tree(tmp_path) == before
    other, torn = notes(found, "resume")
    assert "step-00000009: it is of another run" in other and f"passing over {last}" in torn
    assert any("15 steps after the 5 that were taken" in f.text for f in found)

# The machine

def fake_gpu(monkeypatch, free=70, count=1):
    "PyTorch says that there is a GPU"
    for name, value in dict(is_available=True, get_device_name="NVIDIA Test", get_device_capability=(8, 6), device_count=count,
                            mem_get_info=(free*2**30, 80*2**30)).items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    monkeypatch.setattr(machine_checks, "driver_version", lambda: "999.1")

def test_gpu(monkeypatch):
    "A GPU is named with all that it has; memory that others hold, and GPUs that stay unused, are told"
    fake_gpu(monkeypatch, free=79)
    f, = check_gpu()
    assert f == Finding("ok", "GPU", "NVIDIA Test, 80 GiB, compute capability 8.6, driver 999.1")
    fake_gpu(monkeypatch, free=20, count=8)
    unused, held = notes(check_gpu(), "GPU")
    assert "one of the 8" in unused and "only 20.0 of 80.0 GiB are free" in held

@pytest.mark.parametrize("driver, cuda, part", [(None, None, "none that PyTorch can use"), ("999.1", None, "is built without CUDA"),
                                                ("999.1", "13.0", "is built for CUDA 13.0")])
def test_no_gpu(monkeypatch, driver, cuda, part):
    "Without a GPU there is a note; with a driver and no GPU it says where to look"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine_checks, "driver_version", lambda: driver)
    f, = check_gpu()
    assert f.level == "note" and part in f.text

def test_versions(monkeypatch):
    "A requirement that isn't met is a note with the command that mends it; markers and local versions are understood"
    lines = ["torch>=99", "numpy", "no-such-package>1", "nothing>1; sys_platform == 'plan9'", "pytest>99; extra == 'dev'", "torch>=2.0"]
    monkeypatch.setattr(machine_checks.metadata, "requires", lambda p: lines)
    assert [r.name for r, v in wrong_versions()] == ["torch", "no-such-package"]
    said = notes(check_versions(), "software")
    assert "pip install 'torch>=99'" in said[0] and "no-such-package is not installed" in said[1]

# The command

def test_command(tmp_path, capsys):
    "Exit code 0 and its last line where training would work"
    speedrun_doctor(words(options(tmp_path)))
    assert capsys.readouterr().out.endswith("\ntraining would work\n") and not (tmp_path/"runs").exists()

def test_command_in_a_process(tmp_path):
    "Exit code 1, words on stdout alone, and nothing written"
    script = "import sys\nfrom llm_speedrun.cli import speedrun_doctor\nsys.exit(speedrun_doctor())\n"
    (tmp_path/"command.py").write_text(script)
    res = quick_programs.run([sys.executable, "command.py", "--data", "nowhere.txt", "--model", "tiny"], cwd=tmp_path,
                         capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT,
                         env=os.environ | dict(PYTHONIOENCODING="utf-8", COLUMNS="300"))
    assert (res.returncode, "Traceback" in res.stderr, [p.name for p in tmp_path.iterdir()]) == (1, False, ["command.py"])
    assert "problem  run      'nowhere.txt' is neither a corpus" in res.stdout and res.stdout.endswith("1 problem, see above\n")

def test_checkpoints_that_are_passed_over(tmp_path):
    "Only the last of them is followed by one that is taken, and none where all are broken"
    train(options(tmp_path, steps=6, save_minutes=0.), progress=False)
    run = tmp_path/"runs/run"
    *old, new = checkpoints(run/"checkpoints")
    (new/"manifest.json").unlink()
    found = notes(check_resume(TrainConfig(resume=str(run))), "resume")
    assert len(found) == 1 and found[0].endswith("manifest.json is missing. The one before it is taken")
    for c in old: (c/"manifest.json").unlink()
    found = notes(check_resume(TrainConfig(resume=str(run))), "resume")
    assert len(found) == len(old) + 1 and not [f for f in found if "is taken" in f]
