"""One step between marks for Nsight Compute, and a table of what it measured, by kernel.
    ncu --profile-from-start off --clock-control none --csv --page raw --metrics METRICS python tests/profile_step.py step MODEL BATCH LAYERS RUNGS > FILE
    tests/profile_step.py metrics                    what to give as METRICS
    tests/profile_step.py table FILE [OUT]           milliseconds, share of the memory's and the tensor cores' peak; as JSON into OUT
CUDA graphs are left out, since kernels are measured one at a time. A model of fewer layers has the same kernels in less time."""
import csv, json, re, sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

METRICS = dict(ns="gpu__time_duration.sum", memory="dram__throughput.avg.pct_of_peak_sustained_elapsed", sm="sm__throughput.avg.pct_of_peak_sustained_elapsed",
               bytes="dram__bytes.sum", warps="sm__warps_active.avg.pct_of_peak_sustained_active")

def step(model, batch, layers, rungs):
    import torch
    from llm_speedrun.benchmarks.peers import random_tokens
    from llm_speedrun.model_config import workload
    from llm_speedrun.runs import build
    from llm_speedrun.stepper import Stepper
    from llm_speedrun.train.presets import presets
    names = presets()[rungs] if rungs in presets() else rungs.split(",")
    config = replace(workload(model), layers=int(layers))
    s, tokens = Stepper(build(config, [r for r in names if r != "cuda_graphs"])), random_tokens(config, int(batch))
    for _ in range(5): s(tuple(tokens))
    torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStart()
    s(tuple(tokens))
    torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()

def short(name):
    "A kernel's name without its template arguments"
    return re.sub(r"<.*|\(.*", "", name.replace("void ", "")).split("::")[-1][:60]

UNITS = dict(second=1e9, s=1e9, ms=1e6, us=1e3, ns=1, msecond=1e6, usecond=1e3, nsecond=1, byte=1, Kbyte=1e3, Mbyte=1e6, Gbyte=1e9, KB=1e3, MB=1e6, GB=1e9, B=1)

def table(path, out=None):
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith('"')]
    rows = [*csv.DictReader(lines)]
    units, rows = rows[0], rows[1:]
    sums = defaultdict(lambda: defaultdict(float))
    for r in rows:
        of, ns = sums[short(r["Kernel Name"])], float(r[METRICS["ns"]].replace(",", ""))*UNITS.get(units[METRICS["ns"]], 1)
        of["n"] += 1; of["ms"] += ns/1e6
        of["bytes"] += float(r[METRICS["bytes"]].replace(",", ""))*UNITS.get(units[METRICS["bytes"]], 1)
        for k in ("memory", "sm", "warps"): of[k] += ns*float(r[METRICS[k]].replace(",", ""))
    found = [dict(kernel=name, n=int(o["n"]), ms=o["ms"], gb=o["bytes"]/1e9, **{k: o[k]/o["ms"]/1e6 for k in ("memory", "sm", "warps")}) for name, o in sums.items()]
    found.sort(key=lambda o: -o["ms"])
    print(f"{sum(o['ms'] for o in found):.2f} ms in {sum(o['n'] for o in found)} kernels")
    for o in found[:40]: print(f"{o['ms']:8.3f} ms {o['n']:4} {o['gb']:7.2f} GB, memory {o['memory']:3.0f}%, SM {o['sm']:3.0f}%, warps {o['warps']:3.0f}%  {o['kernel']}")
    if out: Path(out).write_text(json.dumps(found, indent=1))

if __name__ == "__main__":
    if sys.argv[1] == "metrics": print(",".join(METRICS.values()))
    else: dict(step=step, table=table)[sys.argv[1]](*sys.argv[2:])
