"""Run a notebook and keep its outputs: run_notebook.py nbs/04_model.ipynb [where/to.ipynb]

What an exercise leaves to the reader (`#| eval: false`) is not run. An error stops it, and then nothing is written."""
import os, re, sys
from pathlib import Path
from execnb.shell import CaptureShell

def left_to_the_reader(cell): return cell.cell_type == "code" and bool(re.search(r"^#\|\s*eval:\s*false", cell.source, re.M))

def run(path, dest=None):
    "Run `path` in its own folder, and write it with its outputs to `dest`, by default over itself"
    path, dest = Path(path).resolve(), Path(dest or path).resolve()
    os.chdir(path.parent)
    CaptureShell().execute(path.name, dest, exc_stop=True, preproc=left_to_the_reader)

if __name__ == "__main__": run(*sys.argv[1:])
