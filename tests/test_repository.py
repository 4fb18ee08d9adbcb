"The files around the notebooks agree with them and with each other."
import json, re, runpy
from collections import Counter
from importlib import import_module
import pytest
from nbdev.config import get_config
from packaging.requirements import Requirement
from make_readme import ROOT, make_readme, relink, targets
import build_pages, llm_speedrun
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
    assert relink(md) == ("[a](nbs/00_a.ipynb#x) ![b](nbs/site/images/b.png) [c](https://c.org/d) [e](#f) [g](LICENSE) "
                          "<img src='nbs/site/images/h.png'>")
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
    notebooks = [f.name for f in (ROOT/"nbs").glob("*.ipynb")]
    assert sorted(pages) == sorted(notebooks), "nbs/sidebar.yml and nbs/ differ"

def numbers(names):
    "Number and letter of each notebook: a part with more than ten lessons has letters"
    return [n.partition("_")[0] for n in names if n != "index.ipynb"]

def test_one_number_a_notebook():
    names = [f.name for f in (ROOT/"nbs").glob("*.ipynb")]
    odd = [n for n in names if not re.fullmatch(r"\d\d[a-z]?_\w+\.ipynb|index\.ipynb", n)]
    twice = [n for n, k in Counter(numbers(names)).items() if k > 1]
    assert not odd and not twice, f"without a number: {odd}; two notebooks with a number: {twice}"

def test_sidebar_is_in_reading_order():
    pages = sidebar_notebooks()
    assert pages[0] == "index.ipynb" and numbers(pages) == sorted(numbers(pages)), "nbs/sidebar.yml isn't in numeric order"

def test_the_course_lists_every_notebook():
    build_pages.load()
    listed = re.findall(r"^\| \[\w[^\]]*\]\((\w+\.ipynb)\) \|", build_pages.written("course.qmd"), re.M)
    assert listed == sidebar_notebooks()[1:], "the tables of the course's page and the sidebar differ"

def test_plug_ins_come_with_the_source():
    "Files in examples/ are in the source distribution, a page names them, and tests import them"
    assert "graft examples" in (ROOT/"MANIFEST.in").read_text(encoding="utf-8").splitlines()
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT/"nbs").rglob("*.qmd"))
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT/"tests").rglob("test_*.py"))
    assert (files := [*(ROOT/"examples").glob("*.py")])
    for f in files: assert f"examples/{f.name}" in pages and f'"{f.stem}"' in tests, f.name

PARTS = {0: "", 1: "rungs", 2: "rungs", 3: "train", 4: "recipes", 5: "rungs", 6: ""}    # tens -> folder of the modules
ABOUT_ALL = {"24_ladder", "cli"}    # stand among rungs or recipes and are none
TRAINER = {"comparison"}    # likewise, and belong to the trainer
DISTRIBUTED = {"60_world", "spawn", "liveness", "61_collectives", "sharding"}    # what several processes need below the rungs
CHECKPOINT = {"41_checkpoints": "checkpoint.format", "save": "checkpoint.save", "65_sharded_checkpoints": "checkpoint.save_sharded",
              "load": "checkpoint.load", "state": "checkpoint.state"}    # lessons of two parts make one package
BENCHMARKS = {"38_peers": "benchmarks.peers", "58_race": "benchmarks.race", "clock": "benchmarks.clock", "adapters": "benchmarks.adapters", "race_report": "benchmarks.race_report"}    # likewise

# A module is named after what it holds, its notebook after what the lesson is about
NAMED = {"io_utils": "io_utils", "31_flash4": "rungs.flash4", "32_fewer_bytes": "rungs.tied_embedding",
         "33_fewer_passes": "rungs.memory_traffic", "liveness": "distributed.liveness", "sharding": "sharding"}

def test_a_module_is_in_the_folder_of_its_part():
    for f in sorted((ROOT/"nbs").glob("[0-9]*.ipynb")):
        if not (found := re.search(r"#\| default_exp ([\w.]+)", f.read_text(encoding="utf-8"))): continue    # it exports nothing
        module = found[1]
        folder = "" if f.stem in ABOUT_ALL else "train" if f.stem in TRAINER else "distributed" if f.stem in DISTRIBUTED else PARTS[int(f.name[0])]
        want = ".".join(filter(None, [folder, f.stem.partition("_")[2]]))
        assert module == (CHECKPOINT | BENCHMARKS | NAMED).get(f.stem, want), f"{f.name} exports {module}"

def test_site_files_exist():
    for f in read_yaml(ROOT/"nbs/_quarto.yml")["metadata-files"]: assert (ROOT/"nbs"/f).exists(), f
    site = read_yaml(ROOT/"_quarto.yml")
    assert "metadata-files" not in site
    assert list(site["format"]) == ["html"], "each format draws every figure once more"
    web = read_yaml(ROOT/"nbs/nbdev.yml")["website"]
    for k in ("title", "description"): assert web[k] == config()[k], f"{k}: nbs/nbdev.yml and settings.ini differ"
