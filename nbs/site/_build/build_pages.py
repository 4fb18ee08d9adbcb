"""Writes the pages of the site that are made of code and records: the reference, the measurements, what GPUs
can do. `python nbs/site/_build/build_pages.py` writes them into nbs/, where Quarto finds them; they aren't committed."""
import argparse, os
from pathlib import Path
from templating import PAGES, environment

ROOT = Path(__file__).parents[3]

def load():
    "All pages: the modules beside this one add theirs to `PAGES`"
    import compare, course, gpus, measured, reference, track_page # noqa: F401

def written(address, root=ROOT):
    "The page's text"
    return environment().get_template(address).render(**PAGES[address](Path(root)))

def write(path, text):
    "Write a page. One that says what it said before keeps its date"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text: path.write_text(text, encoding="utf-8")

def write_pages(out=ROOT/"nbs/site", root=ROOT):
    "Write all pages below `out`"
    for address in PAGES: write(Path(out)/address, written(address, root))

def write_train_pages(out=ROOT/"nbs/site", root=ROOT):
    "Write those of nbs/site/_build/train/ into `out`/train/"
    from train_pages import rendered
    for name, text in rendered(root): write(Path(out)/"train"/name, text)

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", nargs="?", default=ROOT/"nbs/site", help="folder to write into (default: nbs/site)")
    os.environ["CUDA_VISIBLE_DEVICES"] = "" # a page says the same wherever it is written
    load()
    write_pages(out := p.parse_args().out)
    write_train_pages(out)
