"""Tables with named columns -> RankingDataset: Parquet, CSV, Arrow files, and frames of pandas, polars, pyarrow.

Every table becomes an Arrow table first, so that all kinds pass the same checks. Errors name the source, the row
(counted from 1, a CSV header not counted) and the column.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rankgrad.checks import one_of
from rankgrad.data.categories import Coder, look_like_numbers
from rankgrad.data.dataset import MAX_FLOAT32, RankingDataset, as_texts
from rankgrad.data.grouping import as_missing, first_return, group_rows, one_per_query
from rankgrad.data.tables.arrow import (
    TEXT,
    Table,
    at,
    expect_numbers,
    import_pyarrow,
    is_text,
    kind_of,
    open_table,
    plain,
    reads_as_number,
)
from rankgrad.data.tables.columns import choose_columns, listing, matches, warn_of_ids, warn_of_unused

ROLES = {
    "label": "grades",
    "qid": "query ids",
    "weight": "weights",
    "document": "document ids",
    "document_weight": "document weights",
}
ROWS = 1 << 14  # rows turned into features at a time: a block of all columns stays in the cache

logger = logging.getLogger(__name__)


def read_table(
    source: Any,
    *,
    label: str = "label",
    qid: str = "qid",
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    weight: str | None = None,
    document: str | None = None,
    document_weight: str | None = None,
    categorical: Sequence[str] = (),
    by_type: bool = True,
    pandas_categories: bool = True,
    missing: float = float("nan"),
    scattered: Literal["group", "refuse"] = "group",
    labelled: bool = True,
) -> RankingDataset:
    """Read one table or several, one row per document, into a dataset.

    - `source`: a path (.parquet, .csv, .tsv, also .gz, .bz2 or .zst; .arrow, .feather, .ipc), a pyarrow Table, a
      pandas or polars DataFrame, or a list of these, read as one table.
    - `label`: the column of labels: finite numbers, not negative, never null.
    - `qid`: the column of query ids: integers or text, never null.
    - `features`: the feature columns, in this order: numbers or categories. A name that no column has may be a pattern such
      as "bm25*" or "tf_[ab]". None takes all columns but the others named here, in the order of the first table, without
      those in which pandas stores a row index.
    - `ignore`: names and patterns of columns that are no features.
    - `weight`: a column with one number per query, the same in all its rows, never null. None: no weights.
    - `document`: a column of document ids, integers or texts, never null, which becomes `document_ids`; it may be absent
      where `labelled` is False. None: no ids.
    - `document_weight`: a column with a weight for every document, never null. None: no such weights.
    - `categorical`: names and patterns of columns whose values are categories, beside those of which the type says so.
    - `by_type`: whether columns of the types category and boolean hold categories, and those of text, unless half of the distinct
      ones look like numbers; if not, truth values are 0 and 1 and text is refused.
    - `pandas_categories`: with `by_type`, whether numbers that were categories to pandas are too, which Parquet keeps as a note.
    - `missing`: what null and NaN features become: a number that float32 holds, or NaN.
    - `scattered`: where the rows of a query are not together, "group" moves them to the query's first row and "refuse"
      raises an error; `in_source_order` puts results back.
    - `labelled`: False sets all labels to 0, for documents that are only to be ranked; the column `label` may be
      missing or hold anything.

    A column that is taken for a feature without being named is warned about if it looks like an id: an index without a name,
    or whole numbers or texts that are different in every row. Infinite features are refused. A finite one beyond float32 becomes the largest float32: `provenance["clamped"]`
    counts these, `provenance["first_clamped"]` is the place of the first, and a warning is logged. Numbers of a CSV
    file, and integers of a column with nulls, are rounded to float64 first, so that a rare one differs in the last bit
    from the float32 nearest to it.

    >>> import pyarrow
    >>> table = pyarrow.table({"qid": ["b", "b", "a"], "label": [1, 0, 2], "bm25": [0.5, None, 2.0]})
    >>> data = read_table(table)
    >>> data.query_ids.tolist(), data.feature_names, data.features.tolist()
    (['b', 'a'], ('bm25',), [[0.5], [nan], [2.0]])
    """
    one_of("scattered", scattered, ("group", "refuse"))
    missing = as_missing(missing)
    named = {"label": label, "qid": qid, "weight": weight, "document": document, "document_weight": document_weight}
    roles = _roles(named)
    _expect_names([*roles.values()], {"features": features or (), "ignore": ignore, "categorical": categorical})
    if not labelled:
        del roles["label"]
    chosen: dict[str, Any] = {"label": label, "features": features, "ignore": ignore, "categorical": categorical}
    wanted = partial(_is_number_column, roles=roles, **chosen)
    tables = [open_table(one, number, qid, wanted) for number, one in enumerate(_as_list(source))]
    if not labelled:
        tables = [_without(table, label) for table in tables]
        if document is not None and not all(document in table.arrow.column_names for table in tables):
            del roles["document"]
            document = None
    names = _feature_names(tables, roles, features, ignore)
    warn_of_unused(tables, ignore, "to ignore")
    if by_type:  # else it is known which columns are categories
        warn_of_unused(tables, categorical, "of categories")
    warn_of_ids(tables, names, [*roles.values(), *(features or ())])
    total = sum(table.arrow.num_rows for table in tables)
    if total == 0:
        raise ValueError(f"{tables[0].name} has no rows; expected one row per document")
    noted = {one for table in tables if by_type and pandas_categories for one in _noted_categories(table.arrow.schema)}
    coders = {
        place: Coder()
        for place, name in enumerate(names)
        if matches(name, categorical)
        or name in noted
        or (by_type and any(holds_categories(table, name) for table in tables))
    }
    matrix = np.empty((total, len(names)), np.float32)
    counts: dict[str, Any] = {"missing": 0, "clamped": 0}
    done = 0
    for table in tables:
        _fill(matrix[done : done + table.arrow.num_rows], table, names, missing, counts, coders)
        done += table.arrow.num_rows
    if counts["clamped"] and not isinstance(source, Table):  # of parts whoever puts them together says it
        logger.warning(
            "%d values beyond float32 became the largest float32, the first at %s",
            counts["clamped"],
            counts["first_clamped"],
        )
    labels = np.zeros(total, np.float32)
    if labelled:
        labels = np.concatenate([_amounts(table, label) for table in tables])
    order, offsets, query_ids = _group(tables, qid, scattered)
    weights = document_weights = document_ids = None
    if weight is not None:
        weights = np.concatenate([_amounts(table, weight) for table in tables])
    if document_weight is not None:
        document_weights = np.concatenate([_amounts(table, document_weight) for table in tables])
    if document is not None:
        document_ids = _document_ids(tables, document)
    if order is not None:
        matrix, labels = matrix[order], labels[order]
        weights = None if weights is None else weights[order]
        document_weights = None if document_weights is None else document_weights[order]
        document_ids = None if document_ids is None else document_ids[order]
    return RankingDataset(
        matrix,
        labels,
        offsets,
        query_ids,
        tuple(names),
        None if weights is None else one_per_query(f"column {weight!r}", weights, offsets, query_ids),
        order,
        {"sources": [table.name for table in tables], "rows": total, **counts},
        document_ids,
        document_weights,
        {place: coder.levels for place, coder in coders.items()},
    )


def number_columns(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Which columns of a CSV file are read as numbers, by the options of `read_table`."""
    chosen = {name: options[name] for name in ("label", "features", "ignore", "categorical")}
    return partial(_is_number_column, roles=_roles(options), **chosen)


def expect_same_columns(tables: list[Table], options: Mapping[str, Any]) -> None:
    """Refuse tables of different columns, by the options of `read_table`."""
    _feature_names(tables, _roles(options), options["features"], options["ignore"])


def _roles(named: Mapping[str, Any]) -> dict[str, str]:
    """The columns that are no features, by what they are."""
    return {role: named[role] for role in ROLES if named[role] is not None}


def _is_number_column(
    name: str,
    *,
    roles: Mapping[str, str],
    label: str,
    features: Sequence[str] | None,
    ignore: Sequence[str],
    categorical: Sequence[str],
) -> bool:
    if name in roles.values():
        return name != roles.get("document")
    if matches(name, categorical):
        return False
    return name != label and not matches(name, ignore) and (features is None or matches(name, features))


def _without(table: Table, label: str) -> Table:
    """The table without its labels, if it has any."""
    return table._replace(arrow=table.arrow.select([name for name in table.arrow.column_names if name != label]))


def _as_list(source: Any) -> list[Any]:
    sources = list(source) if isinstance(source, list | tuple) and not isinstance(source, Table) else [source]
    if not sources:
        raise ValueError("no table was given; expected a path, a table, or a list of them")
    return sources


def _expect_names(roles: list[str], lists: Mapping[str, Sequence[str]]) -> None:
    for argument, given in lists.items():
        if isinstance(given, str):
            raise ValueError(f"{argument} is the text {given!r}; expected a list of column names")
    for name in (*roles, *(name for given in lists.values() for name in given)):
        if not isinstance(name, str):
            raise ValueError(f"a column is named {name!r}; expected names as text; write {str(name)!r}")


def _feature_names(
    tables: list[Table], roles: Mapping[str, str], features: Sequence[str] | None, ignore: Sequence[str]
) -> list[str]:
    """The feature columns, after checking that every table has all the columns it needs."""
    columns, others = _named_columns(tables[0]), [*roles.values()]
    if features is None:
        names = [name for name in columns if name not in others and not matches(name, ignore)]
    else:
        candidates = [name for name in tables[0].arrow.column_names if name not in others or name in features]
        names = choose_columns(candidates, features, ignore, tables[0].name)
    if len(set(names + others)) < len(names + others):
        twice = next(name for name in names + others if (names + others).count(name) > 1)
        raise ValueError(f"column {twice!r} is named twice among features, {', '.join(ROLES)}; name it once")
    for table in tables:
        own = table.arrow.column_names
        for name in others + names:
            if name not in own:
                role = next((role for role in roles if roles[role] == name), None)
                raise ValueError(
                    f"{table.name} has no column {name!r}; {_hint(name, own, role)}its columns are {listing(own)}"
                )
        new = [name for name in _named_columns(table) if name not in columns and not matches(name, ignore)]
        extra = new if features is None else []
        if extra:
            raise ValueError(
                f"{table.name} has a column {extra[0]!r} that {tables[0].name} has not; "
                "expected the same columns in all tables; take it out, or ignore it: ignore= in Python, --set data.ignore= in train"
            )
    if not names:
        raise ValueError(f"{tables[0].name} has no feature columns beside {listing(others)}; expected at least one")
    return names


def _hint(name: str, own: Sequence[str], role: str | None) -> str:
    """What may be wrong where a column is missing; `role` is its argument of `read_table`."""
    near = difflib.get_close_matches(name, own, n=1)
    if len(own) == 1 and name in re.split(r"\W+", own[0]):
        return "is another separator between them? "
    numbers = [one for one in own if reads_as_number(one)]
    # Whole numbers name the columns of many frames; fractions are values.
    if len(numbers) == len(own) or (2 * len(numbers) > len(own) and any("." in one for one in numbers)):
        return "is the line of names missing? "
    meant = f"did you mean {near[0]!r}? " if near else ""
    if role is None:
        return meant
    return f"{meant}rename the column of {ROLES[role]} so, or name it: {role}= in Python, --set data.{role}= in train; "


def _named_columns(table: Table) -> list[str]:
    """All columns except those in which pandas stores the index of a frame."""
    stored = _noted(table.arrow.schema, "index_columns")
    names = table.arrow.column_names
    return [name for name in names if name not in stored and not name.startswith("__index_level_")]


def _fill(
    matrix: np.ndarray,
    table: Table,
    names: list[str],
    missing: float,
    counts: dict[str, Any],
    coders: Mapping[int, Coder],
) -> None:
    """Write the columns into matrix [rows, F] as float32, those with a coder as its codes; count missing and clamped values."""
    for place, coder in coders.items():
        matrix[:, place] = category_codes(table, names[place], coder)
        counts["missing"] += int(np.isnan(matrix[:, place]).sum())
    numbers_at = [place for place in range(len(names)) if place not in coders]
    for place in numbers_at:
        expect_numbers(table, names[place])
    begin = 0
    for batch in table.arrow.select([names[place] for place in numbers_at]).to_batches(max_chunksize=ROWS):
        block = matrix[begin : begin + batch.num_rows]
        for j, column in zip(numbers_at, batch.columns):
            values = _numbers(column)
            if np.isinf(values).any():
                row = begin + int(np.argmax(np.isinf(values)))
                raise ValueError(f"{at(table, row, names[j])} is infinite; expected a finite number or null")
            with np.errstate(over="ignore"):
                numbers = values.astype(np.float32)
            absent, beyond = np.isnan(numbers), np.isinf(numbers)
            counts["missing"] += int(absent.sum())
            if beyond.any():
                counts["clamped"] += int(beyond.sum())
                counts.setdefault("first_clamped", at(table, begin + int(np.argmax(beyond)), names[j]))
            numbers[absent] = missing
            numbers[beyond] = np.copysign(np.float32(MAX_FLOAT32), numbers[beyond])
            block[:, j] = numbers
        begin += batch.num_rows


def holds_categories(table: Table, name: str) -> bool:
    """Whether the type of a column says that its values are categories, and of texts also the texts."""
    pyarrow = import_pyarrow()
    column = table.arrow[name]
    if pyarrow.types.is_dictionary(column.type) or pyarrow.types.is_boolean(column.type):
        return True
    if not is_text(column.type):
        return False
    return not look_like_numbers(text for text in plain(column).unique().drop_null().to_pylist() if text)


def _noted_categories(schema: Any) -> list[str]:
    """Columns of numbers that were categories to pandas, which Parquet does not keep as such."""
    columns = [noted for noted in _noted(schema, "columns") if isinstance(noted, dict)]
    return [noted.get("field_name", "") for noted in columns if noted.get("pandas_type") == "categorical"]


def _noted(schema: Any, key: str) -> list[Any]:
    """What pandas has noted beside a table; nothing where there is no such note, or one that pandas would not write."""
    try:
        found = schema.pandas_metadata[key]
    except (LookupError, TypeError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, list) else []


def category_codes(table: Table, name: str, coder: Coder) -> np.ndarray:
    """Codes [rows] float32 of a column of categories, NaN where one is missing."""
    column = plain(table.arrow[name]).combine_chunks()
    coded = column.dictionary_encode()
    values = coded.dictionary.to_pylist()
    if kind_of(Path(table.name)) in TEXT:  # which does not tell 3 from 3.0, as pandas writes it beside a missing one
        values = [re.sub(r"^([+-]?\d+)\.0+$", r"\1", value) if isinstance(value, str) else value for value in values]
    codes = np.append(coder.codes(values), np.float32(np.nan))
    return codes[coded.indices.fill_null(len(values)).to_numpy()]


def _numbers(column: Any) -> np.ndarray:
    """A column of numbers or booleans as a numpy array; null is NaN."""
    pyarrow = import_pyarrow()
    types, column = pyarrow.types, plain(column)
    if types.is_decimal(column.type) or types.is_null(column.type):
        column = column.cast(pyarrow.float64())
    elif types.is_boolean(column.type):
        column = column.cast(pyarrow.uint8())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _amounts(table: Table, name: str) -> np.ndarray:
    """A column of labels or weights: float32, finite, not negative."""
    expect_numbers(table, name, "replace words by numbers, 0 for irrelevant")
    values = _numbers(table.arrow[name])
    good = (values >= 0) & (values <= MAX_FLOAT32)  # NaN is neither
    if not good.all():
        row = int(np.argmin(good))
        value = "missing" if np.isnan(values[row]) else values[row]
        raise ValueError(f"{at(table, row, name)} is {value}; expected a number from 0 to 3.4e38")
    return values.astype(np.float32)


def _group(tables: list[Table], qid: str, scattered: str) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Order, offsets and query ids of all rows, as `group_rows` gives them."""
    pyarrow = import_pyarrow()
    parts = [column_ids(table, qid) for table in tables]
    if len({isinstance(part, np.ndarray) for part in parts}) == 2:
        raise ValueError(f"column {qid!r} is text in one table and a number in another; expected one kind in all")
    if isinstance(parts[0], np.ndarray):
        ids = np.concatenate(parts)
        order, offsets, query_ids = group_rows(ids)
    else:
        # Texts are compared as codes: an array of N texts takes N times the memory of the longest.
        texts = pyarrow.chunked_array([c for part in parts for c in part.chunks], pyarrow.large_string())
        coded = texts.combine_chunks().dictionary_encode()
        ids = coded.indices.to_numpy()
        order, offsets, codes = group_rows(ids)
        query_ids = as_texts(f"column {qid!r}", coded.dictionary.to_pylist())[codes]
    if order is not None and scattered == "refuse":
        row = first_return(ids)
        for table in tables:
            if row < table.arrow.num_rows:
                break
            row -= table.arrow.num_rows
        raise ValueError(
            f"{at(table, row, qid)} returns to query {table.arrow[qid][row].as_py()!r} after another query; "
            "expected the rows of a query together; sort them, or pass scattered='group'"
        )
    return order, offsets, query_ids


def _document_ids(tables: list[Table], name: str) -> np.ndarray:
    """Ids of documents: int64 if all are integers, else texts."""
    parts = [column_ids(table, name, "document") for table in tables]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    texts = [part.astype(np.str_) if isinstance(part, np.ndarray) else part.to_pylist() for part in parts]
    return as_texts(f"column {name!r}", [text for part in texts for text in part])


def column_ids(table: Table, name: str, what: str = "query") -> Any:
    """A column of ids of `what`: int64 array, or Arrow texts."""
    pyarrow = import_pyarrow()
    types, column = pyarrow.types, plain(table.arrow[name])
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise ValueError(f"{at(table, row, name)} is missing; expected the id of the row's {what}")
    if is_text(column.type):
        empty = pyarrow.compute.equal(column, "").to_numpy()
        if empty.any():
            raise ValueError(f"{at(table, int(np.argmax(empty)), name)} is an empty text; expected a {what} id")
        nul = pyarrow.compute.match_substring(column, "\0").to_numpy()
        if nul.any():
            raise ValueError(f"{at(table, int(np.argmax(nul)), name)} holds a NUL character; expected a printable id")
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
                f"{at(table, row, name)} is {float(values[row])!r}, not a whole number that a float holds exactly; "
                "expected integers or text; convert the column"
            )
        return values.astype(np.int64)
    raise ValueError(f"{table.name}, column {name!r} has type {column.type}; expected integers or text; convert it")
