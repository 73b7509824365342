"""The kernels of Sinkhorn's half-rounds for lists of any length: see `rankgrad.kernels.neural_ndcg.long.launch`.

One kernel for all launches over rows and one for those over columns: what differs is little beside the product with E, and each
kernel takes seconds to compile.
"""

import triton
import triton.language as tl

from rankgrad.kernels.neural_ndcg.long.entries import COLUMN, ROW, along, down

# what a launch does: see `rows_kernel`
FIRST_HALF, SECOND_HALF, RESULT, END, BACK = (tl.constexpr(phase) for phase in range(5))


@triton.jit
def _store(x, x_far, table, value, own, b, lists, N):
    """A vector in float64, and in float32 as the far side of blocks before it and of blocks after it."""
    at = b.to(tl.int64) * N + own
    size = lists.to(tl.int64) * N
    tl.store(x + at, value)
    tl.store(x_far + at, value.to(tl.float32) * tl.load(table + at))
    tl.store(x_far + size + at, value.to(tl.float32) * tl.load(table + size + at))


@triton.jit
def _inverse(x, real):
    return tl.where(real, 1.0 / tl.where(real, x, 1.0), 0.0)


@triton.jit
def _takes_part(done, worst, t, lists, b, tol, phase, transposed, rows):
    """Whether a list still scales in round t, or did so and takes part in the backward pass through it.

    Forward: it ended the round before; the second half also asks whether that round had left the sums close enough to one.
    Back: rows undo q_t, columns undo p_t, and the transposed form has no p of its last round.
    """
    rounds = tl.load(done + b)
    part = rounds >= 0
    if phase <= SECOND_HALF:
        part = (t <= 1) | (rounds >= t - 1)
        if (phase == SECOND_HALF) & (t > 1) & (tol > 0):
            part = part & (tl.load(worst + (t - 1) * lists + b) >= tol)
    if phase == BACK:
        part = t <= tl.where((transposed > 0) & (rows == 0), tl.maximum(rounds - 1, 0), rounds)
    return part


@triton.jit
def _last(done, b, lists, N, transposed):
    """The rounds of a list, and where the p and q are that they left."""
    rounds = tl.load(done + b)
    rows = tl.where(transposed > 0, tl.maximum(rounds - 1, 0), rounds)
    return rounds, (rows.to(tl.int64) * lists + b) * N, (rounds.to(tl.int64) * lists + b) * N


@triton.jit
def products_kernel(
    counts, tables, p, q, done, by_rank, by_document, x, x_far, y, y_far, N, transposed, BLOCK: tl.constexpr
):
    """Store x = p r and y = q d, with the p and q of the last round."""
    b = tl.program_id(0)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lists = tl.num_programs(0)
    size = lists.to(tl.int64) * N
    if tl.program_id(1) * BLOCK < tl.load(counts + b):
        _rounds, at_p, at_q = _last(done, b, lists, N, transposed)
        at = b.to(tl.int64) * N + own
        _store(x, x_far, tables + size * ROW, tl.load(p + at_p + own) * tl.load(by_rank + at), own, b, lists, N)
        _store(y, y_far, tables + size * COLUMN, tl.load(q + at_q + own) * tl.load(by_document + at), own, b, lists, N)


@triton.jit(do_not_specialize=["t", "to", "phase", "transposed"])
def rows_kernel(
    counts, sums, tables, windows, done, worst, p, y, y_far, x, x_far, by_rank, out, values, scale, N, tol, t, to, phase,
    transposed, R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """E y by rows.

    FIRST_HALF, SECOND_HALF   y = q_to comes in, x = p_to = 1 / (E q_to) goes out; the second half ends round t
    RESULT                    y = q d comes in, out = scale(P) d
    END                       y = q d comes in, the values of NDCG and x = p times the adjoint of log p go out
    BACK                      through the column step q_t: y = q_t times its adjoint comes in, x goes out for p_{t-1}
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if _takes_part(done, worst, t, lists, b, tol, phase, transposed, 1) & (block * M * LANES < n):
        size = lists.to(tl.int64) * N
        base = b.to(tl.int64) * N
        own = block * M * LANES + tl.arange(0, M * LANES)
        real = own < n
        total = along(sums, tables, windows, y, y_far, lists, b, block, tl.num_programs(1), N, R, M, G, LANES)
        if phase <= SECOND_HALF:
            at = to * size + base
            if (phase == FIRST_HALF) & (t > 1) & (tol > 0):
                off = tl.where(real, tl.abs(tl.load(p + at - size + own) * total - 1.0), 0.0)
                tl.atomic_max(worst + (t - 1) * lists + b, tl.max(off, axis=0).to(tl.float32))
            tl.store(done + b, t, mask=tl.where(phase == SECOND_HALF, block, 1) == 0)
            new = _inverse(total, real)
            tl.store(p + at + own, new)
            _store(x, x_far, tables + size * ROW, new, own, b, lists, N)
        else:
            rounds, at_p, _at_q = _last(done, b, lists, N, transposed)
            if phase == BACK:
                p_i = tl.load(p + (t - 1) * size + base + own)
                carried = own < tl.where((transposed > 0) & (t == rounds), n, 0)
                p_bar = tl.load(x + base + own, mask=carried, other=0.0) - p_i * total
                _store(x, x_far, tables + size * ROW, p_i * p_bar, own, b, lists, N)
            else:
                p_i = tl.load(p + at_p + own)
                if phase == RESULT:
                    tl.store(out + base + own, (p_i * total).to(tl.float32))
                else:
                    p_bar = tl.load(by_rank + base + own) * p_i * total
                    value = tl.sum(p_bar, axis=0).to(tl.float32) * tl.load(scale + b)
                    tl.store(values + b * tl.num_programs(1) + block, value)
                    # in the transposed form the last columns come first, unless nothing was scaled: they carry the adjoint itself
                    p_bar = tl.where((transposed > 0) & (rounds > 0), p_bar, p_bar * p_i)
                    _store(x, x_far, tables + size * ROW, p_bar, own, b, lists, N)


@triton.jit(do_not_specialize=["t", "phase", "transposed"])
def columns_kernel(
    counts, sums, tables, windows, ties, done, worst, q, moment, x, x_far, y, y_far, by_document, out, slope, N, tol, t, phase,
    transposed, R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """E' x by columns.

    FIRST_HALF, SECOND_HALF   x = p_{t-1} comes in, y = q_t = 1 / (E' p_{t-1}) goes out; sum_i (r_i - rho_j) E_ij p_i is kept
    RESULT                    x = p r comes in, out = scale(P^T) r
    END                       x = p r comes in, the adjoint of log q and the first part of the gradient go out
    BACK                      through the row step p_t: x = p_t times its adjoint comes in, y goes out for q_t
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if _takes_part(done, worst, t, lists, b, tol, phase, transposed, 0) & (block * M * LANES < n):
        size = lists.to(tl.int64) * N
        base = b.to(tl.int64) * N
        own = block * M * LANES + tl.arange(0, M * LANES)
        real = own < n
        total, moments = down(
            sums, windows, ties, x, x_far, lists, b, block, tl.num_programs(1), N, R, M, G, LANES, RUN
        )
        if phase <= SECOND_HALF:
            at = t * size + base
            if (phase == FIRST_HALF) & (t > 1) & (tol > 0):
                off = tl.where(real, tl.abs(tl.load(q + at - size + own) * total - 1.0), 0.0)
                tl.atomic_max(worst + (t - 1) * lists + b, tl.max(off, axis=0).to(tl.float32))
            tl.store(done + b, t, mask=tl.where(phase == SECOND_HALF, block, 1) == 0)
            new = _inverse(total, real)
            tl.store(q + at + own, new)
            tl.store(moment + at + own, tl.where(real, moments, 0.0).to(tl.float32))
            _store(y, y_far, tables + size * COLUMN, new, own, b, lists, N)
        else:
            rounds, _at_p, at_q = _last(done, b, lists, N, transposed)
            if phase == BACK:
                at = t * size + base + own
                q_j = tl.load(q + at)
                carried = own < tl.where((t == rounds) & ((transposed == 0) | (rounds == 0)), n, 0)
                q_bar = tl.load(y + base + own, mask=carried, other=0.0) - q_j * total
                new = q_j * q_bar
                gradient = tl.load(slope + base + own) - q_j * moments
                gradient -= new * tl.load(moment + at, mask=own < tl.where(t > 0, n, 0), other=0.0)
                tl.store(slope + base + own, gradient)
                _store(y, y_far, tables + size * COLUMN, new, own, b, lists, N)
            else:
                q_j = tl.load(q + at_q + own)
                if phase == RESULT:
                    tl.store(out + base + own, (q_j * total).to(tl.float32))
                else:
                    d_q = tl.load(by_document + base + own) * q_j
                    scaled = own < tl.where((transposed > 0) & (rounds > 0), n, 0)  # then the last columns come first
                    q_bar = tl.where(scaled, d_q * total * q_j, d_q * total)
                    gradient = d_q * moments - q_bar * tl.load(moment + at_q + own, mask=scaled, other=0.0)
                    tl.store(slope + base + own, gradient)
                    _store(y, y_far, tables + size * COLUMN, q_bar, own, b, lists, N)
