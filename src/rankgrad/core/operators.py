"""Hand-written backward passes under torch.compile, torch.export and torch.func.

These trace a program without values, or with tensors that stand for many. What reads values on the way (how long the lists are,
whether all of them have converged) or launches kernels is to them one operator, of which they are told the shape of the result,
the gradient, and what a further dimension of lists means. An operator runs the same code as eager mode; its backward pass runs the
forward pass again, because an operator keeps nothing but its inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = type[torch.autograd.Function]


def has_values(tensor: Tensor) -> bool:
    """Whether the host may read the tensor's values: not while compiling or exporting, nor inside torch.func.

    There is no public question for the latter; but its tensors have no storage of their own, and say so when asked for it.
    """
    if torch.compiler.is_compiling():
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def operator(
    name: str, parameters: str, find: Callable[[Tensor], Function], result: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """`find(first argument).apply`, also where tensors have no values.

    `parameters` is their schema, the tensors first; gradients flow to the first of them alone. All tensors begin with the lists,
    [B, ...]. `result` makes an empty tensor of the result's shape and dtype.
    """

    def value(*arguments: Any) -> Tensor:
        return find(arguments[0]).forward(_Context(False), *arguments)

    def gradient(slope: Tensor, *arguments: Any) -> Tensor:
        function, context = find(arguments[0]), _Context(True)
        with torch.no_grad():
            function.forward(context, *arguments)
            first: Tensor = function.backward(context, slope)[0]
            return first

    value_operator = _define(name, f"({parameters}) -> Tensor", value, result)
    gradient_operator = _define(
        f"{name}_gradient", f"(Tensor slope, {parameters}) -> Tensor", gradient, lambda _, x, *__: torch.empty_like(x)
    )
    transformable = _transformable(value_operator, gradient_operator)
    torch.library.register_autograd(
        f"rankgrad::{name}",
        lambda ctx, slope: _gradients(gradient_operator, ctx, slope),
        setup_context=transformable.setup_context,
    )

    def apply(*arguments: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return value_operator(*arguments)
        out: Tensor = (find(arguments[0]) if has_values(arguments[0]) else transformable).apply(*arguments)
        return out

    return apply


def differentiable_once(value: Tensor, *sources: Tensor) -> Tensor:
    """A gradient of the sources that refuses to be differentiated again, rather than being a constant."""
    out: Tensor = _Identity.apply(value, *sources)
    return out


class Last(torch.autograd.Function):
    """A Function that has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("relaxed sorts can be differentiated once: second derivatives are not implemented")


class _Identity(Last):
    @staticmethod
    def forward(value: Tensor, *_: Tensor) -> Tensor:
        return value.clone()


class _Context:
    """What a Function's forward and backward pass hand over, without autograd."""

    def __init__(self, needs_gradient: bool) -> None:
        self.needs_input_grad = (needs_gradient,)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _define(
    name: str, schema: str, body: Callable[..., Tensor], result: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """An operator of lists: its shape where there are no values, and lists of lists made one longer batch of lists."""
    defined = torch.library.custom_op(f"rankgrad::{name}", body, mutates_args=(), schema=schema)
    defined.register_fake(result)

    def over_more_lists(info: Any, dims: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
        out = defined(*(fold(a, d, info.batch_size) if isinstance(a, Tensor) else a for a, d in zip(arguments, dims)))
        return out.unflatten(0, (info.batch_size, -1)), 0

    defined.register_vmap(over_more_lists)
    overload: Callable[..., Tensor] = getattr(torch.ops.rankgrad, name).default
    return overload


def fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor of lists [B, ...] with a further dimension `dim` of `size` -> [size B, ...]; None: it is the same for all."""
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _transformable(value: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> Function:
    """The operator for torch.func, which does not take the autograd rules of custom operators."""

    class Gradient(Last):
        @staticmethod
        def forward(*arguments: Any) -> Tensor:
            return gradient(*arguments)

    class Value(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Tensor:
            return value(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
            tensors = [argument for argument in inputs if isinstance(argument, Tensor)]
            ctx.save_for_backward(*tensors)
            ctx.others = inputs[len(tensors) :]

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
            return _gradients(Gradient.apply, ctx, slope)

    return Value


def _gradients(gradient: Callable[..., Tensor], ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return gradient(slope, *tensors, *ctx.others), *(None for _ in (*tensors[1:], *ctx.others))
