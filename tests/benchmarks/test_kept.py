"The bench that measures what stays in a list: which pairs, from which records a decision, what a repetition leaves alone."
import json
from types import SimpleNamespace
import pytest
import bench_kept
from llm_speedrun.io_utils import InputError
from llm_speedrun.timing import Measured
from llm_speedrun.verdicts import ROUNDS, STEPS, UNMEASURED, decisions

STEP = [("tiny", 2)]

@pytest.fixture
def timed(monkeypatch):
    "Fake turns: `ms[rung]` is a step's time without the rung, 10 ms with it. Returns `ms`, and the pairs that were measured"
    ms, asked = {}, []
    def measure(self, with_it, without, rounds):
        rung = next(k for k in with_it if k not in without).split(":")[0]
        asked.append(rung)
        if isinstance(t := ms.get(rung, 10.), Exception): raise t
        def side(rungs, t): return SimpleNamespace(measured=Measured([[t]]*rounds, 8., 0.), batch=self.batch, micro=1, config=self.config,
                                                   peer=SimpleNamespace(step=SimpleNamespace(run=SimpleNamespace(rungs=[k.split(":")[0] for k in rungs]))))
        return side(without, t), side(with_it, 10.)
    monkeypatch.setattr(bench_kept.Pairs, "measure", measure)
    return ms, asked

def decided(records, steps=STEP): return {row[1]: tuple(row[-2:]) for row in decisions(records, [(r["list"], r["rung"]) for r in records], steps)}

def test_the_gain_is_that_of_the_rung(tmp_path, timed, capsys):
    "And not of its absence: a list that is slower without a rung keeps it"
    timed[0].update(flash=11., fused_adamw=9.)
    rs = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])
    assert [(r["rung"], r["ratio"], r["ratio_rounds"]) for r in rs] == [("flash", 1.1, ROUNDS), ("fused_adamw", .9, ROUNDS)]
    assert [(r["rungs"], r["rungs_before"]) for r in rs] == [(["flash", "fused_adamw"], ["fused_adamw"]), (["flash", "fused_adamw"], ["flash"])]
    assert decided(rs) == dict(flash=("stays", "gains at tiny × 2"), fused_adamw=("leaves", "costs at tiny × 2"))
    assert "1.100 to 1.100" in capsys.readouterr().out and all({"run", "commit", "packages"} <= r.keys() for r in rs)

def test_few_rounds_decide_nothing(tmp_path, timed):
    timed[0].update(flash=20.)
    assert decided(bench_kept.main(tmp_path, steps=STEP, lists=["cpu"], rounds=ROUNDS - 1))["flash"] == ("stays so far", UNMEASURED)

def test_all_steps_must_be_there(tmp_path, timed):
    "Records of one of the rule's steps decide nothing"
    timed[0].update(flash=20.)
    rs = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])
    assert decided(rs, [*STEP, ("tiny", 1)])["flash"] == ("stays so far", UNMEASURED) and decided(rs, STEPS)["flash"][0] == "stays so far"

def test_a_repetition_measures_what_is_missing(tmp_path, timed, monkeypatch):
    ms, asked = timed
    first = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"], only=["flash"])
    assert bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])[:1] == first and asked == ["flash", "fused_adamw"]
    bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])
    assert len(asked) == 2
    monkeypatch.setattr(bench_kept, "code_of", lambda rungs: "other code")
    rs = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])
    assert len(asked) == 4 and len(rs) == 2 and {r["code"] for r in rs} == {"other code"}
    assert rs == json.loads((tmp_path/"cpu.json").read_text())

def test_it_stops_in_time(tmp_path, timed, capsys):
    assert bench_kept.main(tmp_path, minutes=-1, steps=STEP, lists=["cpu"]) == [] and "run it again" in capsys.readouterr().out

def test_what_others_need_stays(tmp_path, timed, capsys):
    "A list that can't be built without a rung says so; what else fails is no decision"
    timed[0].update(flash=InputError("rung 'x' needs flash"), fused_adamw=RuntimeError("out of memory"))
    rs = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"])
    assert decided(rs) == dict(flash=("stays", "the list can't do without it")) and "out of memory" in capsys.readouterr().out

def test_steps_are_built_and_timed(tmp_path):
    "A tiny model on this machine, without a fake: the last list with a rung stays built"
    rs = bench_kept.main(tmp_path, steps=STEP, lists=["cpu"], rounds=2)
    assert [r["rung"] for r in rs] == ["flash", "fused_adamw"] and all(r["ms"] > 0 and r["ms_before"] > 0 and r["ratio_rounds"] == 2 for r in rs)
