"""The site's search finds what readers ask for: its own script, run by Node, over the index of the built site, and over one that is made
of the pages as Quarto gets them, which needs no Quarto. tests/site/test_site.py types into the real page."""
import json, re, shutil, subprocess
import pytest, yaml
import finish
from helpers.cells import cells, source
from make_readme import ROOT
from helpers.timeouts import TIMEOUT

# What readers type, and the pages of which one must be among the first three
QUESTIONS = {
    "install": "site/train/index", "multi gpu": "site/train/several_gpus", "gradient accumulation": "site/train/memory",
    "how much memory does a 1b model need": "site/train/memory", "lora fine-tune": "site/reference/not_here",
    "out of memory": "site/train/memory", "fp8 slower": "site/train/fp8", "resume": "site/train/resume", "bf16 on V100": "site/gpus",
    "how fast should a 4090 be": "site/gpus", "loss is nan": "site/train/diverge", "export to llama.cpp": "site/train/export",
    "several gpus": "site/train/several_gpus", "which part is slow": "site/train/slow", "my own text": "site/train/own_text",
    "compile slow": "site/train/compile", "spot machine": "site/train/spot", "what does a run cost": "site/train/cost",
    "compare with nanogpt": "site/compare", "what is MFU": "site/reference/glossary", "gpu waits for data": "site/train/loader",
    "write a triton kernel": "2_ladder/triton", "cite": "site/reference/cite", "all lessons": "site/course", "rlhf": "site/reference/not_here",
    "learning rate": "site/train/recipe", "flash attention": "2_ladder/flash", "slurm": "6_many_gpus/cluster", "hugging face": "site/train/export",
    "windows": "site/reference/not_here", "use the kernels in my model": "site/kernels", "gradient checkpointing": "2_ladder/checkpointing",
    "tokenize my data": "site/train/own_text", "evaluate on hellaswag": "7_using_a_model/evals", "command line flags": "site/reference/options"}

def asked(index, queries):
    "Query -> the pages that it finds, in order"
    node = shutil.which("node") or pytest.skip("Node isn't installed")
    p = subprocess.run([node, ROOT/"tests/site/search.js", ROOT/"nbs/site/theme/search.html", index], input=json.dumps(list(queries)), text=True,
                       capture_output=True, encoding="utf-8", timeout=TIMEOUT)
    assert p.returncode == 0, p.stderr
    return json.loads(p.stdout)

def missed(found): return {q: found[q][:6] for q, page in QUESTIONS.items() if page not in found[q][:3]}

def test_the_built_site_answers(site): assert not missed(asked(site/"search.json", QUESTIONS))

# --- without Quarto ---

def plain(md): return re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[`*_#|>]|\{[^}\n]*\}|<[^>\n]+>", r"\1 ", md)

def parts(path):
    "Triples of the heading of a section, its prose and its code"
    if path.suffix == ".ipynb":
        md = "\n\n".join(source(c) if c["cell_type"] == "markdown" else f"```\n{source(c)}\n```" for c in cells(path))
    else: md = path.read_text(encoding="utf-8")
    front, body = re.match(r"(?:---\n(.*?)\n---\n)?(.*)", md, re.S).groups()
    about = yaml.safe_load(front) or {} if front else {}
    title = re.sub("`", "", str(about.get("title", "")))
    code = re.compile(r"^(```+).*?^\1[ \t]*$", re.M | re.S)
    heads = [(m.start(), m[1]) for m in re.finditer(r"^## (.+)$", code.sub(lambda m: " "*len(m[0]), body), re.M)]
    bounds = [(0, ""), *heads, (len(body), "")]
    for (at, head), (end, _) in zip(bounds, bounds[1:]):
        text = body[at:end]
        prose = plain(code.sub("", text)) + ("" if head else f" {about.get('description', '')}")
        yield title, plain(head).strip(), " ".join(prose.split()), " ".join("".join(m[0] for m in code.finditer(text)).split())

@pytest.fixture(scope="module")
def made(processed, tmp_path_factory):
    "An index like Quarto's, of the pages as Quarto gets them"
    docs = []
    for path in sorted(o for k in ("*.ipynb", "*.qmd") for o in processed.rglob(k)):
        name = path.relative_to(processed)
        if name.name == "404.qmd" or any(part[0] in "._" for part in name.parts): continue
        page = re.sub(r"(^|/)\d\d[a-z]?_", r"\1", name.with_suffix("").as_posix())
        docs += [dict(href=f"{page}.html" + (f"#{head}" if head else ""), title=title, section=head, text=text, code=code, crumbs=[])
                 for title, head, text, code in parts(path)]
    finish.with_keywords(docs, finish.read_keywords())
    path = tmp_path_factory.mktemp("index")/"search.json"
    path.write_text(json.dumps(docs), encoding="utf-8")
    return path

def test_the_pages_answer(made): assert not missed(asked(made, QUESTIONS))

def test_nothing_is_found_where_there_is_nothing(made): assert asked(made, ["qqzzxx", ""]) == {"qqzzxx": [], "": []}

def test_prose_comes_before_code(tmp_path):
    doc = lambda page, **more: dict(href=f"{page}.html", title=page, section="", text="", code="") | more
    docs = [doc("a", code="swap swap swap swap"), doc("b", text="We swap two things."), doc("c", keywords="swap, exchange"), doc("d", text="no")]
    (tmp_path/"i.json").write_text(json.dumps(docs))
    assert asked(tmp_path/"i.json", ["swap", "how much exchange"]) == {"swap": ["c", "b", "a"], "how much exchange": ["c"]}

# --- the index ---

PAGE = ("<head><meta name='description' content='x'></head><title>T</title><nav>no</nav><main><header><h1>no</h1></header><p>One &lt;b&gt;<br>"
        "<pre>x = 1</pre></p><section id='s' class='level2'><h2>S</h2>Two<section class='level3'> three <pre><code>y</code></pre></section>"
        "<details class='api'>z</details></section><p>end</p></main><p>no</p>")

def test_code_stands_apart(tmp_path, monkeypatch):
    (tmp_path/"a.html").write_text(PAGE.replace("'x'", '"About it."').replace("name='description'", 'name="description"'))
    docs = [dict(href=h, title="T", section="", text="all") for h in ("a.html", "a.html#s")]
    (tmp_path/"search.json").write_text(json.dumps(docs))
    monkeypatch.setattr(finish, "read_keywords", lambda: {"a": "alpha, beta"})
    finish.search_index(tmp_path)
    first, second = json.loads((tmp_path/"search.json").read_text(encoding="utf-8"))
    assert (first["text"], first["code"], first["keywords"]) == ("About it. One &lt;b&gt; end", "x = 1", "alpha, beta")
    assert (second["text"], second["code"]) == ("Two three", "y z") and "keywords" not in second

def test_keywords_need_their_page():
    with pytest.raises(KeyError): finish.with_keywords([dict(href="a.html")], {"b": "c"})

def test_thirty_questions(): assert len(QUESTIONS) >= 30
