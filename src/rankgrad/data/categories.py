"""Columns whose values are categories: what a value is called, and which code stands for it.

A category is known by its text, so that frames, tables and files of any kind mean the same by it, whatever order they hold their
levels in. A dataset holds codes, whole numbers in float32, and the texts they stand for; NaN is a missing value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

Levels = Mapping[int, tuple[str, ...]]  # by column: the texts that its codes 0, 1, ... stand for
NO_LEVELS: Levels = {}

WORDS_FOR_NULL = ("na", "n/a", "null", "none", "nan")
_TYPES = ("category", "categorical", "enum", "dictionary", "string", "large_string", "utf8", "str", "bool")
_NUMBER = re.compile(r"\s*[+-]?[\d.,_xX]*\d[\d.,_xX]*([eE][+-]?\d+)?\s*")  # and what may be meant for one
_TRUTH = {"1": "true", "0": "false"}
_WHOLE, _FRACTION = re.compile(r"([+-]?\d+)\.0+"), re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?")


def text_of(value: Any) -> str | None:
    """What a category is called; None where it is missing: None, NaN, a frame's NA, the empty text.

    >>> [text_of(value) for value in (True, 3, 3.0, 0.5, "x", None, math.nan, "")]
    ['true', '3', '3', '0.5', 'x', None, None, None]
    """
    if isinstance(value, str):
        return value or None
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        if math.isnan(value):
            return None
        return str(int(value)) if float(value).is_integer() else str(float(value))
    return str(value)


def encoded(values: Iterable[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Codes [N] float32 of values, NaN where missing, and the texts they stand for, in the order they came.

    >>> codes, levels = encoded(["b", None, "a", "b"])
    >>> codes.tolist(), levels
    ([0.0, nan, 1.0, 0.0], ('b', 'a'))
    """
    coder = Coder()
    return coder.codes(values), coder.levels


class Coder:
    """Gives codes to values that come part by part: a text has the code that it was given first.

    >>> coder = Coder()
    >>> coder.codes(["b", "a"]).tolist(), coder.codes(["c", "a"]).tolist(), coder.levels
    ([0.0, 1.0], [2.0, 1.0], ('b', 'a', 'c'))
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    @property
    def levels(self) -> tuple[str, ...]:
        """The texts that 0, 1, ... stand for."""
        return tuple(self._known)

    def codes(self, values: Iterable[Any]) -> np.ndarray:
        """Codes [N] float32, NaN where a value is missing."""
        texts = [text_of(value) for value in values]
        if not self._known and {*texts} - {None} and {*texts} <= {"false", "true", None}:
            self._known = {"false": 0, "true": 1}  # as if they were numbers
        known = self._known
        codes = [math.nan if text is None else known.setdefault(text, len(known)) for text in texts]
        return np.array(codes, np.float32)


def code_map(source: Sequence[str], target: Sequence[str]) -> np.ndarray:
    """For each text of a source its place in a target, [S] int64; -1 where it is not there.

    Truth values are known as numbers and in any case too: tables and text write them so. A number that is not there is looked for as the
    same number written otherwise.

    >>> code_map(("b", "c", "a"), ("a", "b")).tolist(), code_map(("True", "0"), ("false", "true")).tolist()
    ([1, -1, 0], [1, 0])
    >>> code_map(("1", "2.5", "2"), ("1.0", "2", "2.0")).tolist()
    [0, -1, 1]
    """
    places = {text: place for place, text in enumerate(target)}
    if places and set(places) <= {"true", "false"}:
        source = [_TRUTH.get(text, text.lower()) for text in source]
    found = [places.get(text, -1) for text in source]
    if -1 in found:
        otherwise = {text: place for one, place in reversed(places.items()) if (text := _written_otherwise(one))}
        written = [_written_otherwise(text) for text in source]
        found = [
            otherwise.get(text, places.get(other, -1)) if place < 0 else place
            for text, other, place in zip(source, written, found)
        ]
    return np.array(found, np.int64)


def _written_otherwise(text: str) -> str:
    """A number as other files may have it, else the empty text: 3.0 as 3, and what is rounded to float32 in all its digits.

    >>> _written_otherwise("3.0"), _written_otherwise("0.1"), _written_otherwise("v0.1")
    ('3', '0.10000000149011612', '')
    """
    if whole := _WHOLE.fullmatch(text):
        return whole[1]
    return str(float(np.float32(text))) if _FRACTION.fullmatch(text) else ""


def recoded(codes: np.ndarray, source: Sequence[str], target: Sequence[str]) -> np.ndarray:
    """Codes [N] float32 of a source's texts as those of a target's; -1 where it lacks the text, NaN stays."""
    places = np.append(code_map(source, target), -1).astype(np.float32)
    known = (codes >= 0) & (codes < len(source))  # NaN is neither
    return np.where(np.isnan(codes), np.float32(np.nan), places[np.where(known, codes, len(source)).astype(np.int64)])


def look_like_numbers(texts: Iterable[str]) -> bool:
    """Whether a column of texts is more likely one of numbers with a mistake in it: half of the distinct ones look like numbers.

    >>> look_like_numbers(["red", "2XL", "green"]), look_like_numbers(["0.5", "?", "nan"])
    (False, True)
    """
    distinct = set(texts)
    numbers = sum(text.lower() in WORDS_FOR_NULL or _NUMBER.fullmatch(text) is not None for text in distinct)
    return bool(distinct) and 2 * numbers >= len(distinct)


def is_named(name: str, place: int, patterns: Sequence[str | int]) -> bool:
    """Whether a column is among those named by patterns such as "brand_*", or by place.

    >>> is_named("brand_id", 0, ["brand_*"]), is_named("price", 3, [3]), is_named("price", 3, ["brand_*"])
    (True, True, False)
    >>> is_named("a[1]", 0, ["a[1]"])
    True
    """
    return any(
        name == one or fnmatchcase(name, one) if isinstance(one, str) else place == one and not isinstance(one, bool)
        for one in patterns
    )


def expect_columns(names: Sequence[Any], categorical: Sequence[str | int]) -> None:
    """Refuse names, patterns and places of categories that no column has: it would be taken for numbers without a word."""
    if isinstance(categorical, str):
        raise ValueError(
            f"categorical is the text {categorical!r}; expected a list of names, patterns or places, such as [{categorical!r}]"
        )
    for one in categorical:
        if not any(is_named(str(name), place, [one]) for place, name in enumerate(names)):
            shown = ", ".join(repr(str(name)) for name in names[:12]) + (" and more" if len(names) > 12 else "")
            raise ValueError(
                f"categorical holds {one!r}, and no column of X is called so or has that place; expected one of {shown}, or a place "
                f"from 0 to {len(names) - 1}"
            )


def is_category_type(kind: Any) -> bool:
    """Whether a column's type, of pandas, polars or pyarrow, says that it holds categories, texts or truth values.

    >>> is_category_type("category"), is_category_type(np.dtype(bool)), is_category_type(np.dtype(float))
    (True, True, False)
    """
    return re.split(r"[^a-z_0-9]", str(kind).lower())[0].removesuffix("ean") in _TYPES


# --- frames -----------------------------------------------------------------------------------------------------------


def is_frame(X: Any) -> bool:
    """Whether X is a frame of pandas or polars, or a table of pyarrow."""
    return hasattr(X, "columns") and hasattr(X, "shape")


def frame_names(X: Any) -> list[Any]:
    """What the columns of a frame are called."""
    return list(getattr(X, "column_names", X.columns))


def split_frame(
    X: Any, categorical: Sequence[str | int] | None, places: Iterable[int] | None = None
) -> tuple[Any, dict[int, tuple[np.ndarray, tuple[str, ...]]]]:
    """X without its columns of categories, and by place those columns' codes [N] and levels.

    - `categorical`: names, patterns or places of columns beside those that a frame's types tell.
    - `places`: of all columns that are categories, where that is known already.
    """
    frame = is_frame(X)
    named = () if categorical is None else categorical
    if not frame and not hasattr(X, "ndim"):
        X = np.asarray(X, dtype=object) if len(named) or places else X
    count = X.shape[1] if getattr(X, "ndim", 2) == 2 and hasattr(X, "shape") else 0
    names = frame_names(X) if frame else list(range(count))
    if places is None and count:
        expect_columns(names, named)
    chosen = [place for place in range(count) if _holds_categories(X, names, place, named, places)]
    found = {place: encoded(_values(X, place)) for place in chosen}
    if chosen:
        rest = [place for place in range(count) if place not in found]
        if hasattr(X, "iloc"):
            X = X.iloc[:, rest]
        else:
            X = X.select([names[place] for place in rest]) if frame else X[:, rest]
    if frame:
        _expect_no_times(X)
    return _without_na(X), found


def _without_na(X: Any) -> Any:
    """The same with NaN for NA of pandas, which numpy makes no number of, in arrays and columns of objects."""
    if hasattr(X, "iloc"):
        objects = [place for place, kind in enumerate(X.dtypes) if str(kind) == "object"]
        for place in objects:
            X = X.copy(deep=False) if place == objects[0] else X
            X.isetitem(place, _without_na(X.iloc[:, place].to_numpy()))
    elif isinstance(X, np.ndarray) and X.dtype.kind == "O":
        is_na = np.array([type(value).__name__ == "NAType" for value in X.flat], bool).reshape(X.shape)
        X = np.where(is_na, math.nan, X) if is_na.any() else X
    return X


def blame_a_column(X: Any) -> None:
    """Say which column of a frame, or of an array of objects, holds no numbers, where one does."""
    frame = is_frame(X)
    if frame:
        columns = [(f"column {name!r}", X[name]) for name in frame_names(X)]
    elif isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind == "O":
        columns = [(f"column {place}", X[:, place]) for place in range(X.shape[1])]
    else:
        return
    for name, column in columns:
        try:
            values = np.asarray(column)
            good = values.dtype.kind not in "mMc"
            values.astype(np.float64) if good else None
        except TypeError:  # of what is no text either: of arrays scikit-learn expects numpy's own words
            good = not frame
        except ValueError:
            good = False
        if not good and np.ndim(column) == 1:
            raise _no_numbers(name, getattr(column, "dtype", getattr(column, "type", "other"))) from None


def _expect_no_times(X: Any) -> None:
    """Refuse columns of dates, times and spans of time, which numpy takes for numbers of micro- or nanoseconds."""
    for place, name in enumerate(frame_names(X)):
        if str(_kind(X, place)).lower().startswith(("date", "time", "duration")):
            raise _no_numbers(f"column {name!r}", _kind(X, place))


def _no_numbers(name: str, kind: Any) -> ValueError:
    return ValueError(
        f"{name} of X holds {kind} values that are no numbers; expected numbers, NaN where one is missing; turn it into numbers, name "
        "it in categorical, or leave it out"
    )


def numbers_of(X: Any) -> np.ndarray:
    """An array, or the numbers of a frame, NaN where one is missing."""
    if not is_frame(X):
        return np.asarray(X)
    if hasattr(X, "iloc"):
        return X.to_numpy(dtype=np.float64, na_value=np.nan)
    if hasattr(X, "column_names"):
        columns = [column.to_numpy().astype(np.float64) for column in X.columns]
        return np.stack(columns, 1) if columns else np.empty((X.num_rows, 0))
    return X.to_numpy().astype(np.float64)


def with_codes(numbers: np.ndarray, found: Mapping[int, tuple[np.ndarray, tuple[str, ...]]]) -> np.ndarray:
    """All columns again, [N, F] float64: numbers in their order, codes at their places."""
    count = numbers.shape[1] + len(found)
    whole = np.empty((len(numbers), count))
    whole[:, [place for place in range(count) if place not in found]] = numbers
    for place, (codes, _) in found.items():
        whole[:, place] = codes
    return whole


def _values(X: Any, place: int) -> Iterable[Any]:
    if hasattr(X, "iloc"):
        return X.iloc[:, place]
    if hasattr(X, "column_names"):
        return X.column(place).to_pylist()
    return X.to_series(place) if is_frame(X) else X[:, place]


def _holds_categories(
    X: Any,
    names: Sequence[Any],
    place: int,
    categorical: Sequence[str | int],
    places: Iterable[int] | None,
) -> bool:
    if places is not None:
        return place in places
    if is_named(str(names[place]), place, categorical):
        return True
    if not is_frame(X):
        return False
    kind = str(_kind(X, place)).lower()
    if kind == "object" or kind.startswith(("str", "large_str", "utf8")):
        values = [*_values(X, place)]
        odd = kind != "object" or any(isinstance(value, str | bool) for value in values)
        return odd and not look_like_numbers(text for text in map(text_of, values) if text)
    return is_category_type(kind)


def _kind(X: Any, place: int) -> Any:
    """The type of a column."""
    if hasattr(X, "iloc"):
        return X.dtypes.iloc[place]
    return X.schema.field(place).type if hasattr(X, "column_names") else X.dtypes[place]
