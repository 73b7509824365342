"""SVMLight text read slowly and strictly, from the description of the format, in plain loops.

Shares nothing with the library: numbers are taken apart character by character and rounded to float32 in
exact integers.
"""

from __future__ import annotations

import struct
from fractions import Fraction

DIGITS = b"0123456789"
BEYOND_FLOAT32 = 2**128 - 2**103  # the middle between the largest float32 and what would come next
BEYOND_FLOAT64 = 2**1024 - 2**970


class MistakeError(Exception):
    def __init__(self, line: int, column: int) -> None:
        super().__init__(line, column)
        self.line = line
        self.column = column


class BadTokenError(Exception):
    pass


def read(content: bytes, features: int | None = None, wants_qid: bool = True):
    """(labels, query ids, one dict {index: float32} per row, number of clamped values), or MistakeError."""
    if content.startswith(b"\xef\xbb\xbf"):
        content = content[3:]
    lines = content.split(b"\n")
    labels, queries, rows, clamped = [], [], [], 0
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\r"):
            line = line[:-1]
        tokens = split(line)
        if not tokens:
            continue
        row = {}
        for position, (column, token) in enumerate(tokens):
            try:
                if position == 0:
                    value, over = number_of(token)
                    if is_negative(token):
                        raise BadTokenError
                    labels.append(value)
                elif position == 1 and wants_qid:
                    if token[:4] != b"qid:":
                        raise BadTokenError
                    queries.append(integer_of(token[4:], signed=True))
                    if not -(2**63) <= queries[-1] < 2**63:
                        raise BadTokenError
                    over = False
                else:
                    if token.count(b":") != 1:
                        raise BadTokenError
                    name, text = token.split(b":")
                    index = integer_of(name, signed=False)
                    if index < 1 or index >= 2**31 or index in row or (features and index > features):
                        raise BadTokenError
                    row[index], over = number_of(text)
                clamped += over
            except BadTokenError:
                raise MistakeError(number, column) from None
        if wants_qid and len(tokens) < 2:
            raise MistakeError(number, tokens[0][0])
        rows.append(row)
    if not rows:
        raise MistakeError(0, 0)
    return labels, queries, rows, clamped


def split(line: bytes) -> list[tuple[int, bytes]]:
    """(column from 1, token) of what stands before a comment, cut at spaces and tabs."""
    tokens, token, start = [], b"", 0
    for column, code in enumerate(line, 1):
        character = bytes([code])
        if character == b"#":
            break
        if character in b" \t":
            if token:
                tokens.append((start, token))
            token = b""
        else:
            if not token:
                start = column
            token += character
    if token:
        tokens.append((start, token))
    return tokens


def integer_of(text: bytes, signed: bool) -> int:
    sign = 1
    if signed and text[:1] in (b"+", b"-"):
        sign = -1 if text[:1] == b"-" else 1
        text = text[1:]
    if not 1 <= len(text) <= 20:
        raise BadTokenError
    value = 0
    for code in text:
        if code not in DIGITS:
            raise BadTokenError
        value = value * 10 + DIGITS.index(code)
    return sign * value


def number_of(text: bytes) -> tuple[float, bool]:
    """The nearest float32, and whether it was clamped."""
    sign, digits, exponent = take_apart(text)
    if digits == 0:
        return sign * 0.0, False
    size = len(str(digits)) + exponent
    if size > 400:
        raise BadTokenError
    if size < -400:
        return sign * 0.0, False
    magnitude = Fraction(digits) * Fraction(10) ** exponent
    if magnitude >= BEYOND_FLOAT64:
        raise BadTokenError
    if magnitude >= BEYOND_FLOAT32:
        return sign * float(2**128 - 2**104), True
    return sign * nearest_float32(magnitude), False


def take_apart(text: bytes) -> tuple[int, int, int]:
    """(sign, digits, exponent): the number is sign * digits * 10^exponent."""
    sign = -1 if text[:1] == b"-" else 1
    at = 1 if text[:1] in (b"+", b"-") else 0
    digits, seen, exponent = 0, 0, 0
    point = False
    while at < len(text) and text[at : at + 1] in [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"."]:
        if text[at : at + 1] == b".":
            if point:
                raise BadTokenError
            point = True
        else:
            digits = digits * 10 + DIGITS.index(text[at])
            seen += 1
            exponent -= point
        at += 1
    if not seen:
        raise BadTokenError
    if at < len(text):
        if text[at : at + 1] not in (b"e", b"E"):
            raise BadTokenError
        rest = text[at + 1 :]
        exponent_sign = -1 if rest[:1] == b"-" else 1
        if rest[:1] in (b"+", b"-"):
            rest = rest[1:]
        if not rest:
            raise BadTokenError
        power = 0
        for code in rest:
            if code not in DIGITS:
                raise BadTokenError
            power = power * 10 + DIGITS.index(code)
        exponent += exponent_sign * power
    return sign, digits, exponent


def is_negative(text: bytes) -> bool:
    sign, digits, _ = take_apart(text)
    return sign < 0 and digits > 0


def nearest_float32(magnitude: Fraction) -> float:
    """Ties to even, for 0 < magnitude < BEYOND_FLOAT32; float32 are multiples of 2^-149, 24 bits of them."""
    power = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 25  # a little too small
    unit = Fraction(2) ** max(power, -149)
    while magnitude / unit >= 2**24:
        unit *= 2
    whole, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1):
        whole += 1
    value = float(whole * unit)
    assert struct.unpack("f", struct.pack("f", value))[0] == value
    return value
