"What a run shows: the loss curve, the live plot, and the report of whole, torn and hostile folders."
import io, json, os, re, time, types
from html.parser import HTMLParser
import pytest, torch
from helpers.tiny_runs import fails, nano, options
from llm_speedrun.cli import speedrun_report
from llm_speedrun.train.report import VERSIONS, html_report, read_run
from llm_speedrun.train.run_charts import LivePlot, loss_chart, notebook_display, points, running_mean, svg, thinned
from helpers.timeouts import calls_of

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
    assert "The ladder" not in text and "left out" not in text
    for option in json.loads((run/"config.json").read_text()).keys() - {"model_config", "gpu", *VERSIONS, "date"}:
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
    assert re.search(r"config\.json is no JSON: .*\. It is left out", checked(copy))

@pytest.mark.parametrize("junk", ["null", "[]", "3", '{"model_config": 7, "micro_batch_size": "x", "gpu": 5, "steps": null, "rungs": 3}', "\x00\xff"])
def test_files_of_the_wrong_kind_are_tolerated(copy, junk):
    for name in ("config.json", "result.json", "ladder.json"): (copy/name).write_text(junk, encoding="latin-1")
    with (copy/"metrics.jsonl").open("a") as f: f.write(f'\n3\n[]\n"x"\n{{"step": "a", "loss": "b"}}\n{{"loss": 1}}\n')
    checked(copy)

HOSTILE = "</pre></style></title><script>alert('x')</script> & \"quoted\" \x00\x1b[31m ünïcödé \U0001f600"

@pytest.mark.filterwarnings("ignore:Glyph")    # in the picture's font
def test_run_text_is_escaped(copy):
    config = json.loads((copy/"config.json").read_text())
    config |= dict(data=HOSTILE, model=HOSTILE, name="</style>", gpu=HOSTILE, rungs="cuda_graphs")
    (copy/"config.json").write_text(json.dumps(config))
    (copy/"sample.txt").write_text(HOSTILE, encoding="utf-8")
    (copy/"samples.jsonl").write_text(json.dumps(dict(step=2, text=HOSTILE)))
    (copy/"ladder.json").write_text(json.dumps([dict(rung=HOSTILE, kept=False, why=HOSTILE)]))
    row = dict(step=3, event=HOSTILE, why=HOSTILE) | {f"ms_{HOSTILE}": 2.}
    with (copy/"metrics.jsonl").open("a") as f: f.write(json.dumps(row) + "\n")
    hostile = copy.rename(copy.with_name("a $run$ <b> & more"))
    text = checked(hostile)
    assert text.count("alert('x')") >= 14 and "</style>" in text and "ünïcödé \U0001f600" in text and "a $run$ <b> & more" in text

FILES = "config.json metrics.jsonl result.json ladder.json samples.jsonl sample.txt".split()

@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_no_file(copy, name):
    (copy/name).unlink(missing_ok=True)
    os.mkfifo(copy/name)
    assert f"{name} is no regular file. It is left out" in read_run(copy)["notes"]    # and nobody waits for a writer

@pytest.mark.parametrize("name", FILES[2:4] + FILES[:1])
@pytest.mark.parametrize("junk, why", [
    ("["*100_000, "nested too deeply|Expected"), ('{"steps": ' + "["*5000 + "]"*5000 + "}", "nested too deeply|Expected"),
    ('[{"tok_s": %s}]' % ("9"*400), "out of range|Expected"), ('{"steps": %s}' % ("9"*400), "out of range|Expected"),
    ("null", "Expected"), ('{"a": 1', "truncated|Expected"), ("\xff", "is no JSON|utf-8"), (" "*2**25, "bytes, and such a file has at most")],
    ids=["deep", "deep value", "long number in a list", "long number", "null", "cut off", "no text", "large"])
def test_a_file_that_is_not_of_its_type_is_named(copy, name, junk, why):
    (copy/name).write_text(junk, encoding="latin-1")
    run = read_run(copy)
    assert re.match(rf"{re.escape(name)} .*({why})", run["notes"][0]) and "\n" not in run["notes"][0]
    assert len(run["rows"]) > 12 and (run["config"] or name == "config.json")    # the rest is there

def test_rows_of_the_wrong_kind_are_passed_over_and_told(copy):
    good, bad = '{"step": 3, "loss": 1.25}\n', ["3", "null", "[]", '{"loss": 1}', '{"step": null}', '{"step": "4"}', "["*10_000,
                                               '{"step": %s}' % ("4"*400), '{"step": 1, "loss": {}}', '{"step": 1, "lo']
    (copy/"metrics.jsonl").write_text(good + "".join(b + "\n" for b in bad) + good + bad[-1])
    assert [r["loss"] for r in read_run(copy)["rows"]] == [1.25, 1.25]
    assert f"lines of metrics.jsonl passed over: {len(bad)}; the first: line 2 of metrics.jsonl" in checked(copy)

KEYS = "loss val_loss lr grad_norm tok_s gpu_mem_gib gpu_peak_gib gpu_util gpu_power_w gpu_temp_c ms_data ms_forward".split()

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("values", [[None], [0], [0.], [-1], [1e300, -1e300], [1e300], [5e-324, 1], [2**53], [True, "3"], [1, None, -1, 0]],
                         ids=str)
def test_rows_with_any_values_have_a_page(copy, values):
    rows = [{"step": i} | {k: values[(i + j) % len(values)] for j, k in enumerate(KEYS)} for i in range(1, 250)]
    (copy/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (copy/"result.json").write_text(json.dumps(dict(steps=values[0] if isinstance(values[0], int) else None, val_loss=None)))
    assert "Options" in checked(copy)

def test_a_lone_surrogate_is_told(copy):
    "From a path that isn't UTF-8, say: Python writes one into JSON, where none may be"
    (copy/"config.json").write_text(json.dumps(dict(data="\ud800")))
    assert "config.json is no JSON" in checked(copy)

def test_a_run_is_over_where_its_result_cannot_be_read(copy):
    (copy/"result.json").write_text('{"steps": 12, "val_loss": NaN}')
    text = checked(copy)
    assert "result.json is no JSON" in text and "not finished" not in text

def test_command_with_files_that_are_no_files(tmp_path, capsys):
    os.mkfifo(tmp_path/"config.json")
    speedrun_report([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path/'report.html'}\n"

@pytest.mark.filterwarnings("ignore:Glyph")    # in the picture's font
@pytest.mark.parametrize("name", ["$", "$x", "costs $5 and $6", r"$\frac$", "two\nlines", "tab\t\x00\x1b\ud800", "名前", "n"*5000, ""], ids=ascii)
def test_a_run_of_any_name_has_a_loss_chart(name):
    fig = loss_chart([dict(step=i, loss=1/i) for i in range(1, 9)], title=name)
    fig.savefig(io.BytesIO(), format="png")
    title = fig.axes[0].get_title(loc="left")
    assert len(title) <= 80 and title.isprintable() and not fig.axes[0].get_title(loc="center")
    assert fig.axes[0].bbox.width > 500     # the chart isn't squeezed by its title

def test_events_breakdown_and_gpu_are_shown(copy):
    rows = [dict(step=s, ms_data=1., ms_forward=2., ms_backward=4., ms_optimizer=1., ms_telemetry=2., gpu_mem_gib=3., gpu_peak_gib=2.5,
                 gpu_util=90, gpu_power_w=500., gpu_temp_c=60, loss=None if s == 5 else 1., grad_norm=10.**s)
            for s in range(1, 7)] + [dict(step=4, event="out of memory", batch=2)]
    rows += [dict(step=7, loss=None, lr=.1, grad_norm=None, tok_s=9., event="skipped")]
    (copy/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = re.sub(r"\s+", " ", checked(copy))
    for said in ("Where a step's time goes", "backward 50%", "Medians of 6 measured steps. The norms that are logged take 2.00 ms more", "Temperature (°C)",
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
    assert (n := calls_of(lambda: checked(copy))) < 500*len(rows), n # some for each row, not for each pair
    assert (copy/"report.html").stat().st_size < 500_000

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

def test_a_folder_that_cannot_be_written(copy, capsys):
    "In words, and nothing is left"
    (copy/"report.html").mkdir()
    with pytest.raises(SystemExit) as e: speedrun_report([str(copy)])
    assert e.value.code == 2
    assert re.fullmatch(r"error: .*report.html can't be written: [a-z][^\[]*: .*\n", capsys.readouterr().err)
    assert not [*copy.glob("*.tmp")]

@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks(copy):
    "A Chinese title is on the page, without a word of matplotlib's"
    ax = loss_chart([dict(step=s, loss=3.) for s in range(9)]).axes[0]
    ax.set_title("漢字")
    assert "漢字" in svg(ax.figure, "Loss")

def test_what_a_recipe_schedules_has_a_chart(tmp_path):
    "A recipe that moves its momentum logs it, as it was in that step; one that doesn't has no such chart"
    from llm_speedrun.train.trainer import train
    for recipe, there in (("normuon", True), ("adamw", False)):
        trainer, _ = train(options(tmp_path/recipe, steps=20, recipe=recipe), progress=False)
        rows = [r for r in trainer.rows() if "train_s" in r]
        assert ("momentum" in rows[-1]) == there == ("Momentum" in (trainer.folder/"report.html").read_text(encoding="utf-8"))
        if there: assert [r["momentum"] for r in rows] == pytest.approx([.85 + .1*min(1, (r["step"] - 1)/10) for r in rows])
