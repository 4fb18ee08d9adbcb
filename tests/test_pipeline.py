"Tokenizing that is killed goes on to the same bytes; streams, mixtures and shares neither skip nor repeat; workers' deaths are told."
import itertools, json, os, random, re, signal, subprocess, sys, time
from fractions import Fraction
from functools import partial
from pathlib import Path
import numpy as np, pytest, torch
from llm_speedrun import data
from llm_speedrun.files import InputError
from tokenizers import Tokenizer
from llm_speedrun.train import corpora as pipeline
from llm_speedrun.train.options import speedrun_data
from llm_speedrun.data import Batches, open_corpus, read_documents, stdlib_files, train_tokenizer, write_shards
from llm_speedrun.train.corpora import *
from llm_speedrun.train.words import Encoder

posix = pytest.mark.skipif(os.name != "posix", reason="kills processes by signals")

def stdlib(n, every=1): # texts: the standard library's files, up to `n` characters
    sizes, texts = 0, []
    for p in stdlib_files()[::every]:
        texts.append(p.read_text("utf-8")); sizes += len(texts[-1])
        if sizes > n: break
    return texts

@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    "A folder of JSON lines, 1.5 MB in two files"
    folder = tmp_path_factory.mktemp("texts")
    docs = stdlib(1_500_000, 7)
    for name, part in (("a", docs[::2]), ("b", docs[1::2])):
        (folder/f"{name}.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in part))
    return folder

@pytest.fixture(scope="module")
def tok(texts): return train_tokenizer(itertools.islice(read_documents(texts), 60), 512)

@pytest.fixture(scope="module")
def expected(texts, tok, tmp_path_factory):
    "What `write_shards` makes of the texts, and a file with the tokenizer"
    folder = tmp_path_factory.mktemp("expected")
    write_shards(read_documents(texts), tok, folder/"c", shard_tokens=10**8)
    return folder/"c"

def assert_same(a, b):
    names = [sorted(p.name for p in f.glob("*.bin")) for f in (a, b)]
    assert names[0] == names[1] and names[0]
    for n in names[0]: assert (a/n).read_bytes() == (b/n).read_bytes(), n
    meta = [json.loads((f/"meta.json").read_text()) | dict(date="", source="") for f in (a, b)]
    assert meta[0] == meta[1]

# speedrun_data

SLOW = """
import sys, time
from llm_speedrun.train import corpora as pipeline
from llm_speedrun.train.options import speedrun_data
pipeline.parcels.__defaults__ = (100_000,)             # many small parcels
monotonic = time.monotonic
pipeline.time.monotonic = lambda: 100*monotonic()       # the journal is written a hundred times as often
speedrun_data(["--data", sys.argv[1], "--out", sys.argv[2], "--tokenizer", sys.argv[3], "--workers", "2"])
"""

def start(texts, out, expected):
    return subprocess.Popen([sys.executable, "-c", SLOW, str(texts), str(out), str(expected)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)

def pieces_done(out):
    try: return json.loads((out.with_name(f".{out.name}.unfinished")/"journal.json").read_text())["pieces"]
    except (OSError, ValueError): return 0

def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end: time.sleep(.005)

@posix
def test_killed_and_started_again(texts, expected, tmp_path):
    """Kill -9 for the command, then for one of its processes, which it names without a traceback. The same command goes on,
    and the result is bitwise that of `write_shards`"""
    out = tmp_path/"out"
    p = start(texts, out, expected)
    wait_for(lambda: pieces_done(out) > 0, p)
    time.sleep(random.random()*.05)                     # anywhere between two journals
    p.kill(); p.communicate()
    assert p.returncode == -9 and not out.exists()
    at = pieces_done(out)
    p = start(texts, out, expected)
    wait_for(lambda: pieces_done(out) > at, p)
    child = children(p.pid)[0]
    os.kill(child, signal.SIGKILL)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 2 and f"error: tokenizing process {child} was killed by signal 9" in err, err
    assert "Traceback" not in err and pieces_done(out) > at > 0
    p = start(texts, out, expected)
    said = p.communicate(timeout=60)
    assert p.returncode == 0, said
    assert_same(out, expected)
    assert [o.name for o in tmp_path.iterdir()] == ["out"]

def children(pid):
    "The processes that a process has started: from Linux's /proc, elsewhere from `ps`"
    if (proc := Path(f"/proc/{pid}/task")).exists():
        return [int(o) for f in proc.glob("*/children") for o in f.read_text().split()]
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
    return [int(a) for a, b in map(str.split, rows) if int(b) == pid]

def test_corrupt_document(texts, tok, expected, tmp_path, monkeypatch):
    "A document that can't be read names its file; once mended, the same call goes on. Other changes are refused"
    folder = tmp_path/"texts"
    folder.mkdir()
    lines = [(texts/f"{n}.jsonl").read_text().splitlines(True) for n in "ab"]
    (folder/"a.jsonl").write_text("".join(lines[0]))
    (folder/"b.jsonl").write_text("".join(lines[1][:5] + ['{"text": 3}\n']))
    call = lambda **kw: tokenize_corpus(read_documents(folder), tok, tmp_path/"out", workers=1, **kw)
    monkeypatch.setattr(pipeline.parcels, "__defaults__", (100_000,))
    with pytest.raises(ValueError, match=r"b.jsonl line 6: 'text' is a int"): call()
    assert pieces_done(tmp_path/"out") > 0
    (folder/"b.jsonl").write_text("".join(lines[1]))
    (folder/"a.jsonl").write_text("".join(lines[0][1:]))
    with pytest.raises(ValueError, match="documents have changed"): call()
    (folder/"a.jsonl").write_text("".join(lines[0]))
    with pytest.raises(ValueError, match="begun with another val_frac"):
        call(val_frac=.1)
    call()
    assert_same(tmp_path/"out", expected)

@pytest.mark.parametrize("moment", ["copytree", "rename", "rmtree"])
def test_killed_at_the_end(tok, tmp_path, monkeypatch, moment):
    "Killed in any of the last acts, there is the whole result or none, and the same call makes it"
    class Killed(BaseException): pass
    def die(*args, **kw): raise Killed
    docs, calls = ["a single document. " * 3000], lambda: tokenize_corpus(docs, tok, tmp_path/"out", workers=1)
    with monkeypatch.context() as m:
        if moment == "rename":
            rename = Path.rename
            m.setattr(Path, "rename", lambda self, to: die() if to == tmp_path/"out" else rename(self, to))
        else: m.setattr(pipeline.shutil, moment, lambda *a, **k: None if k.get("ignore_errors") else die())
        with pytest.raises(Killed): calls()
    if moment != "rmtree": assert not (tmp_path/"out").exists(); calls()
    write_shards(docs, tok, tmp_path/"expected")
    assert_same(tmp_path/"out", tmp_path/"expected")

def test_full_disk(texts, tok, expected, tmp_path, monkeypatch):
    "A disk that fills up is an OSError; with room again, the same call goes on"
    call, n = lambda: tokenize_corpus(read_documents(texts), tok, tmp_path/"out", workers=1), [0]
    monkeypatch.setattr(pipeline.parcels, "__defaults__", (100_000,))
    write = pipeline.TokenWriter.write
    def full(self, ids):
        n[0] += 1
        if n[0] > 4: raise OSError(28, "No space left on device")
        write(self, ids)
    with monkeypatch.context() as m:
        m.setattr(pipeline.TokenWriter, "write", full)
        with pytest.raises(OSError, match="No space left"): call()
    call()
    assert_same(tmp_path/"out", expected)

def test_added_tokens_and_wide_vocabulary(tmp_path):
    "A tokenizer that isn't of GPT-2's kind, with 32-bit tokens, gives the same as `write_shards` too"
    tok = train_tokenizer(["some text"], 300)
    tok.add_tokens([f"<{i}>" for i in range(70_000)])
    docs = [f"{i} <65000> <69000> some text" for i in range(300)]
    write_shards(docs, tok, tmp_path/"a")
    tokenize_corpus(docs, tok, tmp_path/"b", workers=2)
    assert_same(tmp_path/"b", tmp_path/"a")

def test_at_least_as_fast_as_encode_batch(tok, tmp_path):
    "From text to files, at least the speed of `tokenizers`' own `encode_batch` on all cores, interleaved"
    docs, ours, theirs = stdlib(1_500_000), [], []
    for i in range(2):
        t0 = time.perf_counter(); tok.encode_batch(docs, add_special_tokens=False)
        t1 = time.perf_counter(); tokenize_corpus(docs, tok, tmp_path/f"{i}")
        theirs.append(t1 - t0); ours.append(time.perf_counter() - t1)
    print(f"encode_batch {min(theirs):.2f} s, tokenize_corpus {min(ours):.2f} s")
    assert min(ours) < min(theirs)

MEMORY = """
import resource, sys
from llm_speedrun.data import train_tokenizer
from llm_speedrun.train import corpora as pipeline
pipeline.parcels.__defaults__ = (100_000,)
rng, words = __import__("numpy").random.default_rng(0), [f"w{i}" for i in range(5000)]
pool = [" ".join(rng.choice(words, 4000)) for _ in range(20)]
docs = (f"{i} {pool[i % 20]}" for i in range(int(sys.argv[2])))
pipeline.tokenize_corpus(docs, train_tokenizer(pool[:1], 300), sys.argv[1], workers=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""

@posix
def test_memory_is_flat(tmp_path):
    "Five times the text takes no more memory, neither here nor in the processes that encode"
    peaks = []
    for n in (40, 200):
        res = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path/str(n)), str(n)], capture_output=True, text=True)
        assert res.returncode == 0, res.stderr
        peaks.append([int(o) for o in res.stdout.split()])
    for small, large in zip(*peaks): assert large < 1.1*small, peaks

# Shares, mixtures

def test_world_size_may_change(expected):
    "One GPU, then four, then two: the global batches are those of one GPU all along"
    c = open_corpus(expected)
    for make in (lambda: Batches(c.train, 8, 32, seed=3),
                 lambda: MixedBatches([(c.train, Fraction(2)), (c.val, Fraction(1))], 8, 32, seed=3)):
        one, i = make(), 0
        for world in (1, 4, 2):
            ranks = [RankBatches(make(), r, world) for r in range(world)]
            for r in ranks: r.i = i
            for _ in range(20):
                x, y = (torch.cat(parts) for parts in zip(*map(next, ranks)))
                assert x.equal(one[i][0]) and y.equal(one[i][1])
                i += 1

def test_corrupt_shard_is_named(expected, tmp_path):
    "A bad token in one corpus of a mixture names its file"
    c = open_corpus(expected)
    bad = np.full(5000, 60_000, "<u2"); bad.tofile(tmp_path/"bad.bin")
    mix = MixedBatches([(c.train, Fraction(1)), (type(c.train)(tmp_path/"bad.bin", vocab=c.vocab), Fraction(1))], 4, 32)
    with pytest.raises(ValueError, match="bad.bin: token 60000 at position"): mix[0]

# Streams

def make_stream(texts, tok, **kw):
    return StreamBatches(partial(read_documents, texts), tok, **dict(batch=2, seq=64, buffer=5, seed=1) | kw)

def test_stream_resumes_with_other_workers(texts, tok):
    "From a position after an odd number of batches, two processes that encode give what none gives, and the same positions"
    here, there = make_stream(texts, tok, workers=0), make_stream(texts, tok, workers=2)
    for i in range(23): next(here)
    there.load_state_dict(json.loads(json.dumps(here.state_dict())))
    for i in range(23, 60): assert next(there)[0].equal(next(here)[0])
    assert there.state_dict() == here.state_dict() and there.i == 60
    there.close()

@posix
def test_stream_encodes_in_another_process(texts, tok):
    "As the trainer makes it, a stream has a process that encodes; it is gone when the stream is closed"
    before = set(children(os.getpid()))
    s = StreamBatches(partial(read_documents, texts), tok, 2, 64)
    next(s)
    new = set(children(os.getpid())) - before
    assert len(new) == 1
    s.close()
    assert not set(children(os.getpid())) & new

@posix
def test_dead_stream_worker(texts, tok):
    "A process that is killed is an error that says what died"
    before = set(children(os.getpid()))
    s = make_stream(texts, tok)
    next(s)
    os.kill(*set(children(os.getpid())) - before, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="was killed by signal 9.*it made the tokens of the stream"):
        for _ in range(100_000): next(s)

def test_stream_of_other_documents(texts, tok, tmp_path):
    "A document that was passed and has changed since, or has another before it, is an error; one that comes later isn't seen"
    lines = [(texts/f"{n}.jsonl").read_text().splitlines(True) for n in "ab"]
    def source(*files):
        for name, f in zip("ab", files): (tmp_path/f"{name}.jsonl").write_text("".join(f))
        return make_stream(tmp_path, tok, workers=0, buffer=2)
    s = source(*lines)
    while s.state_dict()["docs"] < 3: next(s)
    at = json.loads(json.dumps(s.state_dict()))
    for changed in (lines[0][1:], lines[1][:1] + lines[0]):
        with pytest.raises(InputError, match="the documents have changed: the first 3 of pass 1"): source(changed, lines[1]).load_state_dict(at)
    expected = next(s)[0]
    s = source(lines[0], lines[1] + lines[0][:1])
    s.load_state_dict(at)
    assert next(s)[0].equal(expected)

@pytest.mark.parametrize("change", [dict(docs=-1), dict(left="abc"), dict(left=[2**40]), dict(left=[60_000]), dict(documents=None), dict(world=0)])
def test_tampered_position(texts, tok, change):
    "A position that can't be is refused before anything is read"
    with pytest.raises(InputError): make_stream(texts, tok).load_state_dict(make_stream(texts, tok).state_dict() | change)
    with pytest.raises(InputError, match="no position"): make_stream(texts, tok).load_state_dict([change])

@pytest.mark.parametrize("workers", [0, 1])
def test_stream_names_a_broken_file(tok, tmp_path, workers):
    "What can't be read is named, also by a worker"
    (tmp_path/"bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"^\S*bad.txt is not UTF-8"): next(make_stream(tmp_path, tok, workers=workers))

def test_stream_gives_every_document_once(tok):
    "In an epoch all ranks and consumers together see each document once"
    docs = [f"this is document {i}" for i in range(300)]
    seen = []
    for rank in range(3):
        s = StreamBatches(lambda: iter(docs), tok, 1, 16, buffer=20, rank=rank, world=3, workers=0)
        ids = [s.eot] + [t for _ in range(90) for t in next(s)[1].flatten().tolist()]
        seen += tok.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[1:101]
    assert sorted(seen) == sorted(docs)

# Inside documents

@pytest.mark.parametrize("rungs", [[], ["flash"]])
def test_logits_do_not_depend_on_documents_before(rungs):
    "With `within_documents`, a document's logits are those it has alone in its window"
    from dataclasses import replace
    from llm_speedrun.model import workload
    from llm_speedrun.runs import build
    eot, run = 0, build(replace(workload("tiny"), seq=48), rungs, device="cpu")
    inside = within_documents(run, eot)
    x = torch.randint(1, 1000, (2, 48), generator=torch.Generator().manual_seed(0))
    x[:, [0, 17, 30]] = eot
    y = x.clone(); y[:, 1:17] = (y[:, 1:17] % 999) + 1             # another first document
    with torch.no_grad():
        a, b, alone = inside.model(x), inside.model(y), run.model(x[:, 30:])
        assert not torch.allclose(run.model(x)[:, 30:], run.model(y)[:, 30:], atol=1e-3)
    assert torch.equal(a[:, 17:], b[:, 17:])
    torch.testing.assert_close(a[:, 30:], alone, atol=1e-5, rtol=1e-4)

# The command

def test_command(tmp_path, capsys):
    "What a user can get wrong is one line"
    for args, said in (((tmp_path/"nope", tmp_path/"o"), "neither a corpus"), (("stdlib", tmp_path), "exists already"),
                       (("stdlib", tmp_path/"o", tmp_path/"no.json"), "no.json: no tokenizer.json")):
        given = [f"--{k}={v}" for k, v in zip(("data", "out", "tokenizer"), args)]
        with pytest.raises(SystemExit) as e: speedrun_data([*given, "--workers=1"])
        assert e.value.code == 2 and said in capsys.readouterr().err
