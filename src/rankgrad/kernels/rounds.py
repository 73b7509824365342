"""The kernel that keeps a list's matrix in registers through all rounds of Sinkhorn: see `rankgrad.kernels.scaled_sort`."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_WIDEST_GAP = tl.constexpr(128.0)
_SMALLEST_LOGIT = tl.constexpr(-64.0)


@triton.jit
def weights(prefix, b, rows, cols, n, N: tl.constexpr):
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
def rank_side(by_rank, base, rows, real, depth, DISCOUNTS: tl.constexpr):
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
    """`weights` as [RI, CI, RL, CL]: see `rounds_kernel`."""
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
def rounds_kernel(
    scores, counts, u, v, done, prefix, norm, w, x, by_rank, by_document, out, values, scale, mail,
    L, iters, tau, tol, depth,
    N: tl.constexpr, SPLIT: tl.constexpr, RL: tl.constexpr, CL: tl.constexpr, TRANSPOSED: tl.constexpr,
    FORWARD: tl.constexpr, OUT: tl.constexpr, STOPS: tl.constexpr,
    BACKWARD: tl.constexpr, DISCOUNTS: tl.constexpr,
):  # fmt: skip
    """All rounds of a list, or of half of its rows, and the walk back.

    K is kept as [RI, CI, RL, CL], row i = RL ri + rl and column j = CL ci + cl. Triton spreads the last dimensions over lanes
    and warps and keeps the first ones in each thread's registers: with CL = 16 and RL = 2 warps both K' p and K q are mostly
    sums within a thread, then four shuffles (K q) or one trip through shared memory without bank conflicts (K' p).
    """
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
                r = rank_side(by_rank, base, rows, real_i, depth, DISCOUNTS)
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
        r = rank_side(by_rank, base, rows, real_i, depth, DISCOUNTS)
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
