"Pages of the reference, each from the code that it describes."
import ast, importlib, inspect, io, json, os, re, textwrap, tokenize
from configparser import ConfigParser
from dataclasses import MISSING, fields
from typing import get_origin
from unittest.mock import patch
import msgspec, torch
from fastcore.docments import docments
from llm_speedrun import choices, model_config, pretrained, rung_registry
from llm_speedrun.data import corpus
from llm_speedrun.io_utils import lookup
from llm_speedrun.measure import KEYS, fmt, make_record, rung_names
from llm_speedrun.runs import Run, build
from llm_speedrun.rung_registry import RUNGS, STAGES, RungSpec, rung_options
from llm_speedrun.checkpoint import format as checkpoint
from llm_speedrun.train import autotune, callbacks, checkpointer, config, metrics, presets, run_dir, trainer
from llm_speedrun.data import loader, prepare_data
from gpus import as_if, find_all_rungs
from measured import sources, times
from templating import code, escaped, page
from procs import slug
from records import Fit, all_records

def settings(root):
    "The package's facts, from settings.ini"
    c = ConfigParser(interpolation=None)
    c.read(root/"settings.ini", encoding="utf-8")
    return c["DEFAULT"]

def first_sentence(f): return (" ".join((inspect.getdoc(f) or "").split()) + " ").split(". ")[0].strip()

# --- commands and options ---

HELP_WIDTH = "100" # columns

def commands(root):
    "Name -> function, of all commands in settings.ini"
    scripts = [line.split("=") for line in settings(root)["console_scripts"].split()]
    found = {name: at.split(":") for name, at in scripts}
    return {name: getattr(importlib.import_module(module), f) for name, (module, f) in found.items()}

def help_of(name, f):
    "What `NAME --help` prints"
    with patch.dict(os.environ, COLUMNS=HELP_WIDTH, NO_COLOR="1"):
        return config.make_parser(f.config, name, f.__doc__).format_help()

@page("reference/commands.qmd")
def commands_page(root):
    about = lambda f: escaped(" ".join(f.__doc__.split()))
    rows = [[f"[`{k}`](#{k})", about(f)] for k, f in commands(root).items()]
    return dict(every=rows, commands={k: help_of(k, f) for k, f in commands(root).items()}, width=HELP_WIDTH)

def flag(o):
    "How a command line gives an option, a `config.OptionSpec`"
    if o.default is MISSING: return o.name.upper()
    if o.base is bool: return f"--{o.name} --no-{o.name}"
    return f"--{o.name} " + {int: "N", float: "X", str: "TEXT"}[o.base]

def default_of(o):
    if o.default is MISSING: return "must be given"
    if o.default == "": return ""
    return f"`{json.dumps(o.default)}`" if isinstance(o.default, bool) else f"`{o.default}`"

def option_row(o):
    about = re.sub(r"(?<![\w-])(--[\w-]+)", r"`\1`", o.help.replace("*", r"\*"))
    return [f"`{o.name}`", f"`{flag(o)}`", config.describe_type(o.kind), default_of(o), about]

def option_groups(options):
    "Group -> rows of a table"
    res = {}
    for o in config.visible_specs(options): res.setdefault(o.group, []).append(option_row(o))
    return res

@page("reference/options.qmd")
def options_page(root):
    classes = {} # of options -> the commands that take them
    for name, f in commands(root).items(): classes.setdefault(f.config, []).append(name)
    facts = [dict(name=c.__name__, commands=names, about=first_sentence(c), groups=option_groups(c))
             for c, names in classes.items()]
    return dict(classes=facts, lengths=config.LENGTHS)

# --- rungs ---

def all_rungs():
    "All rungs by name, in the order in which they are applied"
    find_all_rungs()
    return dict(sorted(RUNGS.items(), key=lambda r: (STAGES.index(r[1].stage), notebook_of(r[1].__module__))))

OLD, NEW = (6, 1), (9, 0) # below what any rung asks for, and Hopper

def needs_of(r):
    "What a rung needs of a machine, in its own words, lists of a few"
    with as_if(OLD): old = r.needs().split(", and this GPU has")[0]
    with as_if(NEW, packages=()): bare = r.needs()
    missing = r".*?(?:it needs (\S+), which|, and (\S+)) is not installed: (.+)"
    bare = re.sub(missing, r"needs \1\2 (`\3`)", bare)
    return [w for w in (old, bare) if w]

PARTS = dict(
    heads="norm, Q, K, V and RoPE (`heads`)", attend="attention (`attend`)",
    project="attention's output (`project`)", feed="the MLP (`feed`)", layer="how a block is run (`layer`)",
    last_norm="the last norm (`last_norm`)", embedding="the class of the embedding", model_loss="the loss (`model.loss`)",
    linear="the class of the linear layers", weights="the weights' type",
    loss="the call of the model (`Run.loss`)", optimizer="the optimizer",
    sync="what brings several processes together (`Run.sync`)", backward="the backward pass", scaler="the gradient scaler",
    fmt="the format of matrix products", step_contexts="a setting around the step",
    forward_contexts="a setting around the forward pass", checks="checks before the update",
    releases="what can be dropped and made again", stateful="state that a checkpoint keeps")

def parts_of(run):
    "What a `Run` is made of, by the names in `PARTS`"
    m, block = run.model, run.model.layers[0]
    own = {f.name: getattr(run, f.name) for f in fields(Run) if f.name in PARTS}
    parts = {k: getattr(block, k) for k in ("heads", "attend", "project", "feed", "layer")}
    types = dict(weights={p.dtype for p in m.parameters()}, linear={type(x) for x in block.modules()})
    return own | parts | types | dict(last_norm=m.last_norm, model_loss=m.loss,
                                embedding=type(m.embed_tokens))

def required(r):
    "What it builds on, and what that builds on"
    return [name for k in r.requires for name in (*required(RUNGS[k]), k)]

def below(name):
    "Rungs to apply before this one, so that it can do all that it does"
    r = RUNGS[name]
    wanted = ["bf16", *required(r), *(k for k in r.after if not RUNGS[k].gpu_only)]
    kept = [name]
    for k in wanted: # of two that exclude each other the first
        if k not in kept and not any(presets.excludes_each_other(RungSpec(k), RungSpec(o)) for o in kept): kept.append(k)
    return kept[1:]

def replaced(name):
    "What the rung replaces: seen by applying it to a small run, in words"
    with patch.object(torch.cuda, "is_available", lambda: False):
        before = build(model_config.workload("tiny"), below(name), "cpu")
        a, b = parts_of(before), parts_of(RUNGS[name](before))
    return [PARTS[k] for k in PARTS if a[k] is not b[k] and a[k] != b[k]]

def notebook_of(module):
    "The notebook that a module is exported from, below nbs, such as 2_ladder/19_fused_fp8"
    return re.search(r"File to edit: \S*?nbs/(\S+)\.ipynb", inspect.getsource(importlib.import_module(module)))[1]

def rung_records(name, records):
    "Rows of a table: where the rung was measured over the list below it"
    found = [r for r in records if r["rung"] == name and r.get("before") and r.get("rungs_before") is not None
             and name in rung_names(r["rungs"])]
    return [[r["workload"], f"{r['batch']} × {r['seq']}", f"`{r['before']}`", times(r["predicted_ratio"]),
             times(r["ratio"]), fmt(r["peak_gib"], ".1f"), r["gpu"], r["date"]] for r in found]

def rung_facts(r, records):
    "What the page says of a rung"
    name, links = r.__name__, lambda names: ", ".join(f"[`{k}`](#{slug(k)})" for k in names)
    said, both = docments(r, returns=False), lambda k: k in r.excludes or name in RUNGS[k].excludes
    about = " ".join(inspect.getdoc(r).split()).split(" Raises `")[0]
    return dict(name=name, first=first_sentence(r), about=about, stage=r.stage, replaces=replaced(name),
                needs=needs_of(r), gpu_only=r.gpu_only, requires=links(r.requires), after=links(r.after),
                excludes=links(filter(both, RUNGS)), chooses=bool(r.choose),
                notebook=notebook_of(r.__module__), records=rung_records(name, records),
                options=[[f"`{k}`", code(rung_registry.option_text(v)), (said.get(k) or "").strip()]
                         for k, v in rung_options(r).items()])

@page("reference/rungs.qmd")
def rungs_page(root):
    records = all_records(root)
    facts = [rung_facts(r, records) for r in all_rungs().values()]
    every = [[f"[`{f['name']}`](#{slug(f['name'])})", f["stage"], escaped(f["first"]),
              f"[{f['notebook'].rpartition('/')[2]}](../../{f['notebook']}.ipynb)"] for f in facts]
    named = [[f"`{k}`", ", ".join(map(code, v.split())) or "none"] for k, v in presets.PRESETS.items()]
    return dict(stages=STAGES, every=every, rungs=facts, presets=named, records=records, recorded=presets.RECORDED,
                narrowest=presets.NARROWEST, break_even=[*map(code, presets.BREAK_EVEN)])

# --- file formats ---

def comments(cls):
    "The comment on each field's line"
    source, res = textwrap.dedent(inspect.getsource(cls)), {}
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        m = t.type == tokenize.COMMENT and re.match(r"\s*(\w+)\s*:", t.line)
        if m: res[m[1]] = t.string.lstrip("# ")
    return res

KINDS = dict(integer="whole number", number="number", string="text", boolean="true or false", null="null",
             array="list", object="object")

def in_words(s):
    "A JSON schema in words"
    if "$ref" in s: return f"`{s['$ref'].split('/')[-1]}`"
    if "anyOf" in s: return " or ".join(map(in_words, s["anyOf"]))
    if "enum" in s: return " or ".join(f"`{v}`" for v in s["enum"])
    res = KINDS.get(s.get("type"), "anything")
    if inner := s.get("items") or s.get("additionalProperties"): return f"{res} of {in_words(inner)}"
    low, high = s.get("minimum"), s.get("exclusiveMaximum", s.get("maximum"))
    if low is not None: res += f" from {low:,}"
    if high is not None and high < 2**53: res += f" to {'below ' * ('exclusiveMaximum' in s)}{high:,}"
    return res

def fields_of(cls):
    "Rows of a table of a struct's or a dataclass's fields: name, type, default, comment"
    (_,), defs = msgspec.json.schema_components([cls])
    s, said = defs[cls.__name__], comments(cls)
    for name, kind in s["properties"].items():
        default = "" if name in s.get("required", ()) else "may be missing"
        if "default" in kind: default = f"`{json.dumps(kind['default']):.20}`"
        yield [f"`{name}`", in_words(kind), default, said.get(name, "")]

def struct(cls):
    "What the page says of a type"
    return dict(about=inspect.getdoc(cls).split("\n")[0], rows=list(fields_of(cls)))

# What has no comment in the code is explained here; a key or a file that isn't is an error.
ROW = dict( # of `metrics.jsonl` and `samples.jsonl`
    step="the optimizer step", loss="training loss of the step, nats a token", lr="learning rate",
    tok_s="tokens a second", tokens="tokens of all steps so far", grad_norm="norm of the gradients before clipping", val_loss="validation loss",
    val_loss_short="validation loss of sequences as short as the last step's, where a recipe shortens them", val_seq_short="their length",
    stopped="only a stop is the reason for this row, and resuming removes it",
    text="what the model wrote", event="what went wrong, such as a step that was skipped")

LAST = dict( # in the last row of ten; names in capitals stand for several
    train_s="seconds of training so far", lr_ROLE="learning rate of the weights of a role",
    mfu="model FLOPs utilization: attention counted causal and of whole sequences, also while a recipe cuts them, against the GPU's dense BF16 rate, also with FP8",
    grad_norm_ROLE="norm of the gradients of a role's weights, before clipping: `embed`, `head`, `attention`, `mlp`, `vector` (RMSNorm weights)",
    update_norm_ROLE="norm of the change that the update made to a role's weights, if the GPU has room to copy them; not with `bf16_weights:rounding=master`",
    ms_telemetry="milliseconds of computing these norms, in the same steps as the phases", loss_scale="with `fp16`: the factor by which the loss is scaled",
    fp8_clipped="with `fp8`: number of tensors in all earlier steps whose largest value was out of range",
    fp8_clipped_KIND="the same for matmul `inputs`, `weights` and `grads`",
    fp8_range_KIND="the largest value as a fraction of the range that its scale allows; above 1 it was clipped",
    rank_ms="milliseconds of the forward pass, of each process", momentum="as the recipe sets it", weight_decay="likewise")

def row_keys():
    "The keys of the rows that a run writes, from the source of what writes them"
    calls = [n for m in (trainer, metrics, callbacks) for n in ast.walk(ast.parse(inspect.getsource(m))) if isinstance(n, ast.Call)
             and getattr(n.func, "id", "") == "dict" and n.keywords and n.keywords[0].arg in ("step", "val_loss_short")]
    return list(dict.fromkeys(k.arg for n in calls for k in n.keywords if k.arg))

def metric_rows():
    "The keys of a row of metrics, and what they mean"
    known = {k: lookup(ROW, k, "key of a row with an explanation in reference.py") for k in row_keys()}
    source = inspect.getsource(metrics)
    comment = lambda k: re.search(rf"\b{k}=.*?# (.*)", source)
    said = {k: m[1] if (m := comment(k)) else "as the driver says" for k in metrics.GPU_STATS}
    phases = {f"ms_{k}": f"milliseconds of the phase `{k}`, in some steps" for k in metrics.PHASES}
    return [[f"`{k}`", v] for k, v in (known | LAST | phases | said).items()]

FILES = { # of a run
    "config.json": "the options in force, the model's shape, versions",
    "metrics.jsonl": "a row for each step, below", "model.safetensors": "the weights",
    "tokenizer.json": "the tokenizer", "tokenizer_config.json": "its end token, where that isn't `<|endoftext|>`",
    "sample.txt": "a text at the end",
    "ladder.json": "what each rung gains, with `--ladder`", "samples.jsonl": "texts during the run",
    "result.json": "how the run ended", "loss.png": "the loss curve",
    "evals.json": "scores of `speedrun_eval`", "report.html": "the page of `speedrun_report`", "profile.json.gz": "a trace of some steps",
    "profile.md": "that trace as a table", "profile_kinds.json": "its milliseconds of a step by kind of operation",
    "prediction.json": "what a step was predicted to take on its GPU, by kind of operation", "checkpoints": "a folder for each checkpoint",
    "logs": "of several processes: a log of each, and where one stood that hung",
    "bad_batch.safetensors": "tokens of the batch at which a run gave up",
    "tensorboard": "with `--loggers tensorboard`", "wandb": "with `--loggers wandb`"}

def record_rows():
    "The keys of a record, from what makes it"
    said = docments(make_record, returns=False)
    own = dict(workload="name of the model's shape", dtype="format of most FLOPs", tok_s="tokens a second",
               ms="milliseconds a step, median", ms_p20="20th percentile", ms_p80="80th percentile",
               mfu_full="MFU, attention counted in full", peak_gib="most GPU memory in tensors, GiB",
               mfu_causal="MFU, the unmasked half of attention counted",
               warmup_s="seconds before the step was warm", notebook="what measured it", gpu="the GPU's name",
               torch="version", triton="version", date="day")
    return [[f"`{k}`", own.get(k) or said.get(k) or lookup(own, k, "key of a record")] for k in KEYS]

def files_of_a_run():
    "What the trainer leaves in a run's folder"
    return [[f"`{k}`", lookup(FILES, k, "file of a run with an explanation in nbs/site/_build/reference.py")]
            for k in (*run_dir.FILES, *run_dir.FOLDERS)]

@page("reference/formats.qmd")
def formats_page(root):
    doc = " ".join(inspect.getdoc(corpus.write_shards).split())
    types = (corpus.Meta, corpus.TextSummary, prepare_data.Journal, checkpoint.Manifest, checkpoint.FileSum, checkpoint.CheckpointMetadata, checkpointer.State,
             checkpoint.OptimizerState, loader.Position, pretrained.Record, model_config.GPTConfig, run_dir.Result,
             choices.Choice, autotune.ChosenList, autotune.ResolvedRungs, autotune.RememberedTrial, autotune.Trial, pretrained.Qwen3, pretrained.Index, Fit)
    return dict(shards=doc.split(" Raises")[0], run=files_of_a_run(), metrics=metric_rows(),
                records=record_rows(), version=checkpoint.VERSION, manifest=checkpoint.MANIFEST,
                structs={c.__name__: struct(c) for c in types})

# --- names ---

def short_doc(module, name):
    """The first sentence of a definition's docstring; of a constant its value, if that is short; of a type
    that is made of others what it takes"""
    o = getattr(importlib.import_module(module), name)
    if isinstance(o, (str, int, float, tuple)) and len(repr(o)) < 60: return f"`{o!r}`"
    if get_origin(o):
        takes = in_words(msgspec.json.schema_components([o])[0][0])
        return f"a type: {takes if len(takes) < 60 else 'values of JSON'}"
    of_class = o.__doc__ == type(o).__doc__ # which tells something if the class is ours
    own = callable(o) and (not of_class or type(o).__module__.startswith("llm_speedrun"))
    doc = " ".join((o.__doc__ or "").split()) if own else ""
    first = doc.split(". ")[0]
    return first if first.endswith("..") else first.removesuffix(".")

def modules(root):
    "Modules with what they export: notebook, rows of name, link, docstring"
    from llm_speedrun._modidx import d
    for module, syms in d["syms"].items():
        if not syms: continue # a notebook that exports nothing
        m, book = importlib.import_module(module), notebook_of(module)
        at = {k.removeprefix(f"{module}."): v[0].partition("#")[2] for k, v in syms.items()}
        link = lambda k: f"[`{k}`](../../{book}.ipynb{'#' + at[k] if k in at else ''})"
        rows = [[link(k), escaped(short_doc(module, k))] for k in sorted(m.__all__, key=str.lower)]
        yield dict(name=module.removeprefix("llm_speedrun."), about=m.__doc__, notebook=book, rows=rows)


@page("reference/api.qmd")
def api_page(root): return dict(modules=list(modules(root)))

@page("reference/glossary.qmd")
def glossary_page(root):
    "Words and what they mean, from the headings below the glossary's in the lesson on the GPU"
    text = sources(root/"nbs/1_start/01_gpu.ipynb", "markdown")
    start = next(i for i, t in enumerate(text) if t.startswith("## Glossary"))
    found = [re.fullmatch(r"### (.+?)\n(.*)", t, re.S) for t in text[start + 1:]]
    words = sorted(([m[1], m[2].strip()] for m in found if m), key=lambda w: w[0].lower())
    links = lambda t: re.sub(r"\]\(\.\./(?=\w+/\w+\.ipynb)", "](../../", re.sub(r"\]\((#|\w+\.ipynb)", lambda m: f"](../../1_start/{'01_gpu.ipynb' * m[1].startswith('#')}{m[1]}", t))
    return dict(words=[dict(word=w, anchor=slug(w), text=links(t)) for w, t in words])
