"""Measure what a user's first command does: the list it takes, the seconds until the first step, its speed; and the doctor's promise.
    tests/bench_start.py runs 10 OUT [options]             ten runs without options, each next to one with --rungs fastest
    tests/bench_start.py doctor OUT "options" "options"    the doctor's parts and speed next to a run with the same options, from Enter to the prompt; what either has
                                                           compiled or tried, the next finds done: give the same options twice for a warm start
    tests/bench_start.py train PATH [options]              a run in this process; the seconds of its parts, and of what it waits for, into PATH
    tests/bench_start.py asked PATH [options]              the doctor in this process; the parts that it predicts, and its speed, into PATH
    tests/bench_start.py enter OUT FOLDER,FOLDER "options" "options"    the seconds from Enter to the prompt with the package of each checkout in turn, and their parts; the first
                                                           run of each finds nothing compiled; after each of this checkout what its doctor predicts
    tests/bench_start.py restart OUT [options]             kill -9 of one of two processes after a checkpoint: the seconds until the first step of the next start
    tests/bench_start.py first                             `make speedrun` as it is, for the home page: nbs/site/measurements/first_run/nvidia-h100.json
Prints a line for each run, and writes all of them into OUT/runs.json."""
import json, os, re, shutil, signal, statistics, subprocess, sys, time
from pathlib import Path
from helpers.processes import workers

def output_of(*words):
    "What Python prints with these arguments, in a process of its own. Its error ends this program"
    p = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    if p.returncode: sys.exit(f"{' '.join(map(str, words))}\n{p.stdout[-2000:]}\n{p.stderr[-2000:]}")
    return p.stdout

def command(name, words):
    "Run a command of the package in a process of its own; its output"
    return output_of("-c", f"from llm_speedrun.cli import {name}; {name}()", *words)

def timed(owner, name, spent):
    "Let a method add its seconds to `spent`, without those of timed methods that it calls"
    method = getattr(owner, name)
    def call(*args, **kw):
        t0, others = time.perf_counter(), sum(spent.values())
        try: return method(*args, **kw)
        finally: spent[name] = spent.get(name, 0.) + time.perf_counter() - t0 - (sum(spent.values()) - others)
    setattr(owner, name, call)

def train(path, *words):
    "Train as `speedrun_train` does, and write into `path` the seconds of the run's parts and of what training waits for"
    from llm_speedrun.checkpoint.save import Saver
    from llm_speedrun.cli import speedrun_train
    from llm_speedrun.train import launch
    from llm_speedrun.train.checkpointer import Checkpointer
    from llm_speedrun.train.trainer import Trainer
    spent, parts, sys.argv = {}, {}, ["speedrun_train", *words]
    for owner, name in ((Trainer, "evaluate"), (Saver, "save"), (Saver, "wait"), (Checkpointer, "save_weights")): timed(owner, name, spent)
    report = launch.report
    def reported(trainer, res): report(trainer, res); parts.update(trainer.timings.parts())
    launch.report = reported
    speedrun_train()
    if not parts: sys.exit("training ran in other processes, where nothing is timed: take one GPU")
    Path(path).write_text(json.dumps(dict(spent=spent, parts=parts)))

def asked(path, *words):
    "Ask the doctor as `speedrun_doctor` does, and write into `path` the parts that it predicts, and its tokens/s"
    from llm_speedrun.cli import speedrun_doctor
    from llm_speedrun.tools import doctor
    found, sys.argv, parts = {}, ["speedrun_doctor", *words], doctor.parts
    def told(trainer, t, p):
        found.update(parts=parts(trainer, t, p), tok_s=t.tokens/p.step_s)
        return found["parts"]
    doctor.parts = told
    speedrun_doctor()
    if not found: sys.exit("the doctor looked in other processes, or found a problem: take one GPU, and see what it says")
    Path(path).write_text(json.dumps(found))

def run(out, name, words):
    "Train, and return what the run's folder says of its start and its speed, its parts, and the seconds from Enter to the prompt"
    path, t0 = Path(out)/f"{name}-spent.json", time.perf_counter()
    Path(out).mkdir(parents=True, exist_ok=True)
    output_of(__file__, "train", path, *words, "--name", name, "--out", out)
    seconds = time.perf_counter() - t0
    found = facts_of(Path(out)/name, **json.loads(path.read_text())) | dict(to_prompt_s=seconds)
    shutil.rmtree(Path(out)/name/"checkpoints", ignore_errors=True) # twenty runs would fill a disk
    (Path(out)/name/"model.safetensors").unlink()
    return found

def facts_of(folder, spent, parts): # of a run, seconds as `train` writes them
    "What a run's folder says of its start and its speed"
    config, result = (json.loads((folder/f"{k}.json").read_text()) for k in ("config", "result"))
    rows = [json.loads(line) for line in open(folder/"metrics.jsonl")]
    last = [r for r in rows if "train_s" in r][-1]
    phases = {p["name"]: p["seconds"] for p in result["start"]["phases"]}
    return dict(name=folder.name, rungs=config["rungs"], gpu=config["gpu"], torch=config["torch"], triton=config["triton"], date=config["date"],
                micro_batch=config["micro_batch_size"], steps=result["steps"], choose_s=phases.get("choose rungs"), start_s=result["start"]["seconds"],
                phases=phases, tok_s=last["step"]*config["step_tokens"]/last["train_s"], train_s=last["train_s"], val_loss=result["val_loss"],
                seconds=result["seconds"], spent=spent, parts=parts)

def default_runs(n, out, *words):
    "Runs without options and with `--rungs fastest`, interleaved"
    found = {"default": [], "fastest": []}
    for i in range(int(n)):
        for kind, more in (("default", []), ("fastest", ["--rungs", "fastest"])):
            found[kind].append(r := run(out, f"{kind}-{i}", [*more, *words]))
            print(f"{r['name']}: {r['choose_s']:.2f} s to choose, {r['start_s']:.1f} s to the first step, {r['tok_s']:,.0f} tokens/s", flush=True)
    best = statistics.median(r["tok_s"] for r in found["fastest"])
    for r in found["default"]: r["of_fastest"] = r["tok_s"]/best
    print(*(f"{k}: {sum(r['rungs'] == k for rs in found.values() for r in rs)} runs" for k in {r["rungs"] for rs in found.values() for r in rs}), sep="\n")
    print("without options, of the median with --rungs fastest:", *(f"{r['of_fastest']:.3f}" for r in found["default"]))
    return found

def promises(out, *options):
    "What the doctor predicts, and what a run takes: its parts, their sum, the seconds from Enter to the prompt, and tokens/s"
    found = []
    for i, text in enumerate(options):
        words, path = [*text.split(), "--name", f"promise-{i}", "--out", out], Path(out)/f"promise-{i}-asked.json"
        Path(out).mkdir(parents=True, exist_ok=True)
        output_of(__file__, "asked", path, *words)
        said, r = json.loads(path.read_text()), run(out, f"promise-{i}", text.split())
        found.append(dict(options=text, doctor_seconds=sum(said["parts"].values()), doctor_tok_s=said["tok_s"], doctor_parts=said["parts"]) | r | dict(seconds=sum(r["parts"].values())))
        print(f"{text}\n{'seconds':<28}{'doctor':>10}{'run':>10}")
        for k in dict.fromkeys([*said["parts"], *r["parts"]]): print(f"{k:<28}{said['parts'].get(k, 0.):10.2f}{r['parts'].get(k, 0.):10.2f}")
        print(f"{'from start to end':<28}{sum(said['parts'].values()):10.2f}{sum(r['parts'].values()):10.2f}")
        print(f"{'from Enter to the prompt':<28}{'':10}{r['to_prompt_s']:10.2f}\n{'tokens/s':<28}{said['tok_s']:10,.0f}{r['tok_s']:10,.0f}\n", flush=True)
    return found

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "import sys; sys.argv[0] = 'speedrun_train'; from llm_speedrun.cli import speedrun_train; sys.exit(speedrun_train())" # as it is installed

def as_user(out, folder, caches, words, program=("-c", PROGRAM)):
    "Start `speedrun_train` of a checkout, with folders of its own for what it compiles and remembers; its output is what it prints"
    for p in (out, Path(caches)/"tmp"): Path(p).mkdir(parents=True, exist_ok=True)
    caches = dict(LLM_SPEEDRUN_CACHE=caches, TRITON_CACHE_DIR=f"{caches}/triton", TMPDIR=f"{caches}/tmp") # where FlashAttention-4 and QuACK keep theirs
    env = os.environ | {k: str(v) for k, v in caches.items()} | dict(PYTHONPATH=os.pathsep.join(filter(None, [str(Path(folder).resolve()), os.environ.get("PYTHONPATH")])))
    return subprocess.Popen([sys.executable, *map(str, [*program, *words])], cwd=out, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

def entered(out, folders, *options):
    "Runs from Enter to the prompt: of each options one with each checkout, in turns"
    found, out = [], Path(out).resolve()
    for i, text in enumerate(options):
        for k, folder in enumerate(folders.split(",")):
            name, t0 = f"enter-{i}-{k}", time.perf_counter()
            p = as_user(out, folder, out/f"caches-{k}", [*text.split(), "--name", name, "--out", out])
            said, _ = p.communicate()
            seconds = time.perf_counter() - t0
            if p.returncode: print(f"{name}: exit code {p.returncode}\n{said[-2000:]}", flush=True); continue
            parts = json.loads((out/name/"result.json").read_text()).get("parts", {}) # older versions have none
            found.append(r := facts_of(out/name, {}, parts) | dict(options=text, checkout=folder, to_prompt_s=seconds))
            shutil.rmtree(out/name/"checkpoints", ignore_errors=True)
            print(f"{folder}, {text}: {seconds:.1f} s from Enter to the prompt, {r['start_s']:.1f} of them to the first step; training {r['train_s']:.1f} s, "
                  f"{r['tok_s']:,.0f} tokens/s; validation loss {r['val_loss']:.3f}", flush=True)
            for what in ("parts", "phases"): print("   ", ", ".join(f"{k} {s:.1f}" for k, s in r[what].items()), flush=True)
            if Path(folder).resolve() != ROOT: continue # older doctors predict no parts
            path = out/f"{name}-asked.json"
            said, _ = as_user(out, folder, out/f"caches-{k}", [path, *text.split(), "--name", f"{name}-asked", "--out", out], [__file__, "asked"]).communicate()
            if not path.exists(): print(said[-2000:], flush=True); continue
            r |= dict(doctor_parts=(told := json.loads(path.read_text()))["parts"])
            print(f"    the doctor: {sum(told['parts'].values()):.1f} s:", ", ".join(f"{k} {s:.1f}" for k, s in told["parts"].items()), flush=True)
    return found

def restarted(out, *words):
    "Kill the second of two processes once a checkpoint is there, and return the seconds until the next start has taken a step, and its phases"
    out = Path(out).resolve()
    p = as_user(out, ROOT, out/"caches", ["--gpus", 2, "--num_evals", 1, "--sample_tokens", 0, "--save_minutes", .05, *words, "--name", "killed", "--out", out])
    there = out/"killed/checkpoints"
    while len([*there.glob("step-*[0-9]")]) < 2 and p.poll() is None: time.sleep(.2) # and some steps after the first of them
    first, killed = workers(p.pid), time.time()
    if 1 not in first: sys.exit(f"the run was over before its second checkpoint: give more --minutes\n{p.communicate()[0][-2000:]}")
    os.kill(first[1], signal.SIGKILL)
    while workers(p.pid).get(0, first[0]) == first[0] and p.poll() is None: time.sleep(.05)
    again = time.time() - killed
    said, _ = p.communicate()
    if p.returncode: sys.exit(f"exit code {p.returncode}\n{said[-2000:]}")
    start = json.loads((out/"killed/result.json").read_text())["start"]
    r = dict(new_process_s=again, start_s=start["seconds"], phases={q["name"]: q["seconds"] for q in start["phases"]})
    print(f"{r['new_process_s'] + r['start_s']:.1f} s from the kill to a step: a new process after {r['new_process_s']:.1f}, its first step after {r['start_s']:.1f}:",
          ", ".join(f"{k} {s:.1f}" for k, s in r["phases"].items()), flush=True)
    print(*(line for line in said.splitlines() if "restarting" in line or "going on from" in line), sep="\n")
    return r

def printed_by(target):
    "Run a target of the Makefile; what it prints, and its seconds"
    t0, lines = time.perf_counter(), []
    with subprocess.Popen(["make", target], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        for line in p.stdout: print(line, end="", flush=True); lines.append(line)
    if p.returncode: sys.exit(p.returncode)
    return "".join(lines), round(time.perf_counter() - t0)

def first_run(record=ROOT/"nbs/site/measurements/first_run/nvidia-h100.json"):
    "What the README's command prints, the seconds that it takes after the installation, and its machine"
    installed, _ = printed_by("hopper")
    text, seconds = printed_by("speedrun")
    config = json.loads((ROOT/re.search(r"everything is in (\S+)", text)[1]/"config.json").read_text())
    machine = {k: config[k] for k in ("gpu", "driver", "torch", "triton", "date") if k in config}
    record.write_text(json.dumps(machine | dict(seconds=seconds, text=installed + text), indent=1) + "\n")

if __name__ == "__main__":
    what, *args = sys.argv[1:]
    if what in ("first", "train", "asked"): sys.exit(dict(first=first_run, train=train, asked=asked)[what](*args))
    ways = dict(doctor=promises, enter=entered, restart=restarted)
    found, out = (default_runs(*args), args[1]) if what == "runs" else (ways[what](*args), args[0])
    (Path(out)/"runs.json").write_text(json.dumps(found, indent=1))
