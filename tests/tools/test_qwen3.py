"The model is Qwen3: transformers' implementation computes the same from our weights, and opens the trainer's file."
import pytest, torch
from safetensors.torch import load_file
from llm_speedrun.model import GPT
from llm_speedrun.train.trainer import train
from helpers.tiny_runs import NANO, nano, options

def qwen3_config(c):
    "transformers' config of the same model as the `GPTConfig` c, in the spelling of the installed version"
    import transformers
    theta = dict(rope_theta=c.rope_theta)
    if int(transformers.__version__.split(".")[0]) >= 5: theta = dict(rope_parameters=dict(rope_type="default", **theta))
    return transformers.Qwen3Config(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.hidden, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, max_position_embeddings=c.seq_len,
        rms_norm_eps=c.eps, tie_word_embeddings=True, attention_bias=False, use_sliding_window=False, **theta)

def qwen3(c, tensors):
    "transformers' Qwen3 with `tensors` by name; only the head, which is tied, may be missing"
    from transformers import Qwen3ForCausalLM
    model = Qwen3ForCausalLM._from_config(qwen3_config(c), attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model

@pytest.fixture(scope="module")
def both():
    "Our model and Qwen3 with the same weights, and a batch; the norms' weights are random, so that they matter"
    ours, g = GPT(NANO), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in ours.parameters():
            if p.ndim == 1: p.uniform_(.5, 1.5, generator=g)
            else: p.normal_(std=.2, generator=g)
    x, y = torch.randint(NANO.vocab, (2, 3, NANO.seq_len), generator=g)
    return ours, qwen3(NANO, {f"model.{k}": v.clone() for k, v in ours.state_dict().items()}), x, y

def test_config_is_not_the_default():
    "The rotary base, the head dimension and the KV heads reach transformers' model, whose defaults are others"
    c = qwen3_config(NANO)
    theta = c.rope_parameters["rope_theta"] if hasattr(c, "rope_parameters") else c.rope_theta
    assert (theta, c.head_dim, c.num_key_value_heads) == (500., 8, 2)

def test_logits(both):
    "The logits agree to 1e-4, and are large enough for that to say something"
    ours, theirs, x, _ = both
    with torch.no_grad(): a, b = ours(x), theirs(x).logits
    assert a.std() > .5 and (a - b).abs().max() < 1e-4

def test_loss_and_gradients(both):
    "The loss that transformers computes from shifted labels is ours, and so is every gradient"
    ours, theirs, x, _ = both
    loss, theirs_loss = ours(x[:, :-1], x[:, 1:]), theirs(x, labels=x).loss
    assert abs(loss - theirs_loss) < 1e-5
    loss.backward(); theirs_loss.backward()
    grads = {k: p.grad for k, p in theirs.named_parameters()}
    for k, p in ours.named_parameters():
        b = grads[f"model.{k}"]
        assert b.norm() > 1e-4 and (p.grad - b).norm() < 1e-4 * b.norm(), k

def test_trained_weights_open_in_transformers(tmp_path):
    "`from_pretrained` opens the weights that a run leaves: nothing unexpected, nothing missing, the same logits"
    from transformers import Qwen3ForCausalLM
    trainer, res = train(options(tmp_path, steps=3), progress=False)
    saved, config = tmp_path/"runs/run/model.safetensors", trainer.config
    qwen3(config, load_file(saved))
    (tmp_path/"hf").mkdir()
    (tmp_path/"hf/model.safetensors").write_bytes(saved.read_bytes())
    qwen3_config(config).save_pretrained(tmp_path/"hf")
    theirs, info = Qwen3ForCausalLM.from_pretrained(tmp_path/"hf", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    x = trainer.data.val[0].cpu()
    with torch.no_grad(): a, b = trainer.run.model.cpu()(x), theirs(x).logits
    assert (a - b).abs().max() < 1e-4
