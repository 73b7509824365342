"""Values and gradients that a kernel computed together, put into torch's graph: backward only multiplies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Computed(torch.autograd.Function):
    """A loss that comes with its gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, compute: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """Scores [..., L]; `compute` gives the loss, a scalar or [...], and d loss / d scores, [..., L] float32."""
        loss, gradient = compute()
        ctx.dtype = scores.dtype
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """d/d scores."""
        (gradient,) = ctx.saved_tensors
        result = gradient * (grad.unsqueeze(-1) if grad.dim() else grad)
        return result if ctx.dtype == torch.float32 else result.to(ctx.dtype), None


def computed(scores: Tensor, compute: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """The loss that `compute` finds with its gradient, attached to the scores."""
    if torch.compiler.is_compiling():  # what launches a kernel is left as it is, in one piece
        return torch.compiler.disable(Computed.apply)(scores, compute)
    return Computed.apply(scores, compute)


class Attach(torch.autograd.Function):
    """The loss of lists whose values and gradients are known, reduced as the caller asks."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor, gradient: Tensor, weighs: Tensor, reduction: str) -> Tensor:
        """Scores [..., L], values [B, parts] to be added, gradient [B, L] in float32, weighs [B] -> the loss."""
        ctx.shape, ctx.dtype, ctx.reduction = scores.shape, scores.dtype, reduction
        total = weighs.sum().clamp_(min=1) if reduction == "mean" else None
        ctx.save_for_backward(gradient, total)
        if reduction == "none":
            return values.sum(-1).view(scores.shape[:-1])
        return values.sum() if total is None else values.sum() / total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/d scores."""
        gradient, total = ctx.saved_tensors
        factor = grad.reshape(-1, 1) if ctx.reduction == "none" else grad
        factor = factor if total is None else factor / total
        return (gradient * factor).to(ctx.dtype).view(ctx.shape), None, None, None, None
