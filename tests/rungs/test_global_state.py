"A rung's settings hold inside a step and nowhere else, whatever was set before, also where the step raises."
from contextlib import contextmanager
from dataclasses import replace
import pytest, torch
from llm_speedrun.roofline import matmul_precision
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import find_rung
from llm_speedrun.step_builder import count_step
from llm_speedrun.stepper import Stepper
from llm_speedrun.course import reference_errors
from llm_speedrun.generate import generate
from llm_speedrun.rungs import amp, flash, tf32
from llm_speedrun.train.trainer import train
from helpers.torch_globals import changed, flags, random_states
from helpers.tiny_runs import NANO, nano, options

class Fault(torch.autograd.Function):
    "The identity, whose backward pass raises"
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ArithmeticError("in backward")

def fault_forward(model, x, y): model(x, y); raise ArithmeticError("in forward")
def fault_backward(model, x, y): return Fault.apply(model(x, y))
def set_backend(**kw):
    for k, v in kw.items(): setattr(torch.backends.cuda.matmul, k, v)

# What a user may have set before: by the old names, by the new ones, for one backend or for all
BEFORE = dict(
    nothing=lambda: None, high=lambda: torch.set_float32_matmul_precision("high"),
    medium=lambda: torch.set_float32_matmul_precision("medium"), allow_tf32=lambda: set_backend(allow_tf32=True),
    cuda_tf32=lambda: set_backend(fp32_precision="tf32"), cuda_ieee=lambda: set_backend(fp32_precision="ieee"),
    no_flash=lambda: torch.backends.cuda.enable_flash_sdp(False),
    no_math=lambda: torch.backends.cuda.enable_math_sdp(False),
    no_reduction=lambda: set_backend(allow_bf16_reduced_precision_reduction=False),
    no_cache=lambda: torch.set_autocast_cache_enabled(False),
    cpu_fp16=lambda: torch.set_autocast_dtype("cpu", torch.float16))

@contextmanager
def kept():
    "Put back what the block changes of the settings that `BEFORE` touches"
    b, old = torch.backends, flags()
    try: yield
    finally:
        torch.set_float32_matmul_precision(old["float32_matmul"])
        for o in ("cuda", "mkldnn"):
            torch._C._set_fp32_precision_setter(o, "matmul", old[f"fp32_precision {(o, 'matmul')}"])
        b.cuda.enable_flash_sdp(old["sdp flash"]); b.cuda.enable_math_sdp(old["sdp math"])
        set_backend(allow_bf16_reduced_precision_reduction=old["matmul allow_bf16_reduced_precision_reduction"])
        torch.set_autocast_cache_enabled(old["autocast_cache"])
        torch.set_autocast_dtype("cpu", old["autocast cpu"][1])
        assert not changed(old)

@pytest.fixture(scope="module")
def batch():
    "Two micro-batches (x, y) on the default device"
    x = torch.randint(NANO.vocab, (4, 2, NANO.seq_len), generator=torch.Generator().manual_seed(0))
    if torch.cuda.is_available():   # PyTorch orders its attention kernels when the first one is asked for
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 8, 8, device="cuda", dtype=torch.bfloat16))
    return [tuple(t.to("cuda" if torch.cuda.is_available() else "cpu") for t in x[i:i+2]) for i in (0, 2)]

@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("before", BEFORE)
def test_nothing_leaks(before, half, batch):
    "Building, stepping, evaluating and generating leave every setting as it was"
    with kept():
        BEFORE[before]()
        was = flags()
        step = Stepper(build(NANO, ["tf32", half, "flash"]))
        assert not changed(was), "build"
        for _ in range(2): assert step(*batch).isfinite()
        step.evaluate(batch)
        generate(step.run, [1, 2], 3)
        assert not changed(was)

# Those of the later notebooks that run on a CPU, alone where that is possible, and together
LATER = ["fused_ops", "chunked_ce", "bf16,fused_ops,fp8", "bf16,fused_ops,chunked_ce,fp8", "compile", "checkpoint",
         "selective_checkpoint", "fused_adamw", "adamw8bit", "bf16,bf16_weights",
         "tf32,bf16,flash,fused_ops,chunked_ce,fp8,checkpoint,fused_adamw", "tied_embedding", "chunked_ce,head_groups", "direct_update", "flash,fused_ops,recompute_rope",
         "bf16,fused_ops,tied_embedding,chunked_ce,fp8,head_groups,fp8_epilogues,fused_adamw,direct_update",
         "bf16,fused_ops,epilogues,tied_embedding,chunked_ce,head_groups,fused_ce,fused_adamw,direct_update"]

@pytest.mark.parametrize("rungs", LATER)
def test_later_rungs_leak_nothing(rungs, batch):
    "Building, stepping, evaluating and generating leave every setting and the random states as they were"
    rungs = rungs.split(",")
    if why := next(filter(None, (find_rung(r).needs() for r in rungs)), ""): pytest.skip(why)
    was, states = flags(), random_states()
    run = build(NANO, rungs)
    step = Stepper(run)
    assert not changed(was) and random_states() == states, "build"
    for _ in range(2): assert step(*batch).isfinite()
    assert not changed(was) and random_states() == states, "step"
    step.evaluate(batch)
    generate(step.run, [1, 2], 3)
    assert not changed(was) and random_states() == states, "evaluate, generate"

RUNGS = ["tf32", "bf16", "fp16", "flash", "tf32,bf16,flash", "tf32,fp16,flash", "fused_ops", "fused_ops,recompute_rope",
         "bf16,fused_ops,chunked_ce,fp8", "checkpoint", "selective_checkpoint", "direct_update",
         "bf16,fused_ops,tied_embedding,chunked_ce,fp8,head_groups", "bf16,fused_ops,epilogues,chunked_ce,head_groups,fused_ce"]

@pytest.mark.parametrize("rungs", RUNGS)
@pytest.mark.parametrize("loss", [fault_forward, fault_backward])
def test_nothing_leaks_where_a_step_raises(rungs, loss, batch):
    "An error in the forward or the backward pass leaves every setting as it was"
    run = replace(build(NANO, rungs.split(",")), loss=loss)
    was = flags()
    with pytest.raises(ArithmeticError): Stepper(run)(*batch)
    with pytest.raises(ArithmeticError) if loss is fault_forward else torch.no_grad(): Stepper(run).evaluate(batch)
    assert not changed(was)

def test_settings_hold_inside_a_step(batch):
    "TF32 and the attention kernel are there forward and backward, autocast in the forward pass alone"
    seen = {}
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): seen["forward"] = changed(was); return x.clone()
        @staticmethod
        def backward(ctx, g): seen["backward"] = changed(was); return g
    device = batch[0][0].device.type
    run = replace(build(NANO, ["tf32", "bf16", "flash"]), loss=lambda m, x, y: Look.apply(m(x, y)))
    was = flags()
    Stepper(run)(batch[0])
    for where in ("forward", "backward"): assert {"float32_matmul", "sdp math"} <= set(seen[where]), where
    assert f"autocast {device}" in seen["forward"] and f"autocast {device}" not in seen["backward"]

def test_counting_and_training_leak_nothing(tmp_path):
    "Counting on fake tensors and a whole training run leave every setting as it was"
    was = flags()
    count_step(NANO, ["tf32", "bf16", "flash"])
    assert not changed(was), "counting"
    train(options(tmp_path, rungs="tf32,bf16,flash"), progress=False)
    assert not changed(was), "training"

@pytest.mark.parametrize("rungs", [[], ["tf32", "bf16", "flash"]], ids=len)
def test_random_states_are_kept(tmp_path, rungs, batch):
    "Building, stepping and training draw no number from the generators that a user's own code draws from"
    was = random_states()
    step = Stepper(build(NANO, rungs))
    step(*batch)
    generate(step.run, [1, 2], 3)
    assert random_states() == was, "building or stepping"
    cfg = options(tmp_path, rungs=",".join(rungs) or "naive")
    train(cfg, progress=False)
    assert random_states() == was, "training"

def test_fp32_afterwards_matches_float64(batch):
    "An FP32 run built and stepped after all the others still has FP32's errors against a float64 reference"
    for half in ("bf16", "fp16"): Stepper(build(NANO, ["tf32", half, "flash"]))(*batch)
    loss, grads = reference_errors(NANO)
    assert loss < 1e-6 and grads < 1e-5
    assert max(reference_errors(NANO, ["bf16"])) > 1e-4     # the measure sees a lower precision where there is one

def test_rungs_leave_each_other_alone(batch):
    "An FP32 step gives bitwise the same loss before, between and after steps with every rung"
    run, losses = build(NANO), []
    fast = [Stepper(amp.bf16(tf32.tf32(run))), Stepper(flash.flash(run)), Stepper(amp.fp16(run))]
    def loss():
        with torch.no_grad(): return Stepper(run).evaluate(batch)
    losses.append(loss())
    for step in fast: step.evaluate(batch); losses.append(loss())
    assert len(set(losses)) == 1 and fast[0].evaluate(batch) != losses[0]

def test_matmul_precision_nests_and_survives_errors():
    "The inner setting wins, the outer comes back, also by way of an error"
    was = flags()
    with matmul_precision("high"):
        inner = flags()
        with pytest.raises(ArithmeticError), matmul_precision("highest"):
            assert torch.get_float32_matmul_precision() == "highest"
            raise ArithmeticError
        assert not changed(inner) and torch.get_float32_matmul_precision() == "high"
    assert not changed(was)
