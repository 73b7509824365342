"""Text files as blocks of whole lines: plain or compressed, in bounded memory; files of other formats are refused.

The compression is recognised by the first bytes; a file named .gz that is not gzip is an error.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rankgrad.data.memory import expect_archive
from rankgrad.data.svmlight.line import MAX_LINE, quote

BLOCK = 2 << 20  # bytes read at a time: a block and what is parsed from it stay in the processor's cache
# One byte of zstd can stand for 32 KiB of text, and its decoder has no limit on what one call returns.
ZSTD_BYTES = 2048

_ARCHIVES = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".zst": b"\x28\xb5\x2f\xfd"}
_BOM = b"\xef\xbb\xbf"
_FOREIGN_MAGIC = (  # first bytes, what has them, what to do
    (b"\x89PNG", "a PNG image", "give the data file itself"),
    (b"\xff\xd8\xff", "a JPEG image", "give the data file itself"),
    (b"%PDF", "a PDF document", "give the data file itself"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"PAR1", "a Parquet file", "use read_table"),
    (b"ARROW1", "an Arrow file", "use read_table"),
    (b"\x93NUMPY", "a NumPy array", "give SVMLight text"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"{", "JSON", "give SVMLight text"),
    (b"[", "JSON", "give SVMLight text"),
    (b"<", "an HTML or XML page", "download the data file itself"),
)


def blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, each ending with a newline, and how many bytes of the file are used up by then.

    A line longer than MAX_LINE comes cut, as a last block, for the line reader to refuse.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file; give the files in it, or the folder to read_splits")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a pipe or a device; expected a regular file; write the text to one first")
    empty = True
    with path.open("rb") as file:
        for text in _whole_lines(_chunks(path, file)):
            if empty:
                text = text.removeprefix(_BOM)
                _refuse_foreign(path, text)
            empty = False
            yield text, file.tell()
    if empty:
        raise ValueError(f"{path} is empty; expected lines such as '2 qid:7 1:0.5 2:1'; check how it was made")


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join((rest, memoryview(chunk)[:end]))
            rest = chunk[end:]
        else:
            rest += chunk
        if len(rest) > MAX_LINE:
            break
    if rest:
        yield rest + b"\n"


def _chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The text of a file, decompressed, in pieces of about BLOCK bytes, the first not tiny."""
    start = file.read(4)
    file.seek(0)
    kind = next((suffix for suffix, magic in _ARCHIVES.items() if start.startswith(magic)), None)
    named = path.suffix.lower()
    if start and named in _ARCHIVES and kind is None:
        raise ValueError(
            f"{path} is named {named} but does not begin as such a file does; expected compressed text; "
            "get the file again, or rename it if it is plain text"
        )
    decoders = {None: _plain, ".gz": _gunzip, ".bz2": _bunzip, ".zst": _unzstd}
    unpacked = 0
    try:
        for chunk in decoders[kind](file):
            unpacked += len(chunk)
            if kind is not None:
                expect_archive(path, unpacked)
            yield chunk
    except (EOFError, OSError, zlib.error, _DamagedError) as error:
        if kind is None:
            raise
        raise ValueError(
            f"{path} is a truncated or corrupt {kind} file ({error}); expected it whole; get the file again"
        ) from error


class _DamagedError(Exception):
    """Compressed data that is cut short or followed by something else."""


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(BLOCK):
        yield chunk


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as archive:
        while chunk := archive.read(BLOCK):
            yield chunk


def _bunzip(file: BinaryIO) -> Iterator[bytes]:
    # Not bz2.BZ2File: it silently ignores garbage after the last stream.
    data = file.read(BLOCK)
    while data:
        decoder = bz2.BZ2Decompressor()
        while not decoder.eof:
            if decoder.needs_input and not data and not (data := file.read(BLOCK)):
                raise _DamagedError("it is cut short")
            chunk = decoder.decompress(data, BLOCK)
            data = b""
            if chunk:
                yield chunk
        data = decoder.unused_data or file.read(BLOCK)


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{file.name} is compressed with zstd, which needs the zstandard package; "
            "install it: pip install 'rankgrad[zstd]'"
        ) from error
    # Not its stream_reader: it ends a truncated file without an error.
    pending: list[bytes] = []
    data = file.read(ZSTD_BYTES)
    while data:
        decoder = zstandard.ZstdDecompressor().decompressobj()
        while not decoder.eof:
            if not data and not (data := file.read(ZSTD_BYTES)):
                raise _DamagedError("it is cut short")
            try:
                pending.append(decoder.decompress(data))
            except zstandard.ZstdError as error:
                raise _DamagedError(str(error)) from error
            data = b""
            if sum(map(len, pending)) >= BLOCK:
                yield from _pieces(pending)
                pending.clear()
        data = decoder.unused_data or file.read(ZSTD_BYTES)
    yield from _pieces(pending)


def _pieces(parts: list[bytes]) -> Iterator[bytes]:
    whole = b"".join(parts)
    for start in range(0, len(whole), BLOCK):
        yield whole[start : start + BLOCK]


def _refuse_foreign(path: Path, start: bytes) -> None:
    head = start.lstrip(b" \t\n")
    before = start[: len(start) - len(head)]
    for magic, what, remedy in _FOREIGN_MAGIC:
        if head.startswith(magic):
            number, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
            token = quote(head.split(maxsplit=1)[0])
            raise ValueError(f"{path}:{number}:{column}: {token} begins {what}; expected SVMLight text; {remedy}")
    for number, line in enumerate(start.split(b"\n"), 1):
        body = line.partition(b"#")[0]
        if body.strip():
            if b":" not in body and (b"," in body or b";" in body):
                raise ValueError(
                    f"{path}:{number}:1: {quote(line)} looks like CSV; "
                    "expected SVMLight text such as '2 qid:7 1:0.5'; use read_table"
                )
            return
