"""Scores and gradients on the CPU that are the same to the bit with any number of threads, so that the number may follow a machine's load.

torch shares one large sum, or one product of matrices, out among its threads, and then the order of the terms depends on them. Several products
at once it gives to a thread each. So `InOneOrder` computes what would be one product as several, of `PART` rows and more each, and never a sum
of all rows at once; what it finds is torch's, to rounding. What is left to torch (sums within a row) it takes in one order on the CPUs that
were tried; whether it does so on this one, `threads.learns_the_same` finds out.

Dropout is drawn here too, four units from a random number. torch takes a number for each, all of them by one thread: a quarter of a step of the
paper's model by one thread, and two thirds by sixteen.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Given = TypeVar("Given")
Found = TypeVar("Found")

PART = 256  # rows, of documents: fewer take longer, and more are seldom enough for several threads
SUMMED = 16  # products that are added up: each is as large as the layer
SMALLEST = 8  # rows of a part: a product with a vector is again shared out
LARGEST_AT_ONCE = 2**22  # numbers on the way to a sum that are held at once: 16 MiB


class InOneOrder(TorchFunctionMode):
    """Within it linear layers, layer norms, attention and dropout do not depend on threads, nor do their gradients."""

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


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    return x * kept(x, p) if training and p else x


def kept(x: Tensor, dropout: float) -> Tensor:
    """What dropout multiplies x by: 0 with its probability, to 16 bits, and else what leaves the mean as it is."""
    dropped = min(round(dropout * 2**16), 2**16 - 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits are random
    drawn = words.view(torch.int16)[: x.numel()].view(x.shape)
    return (drawn >= dropped - 2**15).to(x.dtype).mul_(2**16 / (2**16 - dropped))


_OWN: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.dropout: _dropout,
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
        return times(x.flatten(0, -2), weight.T, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, slopes = x.flatten(0, -2), slope.flatten(0, -2).contiguous()
        of_x = times(slopes, weight).view_as(x) if ctx.needs_input_grad[0] else None
        return of_x, sum_of_products(slopes, rows), sum_of_rows(slopes) if ctx.biased else None


def times(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows x [N, a] by a matrix [a, b], plus [b]."""
    added, beta = (x.new_zeros(1), 0) if bias is None else (bias, 1)
    if matrix.shape[1] == 1:
        at_once = PART * max(1, LARGEST_AT_ONCE // (PART * len(matrix)))
        return torch.cat([(rows * matrix.T).sum(1, keepdim=True) for rows in x.split(at_once)]).add_(added)
    found = x.new_empty(len(x), matrix.shape[1])
    for rows, parts in _in_parts(x):
        place, several = found[rows], matrix.expand(len(parts), -1, -1)
        if len(place) == parts.shape[:2].numel():
            torch.baddbmm(added, parts, several, beta=beta, out=place.unflatten(0, parts.shape[:2]))
        else:  # without the zeros
            place[:] = torch.baddbmm(added, parts, several, beta=beta).flatten(0, 1)[: len(place)]
    return found


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of [N, a] and [N, b]."""
    a, b = left.shape[1], right.shape[1]
    total = left.new_zeros(a, b)
    if a == 1:
        at_once = PART * max(1, LARGEST_AT_ONCE // (PART * b))
        for first, second in zip(left.split(at_once), right.split(at_once)):
            total += sum_of_rows(first * second)
        return total
    most = max(2, min(SUMMED, LARGEST_AT_ONCE // (a * b)))
    for (_, first), (_, second) in zip(_in_parts(left, most), _in_parts(right, most)):
        total += torch.bmm(first.mT, second).sum(0)
    return total


def sum_of_rows(x: Tensor) -> Tensor:
    """Of x [N, a]."""
    whole = len(x) // PART * PART
    return x[:whole].unflatten(0, (-1, PART)).sum(1).sum(0) + x[whole:].sum(0)


def _in_parts(x: Tensor, most: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x [N, a] as parts [P, rows, a], and then the rest of them, if any, in two parts with zeros behind it: never as one."""
    count = len(x) // PART if most is None else min(len(x) // PART, most)
    count = next((fewer for fewer in range(count, count // 2, -1) if len(x) % fewer == 0), count)  # without a rest
    whole = len(x) // count * count if count > 1 else 0
    if whole:
        yield slice(whole), x[:whole].unflatten(0, (count, -1))
    if whole < len(x):
        rest = functional.pad(x[whole:], (0, 0, 0, -(len(x) - whole) % (2 * SMALLEST)))
        yield slice(whole, None), rest.unflatten(0, (2, -1))


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
        return of_x, None, sum_of_rows(of_weight.flatten(0, -2)), sum_of_rows(slope.flatten(0, -2)), None


class _Attention(torch.autograd.Function):
    """dropout(softmax(Q K^T / sqrt(D))) V of [..., L, D], over the keys that are `seen`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
        weights = _of_each(query.mul(query.shape[-1] ** -0.5), key.mT)  # [..., L, L]
        weights = (weights if seen is None else weights.masked_fill_(~seen, -math.inf)).softmax(-1)
        left = weights * kept(weights, dropout)
        found = _of_each(left, value)
        ctx.save_for_backward(query, key, value, weights, left, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        query, key, value, weights, left, found = ctx.saved_tensors
        mean = (slope * found).sum(-1, keepdim=True)  # of the gradients of a row's weights, by the weights
        of_scores = _of_each(slope, value.mT).mul_(left).addcmul_(weights, mean, value=-1)
        of_scores = of_scores.mul_(query.shape[-1] ** -0.5)
        return _of_each(of_scores, key), _of_each(of_scores.mT, query), _of_each(left.mT, slope), None, None


def _of_each(left: Tensor, right: Tensor) -> Tensor:
    """Products of matrices [..., a, b] and [..., b, c]; a single one is computed twice, and not shared out."""
    if left.shape[:-2].numel() > 1:
        return left @ right
    twice = (matrix.flatten(0, -3).expand(2, -1, -1) for matrix in (left, right))
    return torch.bmm(*twice)[:1].view(*left.shape[:-1], right.shape[-1])
