"""What all Triton kernels have in common: they touch nothing beyond their tensors, and find their places beyond 2^31 elements.
`mutate_kernels.py` shows that these tests can fail. In the interpreter, tensors beyond 2^31 elements take no memory: only the last programs run,
and pages that no program touches aren't there."""
import math, subprocess, sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import pytest, torch
from helpers.kernel_cases import (CAPABILITY, CASES, E4M3, E5M2, all_kernels, chunked_ce, dynamic, f8, few_programs, first, flash4, folded_norm, fp8_epilogues,
                                  fp8_loss, fp8_matmul_ops, fused_ops, grouped_ce, heads, lookup, multi_tensor_adamw, muon, muon_kernels, one, optim, qk_rope,
                                  rand, recorded, tied_embedding, vocab_parallel)
from helpers.kernel_memory import checked_memory
from helpers.tiny_runs import relative_error

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

def test_each_kernel_has_a_case(kernels):
    "Each kernel that the package launches is one that `sanitize_kernels.py` runs"
    with recorded(run=False) as launched:
        for f in CASES.values(): f(DEVICE)
    assert launched == all_kernels() and len(launched) >= 39
    assert {*CAPABILITY} < {*CASES} and max(CAPABILITY.values()) <= (9, 0)

def test_the_sanitizer_lists_its_cases():
    "And says which need a GPU of a certain compute capability"
    script = Path(__file__).resolve().parent.parent/"sanitize_kernels.py"
    out = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=True).stdout
    assert [l.split()[0] for l in out.splitlines()] == [*CASES] and "fp8 needs compute capability 8.9" in out

@pytest.mark.skipif(GPU, reason="on a GPU compute-sanitizer does this: see sanitize_kernels.py")
@pytest.mark.parametrize("name", CASES)
def test_nothing_beyond_the_tensors(kernels, name):
    "No load, store or atomic of any kernel touches a place outside of its tensors, even if a mask hides the value later"
    with checked_memory(): CASES[name](DEVICE)

# Sums over the rows that programs share

def summed_by_norm():
    dn, h, w, r = rand(DEVICE, 64*3 + 5, 33), rand(DEVICE, 64*3 + 5, 33), rand(DEVICE, 33, dt=FP32), rand(DEVICE, 64*3 + 5, dt=FP32)
    return [f(dn, None, h, w, r)[1] for f in (first.rms_norm_backward, in_float64(first.norm_backward_maths))]
def summed_by_rope():
    grads, qkv, ws, turn = heads(DEVICE, H=3, K=2)
    return [f(*grads, qkv, *ws, *turn, 1e-6)[1] for f in (qk_rope.qk_rope_backward, in_float64(qk_rope.qk_rope_backward_maths))]
def summed_by_heads():
    (grads, qkv, ws, turn), r = heads(DEVICE, H=3, K=2), rand(DEVICE, 10, dt=FP32)
    return [f(*grads, qkv, *ws, *turn, r, 1e-6)[1] for f in (folded_norm.heads_backward, in_float64(folded_norm.heads_backward_maths))]

def in_float64(f): return lambda *args: f(*(t.double() if torch.is_tensor(t) else t for t in args))

@pytest.mark.parametrize("summed", [summed_by_norm, summed_by_rope, summed_by_heads])
def test_a_program_sums_all_of_its_blocks(kernels, summed):
    "Gradients of weights, by two programs that each loop over several blocks of rows or tokens"
    with few_programs(): ours, exact = summed()
    assert exact.dtype == torch.float64 and relative_error(ours, exact) < 1e-5

# Beyond 2^31 elements

ROWS = 3 # at the end: those that count, and the interpreter's last programs on each axis

def blank(*shape, dt): # zeros; large ones take no memory on a CPU until they are written
    lazily = not GPU and math.prod(shape) > 2**24
    try: return (torch.empty if lazily else torch.zeros)(*shape, dtype=dt, device=DEVICE)
    except RuntimeError as e: pytest.skip(f"no room: {e}") # in the address space, or on a small GPU

def far(f, width): # f: a function of a maker of tensors with N rows, that returns rows or columns of N or more; elements of a row
    "Run `f` on rows that end beyond 2^31 elements, and on the last ones alone. Returns pairs of what it returned for these"
    N, made = 16*(2**31//width//16 + 2), []
    def long(*shape, dt=torch.bfloat16, of=rand):
        made.append(of(DEVICE, ROWS, *shape, dt=dt))
        t = blank(N, *shape, dt=dt)
        t[-ROWS:] = made[-1]
        return t
    try:
        with few_programs(N), nullcontext() if GPU else checked_memory(ROWS): ends = [t[:N][-ROWS:].clone() for t in f(long)]
    except torch.OutOfMemoryError as e: pytest.skip(f"no room: {e}") # for what it returns
    short = iter(made)
    return [*zip(ends, (t[:ROWS] for t in f(lambda *shape, **kw: next(short))))]

FP32 = torch.float32
def vector(n): return torch.linspace(.5, 1.5, n, device=DEVICE)
def flags(): return [one(DEVICE, 8.), one(DEVICE, 0.)] # a scale, and a maximum
def tokens(device, n, dt, V=65536): return torch.tensor([5, V - 1, 40], device=device).to(dt) # targets

def far_norm(rows):
    x, y, w = rows(1024), rows(1024), vector(1024)
    return *first.add_rms_norm(x, y, w, 1e-6), folded_norm.row_rstd(x, 1e-6)

def far_norm_backward(rows):
    dn, dh, h, r = rows(16), rows(16), rows(16), rows(dt=FP32)
    return first.rms_norm_backward(dn, dh, h, vector(16), r)[:1]

def far_swiglu(rows): return [fused_ops.swiglu(rows(2*1024))]
def far_swiglu_backward(rows): return [fused_ops.swiglu_backward(rows(2*1024), dh := rows(1024)), dh]

def turn(D): return [vector(D) for _ in range(2)] + [vector(D//2)[None]]*2 # weights of norms, and the rotation of the only place
def far_rope(rows): return [qk_rope.qk_rope(rows(1, 64, 64), *turn(64), 62, 1e-6)]
def heads_of(rows, H=62, K=1, D=64): return [rows(1, n, D) for n in (H, K, K, H + 2*K)]
def far_rope_backward(rows): return qk_rope.qk_rope_backward(*heads_of(rows), *turn(64), 1e-6)[:1]
def far_heads_backward(rows):
    out, _, s = folded_norm.heads_backward(*heads_of(rows), *turn(64), rows(dt=FP32), 1e-6)
    return out, s

def far_loss(rows): return [chunked_ce.softmax_loss(x := rows(65536), rows(dt=torch.long, of=tokens), -100, .01, 5., True), x]
def far_mean_loss(rows): return [grouped_ce.mean_loss(x := rows(65536), rows(dt=torch.long, of=tokens), one(DEVICE, 2.), -100, .01, 5.), x]
def far_loss_lse(rows): return fp8_loss.loss_lse(rows(65536), rows(dt=torch.long, of=tokens), -100, .01, 5.)
def far_part_stats(rows): return [vocab_parallel.part_stats(rows(65536), rows(dt=torch.long, of=tokens), 3, 5.).T]
def far_part_grads(rows):
    vocab_parallel.part_grads(x := rows(65536), rows(dt=torch.long, of=tokens), rows(dt=FP32), 3, -100, .01, 5.)
    return [x]
def infinite(*how, dt): return rand(*how, dt=dt)*torch.inf
def far_summed_loss(rows): return fp8_epilogues.summed_loss(rows(3, dt=FP32, of=infinite), rows(65536), rows(dt=torch.long, of=tokens), -100, .01)

def both(q, t): return q, t.T # copies in rows
def far_logits_quantize(rows):
    return both(*fp8_loss.logits_quantize(rows(128), rows(dt=torch.long, of=partial(tokens, V=128)), rows(dt=FP32), -100, .01, 5.))
def far_quantize(rows): return both(*f8.quantize(rows(128), *flags(), E5M2))
def far_norm_quantize(rows):
    h, r, *pair = f8.norm_quantize(rows(128), rows(128), vector(128), 1e-6, *flags())
    return h, r, *both(*pair)
def far_swiglu_quantize(rows): return both(*f8.swiglu_quantize(rows(2*128), *flags()))
def far_swiglu_backward_quantize(rows): return both(*f8.swiglu_backward_quantize(rows(2*128), rows(128), *flags(), E5M2))
def far_heads_quantize(rows): # values alone, too; rows as wide as keep the blocks of them within a grid's second axis
    return both(*f8.heads_quantize(*heads_of(rows, 9, 9, 128), *turn(128), 1e-6, *flags(), E5M2)[1:])
def far_gated8(rows):
    q, t, ht = fp8_matmul_ops.gated8_back(rows(2*128, dt=E4M3), rows(128), *flags(), *flags(), *flags(), E5M2)
    return *both(q, t), ht.T

def far_placed(rows): return [folded_norm.placed(torch.bfloat16, [rows(64)], False, vector(64))]
def far_norm_weight_grads(rows): return folded_norm.norm_weight_grads(rows(64), [rows(64)], vector(64), False)[1:]
def squares(*how, dt): return rand(*how, dt=dt).square()
def far_sums_rstd(rows): return [folded_norm.sums_rstd(rows(16, dt=torch.float16, of=squares), 48, 1e-6)]

def far_kept(rows): return dynamic.swiglu_keep(rows(2*128))
def far_kept_backward(rows): return [dynamic.swiglu_kept_backward(rows(2*128, dt=E4M3), rows(1, dt=FP32), dh := rows(128)), dh]

def far_rows(rows):
    "Tokens of the end of a large vocabulary, in 32 bits, which hold the tokens but not where their rows begin"
    w, x = rows(64), torch.arange(ROWS, device=DEVICE, dtype=torch.int32)
    return [lookup.take_rows(w, len(w) - ROWS + x, torch.bfloat16)]
def far_tokens(rows): return [lookup.take_rows(vector(9*64).view(9, 64), rows(dt=torch.long, of=partial(tokens, V=9)), torch.bfloat16)]
def far_added_rows(rows):
    w, x = rows(64), torch.arange(ROWS, device=DEVICE)
    tied_embedding.add_rows(w, len(w) - ROWS + x, torch.ones(ROWS, 64, device=DEVICE))
    return [w]

FAR = dict(norm=(far_norm, 1024), norm_backward=(far_norm_backward, 16), swiglu=(far_swiglu, 1024), swiglu_backward=(far_swiglu_backward, 1024),
    rope=(far_rope, 63*64), rope_backward=(far_rope_backward, 62*64), heads_backward=(far_heads_backward, 62*64), loss=(far_loss, 65536),
    mean_loss=(far_mean_loss, 65536), loss_lse=(far_loss_lse, 65536), part_stats=(far_part_stats, 65536), part_grads=(far_part_grads, 65536),
    summed_loss=(far_summed_loss, 65536), logits_quantize=(far_logits_quantize, 128), quantize=(far_quantize, 128),
    norm_quantize=(far_norm_quantize, 128), swiglu_quantize=(far_swiglu_quantize, 128), swiglu_backward_quantize=(far_swiglu_backward_quantize, 128),
    heads_quantize=(far_heads_quantize, 9*128), gated8=(far_gated8, 128), fours=(far_gated8, 128//4), placed=(far_placed, 64),
    norm_weight_grads=(far_norm_weight_grads, 64), sums_rstd=(far_sums_rstd, 16), kept=(far_kept, 128), kept_backward=(far_kept_backward, 128),
    rows=(far_rows, 64), tokens=(far_tokens, 64), added_rows=(far_added_rows, 64)) # functions, and elements of a row in the narrowest of the tensors that must be large (fours: of four bytes)

IN_LOOPS = "rope_backward", "heads_backward", "times", "nearly" # whose loops run over rows: the interpreter counts these in 32 bits

def far_rows_are_near_rows(name):
    "The last rows of tensors of more than 2^31 elements become what they become alone"
    for a, b in far(*FAR[name]): torch.testing.assert_close(a.float(), b.float(), rtol=1e-5, atol=1e-6, equal_nan=True)

@pytest.fixture
def at_the_end(kernels):
    "Only the last programs run, where there is no GPU"
    with nullcontext() if GPU else checked_memory(ROWS): yield
    if GPU: torch.cuda.empty_cache()

def beyond(*names):
    "Run a test in the interpreter, and as one of its own on a GPU, which has the memory"
    here = [pytest.param(n, id=f"{n}-interpreted", marks=pytest.mark.skipif(GPU, reason="runs on the GPU")) for n in names if n not in IN_LOOPS]
    return pytest.mark.parametrize("name", here + [pytest.param(n, id=f"{n}-gpu", marks=pytest.mark.cuda) for n in names])

@beyond(*FAR)
def test_rows_beyond_2_to_the_31(kernels, name):
    far_rows_are_near_rows(name)
    if GPU: torch.cuda.empty_cache()

@beyond("times", "nearly")
def test_a_factor_beyond_2_to_the_31(at_the_end, name):
    "And nearly there, where the place after a program's last block lies beyond"
    x = blank(2**31 + dict(times=3*4096 + 5, nearly=-4096)[name], dt=torch.float16)
    x[:9] = x[-9:] = 1.
    grouped_ce.mul_(x, one(DEVICE, 3.))
    assert (x[:9] == 3).all() and (x[-9:] == 3).all()

@beyond("adamw")
def test_a_weight_beyond_2_to_the_31(at_the_end, name):
    "Its last values become what they become in a small weight that has its last block"
    n, group, no = 2**31 + 4*1024 + 16, dict(lr=.01, betas=(.9, .95), eps=1e-8, weight_decay=.1, t=3), torch.zeros((), device=DEVICE)
    def updated(n):
        p, g = (blank(n, dt=torch.bfloat16) for _ in range(2))
        m, v = blank(n, dt=torch.int8), blank(n, dt=torch.uint8)
        scales = blank(2, -(-n//optim.MOMENT_BLOCK), dt=FP32)
        p[-16:], g[-16:], m[-16:], v[-16:], scales[:, -1] = 2., 3., 5, 7, .5
        multi_tensor_adamw.update_triton([(p, g, m, v, None, scales)], group, "nearest", 7, no, no, {})
        return [t[-16:].clone() for t in (p, m, v)] + [scales[:, -1].clone()]
    for a, b in zip(updated(n), updated(4*1024 + 16)): assert a.equal(b)

@beyond("attention")
def test_attention_beyond_2_to_the_31(at_the_end, name):
    "The last heads are those that a short batch has"
    if GPU and torch.cuda.get_device_capability() < (8, 9): pytest.skip("FP8")
    def attended(B, of):
        q = blank(B, 1024, 2, 64, dt=torch.bfloat16) # as many heads as a grid may have on its second axis
        q[-1] = of
        q = q.transpose(1, 2)
        (q8, i), (v8, iv) = dynamic.heads_round(q, False), dynamic.heads_round(q, True)
        o, lse = flash4.attention8(q8, q8, v8, i, i, iv, True)
        return [t[-1].clone() for t in (q8, v8, i, iv, o[:, :, :64*ROWS], lse[:, :, :64*ROWS])] # the last programs have the first queries
    last = rand(DEVICE, 1024, 2, 64)
    for a, b in zip(attended(2**14 + 2, last), attended(1, last)): torch.testing.assert_close(a.float(), b.float(), rtol=1e-5, atol=1e-6)

@beyond("muon")
def test_stacks_beyond_2_to_the_31(at_the_end, name):
    "The last matrix of a stack, as long as the second axis of a grid allows, becomes what it becomes alone; all others are the same zeros"
    m, n, tile = 192, 256, dict(ALIGNED=True, BLOCK=64, num_warps=8)
    ps, gs, ms = ([torch.zeros(m, n, device=DEVICE), rand(DEVICE, m, n, dt=FP32)] for _ in range(3))
    for t in (gs[1], ms[1]): t.div_(8)
    grid, no = muon.blocks(m, 64)*muon.blocks(n, 64), torch.zeros((), device=DEVICE)
    def updated(k):
        rows, last = [[x[0].data_ptr() for x in (ps, gs, ms)] + [0]]*(k - 1), [x[1].clone() for x in (ps, ms)]
        table = torch.tensor(rows + [[last[0].data_ptr(), gs[1].data_ptr(), last[1].data_ptr(), 0]], device=DEVICE)
        x, A, P = blank(k, m, n, dt=torch.bfloat16), blank(k, m, m, dt=torch.bfloat16), blank(k, m, m, dt=torch.bfloat16)
        sums, v = blank(k, grid, dt=FP32), blank(k, n, dt=FP32)
        for tall in (False, True):
            shape = (n, m) if tall else (m, n)
            muon.gather_kernel[grid, k](table, x, sums, no, *shape, .1, TALL=tall, **tile)
            muon_kernels.apply_kernel[grid, k](table, x, None, no, *shape, .1, .1, CAUTIOUS=True, TALL=tall, **tile)
        muon_kernels.squares_kernel[muon.blocks(n, 64), k](x, v, m, n, ROWS=64, COLS=64)
        muon.symmetric_product(x, A)
        muon.symmetric_product(A, P, (1., 2., 3.))
        muon_kernels.polynomial_kernel[muon.blocks(m*m, 2048), k](A, P, None, grid, m, 1., 2., 3., BLOCK=2048)
        return [t[-1].clone() for t in (x, A, P, sums, v)] + last
    for a, b in zip(updated(2**31//(m*m) + 2), updated(1)): assert a.isfinite().all() and a.any() and a.equal(b)
