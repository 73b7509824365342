"""Metrics of lists of up to 1,024 documents: one launch, one program per list, ranks by counting, sums in float64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.summary import GAINS, cleaned, gains_of

KINDS = {"dcg": 0, "ndcg": 1, "map": 2, "mrr": 3, "precision": 4, "recall": 5, "hit_rate": 6, "err": 7}


def metric(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    k: int | None,
    empty: float,
    gain: str | Tensor = "exp2",
    option: float = 0.0,
) -> Tensor:
    """The metric `name` of `rankgrad.metrics` of scores [..., L], one value per list, [...] float32.

    `option` is what the metric has of its own: threshold or max_label.
    """
    length = scores.shape[-1]
    scores, labels = scores.contiguous(), labels.contiguous()
    real = labels if mask is None else mask.contiguous()  # not read unless given, as the gain
    given = gain.contiguous() if isinstance(gain, Tensor) else labels
    values = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
    tile = min(64, max(16, triton.next_power_of_2(length)))
    with torch.cuda.device_of(scores):
        _metric[(values.numel(),)](
            scores, labels, real, given, values, length, 2**31 - 1 if k is None else k, empty, option,
            KIND=KINDS[name], GAIN=2 if isinstance(gain, Tensor) else GAINS[gain], CUT=k is not None, MASKED=mask is not None,
            TILE=tile, num_warps=4,
        )  # fmt: skip
    return values


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _metric(
    scores, labels, mask, given, values, L, k, empty, option,
    KIND: tl.constexpr, GAIN: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    grade = tl.zeros([TILE], dtype=tl.float64) + option
    earned = tl.zeros([TILE], dtype=tl.float64)
    ideal = tl.zeros([TILE], dtype=tl.float64)
    relevants = tl.zeros([TILE], dtype=tl.int32)
    documents = tl.zeros([TILE], dtype=tl.int32)
    broken = tl.zeros([TILE], dtype=tl.int32)
    for first in range(0, L, TILE):
        i = first + tl.arange(0, TILE)
        s_i, y_i, real_i, bad_i = cleaned(scores, labels, mask, base + i, i < L, MASKED)
        g_i = gains_of(y_i, real_i, given, base + i, i < L, GAIN)
        befores = tl.zeros([TILE, TILE], dtype=tl.int32)
        richers = tl.zeros([TILE, TILE], dtype=tl.int32)
        hits = tl.zeros([TILE, TILE], dtype=tl.int32)
        left = tl.zeros([TILE, TILE], dtype=tl.float64) + 1.0
        for start in range(0, L, TILE):
            j = start + tl.arange(0, TILE)
            s_j, y_j, real_j, _bad_j = cleaned(scores, labels, mask, base + j, j < L, MASKED)
            earlier = j[:, None] < i[None, :]
            before = (s_j[:, None] > s_i[None, :]) | ((s_j[:, None] == s_i[None, :]) & earlier)
            before = before & real_j[:, None]
            befores += before.to(tl.int32)
            if KIND == 1:
                g_j = gains_of(y_j, real_j, given, base + j, j < L, GAIN)
                richer = (g_j[:, None] > g_i[None, :]) | ((g_j[:, None] == g_i[None, :]) & earlier)
                richers += (richer & real_j[:, None]).to(tl.int32)
            if KIND == 2:
                hits += (before & (y_j >= option)[:, None]).to(tl.int32)
            if KIND == 7:
                stop_j = (tl.exp2(tl.minimum(y_j, grade)) - 1.0) / tl.exp2(grade)
                left = left * tl.where(before, (1.0 - stop_j)[:, None], 1.0)
        rank = 1 + tl.sum(befores, axis=0)
        place = rank.to(tl.float64)
        shown = real_i & (rank <= k)
        if KIND <= 1 or KIND == 7:
            relevant = real_i & (y_i > 0.0)
        else:
            relevant = real_i & (y_i >= option)
        if KIND <= 1:
            value = g_i / tl.log2(place + 1.0)
        elif KIND == 2:
            value = (1 + tl.sum(hits, axis=0)).to(tl.float64) / place
        elif KIND == 3:
            value = 1.0 / place
        elif KIND == 7:
            stop_i = (tl.exp2(tl.minimum(y_i, grade)) - 1.0) / tl.exp2(grade)
            value = stop_i * tl.reduce(left, 0, _product) / place
        else:
            value = tl.zeros([TILE], dtype=tl.float64) + 1.0
        counted = shown
        if KIND >= 2 and KIND <= 6:
            counted = shown & relevant
        value = tl.where(counted, value, 0.0)
        if KIND == 3 or KIND == 6:
            earned = tl.maximum(earned, value)
        else:
            earned += value
        if KIND == 1:
            best = 1 + tl.sum(richers, axis=0)
            ideal += tl.where(real_i & (best <= k), g_i / tl.log2(best.to(tl.float64) + 1.0), 0.0)
        relevants += relevant.to(tl.int32)
        documents += real_i.to(tl.int32)
        broken += bad_i.to(tl.int32)
    found = tl.sum(relevants, axis=0)
    has_relevant = found > 0
    if KIND == 3 or KIND == 6:
        result = tl.max(earned, axis=0)
    else:
        result = tl.sum(earned, axis=0)
    if KIND == 1:
        most = tl.sum(ideal, axis=0)
        has_relevant = has_relevant & ((most <= 0.0) == 0)
        result = result / tl.where(most > 0.0, most, 1.0)
    if KIND == 2 or KIND == 5:
        result = result / tl.maximum(found, 1).to(tl.float64)
    if KIND == 4:
        depth = tl.maximum(tl.sum(documents, axis=0), 1)
        if CUT:
            depth = k
        result = result / depth.to(tl.float64)
    result = tl.where(has_relevant, result, empty)
    result = tl.where(tl.sum(broken, axis=0) == 0, result, float("nan"))
    tl.store(values + b, result.to(tl.float32))
