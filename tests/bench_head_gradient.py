"""How wrong the gradient of the output projection is in 8 bits, and whether the errors of several batches add up.
    tests/bench_head_gradient.py OUT [options of speedrun_train]
Trains a model, takes batches of text that it has not seen, and compares each way to compute the gradient with float64: its relative error in one batch,
that of the mean over the batches, and the mean cosine of two batches' errors, which is 0 where they have nothing in common. The errors are also told
against the exact gradient at the 8-bit weights and hidden states: these are other weights than the model's, the same ones in all batches. Writes
OUT/head_gradient.json."""
import json, math, sys
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
import torch
import torch.nn.functional as F
from llm_speedrun.data.corpus import open_corpus
from llm_speedrun.data.batches import Batches
from llm_speedrun.pretrained import from_pretrained
from llm_speedrun.measure import machine
from llm_speedrun.rungs.chunked_ce import ChunkedCE
from llm_speedrun.rungs.fp8 import E4M3, E5M2, LARGEST
from llm_speedrun.rungs.fp8_kernels import LayerScales, Scaling, matmul
from llm_speedrun.rungs.fp8_epilogues import SummedCE
from llm_speedrun.rungs.fp8_loss import HALF_MOST, Fp8CE, loss_lse, random_bits_maths, round_stochastically_maths
from llm_speedrun.rungs.grouped_ce import GroupedCE
from bench_start import command

ROWS = 2048 # tokens at a time in float64

def gradient_of(loss, h, w, y):
    "By a loss of the package, in mixed precision as training runs it"
    h, w = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    with torch.autocast(h.device.type, torch.bfloat16): loss(h[None], w, y[None]).backward()
    return w.grad.double()

def in_8_bits(ce):
    "A loss with scales of its own, found just in time"
    def loss(h, w, y):
        scaling = Scaling(1, E5M2, h.device)
        with scaling.in_step(), scaling.in_pass(): return replace(ce, scales=LayerScales(scaling, 0, E5M2))(h, w, y)
    return loss

def in_pieces(h, w, y, g_of=lambda g, lse, y: g, h_of=lambda h: h):
    "The gradient from softmax - one-hot in float64, rounded by `g_of`, and hidden states by `h_of`"
    dw, kept = torch.zeros_like(w, dtype=torch.float64), h_of(h.double())
    for i in range(0, len(y), ROWS):
        x, t = h[i:i + ROWS].double() @ w.double().T, y[i:i + ROWS]
        lse = x.logsumexp(1)
        g = (x - lse[:, None]).exp_()
        g[torch.arange(len(t)), t] -= 1
        dw += g_of(g, lse.float(), t).T @ kept[i:i + ROWS]
    return dw/len(y)

def at_8_bits(way):
    "The same at weights and hidden states in E4M3"
    return lambda h, w, y: way(e4m3(h.double()), e4m3(w.double()), y)

def e4m3(h):
    scale = LARGEST[E4M3]/h.abs().max()
    return (h*scale).float().to(E4M3).double()/scale

def nearest(g, lse, y): return (g*HALF_MOST).float().to(E5M2).double()/HALF_MOST
def at_random(g, lse, y): return round_stochastically_maths((g*HALF_MOST).float(), random_bits_maths(lse, y, g.shape[1])).to(E5M2).double()/HALF_MOST
def bf16(g, lse, y): return g.bfloat16().double()

class QuickCE(GroupedCE):
    "A `GroupedCE` whose logits are accumulated in the tensor cores, in fewer bits"
    def losses8(self, s, h8, w8, y, dtype):
        logits = matmul(s, h8, w8, "hidden", "head", out=dtype, fast=True)[:len(y)]
        return logits, *loss_lse(logits, y, self.ignore_index, self.z_loss, self.softcap)

WAYS = {
    "bf16": lambda *o: gradient_of(ChunkedCE(), *o),
    "fp8": lambda *o: gradient_of(in_8_bits(Fp8CE()), *o),
    "fp8, head_groups": lambda *o: gradient_of(in_8_bits(GroupedCE()), *o),
    "fp8, head_groups, tensor-core accumulation": lambda *o: gradient_of(in_8_bits(QuickCE()), *o),
    "fp8, head_groups, fp8_epilogues": lambda *o: gradient_of(in_8_bits(SummedCE()), *o),
    "emulated: nearest": lambda *o: in_pieces(*o, nearest, e4m3),
    "emulated: at random": lambda *o: in_pieces(*o, at_random, e4m3),
    "emulated: bf16, hidden E4M3": lambda *o: in_pieces(*o, bf16, e4m3),
    "emulated: at random, 8-bit weights": at_8_bits(partial(in_pieces, g_of=at_random)),
    "exact at 8-bit weights": at_8_bits(in_pieces)}

def batches_of(model, corpus, tokens, n):
    "n batches of hidden states and targets from the validation text"
    T = model.config.seq_len
    for x, y in islice(Batches(corpus.val, tokens//T, T), n):
        with torch.no_grad(), torch.autocast(model.cos.device.type, torch.bfloat16):
            h = model.hidden(x.to(model.cos.device))
        yield h.flatten(0, 1).bfloat16(), y.flatten().to(h.device)

def summary(e, exact):
    "Relative error in one batch, of the mean of all, and the cosines of pairs"
    cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0).item() for a, b in combinations(e, 2)]
    one = [(a.norm()/x.norm()).item() for a, x in zip(e, exact)]
    mean = (torch.stack(e).mean(0).norm()/torch.stack(exact).mean(0).norm()).item()
    return dict(one=math.fsum(one)/len(one), mean=mean, cosine=math.fsum(cosines)/len(cosines), cosines=cosines)

def errors(model, batches):
    "For each way what `summary` says, against both references"
    w, batches, found = model.embed_tokens.weight.detach(), [*batches], {}
    exact = {k: [way(h, w, y) for h, y in batches] for k, way in (("the model's weights", in_pieces), ("8-bit weights", at_8_bits(in_pieces)))}
    for name, way in WAYS.items():
        got = [way(h, w, y) for h, y in batches]
        found[name] = {k: summary([g - x for g, x in zip(got, xs)], xs) for k, xs in exact.items()}
        print(f"{name}:", "; ".join(f"at {k} {f['one']:.4f} of a batch's, {f['mean']:.4f} of the mean, cosine {f['cosine']:.4f}" for k, f in found[name].items()), flush=True)
    return found

def main(out, *words, tokens=2**14, n=4):
    command("speedrun_train", [*words, "--name", "head", "--out", out, "--sample_tokens", 0, "--overwrite"])
    folder = Path(out)/"head"
    run, options = from_pretrained(folder), json.loads((folder/"config.json").read_text())
    torch.backends.cuda.matmul.allow_tf32 = False
    corpus = open_corpus(words[words.index("--data") + 1])
    found = errors(run.model, batches_of(run.model, corpus, tokens, n))
    record = dict(errors=found, tokens=tokens, batches=n, steps=options["steps"], model=options["model"], rungs=options["rungs"], **machine())
    (Path(out)/"head_gradient.json").write_text(json.dumps(record, indent=1))

if __name__ == "__main__": main(*sys.argv[1:])
