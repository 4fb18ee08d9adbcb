"""Programs that tests start, as copies of a process that has imported PyTorch: importing takes each some two seconds of CPU, and is nothing
that most tests would learn from. `Popen` and `run` stand for those of `subprocess`. What they start is a process like any other: a child of
this one, with the environment, folder, streams, session and arguments that it is given; it ends with Python's own exit codes, and takes
signals. But it begins with modules loaded: a test of what is imported, of memory, or of Python's options starts the real program.
What `--gpus` starts by torchrun are copies, too, called `rank 0`, `rank 1`, ... by the system.

Where that can't be (no Linux, other options of Python, other settings of libraries that are loaded) the real program starts. Run as a program,
this file is the process that is copied."""
import ctypes, inspect, io, os, pickle, signal, socket, struct, subprocess, sys, threading, time
from contextlib import contextmanager, suppress

PRELOAD = """numpy torch torch._dynamo torch.distributed safetensors.torch tokenizers tqdm jinja2 msgspec packaging.version
    matplotlib.figure matplotlib.backends.backend_agg""".split()
GIVEN = set("""PYTHONPATH PYTHONSAFEPATH PYTHONIOENCODING PYTHONUNBUFFERED OMP_NUM_THREADS TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR""".split()) # a copy can be told these
READ_LATER = "TORCH_NCCL", "TORCH_FR", "TORCH_ELASTIC", "TORCHELASTIC" # and those that begin so
READ_AT_IMPORT = "PYTHON TORCH TRITON OMP KMP MKL LD_ MPL ATEN C10 PT_ NUMPY OPENBLAS LANG LC_".split() # those that begin so it can't
SUBREAPER = 36 # PR_SET_CHILD_SUBREAPER of Linux' prctl.h

def settings(env): return {k: v for k, v in env.items() if k.startswith(tuple(READ_AT_IMPORT)) and k not in GIVEN and not k.startswith(READ_LATER)}

# --- here ---

PLAIN, ENV, LOCK, SERVER = subprocess.Popen, {**os.environ}, threading.Lock(), {} # as they are before the first test

class Server:
    "The process that is copied, which begins with the first program, or has begun already"
    def __init__(self, line=None):
        if line: self.line = line; return
        self.line, theirs = socket.socketpair()
        with theirs: self.process = PLAIN([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                          env=ENV)

    def fork(self, fds, **how): # its streams
        "Start a program, and return its number"
        with adopting():
            socket.send_fds(self.line, [b"!"], fds)
            send(self.line, how)
            return receive(self.line)

def server():
    "The one of this process, which can't be that of a process of which it is a copy"
    pid = os.getpid()
    if pid not in SERVER: SERVER[pid] = Server()
    return SERVER[pid]

@contextmanager
def adopting():
    "Processes below this one whose parent ends inside become children of this one"
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    try: yield
    finally: prctl(SUBREAPER, 0, 0, 0, 0)

def program(words):
    "What `python` would run: whether unbuffered, its code or None, its arguments, which begin with -c or a file. None where a copy can't do that"
    if isinstance(words, (str, bytes)) or os.fspath(words[0]) != sys.executable: return None
    words = [os.fspath(w) for w in words[1:]]
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    if words[:1] == ["-c"] and len(words) > 1: return unbuffered, words[1], ["-c", *words[2:]]
    return (unbuffered, None, words) if words and not words[0].startswith("-") else None

def Popen(args, **kw):
    "`subprocess.Popen`, which is asked anew at each call: a fixture puts another in its place"
    class Quick(subprocess.Popen):
        def _execute_child(self, *args):
            a = inspect.signature(super()._execute_child).bind(*args).arguments
            env, what = ({**os.environ} if a["env"] is None else {**a["env"]}), program(a["args"])
            odd = a["preexec_fn"] or a["pass_fds"] or a["executable"] or not a["close_fds"] or settings(env) != settings(ENV)
            if what is None or odd: return super()._execute_child(*args)
            streams = [i if fd == -1 else fd for i, fd in enumerate((a["p2cread"], a["c2pwrite"], a["errwrite"]))]
            with LOCK: self.pid = server().fork(streams, env=env, what=what, cwd=os.fspath(a["cwd"] or os.getcwd()), session=a["start_new_session"])
            self._child_created = True
            self._close_pipe_fds(*(a[o] for o in "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()))
    return (Quick if sys.platform == "linux" else subprocess.Popen)(args, **kw)

def run(words, capture_output=False, input=None, timeout=None, **kw):
    "`subprocess.run`"
    if capture_output: kw |= dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None: kw["stdin"] = subprocess.PIPE
    with Popen(words, **kw) as p:
        try: out, err = p.communicate(input, timeout)
        except BaseException: p.kill(); raise
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)

# --- on the line between the two ---

def send(line, x): data = pickle.dumps(x); line.sendall(struct.pack("Q", len(data)) + data)

def receive(line):
    def exactly(n):
        data = b""
        while len(data) < n:
            if not (more := line.recv(n - len(data))): raise EOFError("the process that is copied has ended")
            data += more
        return data
    return pickle.loads(exactly(struct.unpack("Q", exactly(8))[0]))

# --- there ---

def serve(line):
    "Fork for each request, and return in the copy alone what it is to be. Its parent ends at once, and so it becomes the asking process' child"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        asked, fds, *_ = socket.recv_fds(line, 1, 3)
        if not asked: os._exit(0)
        how = receive(line)
        r, w = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if not (pid := os.fork()):
                os.close(r); os.close(w); line.close()
                while os.getppid() == between: time.sleep(.001)
                return fds, how
            os.write(w, struct.pack("i", pid))
            os._exit(0)
        os.close(w)
        for fd in fds: os.close(fd)
        os.waitpid(between, 0)
        send(line, struct.unpack("i", os.read(r, 4))[0])
        os.close(r)

def starts_others(env, what, **how):
    "Whether it is a command that starts a group of processes, and none of these"
    return "RANK" not in env and any(w.startswith("--gpus") for w in what[2])

def leave_server():
    "Fork. Returns a line to the copy, and in that none: it is as it was before it became a program, and can be copied in its turn"
    ours, theirs = socket.socketpair()
    if os.fork(): theirs.close(); return ours, None
    ours.close()
    return None, theirs

def become(fds, env, what, cwd, session, base, others=None):
    "Take on all that makes a program, and return its source, where that is from, and its module. `others` is a line to what it can copy"
    unbuffered, code, argv = what
    if session: os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.flush(); sys.stderr.flush()
    for i, fd in enumerate(fds): os.dup2(fd, i)
    if others: os.dup2(others.detach(), 3, inheritable=False)
    os.closerange(3 + bool(others), 1 << 16)
    os.chdir(cwd)
    os.environ.clear(); os.environ.update(env)
    encoding, _, errors = env.get("PYTHONIOENCODING", "").partition(":")
    unbuffered = unbuffered or bool(env.get("PYTHONUNBUFFERED"))
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "rb" if i == 0 else "wb"
        raw = open(i, mode, buffering=0 if unbuffered and i else -1, closefd=False)
        new = io.TextIOWrapper(raw, encoding=encoding or old.encoding, errors="backslashreplace" if i == 2 else errors or old.errors,
                               line_buffering=not unbuffered and (i == 2 or os.isatty(i)), write_through=unbuffered and i > 0)
        new.mode = mode[0]
        setattr(sys, name, new); setattr(sys, f"__{name}__", new)
    first = "" if code is not None else os.path.dirname(os.path.realpath(argv[0]))
    safe = sys.version_info >= (3, 11) and env.get("PYTHONSAFEPATH")
    sys.path[:] = [*[first]*(not safe), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.argv[:], sys.orig_argv[:] = argv, [sys.executable, *(["-c", code, *argv[1:]] if code is not None else argv)]
    import numpy, torch
    numpy.random.seed() # Python's own random numbers begin anew in a fork, NumPy's don't
    if n := env.get("OMP_NUM_THREADS"): torch.set_num_threads(int(n)) # was read when PyTorch was loaded
    if others:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
        SERVER[os.getpid()], subprocess_handler.Popen = Server(socket.socket(fileno=3)), Popen
    if rank := env.get("RANK"):
        with open("/proc/self/comm", "w") as f: f.write(f"rank {rank}")
    main = sys.modules["__main__"] = type(sys)("__main__")
    if code is None:
        main.__file__ = os.path.abspath(argv[0])
        with open(argv[0], "rb") as f: code = f.read()
    return code, getattr(main, "__file__", "<string>"), main.__dict__

def run_as_main(source, name, there):
    "Run a program as Python runs its main module, and return its exit code"
    try: exec(compile(source, name, "exec"), there); return 0
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int): return (e.code or 0) & 0xff
        print(e.code, file=sys.stderr); return 1
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__.tb_next)
        return -signal.SIGINT if isinstance(e, KeyboardInterrupt) else 1

def end(code):
    "End as Python does, except that nothing is taken apart: that takes a second where so much is loaded"
    import atexit
    threading._shutdown()
    atexit._run_exitfuncs()
    try: sys.stdout.flush()
    except OSError as e: print(f"Exception ignored in: {sys.stdout!r}\n{type(e).__name__}: {e}", file=sys.stderr); code = 120
    with suppress(OSError): sys.stderr.flush()
    if code == -signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)

if __name__ == "__main__":
    import gc, importlib
    line = socket.socket(fileno=int(sys.argv[1]))
    path = [p for p in sys.path[1:] if p not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
    for name in PRELOAD:
        try: importlib.import_module(name)
        except ImportError: pass
    gc.freeze() # what all share is looked through by none
    streams, wanted = serve(line)
    others = None
    while starts_others(**wanted) and not others:
        others, line = leave_server()
        if line:
            for fd in streams: os.close(fd)
            streams, wanted = serve(line)
    end(run_as_main(*become(streams, base=path, others=others, **wanted)))
