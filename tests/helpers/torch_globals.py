"All of PyTorch's process-wide settings; imports nothing of the package, so that its own import can be checked."
import random
import numpy as np, torch

FP32 = [(b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")] + [("generic", "all")]
SDP = "flash mem_efficient math cudnn".split()
MATMUL = ("allow_tf32 allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction "
          "allow_fp16_accumulation").split()

def read(f):
    "What `f` returns, or that it refuses, as PyTorch's old names do once a new one has been set"
    try: return f()
    except RuntimeError: return "refused"

def flags():
    "Every process-wide setting of PyTorch that a rung could leave changed, as a dict"
    b = torch.backends
    res = {f"fp32_precision {o}": torch._C._get_fp32_precision_getter(*o) for o in FP32}
    res |= {f"sdp {o}": getattr(b.cuda, f"{o}_sdp_enabled")() for o in SDP}
    res |= {f"matmul {o}": read(lambda: getattr(b.cuda.matmul, o)) for o in MATMUL}
    res |= {f"cudnn {o}": read(lambda: getattr(b.cudnn, o)) for o in "enabled allow_tf32 benchmark deterministic".split()}
    for d in ("cpu", "cuda"): res |= {f"autocast {d}": (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))}
    return res | dict(
        float32_matmul=read(torch.get_float32_matmul_precision), autocast_cache=torch.is_autocast_cache_enabled(),
        sdp_order=torch._C._get_sdp_priority_order(), sdp_reduction=b.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        dtype=torch.get_default_dtype(), device=torch.get_default_device(), threads=torch.get_num_threads(),
        grad=torch.is_grad_enabled(), inference=torch.is_inference_mode_enabled(), anomaly=torch.is_anomaly_enabled(),
        deterministic=(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()))

def random_states():
    "The state of every global random generator, as a dict"
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return dict(torch=torch.get_rng_state().tolist(), cuda=cuda, python=random.getstate(), numpy=str(np.random.get_state()))

def changed(before):
    "The names of the settings that differ from `before`, an earlier `flags()`"
    return [k for k, v in flags().items() if v != before[k]]
