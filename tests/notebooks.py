"""Run every notebook's tests, each notebook in a process of its own, and say how each went.
    tests/notebooks.py                       all below nbs
    tests/notebooks.py nbs/1_start/04_model.ipynb    one of them
On a CPU one more runs at a time than there are cores, up to four: where one waits for its processes, the others use the cores. With a GPU
they run one at a time, since they time things and fill its memory, and the cells marked `#| cuda` run as well. All run, also after one that fails. What failed is kept in the file that FAILED_NOTEBOOKS names, for pytest to list."""
import faulthandler, gc, multiprocessing, os, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from helpers import cpu_times
from helpers.quick_counts import count_quickly
from helpers.quick_figures import draw_figures_quickly
from helpers.quick_kernels import run_kernels_quickly
from helpers.quick_start import start_quickly
from helpers.timeouts import NOTEBOOK_TIMEOUT

# They take the longest, so they begin first: at the end no core waits for one of them
LONG = """40_trainer 20_compile 73_finale 42_memory 22_checkpointing 16_fused_ops 45_doctor doctor 33_fewer_passes 31_flash4 24_ladder 34_epilogues 75_claims
    05_rungs 62_ddp 43_loader loader liveness 63_fsdp 19_fused_fp8 17_chunked_ce 18_fp8 32_fewer_bytes comparison 64_tensor_parallel 59_beyond
    57_speedrun 21_cuda_graphs 11_amp""".split()

COUNTING = "op_counter", "step_builder", "kernel_ops" # which are about this

def test(path, flags, log):
    "Test a notebook in this process, which prints into the file `log`. What hangs leaves its stack there"
    os.environ.pop("TRITON_INTERPRET", None)    # was for what is preloaded
    for fd in (1, 2): os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), fd)
    if "cuda" not in flags:
        start_quickly(now=True); run_kernels_quickly(); draw_figures_quickly()
        if Path(path).stem not in COUNTING: count_quickly()
        if is_watched(path): cpu_times.watch()
    gc.collect(); gc.freeze()   # what all begin with: collections of garbage need not look through it each time
    faulthandler.dump_traceback_later(NOTEBOOK_TIMEOUT, exit=True, file=2)
    from nbdev.test import nbdev_test
    nbdev_test(path, flags)
    if "cuda" not in flags and (wrong := shows_wrongly(path)): sys.exit(wrong)

def is_watched(path): return Path(path).parent.name[:1] in {*cpu_times.PARTS}

def shows_wrongly(path):
    "What is wrong with the speedups of this CPU that a lesson has shown, in words; nothing if they belong there"
    stem, shown = Path(path).stem, dict(cpu_times.SHOWN)
    if stem in cpu_times.CPU_EXPERIMENTS or not is_watched(path): return ""
    if stem in cpu_times.CPU_SPEEDUPS_AWAITING: return "" if shown or not Path("nbs/site/measurements").is_dir() else f"{path} shows no speedup of a CPU any more: take it out of cpu_times.CPU_SPEEDUPS_AWAITING"
    return "".join(f"{path} shows a speedup that this CPU measured, {text}: {line}\n" for line, text in shown.items())

# Starting a process also asks each other one whether it has ended. Its exit code can be read once: of two threads that read it, one finds
# nothing, and calls it 255
ONE_READER = threading.Lock()

def tested(start, path, flags):
    "Whether a notebook passes in a process of its own, and print that. nbdev_test ends well without a test: we want its `Success.`"
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        p = start(target=test, args=(path, flags, log.name))
        with ONE_READER: p.start()
        wait([p.sentinel])
        with ONE_READER: p.join()
        said = log.read()
    good, took = p.exitcode == 0 and "\nSuccess." in "\n" + said, time.monotonic() - began
    if good: print(f"ok      {took:4.0f} s  {path}", flush=True)
    else: print(f"FAILED  {took:4.0f} s  {path}\n{said}\nIt ended with exit code {p.exitcode}", flush=True)
    return good

def longest_first(paths): return sorted(paths, key=lambda p: LONG.index(Path(p).stem) if Path(p).stem in LONG else len(LONG))

def test_all(paths):
    "Test notebooks, and exit with 1 where one fails"
    import torch
    cuda, cores = torch.cuda.is_available(), os.cpu_count() or 1
    jobs, flags = (1, "cuda") if cuda else (min(4, cores + 1), "")
    preload = ["nbdev.test", "torch", "matplotlib.pyplot"]
    if not cuda:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores//jobs)))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1") # more begin with processes that import torch
        os.environ["TRITON_INTERPRET"] = "1"    # torch._dynamo imports triton, and notebooks run kernels in its interpreter
        preload.append("torch._dynamo")         # which each optimizer imports
        preload += ["llm_speedrun.train.trainer", "torch._inductor.pattern_matcher",
                    *(f"llm_speedrun.{p.parent.name}.{p.stem}" for folder in ("rungs", "recipes") for p in sorted(Path("llm_speedrun", folder).glob("[a-z]*.py")))]
        paths = longest_first(paths)
    # A process begins as a copy of one that has imported these
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(preload)
    with ThreadPoolExecutor(jobs) as pool: good = [*pool.map(lambda p: tested(processes.Process, p, flags), paths)]
    failed = sorted(p for p, g in zip(paths, good) if not g)
    if len(paths) > 1: print(f"{sum(good)} of {len(paths)} notebooks passed")
    if kept := os.environ.get("FAILED_NOTEBOOKS"): Path(kept).write_text("".join(f"{p}\n" for p in failed))
    if not failed: return
    if len(paths) > 1: print("These did not:", *(f"  {p}" for p in failed), sep="\n")
    sys.exit(1)

if __name__ == "__main__":
    named = [os.path.relpath(p, Path(__file__).parent.parent) for p in sys.argv[1:]]
    os.chdir(Path(__file__).parent.parent)
    test_all(named or sorted(str(p) for p in Path("nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts) or sys.exit("There are no notebooks in nbs/."))
