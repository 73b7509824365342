"""Padded batches of a dataset that is stored without padding.

Each is one gather: from a tensor already on the device or, where the features are too large for that, from rows that are
read and scaled for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

import numpy as np
import torch

from rankgrad.checks import one_of, whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.order import EpochPlan, draw_documents, plan_epoch

ROWS_READ = 1024  # rows that are read and scaled at a time, where features are not on the device


class Batch(NamedTuple):
    """Padded lists: features [B, L, F], labels [B, L], mask [B, L] (True = a real document), queries [B].

    Real documents come first, in the order of the dataset; features and labels of the padding are 0.
    `queries` holds positions in the dataset, by which to look up query ids and weights.
    """

    features: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    queries: torch.Tensor


class WeightedBatch(NamedTuple):
    """A `Batch` of a dataset whose documents have weights: the same, and weights [B, L], 0 under the padding."""

    features: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    queries: torch.Tensor
    weights: torch.Tensor


class Batches(Iterator[Batch]):
    """The batches of one epoch on one rank, made by `batches`.

    `len` counts the steps to come; `step` is the number of the next, the `start` of a run that resumes here;
    `lists` is how many lists the last step had over all ranks.
    """

    def __init__(
        self,
        dataset: RankingDataset,
        plan: EpochPlan,
        *,
        list_size: int | None,
        fixed: bool,
        rank: int,
        world: int,
        start: int,
        device: str | torch.device,
    ) -> None:
        self.step, self.lists = start, 0
        self._steps = plan.steps
        self._list_size, self._fixed, self._share = list_size, fixed, slice(rank, None, world)
        self._lengths = dataset.lengths[plan.order]  # on the host: shapes must be known without asking the device
        self._features = dataset.batch_source(device)
        self._labels, offsets = dataset.list_tensors(device)
        self._weights = dataset.weight_tensor(device)
        self._queries = torch.from_numpy(plan.order).to(offsets.device)
        self._keys = torch.from_numpy(plan.keys[plan.order]).to(offsets.device)
        self._first = offsets[self._queries]
        self._length = offsets[self._queries + 1] - self._first

    def __len__(self) -> int:
        return len(self._steps) - self.step

    def __next__(self) -> Batch:
        if self.step == len(self._steps):
            raise StopIteration
        begin, end = self._steps[self.step]
        self.step += 1
        self.lists = end - begin
        first = self._first[begin:end][self._share].unsqueeze(1)  # [B, 1]
        length = self._length[begin:end][self._share].unsqueeze(1)
        lengths = self._lengths[begin:end]
        longest = int(lengths.max())
        limit = self._list_size
        width = longest if limit is None else limit if self._fixed else min(longest, limit)
        if longest > width:
            keys = self._keys[begin:end][self._share]
            place = draw_documents(self._labels, first, length, keys, longest, width)  # [B, L]
        else:
            place = torch.arange(width, device=first.device).unsqueeze(0)
        mask = place < length  # [B, L]
        document = first + place.where(mask, 0)
        if isinstance(self._features, FeatureRows):
            features = _read(self._features, document, mask)
        else:
            features = self._features.index_select(0, document.reshape(-1))  # the one gather
            padding = int((width - np.minimum(lengths[self._share], width)).sum())
            features.index_fill_(0, torch.nonzero_static(~mask.reshape(-1), size=padding).squeeze(1), 0)
            features = features.view(*mask.shape, features.shape[1])
        labels = self._labels[document].where(mask, 0)
        queries = self._queries[begin:end][self._share]
        if self._weights is None:
            return Batch(features, labels, mask, queries)
        weights = self._weights[document].where(mask, 0)
        return cast(Batch, WeightedBatch(features, labels, mask, queries, weights))  # which has all that a Batch has


def _read(source: FeatureRows, document: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Features [B, L, F] of documents [B, L] that are not in the device's memory; the padding is 0."""
    features = torch.zeros(*mask.shape, source.shape[1])
    places = mask.reshape(-1).cpu().numpy().nonzero()[0]
    rows, flat = document.reshape(-1).cpu().numpy()[places], features.view(-1, source.shape[1]).numpy()
    for first in range(0, len(places), ROWS_READ):  # so that a batch takes little more than its own size
        flat[places[first : first + ROWS_READ]] = source[rows[first : first + ROWS_READ]]
    return features.to(mask.device)


def batches(
    dataset: RankingDataset,
    batch_size: int,
    *,
    list_size: int | None = 240,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world: int = 1,
    device: str | torch.device = "cpu",
    shuffle: bool = True,
    pad: Literal["longest", "fixed"] = "longest",
    start: int = 0,
    max_documents: int | None = None,
) -> Batches:
    """The batches of one epoch: every query of the dataset exactly once.

    - `dataset`: its tensors are moved to the device once, and stay there; features that are too large for it are read,
      scaled and moved batch by batch.
    - `batch_size`: lists of a step over all ranks, so that `world` changes the speed and nothing else.
    - `list_size`: longer lists are subsampled to this length, uniformly and without replacement, and keep their order.
      If no relevant document (label > 0) was drawn from a list that has one, the last drawn is replaced by a random
      relevant one. None takes lists at full length.
    - `seed`, `epoch`: shuffles and subsamples are functions of these and of the query.
    - `rank`, `world`: rank r of `world` processes takes lists r, r + world, ... of every step. All ranks have the same
      number of steps and the same padded length; where a step is short, a rank may get a batch of no lists.
    - `device`: where the batches are made.
    - `shuffle`: True takes queries in random order, sorts those of 32 batches at a time by length, then takes the
      batches in random order; a short batch comes last. False takes queries by length, longest first.
    - `pad`: "longest" pads to the longest list of the step, "fixed" to `list_size` exactly.
    - `start`: how many steps to skip, for a run that resumes.
    - `max_documents`: a bound on lists x padded length of a step. Lists too long for it go in smaller batches, one by
      one at worst: for evaluation at full length with a batch size that suits short lists.

    >>> data = RankingDataset(np.ones((5, 2)), [0, 1, 0, 0, 2], offsets=[0, 3, 5], query_ids=[7, 9])
    >>> batch = next(batches(data, 2, shuffle=False))
    >>> batch.mask.tolist(), batch.queries.tolist()
    ([[True, True, True], [True, True, False]], [0, 1])
    """
    batch_size = whole("batch_size", batch_size, 1)
    list_size = None if list_size is None else whole("list_size", list_size, 1)
    max_documents = None if max_documents is None else whole("max_documents", max_documents, 1)
    seed, epoch, start = whole("seed", seed), whole("epoch", epoch), whole("start", start)
    rank, world = whole("rank", rank), whole("world", world)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of world {world}; expected 0 <= rank < world")
    fixed = one_of("pad", pad, ("longest", "fixed")) == "fixed"
    if fixed and list_size is None:
        raise ValueError("pad='fixed' needs a length; expected list_size to be a number; give list_size")
    if fixed and list_size is not None and max_documents is not None:  # every list is as long as the padding
        batch_size, max_documents = min(batch_size, max(1, max_documents // list_size)), None
    plan = plan_epoch(
        dataset.query_ids,
        dataset.lengths,
        batch_size,
        list_size=list_size,
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        max_documents=max_documents,
    )
    if not 0 <= start <= len(plan.steps):
        raise ValueError(f"start is {start}; expected a step from 0 to {len(plan.steps)}, the number of steps")
    return Batches(dataset, plan, list_size=list_size, fixed=fixed, rank=rank, world=world, start=start, device=device)
