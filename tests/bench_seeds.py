"""Train the same runs with several seeds, and keep what they reach: a list's loss means little beside the spread of its seeds.
    tests/bench_seeds.py OUT seeds "NAME: options" ...    such as 0,1,2 "fp8: --rungs fastest --steps 1500"
The runs of `nbs/site/measurements/seeds` are of a corpus of 38 M tokens of books and technical documentation (2 M more for validation).
Prints a line for each run. Its numbers and its training loss, the mean of each hundred steps, are in OUT/seeds.json as soon as it ends.
A run that lies there already is not made again."""
import json, statistics, sys
from pathlib import Path
from bench_start import run

def losses(folder, of=100): # of a run, steps to take the mean of
    "The training loss, a mean for each `of` steps"
    rows = [json.loads(line) for line in open(folder/"metrics.jsonl")]
    found = {r["step"]: r["loss"] for r in rows if "loss" in r}
    groups = {}
    for step, loss in found.items(): groups.setdefault((step - 1)//of, []).append(loss)
    return [statistics.mean(g) for g in groups.values()]

def seeds(out, numbers, *runs):
    "Seeds in turn, so that what is stopped early has the same seeds of every run"
    path = Path(out)/"seeds.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else []
    for seed in map(int, numbers.split(",")):
        for text in runs:
            name, words = (o.strip() for o in text.split(":", 1))
            if any((r["name"], r["seed"]) == (name, seed) for r in found): continue
            r = run(out, f"{name}-{seed}", [*words.split(), "--seed", seed])
            found.append(r | dict(name=name, seed=seed, options=words, losses=losses(Path(out)/r["name"])))
            path.write_text(json.dumps(found, indent=1))
            print(f"{r['name']}: validation loss {r['val_loss']:.4f} after {r['steps']} steps at {r['tok_s']:,.0f} tokens/s", flush=True)

if __name__ == "__main__": seeds(*sys.argv[1:])
