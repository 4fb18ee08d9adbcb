"""Take one part of the default recipe away at a time, and see what that costs: short races, several seeds, each part against the whole recipe by seed.
    tests/bench_ablation.py OUT DATA [parts|numbers|all] [options of speedrun_race]
`parts`: what the recipe consists of; `numbers`: its constants, at the values that lessons before have, or at half and twice theirs. By default one minute, three seeds, no token read twice.
A run's results are there as soon as it ends; the same command goes on with those that are left. Prints the parts by what they are worth, and writes OUT/ablation.json.
A part is worth something where its interval is above 0, by more than the margin where the verdict says so; "undecided" needs more seeds."""
import json, sys
from pathlib import Path
from llm_speedrun.benchmarks.race import default_workload
from llm_speedrun.benchmarks.race_report import MARGIN, paired, paired_table
from llm_speedrun.cli import speedrun_race
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.speedrun import decay_for, rate_for

SPEED, STEP = 650_000, 65_536 # tokens in a second and in a step, by which a run's rate and decay are computed where they are changed

def recipe(**options): return "--recipe " + ":".join(["speedrun", *(f"{k}={v}" for k, v in options.items())])

def parts(minutes):
    "Name -> the options without that part"
    return {"variance": recipe(variance=0), "cautious-decay": recipe(cautious="no"), "momentum-rise": recipe(rise=0), "clip": f"{recipe()} --grad_clip 0",
            "beta2": recipe(beta2=.95), "zero-start": recipe(out=.577), "wide-heads": f"{recipe()} --head_dim {workload(default_workload()).head_dim}",
            "more-updates": recipe(updates=1), "short-sequences": recipe(pieces=1), "phases": recipe(updates=1, pieces=1), "average": f"{recipe()} --ema_decay 0"}

def numbers(minutes):
    "Name -> the options with another number"
    config, steps = workload(default_workload()), max(1, round(60*minutes*SPEED/STEP))
    rate, decay = rate_for(config, steps), decay_for(config, steps, 1.)
    return {"momentum-.95": recipe(momentum=.95), "clip-1": f"{recipe()} --grad_clip 1", "embed-.003": recipe(embed=.003), "no-table-decay": recipe(table=0), "table-decay-1": recipe(table=1),
            "last-rate-.01": f"{recipe()} --final_lr .01", "rate-half": f"{recipe()} --lr {rate/2:.6f}", "rate-twice": f"{recipe()} --lr {rate*2:.6f}",
            "decay-half": f"{recipe()} --weight_decay {decay/2:.6f}", "decay-twice": f"{recipe()} --weight_decay {decay*2:.6f}", "cooldown-.4": f"{recipe()} --cooldown .4",
            "updates-8-4-2": recipe(updates="8+4+2"), "updates-2-1": recipe(updates="2+1")}

def option(words, name, default):
    "The value of an option of a command line, and the command line without it"
    for i, w in enumerate(words):
        if w == f"--{name}": return words[i + 1], words[:i] + words[i + 2:]
        if w.startswith(f"--{name}="): return w.split("=", 1)[1], words[:i] + words[i + 1:]
    return default, words

def ablate(out, data, *words):
    which, words = (words[0], words[1:]) if words and not words[0].startswith("-") else ("parts", words)
    minutes, words = option(list(words), "minutes", "1")
    seeds, words = option(words, "seeds", "3")
    rungs, words = option(words, "rungs", "auto")
    asked = dict(parts=parts, numbers=numbers, all=lambda m: parts(m) | numbers(m))[which](float(minutes))
    runs = [w for name, of in (dict(default=recipe()) | asked).items() for w in ("--run", f"{name}: {of} --rungs {rungs}")]
    try: speedrun_race(["--data", data, "--out", str(out), "--minutes", minutes, "--seeds", seeds, "--num_evals", "2", "--once", *runs, *words])
    finally: report(Path(out))

def report(out):
    "Write what has been found so far, and print it"
    if not (out/"race.json").exists(): return
    race = json.loads((out/"race.json").read_text())
    of = {k: {r["seed"]: r["loss"] for r in rs} for k, rs in race["results"].items()}
    whole = of.pop("default", {})
    found = {k: [l - whole[s] for s, l in ls.items() if s in whole] for k, ls in of.items()}
    rows = [dict(without=k, options=race["field"][k][2], **paired(d)) for k, d in found.items() if d]
    (out/"ablation.json").write_text(json.dumps(dict(margin=MARGIN, minutes=race["clock"]/60, corpus=race["corpus"], rows=sorted(rows, key=lambda r: -r["mean"])), indent=1))
    if whole: print(paired_table(race["results"], "default"))

if __name__ == "__main__": ablate(*sys.argv[1:])
