"""Sinkhorn-scaled NeuralSort for lists of any length, tile by tile: a few vectors per round and no matrix.

With E_ij = exp(z_ij) as in `rankgrad.kernels.neural_ndcg.short.launch`, NeuralSort is diag(p_0) E with p_0 = 1 / (E 1): the softmax is a row
step like any other, and every iterate is diag(p) E diag(q). In order,

    p_0 = 1 / (E 1);   q_t = 1 / (E' p_{t-1}),   p_t = 1 / (E q_t),   t = 1, ..., T

The plain form ends with (p_T, q_T). The transposed form begins with a row step, which is p_0 again, and ends with (p_{T-1}, q_T).

*Windows.* Along a row or a column z falls on both sides of the diagonal, so the entries above exp(-64) are an interval, found by
bisection: about 16 / sqrt(gap) wide for scores `gap` apart. Only these are visited. Equal scores have no window: all n^2.

*One launch per half-round*, one program per block of rows or columns; a stopped list's programs return at once. Forward saves
p_t, q_t (float64) and the moments R_t = sum_i (r_i - rho_j) p_{t-1,i} E_ij, 3 T + 2 vectors in all; the backward pass is

    x = p_t abar (row step t):     cbar = -q_t (E' x),       sbar -= q_t sum_i (r_i - rho_j) x_i E_ij
    y = q_t cbar (column step t):  abar = -p_{t-1} (E y),    sbar -= y R_t

and ends with cbar of the start, the column sums of dz, which reach the scores through b: `windows.finish`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rankgrad.kernels.neural_ndcg.long.rounds import columns_kernel, products_kernel, rows_kernel
from rankgrad.kernels.neural_ndcg.long.windows import Sorted, find_windows, finish, sort_lists

FIRST_HALF, SECOND_HALF, RESULT, END, BACK = range(5)  # what a launch does: see `rounds.rows_kernel`


class Tiles(NamedTuple):
    """How a program's entries are laid out: see `entries`. Blocks must be whole chunks, of columns and of rows."""

    R: int = 16
    G: int = 4
    LANES: int = 16
    RUN: int = 16

    @property
    def block(self) -> int:
        return 4 * self.LANES

    def of_rows(self) -> dict[str, Any]:
        return {
            "R": self.R, "M": 4, "G": self.G, "LANES": self.LANES, "num_warps": max(1, self.G * self.LANES // 32),
            "enable_fp_fusion": True,
        }  # fmt: skip

    def of_columns(self) -> dict[str, Any]:
        return self.of_rows() | {"RUN": self.RUN}


TILES = Tiles()


class Rounds(NamedTuple):
    """What scaling left behind."""

    p: Tensor  # [T + 1, B, N] float64, row scalings
    q: Tensor  # [T + 1, B, N] float64, column scalings
    moment: Tensor  # [T + 1, B, N] float32
    done: Tensor  # [B] int32, rounds until the list stopped


class Vectors(NamedTuple):
    """What goes from launch to launch: a vector by row and one by column, each also as the far side of a block."""

    x: Tensor  # [B, N] float64
    x_far: Tensor  # [2, B, N] float32
    y: Tensor  # [B, N] float64
    y_far: Tensor  # [2, B, N] float32

    @classmethod
    def empty(cls, lists: Sorted) -> "Vectors":
        x, y = lists.sums.new_empty(2, *lists.shape).unbind()
        x_far, y_far = lists.tables.new_empty(2, 2, *lists.shape).unbind()
        return cls(x, x_far, y, y_far)


class ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x: the twin of `rankgrad.core.sinkhorn.scaled_sort`."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] float32 scores (sorted), counts [B], values [B, L] -> [B, L]."""
        length = scores.shape[-1]
        with torch.cuda.device_of(scores):
            lists = find_windows(scores.contiguous(), counts.to(torch.int32), tau, TILES)
            rounds = scale(lists, iters, tol, transposed)
            values = torch.nn.functional.pad(values.double(), (0, lists.shape[-1] - length))
            out = result(lists, rounds, values, transposed)
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
        given = torch.nn.functional.pad(grad.double(), (0, values.shape[-1] - grad.shape[-1]))
        by_rank, by_document = (values, given) if transposed else (given, values)
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(grad):
            slope, by_column, _ = backward_pass(lists, rounds, by_rank, by_document, lists.real, transposed)
            finish(lists, slope, by_column, None, None, out, tau)
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
    length = scores.shape[-1]
    with torch.cuda.device_of(scores):
        ndcg = sort_lists(
            scores.reshape(-1, length),
            labels.reshape(-1, length),
            None if mask is None else mask.reshape(-1, length),
            gain=gain.reshape(-1, length) if isinstance(gain, Tensor) else gain,
            k=k,
            width=triton.cdiv(length, TILES.block) * TILES.block,
        )
        value_scale, grad_scale, weight = ndcg.scales
        lists = find_windows(ndcg.ordered, ndcg.counts, tau, TILES)
        rounds = scale(lists, iters, tol, transposed)
        slope, by_column, values = backward_pass(lists, rounds, ndcg.discount, ndcg.gain, value_scale, transposed)
        loss = values.sum(-1).view(scores.shape[:-1]) if reduction == "none" else values.sum()
        if reduction == "mean":
            total = weight.sum().clamp_(min=1)
            loss, grad_scale = loss / total, grad_scale / total
        gradient = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        finish(lists, slope, by_column, ndcg.order, grad_scale, gradient.view(-1, length), tau)
    return loss, gradient


def scale(lists: Sorted, iters: int, tol: float, transposed: bool) -> Rounds:
    """All rounds, each list until its sums are close enough to one."""
    count, width = lists.shape
    p, q = lists.sums.new_empty(2, iters + 1, count, width).unbind()
    rounds = Rounds(p, q, lists.tables.new_empty(iters + 1, count, width), torch.zeros_like(lists.counts))
    worst = lists.tables.new_zeros(iters + 1, count)
    vectors = Vectors.empty(lists)
    q[0] = lists.real
    vectors.y.copy_(lists.real)
    torch.mul(lists.tables[4:6], lists.real, out=vectors.y_far)
    if not transposed or iters == 0:
        _rows(lists, rounds, vectors, FIRST_HALF, transposed)
    for t in range(1, iters + 1):
        if transposed:
            _rows(lists, rounds, vectors, FIRST_HALF, transposed, t=t, to=t - 1, tol=tol, worst=worst)
            _columns(lists, rounds, vectors, SECOND_HALF, transposed, t=t, tol=tol, worst=worst)
        else:
            _columns(lists, rounds, vectors, FIRST_HALF, transposed, t=t, tol=tol, worst=worst)
            _rows(lists, rounds, vectors, SECOND_HALF, transposed, t=t, to=t, tol=tol, worst=worst)
    return rounds


def result(lists: Sorted, rounds: Rounds, values: Tensor, transposed: bool) -> Tensor:
    """scale(P) values, or scale(P^T) values."""
    vectors = _products(lists, rounds, values, values, transposed)
    out = lists.tables.new_zeros(values.shape)
    if transposed:
        _columns(lists, rounds, vectors, RESULT, transposed, out=out)
    else:
        _rows(lists, rounds, vectors, RESULT, transposed, out=out)
    return out


def backward_pass(
    lists: Sorted, rounds: Rounds, by_rank: Tensor, by_document: Tensor, value_scale: Tensor, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoints of sum_ij by_rank_i M_ij by_document_j, from the last round to the start.

    Comes back: sum_i (r_i - rho_j) dz_ij, the column sums of dz, and the sum itself in parts, times `value_scale`.
    """
    products = _products(lists, rounds, by_rank, by_document, transposed)
    vectors = Vectors.empty(lists)
    slope = torch.empty_like(vectors.y)
    values = lists.tables.new_zeros(lists.windows.shape[1:3])
    vectors_of_rows = vectors._replace(y=products.y, y_far=products.y_far)
    vectors_of_columns = vectors._replace(x=products.x, x_far=products.x_far)
    _rows(lists, rounds, vectors_of_rows, END, transposed, by_rank=by_rank, values=values, value_scale=value_scale)
    _columns(lists, rounds, vectors_of_columns, END, transposed, by_document=by_document, slope=slope)
    iters = len(rounds.p) - 1
    for t in range(iters, -1, -1):
        if t < iters or not transposed or iters == 0:
            _columns(lists, rounds, vectors, BACK, transposed, t=t, slope=slope)
        if t > 0:
            _rows(lists, rounds, vectors, BACK, transposed, t=t)
    return slope, vectors.y, values


def _products(lists: Sorted, rounds: Rounds, by_rank: Tensor, by_document: Tensor, transposed: bool) -> Vectors:
    products = Vectors.empty(lists)
    products_kernel[lists.windows.shape[1:3]](
        lists.counts, lists.tables, rounds.p, rounds.q, rounds.done, by_rank, by_document, *products, lists.shape[-1],
        int(transposed), BLOCK=TILES.block, enable_fp_fusion=True,
    )  # fmt: skip
    return products


def _rows(
    lists: Sorted,
    rounds: Rounds,
    vectors: Vectors,
    phase: int,
    transposed: bool,
    *,
    t: int = 0,
    to: int = 0,
    tol: float = 0.0,
    worst: Tensor | None = None,
    by_rank: Tensor | None = None,
    out: Tensor | None = None,
    values: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Launch `rows_kernel`; what a phase does not use may be left out."""
    nothing = lists.real
    rows_kernel[lists.windows.shape[1:3]](
        lists.counts, lists.sums, lists.tables, lists.windows, rounds.done, nothing if worst is None else worst, rounds.p,
        vectors.y, vectors.y_far, vectors.x, vectors.x_far, rounds.p if by_rank is None else by_rank,
        nothing if out is None else out, nothing if values is None else values,
        nothing if value_scale is None else value_scale, lists.shape[-1], tol, t, to, phase, int(transposed),
        **TILES.of_rows(),
    )  # fmt: skip


def _columns(
    lists: Sorted,
    rounds: Rounds,
    vectors: Vectors,
    phase: int,
    transposed: bool,
    *,
    t: int = 0,
    tol: float = 0.0,
    worst: Tensor | None = None,
    by_document: Tensor | None = None,
    out: Tensor | None = None,
    slope: Tensor | None = None,
) -> None:
    """Launch `columns_kernel`; what a phase does not use may be left out."""
    nothing = lists.real
    columns_kernel[lists.windows.shape[1:3]](
        lists.counts, lists.sums, lists.tables, lists.windows, lists.ties, rounds.done, nothing if worst is None else worst,
        rounds.q, rounds.moment, vectors.x, vectors.x_far, vectors.y, vectors.y_far,
        rounds.p if by_document is None else by_document, nothing if out is None else out,
        vectors.y if slope is None else slope, lists.shape[-1], tol, t, phase, int(transposed), **TILES.of_columns(),
    )  # fmt: skip
