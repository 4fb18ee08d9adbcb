"""Train the same runs with several seeds, and keep what they reach: a list's loss means little beside the spread of its seeds.
    tests/bench_seeds.py OUT seeds "NAME: options" ...    such as 0,1,2 "bf16: --rungs fastest16 --steps 600" "fp8: --rungs fastest --steps 600"
After each seed each run is compared with the first, seed by seed: equal within the margin of `race_report.MARGIN`, different by more, or undecided (OUT/verdicts.json).
The runs of `nbs/site/measurements/seeds` are of a corpus of 38 M tokens of books and technical documentation (2 M more for validation).
Prints a line for each run. Its numbers and its training loss, the mean of each hundred steps, are in OUT/seeds.json as soon as it ends.
A run that lies there already is not made again."""
import json, statistics, sys
from pathlib import Path
from bench_start import run
from llm_speedrun.benchmarks.adapters import tree_commit
from llm_speedrun.benchmarks.race import corpus_facts
from llm_speedrun.benchmarks.race_report import paired
from llm_speedrun.data.corpus import open_corpus

def rows_of(folder): return [json.loads(line) for line in open(folder/"metrics.jsonl")] # of a run

def losses(folder, of=100): # of a run, steps to take the mean of
    "The training loss, a mean for each `of` steps"
    found = {r["step"]: r["loss"] for r in rows_of(folder) if "loss" in r}
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
            folder = Path(out)/r["name"]
            config = json.loads((folder/"config.json").read_text())
            judged = {o["step"]: o["val_loss"] for o in rows_of(folder) if "val_loss" in o}
            found.append(r | dict(name=name, seed=seed, options=words, losses=losses(folder), val_losses=judged, commit=tree_commit(), corpus=corpus_facts(open_corpus(config["data"]))))
            path.write_text(json.dumps(found, indent=1))
            print(f"{r['name']}: validation loss {r['val_loss']:.4f} after {r['steps']} steps at {r['tok_s']:,.0f} tokens/s", flush=True)

        said = verdicts(found)
        (path.parent/"verdicts.json").write_text(json.dumps(said, indent=1))
        for k, v in said.items(): print(f"{k}: {v['mean']:+.4f} ({v['low']:+.4f} to {v['high']:+.4f}, {v['n']} seeds): {v['verdict']}", flush=True)

def verdicts(found):
    "Each run's difference to the first one, at the same seeds, and what it means: a dict"
    of = {}
    for r in found: of.setdefault(r["name"], {})[r["seed"]] = r["val_loss"]
    first, *others = of
    pairs = {k: [of[k][s] - of[first][s] for s in sorted(of[k].keys() & of[first].keys())] for k in others}
    return {f"{k} against {first}": paired(d) for k, d in pairs.items() if d}

if __name__ == "__main__": seeds(*sys.argv[1:])
