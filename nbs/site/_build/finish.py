"""The last touches on a built site, after Quarto:  python nbs/site/_build/finish.py _docs

Takes out scripts of other hosts, leads "edit" to templates, makes pictures smaller, draws the social image,
puts code and keywords into fields of their own in the search index, writes llms.txt."""
import io, json, posixpath, re, sys
from collections import defaultdict
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
import yaml
from PIL import Image, ImageChops

NBS = Path(__file__).resolve().parents[2]

def replace_in_pages(site, pattern, by):
    "`re.sub` in all pages of the site"
    for page in site.rglob("*.html"):
        before = page.read_text(encoding="utf-8")
        after = re.sub(pattern, by, before)
        if after != before: page.write_text(after, encoding="utf-8")

def own_scripts_only(site):
    "Take out scripts of other hosts: RequireJS and jQuery, which Quarto adds to HTML, and nothing uses"
    theirs = (r'<script src="https?://[^>]*></script>\s*'
              r'(<script type="application/javascript">define\(.jquery.*?</script>)?')
    replace_in_pages(site, theirs, "")

def edit_links(site):
    "A page that is made of a template in nbs/site/_build is edited there"
    def link(found):
        templates = f"site/_build/templates/{found[2]}", f"site/_build/{found[2]}"
        return found[1] + next((o for o in templates if (NBS/o).exists()), f"site/{found[2]}")
    replace_in_pages(site, r'(href="https://github.com/[^"]*/edit/[^"/]+/nbs/)site/([^"]+)', link)

VISIBLE = 24    # of 255: a palette that moves a color further is not used

def smaller(png):
    "A PNG's bytes with a palette of 256 colors, or None where that is no smaller or can be seen"
    before = Image.open(io.BytesIO(png))
    if before.convert("RGBA").getextrema()[3][0] < 255: return None    # it is transparent
    before = before.convert("RGB")
    method = Image.Quantize.MAXCOVERAGE # with which white stays white
    after = before.quantize(256, method=method, dither=Image.Dither.NONE)
    difference = ImageChops.difference(before, after.convert("RGB"))
    if max(high for _, high in difference.getextrema()) > VISIBLE: return None
    out = io.BytesIO()
    after.save(out, "PNG", optimize=True)
    return out.getvalue() if len(out.getvalue()) < len(png) else None

def small_pictures(site):
    for f in site.rglob("*.png"):
        if less := smaller(f.read_bytes()): f.write_bytes(less)

def social_image(path):
    "The picture that a link to the site shows elsewhere: the speed that the site leads with, and how it comes about"
    import matplotlib; matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from headline import OURS, OURS_16, chart, newest, speedups, thousands
    race = newest()
    with plt.rc_context({"font.size": 16}): ax = chart(race, (12, 6.3))
    fig = ax.figure
    fig.get_layout_engine().set(w_pad=.3, h_pad=.25)
    fig.suptitle(f"llm_speedrun: {thousands(race[OURS])}", size=34, weight="bold")
    ax.set_title(f"in FP8: {speedups(race)}\nbf16 on both sides: {speedups(race, OURS_16, 'bf16')}", size=18, pad=10)
    fig.savefig(path, dpi=100); plt.close(fig)

class Sections(HTMLParser):
    "The text of a page by its `section.level2`, \"\" for what stands outside of them: prose, and code with what it printed"
    VOID = set("area base br col embed hr img input link meta source track wbr".split())
    INLINE = set("a abbr b code em i kbd mark mi mn mo small span strong sub sup u".split())
    def __init__(self, html):
        super().__init__()
        self.open, self.prose, self.code = [], defaultdict(list), defaultdict(list) # tags with what they begin
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.separate(tag)
        if tag in self.VOID: return
        attrs = {k: v or "" for k, v in attrs}
        classes, begins = attrs.get("class", "").split(), tag if tag in ("main", "pre", "script", "style", "nav", "header", "h2") else ""
        if "api" in classes: begins = "pre" # the folded tables of definitions
        if "level2" in classes: begins = "#" + attrs.get("id", "")
        self.open.append((tag, begins))

    def separate(self, tag):
        if tag not in self.INLINE: self.handle_data(" ")

    def handle_endtag(self, tag):
        self.separate(tag)
        while self.open and any(t == tag for t, _ in self.open) and self.open.pop()[0] != tag: pass

    def handle_data(self, data):
        begun = [b for _, b in self.open]
        if "main" not in begun or {"script", "style", "nav", "header", "h2"} & {*begun}: return
        where = next((b for b in begun if b.startswith("#")), "")
        (self.code if "pre" in begun else self.prose)[where].append(data)

def said(parts): return escape(" ".join("".join(parts).split()), quote=False) # what is found is shown as HTML

def with_keywords(docs, keywords): # of the index; page without .html -> phrases
    "Give each page's first entry its keywords, in place"
    first = {}
    for doc in docs: first.setdefault(doc["href"].split(".html")[0], doc)
    for page, phrases in keywords.items(): first[page]["keywords"] = phrases

def read_keywords(): return yaml.safe_load((NBS/"site/_build/search.yml").read_text(encoding="utf-8"))

def search_index(site):
    "Give the index what nbs/site/theme/search.html ranks by: code apart from prose, and keywords"
    path, pages = site/"search.json", {}
    docs = json.loads(path.read_text(encoding="utf-8"))
    for doc in docs:
        page, mark, anchor = doc["href"].partition("#")
        if page not in pages:
            html = (site/page).read_text(encoding="utf-8")
            pages[page] = Sections(html)
            pages[page].prose[""].insert(0, in_head(html, DESCRIPTION) + " ")
        doc["text"], doc["code"] = (said(part[mark + anchor]) for part in (pages[page].prose, pages[page].code))
    with_keywords(docs, read_keywords())
    path.write_text(json.dumps(docs, ensure_ascii=False), encoding="utf-8")

def flat(contents, section="Start"):
    "The sidebar's pages in its order, each with its section, and its text if the sidebar gives it one"
    for o in contents:
        if isinstance(o, str): yield section, o, None
        elif "section" in o: yield from flat(o["contents"], o["section"])
        else: yield section, o["href"], o.get("text")

def address(source):
    "The address of a page from its source: nbdev takes the number off a notebook's name"
    return re.sub(r"(^|/)\d+[a-z]?_(?=[^/]*$)", r"\1", source).rsplit(".", 1)[0] + ".html"

DESCRIPTION = r'<meta name="description" content="(.*?)">'

def in_head(html, pattern):
    found = re.search(pattern, html, re.S)
    return unescape(found[1]).strip() if found else ""

def llms_txt(site, config, contents):
    "The site in short for a language model (llmstxt.org): each page's title, address and description"
    url, last = config["site-url"], None
    lines = [f"# {config['title']}", "", f"> {config['description']}"]
    for section, source, name in flat(contents):
        if section != last: lines += ["", f"## {section}", ""]; last = section
        html = (site/address(source)).read_text(encoding="utf-8")
        title = name or in_head(html, r"<title>(.*?)(?: – [^–]*)?</title>")
        about = in_head(html, DESCRIPTION)
        lines.append(f"- [{title}]({url}/{address(source)})" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"

LEADS_ON = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title><meta name="robots" content="noindex"><link rel="canonical" href="{0}">
<script>location.replace("{0}" + location.search + location.hash)</script><meta http-equiv="refresh" content="1; url={0}"></head>
<body><p>This page has moved: <a href="{0}">go there</a>.</p></body></html>
"""

def redirects(site, moved):
    "Leave a page at each address that has moved, which leads on, with the anchor, and which no search lists"
    for old, new in moved.items():
        (site/old).parent.mkdir(parents=True, exist_ok=True)
        (site/old).write_text(LEADS_ON.format(posixpath.relpath(new, posixpath.dirname(old) or ".")), encoding="utf-8")

def read_moved(): return yaml.safe_load((NBS/"site/_build/moved.yml").read_text(encoding="utf-8"))

def read_yaml(path): return yaml.safe_load(path.read_text(encoding="utf-8"))["website"]

def finish(site):
    own_scripts_only(site)
    edit_links(site)
    social_image(site/"social.png")
    small_pictures(site)
    search_index(site)
    redirects(site, read_moved())
    contents = read_yaml(NBS/"sidebar.yml")["sidebar"]["contents"]
    (site/"llms.txt").write_text(llms_txt(site, read_yaml(NBS/"nbdev.yml"), contents), encoding="utf-8")

if __name__ == "__main__": finish(Path(sys.argv[1]))
