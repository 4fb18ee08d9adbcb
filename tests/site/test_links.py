"""Every link of the site lands: those that are written, those that a name in backticks becomes, those to pictures and files.
Tested over the pages as Quarto gets them, and over the built site where there is one."""
import ast, json, re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit
import pytest
from nbdev.config import get_config
from helpers.cells import LESSONS, NUMBERED, cells, of_kind, read, source
from helpers.files import read_yaml
from make_readme import ROOT, TARGET, text
from llm_speedrun._modidx import d as INDEX
import finish, procs

def site_url(): return "{doc_host}{doc_baseurl}/".format(**get_config(path=ROOT).d)

def from_the_top(target):
    "A link that names the site's host or its folder there, as one that begins at the top of the site"
    folder = urlsplit(site_url()).path
    return re.sub(rf"^({re.escape(site_url())}|{folder})", "/", target)

def joined(page, path):
    "Where `path` leads from `page`, both seen from the top of the site"
    return normpath(path.lstrip("/") if path.startswith("/") else f"{Path(page).parent.as_posix()}/{path}")

# --- pages as Quarto gets them ---

def markdown(path):
    "The markdown of a page in the order of the page, with what its cells show as markdown"
    def parts():
        for c in cells(path):
            if c["cell_type"] == "markdown": yield source(c)
            for o in c.get("outputs", []): yield text(o.get("data", {}).get("text/markdown", ""))
    if path.suffix == ".ipynb": return "\n\n".join(parts())
    return re.sub(r"\A---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.S)

def links(md):
    "Where the links and pictures of markdown point, what is code left out"
    without_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", procs.without_fences(md), flags=re.S)
    return [m[2] for m in TARGET.finditer(without_code)]

def marks(md):
    "The anchors of markdown: those of its headings, those that are written as {#name}, those of its HTML"
    raw_html = "".join(m[0] for m in re.finditer(r"^```\{=html\}.*?^```", md, re.M | re.S))
    prose = procs.without_fences(md)
    return {"", *procs.headings(md), *re.findall(r"\{[^}\n]*#([\w.:-]+)[^}\n]*\}", prose),
            *re.findall(r"\bid=[\"']([^\"']+)", prose + raw_html)}

class Pages:
    "The pages of a folder, their anchors, and whether a link of them lands"
    def __init__(self, folder):
        self.folder = folder
        self.paths = [p for p in sorted(folder.rglob("*")) if p.suffix in (".ipynb", ".qmd", ".md")
                      and not any(part[0] in "._" for part in p.relative_to(folder).parts)]
        self.marks = {self.address(p): marks(markdown(p)) for p in self.paths}
        self.built = {self.built_name(a): a for a in self.marks}

    def address(self, path): return path.relative_to(self.folder).as_posix()

    def built_name(self, address):
        "The address of the page that is built from this one: nbdev drops a notebook's number"
        return re.sub(r"(^|/)\d\d[a-z]?_", r"\1", re.sub(r"\.\w+$", ".html", address))

    def lands(self, page, target):
        "Whether `target`, as it stands in `page`, is there; what leads to another site is not looked at"
        inside, where = from_the_top(target) != target, urlsplit(from_the_top(target))
        if where.scheme or where.netloc: return True
        path = unquote(where.path)
        if path in ("", "./"): to = page
        else: to = joined(page, path)
        if inside and to in (".", ""): to = "index.ipynb"
        if inside or to not in self.marks: to = self.built.get(to, to)
        if to in self.marks: return unquote(where.fragment) in self.marks[to]
        return inside and to in MADE_BY_QUARTO or not where.fragment and (self.folder/to).is_file()

    def missed(self):
        "The links that don't land, as pairs of a page and a target"
        return [(self.address(p), t) for p in self.paths for t in links(markdown(p)) if not self.lands(self.address(p), t)]

MADE_BY_QUARTO = "llms.txt", "sitemap.xml"

@pytest.fixture(scope="session")
def pages(processed): return Pages(processed)

def test_every_link_lands(pages):
    assert len(pages.paths) > len(NUMBERED) and sum(len(links(markdown(p))) for p in pages.paths) > 500
    assert not pages.missed()

def strings(o):
    "All texts in a YAML document"
    if isinstance(o, str): yield o
    for v in o.values() if isinstance(o, dict) else o if isinstance(o, list) else (): yield from strings(v)

def test_every_link_of_the_frame_lands(pages):
    frame = [read_yaml(p) for p in (ROOT/"_quarto.yml", ROOT/"nbs/sidebar.yml")]
    texts = [s for o in frame for s in strings(o["website"])]
    found = [t for s in texts for t in ([s] if re.fullmatch(r"[\w/]+\.(ipynb|qmd)", s) else links(s))]
    assert len(found) > len(NUMBERED) and [t for t in found if not pages.lands("index.ipynb", t)] == []

# --- definitions ---

def page_of(url):
    "The notebook that is built as the page of `url`"
    return next(o for p in NUMBERED if finish.address(o := p.relative_to(ROOT/"nbs").as_posix()) == url)

@pytest.mark.parametrize("module", INDEX["syms"])
def test_each_name_of_the_index_has_its_anchor(pages, module):
    "nbdev's index is what its own links, and the pages made from it, go by"
    for name, (address, _) in INDEX["syms"][module].items():
        url, anchor = address.split("#")
        assert anchor in pages.marks[page_of(url)], name

@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_an_anchor_stands_right_before_its_definition(processed, path):
    site = read(processed/path.relative_to(ROOT/"nbs"))
    md = "\n\n".join(map(source, of_kind(site, "markdown")))
    every = Counter([*re.findall(r'id="([^"]+)"', md), *procs.headings(md)])
    assert not [a for a, n in every.items() if n > 1], "two anchors of one name"
    for before, c in zip(site["cells"], site["cells"][1:]):
        names = [d.name for d in procs.lessons()[path.stem].definitions.get(c.get("id"), [])]
        found = re.findall(r'id="([^"]+)"', source(before))
        assert {procs.anchors(path.stem)[n][0] for n in names} <= set(found)

@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_each_public_definition_has_its_signature_and_source(processed, path):
    lesson = procs.lessons()[path.stem]
    site = "".join(map(source, of_kind(read(processed/path.relative_to(ROOT/"nbs")), "markdown")))
    for name in lesson.names:
        if "." in name or name.startswith("_"): continue
        file, line = re.search(rf'<dt><a href="[^"]*/blob/main/([^"#]+)#L(\d+)">source</a> <code>{name}\(', site).groups()
        code = (ROOT/file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"(async )?(def|class) {name}\b", code), code

EXPORTED = '''#| export
@kernel_op
def f(x, y, # two, `n` <= 8 of *each*
      # in
      # GiB
      size=3,
      *, deep: bool=False, **more): # <names>
    """a * b of <|x|>, `c`"""
'''
def test_a_table_of_parameters():
    d, = procs.defined(EXPORTED)
    assert [([str(p) for p in group], said) for group, said in procs.described(d)] == [
        (["x", "y"], "two, `n` <= 8 of *each*"), (["size=3"], "in GiB"), (["deep: bool=False", "**more"], "<names>")]
    said = "two, <code>n</code> &lt;= 8 of *each*"
    assert f"<td><code>x, y</code></td><td>{said}</td>" in procs.parameter_table(d)
    assert procs.html(ast.get_docstring(d.node)) == "a * b of &lt;|x|&gt;, <code>c</code>"

def test_parameters_of_classes():
    names = lambda code: [str(p) for p in procs.parameters(next(procs.defined(code)).node)]
    assert names("class A:\n    def __init__(self, a, b=1): pass") == ["a", "b=1"]
    assert names("@dataclass(frozen=True)\nclass A:\n    a: int\n    b: str = ''\n    def f(self): pass") == ["a: int", "b: str=''"]
    assert names("class A(B):\n    x: int = 3") == []
    code = "@patch\ndef f(self: A): pass\nclass B:\n    def g(self): pass"
    assert [d.name for d in procs.defined(code)] == ["A.f", "B", "B.g"]

# --- names in the text ---

@pytest.mark.parametrize("stem, said, linked", [
    ("05_rungs", "a `Run`, `build()`", "a [`Run`](#Run), [`build()`](#build)"),
    ("05_rungs", "`by_kind`", "[`by_kind`](03_roofline.ipynb#by_kind)"),
    ("05_rungs", "`roofline.Ceilings`", "[`roofline.Ceilings`](03_roofline.ipynb#Ceilings)"),
    ("24_ladder", "the rung `flash`", "the rung [`flash`](12_flash.ipynb#flash)"),
    ("45_doctor", "`speedrun_train`", "[`speedrun_train`](../source/cli.ipynb#speedrun_train)"),
    ("45_doctor", "makes a `Trainer`", "makes a [`Trainer`](../source/train/trainer.ipynb#Trainer)"),
    ("70_generate", "`evict`", "[`evict`](#Generator.evict)"),
    ("trainer", "`Trainer.finish`", "[`Trainer.finish`](#Trainer.finish)"),
    ("prepare_data", "`in_order`", "[`in_order`](encoder_pool.ipynb#in_order)"),
    ("16_fused_ops", "`swiglu`", "[`swiglu`](#def-swiglu)"),    # a heading has its name
    ("10_tf32", "reached in notebook 03, not in 99", "reached in [notebook 03](../1_start/03_roofline.ipynb), not in 99")])
def test_a_name_is_linked(pages, stem, said, linked):
    assert procs.linked(procs.lessons()[stem], said) == linked
    assert all(pages.lands(f"{procs.lessons()[stem].path}.ipynb", t) for t in links(linked))

@pytest.mark.parametrize("stem, said", [
    ("22_checkpointing", "groups of `size` alone"), ("40_trainer", "with `deterministic` PyTorch is asked"),    # options
    ("24_ladder", "the columns `ratio` and `predicted`"),    # of the records
    ("12_flash", "FlashAttention-2 (`flash`)"), ("22_checkpointing", "what `checkpoint` was given"),    # PyTorch's
    ("17_chunked_ce", "`checkpoint` runs a function"), ("23_optim", "PyTorch's `load_state_dict`"),
    ("72_export", "`transformers`' `from_pretrained`"),
    ("02_measure", "Write `spread` of `tensors`"), ("70_generate", "have a `part` of the probability"),    # the reader's
    ("20_compile", "`ours` has our kernels"),    # a row of a table
    ("44_metrics", "with `step` and whatever"),
    ("75_claims", "as in [`fp16`](2_ladder/11_amp.ipynb)"), ("05_rungs", "## A `Run`"), ("05_rungs", "``a `Run` ``"),
    ("05_rungs", "```python\n`Run`\n```")])
def test_a_name_is_no_link(stem, said): assert procs.linked(procs.lessons()[stem], said) == said

@pytest.mark.parametrize("heading, slug", [
    ("How fast is it, and how fast should it be?", "how-fast-is-it-and-how-fast-should-it-be"),
    ("2. Slope × flat", "slope-flat"), ("3", "section"), ("The `build` of [a run](x.ipynb)", "the-build-of-a-run"),
    ("torchao's *own* re_do 1.5-fold", "torchaos-own-re_do-1.5-fold")])
def test_slugs_are_pandocs(heading, slug): assert procs.slug(heading) == slug

def test_headings():
    assert procs.headings("# A b\n\n```\n# no\n```\n\n## A b\n## C {#d .e}\n## F {.g}") == ["a-b", "a-b-1", "d", "f"]

# --- the box on top of a lesson ---

@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_begins_with_its_facts(processed, path):
    front, box = map(source, cells(processed/path.relative_to(ROOT/"nbs"))[:2])
    assert front.startswith("---") and box.startswith("::: {.lesson-facts}") and f"/nbs/{path.relative_to(ROOT/'nbs').as_posix()})" in box
    assert links(box) and "None" not in box and "nan" not in box

def test_minutes_are_on_the_page_of_the_course(pages):
    "Counted by one function for both"
    page = markdown(pages.folder/"site/course.qmd")
    for o in procs.lessons().values():
        if o.number >= 0: assert re.search(rf"\]\(\.\./{o.path}\.ipynb\) \|.*\| {procs.minutes(o.cells)} \|", page), o.stem

def test_facts_of_a_rung():
    lesson = procs.lessons()["10_tf32"]
    record, = procs.rung_rows(lesson)
    assert f"{record['ratio']:.2f}×" not in procs.box(lesson), "the reader guesses first"
    assert procs.before(lesson) == ["02_measure", "03_roofline", "05_rungs"], "as its opening says"
    assert procs.before(procs.lessons()["05_rungs"]) == ["04_model"], "as it imports"
    assert "23_optim" in procs.before(procs.lessons()["24_ladder"]), "the end of the ladder"
    for o in procs.lessons().values(): assert all(procs.lessons()[s].number < o.number for s in procs.before(o)), o.stem
    over = lambda before, *rungs: procs.added(dict(before=before, rung=rungs[-1], rungs=rungs))
    assert over("fp32", "tf32", "flash:backend=cudnn", "fp8") == "`tf32` to `fp8`"
    assert over("flash", "flash", "fp8") == "`fp8`"
    assert procs.rung_capability("fp8_activations") == (8, 9) and procs.rung_capability("compile") == (7, 0)
    assert not procs.runs_on_a_t4(lesson), "a T4 has no TF32"
    assert procs.runs_on_a_t4(procs.lessons()["batches"])

# --- the built site ---

class Page(HTMLParser):
    "The anchors of a built page, and where its links, pictures, styles and scripts point"
    def __init__(self, html):
        super().__init__()
        self.marks, self.targets = {""}, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.marks |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        self.targets += [attrs[k] for k in ("href", "src") if attrs.get(k) and tag in ("a", "img", "link", "script")]

def missed(site):
    "The links of a built site that don't land, as pairs of a page and a target"
    built = {p.relative_to(site).as_posix(): Page(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")
             if "site_libs" not in p.parts}
    def lands(page, target):
        where = urlsplit(from_the_top(target))
        if where.scheme or where.netloc: return True
        path = unquote(where.path)
        to = joined(page, path) if path else page
        if (site/to).is_dir(): to = normpath(f"{to}/index.html")
        if to in built: return unquote(where.fragment) in built[to].marks
        return (site/to).is_file()
    return [(name, t) for name, page in built.items() for t in page.targets if not lands(name, t)]

def test_every_link_of_the_built_site_lands(site): assert not missed(site)

# --- what is broken is found ---

@pytest.mark.parametrize("link", ["#nowhere", "b.ipynb", "a.ipynb#nowhere", "images/no.png", "/sub/d.qmd", "../a.ipynb",
                                  "a.html#nowhere", site_url() + "b.html", site_url() + "a.html#no"])
def test_a_broken_link_is_found(tmp_path, link):
    (tmp_path/"sub").mkdir()
    page = "---\ntitle: C\n---\n[](../a.ipynb#a-b) [](/a.ipynb#f) [](c.qmd#x)\n\n::: {#x}\n:::"
    (tmp_path/"sub/c.qmd").write_text(page, encoding="utf-8")
    said = ["# A b", f"[x]({link}) [](#a-b) [](sub/c.qmd) `[no](no)`", '```{=html}\n<span id="f"></span>\n```', "```\n[no](no)\n```"]
    nb = dict(cells=[dict(cell_type="markdown", source=s) for s in said])
    (tmp_path/"a.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    assert Pages(tmp_path).missed() == [("a.ipynb", link)]

@pytest.mark.parametrize("tag", ["<a href='#nowhere'></a>", "<a href='b.html'></a>", "<a href='sub/index.html#no'></a>",
                                 "<img src='no.png'>", "<script src='/no.js'></script>", "<link href='no.css'>",
                                 "<a href='/llm_speedrun/sub/#no'></a>"])
def test_a_broken_link_of_the_built_site_is_found(tmp_path, tag):
    (tmp_path/"sub").mkdir()
    (tmp_path/"sub/index.html").write_text("<h2 id=x></h2><a href='../a.html#y'></a>", encoding="utf-8")
    page = f"<p id=y></p><a href='sub/#x'></a><a href='https://example.org'></a>{tag}"
    (tmp_path/"a.html").write_text(page, encoding="utf-8")
    assert [page for page, _ in missed(tmp_path)] == ["a.html"]

def test_the_card_lets_the_reader_guess():
    "A lesson that asks for a guess doesn't begin with the answer"
    found = {stem: procs.gains(lesson) for stem, lesson in procs.lessons().items()}
    asked = {stem for stem in found if any("my_guess" in s for s in procs.texts(procs.lessons()[stem], "code"))}
    assert len(asked) > 9 and "you guess first" in found["10_tf32"]
    assert not [s for s in asked if "× the speed" in found[s] or "×** the speed" in found[s]]
