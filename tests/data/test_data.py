"Bad input to the data pipeline gets an error that names it and says what to do, and nothing is lost."
import bz2, gzip, itertools, json, lzma, os, re, signal, subprocess, sys, threading, tracemalloc
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from tokenizers import Tokenizer
from llm_speedrun.data import corpus, batches as data, text_files
from llm_speedrun.data.corpus import (HUB, Corpus, differences, gpt2_tokenizer, hub_documents, marked_pieces, open_corpus, stdlib_files,
                                 train_tokenizer, write_shards)
from llm_speedrun.data.batches import Batches, bigram_loss, prefetch, val_batches
from llm_speedrun.io_utils import InputError, cache_dir
from llm_speedrun.data.text_files import EOT, read_documents
from llm_speedrun.data.token_files import Shards
from helpers import quick_programs
from helpers.tiny_runs import cache, fails
from helpers.timeouts import TIMEOUT

posix = pytest.mark.skipif(os.name != "posix", reason="signals and pipes")

TEXT = "the quick brown fox jumps over the lazy dog, again and again.\n" * 200

@pytest.fixture
def offline(monkeypatch):
    "The Hub's client behaves as it does without a network, whatever this machine has."
    from huggingface_hub import utils
    def get_session(): raise OSError("Name or service not known")
    monkeypatch.setattr(utils, "get_session", get_session)

def write_bin(path, n=5000, dtype="<u2", high=1000):
    np.random.default_rng(0).integers(0, high, n).astype(dtype).tofile(path)
    return path

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
    monkeypatch.setattr(text_files, "open", no, raising=False)         # chmod does not stop root, who runs many a container
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
    ('[1]', "line 2 is a list, not an object"), ('{"text": 3}', "line 2: 'text' is a int, not text"),
    ('{"text": "\\ud800"}', "line 2 is not Unicode")])
def test_bad_json_line(tmp_path, line, message):
    (tmp_path/"a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    docs = read_documents(tmp_path/"a.jsonl")
    assert next(docs) == "fine"
    with fails(ValueError, f"a.jsonl {message}"): next(docs)

def test_rows_without_the_key(tmp_path):
    "Counted, as nulls are; only a file in which no row has the key is an error"
    (tmp_path/"a.jsonl").write_text('{"text": "fine"}\n{"body": "a"}\n{"text": null}\n{"body": "b"}\n')
    docs = read_documents(tmp_path/"a.jsonl")
    assert list(docs) == ["fine"] and docs.report.lines()[1:] == ["left out rows whose text is null or empty: 1", "left out rows without the key: 2"]
    (tmp_path/"b.jsonl").write_text('{"body": "a"}\n')
    with fails(ValueError, "b.jsonl has no key 'text', only body; name the right one to speedrun_data or speedrun_train with --text_key"): list(read_documents(tmp_path))

def test_text_key(tmp_path):
    (tmp_path/"a.jsonl").write_text('{"body": "a"}\n')
    assert list(read_documents(tmp_path, text_key="body")) == ["a"]

def test_json_is_not_jsonl(tmp_path):
    (tmp_path/"a.json").write_text('{\n"text": "a"\n}')
    with fails(ValueError, "a.json is one JSON document", "jsonl"): list(read_documents(tmp_path/"a.json"))

def test_bad_parquet(tmp_path):
    p = tmp_path/"a.parquet"
    pq.write_table(pa.table(dict(body=["a"], n=[1])), p)
    with fails(ValueError, "a.parquet has no column 'text', only body, n", "text_key"):
        list(read_documents(p))
    with fails(ValueError, "column 'n' holds int64, not text"): list(read_documents(p, text_key="n"))
    p.write_bytes(b"PAR1 but not really")
    with fails(OSError, "cannot read .*a.parquet", "whole"): list(read_documents(p))

@pytest.mark.parametrize("line", ['{"text": ' + "["*100_000, '{"n": ' + "9"*5000 + "}"])
def test_json_that_python_refuses(tmp_path, line):
    "Nested thousands deep, numbers of thousands of digits: an error with the file and the line"
    (tmp_path/"a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with fails(InputError, "a.jsonl line 2 is not JSON"): list(read_documents(tmp_path/"a.jsonl"))

@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ""])
def test_documents_of_one_file(tmp_path, suffix):
    "A literal <|endoftext|> in a .txt ends a document, also in a large one; nowhere else"
    docs = [f"document {i}\nof many.\n" for i in range(100_000)]
    text = "<|endoftext|>\n".join(docs).encode()
    (tmp_path/f"a{suffix}").write_bytes(gzip.compress(text, 1) if suffix.endswith("gz") else text)
    got = list(read_documents(tmp_path/f"a{suffix}"))
    if suffix: assert got == docs
    else: assert "".join(got).encode() == text and not any(type(o) is str for o in got[1:])

def test_bad_byte_in_a_large_file(tmp_path):
    "The place of a bad byte is counted from the start of the file, across blocks and characters that they cut in two"
    text = "\ufeff" + "é"*6_000_000
    (tmp_path/"a.txt").write_bytes(text.encode() + b"\xff")
    with fails(InputError, "0xff at offset 12,000,003"): list(read_documents(tmp_path/"a.txt"))

def test_large_file_in_little_memory(tmp_path):
    "A text file is read in blocks: five times the text takes no more memory"
    line, peaks = "a line of an endless text, with some words in it\n", []
    for n in (60, 300):
        with open(tmp_path/"a.txt", "w") as f:
            for _ in range(n): f.write(line*10_000)
        tracemalloc.start()
        n_read = sum(len(p[0]) for p in marked_pieces(read_documents(tmp_path/"a.txt"), .05))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert n_read == n*10_000*len(line)
    assert peaks[1] < 1.2*peaks[0] < 120e6, peaks

# What isn't a file

@posix
@pytest.mark.parametrize("name", ["data.txt", "data.bin", "c/meta.json", "c/tokenizer.json", "c/train_000.bin"])
def test_a_pipe_does_not_hang(tmp_path, name):
    write_shards([f"{i} {TEXT}" for i in range(40)], train_tokenizer([TEXT], 300), tmp_path/"c")
    (tmp_path/name).unlink(missing_ok=True)
    os.mkfifo(tmp_path/name)
    with fails((InputError, FileNotFoundError), os.path.basename(name)): open_corpus(tmp_path/("c" if name[:2] == "c/" else name))

# The Hub

@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_hub_streams(tmp_path, monkeypatch, kind):
    rows = [dict(text=f"document {i}: {TEXT}") for i in range(50)]
    p = tmp_path/f"a.{kind}"
    if kind == "json": p.write_text("".join(json.dumps(o) + "\n" for o in rows))
    else: pq.write_table(pa.Table.from_pylist(rows), p)
    monkeypatch.setitem(HUB, "fineweb-edu", dict(path=kind, data_files=str(p), split="train"))
    assert list(hub_documents("fineweb-edu")) == [o["text"] for o in rows]
    monkeypatch.setattr(corpus, "gpt2_tokenizer", lambda: train_tokenizer([TEXT], 280))
    c = open_corpus("fineweb-edu", max_tokens=2000)
    assert len(c.train) + len(c.val) == 2000 and c.vocab == 280
    assert open_corpus("fineweb-edu", vocab=270).vocab == 270

def test_hub_offline(offline):
    with fails(ConnectionError, "fineweb-edu needs the network", "offline corpus", "file or folder"):
        open_corpus("fineweb-edu")
    with fails(ConnectionError, "GPT-2's tokenizer needs the network"): gpt2_tokenizer()

NO_NETWORK = """
import socket, sys
def no(*args, **kw): print("ASKED", args); raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = no
from llm_speedrun.data.corpus import open_corpus
print(open_corpus(sys.argv[1]).tokenizer)
"""

def test_opening_tokens_asks_nobody(tmp_path):
    "A bare .bin of GPT-2's tokens takes the tokenizer that the Hub's client has left on this machine, and asks for nothing"
    write_bin(tmp_path/"train.bin", high=50257)
    home = tmp_path/"hf"
    env = os.environ | dict(HF_HOME=str(home), AI_AGENT="x", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"): env.pop(name, None)
    def said(): return quick_programs.run([sys.executable, "-c", NO_NETWORK, str(tmp_path/"train.bin")], env=env, capture_output=True, text=True)
    assert said().stdout == "None\n"
    there = home/"hub/models--gpt2/snapshots/0123"
    there.mkdir(parents=True); (there.parents[1]/"refs").mkdir()
    (there.parents[1]/"refs/main").write_text("0123")
    write_gpt2(there/"tokenizer.json")
    res = said()
    assert res.stdout.startswith("Tokenizer("), res.stdout + res.stderr

def write_gpt2(path):
    "A tokenizer with GPT-2's numbers: 50,257 tokens, the last one ends a text"
    from tokenizers import models
    tok = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(50256)}, EOT: 50256}, unk_token="w0"))
    tok.save(str(path))

def test_unknown_preset():
    with fails(ValueError, "unknown preset 'wikitext'", "fineweb-edu, openwebtext"): hub_documents("wikitext")

# Tokenizers and shards

def test_vocabulary_too_small():
    with fails(ValueError, "vocabulary of 256 is too small", "257"): train_tokenizer([TEXT], 256)

def test_text_without_spaces():
    "DNA, or one letter over and over, takes a tokenizer a moment to learn and not minutes"
    rng = np.random.default_rng(0)
    for text in ("".join(rng.choice(list("acgt"), 400_000)), "a"*400_000, " "*400_000):
        tok = train_tokenizer([text], 400)
        assert tok.decode(tok.encode(text[:5000]).ids) == text[:5000] and len(tok.encode(text[:5000]).ids) < 3000
        assert max(map(len, tok.get_vocab())) <= corpus.LONGEST # it learns from pieces: the time for a whole text grows with its square

@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "not JSON", '{"model": {"type": "BPE"}}', "\udcff"])
def test_garbage_for_a_tokenizer(tmp_path, text):
    write_shards([f"{i} {TEXT}" for i in range(40)], train_tokenizer([TEXT], 300), tmp_path/"c")
    (tmp_path/"c/tokenizer.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with fails(InputError, "tokenizer.json"): open_corpus(tmp_path/"c")

def test_another_tokenizer_beside_the_tokens(tmp_path):
    "Tokens with another vocabulary, or another end of text, than the tokenizer beside them are refused"
    write_shards([f"{i} {TEXT}" for i in range(40)], train_tokenizer([TEXT], 300), tmp_path/"c")
    for other in (train_tokenizer([TEXT*2 + "More, and more."], 310), train_tokenizer([TEXT], 270)):
        other.save(str(tmp_path/"c/tokenizer.json"))
        with fails(InputError, "c: the tokenizer has", "296", "don't belong together"): open_corpus(tmp_path/"c")
    write_bin(tmp_path/"train.bin", high=200)
    other.save(str(tmp_path/"tokenizer.json"))
    c = open_corpus(tmp_path)                               # nobody says otherwise
    assert (c.vocab, c.eot) == (270, 0)
    with fails(InputError, "another tokenizer"): open_corpus(tmp_path, tokenizer=train_tokenizer([TEXT], 280))

@pytest.mark.parametrize("change", [
    dict(dtype="float32"), dict(dtype=3), dict(vocab=0), dict(vocab=70_000), dict(vocab="300"), dict(vocab=2**40), dict(eot="<|endoftext|>"), dict(eot=-1),
    dict(eot=300), dict(train_tokens=None, files=[]), dict(train_tokens="many"), dict(val_tokens=1.5), dict(files=dict(a="b")),
    "[]", "null", "", "{", '"text"', "[" * 100_000])
def test_bad_meta(tmp_path, change):
    "Whatever is wrong in meta.json is told, with its name, when the corpus is opened"
    meta = write_shards([f"{i} {TEXT}" for i in range(40)], train_tokenizer([TEXT], 300), tmp_path/"c")
    (tmp_path/"c/meta.json").write_text(change if isinstance(change, str) else json.dumps(meta | change))
    with fails(InputError, "meta.json"): open_corpus(tmp_path/"c")

def test_shards_that_are_not_whole(tmp_path):
    "A file that is cut off, missing, swapped or not one of them is an error at every start, and so for corpora that list no files"
    tok, docs = train_tokenizer([TEXT], 300), [f"{i} {TEXT}" for i in range(200)]
    for listed in (True, False):
        folder = tmp_path/f"{listed}"
        meta = write_shards(docs, tok, folder, shard_tokens=20_000)
        if not listed: (folder/"meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "files"}))
        path = folder/"train_001.bin"
        whole = path.read_bytes()
        assert len(open_corpus(folder).train) == meta["train_tokens"]
        path.write_bytes(whole[:-200])
        with fails(InputError, "train_001.bin has 19,900 tokens, and 20,000 were written" if listed else "tokens in its train files", "copy"):
            open_corpus(folder)
        path.unlink()
        with fails(InputError, "tokens in its train files, and meta.json says"): open_corpus(folder)
        path.write_bytes(whole)
        (folder/"train_099.bin").write_bytes(whole)
        with fails(InputError, "not one of them"): open_corpus(folder)
        (folder/"train_099.bin").unlink(); open_corpus(folder)
        for p in folder.glob("val*.bin"): p.unlink()
        with fails(InputError, "no val file"): open_corpus(folder)

def test_names_of_shards(tmp_path):
    "A file is validation because it is called so, not because its name has these letters in it"
    for i, name in enumerate(("retrieval_train_000", "retrieval_train_001", "retrieval_val_000", "interval", "trainer_notes")):
        write_bin(tmp_path/f"{name}.bin", 1000*(i + 1))
    c = open_corpus(tmp_path, vocab=1000)
    assert (len(c.train), len(c.val)) == (3000, 3000)

def test_text_folder_with_a_bin(tmp_path):
    "Nobody trains on the zeros of some .bin that lies among texts"
    for i in range(20): (tmp_path/f"{i}.txt").write_text(f"document {i}: {TEXT[:500]}")
    (tmp_path/"model.bin").write_bytes(bytes(10_000))
    with fails(InputError, "has text .0.txt", "model.bin", "move it elsewhere"): open_corpus(tmp_path)
    (tmp_path/"model.bin").unlink()
    (tmp_path/"meta.json").write_text('{"license": "free"}')        # whatever that is, it's no corpus of ours
    assert open_corpus(tmp_path, vocab=300).vocab == 300

@pytest.mark.parametrize("content, what", [
    (TEXT.encode(), "text"), (gzip.compress(TEXT.encode()), "packed by gzip"), (lzma.compress(TEXT.encode()), "packed by xz"),
    (b"\x28\xb5\x2f\xfd" + bytes(range(100)), "packed by zstd"), (b"PAR1" + bytes(100), "Parquet")])
def test_bin_that_holds_no_tokens(tmp_path, content, what):
    (tmp_path/"train.bin").write_bytes(content + b"x"*(len(content) % 2))
    for path in (tmp_path, tmp_path/"train.bin"):
        with fails(InputError, f"train.bin is called .bin, and seems to be {what}"): open_corpus(path)

def test_packed_bin(tmp_path):
    (tmp_path/"train.bin.gz").write_bytes(gzip.compress(bytes(1000)))
    with fails(InputError, "train.bin.gz is called .bin", "packed"): open_corpus(tmp_path/"train.bin.gz")

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
    assert c.train.dtype.itemsize == 4 and c.train[:].max() > 65536
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
    (tmp_path/"train.bin").write_bytes(b"\1" * size)
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
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[1].startswith("read 200 files of ") and re.match(r"200 documents, [\d,]+ bytes of text, \d.\d\d bytes per token", said[2])
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

KILLED = """
import sys
from llm_speedrun.data import corpus
def docs(path, text_key):
    yield "some text"
    print("begun", flush=True)
    sys.stdin.read()
corpus.read_documents = docs
corpus.train_tokenizer = lambda *args, train=corpus.train_tokenizer: train(["some text"], 300)
corpus.open_corpus(sys.argv[1])
"""

@posix
def test_a_killed_process_leaves_nothing_for_ever(tmp_path, cache):
    "What a process that was ended by a signal has left in the cache is gone after the next start; that of one which lives isn't"
    (tmp_path/"a.txt").write_text(TEXT)
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    def start():
        p = quick_programs.Popen([sys.executable, "-c", KILLED, str(tmp_path/"a.txt")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        while p.stdout.readline() != b"begun\n": assert p.poll() is None
        return p
    dead, alive = start(), start()
    dead.send_signal(signal.SIGTERM); dead.wait()
    parts = {p.name for p in cache.glob(".*.part")}
    assert len(parts) == 2
    open_corpus(tmp_path/"a.txt", vocab=300)
    assert len({p.name for p in cache.glob(".*.part")} & parts) == 1
    alive.communicate()
    assert alive.returncode == 0 and not list(cache.glob(".*.part"))

def test_fingerprints(tmp_path):
    "A fingerprint is plain values, the same whenever the same corpus is opened, and tells what has changed, wherever that is"
    tok, docs = train_tokenizer([TEXT], 300), [f"{i} {TEXT}" for i in range(100)]
    def of(name, docs=docs, **kw): write_shards(docs, tok, tmp_path/name, **kw); return open_corpus(tmp_path/name).fingerprint()
    a = of("a")
    assert json.loads(json.dumps(a)) == a and differences(a, of("b", shard_tokens=10_000)) == ""
    changed = of("c", docs[:50] + [docs[50].replace("fox", "dog")] + docs[51:])
    assert "documents" in differences(a, changed) and "vocabulary" not in differences(a, changed)
    write_bin(tmp_path/"train.bin", 100_000, high=50257)
    b = open_corpus(tmp_path/"train.bin").fingerprint()
    tokens = np.fromfile(tmp_path/"train.bin", "<u2")
    tokens[:50_000] = tokens[50_000:]
    tokens.tofile(tmp_path/"train.bin")
    assert differences(b, open_corpus(tmp_path/"train.bin").fingerprint()).startswith("training samples ")
    tokens[:-1000].tofile(tmp_path/"train.bin")
    assert "training tokens 95,000 -> 94,050" in differences(b, open_corpus(tmp_path/"train.bin").fingerprint())

def test_tokenizer_of_a_run_that_goes_on(tmp_path, cache, monkeypatch):
    "With its own tokenizer given, text to which files were added trains none, and isn't tokenized again where nothing changed"
    for i in range(60): (tmp_path/f"{i}.txt").write_text(f"document {i}: {TEXT[:500]}")
    first = open_corpus(tmp_path, vocab=300)
    monkeypatch.setattr(corpus, "train_tokenizer", None)
    assert open_corpus(tmp_path, tokenizer=first.tokenizer, vocab=300).fingerprint() == first.fingerprint() and len(list(cache.iterdir())) == 1
    (tmp_path/"new.txt").write_text("entirely other words, and many more of them")
    again = open_corpus(tmp_path, tokenizer=first.tokenizer, vocab=300)
    assert again.vocab == 300 and again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert f"training tokens {len(first.train):,} -> {len(again.train):,}" in differences(first.fingerprint(), again.fingerprint()) \
        or len(again.val) > len(first.val)

def test_stdlib_is_cached(cache, capsys, monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_files", lambda files=stdlib_files()[:150]: files)
    c = open_corpus(vocab=300)
    assert "Tokenizing stdlib" in capsys.readouterr().out
    assert next(Batches(open_corpus("stdlib", 300).train, 2, 16))[0].equal(next(Batches(c.train, 2, 16))[0])
    assert capsys.readouterr().out == "" and len(list(cache.iterdir())) == 1

def test_no_stdlib_sources(monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_files", lambda: [])
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
    before = {*threading.enumerate()}
    def running(): return [t for t in threading.enumerate() if t.name.startswith("prefetch") and t not in before]
    g = prefetch(Batches(s, 4, 64), "cpu")
    next(g)
    assert running()
    g.close()
    assert not running()

STALLED = """
import os, signal, threading, torch
from llm_speedrun.data.batches import prefetch
def stalls():
    yield torch.zeros(1),
    print("stalled", flush=True)
    threading.Event().wait()
def pressed(*args):
    os.write(1, b"pressed\\n")
    signal.default_int_handler(*args)
signal.signal(signal.SIGINT, pressed)
batches = prefetch(stalls(), "cpu")
for b in batches: pass
"""

@posix
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_source_stalls(times):
    "Ctrl-C, once or twice, ends a program whose source has stalled; nobody waits for the thread"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    p = quick_programs.Popen([sys.executable, "-c", STALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert p.stdout.readline() == b"stalled\n"
    p.send_signal(signal.SIGINT)
    assert p.stdout.readline() == b"pressed\n"
    if times == 2: p.send_signal(signal.SIGINT)
    p.communicate(timeout=TIMEOUT)
    assert p.returncode != 0

def test_prefetch_stops_when_told():
    "`stopped` ends the batches while the source stalls, and `close` waits a second for its thread at most"
    woken, stalling, ended, looks = threading.Event(), threading.Event(), [], itertools.count()
    def stalls(): yield torch.zeros(1),; stalling.set(); ended.append(woken.wait(TIMEOUT))
    assert len(list(prefetch(stalls(), "cpu", stopped=lambda: next(looks) > 4))) == 1
    stalling.clear()
    g = prefetch(stalls(), "cpu")
    next(g); assert stalling.wait(TIMEOUT); g.close()
    assert not ended # neither has waited for the source
    woken.set()

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
def test_prefetch_cuda_side_streams(tmp_path, monkeypatch):
    "The stream that is current when the batch is taken is the one that waits, here for copies that come late"
    load = data._load
    def late(it, device, side):
        with torch.cuda.stream(side): torch.cuda._sleep(10**7)     # cycles: 5 ms
        return load(it, device, side)
    monkeypatch.setattr(data, "_load", late)
    s = Shards(write_bin(tmp_path/"a.bin", 200_000))
    plain, ahead, stream = Batches(s, 8, 256), prefetch(Batches(s, 8, 256), "cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50): assert torch.stack(next(ahead)).cpu().equal(torch.stack(next(plain)))
    ahead.close()

@pytest.mark.cuda
def test_prefetch_cuda_beside_recordings(tmp_path, monkeypatch):
    "PyTorch hands out 32 streams in turn: were a loader's among them, it would sooner or later be a recording's, which swallows copies"
    load, may_load, loaded = data._load, threading.Semaphore(0), threading.Event()
    def late(*args):
        may_load.acquire(timeout=TIMEOUT)
        try: return load(*args)
        finally: loaded.set()
    monkeypatch.setattr(data, "_load", late)
    s, w = Shards(write_bin(tmp_path/"a.bin", 200_000)), torch.ones(8, device="cuda")
    for _ in range(33):
        plain, ahead = Batches(s, 8, 256), prefetch(Batches(s, 8, 256), "cuda")
        may_load.release()
        got = [torch.stack(next(ahead))]
        loaded.clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            w.mul_(1)
            may_load.release(); assert loaded.wait(TIMEOUT) # the second one is loaded here
        may_load.release()
        got.append(torch.stack(next(ahead)))
        ahead.close()
        for g in got: assert g.cpu().equal(torch.stack(next(plain)))

# The yardstick

def test_bigram_of_a_mixture(tmp_path):
    "Two corpora by weight against the dense table of both, where the smaller one is read more than once"
    rng, V = np.random.default_rng(0), 20
    def walk(step, n): return (np.cumsum(rng.integers(1, step, n)) % V).astype("<u2")
    sources = []
    for name, step, n, w in (("a", 3, 30_000, 3), ("b", 9, 2000, 1)):
        walk(step, n).tofile(tmp_path/f"{name}.bin")
        s = Shards(tmp_path/f"{name}.bin", vocab=V)
        sources.append((Corpus(name, s, s, V), w))
    batches = val_batches(Shards(tmp_path/"b.bin", vocab=V), 4, 64, 5)
    counts, n2 = np.ones(V), np.zeros((V, V))
    for (c, w), times in zip(sources, (1., 5.)):            # 30,000 of a go with 10,000 of b, which has 2,000
        t = c.train[:].astype(int)
        counts += times*np.bincount(t, minlength=V); np.add.at(n2, (t[:-1], t[1:]), times)
    p2 = (n2 + 50*counts/counts.sum()) / (n2.sum(1, keepdims=True) + 50)
    expected = np.mean([-np.log(p2[x, y]).mean() for x, y in batches])
    assert abs(bigram_loss(sources, batches) - expected) < 1e-9
    assert bigram_loss(sources[0][0], batches) > expected + .3 > bigram_loss(sources[1][0], batches)

def test_too_little_text_names_the_users_file(tmp_path):
    "Not the one in the cache that was made of it"
    (tmp_path/"short.txt").write_text("one two three")
    c = open_corpus(tmp_path/"short.txt")
    with fails(ValueError, "^[^:]*short.txt: .* fewer than one batch"): Batches(c.train, 8, 128)
    with fails(ValueError, "^[^:]*short.txt: .* fewer than one window"): val_batches(c.val, 8, 128, 1)

def test_a_cache_that_cannot_be_used(tmp_path, monkeypatch):
    "Looking at tokens does without one; what is kept there names the variable"
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(write_bin(tmp_path/"a.bin")/"cache"))
    Shards(tmp_path/"a.bin", vocab=1000).check()
    with fails(ValueError, "outside the vocabulary"): Shards(tmp_path/"a.bin", vocab=9).check()
    with fails(OSError, "a.bin.cache can't be made", "set LLM_SPEEDRUN_CACHE"): cache_dir()
