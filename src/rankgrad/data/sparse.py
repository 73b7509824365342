"""Features of which most are one value, kept as the few that are not: dense rows are made when they are asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Entries(NamedTuple):
    """Of some rows: which of them [E], their columns [E], and values [E] float32."""

    place: np.ndarray
    columns: np.ndarray
    values: np.ndarray


class SparseRows:
    """Rows [N, F] by their entries; `features[rows]` is a dense float32 array.

    - `starts` [N + 1]: row r has the entries starts[r] to starts[r + 1].
    - `columns`, `values` [entries]: where they stand in their rows, and float32 values.
    - `width`: F.
    - `missing`: the value of all others.

    >>> rows = SparseRows(np.array([0, 1, 3]), np.array([2, 0, 1]), np.array([5.0, 6.0, 7.0], np.float32), 3)
    >>> rows[:].tolist(), rows[np.array([1])].tolist()
    ([[0.0, 0.0, 5.0], [6.0, 7.0, 0.0]], [[6.0, 7.0, 0.0]])
    """

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(
        self, starts: np.ndarray, columns: np.ndarray, values: np.ndarray, width: int, missing: float = 0.0
    ) -> None:
        self.starts, self.columns, self.values, self.missing = starts, columns, values, missing
        self.shape = len(starts) - 1, width

    @classmethod
    def of(cls, matrix: Any) -> SparseRows:
        """The rows of a sparse matrix or array of scipy, of any format and type of numbers."""
        rows = matrix.tocsr()
        if not rows.has_canonical_format:  # entries of one place are summed
            rows = rows.copy()
            rows.sum_duplicates()
        return cls(np.asarray(rows.indptr, np.int64), rows.indices, np.asarray(rows.data, np.float32), rows.shape[1])

    @property
    def nbytes(self) -> int:
        """Of a dense array."""
        return 4 * self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows by a slice or positions, dense."""
        rows = self._positions(rows)
        dense = np.full((len(rows), self.shape[1]), self.missing, np.float32)
        place, columns, values = self.entries(rows)
        dense[place, columns] = values
        return dense

    def column_block(self, rows: np.ndarray, first: int, end: int) -> np.ndarray:
        """Rows by position, and of them the columns from `first` to `end`, dense."""
        place, columns, values = self.entries(rows)
        inside = (columns >= first) & (columns < end)
        dense = np.full((len(rows), end - first), self.missing, np.float32)
        dense[place[inside], columns[inside] - first] = values[inside]
        return dense

    def entries(self, rows: Any) -> Entries:
        """Those of rows by a slice or positions."""
        rows = self._positions(rows)
        counts = self.starts[rows + 1] - self.starts[rows]
        begins = np.cumsum(counts) - counts
        which = np.arange(counts.sum()) + np.repeat(self.starts[rows] - begins, counts)
        return Entries(np.repeat(np.arange(len(rows)), counts), self.columns[which], self.values[which])

    def _positions(self, rows: Any) -> np.ndarray:
        return np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)


def is_sparse(features: Any) -> bool:
    """Whether something is a sparse matrix or array of scipy."""
    return hasattr(features, "tocsr") and hasattr(features, "nnz")
