"""Tests of packed steps with kernels need triton; without it they are not collected."""

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_packed_training.py", "test_warmup.py"]
