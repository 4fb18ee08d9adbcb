"Other projects beside ours: their code as it lies there, errors before anything is measured, and records that say what ran."
import json, logging, os, subprocess, sys, textwrap
from dataclasses import replace
from types import SimpleNamespace
import pytest, torch
from llm_speedrun.benchmarks import peers as module
from llm_speedrun.benchmarks.adapters import source_of
from llm_speedrun.data.corpus import open_corpus
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.measure import version_of
from llm_speedrun.model_config import matrix_params
from llm_speedrun.benchmarks.peers import (compare_with_peers, contender, Contender, contenders, on_text, build_ours, peer, peers,
                                           peers_table, text_batch)
from llm_speedrun.cli import speedrun_ladder
from llm_speedrun.train.config import LadderOptions
from helpers.tiny_runs import NANO, fails, nano, plain, write_bins

MODEL = '''
    from dataclasses import dataclass
    import torch, torch.nn as nn, torch.nn.functional as F

    @dataclass
    class GPTConfig:
        block_size: int = 8
        vocab_size: int = 64
        n_layer: int = 1
        n_head: int = 1
        n_embd: int = 8
        dropout: float = 0.
        bias: bool = True

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, config.n_embd)
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
            self.head.weight = self.embed.weight
            self.learns = LEARNS
            print("number of parameters: many")

        def forward(self, idx, targets=None):
            logits = self.head(self.embed(idx))
            if len(idx) > MOST: raise torch.OutOfMemoryError("too many")
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
            return torch.optim.SGD(self.parameters(), lr=1. if self.learns else 0.)
'''

def clone(folder, learns=True, most=99):
    "A folder with a `model.py` of nanoGPT's interface, which takes batches of at most `most`"
    folder.mkdir(parents=True, exist_ok=True)
    code = textwrap.dedent(MODEL).replace("LEARNS", str(learns)).replace("MOST", str(most))
    (folder/"model.py").write_text(code, encoding="utf-8")
    return folder

@pytest.mark.skipif(not version_of("torchao"), reason="torchao is not installed")
def test_a_clone_in_8_bits(tmp_path):
    "Its linear layers are torchao's, the record says so, and it learns"
    path = clone(tmp_path/"fake")
    ours, theirs = compare_with_peers(NANO, 2, ["bf16"], {"nanogpt_tensorwise": path})
    assert (ours["dtype"], theirs["dtype"], theirs["rung"]) == ("bf16", "fp8", "nanogpt_tensorwise")
    assert theirs["losses"][1] < theirs["losses"][0]

def test_what_torchao_needs_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_speedrun.rungs.fp8.version_of", lambda name: None)
    for name, path in (("compile_tensorwise", None), ("nanogpt_rowwise", clone(tmp_path/"fake"))):
        with fails(InputError, "can't run here: torchao is not installed"): peer(name, path)

def test_a_clone_takes_turns(tmp_path, capsys):
    "Ours and theirs get the same tokens; the record has their commit, their weights, and a loss that falls"
    path = clone(tmp_path/"fake")
    (path/"COMMIT").write_text("feedbeef00112233")
    state = torch.random.get_rng_state()
    ours, theirs = compare_with_peers(NANO, 2, ["bf16"], {"nanogpt": path})
    assert torch.equal(state, torch.random.get_rng_state()) and "many" not in capsys.readouterr().out
    assert (ours["rung"], ours["before"], ours["ratio"], ours["rungs"]) == ("llm_speedrun", None, 1., ["bf16"])
    assert (theirs["rung"], theirs["before"], theirs["source"]) == ("nanogpt", "llm_speedrun", "commit feedbeef0011")
    assert theirs["parameters"] == theirs["in_products"] == NANO.vocab*NANO.width # tied, without a bias
    assert ours["in_products"] == matrix_params(NANO) < ours["parameters"]
    assert (theirs["batch"], theirs["micro"], theirs["seq"], theirs["workload"]) == (2, 2, NANO.seq_len, "nano")
    for r in (ours, theirs): assert r["losses"][1] < r["losses"][0] and r["predicted_ratio"] is None
    assert json.loads(json.dumps([ours, theirs])) == [ours, theirs]
    said = str(peers_table([ours, theirs]))
    assert "| nanogpt " in said and f"{theirs['tok_s']:,.0f}" in said and "in one process" in said

NANOCHAT = '''
    from dataclasses import dataclass
    import logging, torch, torch.nn as nn, torch.nn.functional as F
    logging.basicConfig(level=logging.INFO)

    @dataclass
    class GPTConfig:
        sequence_len: int
        vocab_size: int
        n_layer: int
        n_head: int
        n_kv_head: int
        n_embd: int
        window_pattern: str

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embed, self.head = nn.Embedding(config.vocab_size, config.n_embd), nn.Linear(config.n_embd, config.vocab_size)
            assert self.head.weight.is_meta
        def init_weights(self):
            for p in self.parameters(): nn.init.normal_(p, std=.02)
        def setup_optimizer(self):
            opt = torch.optim.SGD(self.parameters(), lr=10.)
            for g in opt.param_groups: g["initial_lr"] = g["lr"]
            return opt
        def forward(self, idx, targets):
            return F.cross_entropy(self.head(self.embed(idx)).flatten(0, 1), targets.flatten())
'''

def test_a_package_takes_part(tmp_path):
    "nanochat is filled after it was built without memory; its windows are full without FlashAttention-3; the log stays as it was"
    handlers = logging.root.handlers[:]
    for name in ("one", "two"):
        (tmp_path/name/"nanochat").mkdir(parents=True)
        (tmp_path/name/"nanochat/gpt.py").write_text(textwrap.dedent(NANOCHAT))
        (tmp_path/name/"nanochat/flash_attention.py").write_text("USE_FA3 = False")
    try:
        c = Contender("nanochat", peer("nanochat", tmp_path/"one"), NANO, 2, 1)
        assert c.peer.step.opt.param_groups[0]["lr"] == 1. and c.peer.step.clip is None
        assert (c.peer.model.config.window_pattern, c.peer.model.config.n_head) == ("L", 1) and "full windows" in c.peer.source
        assert c.step().item() < c.first and logging.root.handlers == handlers
        with fails(InputError, "loaded already", "two"): peer("nanochat", tmp_path/"two")(NANO)
    finally:
        for name in [k for k in sys.modules if k.split(".")[0] == "nanochat"]: del sys.modules[name]

def test_source(tmp_path):
    "A commit where there is git, with a word on changes; else what a file says, else a digest"
    path = clone(tmp_path/"fake")
    assert source_of(path, "model.py").startswith("sha256 ")
    git = lambda *words: subprocess.run(["git", "-C", path, "-c", "user.name=a", "-c", "user.email=b@c", *words], check=True, capture_output=True, text=True).stdout
    git("init"); git("add", "model.py"); git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")[:12]
    assert source_of(path, "model.py") == f"commit {head}"
    with open(path/"model.py", "a") as f: f.write("\n# mine\n")
    assert source_of(path, "model.py") == f"commit {head}, changed"

@pytest.mark.parametrize("args, parts", [
    (("nanogtp",), ["unknown peer 'nanogtp'", "Did you mean 'nanogpt'"]),
    (("nanogpt",), ["git clone https://github.com/karpathy/nanoGPT", "nanogpt=FOLDER"]),
    (("nanochat", "nowhere"), ["nowhere has no nanochat/gpt.py", "folder of a clone"]),
    (("compile_whole", "nowhere"), ["comes from pip", "name alone"]),
    (("modded-nanogpt", "nowhere"), ["trains as soon as it is imported", "FlashAttention-3", "torchrun"])], ids=lambda a: a[0])
def test_errors(args, parts):
    "An error says what is missing and what to do"
    with fails(InputError, *parts): peer(*args)

def test_missing_package(tmp_path, monkeypatch):
    "What a clone imports and isn't there is named; pip's peers say what to install"
    path = clone(tmp_path/"fake")
    (path/"model.py").write_text("import surely_not_installed")
    before = list(sys.path)
    with fails(InputError, "pip install surely_not_installed"): peer("nanogpt", path)(NANO)
    assert sys.path == before
    monkeypatch.setattr(module, "version_of", lambda name: None)
    with fails(InputError, "pip install transformers"): peer("transformers")
    assert "transformers" not in peers()

def test_micro_batch(tmp_path):
    "A batch that doesn't fit is halved until it does; the step's tokens stay the same"
    c = contender("fake", peer("nanogpt", clone(tmp_path/"small", most=2)), NANO, 8)
    assert (c.batch, c.micro) == (8, 2)
    with fails(RunError, "a micro-batch of one sequence"): contender("fake", peer("nanogpt", clone(tmp_path/"tiny", most=0)), NANO, 6)

def test_one_that_fails_is_left_out(tmp_path):
    "The others go on, and a line says what it said; a wrong name is still an error before anything is built"
    path, said = clone(tmp_path/"fake"), []
    (path/"model.py").write_text("raise ValueError('not on this machine')")
    field = contenders(NANO, 2, {"mine": []}, {"nanogpt": path}, said.append)
    assert [c.name for c in field] == ["mine"] and said == ["nanogpt is left out: ValueError: not on this machine"]
    with fails(InputError, "unknown peer"): contenders(None, 2, {"mine": []}, {"nanogtp": None})

def test_the_micro_batches_mean(tmp_path):
    "Halves of a batch give the loss and the weights of the whole"
    setup = peer("nanogpt", clone(tmp_path/"fake"))
    a, b = (Contender("fake", setup, NANO, 4, micro) for micro in (4, 2))
    torch.testing.assert_close(a.first, b.first)
    torch.testing.assert_close(a.peer.model.embed.weight, b.peer.model.embed.weight)

def test_plain_compile_is_our_model():
    "The careful user's model has our weights and our loss"
    mine, theirs = (Contender("", setup, NANO, 2, 2) for setup in (lambda c: build_ours(["bf16"], c), peer("compile_blocks")))
    assert (mine.peer.parameters, mine.peer.in_products) == (theirs.peer.parameters, theirs.peer.in_products)
    assert abs(mine.first - theirs.first) < .02

def test_transformers_is_our_shape():
    "transformers' Qwen3 has as many weights as ours, in bf16, and learns"
    pytest.importorskip("transformers")
    if torch.cuda.is_available(): pytest.importorskip("liger_kernel")
    c = Contender("transformers", peer("transformers"), NANO, 2, 1)
    assert c.peer.parameters == build_ours([], NANO).parameters and {p.dtype for p in c.peer.model.parameters()} == {torch.bfloat16}
    for _ in range(10): last = c.step().item()
    assert last < c.first

def test_text(tmp_path):
    "Text and random tokens in turn; a corpus with tokens beyond the model is refused"
    field = contenders(NANO, 2, {"mine": []}, {})
    shards = open_corpus(write_bins(tmp_path/"bins"), vocab=300).train
    (random, text), = on_text(field, shards, rounds=2).values()
    assert len(random.rounds) == len(text.rounds) == 2
    assert text_batch(shards, field[0]).shape == (2, 2, NANO.seq_len)
    field[0].config = replace(NANO, vocab=100)
    with fails(InputError, "beyond the model's 100"): text_batch(shards, field[0])

def test_command(tmp_path, monkeypatch, capsys):
    "`--peer` may be given again; table and records are beside the ladder's, and one that doesn't learn is named"
    monkeypatch.chdir(tmp_path)
    good, idle = clone(tmp_path/"good"), clone(tmp_path/"idle", learns=False)
    args = "--model nano --rungs bf16 --batch_size 2 --out out".split()
    speedrun_ladder([*args, "--peer", "compile_blocks", "--peer", f"nanogpt={good}"])
    said = capsys.readouterr().out
    assert "| compile_blocks " in said and "| nanogpt " in said and "did not learn" not in said
    assert [r["rung"] for r in json.loads((tmp_path/"out/peers.json").read_text())] == ["llm_speedrun", "compile_blocks", "nanogpt"]
    assert "nanogpt" in (tmp_path/"out/peers.md").read_text() and (tmp_path/"out/ladder.json").exists()
    speedrun_ladder("--model nano --rungs naive --batch_size 1 --out idle_too".split() + ["--peer", f"nanogpt={idle}"])
    assert "nanogpt did not learn" in capsys.readouterr().out

def test_command_refuses_first(tmp_path, monkeypatch, capsys):
    "A peer that can't run is an error before the ladder is measured"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e: speedrun_ladder(["--model", "nano", "--out", "out", "--peer", "nanogpt=nowhere"])
    assert e.value.code == 2 and "nowhere has no model.py" in capsys.readouterr().err and not os.path.exists("out")

def test_ligers_loss_for_hopper(monkeypatch):
    "It gets a head padded to a multiple of 256 rows; the gradient of the head has the head's shape; without it, what is missing is said"
    if not torch.cuda.is_available():
        with fails(InputError, "can't run here: Liger's loss needs a Hopper GPU"): peer("transformers_hopper")
    name = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    monkeypatch.setitem(sys.modules, name, None)
    with fails(InputError, "Liger's loss for Hopper GPUs doesn't load"): module.HopperLoss().loss_of(None)
    shapes = []
    def plain(h, weight, target):
        shapes.append((h.shape, weight.shape))
        return torch.nn.functional.cross_entropy(h @ weight.T, target)
    parts = name.split(".")
    for i in range(1, len(parts)): monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(liger_fused_linear_cross_entropy_sm90=plain))
    h, head, y = torch.randn(2, 3, 8), torch.nn.Linear(8, 300, bias=False), torch.randint(300, (2, 3))
    loss = module.HopperLoss().loss_of(SimpleNamespace(model=lambda input_ids: SimpleNamespace(last_hidden_state=h), lm_head=head))(None, y)
    loss.backward()
    logits = torch.cat((h @ head.weight.T, torch.zeros(2, 3, 212)), -1)
    assert shapes == [((6, 8), (512, 8))] and head.weight.grad.shape == head.weight.shape
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item(), rel=1e-5)
