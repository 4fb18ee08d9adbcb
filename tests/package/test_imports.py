"The package imports where Triton, torchao, Liger, pyplot, the network and CUDA are missing, quickly, and changes nothing by it."
import json, multiprocessing, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest
import llm_speedrun
from llm_speedrun.distributed.spawn import free_port
from llm_speedrun.io_utils import LOOPBACK, python_command, safe_children
from helpers.timeouts import TIMEOUT
from helpers.tiny_runs import write_bins

HERE = Path(__file__).parents[1]
PACKAGE = Path(llm_speedrun.__file__).parent
MODULES = sorted(".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py") if not p.stem.startswith("_"))

RUNGS = "tf32 bf16 flash fused_ops chunked_ce fp8 selective_checkpoint fused_adamw".split()

# Runs in a process of its own: what is missing there is missing from the start.
SCRIPT = """
import importlib, json, socket, sys
MISSING, tried = ("triton", "torchao", "liger_kernel", "bitsandbytes", "matplotlib.pyplot", "nvidia"), []
class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in MISSING):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
def no_network(*args, **kw): tried.append(str(args)); raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = no_network
import torch
from helpers.torch_globals import flags, random_states
from helpers.timeouts import calls_of
settings = lambda: flags() | random_states()
before, seen = settings(), set(sys.modules)
def imported():
    for name in MODULES: importlib.import_module(f"llm_speedrun.{name}")
calls = calls_of(imported)
after, new = settings(), set(sys.modules) - seen
from llm_speedrun.model_config import workload
from llm_speedrun.runs import build
from llm_speedrun.stepper import Stepper
from dataclasses import replace
step = Stepper(build(replace(workload("tiny"), layers=1, seq_len=16), RUNGS))
x = torch.arange(16, device=step.run.device)[None]
changed = [k for k in before if before[k] != after[k]]
print(json.dumps(dict(changed=changed, calls=calls, new=sorted(new), tried=tried, loss=step((x, x)).item())))
"""

@pytest.fixture(scope="module")
def there(tmp_path_factory):
    "What the process above said"
    folder = tmp_path_factory.mktemp("script")
    (folder/"script.py").write_text(f"MODULES = {MODULES}\nRUNGS = {RUNGS}\n{SCRIPT}", encoding="utf-8")
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(map(str, (HERE.parent, HERE))))
    cmd = [sys.executable, str(folder/"script.py")]
    res = subprocess.run(cmd, capture_output=True, text=True, env=env, cwd=folder, timeout=TIMEOUT)
    assert res.returncode == 0, res.stderr
    return json.loads(res.stdout.splitlines()[-1]) | dict(warned=res.stderr)

def test_every_module_imports(there):
    "Every module imports without Triton, torchao, Liger, pyplot, network and CUDA, and a step with all rungs runs there"
    assert {"measure", "data.batches", "model", "rungs.tf32", "rungs.amp", "rungs.flash", "rungs.fused_ops", "rungs.chunked_ce", "rungs.fp8", "rungs.fused_fp8",
            "rungs.compile", "rungs.checkpointing", "rungs.fused_adamw", "rungs.optim", "train.trainer", "train.ladder"} <= set(MODULES)
    assert {f"llm_speedrun.{m}" for m in MODULES} <= set(there["new"]) and 0 < there["loss"] < 20

def test_nothing_is_missed_aloud(there):
    "PyTorch warns of a missing Triton once for each of our operations: a run of a plain wheel, or on macOS, shows none of it"
    assert there["warned"] == ""

def test_importing_sets_nothing(there):
    "Importing the package leaves every process-wide setting and the random states as they were"
    assert there["changed"] == []

def test_importing_asks_for_no_network(there):
    "Importing opens no connection"
    assert there["tried"] == []

def test_importing_is_quick(there):
    "Beyond torch, the imports take little time, and leave the slow packages for when they are needed"
    slow = set("transformers datasets pandas pyarrow sklearn scipy IPython huggingface_hub triton torchao liger_kernel matplotlib".split())
    assert not slow & set(there["new"]) and there["calls"] < 4_000_000, there["calls"]

HEAVY = set("""torch._dynamo torch._inductor sympy torch.distributed.tensor torch.distributed.fsdp torch.onnx torch.profiler torch.utils.tensorboard
    torchao transformers accelerate peft liger_kernel quack flash_attn cutlass bitsandbytes datasets pyarrow pandas huggingface_hub
    scipy sklearn matplotlib PIL IPython ipywidgets jinja2 tensorboard wandb pynvml""".split())

# Also runs in a process of its own, in which nothing is missing
LEAN = """
import json, sys
import torch
known, loaded = set(sys.modules), {}
def note(what): loaded[what] = sorted(HEAVY & (set(sys.modules) - known))
import llm_speedrun.cli; note("the commands")
import llm_speedrun.train.trainer, llm_speedrun.tools.doctor; note("the trainer and the doctor")
from llm_speedrun.runs import build
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.presets import preset
preset("fastest"); note("every rung")
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.checkpoint.format import named_state
from llm_speedrun.generate import generate
for recipe in ("speedrun", "muon"):
    made = parse_recipe(recipe)
    config = made.shape(workload("tiny"))
    run = made(build(config, ["tf32", "fused_ops", "chunked_ce"], model=made.model))
    step = Stepper(run)
    x = torch.arange(config.seq_len)[None]
    step((x, x)); note(f"a step of {recipe}")
    named_state(run.model, step.opt); generate(run, [1, 2], 2); note(f"what is saved of {recipe}, and a sample")
print(json.dumps(loaded))
"""

def test_heavy_modules_wait(tmp_path):
    "From the command to the first step, nothing is imported that takes long and that a default run does without"
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(map(str, (HERE.parent, HERE))))
    cmd = [sys.executable, "-c", f"HEAVY = {HEAVY}\n{LEAN}"]
    res = subprocess.run(cmd, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=TIMEOUT)
    assert res.returncode == 0, res.stderr
    loaded = json.loads(res.stdout.splitlines()[-1])
    assert not any(loaded.values()), loaded

# In each process of a run, and once more for the run that goes on
FIRST_STEP = """
import json, os, sys
import torch
known = set(sys.modules)
from llm_speedrun.train import trainer
from llm_speedrun.train.config import TrainConfig
take, heavy = trainer.Trainer.first_step, lambda: sorted(HEAVY & (set(sys.modules) - known))
def first_step(t, x, y):
    before = heavy()
    found[f"before the first step of a {'resumed' if t.record else 'new'} run"] = before
    if ENDS: print(json.dumps(found), flush=True); os._exit(0)
    loss = take(t, x, y)
    found[f"after the first step of a {'resumed' if t.record else 'new'} run"] = heavy()
    return loss
trainer.Trainer.first_step, trainer.Trainer.finish, found = first_step, trainer.Trainer.stop_fast, {}
options = dict(data="bins", model="tiny", seq_len=16, step_tokens=64, vocab=300, eval_tokens=64, name="run", num_evals=1, lr=1e-3)
runs = dict(options, recipe=RECIPE, rungs=RUNGS, steps=2), dict(resume="runs/run", steps=3), dict(resume="runs/run", steps=4)
for how in (runs[i] for i in WHICH):
    trainer.train(TrainConfig(**how), progress=False)[0].coordinator.stop_watching()
print(json.dumps(found))
"""

@pytest.mark.parametrize("recipe, rungs", [("speedrun", "flash:backend=flash"), ("adamw", "flash:backend=flash,adamw8bit")])
def test_heavy_modules_wait_for_the_first_step(tmp_path, recipe, rungs):
    """A run and one that goes on, of one process or two, take their first step without PyTorch's compiler, and without sympy, which autograd imports
    where it is given a gradient. PyTorch's DDP, which a CPU takes, imports them in the first step: the two end before it"""
    write_bins(tmp_path/"bins")
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(map(str, (HERE.parent, HERE))), OMP_NUM_THREADS="1",
                            LLM_SPEEDRUN_CACHE=str(tmp_path/"cache"))
    def found_by(n, *which): # processes; runs that each begins, of which 1 and 2 go on
        code = f"HEAVY, RECIPE, RUNGS, WHICH, ENDS = {HEAVY}, {recipe!r}, {rungs!r}, {which}, {n > 1}\n{FIRST_STEP}"
        group = dict(WORLD_SIZE=str(n), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
        ps = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                               env=env | (group | dict(RANK=str(i), LOCAL_RANK=str(i)) if n > 1 else {})) for i in range(n)]
        outs = [p.communicate(timeout=TIMEOUT) for p in ps]
        assert not any(p.returncode for p in ps), outs
        return [json.loads(out.splitlines()[-1]) for out, _ in outs]
    [alone] = found_by(1, 0, 1)
    assert len(alone) == 4 and not any(alone.values()), alone
    if recipe != "speedrun": return
    two = found_by(2, 2) # from the checkpoint of one process
    shutil.rmtree(tmp_path/"runs/run")
    for found in two + found_by(2, 0): assert len(found) == 1 and not any(found.values()), found

def sources(): return {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"}

def test_one_way_to_start_python():
    "`python_command`, and the encoder pool's own, which takes Python's isolated mode"
    assert {name for name, text in sources().items() if "sys.executable" in text} == {"io_utils.py", "data/encoder_pool.py"}
    spawning = {name for name, text in sources().items() if re.search(r"get_context\(|mp\.Process|multiprocessing\.Process|ProcessPool", text)}
    assert spawning == {"distributed/spawn.py"} and "with safe_children(): p.start()" in sources()["distributed/spawn.py"]

@pytest.fixture
def hostile(tmp_path, monkeypatch):
    "The current folder has files that are called as modules of Python"
    for name in ("random", "queue", "socket", "pickle", "selectors"): (tmp_path/f"{name}.py").write_text("open('executed', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path

def test_files_of_the_current_folder(hostile):
    "They are not executed by a child; they would be by `python -c`"
    code = "import random, queue, socket, pickle, sys; import llm_speedrun.io_utils as f; print(f.__file__, *sys.argv[1:])"
    out = subprocess.run(python_command(code, "a", "b"), capture_output=True, text=True, timeout=TIMEOUT)
    assert out.stdout.split() == [str(PACKAGE/"io_utils.py"), "a", "b"] and not (hostile/"executed").exists(), out.stderr
    subprocess.run([sys.executable, "-c", "import queue"], timeout=TIMEOUT)
    assert (hostile/"executed").exists()

def test_two_threads_leave_no_trace(monkeypatch):
    "One that is inside longer than the other, as threads may be"
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    first, second = safe_children(), safe_children()
    first.__enter__(); second.__enter__(); first.__exit__(None, None, None)
    assert os.environ["PYTHONSAFEPATH"] == "1"
    second.__exit__(None, None, None)
    assert "PYTHONSAFEPATH" not in os.environ

@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python knows PYTHONSAFEPATH from 3.11 on")
def test_processes_of_libraries(hostile):
    "Those that `multiprocessing` spawns don't execute them either"
    with safe_children():
        p = multiprocessing.get_context("spawn").Process(target=os.getpid)
        p.start(); p.join(TIMEOUT)
    assert p.exitcode == 0 and not (hostile/"executed").exists() and "PYTHONSAFEPATH" not in os.environ
