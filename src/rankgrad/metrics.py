"""Metrics: `metric(scores, labels, mask=None, *, k=None, empty=...)` of tensors [..., L] -> one value per list, [...].

Documents are ranked by score, best first. Equal scores keep their input order (a stable sort, as LightGBM and XGBoost
have it). `k` cuts the ranking, None takes it whole. A list without a relevant document (y > 0 for the graded metrics,
y >= threshold for the binary ones) gets the value `empty`: 1 for `ndcg`, as in the paper, LightGBM and XGBoost, and 0
for all others unless told otherwise; `float("nan")` marks such lists, so that `nanmean` leaves them out. `check` is that
of the losses. Values are float32, or float64 for float64 scores.
"""

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.checks import cutoff, positive
from rankgrad.core.explain import explaining
from rankgrad.core.gains import Gain, cascade, check_max_label, discounts, gains, ideal_dcg, ranks, stop_chances, top
from rankgrad.core.lists import Lists, check_for_kernel, order_by_score, poison, prepare
from rankgrad.core.operators import has_values
from rankgrad.kernels import LONGEST_COMPARED, in_one_launch, metric_kernel

explained = explaining()


@explained
def ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exp2",
    empty: float = 1.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """NDCG@k = DCG@k / maxDCG@k.

    >>> round(ndcg(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 2, 1]), k=2).item(), 6)
    0.521296
    """
    k = cutoff(k)
    if _has_kernel(backend, scores):
        return _by_kernel("ndcg", scores, labels, mask, k, empty, check, gain=gain)
    lists = prepare(scores, labels, mask, check, gain=gain)
    gain_values = gains(lists.labels, lists.mask, gain)
    ideal = ideal_dcg(gain_values, k)
    value = _dcg(lists, gain_values, k) / torch.where(ideal > 0, ideal, 1.0)
    return _finish(value, lists, ~(lists.labels > 0).any(-1) | (ideal <= 0), empty)


@explained
def dcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exp2",
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """DCG@k = sum_{j <= k} g(y_(j)) / log2(j + 1), y_(j) the label at rank j.

    >>> dcg(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2, 0, 1])).item()
    3.5
    """
    k = cutoff(k)
    if _has_kernel(backend, scores):
        return _by_kernel("dcg", scores, labels, mask, k, empty, check, gain=gain)
    lists = prepare(scores, labels, mask, check, gain=gain)
    value = _dcg(lists, gains(lists.labels, lists.mask, gain), k)
    return _finish(value, lists, ~(lists.labels > 0).any(-1), empty)


@explained
def average_precision(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """AP@k = (1 / R) sum of precision@i over the relevant ranks i <= k; R counts all relevant documents, as in trec_eval.

    >>> round(average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1])).item(), 6)
    0.583333
    """
    k = cutoff(k)
    if _has_kernel(backend, scores, threshold):
        return _by_kernel("map", scores, labels, mask, k, empty, check, option=positive("threshold", threshold))
    lists, relevant, total = _relevance(scores, labels, mask, threshold, check)
    hits = _ranked(relevant, lists).double()
    value = top(hits * hits.cumsum(-1) / ranks(hits), k).sum(-1) / total.clamp(min=1)
    return _finish(value, lists, total == 0, empty)


@explained
def reciprocal_rank(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """RR@k = 1 / rank of the first relevant document, 0 if it stands below k.

    >>> reciprocal_rank(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 2])).item()
    0.5
    """
    k = cutoff(k)
    if _has_kernel(backend, scores, threshold):
        return _by_kernel("mrr", scores, labels, mask, k, empty, check, option=positive("threshold", threshold))
    lists, relevant, total = _relevance(scores, labels, mask, threshold, check)
    hits = _ranked(relevant, lists).double()
    return _finish(top(hits / ranks(hits), k).amax(-1), lists, total == 0, empty)


@explained
def err(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    max_label: float = 4.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """ERR@k (Chapelle et al. 2009) = sum_{i <= k} (p_i / i) prod_{m < i} (1 - p_m), p = (2^y - 1) / 2^max_label.

    Labels above `max_label` count as `max_label`.

    >>> err(torch.tensor([2.0, 1.0]), torch.tensor([1, 4])).item()
    0.501953125
    """
    k, max_label = cutoff(k), positive("max_label", max_label)
    if _has_kernel(backend, scores, max_label):
        check_max_label(max_label)
        return _by_kernel("err", scores, labels, mask, k, empty, check, option=max_label)
    lists = prepare(scores, labels, mask, check)
    chances = stop_chances(lists.labels, lists.mask, max_label)
    value = cascade(_ranked(chances, lists), k, constant=True)
    return _finish(value, lists, ~(lists.labels > 0).any(-1), empty)


@explained
def precision(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Precision@k = relevant documents among the first k, divided by k (also where the list is shorter, as in trec_eval).

    >>> precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1]), k=2).item()
    0.5
    """
    k = cutoff(k)
    if _has_kernel(backend, scores, threshold):
        return _by_kernel("precision", scores, labels, mask, k, empty, check, option=positive("threshold", threshold))
    lists, relevant, total = _relevance(scores, labels, mask, threshold, check)
    depth = lists.counts.clamp(min=1) if k is None else k
    return _finish(_found(relevant, total, lists, k) / depth, lists, total == 0, empty)


@explained
def recall(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Recall@k = relevant documents among the first k, divided by all relevant documents.

    >>> recall(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1]), k=2).item()
    0.5
    """
    k = cutoff(k)
    if _has_kernel(backend, scores, threshold):
        return _by_kernel("recall", scores, labels, mask, k, empty, check, option=positive("threshold", threshold))
    lists, relevant, total = _relevance(scores, labels, mask, threshold, check)
    return _finish(_found(relevant, total, lists, k) / total.clamp(min=1), lists, total == 0, empty)


@explained
def hit_rate(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    threshold: float = 1.0,
    empty: float = 0.0,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """1 if a relevant document stands among the first k, else 0.

    >>> hit_rate(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1]), k=1).item()
    0.0
    """
    k = cutoff(k)
    if _has_kernel(backend, scores, threshold):
        return _by_kernel("hit_rate", scores, labels, mask, k, empty, check, option=positive("threshold", threshold))
    lists, relevant, total = _relevance(scores, labels, mask, threshold, check)
    return _finish(_found(relevant, total, lists, k).clamp(max=1), lists, total == 0, empty)


METRICS: dict[str, Callable[..., Tensor]] = {
    "ndcg": ndcg,
    "dcg": dcg,
    "map": average_precision,
    "mrr": reciprocal_rank,
    "err": err,
    "precision": precision,
    "recall": recall,
    "hit_rate": hit_rate,
}


@dataclass(frozen=True)
class Metric:
    """A metric by name: its function, its cut-off and its rule for lists without a relevant document."""

    name: str
    function: Callable[..., Tensor]
    k: int | None
    empty: float  # the value of a list without a relevant document

    def __call__(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """One value per list; `options` are those of the function, `empty` unless given is that of the metric."""
        return self.function(scores, labels, mask, **{"k": self.k, "empty": self.empty, **options})

    @property
    def takes_gain(self) -> bool:
        """Whether it is made of the gains 2^y - 1, which the largest labels lack."""
        return "gain" in inspect.signature(self.function).parameters


def parse_metric(name: str) -> Metric:
    """The metric a name such as "ndcg@10" or "map" stands for.

    >>> parse_metric("precision@2")(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1])).item()
    0.5
    """
    base, at, depth = name.partition("@") if isinstance(name, str) else (repr(name), "", "")
    if base not in METRICS:
        near = difflib.get_close_matches(base, METRICS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is not a metric; expected one of {', '.join(METRICS)}, with @k for a cut-off{hint}")
    if at and not (depth.isascii() and depth.isdigit() and int(depth) >= 1):
        raise ValueError(f"{name!r} is not a metric; expected a whole number, 1 or above, after the @")
    function = METRICS[base]
    empty = float(inspect.signature(function).parameters["empty"].default)
    return Metric(name, function, int(depth) if at else None, empty)


def _has_kernel(backend: str, scores: Tensor, *numbers: float) -> bool:
    return in_one_launch(backend, scores, None, LONGEST_COMPARED, *numbers) and has_values(scores)


def _by_kernel(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    k: int | None,
    empty: float,
    check: bool | None,
    *,
    gain: Gain = "linear",
    option: float = 0.0,
) -> Tensor:
    known = check_for_kernel(scores, labels, mask, gain=gain, reduction="none", check=check)
    return metric_kernel(name, scores, labels, mask, *known, k, _empty_value(empty), option)


def _relevance(
    scores: Tensor, labels: Tensor, mask: Tensor | None, threshold: float, check: bool | None
) -> tuple[Lists, Tensor, Tensor]:
    """The lists, which documents are relevant ([..., L] bool), and how many are in each list ([...] float64)."""
    threshold = positive("threshold", threshold)
    lists = prepare(scores, labels, mask, check)
    relevant = lists.labels >= threshold  # labels are 0 under the padding
    return lists, relevant, relevant.sum(-1, dtype=torch.float64)


def _ranked(values: Tensor, lists: Lists) -> Tensor:
    """Values of the documents from the best score to the worst, [..., L]."""
    return values.gather(-1, order_by_score(lists.scores, lists.padding))


def _found(relevant: Tensor, total: Tensor, lists: Lists, k: int | None) -> Tensor:
    """How many relevant documents stand among the first k, [...] float64."""
    return total if k is None else top(_ranked(relevant, lists).double(), k).sum(-1)


def _dcg(lists: Lists, gain_values: Tensor, k: int | None) -> Tensor:
    ranked = _ranked(gain_values, lists)
    return (ranked * discounts(ranked.shape[-1], k, ranked.device)).sum(-1)


def _finish(value: Tensor, lists: Lists, is_empty: Tensor, empty: float) -> Tensor:
    """The rule for empty lists, NaN for unsound ones, and the scores' dtype."""
    value = value.masked_fill(is_empty, _empty_value(empty))
    return poison(value, lists).to(lists.scores.dtype)


def _empty_value(empty: float) -> float:
    try:
        fill = math.inf if isinstance(empty, (bool, str)) else float(empty)
    except TypeError:
        fill = math.inf
    if abs(fill) == math.inf:
        raise ValueError(f"empty must be a finite number, or NaN to mark empty lists, got {empty!r}")
    return fill
