"""SoftRank with normal ranks: the moments of every document's rank and what they are worth, then the gradient by scores."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.pairs.launch import finish, results
from rankgrad.kernels.pairs.summary import (
    DISCOUNT,
    GAIN_OVER_IDEAL,
    LABEL,
    RANK,
    RELEVANT,
    SCORE,
    per_document,
    summarise,
)
from rankgrad.kernels.summary import real_at, temperature

# What the first pass leaves for the second, in regions of the workspace whose content is no longer needed.
_EXPECTED = tl.constexpr(LABEL)  # minus gain times expected discount
_BY_MEAN = tl.constexpr(RANK)  # its derivative by the mean of the rank
_BY_VARIANCE = tl.constexpr(DISCOUNT)
_BI, _BJ = 32, 64


def soft_rank(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    k: int | None,
    sigma: float,
    gain: str | Tensor,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """`rankgrad.losses.smooth_rank.soft_rank` by its Gaussian method of scores [..., L], and d loss / d scores in float32."""
    grid, gradient, loss = results(scores, reduction)
    real = scores if mask is None else mask.contiguous()
    sizes = {"MASKED": mask is not None, "BI": _BI, "BJ": _BJ, "num_warps": 4, "enable_fp_fusion": True}
    cut, width = 2**31 - 1 if k is None else k, temperature(sigma * math.sqrt(2))
    with torch.cuda.device_of(scores):
        work = summarise(scores, labels, mask, gain=gain, k=k, informative=RELEVANT, blocks=grid[1])
        _moments[grid](real, work, scores.shape[-1], cut, width, **sizes)
        _slopes[grid](real, work, gradient, loss, scores.shape[-1], width, REDUCTION=reduction, **sizes)
    return loss, gradient


@triton.jit
def _below(x):
    """The normal distribution function."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


@triton.jit
def _density(x):
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _gaps(a, b, width):
    """(a - b) / width as [B, A], at most 20, where a normal density is 0; of halves: differences of all numbers are some."""
    gap = 0.5 * a[None, :] - 0.5 * b[:, None]
    return tl.minimum(tl.maximum(gap, -10.0 * width), 10.0 * width) / (0.5 * width)


@triton.jit
def _discount(rank, k):
    """1 / log2(rank + 1) up to the cut-off, in float64."""
    return tl.where(rank <= k, 1.0 / tl.log2(tl.maximum(rank, 1).to(tl.float64) + 1.0), 0.0)


@triton.jit
def _moments(mask, work, L, k, width, MASKED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    lists = tl.num_programs(0)
    base = tl.program_id(0).to(tl.int64) * L
    scores = per_document(work, lists, L, SCORE)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    in_i = i < L
    s_i = tl.load(scores + base + i, mask=in_i, other=0.0)
    means = tl.zeros([BJ, BI], dtype=tl.float32)
    variances = tl.zeros([BJ, BI], dtype=tl.float32)
    counts = tl.zeros([BJ], dtype=tl.int32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        s_j = tl.load(scores + base + j, mask=j < L, other=0.0)
        real_j = real_at(mask, base + j, j < L, MASKED)
        counts += real_j.to(tl.int32)
        before = _below(-_gaps(s_i, s_j, width))
        before = tl.where(real_j[:, None] & (j[:, None] != i[None, :]), before, 0.0)
        means += before
        variances += before * (1.0 - before)
    n = tl.sum(counts, axis=0)
    mean = 1.0 + tl.sum(means, axis=0)
    variance = tl.sum(variances, axis=0)
    deviation = tl.sqrt(tl.maximum(variance, 1e-6))  # a certain rank: any width far below one rounds to it
    expected = tl.zeros([BJ, BI], dtype=tl.float32)
    by_mean = tl.zeros([BJ, BI], dtype=tl.float32)
    by_deviation = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(1, L, BJ):
        edge = start + tl.arange(0, BJ)
        step = tl.where(edge < n, _discount(edge, k) - _discount(edge + 1, k), 0.0).to(tl.float32)
        z = (edge.to(tl.float32)[:, None] + 0.5 - mean[None, :]) / deviation[None, :]
        slope = step[:, None] * _density(z)
        expected += step[:, None] * _below(z)
        by_mean -= slope
        by_deviation -= slope * z
    gain = tl.load(per_document(work, lists, L, GAIN_OVER_IDEAL) + base + i, mask=in_i, other=0.0)
    worth = -gain * (_discount(n, k).to(tl.float32) + tl.sum(expected, axis=0))
    slope = -gain * tl.sum(by_mean, axis=0) / deviation
    bend = tl.where(variance >= 1e-6, -gain * tl.sum(by_deviation, axis=0) / (2.0 * deviation * deviation), 0.0)
    tl.store(per_document(work, lists, L, _EXPECTED) + base + i, worth, mask=in_i)
    tl.store(per_document(work, lists, L, _BY_MEAN) + base + i, slope, mask=in_i)
    tl.store(per_document(work, lists, L, _BY_VARIANCE) + base + i, bend, mask=in_i)


@triton.jit
def _slopes(
    mask, work, gradient, loss, L, width,
    MASKED: tl.constexpr, REDUCTION: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    base = b.to(tl.int64) * L
    scores = per_document(work, lists, L, SCORE)
    by_mean = per_document(work, lists, L, _BY_MEAN)
    by_variance = per_document(work, lists, L, _BY_VARIANCE)
    i = block * BI + tl.arange(0, BI)
    in_i = i < L
    real_i = real_at(mask, base + i, in_i, MASKED)
    s_i = tl.load(scores + base + i, mask=in_i, other=0.0)
    m_i = tl.load(by_mean + base + i, mask=in_i, other=0.0)
    v_i = tl.load(by_variance + base + i, mask=in_i, other=0.0)
    slope = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        in_j = j < L
        real_j = real_at(mask, base + j, in_j, MASKED)
        s_j = tl.load(scores + base + j, mask=in_j, other=0.0)
        m_j = tl.load(by_mean + base + j, mask=in_j, other=0.0)
        v_j = tl.load(by_variance + base + j, mask=in_j, other=0.0)
        x = _gaps(s_i, s_j, width)
        tilt = -tl.erf(x * 0.7071067811865476)  # 1 - 2 P(i before j)
        push = (m_j[:, None] - m_i[None, :]) + tilt * (v_j[:, None] + v_i[None, :])
        slope += tl.where(real_j[:, None] & (j[:, None] != i[None, :]), push * _density(x), 0.0)
    worth = tl.load(per_document(work, lists, L, _EXPECTED) + base + i, mask=in_i, other=0.0)
    total = tl.sum(tl.where(real_i, worth, 0.0), axis=0)
    finish(
        work, loss, gradient, base + i, in_i, real_i, total, tl.sum(slope, axis=0) / width, b, block, L, REDUCTION
    )  # fmt: skip
