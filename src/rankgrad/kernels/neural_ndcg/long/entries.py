"""Products of a block of E with a vector, E made entry by entry on the way: see `rankgrad.kernels.neural_ndcg.long.launch`.

E is never stored: a program owns a block of rows or columns, goes through the block's window, chunk by chunk, and
computes each entry anew, in one of two ways.

*Near*: entry by entry, one exponential each, with logits from float64 prefix sums relative to the block's centre c,

    z_ij = [2 w_i - (2 (i - c) - 1) a_i] - 2 w_j + (2 (i - c) - 1) a_j,   a_j = A_j - A_c,   w_j = W_j - W_c - c a_j

in float32 where these numbers are small, else in float64. Entries are laid out as [R, M, G, LANES]: own document m * LANES + lane, other document
r * G + g. Triton spreads the last dimensions over lanes and warps (G * LANES threads) and keeps the first ones in each thread's
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

# what `windows` tabulates of each document: relative to the first document of its chunk or run, for blocks before it; and (+ 1)
# relative to the last, for blocks after it
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
def along(
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
def down(
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
