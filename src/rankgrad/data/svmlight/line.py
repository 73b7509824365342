r"""One line of SVMLight text, read strictly: the rules of the format and the message of every error.

    line     blanks [label blanks qid:query { blanks index:value }] blanks [# anything]
    label    a number that is not negative
    value    a number: [+-] digits [. digits] [e [+-] digits], a digit before or after the point
    query    [+-] digits, within 64 bits
    index    digits, from 1, or from 0 in text that says so, each at most once in a line, in any order
    digits   0 to 9; at most 20 in a query or an index, leading zeros included
    blank    space or tab; a carriage return is allowed at the very end of a line

A number is finite: one beyond float64 is refused, one beyond float32 becomes the largest float32 and is
counted. Every other token becomes the float32 nearest to its decimal value (ties to even), never by way of
a rounded float64. Where features that a line does not name are missing, a value may also be `nan`, in any case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from rankgrad.data.dataset import INT64, MAX_FLOAT32

MAX_LINE = 8 << 20  # bytes: about half a million features; what is longer is not a line of ranking data
MAX_INDEX = 2**31 - 1

_NUMBER = rb"[+-]?+(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?+\d++)?+"  # possessive: no backtracking
_LABEL = re.compile(rb"[ \t]*+" + _NUMBER + rb"(?=[ \t]|\Z)")
_QID = re.compile(rb"[ \t]++qid:[+-]?+\d{1,20}+(?=[ \t]|\Z)")
_ENTRY = re.compile(rb"[ \t]++(\d{1,20}+):" + _NUMBER + rb"(?=[ \t]|\Z)")
_ENTRIES = re.compile(rb"(?:[ \t]++\d{1,20}+:" + _NUMBER + rb")*+[ \t]*+\Z")
_NAN = re.compile(rb"(?<=:)nan(?=[ \t]|\Z)", re.IGNORECASE)  # a value, where it is accepted
_TOKEN = re.compile(rb"[ \t]*+([^ \t]*+)")
_FINITE = "a finite decimal number such as 3, -0.25 or 1e-4"


@dataclass(frozen=True)
class Rules:
    """What a text may hold."""

    wants_qid: bool = True
    limit: int = MAX_INDEX  # features there may be
    base: int = 1  # index of the first feature: 1 or 0
    nan: bool = False  # whether a value may be `nan`


@dataclass(frozen=True)
class Row:
    """A line that holds a document: features (from 1, in the line's order) and float32 values, one each."""

    label: float
    query: int
    indices: list[int]
    values: np.ndarray
    clamped: tuple[int, ...]  # columns of numbers beyond float32


class LineError(Exception):
    """A line that is not accepted: the reason, and the column (from 1) of the token it names."""

    def __init__(self, column: int, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


DEFAULT_RULES = Rules()


def read_line(line: bytes, rules: Rules = DEFAULT_RULES) -> Row | None:
    r"""The document of a line without its newline, or None for a blank line or a comment.

    >>> row = read_line(b"2 qid:7 1:0.5 4:1e-3 # title")
    >>> row.label, row.query, row.indices, row.values.tolist()
    (2.0, 7, [1, 4], [0.5, 0.0010000000474974513])
    >>> read_line(b"# nothing here")
    """
    if len(line) > MAX_LINE:
        raise LineError(
            1,
            f"the line starting with {quote(line)} is longer than {MAX_LINE >> 20} MiB; expected one document "
            "per line; check that the file is SVMLight text and its line ends were not lost",
        )
    body = line.removesuffix(b"\r").partition(b"#")[0]
    if not body.strip(b" \t"):
        return None
    row = _accept(body, rules)
    if row is None:
        raise _explain(body, rules)
    return row


def _accept(body: bytes, rules: Rules) -> Row | None:
    """The document of a line that keeps every rule, else None."""
    wants_qid, limit, missing = rules.wants_qid, rules.limit, []
    if rules.nan:
        missing = [found.start() for found in _NAN.finditer(body)]
        body = _NAN.sub(b"0.0", body)  # as long: columns stay
    found = _LABEL.match(body)
    if found is not None and wants_qid:
        found = _QID.match(body, found.end())
    if found is None or _ENTRIES.match(body, found.end()) is None:
        return None
    label, *parts = body.replace(b":", b" ").split()
    query = int(parts.pop(1)) if wants_qid else 0
    names, tokens = parts[wants_qid::2], [label, *parts[wants_qid + 1 :: 2]]
    indices = [int(name) + 1 - rules.base for name in names]
    numbers = np.array(list(map(float, tokens)))
    if (
        _is_negative(label)
        or query not in INT64
        or (indices and not 1 <= min(indices) <= max(indices) <= limit)
        or len(set(indices)) < len(indices)
        or np.isinf(numbers).any()
    ):
        return None
    values, beyond = _nearest_float32(tokens, numbers)
    clamped = np.flatnonzero(beyond).tolist()
    if clamped:
        starts = [found.start() + 1 for found in re.finditer(rb"[^ \t]++", body)]
        clamped = [starts[position + wants_qid if position else 0] for position in clamped]
    for start in missing:
        values[body.count(b":", 0, start) - wants_qid] = np.nan  # values[0] is the label
    return Row(float(values[0]), query, indices, values[1:], tuple(clamped))


def _explain(body: bytes, rules: Rules) -> LineError:
    """What is wrong with the leftmost bad token of a line that _accept does not take."""
    wants_qid, limit, shown = rules.wants_qid, rules.limit, body
    body = _NAN.sub(b"0.0", body) if rules.nan else body
    found = _LABEL.match(body)
    if found is None or _is_negative(found[0]) or math.isinf(float(found[0])):
        return _refuse_label(body)
    if wants_qid:
        start = found.end()
        found = _QID.match(body, start)
        if found is None or int(found[0].split(b":")[1]) not in INT64:
            return _refuse_qid(shown, start)
    seen = set()
    while True:
        start = found.end()
        found = _ENTRY.match(body, start)
        if found is None:
            return _refuse_entry(shown, start, wants_qid)
        index = int(found[1])
        if index < rules.base:
            return _refuse(
                shown,
                start,
                "has index 0; expected features numbered from 1; add one to every index, or say that they are numbered from 0 "
                "(zero_based=True in Python, --set data.zero_based=true in train)",
            )
        if index > limit - 1 + rules.base:
            return _refuse_wide(shown, start, limit, rules.base)
        if index in seen:
            return _refuse(shown, start, f"repeats feature {index}; expected each index at most once in a line")
        seen.add(index)
        if math.isinf(float(found[0].split(b":")[1])):
            return _refuse(body, start, f"has a value beyond the range of float64; expected {_FINITE}")


def _is_negative(number: bytes) -> bool:
    number = number.strip(b" \t")
    return number.startswith(b"-") and re.match(rb"[-.0]*+[1-9]", number) is not None


def clamped_column(line: bytes) -> int:
    """The column (from 1) of the first number beyond float32 in an accepted line, with qid or without."""
    row = read_line(line, Rules(re.match(rb"[^#]*[ \t]qid:", line) is not None, base=0, nan=True))
    assert row is not None
    return row.clamped[0]


def find_index(line: bytes, index: int) -> tuple[int, str]:
    """The column (from 1) of an index in an accepted line, and its token quoted."""
    for found in re.finditer(rb"(?<=[ \t])(\d++):[^ \t#]++", line):
        if int(found[1]) == index:
            return found.start() + 1, quote(found[0])
    raise LookupError(f"feature {index} is not in the line")


def quote(token: bytes) -> str:
    """A token as an error shows it: printable and short."""
    text = token[:41].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"'{text}'" if len(token) <= 40 else f"'{text[:40]}...'"


def _nearest_float32(tokens: Sequence[bytes], numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float32 nearest to each decimal token, given its float64, and which ones were clamped."""
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    beyond = np.isinf(values)
    values[beyond] = np.copysign(np.float32(MAX_FLOAT32), numbers[beyond])
    # A float64 exactly halfway between two float32 may come from a decimal beside the middle.
    rounded = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        others = np.nextafter(values, np.where(numbers > rounded, np.inf, -np.inf).astype(np.float32))
        halfway = (numbers != rounded) & ~beyond & (numbers - rounded == others.astype(np.float64) - numbers)
    for position in np.flatnonzero(halfway).tolist():
        exact, middle = Decimal(tokens[position].decode()), Decimal(float(numbers[position]))
        if exact != middle:
            pair = sorted((values[position], others[position]))
            values[position] = pair[exact > middle]
    return values, beyond


def _token(body: bytes, at: int) -> tuple[int, bytes]:
    found = _TOKEN.match(body, at)
    assert found is not None  # the pattern matches anything
    return found.start(1) + 1, found[1]


def _refuse(body: bytes, at: int, reason: str) -> LineError:
    column, token = _token(body, at)
    return LineError(column, f"{quote(token)} {reason}")


def _refuse_label(body: bytes) -> LineError:
    column, token = _token(body, 0)
    if odd := _odd_bytes(token):
        return LineError(column, odd)
    if _LABEL.match(body):
        if _is_negative(token):
            return LineError(column, f"label {quote(token)} is negative; expected a label of 0 or more")
        return LineError(column, f"label {quote(token)} is beyond the range of float64; expected {_FINITE}")
    if b":" in token:
        return LineError(
            column, f"{quote(token)} is in the place of the label; expected a line to begin with its label"
        )
    return LineError(column, f"label {quote(token)} is not {_FINITE}{_hint(token)}")


def _refuse_qid(body: bytes, at: int) -> LineError:
    column, token = _token(body, at)
    if odd := _odd_bytes(token):
        return LineError(column, odd)
    if re.fullmatch(rb"qid:[+-]?0*[0-9]{1,19}", token) and int(token[4:]) in INT64:
        return LineError(column, f"{quote(token)} has more than 20 digits; expected a number without the leading zeros")
    if re.fullmatch(rb"qid:[+-]?[0-9]+", token):
        return LineError(column, f"{quote(token)} is beyond 64 bits; expected a number from -2^63 to 2^63 - 1")
    if token.startswith(b"qid:"):
        return LineError(column, f"{quote(token)} is not qid:<integer>; expected a whole query number such as qid:17")
    if re.search(rb"[ \t]qid:", body[at:]):
        return LineError(
            column, f"{quote(token)} is between label and qid; expected qid:<integer> right after the label"
        )
    if not token:
        column, token = _token(body, 0)
    return LineError(
        column,
        f"no qid after the label, at {quote(token)}; expected qid:<integer>; "
        "where group sizes are in a side file, read_svmlight(FILE, groups=SIDE).save(FOLDER) in Python makes a folder of both",
    )


def _refuse_wide(body: bytes, at: int, limit: int, base: int) -> LineError:
    if limit == MAX_INDEX:
        return _refuse(body, at, f"has an index beyond {MAX_INDEX}; expected features numbered from {base} upwards")
    return _refuse(
        body,
        at,
        f"has an index beyond the {limit} features expected; give a file with features {base} to {limit - 1 + base} only",
    )


def _refuse_entry(body: bytes, at: int, wants_qid: bool) -> LineError:
    column, token = _token(body, at)
    if odd := _odd_bytes(token):
        return LineError(column, odd)
    name, colon, value = token.partition(b":")
    if name == b"qid" and colon:
        if wants_qid:
            return LineError(column, f"{quote(token)} comes again; expected one qid, right after the label")
        return LineError(column, f"{quote(token)} in a file read with groups=; expected no qid; leave groups= out")
    if not colon:
        return LineError(column, f"{quote(token)} is not index:value; expected features such as 3:0.25")
    if re.fullmatch(rb"[0-9]{21,}", name):
        return _refuse_wide(body, at, MAX_INDEX, base=1)
    if not re.fullmatch(rb"[0-9]+", name):
        return LineError(column, f"{quote(token)} has an index that is not a whole number from 1")
    missing = value.lower().lstrip(b"+-") in (b"nan", b"na", b"null", b"none", b"?", b"")
    hint = (
        "; leave a missing feature out of its line, or write nan for it and say so (missing=nan in Python, --set "
        "data.missing=nan in train)"
        if missing
        else _hint(value)
    )
    return LineError(column, f"{quote(token)} has a value that is not {_FINITE}{hint}")


def _odd_bytes(token: bytes) -> str | None:
    if b"\0" in token:
        return f"NUL byte in {quote(token)}; expected plain text; the file is binary, UTF-16 or damaged"
    try:
        token.decode()
    except UnicodeDecodeError:
        return f"{quote(token)} is not UTF-8 text; expected plain text; the file is binary or damaged"
    return None


def _hint(token: bytes) -> str:
    if token.count(b",") > 1 or b";" in token:
        return "; CSV files are for read_table"
    if b"," in token:
        return "; write a point for the decimal comma"
    if b"\r" in token:
        return "; a carriage return may only end a line"
    return ""
