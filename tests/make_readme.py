"""Write README.md from nbs/index.ipynb, without Quarto.

Markdown cells stand as they are; one that begins with `<!-- not in the README -->` is for the site alone. A code cell shows its
source, unless it says `#| echo: false`, and what it printed; `#| hide` leaves all of it out. Links to notebooks and other files lead
to them; links to the site's own pages (.qmd), many of which are made when the site is, lead to the site. Pictures are not embedded:
save the figure under nbs/site/images/ and show it from a markdown cell."""
import json, posixpath, re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE_ONLY = "<!-- not in the README -->"
NOTE = "<!-- Made from nbs/index.ipynb by `make readme`: edit that, not this. -->"
FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.M | re.S)
TARGET = re.compile(r"""(\]\(\s*<?|<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=["'])([^\s"'<>()]+)""")

def site():
    "The address of the docs site"
    ini = ConfigParser()
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    return ini["DEFAULT"]["doc_host"] + ini["DEFAULT"]["doc_baseurl"]

def text(o): return o if isinstance(o, str) else "".join(o)

def outside_fences(md, f):
    "`md` with `f` applied to everything that is not in a fenced code block."
    res, at = [], 0
    for m in FENCE.finditer(md): res += [f(md[at:m.start()]), m[0]]; at = m.end()
    return "".join(res) + f(md[at:])

def is_relative(target): return not re.match(r"[a-z][a-z0-9+.-]*:|[#/]", target, re.I)

def targets(md):
    "The relative files that the links and images of `md` point at, anchors taken off."
    found = []
    def note(s): found.extend(m[2] for m in TARGET.finditer(re.sub(r"`[^`\n]*`", "", s))); return s
    outside_fences(md, note)
    return [o.split("#")[0].split("?")[0] for o in found if is_relative(o)]

def relink(md, folder="nbs"):
    "`md` with every relative target, which was relative to `folder`, made relative to the folder above it, or to the site"
    def there(target):
        if not is_relative(target): return target
        if re.search(r"\.qmd(#|$)", target): return f"{site()}/{target.replace('.qmd', '.html')}"
        return posixpath.normpath(f"{folder}/{target}")
    def one(m): return m[1] + there(m[2])
    return outside_fences(md, lambda s: TARGET.sub(one, s))

def printed(out):
    "One output as markdown; nothing for a picture."
    if out["output_type"] == "stream": return "" if out["name"] == "stderr" else indent(text(out["text"]))
    data = out.get("data", {})
    if "text/markdown" in data: return relink(text(data["text/markdown"]))
    if any(k.startswith("image/") for k in data): return ""
    return indent(text(data.get("text/plain", "")))

def indent(s): return "\n".join(f"    {o}".rstrip() for o in s.strip("\n").splitlines())

def code(cell):
    "A code cell as a list of markdown blocks: its source, then what it printed."
    lines = text(cell["source"]).splitlines()
    said = {re.sub(r"[\s:]+", " ", o[2:]).strip() for o in lines if o.startswith("#|")}
    if "hide" in said: return []
    src = "\n".join(o for o in lines if not o.startswith("#|")).strip("\n")
    shown = [] if "echo false" in said or not src else [f"```python\n{src}\n```"]
    return shown + [printed(o) for o in cell["outputs"]]

def make_readme(nb):
    "The README's text, from the notebook `nb` as parsed JSON."
    blocks = [NOTE]
    for c in nb["cells"]:
        if text(c["source"]).startswith(SITE_ONLY): continue
        if c["cell_type"] == "markdown": blocks.append(relink(text(c["source"])))
        elif c["cell_type"] == "code": blocks += code(c)
    return "\n\n".join(o.strip("\n") for o in blocks if o.strip()) + "\n"

if __name__ == "__main__":
    nb = json.loads((ROOT/"nbs/index.ipynb").read_text(encoding="utf-8"))
    (ROOT/"README.md").write_text(make_readme(nb), encoding="utf-8")
