"""Pairwise losses and ApproxNDCG: value and gradient of each list in one pass over its pairs, tile by tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.pairs.summary import (
    DISCOUNT,
    GAIN_OVER_IDEAL,
    GRAD_SCALE,
    LABEL,
    PAIR,
    RANK,
    RELEVANT,
    SCORE,
    VALUE_SCALE,
    counters,
    per_document,
    per_list,
    steps_of,
    summarise,
    total_weight,
    values_of,
    wide,
)
from rankgrad.kernels.summary import log1p, real_at

KINDS = {"ranknet": 0, "lambdarank": 1, "ndcg_loss1": 2, "ndcg_loss2": 3, "ndcg_loss2pp": 4}
_BI, _BJ = 32, 64


def pairwise(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    gain: str | Tensor,
    k: int | None,
    pairs: str,
    mu: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss `name` of `rankgrad.losses.pairwise` of scores [..., L], and d loss / d scores in float32."""
    grid, gradient, loss = results(scores, reduction)
    real = scores if mask is None else mask.contiguous()
    with torch.cuda.device_of(scores):
        work = summarise(scores, labels, mask, gain=gain, k=k, informative=PAIR, blocks=grid[1])
        _pairs[grid](
            real, work, gradient, loss, scores.shape[-1], 0 if k is None else k, mu,
            KIND=KINDS[name], TOP=0 if k is None else (1 if pairs == "any" else 2), MASKED=mask is not None,
            REDUCTION=reduction, BI=_BI, BJ=_BJ, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return loss, gradient


def approx_ndcg(
    scores: Tensor, labels: Tensor, mask: Tensor | None, *, alpha: float, gain: str | Tensor, reduction: str
) -> tuple[Tensor, Tensor]:
    """`rankgrad.losses.smooth_rank.approx_ndcg` of scores [..., L], and d loss / d scores in float32."""
    grid, gradient, loss = results(scores, reduction)
    real = scores if mask is None else mask.contiguous()
    with torch.cuda.device_of(scores):
        work = summarise(scores, labels, mask, gain=gain, k=None, informative=RELEVANT, blocks=grid[1], alpha=alpha)
        _approx[grid](
            real, work, gradient, loss, scores.shape[-1], alpha,
            MASKED=mask is not None, REDUCTION=reduction, BI=_BI, BJ=_BJ, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return loss, gradient


def results(scores: Tensor, reduction: str) -> tuple[tuple[int, int], Tensor, Tensor]:
    """The grid (lists and blocks of documents), and tensors for the gradient and the loss."""
    length = scores.shape[-1]
    gradient = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    loss = gradient.new_empty(scores.shape[:-1] if reduction == "none" else ())
    return (scores.numel() // length, triton.cdiv(length, _BI)), gradient, loss


@triton.jit
def finish(work, loss, gradient, at, inside, real, total, slope, b, block, L, REDUCTION: tl.constexpr):
    """Store a block's value and gradient; the last program to finish adds all values, in their order."""
    lists = tl.num_programs(0)
    blocks = tl.num_programs(1)
    values = values_of(work, lists, L)
    scale = tl.load(per_list(work, lists, L, GRAD_SCALE) + b)
    if REDUCTION == "mean":
        scale = scale / tl.load(total_weight(work, lists, L))
    tl.store(gradient + at, tl.where(real, slope * scale, 0.0), mask=inside)
    tl.store(values + b.to(tl.int64) * blocks + block, total * tl.load(per_list(work, lists, L, VALUE_SCALE) + b))
    tl.debug_barrier()  # the value is written before the block is counted as done
    if tl.atomic_add(counters(work, lists, L) + 1, 1) == lists * blocks - 1:
        result = tl.zeros([128], dtype=tl.float32)
        for start in range(0, lists, 128):
            other = start + tl.arange(0, 128)
            value = tl.zeros([128], dtype=tl.float32)
            for part in range(blocks):
                here = values + other.to(tl.int64) * blocks + part
                value += tl.load(here, mask=other < lists, other=0.0, cache_modifier=".cg")
            if REDUCTION == "none":
                tl.store(loss + other, value, mask=other < lists)
            else:
                result += value
        if REDUCTION == "sum":
            tl.store(loss, tl.sum(result, axis=0))
        if REDUCTION == "mean":
            tl.store(loss, tl.sum(result, axis=0) / tl.load(total_weight(work, lists, L)))


@triton.jit
def _pairs(
    mask, work, gradient, loss, L, k, mu,
    KIND: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr, REDUCTION: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    scores = per_document(work, lists, L, SCORE)
    labels = wide(per_document(work, lists, L, LABEL))
    rank = per_document(work, lists, L, RANK).to(tl.pointer_type(tl.int32), bitcast=True)
    gain = per_document(work, lists, L, GAIN_OVER_IDEAL)
    discount = per_document(work, lists, L, DISCOUNT)
    steps = steps_of(work, lists, L)
    base = b.to(tl.int64) * L
    i = block * BI + tl.arange(0, BI)
    in_i = i < L
    s_i = tl.load(scores + base + i, mask=in_i, other=0.0)
    y_i = tl.load(labels + base + i, mask=in_i, other=0.0)
    real_i = real_at(mask, base + i, in_i, MASKED)
    rank_i = tl.load(rank + base + i, mask=in_i, other=0)
    g_i = tl.load(gain + base + i, mask=in_i, other=0.0)
    d_i = tl.load(discount + base + i, mask=in_i, other=0.0)
    # Tiles are [BJ, BI], documents last: a thread keeps its own document and sums over all others by itself.
    value = tl.zeros([BJ, BI], dtype=tl.float32)
    slope = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        in_j = j < L
        s_j = tl.load(scores + base + j, mask=in_j, other=0.0)
        real_j = real_at(mask, base + j, in_j, MASKED)
        rank_j = tl.load(rank + base + j, mask=in_j, other=0)
        counted = real_i[None, :] & real_j[:, None]
        if TOP == 1:
            counted = counted & ((rank_i[None, :] < k) | (rank_j[:, None] < k))
        if TOP == 2:
            counted = counted & (rank_i[None, :] < k) & (rank_j[:, None] < k)
        x = s_i[None, :] - s_j[:, None]
        e = tl.exp(-tl.abs(x))
        wrong = tl.where(x >= 0.0, e, 1.0) / (1.0 + e)  # sigmoid(s_j - s_i)
        if KIND == 2:  # all ordered pairs, the weight of the first
            g_j = tl.load(gain + base + j, mask=in_j, other=0.0)
            d_j = tl.load(discount + base + j, mask=in_j, other=0.0)
            counted = counted & (i[None, :] != j[:, None])
            right = tl.where(x >= 0.0, 1.0, e) / (1.0 + e)
            w_i = (g_i * d_i)[None, :]
            w_j = (g_j * d_j)[:, None]
            cost = tl.maximum(-x, 0.0) + log1p(e)
            value += tl.where(counted, w_i * cost, 0.0)
            slope += tl.where(counted, w_j * right - w_i * wrong, 0.0)
        else:
            y_j = tl.load(labels + base + j, mask=in_j, other=0.0)
            above = counted & (y_i[None, :] > y_j[:, None])
            below = counted & (y_i[None, :] < y_j[:, None])
            cost = tl.maximum(-x, 0.0) + log1p(e)
            pull = tl.where(above, -wrong, tl.where(below, tl.where(x >= 0.0, 1.0, e) / (1.0 + e), 0.0))
            if KIND == 0:
                value += tl.where(above, cost, 0.0)
                slope += pull
            else:
                g_j = tl.load(gain + base + j, mask=in_j, other=0.0)
                w = tl.abs(g_i[None, :] - g_j[:, None])
                if KIND == 1 or KIND == 4:
                    d_j = tl.load(discount + base + j, mask=in_j, other=0.0)
                    v = tl.abs(d_i[None, :] - d_j[:, None])
                if KIND == 3 or KIND == 4:
                    distance = tl.abs(rank_i[None, :] - rank_j[:, None])
                    step = tl.load(steps + distance, mask=above | below, other=0.0)
                if KIND == 1:
                    w = w * v
                if KIND == 3:
                    w = w * step
                if KIND == 4:
                    w = w * (v + mu * step)
                value += tl.where(above, w * cost, 0.0)
                slope += tl.where(above | below, w * pull, 0.0)
    total = tl.sum(tl.sum(value, axis=0), axis=0)
    finish(work, loss, gradient, base + i, in_i, real_i, total, tl.sum(slope, axis=0), b, block, L, REDUCTION)


@triton.jit
def _drop(smooth_rank, gain, at, inside):
    """Minus gain times discount at the smooth rank, and its derivative by the rank."""
    r = tl.load(smooth_rank + at, mask=inside, other=1.0)
    g = tl.load(gain + at, mask=inside, other=0.0)
    log = tl.log(1.0 + r)
    return -0.6931471805599453 * g / log, 0.6931471805599453 * g / (log * log * (1.0 + r))


@triton.jit
def _approx(
    mask, work, gradient, loss, L, alpha,
    MASKED: tl.constexpr, REDUCTION: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    scores = per_document(work, lists, L, SCORE)
    smooth_rank = per_document(work, lists, L, RANK)
    gain = per_document(work, lists, L, GAIN_OVER_IDEAL)
    base = b.to(tl.int64) * L
    i = block * BI + tl.arange(0, BI)
    in_i = i < L
    s_i = tl.load(scores + base + i, mask=in_i, other=0.0)
    real_i = real_at(mask, base + i, in_i, MASKED)
    value, h_i = _drop(smooth_rank, gain, base + i, in_i)
    slope = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        in_j = j < L
        s_j = tl.load(scores + base + j, mask=in_j, other=0.0)
        real_j = real_at(mask, base + j, in_j, MASKED)
        _value_j, h_j = _drop(smooth_rank, gain, base + j, in_j)
        e = tl.exp(-tl.abs(alpha * (s_i[None, :] - s_j[:, None])))
        bend = e / ((1.0 + e) * (1.0 + e))
        slope += tl.where(real_j[:, None], bend * (h_j[:, None] - h_i[None, :]), 0.0)
    total = tl.sum(tl.where(real_i, value, 0.0), axis=0)
    finish(work, loss, gradient, base + i, in_i, real_i, total, alpha * tl.sum(slope, axis=0), b, block, L, REDUCTION)
