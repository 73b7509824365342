"""The lists of an epoch end to end, without padding between them, in steps of a few fixed shapes.

The whole epoch is laid out at once on the device. A step is four views of that: no tensor is made on the way, and
nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import EpochPlan, draw_documents, plan_epoch

ROW_MULTIPLE = 1024  # the rows of a step are a multiple of this at least: every number of rows is a shape of its own
SHAPES = 16  # about this many numbers of rows at most: a CUDA graph for each takes memory
WIDTHS = (16, 32, 64, 128)  # padded lists, where a loss wants them, have one of these widths or the list size
DRAW_CHUNK = 2**22  # random keys of documents that are made at a time


class Packed(NamedTuple):
    """A step: lists end to end, then padding rows up to a fixed number of rows.

    A step with fewer lists than the batch size has lists without documents. The padding rows are cut into lists too, of
    up to `width` rows.
    """

    rows: torch.Tensor  # [T] int64, rows of the dataset's tensors; 0 for padding
    slots: torch.Tensor  # [T] int64, places in padded lists [B, width] laid out flat; B * width for padding
    offsets: torch.Tensor  # [B + lists of padding + 1] int32, where lists begin and end
    queries: torch.Tensor  # [B] int64, positions in the dataset; a list without documents repeats one of the step
    width: int  # no list is longer
    features: torch.Tensor | None = None  # [T, F] and
    labels: torch.Tensor | None = None  # [T], and perhaps
    weights: torch.Tensor | None = None  # [T], where the dataset is not on the device: `rows` are rows of these then


class PackedLists(Iterator[Packed]):
    """The steps of one epoch; see `packed_lists`. `step` and `lists` are as in `Batches`."""

    def __init__(
        self,
        dataset: RankingDataset,
        plan: EpochPlan,
        batch_size: int,
        *,
        list_size: int,
        device: str | torch.device,
        start: int,
        row_multiple: int,
    ) -> None:
        self.step, self.lists = start, 0
        self._sizes = [end - begin for begin, end in plan.steps]
        # Lists [S, B] as positions in the dataset; a short step repeats its last list, which then has no document.
        begins, ends = np.array(plan.steps).T
        place = begins[:, None] + np.arange(batch_size)
        queries = plan.order[np.minimum(place, ends[:, None] - 1)]
        count = np.where(place < ends[:, None], np.minimum(dataset.lengths[queries], list_size), 0)  # [S, B]
        widths = np.array([*(width for width in WIDTHS if width < list_size), list_size])
        self._widths = widths[np.searchsorted(widths, count.max(1))]
        multiple = 1 if row_multiple == 1 else row_multiple * -(-batch_size * list_size // (SHAPES * row_multiple))
        rows = -(-count.sum(1) // multiple) * multiple  # [S], padding included
        self._begins = [0, *np.cumsum(rows).tolist()]
        offsets, self._offset_begins = _offsets(count, rows, self._widths, multiple)
        device = dataset.list_tensors(device)[0].device
        self._offsets = torch.from_numpy(offsets).to(device)
        self._queries = torch.from_numpy(queries).to(device)
        self._rows, self._slots, starts = _lay_out(dataset, self._queries, count, rows, self._widths)
        long = np.flatnonzero((dataset.lengths[queries] > list_size) & (count > 0))  # into [S * B]
        _draw_long(self._rows, dataset, queries.reshape(-1)[long], starts[long], plan.keys, list_size)

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
    row_multiple: int | None = None,
) -> PackedLists:
    """The same lists in the same steps as `batches` gives, end to end, for a single process.

    The rows of a step, padding included, are a multiple of `row_multiple` or more (None: of 1024); 1: there is no padding.

    >>> data = RankingDataset(np.ones((5, 2)), [0, 1, 0, 0, 2], offsets=[0, 3, 5], query_ids=[7, 9])
    >>> step = next(packed_lists(data, 2, list_size=240))
    >>> step.rows[:5].tolist(), step.offsets[:3].tolist(), step.queries.tolist()
    ([0, 1, 2, 3, 4], [0, 3, 5], [0, 1])
    """
    plan = plan_epoch(dataset.query_ids, dataset.lengths, batch_size, list_size=list_size, seed=seed, epoch=epoch)
    return PackedLists(
        dataset,
        plan,
        batch_size,
        list_size=list_size,
        device=device,
        start=start,
        row_multiple=row_multiple or ROW_MULTIPLE,
    )


def padded(
    rows: torch.Tensor, offsets: torch.Tensor, lists: int, width: int, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [B, width], 0 under the padding, and mask of a step's lists; `rows` are rows of labels [N]."""
    place = torch.arange(width, device=labels.device)
    first, end = offsets[:lists, None].long(), offsets[1 : lists + 1, None].long()
    mask = place < end - first
    return labels[rows[(first + place).where(mask, 0)]].where(mask, 0), mask


def _offsets(count: np.ndarray, rows: np.ndarray, widths: np.ndarray, multiple: int) -> tuple[np.ndarray, list[int]]:
    """Where the lists of all steps begin and end, and where each step's part begins; padding is in lists up to `width`.

    How many lists the padding is cut into depends on the width alone, so that it adds no shape; some may be empty.
    """
    lists = count.shape[1]
    ends = np.concatenate([np.zeros((len(count), 1), np.int64), np.cumsum(count, 1)], 1)  # [S, B + 1]
    sizes = lists + 1 + -(-(multiple - 1) // widths)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    step = np.repeat(np.arange(len(count)), sizes)
    place = np.arange(len(step)) - begins[step]
    padding = np.minimum(ends[step, -1] + widths[step] * (place - lists), rows[step])
    offsets = np.where(place <= lists, ends[step, np.minimum(place, lists)], padding)
    return offsets.astype(np.int32), begins.tolist()


def _lay_out(
    dataset: RankingDataset, queries: torch.Tensor, count: np.ndarray, rows: np.ndarray, widths: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Rows and slots of all steps, with the first documents of each list, and where each list [S * B] begins."""
    device, size = queries.device, queries.shape[1]
    offsets = dataset.list_tensors(device)[1]
    runs = np.concatenate([count, (rows - count.sum(1))[:, None]], 1)  # [S, B + 1], the last is padding
    starts = np.cumsum(runs.reshape(-1)) - runs.reshape(-1)
    slot = np.arange(size + 1) * widths[:, None]  # [S, B + 1]
    total = int(rows.sum())
    run = torch.repeat_interleave(torch.from_numpy(runs.reshape(-1)).to(device), output_size=total)  # [total]
    place = torch.arange(total, device=device) - torch.from_numpy(starts).to(device)[run]
    place = place.where(run % (size + 1) < size, 0)
    first = torch.nn.functional.pad(offsets[queries], (0, 1)).view(-1)  # [S * (B + 1)], 0 for padding
    slots = torch.from_numpy(slot.reshape(-1)).to(device)[run] + place
    return first[run] + place, slots, starts.reshape(runs.shape)[:, :size].reshape(-1)


def _draw_long(
    rows: torch.Tensor,
    dataset: RankingDataset,
    queries: np.ndarray,
    starts: np.ndarray,
    keys: np.ndarray,
    list_size: int,
) -> None:
    """Put into `rows`, from each of `starts` on, the documents drawn from queries that are longer than `list_size`."""
    labels, offsets = dataset.list_tensors(rows.device)
    at_once = max(1, DRAW_CHUNK // max(1, int(dataset.lengths.max())))
    for begin in range(0, len(queries), at_once):
        part = queries[begin : begin + at_once]
        query = torch.from_numpy(part).to(rows.device)
        first = offsets[query].unsqueeze(1)
        length = offsets[query + 1].unsqueeze(1) - first
        key = torch.from_numpy(keys[part]).to(rows.device)
        drawn = draw_documents(labels, first, length, key, int(dataset.lengths[part].max()), list_size)
        start = torch.from_numpy(starts[begin : begin + at_once]).to(rows.device).unsqueeze(1)
        target = start + torch.arange(list_size, device=rows.device)
        rows[target.view(-1)] = (first + drawn).view(-1)
