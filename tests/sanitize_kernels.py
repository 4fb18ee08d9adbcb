"""Runs every Triton kernel of the package once at small odd sizes, for NVIDIA's compute-sanitizer on a GPU:
    compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes application-only python tests/sanitize_kernels.py [CASES]
    compute-sanitizer --tool racecheck --error-exitcode 9 --target-processes application-only python tests/sanitize_kernels.py [CASES]
`--list` shows the cases and the compute capability that each needs. memcheck finds accesses beyond a tensor, also those that a later
mask hides; racecheck hazards in shared memory alone, so not a `tl.debug_barrier()` that orders accesses to a tensor: test_kernels.py
has those. Each tensor is an allocation of its own, without PyTorch's cache. Ends with a line that counts kernels, and with 1 where one
was left out."""
import os, sys
from pathlib import Path
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1" # before torch: what lies beyond a tensor is then nobody's
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from helpers.kernel_cases import CAPABILITY, CASES, all_kernels, recorded

def run_cases(names, device):
    "Run some cases. Returns the names of the kernels that ran, and of the cases that this GPU can't run"
    left_out = []
    with recorded() as ran:
        for name in names:
            if torch.cuda.get_device_capability(device) < CAPABILITY.get(name, (0, 0)): left_out.append(name); continue
            torch.manual_seed(0)
            CASES[name](device)
            torch.cuda.synchronize()
            print(f"{name}: done", flush=True)
    return ran, left_out

def main(names):
    if "--list" in names:
        for name in CASES: print(name, "needs compute capability {}.{}".format(*CAPABILITY[name]) if name in CAPABILITY else "")
        return 0
    if wrong := {*names} - {*CASES}: sys.exit(f"no such case: {', '.join(wrong)}. There are {', '.join(CASES)}")
    if not torch.cuda.is_available(): sys.exit("sanitize_kernels needs an NVIDIA GPU")
    ran, left_out = run_cases(names or [*CASES], torch.device("cuda"))
    missing = set() if names else all_kernels() - ran
    print(f"ran {len(ran & all_kernels())} of {len(all_kernels())} kernels; left out: {', '.join(sorted(missing)) or 'none'}; "
          f"cases that this GPU can't run: {', '.join(left_out) or 'none'}")
    return int(bool(missing))

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
