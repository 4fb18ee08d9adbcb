"""What is done before and after a run: doctor, comparison, evaluations, export, text, and other models explained. Imports the trainer, and not `benchmarks`."""
