"Rungs compose, refuse what doesn't go together or can't run here, and never touch the run that they are given."
import importlib, inspect, pickle, pkgutil
from dataclasses import replace
from functools import cache
import pytest, torch
import llm_speedrun.rungs, llm_speedrun.rungs.flash as flash_module
import llm_speedrun.rungs.fp8_parts as parts_module, llm_speedrun.rungs.fused_fp8 as fp8_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from llm_speedrun.rungs.amp import bf16, fp16, half_rung
from llm_speedrun.rungs.flash import BACKENDS, attend_with, flash, sdpa, why_not
from llm_speedrun.io_utils import InputError
from llm_speedrun.model import naive_attention
from llm_speedrun.model_config import workload
from llm_speedrun.runs import baseline, build, Run, rung
from llm_speedrun.rung_registry import RUNGS, check_rung, find_rung, rung_specs, sort_rungs
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Stepper
from llm_speedrun.course import reference_errors

from llm_speedrun.rungs.tf32 import tf32
from llm_speedrun.train.presets import parse_rungs, presets
from helpers.tiny_runs import NANO, fails

@pytest.fixture(scope="module")
def run(): return baseline(NANO)

@pytest.fixture
def card(monkeypatch):
    "Make the machine one with the GPU that the test asks for; models go to the CPU all the same"
    def be(name, *capability):
        for k, v in dict(is_available=True, get_device_name=name, get_device_capability=capability).items():
            monkeypatch.setattr(torch.cuda, k, lambda *args, v=v: v)
        monkeypatch.setattr(parts_module, "misrounded", lambda c, device: [])     # there is no card to try kernels on
    return be

# Operations

OPS = {name: op for m in pkgutil.iter_modules(llm_speedrun.rungs.__path__)
       for name, op in vars(importlib.import_module(f"llm_speedrun.rungs.{m.name}")).items() if isinstance(getattr(op, "strided", None), tuple)}
TENSORS = [(name, k) for name, op in OPS.items() for k, p in inspect.signature(op).parameters.items()
           if p.annotation in (torch.Tensor, torch.Tensor | None)]

@pytest.mark.parametrize("name, k", TENSORS)
def test_an_operation_refuses_strided_tensors(name, k):
    "All but those that it names: with these, the tests of the operation compare its results"
    op = OPS[name]
    if k in op.strided: return
    args = {p: torch.ones(4, 4) for p in inspect.signature(op).parameters} | {k: torch.ones(4, 4).mT[:, ::2]}
    with fails(InputError, f"{name}: {k} is a strided view"): op(*args.values())

def test_all_operations_are_tried():
    assert len(OPS) > 20 and all(k in inspect.signature(op).parameters for op in OPS.values() for k in op.strided)

def test_attention_is_not_measured_to_be_deterministic(monkeypatch, run):
    monkeypatch.setattr(flash_module, "backend_ms", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(flash_module, "why_not", lambda *args: "")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert flash_module.choose_backend(run, "auto") == (dict(backend="flash"), "")

# Modules of others

class Own(torch.nn.Module):
    "A module that has nothing of a `GPT`"
    def __init__(self):
        super().__init__()
        self.e, self.o = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
    def forward(self, x, y): return torch.nn.functional.cross_entropy(self.o(self.e(x)).flatten(0, 1), y.flatten())

@pytest.mark.parametrize("name", ["flash", "fused_ops", "chunked_ce", "checkpoint", "compile", "tied_embedding"])
def test_a_rung_says_what_it_needs_of_a_model(name):
    with fails(ValueError, f"rung '{name}' needs a model like", "Own has no config, loss, layers", "leave the rung out"): find_rung(name)(Run(Own()))

def test_blocks_of_another_kind():
    "Also where the blocks lack the functions, which nobody would call"
    model = baseline(NANO).model
    model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    with fails(ValueError, "GPT has no layers..\\.layer, layers..\\.heads"): find_rung("flash")(Run(model))

def test_any_module_is_trained():
    "By the rungs that the message names"
    step = Stepper(find_rung("fused_adamw")(find_rung("bf16")(find_rung("tf32")(Run(Own())))))
    x = torch.randint(8, (2, 5))
    assert step((x, x)).item() > step((x, x)).item() > 0

def test_a_mistake_of_a_rung_stays_what_it_is():
    "An `AttributeError` with a whole `GPT` is the rung's own"
    @rung("parts")
    def mistaken(run): return run.modle
    try:
        with pytest.raises(AttributeError, match="modle"): mistaken(baseline(NANO))
    finally: del RUNGS["mistaken"]

# Names

@pytest.mark.parametrize("name,near", [
    ("tf23", "tf32"), ("bf61", "bf16"), ("flsh", "flash"), ("fp8x", "fp8"), ("checkpiont", "checkpoint"),
    ("adamw8", "adamw8bit"), ("tied", "tied_embedding"), ("head_group", "head_groups"), ("fused_op", "fused_ops"), ("chunked", "chunked_ce"), ("compiled", "compile")])
def test_unknown_rung(name, near):
    "A misspelt rung is answered with the nearest names and all there are"
    for f in (find_rung, lambda n: build(NANO, [n])):
        with fails(ValueError, f"unknown rung '{name}'", f"Did you mean .*'{near}'", "There are: .*tf32"): f(name)

@pytest.mark.parametrize("spec,wrong,near", [
    ("fastst", "fastst", "fastest"),
    ("smalest", "smalest", "smallest"), ("save", "save", "safe"), ("niave", "niave", "naive"), ("tf32,flsh", "flsh", "flash"),
    ("tf32, b16", "b16", "bf16"), ("tf32 flash", "tf32 flash", "tf32")])
def test_unknown_rung_or_preset(spec, wrong, near):
    "In a list of rungs the wrong one is named, with the nearest of rungs and presets"
    with fails(ValueError, f"unknown rung or preset '{wrong}'", f"Did you mean .*'{near}'", "naive, fastest, fastest16, smallest, safe"):
        parse_rungs(spec)

@pytest.mark.parametrize("spec", ["fastest,flash", "naive,tf32", "safe,fused_ops", "auto,flash"])
def test_preset_among_rungs(spec):
    "A preset stands alone: in a list of rungs it is refused when the list is read, not minutes later"
    with fails(ValueError, spec.split(",")[0]): parse_rungs(spec)

@pytest.mark.parametrize("name,near", [("123m", "124m"), ("350", "350m"), ("tyni", "tiny"), ("1B", "1b")])
def test_unknown_workload(name, near):
    "A misspelt workload is answered with the nearest names and all there are"
    with fails(ValueError, f"unknown model '{name}'", f"'{near}'", "There are: tiny, 124m"): workload(name)

def test_unknown_stage_and_backend(run):
    "A rung's stage and an attention backend are looked up as kindly"
    with fails(ValueError, "unknown stage 'precison'", "'precision'"): rung("precison")
    with fails(ValueError, "unknown attention backend 'flashy'", "'flash'"): flash(run, backend="flashy")
    assert parse_rungs(" tf32, flash ,") == rung_specs(["tf32", "flash"]) and parse_rungs("naive") == []

# What this machine can't run

def test_turing_refuses_tf32_and_bf16(card):
    "A Turing card refuses TF32 and bfloat16, naming the card and what to do; its 16-bit rung is fp16"
    card("Tesla T4", 7, 5)
    for name, what in (("tf32", "TF32"), ("bf16", "bfloat16")):
        why = f"{what} needs compute capability 8.0, and Tesla T4 has 7.5"
        with fails(RuntimeError, f"rung '{name}' cannot run here: {why}", "Leave it out"):
            build(NANO, [name], device="cpu")
    assert half_rung() == "fp16" and build(NANO, ["fp16"], device="cpu").fmt == "fp16"

def test_presets_run_on_every_card(card):
    "`fastest` and `auto` name only rungs that the machine can run"
    for name, *capability in (("H200", 9, 0), ("A100", 8, 0), ("T4", 7, 5), ("V100", 7, 0), ("P100", 6, 0)):
        card(name, *capability)
        for spec in ("fastest", "smallest", "safe", "auto"):
            rungs = [s.rung for s in parse_rungs(spec)]
            for r in rungs: assert not r.needs() and not {o.__name__ for o in rungs} & set(r.excludes), f"{spec} on {name}"
        assert not {"fp8", "compile"} & set(presets()["safe"])

def test_presets_of_a_card(card, monkeypatch):
    "An H200 takes every rung; an A100 no FP8; a T4 float16; and without Triton no rung that builds on its kernels"
    kernels = "fused_ops", "adamw8bit", "tied_embedding", "head_groups", "direct_update"
    for r in ("epilogues", "fused_ce", "fp8_epilogues", "flash4"): monkeypatch.setattr(find_rung(r), "needs", lambda: "not installed")
    for r in kernels: monkeypatch.setattr(find_rung(r), "needs", lambda: "")
    card("NVIDIA H200", 9, 0)
    most, end = "tf32 bf16 flash fused_ops tied_embedding chunked_ce".split(), "head_groups cuda_graphs fused_adamw direct_update".split()
    assert presets() == dict(naive=[], fastest=[*most, "fp8", *end], fastest16=[*most, *end],
                             smallest="tf32 bf16 flash fused_ops chunked_ce checkpoint cuda_graphs adamw8bit".split(), safe=["tf32", "bf16", "flash", "fused_adamw"], cpu=["flash", "fused_adamw"])
    card("NVIDIA A100", 8, 0)
    assert presets()["fastest"] == presets()["fastest16"] == [*most, *end]
    card("Tesla T4", 7, 5)
    assert presets()["safe"] == ["fp16", "flash", "fused_adamw"]
    card("NVIDIA H200", 9, 0)
    for r in kernels: monkeypatch.setattr(RUNGS[r], "needs", lambda: "no Triton")
    assert presets()["fastest"] == "tf32 bf16 flash chunked_ce cuda_graphs fused_adamw".split()
    monkeypatch.setattr(RUNGS["flash4"], "needs", lambda: "")      # FlashAttention-4 is installed
    assert presets()["fastest"] == "tf32 bf16 flash flash4 chunked_ce cuda_graphs fused_adamw".split()
    for r in (*kernels, "epilogues", "fused_ce", "fp8_epilogues"): monkeypatch.setattr(RUNGS[r], "needs", lambda: "")   # and QuACK, which it brings
    assert presets()["fastest16"] == ("tf32 bf16 flash flash4 fused_ops epilogues tied_embedding chunked_ce head_groups fused_ce "
                                      "cuda_graphs fused_adamw direct_update").split()
    assert presets()["fastest"] == ("tf32 bf16 flash flash4 fused_ops tied_embedding chunked_ce fp8 head_groups fp8_epilogues "
                                    "cuda_graphs fused_adamw direct_update").split()

@pytest.mark.parametrize("beside, gone", [("ddp", ""), ("fsdp", "cuda_graphs tied_embedding"),
                                          ("tensor_parallel", "cuda_graphs tied_embedding head_groups")])
def test_presets_beside_several_processes(card, monkeypatch, beside, gone):
    "What doesn't go with the other drops out, and what is left can be put together"
    card("NVIDIA H200", 9, 0)
    alone, kept = (parse_rungs(s) for s in ("fastest", f"fastest,{beside}"))
    names = {s.name for s in alone}
    assert names - {s.name for s in kept} == {*gone.split()} & names and str(kept[-1]) == beside
    applied = []
    for s in sort_rungs(kept): check_rung(s.rung, applied); applied.append(s.name)

@pytest.mark.parametrize("preset", presets())
def test_presets_step_here(preset):
    "Each preset builds and steps on this machine; on a CPU without what would only take time"
    rungs = parse_rungs(preset)
    step = Stepper(build(NANO, rungs))
    x = torch.arange(NANO.seq_len, device=step.run.device)[None]
    assert step((x, x)).item() < 20
    if not torch.cuda.is_available(): assert not {"fp8", "compile"} & {s.name for s in rungs}

def test_pascal_refuses_fp16(card):
    "A card without tensor cores refuses float16 too; an Ampere card takes TF32 and bfloat16"
    card("Tesla P100", 6, 0)
    with fails(RuntimeError, "'fp16' cannot run here", "7.0, and Tesla P100 has 6.0"): check_rung(find_rung("fp16"), ())
    card("NVIDIA A100", 8, 0)
    for r in ("tf32", "bf16", "fp16"): check_rung(find_rung(r), ())
    assert half_rung() == "bf16"

# A rung and its options as a value

@pytest.mark.parametrize("text", ["tf32", "flash:backend=cudnn", "fp8:parts=heads+mlp:delayed=no", "tensor_parallel:size=4"])
def test_a_spec_is_the_text_and_back(text):
    "It is a value that a set can hold and a process can send, and nothing changes it"
    spec, = rung_specs([text])
    assert str(spec) == text and rung_specs([str(spec)]) == [spec] == rung_specs([spec]) and spec.rung is RUNGS[spec.name]
    assert pickle.loads(pickle.dumps(spec)) == spec and {spec, *rung_specs([text])} == {spec}
    with pytest.raises(AttributeError): spec.name = "bf16"

def test_a_run_built_from_its_specs_is_the_same(): assert build(NANO, build(NANO, ["flash:backend=flash", "bf16"], "cpu").specs(), "cpu").specs() == \
    rung_specs(["bf16", "flash:backend=flash"])

# What doesn't go together

def test_exclusion(run):
    "Two formats for the same products exclude each other, in either order"
    for f, g in ((bf16, fp16), (fp16, bf16)):
        with fails(ValueError, "exclude each other: choose one", "'bf16'", "'fp16'"): g(f(run))
    with fails(ValueError, "exclude each other"): build(NANO, ["fp16", "flash", "bf16"])
    for a, b in (("direct_update", "fp16"), ("tied_embedding", "fsdp"), ("tied_embedding", "tensor_parallel")):
        with fails(ValueError, "exclude each other", f"'{a}'", f"'{b}'"): build(NANO, [a, b])
    for a, b in (("checkpoint", "selective_checkpoint"), ("fused_adamw", "adamw8bit"), ("fused_adamw", "bf16_weights")):
        with fails(ValueError, "exclude each other", f"'{a}'", f"'{b}'"): build(NANO, ["bf16", a, b])

@pytest.mark.parametrize("rungs,missing", [
    ("fp8", "'bf16' and 'fused_ops'"), ("fp8,bf16", "'fused_ops'"), ("fp8,fused_ops", "'bf16'"),
    ("bf16_weights", "bf16"), ("head_groups,bf16", "'chunked_ce'")])
def test_a_rung_that_builds_on_another(rungs, missing):
    "A rung whose foundation is missing names it"
    with fails(ValueError, f"rung '{rungs.split(',')[0]}'", missing): build(NANO, rungs.split(","))

def test_a_rung_is_applied_once(run):
    "A rung goes on once"
    for f in (tf32, bf16, flash):
        with fails(ValueError, f"'{f.__name__}' is applied twice: name it once"): f(f(run))
    with fails(ValueError, "'tf32' is applied twice"): build(NANO, ["tf32", "flash", "tf32"])

def test_wrong_order_is_refused(run):
    "By hand a rung of an earlier stage can't follow a later one; `build` sorts names given in any order"
    for f in (tf32, bf16):
        with fails(ValueError, f"'{f.__name__}' must come before 'flash'", "use `build`"): f(flash(run))
    assert build(NANO, ["flash", "bf16", "tf32"]).rungs == ("bf16", "tf32", "flash")
    assert flash(bf16(tf32(run))).rungs == ("tf32", "bf16", "flash")

# The run before

def test_the_run_before_is_untouched(run):
    "A rung shares the weights and copies the tree around them, so that both runs go on working"
    was, modules = vars(run).copy(), [id(m) for m in run.model.modules()]
    fast = flash(bf16(tf32(run)))
    assert vars(run) == was and [id(m) for m in run.model.modules()] == modules
    assert not {id(m) for m in fast.model.modules()} & set(modules)
    for a, b in ((run.model.parameters(), fast.model.parameters()), (run.model.buffers(), fast.model.buffers())):
        assert [id(t) for t in a] == [id(t) for t in b]
    def attends(r): return {b.attend for b in r.model.layers}
    assert attends(run) == {naive_attention} and attends(fast).isdisjoint(attends(run))
    assert run.forward_contexts == run.step_contexts == run.rungs == () and run.fmt == "fp32" and fast.fmt == "bf16"

def test_a_step_of_one_run_is_seen_by_the_other(run):
    "Shared weights are shared: what one run learns the other knows"
    mine = baseline(NANO)
    fast, x = flash(mine), torch.arange(8, device=mine.device)[None]
    before = mine.model(x)
    Stepper(fast)((x, x))
    assert not torch.equal(mine.model(x), before) and torch.allclose(mine.model(x), fast.model(x), atol=1e-5)

# Shapes

@pytest.mark.parametrize("shape,message", [
    (dict(width=100, heads=3, kv_heads=3), "width 100 can't be divided among 3 heads"),
    (dict(heads=4, kv_heads=3), "4 query heads can't share 3 KV heads evenly"),
    (dict(heads=2, kv_heads=4), "2 query heads can't share 4 KV heads evenly"),
    (dict(width=36, heads=4), "head_dim 9 .width 36 / 4 heads. is odd")])
def test_bad_shape(shape, message):
    "Numbers that don't fit together are refused, and named, before a model is built"
    with fails(ValueError, message): replace(NANO, **shape)

@pytest.mark.parametrize("shape", [dict(heads=0), dict(kv_heads=0), dict(heads=-4)], ids=str)
def test_no_heads(shape):
    "No heads at all is a `ValueError` that names it, not a division by zero"
    with fails(ValueError, next(iter(shape))): replace(NANO, **shape)

def test_sequence_longer_than_the_model(run):
    "One token more than the model's is refused, with both numbers and what to do; exactly as many pass"
    x = torch.zeros(1, NANO.seq_len + 1, dtype=torch.long, device=run.device)
    for r in (run, flash(run)):
        with fails(ValueError, "sequence of 33 tokens is longer than the model's 32", "seq_len=33"): r.model(x)
        assert r.model(x[:, 1:]).shape == (1, NANO.seq_len, NANO.vocab)

# Flash attention

def kernels(f):
    "The names of the attention operations that run in `f`"
    with profile(activities=[ProfilerActivity.CPU]) as p: f()
    return {e.key for e in p.key_averages() if "_scaled_dot_product" in e.key}

MATH = "aten::_scaled_dot_product_attention_math"

def test_the_math_path_is_never_taken(run):
    "Every step and evaluation with flash runs a fused kernel and not the math path, which this test can see"
    x = torch.randint(NANO.vocab, (2, NANO.seq_len), device=run.device)
    for rungs in (["flash"], ["bf16", "flash"], ["tf32", "fp16", "flash"]):
        step = Stepper(build(NANO, rungs))
        seen = kernels(lambda: (step((x, x)), step.evaluate([(x, x)])))
        assert seen and MATH not in seen, rungs
    q = torch.randn(1, 4, 8, 8, device=run.device)
    def math():
        with sdpa_kernel(SDPBackend.MATH): sdpa(q, q, q)
    assert MATH in kernels(math)

def test_a_backend_that_cannot_run_is_an_error(run, monkeypatch):
    "Asked for a backend that can't run, `flash` raises, says why, and doesn't take the math path instead"
    missing = [b for b in BACKENDS if why_not(b, 8, 4, 2, 32, 8, torch.float32, run.device)]
    assert missing, "every backend runs on this machine, and one that can't was expected"
    for b in missing:
        def ask():
            with fails(RuntimeError, f"the '{b}' kernel cannot run here: .+", "backend=auto"): flash(run, backend=b)
        assert MATH not in kernels(ask)
        q = torch.randn(1, 4, 8, 8, device=run.device)
        with sdpa_kernel(BACKENDS[b]), pytest.raises(RuntimeError): attend_with(b)(q, q, q)

def test_no_backend_at_all(run, monkeypatch):
    "Where no fused kernel runs, `flash` raises and says why"
    monkeypatch.setattr("llm_speedrun.rungs.flash.why_not", lambda *args: "no kernel for this card")
    with fails(RuntimeError, "rung 'flash'.*no kernel for this card"): flash(run)

def test_flash_computes_the_same():
    "Loss and gradients with flash are those of float64 to FP32's rounding, also where heads share keys and values"
    for c in (NANO, replace(NANO, kv_heads=4), replace(NANO, kv_heads=1), replace(NANO, seq_len=31)):
        assert max(reference_errors(c, ["flash"])) < 1e-5

FREE = { # heads that together are narrower and wider than the model; a dimension that the kernel of RoPE can't take; one head; GQA 4:1
    "narrow": replace(NANO, attention_width=16), "wide": replace(NANO, attention_width=128), "odd": replace(NANO, attention_width=96),
    "one": replace(NANO, heads=1, kv_heads=1, attention_width=64), "grouped": replace(NANO, heads=8, kv_heads=2, attention_width=128)}

@cache
def errors_of(config, rungs): return reference_errors(config, rungs.split())

@pytest.mark.parametrize("shape", FREE)
def test_heads_of_any_dimension(kernels, shape):
    "In FP32 the loss and the gradient of all parameters are those of float64; in 16 and 8 bits as near as with heads of the usual width"
    c = FREE[shape]
    for rungs in (["fused_ops", "flash", "chunked_ce"], ["fused_ops", "flash", "chunked_ce", "tied_embedding", "head_groups"]):
        assert max(reference_errors(c, rungs)) < 1e-5, rungs
    usual = replace(c, attention_width=0, heads=4, kv_heads=2) # the same for each shape
    for rungs in ("bf16 fused_ops flash chunked_ce", "bf16 fused_ops flash chunked_ce fp8"):
        for a, b in zip(reference_errors(c, rungs.split()), errors_of(usual, rungs)): assert a < 2*b + 1e-3, rungs

def test_fp16_is_counted():
    "A run with a gradient scaler can be counted on fake tensors, products in float16"
    assert "fp16" in {o.fmt for o in count_step(NANO, ["fp16", "flash"])}

def test_fp8_refuses_a_wrong_compiler(card, run, monkeypatch):
    "Parts whose rounding kernels come out wrong aren't chosen, and named by hand they are an error that says which"
    card("NVIDIA H200", 9, 0)
    assert not find_rung("fp8").needs()
    wrong = dict(heads=["heads_quantize"])
    monkeypatch.setattr(parts_module, "wrong_parts", lambda c, device: wrong)
    base = build(NANO, ["bf16", "fused_ops"], "cpu")
    assert fp8_module.fp8(base, parts=["mlp"]).options["fp8"]["parts"] == ["mlp"]
    with fails(RuntimeError, "heads_quantize round wrongly", "leave out the part heads"): fp8_module.fp8(base, parts=["mlp", "heads"])
