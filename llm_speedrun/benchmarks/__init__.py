"""Step times of programs of other projects beside ours, and races with them. Imports the trainer and `tools`."""
