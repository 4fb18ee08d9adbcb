"The plug-ins in `examples/`, imported as `--plugin` does."
import sys
from contextlib import contextmanager
from llm_speedrun.plugins import forget_plugin, import_plugins
from make_readme import ROOT

def path_of(name): return str(ROOT/"examples"/f"{name}.py")

@contextmanager
def imported(name):
    "The module of a plug-in, whose names are forgotten at the end, as where the process ends"
    import_plugins(path := path_of(name), log_info=lambda text: None)
    try: yield next(m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == path)
    finally: forget_plugin(path)

def example(name):
    "The module of a plug-in, whose names nothing finds"
    with imported(name) as module: return module
