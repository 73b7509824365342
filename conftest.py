"""The kernels' modules import triton: they are not collected without it, and run in its interpreter without a GPU."""

import importlib.util
import os

import torch

collect_ignore_glob = [
    "tests/*/conftest.py",  # pytest reads them as such; as modules with doctests their names would clash
    "docs/conf.py",  # Sphinx's
]
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob += [
        "src/rankgrad/kernels/[a-z]*.py",
        "src/rankgrad/kernels/*/*.py",
        "src/rankgrad/kernels/*/*/*.py",
    ]
elif not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
