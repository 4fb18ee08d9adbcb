"""Time one update of all weights by our 8-bit AdamW and by those of others, in turns.
    tests/bench_optimizers.py OUT MODEL
Random gradients, FP32 weights. Writes OUT/optimizers.json: milliseconds, and how many times as fast each is as PyTorch's fused AdamW."""
import json, sys
from importlib.util import find_spec
from pathlib import Path
import torch
from llm_speedrun.measure import default_device, machine, version_of
from llm_speedrun.timing import compare, speedup
from llm_speedrun.model_config import workload
from llm_speedrun.runs import build
from llm_speedrun.stepper import param_groups

HOW = dict(lr=1e-4, betas=(.9, .95), weight_decay=.1)

def makers():
    "Name -> what makes an optimizer of a model"
    fused = lambda m: torch.optim.AdamW(param_groups(m, .1), fused=torch.cuda.is_available(), **HOW)
    found = {"fused AdamW": fused, "ours, 8 bits": lambda m: build(m.config, ["bf16", "adamw8bit"]).optimizer(m)}
    for name in ("torchao", "bitsandbytes"):
        if find_spec(name): found[f"{name} {version_of(name)}, 8 bits"] = lambda m, name=name: adamw8bit_of(name)(param_groups(m, .1), **HOW)
    return found

def adamw8bit_of(name):
    if name == "torchao": import torchao.optim as package
    else: import bitsandbytes.optim as package
    return package.AdamW8bit

def update(make, config): # what makes an optimizer, a `GPTConfig`
    "An update, whose gradients stay"
    model, g = build(config, ["bf16"]).model, torch.Generator(default_device()).manual_seed(0)
    for p in model.parameters(): p.grad = torch.randn(p.shape, device=p.device, generator=g).mul_(1e-3)
    return make(model).step

def main(out, model):
    config = workload(model)
    found = compare({k: lambda make=make: update(make, config) for k, make in makers().items()}, rounds=10, reps=10)
    base = found["fused AdamW"]
    records = [dict(optimizer=k, workload=model, ms=m.times.ms, peak_gib=m.peak_gib, **speedup(base, m), **machine()) for k, m in found.items()]
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out)/"optimizers.json").write_text(json.dumps(records, indent=1))
    for r in records: print(f"{r['optimizer']}: {r['ms']:.3f} ms, {r['ratio']:.3f} of the speed of fused AdamW ({r['ratio_p10']:.3f} to {r['ratio_p90']:.3f})")

if __name__ == "__main__": main(*sys.argv[1:])
