"""Features that are read, put together and scaled when rows of them are asked for: for more data than fits into memory.

A dataset's features are an array where that is affordable (data/memory.py), else `FeatureRows`: what an array in memory would
hold, computed anew for every batch. Scaling is a function of single values, so both give the same numbers, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankgrad.data.sparse import SparseRows

if TYPE_CHECKING:
    from rankgrad.data.scaling import Scaling

BLOCK = 4096  # rows that are made at a time where all are wanted
DENSE_VALUES = 1 << 21  # made at a time, where rows are wide: 8 MiB


class FeatureRows:
    """Rows [N, F] of other features, perhaps chosen and perhaps scaled; `features[rows]` is a dense float32 array.

    - `parts`: arrays, `SparseRows` or other `FeatureRows` of equal width, one below the other; memory maps stay on the disk.
    - `index` [N]: which of their rows, counted through; None: all, in their order.
    - `scaling`: applied to the rows that are asked for; None: as they are.

    >>> rows = FeatureRows([np.array([[1.0], [2.0]], np.float32), np.array([[3.0]], np.float32)], np.array([2, 0]))
    >>> rows[:].tolist(), rows.shape
    ([[3.0], [1.0]], (2, 1))
    """

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(
        self, parts: Sequence[Features | SparseRows], index: np.ndarray | None = None, scaling: Scaling | None = None
    ) -> None:
        self.parts, self.index, self.scaling = tuple(parts), index, scaling
        self._ends = np.cumsum([part.shape[0] for part in self.parts])
        self._background: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Documents and columns."""
        rows = int(self._ends[-1]) if self.index is None else len(self.index)
        return rows, self.parts[0].shape[1] if self.scaling is None else self.scaling.inputs

    @property
    def sparse(self) -> bool:
        """Whether most of it is one value: wide, as a rule, so that few rows are much."""
        return any(
            isinstance(part, SparseRows) or (isinstance(part, FeatureRows) and part.sparse) for part in self.parts
        )

    @property
    def nbytes(self) -> int:
        """Of an array that held all of it."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows by a slice, positions or a mask: dense, scaled, float32 [n, F]."""
        if self.scaling is not None and not self.scaling.levels:
            stored, positions = self._stored(self._positions(rows))
            if stored is not None:
                if self._background is None:
                    self._background = self.scaling.apply(np.full((1, stored.shape[1]), stored.missing, np.float32))
                return self.scaling.apply_entries(self._background, stored.entries(positions), len(positions))
        if isinstance(rows, slice) and self.index is None and len(self.parts) == 1:
            taken = dense_rows(self.parts[0], rows)
        else:
            taken = self._gathered(self._positions(rows))
        return taken if self.scaling is None else self.scaling.apply(taken)

    def column_block(self, rows: np.ndarray, first: int, end: int) -> np.ndarray:
        """Rows by position, and of them the columns from `first` to `end`, dense."""
        if self.scaling is not None:  # which may need the others
            return self[rows][:, first:end]
        positions = self._positions(rows)
        block = np.empty((len(positions), end - first), self.dtype)
        which = np.searchsorted(self._ends, positions, side="right")
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(which == number)
            block[own] = column_block(part, positions[own] - (self._ends[number] - part.shape[0]), first, end)
        return block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, for whoever needs an array."""
        whole = np.empty(self.shape, self.dtype)
        for rows, block in self.blocks():
            whole[rows] = block
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """All of it in pieces of some thousand rows at most, each with its place."""
        step = max(1, min(BLOCK, DENSE_VALUES // self.shape[1]))
        for start in range(0, len(self), step):
            rows = slice(start, min(start + step, len(self)))
            yield rows, self[rows]

    def select(self, documents: Any) -> FeatureRows:
        """Some documents, by a slice or positions, in that order."""
        return FeatureRows(self.parts, self._positions(documents), self.scaling)

    def widened(self, width: int) -> FeatureRows:
        """The same rows with more columns, which have no entries; of sparse rows alone."""
        parts = [
            SparseRows(part.starts, part.columns, part.values, width, part.missing)
            for part in self.parts
            if isinstance(part, SparseRows)
        ]
        return FeatureRows(parts, self.index)

    def scaled(self, scaling: Scaling) -> FeatureRows:
        """The same rows, scaled when they are asked for."""
        return FeatureRows(self.parts, self.index, scaling)

    def _positions(self, rows: Any) -> np.ndarray:
        """Rows of all parts counted through, of rows of this."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        else:
            rows = np.asarray(rows)
            rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        return rows if self.index is None else self.index[rows]

    def _stored(self, positions: np.ndarray) -> tuple[SparseRows | None, np.ndarray]:
        """The sparse rows that all of it is, through rows that are chosen and not scaled, and where they stand there."""
        part = self.parts[0]
        if len(self.parts) > 1 or isinstance(part, np.ndarray):
            return None, positions
        if isinstance(part, SparseRows):
            return part, positions
        return part._stored(part._positions(positions)) if part.scaling is None else (None, positions)

    def _gathered(self, positions: np.ndarray) -> np.ndarray:
        if len(self.parts) == 1:
            return dense_rows(self.parts[0], positions)
        taken = np.empty((len(positions), self.parts[0].shape[1]), self.dtype)
        which = np.searchsorted(self._ends, positions, side="right")
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(which == number)
            taken[own] = dense_rows(part, positions[own] - (self._ends[number] - part.shape[0]))
        return taken


Features = np.ndarray | FeatureRows  # of a dataset


def rows_at_once(features: Features, most: int) -> int:
    """How many rows to make dense at a time: `most`, but of sparse features no more than are some megabytes."""
    sparse = isinstance(features, FeatureRows) and features.sparse
    return max(1, min(most, DENSE_VALUES // features.shape[1])) if sparse else most


def column_block(features: Features | SparseRows, rows: np.ndarray, first: int, end: int) -> np.ndarray:
    """Rows by position, and of them the columns from `first` to `end` alone, dense; features are not scaled."""
    return features[rows, first:end] if isinstance(features, np.ndarray) else features.column_block(rows, first, end)


def dense_rows(features: Features | SparseRows, rows: Any) -> np.ndarray:
    """Rows of stored features, by a slice or positions, as a dense float32 array."""
    return np.asarray(features[rows])
