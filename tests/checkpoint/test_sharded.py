"Checkpoints of many processes: of each layout opened by each other and by one process; parts that fail, are missing, damaged or lie."
import json, math, os, shutil, signal, threading
from types import SimpleNamespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
import pytest, torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from llm_speedrun.tools.export import export_folder, unfinished
from llm_speedrun.pretrained import from_pretrained, read_run
from llm_speedrun.io_utils import InputError
from llm_speedrun.recipes.schedules import WeightEMA
from llm_speedrun.runs import build
from llm_speedrun.stepper import Stepper
from llm_speedrun.distributed.world import World
from llm_speedrun.checkpoint import format, save_sharded as sharded
from llm_speedrun.checkpoint.format import checkpoints, flatten_state, newest, synced_sums, validation_error, write_manifest
from llm_speedrun.checkpoint.load import check_size, newest_on_all_ranks, OpenCheckpoint, rank_state, read_checkpoint
from llm_speedrun.checkpoint.save import Saver
from llm_speedrun.checkpoint.save_sharded import make_saver, per_rank, ShardedSaver, to_shard
from llm_speedrun.checkpoint.state import (average_to_save, full_state_dict, load_average, load_optimizer, load_weights,
                                           optimizer_to_save, state_to_save, weights_to_save)
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.sharding import Shard, local
from helpers.tiny_runs import NANO, fails
from helpers.timeouts import TIMEOUT, calls_of, wait_until

CONFIG = replace(NANO, layers=1, vocab=322, kv_heads=4) # 161 rows on each of two, 81 and 80 on each of four
FUSED = ["flash", "fused_ops", "chunked_ce"]
# name -> (processes along dp and tp, rungs)
LAYOUTS = {"one": ((1, 1), []), "ddp": ((2, 1), ["ddp"]), "fsdp": ((2, 1), ["fsdp"]), "tp": ((1, 2), ["tensor_parallel"]),
           "fsdp x tp": ((2, 2), ["fsdp", "tensor_parallel"]), "hsdp": ((4, 1), ["fsdp:replicas=2"])}

@cache
def mesh_of(*shape): return dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))

def in_layout(world, name, rungs=(), seed=0):
    "Run, stepper and average in that layout"
    (dp, tp), parallel = LAYOUTS[name]
    if world.size > 1 and (dp, tp) != world.mesh.shape: world = replace(world, mesh=mesh_of(dp, tp))
    run = build(CONFIG, [*FUSED, *rungs, *parallel], device="cpu", seed=seed, world=world)
    step = Stepper(run)
    return run, step, WeightEMA(step.params, .9)

def take(run, step, average, n):
    "The losses of so many steps, always of the same batch"
    x, y = torch.randint(320, (2, 4, CONFIG.seq_len), generator=torch.Generator().manual_seed(0))
    i, n_dp = run.world.rank_and_size("dp")
    losses = []
    for _ in range(n):
        losses.append(step((x.chunk(n_dp)[i], y.chunk(n_dp)[i])).item())
        average.update()
    return losses

def saved(run, step, average, folder, n=2):
    "Save what they have"
    saver = make_saver(run.world, folder, run="run")
    state = dict(optimizer=optimizer_to_save(run, step), average=average_to_save(run, average),
                 rng=per_rank(run.world, dict(cpu=torch.tensor([run.world.rank]))), rungs={}, stream=None)
    saver.save(n, weights_to_save(run), state, about=3)
    saver.close()
    return folder/f"step-{n:08}"

@torch.no_grad()
def loaded(parts, checkpoint):
    "The run, stepper and average with what the checkpoint has"
    run, step, average = parts
    for t in (*run.model.parameters(), *average.mean): local(t.detach()).fill_(torch.nan)
    read = OpenCheckpoint(checkpoint)
    load_weights(run, read)
    assert load_optimizer(run, step, read) == type(step.opt).__name__
    load_average(run, average, read)
    return parts

def work(world, folder, names, sources):
    "In each process: save in each of the layouts `names`, then open each of `sources` in them, save that again, take a step"
    said, others = {}, {name: in_layout(world, name, seed=1) for name in names} # of other weights, and no moments
    for name in names:
        parts = in_layout(world, name)
        said[name] = take(*parts, 2)
        saved(*parts, folder/name)
        said[name] += take(*parts, 1)
    if world.size == 2: said["8bit"] = eight_bits(world, folder)
    for source in sources:
        wait_until((found := folder/source/"step-00000002").exists)
        for name in names:
            parts = loaded(others[name], found)
            saved(*parts, folder/f"{source} in {name}")
            said[f"{source} in {name}"] = take(*parts, 1)
    for name in names:
        whole = full_state_dict(others[name][0])
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
        again = loaded(in_layout(world, "fsdp", rungs, seed=1), saved(*parts, at))
        after = named_tensors(*again)
        bad += [k for k in {**before, **after} if not torch.equal(before[k], after[k])]
        bad += ["loss"]*(take(*parts, 1) != take(*again, 1))
    return bad

def named_tensors(run, step, average):
    tensors = {}
    flatten_state(dict(opt=step.opt.state_dict(), mean=[local(m) for m in average.mean],
                     weights=[local(p) for p in run.model.parameters()]), tensors)
    return {k: t.clone() for k, t in tensors.items()}

@pytest.fixture(scope="module")
def world_of_all(once, shared_folder):
    "A folder with a checkpoint of each layout, opened in each other; and what the first processes say"
    def make():
        folder = shared_folder/"sharded"
        folder.mkdir()
        with ThreadPoolExecutor(2) as pool:
            two = pool.submit(run_distributed, 2, work, folder, ["ddp", "fsdp", "tp"], [*LAYOUTS])
            four = pool.submit(run_distributed, 4, work, folder, ["fsdp x tp", "hsdp"], [*LAYOUTS], tp=2)
            one = work(World(), folder, ["one"], [*LAYOUTS])
            return folder, one | two.result()[0] | four.result()[0], [two.result(), four.result()]
    return once("sharded", make)

def tensors_of(checkpoint):
    "All tensors of a checkpoint as one process reads it"
    model, state, about = read_checkpoint(checkpoint)
    tensors = {}
    flatten_state(dict(model=model, optimizer=state["optimizer"], average=state["average"]), tensors)
    return tensors

@pytest.mark.parametrize("source", LAYOUTS)
def test_each_layout_opens_each(world_of_all, source):
    "Weights, moments and averages are the same bits after a way through another layout, and the next step's loss is the same"
    folder, said, _ = world_of_all
    want = tensors_of(folder/source/"step-00000002")
    assert len(want) > 40
    for name in LAYOUTS:
        got = tensors_of(folder/f"{source} in {name}"/"step-00000002")
        assert got.keys() == want.keys()
        for k in want: assert torch.equal(want[k], got[k]), (name, k)
        assert said[f"{source} in {name}"][0] == pytest.approx(said[source][2], abs=0 if name == source else 1e-5), name

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
        assert not validation_error(folder/name/"step-00000002") and not [*(folder/name).glob(".*")] + [*(folder/name).glob("*.tmp")]

def test_the_same_layout_to_the_bit(world_of_all):
    "Codes of moments and lower halves of weights come back as they were, on each process"
    for answers in world_of_all[2]:
        for said in answers: assert not said.get("8bit"), said["8bit"]

def test_eight_bits_of_many_in_one(world_of_all):
    "One process opens codes of two: it has codes again, of the whole"
    folder, _, _ = world_of_all
    for at, rungs in (("adamw8bit", ["adamw8bit"]), ("bf16_weights", ["bf16", "bf16_weights:rounding=master:moments=8bit"])):
        found = folder/at/"step-00000002"
        run, step, average = loaded(in_layout(World(), "one", rungs, seed=1), found)
        model, state, _ = read_checkpoint(found)
        for n, kept in step.opt.state.items(): assert kept["exp_avg"].isfinite().all()
        mine = optimizer_to_save(run, step)
        want, got = {}, {}
        flatten_state(state["optimizer"], want); flatten_state(mine, got)
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
    read = OpenCheckpoint(folder/"fsdp x tp"/"step-00000002")
    assert [rank_state(read, r)["rng"]["cpu"].item() for r in range(6)] == [0, 1, 2, 3, 0, 1]
    assert read.about.facts == dict(about=3) and rank_state(read)["stream"] is None

# What goes wrong, with processes that are threads

class InThread:
    "A `World` whose processes are threads of one"
    run_on_rank_zero, broadcast_object = World.run_on_rank_zero, lambda self, x=None: self.all_gather_object(x)[0]
    first = property(lambda self: self.rank == 0)
    def wait_for_rank_zero(self): "What it broadcasts is waited for without a limit"
    def __init__(self, rank, size, box, barrier): self.rank, self.size, self.box, self.barrier = rank, size, box, barrier
    def all_gather_object(self, x):
        self.box[self.rank] = x; self.barrier.wait()
        res = list(self.box); self.barrier.wait()
        return res

def together(n, f, *args):
    "What `f(world, *args)` returns or raises in each of `n`"
    box, barrier = [None]*n, threading.Barrier(n, timeout=TIMEOUT)
    def one(rank):
        try: return f(InThread(rank, n, box, barrier), *args)
        except Exception as e: barrier.abort() if isinstance(e, AssertionError) else None; return e
    with ThreadPoolExecutor(n) as pool: return [*pool.map(one, range(n))]

W = torch.arange(80.).view(8, 10)
def part_of(world):
    "What a process holds of W: of four one quarter each, of two some columns"
    i, j = divmod(world.rank, 2)
    rows, cols = slice(4*i, 4*i + 4) if world.size == 4 else slice(0, 8), (slice(0, 4), slice(4, 10))[j]
    return Shard(W[rows, cols].clone(), (8, 10), (rows.start, cols.start), True)

def save(saver, step):
    "Save something; what that raises in the end"
    world = saver.world
    state = dict(one=torch.tensor(step), list=[torch.ones(3)*step, None, (1.5, math.inf)], rng=per_rank(world, torch.tensor([world.rank])))
    saver.save(step, {"w": part_of(world)}, state)
    try: saver.wait()
    except OSError as e: return e

@pytest.fixture(scope="module")
def good(tmp_path_factory):
    "A checkpoint that four wrote"
    folder = tmp_path_factory.mktemp("good")
    def four(world):
        saver = ShardedSaver(folder, run="r", world=world)
        assert save(saver, 7) is None; saver.close()
    assert together(4, four) == [None]*4
    return folder/"step-00000007"

@pytest.fixture
def some(good, tmp_path): return Path(shutil.copytree(good, tmp_path/"kept"/good.name))

def rewritten(c, name, change):
    "A file's JSON changed, and the manifest made to agree"
    text = json.loads((c/name).read_text()); change(text); (c/name).write_text(json.dumps(text))
    signed(c)

def signed(c):
    (c/"manifest.json").unlink(missing_ok=True)
    write_manifest(c, synced_sums(sorted(c.iterdir())))

def test_what_is_there(good):
    "Files, index and tensors; any box can be read"
    assert sorted(p.name for p in good.iterdir()) == ["about.json", "index.json", "manifest.json", *(f"part-{r:05}.safetensors" for r in range(4))]
    assert not validation_error(good) and [p.name for p in good.parent.iterdir()] == [good.name]
    read = OpenCheckpoint(good)
    for i in range(8):
        for j in range(10): assert torch.equal(read["model.w"].box((i, j), (8 - i, 10 - j)), W[i:, j:])
    assert read["model.w"].box((2, 3), (0, 4)).shape == (0, 4) and read.index.tensors["state.one"].boxes[0].file == "part-00000.safetensors"
    model, state, about = read_checkpoint(good)
    assert torch.equal(model["w"], W) and state["list"][1:] == [None, (1.5, math.inf)] and state["rng"].item() == 0 and about.run == "r"
    for box in (((0, 0), (9, 10)), ((7, 9), (1, 2)), ((-1, 0), (1, 1))):
        with fails(InputError, "no whole model.w"): read["model.w"].box(*box)
    with fails(InputError, "no tensor model.x"): read["model.x"]

def fill_disk(monkeypatch, *full):
    "Files of these names are on a disk without room, from the second checkpoint's on to the third's"
    real = format.save_file
    def save_file(tensors, path, metadata):
        if path.name in full and "step-00000002" in str(path):
            path.write_bytes(b"half of it")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path, metadata)
    monkeypatch.setattr(format, "save_file", save_file)

def test_a_full_disk_on_one(tmp_path, monkeypatch):
    "Everybody learns which process and why, nothing is left of it, and the run goes on to the next checkpoint"
    fill_disk(monkeypatch, "part-00001.safetensors")
    def four(world):
        saver, errors = ShardedSaver(tmp_path, keep=2, world=world, patience=TIMEOUT), []
        errors += [save(saver, 1), save(saver, 2)]
        world.all_gather_object(0)
        left = {p for p in tmp_path.rglob("*.safetensors")}
        world.all_gather_object(0)
        errors.append(save(saver, 3)); saver.close()
        return errors, left
    for (ok, error, again), left in together(4, four):
        assert ok is None and again is None
        assert "process 1 on" in str(error) and "step-00000002" in str(error) and "no space left" in str(error), error
        assert len(left) == 4 # of the first checkpoint
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000003"] and not validation_error(tmp_path/"step-00000003")

def test_a_disk_without_room_for_a_word(tmp_path, monkeypatch):
    "Not even the reason can be written: the process is named"
    fill_disk(monkeypatch, "part-00002.safetensors")
    write_text = Path.write_text
    def no_text(self, *args, **kw):
        if self.suffix == ".note": raise OSError(28, "No space left on device")
        return write_text(self, *args, **kw)
    monkeypatch.setattr(Path, "write_text", no_text)
    errors = together(4, lambda world: save(ShardedSaver(tmp_path, world=world, patience=TIMEOUT), 2))
    assert all("process 2" in str(e) for e in errors) and sum("is its disk full" in str(e) for e in errors) == 3, errors
    assert not checkpoints(tmp_path) and not [*tmp_path.rglob("*.safetensors")]

@pytest.mark.parametrize("name", ["index.json", "about.json", "manifest.json"])
def test_the_first_fails_at_the_end(tmp_path, monkeypatch, name):
    "All parts are written, and what makes them a checkpoint can't be: all learn that"
    write_text = Path.write_text
    def no_text(self, *args, **kw):
        if self.name == name: raise OSError(28, "No space left on device")
        return write_text(self, *args, **kw)
    monkeypatch.setattr(Path, "write_text", no_text)
    errors = together(2, lambda world: save(ShardedSaver(tmp_path, world=world, patience=TIMEOUT), 1))
    assert all("process 0 on" in str(e) and "No space" in str(e) for e in errors), errors
    assert not checkpoints(tmp_path)

def test_silence(tmp_path):
    "A process that writes nothing, without a word: named after some time"
    def two(world):
        saver = ShardedSaver(tmp_path, world=world, patience=.3)
        return save(saver, 1) if world.first else None
    error, _ = together(2, two)
    assert "process 1 on" in str(error) and "written nothing for" in str(error)

def test_another_folder(tmp_path, monkeypatch):
    "Processes whose folders have one name and aren't the same: told before anything is trained"
    monkeypatch.setattr(sharded, "blind_ranks", partial(sharded.blind_ranks, seconds=.2))
    errors = together(3, lambda world: ShardedSaver(tmp_path/("a" if world.rank < 2 else "b"), world=world, patience=TIMEOUT))
    assert all(isinstance(e, InputError) and "process 2 on" in str(e) and "disk that all machines share" in str(e) for e in errors), errors

def test_bad_keep(tmp_path):
    assert all(isinstance(e, InputError) and "keep must be" in str(e) for e in together(2, lambda w: ShardedSaver(tmp_path, keep=0, world=w)))

def test_pruned_by_the_first(tmp_path):
    "The newest and the best stay; a run that goes on removes later ones, and what was left by a killed one"
    (tmp_path/"step-00000009.abc-1.tmp").mkdir()
    def two(world):
        saver = ShardedSaver(tmp_path, keep=2, world=world)
        saver.losses = {1: 5., 2: 3., 3: 4.}
        for step in (1, 2, 3, 4, 5): assert save(saver, step) is None
        world.all_gather_object(0) # the first process removes after the others are told
        assert [p.name[-1] for p in sorted(tmp_path.iterdir())] == ["2", "4", "5"]
        saver.go_on(4); assert save(saver, 5) is None
        saver.close()
    assert together(2, two) == [None]*2
    assert [p.name[-1] for p in sorted(tmp_path.iterdir())] == ["2", "4", "5"]

class InFork(InThread):
    "A `World` whose two processes are one and its fork"
    def __init__(self, folder): self.folder, self.rank, self.size, self.n = folder, 0, 2, 0
    def all_gather_object(self, x):
        self.n += 1
        files = [self.folder/f"said-{self.n}-{r}" for r in range(2)]
        (mine := self.folder/f"mine-{self.rank}").write_text(json.dumps(x)); mine.replace(files[self.rank])
        for f in files: wait_until(f.exists)
        return [json.loads(f.read_text()) for f in files]

@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only there can a process see that another one has died")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_killed_while_writing(tmp_path):
    "Nobody waits for a process that is dead; the checkpoint before stays, and the next start removes what is left"
    def killed(tensors, path):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    world, c = InFork(tmp_path), tmp_path/"c"
    pid = os.fork()
    world.rank = int(not pid)
    try:
        saver = ShardedSaver(c, world=world, patience=TIMEOUT)
        assert save(saver, 1) is None
        if not pid: sharded.write_tensors = killed
        error = save(saver, 2)
    finally:
        if not pid: os._exit(1)
    os.waitpid(pid, 0) # until here it is a zombie
    assert "process 1 has died" in str(error), error # and not that nothing was written for the time of `patience`
    assert newest(c).name == "step-00000001" and len([*c.glob("step-00000002.*.tmp/part-00001.safetensors")]) == 1
    def start(world): ShardedSaver(c, world=world, patience=TIMEOUT).close()
    assert together(2, start) == [None]*2 and [p.name for p in c.iterdir()] == ["step-00000001"]

# What is read

@pytest.mark.parametrize("name", ["part-00002.safetensors", "index.json", "about.json", "manifest.json"])
@pytest.mark.parametrize("how", ["bit", "short", "missing"])
def test_damaged(some, name, how):
    "Named with its file, passed over, alone and together"
    path, data = some/name, (some/name).read_bytes()
    if how == "missing": path.unlink()
    else: path.write_bytes(data[:-9] if how == "short" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    why, said = validation_error(some), []
    assert why and (name in why or name == "manifest.json")
    assert newest(some.parent, log_info=said.append) is None and why in said[0]
    said = together(4, lambda world: newest_on_all_ranks(world, some.parent, log_info=(words := []).append) or words)
    assert said[1:] == [[], [], []] and len(said[0]) == 1 and (name in said[0][0] or name == "manifest.json")

def test_together_takes_the_newest_of_the_run(good, some):
    later = Path(shutil.copytree(good, some.parent/"step-00000009"))
    rewritten(later, "about.json", lambda a: a.update(step=9, run="other"))
    assert together(3, lambda world: newest_on_all_ranks(world, some.parent, "r", log_info=lambda s: None)) == [some]*3
    assert together(3, lambda world: newest_on_all_ranks(world, some.parent)) == [later]*3
    assert together(2, lambda world: newest_on_all_ranks(world, some.parent/"nowhere")) == [None]*2

def test_a_shard_is_gone(some):
    "The other parts can be read; what was in that one is an error with its name"
    (some/"part-00003.safetensors").unlink()
    read = OpenCheckpoint(some)
    assert torch.equal(read["model.w"].box((0, 0), (4, 10)), W[:4])
    with fails(InputError, r"part-00003.safetensors can't be used"): read["model.w"].whole()
    with fails(InputError, r"part-00003.safetensors"): read_checkpoint(some)

def first_box(index): return index["tensors"]["model.w"]["boxes"][0]
LIES = dict(
    negative=lambda i: first_box(i).update(start=[-4, 0]), huge=lambda i: first_box(i).update(size=[2**39, 2**39]),
    beyond=lambda i: first_box(i).update(size=[2**41, 1]), shape=lambda i: i["tensors"]["model.w"].update(shape=[2**39, 2**39]),
    grown=lambda i: [i["tensors"]["model.w"].update(shape=[2**30, 2**30], boxes=[first_box(i) | dict(size=[2**30, 2**30])])],
    overlap=lambda i: first_box(i).update(start=[4, 0]), twice=lambda i: i["tensors"]["model.w"]["boxes"].append(first_box(i)),
    gap=lambda i: i["tensors"]["model.w"]["boxes"].pop(), none=lambda i: i["tensors"]["model.w"].update(boxes=[]),
    many=lambda i: i["tensors"]["model.w"].update(boxes=[first_box(i)]*5000), moved=lambda i: first_box(i).update(start=[0, 1]),
    dims=lambda i: first_box(i).update(start=[0], size=[16]), deep=lambda i: i["tensors"]["model.w"].update(shape=[1]*9),
    outside=lambda i: first_box(i).update(file="../../part-00000.safetensors"), pipe=lambda i: first_box(i).update(file="index.json"),
    line=lambda i: first_box(i).update(file="part-00000.safetensors\n"), other=lambda i: first_box(i).update(file="part-00001.safetensors"),
    unknown=lambda i: first_box(i).update(file="part-00009.safetensors"), own=lambda i: i["own"].update({"state.rng": []}),
    loop=lambda i: i["own"].update({"state.rng": [dict(tensor="state.rng")]}), text=lambda i: first_box(i).update(start=["0", 0]),
    lost=lambda i: i["tensors"].pop("state.one"), nothing=lambda i: i.clear())

@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies(some, lie):
    "An `InputError` at once, without the memory it speaks of"
    rewritten(some, "index.json", LIES[lie])
    assert not validation_error(some)
    def read():
        with fails(InputError, "step-00000007|state"): read_checkpoint(some)
    assert calls_of(read) < 20_000

@pytest.mark.parametrize("state", [None, [], {"dict": 3}, {"dict": [["a"]]}, {"tensor": "state.one"}])
def test_no_state(some, state):
    rewritten(some, "about.json", lambda a: a.update(state=state))
    with fails(InputError, "state"): read_checkpoint(some)

def test_shards_of_other_types(some):
    "A tensor whose parts don't agree on their type"
    path = some/"part-00001.safetensors"
    save_file({k: t.double() for k, t in load_file(path).items()}, path); signed(some)
    with fails(InputError, "float64"): read_checkpoint(some)

def test_an_older_checkpoint_of_one(tmp_path):
    "What `Saver` writes is what it was: two files of tensors, version 2; and can be read box by box"
    saver = Saver(tmp_path, run="r")
    saver.save(3, {"w": W}, dict(optimizer={}, x=[torch.ones(2, dtype=torch.int16)])); saver.close()
    c = tmp_path/"step-00000003"
    assert sorted(p.name for p in c.iterdir()) == ["about.json", "manifest.json", "model.safetensors", "state.safetensors"]
    assert json.loads((c/"about.json").read_text())["version"] == 2
    read = OpenCheckpoint(c)
    assert torch.equal(read["model.w"].box((1, 2), (3, 4)), W[1:4, 2:6]) and torch.equal(rank_state(read, 5)["x"][0], torch.ones(2, dtype=torch.int16))
    (c/"model.safetensors").write_bytes(b"x"*100)
    with fails(InputError, "model.safetensors"): OpenCheckpoint(c)

def test_what_cannot_be_saved(tmp_path):
    class Part(torch.Tensor):
        def to_local(self): return self
    p = Shard(torch.zeros(2, 3), (4, 3), (0, 0), True)
    with fails(TypeError, "DTensor"): to_shard(torch.zeros(3).as_subclass(Part), True)
    with fails(InputError, "rows of w can't be cut"): state_to_save("w", p, dict(rows=torch.zeros(2)))
    assert state_to_save("w", p, dict(step=torch.tensor(3.), n=2)) == dict(step=torch.tensor(3.), n=2)

def test_export_opens_a_checkpoint_of_many(world_of_all, tmp_path):
    "`speedrun_export` and `speedrun_sample` take a checkpoint's folder, of whatever layout; a damaged one is an error"
    folder, run = world_of_all[0], tmp_path/"run"
    found = run/"checkpoints/step-00000002"
    shutil.copytree(folder/"fsdp x tp"/"step-00000002", found)
    (run/"config.json").write_text(json.dumps(dict(model_config=asdict(CONFIG), steps=9)))
    want = {f"model.{n}": t for n, t in read_checkpoint(found)[0].items()}
    config, state = read_run(found)
    assert config == CONFIG and state.keys() == {n[6:] for n in want}
    assert "step-00000002" in unfinished(found)
    out = export_folder(found)
    assert out == run/"export" and all(torch.equal(t, want[n]) for n, t in load_file(out/"model.safetensors").items())
    assert torch.equal(from_pretrained(found, "cpu").model.embed_tokens.weight, want["model.embed_tokens.weight"])
    (found/"part-00001.safetensors").unlink()
    with fails(InputError, "part-00001.safetensors is missing"): read_run(found)

def cut_of(start, size, shape=(4, 4)): return dict(w=sharded.ShardMetadata([*shape], [*start], [*size]))

@pytest.mark.parametrize("parts", [[((0, 0), (2, 4)), ((0, 0), (2, 4))], [((0, 0), (4, 2)), ((0, 1), (4, 2))], [((0, 0), (2, 4)), ((3, 0), (2, 4))],
                                   [((0, 0), (2, 4))]], ids=["twice", "overlap", "beyond", "missing"])
def test_parts_that_are_no_whole_are_not_saved(parts):
    "Also where their sizes add up"
    named = {f"part-0000{i}.safetensors": sharded.RankManifest(None, cut_of(*p), {}) for i, p in enumerate(parts)}
    with fails(OSError, "parts of w don't make the whole"): sharded.build_index(named)

def test_empty_parts_are_no_overlap():
    named = {f"part-0000{i}.safetensors": sharded.RankManifest(None, cut_of(*p), {}) for i, p in enumerate([((0, 0), (4, 4)), ((4, 0), (0, 4)), ((4, 0), (0, 4))])}
    assert len(sharded.build_index(named)["tensors"]["w"]["boxes"]) == 3
    assert sharded.build_index({"part-00000.safetensors": sharded.RankManifest(None, cut_of((0, 0), (0, 4), (0, 4)), {})})

@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_save_is_looked_at_seldom(rank, tmp_path, monkeypatch):
    "All processes ask one disk: in ten minutes a hundred times each, not twelve thousand"
    now, looks, folder = [0.], [], tmp_path/"step-00000001"
    folder.mkdir()
    def there(tmp):
        looks.append(now[0])
        return {} if now[0] < 600 else {"part-00000.json": 1, "part-00001.json": 1} if rank == 0 else None
    monkeypatch.setattr(sharded, "file_sizes", there)
    monkeypatch.setattr(sharded, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)))
    saver = SimpleNamespace(world=World(rank, 2), check_late=lambda late, seconds: None)
    ShardedSaver.wait_for_parts(saver, tmp_path/"a.tmp", folder)
    assert len(looks) < 250 and looks[2] < .2 and looks[-1] < 606
