"""Fold away in JupyterLab what the site hides or folds: cells with `echo: false`, `hide` or `code-fold` get the metadata that hides their
source. JupyterLab shows such a cell's first line, so the line that says what is folded comes first. A figure's alternative text, which
is written as `#| fig-alt: "..."` and runs off a cell, moves into the cell's metadata, where Quarto finds it too.
    tests/hide_sources.py                    all below nbs
    tests/hide_sources.py nbs/1_start/04_model.ipynb one of them"""
import json, re, sys
from pathlib import Path
import yaml

NBS = Path(__file__).resolve().parent.parent/"nbs"
HIDDEN = re.compile(r"^#\|\s*(echo:\s*false|hide\b|code-fold)", re.M)
ALT = re.compile(r"^#\|\s*fig-alt:(.*)\n", re.M)

def hide(nb): # a parsed notebook, which is changed
    "Hide the source of each cell that the site doesn't show open, and of no other. Move the texts of figures out of the sources"
    for c in nb["cells"]:
        if c["cell_type"] != "code": continue
        source = "".join(c["source"])
        if summary := re.search(r"^#\|\s*code-summary:.*\n", source, re.M):
            c["source"] = (summary[0] + source.replace(summary[0], "", 1)).splitlines(keepends=True)
        kept = {k: v for k, v in c["metadata"].get("jupyter", {}).items() if k != "source_hidden"}
        if HIDDEN.search(source): kept["source_hidden"] = True
        if alt := ALT.search(source):
            c["source"] = "".join(c["source"]).replace(alt[0], "", 1).splitlines(keepends=True)
            c["metadata"]["fig-alt"] = yaml.safe_load(alt[1])
        c["metadata"] = {k: v for k, v in c["metadata"].items() if k != "jupyter"} | (dict(jupyter=kept) if kept else {})
    return nb

def written(nb): return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(NBS.rglob("*.ipynb"))):
        path.write_text(written(hide(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
