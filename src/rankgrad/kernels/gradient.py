"""The kernels that assemble d/d scores from the vectors of the rounds: see `rankgrad.kernels.scaled_sort`."""

import triton
import triton.language as tl

from rankgrad.kernels.rounds import rank_side, weights


@triton.jit
def logits_gradient_kernel(
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
        r = rank_side(by_rank, base, rows, real_i, depth, DISCOUNTS)
        inverse = tl.load(norm + base + rows, mask=real_i, other=0.0)
        K = weights(prefix, b, rows, cols, n, N) * inverse[:, None]
        grad = K * ((p * r)[:, None] * (q * d)[None, :] - terms)
        grad -= K * tl.sum(grad, axis=1)[:, None]
        to = sums + (b.to(tl.int64) * tl.num_programs(1) + block) * 2 * L + cols
        tl.store(to, tl.sum(grad, axis=0), mask=cols < L)
        away = (BI - 2 * place).to(tl.float32)  # r_i - r_middle
        tl.store(to + L, tl.sum(grad * away[:, None], axis=0), mask=cols < L)


@triton.jit
def scores_gradient_kernel(
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
