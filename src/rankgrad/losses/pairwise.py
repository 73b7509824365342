"""Pairwise losses: sums over pairs of documents of w_ij softplus(s_j - s_i), the weights w detached.

A list is informative if it has a pair with different labels. With a cut-off `k` a pair counts if at least one of the two
is in the current top k (`pairs="any"`, as LightGBM, XGBoost and TF-Ranking have it) or only if both do (`pairs="both"`, as the
paper's reference code has it: there a relevant document below rank k gets no gradient at all).

With `weights` [..., L] a pair's term is multiplied by the weights of its two documents: one that weighs 0 is in no pair, but keeps
its place in the ranking and its gain in maxDCG.

`backend` chooses between the torch path and its kernels, which keep no [L, L] tensor: see `rankgrad.kernels`.

The NDCG weights use G_i = g(y_i) / maxDCG@k, the current ranks pi and D(r) = 1 / d(r) = log2(1 + r).
"""

import torch
from torch import Tensor
from torch.nn import functional

from rankgrad.checks import cutoff, non_negative, one_of
from rankgrad.core.explain import explaining
from rankgrad.core.gains import Gain, discounts, gains, normalised_gains
from rankgrad.core.lists import Lists, check_for_kernel, prepare, ranks_by_score, reduce
from rankgrad.core.operators import loss_operator
from rankgrad.kernels import choose, pairwise_kernel
from rankgrad.losses.informative import has_pair

explained = explaining(
    k="rank cut-off of the pairs, and of maxDCG where there is one; None takes the whole list.",
    pairs="with a cut-off: 'any' counts pairs with at least one document in the current top k, 'both' those with two.",
    mu="weight of NDCG-Loss2's part.",
    weights=(
        "[..., L], 0 or above: a pair's term is multiplied by the weights of its two documents; 0 takes a document out of all "
        "pairs, None weighs all alike."
    ),
)


@explained
def ranknet(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    pairs: str = "any",
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """RankNet (Burges et al. 2005): sum over pairs y_i > y_j of softplus(s_j - s_i); [..., L] -> scalar.

    Size: a sum over the pairs of a list.

    >>> round(ranknet(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1, 0, 0])).item(), 6)
    1.386294
    """
    k, pairs = cutoff(k), one_of("pairs", pairs, ("any", "both"))
    if choose(backend, scores, weights) == "triton":
        return _by_kernel("ranknet", scores, labels, mask, k, "linear", pairs, reduction, check)
    lists = prepare(scores, labels, mask, check, weights=weights, sums=True, leave_out=k is None)
    counted = _label_pairs(lists) & _top_pairs(lists, k, pairs)
    return _sum_over_pairs(lists, counted.to(lists.scores.dtype), reduction)


@explained
def lambdarank(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exp2",
    pairs: str = "any",
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """LambdaRank (Burges et al. 2006): RankNet's pairs times |G_i - G_j| |d(pi_i) - d(pi_j)|; [..., L] -> scalar.

    Size: a sum over the pairs of a list.

    >>> round(lambdarank(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).item(), 6)
    0.484686
    """
    k, pairs = cutoff(k), one_of("pairs", pairs, ("any", "both"))
    if choose(backend, scores, weights) == "triton":
        return _by_kernel("lambdarank", scores, labels, mask, k, gain, pairs, reduction, check)
    lists = prepare(scores, labels, mask, check, gain=gain, weights=weights, sums=True)
    counted = _label_pairs(lists) & _top_pairs(lists, k, pairs)
    factors = _gain_gaps(lists, k, gain) * _discount_gaps(lists)
    return _sum_over_pairs(lists, counted * factors, reduction)


@explained
def ndcg_loss1(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exp2",
    pairs: str = "any",
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NDCG-Loss1 (Wang et al. 2018): sum over all i != j of (G_i / D(pi_i)) softplus(s_j - s_i); [..., L] -> scalar.

    Size: a sum over the pairs of a list.

    Unlike its siblings it sums over every ordered pair, whatever the labels.

    >>> round(ndcg_loss1(torch.tensor([1.0, 0.0]), torch.tensor([1, 0])).item(), 6)
    0.313262
    """
    k, pairs = cutoff(k), one_of("pairs", pairs, ("any", "both"))
    if choose(backend, scores, weights) == "triton":
        return _by_kernel("ndcg_loss1", scores, labels, mask, k, gain, pairs, reduction, check)
    lists = prepare(scores, labels, mask, check, gain=gain, weights=weights, sums=True)
    others = ~torch.eye(lists.mask.shape[-1], dtype=torch.bool, device=scores.device)
    counted = _real_pairs(lists) & others & _top_pairs(lists, k, pairs)
    factors = (_gains(lists, k, gain) * _current_discounts(lists)).to(lists.scores.dtype)
    return _sum_over_pairs(lists, counted * factors[..., :, None], reduction)


@explained
def ndcg_loss2(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exp2",
    pairs: str = "any",
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NDCG-Loss2 (Wang et al. 2018): RankNet's pairs times |G_i - G_j| delta_ij; [..., L] -> scalar.

    Size: a sum over the pairs of a list.

    delta_ij = |1 / D(m) - 1 / D(m + 1)| with m = |pi_i - pi_j|, the distance of the two current ranks.

    >>> round(ndcg_loss2(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).item(), 6)
    0.484686
    """
    k, pairs = cutoff(k), one_of("pairs", pairs, ("any", "both"))
    if choose(backend, scores, weights) == "triton":
        return _by_kernel("ndcg_loss2", scores, labels, mask, k, gain, pairs, reduction, check)
    lists = prepare(scores, labels, mask, check, gain=gain, weights=weights, sums=True)
    counted = _label_pairs(lists) & _top_pairs(lists, k, pairs)
    factors = _gain_gaps(lists, k, gain) * _distance_weights(lists)
    return _sum_over_pairs(lists, counted * factors, reduction)


@explained
def ndcg_loss2pp(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    mu: float = 10.0,
    gain: Gain = "exp2",
    pairs: str = "any",
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NDCG-Loss2++ (Wang et al. 2018): LambdaRank's weights plus `mu` times NDCG-Loss2's; [..., L] -> scalar.

    Size: a sum over the pairs of a list.

    >>> round(ndcg_loss2pp(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).item(), 6)
    5.331544
    """
    k, pairs, mu = cutoff(k), one_of("pairs", pairs, ("any", "both")), non_negative("mu", mu)
    if choose(backend, scores, weights) == "triton":
        return _by_kernel("ndcg_loss2pp", scores, labels, mask, k, gain, pairs, reduction, check, mu)
    lists = prepare(scores, labels, mask, check, gain=gain, weights=weights, sums=True)
    counted = _label_pairs(lists) & _top_pairs(lists, k, pairs)
    factors = _gain_gaps(lists, k, gain) * (_discount_gaps(lists) + mu * _distance_weights(lists))
    return _sum_over_pairs(lists, counted * factors, reduction)


def _by_kernel(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    k: int | None,
    gain: Gain,
    pairs: str,
    reduction: str,
    check: bool | None,
    mu: float = 0.0,
) -> Tensor:
    known = check_for_kernel(scores, labels, mask, gain=gain, reduction=reduction, check=check)
    return _pairs_operator(scores, labels, mask, *known, name, k, pairs, mu, reduction)


_pairs_operator = loss_operator("pairs", "str name, int? k, str pairs, float mu", pairwise_kernel)


def _sum_over_pairs(lists: Lists, factors: Tensor, reduction: str) -> Tensor:
    """Sum of w_ij softplus(s_j - s_i), the factors w [..., L, L] zero for pairs that do not count."""
    ahead = lists.scores[..., :, None] - lists.scores[..., None, :]  # s_i - s_j
    if lists.weights is not None:
        # One after the other: a product of large weights may be infinite, and times 0 it would be NaN.
        factors = factors * lists.weights[..., :, None] * lists.weights[..., None, :]
    values = -(factors * functional.logsigmoid(ahead)).sum((-1, -2))
    return reduce(values, has_pair(lists.labels, lists.weighing), lists, reduction)


def _real_pairs(lists: Lists) -> Tensor:
    return lists.mask[..., :, None] & lists.mask[..., None, :]


def _label_pairs(lists: Lists) -> Tensor:
    """Pairs of real documents with y_i > y_j, [..., L, L]."""
    return _real_pairs(lists) & (lists.labels[..., :, None] > lists.labels[..., None, :])


def _top_pairs(lists: Lists, k: int | None, pairs: str) -> Tensor:
    """Pairs that count under the cut-off, [..., L, L]."""
    if k is None:
        return _real_pairs(lists)
    top = ranks_by_score(lists.scores, lists.padding) <= k
    if pairs == "any":
        return top[..., :, None] | top[..., None, :]
    return top[..., :, None] & top[..., None, :]


def _gains(lists: Lists, k: int | None, gain: Gain) -> Tensor:
    """G_i, 0 in lists that are not informative, [..., L] float64."""
    return normalised_gains(gains(lists.labels, lists.mask, gain), k, has_pair(lists.labels, lists.mask))[0]


def _gain_gaps(lists: Lists, k: int | None, gain: Gain) -> Tensor:
    """|G_i - G_j|, [..., L, L]."""
    gain_values = _gains(lists, k, gain).to(lists.scores.dtype)
    return (gain_values[..., :, None] - gain_values[..., None, :]).abs()


def _current_discounts(lists: Lists) -> Tensor:
    """d(pi_i) at the ranks the scores give now, [..., L] float64."""
    by_rank = discounts(lists.scores.shape[-1], None, lists.scores.device)
    return by_rank[ranks_by_score(lists.scores, lists.padding) - 1]


def _discount_gaps(lists: Lists) -> Tensor:
    """|d(pi_i) - d(pi_j)|, [..., L, L]."""
    current = _current_discounts(lists).to(lists.scores.dtype)
    return (current[..., :, None] - current[..., None, :]).abs()


def _distance_weights(lists: Lists) -> Tensor:
    """d(m) - d(m + 1) for the distance m of the current ranks, [..., L, L]; 0 on the diagonal."""
    by_rank = discounts(lists.scores.shape[-1] + 1, None, lists.scores.device)
    by_distance = functional.pad(by_rank[:-1] - by_rank[1:], (1, 0)).to(lists.scores.dtype)  # index m = 0, 1, ...
    ranks = ranks_by_score(lists.scores, lists.padding)
    return by_distance[(ranks[..., :, None] - ranks[..., None, :]).abs()]
