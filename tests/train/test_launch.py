"The launcher of `--gpus`: restarts in words, hosts without a name, and the cores that there are."
import os, re, shutil, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import pytest
from helpers import quick_programs
from helpers.timeouts import TIMEOUT
from llm_speedrun import io_utils
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.launch import GROUP_ENV, RETRY, configure_torchrun, failure_text, leave_reason, torchrun_args

pytestmark = pytest.mark.skipif(os.name != "posix", reason="torchrun starts processes that signals end")
LAUNCH = """import sys
from llm_speedrun.io_utils import clean_errors
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.launch import start_group
clean_errors(lambda: start_group(2, TrainConfig(name="run", restarts=int(sys.argv[2])), {"name", "restarts"}, sys.argv[1]))"""

def launched(program, restarts, *before, popen=quick_programs.Popen):
    "Exit code, output and errors of two processes that run a program"
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    p = popen([*before, sys.executable, "-c", LAUNCH, program, str(restarts)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
              env=env, start_new_session=True)
    try: out, err = p.communicate(timeout=TIMEOUT)
    finally: p.kill()
    return p.returncode, out, err

ONE_DIES = "import os, signal\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' {more}else signal.pause()"

def test_restart_in_words():
    "One line for each restart, and an error only where there is none left; nothing of torchrun's own log"
    code, out, err = launched(ONE_DIES.format(more=""), 2)
    said = "worker 1 exited with signal 9"
    assert code == 2 and err.splitlines()[:2] == [f"{said}; restarting, {i} of 2" for i in (1, 2)], err
    assert re.fullmatch(f"error: {said}, after 2 restarts \\(--restarts\\)[^\n]*go on with --resume\n", err.split("2 of 2\n")[1]), err

def test_a_restart_that_succeeds_prints_no_error():
    again = "and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' "
    code, out, err = launched(ONE_DIES.format(more=again).replace("signal.pause()", "0"), 3)
    assert (code, err) == (0, "worker 1 exited with signal 9; restarting, 1 of 3\n")

LOST = """import os, signal
from llm_speedrun.distributed.world import PeerLostError
from llm_speedrun.train.launch import exit_with_error
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': exit_with_error(PeerLostError(
    'process 1 of 2 does not answer: it was last seen at step 7, 9 s ago. Go on from a checkpoint (--resume). (timed out)'))"""

def test_a_process_that_hangs_is_named_once():
    "Where no process crashed, the reason is what the others say of the one that doesn't answer, without advice to resume what goes on by itself"
    code, out, err = launched(LOST, 3)
    assert (code, err) == (0, "process 1 of 2 does not answer: it was last seen at step 7, 9 s ago; restarting, 1 of 3\n")

def test_a_reason_is_whole(monkeypatch, tmp_path):
    "torchrun may end a process while it writes its reason: that of another one stays"
    monkeypatch.setenv(GROUP_ENV, str(tmp_path))
    leave_reason("process 1 of 2 does not answer")
    def killed(self, *args, **kw): self.touch(); self.open("w").close(); raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt): leave_reason("process 1 of 2 does not answer")
    assert failure_text({0: SimpleNamespace(exitcode=RETRY, timestamp=1)}, 0) == "process 1 of 2 does not answer"

RENAMED = """from torch.distributed.launcher import api
code = api.launch_agent.__code__
api.launch_agent.__code__ = code.replace(co_names=tuple("Other" if n == "LocalElasticAgent" else n for n in code.co_names))
api.Other = vars(api).pop("LocalElasticAgent")
"""

def test_a_torchrun_with_other_names(monkeypatch):
    "Its restarts are not told in words but by its own log: the processes run, and fail, as with any other"
    monkeypatch.setitem(globals(), "LAUNCH", RENAMED + LAUNCH)
    again = "and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' "
    code, out, err = launched(ONE_DIES.format(more=again).replace("signal.pause()", "0"), 3)
    assert code == 0 and "failed (exitcode: -9) local_rank: 1" in err and "restarting" not in err, err
    code, out, err = launched(ONE_DIES.format(more=""), 0)
    assert code == 2 and "error: worker 1 exited with signal 9, after 0 restarts" in err, err

MEETS = """import os
from llm_speedrun.distributed.world import join_world, leave_world
world = join_world(); world.barrier()
print(f'process {world.rank} of {world.size}\\n', end='', flush=True) # in one write
leave_world(); os._exit(0)"""

def test_one_machine_needs_no_name(monkeypatch):
    assert "--local-addr=127.0.0.1" in torchrun_args(2, TrainConfig(), ["program"], "folder")
    monkeypatch.setattr(os, "environ", env := dict(GLOO_SOCKET_IFNAME="eth7"))
    configure_torchrun()
    assert env["GLOO_SOCKET_IFNAME"] == "eth7" # what was set stays

NAMELESS = "unshare", "-u", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"

def can_rename(): return bool(shutil.which("unshare") and shutil.which("hostname")) and not subprocess.run([*NAMELESS, "true"], capture_output=True).returncode

def test_processes_meet_where_the_host_has_no_address():
    "By `--gpus` and in a notebook: no lookup of the machine's name, which may hang, and no warning of one"
    if not can_rename(): pytest.skip("this machine's name can't be changed for a process")
    code, out, err = launched(MEETS, 0, *NAMELESS, popen=subprocess.Popen)
    assert (code, sorted(out.splitlines()), err) == (0, ["process 0 of 2", "process 1 of 2"], "")
    spawned = subprocess.run([*NAMELESS, sys.executable, "-c", "from llm_speedrun.distributed.spawn import run_distributed\n"
        "import operator\nif __name__ == '__main__': print(run_distributed(2, operator.attrgetter('rank')))"], capture_output=True, text=True,
        timeout=TIMEOUT)
    assert (spawned.stdout, spawned.stderr) == ("[0, 1]\n", "")

# --- cores ---

@pytest.mark.parametrize("quota, n", [("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2), ("max 100000", 16), ("9900000 100000", 16),
                                      (None, 16), ("garbage", 16)])
def test_cores_of_a_container(monkeypatch, tmp_path, quota, n):
    "Affinity and quota both limit what the machine has"
    if quota is not None: (tmp_path/"cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(io_utils, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert io_utils.usable_cores() == n
    if quota is None:
        monkeypatch.setattr(os, "environ", env := {})
        configure_torchrun()
        assert env["OMP_NUM_THREADS"] == "2"
        monkeypatch.delattr(os, "sched_getaffinity")
        assert io_utils.usable_cores() == 64

def test_cores_of_an_older_container(monkeypatch, tmp_path):
    (tmp_path/"cpu").mkdir()
    for name, text in dict(quota="300000", period="100000").items(): (tmp_path/f"cpu/cpu.cfs_{name}_us").write_text(text)
    monkeypatch.setattr(io_utils, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert io_utils.usable_cores() == 3
    (tmp_path/"cpu/cpu.cfs_quota_us").write_text("-1") # none
    assert io_utils.usable_cores() == 16
