"""Which columns of tables are features, which look like ids, and the ids and weights of documents on their way to a dataset."""

import logging
import warnings

import numpy as np
import pyarrow
import pytest

from rankgrad.data import RankingDataset, read_lists, read_splits, read_svmlight, read_table
from rankgrad.data.load import Columns

ROWS = 12


def table(**columns):
    plain = {"qid": np.arange(ROWS) // 4, "label": np.arange(ROWS) % 2, "bm25": np.linspace(0, 1, ROWS)}
    return pyarrow.table(plain | columns)


COUNTS = {"tf_title": np.arange(ROWS) % 3, "tf_body": np.arange(ROWS) % 5, "url": [f"u{n % 7}" for n in range(ROWS)]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ignore": ["url"]}, ("bm25", "tf_title", "tf_body")),
        ({"ignore": ["u*", "tf_[t]*"]}, ("bm25", "tf_body")),
        ({"features": ["tf_*", "bm25"]}, ("tf_title", "tf_body", "bm25")),
        ({"features": ["tf_body", "tf_*"]}, ("tf_body", "tf_title")),
        ({"features": ["*"], "ignore": ["url"]}, ("bm25", "tf_title", "tf_body")),
        ({"features": ["tf_?????"]}, ("tf_title",)),
        ({"features": ["tf_body"], "ignore": ["tf_t*"]}, ("tf_body",)),
    ],
    ids=str,
)
def test_features_are_chosen_by_name_and_pattern(options, expected):
    assert read_table(table(**COUNTS), **options).feature_names == expected


def test_a_name_that_looks_like_a_pattern_is_a_name():
    odd = {"a[1]": np.arange(ROWS) % 3, "a1": np.arange(ROWS) % 2, "*": np.arange(ROWS) % 4}
    assert read_table(table(**odd), features=["a[1]", "*"]).feature_names == ("a[1]", "*")
    assert read_table(table(**odd), ignore=["a[1]"]).feature_names == ("bm25", "*")  # it is a1 as a pattern as well


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["tf*"]}, r"no column of the pyarrow table matches the pattern 'tf\*'.*'bm25'"),
        ({"features": ["tf"]}, "no column 'tf'"),
        ({"ignore": ["bm25"]}, "no feature columns"),
        ({"ignore": "bm25"}, "ignore is the text 'bm25'; expected a list"),
        ({"ignore": [3]}, "named 3"),
        ({"document": "url"}, "no column 'url'.*data.document="),
        ({"document_weight": "bm25", "features": ["bm25"]}, "'bm25' is named twice"),
    ],
    ids=str,
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read_table(table(), **options)


def test_the_columns_of_further_tables_may_be_ignored():
    more = table(note=np.arange(ROWS) % 3)
    with pytest.raises(ValueError, match="'note'.*data.ignore="):
        read_table([table(), more])
    assert read_table([table(), more], ignore=["note"]).feature_names == ("bm25",)


IDS = {
    "doc_id": np.arange(ROWS) + 1000,
    "as_float": np.arange(ROWS, dtype=np.float64)[::-1],
    "large": 2**53 + np.arange(ROWS),  # one number in float32
    "Unnamed: 0": np.zeros(ROWS),
    "": np.ones(ROWS),
}


@pytest.mark.parametrize("name", IDS)
def test_a_column_that_looks_like_an_id_is_warned_about_by_name(name):
    with pytest.warns(UserWarning, match=f"column {name!r} is .*data.ignore=.*{name}"):
        data = read_table(table(**{name: IDS[name]}))
    assert data.feature_names == ("bm25", name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(table(**{name: IDS[name]}), ignore=[name])
        read_table(table(**{name: IDS[name]}), features=[name])  # whoever names it knows it


@pytest.mark.parametrize(
    "values",
    [np.linspace(0, 1, ROWS), np.arange(ROWS) % 11, [None, *range(1, ROWS)], np.arange(ROWS) == 3],
    ids=["fractions", "one twice", "one missing", "booleans"],
)
def test_ordinary_columns_are_not(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(table(x=values))
        read_table(table(x=values).slice(0, 3))


def test_ids_are_looked_for_beyond_the_first_rows():
    values = np.arange(10_000)
    long = {"qid": values // 10, "label": values % 2, "x": values.copy()}
    with pytest.warns(UserWarning, match="'x' is different in every row"):
        read_table(pyarrow.table(long))
    long["x"][-1] = 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(pyarrow.table(long))


def test_what_is_to_be_ignored_and_is_not_there_is_said():
    with pytest.warns(UserWarning, match="no column 'ulr' to ignore.*'bm25'"):
        read_table(table(), ignore=["ulr"])


def test_categories_that_are_not_there_are_said():
    with pytest.warns(UserWarning, match="no column 'shp' of categories.*'bm25'"):
        read_table(table(), categorical=["shp"])


def test_a_stored_index_is_left_out_and_named(tmp_path, caplog):
    pytest.importorskip("pandas")
    frame = table().to_pandas().set_index(np.arange(ROWS) ** 2)
    frame.to_parquet(tmp_path / "indexed.parquet")
    with caplog.at_level(logging.WARNING):
        assert read_table(tmp_path / "indexed.parquet").feature_names == ("bm25",)
    assert "'__index_level_0__'" in caplog.text
    frame.to_csv(tmp_path / "indexed.csv")  # with a first column without a name
    with pytest.warns(UserWarning, match="column '' is a row index"):
        assert read_table(tmp_path / "indexed.csv").feature_names == ("", "bm25")
    assert read_table(tmp_path / "indexed.csv", ignore=[""]).feature_names == ("bm25",)


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.arange(ROWS) * 7, [0, 7, 14]),
        ([f"é {n}" for n in range(ROWS)], ["é 0", "é 1", "é 2"]),
        (pyarrow.array([f"d{n % 5}" for n in range(ROWS)]).dictionary_encode(), ["d0", "d1", "d2"]),
    ],
    ids=["numbers", "texts", "categories"],
)
def test_document_ids_and_weights_of_tables(ids, expected):
    weights = np.linspace(0, 2, ROWS)
    data = read_table(table(id=ids, w=weights), document="id", document_weight="w")
    assert data.document_ids[:3].tolist() == expected
    assert data.document_weights.tolist() == weights.astype(np.float32).tolist()
    assert data.feature_names == ("bm25",)


def test_documents_keep_their_ids_and_weights_when_their_rows_are_moved(tmp_path):
    lines = ["qid,label,x,id,w", "1,0,1,007,1", "2,1,2,b,2", "1,1,3,7,3"]
    (tmp_path / "mixed.csv").write_text("\n".join(lines) + "\n")
    data = read_table(tmp_path / "mixed.csv", document="id", document_weight="w")
    assert data.features[:, 0].tolist() == [1, 3, 2]
    assert data.document_ids.tolist() == ["007", "7", "b"]
    assert data.document_weights.tolist() == [1, 3, 2]
    assert data.select([1, 0]).document_ids.tolist() == ["b", "007", "7"]
    assert data.select([1]).document_weights.tolist() == [2]
    back = RankingDataset.open(data.save(tmp_path / "saved"), verify=True)
    assert back.document_ids.tolist() == data.document_ids.tolist()
    assert back.document_weights.tolist() == [1, 3, 2]
    twice = RankingDataset.concatenate([data, back])
    assert twice.document_ids.tolist() == data.document_ids.tolist() * 2
    assert twice.document_weights.tolist() == [1, 3, 2] * 2


def test_ids_of_several_kinds_join_as_texts_and_missing_ones_as_none():
    numbers, texts, none = (RankingDataset([[1.0]], [0], [0, 1], [7], document_ids=ids) for ids in ([5], ["é"], None))
    assert RankingDataset.concatenate([numbers, texts]).document_ids.tolist() == ["5", "é"]
    assert RankingDataset.concatenate([numbers, numbers]).document_ids.tolist() == [5, 5]
    assert RankingDataset.concatenate([numbers, none]).document_ids is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"document_ids": ["a"]}, "document_ids.*each document, 2"),
        ({"document_ids": [1.5, 2.5]}, "document_ids"),
        ({"document_weights": [1.0]}, "document_weights.*each document, 2"),
        ({"document_weights": [1.0, -1.0]}, r"document_weights\[1\] is -1"),
        ({"document_weights": [1.0, np.nan]}, r"document_weights\[1\] is nan"),
    ],
)
def test_a_dataset_refuses_what_is_not_one_for_each_document(change, message):
    with pytest.raises(ValueError, match=message):
        RankingDataset([[1.0], [2.0]], [0, 1], [0, 2], [7], **change)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("id", [None, *"bcdefghijkl"], "row 1, column 'id' is missing.*document"),
        ("id", ["a", "", *"cdefghijkl"], "row 2, column 'id' is an empty text.*document id"),
        ("w", [-1.0, *range(11)], "row 1, column 'w' is -1"),
        ("w", [None, *range(11)], "row 1, column 'w' is missing"),
    ],
)
def test_bad_ids_and_weights_are_refused_by_row(column, values, message):
    options = {"id": {"document": "id"}, "w": {"document_weight": "w"}}[column]
    with pytest.raises(ValueError, match=message):
        read_table(table(**{column: values}), **options)


def test_documents_that_are_only_to_be_ranked_need_no_ids():
    data = read_table(table(), document="url", labelled=False)
    assert data.document_ids is None
    assert read_table(table(url=COUNTS["url"]), document="url", labelled=False).document_ids[0] == "u0"


def test_the_ids_in_the_comments_of_letor(tmp_path):
    text = "2 qid:7 1:0.5 #docid = GX1 inc = 1 prob = 0.08\r\n# docid = none\n\n0 qid:9 1:4 # docid=b\n1 qid:7 1:3 #docid = é#1\n"
    (tmp_path / "a.txt").write_text(text)
    data = read_svmlight(tmp_path / "a.txt")
    assert data.document_ids.tolist() == ["GX1", "é#1", "b"]
    assert data.rows.tolist() == [0, 2, 1]
    (tmp_path / "b.txt").write_text("1 qid:8 1:3 #docid = c\n0 qid:8 1:3 # a docid\n")
    assert read_svmlight(tmp_path / "b.txt").document_ids is None  # not every document has one
    assert read_svmlight([tmp_path / "a.txt", tmp_path / "b.txt"]).document_ids is None
    (tmp_path / "c.txt").write_bytes(b"1 qid:8 1:3 #docid = \xff\0c\n")
    assert read_svmlight(tmp_path / "c.txt").document_ids.tolist() == ["\\xff\ufffdc"]


# --- from a configuration ---------------------------------------------------------------------------------------------


def test_a_folder_of_tables_is_read_as_the_columns_say(tmp_path):
    from pyarrow import parquet

    for split in ("train", "test"):
        parquet.write_table(table(**COUNTS), tmp_path / f"{split}.parquet")
    columns = Columns(features=("tf_*",), document="url", document_weight="bm25")
    splits = read_splits(str(tmp_path), columns=columns)
    assert [data.feature_names for data in splits.values()] == [("tf_title", "tf_body")] * 2
    assert splits["test"].document_ids[0] == "u0"
    assert splits["train"].document_weights is not None
    model = read_lists(str(tmp_path), names=["tf_body", "bm25"], columns=columns._replace(document_weight=None))
    assert model.feature_names == ("tf_body", "bm25")  # what a model expects goes before what is chosen


def test_columns_are_not_chosen_of_what_has_none(tmp_path):
    (tmp_path / "train.txt").write_text("1 qid:1 1:2\n0 qid:2 1:2\n")
    read_svmlight(tmp_path / "train.txt").save(tmp_path / "saved")
    for source in (tmp_path, tmp_path / "train.txt", tmp_path / "saved", "synthetic:tiny"):
        with pytest.raises(ValueError, match=r"data\.ignore.*tables"):
            read_splits(str(source), columns=Columns(ignore=("a",)))
