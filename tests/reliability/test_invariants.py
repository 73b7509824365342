"""Every loss and metric against the invariants of `reliability.invariants`: the same 200 cases each time; thousands more by night."""

import dataclasses
import inspect
import math

import pytest
import torch
from reliability.invariants import GROUPS, PROMISES, SPECS, try_examples

from rankgrad.losses import LOSSES, rmse
from rankgrad.metrics import METRICS, ndcg


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSES, *METRICS])
def test_two_hundred_cases(name):
    tried, failure = try_examples(name, 200, None)
    assert not failure, failure
    assert tried >= 200


def test_the_promises_try_every_loss_and_metric_ten_thousand_times():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted([*LOSSES, *METRICS])
    assert sum(promise.times for promise in PROMISES) == 10_000 * (len(LOSSES) + len(METRICS))


def changed(scores=lambda s: s, labels=lambda y: y, mask=lambda m: m, values=lambda v: v):
    """rmse with something done to what it is given, or gives."""

    def loss(s, y, m=None, *, levels=5.0, weights=None, reduction="mean", check=None):
        m = torch.ones_like(y, dtype=torch.bool) if m is None else m
        options = {"levels": levels, "weights": weights, "reduction": reduction, "check": check}
        return values(rmse(scores(s), labels(y), mask(m), **options))

    return loss


BROKEN = {
    "padding": changed(scores=lambda s: s + 0 * s.sum(-1, keepdim=True)),
    "lists see each other": changed(scores=lambda s: s - s.nan_to_num(0, 0, 0).clamp(-9, 9).flatten()[0].detach()),
    "order of documents": changed(scores=lambda s: s * (1 + torch.arange(s.shape[-1]) / 100)),
    "half precision": changed(scores=lambda s: s.double()),
    "float64": changed(values=lambda v: v.float()),
    "not attached": changed(scores=lambda s: s.detach()),
    "a number too many": changed(values=lambda v: v[..., None]),
    "infinite": changed(values=lambda v: v / (v != v.detach().round())),
    "never refuses": lambda *given, **options: rmse(*given, **{**options, "check": False}),
    "never loud": changed(values=lambda v: v.nan_to_num()),
    "mean of the sum": lambda *given, reduction="mean", **options: rmse(
        *given, **options, reduction="sum" if reduction == "mean" else reduction
    ),
    "weights ignored": lambda *given, weights=None, **options: rmse(*given, **options),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_loss_that_breaks_one_of_them_is_found(what, monkeypatch):
    function = BROKEN[what]
    if "changed" not in function.__qualname__:
        function.__signature__ = inspect.signature(rmse)
    monkeypatch.setitem(SPECS, "rmse", dataclasses.replace(SPECS["rmse"], function=function))
    assert try_examples("rmse", 100, None, shrink=False)[1].startswith("rmse: ")


@pytest.mark.parametrize(
    "broken",
    [
        lambda scores, labels, mask=None, **options: 1.01 * ndcg(scores, labels, mask, **options),
        lambda scores, labels, mask=None, **options: ndcg(scores.flip(-1), labels.flip(-1), **options),
        lambda scores, labels, mask=None, **options: ndcg(scores.round(), labels, mask, **options),
        lambda scores, labels, mask=None, **options: ndcg(scores, labels, mask, **{**options, "empty": math.nan}),
    ],
)
def test_a_metric_that_breaks_one_of_them_is_found(broken, monkeypatch):
    broken.__signature__ = inspect.signature(ndcg)
    monkeypatch.setitem(METRICS, "ndcg", broken)
    assert try_examples("ndcg", 100, None, shrink=False)[1].startswith("ndcg: ")
