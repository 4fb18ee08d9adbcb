"Checkpoints of many processes: of each layout opened by each other and by one process; parts that fail, are missing, damaged or lie."
import json, math, os, shutil, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
import pytest, torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from llm_speedrun.files import InputError
from llm_speedrun.recipes.schedules import Average
from llm_speedrun.runs import World, build, stepper_of
from llm_speedrun.train import sharded
from llm_speedrun.train.saving import Saver, broken, check_size, checkpoints, newest, read_checkpoint, taken_apart
from llm_speedrun.train.sharded import *
from llm_speedrun.world import Piece, local, pieces, processes
from small import NANO, fails

CONFIG = replace(NANO, vocab=322, kv_heads=4) # 161 rows on each of two, 81 and 80 on each of four
FUSED = ["flash", "fused_ops", "chunked_ce"]
# name -> (processes along dp and tp, rungs)
LAYOUTS = {"one": ((1, 1), []), "ddp": ((2, 1), ["ddp"]), "fsdp": ((2, 1), ["fsdp"]), "tp": ((1, 2), ["tensor_parallel"]),
           "fsdp x tp": ((2, 2), ["fsdp", "tensor_parallel"])}

def in_layout(world, name, rungs=(), seed=0):
    "Run, stepper and average in that layout"
    (dp, tp), parallel = LAYOUTS[name]
    if world.size > 1: world = replace(world, mesh=dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")))
    run = build(CONFIG, [*FUSED, *rungs, *parallel], device="cpu", seed=seed, world=world)
    step = stepper_of(run)(run)
    return run, step, Average(step.params, .9)

def take(run, step, average, n):
    "The losses of so many steps, always of the same batch"
    x, y = torch.randint(320, (2, 4, CONFIG.seq), generator=torch.Generator().manual_seed(0))
    i, n_dp = run.world.place("dp")
    losses = []
    for _ in range(n):
        losses.append(step((x.chunk(n_dp)[i], y.chunk(n_dp)[i])).item())
        average.update()
    return losses

def saved(run, step, average, folder, n=2):
    "Save what they have"
    saver = saver_for(run.world, folder, run="run")
    state = dict(optimizer=optimizer_to_save(run, step), average=average_to_save(run, average),
                 rng=each(run.world, dict(cpu=torch.tensor([run.world.rank]))), rungs={}, stream=None)
    saver.save(n, weights_to_save(run), state, about=3)
    saver.close()
    return folder/f"step-{n:08}"

def loaded(world, name, checkpoint, rungs=()):
    "The run in that layout, with what the checkpoint has"
    run, step, average = in_layout(world, name, rungs, seed=1)
    read = read_any(checkpoint)
    load_weights(run, read)
    assert load_optimizer(run, step, read) == type(step.opt).__name__
    load_average(run, average, read)
    return run, step, average

def work(world, folder, names, sources):
    "In each process: save in each of the layouts `names`, then open each of `sources` in them, save that again, take a step"
    said = {}
    for name in names:
        parts = in_layout(world, name)
        said[name] = take(*parts, 2)
        saved(*parts, folder/name)
        said[name] += take(*parts, 1)
    if world.size == 2: said["8bit"] = eight_bits(world, folder)
    for source in sources:
        wait_for(found := folder/source/"step-00000002")
        for name in names:
            parts = loaded(world, name, found)
            saved(*parts, folder/f"{source} in {name}")
            said[f"{source} in {name}"] = take(*parts, 1)
    whole = whole_weights(parts[0])
    if world.first: save_file(whole, folder/f"whole {name}.safetensors")
    torch.manual_seed(0)
    said["weights"] = {n: t.double().sum().item() for n, t in weights_of(parts[0]).items()} 
    return said

def weights_of(run): return {n: getattr(p, "full_tensor", lambda: p)().detach() for n, p in run.model.named_parameters()}

def eight_bits(world, folder):
    "Moments as codes, and weights in bf16 with lower halves: saved, and opened in the same layout. What differs"
    bad = []
    for rungs in (["adamw8bit"], ["bf16", "bf16_weights:rounding=master:moments=8bit"]):
        at = folder/rungs[-1].partition(":")[0]
        parts = in_layout(world, "fsdp", rungs)
        take(*parts, 2)
        before = named_tensors(*parts)
        assert any(t.dtype == torch.int8 for t in before.values())
        again = loaded(world, "fsdp", saved(*parts, at), rungs)
        after = named_tensors(*again)
        bad += [k for k in {**before, **after} if not torch.equal(before[k], after[k])]
        bad += ["loss"]*(take(*parts, 1) != take(*again, 1))
    return bad

def named_tensors(run, step, average):
    tensors = {}
    taken_apart(dict(opt=step.opt.state_dict(), mean=[local(m) for m in average.mean],
                     weights=[local(p) for p in run.model.parameters()]), tensors)
    return {k: t.clone() for k, t in tensors.items()}

def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(.05)

@pytest.fixture(scope="module")
def world_of_all(tmp_path_factory):
    "A folder with a checkpoint of each layout, opened in each other; and what the first processes say"
    folder = tmp_path_factory.mktemp("sharded")
    with ThreadPoolExecutor(2) as pool:
        two = pool.submit(processes, 2, work, folder, ["ddp", "fsdp", "tp"], [*LAYOUTS])
        four = pool.submit(processes, 4, work, folder, ["fsdp x tp"], [*LAYOUTS], tp=2)
        one = work(World(), folder, ["one"], [*LAYOUTS])
        return folder, one | two.result()[0] | four.result()[0], [two.result(), four.result()]

def tensors_of(checkpoint):
    "All tensors of a checkpoint as one process reads it"
    model, state, about = read_checkpoint(checkpoint)
    tensors = {}
    taken_apart(dict(model=model, optimizer=state["optimizer"], average=state["average"]), tensors)
    return tensors

@pytest.mark.parametrize("source", LAYOUTS)
def test_each_layout_opens_each(world_of_all, source):
    "Weights, moments and averages are the same bits after a way through another layout, and the next step's loss is the same"
    folder, said, _ = world_of_all
    want = tensors_of(folder/source/"step-00000002")
    assert len(want) > 60
    for name in LAYOUTS:
        got = tensors_of(folder/f"{source} in {name}"/"step-00000002")
        assert got.keys() == want.keys()
        for k in want: assert torch.equal(want[k], got[k]), (name, k)
        assert said[f"{source} in {name}"][0] == pytest.approx(said[source][2], abs=1e-5), name

def test_all_layouts_train_alike(world_of_all):
    "So what is saved is of the same run: losses and weights agree with one process's"
    folder, said, _ = world_of_all
    want = tensors_of(folder/"one"/"step-00000002")
    for name in LAYOUTS:
        assert said[name] == pytest.approx(said["one"], abs=1e-4)
        got = tensors_of(folder/name/"step-00000002")
        assert got.keys() == want.keys()
        for k in want: torch.testing.assert_close(got[k], want[k], atol=2e-4, rtol=2e-2, msg=f"{name} {k}")
        check_size(CONFIG, folder/name/"step-00000002")
        assert not broken(folder/name/"step-00000002") and not [*(folder/name).glob(".*")] + [*(folder/name).glob("*.tmp")]

def test_the_same_layout_to_the_bit(world_of_all):
    "Codes of moments and lower halves of weights come back as they were, on each process"
    for answers in world_of_all[2]:
        for said in answers: assert not said.get("8bit"), said["8bit"]

def test_eight_bits_of_many_in_one(world_of_all):
    "One process opens codes of two: it has codes again, of the whole"
    folder, _, _ = world_of_all
    for at, rungs in (("adamw8bit", ["adamw8bit"]), ("bf16_weights", ["bf16", "bf16_weights:rounding=master:moments=8bit"])):
        found = folder/at/"step-00000002"
        run, step, average = loaded(World(), "one", found, rungs)
        model, state, _ = read_checkpoint(found)
        for n, kept in step.opt.state.items(): assert kept["exp_avg"].isfinite().all()
        mine = optimizer_to_save(run, step)
        want, got = {}, {}
        taken_apart(state["optimizer"], want); taken_apart(mine, got)
        assert want.keys() == got.keys() and any(t.dtype == torch.int8 for t in got.values())
        for k in want: assert torch.equal(want[k], got[k]), k

def test_the_whole_model(world_of_all):
    "What the first process gathers is what the checkpoint has, but for the last step"
    folder, _, _ = world_of_all
    for name in LAYOUTS:
        if not (path := folder/f"whole {name}.safetensors").exists(): continue
        got = load_file(path)
        assert sum(t.numel() for t in got.values()) == sum(t.numel() for t in read_checkpoint(folder/name/"step-00000002")[0].values())

def test_own_states(world_of_all):
    "Of what each process has its own, each gets its own again, and one of many more some"
    folder, _, _ = world_of_all
    read = read_any(folder/"fsdp x tp"/"step-00000002")
    assert [state_of(read, r)["rng"]["cpu"].item() for r in range(6)] == [0, 1, 2, 3, 0, 1]
    assert read.about.facts == dict(about=3) and state_of(read)["stream"] is None
