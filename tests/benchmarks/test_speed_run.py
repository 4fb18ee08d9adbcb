"A measuring run: what may go on in a file, what its records share, training, what is left out; and the forms of other projects' steps that it adds."
import json, subprocess, sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import pytest, torch
import bench_peers as program
from llm_speedrun.benchmarks import peers, speed_run as module
from llm_speedrun.benchmarks.adapters import CLONED, Nanochat, Peer, tree_commit
from llm_speedrun.benchmarks.peers import (AutoChunker, Transformers, attention_in, build_ours, compile_transformers, contender, race, speed_ratio)
from llm_speedrun.benchmarks.speed_run import HEADLINE, SpeedRun, contestant, stretches_of, named, own_lists, train_speed
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.model_config import train_flops
from llm_speedrun.timing import Measured
from helpers.tiny_runs import NANO, fails, nano, plain, relative_error
from make_readme import ROOT

def run_in(path, **kw): return SpeedRun(path, NANO, 2, 2, 1, log_info=lambda s: None, **kw)

def test_a_run_goes_on_only_as_it_was(tmp_path, monkeypatch):
    "Same name, commit, card and versions; otherwise the file is refused, before anything is measured"
    path = tmp_path/"a/run.json"
    run = run_in(path, run="one")
    assert run.measure_all(["safe"]) == [] and {r["run"] for r in json.loads(path.read_text())} == {"one"}
    assert run_in(path).facts["run"] == "one" and run_in(path).find("safe")["rounds"]
    for change, part in ((dict(commit="abc"), "commit abc"), (dict(card="GPU-2"), "card"), (dict(packages={}), "packages")):
        records = [r | change for r in json.loads(path.read_text())]
        (tmp_path/"other.json").write_text(json.dumps(records))
        with fails(InputError, "choose another file", change and [*change][0]): run_in(tmp_path/"other.json")
    (tmp_path/"old.json").write_text(json.dumps([dict(rung="safe", gpu="CPU")]))
    with fails(InputError, "choose another file"): run_in(tmp_path/"old.json")

def test_time_is_over(tmp_path):
    "Nothing begins then, and it is said what wasn't reached; what is there isn't measured again"
    assert run_in(tmp_path/"run.json", seconds=0).measure_all(["fastest", "safe", "fastest16"]) == ["safe", "fastest16"]
    run = run_in(tmp_path/"run.json")
    run.measure_all(["safe"])
    assert run_in(tmp_path/"run.json", seconds=0).measure_all(["safe", "fastest16"]) == ["fastest16"]

def test_without_ours(tmp_path, monkeypatch):
    "If `fastest` can't be built, that is what failed"
    monkeypatch.setattr(peers, "build_ours", lambda rungs, config: 1/0)
    run = run_in(tmp_path/"run.json")
    assert run.measure_all(["safe", "fastest16"]) == [] and [*run.failed] == ["fastest"] and "ZeroDivisionError" in run.failed["fastest"]

def test_records_say_what_ran(tmp_path):
    "MFU's peak, attention, losses and gradients, the medians of the rounds"
    run = run_in(tmp_path/"run.json")
    r = run.measure("fastest16")
    ours = run.find("fastest")
    assert (r["measured"], r["mfu_peak"], len(r["rounds"]), ours["before"], r["before"]) == ("step", "bf16", 2, None, "fastest")
    assert "flash" in r["attention"].lower() and r["grad_norm"] > 0 and r["losses"][1] < r["early_loss"] < r["losses"][0]
    assert json.loads((tmp_path/"run.json").read_text()) == json.loads(json.dumps(run.records))
    assert r["code"] and r["commit"] == tree_commit()
    assert ours["rounds"] == [mine for mine, _ in r["rounds"]] and r["ms_of_fastest"] == pytest.approx(ours["ms"], rel=.5)

def test_the_commit_of_a_tree(tmp_path):
    (tmp_path/"llm_speedrun").mkdir(); (tmp_path/"llm_speedrun/__init__.py").write_text("")
    assert tree_commit(tmp_path) is None
    (tmp_path/"COMMIT").write_text("0123456789abcdef\n")
    assert tree_commit(tmp_path) == "0123456789ab"
    git = lambda *words: subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True, text=True).stdout
    (tmp_path/"nbs").mkdir(); (tmp_path/"nbs/a.ipynb").write_text("{}")
    git("init"); git("add", "llm_speedrun", "nbs"); git("commit", "-m", "a")
    (tmp_path/"nbs/a.ipynb").unlink() # a lesson: what is measured is the package
    assert tree_commit(tmp_path) == git("rev-parse", "HEAD")[:12]
    (tmp_path/"llm_speedrun/__init__.py").write_text("1")
    assert tree_commit(tmp_path) == git("rev-parse", "HEAD")[:12] + "-dirty"

def test_a_step_of_its_own_size(tmp_path, monkeypatch):
    "The ratio is of tokens per second, so a step of twice the tokens in twice the time is as fast"
    fast = SimpleNamespace(tokens=64, measured=Measured([[10.], [10.]], None, 0.))
    found = speed_ratio(fast, SimpleNamespace(tokens=128, measured=Measured([[20.], [25.]], None, 0.)))
    assert found.items() >= dict(ratio=.9, ratio_p10=.8, ratio_p90=1.).items() and found.get("ratio_rounds", 2) == 2
    a = contender("a", lambda c: build_ours([], c), NANO, 2)
    b = contender("b", lambda c: build_ours([], c), NANO, 8, 2)
    first, r = race([a, b], 2, 1)
    assert (r["batch"], r["micro"]) == (8, 2) and r["tok_s"] == pytest.approx(8*NANO.seq_len/r["ms"]*1e3)
    assert CLONED["nanochat_own_step"].tokens == 2**19 and contestant("safe")[1] == 0
    monkeypatch.setattr(module, "contestant", lambda name, rivals: (None, 8*NANO.seq_len))
    assert run_in(tmp_path/"run.json").built("theirs")[2:] == (8, 2) # sequences in a step, and in its largest micro-batch

def test_training(tmp_path, monkeypatch):
    "Tokens of all but the first stretch over their seconds, with the command's own files; an error says what it said"
    def fake_run(words, **kw):
        folder = Path(next(w for w in words if str(w).startswith("--out=")).partition("=")[2])/"fastest16"
        folder.mkdir(parents=True)
        (folder/"config.json").write_text(json.dumps(dict(step_tokens=64, recipe="speedrun")))
        (folder/"result.json").write_text(json.dumps(dict(start=dict(seconds=3.))))
        rows = [dict(step=s, train_s=t) for s, t in ((10, 9.), (20, 10.), (30, 12.), (40, 16.), (50, 20.))]
        (folder/"metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return SimpleNamespace(returncode=0)
    run = run_in(tmp_path/"run.json") # asks git
    monkeypatch.setattr(module.subprocess, "run", fake_run)
    r = train_speed(run, "fastest16", "corpus", 20.)
    assert r["part"] == "all" and (r["measured"], r["tok_s"], r["ms"], r["recipe"]) == ("training", pytest.approx(40*64/11), pytest.approx(1.1e4/40), "speedrun")
    assert run.find("fastest16") is None and run.find("fastest16", "training") and r["run"] == run.facts["run"]
    monkeypatch.setattr(module.subprocess, "run", lambda *a, **kw: SimpleNamespace(returncode=2, stdout="", stderr="error: no corpus"))
    with fails(RunError, "no corpus"): train_speed(run, "fastest16", "corpus", 20.)
    with fails(RunError, "too few"): stretches_of([dict(step=1, train_s=1.), dict(step=2, train_s=2.)])

def test_publish(tmp_path):
    "Records of one run and one kind of card, under the card's name"
    out = tmp_path/"out"
    out.mkdir()
    (out/"124m.json").write_text(json.dumps([dict(run="a", gpu="NVIDIA H200", x=1)]))
    (out/"1b.json").write_text(json.dumps([dict(run="a", gpu="NVIDIA H200", x=2)]))
    path = program.publish(out, tmp_path/"headline")
    assert path.name == "nvidia-h200.json" and [r["x"] for r in json.loads(path.read_text())] == [1, 2]
    (out/"1b.json").write_text(json.dumps([dict(run="b", gpu="NVIDIA H200")]))
    with fails(InputError, "2 runs"): program.publish(out, tmp_path)

def test_the_front_page_has_each_project():
    "In 8 bits and in 16; what is missing here is only left out"
    assert {"nanogpt", "nanogpt_tensorwise", "nanochat", "nanochat_fp8", "transformers_liger_compile", "transformers_fp8", "compile_autotuned",
            "compile_tensorwise", "compile_chunker", "compile_flash4_fp8", "nanochat_flash4", "nanochat_own_step"} < {*HEADLINE}
    assert {*named(["headline", "rungs"])} <= own_lists().keys() | peers.PEERS.keys()

@pytest.mark.parametrize("names, found", [
    (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64>>"], "FlashAttention-2"),
    (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90"],
     "cuDNN, FlashAttention-4"),
    (["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"], "cuDNN"),
    (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)"], "memory-efficient"),
    (["void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>"], "FlashAttention-3"),
    (["scaled_dot_product_flash_attention_for_cpu", "mm"], "FlashAttention-2"), (["softmax", "nvjet_tst_128x256"], "")])
def test_which_attention(names, found): assert attention_in(names) == found

def test_nanochats_attention():
    "With ours in its place: the same output and gradients as PyTorch's; without, its own is back"
    def own(q, k, v, causal=False, window_size=(-1, -1)): return "own"
    space = SimpleNamespace(flash_attn_func=own)
    theirs = SimpleNamespace(USE_FA3=False, flash_attn=space, flash_attn_func=own)
    assert "FlashAttention-4" in Nanochat(flash4=True).set_attention(theirs)
    q, k, v = (torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)) # B T H D
    heads = [t.detach().transpose(1, 2).clone().requires_grad_() for t in (q, k, v)]
    y = space.flash_attn_func(q, k, v, causal=True, window_size=(5, 0))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    do = torch.randn_like(exact)
    exact.backward(do); y.backward(do.transpose(1, 2))
    assert relative_error(y, exact.transpose(1, 2)) < 1e-6
    for a, b in zip((q, k, v), heads): assert relative_error(a.grad, b.grad.transpose(1, 2)) < 1e-6
    assert Nanochat().set_attention(theirs) == "full windows, PyTorch's attention" and space.flash_attn_func is own

def test_what_of_transformers_is_compiled():
    "All of it; with Liger all but the last matmul and the loss"
    pytest.importorskip("transformers")
    def compiled(name):
        model = peers.PEERS[name].step(NANO, None).model
        return [m._compiled_call_impl is not None for m in (model, model.model)]
    assert [*map(compiled, ("transformers", "transformers_compile", "transformers_liger_compile"))] == [[False, False], [True, False], [False, True]]
    for name in ("transformers_compile", "transformers_liger_compile"):
        c = contender(name, peers.peer(name), NANO, 2)
        assert c.early < c.first

@pytest.mark.skipif(not module.version_of("torchao"), reason="torchao is not installed")
def test_transformers_in_8_bits():
    pytest.importorskip("transformers")
    r = race([contender("a", lambda c: build_ours([], c), NANO, 2), contender("b", peers.peer("transformers_fp8"), NANO, 2)], 2, 1)[1]
    assert r["dtype"] == "fp8" and "torch.compile" in r["source"]

@pytest.mark.slow
def test_the_compiler_chunks(monkeypatch):
    "Its pass runs during the first step, and the loss is the same; a torch without it is named"
    from torch._inductor import config, metrics
    if not hasattr(config, "auto_chunker"): pytest.skip("this torch has none")
    with torch.compiler.set_stance("default"):
        a = AutoChunker()
        a.rungs[4] += ":backend=inductor" # what a GPU takes
        big = replace(NANO, vocab=2048)
        counted = metrics.num_auto_chunking
        with config.patch({"auto_chunker.output_size_threshold": 1024, "auto_chunker.num_chunk": 4, "fx_graph_cache": False}):
            c = contender("chunked", lambda c: a.step(c, None), big, 64)
        plain = contender("plain", lambda c: build_ours(["bf16", "bf16_stream", "flash", "fused_adamw"], c), big, 64)
    assert metrics.num_auto_chunking > counted and abs(c.first - plain.first) < 1e-3 and abs(c.early - plain.early) < .02

def test_a_torch_without_chunker(monkeypatch):
    from torch._inductor import config
    monkeypatch.setattr("builtins.hasattr", lambda o, k: False if k == "auto_chunker" else getattr(o, k, config) is not config)
    assert "no auto-chunker" in AutoChunker().step_missing()

@pytest.mark.cuda
def test_liger_with_and_without_the_compiler():
    "The same weights and tokens: the same first loss and, after some updates, nearly the same; transformers without Liger comes back after it"
    pytest.importorskip("transformers"); pytest.importorskip("liger_kernel")
    config = replace(NANO, vocab=4096, width=256, heads=4, kv_heads=4, hidden=512, seq_len=256)
    found = {k: contender(k, peers.peer(k), config, 4) for k in ("transformers", "transformers_liger_compile", "transformers_compile")}
    first = found["transformers"]
    for c in found.values(): assert abs(c.first - first.first) < .01 and abs(c.early - first.early) < .05
    assert "liger" not in found["transformers_compile"].peer.source and "liger" not in sys.modules["transformers.models.qwen3.modeling_qwen3"].Qwen3RMSNorm.__module__
