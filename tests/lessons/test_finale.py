"`make lesson` trains on the text that it is given, or prepares some, or says that it is a smoke run: tried with commands that only note their words."
import os, shutil, subprocess
import pytest
from make_readme import ROOT
from llm_speedrun.train.config import DataOptions, parse_options

NOTES = """#!/bin/sh
case "$*" in -c*) exit $WITHOUT_GPU;; esac
echo "$(basename "$0") $* | $LESSON_CORPUS" >> "$NOTED"
[ "$(basename "$0")" != "$FAILS" ]
"""

@pytest.fixture
def lesson(tmp_path):
    "(variables) -> the exit code, what is printed, and the commands that were called"
    (tmp_path/".venv/bin").mkdir(parents=True); (tmp_path/".venv/torch").write_text("torch\n")
    for name in ("Makefile", "settings.ini", "setup.py"): shutil.copy(ROOT/name, tmp_path)
    for name in ("python", "speedrun_data"):
        (tmp_path/".venv/bin"/name).write_text(NOTES); (tmp_path/".venv/bin"/name).chmod(0o755)
    (tmp_path/".venv/ready").touch()
    def run(*variables, gpu=True, fails=""):
        env = dict(os.environ, WITHOUT_GPU=str(int(not gpu)), NOTED=str(tmp_path/"noted"), FAILS=fails)
        env.pop("LESSON_CORPUS", None)
        p = subprocess.run(["make", "lesson", "TORCH=torch", *variables], cwd=tmp_path, env=env, capture_output=True, text=True)
        noted = (tmp_path/"noted").read_text().replace(str(tmp_path), "HERE").splitlines() if (tmp_path/"noted").exists() else []
        return p.returncode, p.stdout, noted
    return run

RUN = "python tests/run_notebook.py nbs/7_using_a_model/73_finale.ipynb runs/lesson.ipynb | "

@pytest.mark.parametrize("corpus, there", [("mine", "HERE/mine"), ("/a/b", "/a/b"), ("my own", "HERE/my own")])
def test_a_corpus_that_is_given(lesson, corpus, there):
    code, said, noted = lesson(f"LESSON_CORPUS={corpus}", gpu=False)
    assert (code, noted) == (0, [RUN + there]) and "runs/lesson.ipynb" in said and "smoke" not in said

def test_without_a_gpu_it_is_a_smoke_run(lesson):
    code, said, noted = lesson(gpu=False)
    assert (code, noted) == (0, [RUN]) and "a smoke run" in said

def test_text_is_prepared_once(lesson, tmp_path):
    code, _, noted = lesson()
    assert code == 0 and noted[0].startswith("speedrun_data --data fineweb-edu ") and "--out HERE/runs/fineweb-edu |" in noted[0]
    words = noted[0].partition(" |")[0].split()[1:]
    c, _ = parse_options(DataOptions, "speedrun_data", words) # which knows each option
    assert c.max_tokens > 1e8 and c.val_frac*c.max_tokens > 1e6
    assert noted[1:] == [RUN + "HERE/runs/fineweb-edu"]
    (tmp_path/"runs/fineweb-edu").mkdir(); (tmp_path/"noted").unlink()
    assert lesson()[2] == [RUN + "HERE/runs/fineweb-edu"]

@pytest.mark.parametrize("fails, n", [("speedrun_data", 1), ("python", 2)])
def test_what_fails_ends_it(lesson, fails, n):
    code, said, noted = lesson(fails=fails)
    assert code != 0 and len(noted) == n and "The story is" not in said
