"""Ragged at rest, padded in flight: from a RankingDataset to batches, with one gather.

This file may touch a dataset and its tensors, nothing else. The plan of an epoch (which queries form which
step) is made once, on the host, from the list lengths; a step then uses tensors already on the device.

Nothing here depends on a random stream. The order of the queries is a function of (seed, epoch, query id), the
documents drawn from a long list one of (seed, epoch, query id, place in the list). So a run that resumes at
any step and a run on any number of ranks see the same lists in the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from rankgrad.checks import whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import mix, random_keys

POOL = 32  # batches whose queries are sorted by length among each other: more pads less, fewer mixes better
ORDER, STEPS, DRAW = range(3)  # what a random key is for
GAMMA = -0x61C8864680B583EB  # splitmix64's odd increment: different places get different keys
FIRST, LAST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class Batch(NamedTuple):
    """Padded lists: features [B, L, F], labels [B, L], mask [B, L] (True = a real document), queries [B].

    Real documents stand first, in the order of the dataset; features and labels of the padding are 0.
    `queries` holds positions in the dataset, by which to look up query ids and weights.
    """

    features: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    queries: torch.Tensor


class Batches(Iterator[Batch]):
    """The batches of one epoch on one rank, made by `batches`.

    `len` counts the steps to come; `step` is the number of the next, the `start` of a run that resumes here;
    `lists` is how many lists the last step had over all ranks.
    """

    def __init__(
        self,
        dataset: RankingDataset,
        plan: tuple[np.ndarray, list[tuple[int, int]]],
        keys: np.ndarray,
        *,
        list_size: int | None,
        fixed: bool,
        rank: int,
        world: int,
        start: int,
        device: str | torch.device,
    ) -> None:
        order, self._steps = plan
        self.step = start
        self.lists = 0
        self._list_size, self._fixed, self._share = list_size, fixed, slice(rank, None, world)
        self._lengths = dataset.lengths[order]  # on the host: shapes must be known without asking the device
        self._features, self._labels, offsets = dataset.tensors(device)
        self._queries = torch.from_numpy(order).to(offsets.device)
        self._keys = torch.from_numpy(keys[order]).to(offsets.device)
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
            place = draw(self._labels, first, length, keys, longest, width)  # [B, L]
        else:
            place = torch.arange(width, device=first.device).unsqueeze(0)
        mask = place < length  # [B, L]
        document = first + place.where(mask, 0)
        features = self._features.index_select(0, document.reshape(-1))  # the one gather
        padding = int((width - np.minimum(lengths[self._share], width)).sum())
        features.index_fill_(0, torch.nonzero_static(~mask.reshape(-1), size=padding).squeeze(1), 0)
        features = features.view(*mask.shape, features.shape[1])
        labels = self._labels[document].where(mask, 0)
        return Batch(features, labels, mask, self._queries[begin:end][self._share])


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
    """Every query exactly once, in batches on the device where the dataset is made resident.

    - `batch_size` is the number of lists of a step over all ranks, so that `world` changes the speed and
      nothing else: rank r takes lists r, r + world, ... of every step. All ranks have the same number of steps
      and the same padded length; where a step is short, a rank may get a batch of no lists.
    - Lists longer than `list_size` are subsampled uniformly without replacement and keep their order; only if
      that drew no relevant document (label > 0) while the list has one, the last drawn is replaced by a
      random relevant one. `list_size=None` takes lists at full length.
    - `shuffle=True`: queries in random order, those of 32 batches at a time sorted by length, then the
      batches in random order; a short batch comes last. `shuffle=False`: queries by length, longest first.
    - `pad="longest"` pads to the longest list of the step, `"fixed"` to `list_size` exactly.
    - `max_documents` bounds lists x padded length of a step: lists too long for that go in smaller batches,
      one by one at worst. For evaluation at full length with a batch size that suits short lists.
    - `start` skips that many steps.

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
    if pad not in ("longest", "fixed"):
        raise ValueError(f"pad is {pad!r}; expected 'longest' or 'fixed'")
    if pad == "fixed" and list_size is None:
        raise ValueError("pad='fixed' needs a length; expected list_size to be a number; give list_size")
    if pad == "fixed" and list_size is not None and max_documents is not None:  # every list is as long as the padding
        batch_size, max_documents = min(batch_size, max(1, max_documents // list_size)), None
    lengths = dataset.lengths if list_size is None else np.minimum(dataset.lengths, list_size)
    if shuffle:
        plan = shuffled_plan(dataset.query_ids, lengths, batch_size, max_documents, seed=seed, epoch=epoch)
    else:
        order = np.argsort(-lengths, kind="stable")
        plan = order, _cut(lengths[order], 0, len(order), batch_size, max_documents)
    if not 0 <= start <= len(plan[1]):
        raise ValueError(f"start is {start}; expected a step from 0 to {len(plan[1])}, the number of steps")
    return Batches(
        dataset,
        plan,
        random_keys(dataset.query_ids, seed, epoch, DRAW),
        list_size=list_size,
        fixed=pad == "fixed",
        rank=rank,
        world=world,
        start=start,
        device=device,
    )


def shuffled_plan(
    ids: np.ndarray, lengths: np.ndarray, batch_size: int, max_documents: int | None, *, seed: int, epoch: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The queries in an order [Q], and the steps as (begin, end) into it."""
    order = np.argsort(random_keys(ids, seed, epoch, ORDER), kind="stable")
    whole = len(order) - len(order) % batch_size
    pool = np.arange(len(order)) // (POOL * batch_size)
    pool[whole:] = len(order)  # what fills no batch is drawn at random, not the shortest of a pool
    order = order[np.lexsort((-lengths[order], pool))]
    pools = np.append(np.flatnonzero(np.diff(pool, prepend=-1)), len(order)).tolist()
    steps = []
    for begin, end in pairwise(pools):
        steps += _cut(lengths[order], begin, end, batch_size, max_documents)
    full = sum(begin < whole for begin, _ in steps)
    shuffled = np.argsort(random_keys(np.arange(full), seed, epoch, STEPS), kind="stable").tolist()
    return order, [steps[i] for i in shuffled] + steps[full:]


def _cut(
    lengths: np.ndarray, begin: int, end: int, batch_size: int, max_documents: int | None
) -> list[tuple[int, int]]:
    """Steps (begin, end) over lengths that fall from begin to end."""
    steps = []
    while begin < end:
        room = batch_size if max_documents is None else max(1, max_documents // int(lengths[begin]))
        steps.append((begin, min(begin + min(batch_size, room), end)))
        begin = steps[-1][1]
    return steps


def draw(
    labels: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    keys: torch.Tensor,
    longest: int,
    list_size: int,
) -> torch.Tensor:
    """Places [B, list_size] of the documents drawn from lists at rows first [B, 1] of labels, length [B, 1].

    Every document has a random key and the smallest are drawn. The relevant document with the smallest key
    goes before all others: that changes nothing if a relevant one is drawn anyway, and otherwise puts a random
    relevant one in place of the last drawn. Places beyond the end of a short list stand last.
    """
    place = torch.arange(longest, device=first.device)
    real = place < length  # [B, longest]
    relevant = real & (labels[first + place.where(real, 0)] > 0)
    random = mix(keys.unsqueeze(1) + place * GAMMA)
    best = random.where(relevant, LAST).argmin(1, keepdim=True)
    random = random.where(real, LAST)
    random.scatter_(1, best, random.gather(1, best).where(~relevant.any(1, keepdim=True), FIRST))
    return random.topk(list_size, largest=False).indices.sort(1).values
