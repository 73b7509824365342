"""What is written down of something that was trained: report.json and queries.safetensors, the same for all. Room 5.

Imports data, evaluate and queries.
"""

import functools
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad import __version__
from rankgrad.files import write_atomically
from rankgrad.data.dataset import RankingDataset
from rankgrad.training.evaluate import summarise
from rankgrad.runs.folder import keep, with_curve

CONVENTION = "gain 2^y - 1, discount 1 / log2(rank + 1), ties in input order"
LAST_EPOCH = "last epoch, whatever validation said"
FIRST_EPOCH = "first epoch, because no validation query tells one ranking from another"


def wanted(splits: Mapping[str, RankingDataset], metrics: Sequence[str]) -> dict[str, Sequence[str]]:
    """The metrics to measure on each split, for `record`."""
    return {**dict.fromkeys(splits, metrics), judged(splits): with_curve(metrics)}


def record(
    out: Path,
    splits: Mapping[str, RankingDataset],
    results: Mapping[str, Mapping[str, np.ndarray]],
    metrics: Sequence[str],
    facts: Mapping[str, Any],
    *,
    device: torch.device,
    threads: int,
) -> None:
    """Write the per-query values of what was `wanted` and, last, the report: its presence means that all is finished.

    `facts` holds what was trained and how: loss, data, seed, selection, best_epoch, epochs, seconds, processes.
    """
    split = judged(splits)
    keep(out, split, splits[split], results[split], metrics)
    known = versions()
    report = {
        "loss": facts["loss"],
        "metrics": {split: summarise({name: of[name] for name in metrics}) for split, of in results.items()},
        "convention": f"{CONVENTION}; {facts['selection']}",
        "splits": {split: _counts(data) for split, data in splits.items()},
        **facts,
        "commit": known.pop("commit"),
        "versions": known,
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "device": _device_name(device),
            "threads": threads,
        },
    }
    write_atomically(out / "report.json", (json.dumps(without_nan(report), indent=2) + "\n").encode())


def versions() -> dict[str, str | None]:
    """What ran: the library, its commit where it runs from a checkout, Python, torch, numpy."""
    return {
        "rankgrad": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def judged(splits: Mapping[str, RankingDataset]) -> str:
    """The split whose per-query values are kept: test where there is one with a relevant document."""
    return "test" if "test" in splits and (splits["test"].labels > 0).any() else "vali"


def _counts(data: RankingDataset) -> dict[str, int]:
    empty = data.describe().empty_queries
    return {"queries": len(data), "documents": len(data.labels), "empty_queries": empty}


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout this file belongs to; a changed checkout says so; None if git does not know the file.

    Asked once, early: what is checked out while a process trains is not what it runs.
    """

    def git(*words: str) -> str:
        asked = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # a repository around an installed copy is not ours
            return None
        return git("rev-parse", "HEAD") + (" (modified)" if git("status", "--porcelain", "-uno", ".") else "")
    except OSError:  # no git here
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
