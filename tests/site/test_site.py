"""The site's frame: what its configuration names exists, no page asks another host, and, where `make docs` has built it and
a browser is there, how it looks and what its search finds. SITE=folder tests that site, and fails where it can't."""
import io, json, os, re
from fnmatch import fnmatch
from pathlib import Path
import matplotlib.pyplot as plt, numpy as np, pytest
from PIL import Image
import audit_site, finish
from audit_site import CONTRAST, HEAVY, audit_page, chromium, pages, published_at, served
from make_readme import ROOT
from test_search import QUESTIONS
from helpers.timeouts import TIMEOUT
from helpers.files import read_yaml

NBS = ROOT/"nbs"

QUARTO = read_yaml(ROOT/"_quarto.yml")
LISTED = list(finish.flat(read_yaml(NBS/"sidebar.yml")["website"]["sidebar"]["contents"]))
SOURCES = [source for _, source, _ in LISTED]

# --- the configuration ---

def ignored(): return [o for o in (ROOT/".gitignore").read_text(encoding="utf-8").splitlines() if o.startswith("nbs/")]

def generated(source): # of a page, seen from nbs/
    "Whether git ignores it, because nbs/site/_build/build_pages.py writes it"
    return any(f"nbs/{source}".startswith(o) if o.endswith("/") else fnmatch(f"nbs/{source}", o) for o in ignored())

def test_every_page_stands_in_the_sidebar_once():
    assert len(set(SOURCES)) == len(SOURCES)
    found = [f.relative_to(NBS).as_posix() for k in ("*.ipynb", "*.qmd") for f in NBS.rglob(k)]
    shown = {o for o in found if not any(part.startswith((".", "_")) for part in Path(o).parts)} - {"404.qmd"}
    assert not (extra := shown - set(SOURCES)), f"not in nbs/sidebar.yml: {sorted(extra)}"
    missing = [o for o in SOURCES if o not in shown and not generated(o)]
    assert not missing, f"in nbs/sidebar.yml, and neither a file nor one that nbs/site/_build/build_pages.py writes: {missing}"

def title(source):
    "A notebook's title"
    return json.loads((NBS/source).read_text(encoding="utf-8"))["cells"][0]["source"][0].removeprefix("# ").strip()

@pytest.mark.parametrize("source, name", [(s, n) for _, s, n in LISTED if s.endswith(".ipynb") and s != "index.ipynb"])
def test_the_sidebar_gives_a_lesson_its_number_and_its_title(source, name):
    number = Path(source).stem.partition("_")[0] + " " if source[0].isdigit() else ""
    assert name == number + title(source)

def test_navbar_and_footer_name_pages_in_the_order_of_the_sidebar():
    web = QUARTO["website"]
    places = [SOURCES.index(o["href"]) for o in web["navbar"]["left"]]
    assert places == sorted(places)
    footer = re.findall(r"\]\(/(.+?)\)", " ".join(web["page-footer"].values()))
    assert footer and set(footer) <= {*SOURCES}

def test_no_file_of_the_theme_names_another_host():
    for f in (NBS/"site/theme").iterdir():
        text = f.read_text(encoding="utf-8")
        urls = set(re.findall(r"https?://[\w.-]+|url\(\s*[\"']?//[^)]*", text)) - {"http://www.w3.org"}
        assert not urls, f"{f.name}: {urls}"
    html = QUARTO["format"]["html"]
    assert html["html-math-method"] == "mathml", "MathJax comes from another host"
    for name in ("light", "dark"):
        text = (NBS/f"site/theme/{name}.scss").read_text(encoding="utf-8")
        assert "$web-font-path: false" in text, "cosmo's font comes from another host"

def test_what_the_configuration_names_exists():
    html, web = QUARTO["format"]["html"], QUARTO["website"]
    named = [o for theme in html["theme"].values() for o in theme if "/" in o] + html["filters"]
    css = html.get("css", [])
    named += [*html["include-after-body"], web["favicon"], *([css] if isinstance(css, str) else css)]
    for f in [*named, "404.qmd"]: assert (NBS/f).exists(), f
    unused = {f"site/theme/{f.name}" for f in (NBS/"site/theme").iterdir()} - set(named)
    assert not unused, f"_quarto.yml names none of {unused}"
    assert html["respect-user-color-scheme"] and web["page-navigation"] and web["back-to-top-navigation"]
    assert {"edit", "issue"} <= set(web["repo-actions"]) and web["repo-subdir"] == "nbs"

@pytest.mark.parametrize("path", sorted((ROOT/".github/workflows").iterdir()), ids=lambda p: p.name)
def test_workflows_ask_for_little_and_pin_what_they_use(path):
    text, flow = path.read_text(encoding="utf-8"), read_yaml(path)
    assert flow["permissions"] == {"contents": "read"}
    for use in re.findall(r"uses: (.+)", text): assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use), use
    for job in flow["jobs"].values():
        assert "timeout-minutes" in job
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout"): assert step["with"]["persist-credentials"] is False

def test_devcontainer_takes_the_torch_of_the_workflows():
    settings = json.loads((ROOT/".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    flow = read_yaml(ROOT/".github/workflows/docs.yml")["jobs"]["build"]["env"]
    assert settings["containerEnv"] == flow
    makefile = (ROOT/"Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{settings['postCreateCommand'].removeprefix('make ')}:", makefile, re.M)

# --- the last touches ---

def test_scripts_of_other_hosts_go(tmp_path):
    ours = '<script src="site_libs/a.js"></script>'
    theirs = ('<script src="https://a.org/require.min.js" integrity="x"></script>\n<script type="application/javascript">'
              "define('jquery', [],function() {return window.jQuery;})</script>")
    (tmp_path/"a.html").write_text(theirs + ours)
    finish.own_scripts_only(tmp_path)
    assert (tmp_path/"a.html").read_text() == ours

def test_pictures_get_smaller_and_look_the_same():
    fig, ax = plt.subplots(); ax.plot([1, 3, 2]); ax.set_title("a")
    out = io.BytesIO(); fig.savefig(out, dpi=150); plt.close(fig)
    less = finish.smaller(out.getvalue())
    assert len(less) < .7*len(out.getvalue())
    assert Image.open(io.BytesIO(less)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    noise, pixels = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(noise, "PNG")
    assert finish.smaller(noise.getvalue()) is None, "noise can't have a palette"
    clear = io.BytesIO(); Image.new("RGBA", (64, 64), (0, 0, 0, 9)).save(clear, "PNG")
    assert finish.smaller(clear.getvalue()) is None, "what is transparent stays so"

def test_a_page_made_of_a_template_is_edited_there(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "NBS", tmp_path/"nbs")
    for o in ("templates/gpus.qmd", "train/cost.qmd"):
        (tmp_path/"nbs/site/_build"/o).parent.mkdir(parents=True, exist_ok=True); (tmp_path/"nbs/site/_build"/o).touch()
    edit = lambda *sources: "".join(f'<a href="https://github.com/u/r/edit/main/nbs/{o}">' for o in sources)
    (tmp_path/"a.html").write_text(edit("site/gpus.qmd", "site/train/cost.qmd", "site/train/index.qmd"))
    finish.edit_links(tmp_path)
    assert (tmp_path/"a.html").read_text() == edit("site/_build/templates/gpus.qmd", "site/_build/train/cost.qmd", "site/train/index.qmd")

def test_old_addresses_lead_on(tmp_path):
    "Each to a page that is there, from the same folder or another, with the anchor; none hides a page"
    moved, there = finish.read_moved(), {finish.address(o) for o in SOURCES}
    assert {*moved.values()} <= there and not {*moved} & there and len(moved) > 130
    assert moved["tf32.html"] == "2_ladder/tf32.html" and moved["train/index.html"] == "site/train/index.html"
    finish.redirects(tmp_path, moved)
    assert 'url=2_ladder/tf32.html"' in (tmp_path/"tf32.html").read_text() and "location.hash" in (tmp_path/"tf32.html").read_text()
    assert 'href="../site/train/index.html"' in (tmp_path/"train/index.html").read_text()

def test_llms_txt(tmp_path):
    for folder in ("site/train", "2_ladder"): (tmp_path/folder).mkdir(parents=True)
    (tmp_path/"2_ladder/tf32.html").write_text('<title>TF32 – site</title><meta name="description" content="A &amp; B.">')
    (tmp_path/"more.html").write_text("<title>More – site</title>")
    (tmp_path/"site/train/index.html").write_text("<title>Start – site</title>")
    contents = [{"section": "Course", "contents": [{"text": "10 TF32", "href": "2_ladder/10_tf32.ipynb"},
                                                        {"text": "10c More", "href": "10c_more.ipynb"}]},
                {"section": "Train", "contents": ["site/train/index.qmd"]}]
    text = finish.llms_txt(tmp_path, {"site-url": "https://a.org/s", "title": "site", "description": "It."}, contents)
    assert text == ("# site\n\n> It.\n\n## Course\n\n- [10 TF32](https://a.org/s/2_ladder/tf32.html): A & B.\n- [10c More](https://a.org/s/more.html)\n\n"
                    "## Train\n\n- [Start](https://a.org/s/site/train/index.html)\n")

def test_social_image(tmp_path):
    finish.social_image(tmp_path/"social.png")
    assert Image.open(tmp_path/"social.png").size == (1200, 630)

# --- in a browser ---

@pytest.fixture(scope="module")
def browser():
    if not os.environ.get("SITE"): pytest.importorskip("playwright", reason="Playwright isn't installed: pip install playwright")
    from playwright.sync_api import Error
    try: context = chromium(); found = context.__enter__()
    except Error:
        if os.environ.get("SITE"): raise
        pytest.skip("no browser: playwright install chromium")
    yield found
    context.__exit__(None, None, None)

BROKEN = """<!DOCTYPE html><html><head><title>x</title></head><body style="margin:0;background:#fff;color:#000">
<main style="width:100%"><img src="gone.png"><p style="color:#bbb;background:#fff">faint</p>
<img alt="wide" src="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='2000' height='9'/%3E">
<table style="table-layout:fixed;width:3em;word-break:break-all"><tr><td>splitword</td></tr></table>
<div style="position:relative"><pre style="overflow:auto;width:200px"><code>first line, which is longer than its box, so that it scrolls</code><button class="code-copy-button"
style="position:absolute;top:0;right:0">copy</button></pre></div><div style="overflow:auto"><table style="width:1800px"><tr><td>long</td></tr></table></div>
<script src="http://localhost:1/a.js"></script><script>x.y</script></main></body></html>"""

def test_the_audit_finds_what_is_broken(tmp_path, browser):
    (tmp_path/"index.html").write_text(BROKEN)
    (tmp_path/"sitemap.xml").write_text("<loc>https://a.org/s/index.html</loc>")
    with served(tmp_path) as base: weight, wrong = audit_page(browser, base, "index.html")
    said = "\n".join(wrong)
    for o in ("asks localhost:1", "not there: gone.png", "figure without alt text", "figure missing", "figure cut: wide",
              "wide: table wider than the page", "wider than the window", "contrast 1.9", "script error", "phone: word split in a table: splitword", "phone: code below its button",
              "phone: scrolls without a hint"): assert o in said, o
    assert "phone: table" not in said, "a table may scroll on a phone"

def test_pages_are_whole_at_all_widths_and_in_both_themes(site, browser):
    bad = {path: sorted(wrong) for path, _, wrong in audit_site.audit(browser, site) if wrong}
    assert not bad, "\n".join(f"{path}:\n    " + "\n    ".join(wrong) for path, wrong in bad.items())

def test_at_most_three_pages_may_be_heavy(): assert len(audit_site.MAY_BE_HEAVY) <= 3 and HEAVY == 1_500_000 and CONTRAST >= 4.5

def test_a_lost_reader_gets_the_404_page(site, browser):
    with served(site) as base:
        page = browser.new_page()
        answer = page.goto(base + "train/nowhere.html")
        assert answer.status == 404 and "No such page" in page.inner_text("main")
        page.click("main a:has-text('Home')")
        assert page.url == base + "index.html"
        page.close()

def test_the_site_has_what_crawlers_ask_for(site):
    text = (site/"llms.txt").read_text(encoding="utf-8")
    addresses = re.findall(r"\]\((.+?)\)", text)
    assert len(addresses) == len(LISTED)
    sitemap = (site/"sitemap.xml").read_text(encoding="utf-8")
    for o in addresses: assert f"<loc>{o}</loc>" in sitemap, o
    home = (site/"index.html").read_text(encoding="utf-8")
    assert 'rel="icon"' in home and 'property="og:image"' in home and (site/"social.png").exists()
    assert published_at(site) == "/llm_speedrun/"

def test_edit_links_lead_to_sources(site):
    for path in pages(site):
        html = (site/path).read_text(encoding="utf-8")
        for source in re.findall(r'href="https://github.com/[\w-]+/[\w-]+/edit/main/(.+?)"', html):
            assert source.startswith("nbs/") and not generated(source[4:]), f"{path}: {source} is in no repository"

def found_by_search(page, base, query, wait): # milliseconds
    "The pages that the site's search names, in its order; none after that time"
    from playwright.sync_api import TimeoutError
    page.goto(base + "index.html")
    page.click("#quarto-search button")
    page.fill(".aa-Input", query)
    try: page.wait_for_selector(".aa-Item a.search-result-link", timeout=wait)
    except TimeoutError: return []
    links = page.eval_on_selector_all(".aa-Item a.search-result-link", "es => es.map(e => e.href)")
    return list(dict.fromkeys(o.removeprefix(base).split(".html")[0] for o in links))

@pytest.fixture(scope="module")
def searching(site, browser):
    with served(site) as base:
        page = browser.new_page()
        yield lambda query, wait=1000*TIMEOUT: found_by_search(page, base, query, wait)
        page.close()

@pytest.mark.parametrize("query", [*QUESTIONS][:9]) # tests/site/test_search.py asks all of them
def test_search_finds_the_page(searching, query):
    found = searching(query)
    assert QUESTIONS[query] in found[:3], f"{query!r} gave {found[:8]}"

def test_search_finds_nothing_where_there_is_nothing(searching): assert searching("qqzzxx", wait=2_000) == []
