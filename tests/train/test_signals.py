"A signal or a stalled source never leaves half of a change: weights, scales and settings are put back before a run is saved."
import json, math, os, signal, threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
import pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode
from llm_speedrun.checkpoint import save
from llm_speedrun.distributed.spawn import run_distributed
from llm_speedrun.distributed.liveness import FlagExchange
from llm_speedrun.distributed.world import World
from llm_speedrun.generate import generate
from llm_speedrun.model_config import GPTConfig
from llm_speedrun.recipes.schedules import GuardedStepper, WeightEMA
from llm_speedrun.rungs.fp8_kernels import Scaling
from llm_speedrun.runs import build
from llm_speedrun.train.checkpointer import Checkpointer
from llm_speedrun.data.encoder_pool import Encoder
from llm_speedrun.data.loader import StreamBatches
from llm_speedrun.train.console import Signals
from llm_speedrun.train.coordinator import Coordinator
from llm_speedrun.train.run_dir import Finished
from llm_speedrun.train.trainer import Trainer
from llm_speedrun.train.validator import TextSampler, Validator
from helpers.timeouts import TIMEOUT
from helpers.tiny_runs import nano, options, texts
from test_resume import go, resume, stop_at
from test_trainer import posix

# What is swapped and restored

class SignalAt(TorchDispatchMode):
    "Delivers a real signal before operation number `at`, from 0; counts the operations"
    def __init__(self, at, number=signal.SIGTERM): super().__init__(); self.at, self.number, self.n = at, number, 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.n += 1
        if self.n == self.at + 1: signal.raise_signal(self.number)
        return f(*args, **(kwargs or {}))

def judged_model(rungs):
    "A `Stepper` after a step, an average that isn't its weights, and a function that copies all that an evaluation must leave alone"
    run = build(GPTConfig(name="small", vocab=64, layers=1, width=32, heads=2, kv_heads=2, hidden=32, seq_len=16), rungs)
    stepper = GuardedStepper(run)
    val = torch.randint(64, (2, 4, 16), generator=torch.Generator().manual_seed(0)).to(run.device)
    stepper(tuple(val))
    average = WeightEMA(stepper.params, .9)
    for m in average.mean: m.add_(1)
    def kept():
        scales = [t for _, o in run.stateful for t in o.state_dict().values() if isinstance(t, torch.Tensor)]
        return [t.detach().clone() for t in (*stepper.params, *scales)]
    return stepper, average, val, kept

def settings(): return torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision(), torch.is_grad_enabled()

@posix
@pytest.mark.parametrize("what, rungs", [("evaluate", []), ("sample", []), ("evaluate", ["bf16", "fused_ops", "fp8"])])
def test_a_signal_at_any_operation(what, rungs):
    "While the average is put in place, in the passes, or while it is taken out: the weights and FP8's maxima stay the trained ones"
    def judged(at):
        stepper, average, val, kept = judged_model(rungs)
        trained, before = kept(), settings()
        with Signals() as signals, SignalAt(at) as seen, suppress(KeyboardInterrupt):
            v = Validator(stepper, val, World(), average=average, batch=4, during=signals.during)
            if what == "evaluate": v.evaluate()
            else: v.interruptible(lambda: generate(stepper.run, [1, 2], 1), stepper.run.forward_contexts)
        assert settings() == before and (signals.got == signal.SIGTERM) == (at < seen.n)
        return seen.n, all(map(torch.equal, kept(), trained))
    n, _ = judged(math.inf)
    places = range(n) if not rungs else range(n - 40, n) # FP8's maxima are put back at the end, before the weights
    broken = [at for at in places if not judged(at)[1]]
    assert n > 20 and not broken, f"operations {broken} of {n}"

@posix
def test_a_signal_while_a_setting_is_put_back():
    "A context of the run is left when the signal comes: what it has set is put back all the same"
    now = ["as it was"]
    @contextmanager
    def setting():
        old, now[0] = now[0], "set"
        try: yield
        finally: signal.raise_signal(signal.SIGTERM); now[0] = old
    stepper, average, val, _ = judged_model([])
    for field in ("step_contexts", "forward_contexts"):
        stepper.run = replace(stepper.run, **dict(step_contexts=(), forward_contexts=()) | {field: (setting,)})
        with Signals() as signals, pytest.raises(KeyboardInterrupt):
            Validator(stepper, val, World(), average=average, batch=4, during=signals.during).evaluate()
        assert now == ["as it was"]

@posix
def test_a_second_signal_does_not_break_off_the_clean_up():
    "Of the first one, in what an interrupted function does before it is left"
    done = []
    def f():
        try: signal.raise_signal(signal.SIGINT)
        finally: signal.raise_signal(signal.SIGTERM); done.append(1)
    with Signals() as signals, pytest.raises(KeyboardInterrupt): signals.during(f)
    assert done and signals.got == signal.SIGTERM

@posix
def test_a_third_ctrl_c_breaks_off_a_step_alone():
    "Not what is done between steps, such as putting back the weights that were averaged to be written"
    stepper, average, _, kept = judged_model([])
    trained, said = kept(), []
    with Signals(said.append) as signals:
        with average.used(), SignalAt(math.inf):
            for _ in range(4): signal.raise_signal(signal.SIGINT)
        assert all(map(torch.equal, kept(), trained)) and len(said) == 4
        with pytest.raises(KeyboardInterrupt): signals.during(lambda: signal.raise_signal(signal.SIGINT), presses=3)

# A stream that stalls

@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_a_stream_that_stalls(tmp_path, monkeypatch, number):
    """A signal, or the end of a run, while its source gives no document: the run is saved, with a result, and its thread is left alone.
    When the source goes on, the thread ends"""
    training, stalled, released, before = [], threading.Event(), threading.Event(), {*threading.enumerate()}
    def stalling(self, epoch): # each line is a document
        for line in chain.from_iterable(map(str.splitlines, self.source())):
            if training and self.i >= 6 and not released.is_set(): # the thread makes the seventh batch
                stalled.set()
                if number: os.kill(os.getpid(), number)
                assert released.wait(TIMEOUT)
            yield line
    def after_last(self): # the thread has been asked for a batch that no step will take
        if self.done == 6: assert stalled.wait(TIMEOUT)
        return after_step(self)
    monkeypatch.setattr(StreamBatches, "documents", stalling)
    monkeypatch.setattr(StreamBatches, "encoded", small_parcels)
    after_step = Trainer.after_step
    if number is None: monkeypatch.setattr(Trainer, "after_step", after_last)
    trainer = Trainer(options(tmp_path, data=str(texts(tmp_path/"texts")), stream=True, steps=8 if number else 6), progress=False)
    training.append(trainer)
    res = trainer.fit()
    assert stalled.is_set() and res["interrupted"] == bool(number) and json.loads((tmp_path/"runs/run/result.json").read_text())["steps"] == res["steps"]
    threads = [t for t in threading.enumerate() if t.name == "prefetch" and t not in before]
    assert threads and all(t.daemon for t in threads) # none is waited for when the program ends
    released.set()
    for t in threads: t.join(TIMEOUT)
    assert not any(t.is_alive() for t in threads)
    if number: assert resume(tmp_path)[1]["steps"] == 8

def small_parcels(self, pieces):
    "As `StreamBatches.encoded`, a piece at a time, so that a batch is one or a few documents ahead of its tokens"
    encoder = Encoder(self.tokenizer, self.dtype)
    for p in pieces: yield [p], encoder([p[0]])

# What a stop leaves to do

@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_sample(tmp_path, monkeypatch, number):
    "The run ends with the sample of its last step, or a resumed one writes it"
    how = dict(steps=6, num_samples=3, num_evals=1)
    go(tmp_path/"whole", **how)
    sample, calls = TextSampler.__call__, []
    def pressed(self):
        calls.append(1)
        if len(calls) == 3: self.validator.during(lambda: signal.raise_signal(number)) # after steps 2, 4 and 6
        return sample(self)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(TextSampler, "__call__", pressed)
    go(tmp_path/"stopped", **how)
    with suppress(Finished): resume(tmp_path/"stopped")
    got, want = ((tmp_path/name/"runs/run/samples.jsonl").read_text() for name in ("stopped", "whole"))
    assert len(calls) > 2 and got == want and [json.loads(o)["step"] for o in got.splitlines()] == [2, 4, 6]

@posix
def test_the_checkpoint_is_on_the_disk_before_the_weights(tmp_path, monkeypatch):
    "A slow disk, and a signal that leaves no time: what a resumed run needs is written first, and whole"
    order, asked, write, weights, file = [], threading.Event(), save.write_checkpoint, Checkpointer.save_weights, save.replace_tensors
    def slow(folder, *args):
        assert asked.wait(TIMEOUT) # the weights are copied and stand in line
        write(folder, *args); order.append(folder.name)
    def copied(self, path): weights(self, path); asked.set()
    def written(tensors, path): file(tensors, path); order.append(path.name)
    monkeypatch.setattr(save, "write_checkpoint", slow)
    monkeypatch.setattr(save, "replace_tensors", written)
    monkeypatch.setattr(Checkpointer, "save_weights", copied)
    stop_at(monkeypatch, 2, signal.SIGTERM)
    go(tmp_path, steps=6, num_evals=1)
    assert order == ["step-00000002", "model.safetensors"]

PAIRS = {(signal.SIGHUP, signal.SIGINT): signal.SIGHUP, (signal.SIGINT, signal.SIGTERM): signal.SIGTERM,
         (None, signal.SIGINT): signal.SIGINT, (None, None): 0} if os.name == "posix" else {} # what each of two processes gets: what ends both

def stops(w):
    "What each of two processes ends by, if they get a pair of signals in the same step, or too late for the last answer that they read in it"
    res = []
    for ours in PAIRS:
        for late in (False, True):
            c = Coordinator.__new__(Coordinator)
            c.world, c.signals, c.save_requested, c.stop, c.flags = w, Signals(), False, 0, FlagExchange(w, "stop", "save")
            for step in range(4):
                if step == late*3: c.signals.got = ours[w.rank]
                c.exchange_flags(save=False)
            c.drain()
            res.append(c.stop_signal())
    return res

@posix
def test_the_more_urgent_signal_wins():
    "On all processes, whichever of them gets it, though SIGHUP is a smaller number than SIGINT"
    assert run_distributed(2, stops) == [[urgent for urgent in PAIRS.values() for _ in range(2)]]*2

# After the last step

@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("last", [dict(), dict(target_loss=1e9)], ids=["steps", "target"])
def test_a_signal_in_the_last_step_leaves_a_run_that_ends(tmp_path, number, last):
    "Whatever result it leaves, going on from there ends with one that is not called interrupted: nothing is asked for twice"
    cfg = options(tmp_path, steps=4, num_evals=4, **last)
    trainer = Trainer(cfg, progress=False)
    after_step = trainer.after_step
    def stopped():
        after_step()
        if trainer.done == trainer.cfg.steps or trainer.target_reached: signal.raise_signal(number)
    trainer.after_step = stopped
    trainer.fit()
    for _ in range(3):
        result = json.loads((tmp_path/"runs/run/result.json").read_text())
        if not result["interrupted"]: break
        resume(tmp_path)
    assert not result["interrupted"] and result["val_loss"] > 0
    with pytest.raises(Finished): resume(tmp_path)
