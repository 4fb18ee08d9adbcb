"""Time optimizers: one update of all weights, or the steps of several processes.
    tests/bench_optimizers.py OUT MODEL
One update by our 8-bit AdamW and by those of other packages, interleaved. Random gradients, FP32 weights. Writes OUT/optimizers.json: milliseconds, and
each one's speedup over PyTorch's fused AdamW.
    tests/bench_optimizers.py OUT MODEL fsdp|tensor_parallel [STEPS [PROCESSES [RATE]]]
Training with the recipes speedrun (Muon) and adamw, at RATE (1) times their learning rates, by PROCESSES (2) GPUs together and by each of them alone, with the same batches; without GPUs by
CPU processes. Losses of all steps, memory, then interleaved times. Writes OUT/sharded-LAYOUT.json after each part, and prints a table."""
import json, statistics, sys, time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
import torch
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.distributed.world import World
from llm_speedrun.measure import default_device, machine, version_of
from llm_speedrun.timing import compare, speedup
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.recipe import set_groups
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
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

# --- several processes ---

RECIPES = "speedrun", "adamw"
RUNGS = dict(cuda="tf32 bf16 flash:backend=cudnn fused_ops chunked_ce", cpu="flash fused_ops chunked_ce")
SEQUENCES, WARMUP, ROUNDS = 64, 3, 10 # of a step; steps before those that are timed, and how often all take turns

def synchronize():
    if torch.cuda.is_available(): torch.cuda.synchronize()

def tokens(config, k, n, device):
    "The sequences of step `k`, which a model can learn: each token is 1 to 3 after the one before"
    g = torch.Generator().manual_seed(k)
    t = (torch.randint(config.vocab, (n, 1), generator=g) + torch.randint(1, 4, (n, config.seq_len + 1), generator=g).cumsum(1)) % min(config.vocab, 8192)
    return t[:, :-1].to(device), t[:, 1:].to(device)

class Training:
    "A run of a recipe in a layout, or of one process: its steps, losses, memory"
    def __init__(self, config, world, layout, recipe, sequences, steps, rate=1.):
        if torch.cuda.is_available(): torch.cuda.reset_peak_memory_stats()
        before = self.gib("memory_allocated")
        self.world, self.config, self.n, self.steps, self.k = world, config, sequences, steps, 0
        r, names = parse_recipe(recipe), [*RUNGS[default_device().type].split(), *([layout] if world.size > 1 else [])]
        run = r(build(config, names, world=world))
        self.lr = rate*r.defaults["lr"](config, steps=steps, passes=1, growth=1)
        self.step = GuardedStepper(replace(run, optimizer=partial(run.optimizer, weight_decay=.1)), clip=r.defaults["grad_clip"])
        self.micro = self.batches(0)
        self.losses = [self().item() for _ in range(steps)]
        kept = [t for s in self.step.opt.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        self.found = dict(layout=layout if world.size > 1 else "one", recipe=recipe, processes=world.size, losses=self.losses, lr=self.lr, rate=rate,
                          peak_gib=self.gib("max_memory_allocated") - before, state_gib=sum(t.nbytes for t in kept)/2**30, rungs=names)

    def gib(self, what): return getattr(torch.cuda, what)()/2**30 if torch.cuda.is_available() else 0.

    def batches(self, k):
        "The micro-batches of this process: as many sequences each as with all processes"
        i, n = self.world.rank_and_size("dp")
        x, y = tokens(self.config, k, self.n, self.step.run.device)
        rows = max(1, self.n//2)
        x, y = (t.chunk(n)[i].split(rows) for t in (x, y))
        return [*zip(x, y)]

    def __call__(self):
        set_groups(self.step.run, self.step.opt, min(self.k, self.steps - 1), self.steps, self.lr)
        loss = self.step(*self.batches(self.k))
        self.k += 1
        return loss

    def ms(self, n=3):
        "Milliseconds of a step on one batch that is there already"
        synchronize()
        start = time.perf_counter()
        for _ in range(n): self.step(*self.micro)
        synchronize()
        return (time.perf_counter() - start)/n*1e3

def measured(world, out, model, layout, sequences, steps, rate):
    "What a process finds; the first one writes it"
    config, all_of, res = workload(model), {}, dict(model=model, sequences=sequences, steps=steps, **machine(), runs=[])
    def save():
        if world.first: Path(out).write_text(json.dumps(res, indent=1))
    for recipe in RECIPES:
        for w in (World(), world): # each process alone does the same at the same time
            t = all_of[recipe, w.size] = Training(config, w, layout, recipe, sequences, steps, rate)
            t.found["peak_gib"] = max(world.all_gather_object(t.found["peak_gib"]))
            t.found["ms"] = []
            res["runs"].append(t.found)
            save()
    for t in all_of.values():
        for _ in range(WARMUP): t.step(*t.micro)
    for k in range(ROUNDS):
        for t in [*all_of.values()][::1 if k % 2 else -1]:
            world.barrier()
            t.found["ms"].append(max(world.all_gather_object(t.ms())))
        save()
    return res

def print_table(res):
    runs = {(r["recipe"], r["processes"]): r for r in res["runs"]}
    print("| recipe | processes | ms a step | 10% to 90% | peak GiB | GiB of optimizer state | first loss | last loss | largest difference from one |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (recipe, n), r in runs.items():
        off = max(abs(a - b) for a, b in zip(r["losses"], runs[recipe, 1]["losses"]))
        tenths = statistics.quantiles(r["ms"], n=10)
        print(f"| {recipe} | {n} | {statistics.median(r['ms']):.1f} | {tenths[0]:.1f} to {tenths[-1]:.1f} | {r['peak_gib']:.2f} | {r['state_gib']:.3f} "
              f"| {r['losses'][0]:.4f} | {r['losses'][-1]:.4f} | {off:.4f} |")
    of = lambda name: {r["recipe"]: r["ms"] for r in res["runs"] if r["processes"] > 1}[name]
    ratios = [a/b for a, b in zip(of("speedrun"), of("adamw"))]
    print(f"a step of speedrun takes {statistics.median(ratios):.3f} of one of adamw, by {len(ratios)} rounds from {min(ratios):.3f} to {max(ratios):.3f}")

def sharded(out, model, layout, steps="50", processes="2", rate="1"):
    Path(out).mkdir(parents=True, exist_ok=True)
    path, n = Path(out)/f"sharded-{layout}.json", int(processes)
    sequences = SEQUENCES if torch.cuda.is_available() else 4
    from bench_optimizers import measured # by its module's name, since other processes have another __main__
    print_table(run_distributed(n, measured, str(path), model, layout, sequences, int(steps), float(rate), tp=n if layout == "tensor_parallel" else 1)[0])

if __name__ == "__main__": (sharded if len(sys.argv) > 3 else main)(*sys.argv[1:])
