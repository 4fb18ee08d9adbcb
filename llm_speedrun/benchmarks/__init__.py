"""The ladder of this machine, races with programs of other projects, step times beside theirs. Imports the trainer and `tools`."""
