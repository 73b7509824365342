"""LETOR/SVMLight text into a RankingDataset: strict, parallel, in little more memory than the result.

Files are read in blocks of whole lines (`text`), which threads parse (`blocks`) while the results are put, in order,
into one dense matrix that grows in place (`matrix`). The rules of the format are those of `line`.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.checks import one_of, whole
from rankgrad.data.dataset import RankingDataset, as_texts
from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.data.grouping import as_missing, first_return, group_rows
from rankgrad.data.sparse import SparseRows
from rankgrad.data.spool import GrowingFile
from rankgrad.data.svmlight import text as text_files
from rankgrad.data.svmlight.blocks import BlockError, Parsed, Scratch, parse_block
from rankgrad.data.svmlight.line import MAX_INDEX, Rules, clamped_column, find_index, quote
from rankgrad.data.svmlight.matrix import GrowingMatrix, GrowingRows

PathLike = str | os.PathLike[str]

# Up to MODEST_BYTES of dense result, any width found in the files is taken; beyond, the text must make it plausible.
MODEST_BYTES = 1 << 30
BYTES_PER_TEXT_BYTE = 64
FAR_BEYOND = 8  # an index more than this many times the largest index of any other part of the file is a mistake
SHARE_OF_MEMORY = 0.5
WIDE, FILLED = 1_024, 0.1  # columns from which text is kept sparse, and how much of them is named at most

# A line that holds a document, and the name in its comment if there is one; possessive: no backtracking.
_DOCUMENT = re.compile(rb"^[ \t]*+[^#\s][^#\n]*+(?:#[ \t]*+docid[ \t]*+=[ \t]*+(\S++))?", re.MULTILINE)

logger = logging.getLogger(__name__)


def read_svmlight(
    path: PathLike | Sequence[PathLike],
    *,
    features: int | None = None,
    groups: PathLike | Sequence[PathLike] | None = None,
    missing: float = 0.0,
    zero_based: bool = False,
    sparse: bool = False,
    scattered: str = "group",
    progress: Callable[[int, int], None] | None = None,
    spool: PathLike | None = None,
) -> RankingDataset:
    r"""Read lines `label qid:Q i:v i:v ... # comment`, plain or compressed (.gz, .bz2, .zst).

    - `path`: a file, or several that are read as if they were one: rows are numbered through, and a query id that
      occurs in two files is one query. (Read files that number their queries independently one by one, and concatenate
      them.)
    - `features`: the number of features F; an index beyond it is refused. None takes the largest index in the files,
      unless that makes the result larger than 1 GiB and than the text justifies, or larger than half of the machine's
      memory: then it is refused.
    - `groups`: for files without qid, a side file each, with the number of rows of one query per line; queries are
      numbered from 0.
    - `missing`: the value of features that a line does not name: a number that float32 holds, or NaN; with NaN a line may
      also write nan for a value.
    - `zero_based`: whether the first feature has index 0, as in files of scikit-learn; else it has index 1.
    - `sparse`: keep the features of text sparse that names 1,024 of them or more, and in its first lines a tenth of them or less.
    - `scattered`: where the rows of a query are not together, "group" moves them to the query's first row (`rows` of
      the result remembers where they were) and "refuse" raises an error.
    - `progress`: called with the bytes read so far and the bytes of all files.
    - `spool`: a new file that holds the features instead of memory; it is mapped by the result and can be removed after it.

    Where the comment of every line begins with `docid = NAME`, as in LETOR, the names are the result's `document_ids`.

    A line that breaks the rules of `rankgrad.data.svmlight.line` raises a ValueError that begins with file:line:column.
    A number beyond float32 becomes the largest float32: `provenance["clamped"]` counts these,
    `provenance["first_clamped"]` is the place of the first, and a warning is logged.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "train.txt"
    ...     _ = file.write_text("2 qid:7 1:0.5 3:1\n0 qid:7 2:4\n1 qid:9 1:3 # a comment\n")
    ...     data = read_svmlight(file)
    >>> data.features.tolist(), data.offsets.tolist(), data.query_ids.tolist()
    ([[0.5, 0.0, 1.0], [0.0, 4.0, 0.0], [3.0, 0.0, 0.0]], [0, 2, 3], [7, 9])
    """
    paths = _as_paths("path", path)
    sides = None if groups is None else _as_paths("groups", groups)
    if sides is not None and len(sides) != len(paths):
        raise ValueError(f"groups has {len(sides)} side files for {len(paths)} data files; expected one for each")
    features = None if features is None else whole("features", features, 1)
    missing = as_missing(missing)
    one_of("scattered", scattered, ("group", "refuse"))

    matrix = GrowingMatrix(missing) if spool is None else GrowingFile(Path(spool), missing)
    reading = _Reading(matrix, features or 0, fixed=features is not None, base=0 if zero_based else 1)
    reading.sparse = sparse and spool is None
    rules = Rules(wants_qid=sides is None, limit=features or MAX_INDEX, base=reading.base, nan=bool(np.isnan(missing)))
    _read(paths, reading, rules, progress=progress)
    labels, qids = np.concatenate(reading.labels), np.concatenate(reading.qids)
    if sides is None:
        order, offsets, query_ids = group_rows(qids)
        if order is not None and scattered == "refuse":
            raise _scattered_error(paths, qids)
    else:
        per_file = zip(sides, paths, reading.rows_per_file)
        sizes = np.concatenate([_read_groups(side, file, rows) for side, file, rows in per_file])
        offsets, query_ids, order = np.concatenate(([0], np.cumsum(sizes))), np.arange(len(sizes)), None
    read = reading.matrix.finish(reading.width)
    finished: Features = FeatureRows([read]) if isinstance(read, SparseRows) else read
    if order is not None:
        if isinstance(reading.matrix, GrowingMatrix):
            from rankgrad.data.svmlight.compiled import permute_rows  # loaded by now: the files have been parsed

            permute_rows(finished, order)
        else:
            finished = FeatureRows([read], order)
        labels = labels[order]
    document_ids = _document_ids(reading.document_ids, order)
    files = [
        {"path": str(file), "bytes": file.stat().st_size, "rows": rows}
        for file, rows in zip(paths, reading.rows_per_file)
    ]
    provenance: dict[str, Any] = {
        "format": "svmlight",
        "files": files,
        "largest_index": reading.largest,
        "clamped": reading.clamped,
    }
    if reading.clamped:
        provenance["first_clamped"] = reading.first_clamped
        logger.warning(
            "%d values beyond float32 became the largest float32, the first at %s",
            reading.clamped,
            reading.first_clamped,
        )
    return RankingDataset(
        finished, labels, offsets, query_ids, rows=order, provenance=provenance, document_ids=document_ids
    )


@dataclass
class _Reading:
    """The blocks read so far, put together in file order."""

    matrix: GrowingMatrix | GrowingFile | GrowingRows
    width: int  # fixed by the caller, or the largest index so far
    fixed: bool
    base: int = 1  # index of the first feature
    sparse: bool = False  # where that suits the text
    labels: list[np.ndarray] = field(default_factory=list)
    qids: list[np.ndarray] = field(default_factory=list)
    document_ids: list[np.ndarray | None] = field(default_factory=list)  # None: not every line of the block has one
    rows_per_file: list[int] = field(default_factory=list)
    clamped: int = 0
    first_clamped: str | None = None
    text_bytes: int = 0
    largest: int = 0  # the largest index so far
    second: int = 0  # the largest index of the blocks that do not hold that one
    widest: tuple[Path, int, bytes] | None = None  # file, line number and line that set the width

    def append(self, block: Parsed, text: bytes, path: Path, lines: int, share: float) -> None:
        """Add a block that begins after `lines` lines of its file and ends at a share of all bytes to read."""
        self.text_bytes += len(text)
        if block.clamped and not self.clamped:
            column = clamped_column(_nth_line(text, block.first_clamped))
            self.first_clamped = f"{path}:{lines + block.first_clamped}:{column}"
        self.clamped += block.clamped
        self.second = max(self.second, min(self.largest, block.widest) if block.widest != self.largest else 0)
        self.largest = max(self.largest, block.widest)
        if block.widest > self.width:
            self.width = block.widest
            self.widest = path, lines + block.widest_line, _nth_line(text, block.widest_line)
        self._refuse_absurd_width(len(block.labels))
        wide = self.sparse and not self.matrix.rows and self.width >= WIDE
        if wide and len(block.values) <= FILLED * self.width * len(block.labels):
            self.matrix = GrowingRows(self.matrix.missing)
        self.matrix.append(block, self.width, round(len(block.labels) / share))
        self.labels.append(block.labels.copy())
        self.qids.append(block.qids.copy())
        self.document_ids.append(ids_in_comments(text))
        self.rows_per_file[-1] += len(block.labels)

    def _refuse_absurd_width(self, more_rows: int) -> None:
        """Refuse a width that nothing justifies: a mistake in one index must not use up the memory."""
        size = 4 * self.width * (self.matrix.rows + more_rows)
        if self.widest is None or size <= MODEST_BYTES:
            return
        memory = memory_bytes() if isinstance(self.matrix, GrowingMatrix) else None
        if size > BYTES_PER_TEXT_BYTE * self.text_bytes:
            excess = f"more than {BYTES_PER_TEXT_BYTE} times the text"
        elif self.second and self.width > FAR_BEYOND * self.second:
            excess = f"while no other part of the text goes beyond index {self.second}"
        elif memory is not None and size > SHARE_OF_MEMORY * memory:
            excess = f"more than half of this machine's {memory / 2**30:,.0f} GiB of memory"
        else:
            return
        path, number, line = self.widest
        column, token = find_index(line, self.width - 1 + self.base)
        raise ValueError(
            f"{path}:{number}:{column}: {token} makes the dense result at least {size / 2**30:,.1f} GiB, {excess}; "
            f"expected indices near the number of features; correct the index, or pass features={self.width} if it "
            "is right"
        )


def ids_in_comments(text: bytes) -> np.ndarray | None:
    r"""The names of the documents of whole lines, from comments `#docid = NAME`; None where a line has none.

    >>> ids_in_comments(b"2 qid:7 1:0.5 #docid = GX001 inc = 1\n# a comment\n0 qid:7 1:3 # docid = GX002\n").tolist()
    ['GX001', 'GX002']
    """
    if b"docid" not in text:  # which is quick to see
        return None
    names = _DOCUMENT.findall(text)
    if not all(names):
        return None
    return as_texts("docid", [name.decode("utf-8", "backslashreplace").replace("\0", "\ufffd") for name in names])


def _document_ids(parts: Sequence[np.ndarray | None], order: np.ndarray | None) -> np.ndarray | None:
    """The names of all documents in the order of the dataset, if every one has a name."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    ids = np.concatenate(known)
    return ids if order is None else ids[order]


def memory_bytes() -> int | None:
    """The machine's memory, where the system reports it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _read(
    paths: Sequence[Path],
    reading: _Reading,
    rules: Rules,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Read the files in order: several threads parse blocks, this one puts them together."""
    affinity = getattr(os, "sched_getaffinity", None)  # the cores this process may use; not on every system
    workers = min(len(affinity(0)) if affinity else os.cpu_count() or 1, 16)
    scratches = [Scratch() for _ in range(workers + 2)]
    sizes = [path.stat().st_size for path in paths]
    small = sum(sizes) <= text_files.BLOCK  # not worth a thread
    with ThreadPoolExecutor(workers) as pool:
        for number, path in enumerate(paths):
            reading.rows_per_file.append(0)
            lines = 0

            def start(text: bytes, scratch: Scratch) -> Callable[[], Parsed]:
                if small:
                    return partial(parse_block, text, scratch, rules)
                return pool.submit(parse_block, text, scratch, rules).result

            try:
                for block, text, done in _parsed(text_files.blocks(path), start, scratches):
                    done += sum(sizes[:number])
                    reading.append(block, text, path, lines, done / max(sum(sizes), done))
                    lines += block.lines
                    if progress is not None:
                        progress(done, sum(sizes))
            except BlockError as refused:
                raise ValueError(
                    f"{path}:{lines + refused.line}:{refused.cause.column}: {refused.cause.reason}"
                ) from None
            if not reading.rows_per_file[-1]:
                raise ValueError(
                    f"{path} holds no data, only blank lines and comments; expected lines such as "
                    "'2 qid:7 1:0.5'; check how it was made"
                )
    if not reading.width:
        raise ValueError(
            f"{paths[0]} names no feature in any line; expected features such as 1:0.5 after the qid; "
            "pass features= if every one is missing"
        )


def _parsed(
    source: Iterator[tuple[bytes, int]],
    start: Callable[[bytes, Scratch], Callable[[], Parsed]],
    scratches: Sequence[Scratch],
) -> Iterator[tuple[Parsed, bytes, int]]:
    """Blocks in their order, parsed ahead as far as there are scratches: (block, its text, bytes used up).

    A block is valid until the next is asked for. An error of the source is raised after the blocks before it were
    parsed, so that the first error in the file is the one reported.
    """
    ahead: deque[tuple[Callable[[], Parsed], bytes, int]] = deque()
    failure: ValueError | None = None
    started, more = 0, True
    while more or ahead:
        while more and len(ahead) < len(scratches):
            try:
                text, done = next(source)
            except StopIteration:
                more = False
            except ValueError as error:
                failure, more = error, False
            else:
                ahead.append((start(text, scratches[started % len(scratches)]), text, done))
                started += 1
        if ahead:
            parsed, text, done = ahead.popleft()
            yield parsed(), text, done
    if failure is not None:
        raise failure


def _scattered_error(paths: Sequence[Path], qids: np.ndarray) -> ValueError:
    """Name the first row whose query had ended before."""
    path, number, line = _locate(paths, first_return(qids))
    found = re.search(rb"[ \t](qid:[^ \t\r#]*)", line)
    assert found is not None  # the row was accepted
    return ValueError(
        f"{path}:{number}:{found.start(1) + 1}: {quote(found[1])} comes again after other queries; expected the "
        "rows of a query together; sort the file, or pass scattered='group'"
    )


def _locate(paths: Sequence[Path], row: int) -> tuple[Path, int, bytes]:
    """File, line number and line of a row of accepted files."""
    for path in paths:
        number = 0
        for text, _ in text_files.blocks(path):
            for line in text.split(b"\n")[:-1]:
                number += 1
                if line.removesuffix(b"\r").partition(b"#")[0].strip(b" \t"):
                    if row == 0:
                        return path, number, line
                    row -= 1
    raise LookupError("the files have fewer rows; they changed while they were read")


def _read_groups(side: Path, file: Path, rows: int) -> np.ndarray:
    """The group sizes of a side file, one per line, int64 [Q]; they must sum to the rows of its data file."""
    sizes: list[int] = []
    number = 0
    if side.is_file() and not side.stat().st_size:
        raise ValueError(
            f"{side} is empty; expected the number of rows of one query on each line; check how it was made"
        )
    for text, _ in text_files.blocks(side):
        for line in text.split(b"\n")[:-1]:
            number += 1
            token = line.strip(b" \t\r")
            if not token:
                continue
            if not re.fullmatch(rb"\d{1,18}", token) or int(token) == 0:
                raise ValueError(
                    f"{side}:{number}:{line.index(token) + 1}: {quote(token)} is not a group size; "
                    "expected the number of rows of one query, 1 or more, on each line"
                )
            sizes.append(int(token))
    if sum(sizes) != rows:
        raise ValueError(
            f"{side} has group sizes that sum to {sum(sizes)}, but {file} has {rows} rows; "
            "expected the same; check that the two files belong together"
        )
    return np.array(sizes, np.int64)


def _nth_line(text: bytes, number: int) -> bytes:
    return text.split(b"\n", number)[number - 1]


def _as_paths(name: str, given: PathLike | Sequence[PathLike]) -> list[Path]:
    try:
        paths = [Path(given)] if isinstance(given, str | os.PathLike) else [Path(path) for path in given]
    except TypeError:
        raise ValueError(f"{name} is {given!r}; expected the path of a file, or a list of paths") from None
    if not paths:
        raise ValueError(f"{name} is an empty list; expected one file or several")
    return paths
