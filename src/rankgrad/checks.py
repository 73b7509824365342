"""Checks of plain parameters (numbers, cut-offs, choices). Imports nothing of rankgrad.

A message names the argument, what was expected and what came.
"""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any


def positive(name: str, value: Any) -> float:
    """A finite number above zero.

    >>> positive("tau", 0)
    Traceback (most recent call last):
    ...
    ValueError: tau must be a finite number above 0, got 0
    """
    number = _number(name, value, "a finite number above 0")
    if not number > 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return number


def non_negative(name: str, value: Any) -> float:
    """A finite number, zero or above."""
    number = _number(name, value, "a finite number, 0 or above")
    if number < 0:
        raise ValueError(f"{name} must be a finite number, 0 or above, got {value!r}")
    return number


def whole(name: str, value: Any, minimum: int | None = None) -> int:
    """A whole number of at most 64 bits, `minimum` or above; of any integer type, numpy's too, but no bool or float.

    >>> whole("seed", 3.0)
    Traceback (most recent call last):
    ...
    ValueError: seed must be a whole number, got 3.0
    """
    number = _integer(value)
    if number is None or (minimum is not None and number < minimum):
        bound = "" if minimum is None else f", {minimum} or above"
        raise ValueError(f"{name} must be a whole number{bound}, got {value!r}")
    if not -(2**63) <= number < 2**64:  # numpy has signed and unsigned ones
        raise ValueError(f"{name} must be a whole number within 64 bits, got {value!r}")
    return number


def cutoff(value: Any) -> int | None:
    """A rank cut-off k: None for the whole list, or a whole number from 1.

    >>> cutoff(0)
    Traceback (most recent call last):
    ...
    ValueError: k must be None (the whole list) or a whole number, 1 or above, got 0
    """
    if value is None:
        return None
    number = _integer(value)
    if number is None or number < 1:
        raise ValueError(f"k must be None (the whole list) or a whole number, 1 or above, got {value!r}")
    return min(number, 2**31)  # no list is longer, and torch takes no integer beyond 64 bits


def probability(name: str, value: Any) -> float:
    """A number from 0 up to but not including 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number from 0 up to but not including 1, got {value!r}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False, nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of a few words.

    >>> one_of("kind", "MLP", ("mlp", "linear"))
    Traceback (most recent call last):
    ...
    ValueError: kind must be one of 'mlp', 'linear', got 'MLP'; did you mean 'mlp'?
    """
    words = list(choices)
    if not isinstance(value, str) or value not in words:
        near = difflib.get_close_matches(value.strip().lower(), words, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}{hint}")
    return value


def _integer(value: Any) -> int | None:
    """The int that an integer of any type stands for; None where the value is no integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _number(name: str, value: Any, expected: str) -> float:
    number = float(value) if isinstance(value, float) else _converted(name, value, expected)
    if not -math.inf < number < math.inf:  # written so that torch.compile can trace it
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def _converted(name: str, value: Any, expected: str) -> float:
    """The number that a value of another type stands for, NaN where it stands for none."""
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{name} must be {expected}, not a tensor to be learned: no gradient flows to it")
    try:
        return math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
