"""The reader guesses first: above the cell where a lesson asks for a guess, no output and no text has what the lesson measured, nor does the ladder's chart.
A rule takes a parsed notebook and the records that it wrote, and yields what is wrong."""
import ast, json, re
import pytest
from llm_speedrun.course import COURSE
from llm_speedrun.measure import SPINE
from helpers.cells import LESSONS, directives, output_text, parsed, read_once, source
from make_readme import ROOT

GUESS = re.compile(r"^.*= .*#.*\byours\b", re.M)
SHOWS = "measure_run", "measure_here", "measure_ladder", "ladder_table", "ladder_chart", "paid_text", "guess_chart"

def calls(code):
    "The names of functions that a cell calls at its top level, functions that it defines left out"
    body = [o for o in parsed(code).body if not isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    return [(getattr(n.func, "id", ""), n) for o in body for n in ast.walk(o) if isinstance(n, ast.Call)]

def first_guess(cells): return next((i for i, c in enumerate(cells) if c["cell_type"] == "code" and GUESS.search(source(c))), None)

def first_result(cells):
    return next((i for i, c in enumerate(cells) if c["cell_type"] == "code" and {n for n, _ in calls(source(c))} & {*SHOWS}), None)

def of_rungs(records):
    "Those of a rung over the list below it"
    below = dict(zip(COURSE[1:], COURSE))
    return [r for r in records if r["workload"] == SPINE[0] and r["before"] and r["before"] == below.get(r["rung"])]

def numbers(r):
    "How a lesson may write what a record measured: its ratio, and its speed"
    x = f"{r['ratio']:.2f}".replace(".", r"\.")
    return rf"(?<![\d.]){x}\s?(?:×|x\b|times\b)|(?<![\d.,]){r['tok_s']:,.0f}(?![\d.,])"

def seen(c):
    "All that a reader can see of a cell, also what is folded"
    if c["cell_type"] == "markdown": yield source(c)
    elif not directives(c).keys() & {"hide", "default_exp"}: yield from (s for o in c["outputs"] for s in output_text(o))

def shown_too_early(cells, records):
    guess, result = first_guess(cells), first_result(cells)
    if result is not None and of_rungs(records):
        if guess is None: yield "a rung is measured, and no cell asks for a guess before"
        elif guess > result: yield f"cell {result} shows a result, and the guess is asked for in cell {guess}"
    for i, c in enumerate(cells[:guess or 0]):
        for r in of_rungs(records):
            for s in seen(c):
                if m := re.search(numbers(r), s): yield f"cell {i} shows {m[0]}, what {r['rung']} gained, before the guess in cell {guess}"
        if c["cell_type"] == "code" and directives(c).get("code-summary", "").strip('"').endswith("solution") and result is not None and i > result:
            yield f"cell {i} is a solution that comes between a result and the guess"
        if c["cell_type"] == "code": yield from charts(c, [r["rung"] for r in of_rungs(records)])

def charts(c, rungs):
    "What is wrong with a chart of the ladder: it must end below the lesson's rungs"
    for name, call in calls(source(c)):
        if name != "you_are_here" or not rungs: continue
        named = [ast.literal_eval(a) for a in call.args]
        until = next((ast.literal_eval(k.value) for k in call.keywords if k.arg == "until"), None)
        last = COURSE.index(until) if until else COURSE.index(named[0]) - 1 if named else len(COURSE) - 1
        for r in rungs:
            if COURSE.index(r) <= last: yield f"the ladder's chart shows {r}"

def records(path):
    "What the notebook measured on the course's GPU"
    return [r for r in json.loads((ROOT/"nbs/site/measurements/nvidia-h200.json").read_text(encoding="utf-8")) if r["notebook"] == path.stem]

@pytest.mark.parametrize("path", [p for p in LESSONS if p.parent.name[0] in "12"], ids=lambda p: p.stem)
def test_the_reader_guesses_first(path):
    wrong = [*shown_too_early(read_once(path)["cells"], records(path))]
    assert not wrong, f"{path.name}:\n  " + "\n  ".join(wrong)

# --- the rule itself ---

def md(text): return dict(cell_type="markdown", source=text)
def py(text, *outputs): return dict(cell_type="code", source=text, outputs=[dict(output_type="stream", text=o) for o in outputs])
FLASH = [dict(rung="flash", before="bf16", workload=SPINE[0], ratio=2.1082, tok_s=262519.6)]
GOOD = [md("# Flash"), py("#| echo: false\nyou_are_here('flash')", "a chart"), md("Attention alone: 17.59 times the speed."), py("my_guess = 2 # times the speed: put yours"),
        py("records = measure_run(config, rungs)\nladder_table(records)", "2.11× 262,520 tokens/s"), py("guess_chart(my_guess, records[-1])", "a chart")]

def put(at, *cells): return GOOD[:at] + [*cells] + GOOD[at:]

def test_good_lessons_pass(): assert not [*shown_too_early(GOOD, FLASH)] and not [*shown_too_early(GOOD, [])]

@pytest.mark.parametrize("cells", [
    put(2, md("It gains 2.11×.")), put(2, md("The step has 2.11 times the speed.")), put(2, py("print(x)", "262,520 tokens/s")), put(2, py("#| code-fold: true\nx", "| 2.11× |")),
    put(1, py("you_are_here('flash', until='flash')", "a chart")), put(1, py("you_are_here()", "a chart")), GOOD[:3] + GOOD[4:], GOOD[:3] + [GOOD[4], GOOD[3], GOOD[5]],
    put(3, py("paid_text(records[-1])"))])
def test_early_results_are_found(cells): assert [*shown_too_early(cells, FLASH)]

@pytest.mark.parametrize("cells", [put(2, md("12.11× is another number, and so is 2.112.")), put(2, py("#| hide\nx", "2.11×")), put(2, py("def f(): ladder_table(records)")), put(6, md("2.11×"))])
def test_other_numbers_may_be_there(cells): assert not [*shown_too_early(cells, FLASH)]
