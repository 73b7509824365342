"""From arrays of rows in any order, each with a query id, to a RankingDataset."""

import dataclasses
import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankgrad.data.categories import NO_LEVELS, Levels
from rankgrad.data.dataset import MAX_FLOAT32, RankingDataset, as_ids
from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.data.sparse import SparseRows


def as_float32(features: np.ndarray, names: Sequence[str] | None = None, *, first_row: int = 0) -> np.ndarray:
    """Features [N, F] as float32, as the readers of files have them: NaN where missing, infinity refused by row and column.

    A finite number beyond float32 becomes the largest float32. `names` are those of the columns, for the error, and `first_row` the
    number of the first row.

    >>> as_float32(np.array([[1.0, 1e300, np.nan]])).tolist()
    [[1.0, 3.4028234663852886e+38, nan]]
    """
    infinite = np.isinf(features)
    if infinite.any():
        row, column = map(int, np.unravel_index(int(np.argmax(infinite)), features.shape))
        name = f"column {column}" if names is None else f"column {names[column]!r}"
        raise ValueError(
            f"X contains infinity at row {first_row + row}, {name} (counted from 0): {features[row, column]}; expected finite numbers, NaN where "
            "one is missing; correct it"
        )
    return features if features.dtype == np.float32 else np.clip(features, -MAX_FLOAT32, MAX_FLOAT32).astype(np.float32)


def as_sparse_rows(matrix: Any, names: Sequence[str] | None = None) -> FeatureRows:
    """The same for a sparse matrix or array of scipy, which stays sparse."""
    matrix = matrix.tocsr()
    infinite = np.flatnonzero(np.isinf(matrix.data))
    if len(infinite):
        row = int(np.searchsorted(matrix.indptr, infinite[0], side="right")) - 1
        as_float32(matrix[[row]].toarray(), names, first_row=row)
    values = as_float32(np.asarray(matrix.data)[:, None])[:, 0]
    return FeatureRows([SparseRows.of(type(matrix)((values, matrix.indices, matrix.indptr), shape=matrix.shape))])


def as_missing(value: Any) -> float:
    """What a reader writes where a feature is missing: a number that float32 holds, or NaN.

    >>> as_missing(0)
    0.0
    """
    try:
        number = float(value) if not isinstance(value, str | bytes | bool) else math.inf
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if abs(number) > MAX_FLOAT32:  # False for NaN
        raise ValueError(f"missing is {value!r}; expected a number of at most 3.4e38 or NaN, such as 0.0")
    return number


def as_query_ids(qid: Any, rows: int, name: str = "qid") -> np.ndarray:
    """One id per row, as int64 or text; whole numbers in floating point are taken for integers.

    >>> as_query_ids([3.0, 7.0], rows=2).tolist()
    [3, 7]
    """
    ids = np.asarray(qid)
    if ids.ndim == 2 and ids.shape[1] == 1:  # a frame of one column
        ids = ids[:, 0]
    if ids.shape != (rows,):
        raise ValueError(f"{name} has shape {ids.shape}; expected the query id of each of the {rows} rows of X")
    if ids.dtype.kind == "f" and ((np.abs(ids) <= 2**53) & (ids == np.rint(ids))).all():  # beyond, floats skip integers
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iubUO":
        raise ValueError(f"{name} holds {ids.dtype} values; expected an integer or a text in every row")
    return as_ids(name, ids.astype(np.int64) if ids.dtype.kind == "b" else ids)


def ids_of_sizes(sizes: Any, rows: int, name: str = "group") -> np.ndarray:
    """The query of each row, where queries have so many rows each, one after the other, as LightGBM and XGBoost have it.

    >>> ids_of_sizes([2, 1], rows=3).tolist()
    [0, 0, 1]
    """
    counts = np.asarray(sizes)
    if counts.ndim == 2 and counts.shape[1] == 1:  # a frame of one column
        counts = counts[:, 0]
    try:
        whole = counts.ndim == 1 and bool((counts.astype(np.int64) == counts).all() and (counts >= 0).all())
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(
            f"{name} is {reprlib.repr(sizes)}; expected how many rows each query has, whole numbers that together are {rows}"
        )
    counts = counts.astype(np.int64)
    if counts.sum() != rows:
        hint = f"; pass the query id of every row as {name.replace('group', 'qid')}=" if len(counts) == rows else ""
        raise ValueError(
            f"{name} says {counts.sum()} rows and X has {rows}; expected the number of rows of each query, one after the other{hint}"
        )
    return np.repeat(np.arange(len(counts)), counts)


def group_rows(ids: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Bring rows of equal id together: (order [N] or None, offsets [Q + 1], query_ids [Q]).

    Queries are in order of first appearance, rows of a query in their own order; None says that the rows are already in
    that order.

    >>> order, offsets, query_ids = group_rows(np.array([5, 3, 5]))
    >>> order.tolist(), offsets.tolist(), query_ids.tolist()
    ([0, 2, 1], [0, 2, 3], [5, 3])
    """
    starts = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    runs = ids[starts]
    _, first, which = np.unique(runs, return_index=True, return_inverse=True)
    if len(first) == len(runs):
        return None, np.append(starts, len(ids)), runs
    place = np.empty(len(first), np.int32)
    place[np.argsort(first)] = np.arange(len(first))
    codes = np.repeat(place[which.reshape(-1)], np.diff(np.append(starts, len(ids))))
    query_ids = runs[np.sort(first)]
    del starts, runs, which  # of shuffled rows each is as long as the data
    return (*group_codes(codes), query_ids)


def group_codes(codes: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """The order and the offsets, where queries are numbered 0, 1, ... as they first appear.

    >>> order, offsets = group_codes(np.array([0, 1, 0]))
    >>> order.tolist(), offsets.tolist()
    ([0, 2, 1], [0, 2, 3])
    """
    together = (codes[1:] >= codes[:-1]).all()
    return None if together else np.argsort(codes, kind="stable"), np.append(0, np.cumsum(np.bincount(codes)))


def first_return(ids: np.ndarray) -> int:
    """The first row whose id has been seen before the row above it, where `group_rows` has rows to move.

    >>> first_return(np.array([5, 5, 3, 5, 3]))
    3
    """
    starts = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    _, first = np.unique(ids[starts], return_index=True)
    return int(np.delete(starts, first)[0])


def group_arrays(
    features: Features,
    labels: np.ndarray,
    ids: np.ndarray,
    weights: Any = None,
    *,
    categories: Levels = NO_LEVELS,
) -> RankingDataset:
    """The rows of each query as a list; `in_source_order` goes back to rows. `categories` as in `RankingDataset`.

    `weights`: one per query in order of first appearance, or one per row, equal within a query. Queries of weight 0 are
    left out.

    >>> data = group_arrays(np.eye(3), np.array([0, 1, 2]), np.array([5, 3, 5]), weights=[1, 0])
    >>> data.query_ids.tolist(), data.rows.tolist()
    ([5], [0, 2])
    """
    order, offsets, query_ids = group_rows(ids)
    if order is not None:
        features = features.select(order) if isinstance(features, FeatureRows) else features[order]
        labels = labels[order]
    if weights is None:
        return RankingDataset(features, labels, offsets, query_ids, rows=order, categories=categories)
    weights = _query_weights(weights, order, offsets, query_ids)
    data = RankingDataset(features, labels, offsets, query_ids, weights=weights, rows=order, categories=categories)
    return data if weights.all() else data.select(weights > 0)


def with_document_weights(data: RankingDataset, given: Any, rows: int) -> RankingDataset:
    """The lists that `group_arrays` made of this many rows, with a weight for each row."""
    weights = np.asarray(given)
    if weights.shape != (rows,) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"document_weight is {weights.dtype} of shape {weights.shape}; expected one weight for each of the {rows} rows"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError("document_weight holds a negative or non-finite value; expected finite weights, 0 or above")
    return dataclasses.replace(data, document_weights=weights if data.rows is None else weights[data.rows])


def _query_weights(given: Any, order: np.ndarray | None, offsets: np.ndarray, query_ids: np.ndarray) -> np.ndarray:
    weights = np.asarray(given, dtype=np.float64)
    rows, queries = int(offsets[-1]), len(query_ids)
    if weights.shape not in ((rows,), (queries,)):
        raise ValueError(
            f"sample_weight has shape {weights.shape}; expected one weight for each of the {queries} queries or, equal "
            f"within a query, for each of the {rows} rows"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError("sample_weight holds a negative or non-finite value; expected finite weights, 0 or above")
    if len(weights) == rows:
        weights = one_per_query("sample_weight", weights if order is None else weights[order], offsets, query_ids)
    if not weights.any():
        raise ValueError("sample_weight is zero for every query; expected a weight above 0 for at least one sample")
    return weights


def one_per_query(name: str, by_row: np.ndarray, offsets: np.ndarray, query_ids: np.ndarray) -> np.ndarray:
    """The value [Q] that all rows of a query share, from values [N] in which the rows of a query are together."""
    values = by_row[offsets[:-1]]
    differs = by_row != np.repeat(values, np.diff(offsets))
    if differs.any():
        query = query_ids[np.searchsorted(offsets, np.argmax(differs), side="right") - 1]
        raise ValueError(f"{name} differs within query {query}; expected one weight per query")
    return values
