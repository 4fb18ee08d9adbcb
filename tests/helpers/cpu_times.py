"""Which notebooks show a speedup that a CPU measured. `time.perf_counter` gives numbers that remember where they come from: a difference of two is a
time, a quotient of two times is a speedup, and a speedup that becomes text, or a bar of a chart, is noted with its line. Percentages are shares of a time.
What goes through NumPy or a tensor, or to another process, is a plain number again."""
import functools, linecache, sys, time

# Lessons that show a speedup of the reader's own CPU, or of a rate over another -> why
CPU_EXPERIMENTS = {"00_start": "what a CPU gains", "03_roofline": "FLOP per byte of this machine: no speedup"}
# Lessons that still show others, as of 2026-11-29: empty when these are rewritten
CPU_SPEEDUPS_AWAITING = "12_flash".split()
PARTS = "12" # of the course, by the first digit of a folder, that keep to this; the others haven't been looked at yet
SHOWN = [] # pairs of a notebook's line and the text

class Clock(float):
    "A reading of the clock"
    def __sub__(self, other): return Took(float(self) - float(other)) if isinstance(other, Clock) else float(self) - other
    def __reduce__(self): return float, (float(self),)

class Took(float):
    "A time of this CPU, or what follows from one, such as tokens per second"
    def __reduce__(self): return float, (float(self),)

class Speedup(Took):
    "How many times one time goes into another"
    def __format__(self, spec): return noted(float.__format__(self, spec), spec)
    def __str__(self): return noted(float.__repr__(self))
    def __repr__(self): return noted(float.__repr__(self))

def line_of_notebook():
    "The line of the cell that is running, '' outside of one"
    f, found = sys._getframe(2), ""
    while f:
        if f.f_code.co_name == "test_fail": return "" # a message that no reader sees
        if f.f_code.co_filename.startswith("<ipython-input"): found = linecache.getline(f.f_code.co_filename, f.f_lineno).strip() or "?"
        f = f.f_back
    return found

def noted(text, spec=""):
    if not spec.endswith("%") and (line := line_of_notebook()): SHOWN.append((line, text))
    return text

def kind(of, a, b):
    "What a result is: two times divided by one another are a speedup, which remains one"
    if of == "truediv" and isinstance(a, Took) and isinstance(b, Took) and not isinstance(a, Speedup) and not isinstance(b, Speedup): return Speedup
    if isinstance(a, Took) and isinstance(b, Took) and Speedup in (type(a), type(b)) and Took in (type(a), type(b)): return Took
    return Speedup if Speedup in (type(a), type(b)) else Took

def operation(of, reverse):
    plain = getattr(float, f"__{'r'*reverse}{of}__")
    @functools.wraps(plain)
    def f(self, other):
        res = plain(self, other)
        if not isinstance(res, float): return res
        return kind(of, *((other, self) if reverse else (self, other)))(res)
    return f

for of in ("add", "sub", "mul", "truediv", "pow"):
    for reverse in (False, True): setattr(Took, f"__{'r'*reverse}{of}__", operation(of, reverse))
Took.__round__ = lambda self, digits=None: round(float(self)) if digits is None else type(self)(round(float(self), digits))
Took.__abs__ = lambda self: type(self)(abs(float(self)))

def speedups_in(o):
    "Whether a speedup is among the numbers that a chart gets"
    return isinstance(o, Speedup) or isinstance(o, (list, tuple)) and any(map(speedups_in, o)) or isinstance(o, dict) and any(map(speedups_in, o.values()))

def watch_charts():
    from matplotlib.axes import Axes
    for name in ("bar", "barh", "plot", "scatter", "semilogx", "semilogy", "loglog", "errorbar"):
        def f(*args, draws=getattr(Axes, name), **kwargs):
            args = [[*a] if isinstance(a, type({}.values())) else a for a in args]
            if speedups_in(args) or speedups_in(kwargs): noted("a chart")
            return draws(*args, **kwargs)
        setattr(Axes, name, functools.wraps(getattr(Axes, name))(f))

def watch():
    "From now on, in this process"
    clock = time.perf_counter
    time.perf_counter = lambda: Clock(clock())
    watch_charts()
