"""On a CPU, Triton's interpreter spends a third of its time on looking through its own modules: it puts its functions in the place of the
language's at each call of a kernel, and once more at each call of a function in it. Here it looks once, and does so once in a launch.
Another third goes into the types of tensors, which are made anew for each value: here what belongs to a type is made once, and what has the
type and shape that it shall have is not looked at further. And sums and products of integers are not computed once more in 64 bits, for an
assertion that Triton makes only where kernels are debugged. What kernels compute stays the same."""
from functools import cache

def run_kernels_quickly():
    "From here on, where Triton is one that works so"
    try:
        from triton.runtime import interpreter as it
        needed = it._LangPatchScope, it._patch_lang, it._patch_builtin, it._get_np_dtype, it.GridExecutor, it.inspect, it.tl
        semantic = type(it.interpreter_semantic)
        broadcast, cast, result_type = semantic.broadcast_impl_value, semantic.cast, semantic.computation_type_impl
        check_overflow = semantic.binary_op_sanitize_overflow_impl
    except (ImportError, AttributeError): return
    if hasattr(it, "patched_quickly"): return
    it.patched_quickly = patched = set() # the modules of the language that this launch has changed
    tl, patch_lang, launch = it.tl, it._patch_lang, it.GridExecutor.__call__

    @cache
    def langs(fn): return frozenset(v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core)
    def patch_lang_once(fn):
        if (found := langs(fn)) in patched: return it._LangPatchScope()
        patched.add(found)
        return patch_lang(fn)
    def launch_once(self, *args, **kwargs):
        patched.clear()
        if len(types) > 1000: types.clear() # a launch has pointers of its own
        return launch(self, *args, **kwargs)

    @cache
    def builtins(pkg): return [(name, member) for name, member in it.inspect.getmembers(pkg) if tl.core.is_builtin(member)]
    def patch_builtin(pkg, builder, scope):
        for name, member in builtins(pkg): it._patch_attr(pkg, name, member, builder, scope)

    of_type = cache(it._get_np_dtype)
    def np_dtype(t):
        t = getattr(t, "element_ty", t) if isinstance(t, tl.block_type) else t
        return of_type(tl.uint64 if isinstance(t, tl.pointer_type) else t)

    type_init, tensor_init, types = tl.block_type.__init__, tl.tensor.__init__, {}
    def block_type(self, element_ty, shape):
        key = id(element_ty), *shape
        if known := types.get(key): self.__dict__ = known
        else:
            type_init(self, element_ty, shape)
            if all(type(n) is int for n in key): self.sizes, types[key] = key[1:], vars(self) # which keeps the element's type, and so its number
    def tensor(self, handle, type):
        if not (known := vars(type).get("of_tensors")):
            tensor_init(self, handle, type)
            type.of_tensors = vars(self) | dict(handle=None)
        else: vars(self).update(known, handle=handle, type=type)
    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor

    def broadcast_unequal(self, a, b):
        sizes = vars(a.type).get("sizes")
        return (a, b) if sizes and sizes == vars(b.type).get("sizes") else broadcast(self, a, b)
    def cast_other(self, x, to, *rounding): return x if x.type.scalar is to.scalar else cast(self, x, to, *rounding)
    def check_overflow_to_debug(self, *args):
        if self.builder.options.debug: check_overflow(self, *args)
    results = {}
    def result_type_once(self, *key): # types, and whether they are those of numbers
        if key not in results: results[key] = result_type(self, *key)
        return results[key]
    semantic.broadcast_impl_value, semantic.cast, semantic.computation_type_impl = broadcast_unequal, cast_other, result_type_once
    semantic.binary_op_sanitize_overflow_impl = check_overflow_to_debug

    it._patch_lang, it._patch_builtin, it._get_np_dtype, it.GridExecutor.__call__ = patch_lang_once, patch_builtin, np_dtype, launch_once
