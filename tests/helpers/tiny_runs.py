"What the tests of the package share: a model that trains in milliseconds, and data for it."
from dataclasses import fields
import gc
import numpy as np, pytest, torch
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from llm_speedrun.data import corpus
from llm_speedrun.model_config import WORKLOADS, GPTConfig
from llm_speedrun.recipes import recipe_spec
from llm_speedrun.step_builder import uncompiled
from llm_speedrun.stepper import enter_all
from llm_speedrun.train.config import TrainConfig

NANO = GPTConfig(name="nano", vocab=320, layers=2, width=32, heads=4, kv_heads=2, hidden=48, seq_len=32, rope_theta=500.)
VOCAB = 300     # of the data: the model has some rows to spare

@pytest.fixture(autouse=True) # in a module that imports it
def plain():
    "Nothing is compiled where there is no GPU"
    if torch.cuda.is_available(): yield
    else:
        with uncompiled(): yield

def draw_less(monkeypatch, curves=False): # whether these are drawn nevertheless, without ticks
    "Charts are made, and nothing is drawn into their images, which is half of what a tiny run costs"
    monkeypatch.setattr(Figure, "set_layout_engine", lambda self, *args, **kw: None)
    if not curves: monkeypatch.setattr(Figure, "draw", lambda self, renderer: None)
    for name in ("draw", "get_tightbbox"): monkeypatch.setattr(Axis, name, lambda self, *args, **kw: None)

@pytest.fixture(scope="module", autouse=True)
def nano(request):
    """`nano` is a workload in the test modules that import this; a run takes one update a step there, for those who count them. The
    charts of its end are drawn in `test_report` alone, curves in `test_compare`"""
    WORKLOADS["nano"], best = NANO, recipe_spec.BEST
    recipe_spec.BEST = "normuon"
    with pytest.MonkeyPatch.context() as m:
        if request.module.__name__ != "test_report": draw_less(m, curves=request.module.__name__ == "test_compare") # which reads the charts' words
        yield NANO
    recipe_spec.BEST = best
    del WORKLOADS["nano"]

@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    "Each test has an empty cache of its own, and finds no GPT-2 tokenizer of this machine."
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLM_SPEEDRUN_CACHE", str(path))
    monkeypatch.setattr(corpus, "_cached_gpt2", lambda: None)
    return path

def trained_on_text(folder):
    "The trainer of a finished run in `folder`, on text that has a tokenizer of its own"
    from llm_speedrun.train.trainer import train # not for tests that need none of it
    (folder/"texts").mkdir()
    for i in range(80): (folder/"texts"/f"{i}.txt").write_text(f"Text {i}: {i} times 3 is {3*i}, naïve 漢字.\n" * 4, "utf-8")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LLM_SPEEDRUN_CACHE", str(folder/"cache"))
        return train(options(folder, data=str(folder/"texts"), steps=60, lr=.01, seq_len=NANO.seq_len), progress=False)[0]

def fails(kind, *parts):
    "The next block must raise `kind` with every part in its message"
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{p})" for p in parts))

def relative_error(t, exact):
    "The norm of what `t` differs by from `exact`, in float64, over that of `exact`"
    t, exact = t.double(), exact.double()
    return ((t - exact).norm()/exact.norm().clamp(min=1e-30)).item()

def recorded():
    "How many passes CUDA graphs hold now"
    from llm_speedrun.rungs.cuda_graphs import RecordedPass
    return sum(type(o) is RecordedPass for o in gc.get_objects())

def pass_of(run, x, y):
    "Loss and gradients of a pass, of which nothing is left but numbers: a recording can't share what autograd keeps of a pass before"
    with enter_all(run.forward_contexts): loss = run.loss(run.model, x, y)
    loss.backward()
    res = [loss.detach().clone(), *(p.grad.clone() for p in run.model.parameters())]
    run.model.zero_grad(set_to_none=True)
    return res

def write_bins(folder, train=4097, val=1025):
    "nanoGPT's `train.bin` and `val.bin` in `folder`, of tokens that a model can learn"
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", train), ("val", val)):
        tokens = (np.cumsum(rng.integers(1, 4, n)) % VOCAB).astype("<u2")   # each is 1 to 3 after the one before
        tokens.tofile(folder/f"{name}.bin")
    return folder

def texts(folder):
    "A folder of short documents that a model can learn"
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(40):
        (folder/f"{i}.txt").write_text("".join(f"{(i*j) % 97} times {j} is not {j*j + i}.\n" for j in range(60)), encoding="utf-8")
    return folder

def options(folder, **kw):
    "A `TrainConfig` of a few quick steps in `folder`, by default of one micro-batch"
    if "data" not in kw: kw["data"] = str(write_bins(folder/"bins"))
    if "step_tokens" not in kw and kw.get("micro_batch_size", 4): kw.setdefault("grad_accum_steps", 1)
    if "eval_every" not in kw: kw.setdefault("num_evals", 2) # of the two only one can be given
    return TrainConfig(**dict(model="nano", rungs="naive", steps=6, micro_batch_size=4, seq_len=16, vocab=VOCAB,
                              eval_tokens=128, sample_tokens=4, name="run", out=str(folder/"runs")) | kw)

def words(cfg, **kw):
    "Options that aren't the default, and those in `kw`, as a command line has them"
    given = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != f.default} | kw
    return [f"--{k}" if v is True else f"--no-{k}" if v is False else f"--{k}={v}" for k, v in given.items()]
