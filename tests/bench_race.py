"""Race ours against what its rivals would choose: batches and rates of nanoGPT, modded-nanogpt and nanochat, on a text that is read once.
    tests/bench_race.py OUT DATA CLONES [options of speedrun_race]    such as --minutes 1 --only fp8,modded@0
CLONES: a folder with nanoGPT, modded-nanogpt and nanochat. Ours runs in FP8 and in 16 bits. modded-nanogpt's third track has its published optimizer and the one of its speedrun, which takes all
matrices of a shape at once (`batched`), with three sizes of a step; nanoGPT has two rates, above its published one, for smaller steps than that is for; nanochat has its published decay, and the decay and
the batch that its own rules give for a text of this length. By default three seeds of five minutes, in turns. The same command goes on with those that are left."""
import math, sys
from pathlib import Path
from llm_speedrun.benchmarks.adapters import NANOCHAT_RATIO
from llm_speedrun.cli import speedrun_race
from llm_speedrun.data.corpus import open_corpus

BATCHES = 2**17, 2**16, 2**15 # tokens
NANOGPT_RATE, RATES = 6e-4, (1e-3, 2e-3) # published, tried
NANOCHAT_WEIGHTS = 12*12*768**2 + 50304*768 # in matrices, of its model of twelve layers

def rule_batch(tokens): # of a run
    "nanochat's rule for the tokens in a step: a power of two"
    return 2**round(math.log2(2**19*(tokens/(NANOCHAT_RATIO*NANOCHAT_WEIGHTS))**.383))

def field(clones, tokens):
    "The options of `speedrun_race` for all contestants"
    clones = Path(clones)
    ours = [("--run", f"{k}: --recipe speedrun --rungs {rungs}") for k, rungs in dict(fp8="fastest", bf16="fastest16").items()]
    modded = [f"{kind}={clones/'modded-nanogpt'}:batch={b}:name={name}-{b//1024}k" for kind, name in (("modded", "modded"), ("modded_batched", "batched")) for b in BATCHES]
    nanogpt = [f"nanogpt={clones/'nanoGPT'}:batch={BATCHES[-1]}:lr={rate/NANOGPT_RATE}:name=nanogpt-{rate:g}" for rate in RATES]
    nanochat = [f"nanochat={clones/'nanochat'}", f"nanochat_scaled={clones/'nanochat'}:batch={rule_batch(tokens)}"]
    return [w for pair in [*ours, *(("--peer", p) for p in modded + nanogpt + nanochat)] for w in pair]

def main(out, data, clones, *words):
    usual = dict(minutes="5", seeds="3", num_evals="8")
    said = [w for k, v in usual.items() if not any(o.split("=")[0] == f"--{k}" for o in words) for w in (f"--{k}", v)]
    speedrun_race(["--data", data, "--out", out, "--once", *field(clones, len(open_corpus(data).train)), *said, *words])

if __name__ == "__main__": main(*sys.argv[1:])
