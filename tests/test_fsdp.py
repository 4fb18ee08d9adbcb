"The rung fsdp: two processes, each with half of the weights and of the batch, take the steps of one process."
from dataclasses import replace
from functools import partial
import pytest, torch
from small import NANO, fails
from llm_speedrun.files import InputError
from llm_speedrun.runs import World, build, stepper_of
from llm_speedrun.world import pieces, processes

CONFIG = replace(NANO, layers=3, vocab=321)    # a row more than two processes can share evenly
FUSED = ["flash", "fused_ops", "chunked_ce"]
FP8 = ["bf16", *FUSED, "fp8:parts=heads+out+mlp+head"]
LISTS = {"naive": [], "fused": FUSED, "checkpoint": [*FUSED, "checkpoint"], "selective": [*FUSED, "selective_checkpoint"],
         "compile": ["chunked_ce", "compile:backend=aot_eager"], "compiled checkpoint": [*FUSED, "checkpoint", "compile:backend=aot_eager"],
         "adamw8bit": [*FUSED, "adamw8bit"], "fused_adamw": ["fused_adamw"], "bf16": ["bf16", "flash", "chunked_ce"], "fp8": FP8,
         "fp8, checkpoint": [*FP8, "checkpoint"], "bf16_weights": ["bf16", *FUSED, "bf16_weights:rounding=nearest"]}
ROUGH = {k: dict(rel=3e-3, abs=2e-2) for k in LISTS if "fp8" in k or "bf16" in k}    # FP8 and sums in bf16, in another order
EXACT = dict(rel=1e-4, abs=1e-4)

def whole(run):
    "All weights, put together again: name -> array"
    return {n: getattr(p, "full_tensor", lambda: p)().detach().float().cpu().numpy().copy() for n, p in run.model.named_parameters()}

def trained(world, rungs, micro=1, steps=6, config=CONFIG, spoil=None):
    "Losses, norms, an evaluation's loss after each second step, and the weights before and after"
    run = build(config, rungs, seed=3, world=world)
    if spoil: spoil(run)
    before, step = whole(run), stepper_of(run)(run, clip=.5)
    x, y = torch.randint(config.vocab, (2, 4, config.seq), generator=torch.Generator().manual_seed(0)).to(run.device)
    i, n = world.place("dp")
    x, y = (t.chunk(n)[i] for t in (x, y))
    batches, said = list(zip(x.chunk(micro), y.chunk(micro))), []
    for k in range(steps):
        said.append((step(*batches).item(), step.norm.item()))
        if k % 2: said.append(world.mean(step.evaluate([(x, y)])))
    return said, before, whole(run)

def unreduced(run):
    "A mistake: no process ever has the others' gradients"
    for e in run.engines: e.micro = lambda last, f=run.model.set_requires_gradient_sync: f(False) or torch.enable_grad()

CASES = {k: dict(rungs=r) for k, r in LISTS.items()}
CASES |= {"accumulated": dict(rungs=FUSED, micro=2), "accumulated, each": dict(rungs=FUSED, micro=2, options=":each=yes"),
          "not resharded": dict(rungs=FUSED, options=":reshard=no"), "reduced in bf16": dict(rungs=["bf16", *FUSED], options=":reduce=bf16"),
          "narrow": dict(rungs=[], config=replace(CONFIG, hidden=1))}
ROUGH["reduced in bf16"] = ROUGH["bf16"]

def every(world, cases):
    "What each of the cases says on this process"
    torch.manual_seed(world.rank)    # nothing may depend on it
    def one(rungs, options="", **how): return trained(world, [*rungs, "fsdp" + options], **how)
    import time
    res={}
    for k, c in cases.items():
        t=time.time()
        try: res[k] = one(**c)
        except Exception as e:
            import traceback; traceback.print_exc(); raise RuntimeError(k) from e
        if world.first: print(k, time.time()-t, flush=True)
    return res
