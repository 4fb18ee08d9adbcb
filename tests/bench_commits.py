"""Time the same steps of two checkouts on one GPU, interleaved: whether a change of structure cost speed.
    tests/bench_commits.py OTHER OUT.json [rounds]     OTHER is the root of another checkout
Each list of rungs is built once by each checkout, in a process of its own; then the two take turns. Prints the median ratio of the other's
time to ours with its 10th to 90th percentile, and the first losses of both, which are equal bit by bit if both compute the same."""
import json, os, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ATTENTION, END = "tf32 bf16 flash:backend=cudnn flash4 fused_ops", "cuda_graphs fused_adamw direct_update"
LISTS = dict(fastest=f"{ATTENTION} tied_embedding chunked_ce fp8:parts=heads+out+mlp+head head_groups fp8_epilogues {END}",
             fastest16=f"{ATTENTION} epilogues tied_embedding chunked_ce head_groups fused_ce {END}") # nothing is left to choose
CASES = [(*case, name) for case in (("124m", 64, 64), ("1b", 16, 8)) for name in LISTS] # workload, sequences in a step and in a micro-batch

def worker(workload, batch, micro, name):
    "Build the step; then for each number on stdin take as many steps and print the milliseconds of one"
    import torch
    from llm_speedrun.architectures import WORKLOADS # imports it, wherever it is defined
    try: from llm_speedrun.step_builder import make_step
    except ImportError: # where it was before, and as it was called before that
        from llm_speedrun import runs
        make_step = getattr(runs, "make_step", None) or runs.step_of
    step = make_step(WORKLOADS[workload], LISTS[name].split(), batch, micro=micro)()
    print(json.dumps([step().item() for _ in range(8)]), flush=True)
    for line in sys.stdin:
        n, start, end = int(line), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n): step()
        end.record(); torch.cuda.synchronize()
        print(start.elapsed_time(end)/n, flush=True)

def started(root, case):
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen([sys.executable, __file__, "worker", *map(str, case)], cwd=root, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def ask(p, n):
    p.stdin.write(f"{n}\n"); p.stdin.flush()
    return float(p.stdout.readline())

def compared(other, case, rounds):
    "Both versions of one case"
    from llm_speedrun.measure import machine # here, since a worker has the other's package
    from llm_speedrun.timing import Measured, speedup
    both = [started(root, case) for root in (ROOT, other)]
    first = [json.loads(p.stdout.readline()) for p in both]
    for p in both: ask(p, 3) # warm
    n, times = max(3, round(600/ask(both[0], 3))), []
    for i in range(rounds): # who goes first changes
        ms = {p: ask(p, n) for p in (both if i % 2 else both[::-1])}
        times.append([ms[p] for p in both])
    for p in both: p.stdin.close(); p.wait()
    ours, theirs = (Measured([[ms] for ms in t], None, 0.) for t in zip(*times))
    found = dict(case=case, rungs=LISTS[case[3]], same_losses=first[0] == first[1], losses=first, rounds=rounds,
                 ms=[ours.times.ms, theirs.times.ms], **speedup(theirs, ours), **machine())
    print("{} B{} {}: {:.2f} ms, the other {:.2f}:".format(case[0], case[1], case[3], *found["ms"]),
          "{ratio:.4f}x ({ratio_p10:.4f} to {ratio_p90:.4f}), losses".format(**found), "equal" if found["same_losses"] else "differ", flush=True)
    return found

if __name__ == "__main__":
    if sys.argv[1] == "worker": worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        other, out, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int((sys.argv[3:] or [15])[0])
        out.write_text(json.dumps([compared(other, c, rounds) for c in CASES], indent=1))
