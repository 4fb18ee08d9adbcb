"""The speed that the site leads with: our list and others in the newest race of lesson 38, on one card. Home, README, the page that
compares and the social image take it from here, so that they say the same."""
import json
from pathlib import Path
from llm_speedrun.measure import COLORS, SPINE, load_records, records_path
from llm_speedrun.course import course_records
from llm_speedrun.benchmarks.race_report import final, shared_record

MEASUREMENTS = Path(__file__).resolve().parents[1]/"measurements"
CARDS = "NVIDIA H100 80GB HBM3", "NVIDIA H200" # the first that has a race
OURS, OURS_16 = "llm_speedrun", "llm_speedrun, 16 bits" # names of records, as 3_past_the_ladder/38_peers.ipynb gives them
RACED = dict(speedrun="us", modded="modded-nanogpt's benchmark", nanogpt="nanoGPT") # in the race of lesson 58
RIVALS = {"nanoGPT": ["nanogpt"], "torch.compile": ["compile_blocks", "compile_whole"]} # the name to show -> their records
EXTRA = {"flash4": "FlashAttention-4", "fp8_epilogues": "QuACK"} # rungs -> the package they need, which pip install leaves out
STEPS = dict(fp32="FP32", tf32="TF32", bf16="bf16", flash="flash attention", fused_ops="fused kernels", chunked_ce="chunked loss", fp8="FP8",
             cuda_graphs="CUDA graphs", fused_adamw="fused AdamW")

def race(records): # of one GPU
    "The records of the newest race of the course's workload, by name; without one {}"
    runs = [r for r in records if (r["workload"], r["batch"]) == SPINE and OURS in (r["rung"], r["before"])]
    dates = [r["date"] for r in runs if r["rung"] == OURS]
    return {r["rung"]: r for r in runs if r["date"] == max(dates)} if dates else {}

def newest(folder=MEASUREMENTS): # of the records
    "The race that the site leads with: the newest on the first card that has one where rivals ran; without one {}"
    found = (race(load_records(folder/records_path(card).name)) for card in CARDS)
    return next((o for o in found if len(o) > 1), {})

def best(found, rival): # of `race`, a name of `RIVALS`
    "The rival's fastest record, None without one"
    return max((found[k] for k in RIVALS[rival] if k in found), key=lambda r: r["ratio"], default=None)

def speedups(found, ours=OURS): # of `race`
    "How many times as fast as each rival, in words"
    ran = {name: best(found, name) for name in RIVALS}
    return ", ".join(f"{found[ours]['ratio']/r['ratio']:.2f}× {name}" for name, r in ran.items() if r and ours in found)

def thousands(r): return f"{r['tok_s']/1e3:,.0f} K tokens/s"

def losses(folder=MEASUREMENTS): # of the records
    "The fact about the race to a loss; nothing without a record of ours and of others"
    found = shared_record("five", folder=folder)
    ran = {name: final(found["results"][k]) for k, name in RACED.items() if k in found.get("results", {})}
    if len(ran) < 2 or "us" not in ran: return ""
    others = ", ".join(f"{name} {loss:.2f}" for name, loss in ran.items() if name != "us")
    minutes = f"{found['clock']/60:.0f} minutes"
    return f"**Loss {ran['us']:.2f} after [{minutes}](5_fewer_steps/58_race.ipynb#five-minutes)** of training, {others}"

def facts(found, loss=None): # of `race`, a fact as `losses` gives it
    "Four facts, as a Markdown list"
    one, loss = found[OURS], losses() if loss is None else loss
    said = [f"**{thousands(one)}** on one {one['gpu']}, with a model of GPT-2's size ({one['date']})",
            f"**{speedups(found)}** with ours in FP8, theirs in bf16",
            f"**{speedups(found, OURS_16)}** with ours in bf16 as well", loss]
    return "\n".join(['<div class="facts">', "", *(f"- {o}." for o in said if o), "", "</div>"])

FIRST = "A Hopper GPU", "Tokenizing", "1 x", "  fp8:", "validation loss", "everything is" # how the shown lines begin, alike since the record

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

def packages(found): # of `race`
    "The packages that our list needs and that pip doesn't install with ours, in words"
    return " and ".join(v for k, v in EXTRA.items() if k in found[OURS]["rungs"])

FP8_RIVALS = dict(nanogpt_tensorwise="nanoGPT with torchao", nanochat_fp8="nanochat", compile_tensorwise="torch.compile with torchao")

def in_8_bits(path=MEASUREMENTS/"peers/nvidia-h100.json"): # as tests/bench_peers.py writes it
    "How many times as fast ours is as others that train in FP8 too, as a sentence; nothing without records"
    if not path.exists(): return ""
    records = [r for r in json.loads(path.read_text(encoding="utf-8")) if r["workload"] == SPINE[0] and r["rung"] in FP8_RIVALS]
    if not records: return ""
    said = [f"{1/r['ratio']:.2f}× {FP8_RIVALS[r['rung']]}" for r in records]
    return f"FP8 on both sides ({records[0]['gpu']}, {' and '.join(sorted({r['date'] for r in records}))}): {', '.join(said)}. "

def cautions(found): # of `race`
    "What to know of the speedups"
    need = f"Our list needs {packages(found)}. " if packages(found) else ""
    return (f"How far to trust this: all took turns in one process, on one {found[OURS]['gpu']}, {found[OURS]['date']}. Others run "
            f"in bf16. {in_8_bits()}{need}We measured it ourselves: no third party has confirmed it.")

def chart(found, records, size=(7.4, 4.2)): # of `race`, of the ladder, in inches
    "Bars of thousand tokens per second from FP32 to our fastest list, with a line for each rival"
    import matplotlib.pyplot as plt
    last = " + ".join(v for k, v in EXTRA.items() if k in found[OURS]["rungs"]) or "the fastest list"
    names = [("" if i == 0 else "+ ") + STEPS[r["rung"]] for i, r in enumerate(records)] + [f"+ {last}", "the same in bf16"]
    speeds = [r["tok_s"]/1e3 for r in records] + [found[k]["tok_s"]/1e3 for k in (OURS, OURS_16)]
    colors = [COLORS["sky"]]*len(records) + [COLORS["blue"], COLORS["grey"]]
    fig, ax = plt.subplots(figsize=size, layout="constrained")
    bars, rivals = ax.barh(names, speeds, .7, color=colors), {k: r["tok_s"]/1e3 for k in RIVALS if (r := best(found, k))}
    for text in ax.bar_label(bars, [f"{s:,.0f} K" for s in speeds], padding=4):
        text.set(zorder=4, bbox=dict(fc="white", ec="none", pad=1)) # a rival's line passes below it
    ax.invert_yaxis(); ax.margins(x=.1); ax.spines[["top", "right"]].set_visible(False)
    for i, (name, x) in enumerate(rivals.items()):
        ax.axvline(x, color=COLORS["red"], lw=1.4, ls=("--", ":")[i % 2])
        ax.annotate(f"{name}, {x:,.0f} K, bf16", (max(rivals.values()), -.2 + .8*i), (8, 0), textcoords="offset points", color=COLORS["red"],
                    va="center")
    ax.set_xlabel("thousand tokens per second: {workload}, {batch} × {seq} tokens a step, {gpu}".format(**found[OURS]))
    return ax

def save_chart(path):
    "The chart of the home page and the README"
    chart(newest(), course_records()).figure.savefig(path, dpi=130)
