"The committed records: each says what was measured, where, by which notebook and from which code, and that is still the code."
import json
from collections import Counter
import pytest
from llm_speedrun import measure, records as record_module
from helpers.cells import NBS
from make_readme import ROOT

OTHERS = {"outputs.json", "fits.json", "collectives.json", "published.json"}  # where outputs come from; what fits into which memory; links; what others publish: no runs
FILES = sorted(p for p in (ROOT/"nbs/site/measurements").glob("*.json") if p.name not in OTHERS)
# Records, as `name` calls them, whose code has changed since they were measured. One leaves this list when it's measured again.
AWAITING = set()
# Every record waits to be measured again: the step has changed since 2026-11-26 (one `Stepper` for one process and several), and with it the
# code of all lists of rungs. When a GPU has measured them, this becomes False, and AWAITING names those that wait still
ALL_AWAIT = True
SHARED = "speedrun_ladder"  # by `--share`, on a GPU that we needn't have
VERSIONS = "gpu", "driver", "torch", "triton"

def name(r):
    "What a reader calls a record: the rung, over what, on which workload"
    over = f" over {r['before']}" if r.get("before") else ""
    return f"{r['rung']}{over}: {r['workload']}, {r['batch']} × {r['seq']}, {'+'.join(r.get('rungs') or [])}"

# Each rule takes the records of a file and yields what is wrong with them; beside it stand changes to a good record that break it.
RULES, BROKEN = {}, []
def rule(*broken):
    def add(f):
        RULES[f.__name__] = f
        BROKEN.extend((f.__name__, b) for b in broken)
        return f
    return add

@rule(dict(ms=...), dict(notebook=...), dict(rungs=...))
def has_all_keys(records):
    for r in records:
        if missing := {*measure.KEYS, "rungs"} - r.keys(): yield f"{name(r)}: no {', '.join(sorted(missing))}"

@rule(dict(notebook="99_gone"), dict(notebook="python"))
def its_notebook_is_there(records):
    for r in records:
        if (wrote := r.get("notebook")) not in {*(p.stem for p in NBS), SHARED}: yield f"{name(r)}: from {wrote}, and there is no such notebook"

@rule(dict(before=None), dict(predicted_ms=...))
def predicts_only_what_was_predicted(records):
    for r in records:
        if r["predicted_ratio"] is None: continue
        if not r["before"]: yield f"{name(r)}: a predicted ratio, and no rung before"
        elif r["rungs"] and r.get("predicted_ms") is None: yield f"{name(r)}: a predicted ratio, and no predicted milliseconds"

@rule(dict(torch="1.0"), dict(driver=None), dict(gpu="CPU"))
def come_from_one_machine(records):
    machines = Counter(tuple(r.get(k) for k in VERSIONS) for r in records)
    usual = machines.most_common(1)[0][0]
    for r in records:
        if (m := tuple(r.get(k) for k in VERSIONS)) != usual: yield f"{name(r)}: {m}, and others {usual}"

@rule(dict(also=[dict(code="0123456789abcdef")]), dict(code="0123456789abcdef", also=[dict(code="0123456789abcdef", commit="01234567", why="a name")]),
      dict(also=[dict(code="0123456789abcdef", commit="01234567", why="")]), dict(code=None, also=[dict(code="0123456789abcdef", commit="01234567", why="a name")]))
def list_later_code_with_a_reason(records):
    "`records.note_same_code` appends it; the digest of what was measured stays"
    for r in records:
        also = r.get("also", [])
        if also and not r.get("code"): yield f"{name(r)}: later code, and none that was measured"
        codes = [r.get("code"), *(o.get("code") for o in also)]
        if len(set(codes)) < len(codes): yield f"{name(r)}: the same digest twice"
        for o in also:
            if not all(o.get(k) for k in ("code", "commit", "why")): yield f"{name(r)}: a later digest without commit or reason"

@rule({})
def tell_themselves_apart(records):
    for key, n in Counter(map(measure.record_key, records)).items():
        if n > 1: yield f"{n} records of {key}"

def ours(records): # what isn't ours has no `code`
    return [r for r in records if r.get("code") and r["notebook"] != SHARED]

def changed(records):
    "The records of our notebooks whose rungs consist of other code now, and of none that is noted as computing the same"
    return {name(r) for r in ours(records) if not record_module.is_current(r)}

@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_records(path, rule):
    wrong = list(RULES[rule](json.loads(path.read_text(encoding="utf-8"))))
    assert not wrong, f"{path.name}:\n  " + "\n  ".join(wrong)

def test_records_come_from_the_code_as_it_is():
    records = [r for p in FILES for r in json.loads(p.read_text(encoding="utf-8"))]
    found = changed(records)
    if ALL_AWAIT:
        assert found == {*map(name, ours(records))}, "some records are of today's code: name the others in AWAITING"
        return
    assert found <= AWAITING, "their code has changed since, measure them again:\n  " + "\n  ".join(sorted(found - AWAITING))
    assert found == AWAITING, f"need not stand in AWAITING any more: {sorted(AWAITING - found)}"

@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_file_is_named_after_its_gpu(path):
    assert {measure.records_path(r["gpu"]).name for r in json.loads(path.read_text(encoding="utf-8"))} == {path.name}

# --- the rules themselves ---

def record(rung="flash", **changes):
    "A good record, with changes: `...` takes a key away"
    r = dict.fromkeys(measure.KEYS, 1.) | dict(
        rung=rung, before="bf16", workload="124m", dtype="bf16", rungs=["flash"], code=record_module.code_of(["flash"]),
        notebook="12_flash", gpu="NVIDIA H200", driver="580", torch="2.11", triton="3.6", date="2026-01-01", predicted_ms=1.) | changes
    return {k: v for k, v in r.items() if v is not ...}

GOOD = [record("fp32", before=None, predicted_ratio=None), record("bf16"), record()]

@pytest.mark.parametrize("rule", RULES)
def test_rule_passes_good_records(rule): assert list(RULES[rule](GOOD)) == []

@pytest.mark.parametrize("rule, changes", BROKEN, ids=str)
def test_rule_finds_broken_records(rule, changes): assert list(RULES[rule](GOOD + [record(**changes)]))

def test_changed_code_is_found():
    other = record("other", rungs=["tf32"], code=record_module.code_of(["flash"]))
    assert not changed(GOOD) and changed(GOOD + [other, record("peer", code=None, rungs=[])]) == {name(other)}
    assert not changed([other | dict(notebook=SHARED)])
    assert not changed([other | dict(also=[dict(code=record_module.code_of(["tf32"]), commit="01234567", why="an import has another name")])])
