"""Run a notebook and keep its outputs: run_notebook.py nbs/1_start/04_model.ipynb [where/to.ipynb]

A cell marked `#| eval: false` is not run. An error stops it, and then nothing is written. What the outputs
come from is noted in `measurements/outputs.json` beside the notebook, or with a second argument in `outputs.json` beside that:
a digest of the code, GPU, torch, date and seconds, under the notebook's name."""
import ast, hashlib, json, os, re, sys, tempfile, time
from pathlib import Path
from execnb.shell import CaptureShell
from filelock import FileLock

def not_run(source): return bool(re.search(r"^#\|\s*eval:\s*false", source, re.M))
def left_to_the_reader(source): return not_run(source) or bool(re.search(r"\.\.\. # yours", source))

MAGIC = re.compile(r"^(\s*)([%!].*)$", re.M)

def python(source):
    "A cell as plain Python: `%magic` and `!command` lines are calls with what they say, and so is a `%%magic` cell"
    if source.startswith("%%"): return f"magic({source!r})"
    return MAGIC.sub(lambda m: f"{m[1]}magic({m[2]!r})", source)

def shows_nothing(o): # a statement
    "Whether it is a test: an assertion, a call of `test_...`, an `if` around such alone, or an import of what such a cell calls"
    if isinstance(o, ast.ImportFrom): return {n.name for n in o.names} <= {"exercise", "show_recorded"}
    if isinstance(o, ast.If): return not o.orelse and all(map(shows_nothing, o.body))
    name = getattr(getattr(getattr(o, "value", None), "func", None), "id", "")
    return isinstance(o, ast.Assert) or isinstance(o, ast.Expr) and name.startswith("test_")

def shows_a_record(o): return ast.unparse(o).startswith("show_recorded(")

def on_a_gpu(statements):
    "Without what is shown where there is no GPU"
    for o in statements:
        if isinstance(o, ast.If) and o.orelse and all(map(shows_a_record, o.orelse)): o.orelse = []
        if isinstance(o, ast.If) and all(map(shows_a_record, o.body)): yield from o.orelse
        else: yield o

def unmarked(o): # a statement
    "Without `@exercise(1)`"
    if isinstance(o, ast.FunctionDef):
        o.decorator_list = [d for d in o.decorator_list if getattr(getattr(d, "func", None), "id", "") != "exercise"]
    return o

def code_digest(nb): # a parsed notebook
    """A digest of the code that makes outputs: comments, docstrings, formatting, tests and what is left to the reader don't count, nor
    does that a check is one of an exercise"""
    from llm_speedrun.measure import syntax     # not before a notebook has run, which may want to import it first
    sources = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    trees = [ast.parse(python(s)) for s in sources if not left_to_the_reader(s)]
    for t in trees: t.body = [unmarked(o) for o in on_a_gpu(t.body) if not shows_nothing(o)]
    return hashlib.sha256(repr([syntax(t) for t in trees if t.body]).encode()).hexdigest()[:16]

def note(path, name, entry): # a JSON file, a notebook's name, what is known of its outputs
    "Write `entry` over the one under `name`, or beside the others"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(Path(tempfile.gettempdir())/"llm_speedrun_outputs.lock"):
        entries = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(dict(sorted((entries | {name: entry}).items())), indent=1) + "\n")

def outputs_of(path):
    "The file that notes where the outputs of a notebook come from, for all notebooks of its course"
    near = [p/"site/measurements" for p in path.parents]
    return next((p for p in near if p.is_dir()), path.parent/"measurements")/"outputs.json"

def skipped(cell):
    "Whether not to run `cell`; what it showed before goes in any case, since a cell without output would keep it"
    if cell.cell_type == "code": cell.outputs = []
    return cell.cell_type == "code" and not_run(cell.source)

def run(path, dest=None):
    "Run `path` in its own folder, and write it with its outputs to `dest`, by default over itself"
    path, dest = Path(path).resolve(), dest and Path(dest).resolve()
    os.chdir(path.parent)
    os.environ["JPY_SESSION_NAME"] = str(path)     # as Jupyter does: records say which notebook wrote them
    nb, began = json.loads(path.read_text(encoding="utf-8")), time.perf_counter()
    CaptureShell().execute(path.name, dest or path, exc_stop=True, preproc=skipped)
    seconds = round(time.perf_counter() - began, 1)
    from llm_speedrun.measure import machine
    here = {k: v for k, v in machine().items() if k in ("gpu", "torch", "date")}
    note(dest.parent/"outputs.json" if dest else outputs_of(path), path.stem,
         dict(code=code_digest(nb), **here, seconds=seconds))

if __name__ == "__main__": run(*sys.argv[1:])
