"Any model's step is counted as by hand, bounded as the roofline says, and what can't be counted or read is named."
import re, sys
from dataclasses import replace
from types import SimpleNamespace
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from llm_speedrun import op_counter
from llm_speedrun.cli import speedrun_explain
from llm_speedrun.datasheets import GPUS, LAUNCH_MS, find_gpu
from llm_speedrun.io_utils import InputError, read_json
from llm_speedrun.op_counter import Op
from llm_speedrun.roofline import Ceilings
from llm_speedrun import step_prediction
from llm_speedrun.step_prediction import datasheet_ceilings, kinds_of, rates, with_measured
from llm_speedrun.tools import explain
from llm_speedrun.tools.explain import ANY_MODEL, Explanation, changes, count_ops, explain_model, own_loss, remedies
from llm_speedrun.train.config import ExplainOptions
from helpers.cells import read
from helpers.tiny_runs import fails
from make_readme import ROOT

TOY = Ceilings(dict(fp32=1e12, tf32=4e12, bf16=8e12, fp8=16e12), 1e11)

@pytest.fixture(autouse=True)
def no_gpu_asked(request, monkeypatch):
    "Counts are of a CPU's operations, but where the test is about a GPU"
    if "cuda" not in request.keywords: monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

def total(ops, kind, what="flops"): return sum(getattr(o, what) for o in ops if o.kind == kind)

def file(folder, text, name="mine.py"):
    (folder/name).write_text("import torch, torch.nn as nn, torch.nn.functional as F\n" + text, encoding="utf-8")
    return str(folder/name)

def explained(path, **options): return explain_model(ExplainOptions(str(path), **options))

# --- counts ---

M, K, N = 24, 16, 40

def check_linear():
    "A layer without bias: two matmuls, since the batch needs no gradient, and AdamW in one pass"
    ops = count_ops((nn.Linear(K, N, bias=False), (torch.randn(M, K),), own_loss), ["fused_adamw"])
    assert total(ops, "matrix products") == 2*(2*M*K*N)
    assert total(ops, "matrix products", "bytes") == 2*4*(M*K + K*N + M*N) # both times two matrices are read, one is written
    adam, = [o for o in ops if o.name == "_fused_adamw_"]
    assert adam.bytes == 4*(7*K*N) + 4 # weights, gradients, two moments; three of these are written; the number of the step

def check_attention(causal):
    "Fused: two matmuls forward, five backward, half of them where it is causal"
    class Attend(nn.Module):
        def __init__(self): super().__init__(); self.qkv = nn.Linear(32, 96, bias=False)
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=.1)
    ops = count_ops((Attend(), (torch.randn(2, 64, 32),), own_loss))
    assert total(ops, "fused attention") == 7*2*(2*4*64*64*8)/(2 if causal else 1)
    assert total(ops, "matrix products") == 2*2*(2*64*32*96)

def test_counts_by_hand():
    check_linear(); check_attention(False); check_attention(True)

MUTANTS = { # what is counted -> a wrong count
    "op_bytes": lambda name, ins, outs: sum(map(op_counter.nbytes, outs)),
    "read_bytes": lambda name, t: 0,
    "attention_flops": lambda name, ins, causal: 1000.,
    "op_kind": lambda name: "pointwise and reductions",
    "MATMULS": ()}

@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_count_fails(name, monkeypatch):
    monkeypatch.setattr(op_counter, name, MUTANTS[name])
    with pytest.raises(AssertionError): test_counts_by_hand()

def test_encoder():
    "All linear layers, less the gradient of the batch that the first projection doesn't need; attention is fused, with its dropout"
    d, h, B, T, L = 32, 64, 2, 16, 3
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, h, batch_first=True), L)
    ops = count_ops((model.train(), (torch.randn(B, T, d),), own_loss))
    assert total(ops, "matrix products") == 6*B*T*L*(4*d*d + 2*d*h) - 2*B*T*3*d*d
    assert total(ops, "fused attention") == L*7*2*(B*T*T*d)
    assert not [o for o in ops if "softmax" in o.name]

def gpt2(folder, **kw):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, vocab_size=96, bos_token_id=0, eos_token_id=0, **kw).save_pretrained(folder)
    return folder

def llama(folder):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                             vocab_size=96, max_position_embeddings=64, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder

def kind(e, name): return next(k for k in e.kinds if k.kind == name)

def test_gpt2(tmp_path):
    "The tied head once; causal attention; the sequence is the model's; both forms of the path"
    e = explained(gpt2(tmp_path), batch_size=2)
    assert e.batch == [[2, 32]]*2 and e.model == "GPT2LMHeadModel" and e.weights == 96*32 + 32*32 + 2*(12*32*32 + 13*32) + 2*32
    assert kind(e, "matrix products").flops == 6*2*32*(2*12*32*32 + 96*32)
    assert kind(e, "fused attention").flops == 2*7*2*(2*32*32*32)/2
    assert explained(tmp_path/"config.json", batch_size=2).kinds == e.kinds

def test_llama(tmp_path):
    "Grouped queries and SwiGLU; in bf16 the same FLOPs, in which no FP32 matmul is left to be advised against"
    e = explained(llama(tmp_path), batch_size=2, seq_len=24)
    angles = 2*24*4 # of RoPE: a matmul in some versions of transformers
    assert kind(e, "matrix products").flops - 6*2*24*(3*(2*32*32 + 2*32*16 + 3*32*48) + 96*32) in (0, angles)
    assert kind(e, "fused attention").flops == 3*7*2*(2*24*24*32)/2
    half = explained(tmp_path, batch_size=2, seq_len=24, using="tf32, bf16")
    assert half.rungs == ["tf32", "bf16"] and kind(half, "matrix products").flops == kind(e, "matrix products").flops
    assert not {"tf32", "bf16"} & {r.rung for r in half.remedies}

def test_shared_weights_stay_shared():
    "A head that is the embedding's table is updated once"
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
            self.head.weight = self.e.weight
        def forward(self, x): return self.head(self.e(x))
    ops = count_ops((Tied(), (torch.zeros(2, 4, dtype=torch.long),), own_loss), ["fused_adamw"])
    assert [o.bytes for o in ops if o.name == "_fused_adamw_"] == [4*7*64*8 + 4]

# --- bounds ---

def test_kinds_are_those_of_the_roofline():
    "Each operation by its slower limit, summed by kind: an independent formula"
    ops = count_ops((nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), (torch.randn(32, 64),), own_loss))
    found = kinds_of(ops, TOY, .001)
    assert {k.kind for k in found} == {o.kind for o in ops} and sum(k.calls for k in found) == len(ops)
    for k in found:
        its = [o for o in ops if o.kind == k.kind]
        assert k.predicted_ms == pytest.approx(sum(1e3*max(o.flops/1e12, o.bytes/1e11) for o in its))
        assert k.bytes == sum(o.bytes for o in its)
    assert [k.predicted_ms for k in found] == sorted((k.predicted_ms for k in found), reverse=True)

@pytest.mark.parametrize("op, launch, bound", [(Op("mm", "matrix products", "fp32", 1e12, 1e6), .01, "arithmetic"), (Op("mm", "matrix products", "fp32", 1e6, 1e10), .01, "memory"),
                                               (Op("mul", "pointwise and reductions", "", 0, 1e6), .1, "launches")])
def test_what_bounds_a_kind(op, launch, bound): assert [k.bound for k in kinds_of([op], TOY, launch)] == [bound]

def test_a_kind_that_was_measured_alone(): # the profile has what the count hasn't
    assert [(k.kind, k.calls, k.measured_ms) for k in with_measured([], {"copies and casts": 2.})] == [("copies and casts", 0, 2.)]

def test_rates_come_from_the_named_card(monkeypatch):
    assert rates("h200")[:2] == ("NVIDIA H200", datasheet_ceilings(find_gpu("H200"))) and "There is no GPU" not in rates("h200")[4]
    gpu, _, _, here, said = rates("")
    assert gpu == find_gpu("H100").said and not here and "There is no GPU here" in said and "--gpu" in said
    monkeypatch.setattr(step_prediction, "machine", lambda: dict(gpu="NVIDIA H200"))
    for name in ("ceilings", "launch_time"): monkeypatch.setattr(step_prediction, name, lambda name=name: name)
    for asked in ("", "H200"): assert rates(asked)[:4] == ("NVIDIA H200", "ceilings", "launch_time", True)
    assert rates("T4")[:2] == ("Tesla T4", datasheet_ceilings(find_gpu("T4")))
    assert len({g.name for g in GPUS}) == len(GPUS) and all(find_gpu(g.name.lower()) == g for g in GPUS)

def test_the_launch_is_lesson_01s():
    "What is taken where no launch can be measured is what the lesson prints"
    cells = read(ROOT/"nbs/1_start/01_gpu.ipynb")["cells"]
    said = "".join(t for c in cells for o in c.get("outputs", ()) for t in o.get("text", ()))
    assert [float(us)/1e3 for us in re.findall(r"^ +1 numbers: +([\d.]+) µs", said, re.M)] == [LAUNCH_MS]

# --- remedies ---

def test_eager_attention_is_found(tmp_path):
    "In transformers' own code: with the remedy its arithmetic is fused attention's, in full, since nobody knows that the mask is causal"
    pytest.importorskip("transformers")
    config, made = SimpleNamespace(batch_size=2, seq_len=32), {}
    for how in ("eager", "sdpa"):
        build, _ = explain.find_build(str(gpt2(tmp_path)))
        made[how] = explain.make_shapes(build, config)
        made[how][0].set_attn_implementation(how)
    ops, fused = count_ops(made["eager"]), count_ops(made["sdpa"])
    flash = changes(count_ops(made["eager"], ANY_MODEL))["flash"]
    assert total(flash(ops), "fused attention") == 2*total(fused, "fused attention") and not total(ops, "fused attention")
    assert total(flash(ops), "matrix products") == total(fused, "matrix products") and flash(fused) == fused
    moved = lambda ops: sum(o.bytes for o in ops)
    assert moved(fused) == pytest.approx(moved(flash(ops)), rel=.1) and moved(flash(ops)) < .9*moved(ops)

def test_a_softmax_that_is_no_attention():
    "As of a router: nothing to fuse, since no matmul reads it"
    model = nn.Sequential(nn.Linear(16, 64), nn.Softmax(-1))
    ops = count_ops((model, (torch.randn(64, 16),), own_loss))
    assert changes(ops)["flash"](ops) == ops

def test_logits_are_read_and_written_once():
    model = nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512))
    made = model, (torch.zeros(4, 64, dtype=torch.long),), own_loss
    ops = count_ops(made)
    less = changes(ops)["chunked_ce"](ops)
    assert [o.bytes for o in less if o.name == "loss"] == [2*4*256*512] and not [o for o in less if "log_softmax" in o.name]
    assert total(less, "matrix products") == total(ops, "matrix products")

def test_remedies_are_predictions_of_their_own():
    "Each on top of those before it; none that saves next to nothing; no format that the card lacks"
    made = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)), (torch.randn(1024, 1024),), own_loss
    ops, better = count_ops(made), count_ops(made, ANY_MODEL)
    found, now = remedies(ops, better, TOY, 0.), explain.step_ms(ops, TOY, 0.)
    assert {"tf32", "bf16"} <= {r.rung for r in found} and "flash" not in {r.rung for r in found}
    for r in found:
        assert r.gain == pytest.approx(now/r.predicted_ms) and r.gain > 1/(1 - explain.LEAST) and r.lesson.endswith(".html")
        now = r.predicted_ms
    tf32 = [replace(o, fmt="tf32") for o in ops]
    assert found[0].rung == "tf32" and found[0].predicted_ms == pytest.approx(explain.step_ms(tf32, TOY, 0.))
    old = Ceilings(dict(fp32=1e12), 1e11)
    assert not {"tf32", "bf16", "fp8"} & {r.rung for r in remedies(ops, better, old, 0.)}
    assert remedies(ops, better, TOY, 1.)[-1].rung == "cuda_graphs"

# --- models from files ---

ENCODER = """def build(batch_size, seq_len=16):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(batch_size, seq_len, 32)
"""

def test_a_file(tmp_path):
    "The options reach the function; weights are never made"
    path = file(tmp_path, ENCODER)
    assert explained(path).batch == [[8, 16, 32]] and explained(f"{path}:build", batch_size=3, seq_len=5).batch == [[3, 5, 32]]
    path = file(tmp_path, "def huge(): return nn.Linear(10**6, 10**6), torch.randn(4, 10**6)\n", "huge.py")
    assert explained(f"{path}:huge").weights == 10**12 + 10**6

def test_a_loss_and_imports_of_its_own(tmp_path):
    "A dict as a batch; the file beside it; a model that reads values while it is made"
    file(tmp_path, "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
         "        self.l = nn.Linear(4, int(torch.ones(1).item())*6)\n    def forward(self, x): return self.l(x)\n", "net_beside.py")
    path = file(tmp_path, "from net_beside import Net\ndef build():\n    def loss(model, x, y): return (model(x) - y).abs().sum()\n"
                "    return Net(), dict(x=torch.randn(2, 4), y=torch.zeros(2, 6)), loss\n")
    e = explained(path)
    assert e.batch == [[2, 4], [2, 6]] and e.weights == 30 and str(tmp_path) not in sys.path
    del sys.modules["net_beside"]

@pytest.mark.parametrize("out, calls", [("logits", 3), ("logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())", 3)])
def test_tokens_for_a_language_model(tmp_path, out, calls):
    "nanoGPT's form: it gets targets, and its own loss is taken, or the cross-entropy of its logits"
    path = file(tmp_path, "class Net(nn.Module):\n    def __init__(self): super().__init__(); self.e, self.h = nn.Embedding(50, 8), nn.Linear(8, 50)\n"
                f"    def forward(self, idx, targets=None):\n        logits = self.h(self.e(idx))\n        return {out}\n")
    e = explained(f"{path}:Net", seq_len=20)
    assert e.batch == [[8, 20]]*2 and kind(e, "softmax and loss").calls > calls and kind(e, "matrix products").flops == 6*8*20*8*50

# --- what can't be counted ---

def test_an_operation_without_shapes_is_named(tmp_path):
    "Of a custom operation without a fake implementation; then with one: it is counted by its bytes, and the note says so"
    text = """@torch.library.custom_op("mine{n}::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor: return 2*x
twice.register_autograd(lambda ctx, g: 2*g)
{fake}
class Twice(nn.Module):
    def forward(self, x): return twice(x)
def build(): return nn.Sequential(nn.Linear(8, 8), Twice()), torch.randn(4, 8)
"""
    path = file(tmp_path, text.format(n=1, fake=""))
    with fails(InputError, r"module 1 \(Twice\) can't be counted, line 7, in forward", "register_fake"): explained(path)
    path = file(tmp_path, text.format(n=2, fake="twice.register_fake(torch.empty_like)"), "other.py")
    note, = explained(path).notes
    assert note.startswith("the FLOPs of twice (1 calls) are not known") and "register_flop_formula" in note

@pytest.mark.parametrize("line, parts", [("x[x > 0]", ["nonzero", "fixed number or shape"]), ("x*x.sum().item()", ["line 3", "fixed number"]),
                                         ("torch.from_numpy(x.detach().numpy())", ["works on memory"]), ("x @ x", ["Correct it"])])
def test_a_module_that_cannot_be_counted(tmp_path, line, parts):
    path = file(tmp_path, f"class Odd(nn.Module):\n    def forward(self, x): return {line}\n"
                "def build(): return nn.Sequential(nn.Linear(8, 6), nn.Sequential(Odd())), torch.randn(4, 8)\n")
    with fails(InputError, r"module 1.0 \(Odd\) can't be counted, line 3, in forward", *parts): explained(path)

@pytest.mark.parametrize("text, name, parts", [
    ("def build(): pass", "biuld", ["unknown function .*'biuld'. Did you mean 'build'", "mine.py"]), ("def build(:", "build", ["mine.py fails, line 2: SyntaxError"]),
    ("import no_such_module", "build", ["mine.py fails, line 2: ModuleNotFoundError"]), ("def build():\n    raise ValueError('too wide')", "build", ["line 3, in build: ValueError: too wide"]),
    ("def build(): return 3", "build", ["returns int, and must return a model"]), ("def build(): return nn.Linear(2, 2)", "build", ["Linear has no embedding", r"\(model, batch\)"]),
    ("def build(): return nn.Linear(2, 2), 3", "build", ["holds no tensors"]), ("def build(): return nn.ReLU(), torch.zeros(2)", "build", ["nothing that ReLU returns has a gradient"]),
    ("raise SystemExit(3)", "build", ["mine.py fails, line 2: SystemExit"])])
def test_bad_files(tmp_path, text, name, parts):
    with fails(InputError, *parts): explained(f"{file(tmp_path, text)}:{name}")

@pytest.mark.parametrize("config, parts", [("{}", ["no model_type", "FILE.py:build"]), ('{"model_type": "no_such"}', ["transformers can't read", "no_such"]),
                                           ('{"model_type": "vit"}', ["no causal language model for 'vit'"]), ("{", ["is no JSON"])])
def test_bad_configs(tmp_path, config, parts):
    pytest.importorskip("transformers")
    (tmp_path/"config.json").write_text(config)
    with fails(InputError, *parts): explained(tmp_path)

def test_without_transformers(tmp_path, monkeypatch):
    gpt2(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with fails(InputError, "config.json needs transformers", "pip install transformers"): explained(tmp_path)

def test_other_bad_options(tmp_path):
    path = file(tmp_path, ENCODER)
    with fails(InputError, "unknown GPU 'H10'.*'H100'"): explained(path, gpu="H10")
    with fails(InputError, "unknown rung for any model 'flash'", "fused_adamw"): explained(path, using="flash")
    with fails(InputError, "there is no such file"): explained(tmp_path/"nowhere.py")
    with fails(InputError, "neither FILE.py:function nor a config"): explained(tmp_path/"nowhere")

# --- the command ---

def test_command(tmp_path, capsys):
    "Text, JSON that reads back as what it was, and a chart"
    path = file(tmp_path, ENCODER)
    speedrun_explain([path, "--gpu", "H200", "--json", str(tmp_path/"out/e.json"), "--chart", str(tmp_path/"charts/e.png")])
    said, e = capsys.readouterr().out, read_json(tmp_path/"out/e.json", Explanation)
    assert e == explained(path, gpu="H200") and explain.as_text(e) in said
    assert (tmp_path/"charts/e.png").read_bytes()[:4] == b"\x89PNG"
    for text in ("NVIDIA H200: the rates of its datasheet", "with no rungs", "| the step", "What would help", "cuda_graphs", "/2_ladder/"): assert text in said
    assert said.count("\n| ") == 2 + len(e.kinds)

def test_command_refuses(tmp_path, capsys):
    path = file(tmp_path, ENCODER)
    (tmp_path/"taken").write_text("")
    for args, said in ({"--json": "taken/e.json"}, "choose another --json"), ({"--chart": "e.txt"}, "--chart .*e.txt"):
        with pytest.raises(SystemExit, match="2"): speedrun_explain([path, *(w for k, v in args.items() for w in (k, str(tmp_path/v)))])
        assert re.search(f"^error: .*{said}", capsys.readouterr().err, re.M)

def test_measured_beside_the_prediction(tmp_path, monkeypatch):
    "What a GPU would show, here by the CPU's profile: a time for each kind, and one for the step; unless it isn't wanted, or doesn't fit"
    path = file(tmp_path, ENCODER)
    monkeypatch.setattr(explain, "rates", lambda gpu: ("CPU", TOY, 1e-3, True, "as measured"))
    e = explained(path, batch_size=2)
    assert e.measured_ms > 0 and kind(e, "matrix products").measured_ms > 0
    assert "measured" in [t.get_text() for t in explain.chart(e).figure.legends[0].get_texts()] and " - |" not in explain.as_text(e).splitlines()[-3]
    assert explained(path, batch_size=2, measure=False).measured_ms is None
    def crowded(*args): raise torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(explain, "measure", crowded)
    assert explained(path, batch_size=2).notes == [explain.NO_ROOM]

@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    "GPT-2 is predicted by this GPU's ceilings and measured; each kind that takes a tenth of the step is in both"
    e = explained(gpt2(tmp_path), batch_size=8)
    assert e.gpu == torch.cuda.get_device_name() and e.measured_ms >= .5*sum(k.measured_ms or 0 for k in e.kinds) > 0
    for k in e.kinds:
        if (k.measured_ms or 0) > .1*e.measured_ms: assert k.calls, k
    assert {k.kind for k in e.kinds} >= {"matrix products", "fused attention", "optimizer"}
    assert kind(e, "optimizer").calls < 100 # for all weights at once, as AdamW does on a GPU
