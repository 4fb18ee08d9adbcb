"Kept checkpoints, branches from them, and runs that are prolonged: the same bits where nothing changes, no jump of the learning rate, nothing touched."
import json, os, re, shutil, signal
import pytest, torch
from llm_speedrun.checkpoint.format import checkpoints, read_metadata, step_of_name, validation_error
from llm_speedrun.io_utils import InputError
from llm_speedrun.train import checkpointer
from llm_speedrun.train.config import TrainConfig, branch_point, own_folder, parse_options
from llm_speedrun.tools.doctor import check_run
from llm_speedrun.train.report import html_report
from llm_speedrun.train.resolve import options_for_restart, resumed
from llm_speedrun.train.trainer import Trainer, train
from helpers.tiny_runs import fails, nano, options, texts, write_bins
from test_resume import go, logged, resume, state, stop_at, watch_updates
from test_trainer import curve, posix, rows

def branch(folder, step, run="run", **kw): return train(TrainConfig(resume=f"{folder/'runs'/run}@{step}", **kw), progress=False)
def steps_of(run): return [step_of_name(c) for c in checkpoints(run/"checkpoints")]
def files(run): return {p.relative_to(run): p.read_bytes() for p in run.rglob("*") if p.is_file()}
def learned(run): return {r["step"]: (r["loss"], r["lr"]) for r in rows(run) if "loss" in r}

@pytest.fixture(scope="module")
def whole_once(tmp_path_factory, nano):
    "A folder with the run `whole`: 12 steps of the default recipe with an average, and checkpoints of 4, 5, 8 and 12"
    folder = tmp_path_factory.mktemp("branches")
    trainer, _ = go(folder, name="whole", steps=12, num_evals=1, keep_every=4, keep_last=1, ema_decay=.9, save_minutes=1000.)
    return folder, state(trainer)

@pytest.fixture
def whole(whole_once, tmp_path):
    shutil.copytree(whole_once[0], tmp_path, dirs_exist_ok=True)
    return tmp_path

# Kept

@posix
def test_what_is_kept(tmp_path):
    "Every fourth, the one before the decay, the newest and the best; also what earlier options kept, after a stop and other options"
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 10)
        go(tmp_path, steps=16, num_evals=1, keep_every=4, keep_last=1, save_minutes=0.)
    run = tmp_path/"runs/run"
    decay = json.loads((run/"config.json").read_text())["decay_after"]
    assert decay == 6 and steps_of(run) == [4, 6, 8, 10]
    assert [read_metadata(c).facts["kept"] for c in checkpoints(run/"checkpoints")] == [True, True, True, False]
    resume(tmp_path, keep_every=5, save_minutes=1000.)
    assert steps_of(run) == [4, 6, 8, 10, 15, 16] # 10 is a multiple of the new number, which it was saved before

def test_saved_at_these_steps_alone(tmp_path, monkeypatch):
    "Without a clock that is due, and while the checkpoint before is still being written"
    monkeypatch.setattr(checkpointer.Checkpointer, "due", lambda self, minutes: False)
    go(tmp_path, steps=12, num_evals=1, keep_every=3, keep_last=1, schedule="cosine")
    assert steps_of(tmp_path/"runs/run") == [3, 6, 9, 12] and not any(map(validation_error, checkpoints(tmp_path/"runs/run/checkpoints")))

@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_step_to_keep(tmp_path, number):
    "It is saved as one to keep, and stays"
    with pytest.MonkeyPatch.context() as m:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop_at(m, 3, number)
        go(tmp_path, steps=12, num_evals=1, keep_every=3, keep_last=1, save_minutes=1000.)
    assert steps_of(tmp_path/"runs/run") == [3]
    resume(tmp_path, save_minutes=0.)
    assert steps_of(tmp_path/"runs/run") == [3, 5, 6, 9, 12]

def test_the_doctor_counts_them(tmp_path):
    "Their space, with the options that decide about it"
    said = {}
    for keep in (0, 10):
        found = [f for f in check_run(options(tmp_path, name="new", steps=100, num_evals=1, keep_every=keep)) if f.about == "disk"]
        said[keep] = re.search(r"(\d+) checkpoints of .*?(\(.*?\))", found[0].text).groups()
    assert said == {0: ("5", "(--keep_last 2, the best, 1 kept for good, and one being written)"),
                    10: ("15", "(--keep_last 2, the best, 11 kept for good, and one being written)")}

# Branches

@posix
@pytest.mark.parametrize("step", [5, 8])
def test_the_same_bits(whole, whole_once, step):
    "Nothing is changed: a branch takes the steps of the original, to the bit, in a folder of its own; the original stays as it was"
    was, run = files(whole/"runs/whole"), whole/f"runs/whole-from-{step}"
    trainer, res = branch(whole, step, "whole")
    assert files(whole/"runs/whole") == was and trainer.folder == run and res["steps"] == 12
    assert learned(run) == {k: v for k, v in learned(whole/"runs/whole").items() if k > step}
    want, got = whole_once[1], state(trainer)
    assert set(want) == set(got) and all(torch.equal(want[k], got[k]) for k in want)
    config, origin = (json.loads((whole/"runs"/name/"config.json").read_text()) for name in (run.name, "whole"))
    assert config["branched_from"] == dict(run_id=origin["run_id"], step=step, folder=str(whole/"runs/whole")) and config["run_id"] != origin["run_id"]
    assert f"step {step} of" in html_report(run).read_text(encoding="utf-8")

@posix
def test_a_branch_goes_on(whole):
    "It is stopped and resumed like any run, and remembers where it came from; a second of the same name is refused"
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 2)
        branch(whole, 4, "whole", name="b", steps=10, lr=.002)
    trainer, res = resume_of(whole, "b")
    config = json.loads((whole/"runs/b/config.json").read_text())
    assert res["steps"] == 10 and [*learned(whole/"runs/b")] == [*range(5, 11)] and config["branched_from"]["step"] == 4 and config["lr"] == .002
    with fails(FileExistsError, "exists already", "--resume .*runs/b"): branch(whole, 4, "whole", name="b")
    assert branch(whole, 8, "whole", name="b", overwrite=True)[1]["steps"] == 12 and [*learned(whole/"runs/b")] == [*range(9, 13)]
    assert branch(whole, 12, "b", steps=14)[0].folder == whole/"runs/b-from-12"

def resume_of(folder, run, **kw): return train(TrainConfig(resume=str(folder/"runs"/run), **kw), progress=False)

@posix
def test_other_data_begins_at_its_beginning(whole, capsys):
    "Its first batch is the first that the branch takes, also after a stop; the same data in another place goes on where it was"
    other = write_bins(whole/"other", train=3000)
    fresh = Trainer(options(whole, name="fresh", data=str(other)), progress=False)
    first = [next(fresh.data.batches)[0] for _ in range(4)]
    fresh.run_dir.release()
    seen = []
    with pytest.MonkeyPatch.context() as m:
        watch_updates(m, lambda n, batches: seen.append(torch.cat([x for x, _ in batches])))
        with pytest.MonkeyPatch.context() as n:
            stop_at(n, 2)
            train(TrainConfig(resume=f"{whole/'runs/whole'}@8", data=str(other), name="b"))
        assert "other data than " in capsys.readouterr().out
        resume_of(whole, "b")
    assert len(seen) == 4 and all(map(torch.equal, seen, first))
    shutil.copytree(whole/"bins", whole/"moved")
    branch(whole, 8, "whole", data=str(whole/"moved"), name="moved")
    assert learned(whole/"runs/moved") == {k: v for k, v in learned(whole/"runs/whole").items() if k > 8}

@posix
def test_a_stream(tmp_path):
    "A branch of a stream goes on in it, to the bit; one with another stream begins there, and can be resumed"
    folder = texts(tmp_path/"texts")
    go(tmp_path, data=str(folder), stream=True, steps=8, keep_every=4, num_evals=1)
    run = tmp_path/"runs/run"
    branch(tmp_path, 4)
    assert learned(tmp_path/"runs/run-from-4") == {k: v for k, v in learned(run).items() if k > 4}
    shutil.copytree(folder, tmp_path/"more"); (tmp_path/"more/0.txt").write_text("Something else.\n"*50)
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 2)
        branch(tmp_path, 4, data=str(tmp_path/"more"), name="b")
    assert resume_of(tmp_path, "b")[1]["steps"] == 8 and [*learned(tmp_path/"runs/b")] == [5, 6, 7, 8]

@posix
def test_data_of_another_tokenizer(tmp_path):
    "Its tokens would mean something else to the model; text is tokenized with the run's own"
    go(tmp_path, data=str(texts(tmp_path/"texts")), steps=4, keep_every=2, seq_len=32, num_evals=1)
    run, other = tmp_path/"runs/run", texts(tmp_path/"other")
    (other/"0.txt").write_text("zzz qqq xxx jjj. "*2000)
    trainer, _ = branch(tmp_path, 2, data=str(other), name="b")
    assert (tmp_path/"runs/b/tokenizer.json").read_bytes() == (run/"tokenizer.json").read_bytes() and trainer.data.first_step == 2
    go(tmp_path, data=str(other), steps=2, seq_len=32, name="theirs")
    bins = write_bins(tmp_path/"bins2"); shutil.copy(tmp_path/"runs/theirs/tokenizer.json", bins)
    with fails(InputError, "tokeniz"): branch(tmp_path, 2, data=str(bins), name="c")
    assert not (tmp_path/"runs/c").exists()

@posix
@pytest.mark.parametrize("option, message", [
    (dict(seq_len=8), "a branch of a run keeps its options: leave out seq_len"), (dict(model="tiny", recipe="adamw"), "leave out model, recipe"),
    (dict(step_tokens=128), "leave out step_tokens"), (dict(vocab=9, weight_decay=.1), "leave out vocab, weight_decay"), (dict(minutes=1.), "leave out minutes"),
    (dict(steps=8), "a branch after step 8 of .*whole can't end after 8 steps"), (dict(total_tokens=64*5), "can't end after 5 steps"),
    (dict(name="whole"), "choose another --name"), (dict(name="whole@8"), "choose another --name"), (dict(name="a/b"), "must be the name of one folder")], ids=str)
def test_bad_options(whole, option, message):
    was = sorted(p.name for p in (whole/"runs").iterdir())
    with fails(InputError, message): branch(whole, 8, "whole", **option)
    assert sorted(p.name for p in (whole/"runs").iterdir()) == was

@posix
def test_steps_that_there_are_not(whole):
    "The error names those that there are; a damaged checkpoint isn't taken for another one, and the doctor says the same"
    with fails(FileNotFoundError, "runs/whole has checkpoints of steps 4, 5, 8, 12: there is none of step 6"): branch(whole, 6, "whole")
    os.truncate(whole/"runs/whole/checkpoints/step-00000008/state.safetensors", 1000)
    with fails(FileNotFoundError, "none of step 8 to branch from, or it isn't valid"): branch(whole, 8, "whole")
    with fails(FileNotFoundError, "is not the folder of a run"): branch(whole, 8, "nowhere")
    with fails(InputError, "RUN@STEP"): branch(whole, "eight", "whole")
    found = [f.text for f in check_run(TrainConfig(resume=f"{whole/'runs/whole'}@4", steps=20)) if f.about == "resume"]
    assert found == [f"goes on from {whole/'runs/whole'}/checkpoints/step-00000004"] and not (whole/"runs/whole-from-4").exists()

@posix
def test_an_edited_config(whole):
    "What the branch changes may differ from the checkpoint; what was changed by hand may not"
    path = whole/"runs/whole/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(grad_clip=.1, lr=.5)))
    with fails(InputError, "grad_clip is 0.1 and was"): branch(whole, 8, "whole", lr=.001)

@posix
def test_a_folder_with_such_a_name(tmp_path):
    "`run@4` is a folder, and goes on as any; from it a branch has two @"
    with pytest.MonkeyPatch.context() as m:
        stop_at(m, 5)
        go(tmp_path, name="run@4", steps=8, keep_every=2, num_evals=1)
    trainer, res = resume_of(tmp_path, "run@4")
    assert res["steps"] == 8 and trainer.folder.name == "run@4" and [*learned(trainer.folder)] == [*range(1, 9)]
    assert branch(tmp_path, 6, "run@4")[0].folder.name == "run@4-from-6"

def test_the_options_of_a_branch(tmp_path):
    "On the command line, in a file, and where the folder is"
    assert branch_point("a@b@30") == ("a@b", 30) and branch_point("a@") == ("a@", None) and branch_point("@3") == ("@3", None)
    c, given = parse_options(TrainConfig, "speedrun_train", ["--resume", f"{tmp_path}/runs/x@30", "--keep_every", "5"])
    assert own_folder(c, given) == tmp_path/"runs/x-from-30" and c.keep_every == 5
    c, given = parse_options(TrainConfig, "speedrun_train", ["--resume", f"{tmp_path}/runs/x@30", "--out", "there", "--name", "y"])
    assert str(own_folder(c, given)) == "there/y"

@posix
def test_a_restart_by_torchrun(whole, monkeypatch):
    "It goes on with the branch, where that has a checkpoint, and branches again where it has none; a group of another kind branches"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1"); monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    c = TrainConfig(resume=f"{whole/'runs/whole'}@8", steps=20)
    b = whole/"runs/whole-from-8"
    assert options_for_restart(c, {"steps"})[0] == c
    b.mkdir(); (b/"config.json").write_text(json.dumps(dict(group="abc")))
    again, given = options_for_restart(c, {"steps"})
    assert again.overwrite and again.resume == c.resume and resumed(again, given).overwrite
    shutil.copytree(whole/"runs/whole/checkpoints", b/"checkpoints")
    assert options_for_restart(c, {"steps"})[0].resume == str(b)
    (b/"config.json").write_text(json.dumps(dict(group="other")))
    assert options_for_restart(c, {"steps"})[0] == c

# Prolonging

@posix
@pytest.mark.parametrize("recipe", ["normuon:rise=3", "speedrun:rise=3"])
def test_prolonged(tmp_path, recipe, capsys):
    """The default recipe decays over most of a run. From the checkpoint before that, which is kept unasked, twice as many steps have the learning
    rates and losses, to the bit, of a run that was planned with them: no jump. (The momentum rises for half of a run that is shorter than 600 steps, or for as many as its recipe says.)"""
    how = dict(recipe=recipe, num_evals=1, keep_last=1, weight_decay=.1, ema_decay=.9, lr=.01)
    trainer, _ = train(options(tmp_path, name="short", steps=10, **how))
    said = capsys.readouterr().out
    step = json.loads((tmp_path/"runs/short/config.json").read_text())["decay_after"]
    assert f"wsd (decay after step {step})" in said and step in steps_of(tmp_path/"runs/short") and 1 < step < 5
    go(tmp_path, name="long", steps=20, **how)
    train(TrainConfig(resume=f"{tmp_path/'runs/short'}@{step}", steps=20))
    said = capsys.readouterr().out
    assert "20 steps instead of 10: the learning rate of the next step is 1.00e-02 instead of" in said and "To go on from before" not in said
    short, long, prolonged = (learned(tmp_path/"runs"/n) for n in ("short", "long", f"short-from-{step}"))
    assert {k: v for k, v in short.items() if k <= step} | prolonged == long
    assert len({lr for k, (_, lr) in long.items() if 1 < k <= step + 1}) == 1 and trainer.plan.lr_schedule()(step) < .01

@posix
def test_a_jump_is_told(tmp_path, capsys):
    "A run that goes on with more steps after its decay began: the message names the checkpoint to branch from, and it is there"
    go(tmp_path, steps=10, num_evals=1, keep_last=1)
    capsys.readouterr()
    train(TrainConfig(resume=str(tmp_path/"runs/run"), steps=20))
    said = capsys.readouterr().out
    m = re.search(r"the learning rate of the next step is \S+ instead of \S+\. .* To go on from before the decay: --resume (\S+)@(\d+) --steps 20", said)
    assert m and m[1] == str(tmp_path/"runs/run") and int(m[2]) in steps_of(tmp_path/"runs/run")
    _, res = branch(tmp_path, m[2], steps=20)
    assert res["steps"] == 20

@posix
def test_another_schedule(whole, capsys):
    "A branch may decay at once, or not at all; the rate before and after is told, and no weight is anything but finite"
    for name, how, rate in (("down", dict(schedule="wsd", cooldown=.9, steps=10), None), ("flat", dict(schedule="constant"), 1.), ("never", dict(cooldown=0.), 1.)):
        train(TrainConfig(resume=f"{whole/'runs/whole'}@4", name=name, lr=.003, **how))
        assert re.search("(another schedule|10 steps instead of 12): the learning rate of the next step is ", capsys.readouterr().out)
        lrs = [lr for _, lr in learned(whole/"runs"/name).values()]
        assert lrs == [.003]*8 if rate else lrs == sorted(lrs, reverse=True) and lrs[-1] < .001
