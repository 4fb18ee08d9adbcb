"""The contract of a rung: it has an effect or is left out, it computes the same function or says that it doesn't, and it returns a run. Each case is
shown as a user sees it: by the command, with one process; two processes train in `test_two_processes_say_it_once`."""
import json, os, shutil
import pytest, torch
from llm_speedrun import plugins
from llm_speedrun.cli import speedrun_eval, speedrun_export, speedrun_sample, speedrun_train
from llm_speedrun.pretrained import from_pretrained, import_folder
from llm_speedrun.kv_cache import Generator
from llm_speedrun.io_utils import InputError, python_command
from llm_speedrun.recipes import recipe
from llm_speedrun.recipes.recipe import RECIPES
from llm_speedrun.recipes.recipe_spec import find_recipe, parse_recipe
from llm_speedrun.recipes.unused_rungs import unused_rungs
from llm_speedrun.runs import build
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.resolve import plan_lines
from llm_speedrun.train.trainer import Trainer, train
from helpers import quick_programs
from helpers.timeouts import TIMEOUT
from helpers.tiny_runs import NANO, cache, fails, nano, options, texts
from test_plugins import forget

MINE = '''"Rungs of our own"
from dataclasses import replace
import torch, torch.nn.functional as F
from llm_speedrun.model import set_parts
from llm_speedrun.runs import rung

@rung("optimizer", excludes=["fused_adamw", "adamw8bit"])
def nadam(run):
    "NAdam in place of AdamW"
    return replace(run, optimizer=lambda model, lr=1e-3, weight_decay=.1: torch.optim.NAdam(model.parameters(), lr=lr, weight_decay=weight_decay))

def relu_feed(block, h):
    x, m = block.post_attention_layernorm(h), block.mlp
    return h + m.down_proj(F.relu(m.gate_proj(x)) * m.up_proj(x))

@rung("parts"SAME)
def relu(run):
    "ReLU in place of SiLU"
    return run.with_model(lambda model: set_parts(model, feed=relu_feed))

@rung("parts")
def forgets(run):
    "A rung that returns nothing"
    run.with_model(lambda model: None)
'''
DECLARED, UNDECLARED = MINE.replace("SAME", ", same_function=False"), MINE.replace("SAME", "")
WORDS = ("--plugin mine.py --data texts --model nano --steps 4 --micro_batch_size 4 --step_tokens 256 --num_evals 1 --eval_tokens 256 --sample_tokens 4 "
         "--save_minutes 0 --lr .02")

@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    "The tests stand in a folder with a plug-in and some text; the plug-in is forgotten at the end, as where the process ends"
    monkeypatch.chdir(tmp_path)
    texts(tmp_path/"texts")
    (tmp_path/"mine.py").write_text(DECLARED, encoding="utf-8")
    yield
    forget()

def mine(code=DECLARED):
    "Write and import the plug-in"
    with open("mine.py", "w", encoding="utf-8") as f: f.write(code)
    plugins.import_plugins("mine.py", log_info=lambda text: None)

def trained(capsys, *more):
    "What a run prints"
    capsys.readouterr()
    speedrun_train([*WORDS.split(), *more])
    return capsys.readouterr().out

def refused(capsys, f, *args):
    "What a command says that ends with an error"
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"): f([*map(str, args)])
    return capsys.readouterr().err

def config_of(run): return json.loads(open(f"{run}/config.json", encoding="utf-8").read())
def weights(run): return torch.cat([t.flatten() for t in import_folder(run)[1].values()])

# --- a rung without effect ---

def test_a_recipe_says_which_rungs_it_does_not_use():
    mine()
    unused = lambda name, *rungs: unused_rungs(find_recipe(name), NANO, rungs)
    assert unused("speedrun", "flash", "fused_adamw") == {"fused_adamw": "the recipe speedrun has an optimizer of its own"}
    assert [*unused("muon", "nadam", "direct_update")] == ["nadam"], "of direct_update the backward pass is used"
    assert unused("adamw", "flash", "nadam", "direct_update") == {}
    assert unused("adamw", "fused_adamw", "direct_update") == {"fused_adamw": "the rung direct_update has an optimizer of its own"}
    assert unused("speedrun", "flash") == {}

@pytest.mark.parametrize("name", ["adamw", "tuned_adamw", "muon", "normuon", "speedrun", "without_muon"])
def test_every_recipe_can_be_asked(name):
    r = parse_recipe(name)
    assert bool(unused_rungs(r, r.shape(NANO), ["fused_adamw"])) == (name != "adamw")

def test_a_recipe_may_build_on_the_optimizer_of_a_rung():
    @recipe.recipe(lr=.1)
    def wrapped(run):
        from dataclasses import replace
        return replace(run, optimizer=lambda model, **how: run.optimizer(model, **how))
    try: assert unused_rungs(wrapped, NANO, ["fused_adamw"]) == {}
    finally: del RECIPES["wrapped"]

def test_direct_update_keeps_an_optimizer_that_is_not_adamw():
    mine()
    run = build(NANO, ["nadam", "direct_update"], "cpu")
    assert isinstance(run.optimizer(run.model), torch.optim.NAdam)

def test_a_named_optimizer_rung_is_used(capsys):
    "Without --recipe the recipe gives way, and says why"
    said = trained(capsys, "--rungs", "nadam", "--name", "a")
    assert "the recipe is adamw and not the default: the recipe normuon has an optimizer of its own, which would replace that of the rung nadam" in said or \
        "--lr without --recipe" in said
    assert config_of("runs/a")["recipe"] == "adamw" and config_of("runs/a")["rungs"] == "nadam"

def test_a_named_optimizer_rung_is_used_without_a_rate(tmp_path):
    mine()
    said = []
    t = Trainer(options(tmp_path, rungs="nadam"), progress=False)
    assert t.cfg.recipe == "adamw" and isinstance(t.step.opt, torch.optim.NAdam)

def test_both_named_is_refused(capsys):
    said = refused(capsys, speedrun_train, *WORDS.split(), "--rungs", "nadam", "--recipe", "muon")
    assert "error: the rung 'nadam' would have no effect: the recipe muon has an optimizer of its own. Leave out one of the two; --recipe adamw" in said
    assert not os.path.exists("runs")

def test_a_preset_leaves_it_out_with_a_reason(tmp_path):
    t = Trainer(options(tmp_path, rungs="auto", recipe="normuon"), progress=False)
    why = "the recipe normuon has an optimizer of its own"
    assert "fused_adamw" not in t.cfg.rungs and "fused_adamw" not in t.run.rungs
    if not torch.cuda.is_available(): assert f"  not fused_adamw: {why}" in [*plan_lines(t.plan)]
    t = Trainer(options(tmp_path, rungs="auto", recipe="adamw", name="b"), progress=False)
    assert torch.cuda.is_available() or "fused_adamw" in t.cfg.rungs.split(",")

def test_an_older_run_that_lists_one_goes_on(tmp_path, capsys):
    train(options(tmp_path, rungs="flash", recipe="normuon"), progress=False)
    path = tmp_path/"runs/run/config.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    old.pop("changes_function", None)
    path.write_text(json.dumps(old | dict(rungs=old["rungs"] + ",fused_adamw")), encoding="utf-8")
    trainer, res = train(TrainConfig(resume=str(path.parent), steps=8), progress=True)
    assert res["steps"] == 8 and "fused_adamw" not in trainer.cfg.rungs
    assert "not fused_adamw: the recipe normuon has an optimizer of its own" in capsys.readouterr().out
    with fails(InputError, "the rung 'fused_adamw' would have no effect"):
        Trainer(TrainConfig(resume=str(path.parent), steps=9, rungs="flash,fused_adamw"), progress=False)

# --- a rung that computes another function ---

def test_an_undeclared_one_is_caught_before_training(capsys):
    mine(UNDECLARED); forget()
    said = refused(capsys, speedrun_train, *WORDS.split(), "--rungs", "relu")
    assert "error: rung 'relu' (mine.py, line 16) computes another function than the run without it: from the same weights the loss differs by" in said
    assert 'declare it: @rung("parts", same_function=False)' in said and len(said.strip().splitlines()) == 2 and not os.path.exists("runs")

SAME = '''from dataclasses import replace
import torch, torch.nn.functional as F
from llm_speedrun.model import set_parts
from llm_speedrun.runs import rung
def feed(block, h):
    x, m = block.post_attention_layernorm(h), block.mlp
    g = m.gate_proj(x)
    return h + m.down_proj(g/(1 + torch.exp(-g)) * m.up_proj(x))
@rung("parts")
def silu(run): return run.with_model(lambda model: set_parts(model, feed=feed))
def with_z(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 1e-3*logits.logsumexp(-1).square().mean()
@rung("parts", requires=["bf16"])
def z_loss(run): return replace(run, loss=with_z)
def capped(model, x, y):
    logits = 15*torch.tanh(model(x)/15)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())
@rung("parts")
def softcap(run): return replace(run, loss=capped)
@rung("parts")
def dropout(run): return run.with_model(lambda model: model.norm.register_forward_hook(lambda m, args, out: F.dropout(out, .1)))
@rung("precision")
def half(run): return replace(run.in_forward(lambda: torch.autocast(run.device.type, torch.bfloat16)), fmt="bf16")
'''

@pytest.mark.parametrize("name, right", [("silu", True), ("half", True), ("z_loss", False), ("softcap", False), ("dropout", False)])
def test_what_counts_as_the_same(name, right):
    mine(SAME)
    rungs = ["bf16", name] if name == "z_loss" else [name]
    if right: plugins.check_function(NANO, rungs, plugins.pkgutil.resolve_name("llm_speedrun.model:GPT"))
    else:
        with fails(InputError, f"rung '{name}' .mine.py, line .* computes another function"):
            plugins.check_function(NANO, rungs, plugins.pkgutil.resolve_name("llm_speedrun.model:GPT"))

@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    "A folder with a run of a rung that changes the function"
    folder = tmp_path_factory.mktemp("trained")
    texts(folder/"texts")
    (folder/"mine.py").write_text(DECLARED, encoding="utf-8")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("LLM_SPEEDRUN_CACHE", str(folder/"cache"))
        speedrun_train([*WORDS.split(), "--rungs", "flash,relu", "--name", "a", "--steps", "30"])
    forget()
    return folder

@pytest.fixture
def changed(trained_once, tmp_path):
    "A copy of that folder, which is the current one; its run has the plug-in of the copy"
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    path = tmp_path/"runs/a/config.json"
    path.write_text(path.read_text(encoding="utf-8").replace(str(trained_once), str(tmp_path)), encoding="utf-8")

def test_it_is_opened_with_its_rung(changed, capsys, tmp_path):
    c = config_of("runs/a")
    assert c["changes_function"] == ["relu"]
    run = from_pretrained("runs/a", "cpu")
    assert run.rungs == ("relu",) and "importing the plug-in mine.py of runs/a" in capsys.readouterr().err
    t = Trainer(TrainConfig(resume="runs/a", steps=31), progress=False)
    x, y = (xy[:2] for xy in t.data.val)
    with torch.no_grad():
        want = t.run.loss(t.run.model, x, y).item()
        assert abs(run.loss(run.model, x, y).item() - want) < 1e-5
        plain = build(run.model.config, [], "cpu")
        plain.model.load_state_dict(run.model.state_dict())
        assert abs(plain.loss(plain.model, x, y).item() - want) > 1e-3, "and without it the loss is another"

def test_sample_and_eval_use_it(changed, capsys, tmp_path):
    g = Generator(from_pretrained("runs/a", "cpu"), 2)
    g.begin([[1, 2], [3]])
    speedrun_sample(["runs/a", "--n", "3", "--prompt", "3 times"])
    speedrun_eval(["runs/a", "--text", "texts/3.txt", "--limit", "1"])
    both = json.loads((tmp_path/"runs/a/evals.json").read_text(encoding="utf-8"))
    assert both[-1]["engine"] == "ours, with relu"

def test_it_is_not_exported(changed, capsys):
    said = refused(capsys, speedrun_export, "runs/a")
    assert "error: runs/a can't be exported: the rung 'relu' changes what its model computes, the logits by" in said and not os.path.exists("runs/a/export")
    step = sorted(os.listdir("runs/a/checkpoints"))[-1]
    assert "can't be exported" in refused(capsys, speedrun_export, f"runs/a/checkpoints/{step}")

def test_only_the_loss_may_be_another(capsys):
    mine(SAME.replace('@rung("parts")\ndef softcap', '@rung("parts", same_function=False)\ndef softcap').replace("model(x)/15)", "model(x)/15)")); forget()
    trained(capsys, "--rungs", "softcap", "--name", "b")
    speedrun_export(["runs/b"])
    assert os.path.exists("runs/b/export/model.safetensors"), "its logits are the model's"

def test_a_resumed_run_keeps_it(changed, capsys):
    assert "after 31 steps" in trained_on(capsys, "--resume", "runs/a", "--steps", "31")
    forget()
    said = refused(capsys, speedrun_train, "--resume", "runs/a", "--steps", "32", "--rungs", "flash")
    assert "a resumed run keeps the rungs that change what the model computes: it had relu, and these are none" in said

def trained_on(capsys, *args):
    capsys.readouterr()
    speedrun_train([*args])
    return capsys.readouterr().out

def test_a_lost_plug_in_is_named(changed, capsys, tmp_path):
    (tmp_path/"mine.py").write_text(DECLARED.replace("def relu(", "def relu2("), encoding="utf-8")
    for f in (speedrun_sample, speedrun_export):
        assert "runs/a was trained with the rung 'relu', which changes what its model computes, and" in refused(capsys, f, "runs/a"); forget()
    (tmp_path/"mine.py").rename(tmp_path/"moved.py")
    assert "there is no such file. runs/a needs it: give its new place, --plugin FILE" in refused(capsys, speedrun_export, "runs/a")
    (tmp_path/"again.py").write_text(DECLARED, encoding="utf-8")
    assert "can't be exported: the rung 'relu' changes" in refused(capsys, speedrun_export, "runs/a", "--plugin", "again.py")

def test_an_older_run_is_checked_when_it_is_opened(changed, capsys, tmp_path):
    path = tmp_path/"runs/a/config.json"
    old = config_of("runs/a"); old.pop("changes_function")
    path.write_text(json.dumps(old), encoding="utf-8")
    assert from_pretrained("runs/a", "cpu").rungs == ("relu",)
    forget(); (tmp_path/"mine.py").write_text(UNDECLARED, encoding="utf-8")
    for f in (speedrun_export, speedrun_sample): assert "computes another function" in refused(capsys, f, "runs/a"); forget()

def test_an_optimizer_rung_is_exported(capsys):
    trained(capsys, "--rungs", "nadam", "--name", "c")
    forget()
    speedrun_export(["runs/c"])
    assert not plugins.LOADED and os.path.exists("runs/c/export/model.safetensors"), "its code isn't needed"

def test_a_run_that_begins_with_its_weights_is_warned(changed, capsys):
    capsys.readouterr()
    speedrun_train("--init runs/a --data texts --steps 2 --micro_batch_size 4 --step_tokens 256 --num_evals 1 --eval_tokens 256 --sample_tokens 2 --name d "
                   "--recipe adamw --rungs naive".split())
    assert "runs/a was trained with relu, and computes something else without" in capsys.readouterr().out

def test_evals_keep_the_attention_of_a_plug_in(capsys, tmp_path):
    "Scores of a model whose class attends in its own way are those of the model, not of a GPT with its weights"
    from llm_speedrun.tools.evals import our_lm
    (tmp_path/"mine.py").write_text('''from llm_speedrun.architectures import model
from llm_speedrun.model import GPT, set_parts
@model("mean", layers=1, width=32, heads=2, kv_heads=2, hidden=64, seq_len=32, vocab=320)
class Mean(GPT):
    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        set_parts(self, attend=lambda q, k, v: v.cumsum(2))
''', encoding="utf-8")
    trained(capsys, "--rungs", "naive", "--name", "e", "--model", "mean")
    run, x = from_pretrained("runs/e", "cpu"), torch.arange(20)[None]
    with torch.no_grad(): torch.testing.assert_close(our_lm("runs/e", "cpu").logits(x), run.model(x))

# --- errors ---

@pytest.mark.parametrize("code, rungs, parts", [
    (DECLARED, "forgets", ["rung 'forgets' (mine.py, line 21) returned nothing, and no Run: end it with `return run`"]),
    (MINE.replace("SAME", "").replace('    run.with_model(lambda model: None)\n', "    return 3\n"), "forgets", ["returned 3, of type int, and no Run"]),
    (DECLARED.replace("    run.with_model(lambda model: None)\n", "    return run.modle\n"), "forgets",
     ["plug-in mine.py fails, line 24, in the rung 'forgets': AttributeError: 'Run' object has no attribute 'modle'"]),
    (DECLARED.replace("    run.with_model(lambda model: None)\n", "    raise KeyError('two\\nlines')\n"), "forgets", ["line 24, in the rung 'forgets': KeyError"]),
    (DECLARED.replace("lr=1e-3, weight_decay=.1:", "lr=1e-3:"), "nadam", ["the rung nadam: its optimizer can't be made by optimizer(model, lr=..., weight_decay=...)"]),
    (DECLARED.replace("torch.optim.NAdam(", "print("), "nadam", ["the rung nadam: its optimizer can't be made by"]),
    (DECLARED.replace("replace(run, optimizer=lambda model, lr=1e-3, weight_decay=.1: torch", "replace(run, optimizer=lambda model, lr=1e-3, weight_decay=.1: None and torch"),
     "nadam", ["the rung nadam: its optimizer is None, and must be a torch.optim.Optimizer"]),
    (DECLARED.replace("return h + m.down", "raise OSError('no'); return h + m.down"), "relu", ["plug-in mine.py fails, line 14, in relu_feed: OSError: no"]),
    (DECLARED.replace("set_parts(model, feed=relu_feed)", "setattr(model, 'loss', lambda h, w, y: h)"), "relu", ["rung 'relu' (mine.py, line 16) gives a tensor of shape (1, 32, 32) as loss"]),
], ids=range(9))
def test_an_error_in_a_rung_ends_in_one_line(tmp_path, capsys, code, rungs, parts):
    (tmp_path/"mine.py").write_text(code, encoding="utf-8")
    said = refused(capsys, speedrun_train, *WORDS.split(), "--rungs", rungs)
    last = said.strip().splitlines()
    assert last[0] == "importing the plug-in mine.py" and len(last) == 2 and last[1].startswith("error: ") and all(p in last[1] for p in parts), said
    assert not os.path.exists("runs")

OTHERS = '''from dataclasses import replace
import torch
from llm_speedrun.recipes.recipe import make_mixed_optimizer, recipe, rule
from llm_speedrun.recipes.schedules import SCHEDULES
from llm_speedrun.model import GPT
from llm_speedrun.architectures import model
from functools import partial
'''
RULE = '''
@rule("mine")
class Mine:
    settings = dict(weight_decay=0.)
    def new_state(self, p, group): return {}
    def __call__(self, group, params, grads, states, found_inf=None): BODY
@recipe(schedule="constant", warmup=0., lr=.01)
def own(run): return replace(run, optimizer=partial(make_mixed_optimizer, roles={k: dict(rule="mine") for k in ("embed", "matrix", "vector", "head")}))
'''

@pytest.mark.parametrize("code, more, parts", [
    ("@recipe(lr=.1)\ndef own(run): pass\n", "--recipe own", ["recipe 'own' (mine.py, line 8) returned nothing, and no Run"]),
    ("@recipe(lr=.1)\ndef own(run): return run.modle\n", "--recipe own", ["plug-in mine.py fails, line 9", "has no attribute 'modle'"]),
    ("@recipe(lr=lambda config, **length: 1/0)\ndef own(run): return run\n", "--recipe own", ["plug-in mine.py fails, line 8: ZeroDivisionError"]),
    ("@recipe(lr='fast')\ndef own(run): return run\n", "--recipe own", ["recipe 'own': lr is 'fast', and must be a number"]),
    ("@recipe(lr=.1, warmpu=.1)\ndef own(run): return run\n", "--recipe own", ["unknown option in the recipe 'own' 'warmpu'", "Did you mean 'warmup'"]),
    ("SCHEDULES['mine'] = lambda t: None\n", "--recipe adamw --schedule mine", ["schedule 'mine' (mine.py, line 8) returned None"]),
    ("SCHEDULES['mine'] = lambda t: 1/(t - t)\n", "--recipe adamw --schedule mine", ["plug-in mine.py fails, line 8: ZeroDivisionError"]),
    ("@recipe(lr=.1)\ndef own(run): return replace(run, schedules=(lambda g, step, steps: None,))\n", "--recipe own",
     ["a schedule of the recipe (mine.py, line 9) returned None"]),
    (RULE.replace("BODY", "1/0"), "--recipe own", ["plug-in mine.py fails, line 13, in __call__: ZeroDivisionError"]),
    (RULE.replace("BODY", "pass").replace("return {}", "return 3"), "--recipe own", ["rule 'mine' (of mine_", "new_state returned 3"]),
    (RULE.replace("BODY", "pass").replace("    settings = dict(weight_decay=0.)\n", ""), "--recipe own", ["rule 'mine'", "settings"]),
    ("@model('bad', layers=1, width=32, heads=2, kv_heads=2, hidden=64, seq_len=32, vocab=320)\nclass Bad(GPT):\n    def forward(self, x, y=None): return self.hidden(x)\n",
     "--recipe adamw --model bad", ["model 'bad' gives a tensor of shape (1, 32, 32) as loss"]),
    ("@model('bad', layers=1, width=32, heads=2, kv_heads=2, hidden=64, seq_len=32, vocab=320)\nclass Bad(GPT):\n    def hidden(self, x): return x.nothing\n",
     "--recipe adamw --model bad", ["plug-in mine.py fails, line 10, in hidden: AttributeError"]),
], ids=range(13))
def test_an_error_elsewhere_in_a_plug_in_ends_in_one_line(tmp_path, capsys, code, more, parts):
    (tmp_path/"mine.py").write_text(OTHERS + code, encoding="utf-8")
    words = " ".join(WORDS.split("--lr")[:1]).split()
    if "--model bad" in more: words[words.index("nano")] = "bad"; more = more.replace(" --model bad", "")
    said = refused(capsys, speedrun_train, *words, *more.split(), "--rungs", "naive")
    errors = [line for line in said.splitlines() if "error: " in line]
    assert len(errors) == 1 and all(p in errors[0] for p in parts) and "Traceback" not in said, said

def test_debug_shows_where(tmp_path, capsys):
    with pytest.raises(InputError) as e: speedrun_train([*WORDS.split(), "--rungs", "forgets", "--debug"])
    assert "returned nothing" in str(e.value)

# --- two processes ---

LATER = RULE.replace("BODY", "Mine.n = getattr(Mine, 'n', 0) + 1; Mine.n > 100 and 1/0") # in training, and not in the steps before

@pytest.mark.parametrize("code, more, part", [
    (DECLARED, "--rungs forgets", "rung 'forgets' (mine.py, line 21) returned nothing, and no Run"),
    (OTHERS + LATER, "--rungs naive --recipe own --steps 100", "plug-in mine.py fails, line 13, in __call__: ZeroDivisionError")], ids=["forgets", "later"])
def test_two_processes_say_it_once(tmp_path, code, more, part):
    "Both processes end, and one of them says why"
    (tmp_path/"mine.py").write_text(code, encoding="utf-8")
    words = [*WORDS.replace("--model nano", "--model tiny").replace("--step_tokens 256", "--step_tokens 512").split(), "--name", "two", "--gpus", "2", "--num_evals", "1", *more.split()]
    command = python_command("from llm_speedrun.cli import speedrun_train; speedrun_train()", *words)
    p = quick_programs.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, env=os.environ | dict(CUDA_VISIBLE_DEVICES="-1"))
    assert p.returncode == 2 and p.stderr.count("error: ") == 1 and part in p.stderr and "Traceback" not in p.stderr, p.stderr
