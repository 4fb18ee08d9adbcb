"What the lessons keep to, so that a reader can follow, see and try: and a broken lesson for each rule to show that the rule can fail."
import itertools, json, re, subprocess, sys
import pytest
from make_readme import ROOT
from test_docs import directives
from test_notebooks import OPTION, md, of_kind, printed, py, source

NBS = sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))
LADDER = [p for p in NBS if 10 <= int(p.stem[:2]) < 30]
TAUGHT = [p for p in NBS if p.stem[:2] in ("00", "01", "02", "04", "05")] + LADDER    # written again for their reader
RULES = {}
def rule(*paths): return lambda f: RULES.setdefault(f.__name__, (f, paths)) and f

def lines(c): return [o for o in source(c).splitlines() if o.strip() and not o.startswith("#|")]
def has_picture(c): return any(k.startswith("image/") for o in c["outputs"] for k in o.get("data", {}))

PARAMETER = re.compile(r"\s+\*{0,2}\w+(=.*)?(,|\):) # ")    # of a signature, with what it means
TASK = re.compile(r"\*\*\d\. [^*]+\*\* \((easy|kernel|open), \d+ (minutes|hours?)\)")

@rule(*NBS)
def figures_have_alternative_texts(nb):
    for c in of_kind(nb, "code"):
        if has_picture(c) and len(directives(c).get("fig-alt", "")) < 20: yield f"a figure without `#| fig-alt`: {lines(c)[0]}"

@rule(*TAUGHT)
def cells_are_short(nb):
    for c in of_kind(nb, "code"):
        most = 25 if "@jit" in source(c) else 15
        n = sum(not OPTION.match(line) and not PARAMETER.match(line) for line in lines(c))
        if n > most and not ("hide" in directives(c) or directives(c).get("echo") == "false"): yield f"a cell of {n} lines, and {most} is the most: {lines(c)[0]}"

@rule(*LADDER)
def there_is_something_to_see(nb):
    silent, exercises = [], [i for i, c in enumerate(nb["cells"]) if TASK.search(source(c))]
    for c in of_kind(dict(cells=nb["cells"][:exercises[0] if exercises else None]), "code"):
        if directives(c).keys() & {"hide", "default_exp"}: continue
        silent = [] if c["outputs"] else silent + [c]
        if len(silent) == 4: yield f"four code cells in a row with nothing to see, from: {lines(silent[0])[0]}"

@rule(*LADDER)
def it_says_where_we_are(nb):
    first = [c for c in of_kind(nb, "code") if "default_exp" not in directives(c) and "hide" not in directives(c)][0]
    if "you_are_here(" not in source(first) or not first["outputs"]: yield "the first thing to see is not the ladder's chart"

@rule(*LADDER)
def exercises_can_be_checked(nb):
    tasks, cells = [], nb["cells"]
    for i, c in enumerate(cells):
        if c["cell_type"] != "markdown" or not (m := TASK.search(source(c))): continue
        tasks.append(m[1])
        rest = list(itertools.takewhile(lambda o: o["cell_type"] == "code", cells[i + 1:]))
        if len(rest) < 3: yield f"no check, stub and solution after {m[0]}"; continue
        (check, stub), solution = rest[:2], list(itertools.takewhile(lambda o: directives(o).get("code-fold") == "true", rest[2:]))
        if not (name := re.search(r"def (check_\w+)", source(check))): yield f"no `def check_...` after {m[0]}"; continue
        if directives(stub).get("eval") != "false" or f"{name[1]}(" not in source(stub): yield f"no stub that calls {name[1]}"
        if not solution: yield f"the solution for {name[1]} isn't folded"
        said = "\n".join(map(source, solution))
        if f"test_fail(lambda: {name[1]}(" not in said or not re.search(r"lambda[^:]*: None", said):
            yield f"it isn't shown that {name[1]} fails where nothing is solved"
        if not re.search(rf"^(if .*: )?{name[1]}\(", said, re.M): yield f"no solution is checked by {name[1]}"
    if len(tasks) < 3 or not {"easy", "open"} <= {*tasks}: yield f"three exercises are asked for, from easy to open, and there are {tasks}"

@rule(*NBS)
def glossary_links_land(nb):
    glossary = json.loads((ROOT/"nbs/00_gpu.ipynb").read_text(encoding="utf-8"))
    heads = {re.sub(r"\W+", "-", h.lower()).strip("-") for c in of_kind(glossary, "markdown") for h in re.findall(r"^#+ (.+)$", source(c), re.M)}
    for c in of_kind(nb, "markdown"):
        for a in re.findall(r"\]\(00_gpu\.ipynb#([^)]+)\)", source(c)):
            if a not in heads: yield f"a link to 00_gpu.ipynb#{a}, and there is no such heading"

@pytest.mark.parametrize("path, name", [(p, n) for n, (_, ps) in RULES.items() for p in ps], ids=lambda o: getattr(o, "stem", o))
def test_lesson(path, name):
    wrong = list(RULES[name][0](json.loads(path.read_text(encoding="utf-8"))))
    assert not wrong, f"nbs/{path.name} has:\n  " + "\n  ".join(wrong)

PICTURE = dict(output_type="display_data", data={"image/png": ""})
HERE = py('#| echo: false\nyou_are_here("flash")', dict(output_type="display_data", data={"text/plain": ""}))
def exercise(level, extra=""):
    return [md(f"**1. Sums** ({level}, 5 minutes). Add."), py("def check_sum(f):\n    'Adds'\n    test_eq(f(1, 2), 3)"),
            py("#| eval: false\ndef add(a, b):\n    ... # yours\ncheck_sum(add)"),
            py("#| code-fold: true\ncheck_sum(lambda a, b: a + b)\ntest_fail(lambda: check_sum(lambda *args: None))")]
GOOD = [md("# A title\n\n> What it is."), py("#| default_exp x"), HERE, py('#| fig-alt: "Bars that fall from left to right"\nplot()', PICTURE),
        py("x = 1"), py("x = 2"), py("x = 3"), py("x", printed("3")), md("A [warp](00_gpu.ipynb#warp)."),
        *exercise("easy"), py("x", printed("3")), *exercise("kernel"), py("x", printed("3")), *exercise("open")]
BROKEN = [("figures_have_alternative_texts", 3, [py("plot()", PICTURE)]), ("cells_are_short", 4, [py("\n".join(["x = 1"]*16))]),
          ("cells_are_short", 4, [py("@jit\n" + "\n".join(["x = 1"]*25))]), ("there_is_something_to_see", 4, [py("x = 1")]),
          ("it_says_where_we_are", 2, [py("x = 1")]), ("glossary_links_land", 8, [md("[warp](00_gpu.ipynb#wrap)")]),
          ("exercises_can_be_checked", 9, [md("**1. Sums** (easy, 5 minutes). Add.")]),
          ("exercises_can_be_checked", 9, exercise("easy")[:3] + [py("#| code-fold: true\ncheck_sum(max)")]),
          ("exercises_can_be_checked", 9, exercise("easy")[:2] + [py("add = None\ncheck_sum(add)")] + exercise("easy")[3:])]

@pytest.mark.parametrize("name", RULES)
def test_rule_passes_a_good_lesson(name): assert list(RULES[name][0](dict(cells=GOOD))) == []

@pytest.mark.parametrize("name, at, cells", BROKEN, ids=lambda o: o if isinstance(o, str) else "")
def test_rule_finds_what_is_broken(name, at, cells): assert list(RULES[name][0](dict(cells=GOOD[:at] + cells + GOOD[at:])))

def test_every_rule_is_tried(): assert {name for name, _, _ in BROKEN} == set(RULES)

def test_too_few_exercises(): assert list(RULES["exercises_can_be_checked"][0](dict(cells=GOOD[:-4])))

@pytest.mark.parametrize("last, code", [("print(x)", 0), ("1/0", 1)])
def test_a_notebook_is_run_without_what_is_the_readers(tmp_path, last, code):
    "Cells that are left to the reader aren't run; after an error the notebook is as it was"
    cell = lambda source, **more: dict(cell_type="code", source=source, outputs=[], metadata={}, execution_count=None, id=source[:8], **more)
    nb, path = dict(cells=[cell("x = 3"), cell("#| eval: false\nx = 1/0"), cell(last)], metadata={}, nbformat=4, nbformat_minor=5), tmp_path/"a.ipynb"
    path.write_text(before := json.dumps(nb))
    p = subprocess.run([sys.executable, ROOT/"tests/run_notebook.py", path], capture_output=True, text=True)
    assert p.returncode == code, p.stderr
    if code: assert path.read_text() == before
    else: assert json.loads(path.read_text())["cells"][-1]["outputs"][0]["text"] in ("3\n", ["3\n"])
