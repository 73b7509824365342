"""Losses whose kernel computes value and gradient together: in torch's graph, backward only multiplies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor, Tensor]]


def with_gradient(scores: Tensor, compute: Compute) -> Tensor:
    """The loss, a scalar or [...], that `compute` returns with d loss / d scores, [..., L] float32, attached to the scores."""
    if torch.compiler.is_compiling():  # the compiler must not look into what launches a kernel
        return torch.compiler.disable(_WithGradient.apply)(scores, compute)
    return _WithGradient.apply(scores, compute)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, compute: Compute) -> Tensor:
        loss, gradient = compute()
        ctx.dtype = scores.dtype
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        result = gradient * (grad.unsqueeze(-1) if grad.dim() else grad)
        return result if ctx.dtype == torch.float32 else result.to(ctx.dtype), None
