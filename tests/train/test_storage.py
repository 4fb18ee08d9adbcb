"Storage that lacks what a local disk has: bucket mounts, FUSE, NFS without its lock daemon. What a run can do without, it does without; what it needs, it misses before the first step."
import errno, fcntl, io, os, stat
from pathlib import Path
import pytest
from helpers.tiny_runs import cache, fails, nano, options
from llm_speedrun.checkpoint.format import checkpoints, newest, validation_error, write_checkpoint
from llm_speedrun.choices import Choices
from llm_speedrun.data.token_files import TokenWriter
from llm_speedrun.io_utils import RunError, lock_dir, replace_file
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.trainer import train

def refuse(monkeypatch, holder, name, code, when=lambda *args: True):
    "Let `holder.name` fail with that error code"
    old = getattr(holder, name)
    def f(*args, **kw):
        if when(*args): raise OSError(code, os.strerror(code))
        return old(*args, **kw)
    monkeypatch.setattr(holder, name, f)

is_folder = lambda fd, *_: stat.S_ISDIR(os.fstat(fd).st_mode)

@pytest.mark.parametrize("name, code, when", [
    ("chmod", errno.EPERM, lambda *_: True), ("chmod", errno.ENOSYS, lambda *_: True),
    ("fsync", errno.EINVAL, is_folder), ("fsync", errno.ENOSYS, lambda *_: True)])
def test_a_run_does_without(tmp_path, monkeypatch, name, code, when):
    "Permissions are a nicety, and who has no fsync has nothing to wait for"
    refuse(monkeypatch, os, name, code, when)
    _, res = train(options(tmp_path, save_minutes=0.), progress=False)
    assert res["steps"] == 6 and newest(tmp_path/"runs/run/checkpoints").name == "step-00000006"
    assert (tmp_path/"runs/run/model.safetensors").exists()

def test_what_the_disk_could_not_keep_is_an_error(tmp_path, monkeypatch):
    refuse(monkeypatch, os, "fsync", errno.EIO)
    with pytest.raises(OSError): replace_file(tmp_path/"a", "text", sync=True)

def test_token_files_do_without_fsync(tmp_path, monkeypatch):
    refuse(monkeypatch, os, "fsync", errno.EINVAL)
    w = TokenWriter(tmp_path, "train", "<u2", 10)
    w.write([1, 2, 3]); w.close()
    assert (tmp_path/"train_000.bin").stat().st_size == 6

appends = lambda path, mode="r", *_: "a" in mode and Path(path).name == "metrics.jsonl"

@pytest.mark.parametrize("holder, name, code, when", [
    (os, "rename", errno.ENOSYS, lambda a, *_: Path(a).is_dir()), (os, "replace", errno.EPERM, lambda a, b: Path(b).exists()),
    (io, "open", errno.EOPNOTSUPP, appends), (os, "rmdir", errno.EPERM, lambda p, *_, **kw: True)])
def test_missing_before_the_first_step(tmp_path, monkeypatch, holder, name, code, when):
    "Renaming a folder, replacing a file, appending and removing are what saving needs"
    monkeypatch.setattr(Stepper, "__call__", lambda *args: pytest.fail("it has trained"))
    with monkeypatch.context() as m:
        refuse(m, holder, name, code, when)
        with fails(OSError, "runs/run can't hold a run: ", os.strerror(code), "--out"): train(options(tmp_path), progress=False)
    assert name == "rmdir" or not (tmp_path/"runs").exists()

def test_half_a_probe_is_no_run(tmp_path):
    "A process that was killed while it tried the storage leaves a folder that the next one may take"
    (tmp_path/"runs/run/.probe").mkdir(parents=True); (tmp_path/"runs/run/.lock").touch()
    _, res = train(options(tmp_path, steps=1), progress=False)
    assert res["steps"] == 1 and not (tmp_path/"runs/run/.probe").exists()

@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_flock(request, monkeypatch): refuse(monkeypatch, fcntl, "flock", request.param)

@pytest.mark.filterwarnings("ignore:flock not supported")
def test_locks_without_flock(tmp_path, without_flock):
    "A file that only its owner removes holds the folder. The error names it, since a crashed owner may leave it"
    lock = lock_dir(tmp_path/"run", "this run")
    with fails(RunError, "another process is writing this run", "remove .*/run/.lock"): lock_dir(tmp_path/"run", "this run")
    lock.release()
    lock_dir(tmp_path/"run", "this run").release()
    said = []
    choices = Choices(tmp_path/"choices.json", log_info=said.append)
    assert choices.get("kernel", {}, lambda: "flash") == choices.get("kernel", {}, lambda: pytest.fail("it forgot")) == "flash"
    assert len(said) == 1 and "as measured here" in said[0]

@pytest.mark.filterwarnings("ignore:flock not supported")
def test_run_without_flock(tmp_path, without_flock):
    _, res = train(options(tmp_path, steps=1), progress=False)
    with fails(FileExistsError, "exists already"): train(options(tmp_path), progress=False)
    assert res["steps"] == 1 and not [*(tmp_path/"runs/run").glob(".lock?*")]

def test_any_other_error_of_a_lock_has_its_path(tmp_path, monkeypatch):
    refuse(monkeypatch, fcntl, "flock", errno.EIO)
    with fails(OSError, str(tmp_path/"run/.lock"), "can't be locked"): lock_dir(tmp_path/"run", "this run")
