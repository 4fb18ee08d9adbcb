import os
os.environ.setdefault("MPLBACKEND", "Agg")     # charts are written to files here, never to a window
import pytest, torch

def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU, skipped where there is none")

def pytest_collection_modifyitems(items):
    if torch.cuda.is_available(): return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use, and this machine has none")
    for item in items:
        if "cuda" in item.keywords: item.add_marker(skip)
