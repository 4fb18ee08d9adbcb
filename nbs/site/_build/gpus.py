"""The page of GPUs: what each can run is asked of the rungs themselves, how fast it should be is counted, and
what fits was measured."""
import importlib, pkgutil
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch
import msgspec, torch
import llm_speedrun.rungs
from llm_speedrun import compat
from llm_speedrun.datasheets import GPUS
from llm_speedrun.measure import datasheet_flops, rung_names
from llm_speedrun.model_config import WORKLOADS, train_flops
from llm_speedrun.roofline import predict_ms
from llm_speedrun.rungs import compile, flash, fp8_kernels, fp8_loss, fused_ops
from llm_speedrun.rung_registry import RUNGS, RungSpec
from llm_speedrun.step_builder import count_step
from llm_speedrun.step_prediction import datasheet_ceilings
from llm_speedrun.train.autotune import ROOM, most_sequences
from llm_speedrun.train.presets import DEVICE_LIMITS, NARROWEST, RECORDED, dropped_rungs, preset
from templating import page
from procs import slug
from records import by_gpu, fits

SIZES = "124m", "350m", "1b" # whose memory is measured, in nbs/source/train/autotune.ipynb
ROWS = 32 # sequences in a step: the trainer's default

@contextmanager
def as_if(capability, name="this GPU", packages=("triton",)):
    "Inside, the rungs believe that such a GPU is here, with these packages beside PyTorch"
    version = lambda package: "0" if package in packages else None
    with (patch.object(torch.cuda, "is_available", lambda: True),
          patch.object(torch.cuda, "get_device_name", lambda *a: name),
          patch.object(torch.cuda, "get_device_capability", lambda *a: capability),
          patch.object(compile, "version_of", version), patch.object(compat, "installed", version),
          patch.object(fused_ops, "triton", "triton" if "triton" in packages else None)): yield

# --- what it can run ---

def find_all_rungs():
    "Import all modules with rungs, which puts them into `RUNGS`"
    for m in pkgutil.iter_modules(llm_speedrun.rungs.__path__):
        importlib.import_module(f"llm_speedrun.rungs.{m.name}")

def runs_here(gpu):
    "The rungs of `fastest` on this GPU; pairs of a rung that is left out and why; the rungs of `smallest`"
    with as_if(gpu.capability, gpu.said):
        kept = preset("fastest")
        return kept, dropped_rungs("fastest", [*map(RungSpec, kept)]), preset("smallest")

def why_not(name, gpu):
    "Why the GPU can't run a rung, in the rung's own words; an empty text if it can"
    with as_if(gpu.capability, gpu.said): return RUNGS[name].needs()

def differences():
    "Rows of a table: the rungs that some of the GPUs can't run, and what each GPU says; its columns"
    gpus = {g.capability: [] for g in GPUS}
    for g in GPUS: gpus[g.capability].append(g)
    can = lambda name: [not why_not(name, same[0]) for same in gpus.values()]
    rows = [[f"[`{name}`](reference/rungs.qmd#{name})", *("yes" if c else "no" for c in can(name))]
            for name in RUNGS if not all(can(name))]
    return ["rung", *(f"{', '.join(g.name for g in same)} ({a}.{b})" for (a, b), same in gpus.items())], rows

# --- how fast it should be ---

BF16 = ["tf32", "bf16", "flash:backend=flash", "fused_ops", "chunked_ce", "fused_adamw"]
LISTS = dict(bf16=BF16, fp8=[*BF16, "fp8:parts=heads+out+mlp+head"]) # with what would be found by measuring

def format_of(rungs): return "fp8" if "fp8" in rungs else "bf16" if "bf16" in rungs else "fp16"

def as_on_a_gpu(a, b, inverse_a, inverse_b, out=torch.bfloat16, fast=False):
    "The FP8 product that a GPU would run, to be counted: on a CPU ours multiplies in FP32"
    return torch._scaled_mm(a, b.T, inverse_a, inverse_b, out_dtype=out, use_fast_accum=fast)

@lru_cache
def counted(workload, fmt):
    "Operations of a step with one layer, and with two"
    with (patch.object(torch.cuda, "is_available", lambda: False),
          patch.object(fp8_kernels, "mm8", as_on_a_gpu), patch.object(fp8_loss, "mm8", as_on_a_gpu),
          patch.object(flash, "why_not", lambda *a: "")): # which would try attention on this CPU
        return [count_step(replace(WORKLOADS[workload], layers=n), LISTS[fmt], ROWS) for n in (1, 2)]

def roofline_tok_s(gpu, workload, fmt):
    "Tokens a second if each operation ran as fast as the datasheet allows; layers but the first are alike"
    c, peak = WORKLOADS[workload], datasheet_ceilings(gpu)
    ops = counted(workload, "fp8" if fmt == "fp8" else "bf16")
    if fmt == "fp16": # the same operations
        ops = [[replace(o, fmt="fp16") if o.fmt == "bf16" else o for o in os] for os in ops]
    one, two = (predict_ms(o, peak) for o in ops)
    return 1e3*ROWS*c.seq_len / (one + (c.layers - 1)*(two - one))

H200 = GPUS[0]

def shares(records):
    "(workload, format) -> the part of the roofline's speed that our fastest measured step has on the H200"
    best = {}
    for r in records:
        names = set(rung_names(r.get("rungs") or ()))
        fmt = format_of(names)
        ours = names and names <= {*rung_names(LISTS.get(fmt, ())), "cuda_graphs"} and "chunked_ce" in names
        if r["gpu"] == H200.said and r["workload"] in SIZES and ours:
            best[r["workload"], fmt] = max(r["tok_s"], best.get((r["workload"], fmt), 0))
    return {k: v/roofline_tok_s(H200, *k) for k, v in best.items()}

def share_for(known, workload, fmt):
    "The H200's share for a step like this: of the same workload, or else the lowest of its format"
    fmt = "fp8" if fmt == "fp8" else "bf16"
    same = [v for (_, f), v in known.items() if f == fmt]
    return known.get((workload, fmt)) or min(same, default=None)

# --- what fits ---

def memory_list(rungs):
    """The names that decide how much memory a step takes: FP16 is as bf16, TF32 takes no more. What fits beside a recording, or with
    `head_groups`, `fused_ce` and `direct_update`, which FP16 does without, fits without them; and `epilogues` and `fp8_epilogues`, which takes less, need QuACK"""
    names = {"bf16" if n == "fp16" else n for n in rung_names(rungs)}
    return frozenset(names - {"tf32", "cuda_graphs", "flash4", "head_groups", "fused_ce", "direct_update", "epilogues", "fp8_epilogues"})

def largest_micro(found, gpu, workload, rungs):
    """The largest micro-batch that was tried and fits into the GPU's memory, or the next smaller card's: 0
    where none does, None where nothing was tried"""
    wanted = workload, WORKLOADS[workload].seq_len, memory_list(rungs)
    same = [f for f in found if (f.workload, f.seq, memory_list(f.rungs)) == wanted and f.gib <= gpu.gb]
    return max(same, key=lambda f: f.gib).micro if same else None

def micro_text(micro):
    if micro is None: return "not measured yet"
    return str(micro) if micro else "none"

# --- the page ---

def speed(x):
    "Tokens a second to two digits: more a prediction doesn't have"
    return f"{float(f'{x:.2g}'):,.0f}"

def gpu_row(gpu, workload, kept, small, known, found):
    "A workload on a GPU: what fits, and how fast it should be, if `fastest` fits"
    fmt = format_of(kept)
    roof, share = roofline_tok_s(gpu, workload, fmt), share_for(known, workload, fmt)
    likely, flops = share and roof*share, train_flops(WORKLOADS[workload])/1e12
    mfu = lambda k: f"{flops*likely/gpu.tflops[k]:.0%}" if likely and k in gpu.tflops else ""
    half = "fp16" if fmt == "fp16" else "bf16"
    micros = [largest_micro(found, gpu, workload, rungs) for rungs in (kept, small)]
    fast = [speed(roof), speed(likely) if likely else "", mfu(half), mfu("fp8")] if micros[0] != 0 else [""]*4
    return [f"`{workload}`", *map(micro_text, micros), *fast]

def plays(gpu):
    "The name with which `--memory_limit` gives a larger GPU this one's limits"
    missing = tuple(n for n in ("fp8",) if why_not(n, gpu))
    same = {k: h for k, h in DEVICE_LIMITS.items() if h.gib == gpu.gb}
    return next((k for k, h in same.items() if h.lacks == missing), next(iter(same), ""))

def facts(gpu, known, found, measured):
    kept, out, small = runs_here(gpu)
    half = "FP16" if format_of(kept) == "fp16" else "bf16"
    head = ["workload", "micro-batch that fits", "with `smallest`", "roofline, tokens/s, *predicted*",
            "likely, tokens/s, *predicted*", f"MFU, {half}'s peak", "MFU, FP8's peak"]
    rows = [gpu_row(gpu, w, kept, small, known, found) for w in SIZES]
    fits_small = lambda w: largest_micro(found, gpu, w, kept) == 0 and largest_micro(found, gpu, w, small)
    if "fp8" not in gpu.tflops: head, rows = head[:-1], [r[:-1] for r in rows]
    return dict(gpu=gpu, a="an" if gpu.name[0] in "AHLR" else "a", kept=kept, out=out, head=head, rows=rows,
                no_bf16=why_not("bf16", gpu), no_fp8=why_not("fp8", gpu), plays=plays(gpu),
                no_mfu=datasheet_flops(gpu.said) is None,
                measured=slug(gpu.said) if gpu.said in measured else "",
                small_fits=[w for w in SIZES if fits_small(w)])

def cpu_facts():
    "The same of a CPU"
    with patch.object(torch.cuda, "is_available", lambda: False):
        kept = preset("fastest")
        return dict(kept=kept, default=preset("cpu"), out=dropped_rungs("fastest", [*map(RungSpec, kept)]), most=most_sequences())

@page("gpus.qmd")
def gpus_page(root):
    find_all_rungs()
    gpu_records, found = by_gpu(root), fits(root)
    records = [r for rs in gpu_records.values() for r in rs]
    known = shares(records)
    head, rows = differences()
    tflops = lambda g, k: f"{g.tflops[k]:,.0f}" if k in g.tflops else "no"
    sheet = [[f"[{g.name}](#{slug(g.name)})", "{}.{}".format(*g.capability), f"{g.gb:g}", f"{g.gbs:,.0f}",
              *(tflops(g, k) for k in ("tf32", "fp16", "bf16", "fp8"))] for g in GPUS]
    share_rows = [[f"`{w}`", "FP8" if f == "fp8" else f, f"{v:.0%}"] for (w, f), v in sorted(known.items())]
    lack = lambda name: [g.name for g in GPUS if why_not(name, g)]
    return dict(gpus=[facts(g, known, found, gpu_records) for g in GPUS], cpu=cpu_facts(), head=head,
                rows=rows, sheet=sheet, shares=share_rows, records=records, fits=msgspec.to_builtins(found),
                rows_in_step=ROWS, room=ROOM, no_bf16=lack("bf16"), no_fp8=lack("fp8"), anchor=slug,
                measured=list(gpu_records), recorded=list(RECORDED), narrowest=NARROWEST)
