"The files around the notebooks agree with them and with each other."
import ast, json, re, runpy
from collections import Counter
from importlib import import_module
import pytest
from nbdev.config import get_config
from packaging.requirements import Requirement
from make_readme import ROOT, make_readme, relink, targets
import build_pages, llm_speedrun
from helpers.cells import LESSONS, NBS, SOURCE, exported, of_kind, parsed, read, source
from helpers.files import read_yaml

def config(): return get_config(path=ROOT)
def lines(key): return config()[key].strip().splitlines()

def test_readme_is_made_from_index():
    index = json.loads((ROOT/"nbs/index.ipynb").read_text(encoding="utf-8"))
    readme = (ROOT/"README.md").read_text(encoding="utf-8")
    assert readme == make_readme(index), "README.md is out of date: run `make readme`"

def cell(kind, source, *outputs): return dict(cell_type=kind, source=source, outputs=list(outputs))
def shown(**data):
    return dict(output_type="display_data", data={k.replace("_", "/"): v for k, v in data.items()})
def readme_of(*cells): return make_readme(dict(cells=cells)).split("-->", 1)[1].lstrip("\n")

def test_readme_links():
    md = "[a](00_a.ipynb#x) ![b](images/b.png) [c](https://c.org/d) [e](#f) [g](../LICENSE) <img src='images/h.png'>"
    assert relink(md) == ("[a](nbs/00_a.ipynb#x) ![b](nbs/images/b.png) [c](https://c.org/d) [e](#f) [g](LICENSE) "
                          "<img src='nbs/images/h.png'>")
    assert relink("```\n[a](b.md)\n```") == "```\n[a](b.md)\n```"
    assert targets(md) == ["00_a.ipynb", "images/b.png", "../LICENSE", "images/h.png"]

def test_readme_cells():
    hidden = cell("code", "#| hide\nimport x", shown(text_plain="1"))
    assert readme_of(cell("markdown", "# T"), hidden) == "# T\n"
    table = shown(text_markdown="|a|", text_plain="<Markdown>")
    assert readme_of(cell("code", "#| echo: false\nshow()", table)) == "|a|\n"
    assert readme_of(cell("code", "1+1", shown(text_plain="2"))) == "```python\n1+1\n```\n\n    2\n"
    picture = shown(image_png="iVBOR", text_plain="<Figure>")
    assert readme_of(cell("code", "#| echo: false\nplot()", picture)) == ""

@pytest.mark.parametrize("script", lines("console_scripts"))
def test_console_scripts_resolve(script):
    name, module, func = re.fullmatch(r"(\w+)=([\w.]+):(\w+)", script).groups()
    assert name == func and callable(getattr(import_module(module), func))

def test_version(): assert llm_speedrun.__version__ == config().version

def test_requirements_are_one_a_line():
    names = {Requirement(o).name for key in ("requirements", "dev_requirements", "hopper_requirements") for o in lines(key)}
    assert {"torch", "fastcore", "nbdev", "pytest", "quack-kernels", "flash-attn-4"} <= names

def test_extras():
    "Kernels for Hopper are pinned and for Linux alone; what limits other packages is no requirement of a run"
    for r in map(Requirement, lines("hopper_requirements")):
        assert re.fullmatch(r"==[\w.]+", str(r.specifier)) and 'sys_platform == "linux"' in str(r.marker), r
    run = {r.name: r for r in map(Requirement, lines("requirements"))}
    for name in ("torch", "fastcore"): assert "<" not in str(run[name].specifier), f"{name} has an upper bound"
    assert "hopper=lines(\"hopper_requirements\")" in (ROOT/"setup.py").read_text(encoding="utf-8")

def test_the_oldest_and_the_newest_torch_are_tested():
    "On the workflow's matrix, the oldest on the oldest Python; the Makefile takes any from the oldest on"
    flow = read_yaml(ROOT/".github/workflows/test.yml")
    rows = flow["jobs"]["test"]["strategy"]["matrix"]["include"]
    oldest = re.search(r"^torch>=([\d.]+)$", config()["requirements"], re.M)
    found = {tuple(map(int, re.match(r"(\d+)\.(\d+)", r["torch"]).groups())) for r in rows}
    assert min(found) == tuple(map(int, oldest[1].split("."))) and len(found) == 2
    assert {r["python"] for r in rows} == {"3.10", "3.11", "3.12", "3.13"} and len(rows) == 5
    assert f"TORCH  ?= torch>={oldest[1]}\n" in (ROOT/"Makefile").read_text(encoding="utf-8")

@pytest.fixture
def metadata(monkeypatch):
    "What setup.py gives to setuptools"
    got = {}
    monkeypatch.setattr("setuptools.setup", lambda **kw: got.update(kw))
    monkeypatch.setattr("setuptools.find_packages", lambda **kw: [])
    runpy.run_path(str(ROOT/"setup.py"))
    return got

def test_the_package_index_shows_no_dead_links(metadata):
    "It has no files beside the text: each of the README's is an address in the repository, a picture's one that shows it"
    text, url = metadata["long_description"], config()["git_url"]
    assert not targets(text)
    readme = targets((ROOT/"README.md").read_text(encoding="utf-8"))
    found = re.findall(rf"{re.escape(url)}/(blob|raw)/main/([^)#\s]+)", text)
    assert len(readme) >= 3 and sorted(path for _, path in found if (ROOT/path).exists()) == sorted(readme)
    for kind, path in found: assert (kind == "raw") == path.endswith((".png", ".svg", ".jpg")), path

def test_the_package_index_knows_its_place(metadata):
    "Addresses, and the Pythons on which the workflow tests"
    assert {*metadata["project_urls"]} == {"Documentation", "Source", "Issues", "Changelog"}
    assert all(u.startswith("https://") for u in metadata["project_urls"].values())
    flow = read_yaml(ROOT/".github/workflows/test.yml")
    tested = {row["python"] for row in flow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    there = {m[1] for c in metadata["classifiers"] if (m := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c))}
    assert there == tested and config()["min_python"] in there

def test_modules_come_from_notebooks():
    for f in (ROOT/"llm_speedrun").rglob("*.py"):
        if f.name in ("__init__.py", "_modidx.py"): continue
        source = re.search(r"^# AUTOGENERATED! .*File to edit: (.+?)\.?$", f.read_text(encoding="utf-8"), re.M)
        assert source and (f.parent/source[1]).exists(), f"{f.name} is exported from no notebook that exists"

def sidebar_pages(contents):
    for o in contents:
        if isinstance(o, str): yield o
        else: yield from sidebar_pages(o["contents"]) if "section" in o else [o["href"]]

def sidebar_notebooks():
    "The sidebar's notebooks, in its order; tests/site/test_site.py looks at its other pages"
    pages = sidebar_pages(read_yaml(ROOT/"nbs/sidebar.yml")["website"]["sidebar"]["contents"])
    return [o for o in pages if o.endswith(".ipynb")]

def test_sidebar_lists_every_notebook():
    pages = sidebar_notebooks()
    notebooks = [f.relative_to(ROOT/"nbs").as_posix() for f in NBS]
    assert sorted(pages) == sorted(notebooks), "nbs/sidebar.yml and nbs/ differ"

def test_where_lessons_lie():
    "Parts and lessons are numbered in reading order, without letters; at most 15 lessons a part"
    parts, paths = Counter(p.parent.name for p in LESSONS), [p.relative_to(ROOT/"nbs").as_posix() for p in LESSONS]
    assert len(parts) == 7 and max(parts.values()) <= 15
    odd = [p for p in paths if not re.fullmatch(r"\d_[a-z_]+/\d\d_\w+\.ipynb", p)]
    assert paths == sorted(paths) and (numbers := [p.stem[:2] for p in LESSONS]) == sorted(numbers)
    twice = [n for n, k in Counter(numbers).items() if k > 1]
    assert not odd and not twice, f"names that aren't a lesson's: {odd}; two lessons with a number: {twice}"
    assert not (stray := {*NBS} - {*LESSONS, *SOURCE, ROOT/"nbs/index.ipynb"}), f"neither a lesson nor source: {stray}"

def test_names_of_notebooks_are_different():
    "Also in different folders, for a record and a link name one by its stem alone"
    assert not [n for n, k in Counter(p.stem for p in NBS).items() if k > 1]

def test_sidebar_is_in_reading_order():
    pages = sidebar_notebooks()
    assert pages[:len(LESSONS) + 1] == ["index.ipynb", *(p.relative_to(ROOT/"nbs").as_posix() for p in LESSONS)]

def test_the_course_lists_every_lesson():
    build_pages.load()
    listed = re.findall(r"^\| \[\d\d [^\]]*\]\(\.\./(\w+/\w+\.ipynb)\) \|", build_pages.written("course.qmd"), re.M)
    assert listed == [p.relative_to(ROOT/"nbs").as_posix() for p in LESSONS], "the tables of the course's page and the lessons differ"

def exports(path):
    "The modules that a notebook exports, as paths without .py"
    return [m.replace(".", "/") for m in re.findall(r"^#\| default_exp ([\w.]+)", "\n".join(map(source, of_kind(read(path), "code"))), re.M)]

def test_source_mirrors_the_package():
    for p in SOURCE: assert exports(p) == [p.relative_to(ROOT/"nbs/source").with_suffix("").as_posix()], p.name

def test_a_module_comes_from_one_notebook():
    assert not [m for m, k in Counter(m for p in NBS for m in exports(p)).items() if k > 1]
    assert max(len(exports(p)) for p in LESSONS) == 1

def exported_lines(path):
    "The lines that a notebook exports, without imports: what its text has to explain"
    def of_cell(c):
        imports = {n for o in ast.walk(parsed(source(c))) if isinstance(o, (ast.Import, ast.ImportFrom)) for n in range(o.lineno, o.end_lineno + 1)}
        return [l for n, l in enumerate(source(c).splitlines(), 1) if l.strip() and not l.startswith("#|") and n not in imports]
    return sum(len(of_cell(c)) for c in of_kind(read(path), "code") if exported(c))

def test_a_lesson_exports_what_it_explains():
    "Some 120 lines are the aim: what a reader need not see is in `nbs/source`"
    most = {p.stem: exported_lines(p) for p in LESSONS}
    assert max(most.values()) <= 145, {k: n for k, n in most.items() if n > 145}

def test_a_lesson_imports_from_those_before_it():
    "And from source, also in what it doesn't export"
    order = {"llm_speedrun." + m.replace("/", "."): i for i, p in enumerate(LESSONS) for m in exports(p)}
    later = [(p.stem, o.module) for i, p in enumerate(LESSONS) for c in of_kind(read(p), "code") for o in ast.walk(parsed(source(c)))
             if isinstance(o, ast.ImportFrom) and order.get(o.module, -1) > i]
    assert not later, f"imports of later lessons: {later}"

def test_site_files_exist():
    for f in read_yaml(ROOT/"nbs/_quarto.yml")["metadata-files"]: assert (ROOT/"nbs"/f).exists(), f
    site = read_yaml(ROOT/"_quarto.yml")
    assert "metadata-files" not in site
    assert list(site["format"]) == ["html"], "each format draws every figure once more"
    web = read_yaml(ROOT/"nbs/nbdev.yml")["website"]
    for k in ("title", "description"): assert web[k] == config()[k], f"{k}: nbs/nbdev.yml and settings.ini differ"
