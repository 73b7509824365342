"""Readers on damaged bytes: what the fuzzer of `reliability.readers` begins with, cut and flipped; what it has found; a short run of it."""

import contextlib
import dataclasses
import random
import struct
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from reliability.readers import PROMISES, TARGETS, DisagreementError, Target, failure_of, prepared_folder

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.prepare import prepare
from rankgrad.data.tables.reader import read_table
from rankgrad.training.config import loads, paper, with_settings
from reliability import readers


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_whole_cut_and_flipped(target, tmp_path):
    draw = random.Random(0)
    for seed in TARGETS[target].seeds():
        assert not failure_of(target, seed, tmp_path)
        for _ in range(4):
            cut = seed[: draw.randrange(len(seed))]
            flipped = bytearray(seed)
            flipped[draw.randrange(len(seed))] ^= 1 << draw.randrange(8)
            assert not failure_of(target, cut, tmp_path) and not failure_of(target, bytes(flipped), tmp_path)


def test_most_seeds_are_read_not_refused(tmp_path):
    for target in TARGETS.values():
        read = 0
        for seed in target.seeds():
            with contextlib.suppress(ValueError):
                read += not isinstance(target.read(seed, tmp_path), Exception)
        assert read >= 5


FOUND = [
    ("config", b"\2data = 3"),
    ("config", b"\2train = [1]"),
    ("config", b"\0[optimiser]\nlr = 1" + b"0" * 400),
    ("config", b"\3optimiser.lr=1" + b"0" * 400),
    ("config", b"\0x = " + b"[" * 2000),
    ("config", b"\3train.epochs=" + b"[" * 2000),
    ("config", b"\0[train]\nepochs = " + b"9" * 5000),
    ("config", b"\3train.epochs=" + b"9" * 5000),
    ("config", b"\3train.seed=0x" + b"f" * 4000),
    ("config", b"\3train] #.epochs=8"),
    ("config", b"\3'train'.epochs=3"),
    ("config", b'\3train."epochs"=3'),
    ("config", b"\3train.epochs=8\n[data]\npath='other'"),
    ("prepared", b"\1\1"),
    ("prepared", b"\1\1\x93NUMPY\1\0v\0{'descr': '<f4', 'shape': ("),
    ("prepared", b'\3\1{"format":"rankgrad dataset","version":1,"arrays":[1]}'),
    ("prepared", b'\3\1{"format":"rankgrad dataset","version":1,"arrays":{"features":1}}'),
    ("prepared", b'\3\1{"format":"rankgrad dataset","version":1,"arrays":{},"categories":3}'),
    ("config", b"\x07\n"),
    ("config", b"\3train.mics=['ndcg']\n"),
    ("tables", b'\1qid\t\t\t"b ""c"""\n9\t1\t-3e-\t\n9015.,,,,,,,,2\t\t\tacme\n7\t1\t4\tx\n'),
    ("tables", b"\2PAR1" + b"\x15\x04" * 20 + b"\x30\0\0\0PAR1"),
]


@pytest.mark.parametrize(("target", "content"), FOUND)
def test_what_was_found_stays_mended(target, content, tmp_path):
    assert not failure_of(target, content, tmp_path)


def test_a_setting_is_one_key():
    assert with_settings(paper(), {}, ["train . epochs = 3"]).train.epochs == 3
    with pytest.raises(ValueError, match=r"--set .*several lines; expected one SECTION.KEY=VALUE"):
        with_settings(paper(), {}, ["train.epochs=8\nbatch_size=3"])
    with pytest.raises(ValueError, match=r"optimiser.lr must be a number that a float holds, got one of 1329 bits"):
        loads("[optimiser]\nlr = 1" + "0" * 400)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_that_point_outside_themselves_are_refused_not_followed(kind, tmp_path):
    table = pyarrow.table({"qid": ["a", "b"], "label": [1, 0], "x": [0.5, 1.5]})
    path = tmp_path / "train.arrow"
    with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table)
    content, ends = path.read_bytes(), struct.pack("<3i", 0, 1, 2)  # where each of the two texts begins and ends
    assert content.count(ends) == 1
    path.write_bytes(content.replace(ends, struct.pack("<3i", 0, 1, 2**30)))
    with pytest.raises(ValueError, match=r"cannot read .*train.arrow as arrow: .*; expected an undamaged file"):
        read_table(path)
    assert not failure_of("tables", b"\3" + path.read_bytes(), tmp_path)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_wrong_count_of_nulls_is_refused_whole_and_in_chunks_alike(kind, tmp_path):
    """pyarrow counts a column of nulls anew when it is asked for its bytes, and finds nothing wrong with it from then on."""
    table = pyarrow.table({"qid": [1, 2, 1], "label": [1, 0, 1], "x": [0.5, 1.5, 1.0], "n": pyarrow.nulls(3)})
    path = tmp_path / "train.arrow"
    with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table)
    whole, node = path.read_bytes(), struct.pack("<qq", 3, 3)
    assert whole.count(node) == 1 and read_table(path).features.shape == (3, 2)
    path.write_bytes(whole.replace(node, struct.pack("<qq", 3, 2)))
    for read in (read_table, lambda path: prepare(path, out=tmp_path / "out")):
        with pytest.raises(ValueError, match=r"cannot read .*train.arrow as arrow: .*; expected an undamaged file"):
            read(path)


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("rows", [2, 0])
def test_names_of_columns_that_are_no_text_are_refused_whole_and_in_chunks_alike(kind, rows, tmp_path):
    table = pyarrow.table({"qid": [1, 2], "label": [1, 0], "bm25": [0.5, 1.5]}).slice(0, rows)
    path = tmp_path / "train.arrow"
    with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table) if rows else None
    path.write_bytes(path.read_bytes().replace(b"bm25", b"bm\xd75"))
    for read in (read_table, lambda path: prepare(path, out=tmp_path / "out")):
        with pytest.raises(ValueError, match=r"cannot read .*train.arrow as arrow: .*; expected an undamaged file"):
            read(path)


def test_what_parquet_says_of_a_column_is_not_asked_for(tmp_path):
    """Where that is damaged, pyarrow ends the process: here a column of texts may hold nulls by its pages, and may not by its schema."""
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"qid": ["a", "b"], "label": [1, 0], "x": [0.5, 1.5]}), path)
    whole, optional = path.read_bytes(), b"\x25\x02\x18\x03qid"  # in Thrift's compact protocol
    assert whole.count(optional) == 1
    path.write_bytes(whole.replace(optional, b"\x25\x00" + optional[2:]))
    read = "import sys; from rankgrad.data import read_table; read_table(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", read, path], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # an ordinary end


def test_an_arrow_file_that_asks_for_more_memory_than_there_is_is_named(tmp_path):
    table = pyarrow.table({"qid": ["a", "b"] * 50, "label": [1, 0] * 50, "x": [0.5, 1.5] * 50})
    path = tmp_path / "train.arrow"
    with pyarrow.ipc.new_file(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    content, unpacked = path.read_bytes(), struct.pack("<q", 800)  # of 100 numbers, before each packed column
    assert content.count(unpacked) == 2
    path.write_bytes(content.replace(unpacked, struct.pack("<q", 2**57)))
    with pytest.raises(ValueError, match=r"train.arrow asks for more memory than there is .*write it again"):
        prepare(path, out=tmp_path / "prepared")
    assert not failure_of("tables", b"\5" + path.read_bytes(), tmp_path)


def test_an_empty_array_of_a_prepared_dataset_is_named(tmp_path):
    saved = prepared_folder(tmp_path / "saved")
    (saved / "labels.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"labels.npy has 0 bytes"):
        RankingDataset.open(saved)


def raising(error):
    def read(content, folder):
        raise error

    return read


@pytest.mark.parametrize(
    "error",
    [
        KeyError("qid"),
        RecursionError("too deep"),
        ValueError("could not convert string to float: 'x'"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "the configuration"),
        ValueError("the configuration is\nof two lines"),
        DisagreementError("two readers"),
        MemoryError(),
    ],
)
def test_what_is_no_sentence_of_ours_is_a_failure(error, tmp_path, monkeypatch):
    monkeypatch.setitem(TARGETS, "config", Target(raising(error), lambda: iter(()), (), ()))
    assert type(error).__name__ in failure_of("config", b"", tmp_path)


def test_readers_that_differ_are_noticed(tmp_path, monkeypatch):
    from rankgrad.data.svmlight import blocks, compiled

    strict = blocks.read_line
    monkeypatch.setattr(blocks, "read_line", lambda *given: dataclasses.replace(strict(*given), label=7.0))
    assert "DisagreementError: the compiled and the strict" in failure_of("text", b"1 qid:1 1:2\n", tmp_path)
    monkeypatch.setattr(compiled, "COMPILED", False)
    assert "DisagreementError: the reader and the loops" in failure_of("text", b"1 qid:1 1:2\n", tmp_path)


@pytest.mark.slow
def test_the_fuzzer_itself():
    pytest.importorskip("atheris")
    counted = next(promise for promise in PROMISES if promise.name == "readers-config").attempt(2, 0)
    assert counted.tried > 50 and not counted.failures and "places reached" in counted.note
    assert {promise.name.removeprefix("readers-") for promise in PROMISES} == set(TARGETS)
    assert sum(promise.times for promise in PROMISES) == 600 == 4 * readers.SECONDS
