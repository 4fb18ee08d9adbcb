"What a checkpoint promises at the moment in which it appears: everything in it is on the disk, and has its sums."
import json, os, sys, threading
from pathlib import Path
import pytest, torch
from helpers import quick_programs
from helpers.tiny_runs import fails
from helpers.timeouts import TIMEOUT
from safetensors.torch import load_file
from llm_speedrun import io_utils
from llm_speedrun.checkpoint import format, save as saving
from llm_speedrun.checkpoint.format import replace_tensors, validation_error, write_checkpoint
from llm_speedrun.checkpoint.save_sharded import ShardedSaver
from test_sharded import save, together

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only there does an open file tell its name")
W = {"w": torch.arange(1000.)}

@pytest.fixture
def order(monkeypatch):
    "What is synced and renamed, in this order: pairs of the verb and the path that it had"
    res, sync, rename, replace = [], io_utils.sync_descriptor, Path.rename, Path.replace
    def synced(fd): sync(fd); res.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
    def moved(f):
        def g(self, to): res.append(("rename", Path(self))); return f(self, to)
        return g
    monkeypatch.setattr(io_utils, "sync_descriptor", synced)
    monkeypatch.setattr(Path, "rename", moved(rename)); monkeypatch.setattr(Path, "replace", moved(replace))
    return res

def before_rename(order, path):
    "What was synced when `path` was renamed"
    return {p for verb, p in order[:order.index(("rename", path))] if verb == "sync"}

@linux
def test_all_is_synced_before_the_rename(tmp_path, order):
    "Every file of a checkpoint and its folder; and the file of the weights"
    write_checkpoint(tmp_path/"step-00000001", dict(model=W, state=W), dict(step=1, state=None))
    tmp = tmp_path/"step-00000001.tmp"
    assert before_rename(order, tmp) == {tmp, *(tmp/n for n in ("model.safetensors", "state.safetensors", "about.json", "manifest.json"))}
    assert order[-1] == ("sync", tmp_path) and not validation_error(tmp_path/"step-00000001")
    replace_tensors(W, tmp_path/"a.safetensors")
    assert before_rename(order, tmp_path/"a.safetensors.tmp") >= {tmp_path/"a.safetensors.tmp"} and order[-1] == ("sync", tmp_path)

@linux
def test_all_parts_are_synced_before_the_rename(tmp_path, order):
    def two(world):
        saver = ShardedSaver(tmp_path, world=world, patience=TIMEOUT)
        assert save(saver, 1) is None and {*saver.spent} == {"copies", "write", "sync", "others"}
        saver.close()
    assert together(2, two) == [None]*2
    tmp = next(p for verb, p in order if verb == "rename" and p.name.startswith("step-"))
    names = "part-00000.safetensors part-00001.safetensors index.json about.json manifest.json".split()
    assert before_rename(order, tmp) >= {tmp, *(tmp/n for n in names)}

@pytest.mark.parametrize("at", [0, 1])
def test_a_file_that_cannot_be_synced(tmp_path, monkeypatch, at):
    "It is an error that names the file, and there is no checkpoint"
    sync, n = os.fsync, []
    def fsync(fd):
        n.append(fd)
        if len(n) == at + 1: raise OSError(5, "Input/output error")
        sync(fd)
    monkeypatch.setattr(os, "fsync", fsync)
    with fails(OSError, "Input/output error", "step-00000001.tmp/"): write_checkpoint(tmp_path/"step-00000001", dict(model=W), dict(step=1, state=None))
    assert not [*tmp_path.iterdir()]

AT_EXIT = """
import sys, threading, time, torch
from concurrent.futures import thread
from llm_speedrun.checkpoint import save
began, write = threading.Event(), save.write_checkpoint
def late(*args):
    began.set()
    while not thread._shutdown: time.sleep(.001)
    write(*args)
save.write_checkpoint = late
saver = save.Saver(sys.argv[1])
saver.save(1, dict(w=torch.ones(1000)), {})
saver.save_file(sys.argv[1] + "/weights.safetensors", dict(w=torch.ones(3)))
began.wait()
"""

def test_what_is_being_written_when_python_exits(tmp_path):
    "It is written to its end, with and without threads, which Python 3.12 doesn't start then"
    out = quick_programs.run([sys.executable, "-c", AT_EXIT, str(tmp_path/"c")], capture_output=True, text=True, timeout=TIMEOUT)
    assert out.returncode == 0 and not out.stderr, out.stderr
    assert not validation_error(tmp_path/"c/step-00000001") and {p.name for p in (tmp_path/"c").iterdir()} == {"step-00000001", "weights.safetensors"}

def test_copies_that_are_being_written_stay(tmp_path, monkeypatch):
    "A signal ends the waiting for a checkpoint; the next one uses the memory of its copies only when it is written"
    go, write = threading.Event(), saving.write_checkpoint
    monkeypatch.setattr(saving, "write_checkpoint", lambda *args: go.wait(TIMEOUT) and write(*args))
    saver = saving.Saver(tmp_path)
    saver.save(1, dict(w=torch.ones(3)), {})
    first, asked = saver.writing[0], []
    ended = first.exception
    def exception(): # the first time a signal ends the waiting
        asked.append(1)
        if len(asked) == 1: raise KeyboardInterrupt
        go.set()
        return ended()
    first.exception = exception
    with pytest.raises(KeyboardInterrupt): saver.wait()
    saver.save(2, dict(w=torch.zeros(3)), {})
    go.set(); saver.close()
    for step, value in ((1, 1.), (2, 0.)): assert (load_file(tmp_path/f"step-0000000{step}/model.safetensors")["w"] == value).all()

def test_without_threads(tmp_path, monkeypatch):
    def none(thread): raise RuntimeError("can't create new thread at interpreter shutdown")
    monkeypatch.setattr(io_utils.Thread, "start", none)
    write_checkpoint(tmp_path/"step-00000001", dict(model=W, state=W), dict(step=1, state=None))
    assert not validation_error(tmp_path/"step-00000001")

def test_a_checkpoint_of_an_older_version(tmp_path):
    "With one sum for a file: valid, and a wrong bit is seen"
    write_checkpoint(c := tmp_path/"step-00000001", dict(model=W), dict(step=1, state=None))
    files = {p.name: dict(bytes=p.stat().st_size, sha256=io_utils.file_sha256(p)) for p in c.iterdir() if p.name != "manifest.json"}
    (c/"manifest.json").write_text(json.dumps(dict(files=files, sum=format.manifest_sum(files))))
    assert not validation_error(c)
    data = bytearray((c/"model.safetensors").read_bytes()); data[-1] ^= 1
    (c/"model.safetensors").write_bytes(data)
    assert "model.safetensors doesn't match its sum" in validation_error(c)
