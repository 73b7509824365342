"""What a metric loses without a feature: known features come first, needless ones lose nothing, all of it by the seed."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import rankgrad
from rankgrad import feature_importances
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import fit_scaling
from rankgrad.explain import attributions, correlated_groups
from rankgrad.explain.groups import correlation_within_lists
from rankgrad.explain.importance import permutation
from rankgrad.metrics import parse_metric
from rankgrad.models import MLP
from rankgrad.ranker import Ranker
from rankgrad.runs.compare import with_interval
from rankgrad.runs.significance import bootstrap_interval
from rankgrad.training.config import Config
from rankgrad.training.evaluate import measure

RELEVANT = (2, 5)
CONSTANT = 4  # within lists


def made(queries=60, features=8, seed=0, missing=0.0):
    """Lists whose labels follow from two features; one is a number of the query, and none else says anything."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 14, queries)
    x = rng.normal(size=(lengths.sum(), features))
    x[:, CONSTANT] = np.repeat(rng.normal(size=queries), lengths)
    labels = np.clip(np.rint(1.5 * x[:, RELEVANT[0]] + x[:, RELEVANT[1]]), 0, 4)
    x[rng.random(x.shape) < missing] = np.nan
    return RankingDataset(x, labels, np.concatenate([[0], np.cumsum(lengths)]), rng.permutation(queries))


def linear(data):
    return np.nan_to_num(data.features) @ np.array([0, 0, 1.5, 0, 0.7, 1, 0, 0], np.float32)


def network(data, scaling="standard", seed=0, **options):
    """An untrained network: what it scores is nothing anybody would want, but follows from every feature."""
    torch.manual_seed(seed)
    scaled = fit_scaling(data, scaling)
    return Ranker(MLP(scaled.inputs, hidden=(6,), **options), scaled, Config(), torch.device("cpu"))


@pytest.mark.parametrize("permute", ["within", "across"])
def test_features_that_labels_follow_from_come_first_and_others_lose_nothing(permute):
    found = feature_importances(linear, made(), permute=permute)
    assert [one.features for one in found[:2]] == [("feature 3",), ("feature 6",)]
    assert found[0].low > 0 and found[1].low > 0
    needless = [one for one in found if one.features[0] in ("feature 1", "feature 2", "feature 4", "feature 7")]
    assert len(needless) == 4
    assert all((one.loss, one.low, one.high) == (0, 0, 0) for one in needless)


@pytest.mark.slow
def test_a_trained_ranker_needs_the_features_that_labels_follow_from():
    data = made(80, seed=1)
    ranker = rankgrad.NeuralRanker(model="linear", epochs=10, lr=0.2, random_state=0, device="cpu")
    ranker.fit(data.features, data.labels, qid=np.repeat(data.query_ids, data.lengths))
    test = made(seed=2)
    found = feature_importances(ranker.ranker_, test)
    qid = np.repeat(test.query_ids, test.lengths)
    assert ranker.feature_importances(test.features, test.labels, qid=qid) == found
    shuffled = np.random.default_rng(0).permutation(
        len(qid)
    )  # queries come in another order: the same but for the bootstrap's
    other = ranker.feature_importances(test.features[shuffled], test.labels[shuffled], qid=qid[shuffled])
    assert [one.features for one in other[:2]] == [one.features for one in found[:2]]
    with pytest.raises(ValueError, match="needs qid"):
        ranker.feature_importances(test.features, test.labels)
    assert {found[0].features, found[1].features} == {("feature 3",), ("feature 6",)}
    assert min(found[0].low, found[1].low) > max(one.high for one in found[2:])


@pytest.mark.parametrize("ranker", [linear, network(made())], ids=["function", "network"])
def test_what_is_constant_within_lists_is_not_missed_within_lists_by_a_pointwise_model(ranker):
    data = made()
    within, across = (
        {one.features[0]: one for one in feature_importances(ranker, data, permute=permute, repeats=2)}
        for permute in ("within", "across")
    )
    name = f"feature {CONSTANT + 1}"
    assert (within[name].loss, within[name].low, within[name].high) == (0, 0, 0)
    assert across[name].loss != 0


def test_a_loss_is_that_of_the_metric_on_permuted_lists_and_its_interval_is_over_queries():
    data, repeats, seed = made(missing=0.1), 3, 7
    found = {
        one.features[0]: one for one in feature_importances(linear, data, metric="map", repeats=repeats, seed=seed)
    }
    base = measure(linear(data), data, ["map"])["map"]
    for column in (2, 4):
        losses = []
        for repeat in range(repeats):
            order = permutation(data, "within", seed, column, repeat)
            features = data.features.copy()
            features[:, column] = features[order, column]
            permuted = dataclasses.replace(data, features=features)
            losses.append(base - measure(linear(permuted), permuted, ["map"])["map"])
        expected = with_interval(np.mean(losses, 0), np.nan)
        own = found[f"feature {column + 1}"]
        assert (own.loss, own.low, own.high) == pytest.approx([*expected.values()], abs=1e-12)
    assert expected["low"] == bootstrap_interval(np.mean(losses, 0), rounds=2_000)[0]


@pytest.mark.parametrize("scaling", ["standard", "quantile", "none"])
def test_a_ranker_scaled_once_loses_what_it_loses_scaled_each_time(scaling):
    data = made(20, missing=0.2)
    ranker = network(data, scaling)
    own = feature_importances(ranker, data, repeats=2)
    assert own == feature_importances(ranker.score_lists, data, repeats=2)
    assert len({one.loss for one in own}) > 4


def test_categories_are_permuted_like_numbers():
    data = made(20)
    x = data.features.copy()
    x[:, 1] = np.random.default_rng(0).integers(0, 3, len(x))
    data = dataclasses.replace(data, features=x, categories={1: ("a", "b", "c")})
    torch.manual_seed(0)
    scaling = fit_scaling(data, "standard")
    ranker = Ranker(MLP(scaling.inputs, hidden=(6,), categories=scaling.codes), scaling, Config(), torch.device("cpu"))
    assert feature_importances(ranker, data, repeats=2) == feature_importances(ranker.score_lists, data, repeats=2)


def test_a_gain_of_one_s_own_is_that_of_the_metric():
    data = made(20)
    gain = parse_metric("ndcg@5", (0, 0, 0, 0, 7))
    found = feature_importances(linear, data, metric=gain, repeats=1)
    assert found != feature_importances(linear, data, metric="ndcg@5", repeats=1)


def test_the_data_is_left_as_it_was_even_where_it_cannot_be_written():
    data = made(10)
    data.features.setflags(write=False)
    before = data.features.copy()
    first = feature_importances(linear, data)
    np.testing.assert_array_equal(data.features, before)
    assert feature_importances(linear, data) == first
    assert feature_importances(linear, data, seed=1) != first


def test_a_permutation_is_a_function_of_seed_feature_repeat_and_the_query():
    data = made(12)
    which = np.repeat(np.arange(12), data.lengths)
    within = permutation(data, "within", 0, 3, 1)
    np.testing.assert_array_equal(which[within], which)
    assert sorted(within) == sorted(permutation(data, "across", 0, 3, 1)) == list(range(len(which)))
    assert any(which[permutation(data, "across", 0, 3, 1)] != which)
    for other in ((1, 3, 1), (0, 4, 1), (0, 3, 2)):
        assert any(permutation(data, "within", *other) != within)
    reversed_lists = data.select(np.arange(12)[::-1])
    moved = permutation(reversed_lists, "within", 0, 3, 1)
    for query in range(12):
        own = within[data.offsets[query] : data.offsets[query + 1]] - data.offsets[query]
        start = reversed_lists.offsets[11 - query]
        np.testing.assert_array_equal(moved[start : start + data.lengths[query]] - start, own)


def test_all_orders_of_a_list_come_up_about_as_often():
    lists = RankingDataset(np.zeros((3, 1)), [0, 1, 2], [0, 3], [5])
    orders = [tuple(permutation(lists, "within", 0, 0, repeat)) for repeat in range(600)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6 and min(counts) > 60


def test_features_that_say_the_same_are_missed_together():
    data = made()
    copied = np.concatenate([data.features, 100 + np.exp(data.features[:, [2]])], 1)
    data = dataclasses.replace(data, features=copied, feature_names=[*"abcdefgh", "copy of c"])

    def either(data):
        return linear(dataclasses.replace(data, features=data.features[:, :8], feature_names=None)) + np.where(
            np.log(data.features[:, 8] - 100) > 0, 3.0, 0.0
        )

    alone = {one.features: one for one in feature_importances(either, data)}
    together = {one.features: one for one in feature_importances(either, data, correlated=0.9)}
    assert together["c", "copy of c"].loss > max(alone["c",].loss, alone["copy of c",].loss)
    assert together["f",] == alone["f",]
    assert sum(map(len, together)) == 9


def test_correlation_is_that_of_ranks_within_lists():
    from scipy.stats import rankdata

    data = made(30)
    x = data.features.round(1)
    x[:, 0] = -3 * x[:, 2] ** 3  # turned round, on another scale
    x[:, 1] = 1000 * np.repeat(np.arange(30), data.lengths) + x[:, 5]  # level differs from list to list
    data = dataclasses.replace(data, features=x)
    ranks = np.concatenate(
        [(rankdata(x[a:b], axis=0) - (b - a + 1) / 2) / (b - a) for a, b in zip(data.offsets[:-1], data.offsets[1:])]
    )
    varies = np.delete(np.arange(8), CONSTANT)
    found = correlation_within_lists(data)
    np.testing.assert_allclose(found[np.ix_(varies, varies)], np.corrcoef(ranks[:, varies].T), atol=0.02)
    assert not found[CONSTANT].any()
    assert correlated_groups(data) == [[0, 2], [1, 5], [3], [4], [6], [7]]
    assert correlated_groups(data, 1.0)[0] == [0, 2]


def test_in_a_group_every_two_are_correlated():
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(size=(200, 12)) * [3, *[1] * 11], 1)  # neighbours alike, the ends not
    data = RankingDataset(walk, np.ones(200), np.arange(0, 201, 10), np.arange(20))
    groups = correlated_groups(data, 0.85)
    likeness = np.abs(correlation_within_lists(data))
    assert sorted(column for group in groups for column in group) == list(range(12))
    assert 2 <= len(groups) < 12
    assert all(likeness[a, b] >= 0.85 for group in groups for a in group for b in group)
    assert correlated_groups(data, 1e-9) == [list(range(12))]


def test_missing_values_are_a_rank_of_their_own():
    x = np.array([[1.0, np.nan], [np.nan, 1.0], [np.nan, 1.0], [1.0, np.nan]])
    data = RankingDataset(x, [0, 1, 0, 1], [0, 4], [1])
    assert correlated_groups(data, 0.999) == [[0, 1]]
    lowest = RankingDataset([[np.nan, 1.0], [0.0, 2.0], [5.0, 3.0]], [0, 1, 0], [0, 3], [1])
    assert correlation_within_lists(lowest)[0, 1] == pytest.approx(1)


def test_degenerate_lists_lose_nothing():
    one = RankingDataset(np.ones((3, 2)), [1, 0, 2], [0, 1, 2, 3], [1, 2, 3])
    assert {(own.loss, own.low, own.high) for own in feature_importances(lambda d: d.features[:, 0], one)} == {
        (0, 0, 0)
    }
    assert correlated_groups(one) == [[0], [1]]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"metric": "ndgc@10"}, "ndgc"),
        ({"permute": "between"}, "'within', 'across'"),
        ({"repeats": 0}, "repeats"),
        ({"seed": 0.5}, "seed"),
        ({"correlated": 0}, "above 0"),
        ({"correlated": 1.5}, "1 at most"),
        ({"correlated": np.nan}, "above 0"),
    ],
)
def test_mistakes_are_said(options, fact):
    with pytest.raises(ValueError, match=fact):
        feature_importances(linear, made(5), **options)


def test_lists_that_cannot_lose_anything_and_what_cannot_score_are_refused():
    data = made(5)
    with pytest.raises(ValueError, match="no query has a relevant document"):
        feature_importances(linear, dataclasses.replace(data, labels=np.zeros(len(data.labels))))
    with pytest.raises(ValueError, match=r"cannot score with NeuralRanker.*ranker_"):
        feature_importances(rankgrad.NeuralRanker(), data)
    with pytest.raises(ValueError, match="not finite"):
        feature_importances(lambda data: np.full(len(data.labels), np.nan), data)


def test_a_network_that_looks_at_the_list_needs_what_stands_out_in_it():
    data = made(20)
    ranker = network(data, inputs="list")
    assert isinstance(ranker.model, nn.Module)
    found = feature_importances(ranker, data, repeats=1)
    assert {one.features[0] for one in found if one.loss} >= {f"feature {n}" for n in (1, 2, 3, 4)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_ranker_on_a_gpu_loses_what_it_loses_on_the_cpu():
    data = made(20, missing=0.1)
    ranker = network(data)
    on_gpu = dataclasses.replace(ranker, model=copy.deepcopy(ranker.model).cuda(), device=torch.device("cuda"))
    own, expected = (
        {one.features: one.loss for one in feature_importances(of, data, repeats=1)} for of in (on_gpu, ranker)
    )
    assert own == pytest.approx(expected, abs=1e-6)  # by name: their order may differ where two are equal
    found, expected = (attributions(of, data, 3, 4) for of in (on_gpu, ranker))
    assert found.score == pytest.approx(expected.score, abs=1e-6)
    amounts = ([one.amount for one in of.contributions] for of in (found, expected))
    np.testing.assert_allclose(*amounts, atol=1e-6)
