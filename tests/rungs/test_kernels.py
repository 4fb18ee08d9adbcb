"""What all Triton kernels have in common: they touch nothing beyond their tensors, take any number of blocks, and find their places beyond 2^31
elements. `mutate_kernels.py` shows that these tests can fail."""
import subprocess, sys
from pathlib import Path
import pytest, torch
from helpers.kernel_cases import CAPABILITY, CASES, all_kernels, recorded

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def test_each_kernel_has_a_case(kernels):
    "Each kernel that the package launches is one that `sanitize_kernels.py` runs"
    with recorded() as ran:
        for f in CASES.values(): f(DEVICE)
    assert ran == all_kernels() and len(ran) >= 40
    assert {*CAPABILITY} < {*CASES} and max(CAPABILITY.values()) <= (9, 0)

def test_the_sanitizer_lists_its_cases():
    "And says which need a GPU of a certain compute capability"
    script = Path(__file__).resolve().parent.parent/"sanitize_kernels.py"
    out = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=True).stdout
    assert [l.split()[0] for l in out.splitlines()] == [*CASES] and "fp8 needs compute capability 8.9" in out
