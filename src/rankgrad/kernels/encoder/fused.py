"""What is between the products of an encoder block, fused: one launch forward, two backward, where torch takes a dozen.

    add_norm       total = hidden + dropout(product + bias),  layer_norm(total)
    relu_dropout   dropout(relu(product + bias))
    linear         x W^T + bias

`product` is a product of matrices [T, W] of any float dtype without its bias; everything between is float32. What dropout keeps is
a hash of (seeds, position), computed again in the backward pass. Sums over documents, the gradients of biases and norms, are
made in two fixed steps, so that the same step gives the same bits again. `reference` has the same functions in torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

_ENTRIES = 2048  # of a program at a time
_COLUMNS = 128  # of a program that need not see whole rows
_PROGRAMS = 256  # at most, where programs share the documents and leave sums


@triton.jit
def _kept(seeds, place, threshold):
    """True with probability 1 - threshold / 2^31, so always for 0: the hash of `reference.kept`."""
    x = place.to(tl.int32) ^ tl.load(seeds)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ tl.load(seeds + 1) ^ (x >> 15)) * (0x846CA68B - 0x100000000)
    return ((x ^ (x >> 16)) & 0x7FFFFFFF) >= threshold


@triton.jit
def _unit(x, here, W, eps):
    """Rows of x [R, N] less their mean, to unit variance, and by what they were divided; x is 0 where nothing is here."""
    centred = tl.where(here, x - (tl.sum(x, axis=1) / W)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / W + eps)
    return centred * inverse[:, None], inverse


@triton.jit(do_not_specialize=["threshold", "add"])
def _add_norm(
    hidden, product, bias, seeds, weight, shift, total, normed, T, W, eps, threshold, scale, add,
    R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`add` is 0 where there is no hidden. Like the threshold no constexpr: each further kernel takes half a second to compile."""
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    inside = column < W
    here = (row < T)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * W + column[None, :]
    x = tl.load(product + place, mask=here, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    x = tl.where(_kept(seeds, place, threshold), x * scale, 0.0)
    x += tl.load(hidden + place, mask=here & (row < T * add)[:, None], other=0.0)
    unit, _ = _unit(x, inside[None, :], W, eps)
    w, b = tl.load(weight + column, mask=inside, other=0.0), tl.load(shift + column, mask=inside, other=0.0)
    tl.store(total + place, x, mask=here)
    tl.store(normed + place, (unit * w[None, :] + b[None, :]).to(normed.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["threshold", "add", "beyond"])
def _add_norm_backward(
    total, d_total, d_normed, seeds, weight, d_hidden, d_product, parts, T, W, eps, threshold, scale, add, beyond,
    R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`beyond` is 0 where only the norm used the total. A program stores its sums in parts[program, (weight, shift, bias), W]."""
    column = tl.arange(0, N)
    inside = column < W
    w = tl.load(weight + column, mask=inside, other=0.0)[None, :]
    for_weight, for_shift, for_bias = (
        tl.zeros([R, N], tl.float32),
        tl.zeros([R, N], tl.float32),
        tl.zeros([R, N], tl.float32),
    )
    for tile in range(tl.program_id(0), tl.cdiv(T, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        here = (row < T)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * W + column[None, :]
        x = tl.load(total + place, mask=here, other=0.0)  # all loads first, so that none waits for arithmetic
        g = tl.load(d_normed + place, mask=here, other=0.0).to(tl.float32)
        past = tl.load(d_total + place, mask=here & (row < T * beyond)[:, None], other=0.0)
        unit, inverse = _unit(x, here, W, eps)
        for_weight += g * unit
        for_shift += g
        g = g * w
        d = (g - (tl.sum(g, axis=1) / W)[:, None] - unit * (tl.sum(g * unit, axis=1) / W)[:, None]) * inverse[:, None]
        d += past
        tl.store(d_hidden + place, d, mask=here & (row < T * add)[:, None])
        d = tl.where(_kept(seeds, place, threshold), d * scale, 0.0)
        tl.store(d_product + place, d.to(d_product.dtype.element_ty), mask=here)
        for_bias += tl.where(here, d, 0.0)
    at = parts + tl.program_id(0) * 3 * W + column
    tl.store(at, tl.sum(for_weight, axis=0), mask=inside)
    tl.store(at + W, tl.sum(for_shift, axis=0), mask=inside)
    tl.store(at + 2 * W, tl.sum(for_bias, axis=0), mask=inside)


@triton.jit(do_not_specialize=["threshold"])
def _relu(product, bias, seeds, out, T, W, threshold, scale, R: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * N + tl.arange(0, N)
    here = (row < T)[:, None] & (column < W)[None, :]
    place = row.to(tl.int64)[:, None] * W + column[None, :]
    x = tl.load(product + place, mask=here, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=column < W, other=0.0).to(tl.float32)[None, :]
    x = tl.where(x <= 0, 0.0, x)  # a NaN stays one
    x = tl.where(_kept(seeds, place, threshold), x * scale, 0.0)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=here)


@triton.jit
def _sums(grad, out, into, parts, T, W, scale, R: tl.constexpr, N: tl.constexpr, RELU: tl.constexpr):
    """parts[program, W]: sums of columns of grad [T, W], or with RELU of the part that passes _relu, which is stored in `into`."""
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([R, N], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(T, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        here = (row < T)[:, None] & (column < W)[None, :]
        place = row.to(tl.int64)[:, None] * W + column[None, :]
        d = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        if RELU:
            passed = tl.load(out + place, mask=here, other=0.0)
            d = tl.where(passed <= 0, 0.0, d * scale)
            tl.store(into + place, d.to(into.dtype.element_ty), mask=here)
        total += d
    tl.store(parts + tl.program_id(0) * W + column, tl.sum(total, axis=0), mask=column < W)


@triton.jit(do_not_specialize=["programs"])
def _collect(parts, first, second, programs, W, split, R: tl.constexpr, N: tl.constexpr):
    """Sums of the columns of parts [programs, W]: those before `split` to first, the others to second."""
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, R)
    here = (row < programs)[:, None] & (column < W)[None, :]
    sums = tl.sum(tl.load(parts + row[:, None] * W + column[None, :], mask=here, other=0.0), axis=0)
    tl.store(first + column, sums.to(first.dtype.element_ty), mask=column < split)
    tl.store(second + column - split, sums.to(second.dtype.element_ty), mask=(column >= split) & (column < W))


def project(x: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """The product of x [T, V] with a layer's weight, and the bias that has yet to be added."""
    return x @ layer.weight.t(), layer.bias


def add_norm(
    hidden: Tensor | None,
    product: Tensor,
    bias: Tensor,
    norm: nn.LayerNorm,
    dtype: torch.dtype,
    dropout: float,
    seeds: Tensor,
) -> tuple[Tensor, Tensor]:
    """Hidden [T, W] float32 (None: 0) + dropout(product [T, W] + bias), in float32, and its layer norm in `dtype`.

    seeds are two int32 on the device.
    """
    return _AddNorm.apply(hidden, product, bias, norm.weight, norm.bias, norm.eps, dtype, dropout, seeds)


def relu_dropout(product: Tensor, bias: Tensor, dropout: float, seeds: Tensor) -> Tensor:
    """dropout(relu(product [T, W] + bias)) in the product's dtype."""
    return _ReluDropout.apply(product, bias, dropout, seeds)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's linear of x [T, V], with a faster sum for the gradient of its bias."""
    return _Linear.apply(x, weight, bias)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor | None,
        product: Tensor,
        bias: Tensor,
        weight: Tensor,
        shift: Tensor,
        eps: float,
        dtype: torch.dtype,
        dropout: float,
        seeds: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (rows, width), product = product.shape, product.contiguous()
        total = product.new_empty(product.shape, dtype=torch.float32)
        normed = product.new_empty(product.shape, dtype=dtype)
        meta, numbers = _whole_rows(width), (rows, width, eps, *_rule(dropout), int(hidden is not None))
        with torch.cuda.device_of(product):
            _add_norm[(triton.cdiv(rows, meta["R"]),)](
                total if hidden is None else hidden.contiguous(),
                product, bias, seeds, weight, shift, total, normed, *numbers, **meta,
            )  # fmt: skip
        ctx.save_for_backward(total, bias, weight, seeds)
        ctx.how, ctx.dtype = (numbers, meta), product.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, bias, weight, seeds = ctx.saved_tensors
        d_normed = torch.zeros_like(total) if d_normed is None else d_normed.contiguous()
        numbers, meta = ctx.how
        rows, width, *_, add = numbers
        d_hidden = torch.empty_like(total) if add else None
        d_product = torch.empty_like(total, dtype=ctx.dtype)
        programs = min(triton.cdiv(rows, meta["R"]), _PROGRAMS)
        parts = total.new_empty(programs, 3, width)
        with torch.cuda.device_of(total):
            _add_norm_backward[(programs,)](
                total, total if d_total is None else d_total.contiguous(), d_normed, seeds, weight,
                total if d_hidden is None else d_hidden, d_product, parts, *numbers, int(d_total is not None), **meta,
            )  # fmt: skip
        d_norm, d_bias = weight.new_empty(2, width), torch.empty_like(bias)
        _collect_parts(parts.flatten(1), d_norm, d_bias)
        return d_hidden, d_product, d_bias, *d_norm, None, None, None, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor, dropout: float, seeds: Tensor) -> Tensor:
        (rows, width), product = product.shape, product.contiguous()
        out = torch.empty_like(product)
        meta = _part_rows()
        grid = triton.cdiv(rows, meta["R"]), triton.cdiv(width, meta["N"])
        with torch.cuda.device_of(product):
            _relu[grid](product, bias, seeds, out, rows, width, *_rule(dropout), **meta)
        ctx.save_for_backward(out)
        ctx.scale, ctx.dtype = 1 / (1 - dropout), bias.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        into = torch.empty_like(out)
        return into, _column_sums(grad, ctx.dtype, out, into, ctx.scale), None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = bias.dtype
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # under autocast of another dtype than the gradient
        d_x, d_weight = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), _column_sums(grad, ctx.dtype)


def _column_sums(
    grad: Tensor, dtype: torch.dtype, out: Tensor | None = None, into: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Sums over the documents of grad [T, W], or of the part that passes _relu, which is stored in `into`."""
    (rows, width), grad = grad.shape, grad.contiguous()
    meta = _part_rows()
    programs = min(triton.cdiv(rows, meta["R"]), _PROGRAMS)
    parts = grad.new_empty(programs, width, dtype=torch.float32)
    sums = grad.new_empty(width, dtype=dtype)
    with torch.cuda.device_of(grad):
        grid = programs, triton.cdiv(width, meta["N"])
        _sums[grid](grad, out, into, parts, rows, width, scale, RELU=out is not None, **meta)
    _collect_parts(parts, sums, sums.new_empty(0))
    return sums


def _collect_parts(parts: Tensor, first: Tensor, second: Tensor) -> None:
    """Fill first and then second with the sums over the programs of parts [programs, W]."""
    programs, width = parts.shape
    with torch.cuda.device_of(parts):
        _collect[(triton.cdiv(width, 8),)](parts, first, second, programs, width, first.numel(), R=_PROGRAMS, N=8)


def _rule(dropout: float) -> tuple[int, float]:
    """The threshold of the hash, and the factor of what is kept."""
    return int(dropout * 2**31), 1 / (1 - dropout)


def _whole_rows(width: int) -> dict[str, Any]:
    columns = triton.next_power_of_2(width)
    return {"R": max(1, _ENTRIES // columns), "N": columns}


def _part_rows() -> dict[str, Any]:
    return {"R": _ENTRIES // _COLUMNS, "N": _COLUMNS}
