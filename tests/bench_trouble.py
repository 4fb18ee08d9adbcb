"""Train a tiny model on a CPU, once as a baseline and three times with a deliberate disturbance, and keep the logged rows.
    tests/bench_trouble.py OUT
FP8 is emulated, slowly: values are rounded as a GPU's kernels round them. Writes OUT/cpu.json for the page "What trouble looks
like": each run's rows, and the size and step of the disturbances. Takes some minutes."""
import json, sys, tempfile
from contextlib import contextmanager
from pathlib import Path
import torch
from llm_speedrun.measure import machine
from llm_speedrun.train.callbacks import Callback
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.trainer import Trainer

STEPS, AT = 120, 80 # of each run; the number of the step with the trouble, which is one of those that are measured
RUNGS = "bf16,flash,fused_ops,chunked_ce,fp8"
KEYS = "step loss lr grad_norm tokens loss_scale fp8_clipped".split()
STARTS = "grad_norm_", "update_norm_", "fp8_clipped_", "fp8_range_"
SPIKE, FACTOR, RATE = 3, 16, 30 # steps with a bad batch; of what is suddenly too large; of the learning rate

class Troubled(Trainer):
    "A `Trainer` whose batches from `AT` on are random tokens for some steps"
    bad = 0
    def loop(self, batches):
        def spoiled():
            g = torch.Generator().manual_seed(0)
            for step, (x, y) in enumerate(batches, self.done + 1):
                if AT <= step < AT + self.bad:
                    t = torch.randint(self.config.vocab, (len(x), x.shape[1] + 1), generator=g).to(x.device)
                    x, y = t[:, :-1], t[:, 1:]
                yield x, y
        super().loop(spoiled())

@torch.no_grad()
def rescale(model, factor): # a power of two
    "Make the inputs of the MLPs' first matmuls larger and its weights smaller: the same function, in other ranges"
    for b in model.layers:
        b.post_attention_layernorm.weight.mul_(factor)
        for m in (b.mlp.gate_proj, b.mlp.up_proj): m.weight.div_(factor)

class Rescaled(Callback):
    "Rescale the model for one step"
    def after_step(self, trainer):
        if trainer.done in (AT - 1, AT): rescale(trainer.run.model, FACTOR if trainer.done < AT else 1/FACTOR)

RUNS = dict(quiet={}, spike=dict(bad=SPIKE), overflow=dict(callbacks=[Rescaled()]), rate=dict(rate=RATE))

def trained(folder, name, lr=None, bad=0, callbacks=(), rate=1):
    "Return the rows of a run, with the keys that the page shows, and its peak learning rate"
    cfg = TrainConfig(model="tiny", rungs=RUNGS, recipe="adamw", steps=STEPS, step_tokens=512, micro_batch_size=8, num_evals=1, sample_tokens=1,
                      name=name, out=str(folder), **dict(lr=lr*rate) if lr else {})
    trainer = Troubled(cfg, progress=False, callbacks=[*callbacks])
    trainer.bad = bad
    trainer.fit()
    rows = [{k: v for k, v in r.items() if k in KEYS or k.startswith(STARTS)} for r in trainer.rows() if "loss" in r]
    short = lambda v: float(f"{v:.5g}") if isinstance(v, float) else v
    return [{k: short(v) for k, v in r.items()} for r in rows], trainer.plan.options.lr

def main(out):
    "Train all runs, on the same data from the same weights"
    found, lr = {}, None
    with tempfile.TemporaryDirectory() as folder:
        for name, how in RUNS.items():
            rows, used = trained(Path(folder), name, lr, **how)
            lr = lr or used
            found[name] = dict(lr=used, rows=rows)
            print(f"{name}: loss {rows[-1]['loss']:.3f} after {len(rows)} steps", flush=True)
    about = {k: v for k, v in machine().items() if k in ("gpu", "torch", "date")}
    Path(out).mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(**about, steps=STEPS, at=AT, spike=SPIKE, factor=FACTOR, rate=RATE, rungs=RUNGS, runs=found))
    (Path(out)/"cpu.json").write_text(text.replace('{"step"', '\n{"step"') + "\n")

if __name__ == "__main__": main(*sys.argv[1:])
