"""Sinkhorn-scaled NeuralSort for lists of up to 256 documents: the matrix lives in registers, never in memory.

For one list of n documents, scores sorted descending and divided by tau, gaps q_k = s_k - s_{k+1} >= 0 and the prefix sums
A_i = sum_{k < i} q_k, W_i = sum_{k < i} k q_k (float64), the logits relative to the diagonal are

    z_ij = -[ 2 (W_j - W_i) - (2 i - 1) (A_j - A_i) ],   i, j from 0,   K = softmax_j z

Gaps are cut at 128: what lies across such a gap is exp(-128) = 0 either way, so no score is too large for the sums.

Every Sinkhorn iterate is diag(p) K diag(q), p by rank and q by document. `rounds_kernel` keeps K and runs all rounds, then walks
them back; it leaves the vectors of each round in memory (4 T + 1 per list). `logits_gradient_kernel` makes dK from them, one
product of two thin matrices, block of rows by block of rows, K rebuilt on the way; `scores_gradient_kernel` ends at the scores.

Plain scaling is q = 1 / (K' p), p = 1 / (K q); transposed is the other order. u, v are the names of `rankgrad.relaxation`: u
is p and v is q for the plain form, the other way round for the transposed.

Lists of more than 128 documents get two programs, each with half of the rows; the column sums are exchanged through memory
as 64-bit words that carry their own number, so that no flag and no fence is needed. A program takes its place from a
ticket: whoever waits, waits for a program that has started or will start next, whatever else runs on the chip.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rankgrad.kernels.attach import Attach
from rankgrad.kernels.gradient import logits_gradient_kernel, scores_gradient_kernel
from rankgrad.kernels.lists import RELEVANT, summarise
from rankgrad.kernels.rounds import rounds_kernel

_WARPS = {128: 8, 256: 8}  # by width; else 4
_PRECISION = "tf32x3"  # float32 from three tensor-core products: as exact here as "ieee", and faster


class Rounds(NamedTuple):
    """Lists and what scaling them left behind, enough to rebuild every iterate."""

    scores: Tensor  # [B, L] float32, sorted
    counts: Tensor  # [B] int32
    u: Tensor  # u_0, ..., u_T, flat [B, T + 1, L]
    v: Tensor  # v_1, ..., v_T, flat [B, T, L]
    norm: Tensor  # one over the row sums of exp(z), flat [B, L]
    done: Tensor  # [B] int32, rounds until the list stopped
    prefix: Tensor  # A and W, [B, 2, N + 1] float64


class Walk(NamedTuple):
    """What walking the rounds back left behind: the other factors of dK, and room for the sums over blocks of rows."""

    w: Tensor  # u_t times the adjoint of log u_t, flat [B, T, L]
    x: Tensor  # v_t times the adjoint of log v_t, flat [B, T, L]
    sums: Tensor  # sum over a block's rows of dz_ij and of (r_i - r_middle) dz_ij, flat [B, blocks, 2, L]


class ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x: the twin of `rankgrad.relaxation.ScaledSort`."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] float32 scores (sorted), counts [B], values [B, L] -> [B, L]."""
        rounds = _allocate(scores.contiguous(), counts.to(torch.int32), iters)
        values = values.contiguous()
        out = torch.empty_like(values)
        by_rank, by_document = (values, out) if transposed else (out, values)
        _launch(rounds, None, by_rank, by_document, out, None, tau, iters, tol, transposed)
        ctx.save_for_backward(values, *rounds)
        ctx.how = tau, iters, tol, transposed
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores; the values are constants."""
        values, *saved = ctx.saved_tensors
        rounds, (tau, iters, tol, transposed) = Rounds(*saved), ctx.how
        by_rank, by_document = (values, grad.contiguous()) if transposed else (grad.contiguous(), values)
        walk = _allocate_walk(rounds.scores, iters)
        _launch(rounds, walk, by_rank, by_document, None, None, tau, iters, tol, transposed)
        out = torch.empty_like(values)
        _assemble(rounds, walk, by_rank, by_document, out, None, None, tau, iters, 0, transposed)
        return out, None, None, None, None, None, None


def neural_ndcg(
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
) -> Tensor:
    """`rankgrad.losses.direct.neural_ndcg`, or its transposed form: value and gradient at once, [..., L] -> scalar."""
    length = scores.shape[-1]
    with torch.no_grad(), torch.cuda.device_of(scores):
        lists = summarise(
            scores.detach().reshape(-1, length),
            labels.detach().reshape(-1, length),
            None if mask is None else mask.reshape(-1, length),
            gain=gain.reshape(-1, length) if isinstance(gain, Tensor) else gain,
            k=k,
            teaches=RELEVANT,
        )
        rounds = _allocate(lists.ordered, lists.counts, iters)
        walk = _allocate_walk(lists.ordered, iters)
        depth = length if k is None else k
        values = torch.empty(len(lists.ordered), 2, device=scores.device)
        _launch(
            rounds, walk, None, lists.ordered_gain, None, values, tau, iters, tol, transposed, depth, lists.value_scale
        )
        gradient = torch.empty_like(lists.ordered)
        _assemble(
            rounds,
            walk,
            None,
            lists.ordered_gain,
            gradient,
            lists.order,
            lists.grad_scale,
            tau,
            iters,
            depth,
            transposed,
        )
    return Attach.apply(scores, values, gradient, lists.weighs, reduction)


def _width(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _allocate(scores: Tensor, counts: Tensor, iters: int) -> Rounds:
    lists, length = scores.shape
    sizes = (lists * (iters + 1) * length, lists * iters * length, lists * length)
    u, v, norm = scores.new_empty(sum(sizes)).split(sizes)
    prefix = scores.new_empty(lists, 2, _width(length) + 1, dtype=torch.float64)
    return Rounds(scores, counts, u, v, norm, torch.empty_like(counts), prefix)


def _allocate_walk(scores: Tensor, iters: int) -> Walk:
    lists, length = scores.shape
    blocks = triton.cdiv(length, _rows_at_once(_width(length)))
    sizes = (lists * iters * length, lists * iters * length, lists * blocks * 2 * length)
    return Walk(*scores.new_empty(sum(sizes)).split(sizes))


def _rows_at_once(width: int) -> int:
    return min(32, width)


def _launch(
    rounds: Rounds,
    walk: Walk | None,
    by_rank: Tensor | None,
    by_document: Tensor,
    out: Tensor | None,
    values: Tensor | None,
    tau: float,
    iters: int,
    tol: float,
    transposed: bool,
    depth: int = 0,
    scale: Tensor | None = None,
) -> None:
    """Run the rounds (out or values wanted), walk them back (walk wanted), or both."""
    lists, length = rounds.scores.shape
    width = _width(length)
    split = 2 if width > 128 and rounds.scores.is_cuda else 1  # programs of the interpreter run one after the other
    mail = rounds.done.new_zeros(lists * 4 * width + 1 if split == 2 else 0, dtype=torch.int64)
    nothing, warps = rounds.scores, _WARPS.get(width, 4)
    with torch.cuda.device_of(rounds.scores):
        rounds_kernel[(lists * split,)](
            rounds.scores, rounds.counts, rounds.u, rounds.v, rounds.done, rounds.prefix, rounds.norm,
            *((walk.w, walk.x) if walk is not None else (nothing, nothing)),
            nothing if by_rank is None else by_rank, by_document,
            nothing if out is None else out, nothing if values is None else values, nothing if scale is None else scale,
            mail, length, iters, tau, tol, depth,
            N=width, SPLIT=split, RL=2 * warps, CL=16, TRANSPOSED=transposed, FORWARD=out is not None or values is not None,
            OUT=out is not None, STOPS=tol > 0, BACKWARD=walk is not None, DISCOUNTS=by_rank is None,
            num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip


def _assemble(
    rounds: Rounds,
    walk: Walk,
    by_rank: Tensor | None,
    by_document: Tensor,
    out: Tensor,
    order: Tensor | None,
    scale: Tensor | None,
    tau: float,
    iters: int,
    depth: int,
    transposed: bool,
) -> None:
    """d/d scores from the vectors of the rounds, put where `order` says."""
    lists, length = rounds.scores.shape
    width = _width(length)
    nothing = rounds.scores
    with torch.cuda.device_of(rounds.scores):
        block = _rows_at_once(width)
        logits_gradient_kernel[(lists, triton.cdiv(length, block))](
            rounds.counts, rounds.u, rounds.v, rounds.done, rounds.prefix, rounds.norm, *walk,
            nothing if by_rank is None else by_rank, by_document, length, iters, depth,
            N=width, BI=block, BT=32, TRANSPOSED=transposed, DISCOUNTS=by_rank is None, PRECISION=_PRECISION,
            num_warps=8 if width > 64 else 4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        scores_gradient_kernel[(lists, triton.cdiv(length, min(32, width)))](
            rounds.scores, rounds.counts, walk.sums, out, nothing if order is None else order,
            nothing if scale is None else scale, length, tau,
            N=width, BI=block, BJ=min(32, width), ORDER=order is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
