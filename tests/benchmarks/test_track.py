"Entries of the one-GPU track that cheat, and those that the checker can't tell from honest ones; autoresearch as a contestant."
import json, math
from copy import deepcopy
from pathlib import Path
import msgspec, numpy as np, pytest
from helpers.tiny_runs import cache, fails # noqa: F401: fixtures
from llm_speedrun.benchmarks import track, track_logs
from llm_speedrun.benchmarks.adapters import FullWindows
from llm_speedrun.benchmarks.clock import Job
from llm_speedrun.benchmarks.race import run_job
from llm_speedrun.cli import speedrun_race
from llm_speedrun.data.corpus import open_corpus, train_tokenizer
from llm_speedrun.data.tokenizer import write_tokenizer
from llm_speedrun.io_utils import InputError
from make_readme import ROOT

SEQ = 32
MODEL = "def load():\n    return lambda x, y: y.numel()*x.new_tensor({loss}, dtype=float)\n" # that gives each token the same loss

@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "A folder of tokens with a test part: three texts of random words"
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    texts = {k: " ".join(f"{n:x}" for n in rng.integers(10**6, size=size)) for k, size in dict(train=8000, val=800, test=800).items()}
    tok = train_tokenizer(texts.values(), 400)
    for k, t in texts.items(): np.array([0, *tok.encode(t).ids], "<u2").tofile(folder/f"{k}.bin")
    write_tokenizer(folder, tok)
    return folder

@pytest.fixture(scope="module")
def honest(text):
    "An entry and its rows as dicts: three runs, scored six times"
    parts = msgspec.to_builtins(track.text_of(open_corpus(text), SEQ))
    def scored(part, key, loss): return {f"{key}loss": loss, f"{key}bpb": loss*part["tokens"]/math.log(2)/part["bytes"]}
    def row(seed, i): return dict(seed=seed, step=100*i, seconds=50.*i, tokens=i*1000, at=1e9 + 2000*seed + 53.*i,
                                  **scored(parts["val"], "", 4 + .01*seed + 1/i))
    rows = [row(s, i) for s in range(3) for i in range(1, 7)]
    for s in range(3): rows[6*s + 5].update(scored(parts["test"], "test_", 4. + .01*s))
    entry = dict(name="honest", by="me", about="it tries", code="here", command="true", minutes=5, gpu="NVIDIA H100 80GB HBM3", torch="2.15.0",
                 date="2026-11-28", seq=SEQ, batch=10, matrices=10**8, text=parts, runs=[without(r, "at") for r in rows[5::6]])
    return entry, rows

def without(d, *keys): return {k: v for k, v in d.items() if k not in keys}

class Made:
    "An entry of one's own, to be changed and checked"
    def __init__(self, folder, text, honest):
        self.path, self.text = Path(folder)/"entry.json", text
        self.e, self.rows = deepcopy(honest)
    def last(self): return self.rows[5::6]
    def results(self): self.e["runs"] = [without(r, "at") for r in self.last()] # as the log has them
    def check(self, data=False, losses=None, digest=None):
        "Write the entry with a log that its digest fits, unless another is given, and check it"
        track.write_entry(self.path, self.e, self.rows)
        if digest: self.path.write_text(json.dumps(self.e | dict(log_sha256=digest)))
        weights = []
        for i, loss in enumerate(losses or []):
            (at := self.path.with_name(f"model{i}.py")).write_text(MODEL.format(loss=loss))
            weights.append(f"{at}:load")
        return track.check_entry(self.path, str(data if data not in (True, False) else self.text if data else ""), weights)

@pytest.fixture
def made(tmp_path, text, honest, monkeypatch):
    monkeypatch.setattr(track, "CONTEXT", SEQ); monkeypatch.setattr(track, "LEAST", 1000)
    return Made(tmp_path, text, honest)

def test_an_honest_entry_passes(made):
    assert made.check()[1] == ["its text: give --data", "its losses: give --rescore for each run"]
    assert made.check(data=True, losses=[4., 4.01, 4.02])[1] == []

# --- cheats: what is changed, and what is said ---

def better_result(m):
    for r in m.e["runs"]: r["test_loss"] -= .5; r["test_bpb"] *= r["test_loss"]/(r["test_loss"] + .5)
def better_log(m): # log and result, not the bits per byte
    for r in m.last(): r["test_loss"] -= .5
    m.results()
def better_bytes(m):
    for r in m.last(): r["test_bpb"] *= .9
    m.results()
def rounded_bytes(m):
    for r in m.last(): r["test_bpb"] -= .001
    m.results()
def one_log(m):
    for k in range(6):
        for s in (1, 2): m.rows[6*s + k].update(without(m.rows[k], "seed", "at"))
    m.results()
def off_the_clock(m):
    for r in m.rows: r["at"] += 40*(r["step"] > 300)
def at_the_end(m): # the last stretch takes ten minutes of which one counts
    for r in m.last(): r["at"] += 600
def slow_clock(m):
    for r in m.rows: r["seconds"] *= .7; r["step"] *= 1
    m.results()
def fast_clock(m): # claims more time than there was, as for 15 minutes
    for r in m.rows: r["at"] = 1e9 + 2000*r["seed"] + r["seconds"]*.5
def backwards(m):
    m.rows[2]["seconds"] = m.rows[1]["seconds"]
def late(m):
    for r in m.rows: r["seconds"] *= 1.05; r["at"] += 3*r["step"]
    m.results()
def more_tokens(m):
    for r in m.rows: r["tokens"] *= 2
    m.results()
def too_fast(m):
    for r in m.rows: r["tokens"] *= 10**6
    m.e["batch"] *= 10**6; m.e["text"]["train"]["tokens"] *= 10**6
    m.results()
def twice(m):
    m.e["text"]["train"]["tokens"] = 5000
def left_out(m):
    for r in m.rows: r["seed"] *= 2
    m.results()
def two_seeds(m):
    m.rows = m.rows[:12]; m.results()
def same_seed(m):
    m.e["runs"][1] = m.e["runs"][0]
def not_in_log(m):
    m.rows = m.rows[:12]
def tuned(m):
    m.e["text"]["test"]["sha256"] = m.e["text"]["val"]["sha256"]
def peeked(m):
    for r in m.rows: r["test_loss"], r["test_bpb"] = m.last()[0]["test_loss"], m.last()[0]["test_bpb"]
    m.results()
def few_evaluations(m):
    m.rows = [r for r in m.rows if r["step"] > 200]
def other_card(m): m.e["gpu"] = "NVIDIA H200"
def pcie(m): m.e["gpu"] = "NVIDIA H100 PCIe"
def no_test(m):
    m.last()[1].pop("test_loss"); m.results()
def hidden_run(m): # a fourth one is in the log, and not in the result
    m.rows += [r | dict(seed=3, at=r["at"] + 9999) for r in m.rows[:6]]
def no_time_of_day(m): m.rows[3].pop("at")
def longer_rows(m): m.e["seq"] = 64
def small_test(m): track.LEAST = 10**6
def ten_minutes(m): m.e["minutes"] = 10
def free(m): m.e["text"] = None; m.e["runs"] = m.e["runs"][:1]

CHEATS = [(better_result, "has test_loss 3.5, and the last row of its log 4.0"), (better_log, "test_bpb .* a test_loss of 3.5000 .* is another"),
          (better_bytes, "is another"), (rounded_bytes, "is another"), (one_log, "seed 1 and the run of seed 0 have the same losses"),
          (off_the_clock, "stood still for 43.0 s before step 400, and for 3.0 s"), (at_the_end, "stood still for 603.0 s before step 600"),
          (slow_clock, "stood still for 90 s of 265 s"), (fast_clock, "ran 25.0 s while no time passed"), (backwards, "seconds doesn't grow in row 3"),
          (late, "took 315.0 s, more than 5 minutes"), (more_tokens, "step 100 has 2,000 tokens: steps of 10 make 1,000"),
          (too_fast, "computed 12,000 TFLOP/s, and the H100 has 1,979"), (twice, "read 6,000 tokens, and the text has 5,000"),
          (left_out, "seeds are 0, 2, 4"), (two_seeds, "it has 2 runs of its author, and needs 3"), (same_seed, "seeds are 0, 0, 2"),
          (not_in_log, "the log has no row of the run of seed 2"), (tuned, "its test text is its validation text"),
          (peeked, "scored before the last step"), (few_evaluations, "has 4 evaluations, and needs 5"), (other_card, "gpu is 'NVIDIA H200': the track is for 'NVIDIA H100 80GB HBM3'"),
          (pcie, "gpu is 'NVIDIA H100 PCIe'"), (no_test, "seed 1 lacks tokens, loss, bpb, test_loss or test_bpb"),
          (hidden_run, "the log has a row of the run of seed 3, which the entry doesn't have"), (no_time_of_day, "a row of its log has no at"),
          (longer_rows, "scored in rows of 64 tokens: race with --seq_len 32"), (small_test, "and needs 1,000,000"), (ten_minutes, "minutes must be one of 5, 15: 10"), (free, "it has 1 runs of its author")]

@pytest.mark.parametrize("cheat, said", CHEATS, ids=[f.__name__ for f, _ in CHEATS])
def test_cheats_are_named(made, cheat, said):
    cheat(made)
    with fails(InputError, "entry.json can't stand:", said): made.check()

def test_another_runs_log(made):
    "With its own digest in the entry, and the same result"
    good = made.check()[0].log_sha256
    made.rows[0]["loss"], made.rows[0]["bpb"] = (x*.9 for x in (made.rows[0]["loss"], made.rows[0]["bpb"]))
    with fails(InputError, "entry.jsonl isn't the log whose digest is log_sha256"): made.check(digest=good)

@pytest.mark.parametrize("part, field, change", [("train", "sha256", lambda v: "0"*64), ("test", "sha256", lambda v: "0"*64), ("train", "tokens", lambda v: v + 1)])
def test_another_text(made, part, field, change):
    made.e["text"][part][field] = change(made.e["text"][part][field])
    with fails(InputError, rf"text.{part}.{field} is .*, and that of text"): made.check(data=True)

def test_bytes_of_another_tokenizer(made):
    "All follows from too many bytes: only the text shows it"
    made.e["text"]["test"]["bytes"] *= 2
    for r in made.last(): r["test_bpb"] /= 2
    made.results(); made.check()
    with fails(InputError, "text.test.bytes is"): made.check(data=True)

@pytest.mark.parametrize("where", ["train", "val"])
def test_test_text_elsewhere(made, where, text, tmp_path):
    "A tenth of the test text, in the training or validation tokens of a folder that is claimed rightly"
    folder = tmp_path/"leaky"
    folder.mkdir()
    for p in text.iterdir(): (folder/p.name).write_bytes(p.read_bytes())
    test, own = (np.fromfile(folder/f"{k}.bin", "<u2") for k in ("test", where))
    np.concatenate([own[:77], test[:len(test)//10], own[77:]]).tofile(folder/f"{where}.bin")
    made.e["text"] = msgspec.to_builtins(track.text_of(open_corpus(folder), SEQ)) | dict(name="text")
    for r in made.rows:
        p = made.e["text"]["val"]; r["bpb"] = r["loss"]*p["tokens"]/math.log(2)/p["bytes"]
    made.results(); made.check()
    with fails(InputError, rf"(9|10)\.\d% of the spans of its test text are in its {where} tokens"): made.check(data=folder)

def test_spans_across_parts(text):
    "Wherever the tokens are cut to be looked at, each span is found once"
    train = open_corpus(text).train
    for part in (50, 64, 10**6): assert track.shared_spans(train, train.part(1, 1 + 20*track.SPAN), part=part) == 1., part
    assert track.shared_spans(train, train.part(0, track.SPAN - 1)) == 0. == track.shared_spans(train.part(0, 9), train.part(0, 99))

def test_the_text_has_one_digest_in_all_tokenizers(text, tmp_path):
    parts = {k: open_corpus(text).tokenizer.decode(np.fromfile(text/f"{k}.bin", "<u2")[1:].tolist()) for k in ("train", "val", "test")}
    tok = train_tokenizer(parts.values(), 300)
    for k, t in parts.items(): np.array([0, *tok.encode(t).ids], "<u2").tofile(tmp_path/f"{k}.bin")
    write_tokenizer(tmp_path, tok)
    a, b = (track.text_of(open_corpus(folder), SEQ) for folder in (text, tmp_path))
    assert a.test.sha256 == b.test.sha256 != a.val.sha256 == b.val.sha256 and a.train.sha256 != b.train.sha256 and a.test.tokens < b.test.tokens
    assert abs(a.test.bytes/b.test.bytes - 1) < .05

def test_a_folder_without_test(made, text, tmp_path):
    for k in ("train.bin", "val.bin", "tokenizer.json"): (tmp_path/k).write_bytes((text/k).read_bytes())
    with fails(InputError, "has no test part: put test.bin next to its training tokens"): made.check(data=tmp_path)

def all_forged(m):
    for r in m.last(): r["test_loss"] -= .5; r["test_bpb"] *= r["test_loss"]/(r["test_loss"] + .5)
    m.results()
def times_forged(m): # three quarters of the clock's seconds, and of those of the day
    for r in m.rows: r["seconds"] *= .75; r["at"] = 1e9 + 2000*r["seed"] + 40*r["step"]/100
    m.results()
def renamed_seeds(m): # the best of many
    pass

@pytest.mark.parametrize("forgery", [all_forged, times_forged, renamed_seeds])
def test_what_no_file_shows(made, forgery):
    "The page says so; the first of them is caught by its weights"
    forgery(made); made.check(data=True)
    if forgery is all_forged:
        with fails(InputError, "seed 0 claims a test_loss of 3.5000, and .*model0.py:load has 4.0000"): made.check(data=True, losses=[4.])

def test_weights_near_enough(made):
    made.check(data=True, losses=[4. + .9*track.AGREE])
    with fails(InputError, "claims"): made.check(data=True, losses=[4. + 1.1*track.AGREE])
    with fails(InputError, "claims"): made.check(data=True, losses=[4.01])
    with fails(InputError, "4 weights are given, and it has 3 runs"): made.check(data=True, losses=[4., 4.01, 4.02, 4.])

# --- records ---

def like(made, date, *losses):
    e = made.check()[0]
    e.date, e.name = date, date
    for r, loss in zip(e.runs, losses): r.test_bpb = loss
    return e

def test_a_record_is_beaten_by_more_than_chance(made):
    old, near, better, worse = (like(made, *how) for how in (("2026-01-01", 1., 1.01, 1.02), ("2026-01-02", .99, 1., 1.01),
                                                               ("2026-01-03", .95, .955, .96), ("2026-01-04", .954, .955, .956)))
    assert not track.beats(near, old) and track.beats(better, old) and not track.beats(worse, better)
    assert track.record([worse, better, near, old]) is better and track.record([near, old]) is old
    assert track.score(old) == (pytest.approx(1.01), pytest.approx(2.920*.01/3**.5))

def test_others_may_run_it_again(made):
    made.rows += [r | dict(by="she", loss=r["loss"] + .001, bpb=r["bpb"]*(1 + .001/r["loss"])) for r in made.rows[:6]]
    made.e["runs"].append(without(made.rows[-1], "at"))
    assert len(made.check()[0].runs) == 4

# --- the command ---

def test_the_command(made, capsys, text):
    made.check()
    speedrun_race(["--check", str(made.path), "--data", str(text)])
    said = capsys.readouterr().out
    assert "honest, 5 minutes, 3 runs, " in said and said.endswith("no rule is broken\n  not checked: its losses: give --rescore for each run\n")

def ends(capsys, *args):
    with pytest.raises(SystemExit): speedrun_race(list(args))
    return capsys.readouterr().err

def test_what_the_command_refuses(made, capsys, tmp_path):
    other_card(made); track.write_entry(made.path, made.e, made.rows)
    assert "error: " in (said := ends(capsys, "--check", str(made.path))) and said.count("\n") == 2 and "NVIDIA H200" in said
    assert "give the text to score again: --data" in ends(capsys, "--check", str(made.path), "--rescore", "a")
    assert "unknown contestant to --enter 'main'. Did you mean 'mine'?" in ends(capsys, "--run", "mine: --recipe muon", "--enter", "main")
    assert "unknown kind of log 'moded'. Did you mean 'modded'?" in ends(capsys, "--enter", "moded=a.txt")
    assert "nowhere.txt: no such file or folder" in ends(capsys, "--enter", "modded=nowhere.txt")
    made.path.write_text("{}")
    assert "missing required field `name`" in ends(capsys, "--check", str(made.path))

def test_an_entry_on_the_page_stands():
    found = [track.check_entry(p)[0] for p in (ROOT/"nbs/site/measurements/track").glob("*.json")]
    assert found and all(e.text or not e.seq for e in found)

# --- logs ---

@pytest.mark.parametrize("value", ["9**9**9", "1 << 999999999", "'a'*9", "open('x')", "[1][0]"])
def test_no_code_of_a_log_runs(value):
    "Expressions of a program in a log that aren't plain arithmetic are no number"
    assert track_logs.constant(track_logs.ast.parse(value, mode="eval").body) is None
    assert track_logs.modded_tokens(f"S = [TrainingStage(duration=1, batch_size={value})]\nclass A:\n    num_scheduled_iterations: int = 9\n    num_extension_iterations: int = 0\n") is None
    assert track_logs.modded_tokens("a b c") is None

# --- autoresearch in a race ---

TRAIN = '''
import math, time, torch, torch.nn as nn, torch.nn.functional as F
from dataclasses import dataclass
from kernels import get_kernel
cap = torch.cuda.get_device_capability()
repo = "hopper" if cap == (9, 0) else "other"
fa3 = get_kernel(repo).flash_attn_interface
from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, make_dataloader, evaluate_bpb
class GPT(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.wte, self.qkv, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, 3*dim), nn.Linear(dim, vocab)
    def forward(self, idx, targets=None, reduction='mean'):
        h = self.wte(idx)
        q, k, v = (t.unflatten(-1, (-1, 16)) for t in self.qkv(h).chunk(3, -1))
        h = h + fa3.flash_attn_func(q, k, v, causal=True, window_size=(-1, 0)).flatten(-2)
        return F.cross_entropy(self.head(h).flatten(0, 1).float(), targets.flatten(), reduction=reduction)
ASPECT_RATIO = 64
WINDOW_PATTERN = "SSSL"
TOTAL_BATCH_SIZE = 2**19
WEIGHT_DECAY = 0.2
DEPTH = 8
DEVICE_BATCH_SIZE = 128
torch.manual_seed(42)
torch.cuda.manual_seed(42)
device = torch.device("cuda")
autocast_ctx = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)
tokenizer = Tokenizer.from_directory()
def dim(depth):
    base_dim = depth * ASPECT_RATIO
    return base_dim
model = GPT(tokenizer.get_vocab_size(), dim(DEPTH)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=WEIGHT_DECAY)
for group in optimizer.param_groups: group["initial_lr"] = group["lr"]
model = torch.compile(model, dynamic=False)
train_loader = make_dataloader(tokenizer, DEVICE_BATCH_SIZE, MAX_SEQ_LEN, "train")
x, y, epoch = next(train_loader)
total_training_time, step, seen = 0, 0, []
while True:
    torch.cuda.synchronize()
    t0 = time.time()
    for micro_step in range(TOTAL_BATCH_SIZE//(DEVICE_BATCH_SIZE*MAX_SEQ_LEN)):
        with autocast_ctx:
            loss = model(x, y)
        loss.backward()
        x, y, epoch = next(train_loader)
    progress = min(total_training_time / TIME_BUDGET, 1.0)
    lrm = 1 - progress
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lrm
    optimizer.step()
    model.zero_grad(set_to_none=True)
    seen.append(progress)
    if math.isnan(loss.item()) or loss.item() > 100:
        exit(1)
    torch.cuda.synchronize()
    t1 = time.time()
    step += 1
    if step > 10 and total_training_time >= TIME_BUDGET:
        break
assert seen[0] < 1e-6 and seen[-1] > .8, seen
print(f"{evaluate_bpb(model, tokenizer, DEVICE_BATCH_SIZE):.6f}")
'''

@pytest.fixture
def raced(tmp_path, monkeypatch, text):
    "A function: run autoresearch's program, a small one with the same lines where we change it, and return the result"
    def run(program=TRAIN, **options):
        (tmp_path/"clone").mkdir(exist_ok=True); (tmp_path/"clone/train.py").write_text(program)
        (folder := tmp_path/"race/autoresearch/seed-0").mkdir(parents=True)
        job = Job("autoresearch", "autoresearch", str(text), seconds=1.5, seq=SEQ, evals=2, clone=str(tmp_path/"clone"), options=dict(batch=256, width=32) | options)
        (folder/"job.json").write_bytes(msgspec.json.encode(job))
        monkeypatch.chdir(tmp_path)
        run_job(folder)
        return json.loads((folder/"result.json").read_text())
    return run

def test_autoresearch_races(raced):
    r = raced(micro=4)
    assert r["loss"] < 6 and len(r["marks"]) == 2 and r["tokens"] == r["step"]*256 and r["seconds"] > 0
    assert r["marks"][0]["at"] < r["marks"][1]["at"] and r["changes"]["DEVICE_BATCH_SIZE = 128"] == "DEVICE_BATCH_SIZE = 4"

def test_autoresearch_that_diverges(raced):
    assert "its loss in training is above 100" in raced(TRAIN.replace("loss = model(x, y)\n        loss", "loss = model(x, y)*1e9\n        loss"))["failed"]

def test_another_version_of_autoresearch(raced):
    with fails(InputError, "'DEPTH = 8' 0 times in place of once: it is another version"): raced(TRAIN.replace("DEPTH = 8", "DEPTH = 9"))

def test_full_windows_attend_causally():
    import torch
    q, k, v = torch.randn(3, 2, 5, 2, 8, dtype=torch.float64)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)/8**.5 + torch.full((5, 5), -math.inf).triu(1)
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    torch.testing.assert_close(FullWindows.flash_attn_func(q, k, v, True, (-1, 0)), want)

@pytest.mark.cuda
def test_autoresearch_keeps_its_windows_on_a_gpu(raced):
    "FlashAttention-3 where it loads; else full windows, and it says so"
    r = raced(micro=4)
    assert r["changes"]['WINDOW_PATTERN = "SSSL"'] in ('WINDOW_PATTERN = "SSSL"', 'WINDOW_PATTERN = "L"') and 'device_type="cuda"' not in r["changes"]
