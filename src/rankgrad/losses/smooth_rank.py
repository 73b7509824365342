"""Smoothed ranks: ApproxNDCG and SoftRank put a differentiable rank, or a distribution of it, into the NDCG formula.

loss = -(1 / maxDCG@k) sum_j g(y_j) E[d(rank_j)]. A list is informative with two documents, one of them relevant (y > 0).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rankgrad.checks import cutoff, one_of, positive
from rankgrad.core.explain import explaining
from rankgrad.core.gains import Gain, discounts, gains, normalised_gains
from rankgrad.core.lists import Lists, check_for_kernel, prepare, reduce
from rankgrad.core.operators import by_kernel, has_values, loss_operator, operator
from rankgrad.kernels import approx_ndcg_kernel, choose, soft_rank_kernel
from rankgrad.losses.informative import has_relevant

EXACT_LIMIT = 512  # documents: the recursion costs O(n^3)
_BLOCK = 32  # documents between two checkpoints of the recursion


explained = explaining(
    alpha="steepness of the sigmoid; as it grows, smooth ranks become ranks.",
    sigma="deviation of the noise that is added to every score.",
    method="'gaussian', O(n^2), or 'exact', O(n^3), for lists of up to 512 documents.",
)


@explained
def approx_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: float = 1.0,
    gain: Gain = "exp2",
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """ApproxNDCG (Qin et al. 2010): d at the smooth rank 1 + sum_{i != j} sigmoid(alpha (s_i - s_j)); [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    >>> round(approx_ndcg(torch.zeros(2), torch.tensor([1, 0])).item(), 6)
    -0.756471
    """
    alpha = positive("alpha", alpha)
    if choose(backend, scores) == "triton":
        known = check_for_kernel(scores, labels, mask, gain=gain, reduction=reduction, check=check)
        return _approx_ndcg_operator(scores, labels, mask, *known, alpha, reduction)
    lists = prepare(scores, labels, mask, check, gain=gain)
    beaten = torch.sigmoid(alpha * _ahead(lists.scores))  # [..., j, i]
    ranks = 1 + torch.where(_others(lists), beaten, 0.0).sum(-1)
    return _loss(lists, math.log(2) / torch.log1p(ranks), None, gain, reduction)


@explained
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
    backend: str = "auto",
) -> Tensor:
    """SoftRank (Taylor et al. 2008): expected discount when N(0, sigma^2) noise is added to every score; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    Document i beats j with probability Phi((s_i - s_j) / (sigma sqrt 2)). `method="gaussian"` takes the rank as a rounded
    normal variable with the mean and variance of these wins, O(n^2); `"exact"` runs the rank-binomial recursion, O(n^3),
    for lists of up to 512.

    >>> s, y = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2, 0, 1])
    >>> [round(soft_rank(s, y, method=m).item(), 3) for m in ("gaussian", "exact")]
    [-0.8, -0.801]
    """
    k, sigma = cutoff(k), positive("sigma", sigma)
    one_of("method", method, ("gaussian", "exact"))
    if method == "gaussian" and choose(backend, scores) == "triton" and has_values(scores):
        known = check_for_kernel(scores, labels, mask, gain=gain, reduction=reduction, check=check)
        torch_path = partial(
            soft_rank, labels=labels, mask=mask, k=k, sigma=sigma, gain=gain, reduction=reduction, check=False,
            backend="torch",
        )  # fmt: skip
        return by_kernel(
            scores, lambda: soft_rank_kernel(scores, labels, mask, *known, k, sigma, reduction), torch_path
        )
    lists = prepare(scores, labels, mask, check, gain=gain)
    if method == "exact":
        lists = _without_padding(lists)
    length = lists.scores.shape[-1]
    if method == "exact" and length > EXACT_LIMIT:
        raise ValueError(
            f"method='exact' takes lists of up to {EXACT_LIMIT} documents, got {length}; use method='gaussian' for long lists"
        )
    beaten = torch.special.ndtr(_ahead(lists.scores) / (sigma * math.sqrt(2)))
    beaten = torch.where(_others(lists), beaten, 0.0)  # probability that i ranks before j, [..., j, i]
    by_rank = discounts(length, k, scores.device).to(lists.scores.dtype)
    if method == "gaussian":
        expected = _gaussian(beaten, by_rank, lists.counts)
    else:
        flat = beaten.reshape(-1, length, length)
        expected = _rank_binomial(flat, by_rank.expand(len(flat), 1, length)).view(lists.scores.shape)
    return _loss(lists, expected, k, gain, reduction)


def _without_padding(lists: Lists) -> Lists:
    """Lists cut to the longest; where the host does not know the lengths, as on a GPU, the width stays."""
    if lists.mask.device.type != "cpu" or not len(lists.mask) or not has_values(lists.mask):
        return lists
    width = max(1, int(lists.counts.max()))
    order = (~lists.mask).to(torch.int8).argsort(dim=-1, stable=True)[..., :width]
    scores, labels, mask = (tensor.gather(-1, order) for tensor in lists[:3])
    return Lists(scores, labels, mask, ~mask, lists.valid)


def _ahead(scores: Tensor) -> Tensor:
    """s_i - s_j as [..., j, i]."""
    return scores[..., None, :] - scores[..., :, None]


def _others(lists: Lists) -> Tensor:
    """Pairs of two different real documents, [..., L, L]."""
    different = ~torch.eye(lists.mask.shape[-1], dtype=torch.bool, device=lists.mask.device)
    return lists.mask[..., :, None] & lists.mask[..., None, :] & different


def _loss(lists: Lists, discount: Tensor, k: int | None, gain: Gain, reduction: str) -> Tensor:
    relevant = has_relevant(lists.labels, lists.mask)
    gain_values, informative = normalised_gains(gains(lists.labels, lists.mask, gain), k, relevant)
    values = -(gain_values.to(discount.dtype) * discount).sum(-1)
    return reduce(values, informative, lists, reduction)


def _gaussian(beaten: Tensor, by_rank: Tensor, counts: Tensor) -> Tensor:
    """E[d(rank)] for rank ~ N(mean, variance) rounded to 1..n, by parts: d(n) + sum_{r < n} P(rank <= r) (d(r) - d(r+1))."""
    mean = 1 + beaten.sum(-1)
    variance = (beaten * (1 - beaten)).sum(-1)
    deviation = variance.clamp(min=1e-6).sqrt()  # a certain rank: any width far below one rounds to it
    edges = torch.arange(1, by_rank.shape[0], dtype=by_rank.dtype, device=by_rank.device)
    not_after = torch.special.ndtr((edges + 0.5 - mean[..., None]) / deviation[..., None])  # [..., j, r]
    inside = edges < counts[..., None]
    steps = torch.where(inside, by_rank[:-1] - by_rank[1:], 0.0)
    last = by_rank[(counts - 1).clamp(min=0)[..., None]]
    return last + (not_after * steps[..., None, :]).sum(-1)


class _RankBinomial(torch.autograd.Function):
    """E[d(rank)] by adding one rival at a time: p(rank = r) <- p(r) (1 - q_i) + p(r - 1) q_i.

    [B, j, i] probabilities that i beats j, d [B, 1, r] -> [B, j]. The backward pass walks the rivals in reverse with the
    value V(r) of having rank r so far: dE / dq_i = sum_r p_i(r) (V(r + 1) - V(r)), then V <- V (1 - q_i) + V(r + 1) q_i.
    Kept is the distribution before every 32nd rival; those between are made again.
    """

    @staticmethod
    def forward(ctx: Any, beaten: Tensor, by_rank: Tensor) -> Tensor:
        distribution = functional.pad(torch.ones_like(beaten[..., :1]), (0, by_rank.shape[-1] - 1))  # [..., j, r]
        kept = []
        for block in torch.split(beaten, _BLOCK, dim=-1):
            kept.append(distribution)
            for win in block.unbind(-1):
                distribution = _add_rival(distribution, win)
        ctx.save_for_backward(beaten, by_rank, *kept)
        return (distribution * by_rank).sum(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        beaten, by_rank, *kept = ctx.saved_tensors
        value = by_rank.expand(-1, beaten.shape[1], -1)  # [B, j, r]
        out = torch.empty_like(beaten)
        for number in range(len(kept) - 1, -1, -1):
            start = number * _BLOCK
            wins = beaten[..., start : start + _BLOCK].unbind(-1)
            distributions = [kept[number]]
            for win in wins[:-1]:
                distributions.append(_add_rival(distributions[-1], win))
            for offset in range(len(wins) - 1, -1, -1):
                step = functional.pad(value[..., 1:] - value[..., :-1], (0, 1))  # there is no rank n + 1
                out[..., start + offset] = (distributions[offset] * step).sum(-1) * grad
                value = value + step * wins[offset][..., None]
        return out, None


_approx_ndcg_operator = loss_operator("approx_ndcg", "float alpha", approx_ndcg_kernel)
_rank_binomial = operator(
    "rank_binomial",
    "Tensor beaten, Tensor by_rank",
    lambda _: _RankBinomial,
    lambda beaten, _: beaten.new_empty(beaten.shape[:-1]),
)


def _add_rival(distribution: Tensor, win: Tensor) -> Tensor:
    """The rank's distribution [..., j, r] after one more rival, who wins with probability `win` [..., j]."""
    moved = distribution * win[..., None]
    return distribution - moved + functional.pad(moved[..., :-1], (1, 0))
