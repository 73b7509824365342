"""Rows on their way to a saved dataset, kept in a file instead of memory; the result is mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankgrad.data.feature_rows import Features
from rankgrad.data.svmlight.blocks import Parsed, scatter

ROWS = 4096  # copied at a time


class GrowingFile:
    """A dense matrix in a new file that grows by rows and columns; `append` and `finish` are those of `GrowingMatrix`.

    Cells that a narrower row does not have hold `missing`. After a row that is wider than those before the file is written
    anew, with some columns to spare.
    """

    def __init__(self, path: Path, missing: float = 0.0) -> None:
        self.missing, self.rows = missing, 0
        self._path, self._stride = path, 0
        path.open("xb").close()

    def append(self, block: Parsed, width: int, expected_rows: int) -> None:  # noqa: ARG002 (a file needs no reserve)
        """Add the rows of a block of text; `width` is the largest index so far, which may have grown."""
        self._grow(width)
        rows = np.empty((len(block.labels), self._stride), np.float32)
        scatter(block, rows, self.missing)
        self._write(rows)

    def append_rows(self, rows: np.ndarray) -> None:
        """Add rows [n, width]."""
        self._grow(rows.shape[1])
        self._write(_widened(rows, self._stride, self.missing))

    def finish(self, width: int) -> np.ndarray:
        """The matrix [rows, width], mapped; nothing may be appended after this."""
        self._set_stride(width)
        return self._map()

    def _write(self, rows: np.ndarray) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(rows, np.float32).data)
        self.rows += len(rows)

    def _grow(self, width: int) -> None:
        if width > self._stride:
            self._set_stride(width + (width // 8 if self.rows else 0))

    def _set_stride(self, stride: int) -> None:
        if stride != self._stride and self.rows:
            new = self._path.with_name(f"{self._path.name}.new")
            narrow = self._map()
            with new.open("xb") as file:
                for first in range(0, self.rows, ROWS):
                    file.write(_widened(narrow[first : first + ROWS], stride, self.missing).data)
            new.replace(self._path)
        self._stride = stride

    def _map(self) -> np.ndarray:
        return np.memmap(self._path, np.float32, "r", shape=(self.rows, self._stride))


def widened_on_disk(features: Features, path: Path, width: int, missing: float) -> np.ndarray:
    """Features with more columns, all `missing`, in a new file; mapped."""
    file = GrowingFile(path, missing)
    for first in range(0, len(features), ROWS):
        file.append_rows(_widened(features[first : first + ROWS], width, missing))
    return file.finish(width)


def _widened(rows: np.ndarray, width: int, missing: float) -> np.ndarray:
    if rows.shape[1] == width:
        return np.ascontiguousarray(rows)
    wide = np.full((len(rows), width), missing, rows.dtype)
    kept = min(rows.shape[1], width)
    wide[:, :kept] = rows[:, :kept]
    return wide
