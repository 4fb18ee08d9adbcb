"""`make confirm`: measure again what the site says of speed and loss, in ten minutes on a Hopper GPU, and hold it against the records.
    tests/confirm.py [--rivals FOLDER] [--data CORPUS] [--out FOLDER] [--minutes 10] [--race_minutes 1] [--records FOLDER] [--break RUNG=slow]
Clones nanoGPT and nanochat at the commits that the records have, and takes one shard of FineWeb from the Hugging Face hub; without a network, or with --rivals, which holds
clones (nanoGPT, nanochat; one without .git has its commit in a file COMMIT), the race is on Python's standard library. Prints each number next to its record, with "confirmed"
or "not confirmed", and writes OUT/confirm.json, to attach to an issue. An OUT that was begun goes on. Exits with 1 if something contradicts the records, and names the rung if it is one;
with 3 if there is nothing to compare. --break RUNG=slow or RUNG=loss breaks a rung on purpose, to see that this is found. A CPU runs a tiny version and confirms nothing."""
import argparse, sys, time
from contextlib import contextmanager
from datetime import datetime
from dataclasses import replace
from functools import wraps
from pathlib import Path
import torch
from llm_speedrun.benchmarks.confirm import confirm
from llm_speedrun.io_utils import InputError, clean_errors
from llm_speedrun.rung_registry import RUNGS, find_rung

SHARDS = "kjj0/fineweb10B-gpt2", ("fineweb_val_000000.bin", "fineweb_train_000001.bin") # as modded-nanogpt takes them

def public_text(out):
    "The folder with a shard of FineWeb, fetched if it isn't there; without a network the offline corpus"
    from huggingface_hub import hf_hub_download
    try: paths = [hf_hub_download(SHARDS[0], name, repo_type="dataset", local_dir=out/"fineweb") for name in SHARDS[1]]
    except Exception as e: print(f"No shard of FineWeb ({type(e).__name__}): the race is on Python's standard library."); return "stdlib"
    return str(Path(paths[0]).parent)

@contextmanager
def wasted():
    "Some ten milliseconds more for a forward pass, on a CPU 400"
    if torch.cuda.is_available():
        x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(50): x @ x
    else: time.sleep(.4)
    yield

def break_rung(text): # RUNG=slow, RUNG=loss
    "Put a rung into the registry that wastes time, or changes the loss, besides what it does"
    name, _, how = text.partition("=")
    if how not in ("slow", "loss"): raise InputError(f"--break {text!r}: give RUNG=slow or RUNG=loss")
    rung = find_rung(name)
    @wraps(rung)
    def broken(run, **kw):
        run = rung(run, **kw)
        if how == "slow": return run.in_forward(wasted)
        loss = run.loss
        return replace(run, loss=lambda *args: loss(*args)*1.02)
    RUNGS[name] = broken

def main(args=None):
    p, gpu = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter), torch.cuda.is_available()
    p.add_argument("--out", type=Path, default=Path(f"runs/confirm-{datetime.now():%Y%m%d-%H%M%S}")); p.add_argument("--rivals"); p.add_argument("--data")
    p.add_argument("--records", type=Path, default=Path(__file__).resolve().parents[1]/"nbs/site/measurements")
    p.add_argument("--minutes", type=float, default=10.); p.add_argument("--race_minutes", type=float, default=1. if gpu else .2)
    p.add_argument("--break", dest="broken")
    c = p.parse_args(args)
    c.out.mkdir(parents=True, exist_ok=True)
    if c.broken: break_rung(c.broken)
    data = c.data or (public_text(c.out) if gpu and not c.rivals and c.race_minutes else "stdlib")
    if not gpu: print("No GPU: a tiny version of the measurement, as a test of the program. It confirms nothing.", flush=True)
    return confirm(c.out.absolute(), c.records, c.rivals, data, c.minutes, c.race_minutes)

if __name__ == "__main__": sys.exit(clean_errors(main))
