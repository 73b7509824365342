"""Sorting with a gradient: NeuralSort, SoftSort, optimal transport, and Sinkhorn scaling.

Every relaxed sort maps scores [..., L] to a matrix [..., L, L] whose row i tells which document is at rank i; rows
beyond the number n of real documents and the columns of padding are exactly zero. The arithmetic that makes this accurate
in float32 and the backward passes are in `rankgrad.core.sinkhorn`.
"""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from rankgrad.checks import non_negative, positive, whole
from rankgrad.core.explain import explaining
from rankgrad.core.lists import inverse, order_by_score, prepare
from rankgrad.core.noise import gumbel as gumbel
from rankgrad.core.operators import has_values, operator
from rankgrad.core.sinkhorn import (
    SCALED_SORT_PARAMETERS,
    converged_matrix,
    neural_sort_matrix,
    scaled_matrix,
    scaled_sort,
)
from rankgrad.kernels import scaled_sort_kernel

explained = explaining(
    tau="temperature; it has the scale of score differences, and as it goes to 0 the matrix becomes the sorting permutation.",
    matrix="[..., R, C], not negative.",
    iters="rounds at most.",
    tol="how close to one all sums of rows and columns must be to stop before.",
)


@explained
def neural_sort(scores: Tensor, mask: Tensor | None = None, *, tau: float = 1.0) -> Tensor:
    """NeuralSort (Grover et al. 2019): P[i, :] = softmax_j((r_i s_j - b_j) / tau), [..., L] -> [..., L, L].

    r_i = n + 1 - 2 i and b_j = sum_k |s_j - s_k|. Rows sum to one; tau -> 0 gives the sorting permutation.

    >>> y, s = torch.tensor([4.0, 2, 1, 0, 4, 3]), torch.tensor([0.5, 0.2, 0.1, 0.01, 0.65, 0.3])
    >>> [round(x, 4) for x in (neural_sort(s, tau=0.1) @ y).tolist()]
    [3.9995, 3.8909, 2.8239, 1.973, 0.9989, 0.3136]
    """
    tau = positive("tau", tau)
    clean, mask, valid = _clean(scores, mask)
    order = order_by_score(clean, ~mask)
    ordered = clean.gather(-1, order)  # [..., L], best first, padding last
    length = ordered.shape[-1]
    counts = mask.sum(-1).reshape(-1)
    matrix = neural_sort_matrix(ordered.reshape(len(counts), length), counts, tau)
    columns = inverse(order)[..., None, :].expand(*order.shape, length)
    return _finish(matrix.reshape(columns.shape).gather(-1, columns), valid, scores.dtype)


@explained
def soft_sort(scores: Tensor, mask: Tensor | None = None, *, tau: float = 1.0) -> Tensor:
    """SoftSort (Prillo & Eisenschlos 2020): P[i, :] = softmax_j(-|s_(i) - s_j| / tau), s_(i) the i-th largest score.

    >>> soft_sort(torch.tensor([0.0, 2.0, 1.0]), tau=0.1).round().tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    tau = positive("tau", tau)
    clean, mask, valid = _clean(scores, mask)
    order = order_by_score(clean, ~mask)
    ordered = clean.gather(-1, order)
    distance = (ordered[..., :, None] - clean[..., None, :]).abs() / tau  # [..., L, L]
    rows = mask.gather(-1, order)[..., :, None]
    real = rows & mask[..., None, :]
    # Padded columns get a weight of exp(-huge) = 0 exactly; a row beyond n is zeroed after the softmax, which stays finite.
    limit = torch.finfo(distance.dtype).max / 4
    weights = torch.where(real, distance.clamp(max=limit / 2), limit).neg().softmax(-1)
    return _finish(torch.where(real, weights, 0.0), valid, scores.dtype)


@explained
def ot_sort(
    scores: Tensor, mask: Tensor | None = None, *, tau: float = 1.0, iters: int = 10_000, tol: float = 1e-9
) -> Tensor:
    """The sorting plan of entropic optimal transport, n times the plan between scores and ranks, [..., L] -> [..., L, L].

    Squared cost between the n scores and the n equally spaced targets r_i = n + 1 - 2 i, regularisation 2 tau, uniform
    marginals: P[i, j] = exp(a_i + c_j - 2 i s_j / tau) with rows and columns summing to one. NeuralSort is one scaling of
    that kernel, so the scaling starts from it; converged, the start no longer matters. It runs in float64 until every
    row and column sum is within `tol` of one, and warns when `iters` rounds were not enough.

    >>> plan = ot_sort(torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64), tau=0.1)
    >>> [round(x, 6) for x in plan.sum(0).tolist()], [round(x, 6) for x in plan.sum(1).tolist()]
    ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    """
    iters = whole("iters", iters, 1)
    tol = positive("tol", tol)
    clean, mask, valid = _clean(scores, mask)
    kernel = neural_sort(clean.double(), mask, tau=tau)
    if kernel.numel() == 0:
        return _finish(kernel, valid, scores.dtype)
    flat = kernel.reshape(-1, *kernel.shape[-2:])
    plan = converged_matrix(flat, iters, tol).view(kernel.shape)
    error = torch.where(mask, (plan.detach().sum(-2) - 1).abs(), 0.0).amax()
    if has_values(error) and bool(error > 2 * tol):
        warnings.warn(
            f"ot_sort stopped after {iters} rounds with a column sum off by {float(error):.1e}, tol is {tol:g}; "
            "give more iters, a larger tau or a larger tol",
            stacklevel=2,
        )
    return _finish(plan, valid, scores.dtype)


@explained
def sinkhorn(matrix: Tensor, *, iters: int = 30, tol: float = 1e-6) -> Tensor:
    """Sinkhorn scaling: normalise columns, then rows, `iters` times or until all sums are within `tol` of one.

    `matrix` [..., R, C] is not negative. All-zero rows and columns stay zero. 0 rounds scale nothing, tol = 0 never stops
    early, and each matrix of a batch stops by itself. The backward pass keeps two vectors per round, no matrices.

    >>> scaled = sinkhorn(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> scaled.sum(0).allclose(torch.ones(2)), scaled.sum(1).allclose(torch.ones(2))
    (True, True)
    """
    iters, tol = whole("iters", iters, 0), non_negative("tol", tol)
    if not isinstance(matrix, Tensor) or not matrix.dtype.is_floating_point or matrix.dim() < 2:
        came = f"{matrix.dtype} of shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"matrix must be a floating-point tensor of shape [..., R, C], got {came}")
    if iters == 0 or matrix.numel() == 0:
        return matrix
    if matrix.device.type == "cpu" and has_values(matrix) and bool((matrix < 0).any()):
        raise ValueError(f"matrix must not hold negative numbers, got {float(matrix.min())}")
    # float64: the scaling vectors of an arbitrary matrix may leave float32's range
    flat = matrix.double().reshape(-1, *matrix.shape[-2:])
    return scaled_matrix(flat, iters, tol).view(matrix.shape).to(matrix.dtype)


def sort_values(
    scores: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    tau: float,
    iters: int,
    tol: float,
    transposed: bool = False,
    backend: str = "torch",
) -> Tensor:
    """scale(P) values, P = NeuralSort of the scores, without keeping P: [..., L] -> [..., L] by rank.

    With `transposed`, values are given by rank and come out by document: scale(P^T) values. Inputs are those of
    `rankgrad.core.lists.prepare`: clean under the padding. The gradient flows to the scores alone. `backend` is what
    `rankgrad.kernels.choose` says.
    """
    order = order_by_score(scores, ~mask)
    ordered = scores.gather(-1, order)
    by_column = values.expand_as(scores) if transposed else values.gather(-1, order)
    length = scores.shape[-1]
    out = SCALED_SORT[backend](
        ordered.reshape(-1, length),
        mask.sum(-1).reshape(-1),
        by_column.to(scores.dtype).reshape(-1, length),
        tau,
        iters,
        tol,
        transposed,
    ).view(scores.shape)
    return out.gather(-1, inverse(order)) if transposed else out


def _by_kernel(name: str, backend: str) -> Callable[..., Tensor]:
    return operator(
        name,
        SCALED_SORT_PARAMETERS,
        lambda scores: scaled_sort_kernel(scores, backend),
        lambda scores, *_: torch.empty_like(scores),
    )


SCALED_SORT = {
    "torch": scaled_sort,
    "triton": _by_kernel("scaled_sort_by_kernel", "triton"),
    "numba": _by_kernel("scaled_sort_on_cpu", "numba"),
}


def _clean(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores and mask as `prepare` cleans them, of the scores' own width, and which lists are valid."""
    no_labels = torch.zeros_like(scores, dtype=torch.bool) if isinstance(scores, Tensor) else scores
    lists = prepare(scores, no_labels, mask, None)
    length = scores.shape[-1]
    return lists.scores[..., :length], lists.mask[..., :length], lists.valid


def _finish(matrix: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """NaN for a list with a bad score (where the CPU's check did not refuse it), and the caller's dtype."""
    if valid is None:
        return matrix.to(dtype)
    return (matrix * torch.where(valid, 1.0, math.nan).to(matrix.dtype)[..., None, None]).to(dtype)
