"The trainer refuses bad options before it writes anything, loses nothing when stopped, and repeats itself exactly."
import copy, dataclasses, io, itertools, json, os, pickle, re, shlex, signal, subprocess, sys, time
from types import SimpleNamespace
import numpy as np, pytest, torch
from safetensors.torch import load_file
from llm_speedrun.data import corpus
from llm_speedrun.train import ladder
from llm_speedrun.data.batches import bigram_loss
from llm_speedrun.train import autotune, checkpointer, resolve
from llm_speedrun.runs import baseline, build, rung
from llm_speedrun.rung_registry import RUNGS, find_rung, rung_name, rung_specs
from llm_speedrun.step_builder import has_auto_options
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.autotune import drop_failed_rung, NoRoom
from llm_speedrun.train.presets import PRESETS, without_rung
from llm_speedrun.data.corpus import train_tokenizer, write_shards
from llm_speedrun.io_utils import InputError, RunError, clean_errors
from llm_speedrun.recipes.schedules import lr_at
from llm_speedrun.train.run_charts import loss_chart
from llm_speedrun.train.config import LadderOptions, TrainConfig
from llm_speedrun.train.console import Progress
from llm_speedrun.train.metrics import read_rows
from llm_speedrun.train.launch import report
from llm_speedrun.train.trainer import train, Trainer
from llm_speedrun.train.validator import TextSampler
from llm_speedrun.checkpoint.format import newest
from helpers import quick_programs
from helpers.tiny_runs import NANO, VOCAB, fails, nano, options, texts, write_bins
from make_readme import ROOT
from helpers.timeouts import TIMEOUT, wait_until

FILES = {"checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "sample.txt", "result.json", "loss.png", "report.html"}

def rows(folder): return [json.loads(o) for o in (folder/"metrics.jsonl").read_text().splitlines()]
def curve(trainer): return [r["loss"] for r in trainer.rows() if "loss" in r]
def weights(trainer): return {k: v.detach().clone() for k, v in trainer.run.model.state_dict().items()}
def names(folder): return {p.name for p in folder.iterdir()} - {".lock"}

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "A run of 24 steps, its results and its folder's parent"
    folder = tmp_path_factory.mktemp("finished")
    return *train(options(folder, steps=24, num_evals=4, seed=3), progress=False), folder

# Options

@pytest.mark.parametrize("option,kind,message", [
    (dict(micro_batch_size=-1), ValueError, "micro_batch_size must be a whole number from 1 .*not -1"),
    (dict(grad_accum_steps=3, micro_batch_size=None, step_tokens=64), ValueError, "4 sequences, which grad_accum_steps 3 doesn't divide"),
    (dict(step_tokens=100), ValueError, "step_tokens 100 are no whole number of sequences of 16"),
    (dict(step_tokens=128, grad_accum_steps=1), ValueError, "1 batches of 4 sequences are not the 8 sequences of 128"),
    (dict(memory_limit="h10"), ValueError, "unknown kind of hardware 'h10'.*'h100'"),
    (dict(schedule="cosin"), ValueError, "unknown schedule 'cosin'.*'cosine'"),
    (dict(ema_decay=1.), ValueError, "ema_decay must be a number from 0 to below 1, not 1"),
    (dict(target_loss=-1.), ValueError, "target_loss must be a number from 0"),
    (dict(grad_accum_steps=-2), ValueError, "grad_accum_steps must be .* not -2"),
    (dict(num_evals=0), ValueError, "num_evals must be a whole number from 1 .*not 0"),
    (dict(eval_tokens=-1), ValueError, "eval_tokens must be .*not -1"),
    (dict(seq_len=-3), ValueError, "seq_len must be .*not -3"),
    (dict(width=33), ValueError, "a width of 33 is no whole number of heads of dimension 8: give --heads"),
    (dict(heads=3), ValueError, "3 query heads are no multiple of 2, those for each KV head of 'nano': give --kv_heads"),
    (dict(layers=0), ValueError, "layers must be a whole number from 1 .*not 0"),
    (dict(steps=-1), ValueError, "steps must be .*not -1"),
    (dict(minutes=-.1), ValueError, "minutes must be a number from 0"),
    (dict(lr=-1.), ValueError, "lr must be a number above 0, and finite, not -1"),
    (dict(weight_decay=-1.), ValueError, "weight_decay.* -1"),
    (dict(grad_clip=-1.), ValueError, "grad_clip"),
    (dict(epochs=0.), ValueError, "epochs must be a number above 0"),
    (dict(warmup=7), ValueError, "a warmup of 7 steps is longer than the run, which has 6: choose fewer"),
    (dict(warmup=1.5), ValueError, "warmup must be a whole number of steps"),
    (dict(save_minutes=1., save_every=3), ValueError, "save_minutes and save_every each say how often"),
    (dict(num_evals=2, eval_every=3), ValueError, "num_evals and eval_every each say how often"),
    (dict(epochs=2.), ValueError, "epochs and steps each say how long to train"),
    (dict(seed=-1), ValueError, "seed"),
    (dict(vocab=-1), ValueError, "vocab"),
    (dict(model="nanno"), ValueError, "unknown model 'nanno'.*'nano'"),
    (dict(rungs="flsh"), ValueError, "unknown rung or preset 'flsh'.*'flash'"),
    (dict(rungs="bf16,fp16"), ValueError, "exclude each other"),
    (dict(rungs="flash,flash"), ValueError, "applied twice"),
    (dict(data="stdlb"), FileNotFoundError, "'stdlb' is neither a corpus .* Did you mean stdlib"),
    (dict(micro_batch_size=300), ValueError, "train.bin: 4,097 tokens are fewer than one batch of 300 x 16"),
], ids=str)
def test_bad_option(tmp_path, option, kind, message):
    "An option that can't be is refused by name before anything is written"
    with pytest.raises(kind, match=message): train(options(tmp_path, **option), progress=False)
    assert names(tmp_path) <= {"bins"}

def test_rung_that_cannot_run(tmp_path, monkeypatch):
    "A rung that this machine can't run is refused with the reason before anything is written"
    monkeypatch.setattr(find_rung("tf32"), "needs", lambda: "TF32 needs another card")
    with fails(RuntimeError, "'tf32' cannot run here: TF32 needs another card"):
        train(options(tmp_path, rungs="tf32"), progress=False)
    assert names(tmp_path) == {"bins"}

def test_a_recipe_and_a_rung_that_clash(tmp_path):
    "Refused before the data is opened, which may take long"
    with fails(InputError, "recipe 'muon' doesn't go with the rung 'adamw8bit'"):
        Trainer(options(tmp_path, recipe="muon", rungs="bf16,adamw8bit", data="nowhere"), progress=False)
    with fails(FileNotFoundError, "nowhere"): Trainer(options(tmp_path, recipe="muon", rungs="auto", data="nowhere"), progress=False)

@pytest.mark.parametrize("split,n", [("val", 10), ("val", 0), ("train", 0)])
def test_bad_bin(tmp_path, split, n):
    "A token file that is empty, or shorter than a sequence, is named before anything is written"
    np.zeros(n, "<u2").tofile(write_bins(tmp_path/"bins")/f"{split}.bin")
    with fails(ValueError, f"{split}.bin"): train(options(tmp_path, data=str(tmp_path/"bins")), progress=False)
    assert names(tmp_path) == {"bins"}

@pytest.mark.parametrize("split", ["train", "val"])
def test_token_outside_the_vocabulary(tmp_path, split):
    "A token that the model has no row for is named, in either file, before anything is written"
    p = write_bins(tmp_path/"bins")/f"{split}.bin"
    a = np.fromfile(p, "<u2"); a[1000] = 999; a.tofile(p)
    with fails(ValueError, f"{split}.bin: token 999 at position 1000 is outside the vocabulary of {VOCAB}"):
        train(options(tmp_path, data=str(tmp_path/"bins"), eval_tokens=10**6, steps=100), progress=False)
    assert names(tmp_path) == {"bins"}

def test_existing_folder_is_left_alone(tmp_path):
    "A run folder that exists is never written into unasked, and `overwrite` is how one asks"
    run = tmp_path/"runs/run"
    train(options(tmp_path), progress=False)
    was = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with fails(FileExistsError, "run exists already and is left alone", "--name", "--overwrite"):
        train(options(tmp_path, seed=1), progress=False)
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == was
    train(options(tmp_path, seed=1, overwrite=True), progress=False)
    assert names(run) == {*was, "checkpoints"} - {".lock"} and (run/"model.safetensors").read_bytes() != was["model.safetensors"]
    assert json.loads((run/"config.json").read_text())["seed"] == 1

@pytest.mark.parametrize("out", ["file", "file/below"])
def test_unwritable_out(tmp_path, out, monkeypatch):
    "An out folder that can't be made is named before the first step"
    (tmp_path/"file").write_text("in the way")
    monkeypatch.setattr(Stepper, "__call__", lambda *args: pytest.fail("a step was taken"))
    with fails(OSError, re.escape(str(tmp_path/"file"))): train(options(tmp_path, out=str(tmp_path/out)), progress=False)
    assert (tmp_path/"file").read_text() == "in the way"

# What a run leaves

def test_files(finished):
    "A run leaves its files, whole: the options, one row a step and evaluation, the weights, the plot"
    trainer, res, folder = finished
    run = folder/"runs/run"
    assert names(run) == FILES and (run/"loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((run/"config.json").read_text())
    assert config["seed"] == 3 and config["model_config"]["width"] == NANO.width and config["torch"] == torch.__version__
    assert [r["step"] for r in rows(run) if "loss" in r] == list(range(1, 25))
    assert [r["step"] for r in rows(run) if "val_loss" in r] == [6, 12, 18, 24] and rows(run) == trainer.rows()
    assert json.loads((run/"result.json").read_text())["val_loss"] == res["val_loss"] == rows(run)[-1]["val_loss"]
    saved = load_file(run/"model.safetensors")
    assert {f"model.{k}" for k in weights(trainer)} == set(saved)
    assert all(v.cpu().equal(saved[f"model.{k}"]) for k, v in weights(trainer).items())

def test_it_learns(finished, tmp_path):
    "The loss starts at ln V and falls; a learning rate of next to nothing leaves it there, so this can fail"
    trainer, res, _ = finished
    assert abs(curve(trainer)[0] / np.log(NANO.vocab) - 1) < .05
    still, _ = train(options(tmp_path, steps=24, seed=3, lr=1e-9), progress=False)
    assert res["val_loss"] < curve(trainer)[0] - .1 < curve(still)[-1]

def test_same_seed_same_curve(finished, tmp_path):
    "The same seed gives the same losses and weights, bitwise on a CPU; another seed gives others"
    trainer, *_ = finished
    again, _ = train(options(tmp_path, steps=24, num_evals=4, seed=3), progress=False)
    other, _ = train(options(tmp_path, steps=24, num_evals=4, seed=4, name="other"), progress=False)
    if torch.cuda.is_available(): assert np.allclose(curve(again), curve(trainer), atol=1e-3)
    else:
        assert curve(again) == curve(trainer)
        assert all(v.equal(weights(again)[k]) for k, v in weights(trainer).items())
    assert abs(np.subtract(curve(other), curve(trainer))).max() > 1e-2

def test_evaluation_changes_nothing(finished, tmp_path):
    "However often a run evaluates, its losses and weights are the same"
    trainer, *_ = finished
    seldom, _ = train(options(tmp_path, steps=24, num_evals=1, eval_tokens=320, seed=3), progress=False)
    assert np.allclose(curve(seldom), curve(trainer), atol=1e-3 if torch.cuda.is_available() else 0)
    before = weights(seldom)
    assert seldom.step.evaluate([seldom.data.val]) == seldom.step.evaluate([seldom.data.val])
    assert all(v.equal(before[k]) for k, v in weights(seldom).items())
    assert all(p.grad is None for p in seldom.run.model.parameters())

def test_accumulation(finished, tmp_path):
    "Two micro-batches of four are one batch of eight, with its losses and weights, and not those of four alone"
    def run(batch, accumulate):
        cfg = options(tmp_path, micro_batch_size=batch, grad_accum_steps=accumulate, seed=3, name=f"{batch}x{accumulate}")
        return train(cfg, progress=False)[0]
    whole, parts, half = run(8, 1), run(4, 2), run(4, 1)
    assert np.allclose(curve(whole), curve(parts), atol=1e-4) and not np.allclose(curve(whole), curve(half), atol=1e-3)
    for k, v in weights(whole).items(): assert (v - weights(parts)[k]).norm() < 1e-3 * v.norm(), k

def test_schedule():
    "The rate rises over the warm-up, peaks, and falls to a tenth at the last step"
    lrs = [lr_at(i, 100, 1., 10) for i in range(100)]
    assert lrs[0] == .1 and max(lrs) == lrs[9] == lrs[10] == 1. and lrs[-1] == pytest.approx(.1)
    assert lrs[:10] == sorted(lrs[:10]) and lrs[10:] == sorted(lrs[10:], reverse=True)

def test_epochs(tmp_path, capsys):
    "Without `steps`, the text ends a run where it is shorter than the time; time ends it otherwise"
    t = Trainer(options(tmp_path, steps=0, minutes=60., epochs=2., grad_accum_steps=2))
    assert t.cfg.steps == 2*t.data.batches.per_epoch and "2 passes over the text" in capsys.readouterr().out
    assert Trainer(options(tmp_path, steps=0, minutes=1e-3, epochs=1e9, name="b")).cfg.steps < 1e6

def test_epochs_alone(tmp_path):
    "Without minutes they are the length, whatever the machine's speed"
    t = Trainer(options(tmp_path, steps=0, epochs=8.), progress=False, given={"epochs"})
    assert t.cfg.steps == 8*t.data.batches.per_epoch and t.cfg.minutes == 0
    t.fit()
    assert t.done == t.cfg.steps

# Shapes

SHAPES = { # options -> layers, width, heads, kv_heads, head_dim, hidden, longest sequence
    "deep": (dict(layers=5), (5, 32, 4, 2, 8, 48, 16)), "wide": (dict(width=64, seq_len=48), (2, 64, 8, 4, 8, 128, 48)),
    "heads": (dict(heads=3, kv_heads=1, head_dim=24), (2, 32, 3, 1, 24, 48, 16)), "head_dim": (dict(head_dim=16), (2, 32, 2, 1, 16, 48, 16))}

@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_of_its_own(kind, tmp_path):
    "Sizes change the named model; a resumed run has them from its record, and export, sample and evaluation from there"
    sizes, want = SHAPES[kind]
    trainer, res = train(options(tmp_path, steps=4, **sizes), progress=False)
    c = trainer.config
    assert (c.layers, c.width, c.heads, c.kv_heads, c.head_dim, c.hidden, c.seq_len) == want and c.name == f"{c.layers}x{c.width}"
    assert res["sample"] and res["val_loss"] < 10
    again = Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), steps=8), given={"resume", "steps"}, progress=False)
    assert again.config == c
    again.run_dir.release()

def test_a_recipe_leaves_heads_that_are_given(tmp_path):
    "Recipes that read the matrices as heads of 128 do so only where nobody has said otherwise"
    wide = dict(recipe="speedrun", rungs="naive", width=256, steps=2)
    assert Trainer(options(tmp_path, name="a", **wide), progress=False).config.head_dim == 128
    assert Trainer(options(tmp_path, name="b", heads=8, kv_heads=4, **wide), progress=False).config.head_dim == 32

def test_a_shape_is_not_changed_later(tmp_path):
    trainer, _ = train(options(tmp_path, steps=2), progress=False)
    trainer.run_dir.release()
    with fails(InputError, "brings a shape of its own: leave out --width"):
        Trainer(options(tmp_path, model="", init=str(tmp_path/"runs/run"), width=64, name="b"))

def test_longer_sequences_than_before(tmp_path, capsys):
    "Weights that are taken over go on with sequences of any length, and a line says what they haven't seen"
    train(options(tmp_path, steps=2), progress=False)
    trainer, res = train(options(tmp_path, model="", init=str(tmp_path/"runs/run"), seq_len=24, name="b", steps=2))
    assert trainer.config.seq_len == 24 and trainer.run.model.cos.shape[0] == 24 and res["val_loss"] < 10
    assert "was trained on 16 tokens at most" in capsys.readouterr().out
    assert Trainer(options(tmp_path, model="", init=str(tmp_path/"runs/b"), name="c", seq_len=0), progress=False).config.seq_len == 24

# Rungs

@pytest.mark.parametrize("rungs,kind", [
    ("naive", "AdamW"), ("fused_adamw", "AdamW"), ("bf16,bf16_weights", "Bf16AdamW"), ("adamw8bit", "AdamW8bit")])
def test_a_rung_keeps_its_optimizer(tmp_path, rungs, kind):
    "The optimizer is the rung's, with the trainer's learning rates and weight decay, and its weights are saved as they are"
    trainer, res = train(options(tmp_path, rungs=rungs, lr=1e-2, weight_decay=.05), progress=False)
    opt = trainer.step.opt
    assert type(opt).__name__ == kind and bool(opt.defaults.get("fused")) == (rungs == "fused_adamw")
    assert [g["weight_decay"] for g in opt.param_groups] == [.05, 0.] and curve(trainer)[-1] < curve(trainer)[0]
    assert all(abs(float(g["lr"]) - 1e-3) < 1e-9 for g in opt.param_groups)     # the schedule's last
    saved = load_file(tmp_path/"runs/run/model.safetensors")
    for k, v in weights(trainer).items(): assert v.cpu().equal(saved[f"model.{k}"]) and v.dtype == saved[f"model.{k}"].dtype
    assert (torch.bfloat16 in {v.dtype for v in saved.values()}) == (kind == "Bf16AdamW")
    assert res["sample"] and res["val_loss"] < 10

@pytest.mark.parametrize("rungs", [
    "fused_ops", "chunked_ce", "bf16,flash,fused_ops,chunked_ce,fp8", "bf16,fused_ops,chunked_ce,compile",
    "checkpoint", "selective_checkpoint"])
def test_trains_with_every_rung(tmp_path, rungs):
    "A whole run, with evaluation, sample and weights, works under every rung and gives nearly the naive losses"
    trainer, res = train(options(tmp_path, rungs=rungs), progress=False)
    naive, _ = train(options(tmp_path, name="naive"), progress=False)
    assert ["fp8_clipped" in r for r in trainer.rows() if "train_s" in r and "loss" in r] == ["fp8" in rungs]*sum("train_s" in r and "loss" in r for r in naive.rows())
    assert names(tmp_path/"runs/run") == FILES and np.allclose(curve(trainer), curve(naive), atol=.1)
    assert abs(res["val_loss"] - naive.rows()[-1]["val_loss"]) < .1
    assert set(load_file(tmp_path/"runs/run/model.safetensors")) == {f"model.{k}" for k in weights(naive)}

def test_the_ladder_of_a_run(tmp_path, capsys):
    "With `ladder` a run measures what each of its rungs gains, keeps that in its folder and prints it"
    trainer, res = train(options(tmp_path, rungs="flash,chunked_ce", ladder=True))
    assert [r["rung"] for r in trainer.ladder] == ["fp32", "flash", "chunked_ce"] and all(r["kept"] for r in trainer.ladder)
    assert json.loads((tmp_path/"runs/run/ladder.json").read_text()) == trainer.ladder
    report(trainer, res)
    assert "| flash" in capsys.readouterr().out

@pytest.fixture
def refusing(monkeypatch):
    "A preset with a rung whose kernels don't compile, which shows when it is built, and one that builds on that"
    @rung("parts")
    def stubborn(run): raise RunError("rung 'stubborn': its kernels can't run here: a TypeError. Leave the rung out")
    @rung("parts", requires=["stubborn"])
    def needy(run): return run
    monkeypatch.setitem(PRESETS, "safe", "flash stubborn needy fused_adamw")
    yield "stubborn", "needy"
    for k in ("stubborn", "needy"): del RUNGS[k]

def test_a_preset_goes_on_without_a_rung_that_refuses(tmp_path, refusing, capsys):
    "The run says so and notes it, its options don't name it, and it can be gone on with; named by the user the rung is an error"
    trainer, _ = train(options(tmp_path, rungs="safe", recipe="adamw", steps=4))
    assert trainer.run.rungs == ("flash", "fused_adamw") and not {*refusing} & {*trainer.cfg.rungs.split(",")}
    said = " ".join(capsys.readouterr().out.split())
    assert "not stubborn: its kernels can't run here: a TypeError not needy: it builds on stubborn" in said and "Leave" not in said
    assert json.loads((tmp_path/"runs/run/config.json").read_text())["why"]["stubborn"] == "its kernels can't run here: a TypeError"
    again, _ = train(TrainConfig(resume=str(tmp_path/"runs/run"), steps=6), progress=False, given={"steps"})
    assert again.run.rungs == trainer.run.rungs and len(curve(again)) == 6
    with fails(RunError, "its kernels can't run here"): train(options(tmp_path, rungs="flash,stubborn", name="b"), progress=False)

def test_auto_says_what_refuses(tmp_path, refusing, monkeypatch, capsys):
    "A rung that fails here is left out of `auto`, which says so and why; named by the user it is an error"
    monkeypatch.setattr(resolve, "recorded_preset", lambda config: "safe")
    trainer, _ = train(options(tmp_path, rungs="auto", recipe="adamw", steps=2))
    assert trainer.run.rungs == ("flash", "fused_adamw")
    assert "not stubborn: its kernels can't run here: a TypeError" in " ".join(capsys.readouterr().out.split())
    with fails(ValueError, "rung 'bf16_weights' builds on 'bf16': add that to the list"):
        train(options(tmp_path, rungs="bf16_weights", name="b"), progress=False)

def test_a_preset_goes_on_without_a_recording_that_has_no_room(tmp_path, monkeypatch, capsys):
    "The run says so and notes it; of rungs that the user named none gives way"
    named, was, trial, gone = [], resolve.remembered_trial, autotune.find_micro_batch, "cuda_graphs" if torch.cuda.is_available() else "flash" # on a CPU nothing is recorded
    def noted(*args, **kw):
        named.append(kw["named"])
        return was(*args, **kw)
    def tight(config, rungs, *args):
        if gone in map(rung_name, rungs) and not named[-1]: raise NoRoom("not even one sequence")
        return trial(config, rungs, *args)
    monkeypatch.setattr(resolve, "remembered_trial", noted)
    monkeypatch.setattr(autotune, "find_micro_batch", tight)
    monkeypatch.setattr(autotune, "fallback_rungs", lambda rungs: [rungs, without_rung(rungs, gone)])
    monkeypatch.setattr(RUNGS["cuda_graphs"], "needs", lambda: "")
    trainer, _ = train(options(tmp_path, rungs="fastest16", steps=2))
    said = "not cuda_graphs: not even one sequence fits beside a recording"
    assert gone not in trainer.run.rungs and trainer.run.rungs == tuple(trainer.cfg.rungs.split(","))
    assert said in " ".join(capsys.readouterr().out.split())
    assert "one sequence" in json.loads((tmp_path/"runs/run/config.json").read_text())["why"]["cuda_graphs"]
    trainer, _ = train(options(tmp_path, rungs="flash,fused_adamw", steps=2, name="b"), progress=False)
    assert trainer.run.rungs == ("flash", "fused_adamw") and "cuda_graphs" not in trainer.plan.why and named == [False, True]
    monkeypatch.setattr(resolve, "recorded_preset", lambda config: "fastest16")
    train(options(tmp_path, rungs="auto", steps=2, name="c"))
    assert said in " ".join(capsys.readouterr().out.split())

def test_a_refusal_keeps_its_rung_between_processes(refusing):
    "What the first process raises is sent to the others"
    with pytest.raises(RunError) as e: build(NANO, ["stubborn"], "cpu")
    error = pickle.loads(pickle.dumps(e.value))
    assert error.rung == "stubborn" and drop_failed_rung(rung_specs(["flash", "stubborn", "needy"]), error) == rung_specs(["flash"])
    error.rung = "ddp" # without it the processes would train apart
    with fails(RunError, "its kernels can't run here"): drop_failed_rung(rung_specs(["flash", "ddp"]), error)

def test_a_ladder_goes_without_a_rung_that_refuses(refusing, capsys):
    "Before anything is measured"
    c = ladder.drop_unbuildable(LadderOptions(rungs="safe", model="nano"))
    rungs = c.rungs.split(",") # with their options, so that the ladder needn't measure them again
    assert [*map(rung_name, rungs)] == ["flash", "fused_adamw"] and not has_auto_options(rungs) and "not stubborn: its kernels can't run here: a TypeError" in capsys.readouterr().out
    for c in (LadderOptions(rungs="flash,stubborn"), LadderOptions(rungs="auto")): assert ladder.drop_unbuildable(c) is c

# Stopped

def interrupted(monkeypatch, at):
    "Ctrl-C in the middle of step number `at`, 0 being the first after the four that are taken for trial"
    backward, calls = Stepper.forward_backward, []
    def press(self, *args):
        calls.append(1)
        if len(calls) == 4 + at + 1: raise KeyboardInterrupt
        return backward(self, *args)
    monkeypatch.setattr(Stepper, "forward_backward", press)

@pytest.mark.parametrize("at", [0, 1, 13])
def test_interrupted(tmp_path, monkeypatch, at):
    "Ctrl-C at any step leaves everything that a whole run leaves, with the steps that were taken"
    interrupted(monkeypatch, at)
    trainer, res = train(options(tmp_path, steps=1000), progress=False)
    assert res["interrupted"] and res["steps"] == at and names(tmp_path/"runs/run") == FILES - {"checkpoints"}
    assert [r["step"] for r in rows(tmp_path/"runs/run") if "loss" in r] == list(range(1, at + 1))

def test_plot_without_steps(finished):
    "A run stopped before its first step is over still has a plot, with numbers on its axes"
    fig = loss_chart([dict(step=0, val_loss=5.)], 4., "none")
    assert not [t.get_text() for t in fig.axes[0].get_yticklabels() if t.get_text() == "-"]
    assert "training" not in [t.get_text() for t in fig.axes[0].get_legend().get_texts()]

COMMAND = [sys.executable, "-c", "from llm_speedrun.cli import speedrun_train; speedrun_train()"]

def start(folder, rungs, *more):
    "The command in a process of its own, on data in `folder`, with more steps than it will ever take, and `more` words"
    args = dict(data=write_bins(folder/"bins"), model="tiny", rungs=rungs, steps=100_000, micro_batch_size=8, seq_len=32,
                vocab=VOCAB, eval_tokens=128, sample_tokens=4, name="run", out=folder/"runs")
    cmd = [*COMMAND, *(str(o) for k, v in args.items() for o in (f"--{k}", v)), *more]
    return quick_programs.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def when(p, ready):
    "Wait until `ready()`; the process must go on meanwhile"
    def running():
        assert p.poll() is None, p.communicate()
        return True
    return wait_until(ready, running)

posix = pytest.mark.skipif(os.name != "posix", reason="SIGINT can be sent to a process on POSIX alone")

@posix
def test_ctrl_c_in_training(tmp_path):
    "A real Ctrl-C in mid-training: everything is saved, the output says where, the exit code is 130"
    run = tmp_path/"runs/run"
    p = start(tmp_path, "naive")
    when(p, lambda: (run/"metrics.jsonl").exists() and (run/"metrics.jsonl").stat().st_size)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=TIMEOUT)
    assert p.returncode == 130 and "Traceback" not in err, err
    assert f"interrupted; what there is is in {run}/" in out and names(run) == FILES
    steps = json.loads((run/"result.json").read_text())["steps"]
    assert 10 <= steps == [r["step"] for r in rows(run) if "loss" in r][-1] and load_file(run/"model.safetensors")

@posix
def test_ctrl_c_before_training(tmp_path):
    "A real Ctrl-C while the ladder is measured: nothing is written, and the output says so"
    p = start(tmp_path, "auto", "--ladder", "--retune") # whatever an earlier test has had measured
    assert p.stdout.readline().startswith("read 4,097 uint16 tokens") and p.stdout.readline().startswith("measuring what each rung gains")
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=TIMEOUT)
    assert p.returncode == 130 and "Traceback" not in err
    assert "interrupted before training began; nothing was written" in err
    assert names(tmp_path) == {"bins"}

def test_second_ctrl_c_does_not_lie(tmp_path, monkeypatch, capsys):
    "Ctrl-C again while the results are saved: the weights are there, so nobody says that nothing was written"
    interrupted(monkeypatch, 3)
    def press(self): raise KeyboardInterrupt
    monkeypatch.setattr(TextSampler, "__call__", press)
    with pytest.raises(SystemExit): clean_errors(lambda: train(options(tmp_path), progress=False))
    assert (tmp_path/"runs/run/model.safetensors").exists()
    said = capsys.readouterr().err
    assert "nothing was written" not in said and str(tmp_path/"runs/run") in said

def test_loss_that_is_not_finite(tmp_path):
    "A loss that blows up stops the run, says what to do; the losses, a batch and weights that are finite are on disk"
    run = tmp_path/"runs/run"
    with fails(RuntimeError, "5 steps in a row", "smaller --lr", re.escape(str(run/"bad_batch.safetensors"))):
        train(options(tmp_path, steps=50, lr=1e30), progress=False)
    losses = [r["loss"] for r in rows(run)]
    assert np.isfinite(losses[0]) and len(losses) <= 10
    assert load_file(run/"bad_batch.safetensors")["x"].shape == (4, 16)
    assert all(w.isfinite().all() for w in load_file(run/"model.safetensors").values())

def test_rows_when_it_is_given_up(tmp_path):
    "All steps that were taken have their row, also those after the fifth bad one, and the checkpoint is no newer"
    trainer = Trainer(options(tmp_path, steps=20), progress=False)
    trainer.step.params[0].register_hook(lambda g: g*float("inf") if trainer.done >= 2 else g)
    with fails(RuntimeError, "the last of them step 7"): trainer.fit()
    run = tmp_path/"runs/run"
    steps = [r["step"] for r in rows(run) if "loss" in r]
    assert steps == list(range(1, len(steps) + 1)) and newest(run/"checkpoints").name == f"step-{steps[-1]:08}"

@pytest.mark.parametrize("rungs", ["naive", "fused_adamw", "bf16,bf16_weights", "adamw8bit", "bf16,flash,fused_ops,chunked_ce,fp8"])
def test_bad_steps_are_skipped(tmp_path, rungs):
    "Steps with gradients that aren't finite change no weight, under any optimizer, and the run goes on"
    trainer, was = Trainer(options(tmp_path, rungs=rungs, steps=8), progress=False), {}
    bad = lambda: trainer.done + 1 in (3, 4)
    trainer.step.params[0].register_hook(lambda g: g*float("inf") if bad() else g)
    apply = trainer.step.apply
    def watched():
        if bad(): before = [p.detach().clone() for p in trainer.step.params]
        apply()
        if bad(): was[trainer.done + 1] = all(a.equal(b) for a, b in zip(before, trainer.step.params))
    trainer.step.apply = watched
    trainer.fit()
    assert was == {3: True, 4: True} and [r["step"] for r in trainer.rows() if "event" in r] == [3, 4]
    assert np.isfinite(curve(trainer)).all() and curve(trainer)[-1] < curve(trainer)[0]

@pytest.mark.parametrize("rungs", ["naive", "bf16,flash,fused_ops,chunked_ce,head_groups,fused_adamw,direct_update"])
def test_without_clipping(tmp_path, rungs):
    "`clip=0` leaves the gradients as they are: as a bound that they never reach, and not as the recipe's"
    losses = {}
    for clip in (0., 1e30, None):
        trainer, _ = train(options(tmp_path, name=str(clip), grad_clip=clip, rungs=rungs, recipe="adamw", lr=1e-2), progress=False)
        losses[clip] = curve(trainer)
    assert losses[0.] == losses[1e30] != losses[None] and losses[0.][-1] < losses[0.][0]

# Data

def test_mixture(tmp_path):
    "Two corpora by weight: the batches are those of the mixture, and a corpus of another vocabulary is refused"
    for name in "ab": write_bins(tmp_path/name)
    spec = f"{tmp_path/'a'}:2,{tmp_path/'b'}:1"
    trainer, res = train(options(tmp_path, data=spec, steps=12), progress=False)
    assert type(trainer.data.batches).__name__ == "MixedBatches" and curve(trainer)[-1] < curve(trainer)[0]
    assert len(trainer.data.val[0]) == 8 and res["bigram_loss"]

def test_stream(tmp_path):
    "Documents tokenized while training: no bigram model to compare with, and the loss falls"
    trainer, res = train(options(tmp_path, data=str(texts(tmp_path/"texts")), stream=True, steps=30, lr=1e-2), progress=False)
    assert res["bigram_loss"] is None and curve(trainer)[-1] < curve(trainer)[0] - .5
    assert (tmp_path/"runs/run/tokenizer.json").exists() and (tmp_path/"runs/run/report.html").exists()

@pytest.mark.parametrize("rungs", ["naive", "flash", "bf16,flash,fused_ops,chunked_ce"])
def test_documents_apart(tmp_path, rungs):
    "With `documents` what comes before a document doesn't change what the model says of it; without, it does"
    how = dict(data=str(texts(tmp_path/"texts")), rungs=rungs, seq_len=32, recipe="adamw")     # whose blocks add something from the start
    apart, joined = (Trainer(options(tmp_path, document_mask=d, name=str(d), **how), progress=False) for d in (True, False))
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1, 257, (1, 32), generator=g).to(apart.device) for _ in range(2))
    a[0, 12] = b[0, 12] = apart.data.corpus.eot
    b[0, 12:] = a[0, 12:]
    def differ(trainer):
        with torch.no_grad(): x, y = (trainer.run.model.hidden(t)[0, 12:].float() for t in (a, b))
        return (x - y).abs().max().item()
    assert differ(apart) < 1e-5 and differ(joined) > 1e-3
    assert apart.fit()["steps"] == 6

def test_init(tmp_path):
    "A run that starts from another's weights starts at its loss; data with other tokens and a workload beside it are refused"
    data = str(texts(tmp_path/"texts"))
    first, res = train(options(tmp_path, data=data, steps=30, lr=1e-2), progress=False)
    how = dict(data=data, init=str(tmp_path/"runs/run"), model="", name="second")
    second = Trainer(options(tmp_path, **how), progress=False)
    assert second.evaluate() == pytest.approx(res["val_loss"], abs=1e-4) and second.config.width == NANO.width
    second.fit()
    with fails(ValueError, "leave out --model"): Trainer(options(tmp_path, **how | dict(model="nano")), progress=False)
    write_shards(["Other text, of which there is enough.\n"*99]*9, train_tokenizer(["Other text"], 280), tmp_path/"other")
    with fails(ValueError, "other was tokenized otherwise than .*run: tokenize it with speedrun_data"):
        Trainer(options(tmp_path, **how | dict(data=str(tmp_path/"other"), name="c")), progress=False)

@pytest.mark.parametrize("stream", [False, True])
def test_init_with_new_text(tmp_path, stream, capsys):
    "Text is encoded with the tokenizer of the weights; one that isn't the model's is refused before anything is encoded"
    first, _ = train(options(tmp_path, data=str(texts(tmp_path/"texts")), steps=1), progress=False)
    (tmp_path/"new").mkdir()
    for i in range(60): (tmp_path/f"new/{i}.txt").write_text(f"Text {i}, in which other words are frequent.\n"*30)
    how = dict(data=str(tmp_path/"new"), init=str(tmp_path/"runs/run"), model="", name="second", vocab=280, stream=stream)
    second = Trainer(options(tmp_path, **how), progress=False)
    assert second.data.corpus.tokenizer.get_vocab() == first.data.corpus.tokenizer.get_vocab() and second.config.vocab == NANO.vocab
    (tmp_path/"new/0.txt").write_text("Another one.\n"*2000)
    train_tokenizer([(tmp_path/"texts/1.txt").read_text()], 400).save(str(tmp_path/"runs/run/tokenizer.json"))
    capsys.readouterr()
    with fails(ValueError, "tokenizer.json has .* tokens, and the model there 320"): Trainer(options(tmp_path, **how | dict(name="third")), progress=False)
    assert "Tokenizing" not in capsys.readouterr().out

def test_a_rate_that_stays():
    "Where another number of steps doesn't change the next step's learning rate, no two equal numbers are printed"
    said = []
    for steps in (5001, 9):
        cfg = TrainConfig(steps=steps, lr=1e-3, schedule="cosine", final_lr=0.)
        plan = resolve.TrainPlan(cfg, *[None]*4, warmup=1, preset="", why={})
        said.append(plan.length_change(was=5000 if steps == 5001 else 6, done=3))
    assert "next step stays 1.00e-03." in said[0] and "next step is 8.12e-04 instead of 5.00e-04." in said[1]

def test_a_sample_without_a_tokenizer(tmp_path, capsys):
    "A few tokens, how many there are, and how to get text; and which type of token was found"
    _, res = train(options(tmp_path, sample_tokens=99))
    lines = res["sample"].splitlines()
    assert lines[0].startswith("no tokenizer came with the data. The first of 115 tokens: ") and len(lines[0].split(": ")[1].split()) == 21
    assert "put the tokenizer.json" in lines[1]
    assert "read 4,097 uint16 tokens from train.bin; to validate, 1,025 uint16 tokens from val.bin" in capsys.readouterr().out

# Schedules, averages, targets

def test_average(tmp_path):
    "Evaluation and weights are the average's, and the training is what it is without one"
    plain, _ = train(options(tmp_path, steps=24, name="plain"), progress=False)
    trainer, res = train(options(tmp_path, steps=24, ema_decay=.9), progress=False)
    assert curve(trainer) == curve(plain) and res["val_loss"] != plain.rows()[-1]["val_loss"]
    saved = load_file(tmp_path/"runs/run/model.safetensors")
    mean = dict(zip((k for k, _ in trainer.run.model.named_parameters()), trainer.average.mean))
    for k, v in mean.items(): assert torch.equal(saved[f"model.{k}"], v.cpu())
    assert torch.equal(trainer.step.params[0], trainer.average.mean[0])     # what was saved is what the trainer ends with

def test_target(tmp_path):
    "A run stops at the first evaluation that reaches the target, and says so"
    whole, _ = train(options(tmp_path, steps=40, num_evals=8, name="whole"), progress=False)
    losses = [(r["step"], r["val_loss"]) for r in whole.rows() if "val_loss" in r]
    target = losses[3][1]
    trainer, res = train(options(tmp_path, steps=40, num_evals=8, target_loss=target), progress=False)
    assert res["reached"] and res["steps"] == next(n for n, l in losses if l <= target) and not res["interrupted"]

def test_evaluations_compare(tmp_path):
    "The tokens of an evaluation don't depend on the micro-batch"
    vals = [Trainer(options(tmp_path, micro_batch_size=b, name=str(b)), progress=False).data.val for b in (1, 3, 8)]
    assert all(a[0].equal(b[0]) and a[1].equal(b[1]) for a, b in zip(vals, vals[1:]))

# Out of memory

@pytest.fixture
def crowded(monkeypatch):
    "A GPU on which micro-batches above `most` run out of memory, from the call number `after` on"
    said, backward = SimpleNamespace(most=18, after=0, sizes=[]), Stepper.forward_backward
    def step(self, x, y, *weight):
        said.sizes.append(len(x))
        if len(said.sizes) > said.after and len(x) > said.most: raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(self, x, y, *weight)
    monkeypatch.setattr(Stepper, "forward_backward", step)
    return said

@pytest.mark.parametrize("after", [0, 10])
def test_out_of_memory(tmp_path, crowded, after):
    "In the trial or in the middle: micro-batches are halved, the tokens of a step stay, and so do the losses"
    crowded.most = 64
    whole, _ = train(options(tmp_path, micro_batch_size=64, steps=8, name="whole"), progress=False)
    crowded.most, crowded.after, crowded.sizes = 18, after, []
    trainer, _ = train(options(tmp_path, micro_batch_size=64, steps=8, retune=True), progress=False) # its trial isn't remembered
    assert (trainer.cfg.micro_batch_size, trainer.cfg.grad_accum_steps, trainer.cfg.step_tokens) == (16, 4, 1024)
    assert np.allclose(curve(trainer), curve(whole), atol=1e-4)
    assert [r["event"] for r in trainer.rows() if "event" in r] == [f"out of memory: micro-batches of {b}" for b in (32, 16)][:after]
    config = json.loads((tmp_path/"runs/run/config.json").read_text())
    assert (config["micro_batch_size"], config["grad_accum_steps"]) == (16, 4)
    steps = [r["step"] for r in trainer.rows()]
    assert steps == sorted(steps)

def test_out_of_memory_in_the_update(tmp_path):
    "Where some weights may have been updated the step is not taken again: the run ends, and says how to go on"
    trainer = Trainer(options(tmp_path), progress=False)
    def step(closure=None):
        if trainer.done == 3: raise torch.OutOfMemoryError("CUDA out of memory")
        return real()
    real, trainer.step.opt.step = trainer.step.opt.step, step
    with fails(RuntimeError, "in the middle of an update", "--resume"): trainer.fit()
    assert trainer.done == 3 and trainer.cfg.grad_accum_steps == 1

def test_out_of_memory_at_every_size(tmp_path, crowded):
    "Where one sequence doesn't fit either, the run stops with advice, and an older run's files are left alone"
    train(options(tmp_path), progress=False)
    was = (tmp_path/"runs/run/model.safetensors").read_bytes()
    crowded.most = 0
    with fails(RuntimeError, "out of GPU memory with one sequence of 16 tokens", "--rungs smallest", "--model or --seq_len"):
        train(options(tmp_path, micro_batch_size=64, overwrite=True), progress=False)
    assert (tmp_path/"runs/run/model.safetensors").read_bytes() == was

# Bad options and bad targets

@pytest.mark.parametrize("k", "minutes epochs lr weight_decay grad_clip ema_decay warmup target_loss save_minutes".split())
@pytest.mark.parametrize("v", [float("nan"), float("inf")])
def test_no_number(tmp_path, k, v):
    "NaN and infinity are refused for every option that is a number"
    with fails(InputError, f"{k} must be"): Trainer(options(tmp_path, **{k: v}), progress=False)
    assert names(tmp_path) <= {"bins"}

@pytest.mark.parametrize("rungs", ["naive", "fused_adamw", "bf16,bf16_weights"])
def test_a_loss_that_is_no_number(tmp_path, rungs):
    "A step whose loss is NaN over gradients that are finite, as of a target that is no token, is not taken, and is told"
    trainer = Trainer(options(tmp_path, rungs=rungs, steps=8, recipe="adamw"), progress=False)
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss): return loss*float("nan")
        @staticmethod
        def backward(ctx, g): return torch.zeros_like(g)
    bad, loss, kept = lambda: trainer.done + 1 in (3, 4), trainer.run.loss, {}
    trainer.step.run = dataclasses.replace(trainer.run, loss=lambda *a: Masked.apply(loss(*a)) if torch.is_grad_enabled() and bad() else loss(*a))
    apply = trainer.step.apply
    def watched():
        before = [p.detach().clone() for p in trainer.step.params]
        apply()
        kept[trainer.done + 1] = all(map(torch.equal, before, trainer.step.params))
    trainer.step.apply = watched
    trainer.fit()
    assert [n for n, same in kept.items() if same] == [3, 4]
    assert [(r["step"], r["event"]) for r in trainer.rows() if "event" in r] == [(n, "skipped: the loss isn't finite") for n in (3, 4)]

def test_a_trial_knows_documents(tmp_path, monkeypatch):
    "Their attention is slower and takes more memory: a run that is planned without it gets too many steps, or too large a micro-batch"
    seen, was = [], resolve.remembered_trial
    monkeypatch.setattr(resolve, "remembered_trial", lambda *a, **kw: seen.append(a[-1]) or was(*a, **kw))
    for documents in (False, True):
        how = dict(data=str(texts(tmp_path/"texts")), rungs="naive", seq_len=32, recipe="adamw", document_mask=documents, name=str(documents))
        trainer = Trainer(options(tmp_path, **how), progress=False)
        tried = seen[-1](baseline(trainer.config, trainer.device))
        a = torch.randint(1, 257, (1, 32), device=trainer.device)
        a[0, 12] = trainer.data.corpus.eot
        b = a.clone()
        b[0, :12] = 1 # another document before it
        with torch.no_grad(): x, y = (tried.model.hidden(t)[0, 12:] for t in (a, b))
        assert torch.allclose(x, y, atol=1e-5) is documents

def test_documents_without_an_end_token(tmp_path):
    "Said before there is a folder"
    with fails(InputError, "doesn't say which token begins a document: leave out --document_mask"):
        Trainer(options(tmp_path, document_mask=True), progress=False)
    assert names(tmp_path) == {"bins"}

def test_bigram_of_a_mixture(tmp_path):
    "Every corpus of a mixture counts, as it does in the batches"
    for name, seed in (("a", 0), ("b", 1)):
        write_bins(tmp_path/name)
        rng = np.random.default_rng(seed)
        for split, n in (("train", 4097), ("val", 1025)):
            step = rng.integers(1, 4, n) if name == "a" else rng.integers(50, 54, n)     # other pairs in each
            (np.cumsum(step) % VOCAB).astype("<u2").tofile(tmp_path/name/f"{split}.bin")
    one, _ = train(options(tmp_path, data=str(tmp_path/"b"), name="one"), progress=False)
    mix = Trainer(options(tmp_path, data=f"{tmp_path/'a'}:1,{tmp_path/'b'}:1"), progress=False)
    alone = bigram_loss(mix.data.corpus, [tuple(t.cpu() for t in mix.data.val)])
    assert mix.data.bigram_loss() < alone - .5

# Memory for what isn't training

def test_out_of_memory_in_an_evaluation(tmp_path, monkeypatch, capsys):
    "Its batches are halved, the loss is the same, and the run goes on; where one sequence doesn't fit, it says how"
    whole, res = train(options(tmp_path, name="whole"), progress=False)
    evaluate, most = Stepper.evaluate, [2]
    def crowded(self, batches):
        batches = list(batches)
        if len(batches[0][0]) > most[0]: raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(self, batches)
    monkeypatch.setattr(Stepper, "evaluate", crowded)
    trainer, less = train(options(tmp_path))
    assert less["val_loss"] == pytest.approx(res["val_loss"], abs=1e-5) and trainer.validator.reduced == 2
    assert capsys.readouterr().out.count("in an evaluation: going on with batches of 2") == 1
    most[0] = 0
    with fails(RunError, "evaluation of one sequence", "--resume"): train(options(tmp_path, name="b"), progress=False)

def test_out_of_memory_for_an_average(tmp_path, monkeypatch):
    "While the average is used, the weights wait in main memory where the GPU has no room; where there is none at all, it's said"
    from llm_speedrun.recipes import schedules
    plain, res = train(options(tmp_path, ema_decay=.9, name="plain"), progress=False)
    monkeypatch.setattr(schedules, "copies", lambda params: [p.detach().to("cpu", copy=True) for p in params])
    assert train(options(tmp_path, ema_decay=.9), progress=False)[1]["val_loss"] == res["val_loss"]
    def full(*args): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(checkpointer, "WeightEMA", full)
    with fails(RunError, "no GPU memory for an average", "--ema_decay"): Trainer(options(tmp_path, ema_decay=.9, name="b"), progress=False)

# Nobody looks on

SCRIPT = "import sys; from llm_speedrun.cli import speedrun_train; speedrun_train()"

def command(folder, *more):
    args = dict(data=write_bins(folder/"bins"), model="tiny", recipe="adamw", rungs="naive", steps=12, micro_batch_size=4, seq_len=32, vocab=VOCAB, eval_tokens=128,
                sample_tokens=4, name="run", out=folder/"runs")
    return [sys.executable, "-c", SCRIPT, *(str(o) for k, v in args.items() for o in (f"--{k}", v)), *more]

@posix
@pytest.mark.parametrize("how", [*(pytest.param(h, marks=pytest.mark.slow) for h in (">&-", "2>&1 | head -c 0", "2>&-")), "| head -c 0", "> /dev/full"])
def test_a_broken_log(tmp_path, how):
    "A pipe that breaks, a stream that is closed, a full disk below the log: the run ends well, with everything there"
    line = " ".join(map(shlex.quote, command(tmp_path))) + f" {how}; exit ${{PIPESTATUS[0]}}"
    res = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=TIMEOUT)
    assert res.returncode == 0 and "Traceback" not in res.stderr and "Exception" not in res.stderr, res.stderr
    assert names(tmp_path/"runs/run") == FILES

def test_a_log_of_another_encoding(tmp_path):
    "Letters that the log doesn't know are replaced"
    data = texts(tmp_path/"texts")
    for p in data.iterdir(): p.write_text("\u4e2d\u6587 \u00d7 caf\u00e9 "*200, encoding="utf-8")
    env = os.environ | dict(PYTHONIOENCODING="ascii", LLM_SPEEDRUN_CACHE=str(tmp_path/"cache"))
    res = quick_programs.run(command(tmp_path, "--data", str(data), "--vocab", "300", "--sample_tokens", "60"), capture_output=True, text=True, timeout=TIMEOUT, env=env)
    assert res.returncode == 0 and "everything is in" in res.stdout, res.stderr

def test_log_lines(tmp_path, monkeypatch, capsys):
    "Where no terminal looks on there is a line from time to time in place of a bar"
    monkeypatch.setattr(Progress.__init__, "__defaults__", (True, 0.))
    train(options(tmp_path, steps=20))
    err = capsys.readouterr().err
    assert re.search(r"^step 20 of 20 \(100%\): loss \d\.\d+, [\d,]+ tok/s, gradient norm [\d.]+, \d\d:\d\d left$", err, re.M) and "\r" not in err

def test_evaluations_are_printed(tmp_path, capsys):
    "While a run goes on, a line for each, also within the first seconds; the last one is the result"
    train(options(tmp_path, steps=20, num_evals=4))
    losses = [r["val_loss"] for r in read_rows(tmp_path/"runs/run/metrics.jsonl") if "val_loss" in r]
    said = re.findall(r"^step (\d+) of 20 \(\d+%\): validation loss ([\d.]+), loss [\d.]+, [\d,]+ tok/s, gradient norm .*$", capsys.readouterr().err, re.M)
    assert said == [(f"{5*i}", f"{x:.3f}") for i, x in enumerate(losses[:-1], 1)] and len(said) == 3

class Terminal(io.StringIO):
    def isatty(self): return True

def test_evaluations_stay_above_the_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", out := Terminal())
    train(options(tmp_path, steps=20, num_evals=4))
    lines = [line for line in re.split(r"[\r\n]+", out.getvalue()) if "validation loss" in line]
    assert len(lines) == 3 and all(re.match(r"step \d+ of 20 ", line) for line in lines), lines
    assert "20/20" in out.getvalue()

# Speed

@pytest.mark.cuda
@pytest.mark.parametrize("rows", [32, 64])
def test_the_loop_keeps_up(tmp_path, rows):
    """At least 98% of the bare step's speed, with loader, guard and log in it; measured in turns, on the same batches. What
    each part costs is printed: `pytest -s -k keeps_up`"""
    from llm_speedrun.recipes.schedules import GuardedStepper
    from llm_speedrun.runs import build
    block, rounds = 40, 6
    cfg = TrainConfig(model="124m", rungs="fastest", recipe="adamw", micro_batch_size=rows, step_tokens=rows*1024, steps=2*block*(rounds + 1),
                      num_evals=1, eval_tokens=2**15, sample_tokens=1, save_minutes=1000., name="run", out=str(tmp_path/"runs"))
    times = {}
    def timed(name, f):
        torch.cuda.synchronize(); t0 = time.perf_counter()
        for _ in range(block): f()
        torch.cuda.synchronize(); times.setdefault(name, []).append((time.perf_counter() - t0)/block*1e3)
    class Measured(Trainer):
        def loop(self, batches):
            run = build(self.config, self.cfg.rungs.split(","), seed=1)
            bare, kept = Stepper(run), [tuple(t.clone() for t in next(batches)) for _ in range(block)]
            noise = tuple(torch.randint(self.config.vocab, kept[0][0].shape, device=self.device) for _ in range(2))
            guarded = GuardedStepper(build(self.config, self.cfg.rungs.split(","), seed=1))
            turn = lambda step, data: lambda: step(next(data))
            for r in range(rounds + 1):
                timed("bare step, one batch of noise", lambda: bare(noise))
                timed("bare step, text", turn(bare, itertools.cycle(kept)))
                timed("guarded step, text", turn(guarded, itertools.cycle(kept)))
                timed("bare step, the loader", turn(bare, batches))
                torch.cuda.synchronize(); t0 = time.perf_counter()
                self.cfg.steps = self.done + block
                super().loop(batches)
                torch.cuda.synchronize(); times.setdefault("the trainer", []).append((time.perf_counter() - t0)/block*1e3)
            self.cfg.steps = self.done
    Measured(cfg, progress=False).fit()
    median = {k: float(np.median(v[1:])) for k, v in times.items()}      # the first round warms up
    for k, ms in median.items(): print(f"{rows} x 1024, {k}: {ms:.2f} ms, {rows*1024/ms*1e3:,.0f} tokens/s")
    assert median["bare step, text"] / median["the trainer"] >= .98, median

def test_a_vocabulary_that_is_not_used_is_told(tmp_path, capsys, monkeypatch):
    write_bins(tmp_path/"bins")
    monkeypatch.setattr(corpus, "stdlib_files", lambda files=corpus.stdlib_files()[::20]: files) # some of them: quick to tokenize
    train(options(tmp_path, data="stdlib", vocab=300, steps=2, name="a"))
    assert "were asked for" not in capsys.readouterr().out
    made = Trainer(options(tmp_path, data="stdlib", vocab=300, steps=2, name="b"))
    smaller = copy.copy(made.data)
    smaller.corpus = dataclasses.replace(smaller.corpus, vocab=290)
    made.run_dir.release()
    monkeypatch.setattr(resolve, "TrainData", lambda *args: smaller)
    Trainer(options(tmp_path, data="stdlib", vocab=300, steps=2, name="c")).run_dir.release()
    assert "the vocabulary has 290 tokens, and 300 were asked for" in capsys.readouterr().out

# Editors

SEEN = { # a call in the trainer's module -> what an editor must open there
    "self.train_iteration(batches)": "train.trainer.Trainer.train_iteration", "self.checkpointer.save(": "train.checkpointer.Checkpointer.save",
    "self.coordinator.exchange_flags(": "train.coordinator.Coordinator.exchange_flags", "self.signals.during(": "train.console.Signals.during",
    "self.validator.evaluate(": "train.validator.Validator.evaluate", "self.run_dir.write_result(": "train.run_dir.RunDir.write_result"}

def test_editors_find_methods(monkeypatch, tmp_path):
    "By the library that Jupyter and editors use: parts are set in the constructor, and their classes stand in one piece"
    jedi = pytest.importorskip("jedi")
    from jedi.api.environment import InterpreterEnvironment # in this process
    # a cache of this test alone: another process that writes the usual one leaves half a file for a moment, which jedi then reads
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))
    path = ROOT/"llm_speedrun/train/trainer.py"
    text = path.read_text(encoding="utf-8")
    def found(call):
        line = text[:text.index(call)].count("\n")
        at = text.splitlines()[line].index(call) + call.index("(") - 1
        script = jedi.Script(text, path=path, project=jedi.Project(ROOT), environment=InterpreterEnvironment())
        return [o.full_name for o in script.goto(line + 1, at, follow_imports=True)]
    assert {call: found(call) for call in SEEN} == {call: [f"llm_speedrun.{name}"] for call, name in SEEN.items()}
