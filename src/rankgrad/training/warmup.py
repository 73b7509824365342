"""The kernels of a run, compiled side by side before its first step, which would compile them one after the other.

What is computed here is thrown away. A kernel is compiled for the kinds of its arguments: types, and whether sizes and addresses are
multiples of 16. Where those of a step should differ from these nothing is wrong, only compiled later.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.data.packed import Packed
from rankgrad.models import Transformer
from rankgrad.training.config import Train
from rankgrad.training.step import Objective

ROWS = 64  # of documents

Task = Callable[[], Tensor]


def compile_kernels(
    model: nn.Module,
    objective: Objective,
    settings: Train,
    batches: Sequence[Packed],
    features: int,
    device: torch.device,
) -> None:
    """Compute, with gradients, the parts of packed steps like these: lists end to end, an encoder block, the loss at every width.

    Nothing that goes wrong here stops a run: if it is of the run's own making, the step will say so.
    """
    if not batches:  # stopped after the last step of an epoch
        return
    widths = {batch.width for batch in batches}
    first, dtype = batches[0], torch.float32
    tasks = [_loss(objective, len(first.queries), width, device) for width in sorted(widths, reverse=True)]
    if isinstance(model, Transformer):
        dtype = torch.bfloat16 if settings.precision == "bf16" else dtype
        tasks = [*_encoder(model, dtype, settings.precision == "float32", device), *tasks]

    def compute(task: Task) -> None:
        # The gradient too in this thread: torch would have one for all of a device.
        with (
            torch.cuda.device_of(first.rows),
            torch.autograd.set_multithreading_enabled(False),
            contextlib.suppress(Exception),
        ):
            task().float().sum().backward()

    compute(_packing(first, features, dtype, device))  # alone: the first kernel of a process also starts the compiler
    with ThreadPoolExecutor(len(tasks)) as threads:
        list(threads.map(compute, tasks))


def _packing(batch: Packed, features: int, dtype: torch.dtype, device: torch.device) -> Task:
    def task() -> Tensor:
        from rankgrad.kernels.encoder.gather import gather, spread

        lists, rows = len(batch.queries), torch.zeros_like(batch.rows)
        slots, offsets = (
            batch.slots.clone(),
            batch.offsets.clone(),
        )  # slices are unaligned; clones are aligned, as in a real step
        table = torch.zeros(1, features, device=device)
        scores = gather(table, rows, slots, lists * batch.width, dtype)[:, 0].float().requires_grad_()
        return spread(scores, table[:, 0], rows, slots, offsets, lists, batch.width)[0]

    return task


def _loss(objective: Objective, lists: int, width: int, device: torch.device) -> Task:
    def task() -> Tensor:
        scores = torch.zeros(lists, width, device=device, requires_grad=True)
        labels, mask = torch.zeros_like(scores), torch.ones_like(scores, dtype=torch.bool)
        return objective.values(scores, labels, mask, torch.Generator(device))

    return task


def _encoder(model: Transformer, dtype: torch.dtype, exact: bool, device: torch.device) -> Iterator[Task]:
    """The kernels of a block whose products are of a dtype, the longest to compile first."""
    from rankgrad.kernels.encoder.attention import list_attention
    from rankgrad.kernels.encoder.fused import add_norm, linear, relu_dropout

    block: Any = model.blocks[0]
    dropout, heads = block.dropout.p, block.attention.heads
    width, inner, precise = model.norm.weight.shape[0], block.widen.out_features, model.output.weight.dtype
    seeds = torch.zeros(4, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, ROWS], dtype=torch.int32, device=device)

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device, requires_grad=True)

    def normed(into: torch.dtype) -> Tensor:
        hidden, norm = zeros(ROWS, width, kind=precise), nn.LayerNorm(width, device=device, dtype=precise)
        return add_norm(hidden, zeros(ROWS, width), zeros(width), norm, into, dropout, seeds)[1]

    yield lambda: list_attention(zeros(ROWS, 3, heads, width // heads), offsets, ROWS, dropout, seeds[:1], exact)
    for into in {dtype, precise}:
        yield functools.partial(normed, into)
    yield lambda: relu_dropout(zeros(ROWS, inner), zeros(inner), dropout, seeds)
    yield lambda: linear(zeros(ROWS, width), zeros(3 * width, width), zeros(3 * width))
