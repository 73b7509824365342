"""The plan of an epoch: which lists form which step, in which order, and which documents are drawn from long lists.

Nothing here depends on a random stream. The order of the queries is a function of (seed, epoch, query id), the
documents drawn from a long list one of (seed, epoch, query id, place in the list). So a run that resumes at any step
and a run on any number of ranks see the same lists in the same steps. `batches` and `packed_lists` are two views of
the same plan.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch

Integers = TypeVar("Integers", np.ndarray, torch.Tensor)

POOL = 32  # batches whose queries are sorted by length among each other: more pads less, fewer mixes better
ORDER, STEPS, DRAW = range(3)  # what a random key is for
GAMMA = -0x61C8864680B583EB  # splitmix64's odd increment: different places get different keys
ENDLESS = 10_000  # letters of a query id, above which its digest stands for it
FIRST, LAST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class EpochPlan(NamedTuple):
    """The steps of an epoch, made once and on the host."""

    order: np.ndarray  # [Q], queries as positions in the dataset
    steps: list[tuple[int, int]]  # where each step begins and ends in the order
    keys: np.ndarray  # [Q] int64, by position in the dataset: what `draw_documents` draws with


def plan_epoch(
    query_ids: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    *,
    list_size: int | None,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    max_documents: int | None = None,
) -> EpochPlan:
    """Every query in exactly one step; `batches` says what the arguments mean.

    >>> plan = plan_epoch(np.array([7, 8, 9]), np.array([1, 5, 3]), 2, list_size=None, seed=0, epoch=0, shuffle=False)
    >>> plan.order.tolist(), plan.steps
    ([1, 2, 0], [(0, 2), (2, 3)])
    """
    keys = random_keys(query_ids, seed, epoch, DRAW)
    if list_size is not None:
        lengths = np.minimum(lengths, list_size)
    if not shuffle:
        order = np.argsort(-lengths, kind="stable")
        return EpochPlan(order, _cut(lengths[order], 0, len(order), batch_size, max_documents), keys)
    order = np.argsort(random_keys(query_ids, seed, epoch, ORDER), kind="stable")
    whole = len(order) - len(order) % batch_size
    pool = np.arange(len(order)) // (POOL * batch_size)
    pool[whole:] = len(order)  # the last, short batch holds queries drawn at random, not the shortest of a pool
    order = order[np.lexsort((-lengths[order], pool))]
    pools = np.append(np.flatnonzero(np.diff(pool, prepend=-1)), len(order)).tolist()
    steps = []
    for begin, end in pairwise(pools):
        steps += _cut(lengths[order], begin, end, batch_size, max_documents)
    full = sum(begin < whole for begin, _ in steps)
    shuffled = np.argsort(random_keys(np.arange(full), seed, epoch, STEPS), kind="stable").tolist()
    return EpochPlan(order, [steps[i] for i in shuffled] + steps[full:], keys)


def _cut(
    lengths: np.ndarray, begin: int, end: int, batch_size: int, max_documents: int | None
) -> list[tuple[int, int]]:
    """Steps (begin, end) over lengths that fall from begin to end."""
    steps = []
    while begin < end:
        limit = batch_size if max_documents is None else max(1, max_documents // int(lengths[begin]))
        steps.append((begin, min(begin + min(batch_size, limit), end)))
        begin = steps[-1][1]
    return steps


def draw_documents(
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
    relevant one in place of the last drawn. Places beyond the end of a short list come last.
    """
    place = torch.arange(longest, device=first.device)
    real = place < length  # [B, longest]
    relevant = real & (labels[first + place.where(real, 0)] > 0)
    random = mix(keys.unsqueeze(1) + place * GAMMA)
    best = random.where(relevant, LAST).argmin(1, keepdim=True)
    random = random.where(real, LAST)
    random.scatter_(1, best, random.gather(1, best).where(~relevant.any(1, keepdim=True), FIRST))
    return random.topk(list_size, largest=False).indices.sort(1).values


def mix(values: Integers) -> Integers:
    """Scramble int64 numbers, array or tensor: the finaliser of splitmix64, a bijection.

    >>> mix(np.array([0, 1, 2])).tolist()
    [0, 6238072747940578789, -2606959012126976886]
    """
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # the masks make the shifts logical
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return values ^ (values >> 31 & (1 << 33) - 1)


def hash_of(*numbers: int) -> int:
    """A pseudo-random number below 2^63 that is a function of the numbers alone.

    >>> hash_of(0, 7) == hash_of(0, 7), hash_of(0, 7) == hash_of(7, 0)
    (True, False)
    """
    key = np.zeros((), np.int64)
    with np.errstate(over="ignore"):
        for number in numbers:
            key = mix(key + 1 + np.int64((number + 2**63) % 2**64 - 2**63))
    return int(key) & (2**63 - 1)


def random_keys(ids: np.ndarray, *numbers: int) -> np.ndarray:
    """Pseudo-random int64 keys [Q], each a function of its query id (integer or text) and the numbers alone.

    >>> int(random_keys(np.array([3, 4]), 0)[1]) == int(random_keys(np.array([4, 5]), 0)[0])
    True
    """
    keys = np.zeros(len(ids), np.int64)
    for number in numbers:
        keys = mix(keys + 1) ^ np.int64((number + 2**63) % 2**64 - 2**63)
    if ids.dtype.kind != "U":
        return mix(mix(keys + 1) ^ mix(ids))
    if ids.dtype.itemsize > 4 * ENDLESS:  # letter by letter a text of a megabyte takes minutes
        ids = np.array(
            [
                text if len(text) <= ENDLESS else sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
                for text in ids.tolist()
            ]
        )
    letters = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), -1).astype(np.int64)
    for letter in letters.T:
        keys = np.where(letter, mix(keys + 1) ^ letter, keys)  # numpy pads shorter texts with 0
    return mix(keys)
