"""The kernel that assembles d/d scores from the vectors of the rounds, and the loss: see `rankgrad.kernels.neural_ndcg.short.launch`."""

import triton
import triton.language as tl

from rankgrad.kernels.neural_ndcg.short.rounds import rank_side, weights
from rankgrad.kernels.neural_ndcg.short.workspace import (
    BLOCKS_DONE,
    COUNT,
    GRAD_SCALE,
    ROUNDS,
    VALUE,
    WEIGHT,
    exchange_of,
    gain_of,
    integers,
    order_of,
    prefix_of,
    record_of,
    vectors_of,
)


@triton.jit
def gradient_kernel(
    work, by_rank, by_document, gradient, loss, L, iters, tau, depth,
    N: tl.constexpr, BI: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr,
    TRANSPOSED: tl.constexpr, NDCG: tl.constexpr, REDUCTION: tl.constexpr,
):  # fmt: skip
    """Dz of a block of rows, summed over the rows; the last program of a list to finish continues to the scores.

    A counter tells which one that is. Sums are added in the order of blocks, values in the order of lists, whichever it is.
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    record = record_of(work, b, L, iters, N)
    n = tl.load(integers(record) + COUNT)
    blocks = tl.maximum(tl.cdiv(n, BI), 1)
    if block < blocks:
        base = b.to(tl.int64) * L
        cols = tl.arange(0, N)
        column = tl.zeros([TILE, N], dtype=tl.float32)
        moment = tl.zeros([TILE, N], dtype=tl.float32)
        for first in range(block * BI, tl.minimum(block * BI + BI, n), TILE):
            rows = first + tl.arange(0, TILE)
            grad = _logits_gradient(
                record, by_rank + base, by_document + base, rows, cols, n, L, iters, depth, N, BT, TRANSPOSED, NDCG
            )
            column += grad
            away = (2 * block * BI + BI - 2 * rows).to(tl.float32)  # r_i - r_middle
            moment += grad * away[:, None]
        to = exchange_of(record, N) + block * 2 * L + cols
        tl.store(to, tl.sum(column, axis=0), mask=cols < L)
        tl.store(to + L, tl.sum(moment, axis=0), mask=cols < L)
        tl.debug_barrier()  # this program's sums are written before its block is counted as done
        if tl.atomic_add(integers(record) + BLOCKS_DONE, 1) == blocks - 1:
            scale = tau * 0.0 + 1.0
            if NDCG:
                scale = tl.load(record + GRAD_SCALE)
                if REDUCTION == "mean":
                    scale = scale / _total_weight(work, tl.num_programs(0), L, iters, N)
            _to_scores(record, gradient + b.to(tl.int64) * L, n, blocks, scale, L, tau, N, BI)
            if NDCG:
                if REDUCTION == "none":
                    tl.store(loss + b, tl.load(record + VALUE) + tl.load(record + VALUE + 1))
                else:
                    if tl.atomic_add(integers(work) + 1, 1) == tl.num_programs(0) - 1:
                        _reduce(work, loss, tl.num_programs(0), L, iters, N, REDUCTION)


@triton.jit
def _logits_gradient(
    record, by_rank, by_document, rows, cols, n, L, iters, depth,
    N: tl.constexpr, BT: tl.constexpr, TRANSPOSED: tl.constexpr, NDCG: tl.constexpr,
):  # fmt: skip
    """Dz of some rows: dK from the rounds' vectors, then back through the softmax."""
    u, v, w, x = vectors_of(record, L, iters, N)
    last = tl.load(integers(record) + ROUNDS)
    real_i = rows < n
    real_j = cols < n
    terms = tl.zeros([rows.shape[0], N], dtype=tl.float32)
    for begin in range(0, last, BT):
        t = begin + tl.arange(0, BT)
        at_i = t[:, None] * L + rows[None, :]
        at_j = t[:, None] * L + cols[None, :]
        use_i = (t < last)[:, None] & (rows < L)[None, :]  # beyond the list, up to L, the vectors hold zeros
        use_j = (t < last)[:, None] & (cols < L)[None, :]
        start = (t == 0)[:, None]  # u_0 is one
        if TRANSPOSED:
            left = tl.trans(tl.load(x + at_i, mask=use_i, other=0.0))
            right = tl.load(u - L + at_j, mask=use_j & (start == 0), other=0.0)
            terms = _product(left, tl.where(start, 1.0, right), terms)
            left = tl.trans(tl.load(v + at_i, mask=use_i, other=0.0))
            right = tl.load(w + at_j, mask=use_j, other=0.0)
            terms = _product(left, right, terms)
        else:
            left = tl.load(u - L + at_i, mask=use_i & (start == 0), other=0.0)
            right = tl.load(x + at_j, mask=use_j, other=0.0)
            terms = _product(tl.trans(tl.where(start, 1.0, left)), right, terms)
            left = tl.trans(tl.load(w + at_i, mask=use_i, other=0.0))
            right = tl.load(v + at_j, mask=use_j, other=0.0)
            terms = _product(left, right, terms)
    reached = tl.where(last > 0, n, 0)  # without a round p and q are one
    at = (last - 1) * L
    if TRANSPOSED:
        q = tl.load(u + at + cols, mask=cols < reached, other=1.0)
        p = tl.load(v + at + rows, mask=rows < reached, other=1.0)
    else:
        q = tl.load(v + at + cols, mask=cols < reached, other=1.0)
        p = tl.load(u + at + rows, mask=rows < reached, other=1.0)
    if NDCG:
        d = tl.load(gain_of(record, L, N) + cols, mask=real_j, other=0.0)
    else:
        d = tl.load(by_document + cols, mask=real_j, other=0.0)
    r = rank_side(by_rank, rows, real_i, depth, NDCG)
    K = weights(prefix_of(record), rows, cols, n, N)
    grad = K * ((p * r)[:, None] * (q * d)[None, :] - terms)
    inverse = tl.where(real_i, 1.0 / tl.maximum(tl.sum(K, axis=1), 1e-30), 0.0)
    return inverse[:, None] * (grad - K * (inverse * tl.sum(grad, axis=1))[:, None])


@triton.jit
def _product(a, b, total):
    """Total + a b in float32 from three products on tensor cores, which read 19 bits of a number.

    Triton's "tf32x3" does the same with care for infinities, of which there are none record, at twice the instructions.
    """
    a_first, b_first = _first(a), _first(b)
    total = tl.dot(a - a_first, b_first, total, input_precision="tf32")
    total = tl.dot(a_first, b - b_first, total, input_precision="tf32")
    return tl.dot(a_first, b_first, total, input_precision="tf32")


@triton.jit
def _first(x):
    """The number rounded to 19 bits."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _to_scores(record, gradient, n, blocks, scale, L, tau, N: tl.constexpr, BI: tl.constexpr):
    """From dz to the scores: d z_ij / d s_j = (r_i - rho_j) / tau, and through b_j; rho_j = sum_k sign(s_j - s_k)."""
    cols = tl.arange(0, N)
    real = cols < n
    word = tl.load(order_of(record, L, N) + cols, mask=cols < L, other=0)
    first = (word >> 8) & 255
    last = (word >> 16) & 255
    rho = (n - 1 - last - first).to(tl.float32)  # lower scores less higher ones
    sums = exchange_of(record, N)
    column = tl.zeros([N], dtype=tl.float32)
    slope = tl.zeros([N], dtype=tl.float32)
    for block in range(blocks):
        at = sums + block * 2 * L + cols
        part = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
        middle = (n - 1 - 2 * block * BI - BI).to(tl.float32)
        slope += tl.load(at + L, mask=real, other=0.0, cache_modifier=".cg") + (middle - rho) * part
        column += part
    tl.debug_barrier()  # the sums are read, their memory can be used again
    until = sums.to(tl.pointer_type(tl.float64), bitcast=True)
    tl.store(until, 0.0)
    tl.store(until + 1 + cols, tl.cumsum(column.to(tl.float64), axis=0), mask=real)
    tl.debug_barrier()
    higher = tl.load(until + first, mask=real, other=0.0)
    lower = tl.load(until + n) - tl.load(until + last + 1, mask=real, other=0.0)
    slope -= (lower - higher).to(tl.float32)  # sum_k sign(s_j - s_k) of the column sums
    slope = tl.where(real, slope / tau * scale, 0.0)
    tl.store(gradient + (word & 255), slope, mask=cols < L)


@triton.jit
def _total_weight(work, lists, L, iters, N: tl.constexpr):
    """How many lists count in the mean, one at least."""
    total = tl.zeros([128], dtype=tl.float32)
    for start in range(0, lists, 128):
        b = start + tl.arange(0, 128)
        total += tl.load(record_of(work, b, L, iters, N) + WEIGHT, mask=b < lists, other=0.0)
    return tl.maximum(tl.sum(total, axis=0), 1.0)


@triton.jit
def _reduce(work, loss, lists, L, iters, N: tl.constexpr, REDUCTION: tl.constexpr):
    """The loss from the values of all lists."""
    total = tl.zeros([128], dtype=tl.float32)
    for start in range(0, lists, 128):
        b = start + tl.arange(0, 128)
        value = record_of(work, b, L, iters, N) + VALUE
        total += tl.load(value, mask=b < lists, other=0.0) + tl.load(value + 1, mask=b < lists, other=0.0)
    result = tl.sum(total, axis=0)
    if REDUCTION == "mean":
        result = result / _total_weight(work, lists, L, iters, N)
    tl.store(loss, result)
