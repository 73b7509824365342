"""Listwise losses: the whole list against its labels. A list is informative with two documents, one of them relevant (y > 0).

With `weights` [..., L] a document's term of the sum is multiplied by its weight. A document that weighs 0 has no term and does not
make a list informative, but is still a rival of the others in their terms (in `query_rmse`, which has no rivals, it is left out).
"""

from functools import partial

import torch
from torch import Tensor

from rankgrad.checks import flag, one_of
from rankgrad.core.explain import explaining
from rankgrad.core.lists import Lists, log_softmax, prepare, reduce, unless_all
from rankgrad.core.noise import check_generator, check_noise, cleaned_noise
from rankgrad.kernels import LONGEST_COMPARED
from rankgrad.losses.eager import has_kernel, list_loss
from rankgrad.losses.informative import has_error, has_relevant

explained = explaining(
    ties="'group': equal labels share their sum, so that input order cannot matter; 'random' breaks them by random keys.",
    count_empty="whether lists without a relevant document count.",
    generator="draws what is random; None: torch's global generator.",
    noise="the uniform random numbers themselves, [..., L] in [0, 1), instead of `generator`.",
    weights=(
        "[..., L], 0 or above: a document's term is multiplied by its weight; one of weight 0 has no term, and None weighs all "
        "alike."
    ),
)


@explained
def listnet(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """ListNet (Cao et al. 2007), top one: -sum_j softmax(y)_j log softmax(s)_j; [..., L] -> scalar.

    Size: one value per list, the cross-entropy of two distributions over its documents.

    >>> round(listnet(torch.tensor([0.0, 0.0]), torch.tensor([1, 0])).item(), 6)
    0.693147
    """
    if has_kernel(backend, scores, weights):
        torch_path = partial(listnet, labels=labels, mask=mask, reduction=reduction, check=False, backend="torch")
        return list_loss("listnet", scores, labels, mask, torch_path, reduction=reduction, check=check)
    lists = prepare(scores, labels, mask, check, weights=weights, sums=True)
    target = lists.labels.masked_fill(lists.padding, torch.finfo(torch.float64).min).softmax(-1)
    return _cross_entropy(lists, target, has_relevant(lists.labels, lists.weighing), reduction)


@explained
def softmax(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax cross-entropy: -sum_j y_j log softmax(s)_j; [..., L] -> scalar.

    Size: a sum over the documents of a list, each as often as its label says.

    >>> round(softmax(torch.tensor([0.0, 0.0]), torch.tensor([2, 0])).item(), 6)
    1.386294
    """
    if has_kernel(backend, scores, weights):
        torch_path = partial(softmax, labels=labels, mask=mask, reduction=reduction, check=False, backend="torch")
        return list_loss("softmax", scores, labels, mask, torch_path, reduction=reduction, check=check)
    lists = prepare(scores, labels, mask, check, weights=weights, sums=True)
    informative = unless_all(has_relevant(lists.labels, lists.weighing), lists)
    return _cross_entropy(lists, _where_informative(lists.labels, informative), informative, reduction)


@explained
def xe_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """XE-NDCG (Bruch 2019): -sum_j rho_j log softmax(s)_j, rho = (2^y - gamma) / sum (2^y - gamma); [..., L] -> scalar.

    Size: one value per list: rho sums to one.

    gamma is uniform on [0, 1), one per document, from `generator` (None: torch's global one) or given as `noise` [..., L].

    >>> round(xe_ndcg(torch.zeros(2), torch.tensor([1, 0]), noise=torch.tensor([0.5, 0.5])).item(), 6)
    0.693147
    """
    if has_kernel(backend, scores, weights):
        noise = _given_or_drawn(scores, generator, noise)
        torch_path = partial(
            xe_ndcg, labels=labels, mask=mask, noise=noise, reduction=reduction, check=False, backend="torch"
        )
        return list_loss(
            "xe_ndcg", scores, labels, mask, torch_path, reduction=reduction, check=check, noise=noise, gain="exp2"
        )
    lists = prepare(scores, labels, mask, check, gain="exp2", weights=weights, sums=True)
    gamma = _uniform(lists, labels.shape, generator, noise)
    rho = (torch.exp2(lists.labels) - gamma).masked_fill(lists.padding, 0.0)
    total = rho.sum(-1, keepdim=True)
    target = rho / torch.where(total > 0, total, 1.0)
    informative = unless_all(has_relevant(lists.labels, lists.weighing), lists)
    return _cross_entropy(lists, _where_informative(target, informative), informative, reduction)


@explained
def query_rmse(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    count_empty: bool = False,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """QueryRMSE, as CatBoost calls it: sum_j e_j^2, e = (y - s) - mean_i (y_i - s_i) within the list; [..., L] -> scalar.

    Size: a sum over the documents of a list; the mean is over documents.

    Labels and scores are compared up to a constant of the list: the best scores are E[y] up to that constant. One value per
    list is a sum over its documents, and the mean is over the documents of the lists that count: every document weighs the
    same, or as much as its weight says, in the list's own mean too. Lists without a relevant document teach that all their documents are equal, and count if `count_empty`.

    >>> round(query_rmse(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([1, 0, 3])).item(), 6)
    1.555556
    """
    flag("count_empty", count_empty)
    if has_kernel(backend, scores, weights):
        torch_path = partial(
            query_rmse,
            labels=labels,
            mask=mask,
            count_empty=count_empty,
            reduction=reduction,
            check=False,
            backend="torch",
        )
        return list_loss(
            "query_rmse", scores, labels, mask, torch_path, reduction=reduction, check=check, option=float(count_empty)
        )
    lists = prepare(scores, labels, mask, check, weights=weights, squares=True, leave_out=True)
    error = lists.labels.to(lists.scores.dtype) - lists.scores  # 0 under the padding
    if lists.weights is None:
        mean = error.sum(-1, keepdim=True) / lists.counts.clamp(min=1)[..., None]
        values = (error - mean).masked_fill(lists.padding, 0.0).square().sum(-1)
    else:
        total = lists.sum_weights()
        mean = (lists.weights * error).sum(-1) / torch.where(total > 0, total, 1.0)
        values = (lists.weights * (error - mean[..., None]).masked_fill(lists.padding, 0.0).square()).sum(-1)
    counts = has_error(lists.labels, lists.weighing, count_empty)
    return reduce(values, counts, lists, reduction, by_document=True)


@explained
def listmle(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    ties: str = "group",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """ListMLE (Xia et al. 2008): -log Plackett-Luce likelihood of the label order; [..., L] -> scalar.

    Size: a sum over the documents of a list.

    sum_i (log sum_{j: y_j <= y_i} exp s_j) - s_i for `ties="group"`, so the input order of equal labels cannot matter;
    `ties="random"` breaks them by random keys, uniform from `generator` (None: torch's global one) or given as `noise` [..., L].

    >>> round(listmle(torch.zeros(3), torch.tensor([2, 1, 0])).item(), 6)
    1.791759
    """
    one_of("ties", ties, ("group", "random"))
    if noise is not None and ties == "group":
        raise ValueError("noise must be None for ties='group', which breaks no ties; pass ties='random' to use it")
    if has_kernel(backend, scores, weights, longest=LONGEST_COMPARED):
        noise = None if ties == "group" else _given_or_drawn(scores, generator, noise)
        torch_path = partial(
            listmle, labels=labels, mask=mask, ties=ties, noise=noise, reduction=reduction, check=False, backend="torch"
        )
        return list_loss("listmle", scores, labels, mask, torch_path, reduction=reduction, check=check, noise=noise)
    lists = prepare(scores, labels, mask, check, weights=weights, sums=True)
    keys = lists.labels.masked_fill(lists.padding, torch.inf)  # padding last: the sums below never reach it
    if ties == "random":
        shuffle = _uniform(lists, labels.shape, generator, noise).argsort(-1)
        order = shuffle.gather(-1, keys.gather(-1, shuffle).argsort(dim=-1, stable=True))
    else:
        order = keys.argsort(dim=-1, stable=True)
    ascending = lists.scores.gather(-1, order).double()  # float64: these are vectors, and exponents must not drift
    log_sums = ascending.logcumsumexp(-1)
    if ties == "group":
        ordered_keys = keys.gather(-1, order)
        last_of_group = torch.searchsorted(ordered_keys, ordered_keys, right=True) - 1
        log_sums = log_sums.gather(-1, last_of_group)
    terms = torch.where(lists.mask.gather(-1, order), log_sums - ascending, 0.0)
    if lists.weights is not None:
        terms = terms * lists.weights.gather(-1, order)
    values = terms.sum(-1).to(lists.scores.dtype)
    return reduce(values, has_relevant(lists.labels, lists.weighing), lists, reduction)


def _cross_entropy(lists: Lists, target: Tensor, informative: Tensor | None, reduction: str) -> Tensor:
    """-sum_j target_j log softmax(s)_j, the target 0 under the padding."""
    if lists.weights is not None:
        target = target * lists.weights
    log_probabilities = log_softmax(lists.scores, lists.padding)  # finite under the padding
    values = -(target.to(lists.scores.dtype) * log_probabilities).sum(-1)
    return reduce(values, informative, lists, reduction)


def _where_informative(target: Tensor, informative: Tensor | None) -> Tensor:
    """An infinite target would make the gradient of a list that is not informative NaN, where it is 0."""
    return target if informative is None else torch.where(informative[..., None], target, 0.0)


def _given_or_drawn(scores: Tensor, generator: torch.Generator | None, noise: Tensor | None) -> Tensor:
    """What `_uniform` gives, for a kernel that looks under no padding."""
    if noise is None:
        check_generator(generator)
        return torch.rand(scores.shape, dtype=torch.float64, device=scores.device, generator=generator)
    _check_given(noise, scores.shape)
    if noise.device != scores.device:
        raise ValueError(f"noise must be on the scores' device {scores.device}, got {noise.device}")
    return noise.detach()


def _check_given(noise: Tensor, shape: torch.Size) -> None:
    check_noise(noise)
    if noise.shape != shape:
        raise ValueError(f"noise must have the scores' shape {tuple(shape)}, got {tuple(noise.shape)}")


def _uniform(lists: Lists, shape: torch.Size, generator: torch.Generator | None, noise: Tensor | None) -> Tensor:
    """One number per document, [..., L] float64, zero under the padding: given by the caller, or uniform on [0, 1)."""
    if noise is None:
        check_generator(generator)
        return torch.rand(lists.labels.shape, dtype=torch.float64, device=lists.labels.device, generator=generator)
    _check_given(noise, shape)
    padded = noise.detach().double() if shape[-1] else lists.labels.new_zeros(lists.labels.shape)
    return cleaned_noise(padded, lists.mask)
