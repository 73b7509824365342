"""From what a person names as data to lists."""

import gzip
import warnings

import numpy as np
import pytest

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import Columns, check_source, read_lists, read_splits
from rankgrad.data.prepare import prepare
from rankgrad.data.synthetic import synthetic

TEXT = "2 qid:{q} 1:0.5 3:{x}\n0 qid:{q} 2:4\n1 qid:{r} 1:3\n"
TABLE = "qid,label,bm25,clicks\n{q},2,0.5,{x}\n{q},0,4,0\n{r},1,3,1\n"


def write(folder, names, pattern=TEXT):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).write_text(pattern.format(q=2 * number, r=2 * number + 1, x=number))
    return str(folder)


def ids(splits):
    return {split: data.query_ids.tolist() for split, data in splits.items()}


def test_synthetic_needs_no_file():
    splits = read_splits("synthetic:tiny")
    assert list(splits) == ["train", "vali", "test"]
    assert np.array_equal(splits["vali"].features, synthetic("tiny", "vali").features)
    assert np.array_equal(read_lists("synthetic:tiny").labels, synthetic("tiny", "test").labels)
    check_source("synthetic")
    for call in (read_splits, read_lists, check_source):
        with pytest.raises(ValueError, match="size 'huge'.* tiny, small"):
            call("synthetic:huge")


def test_a_file_is_the_train_split_and_all_there_is_to_rank(tmp_path):
    write(tmp_path, ["mine.txt"])
    write(tmp_path, ["mine.csv"], TABLE)
    for name in ("mine.txt", "mine.csv"):
        source = str(tmp_path / name)
        check_source(source)
        assert ids(read_splits(source)) == {"train": [0, 1]}
        assert read_lists(source).query_ids.tolist() == [0, 1]


def test_folders_of_texts_of_tables_and_of_saved_data(tmp_path):
    texts = write(tmp_path / "texts", ["train.txt", "vali.txt", "test.txt"])
    tables = write(tmp_path / "tables", ["train.csv", "valid.csv", "test.csv"], TABLE)
    saved = tmp_path / "saved"
    for split, data in read_splits(texts).items():
        data.save(saved / split)
    for source in (texts, tables, str(saved)):
        check_source(source)
        assert ids(read_splits(source)) == {"train": [0, 1], "vali": [2, 3], "test": [4, 5]}
        assert read_lists(source, split="vali").query_ids.tolist() == [2, 3]
    assert read_lists(str(saved / "test")).query_ids.tolist() == [4, 5]
    assert ids(read_splits(str(saved / "test"))) == {"train": [4, 5]}


def test_a_prepared_folder_without_its_summary_is_incomplete(tmp_path):
    texts = write(tmp_path / "texts", ["train.txt", "vali.txt", "test.txt"])
    folder = prepare(texts).folder
    assert list(read_splits(str(folder))) == ["train", "vali", "test"]
    part = RankingDataset.open(folder / "train").select([0])
    part.save(tmp_path / "mine" / "train")  # made from prepared data, but a person's own
    assert list(read_splits(str(tmp_path / "mine"))) == ["train"]
    (folder / "summary.txt").unlink()
    for call in (read_splits, read_lists, check_source):
        with pytest.raises(ValueError, match=r"summary\.txt .* prepare .*again"):
            call(str(folder))


def test_tables_of_splits_are_taken_by_the_names_of_trains_columns(tmp_path):
    write(tmp_path, ["train.csv"], TABLE)
    (tmp_path / "vali.csv").write_text("clicks,label,new,bm25,qid\n7,2,1,0.5,9\n8,0,1,4,9\n")
    splits = read_splits(str(tmp_path))
    assert splits["vali"].feature_names == splits["train"].feature_names == ("bm25", "clicks")
    assert splits["vali"].features.tolist() == [[0.5, 7], [4, 8]]
    (tmp_path / "vali.csv").write_text("label,bm25,qid\n2,0.5,9\n0,4,9\n")
    with pytest.raises(ValueError, match=r"vali\.csv has no column 'clicks'"):
        read_splits(str(tmp_path))


def test_text_and_a_table_of_train_are_not_prepared(tmp_path):
    """Because training on the folder takes the tables."""
    write(tmp_path, ["train.txt", "test.txt"])
    write(tmp_path, ["notes.csv", "test-scores.csv"], TABLE)
    assert prepare(tmp_path, out=tmp_path / "out").splits["train"].queries == 1  # another was set aside
    write(tmp_path, ["train.csv"], TABLE)
    with pytest.raises(ValueError, match=r"train\.txt and train\.csv are both of train; .* move one away"):
        prepare(tmp_path, out=tmp_path / "other")
    assert prepare(tmp_path / "train.csv", out=tmp_path / "other").splits["train"].queries == 1


def test_endings_may_be_in_capitals(tmp_path):
    write(tmp_path, ["train.CSV", "test.Csv"], TABLE)
    assert ids(read_splits(str(tmp_path))) == {"train": [0, 1], "test": [2, 3]}
    assert read_lists(str(tmp_path / "test.Csv")).feature_names == ("bm25", "clicks")


def test_splits_that_somebody_saved_need_no_summary(tmp_path):
    for split in ("train", "test"):
        synthetic("tiny", split).save(tmp_path / split)
    assert [len(data) for data in read_splits(str(tmp_path)).values()] == [30, 10]


def test_only_the_split_that_is_asked_for_is_read(tmp_path):
    texts = write(tmp_path / "texts", ["train.txt", "vali.txt", "test.txt"])
    tables = write(tmp_path / "tables", ["train.csv", "test.csv"], TABLE)
    (tmp_path / "texts" / "vali.txt").write_text("this is no data")
    (tmp_path / "tables" / "train.csv").write_text("nor is this")
    assert read_lists(texts, features=3).query_ids.tolist() == [4, 5]
    assert read_lists(tables).query_ids.tolist() == [2, 3]


def test_what_is_missing_is_named(tmp_path):
    for call in (read_splits, read_lists, check_source):
        with pytest.raises(ValueError, match=r"nowhere .*path"):
            call(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    for call in (read_splits, check_source):
        with pytest.raises(ValueError, match=r"empty .*train\.txt"):
            call(str(tmp_path / "empty"))
    tables = write(tmp_path / "tables", ["vali.csv", "test.csv"], TABLE)
    with pytest.raises(ValueError, match="no train split.* vali, test"):
        read_splits(tables)
    with pytest.raises(ValueError, match="no split 'dev'.* vali, test"):
        read_lists(tables, split="dev")
    write(tmp_path / "tables", ["valid.csv"], TABLE)
    with pytest.raises(ValueError, match=r"vali\.csv and valid\.csv"):
        read_splits(tables)


def test_text_is_widened_to_the_model_and_never_cut(tmp_path):
    source = write(tmp_path / "texts", ["train.txt", "test.txt"])
    assert read_lists(source, features=5).features.shape == (3, 5)
    assert read_lists(f"{source}/test.txt", features=5).features.shape == (3, 5)
    with pytest.raises(ValueError, match=r"test.txt:1"):
        read_lists(source, features=2)
    with pytest.raises(ValueError, match="136 features.* 5"):
        read_lists("synthetic:tiny", features=5)


def test_columns_of_a_table_are_taken_by_name(tmp_path):
    other = "clicks,note,qid,bm25,label\n7,1,0,0.5,2\n8,1,0,4,0\n"
    write(tmp_path, ["a.csv"], other)
    data = read_lists(str(tmp_path / "a.csv"), features=2, names=("bm25", "clicks"))
    assert data.features.tolist() == [[0.5, 7], [4, 8]]
    with pytest.raises(ValueError, match="title"):
        read_lists(str(tmp_path / "a.csv"), features=2, names=("bm25", "title"))
    data.save(tmp_path / "saved")
    assert read_lists(str(tmp_path / "saved"), names=("bm25", "clicks")).features.tolist() == [[0.5, 7], [4, 8]]
    with pytest.raises(ValueError, match="columns of .*saved .*clicks, bm25"):
        read_lists(str(tmp_path / "saved"), names=("clicks", "bm25"))


def test_splits_with_different_columns_are_refused(tmp_path):
    """Of saved data; tables are taken by name."""
    RankingDataset([[1.0]], [1], [0, 1], [1]).save(tmp_path / "saved" / "train")
    RankingDataset([[1.0, 2.0]], [1], [0, 1], [1]).save(tmp_path / "saved" / "vali")
    with pytest.raises(ValueError, match="train and vali of .*saved"):
        read_splits(str(tmp_path / "saved"))


def test_what_is_missing_is_as_the_configuration_says(tmp_path):
    nan = np.nan
    table = write(tmp_path / "tables", ["train.csv"], "qid,label,a,b\n0,1,2,\n0,0,,3\n")
    text = write(tmp_path / "text", ["train.txt"], "1 qid:0 1:2\n0 qid:0 2:3\n")
    write(tmp_path / "text", ["test.txt"], "1 qid:0 1:2\n")
    rows = {"zero": [[2, 0], [0, 3]], "nan": [[2, nan], [nan, 3]], "all_zero": [[2, 0], [0, 3]]}
    for missing, expected in rows.items():
        columns = Columns(missing=missing)
        splits = read_splits(text, columns=columns)
        np.testing.assert_array_equal(splits["train"].features, expected)
        np.testing.assert_array_equal(splits["test"].features, expected[:1])  # narrower: padded
        for data in (
            read_lists(f"{text}/train.txt", columns=columns),
            read_lists(text, split="train", columns=columns),
        ):
            np.testing.assert_array_equal(data.features, expected)
        np.testing.assert_array_equal(read_lists(text, features=2, columns=columns).features, expected[:1])
        expected = rows["zero" if missing == "all_zero" else "nan"]
        np.testing.assert_array_equal(read_splits(table, columns=columns)["train"].features, expected)
        np.testing.assert_array_equal(read_lists(f"{table}/train.csv", columns=columns).features, expected)
    write(tmp_path / "from0", ["train.txt"], "1 qid:0 0:2\n0 qid:0 1:3\n")
    for read in (read_splits, lambda *a, **b: {"train": read_lists(*a, split="train", **b)}):
        data = read(str(tmp_path / "from0"), columns=Columns(zero_based=True))["train"]
        assert data.features.tolist() == [[2, 0], [0, 3]]


def test_tables_may_call_their_columns_otherwise(tmp_path):
    other = TABLE.replace("qid,label,bm25", "query,grade,importance").replace(",0.5,", ",2,").replace(",4,", ",2,")
    folder, columns = (
        write(tmp_path / "tables", ["train.csv", "test.csv"], other),
        Columns("grade", "query", "importance"),
    )
    for data in (read_splits(folder, columns=columns)["train"], read_lists(f"{folder}/train.csv", columns=columns)):
        assert (data.query_ids.tolist(), data.labels.tolist()) == ([0, 1], [2, 0, 1])
        assert (data.feature_names, data.weights.tolist()) == (("clicks",), [2, 3])
    assert read_lists(folder, columns=columns).query_ids.tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"no column 'label'.* label= .*--set data\.label="):
        read_splits(folder)


@pytest.mark.parametrize("key", ["weight", "document_weight", "ignore", "categorical"])
def test_columns_of_text_are_refused(key, tmp_path):
    (tmp_path / "lists.txt").write_text("1 qid:1 1:2\n0 qid:1 1:3\n")
    columns = Columns(**{key: "w" if "weight" in key else ("w",)})
    with pytest.raises(ValueError, match=f"data.{key} names columns of tables"):
        read_splits(str(tmp_path / "lists.txt"), columns=columns)
    RankingDataset([[1.0], [2.0]], [0, 1], [0, 2], [7]).save(tmp_path / "saved")
    if key != "ignore":
        assert len(read_splits(str(tmp_path / "saved"), columns=columns)["train"]) == 1  # it has weights or none


def test_categories_of_a_prepared_folder_are_those_it_was_prepared_with(tmp_path):
    saved = RankingDataset([[1.0, 0], [2.0, 0]], [0, 1], [0, 2], [7], ("shop", "brand"), categories={1: ("acme",)})
    saved.save(tmp_path / "saved")
    with pytest.warns(UserWarning, match="'shop' of categories.*rankgrad prepare"):
        read_splits(str(tmp_path / "saved"), columns=Columns(categorical=("shop",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_splits(str(tmp_path / "saved"), columns=Columns(categorical=("bra*",)))


@pytest.mark.parametrize("name", ["lists.txt.gz", "lists.csv.gz"])
def test_an_archive_that_unpacks_to_a_hundred_times_its_size_is_refused(name, tmp_path, monkeypatch):
    rows = b"0 qid:1 1:0.5\n" * 10**5 if "txt" in name else b"label,qid,a\n" + b"0,1,0.5\n" * 10**5
    (tmp_path / name).write_bytes(gzip.compress(rows))
    assert len(read_lists(str(tmp_path / name)).labels) == 10**5  # small ones may
    monkeypatch.setattr("rankgrad.data.memory.UNPACKED", 1 << 16)
    with pytest.raises(ValueError, match=rf"{name} unpacks to more than 100 times its size; .*unpack it yourself"):
        read_lists(str(tmp_path / name))
