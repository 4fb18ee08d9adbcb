"""Measure each rung of `fastest` and `fastest16` by the rule for all rungs: the list with it and without it, interleaved (`llm_speedrun.verdicts`).
    tests/bench_kept.py OUT [--minutes M] [--steps 124m:64,124m:8,1b:8] [--lists fastest,fastest16] [--rungs NAME,...]
Prints a line for each pair and writes OUT/<gpu>.json at once. A pair that is there, of the same code, packages and GPU, isn't measured again, so that a run may
be repeated until all is there. After M minutes no other pair is begun. At the end it prints what the rule decides.
Records of the course's card belong to nbs/site/measurements/kept/."""
import argparse, json, subprocess, time, uuid
from functools import partial
from pathlib import Path
import torch
from llm_speedrun.benchmarks import peers
from llm_speedrun.io_utils import InputError
from llm_speedrun.measure import make_record, records_path, table, version_of
from llm_speedrun.model_config import workload
from llm_speedrun.records import code_of
from llm_speedrun.rung_registry import rung_specs
from llm_speedrun.step_builder import free_memory, resolve_options
from llm_speedrun.timing import sample_ms, speedup, take_turns
from llm_speedrun.train.presets import leave_one_out, preset
from llm_speedrun.verdicts import ROUNDS, STEPS, decisions

TURN_MS = 200. # of a turn, at least one step
ROOT = Path(__file__).resolve().parents[1]

def about_run():
    "What all records of one run share"
    git = lambda *args: subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True).stdout.strip()
    packages = {p: v for p in "flash-attn-4 quack-kernels nvidia-cutlass-dsl".split() if (v := version_of(p))}
    return dict(run=uuid.uuid4().hex[:8], commit=git("rev-parse", "HEAD") + "-dirty"*bool(git("status", "--porcelain")), packages=packages, measured="step")

def key(r): return r["list"], r["rung"], r["workload"], r["batch"]
def same_run(r, other): return all(r.get(k) == other.get(k) for k in ("gpu", "torch", "triton", "code", "packages"))

class Pairs:
    "The contenders of one list and step. The last list with a rung stays built for the next pair"
    def __init__(self, config, batch): self.config, self.batch, self.kept, self.rungs = config, batch, None, None

    def contender(self, rungs): return peers.contender(",".join(rungs), partial(peers.build_ours, rungs), self.config, self.batch)

    def measure(self, with_it, without, rounds):
        "Take turns. Returns both contenders, the one without first"
        if self.rungs != with_it:
            self.kept = None; free_memory()
            self.kept, self.rungs = self.contender(with_it), with_it
        other = self.contender(without)
        reps = max(1, int(TURN_MS/max(min(sample_ms(c.step, 2)) for c in (other, self.kept))))
        for c, turns in zip((other, self.kept), take_turns(dict(without=other.step, whole=self.kept.step), rounds, reps).values()): c.measured.rounds = turns
        return other, self.kept

def record(name, rung, without, whole, about): # a list's name; contenders
    "The record of the list with the rung over the list without it"
    a, b = without.measured, whole.measured
    rungs, before = ([*c.peer.step.run.rungs] for c in (whole, without))
    return make_record(rung, b, before="without", batch=whole.batch, seq=whole.config.seq_len, code=code_of(rungs), workload=whole.config.name, list=name, rungs=rungs,
                       rungs_before=before, micro=whole.micro, micro_before=without.micro, gib_before=a.peak_gib, ms_before=a.times.ms, **speedup(a, b)) | about

def line(r):
    return (f"{r['list']}, {r['workload']} B{r['batch']}, {r['rung']}: " + (f"{r['ratio']:.4f} ({r['ratio_p10']:.4f} to {r['ratio_p90']:.4f}), {r['ms_before']:.2f} to "
            f"{r['ms']:.2f} ms, {r['gib_before'] or 0:.1f} to {r['peak_gib'] or 0:.1f} GiB" if "ratio_p10" in r else f"not without it: {r['why']}"))

def wanted_pairs(steps, lists, only, done):
    "Pairs to measure, by step and list, so that the same contender serves many: (config, batch, list's name, rung, with, without)"
    for name_of_model, batch in steps:
        config = workload(name_of_model)
        for name in lists:
            specs = rung_specs(resolve_options(config, preset(name))) # choices are made once, alike for all
            for rung, sides in sorted(leave_one_out(specs).items(), key=lambda p: [*map(str, p[1][0])]):
                with_it, without = ([*map(str, side)] for side in sides)
                if (not only or rung in only) and not done((name, rung, name_of_model, batch), code_of(with_it)): yield config, batch, name, rung, with_it, without

def main(out, minutes=1e9, steps=STEPS, lists=("fastest", "fastest16"), only=(), rounds=ROUNDS):
    "Measure what is missing, and print the decisions. Returns all records"
    path, end, about, pairs = Path(out)/records_path().name, time.monotonic() + 60*minutes, about_run(), None
    path.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(path.read_text()) if path.exists() else []
    here = make_record("", peers.Measured([[1.]], None, 0.), packages=about["packages"])
    def done(k, code): return any(key(r) == k and same_run(r, here | dict(code=code)) for r in records)
    for config, batch, name, rung, with_it, without in wanted_pairs(steps, lists, only, done):
        if time.monotonic() > end: print(f"{minutes:g} minutes are over: run it again for the rest", flush=True); break
        if not pairs or (pairs.config, pairs.batch) != (config, batch): pairs = Pairs(config, batch)
        try: r = record(name, rung, *pairs.measure(with_it, without, rounds), about)
        except InputError as e: r = here | about | dict(list=name, rung=rung, workload=config.name, batch=batch, code=code_of(with_it), why=str(e))
        except Exception as e: print(f"{name}, {config.name} B{batch}, {rung}: {type(e).__name__}: {str(e).strip():.500}", flush=True); free_memory(); continue
        records = [o for o in records if key(o) != key(r)] + [r]
        path.write_text(json.dumps(records, indent=1) + "\n")
        print(line(r), flush=True)
        torch._dynamo.reset(); free_memory()
    steps = STEPS if {*steps} <= {*STEPS} else steps # a part of them decides nothing
    print(table(["list", "rung", *(f"{m} × {b}" for m, b in steps), "the rung", "why"], decisions(records, dict.fromkeys((r["list"], r["rung"]) for r in records), steps)))
    return records

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out"); p.add_argument("--minutes", type=float, default=1e9); p.add_argument("--rounds", type=int, default=ROUNDS)
    for k in ("steps", "lists", "rungs"): p.add_argument(f"--{k}", default="")
    a = p.parse_args()
    named = [k for k in a.rungs.split(",") if k]
    steps = [(m, int(b)) for m, b in (s.split(":") for s in a.steps.split(",") if s)] or STEPS
    main(a.out, a.minutes, steps, a.lists.split(",") if a.lists else ("fastest", "fastest16"), named, a.rounds)
