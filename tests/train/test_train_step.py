"""What a step computes doesn't depend on its micro-batches; its phases are those of all updates; and nothing but training is in training mode."""
import itertools, math
import pytest, torch, torch.nn.functional as F
from helpers.lessons import defined_in
from helpers.tiny_runs import NANO, cache, fails, nano, options
from llm_speedrun.generate import generate
from llm_speedrun.kv_cache import Generator
from llm_speedrun.model import GPT
from llm_speedrun.runs import Run, build
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.metrics import Breakdown
from llm_speedrun.train.train_step import LrSchedule, TrainStep
from llm_speedrun.train.trainer import Trainer, train
from llm_speedrun.recipes.batch import Phases
from dataclasses import replace

# Micro-batches

def sequences(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    device = next(build(NANO).model.parameters()).device
    return torch.randint(NANO.vocab, (2, n, NANO.seq_len), generator=g).to(device)

def step_of(rungs, *sizes, calls=1):
    "Loss, norm and gradients of a step over 15 sequences in micro-batches of these sizes, the last of some calls at a learning rate of 0"
    step, found = Stepper(build(NANO, rungs), clip=0), []
    for g in step.opt.param_groups: g["lr"] = 0.
    apply = step.apply
    def noted():
        found[:] = [p.grad.clone().flatten()*(getattr(step.opt, "factor", None) or 1) for p in step.params]
        apply()
    step.apply = noted
    for _ in range(calls): loss = step(*zip(*(t.split(sizes) for t in sequences(15))))
    return loss.item(), step.norm.item(), torch.cat(found)

@pytest.mark.parametrize("sizes", [(12, 3), (8, 7), (5, 5, 5), (4, 4, 4, 3), (1, 14)], ids=str)
@pytest.mark.parametrize("rungs", ["", "flash", "flash,chunked_ce,fused_adamw"])
def test_micro_batches_of_any_size(rungs, sizes):
    rungs = rungs.split(",") if rungs else []
    (loss, norm, grads), (l, n, g) = step_of(rungs, 15), step_of(rungs, *sizes)
    assert (g - grads).norm() < 1e-6*grads.norm() and l == pytest.approx(loss, rel=1e-6) and n == pytest.approx(norm, rel=1e-6)

@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(12, 3), (8, 7)], ids=str)
@pytest.mark.parametrize("more", ["", "fp8", "cuda_graphs", "cuda_graphs,direct_update", "compile"])
def test_micro_batches_of_any_size_on_a_gpu(more, sizes):
    "Also where passes are captured, at the fifth step, and where 8-bit formats round"
    rungs = ["tf32", "bf16", "flash", "fused_ops", "chunked_ce", "fused_adamw", *more.split(",")*bool(more)]
    (loss, norm, grads), (l, n, g) = step_of(rungs, 15, calls=5), step_of(rungs, *sizes, calls=5)
    assert (g - grads).norm() < (.1 if "fp8" in more else .02)*grads.norm() and l == pytest.approx(loss, rel=5e-3) and n == pytest.approx(norm, rel=.02)

def test_any_micro_batch_gives_the_same_run(tmp_path):
    "96 sequences in four updates of 24, two of 48, then one, whatever the micro-batch: it may divide no update"
    def curve(micro, **kw):
        cfg = options(tmp_path, recipe="speedrun:pieces=1", step_tokens=96*8, seq_len=8, micro_batch_size=micro, name=str(micro), num_evals=1, **kw)
        trainer, res = train(cfg, progress=False)
        return [r["loss"] for r in trainer.rows() if "loss" in r] + [res["val_loss"]]
    whole = curve(96)
    for micro in (32, 16): assert curve(micro) == pytest.approx(whole, abs=2e-4), micro

@pytest.mark.parametrize("rows, micro, sizes", [(384, 64, ([48]*2, [64]*3, [64]*6)), (60, 12, ([5]*3, [10]*3, [12]*5)), (52, 12, ([7, 6], [9, 9, 8], [11]*4 + [8])),
                                                (96, 96, ([24], [48], [96]))], ids=str)
def test_updates_are_split_evenly(rows, micro, sizes):
    "Equal where that takes at most twice as many passes; otherwise the sizes differ by one"
    step = TrainStep(replace(build(NANO), batching=Phases((4, 2, 1))), micro, LrSchedule(3))
    xy = torch.zeros(2, rows, NANO.seq_len, dtype=torch.long)
    for i, want in enumerate(sizes):
        for update in step.updates(i, *xy):
            got = [len(x) for x, _ in step.micro_batches(*update)]
            assert sum(got) == len(update[0]) and max(got) <= micro and max(got) - min(got) <= 1
            if max(want) - min(want) <= 1: assert got == want

def test_after_memory_ran_out_the_update_is_the_same():
    "In micro-batches of 12, then of 5: the weights are those of a step in one micro-batch"
    def weights(micro, most=math.inf):
        step = TrainStep(build(NANO, ["flash"]), micro, LrSchedule(1, .01))
        def smaller(n): step.micro_batch = 4
        step.on_oom = smaller
        def check(model, args):
            if len(args[0]) > most: raise torch.OutOfMemoryError("out of memory")
        step.run.model.register_forward_pre_hook(check)
        step(0, *sequences(13))
        return step.micro_batch, torch.cat([p.detach().flatten() for p in step.stepper.params])
    (_, whole), (micro, parts) = weights(13), weights(12, most=4)
    assert micro == 4 and (whole - parts).norm() < 1e-5*whole.norm()

def test_the_noise_needs_equal_sizes():
    x, y = sequences(3)
    with fails(ValueError, "equal size"): defined_in("52_batch", "noise_scale", "squared_length").noise_scale(Stepper(build(NANO)), [(x[:2], y[:2]), (x[2:], y[2:])])

# What sets the step

@pytest.mark.parametrize("given, step", [(dict(), 64), (dict(micro_batch_size=8), 64), (dict(grad_accum_steps=2), 64), (dict(micro_batch_size=8, grad_accum_steps=2), 16),
                                         (dict(micro_batch_size=8, step_tokens=32*16), 32)], ids=str)
def test_a_micro_batch_alone_changes_no_step(tmp_path, given, step):
    kw = dict(micro_batch_size=None, grad_accum_steps=None) | given
    c = Trainer(options(tmp_path, **kw), progress=False).cfg
    assert c.step_tokens == step*16 == c.micro_batch_size*c.grad_accum_steps*16

@pytest.mark.parametrize("micro", [12, 128])
def test_a_micro_batch_that_does_not_divide_the_step(tmp_path, micro):
    with fails(ValueError, f"64 sequences, which micro_batch_size {micro} doesn't divide", "--step_tokens"):
        Trainer(options(tmp_path, micro_batch_size=micro, grad_accum_steps=None), progress=False)

# Where a step's time goes

def test_the_phases_of_a_step_are_those_of_all_updates(tmp_path, monkeypatch):
    "By a clock that moves on by a millisecond whenever it is looked at: four updates of two micro-batches, and norms before and after each"
    ticks = itertools.count()
    monkeypatch.setattr(Breakdown, "now", lambda self: next(ticks)/1e3)
    trainer, _ = train(options(tmp_path, recipe="speedrun:updates=4:pieces=1", steps=10, step_tokens=8*16, micro_batch_size=1), progress=False)
    row, = (r for r in trainer.rows() if "ms_forward" in r)
    assert {k: round(v) for k, v in row.items() if k.startswith("ms_")} == dict(ms_data=1, ms_forward=8, ms_backward=8, ms_optimizer=12, ms_telemetry=8)

# Modes

class Dropping(GPT):
    "A model with dropout"
    def hidden(self, x): return F.dropout(super().hidden(x), .3, self.training)

def test_dropout_is_training_alone():
    "Evaluation and text don't depend on chance, and training goes on with it"
    run = Run(Dropping(NANO).to(next(build(NANO).model.parameters()).device))
    step, batch = Stepper(run), sequences(4)
    step.run.model.layers[0].eval() # by hand
    assert step.evaluate([batch]) == step.evaluate([batch])
    text = lambda: generate(run, [1, 2, 3], 8, temperature=0)
    assert text() == text()
    writer = Generator(run)
    assert not writer.model.training and run.model.training
    before = run.loss(run.model, *batch).item()
    assert before != run.loss(run.model, *batch).item() and run.model.training and not run.model.layers[0].training

def test_an_error_in_an_evaluation_restores_the_mode():
    run = build(NANO)
    def broken(model, x, y): assert not model.training; raise KeyboardInterrupt
    step = Stepper(replace(run, loss=broken))
    with pytest.raises(KeyboardInterrupt): step.evaluate([sequences(1)])
    assert all(m.training for m in run.model.modules())

# The norm that gradients may have

@pytest.mark.parametrize("wrong", [-1., math.nan])
def test_a_clip_that_is_no_norm(wrong):
    with fails(ValueError, "clip is the largest norm", f"not {wrong}"): Stepper(build(NANO), clip=wrong)

def test_a_clip_of_0_clips_nothing():
    "As for --grad_clip"
    def weights(clip):
        step = Stepper(build(NANO), clip=clip)
        step(sequences(2))
        return torch.cat([p.detach().flatten() for p in step.params])
    assert weights(0).equal(weights(math.inf)) and not weights(0).equal(torch.cat([p.detach().flatten() for p in build(NANO).model.parameters()]))
