import os
os.environ.setdefault("MPLBACKEND", "Agg")     # charts are written to files here, never to a window
# The models of the tests are too small for several threads: where a core has more to do, these wait for one another most of the time.
# With workers, they share the cores, and so do the programs that they start
share = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", os.cpu_count() or 1))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1") # more begin with processes that import torch, for code of a few lines
import gc, importlib, pickle, shutil, signal, subprocess, sys, time, traceback, uuid
from contextlib import suppress
from pathlib import Path
import numpy as np, pytest, torch
from filelock import FileLock
from helpers.timeouts import FakeClock

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as a shell starts its jobs in the background: programs of tests would be deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
# What processes of the tests import besides torch: they begin as copies of this one, which has done so
NEEDED = ["torch._dynamo", "torch._inductor.pattern_matcher", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "llm_speedrun.train.trainer",
          "matplotlib.pyplot",
          *(f"llm_speedrun.{p.parent.name}.{p.stem}" for folder in ("rungs", "recipes", "tools") for p in sorted((ROOT/"llm_speedrun"/folder).glob("[a-z]*.py")))]

if not torch.cuda.is_available():
    os.environ["IN_TEST"] = "1"     # few repetitions, where nothing is worth measuring
    # Kernels must be made for Triton's interpreter, before any test imports them. Whether they are used is asked at each
    # call: tests of kernels set this to 1, whole models would take the interpreter minutes.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in NEEDED:
        with suppress(ImportError): importlib.import_module(name)
    if os.name == "posix":
        from helpers.quick_start import start_quickly
        start_quickly(now=True)
    os.environ["TRITON_INTERPRET"] = "0"
    from helpers.quick_kernels import run_kernels_quickly
    run_kernels_quickly()
    if os.name == "posix": import helpers.quick_programs   # whose copies have these settings

@pytest.fixture
def kernels(monkeypatch):
    "Kernels run in the interpreter where there is no GPU (and by PyTorch where there is no Triton)"
    if not torch.cuda.is_available(): monkeypatch.setenv("TRITON_INTERPRET", "1")

@pytest.fixture
def gpu_casts(kernels, monkeypatch):
    """Kernels that treat NaN as a GPU does. The interpreter's cast to E4M3 makes 384 of it; and where its maximum keeps NaN,
    PTX's drops it"""
    if torch.cuda.is_available(): return
    triton = pytest.importorskip("triton.runtime.interpreter")
    convert, e4m3 = triton._convert_float, triton.tl.float8e4nv
    def cast(x, source, to, rounding):
        out = convert(x, source, to, rounding)
        if to == e4m3: out[np.isnan(x.view(f"f{x.itemsize}"))] = 0x7f
        if source == e4m3: out[(x.view(np.uint8) & 0x7f) == 0x7f] = 0x7e00
        return out
    monkeypatch.setattr(triton, "_convert_float", cast)
    for name, f in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(triton.InterpreterBuilder, name, lambda self, a, b, f=f: self.binary_op(a, b, f))

@pytest.fixture
def clock(monkeypatch):
    "A `FakeClock` in place of `time.perf_counter` and `time.sleep`"
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock

@pytest.fixture(scope="session", autouse=True)
def cache(shared_folder):
    """Tests, and the programs that they start, keep tokens and choices in a folder of this session, which begins with the user's
    tokens of the standard library (some seconds of work)"""
    from llm_speedrun.io_utils import cache_dir
    folder = shared_folder/"cache"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            for corpus in cache_dir().glob("stdlib-*"):
                with suppress(OSError): (folder/corpus.name).symlink_to(corpus, target_is_directory=True) # Windows may forbid it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_SPEEDRUN_CACHE", str(folder))
        yield folder

@pytest.fixture(scope="session")
def choices_folder(tmp_path_factory):
    "One for all tests: to make a folder pytest looks through all that it has made before, which are thousands"
    return tmp_path_factory.mktemp("choices")

@pytest.fixture(autouse=True)
def choices(choices_folder, monkeypatch):
    "What a test measures is remembered in a file of its own"
    path = choices_folder/f"{uuid.uuid4().hex}-choices.json"
    monkeypatch.setattr("llm_speedrun.choices.choices_path", lambda: path)
    return path

@pytest.fixture(autouse=True)
def same_numbers():
    """Random numbers of a test don't depend on which tests its worker ran before. Where there is a CPU alone, `torch.manual_seed` takes note of
    the seed for four kinds of devices, each time with the stack that asked: a millisecond a test, and memory that is never given back"""
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)

@pytest.fixture(autouse=True)
def no_strays(monkeypatch):
    "What a test starts and doesn't wait for, as one that fails may, is killed: it would take the cores from all later tests"
    started = []
    class Process(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
    monkeypatch.setattr(subprocess, "Popen", Process)
    safe = os.environ.get("PYTHONSAFEPATH")
    yield
    for p in started:
        if p.poll() is None: p.kill(); p.wait()
    assert os.environ.get("PYTHONSAFEPATH") == safe, "it would tell the programs of later tests where not to look for modules"

sys.path.append(str(ROOT/"nbs/site/_build"))    # the site's own code
sys.path += [str(p) for p in (ROOT/"tests").iterdir() if p.is_dir()]  # some tests use what those of another folder have

def process(tmp):
    "What `make docs` gives to Quarto: pages that are generated, and notebooks with what nbdev adds to them"
    shutil.copy(ROOT/"settings.ini", tmp)
    left_out = shutil.ignore_patterns(".*", "__pycache__")
    for folder in ("nbs", "llm_speedrun"): shutil.copytree(ROOT/folder, tmp/folder, ignore=left_out)
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, (tmp/"nbs/site/_build", ROOT))))
    def run(*command):
        p = subprocess.run([sys.executable, *command], cwd=tmp, env=env, capture_output=True, text=True)
        assert p.returncode == 0 and "Warning" not in p.stderr, p.stderr
    run("nbs/site/_build/build_pages.py")
    run("-c", "from nbdev.serve import proc_nbs; proc_nbs(n_workers=0)")

@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    "A folder of this session that all workers see"
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

@pytest.fixture(scope="session")
def once(shared_folder):
    "`once(name, f)`: what `f()` returns, called by one of the workers and kept for the others; where it fails, all of them hear why"
    def get(name, f):
        path, failed = shared_folder/f"{name}.pickle", shared_folder/f"{name}.failed"
        with FileLock(f"{path}.lock"):
            if failed.exists(): pytest.fail(f"{name} could not be made:\n{failed.read_text(encoding='utf-8')}", pytrace=False)
            try:
                if not path.exists(): path.write_bytes(pickle.dumps(f()))
            except Exception:
                failed.write_text(traceback.format_exc(), encoding="utf-8")
                raise
        return pickle.loads(path.read_bytes())
    return get

@pytest.fixture(scope="session")
def processed(shared_folder):
    "The pages as Quarto gets them, in a folder of their own that is made once and shared by all workers"
    site = shared_folder/"site"
    with FileLock(f"{site}.lock"):
        if not (site/"whole").exists():
            shutil.rmtree(site, ignore_errors=True)
            site.mkdir()
            process(site)
            (site/"whole").touch()
    return site/"_proc"

@pytest.fixture(scope="session")
def site():
    "The built site, which SITE=folder gives; without it a skip where there is none, or one older than its sources"
    if given := os.environ.get("SITE"): return ROOT/given
    home = ROOT/"_docs/index.html"
    if not home.exists(): pytest.skip("the site isn't built: make docs")
    left_out = {".ipynb_checkpoints", "__pycache__"}
    sources = [f for f in (ROOT/"nbs").rglob("*") if f.is_file() and not left_out & set(f.parts)]
    newest = max([ROOT/"_quarto.yml", *sources], key=lambda f: f.stat().st_mtime)
    if newest.stat().st_mtime > home.stat().st_mtime:
        pytest.skip(f"the site is older than {newest.relative_to(ROOT)}: make docs")
    return ROOT/"_docs"

def pytest_xdist_auto_num_workers():
    """For `-n auto`: with a GPU no workers, since tests time things there and fill its memory. Else one more than there are cores, up to
    four, since many tests wait for programs that they have started"""
    return 0 if torch.cuda.is_available() else min(4, (os.cpu_count() or 1) + 1)

def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU, skipped where there is none")
    config.addinivalue_line("markers", "slow: one more case of what other tests check too; runs where SLOW=1 is set")

def pytest_collection_finish():
    "What is loaded now stays: a collection of garbage, which tests and PyTorch's compiler ask for, need not look through it each time"
    gc.collect(); gc.freeze()

def pytest_unconfigure(): gc.unfreeze() # else libraries say that it is left

FIRST = "elastic ddp fsdp tensor_parallel sharded_muon world" # they wait for processes: at the end of all nobody else would use the cores meanwhile

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in FIRST.split())
    later = pytest.mark.skip(reason="slow, and others check the same in other cases: set SLOW=1 to run it")
    for item in items:
        if "slow" in item.keywords and not os.environ.get("SLOW"): item.add_marker(later)
    if torch.cuda.is_available(): return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use, and this machine has none")
    for item in items:
        if "cuda" in item.keywords: item.add_marker(skip)

def pytest_terminal_summary(terminalreporter):
    "The notebooks that failed before pytest began, since their own words stand far above"
    path = os.environ.get("FAILED_NOTEBOOKS", "")
    if not os.path.isfile(path) or not (failed := Path(path).read_text().split()): return
    terminalreporter.section("notebooks that failed, see above for why", red=True)
    for p in failed: terminalreporter.write_line(f"FAILED {p}")
