"""What NVIDIA's datasheets say of the GPUs on the page of GPUs. Rates are dense, with sums in FP32, which
training needs: a datasheet's large print is often with sparsity, or for GeForce cards with sums in FP16, and
each of these doubles it."""
from dataclasses import dataclass

@dataclass(frozen=True)
class GPU:
    "One GPU. TFLOP/s by format; a format that it doesn't multiply isn't there"
    name: str
    said: str # what PyTorch calls it
    capability: tuple # compute capability
    gb: float # memory as it is sold: that many GiB, or a little less
    gbs: float # GB/s
    tflops: dict
    source: str
    note: str = ""

DATA_CENTER = "https://www.nvidia.com/en-us/data-center/"
ADA_PDF = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
GA102_PDF = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
HOPPER = dict(fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9)
AMPERE = dict(fp32=19.5, tf32=156, fp16=312, bf16=312)
H100 = f"[datasheet]({DATA_CENTER}h100/), SXM"
A100 = f"[datasheet]({DATA_CENTER}a100/), SXM"
ADA = f"[whitepaper of Ada]({ADA_PDF})"
GA102 = f"[whitepaper of GA102]({GA102_PDF})"
T4_CAPPED = "https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462"

GPUS = [
    GPU("H200", "NVIDIA H200", (9, 0), 141, 4800, HOPPER, f"[datasheet]({DATA_CENTER}h200/), SXM"),
    GPU("H100", "NVIDIA H100 80GB HBM3", (9, 0), 80, 3350, HOPPER, H100),
    GPU("A100 80 GB", "NVIDIA A100-SXM4-80GB", (8, 0), 80, 2039, AMPERE, A100),
    GPU("A100 40 GB", "NVIDIA A100-SXM4-40GB", (8, 0), 40, 1555, AMPERE, A100),
    GPU("L40S", "NVIDIA L40S", (8, 9), 48, 864, dict(fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
        f"[datasheet]({DATA_CENTER}l40s/)"),
    GPU("RTX 4090", "NVIDIA GeForce RTX 4090", (8, 9), 24, 1008,
        dict(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3), ADA),
    GPU("RTX 4080", "NVIDIA GeForce RTX 4080", (8, 9), 16, 716.8,
        dict(fp32=48.7, tf32=48.7, fp16=97.5, bf16=97.5, fp8=194.9), ADA),
    GPU("RTX 3090", "NVIDIA GeForce RTX 3090", (8, 6), 24, 936,
        dict(fp32=35.6, tf32=35.6, fp16=71, bf16=71), GA102),
    GPU("RTX 3080", "NVIDIA GeForce RTX 3080", (8, 6), 10, 760,
        dict(fp32=29.8, tf32=29.8, fp16=59.5, bf16=59.5), GA102,
        "The card of 10 GB; that of 12 GB is a little faster."),
    GPU("T4", "Tesla T4", (7, 5), 16, 320, dict(fp32=8.1, fp16=65), f"[datasheet]({DATA_CENTER}tesla-t4/)",
        "What a free notebook on Colab has. With error correction on, it reports less memory. Its "
        f"power limit of 70 W [keeps it far below its peak]({T4_CAPPED}): expect less than *likely* says."),
    GPU("V100", "Tesla V100-SXM2-32GB", (7, 0), 32, 900, dict(fp32=15.7, fp16=125),
        f"[datasheet]({DATA_CENTER}v100/), SXM2",
        "There is one of 16 GB too. PyTorch's builds for CUDA 12.8 and newer have no code for Volta: take "
        "that for [CUDA 12.6](https://github.com/pytorch/pytorch/issues/172352), as long as there is one."),
]
