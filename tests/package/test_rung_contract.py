"""The contract of a rung: it has an effect or is left out, it computes the same function or says that it doesn't, and it returns a run. Each case is
shown as a user sees it: by the command, with one process; two processes train in `test_two_processes_say_it_once`."""
import json, os, subprocess, sys
import pytest, torch
from llm_speedrun import plugins
from llm_speedrun.cli import speedrun_eval, speedrun_export, speedrun_sample, speedrun_train
from llm_speedrun.export import from_pretrained, import_folder
from llm_speedrun.generate import Generator
from llm_speedrun.io_utils import InputError, python_command
from llm_speedrun.recipes import recipe
from llm_speedrun.recipes.recipe import RECIPES, find_recipe, parse_recipe, unused_rungs
from llm_speedrun.runs import build
from llm_speedrun.train.resolve import plan_lines
from llm_speedrun.train.trainer import Trainer
from helpers.tiny_runs import NANO, cache, fails, nano, options, texts

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

def forget():
    for spec in [*plugins.LOADED]: plugins.forget_plugin(spec)

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

@pytest.mark.parametrize("name", ["adamw", "tuned_adamw", "muon", "normuon", "speedrun", "without_muon", "beyond", "beyond:x0=yes:softcap=15"])
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
    from llm_speedrun.train.trainer import train
    from llm_speedrun.train.config import TrainConfig
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
