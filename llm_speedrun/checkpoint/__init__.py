"""Checkpoints: their format, writing, reading, and states in shards. Imports what lies below the trainer."""
