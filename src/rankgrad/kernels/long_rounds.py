"""The kernels of Sinkhorn's half-rounds for lists of any length: see `rankgrad.kernels.long_sort`.

E is never stored: a program owns a block of rows or columns, walks over the window that the block sees, chunk by chunk, and
makes each entry anew. Entries lie as [R, M, G, LANES]: own document o * LANES + lane, other document r * G + g. Triton spreads the
last dimensions over lanes and warps (G of them) and keeps the first ones in each thread's registers, so that a thread sums
for its own documents by itself until the end, and loads each number of the other side once for M entries.

*Exact* logits come from float64 prefix sums, entry by entry, and products are summed in float64. *Fast* logits are float32:
relative to the middle m of the chunk, with d_j = A_j - A_m and e_j = W_j - W_m - m d_j,

    z_ij = z_im + (2 (i - m) - 1) d_j - 2 e_j                              a row against a chunk of columns
    z_ij = z_mj + [2 e_i - (2 (i - m) - 1) d_i] + 2 (i - m) (A_j - A_m)    a column against a chunk of rows

small numbers where scores lie close, which is where windows are wide. Each block of documents knows which form it may use.
"""

import triton
import triton.language as tl


@triton.jit
def _own(block, M: tl.constexpr, LANES: tl.constexpr):
    return (block * M + tl.arange(0, M)[:, None]) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _along(
    a, w, near_a, near_w, window, x, x_32, times, own,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """sum_j E_ij x_j of the rows `own`, [M, LANES] float64; with TIMES of x_j times_j."""
    a_i = tl.load(a + own)
    w_i = tl.load(w + own)
    odd = (2 * own - 1).to(tl.float64)
    place = tl.arange(0, R)[:, None] * G + tl.arange(0, G)[None, :]
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    begin = tl.load(window)
    end = tl.load(window + 1)
    if tl.load(window + 2) > 0:
        for start in range(begin, end, R * G):
            j = start + place
            middle = start + R * G // 2
            d_j = tl.load(near_a + j)
            e_j = tl.load(near_w + j)
            if TIMES:
                x_j = (tl.load(x + j) * tl.load(times + j)).to(tl.float32)
            else:
                x_j = tl.load(x_32 + j)
            z_im = (2.0 * (w_i - tl.load(w + middle)) + odd * (tl.load(a + middle) - a_i)).to(tl.float32)
            slope = (2 * (own - middle) - 1).to(tl.float32)
            z = (z_im[None, :, None, :] - e_j[:, None, :, None]) + slope[None, :, None, :] * d_j[:, None, :, None]
            sums += tl.sum(tl.exp2(z) * x_j[:, None, :, None], axis=0).to(tl.float64)
    else:
        start_i = 2.0 * w_i - odd * a_i
        for start in range(begin, end, R * G):
            j = start + place
            a_j = tl.load(a + j)
            twice_w = 2.0 * tl.load(w + j)
            x_j = tl.load(x + j)
            if TIMES:
                x_j = x_j * tl.load(times + j)
            z = odd[None, :, None, :] * a_j[:, None, :, None] + (start_i[None, :, None, :] - twice_w[:, None, :, None])
            sums += tl.sum(tl.exp2(z.to(tl.float32)).to(tl.float64) * x_j[:, None, :, None], axis=0)
    return tl.sum(sums, axis=1)


@triton.jit
def _down(
    a, w, near_row, window, x, x_32, times, tie_sum, own,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of the columns `own`, and sum_i (r_i - rho_j) E_ij x_i, [M, LANES] float64.

    r_i - rho_j = first_j + last_j - 2 i, with the first and the last document that have j's score.
    """
    a_j = tl.load(a + own)
    w_j = tl.load(w + own)
    place = tl.arange(0, R)[:, None] * G + tl.arange(0, G)[None, :]
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    moments = tl.zeros([M, G, LANES], dtype=tl.float64)
    begin = tl.load(window)
    end = tl.load(window + 1)
    if tl.load(window + 2) > 0:
        away = (2 * (place - R * G // 2)).to(tl.float32)
        for start in range(begin, end, R * G):
            i = start + place
            middle = start + R * G // 2
            e_i = tl.load(near_row + i)
            if TIMES:
                x_i = (tl.load(x + i) * tl.load(times + i)).to(tl.float32)
            else:
                x_i = tl.load(x_32 + i)
            d_j = a_j - tl.load(a + middle)
            odd = (2 * middle - 1).to(tl.float64)
            z_mj = (odd * d_j - 2.0 * (w_j - tl.load(w + middle))).to(tl.float32)
            z = (z_mj[None, :, None, :] + e_i[:, None, :, None]) + d_j.to(tl.float32)[None, :, None, :] * away[
                :, None, :, None
            ]
            terms = tl.exp2(z) * x_i[:, None, :, None]
            sums += tl.sum(terms, axis=0).to(tl.float64)
            if MOMENT:
                apart = (tie_sum - 2 * middle).to(tl.float32)[None, :, None, :] - away[:, None, :, None]
                moments += tl.sum(terms * apart, axis=0).to(tl.float64)
    else:
        for start in range(begin, end, R * G):
            i = start + place
            odd = (2 * i - 1).to(tl.float64)
            start_i = 2.0 * tl.load(w + i) - odd * tl.load(a + i)
            x_i = tl.load(x + i)
            if TIMES:
                x_i = x_i * tl.load(times + i)
            z = odd[:, None, :, None] * a_j[None, :, None, :] + (
                start_i[:, None, :, None] - 2.0 * w_j[None, :, None, :]
            )
            terms = tl.exp2(z.to(tl.float32)).to(tl.float64) * x_i[:, None, :, None]
            sums += tl.sum(terms, axis=0)
            if MOMENT:
                apart = (tie_sum[None, :, None, :] - 2 * i[:, None, :, None]).to(tl.float64)
                moments += tl.sum(terms * apart, axis=0)
    return tl.sum(sums, axis=1), tl.sum(moments, axis=1)


@triton.jit
def _inverse(x, real):
    return tl.where(real, 1.0 / tl.where(real, x, 1.0), 0.0)


@triton.jit
def _judge(worst, t, lists, b, scaled, real):
    """Remember how far the sums that the last round left behind are from one."""
    off = tl.where(real, tl.abs(scaled - 1.0), 0.0)
    tl.atomic_max(worst + t * lists + b, tl.max(tl.max(off, axis=1), axis=0).to(tl.float32))


@triton.jit(do_not_specialize=["t", "to"])
def rows_kernel(
    counts, a, w, near_a, near_w, windows, p, q, p_32, q_32, done, worst, N, tol, t, to,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, JUDGES: tl.constexpr, ENDS: tl.constexpr,
    STOPS: tl.constexpr,
):  # fmt: skip
    """p_to = 1 / (E q_to), a half of round t; the second half of a round ends it."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    running = t <= 1
    if t > 1:
        running = tl.load(done + b) >= t - 1
        if STOPS and ENDS:
            running = running & (tl.load(worst + (t - 1) * lists + b) >= tol)
    if running & (block * M * LANES < n):
        base = b.to(tl.int64) * N
        own = _own(block, M, LANES)
        real = own < n
        window = windows + (b * tl.num_programs(1) + block) * 3
        at_q = q + (to.to(tl.int64) * lists + b) * N
        sums = _along(
            a + base, w + base, near_a + base, near_w + base, window, at_q, q_32 + base, at_q, own,
            R, M, G, LANES, False,
        )  # fmt: skip
        if STOPS and JUDGES:
            before = tl.load(p + ((to - 1).to(tl.int64) * lists + b) * N + own)
            _judge(worst, t - 1, lists, b, before * sums, real)
        new = _inverse(sums, real)
        tl.store(p + (to.to(tl.int64) * lists + b) * N + own, new)
        tl.store(p_32 + base + own, new.to(tl.float32))
        if ENDS:
            tl.store(done + b, t, mask=block == 0)


@triton.jit(do_not_specialize=["t", "to"])
def columns_kernel(
    counts, a, w, near_row, windows, first, last, p, q, moment, p_32, q_32, done, worst, N, tol, t, to,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, JUDGES: tl.constexpr, ENDS: tl.constexpr,
    STOPS: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """q_to = 1 / (E' p_{to-1}), the other half; keeps sum_i (r_i - rho_j) E_ij p_i for the way back."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    running = t <= 1
    if t > 1:
        running = tl.load(done + b) >= t - 1
        if STOPS and ENDS:
            running = running & (tl.load(worst + (t - 1) * lists + b) >= tol)
    if running & (block * M * LANES < n):
        base = b.to(tl.int64) * N
        own = _own(block, M, LANES)
        real = own < n
        window = windows + (b * tl.num_programs(1) + block) * 3
        at_p = p + ((to - 1).to(tl.int64) * lists + b) * N
        tie_sum = tl.load(first + base + own) + tl.load(last + base + own)
        sums, moments = _down(
            a + base, w + base, near_row + base, window, at_p, p_32 + base, at_p, tie_sum, own,
            R, M, G, LANES, False, MOMENT,
        )  # fmt: skip
        if STOPS and JUDGES:
            before = tl.load(q + ((to - 1).to(tl.int64) * lists + b) * N + own)
            _judge(worst, t - 1, lists, b, before * sums, real)
        new = _inverse(sums, real)
        tl.store(q + (to.to(tl.int64) * lists + b) * N + own, new)
        tl.store(q_32 + base + own, new.to(tl.float32))
        if MOMENT:
            tl.store(moment + (to.to(tl.int64) * lists + b) * N + own, tl.where(real, moments, 0.0).to(tl.float32))
        if ENDS:
            tl.store(done + b, t, mask=block == 0)


@triton.jit
def _last(done, b, lists, TRANSPOSED: tl.constexpr):
    """The rounds of a list, and which p and q they left."""
    rounds = tl.load(done + b)
    if TRANSPOSED:
        rows = tl.maximum(rounds - 1, 0)
    else:
        rows = rounds
    return rounds, rows.to(tl.int64) * lists + b, rounds.to(tl.int64) * lists + b


@triton.jit
def end_rows_kernel(
    counts, a, w, near_a, near_w, windows, p, q, done, by_rank, by_document, scale, out, values, x, x_32, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TRANSPOSED: tl.constexpr,
    OUT: tl.constexpr, VALUES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The result sum_ij r_i p_i E_ij q_j d_j by rows: scale(P) d, or NDCG; and the adjoint of log p (times p: see below)."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    base = b.to(tl.int64) * N
    own = _own(block, M, LANES)
    if block * M * LANES < n:
        rounds, at_p, at_q = _last(done, b, lists, TRANSPOSED)
        window = windows + (b * tl.num_programs(1) + block) * 3
        sums = _along(
            a + base, w + base, near_a + base, near_w + base, window, q + at_q * N, by_document, by_document + base, own,
            R, M, G, LANES, True,
        )  # fmt: skip
        p_i = tl.load(p + at_p * N + own)
        if OUT:
            tl.store(out + base + own, (p_i * sums).to(tl.float32))
        else:
            p_bar = tl.load(by_rank + base + own) * p_i * sums
            if VALUES:
                value = tl.sum(tl.sum(p_bar, axis=1), axis=0).to(tl.float32)
                tl.store(values + b * tl.num_programs(1) + block, value * tl.load(scale + b))
            if BACKWARD:
                if TRANSPOSED:  # unless nothing was scaled, the last columns come first: they need the adjoint itself
                    p_bar = tl.where(rounds > 0, p_bar, p_bar * p_i)
                else:
                    p_bar = p_bar * p_i
                tl.store(x + base + own, p_bar)
                tl.store(x_32 + base + own, p_bar.to(tl.float32))


@triton.jit
def end_columns_kernel(
    counts, a, w, near_row, windows, first, last, p, q, moment, done, by_rank, by_document, out, slope, y, y_32, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TRANSPOSED: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """The same by columns: scale(P^T) r, or the adjoint of log q and the first part of the gradient."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    base = b.to(tl.int64) * N
    own = _own(block, M, LANES)
    if block * M * LANES < n:
        rounds, at_p, at_q = _last(done, b, lists, TRANSPOSED)
        window = windows + (b * tl.num_programs(1) + block) * 3
        tie_sum = tl.load(first + base + own) + tl.load(last + base + own)
        sums, moments = _down(
            a + base, w + base, near_row + base, window, p + at_p * N, by_rank, by_rank + base, tie_sum, own,
            R, M, G, LANES, True, not OUT,
        )  # fmt: skip
        q_j = tl.load(q + at_q * N + own)
        if OUT:
            tl.store(out + base + own, (q_j * sums).to(tl.float32))
        else:
            d_q = tl.load(by_document + base + own) * q_j
            q_bar = d_q * sums
            gradient = d_q * moments
            if TRANSPOSED:  # the last columns come first, unless nothing was scaled
                scaled = own < tl.where(rounds > 0, n, 0)
                q_bar = tl.where(scaled, q_bar * q_j, q_bar)
                gradient -= q_bar * tl.load(moment + at_q * N + own, mask=scaled, other=0.0)
            tl.store(slope + base + own, gradient)
            tl.store(y + base + own, q_bar)
            tl.store(y_32 + base + own, q_bar.to(tl.float32))


@triton.jit(do_not_specialize=["t"])
def back_columns_kernel(
    counts, a, w, near_row, windows, first, last, q, moment, done, slope, x, x_32, y, y_32, N, t,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Back through the row step p_t: x = p_t times its adjoint comes in, y = q_t times the adjoint of log q_t goes out."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    rounds = tl.load(done + b)
    if TRANSPOSED:
        happened = (t < rounds) | (t == 0)
        carries = rounds == 0
    else:
        happened = t <= rounds
        carries = t == rounds
    if happened & (block * M * LANES < n):
        base = b.to(tl.int64) * N
        own = _own(block, M, LANES)
        at = (t.to(tl.int64) * lists + b) * N + own
        window = windows + (b * tl.num_programs(1) + block) * 3
        tie_sum = tl.load(first + base + own) + tl.load(last + base + own)
        sums, moments = _down(
            a + base, w + base, near_row + base, window, x + base, x_32 + base, x, tie_sum, own,
            R, M, G, LANES, False, True,
        )  # fmt: skip
        q_j = tl.load(q + at)
        q_bar = -q_j * sums
        q_bar += tl.load(y + base + own, mask=own < tl.where(carries, n, 0), other=0.0)
        new = q_j * q_bar
        gradient = tl.load(slope + base + own) - q_j * moments
        gradient -= new * tl.load(moment + at, mask=own < tl.where(t > 0, n, 0), other=0.0)
        tl.store(slope + base + own, gradient)
        tl.store(y + base + own, new)
        tl.store(y_32 + base + own, new.to(tl.float32))


@triton.jit(do_not_specialize=["t"])
def back_rows_kernel(
    counts, a, w, near_a, near_w, windows, p, done, x, x_32, y, y_32, N, t,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Back through the column step q_t: y comes in, x = p_{t-1} times the adjoint of log p_{t-1} goes out."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    rounds = tl.load(done + b)
    if (t <= rounds) & (block * M * LANES < n):
        base = b.to(tl.int64) * N
        own = _own(block, M, LANES)
        window = windows + (b * tl.num_programs(1) + block) * 3
        sums = _along(
            a + base, w + base, near_a + base, near_w + base, window, y + base, y_32 + base, y, own,
            R, M, G, LANES, False,
        )  # fmt: skip
        p_i = tl.load(p + ((t - 1).to(tl.int64) * lists + b) * N + own)
        p_bar = -p_i * sums
        if TRANSPOSED:
            p_bar += tl.load(x + base + own, mask=own < tl.where(t == rounds, n, 0), other=0.0)
        new = p_i * p_bar
        tl.store(x + base + own, new)
        tl.store(x_32 + base + own, new.to(tl.float32))
