"""Race our step with the strongest that others have, 8 bits against 8 bits and 16 against 16, and keep the records.
    tests/bench_peers.py OUT MODEL BATCH NAME ...    NAME: a list of ours below, a peer from pip, or PEER=FOLDER of its clone; NAME:LABEL renames
Each races with our `fastest` alone, in turns: all of them would not fit in memory. Prints a line for each, and writes OUT/peers.json at once:
a contender that lies there already for this model is not measured again. `ratio` is its speed over that of `fastest`, with the 10th and 90th
percentile over the rounds. Lists of ours that end on `-installed` are without FlashAttention-4 and QuACK; `-flash4` and `-quack` have one of them;
`fastest-without-RUNG` lacks one rung and those that build on it."""
import json, sys
from functools import partial
from pathlib import Path
import torch
from llm_speedrun.benchmarks import peers
from llm_speedrun.measure import version_of
from llm_speedrun.model_config import workload
from llm_speedrun.rung_registry import rung_specs
from llm_speedrun.step_builder import free_memory
from llm_speedrun.train.presets import presets, without_rung

QUACK = {"epilogues", "fp8_epilogues", "fused_ce"} # rungs with its kernels
SECONDS = 10. # for which energy is measured
LEFT_OUT = dict(installed={"flash4"} | QUACK, flash4=QUACK, quack={"flash4"})

def lists():
    "Name -> rungs"
    found = {k: presets()[k] for k in ("fastest", "fastest16", "safe")}
    more = {f"{k}-{name}": [r for r in rungs if r not in out] for k, rungs in found.items() for name, out in LEFT_OUT.items()}
    return found | more | {f"fastest-without-{out}": without_rung(rung_specs(found["fastest"]), out) for out in found["fastest"]}

def setup_of(name, path):
    "What builds a contender"
    return partial(peers.build_ours, lists()[name]) if name in lists() else peers.peer(name, path or None)

def line_of(r):
    return (f"{r['workload']} B{r['batch']} {r['rung']}: {r['tok_s']:,.0f} tokens/s in micro-batches of {r['micro']}, {r['ratio']:.4f} of fastest "
            f"({r['ratio_p10']:.4f} to {r['ratio_p90']:.4f}), loss {r['losses'][0]:.3f} to {r['losses'][1]:.3f}, {r['joules'] or 0:.1f} J, {r['peak_gib'] or 0:.1f} GiB; "
            f"fastest took {r['ms_of_fastest']:.2f} ms")

def main(out, model, batch, *names, rounds=10, reps=3):
    out, config, batch = Path(out), workload(model), int(batch)
    out.mkdir(parents=True, exist_ok=True)
    path = out/"peers.json"
    records = json.loads(path.read_text()) if path.exists() else []
    done = {(r["workload"], r["rung"]) for r in records}
    ours = peers.contender("fastest", setup_of("fastest", None), config, batch)
    joules = peers.joules_of(ours.step, SECONDS)
    for said in names:
        name, _, folder = said.partition("=")
        name, _, label = name.partition(":")
        if (model, label or name) in done: continue
        try: c = peers.contender(label or name, setup_of(name, folder), config, batch)
        except Exception as e: print(f"{said} is left out: {type(e).__name__}: {str(e).strip():.600}", flush=True); free_memory(); continue
        first, r = peers.race([ours, c], rounds, reps)
        r |= dict(ms_of_fastest=first["ms"], joules=peers.joules_of(c.step, SECONDS), joules_of_fastest=joules, packages=versions())
        records.append(r); done.add((model, r["rung"]))
        path.write_text(json.dumps(records, indent=1))
        print(line_of(r), flush=True)
        del c; torch._dynamo.reset(); free_memory()

def versions():
    return {p: v for p in "torchao liger-kernel transformers flash-attn-4 quack-kernels bitsandbytes".split() if (v := version_of(p))}

if __name__ == "__main__": main(*sys.argv[1:])
