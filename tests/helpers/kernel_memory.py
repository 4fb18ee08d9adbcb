"""Triton's interpreter as a memory checker. A kernel may touch only what its tensors hold: any other place is an error here, whether the
value is used or not, where the interpreter would read what lies there. What a masked load leaves open is NaN, as it may be on a GPU."""
import gc
from contextlib import contextmanager
import numpy as np, torch

def span(t):
    "Return the first address of a tensor's elements, and the one after the last"
    last = sum((n - 1)*s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1)*t.element_size()

def merged(spans):
    "Return spans as sorted arrays of first and last addresses; those that overlap become one"
    res = []
    for a, b in sorted(spans):
        if res and a < res[-1][1]: res[-1][1] = max(b, res[-1][1])
        else: res.append([a, b])
    return np.array(res, dtype=np.uint64).reshape(-1, 2).T

PLAIN, PARAMETER = torch.Tensor, torch.nn.Parameter

def tensors_of(args, names):
    "Return the tensors that a launch may touch: its own, and with a table of addresses all that there are"
    ts = [t for t in args if isinstance(t, torch.Tensor)]
    if "table_ptr" in names: ts += [t for t in gc.get_objects() if (kind := type(t)) is PLAIN or kind is PARAMETER] # a million objects a launch
    return [t for t in ts if t.device.type == "cpu" and t.layout == torch.strided and t.numel()]

class Checked:
    "Triton's functions that touch memory, with a check before each"
    def __init__(self, real): self.real, self.spans, self.name = real, merged([]), ""
    def __getattr__(self, name): return getattr(self.real, name)
    def check(self, what, ptrs, mask, size):
        at, (first, last) = np.asarray(ptrs)[np.asarray(mask)].astype(np.uint64), self.spans
        if not at.size: return
        i = np.searchsorted(first, at, "right").astype(np.int64) - 1
        bad = (i < 0) | (at + np.uint64(size) > last[np.maximum(i, 0)])
        assert not bad.any(), f"{self.name}: {what} of {bad.sum()} places beyond its tensors"
    def load(self, ptrs, mask, other, dtype):
        self.check("load", ptrs, mask, np.dtype(dtype).itemsize)
        return self.real.load(ptrs, mask, other, dtype)
    def store(self, ptrs, value, mask):
        self.check("store", ptrs, mask, value.dtype.itemsize)
        return self.real.store(ptrs, value, mask)
    def atomic_rmw(self, op, ptr, value, mask, sem):
        self.check("atomic", ptr, mask, value.dtype.itemsize)
        return self.real.atomic_rmw(op, ptr, value, mask, sem)

@contextmanager
def checked_memory(last=None): # how many programs of each axis to run, the last ones; None: all
    "Check what kernels touch inside. Pages that no kernel touches stay unused: tensors may be larger than the memory"
    from triton.runtime import interpreter as it
    memory, grid = Checked(it._interpreter), []
    executor, builder = it.GridExecutor, it.InterpreterBuilder
    copies, load, dim, idx = executor._init_args_hst, builder.create_masked_load, builder.set_grid_dim, builder.set_grid_idx
    def init(self, args, kwargs):
        memory.name, memory.spans = self.fn.__name__, merged(map(span, tensors_of([*args, *kwargs.values()], self.arg_names)))
        grid[:] = self.grid + (1,)*(3 - len(self.grid))
        if last is not None: self.grid = tuple(min(last, n) for n in grid)
        return copies(self, args, kwargs)
    def masked_load(self, ptrs, mask, other, *how):
        if other is None:
            dtype = it._get_np_dtype(ptrs.get_element_ty())
            data = np.full(ptrs.data.shape, -1, dtype=f"i{np.dtype(dtype).itemsize}").view(dtype) # all bits: NaN in any format
            other = it.TensorHandle(data, ptrs.get_element_ty())
        return load(self, ptrs, mask, other, *how)
    patches = [(executor, "_init_args_hst", init), (builder, "create_masked_load", masked_load), (it, "_interpreter", memory),
               (executor, "_restore_args_dev", lambda *args: None), # a copy of each tensor to itself
               (builder, "set_grid_dim", lambda self, *n: dim(self, *grid)),
               (builder, "set_grid_idx", lambda self, *i: idx(self, *(k + max(0, n - (last or n)) for k, n in zip(i, grid))))]
    olds = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for patch in patches: setattr(*patch)
    try: yield
    finally:
        for old in olds: setattr(*old)
