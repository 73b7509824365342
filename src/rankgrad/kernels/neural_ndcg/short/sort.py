"""The first launch for lists of up to 256 documents: one program sorts a list and writes its record of the workspace.

Ranks come from counting (O(L^2) comparisons of whole numbers). Padding may be anywhere and hold anything, ties keep the
input order, gains and the ideal DCG are float64 until stored. The exchange buffer and the counters are reset for the launches after.
"""

import triton
import triton.language as tl

from rankgrad.kernels.neural_ndcg.short.workspace import (
    BLOCKS_DONE,
    COUNT,
    GRAD_SCALE,
    VALUE_SCALE,
    WEIGHT,
    exchange_of,
    gain_of,
    integers,
    order_of,
    prefix_of,
    record_of,
)
from rankgrad.kernels.summary import cleaned, gains_of, has_relevant, over_ideal, store_scales

_WIDEST_GAP = tl.constexpr(128.0)
_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def sort_kernel(
    scores, labels, mask, given, work, L, iters, tau, depth, MASKED: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr
):
    """Scores [B, L] of any order -> records: whether a list is informative, its order, gains and prefix sums."""
    BJ: tl.constexpr = min(N, 32)
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    record = record_of(work, b, L, iters, N)
    i = tl.arange(0, N)
    inside = i < L
    s, y, real, bad = cleaned(scores, labels, mask, base + i, inside, MASKED)
    gain = gains_of(y, real, given, base + i, inside, GAIN)
    place, worth = _score_key(s, real, i), _gain_key(y if GAIN < 2 else gain, real, i)
    keys = exchange_of(record, N).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(keys + i, tl.where(inside, place, _LOWEST))
    tl.store(keys + N + i, tl.where(inside, worth, _LOWEST))
    tl.debug_barrier()
    rank = tl.zeros([N], dtype=tl.int32)
    better = tl.zeros([N], dtype=tl.int32)
    for start in range(0, N, BJ):  # tiles are [BJ, N]: a thread counts who is before its own document
        j = start + tl.arange(0, BJ)
        rank += tl.sum((tl.load(keys + j)[:, None] > place[None, :]).to(tl.int32), axis=0)
        better += tl.sum((tl.load(keys + N + j)[:, None] > worth[None, :]).to(tl.int32), axis=0)
    tl.debug_barrier()

    n = tl.sum(real.to(tl.int32), axis=0)
    ideal = tl.sum(tl.where(real & (better < depth), gain / tl.log2(better.to(tl.float64) + 2.0), 0.0), axis=0)
    informative = has_relevant(n, tl.max((y > 0.0).to(tl.int32), axis=0), ideal)
    valid = tl.max(bad.to(tl.int32), axis=0) == 0
    tl.store(integers(record) + COUNT, n)
    store_scales(record + VALUE_SCALE, record + GRAD_SCALE, record + WEIGHT, informative, valid)
    gain = over_ideal(gain, ideal, informative)
    tl.store(gain_of(record, L, N) + rank, gain.to(tl.float32), mask=inside)
    tl.store(order_of(record, L, N) + rank, i, mask=inside)
    ordered = prefix_of(record) + (N + 2)  # where W will be
    tl.store(ordered + rank, s.to(tl.float64), mask=inside)
    tl.debug_barrier()
    document = tl.load(order_of(record, L, N) + i, mask=inside, other=0)
    now = tl.load(ordered + i, mask=i < n, other=0.0)
    after = tl.load(ordered + i + 1, mask=i + 1 < n, other=0.0)
    tl.debug_barrier()
    _logits(record, document, now, after, n, L, tau, N)
    _reset(work, record, b, L, N)


@triton.jit
def sorted_kernel(scores, counts, work, L, iters, tau, N: tl.constexpr):
    """The same for scores [B, L] that are sorted and clean, without labels."""
    b = tl.program_id(0)
    record = record_of(work, b, L, iters, N)
    i = tl.arange(0, N)
    n = tl.load(counts + b).to(tl.int32)
    at = scores + b.to(tl.int64) * L + i
    tl.store(integers(record) + COUNT, n)
    now = tl.load(at, mask=i < n, other=0.0).to(tl.float64)
    after = tl.load(at + 1, mask=i + 1 < n, other=0.0).to(tl.float64)
    _logits(record, i, now, after, n, L, tau, N)
    _reset(work, record, b, L, N)


@triton.jit
def _score_key(s, real, i):
    """A whole number that grows towards the top of the list: by score, real before padding, then by position."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    by_score = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (tl.where(real, by_score, -(2**31)).to(tl.int64) << 32) | (255 - i).to(tl.int64)


@triton.jit
def _gain_key(y, real, i):
    """The same by gain, which is never negative. Gains equal to 13 digits count as equal: the ideal DCG cannot tell."""
    return tl.where(real, (y + 0.0).to(tl.int64, bitcast=True) & ~255, 0) | (255 - i).to(tl.int64)


@triton.jit
def _logits(record, document, now, after, n, L, tau, N: tl.constexpr):
    """Prefix sums of the gaps, and the edges of groups of equal scores, from the sorted scores and their neighbours."""
    i = tl.arange(0, N)
    gap = tl.where(i + 1 < n, (now - after) / tau, 0.0)
    gap = tl.minimum(tl.maximum(gap, 0.0), _WIDEST_GAP)
    prefix = prefix_of(record)
    tl.store(prefix, 0.0)
    tl.store(prefix + N + 1, 0.0)
    tl.store(prefix + 1 + i, tl.cumsum(gap, axis=0))
    tl.store(prefix + N + 2 + i, tl.cumsum(gap * i.to(tl.float64), axis=0))
    ends = ((i + 1 >= n) | (now > after)).to(tl.int32)
    group = tl.cumsum(ends, axis=0) - ends
    edges = integers(exchange_of(record, N))  # where each group of equal scores ends, kept there for a moment
    tl.store(edges + group, i, mask=(ends > 0) & (i < n))
    tl.debug_barrier()
    last = tl.load(edges + group, mask=i < n, other=0)
    first = tl.load(edges + group - 1, mask=(group > 0) & (i < n), other=-1) + 1
    tl.store(order_of(record, L, N) + i, document | (first << 8) | (last << 16), mask=i < L)
    tl.debug_barrier()


@triton.jit
def _reset(work, record, b, L, N: tl.constexpr):
    """An empty exchange buffer, and counters at 0."""
    i = tl.arange(0, N)
    exchange = exchange_of(record, N).to(tl.pointer_type(tl.int64), bitcast=True)
    for slot in tl.static_range(4):
        tl.store(exchange + slot * L + i, 0, mask=i < L)
    tl.store(integers(record) + BLOCKS_DONE, 0)
    if b == 0:
        tl.store(integers(work), 0)
        tl.store(integers(work) + 1, 0)
