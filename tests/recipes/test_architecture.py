"A head of its own and a normed embedding compute what they say under every rung, and initial weights are as asked."
import json
from dataclasses import asdict, replace
import pytest, torch, torch.nn.functional as F
from safetensors.torch import load_file, save_file
from llm_speedrun.tools.export import export_folder, write_folder
from llm_speedrun.pretrained import from_pretrained, import_folder, read_run
from llm_speedrun.model import GPT
from llm_speedrun.model_config import WORKLOADS
from llm_speedrun.recipes.architecture import NORM, OUT, folded, heads_of, init, NormedGPT, UntiedGPT
from llm_speedrun.runs import Run, add_rungs, baseline
from llm_speedrun.stepper import Stepper, enter_all
from llm_speedrun.checkpoint.load import check_size
from llm_speedrun.checkpoint.save import Saver
from helpers.tiny_runs import NANO, fails, nano

def built(model, rungs):
    "A run of a model, with rungs"
    return add_rungs(Run(model), rungs)

def tokens(config, batch=4, seed=0):
    "A batch of random tokens"
    return torch.randint(config.vocab, (2, batch, config.seq_len), generator=torch.Generator().manual_seed(seed)).unbind()

def loss_and_grads(run):
    "Of one batch: the loss, and gradients by name"
    step = Stepper(run)
    with enter_all(run.step_contexts): loss = step.forward_backward(*tokens(run.model.config))
    return loss, {n: p.grad for n, p in run.model.named_parameters()}

FP8 = ["bf16", "flash", "fused_ops", "chunked_ce", "fp8:parts=heads+out+mlp+head"]
LISTS = [[], ["bf16"], ["chunked_ce"], ["bf16", "fused_ops"], FP8, FP8 + ["cuda_graphs", "fused_adamw"], ["bf16", "flash", "compile"],
         ["bf16", "fused_ops", "chunked_ce", "checkpoint"], ["bf16", "bf16_weights"], ["bf16", "fused_ops", "chunked_ce", "fp8_activations"], ["bf16", "torchao_fp8"]]

@pytest.mark.parametrize("rungs", LISTS, ids=lambda r: ",".join(r).replace(":", "-") or "naive")
def test_untied_under_rungs(rungs, nano):
    "With a head equal to the embedding: the tied model's loss, and its gradient is the sum of both"
    tied, untied = GPT(NANO), UntiedGPT(NANO)
    with torch.no_grad(): untied.lm_head.weight.copy_(untied.embed_tokens.weight)
    (a, g), (b, h) = loss_and_grads(built(tied, rungs)), loss_and_grads(built(untied, rungs))
    assert a == b and g.keys() | {"lm_head.weight"} == h.keys()
    embed, head = h.pop("embed_tokens.weight").double(), h.pop("lm_head.weight").double()
    both = g.pop("embed_tokens.weight").double()
    assert head.norm() > 0 and embed.norm() > 0
    assert (embed + head - both).norm() < (1e-5 if both.dtype == torch.float32 else 1e-2) * both.norm()
    for n in g: assert torch.equal(g[n], h[n]), n

@pytest.mark.parametrize("rungs", LISTS[:6], ids=lambda r: ",".join(r).replace(":", "-") or "naive")
def test_untied_reads_its_head(rungs, nano):
    "Another head is another loss, the embedding alone is not the head, and steps are those of the plain model"
    runs = [built(UntiedGPT(NANO), r) for r in ([], rungs)]
    for r in runs: init(r, embed=1., head=.3, out=.5)
    (a, g), (b, h) = map(loss_and_grads, runs)
    x, y = tokens(NANO)
    m = runs[0].model
    assert torch.equal(a, F.cross_entropy(F.linear(m.hidden(x), m.lm_head.weight).flatten(0, 1), y.flatten()))
    rel = lambda a, b: ((a - b).norm() / a.norm()).item()
    most = 1e-4 if not rungs or "bf16" not in rungs else .1 if "fused_ops" in rungs and "chunked_ce" in rungs else .03
    assert rel(a, b.float()) < most/3
    for n in ("lm_head.weight", "embed_tokens.weight"): assert rel(g[n], h[n].float()) < most, n

def test_fp8_begins_from_zeros(nano):
    "Zero heads and projections have no scale yet: FP8 begins all the same, and learns"
    run = built(UntiedGPT(NANO), FP8)
    init(run)
    step, batch = Stepper(run), tokens(NANO)
    for g in step.opt.param_groups: g["lr"] = .01
    losses = [step(batch).item() for _ in range(20)]
    assert abs(losses[0] - torch.tensor(NANO.vocab).log()) < 1e-4 and losses[-1] < losses[0] - .5

def test_same_body(nano):
    "All but the head are the weights of a GPT of that seed; building draws nothing of the process-wide generator"
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b = GPT(NANO, 5).state_dict(), UntiedGPT(NANO, 5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert [*b] == [*a, "lm_head.weight"] and all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(b["lm_head.weight"], b["embed_tokens.weight"]) and abs(b["lm_head.weight"].std() - .02) < .002
    assert UntiedGPT(NANO).roles() == GPT(NANO).roles() | {"lm_head.weight": "head"}

@pytest.mark.parametrize("kind", [GPT, UntiedGPT, NormedGPT])
def test_init(kind, nano):
    "Deviations by role, the same for a seed, another for another; gone with the old weights; a scale of nothing is zero"
    config = WORKLOADS["tiny"]
    def weights(seed=0, before=0, **kw):
        run = Run(kind(config, before), seed=seed)
        init(run, **kw)
        return run.model.state_dict()
    a = weights(embed=.5, head=.1, matrix=2., out=.3)
    for n, p in a.items():
        fan = p.shape[-1]**-.5
        want = (None if p.ndim < 2 else .5 if "embed" in n else .1 if "head" in n else .3*fan if n.endswith(OUT) else 2*fan)
        if want is None: assert (p == 1).all()
        else: assert abs(p.std() / want - 1) < .02 and abs(p.mean()) < .02*want, n
    for b, same in ((weights(before=7, embed=.5, head=.1, matrix=2., out=.3), True), (weights(1, embed=.5, head=.1, matrix=2., out=.3), False)):
        assert all(torch.equal(a[n], b[n]) == same for n in a if a[n].ndim == 2)
    z = weights()
    assert all((z[n] == 0).all() == n.endswith((*OUT, "lm_head.weight")) for n in z if z[n].ndim == 2)

def test_init_of_parts(nano):
    "Weights that aren't there, or only in part, are refused"
    with fails(ValueError, "meta device"): init(baseline(NANO, "meta"))

def test_heads_of():
    "Heads of 128 where they divide the width, the same matrices, the same sharing; else nothing"
    got = {k: (c.heads, c.kv_heads) for k, c in ((k, heads_of(c)) for k, c in WORKLOADS.items() if k != "nano")}
    assert got == {"tiny": (4, 2), "124m": (6, 6), "180m": (6, 2), "350m": (8, 8), "1b": (16, 16)}
    for c in WORKLOADS.values():
        with torch.device("meta"): a, b = ([p.numel() for p in type("Empty", (GPT,), dict(init_weights=lambda *a: None))(k).parameters() if p.ndim == 2]
                                           for k in (c, heads_of(c)))
        assert a == b

@pytest.mark.parametrize("rungs", LISTS[:4] + [["bf16", "flash", "compile:whole=yes"]], ids=lambda r: ",".join(r).replace(":", "-") or "naive")
def test_normed_is_folded(rungs, nano):
    "A normed embedding that was trained, and an untied model with the folded one, agree under rungs"
    run = built(NormedGPT(NANO), rungs)
    init(run, embed=.2, head=.3, out=.5)
    step, plain = Stepper(run), UntiedGPT(NANO)
    for g in step.opt.param_groups: g["lr"] = .03
    for i in range(3): step(tokens(NANO, seed=i))
    state = run.model.state_dict()
    assert (state[NORM] - 1).abs().max() > .01
    plain.load_state_dict(folded(state, NANO.eps))
    a, b = (s.evaluate([tokens(NANO, seed=9)]) for s in (step, Stepper(built(plain, rungs))))
    assert abs(a - b) < 1e-5 * a

def trained(kind, config=NANO, **kw):
    "A model of a class after some steps, with norms that aren't 1"
    run = Run(kind(config), seed=3)
    init(run, **dict(embed=.3, head=.3, out=.5) | kw)
    step = Stepper(run)
    for g in step.opt.param_groups: g["lr"] = .03
    for i in range(2): step(tokens(config, seed=i))
    return run.model

def run_folder(folder, model):
    "The folder of a finished run, as the trainer leaves it"
    folder.mkdir()
    (folder/"config.json").write_text(json.dumps(dict(model_config=asdict(model.config))))
    save_file({f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}, folder/"model.safetensors")
    return folder

@pytest.mark.parametrize("kind", [UntiedGPT, NormedGPT])
def test_export_and_back(tmp_path, kind, nano):
    "transformers opens a model with a head of its own and computes the same; it comes back as it was, from there too"
    transformers = pytest.importorskip("transformers")
    model, (x, _) = trained(kind, heads_of(replace(NANO, width=256, heads=8, kv_heads=4))), tokens(NANO)
    run = run_folder(tmp_path/"run", model)
    out = export_folder(run, tmp_path/"hf")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.head_dim == 128 and theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    with torch.no_grad():
        ours, there = model(x), theirs.eval()(x).logits
        assert ours.std() > .1 and (ours - there).abs().max() < 1e-4
        theirs.save_pretrained(tmp_path/"saved")
        for folder, same in ((run, kind), (out, UntiedGPT), (tmp_path/"saved", UntiedGPT)):
            back = from_pretrained(folder, "cpu").model
            assert type(back) is same and replace(back.config, name="nano") == model.config
            assert (back(x) - ours).abs().max() < 1e-5
    write_folder(tmp_path/"again", *import_folder(out))
    assert (tmp_path/"again"/"model.safetensors").read_bytes() == (out/"model.safetensors").read_bytes()

def test_weights_that_contradict(tmp_path, nano):
    "A head in a folder whose config ties it is refused; missing, misshapen and unknown weights are named"
    out = export_folder(run_folder(tmp_path/"run", trained(NormedGPT)), tmp_path/"hf")
    whole, d = load_file(out/"model.safetensors"), json.loads((out/"config.json").read_text())
    def refused(tensors, *parts, **change):
        save_file(tensors, out/"model.safetensors")
        (out/"config.json").write_text(json.dumps(d | change))
        with fails(ValueError, *parts): import_folder(out)
    refused(whole, "lm_head.weight is not model.embed_tokens.weight", "tie_word_embeddings", tie_word_embeddings=True)
    refused({k: v for k, v in whole.items() if k != "lm_head.weight"}, "missing: lm_head.weight")
    refused(whole | {"lm_head.weight": whole["lm_head.weight"][1:].clone()}, r"lm_head.weight \[319, 32\] instead of \[320, 32\]")
    refused(whole | {"model.lm_head.bias": torch.zeros(320)}, "unknown: model.lm_head.bias")
    refused(whole | {f"model.{NORM}": torch.ones(32)}, f"unknown: model.{NORM}")
    run = tmp_path/"run"
    ours = load_file(run/"model.safetensors")
    save_file(ours | {f"model.{NORM}": torch.ones(8)}, run/"model.safetensors")
    with fails(ValueError, r"norm.weight \[8\] instead of \[32\]"): read_run(run)

@pytest.mark.parametrize("kind", [GPT, UntiedGPT, NormedGPT])
def test_checkpoint_of_another_class(tmp_path, kind, nano):
    "A checkpoint's weights tell its class, too; a config of another size is refused by the headers alone"
    model = trained(kind)
    run, saver = run_folder(tmp_path/"run", model), Saver(tmp_path/"run"/"checkpoints")
    saver.save(2, model.state_dict(), {}); saver.close()
    folder = run/"checkpoints"/"step-00000002"
    back = from_pretrained(folder, "cpu").model
    assert type(back) is kind and all(torch.equal(v, model.state_dict()[k]) for k, v in back.state_dict().items())
    with fails(ValueError, "weights, and the model of its config.json"): check_size(replace(NANO, vocab=321), folder)
    with fails(ValueError, "too few for the 4000 layers"): check_size(replace(NANO, layers=4000), folder)
