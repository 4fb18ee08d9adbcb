"Lessons that count quickly count the same."
import subprocess, sys
from pathlib import Path
from helpers import quick_programs
from helpers.timeouts import TIMEOUT

PROGRAM = """
from dataclasses import replace
from llm_speedrun import step_builder
from llm_speedrun.model_config import workload
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.runs import rung
rungs = "bf16 flash fused_ops chunked_ce fp8:parts=heads+out+mlp+head fused_adamw".split()
one, two = (replace(workload("tiny"), layers=n) for n in (1, 2))
def counted(config, rungs=rungs): return [(o, sorted(o.reads.values()), sorted(o.writes.values())) for o in step_builder.count_step(config, rungs, 2, 1)]
plain, alone = counted(two), counted(one, [])
from helpers.quick_counts import count_quickly
count_quickly()
counted(one) # whose operations have the shapes of those of two layers
assert counted(two) == plain and counted(two) == plain and counted(one, []) == alone and len(plain) > 100
def own(run): return run
RUNGS["own"] = rung("parts")(own); before = counted(one, ["own"])
def own(run): return run.with_model(lambda m: m.layers.append(m.layers[0]))
RUNGS["own"] = rung("parts")(own)
assert before == alone and len(counted(one, ["own"])) > len(alone), "a lesson's rung of the same name"
print("the same")
"""

def test_quick_counts_are_the_same():
    """Names, kinds, FLOPs and bytes of each operation, also where shapes are known from another model, and a count from before; and not where a
    rung is another of the same name"""
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}"]
    p = quick_programs.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert p.stdout == "the same\n", p.stderr
