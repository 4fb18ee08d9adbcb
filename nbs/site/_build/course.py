"What course.qmd is filled with: the notebooks by the sections of the sidebar, each with its one line and minutes."
import re
from pathlib import Path
import yaml
from templating import page, table

def sections(contents): # of the sidebar
    "Pairs of a section's title and its lessons' addresses, in the sidebar's order"
    for o in contents:
        if not isinstance(o, dict) or "section" not in o: continue
        found = [c["href"] for c in o["contents"] if isinstance(c, dict) and re.match(r"\d_\w+/", c.get("href", ""))]
        if found: yield o["section"], found
        yield from sections(o["contents"])

@page("course.qmd")
def filled(root): # the repository
    "What the template is filled with"
    from procs import lessons, minutes, text # of nbdev's configuration, which a test may set first
    sidebar = yaml.safe_load((root/"nbs/sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    def row(address):
        lesson = lessons()[Path(address).stem]
        first = text(lesson.cells[0])
        about = first.split("> ", 1)[1].replace("\n", " ").replace("`", "").strip(" .")
        title = re.search(r"^# (.+)$", first, re.M)[1]
        return [f"[{lesson.number:02} {title}](../{address})", about, minutes(lesson.cells)]
    parts = [(title, list(map(row, found))) for title, found in sections(sidebar)]
    return dict(n=sum(len(rows) for _, rows in parts), hours=sum(r[-1] for _, rows in parts for r in rows)/60,
                parts=[(title, table(["lesson", "what it is about", "minutes"], rows, 80)) for title, rows in parts])
