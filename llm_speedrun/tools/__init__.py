"""What is done before and after a run: doctor, comparison, evaluations, export, text. Imports the trainer, and not `benchmarks`."""
