"""Commands that readers are shown: every option is understood, every target and file exists, and those of the Train section print what
stands below them."""
import ast, json, os, re, shlex, shutil, sys
from contextlib import nullcontext
from functools import cache
from unittest.mock import patch
import pytest, torch
import torch.distributed.run as torchrun
import build_pages, train_pages
from llm_speedrun.io_utils import InputError
from llm_speedrun.model_config import workload
from llm_speedrun.plugins import LOADED, forget_plugin, import_plugins
from llm_speedrun.train import config, resolve, train_step
from llm_speedrun.tools import doctor
from llm_speedrun.train.presets import parse_rungs
from helpers.prose import measured_numbers
from helpers.tiny_runs import draw_less
from doc_commands import ROOT, agrees, blocks, commands, made_ready, other_numbers, pairs, printed_by, renewed, train_pages as pages_of_train, write_files
from test_cli import COMMANDS, messages, parser

PAGES = pages_of_train()
OTHERS = [ROOT/"README.md", ROOT/"nbs/index.ipynb", *(p for p in sorted((ROOT/"nbs").rglob("*.qmd"))
          if "train" not in p.parts and ".ipynb_checkpoints" not in p.parts)]
NAME = lambda p: "/".join(p.relative_to(ROOT).parts)

def text_of(path):
    "Its markdown; of a template that another test fills, the lines without anything to fill in"
    text = path.read_text(encoding="utf-8")
    if "templates" in path.parts: text = re.sub(r"(?m)^.*(\{\{|\{%).*\n?", "", text)
    if path.suffix != ".ipynb": return text
    return "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")

# --- what is shown is understood ---

MAKE = re.findall(r"^([a-z]+):", (ROOT/"Makefile").read_text(encoding="utf-8"), re.M)
VARIABLES = re.findall(r"^([A-Z_]+) +[?:]?=", (ROOT/"Makefile").read_text(encoding="utf-8"), re.M)
PROGRAMS = set("git cd source pip ls tail head cat grep until [ do done sleep kill wait fi echo python jupyter".split())

def check_options(name, words):
    "Read the words as the command does. Raises what it would"
    f = COMMANDS[name]
    got = config.parse_args(parser(f.config), words)
    got.pop("config", None) # a file that isn't there
    c, _ = config.resolve_options(f.config, got)
    import_plugins(getattr(c, "plugin", ""))
    if getattr(c, "rungs", "list") not in ("list", ""): parse_rungs(c.rungs)
    if getattr(c, "model", ""): workload(c.model)

def wrong(words):
    "What is wrong with a command, in words; nothing if it could be given"
    while words and re.match(r"[A-Z_]+=|(then|else|if|do)$", words[0]): words = words[1:]
    if not words: return
    name, args = words[0].rsplit("/", 1)[-1], words[1:]
    if name in COMMANDS:
        try: return check_options(name, args)
        except InputError as e: return str(e)
        except SystemExit: return # --help
    if name == "torchrun": # and what it starts
        try: started = torchrun.parse_args(args)
        except SystemExit: return f"torchrun doesn't take {shlex.join(args)}"
        return wrong([started.training_script, *started.training_script_args])
    if name == "make":
        named = [a.partition("=")[0] for a in args]
        return next((f"make knows no {a}" for a in named if a not in (*MAKE, *VARIABLES)), None)
    if name not in PROGRAMS and name != "bash": return f"{name} is none of the programs that this test knows"
    return next((f"there is no {a}" for a in args if re.match(r"(nbs|tests|llm_speedrun)/", a) and not (ROOT/a).exists()), None)

@pytest.mark.parametrize("path", PAGES + OTHERS, ids=NAME)
def test_commands_are_understood(path, tmp_path, monkeypatch):
    write_files(text_of(path), tmp_path)
    monkeypatch.chdir(tmp_path)
    found = [(words, w) for b in blocks(text_of(path)) if b.is_shell for words in commands(b.body) if (w := wrong(words))]
    for spec in [*LOADED]: forget_plugin(spec)
    assert not found, "\n".join(f"{shlex.join(words)}: {w}" for words, w in found)

@pytest.mark.parametrize("command, part", [
    ("speedrun_train --no_such 3", "unknown option"), ("speedrun_train --stpes 3", "did you mean"), ("speedrun_train --lr x", "lr must"),
    ("speedrun_train --steps 3 --minutes 1", "each say"), ("speedrun_train --rungs flsh", "unknown rung"), ("make fast", "no fast"),
    ("speedrun_train --model 124n", "unknown model"), ("speedrun_report", "required"), ("speedrun_dokter", "none of the programs"),
    ("if A=1 speedrun_train --no_such", "unknown option"), ("bash tests/gone.sh", "no tests/gone.sh"),
    ("torchrun --nproc_per_node 2 --no-python speedrun_train --stpes 3", "did you mean"), ("torchrun --nproc_per_node 2 --x 3 speedrun_train", "doesn't take"),
    ("make speedrun FLAVOUR=x", "no FLAVOUR"), ("ls runs && speedrun_export", "required")])
def test_wrong_commands_are_found(command, part): assert part in " ".join(w for words in commands(command) if (w := wrong(words)))

@pytest.mark.parametrize("command", ["speedrun_train --lr 1e-3 --rungs fp8:grad=e4m3 # why", "make speedrun ARGS='--help'", "speedrun_report runs/a",
    "speedrun_train --print_config > a.toml", "A=1 speedrun_train --no-stream &", "speedrun_train \\\n  --steps 3", "speedrun_train --rungs list"])
def test_right_commands_are_not(command): assert not [w for words in commands(command) if (w := wrong(words))]

# --- messages are those of the package ---

def texts_of_messages():
    "The package's messages as lists of what stands around the values that are filled in"
    for path in (ROOT/"llm_speedrun").rglob("*.py"):
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            if len(text.replace("{}", "")) >= 10: yield text.split("{}")

def said_by(message, known):
    "Whether the package says this: a message with short values filled in, or with other messages"
    for parts in known:
        if not all(p in message for p in parts): continue
        if m := re.fullmatch("(.*?)".join(map(re.escape, parts)), message, re.S):
            if all(len(g) < 40 or said_by(g, known) for g in m.groups()): return True
    return False

MARK = re.compile(r"^(error: |note: |(ok|note|problem) +\w+ +)")

def test_messages_are_the_packages():
    known = [*texts_of_messages()]
    found = [(p.name, b.body) for p in PAGES for b in blocks(text_of(p)) if b.is_message]
    wrong = [m for m in found if not said_by(MARK.sub("", m[1].strip()), known)]
    assert len(found) > 10 and not wrong, wrong
    for other in ("runs/mine exists already, and is left alone: choose another --name, or pass --overwrite", "no room on this device"):
        assert not said_by(other, known), other

def words_of_text(text): return [w.strip(":,.!;") for w in text.split()]

@cache
def pattern_of(words):
    "A regular expression of `stands_in`, and the words that it must have"
    free = lambda w: "{}" in w or "…" in w or re.fullmatch(r"[\d.,]+|'.*'", w)
    pattern = "".join(r"(\S+ ){0,4}?" if free(w) else f"({re.escape(w)}|" + r"\S*\{\}\S*) " for w in words)
    return re.compile(f"(^| ){pattern}"), [w for w in words if not free(w)]

def stands_in(words, template):
    "Whether the words come one after another in the template, where `{}`, `…`, numbers and names in quotes are any few words"
    pattern, literal = pattern_of(tuple(words))
    return 2*sum(w in template for w in literal) > len(literal) and bool(pattern.search(" ".join(template) + " "))

def quoted(md):
    "Messages that stand in the text: code of several words that is no command"
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"(?ms)^```.*?^```", "", md))
    return [q for q in spans if len(q.split()) > 2 and not re.match(r"speedrun_|-|git |iconv |jq |[A-Z_]+=|\{\{", q) and "--" not in q]

def test_quoted_messages_are_the_packages():
    templates = [words_of_text("{}".join(parts)) for parts in texts_of_messages()]
    def told(message): # one that stands for a value of another is told by both
        return all(any(stands_in(words_of_text(part), t) for t in templates) for part in message.split(": ") if len(part.split()) > 2)
    found = [(p.name, q) for p in PAGES for q in quoted(text_of(p))]
    wrong = [f for f in found if not told(f[1])]
    assert len(found) > 8 and not wrong, wrong
    for other in ("is no corpus (…) nor a file or folder here", "it has made no sense at all"): assert not told(other), other

# --- what the commands print ---

REAL_STEPS = "recipe" # a page whose losses are compared, too

def real_steps(body, page=""): return "speedrun_doctor" in body or page == REAL_STEPS

def small_steps(body, page=""):
    """Steps of 16 sequences instead of 64, where a command says nothing else: enough to tell the form of what is printed. Not for the
    doctor, whose advice depends on them, nor on the page `REAL_STEPS`"""
    if real_steps(body, page): return nullcontext()
    return patch.object(resolve, "resolve_batch_sizes", lambda c, default, dp=1, divide=resolve.resolve_batch_sizes: divide(c, default//16, dp))

SMALL_STEPS = """from llm_speedrun import cli
from llm_speedrun.train import resolve
divide = resolve.resolve_batch_sizes
resolve.resolve_batch_sizes = lambda c, default, dp=1: divide(c, default//16, dp)
cli.speedrun_train()"""

def write_program(folder):
    "A `speedrun_train` for a shell, a real process whose steps are as small"
    (folder/"bin").mkdir()
    program = folder/"bin/speedrun_train"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", SMALL_STEPS])} "$@"\n')
    program.chmod(0o755)

@pytest.fixture(autouse=True)
def once_each(monkeypatch):
    "What is timed is timed once, after one step: nobody compares how long it took. Nor does anybody look at charts"
    draw_less(monkeypatch)
    for m in (doctor, train_step):
        monkeypatch.setattr(m, "WARM_UP", 1)
        monkeypatch.setattr(m, "sample_ms", lambda f, reps, sample_ms=m.sample_ms: sample_ms(f, min(1, reps)))

@pytest.fixture(scope="module")
def ready(once, shared_folder):
    if torch.cuda.is_available(): pytest.skip("what the pages show was printed by a CPU")
    def made():
        (shared_folder/"shown").mkdir()
        with small_steps(""): return made_ready(shared_folder/"shown")
    return once("shown", made)

def test_the_exported_folder_opens_as_shown(ready, tmp_path, monkeypatch, capsys):
    "The Python of the page about exporting"
    pytest.importorskip("transformers")
    shutil.copytree(ready, tmp_path/"here", symlinks=True)
    monkeypatch.chdir(tmp_path/"here")
    code, _ = (b.body for b in blocks(text_of(ROOT/"nbs/site/train/export.qmd")) if "python" in b.classes) # the second one is test_export's
    printed_by("speedrun_export runs/mine", tmp_path/"here")
    exec(compile(code, "export.qmd", "exec"), {})
    assert "12 times" in capsys.readouterr().out

@pytest.mark.skipif(os.name != "posix", reason="the pages show commands of a POSIX shell")
@pytest.mark.parametrize("path", [p for p in PAGES if any(s.runs for s, _ in pairs(text_of(p)))], ids=lambda p: p.stem)
def test_commands_print_what_is_shown(path, ready, tmp_path):
    folder = tmp_path/"here"
    shutil.copytree(ready, folder, symlinks=True)
    write_files(text_of(path), folder)
    write_program(folder)
    for shell, output in pairs(text_of(path)):
        assert not output or shell.runs, f"an output that nobody compares:\n{shell.body}"
        if not shell.runs: continue
        with small_steps(shell.body, path.stem): said = printed_by(shell.body, folder)
        assert "Traceback" not in said, said
        passes = re.compile(r"passed over the data (\S+) times") # the same on any machine
        if output and passes.search(output.body): assert passes.findall(output.body) == passes.findall(said)
        if output: assert agrees(output.body, said), f"{shell.body}printed\n{said}\nand the page shows\n{output.body}"
        if output: assert not (wrong := other_numbers(output.body, said, not real_steps(shell.body, path.stem))), wrong
        else: assert not re.search("^error: ", said, re.M), said

A_RUN = "12 times\n--- sample ---\nabc\n--------------\n\nloss 2.500 after 60 steps\nin runs/a-0123456789ab\n"
def test_a_busy_machine_names_more_phases():
    few, more = (f"ok start the first step was done after 3.0 seconds: {p}, the first step 0.2\nok time 20" for p in ("imports 2.3", "imports 2.3, open\n the data 0.4"))
    assert agrees(few, more) and not agrees(few, more.replace("time", "disk"))

@pytest.mark.parametrize("shown, same", [
    (A_RUN, True), (A_RUN.replace("2.5", "31.25"), True), (A_RUN.replace("abc", "d\nef"), True), (A_RUN.replace("loss 2.500 after", "loss 1,000 \n  after"), True),
    (A_RUN.replace("0123456789ab", "ffff56789abc"), True), ("12 times\n...\nloss 3 after 6 steps\n...\n", True), ("...\n", True), ("", False),
    (A_RUN.replace("loss", "gain"), False), (A_RUN + "more\n", False), ("...\nloss 3 after 6 steps\n", False), ("12 times\n", False),
    (A_RUN.replace("2.500", "nan"), False), ("...\nsteps\n...\nloss\n...\n", False)], ids=range(14))
def test_agreement(shown, same): assert agrees(shown, A_RUN) is same

COUNTS = "9 more runs of 5 steps\nvalidation loss 2.500 after 60 steps\nit took 3.1 s at 1,234 tokens/s\n| mm | 71 | 0.915 | 4.988 | 13.654 | - | x |\n4 x 16 sequences of 64\n"

@pytest.mark.parametrize("old, new, small, same", [
    ("", "", False, True), ("9 more", "8 more", False, False), ("9 more", "8 more", True, False), ("after 60", "after 61", True, False), ("2.500", "2.520", False, True),
    ("2.500", "2.700", False, False), ("2.500", "2.700", True, True), ("3.1 s", "31 s", False, True), ("1,234", "99", False, True), ("4 x 16", "4 x 1", True, True),
    ("4 x 16", "4 x 1", False, False), ("71", "72", False, True), ("71", "81", False, False), ("13.654", "13.9", False, True), ("0.915", "0.815", False, False)])
def test_which_numbers_are_compared(old, new, small, same):
    assert (other_numbers(COUNTS, COUNTS.replace(old, new), small) == "") is same
    assert (other_numbers("...\n" + COUNTS.partition("\n")[2], "8 more\n" + COUNTS.partition("\n")[2].replace(old, new), small) == "") is (same or "9 m" in old)

def test_losses_are_compared_in_their_order(): assert other_numbers("loss 2\nloss 3\n", "loss 3\nloss 2\n")

def test_a_busy_machine_takes_hours():
    long = "20,000 steps: about 2.1 hours at 10,603 tokens/s\n"
    assert agrees("20,000 steps: about 74.5 minutes at 18,334 tokens/s\n", long) and not agrees("20,000 steps: about 3 runs at 1 tokens/s\n", long)

def test_progress_bars_are_no_output():
    assert agrees("done\n", "tokenizing:   0%|   | 0/9\rtokenizing: 100%|###| 9/9\nTokenizing a (once; ...)\nstep 10 of 20 (50%): loss 3\ndone\n")

def test_a_page_is_renewed():
    assert renewed("12 times\n...\nloss 1 after 2 steps\n...\n", A_RUN) == "12 times\n...\nloss 2.500 after 60 steps\n...\n"
    assert renewed("--- sample ---\nx\n...\n--------------\n...\n", A_RUN.partition("\n")[2]).startswith("--- sample ---\nabc\n...\n--------------\n...")
    assert renewed("other\n", "new 1\n") == "new 1\n"
    assert renewed("read 40 files of 5 bytes\nloss 1\n", "\nloss 2.5\n") == "read 40 files of 5 bytes\nloss 2.5\n" # printed in a first run alone

# --- numbers ---

def test_pages_with_numbers():
    "Each template has a page, without anything left to fill in"
    pages = dict(train_pages.rendered(ROOT))
    assert pages.keys() == {p.name for p in (ROOT/"nbs/site/_build/train").glob("*.qmd")}
    for name, md in pages.items():
        assert not re.search(r"\{\{|\{%|\bNone\b|\bnan\b|Undefined", md), name
        assert md.startswith("---\ntitle: ") and train_pages.NOTE.format(name) in md

def test_pages_are_written(tmp_path):
    build_pages.write_train_pages(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path/"train").iterdir()}
    build_pages.write_train_pages(tmp_path)
    assert {p.name for p in before} == {p.name for p in (ROOT/"nbs/site/_build/train").glob("*.qmd")}
    assert before == {p: p.stat().st_mtime_ns for p in before}

EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|^---\n.*?^---\n", re.S | re.M)
ROW = re.compile(r"^\|", re.M)

@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_no_measured_number_is_typed(path):
    "Outside of blocks a number with a unit is read from a record"
    md = re.sub(r"```\{=html\}.*?^```", "", EXPRESSION.sub(" ", text_of(path)), flags=re.S | re.M)
    typed = [context for _, _, context in measured_numbers(ROW.sub("", md))]
    assert not typed, typed

def test_a_record_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="0 records"): train_pages.record(rung="warp drive")
    with pytest.raises(LookupError, match="records of"): train_pages.record(rung="fp8")

@pytest.mark.parametrize("x, text", [(778842.3, "779,000"), (4.2713, "4.27"), (21.66, "21.7"), (100., "100"), (.30139, "0.301"), (.0123456, "0.0123")])
def test_rounded(x, text): assert train_pages.rounded(x) == text
