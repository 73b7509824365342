"""Scores in the dataset's order, every query measured once, dropout off, and never a plausible wrong number."""

import numpy as np
import pytest
import torch
from torch import nn

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.synthetic import synthetic
from rankgrad.metrics import average_precision, ndcg
from rankgrad.models import MLP, Transformer
from rankgrad.training.evaluate import can_choose, evaluate, evaluate_and_score, mean, measure, score, summarise

CPU = torch.device("cpu")
DATA = synthetic("tiny", "train")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(136, width=8, layers=1, feedforward=8, dropout=0.5).train()


def alone(model, query):
    rows = slice(DATA.offsets[query], DATA.offsets[query + 1])
    model.eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(DATA.features[rows])[None])[0]
    model.train()
    return scores, torch.from_numpy(DATA.labels[rows])


def test_scores_are_those_of_lists_alone_in_the_dataset_s_order(model, monkeypatch):
    monkeypatch.setattr("rankgrad.training.evaluate.LISTS_AT_ONCE", 7)
    monkeypatch.setattr("rankgrad.training.evaluate.DOCUMENTS_AT_ONCE", 60)
    scores = score(model, DATA, device=CPU)
    expected = torch.cat([alone(model, query)[0] for query in range(len(DATA))])
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
    values, measured = evaluate_and_score(model, DATA, ["map"], device=CPU)
    np.testing.assert_array_equal(measured, scores)
    np.testing.assert_array_equal(values["map"], evaluate(model, DATA, ["map"], device=CPU)["map"])


def test_per_query_values_are_the_metric_with_nan_at_empty_queries(model):
    values = evaluate(model, DATA, ["ndcg@5", "map"], device=CPU)
    assert list(values) == ["ndcg@5", "map"]
    empty = 0
    for query in range(len(DATA)):
        scores, labels = alone(model, query)
        if labels.max() > 0:
            assert values["ndcg@5"][query] == pytest.approx(ndcg(scores.double(), labels, k=5).item(), abs=1e-12)
            assert values["map"][query] == pytest.approx(average_precision(scores.double(), labels).item(), abs=1e-12)
        else:
            empty += 1
            assert np.isnan(values["ndcg@5"][query]) and np.isnan(values["map"][query])
    assert empty == DATA.describe().empty_queries > 0


def test_dropout_is_off_while_scoring_and_on_again_afterwards(model):
    assert model.training
    assert np.array_equal(score(model, DATA, device=CPU), score(model, DATA, device=CPU))
    assert model.training and torch.is_grad_enabled()
    model.eval()
    score(model, DATA, device=CPU)
    assert not model.training
    model.train()


def test_several_units_are_ranked_by_the_sum_of_their_sigmoids():
    torch.manual_seed(0)
    model = MLP(136, hidden=(4,), units=3).eval()
    expected = model(torch.from_numpy(DATA.features)[None]).sigmoid().sum(-1)[0]
    np.testing.assert_allclose(score(model, DATA, device=CPU), expected.detach().numpy(), atol=1e-6)


def test_given_scores_are_measured_like_a_model_s(model):
    scores = score(model, DATA, device=CPU)
    for name, values in measure(scores, DATA, ["ndcg@10", "mrr"]).items():
        np.testing.assert_array_equal(values, evaluate(model, DATA, [name], device=CPU)[name])


def test_given_scores_keep_all_their_digits_and_their_ties():
    data = RankingDataset(np.zeros((5, 1)), [0, 2, 1, 0, 1], [0, 3, 5], [1, 2])
    close = 1 + np.array([0, 2, 1, 0, 0]) * 1e-15  # equal in float32
    assert measure(close, data, ["ndcg"])["ndcg"].tolist() == [1.0, pytest.approx(1 / np.log2(3))]
    assert measure(np.zeros(5), data, ["mrr"])["mrr"].tolist() == [0.5, 0.5]
    assert measure(np.array([-3, 10**9, 5, 1, 2]), data, ["ndcg"])["ndcg"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="scores have shape"):
        measure(np.zeros(4), data, ["ndcg"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_an_error_not_a_good_ranking(bad):
    class Broken(nn.Module):
        def forward(self, features, mask):
            return torch.where(features[..., 0] == features[:, :1, 0], bad, 0.0)

    with pytest.raises(ValueError, match=r"query \d+ .*not finite.* \d+ more"):
        evaluate(Broken(), DATA, ["ndcg"], device=CPU)
    scores = np.zeros(len(DATA.labels))
    scores[DATA.offsets[3]] = bad
    with pytest.raises(ValueError, match=f"query {DATA.query_ids[3]} .*not finite"):
        measure(scores, DATA, ["ndcg"])


def test_the_three_rules_for_empty_queries():
    values = {"map": np.array([0.5, np.nan, 0.25, np.nan])}
    assert summarise(values)["map"] == {"empty=1": 0.6875, "empty=0": 0.1875, "skipped": 0.375}
    assert np.isnan(mean(np.array([np.nan]), np.nan)) and mean(np.array([np.nan]), 1.0) == 1.0


def test_labels_whose_gain_overflows_do_not_look_like_empty_queries():
    features, offsets = np.zeros((4, 1), np.float32), np.array([0, 2, 4])
    for label in (1000.0, 1001.0):
        data = RankingDataset(features, np.array([0, 1, 0, label]), offsets, np.array(["a", "b"]))
        assert np.isfinite(measure(np.arange(4), data, ["map", "mrr"])["map"]).all()
        assert measure(np.arange(4), data, ["err"])["err"].tolist() == [1 / 16, 15 / 16]  # labels above 4 count as 4
        if label == 1000:
            assert measure(np.arange(4), data, ["ndcg@2", "dcg"])["ndcg@2"].tolist() == [1, 1]
        for metric in ("ndcg@2", "dcg") if label > 1000 else ():
            with pytest.raises(ValueError, match=f"label 1001 of query b .*{metric}.*1000 at most.*such as map"):
                measure(np.arange(4), data, ["map", metric])


def test_a_metric_can_choose_where_a_query_is_not_empty_to_it():
    data = RankingDataset(np.zeros((4, 1)), [0, 0, 0, 0.5], [0, 2, 4], [1, 2])
    assert can_choose(data, "ndcg") and not can_choose(data, "map")  # which counts documents of label 1 and above
