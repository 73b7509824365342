"""Sinkhorn-scaled NeuralSort for lists of up to 256 documents: the matrix lives in registers, never in memory.

For one list of n documents, scores sorted descending and divided by tau, gaps q_k = s_k - s_{k+1} >= 0 and the prefix sums
A_i = sum_{k < i} q_k, W_i = sum_{k < i} k q_k (float64), the logits relative to the diagonal are

    z_ij = -[ 2 (W_j - W_i) - (2 i - 1) (A_j - A_i) ],   i, j from 0,   K = softmax_j z

Gaps are cut at 128: what lies across such a gap is exp(-128) = 0 either way, so no score is too large for the sums.

Every Sinkhorn iterate is diag(p) K diag(q), p by rank and q by document. `_rounds` keeps K and runs all rounds, then walks
them back; it leaves the vectors of each round in memory (4 T + 1 per list). `_logits_gradient` makes dK from them, one
product of two thin matrices, block of rows by block of rows, K rebuilt on the way; `_scores_gradient` ends at the scores.

Plain scaling is q = 1 / (K' p), p = 1 / (K q); transposed is the other order. u, v are the names of `rankgrad.relaxation`: u
is p and v is q for the plain form, the other way round for the transposed.

Lists of more than 128 documents get two programs, each with half of the rows; the column sums are exchanged through memory
as 64-bit words that carry their own number, so that no flag and no fence is needed. A program takes its place from a
ticket: whoever waits, waits for a program that has started or will start next, whatever else runs on the chip.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.attach import Attach
from rankgrad.kernels.lists import RELEVANT, summarise

_LOG2_E = tl.constexpr(1.4426950408889634)
_WIDEST_GAP = tl.constexpr(128.0)
_SMALLEST_LOGIT = tl.constexpr(-64.0)


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
        _rounds[(lists * split,)](
            rounds.scores, rounds.counts, rounds.u, rounds.v, rounds.done, rounds.prefix, rounds.norm,
            *((walk.w, walk.x) if walk is not None else (nothing, nothing)),
            nothing if by_rank is None else by_rank, by_document,
            nothing if out is None else out, nothing if values is None else values, nothing if scale is None else scale,
            mail, length, iters, tau, tol, depth,
            N=width, SPLIT=split, RL=2 * warps, CL=16, TRANSPOSED=transposed, FORWARD=out is not None or values is not None,
            OUT=out is not None, STOPS=tol > 0, BACKWARD=walk is not None, DISCOUNTS=by_rank is None,
            num_warps=warps,
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
        _logits_gradient[(lists, triton.cdiv(length, block))](
            rounds.counts, rounds.u, rounds.v, rounds.done, rounds.prefix, rounds.norm, *walk,
            nothing if by_rank is None else by_rank, by_document, length, iters, depth,
            N=width, BI=block, BT=32, TRANSPOSED=transposed, DISCOUNTS=by_rank is None, PRECISION=_PRECISION,
            num_warps=8 if width > 64 else 4, num_stages=1,
        )  # fmt: skip
        _scores_gradient[(lists, triton.cdiv(length, min(32, width)))](
            rounds.scores, rounds.counts, walk.sums, out, nothing if order is None else order,
            nothing if scale is None else scale, length, tau,
            N=width, BI=block, BJ=min(32, width), ORDER=order is not None, num_warps=4,
        )  # fmt: skip


_WARPS = {128: 8, 256: 8}
_PRECISION = "tf32x3"


@triton.jit
def _weights(prefix, b, rows, cols, n, N: tl.constexpr):
    """exp(z) of some rows and columns of a list, 0 where it is below exp(-64) or beyond the real documents."""
    sums = prefix + b.to(tl.int64) * (2 * N + 2)
    a_i = tl.load(sums + rows)
    w_i = tl.load(sums + (N + 1) + rows)
    a_j = tl.load(sums + cols)
    w_j = tl.load(sums + (N + 1) + cols)
    odd = (2 * rows - 1).to(tl.float64)
    t = 2.0 * (w_j[None, :] - w_i[:, None]) - odd[:, None] * (a_j[None, :] - a_i[:, None])
    z = (t * -_LOG2_E).to(tl.float32)
    kept = (rows < n)[:, None] & (cols < n)[None, :] & (z > _SMALLEST_LOGIT * _LOG2_E)
    return tl.where(kept, tl.exp2(z), 0.0)


@triton.jit
def _by_rank(by_rank, base, rows, real, depth, DISCOUNTS: tl.constexpr):
    """The vector on the rank side: minus the discounts of NDCG@depth, or one that was given."""
    if DISCOUNTS:
        r = tl.where(real & (rows < depth), -1.0 / tl.log2(rows.to(tl.float32) + 2.0), 0.0)
    else:
        r = tl.load(by_rank + base + rows, mask=real, other=0.0)
    return r


@triton.jit
def _inverse(x, real):
    return tl.where(real, 1.0 / tl.where(real, x, 1.0), 0.0)


@triton.jit
def _tile(prefix, b, rows, cols, n, N: tl.constexpr):
    """`_weights` as [RI, CI, RL, CL]: see `_rounds`."""
    sums = prefix + b.to(tl.int64) * (2 * N + 2)
    a_i = tl.load(sums + rows)
    w_i = tl.load(sums + (N + 1) + rows)
    a_j = tl.load(sums + cols)
    w_j = tl.load(sums + (N + 1) + cols)
    odd = (2 * rows - 1).to(tl.float64)
    apart = a_j[None, :, None, :] - a_i[:, None, :, None]
    t = 2.0 * (w_j[None, :, None, :] - w_i[:, None, :, None]) - odd[:, None, :, None] * apart
    z = (t * -_LOG2_E).to(tl.float32)
    kept = (rows < n)[:, None, :, None] & (cols < n)[None, :, None, :] & (z > _SMALLEST_LOGIT * _LOG2_E)
    return tl.where(kept, tl.exp2(z), 0.0)


@triton.jit
def _down(K, p, N: tl.constexpr):
    """K' p, [RI, CI, RL, CL] and [RI, RL] -> [N]."""
    part = tl.permute(tl.sum(K * p[:, None, :, None], axis=0), (1, 0, 2))  # [RL, CI, CL]
    return tl.sum(tl.reshape(part, (part.shape[0], N)), axis=0)


@triton.jit
def _along(K, q):
    """K q, [RI, CI, RL, CL] and [N] -> [RI, RL]."""
    q = tl.reshape(q, (K.shape[1], K.shape[3]))
    return tl.sum(tl.sum(K * q[None, :, None, :], axis=1), axis=2)


@triton.jit
def _highest(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _await(address, number):
    """The word at each address, once it carries this number: every thread waits for its own, no barrier in the loop."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred waiting;
        .reg .b64 tag;
        again:
        ld.relaxed.gpu.global.b64 $0, [$1];
        shr.u64 tag, $0, 33;
        setp.ne.u64 waiting, tag, $2;
        @waiting bra again;
        }
        """,
        "=l,l,l",
        [address.to(tl.int64), number.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _total(part, flag, number, mail, b, half, cols, N: tl.constexpr, SPLIT: tl.constexpr, FLAG: tl.constexpr):
    """Both programs' column sums added, and whether both raised the flag. A word is (number, flag, float32)."""
    if SPLIT == 1:
        total = part
        agreed = flag
    else:
        slot = mail + (b.to(tl.int64) * 4 + (number % 2) * 2) * N
        tag = (number * 2 + flag).to(tl.int64)
        word = (tag << 32) | (part.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(slot + half * N + cols, word, cache_modifier=".cg")
        got = _await(slot + (1 - half) * N + cols, number)
        total = part + (got & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        if FLAG:
            agreed = flag & tl.max(((got >> 32) & 1).to(tl.int32), axis=0)
        else:
            agreed = flag
    return total, agreed


@triton.jit
def _rounds(
    scores, counts, u, v, done, prefix, norm, w, x, by_rank, by_document, out, values, scale, mail,
    L, iters, tau, tol, depth,
    N: tl.constexpr, SPLIT: tl.constexpr, RL: tl.constexpr, CL: tl.constexpr, TRANSPOSED: tl.constexpr, FORWARD: tl.constexpr, OUT: tl.constexpr, STOPS: tl.constexpr,
    BACKWARD: tl.constexpr, DISCOUNTS: tl.constexpr,
):  # fmt: skip
    # K is kept as [RI, CI, RL, CL], row i = RL ri + rl and column j = CL ci + cl. Triton spreads the last dimensions over lanes
    # and warps and keeps the first in each thread's registers: with CL = 16 and RL = 2 warps both K' p and K q are mostly
    # sums within a thread, one or four shuffles, and for K' p a few words of shared memory.
    M: tl.constexpr = N // SPLIT
    RI: tl.constexpr = M // RL
    CI: tl.constexpr = N // CL
    if SPLIT == 2:
        place = tl.atomic_add(mail + tl.num_programs(0).to(tl.int64) * 2 * N, 1).to(tl.int32)
    else:
        place = tl.program_id(0)
    b = place // SPLIT
    half = place % SPLIT
    base = b.to(tl.int64) * L
    rows = half * M + tl.arange(0, RI)[:, None] * RL + tl.arange(0, RL)[None, :]
    cols = tl.arange(0, N)
    grid = tl.arange(0, CI)[:, None] * CL + tl.arange(0, CL)[None, :]
    n = tl.load(counts + b)
    real_i = rows < n
    real_j = cols < n
    in_i = rows < L
    in_j = cols < L
    at_u = u + b.to(tl.int64) * (iters + 1) * L
    at_v = v + b.to(tl.int64) * iters * L

    if FORWARD:
        here = tl.load(scores + base + cols, mask=cols < n, other=0.0).to(tl.float64)
        after = tl.load(scores + base + cols + 1, mask=cols + 1 < n, other=0.0).to(tl.float64)
        gap = tl.where(cols + 1 < n, (here - after) / tau, 0.0)
        gap = tl.minimum(tl.maximum(gap, 0.0), _WIDEST_GAP)
        sums = prefix + b.to(tl.int64) * (2 * N + 2)
        tl.store(sums, 0.0)
        tl.store(sums + N + 1, 0.0)
        tl.store(sums + 1 + cols, tl.cumsum(gap, axis=0))
        tl.store(sums + N + 2 + cols, tl.cumsum(gap * cols.to(tl.float64), axis=0))
        tl.debug_barrier()
    K = _tile(prefix, b, rows, grid, n, N)
    inverse = _inverse(tl.sum(tl.sum(K, axis=1), axis=2), real_i)
    K = K * inverse[:, None, :, None]

    p = tl.where(real_i, 1.0, 0.0)
    q = tl.where(real_j, 1.0, 0.0)
    none = n * 0
    number = none + 1  # of the next exchange
    t = none
    if FORWARD:
        tl.store(norm + base + rows, inverse, mask=in_i)
        if TRANSPOSED:
            tl.store(at_u + cols, q, mask=in_j)
        else:
            tl.store(at_u + rows, p, mask=in_i)
        running = none + 1
        while (t < iters) & (running > 0):
            if TRANSPOSED:
                sums_i = _along(K, q)
                near = none
                if STOPS:
                    off = _highest(tl.where(real_i, tl.abs(p * sums_i - 1.0), 0.0))
                    near = ((t > 0) & (off < tol)).to(tl.int32)
                new_p = _inverse(sums_i, real_i)
                sums_j, enough = _total(_down(K, new_p, N), near, number, mail, b, half, cols, N, SPLIT, STOPS)
                running = 1 - enough
                p = tl.where(running > 0, new_p, p)
                q = tl.where(running > 0, _inverse(sums_j, real_j), q)
                tl.store(at_v + t * L + rows, p, mask=rows < L * running)
                tl.store(at_u + (t + 1) * L + cols, q, mask=cols < L * running)
            else:
                sums_j, _agreed = _total(_down(K, p, N), none, number, mail, b, half, cols, N, SPLIT, False)
                if STOPS:
                    off = tl.max(tl.where(real_j, tl.abs(q * sums_j - 1.0), 0.0), axis=0)
                    running = 1 - ((t > 0) & (off < tol)).to(tl.int32)
                q = tl.where(running > 0, _inverse(sums_j, real_j), q)
                p = tl.where(running > 0, _inverse(_along(K, q), real_i), p)
                tl.store(at_v + t * L + cols, q, mask=cols < L * running)
                tl.store(at_u + (t + 1) * L + rows, p, mask=rows < L * running)
            number += 1
            t += running
        tl.store(done + b, t)
        if OUT:
            if TRANSPOSED:
                r = _by_rank(by_rank, base, rows, real_i, depth, DISCOUNTS)
                sums_j, _agreed = _total(_down(K, p * r, N), none, number, mail, b, half, cols, N, SPLIT, False)
                number += 1
                tl.store(out + base + cols, q * sums_j, mask=in_j)
            else:
                d = tl.load(by_document + base + cols, mask=real_j, other=0.0)
                tl.store(out + base + rows, p * _along(K, q * d), mask=in_i)
    else:
        t = tl.load(done + b)
        if TRANSPOSED:
            q = tl.load(at_u + t * L + cols, mask=real_j, other=0.0)
            if t > 0:
                p = tl.load(at_v + (t - 1) * L + rows, mask=real_i, other=0.0)
        else:
            p = tl.load(at_u + t * L + rows, mask=real_i, other=0.0)
            if t > 0:
                q = tl.load(at_v + (t - 1) * L + cols, mask=real_j, other=0.0)

    if BACKWARD:
        tl.debug_barrier()  # this program's own stores of u and v, read back below
        r = _by_rank(by_rank, base, rows, real_i, depth, DISCOUNTS)
        d = tl.load(by_document + base + cols, mask=real_j, other=0.0)
        # the result is sum_ij r_i p_i K_ij q_j d_j: adjoints of log p and log q
        p_bar = r * p * _along(K, q * d)
        if FORWARD and not OUT:
            tl.store(values + b * 2 + half, tl.sum(tl.sum(p_bar, axis=1), axis=0) * tl.load(scale + b))
            if SPLIT == 1:
                tl.store(values + b * 2 + 1, 0.0)
        sums_j, _agreed = _total(_down(K, p * r, N), none, number, mail, b, half, cols, N, SPLIT, False)
        number += 1
        q_bar = d * q * sums_j
        at_w = w + b.to(tl.int64) * iters * L
        at_x = x + b.to(tl.int64) * iters * L
        while t > 0:
            t -= 1
            if TRANSPOSED:
                p = tl.load(at_v + t * L + rows, mask=real_i, other=0.0)
                before = tl.load(at_u + t * L + cols, mask=real_j, other=0.0)
                term = q * q_bar
                tl.store(at_w + t * L + cols, term, mask=in_j)
                p_bar = p * (p_bar - p * _along(K, term))
                tl.store(at_x + t * L + rows, p_bar, mask=in_i)
                sums_j, _agreed = _total(_down(K, p_bar, N), none, number, mail, b, half, cols, N, SPLIT, False)
                q_bar = -before * sums_j
                p_bar = p_bar * 0.0
                q = before
            else:
                q = tl.load(at_v + t * L + cols, mask=real_j, other=0.0)
                before = tl.load(at_u + t * L + rows, mask=real_i, other=0.0)
                term = p * p_bar
                tl.store(at_w + t * L + rows, term, mask=in_i)
                sums_j, _agreed = _total(_down(K, term, N), none, number, mail, b, half, cols, N, SPLIT, False)
                q_bar = q * (q_bar - q * sums_j)
                tl.store(at_x + t * L + cols, q_bar, mask=in_j)
                p_bar = -before * _along(K, q_bar)
                q_bar = q_bar * 0.0
                p = before
            number += 1


@triton.jit
def _logits_gradient(
    counts, u, v, done, prefix, norm, w, x, sums, by_rank, by_document, L, iters, depth,
    N: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, TRANSPOSED: tl.constexpr, DISCOUNTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Dz of a block of rows, summed over the rows: dK from the rounds' vectors, then back through the softmax."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    n = tl.load(counts + b)
    if block * BI < n:
        base = b.to(tl.int64) * L
        last = tl.load(done + b)
        place = tl.arange(0, BI)
        rows = block * BI + place
        cols = tl.arange(0, N)
        real_i = rows < n
        real_j = cols < n
        at_u = u + b.to(tl.int64) * (iters + 1) * L
        at_v = v + b.to(tl.int64) * iters * L
        at_w = w + b.to(tl.int64) * iters * L
        at_x = x + b.to(tl.int64) * iters * L
        terms = tl.zeros([BI, N], dtype=tl.float32)
        for begin in range(0, last, BT):
            t = begin + tl.arange(0, BT)
            at_i = t[:, None] * L + rows[None, :]
            at_j = t[:, None] * L + cols[None, :]
            use_i = (t < last)[:, None] & real_i[None, :]
            use_j = (t < last)[:, None] & real_j[None, :]
            if TRANSPOSED:
                left = tl.trans(tl.load(at_x + at_i, mask=use_i, other=0.0))
                right = tl.load(at_u + at_j, mask=use_j, other=0.0)
                terms = tl.dot(left, right, terms, input_precision=PRECISION)
                left = tl.trans(tl.load(at_v + at_i, mask=use_i, other=0.0))
                right = tl.load(at_w + at_j, mask=use_j, other=0.0)
                terms = tl.dot(left, right, terms, input_precision=PRECISION)
            else:
                left = tl.trans(tl.load(at_u + at_i, mask=use_i, other=0.0))
                right = tl.load(at_x + at_j, mask=use_j, other=0.0)
                terms = tl.dot(left, right, terms, input_precision=PRECISION)
                left = tl.trans(tl.load(at_w + at_i, mask=use_i, other=0.0))
                right = tl.load(at_v + at_j, mask=use_j, other=0.0)
                terms = tl.dot(left, right, terms, input_precision=PRECISION)
        if TRANSPOSED:
            q = tl.load(at_u + last * L + cols, mask=real_j, other=0.0)
            p = tl.load(at_v + (last - 1) * L + rows, mask=rows < tl.where(last > 0, n, 0), other=1.0)
        else:
            q = tl.load(at_v + (last - 1) * L + cols, mask=cols < tl.where(last > 0, n, 0), other=1.0)
            p = tl.load(at_u + last * L + rows, mask=real_i, other=0.0)
        d = tl.load(by_document + base + cols, mask=real_j, other=0.0)
        r = _by_rank(by_rank, base, rows, real_i, depth, DISCOUNTS)
        inverse = tl.load(norm + base + rows, mask=real_i, other=0.0)
        K = _weights(prefix, b, rows, cols, n, N) * inverse[:, None]
        grad = K * ((p * r)[:, None] * (q * d)[None, :] - terms)
        grad -= K * tl.sum(grad, axis=1)[:, None]
        to = sums + (b.to(tl.int64) * tl.num_programs(1) + block) * 2 * L + cols
        tl.store(to, tl.sum(grad, axis=0), mask=cols < L)
        away = (BI - 2 * place).to(tl.float32)  # r_i - r_middle
        tl.store(to + L, tl.sum(grad * away[:, None], axis=0), mask=cols < L)


@triton.jit
def _scores_gradient(
    scores, counts, sums, out, order, scale, L, tau,
    N: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """From dz to the scores: d z_ij / d s_j = (r_i - rho_j) / tau, and through b_j; rho_j = sum_k sign(s_j - s_k)."""
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    cols = tl.program_id(1) * BJ + tl.arange(0, BJ)
    k = tl.arange(0, N)
    n = tl.load(counts + b)
    real_j = cols < n
    s_k = tl.load(scores + base + k, mask=k < n, other=0.0)
    s_j = tl.load(scores + base + cols, mask=real_j, other=0.0)
    sign = (s_j[None, :] > s_k[:, None]).to(tl.float32) - (s_j[None, :] < s_k[:, None]).to(tl.float32)
    sign = tl.where((k < n)[:, None], sign, 0.0)
    rho = tl.sum(sign, axis=0)
    blocks = tl.cdiv(L, BI)
    by_column = tl.zeros([N], dtype=tl.float32)
    slope = tl.zeros([BJ], dtype=tl.float32)
    for block in range(tl.cdiv(n, BI)):
        at = sums + (b.to(tl.int64) * blocks + block) * 2 * L
        by_column += tl.load(at + k, mask=k < n, other=0.0)
        here = tl.load(at + cols, mask=real_j, other=0.0)
        middle = (n - 1 - 2 * block * BI - BI).to(tl.float32)
        slope += tl.load(at + L + cols, mask=real_j, other=0.0) + (middle - rho) * here
    slope -= tl.sum(sign * by_column[:, None], axis=0)
    grad = tl.where(real_j, slope / tau, 0.0)
    if ORDER:
        to = tl.load(order + base + cols, mask=cols < L, other=0)
        grad = tl.where(real_j, grad * tl.load(scale + b), 0.0)
        tl.store(out + base + to, grad, mask=cols < L)
    else:
        tl.store(out + base + cols, grad, mask=cols < L)
