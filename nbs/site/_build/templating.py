"""What the modules beside this one make pages with: the registry of pages, Markdown helpers, and Jinja2's environment.
build_pages.py writes the pages."""
import re
from pathlib import Path
from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
    env.filters |= dict(code=code, escaped=escaped, sentence=lambda text: text.rstrip(".") + ".", capitalize_first=lambda text: text[:1].upper() + text[1:])
    env.globals.update(table=table, dates=dates)
    return env
