"What compare.qmd is filled with: speed from records of races, facts about other projects from projects.yml."
import posixpath, re
from pathlib import Path
import yaml
from llm_speedrun.benchmarks.race_report import lowest_loss, race_table, rose, shared_record
from nbdev.config import get_config
from headline import OURS, OURS_16, cautions, newest
from templating import page, table

HERE = Path(__file__).resolve().parent
# Who may have a record beside ours: the name of the record -> the name to show
RIVALS = {"compile_blocks": "torch.compile by blocks", "compile_whole": "torch.compile as a whole",
          "transformers": "transformers with Liger", "nanogpt": "nanoGPT", "nanochat": "nanochat",
          "litgpt": "litgpt", "torchtitan": "torchtitan"}
SHOWN = RIVALS | {OURS: "**llm_speedrun**, FP8", OURS_16: "**llm_speedrun**, bf16 only"}

def speeds(found): # of `race`
    "A table with a row for each contender, the fastest first"
    def times(ours, r):
        return f"{found[ours]['ratio']/r['ratio']:.2f}×" if ours in found and r["rung"] in RIVALS else ""
    def row(r):
        return [SHOWN.get(r["rung"], r["rung"]), f"{r['tok_s']:,.0f}", f"{r['peak_gib']:.1f}", times(OURS, r), times(OURS_16, r)]
    ran = sorted(found.values(), key=lambda r: -r["ratio"])
    return table(["", "tokens/s", "memory, GiB", "our speedup", "in bf16"], [row(r) for r in ran]) if ran else ""

# Names of the race to a loss -> the name to show
RACED = {"speedrun": OURS, "without_muon": "the same with AdamW", "modded": "modded-nanogpt, track 3", "nanogpt": "nanoGPT",
         "nanochat": "nanochat"}

def to_loss(root): # the repository
    "What the template says of the race in lesson 58: a dict, {} without a record"
    race = shared_record("five", folder=root/"nbs/site/measurements")
    if not race: return {}
    found = {k: rs for k, rs in race["results"].items() if k in RACED}
    one, shown = found["speedrun"][0], ("bits/byte", "tokens, M", "tokens/s", "in tables, M")
    return dict(minutes=race["clock"]/60, tune=race["tune"], short=race["tune_seconds"], text=one["tokens"]/one["epochs"]/1e6, one=one,
                losses=race_table({RACED[k]: rs for k, rs in found.items()}, shown),
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
    found = newest(root/"nbs/site/measurements")
    facts = yaml.safe_load((HERE/"projects.yml").read_text(encoding="utf-8"))
    ran = [r | dict(name=SHOWN.get(k, k)) for k, r in found.items()]
    missing = [name for k, name in RIVALS.items() if k not in found]
    return dict(ours=found.get(OURS), cautions=cautions(found) if found else "", speeds=speeds(found), missing=missing, race=to_loss(root), ran=ran, facts=facts,
                features=features(facts, root))
