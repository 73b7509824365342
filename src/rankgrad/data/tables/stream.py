"""Tables larger than memory: read chunk by chunk into a file, their rows brought together by query at the end.

Rows of a query may be anywhere, as in `read_table`. Features go to a file, and are put into order when that is read; kept in
memory are a few numbers per row (its label, weight and query) and the ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.data.dataset import RankingDataset, as_ids
from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.data.grouping import group_codes, one_per_query
from rankgrad.data.spool import GrowingFile
from rankgrad.data.tables.arrow import (
    PARQUET,
    TEXT,
    Table,
    csv_kinds,
    expect_names,
    expect_short_texts,
    ids_of_texts,
    import_pyarrow,
    kind_of,
    refuse_long_texts,
    sound,
    text_bytes,
)
from rankgrad.data.tables.reader import column_ids, expect_same_columns, number_columns, read_table

CELLS = 1 << 20  # of a chunk, about: some megabytes, and a few times as many while it is converted
FEWEST, MOST = 256, 1 << 16  # rows of a chunk
BLOCK = 2 << 20  # bytes of a chunk of CSV


def spool_tables(
    paths: Sequence[Path],
    spool: Path,
    options: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> RankingDataset:
    """Files read as one table, as `read_table` does with these options; the features are in the new file `spool`.

    `progress` is called with the bytes read so far and the bytes of all files.
    """
    total, done = sum(path.stat().st_size for path in paths), 0
    parts = _Parts(GrowingFile(spool))
    head: Table | None = None
    known = dict(options)
    for path in paths:
        row, size = 0, path.stat().st_size
        for arrow, share in _chunks(path, options):
            chunk = Table(str(path), arrow, row)
            if head is not None and row == 0:
                expect_same_columns([head, chunk], options)
            part = read_table(chunk, **known)
            if head is None:
                head = Table(str(path), arrow.slice(0, 0))
                names = part.feature_names or ()
                known |= {"features": names, "ignore": (), "categorical": [names[n] for n in part.categories]}
                known["by_type"] = False  # the first chunk has decided
            parts.add(part)
            row += arrow.num_rows
            if progress is not None:
                progress(done + round(size * share), total)
        done += size
        if progress is not None:
            progress(done, total)
    if head is None:
        raise ValueError(f"{paths[0]} has no rows; expected one row per document")
    return parts.finish(paths, options)


@dataclass
class _Parts:
    """What was read so far, row by row in the order of the source."""

    matrix: GrowingFile
    first: RankingDataset | None = None
    queries: dict[int | str, int] = field(default_factory=dict)  # ids, numbered as they appear
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)  # numbers and names of documents, in chunks
    levels: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of categories, by column
    counts: dict[str, Any] = field(default_factory=lambda: {"missing": 0, "clamped": 0})

    def add(self, part: RankingDataset) -> None:
        """Add the rows of a chunk, categories in the codes of the chunks before."""
        self.first = self.first or part.select([0])
        for column, texts in part.categories.items():
            self.levels[column] = tuple(dict.fromkeys((*self.levels.get(column, ()), *texts)))
        part = part.recoded(self.levels)
        self.matrix.append_rows(part.in_source_order(np.asarray(part.features)))
        rows = {
            "queries": np.repeat(_numbered(part.query_ids, self.queries), part.lengths),
            "labels": part.labels,
            "weights": None if part.weights is None else np.repeat(part.weights, part.lengths),
            "document_ids": part.document_ids,
            "document_weights": part.document_weights,
        }
        for name, values in rows.items():
            if values is not None:
                self.rows.setdefault(name, []).append(part.in_source_order(values))
        for name in ("missing", "clamped"):
            self.counts[name] += part.provenance[name]
        if "first_clamped" in part.provenance:
            self.counts.setdefault("first_clamped", part.provenance["first_clamped"])

    def finish(self, paths: Sequence[Path], options: Mapping[str, Any]) -> RankingDataset:
        """All rows as one dataset."""
        assert self.first is not None
        codes = self._joined("queries")
        assert codes is not None
        query_ids = _query_ids([*self.queries], options["qid"], paths)
        numbers = _numbered(query_ids, {})
        if numbers[-1] < len(numbers) - 1:  # some texts are the same number, as 7 and 7.0
            codes, query_ids = numbers[codes], query_ids[np.unique(numbers, return_index=True)[1]]
        order, offsets = group_codes(codes)
        del codes
        matrix: Features = self.matrix.finish(self.first.features.shape[1])
        if order is not None:
            matrix = FeatureRows([matrix], order)
        labels, weights, document_ids, document_weights = (
            self._joined(name, order) for name in ("labels", "weights", "document_ids", "document_weights")
        )
        assert labels is not None
        if weights is not None:
            weights = one_per_query(f"column {options['weight']!r}", weights, offsets, query_ids)
        return RankingDataset(
            matrix,
            labels,
            offsets,
            query_ids,
            self.first.feature_names,
            weights,
            order,
            {"sources": [str(path) for path in paths], "rows": len(labels), **self.counts},
            document_ids,
            document_weights,
            self.levels,
        )

    def _joined(self, name: str, order: np.ndarray | None = None) -> np.ndarray | None:
        """All chunks of what is kept of every row, which is let go, in this order; None where there is nothing."""
        parts = self.rows.pop(name, [])
        if not parts:
            return None
        kinds = {part.dtype.kind for part in parts}
        whole = np.concatenate([part.astype(np.str_) if len(kinds) > 1 else part for part in parts])
        return whole if order is None else whole[order]


def _numbered(ids: np.ndarray, known: dict[int | str, int]) -> np.ndarray:
    """The number of each id; those that are not known are given the next ones."""
    return np.array([known.setdefault(one, len(known)) for one in ids.tolist()], np.int32)


def _query_ids(ids: list[int | str], qid: str, paths: Sequence[Path]) -> np.ndarray:
    """Distinct ids; those of CSV files were left as texts, and become numbers if all of them are and no other file has texts."""
    texts = [one for one in ids if isinstance(one, str)]
    csv = [path for path in paths if kind_of(path) in TEXT]
    if texts and csv and (len(csv) == len(paths) or len(texts) < len(ids)):
        pyarrow = import_pyarrow()
        found = ids_of_texts(pyarrow.array(texts, pyarrow.large_string()))
        numbers = column_ids(Table(str(csv[0]), pyarrow.table({qid: found})), qid)
        if isinstance(numbers, np.ndarray):
            number_of = dict(zip(texts, numbers.tolist()))
            ids = [number_of[one] if isinstance(one, str) else one for one in ids]
    if len({type(one) for one in ids}) > 1:
        raise ValueError(f"column {qid!r} is text in one table and a number in another; expected one kind in all")
    return as_ids(f"column {qid!r}", np.array(ids, object))


def _chunks(path: Path, options: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:
    """Tables of some rows, and the share of the file that is read by then."""
    pyarrow = import_pyarrow()
    kind = kind_of(path)
    read = _parquet_chunks if kind in PARQUET else _csv_chunks if kind in TEXT else _arrow_chunks
    try:
        yield from read(path, options)
    except pyarrow.ArrowMemoryError as error:  # of a damaged file, as a rule: its numbers say how much
        raise ValueError(
            f"{path} asks for more memory than there is ({error}); expected a whole file; write it again if it is damaged"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | MemoryError):
            raise
        with warnings.catch_warnings(action="ignore"):
            read_table(path, **options)  # which finds the place and says it
        raise ValueError(
            f"cannot read {path} in parts: {error}; expected a column to hold values of one kind from its beginning; name it in "
            "data.categorical, or in data.ignore"
        ) from error


def _rows(columns: int) -> int:
    return min(max(CELLS // max(columns, 1), FEWEST), MOST)


def _parquet_chunks(path: Path, options: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:  # noqa: ARG001
    pyarrow = import_pyarrow()
    expect_short_texts(path)
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        schema, total, done = file.schema_arrow, file.metadata.num_rows, 0
        for batch in map(sound, file.iter_batches(_rows(len(schema)))):
            done += batch.num_rows
            yield pyarrow.Table.from_batches([batch]).replace_schema_metadata(schema.metadata), done / max(total, 1)


def _csv_chunks(path: Path, options: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:
    pyarrow = import_pyarrow()
    qid, size = options["qid"], path.stat().st_size
    parse, kinds = csv_kinds(path, qid, number_columns(options))
    reading, convert = pyarrow.csv.ReadOptions(block_size=BLOCK), pyarrow.csv.ConvertOptions(column_types=kinds)
    with pyarrow.OSFile(str(path)) as file, pyarrow.input_stream(file, compression=_compression(path)) as stream:
        for batch in pyarrow.csv.open_csv(stream, reading, parse, convert):
            table = pyarrow.Table.from_batches([batch])
            if table.column_names.count(qid) == 1:
                texts = pyarrow.compute.utf8_trim_whitespace(table[qid])
                texts = pyarrow.compute.if_else(pyarrow.compute.equal(texts, ""), None, texts)
                table = table.set_column(table.column_names.index(qid), qid, texts)
            if table.num_rows:
                yield table, min(file.tell() / max(size, 1), 1.0)


def _compression(path: Path) -> str | None:
    return {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}.get(path.suffix.lower())


def _arrow_chunks(path: Path, options: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:  # noqa: ARG001
    pyarrow = import_pyarrow()
    with pyarrow.memory_map(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
            batches: Any = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = batches = pyarrow.ipc.open_stream(file)
        expect_names(reader.schema)
        for batch in map(sound, batches):
            refuse_long_texts(path, text_bytes(batch))
            rows, share = _rows(batch.num_columns), min(file.tell() / max(file.size(), 1), 1.0)
            for first in range(0, batch.num_rows, rows):
                part = pyarrow.Table.from_batches([batch.slice(first, rows)])
                yield part.replace_schema_metadata(reader.schema.metadata), share
