"""Texts, tokenizers, token files, corpora and loaders: from files to batches. Imports `io_utils`, `timing` and `compat`, no model and no trainer."""
