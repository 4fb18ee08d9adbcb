"A run opens in transformers and computes the same there, comes back as it was, and what isn't a run is refused."
import json, os, pickle, re, stat, sys
from dataclasses import replace
import pytest, torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from llm_speedrun.data.batches import val_batches
from llm_speedrun.tools.export import export_folder, qwen3_config, write_folder
from llm_speedrun.pretrained import from_pretrained, gpt_config, import_folder
from llm_speedrun.recipes.model_registry import shapes
from llm_speedrun.io_utils import InputError
from llm_speedrun.model import GPT
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.runs import Run, build
from llm_speedrun.rung_registry import RUNGS, find_rung
from llm_speedrun.stepper import Stepper
from llm_speedrun.generate import generate
from llm_speedrun.train.presets import presets
from llm_speedrun.cli import speedrun_data, speedrun_export, speedrun_report, speedrun_train
from llm_speedrun.train.trainer import train
from make_readme import ROOT
from helpers import quick_programs
from helpers.tiny_runs import NANO, fails, nano, options, texts, trained_on_text
from helpers.timeouts import TIMEOUT

def names(folder): return {p.name for p in folder.iterdir()}

def edit(path, **kw):
    "Change a JSON file: set keys, or take those away that are None"
    d = json.loads(path.read_text(encoding="utf-8")) | kw
    path.write_text(json.dumps({k: v for k, v in d.items() if v is not None}), encoding="utf-8")

def copied(folder, to):
    "A copy of a folder's files"
    to.mkdir(parents=True)
    for p in folder.iterdir(): (to/p.name).write_bytes(p.read_bytes()) if p.is_file() else None
    return to

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A finished run on text, which has a tokenizer: the trainer and the run's folder"
    folder = tmp_path_factory.mktemp("trained")
    trainer = trained_on_text(folder)
    trainer.run.model.cpu()
    return trainer, folder/"runs"/"run"

@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    "The run of `trained`, exported"
    return export_folder(trained[1], tmp_path_factory.mktemp("exported")/"hf")

def validation(trainer):
    "Validation batches of a trainer's corpus"
    return val_batches(trainer.data.corpus.val, 8, trainer.config.seq_len, 2)

def gap(trainer, theirs):
    "Largest difference of the logits on the validation batch"
    x = validation(trainer)[0][0]
    with torch.no_grad(): return (trainer.run.model(x) - theirs.eval()(x).logits).abs().max().item()

# What transformers makes of it

def command(folder, *args):
    "Run the command as its console script does"
    script = folder/"command.py"
    script.write_text("import sys\nfrom llm_speedrun.cli import speedrun_export\nsys.exit(speedrun_export())\n")
    return quick_programs.run([sys.executable, str(script), *map(str, args)], cwd=folder, capture_output=True, text=True,
                          encoding="utf-8", env=os.environ | dict(PYTHONIOENCODING="utf-8"), timeout=TIMEOUT)

def test_command_to_transformers(trained, tmp_path):
    "The command's folder opens by the Auto classes, with a path of spaces and accents: logits, tokens and greedy text"
    transformers = pytest.importorskip("transformers")
    trainer, folder = trained
    res = command(tmp_path, folder, "--out", "mes modèles/essai n° 1")
    assert (res.returncode, res.stderr) == (0, "") and "AutoModelForCausalLM.from_pretrained" in res.stdout
    out = tmp_path/"mes modèles"/"essai n° 1"
    assert names(out.parent) == {out.name} # nothing is left beside it
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == "Qwen3ForCausalLM" and theirs.dtype == torch.float32
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert gap(trainer, theirs) < 1e-4
    tok, ours = transformers.AutoTokenizer.from_pretrained(out), trainer.data.corpus.tokenizer
    for s in ("Text 7: 7 times", " a , b .\n\n\tc ", "naïve 漢字 🙂", ""):
        ids = tok(s)["input_ids"]
        assert ids == ours.encode(s).ids and tok.decode(ids) == s
    assert len(tok) == ours.get_vocab_size() and tok.eos_token_id == tok.bos_token_id == trainer.data.corpus.eot
    prompt = tok("Text 7: 7", return_tensors="pt")
    ids = prompt["input_ids"][0].tolist()
    n = NANO.seq_len - len(ids) # further on, ours forgets the beginning and theirs knows no positions
    mine, text = generate(Run(trainer.run.model), ids, n, top_k=1), theirs.generate(**prompt, max_new_tokens=n, do_sample=False)[0].tolist()
    assert text == mine[:len(text)] and n > 8 and len(text) > len(ids) and (len(text) == len(mine) or text[-1] == tok.eos_token_id)

def test_a_padded_batch(trained, exported):
    "Texts of two lengths in one batch: what is filled up has no attention, and the logits are those of each text alone"
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    assert tok.pad_token_id == tok.eos_token_id == trained[0].data.corpus.eot and model.config.pad_token_id is None # whose row then trains
    short, long = "Text 7: 7", "Text 12: 12 times 3 is"
    both = tok([short, long], padding=True, return_tensors="pt")
    n = len(tok(short)["input_ids"])
    assert both["attention_mask"].sum(1).tolist() == [n, both["input_ids"].shape[1]] and n < both["input_ids"].shape[1]
    with torch.no_grad(): padded, alone = model(**both).logits[0, :n], model(**tok(short, return_tensors="pt")).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)

def test_the_end_of_a_text_in_their_collator(exported):
    "What the page on exports says: the pad token is the end of a text, so the standard collator hides it; one of its own needs no new row"
    transformers = pytest.importorskip("transformers")
    tok, vocab = transformers.AutoTokenizer.from_pretrained(exported), transformers.AutoConfig.from_pretrained(exported).vocab_size
    masked = lambda: (transformers.DataCollatorForLanguageModeling(tok, mlm=False)([tok(f"Text 7{tok.eos_token}")])["labels"][0, -1] == -100).item()
    page = (ROOT/"nbs/site/train/export.qmd").read_text(encoding="utf-8")
    assert masked() and "it hides every end from the loss" in " ".join(page.split())
    there = [p for p in page.split("```python\n")[1:] if p.startswith("tok.add_special_tokens")]
    exec(there[0].split("```")[0], dict(tok=tok, model=transformers.AutoModelForCausalLM.from_pretrained(exported)))
    assert not masked() and len(tok) <= vocab

def test_two_steps_of_their_trainer(exported, tmp_path):
    "With the standard collator, which pads; the folder it saves comes back"
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tok = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    before = model.model.embed_tokens.weight.detach().clone()
    args = transformers.TrainingArguments(tmp_path/"out", max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
                                          use_cpu=True, disable_tqdm=True, logging_strategy="no")
    data = [tok("Text 7: 7"), tok("Text 12: 12 times 3 is"), tok("naïve"), tok("Text 1")]
    trainer = transformers.Trainer(model, args, train_dataset=data, data_collator=transformers.DataCollatorForLanguageModeling(tok, mlm=False))
    assert trainer.train().global_step == 2 and not before.equal(model.model.embed_tokens.weight.cpu())
    model.save_pretrained(tmp_path/"tuned")
    assert import_folder(tmp_path/"tuned")[0].vocab == len(before)

def test_without_transformers_and_killed(trained, tmp_path):
    "Neither export nor import needs transformers; `kill -9` in the middle leaves no folder of that name, and the next export succeeds"
    script = ("import os, sys; sys.modules['transformers'] = None\nfrom llm_speedrun import pretrained\nfrom llm_speedrun.tools import export\nrun, a, b = sys.argv[1:]\n"
              "export.export_folder(run, a); pretrained.from_pretrained(a, 'cpu')\n"
              "export.write_tensors = lambda *a, **k: os._exit(9)\nexport.export_folder(run, b)")
    res = quick_programs.run([sys.executable, "-c", script, *map(str, (trained[1], tmp_path/"a", tmp_path/"b"))], timeout=TIMEOUT)
    assert res.returncode == 9 and (tmp_path/"a").exists() and not (tmp_path/"b").exists()
    import_folder(export_folder(trained[1], tmp_path/"b"))

@pytest.mark.parametrize("rungs", ["safe", "fastest", "smallest", "bf16,bf16_weights"])
def test_every_preset_exports(tmp_path, rungs):
    "Whatever rungs trained it, a run opens; one without a tokenizer too"
    transformers = pytest.importorskip("transformers")
    trainer, _ = train(options(tmp_path, steps=3, rungs=rungs), progress=False)
    out = export_folder(tmp_path/"runs"/"run")
    assert names(out) == {"config.json", "model.safetensors"} and out == tmp_path/"runs"/"run"/"export"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = GPT(trainer.config)
    ours.load_state_dict({k: v.float() for k, v in trainer.run.model.cpu().state_dict().items()})
    x = validation(trainer)[0][0]
    with torch.no_grad(): assert (ours(x) - theirs(x).logits).abs().max() < 1e-4

RATIOS = [replace(NANO, kv_heads=k, rope_theta=t, eps=e) for k, t, e in ((4, 1e4, 1e-6), (2, 1e6, 1e-5), (1, 500., 1e-6))]
RATIOS += [replace(NANO, attention_width=4*D) for D in (6, 16, 64)] # heads that together are narrower and wider than the model

@pytest.mark.parametrize("config", RATIOS, ids=lambda c: f"{c.heads}-{c.kv_heads}-{c.head_dim}")
def test_head_ratios(tmp_path, config):
    "Grouped queries of every kind, none and all in one group: the same logits, of weights that make them differ"
    transformers = pytest.importorskip("transformers")
    ours = GPT(config)
    with torch.no_grad():
        for p in ours.parameters(): p.mul_(4 if p.ndim == 2 else 1 + torch.rand_like(p))
    write_folder(tmp_path/"hf", config, ours.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/"hf", dtype=torch.float32).eval()
    x = torch.randint(config.vocab, (2, config.seq_len), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): a, b = ours(x), theirs(x).logits
    assert a.std() > .1 and (a - b).abs().max() < 1e-4
    assert replace(import_folder(tmp_path/"hf")[0], name=NANO.name) == config

@pytest.mark.parametrize("name", [k for k in WORKLOADS if k != "nano"])
def test_workloads(name):
    "Every workload's config comes back, and transformers makes weights of the same names and shapes of it"
    transformers, config = pytest.importorskip("transformers"), WORKLOADS[name]
    d = qwen3_config(config)
    assert gpt_config(d, "config.json", name) == config
    with torch.device("meta"): theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**d))
    there = {k: tuple(v.shape) for k, v in theirs.state_dict().items() if k != "lm_head.weight"}
    assert there == {f"model.{k}": v for k, v in shapes(config).items()}
    assert theirs.model.rotary_emb.config.max_position_embeddings == config.seq_len

def needed(name):
    "What a rung builds on, and what that builds on; and 16 bits for those that ask for them without naming which"
    below = [r for k in RUNGS[name].requires for r in (*needed(k), k)]
    return below + ["bf16"]*("bf16" not in below and name in ("flash4", "epilogues"))

def test_rungs_keep_the_names(nano):
    "Whichever rung changes the model, its weights keep the names and shapes that are exported"
    presets() # finds all rungs
    for name in RUNGS:
        try: run = build(NANO, [name, *needed(name)], "cpu")
        except RuntimeError as e: assert "cannot run here" in str(e); continue
        assert {k: tuple(v.shape) for k, v in run.model.state_dict().items()} == shapes(NANO), name

def test_config_in_both_spellings(exported):
    "The rotary base, which is not the default here, stands in the old place and in the new one"
    d = json.loads((exported/"config.json").read_text())
    assert d["rope_theta"] == d["rope_parameters"]["rope_theta"] == 500. and d["torch_dtype"] == "float32"
    with safe_open(exported/"model.safetensors", "pt") as f: assert f.metadata() == dict(format="pt")

def test_bf16(trained, tmp_path):
    "bf16 weights are the FP32 ones rounded, and come back as such; a second export has the same bytes"
    transformers = pytest.importorskip("transformers")
    trainer, folder = trained
    out = export_folder(folder, tmp_path/"a", "bf16")
    for k, v in load_file(out/"model.safetensors").items():
        assert torch.equal(v, trainer.run.model.state_dict()[k.removeprefix("model.")].bfloat16())
    assert transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    config, state = import_folder(out)
    assert all(v.dtype == torch.float32 for v in state.values())
    write_folder(tmp_path/"b", config, state, dtype="bf16")
    assert (out/"model.safetensors").read_bytes() == (tmp_path/"b"/"model.safetensors").read_bytes()

# There and back

def test_round_trip(trained, exported, tmp_path):
    "The same config and weights, the same bytes the second time, and the permissions of any new folder"
    config, state = import_folder(exported)
    assert replace(config, name=NANO.name) == trained[0].config and config.name == "hf"
    for k, v in trained[0].run.model.state_dict().items(): assert torch.equal(state[k], v)
    write_folder(tmp_path/"again", config, state, exported/"tokenizer.json")
    assert names(tmp_path/"again") == names(exported)
    for n in names(exported): assert (tmp_path/"again"/n).read_bytes() == (exported/n).read_bytes()
    (tmp_path/"plain").mkdir()
    assert stat.S_IMODE((tmp_path/"again").stat().st_mode) == stat.S_IMODE((tmp_path/"plain").stat().st_mode)

def test_from_pretrained_goes_on(trained, exported):
    "The loss is the one that training ended with, and goes on falling, with rungs too"
    trainer = trained[0]
    run = from_pretrained(exported, "cpu")
    step, val = Stepper(find_rung("flash")(run)), validation(trainer)
    start = step.evaluate(val)
    assert run.rungs == () and abs(start - Stepper(Run(trainer.run.model)).evaluate(val)) < 1e-5
    for _ in range(5): step(*val)
    assert step.evaluate(val) < start

def test_save_pretrained_comes_back(trained, exported, tmp_path):
    "What transformers saves is read: in one file, in shards, and with the tied head stored a second time"
    transformers = pytest.importorskip("transformers")
    ours, theirs = trained[0].run.model.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(exported)
    theirs.save_pretrained(tmp_path/"one")
    theirs.save_pretrained(tmp_path/"shards", max_shard_size="20KB")
    assert len(list((tmp_path/"shards").glob("*.safetensors"))) > 1
    head = copied(exported, tmp_path/"head")
    tensors = load_file(head/"model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, head/"model.safetensors")
    for folder in (tmp_path/"one", tmp_path/"shards", head):
        config, state = import_folder(folder)
        assert replace(config, name=NANO.name) == trained[0].config and state.keys() == ours.keys()
        assert all(torch.equal(state[k], v) for k, v in ours.items())

def test_config_of_transformers_4(exported, tmp_path):
    "A config with the old spelling alone gives the same model"
    old = copied(exported, tmp_path/"old")
    edit(old/"config.json", rope_parameters=None)
    assert replace(import_folder(old)[0], name="hf") == import_folder(exported)[0]

def test_a_run_is_read_unexported(trained):
    "The folder of a run gives its config and weights, too"
    config, state = import_folder(trained[1])
    assert config == trained[0].config
    for k, v in trained[0].run.model.state_dict().items(): assert torch.equal(state[k], v)

class Bomb:
    "Pickled: a file that makes a folder when it is read"
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (self.path,)

def test_reading_runs_no_code(exported, tmp_path):
    "Code and pickles in a folder are not touched, whatever config.json says of them; the next folder is clean, too"
    folder, sign = copied(exported, tmp_path/"a"), tmp_path/"it ran"
    with pytest.MonkeyPatch.context() as m:
        m.syspath_prepend(folder)
        for n in ("pytorch_model.bin", "model.pt", "training_args.bin"): (folder/n).write_bytes(pickle.dumps(Bomb(str(sign))))
        for n in ("modeling_evil.py", "configuration_evil.py", "__init__.py"): (folder/n).write_text(f"import os; os.mkdir({str(sign)!r})")
        edit(folder/"config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"})
        config, state = import_folder(folder)
        from_pretrained(folder, "cpu")
        write_folder(tmp_path/"b", config, state, folder/"tokenizer.json")
        (folder/"model.safetensors").unlink()
        with fails(FileNotFoundError, "Other files are not read"): import_folder(folder)
        (folder/"model.safetensors").write_bytes((folder/"pytorch_model.bin").read_bytes())
        with fails(ValueError, "no whole safetensors file"): import_folder(folder)
    assert not sign.exists() and names(tmp_path/"b") == names(exported)
    pickle.loads((folder/"model.pt").read_bytes())
    assert sign.exists() # the bomb is a bomb

# What is refused

SETTINGS = [dict(tie_word_embeddings="no"), dict(tie_word_embeddings=[]), dict(attention_bias=True),
            dict(use_sliding_window=True), dict(layer_types=["full_attention", "sliding_attention"]),
            dict(model_type="llama"), dict(model_type=None), dict(architectures=["Qwen3ForSequenceClassification"]),
            dict(hidden_act="gelu"), dict(attention_dropout=.1), dict(head_dim=7), dict(hidden_size=None),
            dict(vocab_size="many"), dict(num_hidden_layers=2.5), dict(quantization_config=dict(quant_method="fp8")),
            dict(rope_scaling=dict(rope_type="yarn", factor=4.)), dict(rope_theta=1000.),
            dict(rope_parameters=dict(rope_type="linear", factor=2., rope_theta=500.)),
            dict(rope_parameters=dict(full_attention=dict(rope_theta=500.)))]

def test_an_adapter_is_no_model(exported, tmp_path):
    "What LoRA leaves has to be merged first, with or without its base model's config beside it; merged in place it is a model"
    folder = tmp_path/"lora"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"): (folder/name).write_text("{}")
    with fails(InputError, "lora is a LoRA adapter", "merge_and_unload", "save_pretrained"): import_folder(folder)
    (folder/"config.json").write_bytes((exported/"config.json").read_bytes())
    with fails(InputError, "merge_and_unload"): from_pretrained(folder)
    (folder/"model.safetensors").write_bytes((exported/"model.safetensors").read_bytes())
    assert import_folder(folder)[0].vocab == import_folder(exported)[0].vocab

@pytest.mark.parametrize("change", SETTINGS, ids=str)
def test_refused_setting(exported, tmp_path, change):
    "A setting that a GPT can't express is refused by its name and file"
    folder = copied(exported, tmp_path/"a")
    edit(folder/"config.json", **change)
    with fails(ValueError, r"config\.json", *change): import_folder(folder)

@pytest.mark.parametrize("change", [dict(rope_scaling=["yarn"]), dict(rms_norm_eps=[1]), dict(rms_norm_eps="small"), dict(layer_types=2),
                                    dict(num_key_value_heads=3), dict(num_hidden_layers=-1), dict(rope_theta=[1.]), dict(num_hidden_layers=10**9), dict(vocab_size=2**62),
                                    dict(rms_norm_eps=0.), dict(rope_theta=-1.), dict(rope_parameters=dict(rope_theta={})), dict(layer_types={}), dict(head_dim=10**400)], ids=lambda c: str(c)[:60])
def test_config_of_nonsense(exported, tmp_path, change):
    "Values of another kind than they should be, or that don't go together, are errors that name the file"
    folder = copied(exported, tmp_path/"a")
    edit(folder/"config.json", **change)
    with fails(ValueError, r"config\.json"): import_folder(folder)

@pytest.mark.parametrize("text", ["null", "[]", "3", '"a"', "{", "", "[" * 100_000, '{"model_config": null}', '{"model_config": []}', "\xff"], ids=lambda s: s[:15])
def test_config_that_is_no_object(exported, tmp_path, text):
    "Well-formed or not, what isn't a model's description is an error that names the file"
    folder = copied(exported, tmp_path/"a")
    (folder/"config.json").write_text(text, encoding="latin-1")
    with fails(ValueError, r"config\.json"): import_folder(folder)

@pytest.mark.skipif(os.name != "posix", reason="pipes have names on POSIX alone")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_pipe_in_place_of_a_file(exported, tmp_path, name):
    "It is refused, and nobody waits for it"
    folder = copied(exported, tmp_path/"a")
    if "index" in name: (folder/"model.safetensors").unlink()
    (folder/name).unlink(missing_ok=True)
    os.mkfifo(folder/name)
    with fails((ValueError, OSError), name.replace(".", r"\.")): import_folder(folder)

@pytest.mark.parametrize("tied", [False, None])
def test_head_that_is_missing(exported, tmp_path, tied):
    "A config that doesn't tie the head needs weights that have one"
    folder = copied(exported, tmp_path/"a")
    edit(folder/"config.json", tie_word_embeddings=tied)
    with fails(ValueError, "missing: lm_head.weight"): import_folder(folder)

def test_refused_weights(exported, tmp_path):
    "Weights that don't fit are refused by name"
    folder = copied(exported, tmp_path/"a")
    path, tensors = folder/"model.safetensors", load_file(exported/"model.safetensors")
    norm, embed = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    def refuses(tensors, *parts):
        save_file(tensors, path)
        with fails(ValueError, *parts): import_folder(folder)
    refuses({k: v for k, v in tensors.items() if k != "model.norm.weight"}, "missing: model.norm.weight")
    refuses({k: v for k, v in tensors.items() if "layers.1" not in k}, "missing: .* and 8 more")
    refuses(tensors | {"model.norm.bias": norm.clone()}, "unknown: model.norm.bias")
    refuses(tensors | {"model.norm.weight": norm[:8].clone()}, r"model.norm.weight \[8\] instead of \[32\]")
    refuses(tensors | {"model.norm.weight": norm.to(torch.float8_e4m3fn)}, "model.norm.weight is torch.float8_e4m3fn")
    refuses(tensors | {"model.norm.weight": norm * torch.nan}, "model.norm.weight has numbers that aren't finite")
    refuses(tensors | {"lm_head.weight": embed + 1}, "lm_head.weight is not model.embed_tokens.weight")
    path.write_bytes(path.read_bytes()[:-100])
    with fails(ValueError, "model.safetensors is no whole safetensors file"): import_folder(folder)
    path.rename(folder/"pytorch_model.bin")
    with fails(FileNotFoundError, "has neither model.safetensors", "save_pretrained"): import_folder(folder)

@pytest.mark.parametrize("index, kind, parts", [
    (dict(weight_map={"a": "../hf/model.safetensors"}), ValueError, ["not a file beside it"]),
    (dict(weight_map={"a": "model-00001-of-00002.safetensors"}), FileNotFoundError, ["00001-of-00002", "not there"]),
    (dict(weight_map={}), ValueError, ["of length >= 1", "weight_map"]), (dict(weight_map=[1]), ValueError, ["got `array`", "weight_map"]),
    (dict(weight_map={"a": 1}), ValueError, ["Expected `str`, got `int`"]), ({}, ValueError, ["missing required field `weight_map`"]),
    ([], ValueError, ["got `array`"]), (None, ValueError, ["got `null`"])], ids=str)
def test_refused_index(exported, tmp_path, index, kind, parts):
    "An index that names what isn't there, or elsewhere, is refused"
    folder = copied(exported, tmp_path/"a")
    (folder/"model.safetensors").unlink()
    (folder/"model.safetensors.index.json").write_text(json.dumps(index))
    with fails(kind, r"index\.json", *parts): import_folder(folder)

def broken_run(folder, what):
    "Break a copy of a run in a way; returns the arguments of the command"
    out, args = folder.parent/"out", []
    if what == "no run": folder = folder.parent/"nowhere"
    if what == "no config": (folder/"config.json").unlink()
    if what in ("no weights", "checkpoints alone"): (folder/"model.safetensors").unlink()
    if what == "checkpoints alone": (folder/"checkpoints"/"step-00000003").mkdir(parents=True)
    if what == "failed": save_file({k: v * torch.inf for k, v in load_file(folder/"model.safetensors").items()}, folder/"model.safetensors")
    if what == "torn config": (folder/"config.json").write_text('{"model_config": ')
    if what == "other config": edit(folder/"config.json", model_config=None)
    if what == "unknown field": edit(folder/"config.json", model_config=dict(depth=3))
    model = json.loads((folder/"config.json").read_text())["model_config"] if (folder/"config.json").exists() and "config" not in what else {}
    if what == "model of text": edit(folder/"config.json", model_config=model | dict(layers="2"))
    if what == "heads that don't divide": edit(folder/"config.json", model_config=model | dict(heads=5))
    if what == "huge": edit(folder/"config.json", model_config=model | dict(layers=10**9))
    if what == "large eps": edit(folder/"config.json", model_config=model | dict(eps=1.5))
    if what == "many layers": edit(folder/"config.json", model_config=model | dict(layers=4000))
    if what == "null config": (folder/"config.json").write_text("null")
    if what == "list config": (folder/"config.json").write_text("[1]")
    if what == "steps of text": edit(folder/"config.json", steps="60")
    if what == "result of text": edit(folder/"result.json", steps="60")
    if what == "deep result": (folder/"result.json").write_text('{"steps": ' + "["*100_000)
    if what.startswith("pipe "): (folder/what[5:]).unlink(); os.mkfifo(folder/what[5:])
    if what == "other shape": edit(folder/"config.json", model_config=model | dict(hidden=56))
    if what == "torn weights": (folder/"model.safetensors").write_bytes(b"x" * 100)
    if what == "torn tokenizer": (folder/"tokenizer.json").write_text("{}")
    if what == "out exists": out.mkdir()
    if what == "out in a file": out = folder/"config.json"/"out"
    if what == "dtype": args = ["--dtype", "int4"]
    return [str(folder), "--out", str(out), *args]

@pytest.mark.parametrize("what, message", [
    ("no run", "there is no folder .*nowhere"), ("no config", "has no config.json: it is not the folder of a run"),
    ("no weights", "has no model.safetensors: it has saved nothing yet"), ("failed", "numbers that aren't finite"),
    ("checkpoints alone", "only checkpoints, so it is going on, or was killed. .*speedrun_train --resume .*run"), ("torn config", "config.json is no JSON"),
    ("other config", "config.json can't be used: .*missing required field `model_config`"), ("unknown field", r"model.safetensors doesn't fit its config.json; missing: model.layers.2"), ("model of text", r"config.json can't be used: Expected `int`, got `str` - at `\$.model_config.layers`"),
    ("heads that don't divide", "config.json can't be used: width 32 can't be divided among 5 heads"), ("huge", "config.json: layers 1,000,000,000 is above 4,096"),
    ("large eps", "config.json: eps 1.5 is above 1"),
    ("many layers", "doesn't fit its config.json: that has 4000 layers"), ("null config", "config.json can't be used: Expected `object`, got `null`"), ("list config", "config.json can't be used"),
    ("steps of text", r"config.json can't be used: .*\$.steps"), ("result of text", r"result.json can't be used: .*\$.steps"), ("deep result", "result.json .*"),
    ("pipe model.safetensors", "has no model.safetensors|no regular file"), ("pipe tokenizer.json", "tokenizer.json is no regular file"), ("pipe config.json", "has no config.json|no regular file"),
    ("other shape", r"model.safetensors doesn't fit its config.json; of another shape: .*instead of \[56, 32\]"),
    ("torn weights", "model.safetensors is no whole safetensors file"), ("torn tokenizer", "tokenizer.json holds no tokenizer"),
    ("out exists", "out exists already and is left alone: choose another folder .speedrun_export --out"),
    ("out in a file", "config.json is no folder that one can write into"), ("dtype", "unknown dtype 'int4'.*fp32, bf16")])
def test_bad_run(trained, tmp_path, capsys, what, message):
    "A run that can't be exported is one line and exit code 2, and nothing is written"
    args = broken_run(copied(trained[1], tmp_path/"run"), what)
    before = names(tmp_path)
    with pytest.raises(SystemExit) as e: speedrun_export(args)
    said = capsys.readouterr()
    assert (e.value.code, said.out) == (2, "") and said.err.count("\n") == 1 and names(tmp_path) == before
    with fails(Exception, message): raise Exception(said.err)

def test_interrupted_run_is_exported_and_said(trained, tmp_path, capsys):
    "What an interrupted run has left is exported, and the command says how far it got"
    folder = copied(trained[1], tmp_path/"run")
    edit(folder/"result.json", steps=12, interrupted=True)
    speedrun_export([str(folder), "--out", str(tmp_path/"a")])
    assert "note: the run was interrupted: it has taken 12 of its 60 steps" in capsys.readouterr().out
    (folder/"result.json").unlink()
    (folder/"tokenizer.json").unlink()
    speedrun_export([str(folder), "--out", str(tmp_path/"b")])
    said = capsys.readouterr().out
    assert "note: the run has no result.json" in said and "without a tokenizer: its data came without one" in said
    assert names(tmp_path/"b") == {"config.json", "model.safetensors"}

@pytest.mark.parametrize("error", [KeyboardInterrupt(), SafetensorError("no space left on device"), OSError("no space")],
                         ids=lambda e: type(e).__name__)
def test_interrupted_export_leaves_nothing(trained, tmp_path, monkeypatch, error):
    "Whatever stops the writing, there is neither half a folder nor a rest beside it, and the next export succeeds"
    def half(tensors, path, metadata):
        path.write_bytes(b"half"); raise error
    with monkeypatch.context() as m:
        m.setattr("llm_speedrun.checkpoint.format.save_file", half)
        with pytest.raises((KeyboardInterrupt, OSError)): export_folder(trained[1], tmp_path/"out")
    assert names(tmp_path) == set()
    import_folder(export_folder(trained[1], tmp_path/"out"))

def test_an_export_is_no_run(trained, tmp_path, capsys):
    "Nothing exports, resumes or reports it: it is said that it is a model of transformers already, and what can be done with one"
    out = str(export_folder(trained[1], tmp_path/"out"))
    before = names(tmp_path/"out")
    for command, words in ((speedrun_export, [out]), (speedrun_train, ["--resume", out])):
        with pytest.raises(SystemExit) as e: command(words)
        assert e.value.code == 2 and names(tmp_path/"out") == before
        assert re.fullmatch(f"error: .*out is a model in the format of transformers, not a run.*speedrun_train --init {re.escape(out)}.*\n", capsys.readouterr().err)
    with pytest.raises(SystemExit): speedrun_report([out])
    assert "not a run: a run's folder has the metrics.jsonl" in capsys.readouterr().err and names(tmp_path/"out") == before

def test_a_pad_token_stays(trained, tmp_path, monkeypatch):
    "A run that begins with a folder that has a pad token of its own is exported with it, also by way of speedrun_data"
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(tmp_path/"cache"))
    base = export_folder(trained[1], tmp_path/"base")
    tok = json.loads((base/"tokenizer.json").read_text(encoding="utf-8"))
    name = next(k for k, i in tok["model"]["vocab"].items() if i == 7)
    about = json.loads((base/"tokenizer_config.json").read_text(encoding="utf-8")) | dict(pad_token=dict(content=name))
    (base/"tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    data = str(texts(tmp_path/"texts"))
    speedrun_data([f"--data={data}", f"--tokenizer={base}", f"--out={tmp_path/'tokens'}", "--workers=1"])
    for i, data in enumerate((data, str(tmp_path/"tokens"))):
        train(options(tmp_path, data=data, init=str(base), model="", name=f"tuned{i}", steps=1, lr=1e-3, vocab=0), progress=False)
        out = export_folder(tmp_path/f"runs/tuned{i}", tmp_path/f"out{i}")
        assert json.loads((out/"tokenizer_config.json").read_text(encoding="utf-8"))["pad_token"] == name
        assert json.loads((out/"generation_config.json").read_text())["pad_token_id"] == 7

@pytest.mark.parametrize("what", ["write_bytes", "save_file"])
def test_full_disk(trained, tmp_path, monkeypatch, capsys, what):
    "The error names the folder, and says what to do"
    def full(*args, **kw): raise OSError(28, "No space left on device")
    if what == "save_file": monkeypatch.setattr("llm_speedrun.checkpoint.format.save_file", full)
    else: monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(SystemExit): speedrun_export([str(trained[1]), "--out", str(tmp_path/"out")])
    said = capsys.readouterr().err
    assert re.match("error: .*out was not written, nothing is left: .*no space left on device: make room", said) and "Errno" not in said
    assert names(tmp_path) == set()
