"""Every Triton kernel of the package at small odd sizes, forward and backward: more than one block in each loop, and sizes that no block
divides. `CASES` is what `sanitize_kernels.py` runs on a GPU, and `test_kernels.py` in Triton's interpreter."""
import ast, importlib
from contextlib import contextmanager
from pathlib import Path
import torch
import llm_speedrun
from llm_speedrun.recipes import fast_muon as muon, muon_kernels, muon_update
from llm_speedrun.rungs import (chunked_ce, embedding_rows as lookup, flash4, folded_norm, fp8_block_parts, fp8_dynamic_scaling as dynamic, fp8_epilogues,
                                fp8_kernels as f8, fp8_loss, fp8_matmul_ops, fused_ops, grouped_ce, multi_tensor_adamw, optim, qk_rope, tied_embedding,
                                triton as first, vocab_parallel)
from llm_speedrun.rungs.fp8 import E4M3, E5M2

CASES, CAPABILITY = {}, {} # name -> a function of a device; name -> the least compute capability, where it isn't any

def case(*capability):
    "Register a case (decorator)"
    def add(f):
        CASES[f.__name__] = f
        if capability: CAPABILITY[f.__name__] = capability
        return f
    return add

def rand(device, *shape, dt=torch.bfloat16, std=1.):
    return (torch.randn(*shape, device=device)*std).to(dt)

def one(device, x=1.): return torch.full((1,), x, device=device)

@contextmanager
def few_programs(n=2):
    "Let kernels whose programs share the rows loop over them, at any size"
    modules, old = (first, qk_rope, folded_norm, grouped_ce), first.programs
    for m in modules: m.programs = lambda x, per_sm, most: min(n, most)
    try: yield
    finally:
        for m in modules: m.programs = old

# Lesson by lesson

@case()
def norm(device):
    for N, d in ((7, 40), (1, 3000), (5, 1)):
        x, y, w = rand(device, N, d), rand(device, N, d), rand(device, d, dt=torch.float32)
        n, r = first.rms_norm(x, w, 1e-6)
        h, n, r = first.add_rms_norm(x, y, w, 1e-6)
        first.rms_norm_backward(n, None, h, w, r)
        first.rms_norm_backward(n, y, h, w, r)
        flash4.norm_backward_recompute(n, y, h, w, r)
    with few_programs(): # of 64 rows each
        x, w = rand(device, 64*3 + 5, 33), rand(device, 33, dt=torch.float32)
        first.rms_norm_backward(x, x.clone(), x, w, x.float().pow(2).mean(1).rsqrt())

@case()
def swiglu(device):
    for N, F in ((3, 100), (2, 8200), (1, 64), (3, 5)): # the last, so that gates beyond a row are beyond the tensor as well
        ab = rand(device, N, 2*F)
        fused_ops.swiglu_backward(ab, fused_ops.swiglu(ab))

def heads(device, B=2, T=5, H=3, K=1, D=16):
    "Gradients of queries, keys and values; what they are computed from; weights of norms; the table of rotations"
    qkv, grads = rand(device, B, T, H + 2*K, D), [rand(device, B, T, n, D) for n in (H, K, K)]
    return grads, qkv, [rand(device, D, dt=torch.float32) for _ in range(2)], [rand(device, T, D//2, dt=torch.float32) for _ in range(2)]

@case()
def rope(device):
    with few_programs():
        for H, K, D in ((3, 1, 16), (2, 2, 32), (12, 4, 64), (6, 3, 16)): # the last, as tiles of 16 and 4 heads go beyond 12 and 3
            grads, qkv, ws, turn = heads(device, H=H, K=K, D=D)
            qk_rope.qk_rope(qkv, *ws, *turn, H, 1e-6)
            qk_rope.qk_rope_backward(*grads, qkv, *ws, *turn, 1e-6)
            folded_norm.heads_backward(*grads, qkv, *ws, *turn, rand(device, 10, dt=torch.float32), 1e-6)

def logits(device, V, dt=torch.bfloat16):
    "Logits, targets (one of which is ignored, and one no token), and losses' options"
    y = torch.tensor([0, V - 1, -100, V, min(V - 1, 3)], device=device)
    return rand(device, len(y), V, dt=dt, std=3.), y, (-100, .01, 5.)

@case()
def losses(device):
    for V, dt in ((1, torch.bfloat16), (300, torch.float32), (700, torch.bfloat16), (32769, torch.bfloat16)): # one block or none, or several
        x, y, options = logits(device, V, dt)
        chunked_ce.softmax_loss(x, y, *options, False)
        fp8_loss.loss_lse(x, y, *options)
        vocab_parallel.part_stats(x, y, 2, 5.)
        vocab_parallel.part_grads(x.clone(), y, y.float(), 2, *options)
        grouped_ce.mean_loss(x.clone(), y, one(device, 4.), *options)
        chunked_ce.softmax_loss(x, y, *options, True)
    with few_programs(): grouped_ce.mul_(rand(device, 3*4096 + 5), one(device, 2.))

@case()
def summed_loss(device):
    "From sums, and from logits where a sum is out of range"
    for V in (600, 32769):
        x, y, (ignore, z, _) = logits(device, V)
        sums = rand(device, 5, 3, dt=torch.float32).abs() + 1
        sums[:2] = torch.inf
        fp8_epilogues.summed_loss(sums, x, y, ignore, z)

@case()
def logits_quantize(device):
    "E5M2 alone, which any GPU rounds to"
    for V in (48, 208):
        x, y, options = logits(device, V)
        _, lse = fp8_loss.loss_lse(x, y, *options)
        fp8_loss.logits_quantize(x, y, lse, *options)
        q, t = f8.empty_pair(x, 40, V, E5M2)
        grouped_ce.logits_into(x, y, lse, q[16:], t[:, 16:], *options)

@case(8, 9)
def fp8(device):
    "Sizes of multiples of 16, which the kernels take, in any number of rows; widths of several blocks"
    for N, C in ((5, 16), (70, 272)):
        x, y, w, scale, amax = rand(device, N, C), rand(device, N, C), rand(device, C, dt=torch.float32), one(device, 16.), one(device, 0.)
        for dt in (E4M3, E5M2): f8.quantize(x, scale, amax, dt)
        f8.quantize_weights([rand(device, n, C, dt=torch.float32) for n in (16, 80)], scale, amax)
        f8.norm_quantize(x, None, w, 1e-6, scale, amax)
        f8.norm_quantize(x, y, w, 1e-6, scale, amax)
        fp8_block_parts.stream_norm(x, w, 1e-6, scale, amax)
        ab = rand(device, N, 2*C)
        f8.swiglu_quantize(ab, scale, amax)
        for dt in (E4M3, E5M2): f8.swiglu_backward_quantize(ab, x, scale, amax, dt)
        fp8_matmul_ops.gated8_back(ab.to(E4M3), x, scale, amax, scale, amax.clone(), scale, amax.clone(), E5M2)
    for H, K in ((3, 1), (2, 2)):
        grads, qkv, ws, turn = heads(device, B=3, T=23, H=H, K=K)
        f8.heads_quantize(*grads, qkv, *ws, *turn, 1e-6, scale, amax, E5M2)

@case()
def around_products(device):
    "What lesson 34 runs before and after QuACK's matmuls"
    ws, norm = [rand(device, 33, 130, dt=torch.float32) for _ in range(2)], rand(device, 130, dt=torch.float32)
    for turns in (True, False):
        g = folded_norm.placed(torch.bfloat16, ws, turns, norm).float()
        folded_norm.norm_weight_grads(g, ws, norm, turns)
    for N, d in ((7, 40), (1, 3000)): folded_norm.row_rstd(rand(device, N, d), 1e-6)
    folded_norm.sums_rstd(rand(device, 300, 3, dt=torch.float32).abs(), 48, 1e-6)

@case(8, 9)
def attention8(device):
    "Several blocks of tokens, of which the last one is partly empty"
    q, k, v = (rand(device, 2, 130, n, 32).transpose(1, 2) for n in (4, 2, 2))
    (q8, iq), (k8, ik), (v8, iv) = dynamic.heads_round(q, False), dynamic.heads_round(k, False), dynamic.heads_round(v, True)
    flash4.attention8(q8, k8, v8, iq, ik, iv, True)

@case(8, 9)
def kept_activations(device):
    for N, F in ((3, 100), (2, 1040), (3, 5)): # the last as in `swiglu`
        h, *kept = dynamic.swiglu_keep(rand(device, N, 2*F))
        dynamic.swiglu_kept_backward(*kept, h)

@case()
def embedding_rows(device):
    "Groups of tokens that begin and end in several chunks, and tokens that there are none of"
    for V, d in ((9, 40), (70000, 96)):
        x = torch.tensor([1]*3 + [5]*600 + [V - 1]*20 + [7, V, -1], device=device)
        lookup.take_rows(rand(device, V, d, dt=torch.float32), x, torch.bfloat16)
        tied_embedding.add_rows(rand(device, V, d, dt=torch.float32), x, rand(device, len(x), d))

def moments(device, sizes, rounding, bits):
    "For each weight what `multi_tensor_adamw.update_triton` takes"
    for n in sizes:
        dt = torch.float32 if rounding == "none" else torch.bfloat16
        low = torch.zeros(n, dtype=torch.int16, device=device) if rounding == "master" else None
        m, v, scales = rand(device, n, dt=torch.float32), rand(device, n, dt=torch.float32).abs(), None
        if bits == 8: m, v, scales = optim.encode_moments(m, v)
        yield rand(device, n, dt=dt), rand(device, n, dt=dt), m, v, low, scales

@case()
def adamw(device):
    "All roundings and moments; programs of their own for each weight, the last of them partly empty"
    group, no = dict(lr=.01, betas=(.9, .95), eps=1e-8, weight_decay=.1, t=3), torch.zeros((), device=device)
    for rounding in ("none", "nearest", "master", "stochastic"):
        for bits in (32, 8):
            tensors = [*moments(device, (1, 5000, 4096), rounding, bits)]
            for found in (no, no + 1): multi_tensor_adamw.update_triton(tensors, group, rounding, 7, no, found, {})
    multi_tensor_adamw.update_triton([*moments(device, (1, 5000, 4096), "none", 32)], group, "none", 0, no, no, {}, one(device, .5))

@case()
def fast_muon(device):
    "Wide, tall and square matrices of several tiles, with and without NorMuon, in both ways to multiply"
    for variance in (0., .9):
        for symmetric in (False, True):
            ps = [rand(device, *s, dt=torch.float32) for s in ((70, 150), (150, 70), (70, 70), (33, 3))]
            states = [muon_update.new_state(p, variance) for p in ps]
            group = dict(lr=.02, weight_decay=.1, momentum=.95, variance=variance, cautious=True, steps=2)
            for found in (None, torch.ones((), device=device)):
                muon.fast_muon(group, ps, [torch.randn_like(p) for p in ps], states, found, symmetric=symmetric)
    A, sums = rand(device, 2, 2, 50, 50), rand(device, 2, 600, dt=torch.float32).abs() # more tiles than are added at once
    muon_kernels.polynomial_kernel[2, 2](*A, sums, 600, 50, 1., 2., 3., BLOCK=2048)

# Which kernels there are, and which ran

def launched_in(tree):
    "Yield the names of what a parsed module launches as a kernel"
    for n in ast.walk(tree):
        if not isinstance(n, ast.Call): continue
        by_launch = isinstance(n.func, ast.Name) and n.func.id == "launch" and n.args
        f = n.args[0] if by_launch else n.func.value if isinstance(n.func, ast.Subscript) else None
        if isinstance(f, ast.Name): yield f.id

def jitted_in(tree):
    "Yield the names of a parsed module's functions for Triton"
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef) and any(ast.unparse(d) in ("jit", "triton.jit") for d in n.decorator_list): yield n.name

def all_kernels():
    "Return the names of all kernels that the package launches, by reading it"
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in Path(llm_speedrun.__file__).parent.rglob("*.py")]
    jitted = {name for t in trees for name in jitted_in(t)}
    return {name for t in trees for name in launched_in(t)} & jitted

@contextmanager
def recorded(run=True): # False: don't run them
    "Yield a set that collects the names of the kernels that are launched inside, on a GPU or in the interpreter"
    from triton.runtime import interpreter, jit
    ran, olds = set(), {}
    for cls in (jit.JITFunction, interpreter.InterpretedFunction):
        def launched(self, *args, old=cls.run, **kwargs):
            ran.add(self.fn.__name__)
            if run: return old(self, *args, **kwargs)
        olds[cls] = cls.run
        cls.run = launched
    try: yield ran
    finally:
        for cls, old in olds.items(): cls.run = old
