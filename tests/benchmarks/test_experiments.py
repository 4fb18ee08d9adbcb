"The scripts of the race's experiments on a CPU, with very small models: the corpus, ablations, pairs of seeds, the noise scale."
import json, random, subprocess, sys
from pathlib import Path
import numpy as np, pytest
from helpers.tiny_runs import fails
from llm_speedrun.data.corpus import open_corpus, train_tokenizer
from llm_speedrun.io_utils import InputError
sys.path.insert(0, str(Path(__file__).resolve().parents[1])) # where the scripts are
import make_corpus

WORDS = [f"{a}{b}" for a in ("ba", "ko", "ri", "tu", "sel", "mon") for b in ("la", "ne", "shi", "do", "ver", "x")]

def text(seed, n=120):
    r = random.Random(seed)
    return " ".join(r.choices(WORDS, k=n))

def git(folder, *words): return subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True, text=True).stdout.strip()

@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    "A repository with texts, a copy of one, one that differs in white space, near copies of all in another folder, and files that aren't taken"
    clones = tmp_path_factory.mktemp("clones")
    repo = clones/"some+docs"
    (repo/"near").mkdir(parents=True); (repo/"own").mkdir()
    for k in range(60):
        (repo/f"own/{k:02}.md").write_text(f"---\ntitle: {k}\n---\n" + text(k))
        (repo/f"near/{k:02}.md").write_text(text(k, 110) + " " + text(1000 + k, 10)) # most of it is the same
    (repo/"own/copy.md").write_text(text(0)); (repo/"own/spaces.md").write_text(text(1).replace(" ", "\n"))
    (repo/"own/code.c").write_text(text(7000)); (repo/"own/short.md").write_text("short"); (repo/"own/binary.md").write_bytes(b"\xff\xfe\x80"*100)
    (repo/"own/link.md").symlink_to("x"*210) # whose blob is long enough for a text
    git(repo, "init", "-q"); git(repo, "add", "-A"); git(repo, "commit", "-qm", "texts")
    return clones, [dict(repository="some/docs", commit=git(repo, "rev-parse", "HEAD"), license="CC0", suffixes=[".md"])]

@pytest.fixture(scope="module")
def tok(): return train_tokenizer([text(k) for k in range(60)], 300)

def texts_of(corpus, tokens): # decoded, without end tokens
    ids = np.asarray(tokens[:])
    return [corpus.tokenizer.decode(p[1:].tolist()) for p in np.split(ids, np.flatnonzero(ids == corpus.eot))[1:]]

@pytest.fixture(scope="module")
def made(sources, tok, tmp_path_factory):
    out = tmp_path_factory.mktemp("made")/"corpus"
    return out, make_corpus.make(out, sources[1], sources[0], tok, share=.15)

def test_the_corpus_has_no_duplicates_and_three_parts(made):
    out, record = made
    corpus = open_corpus(out)
    parts = {k: set(texts_of(corpus, t)) for k, t in dict(train=corpus.train, val=corpus.val, test=make_corpus_test(corpus)).items()}
    assert {k: len(v) for k, v in parts.items()} == {k.split("_")[0]: r["texts"] for k, r in record["result"].items()}
    assert not parts["train"] & parts["val"] and not parts["train"] & parts["test"] and not parts["val"] & parts["test"] and parts["val"] and parts["test"]
    assert record["dropped"]["duplicates"] == 2 and record["dropped"]["unreadable or short"] == 1
    assert record["repositories"][0]["files"] == 123, "not the link, the source file and the short one"
    assert sum(len(v) for v in parts.values()) + sum(n for k, n in record["dropped"].items() if "13" in k) == 120
    assert not any(t.startswith("---") for v in parts.values() for t in v)

def make_corpus_test(corpus):
    from llm_speedrun.benchmarks.race import tokens_to_test
    return tokens_to_test(corpus)

def test_held_out_near_copies_are_dropped(made):
    "A near copy stays only where its original isn't training text"
    out, record = made
    corpus = open_corpus(out)
    train = {t[:150] for t in texts_of(corpus, corpus.train)}
    held = texts_of(corpus, corpus.val) + texts_of(corpus, make_corpus_test(corpus))
    assert not any(t[:150] in train for t in held)
    dropped = [n for k, n in record["dropped"].items() if "13" in k]
    assert len(dropped) == 2 and sum(dropped) > 5, "both parts, most of their texts"

def test_the_same_corpus_again(made, sources, tok, tmp_path):
    again = make_corpus.make(tmp_path/"corpus", sources[1], sources[0], tok, share=.15, pinned=made[1]["result"])
    assert again == made[1]
    with fails(InputError, "exists already"): make_corpus.make(tmp_path/"corpus", sources[1], sources[0], tok)

def test_another_result_is_an_error(made, sources, tok, tmp_path):
    "Both another list of files and another result"
    with fails(InputError, "is pinned"): make_corpus.make(tmp_path/"a", [sources[1][0] | dict(digest="0"*64)], sources[0], tok)
    with fails(InputError, "isn't the corpus of the records"): make_corpus.make(tmp_path/"b", sources[1], sources[0], tok, share=.25, pinned=made[1]["result"])

def test_a_file_that_the_clone_lacks(made, sources, tok, tmp_path):
    "A commit that isn't there is asked for at its address, and git's error is passed on"
    with fails(InputError, "git fetch"): make_corpus.make(tmp_path/"a", [sources[1][0] | dict(commit="1"*40, repository="no/such/place")], tmp_path, tok)

def test_grams_find_what_is_common():
    a, b = np.arange(100, dtype=np.uint16), np.arange(50, 150, dtype=np.uint16)
    known = make_corpus.Known([b])
    known.add(a)
    assert known.covered(b) == .5 # 50 to 99
    shifted = make_corpus.Known([b]); shifted.add(a[::-1].copy())
    assert shifted.covered(b) == 0, "their order counts"
    assert make_corpus.Known([a[:12]]).covered(a[:12]) == 0, "no n-gram"

def test_tokens_get_a_test_part(made, tmp_path):
    "Tokens that are there: half of the validation texts become the test, those that are known are dropped"
    corpus = open_corpus(made[0])
    (tmp_path/"in").mkdir()
    one, half = np.asarray(corpus.train[:]), np.asarray(corpus.val[:])
    for name, ids in dict(train=one, val=np.concatenate([half, one[:400], half])).items(): ids.astype("<u2").tofile(tmp_path/f"in/{name}.bin")
    for f in ("meta.json", "tokenizer.json"): (tmp_path/"in"/f).write_bytes((made[0]/f).read_bytes())
    meta = json.loads((tmp_path/"in/meta.json").read_text())
    (tmp_path/"in/meta.json").write_text(json.dumps({k: meta[k] for k in ("vocab", "eot", "dtype")}))
    record = make_corpus.clean(tmp_path/"out", tmp_path/"in")
    cleaned = open_corpus(tmp_path/"out")
    assert np.array_equal(cleaned.train[:], corpus.train[:]) and sum(n for k, n in record["dropped"].items() if "13" in k) >= 2
    parts = [set(texts_of(cleaned, t)) for t in (cleaned.val, make_corpus_test(cleaned))]
    assert parts[0] | parts[1] <= set(texts_of(corpus, corpus.val)) and parts[0] and parts[1]

# --- races, ablations, seeds, noise: very small models ---

SMALL = "--layers 1 --width 32 --heads 2 --micro_batch_size 4 --step_tokens 64 --rungs naive"

def run_script(name, *words):
    p = subprocess.run([sys.executable, str(Path(make_corpus.__file__).with_name(name)), *map(str, words)], capture_output=True, text=True)
    assert not p.returncode, p.stdout + p.stderr
    return p.stdout

def test_an_ablation(made, tmp_path, monkeypatch, capsys):
    "Its contestants are the whole recipe and one without each part; what is there already stays; it is ordered by value"
    import bench_ablation
    from llm_speedrun.train.config import RaceOptions, parse_options
    asked = []
    monkeypatch.setattr(bench_ablation, "speedrun_race", lambda words: asked.append(parse_options(RaceOptions, "speedrun_race", words)[0]))
    from llm_speedrun.benchmarks.race import contestants
    for which in ("parts", "numbers", "all"): bench_ablation.ablate(tmp_path, "stdlib", which, "--rungs", "naive", "--only=default@0")
    for c in asked: assert len(contestants(c.run, "")) == c.run.count("\n") + 1 # all of them are possible
    assert asked[0].minutes == 1 and asked[0].seeds == 3 and asked[0].once and asked[0].only == "default@0"
    assert len(contestants(asked[2].run, "")) == len(contestants(asked[0].run, "")) + len(contestants(asked[1].run, "")) - 1
    found = dict(default=[3., 3.1, 3.2], average=[3.001, 3.102, 3.2], clip=[3.1, 3.2, 3.3], late=[9.])
    record = dict(clock=60., corpus={}, field={k: ["ours", "", ["--recipe"], []] for k in found},
                  results={k: [dict(seed=s, loss=l) for s, l in enumerate(ls)] for k, ls in found.items()})
    (tmp_path/"race.json").write_text(json.dumps(record))
    bench_ablation.report(tmp_path)
    rows = json.loads((tmp_path/"ablation.json").read_text())["rows"]
    assert [(r["without"], r["n"], r["verdict"]) for r in rows] == [("late", 1, "undecided"), ("clip", 3, "different by more than 0.01"), ("average", 3, "equal within 0.01")]

def test_a_race_reads_once_and_tests_last(made, tmp_path):
    "With a test part, no token twice, updates and precision: a run of ours that ends with its text"
    from llm_speedrun.cli import speedrun_race
    out = tmp_path/"race"
    with pytest.raises(SystemExit) as e:
        speedrun_race(["--data", str(made[0]), "--minutes", "5", "--seq_len", "16", "--num_evals", "2", "--once", "--out", str(out), "--run", f"a: --recipe speedrun {SMALL.replace('64', '8192')}"])
    assert e.value.code # too few steps for that batch
    speedrun_race(["--data", str(made[0]), "--minutes", "5", "--seq_len", "16", "--num_evals", "2", "--once", "--out", str(tmp_path/"again"), "--run", f"a: --recipe speedrun {SMALL}"])
    race = json.loads((tmp_path/"again/race.json").read_text())
    r = race["results"]["a"][0]
    assert r["epochs"] <= 1 and r["step"] == (made[1]["result"]["train_000.bin"]["tokens"] - 1)//16//4 and r["seconds"] < 290
    assert r["test_loss"] > 0 and len(r["positions"]) == len(r["test_positions"]) == 4 and "test_loss" not in r["marks"][0] and r["marks"][-1]["test_loss"] == r["test_loss"]
    assert r["updates"] > 2*r["step"] and r["precision"] == "fp32" and r["commit"]
    assert race["corpus"]["sha256"] == {k: v["sha256"] for k, v in made[1]["result"].items()}
    said = (tmp_path/"again/race.md").read_text()
    assert "missed its clock" in said and "| test |" in said.replace("  ", " ").replace("  ", " ") and "loss by position" in said

def test_pairs_of_seeds_have_a_verdict(made, tmp_path):
    same = f"--data {made[0]} --steps 6 --recipe adamw --seq_len 16 --num_evals 2 --sample_tokens 0 {SMALL}"
    said = run_script("bench_seeds.py", tmp_path, "0,1", f"one: {same}", f"same: {same}")
    verdicts = json.loads((tmp_path/"verdicts.json").read_text())
    assert verdicts["same against one"]["verdict"] == "equal within 0.01" and verdicts["same against one"]["n"] == 2 and "equal within 0.01" in said and "undecided" in said
    rows = json.loads((tmp_path/"seeds.json").read_text())
    assert [(r["name"], r["seed"]) for r in rows] == [("one", 0), ("same", 0), ("one", 1), ("same", 1)] and all(len(r["val_losses"]) == 2 and r["corpus"]["tokens"] for r in rows)

def test_the_noise_scale_is_tested(made, tmp_path):
    import bench_noise
    E, N = 5e6, 3e5 # a known line
    curves = {s: [(t*1e4, 5 - .001*t/(1 + s*1024/N)) for t in range(1, 4000)] for s in (8, 32, 128)}
    record = dict(seq=1024, losses=[4.5, 4.], runs=[dict(size=s, seed=0, curve=c, noise=[(4.5, N), (4., 2*N)]) for s, c in curves.items()])
    first, second = bench_noise.judge(record)
    assert first["by_line"] == pytest.approx(N, rel=.01) and first["worst"] < .01 and second["worst"] > .05
    assert first["tokens"][8] == pytest.approx(E*(1 + 8*1024/N), rel=.01)
    said = run_script("bench_noise.py", tmp_path, made[0], "tiny", "3e4", "2,4,8", "0")
    record = json.loads((tmp_path/"noise.json").read_text())
    assert len(record["runs"]) == 3 and record["losses"] == sorted(record["losses"], reverse=True) and len(record["rows"]) == 5 and said

def test_the_race_of_rivals(tmp_path, monkeypatch):
    "All contestants are possible, with the batches and rates that their names say, and options given are kept"
    import bench_race
    from llm_speedrun.benchmarks import adapters, race
    from llm_speedrun.train.config import RaceOptions, parse_options
    for f in ("nanoGPT/train.py", "nanoGPT/model.py", "nanoGPT/configurator.py", f"modded-nanogpt/{adapters.TRACK_3}", "nanochat/nanochat/gpt.py", "nanochat/nanochat/optim.py"):
        (tmp_path/f).parent.mkdir(parents=True, exist_ok=True); (tmp_path/f).touch()
    monkeypatch.setattr(adapters.ModdedNanoGPT, "race_missing", lambda self: "")
    asked = []
    monkeypatch.setattr(bench_race, "speedrun_race", lambda words: asked.append(parse_options(RaceOptions, "speedrun_race", words)[0]))
    bench_race.main(str(tmp_path/"out"), "stdlib", str(tmp_path), "--minutes=1", "--only", "fp8@0")
    c, = asked
    assert (c.minutes, c.seeds, c.num_evals, c.once, c.only) == (1, 3, 8, True, "fp8@0")
    found = {o.name: dict(o.options) for o in race.contestants(c.run, c.peer)}
    assert len(found) == 12 and {"fp8", "bf16", "modded-128k", "nanochat"} <= {*found}
    assert found["batched-32k"]["batch"] == 32768 and found["nanogpt-0.002"]["lr"] == pytest.approx(10/3) and found["nanogpt-0.001"]["batch"] == 32768
    assert [bench_race.rule_batch(n) for n in (38e6, 200e6, 1.48e9)] == [2**17, 2**18, 2**19]
