"""The sitting of issue 18 on one H200: python3 bench_18.py OUT.json [STAGE[=SECONDS] ...] [--corpus DIR] [--nanogpt DIR] [--smoke]

Stages (all of them by default, in this order): checks, parts, steps124m, steps1b, peers124m, peers1b, loop, smallest, losses, tiles.
Each runs in a process of its own with a limit of its own, begins no new part near that limit, and writes what it has after each part;
one that fails or is killed ends nothing but itself. OUT.json has all stages, those of former calls too. --corpus: a folder of tokens, as
`speedrun_data` writes it (by default the offline corpus); --nanogpt: a clone. --smoke tries every stage on a tiny model, on a CPU too."""
import argparse, gc, json, os, statistics, subprocess, sys, tempfile, time, traceback
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path

SECONDS = dict(checks=100, parts=90, steps124m=130, steps1b=220, peers124m=240, peers1b=330, loop=200, smallest=150, losses=330, tiles=120)
BEGAN = time.monotonic()
def spent(): return time.monotonic() - BEGAN
def say(*what): print(f"{spent():6.1f} s ", *what, flush=True)

# The parent: a process for each stage

def write(path, what):
    Path(f"{path}.new").write_text(json.dumps(what, indent=1, default=str) + "\n")
    os.replace(f"{path}.new", path)

def run_stages(a, wanted):
    out = Path(a.out)
    every = json.loads(out.read_text()) if out.exists() else {}
    for name, seconds in wanted:
        part = out.with_suffix(f".{name}.json")
        part.unlink(missing_ok=True)
        say(f"== {name}, at most {seconds:.0f} s")
        words = [sys.executable, "-u", __file__, str(part), name, "--child", str(seconds - 12*(not a.smoke)), "--corpus", a.corpus, "--nanogpt", a.nanogpt]
        t0 = time.monotonic()
        try: end = subprocess.run(words + ["--smoke"]*a.smoke + ["--quick"]*a.quick + ["--until", str(a.until), "--only", a.only], timeout=seconds).returncode
        except subprocess.TimeoutExpired: end = "killed at its limit"
        found = json.loads(part.read_text()) if part.exists() else {}
        every[name] = found | dict(end=end, seconds=round(time.monotonic() - t0, 1))
        write(out, every)
        say(f"== {name}: {every[name]['seconds']} s, end {end}; not ok: {bad_parts(found) or 'nothing'}")
    good = all(s.get("end") == 0 and not bad_parts(s) for n, s in every.items() if n in dict(wanted))
    say("all stages ended well" if good else "NOT ALL STAGES ENDED WELL")
    return 0 if good else 1

def bad_parts(stage): return [k for k, v in stage.get("parts", {}).items() if isinstance(v, dict) and not v.get("ok", True)]

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("out"); ap.add_argument("stages", nargs="*"); ap.add_argument("--corpus", default="stdlib"); ap.add_argument("--nanogpt", default="")
ap.add_argument("--quick", action="store_true")
ap.add_argument("--only", default="", help="of our lists those whose name has one of these, between bars")
ap.add_argument("--until", type=int, default=10**9, help="steps of the losses' runs, whose rates stay those of all steps")
ap.add_argument("--smoke", action="store_true"); ap.add_argument("--child", type=float, default=0., help=argparse.SUPPRESS)
A = ap.parse_args()
if not A.child:
    names = [s.partition("=") for s in A.stages or SECONDS]
    if wrong := [n for n, _, _ in names if n not in SECONDS]: ap.error(f"no such stage: {', '.join(wrong)}; there are {', '.join(SECONDS)}")
    sys.exit(run_stages(A, [(n, float(s or (600 if A.smoke else SECONDS[n]))) for n, _, s in names]))

# A stage

if A.smoke: os.environ["IN_TEST"] = "1" # few repetitions
if A.smoke and A.stages[0] == "tiles": os.environ["TRITON_INTERPRET"] = "1" # the kernels themselves; elsewhere they would take minutes
import torch, torch.nn.functional as F
GPU = torch.cuda.is_available()
import llm_speedrun.rungs.fewer_bytes as fewer
import llm_speedrun.rungs.fewer_passes as passes
from llm_speedrun.data import Batches, open_corpus, prefetch, val_batches
from llm_speedrun.measure import compare, machine, ratio, sample_ms, summarize, take_turns, warm_up
from llm_speedrun.model import workload
from llm_speedrun.peers import Contender, Peer, contender, contender_record, peer
from llm_speedrun.runs import HandedOut, Run, baseline, build, code_of, find_rung, step_of, stepper_of
from llm_speedrun.rungs import fused_fp8 as f8
from llm_speedrun.rungs.chunked_ce import ChunkedCE
from llm_speedrun.rungs.fp8 import E5M2, sqnr
from llm_speedrun.rungs.triton import blocks, graph_ms

DEVICE, COPY, LIMIT = torch.device("cuda" if GPU else "cpu"), 4.2e12, A.child
REAL = GPU and not A.smoke
MODELS = {"124m": 64, "1b": 16} if REAL else {"tiny": 4}
MAIN, LAST = next(iter(MODELS)), list(MODELS)[-1]
FLASH = "flash:backend=cudnn" if GPU else "flash"
BODY = ["tf32", "bf16", FLASH, "fused_ops", "chunked_ce"]
FP8 = [*BODY, "fp8:parts=heads+out+mlp+head", "cuda_graphs", "fused_adamw"]
BF16 = [*BODY, "cuda_graphs", "fused_adamw"]
COURSE = dict(fp8=FP8, bf16=BF16)
NEW = ["tied_embedding", "head_groups", "direct_update"]
def asked(name): return any(w in name for w in A.only.split("|"))
def there(*rungs): return [r for r in rungs if not find_rung(r).needs()]
ALL = dict(fp8=NEW + there("flash4", "fp8_epilogues"), bf16=NEW + there("flash4", "epilogues", "fused_ce"))
def swapped(rungs, **new): return [new.get(r, r) for r in rungs]
EIGHT = dict(fused_adamw="adamw8bit")
SMALL = swapped(COURSE["bf16"] + ALL["bf16"], head_groups="head_groups:group=1024", **EIGHT) + ["recompute_rope"] # nothing of a layer is kept in 8 bits, but AdamW's moments are
RES = dict(machine=machine(), smoke=A.smoke, parts={})
GEN = torch.Generator(DEVICE).manual_seed(0)

def save(): write(A.out, RES)
def clear(): gc.collect(); GPU and torch.cuda.empty_cache()
def rand(*shape, dt=torch.bfloat16, seed=None):
    return torch.randn(*shape, device=DEVICE, generator=GEN if seed is None else torch.Generator(DEVICE).manual_seed(seed)).to(dt)
def off(exact, x): return ((x.double() - exact.double()).norm()/exact.double().norm()).item()
def us(f, calls=5): return round(1e3*graph_ms(lambda: f, calls=calls), 1)

def part(name, f, *args, needs=3., **how):
    "Run a part, keep what it returns or how it failed, and write everything"
    if spent() + needs > LIMIT: say("NO TIME FOR", name); RES["parts"][name] = dict(left_out=True); return save()
    t0 = time.monotonic()
    try: res = f(*args, **how)
    except Exception: res = dict(ok=False, error=traceback.format_exc()); print(res["error"], flush=True)
    res["seconds"] = round(time.monotonic() - t0, 1)
    RES["parts"][name] = res; save(); clear()
    say(name, "FAILED" if not res.get("ok", True) else "ok", f"{res['seconds']} s", json.dumps({k: v for k, v in res.items()
        if k not in ("error", "curves", "seconds", "ok", "cases", "ways")}, default=str)[:900])
    return res

def tried(cases, needs=1.5):
    "What each function returns by name; what fails is noted, and nothing is begun near the limit"
    res = {}
    for k, f in cases.items() if isinstance(cases, dict) else cases:
        if spent() + needs > LIMIT: res[k] = "no time"; continue
        try: res[k] = f()
        except Exception as e: res[k] = f"{type(e).__name__}: {str(e)[:200]}"
        say(k, res[k]); clear()
    return dict(cases=res)

def tokens(kind, N, V):
    g = torch.Generator(DEVICE).manual_seed(1)
    if kind == "random": return torch.randint(V, (N,), device=DEVICE, generator=g)
    if kind == "same": return torch.full((N,), 11, device=DEVICE)
    return torch.multinomial(1/torch.arange(1., V + 1, device=DEVICE), N, True, generator=g) # as in text

# checks: what the rungs of 27 and 28 compute, at real shapes

def check_rows(name, kind):
    c = workload(name); N, V, d = MODELS[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), rand(V, d, dt=torch.float32)
    exact = g.double().index_add_(0, x, dh.double())
    theirs = g + torch.ops.aten.embedding_dense_backward(dh.float(), x, V, -1, False)
    a, b = g.clone(), g.clone()
    fewer.add_rows(a, x, dh); fewer.add_rows(b, x, dh)
    mine, other, rest = off(exact, a), off(exact, theirs), torch.ones(V, dtype=torch.bool, device=DEVICE).index_fill(0, x, False)
    return dict(ok=bool(mine <= 2*other + 1e-8 and a.equal(b) and a[rest].equal(g[rest])), error=mine, theirs=other, repeats=a.equal(b))

def check_take(name):
    c = workload(name); w, x = rand(c.vocab, c.width, dt=torch.float32), tokens("random", 4096, c.vocab).view(4, -1)
    return dict(ok=bool(fewer.take_rows(w, x, torch.bfloat16).equal(F.embedding(x, w).bfloat16())))

def head_scales():
    s = f8.Scaling(1, E5M2, DEVICE); s.jit = False
    s.scale.fill_(16.); s.inverse.fill_(1/16.)
    return f8.LayerScales(s, 0, E5M2)

def head_case(c, n):
    h, w, y = rand(1, n, c.width), rand(c.vocab, c.width, dt=torch.float32)*.05, torch.randint(c.vocab, (1, n), device=DEVICE, generator=GEN)
    y[0, ::7] = -100
    return h, w, y

def grads_of(loss, h, w, y):
    h, w = (t.clone().requires_grad_() for t in (h, w))
    out = loss(h, w, y); out.backward()
    return out.detach(), h.grad, w.grad

def check_head(name):
    "Both heads against float64 at the model's own width and vocabulary; several groups, chunks within them"
    c = workload(name)
    h, w, y = head_case(c, 3000 if GPU else 300)
    exact = grads_of(lambda h, w, y: F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten()), h.double(), w.double(), y)
    one, res, good = 2*c.vocab*1024, {}, True
    for kind, more, wide in (("fp8", dict(scales=head_scales()), w), ("bf16", {}, w.bfloat16())):
        theirs, ours = (f8.Fp8CE if more else ChunkedCE)(budget=one, **more), passes.GroupedCE(group=one, budget=one//4, **more)
        a, b = ([off(e, x) for e, x in zip(exact, grads_of(f, h, wide, y))] for f in (theirs, ours))
        res[kind], good = dict(theirs=a, ours=b), good and all(x < 1.05*t + 1e-4 for t, x in zip(a, b))
    nan = h.clone(); nan[0, 5] = torch.nan
    seen = [t.isnan().any().item() for t in grads_of(passes.GroupedCE(group=one, budget=one//4, scales=head_scales()), nan, w, y)]
    return dict(ok=good and all(seen), errors=res, nan_is_seen=seen)

def check_update():
    "Our AdamW and PyTorch's fused one against float64, after three steps"
    c = workload(MAIN)
    sizes, g = [c.vocab*c.width//4, 4097, c.width], torch.Generator(DEVICE).manual_seed(1)
    new = lambda: [torch.randn(n, device=DEVICE, generator=g) for n in sizes]
    start, gs = new(), [new() for _ in range(3)]
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
    res = {k: [off(e, x) for e, x in zip(exact, v)] for k, v in dict(fused=after(partial(torch.optim.AdamW, fused=True, **how), torch.float32, False),
           ours=after(partial(passes.ClippedAdamW, **how), torch.float32, True)).items()}
    return dict(ok=all(a < 2*b + 1e-6 for a, b in zip(res["ours"], res["fused"])), errors=res)

def model_grads(rungs=None, micro=2):
    """Loss and gradients of the third time that the same micro-batches pass (recorded by then, with cuda_graphs); without a list of rungs those
    of the naive model in float64, which one time is enough for"""
    c, exact = replace(workload("124m"), layers=3) if REAL else workload("tiny"), rungs is None
    run = Run(baseline(c).model.double()) if exact else build(c, rungs)
    step = stepper_of(run)(run)
    kept = {}
    def instead(n): kept.update({k: p.grad.clone() for k, p in run.model.named_parameters()})
    step.update = instead
    x = torch.randint(c.vocab, (micro, 2, 4, c.seq), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    x[:, 1, :, ::7] = -100 # so that 1/n is no power of two, which would round nothing
    for _ in range(1 if exact else 3):
        step.opt.zero_grad()
        loss = step(*((b[0], b[1]) for b in x))
    return loss.item(), kept

@lru_cache
def exact_grads(): return model_grads()[1]

def farther(k, mine, other):
    """How many times farther from float64 a gradient is than another. Of two errors that are noise in n numbers the norms differ by some
    1/sqrt(n): three times that is luck"""
    exact = exact_grads()[k]
    return off(exact, mine)/(off(exact, other) + 1e-7)/(1 + 3/exact.numel()**.5)

def same(rungs, more, least=None):
    """Gradients with `more` beside those without: no farther from float64, and `least` dB from each other where nothing is rounded in another
    way. In 8 bits one other rounding is enough to change those of all layers below, and then gradients that are as good differ by some 15 dB"""
    (a, ga), (b, gb) = model_grads(rungs), model_grads([*rungs, *more])
    dB = {k: sqnr(ga[k].float(), gb[k].float()) if not ga[k].equal(gb[k]) else 999. for k in ga}
    times = {k: farther(k, gb[k], ga[k]) for k in ga}
    k, far = min(dB, key=dB.get), max(times, key=times.get)
    good = abs(a - b) < 5e-3 and all(t <= 1.1 for t in times.values()) and (least is None or dB[k] > least)
    return dict(ok=bool(good), losses=(a, b), worst=(k, dB[k]), embedding=dB["embed_tokens.weight"], farther=(far, times[far]),
                errors={k: (off(exact_grads()[k], ga[k]), off(exact_grads()[k], gb[k])) for k in (k, far)})

def checks():
    for n in MODELS:
        for k in ("random", "text", "same"): part(f"add_rows {n} {k}", check_rows, n, k)
        part(f"take_rows {n}", check_take, n)
        part(f"head {n}", check_head, n)
    part("update", check_update)
    bf16, fp8, rec = BODY, FP8[:-2], ["cuda_graphs"]
    lists = dict(tied_bf16=(bf16, ["tied_embedding"], 35.), tied_recorded=([*bf16, *rec], ["tied_embedding"], 35.), tied_fp8=(fp8, ["tied_embedding"], 20.),
                 tied_naive=(["tf32", "bf16"], ["tied_embedding"], 35.),
                 groups_bf16=(bf16, ["head_groups"], 35.), groups_fp8=(fp8, ["head_groups"]), direct_recorded=([*fp8, *rec], ["direct_update"], 17.),
                 all_bf16=([*bf16, *rec], NEW, 35.), all_fp8=([*fp8, *rec], NEW), nothing_fp8=(fp8, [], 17.))
    for k, how in lists.items(): part(f"gradients of a model, {k}", same, *how)

# parts: the pieces alone

def time_rows(name, kind):
    c = workload(name); N, V, d = MODELS[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), torch.zeros(V, d, device=DEVICE)
    back, wide = torch.ops.aten.embedding_dense_backward, dh.float()
    res = dict(theirs_all=us(lambda: g.add_(back(dh.float(), x, V, -1, False))), theirs_alone=us(lambda: back(wide, x, V, -1, False)),
               ours=us(lambda: fewer.add_rows(g, x, dh)), sort_used=us(lambda: fewer.token_order(x, V)),
               floor=round(1e6*(2*N*d + 8*x.unique().numel()*d)/COPY, 1))
    if kind == "random": res |= dict(sort_int64=us(lambda: x.sort(stable=True)), forward_theirs=us(lambda: F.embedding(x, g).bfloat16()),
        forward_ours=us(lambda: fewer.take_rows(g, x, torch.bfloat16)), forward_floor=round(1e6*6*N*d/COPY, 1))
    return res

def time_head(name, kind, group):
    "The head alone at the step's size: milliseconds, and the peak over what it begins with; `group` in MiB, or None"
    c = workload(name)
    n, scaling = MODELS[name]*c.seq, f8.Scaling(1, E5M2, DEVICE)
    scaled = dict(scales=f8.LayerScales(scaling, 0, E5M2)) if kind == "fp8" else {}
    loss = (f8.Fp8CE if scaled else ChunkedCE)(**scaled) if group is None else passes.GroupedCE(group=group*2**20, **scaled)
    def made():
        h, w, y = head_case(c, n)
        h.requires_grad_(); w.requires_grad_()
        def step():
            with torch.autocast(DEVICE.type, torch.bfloat16), scaling.in_step(), scaling.in_pass(): loss(h, w, y).backward()
            h.grad = w.grad = None
        return step
    clear(); GPU and torch.cuda.reset_peak_memory_stats()
    return dict(ms=graph_ms(made, calls=1), peak_gib=torch.cuda.max_memory_allocated()/2**30 if GPU else None)

def time_update(name, label, rungs):
    "The update alone, of gradients handed out as by a recording"
    run = build(workload(name), rungs)
    step = stepper_of(run)(run)
    grads, one = [torch.randn_like(p) for p in step.params], torch.ones((), device=DEVICE)
    def update():
        if isinstance(step, passes.DirectStepper): step.take(step.params, grads)
        else: HandedOut.apply(one, lambda: grads, *step.params).backward()
        step.update()
    for _ in range(3): update()
    if GPU: torch.cuda._sleep(2*10**8) # a tenth of a second, in which Python queues all of them: else it would be what is timed
    n, ms = sum(p.numel() for p in step.params), summarize(sample_ms(update, 12 if REAL else 2)).ms
    return dict(ms=ms, TBs=n*(48 if label == "as it was" else 32)/ms/1e9)

def parts():
    for n in MODELS:
        for k in ("random", "text", "same"): part(f"add_rows {n} {k}, µs", time_rows, n, k)
    for n in MODELS:
        for label, r in {"as it was": ["fused_adamw"], "direct": ["fused_adamw", "direct_update"]}.items(): part(f"update {n} {label}", time_update, n, label, r)
        for kind in ("fp8", "bf16"):
            for g in (None, 1024, 2048, 4096): part(f"head {n} {kind}, groups of {g} MiB", time_head, n, kind, g)

# steps124m, steps1b: whole steps, in turn

def in_turn(name, lists, rounds=6, reps=None):
    "Lists of rungs against the first of them: ms, ratio, peak"
    c, B = workload(name), MODELS[name]
    clear()
    res = compare({k: step_of(c, r, B) for k, r in lists.items()}, rounds=rounds if REAL else 1, reps=reps or (4 if c.width < 1024 else 2), warmup=4)
    first = next(iter(res.values()))
    out = {k: dict(ms=round(m.times.ms, 3), p20=round(m.times.p20, 3), p80=round(m.times.p80, 3), ratio=round(ratio(first, m), 4),
                   peak_gib=m.peak_gib, tok_s=round(B*c.seq/m.times.ms*1e3)) for k, m in res.items()}
    for k, m in out.items(): say(f"  {name} {k}: {m['ms']:.2f} ms ({m['p20']:.2f} to {m['p80']:.2f}), {m['ratio']:.4f}, {fmt(m['peak_gib'])} GiB, {m['tok_s']:,}")
    return dict(ways=out)

def fmt(x): return "-" if x is None else f"{x:.2f}"

def steps_of(name, most): # a workload, contestants at a time beside the course's list
    for kind in ("fp8", "bf16"):
        base = COURSE[kind]
        ways = {"all": NEW, "course again": [], **{r: [r] for r in NEW}, "all but head_groups": [r for r in NEW if r != "head_groups"]}
        names = list(ways)
        if most == 1: names = ["all", *(n for n in names if n not in ("all", "course again"))]
        for i in range(0, len(names), most):
            some = names[i:i + most]
            part(f"{name} {kind}: {', '.join(some)}", in_turn, name, {"course": base} | {k: base + ways[k] for k in some}, needs=8. + 4*most)

def steps124m(): steps_of(MAIN, 3) # more recordings at a time would not have room
def steps1b(): steps_of(LAST, 1)

# peers124m, peers1b: the sitting's table of targets

TARGETS = {("124m", "bf16"): (1.17, 15.), ("124m", "fp8"): (1.55, 18.), ("1b", "bf16"): (1.08, None), ("1b", "fp8"): (1.62, None)}

def ours(rungs, config):
    run = build(config, rungs)
    return Peer(stepper_of(run)(run), run.model, f"code {code_of(rungs)}")

def started(name, setup, c, B, micro=None):
    say(f"  building {name}")
    res = Contender(name, setup, c, B, micro) if micro else contender(name, setup, c, B)
    say(f"  {name}: {res.measured.warmup_s:.1f} s to warm up, {fmt(res.measured.peak_gib)} GiB, micro-batches of {res.micro}")
    return res

def raced(field, rounds, reps):
    "Ratios to the first by rounds of neighbours, tokens/s, peak, joules, losses"
    turns = take_turns({c.name: c.step for c in field}, rounds if REAL else 1, reps if REAL else 1)
    for c in field: c.measured.rounds = turns[c.name]
    keep = "ms ms_p20 ms_p80 tok_s ratio peak_gib joules micro losses source".split()
    return {c.name: {k: v for k, v in contender_record(c, field[0]).items() if k in keep} for c in field}

def of_peers(name):
    c, B = workload(name), MODELS[name]
    lists = {f"ours, {k} now": (COURSE[k] + ALL[k], B) for k in COURSE}
    (eight, _), (half, _) = lists.values()
    if c.width < 1024:
        rope = ["recompute_rope"]
        lists = {"ours, fp8 now": (eight, B), "ours, fp8, groups of 1.5 GiB": (swapped(eight, head_groups="head_groups:group=1536"), B),
                 "ours, fp8, recompute_rope": (eight + rope, B), "ours, bf16 now": (half, B), "ours, bf16, in 2 passes": (half, B//2),
                 "ours, bf16, small": (SMALL, B), "ours, bf16, recompute_rope": (half + rope, B)}
    else: lists["ours, fp8, adamw8bit"] = swapped(eight, **EIGHT), B
    many = 2 if c.width < 1024 else 1 # of ours at a time: each recording has memory of its own
    table, them = {}, []
    def first():
        names = [("nanoGPT", peer("nanogpt", A.nanogpt))] if A.nanogpt else []
        if not A.nanogpt: say("  no --nanogpt: plain torch.compile is what all are compared with")
        if not A.nanogpt or not A.quick: names.append(("plain torch.compile", peer("compile_whole" if c.width < 1024 else "compile_blocks")))
        for k, f in names: them.append(started(k, f, c, B))
        res = raced(them, 4 if len(them) > 1 else 1, 3)
        table.update(res)
        return dict(ways=res)
    part(f"{name}: the others", first, needs=60.)
    if not them: return
    del them[1:]; clear()
    def beside(some):
        field = [them[0], *(started(k, partial(ours, lists[k][0]), c, B, lists[k][1]) for k in some)]
        res = raced(field, 12 if c.width < 1024 else 7, 3)
        table.update({k: v for k, v in res.items() if k != them[0].name})
        return dict(ways=res)
    long = "ours, bf16, in 2 passes", "ours, bf16, recompute_rope"
    names = [n for n in lists if asked(n) and not (A.quick and n in long)]
    for i in range(0, len(names), many): part(f"{name}: {', '.join(names[i:i + many])}", beside, names[i:i + many], needs=10. + 8*many)
    part(f"{name}: table", targets, name, table, needs=0.)

def targets(name, table):
    rows = {}
    for k, v in table.items():
        kind = "fp8" if "fp8" in k else "bf16"
        counts = k.startswith("ours") and A.nanogpt and "lean" not in k # against nanoGPT, and in bf16 nothing is kept in 8 bits
        want, most = TARGETS.get((name, kind), (None, None)) if counts else (None, None)
        rows[k] = dict(tok_s=round(v["tok_s"]), ratio=round(v.get("ratio") or 1., 4), target=want, peak_gib=v["peak_gib"], most_gib=most, joules=v["joules"],
                       met=None if want is None else bool(v["ratio"] >= want and (most is None or v["peak_gib"] <= most)))
        say(f"  {name} {k:24} {rows[k]['tok_s']:>9,} tokens/s  {rows[k]['ratio']:.3f} of {want or '-'}  {fmt(v['peak_gib'])} GiB of {most or '-'}  "
            f"{fmt(v['joules'])} J  {'' if want is None else 'met' if rows[k]['met'] else 'NOT MET'}")
    return dict(rows=rows)

def peers124m(): of_peers(MAIN)
def peers1b(): of_peers(LAST)

# loop: the trainer's loop with everything in it against its bare step

def loop_of(rungs, recipe, block=40, rounds=2):
    "Blocks of steps in turn: of a second stepper on kept batches of text, and of the trainer's loop; at the end the former from the loader"
    from llm_speedrun.train.options import TrainConfig
    from llm_speedrun.train.trainer import Trainer
    c, B, times, inner = workload(MAIN), MODELS[MAIN], {}, []
    if not REAL: block, rounds = 3, 1
    if not GPU: c = replace(c, seq=32)
    sync = torch.cuda.synchronize if GPU else lambda: None
    def timed(name, f):
        sync(); t0 = time.perf_counter()
        f()
        sync(); times.setdefault(name, []).append((time.perf_counter() - t0)/block*1e3)
    class Measured(Trainer):
        def loop(self, batches):
            run = self.recipe(build(self.config, self.cfg.rungs.split(","), seed=1, model=self.recipe.model))
            bare, kept = stepper_of(run)(run), [tuple(t.clone() for t in next(batches)) for _ in range(block)]
            around = cycle(kept)
            for r in range(rounds + 1): # the first warms up
                timed("bare step", lambda: [bare(next(around)) for _ in range(block)])
                self.cfg.steps = self.done + block
                timed("the trainer", lambda: super(Measured, self).loop(batches))
            timed("bare step, the loader", lambda: [bare(next(batches)) for _ in range(block)])
            self.cfg.steps = self.done
            # the loop's own clock, by events on the GPU: its ends, where it reads its log and waits for the last losses, come once a run
            tens = {r["step"]: B*c.seq/r["tok_s"]*1e3 for r in self.rows() if "tok_s" in r and r["step"] % 10 == 0}
            inner.extend(ms for step, ms in tens.items() if step > block and (step - 1) % block >= 10)
    with tempfile.TemporaryDirectory() as tmp:
        cfg = TrainConfig(data=A.corpus, workload=MAIN, rungs=",".join(rungs), batch=B, seq=c.seq, step_tokens=B*c.seq, steps=2*block*(rounds + 1), evals=1,
                          eval_tokens=B*c.seq, sample=1, save_minutes=1000., recipe=recipe, name="run", out=tmp)
        trainer = Measured(cfg, progress=False)
        trainer.fit()
        say("  it ran with", trainer.cfg.rungs, trainer.cfg.recipe)
        del trainer
    ms = {k: statistics.median(v[1:] or v) for k, v in times.items()}
    each = sorted(a/b for a, b in zip(times["bare step"][1:], times["the trainer"][1:]))
    part_of = statistics.median(each)
    inside = ms["bare step"]/statistics.median(inner) if inner else None
    return dict(ms=ms, share=part_of, inside=inside, inner=inner, shares=each, target=.98, met=(inside or part_of) >= .98, rounds=times)

def loop():
    for kind in ("bf16", "fp8"):
        if asked(kind): part(f"{kind} now, adamw", loop_of, COURSE[kind] + ALL[kind], "adamw", needs=40.)

# smallest: how fast a step of little memory can be

def small_lists():
    body = BODY[:-1]
    logits, eight = "chunked_ce:budget=96" if REAL else "chunked_ce:budget=1", "adamw8bit"
    half = "bf16_weights:rounding=master:moments=8bit"
    return {"smallest": ([*body, "chunked_ce", "checkpoint", eight], (1, 2, 4, 8)),
            "with cuda_graphs": ([*body, "chunked_ce", "checkpoint", "cuda_graphs", eight], (2, 4, 8)),
            "small logits": ([*body, logits, "checkpoint", eight], (4, 8, 12, 16)),
            "small logits, cuda_graphs": ([*body, logits, "checkpoint", "cuda_graphs", eight], (2, 4, 8, 12)),
            "small logits, cuda_graphs, direct_update": ([*body, logits, "checkpoint", "cuda_graphs", eight, "direct_update"], (4, 8, 12, 16)),
            "tied too": ([*body, logits, "tied_embedding", "checkpoint", "cuda_graphs", eight, "direct_update"], (4, 8, 12)),
            "selective": ([*body, logits, "selective_checkpoint:mlp=1", "cuda_graphs", eight, "direct_update"], (2, 4)),
            "weights in bf16 and 16 bits more": ([*body, logits, "checkpoint", half], (8, 16, 24)),
            "the same, cuda_graphs, direct_update": ([*body, logits, "checkpoint", half, "cuda_graphs", "direct_update"], (8, 16, 24))}

def small_step(rungs, micro, rows=48):
    "A step of 48 sequences: tokens/s, the peak that PyTorch's allocator gave out, and what it held from the GPU"
    c = workload(MAIN)
    rows = rows if REAL else 4*micro
    clear()
    if GPU: torch.cuda.reset_peak_memory_stats(); held = torch.cuda.memory_allocated()
    step, m = warm_up(step_of(c, rungs, rows, micro=micro), 2 if rows//micro >= 3 else 4)
    ms = summarize(sample_ms(step, 3 if REAL else 1)).ms
    peak = (torch.cuda.max_memory_allocated() - held)/2**30 if GPU else None
    return dict(tok_s=round(rows*c.seq/ms*1e3), ms=ms, peak_gib=peak, reserved_gib=torch.cuda.max_memory_reserved()/2**30 if GPU else None)

def smallest():
    best = {}
    for k, (rungs, sizes) in small_lists().items():
        for n in sizes if REAL else sizes[:1]:
            res = part(f"{k}, micro-batches of {n}", small_step, rungs, n, needs=6.)
            if res and res.get("tok_s") and (res["peak_gib"] or 0) <= 2.2 and res["tok_s"] > best.get(k, {}).get("tok_s", 0): best[k] = dict(micro=n, **res)
    def told():
        for k, b in best.items(): say(f"  {k}: {b['tok_s']:,} tokens/s in micro-batches of {b['micro']}, {fmt(b['peak_gib'])} GiB, {fmt(b['reserved_gib'])} reserved")
        return dict(best=best, target_tok_s=238_000, most_gib=2.2, met=any(b["tok_s"] >= 238_000 for b in best.values()))
    part("the fastest of each list within 2.2 GiB", told, needs=0.)

# losses: 1,000 steps with warm-up on text, and how far apart runs are that compute the same

STEPS, ROWS, RATE = (1000, 8, 6e-4) if REAL else (12, 4, 6e-4)

def trained(rungs, micro=None, seed=0):
    "Losses of the steps, a list, and the validation loss at the end"
    corpus, c = open_corpus(A.corpus), workload(MAIN)
    if corpus.vocab > c.vocab or not REAL: c = replace(c, vocab=corpus.vocab)
    run = build(c, rungs)
    step, losses = stepper_of(run)(run), []
    batches = prefetch(Batches(corpus.train, ROWS, c.seq, seed=seed), DEVICE)
    for i, (x, y) in zip(range(min(STEPS, A.until)), batches):
        rate = RATE*min(1, (i + 1)/(.2*STEPS))*(1 if i < .6*STEPS else 1 - .9*(i - .6*STEPS)/(.4*STEPS)) # up, level, down
        for g in step.opt.param_groups: g["lr"] = rate
        losses.append(step(*zip(x.split(micro or ROWS), y.split(micro or ROWS))))
    batches.close()
    val = [tuple(t.to(DEVICE) for t in b) for b in val_batches(corpus.val, ROWS, c.seq, 64 if REAL else 1)]
    return dict(curve=torch.stack(losses).tolist(), val=step.evaluate(val))

def losses():
    """Of each kind some seeds, and for each what our rungs end with, less what the course's do; and how far the course's own are apart in two
    passes a step, the same maths in another order. One run alone wanders by some 0.02, so it is the mean over seeds that has a bound"""
    bound, seeds, found = dict(fp8=.02, bf16=.01), range(1 if A.quick else 3), {}
    def ways(kind): return {"course": dict(rungs=COURSE[kind]), "all": dict(rungs=COURSE[kind] + ALL[kind]), "2 passes": dict(rungs=COURSE[kind], micro=ROWS//2)}
    def one(kind, k, seed, how):
        r = found[kind, k, seed] = trained(seed=seed, **how)
        tens = [statistics.mean(r["curve"][j:j + 10]) - statistics.mean(found[kind, "course", seed]["curve"][j:j + 10]) for j in range(0, min(150, len(r["curve"])), 10)]
        return dict(validation=r["val"], last_mean=statistics.mean(r["curve"][-min(100, STEPS):]), first_tens=tens, curves=r["curve"])
    for seed in seeds:
        for kind in bound:
            for k, how in ways(kind).items():
                if k == "2 passes" and seed: continue # once is enough to see how far they are apart
                part(f"{kind}, {k}, seed {seed}", one, kind, k, seed, how, needs=26.*(A.until > 200))
    def told(kind):
        res = {}
        for k in ("all", "2 passes"):
            both = [(found[kind, k, s], found[kind, "course", s]) for s in seeds if (kind, k, s) in found]
            train = [statistics.mean(a["curve"][-100:]) - statistics.mean(b["curve"][-100:]) for a, b in both]
            val, early = [a["val"] - b["val"] for a, b in both], [abs(statistics.mean(a["curve"][:100]) - statistics.mean(b["curve"][:100])) for a, b in both]
            res[k] = dict(train=train, validation=val, first_hundred=early, mean=statistics.mean(train), validation_mean=statistics.mean(val)) if both else None
        m = res["all"]
        return res | dict(bound=bound[kind], ok=not REAL or m is None or max(abs(m["mean"]), abs(m["validation_mean"]), *m["first_hundred"]) <= bound[kind])
    for kind in bound: part(f"{kind}: in the mean", told, kind, needs=0.)

# tiles: other sizes of the kernels in 27, as long as there is time

def rows_tile(name, chunk, rows, warps, most, kind="random"):
    c = workload(name); N, V, d = MODELS[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), torch.zeros(V, d, device=DEVICE)
    (keys, order), cols, grid0 = fewer.token_order(x, V), fewer.columns(d, most), blocks(N, chunk)
    kept, grid, kw = dh.new_empty(2*grid0, d, dtype=torch.float32), (grid0, blocks(d, cols)), dict(CHUNK=chunk, COLS=cols, num_warps=warps)
    first = lambda: fewer.group_sums_kernel[grid](g, kept, keys, order, dh, N, V, d, 2**16 - 1, ROWS=rows, **kw)
    second = lambda: fewer.cut_groups_kernel[grid](g, kept, keys, N, V, d, 2**16 - 1, **kw | fewer.CUT)
    return us(first), us(second)

def tiles():
    rows = (("random", 16, 4, 1, 512), ("text", 16, 4, 1, 512), ("random", 16, 2, 1, 512), ("random", 32, 4, 1, 512), ("random", 8, 4, 1, 512),
            ("random", 16, 4, 2, 512), ("random", 16, 4, 1, 128), ("text", 32, 8, 1, 512), ("text", 16, 8, 2, 512), ("random", 16, 16, 4, 256))
    if not REAL: rows = rows[:1]
    part("sums of rows: first kernel, second", lambda: tried([(f"{n} {kind} chunk {c} rows {r} warps {w} columns {m}", partial(rows_tile, n, c, r, w, m, kind))
         for n in MODELS for kind, c, r, w, m in rows]))

if __name__ == "__main__":
    if not GPU and not A.smoke: sys.exit("there is no GPU: add --smoke")
    globals()[A.stages[0]]()
    RES["stage_seconds"] = round(spent(), 1); save()
