"Checkpointing computes the same, recomputes what it should and nothing else, and counts memory as the allocator does."
from dataclasses import replace
from functools import partial
import pytest, torch
from llm_speedrun.rungs.checkpointing import (checkpoint, count_memory, largest_that_fits, MemoryCounter, pass_memory,
                                              prepared, recompute, selective_checkpoint, evenly_spread)
from llm_speedrun.op_counter import OpCounter
from llm_speedrun.model import naive_layer
from llm_speedrun.model_config import workload
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import find_rung
from llm_speedrun.stepper import enter_all, Stepper
from llm_speedrun.course import reference_errors
from helpers.lessons import defined_in
from helpers.tiny_runs import NANO, fails, nano

lesson = defined_in("22_checkpointing", "saved_bytes", "measure_memory", "fits_in", "GPUMeter")

FOUR = replace(NANO, layers=4)
CHANGES = dict(whole=checkpoint, every_2=partial(checkpoint, every=2), every_9=partial(checkpoint, every=9),
               selective=partial(selective_checkpoint, mlp=1), half_the_mlps=partial(selective_checkpoint, mlp=.5))
STACKS = [[], ["flash"], ["bf16", "flash"], ["fp16", "flash"]]
FUSED = ["bf16", "flash", "fused_ops"]
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
rungs_of = pytest.mark.parametrize("change", [checkpoint, selective_checkpoint])
stacks = pytest.mark.parametrize("rungs", STACKS, ids=lambda r: "+".join(r) or "naive")
cpu = partial(build, device="cpu")

def tokens(n=2, device="cpu"):
    return torch.randint(NANO.vocab, (2, n, NANO.seq_len), device=device, generator=torch.Generator(device).manual_seed(0))

def gradients(run, *batches):
    "Loss and gradients of micro-batches, as a list; the weights, which other runs share, are left without gradients"
    step = Stepper(run)
    with enter_all(run.step_contexts): res = [sum(step.forward_backward(x, y) for x, y in batches) / len(batches)]
    res += [p.grad for p in step.params]
    for p in step.params: p.grad = None
    return res

def no_logits(run): return run.with_model(lambda m: setattr(m, "loss", lambda h, w, y: h.mean()))

def equal(a, b): return len(a) == len(b) and all(map(torch.equal, a, b))

# The same gradients

@changes
@stacks
def test_bitwise(rungs, change):
    "On a CPU every gradient is bitwise that of the run before, also of micro-batches, and with a scaled loss"
    run, (x, y) = cpu(FOUR, rungs), tokens()
    assert equal(gradients(change(run), (x, y)), gradients(run, (x, y)))
    halves = (x[:1], y[:1]), (x[1:], y[1:])
    assert equal(gradients(change(run), *halves), gradients(run, *halves))

def distance(a, b): return (sum((x - y).double().norm()**2 for x, y in zip(a, b)) / sum(y.double().norm()**2 for y in b))**.5

@changes
def test_fused(change):
    "Fused blocks have their pair added before a checkpoint: the same loss, and the same gradients but for bf16's rounding"
    for rungs in (FUSED, FUSED + ["chunked_ce"]):
        run = cpu(FOUR, rungs)
        a, b = gradients(change(run), tokens()), gradients(run, tokens())
        assert torch.equal(a[0], b[0]) and distance(a[1:], b[1:]) < 2**-7
    run = cpu(FOUR, ["flash", "fused_ops"])
    assert distance(gradients(change(run), tokens()), gradients(run, tokens())) < 1e-6

@pytest.mark.parametrize("half", ["bf16", "fp16"])
@changes
def test_training(change, half):
    "So are the weights after some steps of the optimizer"
    after = []
    for f in (lambda r: r, change):
        step = Stepper(f(cpu(FOUR, [half, "flash"])))
        for _ in range(3): step(tokens(), tokens())
        after.append([p.detach() for p in step.params])
    assert equal(*after)

@changes
def test_random_state(change):
    "The process-wide random state is neither read nor moved: a step is the same whatever it is"
    run, was = change(cpu(FOUR, ["flash"])), torch.get_rng_state()
    a = gradients(run, tokens())
    assert torch.equal(torch.get_rng_state(), was)
    torch.manual_seed(123)
    assert equal(gradients(run, tokens()), a)
    torch.set_rng_state(was)

# Compiled

def compiled(run, backend):
    "`run` with each block compiled on its own, without graph breaks"
    def change(model):
        for b in model.layers: b.compile(backend=backend, fullgraph=True)
    return run.with_model(change)

@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()

def test_compiled_blocks():
    "Compiled block by block, in one graph each, the gradients are bitwise those of the same run without a compiler"
    run = selective_checkpoint(cpu(replace(NANO, layers=3), FUSED))
    assert equal(gradients(compiled(run, "aot_eager"), tokens()), gradients(run, tokens()))

def test_compiled_model():
    "The whole model compiles around its checkpoints too"
    run = selective_checkpoint(cpu(NANO, ["flash"]))
    whole = run.with_model(lambda m: m.compile(backend="aot_eager", fullgraph=True))
    assert equal(gradients(whole, tokens()), gradients(run, tokens()))

@rungs_of
def test_blocks_share_their_graphs(change):
    "Recomputed blocks of a level are one kind of block to the compiler: one graph for each level and one for the last"
    graphs = []
    def backend(gm, inputs): graphs.append(gm); return gm.forward
    gradients(compiled(change(cpu(FOUR, ["flash"])), backend), tokens())
    assert len(graphs) == (2 if change is checkpoint else 3)

@rungs_of
def test_compiled_blocks_save_memory(change):
    "What compiled blocks keep for the backward pass is less with a checkpoint"
    def saved(run):
        run, kept = compiled(no_logits(run), "aot_eager"), {}
        def pack(t):
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): loss = run.loss(run.model, *tokens(8))
        return sum(kept.values())
    run = cpu(FOUR, ["flash"])
    assert saved(change(run)) < .75*saved(run)

# What is recomputed

def ops(run):
    "How often each operation runs in a forward and backward pass"
    step = Stepper(run)
    with OpCounter() as c: step.forward_backward(*tokens())
    names = [o.name for o in c.ops]
    return {n: names.count(n) for n in names}

def more(change, rungs=("bf16", "flash")):
    "How many products, attention kernels and lookups `change` adds in each of the three blocks that it changes"
    a, b = (ops(f(cpu(FOUR, rungs))) for f in (lambda r: r, change))
    attention = next(n for n in a if "attention" in n and "backward" not in n)
    return tuple((b.get(n, 0) - a.get(n, 0)) / 3 for n in ("mm", attention, "embedding"))

def test_what_runs_again():
    "Whole: all products but the last, and attention. Selective: gate and up alone, or fewer of them"
    assert more(checkpoint) == (6, 1, 0)
    assert more(partial(selective_checkpoint, mlp=1)) == (2, 0, 0)
    assert more(partial(selective_checkpoint, mlp=0)) == (0, 0, 0)
    assert more(partial(selective_checkpoint, mlp=1/3)) == (2/3, 0, 0)

def test_fused_attention_runs_once():
    "Of fused blocks selective checkpointing repeats neither attention nor a product, but for the last one at most"
    products, attention, _ = more(partial(selective_checkpoint, mlp=0), FUSED)
    assert attention == 0 and products <= 1

@changes
def test_evaluation_recomputes_nothing(change):
    "Without gradients the same operations run as without checkpoints, no more, and give the same loss"
    run, seen = cpu(FOUR, ["bf16", "flash"]), []
    for r in (run, change(run)):
        step = Stepper(r)
        with OpCounter() as c: loss = step.evaluate([tokens()])
        seen.append((loss, [o.name for o in c.ops]))
    assert seen[0] == seen[1]

# The module tree

@changes
def test_weights_keep_their_names(change):
    "Names in `state_dict` are those of the run before, and so are the tensors; a saved model loads into either"
    run = cpu(FOUR, ["flash"])
    new = change(run)
    a, b = run.model.state_dict(), new.model.state_dict()
    assert list(a) == list(b) and all(a[k].data_ptr() == b[k].data_ptr() for k in a)
    assert [n for n, _ in new.model.named_modules()] == [n for n, _ in run.model.named_modules()]
    new.model.load_state_dict(cpu(FOUR, seed=1).model.state_dict())

@changes
def test_a_copy_runs_its_own_modules(change):
    "A copy of a checkpointed model calls its own modules, forward and when it recomputes"
    first, called = change(cpu(FOUR, ["flash"])), []
    def watch(model):
        for n, m in model.named_modules():
            if n.endswith("up_proj"): m.register_forward_hook(lambda *a: called.append(n))
    second = first.with_model(watch)
    gradients(first, tokens())
    assert not called
    gradients(second, tokens())
    assert len(called) >= 4

@changes
def test_the_run_before_is_untouched(change):
    "The rung changes classes on a copy; the run before keeps its own"
    run = cpu(FOUR, ["flash"])
    layers = [b.layer for b in run.model.layers]
    new = change(run)
    assert [b.layer for b in run.model.layers] == layers != [b.layer for b in new.model.layers]

def recomputed_blocks(run): return [i for i, b in enumerate(run.model.layers) if b.layer is not naive_layer]

def test_which_blocks():
    "Every n-th block, never the last; a model of one block has none to recompute, and works"
    for layers, every, which in ((5, 1, [0, 1, 2, 3]), (5, 2, [0, 2]), (5, 4, [0]), (5, 9, [0]), (1, 1, [])):
        assert recomputed_blocks(checkpoint(cpu(replace(NANO, layers=layers)), every=every)) == which
    one = cpu(replace(NANO, layers=1), ["flash"])
    for change in CHANGES.values(): assert equal(gradients(change(one), tokens()), gradients(one, tokens()))

def test_spread():
    "A part of n things is that many, and evenly spread: gaps between neighbours differ by one at most"
    for n in range(1, 14):
        for k in range(1, n + 1):
            at = evenly_spread(n, k/n)
            gaps = {b - a for a, b in zip(at, at[1:])}
            assert len(at) == k and at[0] == 0 and (not gaps or max(gaps) - min(gaps) <= 1), (n, k, at)

def test_errors():
    "What makes no sense is refused by name"
    run = cpu(NANO, ["flash"])
    with fails(ValueError, "'checkpoint': every must be at least 1, not 0"): checkpoint(run, every=0)
    for mlp in (-.1, 1.5):
        with fails(ValueError, "'selective_checkpoint': mlp is a part, from 0 to 1"): selective_checkpoint(run, mlp=mlp)
    for f, g in ((checkpoint, selective_checkpoint), (selective_checkpoint, checkpoint)):
        with fails(ValueError, "exclude each other: choose one"): f(g(run))
    with fails(ValueError, "'flash' must come before 'checkpoint'"): find_rung("flash")(checkpoint(cpu(NANO)))
    assert build(NANO, ["selective_checkpoint", "flash", "bf16"]).rungs == ("bf16", "flash", "selective_checkpoint")

# Memory

@rungs_of
@pytest.mark.parametrize("rungs", [["bf16", "flash"], ["fp16", "flash"], FUSED], ids=lambda r: "+".join(r))
def test_fake_and_real_memory(rungs, change):
    "Counted on fake tensors and on real ones the memory of a pass is the same to the byte"
    make = lambda: change(cpu(FOUR, rungs))
    with MemoryCounter() as m: real = pass_memory(*prepared(make, 2), m)
    assert count_memory(make, 2)[0] == real

def test_a_block_more_keeps_its_input():
    "With whole blocks recomputed, each block more keeps its input and nothing else"
    def saved(layers): return count_memory(lambda: no_logits(checkpoint(cpu(replace(NANO, layers=layers), ["flash"]))), 4)[0].saved
    stream = 4 * NANO.seq_len * NANO.width * 4      # bytes of B T d in FP32
    assert saved(4) - saved(3) == stream

def test_memory_falls_in_order():
    "The more is recomputed, the less is saved; leaving out the last block costs next to nothing at the peak"
    run = partial(cpu, replace(NANO, layers=4), ["flash"])
    def memory(change): return count_memory(lambda: no_logits(change(run())), 4)[0]
    order = [lambda r: r, partial(selective_checkpoint, mlp=0), partial(selective_checkpoint, mlp=1), checkpoint]
    saved = [memory(f).saved for f in order]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == len(saved)
    every = [memory(partial(checkpoint, every=n)) for n in (1, 2)]
    assert [m.saved for m in every] == sorted(m.saved for m in every)
    def all_blocks(model): recompute(model.layers)
    assert every[0].peak < 1.1*memory(lambda r: r.with_model(all_blocks)).peak

def test_memory_returns():
    "After a pass nothing but the gradients' and the loss's bytes are left: checkpoints keep nothing alive"
    for change in CHANGES.values():
        with MemoryCounter() as m:
            step, x, y = prepared(lambda: change(cpu(FOUR, ["bf16", "flash"])), 2)
            before = m.now
            for _ in range(3): pass_memory(step, x, y, m)
            assert m.now == before

def test_saved_bytes():
    "By names, as the other counters: more tokens, more bytes, in proportion"
    one, two, three = (lesson.saved_bytes(NANO, ["flash"], b) for b in (1, 2, 3))
    assert two - one == three - two > 0

def test_largest():
    assert largest_that_fits((2, 30), (4, 40), 100) == 16 and largest_that_fits((2, 30), (4, 40), 15) == 0

# On a GPU, at the real shapes

C = workload("124m")

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [FUSED[:2], FUSED], ids=lambda r: r[-1])
def test_gpu_memory(rungs):
    "At 124m the goals for activation memory are met, and the count on fake tensors is within 10% of the allocator's peak"
    def memory(change, f): return f(lambda: no_logits(change(build(C, rungs))), 16)
    none, whole, part = (memory(f, lesson.measure_memory) for f in (lambda r: r, checkpoint, selective_checkpoint))
    assert whole.peak < .4*none.peak and part.peak < .65*none.peak, (none, whole, part)
    for f, real in ((lambda r: r, none), (checkpoint, whole), (selective_checkpoint, part)):
        fake = memory(f, lambda make, batch: count_memory(make, batch)[0])
        assert real.peak == pytest.approx(fake.peak, rel=.1), (f, fake, real)

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [FUSED[:2], FUSED], ids=lambda r: r[-1])
def test_gpu_errors(rungs):
    "At 124m's shapes the gradients' error against float64 is what it is without checkpoints"
    c = replace(C, layers=3)
    none, whole, part = (reference_errors(c, rungs + r)[1] for r in ([], ["checkpoint"], ["selective_checkpoint"]))
    assert max(whole, part) < 1.1*none, (none, whole, part)

@pytest.mark.cuda
@rungs_of
def test_gpu_compiled(change):
    "Compiled block by block on the GPU the gradients are those of the run without checkpoints, but for rounding"
    run = build(replace(C, layers=3), FUSED)
    batch = tuple(torch.randint(C.vocab, (2, 4, C.seq_len), device="cuda"))
    a, b = gradients(run, batch), gradients(compiled(change(run), "inductor"), batch)
    norm = lambda gs: sum(g.double().norm()**2 for g in gs)**.5
    assert norm([x - y for x, y in zip(a[1:], b[1:])]) < .02*norm(a[1:])

@pytest.mark.cuda
def test_gpu_trial_leaves_no_limit():
    "A trial in less memory says no where it doesn't fit, and the limit is gone afterwards"
    make = partial(build, C, FUSED[:2])
    assert lesson.fits_in(make, 1, 8) and not lesson.fits_in(make, 64, 8)
    x = torch.empty(12 * 2**30, dtype=torch.uint8, device="cuda")
    assert x.numel() == 12 * 2**30
