"""The plug-in `examples/modded_architecture.py`: each switch computes what it says, under every rung, and such a model comes back from its folder and
is not exported."""
import json
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from llm_speedrun.tools.export import export_folder, write_folder
from llm_speedrun.pretrained import from_pretrained
from llm_speedrun.generate import is_causal
from llm_speedrun.model_config import GPTConfig
from llm_speedrun.recipes.architecture import UntiedGPT, init
from llm_speedrun.plugins import LOADED, forget_plugin
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.rungs.flash import sdpa
from llm_speedrun.runs import Run
from llm_speedrun.train.trainer import train
from helpers.examples import example, imported, path_of
from helpers.tiny_runs import NANO, fails, nano, options
import test_resume as test_resume_module
from test_recipes import test_recipes_are_recorded as check_recorded
from test_rung_contract import test_every_recipe_can_be_asked as check_asked
from test_sample import lively, padding_shows
from test_architecture import FP8, built, loss_and_grads, run_folder, tokens

NAME = "modded_architecture"
modded = example(NAME)
MARKS, SWITCHES, beyond = modded.MARKS, modded.SWITCHES, modded.beyond

@pytest.fixture(autouse=True)
def plugin():
    with imported(NAME) as module: yield module

ALL = dict(softcap=2., x0=True, values=True, gate=True, skips=True)
EACH = [{k: v} for k, v in ALL.items()] + [ALL]
DEEP = replace(NANO, layers=5)
named = lambda s: s if isinstance(s, str) else "+".join(s)

def stirred(switches, config=DEEP, seed=0):
    "A model whose numbers are all random"
    model = beyond(**switches)(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters(): p.copy_(torch.randn(p.shape, generator=g) * (.3 if p.ndim > 1 else .5) + (p.ndim < 2))
    return model

def by_hand(model, x):
    "The logits, written down once more and straight"
    m, c, on = model, model.config, model.switches
    x0 = h = m.embed_tokens(x)
    cos, sin, outs = m.cos[:x.shape[1]], m.sin[:x.shape[1]], []
    for i, b in enumerate(m.layers):
        if "skips" in on and i > c.layers - 1 - c.layers//2: h = h + m.cross.weight[c.layers - 1 - i] * outs[c.layers - 1 - i]
        if "x0" in on: h = b.x0.weight[0]*h + b.x0.weight[1]*x0
        h, q, k, v = b.heads(b, h, cos, sin)
        if "values" in on:
            e = x0 / (x0.pow(2).mean(-1, keepdim=True) + c.eps).sqrt() @ b.values.proj.weight.T * b.values.scale.weight
            v = v + torch.stack(e.chunk(c.kv_heads, -1), 1)
        o = sdpa(q, k, v)
        if "gate" in on:
            y = h[..., :12] / h[..., :12].pow(2).mean(-1, keepdim=True).sqrt()
            o = o * 2/(1 + (-(y @ b.gate.weight.view(c.heads, 12).T)).exp()).transpose(1, 2).unsqueeze(-1)
        h = b.feed(b, b.project(b, h, o))
        outs.append(h)
    z = m.norm(h) @ m.lm_head.weight.T
    return on["softcap"]*torch.tanh(z/on["softcap"]) if "softcap" in on else z

@pytest.mark.parametrize("switches", EACH, ids=named)
def test_what_it_says(switches, nano):
    "Logits and loss are those of the formulas, each switch matters, and each of its weights"
    model, (x, y) = stirred(switches), tokens(DEEP)
    z = by_hand(model, x)
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    assert (model(x) - z).abs().max() < 1e-4 and abs(model(x, y) - loss) < 1e-5
    without = UntiedGPT(DEEP)
    without.load_state_dict(model.state_dict(), strict=False)
    assert (without(x) - z).abs().max() > .01
    a = torch.autograd.grad(model(x, y), [*model.parameters()])
    b = torch.autograd.grad(loss, [*model.parameters()])
    for n, g, h in zip(dict(model.named_parameters()), a, b): assert h.norm() > 0 and (g - h).norm() < 1e-4*h.norm(), n

@pytest.mark.parametrize("switches", EACH, ids=named)
def test_gradients(switches, nano):
    "In float64 the gradient of what a switch brings is the slope of the loss"
    c = GPTConfig(vocab=32, layers=4, width=16, heads=2, kv_heads=1, hidden=16, seq_len=8)
    model, plain = stirred(switches, c).double(), {n for n, _ in UntiedGPT(c).named_parameters()}
    x, y = tokens(c, 1)
    own = {n: p for n, p in model.named_parameters() if n not in plain} | {"embed_tokens.weight": model.embed_tokens.weight}
    def loss(*ps): return torch.func.functional_call(model, dict(zip(own, ps)), (x, y))
    assert torch.autograd.gradcheck(loss, [*own.values()], eps=1e-6, atol=1e-6, fast_mode=True)

def test_beginning(nano):
    "At the start the mix and the gate change nothing; skips of nothing and values of nothing neither; the body is the seed's"
    (x, y), plain = tokens(DEEP), UntiedGPT(DEEP, 4)
    model = beyond(x0=True, gate=True, skips=True, values=True)(DEEP, 4)
    for n, p in plain.named_parameters(): assert torch.equal(p, model.get_parameter(n)), n
    with torch.no_grad(): model.cross.weight.zero_(); [b.values.scale.weight.zero_() for b in model.layers]
    assert torch.equal(plain(x), model(x))
    assert beyond() is UntiedGPT and torch.equal(beyond(x0=False, softcap=0)(DEEP, 4)(x), plain(x))
    with fails(ValueError, "unknown switch 'gates'", "gate"): beyond(gates=True)

def test_roles(nano):
    "What a switch brings has roles for the optimizer, and initial weights by them"
    model = beyond(**ALL)(NANO)
    roles = model.roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    new = {n: r for n, r in roles.items() if n not in UntiedGPT(NANO).roles()}
    assert {r for n, r in new.items() if n.endswith("proj.weight")} == {"matrix"}
    assert {r for n, r in new.items() if not n.endswith("proj.weight")} == {"vector"}
    init(Run(model), matrix=2.)
    for n, r in new.items():
        p = model.get_parameter(n)
        if r == "matrix": assert abs(p.std() / (2*32**-.5) - 1) < .1
        else: assert torch.equal(p, beyond(**ALL)(NANO).get_parameter(n)), n

RUNGS = [["chunked_ce"], ["bf16", "fused_ops"], FP8, ["bf16", "fused_ops", "chunked_ce", "fp8_activations", "checkpoint"], ["bf16", "flash", "compile:whole=yes"],
         ["bf16", "flash", "bf16_stream", "bf16_weights"], ["bf16", "torchao_fp8"], ["bf16", "fused_ops", "chunked_ce", "selective_checkpoint", "compile"]]

@pytest.mark.parametrize("rungs", RUNGS, ids=lambda r: ",".join(r).replace(":", "-"))
def test_under_rungs(rungs, nano):
    "All switches at once under every rung: the plain model's loss and gradients, as near as the numbers' format lets"
    (a, g), (b, h) = (loss_and_grads(built(stirred(ALL, NANO), r)) for r in ([], rungs))
    rel = lambda a, b: ((a - b).norm() / a.norm().clamp(min=.05)).item() # sums of scalars nearly cancel
    most = 1e-4 if "bf16" not in rungs else .5 if "fp8" in str(rungs) else .15
    assert rel(a, b.float()) < most/20
    of = lambda d, part: torch.cat([d[n].float().flatten() for n in d if part in n])
    for part in ("x0", "values", "gate", "cross", "proj", "embed", "head"): assert rel(of(g, part), of(h, part)) < most, part

@pytest.mark.parametrize("switches", EACH, ids=named)
def test_folder(tmp_path, switches, nano):
    "A run's folder brings the model back with its switches; the export says why not, and leaves nothing"
    model, (x, _) = stirred(switches), tokens(DEEP)
    run = run_folder(tmp_path/"run", model)
    back = from_pretrained(run, "cpu").model
    assert back.switches == model.switches and torch.equal(back(x), model(x))
    first = min(MARKS[k] for k in switches)
    with fails(ValueError, "can't be written", f"no Qwen3 has {first}", "speedrun_sample"): export_folder(run, tmp_path/"hf")
    with fails(ValueError, "can't be written"): write_folder(tmp_path/"hf", DEEP, model.state_dict())
    assert not (tmp_path/"hf").exists()

@pytest.mark.parametrize("recipe, rungs", [("beyond", "bf16,flash,fused_ops,chunked_ce,fp8"), ("beyond:softcap=15:x0=yes:values=yes:gate=yes:skips=yes", "naive")],
                         ids=["untied", "all"])
def test_resume(tmp_path, monkeypatch, recipe, rungs):
    "Stopped and resumed, with a head of its own and with all switches: the same bits"
    test_resume_module.test_the_same_bits(tmp_path, monkeypatch, rungs, recipe=recipe, plugin=path_of(NAME))

def test_other_recipe(tmp_path, nano):
    "Weights with switches need a recipe that has them; weights with a head of its own bring their model to any"
    train(options(tmp_path, recipe="beyond:x0=yes", plugin=path_of(NAME)), progress=False)
    how = dict(init=str(tmp_path/"runs/run"), model="", name="on", steps=2)
    with fails(ValueError, "use --recipe beyond:x0=yes"): train(options(tmp_path, **how), progress=False)
    with fails(ValueError, "'beyond:gate=yes' trains a BeyondGPT", "use --recipe beyond:x0=yes"):
        train(options(tmp_path, recipe="beyond:gate=yes", **how), progress=False)
    train(options(tmp_path, recipe="beyond:x0=yes", **how), progress=False)
    c = json.loads((tmp_path/"runs/on/config.json").read_text(encoding="utf-8"))
    assert (c["architecture"], [*c["plugins"]]) == ("beyond", [path_of(NAME)]), "it needs the file to be opened, too"
    train(options(tmp_path, recipe="beyond", name="plain"), progress=False)
    trainer, _ = train(options(tmp_path, recipe="normuon", **how | dict(init=str(tmp_path/"runs/plain"), name="more")), progress=False)
    assert type(trainer.run.model) is UntiedGPT

def test_a_run_is_opened_with_its_file(tmp_path, nano):
    "Where the file isn't imported yet, and never by another program"
    trainer, _ = train(options(tmp_path, recipe="beyond:x0=yes", plugin=path_of(NAME)), progress=False)
    forget_plugin(path_of(NAME))
    back = from_pretrained(tmp_path/"runs/run", "cpu").model
    assert back.switches == dict(x0=True) and path_of(NAME) in LOADED
    assert torch.equal(back.lm_head.weight, trainer.run.model.lm_head.weight.cpu())
    with fails(ValueError, "its model 'beyond' is a class of a plug-in"): export_folder(tmp_path/"runs/run")

@pytest.mark.parametrize("name", ["beyond", "beyond:x0=yes:softcap=15"])
def test_the_recipe_can_be_asked(name): check_asked(name)

def test_padding_is_not_seen():
    "A plug-in's model isn't padded, since it may see what follows; this one could be"
    r = parse_recipe("beyond:x0=yes:softcap=15")
    run = lively(r.shape(replace(NANO, kv_heads=2)), r.model)
    assert not is_causal(run) and padding_shows(Run(run.model.double())) < 1e-9

@pytest.mark.cuda
def test_the_recipe_is_recorded(): check_recorded("beyond")

def test_options():
    assert parse_recipe("beyond:x0=yes:softcap=15").model.recipe() == "beyond:softcap=15:x0=yes"
    with fails(ValueError, "softcap must be a number from 0"): parse_recipe("beyond:softcap=-1")
