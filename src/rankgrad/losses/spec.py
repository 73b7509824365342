"""What the trainer has to know of a loss beside its values: one `LossSpec` per loss, a line of `LOSS_TABLE`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Rule = Callable[
    ..., Tensor
]  # labels, mask [..., L] -> [...] bool: which lists count; see `rankgrad.losses.informative`


def one_unit(_highest_label: int) -> int:
    """Most losses: one score per document."""
    return 1


@dataclass(frozen=True)
class LossSpec:
    """A loss and what the trainer needs to know of it.

    - `function`: `loss(scores, labels, mask=None, *, reduction="mean", check=None, ...)` as every loss of this package. With
      reduction="none" it gives one value per list, exactly 0 for a list it cannot learn from.
    - `name`: what runs and reports call it; the function's own if not given.
    - `counts`: which lists its mean is over, a rule of `rankgrad.losses.informative`. None: the lists whose gradient is not
      zero at generic scores, found by evaluating the loss a second time in each step.
    - `unit`: "list" if the mean is over these lists, "document" if it is over their documents.
    - `tanh`: the model's scores go through tanh unless the configuration says otherwise.
    - `units`: outputs of the model per document, a function of the highest label.
    - `gain`: it takes the gain 2^y - 1 of labels (unless its option `gain` says otherwise), which the largest labels lack.
    - `weights`: it takes weights per document.
    - `curvature`: the second derivative of a list's value by a score, where that is a constant, for boosted trees.
    """

    function: Callable[..., Tensor]
    name: str = ""
    counts: Rule | None = None
    unit: Literal["list", "document"] = "list"
    tanh: bool = False
    units: Callable[[int], int] = one_unit
    gain: bool = False
    weights: bool = False
    curvature: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"a loss must be a function of scores, labels and mask, got {self.function!r}")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What the function takes, by name."""
        return dict(inspect.signature(self.function).parameters)

    def counting(self, options: dict[str, Any]) -> Rule:
        """The rule which lists count, for a loss that is given these options."""
        if self.counts is None:
            return partial(_has_gradient, partial(self.function, **options), "generator" in self.parameters)
        taken = inspect.signature(self.counts).parameters
        return partial(self.counts, **{name: value for name, value in options.items() if name in taken})


def _has_gradient(loss: Callable[..., Tensor], random: bool, labels: Tensor, mask: Tensor) -> Tensor:
    """Lists with a gradient at generic scores: small, all different, so that no pair and no margin is satisfied yet."""
    with torch.enable_grad():
        place = torch.arange(labels.shape[-1], device=labels.device, dtype=torch.float32)
        scores = (0.01 * torch.sin(2.4 * place + 1.0)).expand(labels.shape).clone().requires_grad_()
        given = {"generator": torch.Generator(labels.device).manual_seed(0)} if random else {}
        values = loss(scores, labels, mask, reduction="none", check=False, **given)
        (gradient,) = torch.autograd.grad(values.sum(), scores)
    return (gradient != 0).any(-1)
