"The generated pages say all that the code has, and follow it; a file that can't be used is an error. The examples of kernels.qmd run."
import contextlib, io, json, re, shutil, subprocess, sys
from importlib import import_module
import msgspec, pytest
from helpers.cells import NBS
from make_readme import ROOT
from helpers.tiny_runs import cache, fails, nano, options # noqa: F401: fixtures
from llm_speedrun import _modidx
from llm_speedrun.io_utils import InputError
from llm_speedrun.measure import datasheet_flops
from llm_speedrun.records import code_of
from llm_speedrun import datasheets
from llm_speedrun.roofline import Ceilings, predict_ms
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.train import config

import build_pages
build_pages.load()
import gpus, measured, records, reference, templating

GPU = {g.name: g for g in datasheets.GPUS}

@pytest.fixture(scope="module", autouse=True)
def two_sizes():
    "Two workloads for the page of GPUs: to count a step takes a second each"
    assert gpus.SIZES == ("124m", "350m", "1b")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(gpus, "SIZES", gpus.SIZES[:2])
        yield

@pytest.fixture(scope="module")
def made(processed):
    "Address -> text of each page, as `make docs` writes it"
    return {address: (processed.parent/"nbs/site"/address).read_text(encoding="utf-8") for address in templating.PAGES}

@pytest.fixture
def root(tmp_path):
    "A repository of which nothing but the measurements may be changed"
    for name in ("settings.ini", "llm_speedrun"): (tmp_path/name).symlink_to(ROOT/name)
    for p in NBS:
        at = tmp_path/p.relative_to(ROOT)
        at.parent.mkdir(parents=True, exist_ok=True); at.symlink_to(p)
    shutil.copytree(ROOT/"nbs/site/measurements", tmp_path/"nbs/site/measurements")
    (tmp_path/"nbs/site/measurements/fits.json").unlink(missing_ok=True)
    return tmp_path

def part(text, heading):
    "The section below a heading, without those of the same level"
    found = re.search(rf"^(#+) {re.escape(heading)}(?: \{{[^\n]*)?$(.*?)(?=^\1 |\Z)", text, re.M | re.S)
    assert found, f"no heading {heading!r}"
    return found[2]

# --- all is there ---

def test_every_page_is_written(made):
    assert set(made) == {*templating.PAGES} == {
        "compare.qmd", "course.qmd", "gpus.qmd", *(f"measured/{k}.qmd" for k in ("index", "claims", "compiler", "trainers", "track", "yours")),
        *(f"reference/{k}.qmd" for k in ("commands", "options", "rungs", "formats", "api", "glossary"))}
    for address, text in made.items():
        assert text.startswith('---\ntitle: "'), address
        assert "*Written " in text[-500:], address
        assert str(ROOT) not in text and " object at " not in text, address

def test_pages_are_not_committed():
    tracked = subprocess.run(["git", "ls-files", "nbs"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not {f"nbs/site/{a}" for a in templating.PAGES} & {*tracked}

@pytest.mark.parametrize("name, f", reference.commands(ROOT).items())
def test_commands_are_shown_as_they_print(made, name, f, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", reference.HELP_WIDTH)
    with pytest.raises(SystemExit) as e: f(["--help"])
    assert not e.value.code and capsys.readouterr().out in part(made["reference/commands.qmd"], name)

def test_every_option_is_there(made):
    classes = {f.config for f in reference.commands(ROOT).values()}
    assert config.TrainConfig in classes
    for c in classes:
        text, used = part(made["reference/options.qmd"], c.__name__), config.visible_specs(c)
        rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.M)
        assert [name for name, _ in rows] == [o.name for o in used]
        for (name, flag), o in zip(rows, used):
            assert name.upper() == flag or f"--{name}" in flag.split(), flag
            assert o.help.split("--")[0].replace("*", r"\*") in text

def test_every_rung_is_there(made):
    text = made["reference/rungs.qmd"]
    rungs = reference.all_rungs()
    assert len(rungs) > 15
    for name, r in rungs.items():
        about = part(text, name)
        assert f"Stage: {r.stage}. Replaces" in about and f"[{reference.notebook_of(r.__module__)}]" in about
        for other in (*r.requires, *r.after, *r.excludes): assert f"(#{other})" in about
        for option in reference.rung_options(r): assert f"| `{option}` |" in about
    assert "the optimizer" in part(text, "fused_adamw") and "the MLP (`feed`)" in part(text, "fused_ops")
    assert "attention (`attend`)" in part(text, "flash") and "`feed`" not in part(text, "flash")
    assert re.search(r"\| 124m \| 64 × 1024 \| `chunked_ce` \| [\d.]+× \| [\d.]+× \|", part(text, "fp8"))

def test_what_a_rung_needs_is_what_it_says(made):
    assert "needs compute capability 8.0." in part(made["reference/rungs.qmd"], "bf16")
    assert "pip install triton" in part(made["reference/rungs.qmd"], "fused_ops")
    assert "Machine: any." in part(made["reference/rungs.qmd"], "checkpoint")
    assert "needs Triton (`pip install triton`)" in part(made["reference/rungs.qmd"], "compile")

@pytest.mark.parametrize("text, same", [
    ("it needs A, which is not installed: pip install --pre 'a[b]'", "it needs A, which is not installed: `pip install --pre 'a[b]'`"),
    ("--all of `--all`, a_b", r"\-\-all of `--all`, a\_b"), ("it's 1-2, -1", "it's 1-2, -1")])
def test_what_markdown_would_garble(text, same): assert templating.escaped(text) == same

def test_every_exported_name_leads_to_its_definition(made):
    text, n = made["reference/api.qmd"], 0
    for module, syms in _modidx.d["syms"].items():
        for name in import_module(module).__all__ if syms else ():
            at = syms.get(f"{module}.{name}", ("#",))[0].partition("#")[2]
            assert f"[`{name}`](../../{reference.notebook_of(module)}.ipynb{'#' + at if at else ''})" in text, f"{module}.{name}"
            n += 1
    assert n > 500
    assert "dict()" not in text and "annotated type" not in text, "Python's own words about types"

def test_every_word_is_explained(made):
    cells = json.loads((ROOT/"nbs/1_start/01_gpu.ipynb").read_text(encoding="utf-8"))["cells"]
    below = "".join("".join(c["source"]) + "\n" for c in cells).split("## Glossary")[1]
    words = re.findall(r"^### (.+)$", below, re.M)
    assert {"SM", "MFU", "tensor core"} <= {*words}
    for w in words: assert part(made["reference/glossary.qmd"], w).strip()
    assert "](02_" not in made["reference/glossary.qmd"], "a link of the notebook leads nowhere from another folder"

# --- formats follow the types ---

class Example(msgspec.Struct):
    "An example. Of a struct"
    name: str # what it is called
    size: int | None = 3 # in bytes
    more: dict[str, float] = {}

def test_fields_come_from_the_type():
    assert list(reference.fields_of(Example)) == [
        ["`name`", "text", "", "what it is called"], ["`size`", "whole number or null", "`3`", "in bytes"],
        ["`more`", "object of number", "`{}`", ""]]

def test_a_new_key_of_metrics_must_be_explained(monkeypatch, made):
    for k in ("loss", "val_loss", "grad_norm", "ms_forward", "gpu_power_w"): assert f"| `{k}` |" in part(made["reference/formats.qmd"], "Metrics")
    monkeypatch.delitem(reference.ROW, "grad_norm")
    with fails(InputError, "grad_norm"): reference.metric_rows()

def test_every_key_of_a_run_is_explained(tmp_path, nano, cache):
    "Also of what is measured in some steps"
    from llm_speedrun.train.trainer import train
    known = [re.sub("ROLE|KIND", r"\\w+", row[0].strip("`")) for row in reference.metric_rows()]
    for how in (dict(rungs="bf16,flash,fused_ops,chunked_ce,fp8"), dict(rungs="fp16"), dict(recipe="normuon")):
        rows = train(options(tmp_path, steps=10, name=[*how.values()][0], **how), progress=False)[0].rows()
        wrong = {k for r in rows for k in r if not any(re.fullmatch(p, k) for p in known)}
        assert not wrong and any("update_norm_mlp" in r for r in rows), wrong

# --- measurements ---

def change(root, edit, name="nvidia-h200.json"):
    "Edit the records in a file, in place"
    path = root/"nbs/site/measurements"/name
    rows = json.loads(path.read_text(encoding="utf-8"))
    edit(rows)
    path.write_text(json.dumps(rows), encoding="utf-8")

def test_all_records_are_shown(made):
    found, text = records.by_gpu(ROOT), made["measured/index.qmd"]
    for gpu, rows in found.items():
        shown = part(text, gpu)
        for r in rows: assert f"| `{r['rung']}` |" in shown and f" {r['tok_s']:,.0f} |" in shown

@pytest.mark.parametrize("edit, said", [
    (lambda rs: rs[0].pop("tok_s"), "tok_s"), (lambda rs: rs[1].update(ratio="2"), "ratio"), (lambda rs: rs[2].update(gpu="T4"), "one GPU")])
def test_a_broken_record_is_an_error(root, edit, said):
    change(root, edit)
    for address in ("measured/index.qmd", "reference/rungs.qmd", "gpus.qmd"):
        with fails(InputError, "nvidia-h200.json", said): templating.PAGES[address](root)

def test_a_changed_record_changes_the_page(root):
    change(root, lambda rs: [r.update(ratio=7.77, tok_s=123457.) for r in rs if r["rung"] == "tf32"])
    assert "7.77×" in build_pages.written("measured/index.qmd", root) and "123,457" in build_pages.written("measured/index.qmd", root)

def test_another_gpu_has_its_own_part(root):
    rows = json.loads((root/"nbs/site/measurements/nvidia-h200.json").read_text(encoding="utf-8"))[:1]
    (root/"nbs/site/measurements/tesla-t4.json").write_text(json.dumps([r | dict(gpu="Tesla T4", notebook="speedrun_ladder") for r in rows]))
    assert "### `speedrun_ladder`" in part(build_pages.written("measured/index.qmd", root), "Tesla T4")
    assert "NVIDIA H200 and Tesla T4" in build_pages.written("measured/yours.qmd", root)
    assert "](measured/index.qmd#tesla-t4)" in part(build_pages.written("gpus.qmd", root), "T4")
    (root/"nbs/site/measurements/tesla-t4.png").write_bytes(b"")
    assert "![](../measurements/tesla-t4.png){fig-alt=" in part(build_pages.written("measured/index.qmd", root), "Tesla T4")

def test_claims_are_judged_from_the_records(root, made):
    "By a record's interval, in each guide's unit; a record without one, or of older code, is called so"
    rows = re.findall(r"^\| TF32, the step \| .*$", made["measured/claims.qmd"], re.M)
    assert len(rows) == 3 and all("| too low, no interval |" in r and "(older code)" in r for r in rows)
    def judged(**changes):
        change(root, lambda rs: [r.update(changes) for r in rs if r["rung"] == "tf32"])
        found = re.findall(r"^\| TF32, the step \| (.*?) \| \[", build_pages.written("measured/claims.qmd", root), re.M)
        return {title: rest for title, rest in (r.split(" | ", 1) for r in found)}
    F, R = "Frontier Optimizations for HYDRA Training", "Performance Optimizations Guide"
    found = judged(ratio=1.2)
    assert found[F].startswith("+10% to +30% | +20% | agree, no interval | ") and found[R].startswith("1.50× | 1.20× | too high, no interval | ")
    found = judged(ratio_p10=1.15, ratio_p90=1.25, ratio_rounds=20, code=code_of(["tf32"]), rungs=["tf32"])
    assert found[F] == "+10% to +30% | +20% (+15% to +25%) | agree | tf32 over fp32, 124m, batch 64"
    assert found[R] == "1.50× | 1.20× (1.15 to 1.25×) | too high | tf32 over fp32, 124m, batch 64"
    assert {k: v.split(" | ")[2] for k, v in judged(ratio_p90=1.6).items()} == {"Complete Optimization Guide": "too low", F: "undecided", R: "undecided"}
    assert [v.split(" | ")[2] for v in judged(ratio_rounds=19).values()] == ["too low, no interval", "agree, no interval", "too high, no interval"]
    change(root, lambda rs: rs.clear() or rs.append(dict.fromkeys(records.Shown.__struct_fields__, 1.) | dict(
        rung="x", before=None, workload="w", batch=1, seq=1, dtype="bf16", notebook="01", gpu="NVIDIA H200", driver="", torch="",
        triton="", date="2026-01-01", rungs=[], rungs_before=[], micro=1)))
    assert templating.PAGES["measured/claims.qmd"](root)["counts"][0][0] == "not measured yet"

def test_guides_are_named_by_title_and_linked(made):
    "At a commit, so that the text stays the one that was read; and no row names another guide"
    text = made["measured/claims.qmd"]
    linked = re.findall(r"^\| \[([^]]+)\]\(https://github\.com/[\w-]+/[\w-]+/blob/[0-9a-f]{40}/[\w/]+\.md\) \|", text, re.M)
    rows = re.findall(r"^\| [^|\[]+ \| ([^|]+) \| [^|]+ \| [^|]+ \| (?:agree|too|no|undecided|depends)", text, re.M)
    assert len(linked) == 5 and len(rows) > 60 and {title for r in rows for title in r.split(", ")} == {*linked}

def test_only_what_is_needed_of_a_notebook_runs(tmp_path):
    source = ["import os\na = 2\nb = a + 1", "def f(x):\n    return x*b", "b += 1\nprint('no')", "c = 1/0"]
    path = tmp_path/"a.ipynb"
    path.write_text(json.dumps(dict(cells=[dict(cell_type="code", source=s) for s in source])))
    assert measured.from_notebook(path, ["f", "b"], {})[0](2) == 8
    with pytest.raises(ZeroDivisionError): measured.from_notebook(path, ["c"], {})

def test_other_trainers_are_shown_when_they_are_measured(root):
    change(root, lambda rs: [rs.remove(r) for r in list(rs) if "in_products" in r])
    for folder in ("peers", "headline"): shutil.rmtree(root/"nbs/site/measurements"/folder)
    assert "Not measured yet" in build_pages.written("measured/trainers.qmd", root)
    first = lambda rs: dict(rs[0], rung="llm_speedrun", joules=50., parameters=124e6, in_products=1e8, source="code 1", workload="124m")
    change(root, lambda rs: rs.extend([first(rs), first(rs) | dict(rung="nanogpt", before="llm_speedrun", ratio=.5, joules=None)]))
    text = build_pages.written("measured/trainers.qmd", root)
    assert "Not measured yet" not in text and re.search(r"\| `nanogpt` \| .*\| 2.00× \|", text)

def test_both_studies_stand_beside_our_records(root, made):
    "Named and linked, from where a reader would look; every form of torch.compile, from the records; the command once `make` knows it"
    text, path = made["measured/compiler.qmd"], root/"nbs/site/measurements/peers/nvidia-h100.json"
    for n in (670, 1679): assert f"### [parameter-golf #{n}](https://github.com/openai/parameter-golf/pull/{n})" in text
    assert "](measured/compiler.qmd)" in made["compare.qmd"] and "](compiler.qmd)" in made["measured/claims.qmd"] and "](compiler.qmd)" in made["measured/trainers.qmd"]
    before = json.loads(path.read_text(encoding="utf-8"))
    forms = [r for r in before if r["rung"].startswith("compile")]
    shown = part(text, "What our records say")
    for r in forms: assert f"| {1/r['ratio']:.2f}× ({1/r['ratio_p90']:.2f}–{1/r['ratio_p10']:.2f}) | {r['date']} |" in shown, r["rung"]
    path.write_text(json.dumps([r | dict(ratio=.1, ratio_p10=.1, ratio_p90=.1) if r in forms else r for r in before]))
    assert "10.00× (10.00–10.00)" in build_pages.written("measured/compiler.qmd", root)
    for makefile, said in (("confirm: ## again\n\techo", True), ("test:\n\techo", False)):
        (root/"Makefile").write_text(makefile)
        assert ("make confirm\n" in build_pages.written("measured/compiler.qmd", root)) == said

def test_records_show_the_code_that_was_measured(made):
    for r in records.all_records(ROOT): assert not r.get("code") or f"| `{r['code'][:8]}` |" in made["measured/index.qmd"]

def test_claims_of_memory_are_of_the_loss_alone(made):
    "As the guide means them: not of the whole step, whose peak has much else in it. And no letters stand for guides"
    rows = re.findall(r"^\| (?:cross-entropy in chunks|the same|fused linear cross-entropy).*memory of the loss.*$|^\| the same, in.*$", made["measured/claims.qmd"], re.M)
    assert len(rows) == 3 and all("| too low |" in r and "17_chunked_ce" in r for r in rows)
    assert not re.search(r"^\|[^|]+\| [CHRFO]( [CHRFO])* \|", made["measured/claims.qmd"], re.M)

# --- GPUs ---

def test_gpus_say_what_they_cannot_run_and_why(made):
    t4, a100, ada = (part(made["gpus.qmd"], k) for k in ("T4", "A100 80 GB", "RTX 4090"))
    assert "No: bfloat16 needs compute capability 8.0, and Tesla T4 has 7.5" in t4 and "`cuda_graphs`: it doesn't go with fp16" in t4
    assert "is `fp16`, `flash`" in t4 and "No: bfloat16" in part(made["gpus.qmd"], "V100") and "bf16 on a V100?" in made["gpus.qmd"]
    assert "No: bfloat16" not in a100 and "FP8 needs compute capability 8.9, and NVIDIA A100-SXM4-80GB has 8.0" in a100
    assert "`fp8`" in ada and "FP8 runs" in ada and "MFU, FP8's peak" in ada and "MFU, FP8's peak" not in a100
    assert "How fast should an RTX 4090 be?" in ada and "--memory_limit 24g" in ada and "--memory_limit a100-80g" in a100
    for g in datasheets.GPUS:
        for w in gpus.SIZES: assert f"| `{w}` |" in part(made["gpus.qmd"], g.name)
    assert "it gains nothing on a CPU" in part(made["gpus.qmd"], "CPU")

def test_gpus_ask_the_rungs(monkeypatch):
    assert "bf16" in str(gpus.differences()[1]) and not gpus.why_not("bf16", GPU["RTX 3090"])
    monkeypatch.setattr(RUNGS["bf16"], "needs", lambda: "")
    assert "bf16`" not in str(gpus.differences()[1]) and gpus.runs_here(GPU["T4"])[0][0] == "bf16"

def test_datasheets_are_those_of_the_package():
    known = [g for g in datasheets.GPUS if datasheet_flops(g.said)]
    assert len(known) > 6
    for g in known: assert g.tflops["bf16"]*1e12 == datasheet_flops(g.said), g.name

def ceilings_of_the_h200():
    "Those that notebook 03 measured, as it prints them"
    said = "".join(t for c in json.loads((ROOT/"nbs/1_start/03_roofline.ipynb").read_text(encoding="utf-8"))["cells"]
                   for o in c.get("outputs", ()) for t in o.get("text", ()))
    rates = {k: float(v)*1e12 for k, v in re.findall(r"^(\w+): +([\d.]+) TFLOP/s$", said, re.M)}
    return Ceilings(rates, float(re.search(r"^copy: ([\d.]+) TB/s$", said, re.M)[1])*1e12)

def test_the_count_is_that_of_the_gpu():
    "Counted here, by one layer and two, the roofline is what the H200 predicted of the whole model"
    found = [r for r in records.all_records(ROOT) if r.get("predicted_ms") and r["rung"] == "fused_adamw" and r["workload"] in gpus.SIZES]
    assert len(found) > 1
    for r in found:
        one, two = (predict_ms(o, ceilings_of_the_h200()) for o in gpus.counted(r["workload"], "fp8"))
        layers = gpus.WORKLOADS[r["workload"]].layers
        assert (one + (layers - 1)*(two - one))/gpus.ROWS == pytest.approx(r["predicted_ms"]/r["batch"], rel=.05)

def fits_file(root, *rows):
    about = dict(seq=1024, gpu="NVIDIA H200", torch="2.11", date="2026-11-23")
    (root/"nbs/site/measurements/fits.json").write_text(json.dumps([about | r for r in rows]), encoding="utf-8")

FASTEST = ("tf32 bf16 flash:backend=cudnn fused_ops tied_embedding chunked_ce fp8:parts=mlp head_groups cuda_graphs "
           "fused_adamw direct_update").split()

def test_the_largest_micro_batch_that_fits(root):
    row = lambda gib, n, **kw: dict(workload="124m", rungs=FASTEST, gib=gib, micro=n, peak_gib=gib/2) | kw
    sixteen = "tf32 bf16 flash fused_ops tied_embedding chunked_ce head_groups cuda_graphs fused_adamw direct_update".split()
    fits_file(root, row(80, 64), row(24, 32), row(16, 8), row(24, 0, workload="350m", peak_gib=None), row(80, 4, workload="1b"),
              row(16, 4, rungs=sixteen), row(10, 0, rungs=sixteen, peak_gib=None), row(80, 2, seq=2048))
    found = records.fits(root)
    largest = lambda gpu, rungs=FASTEST, w="124m": gpus.largest_micro(found, GPU[gpu], w, rungs)
    assert [largest(k) for k in ("RTX 4080", "RTX 4090", "L40S", "H100", "H200")] == [8, 32, 32, 64, 64]
    assert largest("RTX 4090", w="350m") == 0 and largest("RTX 4090", w="1b") is None
    assert largest("T4", ["fp16", "flash", "fused_ops", "tied_embedding", "chunked_ce", "fused_adamw"]) == 4   # as much as bf16's
    assert largest("RTX 3080", ["tf32", "bf16", "flash", "fused_ops", "tied_embedding", "chunked_ce", "fused_adamw"]) == 0
    text = build_pages.written("gpus.qmd", root)
    assert re.search(r"\| `124m` \| 32 \| not measured yet \|", part(text, "RTX 4090")) and "| `350m` | none | not measured yet |  |  |  |  |" in part(text, "RTX 4090")
    assert "2026-11-23" in text and "there is no `nbs/site/measurements/fits.json`" not in text

def test_without_fits_the_page_says_so(root):
    text = build_pages.written("gpus.qmd", root)
    assert "**Not measured yet**: there is no `nbs/site/measurements/fits.json`" in text and "| `124m` | not measured yet |" in text

def test_fits_that_are_broken_are_an_error(root):
    fits_file(root, dict(workload="124m", rungs=FASTEST, gib=24, micro="8", peak_gib=5.))
    with fails(InputError, "fits.json", "micro"): build_pages.written("gpus.qmd", root)

# --- examples ---

BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", (ROOT/"nbs/site/kernels.qmd").read_text(encoding="utf-8"), re.S)

def test_python_fits_the_page():
    "As in notebooks: code of 110 columns is seen whole at 1280 pixels"
    for path in (ROOT/"nbs").rglob("*.qmd"):
        for source in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
            assert not [o for o in source.splitlines() if len(o) > 110], path

def test_kernels_run_as_shown():
    assert len(BLOCKS) > 7
    space = {}
    for source, said in BLOCKS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out): exec(compile(source, "kernels.qmd", "exec"), space)
        if said and not ("runs_kernel" in source and not out.getvalue()): assert out.getvalue() == said

def test_an_8_bit_layer_in_the_interpreter(monkeypatch):
    "Whose error is larger: it prints what the page says all the same"
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    space, out = {}, io.StringIO()
    first, fp8 = BLOCKS[0], next(b for b in BLOCKS if "LinearFP8" in b[0])
    with contextlib.redirect_stdout(out):
        for source in (first[0], fp8[0]): exec(compile(source, "kernels.qmd", "exec"), space)
    assert out.getvalue().endswith(fp8[1])

def test_kernels_run_without_triton():
    script = "import sys\nsys.modules['triton'] = None\n" + "".join(source for source, _ in BLOCKS)
    p = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert not p.returncode, p.stderr
    assert p.stdout == "".join(said for _, said in BLOCKS)
