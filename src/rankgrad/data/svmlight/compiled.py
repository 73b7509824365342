"""The compiled reader of SVMLight lines: it reads plain lines fast and leaves all others to the strict reader.

`read_lines` reads line after line and stops *before* the first line it cannot decide about: anything that may be an
error, and the rare number whose float32 it cannot prove correctly rounded. `rankgrad.data.svmlight.line` then accepts
or refuses that line. So the rules are written once, there, and this module may only be cautious, never lenient. It
works on arrays alone and releases the interpreter's lock. Where COMPILED is False, only `permute_rows` may be called.

How a token becomes a float32: up to 18 significant digits m (more are cut) and a power of ten give the
float64 m * 10^e with a relative error below 3.2 * 2^-53. A float32 is that float64 without its last 29 bits,
so its rounding is certain unless these bits are within 4 of their middle, 2^28; there integers decide exactly
(`_near_tie`) or the strict reader does.

Positions are unsigned: numba would otherwise prepare every access for negative indices, which costs a third
of the speed. Signed and unsigned must not meet in one expression (numba makes that a float64).
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, allow-untyped-calls
# (numba infers the types, of which mypy knows nothing)

from __future__ import annotations

import numpy as np

from rankgrad import jit
from rankgrad.data.dataset import MAX_FLOAT32
from rankgrad.data.svmlight.blocks import CLAMPED, CLAMPED_LINE, ENTRIES, LINES, ROWS, SEEN, WIDEST, WIDEST_LINE

COMPILED = jit.COMPILED  # if False, the strict reader reads every line
_compile = jit.compiled()

_U = np.uint64
_ONE, _TWO, _FOUR, _ZERO_DIGIT, _NINE, _BASE = _U(1), _U(2), _U(4), _U(48), _U(9), _U(10)
_TAB, _NEWLINE, _RETURN, _SPACE, _HASH, _PLUS, _MINUS, _POINT, _COLON = 9, 10, 13, 32, 35, 43, 45, 46, 58
_PLAIN, _CLAMPED, _UNSURE = 0, 1, 2
_DIGITS = 18  # the most that always fit an int64
_TEN = np.array([float(f"1e{e}") for e in range(64)])
_TENTH = np.array([float(f"1e-{e}") for e in range(_DIGITS + 1)])
_LAST_BITS, _MIDDLE, _WINDOW = (1 << 29) - 1, 1 << 28, 4
_EXACT = 1 << 53  # integers below are exact in float64
_LARGEST_DOUBLE = 179769313486231580  # the first 18 digits of where float64 overflows


@_compile
def _bits(value):
    return np.float64(value).view(np.int64)


@_compile
def _from_bits(bits):
    return np.int64(bits).view(np.float64)


@_compile
def _undecided(value):
    """Whether a float64 is so near the middle of two float32 that its own error matters."""
    return ((_bits(value) + (_WINDOW - _MIDDLE)) & _LAST_BITS) <= 2 * _WINDOW  # one comparison for two


@_compile
def _near_tie(mantissa, exponent, value):
    """Put m * 10^e, about `value`, on its side of the middle of two float32, exactly: (status, value).

    A mantissa that was cut has 18 digits, so it is never taken for exact here.
    """
    if exponent > 18 or exponent < -12 or mantissa >= _EXACT:
        return _UNSURE, value
    left = np.float64(mantissa) * _TEN[max(exponent, 0)]
    if left >= _EXACT:
        return _UNSURE, value
    bits = (_bits(value) & ~_LAST_BITS) | _MIDDLE
    right = _from_bits(bits) * _TEN[max(-exponent, 0)]  # exact: 25 bits times the 28 bits of 5^12
    if left > right:
        bits += 1
    elif left < right:
        bits -= 1
    return _PLAIN, _from_bits(bits)


@_compile
def _any_number(text, at):
    """Any decimal number after its sign: (status, magnitude, end)."""
    mantissa, digits, exponent, power = 0, 0, 0, 0
    seen, fraction = False, False
    while True:
        c = np.int64(text[at])
        if c == _POINT and not fraction:
            fraction = True
        elif 48 <= c <= 57:
            seen = True
            if digits < _DIGITS:
                mantissa = mantissa * 10 + (c - 48)
                if mantissa > 0:
                    digits += 1
                if fraction:
                    exponent -= 1
            elif not fraction:
                exponent += 1
        else:
            break
        at += _ONE
    if not seen:
        return _UNSURE, 0.0, at
    if text[at] == 101 or text[at] == 69:  # e, E
        at += _ONE
        shrinks = text[at] == _MINUS
        if shrinks or text[at] == _PLUS:
            at += _ONE
        first = at
        while 48 <= text[at] <= 57:
            power = min(power * 10 + (np.int64(text[at]) - 48), 1 << 40)
            at += _ONE
        if at == first:
            return _UNSURE, 0.0, at
        exponent += -power if shrinks else power
    if mantissa == 0:
        return _PLAIN, 0.0, at
    size = digits + exponent  # 10^(size - 1) <= magnitude < 10^size
    if size > 39:
        if size < 309 or (size == 309 and mantissa * 10 ** (_DIGITS - digits) < _LARGEST_DOUBLE):
            return _CLAMPED, MAX_FLOAT32, at
        return _UNSURE, 0.0, at
    if size < -36:  # subnormal float32 are rounded at another bit
        return _UNSURE, 0.0, at
    if exponent < 0:
        value = np.float64(mantissa) / _TEN[-exponent]
    else:
        value = np.float64(mantissa) * _TEN[exponent]
    if _undecided(value):
        status, value = _near_tie(mantissa, exponent, value)
        if status == _UNSURE:
            return _UNSURE, value, at
    if np.isinf(np.float32(value)):
        return _CLAMPED, MAX_FLOAT32, at
    return _PLAIN, value, at


@_compile
def _repeats(indices, seen):
    """Whether an index comes twice (or is too large to tell). seen[i]: the last call that met i; seen[0] counts."""
    seen[0] += 1
    for index in indices:
        if index >= SEEN or seen[index] == seen[0]:
            return True
        seen[index] = seen[0]
    return False


@_compile
def read_lines(text, at, wants_qid, limit, shift, indices, values, row_ends, labels, qids, seen, state):
    """Read the lines of text[at:], which ends with a newline; return the start of the line it stopped before.

    Row r has label labels[r], query qids[r] and the entries row_ends[r - 1]:row_ends[r] of indices (from 1,
    at most `limit`; `shift` is what the text's numbers lack of that) and values. `seen` [SEEN] and `state` [SLOTS] begin as
    zeros and are continued from call to call.
    """
    at, stop, limit, shift = _U(at), _U(len(text)), _U(limit), _U(shift)
    rows, entries, lines = _U(state[ROWS]), _U(state[ENTRIES]), state[LINES]
    line = at
    while at < stop:
        line = at
        while text[at] == _SPACE or text[at] == _TAB:
            at += _ONE
        c = text[at]
        is_row = c != _NEWLINE and c != _HASH and c != _RETURN
        clamped = 0
        last = _U(0)
        if is_row:
            if c == _PLUS:
                at += _ONE
            status, value, at = _any_number(text, at)
            if status == _UNSURE:
                break
            labels[rows] = value
            clamped += status
            if wants_qid:
                if text[at] != _SPACE and text[at] != _TAB:
                    break
                while text[at] == _SPACE or text[at] == _TAB:
                    at += _ONE
                if text[at] != 113 or text[at + _ONE] != 105 or text[at + _TWO] != 100:  # q, i, d
                    break
                at += _FOUR
                if text[at - _ONE] != _COLON:
                    break
                negative = text[at] == _MINUS
                if negative or text[at] == _PLUS:
                    at += _ONE
                first = at
                query = _U(0)
                digit = _U(text[at]) - _ZERO_DIGIT
                while digit <= _NINE:
                    query = query * _BASE + digit
                    at += _ONE
                    digit = _U(text[at]) - _ZERO_DIGIT
                if at - first - _ONE >= _U(_DIGITS):  # none, or perhaps too many
                    break
                qids[rows] = -np.int64(query) if negative else np.int64(query)
            start = entries
            rising, unsure, rare = True, False, True
            while rare:
                rare = False
                while text[at] == _SPACE or text[at] == _TAB:
                    at += _ONE
                    first = at
                    index = _U(0)
                    digit = _U(text[at]) - _ZERO_DIGIT
                    while digit <= _NINE:
                        index = index * _BASE + digit
                        at += _ONE
                        digit = _U(text[at]) - _ZERO_DIGIT
                    if at == first:
                        continue  # another blank; or the loop ends, at the end of the line or at an unknown character
                    index += shift
                    # index - 1 >= limit: zero or too large
                    if text[at] != _COLON or at - first > _U(_DIGITS) or index - _ONE >= limit:
                        unsure = True
                        break
                    if index > last:
                        last = index
                    else:
                        rising = False
                    indices[entries] = index
                    at += _ONE
                    negative = text[at] == _MINUS
                    if negative or text[at] == _PLUS:
                        at += _ONE
                    first = at
                    mantissa = _U(0)
                    digit = _U(text[at]) - _ZERO_DIGIT
                    while digit <= _NINE:
                        mantissa = mantissa * _BASE + digit
                        at += _ONE
                        digit = _U(text[at]) - _ZERO_DIGIT
                    digits = at - first
                    scale = _U(0)
                    if text[at] == _POINT:
                        at += _ONE
                        point = at
                        digit = _U(text[at]) - _ZERO_DIGIT
                        while digit <= _NINE:
                            mantissa = mantissa * _BASE + digit
                            at += _ONE
                            digit = _U(text[at]) - _ZERO_DIGIT
                        scale = at - point
                        digits += scale
                    if digits - _ONE >= _U(_DIGITS) or text[at] == 101 or text[at] == 69:
                        rare = True
                        break
                    value = np.float64(np.int64(mantissa)) * _TENTH[scale]
                    if _undecided(value):
                        rare = True
                        break
                    values[entries] = -value if negative else value
                    entries += _ONE
                if rare:
                    status, value, at = _any_number(text, first)
                    if status == _UNSURE:
                        unsure = True
                        break
                    clamped += status
                    values[entries] = -value if negative else value
                    entries += _ONE
            if unsure or (not rising and _repeats(indices[start:entries], seen)):
                break
        if text[at] == _HASH:
            while text[at] != _NEWLINE:
                at += _ONE
        elif text[at] == _RETURN:
            at += _ONE
        if text[at] != _NEWLINE:
            break
        at += _ONE
        line = at
        lines += 1
        if is_row:
            row_ends[rows] = entries
            rows += _ONE
            if np.int64(last) > state[WIDEST]:
                state[WIDEST], state[WIDEST_LINE] = last, lines
            if clamped > 0:
                if state[CLAMPED] == 0:
                    state[CLAMPED_LINE] = lines
                state[CLAMPED] += clamped
        state[ROWS], state[ENTRIES], state[LINES] = rows, entries, lines
    return np.int64(line)


@_compile
def scatter(indices, values, row_ends, dense, missing):
    """Write the entries of each row into the row of dense [rows, F], and `missing` where there is none."""
    entry = _U(0)
    for row in range(len(row_ends)):
        cells, end = dense[row], _U(row_ends[row])
        if end - entry < _U(len(cells)):
            cells[:] = missing
        while entry < end:
            cells[_U(indices[entry]) - _ONE] = values[entry]
            entry += _ONE


@_compile
def permute_rows(matrix, order):
    """Put row order[r] of a matrix into row r, in place, for a permutation: cycle by cycle."""
    done = np.zeros(len(order), np.bool_)
    for start in range(len(order)):
        if done[start] or order[start] == start:
            continue
        first = matrix[start].copy()
        row = start
        while order[row] != start:
            matrix[row] = matrix[order[row]]
            done[row] = True
            row = order[row]
        matrix[row] = first
        done[row] = True
