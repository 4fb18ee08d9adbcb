"""Writes the pages of the site that are made of code and records: the reference, the measurements, what GPUs
can do. `python nbs/_site/pages.py` writes them into nbs/, where Quarto finds them; they aren't committed."""
import argparse, os, re
from pathlib import Path
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[2]
PAGES = {} # address below nbs/ -> function of the repository's folder: what fills the page's template

def page(address):
    "Decorator: a function from the repository's folder to a dict fills the template of that address"
    def add(f): PAGES[address] = f; return f
    return add

# --- what templates use ---

SAID = re.compile(r"\[([^]]*)\]\([^)]*\)|[`*]") # Markdown that a reader doesn't see

def seen(text): return SAID.sub(lambda m: m[1] or "", str(text))

def width(text):
    "About how wide a cell of Markdown is for a reader: without addresses, in characters"
    return max(map(len, seen(text).split("<br>")))

NUMBER = re.compile(r"[\d.,×%-]+( \([\d.]+%\))?")

def of_numbers(cells):
    "Whether a column is one of numbers, some of which may be missing"
    cells, missing = [seen(c) for c in cells], ("", "no", "none", "not measured yet")
    return any(map(NUMBER.fullmatch, cells)) and all(NUMBER.fullmatch(c) or c in missing for c in cells)

def table(head, rows, most=48):
    "A Markdown table. Columns of numbers go to the right; none is taken for wider than `most` characters"
    rows = [[str(c).replace("|", r"\|").replace("\n", " ") for c in r] for r in rows]
    right = [of_numbers([r[i] for r in rows]) for i in range(len(head))]
    dashes = [min(most, max(width(c) for c in [h, *(r[i] for r in rows)])) + 2 for i, h in enumerate(head)]
    rule = ["-"*n + ":" if r else ":" + "-"*n for n, r in zip(dashes, right)]
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])

def code(text):
    "Inline code in a table, nothing for an empty text"
    return f"`{text}`" if text not in ("", None) else ""

MEANT = re.compile(r"[*<>_\[\]$]|-(?=-)|(?<=-)-") # by Markdown; of two hyphens it makes a dash

def escaped(text):
    "The text with what Markdown would take for its own marked, except in code; a command at its end is code"
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<=: )pip install [^`]+$", r"`\g<0>`", text))
    return "".join(p if i % 2 else MEANT.sub(r"\\\g<0>", p) for i, p in enumerate(parts))

def dates(records):
    "The days on which records were measured, in words"
    days = sorted({r["date"] for r in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "no day yet"

def environment():
    "Jinja2 with what the templates use"
    env = Environment(loader=FileSystemLoader(Path(__file__).parent/"templates"), undefined=StrictUndefined,
                      comment_start_string="{##", # for `{#` begins an anchor in Markdown
                      trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    env.filters |= dict(code=code, escaped=escaped, sentence=lambda text: text.rstrip(".") + ".")
    env.globals.update(table=table, dates=dates)
    return env

# --- writing ---

def written(address, root=ROOT):
    "The page's text"
    return environment().get_template(address).render(**PAGES[address](Path(root)))

def write(path, text):
    "Write a page. One that says what it said before keeps its date"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text: path.write_text(text, encoding="utf-8")

def write_pages(out=ROOT/"nbs", root=ROOT):
    "Write all pages below `out`"
    for address in PAGES: write(Path(out)/address, written(address, root))

def load():
    "All pages: the modules beside this one add theirs to `PAGES`"
    import compare, course, gpus, measured, reference # noqa: F401

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", nargs="?", default=ROOT/"nbs", help="folder to write into (default: nbs)")
    os.environ["CUDA_VISIBLE_DEVICES"] = "" # a page says the same wherever it is written
    import pages, train_pages # the module that the others import, and not this program
    pages.load()
    pages.write_pages(out := p.parse_args().out)
    train_pages.render_all(ROOT, out)
