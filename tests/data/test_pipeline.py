"Tokenizing that is killed goes on to the same bytes; streams, mixtures and shares neither skip nor repeat; workers' deaths are told."
import itertools, json, os, re, signal, subprocess, sys, threading
from fractions import Fraction
from functools import partial
from pathlib import Path
import numpy as np, pytest, torch
from llm_speedrun.data import corpus
from llm_speedrun.io_utils import InputError
from llm_speedrun.data import prepare_data as pipeline
from llm_speedrun.cli import speedrun_data
from llm_speedrun.train.config import DataOptions
from llm_speedrun.data.batches import Batches
from llm_speedrun.data.corpus import Corpus, open_corpus, stdlib_files, train_tokenizer, write_shards
from llm_speedrun.data.text_files import read_documents
from llm_speedrun.rungs.documents import (border_room, by_borders, by_mask, check_documents, document_mask,
                                           mean_length, padded_borders, within_documents)
from llm_speedrun.data.prepare_data import document_source, tokenize_corpus
from llm_speedrun.data.loader import MixedBatches, DistributedBatches, StreamBatches
from llm_speedrun.data.encoder_pool import Encoder, Worker, in_order
from helpers import quick_programs
from helpers.lessons import defined_in
from helpers.tiny_runs import words
from helpers.timeouts import TIMEOUT, until_some_moment, wait_until

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
from llm_speedrun.data import prepare_data as pipeline
from llm_speedrun.cli import speedrun_data
parcels = pipeline.parcels
def slowly(texts):                                      # many small parcels, so that some are done when the kill comes
    for i, parcel in enumerate(parcels(texts, 100_000)):
        if i == int(sys.argv[4]): sys.stdin.read()      # and the last one isn't: until standard input is closed
        yield parcel
        time.sleep(.03)                                 # long enough for the journal's clock to go on, however fast the machine
pipeline.parcels = slowly
monotonic = time.monotonic
pipeline.time.monotonic = lambda: 100*monotonic()       # the journal is written a hundred times as often
speedrun_data(["--data", sys.argv[1], "--out", sys.argv[2], "--tokenizer", sys.argv[3], "--workers", "2"])
"""

def start(texts, out, expected, stop=-1): # after so many parcels; by default after none
    return quick_programs.Popen([sys.executable, "-c", SLOW, str(texts), str(out), str(expected), str(stop)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

def pieces_done(out):
    try: return json.loads((out.with_name(f".{out.name}.unfinished")/"journal.json").read_text())["pieces"]
    except (OSError, ValueError): return 0

@posix
def test_killed_and_started_again(texts, expected, tmp_path):
    """Kill -9 for the command, then for its processes, of which it names one without a traceback. The same command goes on,
    and the result is bitwise that of `write_shards`"""
    out = tmp_path/"out"
    p = start(texts, out, expected, 8)
    wait_until(lambda: pieces_done(out) > 0, lambda: p.poll() is None)
    until_some_moment(.05)                              # anywhere between two journals
    p.kill(); p.communicate()
    assert p.returncode == -9 and not out.exists()
    at = pieces_done(out)
    p = start(texts, out, expected, 6)
    wait_until(lambda: pieces_done(out) > at, lambda: p.poll() is None)
    killed = children(p.pid)                            # all of them: one alone may have nothing more to do
    for child in killed: os.kill(child, signal.SIGKILL)
    _, err = p.communicate(timeout=TIMEOUT)
    named = [f"error: tokenizing process {child} was killed by signal 9" in err for child in killed]
    assert p.returncode == 2 and any(named), err
    assert "Traceback" not in err and pieces_done(out) > at > 0
    p = start(texts, out, expected)
    said = p.communicate(timeout=TIMEOUT)
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

@pytest.mark.parametrize("moment", ["copyfile", "rename", "rmtree"])
def test_killed_at_the_end(tok, tmp_path, monkeypatch, moment):
    "Killed in any of the last acts, there is the whole result or none, and the same call makes it"
    class Killed(BaseException): pass
    def die(*args, **kw): raise Killed
    def half(source, to): Path(to).write_bytes(Path(source).read_bytes()[:-1]); die()
    docs, calls = ["a single document. " * 3000], lambda: tokenize_corpus(docs, tok, tmp_path/"out", workers=1)
    with monkeypatch.context() as m:
        if moment == "rename":
            rename = Path.rename
            m.setattr(Path, "rename", lambda self, to: die() if to == tmp_path/"out" else rename(self, to))
        elif moment == "copyfile": m.setattr(pipeline.shutil, moment, half)
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

class Interrupt:
    "Inside its `with`, Ctrl-C comes before line number `at` of those that the functions execute"
    def __init__(self, at, *functions): self.left, self.codes = at, {f.__code__ for f in functions}
    def __call__(self, frame, event, arg):
        if frame.f_code not in self.codes: return None
        if event == "line":
            self.left -= 1
            if self.left == 0: raise KeyboardInterrupt
        return self
    def __enter__(self): sys.settrace(self); return self
    def __exit__(self, *args): sys.settrace(None)

def test_interrupted_between_any_two_writes(tmp_path, monkeypatch):
    """Ctrl-C before each line that writes tokens, counts or the journal, one after the other. What the journal then says is
    whole parcels, and going on makes the files of a run that nobody stopped"""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    rng = np.random.default_rng(0)
    parcels = [[(f"text {i}", True, False), (f"more {i}", False, False)] for i in range(3)]
    tokens = [(rng.integers(0, 999, 17).astype("<u2"), rng.random(17) < .3) for _ in parcels]
    writes = (pipeline._Unfinished.add, pipeline._Unfinished.sync, corpus.TokenWriter.write, corpus.TokenWriter.sync,
              corpus.TokenWriter.close, corpus.digest_pieces, corpus.replace_file)
    def work(out, at=0): # True if it was interrupted
        u = pipeline._Unfinished(out, dict(shard_tokens=8), np.dtype("<u2"))
        try:
            u.skip(p for parcel in parcels for p in parcel)
            first, odd = divmod(u.done.pieces, 2)
            assert not odd and u.done.train + u.done.val == 17*first
            try:
                with Interrupt(at, *writes):
                    for parcel, (t, held) in list(zip(parcels, tokens))[first:]: u.add(parcel, t, held); u.sync()
            finally: u.sync()
        except KeyboardInterrupt: return True
        finally: u.close()
        return False
    content = lambda out: {p.name: p.read_bytes() for p in out.with_name(f".{out.name}.unfinished").glob("tokens/*")}
    assert not work(tmp_path/"expected")
    expected, at = content(tmp_path/"expected"), 1
    assert sum(map(len, expected.values())) == 3*17*2
    while work(tmp_path/f"{at}", at):
        assert not work(tmp_path/f"{at}") and content(tmp_path/f"{at}") == expected, f"interrupted before line {at}"
        at += 1
    assert at > 100

def test_everything_is_on_the_disk(texts, tok, tmp_path, monkeypatch):
    "Each file of a corpus was synced, also those that were full long before the end"
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    tokenize_corpus(read_documents(texts), tok, tmp_path/"out", workers=1, shard_tokens=50_000)
    files = list((tmp_path/"out").iterdir())
    assert len(files) > 6 and {p.stat().st_ino for p in files} <= synced

@pytest.mark.parametrize("journal", ["[]", "null", "{}", '{"job": []}', '{"job": {}, "pieces": "3"}', '{"job": {}, "train": -1}', "x", "pipe",
                                     '{"job": JOB, "train": 1000000000000000}', '{"job": JOB, "documents": "0"}'])
def test_tampered_journal(texts, tok, tmp_path, journal):
    "A journal that can't be is refused by its name, and quickly"
    call = lambda: tokenize_corpus(["a document"]*9, tok, tmp_path/"out", workers=1)
    with pytest.raises(ValueError, match="no more"): tokenize_corpus(failing(), tok, tmp_path/"out", workers=1)
    path = tmp_path/".out.unfinished/journal.json"
    job = json.dumps(json.loads(path.read_text())["job"])
    path.unlink()
    if journal == "pipe": os.mkfifo(path)
    else: path.write_text(journal.replace("JOB", job))
    with pytest.raises(InputError, match="unfinished"): call()

def failing(): yield "a document"; raise ValueError("no more")

def test_added_tokens_and_wide_vocabulary(tmp_path):
    "A tokenizer that isn't of GPT-2's kind, with 32-bit tokens, gives the same as `write_shards` too"
    tok = train_tokenizer(["some text"], 300)
    tok.add_tokens([f"<{i}>" for i in range(70_000)])
    docs = [f"{i} <65000> <69000> some text" for i in range(300)]
    write_shards(docs, tok, tmp_path/"a")
    tokenize_corpus(docs, tok, tmp_path/"b", workers=2)
    assert_same(tmp_path/"b", tmp_path/"a")

def test_less_work_than_encode_batch(tok, tmp_path, monkeypatch):
    """What makes it faster than `tokenizers`' own `encode_batch` on all cores: of the text it encodes each word once, a small part of
    it, and each core has a process that does so. The notebook of data.encoder_pool measures the speed"""
    docs, encoded, started = stdlib(1_500_000), [], []
    encode, begin = Encoder.encode, Worker.__init__
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: (encoded.extend(texts), encode(self, texts))[1])
    encoder = Encoder(tok)
    for i in range(0, len(docs), 20): encoder(docs[i:i + 20])
    assert len(encoded) == len({*encoded}) and sum(map(len, encoded)) < .1*sum(map(len, docs))
    monkeypatch.setattr(Worker, "__init__", lambda self, *args: (started.append(self), begin(self, *args))[1])
    monkeypatch.setattr(pipeline.parcels, "__defaults__", (10_000,))
    tokenize_corpus(docs, tok, tmp_path/"c")
    assert len(started) == pipeline.usable_cores()

MEMORY = """
import resource, sys
from llm_speedrun.data.corpus import train_tokenizer
from llm_speedrun.data import prepare_data as pipeline
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
            ranks = [DistributedBatches(make(), r, world) for r in range(world)]
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
    from llm_speedrun.model_config import workload
    from llm_speedrun.runs import build
    eot, run = 0, build(replace(workload("tiny"), seq_len=48), rungs, device="cpu")
    inside = within_documents(run, eot)
    x = torch.randint(1, 1000, (2, 48), generator=torch.Generator().manual_seed(0))
    x[:, [0, 17, 30]] = eot
    y = x.clone(); y[:, 1:17] = (y[:, 1:17] % 999) + 1             # another first document
    with torch.no_grad():
        a, b, alone = inside.model(x), inside.model(y), run.model(x[:, 30:])
        assert not torch.allclose(run.model(x)[:, 30:], run.model(y)[:, 30:], atol=1e-3)
    assert torch.equal(a[:, 17:], b[:, 17:])
    torch.testing.assert_close(a[:, 30:], alone, atol=1e-5, rtol=1e-4)

@pytest.mark.parametrize("every", [3, 40, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_padded_borders_part_what_the_mask_parts(seed, every):
    "As many numbers whatever the documents; of documents for which there is no room, the last ones see each other, and windows never do"
    x = torch.randint(9, (5, 41), generator=torch.Generator().manual_seed(seed))
    cu, own = padded_borders(x, 0, every), defined_in("37_documents", "document_borders").document_borders(x, 0)[0]
    assert cu.dtype == torch.int32 and len(cu) == 1 + min(x.numel(), 5 + border_room(x.numel(), every))
    assert (cu.diff() >= 0).all() and cu[0] == 0 and cu[-1] == x.numel() and cu.diff().max() <= 41 and {*range(0, 205, 41)} <= {*cu.tolist()}
    assert {*cu.tolist()} <= {*own.tolist()}
    i = torch.arange(x.numel())
    doc = torch.searchsorted(cu[:-1].contiguous(), i, right=True).view(5, 41)
    sees = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    mask = document_mask(x, 0)
    assert not (mask & ~sees).any()
    if len(own) <= len(cu): assert torch.equal(sees, mask)
    else:
        rows = int((cu.unique() < x.numel()).sum())
        assert rows == 5 + border_room(x.numel(), every), "room was left"

def test_tokens_of_a_document(tmp_path):
    "Counted in the text to train on; a stream has none yet"
    corpus = open_corpus()
    n = np.asarray(corpus.train[:2**20])
    assert mean_length(corpus) == len(n)/(n == corpus.eot).sum()
    assert mean_length(Corpus("stream", None, None, 300, None, 0)) == 256

@pytest.mark.cuda
@pytest.mark.parametrize("B, H, K, T, D, every", [(3, 4, 2, 200, 64, 20), (2, 6, 6, 1024, 128, 300), (1, 2, 1, 33, 32, 5), (4, 6, 6, 128, 128, 10**6)])
def test_borders_against_float64(B, H, K, T, D, every):
    "Output and gradients by borders are off by at most twice what those by a mask are; NaN stays in its document"
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(B, h, T, D, device="cuda", generator=g).bfloat16().requires_grad_() for h in (H, K, K))
    x = torch.randint(every, (B, T), device="cuda", generator=g)
    mask, cu = document_mask(x, 0), padded_borders(x, 0, every)
    def all_of(f, *ins):
        o = f(*ins)
        return [o, *torch.autograd.grad(o.double().square().sum(), ins)]
    want = all_of(partial(by_mask, mask), *(t.detach().double().requires_grad_() for t in (q, k, v)))
    off = lambda f: [((a.double() - b).norm()/b.norm()).item() for a, b in zip(all_of(f, q, k, v), want)]
    for masked, bordered in zip(off(partial(by_mask, mask)), off(partial(by_borders, cu))): assert bordered < 2*masked + 1e-3
    wrong = [((a.double() - b).norm()/b.norm()).item() for a, b in zip(all_of(partial(by_borders, padded_borders(x + 1, 0, every)), q, k, v), want)]
    if (x == 0).any(): assert max(wrong) > .01, "borders don't matter here"
    with torch.no_grad():
        bad = v.clone(); bad[0, :, -1] = float("nan") # the last document of the first window
        nan = by_borders(cu, q, k, bad).isnan().any(-1).any(1) # B T
    last = int((x[0] == 0).nonzero().max()) if (x[0] == 0).any() else 0
    assert not nan[1:].any() and not nan[0, :last].any()

@pytest.mark.cuda
@pytest.mark.parametrize("rungs", [["bf16", "flash"], ["bf16", "flash", "fused_ops", "cuda_graphs"]])
def test_documents_by_borders_in_a_run(rungs):
    "A step with borders has the loss of one with the mask, for batches with other documents, recorded too"
    from dataclasses import replace
    from llm_speedrun.model_config import workload
    from llm_speedrun.rungs import documents
    from llm_speedrun.runs import build
    from llm_speedrun.stepper import Stepper
    config, curves = replace(workload("tiny"), seq_len=128), []
    batches = [torch.randint(1, 1000, (2, 4, 128), generator=torch.Generator().manual_seed(i)).cuda() for i in range(6)]
    for i, (x, _) in enumerate(batches): x[:, 7*i + 3] = 0; x[1, 60:60 + i] = 0
    for takes in (documents.takes_borders, lambda w: False):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(documents, "takes_borders", takes)
            step = Stepper(within_documents(build(config, rungs), 0, 60))
            curves.append([step((x, y)).item() for x, y in batches*2])
    assert curves[0] == pytest.approx(curves[1], rel=3e-3)

# Isolation, and ends

@posix
def test_modules_of_the_current_folder_are_not_run(tmp_path):
    "A `json.py` where the command is given is a file like others, to it and to the processes that it starts"
    here = tmp_path/"here"
    here.mkdir()
    for name in ("json", "numpy", "llm_speedrun", "signal"): (here/f"{name}.py").write_text("open('was_run', 'w')")
    (tmp_path/"command.py").write_text("from llm_speedrun.cli import speedrun_data\n"
                                       "speedrun_data('--data a.txt --out out --vocab 300 --workers 1'.split())\n")
    (here/"a.txt").write_text("the cat sat on the mat. "*500)
    res = subprocess.run([sys.executable, str(tmp_path/"command.py")], cwd=here, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr
    assert not (here/"was_run").exists() and (here/"out/meta.json").exists()

@posix
def test_nobody_waits_for_a_stalled_process(tok, tmp_path):
    "Ctrl-C while a process that encodes has stalled ends the command at once, with the journal written"
    script = tmp_path/"stalled.py"
    script.write_text(f"""
import itertools, os, signal
from llm_speedrun.data.corpus import train_tokenizer
from llm_speedrun.data import encoder_pool, prepare_data
stalled = []
class Stalled(encoder_pool.Worker):
    def __call__(self, texts):
        os.kill(self.process.pid, signal.SIGSTOP)
        stalled.append(self)
        if len(stalled) == 2: os.kill(os.getpid(), signal.SIGINT)
        return super().__call__(texts)
encoder_pool.Worker = Stalled
prepare_data.parcels.__defaults__ = (10_000,)
tok = train_tokenizer(["some text"], 300)
prepare_data.tokenize_corpus(("some text "*9000 for _ in itertools.count()), tok, {str(tmp_path/'out')!r}, workers=2)
""")
    res = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT)
    assert "KeyboardInterrupt" in res.stderr, res.stderr
    assert (tmp_path/".out.unfinished/journal.json").exists()

def test_in_order_waits_for_nobody():
    "Whoever takes the results may stop while the threads are busy"
    woken, ended = threading.Event(), []
    results = in_order(lambda x: x and ended.append(woken.wait(TIMEOUT)), range(10), 2, 4)
    next(results)
    results.close()
    assert not ended
    woken.set()

# The command

@pytest.mark.parametrize("options, said", [
    (dict(val_frac=1.), "val_frac must be a number above 0 to below 1, not '1.0'"), (dict(val_frac=2.), "not '2.0'"),
    (dict(val_frac=-1.), "not '-1.0'"), (dict(val_frac=float("nan")), "not 'nan'"), (dict(val_frac=0.), "not '0.0'"),
    (dict(vocab=-5), "vocab must be a whole number from 0"), (dict(vocab=100), "vocabulary of 100 is too small"),
    (dict(max_tokens=-1), "max_tokens must be a whole number from 0"), (dict(workers=-1), "workers must be a whole number from 0"),
    (dict(data=""), "data must be a text that isn't empty"), (dict(data=" "), "data is empty"),
    (dict(out=""), "out must be a text that isn't empty"), (dict(out=" "), "out is empty"),
    (dict(tokenizer="gpt2", vocab=300), "leave out --vocab"), (dict(data="BIN"), "is called .bin"),
    (dict(data="stdlib", text_key="body"), "text_key 'body' has no effect: stdlib has no JSON lines"),
    (dict(text_key="body"), "a.jsonl has no key 'body', only text; name the right one to speedrun_data or speedrun_train with --text_key"),
    (dict(tokenizer="BIN"), "tokens.bin holds no tokenizer|is not UTF-8")])
def test_options(tmp_path, capsys, options, said):
    "Options that can't be are refused in one line, before anything is made"
    (tmp_path/"a.jsonl").write_text('{"text": "some text"}\n')
    np.full(999, 60_000, "<u2").tofile(tmp_path/"tokens.bin")
    options = {k: str(tmp_path/"tokens.bin") if v == "BIN" else v for k, v in options.items()}
    with pytest.raises(SystemExit) as e: speedrun_data(words(DataOptions(str(tmp_path/"a.jsonl"), out=str(tmp_path/"out"), workers=1), **options))
    err = capsys.readouterr().err
    assert e.value.code == 2 and re.search(said, err) and err.count("error:") == 1, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "tokens.bin"]

def test_documents_need_an_end_token(tmp_path):
    "A corpus that doesn't say where documents begin is refused before there is a run"
    np.ones(5000, "<u2").tofile(tmp_path/"train.bin")
    with pytest.raises(InputError, match="doesn't say which token begins a document.*--document_mask"): check_documents(open_corpus(tmp_path, vocab=300))
    check_documents(open_corpus(tmp_path, vocab=50257))

def test_command(tmp_path, capsys):
    "What a user can get wrong is one line"
    for args, said in (((tmp_path/"nope", tmp_path/"o"), "neither a corpus"), (("stdlib", tmp_path), "exists already"),
                       (("stdlib", tmp_path/"o", tmp_path/"no.json"), "no.json: no tokenizer.json")):
        given = [f"--{k}={v}" for k, v in zip(("data", "out", "tokenizer"), args)]
        with pytest.raises(SystemExit) as e: speedrun_data([*given, "--workers=1"])
        assert e.value.code == 2 and said in capsys.readouterr().err

def data_command(*args, **given):
    "Run `speedrun_data` with one worker"
    speedrun_data([*args, *(f"--{k}={v}" for k, v in given.items()), "--workers=1"])

def test_out_is_tried_first(texts, tmp_path, capsys, monkeypatch):
    "Before a tokenizer is trained, which may take long"
    monkeypatch.setattr(pipeline, "train_tokenizer", lambda *args: pytest.fail("it reads the text"))
    (tmp_path/"file").write_text("")
    with pytest.raises(SystemExit): data_command(data=texts, out=tmp_path/"file/tokens")
    assert "file is no folder that one can write into: choose another --out" in capsys.readouterr().err

def test_too_large_a_vocabulary(tmp_path, capsys):
    "It is said at once, and `meta.json` has the real number; what was begun with another one is refused"
    (tmp_path/"a.txt").write_text("a few words, and a few more words. " * 200)
    data_command(data=tmp_path/"a.txt", out=tmp_path/"short", vocab=5000)
    c, said = open_corpus(tmp_path/"short"), capsys.readouterr().out
    assert 257 < c.vocab < 400 and f"the text has only {c.vocab} tokens to learn (5,000 asked for)\n" in said
    source = lambda name: json.loads((tmp_path/name/"meta.json").read_text())["source"]
    assert source("short") == f"{tmp_path/'a.txt'} (text), tokenizer {c.vocab} (5000 asked for)"
    data_command(data=tmp_path/"a.txt", out=tmp_path/"exact", vocab=260)
    assert "tokens to learn" not in capsys.readouterr().out and source("exact").endswith("tokenizer 260")

@pytest.mark.parametrize("other", [258, 5000])
def test_another_vocabulary_is_another_job(tmp_path, capsys, monkeypatch, other):
    "The tokenizer of what was begun has fewer or more tokens than are asked for now"
    (tmp_path/"a.txt").write_text("a few words, and a few more words. " * 200)
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(SystemExit):
        m.setattr(pipeline, "_finish", stop)
        data_command(data=tmp_path/"a.txt", out=tmp_path/"out", vocab=260)
    with pytest.raises(SystemExit): data_command(data=tmp_path/"a.txt", out=tmp_path/"out", vocab=other)
    said = capsys.readouterr()
    assert "was begun with another source" in said.err and "tokens to learn" not in said.out

def test_tokens_are_no_stream(texts, tok, tmp_path):
    "A folder of tokens has no text to stream, and the error says that it needn't"
    write_shards(stdlib(50_000), tok, tmp_path/"tok")
    with pytest.raises(InputError, match="tok is tokenized already: .* without --stream"): document_source(tmp_path/"tok")
    document_source(texts)
