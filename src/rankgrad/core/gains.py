"""Gains, discounts and the ideal DCG: the one home of these conventions.

    gain      g(y) = 2^y - 1 ("exp2"), y ("linear"), a table of the grades 0, 1, ... or any function of the labels
    discount  d(j) = 1 / log2(j + 1) at rank j = 1, 2, ..., and 0 below the cut-off k
    max DCG   the DCG@k of the documents sorted by gain

A gain is never negative; a function that returns a negative one makes the list NaN, and so does a label that a table has no
entry for. All in float64: these are vectors, and gains of labels up to 30 must stay exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from rankgrad.checks import non_negative

Gain = str | Callable[[Tensor], Tensor] | Sequence[float]
NO_GAIN = 1024  # from this label on 2^y - 1 overflows: float64 ends below 2^1024
LARGEST_LABEL = 1000  # whose gain 2^y - 1 float64 still holds when it is summed over a list


def gains(labels: Tensor, mask: Tensor, gain: Gain) -> Tensor:
    """g(y) of each document, 0 under the padding, where labels are 0 already, [..., L] float64.

    >>> gains(torch.tensor([0.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, True, False]), "exp2").tolist()
    [0.0, 1.0, 3.0, 0.0]
    >>> gains(torch.tensor([0.0, 2.0]), torch.tensor([True, True]), [0, 1, 5]).tolist()
    [0.0, 5.0]
    """
    labels = labels.double()
    if is_table(gain):
        values = torch.full_like(labels, torch.nan)
        for grade, worth in enumerate(checked_table(gain)):  # few entries, and nothing to copy to a GPU
            values = torch.where(labels == grade, worth, values)
        return torch.where(mask, values, 0.0)
    if gain == "exp2":
        return torch.exp2(labels) - 1
    if gain == "linear":
        return labels
    if callable(gain):
        values = gain(labels)
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"gain must return a tensor of the labels' shape {tuple(labels.shape)}, got {came}")
        if values.dtype.is_complex:
            raise ValueError(f"gain must return real numbers, got {values.dtype}")
        values = values.detach().double()
        return torch.where(mask, torch.where(values < 0, torch.nan, values), 0.0)
    raise ValueError(f"gain must be 'exp2', 'linear', a list of numbers or a function of the labels, got {gain!r}")


def is_table(gain: object) -> TypeGuard[Sequence[float]]:
    """Whether a gain is a list of what the grades 0, 1, ... are worth."""
    return isinstance(gain, list | tuple | np.ndarray)


def checked_table(gain: Any) -> tuple[float, ...]:
    """The entries of a table.

    >>> checked_table([0])
    Traceback (most recent call last):
    ...
    ValueError: gain [0] is too short; expected a number for each of the grades 0, 1, ..., such as [0, 1, 3, 7, 15]
    """
    entries = np.atleast_1d(gain).tolist() if isinstance(gain, np.ndarray) else list(gain)
    if len(entries) < 2:
        raise ValueError(
            f"gain {entries} is too short; expected a number for each of the grades 0, 1, ..., such as [0, 1, 3, 7, 15]"
        )
    return tuple(non_negative(f"gain[{grade}]", worth) for grade, worth in enumerate(entries))


def discounts(length: int, k: int | None, device: torch.device) -> Tensor:
    """d(1), ..., d(length), 0 beyond rank k, [length] float64."""
    below = torch.arange(2, length + 2, dtype=torch.float64, device=device)  # j + 1
    values = below.log2().reciprocal()
    return values if k is None else values * (below <= k + 1)


def ideal_dcg(gain_values: Tensor, k: int | None) -> Tensor:
    """The largest DCG@k any order of the documents reaches, [...] float64."""
    best = gain_values.sort(dim=-1, descending=True).values
    return (best * discounts(best.shape[-1], k, best.device)).sum(-1)


def ranks(values: Tensor) -> Tensor:
    """1, 2, ..., L along the last dimension of `values`, in their dtype."""
    return torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)


def top(values: Tensor, k: int | None) -> Tensor:
    """The values at ranks up to k, 0 below."""
    return values if k is None else values * (ranks(values) <= k)


def cascade(stops: Tensor, k: int | None, *, constant: bool = False) -> Tensor:
    """sum_{i <= k} (1 / i) stops_i prod_{m < i} (1 - stops_m): a reader who goes down the list until satisfied.

    Neighbouring stretches of the list are joined pair by pair: what a stretch earns, and how often it is left unsatisfied.
    (torch's cumprod would ask the host about zeros in its backward pass, and a GPU would wait.) A compiler would make another
    program for every length of that; it gets the products written out. `constant` chances need no gradient, and a running product does.
    """
    if constant:
        reached = torch.nn.functional.pad((1 - stops).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        return top(stops * reached / ranks(stops), k).sum(-1)
    earned, left = top(stops / ranks(stops), k), 1 - stops
    if torch.compiler.is_compiling():
        earlier = ranks(stops)[:, None] > ranks(stops)  # [L, L]
        return (earned * torch.where(earlier, left[..., None, :], 1.0).prod(-1)).sum(-1)
    while earned.shape[-1] > 1:
        if earned.shape[-1] % 2:
            earned = torch.nn.functional.pad(earned, (0, 1))
            left = torch.nn.functional.pad(left, (0, 1), value=1.0)
        earned = earned[..., ::2] + left[..., ::2] * earned[..., 1::2]
        left = left[..., ::2] * left[..., 1::2]
    return earned[..., 0]


def stop_chances(labels: Tensor, mask: Tensor, max_label: float) -> Tensor:
    """ERR's probabilities (2^y - 1) / 2^max_label, labels above `max_label` counted as `max_label`, [..., L] float64."""
    check_max_label(max_label)
    return gains(labels.clamp(max=max_label), mask, "exp2") / 2.0**max_label


def check_max_label(max_label: float) -> None:
    """Refuse a highest grade whose gain float64 does not hold."""
    if not max_label <= 1000:
        raise ValueError(f"max_label must be at most 1000, the largest whose gain float64 holds, got {max_label!r}")


def normalised_gains(gain_values: Tensor, k: int | None, informative: Tensor) -> tuple[Tensor, Tensor]:
    """Gains divided by the list's ideal DCG@k, and which informative lists have one; gains are 0 in all others.

    Exactly 0, whatever the gains: an infinite one would make the gradient of a list that weighs nothing NaN.
    """
    ideal = ideal_dcg(gain_values, k)
    informative = informative & ~(ideal <= 0)  # a NaN (gains beyond float64) is not hidden
    divisor = torch.where(informative, ideal, 1.0)[..., None]
    return torch.where(informative[..., None], gain_values / divisor, 0.0), informative
