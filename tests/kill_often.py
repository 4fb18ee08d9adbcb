"""Stop runs at random moments by SIGTERM, SIGINT and SIGKILL, resume each until it ends, and compare what it leaves with a run that was
never stopped. A run is a fork of this process, which has imported PyTorch. For more moments: `python tests/kill_often.py 50`."""
import argparse, json, os, random, signal, sys, tempfile, time
from pathlib import Path
from safetensors.torch import load_file
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.checkpoint.format import newest
from llm_speedrun.train.run_dir import Finished
from llm_speedrun.train.trainer import train
from helpers.tiny_runs import NANO, options
from helpers.timeouts import until_some_moment

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
TIMED = "train_s tok_s ms_data ms_forward ms_backward ms_optimizer ms_telemetry".split() # keys of rows that differ from run to run
KINDS = { # a run that takes all of its steps, and one that stops at a target before
    "steps": dict(steps=12, num_evals=4, num_samples=3, save_minutes=0., recipe="speedrun", grad_accum_steps=1),
    "few checkpoints": dict(steps=12, num_evals=4, num_samples=3, save_minutes=1e6, recipe="adamw"),
    "target": dict(steps=24, num_evals=8, num_samples=6, save_minutes=0., recipe="normuon")}

def how(folder, kind, **more): return options(folder, **KINDS[kind] | dict(overwrite=True) | more)

def child(folder, kind, log, **more):
    "Train in a fork of this process, from the beginning or from where it stopped. Returns its number"
    sys.stdout.flush(); sys.stderr.flush()
    if pid := os.fork(): return pid
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1); os.dup2(out, 2)
        run = folder/"runs/run"
        there = newest(run/"checkpoints", log_info=lambda *args: None)
        train(TrainConfig(resume=str(run)) if there else how(folder, kind, **more), progress=False)
        os._exit(0)
    except Finished: os._exit(0)
    except KeyboardInterrupt: os._exit(130)
    except BaseException as e: print("FAILED", type(e).__name__, e, flush=True); os._exit(1)

def ended(pid):
    "Wait for it, and return its exit code, which is negative after a signal"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def over(folder):
    "Whether the run has its results"
    path = folder/"runs/run/result.json"
    return path.exists() and not json.loads(path.read_text())["interrupted"]

def left_by(folder):
    "What must not depend on stops: the rows without times, the samples, the result, and the final weights"
    run = folder/"runs/run"
    rows = [json.loads(line) for line in (run/"metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run/"samples.jsonl").read_text().splitlines()]
    result = json.loads((run/"result.json").read_text())
    weights = {k: t.numpy().tobytes() for k, t in load_file(run/"model.safetensors").items()}
    return dict(rows=[{k: v for k, v in r.items() if k not in TIMED} for r in rows], samples=samples, weights=weights,
                text=(run/"sample.txt").read_text(), result={k: result[k] for k in ("steps", "val_loss", "reached", "interrupted", "bigram_loss")},
                unfinished=[str(p) for p in run.rglob("*.tmp")])

def stopped_run(folder, kind, numbers, seconds, **more): # signals; how long an undisturbed run takes
    "Stop a run once by each of the signals, at random moments, resume it, and let it end. Returns how many came in time"
    log, came = folder/"log.txt", 0
    for number in numbers:
        pid = child(folder, kind, log, **more)
        until_some_moment(seconds)
        os.kill(pid, number)
        came += ended(pid) != 0 or not over(folder)
    while not over(folder):
        code = ended(child(folder, kind, log, **more))
        assert code == 0, f"exit code {code}; {log.read_text()}"
    text = log.read_text()
    assert "FAILED" not in text and "Traceback" not in text, text
    return came

def stop_often(folder, moments, stops=2, say=print): # a folder; signals that must come before a run has ended; in each run
    "Stop runs at so many random moments. Raises `AssertionError` for a run that leaves something else"
    came, wholes, i = 0, {}, 0
    while came < moments:
        kind = [*KINDS][-1 - i % len(KINDS)]
        if kind not in wholes: wholes[kind] = whole(folder/f"whole {kind}", kind)
        want, seconds, more = wholes[kind]
        here = folder/f"{i}"
        here.mkdir()
        numbers = [SIGNALS[(i*stops + j + i//len(KINDS)) % len(SIGNALS)] for j in range(min(stops, moments - came))]
        in_time = stopped_run(here, kind, numbers, seconds, **more)
        if in_time < len(numbers): wholes[kind] = want, .8*seconds, more # the machine has become less busy
        got = left_by(here)
        for k in want: assert got[k] == want[k], f"{here}, {kind}, {[n.name for n in numbers]}: {k} {got[k]} is not {want[k]}"
        say(f"{kind}: {', '.join(n.name for n in numbers)}, of which {in_time} in time: as if it hadn't been stopped")
        came, i = came + in_time, i + 1

def undisturbed(folder, kind, **more):
    "What a run leaves that nothing stops"
    folder.mkdir()
    code = ended(child(folder, kind, folder/"log.txt", **more))
    assert code == 0, f"exit code {code}; {(folder/'log.txt').read_text()}"
    return left_by(folder)

def whole(folder, kind):
    "What an undisturbed run leaves, how long it takes, and the options that it needs: a target that it reaches before its end"
    folder.mkdir()
    more = {}
    if kind == "target":
        losses = [r["val_loss"] for r in undisturbed(folder/"all steps", kind)["rows"] if "val_loss" in r]
        assert min(losses[:3]) > losses[3]
        more = dict(target_loss=losses[3])
    t0 = time.monotonic()
    got = undisturbed(folder/"run", kind, **more)
    seconds = time.monotonic() - t0
    assert got["result"]["reached"] == bool(more) and len(got["samples"]) == 3 and len(got["rows"]) == 12 + 4
    return got, seconds, more

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("moments", type=int, nargs="?", default=50)
    p.add_argument("--seed", type=int, default=0)
    given = p.parse_args()
    random.seed(given.seed)
    WORKLOADS["nano"] = NANO
    with tempfile.TemporaryDirectory() as folder: stop_often(Path(folder), given.moments)
    print(f"stopped {given.moments} times: logs, stops and weights are those of runs that were never stopped")
