"""Metrics against their loops and against independent libraries; conventions; padding; refusals."""

import dataclasses
import math

import numpy as np
import pytest
import pytrec_eval
import torch
import torchmetrics.functional.retrieval as tm
from sklearn.metrics import dcg_score, ndcg_score

import rankgrad
from rankgrad.metrics import METRICS, parse_metric
from references.loops import METRIC_REFERENCES

every_metric = pytest.mark.parametrize("name", list(METRICS))
BINARY = ["map", "mrr", "precision", "recall", "hit_rate"]


def lists(count=30, width=12, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, width, generator=draw, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 5, (count, width), generator=draw)
    labels[0] = 0
    mask = torch.rand(count, width, generator=draw) < 0.8
    mask[1], mask[2] = False, torch.arange(width) == 4
    return scores, labels, mask


@every_metric
@pytest.mark.parametrize("k", [None, 1, 3, 10, 50])
@pytest.mark.parametrize("empty", [1.0, 0.0, math.nan])
def test_equals_its_loops(name, k, empty):
    scores, labels, mask = lists()
    scores[3] = scores[3].round()  # ties keep the input order
    values = METRICS[name](scores, labels, mask, k=k, empty=empty)
    assert values.shape == (30,) and values.dtype == torch.float64
    for s, y, m, value in zip(scores, labels, mask, values):
        expected = METRIC_REFERENCES[name](s[m].tolist(), y[m].tolist(), k=k, empty=empty)
        assert value.item() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", BINARY)
def test_threshold(name):
    scores, labels, mask = lists()
    values = METRICS[name](scores, labels, mask, threshold=3, k=5)
    for s, y, m, value in zip(scores, labels, mask, values):
        assert value.item() == pytest.approx(METRIC_REFERENCES[name](s[m].tolist(), y[m].tolist(), threshold=3, k=5))


@pytest.mark.parametrize("gain", ["linear", lambda y: y**3, [0, 1, 1.5, 8, 9]])
@pytest.mark.parametrize("name", ["ndcg", "dcg"])
def test_gains(name, gain):
    scores, labels, mask = lists()
    values = METRICS[name](scores, labels, mask, gain=gain, k=4)
    for s, y, m, value in zip(scores, labels, mask, values):
        assert value.item() == pytest.approx(METRIC_REFERENCES[name](s[m].tolist(), y[m].tolist(), gain=gain, k=4))


def test_err_max_label():
    scores, labels, mask = lists()
    values = METRICS["err"](scores, labels, mask, max_label=6, k=4)
    for s, y, m, value in zip(scores, labels, mask, values):
        assert value.item() == pytest.approx(METRIC_REFERENCES["err"](s[m].tolist(), y[m].tolist(), max_label=6, k=4))


# --- independent libraries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 1, 5, 12])
def test_agrees_with_scikit_learn(k):
    scores, labels, _ = lists()  # no ties: scikit-learn averages over them
    linear = rankgrad.ndcg(scores, labels, k=k, gain="linear", empty=0.0)
    exponential = rankgrad.ndcg(scores, labels, k=k, empty=0.0)
    total = METRICS["dcg"](scores, labels, k=k)
    for s, y, a, b, c in zip(scores, labels, linear, exponential, total):
        y_true, y_score = y[None].numpy(), s[None].numpy()
        assert a.item() == pytest.approx(ndcg_score(y_true, y_score, k=k), abs=1e-9)
        assert b.item() == pytest.approx(ndcg_score(2.0**y_true - 1, y_score, k=k), abs=1e-9)
        assert c.item() == pytest.approx(dcg_score(2.0**y_true - 1, y_score, k=k), abs=1e-9)


def test_agrees_with_trec_eval():
    scores, labels, _ = lists()
    measures = {"ndcg", "ndcg_cut.5", "map", "map_cut.5", "recip_rank", "P.5", "recall.5", "success.5"}
    qrel = {f"q{i}": {f"d{j}": int(y) for j, y in enumerate(row)} for i, row in enumerate(labels.tolist())}
    run = {f"q{i}": {f"d{j}": s for j, s in enumerate(row)} for i, row in enumerate(scores.tolist())}
    results = pytrec_eval.RelevanceEvaluator(qrel, measures).evaluate(run)
    ours = {
        "ndcg": rankgrad.ndcg(scores, labels, gain="linear", empty=0.0),
        "ndcg_cut_5": rankgrad.ndcg(scores, labels, gain="linear", k=5, empty=0.0),
        "map": rankgrad.average_precision(scores, labels),
        "map_cut_5": rankgrad.average_precision(scores, labels, k=5),
        "recip_rank": rankgrad.reciprocal_rank(scores, labels),
        "P_5": rankgrad.precision(scores, labels, k=5),
        "recall_5": rankgrad.recall(scores, labels, k=5),
        "success_5": rankgrad.hit_rate(scores, labels, k=5),
    }
    for i in range(len(scores)):
        for measure, values in ours.items():
            assert values[i].item() == pytest.approx(results[f"q{i}"][measure], abs=1e-9), measure


@pytest.mark.parametrize("k", [None, 5])
def test_agrees_with_torchmetrics(k):
    scores, labels, _ = lists(dtype=torch.float32)
    relevant = labels >= 1
    for i in range(1, len(scores)):
        s, y, r = scores[i] - scores[i].min() + 1, labels[i], relevant[i]  # it drops documents with scores below 0
        pairs = [
            (rankgrad.ndcg(s, y, k=k, gain="linear", empty=0.0), tm.retrieval_normalized_dcg(s, y, top_k=k)),
            (rankgrad.reciprocal_rank(s, y, k=k), tm.retrieval_reciprocal_rank(s, r, top_k=k)),
            (rankgrad.precision(s, y, k=k), tm.retrieval_precision(s, r, top_k=k)),
            (rankgrad.recall(s, y, k=k), tm.retrieval_recall(s, r, top_k=k)),
            (rankgrad.hit_rate(s, y, k=k), tm.retrieval_hit_rate(s, r, top_k=k)),
        ]
        if k is None:  # torchmetrics divides AP@k by the relevant documents found, trec_eval by all of them
            pairs.append((rankgrad.average_precision(s, y), tm.retrieval_average_precision(s, r)))
        for ours, theirs in pairs:
            assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


# --- conventions and inputs -------------------------------------------------------------------------------------------


def test_ties_keep_the_input_order():
    scores = torch.zeros(1, 3)
    assert rankgrad.reciprocal_rank(scores, torch.tensor([[0, 0, 1]])).item() == pytest.approx(1 / 3)
    assert rankgrad.reciprocal_rank(scores, torch.tensor([[1, 0, 0]])).item() == 1
    wide = torch.zeros(1, 1000)
    labels = torch.zeros(1, 1000)
    labels[0, 700] = 1
    assert rankgrad.reciprocal_rank(wide, labels).item() == pytest.approx(1 / 701)


def test_the_first_relevant_document_counts_not_the_largest_label():
    assert rankgrad.reciprocal_rank(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 4, 0])).item() == 1


def test_defaults_for_empty_lists():
    scores, labels = torch.randn(2, 3), torch.zeros(2, 3)
    for name, metric in METRICS.items():
        assert metric(scores, labels).tolist() == ([1.0, 1.0] if name == "ndcg" else [0.0, 0.0])


@every_metric
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1.0])
def test_what_lies_under_the_padding_cannot_matter(name, poison):
    scores, labels, mask = lists()
    expected = METRICS[name](scores, labels, mask, k=3)
    dirty = METRICS[name](scores.masked_fill(~mask, poison), labels.double().masked_fill(~mask, poison), mask, k=3)
    assert torch.equal(dirty, expected)


@every_metric
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), (1,), (2, 3, 4)])
def test_shapes(name, shape):
    assert METRICS[name](torch.randn(shape), torch.ones(shape)).shape == shape[:-1]


@every_metric
@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64)],
)  # fmt: skip
def test_dtypes(name, given, computed):
    scores, labels, mask = lists(dtype=given)
    values = METRICS[name](scores, labels, mask)
    assert values.dtype == computed
    torch.testing.assert_close(values.double(), METRICS[name](scores.double(), labels, mask), rtol=1e-6, atol=1e-7)


@every_metric
def test_bad_values(name):
    scores, labels, mask = lists()
    mask[5] = True
    good = METRICS[name](scores, labels, mask)
    scores[5, 2] = math.nan
    with pytest.raises(ValueError, match=r"scores.*nan.*\(5, 2\)"):
        METRICS[name](scores, labels, mask)
    values = METRICS[name](scores, labels, mask, check=False)
    others = torch.arange(len(scores)) != 5
    assert values[5].isnan() and torch.equal(values[others], good[others])


@every_metric
@pytest.mark.parametrize("k", [0, -1, 2.5, "3"])
def test_cut_offs_are_checked(name, k):
    with pytest.raises(ValueError, match="^k must be None"):
        METRICS[name](torch.randn(3), torch.ones(3), k=k)


@every_metric
@pytest.mark.parametrize("empty", ["x", None, math.inf, True])
def test_the_rule_for_empty_lists_is_checked(name, empty):
    with pytest.raises(ValueError, match="^empty must be a finite number, or NaN"):
        METRICS[name](torch.randn(3), torch.ones(3), empty=empty)


def test_names():
    assert set(METRIC_REFERENCES) == set(METRICS)
    scores, labels, mask = lists()
    for name in ("ndcg@10", "map", "mrr@10", "err@10", "precision@5", "recall@10"):
        base, _, k = name.partition("@")
        expected = METRICS[base](scores, labels, mask, k=int(k) if k else None)
        assert torch.equal(parse_metric(name)(scores, labels, mask), expected)
    for bad in ("ndgc@10", "ndcg@", "ndcg@0", "ndcg@ten", "ndcg@-1", "", None):
        with pytest.raises(ValueError, match="is not a metric"):
            parse_metric(bad)
    with pytest.raises(ValueError, match="did you mean 'ndcg'"):
        parse_metric("ndgc@10")
    for written, name in (("NDCG@10", "ndcg@10"), ("MAP", "map"), (" Mrr @ 5 ", "mrr@5"), ("Hit_Rate@1", "hit_rate@1")):
        assert parse_metric(written) == parse_metric(name)
    for others, ours in (("average_precision", "map"), ("Mean_Average_Precision", "map"), ("pre@5", "precision")):
        with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
            parse_metric(others)


def test_the_gain_of_a_metric_by_name_is_that_of_its_function():
    scores, labels, mask = lists()
    table = (0, 1, 1.5, 8, 9)
    expected = rankgrad.ndcg(scores, labels, mask, k=4, gain=table)
    assert torch.equal(parse_metric("ndcg@4", table)(scores, labels, mask), expected)
    assert torch.equal(
        parse_metric("map", table)(scores, labels, mask), rankgrad.average_precision(scores, labels, mask)
    )


def test_a_function_of_ones_own_as_a_metric():
    scores, labels, mask = lists()

    def first(y_true, y_pred):
        return y_true[np.argmax(y_pred)]

    def of_groups(y_true, y_pred, weight, group):
        assert weight is None and group.tolist() == [len(y_true)]
        return "first", y_true[np.argmax(y_pred)], True

    def of_tensors(scores, labels, mask):
        best = scores.masked_fill(~mask, -math.inf).argmax(-1, keepdim=True)
        return labels.gather(-1, best)[..., 0].to(scores.dtype)

    filled = mask.any(-1)
    scores, labels, mask = scores[filled], labels[filled], mask[filled]
    expected = [y[m][s[m].argmax()].item() for s, y, m in zip(scores, labels, mask)]
    for function in (first, of_groups, of_tensors):
        metric = parse_metric(function)
        assert metric.name == function.__name__ and not metric.takes_gain
        assert metric(scores, labels, mask, empty=math.nan, check=False).tolist() == expected
        both = metric(torch.stack([scores, -scores]), labels.expand(2, -1, -1), mask.expand(2, -1, -1))
        assert both.shape == (2, len(scores)) and both[0].tolist() == expected
        assert parse_metric(metric) is metric
    assert parse_metric(rankgrad.ndcg) == parse_metric("ndcg")
    for bad, words in (
        (lambda y_true, y_pred: ("loss", 1.0, False), "lower is better"),
        (lambda y_true, y_pred: "good", "expected a number"),
        (lambda y_true, y_pred: [("a", 1.0, True), ("b", 2.0, True)], "expected a number"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_metric(bad)(scores, labels, mask)
    with pytest.raises(ValueError, match="expected f"):
        parse_metric(lambda y: 1.0)


@every_metric
def test_a_metric_has_its_cut_off_and_its_rule_for_empty_lists_as_fields(name):
    whole, cut = parse_metric(name), parse_metric(f"{name}@7")
    assert (whole.name, whole.function, whole.k) == (name, METRICS[name], None)
    assert (cut.name, cut.function, cut.k) == (f"{name}@7", METRICS[name], 7)
    assert whole.empty == cut.empty == (1.0 if name == "ndcg" else 0.0)
    assert whole.takes_gain == (name in ("ndcg", "dcg"))
    scores, labels, mask = lists()
    nothing = ~((labels > 0) & mask).any(-1)
    assert nothing.any() and (cut(scores, labels, mask)[nothing] == cut.empty).all()
    marked = cut(scores, labels, mask, empty=math.nan)  # what is given comes before the metric's own
    assert torch.equal(marked.isnan(), nothing)
    other = dataclasses.replace(cut, empty=0.25)
    assert (other(scores, labels, mask)[nothing] == 0.25).all()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cut.k = 3


def test_no_gradient_and_no_python_loop_are_needed():
    scores = torch.randn(2000, 50, requires_grad=True)
    value = rankgrad.ndcg(scores, torch.randint(0, 5, (2000, 50)), k=10)
    assert not value.requires_grad and np.isfinite(value.numpy()).all()
