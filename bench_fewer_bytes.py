"""What the rungs of notebook 27 compute and take on an H200: python3 bench_fewer_bytes.py OUT.json

Checks at real shapes, kernels alone with several tiles, whole steps in turn, short losses. Writes OUT.json after each part, and goes
on where one fails. BENCH_SECONDS (118) is when no new part or variant is begun. Without a GPU it only tries itself, on a tiny model."""
import gc, json, os, sys, time, traceback
from dataclasses import replace
from functools import partial
import torch, torch.nn.functional as F
import llm_speedrun.rungs.fewer_bytes as fewer
from llm_speedrun.measure import compare, machine, ratio
from llm_speedrun.model import workload
from llm_speedrun.runs import Stepper, build, curve_gap, step_of, train_curve
from llm_speedrun.rungs import fused_fp8 as f8
from llm_speedrun.rungs.fused_fp8 import note_amax, store_both
from llm_speedrun.rungs.fp8 import E4M3, E5M2, LARGEST, sqnr
from llm_speedrun.rungs.triton import (blocks, graph_ms, jit, norm_backward_maths, pow2, programs, rms_norm_backward, tl)

BEGAN, SECONDS = time.perf_counter(), float(os.environ.get("BENCH_SECONDS", 118))
GPU = torch.cuda.is_available()
DEVICE, COPY = torch.device("cuda" if GPU else "cpu"), 4.2e12
SIZES = {"124m": 64, "1b": 16} if GPU else {"tiny": 4}
OUT = dict(machine=machine(), parts={})
def spent(): return time.perf_counter() - BEGAN
def save(): open(sys.argv[1], "w").write(json.dumps(OUT, indent=1, default=str) + "\n")
def say(*what): print(f"{spent():6.1f} s", *what, flush=True)
def us(f, calls=5): return round(1e3*graph_ms(lambda: f, calls=calls), 1)
def rel(a, b): return ((a.double() - b.double()).norm()/b.double().norm()).item()
def rand(*shape, dt=torch.bfloat16, seed=0):
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dt)

def part(name, needs=3.):
    "Run the function, keep what it returns, and its traceback where it fails"
    def run(f):
        if spent() + needs > SECONDS: say("NO TIME FOR", name); OUT["parts"][name] = "no time"; return save()
        say("--", name)
        try: res = f()
        except Exception: res = dict(ok=False, error=traceback.format_exc()); print(res["error"], flush=True)
        OUT["parts"][name] = res; say(name, "ok" if not isinstance(res, dict) or res.get("ok", True) else "FAILED"); save()
        gc.collect(); GPU and torch.cuda.empty_cache()
    return run

def tokens(kind, N, V):
    g = torch.Generator(DEVICE).manual_seed(1)
    if kind == "random": return torch.randint(V, (N,), device=DEVICE, generator=g)
    if kind == "same": return torch.full((N,), 11, device=DEVICE)
    return torch.multinomial(1/torch.arange(1., V + 1, device=DEVICE), N, True, generator=g) # as in text

# 1. The embedding's gradient

def check_rows(name, kind):
    c = workload(name); N, V, d = SIZES[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), rand(V, d, dt=torch.float32, seed=1)
    exact = g.double().index_add_(0, x, dh.double())
    theirs = g + torch.ops.aten.embedding_dense_backward(dh.float(), x, V, -1, False)
    a, b = g.clone(), g.clone()
    fewer.add_rows(a, x, dh); fewer.add_rows(b, x, dh)
    mine, other = rel(a, exact), rel(theirs, exact)
    rest = torch.ones(V, dtype=torch.bool, device=DEVICE).index_fill(0, x, False)
    return dict(ok=bool(mine <= 2*other + 1e-8 and a.equal(b) and a[rest].equal(g[rest])), error=mine, theirs=other, repeats=a.equal(b))

def time_rows(name, kind):
    c = workload(name); N, V, d = SIZES[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), torch.zeros(V, d, device=DEVICE)
    back, wide = torch.ops.aten.embedding_dense_backward, dh.float()
    res = dict(theirs_all=us(lambda: g.add_(back(dh.float(), x, V, -1, False))), theirs_alone=us(lambda: back(wide, x, V, -1, False)),
               ours=us(lambda: fewer.add_rows(g, x, dh)), sort_used=us(lambda: fewer.token_order(x, V)),
               floor=round(1e6*(2*N*d + 8*x.unique().numel()*d)/COPY, 1))
    if kind == "random": res |= dict(sort_int64=us(lambda: x.sort(stable=True)), sort_int32=us(lambda: x.int().sort(stable=True)),
        forward_theirs=us(lambda: F.embedding(x, g).bfloat16()), forward_ours=us(lambda: fewer.take_rows(g, x, torch.bfloat16)), forward_floor=round(1e6*6*N*d/COPY, 1))
    say(name, kind, res)
    return res

@part("add_rows, checked")
def _():
    res = {f"{n} {k}": check_rows(n, k) for n in SIZES for k in ("random", "text", "same")}
    say(res)
    return dict(ok=all(r["ok"] for r in res.values()), cases=res)

@part("take_rows, checked")
def _():
    res = {}
    for n in SIZES:
        c = workload(n); w, x = rand(c.vocab, c.width, dt=torch.float32), tokens("random", 4096, c.vocab).view(4, -1)
        res[n] = bool(fewer.take_rows(w, x, torch.bfloat16).equal(F.embedding(x, w).bfloat16()))
    return dict(ok=all(res.values()), cases=res)

@part("add_rows, microseconds")
def _(): return {f"{n} {k}": time_rows(n, k) for n in SIZES for k in ("random", "text", "same")}

# 2. Norms with roundings

def norm_inputs(name, rows=None):
    c = workload(name); N, d = rows or SIZES[name]*c.seq, c.width
    dn, dh, h = (rand(N, d, seed=i) for i in range(3))
    return dn, dh, h, 1 + .1*rand(d, dt=torch.float32, seed=3), torch.rsqrt(h.float().pow(2).mean(-1) + 1e-6)

def number(x): return torch.full((1,), x, device=DEVICE)
def bits(t): return t.view(torch.uint8)

def check_norms(name, rows):
    ins, a, b = norm_inputs(name, rows), number(0.), number(0.)
    dx, dw, q, t = fewer.norm_backward_quantize(*ins, number(16.), a, E5M2)
    exact, theirs = norm_backward_maths(*(i.double() for i in ins)), norm_backward_maths(*ins)
    q2, t2 = f8.quantize(dx, number(16.), b, E5M2)
    res = dict(dx=rel(dx, exact[0]), dx_theirs=rel(theirs[0], exact[0]), dw=rel(dw, exact[1]), dw_theirs=rel(theirs[1], exact[1]),
               bits=bits(q).equal(bits(q2)), transposed=bits(t).equal(bits(t2)), amax=a.equal(b))
    ok = res["dx"] <= 2*res["dx_theirs"] + 1e-6 and res["dw"] <= 2*res["dw_theirs"] + 1e-5 and res["bits"] and res["transposed"] and res["amax"]
    x, y, w, (a, b) = ins[2], ins[1], ins[3], (number(0.), number(0.))
    (h, r, q, t), (h2, r2, q2, t2) = fewer.norm_whole(x, y, w, 1e-6, number(64.), a), f8.norm_quantize(x, y, w, 1e-6, number(64.), b)
    res |= dict(h=h.equal(h2), r=rel(r, r2), norm_sqnr=sqnr(q2.float(), q.float()), norm_turned=bits(q.T.contiguous()).equal(bits(t)), norm_amax=rel(a, b))
    return dict(ok=bool(ok and res["h"] and res["r"] < 1e-5 and res["norm_sqnr"] > 40 and res["norm_turned"] and res["norm_amax"] < 1e-5), **res)

@part("norms, checked")
def _():
    res = {f"{n} {rows}": check_norms(n, rows) for n in SIZES for rows in (4096, 1000, 37)}
    say(res)
    return dict(ok=all(r["ok"] for r in res.values()), cases=res)

def time_norms(name):
    ins, one = norm_inputs(name), number(1.)
    dn, dh, h, w, r = ins
    N, d = h.shape
    big = number(1e9) # a maximum that is there already: no atomics, as in a steady step
    def two():
        dx, dw = rms_norm_backward(*ins)
        return f8.quantize(dx, one, big, E5M2)
    res = dict(backward_alone=us(lambda: rms_norm_backward(*ins)), quantize_alone=us(lambda: f8.quantize(dn, one, big, E5M2)),
               backward_two=us(two), backward_one=us(lambda: fewer.norm_backward_quantize(*ins, one, big, E5M2)), backward_floor=round(1e6*10*N*d/COPY, 1),
               forward_twice=us(lambda: f8.norm_quantize(h, dh, w, 1e-6, one, big)), forward_whole=us(lambda: fewer.norm_whole(h, dh, w, 1e-6, one, big)),
               forward_floor=round(1e6*8*N*d/COPY, 1))
    say(name, res)
    return res

@part("norms, microseconds")
def _(): return {n: time_norms(n) for n in SIZES}

# 3. In a model

HEAD = ["tf32", "bf16", "flash", "fused_ops", "chunked_ce"]
FP8 = "fp8:parts=heads+out+mlp+head"
END = ["cuda_graphs", "fused_adamw"]
def grads_of(rungs, micro=2):
    "Loss and gradients of the third time that the same micro-batches pass (recorded by then, with cuda_graphs)"
    c = replace(workload("124m"), layers=3) if GPU else workload("tiny")
    step = Stepper(build(c, rungs))
    step.update = lambda n: None
    x = torch.randint(c.vocab, (micro, 2, 4, c.seq), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    for _ in range(3):
        step.opt.zero_grad()
        loss = step(*((b[0], b[1]) for b in x))
    return loss.item(), {k: p.grad.clone() for k, p in step.run.model.named_parameters()}

def same(rungs, more, least):
    (a, ga), (b, gb) = grads_of(rungs), grads_of([*rungs, *more])
    dB = {k: sqnr(ga[k].float(), gb[k].float()) if not ga[k].equal(gb[k]) else 999. for k in ga}
    k = min(dB, key=dB.get)
    res = dict(ok=bool(abs(a - b) < 5e-3 and dB[k] > least), losses=(a, b), worst=(k, dB[k]), embedding=dB["embed_tokens.weight"])
    say(rungs[-1], more, res)
    return res

@part("gradients of a model", 12.)
def _():
    bf16, fp8 = HEAD, [*HEAD, FP8]
    res = dict(tied_bf16=same(bf16, ["tied_embedding"], 35.), tied_recorded=same([*bf16, "cuda_graphs"], ["tied_embedding"], 35.),
               tied_fp8=same(fp8, ["tied_embedding"], 20.), notes=same(fp8, ["fp8_notes"], 17.), grads_alone=same(fp8, ["fp8_notes:norms=no"], 17.),
               both_recorded=same([*fp8, "cuda_graphs"], ["tied_embedding", "fp8_notes"], 17.),
               again=same(fp8, [], 17.), untied_naive=same(["tf32", "bf16"], ["tied_embedding"], 35.))
    return dict(ok=all(r["ok"] for r in res.values()), cases=res)

# 4. Whole steps, in turn

def steps(name, lists, rounds=5):
    c, B = workload(name), SIZES[name]
    res = compare({k: step_of(c, r, B) for k, r in lists.items()}, rounds=rounds, reps=4 if c.width < 1024 else 2)
    first = next(iter(res.values()))
    out = {k: dict(ms=m.times.ms, p20=m.times.p20, p80=m.times.p80, ratio=ratio(first, m), peak_gib=m.peak_gib, tok_s=B*c.seq/m.times.ms*1e3)
           for k, m in res.items()}
    for k, m in out.items(): say(name, f"{k}: {m['ms']:.2f} ms ({m['p20']:.2f} to {m['p80']:.2f}), {m['ratio']:.4f}, {m['peak_gib'] or 0:.1f} GiB")
    return out

fp8_list, bf16_list = [*HEAD, FP8, *END], [*HEAD, *END]
main = next(iter(SIZES))
@part("steps: first, FP8, the embedding and notes", 12.)
def _(): return steps(main, {"as it was": fp8_list, "tied_embedding": [*fp8_list, "tied_embedding"], "notes of gradients": [*fp8_list, "fp8_notes:norms=no"]})
@part("steps: first, FP8, whole norms and all", 10.)
def _(): return steps(main, {"as it was": fp8_list, "whole norms": [*fp8_list, "fp8_notes:grads=no"], "all": [*fp8_list, "tied_embedding", "fp8_notes"]})
@part("steps: first, bf16", 8.)
def _(): return steps(main, {"as it was": bf16_list, "tied_embedding": [*bf16_list, "tied_embedding"]})

# 5. Losses

@part("losses over 60 steps", 12.)
def _():
    res = {}
    for k, base, more in (("fp8", [*HEAD, FP8, "fused_adamw"], ["tied_embedding", "fp8_notes"]), ("bf16", [*HEAD, "fused_adamw"], ["tied_embedding"])):
        a, b = (train_curve([*base, *m], steps=60, warmup=20) for m in ([], more))
        res[k] = dict(ok=curve_gap(a, b, 20) < .02, gap=curve_gap(a, b, 20), last=(a[-1], b[-1]), without=a, with_it=b)
        say(k, "gap of the last 20 means", res[k]["gap"], "last losses", res[k]["last"])
    return dict(ok=all(r["ok"] for r in res.values()), cases=res)

last = list(SIZES)[-1]
@part("steps: last, FP8", 14.)
def _(): return steps(last, {"as it was": fp8_list, "all": [*fp8_list, "tied_embedding", "fp8_notes"]})

# 6. Tiles, as long as there is time

@jit
def norm_backward_whole_kernel(dn_ptr, dh_ptr, h_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, q_ptr, t_ptr, scale_ptr, amax_ptr, N, filled,
                               d: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    "The other way: whole rows in registers (ptxas says that some spill), a share of them in each program"
    cols, scale, seen = tl.arange(0, BLOCK), tl.load(scale_ptr), tl.load(amax_ptr)
    w, dw = tl.load(w_ptr + cols, cols < d, 0.).to(tl.float32)[None, :], tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0)*ROWS, N, tl.num_programs(0)*ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        there = (rows < N)[:, None] & (cols < d)[None, :]
        at = rows.to(tl.int64)[:, None]*d + cols[None, :]
        dn = tl.load(dn_ptr + at, there, 0.).to(tl.float32)
        h = tl.load(h_ptr + at, there, 0.).to(tl.float32)
        r = tl.load(r_ptr + rows, rows < N, 0.)[:, None]
        xh, g = h*r, dn*w
        dx = r*(g - xh*(tl.sum(g*xh, 1)/d)[:, None]) + tl.load(dh_ptr + at, there, 0.).to(tl.float32)
        tl.store(dx_ptr + at, dx, there)
        dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32)
        note_amax(amax_ptr, dx, seen)
        store_both(q_ptr, t_ptr, dx, scale, rows, cols, N, d, d, filled, MOST)
        dw += tl.sum(dn*xh, 0)
    tl.store(dw_ptr + tl.program_id(0)*d + cols, dw, cols < d)

def tried(cases, needs=2.):
    "Microseconds of each case, a name and a function that returns them; what fails is noted"
    res = {}
    for k, f in cases:
        if spent() + needs > SECONDS: res[k] = "no time"; continue
        try: res[k] = f()
        except Exception as e: res[k] = f"{type(e).__name__}: {str(e)[:200]}"
        say(k, res[k])
    return res

def backward_tile(name, rows, warps, stages, per_sm):
    ins, one, big = norm_inputs(name), number(1.), number(1e9)
    (N, d), h = ins[2].shape, ins[2]
    q, t = f8.empty_pair(h, N, d, E5M2)
    P = programs(h, per_sm, blocks(N, rows))
    dx, dw = torch.empty_like(h), h.new_empty(P, d, dtype=torch.float32)
    def call():
        norm_backward_whole_kernel[(P,)](*ins, dx, dw, q, t, one, big, N, len(q), d, LARGEST[E5M2], ROWS=rows, BLOCK=pow2(d), STAGES=stages,
                                         num_warps=warps)
        return dw.sum(0)
    return us(call)

def backward_twice(name, rows, cols, warps):
    ins, one, big = norm_inputs(name), number(1.), number(1e9)
    (N, d), h = ins[2].shape, ins[2]
    q, t = f8.empty_pair(h, N, d, E5M2)
    P = blocks(N, rows)
    dx, dw = torch.empty_like(h), h.new_empty(P, d, dtype=torch.float32)
    def call():
        fewer.norm_backward_quantize_kernel[(P,)](*ins, dx, dw, q, t, one, big, N, len(q), d, True, LARGEST[E5M2], ROWS=rows, COLS=cols,
                                                  num_warps=warps)
        return dw.sum(0)
    return us(call)

def forward_tile(name, rows, warps):
    (dn, y, x, w, r), one, big = norm_inputs(name), number(1.), number(1e9)
    (N, d), (q, t), h = x.shape, f8.empty_pair(x, *x.shape, E4M3), torch.empty_like(x)
    return us(lambda: fewer.norm_whole_kernel[(blocks(N, rows),)](x, y, w, h, q, t, r, one, big, N, len(q), d, 1e-6, True, LARGEST[E4M3],
                                                                  ROWS=rows, BLOCK=pow2(d), num_warps=warps))

def forward_twice(name, rows, cols, warps):
    (dn, y, x, w, r), one, big = norm_inputs(name), number(1.), number(1e9)
    (N, d), (q, t), h = x.shape, f8.empty_pair(x, *x.shape, E4M3), torch.empty_like(x)
    return us(lambda: f8.norm_quantize_kernel[(blocks(N, rows),)](x, y, w, h, q, t, r, one, big, N, len(q), d, 1e-6, True, LARGEST[E4M3],
                                                                  ROWS=rows, COLS=cols, num_warps=warps))

def rows_tile(name, chunk, rows, warps, most, kind="random"):
    c = workload(name); N, V, d = SIZES[name]*c.seq, c.vocab, c.width
    x, dh, g = tokens(kind, N, V), rand(N, d), torch.zeros(V, d, device=DEVICE)
    (keys, order), cols, grid0 = fewer.token_order(x, V), fewer.columns(d, most), blocks(N, chunk)
    part_, grid, kw = dh.new_empty(2*grid0, d, dtype=torch.float32), (grid0, blocks(d, cols)), dict(CHUNK=chunk, COLS=cols, num_warps=warps)
    first = lambda: fewer.group_sums_kernel[grid](g, part_, keys, order, dh, N, V, d, 2**16 - 1, ROWS=rows, **kw)
    second = lambda: fewer.cut_groups_kernel[grid](g, part_, keys, N, V, d, 2**16 - 1, **kw | fewer.CUT)
    return us(first), us(second)

def logits_tile(n, V, rows, cols, warps):
    x, y = rand(n, V), tokens("random", n, V)
    lse, (q, t) = x.float().logsumexp(1), f8.empty_pair(x, n, V, E5M2)
    tile = dict(ROWS=rows, COLS=cols, num_warps=warps)
    return us(lambda: f8.logits_quantize_kernel[f8.tile_grid(n, V, tile)](x, y, lse, q, t, n, n, V, -100, 0., 0., f8.HALF_MOST, LARGEST[E5M2], **tile))

def heads_tile(name, rows, warps):
    c = workload(name); B, T, H, D = SIZES[name], c.seq, c.heads, c.head_dim
    N, dq, dk, dv = B*T, *(rand(B, T, H, D, seed=i) for i in range(3))
    qkv, w = rand(B, T, 3*H, D, seed=4), torch.ones(D, device=DEVICE)
    cos, sin = rand(T, D//2, dt=torch.float32), rand(T, D//2, dt=torch.float32)
    q, t = f8.empty_pair(qkv, N, 3*H*D, E5M2)
    dw, one, big = qkv.new_empty(blocks(N, rows), 2, D, dtype=torch.float32), number(1.), number(1e9)
    return us(lambda: f8.heads_quantize_kernel[(3, blocks(N, rows))](dq, dk, dv, qkv, w, w, cos, sin, one, big, q, t, dw, N, len(q), T, H, H, D//2,
                                                                     1e-6, LARGEST[E5M2], ROWS=rows, num_warps=warps))

if GPU:
    @part("tiles of the embedding's sums: first kernel, second")
    def _(): return tried([(f"{n} {kind} chunk {c} rows {r} warps {w} columns {m}", partial(rows_tile, n, c, r, w, m, kind)) for n in SIZES
        for kind, c, r, w, m in (("random", 16, 4, 1, 512), ("text", 16, 4, 1, 512), ("random", 16, 2, 1, 512), ("random", 32, 4, 1, 512), ("random", 8, 4, 1, 512),
            ("random", 16, 4, 2, 512), ("random", 16, 4, 1, 128), ("text", 32, 8, 1, 512), ("text", 16, 8, 2, 512), ("random", 16, 16, 4, 256))], 1.5)
    @part("tiles of the backward norm")
    def _(): return tried([(f"{n} twice: rows {r} columns {c} warps {w}", partial(backward_twice, n, r, c, w)) for n in SIZES
        for r, c, w in ((32, 256, 8), (32, 128, 4), (64, 128, 8), (16, 256, 4), (32, 128, 8), (64, 64, 4), (32, 256, 16), (16, 128, 4))]
        + [(f"{n} whole: rows {r} warps {w} stages {s} a SM {p}", partial(backward_tile, n, r, w, s, p)) for n in SIZES
        for r, w, s, p in ((16, 16, 1, 1), (8, 8, 1, 1), (8, 16, 1, 1), (16, 16, 2, 1), (8, 8, 2, 1))])
    @part("tiles of the forward norm")
    def _(): return tried([(f"{n} whole: rows {r} warps {w}", partial(forward_tile, n, r, w)) for n in SIZES for r, w in ((16, 8), (16, 4), (16, 16), (8, 4), (8, 8), (32, 16))]
        + [(f"{n} twice: rows {r} columns {c} warps {w}", partial(forward_twice, n, r, c, w)) for n in SIZES for r, c, w in ((32, 256, 8), (32, 128, 4), (64, 128, 8), (32, 256, 4), (64, 256, 16))])
    @part("tiles of logits_quantize and heads_quantize, as they are in notebook 17")
    def _(): return tried([(f"logits 5504 x 50304, {r} x {c}, warps {w}", partial(logits_tile, 5504, 50304, r, c, w))
        for r, c, w in ((64, 64, 4), (64, 64, 2), (64, 64, 8), (128, 64, 8), (128, 32, 4), (64, 32, 4))]
        + [(f"{n} heads rows {r} warps {w}", partial(heads_tile, n, r, w)) for n in SIZES for r, w in ((32, 4), (32, 2), (64, 4), (64, 8), (16, 2))])
OUT["seconds"] = spent(); save()
bad = [k for k, v in OUT["parts"].items() if isinstance(v, dict) and not v.get("ok", True)]
say("done;", "FAILED: " + ", ".join(bad) if bad else "nothing failed")
