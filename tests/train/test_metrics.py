"What a run measures of itself: the breakdown of a step, the GPU, trackers, a profile."
import gzip, json, os, re, subprocess, sys, types
import pytest, torch
from helpers.tiny_runs import NANO, fails
from helpers.timeouts import calls_of
from llm_speedrun.runs import baseline
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.metrics import (PHASES, Breakdown, StepProfile, gpu_stats, open_trackers,
                                        parse_trackers, read_rows)

# --- breakdown ---

class FakeEvent:
    "A CUDA event of a GPU that takes 5 ms for everything, and is waited for"
    clock, waited = 0, []
    def __init__(self, enable_timing): assert enable_timing
    def record(self): FakeEvent.clock += 5; self.at = FakeEvent.clock
    def synchronize(self): self.waited.append(self.at)
    def elapsed_time(self, other): return other.at - self.at

def test_breakdown_waits_for_the_last_event_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "waited", [])
    b = Breakdown(torch.device("cuda", 0))
    b.start()
    for name in ("data", "forward", "backward", "forward", "backward", "optimizer"): b(name)
    b.stop()
    last = FakeEvent.clock
    b("data"); b("forward")     # of the next step, which isn't measured
    assert FakeEvent.clock == last and FakeEvent.waited == []
    assert b.read() == dict(ms_data=5, ms_forward=10, ms_backward=10, ms_optimizer=5)
    assert FakeEvent.waited == [last]

def test_breakdown_of_a_step_under_way_is_read_when_it_is_over(clock):
    b = Breakdown("cpu")
    b.start(); b("data")
    assert b.read() == {}
    clock.sleep(.01); b("forward"); b("backward"); b("optimizer"); b.stop()
    assert b.read() == dict(ms_data=0, ms_forward=pytest.approx(10), ms_backward=0, ms_optimizer=0) and b.read() == {}

def test_breakdown_marks_cost_nothing_unless_started(monkeypatch):
    "Nobody looks at the clock, nothing is kept, and nothing is called"
    b = Breakdown("cpu")
    monkeypatch.setattr(b, "now", lambda: pytest.fail("it looks at the clock"))
    def marks():
        for _ in range(1000): b("forward")
    assert calls_of(marks) < 1100 and b.marks == []

def test_stepper_marks_its_phases():
    step = Stepper(baseline(NANO))
    b = step.mark = Breakdown(step.run.device)
    x = torch.randint(300, (2, 17), device=step.run.device)
    b.start(); b("data")
    step((x[:, :-1], x[:, 1:]), (x[:, :-1], x[:, 1:]))
    b.stop()
    assert list(b.read()) == [f"ms_{p}" for p in PHASES]

@pytest.mark.cuda
def test_breakdown_on_a_gpu_never_waits():
    x, b = torch.randn(4096, 4096, device="cuda"), Breakdown("cuda")
    x @ x; torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        b.start(); b("data")
        inside = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        inside[0].record()
        for _ in range(50): x @ x
        inside[1].record()
        b("forward"); b("backward"); b("optimizer"); b.stop()
    finally: torch.cuda.set_sync_debug_mode("default")
    ms = b.read()
    assert ms["ms_forward"] >= inside[0].elapsed_time(inside[1]), "the GPU's time, and not that of Python"

# --- the GPU ---

def test_gpu_stats_leave_out_what_is_unknown(monkeypatch):
    def broken(device): raise RuntimeError("the driver doesn't say")
    answers = dict(memory_reserved=2**31, max_memory_allocated=2**30, utilization=97, temperature=50)
    for name, v in answers.items(): monkeypatch.setattr(torch.cuda, name, lambda device, v=v: v)
    monkeypatch.setattr(torch.cuda, "power_draw", broken)
    assert gpu_stats(torch.device("cuda")) == dict(gpu_mem_gib=2., gpu_peak_gib=1., gpu_util=97, gpu_temp_c=50)

@pytest.mark.cuda
def test_gpu_stats_are_cheap(monkeypatch):
    "They come from the driver's library, not from a program, and the GPU is not waited for"
    gpu_stats("cuda")       # the first call opens NVML
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: pytest.fail(f"it starts {args}"))
    torch.cuda.set_sync_debug_mode("error")
    try: stats = gpu_stats("cuda")
    finally: torch.cuda.set_sync_debug_mode("default")
    assert stats["gpu_mem_gib"] >= 0
    torch.zeros(1, device="cuda")
    assert gpu_stats("cuda")["gpu_peak_gib"] > 0

# --- trackers ---

class FakeWriter:
    made = []
    def __init__(self, log_dir, purge_step): self.args, self.log, self.closed = (log_dir, purge_step), [], 0; self.made.append(self)
    def add_scalar(self, *args): self.log.append(args)
    def add_text(self, *args): self.log.append(args)
    def close(self): self.closed += 1

@pytest.fixture
def fakes(monkeypatch):
    "TensorBoard and Weights & Biases as they would be if they were installed; wandb's `init` can't log in"
    def init(**kw): raise PermissionError("api_key not configured")
    monkeypatch.setattr(FakeWriter, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=FakeWriter))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))

def test_tensorboard_gets_numbers_and_text(fakes, tmp_path):
    t = open_trackers("tensorboard", tmp_path, dict(lr=.1), step=7)
    t.log(dict(step=8, loss=1.5, val_loss=None)); t.log(dict(step=8, event="skipped"))
    t.close(); t.close()
    w, = FakeWriter.made
    assert w.args == (str(tmp_path/"tensorboard"), 8) and w.closed == 1
    assert w.log[0][0] == "config" and '"lr": 0.1' in w.log[0][1]
    assert w.log[1:] == [("loss", 1.5, 8), ("event", "skipped", 8)]

def test_a_tracker_that_cannot_be_opened_is_an_error_and_closes_the_others(fakes, tmp_path):
    with fails(RuntimeError, "'wandb' could not be opened", "WANDB_MODE=offline", "api_key not configured"):
        open_trackers("tensorboard, wandb", tmp_path, {})
    assert FakeWriter.made[0].closed == 1

def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(fakes, tmp_path, monkeypatch):
    class Run:
        def define_metric(self, name, step_metric=None): pass
        def log(self, row): raise OSError("no space left")
        def finish(self): raise AssertionError("it was dropped")
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **kw: Run())
    said = []
    t = open_trackers("wandb,tensorboard", tmp_path, {}, log_info=said.append)
    for i in range(3): t.log(dict(step=i, loss=1.))
    t.close()
    assert said == ["tracker 'wandb' failed and gets no more rows: OSError: no space left"]
    assert len(FakeWriter.made[0].log) == 4

class Server:
    "Weights & Biases as it keeps runs: its own count of steps only grows, and a row of an earlier step is dropped"
    def __init__(self): self.runs = {}
    def init(self, id, **kw):
        kept = self.runs.setdefault(id, types.SimpleNamespace(at=-1, rows=[], axis={}))
        def log(row, step=None):
            if step is not None and step < kept.at: return
            kept.at = kept.at + 1 if step is None else step
            kept.rows.append(row)
        define = lambda name, step_metric=None: kept.axis.update({name: step_metric})
        return types.SimpleNamespace(log=log, define_metric=define, finish=lambda: None)

def test_wandb_keeps_the_rows_of_a_resumed_run(fakes, tmp_path, monkeypatch):
    server = Server()
    monkeypatch.setattr(sys.modules["wandb"], "init", server.init)
    for start, end, sent in ((0, 9, 0), (5, 7, 9), (6, 12, 7)):    # killed after step 9, the last checkpoint was of step 5; then after step 7
        t = open_trackers("wandb", tmp_path, {}, step=start, sent=sent)
        for i in range(start + 1, end + 1): t.log(dict(step=i, loss=1/i)); t.log(dict(step=i, val_loss=None))
    kept, = server.runs.values()
    assert [r["step"] for r in kept.rows if "loss" in r] == [*range(1, 13)]    # each once: no row can be taken back
    assert kept.axis == {"step": None, "*": "step"}     # and they are drawn over our step

def test_wandb_takes_the_project_of_its_environment(fakes, tmp_path, monkeypatch):
    "`init` itself reads entity and group where they aren't given"
    asked = []
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **kw: asked.append(kw) or Server().init(**kw))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    open_trackers("wandb", tmp_path/"a", {})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_trackers("wandb", tmp_path/"b", {})
    assert [kw["project"] for kw in asked] == ["llm_speedrun", "mine"] and not {"entity", "group"} & asked[1].keys()

def test_tracker_names(monkeypatch, fakes):
    assert parse_trackers(" wandb,tensorboard, wandb") == ["wandb", "tensorboard"]
    with fails(ValueError, "unknown tracker 'wanbd'", "Did you mean 'wandb'"): parse_trackers("wanbd")
    for name in ("torch.utils.tensorboard", "wandb"): monkeypatch.setitem(sys.modules, name, None)
    with fails(ValueError, "tracker 'tensorboard'", "pip install tensorboard"): parse_trackers("tensorboard")
    with fails(ValueError, "tracker 'wandb'", "pip install wandb"): parse_trackers("wandb")

def test_real_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for start, end in ((0, 4), (2, 5)):     # the resumed run takes steps 3 and 4 again
        t = open_trackers("tensorboard", tmp_path, {}, step=start)
        for i in range(start + 1, end + 1): t.log(dict(step=i, loss=start + 1/i))
        t.close()
    read = EventAccumulator(str(tmp_path/"tensorboard")); read.Reload()
    expected = [(i, pytest.approx((2 if i > 2 else 0) + 1/i)) for i in range(1, 6)]
    assert [(e.step, e.value) for e in read.Scalars("loss")] == expected

def test_real_wandb_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    t = open_trackers("wandb", tmp_path, dict(lr=.1))
    for i in (1, 5, 3): t.log(dict(step=i, loss=1.))    # back to 3, as a resumed run goes
    t.close()
    assert list((tmp_path/"wandb").glob("offline-run-*"))
    assert "will be ignored" not in capfd.readouterr().err

# --- profile ---

def work(): return (torch.randn(64, 64) @ torch.randn(64, 64)).relu().sum().item()

def test_profile_closed_early_has_what_there_is(tmp_path):
    said = []
    p = StepProfile(tmp_path, steps=5, skip=1, log_info=said.append)
    for _ in range(3): work(); p.step()
    p.close(); p.step(); p.close()
    assert len(said) == 1 and "profile of 2 steps" in said[0]
    trace = json.loads(gzip.decompress((tmp_path/"profile.json.gz").read_bytes()))
    assert any(e.get("name") == "aten::mm" for e in trace["traceEvents"])
    assert re.search(r"aten::mm .* matrix products \| +1 ", (tmp_path/"profile.md").read_text())
    kinds = json.loads((tmp_path/"profile_kinds.json").read_text())
    assert kinds["matrix products"] > 0 and sum(kinds.values()) > kinds["matrix products"]

def test_profile_waits_for_kernels_of_earlier_steps(tmp_path, monkeypatch):
    "Once, before the first step that counts"
    p, waited = StepProfile(tmp_path, steps=2, skip=3), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: waited.append(p.done))
        for _ in range(4): work(); p.step()
    p.close()
    assert waited == [3]

@pytest.mark.cuda
def test_profile_has_kernels_of_its_own_steps_alone(tmp_path):
    p, x = StepProfile(tmp_path, steps=2, skip=3), torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        for _ in range(20): x @ x # some are still to be run when the step ends
        p.step()
    trace = json.loads(gzip.decompress((tmp_path/"profile.json.gz").read_bytes()))
    assert sum(e.get("cat") == "kernel" for e in trace["traceEvents"]) == 2*20

def test_profile_that_cannot_be_written_is_told(tmp_path):
    said = []
    p = StepProfile(tmp_path/"missing", steps=1, skip=1, log_info=said.append)
    for _ in range(3): work(); p.step()
    assert len(said) == 1 and "could not be written" in said[0]

# --- rows ---

def test_rows_are_read_from_files_alone(tmp_path):
    path, said = tmp_path/"metrics.jsonl", []
    os.mkfifo(path)
    with fails(ValueError, "is no regular file", str(path)): read_rows(path)
    path.unlink()
    path.write_bytes(b'{"step": 1}\n\xff\n{"step": 2, "event": "a\xe2\x80\xa8b"}\n{"step": true}\n{"step": 3}')
    assert [r["step"] for r in read_rows(path, said.append)] == [1, 2, 3]
    assert len(said) == 1 and "passed over: 2; the first: line 2" in said[0]
