"""The optimizations, each a function from a run to a run, with their kernels. Imports `runs`, `model`, `data` and `distributed`, and other rungs."""
