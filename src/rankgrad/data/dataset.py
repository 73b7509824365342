"""The one dataset type: lists of documents of any length, in memory or memory-mapped.

Query q has the rows `offsets[q]:offsets[q + 1]` of `features` and `labels`. A list without a relevant document (label
> 0) is called empty.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.checks import whole
from rankgrad.data.categories import Levels, recoded
from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.data.folder import read_folder, write_folder
from rankgrad.data.memory import affordable
from rankgrad.data.order import random_keys
from rankgrad.data.sparse import SparseRows, is_sparse
from rankgrad.inert import inert

MAX_FLOAT32 = float(np.finfo(np.float32).max)
MOST_TEXT, UNEVEN = 1 << 28, 50  # ids may take so many bytes, or so many times those of their characters
INT64 = range(-(2**63), 2**63)
GPU_SHARE = 0.6  # of a GPU's free memory that the features of a dataset may take
ARRAYS = ("features", "labels", "offsets", "query_ids", "weights", "rows", "document_ids", "document_weights")


@dataclass(frozen=True, eq=False, repr=False)
class RankingDataset:
    """Lists of documents; arrays of another number type are converted.

    - `features` [N, F]: float32, NaN where missing. They are not scanned, so that a memory map of gigabytes costs
      nothing. Where an array would take too much memory they are `FeatureRows`, of which `features[rows]` is an array; a sparse
      matrix of scipy becomes that too.
    - `labels` [N]: finite, 0 or above.
    - `offsets` [Q + 1]: where each query's rows begin and end.
    - `query_ids` [Q]: integers or texts.
    - `feature_names`: F distinct texts, or None.
    - `weights` [Q]: one weight per query, or None.
    - `rows` [N]: the row of the source each document came from; None is its own position.
    - `provenance`: where the data came from, as JSON-able facts.
    - `document_ids` [N]: what the documents are called, integers or texts, or None.
    - `document_weights` [N]: one weight per document, or None.
    - `categories`: by column, for those that hold codes of categories, the texts that 0, 1, ... stand for.

    >>> data = RankingDataset([[1.0], [2.0], [3.0]], labels=[0, 2, 1], offsets=[0, 2, 3], query_ids=[7, 9])
    >>> data
    RankingDataset(2 queries, 3 documents, 1 feature)
    >>> data.lengths.tolist()
    [2, 1]
    """

    features: Features
    labels: np.ndarray
    offsets: np.ndarray
    query_ids: np.ndarray
    feature_names: tuple[str, ...] | None = None
    weights: np.ndarray | None = None
    rows: np.ndarray | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    document_ids: np.ndarray | None = None
    document_weights: np.ndarray | None = None
    categories: Levels = field(default_factory=dict)
    _tensors: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        features: Features = self.features
        if is_sparse(features):
            features = FeatureRows([SparseRows.of(features)])
        if not isinstance(features, FeatureRows):
            features = _as_float32("features", features, ndim=2)
        labels = _as_float32("labels", self.labels, ndim=1)
        offsets = _as_int64("offsets", self.offsets)
        query_ids = as_ids("query_ids", self.query_ids)
        documents, width = features.shape
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != documents or (np.diff(offsets) <= 0).any():
            raise ValueError(
                f"offsets do not cut {documents} documents into lists; expected [0, ..., {documents}], "
                "strictly increasing: at least one query, and no query without documents"
            )
        if width == 0:
            raise ValueError("features have no columns; expected at least one feature per document")
        _expect_length("labels", labels, documents, "document")
        _expect_length("query_ids", query_ids, len(offsets) - 1, "query")
        _expect_amounts("labels", labels)
        names = None if self.feature_names is None else tuple(map(str, self.feature_names))
        if names is not None and (len(names) != width or len(set(names)) != width):
            raise ValueError(
                f"feature_names holds {len(names)} names, {len(set(names))} of them distinct; "
                f"expected one distinct name for each of the {width} features"
            )
        weights = rows = None
        if self.weights is not None:
            weights = _as_float32("weights", self.weights, ndim=1)
            _expect_length("weights", weights, len(query_ids), "query")
            _expect_amounts("weights", weights)
        if self.rows is not None:
            rows = _as_int64("rows", self.rows)
            _expect_length("rows", rows, documents, "document")
            _expect_distinct_rows(rows)
        document_ids = document_weights = None
        if self.document_ids is not None:
            document_ids = as_ids("document_ids", self.document_ids)
            _expect_length("document_ids", document_ids, documents, "document")
        if self.document_weights is not None:
            document_weights = _as_float32("document_weights", self.document_weights, ndim=1)
            _expect_length("document_weights", document_weights, documents, "document")
            _expect_amounts("document_weights", document_weights)
        checked = (features, labels, offsets, query_ids, weights, rows, document_ids, document_weights)
        categories = _as_levels(self.categories, width)
        for name, value in (*zip(ARRAYS, checked), ("feature_names", names), ("categories", categories)):
            object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.query_ids)

    def __repr__(self) -> str:
        documents, width = self.features.shape
        counts = _count(len(self), "query"), _count(documents, "document"), _count(width, "feature")
        return f"RankingDataset({', '.join(counts)})"

    @property
    def lengths(self) -> np.ndarray:
        """Documents per query, int64 [Q]."""
        return np.diff(self.offsets)

    def describe(self) -> Description:
        """Counts a person checks first; print it.

        >>> data = RankingDataset([[1.0], [2.0], [3.0]], [0, 2, 0], offsets=[0, 2, 3], query_ids=[7, 9])
        >>> data.describe().labels
        {0: 2, 2: 1}
        """
        values, counts = np.unique(self.labels, return_counts=True)
        lengths = self.lengths
        return Description(
            queries=len(self),
            documents=len(self.labels),
            features=self.features.shape[1],
            labels={_plain(v): int(c) for v, c in zip(values, counts)},
            lengths={
                "min": int(lengths.min()),
                "median": _plain(np.median(lengths)),
                "mean": float(lengths.mean()),
                "p90": _plain(np.percentile(lengths, 90)),
                "max": int(lengths.max()),
            },
            empty_queries=int((np.maximum.reduceat(self.labels, self.offsets[:-1]) <= 0).sum()),
        )

    def select(self, queries: Any) -> RankingDataset:
        """The given queries in the given order.

        - `queries`: positions (from 0), a slice, or a boolean mask [Q]. Neighbours in their own order are a view,
          anything else is a copy. A query may be chosen more than once (for a bootstrap); the result then has no
          `rows`. A copy that would take too much memory is not made: features are read when they are asked for.

        >>> data = RankingDataset([[1.0], [2.0], [3.0]], [0, 2, 1], offsets=[0, 2, 3], query_ids=[7, 9])
        >>> data.select([1]).features.tolist()
        [[3.0]]
        """
        try:
            chosen = np.atleast_1d(np.arange(len(self))[queries])
        except IndexError as error:
            raise ValueError(
                f"cannot select queries: {error}; expected positions from 0 to {len(self) - 1} or a mask of {len(self)}"
            ) from None
        if chosen.ndim != 1 or len(chosen) == 0:
            raise ValueError("no query was selected; expected a list of positions or a mask with at least one True")
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        documents: Any
        if (np.diff(chosen) == 1).all():
            documents = slice(self.offsets[chosen[0]], self.offsets[chosen[-1] + 1])
        else:
            documents = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        rows = None
        if len(np.unique(chosen)) == len(chosen):
            rows = (np.arange(len(self.labels)) if self.rows is None else self.rows)[documents]
        return RankingDataset(
            _selected(self.features, documents),
            self.labels[documents],
            offsets,
            self.query_ids[chosen],
            self.feature_names,
            None if self.weights is None else self.weights[chosen],
            rows,
            {**self.provenance, "selected": f"{len(chosen)} of {len(self)} queries"},
            None if self.document_ids is None else self.document_ids[documents],
            None if self.document_weights is None else self.document_weights[documents],
            categories=self.categories,
        )

    def recoded(self, levels: Levels) -> RankingDataset:
        """The same lists with categories in codes of other texts, -1 for a text that is not among them.

        - `levels`: by column the texts that 0, 1, ... are to stand for; for each column that holds categories.

        >>> data = RankingDataset([[0.0], [1.0]], [0, 1], [0, 2], [7], categories={0: ("b", "a")})
        >>> data.recoded({0: ("a", "c")}).features.tolist()
        [[-1.0], [0.0]]
        """
        if levels == self.categories:
            return self
        features = np.array(self.features)
        for column, texts in self.categories.items():
            features[:, column] = recoded(features[:, column], texts, levels[column])
        return dataclasses.replace(self, features=features, categories=levels)

    def split(self, parts: Sequence[float] | Sequence[int], *, seed: int = 0) -> list[RankingDataset]:
        """Divide the queries at random into parts, in which they keep their order. Two lists of one id are two queries.

        - `parts`: fractions that sum to 1, or numbers of queries.
        - `seed`: which part a query is in depends on this and the query ids, not on the order of the data.

        >>> data = RankingDataset(np.ones((4, 1)), np.ones(4), np.arange(5), query_ids=[1, 2, 3, 4])
        >>> [len(part) for part in data.split([0.75, 0.25], seed=1)]
        [3, 1]
        """
        sizes = np.asarray(parts)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iuf" or not (sizes > 0).all():
            raise ValueError(f"cannot split by {parts!r}; expected positive fractions or positive numbers of queries")
        total = 1 if sizes.dtype.kind == "f" else len(self)
        if abs(sizes.sum() - total) > 1e-6:
            raise ValueError(
                f"the parts {list(parts)} sum to {sizes.sum()}; expected fractions that sum to 1 "
                f"or numbers of queries that sum to {len(self)}"
            )
        cuts = np.rint(np.cumsum(sizes) * (len(self) / total)).astype(np.int64)
        if (np.diff(cuts, prepend=0) == 0).any():
            raise ValueError(f"the parts {list(parts)} of {len(self)} queries leave a part empty; use fewer parts")
        order = np.argsort(random_keys(self.query_ids, whole("seed", seed)), kind="stable")
        return [self.select(np.sort(part)) for part in np.split(order, cuts[:-1])]

    @staticmethod
    def concatenate(datasets: Iterable[RankingDataset]) -> RankingDataset:
        """The queries of several datasets one after the other.

        - `datasets`: all with the same features, and all or none with weights. Lists are never merged: where two
          datasets use the same query id, the result has two queries of that id. Documents keep their ids if all have any.

        >>> one = RankingDataset([[1.0]], [0], [0, 1], [7])
        >>> RankingDataset.concatenate([one, one]).query_ids.tolist()
        [7, 7]
        """
        datasets = list(datasets)
        if not datasets:
            raise ValueError("nothing to concatenate; expected at least one dataset")
        first = datasets[0]
        for number, other in enumerate(datasets[1:], start=2):
            differences = {
                "number of features": (first.features.shape[1], other.features.shape[1]),
                "feature names": (first.feature_names, other.feature_names),
                "kind of query ids": (first.query_ids.dtype.kind, other.query_ids.dtype.kind),
                "presence of weights": (first.weights is not None, other.weights is not None),
                "presence of document weights": (
                    first.document_weights is not None,
                    other.document_weights is not None,
                ),
                "columns of categories": (list(first.categories), list(other.categories)),
            }
            for what, (own, its) in differences.items():
                if own != its:
                    raise ValueError(
                        f"dataset {number} differs from the first in its {what}: {its} and {own}; "
                        "expected the same in all; read them with the same options"
                    )
        levels = {
            column: tuple(dict.fromkeys(text for d in datasets for text in d.categories[column]))
            for column in first.categories
        }
        datasets = [d.recoded(levels) for d in datasets]
        lengths = np.concatenate([d.lengths for d in datasets])
        rows = None
        if any(d.rows is not None for d in datasets):
            own = [np.arange(len(d.labels)) if d.rows is None else d.rows for d in datasets]
            shifts = np.cumsum([0] + [int(r.max()) + 1 for r in own[:-1]])
            rows = np.concatenate([r + shift for r, shift in zip(own, shifts)])
        return RankingDataset(
            _joined([d.features for d in datasets]),
            np.concatenate([d.labels for d in datasets]),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([d.query_ids for d in datasets]),
            first.feature_names,
            None if first.weights is None else np.concatenate([d.weights for d in datasets if d.weights is not None]),
            rows,
            {"concatenated": [dict(d.provenance) for d in datasets]},
            _joined_ids([d.document_ids for d in datasets]),
            None
            if first.document_weights is None
            else np.concatenate([d.document_weights for d in datasets if d.document_weights is not None]),
            categories=levels,
        )

    def in_source_order(self, values: np.ndarray) -> np.ndarray:
        """Values of the documents in the order of the rows of the source.

        - `values` [N, ...]: scores, say, in the order of the dataset.

        >>> data = RankingDataset([[1.0], [2.0]], [0, 1], [0, 2], [7], rows=[1, 0])
        >>> data.in_source_order(np.array([0.1, 0.2])).tolist()
        [0.2, 0.1]
        """
        values = np.asarray(values)
        _expect_length("values", values, len(self.labels), "document")
        return values if self.rows is None else values[np.argsort(self.rows, kind="stable")]

    def document_names(self) -> np.ndarray:
        """What to call each document [N] in files for others: its id, or its row in the source, counted from 1.

        >>> RankingDataset([[1.0], [2.0]], [0, 1], [0, 2], [7], rows=[1, 0]).document_names().tolist()
        [2, 1]
        """
        if self.document_ids is not None:
            return self.document_ids
        return 1 + (np.arange(len(self.labels)) if self.rows is None else self.rows)

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(features, labels, offsets) as tensors; on the CPU they share the arrays' memory: do not write to them.

        - `device`: where to put them. The result is kept, so that a dataset is moved to a GPU once.
        """
        device = torch.empty(0, device=device).device  # "cuda" and "cuda:0" are one
        if (device, "features") not in self._tensors:
            if isinstance(self.features, FeatureRows):
                features = torch.empty(self.features.shape, device=device)
                for rows, block in self.features.blocks():  # scaled on the way, never as a whole in the host's memory
                    features[rows] = torch.from_numpy(block).to(device)
            else:
                features = _as_tensor(self.features).to(device)
            self._tensors[device, "features"] = features
        return self._tensors[device, "features"], *self.list_tensors(device)

    def list_tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """(labels, offsets) of `tensors`, without the features."""
        device = torch.empty(0, device=device).device
        if device not in self._tensors:
            self._tensors[device] = tuple(_as_tensor(array).to(device) for array in (self.labels, self.offsets))
        return self._tensors[device]

    def weight_tensor(self, device: str | torch.device = "cpu") -> torch.Tensor | None:
        """The weights of documents [N] as a tensor, kept like `tensors`; None if there are none."""
        device = torch.empty(0, device=device).device
        if self.document_weights is not None and (device, "weights") not in self._tensors:
            self._tensors[device, "weights"] = _as_tensor(self.document_weights).to(device)
        return self._tensors.get((device, "weights"))

    def batch_source(self, device: str | torch.device = "cpu") -> torch.Tensor | FeatureRows:
        """What batches gather their features from: a tensor on the device, or rows on the host that are too large for one.

        - `device`: where the batches are made.
        """
        device = torch.empty(0, device=device).device
        if not isinstance(self.features, FeatureRows) or (device, "features") in self._tensors:
            return self.tensors(device)[0]
        if device.type == "cuda" and self.features.nbytes <= GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
            return self.tensors(device)[0]
        return self.features

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the dataset as .npy files and a readable manifest; `open` maps them back.

        - `folder`: appears complete or not at all. An existing one is refused unless it is empty.
        - `overwrite`: replace a folder that holds a saved dataset and nothing else.
        """
        facts = {
            "queries": len(self),
            "documents": len(self.labels),
            "features": self.features.shape[1],
            "feature_names": self.feature_names,
            "provenance": dict(self.provenance),
        }
        if self.categories:
            facts["categories"] = {str(column): texts for column, texts in self.categories.items()}
        arrays = {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}
        return write_folder(Path(folder), arrays, facts, overwrite=overwrite)

    @staticmethod
    def open(folder: str | os.PathLike[str], *, verify: bool = False) -> RankingDataset:
        """Map a saved dataset into memory, without copying it.

        - `folder`: what `save` wrote. Always checked are the manifest (format, version, its own checksum), the size of
          every file, and the checksum of every file except large features. Features above 16 MiB are compared in 64
          blocks of 4 KiB spread over the file, which finds a file that was exchanged, zeroed or rewritten but not
          every changed byte.
        - `verify`: read and check all of the features too.
        """
        arrays, facts = read_folder(Path(folder), verify=verify)
        try:
            levels = {int(column): tuple(texts) for column, texts in facts.get("categories", {}).items()}
            names, origin = facts["feature_names"], facts["provenance"]
            return RankingDataset(**arrays, feature_names=names, provenance=origin, categories=levels)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} does not hold a valid dataset: {error}; save it again") from error


@dataclass(frozen=True)
class Description:
    """What `describe` counts; `labels` maps label to documents, `lengths` a statistic's name to its value."""

    queries: int
    documents: int
    features: int
    labels: dict[float, int]
    lengths: dict[str, float]
    empty_queries: int

    def __str__(self) -> str:
        lengths = ", ".join(f"{name} {value:,.4g}" for name, value in self.lengths.items())
        lines = [
            f"queries        {self.queries:,} ({self.empty_queries:,} without a relevant document)",
            f"documents      {self.documents:,}",
            f"features       {self.features:,}",
            f"list lengths   {lengths}",
        ]
        if len(self.labels) > 16:
            lines.append(f"labels         {len(self.labels):,} values, {min(self.labels)} to {max(self.labels)}")
        else:
            shares = [f"{v:>6}  {c:>12,}  {c / self.documents:6.1%}" for v, c in self.labels.items()]
            lines += [f"{'labels' if i == 0 else '':<15}{line}" for i, line in enumerate(shares)]
        return "\n".join(lines)


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only arrays, and memory maps are read-only
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def _selected(features: Features, documents: Any) -> Features:
    """Some documents: a view of neighbours, a copy of others, or rows to be read where a copy is too large."""
    if not isinstance(features, FeatureRows):
        if isinstance(documents, slice) or affordable(4 * features.shape[1] * len(documents)):
            return features[documents]
        features = FeatureRows([features])
    return features.select(documents)


def _joined(parts: Sequence[Features]) -> Features:
    """Features one below the other: an array, or rows to be read where that is too large."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if not isinstance(part, FeatureRows)]
    if len(arrays) == len(parts) and affordable(sum(part.nbytes for part in parts)):
        return np.concatenate(arrays)
    return FeatureRows(parts)


def _joined_ids(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Ids of documents one below the other: numbers, or texts if some are; None if some documents have none."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    kinds = {part.dtype.kind for part in known}
    return np.concatenate([part.astype(np.str_) if len(kinds) > 1 else part for part in known])


def _as_float32(name: str, values: Any, ndim: int) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != ndim or array.dtype.kind not in "fiub":
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; expected numbers with {ndim} dimension(s)")
    if array.dtype == np.float32:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(array, dtype=np.float32)
    if (np.isinf(result) & np.isfinite(array)).any():
        raise ValueError(f"{name} holds numbers beyond float32; expected at most 3.4e38; clip them first")
    return result


def _as_levels(categories: Levels, width: int) -> dict[int, tuple[str, ...]]:
    """Levels by rising column, after a look at them."""
    levels = {int(column): tuple(categories[column]) for column in sorted(categories)}
    for column, texts in levels.items():
        if not 0 <= column < width or len(set(texts)) < len(texts) or not all(isinstance(t, str) for t in texts):
            raise ValueError(
                f"categories names column {column} with {len(texts)} levels; expected a column from 0 to {width - 1} and distinct "
                "texts; correct it"
            )
    return levels


def _as_int64(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and (array >> 63).any()):
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; expected 64-bit integers with one dimension")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_ids(name: str, values: Any) -> np.ndarray:
    """Ids of queries as int64, or as an array of texts.

    >>> as_ids("qid", [3, 7]).dtype.name, as_ids("qid", np.array(["a", "b"], object)).tolist()
    ('int64', ['a', 'b'])
    """
    array = np.asarray(values)
    if array.dtype == object and array.size:
        if all(isinstance(value, str) for value in array.flat):
            if any("\0" in value for value in array.flat):
                raise ValueError(f"{name} holds a text with a NUL character; expected printable ids; remove it")
            array = as_texts(name, array.tolist())
        elif all(isinstance(value, int | np.integer) and int(value) in INT64 for value in array.flat):
            array = array.astype(np.int64)
        elif array.ndim == 1:
            texts = isinstance(array[0], str)
            good = [
                isinstance(one, str) if texts else isinstance(one, int | np.integer) and int(one) in INT64
                for one in array
            ]
            row = good.index(False)
            raise ValueError(
                f"{name} holds {inert(repr(array[row]), 40)} in row {row}; expected "
                f"{'texts, as in row 0' if texts else '64-bit integers, or texts in every row'}; fill what is missing, or turn all of them into texts"
            )
    return array if array.dtype.kind == "U" and array.ndim == 1 else _as_int64(name, array)


def as_texts(name: str, texts: Sequence[str]) -> np.ndarray:
    """Texts as an array, in which each takes as much memory as the longest: one that is a thousand times the others is refused."""
    longest = max(map(len, texts), default=0)
    size = 4 * longest * len(texts)
    if size > MOST_TEXT and size > 4 * UNEVEN * sum(map(len, texts)):
        raise ValueError(
            f"{name} holds a text of {longest:,} characters, {inert(max(texts, key=len), 40)}, with which {len(texts):,} of them take "
            f"{size / 2**30:,.1f} GiB; expected ids of about equal length; shorten it"
        )
    return np.array(texts, np.str_)


def _expect_length(name: str, array: np.ndarray, length: int, unit: str) -> None:
    if array.shape[:1] != (length,):
        raise ValueError(f"{name} has shape {array.shape}; expected one entry for each {unit}, {length} in all")


def _expect_distinct_rows(rows: np.ndarray) -> None:
    """Rows of a source usually increase, which is quick to see; only others are counted."""
    if rows.size and rows.min() < 0:
        raise ValueError(f"rows[{int(np.argmin(rows))}] is {rows.min()}; expected positions in the source, 0 or above")
    if (rows[1:] > rows[:-1]).all():
        return
    if rows.max() < 8 * len(rows):
        seen = np.zeros(rows.max() + 1, np.bool_)
        seen[rows] = True
        distinct = int(np.count_nonzero(seen))
    else:
        distinct = len(np.unique(rows))
    if distinct < len(rows):
        raise ValueError("rows names a row of the source twice; expected a different one for each document")


def _expect_amounts(name: str, array: np.ndarray) -> None:
    good = np.isfinite(array) & (array >= 0)
    if not good.all():
        where = int(np.argmin(good))
        raise ValueError(f"{name}[{where}] is {array[where]}; expected a finite number that is not negative")


def _plain(value: Any) -> float:
    """1.0 as 1, 1.5 as 1.5, so that counts of labels read better."""
    return int(value) if float(value).is_integer() else float(value)


def _count(number: int, unit: str) -> str:
    plural = {"query": "queries"}.get(unit, unit + "s")
    return f"{number:,} {unit if number == 1 else plural}"
