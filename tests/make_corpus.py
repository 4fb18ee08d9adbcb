"""Make a corpus that anybody can make again: text of public repositories at pinned commits, without duplicates, in training, validation and test tokens.
    tests/make_corpus.py OUT [--clones FOLDER] [--tokenizer gpt2] [--sources FILE] [--only NAME,NAME] [--share .01]
    tests/make_corpus.py OUT --tokens FOLDER    of tokens that are there: validation texts without near copies, half of them for the test
OUT: a folder for `--data`; its test_000.bin is only read by `speedrun_race`, after a run. FOLDER: clones, OWNER+NAME each (what is missing is fetched into it, the pinned commit alone).
FILE: tests/corpus_sources.json, which has the repositories and what they gave; another result ends with an error. `--only` takes some of the repositories, without that check.

Files are taken by suffix, decoded strictly, and put into the order of their texts' digests. Of equal texts (but for white space) one is kept. A text's digest also says whether it is held out:
`--share` of the texts for validation, as many for the test. A held-out text more than half of which lies in 13-grams of tokens that the training text has, too, is dropped: such text is
boilerplate, or a near copy. OUT/corpus.json says what was taken and what was dropped."""
import argparse, hashlib, json, re, shutil, subprocess, sys, tempfile
from pathlib import Path
import numpy as np
from llm_speedrun.data.corpus import CorpusSpec, describe_tokens, gpt2_tokenizer, is_held_out, open_corpus, text_digest
from llm_speedrun.data.text_files import EOT
from llm_speedrun.data.token_files import GPT2_VOCAB, TokenWriter
from llm_speedrun.data.tokenizer import end_token, prepare_tokenizer, read_tokenizer, token_dtype
from llm_speedrun.io_utils import InputError, clean_errors, file_sha256, replace_file

SOURCES = Path(__file__).with_name("corpus_sources.json")
LEAST, MOST = 200, 2**22 - 1 # bytes of a file
GRAM = 13 # tokens
COVERED = .5 # of a held-out text, by the training text's n-grams: more, and it is dropped

# --- repositories ---

def git(folder, *words, **kw):
    "The output of git in a folder, bytes"
    p = subprocess.run(["git", "-C", str(folder), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)
    if p.returncode: raise InputError(f"git {' '.join(words)} in {folder}: {p.stderr.decode(errors='replace').strip()[-500:]}")
    return p.stdout

def clone_of(source, clones): # an entry of the sources, a folder
    "The folder of a repository that has the pinned commit; it is fetched where there is none"
    folder = Path(clones)/source["repository"].replace("/", "+")
    for there in (folder, folder/"repo"):
        if there.is_dir() and not subprocess.run(["git", "-C", str(there), "cat-file", "-e", source["commit"]], stderr=subprocess.DEVNULL).returncode: return there
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--bare")
    git(folder, "fetch", "--quiet", "--depth", "1", f"https://github.com/{source['repository']}", source["commit"])
    return folder

def listed(folder, source):
    "The (blob, path) of a repository's files that are taken, sorted by path"
    rows = [r.split("\t", 1) for r in git(folder, "ls-tree", "-r", "-l", "-z", source["commit"]).decode().split("\0") if r]
    found = []
    for about, path in rows:
        mode, _, blob, size = about.split()
        if mode == "120000" or not size.isdigit() or not LEAST <= int(size) <= MOST: continue # links; other repositories; a file that the clone lacks, which the digest shows
        if path.endswith(tuple(source["suffixes"])) and path.startswith(tuple(source.get("folders", [""]))): found.append((blob, path))
    return sorted(found, key=lambda f: f[1])

def digest_of(files): # from `listed`
    return hashlib.sha256("".join(f"{blob} {path}\n" for blob, path in files).encode()).hexdigest()

def contents(folder, files):
    "Yield the bytes of each file"
    with tempfile.TemporaryFile() as asked:
        asked.write("".join(f"{blob}\n" for blob, _ in files).encode()); asked.seek(0)
        with subprocess.Popen(["git", "-C", str(folder), "cat-file", "--batch"], stdin=asked, stdout=subprocess.PIPE) as p:
            for blob, path in files:
                head = p.stdout.readline().split()
                if len(head) != 3: raise InputError(f"{folder} lacks {path} ({blob}): clone it again, with its files")
                yield p.stdout.read(int(head[2]))
                p.stdout.read(1)

FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL) # metadata on top of a page

def text_of(data): # bytes
    "The text of a file, None where it isn't UTF-8 or too short"
    try: text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError: return None
    text = FRONT.sub("", text).strip()
    return text if len(text) >= LEAST and "\0" not in text else None

# --- n-grams ---

def mixed(x): # unsigned 64-bit integers
    "Integers that look random, by the last steps of SplitMix64"
    for shift, factor in ((30, 0xbf58476d1ce4e5b9), (27, 0x94d049bb133111eb)): x = (x ^ (x >> np.uint64(shift)))*np.uint64(factor)
    return x ^ (x >> np.uint64(31))

def grams(ids, n=GRAM): # tokens of a text
    "A hash for each `n` tokens in a row, 64 bits"
    x = mixed(ids.astype(np.uint64) + np.uint64(1))
    h = np.zeros(max(0, len(ids) - n + 1), np.uint64)
    for k in range(n): h = h*np.uint64(0x9e3779b97f4a7c15) + x[k:k + len(h)]
    return mixed(h)

def covered(ids, known, n=GRAM): # tokens of a text, which of its n-grams are known
    "The share of a text's tokens that lie in a known n-gram"
    edges = np.zeros(len(ids) + 1, np.int64)
    np.add.at(edges, np.flatnonzero(known), 1); np.add.at(edges, np.flatnonzero(known) + n, -1)
    return (edges[:-1].cumsum() > 0).mean()

class Known:
    "Which of the held-out texts' n-grams the training text has"
    def __init__(self, texts): # arrays of tokens
        last = np.array([2**64 - 1], np.uint64) # so that each hash has a place
        self.all = np.unique(np.concatenate([*map(grams, texts), last]))
        self.found = np.zeros(len(self.all), bool)

    def __call__(self, ids):
        "The place of each n-gram among the held-out ones, and whether it is one of them"
        i = np.searchsorted(self.all, h := grams(ids))
        return i, self.all[i] == h

    def add(self, ids): # of a training text
        i, there = self(ids)
        self.found[i[there]] = True

    def covered(self, ids): # of a held-out text
        i, there = self(ids)
        return covered(ids, there & self.found[i])

# --- the corpus ---

def gather(sources, clones):
    "All texts in their order, as UTF-8, and what each repository gave"
    texts, about, dropped = {}, [], {"unreadable or short": 0, "duplicates": 0}
    for s in sources:
        folder = clone_of(s, clones)
        files = listed(folder, s)
        if s.get("digest") not in (None, digest := digest_of(files)): raise InputError(f"{s['repository']}: its list of files has the digest {digest}, and {s['digest']} is pinned")
        before, size = len(texts), 0
        for data in contents(folder, files):
            text = text_of(data)
            if text is None: dropped["unreadable or short"] += 1; continue
            key = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
            if key in texts: dropped["duplicates"] += 1; continue
            texts[key] = text.encode(); size += len(texts[key])
        about.append({k: s[k] for k in s if k != "digest"} | dict(digest=digest, files=len(files), texts=len(texts) - before, bytes=size))
        print(f"{s['repository']}: {len(files):,} files, {len(texts) - before:,} new texts, {size/1e6:.1f} MB", flush=True)
    return [texts[k].decode() for k in sorted(texts)], about, dropped

def encoded(texts, tok, chars=2_000_000):
    "Yield the tokens of each text, the end token first"
    end, dtype, batch, n = end_token(tok), token_dtype(tok), [], 0
    def arrays(): return [np.array([end, *e.ids], dtype) for e in tok.encode_batch(batch, add_special_tokens=False)]
    for t in texts:
        batch.append(t); n += len(t)
        if n >= chars: yield from arrays(); batch, n = [], 0
    if batch: yield from arrays()

def side_of(text, share):
    "train, val or test"
    return "train" if not is_held_out(text, 2*share) else "test" if is_held_out(text, share) else "val"

def write(out, train, held, spec, about, digest=None): # a folder; tokens of each training text; name -> of each held-out text; a `CorpusSpec`; what corpus.json says besides
    "Write the corpus without those held-out texts that the training text covers. Returns what corpus.json says"
    out = Path(out)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True); part.mkdir(parents=True)
    known, n = Known([ids for of in held.values() for ids in of]), dict(train=0)
    writers = {s: TokenWriter(part, s, token_dtype(spec.tokenizer), 10**12) for s in ("train", *held)}
    for ids in train: known.add(ids); writers["train"].write(ids); n["train"] += 1
    for s, of in held.items():
        kept = [ids for ids in of if known.covered(ids) <= COVERED]
        n[s], about["dropped"][f"{s} texts, more than half in training {GRAM}-grams"] = len(kept), len(of) - len(kept)
        if not kept: raise InputError(f"no {s} text is left of {len(of)}: it takes more text, or a larger --share")
        for ids in kept: writers[s].write(ids)
    for w in writers.values(): w.close()
    describe_tokens(part, spec, (writers["train"], writers["val"]), "document", digest or text_digest())
    record = about | dict(result={f"{s}_000.bin": dict(sha256=file_sha256(part/f"{s}_000.bin"), tokens=w.n, texts=n[s]) for s, w in writers.items()})
    replace_file(part/"corpus.json", json.dumps(record, indent=1))
    part.rename(out)
    print(*(f"{k}: {r['tokens']:,} tokens of {r['texts']:,} texts, sha256 {r['sha256']}" for k, r in record["result"].items()), *(f"dropped: {k}: {v:,}" for k, v in about["dropped"].items()), sep="\n")
    return record

def check_new(out):
    if Path(out).exists(): raise InputError(f"{out} exists already and is left as it is; name another")

def make(out, sources, clones, tok, share=.01, pinned=None): # a folder, entries of the sources, a folder, a tokenizer; what result is expected
    "Make the corpus of repositories. Returns what corpus.json says"
    check_new(out)
    spec = CorpusSpec(tok, val_frac=share, source=f"{len(sources)} public repositories (corpus.json)")
    texts, about, dropped = gather(sources, clones)
    digest, sides = text_digest(), [side_of(t, share) for t in texts]
    for t in texts: digest.update((EOT + t).encode())
    of = lambda side: encoded([t for t, s in zip(texts, sides) if s == side], tok)
    record = write(out, of("train"), {s: [*of(s)] for s in ("val", "test")}, spec, dict(repositories=about, share=share, dropped=dropped, documents=digest.hexdigest()), digest)
    if pinned and pinned != record["result"]: raise InputError(f"{out} isn't the corpus of the records: {SOURCES.name} has {json.dumps(pinned)}")
    return record

def clean(out, data): # a folder, tokens as `speedrun_train` takes them
    "Make a corpus of tokens that are there: the same training tokens; of the validation texts every second one becomes test text"
    check_new(out)
    corpus = open_corpus(str(data))
    if not corpus.tokenizer or corpus.eot is None: raise InputError(f"{data} doesn't say which token begins a document, and has no tokenizer: it needs both")
    def texts(shards):
        ids = np.asarray(shards[:])
        return [t for t in np.split(ids, np.flatnonzero(ids == corpus.eot)) if len(t)]
    val = texts(corpus.val)
    return write(out, texts(corpus.train), dict(val=val[::2], test=val[1::2]), CorpusSpec(corpus.tokenizer, source=f"{corpus.name}, its validation texts divided"), dict(tokens=corpus.name, dropped={}))

def main(words):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    for k, v in dict(clones="clones", tokenizer="gpt2", sources=SOURCES, only="").items(): p.add_argument(f"--{k}", default=v)
    p.add_argument("--share", type=float, default=.01)
    p.add_argument("--tokens", default="")
    c = p.parse_args(words)
    if c.tokens: return clean(c.out, c.tokens)
    d = json.loads(Path(c.sources).read_text())
    sources, only = d["repositories"], {*filter(None, c.only.split(","))}
    if unknown := only - {s["repository"] for s in sources}: raise InputError(f"--only {', '.join(unknown)}: {c.sources} has no such repository")
    tok = gpt2_tokenizer() if c.tokenizer == "gpt2" else prepare_tokenizer(read_tokenizer(Path(c.tokenizer)))
    usual = not only and c.share == .01 and tok.get_vocab_size() == GPT2_VOCAB
    make(c.out, [s for s in sources if not only or s["repository"] in only], c.clones, tok, c.share, d.get("result") if usual else None)

if __name__ == "__main__": clean_errors(lambda: main(sys.argv[1:]))
