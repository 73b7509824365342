"""The kernels' modules import triton: they are not collected without it, and run in its interpreter without a GPU."""

import gc
import importlib.util
import os

import pytest
import torch

collect_ignore_glob = [
    "tests/*/conftest.py",  # pytest reads them as such; as modules with doctests their names would clash
    "docs/conf.py",  # Sphinx's
    "docs/examples/*.py",  # programs, started by their tests
]
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob += [
        "src/rankgrad/kernels/[a-z]*.py",
        "src/rankgrad/kernels/*/*.py",
        "src/rankgrad/kernels/*/*/*.py",
    ]
elif not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

# Modules that are slow as a whole (kernels in the interpreter, pages, whole runs); single tests carry the mark themselves.
SLOW = (
    "tests/cli/test_cli_finished_runs.py",
    "tests/cli/test_cli_train.py",
    "tests/kernels/test_encoder.py",
    "tests/kernels/test_long_lists.py",
    "tests/kernels/test_pairs.py",
    "tests/kernels/test_short_lists.py",
    "tests/report/test_report.py",
    "tests/reproduce/test_table2.py",
    "tests/reproduce/test_trials.py",
    "tests/runs/test_run.py",
    "tests/test_compile.py",
)


def pytest_configure(config):
    """Compile the loops of losses once, before the processes that run the tests start: each would compile them for itself."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        from rankgrad.losses import neural_map, neural_ndcg

        scores = torch.zeros(1, 2, requires_grad=True)
        (neural_ndcg(scores, torch.ones(1, 2)) + neural_map(scores, torch.ones(1, 2))).backward()


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(SLOW) or "test_float32_gradients_are_accurate" in item.nodeid:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Every run of training ends with a full collection of garbage, which need not look through thousands of tests each time."""
    gc.collect()
    gc.freeze()
