"""Sinkhorn-scaled NeuralSort for lists of any length, tile by tile: a few vectors per round and no matrix.

With E_ij = exp(z_ij) as in `rankgrad.kernels.scaled_sort`, NeuralSort is diag(p_0) E with p_0 = 1 / (E 1): the softmax is a row
step like any other, and every iterate is diag(p) E diag(q). In order,

    p_0 = 1 / (E 1);   q_t = 1 / (E' p_{t-1}),   p_t = 1 / (E q_t),   t = 1, ..., T

The plain form ends with (p_T, q_T). The transposed form begins with a row step, which is p_0 again, and ends with (p_{T-1}, q_T).

*Windows.* Along a row or a column z falls on both sides of the diagonal, so the entries above exp(-64) are an interval, found by
bisection: about 16 / sqrt(gap) wide for scores `gap` apart. Only these are visited. Equal scores have no window: all n^2.

*One launch per half-round*, one program per block of rows or columns; a stopped list's programs return at once. Forward saves
p_t, q_t (float64) and the moments R_t = sum_i (r_i - rho_j) p_{t-1,i} E_ij, 3 T + 2 vectors in all; the way back is

    x = p_t abar (row step t):     cbar = -q_t (E' x),       sbar -= q_t sum_i (r_i - rho_j) x_i E_ij
    y = q_t cbar (column step t):  abar = -p_{t-1} (E y),    sbar -= y R_t

and ends with cbar of the start, the column sums of dz, which reach the scores through b: `long_lists.finish`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rankgrad.kernels.attach import Attach
from rankgrad.kernels.long_lists import Sorted, finish, judge, survey
from rankgrad.kernels.long_rounds import (
    back_columns_kernel,
    back_rows_kernel,
    columns_kernel,
    end_columns_kernel,
    end_rows_kernel,
    rows_kernel,
)


class Tiles(NamedTuple):
    """How a program's entries lie: see `long_rounds`. Blocks must be whole chunks, of columns and of rows."""

    R: int = 16
    G: int = 4
    LANES: int = 32
    RUN: int = 32

    @property
    def block(self) -> int:
        return 4 * self.LANES

    def of_rows(self) -> dict[str, Any]:
        return {
            "R": self.R, "M": 4, "G": self.G, "LANES": self.LANES, "num_warps": self.G, "enable_fp_fusion": True,
        }  # fmt: skip

    def of_columns(self) -> dict[str, Any]:
        return self.of_rows() | {"RUN": self.RUN}


TILES = Tiles()


class Rounds(NamedTuple):
    """Lists and what scaling them left behind."""

    p: Tensor  # [T + 1, B, N] float64, row scalings
    q: Tensor  # [T + 1, B, N] float64, column scalings
    moment: Tensor  # [T + 1, B, N] float32
    done: Tensor  # [B] int32, rounds until the list stopped


class Walk(NamedTuple):
    """The vectors of the way back."""

    x: Tensor  # [B, N] float64, p_t times the adjoint of log p_t
    x_far: Tensor  # [2, B, N] float32, the same as the far side of a block
    y: Tensor  # [B, N] float64, q_t times the adjoint of log q_t; at the end the column sums of dz
    y_far: Tensor  # [2, B, N] float32
    slope: Tensor  # [B, N] float64, sum_i (r_i - rho_j) dz_ij

    @classmethod
    def empty(cls, lists: Sorted) -> "Walk":
        x, y, slope = lists.sums.new_empty(3, *lists.shape).unbind()
        x_far, y_far = lists.tables.new_empty(2, 2, *lists.shape).unbind()
        return cls(x, x_far, y, y_far, slope)


class ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x: the twin of `rankgrad.relaxation.ScaledSort`."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] float32 scores (sorted), counts [B], values [B, L] -> [B, L]."""
        length = scores.shape[-1]
        with torch.cuda.device_of(scores):
            lists = survey(scores.contiguous(), counts.to(torch.int32), tau, TILES)
            rounds = scale(lists, iters, tol, transposed, keep=ctx.needs_input_grad[0])
            values = torch.nn.functional.pad(values, (0, lists.shape[-1] - length))
            out = torch.zeros_like(values)
            end(lists, rounds, values, values, transposed, out=out)
        ctx.save_for_backward(values, *lists, *rounds)
        ctx.how = tau, transposed
        return out[:, :length]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores; the values are constants."""
        values, *saved = ctx.saved_tensors
        split = len(Sorted._fields)
        lists, rounds = Sorted(*saved[:split]), Rounds(*saved[split:])
        tau, transposed = ctx.how
        given = torch.nn.functional.pad(grad, (0, values.shape[-1] - grad.shape[-1]))
        by_rank, by_document = (values, given) if transposed else (given, values)
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(grad):
            walk = Walk.empty(lists)
            end(lists, rounds, by_rank, by_document, transposed, walk=walk)
            walk_back(lists, rounds, walk, transposed)
            finish(lists, walk.slope, walk.y, None, None, out, tau)
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
        judged = judge(
            scores.detach().reshape(-1, length),
            labels.detach().reshape(-1, length),
            None if mask is None else mask.reshape(-1, length),
            gain=gain.reshape(-1, length) if isinstance(gain, Tensor) else gain,
            k=k,
            width=triton.cdiv(length, TILES.block) * TILES.block,
        )
        lists = survey(judged.ordered, judged.counts, tau, TILES)
        rounds = scale(lists, iters, tol, transposed, keep=True)
        values = torch.zeros(lists.windows.shape[1:3], device=scores.device)
        walk = Walk.empty(lists)
        end(
            lists,
            rounds,
            judged.discount,
            judged.gain,
            transposed,
            values=values,
            value_scale=judged.value_scale,
            walk=walk,
        )
        walk_back(lists, rounds, walk, transposed)
        gradient = torch.empty_like(judged.ordered)
        finish(lists, walk.slope, walk.y, judged.order, judged.grad_scale, gradient, tau)
    return Attach.apply(scores, values, gradient, judged.weighs, reduction)


def scale(lists: Sorted, iters: int, tol: float, transposed: bool, *, keep: bool) -> Rounds:
    """All rounds, each list until it has had enough; `keep` what the way back needs."""
    count, width = lists.shape
    p, q = lists.sums.new_empty(2, iters + 1, count, width).unbind()
    moment = lists.tables.new_empty(iters + 1 if keep else 0, count, width)
    p_far, q_far = lists.tables.new_empty(2, 2, count, width).unbind()
    q[0] = lists.real
    torch.mul(lists.tables[4:6], lists.real, out=q_far)
    done = torch.zeros_like(lists.counts)
    worst = lists.tables.new_zeros(iters + 1, count)
    grid = lists.windows.shape[1:3]

    def row_step(t: int, to: int, ends: bool) -> None:
        rows_kernel[grid](
            lists.counts, lists.sums, lists.tables, lists.windows, p, q, p_far, q_far, done, worst, width, tol, t, to,
            JUDGES=not ends and t > 1, ENDS=ends, STOPS=tol > 0, **TILES.of_rows(),
        )  # fmt: skip

    def column_step(t: int, ends: bool) -> None:
        columns_kernel[grid](
            lists.counts, lists.sums, lists.tables, lists.windows, lists.ties, p, q, moment, p_far, q_far, done, worst, width,
            tol, t, JUDGES=not ends and t > 1, ENDS=ends, STOPS=tol > 0, MOMENT=keep, **TILES.of_columns(),
        )  # fmt: skip

    if not transposed or iters == 0:
        row_step(0, 0, False)
    for t in range(1, iters + 1):
        if transposed:
            row_step(t, t - 1, False)
            column_step(t, True)
        else:
            column_step(t, False)
            row_step(t, t, True)
    return Rounds(p, q, moment, done)


def end(
    lists: Sorted,
    rounds: Rounds,
    by_rank: Tensor,
    by_document: Tensor,
    transposed: bool,
    *,
    out: Tensor | None = None,
    values: Tensor | None = None,
    value_scale: Tensor | None = None,
    walk: Walk | None = None,
) -> None:
    """The result of the rounds as `out`, or the adjoints with which the way back begins and `values` of NDCG."""
    grid, width = lists.windows.shape[1:3], lists.shape[-1]
    nothing = lists.tables
    x, x_far, y, y_far, slope = walk or (nothing,) * 5
    if out is None or not transposed:
        end_rows_kernel[grid](
            lists.counts, lists.sums, lists.tables, lists.windows, rounds.p, rounds.q, rounds.done, by_rank, by_document,
            nothing if value_scale is None else value_scale, nothing if out is None else out,
            nothing if values is None else values, x, x_far, width,
            TRANSPOSED=transposed, OUT=out is not None, VALUES=values is not None, **TILES.of_rows(),
        )  # fmt: skip
    if out is None or transposed:
        end_columns_kernel[grid](
            lists.counts, lists.sums, lists.tables, lists.windows, lists.ties, rounds.p, rounds.q, rounds.moment, rounds.done,
            by_rank, by_document, nothing if out is None else out, slope, y, y_far, width,
            TRANSPOSED=transposed, OUT=out is not None, **TILES.of_columns(),
        )  # fmt: skip


def walk_back(lists: Sorted, rounds: Rounds, walk: Walk, transposed: bool) -> None:
    """From the adjoints of `end` to those of the start: walk.slope and walk.y are what `finish` needs."""
    grid, width = lists.windows.shape[1:3], lists.shape[-1]
    iters = len(rounds.p) - 1
    for t in range(iters, -1, -1):
        if t < iters or not transposed or iters == 0:
            back_columns_kernel[grid](
                lists.counts, lists.sums, lists.tables, lists.windows, lists.ties, rounds.q, rounds.moment, rounds.done,
                walk.slope, walk.x, walk.x_far, walk.y, walk.y_far, width, t, TRANSPOSED=transposed, **TILES.of_columns(),
            )  # fmt: skip
        if t > 0:
            back_rows_kernel[grid](
                lists.counts, lists.sums, lists.tables, lists.windows, rounds.p, rounds.done,
                walk.x, walk.x_far, walk.y, walk.y_far, width, t, TRANSPOSED=transposed, **TILES.of_rows(),
            )  # fmt: skip
