"The installed commands: help at once, options checked before PyTorch is there, both kinds of data, one line for each error."
import ast, inspect, json, math, os, re, subprocess, sys
from configparser import ConfigParser
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
import numpy as np, pytest, torch
from llm_speedrun.io_utils import InputError, clean_errors, decoded
from llm_speedrun.rung_registry import RUNGS, find_rung, rung_name
from llm_speedrun import cli
from llm_speedrun.cli import speedrun_doctor, speedrun_ladder, speedrun_train
from llm_speedrun.train.presets import presets
from llm_speedrun.train.config import (OTHER_TOOLS, DataOptions, LadderOptions, LrOptions, Options, explain_name, make_parser, normalize_args, option_specs, parse_args,
                                       RaceOptions, resolve_options, to_toml, TrainConfig, visible_specs)
from llm_speedrun.train.trainer import train
from helpers import quick_programs
from helpers.tiny_runs import VOCAB, fails, nano, options, words, write_bins
from helpers.timeouts import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]
ini = ConfigParser()
ini.read(ROOT/"settings.ini", encoding="utf-8")
SCRIPTS = dict(re.fullmatch(r"(\w+)=(.+):\w+", s).groups() for s in ini["DEFAULT"]["console_scripts"].split())
COMMANDS = {name: getattr(cli, name) for name in SCRIPTS}

def run(folder, name, *args, say="pass", before=""):
    "Run a command in `folder` as its console script does, with a cache of its own; what it said, on stdout and stderr"
    env = os.environ | dict(LLM_SPEEDRUN_CACHE=str(folder/"cache"), COLUMNS="300", PYTHONIOENCODING="utf-8")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    start = quick_programs.run if say == "pass" else subprocess.run # who asks what is loaded has a program that loads it
    script = f"{before}import sys; from {SCRIPTS[name]} import {name} as f\ntry: sys.exit(f())\nfinally: {say}"
    return start([sys.executable, "-c", script, *map(str, args)], cwd=folder, env=env, capture_output=True,
                 text=True, encoding="utf-8", timeout=TIMEOUT)

QUICK = "--model tiny --rungs naive --steps 12 --micro_batch_size 4 --seq_len 32 --eval_tokens 256 --num_evals 2 --sample_tokens 20".split()

# Help

HEAVY = "torch numpy datasets matplotlib tokenizers tqdm".split()
SAY = f"print([m for m in {HEAVY} if m in sys.modules], len(sys.modules), calls, file=sys.stderr)"
COUNT = "import sys\ncalls = 0\ndef count(frame, event, arg): global calls; calls += event in ('call', 'c_call')\nsys.setprofile(count)\n"

@pytest.mark.parametrize("args", [["--help"], ["--no-such-option"]], ids=" ".join)
@pytest.mark.parametrize("name", COMMANDS)
def test_says_at_once(tmp_path, name, args):
    "Help, and a mistake, do little work, load few modules, none of them heavy, and touch no data"
    res = run(tmp_path, name, *args, say=SAY, before=COUNT)
    loaded, modules, calls = res.stderr.splitlines()[-1].rsplit(" ", 2)
    assert (res.returncode, loaded) == (0 if args == ["--help"] else 2, "[]") and int(modules) < 400 and int(calls) < 500_000
    assert not [*tmp_path.iterdir()]

@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
    "It lists every option with what it does, in groups, but for those that the command has no use for"
    f = COMMANDS[name]
    said = re.sub(r"\s+", " ", make_parser(f.config, name, f.__doc__).format_help())
    assert " ".join(f.__doc__.split()) in said
    assert [o.name for o in option_specs(f.config)] == [o.name for o in fields(f.config)] # each line of the dataclass was read
    used = visible_specs(f.config)
    for o in used: assert re.search(rf"(--| ){o.name}\b(, --no-\w+)?( \w+)? {re.escape(o.help)}", said), o.name
    for o in f.config.unlisted: assert f"--{o} " not in said
    for group in {o.group for o in used}: assert f" {group}: " in said
    for preset in presets() if "--rungs TEXT" in said else []: assert re.search(rf"--rungs\b[^-]*\b{preset}\b", said), preset

def test_groups():
    groups = dict.fromkeys(o.group.split(" (")[0] for o in option_specs(TrainConfig))
    assert [*groups] == "Data Model Rungs GPUs Length Recipe Evaluation Output Resuming".split()

# What is understood

parser = lru_cache(lambda config: make_parser(config, "speedrun_x", "")) # reading all its options takes a tenth of a second

def told(*args, config=TrainConfig): return resolve_options(config, parse_args(parser(config), args))

def test_every_option_comes_through():
    "Each option, its name in both spellings, is set and known as given; a boolean also in its negative form"
    for o in option_specs(TrainConfig):
        if o.base is bool:
            assert told(f"--no-{o.name}") == (TrainConfig(), {o.name})
            c, given = told(f"--{o.name}")
            assert getattr(c, o.name) and given == {o.name}
            continue
        value = {str: "ab", int: 3, float: .25}[o.base]
        for name in (o.name, o.name.replace("_", "-")):
            c, given = told(f"--{name}", str(value))
            assert getattr(c, o.name) == value and given == {o.name}

NASTY = ['a "b" \\ c', "tab\tand\nline", "\x7f\x01", "naïve 漢字 🙂", "# '", "'" * 3, "--x"]

@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_toml_round_trip(tmp_path, capsys, text):
    "What --print_config prints, --config takes: any text, the smallest and the largest numbers"
    cfg = TrainConfig(data=text, name=text, lr=5e-324, grad_clip=1.7976931348623157e308, minutes=1/3, stream=True, epochs=2/3)
    speedrun_train([*words(cfg), "--print_config"])
    (tmp_path/"a.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert told("--config", str(tmp_path/"a.toml")) == (cfg, {"data", "name", "lr", "grad_clip", "minutes", "stream", "epochs"})

def test_command_line_wins(tmp_path):
    "Over the file's value; a length over any of the file's; a value equal to the default is given all the same"
    (tmp_path/"a.toml").write_text("steps = 7\nlr = 0.5\ntarget_loss = 3\nstream = true\nseed = 0\n")
    c, given = told("--config", str(tmp_path/"a.toml"), "--minutes", "2", "--target_loss=0", "--no-stream")
    assert (c.steps, c.minutes, c.lr, c.target_loss, c.stream) == (0, 2., .5, 0., False)
    assert given == {"minutes", "lr", "target_loss", "stream"}

@pytest.mark.parametrize("text,message", [
    ("stpes = 3", "unknown option stpes, did you mean steps"), ("steps = '3'", "steps must be a whole number"), ("steps = 3.5", "steps must"),
    ("steps = true", "steps must"), ("lr = nan", "lr must"), ("lr = inf", "lr must"), ("data = 3", "data must be a text"), ("[data]\na = 1", "data must"),
    ("steps = " + "9"*5000, "a.toml"), ("x", "is no TOML"), ("a = " + "["*5000, "is no TOML"), ("stream = 1", "stream must be true or false")], ids=lambda s: s[:20])
def test_bad_file(tmp_path, text, message):
    "Names the file and what is wrong in it"
    (tmp_path/"a.toml").write_text(text)
    with fails(InputError, "a.toml", message): told("--config", str(tmp_path/"a.toml"))

@pytest.mark.skipif(os.name != "posix", reason="pipes have names on POSIX alone")
def test_pipe_in_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path/"pipe")
    with fails(InputError, "pipe is no regular file"): told("--config", str(tmp_path/"pipe"))

@pytest.mark.parametrize("args,message", [
    ("--lr nan", "lr must be a number above 0, and finite, not 'nan'"), ("--minutes inf", "minutes must"), ("--epochs nan", "epochs must"),
    ("--target_loss -inf", "target_loss must"), ("--save_minutes nan", "save_minutes must"), ("--grad_clip nan", "grad_clip must"), ("--weight_decay nan", "weight_decay must"),
    ("--lr -1e-4", "lr must"), ("--ema_decay 1", "ema_decay must be a number from 0 to below 1"), ("--warmup 1.5", "warmup must be a whole number of steps, such as 200, or a part of all, such as .05 or 5%, not '1.5'"), ("--warmup 100%", "warmup must"),
    ("--warmup=-5%", "warmup must"), ("--eval_every 0", "eval_every must be a whole number of steps"), ("--save_every 10min", "save_every must .*not '10min'"), ("--eval_every nan", "eval_every must"), ("--save_every 1e16", "save_every must"),
    ("--eval_every 5 --num_evals 3", "num_evals and eval_every each say how often: give one"), ("--save_every 5 --save_minutes 3", "save_minutes and save_every each"), ("--steps 1.5", "steps must be a whole"),
    ("--steps x", "steps must"), ("--steps=", "steps must"), ("--steps 1e30", "steps must"), ("--keep_last 0", "keep_last must"), ("--data=", "data must be a text that isn't empty"),
    ("--out=", "out must"), ("--resume=", "resume must be the folder of a run"), ("--steps 3 --minutes 1", "steps and minutes each say how long"),
    ("--steps 3 --total_tokens 9", "steps and total_tokens each"), ("--minutes 3 --total_tokens 9", "total_tokens and minutes each"),
    ("--epochs 2 --steps 3", "epochs and steps each say how long to train"), ("--total_tokens 9 --step_tokens 10", "fewer than the 10 of one step"),
    ("--epochs 2 --stream", "epochs is no length of a stream"), ("--tokens 9", "unknown option --tokens, did you mean .*--step_tokens"), ("--ste 9", "unknown option --ste"), ("--lr", "expected one argument"),
    ("there", "no option takes there"), ("--stream=yes", "ignored explicit argument"), ("--lr 0", "lr must be a number above 0"),
    ("--lr null", "lr must be a number"), ("--micro_batch_size 0", "micro_batch_size must be a whole number from 1"), ("--vocab 4000000000", "vocab must .* to 1e\\+07")], ids=str)
def test_refused(args, message):
    with fails(InputError, message): told(*args.split())

@pytest.mark.parametrize("config, args", [(DataOptions, "--workers 10000000"), (DataOptions, "--vocab 4000000000"), (LadderOptions, "--batch_size 1000000000"),
                                          (LrOptions, "--rates 1000000000"), (RaceOptions, "--seeds 1000000000")], ids=str)
def test_what_would_take_all_memory(config, args):
    "Bounds of options, each of which costs a process, a run or memory"
    with fails(InputError, args.split()[0][2:], " to 1"): told(*args.split(), config=config)

def test_too_many_processes(monkeypatch, capsys):
    "None of them is started; a number that torchrun's variables can't have is named"
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("llm_speedrun.train.launch.run_torchrun", lambda words: pytest.fail("processes are started"))
    with pytest.raises(SystemExit, match="2"): speedrun_train(["--gpus", "1000000000"])
    assert re.match("error: gpus is 1000000000, and .*: choose ", capsys.readouterr().err)
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(SystemExit, match="2"): speedrun_train(["--steps", "1"])
    assert capsys.readouterr().err.startswith("error: the environment variable WORLD_SIZE is 'x', and must be a whole number from 1")

def test_out_of_main_memory(capsys):
    "PyTorch's allocator and NumPy's say how much: a line in place of a traceback"
    for f in (lambda: torch.empty(10**16), lambda: np.zeros(10**17)):
        with pytest.raises(SystemExit, match="2"): clean_errors(f)
        assert re.fullmatch(r"error: out of main memory: this machine has no [\d.]+ \w+ left. Choose smaller .*\n", capsys.readouterr().err)

@pytest.mark.parametrize("given", [{}, dict(grad_clip=0.), dict(weight_decay=0., warmup=0.)])
def test_unset_is_not_zero(tmp_path, given):
    "A file with all options as they are keeps those unset that were; a 0 is one that was given"
    c = TrainConfig(**given)
    (tmp_path/"a.toml").write_text(to_toml(c), encoding="utf-8")
    assert told("--config", str(tmp_path/"a.toml")) == (c, given.keys())
    assert c.lr is None and (c.grad_clip == 0.) == ("grad_clip" in given)

@pytest.mark.parametrize("value", ["0", "1", "2", "-1", "nan"])
def test_val_frac(value):
    with fails(InputError, "val_frac must be a number above 0 to below 1"): told("--val_frac", value, config=DataOptions)

def test_a_config_that_is_read_back_is_checked():
    "By the bounds of the command line; and so is one that is made in Python"
    for bad in ('{"lr": -1}', '{"steps": "3"}', '{"warmup": 2.5}', '{"data": ""}', '[]', 'null', '{"lr": 1e999}'):
        with fails(InputError, "config.json"): decoded(bad.encode(), TrainConfig, "config.json")
    for bad in (dict(lr=math.nan), dict(steps=1.5), dict(data=None), dict(warmup=math.inf)):
        with fails(InputError, [*bad][0]): TrainConfig(**bad)

def test_debug_shows_where(tmp_path):
    "With --debug an error has its traceback, whatever the command; without, it is one line"
    for name, args in dict(speedrun_report=["nowhere"], speedrun_train=["--no-such-option"]).items():
        plain, debug = (run(tmp_path, name, *args, *more) for more in ([], ["--debug"]))
        assert plain.returncode == 2 and plain.stderr.count("\n") == 1 and plain.stderr.startswith("error: ")
        assert debug.returncode == 1 and "Traceback" in debug.stderr

def test_rungs_list(capsys):
    "Every rung with what it does and its options, whichever command is asked"
    for f in (speedrun_train, speedrun_ladder, speedrun_doctor):
        f(["--rungs", "list"])
        said = capsys.readouterr().out
        for name, r in RUNGS.items(): assert re.search(rf"^{name} +{re.escape(inspect.getdoc(r)[:20])}", said, re.M), name
        assert re.search(r"^  fp8:grad=e5m2 +the gradients' format", said, re.M)

@pytest.mark.parametrize("words, said", [
    (["--learning_rate", "1e-3"], "--lr"), (["--optimizer=adamw"], "--recipe"), (["--dtype", "bf16"], "--rungs bf16"), (["--bf16"], "--rungs bf16"),
    (["--compile"], "--rungs tf32,bf16,flash,compile"), (["--n_layer", "6"], "--layers"), (["--d_model", "6"], "--width"), (["--batch-size", "8"], "--step_tokens .* --micro_batch_size"),
    (["--max_steps", "9"], "--steps"), (["--num_train_epochs", "3"], "--epochs"), (["--output_dir", "x"], "--out .* --name"), (["--wandb"], "--loggers wandb"),
    (["--num_workers", "4"], "a thread reads ahead"), (["--warmup_steps", "100"], "--warmup takes steps"), (["--eval_steps", "100"], "--eval_every .* --num_evals"), (["--save_steps", "100"], "--save_every .* --save_minutes"), (["--no-compile"], "--rungs")])
def test_names_of_other_tools(words, said):
    "Each in one sentence; a name that is an option of ours with a dash is that option"
    with fails(InputError, f"there is no option {normalize_args(words)[0].partition('=')[0]}: .*{said}"): told(*words)
    assert told("--weight-decay", ".1")[0].weight_decay == .1

def test_other_tools_names_are_no_options():
    "And what is advised exists; a command that lacks it says nothing of it"
    every = {o.name for o in option_specs(TrainConfig)}
    for name, said in OTHER_TOOLS.items():
        assert name not in every and {*re.findall(r"--(\w+)", said)} <= every, name
        assert explain_name(f"--{name}", [f"--{n}" for n in every]) and explain_name(name, every)
    with fails(InputError, "unknown option --epochs"): told("--epochs", "3", config=DataOptions)
    with fails(InputError, "unknown option --learning_rate"): told("--learning_rate", "3", config=DataOptions)

def lists_of_names(tree):
    "A module's lists of names: texts that are split, tuples, lists and sets of texts"
    for o in ast.walk(tree):
        if isinstance(o, ast.Call) and getattr(o.func, "attr", "") == "split" and isinstance(o.func.value, ast.Constant): yield str(o.func.value.value).split()
        if isinstance(o, (ast.Tuple, ast.List, ast.Set)): yield [v.value for v in o.elts if isinstance(v, ast.Constant) and isinstance(v.value, str)]

def no_options(names):
    "Those of a list of options that no command has; of a list of anything else none"
    known = set().union(*({o.name for o in option_specs(f.config)} for f in COMMANDS.values()))
    wrong = [n for n in names if n not in known]
    return wrong if len(names) > 3 and len(wrong) < .4*len(names) else []

def test_lists_name_options_that_exist():
    "In the whole package: such as the options that a race sets, a resumed run keeps, or a command hides"
    found = 0
    for path in (ROOT/"llm_speedrun").rglob("*.py"):
        for names in lists_of_names(ast.parse(path.read_text(encoding="utf-8"))):
            assert not no_options(names), (path.name, no_options(names))
            found += len(names) > 2 and sum(n in {f.name for f in fields(TrainConfig)} for n in names) > .6*len(names)
    assert found > 5

def test_an_option_that_is_gone_is_found():
    assert no_options("plugin data seed name out overwrite resume target_loss gpus epochs evals stream seq".split()) == ["evals", "seq"]
    assert not no_options("loss val_loss lr grad_norm tok_s train_s".split())

# What messages advise

ALL = "train doctor"
CAN_PRINT = { # module, or one of its options -> the commands that can print its messages; others: `ALL` and the ladder
    "rungs.documents": ALL, ("architectures", "--heads"): ALL, ("architectures", "--kv_heads"): ALL, ("choices", "--retune"): ALL, ("train.autotune", "--seq_len"): ALL, **dict.fromkeys("distributed.world distributed.spawn distributed.liveness distributed.collectives sharding".split(), ALL),
    "tools.export": "export", "pretrained": "export sample eval train doctor", "tools.sample": "sample", "tools.evals": "eval", "tools.explain": "explain", "tools.scores": ALL, "tools.likelihood": "eval", "train.ladder": "ladder", "train.report": "report train doctor",
    **dict.fromkeys("train.trainer train.callbacks train.run_dir train.checkpointer train.train_data train.resolve train.coordinator train.validator train.metrics".split(), ALL),
    "tools.doctor": "doctor", "tools.machine_checks": "doctor", "checkpoint.load": ALL, "checkpoint.save": ALL, "checkpoint.save_sharded": ALL, "checkpoint.format": ALL, "checkpoint.state": ALL, "data.prepare_data": f"data {ALL}", "data.encoder_pool": f"data {ALL}",
    "data.batches": f"data {ALL}", "data.corpus": f"data {ALL}", "recipes.schedules": ALL, "io_utils": f"data export ladder {ALL}",
    ("recipes.model_registry", "--recipe"): "train", ("recipes.recipe", "--recipe"): "train doctor lr", ("recipes.recipe_spec", "--recipe"): "train doctor lr", "tools.comparison": "lr", ("tools.comparison", "--out"): "compare", **dict.fromkeys("benchmarks.race benchmarks.clock benchmarks.adapters benchmarks.track benchmarks.track_logs benchmarks.confirm".split(), "race"),
    ("benchmarks.speed_run", "--overwrite"): "train", ("benchmarks.confirm", "--step_tokens"): "train", ("benchmarks.confirm", "--micro_batch_size"): "train",
    **{("benchmarks.race", f"--{k}"): "train" for k in "epochs name out overwrite sample_tokens save_minutes seed".split()}}    # our own runs' command line
EVERY = [c.removeprefix("speedrun_") for c in COMMANDS]
ELSEWHERE = {"--pre", "--query", "--format", "--master_port", "--shm", "--long", "--depth"} # of pip, nvidia-smi, torchrun, docker, zstd, git

@lru_cache
def has(name): return {f"--{o.name}" for o in option_specs(COMMANDS[f"speedrun_{name}"].config)} | {"--debug", "--help"}

def messages(tree):
    "A module's texts that aren't docstrings, an f-string with its braces emptied"
    inside = {id(v) for o in ast.walk(tree) if isinstance(o, ast.JoinedStr) for v in ast.walk(o) if v is not o}
    docs = {id(o.value) for o in ast.walk(tree) if isinstance(o, ast.Expr)}
    for o in ast.walk(tree):
        if id(o) in inside | docs: continue
        if isinstance(o, ast.JoinedStr): yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in o.values)
        if isinstance(o, ast.Constant) and isinstance(o.value, str): yield o.value

def wrong_advice(text, module):
    "Options in a message that not every command which can print it has, nor the command named before them"
    for m in re.finditer(r"--[a-z]\w*|(?<=\bset )\w+_\w+|(?<=\bwith )\w+_\w+", text):
        if "_" in m[0] and not m[0].startswith("-") and not any(f"--{m[0]}" in has(c) for c in EVERY): continue # no option
        named, option = re.findall(r"speedrun_(\w+)", text[:m.start()]), f"--{m[0].lstrip('-')}"
        for c in named[-1:] or CAN_PRINT.get((module, option), CAN_PRINT.get(module, f"{ALL} ladder")).split():
            if option not in has(c) | ELSEWHERE: yield f"speedrun_{c} has no {option}"

def test_advice_names_options_that_exist():
    "In messages of the whole package"
    for path in (ROOT/"llm_speedrun").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT/"llm_speedrun").with_suffix("").parts)
        if module in ("_modidx", "cli", "train.config", "train.launch"): continue
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            assert not [*wrong_advice(text, module)], (module, text)

def test_wrong_advice_is_found():
    for text in ("take fewer --workers", "{} is too little; set val_frac"): assert [*wrong_advice(text, "train.trainer")]
    assert [*wrong_advice("speedrun_train --val_frac", "data.prepare_data")]
    assert not [*wrong_advice("tokenize with speedrun_data --tokenizer {}", "train.trainer")]

@pytest.mark.skipif(os.name != "posix", reason="asks POSIX for permissions")
def test_a_resumed_run_stays_where_it_is(tmp_path, monkeypatch):
    "Where its folder can't be written into, `--out` is no advice: it can't change"
    train(options(tmp_path), progress=False)
    monkeypatch.setattr("llm_speedrun.io_utils.os.access", lambda *a: False)
    with fails(OSError, "look at its permissions"): train(TrainConfig(resume=str(tmp_path/"runs/run"), steps=9), progress=False)
    with fails(OSError, "choose another --out"): train(options(tmp_path, name="new"), progress=False)

@pytest.mark.parametrize("given", [{"steps", "target_loss"}, {"steps"}], ids=["two", "one"])
def test_given_on_resume(tmp_path, given):
    "A target that is given as 0 is cleared, though that is the default; one that isn't given stays"
    train(options(tmp_path, target_loss=1e-9), progress=False)
    trainer, _ = train(TrainConfig(resume=str(tmp_path/"runs/run"), steps=8), progress=False, given=given | {"resume"})
    assert trainer.cfg.target_loss == (0. if "target_loss" in given else 1e-9)

def test_total_tokens(tmp_path):
    "A budget of tokens is as many whole steps as it pays for"
    trainer, _ = train(options(tmp_path, steps=0, total_tokens=64*5 + 63), progress=False)
    assert (trainer.cfg.step_tokens, trainer.done) == (64, 5)
    cfg = options(tmp_path, name="other")
    with fails(InputError, "total_tokens"): train(TrainConfig(**vars(cfg) | dict(total_tokens=640)), progress=False)
    assert (cfg.step_tokens, cfg.grad_accum_steps) == (0, 1) # the caller's options stay as they are

# Runs

def test_trains_on_a_folder_of_text(tmp_path):
    "`--data <folder of .txt>` tokenizes, trains, prints a sample and where everything is"
    texts = tmp_path/"texts"
    texts.mkdir()
    for i in range(120): (texts/f"{i}.txt").write_text(f"Document {i}. The fox jumps over the lazy dog, {i} times.\n" * 5)
    res = run(tmp_path, "speedrun_train", "--data", texts, *QUICK, "--vocab", 300, "--out", "mine", "--name", "a")
    assert res.returncode == 0, res.stderr
    for part in ("Tokenizing", "--- sample ---", "validation loss", "everything is in mine/a/"): assert part in res.stdout
    for name in ("model.safetensors", "metrics.jsonl", "loss.png", "tokenizer.json"): assert (tmp_path/"mine/a"/name).exists()
    assert not (tmp_path/"runs").exists() and re.fullmatch(r"choices.json choices.json.lock texts-\w+", " ".join(sorted(p.name for p in (tmp_path/"cache").iterdir())))

def test_trains_on_a_nanogpt_bin(tmp_path):
    "`--data` takes nanoGPT's train.bin, with the val.bin beside it; the run's folder has a name by default"
    write_bins(tmp_path/"bins")
    res = run(tmp_path, "speedrun_train", "--data", "bins/train.bin", *QUICK, "--vocab", VOCAB, "--recipe", "adamw")
    assert res.returncode == 0, res.stderr
    folder, = (tmp_path/"runs").iterdir()
    assert folder.name.startswith("tiny-") and f"everything is in runs/{folder.name}/" in res.stdout
    assert (folder/"model.safetensors").exists()

def test_error_in_a_process(tmp_path):
    "An error that a user can make ends the command with one line and exit code 2"
    res = run(tmp_path, "speedrun_train", "--data", "nowhere.txt", *QUICK)
    assert (res.returncode, res.stdout) == (2, "") and not (tmp_path/"runs").exists()
    assert re.fullmatch(r"error: 'nowhere.txt' is neither a corpus .*\n", res.stderr)

ERRORS = [
    (dict(data="nowhere"), "'nowhere' is neither a corpus"), (dict(data="empty.txt"), "empty.txt has no text"),
    (dict(data="latin.txt"), "latin.txt is not UTF-8"), (dict(data="odd.bin"), "odd.bin has 4097 bytes"),
    (dict(data="short.bin"), "short.bin: .* fewer than one batch of 4 x 16"),
    (dict(data="high.bin"), "high.bin: token 999"),
    (dict(data="a.json"), "a.json is one JSON document"), (dict(data="bad.jsonl"), "bad.jsonl line 1 is not JSON"),
    (dict(model="124n"), "unknown model '124n'. Did you mean '124m'"),
    (dict(rungs="fastets"), "unknown rung or preset 'fastets'. Did you mean 'fastest'"),
    (dict(rungs="tf32,flash,tf32"), "'tf32' is applied twice"),
    (dict(rungs="bf16"), "'bf16' cannot run here: it is an old card"),
    (dict(width=33), "a width of 33 is no whole number"), (dict(micro_batch_size=-4), "micro_batch_size must be a whole number from 1"),
    (dict(step_tokens=-1), "step_tokens must be"), (dict(step_tokens=40), "step_tokens 40 are no whole number"),
    (dict(steps=0, total_tokens=63), "total_tokens 63 are fewer than the 64 of one step"),
    (dict(out="a.json"), "a.json"), (dict(name="there"), "there exists already"),
    (dict(lr=1e30, steps=20), "5 steps in a row")]

@pytest.fixture
def there(tmp_path, monkeypatch):
    "A folder of bad inputs, as the current one; bf16 can't run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(tmp_path/"cache"))
    monkeypatch.setattr(find_rung("bf16"), "needs", lambda: "it is an old card")
    bad = {"empty.txt": b"", "latin.txt": b"caf\xe9", "odd.bin": b"\1"*4097, "a.json": b"{}", "bad.jsonl": b"{\n"}
    for name, b in bad.items(): (tmp_path/name).write_bytes(b)
    for name, n, high in (("short.bin", 50, 9), ("high.bin", 5000, 999)): np.full(n, high, "<u2").tofile(tmp_path/name)
    (tmp_path/"runs/there").mkdir(parents=True)
    return tmp_path

@pytest.mark.parametrize("option,message", ERRORS, ids=str)
def test_error(there, capsys, option, message):
    "Each error that a user can make: exit code 2, one line that names the thing, nothing in the folder that exists"
    with pytest.raises(SystemExit) as e: speedrun_train(words(options(there, out="runs"), **option))
    lines = [o for o in capsys.readouterr().err.splitlines() if "step/s" not in o and o.strip()]
    assert e.value.code == 2 and len(lines) == 1 and re.match(f"error: .*{message}", lines[0]), lines
    assert not list((there/"runs/there").iterdir())

LADDER = LadderOptions(model="nano", rungs="naive", batch_size=1, out="ladder")

@pytest.mark.parametrize("option,message", [
    (dict(batch_size=-1), "batch_size must be a whole number from 0 .*, not '-1'"), (dict(model="124n"), "unknown model '124n'"),
    (dict(rungs="flsh"), "unknown rung or preset 'flsh'"),
    (dict(rungs="tf32,flash", only="flsh"), "unknown rung of this ladder 'flsh'. Did you mean 'flash'"),
    (dict(rungs="fp8,fused_ops"), "rung 'fp8' builds on 'bf16': add that to the list"),
    (dict(rungs="fp8"), "rung 'fp8' builds on 'bf16' and 'fused_ops': add that to the list"),
    (dict(rungs="flash,checkpoint,selective_checkpoint"), "exclude each other"),
    (dict(rungs="bf16"), "'bf16' cannot run here"), (dict(out="a.json"), "a.json")], ids=str)
def test_ladder_error(there, capsys, option, message):
    "The same for `speedrun_ladder`"
    with pytest.raises(SystemExit) as e: speedrun_ladder(words(LADDER, **option))
    lines = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and len(lines) == 1 and re.match(f"error: .*{message}", lines[0]), lines
    assert not (there/"ladder").exists()

def test_ladder_overwrites_nothing(there, capsys):
    "A folder that holds a ladder is not written into unasked"
    (there/"ladder").mkdir()
    (there/"ladder/ladder.json").write_text("mine")
    with pytest.raises(SystemExit): speedrun_ladder(words(LADDER))
    assert (there/"ladder/ladder.json").read_text() == "mine" and "ladder" in capsys.readouterr().err

def test_ladder(there, capsys, monkeypatch):
    "`speedrun_ladder` prints its table, with the machine below it, and writes records, table and chart"
    monkeypatch.setattr(find_rung("bf16"), "needs", lambda: "")
    speedrun_ladder(words(LADDER, rungs="bf16,flash"))
    said = capsys.readouterr().out
    assert "saved in ladder/" in said and re.search(r"\| fp32 .*\n\| bf16 .*×.*\n\| flash .*×", said)
    assert "smoke run" in said or "driver" in said
    folder = there/"ladder"
    assert {p.name for p in folder.iterdir()} == {"ladder.json", "ladder.md", "ladder.png"}
    records = json.loads((folder/"ladder.json").read_text())
    assert [(r["rung"], r["before"]) for r in records] == [("fp32", None), ("bf16", "fp32"), ("flash", "bf16")]
    assert (folder/"ladder.md").read_text(encoding="utf-8") in said
    assert (folder/"ladder.png").read_bytes().startswith(b"\x89PNG")

@pytest.mark.parametrize("only,rungs", [
    ("flash", [("bf16", None), ("flash", "bf16")]), ("bf16, flash", [("fp32", None), ("bf16", "fp32"), ("flash", "bf16")]),
    ("bf16,fused_adamw", [("fp32", None), ("bf16", "fp32"), ("flash", None), ("fused_adamw", "flash")])])
def test_ladder_only(there, capsys, monkeypatch, only, rungs):
    "`--only` measures some rungs, each against the whole ladder below it"
    monkeypatch.setattr(find_rung("bf16"), "needs", lambda: "")
    speedrun_ladder(words(LADDER, rungs="bf16,flash,fused_adamw", only=only))
    records = json.loads((there/"ladder/ladder.json").read_text())
    assert [(r["rung"], r["before"]) for r in records] == rungs and all(r["kept"] for r in records)
    names = [rung_name(r) for r in records[-1]["rungs"]]
    assert names == ["bf16", "flash", "fused_adamw"][:len(names)] and "flash:backend=" in records[-1]["rungs"][1]

def test_ladder_of_a_preset(there, capsys, monkeypatch):
    "A preset is a ladder; what can't run here is not in it"
    monkeypatch.setattr(find_rung("bf16"), "needs", lambda: "")
    monkeypatch.setattr(find_rung("tf32"), "needs", lambda: "it is an old card")
    speedrun_ladder(words(LADDER, rungs="safe"))
    records = json.loads((there/"ladder/ladder.json").read_text())
    assert [r["rung"] for r in records] == ["fp32", "bf16", "flash", "fused_adamw"]

# What the operating system says, in words

def in_one_line(capsys, command, *args):
    "The one line with which a command ends"
    with pytest.raises(SystemExit) as e: COMMANDS[command]([str(a) for a in args])
    lines = [o for o in capsys.readouterr().err.splitlines() if "step/s" not in o and o.strip()]
    assert e.value.code == 2 and len(lines) == 1 and "Errno" not in lines[0], lines
    return lines[0]

@pytest.mark.parametrize("option,message", [
    (dict(config="nosuch.toml"), "nosuch.toml: no such file or folder: check the path"), (dict(name="x"*300), "xxx: the name is too long: choose"),
    (dict(config="a.json/b.toml"), "b.toml: a part of this path is a file, not a folder: check the path"),
    pytest.param(dict(out="/proc"), "/proc is no folder that one can write into: choose another --out",
                 marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="it is Linux'"))], ids=lambda o: str(o)[:40])
def test_paths_of_the_user(there, capsys, option, message):
    assert message in in_one_line(capsys, "speedrun_train", *words(options(there) if "out" in option else TrainConfig(), **option))

def test_full_disk(tmp_path, monkeypatch):
    "The old file is whole, the new one is gone, and the error says what to do; the same of a file of tensors"
    import torch
    from safetensors import SafetensorError
    from llm_speedrun.io_utils import replace_file
    from llm_speedrun.checkpoint import format
    def full(path, *args, **kw): path.write_bytes(b"half"); raise OSError(28, "No space left on device")
    replace_file(tmp_path/"a.txt", "old")
    with monkeypatch.context() as m:
        m.setattr(Path, "write_text", full)
        with fails(OSError, "^.*a.txt can't be written: no space left on device: make room"): replace_file(tmp_path/"a.txt", "new")
    assert (tmp_path/"a.txt").read_text() == "old"
    for e in (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), OSError(28, "No space left on device")):
        def half(tensors, path, metadata): path.write_bytes(b"half"); raise e
        monkeypatch.setattr(format, "save_file", half)
        with fails(OSError, "^.*w.safetensors can't be written: no space left on device: make room"):
            format.write_tensors(dict(a=torch.ones(2)), tmp_path/"w.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]

@pytest.mark.skipif(os.name != "posix", reason="a pipe's end as POSIX has it")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("code,want", [
    ("for i in range(99): print(i, flush=True)", 141), ("print(1)", 0), ("print(1); sys.exit(1)", 1),
    ("raise InputError('do that')", 2)])
def test_nobody_reads_on(code, want, buffered):
    "After `| head -1` a command ends without a word, also where Python writes at its end; a mistake is still told"
    script = f"import sys\nfrom llm_speedrun.io_utils import InputError, clean_errors\ndef f():\n    sys.stdin.read()\n    {code}\nclean_errors(f)"
    env = os.environ | dict(PYTHONUNBUFFERED="" if buffered else "1", PYTHONPATH=str(ROOT))
    p = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    p.stdout.close(); p.stdin.close()
    said = p.stderr.read().decode(); p.stderr.close()
    if not buffered and "print" in code: want = 141 # the first print meets it
    assert (p.wait(), said) == (want, "error: do that\n" if want == 2 else "")

def test_another_pipe(capsys):
    "A pipe of ours that broke is an error, since standard output is still read"
    from llm_speedrun.io_utils import clean_errors
    def f(): raise BrokenPipeError(32, "Broken pipe")
    with pytest.raises(SystemExit) as e: clean_errors(f)
    assert e.value.code == 2 and "Broken pipe" in capsys.readouterr().err

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is Linux'")
def test_output_to_a_full_disk():
    script = "from llm_speedrun.io_utils import InputError, clean_errors\nclean_errors(lambda: print(1))"
    with open("/dev/full", "w") as out: p = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, text=True,
                                                           env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert (p.returncode, p.stderr) == (2, "error: no space left on device: make room, then try again\n")

def test_without_a_cache(there, capsys, monkeypatch):
    "Tokens need none; text does, and the error names the variable"
    import shutil
    from helpers.tiny_runs import texts
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(there/"a.json/cache")) # below a file
    write_bins(there/"bins"); texts(there/"texts")
    train(options(there, data="bins"), progress=False)
    said = in_one_line(capsys, "speedrun_train", *words(options(there, data="texts", name="other")))
    assert re.search(r"the cache .*a\.json.cache can't be made \(.*\): set LLM_SPEEDRUN_CACHE \(or XDG_CACHE_HOME\)", said)
    (there/"cache").mkdir()
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(there/"cache"))
    monkeypatch.setattr("llm_speedrun.io_utils.os.access", lambda path, mode: Path(path) != there/"cache")
    assert re.search("cache is no folder that one can write into: set LLM_SPEEDRUN_CACHE", in_one_line(
        capsys, "speedrun_train", *words(options(there, data="texts", name="other"))))
