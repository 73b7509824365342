"""How exactly numbers are computed, and the caller's settings again afterwards."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rankgrad.training.threads import most_threads, torch_threads

PRECISIONS = ("float32", "tf32", "bf16")
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x, x[0])"


@contextlib.contextmanager
def threads_and_precision(threads: int, precision: str) -> Iterator[None]:
    """CPU threads, 0 for torch's number, and TF32 in matrix products if that is the precision."""
    before = torch.get_float32_matmul_precision()
    with torch_threads(threads or most_threads()):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def usable_bfloat16(amp: torch.autocast) -> Iterator[None]:
    """Do without oneDNN while bfloat16 is asked of a CPU whose matrix units do not work."""
    one_dnn: Any = torch.backends.mkldnn
    before = one_dnn.enabled
    if amp._enabled and amp.device == "cpu" and _broken_matrix_units():
        one_dnn.enabled = False
    try:
        yield
    finally:
        one_dnn.enabled = before


@functools.cache
def _broken_matrix_units() -> bool:
    """Some virtual machines announce AMX and crash when it is used: another process tries it first."""
    try:
        announced = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        announced = False
    return announced and subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode != 0
