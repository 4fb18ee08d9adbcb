"""Run `speedrun_explain` on models of several kinds, and record predictions next to measurements.
    tests/bench_explain.py OUT.json [NAME ...]      all of `MODELS` by default
Writes OUT.json after each; a model that is already there is skipped. Configs need transformers."""
import json, sys, tempfile
from collections import Counter
from pathlib import Path
import msgspec
from llm_speedrun.cli import ExplainOptions
from llm_speedrun.measure import machine
from llm_speedrun.profiling import profile_rows
from llm_speedrun.tools import explain

GPT2 = dict(model_type="gpt2", n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024)
LLAMA = dict(model_type="llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256,
             tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
ALIGNED = dict(vocab_size=50304) # whose rows in bf16 begin at multiples of 16 bytes
ENCODER = """import torch, torch.nn as nn
def build(batch_size=32, seq_len=512):
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    return nn.TransformerEncoder(layer, 12), torch.randn(batch_size, seq_len, 768)
"""
IMAGES = """import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module): # convolutions, and attention over what they make of an image
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 128, 3, 2, 1), nn.GELU())
        self.wide, self.qkv, self.head = nn.Linear(128, 512), nn.Linear(512, 1536), nn.Linear(512, 10)
    def forward(self, x):
        t = self.wide(self.conv(x).flatten(2).transpose(1, 2))
        q, k, v = self.qkv(t).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean((1, 2)).repeat(1, 8))
def build(): return Net(), torch.randn(64, 3, 64, 64)
"""
FAST = dict(using="tf32,bf16")
MODELS = {"GPT-2": (GPT2, FAST), "GPT-2, 50304 tokens": (GPT2 | ALIGNED, FAST),
          "GPT-2, 50304 tokens, no dropout": (GPT2 | ALIGNED | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.), FAST),
          "Llama 1.2B": (LLAMA, FAST | dict(batch_size=4)), "nn.TransformerEncoder": (ENCODER, FAST), "images": (IMAGES, {}),
          "images, tf32 and bf16": (IMAGES, FAST)}

def explained(what, options, steps=3):
    "Return the `Explanation` of a config or of a file's text as a dict, with the kernels of its profile: kind, name, calls, ms of a step"
    ms, calls = Counter(), Counter()
    def profile_kinds(step):
        for name, kind, t in profile_rows(step, steps): ms[kind, name] += t/steps; calls[kind, name] += 1/steps
        return {kind: sum(t for (k, _), t in ms.items() if k == kind) for kind, _ in ms}
    plain, explain.profile_kinds = explain.profile_kinds, profile_kinds
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)/("model.py" if isinstance(what, str) else "config.json")
            path.write_text(what if isinstance(what, str) else json.dumps(what), encoding="utf-8")
            e = msgspec.to_builtins(explain.explain_model(ExplainOptions(str(path), **options)))
    finally: explain.profile_kinds = plain
    return e | dict(kernels=[dict(kind=k, name=n[:200], calls=calls[k, n], ms=t) for (k, n), t in ms.most_common(60)])

def main(out, *names):
    out = Path(out)
    records = json.loads(out.read_text()) if out.exists() else []
    for name in names or MODELS:
        if name in {r["name"] for r in records}: continue
        e = explained(*MODELS[name])
        records.append(dict(name=name, **e, **{k: v for k, v in machine().items() if k not in e}))
        out.write_text(json.dumps(records, indent=1))
        print(f"{name}: predicted {e['predicted_ms']:.1f} ms, measured {e['measured_ms'] or 0:.1f}", flush=True)
        for k in e["kinds"]: print(f"    {k['kind']:26}{k['predicted_ms']:9.3f}{k['measured_ms'] or 0:9.3f}  {k['bound']}", flush=True)

if __name__ == "__main__": main(*sys.argv[1:])
