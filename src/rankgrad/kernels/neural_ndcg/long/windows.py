"""What the kernels for lists of more than 256 documents need first: order, gains, prefix sums, windows; and their last step.

Two sorts by torch and three small launches. Vectors of a list are padded to whole blocks of documents, so that the rounds
load without masks: the prefix sums repeat their last value there, everything else is 0. Padding of the lists themselves
may be anywhere and hold anything. Ties keep the input order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.summary import GAINS, cleaned, gains_of, has_relevant, over_ideal, store_scales, temperature

LOWEST_LOGIT = 64.0  # entries below exp(-64) are left out: windows end there
WIDEST_GAP = 128.0  # across it every entry is exp(-128) = 0 in float32, so that no score is too large for the sums
# Where float32 will do: windows this wide, which is where time goes (in narrow ones rounding weighs more, and float64 costs
# little), and inside a block scores so close that no number in a logit passes 128 (it is then right to 1e-5, mostly far better).
WIDE = 256
FAST = 128.0
_LOG2_E = tl.constexpr(1.4426950408889634)
_SCAN = 2048  # documents at a time where one program goes through a list


class Sorted(NamedTuple):
    """B lists by score, best first, padded to width [B, N]; counted in logits of base 2."""

    counts: Tensor  # [B] int32 real documents
    sums: Tensor  # [2, B, N] float64, A: sum_{k < i} q_k of the gaps q_k = s_k - s_{k + 1}, and W: sum_{k < i} k q_k
    tables: Tensor  # [8, B, N] float32, factors of entries far from the diagonal: see `entries`
    real: Tensor  # [B, N] float32, 1 = a real document
    ties: Tensor  # [B, N] int32, the first plus the last document of the same score
    spans: Tensor  # [2, B, N] int32, these two
    windows: (
        Tensor  # [2, B, blocks, 3] int32, where the window of a block of rows, or columns, begins, ends, and its kind
    )

    @property
    def shape(self) -> torch.Size:
        return self.ties.shape


class NdcgInputs(NamedTuple):
    """What NDCG needs of the lists, each from its best document by score to its worst."""

    ordered: Tensor  # [B, L] float32 scores from best to worst
    order: Tensor  # [B, L] int64, the document at each rank
    counts: Tensor
    gain: Tensor  # [B, N] float64 in that order, divided by the ideal DCG@k
    discount: Tensor  # [B, N] float64 by rank, minus the discount
    scales: (
        Tensor  # [3, B] float32, of the value, of the gradient, and the weight in the mean: see `summary.store_scales`
    )


def sort_lists(
    scores: Tensor, labels: Tensor, mask: Tensor | None, *, gain: str | Tensor, k: int | None, width: int
) -> NdcgInputs:
    """Sort lists [B, L] by score and by gain."""
    lists, length = scores.shape
    scores = scores.contiguous()
    labels = (labels.to(torch.uint8) if labels.dtype == torch.bool else labels).contiguous()
    real = (torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.contiguous()).view(torch.uint8)
    given = gain.contiguous() if isinstance(gain, Tensor) else labels  # not read unless given
    key = torch.empty(lists, length, device=scores.device, dtype=torch.float32)
    gains = torch.empty(lists, length, device=scores.device, dtype=torch.float64)
    _keys[(lists, triton.cdiv(length, 1024))](
        scores, labels, real, given, key, gains, length,
        GAIN=2 if isinstance(gain, Tensor) else GAINS[gain], BLOCK=1024, enable_fp_fusion=True,
    )  # fmt: skip
    ordered, order = key.sort(dim=-1, descending=True, stable=True)
    best = gains.sort(dim=-1, descending=True).values
    counts = torch.empty(lists, device=scores.device, dtype=torch.int32)
    ordered_gain, discount = gains.new_empty(2, lists, width).unbind()
    scales = torch.empty(3, lists, device=scores.device, dtype=torch.float32)
    _summary[(lists,)](
        scores, labels, real, gains, best, order, counts, ordered_gain, discount, scales,
        length, width, length if k is None else k, BLOCK=_SCAN, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return NdcgInputs(ordered, order, counts, ordered_gain, discount, scales)


def find_windows(ordered: Tensor, counts: Tensor, tau: float, tiles: Any) -> Sorted:
    """Prefix sums, windows and tables of sorted scores [B, L], for `launch.Tiles`."""
    lists, length = ordered.shape
    blocks = triton.cdiv(length, tiles.block)
    width = blocks * tiles.block
    sums = ordered.new_empty(2, lists, width, dtype=torch.float64)
    tables, real = ordered.new_empty(9, lists, width).split((8, 1))
    ties, spans = counts.new_empty(3, lists, width).split((1, 2))
    windows = counts.new_empty(2, lists, blocks, 3)
    _prefix[(lists,)](
        ordered, counts, sums, length, width, temperature(tau),
        WIDEST=WIDEST_GAP, BLOCK=_SCAN, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    _windows[(lists, blocks)](
        ordered, counts, sums, tables, real, ties, spans, windows, length, width, length.bit_length(),
        LOWEST=LOWEST_LOGIT, FAST=FAST, WIDE=WIDE, BLOCK=tiles.block, CHUNK=tiles.R * tiles.G, RUN=tiles.RUN,
        RUNS=tiles.RUN * tiles.G, enable_fp_fusion=True,
    )  # fmt: skip
    return Sorted(counts, sums, tables, real[0], ties[0], spans, windows)


def finish(lists: Sorted, slope: Tensor, by_column: Tensor, order: Tensor | None, scale: Tensor | None, out: Tensor,
           tau: float) -> None:  # fmt: skip
    """From dz to the scores, put where `order` says: (slope_j - sum_k sign(s_j - s_k) by_column_k) / tau -> out [B, L]."""
    length = out.shape[-1]
    prefix = by_column.new_empty(len(out), by_column.shape[-1] + 1)
    _finish[(len(out),)](
        lists.counts, lists.spans, slope, by_column, prefix,
        out if order is None else order, out if scale is None else scale, out, length, by_column.shape[-1], temperature(tau),
        ORDER=order is not None, BLOCK=_SCAN, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _keys(scores, labels, real, given, key, gains, L, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * L
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < L
    s, y, here, _bad = cleaned(scores, labels, real, base + i, inside)
    tl.store(key + base + i, tl.where(here, s, -float("inf")), mask=inside)
    tl.store(gains + base + i, gains_of(y, here, given, base + i, inside, GAIN), mask=inside)


@triton.jit
def _summary(
    scores, labels, real, gains, best, order, counts, ordered_gain, discount, scales, L, N, k, BLOCK: tl.constexpr
):
    """One list: how many documents, whether it is informative, gains in order and divided by the ideal DCG, discounts."""
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    count = tl.zeros([BLOCK], dtype=tl.int32)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    highest = tl.zeros([BLOCK], dtype=tl.float64)
    ideal = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < L
        _s, y, here, broken = cleaned(scores, labels, real, base + i, inside)
        count += here.to(tl.int32)
        bad += broken.to(tl.int32)
        highest = tl.maximum(highest, y)
        top = tl.load(best + base + i, mask=inside & (i < k), other=0.0)
        ideal += top / tl.log2(i.to(tl.float64) + 2.0)
    n = tl.sum(count, axis=0)
    total = tl.sum(ideal, axis=0)
    informative = has_relevant(n, tl.max(highest, axis=0), total)
    tl.store(counts + b, n)
    lists = tl.num_programs(0)
    store_scales(scales + b, scales + lists + b, scales + 2 * lists + b, informative, tl.sum(bad, axis=0) == 0)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        document = tl.load(order + base + i, mask=i < n, other=0)
        g = tl.load(gains + base + document, mask=i < n, other=0.0)
        to = b.to(tl.int64) * N + i
        tl.store(ordered_gain + to, over_ideal(g, total, informative), mask=i < N)
        d = tl.where((i < n) & (i < k), -1.0 / tl.log2(i.to(tl.float64) + 2.0), 0.0)
        tl.store(discount + to, d, mask=i < N)


@triton.jit
def _prefix(ordered, counts, sums, L, N, tau, WIDEST: tl.constexpr, BLOCK: tl.constexpr):
    """One list: prefix sums of the gaps, base 2; the last value is repeated up to N."""
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    to = b.to(tl.int64) * N
    n = tl.load(counts + b)
    a_sum = tl.zeros([], dtype=tl.float64)
    w_sum = tl.zeros([], dtype=tl.float64)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        before = (i > 0) & (i < n)  # the gap before document i
        s = tl.load(ordered + base + i, mask=before, other=0.0).to(tl.float64)
        better = tl.load(ordered + base + i - 1, mask=before, other=0.0).to(tl.float64)
        gap = tl.minimum((better - s) / tau, WIDEST) * _LOG2_E
        weighted = gap * (i - 1).to(tl.float64)
        tl.store(sums + to + i, a_sum + tl.cumsum(gap, axis=0), mask=i < N)
        tl.store(sums + tl.num_programs(0).to(tl.int64) * N + to + i, w_sum + tl.cumsum(weighted, axis=0), mask=i < N)
        a_sum += tl.sum(gap, axis=0)
        w_sum += tl.sum(weighted, axis=0)


@triton.jit
def _cost(a, w, i, j):
    """-z_ij in base 2."""
    odd = (2 * i - 1).to(tl.float64)
    return 2.0 * (tl.load(w + j) - tl.load(w + i)) - odd * (tl.load(a + j) - tl.load(a + i))


@triton.jit
def _windows(
    ordered, counts, sums, tables, real, ties, spans, windows, L, N, steps,
    LOWEST: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Bisect for the ends of the windows, which are intervals since z falls on both sides of the diagonal, and for ties."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    n = tl.load(counts + b)
    if block * BLOCK < n:
        limit = LOWEST * _LOG2_E
        scores = ordered + b.to(tl.int64) * L
        size = tl.num_programs(0).to(tl.int64) * N
        at_a = sums + b.to(tl.int64) * N
        at_w = at_a + size
        place = block * BLOCK + tl.arange(0, BLOCK)
        own = tl.minimum(place, n - 1)
        s = tl.load(scores + own)
        # for each: the lowest or highest index that still belongs, searched between an end of the list and the diagonal
        row_from = tl.zeros_like(own)
        row_to = own
        column_from = tl.zeros_like(own)
        column_to = own
        tie_from = tl.zeros_like(own)
        tie_to = own
        low_1 = own
        low_2 = own
        low_3 = own
        high_1 = tl.zeros_like(own) + (n - 1)
        high_2 = high_1
        high_3 = high_1
        for _ in range(steps):
            middle = (row_from + low_1) // 2
            inside = _cost(at_a, at_w, own, middle) <= limit
            low_1 = tl.where(inside, middle, low_1)
            row_from = tl.where(inside, row_from, tl.minimum(middle + 1, low_1))
            middle = (column_from + low_2) // 2
            inside = _cost(at_a, at_w, middle, own) <= limit
            low_2 = tl.where(inside, middle, low_2)
            column_from = tl.where(inside, column_from, tl.minimum(middle + 1, low_2))
            middle = (tie_from + low_3) // 2
            inside = tl.load(scores + middle) == s
            low_3 = tl.where(inside, middle, low_3)
            tie_from = tl.where(inside, tie_from, tl.minimum(middle + 1, low_3))
            middle = (row_to + high_1 + 1) // 2
            inside = _cost(at_a, at_w, own, middle) <= limit
            row_to = tl.where(inside, middle, row_to)
            high_1 = tl.where(inside, high_1, tl.maximum(middle - 1, row_to))
            middle = (column_to + high_2 + 1) // 2
            inside = _cost(at_a, at_w, middle, own) <= limit
            column_to = tl.where(inside, middle, column_to)
            high_2 = tl.where(inside, high_2, tl.maximum(middle - 1, column_to))
            middle = (tie_to + high_3 + 1) // 2
            inside = tl.load(scores + middle) == s
            tie_to = tl.where(inside, middle, tie_to)
            high_3 = tl.where(inside, high_3, tl.maximum(middle - 1, tie_to))
        to = b.to(tl.int64) * N + place
        tl.store(ties + to, low_3 + tie_to)
        tl.store(spans + to, low_3)
        tl.store(spans + size + to, tie_to)
        tl.store(real + to, (place < n).to(tl.float32))
        chunk = place // CHUNK * CHUNK
        _tabulate(tables + to, size, at_a, at_w, place, chunk, place // RUN * RUN)
        _tabulate(tables + size + to, size, at_a, at_w, place, chunk + CHUNK - 1, place // RUN * RUN + RUN - 1)
        at = windows + (b * tl.num_programs(1) + block) * 3
        _store_window(at, tl.min(low_1, axis=0), tl.max(row_to, axis=0), at_a, block, FAST, WIDE, BLOCK, CHUNK)
        at += tl.num_programs(0) * tl.num_programs(1) * 3
        _store_window(at, tl.min(low_2, axis=0), tl.max(column_to, axis=0), at_a, block, FAST, WIDE, BLOCK, RUNS)


@triton.jit
def _tabulate(table, size, a, w, place, of_chunk, of_run):
    """The tables of `entries`, relative to an end of the document's chunk of columns and of its run of rows."""
    d = tl.load(a + place) - tl.load(a + of_chunk)
    e = tl.load(w + place) - tl.load(w + of_chunk) - of_chunk.to(tl.float64) * d
    tl.store(table, d.to(tl.float32))
    tl.store(table + 2 * size, tl.exp2(-2.0 * tl.abs(d).to(tl.float32)))
    tl.store(table + 4 * size, tl.exp2(-2.0 * tl.maximum(e, 0.0).to(tl.float32)))
    d = tl.load(a + place) - tl.load(a + of_run)
    e = tl.load(w + place) - tl.load(w + of_run) - of_run.to(tl.float64) * d
    bracket = 2.0 * e - (2 * (place - of_run) - 1).to(tl.float64) * d
    tl.store(table + 6 * size, tl.exp2(tl.minimum(bracket, 0.0).to(tl.float32)))


@triton.jit
def _store_window(
    to, begin, last, a, block, FAST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    tl.store(to, begin // CHUNK * CHUNK)
    tl.store(to + 1, last + 1)
    spread = tl.load(a + block * BLOCK + (BLOCK - 1)) - tl.load(a + block * BLOCK)
    near = 1 + (spread * BLOCK <= FAST).to(tl.int32)
    tl.store(to + 2, tl.where(last + 1 - begin >= WIDE, near, 0))


@triton.jit
def _finish(
    counts, spans, slope, by_column, prefix, order, scale, out, L, N, tau, ORDER: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    n = tl.load(counts + b)
    base = b.to(tl.int64) * L
    at = b.to(tl.int64) * N
    sums = prefix + b.to(tl.int64) * (N + 1)
    total = tl.zeros([], dtype=tl.float64)
    tl.store(sums, total)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(by_column + at + i, mask=i < n, other=0.0)
        tl.store(sums + 1 + i, total + tl.cumsum(value, axis=0), mask=i < n)
        total += tl.sum(value, axis=0)
    tl.debug_barrier()  # the sums are read by other threads than wrote them
    for start in range(0, L, BLOCK):
        j = start + tl.arange(0, BLOCK)
        real = j < n
        better = tl.load(sums + tl.load(spans + at + j, mask=real, other=0), mask=real, other=0.0)
        not_worse = tl.load(
            sums + tl.load(spans + tl.num_programs(0).to(tl.int64) * N + at + j, mask=real, other=0) + 1,
            mask=real,
            other=0.0,
        )
        grad = (tl.load(slope + at + j, mask=real, other=0.0) - ((total - not_worse) - better)) / tau
        if ORDER:
            to = tl.load(order + base + j, mask=j < L, other=0)
            grad = tl.where(real, grad * tl.load(scale + b), 0.0)
            tl.store(out + base + to, grad.to(tl.float32), mask=j < L)
        else:
            tl.store(out + base + j, tl.where(real, grad, 0.0).to(tl.float32), mask=j < L)
