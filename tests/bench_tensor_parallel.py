"""Time a training step of one model sharded over several GPUs: our tensor_parallel and PyTorch's own, interleaved.
    tests/bench_tensor_parallel.py OUT [--gpus 2] [--models 124m,1b] [--rounds 5] [--reps 4] [--async_tp] [--tiny]
PyTorch's version follows its documentation and torchtitan: `parallelize_module` with sequence parallel between the blocks, one all-gather for
each of attention and MLP, `loss_parallel`, SDPA, autocast to bf16 with a bf16 residual stream, fused AdamW, each block compiled. Both versions
have the same weights, tokens and clipping. A second run has PyTorch's weights and moments in bf16, which trains worse and is a lower bound
on its time. --async_tp adds a third run with its overlapped matmuls (symmetric memory), which may not work everywhere. Each run includes
our step, too. Writes OUT/tensor_parallel.json after each. Without GPUs, --tiny tests it on two CPU processes."""
import argparse, json, os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from llm_speedrun.distributed.spawn import on_gpus, run_distributed
from llm_speedrun.distributed.interleaved import compare_together
from llm_speedrun.io_utils import RunError
from llm_speedrun.measure import default_device, machine
from llm_speedrun.model import rope, rope_table
from llm_speedrun.model_config import workload
from llm_speedrun.runs import baseline
from llm_speedrun.step_builder import make_step
from llm_speedrun.stepper import param_groups
from llm_speedrun.timing import speedup, warm_up

RUNGS = "tf32 bf16 flash fused_ops chunked_ce fused_adamw".split()
BATCH = {"124m": 32, "1b": 8} # sequences in a step
HOW = dict(lr=1e-4, betas=(.9, .95))

# --- the same model as one writes it for `parallelize_module` ---

class Norm(nn.Module):
    "RMSNorm in its weight's type at least, of which `SequenceParallel` makes a `DTensor`"
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps
    def forward(self, x):
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)

class Attention(nn.Module):
    "Self-attention with QK-norm: of all heads, or of those that this process has"
    def __init__(self, c):
        super().__init__()
        self.head_dim, linear = c.head_dim, partial(nn.Linear, bias=False)
        self.q_proj, self.o_proj = linear(c.width, c.heads*c.head_dim), linear(c.heads*c.head_dim, c.width)
        self.k_proj, self.v_proj = linear(c.width, c.kv_heads*c.head_dim), linear(c.width, c.kv_heads*c.head_dim)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.eps), Norm(c.head_dim, c.eps)
    def forward(self, x, cos, sin):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)) # B T H D
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        o = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(o.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    "SwiGLU"
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(c.width, c.hidden, bias=False), nn.Linear(c.width, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.width, bias=False)
    def forward(self, x): return self.down_proj(F.silu(self.gate_proj(x))*self.up_proj(x))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.width, c.eps), Norm(c.width, c.eps)
    def forward(self, h, cos, sin):
        h = h + self.self_attn(self.input_layernorm(h), cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))

class PlainGPT(nn.Module):
    "A `GPT` of this package, its parameters by the same names, with modules for all that is cut"
    def __init__(self, config, stream=None): # type of the residual stream, by default that of the weights
        super().__init__()
        c, self.stream = config, stream
        self.embed_tokens, self.norm = nn.Embedding(c.vocab, c.width), Norm(c.width, c.eps)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for n, t in zip(("cos", "sin"), rope_table(c.seq_len, c.head_dim, c.rope_theta)): self.register_buffer(n, t, persistent=False)
    def forward(self, x): # B T
        h = self.embed_tokens(x)
        if self.stream: h = h.to(self.stream, copy=True) # a compiled block that gets a `DTensor`'s own memory loses its gradient (2.13)
        for layer in self.layers: h = layer(h, self.cos[:x.shape[1]], self.sin[:x.shape[1]])
        return self.head(self.norm(h)) # of `DTensor`s where it is cut: each process has some of the vocabulary

def parallelized(model, mesh):
    "The plain model cut by PyTorch, in place: heads, hidden units, vocabulary, and between them the tokens"
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
    rows, heads = RowwiseParallel(output_layouts=Shard(1)), SequenceParallel(sequence_dim=2, use_local_output=True)
    gathered = lambda n: PrepareModuleInput(input_layouts=(Shard(1), *[None]*n), desired_input_layouts=(Replicate(), *[None]*n))
    plan = {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(), "self_attn": gathered(2), "mlp": gathered(0),
            **{f"self_attn.{k}_proj": ColwiseParallel() for k in "qkv"}, "self_attn.q_norm": heads, "self_attn.k_norm": heads, "self_attn.o_proj": rows,
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": rows}
    for layer in model.layers: parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, dict(
        embed_tokens=RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), norm=SequenceParallel(),
        head=ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)))
    model.head.weight = model.embed_tokens.weight
    return model

def parallel_loss(model, x, y):
    "The mean cross-entropy of a cut model. Its backward pass, too, must run inside of `loss_parallel()`"
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y.flatten())

def pytorch_model(config, world, dtype=torch.float32, stream=None, seed=0):
    "PyTorch's cut model, with the weights that a `GPT` of this package begins with"
    weights = baseline(config, default_device(), seed).model.state_dict()
    model = PlainGPT(config, stream).to(default_device())
    model.load_state_dict(weights | {"head.weight": weights["embed_tokens.weight"]})
    return parallelized(model.to(dtype), world.mesh["tp"])

# --- steps ---

def pytorch_step(config, batch, world, compiled=False, narrow=False, async_tp=False):
    "A builder of PyTorch's step, as `make_step` makes ours; `narrow`: weights and moments in bf16, too, which trains worse"
    def build_step():
        from torch.distributed.tensor.parallel import loss_parallel
        device = default_device()
        model, scope = pytorch_model(config, world, torch.bfloat16 if narrow else torch.float32, torch.bfloat16), nullcontext
        torch.set_float32_matmul_precision("high")
        if async_tp:
            from torch._inductor import config as inductor
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group
            enable_symm_mem_for_group(world.group("tp").group_name)
            scope = lambda: inductor.patch(_micro_pipeline_tp=True)
        if compiled:
            for layer in model.layers: layer.compile(fullgraph=True)
        opt = torch.optim.AdamW(param_groups(model, .1), fused=device.type == "cuda", **HOW)
        x, y = torch.randint(config.vocab, (2, batch, config.seq_len), device=device, generator=torch.Generator(device).manual_seed(0))
        def step():
            with scope(), loss_parallel():
                with torch.autocast(device.type, torch.bfloat16, enabled=not narrow): loss = parallel_loss(model, x, y)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1., foreach=True)
            opt.step(); opt.zero_grad()
            return loss.detach()
        return step
    return build_step

def versions(config, batch, world, rungs, kind):
    "Name -> builder of its step. A group of versions has one compiled version of PyTorch's: a second one would get the first one's code, or fail (2.13)"
    cut = [*rungs, f"tensor_parallel:size={world.size}"]
    ours, theirs = {"ours": make_step(config, cut, batch, world=world)}, partial(pytorch_step, config, batch, world)
    if kind == "bf16": return ours | {"PyTorch, compiled, weights in bf16": theirs(compiled=True, narrow=True)}
    if kind == "async": return ours | {"PyTorch, compiled, async TP": theirs(compiled=True, async_tp=True)}
    return {"one GPU, ours": make_step(config, rungs, batch)} | ours | {
        "ours, compiled": make_step(config, [*cut, "compile"], batch, world=world), "PyTorch": theirs(), "PyTorch, compiled": theirs(compiled=True)}

def compare_group(world, config, batch, rungs, kind, rounds, reps):
    "In each process: all versions interleaved. Name -> `Measured`, the first step's loss of each, and what failed"
    steps, res, losses, failed = {}, {}, {}, {}
    for name, build in versions(config, batch, world, rungs, kind).items():
        def noted():
            step = build()
            losses[name] = step().item()
            return step
        try: made, error = warm_up(noted), ""
        except Exception as e: made, error = None, f"{type(e).__name__}: {e}"
        if any(errors := world.all_gather_object(error)): failed[name] = next(filter(None, errors))
        else: steps[name], res[name] = made
    turns = compare_together(world, {k: lambda f=f: f for k, f in steps.items()}, rounds, reps, warmup=1)
    for k, m in turns.items(): res[k].rounds = m.rounds
    return res, losses, failed

def record(config, batch, gpus, kind, name, m, first, base, peak):
    "What is saved of a version"
    tokens = batch*config.seq_len
    return dict(version=name, group=kind, workload=config.name, gpus=1 if name == "one GPU, ours" else gpus, tokens=tokens, ms=m.times.ms, p20=m.times.p20, p80=m.times.p80,
                tok_s=tokens/m.times.ms*1e3, peak_gib=peak, first_loss=first, warmup_s=m.warmup_s, rounds=m.rounds, **speedup(base, m), **machine())

def measure(out, config, batch, gpus, rungs=RUNGS, kind="plain", rounds=5, reps=4):
    "Measure a group of versions in processes of its own, add it to OUT/tensor_parallel.json, print it. A ratio is of the speed of ours in that group"
    from bench_tensor_parallel import compare_group # by this name the other processes find it, also from a script
    every = run_distributed(gpus, compare_group, config, batch, rungs, kind, rounds, reps, tp=gpus)
    res, first, failed = every[0]
    peak = lambda k: max(r[k].peak_gib for r, *_ in every) if res[k].peak_gib else None
    found = [record(config, batch, gpus, kind, k, m, first[k], res["ours"], peak(k)) for k, m in res.items()]
    path = Path(out)/"tensor_parallel.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else []) + found, indent=1))
    print(f"\n{config.name}, {batch} x {config.seq_len} tokens, {gpus} processes\n{'':36}{'ms':>9}{'tokens/s':>12}  of the speed of ours{'GiB':>7}{'loss':>9}")
    for r in found:
        print(f"{r['version']:36}{r['ms']:9.2f}{r['tok_s']:12,.0f}  {r['ratio']:.3f} ({r['ratio_p10']:.3f} to {r['ratio_p90']:.3f}){r['peak_gib'] or 0:7.1f}"
              f"{r['first_loss']:9.4f}", flush=True)
    for k, why in failed.items(): print(f"{k} failed: {why[:1000]}", flush=True)
    return found

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    for name, default in dict(gpus=2, rounds=5, reps=4).items(): p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--models", default="124m,1b"); p.add_argument("--rungs", default=",".join(RUNGS))
    for name in ("async_tp", "tiny"): p.add_argument(f"--{name}", action="store_true")
    c = p.parse_args()
    if not (c.tiny or on_gpus(c.gpus)): p.error(f"there are no {c.gpus} GPUs here: --tiny runs on a CPU")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1") # async TP copies from GPU to GPU, and needs none
    for kind in ("plain", "bf16", *["async"]*c.async_tp):
        for name in ("tiny",) if c.tiny else c.models.split(","):
            try: measure(c.out, workload(name), BATCH.get(name, 4), c.gpus, c.rungs.split(","), kind, c.rounds, c.reps)
            except RunError as e: print(f"{name}, {kind}: {e}", flush=True) # the other groups can still be measured

if __name__ == "__main__": main()
