"""Files and frames as Arrow tables: Parquet, CSV, Arrow files, and frames of pandas, polars, pyarrow.

pyarrow is an extra and is imported when a table is read; pandas and polars are never imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rankgrad.data.memory import affordable, expect_archive, many_times

PARQUET, TEXT, ARROW = (".parquet", ".pq"), (".csv", ".tsv"), (".arrow", ".feather", ".ipc")
ARCHIVES = (".gz", ".bz2", ".zst")
TEXTS_AT_ONCE = 1 << 16  # rows
NULLS = ("NA", "N/A", "NULL", "Null", "null", "None", "none")


class Table(NamedTuple):
    """An Arrow table and what to call it in errors; `first` is the row of the source that it begins with."""

    name: str
    arrow: Any
    first: int = 0


def kind_of(path: Path) -> str | None:
    """The ending that makes a file a table, in small letters; None if it is no table.

    >>> kind_of(Path("train.CSV.gz")), kind_of(Path("train.csv.txt"))
    ('.csv', None)
    """
    packed = path.suffix.lower() in ARCHIVES
    kind = Path(path.stem if packed else path.name).suffix.lower()
    return kind if kind in PARQUET + TEXT + ARROW else None


def open_table(source: Any, number: int, qid: str, wanted: Callable[[str], bool]) -> Table:
    """An Arrow table of a path or a frame, with a duplicate column name refused.

    A CSV file leaves the type of its columns open: `qid` is read as text or numbers, `wanted` columns as numbers or what they
    look like, and the others as text, which takes anything.
    """
    pyarrow = import_pyarrow()
    package = type(source).__module__.split(".")[0]
    name = f"the {package} table" if number == 0 else f"{package} table {number + 1}"
    if isinstance(source, Table):  # a part of a file
        table = source
    elif isinstance(source, str | os.PathLike):
        table = Table(os.fspath(source), _read_file(Path(source), qid, wanted))
    elif isinstance(source, pyarrow.Table):
        table = Table(name, source)
    elif hasattr(source, "columns" if package == "pandas" else "__arrow_c_stream__"):  # a Series has only the latter
        table = Table(name, _of_frame(source, name))
    else:
        raise ValueError(
            f"cannot read a table from {type(source).__name__}; expected a path, a pyarrow Table, "
            "or a pandas or polars DataFrame"
        )
    _refuse_duplicate_columns(table.name, table.arrow.column_names)
    return table


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading tables needs pyarrow; pip install 'rankgrad[tables]'") from error
    return pyarrow


def _of_frame(frame: Any, name: str) -> Any:
    pyarrow = import_pyarrow()
    is_pandas = hasattr(frame, "iloc")
    if is_pandas:
        _refuse_duplicate_columns(name, [str(column) for column in frame.columns])
    try:
        if is_pandas:  # its __arrow_c_stream__ would add the index as a column
            return pyarrow.Table.from_pandas(frame, preserve_index=False)
        return pyarrow.table(frame)
    except Exception as error:  # every package raises errors of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot read {name}: {reason}; expected columns of one type that Arrow knows") from error


def _refuse_duplicate_columns(name: str, columns: list[str]) -> None:
    if len(set(columns)) < len(columns):
        twice = min(column for column in columns if columns.count(column) > 1)
        hint = "add the line of names, which seems to be missing" if reads_as_number(twice) else "rename one"
        raise ValueError(f"{name} has several columns named {twice!r}; expected distinct names; {hint}")


def _read_file(path: Path, qid: str, wanted: Callable[[str], bool]) -> Any:
    pyarrow = import_pyarrow()
    kind = kind_of(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file; give the list of its files")
    if kind is None:
        raise ValueError(f"{path} has no known ending; expected {', '.join(PARQUET + TEXT + ARROW)}; rename it")
    try:
        if kind in PARQUET:
            expect_short_texts(path)
            with pyarrow.parquet.ParquetFile(path) as file:
                _expect_affordable(path, 8 * file.metadata.num_rows * max(1, file.metadata.num_columns))
                return sound(file.read())
        if kind in TEXT:
            _expect_archive(path)
            return _read_csv(path, "," if kind == ".csv" else "\t", qid, wanted)
        return _read_arrow(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        reason = " ".join(str(error).split())  # some have several lines
        raise ValueError(
            f"cannot read {path} as {kind[1:]}: {reason}; expected an undamaged file of that kind"
        ) from error


def sound(arrow: Any) -> Any:
    """The same table or batch, looked through: what lies outside its buffers would crash the process that computes with it."""
    arrow.validate(full=True)
    return arrow


def expect_names(schema: Any) -> None:
    """A UnicodeDecodeError where the name of a column is no text, here and not where it is first used."""
    assert all(isinstance(name, str) for name in schema.names)


def _read_csv(path: Path, delimiter: str, qid: str, wanted: Callable[[str], bool]) -> Any:
    """Numbers are asked for as float64: left to itself, pyarrow takes 0x10 for an integer."""
    pyarrow = import_pyarrow()
    csv, parse = pyarrow.csv, pyarrow.csv.ParseOptions(delimiter=delimiter)

    def read(kinds: dict[str, Any], nulls: bool = False) -> Any:
        kinds = others | kinds | {qid: pyarrow.large_string()}
        convert = csv.ConvertOptions(column_types=kinds, strings_can_be_null=nulls)
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            return csv.read_csv(stream, parse_options=parse, convert_options=convert)

    guess, numbers, others = _guess_kinds(path, parse, wanted)
    _refuse_duplicate_columns(str(path), guess.names)
    try:
        table = read(dict.fromkeys(numbers, pyarrow.float64()))
    except pyarrow.ArrowInvalid as error:
        column = re.search(r"column #(\d+)", str(error))
        if column is not None:  # the column is known but not the row: look for it among the texts
            name = guess.names[int(column[1])]
            expect_numbers(Table(str(path), read({name: pyarrow.large_string()}, nulls=True)), name)
        raise
    for name in numbers:
        if name == qid:
            continue
        infinite = pyarrow.compute.is_inf(table[name])
        if pyarrow.compute.any(infinite).as_py():  # written so, or too large for float64: the text says which
            row = pyarrow.compute.index(infinite, True).as_py()
            token = read({name: pyarrow.large_string()})[name][row].as_py()
            raise ValueError(
                f"{at(Table(str(path), table), row, name)} is {token!r}, which is infinite or beyond float64; "
                "expected a finite number or null"
            )
    if table.column_names.count(qid) != 1:
        return table  # the check of the columns reports it
    return table.set_column(table.column_names.index(qid), qid, ids_of_texts(table[qid]))


def _guess_kinds(path: Path, parse: Any, wanted: Callable[[str], bool]) -> tuple[Any, list[str], dict[str, Any]]:
    """By the beginning of a file: its schema, the wanted columns that hold numbers, and the type of those not wanted."""
    pyarrow = import_pyarrow()
    types = pyarrow.types
    with pyarrow.input_stream(str(path), compression="detect") as stream:
        guess = pyarrow.csv.open_csv(stream, parse_options=parse).schema
    tests = (types.is_integer, types.is_floating, types.is_null)
    numbers = [f.name for f in guess if wanted(f.name) and any(t(f.type) for t in tests)]
    return guess, numbers, {name: pyarrow.large_string() for name in guess.names if not wanted(name)}


def csv_kinds(path: Path, qid: str, wanted: Callable[[str], bool]) -> tuple[Any, dict[str, Any]]:
    """How a CSV file is parsed, and the types of its columns, the query ids as texts."""
    pyarrow = import_pyarrow()
    parse = pyarrow.csv.ParseOptions(delimiter="," if kind_of(path) == ".csv" else "\t")
    _, numbers, others = _guess_kinds(path, parse, wanted)
    return parse, others | dict.fromkeys(numbers, pyarrow.float64()) | {qid: pyarrow.large_string()}


def ids_of_texts(texts: Any) -> Any:
    """Texts as numbers if all of them are, unless that would lose a leading zero (007); the empty text as null."""
    pyarrow = import_pyarrow()
    compute = pyarrow.compute
    texts = compute.utf8_trim_whitespace(texts)
    texts = compute.if_else(compute.equal(texts, ""), None, texts)
    if not compute.any(compute.match_substring_regex(texts, r"^[+-]?0\d|[xX_]")).as_py():
        for kind in (pyarrow.int64(), pyarrow.float64()):
            try:
                return texts.cast(kind)
            except pyarrow.ArrowInvalid:
                continue
    return texts


def _read_arrow(path: Path) -> Any:
    """Arrow files come in two formats under the same endings: with a table of contents, or as a stream."""
    pyarrow = import_pyarrow()
    with pyarrow.memory_map(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = pyarrow.ipc.open_stream(file)
        expect_names(reader.schema)
        return _read_batches(path, reader)


def _read_batches(path: Path, reader: Any) -> Any:
    """All of them as one table; each is looked through first, because what counts its bytes mends a wrong count of nulls."""
    batches, size, texts = [], 0, 0
    every = iter(reader) if hasattr(reader, "__iter__") else map(reader.get_batch, range(reader.num_record_batches))
    for batch in map(sound, every):
        size += batch.nbytes
        _expect_affordable(path, size)
        texts += text_bytes(batch)
        refuse_long_texts(path, texts)
        batches.append(batch)
    return import_pyarrow().Table.from_batches(batches, reader.schema)


def _expect_affordable(path: Path, size: int) -> None:
    """Refuse a table that is many times as large in memory as on the disk, and for which there is no room."""
    if many_times(path, size) and not affordable(size):
        raise ValueError(
            f"{path} would take {size:,} bytes of memory, many times its size and more than can be spared; expected a "
            "smaller table; `rankgrad prepare` reads it in parts"
        )


def expect_short_texts(path: Path) -> None:
    """Refuse a Parquet file with a long text that it holds once and repeats in many rows: a kilobyte would be gigabytes in memory.

    What is said of a column is not asked for: where that is damaged, pyarrow ends the process.
    """
    parquet = import_pyarrow().parquet
    with parquet.ParquetFile(path) as file:
        names = [field.name for field in file.schema_arrow if _is_bytes(field.type)]
        groups = range(file.metadata.num_row_groups)
        refuse_long_texts(path, sum(file.metadata.row_group(number).total_byte_size for number in groups))
    size = 0
    for name in names:
        with parquet.ParquetFile(path, read_dictionary=[name]) as file:
            try:
                for batch in map(sound, file.iter_batches(TEXTS_AT_ONCE, columns=[name])):
                    size += text_bytes(batch)
                    refuse_long_texts(path, size)
            except OSError as error:
                if "Not yet implemented" not in str(error):  # texts that are written as differences have no dictionary
                    raise


def text_bytes(batch: Any) -> int:
    """How many bytes the texts of categories take, written out in each row of a sound batch."""
    pyarrow = import_pyarrow()
    compute, size = pyarrow.compute, 0
    for column in batch.columns:
        if pyarrow.types.is_dictionary(column.type) and _is_bytes(column.type):
            lengths = compute.binary_length(column.dictionary).cast(pyarrow.int64())
            size += compute.sum(lengths.take(column.indices)).as_py() or 0
    return size


def refuse_long_texts(path: Path, size: int) -> None:
    """Refuse texts that take many times as much in memory as on the disk, and for which there is no room."""
    if many_times(path, size) and not affordable(size):
        raise ValueError(
            f"{path} would take {size:,} bytes of memory for its texts, many times its size and more than can be spared; expected "
            "ids and categories; write it without its long texts"
        )


def _is_bytes(kind: Any) -> bool:
    types = import_pyarrow().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _expect_archive(path: Path) -> None:
    """Refuse compressed text that unpacks to many times its size."""
    if path.suffix.lower() not in ARCHIVES:
        return
    unpacked = 0
    with import_pyarrow().input_stream(str(path), compression="detect") as stream:
        while chunk := stream.read(1 << 20):
            unpacked += len(chunk)
            expect_archive(path, unpacked)


def at(table: Table, row: int, name: str) -> str:
    return f"{table.name}, row {table.first + row + 1}, column {name!r}"


def expect_numbers(
    table: Table,
    name: str,
    hint: str = "convert the column, leave it out (--set data.ignore= in train, ignore= or features= in Python), or take its values "
    "for categories (--set data.categorical=, categorical=)",
) -> None:
    types = import_pyarrow().types
    column = plain(table.arrow[name])
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null)
    if not any(test(column.type) for test in tests):
        values = column.to_pylist()
        strange = [i for i, value in enumerate(values) if not reads_as_number(value)] or [0]
        row = next((i for i in strange if values[i] not in NULLS), strange[0])  # not a word for null, if possible
        raise ValueError(
            f"{at(table, row, name)} is {values[row]!r}, in a column of type {column.type}; expected numbers; {hint}"
        )


def plain(column: Any) -> Any:
    """A column of categories as their values, and text of any Arrow type as large_string."""
    pyarrow = import_pyarrow()
    types = pyarrow.types
    if isinstance(column, pyarrow.ChunkedArray) and types.is_dictionary(column.type):
        kind = pyarrow.large_string() if is_text(column.type.value_type) else column.type.value_type
        return pyarrow.chunked_array([plain(chunk) for chunk in column.chunks], kind)
    if types.is_dictionary(column.type):
        return plain(column.dictionary).take(column.indices)
    return column.cast(pyarrow.large_string()) if is_text(column.type) else column


def is_text(kind: Any) -> bool:
    types = import_pyarrow().types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def reads_as_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return value is None or value == ""
    return "_" not in str(value)
