"""The package's structure: no module imports itself through others, no class and no module outgrows its reader. What is still too large
is listed with its size, and may only shrink; a name leaves its list with the change that brings it under the limit."""
import ast, importlib, importlib.util, re
from collections import defaultdict
import pytest
import llm_speedrun
from make_readme import ROOT

PACKAGE, SITE = ROOT/"llm_speedrun", ROOT/"nbs/site/_build"
METHODS, LINES, NAMES = 20, 500, 700 # the most of a class, of a module, and of what a user imports
LARGE = {} # classes
LONG = {} # modules
CIRCLES = [] # groups of modules that may import each other
FOLDER_CIRCLES = [] # likewise of folders, and of modules in none

def modules(folder):
    return {".".join(p.relative_to(folder).with_suffix("").parts): p for p in sorted(folder.rglob("*.py")) if not p.stem.startswith("_")}

def tree(path): return ast.parse(path.read_text(encoding="utf-8"))

def imports(name, path, known, package=""):
    "The modules of `known` that a module imports, also inside of functions"
    found = set()
    for o in ast.walk(tree(path)):
        if isinstance(o, ast.Import): names = [a.name for a in o.names]
        elif isinstance(o, ast.ImportFrom):
            above = name.split(".")[:-o.level] if o.level else None
            base = ".".join([*above, *filter(None, [o.module])]) if o.level else o.module
            names = [base, *(f"{base}.{a.name}".strip(".") for a in o.names)]
        else: continue
        found |= {n.removeprefix(f"{package}.") for n in names} & known.keys()
    return found - {name}

def graph(folder, package=""):
    known = modules(folder)
    return {name: imports(name, path, known, package) for name, path in known.items()}

def circles(edges): # module -> those that it imports
    "Groups of modules that import each other, each a set"
    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for n in edges[todo.pop()] - seen: seen.add(n); todo.append(n)
        return seen
    far = {n: reached(n) for n in edges}
    return {frozenset({n} | {m for m in far[n] if n in far[m]}) for n in edges if n in far[n]}

def folders(edges): # of modules
    "The edges between their folders; a module in none stands for itself"
    top, found = lambda name: name.partition(".")[0], defaultdict(set)
    for name, others in edges.items(): found[top(name)] |= {top(o) for o in others} - {top(name)}
    return found

def test_no_folder_imports_itself_through_others():
    "What is in `distributed` knows of no run, and what needs runs is above them: a folder is a layer"
    found = circles(folders(graph(PACKAGE, "llm_speedrun")))
    new = [sorted(c) for c in found if not any(c <= known for known in FOLDER_CIRCLES)]
    assert not new, f"these folders import each other: {new}"
    assert all(any(c <= known for c in found) for known in FOLDER_CIRCLES), "a circle is gone: remove it from the list"

def test_circles_of_folders_are_found():
    edges = {"a.x": {"run"}, "a.y": set(), "run": {"a.y"}, "b.x": {"a.x", "b.y"}, "b.y": set()}
    assert not circles(edges) and circles(folders(edges)) == {frozenset({"a", "run"})}

def methods(folder): # -> class -> how many methods it has
    "In its body and patched; classes of the same name count together, whose patches name no module"
    found = defaultdict(set)
    for path in modules(folder).values():
        for o in ast.walk(tree(path)):
            if isinstance(o, ast.ClassDef): found[o.name] |= {(path.stem, f.name) for f in o.body if isinstance(f, ast.FunctionDef)}
            if isinstance(o, ast.FunctionDef) and any("patch" in ast.unparse(d) for d in o.decorator_list) and o.args.args:
                kind = o.args.args[0].annotation
                names = [kind] if isinstance(kind, ast.Name) else kind.elts if isinstance(kind, ast.Tuple) else []
                for n in names: found[n.id].add((path.stem, o.name))
    return {k: len(v) for k, v in found.items()}

def lines(path): # neither blank nor nbdev's mark of a cell
    return sum(bool(line.strip()) and not line.startswith("# %%") for line in path.read_text(encoding="utf-8").splitlines())

@pytest.mark.parametrize("folder, package", [(PACKAGE, "llm_speedrun"), (SITE, "")], ids=["package", "site"])
def test_no_import_is_a_circle(folder, package):
    found = circles(graph(folder, package))
    new = [sorted(c) for c in found if not any(c <= known for known in CIRCLES)]
    assert not new, f"these modules import each other: {new}"

def test_circles_are_found():
    assert circles(dict(a={"b"}, b={"c"}, c={"a"}, d={"a"})) == {frozenset("abc")} and not circles(dict(a={"b"}, b=set()))

def test_classes_are_small():
    large = {k: n for k, n in methods(PACKAGE).items() if n > METHODS}
    assert large.keys() <= LARGE.keys(), f"more than {METHODS} methods: {large}"
    assert all(n <= LARGE[k] for k, n in large.items()), f"they have grown: {large}"

def test_modules_are_short():
    long = {k: n for k, p in modules(PACKAGE).items() if (n := lines(p)) > LINES}
    assert long.keys() <= LONG.keys(), f"more than {LINES} lines: {long}"
    assert all(n <= LONG[k] for k, n in long.items()), f"they have grown: {long}"

def unused(text): # of a module
    "The names that it imports and doesn't use"
    nodes = list(ast.walk(ast.parse(text)))
    found = {(a.asname or a.name).split(".")[0] for o in nodes if isinstance(o, ast.Import | ast.ImportFrom)
             and getattr(o, "module", "") != "__future__" for a in o.names}
    return sorted(found - {o.id for o in nodes if isinstance(o, ast.Name)})

def test_imports_are_used():
    wrong = {name: names for name, path in modules(PACKAGE).items() if (names := unused(path.read_text(encoding="utf-8")))}
    assert not wrong, f"remove what no line of the module uses; what a lesson alone uses, its own cell imports: {wrong}"

def test_unused_imports_are_found():
    assert unused("import os, torch.nn as nn\nfrom a import b, c as d\nos.path, b") == ["d", "nn"]

def public(folder): # -> how many names its modules' `__all__` have
    lists = (o.value.elts for p in modules(folder).values() for o in tree(p).body if isinstance(o, ast.Assign) and getattr(o.targets[0], "id", "") == "__all__")
    return sum(map(len, lists))

def test_public_names_are_few():
    "A name that only other modules of the package use is exported by `#| exporti`, which leaves it out of `__all__`"
    assert 300 < public(PACKAGE) <= NAMES

def test_what_shrank_leaves_the_lists():
    found, sizes = methods(PACKAGE), {k: lines(p) for k, p in modules(PACKAGE).items()}
    assert all(found[k] > METHODS for k in LARGE) and all(sizes[k] > LINES for k in LONG), (found, sizes)

def test_only_notebooks_import_the_course():
    "What a lesson draws, shows and checks is no part of the product"
    assert not [name for name, found in graph(PACKAGE, "llm_speedrun").items() if "course" in found]

def test_io_utils_imports_nothing_of_the_package(): assert not graph(PACKAGE, "llm_speedrun")["io_utils"]

def class_assignments(source):
    "Lines of Python that assign an object's class"
    nodes = [o for o in ast.walk(ast.parse(source)) if isinstance(o, (ast.Attribute, ast.Call))]
    stored = [o.lineno for o in nodes if isinstance(o, ast.Attribute) and o.attr == "__class__" and isinstance(o.ctx, ast.Store)]
    by_name = [o.lineno for o in nodes if isinstance(o, ast.Call) and getattr(o.func, "id", getattr(o.func, "attr", "")) in ("setattr", "__setattr__")
               and any(isinstance(a, ast.Constant) and a.value == "__class__" for a in o.args)]
    return sorted(stored + by_name)

def test_no_class_is_exchanged():
    "No object gets another class: it would have attributes that no `__init__` has set"
    found = {k: n for k, p in modules(PACKAGE).items() if (n := class_assignments(p.read_text(encoding="utf-8")))}
    assert not found, f"these lines assign `__class__`: {found}"

@pytest.mark.parametrize("source, n", [("a.__class__ = B", 1), ("a.x, b.__class__ = 1, B", 1), ("setattr(a, '__class__', B)", 1),
                                       ("object.__setattr__(a, '__class__', B)", 1), ("x = a.__class__", 0)])
def test_assignments_of_a_class_are_found(source, n): assert len(class_assignments(source)) == n

def imported_names(name, path): # of a module; also inside of functions
    "Pairs of a module of the package and a name that is imported from it"
    for o in ast.walk(tree(path)):
        if not isinstance(o, ast.ImportFrom): continue
        above = ["llm_speedrun", *name.split(".")[:-1]]
        module = ".".join([*above[:len(above) - o.level + 1], *filter(None, [o.module])]) if o.level else o.module
        if module.split(".")[0] == "llm_speedrun": yield from ((module, a.name) for a in o.names)

@pytest.mark.parametrize("name", modules(PACKAGE))
def test_what_is_imported_exists(name):
    "An import inside of a function fails only when it is called: here it is looked up"
    for module, what in set(imported_names(name, PACKAGE/(name.replace(".", "/") + ".py"))):
        if module == "llm_speedrun.compat": continue # its names are another test's, and may be missing here
        try: found = hasattr(importlib.import_module(module), what)
        except ModuleNotFoundError: found = False
        assert found or importlib.util.find_spec(f"{module}.{what}"), f"{name} imports {what} from {module}, which has no such name"

def test_module_docstrings_are_whole_sentences():
    "nbdev takes the first line of what follows `>` alone: a second line would be lost"
    docs = {p: ast.get_docstring(ast.parse(p.read_text(encoding="utf-8"))) for p in (ROOT/"llm_speedrun").rglob("*.py") if p.name != "_modidx.py"}
    assert not [p.name for p, d in docs.items() if d and d.rstrip()[-1] not in ".?"]

# --- the map ---

def map_rows(path):
    "What a page's table says of where things are"
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", path.read_text(encoding="utf-8").split("| you look for")[1].split("\n\n")[0], re.M)[1:]

def test_one_map_in_three_places():
    "The README of the source, the page for contributors, and `help(llm_speedrun)`"
    rows = map_rows(ROOT/"nbs/source/README.md")
    assert len(rows) > 8 and rows == map_rows(ROOT/"nbs/site/reference/contributing.qmd")
    told = " ".join(llm_speedrun.__doc__.split())
    for what, where in rows: assert f"- {what}: {where.replace('`', '')}" in told, what

def test_the_map_names_what_is_there():
    "Files, and in some file named beside them each class, function and method"
    for what, where in map_rows(ROOT/"nbs/source/README.md"):
        names = re.findall(r"`([^`]+)`", where)
        files = [PACKAGE/n for n in names if "/" in n or n.endswith(".py")]
        assert files and all(f.exists() for f in files), f"{what}: {files}"
        code = "".join(f.read_text(encoding="utf-8") for n in PACKAGE.rglob("*.py") for f in [n] if n.name != "_modidx.py")
        for n in names:
            if "/" in n or n.endswith(".py"): continue
            last = n.rpartition(".")[2]
            assert re.search(rf"^\s*(def|class) {last}\b|^    {last}: ", code, re.M), f"{what}: there is no {n}"

def test_each_folder_says_what_it_holds_and_imports():
    for folder in {p.parent for p in PACKAGE.rglob("*.py")} - {PACKAGE}:
        doc = ast.get_docstring(tree(folder/"__init__.py")) or ""
        assert "Imports" in doc, f"{folder.name}/__init__.py"
