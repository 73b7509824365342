"""A block of SVMLight lines into arrays: compiled where lines are plain, strict line by line where not.

Importing this module does not import numba: the compiled code is loaded when the first block is parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from rankgrad.data.svmlight.line import DEFAULT_RULES, MAX_LINE, LineError, Row, Rules, read_line

# Slots of the int64 array in which the compiled reader and `parse_block` count; *_LINE are line numbers from 1.
ROWS, ENTRIES, LINES, CLAMPED, CLAMPED_LINE, WIDEST, WIDEST_LINE, SLOTS = range(8)
SEEN = 1 << 16  # unsorted lines are checked for repeated indices below this


class Scratch:
    """Arrays that blocks are parsed into, one block after the other; they grow to the largest and are never cleared."""

    def __init__(self) -> None:
        self._capacity = -1
        self.seen = np.zeros(SEEN, np.int64)

    def reserve(self, size: int) -> None:
        """Hold what a text of `size` bytes can hold at most: a row takes 2 bytes, an entry 4."""
        if size > self._capacity:
            self._capacity = size + size // 8
            self.labels = np.empty(self._capacity // 2 + 1, np.float32)
            self.qids = np.empty(self._capacity // 2 + 1, np.int64)
            self.row_ends = np.empty(self._capacity // 2 + 1, np.int64)
            self.indices = np.empty(self._capacity // 4 + 1, np.int32)
            self.values = np.empty(self._capacity // 4 + 1, np.float32)


@dataclass(frozen=True)
class Parsed:
    """The documents of a block; lines count from 1 within it. Views into a Scratch: copy before its next use."""

    labels: np.ndarray  # float32 [n]
    qids: np.ndarray  # int64 [n]
    row_ends: np.ndarray  # int64 [n]: row r has the entries row_ends[r - 1]:row_ends[r]
    indices: np.ndarray  # int32 [entries], of features, from 1
    values: np.ndarray  # float32 [entries]
    lines: int
    clamped: int
    first_clamped: int  # its line
    widest: int  # largest of the indices
    widest_line: int


class BlockError(Exception):
    """A line of a block that the strict reader refused."""

    def __init__(self, line: int, cause: LineError) -> None:
        super().__init__(cause.reason)
        self.line = line
        self.cause = cause


def _compiled() -> ModuleType:
    """The compiled reader, loaded when first needed: numba takes half a second, and seconds if nothing is cached."""
    from rankgrad.data.svmlight import compiled

    return compiled


def parse_block(text: bytes, scratch: Scratch, rules: Rules = DEFAULT_RULES) -> Parsed:
    r"""The documents of whole lines of text, the last ending with a newline too.

    >>> block = parse_block(b"2 qid:7 1:0.5\n0 qid:7 3:1\n", Scratch())
    >>> block.labels.tolist(), block.qids.tolist(), block.indices.tolist()
    ([2.0, 0.0], [7, 7], [1, 3])
    """
    compiled = _compiled()
    scratch.reserve(len(text))
    state = np.zeros(SLOTS, np.int64)
    parts = scratch.indices, scratch.values, scratch.row_ends, scratch.labels, scratch.qids
    bytes_of_text = np.frombuffer(text, np.uint8)
    # Blocks are shorter than MAX_LINE but for a first line put together from many: only that can be too long.
    fast = compiled.COMPILED and (len(text) <= MAX_LINE or text.index(b"\n") <= MAX_LINE)
    at = 0
    while True:
        if fast:
            at = compiled.read_lines(
                bytes_of_text, at, rules.wants_qid, rules.limit, 1 - rules.base, *parts, scratch.seen, state
            )
        if at == len(text):
            break
        end = text.index(b"\n", at)
        state[LINES] += 1
        try:
            row = read_line(text[at:end], rules)
        except LineError as refused:
            raise BlockError(int(state[LINES]), refused) from None
        if row is not None:
            _append(row, scratch, state)
        at = end + 1
    rows, entries = state[ROWS], state[ENTRIES]
    return Parsed(
        labels=scratch.labels[:rows],
        qids=scratch.qids[:rows],
        row_ends=scratch.row_ends[:rows],
        indices=scratch.indices[:entries],
        values=scratch.values[:entries],
        lines=int(state[LINES]),
        clamped=int(state[CLAMPED]),
        first_clamped=int(state[CLAMPED_LINE]),
        widest=int(state[WIDEST]),
        widest_line=int(state[WIDEST_LINE]),
    )


def _append(row: Row, scratch: Scratch, state: np.ndarray) -> None:
    at, start = state[ROWS], state[ENTRIES]
    end = start + len(row.indices)
    scratch.labels[at], scratch.qids[at], scratch.row_ends[at] = row.label, row.query, end
    scratch.indices[start:end], scratch.values[start:end] = row.indices, row.values
    state[ROWS], state[ENTRIES] = at + 1, end
    if row.clamped and not state[CLAMPED]:
        state[CLAMPED_LINE] = state[LINES]
    state[CLAMPED] += len(row.clamped)
    if max(row.indices, default=0) > state[WIDEST]:
        state[WIDEST], state[WIDEST_LINE] = max(row.indices), state[LINES]


def scatter(block: Parsed, dense: np.ndarray, missing: float) -> None:
    """Write a block's rows into dense [n, F], with `missing` where a row has no entry."""
    compiled = _compiled()
    if compiled.COMPILED:
        compiled.scatter(block.indices, block.values, block.row_ends, dense, missing)
    else:
        lengths = np.diff(block.row_ends, prepend=0)
        dense[:] = missing
        dense[np.repeat(np.arange(len(dense)), lengths), block.indices - 1] = block.values
