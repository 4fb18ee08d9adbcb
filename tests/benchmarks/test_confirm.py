"`make confirm` finds what it is there to find: a rung that is slower or computes something else, another rival than the recorded one, a race that is lost."
import json, subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import pytest, torch
import confirm as program
from llm_speedrun.benchmarks import confirm as module
from llm_speedrun.benchmarks.adapters import CLONED, Adapter
from llm_speedrun.benchmarks.confirm import (NO, OPEN, YES, clone_at, confirm, guilty, lines_of, outcome, race_line, record_for, records_of,
                                             rivals_in, rung_lines, speed_lines, wrong_clone)
from llm_speedrun.benchmarks.speed_run import HEADLINE, WITHOUT, own_lists
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.rung_registry import RUNGS, find_rung
from helpers.files import read_yaml
from helpers.tiny_runs import NANO, fails, nano
from make_readme import ROOT

@pytest.fixture
def tiny(monkeypatch, tmp_path):
    "(rung to break or None) -> the exit status of a tiny `confirm`, and what it wrote. Its records are those of a first run; half a step is to spare, since this machine is busy"
    monkeypatch.setattr(module, "workload", lambda name: NANO)
    monkeypatch.setattr(module, "ON_CPU", [f"{WITHOUT}{k}" for k in ("flash", "fused_ops")])
    monkeypatch.setattr(module, "SPARE", 1.5)
    monkeypatch.setattr(module, "SPARE_TOK_S", 10.)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    before, runs = dict(RUNGS), iter(range(9))
    def run(broken=None, records=tmp_path/"records"):
        out = tmp_path/f"run{next(runs)}"
        out.mkdir()
        if broken: program.break_rung(broken)
        try: status = confirm(out, records, tmp_path/"no rivals", race_minutes=0)
        finally: RUNGS.update(before)
        return status, json.loads((out/"confirm.json").read_text())
    yield run

def keep(found, tmp_path):
    (tmp_path/"records/headline").mkdir(parents=True)
    (tmp_path/"records/headline/cpu.json").write_text(json.dumps(found["records"]))

def test_a_broken_rung_is_named(tiny, tmp_path, capsys):
    "It passes as it is, fails with a rung that takes longer, or that changes the loss, and names that one"
    status, first = tiny()
    assert status == 0 and "confirms nothing" in first["outcome"] and {o["verdict"] for o in first["lines"]} == {YES, OPEN}
    assert {"run", "commit", "packages", "gpu", "torch", "date"} <= first.keys() and "nanogpt" in first["missing"]
    keep(first, tmp_path)
    status, same = tiny()
    assert (status, {o["verdict"] for o in same["lines"]}) == (0, {YES})
    for broken in ("flash=slow", "fused_ops=loss"):
        status, found = tiny(broken)
        assert status == 1 and found["outcome"] == f"Not confirmed. Look at the rung {broken.partition('=')[0]}.", (broken, found["lines"])
    said = capsys.readouterr().out
    assert "fused_ops saves, of a step" in said and "not confirmed: first loss" in said and "Attach" in said

def test_what_breaks_a_rung():
    for text in ("flash", "flash=away"):
        with fails(InputError, "RUNG=slow"): program.break_rung(text)

def test_a_list_that_fails(tiny, monkeypatch):
    "A rung that raises is no reason to pass"
    def broken(run): raise RunError("rung 'flash' doesn't work here")
    monkeypatch.setitem(RUNGS, "flash", vars(find_rung("flash")) and module_copy(find_rung("flash"), broken))
    status, found = tiny()
    assert status == 1 and any("doesn't work here" in o["why"] for o in found["lines"])

def module_copy(rung, f):
    "A rung with the declarations of another"
    vars(f).update(vars(rung))
    f.__name__ = rung.__name__
    return f

def old(rung, ratio, **kw): # a record of the course
    return dict(rung=rung, workload="124m", batch=64, seq=1024, gpu="NVIDIA H100 80GB HBM3", ratio=ratio, ratio_p10=.99*ratio, ratio_p90=1.01*ratio, ms=100/ratio,
                ms_p20=99/ratio, ms_p80=101/ratio, ms_of_fastest=100., tok_s=655360*ratio, losses=[10.9, 5.], measured="step") | kw

def test_which_record(tmp_path):
    "The front page's come before those of single races; one of the same card, batch and length first; training isn't a step"
    (tmp_path/"peers").mkdir()
    (tmp_path/"peers/a.json").write_text(json.dumps([old("nanogpt", .5)]))
    assert [r["ratio"] for r in records_of(tmp_path)] == [.5] and records_of(tmp_path/"peers") == []
    (tmp_path/"headline").mkdir()
    found = [old("nanogpt", .9, batch=32), old("nanogpt", .6, gpu="NVIDIA H200"), old("nanogpt", .65), old("fastest", 1., measured="training")]
    (tmp_path/"headline/a.json").write_text(json.dumps(found))
    found = records_of(tmp_path)
    assert len(found) == 3
    for gpu, ratio in {"NVIDIA H200": .6, "NVIDIA H100 80GB HBM3": .65, "NVIDIA H800": .6}.items(): assert record_for(found, old("nanogpt", 1., gpu=gpu))["ratio"] == ratio
    assert record_for(found, old("nanogpt", 1., gpu="CPU")) is None and record_for(found, old("nanochat", 1.)) is None

@pytest.mark.parametrize("ratio, verdict", [(.65, YES), (.65*1.01*1.028, YES), (.65*.99/1.028, YES), (.65*1.01*1.035, NO), (.65*.99/1.035, NO), (float("inf"), NO)])
def test_the_edges_of_a_range(ratio, verdict):
    "Three percent beside the range on either side"
    line, = speed_lines([old("nanogpt", ratio)], [old("nanogpt", .65)])
    assert line.verdict == verdict and line.recorded[0] == pytest.approx(1/.65)

def test_a_rung_that_saves_more():
    "is no fault; one that saves less by more than three percent of a step is"
    name, records = f"{WITHOUT}fp8", [old(f"{WITHOUT}fp8", 1/1.3)]
    verdict = lambda gain: rung_lines([old(name, 1/gain)], records)[0].verdict
    assert [verdict(g) for g in (1.6, 1.3, 1.26, 1.24, 1.2)] == [YES, YES, YES, NO, NO]

def test_a_slow_machine_breaks_no_rung():
    "Where all takes twice as long, rungs save twice the milliseconds, and the rivals tell"
    records = [old("nanogpt", .65), old(f"{WITHOUT}fp8", 1/1.3)]
    slow = [r | dict(ms=2*r["ms"], ms_of_fastest=200.) for r in records]
    assert rung_lines(slow, records)[0].verdict == YES
    only_ours = [records[0], records[1] | dict(ratio=1/1.05, ratio_p10=.99/1.05, ratio_p90=1.01/1.05, ms_of_fastest=124., ms=130.)]
    assert rung_lines(only_ours, records)[0].verdict == NO

def test_the_outcome(monkeypatch):
    "On a GPU: nothing compared is no success"
    monkeypatch.setattr(module, "own_lists", dict) # which asks the GPU
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    records = [old("nanogpt", .65)]
    assert [outcome(lines_of([old("nanogpt", r)], o))[1] for r, o in ((.65, records), (.5, records), (.65, []))] == [0, 1, 3]
    assert outcome([])[1] == 3

def test_clones(tmp_path, monkeypatch):
    "A clone has the known commit, whatever came after it; another one, a changed one and one of unknown commit are refused; nothing is fetched offline"
    git = lambda *words: subprocess.run(["git", "-C", tmp_path/"origin", "-c", "user.name=a", "-c", "user.email=b@c", *words], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path/"origin").mkdir()
    git("init"); git("config", "uploadpack.allowAnySHA1InWant", "true")
    for text in ("first", "second"):
        (tmp_path/"origin/model.py").write_text(text); git("add", "model.py"); git("commit", "-m", text)
    class Fake(Adapter): clone, commit, step_files = f"file://{tmp_path}/origin", git("rev-parse", "HEAD~1"), ("model.py",)
    a, path = Fake(), tmp_path/"clones/origin"
    clone_at(a, path)
    assert (path/"model.py").read_text() == "first" and wrong_clone(a, path) == ""
    (path/"model.py").write_text("mine")
    assert "changed" in wrong_clone(a, path)
    assert f"is at commit {git('rev-parse', 'HEAD')[:12]}" in wrong_clone(a, tmp_path/"origin")
    (tmp_path/"plain").mkdir(); (tmp_path/"plain/model.py").write_text("x")
    assert "COMMIT" in wrong_clone(a, tmp_path/"plain")
    (tmp_path/"plain/COMMIT").write_text(a.commit)
    assert wrong_clone(a, tmp_path/"plain") == ""
    for name in module.RIVALS: monkeypatch.setitem(CLONED, name, a)
    assert all("isn't there" in why for why in rivals_in(tmp_path/"nothing", True).values())
    assert rivals_in(tmp_path/"fetched", False, lambda s: None) == {} and (tmp_path/"fetched/origin/model.py").exists()
    Fake.clone = f"file://{tmp_path}/gone"
    assert all("can't be cloned" in why for why in rivals_in(tmp_path/"more", False, lambda s: None).values()) and not (tmp_path/"more/gone").exists()

def test_pinned_commits():
    "are those that the site speaks of"
    known = read_yaml(ROOT/"nbs/site/_build/projects.yml")["projects"]
    for name in module.RIVALS: assert (CLONED[name].clone, CLONED[name].commit) == (known[name]["repo"], known[name]["commit"])

def test_a_race_that_fails(tiny, tmp_path, monkeypatch):
    "is missing, and not lost; one in which ours didn't finish is"
    monkeypatch.setattr(module, "rivals_in", lambda *args: {"nanochat": "not here"})
    monkeypatch.setattr(module, "clone_folder", lambda *args: "clone")
    ran = SimpleNamespace(returncode=2, stdout="", stderr="error: too few steps")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kw: ran)
    (tmp_path/"out").mkdir()
    assert confirm(tmp_path/"out", tmp_path, tmp_path) == 0
    assert "too few steps" in json.loads((tmp_path/"out/confirm.json").read_text())["missing"]["race"]
    assert race_line(dict(clock=60., data="x", results=dict(nanogpt=[dict(loss=3.)]))).verdict == NO

@pytest.mark.cuda
@pytest.mark.parametrize("broken", ["flash4=slow", "fp8_epilogues=slow", "fp8=loss"])
def test_a_broken_rung_on_a_gpu(broken, tmp_path, monkeypatch):
    "At the size of the course, against records of the same minute"
    rung = broken.partition("=")[0]
    if rung not in own_lists()["fastest"]: pytest.skip(f"{rung} can't run here")
    monkeypatch.setattr(module, "ON_GPU", [f"{WITHOUT}{k}" for k in ("flash4", "fp8_epilogues", "fp8", "fused_adamw")])
    def run(name):
        (tmp_path/name).mkdir()
        return confirm(tmp_path/name, tmp_path/"records", tmp_path/"none", race_minutes=0), json.loads((tmp_path/name/"confirm.json").read_text())
    _, first = run("first")
    keep(first, tmp_path)
    before = dict(RUNGS)
    try: program.break_rung(broken); status, found = run("broken")
    finally: RUNGS.update(before)
    assert status == 1 and f"the rung {rung}" in found["outcome"], found["lines"]
