"What `make lab` opens: copies that the reader may change, a table of contents, and notebooks whose drawing code and solutions are folded."
import json, os, re, subprocess, sys
import pytest
import hide_sources, lab
from helpers.cells import LESSONS, NBS, NUMBERED, of_kind, read, source
from make_readme import ROOT
from helpers.tiny_runs import fails
from helpers.timeouts import TIMEOUT
from llm_speedrun.io_utils import InputError

@pytest.fixture
def course(tmp_path):
    "A small course, and the folder of its copies"
    nbs = tmp_path/"nbs"
    (nbs/"site/measurements").mkdir(parents=True)
    for name in ("00_one", "10_two"): (nbs/f"{name}.ipynb").write_text(f"the course's {name}")
    (nbs/"site/measurements/gpu.json").write_text("[]")
    return nbs, tmp_path/"lab"

def test_copies_follow_the_course(course):
    nbs, copies = course
    assert lab.update(nbs, copies) == [] and (copies/"10_two.ipynb").read_text() == "the course's 10_two"
    (nbs/"10_two.ipynb").write_text("newer"); (nbs/"site/measurements/gpu.json").write_text("[1]")
    assert lab.update(nbs, copies) == [] and (copies/"10_two.ipynb").read_text() == "newer"
    assert (copies/"site/measurements/gpu.json").read_text() == "[1]"

def test_what_the_reader_wrote_stays(course):
    nbs, copies = course
    lab.update(nbs, copies)
    (copies/"10_two.ipynb").write_text("mine")
    assert lab.update(nbs, copies) == [] # the course's is as it was
    (nbs/"10_two.ipynb").write_text("newer")
    assert lab.update(nbs, copies) == ["10_two.ipynb"] and (copies/"10_two.ipynb").read_text() == "mine"
    (copies/".copied.json").write_text("{") # damaged
    assert lab.update(nbs, copies) == ["10_two.ipynb"] and (copies/"10_two.ipynb").read_text() == "mine"

def test_reset(course):
    nbs, copies = course
    lab.update(nbs, copies)
    assert lab.reset("10_two", nbs, copies) is None # there was nothing to keep
    for mine in ("first", "second"):
        (copies/"10_two.ipynb").write_text(mine)
        kept = lab.reset("10_two.ipynb", nbs, copies)
        assert kept.read_text() == mine and (copies/"10_two.ipynb").read_text() == "the course's 10_two"
    assert {p.name for p in copies.glob("10_two.mine*")} == {"10_two.mine1.ipynb", "10_two.mine2.ipynb"}
    assert lab.update(nbs, copies) == []
    with fails(InputError, "unknown lesson '10_tow'.*10_two"): lab.reset("10_tow", nbs, copies)

def test_a_copy_of_what_has_moved_goes_unless_it_was_changed(course):
    nbs, copies = course
    lab.update(nbs, copies)
    (copies/"10_two.ipynb").write_text("mine")
    (nbs/"1_start").mkdir()
    for name in ("00_one", "10_two"): (nbs/f"{name}.ipynb").rename(nbs/f"1_start/{name}.ipynb")
    assert lab.update(nbs, copies) == []
    assert not (copies/"00_one.ipynb").exists() and (copies/"10_two.ipynb").read_text() == "mine"
    assert (copies/"1_start/10_two.ipynb").read_text() == "the course's 10_two"

def test_contents_name_every_lesson(tmp_path):
    page = lab.contents(ROOT/"nbs", tmp_path)
    assert re.findall(r"^\| \[\d\d [^\]]*\]\(([^)]*)\)", page, re.M) == [p.relative_to(ROOT/"nbs").as_posix() for p in LESSONS]
    assert re.search(r"10_tf32.ipynb\): The first rung[^|]*\| \d+ \| yes \|  \|", page)

def test_contents_mark_what_is_solved(tmp_path):
    lesson = next(p for p in LESSONS if p.stem == "10_tf32")
    def copy(*right):
        nb = read(lesson)
        for c in of_kind(nb, "code"): c["outputs"] = []
        nb["cells"] += [dict(cell_type="code", source=["x"], metadata={}, outputs=[dict(text=[f"Exercise {n}: right\n"])]) for n in right]
        (tmp_path/"10_tf32.ipynb").write_text(json.dumps(nb))
        return lab.mark(tmp_path/"10_tf32.ipynb")
    assert lab.solved(lesson) == (0, 3) # those that the course shows are of hidden solutions
    assert [copy(), copy(2), copy(1, 2, 3)] == ["", "1 of 3", "✓"] and lab.mark(tmp_path/"none") == ""

def test_records_of_a_copy_are_its_own(course, monkeypatch):
    "A lesson that runs on a GPU publishes into the copies' folder, and git stays clean"
    from llm_speedrun.measure import measurements_dir
    nbs, copies = course
    (nbs.parent/"settings.ini").touch()
    lab.update(nbs, copies)
    for here, where in ((copies, copies), (nbs, nbs), (nbs.parent, nbs)):
        monkeypatch.chdir(here)
        assert measurements_dir().resolve() == (where/"site/measurements").resolve()

@pytest.mark.parametrize("path", NBS, ids=lambda p: p.stem)
def test_sources_are_folded(path):
    "tests/hide_sources.py repeats this"
    assert hide_sources.written(hide_sources.hide(read(path))) == path.read_text(encoding="utf-8"), "run tests/hide_sources.py"

@pytest.mark.parametrize("source, hidden, first", [
    ("#| echo: false\nplot()", True, "#| echo: false"), ("#| hide\nx", True, "#| hide"), ("x = 1", False, "x = 1"),
    ('#| code-fold: true\n#| code-summary: "A solution"\nx', True, '#| code-summary: "A solution"'), ("print('#| hide')", False, "print('#| hide')")])
def test_which_sources_are_folded(source, hidden, first):
    for before in ({}, dict(jupyter=dict(source_hidden=True)), dict(jupyter=dict(outputs_hidden=True))):
        cell = dict(cell_type="code", source=source, metadata=before)
        c, = hide_sources.hide(dict(cells=[cell]))["cells"]
        assert c["metadata"].get("jupyter", {}).get("source_hidden", False) is hidden
        assert c["metadata"].get("jupyter", {}).get("outputs_hidden") == before.get("jupyter", {}).get("outputs_hidden")
        assert "".join(c["source"]).splitlines()[0] == first and sorted("".join(c["source"])) == sorted(source)

@pytest.mark.parametrize("source, left", [('#| echo: false\n#| fig-alt: "A bar: \\"10\\" high"\nplot()', "#| echo: false\nplot()"),
                                          ('#| fig-alt: "A bar: \\"10\\" high"\nplot()', "plot()")])
def test_texts_of_figures_leave_the_source(source, left):
    "Where they would run off the cell; a new text takes the place of an older one"
    cell = dict(cell_type="code", source=source.splitlines(keepends=True), metadata={"fig-alt": "Old"})
    for _ in range(2): cell, = hide_sources.hide(dict(cells=[cell]))["cells"]
    assert "".join(cell["source"]) == left and cell["metadata"]["fig-alt"] == 'A bar: "10" high'

def test_masked_lanes_warn_of_nothing():
    "Red lines below a cell that is right would look like an error. Other warnings come through"
    warn = "import warnings\nfor m in ('triton.runtime.interpreter', 'numpy'): warnings.warn_explicit(f'of {m}', RuntimeWarning, 'f', 1, m)"
    p = subprocess.run([sys.executable, "-c", warn], env=os.environ | lab.ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT)
    assert "of numpy" in p.stderr and "interpreter" not in p.stderr

# Cells that are newer than the last run on a GPU
UNRECORDED = {"03_roofline/roof", "21_cuda_graphs/speed", *(f"14_matmul/{k}" for k in "l2 specialized curve parts tuned".split()),
              *(f"15_debug_kernels/{k}" for k in "repeats memcheck racecheck ncu".split())}

def test_every_recorded_output_is_there():
    "What a CPU shows instead of its own numbers: each name belongs to one cell, of that lesson, with outputs from a GPU"
    calls = [(name, p.stem, c) for p in NUMBERED for c in of_kind(read(p), "code") if "def show_recorded" not in source(c)
             for name in re.findall(r'show_recorded\("([^"]+)"\)', source(c))]
    assert len(calls) >= 12 and len({name for name, *_ in calls}) == len(calls)
    outputs = json.loads((ROOT/"nbs/site/measurements/outputs.json").read_text(encoding="utf-8"))
    for name, stem, c in calls: assert name.split("/")[0] == stem, name
    on_gpu = lambda stem: outputs.get(stem, {}).get("gpu", "CPU") != "CPU"
    assert {name for name, stem, c in calls if not c["outputs"] or not on_gpu(stem)} == UNRECORDED, "what has been recorded leaves the list"

def test_a_cpu_shows_what_a_gpu_recorded(monkeypatch, capsys):
    from llm_speedrun.course import show_recorded
    monkeypatch.chdir(ROOT/"nbs")
    show_recorded("01_gpu/launches")
    assert re.match(r"Recorded on an NVIDIA \w+, 20\d\d-\d\d-\d\d:\n +1 numbers: +[\d.]+ µs", capsys.readouterr().out)
    monkeypatch.chdir(ROOT.parent)
    show_recorded("01_gpu/launches")
    assert "nothing to show" in capsys.readouterr().out

@pytest.mark.parametrize("there", [True, False])
def test_no_speedup_of_a_cpu_is_shown(there):
    "Tables and lines of a record made on a CPU say what a GPU recorded, or nothing"
    from llm_speedrun.measure import NO_GPU, ladder_table
    from llm_speedrun.course import course_records, guess_chart, paid_text
    gpus = course_records()[1]
    mine = gpus | dict(gpu="CPU", ratio=17.17, tok_s=171717., ms=17.17, on_gpu=gpus if there else None)
    said = f"{ladder_table([mine])}{paid_text(mine)}"
    assert "17.17" not in said and "171,717" not in said
    assert (f"{gpus['ratio']:.2f}×" in said and gpus["gpu"] in said and gpus["date"] in said) if there else said == NO_GPU*2
    assert bool(guess_chart(2, mine)) is there
