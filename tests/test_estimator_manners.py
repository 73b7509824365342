"""What those who come from LightGBM, XGBoost and scikit-learn expect of NeuralRanker beside fit and predict by query ids."""

import dataclasses
import inspect
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.metrics import make_scorer, r2_score
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    RandomizedSearchCV,
    cross_val_score,
    cross_validate,
    validation_curve,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rankgrad.data.grouping import group_arrays
from rankgrad.estimator import NeuralRanker
from rankgrad.metrics import dcg, ndcg, parse_metric
from rankgrad.runs.run import train_run
from rankgrad.training import threads
from rankgrad.training.evaluate import mean, measure
from rankgrad.training.threads import most_threads, threads_of_training, threads_worth, torch_threads
from test_estimator import MEMBERS, SMALL, documents, same_weights

LINEAR = {"model": "linear", "epochs": 2, "device": "cpu", "random_state": 0}


def sizes_of(qid):
    return np.unique(qid, return_counts=True)[1]


def first_grade(y_true, y_pred):
    """The grade of the document on top: a function of one list."""
    return float(y_true[np.argmax(y_pred)])


# --- the table in docs/estimator.md -----------------------------------------------------------------------------------


def surface():
    """Every argument and attribute in the documentation of the two libraries' rankers, by library."""
    import lightgbm
    import xgboost

    def arguments(function):
        return {*inspect.signature(function).parameters} - {"self"}

    def all_of(ranker):
        public = {name for name in dir(ranker) if not name.startswith("_")} - {"fit", "predict"}
        return public | arguments(ranker.fit) | arguments(ranker.predict) | arguments(ranker)

    return {"LightGBM": all_of(lightgbm.LGBMRanker), "XGBoost": all_of(xgboost.XGBRanker)}


def rows_of_table():
    text = (Path(__file__).parents[1] / "docs" / "estimator.md").read_text().partition("## Every argument")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows[2:] if not row[0].startswith("**")]


def named(cell):
    return {name.lstrip("*").partition("(")[0].partition("=")[0] for name in re.findall("`([^`]+)`", cell)}


def test_every_argument_of_the_others_has_a_line():
    rows = rows_of_table()
    for place, (library, names) in enumerate(surface().items()):
        listed = set().union(*(named(row[place]) for row in rows))
        assert names - listed == set(), library
    assert all(re.match("the same|other name|not there|one per query", row[2]) for row in rows)


def test_what_the_table_calls_the_same_is_taken_and_what_is_not_there_is_refused():
    calls = (NeuralRanker.fit, NeuralRanker.predict, NeuralRanker)
    fit, predict, constructor = (inspect.signature(f).parameters for f in calls)
    X, y, qid = documents()
    X = pd.DataFrame(X, columns=list("abcd"))
    ranker = NeuralRanker(**LINEAR).fit(X, y, qid=qid, eval_set=(X, y, qid))
    for theirs, xgboost_s, here in rows_of_table():
        names = named(theirs) | named(xgboost_s)
        if here.startswith(("the same", "one per query")):
            for name in names - {"evals_result", "best_score", "ndcg@5"}:
                assert name in fit or name in predict or hasattr(ranker, name), name
        elif here.startswith("other name"):
            ours = [name for name in named(here) if not name.startswith(("rankgrad", "len"))]
            for name in ours:
                place = name.removeprefix("NeuralRanker.").partition(".")[0].partition("(")[0]
                assert hasattr(ranker, place), name
        else:
            for name in names - {"gamma"}:  # of trees theirs, of the schedule ours, as the line says
                assert name not in fit and name not in predict and name not in constructor, name
                assert not hasattr(ranker, name), name


X_, Y_, Q_ = documents()
G_ = np.unique(Q_, return_counts=True)[1]
CALLS = {  # as their documentation writes them
    "LightGBM, groups": {"group": G_},
    "LightGBM, an evaluation set": {"group": G_, "eval_set": [(X_, Y_)], "eval_group": [G_], "eval_at": [1, 3]},
    "LightGBM, the usual two": {
        "group": G_,
        "eval_set": [(X_, Y_), (X_[:20], Y_[:20])],
        "eval_names": ["train", "valid"],
        "eval_group": [G_, [8, 12]],
        "eval_metric": "ndcg",
        "eval_at": (1, 2, 3, 4, 5),
    },
    "LightGBM, evaluation sets in two parts": {
        "group": G_,
        "eval_X": (X_, X_[:20]),
        "eval_y": (Y_, Y_[:20]),
        "eval_group": [G_, [8, 12]],
    },
    "LightGBM, one in two parts": {"group": G_, "eval_X": X_, "eval_y": Y_, "eval_group": [G_]},
    "LightGBM, weights of rows": {"group": G_, "sample_weight": np.repeat(np.arange(len(G_)) + 1.0, G_)},
    "XGBoost, ids": {"qid": Q_, "eval_set": [(X_, Y_)], "eval_qid": [Q_]},
    "XGBoost, weights of groups": {"qid": Q_, "sample_weight": np.arange(len(G_)) + 1.0},
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_the_others_work_as_they_are(call):
    ranker = NeuralRanker(**LINEAR).fit(X_, Y_, **CALLS[call])
    assert np.isfinite(ranker.predict(X_)).all()
    for metrics in ranker.evals_result_.values():
        assert all(len(values) == 2 for values in metrics.values())


def test_lightgbm_s_own_and_ours_measure_alike():
    """The same metric of the same scores, by its evaluation and by ours, and a function for its `eval_metric` here."""
    import lightgbm

    def own(y_true, y_pred, weight, group):
        ends = np.cumsum(group)
        tops = [y_true[a:b][np.argmax(y_pred[a:b])] for a, b in zip(ends - group, ends)]
        return "top", float(np.mean(tops)), True

    trees = lightgbm.LGBMRanker(n_estimators=3, min_child_samples=2, verbose=-1, n_jobs=1)
    trees.fit(X_, Y_, group=G_, eval_X=X_, eval_y=Y_, eval_group=[G_], eval_metric=own, eval_at=[3])
    seen = trees.evals_result_["training"]
    scores = trees.predict(X_)
    data = group_arrays(X_, Y_, Q_)
    for metric, name in ((own, "top"), ("ndcg@3", "ndcg@3")):
        metric = parse_metric(metric)
        assert mean(measure(scores, data, [metric])[metric.name], metric.empty) == pytest.approx(seen[name][-1])
    ranker = NeuralRanker(**LINEAR).fit(X_, Y_, qid=Q_, eval_set=(X_, Y_, Q_), eval_metric=own)
    assert len(ranker.evals_result_["training"]["own"]) == 2


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, list, pd.Series, pl.Series, np.float64, lambda s: pd.DataFrame({"n": s})])
def test_sizes_of_groups_are_query_ids_in_another_form(kind):
    X, y, qid = documents()
    sizes = sizes_of(qid)
    ids = np.repeat(np.arange(len(sizes)), sizes)
    by_ids = NeuralRanker(**SMALL).fit(X, y, qid=ids, eval_set=(X, y, ids))
    by_sizes = NeuralRanker(**SMALL).fit(X, y, group=kind(sizes), eval_set=[(X, y)], eval_group=[kind(sizes)])
    assert same_weights(by_ids, by_sizes) and by_ids.history_ == by_sizes.history_
    assert np.array_equal(by_sizes.predict(X, group=kind(sizes)), by_ids.predict(X, qid=ids))
    assert by_sizes.score(X, y, group=kind(sizes)) == by_ids.score(X, y, qid=ids)


def test_a_query_without_rows_is_no_query():
    X, y, qid = documents()
    sizes = sizes_of(qid)
    with_nothing = NeuralRanker(**SMALL).fit(X, y, group=np.insert(sizes, 3, 0))
    assert np.isfinite(with_nothing.predict(X, group=[*sizes, 0])).all()


def test_a_frame_may_hold_its_query_ids():
    X, y, qid = documents()
    names = list("abcd")
    plain = NeuralRanker(**SMALL).fit(pd.DataFrame(X, columns=names), y, qid=qid)
    for frame in (
        pd.DataFrame(X, columns=names).assign(qid=qid),
        pl.DataFrame(X, schema=names).with_columns(qid=pl.Series(qid)),
    ):
        ranker = NeuralRanker(**SMALL).fit(frame, y, eval_set=[(frame, y)])
        assert ranker.feature_names_in_.tolist() == names
        assert same_weights(clone(ranker).fit(frame, y), plain)
        scores = ranker.predict(frame)
        assert np.array_equal(ranker.predict(frame, qid=qid), scores)  # an answer to the same question twice
        assert np.array_equal(ranker.predict(frame, group=sizes_of(qid)), scores)
        assert ranker.score(frame, y) == ranker.score(frame, y, qid=qid)
        twice = clone(ranker).fit(frame, y, qid=frame["qid"], eval_set=[(frame, y)], eval_group=[sizes_of(qid)])
        assert same_weights(twice, ranker) and twice.n_features_in_ == 4  # ids are nothing to learn from
        for how in ({"group": sizes_of(qid)}, {"qid": np.unique(qid, return_inverse=True)[1]}):
            assert (
                clone(ranker).fit(frame, y, **how, eval_set=[(frame, y)], eval_group=[sizes_of(qid)]).n_features_in_
                == 4
            )
    feature = pd.DataFrame(X, columns=["qid", *names[1:]])
    ranker = NeuralRanker(**SMALL, warm_start=True).fit(feature, y, qid=qid, eval_set=[(feature, y)], eval_qid=[qid])
    assert ranker.fit(feature, y, qid=qid).predict(feature, qid=qid).shape == (len(X),)
    assert ranker.n_features_in_ == 4


# --- evaluation sets and metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [SMALL, MEMBERS], ids=["one", "members"])
def test_every_metric_of_every_set_is_recorded(parameters):
    X, y, qid = documents()
    one, other = documents(6, seed=1), documents(8, seed=2)
    ranker = NeuralRanker(**parameters).fit(
        X,
        y,
        qid=qid,
        eval_set=[(X, y, qid), one, other],
        eval_names=["mine", "one", "other"],
        eval_metric=["NDCG", "map", first_grade, ndcg],
        eval_at=(3, 5),
    )
    found = ranker.evals_result_
    assert list(found) == ["mine", "one", "other"]
    epochs = len(ranker.history_)
    for metrics in found.values():
        assert set(metrics) == {"ndcg@10", "ndcg@3", "ndcg@5", "map@3", "map@5", "first_grade", "ndcg"}
        assert all(len(values) == epochs and np.isfinite(values).all() for values in metrics.values())
    assert [line["evals"]["one"]["map@3"] for line in ranker.history_] == found["one"]["map@3"]
    assert found["other"]["ndcg@10"] == [line["metric"] for line in ranker.history_]  # the last set chooses
    alone = NeuralRanker(**parameters).fit(X, y, qid=qid, eval_set=other)
    assert alone.evals_result_ == {"valid_0": {"ndcg@10": found["other"]["ndcg@10"]}}
    assert same_weights(alone, ranker)
    assert pickle.loads(pickle.dumps(ranker)).evals_result_ == found


def test_what_is_recorded_is_what_score_says():
    X, y, qid = documents()
    held_out = documents(8, seed=2)
    ranker = NeuralRanker(**SMALL | {"epochs": 1}).fit(
        X, y, qid=qid, eval_set=[(X, y, qid), held_out], eval_metric=["map", first_grade], eval_at=3
    )
    for name, (X_set, y_set, ids) in {"training": (X, y, qid), "valid_1": held_out}.items():
        for metric in ("map@3", first_grade):
            ranker.set_params(metric=metric)
            recorded = ranker.evals_result_[name][metric if isinstance(metric, str) else "first_grade"][-1]
            assert recorded == pytest.approx(ranker.score(X_set, y_set, qid=ids), abs=1e-6)


def test_the_training_set_chooses_nothing_while_there_is_another():
    X, y, qid = documents()
    other = documents(8, seed=2)
    sets = {"eval_set": [other[:2], (X, y)], "eval_qid": [other[2], qid]}
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid, **sets)
    assert list(ranker.evals_result_) == ["valid_0", "training"]
    assert ranker.evals_result_["valid_0"]["ndcg@10"] == [line["metric"] for line in ranker.history_]


def test_eval_at_alone_is_ndcg_and_without_sets_nothing_is_recorded():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_set=(X, y, qid), eval_at=[1, 2])
    assert list(ranker.evals_result_["training"]) == ["ndcg@10", "ndcg@1", "ndcg@2"]
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_metric="map")
    assert ranker.evals_result_ == {}
    assert not hasattr(NeuralRanker(), "evals_result_")


@pytest.mark.parametrize("parameters", [SMALL, MEMBERS, MEMBERS | {"bag": 2}], ids=["one", "members", "bagged"])
def test_a_metric_of_ones_own_chooses_and_stops(parameters, tmp_path):
    X, y, qid = documents()
    held_out = {} if "bag" in parameters else {"eval_set": documents(8, seed=2)}
    ranker = NeuralRanker(**parameters | {"epochs": 8, "lr": 0.1, "metric": first_grade, "patience": 2})
    ranker.fit(X, y, qid=qid, **held_out)
    assert ranker.config_.train.metric == "first_grade"
    values = [line["metric"] for line in ranker.history_]
    assert all(0 <= value <= 4 for value in values)
    if parameters is SMALL:
        assert ranker.best_epoch_ == 1 + int(np.argmax(values)) == len(values) - 2
        assert ranker.best_score_ == max(values)
    tops = [y[qid == q][ranker.predict(X, qid=qid)[qid == q].argmax()] for q in np.unique(qid)]
    assert ranker.score(X, y, qid=qid) == pytest.approx(np.mean(tops))
    assert clone(ranker).get_params() == ranker.get_params()
    ranker.save(tmp_path / "r.safetensors")
    loaded = NeuralRanker.load(tmp_path / "r.safetensors")
    assert np.array_equal(loaded.predict(X, qid=qid), ranker.predict(X, qid=qid))
    with pytest.raises(ValueError, match="'first_grade' is not a metric"):
        loaded.score(X, y, qid=qid)
    assert loaded.set_params(metric=first_grade).score(X, y, qid=qid) == ranker.score(X, y, qid=qid)


def test_a_bag_and_an_eval_set_are_two_ways_to_choose():
    X, y, qid = documents()
    with pytest.raises(ValueError, match="bag .*eval_set.*leave"):
        NeuralRanker(**MEMBERS | {"bag": 2}).fit(X, y, qid=qid, eval_set=documents(8, seed=2))


def test_a_table_of_gains_is_that_of_loss_and_metric():
    X, y, qid = documents()
    gain = np.array([0, 1, 2, 50, 51])
    ranker = NeuralRanker(**SMALL | {"loss": "lambdarank", "label_gain": gain}).fit(X, y, qid=qid)
    assert ranker.config_.data.gain == tuple(gain)
    assert not same_weights(ranker, NeuralRanker(**SMALL | {"loss": "lambdarank"}).fit(X, y, qid=qid))
    scores = ranker.predict(X, qid=qid)
    lists = [
        ndcg(torch.from_numpy(scores[qid == q]).double(), torch.from_numpy(y[qid == q]), k=10, gain=gain).item()
        for q in np.unique(qid)
    ]
    assert ranker.score(X, y, qid=qid) == pytest.approx(np.mean(lists))
    again = clone(ranker).fit(X, y, qid=qid)
    assert same_weights(again, ranker)
    exp2 = NeuralRanker(**SMALL | {"loss": "lambdarank", "label_gain": [2**g - 1 for g in range(5)]}).fit(X, y, qid=qid)
    plain = NeuralRanker(**SMALL | {"loss": "lambdarank"}).fit(X, y, qid=qid)
    assert np.allclose(exp2.predict(X, qid=qid), plain.predict(X, qid=qid), atol=1e-6)
    with pytest.raises(ValueError, match=r"label . of query .* has no gain.*0 to 1"):
        NeuralRanker(**SMALL | {"label_gain": [0, 1]}).fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="label_gain .*'exp2', 'linear'"):
        NeuralRanker(**SMALL | {"label_gain": "exp"}).fit(X, y, qid=qid)


@pytest.mark.parametrize(("loss", "metric"), [("Neural_NDCG@10", "NDCG@10"), ("ListNet", "MAP")])
def test_names_in_any_case(loss, metric):
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"loss": loss, "metric": metric}).fit(X, y, qid=qid)
    assert (ranker.config_.loss.name, ranker.config_.train.metric) == (loss.lower(), metric.lower())
    assert (ranker.loss, ranker.metric) == (loss, metric)  # parameters stay as they were given
    lower = NeuralRanker(**SMALL | {"loss": loss.lower(), "metric": metric.lower()}).fit(X, y, qid=qid)
    assert same_weights(ranker, lower) and ranker.score(X, y, qid=qid) == lower.score(X, y, qid=qid)


def test_no_metric_is_that_of_the_recipe():
    ranker = NeuralRanker(**LINEAR, metric=None).fit(X_, Y_, qid=Q_)
    assert ranker.score(X_, Y_, qid=Q_) == clone(ranker).set_params(metric="ndcg@10").fit(X_, Y_, qid=Q_).score(
        X_, Y_, qid=Q_
    )


def test_the_name_of_a_metric_is_no_loss():
    X, y, qid = documents()
    with pytest.raises(ValueError, match="'ndcg' is not a loss.*did you mean 'neural_ndcg'"):
        NeuralRanker(**SMALL | {"loss": "ndcg"}).fit(X, y, qid=qid)


# --- scoring ----------------------------------------------------------------------------------------------------------


def test_score_weighs_queries():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    queries = np.unique(qid)
    alone = np.array([ranker.score(X[qid == q], y[qid == q], qid=qid[qid == q]) for q in queries])
    weights = np.arange(len(queries)) % 3 + 0.5
    expected = np.average(alone, weights=weights)
    assert ranker.score(X, y, qid=qid, sample_weight=weights) == pytest.approx(expected)
    by_row = weights[np.searchsorted(queries, qid)]
    assert ranker.score(X, y, qid=qid, sample_weight=by_row) == pytest.approx(expected)
    assert ranker.score(X, y, qid=qid, sample_weight=np.ones(len(X))) == pytest.approx(ranker.score(X, y, qid=qid))
    one = ranker.score(X, y, qid=qid, sample_weight=(queries == 102).astype(float))
    assert one == pytest.approx(alone[queries == 102][0])
    with pytest.raises(ValueError, match="sample_weight differs within query"):
        ranker.score(X, y, qid=qid, sample_weight=np.arange(len(X)) + 1.0)


@pytest.mark.parametrize("parameters", [SMALL, MEMBERS, LINEAR], ids=["one", "members", "linear"])
def test_no_candidates_no_scores(parameters):
    X, y, qid = documents()
    frame = pd.DataFrame(X, columns=list("abcd"))
    ranker, plain = (NeuralRanker(**parameters).fit(table, y, qid=qid) for table in (frame, X))
    nothing = [
        (frame[:0], qid[:0]),
        (frame[:0], None),
        (frame[:0].assign(qid=[]), None),
        ([], []),
        (np.empty((0, 0)), []),
        ([], None),
    ]
    for table, ids in nothing:
        scores = ranker.predict(table, qid=ids)
        assert scores.shape == (0,) and scores.dtype == np.float32
    assert ranker.ranker_.score(X[:0]).shape == (0,)
    with pytest.raises(ValueError, match="2 features"):
        plain.predict(np.empty((0, 2)), qid=[])
    with pytest.raises(ValueError, match="[Ff]eature names"):
        ranker.predict(frame[["b", "a", "c", "d"]][:0], qid=[])


BAD_COLUMNS = {
    "dates": (lambda frame: frame.assign(c=pd.date_range("2020", periods=len(frame))), "column 'c'.*datetime64"),
    "spans of time": (lambda frame: frame.assign(c=pd.to_timedelta(range(len(frame)), "s")), "column 'c'.*timedelta64"),
    "lists": (lambda frame: frame.assign(c=[[1, 2]] * len(frame)), "column 'c'.*object"),
    "complex numbers": (lambda frame: frame.assign(c=1j), "column 'c'.*complex"),
    "dates alone": (
        lambda frame: pd.DataFrame({"c": pd.date_range("2020", periods=len(frame))}),
        "column 'c'.*datetime64",
    ),
    "dates with a zone": (
        lambda frame: frame.assign(c=pd.date_range("2020", periods=len(frame), tz="UTC")),
        "column 'c'.*datetime64",
    ),
    "dates of Python": (
        lambda frame: frame.assign(c=pd.date_range("2020", periods=len(frame)).date),
        "column 'c'.*object",
    ),
    "dates of polars": (
        lambda frame: pl.DataFrame(frame.assign(c=pd.date_range("2020", periods=len(frame)))),
        "column 'c'.*Datetime",
    ),
    "dates of pyarrow": (
        lambda frame: pa.Table.from_pandas(frame.assign(c=pd.date_range("2020", periods=len(frame)))),
        "column 'c'.*timestamp",
    ),
    "lists of polars": (lambda frame: pl.DataFrame(frame).with_columns(c=pl.lit([1, 2])), "column 'c'.*List"),
    "an array of objects": (
        lambda frame: np.where([[0, 0, 1, 0]], "x", frame.to_numpy(dtype=object)),
        "column 2.*object",
    ),
}


@pytest.mark.parametrize("what", BAD_COLUMNS)
def test_a_column_that_holds_no_numbers_is_named(what):
    X, y, qid = documents()
    change, words = BAD_COLUMNS[what]
    table = change(pd.DataFrame(X, columns=list("abcd")))
    with pytest.raises(ValueError, match=rf"{words}.*no numbers.*leave it out"):
        NeuralRanker(**LINEAR).fit(table, y, qid=qid)


def test_words_where_numbers_were_learned_from_are_named():
    X, y, qid = documents()
    frame = pd.DataFrame(X, columns=list("abcd"))
    ranker = NeuralRanker(**LINEAR).fit(frame, y, qid=qid)
    with pytest.raises(ValueError, match="column 'b' of X"):
        ranker.predict(frame.assign(b="x"), qid=qid)
    with pytest.raises(ValueError, match="feature names"):
        ranker.predict(frame.rename(columns={"b": "z"}).assign(z="x"), qid=qid)


def test_na_among_objects_is_missing():
    X, y, qid = documents()
    X[::3, 1] = np.nan
    frame = pd.DataFrame(X, columns=list("abcd"))
    ranker = NeuralRanker(**LINEAR).fit(frame, y, qid=qid)
    scores = ranker.predict(frame, qid=qid)
    objects = frame.assign(b=[pd.NA if np.isnan(one) else one for one in X[:, 1]])
    assert objects["b"].dtype == object
    for same in (objects, frame.astype("Float64"), frame.astype("Float64").to_numpy(dtype=object)):
        again = NeuralRanker(**LINEAR).fit(same, y, qid=qid)
        np.testing.assert_array_equal(again.predict(same, qid=qid), scores)
        np.testing.assert_allclose(ranker.ranker_.score(same, np.unique(qid, return_counts=True)[1]), scores, atol=1e-6)
    assert objects["b"].isna().sum() == np.isnan(X[:, 1]).sum()  # it is left as it was
    assert objects["b"].iloc[0] is pd.NA
    none = ranker.predict(frame.assign(b=np.nan), qid=qid)
    np.testing.assert_array_equal(ranker.predict(frame.assign(b=pd.NA), qid=qid), none)


def test_gains_that_are_set_after_a_fit_are_those_of_the_score():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"metric": "dcg@3"}).fit(X, y, qid=qid)
    before, scores = ranker.score(X, y, qid=qid), torch.from_numpy(ranker.predict(X, qid=qid)).double()
    ranker.set_params(label_gain=[0, 5, 6, 7, 8])
    lists = [
        dcg(scores[qid == q], torch.from_numpy(y[qid == q]), k=3, gain=[0, 5, 6, 7, 8]).item() for q in np.unique(qid)
    ]
    assert ranker.score(X, y, qid=qid) == pytest.approx(np.mean(lists)) != before


def test_the_gains_of_a_run_are_those_of_the_next_fit(tmp_path):
    X, y, qid = documents()
    pd.DataFrame(X, columns=list("abcd")).assign(label=y, qid=qid).to_csv(tmp_path / "train.csv", index=False)
    config = NeuralRanker(**LINEAR, label_gain=[0, 1, 2, 50, 51])._config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "train.csv")))
    for _ in train_run(tmp_path / "run", config):
        pass
    assert NeuralRanker.load(tmp_path / "run").label_gain == (0, 1, 2, 50, 51)


def test_a_function_may_choose_and_be_recorded():
    X, y, qid = documents()

    def top(y_true, y_pred):
        return float(y_true[y_pred.argmax()])

    ranker = NeuralRanker(**SMALL | {"metric": top}).fit(
        X, y, qid=qid, eval_set=(X, y, qid), eval_metric=[top, "map", top]
    )
    assert {*ranker.evals_result_["training"]} == {"top", "map"}
    assert len(ranker.evals_result_["training"]["top"]) == len(ranker.history_)


@pytest.mark.parametrize("parameters", [SMALL, LINEAR, MEMBERS], ids=["lists", "linear", "members"])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
def test_a_fit_learns_wherever_it_is_called(parameters, inside):
    X, y, qid = documents()
    expected = NeuralRanker(**parameters).fit(X, y, qid=qid)
    with inside():
        ranker = NeuralRanker(**parameters).fit(X, y, qid=qid)
        assert torch.is_grad_enabled() is False
    assert same_weights(ranker, expected)


def test_evaluation_sets_may_come_as_lists_of_rows():
    X, y, qid = documents()
    one = NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_X=[X], eval_y=[y], eval_qid=[qid])
    assert one.evals_result_ == NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_X=X, eval_y=y, eval_qid=qid).evals_result_


# --- warm start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [SMALL, LINEAR, MEMBERS | {"keep": 2}], ids=["one", "linear", "members"])
def test_a_warm_start_goes_on(parameters):
    X, y, qid = documents(30)
    judge = documents(20, seed=1)
    ranker = NeuralRanker(**parameters | {"epochs": 1, "lr": 0.01}, warm_start=True)
    values = [ranker.fit(X, y, qid=qid, eval_set=judge).best_score_ for _ in range(8)]
    cold = clone(ranker).fit(X, y, qid=qid, eval_set=judge)
    assert values[0] == cold.best_score_  # the first is as any other
    assert values[-1] > values[0]
    assert np.allclose(ranker.scaling_.apply(X), cold.scaling_.apply(X))
    shifted = ranker.fit(X + 100.0, y, qid=qid)  # scaled as it was, whatever is learned from now
    assert np.allclose(shifted.scaling_.apply(X), cold.scaling_.apply(X))


def test_a_warm_start_needs_the_same_model():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL, warm_start=True).fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="warm_start .*sizes.*warm_start=False"):
        ranker.set_params(width=12).fit(X, y, qid=qid)
    members = NeuralRanker(**MEMBERS, warm_start=True).fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="warm_start .*number of members"):
        members.set_params(members=6).fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="expecting 4 features"):
        NeuralRanker(**SMALL, warm_start=True).fit(X, y, qid=qid).fit(X[:, :2], y, qid=qid)


# --- among scikit-learn's tools ---------------------------------------------------------------------------------------


SEARCHES = {
    "grid": lambda ranker, cv, X, y, q: GridSearchCV(ranker, {"lr": [0.1, 0.2]}, cv=cv).fit(X, y, qid=q, groups=q),
    "random": lambda ranker, cv, X, y, q: RandomizedSearchCV(ranker, {"lr": [0.1, 0.2]}, n_iter=2, cv=cv).fit(
        X, y, qid=q, groups=q
    ),
    "score": lambda ranker, cv, X, y, q: cross_val_score(ranker, X, y, params={"qid": q}, groups=q, cv=cv),
    "no ids": lambda ranker, cv, X, y, q: cross_val_score(ranker, X, y, groups=q, cv=cv),
    "in parallel": lambda ranker, cv, X, y, q: cross_val_score(
        ranker, X, y, params={"qid": q}, groups=q, cv=cv, n_jobs=2
    ),
    "sizes": lambda ranker, cv, X, y, q: cross_val_score(
        ranker, X, y, params={"group": np.unique(q, return_counts=True)[1]}, cv=cv, groups=q
    ),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_without_routing_a_search_fails_at_once_and_says_the_line(search, monkeypatch):
    trained = []
    monkeypatch.setattr("rankgrad.estimator.train", lambda *a, **k: trained.append(1))
    with pytest.raises(ValueError, match=r"sklearn\.set_config\(enable_metadata_routing=True\)"):
        SEARCHES[search](NeuralRanker(**LINEAR), GroupKFold(2), *documents())
    assert not trained


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("scoring", ["r2", make_scorer(r2_score), {"a": "r2", "b": "neg_mean_squared_error"}])
def test_a_scoring_that_predicts_without_query_ids_is_for_models_that_need_none(routed, scoring, monkeypatch):
    X, y, qid = documents()
    with sklearn.config_context(enable_metadata_routing=routed):
        found = cross_validate(
            NeuralRanker(**LINEAR), X, y, params={"qid": qid, "groups": qid} if routed else {"qid": qid}, cv=GroupKFold(2),
            scoring=scoring, **({} if routed else {"groups": qid}),
        )  # fmt: skip
        assert all(np.isfinite(found[name]).all() for name in found)
        trained = []
        monkeypatch.setattr("rankgrad.estimator.train", lambda *a, **k: trained.append(1))
        search = GridSearchCV(NeuralRanker(**SMALL), {"lr": [0.1, 0.2]}, cv=GroupKFold(2), scoring=scoring, refit=False)
        with pytest.raises(ValueError, match=r"predict\(X\) without qid.*leave scoring out"):
            search.fit(X, y, qid=qid, groups=qid)
        assert not trained


def test_a_curve_that_swallows_errors_is_told_in_a_warning():
    X, y, qid = documents()
    over = {"param_name": "lr", "param_range": [0.1], "params": {"qid": qid}}
    with pytest.warns(UserWarning, match=r"sklearn\.set_config\(enable_metadata_routing=True\)"):
        validation_curve(NeuralRanker(**LINEAR), X, y, cv=GroupKFold(2), groups=qid, **over)


def test_without_routing_a_scorer_of_ones_own_may_know_the_queries():
    X, y, qid = documents()
    frame = pd.DataFrame(X, columns=list("abcd"))

    def scorer(ranker, part, grades):
        return ranker.score(part, grades, qid=qid[part.index])

    values = cross_val_score(
        NeuralRanker(**LINEAR), frame, y, params={"qid": qid}, groups=qid, cv=GroupKFold(2), scoring=scorer
    )
    assert np.isfinite(values).all()


def test_with_the_query_ids_in_the_frame_nothing_has_to_be_routed():
    X, y, qid = documents()
    frame = pd.DataFrame(X, columns=list("abcd")).assign(qid=qid)
    search = GridSearchCV(NeuralRanker(**SMALL | {"epochs": 1}), {"lr": [0.01, 0.1]}, cv=GroupKFold(2))
    search.fit(frame, y, groups=qid)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict(frame).shape == (len(X),)
    assert search.score(frame, y) == search.best_estimator_.score(frame, y)


def test_pipelines_and_what_a_search_cannot_hand_on():
    X, y, qid = documents()
    with sklearn.config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(StandardScaler(), NeuralRanker(**SMALL)).fit(X, y, qid=qid)
        scores = pipeline.predict(X, qid=qid)
        assert pipeline.score(X, y, qid=qid) == pipeline[-1].score(pipeline[0].transform(X), y, qid=qid)
        search = GridSearchCV(pipeline, {"neuralranker__lr": [0.01]}, cv=GroupKFold(2)).fit(X, y, qid=qid, groups=qid)
        assert search.best_estimator_.predict(X, qid=qid).shape == scores.shape
        with pytest.raises(ValueError, match=r"predict needs qid.*search\.best_estimator_\.predict"):
            search.predict(X)
        weighted = NeuralRanker(**LINEAR).set_score_request(sample_weight=True).set_fit_request(sample_weight=True)
        params = {"qid": qid, "groups": qid, "sample_weight": np.ones(len(X))}
        assert np.isfinite(cross_val_score(weighted, X, y, params=params, cv=GroupKFold(2))).all()
    by_name = make_pipeline(StandardScaler(), NeuralRanker(**SMALL)).fit(X, y, neuralranker__qid=qid)
    assert np.array_equal(by_name[-1].predict(by_name[0].transform(X), qid=qid), scores)
    with pytest.raises(ValueError, match="enable_metadata_routing=True"):
        by_name.score(X, y)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_small_work_is_worth_one_thread_and_large_work_more(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [threads_worth(work) for work in (0, 1e6, 4e8, 1.1e9, 1e12)] == [1, 1, 1, 2, 8]
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    assert ranker.config_.train.threads == 1
    monkeypatch.setattr(threads, "WORTH_IN_TRAINING", 1)
    config, data, cpu = NeuralRanker(**SMALL)._config(), type("D", (), {"lengths": np.full(10, 9)}), torch.device("cpu")
    data.__len__ = lambda self: 10
    assert threads_of_training(config, ranker.model_, data(), cpu) == 8
    asked = NeuralRanker(**SMALL, n_jobs=3)._config()
    assert threads_of_training(asked, ranker.model_, data(), cpu) == 3


@pytest.mark.parametrize(
    ("n_jobs", "expected"), [(None, 1), (1, 1), (3, 3), (-1, len(os.sched_getaffinity(0))), (-99, 1)]
)
def test_n_jobs_are_the_threads_of_a_fit(n_jobs, expected, monkeypatch):
    X, y, qid = documents()
    seen = []
    measure = threads_of_training
    monkeypatch.setattr(
        "rankgrad.estimator.set_threads", lambda number: (seen.append(number), threads.set_threads(number))
    )
    before = torch.get_num_threads()
    ranker = NeuralRanker(**SMALL, n_jobs=n_jobs).fit(X, y, qid=qid)
    assert seen == [expected] and ranker.config_.train.threads == expected
    assert torch.get_num_threads() == before and measure is threads_of_training
    ranker.predict(X, qid=qid)
    assert torch.get_num_threads() == before
    for bad in (0, 2.5, "all"):
        with pytest.raises(ValueError, match="n_jobs"):
            NeuralRanker(**SMALL, n_jobs=bad).fit(X, y, qid=qid)


def test_threads_are_given_back_to_every_thread_of_the_caller():
    before = torch.get_num_threads()
    inside, leave, found = threading.Event(), threading.Event(), []

    def borrow():
        with torch_threads(before + 3):
            inside.set()
            leave.wait(10)
        found.append(torch.get_num_threads())

    def newcomer():  # torch would tell it what the other has borrowed
        with torch_threads(1):
            assert torch.get_num_threads() == 1
        found.append(torch.get_num_threads())

    first = threading.Thread(target=borrow)
    first.start()
    inside.wait(10)
    second = threading.Thread(target=newcomer)
    second.start()
    second.join()
    leave.set()
    first.join()
    assert found == [before, before] and torch.get_num_threads() == before
    third = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    third.start()
    third.join()
    assert found[-1] == before
    with torch_threads(2), torch_threads(1):
        assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), torch_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


FORKED = """
import os, sys, time
import numpy as np, torch
torch.set_num_threads(2)
from rankgrad.estimator import NeuralRanker
from rankgrad.training import threads
from rankgrad.training.evaluate import mean, measure
threads.WORTH_A_THREAD = threads.WORTH_IN_TRAINING = 1.0           # all work is worth all threads
draw = np.random.default_rng(0)
X, y, qid = draw.normal(size=(2400, 20)), draw.integers(0, 3, 2400), np.arange(2400) // 240
kinds = {"transformer": dict(model="transformer", width=64, layers=1, batch_size=20), "members": dict(members=4)}
ranker = NeuralRanker(epochs=1, device="cpu", random_state=0, verbose=0, **kinds[sys.argv[1]]).fit(X, y, qid=qid)
assert ranker.config_.train.threads == 0                           # two were tried: they are there, and a fork leaves them behind
torch.ones(2**20).add(1)
expected = ranker.predict(X, qid=qid)
child = os.fork()
if child == 0:
    assert np.allclose(ranker.predict(X, qid=qid), expected, atol=1e-5)
    assert 0 < ranker.score(X, y, qid=qid) < 1
    ranker.set_params(n_jobs=2).fit(X, y, qid=qid)
    torch.ones(2**20).add(1)                                       # code of the caller's own
    os._exit(0)
for _ in range(400):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        sys.exit(status)
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the forked process hangs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", "members"])
def test_a_fork_after_fit_does_not_hang(kind, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # it would hang all the same, and spins less
    done = subprocess.run(
        [sys.executable, "-c", FORKED, kind], env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_workers_of_joblib_fit_and_predict():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(NeuralRanker(**LINEAR), {"lr": [0.1, 0.2]}, cv=GroupKFold(2), n_jobs=2)
        search.fit(X, y, qid=qid, groups=qid)
    scores = joblib.Parallel(n_jobs=2)(joblib.delayed(ranker.predict)(X, qid) for _ in range(2))
    assert all(np.array_equal(one, ranker.predict(X, qid=qid)) for one in scores)


def test_a_forked_process_takes_one_thread(monkeypatch):
    assert most_threads() == torch.get_num_threads()
    monkeypatch.setattr(threads, "_home", os.getpid() + 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert most_threads() == threads_worth(1e15) == 1


def test_importing_the_library_changes_no_environment():
    code = (
        "import os; before = dict(os.environ); import rankgrad; rankgrad.NeuralRanker; rankgrad.neural_ndcg; import rankgrad.cli; "
        "assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_fit_of_more_than_a_few_seconds_shows_a_bar_in_a_terminal(monkeypatch):
    X, y, qid = documents()
    monkeypatch.setenv("TERM", "xterm-256color")

    def shown(verbose, seconds):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr("rankgrad.estimator.A_FEW_SECONDS", seconds)
        NeuralRanker(**SMALL, verbose=verbose).fit(X, y, qid=qid)
        return terminal.text

    assert shown(None, 60.0) == ""
    assert "epoch" in shown(None, 1e-9)
    assert shown(0, 1e-9) == ""
    assert "epoch 3/3" in shown(1, 60.0)


def test_a_notebook_gets_one_line_and_a_pipe_nothing(monkeypatch, capsys):
    X, y, qid = documents()
    monkeypatch.setattr("rankgrad.estimator.A_FEW_SECONDS", 1e-9)
    NeuralRanker(**SMALL).fit(X, y, qid=qid)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("rankgrad.training.progress._is_notebook", lambda: True)
    NeuralRanker(**SMALL).fit(X, y, qid=qid)
    out, text = capsys.readouterr()
    assert out == "" and "\x1b" not in text and text.endswith("\n") and text.count("\n") == 1
    assert text.rpartition("\r")[2].startswith("epoch 3/3  loss ")
    NeuralRanker(**SMALL, verbose=0).fit(X, y, qid=qid)
    assert capsys.readouterr() == ("", "")


def test_a_worker_among_others_shows_nothing_by_itself(monkeypatch):
    monkeypatch.setattr("rankgrad.training.progress._is_terminal", lambda: True)
    assert not NeuralRanker(**SMALL)._shown()["quiet"]
    (there,) = joblib.Parallel(n_jobs=2, backend="threading")([joblib.delayed(NeuralRanker(**SMALL)._shown)()])
    assert there["quiet"]
    monkeypatch.setattr(multiprocessing.current_process(), "name", "LokyProcess-1")
    assert NeuralRanker(**SMALL)._shown()["quiet"]
