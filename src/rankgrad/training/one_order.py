"""Gradients on the CPU that are the same to the bit with any number of threads, so that the number may follow a machine's load.

torch takes three sums in an order that depends on its threads: the gradients of a linear layer's weights (on some CPUs), of a layer norm's
weights, and of a softmax. `InOneOrder` gives these operators gradients of their own while a model is called within it; values are torch's, to rounding.
What is left to torch (products with few terms, sums within a row) it takes in one order on the CPUs that were tried; whether it does so on
this one, `threads.learns_the_same` finds out.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Given = TypeVar("Given")
Found = TypeVar("Found")

PART = 256  # documents whose terms a product of matrices adds up; such parts are added one after the other
LARGEST_SUMS = 2**22  # numbers of the sums of parts that are held at once: 16 MiB


class InOneOrder(TorchFunctionMode):
    """Within it linear layers, layer norms and attention with dropout have gradients that do not depend on threads."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = None if torch.is_autocast_enabled("cpu") else _OWN.get(func)
        return (own or func)(*args, **(kwargs or {}))

    @classmethod
    def of(cls, function: Callable[[Given], Found]) -> Callable[[Given], Found]:
        """The same function, called within it."""

        def within(given: Given) -> Found:
            with cls():
                return function(given)

        return within


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    found: Tensor = _LayerNorm.apply(x, shape, weight, bias, eps)
    return found


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    if dropout_p == 0:  # torch has a kernel of its own, which takes a list's sums in one order
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
    found: Tensor = _Attention.apply(query, key, value, attn_mask, dropout_p)
    return found


_OWN: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.linear: _linear,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
}


class _Linear(torch.autograd.Function):
    """x W^T + b of x [..., before]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, slopes = x.flatten(0, -2), slope.flatten(0, -2).contiguous()
        of_x = (slopes @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        of_bias = (
            sum_of_products(slopes, slopes.new_ones(1, 1).expand(len(slopes), 1)).flatten() if ctx.biased else None
        )
        return of_x, sum_of_products(slopes, rows), of_bias


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of [N, a] and [N, b], the terms of `PART` rows at a time."""
    a, b = left.shape[1], right.shape[1]
    total = left.new_zeros(a, b)
    at_once = PART * max(1, LARGEST_SUMS // (a * b))
    for first, second in zip(left.split(at_once), right.split(at_once)):
        whole = len(first) // PART * PART
        parts = (first[:whole].unflatten(0, (-1, PART)), second[:whole].unflatten(0, (-1, PART)))
        total += torch.bmm(parts[0].mT, parts[1]).sum(0)
        total += first[whole:].T @ second[whole:]
    return total


class _LayerNorm(torch.autograd.Function):
    """Over the last dimension of x [..., W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        of_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            slope, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        of_weight = ((x - mean) * scale).mul_(slope)
        return of_x, None, of_weight.flatten(0, -2).sum(0), slope.flatten(0, -2).sum(0), None


class _Attention(torch.autograd.Function):
    """dropout(softmax(Q K^T / sqrt(D))) V of [..., L, D], over the keys that are `seen`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
        weights = query.mul(query.shape[-1] ** -0.5) @ key.mT  # [..., L, L]
        weights = (weights if seen is None else weights.masked_fill_(~seen, -math.inf)).softmax(-1)
        left = functional.dropout(weights, dropout)
        found = left @ value
        ctx.save_for_backward(query, key, value, weights, left, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        query, key, value, weights, left, found = ctx.saved_tensors
        mean = (slope * found).sum(-1, keepdim=True)  # of the gradients of a row's weights, by the weights
        of_scores = (slope @ value.mT).mul_(left).addcmul_(weights, mean, value=-1).mul_(query.shape[-1] ** -0.5)
        return of_scores @ key, of_scores.mT @ query, left.mT @ slope, None, None
