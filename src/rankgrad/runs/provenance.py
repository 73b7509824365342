"""Where a result comes from: versions, the commit of the checkout, the machine."""

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad import __version__


def ask_other_programs() -> None:
    """Ask git for the commit, and the system for its processor, once and before anything begins.

    What is checked out while a process trains is not what it runs. And a process that is killed while it starts another leaves a
    child that holds its locks for some milliseconds more: whoever resumes at once would be refused.
    """
    _commit()
    platform.processor()  # keeps what it has found


def versions() -> dict[str, str | None]:
    """What ran: the library, its commit where it runs from a checkout, Python, torch, numpy."""
    return {
        "rankgrad": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def machine_facts(device: torch.device, threads: int) -> dict[str, Any]:
    """The machine, for a report."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "device": name, "threads": threads}


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout this file belongs to; a changed checkout says so; None if git does not know the file."""
    package = Path(__file__).parents[1]

    def git(*words: str) -> str:
        # Without locks: a run that is killed at this moment would leave one in the checkout.
        command = ["git", "--no-optional-locks", "-C", str(package), *words]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        return asked.stdout.strip()

    try:
        if not git("ls-files", "runs/provenance.py"):  # a repository around an installed copy is not ours
            return None
        return git("rev-parse", "HEAD") + (" (modified)" if git("status", "--porcelain", "-uno", ".") else "")
    except OSError:  # no git here
        return None
