"`make speedrun` installs the kernels for a Hopper GPU where the driver names one: once, and training goes on without them. Tried with commands that only note their words."
import os, shutil, subprocess
import pytest
from make_readme import ROOT

NOTES = """#!/bin/sh
echo "$(basename "$0") $*" >> "$NOTED"
case "$*" in *hopper*) echo 'ERROR: no such wheel' >&2; exit $FAILS;; esac
"""
DRIVER = "#!/bin/sh\necho \"$*\" > \"$ASKED\"\n[ \"$GPUS\" = none ] && exit 9\nprintf '%b' \"$GPUS\"\n"

@pytest.fixture
def speedrun(tmp_path):
    "(compute capabilities, a line each) -> the exit code, what is printed, and the commands that were called"
    (tmp_path/".venv/bin").mkdir(parents=True); (tmp_path/"path").mkdir()
    (tmp_path/".venv/torch").write_text("torch\n")
    for name in ("Makefile", "settings.ini", "setup.py"): shutil.copy(ROOT/name, tmp_path)
    programs = dict.fromkeys((".venv/bin/python", ".venv/bin/speedrun_train", ".venv/bin/pip"), NOTES) | {"path/nvidia-smi": DRIVER}
    for name, text in programs.items(): (tmp_path/name).write_text(text); (tmp_path/name).chmod(0o755)
    (tmp_path/".venv/ready").touch()
    def run(gpus, fails=0, driver=True, target="speedrun", args=""):
        noted = tmp_path/"noted"
        noted.unlink(missing_ok=True)
        if not driver: (tmp_path/"path/nvidia-smi").unlink()
        env = dict(os.environ, NOTED=str(noted), ASKED=str(tmp_path/"asked"), GPUS=gpus, FAILS=str(fails), PATH=f"{tmp_path}/path:{os.environ['PATH']}")
        for k in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"): env.pop(k, None) # of `make test`, if it runs this
        p = subprocess.run(["make", target, "TORCH=torch", f"ARGS={args}"], cwd=tmp_path, env=env, capture_output=True, text=True)
        return p.returncode, p.stdout, noted.read_text().splitlines()
    return run

INSTALL, TRAIN = "python -m pip install -qq -e .[hopper]", "speedrun_train "

@pytest.mark.parametrize("gpus", ["9.0\\n", "8.0\\n9.0\\n"])
def test_once_on_hopper(speedrun, gpus, tmp_path):
    code, said, noted = speedrun(gpus)
    assert (code, noted) == (0, [INSTALL, TRAIN]) and said.count("\n") == 1 and "Hopper" in said and "FlashAttention-4 and QuACK" in said
    assert "compute_cap" in (tmp_path/"asked").read_text()
    assert speedrun(gpus) == (0, "", [TRAIN])

@pytest.mark.parametrize("gpus", ["8.9\\n", "10.0\\n", "12.0\\n", "none", "", "[N/A]\\n"])
def test_nothing_elsewhere(speedrun, gpus): assert speedrun(gpus) == (0, "", [TRAIN])

def test_nothing_without_a_driver(speedrun):
    if shutil.which("nvidia-smi"): pytest.skip("this machine has a driver of its own")
    assert speedrun("", driver=False) == (0, "", [TRAIN])

def test_a_failed_install_stops_nothing(speedrun):
    "It says what failed, trains, and tries again the next time"
    for _ in range(2):
        code, said, noted = speedrun("9.0\\n", fails=1)
        assert (code, noted) == (0, [INSTALL, TRAIN]) and "failed" in said and "no such wheel" in said
    assert speedrun("9.0\\n")[2] == [INSTALL, TRAIN]

def test_a_new_install_asks_again(speedrun, tmp_path):
    "Where the requirements changed, all is installed anew"
    speedrun("9.0\\n")
    os.utime(tmp_path/"settings.ini", (4e9, 4e9))
    noted = speedrun("9.0\\n")[2]
    first = "python -m pip install -qq torch -e .[dev]"
    assert INSTALL in noted and first in noted and noted.index(INSTALL) > noted.index(first)

def test_other_targets_ask_for_nothing():
    p = subprocess.run(["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True)
    assert "hopper]" not in p.stdout

def test_confirm(speedrun):
    "`make confirm` measures with those kernels, and takes options"
    code, said, noted = speedrun("9.0\\n", target="confirm", args="--rivals clones")
    assert (code, noted) == (0, [INSTALL, "python tests/confirm.py --rivals clones"])
    assert speedrun("8.9\\n", target="confirm")[2][-1] == "python tests/confirm.py"
