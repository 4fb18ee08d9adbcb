"The installed commands: complete help, both kinds of data, and one line for each error that a user can make."
import json, os, re, subprocess, sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
import numpy as np, pytest
from fastcore.docments import docments
from fastcore.script import anno_parser
from llm_speedrun.train.doctor import speedrun_doctor
from llm_speedrun.export import speedrun_export
from llm_speedrun.runs import RUNGS
from llm_speedrun.train.corpora import speedrun_data
from llm_speedrun.train.report import speedrun_report
from llm_speedrun.ladder import speedrun_ladder
from llm_speedrun.train.hardware import presets
from llm_speedrun.train.trainer import TrainConfig, speedrun_train
from small import VOCAB, nano, options, write_bins

BIN = Path(sys.executable).parent
COMMANDS = dict(speedrun_train=speedrun_train, speedrun_ladder=speedrun_ladder, speedrun_data=speedrun_data, speedrun_doctor=speedrun_doctor,
                speedrun_export=speedrun_export, speedrun_report=speedrun_report)
installed = pytest.mark.skipif(not all((BIN/c).exists() for c in COMMANDS),
                               reason="the package is not installed: pip install -e .")

def run(folder, *args):
    "Run a command in `folder`, with a cache of its own; what it said, on stdout and stderr"
    env = os.environ | dict(LLM_SPEEDRUN_CACHE=str(folder/"cache"), COLUMNS="300", PYTHONIOENCODING="utf-8")
    return subprocess.run([str(BIN/args[0]), *map(str, args[1:])], cwd=folder, env=env, capture_output=True,
                          text=True, encoding="utf-8", timeout=120)

QUICK = "--workload tiny --rungs naive --steps 12 --batch 4 --seq 32 --eval_tokens 256 --evals 2 --sample 20".split()

@installed
def test_help_in_a_process(tmp_path):
    "`--help` is printed, and touches no data"
    res = run(tmp_path, "speedrun_train", "--help")
    assert res.returncode == 0 and "--workload" in res.stdout and not (tmp_path/"cache").exists()

@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, monkeypatch):
    "It lists every option with what it does"
    monkeypatch.setenv("COLUMNS", "300")
    f = COMMANDS[command]
    said = re.sub(r"\s+", " ", anno_parser(f.__wrapped__).format_help())
    assert " ".join(f.__doc__.split()) in said
    for name, help in docments(f, returns=False).items():
        assert help and re.search(rf"\b{name}\b[^-]* {re.escape(help)}", said), name
    for preset in presets() if "--rungs" in said else []: assert re.search(rf"--rungs\b[^-]*\b{preset}\b", said), preset

def test_command_and_config_agree():
    "`speedrun_train` has the options of `TrainConfig`: their names, order, defaults and types"
    f = signature(speedrun_train).parameters.values()
    assert [(p.name, p.default, p.annotation) for p in f] == [(o.name, o.default, o.type) for o in fields(TrainConfig)]

@installed
def test_trains_on_a_folder_of_text(tmp_path):
    "`--data <folder of .txt>` tokenizes, trains, prints a sample and where everything is"
    texts = tmp_path/"texts"
    texts.mkdir()
    for i in range(120): (texts/f"{i}.txt").write_text(f"Document {i}. The fox jumps over the lazy dog, {i} times.\n" * 5)
    res = run(tmp_path, "speedrun_train", "--data", texts, *QUICK, "--vocab", 300, "--out", "mine", "--name", "a")
    assert res.returncode == 0, res.stderr
    for part in ("Tokenizing", "--- sample ---", "validation loss", "everything is in mine/a/"): assert part in res.stdout
    for name in ("model.safetensors", "metrics.jsonl", "loss.png", "tokenizer.json"): assert (tmp_path/"mine/a"/name).exists()
    assert not (tmp_path/"runs").exists() and len(list((tmp_path/"cache").iterdir())) == 1

@installed
def test_trains_on_a_nanogpt_bin(tmp_path):
    "`--data` takes nanoGPT's train.bin, with the val.bin beside it; the run's folder has a name by default"
    write_bins(tmp_path/"bins")
    res = run(tmp_path, "speedrun_train", "--data", "bins/train.bin", *QUICK, "--vocab", VOCAB)
    assert res.returncode == 0, res.stderr
    folder, = (tmp_path/"runs").iterdir()
    assert folder.name.startswith("tiny-") and f"everything is in runs/{folder.name}/" in res.stdout
    assert (folder/"model.safetensors").exists()

@installed
def test_error_in_a_process(tmp_path):
    "An error that a user can make ends the command with one line and exit code 2"
    res = run(tmp_path, "speedrun_train", "--data", "nowhere.txt", *QUICK)
    assert (res.returncode, res.stdout) == (2, "") and not (tmp_path/"runs").exists()
    assert re.fullmatch(r"error: 'nowhere.txt' is neither a corpus .*\n", res.stderr)

ERRORS = [
    (dict(data="nowhere"), "'nowhere' is neither a corpus"), (dict(data="empty.txt"), "empty.txt has no text"),
    (dict(data="latin.txt"), "latin.txt is not UTF-8"), (dict(data="odd.bin"), "odd.bin has 4097 bytes"),
    (dict(data="short.bin"), "short.bin: .* fewer than one batch of 4 x 16"),
    (dict(data="high.bin"), "high.bin: token 999"),
    (dict(data="a.json"), "a.json is one JSON document"), (dict(data="bad.jsonl"), "bad.jsonl line 1 is not JSON"),
    (dict(workload="124n"), "unknown workload '124n'. Did you mean '124m'"),
    (dict(rungs="fastets"), "unknown rung or preset 'fastets'. Did you mean 'fastest'"),
    (dict(rungs="tf32,flash,tf32"), "'tf32' is applied twice"),
    (dict(rungs="bf16"), "'bf16' cannot run here: it is an old card"),
    (dict(seq=64), "seq 64 is longer"), (dict(batch=-4), "batch can't be negative"),
    (dict(tokens=-1), "tokens can't be negative"),
    (dict(out="a.json"), "a.json"), (dict(name="there"), "there exists already"),
    (dict(lr=1e30, steps=20), "5 steps in a row")]

@pytest.fixture
def there(tmp_path, monkeypatch):
    "A folder of bad inputs, as the current one; bf16 can't run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(tmp_path/"cache"))
    monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "it is an old card")
    bad = {"empty.txt": b"", "latin.txt": b"caf\xe9", "odd.bin": bytes(4097), "a.json": b"{}", "bad.jsonl": b"{\n"}
    for name, b in bad.items(): (tmp_path/name).write_bytes(b)
    for name, n, high in (("short.bin", 50, 9), ("high.bin", 5000, 999)): np.full(n, high, "<u2").tofile(tmp_path/name)
    (tmp_path/"runs/there").mkdir(parents=True)
    return tmp_path

@pytest.mark.parametrize("option,message", ERRORS, ids=str)
def test_error(there, capsys, option, message):
    "Each error that a user can make: exit code 2, one line that names the thing, nothing in the folder that exists"
    with pytest.raises(SystemExit) as e: speedrun_train(**vars(options(there, out="runs")) | option)
    lines = [o for o in capsys.readouterr().err.splitlines() if "step/s" not in o and o.strip()]
    assert e.value.code == 2 and len(lines) == 1 and re.match(f"error: .*{message}", lines[0]), lines
    assert not list((there/"runs/there").iterdir())

@pytest.mark.parametrize("option,message", [
    (dict(batch=-1), "batch must be at least 1, not -1"), (dict(workload="124n"), "unknown workload '124n'"),
    (dict(rungs="flsh"), "unknown rung or preset 'flsh'"),
    (dict(rungs="tf32,flash", only="flsh"), "unknown rung of this ladder 'flsh'. Did you mean 'flash'"),
    (dict(rungs="fp8,fused_ops"), "rung 'fp8' .* add the rungs bf16 and fused_ops"),
    (dict(rungs="flash,checkpoint,selective_checkpoint"), "exclude each other"),
    (dict(rungs="bf16"), "'bf16' cannot run here"), (dict(out="a.json"), "a.json")], ids=str)
def test_ladder_error(there, capsys, option, message):
    "The same for `speedrun_ladder`"
    with pytest.raises(SystemExit) as e: speedrun_ladder(**dict(workload="nano", rungs="naive", batch=1, out="ladder") | option)
    lines = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and len(lines) == 1 and re.match(f"error: .*{message}", lines[0]), lines
    assert not (there/"ladder").exists()

def test_ladder_overwrites_nothing(there, capsys):
    "A folder that holds a ladder is not written into unasked"
    (there/"ladder").mkdir()
    (there/"ladder/ladder.json").write_text("mine")
    with pytest.raises(SystemExit): speedrun_ladder(workload="nano", rungs="naive", batch=1, out="ladder")
    assert (there/"ladder/ladder.json").read_text() == "mine" and "ladder" in capsys.readouterr().err

def test_ladder(there, capsys, monkeypatch):
    "`speedrun_ladder` prints its table, with the machine below it, and writes records, table and chart"
    monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "")
    speedrun_ladder(workload="nano", rungs="bf16,flash", batch=1, out="ladder")
    said = capsys.readouterr().out
    assert "saved in ladder/" in said and re.search(r"\| fp32 .*\n\| bf16 .*×.*\n\| flash .*×", said)
    assert "smoke run" in said or "driver" in said
    folder = there/"ladder"
    assert {p.name for p in folder.iterdir()} == {"ladder.json", "ladder.md", "ladder.png"}
    records = json.loads((folder/"ladder.json").read_text())
    assert [(r["rung"], r["before"]) for r in records] == [("fp32", None), ("bf16", "fp32"), ("flash", "bf16")]
    assert (folder/"ladder.md").read_text(encoding="utf-8") in said
    assert (folder/"ladder.png").read_bytes().startswith(b"\x89PNG")

@pytest.mark.parametrize("only,rungs", [
    ("flash", [("bf16", None), ("flash", "bf16")]), ("bf16, flash", [("fp32", None), ("bf16", "fp32"), ("flash", "bf16")]),
    ("bf16,fused_adamw", [("fp32", None), ("bf16", "fp32"), ("flash", None), ("fused_adamw", "flash")])])
def test_ladder_only(there, capsys, monkeypatch, only, rungs):
    "`--only` measures some rungs, each against the whole ladder below it"
    monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "")
    speedrun_ladder(workload="nano", rungs="bf16,flash,fused_adamw", only=only, batch=1, out="ladder")
    records = json.loads((there/"ladder/ladder.json").read_text())
    assert [(r["rung"], r["before"]) for r in records] == rungs and all(r["kept"] for r in records)
    assert records[-1]["rungs"] == ["bf16", "flash", "fused_adamw"][:len(records[-1]["rungs"])]

def test_ladder_of_a_preset(there, capsys, monkeypatch):
    "A preset is a ladder; what can't run here is not in it"
    monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "")
    monkeypatch.setattr(RUNGS["tf32"], "needs", lambda: "it is an old card")
    speedrun_ladder(workload="nano", rungs="safe", batch=1, out="ladder")
    records = json.loads((there/"ladder/ladder.json").read_text())
    assert [r["rung"] for r in records] == ["fp32", "bf16", "flash", "fused_adamw"]
