"Processes that can't meet, differ, hang or die: each an error that says which one, and soon."
import itertools, os, pickle, re, socket, subprocess, sys, threading
from datetime import timedelta
from pathlib import Path
import pytest, torch, torch.distributed as dist
from llm_speedrun.distributed import liveness, spawn, world
from llm_speedrun.distributed.world import World
from llm_speedrun.io_utils import InputError, RunError
from llm_speedrun.train.console import Signals
from llm_speedrun.train.coordinator import GroupCoordinator
from llm_speedrun.train.run_dir import Finished
from helpers import quick_programs
from helpers.timeouts import TIMEOUT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

# --- meeting ---

@pytest.fixture
def as_process(monkeypatch):
    "Sets what torchrun would tell a process on a machine without GPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    def told(rank=0, size=2, port=None, **more):
        env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port or spawn.free_port()) | more
        for k, v in env.items(): monkeypatch.setenv(k, str(v))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    meet = dist.rendezvous
    monkeypatch.setattr(dist, "rendezvous", lambda *args, timeout: (WAITS.append(timeout.total_seconds()), meet(*args, timeout=timeout))[1])
    return told

WAITS = [] # seconds that torch may wait for the other processes, each time that it is asked to

def fails(error, part, **how):
    "Joining fails so, waits once and for as long as it may, and leaves nothing that a second attempt would stumble over"
    WAITS.clear()
    with pytest.raises(error, match=re.escape(part)): world.join_world(**how)
    assert WAITS in ([], [how.get("patience", 60)]) and not dist.is_initialized()

def test_one_process_joins_nobody(monkeypatch):
    for k in ("RANK", "WORLD_SIZE"): monkeypatch.delenv(k, raising=False)
    w = world.join_world(tp=8)
    assert (w.rank, w.size, w.mesh, w.first, w.rank_and_size("dp")) == (0, 1, None, True, (0, 1)) and not dist.is_initialized()
    world.leave_world()
    watch = liveness.Heartbeat(w, logs="nowhere")
    watch("step 1"); watch.close()
    agree = liveness.FlagExchange(w, "stop", "save", heartbeat=watch)
    assert agree(stop=1) == dict(stop=1, save=0) and not Path("nowhere").exists()
    world.check_alike(w, options=dict(lr=1))

def test_a_port_in_use(as_process):
    with socket.socket() as s:
        s.bind(("", 0)); s.listen()
        port = s.getsockname()[1]
        as_process(port=port)
        fails(RunError, f"port {port} of this machine is in use")

def test_nobody_answers(as_process):
    as_process(rank=1)
    fails(RunError, "is the first process there", patience=1)

def test_another_program_has_the_port(as_process, monkeypatch):
    "It takes the connection, and says nothing"
    true = world.in_time
    monkeypatch.setattr(world, "in_time", lambda f, seconds, why: true(f, 2, why))
    with socket.socket() as s:
        s.bind(("", 0)); s.listen()
        as_process(rank=1, port=s.getsockname()[1])
        fails(RunError, "isn't one of us: take another port", patience=1)

def test_the_others_do_not_come(as_process):
    as_process()
    fails(RunError, "not all processes came", patience=1)

def test_what_torchrun_sets_is_missing(as_process, monkeypatch):
    as_process()
    monkeypatch.delenv("MASTER_PORT")
    fails(InputError, "MASTER_PORT expected, but not set. torchrun sets it")

def test_tp_must_divide(as_process):
    as_process(size=6)
    fails(InputError, "6 processes can't form groups of 4", tp=4)

def test_fewer_gpus_than_processes(as_process, monkeypatch):
    as_process(rank=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fails(RunError, "process 1 of this machine has no GPU: there are 1")
    monkeypatch.delenv("LOCAL_RANK")
    fails(InputError, "LOCAL_RANK isn't")

@pytest.mark.parametrize("name, device", [("nccl", "cuda"), ("gloo", "cpu")])
def test_a_backend_is_missing(name, device, monkeypatch):
    monkeypatch.setattr(dist, f"is_{name}_available", lambda: False)
    with pytest.raises(RunError, match=f"without {name.upper()}"): world.backend_for(torch.device(device))
    monkeypatch.setattr(dist, f"is_{name}_available", lambda: True)
    assert name in world.backend_for(torch.device(device))

# --- being alike, and hanging ---

def differing(w, logs):
    "What is said where options, versions, digests differ and where the second process hangs"
    import faulthandler, os
    from pathlib import Path
    from helpers.timeouts import wait_until
    from llm_speedrun.distributed import liveness, spawn, world
    def said(f):
        try: f()
        except Exception as e: return type(e).__name__, str(e)
    mine = w.rank
    res = dict(same=said(lambda: world.check_alike(w, options=dict(lr=1e-3, rungs=["tf32"]), data="ab12")),
        options=said(lambda: world.check_alike(w, options=dict(lr=1e-3 + mine))),
        missing=said(lambda: world.check_alike(w, options=dict(x=1) if mine else {})),
        digest=said(lambda: world.check_alike(w, data="abcd"[mine])))
    true, world.version_of = world.version_of, lambda p: "0.1.0" if mine and p == "torch" else true(p)
    res["versions"] = said(lambda: world.check_alike(w))
    agree = liveness.FlagExchange(w, "stop", lag=1)
    res["agreed"] = [agree(stop=i*mine)["stop"] for i in range(4)], agree.drain()["stop"]
    dump, after = faulthandler.dump_traceback_later, []
    faulthandler.dump_traceback_later = lambda seconds, **how: (after.append(seconds), dump(seconds, **how))
    watch = liveness.Heartbeat(w, logs, timeout=1)
    agree = liveness.FlagExchange(w, "stop", lag=1, timeout=1, heartbeat=watch)
    given_up, stack = Path(logs)/"given up", Path(logs)/"stack-1.txt"
    def hang():
        watch("step 7")
        if mine: wait_until(given_up.exists)
        else:                       # gives up when the other one has left its stack, however busy the machine is
            wait_until(lambda: "in hang" in stack.read_text(encoding="utf-8"))
            agree(); agree.drain()  # one message under way, or gloo blames one timeout on the other's
    res["hang"], res["stack after"] = said(hang), after[-1]
    given_up.touch()
    watch.close()
    return res

@pytest.fixture(scope="module")
def two(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    return spawn.run_distributed(2, differing, str(logs)), logs

def test_alike_is_no_error(two): assert [r["same"] for r in two[0]] == [None, None]

@pytest.mark.parametrize("what, part", [("options", "options.lr is 0.001 on process 0 and 1.001 on process 1"),
    ("missing", "options.x is nothing on process 0 and 1 on process 1"), ("digest", "data is a on process 0 and b on process 1"),
    ("versions", "and 0.1.0 on process 1")])
def test_differences_are_told_to_all(two, what, part):
    for r in two[0]: assert r[what][0] == "InputError" and part in r[what][1]

def test_all_know_what_one_wants_one_call_later(two):
    for r in two[0]: assert r["agreed"] == ([0, 0, 1, 2], 3)

@pytest.mark.parametrize("error, how", [("Timed out waiting 15000ms for recv operation to complete", "does not answer"),
    ("Application timeout caused pair closure", "does not answer"), # of an operation whose connection another one's timeout closed
    ("Connection closed by peer [127.0.0.1]:4242", "is gone"), ("Broken pipe", "is gone")])
def test_late_or_gone(error, how, monkeypatch):
    "As gloo says it"
    monkeypatch.setattr(world, "read_heartbeats", lambda w: [dict(rank=1, where="step 7", time=0., stack="", machine="m")])
    assert f"process 1 of 2 {how}: " in str(world.peer_lost_error(world.World(0, 2), RuntimeError(f"[/a/b.cc:3] {error}")))

def test_a_process_that_hangs_is_named(two):
    (waits, hangs), logs = two
    kind, said = waits["hang"]
    assert kind == "PeerLostError" and "process 1 of 2 does not answer: it was last seen at step 7" in said and re.search("1000ms|timeout", said)
    assert hangs["stack after"] == .95 # of the second after which the others give up, if its own thread can't write before
    assert re.search(r"There it was in wait_until \(timeouts.py, line \d+\), called from hang \(test_world.py, line", said) and hangs["hang"] is None, said
    stacks = (logs/"stack-1.txt").read_text(encoding="utf-8")
    assert "in hang" in stacks and "in watch" in stacks # by a thread that holds the interpreter lock: faulthandler's own can crash what it reads

# --- dying ---

DIES = """
import os, signal, sys
from llm_speedrun.distributed.world import join_world, leave_world
from llm_speedrun.distributed.liveness import FlagExchange, Heartbeat
w = join_world()
watch = Heartbeat(w)
agree = FlagExchange(w, "stop", heartbeat=watch)
try:
    for i in range(10):
        watch(f"step {i}")
        if w.rank == 1 and i == 3: os.kill(os.getpid(), signal.SIGKILL)
        agree()
        w.barrier()
except RuntimeError as e:
    print(e)
    leave_world(lost=True)
    sys.exit(3)
"""

@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_dies_is_named():
    env = os.environ | dict(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spawn.free_port()), CUDA_VISIBLE_DEVICES="-1",
                            OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    ps = [quick_programs.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env=env | dict(RANK=str(r), LOCAL_RANK=str(r))) for r in range(3)]
    outs = [p.communicate(timeout=TIMEOUT) for p in ps]
    assert [p.returncode for p in ps] == [3, -9, 3], outs
    named = "process 1 of 3 is gone: it was last seen at step 3"
    assert named in outs[0][0], outs
    # process 0 may notice first and exit. Gloo tells process 2 only then, which finds no store, and refers to the output of process 0
    assert named in outs[2][0] or "process 0, whose store holds the notes, has exited" in outs[2][0], outs

def noticed(w):
    "Whether this process's watchdog notices that the last process is gone: it drops the connection that the others listen on"
    if w.rank < w.size - 1:
        dog = liveness.PeerWatchdog(w, seconds=2*TIMEOUT)
        w.barrier() # all are connected
        return dog.lost.wait(TIMEOUT)
    group = dist.new_group(backend="gloo", timeout=timedelta(days=99))
    w.barrier()
    dist.destroy_process_group(group)

def test_all_notice_the_loss_of_one():
    "Each watchdog listens to the next process alone. One that notices a loss tells the one before it at once, and not only when it exits"
    assert spawn.run_distributed(3, noticed) == [True, True, None]

def test_without_the_store_the_output_of_process_0_is_named(monkeypatch):
    def gone(w): raise RuntimeError("Connection was likely closed")
    monkeypatch.setattr(world, "read_heartbeats", gone)
    e = world.peer_lost_error(world.World(2, 3), RuntimeError("[/a/b.cc:3] Connection closed by peer"))
    assert isinstance(e, world.PeerLostError) and "another was. Then its output names that one. (Connection closed by peer)" in str(e)

# --- what the first process does for all ---

class TwoArguments(InputError):
    def __init__(self, name, what): super().__init__(f"{name} is {what}")

class Sent:
    "A `World` of two: what the first process shares is what the other gets, pickled on the way"
    size, run_on_rank_zero = 2, world.World.run_on_rank_zero
    def wait_for_rank_zero(self): "It is done"
    def __init__(self, first, line): self.first, self.line = first, line
    def broadcast_object(self, x=None):
        if self.first: self.line.append(pickle.dumps(x))
        return pickle.loads(self.line[-1])

def unpicklable():
    e = OSError(28, "No space left", "/runs")
    e.lock = threading.Lock()
    return e

@pytest.mark.parametrize("error, kind, text", [
    (TwoArguments("lr", "wrong"), InputError, "^lr is wrong$"), (unpicklable(), OSError, "No space left.*'/runs'$"),
    (InputError("as it is"), InputError, "^as it is$"), (FileNotFoundError(2, "No such file", "a"), FileNotFoundError, "No such file")])
def test_what_the_first_raises_is_raised_on_all(error, kind, text):
    "Its own error there, and elsewhere one that names the cause, whether pickling can keep it or not"
    def fails(): raise error
    line = []
    with pytest.raises(type(error)) as e: Sent(True, line).run_on_rank_zero(fails)
    assert e.value is error
    with pytest.raises(kind, match=text) as e: Sent(False, line).run_on_rank_zero(fails)

def test_an_answer_that_cannot_be_sent():
    "Is an error on all, too, not one that leaves the others waiting"
    line = []
    with pytest.raises(Exception, match="pickle"): Sent(True, line).run_on_rank_zero(threading.Lock)
    with pytest.raises(Exception, match="pickle"): Sent(False, line).run_on_rank_zero(threading.Lock)
    assert Sent(True, line).run_on_rank_zero(lambda: 3) == Sent(False, line).run_on_rank_zero(None) == 3

class KeywordOnly(RunError):
    "Pickled, it has no `code`, and can't be made from what is sent"
    def __init__(self, text, *, code): super().__init__(text); self.code = code

class Mute(Exception):
    def __str__(self): raise ValueError("no text")

def local_error():
    class Local(InputError): pass # which pickle doesn't find by its name
    return Local("only here")

def with_lock(e): e.lock = threading.Lock(); return e

ERRORS = dict( # name -> what the first process raises, the class that the other one gets, and the text of both
    plain=(lambda: Finished("nothing left to do"), Finished, "nothing left to do"),
    unpicklable=(lambda: with_lock(Finished("with a lock")), Finished, "with a lock"),
    disk=(unpicklable, OSError, "[Errno 28] No space left: '/runs'"), keyword=(lambda: KeywordOnly("no GPU", code=3), RunError, "no GPU"),
    local=(local_error, InputError, "only here"), foreign=(lambda: with_lock(KeyError("k")), KeyError, "'k'"), mute=(Mute, Exception, None))

def outcomes(w):
    "Of each of `ERRORS`, of a result that can't be sent, and of one that can: what this process gets, from a world and from a coordinator"
    def got(run, f):
        try: return run(f)
        except Exception as e:
            try: return type(e).__name__, str(e)
            except ValueError: return type(e).__name__, None
    def raising(make):
        def f(): raise make()
        return f
    c, res = GroupCoordinator(w, torch.device("cpu"), Signals()), []
    for run in (w.run_on_rank_zero, c.run_on_rank_zero):
        res.append({k: got(run, raising(make)) for k, (make, *_) in ERRORS.items()} | dict(result=got(run, threading.Lock), value=got(run, lambda: w.rank)))
    c.stop_watching()
    return res

def test_errors_and_results_between_processes():
    "What the first process raises ends all of them with its text, and none waits for another; what foreseen errors are, they stay"
    first, other = spawn.run_distributed(2, outcomes)
    for mine, sent in zip(first, other):
        for k, (make, kind, text) in ERRORS.items():
            assert mine[k] == (type(make()).__name__, text), k
            assert sent[k][0] == kind.__name__ and (sent[k][1] == text or text is None and "Mute" in sent[k][1]), (k, sent[k])
        assert mine["result"] == sent["result"] and "pickle" in mine["result"][1] and "result" in mine["result"][1]
        assert (mine["value"], sent["value"]) == (0, 0)

def test_the_others_wait_for_the_first(monkeypatch):
    "However long it takes: without the time limit of a collective, and until it is lost"
    looks, store = [], {}
    class Store:
        def set(self, k, v): store[k] = v
        def check(self, ks):
            looks.append(ks)
            if len(looks) == 3: World(0, 2).wait_for_rank_zero()
            if len(looks) > 9: raise RuntimeError("Connection was likely closed")
            return ks[0] in store
    monkeypatch.setattr(world, "notes", Store)
    monkeypatch.setattr(world, "TURNS", itertools.cycle([1]))
    monkeypatch.setattr(world.time, "sleep", lambda s: None)
    World(1, 2).wait_for_rank_zero()
    assert len(looks) == 3
    monkeypatch.setattr(world, "TURNS", itertools.count(2))
    with pytest.raises(world.PeerLostError, match="Connection was likely closed"): World(1, 2).wait_for_rank_zero()

def test_a_result_of_a_notebook_that_cannot_be_sent():
    "`run_distributed` says why, instead of that the process died"
    with pytest.raises(RunError, match="cannot pickle '_thread.lock' object"): spawn.run_distributed(2, lock_of)

def lock_of(w): return threading.Lock()
