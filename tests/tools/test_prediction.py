"A run's step is counted as it is taken, its prediction stands next to what it took, and what can't be predicted is said and ends no run."
import json, re
from collections import Counter
from types import SimpleNamespace
import pytest, torch
from test_report import checked, copy, run # fixtures, and the page with its checks
from helpers.tiny_runs import NANO, nano, options
from llm_speedrun import step_prediction
from llm_speedrun.model import GPT
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.roofline import Ceilings, predict_ms
from llm_speedrun.rung_registry import rung_specs
from llm_speedrun.step_builder import count_step
from llm_speedrun.step_prediction import ON_CPU, Kind, StepPrediction, predict_run, repeated
from llm_speedrun.train.callbacks import Prediction

TOY = Ceilings(dict(fp32=1e12, tf32=4e12, bf16=8e12), 1e11)
RUNGS = ["flash:backend=flash", "fused_adamw"]

@pytest.fixture
def gpu(monkeypatch):
    "As if there were one, with made-up rates"
    monkeypatch.setattr(step_prediction, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(step_prediction, "rates", lambda name: ("NVIDIA H100", TOY, 1e-9, True, "its rates were made up"))

# --- the count ---

def check_repeated(n=4):
    one, two, many = ([*count_step(NANO, RUNGS, k, 1)] for k in (1, 2, n))
    assert Counter(repeated(one, two, n)) == Counter(many) and repeated(one, [], 1) == one

def test_two_micro_batches_stand_for_those_that_follow(): check_repeated()

@pytest.mark.parametrize("wrong", [lambda one, two, n: one*n, lambda one, two, n: two + one*(n - 2), lambda one, two, n: two])
def test_other_sums_are_no_step(monkeypatch, wrong):
    monkeypatch.setitem(globals(), "repeated", wrong)
    with pytest.raises(AssertionError): check_repeated()

def test_prediction_is_the_sum_of_its_kinds(gpu):
    p, ops = predict_run(NANO, rung_specs(RUNGS), 2, 3), count_step(NANO, RUNGS, 6, 2)
    assert not p.why and p.predicted_ms == pytest.approx(predict_ms(ops, TOY)) == pytest.approx(sum(k.predicted_ms for k in p.kinds))
    assert sum(k.calls for k in p.kinds) == len(ops) and (p.gpu, p.bound) == ("NVIDIA H100", "memory")

def test_the_recipe_is_counted(gpu):
    "Muon has matmuls in its update, and other kernels than AdamW"
    of = {}
    for name in ("adamw", "muon"):
        r = parse_recipe(name)
        of[name] = {k.kind: k for k in predict_run(NANO, rung_specs(RUNGS), 2, 1, r, r.model).kinds}
    assert of["muon"]["optimizer"].calls > of["adamw"]["optimizer"].calls

def test_launches_that_a_graph_does_not_need(gpu, monkeypatch):
    monkeypatch.setattr(step_prediction, "rates", lambda name: ("NVIDIA H100", TOY, 1., True, "made up"))
    slow = predict_run(NANO, rung_specs(RUNGS), 2)
    assert slow.bound == "launches" and slow.predicted_ms == sum(k.calls for k in slow.kinds)
    assert predict_run(NANO, rung_specs([*RUNGS, "cuda_graphs"]), 2).bound == "memory"

# --- what can't be predicted ---

class Chooses(torch.nn.Module):
    def forward(self, x): return x[x > 0].sum()

class Odd(GPT):
    "A model that looks into its values"
    def __init__(self, *args): super().__init__(*args); self.chooses = Chooses()
    def forward(self, *args, **kw):
        out = super().forward(*args, **kw)
        return out + 0*self.chooses(self.layers[0].input_layernorm.weight)

def test_a_module_that_cannot_be_counted_is_named(gpu):
    why = predict_run(NANO, rung_specs(["fused_adamw"]), 2, model=Odd).why
    assert why.startswith("Not predicted: module chooses (Chooses) can't be counted. ") and "\n" not in why

def test_no_error_of_a_count_leaves_it(gpu, monkeypatch):
    def broken(run): raise ZeroDivisionError("by zero")
    assert "by zero" in predict_run(NANO, rung_specs(RUNGS), 2, change=broken).why
    def crowded(name): raise torch.OutOfMemoryError
    monkeypatch.setattr(step_prediction, "rates", crowded)
    assert "no memory left" in predict_run(NANO, rung_specs(RUNGS), 2).why

def test_a_cpu_has_no_rates(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert predict_run(NANO, rung_specs(RUNGS), 2) == StepPrediction(why=ON_CPU)

def trainer(seconds, processes=1, profile=0, more=(), shares=()):
    world = SimpleNamespace(size=processes, first=True)
    plan = SimpleNamespace(model=NANO, rungs=rung_specs([*RUNGS, *more]), recipe=parse_recipe("adamw"))
    step = SimpleNamespace(opt=SimpleNamespace(shares=dict(shares)))
    cfg = SimpleNamespace(micro_batch_size=2, grad_accum_steps=2, profile=profile)
    return SimpleNamespace(world=world, plan=plan, cfg=cfg, step=step, timings=SimpleNamespace(parts=lambda: dict(training=seconds)), device=torch.device("cuda"))

@pytest.mark.parametrize("of, why", [(dict(seconds=59), "less than 60"), (dict(seconds=61), ""), (dict(seconds=1, profile=3), ""),
                                     (dict(seconds=61, processes=2, more=["tensor_parallel"]), "tensor_parallel cuts"),
                                     (dict(seconds=61, processes=2, more=["fsdp"]), "fsdp cuts"), (dict(seconds=61, more=["fsdp"]), ""),
                                     (dict(seconds=61, processes=2, more=["ddp"]), "")])
def test_which_runs_are_predicted(gpu, of, why):
    p = Prediction().predict(trainer(**of))
    assert why in p.why and bool(p.why) == bool(why) and bool(p.kinds) == (not why)

def test_an_update_that_is_divided_is_noted(gpu):
    "The count has all of it, and each of several processes does a part"
    notes = lambda **how: " ".join(Prediction().predict(trainer(61, **how)).notes)
    assert "divided among 2" in notes(processes=2, more=["ddp"], shares={0: (0, 2, None)})
    assert "divided" not in notes(processes=2, more=["ddp"]) + notes()

def no_peak(name): raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("where", ["rates", "predict", "file"])
def test_no_error_of_a_prediction_ends_a_finished_run(gpu, monkeypatch, tmp_path, where):
    t, said = trainer(61), []
    t.folder, t.log_info = tmp_path, said.append
    if where == "rates": monkeypatch.setattr(step_prediction, "rates", no_peak)
    if where == "predict": t.plan = None
    if where == "file": (tmp_path/"prediction.json").mkdir()
    Prediction().after_close(t)
    if where == "file": assert len(said) == 1 and "prediction.json can't be written" in said[0]
    else:
        why = json.loads((tmp_path/"prediction.json").read_text())["why"]
        assert why.startswith("Not predicted: ") and ("illegal memory access" if where == "rates" else "NoneType") in why and not said

# --- the page ---

def test_a_run_on_a_cpu_says_so(run):
    if torch.cuda.is_available(): pytest.skip("the run was on a GPU")
    assert ON_CPU in checked(run) and not (run/"prediction.json").exists()

def on_gpu(folder, **facts):
    "Make the folder that of a run on a GPU"
    config = json.loads((folder/"config.json").read_text()) | dict(gpu="NVIDIA H100") | facts
    (folder/"config.json").write_text(json.dumps(config))
    (folder/"metrics.jsonl").write_text("".join(json.dumps(dict(step=i, loss=3., tok_s=v)) + "\n" for i, v in enumerate((1e3, 2e3, 4e3), 1)))
    return config["micro_batch_size"]*config["grad_accum_steps"]*config["seq_len"]/2e3*1e3

def test_prediction_next_to_measurement(copy):
    ms, kinds = on_gpu(copy), [Kind("matrix products", 9, 2e12, 1e9, 4., "arithmetic"), Kind("optimizer", 1, 0., 2e9, 1., "memory")]
    p = StepPrediction("NVIDIA H100", "its rates were measured here", 5., "arithmetic", kinds, ["a note"])
    (copy/"prediction.json").write_bytes(step_prediction.msgspec.json.encode(p))
    (copy/"profile_kinds.json").write_text(json.dumps({"optimizer": 3.25, "communication": .5}))
    said = " ".join(checked(copy).split())
    assert "its rates were measured here. a note. kinds were measured in the profiled steps." in said
    rows = [re.findall("<td>(.*?)</td>", r) for r in re.findall("<tr>(.*?)</tr>", (copy/"report.html").read_text(encoding="utf-8"))]
    assert ["optimizer", "1", "0.000", "2.000", "1.000", "3.250", "memory"] in rows and ["communication", "0", "0.000", "0.000", "0.000", "0.500", ""] in rows
    assert ["the step", "10", "2.000", "3.000", "5.000", f"{ms:,.3f}", "arithmetic"] in rows and "send each other" not in said
    on_gpu(copy, world=dict(processes=2, dp=2, tp=1))
    assert "what the processes send each other is not predicted" in checked(copy)

def test_without_a_prediction_the_page_says_why_or_nothing(copy):
    on_gpu(copy)
    assert "predicted and measured" not in checked(copy)
    (copy/"prediction.json").write_text('{"why": "Not predicted: module h (Odd) can\'t be counted."}')
    assert "module h (Odd) can't be counted." in checked(copy)

@pytest.mark.parametrize("junk", ["[]", '{"kinds": [{"kind": 3}]}', '{"predicted_ms": "5"}', '{"predicted_ms": 5', "null"])
def test_files_of_the_wrong_kind_are_left_out(copy, junk):
    on_gpu(copy)
    for name in ("prediction.json", "profile_kinds.json"): (copy/name).write_text(junk)
    said = checked(copy)
    assert "prediction.json" in said and "It is left out" in said and "predicted and measured" not in said

@pytest.mark.cuda
def test_a_profiled_run_on_a_gpu(tmp_path, nano):
    "Its step is predicted, its kinds measured, and both are on the page"
    from llm_speedrun.train.trainer import train
    t, _ = train(options(tmp_path, steps=30, profile=3), progress=False)
    p, measured = (json.loads((t.folder/f"{k}.json").read_text()) for k in ("prediction", "profile_kinds"))
    assert p["predicted_ms"] > 0 and not p["why"] and "matrix products" in measured and min(measured.values()) > 0
    assert "A step, predicted and measured" in checked(t.folder)
