"""What a number that a caller hands in may be. Pure functions; numpy only."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

MAX_FLOAT32 = float(np.finfo(np.float32).max)
INT64 = range(-(2**63), 2**63)


def as_whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer of any kind (numpy's too) as an int within 64 bits; floats, texts and booleans are refused.

    >>> as_whole("seed", np.int64(3))
    3
    """
    expected = "a whole number" if least is None else f"a whole number, {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected {expected}; pass an int") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected {expected}; pass an int")
    if not -(2**63) <= number < 2**64:  # numpy knows signed and unsigned ones
        raise ValueError(f"{name} is {number}; expected {expected} within 64 bits")
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; expected {expected}")
    return number


def as_missing(value: Any) -> float:
    """What a reader writes where a feature is missing: a number that float32 holds, or NaN.

    >>> as_missing(0)
    0.0
    """
    try:
        number = float(value) if not isinstance(value, str | bytes | bool) else math.inf
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if abs(number) > MAX_FLOAT32:  # NaN is not
        raise ValueError(f"missing is {value!r}; expected a number of at most 3.4e38 or NaN, such as 0.0")
    return number
