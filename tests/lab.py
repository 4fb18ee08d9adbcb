"""Open the course in JupyterLab, as copies in lab/: what you run and write there changes nothing in nbs/.
    tests/lab.py [options of jupyter lab]   bring lab/ up to date, and open its table of contents
    tests/lab.py --reset 10_tf32            put the course's notebook back in place of your copy, which is kept beside it
A copy that you have changed stays as it is, also when the course's notebook changes or goes."""
import json, os, re, shutil, sys
from pathlib import Path
import yaml
from llm_speedrun.io_utils import InputError, clean_errors, file_sha256, lookup, replace_file

ROOT = Path(__file__).resolve().parent.parent
# No pop-ups, and the table of contents is shown as a page, not as its source
SETTINGS = {"@jupyterlab/apputils-extension:notification": dict(fetchNews="false", checkForUpdates=False),
            "@jupyterlab/docmanager-extension:plugin": dict(defaultViewers=dict(markdown="Markdown Preview"))}
# What looks like an error of a cell: the profiler's notes on its own start and end, and what NumPy says of the lanes that a kernel masks,
# which Triton's interpreter computes too
ENVIRONMENT = dict(KINETO_LOG_LEVEL="6", PYTHONWARNINGS="ignore::RuntimeWarning:triton.runtime.interpreter")

def sources(nbs):
    "Relative path -> file: the notebooks, and what they read"
    found = [*nbs.rglob("*.ipynb"), *(p for folder in ("images", "measurements") for p in (nbs/"site"/folder).rglob("*") if p.is_file())]
    return {p.relative_to(nbs).as_posix(): p for p in sorted(found) if ".ipynb_checkpoints" not in p.parts and p.stem != "index"}

def kept_digests(lab):
    "Relative path -> digest of what was copied there last"
    try: return json.loads((lab/".copied.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError): return {}

def copy(name, source, lab, copied):
    (lab/name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, lab/name)
    copied[name] = file_sha256(source)

def update(nbs, lab):
    "Copy what is new or has changed in `nbs`, unless the reader has changed the copy. Returns the names of copies that stay behind"
    copied, behind, found = kept_digests(lab), [], sources(nbs)
    for name in copied.keys() - found.keys(): # it has moved, or is gone
        if (lab/name).exists() and file_sha256(lab/name) == copied[name]: (lab/name).unlink()
        del copied[name]
    for name, source in found.items():
        if not (lab/name).exists() or file_sha256(lab/name) in (copied.get(name), file_sha256(source)): copy(name, source, lab, copied)
        elif copied.get(name) != file_sha256(source): behind.append(name)
    replace_file(lab/".copied.json", json.dumps(copied, indent=1) + "\n")
    return behind

def reset(lesson, nbs, lab):
    "Put the lesson's own notebook back. Returns where the copy that was there is kept, None where it was not changed"
    names = {Path(n).stem: n for n in sources(nbs) if n.endswith(".ipynb")}
    name = lookup(names, Path(lesson).stem, "lesson")
    copied, kept = kept_digests(lab), None
    if (lab/name).exists() and file_sha256(lab/name) not in (copied.get(name), file_sha256(nbs/name)):
        kept = next(p for i in range(1, 10**6) if not (p := (lab/name).with_name(f"{Path(name).stem}.mine{i}.ipynb")).exists())
        (lab/name).rename(kept)
    copy(name, nbs/name, lab, copied)
    replace_file(lab/".copied.json", json.dumps(copied, indent=1) + "\n")
    return kept

def first_cell(path): return "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
def title(path): return re.match(r"# (.+)", first_cell(path))[1]
def about(path):
    "The `> ` line below a notebook's title"
    return re.search(r"^> (.+)", first_cell(path), re.M)[1]

def sections(entries):
    "Pairs of a section's title and its notebooks, from the site's sidebar"
    for e in entries:
        if not isinstance(e, dict) or "section" not in e: continue
        found = [c["href"] for c in e["contents"] if isinstance(c, dict) and c.get("href", "").endswith(".ipynb")]
        if found: yield e["section"], found
        yield from sections(e["contents"])

def solved(path):
    "How many exercises of a notebook its outputs call right, and how many it has"
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    there = {n for c in cells for n in re.findall(r"^@exercise\((\d+)\)", "".join(c["source"]), re.M)}
    mine = [c for c in cells if not c["metadata"].get("jupyter", {}).get("source_hidden")] # the solutions are hidden
    said = "".join("".join(o.get("text", "")) for c in mine for o in c["outputs"])
    return len({*re.findall(r"^Exercise (\d+): right", said, re.M)} & there), len(there)

def mark(path):
    "What to say of a reader's copy: that its exercises are solved, or how many"
    try: right, of = solved(path)
    except (FileNotFoundError, ValueError, KeyError): return ""
    return "✓" if of and right == of else f"{right} of {of}" if right else ""

def contents(nbs, lab):
    "The first page, in Markdown: the lessons by part, each with its minutes, whether it needs a GPU, and what is solved in its copy"
    from procs import minutes # of the site, which a path file of the environment puts on Python's path
    side = yaml.safe_load((nbs/"sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    on_gpu = {k for k, v in json.loads((nbs/"site/measurements/outputs.json").read_text(encoding="utf-8")).items() if v["gpu"] != "CPU"}
    page = ["# The course", "", "These are copies: run and change them as you like. `make lab RESET=10_tf32` puts one back as it was.",
            "*Run > Run All Cells* runs a lesson to its end. Code that only draws or sets up is folded: click on its three dots.",
            "So are the solutions of the exercises. *GPU*: its numbers come from one; without it the lesson shows what was recorded.",
            "*Exercises*: what your copy has solved, as of the last `make lab`."]
    for section, found in sections(side):
        if not found[0][0].isdigit(): continue
        page += ["", f"## {section}", "", "| lesson | minutes | GPU | exercises |", "|---|---:|---|---|"]
        for name in found:
            path, stem = nbs/name, Path(name).stem
            read = json.loads(path.read_text(encoding="utf-8"))["cells"]
            page.append(f"| [{stem[:2]} {title(path)}]({name}): {about(path).rstrip('.')} | {minutes(read)} | {'yes' if stem in on_gpu else ''} | {mark(lab/name)} |")
    return "\n".join([*page, "", "What the lessons don't build is [source](source/README.md)."]) + "\n"

def prepare(nbs, lab):
    "Bring `lab` up to date, and say which copies stay as the reader left them"
    for name in update(nbs, lab):
        print(f"{name} has changed in the course, and so have you changed your copy, which stays. To see the new one: make lab RESET={Path(name).stem}")
    replace_file(lab/"contents.md", contents(nbs, lab))
    if (nbs/"source/README.md").exists(): shutil.copyfile(nbs/"source/README.md", lab/"source/README.md")

def settings(prefix):
    "Write the defaults of JupyterLab in this environment, which the reader's own settings override"
    replace_file(Path(prefix)/"share/jupyter/lab/settings/overrides.json", json.dumps(SETTINGS, indent=1) + "\n")

def main(args):
    nbs, lab = ROOT/"nbs", ROOT/"lab"
    if args[:1] == ["--reset"]:
        if len(args) != 2: raise InputError("--reset takes one lesson, such as 10_tf32")
        kept = reset(args[1], nbs, lab)
        print(f"{Path(args[1]).stem} is the course's again" + (f"; yours is kept as {kept.relative_to(ROOT)}" if kept else ""))
        return
    prepare(nbs, lab)
    if sys.prefix != sys.base_prefix: settings(sys.prefix) # an environment of its own
    program = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={lab}", "--LabApp.default_url=/lab/tree/contents.md", *args]
    os.execve(sys.executable, program, os.environ | ENVIRONMENT)

if __name__ == "__main__": clean_errors(lambda: main(sys.argv[1:]))
