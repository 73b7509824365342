"""Runs on tables with categories: every door gives the same scores, whatever the order of levels; trees take them too."""

import numpy as np
import pandas as pd
import pytest

import rankgrad
from rankgrad import NeuralRanker
from rankgrad.cli.rank import rank
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.runs.ensemble import Ensemble, open_run
from rankgrad.runs.run import Run, train_run
from rankgrad.runs.trees import grow_run
from rankgrad.training.config import Config, Data, Loss, Members, Model, Train

NAMES = ["price", "brand", "fresh", "shop"]
TRAIN = Train(epochs=3, batch_size=4, device="cpu", threads=1, seed=3)
CONFIG = Config(
    data=Data(categorical=("shop",)), model=Model(kind="mlp", hidden=(8,)), loss=Loss("softmax"), train=TRAIN
)


def frame(queries, seed):
    rng = np.random.default_rng(seed)
    rows = 6 * queries
    brands = np.array(["acme", "Ünal & Co", "third", "late"], object)[rng.integers(0, 3 + (seed == 3), rows)]
    return pd.DataFrame(
        {
            "qid": np.repeat(np.arange(queries) + 100 * seed, 6),
            "label": np.where(brands == "third", 2, 0) + (rng.random(rows) < 0.2),
            "price": np.where(rng.random(rows) < 0.2, np.nan, rng.standard_normal(rows)).astype(np.float32),
            "brand": np.where(rng.random(rows) < 0.1, None, brands),
            "fresh": rng.random(rows) < 0.5,
            "shop": rng.integers(10, 14, rows),
        }
    )


SPLITS = {"train": (16, 1), "vali": (4, 2), "test": (5, 3)}


def as_parquet(data, path):
    levels = sorted(data["brand"].dropna().unique(), reverse=True)
    data.assign(brand=pd.Categorical(data["brand"], levels)).to_parquet(path)


WRITERS = {"parquet": as_parquet, "csv": lambda data, path: data.to_csv(path, index=False)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("categories")
    for ending, write in WRITERS.items():
        (place / ending).mkdir()
        for split, of in SPLITS.items():
            write(frame(*of), place / ending / f"{split}.{ending}")
        data = Data(str(place / ending), categorical=("shop",))
        config = Config(data, CONFIG.model, CONFIG.loss, CONFIG.optimiser, CONFIG.members, CONFIG.train)
        list(train_run(place / f"run-{ending}", config))
    return place


def test_every_door_gives_the_same_scores(place, tmp_path):
    train, vali, test = (frame(*of) for of in SPLITS.values())
    ranker = NeuralRanker(
        recipe="paper", model="mlp", hidden=(8,), loss="softmax", categorical=["shop"], epochs=3, batch_size=4, random_state=3,
        device="cpu",
    )  # fmt: skip
    ranker.fit(train[NAMES], train["label"], qid=train["qid"], eval_set=(vali[NAMES], vali["label"], vali["qid"]))
    expected = ranker.predict(test[NAMES], qid=test["qid"])
    assert len(np.unique(expected)) > 20
    for ending in WRITERS:
        run = Run.open(place / f"run-{ending}", "cpu")
        assert {run.names[column]: levels for column, levels in run.categories.items()} == {
            "brand": ("acme", "third", "Ünal & Co"), "fresh": ("false", "true"), "shop": ("10", "11", "12", "13"),
        }  # fmt: skip
        assert run.ranker.scaling.indicators.tolist() == [0]
        for other in WRITERS:
            np.testing.assert_allclose(run.score(run.read(str(place / other))), expected, atol=1e-6)
            np.testing.assert_allclose(run.score(run.read(str(place / other / f"test.{other}"))), expected, atol=1e-6)
        loaded = rankgrad.load(place / f"run-{ending}", "cpu")
        np.testing.assert_allclose(loaded.score(test, sizes=[6] * 5), expected, atol=1e-6)  # columns by name
        rank([place / f"run-{ending}"], str(place / ending), str(tmp_path / f"{ending}.txt"))
        np.testing.assert_allclose(np.loadtxt(tmp_path / f"{ending}.txt"), expected, atol=1e-5)
        saved = run.read(str(place / ending))
        saved.save(tmp_path / ending)
        np.testing.assert_allclose(run.score(RankingDataset.open(tmp_path / ending)), expected, atol=1e-6)


def test_runs_with_levels_of_their_own_rank_together(place):
    together = Ensemble.open([place / "run-parquet", place / "run-csv"])
    lists = together.read(str(place / "csv"))
    alone = open_run(place / "run-csv").score(lists).reshape(5, 6)
    standard = (alone - alone.mean(1, keepdims=True)) / alone.std(1, keepdims=True)
    np.testing.assert_allclose(together.score(lists).reshape(5, 6), standard, atol=1e-5)  # both runs are one


def test_other_splits_hold_categories_where_the_train_split_does(tmp_path):
    (tmp_path / "train.csv").write_text("qid,label,a,brand\n1,1,0,x\n1,0,1,y\n")
    (tmp_path / "vali.csv").write_text("qid,label,a,brand\n2,1,0,\n2,0,1,\n")  # of which no type can be told
    (tmp_path / "test.csv").write_text("qid,label,a,brand\n3,1,0,7\n3,0,1,x\n")
    splits = read_splits(str(tmp_path))
    assert {name: split.categories for name, split in splits.items()} == {
        "train": {1: ("x", "y")}, "vali": {1: ()}, "test": {1: ("7", "x")},
    }  # fmt: skip
    (tmp_path / "test.csv").write_text("qid,label,a,brand\n3,1,word,7\n3,0,1,x\n")
    with pytest.raises(ValueError, match="column 'a' is 'word'"):
        read_splits(str(tmp_path))


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize("bag", [1, 2])
def test_trees_take_categories_and_missing_values(library, bag, place, tmp_path):
    pytest.importorskip(library, reason=f"{library} is not installed")
    config = Config(
        data=Data(str(place / "parquet"), categorical=("shop",)),
        model=Model(kind=library),
        loss=Loss("native"),
        members=Members(bag=bag, keep=1),
        train=Train(epochs=20, threads=1, seed=1),
    )
    *_, last = grow_run(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    assert set(run.categories[1]) == {"third", "acme", "Ünal & Co"}
    lists = run.read(str(place / "csv"))  # of another order of levels
    scores = run.score(lists)
    np.testing.assert_allclose(scores, run.score(run.read(str(place / "parquet"))), rtol=1e-6)
    assert np.isnan(lists.features[:, 0]).any()
    kept = last.report["metrics"]["test"]["ndcg@10"]["empty=1"]
    assert kept > 0.8  # which price, freshness and shop do not tell
    filled = RankingDataset(
        np.nan_to_num(lists.features),
        lists.labels,
        lists.offsets,
        lists.query_ids,
        lists.feature_names,
        categories=lists.categories,
    )
    assert not np.array_equal(run.score(filled), scores)  # a missing value is not 0
    plain = RankingDataset(lists.features, lists.labels, lists.offsets, lists.query_ids, lists.feature_names)
    with pytest.raises(ValueError, match="hold categories"):
        run.score(plain)
