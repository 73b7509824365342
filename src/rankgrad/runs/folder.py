"""What a run keeps of every query it was judged on: queries.safetensors, for paired comparisons and reports. Room 5.

Beside the metrics of the run stand the length of each list, its number of relevant documents (label above 0), and NDCG@k
at the cut-offs a report draws; NaN marks queries without a relevant document. Imports checkpoint and data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.files import load_tensors, save_tensors
from rankgrad.data.dataset import RankingDataset

FILE = "queries.safetensors"
CURVE = {k: f"ndcg@{k}" for k in (*range(1, 21), 30, 50, 100)}


@dataclass(frozen=True)
class Judged:
    """Per-query values [Q] of one split, NaN at empty queries; what an older file does not hold is None or empty."""

    split: str
    query_ids: list[Any]
    metrics: dict[str, np.ndarray]  # by name, float64
    documents: np.ndarray | None = None  # int64
    relevant: np.ndarray | None = None  # int64
    curve: dict[int, np.ndarray] = field(default_factory=dict)  # NDCG@k by k, float32


def with_curve(metrics: Sequence[str]) -> list[str]:
    """What is to be measured, once each, on the split that `keep` is called for.

    >>> with_curve(["map", "ndcg@2"])[:4]
    ['map', 'ndcg@2', 'ndcg@1', 'ndcg@3']
    """
    return list(dict.fromkeys([*metrics, *CURVE.values()]))


def keep(
    folder: Path, split: str, data: RankingDataset, values: Mapping[str, np.ndarray], metrics: Sequence[str]
) -> None:
    """Write the file from the values [Q] of all that `with_curve(metrics)` names."""
    tensors = {name: torch.from_numpy(values[name]) for name in metrics}
    tensors["documents"] = torch.from_numpy(data.lengths)
    tensors["relevant"] = torch.from_numpy(np.add.reduceat(data.labels > 0, data.offsets[:-1], dtype=np.int64))
    curve = np.stack([values[name] for name in CURVE.values()])
    tensors["curve"] = torch.from_numpy(curve.astype(np.float32))  # [K, Q]
    facts = {"split": split, "query_ids": data.query_ids.tolist(), "metrics": list(metrics), "cutoffs": list(CURVE)}
    save_tensors(folder / FILE, tensors, facts)


def kept(folder: Path) -> Judged:
    """What `keep` wrote; an older file holds the metrics alone."""
    tensors, facts = load_tensors(folder / FILE, "; put a copy of it back, or train the run again")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Judged(
        split=facts["split"],
        query_ids=facts["query_ids"],
        metrics={name: arrays[name] for name in facts["metrics"]},
        documents=arrays.get("documents"),
        relevant=arrays.get("relevant"),
        curve=dict(zip(facts.get("cutoffs", ()), arrays.get("curve", ()))),
    )
