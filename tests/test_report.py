"What a run shows: the breakdown of a step, trackers, live plot, profile, and the report of whole, torn and hostile folders."
import gzip, json, re, sys, time, types
from html.parser import HTMLParser
import pytest, torch
from small import NANO, fails, nano, options
from llm_speedrun.runs import Stepper, baseline
from llm_speedrun.train.report import (PHASES, VERSIONS, Breakdown, LivePlot, StepProfile, gpu_stats, html_report,
                                 loss_chart, notebook_display, open_trackers, parse_trackers, points, read_run,
                                 running_mean, thinned)
from llm_speedrun.train.options import speedrun_report

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
    last = FakeEvent.clock
    b("data"); b("forward")     # of the next step, which isn't measured
    assert FakeEvent.clock == last and FakeEvent.waited == []
    assert b.read() == dict(ms_data=5, ms_forward=10, ms_backward=10, ms_optimizer=5)
    assert FakeEvent.waited == [last]

def test_breakdown_of_a_step_under_way_is_read_when_it_is_over():
    b = Breakdown("cpu")
    b.start(); b("data")
    assert b.read() == {}
    time.sleep(.01); b("forward"); b("backward"); b("optimizer")
    assert b.read()["ms_forward"] >= 10 and b.read() == {}

def test_breakdown_marks_cost_nothing_unless_started():
    b = Breakdown("cpu")
    t = time.perf_counter()
    for _ in range(10_000): b("forward")
    assert time.perf_counter() - t < .1 and b.marks == []

def test_stepper_marks_its_phases():
    step = Stepper(baseline(NANO))
    b = step.mark = Breakdown(step.run.device)
    x = torch.randint(300, (2, 17), device=step.run.device)
    b.start(); b("data")
    step((x[:, :-1], x[:, 1:]), (x[:, :-1], x[:, 1:]))
    assert list(b.read()) == [f"ms_{p}" for p in PHASES]

@pytest.mark.cuda
def test_breakdown_on_a_gpu_never_waits():
    x, b = torch.randn(4096, 4096, device="cuda"), Breakdown("cuda")
    x @ x; torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        b.start(); b("data")
        t = time.perf_counter()
        for _ in range(50): x @ x
        b("forward"); b("backward"); b("optimizer")
        queued = 1e3*(time.perf_counter() - t)
    finally: torch.cuda.set_sync_debug_mode("default")
    ms = b.read()
    assert ms["ms_forward"] > queued and ms["ms_data"] < 5, "the GPU's time, and not that of Python"

# --- the GPU ---

def test_gpu_stats_leave_out_what_is_unknown(monkeypatch):
    def broken(device): raise RuntimeError("the driver doesn't say")
    answers = dict(memory_reserved=2**31, max_memory_allocated=2**30, utilization=97, temperature=50)
    for name, v in answers.items(): monkeypatch.setattr(torch.cuda, name, lambda device, v=v: v)
    monkeypatch.setattr(torch.cuda, "power_draw", broken)
    assert gpu_stats(torch.device("cuda")) == dict(gpu_mem_gib=2., gpu_peak_gib=1., gpu_util=97, gpu_temp_c=50)

@pytest.mark.cuda
def test_gpu_stats_are_cheap():
    gpu_stats("cuda")       # the first call opens NVML
    t = time.perf_counter()
    for _ in range(20): stats = gpu_stats("cuda")
    assert (time.perf_counter() - t) / 20 < .005 and stats["gpu_mem_gib"] >= 0
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
        def log(self, row, step): raise OSError("no space left")
        def finish(self): raise AssertionError("it was dropped")
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **kw: Run())
    said = []
    t = open_trackers("wandb,tensorboard", tmp_path, {}, say=said.append)
    for i in range(3): t.log(dict(step=i, loss=1.))
    t.close()
    assert said == ["tracker 'wandb' failed and gets no more rows: OSError: no space left"]
    assert len(FakeWriter.made[0].log) == 4

def test_tracker_names(monkeypatch, fakes):
    assert parse_trackers(" wandb,tensorboard, wandb") == ["wandb", "tensorboard"]
    with fails(ValueError, "unknown tracker 'wanbd'", "Did you mean 'wandb'"): parse_trackers("wanbd")
    for name in ("torch.utils.tensorboard", "wandb"): monkeypatch.setitem(sys.modules, name, None)
    with fails(ValueError, "tracker 'tensorboard'", "pip install tensorboard"): parse_trackers("tensorboard")
    with fails(ValueError, "tracker 'wandb'", "pip install wandb"): parse_trackers("wandb")

def test_real_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    t = open_trackers("tensorboard", tmp_path, {})
    for i in range(3): t.log(dict(step=i, loss=1/(i + 1)))
    t.close()
    read = EventAccumulator(str(tmp_path/"tensorboard")); read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(i, pytest.approx(1/(i + 1))) for i in range(3)]

def test_real_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    t = open_trackers("wandb", tmp_path, dict(lr=.1))
    t.log(dict(step=1, loss=1.)); t.close()
    assert list((tmp_path/"wandb").glob("offline-run-*"))

# --- the loss curve ---

def test_thinning_keeps_the_mean():
    xy = [(i, float(i % 7)) for i in range(8 * 700)]
    x, y = thinned(xy, 700)
    assert len(x) == 700 and y.mean() == pytest.approx(sum(v for _, v in xy) / len(xy))
    assert running_mean(y).min() >= y.min() and len(running_mean(y)) == 700

def test_points_are_finite_numbers():
    rows = [dict(step=1, loss=2.), dict(step=2, loss=float("nan")), dict(step=3, loss=None), dict(step=4, loss="5"), dict(loss=1.)]
    assert points(rows, "loss") == [(1, 2.)]

def test_live_plot_draws_seldom(monkeypatch):
    shown, now = [], [100.]
    handle = types.SimpleNamespace(update=shown.append)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    live = LivePlot(display=lambda image, display_id: shown.append(image) or handle, every=3.)
    live.update(list)                           # nothing to draw yet
    rows = [dict(step=1, loss=1.)]
    for _ in range(80): live.update(lambda: rows); now[0] += .1
    assert len(shown) == 3                      # at 0, 3 and 6 seconds
    live.update(lambda: rows, last=True)
    assert len(shown) == 4

def test_live_plot_is_silent_outside_of_a_notebook(capsys):
    LivePlot().update(lambda: [dict(step=1, loss=1.)], last=True)
    assert capsys.readouterr().out == ""

def test_live_plot_in_a_notebook(monkeypatch):
    "A notebook is where IPython's shell has a kernel; a terminal's has none"
    IPython = pytest.importorskip("IPython")
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=None))
    assert notebook_display() is IPython.display.display
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace())
    assert notebook_display() is None

# --- profile ---

def work(): return (torch.randn(64, 64) @ torch.randn(64, 64)).relu().sum().item()

def test_profile_closed_early_has_what_there_is(tmp_path):
    said = []
    p = StepProfile(tmp_path, steps=5, skip=1, say=said.append)
    for _ in range(3): work(); p.step()
    p.close(); p.step(); p.close()
    assert len(said) == 1 and "profile of 2 steps" in said[0]
    trace = json.loads(gzip.decompress((tmp_path/"profile.json.gz").read_bytes()))
    assert any(e.get("name") == "aten::mm" for e in trace["traceEvents"])
    assert re.search(r"aten::mm .* matrix products \| +1 ", (tmp_path/"profile.md").read_text())

def test_profile_that_cannot_be_written_is_told(tmp_path):
    said = []
    p = StepProfile(tmp_path/"missing", steps=1, skip=1, say=said.append)
    for _ in range(3): work(); p.step()
    assert len(said) == 1 and "could not be written" in said[0]

# --- report ---

class Balanced(HTMLParser):
    "Checks that every element is closed, and collects scripts and addresses"
    def __init__(self): super().__init__(); self.open, self.outside, self.text = [], [], ""
    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "hr", "img"): self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"): self.outside.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]
    def handle_startendtag(self, tag, attrs): pass
    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += data

def checked(folder):
    "The report of a run as it stands on the page, checked to be whole and alone"
    page = html_report(folder).read_text(encoding="utf-8")
    parser = Balanced(); parser.feed(page); parser.close()
    assert page.startswith("<!doctype html>") and not parser.open and not parser.outside and "@import" not in page
    return parser.text

@pytest.fixture(scope="module")
def run(tmp_path_factory, nano):
    "The folder of a real run"
    from llm_speedrun.train.trainer import train
    trainer, res = train(options(tmp_path_factory.mktemp("runs"), steps=12), progress=False)
    return trainer.folder

@pytest.fixture
def copy(run, tmp_path):
    "A copy of it, to break"
    names = "config.json metrics.jsonl result.json sample.txt".split()
    for n in names: (tmp_path/n).write_bytes((run/n).read_bytes())
    return tmp_path

def test_report_of_a_real_run(run):
    text, res = checked(run), json.loads((run/"result.json").read_text())
    assert "finished" in text and f"{res['val_loss']:.3f}" in text and f"{res['bigram_loss']:.3f}" in text
    for part in ("The run", "Loss", "Speed", "Optimization", "What it writes", "Options"): assert part in text
    assert "The ladder" not in text and "can't be read" not in text
    for option in json.loads((run/"config.json").read_text()).keys() - {"model", "gpu", *VERSIONS, "date"}:
        assert option in text, option
    assert torch.__version__ in text

def test_report_of_a_run_that_was_killed(copy):
    for n in ("result.json", "sample.txt"): (copy/n).unlink()
    text = checked(copy)
    assert "not finished: still running, or killed" in text and "What it writes" not in text

def test_report_of_an_interrupted_run(copy):
    (copy/"result.json").write_text(json.dumps(dict(steps=5, interrupted=True)))
    text = checked(copy)
    assert "interrupted" in text and "of 12" in text

@pytest.mark.parametrize("kept", ["config.json", "metrics.jsonl"])
def test_report_from_one_file(copy, kept):
    for f in copy.iterdir():
        if f.name != kept: f.unlink()
    text = checked(copy)
    assert ("metrics.jsonl has no rows" if kept == "config.json" else "without config.json") in text

def test_files_cut_anywhere_are_tolerated(copy):
    (copy/"ladder.json").write_text(json.dumps([dict(rung="flash", tok_s=1., kept=True)]))
    (copy/"samples.jsonl").write_text('{"step": 1, "text": "a"}\n')
    for f in sorted(copy.iterdir()):
        whole = f.read_bytes()
        for n in range(0, len(whole), 1 + len(whole)//40): f.write_bytes(whole[:n]); read_run(copy)
        f.write_bytes(whole[:len(whole)//2])
    assert "config.json can't be read and is left out" in checked(copy)

@pytest.mark.parametrize("junk", ["null", "[]", "3", '{"model": 7, "batch": "x", "gpu": 5, "steps": null, "rungs": 3}', "\x00\xff"])
def test_files_of_the_wrong_kind_are_tolerated(copy, junk):
    for name in ("config.json", "result.json", "ladder.json"): (copy/name).write_text(junk, encoding="latin-1")
    with (copy/"metrics.jsonl").open("a") as f: f.write(f'\n3\n[]\n"x"\n{{"step": "a", "loss": "b"}}\n{{"loss": 1}}\n')
    checked(copy)

HOSTILE = "</pre><script>alert('x')</script> & \"quoted\" \x00\x1b[31m ünïcödé \U0001f600"

@pytest.mark.filterwarnings("ignore:Glyph")    # in the picture's font
def test_what_a_run_says_is_shown_and_never_obeyed(copy):
    config = json.loads((copy/"config.json").read_text())
    config |= dict(data=HOSTILE, workload=HOSTILE, lr="\ud800", gpu=HOSTILE, rungs="cuda_graphs", name="<b>")
    (copy/"config.json").write_text(json.dumps(config))
    (copy/"sample.txt").write_text(HOSTILE, encoding="utf-8")
    (copy/"samples.jsonl").write_text(json.dumps(dict(step="<i>", text=HOSTILE)))
    (copy/"ladder.json").write_text(json.dumps([dict(rung=HOSTILE, kept=False, why=HOSTILE)]))
    row = dict(step=3, event=HOSTILE, why=HOSTILE) | {f"ms_{HOSTILE}": 2.}
    with (copy/"metrics.jsonl").open("a") as f: f.write(json.dumps(row) + "\n")
    hostile = copy.rename(copy.with_name("a $run$ <b> & more"))
    text = checked(hostile)
    assert text.count("alert('x')") >= 7 and "ünïcödé \U0001f600" in text and "a $run$ <b> & more" in text

def test_events_breakdown_and_gpu_are_shown(copy):
    rows = [dict(step=s, ms_data=1., ms_forward=2., ms_backward=4., ms_optimizer=1., gpu_mem_gib=3., gpu_peak_gib=2.5,
                 gpu_util=90, gpu_power_w=500., gpu_temp_c=60, loss=None if s == 5 else 1., grad_norm=10.**s)
            for s in range(1, 7)] + [dict(step=4, event="out of memory", batch=2)]
    rows += [dict(step=7, loss=None, lr=.1, grad_norm=None, tok_s=9., event="skipped")]
    (copy/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = re.sub(r"\s+", " ", checked(copy))
    for said in ("Where a step's time goes", "backward 50%", "Medians of 6 measured steps", "Temperature (°C)",
                 "held by PyTorch", "2.5 GiB", "out of memory", "batch 2", "no finite loss"): assert said in text, said
    assert text.count("no finite loss") == 1 and "lr 0.1" not in text   # a row with an event is one event

def test_report_of_a_ladder(copy):
    record = dict(before=None, ratio=1., predicted_ratio=1., mfu_causal=None, peak_gib=None, kept=True)
    ladder = [record | dict(rung="fp32", tok_s=100.), record | dict(rung="flash", tok_s=250., before="fp32", ratio=2.5),
              record | dict(rung="tf32", tok_s=101., before="flash", kept=False), dict(rung="fp8", kept=False, why="no GPU")]
    (copy/"ladder.json").write_text(json.dumps(ladder))
    text = checked(copy)
    for said in ("The ladder", "2.50×", "tf32 (left out)", "no GPU"): assert said in text, said
    assert "width:100.0%" in (copy/"report.html").read_text() and "width:40.0%" in (copy/"report.html").read_text()

def test_report_of_a_long_run_is_small(copy):
    rows = [dict(step=s, loss=3 + 5/s, lr=1e-3, grad_norm=1., tok_s=1e5) for s in range(1, 20_001)]
    (copy/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    t = time.process_time()
    checked(copy)
    assert (copy/"report.html").stat().st_size < 500_000 and time.process_time() - t < 10

def test_a_folder_that_is_no_run(tmp_path, capsys):
    with fails(FileNotFoundError, "is not the folder of a run", "config.json"): html_report(tmp_path)
    with pytest.raises(SystemExit) as e: speedrun_report([str(tmp_path)])
    assert e.value.code == 2 and "is not the folder of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

def test_command_prints_the_path(copy, capsys):
    speedrun_report([str(copy)])
    assert capsys.readouterr().out == f"{copy/'report.html'}\n" and (copy/"report.html").is_file()

def test_a_loss_that_rises_stays_in_the_picture():
    rows = [dict(step=s, loss=9. if s < 5 else 3. if s < 300 else 8.) for s in range(1, 401)]
    low, high = loss_chart(rows).axes[0].get_ylim()
    assert low < 3 and high > 8
    assert loss_chart([dict(step=1, loss=9.), dict(step=2, loss=1.)]).axes[0].get_ylim()[1] > 9   # a short run is seen whole
