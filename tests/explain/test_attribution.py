"""What each feature gives to a score: sums to the difference for every model, and is exact where one can say what is right."""

import dataclasses

import numpy as np
import pytest
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import fit_scaling
from rankgrad.explain import attributions
from rankgrad.models import MLP, AveragedMembers, Linear, Members, SharedMLP, Transformer
from rankgrad.ranker import Ranker
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.training.config import Config


@pytest.fixture(autouse=True)
def _fewer_points(monkeypatch):
    monkeypatch.setattr("rankgrad.explain.attribution.LARGEST", 2**14)


def lists(seed=0, missing=0.0, documents=(9, 12, 1, 30)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(documents), 5)) * [1, 10, 0.1, 3, 1] + [0, 5, 0, 0, 0]
    x[rng.random(x.shape) < missing] = np.nan
    labels = rng.integers(0, 3, len(x))
    return RankingDataset(x, labels, np.cumsum([0, *documents]), [f"q{n}" for n in range(len(documents))])


MODELS = {
    "linear": lambda width: Linear(width),
    "mlp": lambda width: MLP(width, hidden=(16, 8)),
    "mlp of the list": lambda width: MLP(width, hidden=(16, 8), inputs="list"),
    "tanh": lambda width: MLP(width, hidden=(8,), tanh=True),
    "ordinal": lambda width: MLP(width, hidden=(8,), units=3),
    "transformer": lambda width: Transformer(width, width=8, layers=2, feedforward=16, heads=2),
    "members": lambda width: AveragedMembers(
        Members(width, ids=range(5), hidden=(8,), inputs="list", scale=[0, 0, 2, 0, 1])
    ),
    "shared": lambda width: SharedMLP(width, members=3, hidden=(8,)),
}


def ranker_of(name, data, scaling="standard", seed=0):
    torch.manual_seed(seed)
    scaled = fit_scaling(data, scaling)
    units = 3 if name == "ordinal" else 1
    return Ranker(MODELS[name](scaled.inputs).eval(), scaled, Config(), torch.device("cpu"), units)


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_amounts_sum_to_the_difference_of_the_scores(name, missing):
    data = lists(missing=missing)
    ranker = ranker_of(name, data)
    scores = ranker.score_lists(data)
    for document, against in ((3, None), (3, 5), (5, 3), (25, None), (25, 40)):
        found = attributions(ranker, data, document, against)
        total = sum(one.amount for one in found.contributions)
        assert found.score == pytest.approx(scores[document], abs=1e-5)
        assert total + found.remainder == pytest.approx(found.score - found.reference, abs=1e-12)
        assert abs(found.remainder) <= 2e-3 * max(1, abs(found.score - found.reference)), (name, document)
        if against is not None:
            assert found.reference == pytest.approx(scores[against], abs=1e-5)
        assert [one.feature for one in found.contributions] == [f"feature {n}" for n in range(1, 6)]


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_a_document_of_the_list_s_mean_in_its_place(name):
    data = lists()
    ranker = ranker_of(name, data, "none")
    found = attributions(ranker, data, 12)
    features = data.features.copy()
    features[12] = features[9:21].mean(0, dtype=np.float64)
    expected = ranker.score_lists(dataclasses.replace(data, features=features))[12]
    assert found.reference == pytest.approx(expected, abs=1e-5)


def test_a_linear_model_gives_weight_times_difference():
    data = lists()
    ranker = ranker_of("linear", data)
    weight = ranker.model.output.weight.detach().numpy()[0]
    x = ranker.scaling.apply(data.features)
    for against in (None, 7):
        found = attributions(ranker, data, 2, against)
        beside = x[:9].mean(0) if against is None else x[7]
        np.testing.assert_allclose([one.amount for one in found.contributions], weight * (x[2] - beside), atol=1e-6)
        assert abs(found.remainder) < 1e-9
        shown = data.features[:9].mean(0) if against is None else data.features[7]
        np.testing.assert_allclose([one.reference for one in found.contributions], shown, rtol=1e-6)
        np.testing.assert_array_equal([one.value for one in found.contributions], data.features[2])


def test_a_feature_the_score_does_not_follow_from_gives_nothing():
    data = lists()
    ranker = ranker_of("mlp", data)
    with torch.no_grad():
        ranker.model.layers[0].weight[:, 3] = 0
    assert attributions(ranker, data, 1, 4).contributions[3].amount == 0


@pytest.mark.parametrize("name", MODELS)
def test_why_not_is_why_turned_round(name):
    data = lists()
    ranker = ranker_of(name, data)
    a, b = (attributions(ranker, data, *pair) for pair in ((22, 30), (30, 22)))
    np.testing.assert_allclose(
        [one.amount for one in a.contributions], [-one.amount for one in b.contributions], atol=2e-3
    )


def test_a_missing_value_counts_as_its_feature():
    data = lists(missing=0.3)
    ranker = ranker_of("linear", data)
    assert len(ranker.scaling.indicators) == 5
    weight = ranker.model.output.weight.detach().numpy()[0]
    x = ranker.scaling.apply(data.features)
    terms = weight * (x[2] - x[7])
    found = attributions(ranker, data, 2, 7)
    np.testing.assert_allclose([one.amount for one in found.contributions], terms[:5] + terms[5:], atol=1e-6)


def test_several_rankers_give_the_mean_of_their_standardised_scores():
    data = lists()
    rankers = [ranker_of("mlp", data), ranker_of("transformer", data, "quantile", seed=1)]
    scores = mean_of_standardised([ranker.score_lists(data) for ranker in rankers], data.offsets)
    found = attributions(rankers, data, 15, 11)
    assert (found.score, found.reference) == pytest.approx((scores[15], scores[11]), abs=1e-5)
    assert abs(found.remainder) <= 2e-3


def test_what_cannot_be_explained_by_a_gradient_is_left_in_the_remainder():
    data = lists(documents=(2, 5))
    ranker = ranker_of("members", data)  # of two documents the standardised scores are -1 and 1, whatever they were
    found = attributions(ranker, data, 0, 1)
    assert found.score - found.reference == pytest.approx(
        sum(one.amount for one in found.contributions) + found.remainder, abs=1e-9
    )
    assert abs(found.remainder) > 0.3


def test_a_list_of_one_document_is_its_own_mean():
    data = lists()
    found = attributions(ranker_of("mlp", data), data, 21)
    assert [one.amount for one in found.contributions] == [0] * 5
    assert found.score == found.reference


def test_the_model_is_left_as_it_was():
    data = lists()
    ranker = ranker_of("mlp", data)
    before = {name: value.clone() for name, value in ranker.model.state_dict().items()}
    attributions(ranker, data, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in ranker.model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in ranker.model.parameters())


@pytest.mark.parametrize("pair", [(0, 9), (3, 3), (0, 99), (-1, None), (52, None)])
def test_only_documents_of_one_list_are_set_against_each_other(pair):
    data = lists()
    with pytest.raises(ValueError, match="expected"):
        attributions(ranker_of("linear", data), data, *pair)


# --- categories -------------------------------------------------------------------------------------------------------


def with_categories(seed=0):
    """Columns 1 and 3 hold codes: the texts of this dataset are not in the order of the model's."""
    data = lists(seed)
    x = data.features.copy()
    rng = np.random.default_rng(seed)
    x[:, 1], x[:, 3] = rng.integers(0, 3, len(x)), rng.integers(0, 2, len(x))
    x[4, 1] = np.nan
    levels = {1: ("red", "green", "blue"), 3: ("shop", "news")}
    return dataclasses.replace(data, features=x, categories=levels, feature_names=["a", "colour", "c", "kind", "e"])


CATEGORICAL = {
    "linear": lambda width, codes: Linear(width, categories=codes),
    "mlp of the list": lambda width, codes: MLP(width, hidden=(16, 8), inputs="list", categories=codes),
    "transformer": lambda width, codes: Transformer(width, width=8, layers=1, feedforward=16, categories=codes),
    "members": lambda width, codes: AveragedMembers(Members(width, ids=range(3), hidden=(8,), categories=codes)),
}


def of_categories(name, data):
    torch.manual_seed(0)
    scaling = fit_scaling(data, "standard")
    model = CATEGORICAL[name](scaling.inputs, scaling.codes).eval()
    for parameter in model.parameters():  # vectors start so small that they would hardly matter
        with torch.no_grad():
            parameter += 0.5 * torch.randn_like(parameter)
    return Ranker(model, scaling, Config(), torch.device("cpu"))


@pytest.mark.parametrize("name", CATEGORICAL)
def test_categories_give_their_share_and_the_sum_holds(name):
    data = with_categories()
    ranker = of_categories(name, data)
    scores = ranker.score_lists(data)
    for document, against in ((3, None), (3, 4), (30, 40)):
        found = attributions(ranker, data, document, against)
        assert found.score == pytest.approx(scores[document], abs=1e-5)
        assert abs(found.remainder) <= 5e-3 * max(1, abs(found.score - found.reference))
        if against is not None:
            assert found.reference == pytest.approx(scores[against], abs=1e-5)
            back = attributions(ranker, data, against, document)
            np.testing.assert_allclose(
                [one.amount for one in found.contributions], [-one.amount for one in back.contributions], atol=5e-3
            )
    assert found.contributions[1].value in ("red", "green", "blue")


def test_a_category_gives_what_its_vector_does_in_a_linear_model():
    data = with_categories()
    ranker = of_categories("linear", data)
    found = attributions(ranker, data, 3, 4)
    for column in (1, 3):
        features = data.features.copy()
        features[3, column] = features[4, column]
        changed = ranker.score_lists(dataclasses.replace(data, features=features))[3]
        assert found.contributions[column].amount == pytest.approx(found.score - changed, abs=1e-5)
    assert found.contributions[1].reference == "missing"
    texts = dataclasses.replace(
        data, features=data.features.copy(), categories={1: ("blue", "red", "green"), 3: ("shop", "news")}
    )
    texts.features[:, 1] = (data.features[:, 1] + 1) % 3  # the same texts, by other codes
    assert attributions(ranker, texts, 3, 4) == found


def test_the_mean_of_a_category_is_its_most_common_value():
    data = with_categories()
    ranker = of_categories("linear", data)
    found = attributions(ranker, data, 3)
    codes = data.features[:9, 1]
    common = max(range(3), key=lambda code: (codes == code).sum())
    assert found.contributions[1].reference == data.categories[1][common]
