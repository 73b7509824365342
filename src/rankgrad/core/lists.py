"""Everything that knows what padding is.

A batch of lists is three tensors of one shape [..., L]: scores, labels and a mask that is True at real documents. Padding
may be anywhere and hold anything, NaN included. `prepare` turns what a caller gave into `Lists`, where the padding
is zero and can no longer do harm; `reduce` turns one value per list into the loss.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rankgrad.checks import one_of
from rankgrad.core.gains import NO_GAIN, Gain, checked_table, gains, is_table
from rankgrad.core.operators import has_values

_MANY = 2.0**24  # terms of a sum: with so many a loss stays finite


class Lists(NamedTuple):
    """Lists ready for arithmetic: everything finite, zero under the padding, and at least one column."""

    scores: Tensor  # [..., L] ([..., L, K] for several units), float32 or float64
    labels: Tensor  # [..., L] float64, so that whole numbers and powers of two stay exact
    mask: Tensor  # [..., L] bool, True = a real document
    padding: Tensor  # [..., L] bool, the opposite
    valid: (
        Tensor | None
    )  # [...] bool, False where a value is bad: the result is NaN; None: all were checked and are good
    weights: Tensor | None = None  # [..., L] in the scores' dtype, None: every document weighs 1

    @property
    def counts(self) -> Tensor:
        """Number of real documents of each list, [...] int64."""
        return self.mask.sum(-1)

    @property
    def weighing(self) -> Tensor:
        """Real documents that weigh more than 0, [..., L] bool."""
        return self.mask if self.weights is None else self.weights > 0

    def sum_weights(self) -> Tensor:
        """The weights of each list's documents, [...]: their number where all weigh 1."""
        return self.counts if self.weights is None else self.weights.sum(-1)


def check_for_kernel(
    scores: Tensor, labels: Tensor, mask: Tensor | None, *, gain: Gain, reduction: str, check: bool | None
) -> tuple[Tensor | None, str]:
    """Refuse what the torch path would refuse, before a kernel that cleans its inputs itself; returns its gain.

    "exp2" and "linear" are known to the kernels by name; a function of the labels becomes its values, [..., L] float64.
    """
    refuse_bad(scores, labels, mask, gain=gain, reduction=reduction, check=check)
    if isinstance(gain, str) and gain in ("exp2", "linear"):
        return None, gain
    lists = prepare(scores.detach(), labels, mask, False)
    return gains(lists.labels, lists.mask, gain), "given"


def refuse_bad(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    gain: object,
    reduction: str,
    check: bool | None,
    units: bool = False,
) -> None:
    """Refuse what `prepare` and `reduce` would refuse."""
    _check_tensors(scores, labels, mask, None, units)
    if _checks_values(check, scores) and not _all_good(scores, labels, gain):
        prepare(scores, labels, mask, True, gain=gain, units=units)
    one_of("reduction", reduction, ("mean", "sum", "none"))


def prepare(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    check: bool | None,
    *,
    units: bool = False,
    gain: object = None,
    weights: Tensor | None = None,
    sums: bool = False,
    squares: bool = False,
    leave_out: bool = False,
) -> Lists:
    """Validate what a caller gave, zero the padding, choose the computing dtype (float32 at least).

    `gain="exp2"`: labels without a gain 2^y - 1 are bad values too, where values are checked; of a table those it has no entry
    for. `sums`, `squares`: the loss sums scores, or their squares, which must not overflow, see `_summable`. `leave_out`: a document
    that weighs 0 has no part in the loss, and its score, however large, none in what the others must be scaled by.
    """
    _check_tensors(scores, labels, mask, weights, units)
    checks_values = _checks_values(check, scores)
    masked = mask is not None
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else _recordable(mask)
    if labels.shape[-1] == 0:  # one column of padding, so that nothing below has to handle a list without columns
        masked = True
        scores = functional.pad(scores, (0, 0, 0, 1) if units else (0, 1))
        labels, mask = functional.pad(labels, (0, 1)), functional.pad(mask, (0, 1))
        weights = weights if weights is None else functional.pad(weights, (0, 1))
    labels = _recordable(labels.detach() if labels.requires_grad else labels).double()
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    if weights is not None:
        weights = _recordable(weights.detach()).to(wide.dtype)
    if checks_values:
        if masked:
            lists = _without(~mask, wide, labels, mask, weights, units)
        else:
            lists = Lists(wide, labels, mask, torch.zeros_like(mask), None, weights)
        largest = _largest_score(lists, gain)
        if largest is None:
            _refuse(wide, labels, weights, mask, gain)
        if is_table(gain):
            _expect_entries(labels, mask, len(checked_table(gain)))
        if leave_out:
            lists = _without_weightless(lists)
        if (sums or squares) and largest is not None and largest > _largest_summable(wide.dtype, squares):
            lists = lists._replace(scores=_summable(lists.scores, squares))
        return lists
    good_scores = wide.abs() <= torch.finfo(wide.dtype).max  # NaN fails every comparison
    usable = mask & (good_scores.all(-1) if units else good_scores) & _is_amount(labels)
    if weights is not None:
        usable = usable & _is_amount(weights)
    lists = _without(~usable, wide, labels, mask, weights, units)
    if leave_out:
        lists = _without_weightless(lists)
    return lists._replace(
        scores=_summable(lists.scores, squares) if sums or squares else lists.scores,
        padding=~mask,
        valid=(usable == mask).all(-1),
    )


def reduce(
    values: Tensor, informative: Tensor | None, lists: Lists, reduction: str, *, by_document: bool = False
) -> Tensor:
    """One value per list -> the loss: lists that are not informative weigh nothing, invalid lists are NaN.

    mean = sum of the lists' losses / max(1, number of informative lists), or / the sum of the weights of their documents.
    `informative` is None if all are.
    """
    one_of("reduction", reduction, ("mean", "sum", "none"))
    if informative is not None:
        informative = unless_all(informative, lists)
    if informative is not None:
        values = torch.where(informative, values, 0.0)
    values = poison(values, lists)
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if informative is None and lists.weights is None and values.numel():
        return values.sum() / max(1, int(lists.mask.sum())) if by_document else values.mean()
    counted = torch.ones_like(values, dtype=torch.bool) if informative is None else informative
    if lists.valid is not None:
        counted = counted | ~lists.valid
    if not by_document:
        return values.sum() / counted.sum().clamp(min=1)
    total = torch.where(counted, lists.sum_weights(), 0).sum()
    return values.sum() / torch.where(total > 0, total, 1)


def unless_all(informative: Tensor, lists: Lists) -> Tensor | None:
    """Which lists are informative; None if all are and values may be read, which costs less than tensors that change nothing."""
    return None if lists.valid is None and bool(informative.all()) else informative


def poison(values: Tensor, lists: Lists) -> Tensor:
    """NaN, in value and in gradient, for lists with a bad value: loud, never a plausible wrong number."""
    return values if lists.valid is None else values * torch.where(lists.valid, 1.0, math.nan).to(values.dtype)


def order_by_score(scores: Tensor, padding: Tensor) -> Tensor:
    """Documents from best to worst, [..., L] int64: ties keep the input order, padding comes last."""
    scores = scores.detach() if scores.requires_grad else scores
    return scores.masked_fill(padding, -math.inf).argsort(dim=-1, descending=True, stable=True)


def ranks_by_score(scores: Tensor, padding: Tensor) -> Tensor:
    """The rank of each document, from 1, [..., L] int64; padding ranks after every document."""
    return inverse(order_by_score(scores, padding)) + 1


def log_softmax(scores: Tensor, padding: Tensor) -> Tensor:
    """Log softmax over the real documents, [..., L]; finite but meaningless under the padding."""
    return scores.masked_fill(padding, torch.finfo(scores.dtype).min / 2).log_softmax(-1)


def inverse(order: Tensor) -> Tensor:
    """The inverse of permutations along the last dimension."""
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, positions)


def _without(
    dropped: Tensor, scores: Tensor, labels: Tensor, mask: Tensor, weights: Tensor | None, units: bool
) -> Lists:
    """The lists with zeros at the documents that are dropped."""
    return Lists(
        scores.masked_fill(dropped[..., None] if units else dropped, 0.0),
        labels.masked_fill(dropped, 0.0),
        mask,
        dropped,
        None,
        weights if weights is None else weights.masked_fill(dropped, 0.0),
    )


def _without_weightless(lists: Lists) -> Lists:
    """The lists with scores of zero at documents that weigh nothing."""
    if lists.weights is None:
        return lists
    weightless = lists.weights == 0
    units = lists.scores.dim() > weightless.dim()
    return lists._replace(scores=lists.scores.masked_fill(weightless[..., None] if units else weightless, 0.0))


def _is_amount(values: Tensor) -> Tensor:
    """Finite and 0 or above."""
    return values.clamp(0, torch.finfo(values.dtype).max) == values


def _summable(scores: Tensor, squares: bool) -> Tensor:
    """Scores whose differences, or `squares` of them, can be summed: lists beyond that are scaled down as a whole.

    By a power of two, so that the order of the documents and the direction of the gradient stay as they are. The true sums of such
    lists overflow; ordinary scores are not changed.
    """
    largest, limit = scores.detach().abs().amax(-1, keepdim=True), _largest_summable(scores.dtype, squares)
    if squares:  # to the limit: what is scaled further would be lost beside the labels
        return scores * torch.exp2(-(largest / limit).clamp(min=1).log2().ceil())
    return scores * torch.where(largest > limit, 1 / _MANY, 1.0).to(scores.dtype)


def _largest_summable(dtype: torch.dtype, squares: bool) -> float:
    largest = torch.finfo(dtype).max
    return 2.0 ** (math.floor(math.log2(largest)) // 2 - 13) if squares else largest / _MANY


def _recordable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in inference mode, which autograd would refuse to save."""
    if torch.compiler.is_compiling():  # where nobody can ask
        return tensor
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def _checks_values(check: bool | None, scores: Tensor) -> bool:
    """Whether values are checked: as the caller says, else only on the CPU, where reading them does not stall a device.

    Never where there are none to read: while compiling and inside torch.func.
    """
    if not (check is None or isinstance(check, bool)):
        raise ValueError(f"check must be None, True or False, got {check!r}")
    return (scores.device.type == "cpu" if check is None else check) and has_values(scores)


def _check_tensors(scores: Tensor, labels: Tensor, mask: Tensor | None, weights: Tensor | None, units: bool) -> None:
    for name, tensor in (("scores", scores), ("labels", labels), ("mask", mask), ("weights", weights)):
        if not isinstance(tensor, Tensor) and not (name in ("mask", "weights") and tensor is None):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not scores.dtype.is_floating_point:
        raise ValueError(f"scores must be of a floating-point dtype, got {scores.dtype}; call scores.float()")
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.dtype.is_complex:
            raise ValueError(f"{name} must be of a real dtype (integer, bool or floating-point), got {tensor.dtype}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be of dtype torch.bool (True = a real document), got {mask.dtype}; call mask.bool()"
        )
    dims = 2 if units else 1
    if scores.dim() < dims:
        expected = "[..., L, K]" if units else "[..., L]"
        raise ValueError(f"scores must have the shape {expected}, got {tuple(scores.shape)}")
    expected_shape = scores.shape[:-1] if units else scores.shape
    if units and scores.shape[-1] == 0:
        raise ValueError(f"scores must have at least one unit per document, got shape {tuple(scores.shape)}")
    for name, tensor in (("labels", labels), ("mask", mask), ("weights", weights)):
        if tensor is None:
            continue
        if tensor.shape != expected_shape:
            raise ValueError(
                f"{name} must have the shape {tuple(expected_shape)} that scores give (nothing is broadcast), "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != scores.device:
            raise ValueError(f"{name} must be on the scores' device {scores.device}, got {tensor.device}")


def _largest_score(lists: Lists, gain: object) -> float | None:
    """The largest score's size if all values are good, else None: a number or two of each tensor tell."""
    if lists.labels.numel() == 0:
        return 0.0
    largest = float(torch.linalg.vector_norm(lists.scores.detach(), math.inf))
    lowest, highest = (float(bound) for bound in lists.labels.aminmax())
    good = largest < math.inf and lowest >= 0 and highest < _grade_limit(gain)
    if lists.weights is not None:
        lightest, heaviest = (float(bound) for bound in lists.weights.aminmax())
        good = good and lightest >= 0 and heaviest < math.inf
    return largest if good else None  # NaN fails every comparison


def _all_good(scores: Tensor, labels: Tensor, gain: object) -> bool:
    """Whether a glance at values on the CPU, padding too, finds nothing bad; False where only a closer look can tell.

    By numpy, in the calling thread: torch's threads would meet for every one of these short passes, on a busy machine at a turn each.
    """
    usual = torch.float32, torch.float64, torch.int64
    if scores.device.type != "cpu" or scores.dtype not in usual or labels.dtype not in usual:
        return False
    if is_table(gain) or labels.numel() == 0:
        return False
    grades = labels.detach().numpy()
    return bool(np.isfinite(scores.detach().numpy()).all() and grades.min() >= 0 and grades.max() < _grade_limit(gain))


def _grade_limit(gain: object) -> float:
    """What a label must stay below."""
    return NO_GAIN if isinstance(gain, str) and gain == "exp2" else math.inf


def _refuse(scores: Tensor, labels: Tensor, weights: Tensor | None, mask: Tensor, gain: object) -> None:
    """Say which value is bad, and where."""
    finite = scores.isfinite()
    for name, tensor, good, expected in (
        ("scores", scores, finite.all(-1) if scores.dim() > labels.dim() else finite, "finite"),
        ("labels", labels, _is_amount(labels), "finite and 0 or above"),
        ("weights", weights, None if weights is None else _is_amount(weights), "finite and 0 or above"),
    ):
        if tensor is not None and good is not None and not bool((good | ~mask).all()):
            place = tuple((mask & ~good).nonzero()[0].tolist())
            raise ValueError(
                f"{name} of real documents must be {expected}, got {tensor[place].tolist()} at index {place}; "
                "mark padding with mask=False there, or correct the value"
            )
    bad = mask & (labels >= NO_GAIN)
    if isinstance(gain, str) and gain == "exp2" and bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"label {labels[place].item():g} at index {place} is too large for a gain of 2^y - 1, which overflows from "
            f"{NO_GAIN} on; map your labels to grades such as 0 to 4, or choose another gain or loss"
        )


def _expect_entries(labels: Tensor, mask: Tensor, entries: int) -> None:
    """Refuse a label that a table of gains has no entry for, and say where it is."""
    bad = mask & ~((labels == labels.round()) & (labels < entries))
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"label {labels[place].item():g} at index {place} has no gain; gain has entries for the grades 0 to {entries - 1}; "
            "add one for every grade, or map your labels to these grades"
        )
