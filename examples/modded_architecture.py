"""Five additions that no Qwen3 has, each a switch of the recipe `beyond`. A plug-in:

    speedrun_train --plugin examples/modded_architecture.py --recipe beyond:x0=yes:softcap=15

Lesson 59 (`nbs/5_fewer_steps/59_beyond.ipynb`) explains and measures it."""
from dataclasses import dataclass, replace
from functools import partial
import torch, torch.nn as nn, torch.nn.functional as F
from llm_speedrun.architectures import recipe_model
from llm_speedrun.io_utils import InputError, lookup
from llm_speedrun.model import Linear, cross_entropy, set_parts
from llm_speedrun.recipes.architecture import UntiedGPT, init
from llm_speedrun.recipes.normuon import normuon
from llm_speedrun.recipes.recipe import RECIPES, Recipe

SWITCHES = dict(softcap="bends the logits", x0="mixes the embedding into the input of each block",
                values="adds values made from the embedding", gate="weakens heads of the attention",
                skips="adds the outputs of early blocks to the inputs of late ones")

# --- soft-capped logits ---

def apply_softcap(logits, cap): # a tensor; what they can't exceed
    "Return cap * tanh(logits / cap)"
    return cap * torch.tanh(logits / cap)

def softcap_cross_entropy(h, w, y, cap): # B T d, V d, B T; what logits can't exceed
    "Return `model.cross_entropy` of soft-capped logits"
    logits = F.linear(h, w).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(apply_softcap(wide, cap), y.flatten())

def with_cap(loss, # a model's part: (h, w, y) -> mean loss
             cap): # what logits can't exceed
    "Return the loss with soft-capped logits; one that was compiled with a cap stays as it is"
    if loss is cross_entropy: return partial(softcap_cross_entropy, cap=cap)
    return replace(loss, softcap=cap) if getattr(loss, "takes_softcap", False) else loss

# --- what stands between the parts of a block ---

class Scales(nn.Module):
    "Learned scale factors"
    role = "vector" # of its weight
    def __init__(self, *start): # with which they begin
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))
    def like(self, x): return self.weight.to(x.dtype).unbind() # one by one, in the type of `x`

class Mix(Scales):
    "A mix of the residual stream and the embedding; at the beginning the residual stream alone"
    def __init__(self): super().__init__(1., 0.)
    def forward(self, h, x0): # B T d each
        a, b = self.like(h)
        return a*h + b*x0.to(h.dtype)

class Values(nn.Module):
    "Values of a layer made straight from the embedding, by a matrix and a number of their own"
    def __init__(self, c): # a `GPTConfig`
        super().__init__()
        self.proj, self.scale, self.head_dim = Linear(c.width, c.kv_heads*c.head_dim), Scales(.5), c.head_dim
    def forward(self, v, x0): # B K T D, B T d
        "`v` with them added"
        more = self.proj(x0).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).to(v.dtype)
        return v + self.scale.like(v)[0]*more

class Gate(nn.Module):
    "A factor from 0 to 2 for each head and token, from `seen` values of the residual stream; 1 at first"
    role = "vector" # of its weight: too small for what is done to matrices, and kept as a vector
    def __init__(self, c, seen=12): # a `GPTConfig`; values of the residual stream
        super().__init__()
        self.seen = min(seen, c.width)
        self.weight = nn.Parameter(torch.zeros(c.heads*self.seen))
    def forward(self, h, o): # B T d, B H T D
        "The attention's output `o`, weighted"
        x = F.rms_norm(h[..., :self.seen], (self.seen,)).to(h.dtype)
        logits = F.linear(x, self.weight.to(h.dtype).view(-1, self.seen)) # B T H
        return o * (2*logits.sigmoid()).mT[..., None].to(o.dtype)

def whole(h): # the residual stream B T d, or a pair of it and what is to be added
    "Return the residual stream as one tensor"
    return torch.add(*h) if isinstance(h, tuple) else h

def beyond_layer(block, h, cos, # as for `model.naive_layer`
                 more): # its `sin`, the embedding, and its norm where a switch needs it: B T d each
    "Run the four parts of a block, with the switches between them"
    sin, x0, normed = more
    if block.x0 is not None: h = block.x0(whole(h), x0)
    h, q, k, v = block.heads(block, h, cos, sin)
    if block.values is not None: v = block.values(v, normed)
    o = block.attend(q, k, v)
    if block.gate is not None: o = block.gate(h, o)
    return block.feed(block, block.project(block, h, o))

# --- the model ---

MARKS = dict(softcap="cap", x0="layers.0.x0.weight", values="layers.0.values.proj.weight",
             gate="layers.0.gate.weight", skips="cross.weight") # a weight that only this switch has

def switches_of(weights): # name -> weight, under our names
    "Return the switches of the model that has these weights, as `beyond` takes them"
    on = {k: True for k, name in MARKS.items() if name in weights}
    cap = weights.get("cap") # a shape, where only shapes are known
    return on | dict(softcap=cap.item() if torch.is_tensor(cap) else 1.) if "softcap" in on else on

@recipe_model("beyond")
class BeyondGPT(UntiedGPT):
    "An `UntiedGPT` with some of the `SWITCHES`. `beyond` makes its subclasses"
    switches = {} # name -> True; softcap: what logits can't exceed

    def __init__(self, config, seed=0): # as for `UntiedGPT`
        super().__init__(config, seed)
        has, c = self.switches, config
        self.cross = Scales(*[1.]*(c.layers//2)) if "skips" in has and c.layers > 1 else None
        if "softcap" in has: self.register_buffer("cap", torch.tensor(has["softcap"])) # to be saved
        for b in self.layers:
            b.x0, b.gate = Mix() if "x0" in has else None, Gate(c) if "gate" in has else None
            b.values = Values(c) if "values" in has else None
        set_parts(self, layer=beyond_layer)
        self.init_values(seed)

    def __setattr__(self, name, value): # which a rung may call with another loss
        cap = self.switches.get("softcap")
        super().__setattr__(name, with_cap(value, cap) if name == "loss" and cap else value)

    @torch.no_grad()
    def init_values(self, seed): # of a generator of our own
        "Draw weights that `GPT.init_weights` doesn't know from a normal of deviation 0.02"
        g = torch.Generator(self.embed_tokens.weight.device).manual_seed(seed)
        for b in self.layers:
            if b.values is not None: b.values.proj.weight.normal_(std=.02, generator=g)

    def forward(self, x, y=None): # B T tokens, B T tokens that follow
        "Return the logits, B T V; with targets `y` their mean loss, a scalar"
        out, cap = super().forward(x, y), self.switches.get("softcap")
        return apply_softcap(out, cap) if cap and y is None else out

    def hidden(self, x): # B T tokens
        "Return the last hidden state, B T d. Raises `InputError` for a sequence longer than the model's"
        T, L, early = x.shape[1], self.config.layers, []
        if T > self.config.seq_len:
            raise InputError(f"a sequence of {T} tokens is longer than the model's {self.config.seq_len}: "
                             f"shorten it, or build a model of seq_len={T}")
        h = x0 = self.embed_tokens(x)
        normed = F.rms_norm(x0, x0.shape[-1:], eps=self.config.eps) if "values" in self.switches else None
        for i, layer in enumerate(self.layers):
            if self.cross and i >= L - L//2: h = whole(h) + self.cross.like(early[-1])[L - 1 - i]*early.pop()
            h = layer(h, self.cos[:T], (self.sin[:T], x0, normed))
            if self.cross and i < L//2: early.append(h := whole(h))
        return self.last_norm(self, h)

    @classmethod
    def of_weights(cls, weights): # name -> weight or shape, under our names
        "Return the class with the switches of these weights, None for those of another model"
        return beyond(**on) if (on := switches_of(weights)) else None

    @classmethod
    def recipe(cls):
        "Return the recipe that trains this class, as text; what the softcap is doesn't matter to it"
        return ":".join(["beyond", *(f"{k}=15" if k == "softcap" else f"{k}=yes" for k in cls.switches)])

def beyond(**switches): # of `SWITCHES`: True or False; softcap a number, 0 for none
    "Return the class of models with these switches. Raises `InputError` for an unknown one"
    for k in switches: lookup(SWITCHES, k, "switch")
    on = {k: float(v) if k == "softcap" else True for k, v in switches.items() if v}
    return type("BeyondGPT", (BeyondGPT,), dict(switches=on)) if on else UntiedGPT

# --- the recipe ---

def apply_beyond(run, **switches): # a `Run` of such a model
    "Use NorMuon, from blocks that add nothing and an embedding of size 1 with a matching rate"
    init(run, embed=1., matrix=.577)
    return normuon.apply(run, **normuon.options | dict(embed=.3))

@dataclass(frozen=True)
class BeyondRecipe(Recipe):
    "A recipe whose options are the switches of its model"
    def __post_init__(self): object.__setattr__(self, "model", beyond(**self.options)) # the class is frozen

OFF = dict(softcap=0., x0=False, values=False, gate=False, skips=False)
RECIPES["beyond"] = BeyondRecipe("beyond", apply_beyond, OFF, defaults=normuon.defaults,
                                 excludes=normuon.excludes)
