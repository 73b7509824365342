"""The metric itself as a loss: NDCG, MAP, MRR, ERR and precision through a relaxed sort.

With P the relaxed sort of the scores, scale = Sinkhorn scaling and q = scale(P) x, the values x in relaxed order of the
scores, each loss is minus the metric written in q. As tau -> 0 it becomes minus the metric. What all of them take:

    tau                        temperature of the sort
    sinkhorn_iters, sinkhorn_tol   rounds of scaling at most, and when a list has had enough (0: never before the last round)
    sort                       the relaxation: neural_sort, soft_sort, ot_sort, or any function of their signature
    samples, noise             the stochastic form: mean over S perturbed copies of the scores; Gumbel noise is drawn from
                               `generator`, or given as `noise` [S, ..., L]
    beta, log_scores, perturb  s' = s - min s + 1e-10 within the list, then beta log s' + beta G (perturb="paper": an exact
                               Plackett-Luce sampler of s') or log s' + beta G ("allrank", the reference code);
                               log_scores=False: s + beta G
    backend                    the torch path or its Triton twin, for neural_sort on a GPU: see `rankgrad.kernels`

A list teaches with two documents, one of them relevant (y > 0; y >= threshold for the binary metrics).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.arguments import cutoff, flag, non_negative, one_of, positive, whole
from rankgrad.dcg import Gain, cascade, discounts, gains, normalised_gains, ranks, stop_chances, top
from rankgrad.kernels import choose
from rankgrad.losses import fused
from rankgrad.losses.teaching import has_relevant
from rankgrad.masked import Lists, prepare, reduce
from rankgrad.noise import check_noise, gumbel, refuse_bad_noise
from rankgrad.sorting import neural_sort, sinkhorn, sort_values

Sort = Callable[..., Tensor]


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

    >>> s, y = torch.tensor([[0.5, 0.2, 0.1, 0.3]]), torch.tensor([[4, 2, 0, 1]])
    >>> [round(neural_ndcg(s, y, tau=tau).item(), 4) for tau in (1.0, 0.1, 0.001)]
    [-0.7799, -0.9537, -0.9849]
    """
    k = cutoff(k)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    if relaxation.fused:
        return fused.neural_ndcg(
            scores,
            labels,
            mask,
            k=k,
            tau=relaxation.tau,
            gain=gain,
            iters=relaxation.iters,
            tol=relaxation.tol,
            transposed=False,
            reduction=reduction,
            check=check,
        )
    lists = prepare(scores, labels, mask, check)
    values, has_ideal = normalised_gains(gains(lists.labels, lists.mask, gain), k)
    by_rank = discounts(lists.scores.shape[-1], k, scores.device).to(lists.scores.dtype)
    ndcg = (_relaxed(lists, values, relaxation, labels.shape) * by_rank).sum(-1)
    return _loss(ndcg, lists, has_relevant(lists.labels, lists.mask) & has_ideal, relaxation, reduction)


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

    Taken literally: the transposed matrix is scaled, ranks first and documents last, so that each document's weights
    over the ranks sum to one. The paper's reference code transposes after scaling instead, which is `neural_ndcg` again.

    >>> s, y = torch.tensor([[0.5, 0.2, 0.1, 0.3]]), torch.tensor([[4, 2, 0, 1]])
    >>> round(neural_ndcg_transposed(s, y, k=2, tau=0.001).item(), 4)
    -0.9253
    """
    k = cutoff(k)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    if relaxation.fused:
        return fused.neural_ndcg(
            scores,
            labels,
            mask,
            k=k,
            tau=relaxation.tau,
            gain=gain,
            iters=relaxation.iters,
            tol=relaxation.tol,
            transposed=True,
            reduction=reduction,
            check=check,
        )
    lists = prepare(scores, labels, mask, check)
    values, has_ideal = normalised_gains(gains(lists.labels, lists.mask, gain), k)
    by_rank = discounts(lists.scores.shape[-1], k, scores.device)
    discount = _relaxed(lists, by_rank, relaxation, labels.shape, transposed=True)  # of each document
    ndcg = (discount * values.to(discount.dtype)).sum(-1)
    return _loss(ndcg, lists, has_relevant(lists.labels, lists.mask) & has_ideal, relaxation, reduction)


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

    R counts all relevant documents of the list, as trec_eval does.

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_map(s, y, tau=0.001).item(), 4)
    -0.5833
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = prepare(scores, labels, mask, check)
    relevant = lists.mask & (lists.labels >= threshold)
    q = _relaxed(lists, relevant, relaxation, labels.shape)
    precision = q.cumsum(-1) / ranks(q)
    total = relevant.sum(-1).clamp(min=1)
    average_precision = (q * precision * top(q, k)).sum(-1) / total
    return _loss(average_precision, lists, has_relevant(lists.labels, lists.mask, threshold), relaxation, reduction)


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

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_mrr(s, y, tau=0.001).item(), 4)
    -0.5
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = prepare(scores, labels, mask, check)
    relevant = lists.mask & (lists.labels >= threshold)
    stops = _relaxed(lists, relevant, relaxation, labels.shape)
    return _loss(cascade(stops, k), lists, has_relevant(lists.labels, lists.mask, threshold), relaxation, reduction)


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

    Labels above `max_label` count as `max_label`, so that a probability never exceeds one.

    >>> s, y = torch.tensor([0.5, 0.2]), torch.tensor([1, 4])
    >>> round(neural_err(s, y, tau=0.001).item(), 6)
    -0.501953
    """
    k, max_label = cutoff(k), positive("max_label", max_label)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = prepare(scores, labels, mask, check)
    stops = _relaxed(lists, stop_chances(lists.labels, lists.mask, max_label), relaxation, labels.shape)
    return _loss(cascade(stops, k), lists, has_relevant(lists.labels, lists.mask), relaxation, reduction)


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

    It divides by k even where a list is shorter, as trec_eval does; k = None takes the list's length.

    >>> s, y = torch.tensor([0.5, 0.2, 0.1, 0.3]), torch.tensor([0, 1, 0, 1])
    >>> round(neural_precision(s, y, k=2, tau=0.001).item(), 4)
    -0.5
    """
    k, threshold = cutoff(k), positive("threshold", threshold)
    relaxation = Relaxation(
        tau, sinkhorn_iters, sinkhorn_tol, sort, samples, beta, log_scores, perturb, generator, noise, backend
    ).checked(scores)
    lists = prepare(scores, labels, mask, check)
    relevant = lists.mask & (lists.labels >= threshold)
    q = _relaxed(lists, relevant, relaxation, labels.shape)
    depth = lists.counts.clamp(min=1) if k is None else k
    precision = (q * top(q, k)).sum(-1) / depth
    return _loss(precision, lists, has_relevant(lists.labels, lists.mask, threshold), relaxation, reduction)


class Relaxation(NamedTuple):
    """How the scores are perturbed, sorted and scaled; the module's docstring says what each field means."""

    tau: float
    iters: int
    tol: float
    sort: Sort
    samples: int | None
    beta: float
    log_scores: bool
    perturb: str
    generator: torch.Generator | None
    noise: Tensor | None
    backend: str

    @property
    def fused(self) -> bool:
        """Whether value and gradient of NeuralNDCG come from one kernel."""
        return self.backend == "triton" and not self.stochastic

    @property
    def stochastic(self) -> bool:
        """Whether a leading dimension of samples exists."""
        return self.samples is not None or self.noise is not None

    def checked(self, scores: Tensor) -> "Relaxation":
        """The same with the backend these scores get, or a ValueError that names the argument."""
        if not callable(self.sort):
            raise ValueError(f"sort must be a function such as rankgrad.sorting.neural_sort, got {self.sort!r}")
        samples = None if self.samples is None else whole("samples", self.samples, 1)
        if self.noise is not None:
            check_noise(self.noise)
            if self.noise.dim() == 0 or len(self.noise) == 0 or (samples is not None and len(self.noise) != samples):
                wanted = "at least one sample" if samples is None else f"{samples} samples as samples= says"
                raise ValueError(f"noise must have {wanted}, got shape {tuple(self.noise.shape)}")
        one_of("perturb", self.perturb, ("paper", "allrank"))
        flag("log_scores", self.log_scores)
        if self.sort is not neural_sort:
            if one_of("backend", self.backend, ("auto", "torch", "triton")) == "triton":
                raise ValueError("backend='triton' has kernels for sort=neural_sort alone; use backend='auto'")
            backend = "torch"
        elif isinstance(scores, Tensor):
            backend = choose(self.backend, scores)
        else:
            backend = "torch"  # `prepare` refuses such scores
        return self._replace(
            tau=positive("tau", self.tau),
            iters=whole("sinkhorn_iters", self.iters, 0),
            tol=non_negative("sinkhorn_tol", self.tol),
            samples=samples,
            beta=non_negative("beta", self.beta),
            backend=backend,
        )


def _relaxed(
    lists: Lists, values: Tensor, relaxation: Relaxation, shape: torch.Size, *, transposed: bool = False
) -> Tensor:
    """scale(P) values, or scale(P^T) values; samples are a new leading dimension."""
    scores, mask = lists.scores, lists.mask
    if relaxation.stochastic:
        scores = _perturbed(lists, relaxation, shape)  # [S, ..., L]
        mask = mask.expand_as(scores)
    values = values.to(scores.dtype).expand_as(scores)
    tau, iters, tol = relaxation.tau, relaxation.iters, relaxation.tol
    if relaxation.sort is neural_sort:
        return sort_values(
            scores, values, mask, tau=tau, iters=iters, tol=tol, transposed=transposed, backend=relaxation.backend
        )
    matrix = relaxation.sort(scores, mask, tau=tau)
    if not isinstance(matrix, Tensor) or matrix.shape != (*scores.shape, scores.shape[-1]):
        came = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"sort must return a matrix [..., L, L] for scores {tuple(scores.shape)}, got {came}")
    scaled = sinkhorn(matrix.mT if transposed else matrix, iters=iters, tol=tol)
    return (scaled * values[..., None, :]).sum(-1)


def _perturbed(lists: Lists, relaxation: Relaxation, shape: torch.Size) -> Tensor:
    """Noisy copies of the scores, [S, ..., L]; `shape` is that of the caller's labels, which noise must repeat."""
    scores, mask, beta = lists.scores, lists.mask, relaxation.beta
    if relaxation.noise is None:
        assert relaxation.samples is not None
        noise = gumbel((relaxation.samples, *scores.shape), scores, relaxation.generator)
    else:
        if relaxation.noise.shape[1:] != shape:
            raise ValueError(
                f"noise must have the shape [S, ...] with the scores' {tuple(shape)} after the samples, "
                f"got {tuple(relaxation.noise.shape)}"
            )
        noise = relaxation.noise.detach().to(scores.dtype)
        noise = noise if shape[-1] else noise.new_zeros(len(noise), *scores.shape)
        refuse_bad_noise(noise, mask)
    noise = beta * torch.where(mask, noise, 0.0)
    if not relaxation.log_scores:
        return torch.where(mask, scores + noise, 0.0)
    lowest = scores.masked_fill(~mask, torch.finfo(scores.dtype).max).amin(-1, keepdim=True)
    # The lowest score's own shift is constant: letting 1 / eps enter its gradient only to cancel would drown the rest.
    at_lowest = ~mask | (scores <= lowest)
    shifted = torch.where(at_lowest, 1e-10, scores - lowest + 1e-10)
    scale = beta if relaxation.perturb == "paper" else 1.0
    return torch.where(mask, scale * shifted.log() + noise, 0.0)


def _loss(metric: Tensor, lists: Lists, teaches: Tensor, relaxation: Relaxation, reduction: str) -> Tensor:
    """Minus the metric, mean over samples, reduced over the lists that teach."""
    return reduce(-metric.mean(0) if relaxation.stochastic else -metric, teaches, lists, reduction)
