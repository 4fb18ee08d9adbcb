"""Measure the GPUs of one machine together: collectives, a training step of each layout against one GPU, and the restart after a kill.
    tests/measure_host.py OUT [--minutes 5] [--gpus N] [--sections collectives,steps,restart] [--layouts ddp,fsdp,…] [--models 124m,1b]
                          [--rungs R,R] [--limit 150] [--tiny]
    tests/measure_host.py OUT --show                  tables of the results so far
Each measurement is printed and appended to OUT/measurements.jsonl at once, so nothing is lost if the machine is preempted.
The same command resumes where the last one ended. The most important parts come first. Each part runs in its own process and
is killed after --limit seconds; --minutes is the limit for all. Without GPUs, --tiny runs all of it with two CPU processes, as a test."""
import argparse, json, os, signal, subprocess, sys, time, uuid
from pathlib import Path

COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
LAYOUTS = dict( # rungs of several processes, and the fewest of these; {n} is how many there are
    ddp=("ddp", 2), fsdp=("fsdp", 2), tensor_parallel=("tensor_parallel:size={n}", 2),
    hsdp=("fsdp:replicas=2", 4), fsdp_tp=("fsdp,tensor_parallel:size=2", 4))
RUNGS = "tf32,bf16,flash:backend=cudnn,fused_ops,chunked_ce,cuda_graphs,fused_adamw" # as in the records of several GPUs: nothing is left to choose
BATCH = {"124m": 64, "1b": 8} # sequences of one GPU in a step
RESTART = "--minutes .4" # of training: two checkpoints, a kill, and some steps
DEFAULT, TINY = dict(models="124m,1b", rungs=RUNGS), dict(models="tiny", rungs="flash,fused_adamw")
TINY_RESTART = "--model tiny --seq_len 32 --micro_batch_size 8 --step_tokens 512 --steps 200 --eval_tokens 256 --save_minutes .005"
MARK = "MEASURE_HOST" # an environment variable, by which a part's processes are found

# --- what is there ---

def append(out, **record):
    "Write a line of the file and print it"
    with open(Path(out)/"measurements.jsonl", "a", encoding="utf-8") as f:
        f.write(line := json.dumps(record) + "\n"); f.flush(); os.fsync(f.fileno())
    print(line if len(line) < 300 else f"{line[:297]}...", end="" if len(line) < 300 else "\n", flush=True)

def recorded(out):
    "Return the file's records, without an incomplete last line"
    try: lines = (Path(out)/"measurements.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError: return []
    return [json.loads(o) for o in lines if o.endswith("\n")]

# --- what is measured ---

def operation(world, name, nbytes):
    "Return a function without arguments that runs the collective once; `nbytes` is the whole tensor, for all_to_all what each process sends"
    import torch, torch.distributed as dist
    from llm_speedrun.distributed.collectives import collective
    from llm_speedrun.measure import default_device
    if name != "all_to_all": return collective(world, name, nbytes)
    sent = torch.rand(max(1, nbytes//4//world.size)*world.size, device=default_device())
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)

def bus_share(name, k):
    "Return the bytes that a process sends for each byte of the tensor, as nccl-tests counts them"
    return (2 if name == "all_reduce" else 1)*(k - 1)/k

def time_collectives(world, out, sizes, reps):
    "In each process: time each operation at each size; the first process writes the records"
    import torch
    from llm_speedrun.measure import machine
    from llm_speedrun.timing import sample_ms, summarize
    for nbytes in sizes:
        for name in COLLECTIVES:
            f, inner = operation(world, name, nbytes), max(1, min(20, 2**24//nbytes)) # of short ones several between two marks
            def several():
                for _ in range(inner): f()
            for n in (3, reps): # the first to warm up
                world.barrier()
                samples = world.all_gather_object(sample_ms(several, n))
            t = summarize((torch.tensor(samples).amax(0)/inner).tolist()) # the slowest process counts
            rate = nbytes/t.ms/1e6
            if world.first: append(out, section="collectives", gpus=world.size, name=name, bytes=nbytes, ms=t.ms, ms_p20=t.p20, ms_p80=t.p80,
                                   algorithm_gbs=rate, bus_gbs=rate*bus_share(name, world.size), **machine())

def collectives(out, gpus, tiny, **_):
    from measure_host import time_collectives # the processes import it by name
    from llm_speedrun.distributed.spawn import run_distributed
    run_distributed(gpus, time_collectives, out, [2**12, 2**16] if tiny else [2**k for k in range(16, 31, 2)], 3 if tiny else 20)

def step(out, gpus, model, layout, rungs, **_):
    "Time a step of this layout interleaved with one GPU's, with fewer sequences if both don't fit"
    from llm_speedrun.io_utils import RunError
    from llm_speedrun.model_config import workload
    from llm_speedrun.rung_registry import find_rung, rung_name
    from llm_speedrun.train.ladder import measure_together
    *more, last = LAYOUTS[layout][0].format(n=gpus).split(",")
    clash = {k for r in (*more, last) for k in find_rung(rung_name(r)).excludes}
    below, batch = [r for r in rungs.split(",") if rung_name(r) not in clash] + more, BATCH.get(model, 4)
    while True:
        try: r = measure_together(workload(model), below, last, gpus, batch); break
        except RunError as e:
            if "OutOfMemoryError" not in str(e) or batch == 1: raise
            batch //= 2
    append(out, section="steps", layout=layout, model=model, efficiency=r["ratio"]/gpus, alone_tok_s=batch*r["seq"]/r["alone_ms"]*1e3, **r)

def restart(out, tiny, rungs, **_):
    from bench_start import restarted
    from llm_speedrun.measure import machine
    words = [*(TINY_RESTART if tiny else RESTART).split(), "--rungs", f"{rungs},ddp"]
    append(out, section="restart", **restarted(Path(out)/f"restart-{uuid.uuid4().hex[:6]}", *words), **machine())

PARTS = dict(collectives=collectives, steps=step, restart=restart)
NAMES = dict(sections=PARTS, layouts=LAYOUTS) # options that choose some of these

# --- parts in processes of their own ---

def run_part(out, part):
    "Measure a part in this process. An error is recorded, too"
    try: PARTS[part["section"]](out, **part)
    except (Exception, SystemExit) as e:
        said = str(e).strip().splitlines() or [""]
        append(out, section="skipped", part=part, why=f"{type(e).__name__}: {said[0]}"[:500])

def end_marked(mark):
    "Kill all processes of a part, even those whose parent has exited"
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (p/"environ").read_bytes().split(b"\0"): os.kill(int(p.name), signal.SIGKILL)
        except OSError: pass # it has ended, or is another user's

def start_part(out, part, seconds):
    "Run a part in its own process, and kill it after so many seconds. Record whether it is done"
    known, mark, t0 = len(recorded(out)), uuid.uuid4().hex, time.perf_counter()
    p = subprocess.Popen([sys.executable, __file__, "part", str(out), json.dumps(part)], env=os.environ | {MARK: mark})
    try: code = p.wait(seconds)
    except subprocess.TimeoutExpired: code = None
    finally: end_marked(mark); p.kill(); p.wait()
    skipped = [r for r in recorded(out)[known:] if r["section"] == "skipped"]
    if code: append(out, section="skipped", part=part, why=f"its process ended with exit code {code}")
    if code is None: append(out, section="skipped", part=part, why=f"it was not over after {seconds:.0f} s")
    if code == 0 and not skipped: append(out, section="done", part=part, seconds=time.perf_counter() - t0)

def parts(a, there):
    "Return the parts to measure, the most important first"
    models, n = a.models.split(","), a.gpus
    first = [(models[0] if k == "ddp" else models[-1], k) for k in a.layouts.split(",")]
    steps = [*first, *((m, k) for _, k in first for m in models if (m, k) not in first)]
    found = [dict(section="collectives", gpus=n), *(dict(section="steps", gpus=n, model=m, layout=k, rungs=a.rungs) for m, k in steps),
             dict(section="restart", gpus=2, rungs=a.rungs), *(dict(section="collectives", gpus=k) for k in (2, 4, 8) if k < n)]
    done = [r["part"] for r in there if r["section"] == "done"]
    return [p for p in (q | dict(tiny=a.tiny) for q in found) if p["section"] in a.sections.split(",") and p not in done]

def measure(a):
    "Measure as many parts as there is time for"
    end = time.monotonic() + 60*a.minutes
    for part in parts(a, recorded(a.out)):
        needs, left = LAYOUTS[part["layout"]][1] if "layout" in part else 2, end - time.monotonic()
        if part["gpus"] < needs: append(a.out, section="skipped", part=part, why=f"it needs {needs} GPUs")
        elif left < 5: append(a.out, section="skipped", part=part, why="no time was left: the same command goes on here")
        else: start_part(a.out, part, min(a.limit, left))

# --- tables ---

def tables(out):
    "Return the records as tables in text; of repeated measurements the last"
    from llm_speedrun.measure import fmt, table
    rows, last = recorded(out), {}
    for r in rows: last[tuple(r.get(k) for k in ("section", "gpus", "name", "bytes", "model", "layout"))] = r
    of = lambda section: [r for r in last.values() if r["section"] == section]
    said, sent = [], {(r["gpus"], r["bytes"], r["name"]): r for r in of("collectives")}
    cell = lambda r: f"{r['ms']:.3g} ({r['ms_p20']:.3g} to {r['ms_p80']:.3g}) {r['algorithm_gbs']:.3g} {r['bus_gbs']:.3g}" if r else "-"
    lines = [[f"{n}", f"{size//1024:,}", *(cell(sent.get((n, size, k))) for k in COLLECTIVES)] for n, size in dict.fromkeys(k[:2] for k in sent)]
    if lines: said += ["ms (p20 to p80), algorithm and bus GB/s", "", table(["GPUs", "KiB", *COLLECTIVES], lines), ""]
    lines = [[f"{r['model']} {r['layout']}", str(r["gpus"]), f"{r['tok_s']:,.0f}", f"{r['alone_tok_s']:,.0f}",
              f"{r['ratio']:.3f} ({r['ratio_p10']:.3f} to {r['ratio_p90']:.3f})", f"{r['efficiency']:.1%}",
              fmt(r["peak_gib"], ".1f"), fmt(r["alone_peak_gib"], ".1f"), f"{r['micro']}"] for r in of("steps")]
    if lines: said += [table(["step", "GPUs", "tokens/s", "one GPU's", "ratio (p10 to p90)", "efficiency", "GiB a GPU", "one GPU's", "sequences"], lines), ""]
    for r in of("restart"):
        said += [f"killed and started again: the next process after {r['new_process_s']:.1f} s, its first step {r['start_s']:.1f} s later", ""]
    done = [r["part"] for r in rows if r["section"] == "done"]
    why = {json.dumps(r["part"]): r for r in rows if r["section"] == "skipped" and r["part"] not in done}.values()
    said += ["skipped: {}: {}".format(" ".join(str(v) for k, v in r["part"].items() if k not in ("tiny", "rungs")), r["why"]) for r in why]
    return "\n".join(map(str, said))

def options(words):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--gpus", type=int, default=0)
    for k, known in NAMES.items(): p.add_argument(f"--{k}", default=",".join(known))
    for k in DEFAULT: p.add_argument(f"--{k}", default="")
    p.add_argument("--minutes", type=float, default=5.); p.add_argument("--limit", type=float, default=150.)
    for k in ("tiny", "show"): p.add_argument(f"--{k}", action="store_true")
    a = p.parse_args(words)
    import torch
    there = torch.cuda.device_count()
    a.gpus = a.gpus or there or 2
    for k in DEFAULT: setattr(a, k, getattr(a, k) or (TINY if a.tiny else DEFAULT)[k])
    for k, known in NAMES.items():
        if unknown := {*getattr(a, k).split(",")} - known.keys(): p.error(f"--{k} {','.join(sorted(unknown))}: choose of {','.join(known)}")
    if not there and not a.tiny and not a.show: p.error("there is no GPU: --tiny shows that all of it runs")
    if 0 < there < a.gpus or a.gpus < 2: p.error(f"it takes two GPUs or more, at most those of this machine, which has {there}")
    return a

if __name__ == "__main__":
    if sys.argv[1] == "part": run_part(sys.argv[2], json.loads(sys.argv[3]))
    else:
        a = options(sys.argv[1:])
        a.out.mkdir(parents=True, exist_ok=True)
        if not a.show: measure(a)
        print(tables(a.out))
