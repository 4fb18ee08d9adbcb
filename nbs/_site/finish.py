"""The last touches on a built site, after Quarto:  python nbs/_site/finish.py _docs

Takes out scripts of other hosts, leads "edit" to templates, makes pictures smaller, draws the social image,
writes llms.txt."""
import io, re, sys
from html import unescape
from pathlib import Path
import yaml
from PIL import Image, ImageChops

NBS = Path(__file__).resolve().parent.parent

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
    "A page that is made of a template in nbs/_site is edited there"
    def link(found):
        templates = f"_site/templates/{found[2]}", f"_site/{found[2]}"
        return found[1] + next((o for o in templates if (NBS/o).exists()), found[2])
    replace_in_pages(site, r'(href="https://github.com/[^"]*/edit/[^"/]+/nbs/)([^"]+)', link)

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
    from llm_speedrun.measure import course_records
    race = newest()
    with plt.rc_context({"font.size": 16}): ax = chart(race, course_records(), (12, 6.3))
    fig = ax.figure
    fig.get_layout_engine().set(w_pad=.3, h_pad=.25)
    fig.suptitle(f"llm_speedrun: {thousands(race[OURS])}", size=34, weight="bold")
    ax.set_title(f"in FP8: {speedups(race)}\nin bf16: {speedups(race, OURS_16)}", size=18, pad=10)
    fig.savefig(path, dpi=100); plt.close(fig)

def flat(contents, section="Start"):
    "The sidebar's pages in its order, each with its section, and its text if the sidebar gives it one"
    for o in contents:
        if isinstance(o, str): yield section, o, None
        elif "section" in o: yield from flat(o["contents"], o["section"])
        else: yield section, o["href"], o.get("text")

def address(source):
    "The address of a page from its source: nbdev takes the number off a notebook's name"
    return re.sub(r"^\d+_", "", source).rsplit(".", 1)[0] + ".html"

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
        about = in_head(html, r'<meta name="description" content="(.*?)">')
        lines.append(f"- [{title}]({url}/{address(source)})" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"

def read_yaml(path): return yaml.safe_load(path.read_text(encoding="utf-8"))["website"]

def finish(site):
    own_scripts_only(site)
    edit_links(site)
    social_image(site/"social.png")
    small_pictures(site)
    contents = read_yaml(NBS/"sidebar.yml")["sidebar"]["contents"]
    (site/"llms.txt").write_text(llms_txt(site, read_yaml(NBS/"nbdev.yml"), contents), encoding="utf-8")

if __name__ == "__main__": finish(Path(sys.argv[1]))
