"A start tries what is wanted first, builds few models, remembers what it chose, and says how long it took."
import json, math, os, re, threading, time
from dataclasses import replace
from types import SimpleNamespace
import pytest, torch
from torch._subclasses.fake_tensor import FakeTensor
from llm_speedrun import choices as choices_module, measure, runs, step_builder
from llm_speedrun.train import ladder
from llm_speedrun.choices import Choices
from llm_speedrun.train.ladder import measure_ladder
from llm_speedrun.cli import speedrun_ladder
from llm_speedrun.train.config import LadderOptions
from llm_speedrun.io_utils import InputError
from llm_speedrun.measure import Timings, process_start
from llm_speedrun.model_config import workload
from llm_speedrun.rung_registry import find_rung, rung_name, rung_specs
from llm_speedrun.train import autotune, callbacks, presets as presets_module, resolve
from llm_speedrun.train.autotune import divisors, find_micro_batch
from llm_speedrun.train.presets import PRESETS, parse_rungs, preset, preset_of, presets
from llm_speedrun.train.trainer import Trainer, train
from helpers.tiny_runs import NANO, fails, nano, options, words

def out_of_memory(): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

@pytest.fixture
def gpu(monkeypatch):
    "A GPU of 40 GiB on which steps of at most `most` sequences fit; it notes the batches built and the limits set"
    said = SimpleNamespace(most=18, built=[], limits=[])
    def TrainStep(run, batch, lr):
        said.built.append(batch)
        return batch
    def mean_step_ms(batch, rows, timed, seed): return 7. if batch <= said.most else out_of_memory()
    class limit:
        def __init__(self, gib): said.limits.append(gib)
        def __enter__(self): pass
        def __exit__(self, *args): pass
    def warm_up(build, steps):
        build()()
        return None, SimpleNamespace(peak_gib=1., warmup_s=2.)
    for name, value in dict(build=lambda *a, **kw: SimpleNamespace(rungs=()), TrainStep=TrainStep, mean_step_ms=mean_step_ms, warm_up=warm_up,
                            memory_limit=limit, most_sequences=lambda: 64, gpu_gib=lambda: 40.).items(): monkeypatch.setattr(autotune, name, value)
    return said

# What fits

@pytest.mark.parametrize("rows", [1, 2, 17, 32, 48, 64, 96, 480, 512, 1112])
@pytest.mark.parametrize("most", [1, 5, 18, 63, 10**9])
def test_attempts_are_few(gpu, rows, most):
    "The largest divisor up to 64 is tried first, then at most half of it each time: nothing else is built"
    gpu.most = most
    t = find_micro_batch(NANO, [], rows)
    wanted = max(d for d in divisors(rows) if d <= 64)
    assert gpu.built[0] == wanted and len(gpu.built) <= 1 + math.log2(wanted) and gpu.built[-1] == t.batch <= most
    assert rows % t.batch == 0 and all(2*b <= a for a, b in zip(gpu.built, gpu.built[1:]))
    assert (t.ms, t.peak_gib, t.warmup_s) == (7., 1., 2.)

def test_what_fits_is_built_once(gpu):
    "Where the wanted batch fits there is one build, which is also the one that is timed"
    gpu.most = 10**9
    assert find_micro_batch(NANO, [], 32).batch == 32 and gpu.built == [32]

def test_room(gpu):
    "What is found leaves some memory for evaluations; what was asked for may have it all"
    find_micro_batch(NANO, [], 64, gib=12); find_micro_batch(NANO, [], 64, gib=12, batch=16)
    assert gpu.limits == [.95*12, 12]

def test_nothing_fits(gpu):
    "Where one sequence doesn't fit, the error says what to do"
    gpu.most = 0
    with fails(RuntimeError, "with one sequence of 32 tokens", "--rungs smallest", "--model or --seq_len"): find_micro_batch(NANO, [], 64, batch=48)
    assert gpu.built == [48, 16, 8, 4, 2, 1]

def test_cards_without_a_recording(gpu, monkeypatch):
    "Where nothing fits beside it, all sizes are tried without; smaller cards go on from there"
    monkeypatch.setattr(presets_module, "runnable", list) # here, too, where there is no GPU
    def build(config, rungs, **kw): return SimpleNamespace(rungs=[s.name for s in rungs])
    def TrainStep(run, batch, lr): return batch/2 + 4.5*("cuda_graphs" in run.rungs) # GiB
    def mean_step_ms(needs, *args): return 7. if needs <= gpu.limits[-1]/autotune.ROOM else out_of_memory()
    for f in (build, TrainStep, mean_step_ms): monkeypatch.setattr(autotune, f.__name__, f)
    found = autotune.fits(NANO, ["flash", "cuda_graphs"], (16, 12, 9, 5, 4.9, 1, .25, .2))
    assert [(r["micro"], len(r["rungs"])) for r in found] == [(16, 2), (8, 2), (8, 2), (1, 2), (8, 1), (2, 1), (0, 1), (0, 1)]
    assert all(r["micro"] == 0 for r in autotune.fits(NANO, ["flash"], (.25, .2)))

def test_other_errors_are_errors(gpu, monkeypatch):
    "What isn't a lack of memory is raised at once"
    def broken(*args): raise RuntimeError("a kernel is wrong")
    monkeypatch.setattr(autotune, "mean_step_ms", broken)
    with fails(RuntimeError, "a kernel is wrong"): find_micro_batch(NANO, [], 64)
    assert len(gpu.built) == 1

def test_micro_batch(monkeypatch):
    "Each half of the step's sequences is tried until one fits; of an odd number the next divisor"
    tried = []
    def peak(config, rungs, batch, micro): tried.append(micro); return 2.*micro
    monkeypatch.setattr(step_builder, "peak_gib", peak)
    assert step_builder.micro_batch(NANO, [], 64) == 64 and not tried     # on a CPU
    monkeypatch.setattr(step_builder, "default_device", lambda: torch.device("cuda"))
    assert step_builder.micro_batch(NANO, [], 64) == 32 and tried == [64, 32]
    assert step_builder.micro_batch(NANO, [], 48, room=30) == 12
    assert step_builder.micro_batch(NANO, [], 12, room=5) == 1 and tried[-4:] == [12, 6, 3, 1]
    with fails(RuntimeError, "1 × 32 tokens need over 1 GiB"): step_builder.micro_batch(NANO, [], 12, room=1)

@pytest.mark.cuda
def test_start_of_fastest(monkeypatch):
    "On a GPU the wanted batch of a small model fits at the first attempt"
    attempt, tried = autotune.try_micro_batch, []
    monkeypatch.setattr(autotune, "try_micro_batch", lambda *args, **kw: (tried.append(args), attempt(*args, **kw))[1])
    t = find_micro_batch(NANO, presets()["fastest16"], 32)
    assert t.batch == 32 and 0 < t.peak_gib < 8 and len(tried) == 1

@pytest.fixture
def builds(monkeypatch):
    "The shapes of the models that are built, but not those on fake tensors: a list that grows"
    real, seen = runs.baseline, []
    def baseline(*args, **kw):
        run = real(*args, **kw)
        if not isinstance(next(run.model.parameters()), FakeTensor): seen.append(run.model.config)
        return run
    monkeypatch.setattr(runs, "baseline", baseline)
    return seen

@pytest.mark.parametrize("option", [dict(), dict(micro_batch_size=4), dict(steps=0, minutes=.001)], ids=str)
def test_a_start_builds_two_models(tmp_path, builds, option):
    "One for the trial, which is timed too, and the run's own; options are settled on fake tensors"
    trainer = Trainer(options(tmp_path, **dict(rungs="flash", micro_batch_size=None) | option), progress=False)
    assert len(builds) == 2 and trainer.cfg.micro_batch_size in (4, 16)

# Presets

def test_nothing_in_8_bits():
    "`fastest16` has no rung that computes or keeps anything in 8 bits, and runs on an A100"
    for name in PRESETS["fastest16"].replace("half", "bf16").split():
        r = find_rung(name)
        assert "8" not in name and "fp8" not in r.needs.__name__, name
    assert set(presets()["fastest16"]) <= set(presets()["fastest"])

# Which list

@pytest.fixture
def unknown(monkeypatch):
    "No preset is recorded for this machine; two short lists are compared"
    lists = {"fastest": ["flash", "fused_adamw"], "fastest without fused_adamw": ["flash"]}
    monkeypatch.setattr(resolve, "recorded_preset", lambda config: "")
    monkeypatch.setattr(resolve, "candidates", lambda lacks, beside: lists)
    return lists

def test_a_recorded_preset_is_not_measured(tmp_path, monkeypatch):
    "On a CPU, and on a GPU whose fastest preset is recorded, `auto` takes that at once; it is noted with all its rungs"
    def choose_rungs(*args): raise AssertionError("measured")
    monkeypatch.setattr(resolve, "choose_rungs", choose_rungs)
    for name in ("cpu", "safe"):
        monkeypatch.setattr(resolve, "recorded_preset", lambda config: name)
        trainer = Trainer(options(tmp_path, rungs="auto", recipe="adamw", name=name), progress=False)
        assert [*map(rung_name, trainer.cfg.rungs.split(","))] == [*trainer.run.rungs] and trainer.plan.preset == name
        assert {rung_name(r) for r in trainer.cfg.rungs.split(",")} == {rung_name(r) for r in preset(name)}

def test_the_fastest_list_is_chosen(tmp_path, unknown, monkeypatch, capsys):
    "Whatever its name; what is not in it is told"
    speed = {2: 1., 1: 2.} # thousand tokens/s by the number of rungs
    def list_speed(config, rungs, *args): return autotune.ResolvedRungs(list(rungs), {}), 4, 1e3*speed[len(rungs)]
    monkeypatch.setattr(autotune, "list_speed", list_speed)
    trainer = Trainer(options(tmp_path, rungs="auto", recipe="adamw", name="a"))
    said = capsys.readouterr().out
    assert trainer.run.rungs == ("flash",) and trainer.plan.preset == "fastest"
    assert "fastest: 1,000 tokens/s" in said and "fastest without fused_adamw: 2,000 tokens/s" in said
    assert "not fused_adamw: the list is faster without it here" in " ".join(said.split())
    speed[2] = 3.
    assert Trainer(options(tmp_path, rungs="auto", recipe="adamw", name="b", retune=True)).run.rungs == ("flash", "fused_adamw")

def test_lists_are_measured_as_training_runs_them(tmp_path, unknown, monkeypatch):
    "With the recipe of the run, its micro-batch and all its sequences, each in turn"
    seen = []
    def list_speed(config, rungs, rows, gib, batch, recipe, choices):
        seen.append((len(rungs), rows, batch, recipe.spec()))
        return autotune.ResolvedRungs(list(rungs), {}), 8, 1.
    monkeypatch.setattr(autotune, "list_speed", list_speed)
    Trainer(options(tmp_path, rungs="auto", micro_batch_size=None, step_tokens=16*16, recipe="speedrun"), progress=False)
    assert seen == [(2, 16, 0, "speedrun"), (1, 16, 0, "speedrun")] + [(2, 16, 8, "speedrun"), (1, 16, 8, "speedrun")]*2

def test_out_of_memory_in_one_list(tmp_path, unknown, monkeypatch):
    "A list that doesn't fit is no choice; where none fits the error says what to do, and nothing is remembered"
    real, fit = autotune.trial_of, ["flash"]
    def trial_of(config, rungs, *args, **kw):
        if [*map(rung_name, rungs)] != fit: raise autotune.NoRoom("out of GPU memory")
        return real(config, rungs, *args, **kw)
    monkeypatch.setattr(autotune, "trial_of", trial_of)
    assert Trainer(options(tmp_path, rungs="auto", name="a"), progress=False).run.rungs == ("flash",)
    fit[:] = ["none"]
    with fails(RuntimeError, "out of GPU memory with one sequence", "--rungs smallest"): Trainer(options(tmp_path, rungs="auto", name="b", retune=True), progress=False)

def test_a_list_and_its_micro_batch_are_measured_once(tmp_path, builds, unknown, capsys):
    "The second run takes what the first one measured, says of when it is, and `measure` measures again"
    cfg = options(tmp_path, rungs="auto", micro_batch_size=None)
    whole = lambda: sum(c.layers > 1 for c in builds) # not the single layers that tell whether kernels run
    first = Trainer(replace(cfg, name="a"))
    n = whole()
    assert "comparing 2 lists of rungs" in capsys.readouterr().out and n == 3*2 + 2 # rounds of two lists, the trial, the run
    again = Trainer(replace(cfg, name="b"))
    said = capsys.readouterr().out
    assert whole() == n + 1 and (again.cfg.rungs, again.cfg.micro_batch_size) == (first.cfg.rungs, first.cfg.micro_batch_size)
    assert re.search(r"list of rungs, as measured here on \d{4}-\d\d-\d\d: fastest.* \(--retune measures again\)", said)
    assert re.search(r"micro-batch, as measured here on \d{4}-\d\d-\d\d: \d+ sequences", said)
    Trainer(replace(cfg, name="c", retune=True))
    assert whole() == 2*n + 1 and "comparing 2 lists of rungs" in capsys.readouterr().out

@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's step takes the same time tomorrow")
def test_a_cpu_is_timed_each_time(tmp_path, builds):
    "The number of steps in some minutes follows the machine as it is now, and not as it was when it was busy"
    cfg = options(tmp_path, rungs="flash", micro_batch_size=None, steps=0, minutes=.001)
    for name in "ab":
        before = len(builds)
        Trainer(replace(cfg, name=name), progress=False)
        assert len(builds) == before + 2 # the trial's and the run's

def test_the_ladder_is_measured_when_asked_for(tmp_path, monkeypatch, capsys):
    "And decides nothing: the list is the same, whatever the rungs gain"
    monkeypatch.setattr(callbacks, "measure_ladder", lambda config, rows, rungs: [dict(rungs=list(rungs), rows=rows)])
    plain, asked = (Trainer(options(tmp_path, rungs="safe", name=str(on), ladder=on), progress=False) for on in (False, True))
    assert plain.ladder == [] and plain.cfg.rungs == asked.cfg.rungs
    assert asked.ladder == [dict(rungs=asked.cfg.rungs.split(","), rows=asked.plan.rows_here)]

def test_the_ladder_refuses_before_it_measures(monkeypatch):
    "What doesn't go together is refused before minutes of measuring"
    monkeypatch.setattr(ladder, "measure_here", lambda *args, **kw: pytest.fail("measured"))
    with fails(ValueError, "exclude each other"): measure_ladder(NANO, 1, ["flash", "checkpoint", "selective_checkpoint"])
    with fails(ValueError, "applied twice"): measure_ladder(NANO, 1, ["flash", "flash"])

LADDER = LadderOptions(model="nano", rungs="flash", batch_size=1, out="ladder")

@pytest.mark.parametrize("option, message", [(dict(rungs="auto"), "a ladder keeps every rung"), (dict(rungs="flash,flash"), "twice"),
                                             (dict(out="file/ladder"), "choose another --out")], ids=str)
def test_options_of_the_ladder(tmp_path, monkeypatch, capsys, option, message):
    "Options that can't be are refused with a word, and nothing is written"
    monkeypatch.chdir(tmp_path)
    (tmp_path/"file").touch()
    monkeypatch.setattr(ladder, "measure_here", lambda *args, **kw: pytest.fail("measured"))
    with pytest.raises(SystemExit) as e: speedrun_ladder(words(LADDER, **option))
    assert e.value.code == 2 and message in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["file"]

# Remembered choices

def choose(choices, value="flash", what="kernel", kind=str, **about): return choices.get(what, about, lambda: value, kind)

GARBAGE = dict(empty="", list="[1, 2]", null="null", number="7", object="{}", torn='[{"what": "ker', deep="["*10**5,
               date='[{"what": "kernel", "where": {}, "value": 1, "date": 7}]', bytes="\xff\xfe")

@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_left_aside(choices, text):
    "A file that can't be used is as good as none: it is said, measured, and replaced"
    choices.write_bytes(text.encode("latin-1"))
    said = []
    assert choose(Choices(log_info=said.append)) == "flash" and any("left aside" in s and "choices.json" in s for s in said)
    said.clear()
    assert choose(Choices(log_info=said.append), "other") == "flash" and len(said) == 1

def test_a_pipe_in_its_place(choices):
    "A pipe under that name doesn't hang the start"
    os.mkfifo(choices)
    said = []
    assert choose(Choices(log_info=said.append)) == "flash" and "no regular file" in said[0]

def test_a_choice_of_another_kind_is_measured_again(choices):
    "What was remembered must be what is asked for"
    assert choose(Choices(), [1], kind=list[int]) == [1]
    said = []
    assert choose(Choices(log_info=said.append), "cudnn") == "cudnn" and "can't be used" in said[0]
    assert choose(Choices(), "other") == "cudnn"

@pytest.mark.parametrize("change", [dict(torch="9.9"), dict(gpu="NVIDIA Other"), dict(driver="1"), dict(triton="0")], ids=str)
def test_another_machine_measures_again(choices, monkeypatch, change):
    "A choice holds for the machine, the versions and the code that it was measured with, and no other"
    choose(Choices(), T=1)
    real = measure.machine()
    monkeypatch.setattr(choices_module, "machine", lambda: real | change)
    assert choose(Choices(), "cudnn", T=1) == "cudnn"
    monkeypatch.setattr(choices_module, "machine", lambda: real | dict(date="2000-01-01")) # another day is no other machine
    assert choose(Choices(), "other", T=1) == "flash"
    monkeypatch.setattr(choices_module, "code_version", lambda: "other code")
    assert choose(Choices(), "cudnn", T=1) == "cudnn"

def test_choices_of_other_things_are_kept(choices):
    "Each choice has its place, and of very many the newest stay"
    for t in range(choices_module.MOST_CHOICES + 5): choose(Choices(), f"v{t}", T=t)
    kept = json.loads(choices.read_text())
    assert len(kept) == choices_module.MOST_CHOICES and kept[-1]["value"] == f"v{t}" and choose(Choices(), "new", T=t - 3) == f"v{t - 3}"

def test_what_fails_is_not_remembered(choices):
    "An error while measuring is raised, and leaves nothing"
    with pytest.raises(ZeroDivisionError): Choices().get("kernel", {}, lambda: 1//0)
    assert not choices.exists()

def test_a_cache_that_cannot_be_written(tmp_path):
    "The choice is made all the same"
    (tmp_path/"file").touch()
    said = []
    assert choose(Choices(tmp_path/"file"/"choices.json", log_info=said.append)) == "flash" and "can't be remembered" in said[-1]

def test_many_write_at_once(choices):
    "Processes that start together lose no choice of one another"
    threads = [threading.Thread(target=choose, args=(Choices(), f"v{t}"), kwargs=dict(T=t)) for t in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert sorted(c["where"]["T"] for c in json.loads(choices.read_text())) == list(range(8))

# Timings

def test_timings_of_a_phase_that_fails():
    "A phase that raises is counted too, and the depth is right afterwards"
    timings = Timings()
    with pytest.raises(KeyError):
        with timings("a"):
            with timings("b"): raise KeyError
    with timings("c"): pass
    assert [(p[0], p[2]) for p in timings.phases] == [("a", 0), ("b", 1), ("c", 0)] and timings.total is None

@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks this process")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_process_began_before_this(monkeypatch):
    "The start counts from the process's beginning, imports included: of a fork it lies between what came before and after"
    (out, sent), before = os.pipe(), time.time()
    if not (pid := os.fork()): os.write(sent, repr(process_start()).encode()); os._exit(0)
    os.waitpid(pid, 0)
    tick = 2/os.sysconf("SC_CLK_TCK") # that long a process's beginning and the time since the machine's may be apart
    assert before - tick <= float(os.read(out, 99)) <= time.time() + tick
    for f in (out, sent): os.close(f)
    monkeypatch.setattr(time, "time", lambda: 1000.)
    assert Timings(990.).phases == [["Python and imports", 10., 0]]

def test_a_run_says_how_long_its_start_took(tmp_path, capsys):
    "The phases are in result.json and add up to no more than the whole"
    trainer, res = train(options(tmp_path), timings=Timings(process_start()))
    start = json.loads((tmp_path/"runs/run/result.json").read_text())["start"]
    assert sum(p["seconds"] for p in start["phases"] if not p["depth"]) <= start["seconds"] == trainer.timings.total
    assert {"Python and imports", "open the data", "try the micro-batch", "build the model", "the first step"} <= {p["name"] for p in start["phases"]}

@pytest.mark.parametrize("said", ["NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Thu Oct 19 18:56:32 UTC 2025\nGCC version:  gcc version 12.3.0\n",
                                  "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22-I3-09-6)\n"])
def test_the_driver_is_read_from_its_file(tmp_path, monkeypatch, said):
    "nvidia-smi takes up to seconds, and is started only where there is no such file, or one that says something else"
    started = []
    def run(cmd, **how): started.append(cmd[0]); return SimpleNamespace(stdout="580.82.07\n")
    monkeypatch.setattr(measure.subprocess, "run", run)
    (tmp_path/"version").write_text(said)
    assert measure.driver_version.__wrapped__(tmp_path/"version") == "580.82.07" and not started
    (tmp_path/"version").write_text("something else")
    assert [measure.driver_version.__wrapped__(tmp_path/name) for name in ("version", "none")] == ["580.82.07"]*2 and len(started) == 2

# Several processes

def world_of(dp, tp=1): return SimpleNamespace(rank_and_size=lambda dim: (0, dict(dp=dp, tp=tp)[dim]))

@pytest.mark.parametrize("gib, rung", [(0, "ddp"), (2.1*autotune.state_gib(NANO, []), "ddp"), (1.9*autotune.state_gib(NANO, []), "fsdp")])
def test_parallelism_by_memory(gib, rung):
    "All of it in under half of a GPU's memory is ddp; the reason is said, also on a CPU"
    found = autotune.parallel_rungs(NANO, ["flash"], world_of(2), gib)
    assert found.rungs == ["flash", rung] and "weights, gradients and optimizer state take" in found.why[rung]
    assert autotune.parallel_rungs(NANO, found.rungs, world_of(2), gib).rungs == found.rungs # named: stays

def test_optimizers_decide_too():
    "8-bit moments make room for ddp where FP32's don't"
    tiny = workload("tiny")
    gib = 1.5*autotune.state_gib(tiny, [])
    assert [autotune.parallel_rungs(tiny, [r], world_of(4), gib).rungs[-1] for r in ("fused_adamw", "adamw8bit")] == ["fsdp", "ddp"]

def test_tensor_parallel_shares_the_weights():
    "It halves what a process has, and goes on with fsdp where others have other data"
    found = autotune.parallel_rungs(NANO, ["tensor_parallel"], world_of(2, 2), 10**6)
    assert found.rungs == ["tensor_parallel", "fsdp"]
    assert autotune.parallel_rungs(NANO, ["tensor_parallel"], world_of(1, 2), 10**6).rungs == ["tensor_parallel"]

def test_presets_give_way_and_names_do_not():
    "What doesn't go with fsdp leaves a preset, with the reason; rungs that were named are for `build` to refuse"
    found = lambda spec: autotune.parallel_rungs(NANO, ["flash", "cuda_graphs"], world_of(2), 1e-9, preset_of(spec)).rungs
    assert "cuda_graphs" not in found("fastest") and "cuda_graphs" not in found("auto")
    assert found("flash,cuda_graphs") == ["flash", "cuda_graphs", "fsdp"]
    with fails(ValueError, "exclude each other"): ladder.check_parallel(*map(rung_specs, (["checkpoint", "selective_checkpoint"], ["ddp"])))

@pytest.mark.parametrize("spec", ["fastest,flash", "ddp,fastest", "safe,fastest", "fastest,ddp,flash"])
def test_what_stands_beside_a_preset(spec):
    with fails(InputError, "stands alone, or with ddp, fsdp, tensor_parallel beside it"): parse_rungs(spec)

def test_all_processes_decide_what_fits():
    "The slowest one's time, the largest memory; where one has no room none has"
    a, b = autotune.Trial(4, 2., 1., 9.), autotune.Trial(4, 3., .5, 8.)
    assert autotune.slowest([a, b]) == autotune.Trial(4, 3., 1., 9.) and autotune.slowest([a, None]) is None
    assert autotune.slowest([replace(a, ms=None), replace(b, ms=None)]).ms is None

@pytest.mark.parametrize("there, asked, n", [(2, 0, 2), (8, 4, 4), (0, 2, 2), (0, 0, "several GPUs, and this machine has 0"),
                                             (1, 0, "several GPUs, and this machine has 1"), (2, 3, "this machine has 2: choose --gpus 2")])
def test_gpus_of_a_ladder(monkeypatch, there, asked, n):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0); monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    c = SimpleNamespace(gpus=asked)
    if isinstance(n, int): assert ladder.gpus_of(c, ["ddp"]) == n; return
    with fails(InputError, n): ladder.gpus_of(c, ["ddp"])

def test_gpus_that_no_rung_takes():
    c = LadderOptions(rungs="bf16,flash", gpus=2)
    with pytest.raises(InputError, match="gpus is 2, and none of these rungs takes several"): ladder.run_ladder(c)
