"""Trees of other libraries on our lists, judged by our metrics, in folders like those of runs."""

import importlib.util
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankgrad.data.load import read_splits
from rankgrad.reproduce.table2 import make_table
from rankgrad.reproduce.tables import as_text
from rankgrad.reproduce.trials import Order
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.folder import kept
from rankgrad.runs.run import Run, advance, begin
from rankgrad.training.config import Config, Data, Model, Train
from rankgrad.training.evaluate import judge, mean
from rankgrad.trees import fit as trees
from rankgrad.trees.fit import Trees, grid, grow

TREES = Trees("lightgbm", "synthetic:tiny", 1, seed=3, threads=1, large=False, tuned=True, metrics=("ndcg@10", "map"))


@pytest.fixture(scope="module")
def splits():
    return read_splits("synthetic:tiny")


def lightgbm_scores(file, data):
    return pytest.importorskip("lightgbm").Booster(model_file=file).predict(data.features)


def xgboost_scores(file, data):
    xgboost = pytest.importorskip("xgboost")
    return xgboost.Booster(model_file=file).predict(xgboost.DMatrix(data.features))


@pytest.fixture(scope="module", params=["lightgbm", "xgboost"])
def grown(request, splits, tmp_path_factory):
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    grow(replace(TREES, library=request.param), splits, folder)
    return request.param, folder


def test_the_report_is_that_of_the_model_file_by_our_metrics(grown, splits):
    library, folder = grown
    file = folder / trees.MODEL_FILES[library]
    scores = {"lightgbm": lightgbm_scores, "xgboost": xgboost_scores}[library](file, splits["test"])
    values = judge(scores, splits["test"], ["ndcg@10"])["ndcg@10"]
    np.testing.assert_allclose(kept(folder).metrics["ndcg@10"], values)
    report = json.loads((folder / "report.json").read_text())
    assert report["metrics"]["test"]["ndcg@10"]["empty=0"] == pytest.approx(mean(values, 0.0))
    assert report["loss"] == {"lightgbm": "lightgbm lambdarank", "xgboost": "xgboost rank:pairwise"}[library]
    assert report["seed"] == 3 and "2^y - 1" in report["convention"]


def test_the_best_of_the_grid_is_chosen_by_validation(grown, splits):
    library, folder = grown
    facts = json.loads((folder / "trees.json").read_text())
    settings = grid(replace(TREES, library=library))
    assert len(settings) == 4
    assert [{key: entry[key] for key in settings[0]} for entry in facts["tried"]] == settings
    assert facts["chosen"] == max(facts["tried"], key=lambda entry: entry["validation"])
    report = json.loads((folder / "report.json").read_text())
    assert report["metrics"]["vali"]["ndcg@10"]["empty=1"] == pytest.approx(facts["chosen"]["validation"])
    assert report["best_epoch"] == facts["chosen"]["rounds"] <= report["epochs"]
    assert facts["version"][0].isdigit()


def test_trees_are_compared_with_runs_and_do_not_pretend_to_be_one(grown, tmp_path):
    _, folder = grown
    config = Config(
        data=Data("synthetic:tiny"), model=Model(kind="linear"), train=Train(epochs=1, device="cpu", threads=1)
    )
    begin(config, tmp_path / "run")
    list(advance(tmp_path / "run"))
    assert compare_runs(folder, tmp_path / "run", "ndcg@10")["queries"] == 9
    with pytest.raises(ValueError, match="holds trees of another library"):
        Run.open(folder)


def test_untuned_trees_take_the_first_settings_and_never_ask_validation(splits, tmp_path, monkeypatch):
    seen = []
    whole = trees.LIBRARIES["lightgbm"]
    monkeypatch.setitem(
        trees.LIBRARIES,
        "lightgbm",
        lambda t, settings, train, vali: (seen.append((settings, vali)), whole(t, settings, train, vali))[1],
    )
    monkeypatch.setattr(trees, "_rounds", lambda _: 20)
    pytest.importorskip("lightgbm")
    grow(replace(TREES, tuned=False), splits, tmp_path / "t")
    assert seen == [(grid(TREES)[0], None)]
    report = json.loads((tmp_path / "t" / "report.json").read_text())
    assert (report["best_epoch"], report["epochs"]) == (20, 20) and "fixed settings" in report["convention"]


def test_the_same_seed_grows_the_same_trees(splits, tmp_path, monkeypatch):
    pytest.importorskip("lightgbm")
    monkeypatch.setattr(trees, "_rounds", lambda _: 20)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        grow(replace(TREES, seed=seed, tuned=False), splits, tmp_path / name)
    values = {name: kept(tmp_path / name).metrics["ndcg@10"] for name in "abc"}
    np.testing.assert_array_equal(values["a"], values["b"])
    assert not np.array_equal(values["a"], values["c"], equal_nan=True)


# --- what is not installed --------------------------------------------------------------------------------------------


@pytest.fixture
def without_trees(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in trees.EXTRAS else found(name, *rest)
    )


def test_what_is_missing_is_said_with_the_line_that_installs_it(without_trees):
    assert trees.missing("xgboost").endswith("install it with: pip install 'rankgrad[gbdt]'")
    assert trees.missing("catboost").endswith("install it with: pip install 'rankgrad[catboost]'")


def test_rows_of_missing_libraries_are_left_out_with_the_reason(without_trees, tmp_path, monkeypatch):
    from rankgrad.reproduce import table2

    monkeypatch.setattr(table2, "report_on", lambda *_: "none: not drawn")
    monkeypatch.setattr(table2, "chosen", lambda rows: ["listnet", "xgboost", "lightgbm", "catboost"])
    order = Order("synthetic:tiny", out=tmp_path / "t", seeds=1, recipe="small", epochs=1, device="cpu")
    result = make_table(order, quiet=True)
    assert set(result["rows"]) == {"listnet"} and set(result["skipped"]) == {"xgboost", "lightgbm", "catboost"}
    assert "skipped: CatBoost (YetiRank): catboost is not installed" in as_text(result)


def test_a_missing_library_that_was_asked_for_by_name_is_an_error_before_anything_is_trained(without_trees, tmp_path):
    with pytest.raises(ValueError, match=r"the row xgboost cannot be trained: .* pip install 'rankgrad\[gbdt\]'"):
        make_table(Order("synthetic:tiny", out=tmp_path / "t", rows="listnet,xgboost"), quiet=True)
    assert not (tmp_path / "t").exists()


class StandInForCatBoost:
    """As much of CatBoost's interface as is used: scores are the first feature times a number the fit has seen."""

    class Pool:
        def __init__(self, features, labels, group_id):
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
    grow(replace(TREES, library="catboost"), splits, tmp_path / "t")
    facts = json.loads((tmp_path / "t" / "trees.json").read_text())
    assert len(facts["tried"]) == 4 and (tmp_path / "t" / "model.cbm").exists()
    report = json.loads((tmp_path / "t" / "report.json").read_text())
    assert report["loss"] == "catboost YetiRank" and report["best_epoch"] < report["epochs"]
