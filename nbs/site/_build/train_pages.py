"""The pages of nbs/site/_build/train/ that show measured numbers: templates whose `{{ ... }}` are read from the
H200's records, from the outputs of the finale, and on telemetry from runs on a CPU."""
import json, re
from functools import partial
from statistics import median
from llm_speedrun.io_utils import read_json
from llm_speedrun.measure import load_records, records_path
from llm_speedrun.course import course_records
from llm_speedrun.model_config import WORKLOADS, matrix_params
from llm_speedrun.records import is_current
from headline import MEASURED_OLDER, OURS, best, newest, packages, trained_before, training
from measured import times
from records import fits, folder
from templating import environment as for_all_pages, table
from trouble import Trouble

NOTE = "<!-- Made from nbs/site/_build/train/{}: edit that, not this. -->"
TOP = dict(rung="fused_adamw", before="fp32", workload="124m", batch=64)   # the whole list of rungs over none

def record(gpu="NVIDIA H200", **which): # keys of a record and their values
    "The one record of that GPU that has these values. `LookupError` for none and for several"
    records = load_records(records_path(gpu))
    found = [r for r in records if all(r.get(k) == v for k, v in which.items())]
    if len(found) != 1: raise LookupError(f"{len(found)} records of {which}")
    return found[0]

def gain(rung, before, workload="124m", batch=64, **which):
    "How many times the speed of `before`, as text"
    return times(record(rung=rung, before=before, workload=workload, batch=batch, **which)["ratio"])

def of_two(rung, workload): # a rung for several GPUs
    "How many times one GPU's speed two of them have, as text"
    return times(record(gpu="2 × NVIDIA H200", rung=rung, workload=workload)["ratio"])

def step(rung): # of the course's ladder
    "The record of a rung on top of those below it"
    return next(r for r in course_records() if r["rung"] == rung)

def rounded(x, digits=3): # a number
    "The number with so many digits that count, as text with commas"
    return f"{float(f'{x:.{digits}g}'):,.15g}"

def versions(r):
    "Driver and versions of a record, in words"
    return "driver {driver}, PyTorch {torch}, Triton {triton}".format(**r)

def measured_on():
    "A line for the foot of a page: the machine of its numbers, and when"
    r = record(**TOP)
    older = "" if is_current(r) else f", {MEASURED_OLDER}"
    return (f"*Measured on one {r['gpu']}, {versions(r)}, {r['date']}{older}; all [records](../measured/index.qmd), "
            "and how to [add those of your GPU](../measured/yours.qmd).*")

def needs(root):
    "A table: for each workload the smallest card that was tried and fits, with the preset `fastest` and with `smallest`"
    def least(workload, small): # of memory; whether of the lists with 8-bit moments
        alike = [f for f in fits(root) if f.workload == workload and f.micro and "fp16" not in f.rungs and ("adamw8bit" in f.rungs) == small]
        f = min(alike, key=lambda f: (f.gib, f.peak_gib))
        return f"{f.gib:g} GB, {f.micro} sequences ({f.peak_gib:.1f} GiB)"
    rows = [[f"`{w}`", f"{matrix_params(c)/1e6:,.0f} M", f"{c.seq_len:,}", least(w, False), least(w, True)]
            for w, c in WORKLOADS.items() if any(f.workload == w for f in fits(root))]
    return table(["model", "weights in matmuls", "tokens a sequence", "`fastest` fits into", "`smallest` fits into"], rows)

# --- models of transformers ---

BY_ITSELF = { # contenders of tests/bench_accelerate.py -> in words
    "accelerate": "`accelerate(model)`, in FP8", "accelerate_bf16": '`accelerate(model, "fastest16")`, in bf16',
    "transformers": "transformers, autocast to bf16", "compile": "transformers, `torch.compile`", "liger": "transformers with Liger's kernels",
    "liger_compile": "Liger's kernels, `torch.compile`", "liger_bf16_weights": "Liger, and weights in bf16",
    "torchao_fp8_compile": "transformers with torchao's FP8, `torch.compile`"}

def accelerated(root):
    "A paragraph and two tables for each model: speeds, and losses on the way"
    records = read_json(folder(root)/"accelerate/nvidia-h200.json", list)
    for model in dict.fromkeys(r["workload"] for r in records):
        rs = [r for r in records if r["workload"] == model]
        r, points = rs[0], [round(len(rs[0]["curve"])*k/5) for k in range(1, 6)]
        shown = ", ".join(f"{k} {v}" for k, v in sorted(r["packages"].items()))
        yield (f"`{model}` ({r['parameters']/1e6:,.0f} M weights), {r['batch']} × {r['seq']:,} tokens a step, on one {r['gpu']}, "
               f"{versions(r)}, {shown}, {r['date']}:")
        slower = lambda r: "" if r is rs[0] else f"{1/r['ratio']:.2f}× ({1/r['ratio_p90']:.2f} to {1/r['ratio_p10']:.2f})"
        yield table(["", "tokens/s", "speedup of `accelerate(model)`", "sequences at once", "peak GiB"],
                    [[BY_ITSELF[r["rung"]], f"{r['tok_s']:,.0f}", slower(r), r["micro"], f"{r['peak_gib']:.1f}"] for r in rs])
        if not points[0]: continue
        yield "The losses from the same weights on the same text (books and documentation, GPT-2's tokens), each the mean of up to ten steps before it:"
        mean = lambda curve, n: f"{sum(near := curve[max(0, n - 10):n])/len(near):.3f}"
        yield table(["loss at step", *map(str, points)], [[BY_ITSELF[r["rung"]], *(mean(r["curve"], n) for n in points)] for r in rs])

# --- several GPUs ---

def sharded(root):
    "A line on the machine and a table: steps of Muon's recipe and of AdamW's, on one GPU and on several"
    found = read_json(folder(root)/"sharded/2-nvidia-h200.json", dict)
    runs = {(r["recipe"], r["processes"]): r for r in found["runs"]}
    def row(r):
        ratios = [a/b for a, b in zip(runs[r["recipe"], 1]["ms"], r["ms"])]
        off = max(abs(a - b) for a, b in zip(r["losses"], runs[r["recipe"], 1]["losses"]))
        return [f"`{r['recipe']}`", r["processes"], f"{median(r['ms']):.0f} ({min(r['ms']):.0f} to {max(r['ms']):.0f})",
                f"{median(ratios):.2f}×" if r["processes"] > 1 else "", f"{r['peak_gib']:.1f}", f"{r['state_gib']:.2f}", f"{off:.4f}" if r["processes"] > 1 else ""]
    yield ("`{model}`, {sequences} × 1,024 tokens a step, with `{rungs}` and `fsdp`, on {gpu}s, {stack}, {date}, at {rate:g} times the recipes' learning "
           "rates; {n} interleaved rounds, median and range:").format(**found, stack=versions(found), rungs=",".join(found["runs"][0]["rungs"]), rate=found["runs"][0]["rate"], n=len(found["runs"][0]["ms"]))
    yield table(["recipe", "GPUs", "ms a step", "speedup over one GPU", "peak GiB of a GPU", "of which optimizer state", f"losses of {found['steps']} steps differ from one GPU's by up to"], [row(r) for r in found["runs"]])

def host_records(root):
    "What `tests/measure_host.py` wrote"
    return [json.loads(line) for line in (folder(root)/"host/2-nvidia-h200.jsonl").read_text(encoding="utf-8").splitlines()]

def of_one(r): # a record with an interval
    "How many times the speed, with its interval, as text"
    return f"{r['ratio']:.2f}× ({r['ratio_p10']:.2f} to {r['ratio_p90']:.2f})"

def layouts(root):
    "A line on the machine, and a table of steps of each layout on two GPUs next to one of them"
    found = [r for r in host_records(root) if r["section"] == "steps"]
    yield ("The same steps on two GPUs and on one of them, interleaved, with AdamW and `{rungs}` (those that a layout can't use are left out), on {gpu}s, {stack}, {date}:"
           ).format(**found[0] | dict(rungs="tf32,bf16,flash:backend=cudnn,fused_ops,chunked_ce,cuda_graphs"), stack=versions(found[0]))
    yield table(["layout", "model", "sequences of both", "tokens/s", "speedup over one GPU", "peak GiB of a GPU", "one GPU's"],
                [[f"`{r['layout']}`", f"`{r['model']}`", r["batch"], f"{r['tok_s']:,.0f}", of_one(r), f"{r['peak_gib']:.1f}", f"{r['alone_peak_gib']:.1f}"] for r in found])

def tensor_parallel(root):
    "A line on the machine, and a table of our tensor parallelism and PyTorch's"
    found = read_json(folder(root)/"sharded/2-nvidia-h200-tensor-parallel.json", list)
    yield ("`{workload}`, {tokens:,} tokens a step, on {gpu}s, {stack}, {date}; PyTorch's is `parallelize_module` with sequence parallel and `loss_parallel`, "
           "as its documentation has it:").format(**found[0], stack=versions(found[0]))
    yield table(["", "GPUs", "ms a step", "speed, of ours", "peak GiB of a GPU", "first loss"],
                [[r["version"], r["gpus"], f"{r['ms']:.1f}", "" if r["version"] == "ours" else of_one(r), f"{r['peak_gib']:.1f}", f"{r['first_loss']:.4f}"] for r in found])

def host(root):
    "A line on the machine, and a table of what two of its GPUs send each other"
    found = [r for r in host_records(root) if r["section"] == "collectives"]
    names = list(dict.fromkeys(r["name"] for r in found))
    by = {(r["name"], r["bytes"]): r for r in found}
    size = lambda n: f"{n//2**20} MiB" if n >= 2**20 else f"{n//2**10} KiB"
    cell = lambda r: f"{r['ms']:.3f} ms, {r['bus_gbs']:.0f}"
    yield ("{gpus} {gpu}s of one machine, driver {driver}, PyTorch {torch}, {date}: median time of the slower GPU, and bus bandwidth in GB/s as nccl-tests "
           "defines it. `tests/measure_host.py` measures yours.").format(**found[0])
    yield table(["bytes of the tensor", *(f"`{n}`" for n in names)], [[size(n), *(cell(by[k, n]) for k in names)] for n in dict.fromkeys(r["bytes"] for r in found)])

# --- explained models ---

OFF = 1.2 # times its prediction, from which on a kind of operation stands in the table

def explained_records(root): return read_json(folder(root)/"explain/nvidia-h200.json", list)

def reached(k): # a kind of operation
    "The rate at which the measured kernels did what was counted, as text"
    if k["bound"] == "arithmetic" or k["kind"] in ("matrix products", "fused attention"): return f"{k['flops']/k['measured_ms']/1e9:,.0f} TFLOP/s"
    return f"{k['bytes']/k['measured_ms']/1e9:.2f} TB/s"

def explained(root):
    "A line on the machine, a table of steps, and one of the kinds of operations that took longest over what was predicted"
    records = explained_records(root)
    ratio = lambda r: r["measured_ms"]/r["predicted_ms"]
    kinds = [(r, k) for r in records for k in r["kinds"] if k["measured_ms"] and k["measured_ms"] > .05*r["measured_ms"] and ratio(k) > OFF]
    shape = lambda r: " and ".join(" × ".join(f"{n:,}" for n in s) for s in r["batch"][:1])
    yield "Measured on one {gpu}, {stack}, {date}:".format(**records[0], stack=versions(records[0]))
    kernels = lambda r: sum(k["measured_ms"] or 0 for k in r["kinds"])
    yield table(["model", "batch", "with", "predicted ms", "measured ms", "some minutes before", "its kernels, ms", "bound by"],
                [[r["name"], shape(r), ", ".join(r["rungs"]) or "nothing", f"{r['predicted_ms']:.1f}", f"{r['measured_ms']:.1f}", f"{r['measured_before_ms']:.1f}",
                  f"{kernels(r):.1f}", r["bound"]] for r in records])
    yield "Kinds with over 5% of a step's time that took over {:.0%} of their prediction:".format(OFF)
    yield table(["model", "kind", "predicted ms", "measured ms", "measured / predicted", "reached"],
                [[r["name"], k["kind"], f"{k['predicted_ms']:.1f}", f"{k['measured_ms']:.1f}", f"{ratio(k):.2f}×", reached(k)] for r, k in kinds])

def explained_model(root, model): # its name
    "The record of a model's step"
    return next(r for r in explained_records(root) if r["name"] == model)

def of_explained(root, model, kind): # names
    "The measured milliseconds of a kind of a model's step"
    return next(k["measured_ms"] for k in explained_model(root, model)["kinds"] if k["kind"] == kind)

def kernel_ms(root, model, part): # a name; of the kernel's
    "The milliseconds of a step in kernels with this in their names"
    return sum(k["ms"] for k in explained_model(root, model)["kernels"] if part in k["name"])

def without_dropout(root, model, kind):
    "The measured milliseconds of a kind without dropout"
    return explained_model(root, model)["without_dropout"][kind]

# --- models of other shapes ---

def shapes(root):
    "A line on the machine, and a table of runs of models without a name"
    records = read_json(folder(root)/"shapes/nvidia-h200.json", list)
    r = records[0]
    of = lambda c: f"{c['layers']} × {c['width']:,}, {c['heads']} heads of {(c.get('attention_width') or c['width'])//c['heads']}, {c['kv_heads']} KV heads, {c['seq_len']:,} tokens"
    yield ("Runs of {steps} steps of {step_tokens:,} tokens with `--rungs fastest` and the default recipe, on one {gpu}, {stack}, {date}:").format(**r, stack=versions(r))
    yield table(["shape", "weights", "tokens/s", "ms a step", "predicted ms", "loss", "logits in transformers differ by up to", "their standard deviation"],
                [[of(r["config"]), f"{r['parameters']/1e6:,.0f} M", f"{r['tok_s']:,.0f}", f"{r['step_ms']:.1f}", f"{r['predicted_ms']:.1f}", f"{r['val_loss']:.3f}",
                  f"{r['logits_gap']:.1e}", f"{r['logits_std']:.1f}"] for r in records])

# --- what the finale printed ---

def finale_texts(root):
    "The plain texts and tables that the cells of the finale left, in their order"
    cells = json.loads((root/"nbs/7_using_a_model/73_finale.ipynb").read_text(encoding="utf-8"))["cells"]
    for out in (o for c in cells for o in c.get("outputs", [])):
        yield "".join(out.get("text", out.get("data", {}).get("text/markdown", "")))

def bill(root):
    "The bill: `minutes`, `watts`, `kilojoules` -> `predicted`, `steps alone`, `everything` -> number"
    table = next(t for t in finale_texts(root) if "steps alone" in t and t.startswith("|"))
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: dict(zip(head[1:], map(float, values))) for name, *values in rows}

def spent(root): # seconds of the finale's run
    "Where its seconds went: `start`, `steps`, `rest`"
    line = next(t for t in finale_texts(root) if "up to and with the first step" in t)
    found = re.search(r"the run: (\d+) s up to .*?, (\d+) s for all others, (\d+) s for evaluations", line)
    return dict(zip(("start", "steps", "rest"), map(int, found.groups())))

def finale_tokens(root):
    "Millions of tokens that the finale trained on"
    return float(next(m[1] for t in finale_texts(root) if (m := re.match(r"([\d.]+) M tokens:", t))))

# --- pages ---

def environment(root):
    "That of all pages, with what these templates use"
    env, top, race = for_all_pages(), record(**TOP), newest(folder(root))
    env.globals |= dict(record=record, gain=gain, of_two=of_two, step=step, rounded=rounded, top=top,
                        gpu=f"one {top['gpu']}", course=course_records(), bill=bill(root), spent=spent(root), needs=needs(root), accelerated=list(accelerated(root)), explained=list(explained(root)), shapes=list(shapes(root)), of_explained=partial(of_explained, root),
                        kernel_ms=partial(kernel_ms, root), without_dropout=partial(without_dropout, root),
                        layouts=list(layouts(root)), tensor_parallel=list(tensor_parallel(root)), sharded=list(sharded(root)), host=list(host(root)), trained=training(race, folder(root)) or trained_before(folder(root)),
                        lead=race[OURS], lead_needs=packages(race), rival=best(race, "torch.compile"),
                        finale_tokens=finale_tokens(root), trouble=Trouble(root))
    return env

OWN = "transformers", "explain", "several_gpus" # pages whose tables say where and when each was measured

def rendered(root): # of the repository
    "Name of each page and its text"
    env = environment(root)
    for path in sorted((root/"nbs/site/_build/train").glob("*.qmd")):
        head, mark, body = env.from_string(path.read_text(encoding="utf-8")).render().partition("\n---\n")
        foot = "" if path.stem in OWN else env.globals["trouble"].measured_on() if path.stem == "telemetry" else measured_on()
        yield path.name, f"{head}{mark}{NOTE.format(path.name)}\n{body}\n{foot}\n"
