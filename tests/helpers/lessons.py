"What a lesson shows and the package leaves out, since no command, rung or recipe takes it: functions of its own cells, to be tested."
import ast, importlib
from types import SimpleNamespace
from helpers.cells import NBS, cells, directives, exported, parsed, source

def names(tree): return {o.id for o in ast.walk(tree) if isinstance(o, ast.Name)}

def bound(o): # an import
    return {(a.asname or a.name).split(".")[0] for a in o.names}

def defined_in(stem, *wanted): # a notebook; functions or classes of its cells that aren't exported
    "Run the cells that define `wanted`, among the names of the notebook's module and its imports. Returns a namespace"
    code = [c for c in cells(next(p for p in NBS if p.stem == stem)) if c["cell_type"] == "code"]
    module, = (directives(c)["default_exp"] for c in code if "default_exp" in directives(c))
    found = dict(vars(importlib.import_module(f"llm_speedrun.{module}")))
    trees = [parsed(source(c)) for c in code if not exported(c)]
    made = [t for t in trees if {getattr(o, "name", "") for o in t.body} & {*wanted}]
    used = set().union(*map(names, made))
    imports = [o for t in trees for o in t.body if isinstance(o, ast.ImportFrom | ast.Import)]
    needed = [o for o in imports if bound(o) & used or bound(o) == {"*"} and o.module.startswith("llm_speedrun")]
    for t in (ast.Module(needed, []), *made): exec(compile(t, f"{stem}.ipynb", "exec"), found)
    return SimpleNamespace(**{k: found[k] for k in wanted})
