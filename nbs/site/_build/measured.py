"Pages of measurements, from the records and from the code that reads them."
import ast, dis, json, math, posixpath, re
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from unittest.mock import patch
import yaml
from llm_speedrun import measure, verdicts
from llm_speedrun.measure import SPINE, fmt, mfu_text, records_path
from llm_speedrun.course import COURSE, course_records, notebook_path
from llm_speedrun.benchmarks.peers import PEERS
from llm_speedrun.records import is_current
from compare import speeds
from headline import CARDS, LARGER, OURS, OURS_16, best, name, newest, packages, project, raced, runs, times_text, when
from templating import code, page
from records import all_records, by_gpu, folder

def sources(path, kind):
    "The sources of a notebook's cells of one kind, a list of texts"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == kind]

def lesson(name, root):
    "A notebook's number and title with a link, or the name alone of what is no notebook, such as a command"
    if not (path := notebook_path(root/"nbs", name)): return f"`{name}`"
    first = sources(path, "markdown")[0].split("\n")[0]
    number = f"{name[:2]} " if name[:2].isdigit() else ""
    return f"[{number}{first.removeprefix('# ')}](../../{path.relative_to(root/'nbs').as_posix()})"

def times(x): return "" if x is None else f"{x:.2f}×"

HEAD = ["what", "over", "tokens/s", "ms", "*predicted*", "measured", "MFU", "GiB", "micro-batch"]

def record_row(r):
    "A row of a table with the columns of `HEAD`"
    gains = [times(r["predicted_ratio"]), times(r["ratio"])] if r["before"] else ["", ""]
    return [f"`{r['rung']}`", code(r["before"]), f"{r['tok_s']:,.0f}", f"{r['ms']:,.1f}", *gains,
            mfu_text(r, "mfu_full"), fmt(r["peak_gib"], ".1f"), r.get("micro") or ""]

@contextmanager
def measurements_of(root):
    "Inside, the package reads the records of this repository, wherever we are"
    with patch.object(measure, "measurements_dir", lambda: folder(root)): yield

def versions(records):
    "What records were measured with, in words"
    said = "{gpu}, driver {driver}, torch {torch}, triton {triton}, {date}"
    return "; ".join(sorted({said.format(**r) for r in records}))

def by_lesson(records, root):
    "A table of records for each notebook, in the notebooks' order"
    groups, step = {}, lambda r: f"{r['workload']}, {r['batch']} × {r['seq']}"
    for r in sorted(records, key=lambda r: r["notebook"]): groups.setdefault(r["notebook"], []).append(r)
    row = lambda r: [*record_row(r)[:2], step(r), *record_row(r)[2:], code((r.get("code") or "")[:8])]
    return [dict(title=lesson(name, root), rows=list(map(row, rs)), versions=versions(rs))
            for name, rs in groups.items()]

def waiting(records):
    "How many records are of other code than today's, and so wait to be measured again"
    ours = (r for r in records if r.get("code") and r["notebook"] != "speedrun_ladder") # which is run on any GPU
    return sum(not is_current(r) for r in ours)

def chart(gpu, root):
    "The address of a GPU's chart, if somebody has shared one"
    name = records_path(gpu).with_suffix(".png").name
    return f"../measurements/{name}" if (folder(root)/name).exists() else ""

@page("measured/index.qmd")
def by_gpu_page(root):
    found = by_gpu(root)
    with measurements_of(root): climbed = course_records()
    race = newest(folder(root))
    gpus = {gpu: dict(groups=by_lesson(rs, root), n=len(rs), waiting=waiting(rs), versions=versions(rs), chart=chart(gpu, root))
            for gpu, rs in found.items()}
    return dict(gpus=gpus, records=all_records(root),
                head=HEAD, all_head=[*HEAD[:2], "workload, a step", *HEAD[2:], "code"],
                course=climbed, course_rows=list(map(record_row, climbed)), course_older=not all(map(is_current, climbed)), whole=len(climbed) == len(COURSE),
                packages=packages(race) if race else "other packages")

# --- claims: the code of the notebook that judges them ---

def codes(outer):
    "A code object and all that are in it"
    yield outer
    for c in outer.co_consts:
        if isinstance(c, CodeType): yield from codes(c)

def names(statement, op):
    "Global names that a statement reads (LOAD) or binds (STORE)"
    whole = compile(ast.Module([statement], []), "notebook", "exec")
    found = codes(whole) if op == "LOAD" else [whole]
    return {i.argval for c in found for i in dis.get_instructions(c)
            if i.opname in (f"{op}_NAME", f"{op}_GLOBAL")}

def from_notebook(path, wanted, given):
    """What a notebook's cells make of some names: runs the assignments and functions that these need, and
    nothing else. `given` is a dict of names that are there already"""
    kinds = ast.Assign, ast.AugAssign, ast.FunctionDef
    body = [s for t in sources(path, "code") for s in ast.parse(t).body if isinstance(s, kinds)]
    need, before = set(wanted), None
    while need != before:
        before = set(need)
        for s in body:
            if names(s, "STORE") & need: need |= names(s, "LOAD") - given.keys()
    space = dict(given)
    for s in body:
        if names(s, "STORE") & need: exec(compile(ast.Module([s], []), path.name, "exec"), space)
    return [space[k] for k in wanted]

@page("measured/claims.qmd")
def claims_page(root):
    wanted = ["claims", "claim_row", "answer", "OUTSIDE", "guides"]
    with measurements_of(root):
        of_package = dict(math=math, notebook_path=notebook_path, is_current=is_current)
        given = vars(measure) | of_package | {k: getattr(verdicts, k) for k in ("in_unit", "unit_text", "verdict")}
        found = from_notebook(root/"nbs/7_using_a_model/75_claims.ipynb", wanted, given)
        claims, row, answer, outside, guides = found
        rows, said = [row(c) for c in claims], [answer(c) for c in claims]
    here = lambda m: f"]({posixpath.relpath('7_using_a_model/' + m[1], 'site/measured')}" # links of the lesson, seen from this page
    further_up = lambda text: re.sub(r"\]\((?!\w+:)([^)]+)", here, text)
    for r in rows: r[-1] = further_up(r[-1])
    counts = [[w, str(said.count(w))] for w in sorted(set(said), key=lambda w: (-said.count(w), w))]
    unmeasured = [[further_up(c.strip()) for c in line.split("|")] for line in outside.splitlines()]
    head = ["claim", "guide", "guides say", "measured", "the claim is", "setting", "code"]
    return dict(head=head, rows=rows, counts=counts, unmeasured=unmeasured, records=all_records(root), rounds=verdicts.ROUNDS,
                guides=guides)

# --- other trainers ---

PEER_HEAD = ["", "tokens/s", "ms", "ours is", "micro-batch", "peak GiB", "joules a step", "weights, M",
             "source"]

def peer_row(r):
    "A row of a table with the columns of `PEER_HEAD`"
    return [f"`{r['rung']}`", f"{r['tok_s']:,.0f}", f"{r['ms']:.1f}", times(1/r["ratio"]), r["micro"],
            fmt(r["peak_gib"], ".1f"), fmt(r["joules"], ".1f"), f"{r['parameters']/1e6:,.1f}", r["source"]]

@page("measured/trainers.qmd")
def trainers_page(root):
    found, races = [r for r in raced(folder(root)) if "-without-" not in r["rung"]], {} # lesson 38 has the lists without a rung
    for r in sorted(found, key=lambda r: (CARDS.index(r["gpu"]) if r["gpu"] in CARDS else len(CARDS), r["workload"], r["date"])): races.setdefault((r["gpu"], r["workload"], r["batch"], r["seq"], r["date"]), []).append(r)
    tables = [dict(title=f"{workload} on {gpu}, {batch} × {seq} tokens a step, {day}", versions=versions(rs),
                   rows=list(map(peer_row, sorted(rs, key=lambda r: -r["ratio"])))) for (gpu, workload, batch, seq, day), rs in races.items()]
    option = lambda k, a: f"`--peer {k}{'=FOLDER' * bool(a.clone)}`" if a.step else "runs alone"
    adapters = [[f"`{k}`", f"<{a.clone}>" if a.clone else "pip", option(k, a)] for k, a in PEERS.items()]
    return dict(head=PEER_HEAD, tables=tables, adapters=adapters, records=found)

# --- against the compiler ---

def compiled(measured): # the folder of measurements
    "Rows of a table: every form of torch.compile that raced with our FP8 list"
    forms = [(run, r) for w in (SPINE[0], LARGER) for run in runs(w, measured) for r in run.values() if project(r) == "torch.compile"]
    order = lambda o: (o[1]["workload"] == LARGER, CARDS.index(o[1]["gpu"]), -o[1]["ratio"])
    form = lambda r: r["source"].split(", ")[-1]
    return [[f"`{r['workload']}`", r["gpu"], f"`{form(r)}`", "FP8" if r["dtype"] == "fp8" else r["dtype"], times_text(run, r), r["date"]]
            for run, r in sorted(forms, key=order)]

IN_FP8 = {OURS_16: (OURS,), "compile_flash4": ("compile_flash4_fp8",), "compile_whole": ("compile_tensorwise", "compile_rowwise", "compile_rowwise_with_gw_hp"),
          "nanogpt": ("nanogpt_tensorwise", "nanogpt_rowwise"), "nanochat": ("nanochat_fp8",), "transformers_liger_compile": ("transformers_fp8",)} # the same but for the precision

def gains_of_fp8(measured):
    """Rows of a table: what ran in both precisions on one card and day, each next to our list, and how much faster the best form in FP8 was. None
    where the first recipe of `IN_FP8`, the fastest on record, didn't run"""
    rows, days = [], {}
    for run in (run for w in (SPINE[0], LARGER) for run in runs(w, measured)):
        days.setdefault((run[OURS]["workload"], run[OURS]["gpu"], run[OURS]["date"]), {}).update(run)
    for (of, gpu, date), run in days.items():
        for form in IN_FP8.keys() & run.keys():
            if IN_FP8[form][0] not in run: continue
            fp8 = max((run[k] for k in IN_FP8[form] if k in run), key=lambda r: r["ratio"])
            rows.append([f"`{of}`", gpu, name(fp8), times_text(run, run[form], fp8["rung"]), date])
    return sorted(rows)

@page("measured/compiler.qmd")
def compiler_page(root):
    measured = folder(root)
    run, larger = newest(measured), newest(measured, LARGER)
    cut = "fastest-without-chunked_ce", run[OURS]["gpu"] if run else "", SPINE[0]
    without = next((r for r in raced(measured) if (r["rung"], r["gpu"], r["workload"]) == cut), None)
    studies = yaml.safe_load((Path(__file__).parent/"studies.yml").read_text(encoding="utf-8"))["studies"]
    makefile = root/"Makefile"
    made = makefile.exists() and re.search(r"^confirm:", makefile.read_text(encoding="utf-8"), re.M)
    return dict(studies=studies, run=run, ours=run.get(OURS), when=when(run) if run else "", speeds=speeds(run), large=larger.get(OURS),
                large_when=when(larger) if larger else "", larger=speeds(larger), compiled=compiled(measured), gains=gains_of_fp8(measured),
                without=without, without_chunks=times(1/without["ratio"]) if without else "",
                behind=without and (rival := best(run, "torch.compile")) and without["ratio"] < rival["ratio_p10"], confirm="confirm" if made else "")

@page("measured/yours.qmd")
def yours_page(root):
    example = records_path("NVIDIA GeForce RTX 4090").stem
    return dict(gpus=list(by_gpu(root)), example=example, keys=measure.KEYS)
