"""The metric itself as a loss: NDCG, MAP, MRR, ERR and precision through a relaxed sort.

With P the relaxed sort of the scores, scale = Sinkhorn scaling and q = scale(P) x, the values x in relaxed order of the
scores, each loss is minus the metric written in q. As tau -> 0 it becomes minus the metric.

A list is informative with two documents, one of them relevant (y > 0; y >= threshold for the binary metrics).
"""

import torch
from torch import Tensor

from rankgrad.checks import cutoff, positive
from rankgrad.core.explain import explaining
from rankgrad.core.gains import Gain, cascade, discounts, gains, normalised_gains, ranks, stop_chances, top
from rankgrad.core.lists import Lists, check_for_kernel, prepare, reduce
from rankgrad.core.operators import loss_operator
from rankgrad.kernels import neural_ndcg_kernel
from rankgrad.losses.informative import has_match, has_relevant
from rankgrad.losses.relaxed_sort import Sort, SortOptions, relaxed
from rankgrad.sorting import neural_sort

explained = explaining(
    tau="temperature of the sort; it has the scale of score differences, and as it goes to 0 the loss becomes minus the metric.",
    sinkhorn_iters="rounds of Sinkhorn scaling at most; 0 scales nothing.",
    sinkhorn_tol="a list stops once all its sums are this close to one; 0: only after the last round.",
    sort="the relaxed sort: `neural_sort`, `soft_sort`, `ot_sort`, or any function of their signature.",
    samples="perturbed copies of the scores that the stochastic form is a mean over; None: the deterministic form.",
    beta="scale of the noise.",
    log_scores=(
        "True: noise is added to the logarithm of s' = s - min s + 1e-10, the minimum within the list; False: to the scores, "
        "s + beta G."
    ),
    perturb="'paper': beta log s' + beta G, an exact Plackett-Luce sampler of s'; 'allrank', as in the reference code: log s' + beta G.",
    generator="draws the Gumbel noise G; None: torch's global generator.",
    noise="the Gumbel noise itself, [S, ..., L], instead of `samples` and `generator`.",
    backend=(
        "'auto' takes a kernel where there is one for these scores, 'torch' none; 'triton' insists on that for GPUs, 'numba' on that "
        "for CPUs."
    ),
)


@explained
def neural_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    tau: float = 1.0,
    gain: Gain = "exp2",
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NeuralNDCG@k (Pobrotyn & Bialobrzeski 2021): -(1 / maxDCG@k) sum_{j <= k} (scale(P) g(y))_j d(j); [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    >>> s, y = torch.tensor([[0.5, 0.2, 0.1, 0.3]]), torch.tensor([[4, 2, 0, 1]])
    >>> [round(neural_ndcg(s, y, tau=tau).item(), 4) for tau in (1.0, 0.1, 0.001)]
    [-0.7799, -0.9537, -0.9849]
    """
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    )
    return _ndcg(scores, labels, mask, k, gain, options, reduction, check, transposed=False)


@explained
def neural_ndcg_transposed(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    tau: float = 1.0,
    gain: Gain = "exp2",
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NeuralNDCG^T@k: -(1 / maxDCG@k) sum_i g(y_i) (scale(P^T) d)_i, d(j) = 0 for j > k; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    Taken literally: the transposed matrix is scaled, ranks first and documents last, so that each document's weights
    over the ranks sum to one. The paper's reference code transposes after scaling instead, which is `neural_ndcg` again.

    >>> s, y = torch.tensor([[0.5, 0.2, 0.1, 0.3]]), torch.tensor([[4, 2, 0, 1]])
    >>> round(neural_ndcg_transposed(s, y, k=2, tau=0.001).item(), 4)
    -0.9253
    """
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    )
    return _ndcg(scores, labels, mask, k, gain, options, reduction, check, transposed=True)


@explained
def neural_map(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    tau: float = 1.0,
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """-AP@k: -(1 / R) sum_{i <= k} (q_i / i) sum_{m <= i} q_m, q = scale(P) [y >= threshold]; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    R counts all relevant documents of the list, as trec_eval does.

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_map(s, y, tau=0.001).item(), 4)
    -0.5833
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = _prepare(scores, labels, mask, check)
    relevant = lists.labels >= threshold  # labels are 0 under the padding
    q = relaxed(lists, relevant, options, labels.shape)
    precision = q.cumsum(-1) / ranks(q)
    total = relevant.sum(-1).clamp(min=1)
    average_precision = top(q * precision, k).sum(-1) / total
    return _loss(average_precision, lists, has_match(lists.labels, lists.mask, threshold), options, reduction)


@explained
def neural_mrr(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    tau: float = 1.0,
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """-RR@k: -sum_{i <= k} (q_i / i) prod_{m < i} (1 - q_m), q = scale(P) [y >= threshold]; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_mrr(s, y, tau=0.001).item(), 4)
    -0.5
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = _prepare(scores, labels, mask, check)
    relevant = lists.labels >= threshold  # labels are 0 under the padding
    stops = relaxed(lists, relevant, options, labels.shape)
    return _loss(cascade(stops, k), lists, has_match(lists.labels, lists.mask, threshold), options, reduction)


@explained
def neural_err(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    max_label: float = 4.0,
    tau: float = 1.0,
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """-ERR@k: `neural_mrr` with the stop probabilities (2^y - 1) / 2^max_label; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    Labels above `max_label` count as `max_label`, so that a probability never exceeds one.

    >>> s, y = torch.tensor([0.5, 0.2]), torch.tensor([1, 4])
    >>> round(neural_err(s, y, tau=0.001).item(), 6)
    -0.501953
    """
    k, max_label = cutoff(k), positive("max_label", max_label)
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = _prepare(scores, labels, mask, check)
    stops = relaxed(lists, stop_chances(lists.labels, lists.mask, max_label), options, labels.shape)
    return _loss(cascade(stops, k), lists, has_relevant(lists.labels, lists.mask), options, reduction)


@explained
def neural_precision(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    tau: float = 1.0,
    sinkhorn_iters: int = 30,
    sinkhorn_tol: float = 1e-6,
    sort: Sort = neural_sort,
    samples: int | None = None,
    beta: float = 0.1,
    log_scores: bool = True,
    perturb: str = "paper",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """-precision@k: -(1 / k) sum_{i <= k} q_i, q = scale(P) [y >= threshold]; [..., L] -> scalar.

    Size: one value per list, on the metric's own scale of 0 to -1, whatever the list's length.

    It divides by k even where a list is shorter, as trec_eval does; k = None takes the list's length.

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_precision(s, y, k=2, tau=0.001).item(), 4)
    -0.5
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    options = SortOptions(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = _prepare(scores, labels, mask, check)
    relevant = lists.labels >= threshold  # labels are 0 under the padding
    q = relaxed(lists, relevant, options, labels.shape)
    depth = lists.counts.clamp(min=1) if k is None else k
    precision = top(q, k).sum(-1) / depth
    return _loss(precision, lists, has_match(lists.labels, lists.mask, threshold), options, reduction)


def _ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    k: int | None,
    gain: Gain,
    options: SortOptions,
    reduction: str,
    check: bool | None,
    *,
    transposed: bool,
) -> Tensor:
    """NeuralNDCG, or its transposed form: gains by relaxed rank times discounts, or relaxed discounts times gains."""
    k, options = cutoff(k), options.checked(scores)
    if options.backend != "torch" and not options.stochastic:
        known = check_for_kernel(scores, labels, mask, gain=gain, reduction=reduction, check=check)
        how = k, options.tau, options.iters, options.tol, transposed, options.backend
        return _ndcg_operator(scores, labels, mask, *known, *how, reduction)
    lists = _prepare(scores, labels, mask, check, gain=gain)
    relevant = has_relevant(lists.labels, lists.mask)
    values, informative = normalised_gains(gains(lists.labels, lists.mask, gain), k, relevant)
    by_rank = discounts(lists.scores.shape[-1], k, scores.device)
    moved, others = (by_rank, values) if transposed else (values, by_rank)
    placed = relaxed(lists, moved, options, labels.shape, transposed=transposed)
    return _loss((placed * others.to(placed.dtype)).sum(-1), lists, informative, options, reduction)


_ndcg_operator = loss_operator(
    "neural_ndcg",
    "int? k, float tau, int iters, float tol, bool transposed, str backend",
    neural_ndcg_kernel,
    may_skip_gradient=True,
)


def _prepare(scores: Tensor, labels: Tensor, mask: Tensor | None, check: bool | None, gain: object = None) -> Lists:
    """The sort sums scores in float64: those of narrower dtypes cannot overflow there."""
    return prepare(
        scores, labels, mask, check, gain=gain, sums=isinstance(scores, Tensor) and scores.dtype == torch.float64
    )


def _loss(metric: Tensor, lists: Lists, informative: Tensor, options: SortOptions, reduction: str) -> Tensor:
    """Minus the metric, mean over samples, reduced over the informative lists."""
    return reduce(-metric.mean(0) if options.stochastic else -metric, informative, lists, reduction)
