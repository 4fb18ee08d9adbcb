"""The site shows what is committed, and what is committed is whole. Tested without Quarto: nbdev prepares a notebook for it, and
that step is the one that could run code again, or leave some out."""
import ast, re
import pytest
from make_readme import ROOT
from helpers.cells import AWAITING, AWAITING_CELLS, NBS, cells, directives, exported, parsed, shown, with_outputs
from make_readme import text

def code(cell):
    "Its source without nbdev's directives; Quarto's, which have a colon, are for Quarto"
    return re.sub(r"^#\|\s*\w+\s*$\n?", "", text(cell["source"]), flags=re.M)

# --- what nbdev makes of it (`processed` in conftest.py) ---

@pytest.mark.parametrize("path", NBS, ids=lambda p: p.stem)
def test_the_site_shows_what_is_committed(processed, path):
    ours = [c for c in cells(path) if c["cell_type"] == "code" and shown(c)]
    site = [c for c in cells(processed/path.relative_to(ROOT/"nbs")) if c["cell_type"] == "code" and shown(c)]
    assert [c["id"] for c in site] == [c["id"] for c in ours], "cells were added, dropped or moved"
    for a, b in zip(ours, site):
        assert code(b).strip() == code(a).strip(), f"cell {a['id']} has other code on the site"
        assert b["outputs"] == a["outputs"], f"cell {a['id']} has other outputs on the site: was it run again?"

@pytest.mark.parametrize("path", NBS, ids=lambda p: p.stem)
def test_the_site_shows_exported_code(path, processed):
    of_package = {c["id"] for c in cells(path) if c["cell_type"] == "code" and exported(c)}
    assert of_package <= {c["id"] for c in cells(processed/path.relative_to(ROOT/"nbs")) if text(c["source"]).strip()}

# --- what a cell says is there ---

NO_VALUE = re.compile(r"test_\w+|print|display|close|release|clear|unlink|rmtree|mkdir|append|update|remove|seed|manual_seed|synchronize|load_state_dict|set")
BLOCKS = ast.For, ast.While, ast.With, ast.Try    # run with the cell; the body of an `if` may not, that of a function does not

def called(node):
    "The name that a call calls, without what stands before its last dot"
    return getattr(node.func, "id", getattr(node.func, "attr", ""))

def statements(body):
    "The simple statements that run when `body` does"
    for o in body:
        if isinstance(o, BLOCKS): yield from statements(o.body + getattr(o, "finalbody", []))
        elif not isinstance(o, (ast.If, ast.FunctionDef, ast.ClassDef)): yield o

def prints(statement):
    "Whether it prints or draws: a call of `print`, `display`, or one of pyplot's"
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return any(called(n) in ("print", "display") and all(k.arg != "file" for k in n.keywords)
               or isinstance(n.func, ast.Attribute) and getattr(n.func.value, "id", "") == "plt" for n in calls)

def has_value(statement):
    "Whether a notebook shows the value of this last statement: an expression, and no call that returns None"
    if not isinstance(statement, ast.Expr): return False
    return not (isinstance(statement.value, ast.Call) and NO_VALUE.fullmatch(called(statement.value)))

def speaks(source):
    "Whether a cell with this source leaves an output: it prints or draws, or ends with a value and no semicolon"
    body = parsed(source).body
    if not body: return False
    return any(map(prints, statements(body))) or has_value(body[-1]) and not source.rstrip().endswith(";")

def silent(nb):
    "The shown cells that should have an output and have none"
    quiet = lambda c: exported(c) or directives(c).get("eval", "").lower() == "false"
    return {c["id"] for c in nb if c["cell_type"] == "code" and shown(c) and not quiet(c) and not c["outputs"]
            and speaks(text(c["source"]))}

@pytest.mark.parametrize("path", with_outputs(NBS), ids=lambda p: p.stem)
def test_what_a_cell_prints_is_committed(path):
    found, awaiting = silent(cells(path)), AWAITING_CELLS.get(path.stem, set())
    assert found <= awaiting, f"{path.name}: cells {sorted(found - awaiting)} print or plot and have no output: run it on the GPU"
    assert found == awaiting, f"{path.name}: cells {sorted(awaiting - found)} need not stand in helpers.cells.WAITING any more"

def test_waiting_names_notebooks_and_cells():
    "Each once, and cells of that notebook"
    assert len({*AWAITING}) == len(AWAITING) and {*AWAITING} <= {p.stem for p in NBS}
    for stem, ids in AWAITING_CELLS.items():
        assert ids == {"*"} or ids <= {c["id"] for p in NBS if p.stem == stem for c in cells(p)}, stem

@pytest.mark.parametrize("source, says", [
    ("print(1)", True), ("for i in x: print(i)\ntest_eq(1, 1)", True), ("with a: print(1)\nx = 1", True), ("x = 1\nx", True),
    ("x = 1\nx;", False), ("table(a)", True), ("plt.plot(x)\nassert x", True), ("loss_chart(rows)", True), ("display(x)\ny = 1", True),
    ("x = f(1)", False), ("test_eq(f(1), 1)", False), ("def f(): print(1)", False), ("if smoke(): print('small')", False),
    ("worker.close()", False), ("print('x', file=f)", False), ("# nothing", False), ("assert f()", False), ("import x", False)])
def test_which_cells_speak(source, says): assert speaks(source) is says

def test_a_silent_cell_is_found():
    cell = lambda source, *outputs: dict(id=source, cell_type="code", source=source, outputs=outputs)
    nb = [cell("print(1)"), cell("print(2)", "2"), cell("#| hide\nprint(3)"), cell("#| eval: false\nprint(4)"),
          cell("#| export\nprint(5)"), cell("#| exporti\nprint(7)"), cell("#| echo: false\nprint(6)"), cell("x = 1")]
    assert silent(nb) == {"print(1)", "#| echo: false\nprint(6)"}
