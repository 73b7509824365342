"""Sinkhorn-scaled NeuralSort for lists of up to 256 documents: the matrix lives in registers, never in memory.

For one list of n documents, scores sorted descending and divided by tau, gaps q_k = s_k - s_{k+1} >= 0 and the prefix sums
A_i = sum_{k < i} q_k, W_i = sum_{k < i} k q_k (float64), the logits relative to the diagonal are

    z_ij = -[ 2 (W_j - W_i) - (2 i - 1) (A_j - A_i) ],   i, j from 0,   K = softmax_j z

Gaps are cut at 128: every entry across such a gap is exp(-128) = 0 either way, so no score is too large for the sums.

Every Sinkhorn iterate is diag(p) K diag(q), p by rank and q by document. Three launches (on some chips NeuralNDCG takes two others: see
`rankgrad.kernels.neural_ndcg.hopper.launch`): `sort_kernel` sorts a list and
writes its prefix sums; `rounds_kernel` keeps K and runs all rounds, then the backward pass through them, and leaves the vectors of
each round in memory (4 T per list); `gradient_kernel` makes dK from them, one product of two thin matrices, block of rows by
block of rows, K rebuilt on the way, and ends at the scores. What one leaves for the next is in one workspace, linear in L.

Plain scaling is q = 1 / (K' p), p = 1 / (K q); transposed is the other order. u, v are the names of `rankgrad.core.sinkhorn`: u
is p and v is q for the plain form, the other way round for the transposed. w is u_t times the adjoint of log u_t, x is v_t
times the adjoint of log v_t.

Lists of more than 128 documents get two programs, each with half of the rows; the column sums are exchanged through memory
as 64-bit words that carry their own number, so that no flag and no fence is needed. A program takes its list and half from a
counter: a program that waits, waits for one that has started or will start next, whatever else runs on the chip.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.kernels.neural_ndcg.hopper import launch as hopper
from rankgrad.kernels.neural_ndcg.short.gradient import gradient_kernel
from rankgrad.kernels.neural_ndcg.short.rounds import rounds_kernel
from rankgrad.kernels.neural_ndcg.short.sort import sort_kernel, sorted_kernel
from rankgrad.kernels.neural_ndcg.short.workspace import words
from rankgrad.kernels.summary import GAINS, temperature

_WARPS = {128: 8, 256: 8}  # by width; else 4
_TILE = 32  # rows of dz at once


class ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x: the twin of `rankgrad.core.sinkhorn.scaled_sort`."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] float32 scores (sorted), counts [B], values [B, L] -> [B, L]."""
        scores, values, tau = scores.contiguous(), values.contiguous(), temperature(tau)
        work = _workspace(scores, iters)
        out = torch.empty_like(values)
        by_rank, by_document = (values, out) if transposed else (out, values)
        with torch.cuda.device_of(scores):
            _sorted(scores, counts, work, iters, tau)
            _rounds(scores, work, by_rank, by_document, out, iters, tol, 0, transposed, forward=True, backward=False)
        ctx.save_for_backward(scores, counts, values, work)
        ctx.how = tau, iters, tol, transposed
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores; the values are constants."""
        scores, counts, values, work = ctx.saved_tensors
        (tau, iters, tol, transposed), grad = ctx.how, grad.contiguous()
        by_rank, by_document = (values, grad) if transposed else (grad, values)
        out = torch.empty_like(values)
        with torch.cuda.device_of(scores):
            _sorted(scores, counts, work, iters, tau)  # resets the exchange buffer
            _rounds(scores, work, by_rank, by_document, out, iters, tol, 0, transposed, forward=False, backward=True)
            _gradient(scores, work, by_rank, by_document, out, out, iters, tau, 0, transposed, "given")
        return out, None, None, None, None, None, None


def value_and_gradient(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    k: int | None,
    tau: float,
    gain: str | Tensor,
    iters: int,
    tol: float,
    transposed: bool,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """NeuralNDCG of scores [..., L], or its transposed form, and d loss / d scores in float32."""
    length, tau = scores.shape[-1], temperature(tau)
    depth = length if k is None else k
    compiled = hopper.find(scores, labels, iters, transposed)
    if compiled:
        return hopper.value_and_gradient(
            compiled, scores, labels, mask, depth=depth, tau=tau, gain=gain, iters=iters, tol=tol, reduction=reduction
        )
    given = gain.contiguous() if isinstance(gain, Tensor) else labels  # not read unless given
    work = _workspace(scores, iters)
    gradient = scores.new_empty(scores.shape, dtype=torch.float32)
    loss = scores.new_empty(scores.shape[:-1] if reduction == "none" else (), dtype=torch.float32)
    with torch.cuda.device_of(scores):
        sort_kernel[(scores.numel() // length,)](
            scores.contiguous(), labels.contiguous(), labels if mask is None else mask.contiguous(), given, work,
            length, iters, tau, depth,
            MASKED=mask is not None, GAIN=2 if isinstance(gain, Tensor) else GAINS[gain], N=_width(length),
            num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
        _rounds(scores, work, work, work, work, iters, tol, depth, transposed, forward=True, backward=True)
        _gradient(scores, work, work, work, gradient, loss, iters, tau, depth, transposed, reduction)
    return loss, gradient


def _width(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _workspace(scores: Tensor, iters: int) -> Tensor:
    length = scores.shape[-1]
    return scores.new_empty(words(scores.numel() // length, length, iters, _width(length)), dtype=torch.float32)


def _sorted(scores: Tensor, counts: Tensor, work: Tensor, iters: int, tau: float) -> None:
    lists, length = scores.shape
    sorted_kernel[(lists,)](scores, counts, work, length, iters, tau, N=_width(length), num_warps=4)


def _rounds(
    scores: Tensor,
    work: Tensor,
    by_rank: Tensor,
    by_document: Tensor,
    out: Tensor,
    iters: int,
    tol: float,
    depth: int,
    transposed: bool,
    *,
    forward: bool,
    backward: bool,
) -> None:
    """Run the rounds, the backward pass through them, or both (then the loss is NDCG, whose vectors are in the workspace)."""
    length = scores.shape[-1]
    width = _width(length)
    # The interpreter runs programs one after the other, whatever the device: two that wait for each other would hang.
    split = 2 if width > 128 and isinstance(rounds_kernel, triton.JITFunction) else 1
    warps = _WARPS.get(width, 4)
    rounds_kernel[(scores.numel() // length * split,)](
        work, by_rank, by_document, out, length, iters, tol, depth,
        N=width, SPLIT=split, RL=2 * warps, CL=16, TRANSPOSED=transposed, STOPS=tol > 0,
        FORWARD=forward, BACKWARD=backward, NDCG=forward and backward, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip


def _gradient(
    scores: Tensor,
    work: Tensor,
    by_rank: Tensor,
    by_document: Tensor,
    gradient: Tensor,
    loss: Tensor,
    iters: int,
    tau: float,
    depth: int,
    transposed: bool,
    reduction: str,
) -> None:
    """d/d scores from the vectors of the rounds, and the loss ("given": the adjoints came from outside, no loss)."""
    length = scores.shape[-1]
    width = _width(length)
    block = min(64, width)
    gradient_kernel[(scores.numel() // length, triton.cdiv(length, block))](
        work, by_rank, by_document, gradient, loss, length, iters, tau, depth,
        N=width, BI=block, TILE=min(_TILE, width), BT=32, TRANSPOSED=transposed, NDCG=reduction != "given",
        REDUCTION=reduction, num_warps=8 if width > 64 else 4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
