"""A dense float32 matrix that grows by rows and columns in place, so that building it takes its own size only; and a sparse one."""

from __future__ import annotations

import numpy as np

from rankgrad.data.sparse import SparseRows
from rankgrad.data.svmlight.blocks import Parsed, scatter

RESERVE = 1 << 30  # bytes set aside at most before they are needed
SPARE = 64 << 20  # bytes added at most when that was too little
_CHUNK = 16 << 20  # bytes moved at a time


class GrowingMatrix:
    """Rows of blocks, one below the other; cells that no entry names hold `missing`.

    All cells are in one array that is enlarged by realloc: for large arrays the system moves pages, not bytes.
    """

    def __init__(self, missing: float) -> None:
        self.missing = missing
        self.rows = 0
        self._stride = 0
        self._cells = np.empty(0, np.float32)

    def append(self, block: Parsed, width: int, expected_rows: int) -> None:
        """Add the rows of a block; `width` is the largest index so far, which may have grown.

        Memory for the expected rows is reserved once: pages that are never written cost nothing.
        """
        rows = self.rows + len(block.labels)
        if not self._cells.size:
            cells = min(expected_rows * width, RESERVE // 4)
            self._cells = np.empty(max(cells, rows * width), np.float32)
        if width > self._stride:
            # Some spare columns: a file that keeps naming new features would otherwise move all rows each time.
            spare = min(width // 8, SPARE // 4 // max(self.rows, 1)) if self._stride else 0
            self._set_stride(width + spare)
        if rows * self._stride > self._cells.size:
            spare = min(rows, SPARE // 4 // max(self._stride, 1))
            self._resize((rows + spare) * self._stride)
        new = self._cells[self.rows * self._stride : rows * self._stride]
        scatter(block, new.reshape(len(block.labels), self._stride), self.missing)
        self.rows = rows

    def finish(self, width: int) -> np.ndarray:
        """The matrix, [rows, width]; nothing may be appended after this."""
        self._set_stride(width)
        self._resize(self.rows * width)
        return self._cells.reshape(self.rows, width)

    def _resize(self, cells: int) -> None:
        self._cells.resize(cells, refcheck=False)  # no view of it lives on between two appends

    def _set_stride(self, stride: int) -> None:
        """Move the rows to begin `stride` cells apart: last row first when the stride grows, else first row first."""
        old, self._stride = self._stride, stride
        kept = min(old, stride)
        if stride > old:
            self._resize(max(self.rows * stride, self._cells.size))
        step = max(_CHUNK // 4 // max(old, stride, 1), 1)
        starts = range(0, self.rows, step) if stride != old else range(0)
        for first in starts if stride < old else reversed(starts):
            last = min(first + step, self.rows)
            chunk = self._cells[first * old : last * old].reshape(last - first, old)[:, :kept].copy()
            place = self._cells[first * stride : last * stride].reshape(last - first, stride)
            place[:, :kept] = chunk
            place[:, kept:] = self.missing


class GrowingRows:
    """The same, kept as the entries of its rows: for text that is wide and names little of that."""

    def __init__(self, missing: float) -> None:
        self.missing = missing
        self.rows = 0
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def append(self, block: Parsed, width: int, expected_rows: int) -> None:  # noqa: ARG002 (as of the other)
        """Add the rows of a block."""
        counts = np.diff(block.row_ends, prepend=0)
        self._parts.append((counts, block.indices - 1, block.values.copy()))
        self.rows += len(counts)

    def finish(self, width: int) -> SparseRows:
        """The rows, [rows, width]; nothing may be appended after this."""
        counts, columns, values = (np.concatenate(parts) for parts in zip(*self._parts))
        return SparseRows(np.concatenate([[0], np.cumsum(counts)]), columns, values, width, self.missing)
