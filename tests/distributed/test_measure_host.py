"The script that measures several GPUs, with two processes of a CPU: what it writes as it goes, what it skips, where it goes on."
import os, subprocess, sys
from pathlib import Path
import pytest
import measure_host
from helpers import quick_programs
from helpers.timeouts import TIMEOUT, wait_until
from llm_speedrun.io_utils import RunError
from llm_speedrun.rung_registry import rung_name
from make_readme import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")

def run(out, *words):
    p = quick_programs.run([sys.executable, ROOT/"tests/measure_host.py", out, "--tiny", "--gpus", "2", *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT)
    return p.stdout

def options(out, *words): return measure_host.options([str(out), "--tiny", *words])

def test_two_processes_measure(tmp_path):
    words = ["--sections", "collectives,steps", "--minutes", 9, "--limit", 300]
    said = run(tmp_path, "--layouts", "tensor_parallel,hsdp", *words)
    found = measure_host.recorded(tmp_path)
    of = lambda section: [r for r in found if r["section"] == section]
    assert [(r["name"], r["bytes"]) for r in of("collectives")] == [(k, n) for n in (2**12, 2**16) for k in measure_host.COLLECTIVES], said
    for r in of("collectives"):
        assert r["ms_p20"] <= r["ms"] <= r["ms_p80"] and r["algorithm_gbs"] == pytest.approx(r["bytes"]/r["ms"]/1e6)
        assert r["bus_gbs"]/r["algorithm_gbs"] == pytest.approx(1 if r["name"] == "all_reduce" else .5)
    [step] = of("steps")
    assert (step["layout"], step["gpus"], step["rungs"][-1]) == ("tensor_parallel", 2, "tensor_parallel:size=2") and [*map(rung_name, step["rungs_before"])] == ["flash", "fused_adamw"]
    assert step["efficiency"] == step["ratio"]/2 and step["alone_tok_s"] == pytest.approx(4*64/step["alone_ms"]*1e3)
    assert [r["part"]["layout"] for r in of("skipped")] == ["hsdp"] and "tiny tensor_parallel" in said and "hsdp: it needs 4 GPUs" in said
    assert len(of("done")) == 2
    run(tmp_path, "--layouts", "tensor_parallel", *words)
    assert measure_host.recorded(tmp_path) == found, "what is there isn't measured again"

@pytest.mark.slow # what is killed comes back in test_elastic too
def test_the_way_back_after_a_kill(tmp_path):
    said = run(tmp_path, "--sections", "restart", "--minutes", 9, "--limit", 500)
    back, done = measure_host.recorded(tmp_path)
    assert (back["section"], done["section"]) == ("restart", "done") and min(back["new_process_s"], back["start_s"]) > 0
    assert "going on from" in said and "killed and started again" in said

def test_what_takes_too_long_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_host.uuid, "uuid4", lambda: type("U", (), dict(hex="ended")))
    part = dict(section="restart", gpus=2, tiny=True, rungs="flash")
    measure_host.start_part(tmp_path, part, 3)
    assert measure_host.recorded(tmp_path) == [dict(section="skipped", part=part, why="it was not over after 3 s")]
    assert not marked("ended") and "skipped: restart 2: it was not over" in measure_host.tables(tmp_path)

def marked(mark):
    return [p for p in Path("/proc").glob("[0-9]*/environ") if f"MEASURE_HOST={mark}".encode() in read(p)]

def read(path):
    try: return path.read_bytes()
    except OSError: return b""

def test_orphans_in_a_session_of_their_own_are_ended(): # as torchrun's workers may be
    mark = f"orphan-{os.getpid()}"
    subprocess.run(["sh", "-c", "setsid sleep 300 > /dev/null &"], env=os.environ | dict(MEASURE_HOST=mark))
    wait_until(lambda: marked(mark))
    measure_host.end_marked(mark)
    wait_until(lambda: not marked(mark))

def test_an_error_is_a_record(tmp_path):
    measure_host.run_part(tmp_path, part := dict(section="steps", gpus=2, model="tiny", layout="ddp", rungs="flsh", tiny=True))
    [r] = measure_host.recorded(tmp_path)
    assert r["part"] == part and r["section"] == "skipped" and "flsh" in r["why"]

def test_without_time_nothing_starts(tmp_path):
    measure_host.measure(options(tmp_path, "--minutes", "0", "--sections", "collectives"))
    assert [r["why"] for r in measure_host.recorded(tmp_path)] == ["no time was left: the same command goes on here"]

def test_what_is_worth_most_comes_first(tmp_path):
    a = options(tmp_path, "--gpus", "4", "--models", "124m,1b")
    found = [(p["section"], p["gpus"], *((p["model"], p["layout"]) if "layout" in p else ())) for p in measure_host.parts(a, [])]
    steps = [("124m", "ddp"), ("1b", "fsdp"), ("1b", "tensor_parallel"), ("1b", "hsdp"), ("1b", "fsdp_tp"),
             ("1b", "ddp"), ("124m", "fsdp"), ("124m", "tensor_parallel"), ("124m", "hsdp"), ("124m", "fsdp_tp")]
    assert found == [("collectives", 4), *(("steps", 4, *s) for s in steps), ("restart", 2), ("collectives", 2)]
    done = [dict(section="done", part=p) for p in measure_host.parts(a, [])[1:]]
    assert [p["section"] for p in measure_host.parts(a, done)] == ["collectives"]

@pytest.mark.parametrize("layout, gpus, below, last", [
    ("ddp", 2, ["bf16", "cuda_graphs"], "ddp"), ("fsdp", 4, ["bf16"], "fsdp"), ("tensor_parallel", 4, ["bf16"], "tensor_parallel:size=4"),
    ("hsdp", 4, ["bf16"], "fsdp:replicas=2"), ("fsdp_tp", 4, ["bf16", "fsdp"], "tensor_parallel:size=2")])
def test_rungs_of_a_layout_and_fewer_sequences_where_memory_ends(tmp_path, monkeypatch, layout, gpus, below, last):
    "Rungs that a layout excludes are left out, of one GPU too"
    asked = []
    def together(config, *how):
        asked.append(how)
        if how[-1] > 16: raise RunError("process 1 of 2: torch.OutOfMemoryError: CUDA out of memory")
        return dict(ratio=1.8, seq=1024, alone_ms=32., gpus=gpus)
    monkeypatch.setattr("llm_speedrun.train.ladder.measure_together", together)
    measure_host.step(tmp_path, gpus, "124m", layout, "bf16,cuda_graphs")
    assert asked == [(below, last, gpus, n) for n in (64, 32, 16)]
    assert measure_host.recorded(tmp_path)[0]["alone_tok_s"] == 16*1024/.032

def test_other_errors_of_a_step_are_not_tried_again(tmp_path, monkeypatch):
    asked = []
    def together(*how): asked.append(how); raise RunError("process 1 of 2: it died")
    monkeypatch.setattr("llm_speedrun.train.ladder.measure_together", together)
    with pytest.raises(RunError, match="died"): measure_host.step(tmp_path, 2, "124m", "ddp", "bf16")
    assert len(asked) == 1

def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path/"measurements.jsonl").write_text('{"section": "done"}\n{"section": "do')
    assert measure_host.recorded(tmp_path) == [dict(section="done")] and measure_host.recorded(tmp_path/"other") == []

@pytest.mark.parametrize("words", [["--sections", "colectives"], ["--layouts", "zero"], ["--gpus", "1"]])
def test_wrong_options(tmp_path, words, capsys):
    with pytest.raises(SystemExit): options(tmp_path, *words)
    assert words[1] in capsys.readouterr().err or words[0] == "--gpus"
