"""One step: scores, loss, gradient, optimiser; refused on the device if anything is not finite. Room 5.

Everything here may be recorded as a CUDA graph (capture.py): shapes are known beforehand, nothing is read back, and what changes
from step to step is in tensors: the batch, the learning rate, the generators' states.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.data.batching import Batch
from rankgrad.data.packing import Packed, padded
from rankgrad.models import EndToEnd

NUMBERS = 4  # of a report, before the marks of its lists


class Objective(NamedTuple):
    """A loss of scores, labels and mask -> one value per list, and the rule which lists it learns from."""

    values: Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]
    teaches: Callable[[Tensor, Tensor], Tensor]


class Scored(NamedTuple):
    """Padded lists and what a model says of them."""

    scores: Tensor  # [B, L], or [B, L, units]
    labels: Tensor  # [B, L]
    mask: Tensor  # [B, L]


class Rounded:
    """The bfloat16 weights that products read, beside those that learn: one copy of all of them a step, and one of the gradients."""

    def __init__(self, model: nn.Module, copied: nn.Module) -> None:
        self._own: list[Tensor] = list(model.parameters())
        self._copies: list[Tensor] = list(copied.parameters())

    def refresh(self) -> None:
        """Round what was learned."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._own)

    def collect(self) -> None:
        """Give the gradients to the weights that learn."""
        taught, given = [], []
        for own, copied in zip(self._own, self._copies):
            if copied.grad is not None:
                own.grad = torch.empty_like(own)
                taught.append(own.grad)
                given.append(copied.grad)
                copied.grad = None
        torch._foreach_copy_(taught, given)


class Update:
    """A step of training: a batch -> its report [4 + B] float64.

    The report holds the sum of the lists' losses, the sum of their weights, whether the step was refused, whether some process asked to
    stop, and then for each list of this process whether its loss or gradient is not finite. After a refused step that should
    stop the run (`halts`), every later one is refused as well, however late the host hears of it.
    """

    def __init__(
        self,
        score: Callable[[Any], Scored],
        objective: Objective,
        parameters: Sequence[nn.Parameter],
        optimiser: torch.optim.Optimizer,
        *,
        weights: Tensor | None,
        clip: float | None,
        halts: bool,
        amp: torch.autocast,
        generator: torch.Generator,
        rounded: Rounded | None = None,
    ) -> None:
        self._rounded = rounded
        self.asked = False  # this process was asked to stop
        self._score, self._objective, self._parameters, self._optimiser = score, objective, parameters, optimiser
        self._weights, self._clip, self._halts, self._amp, self._generator = weights, clip, halts, amp, generator
        self._halted = torch.zeros((), dtype=torch.bool, device=parameters[0].device)

    def __call__(self, batch: Any) -> Tensor:
        """Learn from a batch."""
        if self._rounded is not None:
            self._rounded.refresh()
        with self._amp:
            output, labels, mask = self._score(batch)
        scores = output.float()
        scores.retain_grad()
        values = self._objective.values(scores, labels, mask, self._generator)  # [B]
        share = self._objective.teaches(labels, mask).to(values.dtype)
        if self._weights is not None:
            share = share * self._weights[batch.queries].to(values.dtype)
        local = (values * share).sum()  # a list of share 0 is 0, or NaN if its loss is
        totals = torch.stack([local.detach().double(), share.sum().double(), local.new_zeros((), dtype=torch.float64)])
        world = 1
        if dist.is_initialized():
            world = dist.get_world_size()
            totals[2].fill_(float(self.asked))  # a fill, where a copy would stall
            dist.all_reduce(totals)
        count = torch.where(totals[1] > 0, totals[1], 1.0)
        (world * local / count.to(local.dtype)).backward()
        refused = self._apply(totals[0])
        assert scores.grad is not None
        suspects = ~(values.detach().isfinite() & scores.grad.isfinite().flatten(1).all(1))
        return torch.cat([totals[:2], refused.double()[None], totals[2:], suspects.double()])

    def _apply(self, loss: Tensor) -> Tensor:
        """Change the weights unless loss or gradient is not finite; whether that was so."""
        if self._rounded is not None:
            self._rounded.collect()
        parameters = [p for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        refused = ~(loss.isfinite() & norm.isfinite()) | self._halted
        if self._halts:
            self._halted.copy_(refused)
        # A fused optimiser leaves weights and moments alone where found_inf is set: nothing has to be asked of the device.
        self._optimiser.found_inf = refused.float()  # type: ignore[attr-defined]
        self._optimiser.grad_scale = None  # type: ignore[attr-defined]
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return refused


def padded_scores(model: nn.Module, *, compiled: bool) -> Callable[[Batch], Scored]:
    """How a model scores padded batches."""
    chosen = _compiled(model) if compiled else model
    return lambda batch: Scored(chosen(batch.features, batch.mask), batch.labels, batch.mask)


def packed_scores(
    model: Any, table: tuple[Tensor, Tensor] | None, *, kernel: bool, exact: bool, compiled: bool
) -> Callable[[Packed], Scored]:
    """How a model scores lists end to end; `table` holds the documents (features, labels) that rows count, None: the batch does."""

    def look(
        features: Tensor, labels: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, queries: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        lists = len(queries)
        filling = slots == lists * width
        documents = features[rows].masked_fill(filling[:, None], 0.0)
        scores = model.packed(documents, EndToEnd(offsets, width, kernel, exact))
        # The filling goes to a slot that is cut off again; backward this is a gather, where indexing would be a slow sum.
        flat = scores.new_zeros(lists * width + 1, *scores.shape[1:]).index_copy(0, slots, scores)
        return flat[:-1].unflatten(0, (lists, width)), *padded(rows, offsets, lists, width, labels)

    chosen = _compiled(look) if compiled else look

    def score(batch: Packed) -> Scored:
        features, labels = (batch.features, batch.labels) if table is None else table
        assert features is not None
        assert labels is not None
        return Scored(*chosen(features, labels, batch.rows, batch.slots, batch.offsets, batch.queries, batch.width))

    return score


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, compiled once for all sizes of batches."""
    made = torch.compile(function, dynamic=True)

    def call(*given: Any) -> Any:
        with warnings.catch_warnings():  # its advice on TF32 is what `precision` decides
            warnings.simplefilter("ignore")
            return made(*given)

    return call


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step have this learning rate; a rate that a graph reads is a tensor and stays where it is."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
