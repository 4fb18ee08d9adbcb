"""Lessons count the operations of a step again and again, many of them the same step: here a process counts each once. And on fake tensors one of
our operations computes all that it would compute, to find the shapes of what it returns: here once for each shape of what it is given."""
from functools import wraps

def layout(t):
    "What another tensor must have to be like it; None where a compiler leaves a size open"
    sizes = (*t.shape, *t.stride(), t.storage_offset(), n := t.untyped_storage().nbytes())
    return None if any(type(k) is not int for k in sizes) else (t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset(), n)

def key_of(x):
    "What decides on the shapes that an operation returns, of one argument or of several. Raises `TypeError` for one that is open"
    import torch
    if isinstance(x, (list, tuple)): return tuple(map(key_of, x))
    if isinstance(x, torch.Tensor):
        if (found := layout(x)) is None: raise TypeError("a size that is open")
        return found
    if x is not None and type(x) not in (int, float, bool, str, torch.dtype): raise TypeError(type(x))
    return type(x), x

def like(known):
    "New tensors of these layouts"
    import torch
    if isinstance(known, list): return tuple(map(like, known))
    dtype, device, shape, stride, offset, n = known
    return torch.empty(n//dtype.itemsize, dtype=dtype, device=device).as_strided(shape, stride, offset)

def once_for_each_shape(f):
    "`f`, a fake implementation of an operation: it returns new tensors"
    import torch
    known = {}
    def fake(*args, **kwargs):
        try: key = key_of(args), key_of([*kwargs.items()])
        except TypeError: return f(*args, **kwargs)
        if key in known: return like(known[key])
        res = f(*args, **kwargs)
        every = [layout(t) if isinstance(t, torch.Tensor) else None for t in (res if isinstance(res, tuple) else [res])]
        if all(every): known[key] = every if isinstance(res, tuple) else every[0]
        return res
    return fake

def compute_shapes_quickly():
    "Of operations that are there, and of those that a lesson makes, where PyTorch is one that works so"
    try:
        from torch._library.custom_ops import CustomOpDef, OPDEFS
        register, ours = CustomOpDef.register_fake, [op for name, op in OPDEFS.items() if name.startswith("llm_speedrun::") and op._abstract_fn]
    except (ImportError, AttributeError): return
    for op in ours: op._abstract_fn = once_for_each_shape(op._abstract_fn)
    CustomOpDef.register_fake = lambda self, f: register(self, once_for_each_shape(f) if self._qualname.startswith("llm_speedrun::") else f)

def count_quickly():
    "From here on"
    import torch
    from llm_speedrun import rung_registry, step_builder
    compute_shapes_quickly()
    plain, known = step_builder.count_step, {}

    @wraps(plain)
    def count_step(config, rungs=(), batch=1, micro=None, **how):
        specs = tuple(step_builder.resolve_options(config, rungs))
        state = torch.backends.cuda.matmul.fp32_precision, tuple(s.rung for s in rung_registry.rung_specs(specs)) # a lesson may register another of the name
        key = config, specs, batch, micro, *map(id, state[1]), state[0]
        if how: return plain(config, specs, batch, micro, **how)
        if key not in known: known[key] = state, plain(config, specs, batch, micro)
        return [*known[key][1]]
    step_builder.count_step = count_step
