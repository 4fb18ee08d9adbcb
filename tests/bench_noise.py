"""Test what the gradient noise scale predicts (lesson 52): train with batches of several sizes, and count the tokens until each of some training losses.
    tests/bench_noise.py OUT DATA [MODEL [TOKENS [SIZES [SEEDS]]]]    such as 124m 10e6 8,16,32,64,128 0,1
By the model a loss takes E (1 + B/N) tokens with a batch of B tokens, if N is the noise scale: a straight line in B. For each loss OUT/noise.json has the tokens of each size, N by that line,
N as `noise_scale` measures it in the run of the middle size when it gets there, and the tokens that this predicts, from the middle size, for the others.
All runs have the recipe normuon at a constant rate that goes with the root of the batch, after a short warm-up. Saves after each run, and goes on with those that are left."""
import json, math, statistics, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
from llm_speedrun.benchmarks.adapters import tree_commit
from llm_speedrun.benchmarks.race import corpus_facts
from llm_speedrun.data.batches import Batches, prefetch
from llm_speedrun.data.corpus import open_corpus
from llm_speedrun.measure import machine
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.batch import noise_scale
from llm_speedrun.recipes.recipe import set_groups
from llm_speedrun.recipes.recipe_spec import find_recipe
from llm_speedrun.recipes.schedules import GuardedStepper
from llm_speedrun.runs import build
from llm_speedrun.train.presets import parse_rungs

RATE, USUAL = .02, 64 # of the recipe, and the sequences that it is for
WARMUP, SMOOTH = 2**19, 2**18 # tokens: of the warm-up; over which the training loss is averaged
NOISE_BATCHES = 64 # that a noise scale is measured with

def train(corpus, config, size, tokens, seed, watch=None): # sequences in a step; called with the stepper and each smoothed loss
    "Train. Returns pairs of tokens and smoothed training loss"
    run = find_recipe("normuon")(build(config, parse_rungs("safe") + ["chunked_ce"], seed=seed))
    step, rate = GuardedStepper(replace(run, optimizer=partial(run.optimizer, weight_decay=.1))), RATE*(size/USUAL)**.5
    per, found, mean = size*config.seq_len, [], None
    steps, keep = math.ceil(tokens/per), math.exp(-per/min(SMOOTH, tokens/40))
    batches = prefetch(Batches(corpus.train, size, config.seq_len, seed=seed), run.device)
    losses = []
    for i, (x, y) in zip(range(steps), batches):
        set_groups(run, step.opt, i, steps, rate*min(1., (i + 1)*per/min(WARMUP, tokens/20)))
        losses.append(step((x, y)))
        if len(losses) < max(1, int(min(2**15, tokens/100))//per): continue # read in parcels: each reading waits for the GPU
        for loss in torch.stack(losses).tolist(): mean = loss if mean is None else keep*mean + (1 - keep)*loss
        found.append(((i + 1)*per, mean)); losses = []
        if watch: watch(step, mean)
    return found

def reached(curve, loss):
    "The tokens at which a smoothed loss is passed, on a straight line between two readings; None where it isn't"
    for (a, la), (b, lb) in zip(curve, curve[1:]):
        if lb <= loss < la: return a + (b - a)*(la - loss)/(la - lb)

def line(xs, ys):
    "The straight line of least squares of relative errors: its value at 0, and its slope"
    w = [1/y for y in ys]
    a, b = (torch.tensor(t, dtype=torch.double) for t in ([[u, u*x] for u, x in zip(w, xs)], [1.]*len(xs)))
    return torch.linalg.lstsq(a, b[:, None]).solution[:, 0].tolist()

def judge(record):
    "For each loss the tokens of each size, the two noise scales, and the prediction: a list of dicts"
    runs, rows, seq = record["runs"], [], record["seq"]
    sizes = sorted({r["size"] for r in runs})
    middle = sizes[len(sizes)//2]
    for loss in record["losses"]:
        took = {s: [t for r in runs if r["size"] == s and (t := reached(r["curve"], loss))] for s in sizes}
        took = {s: statistics.mean(ts) for s, ts in took.items() if ts}
        noise = [n for r in runs if r["size"] == middle for l, n in r["noise"] if l == loss and math.isfinite(n)]
        row = dict(loss=loss, tokens=took, measured=statistics.median(noise) if noise else None)
        if len(took) > 2:
            e, slope = line([s*seq for s in took], list(took.values()))
            row["by_line"] = e/slope if slope > 0 else None
        if noise and middle in took:
            N = row["measured"]
            row["predicted"] = {s: took[middle]*(N + s*seq)/(N + middle*seq) for s in took}
            row["worst"] = max(abs(row["predicted"][s]/took[s] - 1) for s in took)
        rows.append(row)
    return rows

def main(out, data, model="124m", tokens="10e6", sizes="8,16,32,64,128", seeds="0,1"):
    corpus, path = open_corpus(data), Path(out)/"noise.json"
    sizes, tokens, config = [*map(int, sizes.split(","))], float(tokens), workload(model)
    config = replace(config, vocab=-(-corpus.vocab//64)*64)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json.loads(path.read_text()) if path.exists() else dict(model=model, seq=config.seq_len, corpus=corpus_facts(corpus), commit=tree_commit(), **machine(), losses=[], runs=[])
    middle = sorted(sizes)[len(sizes)//2]
    for seed in map(int, seeds.split(",")):
        for size in sorted(sizes, key=lambda s: s != middle): # the middle one first: it chooses the losses
            if any((r["size"], r["seed"]) == (size, seed) for r in record["runs"]): continue
            curve, noise = train(corpus, config, size, tokens, seed), []
            if not record["losses"]: # five, as far from each other as the second half of the run goes
                first, last = curve[len(curve)//4][1], min(l for _, l in curve)
                record["losses"] = [round(first + (last - first)*k/6, 3) for k in range(1, 6)]
            if size == middle: noise = noises(corpus, config, size, tokens, seed, record["losses"])
            record["runs"].append(dict(size=size, seed=seed, curve=curve, noise=noise))
            record["rows"] = judge(record)
            path.write_text(json.dumps(record, indent=1))
            print(f"{size} sequences, seed {seed}: {curve[-1][1]:.3f} after {curve[-1][0]:,} tokens", flush=True)
    for r in record["rows"]: print({k: v for k, v in r.items() if k != "predicted"}, "predicted", {k: round(v) for k, v in r.get("predicted", {}).items()})
    return record

def noises(corpus, config, size, tokens, seed, losses):
    "The same run again, stopped at each loss to measure the noise scale: pairs of loss and noise"
    left, found = sorted(losses, reverse=True), []
    more = Batches(corpus.train, 2, config.seq_len, seed=seed + 1000)
    def watch(step, mean):
        while left and mean <= left[0]:
            pairs = [tuple(t.to(step.run.device) for t in more[k]) for k in range(NOISE_BATCHES)]
            found.append((left.pop(0), noise_scale(step, pairs)[0]))
    train(corpus, config, size, tokens, seed, watch)
    return found

if __name__ == "__main__": main(*sys.argv[1:])
