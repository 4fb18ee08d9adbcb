"The notebooks' outputs come from the code beside them: `run_notebook.py` notes a digest of the code that it ran."
import json, subprocess, sys
from functools import lru_cache
import pytest
from helpers.cells import AWAITING, NUMBERED, NBS, OLD, read
from make_readme import ROOT
from run_notebook import code_digest

@lru_cache
def digest_of(path): return code_digest(read(path))

OUTPUTS = ROOT/"nbs/site/measurements/outputs.json"

def stale(entries): # a dict of what `run_notebook.py` notes, by notebook
    "The notebooks whose outputs come from other code than they hold, or from nobody knows what"
    return [p.stem for p in NBS if entries.get(p.stem, {}).get("code") != digest_of(p)]

# They show names, files, options, records, made-up runs, runs of a very small model on a CPU: nothing that is measured on the GPU
ANYWHERE = """
    00_start text_files tokenizer corpus records verdicts choices architectures accelerate plugins course compat kernel_ops flash4_ops fp8_dynamic_scaling grouped_ce
    embedding_rows fp8_loss fp8_parts loss_kernels multi_tensor_adamw qk_rope matmul_ops folded_norm fp8_matmul_ops
    fp8_block_parts tp_mappings vocab_parallel resolve train_data ladder report
    15_debug_kernels explain datasheets step_prediction console coordinator checkpointer validator callbacks config launch cli run_charts 51_recipe 58_race
    clock adapters speed_run confirm race_report 60_world world interleaved save_sharded spawn liveness sharding 66_cluster 71_evals evals
    export generate pretrained comparison 74_plan race muon_update muon_kernels sharded_muon state recipe_spec unused_rungs mixed_optimizer
    peers trainer doctor metrics telemetry loader format spikes scores
    track track_logs stepper rung_registry step_builder model_config measure op_counter fusion profiling""".split()

@pytest.fixture
def entries():
    if not OUTPUTS.exists(): pytest.skip("no notebook has been run since outputs are noted: make notebooks")
    return json.loads(OUTPUTS.read_text(encoding="utf-8"))

def test_outputs_come_from_the_code_beside_them(entries):
    found = {*stale(entries)}
    assert found <= {*AWAITING}, f"stale, run them again on the GPU: {sorted(found - {*AWAITING})}"
    assert found == {*AWAITING}, f"need not stand in AWAITING any more: {sorted({*AWAITING} - found)}"

def test_outputs_come_from_one_machine(entries):
    machines = {}
    for name in {p.stem for p in NUMBERED} & entries.keys() - {*OLD, *ANYWHERE}:
        machines.setdefault((entries[name]["gpu"], entries[name]["torch"]), []).append(name)
    assert len(machines) < 2, f"outputs of several machines, a sitting on one is due: {machines}"

def test_all_of_it_runs_in_about_an_hour(entries): assert sum(e["seconds"] for e in entries.values() if e["gpu"] != "CPU") < 72*60    # on one GPU, some on empty caches, of which 25 and 27 to 29 take 11; 25 minutes is the aim

def test_entries_are_of_notebooks(entries): assert entries.keys() <= {p.stem for p in NBS}, "notebooks that are gone"

# --- the digest ---

def cell(source, kind="code"): return dict(cell_type=kind, source=source, outputs=[], metadata={}, id=f"c{abs(hash(source))}")
def digest(*sources): return code_digest(dict(cells=[cell(s) for s in sources]))

@pytest.mark.parametrize("source", ["x = f( 1,2 )", "x = f(1, 2) # why", "#| hide\nx = f(1, 2)", "'what'\nx = f(1,\n      2)"])
def test_form_does_not_count(source): assert digest(source) == digest("x = f(1, 2)")

@pytest.mark.parametrize("source", ["x = f(1, 3)", "x = f(1, 2.)", "y = f(1, 2)", "x = f(1, 2); f(3)", "x = f(1, '2')", "x = f(1, b'2')"])
def test_code_counts(source): assert digest(source) != digest("x = f(1, 2)")

@pytest.mark.parametrize("a, b, same", [
    ("def f(x, # B T\n      y):\n    'Adds'\n    return x + y", "def f(x, y): return x + y", True),
    ("def f(x): 'Says nothing'", "def f(x): 'Says little'", True), ("class A:\n    'One'\n    x = 1", "class A: x = 1", True),
    ("x = 'a'", "x = 'b'", False), ("f'{x} ms'", 'f"{x} ms"', True), ("f'{x} ms'", "f'{x} s'", False), ("f'a' 'b'", "f'ab'", True),
    ("%time f()", "%time f() ", False), ("!ls", "!pwd", False), ("if a:\n    !ls\nx = 1", "if a:\n    !ls\nx = 1 # y", True),
    ("x = None", "x = True", False), ("x = 1", "x = True", False), ("def f(): return", "def f(): return None", False)])
def test_what_counts(a, b, same): assert (digest(a) == digest(b)) is same

@pytest.mark.parametrize("more", ["assert x == 1", "test_eq(x, 1)", "if smoke(): test_eq(x, 1)", "if smoke():\n    assert x\n    test_fail(f)"])
def test_tests_show_nothing(more): assert digest("x = f(1, 2)\n" + more) == digest("x = f(1, 2)") == digest("x = f(1, 2)", more)

@pytest.mark.parametrize("more", ["if smoke(): print(x)", "if smoke(): assert x\nelse: print(x)", "tests(x)", "x = test_eq(x, 1)"])
def test_what_looks_like_a_test(more): assert digest("x = f(1, 2)\n" + more) != digest("x = f(1, 2)")

def test_which_cells_count():
    nb = [cell("x = 1"), cell("#| echo: false\ndraw(x)")]
    assert code_digest(dict(cells=nb)) == code_digest(dict(cells=nb + [cell("# Title", "markdown"), cell("#| eval: false\nx = ...")]))
    assert code_digest(dict(cells=nb)) != code_digest(dict(cells=nb[:1])) != code_digest(dict(cells=nb[::-1]))

def test_every_notebook_has_a_digest_of_its_own(): assert len({digest_of(p) for p in NBS}) == len(NBS)

# --- a run ---

def notebook(folder, *sources):
    path = folder/"a.ipynb"
    cells = [cell(s) | dict(execution_count=None) for s in sources]
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    return path

def run(*paths): return subprocess.run([sys.executable, ROOT/"tests/run_notebook.py", *paths], capture_output=True, text=True)

def test_a_run_keeps_outputs_and_notes_where_they_come_from(tmp_path):
    "Cells that are left to the reader aren't run, and a record would name the notebook"
    written = "from llm_speedrun.measure import written_by\nprint(x, written_by())"
    path, noted = notebook(tmp_path, "x = 3", "#| eval: false\nx = 1/0", written), tmp_path/"measurements/outputs.json"
    noted.parent.mkdir(); noted.write_text(json.dumps({"b": {"code": "1"}}))
    p = run(path)
    assert p.returncode == 0, p.stderr
    assert read(path)["cells"][-1]["outputs"][0]["text"] in ("3 a\n", ["3 a\n"])
    entries = read(noted)
    assert list(entries) == ["a", "b"] and entries["a"]["code"] == digest("x = 3", written)
    assert entries["a"].keys() == {"code", "gpu", "torch", "date", "seconds"}

def test_a_run_to_elsewhere_leaves_all_as_it_is(tmp_path):
    path, there = notebook(tmp_path, "print(3)"), tmp_path/"there"
    there.mkdir(); before = path.read_text()
    p = run(path, there/"a.ipynb")
    assert p.returncode == 0, p.stderr
    assert path.read_text() == before and not (tmp_path/"measurements").exists() and list(read(there/"outputs.json")) == ["a"]

def test_after_an_error_all_is_as_it_was(tmp_path):
    path = notebook(tmp_path, "x = 3", "1/0")
    before = path.read_text()
    assert run(path).returncode == 1 and path.read_text() == before and not (tmp_path/"measurements").exists()
