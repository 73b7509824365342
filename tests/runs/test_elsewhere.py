"""Scores of other programs: every form of file gives each document its own, and whatever does not fit is refused by name."""

import dataclasses
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rankgrad.data.dataset import RankingDataset
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.elsewhere import is_elsewhere, keep_scores, read_scores
from rankgrad.runs.ensemble import open_run
from rankgrad.runs.folder import read_per_document, read_per_query, read_report
from rankgrad.training.evaluate import measure

# The rows of query a are not together in the source: 0, 2 and 4.
LISTS = RankingDataset(np.zeros((6, 1)), [0, 2, 1, 1, 0, 0], [0, 3, 5, 6], ["a", "b", "ü"], rows=[0, 2, 4, 1, 3, 5])
SCORES = np.array([0.1, 0.5, -2.0, 1e-9, 3.25, 7.0])  # in the order of the lists
NAMES = [("a", 1), ("a", 3), ("a", 5), ("b", 2), ("b", 4), ("ü", 6)]
SHUFFLED = [3, 0, 5, 2, 4, 1]


def trec(rows):
    return "".join(f"{NAMES[at][0]} Q0 {NAMES[at][1]} 1 {SCORES[at]} other\n" for at in rows)


def table(rows, **others):
    columns = {"qid": [NAMES[at][0] for at in rows], "document": [NAMES[at][1] for at in rows], "score": SCORES[rows]}
    return pyarrow.table({**columns, **others})


def written(folder, kind):
    in_order = LISTS.in_source_order(SCORES)
    if kind in ("numbers", "windows", "blank"):
        end = "\r\n" if kind == "windows" else "\n"
        file = folder / "scores.txt"
        file.write_text(end.join(map(repr, in_order.tolist())) + ("\n\n \n" if kind == "blank" else ""), newline="")
    elif kind == "trec":
        file = folder / "other.run"
        file.write_text(trec(SHUFFLED), encoding="utf-8")
    elif kind == "csv":
        file = folder / "scores.csv"
        lines = [f"{NAMES[at][1]},{NAMES[at][0]},ignored,{SCORES[at]}\n" for at in SHUFFLED]
        file.write_text("document,qid,tag,score\n" + "".join(lines), encoding="utf-8")
    elif kind == "parquet":
        file = folder / "scores.parquet"
        pyarrow.parquet.write_table(table(SHUFFLED), file)
    else:
        file = folder / "scores.parquet"
        queries = LISTS.in_source_order(np.repeat(LISTS.query_ids, LISTS.lengths)).tolist()
        named = {"qid": queries} if kind == "in order with queries" else {}
        pyarrow.parquet.write_table(pyarrow.table({"score": in_order.astype(np.float32), **named}), file)
    return file


KINDS = ["numbers", "windows", "blank", "trec", "csv", "parquet", "in order", "in order with queries"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_file_gives_each_document_its_own_score(tmp_path, kind):
    found = read_scores(written(tmp_path, kind), LISTS)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, SCORES.astype(np.float32) if kind.startswith("in order") else SCORES)


def test_ids_are_compared_as_they_are_written(tmp_path):
    numbered = dataclasses.replace(LISTS, query_ids=np.array([7, 12, 10**15]))
    file = tmp_path / "s.parquet"
    ids = np.array([7, 7, 7, 12, 12, 10**15])
    pyarrow.parquet.write_table(table(np.arange(6), qid=ids.astype(np.float64), document=[1, 3, 5, 2, 4, 6]), file)
    np.testing.assert_array_equal(read_scores(file, numbered), SCORES)
    pyarrow.parquet.write_table(table(np.arange(6), qid=[f"0{query}" for query in ids]), file)
    with pytest.raises(ValueError, match=r"row 1.* no document '1' of query '07'"):
        read_scores(file, numbered)


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("s.txt", "1\n2\n3\n", ["3 scores", "6 documents"]),
        ("s.txt", "", ["0 scores", "6 documents"]),
        ("s.txt", "1\n2\n3\n4\n5\n6\n7\n", ["7 scores", "6 documents"]),
        ("s.txt", "1\n2\nabc\n4\n5\n6\n", ["line 3", "'abc'", "finite number"]),
        ("s.txt", "1\n2\n3\n4\nnan\n6\n", ["line 5", "nan"]),
        ("s.txt", "1\n2\n3\n4\n5\n1e999\n", ["line 6", "1e999"]),
        ("s.txt", "1_0\n2\n3\n4\n5\n6\n", ["line 1", "1_0"]),
        ("s.txt", "1 2\n", ["line 1", "2 fields", "QUERY Q0 DOCUMENT RANK SCORE TAG"]),
        ("s.run", trec(SHUFFLED[:4]), ["2 of 6 documents", "'3' of query 'a'"]),
        ("s.run", trec(SHUFFLED)[:-12], ["line 6", "fields", "whole"]),
        ("s.run", trec([0, 1, 0]), ["line 3", "'1' of query 'a'", "line 1"]),
        ("s.run", trec([0]).replace("a Q0 1", "a Q0 2"), ["line 1", "no document '2' of query 'a'"]),
        ("s.run", trec([0]).replace("a Q0", "other Q0"), ["line 1", "query 'other'"]),
        ("s.run", trec([0]).replace("0.1", "high"), ["line 1", "'high'"]),
        ("s.csv", "qid,document,value\na,1,2\n", ["no column 'score'", "'value'"]),
        ("s.csv", "document,score\n1,2\n", ["no column 'qid'"]),
        ("s.csv", "score\n1\n2\nx\n4\n5\n6\n", ["row 3", "'x'"]),
        ("s.csv", "score\n1\n2\n\n4\n5\n6\n", ["5 scores", "6 documents"]),
        ("s.csv", "qid,score\na,1\nb,2\na,\nb,4\na,5\nü,6\n", ["row 3", "score"]),
        ("s.csv", "qid,score\na,1\na,2\nb,3\nb,4\na,5\nü,6\n", ["row 2", "'a'", "'b'", "document"]),
        ("s.parquet", "PAR1 cut short", ["s.parquet", "parquet"]),
        ("s.parquet", b"\xff\xfe", ["s.parquet", "parquet"]),
        ("s.txt", b"\xff\xfe\x00", ["is not text"]),
    ],
)
def test_what_does_not_fit_is_refused_by_place(tmp_path, name, content, facts):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"; ") as error:
        read_scores(file, LISTS)
    assert str(file) in str(error.value)
    assert all(fact in str(error.value) for fact in facts), str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="absent.txt does not exist"):
        read_scores(tmp_path / "absent.txt", LISTS)


def test_the_folder_reads_like_that_of_a_run(tmp_path):
    values = keep_scores(tmp_path / "x" / "other", "other", SCORES, LISTS, split="test", metrics=["map", "ndcg@5"])
    kept = read_per_query(tmp_path / "x" / "other")
    assert (kept.split, kept.query_ids, list(kept.metrics)) == ("test", ["a", "b", "ü"], ["map", "ndcg@5"])
    expected = measure(SCORES, LISTS, ["map", "ndcg@5"])
    for metric, of_queries in expected.items():
        np.testing.assert_array_equal(kept.metrics[metric], of_queries)
        np.testing.assert_array_equal(values[metric], of_queries)
    documents = read_per_document(tmp_path / "x" / "other")
    np.testing.assert_array_equal(documents.scores, SCORES)
    np.testing.assert_array_equal(documents.rows, LISTS.rows)
    facts = read_report(tmp_path / "x" / "other")
    assert (facts["name"], facts["splits"]["test"]["queries"]) == ("other", 3)
    keep_scores(tmp_path / "reversed", "reversed", -SCORES, LISTS, split="test", metrics=["map"])
    assert compare_runs(tmp_path / "x" / "other", tmp_path / "reversed", "map")["queries"] == 2
    assert is_elsewhere(tmp_path / "reversed")
    with pytest.raises(ValueError, match="reversed holds scores.*no model"):
        open_run(tmp_path / "reversed")


def test_lists_without_a_relevant_document_and_any_split_are_kept(tmp_path):
    flat = dataclasses.replace(LISTS, labels=np.zeros(6))
    for split in ("train", "vali", "test", "holdout"):
        keep_scores(tmp_path / split, "flat", SCORES, flat, split=split)
        assert read_per_query(tmp_path / split).split == split


def test_only_scores_are_replaced_and_only_on_request(tmp_path):
    keep_scores(tmp_path / "s", "s", SCORES, LISTS, split="test")
    with pytest.raises(ValueError, match="exists already.*--overwrite"):
        keep_scores(tmp_path / "s", "s", -SCORES, LISTS, split="test")
    keep_scores(tmp_path / "s", "s", -SCORES, LISTS, split="test", overwrite=True)
    np.testing.assert_array_equal(read_per_document(tmp_path / "s").scores, -SCORES)
    (tmp_path / "s" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"exists already; expected a new folder; choose another --out$"):
        keep_scores(tmp_path / "s", "s", SCORES, LISTS, split="test", overwrite=True)
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(ValueError, match="not finite"):
        keep_scores(tmp_path / "s", "s", SCORES * np.nan, LISTS, split="test")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [None, np.arange(6) * 10**15, ["", "a-1", "日本", "x" * 99, " ", "a-1"]])
def test_ids_of_documents_come_back_as_they_were(tmp_path, ids):
    named = LISTS if ids is None else dataclasses.replace(LISTS, document_ids=np.array(ids))
    keep_scores(tmp_path / "s", "s", SCORES, named, split="test")
    kept = read_per_document(tmp_path / "s").ids
    assert kept is None if ids is None else list(kept) == list(ids)


def test_ids_that_stand_twice_cannot_name_a_document(tmp_path):
    twice = dataclasses.replace(LISTS, document_ids=np.array(["x", "y", "x", "p", "q", "r"]))
    file = tmp_path / "s.run"
    file.write_text("a Q0 x 1 0.5 tag\n")
    with pytest.raises(ValueError, match=r"document 'x' of query 'a' twice.*number per row"):
        read_scores(file, twice)


@pytest.mark.parametrize(
    "names",
    [
        "qid document score",
        "query docno score",
        "query document score",
        "query_id doc_id score",
        "qid docid score",
        "mine own score",
    ],
)
def test_a_table_may_call_its_columns_as_the_lists_do_or_as_others_do(tmp_path, names):
    file = tmp_path / "s.parquet"
    pyarrow.parquet.write_table(table(SHUFFLED).rename_columns(names.split()), file)
    np.testing.assert_array_equal(read_scores(file, LISTS, qid="mine", document="own"), SCORES)


def test_rows_are_rows_whatever_the_documents_are_called(tmp_path):
    crossed = dataclasses.replace(LISTS, document_ids=np.array([3, 5, 1, 4, 2, 6]))  # ids that are rows of others
    file = tmp_path / "s.csv"
    lines = [f"{NAMES[at][0]},{NAMES[at][1]},{SCORES[at]}" for at in SHUFFLED]
    file.write_text("\n".join(["qid,row,score", *lines]))
    np.testing.assert_array_equal(read_scores(file, crossed), SCORES)
    file.write_text("\n".join(["qid,document,score", *lines]))
    np.testing.assert_array_equal(read_scores(file, crossed)[:3], SCORES[[1, 2, 0]])


@pytest.mark.parametrize("name", ["s.csv", "s.tsv", "s.CSV"])
def test_a_csv_of_numbers_alone_needs_no_name(tmp_path, name):
    file = tmp_path / name
    file.write_text("\n".join(map(repr, LISTS.in_source_order(SCORES).tolist())))
    np.testing.assert_array_equal(read_scores(file, LISTS), SCORES)


def test_a_run_that_lost_its_model_and_files_of_somebody_else_are_not_overwritten(tmp_path):
    for name in ("config.toml", "notes.txt"):
        folder = tmp_path / name
        keep_scores(folder, "s", SCORES, LISTS, split="test")
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"{name} exists already; expected a new folder; choose another --out$"):
            keep_scores(folder, "s", -SCORES, LISTS, split="test", overwrite=True)
        assert (folder / name).read_text() == "mine"
    with pytest.raises(ValueError, match=r"has no model\.safetensors|has no config"):
        open_run(tmp_path / "config.toml")  # and is not said to be of another program
