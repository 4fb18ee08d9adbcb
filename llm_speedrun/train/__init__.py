"""The trainer: options, what is decided before a run, the step, the loop, what a run leaves. Imports all folders above, and none of `benchmarks` and `tools`."""
