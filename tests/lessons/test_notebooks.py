"""What the notebooks keep to, so that a reader can follow, see and try. A rule takes a parsed notebook and yields what is wrong with
it; beside each stand cells which break it in a notebook that is good otherwise, to show that the rule can fail."""
import ast, builtins, itertools, re
from contextlib import redirect_stdout
from io import StringIO
import pytest
from helpers.cells import (LADDER, LESSONS, NBS, NUMBERED, SOURCE, directives, exported, first_line, lines, of_kind, output_text, parsed, read_once, said, shown,
                   source, with_outputs)
from llm_speedrun.course import exercise as exercise_check
from make_readme import ROOT, targets, text
from helpers.prose import measured_numbers, shows, typed_numbers

def md(source): return dict(cell_type="markdown", source=source)
def py(source, *outputs, **metadata): return dict(cell_type="code", source=source, outputs=list(outputs), metadata=metadata)
def printed(text): return dict(output_type="stream", name="stdout", text=text)
def value(**data): return dict(output_type="display_data", data={k.replace("_", "/"): v for k, v in data.items()})
ALT = {"fig-alt": "Bars that fall from left to right"}
def picture(width): return value(image_png="", text_plain=f"<Figure size {width}x300 with 1 Axes>")
def here(outputs=()): return py('#| echo: false\nyou_are_here("flash")', *outputs)
def exercise(level):
    return [md(f"**1. Sums** ({level}, 5 minutes). Add."), py("@exercise(1)\ndef check_sum(f):\n    'Adds'\n    test_eq(f(1, 2), 3)"),
            py("def add(a, b):\n    ... # yours\ncheck_sum(add)", printed("Exercise 1: yours to write\n")),
            py("#| code-fold: true\ncheck_sum(lambda a, b: a + b)\ntest_fail(lambda: check_sum(lambda *args: None))")]
SHOWN = py("x", printed("4 tokens/work, runs/home\n100%|##| 2/2 {'interrupted': False}, on 2026-11-21: 2.434 ms"))
GOOD = [md("# A title\n\n> What it is."), py("#| default_exp x"), here([value(text_plain="")]),
        py("plot()", picture(740), **ALT),
        py("#| export\ndef double(x):\n    'Twice `x`.'\n    return 2*x"), py("x = 2"), py("x = 3"), SHOWN,
        md("It takes 2.4 ms. See [the licence](../../LICENSE), `[this](nowhere.md)` and what a [warp](../1_start/01_gpu.ipynb#warp) is."),
        *exercise("easy"), SHOWN, *exercise("kernel"), SHOWN, *exercise("open")]
RULES, BROKEN = {}, []

def rule(paths, *broken): # the notebooks that keep to it, and notebooks that don't
    "Register a rule"
    def add(f):
        RULES[f.__name__] = f, paths
        BROKEN.extend((f.__name__, cells) for cells in broken)
        return f
    return add

def put(at, *cells): return GOOD[:at] + [*cells] + GOOD[at:]

# --- all of them ---

@rule(NBS, put(0, md("# A title\n\nWhat it is.")), put(0, py("1")))
def title_and_one_line(nb):
    c = nb["cells"][0]
    if c["cell_type"] != "markdown" or not re.match(r"# \S.*\n\n?> \S", source(c)):
        yield "the first cell is not `# Title` and then a `> ` line"

@rule(NBS, put(4, py("1/0", dict(output_type="error", ename="ZeroDivisionError", evalue="by zero"))))
def no_errors(nb):
    for o in (o for c in of_kind(nb, "code") for o in c["outputs"] if o["output_type"] == "error"):
        yield f"an error in its outputs: {o['ename']}: {o['evalue']}"

@rule(NBS, put(4, py("x = '" + "y" * 110 + "'")))
def short_lines(nb):
    for line in (o for c in of_kind(nb, "code") for o in source(c).splitlines()):
        if len(line) > 110: yield f"a line of {len(line)} characters, and 110 is the most: {line}"

ABSOLUTE = re.compile(r"(?<![\w.~/])/(?:work|workspace|root|home|Users|tmp|mnt)\b[^\s'\"]*"
                      r"|(?<![\w.])/\S*site-packages/\S*")

@rule(NBS, put(4, py("open('/tmp/a')")), put(4, md("It is in /home/me/data.")),
      put(4, py("1", printed("/opt/env/site-packages/torch/x.py:1: UserWarning"))))
def no_absolute_paths(nb):
    for s in [source(c) for c in nb["cells"]] + said(nb):
        for m in ABSOLUTE.finditer(s): yield f"a path of the machine it ran on: {m[0]}"

# A traceback, also a printed one; a CUDA error that was caught; a progress bar that stopped on its way; a result that says so
STOPPED = re.compile(r"Traceback \(most recent call last\)|KeyboardInterrupt|CUDA error|Segmentation fault"
                     r"|(?<!\d)\d{1,2}%\||['\"]interrupted['\"]: ?[Tt]rue")

@rule(NBS, *(put(4, py("1", printed(s))) for s in ("Traceback (most recent call last):\n  ...", "training:  45%|####5     | 45/100",
                                                  "{'steps': 3, 'interrupted': True}")))
def no_stopped_runs(nb):
    for s in said(nb):
        for m in STOPPED.finditer(s): yield f"an output of a run that failed or was interrupted: {m[0]}"

def place(nb): return nb.get("path", ROOT/"nbs/2_ladder/20_two.ipynb").parent

@rule(NBS, put(4, md("[here](nowhere.ipynb)")), put(4, md("![a chart](images/nowhere.png)")))
def links_resolve(nb):
    md = [source(c) for c in of_kind(nb, "markdown")]
    md += [text(o["data"]["text/markdown"]) for c in of_kind(nb, "code") for o in c["outputs"] if "text/markdown" in o.get("data", {})]
    made = [(ROOT/o).resolve() for o in (ROOT/".gitignore").read_text(encoding="utf-8").split() if o.startswith("nbs/")] # pages that make docs writes
    for t in (t for s in md for t in targets(s)):
        path = (place(nb)/t).resolve()
        if not path.exists() and not any(path.is_relative_to(m) for m in made): yield f"a link to {t}, which is not there"

GLOSSARY = ROOT/"nbs/1_start/01_gpu.ipynb"

@rule(NBS, put(4, md("[warp](../1_start/01_gpu.ipynb#wrap)")))
def glossary_links_land(nb):
    heads = [h for c in of_kind(read_once(GLOSSARY), "markdown") for h in re.findall(r"^#+ (.+)$", source(c), re.M)]
    anchors = {re.sub(r"\W+", "-", h.lower()).strip("-") for h in heads}
    for a in (a for c in of_kind(nb, "markdown") for a in re.findall(rf"\]\([\w./]*{GLOSSARY.name}#([^)]+)\)", source(c))):
        if a not in anchors: yield f"a link to {GLOSSARY.name}#{a}, and there is no such heading"

@rule(NBS, put(4, py("#| export\ndef half(x): return x/2")), put(4, py("#|exports\nclass Half: pass")))
def exports_have_docstrings(nb):
    for o in (o for c in of_kind(nb, "code") if exported(c) for o in parsed(source(c)).body):
        if not isinstance(o, (ast.FunctionDef, ast.ClassDef)) or o.name.startswith("_"): continue
        if not ast.get_docstring(o): yield f"`{o.name}` is exported and has no docstring"

# --- figures, tables, numbers ---

@rule(NBS, put(4, py("plot()", picture(740))))
def figures_have_alternative_texts(nb):
    for c in of_kind(nb, "code"):
        drawn = any(k.startswith("image/") for o in c["outputs"] for k in o.get("data", {}))
        if drawn and len(c["metadata"].get("fig-alt", "")) < 20: yield f"a figure without `#| fig-alt`: {first_line(c)}"

# What draws, and what else a cell calls that only draws
DRAWS = set("""subplots bar barh plot scatter semilogx semilogy loglog hist imshow fill_between axhline axvline text annotate legend grid
    invert_xaxis invert_yaxis set set_visible set_title set_xlabel set_ylabel set_xscale set_yscale""".split())
FEEDS = set("enumerate zip range dict list len max min sorted sum values keys items".split())

def only_draws(source):
    "Whether all calls of this code draw, or feed one that does"
    calls = [n.func for n in ast.walk(parsed(source)) if isinstance(n, ast.Call)]
    methods, functions = ({getattr(f, k, None) for f in calls} - {None} for k in ("attr", "id"))
    return bool(methods & DRAWS) and methods <= DRAWS | FEEDS and functions <= FEEDS

@rule(NBS, put(4, py("fig, ax = plt.subplots()\nax.plot(list(range(3)))", picture(740), **ALT)))
def drawing_code_is_hidden(nb):
    for c in of_kind(nb, "code"):
        if not directives(c).keys() & {"hide", "echo", "code-fold", "export", "exporti"} and only_draws(source(c)): yield f"draws, and says no `#| echo: false`: {first_line(c)}"

@rule(with_outputs(NBS), put(4, py("plot()", picture(741), **ALT)))
def figures_fit_the_page(nb):
    for c in of_kind(nb, "code"):
        for width in re.findall(r"<Figure size (\d+)x", "\n".join(s for o in c["outputs"] for s in output_text(o))):
            if int(width) > 740: yield f"a figure {int(width)/100} inches wide, and 7.4 is the most: {first_line(c)}"

@rule(NBS, put(4, py("print(kernel_table(r), end='')")), put(4, py("for t in x: print(t)", printed("| a |\n|---|\n| 1 |\n"))))
def tables_are_displayed(nb):
    for c in (c for c in of_kind(nb, "code") if not exported(c)): # what is exported prints in a terminal
        calls = [n for n in ast.walk(parsed(source(c))) if isinstance(n, ast.Call)]
        name = lambda call: getattr(call.func, "id", getattr(call.func, "attr", ""))
        if any(name(a) == "table" or name(a).endswith("_table") for n in calls if name(n) == "print"
               for a in n.args if isinstance(a, ast.Call)): yield f"a table is printed, not displayed: {first_line(c)}"
        elif any(re.search(r"^\|[-:|]+\|$", text(o.get("text", "")), re.M) for o in c["outputs"]):
            yield f"the output holds a table that is printed, not displayed: {first_line(c)}"

@rule(NUMBERED, put(4, py("x", printed("measured on 2026-11-22")))) # the home page shows records of several days, each with its own
def outputs_have_one_date(nb):
    dates = {}
    for c in of_kind(nb, "code"):
        for s in (s for o in c["outputs"] for s in output_text(o)):
            for d in re.findall(r"(?<![\w-])20\d\d-\d\d-\d\d(?![\w-])", s):
                if d not in source(c): dates.setdefault(d, first_line(c)) # a date that the code names is meant
    if len(dates) > 1: yield "outputs of several days: " + "; ".join(f"{d} in {where}" for d, where in sorted(dates.items()))

@rule(NUMBERED, put(4, md("Ours takes 2.4 ms.")), put(9, md("It is 2.5 times as fast.")), put(9, md("That is `81%` of the copy's speed.")))
def numbers_are_shown_above(nb):
    for number, context in typed_numbers(nb["cells"]): yield f"a number that nothing above shows, {number}: ...{context}..."

# --- lessons ---

OPTION = re.compile(r"    \w+: \w+( \| None)? = .* # |@exercise\(") # a list of options may be long; that mark is no line to read
DOCMENT = re.compile(r"\s+\*{0,2}\w+(: [^=#]+)?(=[^#]*)?(,|\):)\s+# |\) -> [^#]+:\s+# ")    # a signature's line with what it means
TASK = re.compile(r"\*\*\d\. [^*]+\*\* \((easy|kernel|open), \d+ (minutes|hours?)\)")

@rule(LESSONS, put(4, py("\n".join(["x = 1"]*16))), put(4, py("@jit\n" + "\n".join(["x = 1"]*25))))
def cells_are_short(nb):
    for c in of_kind(nb, "code"):
        most = 25 if re.search(r"^@(triton\.)?jit", source(c), re.M) else 15
        n = sum(not OPTION.match(line) and not DOCMENT.match(line) for line in lines(c))
        if n > most and shown(c) and directives(c).get("echo") != "false":
            yield f"a cell of {n} lines, and {most} is the most: {first_line(c)}"

def nothing_to_see(nb, most):
    run, exercises = [], [i for i, c in enumerate(nb["cells"]) if TASK.search(source(c))]
    for c in filter(shown, of_kind(dict(cells=nb["cells"][:exercises[0] if exercises else None]), "code")):
        run = [] if c["outputs"] else run + [c]
        if len(run) == most + 1: yield f"more than {most} code cells in a row with nothing to see, from: {first_line(run[0])}"

@rule(with_outputs(LADDER), put(4, py("x = 1")))
def there_is_soon_something_to_see(nb): yield from nothing_to_see(nb, 3)

@rule(with_outputs([p for p in LESSONS if p not in LADDER]), put(4, *[py("x = 1")]*4))
def there_is_something_to_see(nb): yield from nothing_to_see(nb, 6)

@rule(LADDER, put(2, py("x = 1")), put(2, here()))
def it_says_where_we_are(nb):
    first = [c for c in of_kind(nb, "code") if shown(c)][0]
    if "you_are_here(" not in source(first) or not first["outputs"]: yield "the first thing to see is not the ladder's chart"

class Something:
    "Stands for what a stub takes for granted: a base class, a decorator, a module"
    def __getattr__(self, name): return self
    def __mro_entries__(self, bases): return ()
    def __call__(self, *args, **kwargs): return args[0] if args and callable(args[0]) else self

class Anything(dict):
    "Every name is `Something`"
    def __missing__(self, name):
        if hasattr(builtins, name) or name.startswith("__"): raise KeyError(name)
        return Something()

def printed_by(c): return "".join(s for o in c["outputs"] for s in output_text(o))

def said_by_stub(stub):
    "What it prints where nothing is solved yet"
    said, number = StringIO(), re.search(r"Exercise (\d+)", printed_by(stub))
    wrong = exercise_check(int(number[1]) if number else 0)(lambda *answers: print("not a stub"))
    names = Anything({n: wrong for n in re.findall(r"^(check_\w+)\(", source(stub), re.M)})
    with redirect_stdout(said): exec(source(stub), dict(__name__="__main__"), names)
    return said.getvalue()

def not_in_form(task, rest):
    "What is wrong with the code cells `rest` that follow the text `task` of an exercise"
    if len(rest) < 3: yield f"no check, stub and solution after {task}"; return
    check, stub, *answer = rest
    if not (name := re.search(r"def (check_\w+)", source(check))): yield f"no `def check_...` after {task}"; return
    if not (number := re.search(rf"@exercise\((\d+)\)\ndef {name[1]}\(", source(check))): yield f"no @exercise over {name[1]}"; return
    if said_by_stub(stub) != f"Exercise {number[1]}: yours to write\n" or f"{name[1]}(" not in source(stub) or printed_by(stub) != said_by_stub(stub):
        yield f"no stub that calls {name[1]} and is told that it is yours to write"
    answer = list(itertools.takewhile(lambda c: directives(c).get("code-fold") == "true", answer))
    if not answer: yield f"the solution for {name[1]} isn't folded"
    code = "\n".join(map(source, answer))
    if f"test_fail(lambda: {name[1]}(" not in code or not re.search(r"lambda[^:]*: None", code):
        yield f"it isn't shown that {name[1]} fails where nothing is solved"
    if not re.search(rf"^(if .*: )?{name[1]}\(", code, re.M): yield f"no solution is checked by {name[1]}"

@rule(LESSONS, GOOD[:-4], put(9, md("**1. Sums** (easy, 5 minutes). Add.")),
      put(9, *exercise("easy")[:3], py("#| code-fold: true\ncheck_sum(max)")),
      put(9, *exercise("easy")[:2], py("add = None\ncheck_sum(add)"), exercise("easy")[3]))
def exercises_can_be_checked(nb):
    tasks, cells = [], nb["cells"]
    for i, c in enumerate(cells):
        if c["cell_type"] != "markdown" or not (m := TASK.search(source(c))): continue
        tasks.append(m[1])
        yield from not_in_form(m[0], list(itertools.takewhile(lambda o: o["cell_type"] == "code", cells[i + 1:])))
    if not {"easy", "kernel", "open"} <= {*tasks}: yield f"three exercises are asked for, easy, kernel and open, and there are {tasks}"

# Solutions that still print what the reader should find: a name leaves with its lesson's next change
ANSWERED = ["02_measure", "19_fused_fp8", "24_ladder"]
def solved(*outputs): return exercise("open")[:3] + [py("#| code-fold: true\ncheck_sum(lambda a, b: a + b)", *outputs)]

@rule([p for p in LESSONS if p.parent.name[0] in "12" and p.stem not in ANSWERED], put(9, *solved(printed("{'optimizer'}\n"))),
      put(9, *solved(printed("Exercise 1: right\n"), value(image_png=""))))
def solutions_show_no_result(nb):
    "The site folds a solution's code, and not what it prints"
    cells, first = nb["cells"], next((i for i, c in enumerate(nb["cells"]) if TASK.search(source(c))), len(nb["cells"]))
    for c in of_kind(dict(cells=cells[first:]), "code"):
        if directives(c).get("code-fold") != "true": continue
        said = "".join(s for o in c["outputs"] for s in output_text(o))
        drawn = any(k.startswith("image/") for o in c["outputs"] for k in o.get("data", {}))
        if drawn or re.sub(r"Exercise \d: right\n", "", said): yield f"a solution shows its result: {first_line(c)}"

# --- the notebooks, and the rules themselves ---

@pytest.mark.parametrize("path, name", [(p, n) for p in NBS for n, (_, ps) in RULES.items() if p in ps], ids=lambda o: getattr(o, "stem", o))
def test_notebook(path, name):
    wrong = list(RULES[name][0](read_once(path) | dict(path=path)))
    assert not wrong, f"{path.relative_to(ROOT)} has:\n  " + "\n  ".join(wrong)

@pytest.mark.parametrize("name", RULES)
def test_rule_passes_a_good_notebook(name): assert list(RULES[name][0](dict(cells=GOOD))) == []

@pytest.mark.parametrize("name, cells", BROKEN, ids=lambda o: o if isinstance(o, str) else "")
def test_rule_finds_what_is_broken(name, cells): assert list(RULES[name][0](dict(cells=cells)))

def test_every_rule_is_tried(): assert {name for name, _ in BROKEN} == set(RULES)

def test_there_are_notebooks(): assert LESSONS and LADDER and SOURCE

def test_readme_links_resolve():
    assert not [t for t in targets((ROOT/"README.md").read_text(encoding="utf-8")) if not (ROOT/t).exists()]

@pytest.mark.parametrize("prose, numbers", [
    ("2.43 times as fast, 383 ms and 14.6 GiB", ["2.43", "383", "14.6"]), ("74% or 1.3×, at `700 W`", ["74", "1.3", "700"]),
    ("1,234 K tokens/s, 4.8 TB/s, 60 µs, 3x, 9 M tokens a second", ["1,234", "4.8", "60", "3", "9"]), ("from 24 to 28 dB", ["24", "28"]), ("half: 0.51", ["0.51"]),
    ("It took 3 ms. The claim: 40% to 87%. Let a step spend 60 ms there", ["3"]), ("Below 72 GiB it fits", []),
    ("16 bits, 4 bytes, 64 × 1024 tokens of 32 rows, 10 minutes, 5 steps", []), ("$2.4n$, `x = 2.5`, [that](0.4.ipynb)", []),
    ("PyTorch 2.11, arXiv:2204.02311, 3.6.0, 100%", []), ("```\n2.43 times\n```", [])])
def test_which_numbers_look_measured(prose, numbers): assert [number for number, *_ in measured_numbers(prose)] == numbers

@pytest.mark.parametrize("value, number, scale, there", [
    (2.434, "2.4", 1, True), (2.46, "2.4", 1, False), (.743, "74", .01, True), (383_123, "383", 1e3, True), (692, "700", 1, True),
    (640, "700", 1, False), (.0021, "2", 1e-3, True), (12, "10", 1, False), (1e12, "1", 1e12, True)])
def test_rounded_numbers_are_shown(value, number, scale, there): assert shows([value], number, scale) is there
