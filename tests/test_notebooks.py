"What every notebook must keep to, and a broken notebook for each rule to show that the rule can fail."
import ast, json, re
import pytest
from make_readme import ROOT, targets, text

NBS = sorted((ROOT/"nbs").glob("*.ipynb"))
RULES = {}
def rule(f): RULES[f.__name__] = f; return f

def source(c): return text(c["source"])
def of_kind(nb, kind): return [c for c in nb["cells"] if c["cell_type"] == kind]
def outputs(nb): return [o for c in of_kind(nb, "code") for o in c["outputs"]]
def first_line(c): return (source(c).splitlines() or [""])[0]

# Each rule takes a parsed notebook and yields what is wrong with it.

@rule
def title_and_one_line(nb):
    c = nb["cells"][0]
    if c["cell_type"] != "markdown" or not re.match(r"# \S.*\n\n?> \S", source(c)):
        yield "the first cell is not `# Title` and then a `> ` line"

@rule
def no_errors(nb):
    for o in outputs(nb):
        if o["output_type"] == "error": yield f"an error in its outputs: {o['ename']}: {o['evalue']}"

OPTION = re.compile(r"    \w+: \w+ = .* # ")

@rule
def short_cells(nb):
    for c in of_kind(nb, "code"):
        n = sum(not OPTION.match(line) for line in source(c).splitlines())    # a list of options may be long
        if n > 30: yield f"a cell of {n} lines, and 30 is the most: {first_line(c)}"

@rule
def short_lines(nb):
    for line in (o for c in of_kind(nb, "code") for o in source(c).splitlines()):
        if len(line) > 110 and not line.startswith("#| fig-alt"): yield f"a line of {len(line)} characters, and 110 is the most: {line}"

ABSOLUTE = re.compile(r"(?<![\w.~/])/(?:work|workspace|root|home|Users|tmp|mnt)\b[^\s'\"]*"
                      r"|(?<![\w.])/\S*site-packages/\S*")

def output_text(o):
    "The text of one output, pictures left out."
    yield text(o.get("text", ""))
    for kind, v in o.get("data", {}).items():
        if kind.startswith("text/"): yield text(v)

@rule
def no_absolute_paths(nb):
    for s in [source(c) for c in nb["cells"]] + [s for o in outputs(nb) for s in output_text(o)]:
        for m in ABSOLUTE.finditer(s): yield f"a path of the machine it ran on: {m[0]}"

# A traceback, also a printed one; a CUDA error that was caught; a progress bar that stopped on its way; a result that says so
STOPPED = re.compile(r"Traceback \(most recent call last\)|KeyboardInterrupt|CUDA error|Segmentation fault"
                     r"|(?<!\d)\d{1,2}%\||['\"]interrupted['\"]: ?[Tt]rue")

@rule
def no_stopped_runs(nb):
    for s in (s for o in outputs(nb) for s in output_text(o)):
        for m in STOPPED.finditer(s): yield f"an output of a run that failed or was interrupted: {m[0]}"

@rule
def links_resolve(nb):
    md = [source(c) for c in of_kind(nb, "markdown")]
    md += [text(o["data"]["text/markdown"]) for o in outputs(nb) if "text/markdown" in o.get("data", {})]
    for t in (t for s in md for t in targets(s)):
        if not (ROOT/"nbs"/t).exists(): yield f"a link to {t}, which is not there"

@rule
def exports_have_docstrings(nb):
    for c in of_kind(nb, "code"):
        if not re.search(r"^#\|\s*exports?\b", source(c), re.M): continue
        for o in ast.parse(re.sub(r"^\s*[%!].*$", "", source(c), flags=re.M)).body:
            if not isinstance(o, (ast.FunctionDef, ast.ClassDef)) or o.name.startswith("_"): continue
            if not ast.get_docstring(o): yield f"`{o.name}` is exported and has no docstring"

@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("path", NBS, ids=lambda p: p.stem)
def test_notebook(path, name):
    wrong = list(RULES[name](json.loads(path.read_text(encoding="utf-8"))))
    assert not wrong, f"nbs/{path.name} has:\n  " + "\n  ".join(wrong)

def test_there_are_notebooks(): assert NBS

def test_readme_links_resolve():
    missing = [t for t in targets((ROOT/"README.md").read_text(encoding="utf-8")) if not (ROOT/t).exists()]
    assert not missing

def md(source): return dict(cell_type="markdown", source=source)
def py(source, *outputs): return dict(cell_type="code", source=source, outputs=list(outputs))
def printed(text): return dict(output_type="stream", name="stdout", text=text)
GOOD = [md("# A title\n\n> What it is."), md("See [the licence](../LICENSE) and `[this](nowhere.md)`."),
        py("#| export\ndef double(x):\n    'Twice `x`.'\n    return 2*x"),
        py("double(2)", printed("4 tokens/work, runs/home\n100%|##| 2/2 {'interrupted': False}"))]
BROKEN = [
    ("title_and_one_line", md("# A title\n\nWhat it is."), 0),
    ("title_and_one_line", py("1"), 0),
    ("no_errors", py("1/0", dict(output_type="error", ename="ZeroDivisionError", evalue="by zero")), 2),
    ("short_cells", py("\n".join(["x = 1"] * 31)), 2),
    ("short_lines", py("x = '" + "y" * 110 + "'"), 2),
    ("no_absolute_paths", py("open('/tmp/a')"), 2),
    ("no_absolute_paths", md("It is in /home/me/data."), 2),
    ("no_absolute_paths", py("1", printed("/opt/env/site-packages/torch/x.py:1: UserWarning")), 2),
    ("no_stopped_runs", py("1", printed("Traceback (most recent call last):\n  ...")), 2),
    ("no_stopped_runs", py("1", printed("training:  45%|####5     | 45/100")), 2),
    ("no_stopped_runs", py("1", printed("{'steps': 3, 'interrupted': True}")), 2),
    ("links_resolve", md("[here](nowhere.ipynb)"), 2),
    ("links_resolve", md("![a chart](images/nowhere.png)"), 2),
    ("exports_have_docstrings", py("#| export\ndef half(x): return x/2"), 2),
    ("exports_have_docstrings", py("#|exports\nclass Half: pass"), 2)]

@pytest.mark.parametrize("name", RULES)
def test_rule_passes_a_good_notebook(name): assert list(RULES[name](dict(cells=GOOD))) == []

@pytest.mark.parametrize("name, cell, at", BROKEN, ids=lambda o: o if isinstance(o, str) else "")
def test_rule_finds_what_is_broken(name, cell, at):
    assert list(RULES[name](dict(cells=GOOD[:at] + [cell] + GOOD[at:])))

def test_every_rule_is_tried(): assert {name for name, _, _ in BROKEN} == set(RULES)
