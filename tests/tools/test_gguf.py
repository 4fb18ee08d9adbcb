"""An exported folder in llama.cpp, whose converter needs its repository: here the `gguf` wheel writes what that writes, and where there is
`llama_cpp`, that opens it. Names of weights, of settings and of GPT-2's pre-tokenizer are those of the wheel."""
import json
import numpy as np, pytest, torch
from safetensors.torch import load_file
from llm_speedrun.tools.export import export_folder
from llm_speedrun.pretrained import from_pretrained
from llm_speedrun.generate import generate
from helpers.tiny_runs import NANO, nano, trained_on_text

gguf = pytest.importorskip("gguf")
TEXTS = ["Text 7: 7 times 3 is", "naïve 漢字 🙂", "it's 1,234,567.89 — isn't it?\n\n\t  two  spaces \r\n", "12 times", " a , b ."]

@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "A model that was trained on text with a tokenizer of its own"
    folder = tmp_path_factory.mktemp("gguf")
    trained_on_text(folder)
    return export_folder(folder/"runs"/"run", folder/"hf")

def settings_of(writer, c):
    "Give a writer what llama.cpp reads of such a `config.json`"
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])

def words_of(writer, tok, vocab, about):
    "Give a writer the tokenizer, with GPT-2's pre-tokenizer, which is the one of ours; rows of the model beyond it have no token"
    assert tok["pre_tokenizer"]["type"] == "ByteLevel" and tok["pre_tokenizer"]["use_regex"] and not tok["pre_tokenizer"]["add_prefix_space"]
    by_id = {i: t for t, i in tok["model"]["vocab"].items()}
    special = {t["id"]: t["content"] for t in tok["added_tokens"] if t["special"]}
    kind = lambda i: gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([(by_id | special).get(i, f"[PAD{i}]") for i in range(vocab)])
    writer.add_token_types([kind(i) for i in range(vocab)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]])
    ids = {t: i for i, t in special.items()}
    writer.add_bos_token_id(ids[about["bos_token"]])
    writer.add_eos_token_id(ids[about["eos_token"]])
    writer.add_pad_token_id(ids[about["pad_token"]])
    writer.add_add_bos_token(False)

@pytest.fixture(scope="module")
def written(exported):
    "The folder as one GGUF file in FP32"
    read = lambda name: json.loads((exported/name).read_text(encoding="utf-8"))
    c, path = read("config.json"), exported.parent/"model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    settings_of(writer, c)
    words_of(writer, read("tokenizer.json"), c["vocab_size"], read("tokenizer_config.json"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c["num_hidden_layers"])
    for k, t in load_file(exported/"model.safetensors").items():
        name = names.get_name(k, try_suffixes=(".weight",))
        assert name, f"llama.cpp's Qwen3 has no {k}"
        writer.add_tensor(name, t.float().numpy())
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    return path

def test_all_weights_have_names_there(exported, written):
    "And come back as they were; nothing that Qwen3 needs is missing, as its head is the embedding"
    found = {t.name: t.data for t in gguf.GGUFReader(written).tensors}
    ours = load_file(exported/"model.safetensors")
    assert len(found) == len(ours) and np.array_equal(found["token_embd.weight"], ours["model.embed_tokens.weight"].numpy())
    layers = json.loads((exported/"config.json").read_text())["num_hidden_layers"]
    need = {gguf.TENSOR_NAMES[k].format(bid=i) + ".weight" for k in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3] for i in range(layers)}
    assert need - found.keys() == {"output.weight", "rope_freqs.weight"}

def test_the_same_greedy_text(exported, written):
    "Tokens of any text, and the text that follows"
    llama_cpp = pytest.importorskip("llama_cpp")
    from tokenizers import Tokenizer
    tok, llm = Tokenizer.from_file(str(exported/"tokenizer.json")), llama_cpp.Llama(str(written), n_ctx=NANO.seq_len, verbose=False)
    for text in TEXTS: assert llm.tokenize(text.encode(), add_bos=False) == tok.encode(text).ids, text
    run, ids = from_pretrained(exported, torch.device("cpu")), tok.encode(TEXTS[0]).ids
    want = generate(run, ids, n := NANO.seq_len - len(ids) - 1, top_k=1)[len(ids):]
    got = [t for t, _ in zip(llm.generate(ids, top_k=1, temp=0.), range(n))]
    assert got == want[:len(got)] and len(got) == n
