"What compare.qmd is filled with: speed from records of races, facts about other projects from projects.yml."
import posixpath, re
from pathlib import Path
from statistics import mean
import yaml
from llm_speedrun.benchmarks.race_report import by_loss, lowest_loss, rose, with_spread
from llm_speedrun.io_utils import read_json
from llm_speedrun.measure import fmt
from nbdev.config import get_config
from headline import OURS, OURS_16, LARGER, PROJECTS, cautions, leading, left_out, loss_race, name, newest, project, times_text, updates, when
from templating import page, table

HERE = Path(__file__).resolve().parent

def speeds(run):
    "A table with a row for each contender, the fastest first"
    def ratio(ours, r, *dtypes): return times_text(run, r, ours) if ours in run and r["rung"] != ours and r["dtype"] in dtypes else ""
    def row(r):
        shown = [name(r), f"{r['tok_s']:,.0f}", fmt(r["peak_gib"], ".1f")]
        return [*shown, ratio(OURS, r, "fp8", "bf16"), ratio(OURS_16, r, "bf16") if project(r) else ""]
    ran = sorted(run.values(), key=lambda r: -r["ratio"])
    return table(["", "tokens/s", "memory, GiB", "our FP8 is", "our bf16 is"], [row(r) for r in ran]) if ran else ""

def published(root):
    "A table of what other projects publish of one H100, each with its source, and when it was read there"
    path = root/"nbs/site/measurements/published.json"
    found = read_json(path, list) if path.exists() else []
    row = lambda r: [f"[{r['project']}]({r['source']})", r["what"], r["model"], r["precision"], f"{r['tok_s']:,}", r["date"]]
    return table(["", "what", "model", "precision", "tokens/s", "published"], [row(r) for r in found], 60) if found else ""

# Names of the race to a loss -> the name to show
RACED = {"speedrun": "**llm_speedrun**", "without_muon": "the same with AdamW", "modded": "modded-nanogpt, track 3", "nanogpt": "nanoGPT",
         "nanochat": "nanochat"}

def loss_table(found): # name -> results
    "A table with a row for each contestant, the lowest loss first"
    mean_of = lambda rs, key: mean(r[key] for r in rs)
    row = lambda k, rs: [RACED[k], with_spread([r["loss"] for r in rs]), len(rs), f"{mean_of(rs, 'bpb'):.4f}", precision(rs[0]), f"{mean(map(updates, rs)):,.0f}",
                         *(f"{mean_of(rs, key)/unit:,.1f}" for key, unit in (("tokens", 1e6), ("tables", 1e6))), f"{mean_of(rs, 'tok_s'):,.0f}"]
    head = ["", "loss", "seeds", "bits/byte", "precision", "updates", "tokens, M", "in tables, M", "tokens/s"]
    return table(head, [row(k, rs) for k, rs in by_loss(found).items()])

def precision(r): return r.get("precision", "FP8" if r["kind"] == "ours" else "bf16") # what older results don't say is what their programs do

def to_loss(root): # the repository
    "What the template says of the race in lesson 58: a dict, {} without a record"
    race = loss_race(root/"nbs/site/measurements")
    if not race: return {}
    found = {k: rs for k, rs in race["results"].items() if k in RACED}
    one = found["speedrun"][0]
    return dict(minutes=race["clock"]/60, tune=race["tune"], short=race["tune_seconds"], text=one["tokens"]/one["epochs"]/1e6, one=one,
                corpus=race.get("corpus"), older="updates" not in one, losses=loss_table(found), reread=one["epochs"],
                turned={RACED[k]: lowest_loss(rs) for k, rs in found.items() if rose(rs)},
                step=max(rs[0]["batch"] for rs in found.values()),
                waiting=[RACED[k] for k in race["field"] if k in RACED and k not in found])

def split(fact): # "text <file>", or False for no, or None
    "What a cell says and the file that shows it, or None"
    if not fact: return ("–" if fact is None else "no"), None
    said = re.fullmatch(r"(.+) <(\S+)>", fact)
    if not said: raise ValueError(f"projects.yml: {fact!r} names no file that shows it")
    return said[1], said[2]

def linked(fact, project, root): # as for `split`, a value of projects.yml's `projects`, the repository
    "The cell, in Markdown, with a link to the file that shows it"
    text, file = split(fact)
    if not file: return text
    if "repo" in project: return f"[{text}]({project['repo']}/blob/{project['commit']}/{file})"
    if (root/"nbs"/file).exists(): file = posixpath.relpath(file, "site")
    else: file = f"{get_config(path=root).git_url}/blob/main/{file}"
    return f"[{text}]({file})"

def features(facts, root): # projects.yml, the repository
    "The table of features: a row each, a column for each project"
    rows = [[f"**{k}**", *(linked(v[p], about, root) for p, about in facts["projects"].items())]
            for k, v in facts["features"].items()]
    line = lambda cells: f"| {' | '.join(cells)} |"
    names = [o["name"] for o in facts["projects"].values()]
    return "\n".join([line(["", *names]), line(["---"]*(len(names) + 1)), *map(line, rows)])

@page("compare.qmd")
def filled(root): # the repository
    "What the template is filled with"
    root = Path(root)
    measured = root/"nbs/site/measurements"
    run, larger = newest(measured), newest(measured, LARGER)
    facts = yaml.safe_load((HERE/"projects.yml").read_text(encoding="utf-8"))
    took_part = {project(r) for r in leading(measured).values()}
    missing = [v for v in PROJECTS.values() if v not in took_part]
    return dict(run=run, ours=run.get(OURS), when=when(run) if run else "", cautions=cautions(run) if run else "", speeds=speeds(run), name=name,
                larger=speeds(larger), large=larger.get(OURS), large_when=when(larger) if larger else "", missing=missing, left_out=left_out(measured),
                published=published(root), race=to_loss(root), ran=[r for r in run.values() if r.get("source")], facts=facts, features=features(facts, root))
