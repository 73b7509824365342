"""The lists of an epoch laid end to end, without padding: for steps of a few fixed shapes, planned at once on the device.

This file may touch a dataset and its tensors, nothing else. The lists, their documents and their order are those of
`batches`, functions of (seed, epoch, query, document) as there. What a step needs is four views of the epoch's plan: no
tensor is made on the way, and nothing is asked of the device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rankgrad.data.batches import DRAW, draw, shuffled_plan
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import random_keys

ROWS_AT_ONCE = 1024  # the documents of a step are filled up to a multiple of this at least: a shape for each
SHAPES = 16  # about so many multiples there are at most, or a graph for each would take too much memory
WIDTHS = (16, 32, 64, 128)  # padded lists, where a loss wants them, have one of these widths or the list size
DRAWN_AT_ONCE = 2**22  # keys of documents that lists are drawn from together
AHEAD = 4  # steps that are gathered before they are needed

Given = TypeVar("Given")
Made = TypeVar("Made")


class Packed(NamedTuple):
    """A step: lists end to end, then filling up to a fixed number of rows.

    A step that is short of lists has some without documents. The filling is cut into lists too, of up to `width`.
    """

    rows: torch.Tensor  # [T] int64, of the dataset's tensors; 0 in the filling
    slots: torch.Tensor  # [T] int64, place in padded lists [B, width] laid out flat; B * width in the filling
    offsets: torch.Tensor  # [B + fillings + 1] int32, where lists begin and end
    queries: torch.Tensor  # [B] int64, positions in the dataset; a list without documents repeats one of the step
    width: int  # no list is longer
    features: torch.Tensor | None = None  # [T, F] and
    labels: torch.Tensor | None = None  # [T], where the dataset is not on the device: rows count these then


class PackedLists(Iterator[Packed]):
    """The steps of one epoch; see `packed_lists`."""

    def __init__(
        self,
        dataset: RankingDataset,
        batch_size: int,
        *,
        list_size: int,
        seed: int,
        epoch: int,
        device: str | torch.device,
        start: int,
    ) -> None:
        lengths = np.minimum(dataset.lengths, list_size)
        order, steps = shuffled_plan(dataset.query_ids, lengths, batch_size, None, seed=seed, epoch=epoch)
        self.step, self.lists, self._batch_size = start, 0, batch_size
        self._sizes = [end - begin for begin, end in steps]
        # Lists [S, B] as positions in the dataset; a short step repeats its last list, which then has no document.
        begins, ends = np.array(steps).T
        places = begins[:, None] + np.arange(batch_size)
        chosen = order[np.minimum(places, ends[:, None] - 1)]
        count = np.where(places < ends[:, None], lengths[chosen], 0)  # [S, B]
        longest = count.max(1)
        widths = np.array([*(w for w in WIDTHS if w < list_size), list_size])
        self._widths = widths[np.searchsorted(widths, longest)]
        grain = ROWS_AT_ONCE * -(-batch_size * list_size // (SHAPES * ROWS_AT_ONCE))
        filled = -(-count.sum(1) // grain) * grain
        self._begins = np.concatenate([[0], np.cumsum(filled)])
        offsets, self._offset_begins = _offsets(count, filled, self._widths, grain)
        _, labels, first_rows = dataset.tensors(device)
        self._make(dataset, labels, first_rows, chosen, count, filled, list_size, seed, epoch)
        self._offsets = torch.from_numpy(offsets).to(labels.device)
        self._begins = self._begins.tolist()

    def _make(
        self,
        dataset: RankingDataset,
        labels: torch.Tensor,
        offsets: torch.Tensor,
        chosen: np.ndarray,
        count: np.ndarray,
        filled: np.ndarray,
        list_size: int,
        seed: int,
        epoch: int,
    ) -> None:
        """Rows and slots of all steps."""
        device, (steps, size) = labels.device, chosen.shape
        self._queries = torch.from_numpy(chosen).to(device)  # [S, B]
        runs = np.concatenate([count, (filled - count.sum(1))[:, None]], 1)  # [S, B + 1], the last is filling
        starts = np.cumsum(runs.reshape(-1)) - runs.reshape(-1)
        slot = np.arange(size + 1) * self._widths[:, None]  # [S, B + 1]
        total = int(filled.sum())
        run = torch.repeat_interleave(torch.from_numpy(runs.reshape(-1)).to(device), output_size=total)  # [total]
        place = torch.arange(total, device=device) - torch.from_numpy(starts).to(device)[run]
        real = run % (size + 1) < size
        place = place.where(real, 0)
        self._slots = torch.from_numpy(slot.reshape(-1)).to(device)[run] + place
        first = torch.nn.functional.pad(offsets[self._queries], (0, 1)).view(-1)  # [S * (B + 1)], 0 for filling
        self._rows = first[run] + place
        long = np.flatnonzero((dataset.lengths[chosen] > list_size) & (count > 0))
        keys = random_keys(dataset.query_ids, seed, epoch, DRAW)
        at_once = max(1, DRAWN_AT_ONCE // max(1, int(dataset.lengths.max())))
        for part in range(0, len(long), at_once):
            lists = long[part : part + at_once]  # into [S * B]
            query = chosen.reshape(-1)[lists]
            longest = int(dataset.lengths[query].max())
            where = torch.from_numpy(starts.reshape(steps, -1)[:, :size].reshape(-1)[lists]).to(device)
            query_on = torch.from_numpy(query).to(device)
            begin = offsets[query_on].unsqueeze(1)
            length = offsets[query_on + 1].unsqueeze(1) - begin
            drawn = draw(labels, begin, length, torch.from_numpy(keys[query]).to(device), longest, list_size)
            target = where.unsqueeze(1) + torch.arange(list_size, device=device)
            self._rows[target.view(-1)] = (begin + drawn).view(-1)

    def __len__(self) -> int:
        return len(self._sizes) - self.step

    def __next__(self) -> Packed:
        if self.step == len(self._sizes):
            raise StopIteration
        step = self.step
        self.step, self.lists = step + 1, self._sizes[step]
        rows = slice(self._begins[step], self._begins[step + 1])
        offsets = self._offsets[self._offset_begins[step] : self._offset_begins[step + 1]]
        return Packed(self._rows[rows], self._slots[rows], offsets, self._queries[step], int(self._widths[step]))


def packed_lists(
    dataset: RankingDataset,
    batch_size: int,
    *,
    list_size: int,
    seed: int = 0,
    epoch: int = 0,
    device: str | torch.device = "cpu",
    start: int = 0,
) -> PackedLists:
    """The same lists in the same steps as `batches` gives, end to end; one process has them all.

    >>> data = RankingDataset(np.ones((5, 2)), [0, 1, 0, 0, 2], offsets=[0, 3, 5], query_ids=[7, 9])
    >>> step = next(packed_lists(data, 2, list_size=240))
    >>> step.rows[:5].tolist(), step.offsets[:3].tolist(), step.queries.tolist()
    ([0, 1, 2, 3, 4], [0, 3, 5], [0, 1])
    """
    return PackedLists(dataset, batch_size, list_size=list_size, seed=seed, epoch=epoch, device=device, start=start)


def padded(
    rows: torch.Tensor, offsets: torch.Tensor, lists: int, width: int, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels [B, width], 0 under the padding, and the mask of a step's lists; labels [N] are those that rows count."""
    place = torch.arange(width, device=labels.device)
    first, end = offsets[:lists, None].long(), offsets[1 : lists + 1, None].long()
    mask = place < end - first
    return labels[rows[(first + place).where(mask, 0)]].where(mask, 0), mask


def carried(
    items: Iterator[tuple[Any, int]], dataset: RankingDataset, device: torch.device
) -> Iterator[tuple[Any, int]]:
    """Batches of a dataset in the host's memory, made by a thread ahead of time and copied to the device."""
    features, labels, _ = dataset.tensors("cpu")

    def make(item: tuple[Any, int]) -> tuple[Any, int]:
        batch, lists = item
        if isinstance(batch, Packed):
            rows = torch.arange(len(batch.rows))
            batch = batch._replace(rows=rows, features=features[batch.rows], labels=labels[batch.rows])
        if device.type == "cuda":
            batch = batch._make(part.pin_memory() if isinstance(part, torch.Tensor) else part for part in batch)
        return batch, lists

    for batch, lists in ahead(items, make):
        moved = (part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part for part in batch)
        yield batch._make(moved), lists


def _offsets(count: np.ndarray, filled: np.ndarray, widths: np.ndarray, grain: int) -> tuple[np.ndarray, list[int]]:
    """Where the lists of all steps begin and end, their fillings in lists of up to `width`, and where each step's part begins.

    How many lists a filling is cut into depends on the width alone: some may be of no length.
    """
    lists = count.shape[1]
    ends = np.concatenate([np.zeros((len(count), 1), np.int64), np.cumsum(count, 1)], 1)  # [S, B + 1]
    sizes = lists + 1 + -(-(grain - 1) // widths)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    step = np.repeat(np.arange(len(count)), sizes)
    place = np.arange(len(step)) - begins[step]
    filling = np.minimum(ends[step, -1] + widths[step] * (place - lists), filled[step])
    offsets = np.where(place <= lists, ends[step, np.minimum(place, lists)], filling)
    return offsets.astype(np.int32), begins.tolist()


def ahead(source: Iterator[Given], make: Callable[[Given], Made]) -> Iterator[Made]:
    """make(item) of each item, computed by a thread a few items before it is asked for."""
    waiting: queue.Queue[Any] = queue.Queue(AHEAD)
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
        while thread.is_alive():
            try:
                waiting.get(timeout=0.01)
            except queue.Empty:
                continue
