"FSDP2 wraps a run by hand: two processes, each with half of the batch, take the steps of one process."
import json, os, socket, subprocess, sys
from pathlib import Path
import pytest, torch

HERE = Path(__file__).parent
RUNGS = {"naive": [], "chunked_ce": ["flash", "chunked_ce"], "fused_ops": ["flash", "fused_ops"],
         "checkpoint": ["flash", "fused_ops", "chunked_ce", "checkpoint"], "fp8": ["bf16", "flash", "fused_ops", "chunked_ce", "fp8"]}

# What a process does: ten steps with each list of rungs, alone or as one of two. Prints losses, norms and sums of the weights.
SCRIPT = """
import json, os, sys
from dataclasses import replace
import torch, torch.distributed as dist
from small import NANO
from llm_speedrun.runs import Stepper, build
engine, lists = sys.argv[1], json.loads(sys.argv[2])
config, world = replace(NANO, layers=3), int(os.environ.get("WORLD_SIZE", 1))
if world > 1: dist.init_process_group("gloo")
rank = dist.get_rank() if world > 1 else 0
mine = slice(None) if world == 1 else slice(2*rank, 2*rank + 2)
x, y = torch.randint(config.vocab, (2, 4, config.seq), generator=torch.Generator().manual_seed(0))

def wrapped(run):
    if engine == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (world,))
        for m in (*run.model.layers, run.model): fully_shard(m, mesh=mesh)
    return run

def steps(rungs):
    step = Stepper(wrapped(build(config, rungs, device="cpu")), clip=.5)
    for _ in range(10):
        loss = step((x[mine], y[mine]))
        if world > 1: dist.all_reduce(loss); loss /= world
        yield loss.item(), step.norm.item()
    whole = [getattr(p, "full_tensor", lambda: p)().detach() for p in step.params]
    yield sum(p.abs().sum().item() for p in whole), sum(p.sum().item() for p in whole)

said = {k: list(steps(r)) for k, r in lists.items()}
if rank == 0: print(json.dumps(said))
if world > 1: dist.destroy_process_group()
"""

def free_port():
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); return s.getsockname()[1]

def processes(engine, world, folder):
    "What the first of `world` processes says"
    (folder/"script.py").write_text(SCRIPT, encoding="utf-8")
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(map(str, (HERE.parent, HERE))))
    if world > 1: env |= dict(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    cmd = [sys.executable, str(folder/"script.py"), engine, json.dumps(RUNGS)]
    ps = [subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env | dict(RANK=str(r)))
          for r in range(world)]
    outs = [p.communicate(timeout=200) for p in ps]
    for p, (_, err) in zip(ps, outs): assert p.returncode == 0, err[-3000:]
    return json.loads(outs[0][0].splitlines()[-1])

@pytest.fixture(scope="module")
def alone(tmp_path_factory): return processes("none", 1, tmp_path_factory.mktemp("alone"))

@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("engine", ["fsdp"])
def test_two_processes_are_one(engine, alone, tmp_path):
    "Losses, norms and the weights at the end; in FP8 the maxima are each process's own, and the scales with them"
    both = processes(engine, 2, tmp_path)
    for name, want in alone.items():
        assert want[0][0] - want[-2][0] > .02, name    # they learn something
        bar = dict(rel=3e-3, abs=2e-2) if name == "fp8" else dict(rel=2e-4, abs=1e-4)
        for i, (a, b) in enumerate(zip(want, both[name])): assert b == pytest.approx(a, **bar), (name, i)
