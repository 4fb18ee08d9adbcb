"""No test and no notebook asserts how long something took, waits for a fixed time, or gives up soon: on a busy machine each of these
fails, or hides a failure. Clocks are faked (`clock`), work is counted (`calls_of`), conditions are polled (`wait_until`), and the one
limit is `timeouts.TIMEOUT`."""
import ast, re
from functools import cache
from pathlib import Path
import pytest
from helpers.cells import NBS, exported, of_kind, parsed, read, source

HERE = Path(__file__).parents[1]
CLOCKS = {f"time.{o}{ns}" for o in ("time", "perf_counter", "monotonic", "process_time", "thread_time") for ns in ("", "_ns")}
SHORT = 60 # seconds: a notebook has no `TIMEOUT`, and its limits are longer than this

# Where a fixed time is what it is about -> why that fails on no machine
ALLOWED = {
    ("test_pipeline.py", "time.sleep(.03)"): "the killed program's own pace. Nothing waits for it, and it stops where the kill is to come",
    ("test_world.py", "liveness.Heartbeat(w, logs, timeout=1)"): "the other process hangs until this is over",
    ("test_world.py", 'liveness.FlagExchange(w, "stop", lag=1, timeout=1, heartbeat=watch)'): "as above; this process begins to wait once the stack is there",
    ("confirm.py", "time.sleep(.4)"): "a rung that is broken on purpose, so that it is slow",
    ("measure", "time.sleep(.01)"): "a phase of a start, so that its table has something to show",
    ("batches", "woken.wait(30)"): "a source that stalls. Were it waited for, its thread would have ended, and the assertion fails",
    ("44_metrics", "time.sleep(.02)"): "a slow loader, which the reader is to see in a table",
    ("liveness", "Heartbeat(world, logs, timeout=3)"): "the process that hangs does so until the other has given up",
    ("liveness", 'FlagExchange(world, "stop", timeout=15, heartbeat=watch)'): "as above: the text says how long it waits",
    ("73_finale", "time.sleep(2)"): "the meter is tried on two seconds in which nothing happens; whatever else the machine does, it shows at least these"}

def name_of(f):
    "`time.sleep` for such an expression, dotted; '' for anything else"
    if isinstance(f, ast.Name): return f.id
    return f"{name_of(f.value)}.{f.attr}" if isinstance(f, ast.Attribute) else ""

def number(o):
    "The number that an expression of constants alone is, else None"
    if not all(isinstance(n, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)) for n in ast.walk(o)): return None
    try: res = eval(compile(ast.Expression(o), "", "eval"))
    except Exception: return None
    return res if isinstance(res, (int, float)) and not isinstance(res, bool) else None

def scripts(tree):
    "A tree, and those of the Python programs in its strings"
    yield tree
    for o in ast.walk(tree):
        if isinstance(o, ast.Constant) and isinstance(o.value, str) and "\n" in o.value and "import" in o.value:
            try: yield ast.parse(o.value)
            except (SyntaxError, ValueError): pass

def readings(o, kinds): # an expression; name -> "reading" or "duration"
    """What an expression is: a "reading" of a clock, a "duration", which is the difference of two or has one in it, or None"""
    if isinstance(o, ast.Call) and name_of(o.func) in CLOCKS: return "reading"
    if isinstance(o, ast.Name): return kinds.get(o.id)
    inner = [readings(c, kinds) for c in ast.iter_child_nodes(o)]
    if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Sub) and readings(o.left, kinds) == readings(o.right, kinds) == "reading": return "duration"
    if isinstance(o, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List)) or isinstance(o, ast.Call):
        if "duration" in inner: return "duration"
    return "reading" if isinstance(o, ast.BinOp) and "reading" in inner else None

def known(trees):
    "name -> what it is, of all that is assigned somewhere"
    kinds = {}
    for _ in range(2): # what is used before it is defined, as a global in a function
        for o in (o for t in trees for o in ast.walk(t)):
            if not isinstance(o, (ast.Assign, ast.NamedExpr)): continue
            for target in o.targets if isinstance(o, ast.Assign) else [o.target]:
                pairs = zip(target.elts, o.value.elts) if isinstance(target, ast.Tuple) and isinstance(o.value, ast.Tuple) else [(target, o.value)]
                for t, v in pairs:
                    if isinstance(t, ast.Name) and (kind := readings(v, kinds)): kinds[t.id] = kind
    return kinds

def scopes(tree):
    "Functions, each with what is in it, and what is outside of them"
    outside = [o for o in tree.body if not isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    yield ast.Module(outside, [])
    for o in ast.walk(tree):
        if isinstance(o, ast.FunctionDef): yield o

def in_loops(tree): return {id(o) for loop in ast.walk(tree) if isinstance(loop, ast.While) for o in ast.walk(loop)}

def is_test(o): return isinstance(o, ast.Assert) or isinstance(o, ast.Call) and name_of(o.func).rpartition(".")[2].startswith("test_")

def wrong_calls(tree, limit):
    "Calls that wait for a fixed time, or for less than `limit` seconds"
    loops = in_loops(tree)
    for o in (o for o in ast.walk(tree) if isinstance(o, ast.Call)):
        name = name_of(o.func) or getattr(o.func, "attr", "")
        first, last = ([number(a) for a in o.args] or [None])[0], name.rpartition(".")[2]
        if last == "sleep" and name in ("time.sleep", "sleep") and first and id(o) not in loops: yield o, "waits for a fixed time"
        if last in ("Timer", "alarm") and first: yield o, "waits for a fixed time"
        if last in ("wait", "join") and first is not None and first < limit: yield o, "gives up soon: say timeouts.TIMEOUT"
        for k in o.keywords:
            if k.arg == "timeout" and (n := number(k.value)) is not None and 0 < n < limit: yield o, "gives up soon: say timeouts.TIMEOUT"

def wrong_tests(tree):
    "Tests of how long something took"
    for scope in scopes(tree):
        if not any(isinstance(o, ast.Call) and name_of(o.func) in CLOCKS for o in ast.walk(scope)): continue
        kinds = known([scope])
        for o in ast.walk(scope):
            if not is_test(o): continue
            parts = [o.test] if isinstance(o, ast.Assert) else o.args
            if any(readings(c, kinds) == "duration" for p in parts for c in ast.walk(p)): yield o, "asserts how long something took"

def wrong(code, limit):
    "(the piece of code, why) of all in `code` that depends on the machine's speed"
    tree, seen = parsed(code), set()
    for t in scripts(tree):
        text = code if t is tree else ""
        for o, why in [*wrong_calls(t, limit), *wrong_tests(t)]:
            piece = ast.get_source_segment(text, o) if text else ast.unparse(o)
            if (piece, why) not in seen: seen.add((piece, why)); yield piece, why

def same(a, b): return ast.dump(ast.parse(a)) == ast.dump(ast.parse(b))

PLACES = {p.name: p for p in sorted(HERE.rglob("*.py")) if p.name != "timeouts.py"} | {p.stem: p for p in NBS}

@cache # for what is allowed there, too
def found_in(name):
    path = PLACES[name]
    if path.suffix == ".py": return [*wrong(path.read_text(encoding="utf-8"), float("inf"))] if path != Path(__file__) else []
    code = "\n".join(re.sub(r"^%%.*", "", source(c), flags=re.S) for c in of_kind(read(path), "code") if not exported(c))
    return [*wrong(code, SHORT)]

@pytest.mark.parametrize("name", PLACES)
def test_nothing_depends_on_the_machines_speed(name):
    allowed = [piece for place, piece in ALLOWED if place == name]
    left = [f"{piece}: {why}" for piece, why in found_in(name) if not any(same(piece, a) for a in allowed)]
    assert not left, "\n".join(left)

@pytest.mark.parametrize("name, piece", ALLOWED)
def test_what_is_allowed_is_there(name, piece): assert any(same(piece, p) for p, _ in found_in(name)), "needn't be allowed any more"

@pytest.mark.parametrize("code", [
    "time.sleep(.1)", "from time import sleep\nsleep(2*3)", "def f():\n    x = 1\n    time.sleep(1)", "threading.Timer(2, f)", "signal.alarm(5)",
    "p.communicate(timeout=30)", "done.wait(10)", "thread.join(5)", "subprocess.run(c, timeout=20)", "ready.get(timeout=1.5)",
    "t0 = time.time()\nf()\nassert time.time() - t0 < 10", "def f():\n    t = time.perf_counter()\n    g()\n    s = time.perf_counter() - t\n    assert s < 1",
    "began, x = time.monotonic(), 1\ntook = 1e3*(time.monotonic() - began)\ntest_close(took, 5)", "assert g() and time.process_time() - t0 < 3\nt0 = time.process_time()",
    "def f():\n    t0 = time.time()\n    a = time.time() - t0\n    b = time.time() - t0\n    assert min(a, 1) < b", "S = '''\\nimport time\\ntime.sleep(3)\\n'''"])
def test_what_is_found(code): assert [*wrong(code, SHORT)]

@pytest.mark.parametrize("code", [
    "while not ready(): time.sleep(.05)", "time.sleep(random.random()*.1)", "p.communicate(timeout=TIMEOUT)", "done.wait()", "', '.join(x)", "p.join()",
    "lock.acquire(timeout=0)", "barrier = Barrier(3, timeout=90)", "t0 = time.time()\nprint(time.time() - t0)", "before = time.time()\nf()\nassert before <= g() <= time.time()",
    "def f():\n    t = time.perf_counter()\n    print(time.perf_counter() - t)\nassert t == 3", "time.sleep(0)"])
def test_what_may_be(code): assert not [*wrong(code, SHORT)]
