"""Rungs, recipes and models from a file outside the package: with one process, on resume, and in every command. Two processes train with the
same file in `test_commands_shown`, as the page shows it."""
import importlib.metadata, json, shutil
import pytest, torch
from llm_speedrun import plugins
from llm_speedrun.architectures import MODELS
from llm_speedrun.choices import code_version
from llm_speedrun.cli import speedrun_export, speedrun_sample, speedrun_train
from llm_speedrun.tools.export import export_folder
from llm_speedrun.pretrained import from_pretrained, import_folder
from llm_speedrun.io_utils import InputError
from llm_speedrun.kv_cache import Generator
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.plugins import import_plugins
from llm_speedrun.benchmarks.race import parse_contestant
from llm_speedrun.distributed.world import World
from llm_speedrun.records import code_of
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.train.config import TrainConfig, to_args
from llm_speedrun.pretrained import read_record
from llm_speedrun.train.trainer import train
from doc_commands import ROOT, blocks
from helpers.examples import path_of
from helpers.tiny_runs import cache, fails, nano, texts

CODE, = (b.body for b in blocks((ROOT/"nbs/site/train/own_rung.qmd").read_text(encoding="utf-8")) if b.file == "mine.py")
CODE = CODE.replace("width=64", "width=32").replace("hidden=192", "hidden=64").replace("seq_len=64", "seq_len=32").replace("vocab=1024", "vocab=320")

def forget():
    for spec in [*plugins.LOADED]: plugins.forget_plugin(spec)

@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    "The tests stand in an empty folder, and a plug-in is forgotten at the end, as where the process ends"
    monkeypatch.chdir(tmp_path)
    yield
    forget()

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A folder with `mine.py`, and a run of its rung, recipe and model"
    folder = tmp_path_factory.mktemp("trained")
    (folder/"mine.py").write_text(CODE, encoding="utf-8")
    texts(folder/"texts")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("LLM_SPEEDRUN_CACHE", str(folder/"cache"))
        speedrun_train(OPTIONS.split())
    forget()
    return folder

OPTIONS = ("--plugin mine.py --data texts --model relu2 --rungs flash,nadam --recipe by_hand --steps 4 --micro_batch_size 4 --step_tokens 256 --num_evals 1 "
           "--eval_tokens 256 --sample_tokens 4 --name own --save_minutes 0")

@pytest.fixture
def there(trained, tmp_path):
    "A copy of that folder, which is the current one"
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path

def config_of(run): return json.loads((run/"config.json").read_text(encoding="utf-8"))

def refused(capsys, f, *args):
    "What a command says that ends with an error"
    with pytest.raises(SystemExit, match="2"): f([*map(str, args)])
    return capsys.readouterr().err

# --- a run ---

def test_a_run_records_what_it_imported(trained):
    c = config_of(trained/"runs/own")
    assert c["architecture"] == c["model_config"]["name"] == c["model"] == "relu2" and c["recipe"] == "by_hand" and c["rungs"].split(",")[1] == "nadam"
    assert list(c["plugins"]) == [str(trained/"mine.py")] and "plugin" not in c

def test_a_resumed_run_says_which_file_before_it_imports_it(there, capsys):
    (there/"mine.py").write_text("print('mine is imported')\n" + CODE, encoding="utf-8")
    speedrun_train(["--resume", "runs/own", "--steps", "5", "--plugin", "mine.py"])
    out, err = capsys.readouterr()
    assert err.startswith("importing the plug-in mine.py\n") and "isn't as runs/own knows it" in err, "it was changed"
    assert "mine is imported" in out and "after 5 steps" in out and "going on from" in out
    forget()
    speedrun_train(["--resume", "runs/own", "--steps", "6"])
    out, err = capsys.readouterr()
    assert err.startswith("importing the plug-in mine.py of runs/own\n") and "knows" not in err and "after 6 steps" in out

def test_a_resumed_run_goes_on_as_the_run_would_have(there):
    long = OPTIONS.replace("--name own", "--name whole").split()
    speedrun_train(long)
    weights = lambda run: torch.cat([t.flatten() for t in import_folder(run)[1].values()])
    assert torch.equal(weights("runs/whole"), weights("runs/own"))

def test_a_moved_file_is_named_anew(trained, there, capsys, monkeypatch):
    (there/"elsewhere").mkdir(); (there/"mine.py").rename(there/"elsewhere/mine.py")
    monkeypatch.setattr(plugins, "recorded_plugins", lambda f, real=plugins.recorded_plugins: { # as where nothing else is left
        s.replace(str(trained), str(there)): d for s, d in real(f).items()})
    for f, *args in ((speedrun_train, "--resume", "runs/own", "--steps", 5), (speedrun_sample, "runs/own")):
        assert "mine.py: there is no such file. runs/own needs it: give its new place, --plugin FILE" in refused(capsys, f, *args)
    speedrun_train(["--resume", "runs/own", "--steps", "5", "--plugin", "elsewhere/mine.py"])
    assert "knows it" not in capsys.readouterr().err
    assert list(config_of(there/"runs/own")["plugins"]) == [str(there/"elsewhere/mine.py")]

def test_its_weights_open_as_its_model(there, capsys):
    run = from_pretrained("runs/own", "cpu")
    assert type(run.model).__name__ == "SquaredGPT" and "importing the plug-in" in capsys.readouterr().err
    speedrun_sample(["runs/own", "--n", "3", "--prompt", "3 times"])
    train(TrainConfig(init="runs/own", data="texts", steps=2, micro_batch_size=4, step_tokens=256, num_evals=1, eval_tokens=256, sample_tokens=2, name="more"), progress=False)
    assert config_of(there/"runs/more")["architecture"] == "relu2" and config_of(there/"runs/more")["plugins"], "and so does what begins with them"

def test_its_weights_are_not_exported(there, capsys):
    assert "its model 'relu2' is a class of a plug-in" in refused(capsys, speedrun_export, "runs/own")
    assert not (there/"runs/own/export").exists() and not plugins.LOADED, "and nothing is imported"
    with fails(InputError, "is a class of a plug-in"): export_folder("runs/own")

def test_a_file_without_the_model_is_refused(there, capsys):
    (there/"other.py").write_text(CODE.replace('"relu2"', '"relu3"'), encoding="utf-8")
    said = refused(capsys, speedrun_train, "--resume", "runs/own", "--steps", 5, "--plugin", "other.py")
    assert "runs/own has the model 'relu2', which" in said

def test_a_model_is_not_taken_by_its_name_alone(there):
    "A run of a shape that happens to be called as a plug-in's model is, is a GPT"
    path = there/"runs/own/config.json"
    path.write_text(json.dumps({k: v for k, v in config_of(there/"runs/own").items() if k not in ("architecture", "plugins")}), encoding="utf-8")
    import_plugins("mine.py", log_info=lambda text: None)
    assert read_record("runs/own").model_config.name == "custom" and type(from_pretrained("runs/own", "cpu").model).__name__ == "GPT"

# --- refused ---

HEAD = "from llm_speedrun.runs import rung\nfrom llm_speedrun.recipes.recipe import recipe, rule\nfrom llm_speedrun.model import GPT\n" \
       "from llm_speedrun.architectures import model\nfrom llm_speedrun.recipes.schedules import SCHEDULES\n"
RUNG = '@rung("optimizer")\ndef {}(run): return run\n'

@pytest.mark.parametrize("code, parts", [
    (RUNG.format("flash"), ["the rung 'flash'", "of that name already"]), (RUNG.format("fastest"), ["the rung 'fastest'"]), (RUNG.format("auto"), ["'auto'"]),
    (RUNG.format("fine") + RUNG.format("muon") + "@recipe()\ndef muon(run): return run\n", ["the recipe 'muon'"]),
    ('@model("124m", layers=1)\nclass A(GPT): pass\n', ["the model '124m'"]), ('@rule("adamw")\nclass A: pass\n', ["the rule 'adamw'"]),
    ("SCHEDULES['wsd'] = None\n", ["the schedule 'wsd'"]), ("RECIPES.clear()\n", ["line 6", "NameError"]), ("1/0\n", ["line 6: ZeroDivisionError"]),
    ("def f(:\n", ["line 6: SyntaxError"]), ("import sys; sys.exit(3)\n", ["SystemExit"]), ("import no_such_module_x\n", ["no_such_module_x"]),
    ('@rung("late")\ndef fine(run): return run\n', ["unknown stage 'late'"]), ('@model("a b")\nclass A(GPT): pass\n', ["a name is made of"]),
    ('@model("b", width=31)\nclass A(GPT): pass\n', ["width 31"]), ('@model("b", wdth=32)\nclass A(GPT): pass\n', ["wdth"]),
    ('@model("b", layers=1)\nclass A: pass\n', ["no subclass of GPT"])], ids=range(17))
def test_a_file_that_cannot_be_used(tmp_path, capsys, code, parts):
    (tmp_path/"mine.py").write_text(HEAD + code, encoding="utf-8")
    tables = plugins.tables()
    before = {k: dict(t) for k, t in tables.items()}
    said = refused(capsys, speedrun_train, "--plugin", "mine.py", "--rungs", "list")
    assert "error: plug-in mine.py" in said and all(p in said for p in parts), said
    assert {k: dict(t) for k, t in tables.items()} == before and not plugins.LOADED

@pytest.mark.parametrize("spec, part", [("gone.py", "no such file"), ("a/b", "no such file"), ("no_such.module", "no such module"), ("x y", "no such module")])
def test_a_plug_in_that_is_not_there(capsys, spec, part): assert part in refused(capsys, speedrun_train, "--plugin", spec, "--steps", 3)

def test_two_files_with_one_name(tmp_path, capsys):
    for n in "ab": (tmp_path/f"{n}.py").write_text(HEAD + RUNG.format("mine") + f"# {n}", encoding="utf-8")
    assert "plug-in b.py defines the rung 'mine'" in refused(capsys, speedrun_train, "--plugin", "a.py", "--plugin", "b.py", "--rungs", "list")

def test_a_changed_file_is_imported_anew(tmp_path):
    for name in ("mine", "yours"):
        (tmp_path/"a.py").write_text(HEAD + RUNG.format(name), encoding="utf-8")
        import_plugins("a.py", log_info=lambda text: None)
    assert "yours" in RUNGS and "mine" not in RUNGS

@pytest.fixture
def mine(tmp_path):
    (tmp_path/"mine.py").write_text(CODE, encoding="utf-8")
    import_plugins("mine.py", log_info=lambda text: None)
    return WORKLOADS["relu2"]

def test_parts_of_a_gpt_are_no_parts_of_another_model(mine):
    assert type(build(mine, ["flash", "nadam"], "cpu").model) is MODELS["relu2"]
    with fails(InputError, "rung 'chunked_ce' isn't known to fit the model SquaredGPT", "add 'chunked_ce'"): build(mine, ["chunked_ce"], "cpu")
    with fails(InputError, "it makes the weights of a GPT"): build(mine, ["fsdp"], "cpu", world=World(0, 2))

def test_a_class_must_be_registered_and_have_roles(there, capsys):
    path = there/"mine.py"
    lone = CODE + "\nclass Lone(GPT): pass\n@recipe(model=Lone, lr=.1)\ndef lone(run): return run\n"
    words = [*OPTIONS.replace("by_hand", "lone").replace("relu2", "nano").replace("--name own", "--name no").split(), "--sample_tokens", "0"]
    path.write_text(lone, encoding="utf-8")
    assert "recipe 'lone' trains a Lone, and the model of this run is another one" in refused(capsys, speedrun_train, *words)
    path.write_text(CODE.replace("set_parts(self", "self.more = torch.nn.Linear(4, 4); set_parts(self"), encoding="utf-8")
    assert "more has weights without a role" in refused(capsys, speedrun_train, *OPTIONS.replace("--name own", "--name no").split())
    assert not (there/"runs/no").exists()

def test_a_recipe_with_switches_is_for_its_own_model(there, capsys):
    words = OPTIONS.replace("by_hand", "beyond:x0=yes").replace("flash,nadam", "naive").replace("--name own", "--name no").split()
    said = refused(capsys, speedrun_train, *words, "--plugin", path_of("modded_architecture"))
    assert "'beyond:x0=yes' trains a BeyondGPT, and the model of this run is another one, a SquaredGPT: use --recipe adamw" in said

@pytest.mark.parametrize("attend, fits", [("naive_attention(q, k, v)", True), ("v.cumsum(2)/torch.arange(1, v.shape[2] + 1)[:, None]", False)])
def test_a_cache_must_fit_the_model(tmp_path, attend, fits):
    (tmp_path/"mine.py").write_text(CODE.replace("feed=squared_relu)", f"attend=lambda q, k, v: {attend})") + "from llm_speedrun.model import naive_attention\n")
    import_plugins("mine.py", log_info=lambda text: None)
    run = build(WORKLOADS["relu2"], device="cpu", seed=3)
    for p in run.model.parameters(): p.data.mul_(4)
    if fits: return Generator(run, 2).begin([[1, 2], [3]])
    with fails(InputError, "a cache doesn't fit the model SquaredGPT"): Generator(run, 2)

# --- where else names are looked up ---

def test_the_list_of_rungs_has_mine(mine, capsys):
    speedrun_train(["--plugin", "mine.py", "--rungs", "list"])
    assert "NAdam in place of AdamW" in capsys.readouterr().out

def test_children_get_the_option(): assert to_args(TrainConfig(plugin="a.py\nb.py"), {"plugin"}) == ["--plugin=a.py\nb.py"]

def test_a_race_imports_for_all(mine, tmp_path):
    c = parse_contestant("a: --recipe by_hand --rungs nadam", plugins.plugin_args("mine.py"))
    assert c.words[-1] == f"--plugin={tmp_path/'mine.py'}"
    with fails(InputError, "leave out plugin"): parse_contestant("a: --plugin mine.py")

def test_new_processes_import_the_same(mine, tmp_path):
    f = plugins.with_plugins(lambda world: "nadam" in RUNGS)
    forget()
    assert "nadam" not in RUNGS and f(None)

def test_measurements_depend_on_its_code(mine, tmp_path):
    before = code_version(), code_of(["nadam"]), code_of(["flash"])
    (tmp_path/"mine.py").write_text(CODE.replace("lr=1e-3", "lr=2e-3"), encoding="utf-8")
    import_plugins("mine.py", log_info=lambda text: None)
    after = code_version(), code_of(["nadam"]), code_of(["flash"])
    assert [a == b for a, b in zip(before, after)] == [False, False, True]

def test_installed_packages_offer_theirs(tmp_path, monkeypatch, capsys):
    (tmp_path/"a_package.py").write_text(HEAD + RUNG.format("offered"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint("mine", "a_package", plugins.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == plugins.GROUP else [])
    speedrun_train(["--rungs", "list"])
    out, err = capsys.readouterr()
    assert "offered" in out and "importing the plug-in a_package" in err
