"""Tables with named columns -> RankingDataset: Parquet, CSV, Arrow files, and frames of pandas, polars, pyarrow.

This file may read files through pyarrow, an extra that is imported when a table is read; pandas and polars are
never imported. Every table becomes an Arrow table first, so that all kinds pass the same checks. Errors name the
source, the row (counted from 1, a CSV header not counted) and the column.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rankgrad.data.arrays import group_rows
from rankgrad.data.dataset import RankingDataset

ROWS = 1 << 14  # rows turned into features at a time: a block of all columns stays in the cache
LARGEST = np.finfo(np.float32).max


class Table(NamedTuple):
    """An Arrow table and what to call it in errors."""

    name: str
    arrow: Any


def read_table(
    source: Any,
    *,
    label: str = "label",
    qid: str = "qid",
    features: Sequence[str] | None = None,
    weight: str | None = None,
    missing: float = 0.0,
    scattered: Literal["group", "refuse"] = "group",
) -> RankingDataset:
    """Read one table or several, one row per document, into a dataset.

    - `source`: a path (.parquet, .csv, .tsv, also .gz, .bz2 or .zst; .arrow, .feather, .ipc), a pyarrow Table, a
      pandas or polars DataFrame, or a list of these, read as one table.
    - `features`: the feature columns, in this order; None takes all columns but `label`, `qid` and `weight` in the
      order of the first table (of the columns in which pandas stores a row index, none). They must be numbers or
      booleans. Null and NaN become `missing`; infinity is refused; what is finite but beyond float32 becomes the
      largest float32, counted in `provenance["clamped"]`.
    - `label`: numbers, finite, not negative. `qid`: integers or text. `weight`: one number per query, the same in
      all its rows. None of them may be null.
    - `scattered`: rows of a query that are not together are grouped at the place of its first row, or refused;
      `in_source_order` puts results back.

    >>> import pyarrow
    >>> table = pyarrow.table({"qid": ["b", "b", "a"], "label": [1, 0, 2], "bm25": [0.5, None, 2.0]})
    >>> data = read_table(table)
    >>> data.query_ids.tolist(), data.feature_names, data.features.tolist()
    (['b', 'a'], ('bm25',), [[0.5], [0.0], [2.0]])
    """
    if scattered not in ("group", "refuse"):
        raise ValueError(f"scattered is {scattered!r}; expected 'group' or 'refuse'")
    roles = [name for name in (label, qid, weight) if name is not None]
    wanted = None if features is None else {*roles, *features}
    tables = [_open(one, number, qid, wanted) for number, one in enumerate(_several(source))]
    names = _feature_names(tables, roles, features)
    total = sum(table.arrow.num_rows for table in tables)
    if total == 0:
        raise ValueError(f"{tables[0].name} has no rows; expected one row per document")
    matrix = np.empty((total, len(names)), np.float32)
    counts = {"missing": 0, "clamped": 0}
    done = 0
    for table in tables:
        part = matrix[done : done + table.arrow.num_rows]
        for name, count in _fill(part, table, names, missing).items():
            counts[name] += count
        done += table.arrow.num_rows
    labels = np.concatenate([_amounts(table, label) for table in tables])
    order, offsets, query_ids = _group(tables, qid, scattered)
    weights = None
    if weight is not None:
        weights = np.concatenate([_amounts(table, weight) for table in tables])
    if order is not None:
        matrix, labels = matrix[order], labels[order]
        weights = None if weights is None else weights[order]
    return RankingDataset(
        matrix,
        labels,
        offsets,
        query_ids,
        tuple(names),
        None if weights is None else _one_per_query(weights, offsets, query_ids, weight),
        order,
        {"sources": [table.name for table in tables], "rows": total, **counts},
    )


def _several(source: Any) -> list[Any]:
    several = list(source) if isinstance(source, list | tuple) else [source]
    if not several:
        raise ValueError("no table was given; expected a path, a table, or a list of them")
    return several


def _open(source: Any, number: int, qid: str, wanted: set[str] | None) -> Table:
    """An Arrow table of a path or a frame, with a duplicate column name refused."""
    pyarrow = _pyarrow()
    package = type(source).__module__.split(".")[0]
    name = f"the {package} table" if number == 0 else f"{package} table {number + 1}"
    if isinstance(source, str | os.PathLike):
        table = Table(os.fspath(source), _read_file(Path(source), qid, wanted))
    elif isinstance(source, pyarrow.Table):
        table = Table(name, source)
    elif package == "pandas" and hasattr(source, "columns"):
        table = Table(name, _of_pandas(source))
    elif hasattr(source, "__arrow_c_stream__"):
        table = Table(name, pyarrow.table(source))
    else:
        raise ValueError(
            f"cannot read a table from {type(source).__name__}; expected a path, a pyarrow Table, "
            "or a pandas or polars DataFrame"
        )
    columns = table.arrow.column_names
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"{table.name} has several columns named {twice[0]!r}; expected distinct names; rename one")
    return table


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading tables needs pyarrow; pip install 'rankgrad[tables]'") from error
    return pyarrow


def _of_pandas(frame: Any) -> Any:
    pyarrow = _pyarrow()
    try:
        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise ValueError(f"cannot read the pandas frame: {error}; expected columns of one type each") from error


def _read_file(path: Path, qid: str, wanted: set[str] | None) -> Any:
    pyarrow = _pyarrow()
    kind = next((s for s in reversed(path.suffixes) if s.lower() not in (".gz", ".bz2", ".zst")), "").lower()
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file; give the list of its files")
    try:
        if kind in (".parquet", ".pq"):
            return pyarrow.parquet.ParquetFile(path).read()
        if kind in (".csv", ".tsv"):
            return _read_csv(path, "," if kind == ".csv" else "\t", qid, wanted)
        if kind in (".arrow", ".feather", ".ipc"):
            return _read_arrow(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"cannot read {path} as {kind[1:]}: {error}; expected a sound file of that kind") from error
    raise ValueError(f"{path} has no known ending; expected .parquet, .csv, .tsv, .arrow, .feather or .ipc")


def _read_csv(path: Path, delimiter: str, qid: str, wanted: set[str] | None) -> Any:
    """Numbers are asked for as float64: left to itself, pyarrow takes 0x10 for an integer."""
    pyarrow = _pyarrow()
    csv, types, parse = pyarrow.csv, pyarrow.types, pyarrow.csv.ParseOptions(delimiter=delimiter)

    def read(kinds: dict[str, Any]) -> Any:
        convert = csv.ConvertOptions(column_types=kinds | {qid: pyarrow.large_string()})
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            return csv.read_csv(stream, parse_options=parse, convert_options=convert)

    with pyarrow.input_stream(str(path), compression="detect") as stream:
        guess = csv.open_csv(stream, parse_options=parse).schema  # from the beginning of the file
    tests = (types.is_integer, types.is_floating, types.is_null)
    numbers = [f.name for f in guess if (wanted is None or f.name in wanted) and any(t(f.type) for t in tests)]
    try:
        table = read(dict.fromkeys(numbers, pyarrow.float64()))
    except pyarrow.ArrowInvalid as error:
        column = re.search(r"column #(\d+)", str(error))
        if column is not None:  # the column is known but not the row: look for it among the texts
            name = guess.names[int(column[1])]
            _expect_numbers(Table(str(path), read({name: pyarrow.large_string()})), name)
        raise
    if table.column_names.count(qid) != 1:
        return table  # the check of the columns will say so
    return table.set_column(table.column_names.index(qid), qid, _ids_of_texts(table[qid]))


def _ids_of_texts(texts: Any) -> Any:
    """Texts that all are numbers as numbers, without a guess at 007; the empty text as null."""
    pyarrow = _pyarrow()
    compute = pyarrow.compute
    texts = compute.utf8_trim_whitespace(texts)
    texts = compute.if_else(compute.equal(texts, ""), None, texts)
    if not compute.any(compute.match_substring_regex(texts, r"^[+-]?0\d|[xX_]")).as_py():
        for kind in (pyarrow.int64(), pyarrow.float64()):
            try:
                return texts.cast(kind)
            except pyarrow.ArrowInvalid:
                continue
    return texts


def _read_arrow(path: Path) -> Any:
    """Arrow files come in two formats under the same endings: with a table of contents, or as a stream."""
    pyarrow = _pyarrow()
    with pyarrow.memory_map(str(path)) as file:
        try:
            return pyarrow.ipc.open_file(file).read_all()
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return pyarrow.ipc.open_stream(file).read_all()


def _feature_names(tables: list[Table], roles: list[str], features: Sequence[str] | None) -> list[str]:
    """The feature columns, after checking that every table has all the columns it needs."""
    if isinstance(features, str):
        raise ValueError(f"features is the text {features!r}; expected a list of column names")
    columns = _named_columns(tables[0])
    names = [name for name in columns if name not in roles] if features is None else list(features)
    if len(set(names + roles)) < len(names + roles):
        twice = next(name for name in names + roles if (names + roles).count(name) > 1)
        raise ValueError(f"column {twice!r} is named twice among features, label, qid and weight; name it once")
    for table in tables:
        own = table.arrow.column_names
        for name in roles + names:
            if name not in own:
                near = difflib.get_close_matches(name, own, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"{table.name} has no column {name!r}; {hint}its columns are {_listing(own)}")
        extra = [] if features is not None else [name for name in _named_columns(table) if name not in columns]
        if extra:
            raise ValueError(
                f"{table.name} has a column {extra[0]!r} that {tables[0].name} has not; "
                "expected the same columns in all tables; choose with features="
            )
    if not names:
        raise ValueError(f"{tables[0].name} has no feature columns beside {_listing(roles)}; expected at least one")
    return names


def _named_columns(table: Table) -> list[str]:
    """All columns except those in which pandas stores the index of a frame."""
    stored = (table.arrow.schema.pandas_metadata or {}).get("index_columns", [])
    names = table.arrow.column_names
    return [name for name in names if name not in stored and not name.startswith("__index_level_")]


def _fill(matrix: np.ndarray, table: Table, names: list[str], missing: float) -> dict[str, int]:
    """Write the columns into matrix [rows, F] as float32; count missing and clamped values."""
    counts = {"missing": 0, "clamped": 0}
    for name in names:
        _expect_numbers(table, name)
    begin = 0
    for batch in table.arrow.select(names).to_batches(max_chunksize=ROWS):
        block = matrix[begin : begin + batch.num_rows]
        for j, column in enumerate(batch.columns):
            values = _numbers(column)
            if np.isinf(values).any():
                row = begin + int(np.argmax(np.isinf(values)))
                raise ValueError(f"{_at(table, row, names[j])} is infinite; expected a finite number or null")
            with np.errstate(over="ignore"):
                numbers = values.astype(np.float32)
            absent, beyond = np.isnan(numbers), np.isinf(numbers)
            counts["missing"] += int(absent.sum())
            counts["clamped"] += int(beyond.sum())
            numbers[absent] = missing
            numbers[beyond] = np.copysign(LARGEST, numbers[beyond])
            block[:, j] = numbers
        begin += batch.num_rows
    return counts


def _expect_numbers(table: Table, name: str) -> None:
    types = _pyarrow().types
    column = _plain(table.arrow[name])
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null)
    if not any(test(column.type) for test in tests):
        values = column.to_pylist()
        row = next((i for i, value in enumerate(values) if not _reads_as_number(value)), 0)
        raise ValueError(
            f"{_at(table, row, name)} is {values[row]!r}, in a column of type {column.type}; expected numbers; "
            "convert the column, or leave it out with features="
        )


def _numbers(column: Any) -> np.ndarray:
    """A column of numbers or booleans as a numpy array; null is NaN."""
    pyarrow = _pyarrow()
    types, column = pyarrow.types, _plain(column)
    if types.is_decimal(column.type) or types.is_null(column.type):
        column = column.cast(pyarrow.float64())
    elif types.is_boolean(column.type):
        column = column.cast(pyarrow.uint8())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _plain(column: Any) -> Any:
    """Categories as the values they stand for, text in one type."""
    pyarrow = _pyarrow()
    types = pyarrow.types
    if isinstance(column, pyarrow.ChunkedArray) and types.is_dictionary(column.type):
        kind = pyarrow.large_string() if _is_text(column.type.value_type) else column.type.value_type
        return pyarrow.chunked_array([_plain(chunk) for chunk in column.chunks], kind)
    if types.is_dictionary(column.type):
        return _plain(column.dictionary).take(column.indices)
    return column.cast(pyarrow.large_string()) if _is_text(column.type) else column


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _reads_as_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return value is None or value == ""
    return "_" not in str(value)


def _amounts(table: Table, name: str) -> np.ndarray:
    """A column of labels or weights: float32, finite, not negative."""
    _expect_numbers(table, name)
    values = _numbers(table.arrow[name])
    good = (values >= 0) & (values <= LARGEST)  # NaN is neither
    if not good.all():
        row = int(np.argmin(good))
        said = "missing" if np.isnan(values[row]) else values[row]
        raise ValueError(f"{_at(table, row, name)} is {said}; expected a number from 0 to 3.4e38")
    return values.astype(np.float32)


def _group(tables: list[Table], qid: str, scattered: str) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Order, offsets and query ids of all rows, as `group_rows` gives them."""
    pyarrow = _pyarrow()
    parts = [_query_ids(table, qid) for table in tables]
    if len({isinstance(part, np.ndarray) for part in parts}) == 2:
        raise ValueError(f"column {qid!r} is text in one table and a number in another; expected one kind in all")
    if isinstance(parts[0], np.ndarray):
        ids = np.concatenate(parts)
        order, offsets, query_ids = group_rows(ids)
    else:
        # Texts are compared as codes: an array of N texts would take room for N times the longest.
        texts = pyarrow.chunked_array([c for part in parts for c in part.chunks], pyarrow.large_string())
        coded = texts.combine_chunks().dictionary_encode()
        ids = coded.indices.to_numpy()
        order, offsets, codes = group_rows(ids)
        query_ids = np.array(coded.dictionary.to_pylist(), dtype=np.str_)[codes]
    if order is not None and scattered == "refuse":
        row = _first_return(ids)
        for table in tables:
            if row < table.arrow.num_rows:
                break
            row -= table.arrow.num_rows
        raise ValueError(
            f"{_at(table, row, qid)} returns to query {table.arrow[qid][row].as_py()!r} after another query; "
            "expected the rows of a query together; sort them, or pass scattered='group'"
        )
    return order, offsets, query_ids


def _query_ids(table: Table, name: str) -> Any:
    """A column of query ids: int64 array, or Arrow texts."""
    pyarrow = _pyarrow()
    types, column = pyarrow.types, _plain(table.arrow[name])
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise ValueError(f"{_at(table, row, name)} is missing; expected the id of the row's query")
    if _is_text(column.type):
        empty = pyarrow.compute.equal(column, "").to_numpy()
        if empty.any():
            raise ValueError(f"{_at(table, int(np.argmax(empty)), name)} is an empty text; expected a query id")
        return column
    if types.is_integer(column.type) or (types.is_decimal(column.type) and column.type.scale == 0):
        try:
            return np.asarray(column.cast(pyarrow.int64()).to_numpy())
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{table.name}, column {name!r}: {error}; expected ids of 64 bits") from error
    if types.is_floating(column.type):
        values = np.asarray(column.to_numpy(), np.float64)
        whole = (np.abs(values) <= 2**53) & (values == np.rint(values))  # beyond, floats skip integers
        if not whole.all():
            row = int(np.argmin(whole))
            raise ValueError(
                f"{_at(table, row, name)} is {float(values[row])!r}, a floating-point number that is no safe integer; "
                "expected integers or text; convert the column"
            )
        return values.astype(np.int64)
    raise ValueError(f"{table.name}, column {name!r} has type {column.type}; expected integers or text; convert it")


def _first_return(ids: np.ndarray) -> int:
    """The first row whose id has been seen before the row above it."""
    starts = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    _, first = np.unique(ids[starts], return_index=True)
    return int(np.delete(starts, first)[0])


def _one_per_query(values: np.ndarray, offsets: np.ndarray, ids: np.ndarray, name: str | None) -> np.ndarray:
    weights = values[offsets[:-1]]
    differs = values != np.repeat(weights, np.diff(offsets))
    if differs.any():
        query = int(np.searchsorted(offsets, np.argmax(differs), side="right")) - 1
        raise ValueError(f"column {name!r} has several values within query {ids[query]}; expected one weight per query")
    return weights


def _at(table: Table, row: int, name: str) -> str:
    return f"{table.name}, row {row + 1}, column {name!r}"


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(map(repr, names[:12]))
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
