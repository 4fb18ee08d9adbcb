"""Token files of many kinds are read as they are, or refused with a reason: widths, headers, indexes, vocabularies, cut off, damaged,
moved. `python tests/data/test_token_files.py` prints the table."""
import os, pickle, struct
from pathlib import Path
import numpy as np, pytest
import llm_speedrun.data.token_files as module
from llm_speedrun.data import corpus as corpus_module
from llm_speedrun.data.corpus import open_corpus, train_tokenizer, write_shards
from llm_speedrun.data.batches import Batches, prefetch
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.data.token_files import Shards, TokenWriter
from helpers.tiny_runs import cache

TEXT = "the quick brown fox jumps over the lazy dog, again and again.\n" * 100
N = 3000
GPT2 = np.random.default_rng(0).integers(0, 50257, N)
CHARS = GPT2 % 65
LLAMA = np.random.default_rng(0).integers(0, 128_256, N)

def header(n=N, magic=20240520, version=1, order="<"):
    return np.array([magic, version, n] + [0]*253, f"{order}i4").tobytes()

def index(lengths, code):
    "The index that Megatron-LM writes"
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1) + np.array(lengths, "<i4").tobytes()

def litdata(*items):
    "A chunk as litdata's writer has it: how many items, where each begins and the last ends, the items"
    sizes = np.cumsum([0, *(o.nbytes for o in items)]).astype("<u4") + 4*(len(items) + 2)
    return np.uint32(len(items)).tobytes() + sizes.tobytes() + b"".join(o.tobytes() for o in items)
def npy(a, **kw):
    from io import BytesIO
    np.save(f := BytesIO(), a, **kw)
    return f.getvalue()

def meta_pkl(itos, **more): return pickle.dumps(dict(vocab_size=len(itos), itos=itos, stoi={c: i for i, c in itos.items()}) | more)

class Evil:
    def __init__(self, *of): self.of = of
    def __reduce__(self): return self.of

CHARACTERS = dict(enumerate(map(chr, range(32, 97))))
THREE = GPT2.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
ALPHABET = meta_pkl(CHARACTERS)

# What is in the folder -> how many tokens of which vocabulary (and, where asked, the tokens), or why it is refused
CASES = {
    # widths
    "uint16, as nanoGPT writes it": ({"train.bin": GPT2.astype("<u2")}, (50257, GPT2)),
    "int32": ({"train.bin": GPT2.astype("<i4")}, (50257, GPT2)),
    "int64, numpy's default": ({"train.bin": GPT2.astype("<i8")}, (50257, GPT2)),
    "int64 of characters": ({"train.bin": CHARS.astype("<i8"), "meta.pkl": ALPHABET}, (65, CHARS)),
    "int32 of characters": ({"train.bin": CHARS.astype("<i4"), "meta.pkl": ALPHABET}, (65, CHARS)),
    "uint16 of 260 tokens, few above 255": ({"train.bin": np.where(GPT2 % 300 == 7, 259, GPT2 % 250).astype("<u2"), "meta.json": b'{"vocab": 260}'},
                                            (260, np.where(GPT2 % 300 == 7, 259, GPT2 % 250))),
    "uint32 with a vocabulary of 128,256": ({"train.bin": LLAMA.astype("<u4"), "meta.json": b'{"vocab": 128256}'}, (128256, LLAMA)),
    "bytes, named in meta.json": ({"train.bin": (CHARS + 1).astype("u1"), "meta.json": b'{"vocab": 66, "dtype": "uint8"}'}, (66, CHARS + 1)),
    "bytes, not named": ({"train.bin": CHARS.astype("u1"), "meta.pkl": ALPHABET}, "outside the vocabulary of 65.*another integer type"),
    "three bytes a token": ({"train.bin": THREE}, "seems to have three bytes a token"),
    "big-endian uint16 of characters": ({"train.bin": CHARS.astype(">u2"), "meta.pkl": ALPHABET}, "seems to be big-endian"),
    "big-endian int32": ({"train.bin": GPT2.astype(">i4")}, "seems to be big-endian"),
    "float32": ({"train.bin": GPT2.astype("<f4")}, "seems to be big-endian, or of floating-point numbers"),
    "float64": ({"train.bin": GPT2.astype("<f8")}, "seems to be big-endian, or of floating-point numbers"),
    "int32 with -100 for what isn't trained on": ({"train.bin": np.where(GPT2 % 7 == 0, -100, GPT2).astype("<i4"), "meta.json": b'{"dtype": "int32"}'},
                                                  "has negative numbers or none of a tokenizer, such as 4,294,967,196"),
    "train of int32, a val of a few tokens": ({"train.bin": GPT2.astype("<i4"), "val.bin": GPT2[:100].astype("<i4")}, (50257, GPT2)),
    "two shards of other widths": ({"train_000.bin": GPT2.astype("<u2"), "train_001.bin": GPT2.astype("<i4")}, "not all of the tokens have one width"),
    "meta.json against the header": ({"train.bin": header() + GPT2.astype("<u2").tobytes(), "meta.json": b'{"dtype": "int32"}'},
                                     "has a header of tokens of 2 bytes, and they are said to be int32"),
    "int64, and meta.json says uint16": ({"train.bin": GPT2.astype("<i8"), "meta.json": b'{"dtype": "uint16", "vocab": 50257}'}, "meta.json says dtype uint16.*wider type"),
    "Llama's uint32, and meta.json says uint16": ({"train.bin": LLAMA.astype("<u4"), "meta.json": b'{"dtype": "uint16", "vocab": 65536}'}, "meta.json says dtype uint16.*wider type"),
    "int64 of characters, and meta.json says int32": ({"train.bin": CHARS.astype("<i8"), "meta.json": b'{"dtype": "int32", "vocab": 65}'}, "meta.json says dtype int32.*wider type"),
    "uint16 of characters, and meta.json says uint8": ({"train.bin": CHARS.astype("<u2"), "meta.json": b'{"dtype": "uint8", "vocab": 65}'}, "meta.json says dtype uint8.*wider type"),
    "uint16, and meta.json says int32": ({"train.bin": GPT2.astype("<u2"), "meta.json": b'{"dtype": "int32", "vocab": 50257}'}, "outside the vocabulary of 50257.*another integer type"),
    # headers
    "llm.c, GPT-2": ({"train.bin": header() + GPT2.astype("<u2").tobytes()}, (50257, GPT2)),
    "llm.c, Llama 3 (version 7)": ({"train.bin": header(magic=20240801, version=7) + LLAMA.astype("<u4").tobytes(), "meta.json": b'{"vocab": 128256}'},
                                   (128256, LLAMA)),
    "modded-nanogpt's names": ({f"fineweb_{o}_00000{i}.bin": header(N) + GPT2.astype("<u2").tobytes() for o, i in (("train", 1), ("train", 2), ("val", 0))},
                               (50257, np.tile(GPT2, 2))),
    "fewer tokens than the header says": ({"train.bin": header() + GPT2[:-1].astype("<u2").tobytes()}, "header says 3,000 tokens of 2 bytes, and 5,998 bytes follow"),
    "more tokens than the header says": ({"train.bin": header(N - 9) + GPT2.astype("<u2").tobytes()}, "header says 2,991 tokens of 2 bytes, and 6,000 bytes follow"),
    "uint32 cut off to half, as long as uint16": ({"train.bin": header(magic=20240801, version=7) + LLAMA.astype("<u4").tobytes()[:2*N]}, "header says 3,000 tokens of 4"),
    "a header alone": ({"train.bin": header()}, "and 0 bytes follow it"),
    "a header of an unknown version": ({"train.bin": header(version=3) + GPT2.astype("<u2").tobytes()}, "number 20240520, version 3, which isn't one of tokens"),
    "a big-endian header": ({"train.bin": header(order=">") + GPT2.astype(">u2").tobytes()}, "is big-endian"),
    "llm.c's HellaSwag questions": ({"train.bin": header(10, 20240522) + GPT2.astype("<u2").tobytes()}, "number 20240522, version 1"),
    "llm.c's weights": ({"train.bin": header(1024, 20240326, 3) + bytes(5000)}, "number 20240326, version 3"),
    # numpy
    "np.save of uint16": ({"shard_train_000001.npy": npy(GPT2.astype("<u2"))}, (50257, GPT2)),
    "np.save of int64, called .bin": ({"train.bin": npy(GPT2)}, (50257, GPT2)),
    "np.save, cut off": ({"train.npy": npy(GPT2)[:-8]}, "header says 3,000 tokens, and 23,992 bytes follow"),
    "np.save of rows": ({"train.npy": npy(GPT2.reshape(30, 100))}, "array of int64 of the shape .30, 100., and tokens are integers in one row"),
    "np.save of float16": ({"train.npy": npy(CHARS.astype("f2"))}, "array of float16"),
    "np.save of objects": ({"train.npy": npy(np.array([Evil(print, ("ran",))]*20, object), allow_pickle=True)}, "array of object"),
    # Megatron-LM
    "Megatron-LM, int32": ({"a.bin": CHARS.astype("<i4"), "a.idx": index([1000, 2000], 4), "meta.json": b'{"vocab": 65}'}, (65, CHARS)),
    "Megatron-LM, uint16": ({"a.bin": GPT2.astype("<u2"), "a.idx": index([N], 8)}, (50257, GPT2)),
    "Megatron-LM, .bin cut off": ({"a.bin": GPT2[:-5].astype("<u2"), "a.idx": index([N], 8)}, "a.idx says 3,000 tokens of 2 bytes, and a.bin has 5,990 bytes"),
    "Megatron-LM, .idx cut off": ({"a.bin": GPT2.astype("<u2"), "a.idx": index([N]*9, 8)[:-20]}, "a.idx is cut off"),
    "Megatron-LM, floats": ({"a.bin": GPT2.astype("<f4"), "a.idx": index([N], 7)}, "tokens that aren't integers"),
    # formats that we don't read
    "litdata, as litgpt writes it": ({"chunk-0-0.bin": litdata(*np.split(LLAMA.astype("<i4"), 10)), "index.json": b'{"chunks": [{"chunk_size": 10}], "config": {}}'},
                                     "has chunks of litdata, as litgpt writes them, which we don't read"),
    "litdata without its index": ({"chunk-0-0.bin": litdata(*np.split(GPT2.astype("<u2"), 10)), "meta.json": b'{"vocab": 250000}'}, "chunk-0-0.bin is a chunk of litdata"),
    "TinyLlama's packed files": ({"train_0000.bin": b"LITPKDS" + struct.pack("<QBQ", 1, 8, N) + GPT2.astype("<u2").tobytes()}, "is a PackedDataset file of lit-gpt"),
    "a header that nobody knows": ({"train.bin": np.array([0x5eed1234, 3, N, 7], "<u4").tobytes() + LLAMA[LLAMA < 9000].repeat(30).astype("<u4").tobytes()},
                                   "seems to have a header that we don't know: its first bytes aren't of 4-byte tokens"),
    "a header of small numbers": ({"train.bin": np.array([20240, 1, N], "<u2").tobytes() + (GPT2 % 5000).astype("<u2").tobytes()}, "begins with the number 20,240, and no other is above 4,999"),
    "a token of the beginning, above all others": ({"train.bin": np.r_[256, CHARS].astype("<u2")}, "doesn't say what its vocabulary is.*--vocab, at least 257"),
    "raw .npy without a split": ({"tokens_0.npy": npy(GPT2.astype("<u2")), "tokens_1.npy": npy(GPT2.astype("<u2"))}, (50257, np.tile(GPT2, 2))),
    "raw .npy, and text": ({"tokens_0.npy": npy(GPT2.astype("<u2")), "a.txt": b"text"}, "has text .a.txt, .... and tokens_0.npy: if that holds tokens, name it"),
    "np.save of no token": ({"train.npy": npy(GPT2[:0].astype("<u2"))}, "train.npy has no tokens in it"),
    # sizes
    "an odd number of bytes": ({"train.bin": GPT2.astype("<u2").tobytes()[:-1]}, "has 5999 bytes, no multiple of a uint16 token's 2"),
    "int32 without its last two bytes": ({"train.bin": GPT2.astype("<i4").tobytes()[:-2]}, "no multiple of a uint32 token's 4.*truncated"),
    "nothing but zeros": ({"train.bin": bytes(6000)}, "nothing but zeros"),
    "empty": ({"train.bin": b""}, "is empty: 0 bytes"),
    # vocabularies
    "nanoGPT's characters": ({"train.bin": CHARS.astype("<u2"), "val.bin": CHARS[:900].astype("<u2"), "meta.pkl": ALPHABET}, (65, CHARS)),
    "characters without meta.pkl": ({"train.bin": CHARS.astype("<u2")}, "doesn't say what its vocabulary is, and it is hardly GPT-2's.*--vocab, at least 65"),
    "Llama's tokens, without a word": ({"train.bin": LLAMA.astype("<u4")}, "doesn't say what its vocabulary is"),
    "tokens above those of meta.pkl": ({"train.bin": (CHARS + 9).astype("<u2"), "meta.pkl": ALPHABET}, "outside the vocabulary of 65"),
    "meta.pkl of syllables": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": meta_pkl({i: f"s{i}" for i in range(65)})}, (65, CHARS)),
    "meta.pkl of protocol 0": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": pickle.dumps(dict(itos=CHARACTERS), 0)}, (65, CHARS)),
    "meta.pkl that runs a command": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": pickle.dumps(Evil(os.system, ("touch was_run",)))}, "no file of data may run code"),
    "meta.pkl that opens a file": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": meta_pkl(CHARACTERS, x=Evil(open, ("was_run", "w")))}, "io.open, and no file of data may run code"),
    "meta.pkl with numpy's integers": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": meta_pkl(CHARACTERS, vocab_size=np.int64(65))}, "no file of data may run code"),
    "meta.pkl that asks for gigabytes": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": b"\x80\x04Nr\xff\xff\xff\xff."}, "meta.pkl: Expected `object`"),
    "meta.pkl, cut off": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": ALPHABET[:-30]}, "isn't nanoGPT's meta.pkl"),
    "meta.pkl of text": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": b"vocab_size = 65"}, "isn't nanoGPT's meta.pkl.*--vocab"),
    "meta.pkl with a token too high": ({"train.bin": CHARS.astype("<u2"), "meta.pkl": meta_pkl(CHARACTERS, vocab_size=60)}, "names tokens outside its vocabulary of 60"),
}

def written(folder, files):
    "The folder, with the files of a case in it"
    for name, content in files.items(): (folder/name).write_bytes(content if isinstance(content, bytes) else content.tobytes())
    return next(folder.glob("a.bin"), folder)

def opened(folder, files):
    "The corpus, looked at as training does, and all its training and held-out tokens"
    c = open_corpus(written(folder, files))
    c.train.check(); c.val.check()
    return c, c.train[:] if any("val" in o for o in files) else np.concatenate([c.train[:], c.val[:]])

@pytest.mark.parametrize("name", CASES)
def test_case(tmp_path, monkeypatch, name):
    files, expected = CASES[name]
    monkeypatch.chdir(tmp_path)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=f"(?s){expected}"): opened(tmp_path, files)
    else:
        c, tokens = opened(tmp_path, files)
        assert c.vocab == expected[0] and np.array_equal(tokens, expected[1])
    assert not Path("was_run").exists()

def test_the_last_resort(tmp_path):
    "What can't be told can be said: by meta.json, and the vocabulary by an option"
    CHARS.astype("<u2").tofile(tmp_path/"train.bin")
    assert open_corpus(tmp_path, vocab=65).vocab == 65
    CHARS[:90].astype("<i4").tofile(tmp_path/"train.bin")
    (tmp_path/"meta.json").write_text('{"dtype": "int32", "vocab": 65}')
    assert open_corpus(tmp_path).train[:5].tolist() == CHARS[:5].tolist()

@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_width_is_told_and_makes_no_difference(tmp_path, dtype):
    "The type that was found is shown, and the fingerprint is of the tokens: that of uint16 is what it always was"
    GPT2.astype(dtype).tofile(tmp_path/"train.bin")
    c = open_corpus(tmp_path)
    assert c.train.in_words() == f"{len(c.train):,} {c.train.dtype.name} tokens from train.bin" and f"{c.train.in_words()}, a vocabulary of 50257" in repr(c)
    assert c.fingerprint()["training samples"] == "15ff5544c5ef1f06" and c.train.dtype.itemsize == int(dtype[-1])

def test_characters_are_text(tmp_path):
    "meta.pkl gives a tokenizer that goes with a run; one that can't be made leaves the vocabulary alone"
    written(tmp_path, CASES["nanoGPT's characters"][0])
    tok = open_corpus(tmp_path).tokenizer
    assert tok.decode(CHARS[:50].tolist()) == "".join(CHARACTERS[int(i)] for i in CHARS[:50]) and tok.encode("HELLO").ids == [40, 37, 44, 44, 47]
    with pytest.raises(Exception, match="UNK"): tok.encode("é")
    (tmp_path/"meta.pkl").write_bytes(meta_pkl({i: f"s{i}" for i in range(65)}))
    c = open_corpus(tmp_path)
    assert (c.vocab, c.tokenizer, c.eot) == (65, None, None)

# Damage

def corpus(folder, **kw):
    return write_shards([f"{i} {TEXT}" for i in range(60)], train_tokenizer([TEXT], 300), folder, **kw)

def flip(path, at=100):
    "Flip a bit of a file, and keep its size and its time"
    s, b = path.stat(), bytearray(path.read_bytes())
    b[at] ^= 1
    path.write_bytes(b); os.utime(path, ns=(s.st_atime_ns, s.st_mtime_ns))

@pytest.mark.parametrize("always", [2**27, 0], ids=["small", "large"])
def test_flipped_bits(tmp_path, monkeypatch, always):
    "One bit, also where the file keeps its time, also after the tokens were looked at once"
    monkeypatch.setattr(module, "_ALWAYS", always)
    meta = corpus(tmp_path/"c", shard_tokens=4000)
    assert meta["sha256"].keys() == meta["files"].keys() and len(meta["files"]) > 2
    for _ in range(2): c = open_corpus(tmp_path/"c"); c.train.check(); c.val.check()
    flip(tmp_path/"c/train_001.bin")
    with pytest.raises(InputError, match="train_001.bin doesn't match the sum in meta.json"): open_corpus(tmp_path/"c").train.check()
    open_corpus(tmp_path/"c").val.check()
    flip(tmp_path/"c/train_001.bin"); open_corpus(tmp_path/"c").train.check()

def test_large_files_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ALWAYS", 0)
    corpus(tmp_path/"c")
    open_corpus(tmp_path/"c").train.check()
    monkeypatch.setattr(Shards, "check_file", None)
    open_corpus(tmp_path/"c").train.check()

@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "meta", "tokenizer"])
def test_a_damaged_cache_is_made_again(tmp_path, capsys, cache, damage):
    (tmp_path/"a.txt").write_text(TEXT*3)
    first = open_corpus(tmp_path/"a.txt", vocab=300)
    path, tokens, mark = first.train.paths[0], first.train[:], first.fingerprint()
    if damage == "flip": flip(path)
    elif damage == "cut": os.truncate(path, 100)
    elif damage == "gone": path.unlink()
    else: (path.parent/f"{damage}.json").write_text("{")
    capsys.readouterr()
    again = open_corpus(tmp_path/"a.txt", vocab=300)
    assert np.array_equal(again.train[:], tokens) and again.fingerprint() == mark
    assert "is damaged, and is made again" in capsys.readouterr().out and len([*cache.iterdir()]) == 1
    if damage == "flip":
        flip(path); assert np.array_equal(open_corpus(tmp_path/"a.txt", tokenizer=first.tokenizer, vocab=300).train[:], tokens)

def test_a_file_that_gets_shorter_in_use(tmp_path):
    "Not SIGBUS: the batches before are right, and the one that isn't there is an error with the file's name"
    GPT2.astype("<u2").tofile(tmp_path/"train.bin")
    s = Shards(tmp_path/"train.bin")
    batches, whole = Batches(s, 4, 64), s[:]
    ahead = prefetch(batches, "cpu")
    x, y = next(ahead)
    os.truncate(tmp_path/"train.bin", 100)
    with pytest.raises(RunError, match="train.bin was cut off while it was in use: it had 3,000 tokens.*bring the whole file back"):
        for _ in range(30): next(ahead)
    assert np.array_equal(s[:50], whole[:50])

def test_more_files_than_can_be_open(tmp_path):
    "A corpus of many files keeps some open; one that is opened again must be the one it was"
    paths = [tmp_path/f"train_{i:03}.bin" for i in range(200)]
    for i, p in enumerate(paths): np.full(7, i, "<u2").tofile(p)
    s = Shards(paths, "uint16")
    for _ in range(2): assert np.array_equal(s[:], np.repeat(np.arange(200), 7))
    np.full(7, 9, "<u2").tofile(tmp_path/"new"); os.replace(tmp_path/"new", paths[3])
    with pytest.raises(RunError, match="train_003.bin was replaced"): s[:]

def test_without_pread(tmp_path, monkeypatch):
    "As on Windows"
    monkeypatch.delattr(os, "pread", raising=False)
    GPT2.astype("<u2").tofile(tmp_path/"train.bin")
    assert np.array_equal(Shards(tmp_path/"train.bin")[10:2000], GPT2[10:2000])

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_full_disk(tmp_path, monkeypatch, cache):
    "The error has the path, and for the cache the variable that names another; nothing is left behind"
    (tmp_path/"a.txt").write_text(TEXT)
    def path(self, shard):
        p = self.folder/f"{self.split}_{shard:03d}.bin"
        if not p.is_symlink(): p.symlink_to("/dev/full")
        return p
    monkeypatch.setattr(TokenWriter, "path", path)
    with pytest.raises(OSError, match="(?s)val_000.bin|train_000.bin") as e: corpus(tmp_path/"c")
    assert e.value.filename.endswith("_000.bin")
    with pytest.raises(OSError, match=r"(?s)_000.bin: no space left on device.*set LLM_SPEEDRUN_CACHE"): open_corpus(tmp_path/"a.txt")
    assert not (tmp_path/"c").exists() and not [*cache.iterdir()]

def table():
    "Print the cases: input, tokens or reason"
    import tempfile
    print("| input | tokens, or the reason |\n|---|---|")
    for name, (files, _) in CASES.items():
        with tempfile.TemporaryDirectory() as d:
            try: c, tokens = opened(Path(d), files); said = f"{len(tokens):,} of {c.vocab:,}: {', '.join(map(str, tokens[:3]))}, ..."
            except InputError as e: said = str(e).replace(f"{d}{os.sep}", "").replace("|", "/")
        print(f"| {name} | {said} |")

if __name__ == "__main__": corpus_module._cached_gpt2 = lambda: None; table()
