"""The rungs of notebook 28 on a GPU: python3 bench_fewer_passes.py OUT.json. Some 110 seconds on an H200; parts that would begin after
the budget (seconds, a second argument; 115 by default) are left out and named. Every part stands alone: one that fails is told, with its
traceback, and the others go on."""
import gc, json, statistics, sys, time, traceback
from dataclasses import replace
from functools import partial
import torch, torch.nn.functional as F
from llm_speedrun.measure import compare, machine, ratio, sample_ms, summarize, time_ms
from llm_speedrun.model import workload
from llm_speedrun.runs import HandedOut, build, settled, step_of, stepper_of
from llm_speedrun.rungs.chunked_ce import ChunkedCE
from llm_speedrun.rungs.fp8 import E5M2
from llm_speedrun.rungs.fused_fp8 import Fp8CE, LayerScales, Scaling, empty_pair, logits_quantize, quantize_weights
import llm_speedrun.rungs.fewer_passes as fewer
from llm_speedrun.rungs.fewer_passes import *
from llm_speedrun.rungs.optim import make_fused
from llm_speedrun.rungs.triton import graph_ms

OUT, BUDGET_S, START = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 115., time.monotonic()
GPU = torch.cuda.is_available()
DEVICE, results = torch.device("cuda" if GPU else "cpu"), dict(machine=machine(), parts={})
MODELS = {"124m": 64, "1b": 16} if GPU else {"tiny": 4}
MAIN = next(iter(MODELS))
FP8 = "tf32 bf16 flash fused_ops chunked_ce fp8:parts=heads+out+mlp+head cuda_graphs fused_adamw".split()
BF16 = [r for r in FP8 if not r.startswith("fp8")]
BOTH = ["head_groups", "direct_update"]
THREE = BOTH + ["fp8_copies"]
GEN = torch.Generator(DEVICE).manual_seed(0)

def rand(*shape, dt=torch.float32): return torch.randn(*shape, device=DEVICE, generator=GEN).to(dt)
def off(exact, x): return ((x.double() - exact).norm()/exact.norm()).item()
def clear(): gc.collect(); GPU and torch.cuda.empty_cache()

def part(f, *args):
    "Run a part, keep what it returns, or how it failed"
    name = " ".join([f.__name__, *(str(a) for a in args)])
    if time.monotonic() - START > BUDGET_S: res = dict(left_out=True)
    else:
        t0 = time.monotonic()
        try: res = f(*args)
        except Exception: res = dict(ok=False, error=traceback.format_exc()); print(res["error"], flush=True)
        res["seconds"] = round(time.monotonic() - t0, 1)
    clear()
    results["parts"][name] = res
    with open(OUT, "w") as o: json.dump(results, o, indent=1)
    print(f"{time.monotonic() - START:6.1f} s  {name}: " + json.dumps({k: v for k, v in res.items() if k not in ("error", "curves")}), flush=True)

def head_scales():
    s = Scaling(1, E5M2, DEVICE); s.jit = False
    i = [s.scale, s.inverse]
    i[0].fill_(16.); i[1].fill_(1/16.)
    return LayerScales(s, 0, E5M2)

def head_case(c, n):
    h, w = rand(1, n, c.width, dt=torch.bfloat16), rand(c.vocab, c.width)*.05
    y = torch.randint(c.vocab, (1, n), device=DEVICE, generator=GEN); y[0, ::7] = -100
    return h, w, y

def grads_of(loss, h, w, y):
    h, w = (t.clone().requires_grad_() for t in (h, w))
    out = loss(h, w, y); out.backward()
    return out.detach(), h.grad, w.grad

def check_head(name):
    "Both heads against float64 at the model's own width and vocabulary; 3,000 tokens, several groups, chunks within them"
    c = workload(name)
    h, w, y = head_case(c, 3000 if GPU else 300)
    exact = grads_of(lambda h, w, y: F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten()), h.double(), w.double(), y)
    one = 2*c.vocab*1024
    sizes, res, ok = dict(group=one, logits=one//4), {}, True
    for kind, more, wide in (("fp8", dict(scales=head_scales()), w), ("bf16", {}, w.bfloat16())):
        theirs, ours = (Fp8CE if more else ChunkedCE)(budget=one, **more), GroupedCE(**sizes, **more)
        a, b = ([off(e, x) for e, x in zip(exact, grads_of(f, h, wide, y))] for f in (theirs, ours))
        res[kind] = dict(theirs=a, ours=b)
        ok &= all(x < 1.05*t + 1e-4 for t, x in zip(a, b))
    x, t = rand(640, c.vocab, dt=torch.bfloat16), torch.randint(c.vocab, (640,), device=DEVICE, generator=GEN)
    t[5] = -100
    q = empty_pair(x, *x.shape, E5M2)
    for p in (slice(0, 384), slice(384, 640)): logits_into(x[p], t[p], x[p].float().logsumexp(1), q[0][p], q[1][:, p], -100, 0., 0.)
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(q, logits_quantize(x, t, x.float().logsumexp(1), -100, 0., 0.)))
    nan = h.clone(); nan[0, 5] = torch.nan
    seen = [t.isnan().any().item() for t in grads_of(GroupedCE(**sizes, scales=head_scales()), nan, w, y)]
    return dict(ok=ok and same and all(seen), errors=res, same_bytes=same, nan_is_seen=seen)

def check_update():
    "Our AdamW and PyTorch's fused one against float64, after three steps"
    c = workload(MAIN)
    sizes = [c.vocab*c.width//4, 4097, c.width]
    g, res = torch.Generator(DEVICE).manual_seed(1), {}
    start, gs = [torch.randn(n, device=DEVICE, generator=g) for n in sizes], [[torch.randn(n, device=DEVICE, generator=g) for n in sizes] for _ in range(3)]
    def after(make, dt, factor):
        ps = [torch.nn.Parameter(t.to(dt, copy=True)) for t in start]
        opt = make([dict(params=ps, weight_decay=.1)])
        for grads in gs:
            for p, t in zip(ps, grads): p.grad = t.to(dt)*(1 if factor else .3)
            if factor: opt.factor = torch.full((1,), .3, device=DEVICE)
            opt.step()
        return [p.detach() - t.to(dt) for p, t in zip(ps, start)]
    how = dict(lr=1e-2, betas=(.9, .95))
    exact = after(partial(torch.optim.AdamW, **how), torch.float64, False)
    for k, v in dict(fused=after(partial(torch.optim.AdamW, fused=True, **how), torch.float32, False),
                     ours=after(partial(ClippedAdamW, **how), torch.float32, True)).items():
        res[k] = [off(e, x) for e, x in zip(exact, v)]
    return dict(ok=all(a < 2*b + 1e-6 for a, b in zip(res["ours"], res["fused"])), errors=res)

def time_head(name, kind):
    "The head alone at the step's size: milliseconds, and the peak over what it begins with"
    c = workload(name)
    n = MODELS[name]*c.seq
    mib = [None, (2048, 640), (2048, 192), (2048, 96), (2048, 48), (1024, 96), (4096, 96), (8192, 96)]
    if kind == "bf16": mib = [None, (640, 640), (2048, 640), (2048, 96), (2048, 48), (7000, 640)]
    res = {}
    for m in mib:
        scaling = Scaling(1, E5M2, DEVICE)
        scaled = dict(scales=LayerScales(scaling, 0, E5M2)) if kind == "fp8" else {}
        loss = (Fp8CE if scaled else ChunkedCE)(**scaled) if m is None else GroupedCE(group=m[0]*2**20, logits=m[1]*2**20, **scaled)
        def made():
            h, w, y = head_case(c, n)
            h.requires_grad_(); w.requires_grad_()
            def step():
                with torch.autocast(DEVICE.type, torch.bfloat16), scaling.in_step(), scaling.in_pass(): loss(h, w, y).backward()
                h.grad = w.grad = None
            return step
        label = "as it was" if m is None else f"group {m[0]} logits {m[1]}"
        try:
            clear()
            if GPU: torch.cuda.reset_peak_memory_stats()
            ms = graph_ms(made, calls=1)
            peak = torch.cuda.max_memory_allocated()/2**30 if GPU else None
            res[label] = dict(ms=ms, peak_gib=peak, sizes=None if m is None else loss.sizes(n, c.width, c.vocab, 2, torch.empty(0, device=DEVICE)))
        except Exception as e: res[label] = dict(error=f"{type(e).__name__}: {e}")
    return res

def time_update(name):
    "The update alone, of gradients handed out as by a recording; PyTorch's kernel with grad_scale beside it"
    c, res = workload(name), {}
    for label, rungs in {"as it was": ["fused_adamw"], "direct": ["fused_adamw", "direct_update"], "direct, PyTorch's kernel": ["direct_update"]}.items():
        run = build(c, rungs)
        if "PyTorch" in label: run = replace(run, optimizer=make_fused)
        step = stepper_of(run)(run)
        grads, one = [torch.randn_like(p) for p in step.params], torch.ones((), device=DEVICE)
        def update():
            if isinstance(step, DirectStepper): step.take(step.params, grads)
            else: HandedOut.apply(one, lambda: grads, *step.params).backward()
            if "PyTorch" not in label: return step.update()
            norm = torch.nn.utils.get_total_norm(grads)
            step.opt.grad_scale = 1/(1/(norm + 1e-6)).clamp(max=1.)
            step.opt.step(); step.opt.zero_grad()
        for _ in range(3): update()
        n, ms = sum(p.numel() for p in step.params), summarize(sample_ms(update, 12)).ms
        res[label] = dict(ms=ms, TBs=n*(48 if label == "as it was" else 32)/ms/1e9)
        del step, grads, run, update; clear()
    return res

def with_copies(name):
    "A model in FP8 with gradients, its `Copies`, and the update"
    c = workload(name)
    run = build(c, [r for r in settled(c, FP8) if r != "cuda_graphs"] + THREE)
    step = stepper_of(run)(run)
    grads = [torch.randn(p.shape, device=DEVICE, generator=GEN)*1e-3 for p in step.params]
    def update(): step.take(step.params, grads); step.update()
    return run.model.layers[0].copies, step, update

def check_copies(name):
    "The update's copies and maxima against a separate pass over the new weights, bit for bit"
    copies, step, update = with_copies(name)
    old = [p.detach().clone() for p in step.params]
    for t in copies.scaling.forward_max: t[:, 0] = .3
    update()
    pairs = {k: tuple(t.clone() for t in v) for k, v in copies.pairs.items()}
    wrong = []
    for (layer, name), ws in copies.groups.items():
        i, amax = fewer.slot(copies.scale[layer], name), torch.zeros(1, device=DEVICE)
        pair = quantize_weights([w.detach() for w in ws], i, amax)
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pair, pairs[layer, name]))
        if not same or not torch.equal(amax, fewer.slot(copies.maxima[layer], name)): wrong.append((layer, name))
    moved = all(not torch.equal(a, p.detach()) for a, p in zip(old, step.params))
    return dict(ok=moved and not wrong, wrong=wrong[:8], groups=len(copies.groups), moved=moved)

def time_copies(name):
    "The update with copies, by tile; the one without; and the separate pass that it saves"
    copies, step, update = with_copies(name)
    def ms(f):
        for _ in range(3): f()
        return summarize(sample_ms(f, 12)).ms
    res = {}
    for rows, cols, warps in ((64, 64, 8), (64, 64, 4), (32, 64, 4), (32, 128, 4), (64, 128, 8), (128, 64, 8)):
        fewer.ROUNDING_TILE = dict(ROWS=rows, COLS=cols, num_warps=warps)
        step.opt.tables.clear()
        try: res[f"update and copies, {rows} x {cols}, {warps} warps"] = ms(update)
        except Exception as e: res[f"update and copies, {rows} x {cols}, {warps} warps"] = f"{type(e).__name__}: {e}"
    fewer.ROUNDING_TILE = dict(ROWS=64, COLS=64, num_warps=8)
    copies.maxima[0].zero_()
    def apart():
        for (layer, name), ws in copies.groups.items():
            quantize_weights(list(ws), fewer.slot(copies.scale[layer], name), fewer.slot(copies.maxima[layer], name))
    with torch.no_grad(): res["separate pass"] = graph_ms(lambda: apart, calls=1) if GPU else ms(apart)
    step.opt.where = {}
    step.opt.tables.clear()
    res["update alone"] = ms(update)
    return res

def time_steps(name, base, lists):
    "Whole steps, interleaved: ms, ratio to the first, peak"
    c, B = workload(name), MODELS[name]
    base = settled(c, FP8 if base == "fp8" else BF16)
    res = compare({k: step_of(c, base + list(r), B) for k, r in lists.items()}, rounds=6, reps=3 if name == "1b" else 4)
    first = next(iter(res.values()))
    return {k: dict(ms=m.times.ms, p20=m.times.p20, p80=m.times.p80, ratio=ratio(first, m), ms_less=first.times.ms - m.times.ms, peak_gib=m.peak_gib)
            for k, m in res.items()}

def micro_steps(name):
    "The same with two micro-batches a step"
    c, B = workload(name), MODELS[name]
    base = settled(c, FP8)
    res = compare({k: step_of(c, base + r, B, micro=B//2) for k, r in dict(course=[], both=BOTH, three=THREE).items()}, rounds=5, reps=3)
    return {k: dict(ms=m.times.ms, ratio=ratio(res["course"], m), peak_gib=m.peak_gib) for k, m in res.items()}

def losses(kind, steps=60):
    "The same batches with and without: losses of structured random text, and how far they are apart at the end"
    c, B, base, res = workload(MAIN), 8 if GPU else 4, settled(workload(MAIN), FP8 if kind == "fp8" else BF16), {}
    g = torch.Generator(DEVICE).manual_seed(5)
    table = torch.randint(c.vocab, (c.vocab, 4), device=DEVICE, generator=g)     # each token has four that may follow
    def batch():
        t = [torch.randint(c.vocab, (B,), device=DEVICE, generator=g)]
        for k in torch.randint(4, (c.seq, B), device=DEVICE, generator=g): t.append(table[t[-1], k])
        t = torch.stack(t, 1)
        return t[:, :-1].contiguous(), t[:, 1:].contiguous()
    few = [batch() for _ in range(4)]
    for label, more in (dict(course=[], both=BOTH) | (dict(three=THREE) if kind == "fp8" else {})).items():
        run = build(c, base + more)
        step = stepper_of(run)(run)
        for group in step.opt.param_groups: group["lr"] = 3e-4
        res[label] = torch.stack([step(few[i % 4]) for i in range(steps)]).tolist()
        del step, run; clear()
    apart = abs(statistics.mean(res["course"][-10:]) - statistics.mean(res["both"][-10:]))
    if "three" in res: apart = max(apart, abs(statistics.mean(res["course"][-10:]) - statistics.mean(res["three"][-10:])))
    return dict(ok=apart < .05, apart=apart, first=[r[0] for r in res.values()], last=[r[-1] for r in res.values()], curves=res)

if __name__ == "__main__":
    steps = dict(course=[], groups=["head_groups"], **{"groups, small chunks": ["head_groups:logits=96"]}, direct=["direct_update"])
    for name in MODELS: part(check_head, name)
    part(check_update)
    for name in MODELS: part(check_copies, name)
    part(time_head, MAIN, "fp8"); part(time_update, MAIN); part(time_copies, MAIN)
    part(time_steps, MAIN, "fp8", steps)
    part(time_steps, MAIN, "fp8", dict(course=[], both=BOTH, three=THREE, **{"three, small chunks": ["head_groups:logits=96", *THREE[1:]]}))
    part(time_steps, MAIN, "bf16", dict(course=[], groups=["head_groups"], both=BOTH))
    if "1b" in MODELS:
        part(time_steps, "1b", "fp8", dict(course=[], both=BOTH))
        part(time_steps, "1b", "fp8", dict(both=BOTH, three=THREE))
        part(time_steps, "1b", "bf16", dict(course=[], both=BOTH))
        part(time_head, "1b", "fp8"); part(time_update, "1b"); part(time_copies, "1b")
    part(losses, "fp8"); part(losses, "bf16")
    part(time_head, MAIN, "bf16"); part(micro_steps, MAIN)
    print("not ok:", [k for k, v in results["parts"].items() if v.get("ok") is False] or "nothing", flush=True)
