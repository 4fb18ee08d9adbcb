"Compiled runs compute the same, compile once, leave each other alone and can be counted; a profile adds up."
import gc, subprocess, sys, weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import pytest, torch
from llm_speedrun.rungs.compile import compile, whole_pass
from llm_speedrun.rungs.cuda_graphs import RecordedLoss, RecordedPass
from llm_speedrun.roofline import has_fp8, ceilings
from llm_speedrun.fusion import fused
from llm_speedrun.op_counter import OpCounter
from llm_speedrun.profiling import kernel_kind, launch_kind, launches, profile_kinds, profiled
from llm_speedrun.model import naive_attention, naive_layer, set_parts
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.step_builder import count_step, make_step
from llm_speedrun.stepper import enter_all, Stepper
from llm_speedrun.course import reference_errors
from llm_speedrun.generate import generate
from helpers.torch_globals import changed, flags
from helpers.lessons import defined_in
from helpers.tiny_runs import NANO, fails, recorded

lesson = defined_in("21_cuda_graphs", "capturable_adamw", "graphed", "check_graphed")

graphs = []
def spy(graph, inputs):
    "A backend that keeps the graphs that it is given"
    graphs.append(graph)
    return graph.forward

@pytest.fixture(autouse=True)
def no_graphs(): graphs.clear()

def batch(n=2, seq=NANO.seq_len, config=NANO):
    device = default_device()
    return tuple(torch.randint(config.vocab, (2, n, seq), device=device, generator=torch.Generator(device).manual_seed(0)))

def default_device(): return torch.device("cuda" if torch.cuda.is_available() else "cpu")
def losses(step, b, n=3): return [step(b).item() for _ in range(n)] + [step.evaluate([b, b])]

OURS = ["tf32", "bf16", "flash", "fused_ops", "chunked_ce"]
LISTS = [[], ["tf32", "fp16", "flash"], ["tf32", "bf16", "flash", "bf16_stream"], OURS, OURS + ["selective_checkpoint"], OURS + ["bf16_weights"]]

@pytest.mark.parametrize("rungs, whole", [(r, False) for r in LISTS] + [(OURS + ["checkpoint"], True)])
def test_same_and_once(rungs, whole):
    "With every rung: the losses of the eager run, from whole graphs, and a second step compiles nothing"
    config, b = replace(NANO, layers=3), batch()
    eager = losses(Stepper(build(config, rungs)), b)
    step = Stepper(compile(build(config, rungs), whole=whole, backend=spy))
    was = flags()
    assert losses(step, b) == pytest.approx(eager, rel=2e-2 if rungs else 1e-5)
    n = len(graphs)
    losses(step, b)
    assert len(graphs) == n and not changed(was)
    kinds = len({m.layer for m in step.run.model.layers})
    assert n <= (2 if whole else 2*(2*kinds + 1))     # with gradients and without; a fused block takes two forms of input

def test_backward_is_compiled_too():
    "The backend of CPU runs captures forward and backward: loss and gradients as exact as without"
    for rungs in ([], ["flash", "fused_ops", "chunked_ce"]):
        assert max(reference_errors(NANO, rungs + ["compile"])) < 1e-5

def test_micro_batches():
    "Accumulated gradients are those of the whole batch"
    step = lambda *bs: (lambda s: [s(*bs).item() for _ in range(3)])(Stepper(compile(build(NANO, ["flash"]))))
    x, y = batch(4)
    assert step((x, y)) == pytest.approx(step((x[:2], y[:2]), (x[2:], y[2:])), rel=1e-4)

@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_many_runs_in_one_process(whole):
    "Any number of runs with their own shapes: none counts against another's limit of recompilations"
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in range(1, 4):
            step = Stepper(compile(build(NANO, ["flash"]), whole=whole, backend=spy))
            step(batch(n)); step.evaluate([batch(n)])
    assert len(graphs) == 3*(2 if whole else 4)

def test_a_run_is_freed():
    "A run that is gone takes its compiled code along"
    step = Stepper(compile(build(NANO, ["flash"]), backend=spy))
    step(batch())
    model, kind = weakref.ref(step.run.model), weakref.ref(step.run.model.layers[0].layer)
    del step
    gc.collect()
    assert not model() and not kind()

def test_the_run_before_is_untouched():
    "The rung compiles its copy: the run before stays plain, and both share weights and their names"
    base = build(NANO, ["flash"])
    fast = compile(base, backend=spy)
    names = list(fast.model.state_dict())
    base.loss(base.model, *batch())
    assert not graphs and names == list(base.model.state_dict()) and fast.rungs == ("flash", "compile")
    for a, b in zip(base.model.parameters(), fast.model.parameters()): assert a is b
    assert {m.layer for m in base.model.layers} == {naive_layer} and len({m.layer for m in fast.model.layers}) == 1

def test_a_later_copy_stays_compiled():
    "`with_model` after the rung keeps what was compiled, and compiles nothing new"
    run, b = compile(build(NANO, ["flash"]), backend=spy), batch()
    Stepper(run)(b)
    n = len(graphs)
    Stepper(run.with_model(lambda m: None))(b)
    assert n == len(graphs) == 2

def test_generate_and_count_compile_nothing():
    "Text is generated, and operations are counted, as plain Python"
    run = compile(build(NANO, ["flash"]), backend=spy)
    assert generate(run, [1, 2, 3], 5) == generate(build(NANO, ["flash"]), [1, 2, 3], 5)
    ops, compiled = count_step(NANO, ["flash"], 2), count_step(NANO, ["flash", "compile"], 2)
    moved = lambda ops: sum(o.bytes for o in ops)
    assert not graphs and moved(compiled) == pytest.approx(moved(fused(ops)), abs=100)   # a copy of the loss
    for s in (lambda o: o.flops, lambda o: o.kind == "optimizer"): assert sum(map(s, compiled)) == sum(map(s, ops))
    assert moved(compiled) < .8*moved(ops)

def test_what_the_rung_refuses(monkeypatch):
    "A mode that doesn't exist, the rung twice, and a GPU without Triton"
    run = build(NANO, [])
    with fails(ValueError, "unknown mode of torch.compile 'max'", "max-autotune"): compile(run, mode="max")
    with fails(ValueError, "'compile' is applied twice"): compile(compile(run))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("llm_speedrun.rungs.compile.version_of", lambda name: None)
    with fails(RuntimeError, "rung 'compile' cannot run here: .*Triton is not installed"): compile(run)

def test_a_break_is_an_error():
    "A part that Dynamo can't follow is named, and not left to Python in silence"
    def talk(q, k, v): print("hello"); return naive_attention(q, k, v)
    run = compile(build(NANO, []).with_model(lambda m: set_parts(m, attend=talk)), backend=spy)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"): Stepper(run)(batch())

def test_the_stream_in_16_bits():
    "The rung rounds what comes into the first block, and no later one widens it; not for fused blocks, which do so anyway"
    run, (x, y) = build(NANO, ["bf16", "bf16_stream"]), batch()
    types = []
    for m in run.model.layers: m.layer = lambda *a, f=m.layer: (lambda h: types.append(h.dtype) or h)(f(*a))
    with enter_all(run.forward_contexts): loss = run.loss(run.model, x, y)
    assert types == [torch.bfloat16]*NANO.layers and loss.item() == pytest.approx(losses(Stepper(build(NANO, ["bf16"])), (x, y))[0], rel=1e-2)
    with fails(ValueError, "exclude each other"): build(NANO, ["bf16", "fused_ops", "bf16_stream"])
    with fails(ValueError, "builds on 'bf16'"): build(NANO, ["bf16_stream"])

def test_a_step_that_no_graph_can_record():
    "A gradient scaler, an optimizer that counts in Python, a CPU: refused before anything is recorded"
    on = dict(device="cpu")
    scaled = replace(build(NANO, [], **on), scaler=partial(torch.amp.GradScaler, "cpu"))
    with fails(ValueError, "gradient scaler", "use bf16"): lesson.graphed(Stepper(scaled), batch())
    with fails(ValueError, "counts its steps in Python", "capturable_adamw"): lesson.graphed(Stepper(build(NANO, [], **on)), batch())
    run = replace(build(NANO, [], **on), optimizer=lesson.capturable_adamw)
    with fails(RuntimeError, "need a GPU"): lesson.graphed(Stepper(run), batch())

def test_replayed_gradients():
    "They are scaled by what comes from above, are new tensors each time, and aren't handed out once overwritten"
    w, recorded = torch.ones(3, requires_grad=True), RecordedPass.__new__(RecordedPass) # without a GPU
    vars(recorded).update(batch=(torch.zeros(2), torch.zeros(2)), replays=0, params=[w], loss=torch.tensor(2.),
                          graph=SimpleNamespace(replay=lambda: None), grads=[torch.arange(3.)])
    for _ in range(2): (recorded(*recorded.batch) * .5).backward()
    assert w.grad.tolist() == [0, 1, 2] and recorded.grads[0].tolist() == [0, 1, 2]
    first, second = (recorded(*recorded.batch) for _ in range(2))
    with fails(RuntimeError, "another pass has been replayed"): first.backward()
    second.backward()

def test_a_whole_pass():
    """Forward and backward pass at once: the losses of the run without, over two micro-batches and an evaluation. These are of equal size: a
    weight would be applied to finished gradients here, and before the backward pass there"""
    plain, pairs = build(NANO, OURS), [*zip(*(t.split(2) for t in batch(4)))]
    def go(step): return [step(*pairs).item() for _ in range(3)] + [step.evaluate(pairs)]
    assert go(Stepper(replace(plain, loss=whole_pass(plain.loss)))) == go(Stepper(build(NANO, OURS)))

def test_cuda_graphs_on_a_cpu():
    "Nothing is recorded, and the run before is untouched"
    base = build(NANO, OURS)
    run = RUNGS["cuda_graphs"](base)
    assert losses(Stepper(run), batch()) == losses(Stepper(build(NANO, OURS)), batch())
    assert isinstance(run.loss, RecordedLoss) and run.loss.loss is base.loss and not len(run.loss.passes)

def test_tensors_made_of_tensors_are_counted_inside():
    "An operation on a tensor subclass counts as what it does with the tensors in it"
    TwoTensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    a = torch.ones(4, 4)
    pair = TwoTensor(a, a.clone())
    with OpCounter() as c: pair @ a
    assert [o.name for o in c.ops] == ["mm", "mm"]

# On a GPU

BIG = replace(WORKLOADS["124m"], layers=2, vocab=4096)
HOW = [dict(mode=m, whole=w) for m in ("default", "reduce-overhead") for w in (False, True)]

@pytest.mark.cuda
@pytest.mark.parametrize("how", HOW + [dict(mode="max-autotune-no-cudagraphs")], ids=str)
@pytest.mark.parametrize("rungs", [OURS[:3], OURS], ids=["plain", "ours"])
def test_inductor(rungs, how):
    "Inductor's kernels, and its CUDA graphs: the losses of the eager run, over micro-batches and evaluations too"
    bs = [batch(2, BIG.seq_len, BIG), tuple(t.roll(1, 0) for t in batch(2, BIG.seq_len, BIG))]
    def go(step): return [step(*bs).item() for _ in range(4)] + [step.evaluate(bs), step(bs[0]).item()]
    eager = go(Stepper(build(BIG, rungs)))
    assert go(Stepper(compile(build(BIG, rungs), **how))) == pytest.approx(eager, abs=2e-2)

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [OURS[:3], OURS], ids=["plain", "ours"])
def test_gradients_on_a_gpu(rungs):
    "Compiled gradients are at most twice as far from float64 as those of the eager run"
    eager, fast = (reference_errors(BIG, r) for r in (rungs, rungs + ["compile"]))
    assert fast[1] < 2*eager[1]

def attention_kernels(rungs):
    step = make_step(BIG, rungs, 4)()
    step()
    return {k.name for k, c in launches(profiled(step, 1).events()) if launch_kind(k, c) == "fused attention"}

@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_the_attention_kernel_is_kept(backend, monkeypatch):
    "What the flash rung chose runs in the compiled blocks too (PyTorch's cache on disk doesn't know what was chosen)"
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)
    rungs = [*OURS[:2], f"flash:backend={backend}"]
    eager, fast = (attention_kernels(r) for r in (rungs, rungs + ["compile"]))
    assert eager and eager == fast

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [[], OURS[:3], OURS, OURS + ["compile"]], ids=lambda r: "+".join(r[-1:]) or "naive")
def test_kinds_add_up(rungs):
    "The kinds' times are all the time that the GPU worked, and each kernel belongs to one of them"
    step = make_step(BIG, rungs, 2)()
    prof = profiled(step, 3)
    on_gpu = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    pairs = list(launches(prof.events()))
    assert sorted(id(k) for k, _ in pairs) == sorted(map(id, on_gpu))
    total = sum(e.time_range.elapsed_us() for e in on_gpu) / 3e3
    kinds = profile_kinds(step)
    assert sum(kinds.values()) == pytest.approx(total, rel=.1) and {"matrix products", "optimizer"} <= set(kinds)
    by_op = [(k.name, launch_kind(k, c)) for k, c in pairs if c is not None and c.name in ("aten::mm", "aten::addmm")]
    assert by_op and all(kernel_kind(n) == kind for n, kind in by_op if "memset" not in n.lower() and kind != "optimizer")

@pytest.mark.cuda
def test_fp8_ceiling():
    "Where the GPU multiplies FP8, it does so faster than bf16"
    peak = ceilings().matmul
    assert ("fp8" in peak) == has_fp8() and peak.get("fp8", float("inf")) > 1.2*peak["bf16"]

@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_recorded_step(compiled):
    "A replayed CUDA graph takes the steps that the eager run takes, on each batch that it gets"
    b, c = batch(2, BIG.seq_len, BIG), tuple(t.flip(0).contiguous() for t in batch(2, BIG.seq_len, BIG))
    def run():
        r = replace(build(BIG, OURS), optimizer=lesson.capturable_adamw)
        return compile(r) if compiled else r
    step = Stepper(run())
    for _ in range(3): step(b)
    eager = [step(d).item() for d in (b, c, b, c)]
    replay = lesson.graphed(Stepper(run()), b)
    assert [replay(d).item() for d in (b, c, b, c)] == pytest.approx(eager, abs=5e-3)
    with fails(ValueError, "recorded for .2, 1024. and got .1, 1024."): replay(tuple(t[:1] for t in b))

RECORDED = [[], OURS[:3], OURS, OURS + ["fp8"], OURS + ["checkpoint"], OURS + ["selective_checkpoint"], OURS + ["compile"],
            OURS + ["fp8", "compile"], OURS + ["bf16_weights"], OURS + ["adamw8bit"]]

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", RECORDED, ids=lambda r: "+".join(r[-1:]) or "naive")
def test_cuda_graphs(rungs):
    "Recorded or not: the same losses over micro-batches, another shape, evaluations, and with a learning rate that changes"
    if "fp8" in rungs and not has_fp8(): pytest.skip("this GPU has no FP8")
    b, c = batch(2, BIG.seq_len, BIG), tuple(t.flip(0).contiguous() for t in batch(2, BIG.seq_len, BIG))
    def go(rungs):
        step, res = Stepper(build(BIG, rungs)), []
        for i in range(12):     # a shape is recorded when it comes for the third time
            for g in step.opt.param_groups: g["lr"] = 1e-3/(i + 1)
            res.append((step(b, c) if i % 4 < 3 else step(tuple(t[:1] for t in c))).item())
        shapes = recorded()
        return res + [step.evaluate([b, c]), step(c).item()], shapes
    (plain, none), (replayed, shapes) = go(rungs), go(rungs + ["cuda_graphs"])
    assert replayed == pytest.approx(plain, abs=2e-2) and shapes - none >= 2

@pytest.mark.cuda
def test_cuda_graphs_are_freed():
    "With the run goes what it recorded: its memory can be used again"
    def go():
        step = Stepper(build(BIG, OURS + ["cuda_graphs"]))
        for _ in range(4): step(batch(8, BIG.seq_len, BIG))
        return weakref.ref(step.run.model)
    def reserved(): gc.collect(); torch.cuda.empty_cache(); return torch.cuda.memory_reserved()
    go(); before = reserved()
    assert go()() is None and reserved() <= before + 2**25

READS = """
import torch
x = torch.ones(4, device="cuda")
with torch.cuda.graph(torch.cuda.CUDAGraph()): (x + 1).sum().item()
"""

@pytest.mark.cuda
def test_a_number_cannot_be_read_while_recording():
    "`.item()` waits for the GPU, which isn't working while a graph is recorded. (In a process of its own: it spoils it)"
    res = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True)
    assert res.returncode and "captur" in res.stderr
