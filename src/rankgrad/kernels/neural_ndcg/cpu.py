"""Sinkhorn-scaled NeuralSort on the CPU, list by list, in loops that numba compiles.

For one list of n documents, scores sorted descending and divided by tau, gaps g_k = s_k - s_{k+1} >= 0 and the prefix sums
A_i = sum_{k < i} g_k, W_i = sum_{k < i} k g_k (float64), NeuralSort before its softmax is E = exp(-T) with

    T_ij = 2 (W_j - W_i) - (2 i - 1) (A_j - A_i),   i, j from 0: a rank and a document

which is 0 on the diagonal and grows away from it. So E is kept only where T is below a cut (`_make_band`): blocks of eight rows,
each with the columns that they need. Gaps end at 128: every entry across such a gap is 0 either way, so no score is too large for the
sums.

The softmax is a first row step of the scaling, p_0 = 1 / (E 1), and a round is q = 1 / (E' p), p = 1 / (E q): one sweep over E, in
which a block's rows are summed, give p, and are added up by columns for the next q. The transposed form is the same sequence of
steps without the last row step. A sweep also gives first moments, moment(w)_j = sum_i 2 (j - i) w_i E_ij, from which the gradient of
the scores is put together step by step: nothing of size n^2 lives but E. With abar, cbar the adjoints of log p, log q, going back

    row step      w = p abar,   cbar -= q (E' w),   slope -= q moment(w)
    column step   c = q cbar,   abar -= p (E c),    slope -= c moment(p)

E is float32 without its diagonal, and so are the sweeps; p, q, the adjoints and the diagonal's part of every sum are float64, and so is
what happens once a list (`..._exactly`): gradients that are small differences keep their digits. A list is done again, with E
and the sweeps in float64 and a wide band, where that is not enough (`_relax` says False):

    the sums come so close to the tolerance that float32 cannot tell whether to stop: a round more changes the gradient by up to a
    hundredth
    the gradient is so much smaller than the terms it is a sum of that it drowns in their rounding
    a bound on what the band left out is too large

Short lists are done in float64 at once, which takes hardly longer.

Lists are independent and each is done by one thread, so results do not depend on how many there are. Each of numba's functions that
is called in this file is in this file: its cache would not notice a change elsewhere.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, allow-untyped-calls
# (numba infers the types, of which mypy knows nothing)

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.jit import compiled

_F, _I, _U = (
    np.float32,
    np.int32,
    np.uint64,
)  # unsigned positions: numba prepares others for negative indices, and does not vectorise
_ROWS = 8  # of a block
_ALIGNED = 8  # columns of a block begin and end at multiples of this: whole vectors
_NARROW, _WIDE = 19.0, 64.0  # where T is cut: at the first plus log n in float32, at the second in float64
_SHORT = 64  # documents of a list that is done in float64 at once
_LARGEST_GAP = 128.0
# How much of a row may be left out, and how much of it times the largest adjoint, relative to the gradient's largest entry: over
# lists of many kinds the gradient was then off by 16 times that at most.
_MISSING, _MISSING_SLOPE = 1e-7, 1e-6
# How far float32 may be off: the sums that decide when to stop, in all and for every document (twice what was found over lists of many
# kinds), and the gradient's largest entry over the largest that its sum had on the way (errors were 4e-7 of the latter).
_UNSURE, _UNSURE_PER_DOCUMENT, _SMALL = 4e-7, 4e-9, 1e-2
_EXP2, _LINEAR, _GIVEN = 0, 1, 2  # gains
_FORWARD, _BACKWARD, _AS_GIVEN = 0.0, 1.0, 2.0  # sweeps; numba would compile anew for every integer
_WORK_OF_A_THREAD = 5_000  # documents: fewer take no longer than a turn of another process, which a thread may wait for

# Sums may be reordered, and a product joined to a sum. No more: NaN and infinity must come through.
_FAST = {"reassoc", "contract"}
_compile = compiled(fastmath=_FAST, error_model="numpy")
_inline = compiled(fastmath=_FAST, error_model="numpy", forceinline=True)


@_inline
def _logit(A, W, i, j):
    """T_ij."""
    return 2.0 * (W[j] - W[i]) - (2.0 * i - 1.0) * (A[j] - A[i])


@_inline
def _exp_minus(t):
    """exp(-t) in float32 for t >= 0, exactly 0 from 80 on."""
    power = -1.4426950408889634 * min(t, 80.0)
    whole = _I(power - 0.5)
    x = _F(0.6931471805599453) * _F(power - whole)  # within log(2) / 2 of 0
    tail = _F(1 / 24) + x * (_F(1 / 120) + x * (_F(1 / 720) + x * _F(1 / 5040)))
    value = _F(1) + x * (_F(1) + x * (_F(1 / 2) + x * (_F(1 / 6) + x * tail)))
    scale = _I((whole + 127) << 23).view(_F)  # 2^whole
    return value * scale if t < 80.0 else _F(0)


@_inline
def _exp_minus_exactly(t):
    """The same in float64, exactly 0 from 600 on."""
    power = -1.4426950408889634 * min(t, 600.0)
    whole = _I(power - 0.5)
    x = 0.6931471805599453 * (power - whole)
    tail = 1 / 5040 + x * (1 / 40320 + x * (1 / 362880 + x * (1 / 3628800 + x * (1 / 39916800 + x * (1 / 479001600)))))
    value = 1 + x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * tail))))))
    scale = np.int64((np.int64(whole) + 1023) << 52).view(np.float64)
    return value * scale if t < 600.0 else 0.0


@_compile
def _sort(keys):
    """Integers, ascending, in place: runs of eight by insertion, then merged."""
    n = len(keys)
    for start in range(0, n, 8):
        for at in range(start + 1, min(start + 8, n)):
            key = keys[at]
            while at > start and keys[at - 1] > key:
                keys[at] = keys[at - 1]
                at -= 1
            keys[at] = key
    if n <= 8:
        return
    source, target = keys, np.empty(n, np.int64)
    run = 8
    while run < n:
        for start in range(0, n, 2 * run):
            left, middle, end = start, min(start + run, n), min(start + 2 * run, n)
            right = middle
            for at in range(start, end):
                if left < middle and (right >= end or source[left] < source[right]):
                    target[at] = source[left]
                    left += 1
                else:
                    target[at] = source[right]
                    right += 1
        source, target = target, source
        run *= 2
    for at in range(n):
        keys[at] = source[at]


@_compile
def _order(scores):
    """Places of float32 scores from best to worst, ties in input order."""
    keys = np.empty(len(scores), np.int64)
    for at in range(len(scores)):
        bits = np.int64(_F(scores[at]).view(_I))
        rising = bits ^ 0x7FFFFFFF if bits < 0 else bits  # in the order of the numbers
        keys[at] = (~rising << 32) | at
    _sort(keys)
    for at in range(len(keys)):
        keys[at] &= 0xFFFFFFFF
    return keys


@_compile
def _make_band(A, W, n, cut, real):
    """E where T <= cut, and whether that is everywhere. A band is E, and of each block its start in E, first column and width."""
    blocks = -(-n // _ROWS)
    starts, firsts, widths = np.empty(blocks, np.int64), np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    low, high, size, whole = 0, 0, 0, True
    for i in range(n):
        while _logit(A, W, i, low) > cut:
            low += 1
        high = max(high, i)
        while high + 1 < n and _logit(A, W, i, high + 1) <= cut:
            high += 1
        if i % _ROWS == 0:
            starts[i // _ROWS], firsts[i // _ROWS] = size, low // _ALIGNED * _ALIGNED
        if i % _ROWS == _ROWS - 1 or i == n - 1:
            widths[i // _ROWS] = -(-(high + 1) // _ALIGNED) * _ALIGNED - firsts[i // _ROWS]
            size += _ROWS * widths[i // _ROWS]
        whole = whole and low == 0 and high == n - 1
    E = np.zeros(size, real)
    for block in range(blocks):
        first, width = firsts[block], widths[block]
        last = min(first + width, n)
        for i in range(_ROWS * block, min(_ROWS * block + _ROWS, n)):
            row = E[starts[block] + (i - _ROWS * block) * width :][:width]
            slope, own, weighted = 2.0 * i - 1.0, A[i], W[i]
            sums, sums_by_place = A[first:last], W[first:last]
            for j in range(last - first):
                t = 2.0 * (sums_by_place[j] - weighted) - slope * (sums[j] - own)
                row[j] = _exp_minus(t) if E.itemsize == 4 else _exp_minus_exactly(t)
            row[i - first] = 0.0
    return (E, starts, firsts, widths), whole


@_inline
def _rows_times(band, block, x, sums):
    """The block's part of E x."""
    E, starts, firsts, widths = band
    w, f, i = _U(widths[block]), _U(firsts[block]), _U(_ROWS * block)
    k0 = _U(starts[block])
    k1 = k0 + w
    k2 = k1 + w
    k3 = k2 + w
    k4 = k3 + w
    k5 = k4 + w
    k6 = k5 + w
    k7 = k6 + w
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = E.dtype.type(0)
    for j in range(w):
        v = x[f + j]
        a0 += E[k0 + j] * v
        a1 += E[k1 + j] * v
        a2 += E[k2 + j] * v
        a3 += E[k3 + j] * v
        a4 += E[k4 + j] * v
        a5 += E[k5 + j] * v
        a6 += E[k6 + j] * v
        a7 += E[k7 + j] * v
    sums[i], sums[i + _U(1)], sums[i + _U(2)], sums[i + _U(3)] = a0, a1, a2, a3
    sums[i + _U(4)], sums[i + _U(5)], sums[i + _U(6)], sums[i + _U(7)] = a4, a5, a6, a7


@_inline
def _add_columns(band, block, weights, places, sums, moments):
    """Add the block's part of E' weights to `sums` and of moment(weights) to `moments`; places[j] is 2 j."""
    E, starts, firsts, widths = band
    w, f, i = _U(widths[block]), _U(firsts[block]), _U(_ROWS * block)
    k0 = _U(starts[block])
    k1 = k0 + w
    k2 = k1 + w
    k3 = k2 + w
    k4 = k3 + w
    k5 = k4 + w
    k6 = k5 + w
    k7 = k6 + w
    real = E.dtype.type  # everywhere: numba makes an integer times a float32 a float64
    i4 = i + _U(4)
    p0, p1, p2, p3 = real(weights[i]), real(weights[i + _U(1)]), real(weights[i + _U(2)]), real(weights[i + _U(3)])
    p4, p5, p6, p7 = real(weights[i4]), real(weights[i4 + _U(1)]), real(weights[i4 + _U(2)]), real(weights[i4 + _U(3)])
    r1, r2, r3, r4 = real(2) * p1, real(4) * p2, real(6) * p3, real(8) * p4
    r5, r6, r7 = real(10) * p5, real(12) * p6, real(14) * p7
    origin = places[i]
    for j in range(w):
        e0, e1, e2, e3 = E[k0 + j], E[k1 + j], E[k2 + j], E[k3 + j]
        e4, e5, e6, e7 = E[k4 + j], E[k5 + j], E[k6 + j], E[k7 + j]
        total = (p0 * e0 + p1 * e1 + p2 * e2 + p3 * e3) + (p4 * e4 + p5 * e5 + p6 * e6 + p7 * e7)
        inner = (r1 * e1 + r2 * e2 + r3 * e3) + (r4 * e4 + r5 * e5 + r6 * e6 + r7 * e7)
        sums[f + j] += total
        moments[f + j] += (places[f + j] - origin) * total - inner


@_compile
def _sweep(band, kind, own, p, x, weights, places, dots, sums, moments):
    """One pass over E: weights from d = own + E x, 1 / d or -p^2 d or as given; sums = E' weights, moments = moment(weights)."""
    n = len(own)
    for j in range(n):
        x[j] = own[j]
    sums[:] = 0.0
    moments[:] = 0.0
    for block in range(len(band[1])):
        if kind != _AS_GIVEN:
            _rows_times(band, block, x, dots)
            for i in range(_ROWS * block, min(_ROWS * block + _ROWS, n)):
                row = own[i] + dots[i]
                weights[i] = 1.0 / row if kind == _FORWARD else -p[i] * p[i] * row
        _add_columns(band, block, weights, places, sums, moments)


@_compile
def _columns_exactly(band, weights, sums):
    """E' weights in float64."""
    E, starts, firsts, widths = band
    n = len(weights)
    sums[:] = 0.0
    for i in range(n):
        block = i // _ROWS
        first, last = firsts[block], min(firsts[block] + widths[block], n)
        row = E[starts[block] + i % _ROWS * widths[block] :][: last - first]
        columns, weight = sums[first:last], weights[i]
        for j in range(last - first):
            columns[j] += weight * row[j]


@_compile
def _rows_exactly(band, x, sums):
    """E x in float64."""
    E, starts, firsts, widths = band
    n = len(x)
    for i in range(n):
        block = i // _ROWS
        first, last = firsts[block], min(firsts[block] + widths[block], n)
        row = E[starts[block] + i % _ROWS * widths[block] :][: last - first]
        columns, total = x[first:last], 0.0
        for j in range(last - first):
            total += columns[j] * row[j]
        sums[i] = total


@_compile
def _add_moments_exactly(band, p, q, by_rank, by_document, row_adjoint, column_adjoint, slope):
    """slope_j += sum_i 2 (j - i) p_i E_ij q_j (by_rank_i by_document_j - row_adjoint_i - column_adjoint_j) in float64."""
    E, starts, firsts, widths = band
    n = len(p)
    moments = np.zeros(n)
    for i in range(n):
        block = i // _ROWS
        first, last = firsts[block], min(firsts[block] + widths[block], n)
        row = E[starts[block] + i % _ROWS * widths[block] :][: last - first]
        given, adjoints, total = by_document[first:last], column_adjoint[first:last], moments[first:last]
        weight, rank, own, away = 2.0 * p[i], by_rank[i], row_adjoint[i], np.float64(first - i)
        for j in range(last - first):
            total[j] += weight * (away + j) * row[j] * ((rank * given[j] - own) - adjoints[j])
    for j in range(n):
        slope[j] += q[j] * moments[j]


@_compile
def _largest_error(scaling, own, sums):
    """How far from one the sums scaling (own + sums) are."""
    off = 0.0
    for j in range(len(sums)):
        off = max(off, abs(scaling[j] * (own[j] + sums[j]) - 1.0))
    return off


@_compile
def _relax(s, tau, by_rank, by_document, iters, tol, transposed, wants_gradient, cut, real, ranks, documents, gradient):
    """One list with E up to `cut` as float32 or float64, `real`; see `_relaxed`. Returns whether that was exact enough."""
    n = len(s)
    padded = -(-n // _ALIGNED) * _ALIGNED
    A, W = np.zeros(n), np.zeros(n)
    for k in range(n - 1):
        gap = min((s[k] - s[k + 1]) / tau, _LARGEST_GAP)
        A[k + 1], W[k + 1] = A[k] + gap, W[k] + k * gap
    band, whole = _make_band(A, W, n, cut, real)

    places, x, dots = np.empty(padded, real), np.zeros(padded, real), np.empty(padded, real)
    sums, moments, exact = np.empty(padded, real), np.empty(padded, real), np.empty(n)
    for j in range(padded):
        places[j] = 2 * j
    P, Q, M = np.zeros((iters + 1, padded)), np.zeros((iters + 1, padded)), np.empty((iters + 1, padded), real)
    Q[0, :n] = 1.0
    rounds = row_steps = 0
    for t in range(iters + 1):  # column step t, but for t = 0, and row step t
        p, q, before = P[t], Q[t], P[max(t - 1, 0)]
        if t > 0:
            for j in range(n):
                q[j] = 1.0 / (before[j] + sums[j])
            rounds = t
            row_steps = t - 1 if transposed else t
            if transposed and t == iters:
                break
        _sweep(band, _FORWARD, q[:n], before, x, p, places, dots, sums, M[t])
        if 0 < t < iters and tol > 0.0:
            off = _largest_error(before, q, dots[:n]) if transposed else _largest_error(q, p, sums[:n])
            if places.itemsize == 4 and abs(off - tol) < (_UNSURE + _UNSURE_PER_DOCUMENT * n) * (1.0 + off):
                return False
            if off < tol:
                break

    # The last column step, and the row step after it if there is one, again and exactly: the output is diag(p) E diag(q).
    p, q = P[row_steps, :n], Q[rounds, :n]
    if rounds > 0:
        before = P[rounds - 1, :n]
        _columns_exactly(band, before, exact)
        for j in range(n):
            q[j] = 1.0 / (before[j] + exact[j])
    if row_steps == rounds:
        _rows_exactly(band, q, exact)
        for j in range(n):
            p[j] = 1.0 / (q[j] + exact[j])
    weights, scaled = np.zeros(padded), np.empty(n)
    largest_p = largest_q = 0.0
    for j in range(n):
        weights[j], scaled[j] = p[j] * by_rank[j], q[j] * by_document[j]
        largest_p, largest_q = max(largest_p, p[j]), max(largest_q, q[j])
    _rows_exactly(band, scaled, exact)
    for j in range(n):
        ranks[j] = p[j] * (scaled[j] + exact[j])
    _columns_exactly(band, weights[:n], exact)
    for j in range(n):
        documents[j] = q[j] * (weights[j] + exact[j])
    missing = 0.0 if whole else largest_p * largest_q * n * math.exp(-cut)
    if not wants_gradient:
        return missing <= _MISSING

    # Backward: the output and the last row and column steps exactly, because their terms cancel; then step by step.
    slope, none, row_adjoint, column_adjoint = np.zeros(n), np.zeros(n), np.empty(n), np.empty(n)
    peak = largest_rank = largest_document = 0.0
    for j in range(n):
        row_adjoint[j], column_adjoint[j] = by_rank[j] * ranks[j], by_document[j] * documents[j]
        largest_rank, largest_document = max(largest_rank, abs(by_rank[j])), max(largest_document, abs(by_document[j]))
    if row_steps == rounds:
        _add_moments_exactly(band, p, q, by_rank, by_document, row_adjoint, none, slope)
        for j in range(n):
            weights[j] = p[j] * row_adjoint[j]
        _columns_exactly(band, weights[:n], exact)
        peak = _row_step_back(q, weights, exact, none, column_adjoint, slope, rounds > 0)
        by_rank = by_document = row_adjoint = none
    if rounds > 0:
        p = P[rounds - 1, :n]
        _add_moments_exactly(band, p, q, by_rank, by_document, none, column_adjoint, slope)
        for j in range(n):
            column_adjoint[j] *= q[j]
        _rows_exactly(band, column_adjoint, exact)
        for j in range(n):
            weights[j] = p[j] * (row_adjoint[j] - p[j] * (column_adjoint[j] + exact[j]))
            column_adjoint[j] = 0.0
        _sweep(band, _AS_GIVEN, none, p, x, weights, places, dots, sums, moments)
        peak = max(peak, _row_step_back(Q[rounds - 1], weights, sums, moments, column_adjoint, slope, rounds > 1))
    for t in range(rounds - 1, 0, -1):  # column step t and row step t - 1
        p, q, moments_of_p = P[t - 1], Q[t], M[t - 1]
        for j in range(n):
            column_adjoint[j] *= q[j]
            slope[j] -= column_adjoint[j] * moments_of_p[j]
        _sweep(band, _BACKWARD, column_adjoint, p, x, weights, places, dots, sums, moments)
        column_adjoint[:] = 0.0
        peak = max(peak, _row_step_back(Q[t - 1], weights, sums, moments, column_adjoint, slope, t > 1))
    steepest = _through_distances(s, column_adjoint, slope, gradient)
    missing_slope = missing * largest_rank * largest_document
    return missing <= _MISSING and missing_slope <= _MISSING_SLOPE * steepest and _SMALL * peak <= steepest


@_compile
def _row_step_back(q, weights, sums, moments, column_adjoint, slope, balance):
    """A row step's part of the adjoint of log q, which then sums to zero: `balance` removes what rounding left of its mean.

    Returns the largest entry that the slope had.
    """
    mean, largest, n = 0.0, 0.0, len(slope)
    for j in range(n):
        column_adjoint[j] -= q[j] * (weights[j] + sums[j])
        largest = max(largest, abs(slope[j]))
        slope[j] -= q[j] * moments[j]
        largest = max(largest, abs(slope[j]))
        mean += column_adjoint[j]
    if balance:
        for j in range(n):
            column_adjoint[j] -= mean / n
    return largest


@_compile
def _through_distances(s, by_column, slope, gradient):
    """From the adjoints of the logits to the gradient; returns its largest entry.

    d z_ij / d s_j = r_i - rho_j with rho_j = sum_k sign(s_j - s_k); `slope` has r_i - r_j. The rest goes through the distances
    b_j = sum_k |s_j - s_k|: -sum_k sign(s_j - s_k) by_column_k, by_column the sums over i. Equal scores have sign 0.
    """
    n = len(s)
    total = above = steepest = 0.0
    for j in range(n):
        total += by_column[j]
    start = 0
    while start < n:
        end, own = start, 0.0
        while end < n and s[end] == s[start]:
            own += by_column[end]
            end += 1
        for j in range(start, end):
            ties = start + end - 1 - 2 * j  # r_j - rho_j
            gradient[j] = slope[j] + ties * by_column[j] - ((total - above - own) - above)
            steepest = max(steepest, abs(gradient[j]))
        above += own
        start = end
    return steepest


@_compile
def _relaxed(s, tau, by_rank, by_document, iters, tol, transposed, wants_gradient, ranks, documents, gradient):
    """One list of descending scores s, P their NeuralSort at temperature tau, scaled.

    ranks = P by_document, documents = P' by_rank, gradient = tau d (by_rank' P by_document) / d s. [n] each, float64.
    """
    n = len(s)
    how = (iters, tol, transposed, wants_gradient)
    out = (ranks, documents, gradient)
    if n <= _SHORT or not _relax(s, tau, by_rank, by_document, *how, _NARROW + math.log(n), _F, *out):
        _relax(s, tau, by_rank, by_document, *how, _WIDE, np.float64, *out)


@_compile
def _scaled_sort_lists(first, last, scores, counts, values, slopes, tau, iters, tol, transposed, wants_gradient, out):
    """Lists of sorted scores [B, L]: `out` is scale(P) values, or scale(P') values, or their gradient for these slopes."""
    length = scores.shape[1]
    s, ranks, documents, gradient = np.empty(length), np.empty(length), np.empty(length), np.empty(length)
    given, other = np.empty(length), np.zeros(length)
    for at in range(first, last):
        n = counts[at]
        matters = not wants_gradient
        for j in range(n):
            s[j], given[j] = scores[at, j], values[at, j]
            if wants_gradient:
                other[j] = slopes[at, j]
                matters = matters or other[j] != 0.0
        if n == 0 or not matters:
            out[at] = 0.0
            continue
        by_rank, by_document = (given, other) if transposed else (other, given)
        _relaxed(
            s[:n], tau, by_rank[:n], by_document[:n], iters, tol, transposed, wants_gradient, ranks, documents, gradient
        )
        for j in range(n):
            out[at, j] = gradient[j] / tau if wants_gradient else (documents[j] if transposed else ranks[j])
        out[at, n:] = 0.0


@_compile
def _ndcg_lists(
    first, last, scores, labels, mask, gains, kind, discounts, tau, iters, tol, transposed, wants_gradient,
    losses, counted, gradients,
):  # fmt: skip
    """NeuralNDCG of lists [B, L], whether each counts, and d / d scores; labels, mask and gains may repeat for further lists."""
    length = scores.shape[1]
    s, ranks, documents, gradient = np.empty(length), np.empty(length), np.empty(length), np.empty(length)
    worth, by_document, own = np.empty(length), np.empty(length), np.empty(length, _F)
    place, keys = np.empty(length, np.int64), np.empty(length, np.int64)
    for at in range(first, last):
        query = at % len(labels)
        n, documents_in_list, relevant, ideal = 0, 0, False, 0.0
        gradients[at] = 0.0
        for j in range(length):
            if not mask[query, j]:
                continue
            documents_in_list += 1
            label = labels[query, j]
            if not (abs(scores[at, j]) < np.inf and 0.0 <= label < np.inf):
                continue
            place[n], own[n] = j, scores[at, j]
            relevant = relevant or label > 0.0
            if kind == _EXP2:
                worth[n] = 2.0**label - 1.0
            elif kind == _LINEAR:
                worth[n] = label
            else:
                worth[n] = gains[query, j]
            keys[n] = -worth[n : n + 1].view(np.int64)[0]  # gains are not negative: their bits have their order
            n += 1
        valid = n == documents_in_list
        losses[at], counted[at] = (0.0 if valid else np.nan), not valid
        if documents_in_list < 2 or not relevant:
            continue
        _sort(keys[:n])
        for j in range(n):
            ideal += discounts[j] * np.int64(-keys[j]).view(np.float64)
        if ideal <= 0.0:
            continue
        counted[at] = True
        order = _order(own[:n])
        for j in range(n):
            s[j], by_document[j] = own[order[j]], worth[order[j]] / ideal
            valid = valid and math.isfinite(by_document[j])
        if not valid:
            losses[at] = np.nan
            for j in range(n):
                gradients[at, place[j]] = np.nan
            continue
        by_rank = discounts[:n]
        _relaxed(
            s[:n], tau, by_rank, by_document[:n], iters, tol, transposed, wants_gradient, ranks, documents, gradient
        )
        value = 0.0
        for j in range(n):
            value -= documents[j] * by_document[j] if transposed else ranks[j] * by_rank[j]
            if wants_gradient:
                gradients[at, place[order[j]]] = -gradient[j] / tau
        losses[at] = value


class ScaledSort(torch.autograd.Function):
    """scale(P) x for sorted scores, or scale(P^T) x: the twin of `rankgrad.core.sinkhorn.scaled_sort`.

    The backward pass does the rounds again: what they leave would take more memory than all else.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, values: Tensor, tau: float, iters: int, tol: float, transposed: bool
    ) -> Tensor:
        """[B, L] float32 scores (sorted), counts [B], values [B, L] -> [B, L]."""
        ctx.save_for_backward(scores, counts, values)
        ctx.how = tau, iters, tol, transposed
        return _scaled_sort(scores, counts, values, values, *ctx.how, wants_gradient=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores; the values are constants."""
        scores, counts, values = ctx.saved_tensors
        gradient = _scaled_sort(scores, counts, values, grad, *ctx.how, wants_gradient=True)
        return gradient, None, None, None, None, None, None


def _scaled_sort(
    scores: Tensor,
    counts: Tensor,
    values: Tensor,
    slopes: Tensor,
    tau: float,
    iters: int,
    tol: float,
    transposed: bool,
    *,
    wants_gradient: bool,
) -> Tensor:
    out = scores.new_empty(scores.shape)
    arrays = [_array(tensor) for tensor in (scores, counts, values, slopes)]
    _in_threads(
        _scaled_sort_lists, len(scores), int(arrays[1].sum()), *arrays, tau, iters, tol, transposed, wants_gradient,
        out.numpy(),
    )  # fmt: skip
    return out


def value_and_gradient(
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
    wants_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """NeuralNDCG of scores [..., L], or its transposed form, and d loss / d scores in float32, which is 0 if nobody wants it."""
    length = scores.shape[-1]
    mask = labels.new_ones((), dtype=torch.bool).expand_as(labels) if mask is None else mask
    given = gain if isinstance(gain, Tensor) else labels  # not read unless given
    labels, mask, given = _without_repetition(labels, mask, given)
    kind = _GIVEN if isinstance(gain, Tensor) else {"exp2": _EXP2, "linear": _LINEAR}[gain]
    discounts = 1 / np.log2(np.arange(2.0, length + 2.0))
    discounts[length if k is None else k :] = 0.0
    lists = scores.numel() // length
    losses, counted = np.empty(lists), np.empty(lists, np.bool_)
    gradient = scores.new_empty(scores.shape, dtype=torch.float32)
    arrays = [
        array.reshape(-1, length) for array in (_array(scores.float()), _wide(labels), _array(mask), _wide(given))
    ]
    documents = np.count_nonzero(arrays[2]) * lists // max(1, len(arrays[2]))  # those of a mask repeated for all
    _in_threads(
        _ndcg_lists, lists, documents, *arrays, kind, discounts, tau, iters, tol, transposed, wants_gradient,
        losses, counted, gradient.view(-1, length).numpy(),
    )  # fmt: skip
    if reduction == "none":
        return torch.from_numpy(losses).float().view(scores.shape[:-1]), gradient
    share = 1 / max(1, int(counted.sum())) if reduction == "mean" else 1.0
    values = gradient.numpy()
    np.multiply(values, np.float32(share), out=values)
    return gradient.new_tensor(share * losses.sum()), gradient


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().numpy())


def _wide(tensor: Tensor) -> np.ndarray:
    """float64; of usual dtypes by numpy, because torch's threads would meet for it."""
    usual = tensor.dtype in (torch.float32, torch.float64, torch.int64)
    return _array(tensor if usual else tensor.double()).astype(np.float64, copy=False)


def _without_repetition(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors [..., L] without leading dimensions that repeat all of them, as labels are for members that share lists."""
    while tensors[0].dim() > 2 and all(tensor.stride(0) == 0 for tensor in tensors):
        tensors = tuple(tensor[0] for tensor in tensors)
    return tensors


def _in_threads(function, lists, documents, *arguments):
    """function(first, last, *arguments) for all lists, in as many threads as torch is set to use and the documents are worth.

    Each takes a few lists at a time. A thread that has not begun when all lists are taken is not waited for.
    """
    threads = min(torch.get_num_threads(), lists, documents // _WORK_OF_A_THREAD)
    if threads <= 1:
        function(0, lists, *arguments)
        return
    size = -(-lists // (8 * threads))
    starts = iter(range(0, lists, size))

    def work():
        for start in starts:
            function(start, min(start + size, lists), *arguments)

    helpers = [_pool().submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that start when they are needed."""
    return ThreadPoolExecutor(
        max_workers=max(1, os.cpu_count() or 1, torch.get_num_threads()), thread_name_prefix="rankgrad"
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
