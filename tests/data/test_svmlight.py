"""Reading SVMLight text: what is accepted, what is refused and how, and that values are exact."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings, strategies as st

from rankgrad.data.svmlight import (
    blocks,
    compiled as compiled_reader,
    line,
    matrix as growing_matrix,
    reader,
    text as text_files,
)
from rankgrad.data.svmlight.reader import read_svmlight
from references import svmlight as reference

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MAX = float(np.finfo(np.float32).max)
GOOD = b"2 qid:7 1:0.5 3:1\n0 qid:7 2:4\n1 qid:9 1:3\n"


@pytest.fixture(params=["compiled", "plain", "small blocks"])
def path_taken(request, monkeypatch):
    """Every way a line can go: the compiled reader, Python alone, and lines cut by the ends of blocks."""
    if request.param == "plain":
        monkeypatch.setattr(compiled_reader, "COMPILED", False)
    if request.param == "small blocks":
        monkeypatch.setattr(text_files, "BLOCK", 12)


def write(folder: Path, content: bytes, name: str = "data.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


ACCEPTED = {  # text -> rows of (label, query, {index: value})
    b"0 qid:1 1:2\n": [(0, 1, {1: 2})],
    b"0 qid:1 1:2": [(0, 1, {1: 2})],
    b"0 qid:1 1:2\r\n1 qid:1 2:3\r\n": [(0, 1, {1: 2}), (1, 1, {2: 3})],
    b"0 qid:1 1:2\r": [(0, 1, {1: 2})],
    b"0\tqid:1\t1:2\t\t2:3\n": [(0, 1, {1: 2, 2: 3})],
    b"  0   qid:1   1:2   \n": [(0, 1, {1: 2})],
    b"\xef\xbb\xbf0 qid:1 1:2\n": [(0, 1, {1: 2})],
    b"\n\n  \t\n# all of it\n0 qid:1 1:2\n\r\n": [(0, 1, {1: 2})],
    b"0 qid:1 1:2 # docid = GX 1:9 qid:4\n": [(0, 1, {1: 2})],
    b"0 qid:1 1:2#close\n": [(0, 1, {1: 2})],
    b"0 qid:1 # no feature\n0 qid:1 1:1\n": [(0, 1, {}), (0, 1, {1: 1})],
    b"0 qid:1#none\n0 qid:1 1:1\n": [(0, 1, {}), (0, 1, {1: 1})],
    b"0 qid:1 1:2 # \x00 and \xff in a comment\n": [(0, 1, {1: 2})],
    b"0 qid:1 3:1 1:2 2:3\n": [(0, 1, {3: 1, 1: 2, 2: 3})],
    b"0 qid:1 70000:1 1:2\n": [(0, 1, {70000: 1, 1: 2})],
    b"0 qid:1 003:1\n": [(0, 1, {3: 1})],
    b"1.5 qid:1 1:1\n": [(1.5, 1, {1: 1})],
    b"+2 qid:1 1:1\n": [(2, 1, {1: 1})],
    b"-0 qid:1 1:1\n": [(0, 1, {1: 1})],
    b"-0.0e5 qid:1 1:1\n": [(0, 1, {1: 1})],
    b"1e39 qid:1 1:1\n": [(MAX, 1, {1: 1})],
    b"0 qid:9223372036854775807 1:1\n": [(0, 2**63 - 1, {1: 1})],
    b"0 qid:-9223372036854775808 1:1\n": [(0, -(2**63), {1: 1})],
    b"0 qid:123456789012345678 1:1\n": [(0, 123456789012345678, {1: 1})],
    b"0 qid:+5 1:1\n": [(0, 5, {1: 1})],
    b"0 qid:-5 1:1\n": [(0, -5, {1: 1})],
    b"0 qid:00012 1:1\n": [(0, 12, {1: 1})],
    b"0 qid:0 1:1\n": [(0, 0, {1: 1})],
    b"0 qid:1 1:.5 2:5. 3:+3 4:-.25 5:1e5 6:1E+05 7:1e-2\n": [
        (0, 1, {1: 0.5, 2: 5, 3: 3, 4: -0.25, 5: 1e5, 6: 1e5, 7: 0.01})
    ],
    b"0 qid:1 1:1e-999 2:-1e-999 3:0e999 4:00.00\n": [(0, 1, {1: 0, 2: -0.0, 3: 0, 4: 0})],
    b"0 qid:1 1:1.797e308 2:-1.7976931348623157e308\n": [(0, 1, {1: MAX, 2: -MAX})],
    b"0 qid:1 1:3.5e38 2:3.4028235e38\n": [(0, 1, {1: MAX, 2: MAX})],
    b"0 qid:1 1:1" + b"0" * 300 + b"\n": [(0, 1, {1: MAX})],
    b"0 qid:1 1:0." + b"0" * 30 + b"1\n": [(0, 1, {1: 1e-31})],
}


@pytest.mark.parametrize("text", ACCEPTED, ids=lambda text: repr(text[:40]))
@pytest.mark.usefixtures("path_taken")
def test_accepted(text, tmp_path):
    rows = ACCEPTED[text]
    data = read_svmlight(write(tmp_path, text))
    assert data.labels.tolist() == [np.float32(label) for label, _, _ in rows]
    assert np.repeat(data.query_ids, data.lengths).tolist() == [query for _, query, _ in rows]
    expected = np.zeros((len(rows), max(max(row, default=0) for _, _, row in rows)), np.float32)
    for cells, (_, _, row) in zip(expected, rows):
        for index, value in row.items():
            cells[index - 1] = value
    np.testing.assert_array_equal(data.features, expected)
    np.testing.assert_array_equal(np.signbit(data.features), np.signbit(expected))
    assert data.features.dtype == np.float32
    assert data.features.flags.c_contiguous


REFUSED = [  # text, place of the token, what the message says of it
    (b"0 1:2\n", "1:3", "no qid"),
    (b"0\n", "1:1", "no qid"),
    (b"0 # qid:1\n", "1:1", "no qid"),
    (b"0 1:2 qid:1\n", "1:3", "'1:2'"),
    (b"qid:1 0 1:2\n", "1:1", "'qid:1'"),
    (b"1:2 qid:1\n", "1:1", "begin with its label"),
    (b"0 qid:1 1:2 qid:1\n", "1:13", "comes again"),
    (b"0 qid:1 qid:1 1:2\n", "1:9", "comes again"),
    (b"0 qid:1.0 1:2\n", "1:3", "qid:1.0"),
    (b"0 qid:1e3 1:2\n", "1:3", "qid:<integer>"),
    (b"0 qid: 1:2\n", "1:3", "qid:<integer>"),
    (b"0 qid:- 1:2\n", "1:3", "qid:<integer>"),
    (b"0 qid:abc 1:2\n", "1:3", "qid:<integer>"),
    (b"0 qid:0x1f 1:2\n", "1:3", "qid:<integer>"),
    (b"0 qid:1_0 1:2\n", "1:3", "qid:<integer>"),
    (b"0 QID:1 1:2\n", "1:3", "no qid"),
    (b"0 qid :1 1:2\n", "1:3", "no qid"),
    (b"0 qid:9223372036854775808 1:2\n", "1:3", "64 bits"),
    (b"0 qid:-9223372036854775809 1:2\n", "1:3", "64 bits"),
    (b"0 qid:1" + b"0" * 5000 + b" 1:2\n", "1:3", "64 bits"),
    (b"-1 qid:1 1:2\n", "1:1", "negative"),
    (b"-1e-99 qid:1 1:2\n", "1:1", "negative"),
    (b"-1e-999 qid:1 1:2\n", "1:1", "negative"),
    (b"nan qid:1 1:2\n", "1:1", "label 'nan'"),
    (b"inf qid:1 1:2\n", "1:1", "finite decimal"),
    (b"1e999 qid:1 1:2\n", "1:1", "beyond the range"),
    (b"0x1 qid:1 1:2\n", "1:1", "finite decimal"),
    (b"a qid:1 1:2\n", "1:1", "'a'"),
    (b"1,0 qid:1 1:2\n", "1:1", "decimal comma"),
    (b"1_0 qid:1 1:2\n", "1:1", "finite decimal"),
    (b"+ qid:1 1:2\n", "1:1", "finite decimal"),
    (b". qid:1 1:2\n", "1:1", "finite decimal"),
    (b"0 qid:1 1:nan\n", "1:9", "'1:nan'"),
    (b"0 qid:1 1:NaN\n", "1:9", "leave a missing feature out"),
    (b"0 qid:1 1:inf\n", "1:9", "finite decimal"),
    (b"0 qid:1 1:-Infinity\n", "1:9", "finite decimal"),
    (b"0 qid:1 1:1e999\n", "1:9", "beyond the range"),
    (b"0 qid:1 1:1.7976931348623159e308\n", "1:9", "beyond the range"),
    (b"0 qid:1 1:0x10\n", "1:9", "finite decimal"),
    (b"0 qid:1 1:3_5\n", "1:9", "finite decimal"),
    (b"0 qid:1 1:3,5\n", "1:9", "decimal comma"),
    (b"0 qid:1 1:\n", "1:9", "value"),
    (b"0 qid:1 1: 2\n", "1:9", "value"),
    (b"0 qid:1 1 :2\n", "1:9", "index:value"),
    (b"0 qid:1 1:2:3\n", "1:9", "value"),
    (b"0 qid:1 1:1e\n", "1:9", "value"),
    (b"0 qid:1 1:1e+\n", "1:9", "value"),
    (b"0 qid:1 1:1.2.3\n", "1:9", "value"),
    (b"0 qid:1 1:--1\n", "1:9", "value"),
    (b"0 qid:1 1:1f\n", "1:9", "value"),
    (b"0 qid:1 1:.\n", "1:9", "value"),
    (b"0 qid:1 1:-\n", "1:9", "value"),
    (b"0 qid:1 1:\xd9\xa3\n", "1:9", "value"),  # an Arabic digit
    (b"0 qid:1 0:2\n", "1:9", "index 0"),
    (b"0 qid:1 -1:2\n", "1:9", "index"),
    (b"0 qid:1 +1:2\n", "1:9", "index"),
    (b"0 qid:1 1.0:2\n", "1:9", "index"),
    (b"0 qid:1 1e1:2\n", "1:9", "index"),
    (b"0 qid:1 a:2\n", "1:9", "index"),
    (b"0 qid:1 :2\n", "1:9", "index"),
    (b"0 qid:1 1:2 1:2\n", "1:13", "repeats feature 1"),
    (b"0 qid:1 2:2 1:1 2:3\n", "1:17", "repeats feature 2"),
    (b"0 qid:1 1:2 01:2\n", "1:13", "repeats feature 1"),
    (b"0 qid:1 70000:1 1:1 70000:1\n", "1:21", "repeats feature 70000"),
    (b"0 qid:1 2147483648:1\n", "1:9", "beyond 2147483647"),
    (b"0 qid:1 2000000000:1\n", "1:9", "GiB"),
    (b"0 qid:1 1" + b"0" * 5000 + b":1\n", "1:9", "beyond 2147483647"),
    (b"0 qid:1 word\n", "1:9", "'word'"),
    (b"0 qid:1 1:2\x00\n", "1:9", "NUL"),
    (b"\x00 qid:1 1:2\n", "1:1", "NUL"),
    (b"0 qid:1 1:2 \xff\n", "1:13", "not UTF-8"),
    (b"0 qid:1 1:2\xc2\xa03:4\n", "1:9", "value"),  # a no-break space
    (b"0 qid:1 1:2\x0b3:4\n", "1:9", "value"),
    (b"0 qid:1 1:2\r2:3\n", "1:9", "carriage return"),
    (b"0 qid:1 1:2\r\r\n", "1:9", "carriage return"),
    (GOOD + b"\xef\xbb\xbf0 qid:9 1:2\n", "4:1", "label"),
    (GOOD + b"# comment\n\n0 qid:9 1:x\n", "6:9", "'1:x'"),
    (GOOD * 50 + b"0 qid:9 2:1 1:2 2:3", "151:17", "repeats"),
    (b"<!DOCTYPE html>\n<html>\n", "1:1", "HTML"),
    (b"\n  <html>\n", "2:3", "HTML"),
    (b"\x89PNG\r\n\x1a\n0000", "1:1", "PNG"),
    (b"label,qid,f1\n0,1,0.5\n", "1:1", "read_table"),
    (b"0,1,0.5\n1,1,0.25\n", "1:1", "CSV"),
    (b'{"label": 1}\n', "1:1", "JSON"),
    (b"PAR1\x15\x04", "1:1", "Parquet"),
    ("0 qid:1 1:2\n".encode("utf-16"), "1:1", "UTF-16"),
    ("0 qid:1 1:2\n".encode("utf-16-be"), "1:1", "NUL"),
]


@pytest.mark.parametrize(("text", "place", "words"), REFUSED, ids=lambda value: repr(value)[:40])
@pytest.mark.usefixtures("path_taken")
def test_refused(text, place, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_svmlight(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{place}: ")
    assert len(message) < len(str(path)) + 400
    assert "\n" not in message


def test_more_digits_than_a_query_may_have_are_not_called_too_large(tmp_path):
    with pytest.raises(ValueError, match=r":1:3: 'qid:000000000000000000007' .* 20 digits"):
        read_svmlight(write(tmp_path, b"0 qid:000000000000000000007 1:1\n"))
    with pytest.raises(ValueError, match=r":1:3: 'qid:9{25}' .* 64 bits"):
        read_svmlight(write(tmp_path, b"0 qid:9999999999999999999999999 1:1\n"))


def test_messages_quote_long_tokens_shortened(tmp_path):
    with pytest.raises(ValueError, match=re.escape("'1:" + "x" * 38 + "...'")):
        read_svmlight(write(tmp_path, b"0 qid:1 1:" + b"x" * 100_000 + b"\n"))


WITHOUT_DATA = {b"": "is empty", b"\n\n": "no data", b"# only\n": "no data", b"\xef\xbb\xbf": "no data"}


@pytest.mark.parametrize("text", WITHOUT_DATA)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.usefixtures("path_taken")
def test_files_without_data(text, pack, tmp_path):
    path = write(tmp_path, pack(text))
    with pytest.raises(ValueError, match=WITHOUT_DATA[text]) as caught:
        read_svmlight(path)
    assert str(path) in str(caught.value)


def test_rows_without_any_feature_need_a_width(tmp_path):
    path = write(tmp_path, b"0 qid:1\n1 qid:1\n")
    with pytest.raises(ValueError, match="names no feature"):
        read_svmlight(path)
    assert read_svmlight(path, features=2).features.tolist() == [[0, 0], [0, 0]]


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("named", [True, False])
def test_archives_are_recognised_by_content(suffix, named, tmp_path):
    text = GOOD * 3000
    for content in (PACKERS[suffix](text), PACKERS[suffix](GOOD) + PACKERS[suffix](text[len(GOOD) :])):
        data = read_svmlight(write(tmp_path, content, "data" + suffix * named))
        assert data.features.shape == (9000, 3)
        assert data.labels.tolist() == [2, 0] * 3000 + [1] * 3000


@pytest.mark.parametrize("suffix", PACKERS)
def test_damaged_archives_are_refused(suffix, tmp_path):
    rng = random.Random(0)
    text = b"".join(b"0 qid:%d 1:%d\n" % (i // 9, rng.randrange(10**9)) for i in range(3000))
    packed = PACKERS[suffix](text)
    middle = len(packed) // 2
    damaged = {
        "cut": packed[:middle],
        "cut at the end": packed[:-1],
        "only its first bytes": packed[:4],
        "garbage after it": packed + b"garbage, and more of it",
        "one byte after it": packed + b"x",
        "changed inside": packed[:middle] + bytes([packed[middle] ^ 0x55]) + packed[middle + 1 :],
        "plain text under its name": text,
        "one byte": packed[:1],
    }
    for content in damaged.values():
        path = write(tmp_path, content, "data.txt" + suffix)
        with pytest.raises(ValueError, match=r"truncated or corrupt|does not begin") as caught:
            read_svmlight(path)
        assert str(caught.value).startswith(str(path))


def test_zstd_without_its_extra_says_the_install_line(tmp_path, monkeypatch):
    path = write(tmp_path, PACKERS[".zst"](GOOD))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"pip install 'rankgrad\[zstd\]'"):
        read_svmlight(path)


def test_first_error_of_the_file_wins_over_a_damaged_end(tmp_path):
    packed = gzip.compress(b"0 qid:1 1:x\n" + random.Random(0).randbytes(3_000_000).hex().encode())
    with pytest.raises(ValueError, match=r":1:9: '1:x'"):
        read_svmlight(write(tmp_path, packed[:-10], "data.gz"))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    for module in (line, text_files, blocks):
        monkeypatch.setattr(module, "MAX_LINE", 1 << 18)
    monkeypatch.setattr(text_files, "BLOCK", 1 << 16)
    for long in (b"0 qid:9 " + b"1" * (3 << 18), b"0 qid:9 1:1 # " + b"x" * (3 << 18), b"#" * ((1 << 18) + 1)):
        text = GOOD + long
        for content in (text, text + b"\n" + GOOD, gzip.compress(text)):
            path = write(tmp_path, content)
            with pytest.raises(ValueError, match=r":4:1: .* longer than"):
                read_svmlight(path)
            assert sum(len(block) for block, _ in text_files.blocks(path)) < (1 << 18) + 3 * (1 << 16)
    assert len(read_svmlight(write(tmp_path, GOOD + b"#" * (1 << 18) + b"\n" + GOOD))) == 2


def test_the_width_must_be_worth_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MODEST_BYTES", 10_000)
    text = b"0 qid:1 1:1\n0 qid:1 2:1 900:1\n" + b"0 qid:1 1:1\n"
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r":2:13: '900:1' .* features=900"):
        read_svmlight(path)
    assert read_svmlight(path, features=900).features.shape == (3, 900)


@pytest.mark.parametrize("slip", [0, 40, 99])
def test_a_mistake_in_one_index_is_refused_wherever_it_is(slip, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 200)
    monkeypatch.setattr(reader, "MODEST_BYTES", 20_000)
    lines = [b"0 qid:1 1:1 2:1 3:1 4:1 5:1 6:1 7:1 8:1 9:1 10:1"] * 100
    lines[slip] += b" 100:1"
    path = write(tmp_path, b"\n".join(lines))
    with pytest.raises(ValueError, match=rf":{slip + 1}:50: '100:1' .* index 10; .*features=100"):
        read_svmlight(path)
    assert read_svmlight(path, features=100).features.shape == (100, 100)


def test_half_of_the_memory_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MODEST_BYTES", 10_000)
    monkeypatch.setattr(reader, "memory_bytes", lambda: 40_000)
    path = write(tmp_path, b"0 qid:1 %s\n" % b" ".join(b"%d:1" % i for i in range(1, 1001)) * 6)
    with pytest.raises(ValueError, match=r":1:\d+: '1000:1' .* half of .*memory"):
        read_svmlight(path)
    assert read_svmlight(path, features=1000).features.shape == (6, 1000)
    monkeypatch.setattr(reader, "memory_bytes", lambda: None)
    assert read_svmlight(path).features.shape == (6, 1000)
    monkeypatch.undo()
    assert reader.memory_bytes() > 1 << 28


@pytest.mark.parametrize("block", [40, 100, 1 << 20])
def test_width_grows_while_reading(block, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", block)
    monkeypatch.setattr(growing_matrix, "_CHUNK", 5000)  # a few rows
    rng = np.random.default_rng(0)
    width = np.sort(rng.integers(1, 300, 500))
    text = b"".join(b"1 qid:1 %d:%d\n" % (index, row) for row, index in enumerate(width))
    for missing in (0.0, np.nan):
        data = read_svmlight(write(tmp_path, text), missing=missing)
        expected = np.full((500, width[-1]), missing, np.float32)
        expected[np.arange(500), width - 1] = np.arange(500)
        np.testing.assert_array_equal(data.features, expected)


def test_features_fix_the_width(tmp_path):
    path = write(tmp_path, GOOD)
    assert read_svmlight(path, features=5).features.shape == (3, 5)
    with pytest.raises(ValueError, match=r":1:15: '3:1' .*2 features"):
        read_svmlight(path, features=2)


def test_missing_features_are_zero_or_nan(tmp_path):
    path = write(tmp_path, GOOD)
    nan = np.nan
    np.testing.assert_array_equal(
        read_svmlight(path, missing=nan).features, np.float32([[0.5, nan, 1], [nan, 4, nan], [3, nan, nan]])
    )


@pytest.mark.usefixtures("path_taken")
def test_nan_is_a_value_where_missing_features_are_nan(tmp_path):
    nan, text = np.nan, b"2 qid:7 1:nan 3:1 # a:nan\n0 qid:7 2:NaN\t1:4\n1 qid:9 1:3 2:1e300 3:nan\n"
    path = write(tmp_path, text)
    data = read_svmlight(path, missing=nan)
    largest = np.float32(3.4028235e38)
    np.testing.assert_array_equal(data.features, np.float32([[nan, nan, 1], [4, nan, nan], [3, largest, nan]]))
    assert data.provenance["first_clamped"] == f"{path}:3:13"
    with pytest.raises(ValueError, match=r":1:9: '1:nan' .*data\.missing=nan"):
        read_svmlight(path)
    sided = write(tmp_path, text.replace(b" qid:7", b"").replace(b" qid:9", b""), "sided")
    again = read_svmlight(sided, groups=write(tmp_path, b"2\n1\n", "g"), missing=nan)
    np.testing.assert_array_equal(again.features, data.features)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nan qid:1 1:2\n", "1:1: label 'nan'"),
        (b"0 qid:nan 1:2\n", "1:3: 'qid:nan'"),
        (b"0 qid:1 nan:2\n", "1:9: 'nan:2'"),
        (b"0 qid:1 1:2 2:-nan\n", "1:13: '2:-nan'"),
        (b"0 qid:1 1:nan2\n", "1:9: '1:nan2'"),
        (b"0 qid:1 2:nan 2:1\n", "1:15: '2:1' repeats feature 2"),
        (b"0 qid:1 0:nan\n", "1:9: '0:nan' has index 0"),
        (b"0 qid:1 1:inf\n", "1:9: '1:inf'"),
        (b"0 qid:1 1:nan 2:1e999\n", "1:15: '2:1e999'"),
    ],
)
@pytest.mark.usefixtures("path_taken")
def test_nan_stands_for_a_value_and_nothing_else(line, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_svmlight(write(tmp_path, line), missing=np.nan)


@pytest.mark.usefixtures("path_taken")
def test_features_may_be_numbered_from_zero(tmp_path):
    path = write(tmp_path, b"2 qid:7 0:0.5 2:1\n0 qid:7 1:4\n1 qid:9 2:9 0:3\n")
    data = read_svmlight(path, zero_based=True)
    assert data.features.tolist() == [[0.5, 0, 1], [0, 4, 0], [3, 0, 9]]
    assert read_svmlight(path, zero_based=True, features=4).features.shape == (3, 4)
    with pytest.raises(ValueError, match=r":1:15: '2:1' has an index beyond the 2 features .*features 0 to 1 only"):
        read_svmlight(path, zero_based=True, features=2)
    with pytest.raises(ValueError, match=r":1:9: '0:0\.5' has index 0.*zero_based"):
        read_svmlight(path)
    with pytest.raises(ValueError, match=r":1:13: '0:2' repeats feature 0"):
        read_svmlight(write(tmp_path, b"2 qid:7 0:1 0:2\n", "twice"), zero_based=True)


@pytest.mark.usefixtures("path_taken")
def test_clamped_values_are_counted_and_reported(tmp_path, caplog):
    path = write(tmp_path, GOOD + b"1e40 qid:9 1:1 2:1.797e308\n0 qid:9 1:-1e39\n")
    data = read_svmlight(path)
    assert data.provenance["clamped"] == 3
    assert data.provenance["first_clamped"] == f"{path}:4:1"
    assert f"3 values beyond float32 became the largest float32, the first at {path}:4:1" in caplog.text
    assert data.features[3:].tolist() == [[1, MAX, 0], [-MAX, 0, 0]]
    assert read_svmlight(write(tmp_path, GOOD)).provenance["clamped"] == 0
    json.dumps(dict(data.provenance))


@pytest.mark.usefixtures("path_taken")
def test_rows_that_do_not_lie_together_are_grouped_or_refused(tmp_path):
    queries = [5, 3, 3, 5, -1, 5, 3]
    path = write(tmp_path, b"".join(b"%d qid:%d 1:%d # %d\n\n" % (r, q, r * r, r) for r, q in enumerate(queries)))
    data = read_svmlight(path)
    assert data.query_ids.tolist() == [5, 3, -1]
    assert data.offsets.tolist() == [0, 3, 6, 7]
    assert data.rows.tolist() == [0, 3, 5, 1, 2, 6, 4]
    assert data.labels.tolist() == data.rows.tolist()
    assert data.features[:, 0].tolist() == (data.rows**2).tolist()
    with pytest.raises(ValueError, match=r":7:3: 'qid:5' .*scattered='group'"):
        read_svmlight(path, scattered="refuse")
    together = write(tmp_path, GOOD)
    assert read_svmlight(together, scattered="refuse").rows is None
    odd = write(tmp_path, b"# c\rq x\n1 qid:5 1:1\n2 qid:3 1:2 # a\r qid:5\n\n3\tqid:+05#c\n4 qid:5 1:1\n")
    with pytest.raises(ValueError, match=r":5:3: 'qid:\+05' "):
        read_svmlight(odd, scattered="refuse")


def test_grouping_a_large_shuffled_file(tmp_path):
    rng = np.random.default_rng(0)
    queries = rng.integers(0, 400, 5000)
    path = write(tmp_path, b"".join(b"0 qid:%d 1:%d 2:7\n" % (q, r) for r, q in enumerate(queries)))
    data = read_svmlight(path)
    _, first = np.unique(queries, return_index=True)
    assert data.query_ids.tolist() == queries[np.sort(first)].tolist()
    assert np.repeat(data.query_ids, data.lengths).tolist() == queries[data.rows].tolist()
    assert data.features[:, 0].tolist() == data.rows.tolist()
    for start, end in zip(data.offsets, data.offsets[1:]):
        assert (np.diff(data.rows[start:end]) > 0).all()


def test_several_files_are_one(tmp_path):
    first, second = write(tmp_path, GOOD, "a"), write(tmp_path, gzip.compress(b"\n1 qid:7 4:1\n"), "b.gz")
    data = read_svmlight([first, second])
    assert data.features.shape == (4, 4)
    assert data.query_ids.tolist() == [7, 9]
    assert data.rows.tolist() == [0, 1, 3, 2]
    assert [file["rows"] for file in data.provenance["files"]] == [3, 1]
    with pytest.raises(ValueError, match=re.escape(f"{second}:2:3: 'qid:7'")):
        read_svmlight([first, second], scattered="refuse")
    with pytest.raises(ValueError, match=re.escape(f"{second}:2:9: '4:1'")):
        read_svmlight([first, second], features=3)
    empty = write(tmp_path, b"", "c")
    with pytest.raises(ValueError, match=re.escape(f"{empty} is empty")):
        read_svmlight([first, empty])


def test_groups(tmp_path):
    plain = write(tmp_path, b"0 1:2\n1\n2 3:1 # x\n0 1:1\n")
    data = read_svmlight(plain, groups=write(tmp_path, b"3\r\n\n 1 ", "g"))
    assert data.offsets.tolist() == [0, 3, 4]
    assert data.query_ids.tolist() == [0, 1]
    assert data.rows is None
    for sizes, words in {
        b"3\n2\n": "sum to 5",
        b"4\n0\n": ":2:1: '0'",
        b"4\n x\n": ":2:2: 'x'",
        b"-4\n": ":1:1: '-4'",
        b"2.0\n2\n": ":1:1: '2.0'",
        b"2 2\n": ":1:1: '2 2'",
        b"": "is empty",
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            read_svmlight(plain, groups=write(tmp_path, sizes, "g"))
    titled = write(tmp_path, b"# a\rb, c\n1 # title; a, b\n0 1:1\n", "titled")
    assert read_svmlight(titled, groups=write(tmp_path, b"2\n", "g")).labels.tolist() == [1, 0]
    side = write(tmp_path, b"3\n", "g")
    with pytest.raises(ValueError, match=r":1:3: 'qid:7' .*leave groups= out"):
        read_svmlight(write(tmp_path, GOOD), groups=side)
    with pytest.raises(ValueError, match="groups .* 1 .* 2 "):
        read_svmlight([plain, plain], groups=side)


def test_bad_arguments(tmp_path):
    path = write(tmp_path, GOOD)
    for arguments, words in [
        ({"features": 0}, "features .*1 or above, got 0"),
        ({"features": True}, "features .*got True"),
        ({"features": 2.0}, "features .*got 2.0"),
        ({"missing": float("inf")}, "missing .*inf.*3.4e38 or NaN"),
        ({"missing": 1e39}, r"missing .*1e\+39"),
        ({"missing": None}, "missing .*None"),
        ({"missing": "0"}, "missing .*'0'"),
        ({"scattered": "drop"}, "scattered .*'group', 'refuse', got 'drop'"),
    ]:
        with pytest.raises(ValueError, match=words):
            read_svmlight(path, **arguments)
    with pytest.raises(ValueError, match="empty list"):
        read_svmlight([])
    for wrong in (None, 5, b"data.txt", [path, None]):
        with pytest.raises(ValueError, match="path is .* list of paths"):
            read_svmlight(wrong)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_svmlight(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="folder.* read_splits"):
        read_svmlight(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe.* write the text"):
        read_svmlight(tmp_path / "pipe")


def test_progress_ends_at_the_size_of_all_files(tmp_path):
    files = [write(tmp_path, GOOD, "a"), write(tmp_path, gzip.compress(GOOD * 100_000), "b.gz")]
    calls = []
    read_svmlight(files, progress=lambda done, total: calls.append((done, total)))
    total = sum(path.stat().st_size for path in files)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert len(calls) > 2


HARD_NUMBERS = [  # decimals on, just below and just above the middle of two float32
    "1.000000059604644775390625",
    "1.000000059604644775390624999999",
    "1.000000059604644775390625000001",
    "1.00000017881393432617187499",
    "1.00000017881393432617187501",
    "16777217",
    "16777217.000000",
    "16777219.0",
    "16777217.0000000000000000000001",
    "16777216.9999999999999999999999",
    "8388608.5",
    "8388609.500000",
    "9007199254740993",
    "9007199791611904.5",
    "0.000000000000000000000000000000000000011754943508222875",
    "1.1754943508222875e-38",
    "1.1754942807573642918e-38",
    "7.006492321624085354618e-46",
    "7.006492321624085354619e-46",
    "1.401298464324817070923e-45",
    "2.1019476964872256063855943749348741969203929128147736576e-45",
    "3.4028234663852886e38",
    "3.4028235677973365e38",
    "3.4028235677973366e38",
    "340282356779733661637539395458142568447",
    "340282356779733661637539395458142568448",
    "1797693134862315807" + "0" * 290,
    "0.1",
    "0." + "3" * 400,
    "1" + "0" * 38,
    "123456789012345678901234567890e-30",
    "0.00000000000000000000123456789012345678901234567890e+20",
    "5e-324",
    "1e22",
    "1e23",
    "4.35e23",
    "999999999999999999",
    "1000000000000000000",
    "9999999999999999999999",
]


@pytest.mark.usefixtures("path_taken")
def test_float32_of_hard_decimals_is_exact(tmp_path):
    rng = random.Random(1)
    tokens = [sign + token for token in HARD_NUMBERS for sign in ("", "-", "+")]
    for _ in range(300):  # middles of neighbours anywhere, and decimals a hair beside them
        low = np.uint32(rng.randrange(0x7F7FFFFF)).view(np.float32)
        middle = (reference.Fraction(float(low)) + reference.Fraction(float(np.nextafter(low, np.float32(MAX))))) / 2
        shift = middle.denominator.bit_length() - 1
        digits = middle.numerator * 5**shift  # middle = digits * 10^-shift
        for nudge in (-1, 0, 1):
            tokens += [f"{digits * 1000 + nudge}e-{shift + 3}", f"{digits + nudge}e{-shift}"]
        tokens.append(f"{float(middle)!r}")
    text = "".join(f"0 qid:1 1:{token}\n" for token in tokens)
    values = read_svmlight(write(tmp_path, text.encode())).features[:, 0]
    for token, value in zip(tokens, values):
        expected = np.float32(reference.number_of(token.encode())[0])
        assert value.tobytes() == expected.tobytes(), token


def digits(**kwargs):
    return st.text("0123456789", **kwargs)


numbers = st.one_of(
    st.builds(lambda whole, part: f"{whole}.{part}", digits(min_size=1, max_size=9), digits(max_size=25)),
    st.builds("{}".format, st.integers(0, 10**20)),
    st.builds(repr, st.floats(0, 3e38)),
    st.builds(lambda value: f"{value:.6g}", st.floats(0, 1e6)),
    st.builds("{}e{}".format, digits(min_size=1, max_size=22), st.integers(-60, 15)),
    st.builds(lambda bits: repr(float(np.uint32(bits).view(np.float32))), st.integers(0, 0x7F7FFFFF)),
    st.sampled_from(HARD_NUMBERS[:20]),
)
blanks = st.text(" \t", min_size=1, max_size=3)
documents = st.lists(
    st.tuples(
        numbers,
        st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3),
        st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["", "-", "+"]), numbers), unique_by=lambda e: e[0]),
        blanks,
        st.sampled_from(["", "#", " # comment 1:2 qid:1", "\t#\x00", "  "]),
        st.sampled_from(["\n", "\r\n", "\n\n", "\n# \u00e9\n", " \r\n"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=documents, compiled=st.booleans(), block=st.sampled_from([7, 64, 1 << 20]))
def test_random_valid_files_round_trip(documents, compiled, block, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_reader, "COMPILED", compiled)
    monkeypatch.setattr(text_files, "BLOCK", block)
    text = ""
    for label, query, entries, blank, comment, end in documents:
        words = [label, f"qid:{query}", *(f"{index}:{sign}{number}" for index, sign, number in entries)]
        text += blank.join(words) + comment + end
    data = read_svmlight(write(tmp_path, text.encode()), features=40)
    assert_same(data, reference.read(text.encode()))


def assert_same(data, expected):
    labels, queries, rows, clamped = expected
    order = np.arange(len(rows)) if data.rows is None else data.rows
    features = np.zeros((len(rows), data.features.shape[1]), np.float32)
    for cells, row in zip(features, (rows[row] for row in order)):
        for index, value in row.items():
            cells[index - 1] = value
    assert data.features.tobytes() == features.tobytes()
    assert data.labels.tobytes() == np.float32([labels[row] for row in order]).tobytes()
    assert np.repeat(data.query_ids, data.lengths).tolist() == [queries[row] for row in order]
    assert data.query_ids.tolist() == list(dict.fromkeys(queries))
    assert data.provenance["clamped"] == clamped


PIECES = [
    *(bytes([code]) for code in b"0123456789:. \t\n\r#-+eEqid\x00\xff,_xX<\xef\x0b"),
    *(b" ", b"\n", b"\r\n", b"#", b"qid:", b" qid:3", b" 1:2", b" 0:1", b" 3:", b":", b"::", b"nan", b"inf", b"e5"),
    *(b"e+", b"e-400", b"e400", b"e308", b"e38", b"1e-45", b"0x1", b"0000000000000000000", b"99999999999999999999"),
    *(b"9223372036854775807", b"9223372036854775808", b"16777217", b".5", b"5.", b"-0", b"\xc2\xa0", b"\xef\xbb\xbf"),
]


def random_file(rng):
    lines = []
    for _ in range(rng.randrange(1, 6)):
        indices = rng.sample(range(1, 12), rng.randrange(1, 5))
        if rng.random() < 0.7:
            indices.sort()
        values = [
            rng.choice(
                [f"{rng.uniform(-9, 9):.6g}", f"{rng.random():.6f}", str(rng.randrange(30)), repr(rng.gauss(0, 1e4))]
            )
            for _ in indices
        ]
        words = [str(rng.randrange(5)), f"qid:{rng.randrange(1, 4)}", *(f"{i}:{v}" for i, v in zip(indices, values))]
        lines.append(" ".join(words) + rng.choice(["", "", " # doc", "\r", " "]))
    return "\n".join(lines).encode() + rng.choice([b"\n", b""])


def edited(rng, content):
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at, end = sorted((rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)))
        end = min(end, at + rng.choice([0, 1, 2, 5]))
        kind = rng.randrange(4)
        if kind == 0:
            content = content[:at] + rng.choice(PIECES) + content[at:]
        elif kind == 1:
            content = content[:at] + content[end:]
        elif kind == 2:
            content = content[:at] + rng.choice(PIECES) + content[at + 1 :]
        else:
            content = content[:end] + content[at:end] + content[end:]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_edited_files_are_read_or_refused_as_by_the_slow_reader(part, tmp_path, monkeypatch):
    rng = random.Random(part)
    verdicts = []
    for _ in range(1000):
        content = edited(rng, random_file(rng))
        try:
            expected, mistake = reference.read(content, features=100), None
        except reference.MistakeError as caught:
            mistake = caught
        verdicts.append(mistake is None)
        path = write(tmp_path, content)
        monkeypatch.setattr(text_files, "BLOCK", rng.choice([20, *[1 << 20] * 9]))
        for compiled in (True, False):
            monkeypatch.setattr(compiled_reader, "COMPILED", compiled)
            if mistake is None:
                assert_same(read_svmlight(path, features=100), expected)
                continue
            with pytest.raises(ValueError, match=re.escape(str(path))) as caught_ours:
                read_svmlight(path, features=100)
            message = str(caught_ours.value).removeprefix(str(path))
            if mistake.line == 0:
                assert "no data" in message or "is empty" in message, (content, message)
            elif "looks like CSV" in message:
                assert message.startswith(f":{mistake.line}:"), (content, message)
            else:
                assert message.startswith(f":{mistake.line}:{mistake.column}: "), (content, message)
    assert 0.2 < np.mean(verdicts) < 0.8


def test_mq2008_has_its_published_counts():
    if not (DATA / "mq2008").is_dir():
        pytest.skip("MQ2008 is not beside the checkout")
    data = read_svmlight([DATA / "mq2008" / f"S{part}.txt.gz" for part in range(1, 6)])
    assert (len(data), *data.features.shape) == (784, 15211, 46)
    assert np.bincount(data.labels.astype(int)).tolist() == [12279, 2001, 931]
    assert (np.maximum.reduceat(data.labels, data.offsets[:-1]) == 0).sum() == 220
    assert data.lengths.max() == 121
    assert data.rows is None


@pytest.mark.parametrize(("part", "queries", "rows"), [("train", 201, 3005), ("test", 50, 768)])
def test_lightgbm_example_with_its_group_sizes(part, queries, rows):
    folder = DATA / "lightgbm-rank"
    if not folder.is_dir():
        pytest.skip("LightGBM's example is not beside the checkout")
    data = read_svmlight(folder / f"rank.{part}.gz", groups=folder / f"rank.{part}.query")
    assert (len(data), *data.features.shape) == (queries, rows, 300)
    assert set(data.labels) == {0, 1, 2, 3, 4}


def test_numba_is_loaded_with_the_first_text_and_not_before(tmp_path):
    code = f"""
import sys
from rankgrad.data import read_splits, read_svmlight
read_splits("synthetic:tiny")
print("numba" in sys.modules)
read_svmlight({str(write(tmp_path, GOOD))!r})
print("numba" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\nTrue\n"


def test_reads_without_numba(tmp_path):
    path = write(tmp_path, b"2 qid:7 1:0.5 3:1\n0 qid:8 2:4\n1 qid:7 1:3\n")
    code = f"""
import sys
sys.modules["numba"] = None
from rankgrad.data.svmlight.reader import read_svmlight
data = read_svmlight({str(path)!r})
print(data.features.tolist(), data.rows.tolist())
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "[[0.5, 0.0, 1.0], [3.0, 0.0, 0.0], [0.0, 4.0, 0.0]] [0, 2, 1]\n"


@pytest.mark.slow
def test_memory_stays_near_the_result(tmp_path):
    row = b" ".join(b"%d:0.5" % index for index in range(1, 101))
    path = write(tmp_path, b"".join(b"1 qid:%d %s\n" % (query, row) for query in range(150_000)))
    small = write(tmp_path, GOOD, "small.txt")
    code = f"""
import resource
from rankgrad.data.svmlight.reader import read_svmlight
read_svmlight({str(small)!r})  # loads the compiled code, which takes memory of its own
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
data = read_svmlight({str(path)!r})
print(peak() - before - data.features.nbytes)
"""
    extra = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert extra < 200 << 20
