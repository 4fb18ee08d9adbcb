"The optimizers: stochastic rounding, the fused update of bf16 weights, 8-bit moments, and the three rungs."
import copy, gc
import pytest, torch
from torch import nn
from llm_speedrun.rungs import amp, checkpointing, chunked_ce, flash, tf32    # their rungs
from llm_speedrun.measure import measure_ceilings, sample_ms, summarize, version_of
from llm_speedrun.model import workload
from llm_speedrun.runs import Stepper, adamw, baseline, build, check_rung, count_step, find_rung
from llm_speedrun.rungs.optim import (BLOCK, Bf16AdamW, adamw8bit, adamw_scalars, bf16_matrices, bf16_weights, join_fp32,
                                make_8bit, make_bf16, philox, random_bits, split_fp32, state_bytes, stochastic_round,
                                update_torch, update_triton)
from flags import changed, flags, random_states
from small import NANO, fails

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
def needs_kernel(test):
    "A test of the kernel itself, interpreted where there is no GPU"
    there = pytest.mark.skipif(not version_of("triton"), reason="needs Triton, on a GPU or interpreted")
    return there(pytest.mark.usefixtures("kernels")(test))
needs_torchao = pytest.mark.skipif(not version_of("torchao"), reason="needs torchao")
ROUNDINGS = ["stochastic", "nearest", "master", "none"]
KEY = (5 << 33) + 7

def case(sizes, rounding, seed=0, zero=False):
    "Weights, gradients, moments and lower halves; with `zero` gradients and moments of zero"
    g = torch.Generator(DEVICE).manual_seed(seed)
    def new(dt, scale=1.): return [(torch.randn(n, device=DEVICE, generator=g)*scale).to(dt) for n in sizes]
    dt, on = torch.float32 if rounding == "none" else torch.bfloat16, float(not zero)
    ps, lows = new(dt), [None]*len(sizes)
    if rounding == "master": ps, lows = map(list, zip(*map(split_fp32, new(torch.float32))))     # of numbers, so zeros stay zeros
    return [ps, new(dt, on), new(torch.float32, on), [v.abs() for v in new(torch.float32, on)], lows]

def updated(update, lists, rounding, key=KEY, scalars=adamw_scalars(.01, (.9, .95), 1e-8, .1, 3)):
    "The weights (with a master, in FP32) and the moments after `update`, each as one tensor"
    lists = copy.deepcopy(lists)
    update(*lists, scalars, rounding, key)
    ps, _, ms, vs, lows = lists
    if rounding == "master": ps = [join_fp32(p, l) for p, l in zip(ps, lows)]
    return torch.cat([p.flatten() for p in ps]), torch.cat([t.flatten() for t in ms + vs])

def same_rounding(p, q):
    "All but a few are equal, and those are neighbours"
    return p.ne(q).float().mean() < 2e-3 and ((p - q).abs() <= q.abs()/64 + 1e-5).all()

# Rounding

def test_stochastic_rounding_is_unbiased():
    "Means over many roundings are the number within five standard errors, for both signs and many exponents"
    g, n = torch.Generator().manual_seed(1), 20_000
    for x in (torch.randn(200, generator=g) * torch.logspace(-30, 30, 200)):
        r = stochastic_round(x.expand(n), torch.randint(2**16, (n,), generator=g)).double()/x.double()
        assert r.unique().numel() <= 2 and (r - 1).abs().max() <= 2**-7
        assert (r.mean() - 1).abs() <= 5*max(r.std().item(), 1e-9)/n**.5

def test_stochastic_rounding_of_all_lower_halves():
    "With every random number once, exactly as many go up as the lower half says"
    bits = torch.arange(2**16)
    for low in (0, 1, 2**15, 2**16 - 1):
        for sign in (0, -2**31):
            x = torch.tensor(sign + (0x3F80 << 16) + low, dtype=torch.int64).to(torch.int32).view(torch.float32)
            up = stochastic_round(x.expand(2**16), bits).abs() > 1
            assert up.sum() == low

def test_what_bf16_holds_stays():
    "Every bf16 number comes back as it was, NaN as NaN, infinity as infinity; the largest float may become infinite"
    every = torch.arange(2**16).to(torch.int32).bitwise_left_shift(16).view(torch.float32)
    out = stochastic_round(every, torch.randint(2**16, every.shape, generator=torch.Generator().manual_seed(0)))
    nan = every.isnan()
    assert torch.equal(out[~nan].float(), every[~nan]) and out[nan].isnan().all()
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert [stochastic_round(largest, torch.tensor([r])).isinf().item() for r in (0, 2**16 - 1)] == [False, True]

def test_split_and_join():
    "A bf16 number and the lower half are the FP32 number again, to the bit"
    bits = torch.randint(-2**31, 2**31, (500_000,), generator=torch.Generator().manual_seed(0)).int()
    x = bits.view(torch.float32)
    x = x[~x.isnan()]
    up, low = split_fp32(x)
    assert torch.equal(join_fp32(up, low).view(torch.int32), x.view(torch.int32))
    nan = split_fp32(torch.tensor([float("nan")]))
    assert join_fp32(*nan).isnan() and nan[0].isnan()

def test_philox():
    "The published answers for Philox 4x32-10"
    zeros = torch.zeros(1, dtype=torch.int64)
    assert philox(0, zeros)[:, 0].tolist() == [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
    words = philox((3 << 33) + 1, torch.arange(100_000))
    for k in range(32): assert abs((words >> k & 1).double().mean() - .5) < 5*.5/400_000**.5    # each bit is fair
    assert words.min() >= 0 and words.max() < 2**32

def test_random_bits_differ():
    "Another key, another program, another chunk: other bits"
    bits = [random_bits(k, BLOCK, f, DEVICE) for k, f in ((KEY + 2, 0), (KEY, 1), (KEY + (1 << 33), 0))]
    bits += list(random_bits(KEY, 4*BLOCK, 0, DEVICE).view(4, BLOCK))
    for i, a in enumerate(bits):
        for b in bits[:i]: assert a.eq(b).float().mean() < .02

# The kernel

@needs_kernel
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("sizes", [[1], [33, 1, 4*BLOCK + 1, 7], [4*BLOCK, 16, 4096], [8*BLOCK + 48]], ids=str)
def test_kernel(sizes, rounding):
    "The kernel's moments and FP32 weights are PyTorch's, and with the same random bits it rounds as PyTorch does"
    lists = case(sizes, rounding)
    (p, m), (q, n) = (updated(f, lists, rounding) for f in (update_torch, update_triton))
    torch.testing.assert_close(m, n, rtol=1e-5, atol=1e-6)
    if rounding in ("none", "master"): torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    else: assert same_rounding(p, q) or p.numel() < 1000 and p.ne(q).sum() <= 1

@needs_kernel
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_kernel_of_matrices_and_views(rounding):
    "Two dimensions, a gradient that is not contiguous, and tensors that start at odd addresses"
    lists = case([48*20, 7*9], rounding, seed=1)
    flat = updated(update_torch, lists, rounding)
    shaped = [[None if t is None else t.view(s) for t, s in zip(ts, ((48, 20), (7, 9)))] for ts in lists]
    shaped[1] = [g.t().contiguous().t() for g in shaped[1]]
    odd = [[None if t is None else torch.cat([t[:1], t])[1:] for t in ts] for ts in lists]
    for ls in (shaped, odd):
        (p, m), (q, n) = flat, updated(update_triton, ls, rounding)
        torch.testing.assert_close(m, n, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.float(), q.float(), rtol=2**-7 if p.dtype == torch.bfloat16 else 1e-5, atol=1e-5)

@needs_kernel
@pytest.mark.parametrize("update", [update_torch, update_triton])
@pytest.mark.parametrize("rounding", ROUNDINGS[:3])
def test_an_update_of_nothing(update, rounding):
    "No gradient, no moments, no decay: every weight stays, infinite ones and NaN too"
    lists = case([3000], rounding, zero=True)
    lists[0][0][:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.])
    if rounding == "master": lists[4][0][:4] = 0
    scalars = adamw_scalars(.01, (.9, .95), 1e-8, 0., 3)
    before = join_fp32(lists[0][0], lists[4][0]) if rounding == "master" else lists[0][0]
    p, _ = updated(update, lists, rounding, scalars=scalars)
    assert p[2].isnan() and torch.equal(p[3:], before[3:]) and torch.equal(p[:2], before[:2])

@needs_kernel
@pytest.mark.parametrize("update", [update_torch, update_triton])
def test_a_small_update_moves_the_mean(update):
    "An update of an eighth of the spacing: to the nearest no weight moves, at random their mean does"
    n = 20_000
    ones = torch.ones(n, device=DEVICE)
    def after(rounding):
        lists = [[ones.bfloat16()], [ones.bfloat16()*0], [-ones], [ones.clone()], [None]]
        return updated(update, lists, rounding, scalars=(1., .001, 0., 0., 1., 1e-8))[0].double()
    assert (after("nearest") == 1).all()
    p = after("stochastic")
    assert abs(p.mean() - 1.001) < 5*p.std()/n**.5 and set(p.tolist()) == {1., 1 + 2**-7}

@needs_kernel
def test_kernel_is_repeatable():
    "The same key gives the same bits 50 times, another key other roundings"
    lists = case([5000, 64], "stochastic")
    first, _ = updated(update_triton, lists, "stochastic")
    for _ in range(50 if DEVICE.type == "cuda" else 3):
        assert torch.equal(updated(update_triton, lists, "stochastic")[0], first)
    assert not torch.equal(updated(update_triton, lists, "stochastic", key=KEY + 2)[0], first)

# The optimizer

def two_groups(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    w, b = (nn.Parameter(torch.randn(*s, generator=g).to(DEVICE)) for s in ((40, 60), (60,)))
    w = nn.Parameter(w.detach().to(dtype))
    return [w, b], [dict(params=[w], weight_decay=.1), dict(params=[b], weight_decay=0.)]

def train(opt, ps, steps, start=0):
    "Steps on gradients that depend on the step's number alone, with a learning rate set as a float"
    for i in range(start, start + steps):
        g = torch.Generator().manual_seed(i)
        for p in ps: p.grad = torch.randn(p.shape, generator=g).to(p)
        for group in opt.param_groups: group["lr"] = 1e-3*(i + 1)
        opt.step()
    return [p.detach().clone() for p in ps]

def test_update_is_adamw():
    "FP32 weights go where PyTorch's AdamW takes them"
    ps, groups = two_groups(torch.float32)
    ref = copy.deepcopy(ps)
    opt = torch.optim.AdamW([dict(g, params=[p]) for p, g in zip(ref, groups)], betas=(.9, .95))
    for a, b in zip(train(Bf16AdamW(groups), ps, 10), train(opt, ref, 10)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

def test_a_master_is_adamw():
    "With a master, bf16 weights are FP32's AdamW rounded, and their masters are its weights"
    ps, groups = two_groups()
    ref = [nn.Parameter(p.detach().float()) for p in ps]
    theirs = torch.optim.AdamW([dict(params=[p], weight_decay=w) for p, w in zip(ref, (.1, 0.))], betas=(.9, .95))
    ours = Bf16AdamW(groups, rounding="master")
    for i in range(10):
        for p, r in zip(ps, ref):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p)
            r.grad = p.grad.float()
        ours.step(); theirs.step()
    torch.testing.assert_close(join_fp32(ps[0].detach(), ours.state[ps[0]]["low"]), ref[0].detach(), rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize("rounding", ROUNDINGS[:3])
def test_resuming_is_exact(rounding):
    "Ten steps are five, a state saved and loaded, and five more: to the bit"
    ps, groups = two_groups()
    whole = train(Bf16AdamW(groups, rounding=rounding), ps, 10)
    ps, groups = two_groups()
    opt = Bf16AdamW(groups, rounding=rounding)
    train(opt, ps, 5)
    saved = copy.deepcopy(opt.state_dict())
    again = Bf16AdamW([dict(params=[p]) for p in ps], rounding=rounding)    # the decay comes with the state
    again.load_state_dict(saved)
    assert {t.dtype for s in again.state.values() for t in s.values()} <= {torch.float32, torch.int16}
    for a, b in zip(train(again, ps, 5, start=5), whole): assert torch.equal(a, b)

def test_seeds():
    "The same seed repeats, to the bit; another one rounds differently and ends near"
    def run(seed): ps, groups = two_groups(); return train(Bf16AdamW(groups, seed=seed), ps, 10)[0]
    a, b, c = run(0), run(0), run(1)
    assert torch.equal(a, b) and not torch.equal(a, c) and (a - c).float().abs().mean() < .02

def test_weights_without_gradients_stay():
    "A weight that has no gradient is left alone, and has no state"
    ps, groups = two_groups()
    opt, was = Bf16AdamW(groups), ps[0].detach().clone()
    ps[1].grad = torch.ones_like(ps[1])
    opt.step()
    assert torch.equal(ps[0], was) and ps[0] not in opt.state and not torch.equal(ps[1], two_groups()[0][1])

def test_optimizer_errors():
    "Unknown roundings, mixed or other types, and weights that aren't contiguous are refused, and named"
    p = nn.Parameter(torch.zeros(4, 6))
    with fails(ValueError, "unknown rounding 'stochatic'", "'stochastic'"): Bf16AdamW([p], rounding="stochatic")
    with fails(ValueError, "torch.bfloat16 and torch.float32", "make a group for each"):
        Bf16AdamW([p, nn.Parameter(p.detach().bfloat16())])
    with fails(ValueError, "torch.float16"): Bf16AdamW([nn.Parameter(p.detach().half())])
    with fails(ValueError, "contiguous"): Bf16AdamW([nn.Parameter(p.detach().t())])

def test_scaler_skips_an_overflow():
    "Under a gradient scaler a step with infinite gradients changes neither weights nor state"
    ps, groups = two_groups()
    opt, scaler = Bf16AdamW(groups), torch.amp.GradScaler(DEVICE.type)
    was = [p.detach().clone() for p in ps]
    loss = sum((p.float()**2).sum() for p in ps)
    scaler.scale(loss).backward(); ps[0].grad[0, 0] = float("inf")
    scaler.unscale_(opt); scaler.step(opt); scaler.update()
    assert all(torch.equal(p, w) for p, w in zip(ps, was)) and not opt.state

# The rungs

@pytest.fixture
def batch():
    x = torch.randint(NANO.vocab, (4, 2, NANO.seq), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return [tuple(x[i:i+2]) for i in (0, 2)]

def losses(run, batch, steps=8):
    step = Stepper(run)
    res = []
    for i in range(steps):
        for g in step.opt.param_groups: g["lr"] = 1e-3
        res.append(step(*batch).item())
    return res

def test_exclusion():
    "One optimizer at a time, in either order; the weights' type goes with bf16 alone"
    names = ["fused_adamw", "bf16_weights"] + ["adamw8bit"]*bool(version_of("torchao"))
    for a in names:
        for b in names:
            if a != b:
                with fails(ValueError, "exclude each other: choose one"): check_rung(find_rung(a), (b,))
    with fails(ValueError, "exclude each other"): build(NANO, ["fp16", "bf16_weights"])
    with fails(ValueError, "'bf16_weights' needs the rung 'bf16'"): build(NANO, ["bf16_weights"])

def test_without_torchao(monkeypatch):
    "Without torchao its rung says what to install"
    monkeypatch.setattr("llm_speedrun.rungs.optim.version_of", lambda name: None)
    with fails(RuntimeError, "'adamw8bit' cannot run here", "pip install torchao"): adamw8bit(baseline(NANO))

@pytest.mark.parametrize("half", [[], ["bf16"], ["fp16"]], ids=str)
def test_fused_adamw(half, batch):
    "The losses with fused AdamW are those with PyTorch's default, also with a gradient scaler"
    a, b = (losses(build(NANO, half + extra), batch) for extra in ([], ["fused_adamw"]))
    assert max(abs(x - y) for x, y in zip(a, b)) < (1e-4 if not half else 2e-2) and b[-1] < b[0]

def test_fused_adamw_skips_an_overflow(batch):
    "Fused AdamW gets the scaler's word that gradients overflowed, and skips the step"
    step = Stepper(build(NANO, ["fp16", "fused_adamw"]))
    was = [p.detach().clone() for p in step.params]
    step.run.loss(step.run.model, *batch[0]).backward()
    step.scaler.scale(torch.zeros((), device=DEVICE))   # makes the scale
    step.params[0].grad[0, 0] = float("inf")
    step.update()
    assert all(torch.equal(p, w) for p, w in zip(step.params, was))

def test_bf16_weights(batch):
    "Matrices are bf16, norms are not, nothing is shared, the run before stays, and the losses are near and repeat"
    before = build(NANO, ["tf32", "bf16", "flash"])
    was, states = {k: t.clone() for k, t in before.model.state_dict().items()}, random_states()
    run = bf16_weights(before)
    assert {(p.ndim > 1, p.dtype) for p in run.model.parameters()} == {(True, torch.bfloat16), (False, torch.float32)}
    assert not {p.data_ptr() for p in run.model.parameters()} & {p.data_ptr() for p in before.model.parameters()}
    a, b = losses(run, batch), losses(bf16_weights(before), batch)
    assert a == b and random_states() == states
    assert all(torch.equal(t, was[k]) for k, t in before.model.state_dict().items())
    assert max(abs(x - y) for x, y in zip(a, losses(before, batch))) < .05 and a[-1] < a[0]

def test_bf16_weights_keep_ties():
    "A parameter that two modules share is one parameter afterwards too"
    m = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    m[1].weight = m[0].weight
    bf16_matrices(m)
    assert m[0].weight is m[1].weight and m[0].weight.dtype == torch.bfloat16

@pytest.mark.parametrize("rungs", [["fused_ops"], ["chunked_ce"], ["fused_ops", "chunked_ce", "checkpoint"]], ids=str)
def test_bf16_weights_go_with(rungs, batch, monkeypatch):
    "Bf16 weights train beneath the other rungs, named in any order"
    monkeypatch.setenv("TRITON_INTERPRET", "0")     # PyTorch's maths is quicker, and their kernels have their own tests
    res = losses(build(NANO, ["bf16_weights", *rungs, "flash", "bf16"]), batch, 4)
    assert res[-1] < res[0]

@needs_torchao
def test_adamw8bit(batch):
    "With 8-bit moments the losses are near AdamW's and repeat to the bit; a learning rate may be a float; nothing leaks"
    was, states = flags(), random_states()
    a, b = (losses(adamw8bit(baseline(NANO)), batch, 4) for _ in range(2))
    assert a == b and max(abs(x - y) for x, y in zip(a, losses(baseline(NANO), batch, 4))) < .05
    assert not changed(was) and random_states() == states

@needs_torchao
def test_bytes_of_8bit_state():
    "Two bytes and two scales for each block of 256, and tables of 256 numbers; small tensors in FP32"
    p, q = nn.Parameter(torch.randn(64, 256, device=DEVICE)), nn.Parameter(torch.randn(100, device=DEVICE))
    opt = make_8bit(nn.ParameterList([p, q]))
    for t in (p, q): t.grad = torch.randn_like(t)
    opt.step()
    assert state_bytes(opt) == 2*(64*256 + 4*64 + 4*256) + 2*400 + 2*4

def optimizer_bytes(rungs):
    "Counted bytes of the update for each weight"
    n = sum(p.numel() for p in baseline(workload("tiny")).model.parameters())
    return sum(o.bytes for o in count_step(workload("tiny"), rungs) if o.kind == "optimizer" and o.name != "_foreach_mul_")/n    # clipping aside

def test_counted_bytes():
    "On fake tensors an update is counted with what it has to move"
    assert optimizer_bytes(["fused_adamw"]) == pytest.approx(28, abs=.1)
    assert optimizer_bytes(["bf16", "bf16_weights"]) == pytest.approx(22, abs=.1)
    if version_of("torchao"): assert optimizer_bytes(["adamw8bit"]) == pytest.approx(16.06, abs=.3)

# What only a GPU can show

def big_update(make, dtype, name="124m"):
    "The optimizer of a workload's model with random gradients"
    model = baseline(workload(name), device="cuda").model
    if dtype == torch.bfloat16: bf16_matrices(model)
    for p in model.parameters(): p.grad = torch.randn_like(p)
    return make(model)

def copy_share(opt, nbytes):
    "Bandwidth of the update over that of a copy, where it moves so many bytes for each weight"
    n = sum(p.numel() for g in opt.param_groups for p in g["params"])
    for _ in range(3): opt.step()
    torch.cuda._sleep(2*10**8)      # meanwhile Python queues all of it, as it does behind a backward pass
    return nbytes*n / summarize(sample_ms(opt.step, 30)).ms * 1e3 / measure_ceilings().copy

@pytest.mark.cuda
@pytest.mark.parametrize("name", ["124m", "1b"])
@pytest.mark.parametrize("rounding,nbytes", [("stochastic", 22), ("master", 26)])
def test_bandwidth(rounding, nbytes, name):
    "At real shapes the update runs at 85% of the bandwidth of a copy or better"
    share = copy_share(big_update(lambda m: make_bf16(m, rounding=rounding), torch.bfloat16, name), nbytes)
    assert share > .85, f"{share:.0%}"

@pytest.mark.cuda
@pytest.mark.parametrize("rounding", ROUNDINGS[:3])
def test_kernel_at_124m(rounding):
    "At 124m's shapes the kernel rounds as PyTorch does, and moments and masters agree"
    sizes = [50304*768, 768*768, 2048*768, 768*2048]
    lists = case(sizes, rounding)
    (p, m), (q, n) = (updated(f, lists, rounding) for f in (update_torch, update_triton))
    torch.testing.assert_close(m, n, rtol=1e-5, atol=1e-6)
    if rounding == "master": torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-4)
    else: assert same_rounding(p, q)

@pytest.mark.cuda
def test_compiled_once():
    "Steps, learning rates and seeds don't make Triton compile the kernel again"
    from llm_speedrun.rungs.optim import adamw_kernel
    opt = big_update(make_bf16, torch.bfloat16, "tiny")
    opt.step()
    kernels = adamw_kernel.device_caches[torch.cuda.current_device()][0]
    n = len(kernels)
    for i in range(40):
        for g in opt.param_groups: g["lr"] = 1e-3/(i + 1)
        opt.seed = i
        opt.step()
    assert len(kernels) == n

@pytest.mark.cuda
def test_launches():
    "An update of all weights is one kernel for each of its two groups, and waits for nothing"
    opt = big_update(make_bf16, torch.bfloat16)
    for _ in range(3): opt.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try: opt.step()
    finally: torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile() as prof: opt.step(); torch.cuda.synchronize()
    assert sum(e.device_type == torch.autograd.DeviceType.CUDA and "adamw_kernel" in e.name for e in prof.events()) == 2

@pytest.mark.cuda
@needs_torchao
def test_8bit_at_124m():
    "8-bit moments of 124m take 2.1 bytes a weight at most, and setting the learning rate compiles nothing"
    opt = big_update(make_8bit, torch.float32)
    opt.step()
    n = sum(p.numel() for g in opt.param_groups for p in g["params"])
    assert state_bytes(opt)/n < 2.1
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for i in range(3):
        for g in opt.param_groups: g["lr"] = 1e-3/(i + 1)
        opt.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

@pytest.mark.cuda
def test_memory_of_bf16_weights():
    "Weights, gradients and state of 124m: 12 bytes a weight, 14 with a master, 16 in FP32"
    def requested(): return torch.cuda.memory_stats()["requested_bytes.all.current"]     # without the ends of blocks
    def held(make, dtype):
        gc.collect(); torch.cuda.empty_cache()
        before = requested()
        opt = big_update(make, dtype); opt.step(); torch.cuda.synchronize()
        return (requested() - before)/sum(p.numel() for g in opt.param_groups for p in g["params"])
    assert held(make_bf16, torch.bfloat16) == pytest.approx(12, abs=.1)
    assert held(lambda m: make_bf16(m, rounding="master"), torch.bfloat16) == pytest.approx(14, abs=.1)
    assert held(adamw, torch.float32) == pytest.approx(16, abs=.1)
