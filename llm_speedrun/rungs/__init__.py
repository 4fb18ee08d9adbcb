"""The optimizations, each a function from a run to a run, with their kernels. Imports what makes a run and measures it, and other rungs; no recipe and no trainer."""
