"""Everything that knows what padding is.

A batch of lists is three tensors of one shape [..., L]: scores, labels and a mask that is True at real documents. Padding
may be anywhere and hold anything, NaN included. `prepare` turns what a caller gave into `Lists`, where the padding
is zero and can no longer do harm; `reduce` turns one value per list into the loss.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.checks import one_of
from rankgrad.core.gains import NO_GAIN, Gain, gains


class Lists(NamedTuple):
    """Lists ready for arithmetic: everything finite, zero under the padding, and at least one column."""

    scores: Tensor  # [..., L] ([..., L, K] for several units), float32 or float64
    labels: Tensor  # [..., L] float64, so that whole numbers and powers of two stay exact
    mask: Tensor  # [..., L] bool, True = a real document
    valid: Tensor  # [...] bool, False where a real document holds a bad value: the result of such a list is NaN

    @property
    def counts(self) -> Tensor:
        """Number of real documents of each list, [...] int64."""
        return self.mask.sum(-1)


def check_for_kernel(
    scores: Tensor, labels: Tensor, mask: Tensor | None, *, gain: Gain, reduction: str, check: bool | None
) -> str | Tensor:
    """Refuse what the torch path would refuse, before a kernel that cleans its inputs itself; returns its gain.

    "exp2" and "linear" are known to the kernels by name; a function of the labels becomes its values, [..., L] float64.
    """
    _check_tensors(scores, labels, mask, False)
    if _checks_values(check, scores):
        prepare(scores, labels, mask, True, gain=gain)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    if isinstance(gain, str) and gain in ("exp2", "linear"):
        return gain
    lists = prepare(scores.detach(), labels, mask, False)
    return gains(lists.labels, lists.mask, gain)


def prepare(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    check: bool | None,
    *,
    units: bool = False,
    gain: object = None,
) -> Lists:
    """Validate what a caller gave, zero the padding, choose the computing dtype (float32 at least).

    `gain="exp2"`: labels without a gain 2^y - 1 are bad values too, where values are checked.
    """
    _check_tensors(scores, labels, mask, units)
    checks_values = _checks_values(check, scores)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else _recordable(mask)
    if labels.shape[-1] == 0:  # one column of padding, so that nothing below has to handle a list without columns
        scores = torch.nn.functional.pad(scores, (0, 0, 0, 1) if units else (0, 1))
        labels = torch.nn.functional.pad(labels, (0, 1))
        mask = torch.nn.functional.pad(mask, (0, 1))
    labels = _recordable(labels.detach()).double()
    good_labels = labels.isfinite() & (labels >= 0)
    good_scores = scores.isfinite().all(-1) if units else scores.isfinite()
    if checks_values:
        _check_values(scores, good_scores, labels, good_labels, mask)
        if gain == "exp2":
            _check_gains(labels, mask)
    usable = mask & good_scores & good_labels
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return Lists(
        scores=torch.where(usable[..., None] if units else usable, wide, wide.new_zeros(())),
        labels=torch.where(usable, labels, labels.new_zeros(())),
        mask=mask,
        valid=(usable | ~mask).all(-1),
    )


def reduce(
    values: Tensor, informative: Tensor, lists: Lists, reduction: str, *, by_document: bool = False
) -> Tensor:
    """One value per list -> the loss: lists that are not informative weigh nothing, invalid lists are NaN.

    mean = sum of the lists' losses / max(1, number of informative lists), or of their documents.
    """
    one_of("reduction", reduction, ("mean", "sum", "none"))
    values = torch.where(informative, values, torch.zeros_like(values))
    values = poison(values, lists)
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    counted = informative | ~lists.valid
    return values.sum() / (torch.where(counted, lists.counts, 0) if by_document else counted).sum().clamp(min=1)


def poison(values: Tensor, lists: Lists) -> Tensor:
    """NaN, in value and in gradient, for lists with a bad value: loud, never a plausible wrong number."""
    return values * torch.where(lists.valid, 1.0, math.nan).to(values.dtype)


def order_by_score(scores: Tensor, mask: Tensor) -> Tensor:
    """Documents from best to worst, [..., L] int64: ties keep the input order, padding comes last."""
    return scores.detach().masked_fill(~mask, -math.inf).argsort(dim=-1, descending=True, stable=True)


def ranks_by_score(scores: Tensor, mask: Tensor) -> Tensor:
    """The rank of each document, from 1, [..., L] int64; padding ranks after every document."""
    return inverse(order_by_score(scores, mask)) + 1


def log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Log softmax over the real documents, [..., L]; finite but meaningless under the padding."""
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min / 2).log_softmax(-1)


def inverse(order: Tensor) -> Tensor:
    """The inverse of permutations along the last dimension."""
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, positions)


def _recordable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in inference mode, which autograd would refuse to save."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def _checks_values(check: bool | None, scores: Tensor) -> bool:
    """Whether values are checked: as the caller says, else only on the CPU, where reading them does not stall a device."""
    if not (check is None or isinstance(check, bool)):
        raise ValueError(f"check must be None, True or False, got {check!r}")
    return scores.device.type == "cpu" if check is None else check


def _check_tensors(scores: Tensor, labels: Tensor, mask: Tensor | None, units: bool) -> None:
    for name, tensor in (("scores", scores), ("labels", labels), ("mask", mask)):
        if not isinstance(tensor, Tensor) and not (name == "mask" and tensor is None):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not scores.dtype.is_floating_point:
        raise ValueError(f"scores must be of a floating-point dtype, got {scores.dtype}; call scores.float()")
    if labels.dtype.is_complex:
        raise ValueError(f"labels must be of a real dtype (integer, bool or floating-point), got {labels.dtype}")
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
    for name, tensor in (("labels", labels), ("mask", mask)):
        if tensor is None:
            continue
        if tensor.shape != expected_shape:
            raise ValueError(
                f"{name} must have the shape {tuple(expected_shape)} that scores give (nothing is broadcast), "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != scores.device:
            raise ValueError(f"{name} must be on the scores' device {scores.device}, got {tensor.device}")


def _check_values(scores: Tensor, good_scores: Tensor, labels: Tensor, good_labels: Tensor, mask: Tensor) -> None:
    for name, tensor, good, expected in (
        ("scores", scores, good_scores, "finite"),
        ("labels", labels, good_labels, "finite and 0 or above"),
    ):
        bad = mask & ~good
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{name} of real documents must be {expected}, got {tensor[place].tolist()} at index {place}; "
                "mark padding with mask=False there, or correct the value"
            )


def _check_gains(labels: Tensor, mask: Tensor) -> None:
    bad = mask & (labels >= NO_GAIN)
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"label {labels[place].item():g} at index {place} is too large for a gain of 2^y - 1, which overflows from "
            f"{NO_GAIN} on; map your labels to grades such as 0 to 4, or choose another gain or loss"
        )
