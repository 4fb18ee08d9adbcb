"""Measure what the site says of speed: our lists and the strongest step of others, 8 bits against 8 bits and 16 against 16, in one run.
    tests/bench_peers.py OUT MODEL:BATCH ... [options]      such as runs/speed 124m:64 1b:8 --rivals clones --seconds 570
Each contender takes turns with `fastest` alone: all of them would not fit in memory. Prints a line for each, and writes OUT/MODEL.json at once: a
contender that is there is not measured again, so the same command goes on where it was stopped. `ratio` is its speed over that of `fastest`, with
the 10th and 90th percentile over the rounds. Names of contenders are those of `own_lists` and `PEERS`; "headline" stands for all that the front page
needs, what matters most first, and "rungs" for `fastest` without each rung. Nothing begins after --seconds, which a command with several models divides
among them. With --train_seconds each of `TRAINED` trains before that, with the default recipe on --text.
    tests/bench_peers.py OUT --publish                       copy the records of OUT, which must be of one run, to nbs/site/measurements/headline"""
import argparse, json, time
from pathlib import Path
from llm_speedrun.benchmarks.speed_run import SpeedRun, named, run_facts, train_speed
from llm_speedrun.io_utils import InputError, RunError, clean_errors
from llm_speedrun.measure import load_records, measurements_dir, records_path
from llm_speedrun.model_config import workload

TRAINED = "fastest", "fastest16", "fastest-installed"

def publish(out, folder=None):
    "Copy the records of a run into the file of its card. Returns its path"
    records = [r for p in sorted(Path(out).glob("*.json")) for r in load_records(p)]
    runs, cards = ({r[k] for r in records} for k in ("run", "gpu"))
    if len(runs) != 1 or len(cards) != 1: raise InputError(f"{out} has records of {len(runs)} runs on {len(cards)} cards, and there must be one")
    path = Path(folder or measurements_dir()/"headline")/records_path(*cards).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return path

def train_all(run, text, seconds):
    "Train with each list that isn't in the file"
    for name in TRAINED:
        if run.find(name, "training"): continue
        try: r = train_speed(run, name, text, seconds)
        except RunError as e: print(e, flush=True); continue
        print(f"{r['workload']} {name} in training: {r['tok_s']:,.0f} tokens/s ({r['ms_p20']:.1f} to {r['ms_p80']:.1f} ms a step)", flush=True)

def measure(c, i, began):
    "Measure the model with number `i`, within its part of the seconds that are left"
    model, _, batch = c.models[i].partition(":")
    left = (c.seconds - (time.monotonic() - began))/(len(c.models) - i)
    run = SpeedRun(Path(c.out)/f"{model}.json", workload(model), int(batch or 64), c.rounds, c.reps, left, c.run, c.rivals, lambda s: print(s, flush=True))
    if c.train_seconds: train_all(run, c.text, c.train_seconds)
    if todo := run.measure_all(named(c.only)): print(f"{model}: not reached in time: {' '.join(todo)}")

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out"); p.add_argument("models", nargs="*")
    p.add_argument("--only", nargs="+", default=["headline"]); p.add_argument("--rivals"); p.add_argument("--run", default="")
    p.add_argument("--seconds", type=float, default=float("inf")); p.add_argument("--train_seconds", type=float, default=0.); p.add_argument("--text", default="stdlib")
    p.add_argument("--rounds", type=int, default=20); p.add_argument("--reps", type=int, default=2); p.add_argument("--publish", action="store_true")
    c, began = p.parse_args(args), time.monotonic()
    Path(c.out).mkdir(parents=True, exist_ok=True)
    if c.publish: return print(publish(c.out))
    before = [r["run"] for f in sorted(Path(c.out).glob("*.json")) for r in load_records(f)]
    c.run = c.run or (before or [run_facts()["run"]])[0]
    for i in range(len(c.models)): measure(c, i, began)

if __name__ == "__main__": clean_errors(main)
