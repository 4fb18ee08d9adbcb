"""Files and tokenizers of other people: each is read correctly, or refused with a reason that says what to do. `python tests/data/test_text_inputs.py`
prints the table of all of them: files read, documents and tokens, or the reason."""
import bz2, gzip, io, json, lzma, os, pickle, re, struct, tempfile, zipfile
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.feather, pyarrow.parquet as pq, pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from llm_speedrun.benchmarks.adapters import edited
from llm_speedrun.data.corpus import check_text_key, open_corpus, train_tokenizer, write_shards
from llm_speedrun.tools.evals import questions_of
from llm_speedrun.io_utils import InputError, read_json
from llm_speedrun.plugins import plugin_text
from llm_speedrun.tools.sample import prompts_of
from llm_speedrun.data.token_files import Meta
from llm_speedrun.train.config import SampleOptions, TrainConfig, from_toml
from llm_speedrun.data.text_files import EOT, read_documents
from llm_speedrun.tools.export import export_folder
from llm_speedrun.data.tokenizer import end_of_text, read_tokenizer, tokenizer_of, vocabulary_size
from llm_speedrun.data.prepare_data import tokenize_corpus
from llm_speedrun.tools.doctor import check_text
from llm_speedrun.cli import speedrun_data
from llm_speedrun.train.trainer import train
from helpers.tiny_runs import VOCAB, nano, options

ONE, TWO = "The first document, a naïve one.\n", "The second: 漢字.\n"
ROWS = [ONE, TWO]

def jsonl(*texts, key="text"): return "".join(json.dumps({key: t}) + "\n" for t in texts).encode()
def table(**columns): return pa.table(columns or dict(text=ROWS))
def zstd(data, codec="zstd"):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, codec) as f: f.write(data)
    return out.getvalue().to_pybytes()
def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items(): z.writestr(name, data)
    return out.getvalue()
def parquet(t):
    out = io.BytesIO(); pq.write_table(t, out); return out.getvalue()
def arrow(t, new):
    out = io.BytesIO()
    with new(out, t.schema) as w: w.write_table(t)
    return out.getvalue()
def feather(t):
    out = io.BytesIO(); pyarrow.feather.write_feather(t, out, compression="zstd"); return out.getvalue()
def utf8_damaged(t):
    "The table with a byte that isn't UTF-8 in its text"
    b = t["text"].chunk(0).buffers()[2].to_pybytes()
    col = pa.StringArray.from_buffers(len(t), t["text"].chunk(0).buffers()[1], pa.py_buffer(b[:4] + b"\xff" + b[5:]))
    return pa.table(dict(text=col))
def locked(data):
    "A zip archive whose members say that they are encrypted"
    return data.replace(b"PK\x03\x04\x14\x00\x00\x00", b"PK\x03\x04\x14\x00\x01\x00").replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")
def saved(splits):
    def make(folder):
        import datasets
        datasets.disable_progress_bars()
        d = datasets.Dataset.from_dict(dict(text=[ONE, "filtered out", None, TWO], n=[0, 1, 2, 3])).filter(lambda r: r["n"] != 1)
        (datasets.DatasetDict({k: d for k in splits}) if splits else d).save_to_disk(folder/"saved")
        return folder/"saved"
    return make
def tar(): return gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(249) + ONE.encode().ljust(512, b"\0"))

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
LARGE = bytes.fromhex("28b52ffd00a8290000") + b"hello"                         # a window of 2 GiB, which zstd --long=31 writes
LONG = ("".join(f"line {i} of a text\n" for i in range(3000))).encode()
BOTH = [ONE, TWO]

# name -> a file's content, or file -> content of a folder (-> a path: a link), or a function; and the documents, or a part of the reason
NAMED = {   # by the issue
    "c4.json, JSON lines": (jsonl(*ROWS), BOTH),
    "dolma.json.gz": (gzip.compress(jsonl(*ROWS)), BOTH),
    "folder: c4.json and README.md": ({"c4.json": jsonl(*ROWS), "README.md": b"A data set."}, BOTH),
    "two.zip, two files": (zipped(**{"a.txt": ONE, "b.txt": TWO}), BOTH),
    "lines.jsonl.zip": (zipped(**{"lines.jsonl": jsonl(*ROWS)}), BOTH),
    "lines.jsonl.lzma": (lzma.compress(jsonl(*ROWS), lzma.FORMAT_ALONE), BOTH),
    "damaged.zip": (zipped(**{"a.txt": LONG})[:-30], "cannot read .*damaged.zip: .*whole"),
    "lines.jsonl.zst": (zstd(jsonl(*ROWS)), BOTH),
    "cut.txt.zst": (zstd(LONG)[:-9], "cannot read .*cut.txt.zst: Truncated"),
    "large.txt.zst, a large window": (LARGE, "cannot read .*large.txt.zst: .*zstd -d --long=31"),
    "folder: a linked folder": ({"sub/a.txt": ONE.encode(), "here": Path("sub"), "b.txt": TWO.encode()}, [TWO, ONE]),
    "Hub clone: train and test": ({"README.md": b"About.", "data/train-00000-of-00001.parquet": parquet(table()),
                                   "data/test-00000-of-00001.parquet": parquet(table(text=["not for training"]))}, BOTH),
    "category.parquet": (parquet(table(text=pa.array(ROWS).dictionary_encode())), BOTH),
    "view.parquet": (parquet(table(text=pa.array(ROWS, pa.string_view()))), BOTH),
    "null.parquet": (parquet(table(text=[ONE, None, TWO])), BOTH),
    "null.jsonl": (jsonl(ONE, None, TWO), BOTH),
    "marked.txt, UTF-16": ((ONE + TWO).encode("utf-16"), [ONE + TWO]),
    "unmarked.txt, UTF-16": ((ONE + TWO).encode("utf-16-le"), "UTF-16LE without a byte-order mark.*iconv -f UTF-16LE"),
    "data.arrow, a stream": (arrow(table(), pa.ipc.new_stream), BOTH),
    "model.safetensors": (struct.pack("<Q", 20) + b'{"__metadata__": {}}' + bytes(99), "safetensors: it holds weights"),
    "save_to_disk, a filtered data set": (saved(()), BOTH),
    "double::colon.txt": (ONE.encode(), [ONE]),
}
OTHERS = {  # not by the issue
    "pointer.parquet, Git LFS": (POINTER, "a Git LFS pointer without its data: fetch the data with `git lfs pull`"),
    "pointer.txt, Git LFS": (POINTER, "git lfs pull"),
    "lines.jsonl.lz4": (zstd(jsonl(*ROWS), "lz4"), BOTH),
    "twice.jsonl.gz, packed twice": (gzip.compress(zstd(jsonl(*ROWS))), BOTH),
    "members.txt.gz, two members": (gzip.compress(ONE.encode()) + gzip.compress(TWO.encode()), [ONE + TWO]),
    "padded.txt.gz, zeros at its end": (gzip.compress(ONE.encode()) + bytes(512), [ONE]),
    "frames.txt.zst, a frame to skip": (bytes.fromhex("502a4d180400000001020304") + zstd(ONE.encode()), [ONE]),
    "more.txt.bz2, other bytes after it": (bz2.compress(ONE.encode()) + b"and more", "cannot read .*more.txt.bz2"),
    "second.txt.xz, its second stream cut": (lzma.compress(ONE.encode()) + lzma.compress(LONG)[:-40], "second.txt.xz: it is cut off"),
    "plain.txt.gz, not packed": (ONE.encode(), "it is called .gz and is not gzip"),
    "unnamed, packed by xz": (lzma.compress(jsonl(*ROWS)), BOTH),
    "other.jsonl.gz, in truth bzip2": (bz2.compress(jsonl(*ROWS)), BOTH),
    "a.tar.gz": (tar(), "a.tar.gz is a tar archive: unpack it first"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\0\4" + bytes(60), "a 7-Zip archive: unpack"),
    "report.docx": (zipped(**{"[Content_Types].xml": "<x/>", "word/document.xml": "<w>text</w>"}), "an Office document: extract its text"),
    "locked.zip, encrypted": (locked(zipped(**{"a.txt": ONE})), "cannot read .*locked.zip/a.txt.*password"),
    "mac.zip, with __MACOSX and README": (zipped(**{"d.jsonl": jsonl(*ROWS), "__MACOSX/._d.jsonl": b"\0\5", "README": "About."}), BOTH),
    "packed.zip, members are packed": (zipped(**{"a.txt.gz": gzip.compress(ONE.encode()), "b.json": jsonl(TWO)}), BOTH),
    "wide.txt, UTF-32": (ONE.encode("utf-32"), [ONE]),
    "powershell.jsonl, UTF-16": (jsonl(*ROWS).decode().encode("utf-16"), BOTH),
    "chinese.txt, UTF-16BE": ("漢字かな交じり文。\n".encode("utf-16-be")*9, "UTF-16BE without a byte-order mark"),
    "japanese.txt, Shift JIS": (TWO.replace("The second", "二番目").encode("shift-jis"), "not UTF-8 text.*suits Western European text alone"),
    "stray.txt, one zero byte": (LONG[:500] + b"\0" + LONG[500:999], [(LONG[:500] + b"\0" + LONG[500:999]).decode()]),
    "array.json": (json.dumps([dict(text=t) for t in ROWS]).encode(), "array.json is one JSON document; .*jq -c '.\\[\\]'"),
    "folder: an array.json and README.md": ({"array.json": json.dumps([dict(text=t) for t in ROWS]).encode(), "README.md": b"About."},
                                            "array.json is one JSON document"),
    "folder: body.json and README.md": ({"body.json": jsonl(*ROWS, key="body"), "README.md": b"About."}, "body.json has no key 'text', only body.*--text_key"),
    "folder: settings.json and d.jsonl": ({"settings.json": b'{\n  "layers": 12\n}', "d.jsonl": jsonl(*ROWS), "LICENSE": b"MIT"}, BOTH),
    "lines.txt, JSON lines": (jsonl(*ROWS), BOTH),
    "folder: a picture, a sound, a text": ({"a.png": b"\x89PNG\r\n\x1a\n" + bytes(99), "b.mp3": b"ID3\x03" + bytes(99), "c.txt": ONE.encode()}, [ONE]),
    "folder: a link to nowhere": ({"a.txt": ONE.encode(), "b.txt": Path("gone.txt")}, "b.txt is a link to .*gone.txt, which isn't there"),
    "folder: a link to itself": ({"a.txt": ONE.encode(), "sub/up": Path("..")}, [ONE]),
    "folder: a file linked twice": ({"a.txt": ONE.encode(), "b.txt": Path("a.txt"), "c.txt": Path("a.txt")}, [ONE]),
    "folder: wiki.train.raw, .valid, .test": ({f"wiki.{k}.raw": f"of {k}".encode() for k in ("train", "valid", "test")}, ["of train"]),
    "folder: train/pos/0_9.txt, test/pos/1_2.txt": ({"train/pos/0_9.txt": ONE.encode(), "test/pos/1_2.txt": TWO.encode()}, [ONE]),
    "folder: test alone": ({"test/a.txt": ONE.encode(), "test/b.txt": TWO.encode()}, BOTH),
    "data.feather": (feather(table()), BOTH),
    "binary.parquet, a column of bytes": (parquet(table(text=[o.encode() for o in ROWS])), "column 'text' holds binary, not text"),
    "damaged.parquet, not UTF-8": (lambda d: (d/"damaged.parquet").write_bytes(parquet(utf8_damaged(table()))) and d/"damaged.parquet", "damaged.parquet: .*utf-8|not UTF-8"),
    "empty.parquet, nothing but null": (parquet(table(text=pa.array([None, None], pa.string()))), "has no text in it.*null or empty: 2"),
    "inside.parquet.gz": (gzip.compress(parquet(table())), "is Parquet in a packed file: unpack it first"),
    "saved with splits": (saved(("train", "test")), BOTH),
    "array.npy": (lambda d: np.save(d/"array.npy", np.arange(9)) or d/"array.npy", "a numpy array: write its text as Parquet or JSON lines"),
    "rows.pkl": (pickle.dumps(ROWS), "a pickle: write its text"),
    "rows.db, SQLite": (b"SQLite format 3\0" + bytes(99), "an SQLite database"),
    "paper.pdf": (b"%PDF-1.7\n" + bytes(99), "is PDF: extract its text first"),
    "noise.dat": (np.random.default_rng(0).bytes(5000), "noise.dat is a binary file of no format that we read"),
    "nothing.jsonl": (b"\n\n", "has no text in it"),
    "some.jsonl, a row without the key": (jsonl(ONE) + b'{"id": 1}\n' + jsonl(TWO), BOTH),
    "all.jsonl, no row with the key": (b'{"Texts": "a"}\n{"id": 1}\n', "all.jsonl has no key 'text', only Texts, id; .*Did you mean Texts"),
    "table.csv": (b'id,text\r\n1,"' + ONE.encode() + b'"\r\n2,\r\n3,"' + TWO.encode() + b'"\r\n', BOTH),
    "table.tsv.gz": (gzip.compress(b'text\tid\n"' + ONE.encode() + b'"\t1\n'), [ONE]),
    "marked.csv, UTF-16": (("text\r\n" + '"' + ONE + '"\r\n').encode("utf-16"), [ONE]),
    "numbers.csv, without such a column": (b"a,b\n1,2\n", "numbers.csv has no column 'text', only a, b; .*--text_key"),
}

# Folders as programs leave them. What the installed libraries write, they write here

def maps(folder):
    "datasets: a data set on disk that was mapped and filtered, which leaves caches next to it"
    import datasets
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(dict(text=[*ROWS, None])).save_to_disk(folder/"top/saved")
    d = datasets.load_from_disk(folder/"top/saved")
    d.map(lambda r: dict(text=f"{r['text']} again")); d.filter(lambda r: r["text"] != ONE)
    assert len([*folder.rglob("cache-*.arrow")]) == 2
    return folder/"top"
def generated(folder):
    "datasets: the cache in which it prepares data, with locks, information, and what .map() made in two processes"
    import datasets
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict(dict(text=ROWS)).to_parquet(folder/"in.parquet") and datasets.load_dataset(
        "parquet", data_files=dict(train=str(folder/"in.parquet"), test=str(folder/"in.parquet")), cache_dir=str(folder/"cache"))
    for d in made.values(): d.map(lambda r: dict(text=r["text"] + "!"))
    return folder/"cache"
def several(folder):
    "datasets: splits that aren't called as they usually are, in a folder with another data set of fewer files than before"
    import datasets
    datasets.disable_progress_bars()
    d = datasets.Dataset.from_dict(dict(text=[ONE]))
    datasets.DatasetDict(dict(train=d, unsupervised=d)).save_to_disk(folder/"top/a")
    datasets.Dataset.from_dict(dict(text=[TWO])).save_to_disk(folder/"top/b")
    (folder/"top/b/data-00001-of-00002.arrow").write_bytes((folder/"top/a/train/data-00000-of-00001.arrow").read_bytes())
    return folder/"top"
def incomplete(folder):
    (several(folder)/"b/data-00000-of-00001.arrow").unlink()
    return folder/"top"
def partitions(folder):
    "pyarrow: partitions by two keys, with the _metadata of Dask and Spark, which is Parquet without rows"
    found = []
    t = table(text=[ONE, "held out", TWO], lang=["de", "de", "zh"], split=["train", "test", "train"])
    pq.write_to_dataset(t, folder/"top", partition_cols=["split", "lang"], metadata_collector=found)
    schema = t.drop_columns(["split", "lang"]).schema
    pq.write_metadata(schema, folder/"top/_metadata", metadata_collector=found)
    pq.write_metadata(schema, folder/"top/_common_metadata")
    return folder/"top"
def spark(folder, name="part-00000-9a3f2c1e-c000.snappy.parquet", data=None):
    top = folder/"top"; (top/"_temporary/0").mkdir(parents=True)
    (top/name).write_bytes(data or parquet(table()))
    (top/f".{name}.crc").write_bytes(b"crc\0\0\0\2\0"); (top/"_SUCCESS").touch(); (top/"._SUCCESS.crc").write_bytes(b"crc\0")
    (top/"_temporary/0/part-00001.parquet").write_bytes(parquet(table(text=["half written"])))
    return top
def hub(folder, main=True):
    "Two versions of a repository in the cache of the Hub: files under their digests, and links to them"
    top = folder/"datasets--me--two"
    for name in ("blobs", "refs", "snapshots/0ld/data", "snapshots/4ew/data"): (top/name).mkdir(parents=True)
    (top/"blobs/aa").write_bytes(parquet(table(text=["of before"]))); (top/"blobs/bb").write_bytes(parquet(table()))
    (top/"blobs/cc.incomplete").write_bytes(b"PAR1"); (top/"blobs/dd").write_bytes(b"About the data.")
    for version, blob in (("0ld", "aa"), ("4ew", "bb")):
        (top/f"snapshots/{version}/data/train.parquet").symlink_to(f"../../../blobs/{blob}"); (top/f"snapshots/{version}/README.md").symlink_to("../../blobs/dd")
    if main: (top/"refs/main").write_text("4ew")
    return top
def delta(folder):
    (folder/"top/_delta_log").mkdir(parents=True); (folder/"top/_delta_log/00000.json").write_text('{"commitInfo": {}}\n')
    (folder/"top/part-0.parquet").write_bytes(parquet(table()))
    return folder/"top"
def mosaic(folder):
    (folder/"top").mkdir(); (folder/"top/shard.00000.mds").write_bytes(bytes(range(256))); (folder/"top/index.json").write_text('{"shards": [], "version": 2}')
    return folder/"top"

FOLDERS = {
    "datasets, mapped": (maps, BOTH), "datasets, its cache": (generated, BOTH), "datasets, several": (several, BOTH),
    "datasets, a file is gone": (incomplete, "b/data-00000-of-00001.arrow isn't there, and state.json names it"),
    "pyarrow, partitions and _metadata": (partitions, BOTH), "Spark, Parquet": (spark, BOTH),
    "Spark, text": (lambda d: spark(d, "part-00000", ONE.encode()), [ONE]), "Spark, JSON": (lambda d: spark(d, "part-00000-9a3f-c000.json", jsonl(*ROWS)), BOTH),
    "Spark, CSV": (lambda d: spark(d, "part-00000-9a3f-c000.csv", b'id,text\n1,"' + ONE.encode() + b'"\n'), [ONE]),
    "Delta Lake": (delta, "a Delta Lake table, whose files also hold rows that were deleted"), "MosaicML Streaming": (mosaic, "shards of MosaicML Streaming, which we don't read"),
}
if os.name == "posix": FOLDERS |= {"Hub cache": (hub, BOTH), "Hub cache without refs": (lambda d: hub(d, False), "has 2 versions in snapshots/: name the folder of one"),
                                   "Hub cache, a version": (lambda d: hub(d)/"snapshots/0ld", ["of before"])}

posix = os.name == "posix"

def made(name, content, folder):
    "The path of an input"
    if callable(content): return content(folder)
    if isinstance(content, bytes):
        path = folder/re.split(", ", name)[0]
        if ":" in path.name and not posix: pytest.skip("Windows has no such names")
        path.write_bytes(content); return path
    for file, data in content.items():
        (p := folder/"data"/file).parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(data, Path): p.write_bytes(data)
        elif posix: p.symlink_to(data)
        else: pytest.skip("links need rights on Windows")
    return folder/"data"

def tried(path):
    "The documents and what was read, or the reason"
    try: return list(docs := read_documents(path)), docs.report
    except (InputError, OSError) as e: return str(e), None

@pytest.mark.parametrize("name", [*NAMED, *OTHERS, *FOLDERS])
def test_input(name, tmp_path):
    content, want = (NAMED | OTHERS | FOLDERS)[name]
    got, report = tried(made(name, content, tmp_path))
    if isinstance(want, str): assert report is None and re.search(want, got, re.S), got
    else: assert got == want and report.lines()

def test_what_is_left_out_is_reported(tmp_path):
    "Nulls in the same words for JSON lines and Parquet; each file that isn't read has its reason"
    assert [tried(made(n, NAMED[n][0], tmp_path))[1].lines()[1:] for n in ("null.parquet", "null.jsonl")] == [["left out rows whose text is null or empty: 1"]]*2
    folder = made("", {**NAMED["Hub clone: train and test"][0], **OTHERS["folder: settings.json and d.jsonl"][0], "a.png": b"\x89PNG" + bytes(9), "e.txt": b"",
                       "x.bin": b"\1\0", ".hidden": b"x", "data/dev/y.jsonl": jsonl(TWO)}, tmp_path)
    left_out = {k.replace(str(folder), "").strip("/\\").replace("\\", "/"): v for k, v in tried(folder)[1].skipped.items()}
    assert left_out == {"README.md": "about the data", "LICENSE": "about the data", "data/test-00000-of-00001.parquet": "of the test split",
                        "settings.json": "one JSON document", "a.png": "a picture", "e.txt": "empty", "x.bin": "called .bin", ".hidden": "hidden"}

# Tokenizers

TEXT = [f"{i}: The quick brown fox jumps over the lazy dog; Der Käfer läuft.\n"*9 for i in range(60)]

def bytes_bpe(): return train_tokenizer(TEXT, 400)
def with_settings(tok):
    tok.enable_truncation(16); tok.enable_padding(length=32)
    return tok
def changed(tok, **parts):
    for k, v in parts.items(): setattr(tok, k, v)
    return tok
def characters(without=""):
    "BPE that knows single characters, and drops others"
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted({*"".join(TEXT)} - {*without}))}, []))
    tok.decoder = decoders.Fuse(); tok.add_special_tokens([EOT])
    return tok
def words():
    tok = Tokenizer(models.WordLevel({"[UNK]": 0, "The": 1, "fox": 2, EOT: 3}, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace(); tok.add_special_tokens([EOT])
    return tok
def gaps():
    d = json.loads(bytes_bpe().to_str())
    d["model"]["vocab"] = {k: v if v < 300 else v + 100_000 for k, v in d["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(d))
def dropout():
    tok = bytes_bpe(); tok.model.dropout = .5
    return tok

GOOD = {
    "truncation and padding": lambda: with_settings(bytes_bpe()), "dropout of merges": dropout, "ids with gaps": gaps, "single characters, all known": characters,
    "NFC": lambda: changed(bytes_bpe(), normalizer=normalizers.NFC()),
    "a space before each text": lambda: changed(bytes_bpe(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "characters without the digit 7": lambda: characters("7")}
LOSSY = {
    "lower case": (lambda: changed(bytes_bpe(), normalizer=normalizers.Lowercase()), "does not reproduce the text.* becomes "),
    "accents stripped": (lambda: changed(bytes_bpe(), normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "does not reproduce"),
    "words, the rest unknown": (words, "does not reproduce"), "BPE without umlauts": (lambda: characters("äö"), "it changes \\d.\\d%"),
    "no decoder": (lambda: changed(characters(), decoder=None), "does not reproduce")}

def saved_tokenizer(tok, folder):
    tok.save(str(folder/"tokenizer.json"))
    return read_tokenizer(folder/"tokenizer.json")

@pytest.mark.parametrize("name", GOOD)
def test_tokenizers_that_reproduce_the_text(name, tmp_path):
    "Encoded whole, the same each time, within the vocabulary that is written"
    tok = saved_tokenizer(GOOD[name](), tmp_path)
    docs = TEXT if "7" not in name else [t.replace("7", "") for t in TEXT] + ["x7y"]    # a trifle
    meta = write_shards(docs, tok, tmp_path/"c")
    c = open_corpus(tmp_path/"c")
    whole = c.train[:].tolist() + c.val[:].tolist()
    text = tok.decode(whole).replace(EOT, "")
    assert abs(len(text.replace(" ", "")) - len("".join(docs).replace(" ", ""))) <= ("7" in name) and max(whole) < c.vocab == vocabulary_size(tok)
    assert meta["text"]["lost"] == ("7" in name) and meta["text"]["documents"] == len(docs)
    if name == "truncation and padding": assert meta["text"]["tokens"] == sum(len(bytes_bpe().encode(t).ids) for t in TEXT)

@pytest.mark.parametrize("name", LOSSY)
def test_tokenizers_that_lose_text_are_refused(name, tmp_path):
    tok, reason = saved_tokenizer(LOSSY[name][0](), tmp_path), LOSSY[name][1]
    for write in (write_shards, lambda *args: tokenize_corpus(*args, workers=1)):
        with pytest.raises(InputError, match=reason): write(TEXT, tok, tmp_path/"c")
    assert not (tmp_path/"c").exists()

def test_letters_that_come_later(tmp_path):
    "What a sample of the beginning doesn't show is counted, and refused with its share"
    docs = TEXT*10 + ["Ὦ ξεῖν', ἀγγέλλειν Λακεδαιμονίοις"*20]
    tok = saved_tokenizer(characters(), tmp_path)
    for write in (write_shards, lambda *args: tokenize_corpus(*args, workers=1)):
        with pytest.raises(InputError, match=r"drops or changes 0.\d+% of the text, \d+ characters of .*'ε'"): write(docs, tok, tmp_path/"c")

def test_every_tokenizer_is_read_in_one_place():
    "And so without its settings: nobody else calls the library's functions that read one, but for GPT-2's from the Hub, which is prepared too"
    root = Path(read_tokenizer.__code__.co_filename).parent
    calls = {f.name: re.findall(r"\bTokenizer\.from_\w+", f.read_text(encoding="utf-8")) for f in root.rglob("*.py")}
    assert {k: v for k, v in calls.items() if v} == {"tokenizer.py": ["Tokenizer.from_str"], "corpus.py": ["Tokenizer.from_pretrained"]}
    assert "prepare_tokenizer(Tokenizer.from_pretrained" in (root/"corpus.py").read_text(encoding="utf-8")

# Through the commands

@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    "A folder with a tokenizer as a fine-tuned model has it: truncated, padded, and with another end token"
    folder = tmp_path_factory.mktemp("llama")
    d = json.loads(with_settings(train_tokenizer(TEXT, VOCAB - 10)).to_str().replace(EOT, "</s>"))
    (folder/"tokenizer.json").write_text(json.dumps(d))
    return folder

def test_an_end_token_of_another_name(llama, tmp_path, capsys):
    "From speedrun_data to the run, what it writes, and its export; refused where it isn't named, or is a word of the text"
    (tmp_path/"a.jsonl").write_bytes(jsonl(*TEXT, None))
    def data(*more): speedrun_data(["--data", str(tmp_path/"a.jsonl"), "--tokenizer", str(llama), "--out", str(tmp_path/"tokens"), "--workers", "1", *more])
    for more, reason in (((), "no <|endoftext|> token.*--end_token, one of </s>"), (("--end_token", "a"), "a is a token of ordinary text"),
                         (("--end_token", "[SEP]"), r"no \[SEP\] token.*one of </s>")):
        with pytest.raises(SystemExit): data(*more)
        assert re.search(reason, capsys.readouterr().err)
    data("--end_token", "</s>")
    said = capsys.readouterr().out
    assert re.match(r"read 1 file of [\d,]+ bytes \(1 JSON lines\)\nleft out rows whose text is null or empty: 1\n60 documents, [\d,]+ bytes of text, \d\.\d\d bytes per token\n", said), said
    c = open_corpus(tmp_path/"tokens")
    assert c.eot == c.tokenizer.token_to_id("</s>") and c.train[:1].tolist() == [c.eot]
    trainer, _ = train(options(tmp_path, data=str(tmp_path/"tokens"), steps=2, num_evals=1, sample_tokens=4), progress=False)
    (trainer.folder/"tokenizer.json").write_text(with_settings(c.tokenizer).to_str())        # as an older run could have it
    tok, out = tokenizer_of(trainer.folder), export_folder(trainer.folder, tmp_path/"export")
    assert end_of_text(tok) == c.eot and len(tok.encode(TEXT[0]).ids) > 16
    exported = json.loads((tmp_path/"export/tokenizer.json").read_text())
    assert not exported["truncation"] and not exported["padding"]
    assert json.loads((tmp_path/"export/config.json").read_text())["eos_token_id"] == c.eot
    assert json.loads((tmp_path/"export/tokenizer_config.json").read_text())["eos_token"] == "</s>"

# Files that people write, as a Windows editor saves them

def toml(path): return from_toml(path, TrainConfig)["steps"]
def prompts(path): return prompts_of(SampleOptions("run", prompts=str(path)))
def tasks(path): return questions_of("lambada", path)[0][0].context
def plugin(path): return plugin_text(str(path)).splitlines()[0]
def tokenizer(path): return read_tokenizer(path).token_to_id("a")
def meta(path): return read_json(path, Meta).vocab
def race(path): return edited(path, {"steps = 7\nmore": "x"})
def text(path): return [*read_documents(path)]
HAND_WRITTEN = dict(toml=(".toml", "steps = 7\nseed = 1\n", 7), prompts=(".txt", "Once\nTwice\n", ["Once", "Twice"]), tasks=(".jsonl", '{"text": "a b"}\n{"text": "a c"}\n', "a"),
                    plugin=(".py", "x = 1\ny = 2\n", "x = 1"), meta=(".json", '{\n"vocab": 300}\n', 300), race=(".py", "steps = 7\nmore", "x"),
                    tokenizer=(".json", Tokenizer(models.WordLevel({"a": 3})).to_str(True), 3), text=(".txt", "one", ["one"]))

@pytest.mark.parametrize("name", HAND_WRITTEN)
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_a_byte_order_mark(tmp_path, name, ends):
    "It is no part of what is read, and neither are the line ends of Windows"
    suffix, content, want = HAND_WRITTEN[name]
    path = tmp_path/f"a{suffix}"
    for mark in ("", "\ufeff"):
        path.write_text(mark + content, encoding="utf-8", newline=ends)
        assert globals()[name](path) == want

@pytest.mark.parametrize("name", sorted(HAND_WRITTEN.keys() - {"text"}))
def test_utf16_is_named(tmp_path, name):
    suffix, content, _ = HAND_WRITTEN[name]
    path = tmp_path/f"a{suffix}"
    for encoding in ("utf-16", "utf-16-le"):
        path.write_text(content, encoding=encoding)
        with pytest.raises(InputError, match=f"a{suffix}.* UTF-16.*save it as UTF-8"): globals()[name](path)

def test_standard_input_with_a_mark(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffOnce\r\n".encode()), encoding="utf-8"))
    assert prompts_of(SampleOptions("run", prompts="-")) == ["Once"]

def test_a_stream_of_another_column(tmp_path):
    "--text_key holds for a stream, and for text that is tokenized on the way"
    (tmp_path/"a.jsonl").write_bytes(jsonl(*TEXT, key="body"))
    for stream in (True, False):
        trainer, res = train(options(tmp_path, data=str(tmp_path/"a.jsonl"), text_key="body", stream=stream, steps=2, num_evals=1, sample_tokens=4, name=f"{stream}"), progress=False)
        assert res["steps"] == 2
        with pytest.raises(InputError, match="has no key 'text', only body; name the right one to speedrun_data or speedrun_train with --text_key"):
            train(options(tmp_path, data=str(tmp_path/"a.jsonl"), stream=stream, steps=2, name=f"no{stream}"), progress=False)

def test_a_key_without_effect(tmp_path):
    "--text_key is refused where nothing has keys, and not where one corpus of a mixture has"
    (tmp_path/"a.txt").write_text("plain text, line after line\n"*99)
    (tmp_path/"b.jsonl").write_bytes(jsonl(*TEXT, key="body"))
    def run(data, **kw): return train(options(tmp_path, data=data, text_key="body", steps=1, num_evals=1, sample_tokens=4, **kw), progress=False)[1]
    for data, kw in ((f"{tmp_path}/a.txt", {}), (f"{tmp_path}/a.txt", dict(stream=True)), ("stdlib", {})):
        with pytest.raises(InputError, match="text_key 'body' has no effect.*Leave it out"): run(data, name=f"x{len(kw)}", **kw)
    write_shards(TEXT, train_tokenizer(TEXT, 300), tmp_path/"tokens")
    with pytest.raises(InputError, match="text_key 'body' has no effect"): run(f"{tmp_path}/tokens")
    check_text_key([tmp_path/"tokens", tmp_path/"b.jsonl"], "body")

def test_the_doctor_says_what_the_tokens_are_from(tmp_path):
    "Files, documents and bytes per token, of a bare .bin those of a sample; another tokenizer's tokens are a problem"
    write_shards(TEXT, bytes_bpe(), tmp_path/"c")
    found, = check_text(c := open_corpus(tmp_path/"c"))
    assert (found.level, found.about) == ("ok", "text") and "60 documents" in found.text and "bytes per token" in found.text
    meta = json.loads((tmp_path/"c/meta.json").read_text())
    (tmp_path/"c/meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "text"}))
    found, = check_text(open_corpus(tmp_path/"c"))
    assert found.level == "ok" and re.search(r"\d\.\d\d bytes per token$", found.text)
    np.random.default_rng(0).integers(1, 257, 5000).astype("<u2").tofile(tmp_path/"noise.bin")
    bytes_bpe().save(str(tmp_path/"tokenizer.json"))
    found, = check_text(open_corpus(tmp_path/"noise.bin"))
    assert found.level == "problem" and "another tokenizer" in found.text

# The table

def rows():
    "Markdown: each input, files read, documents and tokens, or the reason"
    tok = train_tokenizer(TEXT, 300)
    yield from ("| input | files read | documents | tokens | left out, or the reason |", "|---|---|---|---|---|")
    for of, inputs in (("", OTHERS | FOLDERS), (" (issue)", NAMED)):
        for name, (content, _) in inputs.items():
            with tempfile.TemporaryDirectory() as d:
                got, report = tried(made(name, content, Path(d)))
                if report is None: cells = "", "", "", "refused: " + got.replace(f"{d}{os.sep}", "").replace("|", "/")
                else:
                    files = ", ".join(f"{n} {k}" for k, n in report.read.items())
                    cells = files, len(got), sum(len(tok.encode(t).ids) for t in got), "; ".join(report.lines()[1:]).replace(f"{d}{os.sep}", "")
                yield f"| {name}{of} | " + " | ".join(map(str, cells)) + " |"

if __name__ == "__main__": print(*rows(), sep="\n")
