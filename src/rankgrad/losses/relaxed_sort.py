"""Values in relaxed order of the scores: perturb, sort, scale. The base of every loss in `losses.neural`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.checks import flag, non_negative, one_of, positive, whole
from rankgrad.core.lists import Lists
from rankgrad.core.noise import check_noise, cleaned_noise, gumbel
from rankgrad.kernels import BACKENDS, choose
from rankgrad.sorting import neural_sort, sinkhorn, sort_values

Sort = Callable[..., Tensor]


class SortOptions(NamedTuple):
    """How the scores are perturbed, sorted and scaled; `rankgrad.losses.neural` says what each field means."""

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
    def stochastic(self) -> bool:
        """Whether a leading dimension of samples exists."""
        return self.samples is not None or self.noise is not None

    def checked(self, scores: Tensor) -> "SortOptions":
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
            if one_of("backend", self.backend, (*BACKENDS, "numba")) in ("triton", "numba"):
                raise ValueError(f"backend={self.backend!r} has kernels for sort=neural_sort alone; use backend='auto'")
            backend = "torch"
        else:
            backend = choose(self.backend, scores, on_cpu=True)
        return self._replace(
            tau=positive("tau", self.tau),
            iters=whole("sinkhorn_iters", self.iters, 0),
            tol=non_negative("sinkhorn_tol", self.tol),
            samples=samples,
            beta=non_negative("beta", self.beta),
            backend=backend,
        )


def relaxed(
    lists: Lists, values: Tensor, options: SortOptions, shape: torch.Size, *, transposed: bool = False
) -> Tensor:
    """scale(P) values, or scale(P^T) values; samples are a new leading dimension."""
    scores, mask = lists.scores, lists.mask
    if options.stochastic:
        scores = _perturbed(lists, options, shape)  # [S, ..., L]
        mask = mask.expand_as(scores)
    values = values.to(scores.dtype).expand_as(scores)
    tau, iters, tol = options.tau, options.iters, options.tol
    if options.sort is neural_sort:
        return sort_values(
            scores, values, mask, tau=tau, iters=iters, tol=tol, transposed=transposed, backend=options.backend
        )
    matrix = options.sort(scores, mask, tau=tau)
    if not isinstance(matrix, Tensor) or matrix.shape != (*scores.shape, scores.shape[-1]):
        came = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"sort must return a matrix [..., L, L] for scores {tuple(scores.shape)}, got {came}")
    scaled = sinkhorn(matrix.mT if transposed else matrix, iters=iters, tol=tol)
    return (scaled * values[..., None, :]).sum(-1)


def _perturbed(lists: Lists, options: SortOptions, shape: torch.Size) -> Tensor:
    """Noisy copies of the scores, [S, ..., L]; `shape` is that of the caller's labels, which noise must repeat."""
    scores, mask, beta = lists.scores, lists.mask, options.beta
    if options.noise is None:
        assert options.samples is not None
        noise = gumbel((options.samples, *scores.shape), scores, options.generator)
    else:
        if options.noise.shape[1:] != shape:
            raise ValueError(
                f"noise must have the shape [S, ...] with the scores' {tuple(shape)} after the samples, "
                f"got {tuple(options.noise.shape)}"
            )
        noise = options.noise.detach().to(scores.dtype)
        noise = noise if shape[-1] else noise.new_zeros(len(noise), *scores.shape)
    noise = beta * cleaned_noise(noise, mask)
    if not options.log_scores:
        return torch.where(mask, scores + noise, 0.0)
    lowest = scores.masked_fill(~mask, torch.finfo(scores.dtype).max).amin(-1, keepdim=True)
    # The lowest score's own shift is constant: letting 1 / eps enter its gradient only to cancel would drown the rest.
    at_lowest = ~mask | (scores <= lowest)
    # Differences of the largest scores overflow: those lists are halved, and their logarithms get log 2 back.
    half = torch.where(scores.detach().amax(-1, keepdim=True) - lowest <= torch.finfo(scores.dtype).max, 1.0, 0.5)
    half = half.to(scores.dtype)
    shifted = torch.where(at_lowest, 1e-10, half * scores - half * lowest + 1e-10)
    scale = beta if options.perturb == "paper" else 1.0
    return torch.where(mask, scale * (shifted.log() - half.log()) + noise, 0.0)
