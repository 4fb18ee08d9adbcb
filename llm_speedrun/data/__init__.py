"""Texts, tokenizers, token files, corpora and loaders: from files to batches. Imports `io_utils`, `measure` and the like, no model and no trainer."""
