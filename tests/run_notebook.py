"""Run a notebook and keep its outputs: run_notebook.py nbs/04_model.ipynb [where/to.ipynb]

What an exercise leaves to the reader (`#| eval: false`) is not run. An error stops it, and then nothing is written. What the outputs
come from is noted in `measurements/outputs.json` beside the notebook, or with a second argument in `outputs.json` beside that:
a digest of the code, GPU, torch, date and seconds, under the notebook's name."""
import ast, hashlib, json, os, re, sys, tempfile, time
from pathlib import Path
from execnb.shell import CaptureShell
from filelock import FileLock

def left_to_the_reader(source): return bool(re.search(r"^#\|\s*eval:\s*false", source, re.M))

def is_docstring(o): return isinstance(o, ast.Expr) and isinstance(o.value, ast.Constant) and isinstance(o.value.value, str)

def plain(o):
    """Python's syntax tree as lists, the same in every version of Python: without docstrings, positions and fields that are empty;
    neighbouring texts of an f-string are one"""
    if isinstance(o, ast.Constant): return [type(o.value).__name__, repr(o.value)]
    if isinstance(o, list): return [plain(x) for x in o]
    if not isinstance(o, ast.AST): return o
    fields = {k: v for k, v in ast.iter_fields(o) if v not in (None, []) and k not in ("ctx", "kind", "type_comment")}
    if isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and is_docstring(o.body[0]): fields["body"] = o.body[1:]
    if isinstance(o, ast.JoinedStr): fields["values"] = joined(o.values)
    return [type(o).__name__, *([k, plain(v)] for k, v in fields.items())]

def joined(values):
    "The parts of an f-string, neighbouring texts put together"
    res = []
    for v in values:
        text = isinstance(v, ast.Constant)
        if text and res and isinstance(res[-1], ast.Constant): res[-1] = ast.Constant(res[-1].value + v.value)
        elif not text or v.value: res.append(v)
    return res

MAGIC = re.compile(r"^(\s*)([%!].*)$", re.M)

def statements(source):
    "A cell's code as `plain` lists; `%magic` and `!command` lines as strings, a `%%magic` cell as one"
    if source.startswith("%%"): return [source]
    tree = ast.parse(MAGIC.sub(lambda m: f"{m[1]}magic({m[2]!r})", source))
    return [plain(o) for o in tree.body if not is_docstring(o)]

def code_digest(nb): # a parsed notebook
    "A digest of the code that runs: comments, docstrings, formatting and what is left to the reader don't count"
    sources = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    code = [statements(s) for s in sources if not left_to_the_reader(s)]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]

def note(path, name, entry): # a JSON file, a notebook's name, what is known of its outputs
    "Write `entry` over the one under `name`, or beside the others"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(Path(tempfile.gettempdir())/"llm_speedrun_outputs.lock"):
        entries = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(dict(sorted((entries | {name: entry}).items())), indent=1) + "\n")

def run(path, dest=None):
    "Run `path` in its own folder, and write it with its outputs to `dest`, by default over itself"
    path, dest = Path(path).resolve(), dest and Path(dest).resolve()
    os.chdir(path.parent)
    code, began = code_digest(json.loads(path.read_text(encoding="utf-8"))), time.perf_counter()
    CaptureShell().execute(path.name, dest or path, exc_stop=True,
                           preproc=lambda c: c.cell_type == "code" and left_to_the_reader(c.source))
    seconds = round(time.perf_counter() - began, 1)
    from llm_speedrun.measure import machine
    here = {k: v for k, v in machine().items() if k in ("gpu", "torch", "date")}
    note(dest.parent/"outputs.json" if dest else path.parent/"measurements"/"outputs.json", path.stem,
         dict(code=code, **here, seconds=seconds))

if __name__ == "__main__": run(*sys.argv[1:])
