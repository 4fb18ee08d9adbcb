"""The commands that pages show, and what they print. `python tests/doc_commands.py [pages]` runs the commands of the Train section in a
terminal of 100 columns and writes what they print into the blocks below them.

A block of `bash` or `sh` holds commands. A block of `text` right after it is what they print, where a line `...` stands for any
lines. Commands that can't run on a CPU alone are marked by a class of `WHY_NOT`; blocks of `{.text .message}` are messages of the
package, on whatever machine they come."""
import os, re, shlex, shutil, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch
from llm_speedrun import cli, plugins
from llm_speedrun.io_utils import cache_dir
from helpers.tiny_runs import texts
from helpers.timeouts import TIMEOUT

ROOT = Path(__file__).resolve().parent.parent
WHY_NOT = {"needs-gpu", "needs-network", "takes-hours"}
FENCE = re.compile(r"^(```+)[ ]*(\{[^}\n]*\}|\w*)[ ]*\n(.*?)^\1[ ]*$", re.M | re.S)

class Block:
    "A fenced block of a page"
    def __init__(self, match):
        words = match[2].strip("{}").split()
        self.classes = {w.lstrip(".") for w in words if "=" not in w}
        self.body, self.span = match[3], match.span(3)
        self.file = (re.search(r'filename="([^"]+)"', match[2]) or [None, None])[1] # that holds the body
    @property
    def is_shell(self): return bool(self.classes & {"bash", "sh"})
    @property
    def is_message(self): return self.classes == {"text", "message"}
    @property
    def is_output(self): return self.classes == {"text"}
    @property
    def runs(self): return self.is_shell and not self.classes & WHY_NOT

def blocks(md): return [Block(m) for m in FENCE.finditer(md)]

def write_files(md, folder):
    "Write the files that a page shows"
    for b in blocks(md):
        if b.file: (folder/b.file).write_text(b.body, encoding="utf-8")

def pairs(md):
    "Pairs of a block of commands and the block with what they print, or None"
    found = blocks(md)
    for a, b in zip(found, [*found[1:], None]):
        if a.is_shell: yield a, b if b and b.is_output else None

def train_pages(): return sorted([*(ROOT/"nbs/site/_build/train").glob("*.qmd"), *hand_written()])

def hand_written():
    "Those in nbs/site/train/ that no template makes"
    made = {p.name for p in (ROOT/"nbs/site/_build/train").glob("*.qmd")}
    return [p for p in (ROOT/"nbs/site/train").glob("*.qmd") if p.name not in made]

# --- what two runs have in common ---

def told(text):
    "What stays on the screen, as words: no progress bars, and not what is printed in a first run or a later one alone, or by a profiler"
    lines = [line.rsplit("\r", 1)[-1] for line in text.splitlines()]
    return [line for line in lines if not re.match(r"Tokenizing |read [\d,]+ files? of |left out |[\d,]+ documents?, [\d,]+ bytes|[\w -]+, as measured here on |USDT:|[\w ]+: +\d+%\||step [\d,]+ of ", line)]

def masked(text):
    "The text without what differs from run to run: numbers, sums, where lines are broken"
    text = re.sub(r"-[0-9a-f]{12}\b", "-SUM", "\n".join(told(text)))
    text = re.sub(r"\d[\d,]*(\.\d+)*(\+cpu|\+cu\d+)?(e[-+]?\d+)?", "N", text)
    text = " ".join(re.sub(r"-{3,}", "---", text).split())
    text = re.sub(r"\babout N (seconds|minutes|hours)\b", "about N TIME", text) # as busy as the machine is
    took = r"N (?:s|min N s|h N min)"
    text = re.sub(rf"{took} from start to end:(,? {took} (?:start|training|evaluations|checkpoints|samples|the rest|last checkpoint and weights|charts and report))+",
                  "PARTS", text)
    return re.sub(r"(was done after N seconds:)( [A-MO-Za-z' -]+ N,)* [A-MO-Za-z' -]+ N", r"\1 PHASES", text) # a busy machine names more of them

SAMPLE, ITS_END = "--- sample ---", "--------------"

def agrees(shown, real):
    "Whether `real` is what a page shows, with any text that a model wrote, and anything in place of `...`"
    shown, real = (re.sub(rf"(?s){SAMPLE}.*?{ITS_END}", "SAMPLE", t) for t in (shown, real))
    parts = [re.escape(masked(p)) for p in re.split(r"^\.\.\.$", shown, flags=re.M)]
    return bool(re.fullmatch(r"\s*.*?\s*".join(parts), masked(real), re.S))

# Numbers of which only the place is compared: times, versions of packages, what is free on a disk, Python's own files as a corpus
NUM = r"\d[\d,]*(?:\.\d+)*(?:\+cpu|\+cu\d+)?(?:e[-+]?\d+)?"
def patterns(*texts): return [re.compile(t.replace("N", NUM)) for t in texts]
FREE = patterns(r"N (?:s|min|h|seconds|minutes|hours|tokens/s|GiB are free)\b", r"N ms\b(?! \d)", r"\babout N", r"(?:Python|torch|triton|[\w-]+[a-z]-?\d?) N(?=,|$)(?<=\d)",
    r"stdlib-N-v?N: N (?:tokens to train on|documents), N (?:to validate|bytes of text, N bytes per token)", r"stdlib-N-vN",
    r'"(?:ms_\w+|tok_s)": N', r"lr-tokens-N-N", r"aten::mm \| [\w ]+ \| N \| N \| N%", r"stopped after step N", r"end within N", r"\(N\) \| N \| N \| N \| N \| -")
# Numbers that PyTorch's version and the kind of CPU move a little, by `CLOSE` at most: losses, and what is counted of a model
ROUGH = patterns(r"loss(?:es)?(?: is|\":)? N(?: and N)?", r"bigram model: N", r"(?<![\d.])\d+\.\d{4}(?![\d.])", r"\| N (?=\| N \| N \| N \| - \|)", r"(?<![\d.])\d+\.\d{3}(?= \|| ms \d)",
                 r"(?<![\d.])\d+\.\d{2}(?=x)")
CLOSE = .05
# What follows from the size of a step, where a test takes a sixteenth of the page's
SIZED = patterns(r"N x N (?:x N )?sequences", r"\bof N tokens", r'"tokens": N', r"s, N K", r"logits by N%", r"loss(?:es)?(?: is|\":)? N(?: and N)?", r"bigram model: N", r"(?<![\d.])\d+\.\d{4}(?![\d.])")

def fixed(text, small):
    "The text in one line, with numbers that differ from run to run as `N`"
    text = re.sub(rf"(?s){SAMPLE}.*?{ITS_END}", "SAMPLE", text)
    text = " ".join(re.sub(r"-{3,}", "---", re.sub(r"-[0-9a-f]{12}\b", "-SUM", "\n".join(told(text)))).split())
    took = rf"{NUM} (?:s|min {NUM} s|h {NUM} min)"
    text = re.sub(rf"{took} from start to end:(?:,? {took} (?:start|training|evaluations|checkpoints|samples|the rest|last checkpoint and weights|charts and report))+", "PARTS", text)
    text = re.sub(rf"(was done after {NUM} seconds:)(?: [A-MO-Za-z' -]+ {NUM},)* [A-MO-Za-z' -]+ {NUM}", r"\1 PHASES", text)
    for p in [*SIZED*small, *FREE]: text = p.sub(lambda m: re.sub(rf"(?<!\w){NUM}", "N", m[0]), text)
    return text

def as_number(text): return float(text.replace(",", ""))

def other_numbers(shown, real, small=False): # whether steps of the run were smaller
    """What a page's numbers say that a run's don't, of which `agrees` says whether the words are the same; '' for nothing. All are compared exactly but
    those of `FREE`, and those of `ROUGH` up to `CLOSE`"""
    shown, real = (fixed(t, small) for t in (re.sub(r"(?m)^\.\.\.$", "DOTS", shown), real))
    marked = shown
    for p in ROUGH: marked = p.sub(lambda m: re.sub(rf"(?<![\w«]){NUM}", r"«\g<0>»", m[0]), marked)
    expected = re.findall("«(.*?)»", marked)
    pattern = re.escape(re.sub("«.*?»", "ROUGH", marked)).replace("ROUGH", f"({NUM})")
    m = re.fullmatch(re.sub(r"(?:\\ )?DOTS(?:\\ )?", r"\\s*.*?\\s*", pattern), real)
    if not m: return f"the page has\n{shown}\nand the run printed\n{real}"
    return "".join(f"{a} on the page and {b} in the run\n" for a, b in zip(expected, m.groups()) if abs(as_number(a) - as_number(b)) > CLOSE*abs(as_number(a)))

def renewed(shown, real):
    "The text of the block, with today's numbers"
    lines = told(real)
    if not agrees(shown, real): return "\n".join(lines).strip("\n") + "\n"
    start, res, written = 0, [], False # where we are in `lines`, and whether it is in a text that a model wrote
    for line in shown.splitlines():
        like = masked(line) # empty where only some runs print it: such a line stays
        at = start if written else next((i for i in range(start, len(lines)) if like and masked(lines[i]) == like), None)
        written = (written or line == SAMPLE) and line != "..."
        if line in ("...", "") or at is None: res.append(line)
        else: res.append(lines[at]); start = at + 1
    return "\n".join(res) + "\n"

# --- running ---

def commands(body):
    "The words of each command in a block"
    for line in re.sub(r"\\\n\s*", " ", body).splitlines():
        lex = shlex.shlex(line, posix=True, punctuation_chars=True)
        lex.whitespace_split = True
        words, file = [], False # that comes next, after `>`
        for w in [*lex, ";"]:
            if set(w) <= set("<>&"): file = "<" in w or ">" in w
            if set(w) <= set(";|&()<>"):
                if words and not file: yield words; words = []
            elif file: file = False
            else: words.append(w)

def environment(folder):
    "Of a process that runs in `folder`"
    path = os.pathsep.join([str(folder/"bin"), str(Path(sys.executable).parent), os.environ["PATH"]]) # a test puts programs of its own into bin
    return os.environ | dict(COLUMNS="100", PATH=path, PYTHONPATH=str(ROOT), PYTHONIOENCODING="utf-8", OMP_NUM_THREADS="1",
                             LLM_SPEEDRUN_CACHE=str(folder/"cache"), CUDA_VISIBLE_DEVICES="", MPLBACKEND="Agg")

def in_a_shell(body, folder):
    "What the block prints, on both streams"
    return subprocess.run(["bash", "-c", body], cwd=folder, env=environment(folder), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, encoding="utf-8", timeout=TIMEOUT).stdout

def needs_a_shell(body):
    "Whether it is more than commands of ours"
    return any(not words[0].startswith("speedrun_") for words in commands(body)) or bool(re.search(r"[|&<>]", body))

def in_this_process(body, folder):
    "The same for a block of our commands alone, in this process, which has loaded PyTorch already"
    before, said = os.getcwd(), StringIO()
    os.chdir(folder)
    try:
        with patch.dict(os.environ, environment(folder)), redirect_stdout(said), redirect_stderr(said):
            for name, *args in commands(body):
                try: getattr(cli, name)(args)
                except SystemExit: pass
    finally:
        os.chdir(before)
        for spec in [*plugins.LOADED]: plugins.forget_plugin(spec) # another process wouldn't know it either
    return said.getvalue()

def printed_by(body, folder): return (in_a_shell if needs_a_shell(body) else in_this_process)(body, folder)

READY = """
speedrun_data --data my_texts --out tokens
speedrun_train --data tokens --model tiny --rungs naive --steps 20 --num_evals 1 --name mine
"""

def made_ready(folder):
    "What the pages take for granted: `my_texts/`, its tokens in `tokens/`, and a short finished run on them, `runs/mine`"
    texts(folder/"my_texts")
    (folder/"cache").mkdir()
    for corpus in cache_dir().glob("stdlib-*"): (folder/"cache"/corpus.name).symlink_to(corpus) # some seconds of tokenizing
    said = in_this_process(READY, folder)
    assert (folder/"runs/mine/result.json").exists(), said
    return folder

def renew(path, ready):
    "Run a page's commands in a copy of `ready`, and write what they print into the page"
    folder = ready.with_name(path.stem)
    shutil.copytree(ready, folder, symlinks=True)
    md, at, res = path.read_text(encoding="utf-8"), 0, ""
    write_files(md, folder)
    for shell, output in pairs(md):
        if not shell.runs: continue
        real = in_a_shell(shell.body, folder)
        if not output: print(f"{path.name}: {shell.body}{real}"); continue
        if not agrees(output.body, real): print(f"{path.name}: new output of\n{shell.body}")
        res += md[at:output.span[0]] + renewed(output.body, real)
        at = output.span[1]
    path.write_text(res + md[at:], encoding="utf-8")

if __name__ == "__main__":
    from tempfile import TemporaryDirectory
    with TemporaryDirectory() as tmp:
        (ready := Path(tmp)/"ready").mkdir()
        made_ready(ready)
        for path in train_pages():
            if len(sys.argv) == 1 or path.stem in sys.argv[1:]: renew(path, ready)
