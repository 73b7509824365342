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

# what a launch does: see `rows_kernel`
FIRST_HALF, SECOND_HALF, RESULT, END, BACK = (tl.constexpr(phase) for phase in range(5))

# what `long_lists` tabulates of each document: relative to the first document of its chunk or run, for blocks before it; and (+ 1) to
# the last, for blocks after it
_DISTANCE = tl.constexpr(0)  # d within its chunk of columns
_RATIO = tl.constexpr(2)  # exp(-2 |d|)
COLUMN = tl.constexpr(4)  # exp(-2 e)
ROW = tl.constexpr(6)  # exp of the bracket, within its run of rows


@triton.jit
def _near_rows(
    a, w, x, block, begin, end,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
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
        z = odd_i * a_j.to(DTYPE)[:, None, :, None] + (start_i - w_j[:, None, :, None])
        terms = tl.exp2(z.to(tl.float32)).to(DTYPE) * x_j.to(DTYPE)[:, None, :, None]
        sums += tl.sum(terms, axis=0).to(tl.float64)
    return tl.reshape(tl.sum(sums, axis=1), (M * LANES,))


@triton.jit
def _near_columns(
    a, w, x, ties, block, begin, end,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
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
        z = odd.to(DTYPE)[:, None, :, None] * a_j + (start_i - w_j)
        terms = tl.exp2(z.to(tl.float32)).to(DTYPE) * x_i.to(DTYPE)[:, None, :, None]
        sums += tl.sum(terms, axis=0).to(tl.float64)
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
    a, w, tables, x_far, size, block, begin, end, after, R: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr
):
    """sum_j E_ij x_j of a block's rows over whole chunks begin..end of columns before or after it, [4 * LANES] float64."""
    # the four rows from the chunk's nearest to its farthest
    step = tl.where(after > 0, -1, 1)
    i_0 = (block * LANES + tl.arange(0, LANES)) * 4 + tl.where(after > 0, 3, 0)
    i_1 = i_0 + step
    i_2 = i_1 + step
    i_3 = i_2 + step
    a_0 = tl.load(a + i_0)
    a_1 = tl.load(a + i_1)
    a_2 = tl.load(a + i_2)
    a_3 = tl.load(a + i_3)
    w_0 = tl.load(w + i_0)
    w_1 = tl.load(w + i_1)
    w_2 = tl.load(w + i_2)
    w_3 = tl.load(w + i_3)
    side = tl.where(after > 0, size * 0, size)
    distance = tables + size * _DISTANCE + side
    ratio = tables + size * _RATIO + side
    x_far += side
    sums_0 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_1 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_2 = tl.zeros([G, LANES], dtype=tl.float64)
    sums_3 = tl.zeros([G, LANES], dtype=tl.float64)
    for start in range(begin, end, R * G):
        m = start + tl.where(after > 0, 0, R * G - 1)
        slope = (2 * (i_0 - m) - 1).to(tl.float32)[None, :]
        part_0 = tl.zeros([G, LANES], dtype=tl.float32)
        part_1 = tl.zeros([G, LANES], dtype=tl.float32)
        part_2 = tl.zeros([G, LANES], dtype=tl.float32)
        part_3 = tl.zeros([G, LANES], dtype=tl.float32)
        for r in tl.static_range(R):
            j = start + r * G + tl.arange(0, G)
            ratio_j = tl.load(ratio + j)[:, None]
            term = tl.exp2(slope * tl.load(distance + j)[:, None]) * tl.load(x_far + j)[:, None]
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
    first = tl.where(after > 0, sums_3, sums_0)
    second = tl.where(after > 0, sums_2, sums_1)
    third = tl.where(after > 0, sums_1, sums_2)
    fourth = tl.where(after > 0, sums_0, sums_3)
    rows = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.sum(rows, axis=0), (LANES * 4,))


@triton.jit
def _far_columns(
    a, w, x_far, size, ties, block, begin, end, after,
    RUN: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of a block's columns over whole runs begin..end of rows before or after it, and its moment."""
    own = (block * M + tl.arange(0, M)[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    a_j = tl.load(a + own)[:, None, :]
    w_j = tl.load(w + own)[:, None, :]
    tie_j = tl.load(ties + own)[:, None, :]
    x_far += tl.where(after > 0, size * 0, size)
    away = tl.where(after > 0, 1, -1)
    sums = tl.zeros([M, G, LANES], dtype=tl.float64)
    moments = tl.zeros([M, G, LANES], dtype=tl.float64)
    for start in range(begin, end, RUN * G):
        m = start + tl.arange(0, G) * RUN + tl.where(after > 0, 0, RUN - 1)
        d = a_j - tl.load(a + m)[None, :, None]
        odd = (2 * m - 1).to(tl.float64)[None, :, None]
        from_row = tl.exp2((odd * d - 2.0 * (w_j - tl.load(w + m)[None, :, None])).to(tl.float32))
        ratio = tl.exp2(-2.0 * tl.abs(d).to(tl.float32))
        part = tl.zeros([M, G, LANES], dtype=tl.float32)
        grown = tl.zeros([M, G, LANES], dtype=tl.float32)
        for r in tl.static_range(RUN):
            x_i = tl.load(x_far + m + away * (RUN - 1 - r))
            grown = grown * ratio + part
            part = part * ratio + x_i[None, :, None]
        part *= from_row
        sums += part.to(tl.float64)
        beyond = (2 * away).to(tl.float32) * (grown * ratio * from_row)  # twice the sum of (i - m) E_ij x_i
        moments += (part * (tie_j - 2 * m[None, :, None]).to(tl.float32) - beyond).to(tl.float64)
    return tl.reshape(tl.sum(sums, axis=1), (M * LANES,)), tl.reshape(tl.sum(moments, axis=1), (M * LANES,))


@triton.jit
def _along(
    sums, tables, windows, x, x_far, lists, b, block, blocks, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sum_j E_ij x_j of the rows of a block, [M * LANES] float64."""
    base = b.to(tl.int64) * N
    size = lists.to(tl.int64) * N
    a = sums + base
    w = a + size
    window = windows + (b * blocks + block) * 3
    begin = tl.load(window)
    end = tl.load(window + 1)
    kind = tl.load(window + 2)
    here = block * M * LANES
    near = tl.where(kind == 0, begin, here)
    if kind < 2:
        until = tl.where(kind == 0, end, here + M * LANES)
        total = _near_rows(a, w, x + base, block, near, until, R, M, G, LANES, tl.float64)
    else:
        total = _near_rows(a, w, x + base, block, near, here + M * LANES, R, M, G, LANES, tl.float32)
    for after in range(tl.where(kind == 0, 0, 2)):
        since = tl.where(after == 0, begin, here + M * LANES)
        until = tl.where(after == 0, here, end)
        total += _far_rows(a, w, tables + base, x_far + base, size, block, since, until, after, R, G, LANES)
    return total


@triton.jit
def _down(
    sums, windows, ties, x, x_far, lists, b, block, blocks, N,
    R: tl.constexpr, M: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """sum_i E_ij x_i of the columns of a block, and sum_i (r_i - rho_j) E_ij x_i, [M * LANES] float64.

    r_i - rho_j = ties_j - 2 i, with ties_j the first plus the last document that have j's score.
    """
    base = b.to(tl.int64) * N
    size = lists.to(tl.int64) * N
    a = sums + base
    w = a + size
    window = windows + ((lists + b) * blocks + block) * 3
    begin = tl.load(window)
    end = tl.load(window + 1)
    kind = tl.load(window + 2)
    here = block * M * LANES
    near = tl.where(kind == 0, begin, here)
    if kind < 2:
        until = tl.where(kind == 0, end, here + M * LANES)
        total, moment = _near_columns(a, w, x + base, ties + base, block, near, until, R, M, G, LANES, tl.float64)
    else:
        until = here + M * LANES
        total, moment = _near_columns(a, w, x + base, ties + base, block, near, until, R, M, G, LANES, tl.float32)
    for after in range(tl.where(kind == 0, 0, 2)):
        since = tl.where(after == 0, begin, here + M * LANES)
        until = tl.where(after == 0, here, end)
        more, further = _far_columns(
            a, w, x_far + base, size, ties + base, block, since, until, after, RUN, M, G, LANES
        )  # fmt: skip
        total += more
        moment += further
    return total, moment


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
    """Whether a list still scales in round t, or did and goes back through it.

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
        total = _along(sums, tables, windows, y, y_far, lists, b, block, tl.num_programs(1), N, R, M, G, LANES)
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
        total, moments = _down(
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
