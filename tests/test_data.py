"Bad input to the data pipeline gets an error that names it and says what to do, and nothing is lost."
import bz2, gzip, json, lzma, threading
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from tokenizers import Tokenizer
from llm_speedrun import data
from llm_speedrun.data import *

TEXT = "the quick brown fox jumps over the lazy dog, again and again.\n" * 200

@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    "Each test has an empty cache of its own, and finds no GPT-2 tokenizer of this machine."
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(path))
    monkeypatch.setattr(data, "_cached_gpt2", lambda: None)
    return path

@pytest.fixture
def offline(monkeypatch):
    "The Hub's client behaves as it does without a network, whatever this machine has."
    from huggingface_hub import utils
    def get_session(): raise OSError("Name or service not known")
    monkeypatch.setattr(utils, "get_session", get_session)

def write_bin(path, n=5000, dtype="<u2", high=1000):
    np.random.default_rng(0).integers(0, high, n).astype(dtype).tofile(path)
    return path

def fails(kind, *parts):
    "The next block must raise `kind` with every part in its message"
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{p})" for p in parts))

# Documents

def test_missing_path(tmp_path):
    with fails(FileNotFoundError, "nope.txt", "no such file or folder", "check the path"):
        read_documents(tmp_path/"nope.txt")

def test_empty_file(tmp_path):
    (tmp_path/"a.txt").touch()
    with fails(ValueError, "a.txt has no text", "with text"): list(read_documents(tmp_path/"a.txt"))

def test_empty_folder(tmp_path):
    (tmp_path/".hidden").write_text("not read")
    with fails(ValueError, "has no text"): list(read_documents(tmp_path))

def test_unreadable_file(tmp_path, monkeypatch):
    p = tmp_path/"a.txt"
    p.write_text("secret")
    def no(*args, **kw): raise PermissionError(13, "Permission denied", str(p))
    monkeypatch.setattr(data.fsspec, "open", no)         # chmod does not stop root, who runs many a container
    with fails(OSError, "cannot read", "a.txt", "Permission denied", "check its permissions"):
        list(read_documents(p))

@pytest.mark.parametrize("suffix,pack", [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)])
def test_compressed(tmp_path, suffix, pack):
    p = tmp_path/f"a.txt.{suffix}"
    p.write_bytes(pack(TEXT.encode()))
    assert list(read_documents(p)) == [TEXT]
    p.write_bytes(pack(TEXT.encode())[:-20])
    with fails(OSError, f"cannot read .*a.txt.{suffix}", "whole"): list(read_documents(p))
    p.write_bytes(b"not compressed at all")
    with fails(OSError, f"cannot read .*a.txt.{suffix}"): list(read_documents(p))

def test_not_utf8(tmp_path):
    (tmp_path/"a.txt").write_bytes(b"abc\xff")
    with fails(ValueError, "a.txt is not UTF-8", "0xff at offset 3", "iconv"): list(read_documents(tmp_path))
    with fails(ValueError, "a.txt is not UTF-8"): open_corpus(tmp_path)

def test_byte_order_mark(tmp_path):
    (tmp_path/"a.txt").write_bytes("\ufeffabc".encode())
    assert list(read_documents(tmp_path)) == ["abc"]

@pytest.mark.parametrize("line,message", [
    ('{"text": "a"', "line 2 is not JSON"),
    ('{"body": "a"}', "line 2 has no key 'text', only body; name the right one to speedrun_data with --text_key"),
    ('[1]', "line 2 is a list, not an object"), ('{"text": 3}', "line 2: 'text' is a int, not text"),
    ('{"text": "\\ud800"}', "line 2 is not Unicode")])
def test_bad_json_line(tmp_path, line, message):
    (tmp_path/"a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    docs = read_documents(tmp_path/"a.jsonl")
    assert next(docs) == "fine"
    with fails(ValueError, f"a.jsonl {message}"): next(docs)

def test_text_key(tmp_path):
    (tmp_path/"a.jsonl").write_text('{"body": "a"}\n')
    assert list(read_documents(tmp_path, text_key="body")) == ["a"]

def test_json_is_not_jsonl(tmp_path):
    (tmp_path/"a.json").write_text('{"text": "a"}')
    with fails(ValueError, "a.json is one JSON document", "jsonl"): read_documents(tmp_path/"a.json")

def test_bad_parquet(tmp_path):
    p = tmp_path/"a.parquet"
    pq.write_table(pa.table(dict(body=["a"], n=[1])), p)
    with fails(ValueError, "a.parquet has no column 'text', only body, n", "text_key"):
        list(read_documents(p))
    with fails(ValueError, "column 'n' holds int64, not text"): list(read_documents(p, text_key="n"))
    p.write_bytes(b"PAR1 but not really")
    with fails(OSError, "cannot read .*a.parquet", "whole"): list(read_documents(p))

# The Hub

@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_hub_streams(tmp_path, monkeypatch, kind):
    rows = [dict(text=f"document {i}: {TEXT}") for i in range(50)]
    p = tmp_path/f"a.{kind}"
    if kind == "json": p.write_text("".join(json.dumps(o) + "\n" for o in rows))
    else: pq.write_table(pa.Table.from_pylist(rows), p)
    monkeypatch.setitem(HUB, "fineweb-edu", dict(path=kind, data_files=str(p), split="train"))
    assert list(hub_documents("fineweb-edu")) == [o["text"] for o in rows]
    monkeypatch.setattr(data, "gpt2_tokenizer", lambda: train_tokenizer([TEXT], 280))
    c = open_corpus("fineweb-edu", max_tokens=2000)
    assert len(c.train) + len(c.val) == 2000 and c.vocab == 280
    assert open_corpus("fineweb-edu", vocab=270).vocab == 270

def test_hub_offline(offline):
    with fails(ConnectionError, "fineweb-edu needs the network", "offline corpus", "file or folder"):
        open_corpus("fineweb-edu")
    with fails(ConnectionError, "GPT-2's tokenizer needs the network"): gpt2_tokenizer()

def test_unknown_preset():
    with fails(ValueError, "unknown preset 'wikitext'", "fineweb-edu, openwebtext"): hub_documents("wikitext")

# Tokenizers and shards

def test_vocabulary_too_small():
    with fails(ValueError, "vocabulary of 256 is too small", "257"): train_tokenizer([TEXT], 256)

def test_any_text_survives():
    tok = train_tokenizer([TEXT], 300)
    rng = np.random.default_rng(0)
    points = [p for p in rng.integers(0, 0x110000, 3000).tolist() if not 0xd800 <= p < 0xe000]
    texts = ["".join(map(chr, points)), "".join(map(chr, range(2000))), EOT * 3, " \n\t\r\x0b\x00 "]
    for s in texts:
        assert tok.decode(tok.encode(s).ids) == s

def test_end_of_text_in_a_document_is_text(tmp_path):
    tok = train_tokenizer([TEXT], 300)
    write_shards([f"a <|endoftext|> b {i}" for i in range(400)], tok, tmp_path/"c")
    c = open_corpus(tmp_path/"c")
    assert sum((s[:] == c.eot).sum() for s in (c.train, c.val)) == 400
    assert "a <|endoftext|> b" in c.tokenizer.decode(c.train[:100].tolist())
    assert 0 not in c.tokenizer.encode("<|endoftext|>").ids          # the saved tokenizer too, once opened

def test_wide_vocabulary(tmp_path):
    tok = train_tokenizer([TEXT], 300)
    tok.add_tokens([f"<{i}>" for i in range(70_000)])
    docs = [f"{i} <65000> <69000> {TEXT}" for i in range(100)]
    assert write_shards(docs, tok, tmp_path/"c")["dtype"] == "uint32"
    c = open_corpus(tmp_path/"c")
    assert c.train.arrays[0].dtype.itemsize == 4 and c.train[:].max() > 65536
    next(Batches(c.train, 4, 32))

def test_tokenizer_without_end_of_text(tmp_path):
    from tokenizers import models
    with fails(ValueError, "no <.endoftext.> token"):
        write_shards([TEXT], Tokenizer(models.BPE()), tmp_path/"c")

def test_a_failed_write_leaves_nothing(tmp_path):
    def docs():
        yield TEXT
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_shards(docs(), train_tokenizer([TEXT], 300), tmp_path/"c")
    assert not list(tmp_path.iterdir())

def test_nothing_is_overwritten(tmp_path):
    tok = train_tokenizer([TEXT], 300)
    (tmp_path/"c").mkdir()
    with fails(FileExistsError, "c exists already and is left as it is", "name another"):
        write_shards([TEXT], tok, tmp_path/"c")

def test_two_writers_race(tmp_path):
    "The second to finish must neither spoil the first's folder nor leave its own behind"
    tok = train_tokenizer([TEXT], 300)
    def docs():
        yield TEXT
        write_shards([TEXT], tok, tmp_path/"c")
    with pytest.raises(FileExistsError): write_shards(docs(), tok, tmp_path/"c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"] and len(open_corpus(tmp_path/"c").train)

def test_equal_documents_stay_together(tmp_path):
    tok = train_tokenizer([TEXT], 300)
    docs = [f"document {i % 300} {TEXT[:200]}" for i in range(900)]
    assert write_shards(docs, tok, tmp_path/"c")["split"] == "document"
    c = open_corpus(tmp_path/"c")
    def split(s): return tok.decode(s[:].tolist(), skip_special_tokens=False).split("<|endoftext|>")[1:]
    a, b = split(c.train), split(c.val)
    assert sorted(a + b) == sorted(docs) and not set(a) & set(b)

@pytest.mark.parametrize("size,message", [
    (0, "is empty"), (10_001, "has 10001 bytes, no multiple of a uint16 token's 2")])
def test_bad_bin_size(tmp_path, size, message):
    (tmp_path/"train.bin").write_bytes(b"\0" * size)
    for path in (tmp_path, tmp_path/"train.bin"):
        with fails(ValueError, f"train.bin {message}", "again"): open_corpus(path)

def test_missing_bin(tmp_path):
    with fails(FileNotFoundError, "gone.bin"): Shards(tmp_path/"gone.bin")
    with fails(ValueError, "at least one .bin"): Shards([])
    write_bin(tmp_path/"train.bin")
    with fails(FileNotFoundError, "trian.bin", "Did you mean .*train.bin"): open_corpus(tmp_path/"trian.bin")

def test_token_outside_the_vocabulary(tmp_path):
    a = np.ones(5000, "<u2")
    a[:2000].tofile(tmp_path/"train_000.bin")
    a[3456] = 700
    a[2000:].tofile(tmp_path/"train_001.bin")
    write_bin(tmp_path/"val.bin", high=500)
    c = open_corpus(tmp_path, vocab=700)
    bs = Batches(c.train, 4, 64)
    with fails(ValueError, "train_001.bin: token 700 at position 1456", "vocabulary of 700", "tokenize"):
        for _ in range(2*bs.per_epoch): next(bs)
    with fails(ValueError, "val.bin: token"): val_batches(Shards(tmp_path/"val.bin", vocab=400), 4, 64, 100)

def test_bad_token_never_leaves_prefetch(tmp_path):
    s = Shards(write_bin(tmp_path/"a.bin", high=1000), vocab=10)
    with fails(ValueError, "a.bin: token"): next(prefetch(Batches(s, 4, 64), "cpu"))

def test_corpus_shorter_than_a_batch(tmp_path):
    s = Shards(write_bin(tmp_path/"a.bin", 1000))
    with fails(ValueError, "a.bin: 1,000 tokens are fewer than one batch of 8 x 128", "1,025", "smaller"):
        Batches(s, 8, 128)
    with fails(ValueError, "1,000 validation tokens are fewer than one window of 1024", "smaller seq"):
        val_batches(s, 8, 1024, 4)
    assert len(val_batches(s, 8, 512, 4)) == 1

# Corpora

@pytest.mark.parametrize("name,near", [
    ("fineweb", "fineweb-edu"), ("openwebtxt", "openwebtext"), ("stdlb", "stdlib")])
def test_unknown_corpus(name, near):
    with fails(FileNotFoundError, f"'{name}' is neither a corpus", f"Did you mean {near}"): open_corpus(name)

def test_folder_of_text(tmp_path, capsys, cache):
    for i in range(200): (tmp_path/f"{i}.txt").write_text(f"document {i}: {TEXT[:500]}")
    c = open_corpus(tmp_path, vocab=300)
    assert capsys.readouterr().out.count("\n") == 1
    assert c.vocab == 300 and c.tokenizer.decode(c.train[:200].tolist()).startswith("document")
    open_corpus(tmp_path, vocab=300)
    assert capsys.readouterr().out == "" and len(list(cache.iterdir())) == 1     # from the cache, silently
    (tmp_path/"0.txt").write_text("changed")
    open_corpus(tmp_path, vocab=300)
    assert len(list(cache.iterdir())) == 2
    assert len(open_corpus(tmp_path, vocab=300, max_tokens=1000).train) < 1000

def test_one_document(tmp_path):
    (tmp_path/"a.txt").write_text(TEXT)
    c = open_corpus(tmp_path/"a.txt", vocab=280)
    assert json.loads((c.train.paths[0].parent/"meta.json").read_text())["split"] == "tail"
    assert c.tokenizer.decode(np.concatenate([c.train[:], c.val[:]]).tolist()) == TEXT

def test_long_document_is_whole(tmp_path):
    text = "".join(f"line {i} of a long document\n" for i in range(40_000))      # several pieces to encode
    tok = train_tokenizer([text], 300)
    write_shards([text], tok, tmp_path/"c", shard_tokens=50_000)
    c = open_corpus(tmp_path/"c")
    ids = np.concatenate([c.train[:], c.val[:]]).tolist()
    assert len(c.train.paths) > 1 and ids.count(c.eot) == 1 and tok.decode(ids) == text

def test_nanogpt_bin(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50256, 10_000).astype("<u2")
    ids[9_520] = 50256
    ids.tofile(tmp_path/"train.bin")
    c = open_corpus(tmp_path/"train.bin")
    assert (c.name, c.vocab, c.eot, c.tokenizer) == (tmp_path.name, 50257, 50256, None)
    assert (len(c.train), len(c.val)) == (9520, 480)      # cut where a document starts
    assert len(open_corpus(tmp_path, max_tokens=1000).train) == 1000
    write_bin(tmp_path/"val.bin", 300)
    assert [len(open_corpus(p).val) for p in (tmp_path, tmp_path/"train.bin")] == [300, 300]
    assert open_corpus(tmp_path, vocab=50304).vocab == 50304

def test_stdlib_is_cached(cache, capsys, monkeypatch):
    monkeypatch.setattr(data, "stdlib_files", lambda files=stdlib_files()[:150]: files)
    c = open_corpus(vocab=300)
    assert "Tokenizing stdlib" in capsys.readouterr().out
    assert next(Batches(open_corpus("stdlib", 300).train, 2, 16))[0].equal(next(Batches(c.train, 2, 16))[0])
    assert capsys.readouterr().out == "" and len(list(cache.iterdir())) == 1

def test_no_stdlib_sources(monkeypatch):
    monkeypatch.setattr(data, "stdlib_files", lambda: [])
    with fails(FileNotFoundError, "no standard library sources", "give a file or folder"): open_corpus()

# Batches

@pytest.mark.parametrize("start", [1, 18, 19, 20, 57])      # 19 batches make an epoch
def test_resume(tmp_path, start):
    s = Shards(write_bin(tmp_path/"a.bin"))
    a, b = Batches(s, 4, 64, seed=3), Batches(s, 4, 64, seed=3, start=start)
    assert a.per_epoch == 19
    for _ in range(start): next(a)
    for _ in range(45): assert all(p.equal(q) for p,q in zip(next(a), next(b)))
    assert not Batches(s, 4, 64, seed=4)[0][0].equal(Batches(s, 4, 64, seed=3)[0][0])

def test_epoch_is_without_replacement(tmp_path):
    np.arange(5000, dtype="<u2").tofile(tmp_path/"a.bin")      # every token says where it is
    bs = Batches(Shards(tmp_path/"a.bin"), 4, 64)
    seen = torch.cat([next(bs)[0].flatten() for _ in range(bs.per_epoch)])
    assert len(seen.unique()) == len(seen) == bs.per_epoch*4*64
    for x,y in (next(bs) for _ in range(100)): assert y.equal(x + 1)

def test_windows_across_files(tmp_path):
    a = np.arange(5000, dtype="<u2")
    cuts = [0, 7, 8, 300, 301, 302, 4000, 5000]
    paths = [tmp_path/f"{i}.bin" for i in range(len(cuts) - 1)]
    for p,lo,hi in zip(paths, cuts, cuts[1:]): a[lo:hi].tofile(p)
    a.tofile(tmp_path/"whole.bin")
    s, whole = Shards(paths), Shards(tmp_path/"whole.bin")
    for i in range(40): assert all(p.equal(q) for p,q in zip(Batches(s, 4, 64)[i], Batches(whole, 4, 64)[i]))

def test_prefetch_ends_its_thread(tmp_path):
    s = Shards(write_bin(tmp_path/"a.bin"))
    def running(): return [t for t in threading.enumerate() if t.name.startswith("prefetch")]
    g = prefetch(Batches(s, 4, 64), "cpu")
    next(g)
    assert running()
    g.close()
    assert not running()

@pytest.mark.cuda
def test_prefetch_cuda(tmp_path):
    "Batches stay right while the main stream is far behind, and however soon Python lets go of them"
    s = Shards(write_bin(tmp_path/"a.bin", 200_000))
    w = torch.randn(2048, 2048, device="cuda")
    got, plain, ahead = [], Batches(s, 8, 256), prefetch(Batches(s, 8, 256), "cuda")
    for _ in range(200):
        for _ in range(4): w = (w @ w).clamp(-1, 1)         # work queued before the batch is read
        x, y = next(ahead)
        assert x.is_cuda and y.is_cuda
        got.append(torch.stack([x, y]) + 0)
        del x, y
    ahead.close()
    for g in got: assert g.cpu().equal(torch.stack(next(plain)))

@pytest.mark.cuda
def test_prefetch_cuda_side_streams(tmp_path):
    "The stream that is current when the batch is taken is the one that waits"
    s = Shards(write_bin(tmp_path/"a.bin", 200_000))
    plain, ahead, stream = Batches(s, 8, 256), prefetch(Batches(s, 8, 256), "cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50): assert torch.stack(next(ahead)).cpu().equal(torch.stack(next(plain)))
    ahead.close()
