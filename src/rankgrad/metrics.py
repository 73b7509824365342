"""Metrics: `metric(scores, labels, mask=None, *, k=None, empty=...)` of tensors [..., L] -> one value per list, [...].

Documents are ranked by score, best first. Equal scores keep their input order (a stable sort, as LightGBM and XGBoost
have it). `k` cuts the ranking, None takes it whole. A list without a relevant document (y > 0 for the graded metrics,
y >= threshold for the binary ones) gets the value `empty`: 1 for `ndcg`, as in the paper, LightGBM and XGBoost, and 0
for all others unless told otherwise; `float("nan")` marks such lists, so that `nanmean` leaves them out. `check` is that
of the losses. Values are float32, or float64 for float64 scores.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    threshold = positive("threshold", threshold)
    lists = prepare(scores, labels, mask, check)
    relevant = lists.labels >= threshold
    by_rank = top(ranks(lists.scores).reciprocal(), k)
    value = (_ranked(relevant, lists) * by_rank).amax(-1)
    return _finish(value, lists, value == 0 if k is None else ~relevant.any(-1), empty)


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


SUGGESTED = {  # what others call them
    "mean_average_precision": "map", "average_precision": "map", "ap": "map", "reciprocal_rank": "mrr", "rr": "mrr",
    "mean_reciprocal_rank": "mrr", "pre": "precision", "p": "precision", "hits": "hit_rate", "success": "hit_rate",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A metric by name: its function, its cut-off and its rule for lists without a relevant document.

    A function of one's own gives a value per list and may leave out what it does not need of `k`, `gain`, `empty` and `check`.
    """

    name: str
    function: Callable[..., Tensor]
    k: int | None
    empty: float  # the value of a list without a relevant document
    gain: Gain = "exp2"  # what a label is worth, where the function takes gains

    def __call__(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """One value per list; `options` are those of the function, `empty` unless given is that of the metric."""
        given = {"k": self.k, "empty": self.empty, "gain": self.gain, **options}
        unknown = {"k", "empty", "gain", "check"} - _parameters(self.function)
        return self.function(scores, labels, mask, **{key: value for key, value in given.items() if key not in unknown})

    @property
    def takes_gain(self) -> bool:
        """Whether it is made of the gains of labels, 2^y - 1 for instance, which the largest labels lack."""
        return "gain" in _parameters(self.function)


def parse_metric(name: str | Metric | Callable[..., Any], gain: Gain = "exp2") -> Metric:
    """The metric a name such as "ndcg@10" or "map" stands for, in upper or lower case; or a function of one's own as a metric.

    - `name`: of `METRICS`, `@k` for a cut-off. Or a function: with a parameter `mask` one like those of this module, of tensors
      [..., L] -> [...]; else one of a single list, `f(y_true, y_pred)` of arrays [n] -> a number, NaN where the list is to be
      left out of the mean. As for LightGBM it may also take `weight` (None) and `group` ([n]), and give (name, number, True).
    - `gain`: what a label is worth to `ndcg` and `dcg`, as in these functions.

    >>> parse_metric("Precision@2")(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 1])).item()
    0.5
    >>> def top(y_true, y_pred):
    ...     return y_true[y_pred.argmax()]
    >>> parse_metric(top)(torch.tensor([[3.0, 2.0], [1.0, 2.0]]), torch.tensor([[0, 1], [0, 2]])).tolist()
    [0.0, 2.0]
    """
    if isinstance(name, Metric):
        return name
    if callable(name):
        return _own_metric(name, gain)
    base, at, depth = name.strip().partition("@") if isinstance(name, str) else (repr(name), "", "")
    known, depth = base.strip().lower(), depth.strip()
    if known not in METRICS:
        near = [SUGGESTED[known]] if known in SUGGESTED else difflib.get_close_matches(known, METRICS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is not a metric; expected one of {', '.join(METRICS)}, with @k for a cut-off{hint}")
    if at and not (depth.isascii() and depth.isdigit() and int(depth) >= 1):
        raise ValueError(f"{name!r} is not a metric; expected a whole number, 1 or above, after the @")
    function = METRICS[known]
    empty = float(inspect.signature(function).parameters["empty"].default)
    return Metric(f"{known}{at}{depth}", function, int(depth) if at else None, empty, gain)


@functools.lru_cache(256)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of what a function takes; of **keywords, all that a metric may be given."""
    taken = inspect.signature(function).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return frozenset([*taken, *(["mask", "k", "empty", "gain", "check"] if anything else [])])


def _own_metric(function: Callable[..., Any], gain: Gain) -> Metric:
    """A caller's function as a metric; one of ours by its name."""
    ours = next((name for name, known in METRICS.items() if known is function), None)
    if ours is not None:
        return parse_metric(ours, gain)
    name = getattr(function, "__name__", type(function).__name__)
    if "mask" in _parameters(function):
        return Metric(name, function, None, math.nan, gain)
    places = [p for p in inspect.signature(function).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if len(places) < 2:
        raise ValueError(
            f"the metric {name} takes {len(places)} arguments; expected f(y_true, y_pred) of one list, or f(scores, labels, mask)"
        )

    def of_lists(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        length = scores.shape[-1]
        real = np.ones(scores.shape, bool) if mask is None else mask.cpu().numpy()
        lists = (array.reshape(-1, length) for array in (scores.cpu().numpy(), labels.cpu().numpy(), real))
        values = [_of_one(y[m], s[m]) for s, y, m in zip(*lists)]
        return torch.tensor(values, dtype=scores.dtype, device=scores.device).view(scores.shape[:-1])

    def _of_one(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        found = function(*(y_true, y_pred, None, np.array([len(y_true)]))[: len(places)])
        if isinstance(found, tuple) and len(found) == 3:  # as LightGBM has it
            _, found, higher = found
            if not higher:
                raise ValueError(f"the metric {name} says that lower is better; expected higher; give its negative")
        try:
            return float(found)
        except (TypeError, ValueError):
            raise ValueError(f"the metric {name} gave {found!r}; expected a number for each list") from None

    return Metric(name, of_lists, None, math.nan, gain)


def _has_kernel(backend: str, scores: Tensor, *numbers: float) -> bool:
    return (
        not torch.compiler.is_compiling()
        and in_one_launch(backend, scores, None, LONGEST_COMPARED, *numbers)
        and has_values(scores)
    )


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
