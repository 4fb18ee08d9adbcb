"The first lesson: plain PyTorch, its guesses before its results, and what a GPU's run of it records."
import ast, json, re
import procs
from helpers.cells import cells, directives, parsed, source
from make_readme import ROOT

START = ROOT/"nbs/1_start/00_start.ipynb"
RECORDS = sorted((ROOT/"nbs/site/measurements/start").glob("*.json")) # none before the first run on a GPU

def code(): return [c for c in cells(START) if c["cell_type"] == "code"]
def reported():
    "The names of what the lesson measures"
    return {n.args[0].value for c in code() for n in ast.walk(parsed(source(c))) if isinstance(n, ast.Call)
            and getattr(n.func, "id", "") in ("gain", "report") and isinstance(n.args[0], ast.Constant)}

def test_what_the_reader_sees_imports_only_data_from_the_package():
    shown = [c for c in code() if not directives(c).keys() & {"hide", "echo"}]
    modules = {n.module for c in shown for n in ast.walk(parsed(source(c))) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if m.startswith("llm_speedrun")} == {"llm_speedrun.data.corpus"}

def test_guesses_come_before_results():
    "A cell that measures stands below a guess, or asks for it in its first line"
    guessed = False
    for c in code():
        if re.search(r"\b(guess\w*|my_prediction) = ", first := source(c).splitlines()[0]): guessed = True
        if re.search(r"^(if .*: )?(gain|report)\(", source(c), re.M) and not directives(c).keys() & {"hide"}:
            assert guessed, f"measured before it is guessed: {first}"
    names = next(c for c in code() if source(c).startswith("guesses = "))
    assert {*ast.literal_eval(source(names).split(" = ")[1].split(" #")[0])} <= reported()

def test_a_record_has_what_the_lesson_measures():
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["gains"].keys() == reported() and record["gpu"] != "CPU", path.name
        assert all(record[k] for k in ("torch", "triton", "date")), path.name

def test_it_takes_twenty_minutes(): assert procs.minutes(cells(START)) <= 20

def test_minutes_leave_out_a_glossary_and_what_is_folded():
    md = lambda n, head="": dict(cell_type="markdown", source=head + "word "*n)
    py = lambda n, head="": dict(cell_type="code", source=head + "x\n"*n)
    read = [md(2000), py(200)]
    assert procs.minutes(read) == 20
    assert procs.minutes(read + [py(900, "#| echo: false\n"), md(0, "## Glossary"), md(2000, "### warp\n")]) == 20
