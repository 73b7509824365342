"""Smoothed ranks: ApproxNDCG and SoftRank put a differentiable rank, or a distribution of it, into the NDCG formula.

loss = -(1 / maxDCG@k) sum_j g(y_j) E[d(rank_j)]. A list teaches with two documents, one of them relevant (y > 0).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rankgrad.arguments import cutoff, one_of, positive
from rankgrad.dcg import Gain, discounts, gains, normalised_gains
from rankgrad.losses.teaching import has_relevant
from rankgrad.masked import Lists, prepare, reduce

EXACT_LIMIT = 512  # documents: the recursion costs O(n^3)
_BLOCK = 32  # documents between two checkpoints of the recursion


def approx_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: float = 1.0,
    gain: Gain = "exp2",
    reduction: str = "mean",
    check: bool | None = None,
) -> Tensor:
    """ApproxNDCG (Qin et al. 2010): d at the smooth rank 1 + sum_{i != j} sigmoid(alpha (s_i - s_j)); [..., L] -> scalar.

    >>> round(approx_ndcg(torch.zeros(2), torch.tensor([1, 0])).item(), 6)
    -0.756471
    """
    alpha = positive("alpha", alpha)
    lists = prepare(scores, labels, mask, check)
    beaten = torch.sigmoid(alpha * _ahead(lists.scores))  # [..., j, i]
    ranks = 1 + torch.where(_others(lists), beaten, 0.0).sum(-1)
    return _loss(lists, math.log(2) / torch.log1p(ranks), None, gain, reduction)


def soft_rank(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    sigma: float = 1.0,
    method: str = "gaussian",
    gain: Gain = "exp2",
    reduction: str = "mean",
    check: bool | None = None,
) -> Tensor:
    """SoftRank (Taylor et al. 2008): expected discount when N(0, sigma^2) noise is added to every score; [..., L] -> scalar.

    Document i beats j with probability Phi((s_i - s_j) / (sigma sqrt 2)). `method="gaussian"` takes the rank as a rounded
    normal variable with the mean and variance of these wins, O(n^2); `"exact"` runs the rank-binomial recursion, O(n^3),
    for lists of up to 512.

    >>> s, y = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2, 0, 1])
    >>> [round(soft_rank(s, y, method=m).item(), 3) for m in ("gaussian", "exact")]
    [-0.8, -0.801]
    """
    k, sigma = cutoff(k), positive("sigma", sigma)
    one_of("method", method, ("gaussian", "exact"))
    lists = prepare(scores, labels, mask, check)
    length = lists.scores.shape[-1]
    if method == "exact" and length > EXACT_LIMIT:
        raise ValueError(
            f"method='exact' takes lists of up to {EXACT_LIMIT} documents, got {length}; use method='gaussian' for long lists"
        )
    beaten = torch.special.ndtr(_ahead(lists.scores) / (sigma * math.sqrt(2)))
    beaten = torch.where(_others(lists), beaten, 0.0)  # probability that i stands before j, [..., j, i]
    by_rank = discounts(length, k, scores.device).to(lists.scores.dtype)
    if method == "gaussian":
        expected = _gaussian(beaten, by_rank, lists.counts)
    else:
        expected = _rank_binomial(beaten, by_rank)
    return _loss(lists, expected, k, gain, reduction)


def _ahead(scores: Tensor) -> Tensor:
    """s_i - s_j as [..., j, i]."""
    return scores[..., None, :] - scores[..., :, None]


def _others(lists: Lists) -> Tensor:
    """Pairs of two different real documents, [..., L, L]."""
    different = ~torch.eye(lists.mask.shape[-1], dtype=torch.bool, device=lists.mask.device)
    return lists.mask[..., :, None] & lists.mask[..., None, :] & different


def _loss(lists: Lists, discount: Tensor, k: int | None, gain: Gain, reduction: str) -> Tensor:
    gain_values, has_ideal = normalised_gains(gains(lists.labels, lists.mask, gain), k)
    values = -(gain_values.to(discount.dtype) * discount).sum(-1)
    return reduce(values, has_relevant(lists.labels, lists.mask) & has_ideal, lists, reduction)


def _gaussian(beaten: Tensor, by_rank: Tensor, counts: Tensor) -> Tensor:
    """E[d(rank)] for rank ~ N(mean, variance) rounded to 1..n, by parts: d(n) + sum_{r < n} P(rank <= r) (d(r) - d(r+1))."""
    mean = 1 + beaten.sum(-1)
    variance = (beaten * (1 - beaten)).sum(-1)
    deviation = variance.clamp(min=1e-6).sqrt()  # a certain rank: any width far below one rounds to it
    edges = torch.arange(1, len(by_rank), dtype=by_rank.dtype, device=by_rank.device)
    not_after = torch.special.ndtr((edges + 0.5 - mean[..., None]) / deviation[..., None])  # [..., j, r]
    inside = edges < counts[..., None]
    steps = torch.where(inside, by_rank[:-1] - by_rank[1:], 0.0)
    last = by_rank[(counts - 1).clamp(min=0)]
    return last[..., None] + (not_after * steps[..., None, :]).sum(-1)


def _rank_binomial(beaten: Tensor, by_rank: Tensor) -> Tensor:
    """E[d(rank)] by adding one rival at a time: p(rank = r) <- p(r) (1 - q_i) + p(r - 1) q_i."""

    def add_rivals(distribution: Tensor, wins: Tensor) -> Tensor:
        for rival in range(wins.shape[-1]):
            win = wins[..., rival, None]
            distribution = distribution * (1 - win) + functional.pad(distribution[..., :-1], (1, 0)) * win
        return distribution

    # Checkpoints keep n / 32 distributions instead of n for the backward pass.
    distribution = functional.pad(torch.ones_like(beaten[..., :1]), (0, len(by_rank) - 1))  # [..., j, r]
    for block in torch.split(beaten, _BLOCK, dim=-1):
        distribution = checkpoint(add_rivals, distribution, block, use_reentrant=False, preserve_rng_state=False)
    return (distribution * by_rank).sum(-1)
