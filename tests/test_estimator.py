"""NeuralRanker: scikit-learn's battery, parity with a run, forms of input, saving, refusals."""

import copy
import dataclasses
import io
import json
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import _num_samples

from rankgrad.core.lists import prepare, reduce
from rankgrad.data.load import read_splits
from rankgrad.data.scaling import Scaling
from rankgrad.data.synthetic import synthetic
from rankgrad.estimator import NeuralRanker
from rankgrad.files import save_tensors
from rankgrad.losses import LOSSES, LossSpec
from rankgrad.losses.informative import has_document, has_pair
from rankgrad.metrics import ndcg
from rankgrad.runs.run import Run, train_run
from rankgrad.training import config as settings
from rankgrad.training.build import validate
from rankgrad.training.config import Config

SMALL = {"width": 8, "layers": 1, "feedforward": 16, "hidden": (8,), "epochs": 3, "device": "cpu", "random_state": 0}


def documents(queries=12, features=4, *, seed=0):
    """X, y, qid of unequal lists, rows of a query together; one query is empty."""
    draw = np.random.default_rng(seed)
    qid = np.repeat(np.arange(queries) + 100, draw.integers(2, 9, queries))
    X = draw.normal(size=(len(qid), features)).astype(np.float32)
    y = np.clip(np.rint(X[:, 0] + 0.3 * draw.normal(size=len(qid)) + 0.7), 0, 4).astype(int)
    y[qid == 103] = 0
    return X, y, qid


def weights_of(ranker):
    return {name: tensor.numpy() for name, tensor in ranker.model_.state_dict().items()}


def same_weights(one, other):
    return all(np.array_equal(a, weights_of(other)[name]) for name, a in weights_of(one).items())


# --- scikit-learn's battery -------------------------------------------------------------------------------------------


class Lists(NeuralRanker):
    """A ranker that supplies the query ids the battery knows nothing of: lists of five rows, and every row judged alone,
    because the battery expects a row's prediction not to depend on its neighbours."""

    def fit(self, X, y, *, sample_weight=None):
        return super().fit(X, y, qid=np.arange(_num_samples(X)) // 5, sample_weight=sample_weight)

    def predict(self, X):
        return super().predict(X, qid=np.arange(_num_samples(X)))

    def score(self, X, y):
        return super().score(X, y, qid=np.arange(_num_samples(X)) // 5)


class Rows(Lists):
    """A ranker with a pointwise loss whose lists are single rows, so that a weight per row is a weight per query."""

    def fit(self, X, y, *, sample_weight=None):
        return NeuralRanker.fit(self, X, y, qid=np.arange(_num_samples(X)), sample_weight=sample_weight)


EXCLUDED = {
    Lists: {
        "check_sample_weights_not_overwritten": "gives every row its own weight; a list has one (Rows passes)",
        "check_sample_weight_equivalence_on_dense_data": "repeats single rows; only whole lists can be (Rows passes)",
        "check_sample_weight_equivalence_on_sparse_data": "repeats single rows; only whole lists can be (Rows passes)",
    },
    Rows: {},
}


@parametrize_with_checks(
    [
        Lists(**SMALL),
        Lists(**SMALL | {"model": "mlp", "loss": "lambdarank@10"}),
        Lists(members=2, hidden=(4,), epochs=2, device="cpu", random_state=0),
        Rows(**SMALL | {"model": "linear", "loss": "rmse", "batch_size": 1000, "scaling": "none"}),
    ],
    expected_failed_checks=lambda estimator: EXCLUDED[type(estimator)],
)
@pytest.mark.filterwarnings("ignore:.* can learn from no query")  # some of its lists have one grade
@pytest.mark.filterwarnings("ignore:.* queries are too few")  # and some of its data few lists
def test_the_battery_of_scikit_learn(estimator, check):
    check(estimator)


def test_tags_say_what_is_taken():
    tags = NeuralRanker().__sklearn_tags__()
    assert tags.input_tags.allow_nan and tags.input_tags.sparse
    assert tags.target_tags.required and tags.target_tags.positive_only


# --- the same as a run ------------------------------------------------------------------------------------------------


def config_of_a_run(path, **train):
    return Config(
        data=settings.Data(path=path, validation=0.3),
        model=settings.Model(width=8, layers=1, feedforward=16, hidden=(8,)),
        loss=settings.Loss("neural_ndcg@10", {"tau": 0.5}),
        optimiser=settings.Optimiser(lr=0.01, schedule="cosine"),
        train=settings.Train(epochs=4, batch_size=8, seed=3, device="cpu", **train),
    )


def ranker_of_that_run(**parameters):
    return NeuralRanker(
        **SMALL
        | {"loss": "neural_ndcg@10", "loss_options": {"tau": 0.5}, "lr": 0.01, "schedule": "cosine", "epochs": 4}
        | {"batch_size": 8, "random_state": 3, "validation_fraction": 0.3}
        | parameters
    )


def rows_of(data):
    return data.features, data.labels, np.repeat(data.query_ids, data.lengths)


def test_scores_are_those_of_a_run_with_a_validation_split(tmp_path):
    list(train_run(tmp_path / "run", config_of_a_run("synthetic:tiny")))
    splits = read_splits("synthetic:tiny")
    X, y, qid = rows_of(splits["train"])
    ranker = ranker_of_that_run().fit(X, y, qid=qid, eval_set=rows_of(splits["vali"]))
    X, y, qid = rows_of(splits["test"])
    theirs = Run.open(tmp_path / "run", device="cpu")
    assert np.array_equal(ranker.predict(X, qid=qid), theirs.score(splits["test"]))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert ranker.best_epoch_ == report["best_epoch"]
    assert ranker.score(X, y, qid=qid) == pytest.approx(report["metrics"]["test"]["ndcg@10"]["empty=1"], abs=1e-12)
    assert dataclasses.replace(ranker.config_, data=theirs.config.data) == theirs.config


def test_scores_are_those_of_a_run_that_holds_queries_out(tmp_path):
    data = read_splits("synthetic:tiny")["train"]
    data.save(tmp_path / "data")
    list(train_run(tmp_path / "run", config_of_a_run(str(tmp_path / "data"), patience=2)))
    X, y, qid = rows_of(data)
    ranker = ranker_of_that_run(patience=2).fit(X, y, qid=qid)
    assert np.array_equal(ranker.predict(X, qid=qid), Run.open(tmp_path / "run", device="cpu").score(data))


@pytest.mark.parametrize("recipe", [None, *settings.RECIPES])
def test_defaults_are_those_of_the_recipe(recipe):
    ours = NeuralRanker(recipe=recipe, random_state=0)._config()
    expected = validate(settings.RECIPES[recipe or "strong"]())
    assert dataclasses.replace(ours, data=dataclasses.replace(ours.data, path="synthetic")) == expected


@pytest.mark.parametrize("given", [{"model": "mlp"}, {"width": 8}, {"layers": 1}, {"heads": 2}, {"feedforward": 9}])
def test_a_model_or_its_sizes_mean_one_network_by_the_paper(given):
    config = NeuralRanker(**given, random_state=0)._config()
    assert config.members.count == 1
    assert config.loss.name == "neural_ndcg"


def test_every_parameter_reaches_the_configuration():
    changed = {
        "recipe": "paper", "members": 5, "keep": 3, "bag": 2, "share": False, "inputs": "list",
        "loss": "listnet", "loss_options": {}, "model": "mlp", "width": 12, "layers": 3, "heads": 4, "feedforward": 7,
        "hidden": (5,), "dropout": 0.2, "input_noise": 0.3, "tanh": True, "scaling": "symlog", "list_size": 20, "epochs": 7,
        "batch_size": 5, "optimiser": "adamw", "lr": 0.5, "weight_decay": 0.1, "clip": 2.0, "schedule": "plateau",
        "milestones": (4,), "gamma": 0.3, "plateau": 3, "warmup": 9, "nonfinite": "skip", "metric": "map",
        "patience": 6, "validation_fraction": 0.4, "device": "cpu", "random_state": 11, "verbose": 0,
        "label_gain": (0.0, 1.0, 2.0), "n_jobs": 2, "warm_start": True, "categorical": ("a",),
    }  # fmt: skip
    assert set(changed) == set(NeuralRanker().get_params())
    said = {}
    for section in dataclasses.asdict(NeuralRanker(**changed)._config()).values():
        said |= section
    renamed = {"model": "kind", "random_state": "seed", "validation_fraction": "validation", "loss_options": "options"}
    renamed |= {"members": "count", "label_gain": "gain", "n_jobs": "threads"}
    for name, value in changed.items():
        if name not in ("recipe", "loss", "optimiser", "verbose", "warm_start"):
            assert said[renamed.get(name, name)] == value, name
    config = NeuralRanker(**changed)._config()
    assert (config.loss.name, config.optimiser.name) == ("listnet", "adamw")


# --- members ----------------------------------------------------------------------------------------------------------


MEMBERS = {"members": 4, "hidden": (4,), "epochs": 2, "batch_size": 8, "device": "cpu", "random_state": 0}


def test_without_an_eval_set_members_are_bagged_and_every_query_is_learned_from():
    X, y, qid = documents()
    ranker = NeuralRanker(**MEMBERS).fit(X, y, qid=qid)
    assert (ranker.config_.members.count, ranker.config_.members.bag) == (4, 4)  # a fold for each
    assert ranker.config_.model.inputs == "pieces"
    assert [member["loss"] for member in ranker.members_] == list(settings.strong().loss.names)
    assert ranker.best_score_ > 0.5
    ranker.fit(X, y, qid=qid, eval_set=documents(seed=1))
    assert ranker.config_.members.bag == 1
    ranker = NeuralRanker(**MEMBERS | {"members": 8, "bag": 2, "keep": 4}).fit(X, y, qid=qid)
    assert {member["fold"] for member in ranker.members_} == {0, 1}
    assert sum(member["kept"] for member in ranker.members_) == 4


def test_under_ten_queries_nothing_is_chosen_and_fit_says_so():
    X, y, qid = documents(9)
    with pytest.warns(UserWarning, match="9 queries are too few.*eval_set"):
        ranker = NeuralRanker(**MEMBERS).fit(X, y, qid=qid)
    assert all(member["kept"] and member["best_epoch"] == 2 for member in ranker.members_)


def test_members_survive_pickle_clone_and_file_to_the_bit(tmp_path):
    X, y, qid = documents()
    ranker = NeuralRanker(**MEMBERS).fit(X, y, qid=qid)
    scores = ranker.predict(X, qid=qid)
    assert np.array_equal(pickle.loads(pickle.dumps(ranker)).predict(X, qid=qid), scores)
    assert np.array_equal(clone(ranker).fit(X, y, qid=qid).predict(X, qid=qid), scores)
    ranker.save(tmp_path / "ranker")
    again = NeuralRanker.load(tmp_path / "ranker")
    assert np.array_equal(again.predict(X, qid=qid), scores)
    assert again.get_params() == ranker.get_params()
    assert again.members_ == ranker.members_
    assert again.best_score_ == ranker.best_score_


def test_rates_given_to_members_are_those_of_all():
    X, y, qid = documents()
    ranker = NeuralRanker(**MEMBERS, lr=0.01, dropout=0.25, weight_decay=0.5).fit(X, y, qid=qid)
    for member in ranker.members_:
        assert (member["lr"], member["dropout"], member["weight_decay"]) == pytest.approx((0.01, 0.25, 0.5))


def test_members_are_standardised_within_the_list_and_need_qid():
    X, y, qid = documents()
    ranker = NeuralRanker(**MEMBERS, inputs="features").fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="predict needs qid"):
        ranker.predict(X)
    assert np.isclose(ranker.predict(X[:4], qid=[1, 1, 1, 1]).mean(), 0, atol=1e-6)


def test_a_query_of_weight_zero_is_in_no_fold():
    X, y, qid = documents(20)
    weights = (np.arange(20) % 3 > 0).astype(float)
    seen = np.repeat(weights > 0, np.unique(qid, return_counts=True)[1])
    parameters = MEMBERS | {"members": 8, "bag": 2, "scaling": "none"}
    with_zeros = NeuralRanker(**parameters).fit(X, y, qid=qid, sample_weight=weights)
    without = NeuralRanker(**parameters).fit(X[seen], y[seen], qid=qid[seen])
    assert with_zeros.members_ == without.members_
    assert same_weights(with_zeros, without)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_it_learns_to_rank_and_score_is_the_mean_ndcg():
    X, y, qid = documents(40)
    ranker = NeuralRanker(**SMALL | {"epochs": 40, "lr": 0.01}).fit(X, y, qid=qid)
    X, y, qid = documents(30, seed=1)
    scores = ranker.predict(X, qid=qid)
    assert scores.dtype == np.float32 and scores.shape == (len(X),)
    lists = [
        ndcg(torch.from_numpy(scores[qid == q].astype(float)), torch.from_numpy(y[qid == q]), k=10).item()
        for q in np.unique(qid)
    ]
    assert ranker.score(X, y, qid=qid) == pytest.approx(np.mean(lists), abs=1e-12)
    assert np.mean(lists) > 0.93
    ranker.set_params(metric="mrr@10")
    assert ranker.score(X, y, qid=qid) != pytest.approx(np.mean(lists))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_fitted_and_pickled(loss):
    X, y, qid = documents(6)
    ranker = NeuralRanker(**SMALL | {"epochs": 1, "loss": loss}).fit(X, y, qid=qid)
    assert ranker.model_.output.out_features == (y.max() if loss == "ordinal" else 1)
    again = pickle.loads(pickle.dumps(ranker))
    assert np.array_equal(again.predict(X, qid=qid), ranker.predict(X, qid=qid))


@pytest.mark.parametrize("model", ["transformer", "mlp", "linear"])
def test_an_integer_seed_gives_the_same_model_and_none_another(model):
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"model": model})
    first = ranker.fit(X, y, qid=qid).predict(X, qid=qid)
    assert np.array_equal(clone(ranker).fit(X, y, qid=qid).predict(X, qid=qid), first)
    other = clone(ranker).set_params(random_state=None).fit(X, y, qid=qid)
    assert not np.array_equal(other.predict(X, qid=qid), first)
    assert other.config_.train.seed != clone(other).fit(X, y, qid=qid).config_.train.seed
    again = clone(other).set_params(random_state=other.config_.train.seed).fit(X, y, qid=qid)
    assert np.array_equal(again.predict(X, qid=qid), other.predict(X, qid=qid))
    for source in (np.random.RandomState, np.random.default_rng):
        drawn = [clone(ranker).set_params(random_state=source(5)).fit(X, y, qid=qid) for _ in range(2)]
        assert same_weights(*drawn)


def test_nothing_global_is_changed():
    X, y, qid = documents()

    def world():
        draws = torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False)["state"])  # noqa: NPY002 (the global one is meant)
        return *draws, torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    torch.rand(3)
    before, kept = world(), (X.copy(), y.copy(), qid.copy())
    ranker = NeuralRanker(**SMALL | {"random_state": None, "loss": "xe_ndcg"}).fit(X, y, qid=qid)
    ranker.predict(X, qid=qid)
    ranker.score(X, y, qid=qid)
    pickle.loads(pickle.dumps(ranker))
    assert world() == before
    assert all(np.array_equal(a, b) for a, b in zip(kept, (X, y, qid)))


# --- a loss of one's own ----------------------------------------------------------------------------------------------


def hinge(scores, labels, mask=None, *, margin=1.0, reduction="mean", check=None):
    lists = prepare(scores, labels, mask, check)
    higher = lists.labels[..., :, None] > lists.labels[..., None, :]
    pairs = higher & lists.mask[..., :, None] & lists.mask[..., None, :]
    gaps = lists.scores[..., :, None] - lists.scores[..., None, :]
    values = torch.where(pairs, (margin - gaps).relu(), 0.0).sum((-2, -1))
    return reduce(values, has_pair(lists.labels, lists.mask), lists, reduction)


OWN = {"function": hinge, "spec": LossSpec(hinge, counts=has_pair)}


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
def test_a_loss_of_ones_own_is_fitted_cloned_and_kept(loss, tmp_path):
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"loss": loss, "loss_options": {"margin": 0.5}}).fit(X, y, qid=qid)
    assert ranker.config_.loss == settings.Loss("hinge", {"margin": 0.5})
    scores = ranker.predict(X, qid=qid)
    other_margin = clone(ranker).set_params(loss_options=None).fit(X, y, qid=qid)
    assert not np.array_equal(other_margin.predict(X, qid=qid), scores)
    again = clone(ranker)
    assert not hasattr(again, "ranker_")
    assert np.array_equal(again.fit(X, y, qid=qid).predict(X, qid=qid), scores)
    pickled = pickle.loads(pickle.dumps(ranker))
    assert pickled.loss == loss and np.array_equal(pickled.predict(X, qid=qid), scores)
    ranker.save(tmp_path / "r.safetensors")
    loaded = NeuralRanker.load(tmp_path / "r.safetensors")
    assert loaded.loss == "hinge" and np.array_equal(loaded.predict(X, qid=qid), scores)
    with pytest.raises(ValueError, match="'hinge' is not a loss.*loss= again"):
        loaded.fit(X, y, qid=qid)
    assert np.array_equal(loaded.set_params(loss=loss).fit(X, y, qid=qid).predict(X, qid=qid), scores)


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
def test_a_loss_of_ones_own_is_averaged_over_the_lists_that_count(loss):
    X, y, qid = documents()
    flat = np.isin(qid, [101, 103, 105])
    y[flat] = 0  # no pair in them
    whole_batch = SMALL | {"loss": loss, "scaling": "none", "batch_size": 100, "dropout": 0.0, "epochs": 1}
    ranker = NeuralRanker(**whole_batch).fit(X, y, qid=qid)
    alone = NeuralRanker(**whole_batch).fit(X[~flat], y[~flat], qid=qid[~flat])
    assert ranker.history_[0]["loss"] == pytest.approx(alone.history_[0]["loss"], rel=1e-6)


def test_a_loss_that_needs_several_outputs_or_tanh_says_so():
    X, y, qid = documents()

    def graded(scores, labels, mask=None, *, reduction="mean", check=None):
        return LOSSES["ordinal"](scores, labels, mask, reduction=reduction, check=check)

    spec = LossSpec(graded, counts=has_document, units=lambda highest: highest, tanh=True)
    ranker = NeuralRanker(**SMALL | {"loss": spec}).fit(X, y, qid=qid)
    assert ranker.model_.output.out_features == y.max() and ranker.ranker_.tanh
    assert ranker.predict(X, qid=qid).shape == (len(X),)


@pytest.mark.parametrize("name", ["neural_ndcg", "lambdarank", "rmse"])
def test_a_loss_of_ours_given_as_a_function_is_that_loss(name):
    X, y, qid = documents()
    by_name = NeuralRanker(**SMALL | {"loss": name}).fit(X, y, qid=qid)
    by_function = NeuralRanker(**SMALL | {"loss": LOSSES[name]}).fit(X, y, qid=qid)
    assert same_weights(by_name, by_function) and by_name.config_ == by_function.config_


def test_what_was_learned_is_there_after_fit_and_not_before():
    ranker = NeuralRanker(**SMALL)
    names = ("ranker_", "model_", "scaling_", "config_", "history_", "best_epoch_", "best_score_", "n_features_in_")
    assert not any(hasattr(ranker, name) for name in names)
    for name in ("model_", "scaling_", "config_"):
        with pytest.raises(AttributeError, match="not fitted.*call fit"):
            getattr(ranker, name)
    X, y, qid = documents()
    ranker.fit(X, y, qid=qid)
    assert all(hasattr(ranker, name) for name in names)
    assert ranker.model_ is ranker.ranker_.model and isinstance(ranker.model_, torch.nn.Module)
    assert ranker.scaling_ is ranker.ranker_.scaling and isinstance(ranker.scaling_, Scaling)
    assert ranker.config_ is ranker.ranker_.config and isinstance(ranker.config_, Config)


# --- validation and early stopping ------------------------------------------------------------------------------------


def test_without_validation_the_last_epoch_is_kept():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"epochs": 6, "lr": 0.5}).fit(X, y, qid=qid)
    assert ranker.best_epoch_ == len(ranker.history_) == 6
    assert [line["epoch"] for line in ranker.history_] == [1, 2, 3, 4, 5, 6]
    assert ranker.best_score_ == ranker.history_[-1]["metric"] == pytest.approx(ranker.score(X, y, qid=qid), abs=1e-9)
    assert max(line["metric"] for line in ranker.history_) > ranker.best_score_  # else the test would show nothing


def test_with_an_eval_set_the_best_epoch_is_kept():
    X, y, qid = documents()
    judged = documents(8, seed=1)
    ranker = NeuralRanker(**SMALL | {"epochs": 12, "lr": 0.5, "patience": 3}).fit(X, y, qid=qid, eval_set=judged)
    metrics = [line["metric"] for line in ranker.history_]
    assert ranker.best_epoch_ == 1 + int(np.argmax(metrics)) == len(metrics) - 3 < 9
    assert ranker.score(*judged[:2], qid=judged[2]) == pytest.approx(max(metrics), abs=1e-9)


def test_patience_alone_holds_queries_out():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"patience": 2, "validation_fraction": 0.25}).fit(X, y, qid=qid)
    alone = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    assert not same_weights(ranker, alone)
    few = np.isin(qid, [100, 101])
    NeuralRanker(**SMALL | {"patience": 1}).fit(X[few], y[few], qid=qid[few])  # 0.2 of two queries is one all the same


def test_eval_sets_come_in_several_forms():
    X, y, qid = documents()
    Xe, ye, qe = documents(5, seed=1)
    forms = [
        {"eval_set": (Xe, ye, qe)},
        {"eval_set": [Xe, ye, qe]},
        {"eval_set": [(Xe, ye, qe)]},
        {"eval_set": (Xe, ye), "eval_qid": qe},
        {"eval_set": (Xe, ye), "eval_qid": [qe]},
        {"eval_set": [(Xe, ye)], "eval_qid": [qe]},
        {"eval_set": [(Xe, ye)], "eval_qid": qe.tolist()},
    ]
    histories = [NeuralRanker(**SMALL).fit(X, y, qid=qid, **form).history_ for form in forms]
    assert all(history == histories[0] for history in histories)
    named = NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_set=[(Xe, ye)], eval_qid=[qe], eval_names="valid")
    assert [*named.evals_result_] == ["valid"]


# --- forms of input ---------------------------------------------------------------------------------------------------


def test_frames_give_what_arrays_give():
    X, y, qid = documents()
    names = ["bm25", "clicks", "age", "length"]
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    expected = ranker.predict(X, qid=qid)
    assert ranker.n_features_in_ == 4 and not hasattr(ranker, "feature_names_in_")
    frame = pd.DataFrame(X, columns=names)
    series = pd.Series(y, index=range(7, 7 + len(y))), pd.Series(qid, name="qid").astype("Int64")
    lazy = pl.DataFrame({name: X[:, j] for j, name in enumerate(names)})
    for table, grades, ids in (
        (frame, *series),
        (lazy, pl.Series(y), pl.Series(qid)),
        (X.tolist(), list(y), list(qid)),
    ):
        ranker = NeuralRanker(**SMALL).fit(table, grades, qid=ids)
        assert np.array_equal(ranker.predict(table, qid=ids), expected)
        if table is not frame and table is not lazy:
            continue
        assert ranker.feature_names_in_.tolist() == names
        swapped = table[["clicks", "bm25", "age", "length"]]
        with pytest.raises(ValueError, match="[Ff]eature names"):
            ranker.predict(swapped, qid=ids)
        with pytest.raises(ValueError, match="[Ff]eature names"):
            ranker.fit(table, grades, qid=ids, eval_set=(swapped, grades, ids))


def test_missing_values_of_frames_are_nan():
    X, y, qid = documents()
    X[3, 1] = X[0, 0] = np.nan
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    expected = ranker.predict(X, qid=qid)
    assert np.isfinite(expected).all()
    columns = {f"f{j}": [None if np.isnan(v) else float(v) for v in X[:, j]] for j in range(4)}
    for frame in (pl.DataFrame(columns), pd.DataFrame(columns), pd.DataFrame(columns).convert_dtypes()):
        again = NeuralRanker(**SMALL).fit(frame, y, qid=qid)
        assert np.array_equal(again.predict(frame, qid=qid), expected)


@pytest.mark.parametrize("kind", [str, "U8", object, float, np.uint8, "Int64", "frame"])
def test_query_ids_of_any_kind(kind):
    X, y, qid = documents()
    special = {"Int64": pd.array(qid, dtype="Int64"), "frame": pd.DataFrame({"qid": qid})}
    ids = special[kind] if kind in special else qid.astype(kind)
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=ids)
    scores = ranker.predict(X, qid=ids)
    assert np.array_equal(ranker.predict(X, qid=qid), scores)
    if kind not in (str, "U8"):  # the order of the lists is drawn by their ids: as texts they come in another
        assert np.array_equal(NeuralRanker(**SMALL).fit(X, y, qid=qid).predict(X, qid=qid), scores)
    assert ranker.score(X, y, qid=ids) == ranker.score(X, y, qid=qid)


@pytest.mark.parametrize("kind", [int, float, bool, np.uint8, np.float32, object])
def test_grades_of_any_kind(kind):
    X, y, qid = documents()
    y = np.minimum(y, 1)
    expected = NeuralRanker(**SMALL).fit(X, y, qid=qid).predict(X, qid=qid)
    assert np.array_equal(NeuralRanker(**SMALL).fit(X, y.astype(kind), qid=qid).predict(X, qid=qid), expected)


@pytest.mark.parametrize("model", ["transformer", "mlp"])
def test_the_order_of_the_rows_does_not_matter(model):
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"model": model, "dropout": 0.0}).fit(X, y, qid=qid)
    scores = ranker.predict(X, qid=qid)
    order = np.random.default_rng(3).permutation(len(X))
    assert np.allclose(ranker.predict(X[order], qid=qid[order]), scores[order], atol=1e-6)
    assert ranker.score(X[order], y[order], qid=qid[order]) == pytest.approx(ranker.score(X, y, qid=qid))
    scattered = clone(ranker).fit(X[order], y[order], qid=qid[order])
    assert np.allclose(scattered.predict(X, qid=qid), scores, atol=1e-4)


def test_a_transformer_sees_the_list_and_an_mlp_does_not():
    X, y, qid = documents()
    one_list = np.zeros(len(X), int)
    context = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    assert not np.allclose(context.predict(X, qid=qid), context.predict(X, qid=one_list), atol=1e-4)
    with pytest.raises(ValueError, match="predict needs qid.*pass predict"):
        context.predict(X)
    for model in ("mlp", "linear"):
        ranker = NeuralRanker(**SMALL | {"model": model}).fit(X, y, qid=qid)
        assert np.allclose(ranker.predict(X, qid=qid), ranker.predict(X), atol=1e-6)
        many = np.tile(X, (60, 1))  # more rows than are scored at once
        assert np.allclose(ranker.predict(many), np.tile(ranker.predict(X), 60), atol=1e-6)


def test_numbers_beyond_float32_count_as_the_largest_ordinary_value():
    X, y, qid = documents()
    wide = X.astype(np.float64)
    wide[5, 1] = 1.797e308
    assert np.isfinite(NeuralRanker(**SMALL).fit(wide, y, qid=qid).predict(wide, qid=qid)).all()


def test_small_and_flat_data():
    X, y, qid = documents()
    one = qid == 100
    assert NeuralRanker(**SMALL).fit(X[one], y[one], qid=qid[one]).score(X[one], y[one], qid=qid[one]) > 0
    for grades in (np.zeros(len(y)), np.full(len(y), 2.0)):
        ranker = NeuralRanker(**SMALL | {"loss": "lambdarank"})
        with pytest.warns(UserWarning, match="lambdarank can learn from no query.*look at y and qid"):
            ranker.fit(X, grades, qid=qid)
        assert ranker.score(X, grades, qid=qid) == 1.0
    with pytest.warns(UserWarning, match="neural_ndcg can learn from no query"):  # every row a query of its own
        NeuralRanker(**SMALL).fit(X, y, qid=np.arange(len(X)))
    with pytest.warns(UserWarning, match="neural_ndcg can learn from no query"):
        ranker = NeuralRanker(**SMALL).fit(X[:1], y[:1], qid=[1])
    assert ranker.predict(X[:1], qid=[1]).shape == (1,)
    assert NeuralRanker(**SMALL).fit(X[:, :1], y, qid=qid).n_features_in_ == 1


def test_nothing_to_choose_by_and_grades_that_are_none(capsys):
    X, y, qid = documents()
    with pytest.warns(UserWarning, match="no query .*relevant document.*look at eval_set"):
        ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid, eval_set=(X, np.zeros(len(y)), qid))
    assert ranker.best_epoch_ == 1
    with pytest.warns(UserWarning, match="no query .*relevant document for map.*from 1 on"):
        NeuralRanker(**SMALL | {"metric": "map"}).fit(X, y, qid=qid, eval_set=(X, y / 10, qid))
    clicks = np.where(y > 0, 3000, 0)
    words = "label 3000 of query .* {}.*overflows.*map your labels to grades, or choose a {} without gains"
    with pytest.raises(ValueError, match=words.format("ndcg@10", "metric")):
        NeuralRanker(**SMALL | {"loss": "rmse"}).fit(X, clicks, qid=qid)
    for loss in ("lambdarank@3", "xe_ndcg"):
        with pytest.raises(ValueError, match=words.format(f"the loss {loss}", "loss")):
            NeuralRanker(**SMALL | {"loss": loss, "metric": "map"}).fit(X, clicks, qid=qid)
    ranker = NeuralRanker(**SMALL, verbose=True)
    with pytest.raises(ValueError, match=words.format("ndcg@10", "metric")):
        ranker.fit(X, y, qid=qid, eval_set=(X, clicks, qid))
    assert capsys.readouterr().err == ""  # before anything was trained
    NeuralRanker(**SMALL | {"loss": "listnet", "metric": "map"}).fit(X, clicks, qid=qid)
    linear = {"loss": "lambdarank", "loss_options": {"gain": "linear"}, "metric": "err"}
    NeuralRanker(**SMALL | linear).fit(X, clicks, qid=qid)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_query_of_weight_zero_is_never_seen():
    X, y, qid = documents()
    X[qid == 102] += 50.0  # would move the scaling
    kept = qid != 102
    alone = NeuralRanker(**SMALL | {"patience": 2}).fit(X[kept], y[kept], qid=qid[kept])
    by_row = clone(alone).fit(X, y, qid=qid, sample_weight=kept.astype(float))
    by_query = clone(alone).fit(X, y, qid=qid, sample_weight=[float(q != 102) for q in np.unique(qid)])
    assert same_weights(alone, by_row) and same_weights(alone, by_query)


def test_a_weight_of_two_is_the_query_twice():
    X, y, qid = documents()
    twice = qid == 102
    whole_batch = SMALL | {"scaling": "none", "batch_size": 100, "dropout": 0.0, "epochs": 10}
    weighted = NeuralRanker(**whole_batch).fit(X, y, qid=qid, sample_weight=1.0 + twice)
    repeated = [np.concatenate([a, a[twice]]) for a in (X, y)]
    expected = NeuralRanker(**whole_batch).fit(*repeated, qid=np.concatenate([qid, qid[twice] + 1000]))
    assert np.allclose(weighted.predict(X, qid=qid), expected.predict(X, qid=qid), atol=1e-5)
    unweighted = NeuralRanker(**whole_batch).fit(X, y, qid=qid)
    assert not np.allclose(weighted.predict(X, qid=qid), unweighted.predict(X, qid=qid), atol=1e-5)
    ones = NeuralRanker(**whole_batch).fit(X, y, qid=qid, sample_weight=np.ones(len(X)))
    assert same_weights(ones, unweighted)


def test_weights_of_scattered_rows():
    X, y, qid = documents()
    order = np.random.default_rng(3).permutation(len(X))
    X, y, qid = X[order], y[order], qid[order]
    by_row = NeuralRanker(**SMALL).fit(X, y, qid=qid, sample_weight=qid - 99.0)
    first_seen = pd.unique(qid)
    by_query = NeuralRanker(**SMALL).fit(X, y, qid=qid, sample_weight=first_seen - 99.0)
    assert same_weights(by_row, by_query)
    assert not same_weights(by_row, NeuralRanker(**SMALL).fit(X, y, qid=qid))


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [{}, {"model": "mlp", "scaling": "quantile"}, {"loss": "ordinal"}])
def test_predictions_survive_pickle_copy_and_file_to_the_bit(parameters, tmp_path):
    X, y, qid = documents()
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    options = {"hidden": [np.int64(6), 4], "lr": np.float32(0.01), "random_state": np.random.RandomState(1)}
    ranker = NeuralRanker(**SMALL | options | parameters).fit(frame, y, qid=qid)
    scores = ranker.predict(frame, qid=qid)
    assert not ranker.model_.training  # whoever takes the module gets it without dropout
    ranker.save(tmp_path / "ranker.safetensors")
    loaded = NeuralRanker.load(str(tmp_path / "ranker.safetensors"))
    for again in (pickle.loads(pickle.dumps(ranker)), copy.deepcopy(ranker), loaded):
        assert not again.model_.training
        assert np.array_equal(again.predict(frame, qid=qid), scores)
        assert (again.config_, again.history_, again.best_epoch_) == (
            ranker.config_,
            ranker.history_,
            ranker.best_epoch_,
        )
        assert again.best_score_ == ranker.best_score_ and again.n_features_in_ == 4
        assert again.feature_names_in_.tolist() == list("abcd")
        assert again.get_params().keys() == ranker.get_params().keys()
        assert np.array_equal(pickle.loads(pickle.dumps(again)).predict(frame, qid=qid), scores)
    assert np.array_equal(clone(loaded).fit(frame, y, qid=qid).predict(frame, qid=qid), scores)


def test_a_saved_ranker_keeps_its_parameters(tmp_path):
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL | {"loss_options": {"tau": 0.5}, "clip": 1.0}).fit(X, y, qid=qid)
    ranker.save(tmp_path / "r.safetensors")
    assert NeuralRanker.load(tmp_path / "r.safetensors").get_params() == ranker.get_params()


def test_a_pickle_holds_no_torch_object_and_no_class_but_its_own():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    named = []

    class Watching(pickle.Unpickler):
        def find_class(self, module, name):
            named.append(module.split(".")[0])
            return super().find_class(module, name)

    Watching(io.BytesIO(pickle.dumps(ranker))).load()
    assert set(named) <= {"rankgrad", "numpy", "copyreg", "builtins"} and named.count("rankgrad") == 1


def test_a_pickle_from_before_a_parameter_came_predicts_the_same():
    X, y, qid = documents()
    ranker = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    state = ranker.__getstate__()
    for name in ("categorical", "n_jobs", "label_gain", "warm_start"):
        del state[name]
    again = NeuralRanker.__new__(NeuralRanker)
    again.__setstate__(state)
    assert again.get_params() == ranker.get_params()
    assert np.array_equal(again.predict(X, qid=qid), ranker.predict(X, qid=qid))


def test_an_unfitted_ranker_can_be_pickled_and_an_extra_attribute_survives():
    assert pickle.loads(pickle.dumps(NeuralRanker(epochs=7))).get_params()["epochs"] == 7
    with sklearn.config_context(enable_metadata_routing=True):
        ranker = NeuralRanker().set_fit_request(sample_weight=True)
        again = pickle.loads(pickle.dumps(ranker))
        assert again.get_metadata_routing().fit.requests["sample_weight"] is True


def test_what_is_no_saved_ranker_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        NeuralRanker.load(tmp_path / "nothing")
    save_tensors(tmp_path / "other", {"a": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="is not a saved NeuralRanker; expected"):
        NeuralRanker.load(tmp_path / "other")
    with pytest.raises(NotFittedError):
        NeuralRanker().save(tmp_path / "unfitted")


# --- among scikit-learn's tools ---------------------------------------------------------------------------------------


def test_grid_search_and_cross_validation_by_query():
    X, y, qid = documents(20)
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(NeuralRanker(**SMALL), {"loss": ["neural_ndcg@5", "listnet"]}, cv=GroupKFold(2))
        search.fit(X, y, qid=qid, groups=qid)
        assert search.best_score_ == search.cv_results_["mean_test_score"].max() > 0.5
        assert search.score(X, y, qid=qid) == search.best_estimator_.score(X, y, qid=qid)
        ranker = NeuralRanker(**SMALL | {"loss": search.best_params_["loss"]})
        values = cross_val_score(ranker, X, y, params={"qid": qid, "groups": qid}, cv=GroupKFold(2))
    assert values.mean() == search.best_score_
    train, test = next(GroupKFold(2).split(X, y, qid))
    fold = clone(ranker).fit(X[train], y[train], qid=qid[train])
    assert fold.score(X[test], y[test], qid=qid[test]) == values[0]


def test_progress_is_shown_on_request(capsys):
    X, y, qid = documents()
    quiet = NeuralRanker(**SMALL).fit(X, y, qid=qid)
    assert quiet.verbose is None
    NeuralRanker(**SMALL, verbose=-1).fit(X, y, qid=qid)  # as LightGBM's users say it
    assert capsys.readouterr() == ("", "")
    shown = NeuralRanker(**SMALL | {"verbose": 1}).fit(X, y, qid=qid)
    out, text = capsys.readouterr()
    assert out == "" and "epoch 3/3" in text and "loss" in text and "ndcg@10" in text
    assert same_weights(quiet, shown)


def test_without_scikit_learn_the_install_line_is_said():
    code = "import sys; sys.modules['sklearn'] = None; sys.modules['sklearn.base'] = None; import rankgrad.estimator"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    last = said.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "scikit-learn 1.6" in last and "pip install 'rankgrad[sklearn]'" in last


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed(array, place, value):
    array = np.array(array, dtype=float)
    array[place] = value
    return array


REFUSED = {
    "no qid": ("fit needs qid.*pass fit", lambda X, y, q: {"qid": None}),
    "short qid": (r"qid .*\(3,\).*expected the query id", lambda X, y, q: {"qid": q[:3]}),
    "qid with halves": ("qid .*float64", lambda X, y, q: {"qid": q + 0.5}),
    "qid with nan": ("qid .*float64", lambda X, y, q: {"qid": changed(q, 0, np.nan)}),
    "qid whose floats skip integers": ("qid .*float64", lambda X, y, q: {"qid": q * 2.0**60}),
    "qid of two kinds": (
        "qid holds .*100.* in row 1; expected texts",
        lambda X, y, q: {"qid": np.array(["a", *q[1:]], dtype=object)},
    ),
    "qid with None": ("qid holds None in row 0; expected", lambda X, y, q: {"qid": [None, *q[1:]]}),
    "qid with None among texts": (
        "qid holds None in row 1; expected texts",
        lambda X, y, q: {"qid": [str(i) if n != 1 else None for n, i in enumerate(q)]},
    ),
    "no y": ("the target y is None; expected the grades", lambda X, y, q: {"y": None}),
    "no eval y": ("the target eval_y is None", lambda X, y, q: {"eval_set": (X, None, q)}),
    "a query of polars": (
        r"polars.*X\.collect\(\)",
        lambda X, y, q: {"X": pytest.importorskip("polars", reason="polars is not installed").DataFrame(X).lazy()},
    ),
    "short y": ("inconsistent numbers of samples", lambda X, y, q: {"y": y[:-1]}),
    "negative grade": (r"y\[4\] is -1.0.*expected grades", lambda X, y, q: {"y": changed(y, 4, -1), "qid": q[::-1]}),
    "y with nan": ("y contains NaN", lambda X, y, q: {"y": changed(y, 4, np.nan)}),
    "y of words": ("expected grades", lambda X, y, q: {"y": np.where(y > 0, "good", "bad")}),
    "infinite feature": ("X contains infinity", lambda X, y, q: {"X": changed(X, (0, 0), np.inf)}),
    "few weights": ("sample_weight has shape", lambda X, y, q: {"sample_weight": np.ones(5)}),
    "weights within a query": (
        "sample_weight .*query 101",
        lambda X, y, q: {"sample_weight": changed(q, np.argmax(q == 101), 7)},
    ),
    "negative weight": ("sample_weight .*negative", lambda X, y, q: {"sample_weight": -q}),
    "infinite weight": ("sample_weight .*non-finite", lambda X, y, q: {"sample_weight": np.full(len(q), np.inf)}),
    "zero weights": ("sample_weight is zero", lambda X, y, q: {"sample_weight": 0 * q}),
    "no eval_qid": ("eval_set has 2 parts and eval_qid is None", lambda X, y, q: {"eval_set": (X, y)}),
    "query ids twice": (
        "eval_set has 3 parts and eval_qid is not None",
        lambda X, y, q: {"eval_set": (X, y, q), "eval_qid": q},
    ),
    "one eval_qid for two": (
        "eval_qid is 1 parts.*each of 2",
        lambda X, y, q: {"eval_set": [(X, y), (X, y)], "eval_qid": [q]},
    ),
    "an eval set of numbers": ("eval_set has 4 parts", lambda X, y, q: {"eval_set": [1, 2, 3, 4]}),
    "one name for two": (
        "eval_names holds 1 names.*each of 2",
        lambda X, y, q: {"eval_set": [(X, y, q), (X, y, q)], "eval_names": ["a"]},
    ),
    "a name twice": (
        "eval_names has 'a' twice",
        lambda X, y, q: {"eval_set": [(X, y, q), (X, y, q)], "eval_names": ["a", "a"]},
    ),
    "qid and group": ("qid and group were given", lambda X, y, q: {"group": [len(X)]}),
    "group too short": (r"group says 3 rows and X has \d+", lambda X, y, q: {"qid": None, "group": [1, 2]}),
    "group of ids": ("group says .*pass the query id of every row as qid=", lambda X, y, q: {"qid": None, "group": q}),
    "group with a half": ("group is .*whole numbers", lambda X, y, q: {"qid": None, "group": [0.5, len(X) - 0.5]}),
    "long group with halves": ("group is .{1,200}; .*whole", lambda X, y, q: {"qid": None, "group": [0.5] * 30_000}),
    "negative group": ("group is .*whole numbers", lambda X, y, q: {"qid": None, "group": [-1, len(X) + 1]}),
    "group of words": ("group is .*whole numbers", lambda X, y, q: {"qid": None, "group": ["a"]}),
    "eval_group too short": (
        "eval_group says 1 rows",
        lambda X, y, q: {"eval_set": [(X, y)], "eval_group": [[1]]},
    ),
    "eval_X alone": ("eval_X and eval_y belong together", lambda X, y, q: {"eval_X": X, "eval_qid": q}),
    "eval_X and eval_set": (
        "eval_X and eval_y belong together",
        lambda X, y, q: {"eval_X": X, "eval_y": y, "eval_set": (X, y, q)},
    ),
    "a tuple and none": ("eval_X is a tuple", lambda X, y, q: {"eval_X": (X, X), "eval_y": y, "eval_qid": [q, q]}),
    "eval_at of 0": ("eval_at .*1 or above", lambda X, y, q: {"eval_set": (X, y, q), "eval_at": [0]}),
    "unknown eval_metric": ("'auc' is not a metric", lambda X, y, q: {"eval_set": (X, y, q), "eval_metric": "auc"}),
    "two functions of one name": (
        "two metrics are called",
        lambda X, y, q: {"eval_set": (X, y, q), "eval_metric": [lambda t, p: 0.0, lambda t, p: 1.0]},
    ),
    "eval_qid alone": ("eval_qid .*without eval_set", lambda X, y, q: {"eval_qid": q}),
    "eval_set an array": ("eval_set .*ndarray", lambda X, y, q: {"eval_set": X}),
    "short eval_qid": ("eval_qid .*shape", lambda X, y, q: {"eval_set": (X, y, q[1:])}),
    "narrow eval_set": ("expecting 4 features", lambda X, y, q: {"eval_set": (X[:, :3], y, q)}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_data_is_refused(what):
    X, y, qid = documents()
    message, change = REFUSED[what]
    given = {"X": X, "y": y, "qid": qid} | change(X, y, qid)
    with pytest.raises(ValueError, match=message):
        NeuralRanker(**SMALL).fit(given.pop("X"), given.pop("y"), **given)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"loss": "neural_ndgc"}, "did you mean 'neural_ndcg'"),
        ({"loss_options": {"gain": print}}, "a parameter is not a plain value.*function"),
        ({"loss_options": {"temperature": 1}}, "no option 'temperature'.*tau"),
        ({"model": "tree"}, "^model must be .*'transformer', 'mlp', 'linear'"),
        ({"epochs": 2.5}, "^epochs .*int.*2.5"),
        ({"model": "MLP"}, "did you mean 'mlp'"),
        ({"lr": -1.0}, "^lr must be"),
        ({"loss": []}, "loss .*one"),
        ({"verbose": "a"}, "verbose must be"),
        ({"categorical": 0}, r"categorical is 0; expected a list.*\[0\]"),
        ({"recipe": "stronger"}, "recipe .*'strong', 'paper'"),
        ({"members": 4}, "mlp or linear.*transformer.*share"),
        ({"lr": np.nan}, "lr .*finite"),
        ({"metric": "auc"}, "'auc' is not a metric"),
        ({"scaling": "minmax"}, "scaling .*'auto'"),
        ({"warmup": -1}, "warmup .*whole number"),
        ({"random_state": -1}, "random_state .*whole number"),
        ({"patience": 2, "validation_fraction": 1.5}, "^validation_fraction must be above 0 and below 1"),
    ],
)
def test_bad_parameters_are_refused_by_fit(parameters, message):
    X, y, qid = documents()
    with pytest.raises(ValueError, match=message):
        NeuralRanker(**SMALL | parameters).fit(X, y, qid=qid)


def test_early_stopping_on_one_query_says_what_to_do():
    X, y, _ = documents()
    with pytest.raises(ValueError, match="only one query.*pass eval_set"):
        NeuralRanker(**SMALL | {"patience": 2}).fit(X, y, qid=np.zeros(len(X), int))


@pytest.mark.parametrize("parameters", [MEMBERS, SMALL])
def test_one_list_is_predicted_as_its_ranker_scores_it_without_batches(parameters, monkeypatch):
    X, y, qid = documents()
    ranker = NeuralRanker(**parameters).fit(X, y, qid=qid)
    own = qid == qid[0]
    beside = ranker.predict(X, qid=qid)[own]
    monkeypatch.setattr("rankgrad.training.evaluate.batches", lambda *_, **__: pytest.fail("batches of one list"))
    alone = ranker.predict(X[own], qid=qid[own])
    assert np.array_equal(alone, ranker.ranker_.score(X[own])) and np.array_equal(
        alone, ranker.predict(X[own], group=[own.sum()])
    )
    np.testing.assert_allclose(alone, beside, atol=1e-5)


def test_bad_data_is_refused_by_predict_and_score():
    X, y, qid = documents()
    with pytest.raises(NotFittedError):
        NeuralRanker().predict(X, qid=qid)
    ranker = NeuralRanker(**SMALL | {"model": "mlp"}).fit(X, y, qid=qid)
    with pytest.raises(ValueError, match="score needs qid.*pass score"):
        ranker.score(X, y)
    with pytest.raises(ValueError, match="qid has shape"):
        ranker.predict(X, qid=qid[1:])
    with pytest.raises(ValueError, match="X contains infinity"):
        ranker.predict(changed(X, (1, 1), -np.inf))
    with pytest.raises(ValueError, match="grades"):
        ranker.score(X, y - 3, qid=qid)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranker.predict(X, qid=qid)


def test_documents_may_have_weights():
    X, y, qid = rows_of(synthetic("tiny"))
    weight = np.where(np.arange(len(y)) % 2, 1.0, 0.0)
    make = lambda: NeuralRanker(model="linear", loss="softmax", epochs=2, random_state=0)  # noqa: E731
    plain = make().fit(X, y, qid=qid).predict(X, qid=qid)
    weighted = make().fit(X, y, qid=qid, document_weight=weight).predict(X, qid=qid)
    assert not np.allclose(plain, weighted)
    order = np.random.default_rng(0).permutation(len(y))
    mixed = make().fit(X[order], y[order], qid=qid[order], document_weight=weight[order])
    assert mixed.history_[0]["loss"] == pytest.approx(
        make().fit(X, y, qid=qid, document_weight=weight).history_[0]["loss"], rel=1e-4
    )
    for bad, message in (
        (weight[:-1], "each of the"),
        (-1 - weight, "negative"),
        (np.full(len(y), np.nan), "non-finite"),
        (np.zeros(len(y)), "every document has weight 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make().fit(X, y, qid=qid, document_weight=bad)
    with pytest.raises(ValueError, match="neural_ndcg.*weights of documents"):
        NeuralRanker(model="linear", epochs=1).fit(X, y, qid=qid, document_weight=weight)


def test_weights_of_documents_leave_the_default_its_losses_that_take_them():
    X, y, qid = rows_of(synthetic("tiny"))
    weight = np.where(np.arange(len(y)) % 2, 1.0, 0.0)
    ranker = NeuralRanker(members=4, epochs=1, random_state=0).fit(X, y, qid=qid, document_weight=weight)
    assert [member["loss"] for member in ranker.members_] == ["softmax", "query_rmse", "lambdarank@10", "softmax"]
    assert ranker.config_.loss.names == ("softmax", "query_rmse", "lambdarank@10")
