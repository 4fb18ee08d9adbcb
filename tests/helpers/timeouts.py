"""Time in the tests: one limit for all that is waited for, and a clock that does not depend on the machine. A limit is no measure of
speed: what takes longer than that has hung. A busy machine may take many times as long as an idle one."""
import random, sys, time

TIMEOUT = 600 # seconds after which a process, a thread or a condition that a test waits for counts as hung
NOTEBOOK_TIMEOUT = 2*3600 # the same for a whole notebook, of which some train for minutes on a GPU

def wait_until(ready, alive=lambda: True, every=.01): # () -> anything; whether it can still become true; seconds between two looks
    "Wait until `ready()` is true, and return what it returned. Fails when `alive()` is false, or after `TIMEOUT`"
    end = time.monotonic() + TIMEOUT
    while not (res := ready()):
        assert alive(), "it ended before that"
        assert time.monotonic() < end, f"not after {TIMEOUT} s"
        time.sleep(every)
    return res

def until_some_moment(most): # seconds
    "Sleep for a random time, so that a kill comes anywhere in what another process does. No test depends on how long"
    time.sleep(random.random()*most)

class FakeClock:
    "Seconds that pass in `sleep` alone. Fixture `clock` puts one in the place of Python's"
    def __init__(self): self.now = 1000.
    def __call__(self): return self.now
    def sleep(self, seconds): self.now += seconds

def calls_of(f): # () -> anything
    "How many functions `f()` calls, in Python and in C: the work it does, which is the same on an idle and on a busy machine"
    n, before = [0], sys.getprofile()
    def count(frame, event, arg): n[0] += event in ("call", "c_call")
    sys.setprofile(count)
    try: f()
    finally: sys.setprofile(before)
    return n[0]
