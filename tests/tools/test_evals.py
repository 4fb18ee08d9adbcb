"""Evaluations: every log-likelihood and score as lm-evaluation-harness gives it, ours and transformers' alike, and one line for what
can't be. What the harness says of a tiny model is in evals/expected.json, which make_evals.py wrote."""
import importlib.util, json, math, pickle, re, shutil
from pathlib import Path
from dataclasses import replace
import numpy as np, pytest
from llm_speedrun.data.corpus import open_corpus, train_tokenizer, write_shards
from llm_speedrun.tools.evals import ENGINES, asked_tasks, asked_texts, documents, evaluate, our_lm, questions_of, task_scores, validation_texts
from llm_speedrun.tools.export import write_folder
from llm_speedrun.tools.likelihood import requests_of, score, text_requests, text_scores
from llm_speedrun.io_utils import InputError
from llm_speedrun.model import GPT
from llm_speedrun.recipes.architecture import UntiedGPT
from llm_speedrun.cli import speedrun_data, speedrun_eval, speedrun_train
from make_evals import EVALS, TINY, tiny_model
from helpers.lessons import defined_in

EXPECTED = json.loads((EVALS/"expected.json").read_text(encoding="utf-8"))
FILES = dict(hellaswag=("hellaswag", "hellaswag.jsonl"), lambada=("lambada_openai", "lambada.jsonl"), arc_easy=("arc_easy", "arc.jsonl"))
THERE = ["ours"] + ["transformers"]*(importlib.util.find_spec("transformers") is not None)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Of the model that the harness has scored"
    return tiny_model(tmp_path_factory.mktemp("eval")/"tiny")

@pytest.fixture(scope="module", params=THERE)
def lm(folder, request): return ENGINES[request.param](folder, "cpu")

@pytest.fixture(scope="module")
def ours(folder): return our_lm(folder, "cpu")

def likelihoods(lm, questions, **how): return score(lm, requests_of(lm, [(q.context, f" {e}") for q in questions for e in q.endings]), **how)

# --- as the harness ---

@pytest.mark.parametrize("name", FILES)
def test_as_the_harness(lm, name):
    "Each log-likelihood, each greedy match, the scores and their errors"
    theirs, file = FILES[name]
    want, (questions, wheres, _) = EXPECTED[theirs], questions_of(name, EVALS/file)
    nats, greedy = likelihoods(lm, questions)
    assert np.abs(nats - np.concatenate(want["nats"])).max() < 1e-3 and greedy.tolist() == sum(want["greedy"], [])
    got = task_scores(lm, name, questions, wheres)
    for k, v in got["scores"].items(): assert v == pytest.approx(want["scores"][k], rel=1e-4), k
    for k in got["errors"].keys() - {"perplexity"}: assert got["errors"][k] == pytest.approx(want["scores"][f"{k}_stderr"], rel=1e-6)
    assert got["n"] == len(questions) == len(want["nats"])

def test_a_text_as_the_harness(lm):
    "Its windows are those with a context of one token"
    text = (EVALS/"text.txt").read_text(encoding="utf-8")
    got = text_scores(lm, [text], context=1)
    assert got["tokens"] > 4*TINY.seq_len and got["bytes"] == len(text.encode()) > len(text)
    assert -got["scores"]["nats_per_token"]*got["tokens"] == pytest.approx(EXPECTED["text"], rel=1e-6)
    assert got["scores"]["bits_per_byte"] == pytest.approx(-EXPECTED["text"]/math.log(2)/got["bytes"], rel=1e-6)

def test_the_examples_tell_rules_apart():
    "Some contexts are cut, one is empty, some words are greedy, and lengths change answers: what goes wrong there would be seen"
    for k in ("hellaswag", "arc_easy"): assert EXPECTED[k]["scores"]["acc"] != EXPECTED[k]["scores"]["acc_norm"]
    assert 0 < EXPECTED["lambada_openai"]["scores"]["acc"] < 1
    assert any(" " not in json.loads(line)["text"] for line in (EVALS/"lambada.jsonl").read_text(encoding="utf-8").splitlines())

def test_a_token_across_the_boundary(ours):
    "What follows keeps the tokens that it has behind the context's own, even where both together have others"
    def pairs(texts, special): return [[t[i:i + 2] for i in range(0, len(t), 2)] for t in texts]
    assert requests_of(replace(ours, encode=pairs), [("abc", " de")]) == [(["ab", "c", "de"], 1)]

@pytest.mark.skipif("transformers" not in THERE, reason="transformers is not installed")
@pytest.mark.parametrize("model", [GPT, UntiedGPT])
def test_transformers_scores_the_same(tmp_path, model):
    "The same weights, by their digest, and every score of every test and text; with a head of its own, too"
    a, b = (ENGINES[k](tiny_model(tmp_path/k, model), "cpu") for k in THERE)
    tasks, texts = [questions_of(n, EVALS/file) for n, (_, file) in FILES.items()], asked_texts(str(EVALS/"text.txt"))
    for x, y in zip(evaluate(a, tasks, texts), evaluate(b, tasks, texts), strict=True):
        assert x["weights"] == y["weights"] and x["engine"] != y["engine"]
        assert x["scores"] == pytest.approx(y["scores"], rel=1e-4)

# --- what doesn't depend on how it is computed ---

@pytest.mark.parametrize("batch", [1, 100, 10**6])
def test_batches_change_nothing(ours, batch):
    questions = questions_of("hellaswag", EVALS/"hellaswag.jsonl")[0]
    one, other = likelihoods(ours, questions)[0], likelihoods(ours, questions, batch=batch)[0]
    assert np.abs(one - other).max() < 1e-3

def test_bf16_is_near(ours):
    questions = questions_of("arc_easy", EVALS/"arc.jsonl")[0]
    one, other = likelihoods(ours, questions)[0], likelihoods(ours, questions, bf16=True)[0]
    assert 0 < np.abs(one - other).max() and np.abs(other/one - 1).max() < .1

@pytest.mark.parametrize("context", [1, 7, TINY.seq_len])
def test_each_token_once_with_its_context(ours, context):
    "Against a pass of its own for each token"
    text = (EVALS/"text.txt").read_text(encoding="utf-8")[:160]
    requests, n = text_requests(ours, text, context)
    ids = [ours.start, *ours.encode([text], False)[0]]
    assert sum(k for _, k in requests) == n == len(ids) - 1
    at, want = 1, []
    for _, k in requests:
        first = max(0, at + k - TINY.seq_len - 1)
        want += [(ids[first:i + 1], 1) for i in range(at, at + k)]
        at += k
    assert all(len(w) > min(context, i) for i, (w, _) in enumerate(want, 1))
    assert score(ours, requests)[0].sum() == pytest.approx(score(ours, want)[0].sum(), rel=1e-5)

def test_more_context_is_no_other_text(ours):
    a, b = (text_scores(ours, ["One text, then", "another. Größer."], context=c) for c in (1, 0))
    assert all(a[k] == b[k] for k in ("tokens", "bytes", "documents")) and (a["context"], b["context"]) == (1, TINY.seq_len // 2)
    assert a["errors"]["bits_per_byte"] > 0
    with pytest.raises(InputError, match="reads 48 tokens"): text_scores(ours, ["x"], context=49)

# --- texts ---

@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    "nanoGPT's folder of characters, and a model of them that knows nothing"
    top = tmp_path_factory.mktemp("characters")
    itos = dict(enumerate("\n abcdefgh"))
    (top/"data").mkdir(); (top/"model").mkdir()
    (top/"data/meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=len(itos), itos=itos, stoi={c: i for i, c in itos.items()})))
    for name in ("train", "val"): (np.arange(3000) % 10).astype("<u2").tofile(top/f"data/{name}.bin")
    tok = open_corpus(top/"data").tokenizer
    tok.save(str(top/"tokenizer.json"))
    config = replace(TINY, vocab=64)
    state = GPT(config).state_dict()
    state["embed_tokens.weight"].zero_()
    write_folder(top/"model/tiny", config, state, top/"tokenizer.json")
    return top

def test_a_character_model(characters, capsys):
    "Bits per byte of its corpus and of a text; other characters are named, and questions refused before they are looked for"
    model, text = str(characters/"model/tiny"), characters/"text.jsonl"
    text.write_text(json.dumps(dict(body="abc\n"*50)) + "\n")
    speedrun_eval([model, f"--text={characters/'data'}"])
    speedrun_eval([model, f"--text={text}", "--text_key=body"])
    got = {Path(r["source"]).name: r for r in json.loads((characters/"model/tiny/evals.json").read_text())}
    assert (got["data"]["bytes"], got["text.jsonl"]["bytes"]) == (3000, 200) and got["data"]["tokens"] == 3000
    assert all(r["scores"]["bits_per_byte"] == pytest.approx(6) for r in got.values())    # of 64 equally likely tokens
    (characters/"bad.txt").write_text("abcé", encoding="utf-8")
    capsys.readouterr()
    for words, why in ((["--text", str(characters/"bad.txt")], "'é' .LATIN SMALL LETTER E WITH ACUTE"), (["--tasks=hellaswag"], "is a character model: its 10 characters"),
                       (["--text", str(text)], "has no key 'text'")):
        with pytest.raises(SystemExit): speedrun_eval([model, *words])
        assert re.search(why, capsys.readouterr().err)

def test_validation_side(tmp_path, ours):
    "A tokenized corpus gives the documents that it holds out, whole"
    docs = [f"Text {i}: {i} times 3 is {3*i}, naïve 漢字.\n"*3 for i in range(80)]
    write_shards(docs, train_tokenizer(docs, 300), tmp_path/"tokens", val_frac=.2)
    held = [*documents(tmp_path/"tokens")]
    corpus = open_corpus(tmp_path/"tokens")
    assert 4 < len(held) < 40 and set(held) < set(docs)
    size = sum(len(t.encode()) for t in held)
    assert defined_in("71_evals", "bytes_per_token").bytes_per_token(corpus.val, corpus.tokenizer) == pytest.approx(size/len(corpus.val))
    with pytest.raises(InputError, match="has no tokenizer"): [*validation_texts(replace(corpus, tokenizer=None))]

def test_text_files(tmp_path):
    "A folder's files, each a document; a file's documents; long ones whole"
    for name, text in dict(a="One.", b="Two<|endoftext|>\nThree").items(): (tmp_path/f"{name}.txt").write_text(text)
    assert [*documents(tmp_path)] == ["One.", "Two", "Three"]
    long = "words and words\n" * 700_000
    (tmp_path/"b.txt").write_text(long)
    assert [len(t) for t in documents(tmp_path)] == [4, len(long)]

def test_a_text_of_the_training(tmp_path, capsys, monkeypatch):
    "Scored with a warning: the run's own text, by another path, or the text of its tokens; not the held-out side, and no other text"
    monkeypatch.chdir(tmp_path); monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(tmp_path/"cache"))
    (tmp_path/"texts").mkdir()
    for i in range(40): (tmp_path/f"texts/{i}.txt").write_text(f"{i} is a number, and {i + 1} comes after it. "*20)
    (tmp_path/"other.txt").write_text("A text of others.")
    speedrun_data(["--data", "texts", "--out", "tokens", "--vocab", "300"])
    for name, data in (("raw", "texts"), ("made", "tokens")):
        speedrun_train([f"--data={data}", f"--name={name}", "--model=tiny", "--rungs=naive", "--steps=1", "--seq_len=16", "--micro_batch_size=1",
                        "--grad_accum_steps=1", "--num_evals=1", "--sample_tokens=1", "--recipe=adamw"])
    capsys.readouterr()
    seen = {(run, text): "warning: " in told(capsys, f"runs/{run}", "--text", text, "--out", "e.json") for run in ("raw", "made")
            for text in ("texts", f"{tmp_path}/texts/3.txt", "other.txt", "tokens", "tokens/train_000.bin")}
    assert [t for (run, t), w in seen.items() if w and run == "raw"] == ["texts", f"{tmp_path}/texts/3.txt"]
    assert [t for (run, t), w in seen.items() if w and run == "made"] == ["texts", f"{tmp_path}/texts/3.txt", "tokens/train_000.bin"]

def test_a_comma_in_a_path(tmp_path):
    "Texts and tasks are divided as the corpora of --data are: not within what is there"
    (tmp_path/"a,b").mkdir(); (tmp_path/"a,b/t.txt").write_text("one"); (tmp_path/"c.txt").write_text("two")
    one, two = f"{tmp_path}/a,b/t.txt", f"{tmp_path}/c.txt"
    assert asked_texts(f"{one},{two}") == [(one, ["one"]), (two, ["two"])]
    file = write(tmp_path/"a,b/l.jsonl", dict(text="a b"))
    assert [about["source"] for _, _, about in asked_tasks(f"lambada={file},lambada={EVALS/'lambada.jsonl'}")] == [str(file), str(EVALS/"lambada.jsonl")]

def test_a_document_without_tokens(folder, tmp_path, capsys):
    "Left out and counted, wherever it stands: of a tokenizer that drops spaces, a text of spaces is one"
    (tmp_path/"t.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in ("the cat sat", "   ", "on a mat", " ")))
    from tokenizers import normalizers
    from llm_speedrun.data.tokenizer import read_tokenizer
    shutil.copytree(folder, tmp_path/"m")
    tok = read_tokenizer(folder/"tokenizer.json")
    tok.normalizer = normalizers.Strip(); tok.save(str(tmp_path/"m/tokenizer.json"))
    said = told(capsys, tmp_path/"m", "--text", tmp_path/"t.jsonl")
    r, = json.loads((tmp_path/"m/evals.json").read_text())
    assert (r["documents"], r["empty"], r["bytes"]) == (2, 2, 19) and "left out documents without a token: 2" in said

# --- files of tasks ---

def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path

LINE = dict(activity_label="A", ctx_a="B c.", ctx_b="d", endings=["e", "f"], label=1)

def test_kinds_of_files(tmp_path):
    "Parquet and lines of JSON hold the same questions; a label is a number or its digits; a limit takes the first"
    import pyarrow as pa, pyarrow.parquet as pq
    rows = [LINE | dict(label=str(i % 2)) for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/"x.parquet")
    a, b = questions_of("hellaswag", tmp_path/"x.parquet")[0], questions_of("hellaswag", write(tmp_path/"x.jsonl", *rows))[0]
    assert a == b and [q.right for q in a] == [0, 1, 0, 1, 0] and questions_of("hellaswag", tmp_path/"x.jsonl", limit=2)[0] == a[:2]
    assert questions_of("hellaswag", write(tmp_path/"y.jsonl", LINE))[0][0].right == 1

@pytest.mark.parametrize("name,rows,message", [
    ("hellaswag", [LINE, {k: v for k, v in LINE.items() if k != "endings"}], "line 2 can't be used: Object missing required field `endings`"),
    ("hellaswag", [LINE | dict(label="")], "line 1: the answer is ''"), ("hellaswag", [LINE | dict(label=2)], "line 1: the answer is 2"),
    ("hellaswag", [LINE | dict(endings="ef")], "Expected `array`, got `str` - at `$.endings`"), ("hellaswag", [LINE | dict(endings=["e", ""])], "endings"),
    ("hellaswag", [LINE | dict(endings=["e", "[header]"])], "line 1: an ending has no text"), ("lambada", [dict(text="a b")] * 2 + [dict(text="a ")], "line 3: an ending has no text"),
    ("lambada", [LINE], "missing required field `text`"), ("arc_easy", [LINE], "missing required field `question`"),
    ("arc_easy", [dict(question="a", choices=dict(text=["b", "c"], label=["A", "B"]), answerKey="C")], "answerKey is 'C', and the labels are ['A', 'B']"),
    ("arc_challenge", [], "has no examples in it")], ids=str)
def test_no_task_file(tmp_path, name, rows, message):
    with pytest.raises(InputError) as e: questions_of(name, write(tmp_path/"x.jsonl", *rows))
    assert message in str(e.value)

def test_not_json(tmp_path):
    (tmp_path/"x.jsonl").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(InputError, match="line 1 is no JSON"): questions_of("lambada", tmp_path/"x.jsonl")

def test_an_ending_that_does_not_fit(ours, tmp_path):
    "The model is too small, and the error names the line"
    questions, wheres, _ = questions_of("lambada", write(tmp_path/"x.jsonl", dict(text="a b"), dict(text="a " + "xq"*60)))
    with pytest.raises(InputError, match="line 2: an ending has .* and this model reads 48"): task_scores(ours, "lambada", questions, wheres)

def test_no_network(monkeypatch):
    "At once, with what to do"
    from huggingface_hub import constants, utils
    def down(): raise OSError("no route")
    monkeypatch.setattr(utils, "get_session", down); monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConnectionError, match="Rowan/hellaswag on the Hub.*no route.*--tasks hellaswag=FILE"): questions_of("hellaswag")

# --- the command ---

def told(capsys, *args):
    speedrun_eval([str(a) for a in args])
    return capsys.readouterr().out

def test_command(folder, tmp_path, capsys):
    "Scores are printed, and kept: the same test again takes the old one's place, a limited one doesn't"
    out, tasks = tmp_path/"evals.json", f"hellaswag={EVALS/'hellaswag.jsonl'},lambada={EVALS/'lambada.jsonl'}"
    said = told(capsys, folder, "--tasks", tasks, "--text", EVALS/"text.txt", "--out", out)
    assert "hellaswag     acc            0.2 ± 0.13  (10 questions, " in said and "bits_per_byte" in said and str(out) in said
    assert "with 24 or more tokens before each scored one" in said and "lm_eval's number: --context 1" in said
    assert "lm_eval" not in told(capsys, folder, "--text", EVALS/"text.txt", "--context", 1, "--out", tmp_path/"other.json")
    records = json.loads(out.read_text())
    assert [r["task"] for r in records] == ["hellaswag", "lambada", "text"]
    for r in records: assert {"sha256", "weights", "engine", "dtype", "torch", "date", "gpu", "scores", "errors"} <= r.keys()
    told(capsys, folder, "--tasks", tasks, "--out", out, "--limit", 3)
    told(capsys, folder, "--tasks", tasks, "--out", out)
    assert [(r["task"], r.get("n")) for r in json.loads(out.read_text())] == [
        ("hellaswag", 10), ("lambada", 11), ("text", None), ("hellaswag", 3), ("lambada", 3)]

@pytest.mark.parametrize("args,message", [
    (["MODEL"], "nothing to evaluate: give --tasks (hellaswag, lambada, arc_easy, arc_challenge) or --text"),
    (["MODEL", "--tasks", "helaswag"], "unknown task 'helaswag'. Did you mean 'hellaswag'"), (["MODEL", "--tasks=lambada="], "name the file"),
    (["MODEL", "--tasks=lambada=nowhere.jsonl"], "nowhere.jsonl"), (["MODEL", "--text", "nowhere"], "nowhere: no such file"),
    (["MODEL", "--text", "TEXT", "--engine", "jax"], "unknown engine 'jax'"), (["MODEL", "--text", "TEXT", "--dtype", "fp8"], "unknown dtype 'fp8'"),
    (["nowhere", "--text", "TEXT"], "there is no folder nowhere"), (["EMPTY", "--text", "TEXT"], "has no config.json"),
    (["MODEL", "--text", "TEXT", "--context", "99"], "context is 99"), (["BARE", "--text", "TEXT"], "has no tokenizer.json: it knows tokens, and no text"),
    (["MODEL", "--text", "TEXT", "--text_key", "body"], "text_key 'body' has no effect"), (["MODEL", "--tasks", "lambada", "--context", "9"], "context has no effect on --tasks"),
    (["MODEL", "--text", "TEXT", "--out", "TEXT/x.json"], "is no folder that one can write into"),
    (["MODEL", "--text", "TEXT", "--out", "TEXT"], "is no JSON"), (["MODEL", "--text", "TEXT", "--out", "MODEL"], "is no regular file")]
    + [(["BARE", "--text", "TEXT", "--engine", "transformers"], "has no tokenizer"),
       (["RUN", "--text", "TEXT", "--engine", "transformers"], "is a run: speedrun_export")]*("transformers" in THERE), ids=str)
def test_refused(folder, tmp_path, capsys, args, message):
    "One line, exit code 2, nothing written"
    (tmp_path/"empty").mkdir()
    shutil.copytree(folder, tmp_path/"bare", ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json", "evals.json"])
    (tmp_path/"run").mkdir(); (tmp_path/"run/config.json").write_text('{"model_config": {}}')
    names = dict(MODEL=folder, TEXT=EVALS/"text.txt", EMPTY=tmp_path/"empty", BARE=tmp_path/"bare", RUN=tmp_path/"run")
    for name, path in names.items(): args = [a.replace(name, str(path)) for a in args]
    with pytest.raises(SystemExit) as e: speedrun_eval(args)
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line and "Loading weights" not in line] # transformers' progress
    assert e.value.code == 2 and len(lines) == 1 and message in lines[0], err
    assert not (folder/"evals.json").exists()

def test_advice_that_was_taken(monkeypatch):
    "Where HF_HUB_OFFLINE is set, it isn't advised"
    from huggingface_hub import constants
    import datasets
    def down(*args, **kw): raise OSError("not in the cache")
    monkeypatch.setattr(datasets, "load_dataset", down)
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.utils.get_session", down)
        with pytest.raises(ConnectionError, match="Give its file: --tasks hellaswag=FILE") as e: questions_of("hellaswag")
        assert ("HF_HUB_OFFLINE" in str(e.value)) is not offline
