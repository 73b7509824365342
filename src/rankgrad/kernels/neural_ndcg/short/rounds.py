"""The kernel that keeps a list's matrix in registers through all rounds of Sinkhorn: see `rankgrad.kernels.neural_ndcg.short.launch`."""

import triton
import triton.language as tl

from rankgrad.kernels.neural_ndcg.short.workspace import (
    COUNT,
    ROUNDS,
    VALUE,
    VALUE_SCALE,
    exchange_of,
    gain_of,
    integers,
    prefix_of,
    record_of,
    vectors_of,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_LOGIT = tl.constexpr(-64.0)


@triton.jit
def weights(prefix, rows, cols, n, N: tl.constexpr):
    """exp(z) of some rows [R] and columns [C], or [RI, RL] and [CI, CL] for [RI, CI, RL, CL]; 0 where it is below exp(-64)."""
    a_i = _over(tl.load(prefix + rows))
    w_i = _over(tl.load(prefix + (N + 1) + rows))
    a_j = _beside(tl.load(prefix + cols))
    w_j = _beside(tl.load(prefix + (N + 1) + cols))
    t = 2.0 * (w_j - w_i) - _over((2 * rows - 1).to(tl.float64)) * (a_j - a_i)
    z = (t * -_LOG2_E).to(tl.float32)
    kept = _over(rows < n) & _beside(cols < n) & (z > _SMALLEST_LOGIT * _LOG2_E)
    return tl.where(kept, tl.exp2(z), 0.0)


@triton.jit
def _over(by_row):
    """[R] -> [R, 1], [RI, RL] -> [RI, 1, RL, 1]."""
    if len(by_row.shape) == 1:
        wide = by_row[:, None]
    else:
        wide = by_row[:, None, :, None]
    return wide


@triton.jit
def _beside(by_column):
    """[C] -> [1, C], [CI, CL] -> [1, CI, 1, CL]."""
    if len(by_column.shape) == 1:
        wide = by_column[None, :]
    else:
        wide = by_column[None, :, None, :]
    return wide


@triton.jit
def rank_side(by_rank, rows, real, depth, NDCG: tl.constexpr):
    """The vector on the rank side: minus the discounts of NDCG@depth, or one that was given."""
    if NDCG:
        r = tl.where(real & (rows < depth), -1.0 / tl.log2(rows.to(tl.float32) + 2.0), 0.0)
    else:
        r = tl.load(by_rank + rows, mask=real, other=0.0)
    return r


@triton.jit
def _inverse(x, real, FAST: tl.constexpr):
    """1 / x, 0 beyond the list: what is stored of a vector is finite everywhere."""
    x = tl.where(real, x, 1.0)
    if FAST:  # one instruction, right to one unit in the last place
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return tl.where(real, y, 0.0)


@triton.jit
def _down(K, p, N: tl.constexpr):
    """K' p, [RI, CI, RL, CL] and [2 M] -> [N]."""
    part = tl.permute(tl.sum(K * _spread(p, K)[:, None, :, :], axis=0), (1, 0, 2))  # [RL, CI, CL]
    return tl.sum(tl.reshape(part, (part.shape[0], N)), axis=0)


@triton.jit
def _spread(p, K):
    """A vector of rows, each twice, [2 M] -> [RI, RL, CL]."""
    p = tl.reshape(p, (K.shape[0], K.shape[2], 1, 2))
    p = tl.broadcast_to(p, (K.shape[0], K.shape[2], K.shape[3] // 2, 2))
    return tl.reshape(p, (K.shape[0], K.shape[2], K.shape[3]))


@triton.jit
def _along(K, q):
    """K q, [RI, CI, RL, CL] and [N] -> [2 M], each row twice."""
    q = tl.reshape(q, (K.shape[1], K.shape[3]))
    return _gather(tl.sum(K * _beside(q), axis=1))


@triton.jit
def _gather(part):
    """[RI, RL, CL] summed over the last -> [2 RI RL]: two neighbouring threads add eight sums of a row each."""
    M: tl.constexpr = part.shape[0] * part.shape[1]
    EACH: tl.constexpr = part.shape[2] // 2
    part = tl.permute(tl.reshape(part, (part.shape[0], part.shape[1], EACH, 2)), (2, 0, 1, 3))
    two = tl.reshape(tl.sum(tl.reshape(part, (EACH, 2 * M)), axis=0), (M, 2))
    return tl.reshape(tl.broadcast_to(tl.sum(two, axis=1, keep_dims=True), (M, 2)), (2 * M,))


@triton.jit
def _await(address, number):
    """The word at each address, once it carries this number. Every thread waits for its own word, without a barrier in the loop."""
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
def _total(part, flag, number, exchange, half, cols, L, SPLIT: tl.constexpr, FLAG: tl.constexpr):
    """Both programs' column sums added, and whether both raised the flag. A word is (number, flag, float32)."""
    total = part
    agreed = flag
    if SPLIT == 2:
        slot = exchange + (number % 2) * 2 * L
        word = ((number * 2 + flag).to(tl.int64) << 32) | (part.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(slot + half * L + cols, word, mask=cols < L, cache_modifier=".cg")
        there = tl.minimum(cols, L - 1)  # beyond the list every thread waits for the last word
        got = _await(slot + (1 - half) * L + there, number)
        total += (got & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        if FLAG:
            agreed = flag & tl.max(((got >> 32) & 1).to(tl.int32), axis=0)
    return total, agreed


@triton.jit
def rounds_kernel(
    work, by_rank, by_document, out, L, iters, tol, depth,
    N: tl.constexpr, SPLIT: tl.constexpr, RL: tl.constexpr, CL: tl.constexpr, TRANSPOSED: tl.constexpr,
    STOPS: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr, NDCG: tl.constexpr,
):  # fmt: skip
    """All rounds of a list, or of half of its rows, and their backward pass.

    K is kept as [RI, CI, RL, CL], row i = RL ri + rl and column j = CL ci + cl. Triton spreads the last dimensions over lanes
    and warps and keeps the first ones in each thread's registers: with CL = 16 and RL = 2 warps both K' p and K q are mostly
    sums within a thread, then one trip through shared memory each, without bank conflicts and without shuffles. A vector of
    columns has one entry a thread then, a vector of rows one entry in each of two neighbouring threads.
    """
    FAST: tl.constexpr = SPLIT == 2
    M: tl.constexpr = N // SPLIT
    RI: tl.constexpr = M // RL
    CI: tl.constexpr = N // CL
    if SPLIT == 2:
        place = tl.atomic_add(integers(work), 1)
    else:
        place = tl.program_id(0)
    b = place // SPLIT
    half = place % SPLIT
    base = b.to(tl.int64) * L
    record = record_of(work, b, L, iters, N)
    exchange = exchange_of(record, N).to(tl.pointer_type(tl.int64), bitcast=True)
    u, v, w, x = vectors_of(record, L, iters, N)
    rows = half * M + tl.arange(0, 2 * M) // 2
    grid = tl.arange(0, CI)[:, None] * CL + tl.arange(0, CL)[None, :]
    cols = tl.arange(0, N)
    n = tl.load(integers(record) + COUNT)
    real_i = rows < n
    real_j = cols < n
    in_i = rows < L
    in_j = cols < L

    K = weights(prefix_of(record), half * M + tl.arange(0, RI)[:, None] * RL + tl.arange(0, RL)[None, :], grid, n, N)
    K = K * _spread(_inverse(_gather(tl.sum(K, axis=1)), real_i, FAST), K)[:, None, :, :]
    p = tl.where(real_i, 1.0, 0.0)
    q = tl.where(real_j, 1.0, 0.0)
    none = n * 0
    number = none + 1  # of the next exchange
    t = none  # rounds done
    if FORWARD:
        running = none + 1
        while (t < iters) & (running > 0):
            if TRANSPOSED:
                sums_i = _along(K, q)
                near = none
                if STOPS:
                    off = tl.max(tl.where(real_i, tl.abs(p * sums_i - 1.0), 0.0), axis=0)
                    near = ((t > 0) & (off < tol)).to(tl.int32)
                new_p = _inverse(sums_i, real_i, FAST)
                sums_j, enough = _total(_down(K, new_p, N), near, number, exchange, half, cols, L, SPLIT, STOPS)
                new_q = _inverse(sums_j, real_j, FAST)
                if STOPS:
                    running = 1 - enough
                    new_p = tl.where(running > 0, new_p, p)
                    new_q = tl.where(running > 0, new_q, q)
                p = new_p
                q = new_q
                tl.store(v + t * L + rows, p, mask=rows < L * running)
                tl.store(u + t * L + cols, q, mask=cols < L * running)
            else:
                sums_j, _agreed = _total(_down(K, p, N), none, number, exchange, half, cols, L, SPLIT, False)
                new_q = _inverse(sums_j, real_j, FAST)
                if STOPS:
                    off = tl.max(tl.where(real_j, tl.abs(q * sums_j - 1.0), 0.0), axis=0)
                    running = 1 - ((t > 0) & (off < tol)).to(tl.int32)
                    new_q = tl.where(running > 0, new_q, q)
                new_p = _inverse(_along(K, new_q), real_i, FAST)
                if STOPS:
                    new_p = tl.where(running > 0, new_p, p)
                p = new_p
                q = new_q
                tl.store(v + t * L + cols, q, mask=cols < L * running)
                tl.store(u + t * L + rows, p, mask=rows < L * running)
            number += 1
            t += running
        tl.store(integers(record) + ROUNDS, t)
        if not BACKWARD:
            if TRANSPOSED:
                r = rank_side(by_rank + base, rows, real_i, depth, NDCG)
                sums_j, _agreed = _total(_down(K, p * r, N), none, number, exchange, half, cols, L, SPLIT, False)
                tl.store(out + base + cols, q * sums_j, mask=in_j)
            else:
                d = tl.load(by_document + base + cols, mask=real_j, other=0.0)
                tl.store(out + base + rows, p * _along(K, q * d), mask=in_i)
    else:
        t = tl.load(integers(record) + ROUNDS)
        if t > 0:
            if TRANSPOSED:
                q = tl.load(u + (t - 1) * L + cols, mask=real_j, other=0.0)
                p = tl.load(v + (t - 1) * L + rows, mask=real_i, other=0.0)
            else:
                q = tl.load(v + (t - 1) * L + cols, mask=real_j, other=0.0)
                p = tl.load(u + (t - 1) * L + rows, mask=real_i, other=0.0)

    if BACKWARD:
        tl.debug_barrier()  # this program's own stores of u and v, read back below
        r = rank_side(by_rank + base, rows, real_i, depth, NDCG)
        if NDCG:
            d = tl.load(gain_of(record, L, N) + cols, mask=real_j, other=0.0)
        else:
            d = tl.load(by_document + base + cols, mask=real_j, other=0.0)
        # the result is sum_ij r_i p_i K_ij q_j d_j: adjoints of log p and log q
        p_bar = r * p * _along(K, q * d)
        if NDCG:
            tl.store(record + VALUE + half, tl.sum(p_bar, axis=0) * 0.5 * tl.load(record + VALUE_SCALE))
            if SPLIT == 1:
                tl.store(record + VALUE + 1, 0.0)
        sums_j, _agreed = _total(_down(K, p * r, N), none, number, exchange, half, cols, L, SPLIT, False)
        number += 1
        q_bar = d * q * sums_j
        while t > 0:
            t -= 1
            at = t * L
            earlier = tl.where(t > 0, n, 0)  # u_0 is one
            if TRANSPOSED:
                p = tl.load(v + at + rows, mask=real_i, other=0.0)
                before = tl.load(u + at - L + cols, mask=cols < earlier, other=1.0)
                term = q * q_bar
                tl.store(w + at + cols, term, mask=in_j)
                p_bar = p * (p_bar - p * _along(K, term))
                tl.store(x + at + rows, p_bar, mask=in_i)
                sums_j, _agreed = _total(_down(K, p_bar, N), none, number, exchange, half, cols, L, SPLIT, False)
                q_bar = -before * sums_j
                p_bar = p_bar * 0.0
                q = before
            else:
                q = tl.load(v + at + cols, mask=real_j, other=0.0)
                before = tl.load(u + at - L + rows, mask=rows < earlier, other=1.0)
                term = p * p_bar
                tl.store(w + at + rows, term, mask=in_i)
                sums_j, _agreed = _total(_down(K, term, N), none, number, exchange, half, cols, L, SPLIT, False)
                q_bar = q * (q_bar - q * sums_j)
                tl.store(x + at + cols, q_bar, mask=in_j)
                p_bar = -before * _along(K, q_bar)
                q_bar = q_bar * 0.0
                p = before
            number += 1
