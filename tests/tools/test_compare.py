"Runs beside each other, short runs that find a learning rate, and what a run's report says since it says all that a folder knows."
import json, math, os, shutil
from dataclasses import asdict, replace
import numpy as np, pytest, torch
from helpers.tiny_runs import fails, nano, options, texts, write_bins
from test_report import HOSTILE, Balanced
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.tools.comparison import (Comparison, RunCurve, Found, Search, clock, diverged, mismatch, overlay, reached, repeats,
                                           spaced, when)
from llm_speedrun.cli import speedrun_compare, speedrun_lr
from llm_speedrun.train.config import LrOptions
from llm_speedrun.train.report import html_report, read_run
from llm_speedrun.train.train_step import TrainStep
from llm_speedrun.train.trainer import train

def whole(page):
    "The text on a page that is whole and alone"
    parser = Balanced(); parser.feed(page); parser.close()
    assert page.startswith("<!doctype html>") and not parser.open and not parser.outside and "@import" not in page
    return parser.text

# --- runs made by hand: losses are known, so is every number of the comparison ---

def made(folder, losses=(5., 4., 3.), tok_s=100., every=10, each=20, val=True, **config):
    "A run of `every` steps between two evaluations, of `each` tokens a step"
    folder.mkdir(parents=True)
    rows = []
    for i, loss in enumerate(losses, 1):
        rows += [dict(step=s, loss=loss + .1, tok_s=tok_s, gpu_peak_gib=1.5) for s in range((i - 1)*every + 1, i*every + 1)]
        if val: rows.append(dict(step=i*every, val_loss=loss))
    base = dict(data="text", micro_batch_size=1, grad_accum_steps=1, seq_len=each, seed=0, rungs="flash", lr=1e-3, gpu="H200", name=folder.name, run_id=folder.name)
    (folder/"config.json").write_text(json.dumps(base | config))
    (folder/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder

def test_time_and_tokens_of_a_run(tmp_path):
    c = RunCurve(made(tmp_path/"a"))                                     # 30 steps of 20 tokens, five a second
    assert c.steps[-1] == 30 and c.tokens[-1] == 600 and c.seconds[-1] == pytest.approx(6.)
    for over, at in dict(steps=10, tokens=200, seconds=2.).items():
        x, y = c.curve(over)
        assert list(x) == pytest.approx([at, 2*at, 3*at]) and list(y) == [5., 4., 3.]
        assert c.curve(over, "loss")[0][-1] == pytest.approx(3*at)
    assert [reached(c.curve("seconds"), v) for v in (3.5, 3., 2.9, 6.)] == pytest.approx([5., 6., None, 2.])

def test_compiling_evaluating_and_lost_lines():
    "What was noted first counts as the middle; a lost line's time is counted; evaluations take none; an unknown speed is the middle one"
    rows = [dict(step=s, loss=1., tok_s=1. if s <= 10 else 50. if s == 20 else 100.) for s in range(1, 41) if s not in (19, 30)]
    rows += [dict(step=40, val_loss=2.), dict(step=41, loss=None, tok_s=100.), dict(step=42, loss=1.), dict(step=43, loss=1., tok_s=-3.)]
    steps, seconds, tokens = clock(rows, 100)
    assert seconds[-1] == pytest.approx(43 + 2) and tokens[-1] == 4300 and np.all(np.diff(seconds) > 0)
    fast_first = clock([dict(step=s, loss=1., tok_s=200. if s <= 10 else 100.) for s in range(1, 31)], 100)
    assert fast_first[1][-1] == pytest.approx(25.)                      # nothing compiled: it is what it was

def test_a_run_that_went_on_has_its_steps_once():
    rows = [dict(step=s, loss=1., tok_s=10.) for s in (1, 2, 3)] + [dict(step=s, loss=1., tok_s=10.) for s in (2, 3, 4)]
    assert list(clock(rows, 10)[1]) == [1., 2., 3., 4.]

def test_tables(tmp_path):
    a = made(tmp_path/"a")
    b = made(tmp_path/"b", losses=(4., 3., 2.), tok_s=50., rungs="flash,fp8", lr=2e-3, date="today", torch="2.13")
    both = Comparison([a, b])
    assert both.notes == []
    assert both.summary()[1] == [["a", "3.0000", "3.0000 (30)", "30", "600", "6.0", "100", "1.5"],
                                 ["b", "2.0000", "2.0000 (30)", "30", "600", "12.0", "50", "1.5"]]
    assert both.races() == (["run", "to 3.0000 of a", "to 2.0000 of b"],
                            [["a", "6.0 s, 600", "never"], ["b", "8.0 s, 400", "12.0 s, 600"]])
    assert dict((k, v) for k, *v in both.differences()[1]) == dict(rungs=["–", "fp8"], lr=["0.001", "0.002"], torch=["–", "2.13"])
    assert both.seeds()[1] == []

def test_a_loss_that_rises_again():
    "The lowest loss isn't the last; a level is reached the first time"
    curve = np.array([10., 20., 30., 40.]), np.array([5., 3., 4., 3.])
    assert reached(curve, 3.5) == 17.5 and reached(curve, 3.) == 20.

def test_seeds_are_found_and_nothing_else(tmp_path):
    runs = [made(tmp_path/f"a{s}", losses=(5., 3. + s/10), seed=s) for s in range(3)]
    other = [made(tmp_path/f"b{s}", losses=(5., 2. + s), seed=s, lr=2e-3) for s in range(2)]
    both = Comparison(runs + other)
    (names, mean, reach, deviation, error), = both.seeds()[1]
    assert (names, mean, reach, deviation) == ("a0, a1, a2", "3.1000", "3.0000 to 3.2000", "0.1000") and error == f"{.1/3**.5:.4f}"
    assert repeats(RunCurve(r) for r in runs[:2]) == []                  # two are no range
    again = [made(tmp_path/f"c{s}", seed=1) for s in range(3)]
    assert repeats(RunCurve(r) for r in again) == []                     # the same seed

def test_many_runs_with_one_name(tmp_path):
    runs = [made(tmp_path/k/"run", lr=i/10) for i, k in enumerate("pqrstuvwxyz", 1)]
    both = Comparison(runs + runs[:1])                                  # one of them twice
    assert [c.title for c in both.courses] == [f"{k}/run" for k in "pqrstuvwxyz"]
    text = whole(both.page())
    assert "p/run and 10 other runs" in text and all(f"{k}/run" in text for k in "pqrstuvwxyz")

# --- losses that aren't comparable are shown, and it is said ---

@pytest.mark.parametrize("change, said", [
    (dict(data="other"), r"other data \(text and other\)"), (dict(seq_len=40), r"sequences of other lengths \(20 and 40\)"),
    (dict(eval_tokens=64), "other numbers of validation tokens"), (dict(document_mask=True), "attention across documents")], ids=str)
def test_not_comparable(tmp_path, change, said):
    a, b = made(tmp_path/"a"), made(tmp_path/"b", **change)
    both = Comparison([a, b])
    assert len(both.notes) == 1
    with fails(AssertionError, "Losses of b and a are not comparable: ", said): assert not both.notes, both.notes
    assert both.notes[0] in both.text()
    if "data" in change: assert both.notes[0] in whole(page := both.page()) and "Over seconds" in page

def test_tokens_and_text_tell(tmp_path):
    "The tokenizer decides; a bigram model's loss tells whether the text is the same, wherever it lay"
    a, b = made(tmp_path/"a"), made(tmp_path/"b", data="elsewhere")
    result = lambda folder, loss: (folder/"result.json").write_text(json.dumps(dict(steps=30, bigram_loss=loss)))
    said = lambda: [*mismatch(RunCurve(a), RunCurve(b))]
    tokenizer = lambda folder, *words: (folder/"tokenizer.json").write_text(json.dumps(dict(model=dict(vocab={w: i for i, w in enumerate(words)}))))
    assert len(said()) == 1
    result(a, 3.25); assert len(said()) == 1                           # of the other nobody knows
    result(b, 3.25); assert said() == []
    tokenizer(a, "x", "y"); tokenizer(b, "y", "x"); assert "other tokenizers" in said()[0] and len(said()) == 1
    tokenizer(b, "x", "y"); assert said() == []
    result(b, 3.3); assert "other data" in said()[0]
    (b/"config.json").write_text((a/"config.json").read_text()); assert "a bigram model's loss differs" in said()[0]
    (b/"tokenizer.json").write_text("["); assert "other tokenizers" in said()[0]

# --- bad input, and folders that are torn ---

def test_bad_input(tmp_path, capsys):
    a, empty, begun = made(tmp_path/"a"), tmp_path/"empty", tmp_path/"begun"
    empty.mkdir(); begun.mkdir()
    (begun/"config.json").write_text("{}")
    def refused(*args):
        with pytest.raises(SystemExit) as e: speedrun_compare([*map(str, args)])
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
        return err
    assert "the following arguments are required: runs" in refused()
    assert "a alone has nothing to be compared with: name two runs" in refused(a)
    assert "alone" in refused(a, tmp_path/"empty"/".."/"a")
    assert "empty is not the folder of a run" in refused(a, empty)
    assert "nowhere is not the folder of a run" in refused(a, tmp_path/"nowhere")
    assert "begun has no losses yet" in refused(a, begun)
    b = made(tmp_path/"b")
    assert "x.md is no page to write" in refused(a, b, "--out", tmp_path/"x.md")
    assert "is no page to write" in refused(a, b, "--out", tmp_path)
    (tmp_path/"file").write_text("")
    assert "choose another --out" in refused(a, b, "--out", tmp_path/"file"/"x.html")
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "empty", "begun", "file"}

def test_command(tmp_path, capsys):
    a, b = made(tmp_path/"a"), made(tmp_path/"b", losses=(4., 2.))
    speedrun_compare([str(a), str(b)])
    out, page = capsys.readouterr().out, tmp_path/"compare-a-b.html"
    assert "| a " in out and "never |" in out
    assert os.path.samefile(out.splitlines()[-1], page)                # from here or from the root, whichever is shorter
    assert "a and b" in whole(page.read_text(encoding="utf-8")) and page.read_text().count("<svg") == 3
    speedrun_compare([str(a), str(b), "--out", str(tmp_path/"new"/"x.html")])
    assert (tmp_path/"new"/"x.html").is_file()

def test_one_without_validation_one_without_speed(tmp_path):
    "A run that has just begun is compared by its training loss; where no speed is known, seconds aren't"
    a, b = made(tmp_path/"a"), made(tmp_path/"b", val=False)
    both = Comparison([a, b])
    assert both.summary()[1][1][1:3] == ["-", "-"] and both.races()[1][1] == ["b", "never"] and whole(both.page())
    assert all(f">{c.title}</text>" in overlay(both.courses, "steps") for c in both.courses)
    c = made(tmp_path/"c", tok_s=None)
    both = Comparison([a, c])
    assert both.summary()[1][1][5] == "-" and whole(both.page()) and when(both.courses[1], 4.) == "-"
    for f in (a, c): (f/"config.json").unlink()
    both = Comparison([a, c])                                          # tokens aren't known either
    assert both.summary()[1][0][4:6] == ["-", "-"] and "Over tokens" not in whole(both.page())
    assert sum("without config.json" in n for n in both.notes) == 2

def test_only_evaluations(tmp_path):
    a = made(tmp_path/"a")
    (made(tmp_path/"b")/"metrics.jsonl").write_text('{"step": 10, "val_loss": 3.5}\n')
    assert "b" in whole(Comparison([a, tmp_path/"b"]).page())

def test_files_cut_anywhere(tmp_path):
    a, b = made(tmp_path/"a"), made(tmp_path/"b")
    data = (b/"metrics.jsonl").read_bytes()
    for n in range(80, len(data), len(data)//15):
        (b/"metrics.jsonl").write_bytes(data[:n])
        assert "b" in Comparison([a, b]).text()

@pytest.mark.filterwarnings("ignore:Glyph")    # in the picture's font
@pytest.mark.parametrize("junk", ['{"step": 9007199254740991, "loss": 1, "tok_s": 1e-300}', '{"step": 3, "loss": "x", "tok_s": [1]}',
                                  '{"step": 0, "loss": 1e300, "tok_s": 1e300}', '{"step": 1, "val_loss": 1e300}'])
def test_hostile_folders(tmp_path, junk):
    a, b = made(tmp_path/"a"), made(tmp_path/"b $\\frac$ <b>", data=HOSTILE, rungs=[HOSTILE], lr={"x": HOSTILE}, seq_len="x")
    with (b/"metrics.jsonl").open("a") as f: f.write(junk + "\n")
    both = Comparison([a, b])
    text = whole(both.page())
    assert "alert('x')" in text and "b $\\frac$ <b>" in text and "\n\n" in both.text()

# --- real runs ---

@pytest.fixture(scope="module")
def two(tmp_path_factory, nano):
    folder = tmp_path_factory.mktemp("two")
    return [train(options(folder, steps=20, name=f"lr{lr}", lr=lr), progress=False)[0].folder for lr in (1e-3, 1e-2)]

def test_real_runs(two):
    both = Comparison(two)
    assert both.notes == [] and [k for k, *_ in both.differences()[1]] == ["lr"]
    (*_, steps, tokens, seconds, speed, gib), _ = both.summary()[1]
    assert (steps, tokens) == ("20", f"{20*64:,}") and float(seconds) > 0
    text = whole(both.page())
    assert all(t in text for t in ("Over steps", "Over tokens", "Over seconds", "What differs"))

# --- learning rates ---

def searching(folder, **kw):
    "Options of a quick search"
    plain = asdict(options(folder, **(dict(steps=20, name="", out=str(folder/"searches")) | kw.pop("train", {}))))
    return LrOptions(**plain | kw)

@pytest.fixture
def search(tmp_path, nano): return Search(searching(tmp_path, train=dict(lr=.01), rates=3), progress=False)

def test_each_rate_begins_at_the_same_place(search):
    "To the bit, also after another rate; other batches on another turn"
    one, hot, two, other = (search.try_rate(r, t) for r, t in ((.01, 0), (.5, 0), (.01, 0), (.01, 1)))
    assert one == two and one["losses"][0] == hot["losses"][0] != other["losses"][0]
    assert one["losses"] != hot["losses"] and one["steps"] == 20 and one["val_loss"] > 0

@pytest.mark.parametrize("recipe", ["adamw", "muon", "speedrun"])
def test_a_short_run_is_a_training_run(tmp_path, nano, recipe):
    "Its losses are those of speedrun_train with the same options and that rate, whatever groups the recipe has"
    search = Search(searching(tmp_path, train=dict(recipe=recipe)), progress=False)
    folder = train(options(tmp_path, steps=20, lr=.02, recipe=recipe), progress=False)[0].folder
    theirs = [r["loss"] for r in read_run(folder)["rows"] if "loss" in r]
    mine = search.try_rate(.02)
    assert mine["losses"] == pytest.approx(theirs, abs=1e-6)
    if recipe != "speedrun": # which evaluates an average of the weights
        assert mine["val_loss"] == pytest.approx(read_run(folder)["result"].val_loss, abs=1e-6)

def test_all_groups_keep_their_proportions(search):
    "A recipe's groups have rates of their own"
    t, seen = search.trainer, []
    reset = search.reset
    def own_rates(turn=0):
        reset(turn)
        t.step.opt.param_groups[1]["ratio"] = 10*t.step.opt.param_groups[0].get("ratio", 1.)
    search.reset = own_rates # of each short run
    one_step = search.one_step
    def noting(*args):
        loss = one_step(*args)
        seen.append([g["lr"] for g in t.step.opt.param_groups])
        return loss
    search.one_step = noting
    search.try_rate(.04)
    assert all(b == pytest.approx(10*a) for a, b in seen) and max(a for a, _ in seen) == pytest.approx(.04)

def test_a_run_that_diverges_ends_early(search, monkeypatch):
    take, n = TrainStep.take_updates, []
    def worse(self, *args): n.append(1); return take(self, *args)*(1. if len(n) < 4 else math.nan)
    monkeypatch.setattr(TrainStep, "take_updates", worse)
    o = search.try_rate(.01)
    assert o["val_loss"] is None and o["steps"] == 10 == len(n)
    n[:] = []
    with fails(RunError, "every learning rate diverged", "--lowest"): search.search(0)

def test_what_diverged():
    assert diverged([3.] + [math.inf]) and not diverged([9.]*10) and diverged([3.]*5 + [4.]*10) and not diverged([3.]*5 + [3.2]*10)

def test_search(search):
    found = search.search(2)
    losses = {o["lr"]: o["val_loss"] for o in found.tried}
    assert [*losses] == pytest.approx([.01/16, .01, .16]) and found.best["val_loss"] == min(losses.values())
    assert [o["turn"] for o in found.repeats] == [1, 2] and all(o["lr"] == found.best["lr"] for o in found.repeats)
    ends = [found.best["val_loss"], *(o["val_loss"] for o in found.repeats)]
    assert found.noise == max(ends) - min(ends) and found.usual == .01 and found.step_tokens == 64
    assert sum(row[-1] == "best" for row in found.rows()[1]) == 1

def made_up(losses, repeats=()):
    runs = [dict(lr=10.**i, turn=0, val_loss=v, steps=20, losses=[5.]*20) for i, v in enumerate(losses)]
    return Found("muon:momentum=.9", 20, 64, 10., runs, [dict(runs[0], val_loss=v) for v in repeats])

@pytest.mark.parametrize("losses, edge", [((3., 4., 5.), "lowest"), ((5., 4., 3.), "highest"), ((5., 3., 4.), None), ((5., 3., None), None),
                                          ((3.,), "highest")])
def test_the_edge_is_told(losses, edge):
    found = made_up(losses)
    assert "--recipe muon:momentum=.9 --lr" in found.text()
    assert found.edge == edge and any("may lie beyond" in s for s in found.verdict()) == bool(edge)
    if edge: assert f"--{edge}" in found.text()
    assert "it ran once" in found.text()

def test_noise_decides_what_is_as_good():
    found = made_up((3.5, 3., 3.05, 3.2, None), repeats=(3.1, 3.02))
    assert found.noise == pytest.approx(.1)
    assert [row[-1] for row in found.rows()[1]] == ["", "best", "as good", "", "diverged after 20 steps"]
    assert made_up((3., 2.), repeats=(None,)).noise is None             # it diverged on other batches

@pytest.mark.parametrize("bad, said", [
    (dict(train=dict(minutes=1., steps=0)), "minutes is not for a search"), (dict(train=dict(total_tokens=9999, steps=0)), "total_tokens is not for"),
    (dict(train=dict(resume="x")), "resume is not"), (dict(train=dict(stream=True)), "stream is not for .* the same batches"),
    (dict(train=dict(gpus=2)), "one process"), (dict(train=dict(target_loss=2.)), "target_loss is not"), (dict(train=dict(ema_decay=.9)), "ema_decay is not"),
    (dict(lowest=1.), "from 1 to 0.16"), (dict(lowest=2., highest=1.), "from 2 to 1")], ids=str)
def test_bad_searches(tmp_path, nano, bad, said):
    bad = {**bad, "train": dict(lr=.01) | bad.get("train", {})}
    with fails(InputError, said): Search(searching(tmp_path, **bad), progress=False)
    assert not (tmp_path/"searches").exists()

def test_lr_command(tmp_path, nano, capsys):
    data, out = write_bins(tmp_path/"bins"), tmp_path/"out"
    args = ["--data", str(data), "--model", "nano", "--rungs", "naive", "--micro_batch_size", "4", "--seq_len", "16", "--vocab", "300", "--eval_tokens", "128",
            "--steps", "10", "--rates", "2", "--lowest", "1e-3", "--highest", "1e-2", "--repeats", "1", "--out", str(out), "--name", "found"]
    speedrun_lr(args)
    said = capsys.readouterr().out
    assert "learning rate 0.01: " in said and "| best" in said and "best learning rate: 0.01" in said and "the highest rate" in said
    folder = out/"found"
    assert {p.name for p in folder.iterdir()} - {".lock"} == {"lr.json", "lr.md"}
    told = json.loads((folder/"lr.json").read_text())
    assert len(told["tried"]) == 2 and len(told["tried"][0]["losses"]) == 10
    with pytest.raises(SystemExit): speedrun_lr(args)
    assert "exists already and is left alone" in capsys.readouterr().err

@pytest.mark.parametrize("words", [["--num_evals", "4"], ["--profile", "3"], ["--keep_last", "1"], ["--minutes", "1"]])
def test_lr_refuses_what_it_does_not_read(capsys, words):
    with pytest.raises(SystemExit): speedrun_lr(words)
    assert f"{words[0][2:]} is not for a search" in capsys.readouterr().err
    with pytest.raises(SystemExit): speedrun_lr(["--help"])
    assert words[0] not in capsys.readouterr().out

# --- all of a run in its report ---

def test_the_report_says_all_that_the_folder_knows(tmp_path):
    folder = made(tmp_path/"a", recipe="muon", schedule="cosine", warmup_steps=3, why=dict(chunked_ce="of 4 the fastest, 3.1 ms"))
    rows = [dict(step=s, loss=3., lr=.02, lr_embed=.2, lr_vector=.01, momentum=.9, weight_decay=.1, tok_s=9.) for s in range(1, 30)]
    (folder/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, dict(step=9, val_loss=2.5), dict(step=29, val_loss=2.9)]))
    start = dict(seconds=9.5, phases=[dict(name="choose rungs", seconds=7.25, depth=0), dict(name="measure", seconds=7., depth=1)])
    (folder/"result.json").write_text(json.dumps(dict(steps=29, val_loss=2.9, start=start, reached=True)))
    (folder/"evals.json").write_text(json.dumps([dict(task="lambada", scores=dict(acc=.3125), errors=dict(acc=.0064), n=5153),
                                                dict(task="text", scores=dict(bits_per_byte=1.1))]))
    (folder/"profile.md").write_text("| kernel | ms |")
    for n in (8, 29): (folder/f"checkpoints/step-{n:08}").mkdir(parents=True)
    (folder/"samples.jsonl").write_text("".join(json.dumps(dict(step=s, text=f"text {s}")) + "\n" for s in range(9)))
    page = html_report(folder).read_text(encoding="utf-8")
    text = whole(page)
    for said in ("muon: peak rate 0.001, cosine, 3 steps of warm-up", "embed", "vector", "Momentum", "Weight decay", "choose rungs", "7.25", "9.50",
                 "chunked_ce", "of 4 the fastest", "lambada", "0.3125", "± 0.0064", "5,153", "bits_per_byte", "| kernel | ms |", "8, 29",
                 "5 of the 9 texts", "finished: it reached its target", "2.500", "step 9"): assert said in text, said
    for title in ("What it can do", "The start", "Chosen by measuring", "Profile"): assert f"<h2>{title}</h2>" in page
    assert "Events" not in text                                        # rates are no events

@pytest.mark.parametrize("junk", ['[{"task": 3}]', "{", '[{"task": "a", "scores": {"b": "x"}}]', "null"])
def test_scores_of_the_wrong_kind_are_left_out(tmp_path, junk):
    folder = made(tmp_path/"a")
    (folder/"evals.json").write_text(junk)
    assert "evals.json" in " ".join(read_run(folder)["notes"]) and "What it can do" not in html_report(folder).read_text()

def test_hostile_scores_and_reasons(tmp_path):
    folder = made(tmp_path/"a", why={HOSTILE: HOSTILE}, recipe=HOSTILE, schedule=HOSTILE)
    (folder/"evals.json").write_text(json.dumps([dict(task=HOSTILE, scores={HOSTILE: 1}, n=2)]))
    (folder/"profile.md").write_text(HOSTILE)
    (folder/"result.json").write_text(json.dumps(dict(steps=1, start=dict(phases=[dict(name=HOSTILE, seconds=1, depth=10**9)]))))
    with (folder/"metrics.jsonl").open("a") as f: f.write(json.dumps({"step": 5, "lr_" + HOSTILE: 3.}) + "\n")
    assert whole(html_report(folder).read_text(encoding="utf-8")).count("alert('x')") >= 8
