"""On a CPU, processes that `llm_speedrun.distributed.spawn` starts begin as copies of one that has imported torch: importing takes each three
seconds of CPU, and is nothing that a test would learn from. What they are told by the environment they get as ever. They wait for one
another for as long as anything in the tests is waited for: on a busy machine one of them may come minutes after the others."""
import gc, multiprocessing, multiprocessing.forkserver, multiprocessing.util, os
from unittest.mock import patch
import torch.multiprocessing
from helpers.timeouts import TIMEOUT

def in_environment(env, target, args):
    os.environ.clear(); os.environ.update(env)
    gc.freeze() # what all begin with
    from llm_speedrun.distributed import spawn, world
    join = world.join_world
    world.join_world = spawn.join_world = lambda *args, **limits: join(*args, **limits | dict(timeout=TIMEOUT, patience=TIMEOUT))
    target(*args)

class QuickContext(multiprocessing.context.ForkServerContext):
    "Stands for the context of `spawn`"
    def Process(self, target, args): return super().Process(target=in_environment, args=({**os.environ}, target, args))

def forked(path, words, kept):
    "Stands for `spawnv_passfds`: the server is a fork of this process, with the same files open, and imports nothing"
    if pid := os.fork(): return pid
    try:
        below = 3
        for fd in [*sorted(kept), 1 << 16]: os.closerange(below, fd); below = fd + 1
        exec(words[-1], {})
    finally: os._exit(0)

def start_quickly(now=False): # whether this process is a new one with all that they need: then they are copies of it
    "From here on"
    quick, context_of = QuickContext(), torch.multiprocessing.get_context
    quick.set_forkserver_preload(["torch._dynamo"])
    if now:
        with patch.object(multiprocessing.util, "spawnv_passfds", forked): multiprocessing.forkserver.ensure_running()
    torch.multiprocessing.get_context = lambda method=None: quick if method == "spawn" else context_of(method)
