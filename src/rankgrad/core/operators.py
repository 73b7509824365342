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


def loss_operator(
    name: str, parameters: str, launch: Callable[..., tuple[Tensor, Tensor]], *, may_skip_gradient: bool = False
) -> Callable[..., Tensor]:
    """A loss of lists [..., L] whose kernel computes value and gradient together: the backward pass only multiplies.

    `launch` gives the loss and d loss / d scores in float32; the scores are its first argument, the reduction its last. With
    `may_skip_gradient` it takes one more in eager code: whether anyone wants the gradient.
    """
    schema = f"(Tensor scores, Tensor labels, Tensor? mask, Tensor? gains, str gain, {parameters}, str reduction) -> (Tensor, Tensor)"
    defined = torch.library.custom_op(f"rankgrad::{name}", launch, mutates_args=(), schema=schema)

    def result(scores: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        gradient = scores.new_empty(scores.shape, dtype=torch.float32)
        return gradient.new_empty(scores.shape[:-1] if others[-1] == "none" else ()), gradient

    def over_more_lists(info: Any, dims: Sequence[int | None], *arguments: Any) -> tuple[tuple[Tensor, Tensor], Any]:
        size = info.batch_size
        given = [
            (a.expand(size, *a.shape) if d is None else a.movedim(d, 0)) if isinstance(a, Tensor) else a
            for a, d in zip(arguments, dims)
        ]
        if given[0].dim() == 2 or given[-1] == "none":  # single lists: whatever the reduction, a list's loss is its own
            return defined(*given[:-1], "none"), (0, 0)
        parts = [defined(*(a[i] if isinstance(a, Tensor) else a for a in given)) for i in range(size)]
        return (torch.stack([loss for loss, _ in parts]), torch.stack([gradient for _, gradient in parts])), (0, 0)

    defined.register_fake(result)
    defined.register_vmap(over_more_lists)
    overload: Callable[..., tuple[Tensor, Tensor]] = getattr(torch.ops.rankgrad, name).default

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
            return overload(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(inputs[0], output[1])
            ctx.others = len(inputs) - 1

        @staticmethod
        def backward(ctx: Any, slope: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
            scores, gradient = ctx.saved_tensors
            first = differentiable_once(_times(gradient, slope, scores.dtype), scores, slope)
            return first, *(None for _ in range(ctx.others))

    def compiled_backward(ctx: Any, slope: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        scores, gradient = ctx.saved_tensors
        return _times(gradient, slope, scores.dtype), *(None for _ in range(ctx.others))

    def compiled_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.others = len(inputs) - 1

    torch.library.register_autograd(f"rankgrad::{name}", compiled_backward, setup_context=compiled_context)

    def apply(scores: Tensor, *others: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return overload(scores, *others)[0]
        if has_values(scores):
            wanted = (scores.requires_grad and torch.is_grad_enabled(),) if may_skip_gradient else ()
            loss: Tensor = _Loss.apply(scores, lambda: launch(scores, *others, *wanted))
            return loss
        loss, _ = Transformable.apply(scores, *others)
        return loss

    return apply


class _Loss(torch.autograd.Function):
    """A loss and its gradient in eager mode: an operator would take longer to be called than to run."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, compute: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        loss, gradient = compute()
        ctx.dtype = scores.dtype
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return _times(gradient, slope, ctx.dtype), None


def by_kernel(
    scores: Tensor, compute: Callable[[], tuple[Tensor, Tensor]], torch_path: Callable[[Tensor], Tensor]
) -> Tensor:
    """A loss of eager code by the kernel that `compute` launches; its second derivatives are those of the torch path."""
    loss: Tensor = _LossTwice.apply(scores, compute, torch_path)
    return loss


class _LossTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, compute: Callable[[], tuple[Tensor, Tensor]], torch_path: Callable[[Tensor], Tensor]
    ) -> Tensor:
        loss, gradient = compute()
        ctx.torch_path = torch_path
        ctx.save_for_backward(scores, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        scores, gradient = ctx.saved_tensors
        if not torch.is_grad_enabled():  # as always, but for create_graph=True
            return _times(gradient, slope, scores.dtype), None, None
        (again,) = torch.autograd.grad(ctx.torch_path(scores), scores, slope, create_graph=True)
        return again, None, None


def _times(gradient: Tensor, slope: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times what comes from above, rounded last."""
    if slope.dim():  # one value per list
        slope = slope.view(*slope.shape, *[1] * (gradient.dim() - slope.dim()))
    result = gradient * slope
    return result if dtype == torch.float32 else result.to(dtype)


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
