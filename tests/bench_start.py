"""Measure what a user's first command does: the list it takes, the seconds until the first step, its speed; and the doctor's promise.
    tests/bench_start.py runs 10 OUT [options]             ten runs without options, each next to one with --rungs fastest
    tests/bench_start.py doctor OUT "options" "options"    the doctor's time and speed next to a run with the same options
    tests/bench_start.py first                             `make speedrun` as it is, for the home page: nbs/measurements/first_run/nvidia-h100.json
Prints a line for each run, and writes all of them into OUT/runs.json."""
import json, re, shutil, statistics, subprocess, sys, time
from pathlib import Path

def command(name, words):
    "Run a command of the package in a process of its own; its output. Its error ends this program"
    code = f"from llm_speedrun.cli import {name}; {name}()"
    p = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    if p.returncode: sys.exit(f"{name} {' '.join(map(str, words))}\n{p.stdout[-2000:]}\n{p.stderr[-2000:]}")
    return p.stdout

def run(out, name, words):
    "Train, and return what the run's folder says of its start and its speed"
    command("speedrun_train", [*words, "--name", name, "--out", out, "--sample_tokens", 0])
    folder = Path(out)/name
    config, result = (json.loads((folder/f"{k}.json").read_text()) for k in ("config", "result"))
    rows = [json.loads(line) for line in open(folder/"metrics.jsonl")]
    last = [r for r in rows if "train_s" in r][-1]
    phases = {p["name"]: p["seconds"] for p in result["start"]["phases"]}
    shutil.rmtree(folder/"checkpoints", ignore_errors=True) # twenty runs would fill a disk
    (folder/"model.safetensors").unlink()
    return dict(name=name, rungs=config["rungs"], gpu=config["gpu"], torch=config["torch"], triton=config["triton"], date=config["date"],
                micro_batch=config["micro_batch_size"], steps=result["steps"], choose_s=phases.get("choose rungs"), start_s=result["start"]["seconds"],
                phases=phases, tok_s=last["step"]*config["step_tokens"]/last["train_s"], train_s=last["train_s"], val_loss=result["val_loss"], seconds=result["seconds"])

def default_runs(n, out, *words):
    "Runs without options and with `--rungs fastest`, interleaved"
    found = {"default": [], "fastest": []}
    for i in range(int(n)):
        for kind, more in (("default", []), ("fastest", ["--rungs", "fastest"])):
            found[kind].append(r := run(out, f"{kind}-{i}", [*more, *words]))
            print(f"{r['name']}: {r['choose_s']:.2f} s to choose, {r['start_s']:.1f} s to the first step, {r['tok_s']:,.0f} tokens/s", flush=True)
    best = statistics.median(r["tok_s"] for r in found["fastest"])
    for r in found["default"]: r["of_fastest"] = r["tok_s"]/best
    print(*(f"{k}: {sum(r['rungs'] == k for rs in found.values() for r in rs)} runs" for k in {r["rungs"] for rs in found.values() for r in rs}), sep="\n")
    print("without options, of the median with --rungs fastest:", *(f"{r['of_fastest']:.3f}" for r in found["default"]))
    return found

def promises(out, *options):
    "The doctor's time and tokens/s, and those of a run"
    found = []
    for i, text in enumerate(options):
        words = [*text.split(), "--name", f"promise-{i}", "--out", out]
        said = " ".join(command("speedrun_doctor", words).split())
        m = re.search(r"about ([\d.]+) (\w+) at ([\d,]+) tokens/s", said)
        seconds = float(m[1])*dict(seconds=1, minutes=60, hours=3600, days=86400)[m[2]]
        found.append(dict(options=text, doctor_seconds=seconds, doctor_tok_s=float(m[3].replace(",", ""))) | (r := run(out, f"promise-{i}", text.split())))
        print(f"{text}: the doctor says {m[1]} {m[2]} at {m[3]} tokens/s; the run takes {r['seconds']:.1f} s at {r['tok_s']:,.0f}", flush=True)
    return found

ROOT = Path(__file__).resolve().parents[1]

def printed_by(target):
    "Run a target of the Makefile; what it prints, and its seconds"
    t0, lines = time.perf_counter(), []
    with subprocess.Popen(["make", target], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        for line in p.stdout: print(line, end="", flush=True); lines.append(line)
    if p.returncode: sys.exit(p.returncode)
    return "".join(lines), round(time.perf_counter() - t0)

def first_run(record=ROOT/"nbs/measurements/first_run/nvidia-h100.json"):
    "What the README's command prints, the seconds that it takes after the installation, and its machine"
    installed, _ = printed_by("hopper")
    text, seconds = printed_by("speedrun")
    config = json.loads((ROOT/re.search(r"everything is in (\S+)", text)[1]/"config.json").read_text())
    machine = {k: config[k] for k in ("gpu", "driver", "torch", "triton", "date") if k in config}
    record.write_text(json.dumps(machine | dict(seconds=seconds, text=installed + text), indent=1) + "\n")

if __name__ == "__main__":
    what, *args = sys.argv[1:]
    if what == "first": sys.exit(first_run(*args))
    found, out = (default_runs(*args), args[1]) if what == "runs" else (promises(*args), args[0])
    (Path(out)/"runs.json").write_text(json.dumps(found, indent=1))
