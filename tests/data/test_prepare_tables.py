"""`prepare` of tables and single files: what the loader reads, memory-mapped; nothing half-made is taken for whole."""

import os
import signal

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

import children
from rankgrad.data import RankingDataset, prepare, read_splits, synthetic
from rankgrad.data.load import Columns, check_source
from rankgrad.data.write import write_parquet

ARRAYS = ("features", "labels", "offsets", "query_ids", "weights", "rows", "document_ids", "document_weights")


def same(found, expected):
    assert found.keys() == expected.keys()
    for split, data in found.items():
        for name in ARRAYS:
            one, other = getattr(data, name), getattr(expected[split], name)
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other, equal_nan=name == "features"), (split, name)
        assert data.feature_names == expected[split].feature_names


@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    for split in ("train", "vali", "test"):
        write_parquet(folder / f"{split}.parquet", synthetic("tiny", split))
    return folder


def test_a_folder_of_tables(tables):
    expected = read_splits(str(tables))
    summary = prepare(tables)
    assert summary.folder == (tables / "prepared").resolve()
    same(read_splits(str(summary.folder)), expected)
    assert summary.splits["train"] == expected["train"].describe()
    assert sorted(path.name for path in summary.folder.iterdir()) == ["summary.txt", "test", "train", "vali"]
    assert isinstance(read_splits(str(summary.folder))["train"].features.base, np.memmap)
    same(read_splits(str(tables)), expected)  # prepared/ beside the tables changes nothing
    with pytest.raises(ValueError, match="not empty.*overwrite"):
        prepare(tables)
    prepare(tables, overwrite=True)


def test_parts_and_csv_and_columns(tmp_path):
    table = pyarrow.table(
        {
            "query": [f"q{n % 5}" for n in range(40)],
            "grade": [n % 3 for n in range(40)],
            "url": [f"u{n}" for n in range(40)],
            "bm25": np.linspace(0, 1, 40),
            "note": ["?"] * 40,
            "weight": [1.0 + n % 5 for n in range(40)],
            "seen": np.linspace(0, 3, 40),
        }
    )
    (tmp_path / "train").mkdir()
    for number in range(4):
        pyarrow.csv.write_csv(table.slice(10 * number, 10), tmp_path / "train" / f"part-{number}.csv")
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    columns = Columns(
        "grade", "query", "weight", ignore=("note",), document="url", document_weight="seen"
    )  # fmt: skip
    expected = read_splits(str(tmp_path), columns=columns)
    assert len(expected["train"]) == 5
    prepared = prepare(tmp_path, columns=columns)
    assert any("quarter" in note for note in prepared.notes)
    found = read_splits(str(prepared.folder))
    same({"test": found["test"]}, {"test": expected["test"]})
    together = RankingDataset.concatenate([found["train"], found["vali"]])
    assert sorted(together.document_ids) == sorted(expected["train"].document_ids)
    assert sorted(together.document_weights) == sorted(expected["train"].document_weights)
    assert together.feature_names == ("bm25",)


@pytest.mark.parametrize("kind", ["parquet", "csv", "txt"])
def test_a_single_file(kind, tmp_path):
    lists = synthetic("tiny")
    if kind == "txt":
        from rankgrad.data.write import write_letor

        write_letor(tmp_path / "mine.txt", lists)
    else:
        write_parquet(tmp_path / "mine.parquet", lists)
        pyarrow.csv.write_csv(pyarrow.parquet.read_table(tmp_path / "mine.parquet"), tmp_path / "mine.csv")
    summary = prepare(tmp_path / f"mine.{kind}", out=tmp_path / "out")
    assert list(summary.splits) == ["train", "vali"]
    found = read_splits(str(tmp_path / "out"))
    assert len(found["train"]) + len(found["vali"]) == len(lists)
    assert prepare(tmp_path / f"mine.{kind}").folder == (tmp_path / "prepared").resolve()


def test_where_nothing_can_be_written_the_error_says_out(tables, tmp_path, monkeypatch):
    make = os.mkdir

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(tables)):
            raise PermissionError(13, "Permission denied", str(path))
        return make(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"prepared cannot be written: Permission denied.*--out"):
        prepare(tables)
    assert prepare(tables, out=tmp_path / "out").folder.name == "out"


def test_splits_of_other_columns_are_refused_and_nothing_is_left(tables):
    pyarrow.parquet.write_table(
        pyarrow.table({"label": [1, 0], "qid": [1, 1], "other": [0.5, 0.25]}), tables / "test.parquet"
    )
    with pytest.raises(ValueError, match=r"test\.parquet has no column 'f1'"):
        prepare(tables)
    assert sorted(path.name for path in tables.iterdir()) == ["test.parquet", "train.parquet", "vali.parquet"]
    (tables / "train.parquet").unlink()
    with pytest.raises(ValueError, match="no train split; it has vali, test"):
        prepare(tables)


def prepare_until_killed(folder):
    prepare(folder, progress=lambda done, total: done > total / 2 and os.kill(os.getpid(), signal.SIGKILL))


def test_what_an_interruption_leaves_is_never_taken_for_whole(tables):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tables, progress=stop)
    assert sorted(path.name for path in tables.iterdir()) == ["test.parquet", "train.parquet", "vali.parquet"]
    assert children.code(children.start(prepare_until_killed, tables)) == -signal.SIGKILL  # nothing is tidied up
    (left,) = [path for path in tables.iterdir() if path.is_dir()]
    assert left.name.startswith(".prepared.")
    with pytest.raises(ValueError, match="may be incomplete|no training file"):
        check_source(str(left))
    same(read_splits(str(tables)), read_splits(str(prepare(tables).folder)))
