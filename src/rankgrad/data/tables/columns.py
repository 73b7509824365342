"""Which columns of a table are features: by name, by pattern, without those to ignore; and which of them look like ids."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from rankgrad.data.tables.arrow import Table, import_pyarrow, is_text, plain

logger = logging.getLogger(__name__)

FEWEST_ROWS = 8  # of which a column that is different in every one of them looks like an id
SAMPLE = 4096  # rows looked at first: nearly all columns that are not ids show it there
_NO_NAME = re.compile(r"\s*|Unnamed: \d+(_level_\d+)?|__index_level_\d+__")  # what pandas calls an index without a name


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a column has one of these names, or matches one of them as a pattern of *, ? and [...].

    >>> matches("tf_title", ["bm25", "tf_*"]), matches("a[1]", ["a[1]"])
    (True, True)
    """
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def choose_columns(columns: Sequence[str], chosen: Sequence[str], ignored: Sequence[str], source: str) -> list[str]:
    """Those of a table's columns, in the order of `chosen`: a name, or a pattern, which takes columns in the table's order.

    A name that the table does not have is kept, for the caller to miss it; a pattern that finds nothing is refused. A column that a name and
    a pattern find is taken once.

    >>> choose_columns(["a1", "b", "a2"], ["b", "a*", "a1"], ["a2"], "the table")
    ['b', 'a1']
    """
    names: list[str] = []
    of_patterns: set[str] = set()
    for one in chosen:
        if one in columns or not re.search(r"[*?\[]", one):
            names += [] if one in of_patterns else [one]
            continue
        found = [name for name in columns if fnmatchcase(name, one)]
        if not found:
            raise ValueError(
                f"no column of {source} matches the pattern {one!r} of its features; expected one that does; its columns are "
                f"{listing(columns)}"
            )
        of_patterns.update(found)
        names += [name for name in found if name not in names]
    return [name for name in names if not matches(name, ignored)]


def warn_of_unused(tables: Sequence[Table], patterns: Sequence[str], purpose: str) -> None:
    """Say which names and patterns, given for this purpose, are those of no column."""
    columns = [name for table in tables for name in table.arrow.column_names]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in columns):
            warnings.warn(
                f"{tables[0].name} has no column {pattern!r} {purpose}; its columns are {listing(columns)}",
                stacklevel=4,
            )


def warn_of_ids(tables: Sequence[Table], names: Sequence[str], named: Sequence[str]) -> None:
    """Say which columns look like ids of rows: those without a name, and those that are different in every row.

    - `names`: the columns that are learned from; `named`: those that were chosen by name, of which nothing is said.
    """
    for name in tables[0].arrow.column_names:
        where, nameless = f"{tables[0].name}, column {name!r}", _NO_NAME.fullmatch(name) is not None
        if name in named:
            continue
        if name not in names:
            if nameless:
                logger.warning("%s is a row index without a name and is left out", where)
            continue
        if nameless:
            what = "is a row index without a name"
        elif all(_unique(table, name) for table in tables):
            what = "is different in every row, as an id is"
        else:
            continue
        warnings.warn(
            f"{where} {what}, and it is taken for a feature; to leave it out: --set 'data.ignore=[\"{name}\"]' in train, "
            "ignore= in Python; to keep it, name it among the features",
            stacklevel=4,
        )


def _unique(table: Table, name: str) -> bool:
    """Whether a column of whole numbers or texts is different in every row."""
    column = plain(table.arrow[name])
    if len(column) < FEWEST_ROWS or column.null_count:
        return False
    return _distinct(column[:SAMPLE]) and (len(column) <= SAMPLE or _distinct(column))


def _distinct(column: Any) -> bool:
    pyarrow = import_pyarrow()
    types, compute = pyarrow.types, pyarrow.compute
    if types.is_floating(column.type):
        values = np.asarray(column.to_numpy())
        if not (values == np.rint(values)).all():
            return False
    elif not (types.is_integer(column.type) or is_text(column.type)):
        return False
    return compute.count_distinct(column).as_py() == len(column)


def listing(names: Iterable[str]) -> str:
    """The first dozen names, quoted."""
    names = list(names)
    shown = ", ".join(map(repr, names[:12]))
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
