"Text of a run by the command: the same for the same seed, and one line for what can't be."
import json
import pytest
from tokenizers import Tokenizer
from llm_speedrun.sample import continued
from llm_speedrun.train.options import speedrun_sample
from llm_speedrun.train.trainer import train
from small import nano, options, texts

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Of a run that has a tokenizer"
    tmp = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LLM_SPEEDRUN_CACHE", str(tmp/"cache"))
        train(options(tmp, data=str(texts(tmp/"texts")), steps=30, lr=.01), progress=False)
    return tmp/"runs/run"

def said(capsys, *args):
    speedrun_sample([str(a) for a in args])
    return capsys.readouterr().out

def test_command(folder, capsys):
    "The prompt and what follows it; the same for a seed, other text for another"
    args = folder, "--prompt", "- 3 times", "--n", 30, "--temperature", 1
    a, b, c = said(capsys, *args), said(capsys, *args), said(capsys, *args, "--seed", 1)
    assert a == b != c and a.startswith("- 3 times") and len(a) > 12
    assert said(capsys, folder, "--n=30") != ""

def test_greedy(folder, capsys):
    "`--top_k 1` takes the likeliest, whatever seed and temperature"
    one = [said(capsys, folder, "--prompt=7 times", "--top-k=1", "--n=20", f"--seed={s}", f"--temperature={t}") for s, t in ((0, 1), (1, 100), (2, .01))]
    assert len({*one}) == 1

def test_stops_at_the_end_of_a_document(folder, monkeypatch):
    "What the model writes after it would be another text"
    eot = Tokenizer.from_file(str(folder/"tokenizer.json")).token_to_id("<|endoftext|>")
    monkeypatch.setattr("llm_speedrun.sample.generate", lambda run, ids, n, **kw: [*ids, 66, 67, eot, 68])
    assert continued(folder, "x") == "x" + Tokenizer.from_file(str(folder/"tokenizer.json")).decode([66, 67])

@pytest.mark.parametrize("args,message", [
    (["nowhere"], "there is no folder nowhere"), (["RUN", "--n", "0"], "n must be a whole number from 1"), (["RUN", "--temperature", "0"], "temperature must be a number from 0.01"),
    (["RUN", "--temperature", "nan"], "temperature must"), (["RUN", "--top_k", "0"], "top_k must"), ([], "arguments are required: run"), (["RUN", "more"], "no option takes more")], ids=str)
def test_refused(folder, capsys, args, message):
    with pytest.raises(SystemExit) as e: speedrun_sample([str(folder) if a == "RUN" else a for a in args])
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1

@pytest.mark.parametrize("what,message", [("none", "has no tokenizer.json"), ("another", "it is another's"), ("no end", "can't begin from nothing: give a --prompt")])
def test_tokenizers(folder, tmp_path, capsys, what, message):
    "A run without one knows no text; one of another model, or without an end of text, is told"
    (tmp_path/"model.safetensors").symlink_to(folder/"model.safetensors")
    (tmp_path/"config.json").symlink_to(folder/"config.json")
    tok = json.loads((folder/"tokenizer.json").read_text(encoding="utf-8"))
    if what == "another": tok["model"]["vocab"] |= {f"{i}": i for i in range(2000, 3000)}
    if what == "no end":
        tok["added_tokens"] = []
        tok["model"]["vocab"] = {k: v for k, v in tok["model"]["vocab"].items() if k != "<|endoftext|>"}
    if what != "none": (tmp_path/"tokenizer.json").write_text(json.dumps(tok), encoding="utf-8")
    with pytest.raises(SystemExit) as e: speedrun_sample([str(tmp_path)])
    assert e.value.code == 2 and message in capsys.readouterr().err
