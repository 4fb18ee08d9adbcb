"Several processes train as one: by --gpus on a CPU. One dies in mid-step, and the run ends where it would have ended."
import json, os, re, signal, subprocess, sys, time
from pathlib import Path
import numpy as np, pytest, torch
from small import write_bins
from llm_speedrun.train.options import TrainConfig, words_for
from llm_speedrun.train.saving import checkpoints

pytestmark = [pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc"),
              pytest.mark.skipif(torch.cuda.is_available(), reason="gloo, two processes: tests of GPUs have their own")]
COMMAND = [sys.executable, "-c", "from llm_speedrun.train.options import speedrun_train; speedrun_train()"]
STEPS = 30

def words(folder, **kw):
    "Options of a small run on two processes, and a command line of them"
    c = dict(data=str(folder/"bins"), workload="tiny", rungs="flash,ddp", steps=STEPS, step_tokens=1024, seq=32, batch=8, vocab=300, evals=1,
             eval_tokens=256, sample=2, name="run", out=str(folder/"runs"), gpus=2, save_minutes=0., ) | kw
    return words_for(TrainConfig(**c), c)

def start(folder, *more, **kw):
    "The command in a process of its own, which is a group of processes"
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | dict(OMP_NUM_THREADS="1")
    given = [*more] or words(folder, **kw)
    return subprocess.Popen([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)

def ended(p, seconds=90):
    "Its exit code, what it printed, its errors. Nothing of it is left running"
    try: out, err = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired: raise AssertionError(f"still running after {seconds} s") from None
    finally:
        for pid in [*workers(p.pid).values(), p.pid] if p.poll() is None else []: os.kill(pid, signal.SIGKILL)
    return p.returncode, out, err

def environment(pid):
    return dict(o.split("=", 1) for o in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in o)

def workers(pid):
    "Rank -> process, of those that the command has started"
    try: found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError: return {}
    res = {}
    for c in found:
        try: res |= {int(r): int(c)} if (r := environment(c).get("RANK")) else workers(c)
        except (FileNotFoundError, ProcessLookupError, PermissionError): pass # it has just ended
    return res

def rows(run):
    try: return [json.loads(o) for o in (run/"metrics.jsonl").read_text().splitlines(keepends=True) if o.endswith("\n")]
    except FileNotFoundError: return []

def losses(run): return {r["step"]: r["loss"] for r in rows(run) if "loss" in r}
def config(run): return json.loads((run/"config.json").read_text())

def when(p, ready, seconds=60):
    "Wait until `ready()`; the command must go on meanwhile"
    end = time.time() + seconds
    while not (res := ready()):
        assert p.poll() is None, p.communicate()
        assert time.time() < end, "not ready"
        time.sleep(.02)
    return res

def kill_one(p, run, step, rank, number=signal.SIGKILL):
    "Send one of the processes a signal when the run has come to a step"
    when(p, lambda: max(losses(run), default=0) >= step)
    time.sleep(.03) # somewhere in a later step
    os.kill(workers(p.pid)[rank], number)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Where the runs are, with the data"
    folder = tmp_path_factory.mktemp("elastic")
    write_bins(folder/"bins")
    return folder

@pytest.fixture(scope="module")
def undisturbed(folder):
    "The losses of a run on two processes that nothing happens to, in a folder that tests must not change"
    code, out, err = ended(start(folder, name="whole"))
    assert code == 0, err
    return losses(folder/"runs/whole")

def test_two_are_as_one(folder, undisturbed):
    "The losses of one process, the same tokens in a step, one log; the files of a run, with what each process took"
    from llm_speedrun.train.trainer import Trainer
    run = folder/"runs/whole"
    one = Trainer(TrainConfig(**json.loads(json.dumps({k: v for k, v in config(run).items() if k in TrainConfig.__dataclass_fields__}))
                              | dict(gpus=0, name="one", rungs="flash", accumulate=0, batch=16)), progress=False)
    one.fit()
    assert [*undisturbed] == [*range(1, STEPS + 1)]
    assert losses(one.folder) == pytest.approx(undisturbed, abs=2e-4)
    assert rows(run)[-1]["val_loss"] == pytest.approx(rows(one.folder)[-1]["val_loss"], abs=2e-4)
    assert [len(r["rank_ms"]) for r in rows(run) if "rank_ms" in r] == [2]*(STEPS//10)
    assert config(run)["world"] == dict(processes=2, dp=2, tp=1) and (config(run)["batch"], config(run)["accumulate"]) == (8, 2)
    assert "The processes" in (run/"report.html").read_text(encoding="utf-8")

def test_a_killed_process(folder, undisturbed):
    "kill -9 of one of two in mid-step: the group comes back by itself, and ends on the same curve, each step noted once"
    p, run = start(folder, name="killed"), folder/"runs/killed"
    kill_one(p, run, 10, rank=1)
    code, out, err = ended(p)
    assert code == 0 and "Traceback" not in err and re.search("process 1 of 2 is gone", err), err
    assert re.search(r"going on from .*step-000000", out)
    steps = [r["step"] for r in rows(run) if "loss" in r]
    assert steps == [*range(1, STEPS + 1)] and losses(run) == undisturbed

def test_a_signal_to_one(folder, undisturbed):
    "SIGTERM to the second process alone saves and ends all, with its code; one process goes on, and two go on from that"
    p, run = start(folder, name="stopped", save_minutes=10.), folder/"runs/stopped"
    kill_one(p, run, 10, rank=1, number=signal.SIGTERM)
    code, out, err = ended(p)
    done = json.loads((run/"result.json").read_text())["steps"]
    assert code == 143 and not re.search("Traceback|failed", err), err
    assert f"stopped after step {done}; --resume {run}" in out and 10 <= done < STEPS
    assert checkpoints(run/"checkpoints")[-1].name == f"step-{done:08}"
    code, out, err = ended(start(folder, "--resume", str(run), "--gpus", "1", "--steps", str(done + 4)))
    assert code == 0 and config(run)["accumulate"] == 4, err
    code, out, err = ended(start(folder, "--resume", str(run), "--gpus", "2", "--steps", str(STEPS)))
    assert code == 0 and config(run)["accumulate"] == 2, err
    assert [*losses(run)] == [*range(1, STEPS + 1)]
    before = {k: v for k, v in undisturbed.items() if k <= done}
    assert {k: v for k, v in losses(run).items() if k <= done} == before

@pytest.mark.parametrize("how,said", [
    (dict(step_tokens=96, batch=0), r"a step has 3 sequences, which 2 processes can't share equally: choose --step_tokens 64 \(2 sequences\) or 128"),
    (dict(step_tokens=32, batch=0), r"a step has 1 sequences, which 2 processes can't share equally: choose --step_tokens 64"),
    (dict(data="nowhere"), "'nowhere' is neither a corpus")], ids=["uneven", "more than data", "on the first"])
def test_refused(folder, how, said):
    "What can't be is said once, in one line, with exit code 2, and nothing is started again"
    code, out, err = ended(start(folder, name="refused", **how))
    assert code == 2 and len(re.findall(said, err)) == 1 and err.count("\n") == 1, err
    assert not (folder/"runs/refused").exists()

@pytest.mark.skipif("KILLS" not in os.environ, reason="takes minutes: KILLS=20")
def test_many_kills(folder, undisturbed):
    "The same many times in one run, in turn the one and the other process, at steps that nobody has chosen"
    n, rng = int(os.environ["KILLS"]), np.random.default_rng(0)
    p, run = start(folder, name="often", restarts=n), folder/"runs/often"
    for i in range(n):
        seen = {*workers(p.pid).values()}
        when(p, lambda: (now := {*workers(p.pid).values()}) and not now & seen or not i, 120)
        begun = max(losses(run), default=0)
        when(p, lambda: max(losses(run), default=0) > min(begun, STEPS - 12), 120)
        time.sleep(rng.uniform(0, .3))
        os.kill(workers(p.pid)[i % 2], signal.SIGKILL)
    code, out, err = ended(p, 120)
    assert code == 0 and losses(run) == undisturbed, err
