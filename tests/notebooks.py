"""Run every notebook's tests, each notebook in a process of its own, and say how each went.
    tests/notebooks.py                       all of nbs/*.ipynb
    tests/notebooks.py nbs/04_model.ipynb    one of them
On a CPU two run at a time. With a GPU they run one at a time, since they time things and fill its memory, and the cells marked
`#| cuda` run as well."""
import multiprocessing, os, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

def test(path, flags, log):
    "Test a notebook in this process, which prints into the file `log`"
    for fd in (1, 2): os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), fd)
    from nbdev.test import nbdev_test
    nbdev_test(path, flags)

def tested(start, path, flags):
    "Whether a notebook passes in a process of its own, and print that. nbdev_test ends well without a test: we want its `Success.`"
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        p = start(target=test, args=(path, flags, log.name))
        p.start(); p.join()
        said = log.read()
    good, took = p.exitcode == 0 and "\nSuccess." in "\n" + said, time.monotonic() - began
    print(f"ok      {took:4.0f} s  {path}" if good else f"FAILED  {took:4.0f} s  {path}\n{said or f'It ended with exit code {p.exitcode}'}", flush=True)
    return good

def test_all(paths):
    "Test notebooks, and exit with 1 where one fails"
    import torch
    cuda, cores = torch.cuda.is_available(), os.cpu_count() or 1
    jobs, flags = (1, "cuda") if cuda else (2, "")
    if not cuda: os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores//jobs)))
    # A process begins as a copy of one that has imported these. What a notebook is about is not among them
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["nbdev.test", "torch", "matplotlib.pyplot"])
    with ThreadPoolExecutor(jobs) as pool: good = [*pool.map(lambda p: tested(processes.Process, p, flags), paths)]
    if len(paths) > 1: print(f"{sum(good)} of {len(paths)} notebooks passed")
    if all(good): return
    if len(paths) > 1: print("These did not:", *(f"  {p}" for p, g in zip(paths, good) if not g), sep="\n")
    sys.exit(1)

if __name__ == "__main__":
    named = [os.path.relpath(p, Path(__file__).parent.parent) for p in sys.argv[1:]]
    os.chdir(Path(__file__).parent.parent)
    test_all(named or sorted(map(str, Path("nbs").glob("*.ipynb"))) or sys.exit("There are no notebooks in nbs/."))
