"""Pointwise losses: each document is compared with its own label. A list is informative if it has a real document.

With `weights` [..., L] the mean over a list's documents is a weighted one; documents that weigh 0 are left out.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rankgrad.checks import positive
from rankgrad.core.explain import explaining
from rankgrad.core.lists import Lists, prepare, reduce
from rankgrad.losses.eager import has_kernel, list_loss
from rankgrad.losses.informative import has_document

WEIGHTS = (
    "[..., L], 0 or above: the mean over documents is a weighted one, 0 leaves a document out; None weighs all alike."
)
explained = explaining(
    levels="how many grades there are: predictions lie between 0 and this.",
    weights=WEIGHTS,
)
of_logits = explaining(
    scores="[..., L, K] logits, one for each level above the lowest; any floating-point dtype.",
    weights=WEIGHTS,
)


@explained
def rmse(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    levels: float = 5.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """sqrt(mean_j (y_j - levels * sigmoid(s_j))^2), `levels` = 5 for labels 0..4; [..., L] -> scalar.

    Size: one value per list, the root of a mean over its documents.

    >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([2.5, 1.5])).item()
    0.7071067690849304
    """
    levels = positive("levels", levels)
    if has_kernel(backend, scores, weights):
        torch_path = partial(
            rmse, labels=labels, mask=mask, levels=levels, reduction=reduction, check=False, backend="torch"
        )
        return list_loss("rmse", scores, labels, mask, torch_path, reduction=reduction, check=check, option=levels)
    lists = prepare(scores, labels, mask, check, weights=weights)
    error = lists.labels.to(lists.scores.dtype) - levels * lists.scores.sigmoid()
    mean = _mean_over_documents(error.square(), lists)
    exact = mean == 0  # the square root's gradient is infinite there; a perfect fit gets a gradient of 0
    root = torch.where(exact, 1.0, mean).sqrt()
    return reduce(torch.where(exact, mean, root), has_document(lists.labels, lists.weighing), lists, reduction)


@explained
def bce(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    threshold: float = 1.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Mean binary cross-entropy of sigmoid(s_j) against [y_j >= threshold]; [..., L] -> scalar.

    Size: one value per list, a mean over its documents.

    >>> round(bce(torch.tensor([0.0, 0.0]), torch.tensor([1, 0])).item(), 6)
    0.693147
    """
    threshold = positive("threshold", threshold)
    if has_kernel(backend, scores, weights, threshold):
        torch_path = partial(
            bce, labels=labels, mask=mask, threshold=threshold, reduction=reduction, check=False, backend="torch"
        )
        return list_loss("bce", scores, labels, mask, torch_path, reduction=reduction, check=check, option=threshold)
    lists = prepare(scores, labels, mask, check, weights=weights, sums=True, leave_out=True)
    relevant = (lists.labels >= threshold).to(lists.scores.dtype)
    losses = functional.binary_cross_entropy_with_logits(lists.scores, relevant, reduction="none")
    return reduce(_mean_over_documents(losses, lists), has_document(lists.labels, lists.weighing), lists, reduction)


@of_logits
def ordinal(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Mean over documents of sum_t BCE(sigmoid(s_jt), [y_j > t]), t = 0..K-1; scores [..., L, K] -> scalar.

    Size: one value per list, a mean over its documents.

    K = levels - 1 logits per document; a document's ranking score is the sum of their sigmoids.

    >>> round(ordinal(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 6)
    2.772589
    """
    if has_kernel(backend, scores, weights, units=True):
        torch_path = partial(ordinal, labels=labels, mask=mask, reduction=reduction, check=False, backend="torch")
        return list_loss("ordinal", scores, labels, mask, torch_path, reduction=reduction, check=check, units=True)
    lists = prepare(scores, labels, mask, check, units=True, weights=weights, sums=True, leave_out=True)
    thresholds = torch.arange(lists.scores.shape[-1], device=scores.device)
    exceeds = (lists.labels[..., None] > thresholds).to(lists.scores.dtype)
    losses = functional.binary_cross_entropy_with_logits(lists.scores, exceeds, reduction="none").sum(-1)
    return reduce(_mean_over_documents(losses, lists), has_document(lists.labels, lists.weighing), lists, reduction)


def logits_of_levels(highest_label: int) -> int:
    """How many logits `ordinal` needs per document: one for each level above the lowest."""
    return max(1, highest_label)


def _mean_over_documents(values: Tensor, lists: Lists) -> Tensor:
    if lists.weights is None:
        return values.masked_fill(lists.padding, 0.0).sum(-1) / lists.counts.clamp(min=1)
    total = lists.sum_weights()
    return (lists.weights * values).masked_fill(lists.padding, 0.0).sum(-1) / torch.where(total > 0, total, 1.0)
