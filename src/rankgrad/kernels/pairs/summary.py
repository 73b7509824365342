"""What the pairwise kernels need of a list first: clean scores, ranks, normalised gains, and whether it is informative.

Two launches and no sort: ranks by counting (tile by tile, O(L^2) comparisons), then one program per list. Padding may
be anywhere and hold anything. Ties keep the input order. Gains, discounts and the ideal DCG are float64 until stored.
What they leave for the kernels after them is in one workspace tensor of float32 words, cut by offsets inside the kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.summary import (
    GAINS,
    cleaned,
    gains_of,
    has_relevant,
    is_positive_or_nan,
    over_ideal,
    store_scales,
)

PAIR, RELEVANT = 0, 1  # which lists are informative: two different labels; or `summary.has_relevant`

# Regions of the workspace of B lists of L documents, in multiples of B L words; documents keep the input order.
_IDEAL = tl.constexpr(0)  # float64: what a document adds to the ideal DCG, then the gain itself
_GAINS = tl.constexpr(2)
LABEL = tl.constexpr(4)  # float64, 0 under the padding
SCORE = tl.constexpr(6)  # 0 under the padding
RANK = tl.constexpr(7)  # int32 from 0, padding last; for ApproxNDCG the smooth rank from 1
GAIN_OVER_IDEAL = tl.constexpr(8)  # divided by the ideal DCG@k; 0 where a list has none
DISCOUNT = tl.constexpr(9)  # at the current rank
_LISTS = tl.constexpr(10)  # then a word for each list, see `summary.store_scales`:
VALUE_SCALE = tl.constexpr(0)
GRAD_SCALE = tl.constexpr(1)
_WEIGHT = tl.constexpr(2)
_AFTER = tl.constexpr(3)
# then four words: counters of lists and of blocks that are done, how many lists count in the mean, one unused;
_STEPS = tl.constexpr(4)  # then, L words, d(m) - d(m + 1) for a distance m of ranks;
# then the values, a word for each block of documents


def summarise(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    gain: str | Tensor,
    k: int | None,
    informative: int,
    blocks: int,
    alpha: float | None = None,
) -> Tensor:
    """The workspace of scores [..., L] of any dtype the kernels take; `gain` may be a float64 tensor [..., L].

    With `alpha` the smooth ranks of ApproxNDCG are computed instead of the ranks and what depends on them. Each of a list's
    `blocks` of documents will store a value.
    """
    length = scores.shape[-1]
    lists = scores.numel() // length
    scores, labels = scores.contiguous(), labels.contiguous()
    real = labels if mask is None else mask.contiguous()  # not read unless given, as the gain
    given = gain.contiguous() if isinstance(gain, Tensor) else labels
    size = 10 * lists * length + 3 * lists + 4 + length + lists * blocks
    work = torch.empty(size, dtype=torch.float32, device=scores.device)
    block_i, block_j = 32, min(64, max(16, triton.next_power_of_2(length)))
    _rank[(lists, triton.cdiv(length, block_i))](
        scores, labels, real, given, work, length, 2**31 - 1 if k is None else k, 1.0 if alpha is None else alpha,
        GAIN=2 if isinstance(gain, Tensor) else GAINS[gain], SMOOTH=alpha is not None, MASKED=mask is not None,
        BI=block_i, BJ=block_j, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _summary[(lists,)](
        scores, labels, real, work, length, INFORMATIVE=informative, SMOOTH=alpha is not None, MASKED=mask is not None,
        BLOCK=min(1024, max(16, triton.next_power_of_2(length))), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return work


@triton.jit
def per_document(work, lists, L, number):
    """A region with a word for each document of each list."""
    return work + number * lists.to(tl.int64) * L


@triton.jit
def per_list(work, lists, L, number):
    """A region with a word for each list; number 3 is what follows the lists."""
    return per_document(work, lists, L, _LISTS) + number * lists


@triton.jit
def counters(work, lists, L):
    """How many lists are summarised, and how many blocks are done, [2] int32."""
    return per_list(work, lists, L, _AFTER).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def total_weight(work, lists, L):
    """How many lists count in the mean, one at least."""
    return per_list(work, lists, L, _AFTER) + 2


@triton.jit
def steps_of(work, lists, L):
    """d(m) - d(m + 1) for a distance m of ranks, [L]."""
    return per_list(work, lists, L, _AFTER) + _STEPS


@triton.jit
def values_of(work, lists, L):
    """The value of each block, [B, blocks]."""
    return per_list(work, lists, L, _AFTER) + _STEPS + L


@triton.jit
def wide(pointer):
    """Words read as float64."""
    return pointer.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def _rank(
    scores, labels, real, given, work, L, k, alpha,
    GAIN: tl.constexpr, SMOOTH: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    lists = tl.num_programs(0)
    base = tl.program_id(0).to(tl.int64) * L
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    in_i = i < L
    s_i, y_i, real_i, _bad_i = cleaned(scores, labels, real, base + i, in_i, MASKED)
    if GAIN == 2:
        key_i = tl.load(given + base + i, mask=in_i, other=0.0)
    else:
        key_i = y_i  # gains grow with labels: the same order
    # Tiles are [BJ, BI], documents last: a thread keeps its own document and sums over all others by itself.
    befores = tl.zeros([BJ, BI], dtype=tl.int32)
    betters = tl.zeros([BJ, BI], dtype=tl.int32)
    beatens = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        in_j = j < L
        s_j, y_j, real_j, _bad_j = cleaned(scores, labels, real, base + j, in_j, MASKED)
        if GAIN == 2:
            key_j = tl.load(given + base + j, mask=in_j, other=0.0)
        else:
            key_j = y_j
        earlier = j[:, None] < i[None, :]
        richer = (key_j[:, None] > key_i[None, :]) | ((key_j[:, None] == key_i[None, :]) & earlier)
        betters += (richer & real_j[:, None]).to(tl.int32)
        if SMOOTH:
            x = alpha * (s_j[:, None] - s_i[None, :])
            e = tl.exp(-tl.abs(x))
            beaten = tl.where(x >= 0.0, 1.0, e) / (1.0 + e)
            beatens += tl.where(real_j[:, None] & (j[:, None] != i[None, :]), beaten, 0.0)
        else:
            ahead = (s_j[:, None] > s_i[None, :]) | ((s_j[:, None] == s_i[None, :]) & earlier)
            same = real_j[:, None] == real_i[None, :]
            first = (same & ahead) | ((same == 0) & real_j[:, None])
            befores += (first & in_j[:, None]).to(tl.int32)
    better = tl.sum(betters, axis=0)
    g = gains_of(y_i, real_i, given, base + i, in_i, GAIN)
    part = tl.where(real_i & (better < k), g / tl.log2(better.to(tl.float64) + 2.0), 0.0)
    tl.store(per_document(work, lists, L, SCORE) + base + i, s_i, mask=in_i)
    tl.store(wide(per_document(work, lists, L, LABEL)) + base + i, y_i, mask=in_i)
    tl.store(wide(per_document(work, lists, L, _GAINS)) + base + i, g, mask=in_i)
    tl.store(wide(per_document(work, lists, L, _IDEAL)) + base + i, part, mask=in_i)
    if SMOOTH:
        tl.store(per_document(work, lists, L, RANK) + base + i, 1.0 + tl.sum(beatens, axis=0), mask=in_i)
    else:
        rank = per_document(work, lists, L, RANK).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(rank + base + i, tl.sum(befores, axis=0), mask=in_i)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(counters(work, lists, L), 0)
        tl.store(counters(work, lists, L) + 1, 0)


@triton.jit
def _summary(
    scores, labels, real, work, L,
    INFORMATIVE: tl.constexpr, SMOOTH: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    lists = tl.num_programs(0)
    ideal = wide(per_document(work, lists, L, _IDEAL))
    gains = wide(per_document(work, lists, L, _GAINS))
    base = b.to(tl.int64) * L
    count = tl.zeros([BLOCK], dtype=tl.int32)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    highest = tl.zeros([BLOCK], dtype=tl.float64) - float("inf")
    lowest = tl.zeros([BLOCK], dtype=tl.float64) + float("inf")
    best = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        _s, y, here, broken = cleaned(scores, labels, real, base + i, in_i, MASKED)
        count += here.to(tl.int32)
        bad += broken.to(tl.int32)
        highest = tl.maximum(highest, tl.where(here, y, -float("inf")))
        lowest = tl.minimum(lowest, tl.where(here, y, float("inf")))
        best += tl.load(ideal + base + i, mask=in_i, other=0.0)
    n = tl.sum(count, axis=0)
    top = tl.max(highest, axis=0)
    total = tl.sum(best, axis=0)
    if INFORMATIVE == 0:
        informative = top > tl.min(lowest, axis=0)
    else:
        informative = has_relevant(n, top, total)
    scales = per_list(work, lists, L, VALUE_SCALE) + b
    store_scales(scales, scales + lists, scales + 2 * lists, informative, tl.sum(bad, axis=0) == 0)
    has_gains = informative & is_positive_or_nan(total)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        at = base + i
        g = tl.load(gains + at, mask=in_i, other=0.0)
        g = over_ideal(g, total, has_gains).to(tl.float32)
        tl.store(per_document(work, lists, L, GAIN_OVER_IDEAL) + at, g, mask=in_i)
        if not SMOOTH:
            rank = per_document(work, lists, L, RANK).to(tl.pointer_type(tl.int32), bitcast=True)
            place = tl.load(rank + at, mask=in_i, other=0).to(tl.float64)
            tl.store(
                per_document(work, lists, L, DISCOUNT) + at, (1.0 / tl.log2(place + 2.0)).to(tl.float32), mask=in_i
            )
            if b == 0:
                m = tl.maximum(i, 1).to(tl.float64)
                step = 1.0 / tl.log2(m + 1.0) - 1.0 / tl.log2(m + 2.0)
                tl.store(steps_of(work, lists, L) + i, tl.where(i > 0, step, 0.0).to(tl.float32), mask=in_i)
    tl.debug_barrier()  # the list's weight is written before it is counted as done
    if tl.atomic_add(counters(work, lists, L), 1) == lists - 1:
        counted = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, lists, BLOCK):
            other = start + tl.arange(0, BLOCK)
            at = per_list(work, lists, L, _WEIGHT) + other
            counted += tl.load(at, mask=other < lists, other=0.0, cache_modifier=".cg")
        tl.store(total_weight(work, lists, L), tl.maximum(tl.sum(counted, axis=0), 1.0))
