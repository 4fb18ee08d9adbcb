"What `tests/notebooks.py` notes of a lesson: speedups that this CPU measured and a reader would see."
import copy, json, pickle, statistics, time
import pytest
import notebooks
from helpers import cpu_times
from helpers.cells import LESSONS
from helpers.cpu_times import Clock, Speedup, Took

@pytest.fixture
def shown(monkeypatch):
    "What was noted, as if a cell were running"
    monkeypatch.setattr(cpu_times, "SHOWN", found := [])
    monkeypatch.setattr(cpu_times, "line_of_notebook", lambda: "the line")
    return found

def took(seconds): return Clock(5. + seconds) - Clock(5.)

@pytest.mark.parametrize("make", [
    lambda a, b: f"{a/b:.2f}", lambda a, b: str(a/b), lambda a, b: print({"x": a/b}), lambda a, b: format(statistics.median([a/b, b/a, a/a]), ".1f"),
    lambda a, b: f"{1/(b/a)}", lambda a, b: f"{(64/b)/(64/a):.3g}", lambda a, b: f"{1e3*a/(1e3*b):.2f}", lambda a, b: f"{round(a/b, 2)}", lambda a, b: f"{a/b - 1:.2f}",
    lambda a, b: f"{sum([a, a])/b:.1f}", lambda a, b: f"{max(a, b)/b:.1f}", lambda a, b: "{ratio:.2f}".format(ratio=a/b)])
def test_speedups_are_noted(make, shown):
    make(took(2.), took(1.))
    assert shown

@pytest.mark.parametrize("make", [
    lambda a, b: f"{a:.2f} s", lambda a, b: f"{64/a:.0f} tokens/s", lambda a, b: f"{a/b:.0%}", lambda a, b: a/b > 1, lambda a, b: json.dumps(a/b),
    lambda a, b: f"{float(a/b):.2f}", lambda a, b: f"{3./2:.2f}", lambda a, b: f"{a/b*b:.2f} s", lambda a, b: f"{pickle.loads(pickle.dumps(a/b))}"])
def test_other_numbers_are_not(make, shown):
    make(took(2.), took(1.))
    assert not shown

def test_numbers_are_as_ever():
    a, b = took(3.), took(2.)
    assert (a/b, a + b, a - b, 2*a, a**2, abs(b - a), round(a/b), -1 + a/b) == (1.5, 5., 1., 6., 9., 1., 2, .5)
    assert type(a/b) is Speedup and type(a + 1) is Took and type(Clock(3.) - 1.) is float and type(copy.deepcopy(a/b)) is float

def test_only_cells_count(monkeypatch):
    "Outside of a cell nothing is shown to a reader, nor is the message of an error that is expected"
    monkeypatch.setattr(cpu_times, "SHOWN", found := [])
    f"{took(2.)/took(1.):.2f}"
    assert not found
    code = "def test_fail(f):\n    f()\ntest_fail(lambda: f'{a/b:.2f}')"
    exec(compile(code, "<ipython-input-1-abc>", "exec"), dict(a=took(2.), b=took(1.)))
    assert not found
    exec(compile("f'{a/b:.2f}'", "<ipython-input-1-abc>", "exec"), dict(a=took(2.), b=took(1.)))
    assert len(found) == 1

def test_charts_are_noted(shown, monkeypatch):
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    for name in ("bar", "barh", "plot", "scatter", "semilogx", "semilogy", "loglog", "errorbar"): monkeypatch.setattr(Axes, name, getattr(Axes, name))
    cpu_times.watch_charts()
    ax = plt.figure().add_subplot()
    ax.plot([1, 2], [took(2.), took(3.)])
    assert not shown
    ax.barh(["a", "b"], [1., took(2.)/took(1.)])
    assert {*shown} == {("the line", "a chart")} # `barh` calls `bar`
    plt.close()

def test_a_lesson_that_shows_one_fails(monkeypatch):
    "One that may passes, and one that is on the list while it shows none has to leave it"
    monkeypatch.setattr(cpu_times, "SHOWN", [("print(x)", "2.00")])
    wrong = lambda name: notebooks.shows_wrongly(f"nbs/{name}.ipynb")
    assert "2.00: print(x)" in wrong("2_ladder/99_x") and not wrong("1_start/00_start") and not wrong("source/measure") and not wrong("4_training_run/40_trainer")
    monkeypatch.setattr(cpu_times, "CPU_SPEEDUPS_AWAITING", ["98_y"])
    assert not wrong("2_ladder/98_y")
    monkeypatch.setattr(cpu_times, "SHOWN", [])
    assert "take it out" in wrong("2_ladder/98_y") and not wrong("2_ladder/99_x")

def test_exceptions_are_lessons():
    names = {p.stem for p in LESSONS if p.parent.name[0] in cpu_times.PARTS}
    assert {*cpu_times.CPU_SPEEDUPS_AWAITING} <= names and cpu_times.CPU_EXPERIMENTS.keys() - {"00_start"} <= names
    assert not {*cpu_times.CPU_SPEEDUPS_AWAITING} & cpu_times.CPU_EXPERIMENTS.keys()
