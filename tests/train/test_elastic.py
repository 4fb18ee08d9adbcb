"""Several processes train as one: by --gpus, on two GPUs or on a CPU. One dies in mid-step, and the run ends where it would have ended.
Many times in one run, some six seconds each on an idle CPU: KILLS=20 pytest tests/train/test_elastic.py -k many"""
import json, os, re, signal, subprocess, sys
from pathlib import Path
import pytest, torch
from helpers import quick_programs
from helpers.tiny_runs import write_bins
from helpers.timeouts import TIMEOUT, until_some_moment, wait_until
from llm_speedrun.train.config import TrainConfig, to_args
from llm_speedrun.checkpoint.format import checkpoints

pytestmark = [pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc"),
              pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each process needs a GPU of its own")]
NEAR = 1e-3 if torch.cuda.is_available() else 1e-4 # nats
COMMAND = [sys.executable, "-c", "from llm_speedrun.cli import speedrun_train; speedrun_train()"]
STEPS, PARTS = 40, 60 if torch.cuda.is_available() else 2 # micro-batches of each process in a step, which must take some time

def chosen(folder, **kw):
    "Options of a small run on two processes"
    return dict(data=str(folder/"bins"), model="tiny", rungs="flash,ddp", steps=STEPS, step_tokens=512*PARTS, seq_len=32, micro_batch_size=8, vocab=300,
                num_evals=1, eval_tokens=256, sample_tokens=2, lr=1e-3, schedule="constant", name="run", out=str(folder/"runs"), gpus=2,
                save_minutes=0.) | kw

def start(folder, *more, **kw):
    "The command in a process of its own, which is a group of processes"
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | dict(OMP_NUM_THREADS="1")
    c = chosen(folder, **kw)
    given = [*more] or to_args(TrainConfig(**c), c)
    return quick_programs.Popen([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)

def ended(p):
    "Its exit code, what it printed, its errors. Nothing of it is left running"
    try: out, err = p.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired: raise AssertionError(f"still running after {TIMEOUT} s") from None
    finally:
        for pid in [*workers(p.pid).values(), p.pid] if p.poll() is None else []: os.kill(pid, signal.SIGKILL)
    return p.returncode, out, err

def environment(pid):
    return dict(o.split("=", 1) for o in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in o)

def rank_of(pid):
    "The rank of a process, or None: its environment is that in which it began, which a copy has told us by its name"
    name = Path(f"/proc/{pid}/comm").read_text().split()
    return name[1] if name[0] == "rank" else environment(pid).get("RANK")

def workers(pid):
    "Rank -> process, of those that the command has started"
    try: found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError: return {}
    res = {}
    for c in found:
        try: res |= {int(r): int(c)} if (r := rank_of(c)) else workers(c)
        except (FileNotFoundError, ProcessLookupError, PermissionError): pass # it has just ended
    return res

def rows(run):
    try: return [json.loads(o) for o in (run/"metrics.jsonl").read_text().splitlines(keepends=True) if o.endswith("\n")]
    except FileNotFoundError: return []

def losses(run): return {r["step"]: r["loss"] for r in rows(run) if "loss" in r}

def when(p, ready):
    "Wait until `ready()`; the command must go on meanwhile"
    def running():
        assert p.poll() is None, p.communicate()
        return True
    return wait_until(ready, running)

def kill_one(p, run, step, rank, number=signal.SIGKILL):
    "Send one of the processes a signal when the run has come to a step"
    when(p, lambda: max(losses(run), default=0) >= step)
    until_some_moment(.05) # somewhere in a later step
    os.kill(workers(p.pid)[rank], number)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Where the runs are, with the data"
    folder = tmp_path_factory.mktemp("elastic")
    write_bins(folder/"bins", train=100_000)
    return folder

def alone(folder, name, **kw):
    "The folder of such a run of one process, which nothing happens to"
    from llm_speedrun.train.trainer import Trainer
    one = Trainer(TrainConfig(**chosen(folder, gpus=0, name=name, micro_batch_size=16, save_minutes=10., **kw)), progress=False)
    one.fit()
    return one.folder

@pytest.fixture(scope="module")
def undisturbed(folder): return alone(folder, "one")

def same(run, other, near=NEAR):
    "The number of steps that were noted: all from the first on, each once, with the losses of another run"
    steps, whole = [r["step"] for r in rows(run) if "loss" in r], losses(other)
    assert steps == [*range(1, len(steps) + 1)] and losses(run) == pytest.approx({k: whole[k] for k in steps}, abs=near)
    return len(steps)

def test_killed_stopped_and_resumed(folder, undisturbed):
    """A run of two processes has the losses of one. kill -9 of one in mid-step: the group comes back by itself. SIGTERM to one
    saves and ends all. One process goes on from that, and two from there, to the end of the undisturbed curve"""
    from llm_speedrun.train.trainer import train
    p, run = start(folder), folder/"runs/run"
    kill_one(p, run, 8, rank=1)
    kill_one(p, run, 16, rank=1, number=signal.SIGTERM)
    code, out, err = ended(p)
    assert code == 143 and err.splitlines()[0] == "worker 1 exited with signal 9; restarting, 1 of 3" and "rror" not in err, err
    done = same(run, undisturbed)
    assert f"stopped after step {done}; --resume {run}" in out and re.search(r"going on from .*step-000000", out)
    assert 16 <= done < STEPS - 4 and json.loads((run/"result.json").read_text())["steps"] == done
    assert checkpoints(run/"checkpoints")[-1].name == f"step-{done:08}"
    one, _ = train(TrainConfig(resume=str(run), gpus=1, steps=done + 2), progress=False)
    assert (one.cfg.micro_batch_size, one.cfg.grad_accum_steps) == (8, 2*PARTS) and same(run, undisturbed) == done + 2
    code, out, err = ended(start(folder, "--resume", str(run), "--gpus", "2", "--steps", str(STEPS)))
    c, last = json.loads((run/"config.json").read_text()), rows(run)[-1]
    assert code == 0 and same(run, undisturbed) == STEPS, err
    assert last["val_loss"] == pytest.approx(rows(undisturbed)[-1]["val_loss"], abs=NEAR)
    assert c["world"] == dict(processes=2, dp=2, tp=1) and (c["micro_batch_size"], c["grad_accum_steps"]) == (8, PARTS)
    assert [len(r["rank_ms"]) for r in rows(run) if "rank_ms" in r] == [2]*(STEPS//10)
    assert "The processes" in (run/"report.html").read_text(encoding="utf-8")
    assert f"step {STEPS}: data" in (run/"logs/rank-00001.log").read_text(encoding="utf-8")

def test_a_branch(folder):
    """Two processes branch from a kept checkpoint of one. kill -9 of one of them: the group goes on with the branch, and not with the run that it came
    from, which stays as it was. Both keep the same steps"""
    whole = alone(folder, "whole", keep_every=16)
    was = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    p, run = start(folder, "--resume", f"{whole}@16", "--gpus", "2", "--save_minutes", "0", "--keep_every", "10", "--keep_last", "1"), folder/"runs/whole-from-16"
    kill_one(p, run, 24, rank=1)
    code, out, err = ended(p)
    assert (code, err) == (0, "worker 1 exited with signal 9; restarting, 1 of 3\n") and f"in {run}" in out, out
    assert [*losses(run)] == [*range(17, STEPS + 1)] and losses(run) == pytest.approx({k: v for k, v in losses(whole).items() if k > 16}, abs=NEAR)
    assert {c.name for c in checkpoints(run/"checkpoints")} >= {f"step-{n:08}" for n in (20, 30, 40)}
    config = json.loads((run/"config.json").read_text())
    assert config["branched_from"]["step"] == 16 and config["world"]["processes"] == 2
    assert {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == was

def test_refused(folder):
    "What can't be is said once, in one line, with exit code 2, and nothing is started again"
    code, out, err = ended(start(folder, name="refused", step_tokens=96, micro_batch_size=None))
    said = "a step has 3 sequences, which 2 processes can't share equally: choose --step_tokens 64 (2 sequences) or 128 (4"
    assert code == 2 and err.startswith(f"error: {said}") and err.count("\n") == 1, err
    assert not (folder/"runs/refused").exists()

@pytest.mark.skipif("KILLS" not in os.environ, reason="takes minutes: KILLS=20")
def test_many_kills(folder):
    "The same many times in one run, in turn the one and the other process, in the middle of steps that nobody has chosen"
    n = int(os.environ["KILLS"])
    steps, run, seen = STEPS + 8*n, folder/"runs/often", set()
    whole = alone(folder, "long", steps=steps)
    p = start(folder, name="often", restarts=n, steps=steps)
    for i in range(n):
        mine = when(p, lambda: (now := workers(p.pid)) and len(now) == 2 and not {*now.values()} & seen and now)
        begun = max(losses(run), default=0)
        when(p, lambda: max(losses(run), default=0) > begun)
        until_some_moment(.3)
        seen |= {*mine.values()}
        print(f"kill {i + 1} after step {max(losses(run))}")
        os.kill(mine[i % 2], signal.SIGKILL)
    code, out, err = ended(p)
    assert code == 0 and same(run, whole, 20*NEAR) == steps, err
    assert out.count("going on from") >= n - 1 # the first may have come before there was a checkpoint
