"""Tables of every kind give the same dataset; what cannot be meant is refused with source, row and column."""

import decimal
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from rankgrad.data import read_table
from rankgrad.data.prepare import prepare
from rankgrad.training.config import Config, dumps, loads

COLUMNS = {
    "qid": [3, 3, 1, 3],
    "label": [0, 1, 2, 0],
    "a": [1.5, None, 3.25, 4.0],
    "flag": [True, False, True, False],
    "n": [1, 2, 3, 2**40],
}


def arrow(**change):
    return pa.table(COLUMNS | change)


def check(data, feature_names=("a", "flag", "n")):
    assert data.query_ids.tolist() == [3, 1]
    assert data.lengths.tolist() == [3, 1]
    assert data.labels.tolist() == [0, 1, 0, 2]
    assert data.feature_names == feature_names
    np.testing.assert_array_equal(data.features, [[1.5, 1, 1], [np.nan, 0, 2], [4, 0, 2**40], [3.25, 1, 3]])
    assert data.rows.tolist() == [0, 1, 3, 2]
    assert data.in_source_order(data.labels).tolist() == COLUMNS["label"]
    assert (data.provenance["missing"], data.provenance["clamped"], data.provenance["rows"]) == (1, 0, 4)


def write_stream(path):
    with pa.ipc.new_stream(path, arrow().schema) as stream:
        stream.write_table(arrow())


FILES = {
    "x.parquet": lambda path: pq.write_table(arrow(), path, row_group_size=3),
    "pandas-index.parquet": lambda path: pd.DataFrame(COLUMNS, index=[7, 5, 3, 1]).to_parquet(path),
    "named-index.parquet": lambda path: pd.DataFrame(COLUMNS, index=pd.Index([7, 5, 3, 1], name="document")).to_parquet(
        path
    ),
    "polars.parquet": lambda path: pl.DataFrame(COLUMNS).write_parquet(path),
    "x.csv": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False),
    "X.CSV": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False),
    "x.csv.gz": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False),
    "x.csv.bz2": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False),
    "x.csv.zst": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False),
    "bom-crlf.csv": lambda path: pd.DataFrame(COLUMNS).to_csv(
        path, index=False, encoding="utf-8-sig", lineterminator="\r\n"
    ),
    "x.tsv": lambda path: pd.DataFrame(COLUMNS).to_csv(path, index=False, sep="\t"),
    "x.feather": lambda path: pd.DataFrame(COLUMNS).to_feather(path),
    "x.arrow": lambda path: pl.DataFrame(COLUMNS).write_ipc(path),
    "stream.arrow": write_stream,
    "x.ipc": lambda path: pl.DataFrame(COLUMNS).write_ipc(path),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    path = tmp_path / name
    FILES[name](path)
    data = read_table(path)
    check(data)
    check(read_table(str(path)))
    assert data.provenance["sources"] == [str(path)]


@pytest.mark.parametrize(
    "frame",
    [
        arrow(),
        pa.concat_tables([arrow().slice(0, 1), arrow().slice(1)]),
        pd.DataFrame(COLUMNS),
        pd.DataFrame(COLUMNS, index=pd.Index([9, 8, 7, 6], name="document")),
        pl.DataFrame(COLUMNS),
    ],
    ids=["pyarrow", "pyarrow in chunks", "pandas", "pandas with an index", "polars"],
)
def test_frames(frame):
    check(read_table(frame))


def test_several_tables_are_one(tmp_path):
    FILES["x.csv"](tmp_path / "x.csv")
    FILES["x.parquet"](tmp_path / "x.parquet")
    swapped = pl.DataFrame(COLUMNS).select("n", "label", "flag", "qid", "a")
    data = read_table([tmp_path / "x.csv", tmp_path / "x.parquet", swapped])
    assert data.query_ids.tolist() == [3, 1]
    assert data.lengths.tolist() == [9, 3]
    np.testing.assert_array_equal(data.in_source_order(data.features[:, 0]), [1.5, np.nan, 3.25, 4] * 3)


def test_features_weight_and_missing():
    table = arrow(w=[0.5, 0.5, 2.0, 0.5])
    data = read_table(table, features=["n", "a"], weight="w", missing=0.5)
    assert data.feature_names == ("n", "a")
    assert data.features[1, 1] == 0.5
    assert data.weights.tolist() == [0.5, 2.0]
    assert read_table(table, weight="w").feature_names == ("a", "flag", "n")
    assert read_table(arrow(text=["x"] * 4), features=["a"]).features.shape == (4, 1)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 5, -(2**63), 2**63 - 1], [5, -(2**63), 2**63 - 1]),
        (["b", "b", "ü", "long text"], ["b", "ü", "long text"]),
        (pa.array(["b", "b", "a", "a"]).dictionary_encode(), ["b", "a"]),
        (pa.array(["b", "b", "a", "a"], pa.string_view()), ["b", "a"]),
        (pa.array([5, 5, 6, 6]).dictionary_encode(), [5, 6]),
        ([5.0, 5.0, 6.0, -7.0], [5, 6, -7]),
        (pa.array([5, 5, 6, 7], pa.uint64()), [5, 6, 7]),
        (pa.array([5, 5, 6, 7], pa.int8()), [5, 6, 7]),
        ([decimal.Decimal(5)] * 4, [5]),
    ],
)
def test_query_ids(ids, expected):
    data = read_table(arrow(qid=ids))
    assert data.query_ids.tolist() == expected
    assert data.query_ids.dtype == np.int64 or data.query_ids.dtype.kind == "U"
    assert data.rows is None


def test_categories_of_frames():
    ids = ["b", "b", "a", "b"]
    for frame in (
        pd.DataFrame(COLUMNS | {"qid": pd.Categorical(ids)}),
        pl.DataFrame(COLUMNS | {"qid": ids}).with_columns(pl.col("qid").cast(pl.Categorical)),
    ):
        assert read_table(frame).query_ids.tolist() == ["b", "a"]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("decimal", [decimal.Decimal("1.25")] * 4, [1.25] * 4),
        ("nothing", pa.nulls(4), [np.nan] * 4),
        ("half", pa.array([1, 2, 3, 4], pa.float16()), [1, 2, 4, 3]),
        ("nan", [np.nan, 1.0, None, 2.0], [np.nan, 1, 2, np.nan]),
        ("big", [1e300, -1e300, 3.4e38, 0.0], [np.float32(3.4028235e38), -np.float32(3.4028235e38), 0, 3.4e38]),
    ],
)
def test_feature_columns_become_float32(column, values, expected):
    data = read_table(arrow(**{column: values}), features=[column])
    np.testing.assert_array_equal(data.features[:, 0], np.array(expected, np.float32))
    assert data.provenance["clamped"] == (2 if column == "big" else 0)


CATEGORIES = {
    "text": (["red", None, "", "blå"], [0, np.nan, 1, np.nan], ("red", "blå")),
    "dictionary": (pa.array(["red", None, "blue", "red"]).dictionary_encode(), [0, np.nan, 0, 1], ("red", "blue")),
    "views": (pa.array(["red", "red", "blue", "red"], pa.string_view()), [0, 0, 0, 1], ("red", "blue")),
    "numbers": (pa.array([1.5, 2, 3, 1.5]).dictionary_encode(), [0, 1, 0, 2], ("1.5", "2", "3")),
    "truth": ([True, None, False, True], [1, np.nan, 1, 0], ("false", "true")),
}


@pytest.mark.parametrize("name", CATEGORIES)
def test_types_tell_categories(name):
    values, codes, levels = CATEGORIES[name]
    data = read_table(arrow(kind=values), features=["a", "kind"])
    assert data.categories == {1: levels}
    np.testing.assert_array_equal(data.features[:, 1], np.float32(codes))
    assert data.provenance["missing"] == 1 + int(np.isnan(codes).sum())
    if name in ("numbers", "truth"):
        assert not read_table(arrow(kind=values), features=["a", "kind"], by_type=False).categories
    else:
        with pytest.raises(ValueError, match="column 'kind' is 're?d?.*categorical"):
            read_table(arrow(kind=values), features=["a", "kind"], by_type=False)


def test_texts_that_are_all_missing_are_a_category_without_levels():
    for values in ([None] * 4, [""] * 4):
        data = read_table(arrow(kind=pa.array(values, pa.string())), features=["a", "kind"])
        assert data.categories == {1: ()} and np.isnan(data.features[:, 1]).all()


def test_columns_of_categories_are_named(tmp_path):
    shops = {"shop_id": [7.0, 8.0, None, 7.0], "size": ["10", "2XL", "11", "x"]}
    pd.DataFrame(COLUMNS | shops).to_csv(tmp_path / "x.csv", index=False)  # which writes 7.0 for 7
    for source in (arrow(**shops), tmp_path / "x.csv", pd.DataFrame(COLUMNS | shops)):
        data = read_table(source, features=["shop_id", "size"], categorical=["shop*", "size"])
        assert data.categories == {0: ("7", "8"), 1: ("10", "2XL", "11", "x")}
        np.testing.assert_array_equal(data.features, np.float32([[0, 0], [1, 1], [0, 3], [np.nan, 2]]))
    with pytest.raises(ValueError, match="column 'size' is '2XL'.*expected numbers.*--set data.categorical="):
        read_table(arrow(**shops), features=["size"])  # half of them are numbers
    with pytest.raises(ValueError, match="categorical is the text 'size'"):
        read_table(arrow(**shops), categorical="size")
    two = read_table([arrow(kind=["b", "a", "b", "b"]), arrow(kind=pa.array(["c", "a", "a", "c"]).dictionary_encode())])
    assert two.categories == {1: ("false", "true"), 3: ("b", "a", "c")}
    assert two.in_source_order(two.features[:, 3]).tolist() == [0, 1, 0, 0, 2, 1, 1, 2]


REFUSED = [
    ({"label": [0, 1, None, 0]}, {}, "row 3, column 'label' is missing"),
    ({"label": [0, 1, float("nan"), 0]}, {}, "row 3, column 'label' is missing"),
    ({"label": [0, 1, -1, 0]}, {}, "row 3, column 'label' is -1"),
    ({"label": [0, float("inf"), 1, 0]}, {}, "row 2, column 'label' is inf"),
    ({"label": [0, 1e300, 1, 0]}, {}, "row 2, column 'label' is 1e"),
    ({"label": ["0", "1", "good", "0"]}, {}, "row 3, column 'label' is 'good'.*numbers"),
    ({"qid": [3, None, 1, 1]}, {}, "row 2, column 'qid' is missing"),
    ({"qid": ["x", "x", "", "y"]}, {}, "row 3, column 'qid' is an empty text"),
    ({"qid": [1.0, 1.5, 2.0, 2.0]}, {}, "row 2, column 'qid' is 1.5"),
    ({"qid": [1.0, 1.0, 2.0, float("nan")]}, {}, "row 4, column 'qid' is nan"),
    ({"qid": [1.0, 1.0, 2.0, 2.0**60]}, {}, "row 4, column 'qid' is 1.15"),
    ({"qid": pa.array([1, 2, 3, 2**64 - 1], pa.uint64())}, {}, "column 'qid': .*18446744073709551615"),
    ({"qid": [True] * 4}, {}, "column 'qid' has type bool"),
    ({"a": [1.0, 2.0, float("-inf"), 0.0]}, {}, "row 3, column 'a' is infinite"),
    (
        {"text": ["1", None, "x", "2"]},
        {},
        "row 3, column 'text' is 'x', .*features=",
    ),
    ({"text": ["1", "2", "3", "2"]}, {}, "row 1, column 'text' is '1', in a column of type"),
    ({"when": pa.array([1, 2, 3, 4], pa.timestamp("s"))}, {}, "column 'when'.*timestamp"),
    ({}, {"scattered": "refuse"}, "row 4, column 'qid' returns to query 3"),
    ({}, {"scattered": "sort"}, "scattered .*'group', 'refuse', got 'sort'"),
    ({}, {"label": "lable"}, "no column 'lable'; did you mean 'label'"),
    ({}, {"qid": "query"}, "no column 'query'; .*'qid', 'label', 'a', 'flag', 'n'"),
    ({}, {"features": ["a", "aa"]}, "no column 'aa'; did you mean 'a'"),
    ({}, {"features": ["a", "a"]}, "column 'a' is named twice"),
    ({}, {"features": ["a", "label"]}, "column 'label' is named twice"),
    ({}, {"features": "a"}, "expected a list"),
    ({}, {"features": []}, "no feature columns"),
    ({}, {"weight": "n"}, "column 'n' differs within query 3"),
    ({"w": [1.0, 1.0, -1.0, 1.0]}, {"weight": "w"}, "row 3, column 'w' is -1"),
]


@pytest.mark.parametrize(("change", "options", "message"), REFUSED)
def test_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        read_table(arrow(**change), **options)


def test_documents_that_are_only_to_be_ranked_need_no_labels():
    table = arrow().drop_columns(["label"])
    ranked = read_table(table, labelled=False)
    assert ranked.feature_names == read_table(arrow()).feature_names and not ranked.labels.any()
    for labels in ([None] * 4, [-1, 0, 1, 2], list("?a?b")):
        strange = table.append_column("label", [labels])
        again = read_table(strange, labelled=False)
        assert again.feature_names == ranked.feature_names and not again.labels.any()
    with pytest.raises(ValueError, match="no column 'label'"):
        read_table(table)


def test_refused_sources(tmp_path):
    both = pa.Table.from_arrays(
        [pa.array([1]), pa.array([1]), pa.array([1]), pa.array([0])], ["a", "a", "qid", "label"]
    )
    mixed = pd.DataFrame(COLUMNS)
    mixed["mixed"] = ["a", 1, 2.0, None]
    for source, message in [
        (both, "columns named 'a'"),
        (mixed, "column mixed"),
        (
            mixed.set_axis(["qid", "label", "a", "flag", "n", "a"], axis=1),
            "pandas table .*columns named 'a'",
        ),
        (
            pd.DataFrame(COLUMNS).assign(qid=[1, 1, 1, 2**70]),
            "pandas table",
        ),
        (pl.DataFrame(COLUMNS).with_columns(pl.col("n").cast(pl.Int128)), "polars table"),
        (
            pd.DataFrame(COLUMNS).assign(a=[[1], [2], [3], [4]]),
            "row 1, column 'a' is \\[1\\], in a column of type list",
        ),
        (pd.Series([1]), "Series"),
        (pl.Series([1]), "polars table"),
        (arrow(qid=["a", "a\0", "b", "b"]), "row 2, column 'qid' holds a NUL character"),
        (arrow().slice(0, 0), "no rows"),
        (arrow().select(["qid", "label"]), "no feature columns"),
        ([arrow(), arrow().append_column("z", pa.array([1] * 4))], "pyarrow table 2 has a column 'z'"),
        ([arrow(), arrow().drop_columns(["n"])], "pyarrow table 2 has no column 'n'"),
        ([arrow(), arrow(qid=["a"] * 4)], "column 'qid' .*text .*number"),
        (pa.concat_tables([arrow(), arrow(a=[1.0, 2.0, np.inf, 3.0])]), "row 7, column 'a' is infinite"),
        ([arrow(), arrow(label=[0, 1, 2, -1])], "pyarrow table 2, row 4, column 'label' is -1"),
        ([], "no table"),
        (3, "int"),
        (pl.LazyFrame(COLUMNS), "LazyFrame"),
        (tmp_path, "is a folder"),
        (tmp_path / "x.txt", "no known ending"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_table(source)
    with pytest.raises(ValueError, match="pyarrow table 2, row 1, column 'qid' returns to query 3"):
        read_table([arrow().slice(0, 3), arrow()], scattered="refuse")
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        read_table(tmp_path / "none.csv")


def test_columns_are_named_by_text():
    frame = pd.DataFrame(COLUMNS).rename(columns={"a": 0})
    for options in ({"features": [0]}, {"label": 0}, {"weight": 0}):
        with pytest.raises(ValueError, match="a column is named 0; expected names as text; write '0'"):
            read_table(frame, **options)
    assert read_table(frame, features=["0"]).feature_names == ("0",)


@pytest.mark.parametrize("missing", [np.inf, 1e39, None, "x", True])
def test_missing_is_a_number_that_float32_holds_or_nan(missing):
    with pytest.raises(ValueError, match="missing is .*; expected a number of at most 3.4e38 or NaN"):
        read_table(arrow(), missing=missing)


def test_clamped_values_are_counted_and_the_first_is_told(caplog):
    data = read_table([arrow(), arrow(a=[1.0, -1e300, 1e39, 3.4e38])])
    assert data.provenance["clamped"] == 2
    assert data.provenance["first_clamped"] == "pyarrow table 2, row 2, column 'a'"
    assert "2 values beyond float32 became the largest float32, the first at pyarrow table 2, row 2" in caplog.text
    assert "first_clamped" not in read_table(arrow()).provenance


@pytest.mark.parametrize("name", ["x.parquet", "x.csv.gz", "x.arrow"])
def test_truncated_files_are_refused(tmp_path, name):
    FILES[name](tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-12])
    with pytest.raises(ValueError, match=name):
        read_table(tmp_path / name)


LONG = "1,2,3\n" * 200_000  # beyond the block of which pyarrow guesses the types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Empty CSV"),
        ("qid,label,a\n", "no rows"),
        ("qid,label,a\n1,2,3\n1,2\n", "Expected 3 columns, got 2"),
        ("qid,label,a\n1,2,0x10\n", "row 1, column 'a' is '0x10'"),
        ("qid,label,a\n1,2,1\n1,0x1,1\n", "row 2, column 'label' is '0x1'"),
        ("qid,label,a\n1,2,3_5\n", "row 1, column 'a' is '3_5'"),
        ('qid,label,a\n1,2,"3,5"\n', "row 1, column 'a' is '3,5'"),
        ("qid,label,a\n1,2,1e999\n", "row 1, column 'a' is '1e999', which is infinite or beyond float64"),
        ("qid,label,a\n1,2,inf\n", "row 1, column 'a' is 'inf', which is infinite"),
        ("qid,label,a\n1,2,nan\n1,2,NA\n1,2,null\n1,2,?\n", r"row 4, column 'a' is '\?'"),
        ("qid,label,a\n" + LONG + "1,2,NA\n1,2,?\n", r"row 200002, column 'a' is '\?'"),
        ("qid,label,a\n1,,3\n", "row 1, column 'label' is missing"),
        ("qid,label,a\n1,nan,3\n", "row 1, column 'label' is missing"),
        ("qid,label,a\n1,2,3\n,2,3\n", "row 2, column 'qid' is missing"),
        ("qid,label,a\n1,2,3\n1.5,2,3\n", "row 2, column 'qid' is 1.5"),
        ("qid,label,a\n9223372036854775808,2,3\n", "row 1, column 'qid' is 9.2"),
        ("qid,label,a,a\n1,1,1,2\n", "columns named 'a'"),
        ("qid,qid,a,label\n1,1,1,2\n", "several columns named 'qid'"),
        ("1,2,3\n1,1,4\n", "no column 'label'; is the line of names missing?"),
        ("1,1,0.5\n1,1,4\n", "several columns named '1'; .*; add the line of names, which seems to be missing"),
        ("2,q1,0.5,0.25\n1,q1,4,3\n", "no column 'label'; is the line of names missing?"),
        (
            "query,label,0,1\n1,2,3,4\n",
            "no column 'qid'; rename the column of query ids so, or name it: qid= in Python, --set data.qid= in train;",
        ),
        ("qid,labels,a\n1,2,3\n", "no column 'label'; did you mean 'labels'. rename "),
        ("qid;label;a\n1;2;3\n", "no column 'label'; is another separator between them?"),
        ("qid,label,a\n1,2,\xff\n", "column 'a'"),
        ("qid,label,\xff\n1,2,3\n", "utf-8"),
        ("qid,label,a\n" + LONG + "1,2,x\n", "row 200001, column 'a' is 'x'"),
        ("qid,label,a\n" + LONG + "1,2,0x4\n", "row 200001, column 'a' is '0x4'"),
    ],
)
def test_refused_csv(tmp_path, text, message):
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ids", "values"),
    [
        ("007,1,1\n7,1,1\n", ["007", "7"], [1, 1]),
        ("1.0,1,1\n2.0,1,1\n", [1, 2], [1, 1]),
        ("NA,1,NA\nx,1,\n", ["NA", "x"], [np.nan, np.nan]),
        ("-9223372036854775808,1,+1.5\n9223372036854775807,1, 2 \n", [-(2**63), 2**63 - 1], [1.5, 2]),
        ("5,1,1.797e308\n\n5,1,.5\n", [5], [np.float32(3.4028235e38), 0.5]),
    ],
)
def test_accepted_csv(tmp_path, text, ids, values):
    (tmp_path / "x.csv").write_text("qid,label,a\n" + text)
    data = read_table(tmp_path / "x.csv")
    assert data.query_ids.tolist() == ids
    np.testing.assert_array_equal(data.features[:, 0], np.float32(values))


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.none() | st.floats(width=32, allow_infinity=False)),
        min_size=1,
        max_size=30,
    )
)
def test_random_tables_round_trip(rows):
    qid, label, value = zip(*rows)
    table = pa.table({"qid": qid, "label": label, "v": pa.array(value, pa.float32())})
    data = read_table(table, missing=float("nan"))
    expected = np.array([np.nan if v is None else v for v in value], np.float32)
    np.testing.assert_array_equal(data.in_source_order(data.features)[:, 0], expected)
    owners = data.in_source_order(np.repeat(data.query_ids, data.lengths))
    assert owners.tolist() == list(qid)
    assert data.query_ids.tolist() == list(dict.fromkeys(qid))


def test_without_pyarrow_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'rankgrad\[tables\]'"):
        read_table("x.parquet")


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_long_text_repeated_in_every_row_is_refused_before_it_is_written_out(tmp_path, monkeypatch, name, coded):
    rows, path = 500, tmp_path / name
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * (1 << 20)])
    table = pa.table({"label": [0] * rows, "a": [1.0] * rows, "qid": texts if coded else texts.cast(pa.string())})
    if name == "a.parquet":
        pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    else:
        with pa.OSFile(str(path), "w") as file:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_file(file, table.schema, options=options) as writer:
                writer.write_table(table)
    assert path.stat().st_size < 1 << 18
    monkeypatch.setattr("rankgrad.data.tables.arrow.affordable", lambda size: size < 1 << 28)
    match = rf"{name} would take \d.* bytes of memory.*many times its size"
    with pytest.raises(ValueError, match=match):
        read_table(path)
    if coded or name == "a.parquet":  # the texts of an Arrow file lie in its batches, one of which is read at a time
        with pytest.raises(ValueError, match=match):
            prepare(path, out=tmp_path / "out")


def test_texts_of_any_encoding_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("rankgrad.data.memory.UNPACKED", 1)  # each file is looked through
    monkeypatch.setattr("rankgrad.data.memory.MANY_TIMES", 1)
    table = pa.table({"label": [0, 1], "a": [1.0, 2.0], "qid": ["one", "one"]})
    for encoding in ("PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding={"qid": encoding})
        assert read_table(tmp_path / "a.parquet").query_ids.tolist() == ["one"]


def test_categories_of_numbers_are_categories_in_parquet_too(tmp_path):
    frame = pd.DataFrame({"qid": [1, 1, 2], "label": [0, 1, 0], "shop": [30, 7, 30], "price": [1, 2, 3]})
    frame.astype({"shop": "category"}).to_parquet(tmp_path / "shops.parquet")
    assert read_table(tmp_path / "shops.parquet").categories == {0: ("30", "7")}
    assert read_table(tmp_path / "shops.parquet", pandas_categories=False).categories == {}
    assert loads("", of_run=True).data.pandas_categories is False  # as runs from before have learned
    assert loads(dumps(Config()), of_run=True).data.pandas_categories is True
    frame.to_parquet(tmp_path / "numbers.parquet")
    assert read_table(tmp_path / "numbers.parquet").categories == {}
    table = pq.read_table(tmp_path / "shops.parquet")
    for note in (
        b"[",
        b"[]",
        b"{}",
        b'{"columns": [1]}',
        b'{"columns": [{}]}',
        b'{"columns": 1}',
        b"[" * 10**5,
        b"\xff",
    ):
        assert read_table(table.replace_schema_metadata({"pandas": note})).categories == {}
