"The private names of other packages: all of them in one module, all there; what FlashAttention-4 and QuACK support; the warnings of their compiler."
import ast, sys, warnings
from dataclasses import replace
from pathlib import Path
import pytest, torch
import llm_speedrun
from llm_speedrun import compat
from llm_speedrun.choices import Choices
from llm_speedrun.model_config import workload
from llm_speedrun.rungs import epilogues, flash4_ops as fa4, fused_ce, matmul_ops
from llm_speedrun.runs import build
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.train.autotune import resolve_preset
from llm_speedrun.train.presets import preset
from llm_speedrun.cli import describe_rung
from helpers.tiny_runs import fails

PACKAGE = Path(llm_speedrun.__file__).parent
MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("compat.py", "_modidx.py")]

# --- one module has them ---

STDLIB = {"os._exit", "parser._actions", "node._fields"}     # documented, and argparse's, whose parser we extend
UNDOCUMENTED = "quack", "cutlass", "flash_attn"

def private(dotted):
    "Whether a part of the path begins with one underscore. PyTorch documents `torch._foreach_...`"
    parts = dotted.split(".")
    return any(p.startswith("_") and not p.startswith(("__", "_foreach_")) for p in parts)

def imported(o):
    "The dotted paths that an import of another package names"
    if isinstance(o, ast.Import): return [a.name for a in o.names]
    return [f"{o.module}.{a.name}" for a in o.names] if isinstance(o, ast.ImportFrom) and not o.level and o.module else []

def private_uses(source):
    "Private names of other packages that `source` imports or uses as an attribute, with their lines"
    for o in ast.walk(ast.parse(source)):
        for name in imported(o):
            ours = name.startswith("llm_speedrun")
            if not ours and (private(name) or name.split(".")[0] in UNDOCUMENTED): yield f"line {o.lineno}: {name}"
        if isinstance(o, ast.Attribute) and private(o.attr):
            name = ast.unparse(o)
            if name.split(".")[0] not in ("self", "cls") and name not in STDLIB: yield f"line {o.lineno}: {name}"
        if isinstance(o, ast.Call) and getattr(o.func, "id", "") in ("getattr", "hasattr", "setattr") and len(o.args) > 1:
            key = getattr(o.args[1], "value", "")
            if isinstance(key, str) and private(key): yield f"line {o.lineno}: {ast.unparse(o)}"

@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_other_module_uses_a_private_name(path):
    found = list(private_uses(path.read_text(encoding="utf-8")))
    assert not found, "give these a name and a reason in nbs/source/compat.ipynb:\n  " + "\n  ".join(found)

@pytest.mark.parametrize("source", [
    "from torch._subclasses.fake_tensor import FakeTensor", "import torch._dynamo", "x = torch._scaled_mm(a, b)", "op._init_fn(x)",
    "from quack.activation import swiglu", "def f():\n    from flash_attn.cute.interface import g", "getattr(m, '_orig_mod', m)",
    "torch.ops._c10d_functional.all_reduce(x)", "import cutlass", "from torch.utils import _pytree", "h._version == 3"])
def test_a_private_name_is_found(source): assert len(list(private_uses(source))) > 0

@pytest.mark.parametrize("source", [
    "torch._foreach_mul_(xs, 2)", "self._own = 1", "os._exit(0)", "x.__class__", "from llm_speedrun.compat import quack_asm as _asm",
    "from ..compat import FakeTensor", "name == '_scaled_mm'", "import torch.nn as nn"])
def test_what_is_no_private_name(source): assert list(private_uses(source)) == []

# --- all are there ---

def probes():
    "Attributes that only an object has: a text for each, and what must be true of it"
    op = torch.library.custom_op("llm_speedrun_test::probe", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    p, module, layer = torch.zeros(2), torch.compile(torch.nn.Linear(1, 1), backend="eager"), torch.nn.Linear(1, 1)
    yield "CustomOpDef._init_fn", lambda: compat.function_of(op)(p).tolist() == [1, 1]
    yield "OptimizedModule._orig_mod", lambda: type(compat.uncompiled_module(module)) is torch.nn.Linear
    yield "Module._apply", lambda: compat.replace_tensors(layer, lambda t: t + 1) is None
    yield "Tensor._version", lambda: compat.write_count(p.add_(1)) > 0
    yield "Tensor._is_view", lambda: compat.is_view(p[:1]) and not compat.is_view(torch.zeros(1))
    yield "UntypedStorage._cdata", lambda: compat.storage_id(p.untyped_storage()) == compat.storage_id(p[:1].untyped_storage())
    yield "Function._backward_cls", lambda: issubclass(compat.node_class(epilogues.EpilogueMLP), torch.autograd.function.BackwardCFunction)
    fused = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    yield compat.FOUND_INF, lambda: getattr(fused, compat.FOUND_INF) and getattr(compat.FoundInfOptimizer, compat.FOUND_INF)
    yield "OpOverload._schema", lambda: compat.schema_of(torch.ops.aten.add_.Tensor).arguments[0].alias_info.is_write

def failed(probe):
    try: return "" if probe() else "is something else now"
    except Exception as e: return f"{type(e).__name__}: {e}"

def test_no_private_name_is_missing():
    "All that are missing in the installed versions, at once"
    gone = compat.missing() + [f"torch {torch.__version__}, {name}: {why}" for name, probe in probes() if (why := failed(probe))]
    assert not gone, "this package uses private names that the installed versions haven't got:\n  " + "\n  ".join(gone)

def test_each_name_has_a_reason_and_a_package():
    for name, (package, where, why) in compat.NAMES.items():
        assert name.isidentifier() and not name.startswith("_") and len(why) > 8 and "\n" not in why, name
        assert where.count(":") == 1 and package in compat.TABLES, name

def test_a_missing_name_says_what_it_was_for(monkeypatch):
    monkeypatch.setitem(compat.NAMES, "gone", ("torch", "torch:_gone_since", "a matmul"))
    with pytest.raises(ImportError, match=r"torch [\d.]+\S* has no torch:_gone_since \(a matmul\)"): compat.gone
    assert any("torch:_gone_since (a matmul)" in line for line in compat.missing())
    with pytest.raises(ImportError): exec("from llm_speedrun.compat import neither_this", {})

# --- which GPUs ---

@pytest.fixture
def gpu(monkeypatch):
    "(major, minor, installed) -> None: make it seem that such a GPU is here, with both packages or without"
    def be(major, minor, installed="1.0"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (major, minor))
        monkeypatch.setattr(compat, "installed", lambda package: installed)
    return be

@pytest.mark.parametrize("capability, flash4, epi, hopper", [
    ((8, 0), 0, 0, 0), ((8, 9), 0, 0, 0), ((9, 0), 1, 1, 1), ((10, 0), 1, 1, 0), ((10, 3), 1, 1, 0), ((11, 0), 1, 1, 0), ((12, 0), 1, 1, 0), ((13, 0), 0, 0, 0)])
def test_what_each_capability_can_run(gpu, capability, flash4, epi, hopper):
    gpu(*capability)
    can = [not why() for why in (fa4.flash4_missing, epilogues.epilogues_missing, fused_ce.hopper_missing)]
    assert can == [bool(flash4), bool(epi), bool(hopper)]
    assert bool(compat.untried()) == (capability != (9, 0))
    if not hopper: assert "Hopper" in fused_ce.hopper_missing() and "{}.{}".format(*capability) in fused_ce.hopper_missing()

def test_how_to_install_them(gpu):
    gpu(9, 0, "")
    for why in (fa4.flash4_missing(), epilogues.epilogues_missing(), fused_ce.hopper_missing()):
        assert "not installed: pip install 'llm_speedrun[hopper]'" in why and "--pre" not in why

def test_a_list_of_rungs_says_what_was_not_tried(gpu):
    gpu(10, 0)
    said = {n: next(describe_rung(RUNGS[n])) for n in ("flash4", "epilogues", "fused_ce", "flash")}
    for n in ("flash4", "epilogues"): assert "never run on compute capability 10.0" in said[n]
    assert "needs a Hopper GPU" in said["fused_ce"] and "never run" not in said["fused_ce"] + said["flash"]
    assert {"flash4", "epilogues"} <= {*preset("fastest16")} and "fused_ce" not in preset("fastest16")
    gpu(9, 0)
    for n in said: assert "never run" not in next(describe_rung(RUNGS[n]))

def test_tiles_elsewhere_are_quacks(gpu, monkeypatch):
    "On Hopper ours, with pingpong; QuACK is made up here"
    monkeypatch.setitem(vars(compat), "GemmConfig", lambda **kw: kw)
    monkeypatch.setitem(vars(compat), "default_config", lambda device: f"QuACK's own on {device}")
    for capability, theirs in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        gpu(*capability); matmul_ops.tile.cache_clear()
        found = [matmul_ops.tile_for(768), matmul_ops.tile_for(1024), matmul_ops.tile(128, 128, (2, 1))]
        if theirs: assert found == ["QuACK's own on cuda"]*3
        else: assert [(t["tile_m"], t["tile_n"], t["pingpong"], t["device_capacity"]) for t in found] == [
            (128, 192, True, 9), (192, 128, True, 9), (128, 128, True, 9)]
    matmul_ops.tile.cache_clear()

SMALL = replace(workload("tiny"), layers=1)

@pytest.fixture
def untried(monkeypatch):
    "Rungs believe that nobody has run their kernels on this machine: they compare"
    for m in (fa4, epilogues): monkeypatch.setattr(m, "untried", lambda: "never run here")
    checks = fa4.flash4_error, epilogues.epilogues_error
    for f in checks: f.cache_clear()
    yield
    for f in checks: f.cache_clear()

def test_what_is_right_passes_where_it_was_not_tried(untried):
    if fa4.flash4_missing() or epilogues.epilogues_missing(): pytest.skip("these kernels aren't there")
    assert {"flash4", "epilogues"} <= {*build(SMALL, ["bf16", "flash4", "fused_ops", "epilogues"]).rungs}

def test_what_is_wrong_gives_way_where_it_was_not_tried(untried, monkeypatch):
    "Kernels that run, and compute something else, are named; a preset goes on without them"
    if fa4.flash4_missing() or epilogues.epilogues_missing(): pytest.skip("these kernels aren't there")
    true = compat.function_of(fa4.flash4_attention_backward)
    monkeypatch.setattr(fa4.flash4_attention_backward, "_init_fn", lambda *a: [1.1*t for t in true(*a)])
    with fails(RuntimeError, "rung 'flash4'", "off by 1.0e-01", "Leave the rung out"): build(SMALL, ["bf16", "flash4"])
    fa4.flash4_error.cache_clear()
    maths = compat.function_of(matmul_ops.matmul_scale_rows_op)
    seen = []
    monkeypatch.setattr(matmul_ops.matmul_scale_rows_op, "_init_fn", lambda *a: (seen.append(0), (1 + len(seen) % 2)*maths(*a))[1])
    with fails(RuntimeError, "rung 'epilogues'", "they are off by"): build(SMALL, ["bf16", "fused_ops", "epilogues"])
    for rung, rest in (("flash4", ["bf16"]), ("epilogues", ["bf16", "fused_ops"])):
        fa4.flash4_error.cache_clear(); epilogues.epilogues_error.cache_clear(); seen.clear()
        on = resolve_preset(SMALL, [*rest, rung], Choices(again=True, log_info=lambda *a: None))
        assert on.rungs == rest and "off by" in on.why[rung]

# --- warnings ---

@pytest.fixture
def cutlass(monkeypatch, tmp_path):
    "A package of this name in a folder of its own, whose functions warn as CUTLASS's do"
    (tmp_path/"cutlass").mkdir()
    (tmp_path/"cutlass/__init__.py").write_text(
        "import warnings\nclass DSLWarning(UserWarning): pass\n"
        "def old(file): warnings.simplefilter('always', DeprecationWarning); warnings.warn_explicit('old', DeprecationWarning, file, 1)\n"
        "def own(): warnings.warn('slow loop', DSLWarning, stacklevel=2)\n")
    for name in compat.JIT_PACKAGES: monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import cutlass
    return cutlass

def test_only_their_warnings_are_hidden(cutlass):
    "Also those that are switched on inside, and all filters are as they were afterwards"
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with compat.quiet_jit():
            cutlass.own(); cutlass.old(cutlass.__file__); cutlass.old(f"{Path(cutlass.__file__).parent}/cute/core.py")
            cutlass.old("train.py"); warnings.warn("ours"); warnings.warn("torch's", FutureWarning)
        cutlass.old(cutlass.__file__)
    assert [str(w.message) for w in seen] == ["old", "ours", "torch's", "old"] and seen[0].filename == "train.py"
    assert list(warnings.filters) == before

def test_kernels_are_tried_without_their_warnings(cutlass, monkeypatch):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert compat.kernel_error(lambda: cutlass.old(cutlass.__file__)) == ""
        true = compat.function_of(fa4.flash4_attention_backward)
        monkeypatch.setattr(fa4.flash4_attention_backward, "_init_fn", lambda *a: (cutlass.old(cutlass.__file__), true(*a))[1])
        fa4.flash4_error.cache_clear()
        assert fa4.flash4_error(2, 2, 8, torch.bfloat16, torch.device("cpu")) == ""
    fa4.flash4_error.cache_clear()
    assert [w for w in seen if "old" in str(w.message)] == []
