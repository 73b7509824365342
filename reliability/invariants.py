"""What every loss and metric owes its callers, tried on cases that hypothesis draws: lists of any shape, padding anywhere, scores
from denormal to the largest there are, ties, grades from none to hundreds. One drawn case is held against all of these:

    values have the lists' shape and dtype, are finite, and so is the gradient, in the scores' dtype and 0 under the padding
    what lies under the padding, leading dimensions and memory layout change no bit; the same twice is the same
    a list alone, without its padding and in another order of documents, has the same value and gradient
    a list that cannot teach is 0, and so is its gradient; `sum` and `mean` are those of the lists' values
    weights of one are no weights, a weight of zero takes a document out
    a bad value of a real document is refused, or makes its own list NaN and no other
    metrics lie within 0 and 1, see only the order of the scores, ties as they came; NDCG of the perfect order is 1
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed as seeded, settings, strategies as st
from torch import Tensor

from rankgrad.losses import LOSS_TABLE, LossSpec
from rankgrad.metrics import METRICS
from reliability.promise import Promise, Tally

BYTES = 160  # all that a case can need
EXAMPLES = 10_000  # of each function in `make nightly`
SPECS = {spec.name: spec for spec in LOSS_TABLE}
OWN_TERMS = ("rmse", "bce", "ordinal", "ranknet", "query_rmse")  # sums of which a document that weighs 0 is no part
NARROW = (torch.bfloat16, torch.float16)
TINY = {torch.float16: 6e-8, torch.bfloat16: 1e-39, torch.float32: 1e-45, torch.float64: 5e-324}
PLAIN = (-3.0, -1.0, -0.5, -0.25, 0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0)
GRADES = ((0, 1, 2, 3, 4), (0, 1), (0, 0, 0, 1), (0, 0.25, 1.5, 4), (0, 1, 10, 30), (0, 2, 300, 1000))
POISON = (math.nan, math.inf, -math.inf, -1.0, 1e30)
BAD = {"scores": (math.nan, math.inf, -math.inf), "labels": (math.nan, math.inf, -1.0), "weights": (math.nan, -1.0)}
OPTIONS: dict[str, Sequence[Any]] = {  # what a function is given of what it takes
    "k": (None, None, 1, 2, 3, 50),
    "gain": ("exp2", "exp2", "linear", lambda y: y.clamp(max=4) ** 2),
    "threshold": (1.0, 2, 0.5),
    "max_label": (4.0, 2, 30),
    "tau": (1.0, 1.0, 0.01, 100.0),
    "sinkhorn_iters": (30, 3, 1, 0),
    "sinkhorn_tol": (1e-6, 0.0),
    "beta": (0.1, 2.0),
    "log_scores": (True, True, False),
    "perturb": ("paper", "allrank"),
    "alpha": (1.0, 10.0),
    "sigma": (1.0, 0.1),
    "method": ("gaussian", "gaussian", "exact"),
    "mu": (10.0, 0.0),
    "levels": (5.0, 1.0),
    "pairs": ("any", "both"),
    "count_empty": (False, True),
    "empty": (0.0, 1.0, math.nan),
}


@dataclass
class Case:
    """Lists [B, L] and what a function is given besides; `place` is a list of them and what is done to it."""

    scores: Tensor  # [B, L], [B, L, K] for ordinal
    labels: Tensor
    mask: Tensor
    weights: Tensor | None
    noise: Tensor | None  # [B, L], [S, B, L] for the relaxed sorts
    options: dict[str, Any]
    poison: float
    row: int
    order: int  # seeds the order of the row's documents
    bad: tuple[str, float]

    def arguments(self) -> dict[str, Any]:
        """Weights and noise, where there are any."""
        return {name: given for name in ("weights", "noise") if (given := getattr(self, name)) is not None}


def case_of(name: str, function: Callable[..., Tensor], drawn: bytes) -> Case:
    """The case that `BYTES` drawn bytes stand for, zeros the plainest: a strategy of many small draws takes longer than what it tests.

    Two thirds of the scores are ordinary ones: what is extreme everywhere hides what is wrong with the rest.
    """
    left = iter(drawn)

    def one_of(values: Sequence[Any]) -> Any:
        return values[next(left) % len(values)]

    def some(values: Sequence[float], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([one_of(values) for _ in range(math.prod(shape))], dtype=dtype).view(shape)

    taken = _parameters(function)
    options = {key: one_of(values) for key, values in OPTIONS.items() if key in taken}
    relaxed = "sinkhorn_iters" in taken
    dtype = one_of((torch.float32,) * 3 + (torch.float64, *NARROW))
    if relaxed:
        options["backend"] = one_of(("auto", "auto", "torch"))
        if options["backend"] == "torch" or dtype == torch.float64:  # rounds in torch cost milliseconds
            options["sinkhorn_iters"] = min(2, options["sinkhorn_iters"])
    shape = one_of((1, 2, 2, 3)), one_of((1, 2, 3, 4, 5, 6))
    largest = torch.finfo(dtype).max
    pool = one_of(
        (PLAIN, PLAIN, PLAIN, (0.0, 1.0), (1e4, -1e4, 3.0, 0.5), (largest, -largest, largest / 3, 0.0, 1.0),
         (TINY[dtype], -TINY[dtype], 0.0, 2 * TINY[dtype]))
    )  # fmt: skip
    grades = one_of(GRADES if name != "dcg" else GRADES[:-1])  # whose float32 value ends at a gain of 2^128
    scores = some(pool, *shape, 3) if name == "ordinal" else some(pool, *shape)
    labels, mask = some(grades, *shape), some((True, True, True, False), *shape, dtype=torch.bool)
    samples = one_of((0, 0, 1, 2)) if relaxed else 0
    noise = None
    if samples:
        noise = some((0.0, -1.0, 0.4, 2.5), samples, *shape).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
    elif name == "xe_ndcg":
        noise = some((0.0, 0.25, 0.5, 0.875), *shape)
    weights = some((1.0, 0.0, 0.5, 1.0, 2.0), *shape) if "weights" in taken and one_of((False, True)) else None
    what = one_of(("scores", "labels") if weights is None else ("scores", "labels", "weights"))
    bad = what, one_of(BAD[what])
    return Case(
        scores.to(dtype), labels, mask, weights, noise, options, one_of(POISON), one_of(range(shape[0])), one_of(range(24)), bad
    )  # fmt: skip


@functools.cache
def _parameters(function: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# --- losses -----------------------------------------------------------------------------------------------------------


def hold_loss(spec: LossSpec, case: Case) -> None:
    """Every invariant of a loss on one case."""
    loss = partial(spec.function, reduction="none", **case.options)
    scores, labels, mask, given = case.scores, case.labels, case.mask, case.arguments()
    values, grad = value_and_gradient(loss, scores, labels, mask, **given)
    computed = torch.float64 if scores.dtype == torch.float64 else torch.float32
    hold(values.shape == labels.shape[:-1] and values.dtype == computed, "value", (values.shape, values.dtype))
    hold(grad.shape == scores.shape and grad.dtype == scores.dtype, "gradient's shape", (grad.shape, grad.dtype))
    hold(bool(values.isfinite().all()), "finite value", values)
    if not grad.isfinite().all():  # a narrow dtype may end below a right gradient
        wide = value_and_gradient(loss, scores.float(), labels, mask, **given)[1]
        fits = wide.abs() <= torch.finfo(scores.dtype).max
        hold(scores.dtype in NARROW and bool(wide.isfinite().all() and grad[fits].isfinite().all()), "gradient", grad)
    hold(not grad[~mask].any(), "no gradient under the padding", grad)
    weighing = mask if case.weights is None else mask & (case.weights > 0)
    counts = spec.counting(case.options)(labels.masked_fill(~mask, 0.0), weighing)
    hold(not values[~counts].any() and not grad[~counts].any(), "a list that cannot teach", (values, grad))
    _hold_padding(loss, case, values, grad)
    _hold_alone(spec, case, values, grad)
    _hold_reductions(spec, case, values, counts)
    _hold_bad_values(loss, case, values, grad)
    if spec.weights:
        _hold_weights(spec, case, values, grad)


def _hold_padding(loss: Callable[..., Tensor], case: Case, values: Tensor, grad: Tensor) -> None:
    """Other things under the padding, another number of leading dimensions, another layout: not a bit changes."""
    lists = len(case.labels)
    dirty = [torch.where(_like(case.mask, t), t, case.poison) for t in (case.scores, case.labels)]
    folded = [t.view(1, lists, 1, *t.shape[1:]) for t in (*dirty, case.mask)]
    folded[1] = folded[1].transpose(-1, -2).contiguous().transpose(-1, -2)
    given = {}
    for name, tensor in case.arguments().items():
        dirt = torch.where(case.mask, tensor, case.poison)
        given[name] = dirt.view(*dirt.shape[:-2], 1, lists, 1, dirt.shape[-1])
    again, again_grad = value_and_gradient(loss, *folded, **given)
    hold(torch.equal(again, values.view(1, lists, 1)), "padding, leading dimensions: value", (values, again))
    hold(torch.equal(again_grad, grad.view(folded[0].shape)), "padding, leading dimensions: gradient", again_grad)


def _hold_alone(spec: LossSpec, case: Case, values: Tensor, grad: Tensor) -> None:
    """One list without the others and its padding, its documents in another order where scores tell them apart."""
    real = case.mask[case.row]
    scores, labels = case.scores[case.row][real], case.labels[case.row][real]
    order = torch.arange(len(labels))
    seen = scores
    if case.options.get("log_scores") and len(scores):
        seen = scores - scores.amin() + 1e-10  # as the loss has them: what is less apart than its rounding is a tie
    if spec.name == "ordinal" or len(seen.unique()) == len(scores):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(case.order))
    given = {name: tensor[..., case.row, :][..., real][..., order] for name, tensor in case.arguments().items()}
    alone, own = value_and_gradient(
        spec.function, scores[order], labels[order], **given, **case.options, reduction="none"
    )
    expected = grad[case.row][real][order]
    hold(near(alone, values[case.row], case.scores.dtype), "alone: value", (alone, values[case.row]))
    hold(near(own, expected, case.scores.dtype), "alone: gradient", (own, expected))


def _hold_reductions(spec: LossSpec, case: Case, values: Tensor, counts: Tensor) -> None:
    given = (case.scores, case.labels, case.mask)
    if case.order % 2:
        total = spec.function(*given, **case.arguments(), **case.options, reduction="sum")
        return hold(near(total, values.sum(), values.dtype), "sum", (total, values))
    mean = spec.function(*given, **case.arguments(), **case.options)
    weights = torch.ones_like(case.labels) if case.weights is None else case.weights
    number = weights[case.mask & counts[:, None]].sum() if spec.unit == "document" else counts.sum()
    return hold(
        near(mean, values.sum() / number if number > 0 else values.sum(), values.dtype), "mean", (mean, values, number)
    )


def _hold_bad_values(function: Callable[..., Tensor], case: Case, values: Tensor, grad: Tensor | None) -> None:
    """A bad value of a real document is refused where values are checked, and is its list's own trouble where not."""
    places = case.mask[case.row].nonzero()
    if not len(places):
        return
    what, bad = case.bad
    given = {"scores": case.scores, "labels": case.labels, **case.arguments()}
    given[what] = given[what].clone()
    given[what][case.row, places[0]] = bad
    try:
        function(mask=case.mask, check=True, **given)
    except ValueError as error:
        hold(what in str(error), "the error names what is bad", error)
    else:
        hold(False, f"{what} {bad} is refused", given[what])
    others = torch.arange(len(case.labels)) != case.row
    if grad is None:
        loud = function(mask=case.mask, check=False, **given)
    else:
        scores = given.pop("scores")
        loud, own = value_and_gradient(function, scores, mask=case.mask, check=False, **given)
        hold(torch.equal(own[others], grad[others]), "a bad list leaves other gradients alone", (own, grad))
    hold(bool(loud[case.row].isnan()), f"unchecked {what} {bad} is NaN", loud)
    hold(same(loud[others], values[others]), "a bad list leaves the others alone", (loud, values))


def _hold_weights(spec: LossSpec, case: Case, values: Tensor, grad: Tensor) -> None:
    given = {name: tensor for name, tensor in case.arguments().items() if name != "weights"}
    loss = partial(spec.function, labels=case.labels, reduction="none", **case.options, **given)
    if case.weights is None:
        mask, weights = case.mask, torch.ones_like(case.labels)
    elif spec.name in OWN_TERMS and case.options.get("k") is None:
        mask, weights = case.mask & (case.weights > 0), case.weights
    else:
        return
    again, again_grad = value_and_gradient(loss, case.scores, mask=mask, weights=weights)
    hold(near(again, values, case.scores.dtype), "weights: value", (again, values))
    hold(near(again_grad, grad, case.scores.dtype), "weights: gradient", (again_grad, grad))


# --- metrics ----------------------------------------------------------------------------------------------------------


def hold_metric(name: str, case: Case) -> None:
    """Every invariant of a metric on one case."""
    metric = partial(METRICS[name], **case.options)
    scores, labels, mask, lists = case.scores, case.labels, case.mask, len(case.labels)
    values = metric(scores.clone().requires_grad_(), labels, mask)
    hold(values.dtype == (torch.float64 if scores.dtype == torch.float64 else torch.float32), "dtype", values.dtype)
    hold(values.shape == (lists,) and not values.requires_grad, "one value per list, without a gradient", values)
    empty = case.options["empty"]
    marked = values.isnan()
    highest = math.inf if name == "dcg" else 1 + 1e-6
    hold(bool((marked | (values >= 0) & (values <= highest) & values.isfinite()).all()), "within 0 and 1", values)
    relevant = mask & (labels >= case.options["threshold"] if "threshold" in case.options else labels > 0)
    hold(same(values[~relevant.any(-1)], torch.full_like(values, empty)[~relevant.any(-1)]), "empty lists", values)
    hold(not (marked & relevant.any(-1)).any(), "NaN for empty lists alone", values)
    dirty = [torch.where(mask, t, case.poison) for t in (scores, labels)]
    again = metric(*(t.view(1, lists, 1, -1) for t in (*dirty, mask)))
    hold(same(again, values.view(1, lists, 1)), "padding, leading dimensions", (again, values))
    wide = scores.double().masked_fill(~mask, -math.inf)
    places = wide.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    hold(
        same(metric(-places.to(scores.dtype), labels, mask), values),
        "only the order matters, ties as they came",
        values,
    )
    real = mask[case.row]
    own, grades = scores[case.row][real], labels[case.row][real]
    order = torch.arange(len(own))
    if len(own.unique()) == len(own):
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(case.order))
    alone = metric(own[order], grades[order])
    hold(near(alone, values[case.row], scores.dtype), "alone", (alone, values))
    if relevant.any(-1)[case.row]:
        best = metric(grades, grades)
        hold(name != "ndcg" or near(best, torch.ones_like(best), scores.dtype), "the perfect order is 1", best)
        hold(bool(best >= alone - 1e-6 * best), "no order is better than the perfect one", (best, alone))
    _hold_bad_values(metric, case, values, None)


# --- comparing --------------------------------------------------------------------------------------------------------


def value_and_gradient(
    function: Callable[..., Tensor], scores: Tensor, *rest: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """One value per list, attached to the graph, and the gradient of their sum."""
    leaf = scores.detach().clone().requires_grad_()
    values = function(leaf, *rest, **given)
    hold(values.requires_grad, "attached to the graph", values)
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), grad


def near(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Equal to rounding, measured by the largest number; what is near 0 is a difference of terms near 1, and rounded as they are."""
    rounding = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    if one.dtype == torch.float32:
        rounding = 2e-5
    one, other = one.double(), other.double()
    if not one.numel() or same(one, other):
        return True
    beyond = (one == other) & one.isinf()  # as a gradient in float16 may be
    one, other = one.masked_fill(beyond, 0.0), other.masked_fill(beyond, 0.0)
    size = torch.maximum(one.abs(), other.abs()).amax()
    return bool(((one - other).abs() <= rounding * size.clamp(min=1e-3)).all())


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, NaN to NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def hold(condition: bool, what: str, got: object) -> None:
    if not condition:
        raise AssertionError(f"{what}: {got}")


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask if mask.dim() == tensor.dim() else mask[..., None]


# --- as promises ------------------------------------------------------------------------------------------------------


def check_for(name: str) -> tuple[Callable[..., Tensor], Callable[[Case], None]]:
    """A function of the tables by name, and what holds it."""
    if name in SPECS:
        return SPECS[name].function, partial(hold_loss, SPECS[name])
    return METRICS[name], partial(hold_metric, name)


def try_examples(name: str, examples: int, seed: int | None, *, shrink: bool = True) -> tuple[int, str]:
    """So many drawn cases of one function: how many were tried, and "" or the one that failed, made small by `shrink`.

    `seed` None draws the same cases every time.
    """
    function, check = check_for(name)
    tried = 0

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=seed is None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink)[: 1 + shrink],
    )  # fmt: skip
    @given(st.binary(min_size=BYTES, max_size=BYTES).map(partial(case_of, name, function)))
    def one(case: Case) -> None:
        nonlocal tried
        tried += 1
        check(case)

    try:
        (one if seed is None else seeded(seed)(one))()
    except Exception as error:
        return tried, f"{name}: {type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return tried, ""


def _attempt(names: Sequence[str], times: int, seed: int) -> Tally:
    torch.set_num_threads(1)
    counted = Tally()
    for name in names:
        tried, failure = try_examples(name, max(1, times // len(names)), seed)
        counted.tried += tried
        counted.failures += [failure] if failure else []
    return counted


NEURAL = [name for name in SPECS if name.startswith("neural_")]
RANKED = ["approx_ndcg", "soft_rank", "ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp"]
GROUPS = {
    "neural": NEURAL,
    "pairs": RANKED,
    "lists": [name for name in SPECS if name not in (*NEURAL, *RANKED)],
    "metrics": list(METRICS),
}
PROMISES = [
    Promise(
        f"invariants-{group}",
        f"{', '.join(names)}: shapes, padding, order, lists alone, extreme and bad values, drawn by hypothesis",
        EXAMPLES * len(names),
        partial(_attempt, names),
    )
    for group, names in GROUPS.items()
]
