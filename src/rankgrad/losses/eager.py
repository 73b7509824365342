"""Small losses from eager code on a GPU: there a loss costs its launches, and a kernel has two where torch has forty.

Compilers fuse the torch path themselves, and torch.func needs it; second derivatives are its own too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rankgrad.core.lists import refuse_bad
from rankgrad.core.operators import by_kernel, has_values
from rankgrad.kernels import LONGEST_IN_A_PROGRAM, in_one_launch, list_loss_kernel


def has_kernel(
    backend: str,
    scores: Tensor,
    weights: Tensor | None,
    *numbers: float,
    longest: int = LONGEST_IN_A_PROGRAM,
    units: bool = False,
) -> bool:
    """Whether `list_loss` takes these scores [..., L] ([..., L, K] with `units`); `numbers` are what labels are compared with."""
    dim = -2 if units else -1
    return (
        not torch.compiler.is_compiling()
        and in_one_launch(backend, scores, weights, longest, *numbers, dim=dim)
        and has_values(scores)
    )


def list_loss(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    torch_path: Callable[[Tensor], Tensor],
    *,
    reduction: str,
    check: bool | None,
    noise: Tensor | None = None,
    option: float = 0.0,
    gain: object = None,
    units: bool = False,
) -> Tensor:
    """The loss `name` by its kernel, for which `noise` and `option` are; `torch_path` gives the same loss of other scores."""
    refuse_bad(scores, labels, mask, gain=gain, reduction=reduction, check=check, units=units)
    return by_kernel(scores, lambda: list_loss_kernel(name, scores, labels, mask, noise, option, reduction), torch_path)
