"""Trees of other libraries on our lists, measured by our metrics, in folders like those of runs."""

import importlib.util
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankgrad.data.load import read_splits
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.ensemble import open_run
from rankgrad.runs.folder import read_per_query, read_report
from rankgrad.runs.run import Run, train_run
from rankgrad.runs.trees import fit_trees_run
from rankgrad.training.config import Config, Data, Model, Train
from rankgrad.training.evaluate import mean, measure
from rankgrad.trees import fit as trees
from rankgrad.trees.settings import EXTRAS, MODEL_FILES, ROUNDS, TreeConfig, grid

TREES = TreeConfig(
    "lightgbm", "synthetic:tiny", 1, seed=3, threads=1, large=False, tuned=True, metrics=("ndcg@10", "map")
)


@pytest.fixture(scope="module")
def splits():
    return read_splits("synthetic:tiny")


def lightgbm_scores(file, data):
    return pytest.importorskip("lightgbm").Booster(model_file=file).predict(data.features)


def xgboost_scores(file, data):
    xgboost = pytest.importorskip("xgboost")
    return xgboost.Booster(model_file=file).predict(xgboost.DMatrix(data.features))


@pytest.fixture(scope="module", params=["lightgbm", "xgboost"])
def fitted(request, splits, tmp_path_factory):
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    fit_trees_run(folder, replace(TREES, library=request.param), splits)
    return request.param, folder


def test_the_report_is_that_of_the_model_file_by_our_metrics(fitted, splits):
    library, folder = fitted
    file = folder / MODEL_FILES[library]
    scores = {"lightgbm": lightgbm_scores, "xgboost": xgboost_scores}[library](file, splits["test"])
    values = measure(scores, splits["test"], ["ndcg@10"])["ndcg@10"]
    np.testing.assert_allclose(read_per_query(folder).metrics["ndcg@10"], values)
    report = read_report(folder)
    assert report["metrics"]["test"]["ndcg@10"]["empty=0"] == pytest.approx(mean(values, 0.0))
    assert report["loss"] == {"lightgbm": "lightgbm lambdarank", "xgboost": "xgboost rank:pairwise"}[library]
    assert report["seed"] == 3 and "2^y - 1" in report["convention"]


def test_the_best_of_the_grid_is_chosen_by_validation(fitted, splits):
    library, folder = fitted
    facts = json.loads((folder / "trees.json").read_text())
    settings = grid(replace(TREES, library=library))
    assert len(settings) == 4
    assert [{key: entry[key] for key in settings[0]} for entry in facts["tried"]] == settings
    assert facts["chosen"] == max(facts["tried"], key=lambda entry: entry["validation"])
    report = read_report(folder)
    assert report["metrics"]["vali"]["ndcg@10"]["empty=1"] == pytest.approx(facts["chosen"]["validation"])
    assert report["best_epoch"] == facts["chosen"]["rounds"] <= report["epochs"]
    assert facts["version"][0].isdigit()


def test_trees_are_compared_with_runs_and_score_like_one(fitted, splits, tmp_path):
    _, folder = fitted
    config = Config(
        data=Data("synthetic:tiny"), model=Model(kind="linear"), train=Train(epochs=1, device="cpu", threads=1)
    )
    list(train_run(tmp_path / "run", config))
    assert compare_runs(folder, tmp_path / "run", "ndcg@10")["queries"] == 9
    opened = open_run(folder)
    np.testing.assert_allclose(opened.evaluate(splits["test"])["map"], read_per_query(folder).metrics["map"])
    assert (opened.config.data.path, opened.config.train.metrics) == ("synthetic:tiny", ("ndcg@10", "map"))
    with pytest.raises(ValueError, match="trees of another library.*rankgrad evaluate.*open_run"):
        Run.open(folder)


def test_trees_of_an_earlier_commit_open(fitted, splits):
    _, folder = fitted
    before = open_run(folder).score(splits["test"])
    newer = {"trees.json": {"models", "features", "feature_names"}, "report.json": set()}
    kept = {name: (folder / name).read_text() for name in newer}
    try:
        for name, text in kept.items():
            facts = json.loads(text)
            older = {key: facts[key] for key in facts.keys() - newer[name] - {"identity", "checksum"}}
            (folder / name).write_text(json.dumps(older))
        opened = open_run(folder)
        assert opened.features == splits["test"].features.shape[1] and opened.names is None
        np.testing.assert_array_equal(opened.score(splits["test"]), before)
    finally:
        for name, text in kept.items():
            (folder / name).write_text(text)


def test_untuned_trees_take_the_first_settings_and_never_ask_validation(splits, tmp_path, monkeypatch):
    seen = []
    whole = trees.LIBRARIES["lightgbm"]
    monkeypatch.setitem(
        trees.LIBRARIES,
        "lightgbm",
        lambda t, settings, train, vali: (seen.append((settings, vali)), whole(t, settings, train, vali))[1],
    )
    monkeypatch.setitem(ROUNDS, False, 20)
    pytest.importorskip("lightgbm")
    fit_trees_run(tmp_path / "t", replace(TREES, tuned=False), splits)
    assert seen == [(grid(TREES)[0], None)]
    report = read_report(tmp_path / "t")
    assert (report["best_epoch"], report["epochs"]) == (20, 20) and "fixed settings" in report["convention"]


def test_the_same_seed_grows_the_same_trees(splits, tmp_path, monkeypatch):
    pytest.importorskip("lightgbm")
    monkeypatch.setitem(ROUNDS, False, 20)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        fit_trees_run(tmp_path / name, replace(TREES, seed=seed, tuned=False), splits)
    values = {name: read_per_query(tmp_path / name).metrics["ndcg@10"] for name in "abc"}
    np.testing.assert_array_equal(values["a"], values["b"])
    assert not np.array_equal(values["a"], values["c"], equal_nan=True)


# --- what is not installed --------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in EXTRAS else found(name, *rest))
    assert "pip install 'rankgrad[gbdt]'" in trees.missing("xgboost")
    assert "pip install 'rankgrad[catboost]'" in trees.missing("catboost")
    monkeypatch.undo()
    assert trees.missing("numpy") is None


class StandInForCatBoost:
    """As much of CatBoost's interface as is used: scores are the first feature times a number the fit has seen."""

    class Pool:
        def __init__(self, features, labels, cat_features, group_id):
            assert not cat_features
            assert len(features) == len(labels) == len(group_id) and (np.diff(group_id) >= 0).all()
            self.features = features

    class CatBoost:
        def __init__(self, parameters):
            self.parameters = parameters
            assert parameters["loss_function"] == "YetiRank" and parameters["random_seed"] == 3

        def fit(self, pool, eval_set, early_stopping_rounds):
            assert (eval_set is None) == (early_stopping_rounds is None)
            self.tree_count_ = 10 * self.parameters["depth"]

        def get_evals_result(self):
            return {"learn": {}, "validation": {"NDCG": [0.0] * (self.tree_count_ + 7)}}

        def predict(self, pool):
            return pool.features[:, self.parameters["depth"]].astype(np.float64)

        def save_model(self, path):
            Path(path).write_text("trees")


def test_catboost_is_asked_for_yetirank(splits, tmp_path, monkeypatch):
    if importlib.util.find_spec("catboost") is None:
        stand_in = types.ModuleType("catboost")
        stand_in.Pool, stand_in.CatBoost = StandInForCatBoost.Pool, StandInForCatBoost.CatBoost
        monkeypatch.setitem(sys.modules, "catboost", stand_in)
    fit_trees_run(tmp_path / "t", replace(TREES, library="catboost"), splits)
    facts = json.loads((tmp_path / "t" / "trees.json").read_text())
    assert len(facts["tried"]) == 4 and (tmp_path / "t" / "model.cbm").exists()
    report = read_report(tmp_path / "t")
    assert report["loss"] == "catboost YetiRank" and report["best_epoch"] < report["epochs"]
