"""Tables and text read chunk by chunk into a file: the dataset that the readers give, to the bit."""

import dataclasses
import gzip

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rankgrad.data import read_svmlight, read_table
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.load import Columns
from rankgrad.data.spool import GrowingFile
from rankgrad.data.tables import stream
from rankgrad.data.tables.files import table_files
from rankgrad.data.tables.stream import spool_tables

ARRAYS = ("labels", "offsets", "query_ids", "weights", "rows", "document_ids", "document_weights")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(stream, "MOST", 7)
    monkeypatch.setattr(stream, "FEWEST", 1)
    monkeypatch.setattr(stream, "BLOCK", 250)


def table(rows=60, *, scattered=False, ids="numbers", seed=0):
    rng = np.random.default_rng(seed)
    query = rng.integers(0, 9, rows) if scattered else np.sort(rng.integers(0, 9, rows))
    names = {"numbers": query * 3, "texts": np.array([f"q{n} é" for n in query])}[ids]
    features = {f"f{n}": rng.normal(size=rows).astype(np.float32) for n in range(3)}
    features["f1"][::5] = np.nan
    columns = {"qid": names, "label": rng.integers(0, 3, rows), **features, "w": query / 4 + 1}
    shops = [None if n % 13 == 0 else f"shop {n % (3 + n // 20)}" for n in range(rows)]  # more of them later
    return pyarrow.table(columns | {"shop": shops, "id": [f"d{n}" for n in range(rows)], "dw": rng.random(rows)})


def arrow_file(own, path):
    with pyarrow.ipc.new_file(path, own.schema) as file:
        file.write_table(own, max_chunksize=25)


def arrow_stream(own, path):
    with pyarrow.ipc.new_stream(path, own.schema) as file:
        file.write_table(own, max_chunksize=25)


def zipped(own, path):
    pyarrow.csv.write_csv(own, path.with_suffix(""))
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    path.with_suffix("").unlink()


def tabs(own, path):
    pyarrow.csv.write_csv(own, path, pyarrow.csv.WriteOptions(delimiter="\t"))


WRITERS = {
    "a.parquet": lambda own, path: pyarrow.parquet.write_table(own, path, row_group_size=20),
    "a.csv": pyarrow.csv.write_csv,
    "a.csv.gz": zipped,
    "a.tsv": tabs,
    "a.arrow": arrow_file,
    "a.ipc": arrow_stream,
}
ROLES = {"weight": "w", "document": "id", "document_weight": "dw"}


def same(found, expected):
    assert np.asarray(found.features).tobytes() == np.asarray(expected.features).tobytes()
    for name in ARRAYS:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.tolist() == other.tolist(), name
            assert one.dtype.kind == other.dtype.kind
    assert found.feature_names == expected.feature_names
    assert found.categories == expected.categories
    assert found.provenance == expected.provenance


@pytest.mark.parametrize("ids", ["numbers", "texts"])
@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
@pytest.mark.parametrize("name", WRITERS)
def test_chunks_give_what_the_whole_gives(name, scattered, ids, tmp_path):
    WRITERS[name](table(scattered=scattered, ids=ids), tmp_path / name)
    expected = read_table(tmp_path / name, **ROLES)
    calls = []
    progress = lambda done, total: calls.append(done / total)  # noqa: E731
    found = spool_tables([tmp_path / name], tmp_path / "spool", Columns(**ROLES).of_table(), progress)
    same(found, expected)
    assert isinstance(found.features, FeatureRows if scattered else np.ndarray)
    assert len(calls) > 1
    assert calls == sorted(calls)
    assert calls[-1] == 1


def test_parts_of_several_files_are_one_table(tmp_path):
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"part-{number}.parquet")
        pyarrow.parquet.write_table(table(20, scattered=True, seed=number), paths[-1])
    same(spool_tables(paths, tmp_path / "spool", Columns(**ROLES).of_table()), read_table(paths, **ROLES))


@pytest.mark.parametrize(
    "ids", [["7", "7.0", "8"], ["007", "7", "8"], ["7", "a", "8"], [" 7", "7", "8 "], ["-1", "+3", "2"]], ids=str
)
def test_ids_of_csv_are_numbers_if_all_of_them_are(ids, tmp_path):
    lines = ["qid,label,x", *(f"{ids[n % 3]},{n % 2},{n / 8}" for n in range(40))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    same(spool_tables([tmp_path / "a.csv"], tmp_path / "s", Columns().of_table()), read_table(tmp_path / "a.csv"))


def test_a_column_of_texts_may_begin_with_missing_ones(tmp_path):
    kinds = pyarrow.array([None] * 60 + ["red", "blue"] * 20, pyarrow.string())
    own = pyarrow.table(
        {"qid": np.arange(100) // 4, "label": np.arange(100) % 2, "x": np.arange(100) / 8, "kind": kinds}
    )
    pyarrow.parquet.write_table(own, tmp_path / "a.parquet")
    found = spool_tables([tmp_path / "a.parquet"], tmp_path / "spool", Columns().of_table())
    assert found.categories == {1: ("red", "blue")}
    same(found, read_table(tmp_path / "a.parquet"))


def test_parts_may_be_of_several_formats(tmp_path):
    own = pyarrow.table({"qid": np.arange(20) // 4, "label": np.arange(20) % 2, "x": np.arange(20) / 8})
    paths = [tmp_path / "part-0.parquet", tmp_path / "part-1.csv"]
    pyarrow.parquet.write_table(own.slice(0, 10), paths[0])  # the query in the middle is cut
    pyarrow.csv.write_csv(own.slice(10), paths[1])
    for order in (paths, paths[::-1]):
        same(spool_tables(order, tmp_path / order[0].stem, Columns().of_table()), read_table(order))
    paths[1].write_text("qid,label,x\nred,1,0\n5,0,1\n")
    with pytest.raises(ValueError, match="'qid' is text in one table"):
        spool_tables(paths, tmp_path / "mixed", Columns().of_table())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("5,1,nine", "row 41, column 'x' is 'nine'"),
        ("5,1,inf", "row 41, column 'x' is .*infinite"),
        ("5,-1,3", "row 41, column 'label' is -1"),
        (",1,3", "row 41, column 'qid' is missing"),
        ("5,1", "Expected 3 columns"),
    ],
)
def test_errors_name_the_row_of_the_file(row, message, tmp_path):
    lines = ["qid,label,x", *(f"{n // 4},{n % 2},{n / 8}" for n in range(40)), row, "9,1,2"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        spool_tables([tmp_path / "a.csv"], tmp_path / "spool", Columns().of_table())


def test_clamped_values_are_counted_over_chunks(tmp_path):
    values = np.arange(60.0)
    values[[33, 50]] = 1e300
    own = pyarrow.table({"qid": np.arange(60) // 4, "label": np.ones(60), "x": values})
    pyarrow.parquet.write_table(own, tmp_path / "a.parquet")
    found = spool_tables([tmp_path / "a.parquet"], tmp_path / "spool", Columns(features=("x",)).of_table())
    assert found.provenance["clamped"] == 2
    assert found.provenance["first_clamped"].endswith("row 34, column 'x'")


def test_what_does_not_go_together_is_refused(tmp_path):
    for name, own in (("a", table(9)), ("b", table(9).append_column("more", [range(9)])), ("c", table(9, ids="texts"))):
        pyarrow.parquet.write_table(own, tmp_path / f"{name}.parquet")
    a, b, c = (tmp_path / f"{name}.parquet" for name in "abc")
    options = Columns(ignore=("id",)).of_table()
    with pytest.raises(ValueError, match=r"b\.parquet has a column 'more'"):
        spool_tables([a, b], tmp_path / "1", options)
    with pytest.raises(ValueError, match="'qid' is text in one table"):
        spool_tables([a, c], tmp_path / "2", options)
    pyarrow.parquet.write_table(table(9).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty\.parquet has no rows"):
        spool_tables([tmp_path / "empty.parquet"], tmp_path / "3", options)
    (tmp_path / "cut.parquet").write_bytes(a.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut\.parquet.*undamaged"):
        spool_tables([tmp_path / "cut.parquet"], tmp_path / "4", options)
    weights = table(40).set_column(5, "w", [np.arange(40.0)])
    pyarrow.parquet.write_table(weights, tmp_path / "w.parquet")
    with pytest.raises(ValueError, match="'w' differs within query"):
        spool_tables([tmp_path / "w.parquet"], tmp_path / "5", {**options, "weight": "w"})


@pytest.mark.parametrize("features", [None, 9])
@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
def test_text_in_a_file_is_text_in_memory(features, scattered, tmp_path, monkeypatch):
    monkeypatch.setattr("rankgrad.data.svmlight.text.BLOCK", 300)
    rng = np.random.default_rng(0)
    query = rng.integers(0, 9, 80) if scattered else np.arange(80) // 9
    widths = [3 if n < 40 else 5 if n < 60 else 9 for n in range(80)]  # wider on the way
    lines = [
        f"{n % 3} qid:{q} " + " ".join(f"{i}:{rng.normal():.4g}" for i in range(1, w + 1) if rng.random() < 0.8)
        for n, (q, w) in enumerate(zip(query, widths))
    ]
    (tmp_path / "a.txt").write_text("".join(f"{line} #docid = d{n}\n" for n, line in enumerate(lines)))
    expected = read_svmlight(tmp_path / "a.txt", features=features, missing=np.nan)
    found = read_svmlight(tmp_path / "a.txt", features=features, missing=np.nan, spool=tmp_path / "spool")
    same(found, expected)
    assert found.features.shape[1] == 9
    saved = dataclasses.replace(found).save(tmp_path / "saved")
    (tmp_path / "spool").unlink()
    assert (saved / "features.npy").stat().st_size > 80 * 9 * 4


def test_a_growing_file_gets_wider_and_narrower(tmp_path):
    file = GrowingFile(tmp_path / "file", missing=-1)
    for width in (2, 2, 9, 3):
        file.append_rows(np.full((2, width), width, np.float32))
    expected = [[2, 2] + [-1] * 7] * 4 + [[9] * 9] * 2 + [[3] * 3 + [-1] * 6] * 2
    assert file.finish(9).tolist() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_tables_of_a_folder(tmp_path):
    def names(*files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("")
        return {
            split: [str(path.relative_to(folder)) for path in paths] for split, paths in table_files(folder).items()
        }

    assert names("test.csv", "train.parquet", "notes.csv") == {"train": ["train.parquet"], "test": ["test.csv"]}
    assert names("train-1.csv", "train-0.csv", "valid_0.csv") == {
        "train": ["train-0.csv", "train-1.csv"],
        "vali": ["valid_0.csv"],
    }
    spark = names("train.parquet/part-0.parquet", "train.parquet/_SUCCESS", "train.parquet/part-1.parquet", "test/b.pq")
    assert spark == {"train": ["train.parquet/part-0.parquet", "train.parquet/part-1.parquet"], "test": ["test/b.pq"]}
    assert names("part-00001.parquet", "part-00000.parquet") == {"train": ["part-00000.parquet", "part-00001.parquet"]}
    assert names("day_2.csv", "day_1.csv", "_SUCCESS", ".crc") == {"train": ["day_1.csv", "day_2.csv"]}
    assert names("train.txt", "stats_1.csv", "stats_2.csv") == {}
    assert names("0.parquet", "10.parquet") == {"train": ["0.parquet", "10.parquet"]}
    assert names("day_2.csv", "day_1.csv", "other.csv") == names("day_1.csv") == names("a.csv", "b.csv") == {}
    assert names("part-0.csv", "other.csv") == {"train": ["part-0.csv"]}
    assert names("other.csv") == {}
    for two in (("vali.csv", "valid.csv"), ("train.csv", "train-0.csv"), ("train.csv", "train/a.csv")):
        with pytest.raises(ValueError, match="both tables of"):
            names(*two)
