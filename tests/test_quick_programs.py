"The programs that tests start as copies of a process that has imported PyTorch: they are as real ones in all that tests look at."
import os, signal, subprocess, sys
from pathlib import Path
import pytest
from helpers import quick_programs
from helpers.timeouts import TIMEOUT, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="a real program starts there")
LOADED = "import sys; sys.exit('torch' not in sys.modules)"
SEEN = """import os, sys, threading
print(*map(repr, (sys.argv, sys.path, os.getcwd(), __name__, globals().get("__file__"), os.environ.get("A"), [s.encoding for s in (sys.stdin, sys.stdout, sys.stderr)],
      [s.errors for s in (sys.stdin, sys.stdout, sys.stderr)], sys.stdout.write_through, sys.stderr.line_buffering, os.getppid(), os.getpgrp() == os.getpid(),
      os.getsid(0) == os.getpid(), threading.active_count(), sorted(os.listdir("/proc/self/fd"))[:3], sys.stdin.read())), sep=chr(10))
print("é 漢", file=sys.stderr)"""

def both(code, *args, stdin="given", **kw):
    "What a real program and a copy leave: exit code, output, errors"
    for run in (subprocess.run, quick_programs.run):
        p = run([sys.executable, "-c", code, *args], input=stdin, capture_output=True, text=True, timeout=TIMEOUT, **kw)
        yield p.returncode, p.stdout, p.stderr

@linux
def test_a_copy_has_pytorch(): assert quick_programs.run([sys.executable, "-c", LOADED]).returncode == 0

@linux
@pytest.mark.parametrize("more", [{}, dict(A="b", PYTHONPATH="/a:/b"), dict(PYTHONIOENCODING="ascii:replace"), dict(PYTHONUNBUFFERED="1"), dict(PYTHONSAFEPATH="1")], ids=str)
def test_what_it_sees(tmp_path, more):
    for session in (False, True):
        real, copy = both(SEEN, "--a", "b c", cwd=tmp_path, env=os.environ | more, start_new_session=session)
        assert real == copy and real[0] == 0

@linux
def test_a_script(tmp_path):
    (tmp_path/"a.py").write_text(SEEN)
    real, copy = (run([sys.executable, "a.py", "1"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True) for run in (subprocess.run, quick_programs.run))
    assert (real.returncode, real.stdout, real.stderr) == (copy.returncode, copy.stdout, copy.stderr) and "a.py" in real.stdout

@linux
@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "import sys; sys.exit('no')", "1/0", "import os; os._exit(9)", "import os; os.kill(os.getpid(), 9)",
    "raise KeyboardInterrupt", "import atexit; atexit.register(print, 1)", "import threading; threading.Timer(.01, print, [2]).start()", "not Python",
    "import os; os.close(1); print(1)"])
def test_how_it_ends(code):
    "With Python's exit code and words: of a traceback, the last line"
    real, copy = both(code)
    assert real[:2] == copy[:2] and real[2].splitlines()[-1:] == copy[2].splitlines()[-1:]

@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals(number):
    "It is a child of this process, which can be killed, and waited for"
    with quick_programs.Popen([sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as p:
        assert p.stdout.readline() == b"1\n" and p.poll() is None
        assert str(p.pid) in " ".join(f.read_text() for f in Path("/proc/self/task").glob("*/children")).split()
        p.send_signal(number)
        assert p.wait(TIMEOUT) == -number
    wait_until(lambda: not Path(f"/proc/{p.pid}").exists())

@linux
def test_random_numbers_differ():
    "Also where a generator is part of a module that is loaded"
    said = {quick_programs.run([sys.executable, "-c", "import random, numpy; print(random.random(), *numpy.random.rand(1))"], capture_output=True).stdout for _ in "ab"}
    assert len({n for line in said for n in line.split()}) == 4

@pytest.mark.parametrize("words, env", [(["-I", "-c", LOADED], {}), (["-c", LOADED], dict(MPLBACKEND="svg")), (["-m", "this"], {})])
def test_the_real_program_starts_where_a_copy_would_differ(words, env):
    p = quick_programs.run([sys.executable, *words], env=os.environ | env, capture_output=True)
    assert p.returncode == (0 if "this" in words else 1)

@linux
def test_what_torchrun_starts():
    "With `--gpus` it is a copy, too: a child of the program that starts it, with the environment and session it is given, and the name of its rank"
    child = "import os, sys; print('torch' in sys.modules, os.getppid(), os.environ['RANK'], os.getsid(0) == os.getpid(), open('/proc/self/comm').read()); sys.exit(7)"
    code = f"""import os, sys
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
children = [SubprocessHandler(sys.executable, ("-c", {child!r}), dict(RANK=str(i), TORCHELASTIC_RUN_ID="x"), None, None, i, None) for i in range(2)]
print([c.proc.wait() for c in children], os.getpid())"""
    p = quick_programs.run([sys.executable, "-c", code, "--gpus", "2"], capture_output=True, text=True, timeout=TIMEOUT)
    assert p.returncode == 0, p.stderr
    lines = sorted(filter(None, p.stdout.splitlines()))
    pid = lines[-1].split()[-1]
    assert lines == [f"True {pid} {i} True rank {i}" for i in range(2)] + [f"[7, 7] {pid}"], p.stderr
