"""Our losses as objectives of other libraries: derivatives, lists that teach nothing, training with LightGBM and XGBoost."""

import numpy as np
import pytest
import torch

from rankgrad.data import synthetic
from rankgrad.losses import LOSS_TABLE, LOSSES, LossSpec
from rankgrad.training.evaluate import mean, measure
from rankgrad.trees import objective
from rankgrad.trees.objectives import FLOOR

ONE_UNIT = [spec.name for spec in LOSS_TABLE if spec.units(2) == 1]
LIBRARIES = ("lightgbm", "xgboost")
ODD = {  # lists that are hard to learn from
    "one document each": ([1] * 24, [0, 1, 2] * 8),
    "equal labels": ([6] * 4, [1] * 12 + [0] * 12),
    "nothing relevant": ([3, 21], [0] * 24),
    "one list": ([24], [0, 1, 2] * 8),
    "ordinary, single and equal": ([1, 9, 1, 13], [2, *([0, 1, 2] * 3), 0, *([1] * 13)]),
}


class Lists:
    """What LightGBM's Dataset and XGBoost's DMatrix have in common, as `objective` asks for it."""

    def __init__(self, labels, sizes, weights=None):
        self.labels, self.sizes, self.weights = np.asarray(labels, np.float32), sizes, weights

    def get_label(self):
        return self.labels

    def get_weight(self):
        return self.weights

    def get_group(self):
        return self.sizes


def dataset(library, features, labels, sizes, **options):
    module = pytest.importorskip(library)
    if library == "lightgbm":
        return module.Dataset(features, labels, group=sizes, params={"verbosity": -1}, **options)
    return module.DMatrix(features, labels, qid=np.repeat(np.arange(len(sizes)), sizes), **options)


def boost(library, data, f, rounds, **settings):
    module = pytest.importorskip(library)
    if library == "lightgbm":
        quiet = {"objective": f, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 1, **settings}
        return module.train(quiet, data, rounds)
    return module.train({"nthread": 1, "min_child_weight": 0, "base_score": 0, **settings}, data, rounds, obj=f)


def predict(library, booster, features):
    return booster.predict(features if library == "lightgbm" else pytest.importorskip("xgboost").DMatrix(features))


@pytest.fixture
def lists():
    rng = np.random.default_rng(0)
    sizes = np.array([5, 1, 9, 0, 30, 2])
    return rng.normal(size=sizes.sum()), rng.integers(0, 3, sizes.sum()).astype(np.float64), sizes


@pytest.mark.parametrize("name", ONE_UNIT)
def test_the_gradient_is_that_of_the_loss_summed_over_lists(name, lists):
    scores, labels, sizes = lists
    given = {"sinkhorn_iters": 1} if name.startswith("neural") else {}
    if name == "xe_ndcg":  # random: one list, so that the draws are the same
        scores, labels, sizes = scores[15:45], labels[15:45], sizes[4:5]
        given = {"generator": torch.Generator().manual_seed(0)}
    expected = []
    for s, y in zip(np.split(scores, np.cumsum(sizes)[:-1]), np.split(labels, np.cumsum(sizes)[:-1])):
        s = torch.tensor(s, requires_grad=True)
        (g,) = torch.autograd.grad(LOSSES[name](s, torch.tensor(y), reduction="sum", **given), s)
        expected.append(g.numpy())
    g, h = objective(name)(scores, Lists(labels, sizes))
    np.testing.assert_allclose(g, np.concatenate(expected), atol=1e-6)
    assert np.isfinite(h).all() and (h >= FLOOR).all()


def test_cut_off_options_and_a_loss_of_ones_own_are_those_of_training(lists):
    scores, labels, sizes = lists
    data = Lists(labels, sizes)

    def gradient(loss, **options):
        return objective(loss, **options)(scores, data)[0]

    at_two = gradient("neural_ndcg@2", tau=0.5)
    np.testing.assert_array_equal(at_two, gradient(LOSSES["neural_ndcg"], k=2, tau=0.5))
    assert not np.allclose(at_two, gradient("neural_ndcg@2")) and not np.allclose(
        at_two, gradient("neural_ndcg", tau=0.5)
    )
    assert not np.allclose(gradient("neural_ndcg"), gradient("neural_ndcg", sinkhorn_iters=30))

    def squares(scores, labels, mask=None, *, reduction="mean", check=None):
        return torch.where(mask, (scores - labels) ** 2, 0.0).sum(-1)

    np.testing.assert_allclose(gradient(LossSpec(squares, name="own")), 2 * (scores - labels))
    np.testing.assert_allclose(gradient(squares), 2 * (scores - labels))


def test_second_derivatives(lists):
    scores, labels, sizes = lists
    data = Lists(labels, sizes)
    counts = np.repeat([0, 1, 0, 0, 0, 0], sizes) == 0  # all but the list of one document
    g, h = objective("softmax")(scores, data)
    np.testing.assert_allclose(h, np.abs(g) + FLOOR)
    np.testing.assert_array_equal(h, objective("softmax", hessian="abs")(scores, data)[1])
    for name, kind, value in (("softmax", "one", 1.0), ("query_rmse", "auto", 2.0)):
        np.testing.assert_array_equal(objective(name, hessian=kind)(scores, data)[1], np.where(counts, value, FLOOR))
    own = objective("softmax", hessian=lambda s, y, mask: y - 1)(scores, data)[1]
    np.testing.assert_array_equal(own, np.where(counts & (labels == 2), 1.0, FLOOR))  # never zero, never negative


def test_weights_multiply_both(lists):
    scores, labels, sizes = lists
    g, h = objective("softmax", hessian="one")(scores, Lists(labels, sizes))
    of_lists = np.array([2.0, 1.0, 0.0, 5.0, 0.5, 1.0], np.float32)  # XGBoost: one per list
    for weights in (of_lists, np.repeat(of_lists, sizes)):
        weighted, second = objective("softmax", hessian="one")(scores, Lists(labels, sizes, weights))
        np.testing.assert_allclose(weighted, g * np.repeat(of_lists, sizes))
        np.testing.assert_allclose(second, np.maximum(h * np.repeat(of_lists, sizes), FLOOR))


def test_chunks_and_their_neighbours_change_nothing(lists, monkeypatch):
    scores, labels, sizes = lists
    f = objective("neural_ndcg")
    together = f(scores, Lists(labels, sizes))
    again = f(scores[5:], Lists(labels[5:], sizes[1:]))  # other lists than in the round before
    np.testing.assert_allclose(again[0], together[0][5:], atol=1e-12)
    monkeypatch.setattr("rankgrad.trees.objectives.PAIRS", 1)
    for one, other in zip(objective("neural_ndcg")(scores, Lists(labels, sizes)), together):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_random_losses_draw_anew_each_round_and_from_the_callers_generator(lists):
    scores, labels, sizes = lists

    def rounds(f):
        return [f(scores, Lists(labels, sizes))[0] for _ in range(2)]

    first, second = rounds(objective("neural_ndcg", samples=4))
    assert not np.allclose(first, second)
    again = rounds(objective("neural_ndcg", samples=4, generator=torch.Generator().manual_seed(0)))
    np.testing.assert_array_equal(first, again[0])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["neural_ndcg@5", "lambdarank", "query_rmse", "bce"])
def test_a_stump_finds_the_sign_of_the_feature_that_matters(library, name):
    rng = np.random.default_rng(1)
    features, sizes = rng.normal(size=(300, 2)), [10] * 30
    labels = (features[:, 1] < -0.5).astype(float)
    settings = {"num_leaves": 2} if library == "lightgbm" else {"max_depth": 1, "reg_lambda": 0}
    booster = boost(library, dataset(library, features, labels, sizes), objective(name), 1, **settings)
    scores = predict(library, booster, features)
    assert len(np.unique(scores)) == 2 and scores[labels == 1].min() > scores[labels == 0].min()
    assert np.corrcoef(scores, labels)[0, 1] > 0.7


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["neural_ndcg", "query_rmse", "lambdarank@10", "softmax"])
def test_both_libraries_learn_to_rank_with_it(library, name):
    train, test = synthetic("tiny", "train"), synthetic("tiny", "test")
    settings = {"learning_rate": 0.1, **({"num_leaves": 7} if library == "lightgbm" else {"max_depth": 3})}
    data = dataset(library, train.features, train.labels, train.lengths)
    booster = boost(library, data, objective(name), 15, **settings)

    def ndcg(scores):
        return mean(measure(scores, test, ["ndcg@10"])["ndcg@10"], 0.0)

    before, after = ndcg(np.zeros(len(test.labels))), ndcg(predict(library, booster, test.features))
    assert after > before + 0.1


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["neural_ndcg", "approx_ndcg", "lambdarank", "query_rmse", "softmax", "rmse"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_lists_crash_neither_library(library, name, odd):
    sizes, labels = ODD[odd]
    features = np.random.default_rng(2).normal(size=(24, 3))
    data = dataset(library, features, np.array(labels, float), sizes)
    scores = predict(library, boost(library, data, objective(name), 3), features)
    assert np.isfinite(scores).all()
    hard = dataset(library, features, np.array(labels, float), sizes)
    flat = objective(name, hessian=lambda s, y, m: torch.zeros_like(s))  # as bad as a second derivative can be
    assert np.isfinite(predict(library, boost(library, hard, flat, 3), features)).all()


def test_the_wrappers_of_scikit_learn_take_it(lists):
    _, labels, sizes = lists
    features = np.random.default_rng(3).normal(size=(len(labels), 3))
    sizes = sizes[sizes > 0]
    lightgbm, xgboost = pytest.importorskip("lightgbm"), pytest.importorskip("xgboost")
    quiet = {"n_estimators": 5, "min_child_samples": 1, "verbosity": -1, "n_jobs": 1}
    grouped = lightgbm.LGBMRanker(objective=objective("neural_ndcg"), **quiet).fit(features, labels, group=sizes)
    given = lightgbm.LGBMRegressor(objective=objective("neural_ndcg", sizes=sizes), **quiet).fit(features, labels)
    np.testing.assert_array_equal(grouped.predict(features), given.predict(features))
    weights = np.ones(len(labels))
    for weight in (None, weights):
        model = xgboost.XGBRegressor(objective=objective("softmax", sizes=sizes), n_estimators=3, n_jobs=1)
        assert np.ptp(model.fit(features, labels, sample_weight=weight).predict(features)) > 0
    with pytest.raises(ValueError, match="no groups.*sizes="):
        lightgbm.LGBMRegressor(objective=objective("softmax"), **quiet).fit(features, labels)


def test_what_cannot_be_boosted_is_refused(lists):
    scores, labels, sizes = lists
    with pytest.raises(ValueError, match="'lamdarank' is not a loss.*lambdarank"):
        objective("lamdarank")
    with pytest.raises(ValueError, match="ordinal needs several outputs.*trees have one"):
        objective("ordinal")
    with pytest.raises(ValueError, match="no option 'taux'"):
        objective("neural_ndcg", taux=1.0)
    with pytest.raises(ValueError, match="hessian must be one of 'auto', 'abs', 'one', got 'newton'"):
        objective("softmax", hessian="newton")
    with pytest.raises(ValueError, match=r"sizes must be whole numbers.*\[1.5\]"):
        objective("softmax", sizes=[1.5])
    with pytest.raises(ValueError, match="no groups.*group=.*qid=.*sizes="):
        objective("softmax")(scores, Lists(labels, None))
    with pytest.raises(ValueError, match="sum to 3 and there are 47 documents"):
        objective("softmax", sizes=[3])(scores, Lists(labels, None))
    for values, bad in ((scores, np.nan), (labels, -1.0), (scores, np.inf)):
        before, values[8] = values[8], bad
        with pytest.raises(ValueError, match=r"softmax for query 2 .*rows 6 to 14.* not finite"):
            objective("softmax")(scores, Lists(labels, sizes))
        values[8] = before
    with pytest.raises(ValueError, match=r"query \d .* not finite"):
        objective("softmax", hessian=lambda s, y, m: s / 0.0)(scores, Lists(labels, sizes))
