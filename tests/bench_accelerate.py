"""Time training steps of a Qwen3 of transformers: as it is, with torch.compile, Liger or torchao's FP8, and with `accelerate`.
    tests/bench_accelerate.py OUT MODEL BATCH SEQ_LEN [TEXT.bin STEPS]     MODEL: a key of `WORKLOADS`, or qwen3-0.6b
Each contender is interleaved only with `accelerate(model)`: all together wouldn't fit in memory. All have SDPA or faster attention, fused AdamW and
gradient clipping; weights are in FP32 and matmuls in bf16 or FP8, except in `liger_bf16_weights`. Prints a line for each and writes
OUT/MODEL.json at once: a contender that is already there is skipped. With TEXT.bin, uint16 tokens, each trains STEPS steps from the
same weights on the same text, and its losses are recorded."""
import contextlib, json, logging, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
import numpy as np, torch
from llm_speedrun.accelerate import accelerate
from llm_speedrun.architectures import with_shape
from llm_speedrun.benchmarks import peers
from llm_speedrun.benchmarks.adapters import Peer, Step
from llm_speedrun.measure import default_device, version_of
from llm_speedrun.model_config import workload
from llm_speedrun.step_builder import free_memory
from llm_speedrun.tools.export import qwen3_config

LR = 3e-4

def shape(name, seq_len):
    "Return the `GPTConfig` of MODEL"
    if name != "qwen3-0.6b": return replace(workload(name), seq_len=seq_len)
    c = with_shape(workload("124m"), layers=28, width=1024, heads=16, kv_heads=8, head_dim=128, hidden=3072, seq_len=seq_len)
    return replace(c, name=name, vocab=151936)

def made(config, dtype=torch.float32):
    "Return the model of transformers, with the same weights each time"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    with torch.device(default_device()):
        return Qwen3ForCausalLM(Qwen3Config(**qwen3_config(config), attn_implementation="sdpa", use_cache=False)).to(dtype).train()

class AcceleratedStep:
    "A step of `accelerate` on micro-batches (x, y)"
    def __init__(self, fast): self.fast, self.run = fast, fast.run
    def __call__(self, *batches): return self.fast.step(*[dict(input_ids=x, labels=x) for x, _ in batches])

def ours(rungs, config):
    fast = accelerate(made(config), rungs, seq_len=config.seq_len, lr=LR)
    return Peer(AcceleratedStep(fast), fast.model, " ".join(fast.run.rungs))

def in_fp8(model):
    "torchao's FP8 in all linear layers but the head, scaled by tensor"
    from torchao.float8 import convert_to_float8_training
    return convert_to_float8_training(model, module_filter_fn=lambda m, name: name != "lm_head")

def theirs(config, changes=(), compiled=False, dtype=torch.float32):
    model = made(config, dtype)
    source = [f"transformers {version_of('transformers')}"]
    for change in changes:
        if isinstance(said := change(model), str): source.append(said)
    if compiled: peers.compile_transformers(model, peers.with_liger in changes)
    cast = partial(torch.autocast, default_device().type, torch.bfloat16) if dtype == torch.float32 else contextlib.nullcontext
    def loss(x, y):
        with cast(): return model(input_ids=x, labels=x).loss
    opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=(.9, .95), weight_decay=.1, fused=True)
    return Peer(Step(model, loss, opt, clip=1.), model, ", ".join(source))

OURS = dict(accelerate=partial(ours, "auto"), accelerate_bf16=partial(ours, "fastest16" if torch.cuda.is_available() else "cpu"))
THEIRS = dict(transformers=theirs, compile=partial(theirs, compiled=True), liger=partial(theirs, changes=[peers.with_liger]),
              liger_compile=partial(theirs, changes=[peers.with_liger], compiled=True),
              liger_bf16_weights=partial(theirs, changes=[peers.with_liger], dtype=torch.bfloat16),
              torchao_fp8_compile=partial(theirs, changes=[in_fp8], compiled=True))

def text(path, config, batch, steps):
    "Return the tokens of each step, in the file's order"
    n = batch*config.seq_len
    tokens = torch.from_numpy(np.fromfile(path, np.uint16, n*steps).astype(np.int64))
    return tokens.view(steps, batch, config.seq_len).to(default_device())

def curve(setup, config, micro, batches):
    "Train from the start and return the losses"
    if not len(batches): return []
    peer = setup(config)
    losses = [peer.step(*[(x, x) for x in b.split(micro)]) for b in batches]
    return [l.item() for l in losses]

def line(r):
    return (f"{r['workload']} B{r['batch']} {r['rung']}: {r['tok_s']:,.0f} tokens/s in micro-batches of {r['micro']}, accelerate is {1/r['ratio']:.3f}x "
            f"({1/r['ratio_p90']:.3f} to {1/r['ratio_p10']:.3f}), {r['peak_gib'] or 0:.1f} GiB, loss {(r['curve'] or [0])[-1]:.3f}")

def main(out, model, batch, seq_len, path=None, steps=0, rounds=8, reps=3):
    config, batch, out = shape(model, int(seq_len)), int(batch), Path(out)/f"{model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(out.read_text()) if out.exists() else []
    batches = text(path, config, batch, int(steps)) if path else []
    first = peers.contender("accelerate", OURS["accelerate"], config, batch)
    def keep(r, setup):
        r |= dict(curve=curve(setup, config, r["micro"], batches), packages={p: v for p in "transformers liger-kernel torchao flash-attn-4 quack-kernels".split() if (v := version_of(p))})
        records.append(r); out.write_text(json.dumps(records, indent=1))
        if "ratio_p10" in r: print(line(r), flush=True)
        torch._dynamo.reset(); free_memory()
    for name, setup in (OURS | THEIRS).items():
        if name in {r["rung"] for r in records} | {"accelerate"}: continue
        try:
            c = peers.contender(name, setup, config, batch)
            mine, r = peers.race([first, c], rounds, reps)
            del c; free_memory()
            if not any(k["rung"] == "accelerate" for k in records): keep(mine, OURS["accelerate"])
            keep(r | dict(ms_of_accelerate=mine["ms"]), setup)
        except Exception as e: print(f"{name} is left out: {type(e).__name__}: {str(e).strip():.500}", flush=True); free_memory()

if __name__ == "__main__": main(*sys.argv[1:])
