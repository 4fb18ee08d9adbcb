"""The speed that the site leads with: lists of ours and other projects in one interleaved run, on one card, of one commit and one stack.
Home, README, the page that compares, the page on compilers and the social image take it from here, so that they say the same."""
import json, textwrap
from itertools import product
from pathlib import Path
from statistics import median
from llm_speedrun.io_utils import read_json
from llm_speedrun.measure import COLORS, SPINE
from llm_speedrun.benchmarks.race_report import final, shared_record
from llm_speedrun.recipes.batch import Phases
from llm_speedrun.records import is_current

MEASUREMENTS = Path(__file__).resolve().parents[1]/"measurements"
CARDS = "NVIDIA H100 80GB HBM3", "NVIDIA H200" # the first that has a run with rivals
OURS, OURS_16 = "fastest", "fastest16"
LARGER = "1b" # the second workload
PROJECTS = {"compile": "torch.compile", "nanogpt": "nanoGPT", "nanochat": "nanochat", "transformers": "transformers", "litgpt": "litgpt",
            "torchtitan": "torchtitan", "llmq": "LLMQ", "modded": "modded-nanogpt"} # how a record's name begins -> whose step it is
NAMES = { # of a record -> what to show; as `PROJECTS` where nothing stands here
    "fastest": "**llm_speedrun**, FP8", "fastest16": "**llm_speedrun**, bf16 only",
    "fastest-installed": "**llm_speedrun**, FP8, as installed", "fastest16-installed": "**llm_speedrun**, bf16, as installed",
    "compile_blocks": "torch.compile by blocks", "compile_whole": "torch.compile as a whole", "compile_flash4": "torch.compile, FlashAttention-4, chunked loss",
    "compile_autotuned": "torch.compile, FlashAttention-4, max-autotune", "compile_tensorwise": "torch.compile, torchao's FP8", "compile_rowwise_with_gw_hp": "torch.compile, torchao's rowwise FP8", "compile_flash4_fp8": "torch.compile, FlashAttention-4, chunked loss, FP8",
    "nanogpt_tensorwise": "nanoGPT, torchao's FP8",
    "compile_chunker": "torch.compile, its auto-chunker", "nanogpt_rowwise": "nanoGPT, torchao's rowwise FP8", "nanochat_fp8": "nanochat, its FP8",
    "nanochat_flash4": "nanochat, FlashAttention-4", "nanochat_own_step": "nanochat, steps of 8 × the tokens", "transformers": "transformers with Liger",
    "transformers_hopper": "transformers with Liger's loss for Hopper", "transformers_liger_compile": "transformers with Liger, compiled",
    "transformers_compile": "transformers, compiled", "transformers_fp8": "transformers, torchao's FP8"}
EXTRA = {"flash4": "FlashAttention-4", "epilogues": "QuACK", "fp8_epilogues": "QuACK"} # rungs -> the package they need, which pip install leaves out
SAME = "gpu", "driver", "torch", "triton", "packages", "commit", "workload" # in all records of a run
MEASURED_OLDER = "measured with older code"

def project(r): # a record
    "Whose step a record is of, None for ours"
    return next((v for k, v in PROJECTS.items() if r["rung"].startswith(k)), None)

def name(r):
    "What to show for a record's name"
    return NAMES.get(r["rung"]) or project(r) or f"`{r['rung']}`"

# --- runs ---

def raced(folder=MEASUREMENTS): # of the records
    "The records of all races of a step, in whichever file: they alone count weights in matmuls. Not those of models of transformers, with other batches"
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for r in found if isinstance(found, list) else []:
            if isinstance(r, dict) and "in_products" in r and r.get("measured", "step") == "step" and r["notebook"] != "bench_accelerate": yield r

def run_of(r): # a record
    "What the records of one process share: the name of its run, or, before runs had names, the joules of our step, which a process measured once"
    return r.get("run") or r.get("joules_of_fastest"), r["gpu"], r["workload"]

def with_ours(run): # name -> record
    """The run with a record of `fastest`. Older ones have none: there it is what it took beside each of the others, the median. {} without either"""
    if OURS in run: return run
    if not all("ms_of_fastest" in r for r in run.values()): return {}
    first, ms = next(iter(run.values())), median(r["ms_of_fastest"] for r in run.values())
    ours = {k: first.get(k) for k in (*SAME, "date", "batch", "seq")} | dict(rung=OURS, before=None, ratio=1., ms=ms, tok_s=first["batch"]*first["seq"]/ms*1e3, dtype="fp8",
                                                  rungs=None, code=None, peak_gib=None)
    return {OURS: ours} | run

def runs(workload=SPINE[0], folder=MEASUREMENTS):
    "The interleaved runs of a workload in which others raced: dicts from name to record, ours first"
    found = {}
    for r in raced(folder):
        if r["workload"] == workload and ("run" in r or "joules_of_fastest" in r): found.setdefault(run_of(r), {})[r["rung"]] = r
    return [run for run in map(with_ours, found.values()) if any(map(project, run.values()))]

def stronger(r, run, folder=MEASUREMENTS): # a record of a run
    """Records of the same project, precision, workload and card in a form that wasn't in the run, and faster than all of it: next to our list on the same
    day, since tokens per second also depend on the day's clocks, and by more than the rounds vary"""
    alike = lambda o: project(o) == project(r) and all(o[k] == r[k] for k in ("dtype", "gpu", "workload", "batch", "seq"))
    most = max((o for o in run.values() if alike(o)), key=lambda o: o["ratio"])
    return [o for o in raced(folder) if alike(o) and o["rung"] not in run and o["ratio"] > most.get("ratio_p90", most["ratio"])]

def leading(folder=MEASUREMENTS, workload=SPINE[0]):
    """The newest run on the first card that has one, of the same day that with most rivals; without one {}. Runs of `bench_peers.py`, which have names and
    commits, come before older ones"""
    found = runs(workload, folder)
    for named, card in product((True, False), CARDS):
        here = [run for run in found if run[OURS]["gpu"] == card and ("run" in run[OURS]) == named]
        if here: return max(here, key=lambda run: (run[OURS]["date"], len(rivals(run))))
    return {}

def newest(folder=MEASUREMENTS, workload=SPINE[0]):
    "What the site shows of the run that leads: our lists, and projects but those with a stronger record elsewhere, in whichever precision"
    run = leading(folder, workload)
    weak = {project(r) for r in rivals(run).values() if stronger(r, run, folder)}
    return {k: r for k, r in run.items() if (k in NAMES if not project(r) else project(r) not in weak)}

def left_out(folder=MEASUREMENTS, workload=SPINE[0]):
    "Names of those rivals"
    shown = newest(folder, workload)
    return [name(r) for k, r in leading(folder, workload).items() if project(r) and k not in shown]

def differences(run):
    "What the records of a run must share, and don't"
    return [k for k in SAME if len({json.dumps(r.get(k), sort_keys=True) for r in run.values()}) > 1]

def is_older(run):
    "Whether our code has changed since, or isn't known"
    ours = [r for r in run.values() if r.get("code") and r.get("rungs")]
    return not all(map(is_current, ours)) or any(not r.get("commit") or r["commit"].endswith("-dirty") for r in run.values())

def when(run):
    "The date of a run, and its commit, or that its code is older"
    one = run[OURS]
    return f"{one['date']}, {MEASURED_OLDER if is_older(run) else 'commit ' + one['commit']}"

# --- ratios ---

def rivals(run): return {k: r for k, r in run.items() if project(r)}

def best(run, whose, dtype=None): # a name of `PROJECTS`, "fp8" or "bf16"
    "The project's fastest record, in one precision or in any; None without one"
    return max((r for r in run.values() if project(r) == whose and dtype in (None, r["dtype"])), key=lambda r: r["ratio"], default=None)

def strongest(run):
    "Ours, and of each project the fastest form in each precision: what there's room for on the home page"
    return {k: r for k, r in run.items() if not project(r) or r is best(run, project(r), r["dtype"])}

def times_of(run, r, ours=OURS): # a record
    "How many times as fast as a record ours is: median, and its range over the rounds, which is the widest where both were measured against a third"
    a = run[ours]
    low, high = (a.get(k, a["ratio"]) for k in ("ratio_p10", "ratio_p90"))
    return a["ratio"]/r["ratio"], low/r.get("ratio_p90", r["ratio"]), high/r.get("ratio_p10", r["ratio"])

def times_text(run, r, ours=OURS): return "{:.2f}× ({:.2f}–{:.2f})".format(*times_of(run, r, ours))

# Who stands in the facts. nanochat takes its steps otherwise than its owner does (whole windows, PyTorch's attention, an optimizer that runs after an
# eighth of the tokens or fewer), so it has a row in the tables, and the page that compares says how
LED = "torch.compile", "nanoGPT"

def speedups(run, ours=OURS, dtype=None): # which of ours; in which precision theirs are, None for the faster
    "How many times as fast as each of `LED`, in words, the strongest rival first"
    if ours not in run: return ""
    found = [r for whose in LED if (r := best(run, whose, dtype))]
    return ", ".join(f"{times_of(run, r, ours)[0]:.2f}× {project(r)}" for r in sorted(found, key=lambda r: -r["ratio"]))

def thousands(r): return f"{r['tok_s']/1e3:,.0f} K tokens/s"

# --- training with the default recipe ---

def training(run, folder=MEASUREMENTS):
    "The record of training with the default recipe on real text in this run, None without one"
    found = (r for path in sorted((folder/"headline").glob("*.json")) for r in read_json(path, list))
    return next((r for r in found if r.get("measured") == "training" and r["rung"] == OURS and run_of(r) == run_of(run[OURS])), None)

def trained_before(folder=MEASUREMENTS):
    "An older record of such a run, of a card and a commit of its own; None without one"
    path = folder/"seeds/steps-h200.json" # as lesson 52 shows it; steps of the default size
    return next((r for r in read_json(path, list) if r["step_tokens"] == SPINE[1]*1024), None) if path.exists() else None

def trained(run, folder=MEASUREMENTS):
    "A fact: how fast training with the default recipe is"
    if r := training(run, folder): # records without `part` have the second half, in which the default recipe takes one or two updates a step
        part = "" if r.get("part") == "all" else f" (the second half of {r['seconds']:.0f} seconds, with fewer updates a step than the first)"
        return f"**{thousands(r)} in training** with the default recipe on real text, in the same run{part}"
    before = trained_before(folder)
    other = f"; **{thousands(before)}** on one {before['gpu']} ({before['date']}, commit {before['commit']})" if before else ""
    return f"Training with the default recipe on real text: not measured in that run{other}"

# --- the race to a loss ---

RACED = dict(speedrun="us", modded="modded-nanogpt's benchmark", nanogpt="nanoGPT") # in the race of lesson 58

def updates(r): # a result of a race to a loss
    "How many updates of the weights it made: as it says, else as the phases of our recipe have them, else one a step"
    if "updates" in r: return r["updates"]
    return Phases((4, 2, 1), (2, 1)).num_updates(r["step"]) if r["kind"] == "ours" else r["step"]

def loss_race(folder=MEASUREMENTS):
    "The race of five minutes, of the first card that has a record of it; without one {}"
    return next(filter(None, (shared_record("five", card, folder) for card in CARDS)), {})

def losses(folder=MEASUREMENTS): # of the records
    "The fact about the race to a loss. Nothing without a record of ours and of others, or of one that doesn't name its corpus and precisions"
    found = loss_race(folder)
    ran = {k: rs for k, rs in found.get("results", {}).items() if k in RACED}
    if len(ran) < 2 or "speedrun" not in ran or "corpus" not in found: return ""
    if not all(k in r for rs in ran.values() for r in rs for k in ("precision", "updates")): return ""
    said = lambda rs: f"{final(rs):.2f} ({rs[0]['precision']}, {updates(rs[0]):,} updates, {len(rs)} seed{'s'*(len(rs) > 1)})"
    others = ", ".join(f"{name} {said(ran[k])}" for k, name in RACED.items() if k in ran and k != "speedrun")
    one, minutes = ran["speedrun"][0], f"{found['clock']/60:.0f} minutes"
    return (f"**Loss {said(ran['speedrun'])} after [{minutes}](5_fewer_steps/58_race.ipynb#five-minutes)** of training on {found['corpus']}, "
            f"{others}: one {one['gpu']}, {one['date']}")

# --- what the pages say ---

def facts(run, loss=None, folder=MEASUREMENTS): # a fact as `losses` gives it
    "The facts, as a Markdown list"
    one, in_16 = run[OURS], f", {thousands(run[OURS_16])} in bf16" if OURS_16 in run else ""
    said = [f"**{thousands(one)} in FP8{in_16}**: a step with AdamW of a model of GPT-2's size, on one {one['gpu']} ({when(run)})",
            f"**{speedups(run)}**: ours in FP8, theirs in FP8 or bf16, whichever is faster", trained(run, folder), losses(folder) if loss is None else loss]
    if bf16 := speedups(run, OURS_16, "bf16"): said.insert(2, f"**{bf16}** with bf16 on both sides")
    return "\n".join(['<div class="facts">', "", *(f"- {o}." for o in said if o), "", "</div>"])

FIRST = "A Hopper GPU", "Tokenizing", "1 x", "validation loss", "everything is" # how the shown lines begin, alike since the record

def shown_lines(text, starts=FIRST): # what a command printed
    "The lines that begin in one of those ways, with ⋮ for what is left out between two of them"
    kept = []
    for line in text.splitlines():
        if line.startswith(starts): kept.append(line)
        elif kept and kept[-1] != "⋮": kept.append("⋮")
    return "\n".join(kept)

def first_run(path=MEASUREMENTS/"first_run/nvidia-h100.json"): # as tests/bench_start.py writes it
    "What `make speedrun` printed on a GPU, and which"
    r = json.loads(path.read_text(encoding="utf-8"))
    return (f"One {r['gpu']} with torch {r['torch'].split('+')[0]} and triton {r['triton']} printed this on {r['date']}, "
            f"in {r['seconds']} seconds after the installation (⋮ are lines left out):\n\n```text\n{shown_lines(r['text'])}\n```")

def packages(run):
    "The packages that our lists need and that pip doesn't install with ours, in words"
    used = {rung for k in (OURS, OURS_16) for rung in run.get(k, {}).get("rungs") or ()}
    return " and ".join(dict.fromkeys(v for k, v in EXTRA.items() if k in used))

def larger(folder=MEASUREMENTS):
    "A sentence on the run of the larger model; nothing without one"
    if not (run := newest(folder, LARGER)): return ""
    bf16 = speedups(run, OURS_16, "bf16")
    return (f"A model of a billion weights (`{LARGER}`, {run[OURS]['gpu']}, {when(run)}): {thousands(run[OURS])} in FP8, "
            f"{speedups(run)}{f'; with bf16 on both sides {bf16}' if bf16 else ''}.")

def between_runs(run, folder=MEASUREMENTS):
    "By how much the speedup over the same form of a rival has differed between days on this card, the largest: a fraction, 0 without a second day"
    days = {}
    for o in raced(folder):
        if project(o) and all(o[k] == run[OURS][k] for k in ("gpu", "workload", "batch", "seq")): days.setdefault(o["rung"], []).append(o["ratio"])
    return max((max(rs)/min(rs) - 1 for k, rs in days.items() if k in run), default=0.)

def cautions(run, folder=MEASUREMENTS):
    "What to know of the speedups"
    moved = between_runs(run, folder)
    need = f"Our lists need {packages(run)}; *as installed* is without. " if packages(run) else ""
    return (f"How far to trust this: our FP8 list was interleaved with one of the others at a time. "
            f"A ratio in bf16 divides two such ratios. All step on one batch of random tokens. "
            f"{f'Other days, with older code, gave ratios up to {100*moved:.0f}% apart. ' if moved else ''}{need}"
            f"No third party has confirmed it; `make confirm` measures again.")

def chart(run, size=(7.4, 4.2)): # in inches
    "Bars of thousand tokens per second of all in the run, ours in color, FP8 hatched"
    import matplotlib.pyplot as plt
    shown = sorted(run.values(), key=lambda r: -r["ratio"])
    names = [textwrap.fill(name(r).replace("**", "") + ("" if project(r) is None or "FP8" in name(r) else ", bf16"), 30) for r in shown]
    fig, ax = plt.subplots(figsize=size, layout="constrained")
    bars = ax.barh(names, [r["tok_s"]/1e3 for r in shown], .7, color=[COLORS["grey" if project(r) else "sky" if r["dtype"] == "bf16" else "blue"] for r in shown])
    ax.bar_label(bars, [f"{r['tok_s']/1e3:,.0f} K" for r in shown], padding=4)
    ax.invert_yaxis(); ax.margins(x=.12); ax.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("thousand tokens per second: {workload}, {batch} × {seq} tokens a step\n{gpu}, ".format(**run[OURS]) + when(run), size="medium")
    return ax

def save_chart(path):
    "The chart of the home page and the README"
    chart(strongest(newest())).figure.savefig(path, dpi=130)
