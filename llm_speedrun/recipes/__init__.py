"""Optimizers, schedules and starts of a model by parameter role: what a step learns. Imports what makes a run, `rungs` and `distributed`, no trainer."""
