"""Optimizers, schedules and models by parameter role: what a step learns. Imports `runs` and `rungs`."""
