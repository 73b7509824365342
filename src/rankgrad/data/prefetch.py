"""Batches made by a thread a few steps before they are needed, for a dataset that does not fit on the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.packed import Packed

AHEAD = 4  # items that are made before they are asked for

Given = TypeVar("Given")
Made = TypeVar("Made")


def prefetch_to_device(
    items: Iterator[tuple[Any, int]], dataset: RankingDataset, device: torch.device
) -> Iterator[tuple[Any, int]]:
    """Batches of a dataset in the host's memory, each with its number of lists, copied to the device ahead of time."""
    source, (labels, _) = dataset.batch_source("cpu"), dataset.list_tensors("cpu")
    weights = dataset.weight_tensor("cpu")

    def make(item: tuple[Any, int]) -> tuple[Any, int]:
        batch, lists = item
        if isinstance(batch, Packed):  # its rows are those of the dataset, which is not on the device
            rows = torch.arange(len(batch.rows))
            if isinstance(source, FeatureRows):
                features = torch.from_numpy(source[batch.rows.numpy()])
            else:
                features = source[batch.rows]
            weight = None if weights is None else weights[batch.rows]
            batch = batch._replace(rows=rows, features=features, labels=labels[batch.rows], weights=weight)
        if device.type == "cuda":
            batch = batch._make(part.pin_memory() if isinstance(part, torch.Tensor) else part for part in batch)
        return batch, lists

    wide = isinstance(dataset.features, FeatureRows) and dataset.features.sparse
    for batch, lists in prefetch(items, make, ahead=1 if wide else AHEAD):
        moved = (part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part for part in batch)
        yield batch._make(moved), lists


def prefetch(source: Iterator[Given], make: Callable[[Given], Made], *, ahead: int = AHEAD) -> Iterator[Made]:
    """make(item) of each item in order, computed by a thread a few items ahead; its errors are raised here.

    >>> list(prefetch(iter([1, 2, 3]), lambda n: n * n))
    [1, 4, 9]
    """
    waiting: queue.Queue[Any] = queue.Queue(ahead)
    closed = threading.Event()

    def work() -> None:
        last: Any = None
        try:
            for item in source:
                waiting.put(("item", make(item)))
                if closed.is_set():
                    return
            last = ("end", None)
        except BaseException as error:
            last = ("error", error)
        waiting.put(last)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        closed.set()
        while thread.is_alive():  # it may be waiting to put an item that nobody asks for any more
            try:
                waiting.get(timeout=0.01)
            except queue.Empty:
                continue
