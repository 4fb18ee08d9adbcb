"The page of the one-GPU track: its rules and fields from the code, its entries from their files, each checked."
from statistics import mean
from llm_speedrun.benchmarks import track, track_logs
from llm_speedrun.measure import fmt
from records import folder
from reference import struct
from templating import page

def entries(root):
    "The entries of the track. Raises `InputError` for one that breaks a rule"
    return [track.check_entry(p)[0] for p in sorted((folder(root)/"track").glob("*.json"))]

def source(e): # an `Entry`
    "Its code, as a link where that is an address"
    return f"[code]({e.code})" if e.code.startswith("https://") else e.code

def average(e, key, unit=1, spec=".4f"): # an `Entry`; a field of `Score`
    "The mean of a field over an entry's runs, as text; empty where a run has none"
    values = [getattr(r, key) for r in e.runs]
    return "" if None in values else fmt(mean(values)/unit, spec)

def scored(e): return "{:.4f} ± {:.4f}".format(*track.score(e))

HEAD = ["", "bits/byte", "of validation", "tokens, M", "runs", "of others", "by", "GPU", "date", ""]

def row(e, record): # an `Entry`, whether it is the record
    "A row of a table with the columns of `HEAD`"
    others = len({r.by for r in e.runs} - {"", e.by})
    name = f"**{e.name}**, record{'' if others else ' that nobody else has run'}" if record else e.name
    return [name, scored(e), average(e, "bpb"), average(e, "tokens", 1e6, ".1f"), len(e.runs), others, e.by, e.gpu, e.date, source(e)]

OWN_HEAD = ["", "minutes", "seconds", "loss", "in", "tokens, M", "runs", "by", "GPU", "date", ""]

def own_row(e):
    "A row of a table with the columns of `OWN_HEAD`, of an entry that its own program scored"
    unit = "bits/byte" if e.runs[0].bpb else "nats/token"
    return [e.name, e.minutes, average(e, "seconds", 1, ".1f"), scored(e), unit, average(e, "tokens", 1e6, ".1f"), len(e.runs), e.by, e.gpu, e.date, source(e)]

@page("measured/track.qmd")
def track_page(root):
    found, ranked = entries(root), {}
    for e in found:
        if e.text: ranked.setdefault((e.minutes, e.text.test.sha256), []).append(e)
    tables = []
    for (minutes, _), es in sorted(ranked.items()):
        es = sorted(es, key=track.score)
        tables.append(dict(title=f"{minutes} minutes, {es[0].text.name}", rows=[row(e, e is track.record(es)) for e in es]))
    return dict(rules=track.RULES, minutes=track.MINUTES, seeds=track.SEEDS, tables=tables, head=HEAD, own_head=OWN_HEAD,
                own=[own_row(e) for e in found if not e.text], logs=list(track_logs.READERS),
                structs={c.__name__: struct(c) for c in (track.Entry, track.Score, track.Text, track.Part)},
                more=[r for r in struct(track.Row)["rows"] if r[0] in ("`train`", "`at`")])
