"""`accelerate` trains a transformers model in place: its loss and each gradient are transformers' own, against float64 too; a step, a run under
transformers' Trainer, and the saved folder; and what is refused."""
import copy, inspect
import pytest, torch, torch.nn.functional as F
from llm_speedrun.accelerate import accelerate, label_weights
from llm_speedrun.io_utils import InputError
from llm_speedrun.model_config import GPTConfig
from llm_speedrun.recipes.schedules import GuardedStepper
from doc_commands import ROOT, write_files
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.runs import build, rung
from llm_speedrun.stepper import enter_all

transformers = pytest.importorskip("transformers")
V, T = 160, 32
LLAMA3 = dict(rope_type="llama3", rope_theta=500., factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=500., factor=4., original_max_position_embeddings=16)
KINDS = {"qwen3": ("Qwen3", dict(tie_word_embeddings=True)), "qwen3-untied": ("Qwen3", dict(tie_word_embeddings=False)),
         "qwen3-wide-heads": ("Qwen3", dict(tie_word_embeddings=True, head_dim=32)),
         "llama": ("Llama", dict(tie_word_embeddings=False)), "llama3": ("Llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
         "yarn": ("Qwen3", dict(tie_word_embeddings=True, rope_parameters=YARN)), "linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=500., factor=2.)))}
SAME = ["", "flash", "flash,fused_ops", "flash,fused_ops,chunked_ce,tied_embedding", "chunked_ce,head_groups", "flash,fused_ops,chunked_ce,checkpoint", "flash,fused_ops,selective_checkpoint", "auto"]
BF16 = ["bf16", "bf16,flash", "bf16,flash,fused_ops,chunked_ce", "bf16,flash,fused_ops,tied_embedding,chunked_ce,head_groups"]
FP8 = ["bf16,flash,fused_ops,chunked_ce,fp8", "bf16,fused_ops,chunked_ce,fp8:delayed=no,head_groups", "bf16,fused_ops,fp8:parts=mlp"]

def shape(**more): return dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                               max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=500.)) | more

def made(kind="Qwen3", **more):
    "A model of transformers; its norms' weights are random, so that they matter"
    m, g = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape(**more))), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in m.parameters():
            if p.ndim == 1: p.uniform_(.5, 1.5, generator=g)
            else: p.normal_(std=.1, generator=g)
    return m

def batch(seed=0, rows=3, hide=True):
    "Tokens, and labels of which some don't count"
    x = torch.randint(V, (rows, T), generator=torch.Generator().manual_seed(seed))
    y = x.clone()
    if hide: y[0, :5] = y[-1, 20:] = -100
    return dict(input_ids=x, labels=y)

def exact(hf):
    "transformers' model in float64, whose norms don't fall back to FP32"
    m = copy.deepcopy(hf).double()
    for k in m.modules():
        if type(k).__name__.endswith("RMSNorm"): k.forward = lambda x, k=k: F.rms_norm(x, k.weight.shape, k.weight, k.variance_epsilon)
    return m

def exact_loss(m, b): return F.cross_entropy(m(b["input_ids"]).logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

def grads(m, loss):
    "The loss, and the gradient of each parameter of a transformers model by name"
    for p in m.parameters(): p.grad = None
    loss.backward()
    return loss.item(), {k: p.grad.double() for k, p in m.named_parameters()}

def off(a, b): return {k: (a[k] - b[k]).norm()/b[k].norm() for k in b}

@pytest.fixture(scope="module")
def references():
    "Of each kind the model, and its exact loss and gradients"
    found = {k: made(kind, **more) for k, (kind, more) in KINDS.items()}
    return {k: (m, *grads(e := exact(m), exact_loss(e, batch()))) for k, m in found.items()}

@pytest.mark.parametrize("rungs", SAME)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_each_gradient_in_float64(references, kind, rungs):
    "The gradients are those of the model's own parameters: these are shared"
    hf, loss, want = references[kind]
    m = copy.deepcopy(hf).double()
    got, g = grads(m, accelerate(m, rungs)(**batch()))
    assert abs(got - loss) < 1e-12 and max(off(g, want).values()) < 1e-12

@pytest.fixture(scope="module")
def errors():
    "Functions of a kind and a loss: the RMS error of the loss and of each gradient over some batches, against float64"
    found, seeds = {k: made(kind, **more) for k, (kind, more) in KINDS.items()}, range(6)
    want = {k: [grads(e, exact_loss(e, batch(s))) for s in seeds] for k, m in found.items() for e in [exact(m)]}
    def of(kind, loss): # (model) -> batch -> loss
        f, rms = loss(found[kind]), lambda ts: torch.stack([*ts]).square().mean().sqrt().item()
        rows = [(torch.tensor(l - L), off(g, G)) for s, (L, G) in zip(seeds, want[kind]) for l, g in [grads(found[kind], f(batch(s)))]]
        return dict(loss=rms(l for l, _ in rows)) | {k: rms(e[k] for _, e in rows) for k in rows[0][1]}
    return of

def in_autocast(hf):
    def loss(b):
        with torch.autocast("cpu", torch.bfloat16): return hf(**b).loss
    return loss

def ours(rungs):
    def of(hf):
        fast = accelerate(hf, rungs)
        return lambda b: fast(**b)
    return of

@pytest.mark.parametrize("kind", KINDS)
def test_errors_in_bf16_are_at_most_twice_theirs(errors, kind):
    theirs = errors(kind, in_autocast)
    for rungs in BF16:
        mine = errors(kind, ours(rungs))
        assert not {k: (e, theirs[k]) for k, e in mine.items() if e > 2*theirs[k]}, rungs

@pytest.mark.parametrize("rungs", FP8)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-wide-heads", "llama"])
def test_fp8_is_emulated_on_a_cpu(errors, kind, rungs):
    "As far from float64 as two formats of 2 and 3 bits are"
    e = errors(kind, ours(rungs))
    assert e["loss"] < .03 and max(e.values()) < .45 and min(v for k, v in e.items() if "mlp" in k) > .05

@pytest.mark.parametrize("rungs", ["flash,chunked_ce", FP8[0]])
def test_as_the_package_trains_the_same_model(rungs):
    "A `GPT` of these weights has the same loss and gradients, to the last bit in FP8 too"
    hf = made(tie_word_embeddings=True)
    c = GPTConfig(vocab=V, layers=2, width=64, heads=4, kv_heads=2, hidden=96, seq_len=64, rope_theta=500., eps=1e-5)
    run, fast = build(c, rungs.split(","), "cpu"), accelerate(hf, rungs)
    run.model.load_state_dict({k.removeprefix("model."): t for k, t in hf.state_dict().items() if k != "lm_head.weight"})
    run.model.cos, run.model.sin, step = fast.run.model.cos, fast.run.model.sin, GuardedStepper(run) # transformers' angles differ in the last bit
    for _ in range(3): # in FP8 with the scales of the passes before
        with enter_all(run.step_contexts): want = step.forward_backward(*fast.batch(**batch()))
        loss, g = grads(hf, fast(**batch()))
        assert loss == want.item() and all(torch.equal(g[f"model.{k}"], p.grad.double()) for k, p in run.model.named_parameters())
        step.opt.zero_grad()
    hf.zero_grad()
    for _ in range(3): assert torch.equal(step(fast.batch(**batch())), fast.step(batch()))
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), fast.run.model.parameters()))

# --- the loss ---

@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_sum_over_all_micro_batches(kind):
    "With `num_items_in_batch`, an int or a tensor, micro-batches add up as in transformers"
    hf, parts = made(KINDS[kind][0]).double(), [batch(0), batch(1, hide=False), batch(2)]
    n = sum((b["labels"][:, 1:] != -100).sum() for b in parts)
    want, w = grads(hf, sum(hf(**b, num_items_in_batch=n).loss for b in parts))
    fast = accelerate(hf, "chunked_ce")
    got, g = grads(hf, sum(fast(**b, num_items_in_batch=int(n)) for b in parts)) # all forward passes come first
    assert abs(got - want) < 1e-6 and max(off(g, w).values()) < 1e-6 # transformers norms in FP32

def test_passes_may_wait_for_each_other_in_fp8():
    "Scales that the second forward pass changes don't reach the gradients of the first"
    hf, (a, b) = made(), (batch(0), batch(1))
    def gradients(together):
        fast = accelerate(hf, FP8[0])
        for s in range(3): fast(**batch(s + 5)).backward() # scales from the steps before
        hf.zero_grad()
        if together: first, second = fast(**a), fast(**b); first.backward(); second.backward()
        else: fast(**a).backward(); fast(**b).backward()
        return {k: p.grad.clone() for k, p in hf.named_parameters()}
    one, other = gradients(True), gradients(False)
    assert all(torch.equal(one[k], other[k]) for k in one)

@pytest.mark.parametrize("rungs", ["", "chunked_ce"])
def test_no_label_counts(rungs):
    "A micro-batch without any: no loss and no gradient, as transformers' sum"
    hf, b = made(), batch()
    b["labels"] = torch.full_like(b["labels"], -100)
    loss, g = grads(hf, accelerate(hf, rungs)(**b, num_items_in_batch=7))
    assert loss == 0 and not any(t.any() for t in g.values())

def test_pads_on_the_right():
    "They change nothing where their labels don't count; transformers masks them"
    hf, b = made().double(), batch()
    b["attention_mask"] = torch.ones_like(b["input_ids"])
    b["attention_mask"][1, 25:] = 0
    b["labels"][1, 25:] = -100
    want, w = grads(hf, hf(**b).loss)
    got, g = grads(hf, accelerate(hf, "flash")(**b))
    assert abs(got - want) < 1e-6 and max(off(g, w).values()) < 1e-6

def test_without_gradients(references):
    hf, loss, _ = references["qwen3"]
    fast = accelerate(hf, "auto")
    with torch.no_grad(): got = fast(**batch())
    assert not got.requires_grad and abs(got - loss) < 1e-5

def test_a_check_poisons_the_gradients():
    "Of FP8: values that it clips would look like good gradients"
    hf = made()
    fast = accelerate(hf, FP8[0])
    with torch.no_grad(): hf.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    loss, g = grads(hf, fast(**batch()))
    assert loss != loss and all(t.isnan().all() for t in g.values())

# --- steps ---

def plain_steps(hf, steps):
    "Steps of AdamW in a loop of transformers alone. Yields their losses"
    decay, no = ([p for p in hf.parameters() if (p.ndim > 1) == on] for on in (True, False))
    opt = torch.optim.AdamW([dict(params=decay, weight_decay=.1), dict(params=no, weight_decay=0.)], lr=3e-3, betas=(.9, .95))
    for _ in range(steps):
        parts = batch(0), batch(1, rows=5, hide=False)
        n = sum((b["labels"][:, 1:] != -100).sum() for b in parts)
        losses = [hf(**b, num_items_in_batch=n).loss for b in parts]
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.)
        opt.step(); opt.zero_grad()
        yield sum(losses).item()

def our_steps(fast, steps): return [fast.step(batch(0), batch(1, rows=5, hide=False)).item() for _ in range(steps)]

@pytest.mark.parametrize("rungs, eps", [("", 1e-5), ("auto", 1e-5), ("flash,fused_ops,chunked_ce,fused_adamw,direct_update", 1e-5), ("fused_ops,chunked_ce,adamw8bit", .01),
                                        ("fastest", .12 if torch.cuda.is_available() else .02), ("smallest", .02), (FP8[0] + ",adamw8bit", .12)])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_steps(kind, rungs, eps):
    "Micro-batches of different sizes, some labels of which don't count, then weights that transformers has. On a GPU `fastest` has FP8"
    start = made(KINDS[kind][0], **KINDS[kind][1])
    hf, theirs = copy.deepcopy(start), copy.deepcopy(start)
    want, got = [*plain_steps(theirs, 6)], our_steps(accelerate(hf, rungs, lr=3e-3, log_info=pytest.fail), 6)
    assert max(abs(a - b) for a, b in zip(want, got)) < eps and want[0] - want[-1] > 2
    with torch.no_grad(): a, b = hf(batch()["input_ids"]).logits, theirs(batch()["input_ids"]).logits
    assert (a - b).norm() < min(.3, 50*eps)*b.norm() and not torch.equal(hf.model.norm.weight, start.model.norm.weight)

def test_the_norm_of_a_step():
    "Before it is clipped, of the mean over all labels"
    hf, parts = made(), [batch(0), batch(1, rows=5, hide=False)]
    n = sum((b["labels"][:, 1:] != -100).sum() for b in parts)
    _, g = grads(hf, sum(hf(**b, num_items_in_batch=n).loss for b in parts))
    hf.zero_grad()
    fast = accelerate(hf, "auto")
    fast.step(*parts)
    want = torch.stack([t.norm() for t in g.values()]).norm()
    assert abs(fast.stepper.norm - want) < 1e-4*want

def test_a_step_with_a_non_finite_loss_is_not_taken():
    hf = made()
    fast, before = accelerate(hf, "flash"), copy.deepcopy(hf.state_dict())
    with torch.no_grad(): hf.model.norm.weight[0] = torch.nan
    assert fast.step(batch()).isnan() and hf.model.embed_tokens.weight.equal(before["model.embed_tokens.weight"])
    assert all(p.grad is None for p in hf.parameters())

def test_frozen_weights_stay():
    hf = made()
    hf.model.embed_tokens.weight.requires_grad_(False)
    before = copy.deepcopy(hf.state_dict())
    accelerate(hf, "flash,fused_ops,chunked_ce").step(batch())
    changed = {k for k, v in hf.state_dict().items() if not v.equal(before[k])}
    assert "model.embed_tokens.weight" not in changed and len(changed) == len(before) - 1

def test_the_rate_can_change():
    "By whatever changes `param_groups`, such as PyTorch's schedulers"
    hf = made()
    fast = accelerate(hf, "auto", lr=.5)
    torch.optim.lr_scheduler.LambdaLR(fast.optimizer, lambda step: 0.)
    before = copy.deepcopy(hf.state_dict())
    fast.step(batch())
    assert all(v.equal(before[k]) for k, v in hf.state_dict().items())

def test_weights_of_micro_batches():
    pair = lambda n: (None, torch.tensor([1]*n + [-100]*(9 - n)))
    assert label_weights([pair(3)]) == [1] and label_weights([pair(6), pair(2)]) == [1.5, .5] and label_weights([pair(0)]*2) == [0, 0]

@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_opened(kind, tmp_path):
    "transformers opens what it has saved: the logits are those of the trained model, and ours"
    name, more = KINDS[kind]
    hf = made(name, **more)
    fast = accelerate(hf, "flash,fused_ops,chunked_ce")
    our_steps(fast, 2)
    hf.save_pretrained(tmp_path)
    again, x = getattr(transformers, f"{name}ForCausalLM").from_pretrained(tmp_path, dtype=torch.float32).eval(), batch()["input_ids"]
    with torch.no_grad(): a, b, c = again(x).logits, hf.eval()(x).logits, fast.run.model(x)
    assert torch.equal(a, b) and (c - b).abs().max() < 1e-4

# --- transformers' Trainer ---

class Pads:
    "A collator of texts of different lengths, as transformers' own: pads on the right, without labels"
    def __call__(self, rows):
        x = torch.nn.utils.rnn.pad_sequence([torch.tensor(r["input_ids"]) for r in rows], batch_first=True, padding_value=0)
        on = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r["input_ids"]), dtype=torch.long) for r in rows], batch_first=True)
        return dict(input_ids=x, attention_mask=on, labels=x.masked_fill(on == 0, -100))

def texts(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [dict(input_ids=torch.randint(V, (int(torch.randint(6, T, (), generator=g)),), generator=g).tolist()) for _ in range(n)]

def trainer_of(hf, tmp_path, **more):
    pytest.importorskip("accelerate")
    args = dict(max_steps=6, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=3e-3, report_to=[], save_strategy="no", use_cpu=True,
                disable_tqdm=True, logging_steps=1, seed=3)
    kind = transformers.Trainer
    return kind(hf, transformers.TrainingArguments(tmp_path/"out", **args | more), train_dataset=texts(30), eval_dataset=texts(7, 1), data_collator=Pads())

def logged(trainer): return [row["loss"] for row in trainer.state.log_history if "loss" in row]

THEIRS = {} # kind -> losses, gradient norms and evaluation of the Trainer alone: the same for any rungs
def their_run(kind, start, folder): # start: as every test of this kind makes it
    if kind not in THEIRS:
        t = trainer_of(copy.deepcopy(start), folder)
        t.train()
        THEIRS[kind] = logged(t), norms_of(t), t.evaluate()["eval_loss"]
    return THEIRS[kind]

def norms_of(trainer): return [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]

@pytest.fixture(scope="module")
def their_folder(tmp_path_factory): return tmp_path_factory.mktemp("theirs")

@pytest.mark.parametrize("rungs, eps", [("auto", 2e-4), ("flash,fused_ops,tied_embedding,chunked_ce", 2e-4), (FP8[0], .2)])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_run_of_their_trainer(kind, rungs, eps, tmp_path, their_folder, capsys):
    "Its losses, its gradient norms, its evaluation and the weights are those of the Trainer alone; and the folder that it saves opens"
    start, x = made(KINDS[kind][0], **KINDS[kind][1]), batch()["input_ids"]
    a, norms, evaluated = their_run(kind, start, their_folder)
    fast = trainer_of(copy.deepcopy(start), tmp_path)
    assert accelerate(fast.model, rungs).attach(fast) is fast
    fast.train()
    b = logged(fast)
    assert len(a) == 6 and max(abs(p - q) for p, q in zip(a, b)) < eps and a[0] - a[-1] > .3
    assert max(abs(p - q)/p for p, q in zip(norms, norms_of(fast), strict=True)) < eps
    assert abs(evaluated - fast.evaluate()["eval_loss"]) < eps
    fast.save_model(tmp_path/"saved")
    again = type(start).from_pretrained(tmp_path/"saved", dtype=torch.float32).eval()
    with torch.no_grad(): assert torch.equal(again(x).logits, fast.model.eval()(x).logits)
    assert not torch.equal(again(x).logits, start(x).logits)

def test_their_trainer_calls_ours(tmp_path):
    "With the signature of its own method, and never the model's forward pass in training"
    hf = made()
    t = trainer_of(hf, tmp_path)
    fast = accelerate(hf, "auto")
    names = lambda f: list(inspect.signature(f).parameters)
    assert names(fast.compute_loss) == names(t.compute_loss)
    fast.attach(t)
    hf.register_forward_pre_hook(lambda *a: pytest.fail("the model's own forward pass"))
    assert t.train().global_step == 6

@pytest.mark.parametrize("setting", ["label_smoothing_factor", "neftune_noise_alpha"])
def test_settings_of_their_trainer_that_would_have_no_effect(setting, tmp_path):
    hf = made()
    with pytest.raises(InputError, match=setting): accelerate(hf, "auto").attach(trainer_of(hf, tmp_path, **{setting: .1}))

def test_another_model_in_their_trainer(tmp_path):
    "Also one that wraps it, as DDP does"
    hf = made()
    fast = accelerate(hf, "auto")
    with pytest.raises(InputError, match="another model"): fast.attach(trainer_of(copy.deepcopy(hf), tmp_path))
    with pytest.raises(InputError, match="DataParallel.*one device"): fast.compute_loss(torch.nn.DataParallel(hf), batch())

@pytest.mark.parametrize("name", ["loop.py", "with_trainer.py"])
def test_the_page_runs_as_shown(name, tmp_path, monkeypatch):
    if name == "with_trainer.py": pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    made().save_pretrained("my_model")
    write_files((ROOT/"nbs/site/_build/train/transformers.qmd").read_text(encoding="utf-8"), tmp_path)
    code, device = (tmp_path/name).read_text(encoding="utf-8"), "cuda" if torch.cuda.is_available() else "cpu"
    loader = [{k: v.to(device) for k, v in batch(s).items()} for s in range(3)]
    exec(compile(code.replace("max_steps=100", "max_steps=3"), name, "exec"), dict(loader=loader, texts=texts(99), collator=Pads()))
    tuned, before = (transformers.AutoModelForCausalLM.from_pretrained(k, dtype=torch.float32) for k in ("tuned", "my_model"))
    assert not torch.equal(tuned.model.norm.weight, before.model.norm.weight)

# --- what is refused ---

@pytest.mark.parametrize("kind, more, said", [
    ("Qwen3", dict(attention_bias=True), "attention_bias is true"), ("Llama", dict(attention_bias=True), "attention_bias is true"),
    ("Llama", dict(mlp_bias=True), "mlp_bias is true"), ("Qwen3", dict(hidden_act="gelu"), 'hidden_act is "gelu"'),
    ("Qwen3", dict(attention_dropout=.1), "attention_dropout is 0.1"), ("Qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), "use_sliding_window is true"),
    ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=500., factor=2.)), "rope_type is 'dynamic'"),
    ("Qwen2", {}, "Qwen2ForCausalLM"), ("Mistral", {}, "MistralForCausalLM")])
def test_a_model_that_does_not_fit(kind, more, said):
    "The error names the key of the config"
    with pytest.raises(InputError, match=said): accelerate(made(kind, **more))

def test_no_model_of_transformers():
    with pytest.raises(InputError, match="Qwen3ForCausalLM"): accelerate(torch.nn.Linear(2, 2))

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits(dtype):
    with pytest.raises(InputError, match=f"weights are {dtype}.*dtype=torch.float32"): accelerate(made().to(dtype))

def test_weights_on_the_meta_device():
    with pytest.raises(InputError, match="weights are on meta"): accelerate(made().to("meta"))

def test_more_weights_than_the_config_has():
    "As an adapter makes them, and a head that was tied by hand"
    hf = made()
    hf.model.layers[0].self_attn.q_proj.lora = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="q_proj.lora.bias.*adapters"): accelerate(hf)
    hf = made(tie_word_embeddings=False)
    hf.lm_head.weight = hf.model.embed_tokens.weight
    with pytest.raises(InputError, match="lm_head.weight"): accelerate(hf)

@pytest.mark.parametrize("rungs, said", [("bf16,bf16_weights", "'bf16_weights' makes weights of its own"), ("ddp", "one device: leave out ddp"), ("auto,fsdp", "leave out fsdp"),
                                         ("flahs", "flash"), ("flash,flash", "twice"), ("fp8", "builds on")])
def test_rungs_that_do_not_fit(rungs, said):
    with pytest.raises(InputError, match=said): accelerate(made(), rungs)

def test_rungs_that_need_qk_norm():
    "Where they are named; a preset drops one, and a line says so"
    hf, said = made("Llama"), []
    with pytest.raises(InputError, match="'recompute_rope' isn't known to fit the model UntiedLlamaGPT"): accelerate(hf, "fused_ops,recompute_rope")
    from llm_speedrun.train import presets
    with pytest.MonkeyPatch.context() as m:
        m.setitem(presets.PRESETS, "cpu", "flash bf16 bf16_stream")
        fast = accelerate(hf, "auto", log_info=said.append)
    assert fast.run.rungs == ("bf16", "flash") and len(said) == 1 and said[0].startswith("without bf16_stream: ")

def test_a_rung_that_computes_another_function():
    @rung("parts", same_function=False)
    def another(run): return run
    try:
        with pytest.raises(InputError, match="'another' changes what the model computes"): accelerate(made(), "another")
    finally: del RUNGS["another"]

@pytest.mark.parametrize("more, said", [
    (dict(labels=None), "labels"), (dict(input_ids=None), "input_ids"), (dict(position_ids=torch.arange(T)[None]), "a batch with position_ids"),
    (dict(attention_mask=torch.arange(T)[None].repeat(3, 1) > 3), "pads before tokens"), (dict(attention_mask=torch.arange(T)[None].repeat(3, 1) < 30), "pads that count"),
    (dict(input_ids=torch.zeros(1, 65, dtype=torch.long), labels=torch.zeros(1, 65, dtype=torch.long)), "65 tokens is longer")])
def test_a_batch_that_does_not_fit(more, said):
    fast = accelerate(made(), "auto")
    for f in (lambda **b: fast(**b), lambda **b: fast.step(b)):
        with pytest.raises(InputError, match=said): f(**batch() | more)

def test_the_longest_sequence():
    "A given one, without the table of a context of many thousands of tokens"
    hf = made(max_position_embeddings=32768)
    assert accelerate(hf, "").run.model.config.seq_len == 4096 and accelerate(hf, "", seq_len=T).run.model.config.seq_len == T
    with pytest.raises(InputError, match="longer than the model's 16"): accelerate(hf, "", seq_len=16)(**batch())

def test_another_embedding_than_at_first():
    hf = made()
    fast = accelerate(hf, "auto")
    hf.resize_token_embeddings(V + 8)
    with pytest.raises(InputError, match="call accelerate.* again"): fast(**batch())
    hf = made()
    fast = accelerate(hf, "auto")
    hf.set_input_embeddings(torch.nn.Embedding(V, 64))
    with pytest.raises(InputError, match="call accelerate.* again"): fast.step(batch())

def test_fp16_takes_whole_steps():
    hf = made()
    fast = accelerate(hf, "fp16,flash")
    if fast.stepper.scaler.is_enabled():
        with pytest.raises(InputError, match="fp16 scales the loss"): fast(**batch())
    assert fast.step(batch()).isfinite()

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", ["auto", "fastest16", "smallest", "safe"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "llama", "llama3"])
def test_on_a_gpu(kind, rungs):
    "At sizes that the kernels take: some steps, each with a replay of a CUDA graph in the end, next to transformers in autocast"
    name, more = KINDS[kind]
    hf = made(name, **more | dict(vocab_size=1024, hidden_size=256, intermediate_size=512, head_dim=64)).cuda()
    theirs, b = copy.deepcopy(hf), {k: v.cuda() for k, v in batch(rows=8).items()}
    fast, opt = accelerate(hf, rungs, lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(.9, .95), weight_decay=0.)
    most = .2 if "fp8" in fast.run.rungs else .02 # emulated on a CPU these steps differ by at most .12 in FP8 and .004 in bf16
    for _ in range(6):
        with torch.autocast("cuda", torch.bfloat16): loss = theirs(**b).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.)
        opt.step(); opt.zero_grad()
        assert abs(fast.step(b) - loss) < most
    with torch.no_grad(): assert abs(fast(**b) - hf(**b).loss) < most
    fast(**b).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in hf.parameters())
