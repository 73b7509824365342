"""The kernels of Sinkhorn's half-rounds for lists of any length: see `rankgrad.kernels.long_sort`.

E is never stored: a program owns a block of rows or columns, walks over the window that the block sees, chunk by chunk, and
makes each entry anew, in one of two ways.

*Near*: entry by entry, one exponential each, with logits from float64 prefix sums relative to the block's centre c,

    z_ij = [2 w_i - (2 (i - c) - 1) a_i] - 2 w_j + (2 (i - c) - 1) a_j,   a_j = A_j - A_c,   w_j = W_j - W_c - c a_j

in float32 where these numbers are small, else in float64. Entries lie as [R, M, G, LANES]: own document m * LANES + lane, other document
r * G + g. Triton spreads the last dimensions over lanes and warps (G of them) and keeps the first ones in each thread's
registers, so that a thread sums for its own documents by itself until the end.

*Far*, for chunks outside the block: with m the document of the chunk that is nearest to the block, d_j = A_j - A_m and
e_j = W_j - W_m - m d_j, a logit is a sum of numbers that are all <= 0, so nothing cancels and nothing overflows,

    z_ij = z_im + (2 (i - m) - 1) d_j - 2 e_j                              a row against a chunk of columns
    z_ij = z_mj + [2 e_i - (2 (i - m) - 1) d_i] + 2 (i - m) (A_j - A_m)    a column against a run of rows

and E is geometric in i. A lane's four neighbouring rows share one exponential per column. A column's sum over a run of rows is a
polynomial in exp(2 (A_j - A_m)), by Horner: one multiply-add per entry, a second one for its derivative, the moment. What
depends on the other document alone is multiplied into its vector by the launch that made it.
"""

import triton
import triton.language as tl

_NEAR_FAST = tl.constexpr(2)  # kinds of windows: entries near the block in float32, far ones geometric;
_FAR = tl.constexpr(1)  # the same with entries near the block in float64; 0: all entries in float64

# what `long_lists` tabulates of each document, as the far side of a block before it (FIRST) or after it (LAST)
_DISTANCE = tl.constexpr(0)  # d, relative to the first (+ 0) or the last (+ 1) document of its chunk of columns
_RATIO = tl.constexpr(2)  # exp(-2 |d|)
_COLUMN = tl.constexpr(4)  # exp(-2 e)
_ROW = tl.constexpr(6)  # exp of the bracket, relative to the first or last document of its run of rows


@triton.jit
def _near_rows(
    a, w, x, times, block, begin, end,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """sum_j E_ij x_j of a block's rows over the columns begin..end, [M * LANES] float64."""
    own = (block * M + tl.arange(0, M)[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    place = tl.arange(0, R)[:, None] * G + tl.arange(0, G)[None, :]
    centre = block * M * LANES + M * LANES // 2
    a_c = tl.load(a + centre)
    w_c = tl.load(w + centre)
    a_i = tl.load(a + own) - a_c
    w_i = (tl.load(w + own) - w_c) - centre.to(tl.float64) * a_i
    odd = (2 * (own - centre) - 1).to(tl.float64)
    start_i = (2.0 * w_i - odd * a_i).to(DTYPE)[None, :, None, :]
    odd_i = odd.to(DTYPE)[None, :, None, :]
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    for start in range(begin, end, R * G):
        j = start + place
        a_j = tl.load(a + j) - a_c
        w_j = (2.0 * ((tl.load(w + j) - w_c) - centre.to(tl.float64) * a_j)).to(DTYPE)
        x_j = tl.load(x + j)
        if TIMES:
            x_j = x_j * tl.load(times + j)
        z = odd_i * a_j.to(DTYPE)[:, None, :, None] + (start_i - w_j[:, None, :, None])
        terms = tl.exp2(z.to(tl.float32)).to(DTYPE) * x_j.to(DTYPE)[:, None, :, None]
        sums += tl.sum(terms, axis=0).to(tl.float64)
    return tl.reshape(tl.sum(sums, axis=1), (M * LANES,))


@triton.jit
def _near_columns(
    a, w, x, times, ties, block, begin, end,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr, MOMENT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of a block's columns over the rows begin..end, and the same times ties_j - 2 i, [M * LANES] float64."""
    own = (block * M + tl.arange(0, M)[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    place = tl.arange(0, R)[:, None] * G + tl.arange(0, G)[None, :]
    centre = block * M * LANES + M * LANES // 2
    a_c = tl.load(a + centre)
    w_c = tl.load(w + centre)
    a_j = tl.load(a + own) - a_c
    w_j = (2.0 * ((tl.load(w + own) - w_c) - centre.to(tl.float64) * a_j)).to(DTYPE)[None, :, None, :]
    a_j = a_j.to(DTYPE)[None, :, None, :]
    tie_j = (tl.load(ties + own) - 2 * centre)[None, :, None, :]
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    moments = tl.zeros([M, G, LANES], dtype=tl.float64)
    for start in range(begin, end, R * G):
        i = start + place
        a_i = tl.load(a + i) - a_c
        w_i = (tl.load(w + i) - w_c) - centre.to(tl.float64) * a_i
        odd = (2 * (i - centre) - 1).to(tl.float64)
        start_i = (2.0 * w_i - odd * a_i).to(DTYPE)[:, None, :, None]
        x_i = tl.load(x + i)
        if TIMES:
            x_i = x_i * tl.load(times + i)
        z = odd.to(DTYPE)[:, None, :, None] * a_j + (start_i - w_j)
        terms = tl.exp2(z.to(tl.float32)).to(DTYPE) * x_i.to(DTYPE)[:, None, :, None]
        sums += tl.sum(terms, axis=0).to(tl.float64)
        if MOMENT:
            apart = tie_j - 2 * (i - centre)[:, None, :, None]
            moments += tl.sum(terms * apart.to(DTYPE), axis=0).to(tl.float64)
    return tl.reshape(tl.sum(sums, axis=1), (M * LANES,)), tl.reshape(tl.sum(moments, axis=1), (M * LANES,))


@triton.jit
def _from_column(a_i, w_i, i, a_m, w_m):
    """exp(z_im)."""
    odd = (2 * i - 1).to(tl.float64)
    return tl.exp2((2.0 * (w_i - w_m) + odd * (a_m - a_i)).to(tl.float32))[None, :]


@triton.jit
def _far_rows(
    a, w, distance, ratio, x_far, x, times, column, block, begin, end,
    R: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, AFTER: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """sum_j E_ij x_j of a block's rows over whole chunks begin..end of columns beyond it, [4 * LANES] float64."""
    own = (block * LANES + tl.arange(0, LANES)) * 4
    # rows from the chunk's nearest to its farthest: from the last to the first where the chunk comes after them
    if AFTER:
        i_0 = own + 3
        i_1 = own + 2
        i_2 = own + 1
        i_3 = own
    else:
        i_0 = own
        i_1 = own + 1
        i_2 = own + 2
        i_3 = own + 3
    a_0 = tl.load(a + i_0)
    a_1 = tl.load(a + i_1)
    a_2 = tl.load(a + i_2)
    a_3 = tl.load(a + i_3)
    w_0 = tl.load(w + i_0)
    w_1 = tl.load(w + i_1)
    w_2 = tl.load(w + i_2)
    w_3 = tl.load(w + i_3)
    sums_0 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_1 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_2 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_3 = tl.zeros([G, LANES], dtype=tl.float64)
    for start in range(begin, end, R * G):
        m = start if AFTER else start + (R * G - 1)
        slope = (2 * (i_0 - m) - 1).to(tl.float32)[None, :]
        part_0 = tl.zeros([G, LANES], dtype=tl.float32)
        part_1 = tl.zeros([G, LANES], dtype=tl.float32)
        part_2 = tl.zeros([G, LANES], dtype=tl.float32)
        part_3 = tl.zeros([G, LANES], dtype=tl.float32)
        for r in tl.static_range(R):
            j = start + r * G + tl.arange(0, G)
            if TIMES:
                x_j = (tl.load(x + j) * tl.load(times + j)).to(tl.float32) * tl.load(column + j)
            else:
                x_j = tl.load(x_far + j)
            ratio_j = tl.load(ratio + j)[:, None]
            term = tl.exp2(slope * tl.load(distance + j)[:, None]) * x_j[:, None]
            part_0 += term
            term *= ratio_j
            part_1 += term
            term *= ratio_j
            part_2 += term
            term *= ratio_j
            part_3 += term
        a_m = tl.load(a + m)
        w_m = tl.load(w + m)
        sums_0 += (part_0 * _from_column(a_0, w_0, i_0, a_m, w_m)).to(tl.float64)
        sums_1 += (part_1 * _from_column(a_1, w_1, i_1, a_m, w_m)).to(tl.float64)
        sums_2 += (part_2 * _from_column(a_2, w_2, i_2, a_m, w_m)).to(tl.float64)
        sums_3 += (part_3 * _from_column(a_3, w_3, i_3, a_m, w_m)).to(tl.float64)
    if AFTER:
        rows = tl.join(tl.join(sums_3, sums_1), tl.join(sums_2, sums_0))
    else:
        rows = tl.join(tl.join(sums_0, sums_2), tl.join(sums_1, sums_3))
    return tl.reshape(tl.sum(rows, axis=0), (LANES * 4,))


@triton.jit
def _far_columns(
    a, w, row, x_far, x, times, ties, block, begin, end,
    RUN: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, AFTER: tl.constexpr, TIMES: tl.constexpr,
    MOMENT: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of a block's columns over whole runs begin..end of rows beyond it, and its moment, [M * LANES] float64."""
    own = (block * M + tl.arange(0, M)[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    a_j = tl.load(a + own)[:, None, :]
    w_j = tl.load(w + own)[:, None, :]
    tie_j = tl.load(ties + own)[:, None, :]
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    moments = tl.zeros([M, G, LANES], dtype=tl.float64)
    for start in range(begin, end, RUN * G):
        m = start + tl.arange(0, G) * RUN
        if not AFTER:
            m += RUN - 1
        d = a_j - tl.load(a + m)[None, :, None]
        odd = (2 * m - 1).to(tl.float64)[None, :, None]
        from_row = tl.exp2((odd * d - 2.0 * (w_j - tl.load(w + m)[None, :, None])).to(tl.float32))
        ratio = tl.exp2(-2.0 * tl.abs(d).to(tl.float32))
        part = tl.zeros([M, G, LANES], dtype=tl.float32)
        grown = tl.zeros([M, G, LANES], dtype=tl.float32)
        for r in tl.static_range(RUN):
            i = m + (RUN - 1 - r) if AFTER else m - (RUN - 1 - r)
            if TIMES:
                x_i = (tl.load(x + i) * tl.load(times + i)).to(tl.float32) * tl.load(row + i)
            else:
                x_i = tl.load(x_far + i)
            if MOMENT:
                grown = grown * ratio + part
            part = part * ratio + x_i[None, :, None]
        part *= from_row
        sums += part.to(tl.float64)
        if MOMENT:
            steps = 2.0 * (grown * ratio * from_row)  # twice the sum of |i - m| E_ij x_i
            apart = (tie_j - 2 * m[None, :, None]).to(tl.float32)
            moments += (part * apart - steps if AFTER else part * apart + steps).to(tl.float64)
    return tl.reshape(tl.sum(sums, axis=1), (M * LANES,)), tl.reshape(tl.sum(moments, axis=1), (M * LANES,))


@triton.jit
def _along(
    sums, tables, windows, x, x_far, times, lists, b, block, blocks, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """sum_j E_ij x_j of the rows of a block, [M * LANES] float64; with TIMES of x_j times_j."""
    a = sums + b.to(tl.int64) * N
    w = a + lists.to(tl.int64) * N
    window = windows + (b * blocks + block) * 3
    begin = tl.load(window)
    end = tl.load(window + 1)
    kind = tl.load(window + 2)
    here = block * M * LANES
    if kind == 0:
        total = _near_rows(a, w, x, times, block, begin, end, R, M, G, LANES, TIMES, tl.float64)
    else:
        if kind == _FAR:
            total = _near_rows(a, w, x, times, block, here, here + M * LANES, R, M, G, LANES, TIMES, tl.float64)
        else:
            total = _near_rows(a, w, x, times, block, here, here + M * LANES, R, M, G, LANES, TIMES, tl.float32)
        table = tables + b.to(tl.int64) * N
        size = lists.to(tl.int64) * N
        total += _far_rows(
            a, w, table + size * (_DISTANCE + 1), table + size * (_RATIO + 1), x_far + size, x, times,
            table + size * (_COLUMN + 1), block, begin, here, R, G, LANES, False, TIMES,
        )  # fmt: skip
        total += _far_rows(
            a, w, table + size * _DISTANCE, table + size * _RATIO, x_far, x, times,
            table + size * _COLUMN, block, here + M * LANES, end, R, G, LANES, True, TIMES,
        )  # fmt: skip
    return total


@triton.jit
def _down(
    sums, tables, windows, ties, x, x_far, times, lists, b, block, blocks, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, TIMES: tl.constexpr,
    MOMENT: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of the columns of a block, and sum_i (r_i - rho_j) E_ij x_i, [M * LANES] float64.

    r_i - rho_j = ties_j - 2 i, with ties_j the first plus the last document that have j's score.
    """
    a = sums + b.to(tl.int64) * N
    w = a + lists.to(tl.int64) * N
    ties += b.to(tl.int64) * N
    window = windows + ((lists + b) * blocks + block) * 3
    begin = tl.load(window)
    end = tl.load(window + 1)
    kind = tl.load(window + 2)
    here = block * M * LANES
    there = here + M * LANES
    if kind == 0:
        total, moment = _near_columns(
            a, w, x, times, ties, block, begin, end, R, M, G, LANES, TIMES, MOMENT, tl.float64
        )  # fmt: skip
    else:
        if kind == _FAR:
            total, moment = _near_columns(
                a, w, x, times, ties, block, here, there, R, M, G, LANES, TIMES, MOMENT, tl.float64
            )  # fmt: skip
        else:
            total, moment = _near_columns(
                a, w, x, times, ties, block, here, there, R, M, G, LANES, TIMES, MOMENT, tl.float32
            )  # fmt: skip
        size = lists.to(tl.int64) * N
        row = tables + size * _ROW + b.to(tl.int64) * N
        before, moment_before = _far_columns(
            a, w, row + size, x_far + size, x, times, ties, block, begin, here, RUN, M, G, LANES, False, TIMES, MOMENT
        )  # fmt: skip
        after, moment_after = _far_columns(
            a, w, row, x_far, x, times, ties, block, there, end, RUN, M, G, LANES, True, TIMES, MOMENT
        )  # fmt: skip
        total += before + after
        moment += moment_before + moment_after
    return total, moment


@triton.jit
def _store(x, x_far, table, value, own, b, lists, N):
    """A vector in float64, and in float32 as the far side of a block before it and of a block after it."""
    at = b.to(tl.int64) * N + own
    size = lists.to(tl.int64) * N
    tl.store(x + own, value)
    tl.store(x_far + at, value.to(tl.float32) * tl.load(table + at))
    tl.store(x_far + size + at, value.to(tl.float32) * tl.load(table + size + at))


@triton.jit
def _inverse(x, real):
    return tl.where(real, 1.0 / tl.where(real, x, 1.0), 0.0)


@triton.jit
def _judge(worst, t, lists, b, scaled, real):
    """Remember how far the sums that the last round left behind are from one."""
    off = tl.where(real, tl.abs(scaled - 1.0), 0.0)
    tl.atomic_max(worst + t * lists + b, tl.max(off, axis=0).to(tl.float32))


@triton.jit
def _runs(done, worst, t, lists, b, tol, ENDS: tl.constexpr, STOPS: tl.constexpr):
    """Whether a list takes part in round t: it ended the one before, and had not had enough."""
    running = t <= 1
    if t > 1:
        running = tl.load(done + b) >= t - 1
        if STOPS and ENDS:
            running = running & (tl.load(worst + (t - 1) * lists + b) >= tol)
    return running


@triton.jit(do_not_specialize=["t", "to"])
def rows_kernel(
    counts, sums, tables, windows, p, q, p_far, q_far, done, worst, N, tol, t, to,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, JUDGES: tl.constexpr,
    ENDS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """p_to = 1 / (E q_to), a half of round t; the second half of a round ends it."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if _runs(done, worst, t, lists, b, tol, ENDS, STOPS) & (block * M * LANES < n):
        own = block * M * LANES + tl.arange(0, M * LANES)
        at = (to.to(tl.int64) * lists + b) * N
        far = q_far + b.to(tl.int64) * N
        total = _along(
            sums, tables, windows, q + at, far, q, lists, b, block, tl.num_programs(1), N, R, M, G, LANES, False
        )  # fmt: skip
        if STOPS and JUDGES:
            _judge(worst, t - 1, lists, b, tl.load(p + at - lists.to(tl.int64) * N + own) * total, own < n)
        if ENDS:
            tl.store(done + b, t, mask=block == 0)
        _store(p + at, p_far, tables + lists.to(tl.int64) * N * _ROW, _inverse(total, own < n), own, b, lists, N)


@triton.jit(do_not_specialize=["t"])
def columns_kernel(
    counts, sums, tables, windows, ties, p, q, moment, p_far, q_far, done, worst, N, tol, t,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, JUDGES: tl.constexpr,
    ENDS: tl.constexpr, STOPS: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """q_t = 1 / (E' p_{t-1}), the other half; keeps sum_i (r_i - rho_j) E_ij p_i for the way back."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if _runs(done, worst, t, lists, b, tol, ENDS, STOPS) & (block * M * LANES < n):
        own = block * M * LANES + tl.arange(0, M * LANES)
        at = (t.to(tl.int64) * lists + b) * N
        before = at - lists.to(tl.int64) * N
        far = p_far + b.to(tl.int64) * N
        total, moments = _down(
            sums, tables, windows, ties, p + before, far, p, lists, b, block, tl.num_programs(1), N,
            R, M, G, LANES, RUN, False, MOMENT,
        )  # fmt: skip
        if STOPS and JUDGES:
            _judge(worst, t - 1, lists, b, tl.load(q + before + own) * total, own < n)
        if ENDS:
            tl.store(done + b, t, mask=block == 0)
        if MOMENT:
            tl.store(moment + at + own, tl.where(own < n, moments, 0.0).to(tl.float32))
        _store(q + at, q_far, tables + lists.to(tl.int64) * N * _COLUMN, _inverse(total, own < n), own, b, lists, N)


@triton.jit
def _last(done, b, lists, N, TRANSPOSED: tl.constexpr):
    """The rounds of a list, and where the p and q are that they left."""
    rounds = tl.load(done + b)
    if TRANSPOSED:
        rows = tl.maximum(rounds - 1, 0)
    else:
        rows = rounds
    return rounds, (rows.to(tl.int64) * lists + b) * N, (rounds.to(tl.int64) * lists + b) * N


@triton.jit
def end_rows_kernel(
    counts, sums, tables, windows, p, q, done, by_rank, by_document, scale, out, values, x, x_far, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TRANSPOSED: tl.constexpr,
    OUT: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The result sum_ij r_i p_i E_ij q_j d_j by rows: scale(P) d as OUT; or NDCG and the adjoint of log p, times p."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if block * M * LANES < n:
        base = b.to(tl.int64) * N
        own = block * M * LANES + tl.arange(0, M * LANES)
        rounds, at_p, at_q = _last(done, b, lists, N, TRANSPOSED)
        total = _along(
            sums, tables, windows, q + at_q, tables, by_document + base, lists, b, block, tl.num_programs(1), N,
            R, M, G, LANES, True,
        )  # fmt: skip
        p_i = tl.load(p + at_p + own)
        if OUT:
            tl.store(out + base + own, (p_i * total).to(tl.float32))
        else:
            p_bar = tl.load(by_rank + base + own) * p_i * total
            if VALUES:
                value = tl.sum(p_bar, axis=0).to(tl.float32)
                tl.store(values + b * tl.num_programs(1) + block, value * tl.load(scale + b))
            if TRANSPOSED:  # unless nothing was scaled, the last columns come first: they need the adjoint itself
                p_bar = tl.where(rounds > 0, p_bar, p_bar * p_i)
            else:
                p_bar = p_bar * p_i
            _store(x + base, x_far, tables + lists.to(tl.int64) * N * _ROW, p_bar, own, b, lists, N)


@triton.jit
def end_columns_kernel(
    counts, sums, tables, windows, ties, p, q, moment, done, by_rank, by_document, out, slope, y, y_far, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, TRANSPOSED: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """The same by columns: scale(P^T) r as OUT; or the adjoint of log q and the first part of the gradient."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    lists = tl.num_programs(0)
    n = tl.load(counts + b)
    if block * M * LANES < n:
        base = b.to(tl.int64) * N
        own = block * M * LANES + tl.arange(0, M * LANES)
        rounds, at_p, at_q = _last(done, b, lists, N, TRANSPOSED)
        total, moments = _down(
            sums, tables, windows, ties, p + at_p, tables, by_rank + base, lists, b, block, tl.num_programs(1), N,
            R, M, G, LANES, RUN, True, not OUT,
        )  # fmt: skip
        q_j = tl.load(q + at_q + own)
        if OUT:
            tl.store(out + base + own, (q_j * total).to(tl.float32))
        else:
            d_q = tl.load(by_document + base + own) * q_j
            q_bar = d_q * total
            gradient = d_q * moments
            if TRANSPOSED:  # the last columns come first, unless nothing was scaled
                scaled = own < tl.where(rounds > 0, n, 0)
                q_bar = tl.where(scaled, q_bar * q_j, q_bar)
                gradient -= q_bar * tl.load(moment + at_q + own, mask=scaled, other=0.0)
            tl.store(slope + base + own, gradient)
            _store(y + base, y_far, tables + lists.to(tl.int64) * N * _COLUMN, q_bar, own, b, lists, N)


@triton.jit(do_not_specialize=["t"])
def back_columns_kernel(
    counts, sums, tables, windows, ties, q, moment, done, slope, x, x_far, y, y_far, N, t,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, TRANSPOSED: tl.constexpr,
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
        own = block * M * LANES + tl.arange(0, M * LANES)
        at = (t.to(tl.int64) * lists + b) * N + own
        total, moments = _down(
            sums, tables, windows, ties, x + base, x_far + base, x, lists, b, block, tl.num_programs(1), N,
            R, M, G, LANES, RUN, False, True,
        )  # fmt: skip
        q_j = tl.load(q + at)
        q_bar = tl.load(y + base + own, mask=own < tl.where(carries, n, 0), other=0.0) - q_j * total
        new = q_j * q_bar
        gradient = tl.load(slope + base + own) - q_j * moments
        gradient -= new * tl.load(moment + at, mask=own < tl.where(t > 0, n, 0), other=0.0)
        tl.store(slope + base + own, gradient)
        _store(y + base, y_far, tables + lists.to(tl.int64) * N * _COLUMN, new, own, b, lists, N)


@triton.jit(do_not_specialize=["t"])
def back_rows_kernel(
    counts, sums, tables, windows, p, done, x, x_far, y, y_far, N, t,
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
        own = block * M * LANES + tl.arange(0, M * LANES)
        total = _along(
            sums, tables, windows, y + base, y_far + base, y, lists, b, block, tl.num_programs(1), N, R, M, G, LANES, False
        )  # fmt: skip
        p_i = tl.load(p + ((t - 1).to(tl.int64) * lists + b) * N + own)
        p_bar = -p_i * total
        if TRANSPOSED:
            p_bar += tl.load(x + base + own, mask=own < tl.where(t == rounds, n, 0), other=0.0)
        _store(x + base, x_far, tables + lists.to(tl.int64) * N * _ROW, p_i * p_bar, own, b, lists, N)
