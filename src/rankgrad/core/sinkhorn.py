"""The arithmetic of relaxed sorting: NeuralSort and Sinkhorn with hand-written backward passes.

Two ideas carry this module (both for one list of n documents, scores sorted descending).

*Nothing cancels.* NeuralSort's logits relative to the diagonal are z_ij = -T_ij / tau with T_ii = 0 and

    T_ij = sum_{j <= k < i} (s_j - s_k) + (s_j - s_{k+1})            below the diagonal (i > j)
    T_ij = 2 (j - i) (s_i - s_j) - T_ji                              above it

sums of non-negative float64 numbers, so softmax_j z is right in float32 for any scores and temperature, ties included.
(On the CPU, where the spread of the scores is small enough for float64 to absorb the cancelling, one product of thin
matrices gives the same numbers faster.)

*Sinkhorn keeps vectors.* Every iterate is diag(u) A diag(v). A round is v = 1 / (A^T u), u = 1 / (A v); the forward pass
saves (u, v) of each round, and the backward pass walks the rounds in reverse with two matrix-vector products each and
assembles the gradient of A from all rounds as one product of thin matrices.

Lists come flat, [B, L], real documents first; `counts` [B] says how many are real.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad.core.operators import differentiable_once, operator

# Entries of the n x n matrices worked on at once: small enough for a CPU's caches, large enough to feed a GPU.
_ENTRIES_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}

# Entries of such matrices kept for the backward pass on a CPU, 32 MiB a way at most: longer batches rebuild the rest.
_ENTRIES_KEPT = 2**23

_SMALLEST_LOGIT = {
    torch.float32: -64.0,
    torch.float64: -600.0,
}  # exp of it is far below half a unit in the last place


class Rounds(NamedTuple):
    """What Sinkhorn scaling remembers: the scaling vectors of each round, and which lists it still changed."""

    rows: Tensor  # u_0, ..., u_T, [T + 1, B, R]
    columns: Tensor  # v_1, ..., v_T, [T, B, C]
    active: Tensor  # [T, B] bool


def _once(backward: Callable[[Any, Tensor], tuple[Any, ...]]) -> Any:
    """A backward pass in full precision whose result refuses to be differentiated again, rather than being a constant."""

    @functools.wraps(backward)
    def guarded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            first, *rest = backward(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True
            first = differentiable_once(first, ctx.saved_tensors[0], grad)
        return first, *rest

    return guarded


class _ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x; P is rebuilt in the backward pass, kept only while that is cheap."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] scores (sorted), counts [B], values [B, L] -> [B, L]."""
        out = torch.zeros_like(values)
        ctx.chunks = list(chunks(counts, scores.shape[-1]))
        ctx.tau, ctx.transposed = tau, transposed
        kept: list[Tensor | None] = []
        room = _ENTRIES_KEPT if scores.device.type == "cpu" and ctx.needs_input_grad[0] else 0
        for lists, width in ctx.chunks:
            with torch.autocast(scores.device.type, enabled=False):
                matrix = _neural_sort(scores[lists, :width], counts[lists], tau)
                A, A_T = _both_ways(matrix, transposed)
                rounds = _scale(A, A_T, iters, tol, keep=ctx.needs_input_grad[0])
                scaled = (rounds.columns[-1] if iters else 1.0) * values[lists, :width]
                out[lists, :width] = rounds.rows[-1] * _times(scaled, A_T)
            room -= matrix.numel()
            kept += [*rounds, *((A, A_T) if room >= 0 else (None, None))]
        ctx.save_for_backward(scores, counts, values, *(kept if ctx.needs_input_grad[0] else ()))
        return out

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores; the values are constants."""
        scores, counts, values, *kept = ctx.saved_tensors
        out = torch.zeros_like(scores)
        for number, (lists, width) in enumerate(ctx.chunks):
            *vectors, A, A_T = kept[5 * number : 5 * number + 5]
            rounds = Rounds(*vectors)
            ordered, count, x, g = scores[lists, :width], counts[lists], values[lists, :width], grad[lists, :width]
            if A is None:
                A, A_T = _both_ways(_neural_sort(ordered, count, ctx.tau), ctx.transposed)
            u, v = rounds.rows[-1], rounds.columns[-1] if len(rounds.columns) else torch.ones_like(x)
            # the output is M x with M = diag(u) A diag(v): adjoints of log u and log v
            row_adjoint = g * u * _times(v * x, A_T)
            column_adjoint = x * v * _times(u * g, A)
            left, right = _scale_backward(A, A_T, rounds, row_adjoint, column_adjoint)
            left = torch.cat([left, (u * g)[None]]).transpose(0, 1)  # [B, 2 T + 1, R]
            right = torch.cat([right, (v * x)[None]]).transpose(0, 1)
            if ctx.transposed:
                left, right = right, left
            matrix_grad = torch.bmm(left.mT, right)
            out[lists, :width] = _scores_grad(A_T if ctx.transposed else A, matrix_grad, ordered, count, ctx.tau)
        return out, None, None, None, None, None, None


class _NeuralSortMatrix(torch.autograd.Function):
    """NeuralSort's matrix of sorted scores, [B, L] -> [B, L, L], columns in the sorted order."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, tau: float) -> Tensor:
        """[B, L] scores (sorted), counts [B] -> [B, L, L]."""
        with torch.autocast(scores.device.type, enabled=False):
            matrix = _neural_sort(scores, counts, tau)
        ctx.save_for_backward(scores, counts, matrix)
        ctx.tau = tau
        return matrix

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores."""
        scores, counts, matrix = ctx.saved_tensors
        return _scores_grad(matrix, grad, scores, counts, ctx.tau), None, None


class _ScaledMatrix(torch.autograd.Function):
    """Sinkhorn scaling of any non-negative matrices, [B, R, C] -> [B, R, C]."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, iters: int, tol: float) -> Tensor:
        """Scale columns, then rows, `iters` times; each matrix of the batch stops by itself."""
        with torch.autocast(matrix.device.type, enabled=False):
            rounds = _scale(matrix, matrix.mT.contiguous(), iters, tol, keep=ctx.needs_input_grad[0])
        ctx.save_for_backward(matrix, *rounds)
        return rounds.rows[-1][:, :, None] * matrix * rounds.columns[-1][:, None, :]

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d matrix."""
        matrix, *saved = ctx.saved_tensors
        rounds = Rounds(*saved)
        factor = rounds.rows[-1][:, :, None] * grad * rounds.columns[-1][:, None, :]
        weighted = factor * matrix
        left, right = _scale_backward(matrix, matrix.mT.contiguous(), rounds, weighted.sum(-1), weighted.sum(-2))
        return factor + torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1)), None, None


class _ConvergedMatrix(torch.autograd.Function):
    """Sinkhorn scaling run to its limit, [B, R, R] -> [B, R, R]; the gradient is that of the limit.

    The limit M = diag(u) A diag(v) does not depend on where the scaling began, so nothing of the rounds is kept: with
    W = M * dM the adjoints x, y of the potentials solve x + M y = W 1 and y + M^T x = W^T 1, by as many rounds as M took at
    most, and dA = diag(u) (dM - x 1^T - 1 y^T) diag(v).
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, iters: int, tol: float) -> Tensor:
        """Scale until every sum is within `tol` of one, `iters` rounds at most."""
        with torch.autocast(matrix.device.type, enabled=False):
            rounds = _scale(matrix, matrix.mT.contiguous(), iters, tol, keep=False)
        u, v = rounds.rows[-1], rounds.columns[-1]
        plan = u[:, :, None] * matrix * v[:, None, :]
        ctx.save_for_backward(matrix, u, v, plan)
        ctx.iters, ctx.tol = iters, tol
        return plan

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d matrix."""
        _, u, v, plan = ctx.saved_tensors
        plan_T = plan.mT.contiguous()
        weighted = plan * grad
        rows, columns = weighted.sum(-1), weighted.sum(-2)
        x, y = rows, torch.zeros_like(columns)
        enough = ctx.tol * torch.maximum(rows.abs().amax(), columns.abs().amax())
        for done in range(ctx.iters):
            y = columns - _times(x, plan)
            before, x = x, rows - _times(y, plan_T)
            if done % 16 == 15 and bool(
                (x - before).abs().amax() <= enough
            ):  # reading a tensor stalls a device: only now and then
                break
        return u[:, :, None] * (grad - x[:, :, None] - y[:, None, :]) * v[:, None, :], None, None


SCALED_SORT_PARAMETERS = "Tensor scores, Tensor counts, Tensor values, float tau, int iters, float tol, bool transposed"
scaled_sort = operator(
    "scaled_sort", SCALED_SORT_PARAMETERS, lambda _: _ScaledSort, lambda scores, *_: torch.empty_like(scores)
)
neural_sort_matrix = operator(
    "neural_sort_matrix",
    "Tensor scores, Tensor counts, float tau",
    lambda _: _NeuralSortMatrix,
    lambda scores, *_: scores.new_empty(*scores.shape, scores.shape[-1]),
)
scaled_matrix = operator(
    "scaled_matrix", "Tensor matrix, int iters, float tol", lambda _: _ScaledMatrix, lambda x, *_: torch.empty_like(x)
)
converged_matrix = operator(
    "converged_matrix",
    "Tensor matrix, int iters, float tol",
    lambda _: _ConvergedMatrix,
    lambda x, *_: torch.empty_like(x),
)


def chunks(counts: Tensor, length: int) -> Iterator[tuple[Tensor | slice, int]]:
    """Lists to work on together, and the width they need.

    On the CPU lists of similar length go together and are cut to their longest; elsewhere lengths are not known to the
    host, and asking for them would stall the device.
    """
    entries = _ENTRIES_AT_ONCE.get(counts.device.type, 2**25)
    if counts.device.type != "cpu":
        size = max(1, entries // max(1, length * length))
        yield from ((slice(start, start + size), length) for start in range(0, len(counts), size))
        return
    by_length = counts.argsort(stable=True)
    lengths = counts[by_length].tolist()
    end = len(lengths)
    while end > 0 and lengths[end - 1] > 0:
        width = lengths[end - 1]
        size = max(1, entries // (width * width))
        start = max(0, end - size)
        yield by_length[start:end], width
        end = start


def _neural_sort(scores: Tensor, counts: Tensor, tau: float) -> Tensor:
    """Softmax over j of -T_ij / tau, zero beyond the real documents, [B, L] -> [B, L, L]; see the module's docstring."""
    length = scores.shape[-1]
    if length == 0:
        return scores.new_zeros(len(scores), 0, 0)
    position = torch.arange(length, device=scores.device)
    real = position < counts[:, None]  # [B, L]
    s = scores.double() / tau
    s = torch.where(real, s, s.gather(-1, (counts[:, None] - 1).clamp_(min=0)))  # descending to the end: T stays >= 0
    if _is_small(s, scores.dtype):
        logits = _separable_logits(s).to(scores.dtype)
    else:
        logits = _exact_logits(s).to(scores.dtype)
    # Weights that would be subnormal, or drag products with them there, make CPUs crawl: they are exact zeros instead.
    weights = torch.threshold_(logits, _SMALLEST_LOGIT[scores.dtype], -torch.inf).exp_()
    if scores.device.type != "cpu" or not bool(real.all()):
        weights.mul_(real[:, None, :]).mul_(real[:, :, None])
    return weights.div_(weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).tiny))


def _exact_logits(s: Tensor) -> Tensor:
    """-T_ij of descending scores (divided by tau) from sums of non-negative terms, [B, L] -> [B, L, L] float64."""
    position = torch.arange(s.shape[-1], device=s.device)
    ahead = s[:, None, :] - s[:, :, None]  # s_j - s_i
    steps = (ahead[:, :-1] + ahead[:, 1:]).tril_()  # (s_j - s_k) + (s_j - s_{k+1}), rows k >= j
    below = torch.zeros_like(ahead)  # T below the diagonal
    torch.cumsum(steps, -2, out=below[:, 1:])
    apart = (2 * (position[:, None] - position)).clamp_(max=0).to(s.dtype)  # 2 (i - j) above the diagonal
    return ahead.mul_(apart).sub_(below.mT).add_(below).neg_()


def _is_small(s: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding in `_separable_logits` stays far below float32's; False on other devices, which reading the answer would stall."""
    if s.device.type != "cpu" or dtype != torch.float32 or not len(s):
        return False
    return bool(((s[:, 0] - s[:, -1]).amax() * s.shape[-1]) < 1e6)  # times 2^-52: logits right to 1e-9


def _separable_logits(s: Tensor) -> Tensor:
    """The same as one product of thin matrices: -T_ij = B_i - A_j - 2 i s_j with A, B from prefix sums; fast, but it cancels."""
    s = s - s[:, :1]
    rank = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    prefix = s.cumsum(-1)
    ones = torch.ones_like(s)
    left = torch.stack([2 * prefix - s, -ones, (-2 * rank).expand_as(s)], -1)
    right = torch.stack([ones, 2 * prefix - (2 * rank + 1) * s, s], -2)
    return torch.bmm(left, right)


def _scores_grad(matrix: Tensor, grad: Tensor, scores: Tensor, counts: Tensor, tau: float) -> Tensor:
    """From d/d NeuralSort to d/d sorted scores, [B, L, L] -> [B, L].

    d z_ij / d s_j = (r_i - rho_j) / tau with rho_j = sum_k sign(s_j - s_k), which is small where the matrix is large, and
    the rest goes through b_j: - (1 / tau) sum_k sign(s_j - s_k) (sum_i dz_ik). Equal scores have sign 0. The first is taken
    as (r_i - r_j) + (r_j - rho_j): one is the same for all lists, the other is 0 but for equal scores.
    """
    logit_grad = matrix * grad
    logit_grad -= matrix * logit_grad.sum(-1, keepdim=True)
    position = torch.arange(scores.shape[-1], device=scores.device)
    real = position < counts[:, None]
    ascending = torch.where(real, -scores.double(), torch.inf)
    better = torch.searchsorted(ascending, ascending)  # how many documents have a larger score
    not_worse = torch.searchsorted(ascending, ascending, right=True)
    ties = (better + not_worse - 1 - 2 * position).to(scores.dtype)  # r_j - rho_j
    by_column = logit_grad.sum(-2)
    prefix = torch.nn.functional.pad(by_column.cumsum(-1, dtype=torch.float64), (1, 0))
    signs = (prefix[:, -1:] - prefix.gather(-1, not_worse)) - prefix.gather(-1, better)
    away = (2 * (position - position[:, None])).to(scores.dtype)  # r_i - r_j
    direct = logit_grad.mul_(away).sum(-2).double() + ties * by_column
    return torch.where(real, (direct - signs) / tau, 0.0).to(scores.dtype)


def _both_ways(matrix: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """A and its transpose, both contiguous: products with row vectors are several times faster on a CPU."""
    flipped = matrix.mT.contiguous()
    return (flipped, matrix) if transposed else (matrix, flipped)


def _times(vector: Tensor, matrix: Tensor) -> Tensor:
    """Row vectors times matrices, [B, R] and [B, R, C] -> [B, C]."""
    return torch.bmm(vector[:, None, :], matrix)[:, 0]


def _scale(A: Tensor, A_T: Tensor, iters: int, tol: float, *, keep: bool) -> Rounds:
    """Sinkhorn's scaling vectors; a list whose sums are all within `tol` of one after a full round is left as it is.

    Without `keep` only the last round's vectors come back: all that a value needs.
    """
    u = A.new_ones(A.shape[:2])
    rows: list[Tensor] = [u]
    columns: list[Tensor] = []
    active: list[Tensor] = []
    running = torch.ones(len(A), dtype=torch.bool, device=A.device)
    all_running = True  # known on the CPU alone; elsewhere `running` is applied to every list, on the device
    empty_columns = _infinite_where_zero(_times(u, A))
    v = torch.ones_like(empty_columns)
    empty_rows = _infinite_where_zero(_times(v, A_T))
    for done in range(iters):
        sums = _times(u, A)  # column sums of diag(u) A
        if done and tol > 0:
            # after a round rows sum to one; columns are off by what this product shows
            off = torch.where(empty_columns == 0, (v * sums).sub_(1).abs_(), 0.0).amax(-1)
            running = running & ~(off < tol)
            if A.device.type != "cpu":
                all_running = False
            elif not bool(running.all()):
                all_running = False
                if not bool(running.any()):
                    break
        # 1 / (x + infinity) = 0: an all-zero row or column stays zero
        new_v = (sums + empty_columns).reciprocal_()
        v = new_v if all_running else torch.where(running[:, None], new_v, v)
        new_u = _times(v, A_T).add_(empty_rows).reciprocal_()
        u = new_u if all_running else torch.where(running[:, None], new_u, u)
        if not keep:
            rows, columns, active = [], [], []
        rows.append(u)
        columns.append(v)
        active.append(running)
    if not columns:
        return Rounds(u[None], A.new_zeros(0, *A_T.shape[:2]), running.new_zeros(0, len(A)))
    return Rounds(torch.stack(rows), torch.stack(columns), torch.stack(active))


def _scale_backward(
    A: Tensor, A_T: Tensor, rounds: Rounds, row_adjoint: Tensor, column_adjoint: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of A through all rounds as thin factors: dA = sum_t left_t right_t^T, [2 T, B, R] and [2 T, B, C].

    The adjoints are those of log u_T and log v_T. Row step t: dA -= w v_t^T with w = u_t abar, cbar -= v_t (A^T w). Column
    step t: dA -= u_{t-1} x^T with x = v_t cbar, abar = -u_{t-1} (A x).
    """
    row_terms, column_terms = [], []
    all_running = A.device.type == "cpu" and bool(
        rounds.active.all()
    )  # the usual case; reading it would stall another device
    nothing = torch.zeros_like(column_adjoint)
    for t in range(len(rounds.columns) - 1, -1, -1):
        running = None if all_running else rounds.active[t][:, None]
        u, v, before = rounds.rows[t + 1], rounds.columns[t], rounds.rows[t]
        w = _where(running, u * row_adjoint, 0.0)
        column_adjoint = column_adjoint - v * _times(w, A)
        x = _where(running, v * column_adjoint, 0.0)
        row_adjoint = _where(running, -before * _times(x, A_T), row_adjoint)
        column_adjoint = _where(running, nothing, column_adjoint)
        row_terms.append(w)
        column_terms.append(x)
    if not row_terms:
        return rounds.rows[:0], rounds.columns[:0]
    left = torch.cat([torch.stack(row_terms[::-1]), rounds.rows[:-1]]).neg_()
    right = torch.cat([rounds.columns, torch.stack(column_terms[::-1])])
    return left, right


def _where(condition: Tensor | None, value: Tensor, otherwise: Tensor | float) -> Tensor:
    """torch.where; None is true everywhere."""
    return value if condition is None else torch.where(condition, value, otherwise)


def _infinite_where_zero(sums: Tensor) -> Tensor:
    return torch.zeros_like(sums).masked_fill_(sums == 0, torch.inf)
