"""One step: scores, loss, gradient, optimiser; refused on the device if anything is not finite.

Everything here may be recorded as a CUDA graph (cuda_graph.py): shapes are known beforehand, nothing is read back, and what
changes from step to step is in tensors: the batch, the learning rate, the generators' states.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.data.batches import Batch, WeightedBatch
from rankgrad.data.packed import Packed, padded
from rankgrad.models import PackedLayout, Transformer

REPORT_HEAD = 4  # numbers of a report, before one mark for each of its lists


class Objective(NamedTuple):
    """A loss of scores, labels and mask -> one value per list, and what its mean is over."""

    values: Callable[..., Tensor]  # of scores, labels, mask, a generator and, where documents have them, weights
    counts: Callable[[Tensor, Tensor], Tensor]  # labels, mask -> which lists count, [B] bool
    by_document: bool = False  # the mean is over the documents of these lists, not over the lists
    weighted: bool = False  # it takes weights of documents


class ScoredBatch(NamedTuple):
    """Padded lists and the scores a model gives them."""

    scores: Tensor  # [B, L], or [B, L, units]
    labels: Tensor  # [B, L]
    mask: Tensor  # [B, L]


class Bf16Shadow:
    """bfloat16 copies of the weights that a model's products read, in one tensor, so that one kernel rounds them all."""

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        pairs = [(own, its) for own, its in zip(model.parameters(), twin.parameters()) if own is not its]
        self._own, self._its = [own for own, _ in pairs], [its for _, its in pairs]
        sizes = [own.numel() for own in self._own]
        self._weights = torch.cat([own.detach().flatten() for own in self._own])
        self._rounded = self._weights.bfloat16()
        self._gradient = torch.empty_like(self._weights)
        self._slopes = [part.view_as(own) for part, own in zip(self._gradient.split(sizes), self._own)]
        for (own, its), weights, low in zip(pairs, self._weights.split(sizes), self._rounded.split(sizes)):
            own.data, its.data = weights.view_as(own), low.view_as(its)

    def refresh(self) -> None:
        """Round what was learned."""
        self._rounded.copy_(self._weights)

    def collect(self) -> None:
        """Give the gradients to the weights that learn."""
        slopes = [torch.zeros_like(its) if its.grad is None else its.grad for its in self._its]
        self._gradient.copy_(torch.cat([slope.flatten() for slope in slopes]))
        for own, its, slope in zip(self._own, self._its, self._slopes):
            own.grad, its.grad = slope, None


class TrainStep:
    """A step of training: a batch -> its report [4 + B] float64.

    The report holds the sum of the lists' losses, what their mean is to be divided by, whether the step was refused, whether
    some process asked to stop, and then for each list of this process whether its loss or gradient is not finite. After a
    refused step that should stop the run (`halts`), every later one is refused as well, however late the host reads of it.
    """

    def __init__(
        self,
        score: Callable[[Any], ScoredBatch],
        objective: Objective,
        parameters: Sequence[nn.Parameter],
        optimiser: torch.optim.Optimizer,
        *,
        weights: Tensor | None,
        clip: float | None,
        halts: bool,
        amp: torch.autocast,
        generator: torch.Generator,
        shadow: Bf16Shadow | None,
        document_weights: Tensor | None = None,
    ) -> None:
        self.asked = False  # this process was asked to stop
        self._rate: float | None = None
        self._score, self._objective, self._parameters, self._optimiser = score, objective, parameters, optimiser
        self._weights, self._clip, self._halts, self._amp, self._generator = weights, clip, halts, amp, generator
        self._shadow = shadow
        self._document_weights = document_weights  # [N], of lists that lie on the device
        self._halted = torch.zeros((), dtype=torch.bool, device=parameters[0].device)
        self._world = dist.get_world_size() if dist.is_initialized() else 1

    def prepare(self, rate: float, *, asked: bool) -> None:
        """Give the next step its learning rate; a rate that a graph reads is a tensor and stays where it is."""
        self.asked = asked
        if rate == self._rate:
            return
        self._rate = rate
        for group in self._optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, batch: Any) -> Tensor:
        """Learn from a batch."""
        if self._shadow is not None:
            self._shadow.refresh()
        with self._amp:
            output, labels, mask = self._score(batch)
        weights = document_weights(batch, self._document_weights)
        scores = output.float()
        scores.retain_grad()
        given = () if weights is None else (weights,)
        values = self._objective.values(scores, labels, mask, self._generator, *given)  # [B]
        totals, slope = self._totals(values.detach(), labels, mask, batch.queries, weights)
        values.backward(slope)
        if self._shadow is not None:
            self._shadow.collect()
        parameters = [p for p in self._parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([p.grad for p in parameters if p.grad is not None]))
        assert scores.grad is not None
        report, found, norm = _report(totals, norms, values.detach(), scores.grad, self._halted)
        if self._world > 1:  # gradients are equal unless a machine errs, and then none may go on alone
            dist.all_reduce(found, dist.ReduceOp.MAX)
            report[2] = found
        if self._halts:
            self._halted.copy_(found)
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        # A fused optimiser leaves weights and moments alone where found_inf is set: nothing has to be asked of the device.
        self._optimiser.found_inf = found  # type: ignore[attr-defined]
        self._optimiser.grad_scale = None  # type: ignore[attr-defined]
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return report

    def _totals(
        self, values: Tensor, labels: Tensor, mask: Tensor, queries: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums of losses, of what they count, and of who asked to stop [3] float64; and d loss / d values [B]."""
        share = self._objective.counts(labels, weighing(mask, weights)).to(values.dtype)
        if self._weights is not None:
            share = share * self._weights[queries].to(values.dtype)
        shared = values * share  # a list of share 0 is 0, or NaN if its loss is
        counted = share * sum_weights(mask, weights) if self._objective.by_document else share
        totals = torch.stack([shared, counted, torch.zeros_like(share)]).sum(1, dtype=torch.float64)
        if self._world > 1:
            totals[2].fill_(float(self.asked))  # a fill, where a copy would stall
            dist.all_reduce(totals)
        count = torch.where(totals[1] > 0, totals[1], 1.0)
        return totals, share * (self._world / count).to(share.dtype)


def document_weights(batch: Any, weights: Tensor | None) -> Tensor | None:
    """Weights [B, L] of a batch's documents, 0 under the padding; None if they have none.

    A padded batch brings them along; of packed lists they are the batch's own, or those `weights` [N] that its rows count.
    """
    if isinstance(batch, WeightedBatch):
        return batch.weights
    own = (weights if batch.weights is None else batch.weights) if isinstance(batch, Packed) else None
    return None if own is None else padded(batch.rows, batch.offsets, len(batch.queries), batch.width, own)[0]


def weighing(mask: Tensor, weights: Tensor | None) -> Tensor:
    """Real documents that weigh more than 0, [B, L] bool."""
    return mask if weights is None else mask & (weights > 0)


def sum_weights(mask: Tensor, weights: Tensor | None) -> Tensor:
    """What the documents of each list weigh together, [B]: their number where all weigh 1."""
    return mask.sum(-1) if weights is None else weights.sum(-1)


def _report(
    totals: Tensor, norms: Tensor, values: Tensor, gradient: Tensor, halted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The report of a step, 1 or 0 for whether it is refused, and the norm of the gradient.

    Asked of sums, which takes a third of the launches of asking every number; in float64 finite ones have a finite sum.
    """
    norm = torch.linalg.vector_norm(norms)
    refused = ~((totals[0] + norm).abs() < math.inf) | halted
    suspects = ~((values + gradient.flatten(1).sum(1, dtype=torch.float64)).abs() < math.inf)
    report = torch.cat([totals[:2], refused[None], totals[2:], suspects])
    return report, refused.float(), norm


def padded_scores(model: nn.Module) -> Callable[[Batch], ScoredBatch]:
    """How a model scores padded batches."""
    return lambda batch: ScoredBatch(model(batch.features, batch.mask), batch.labels, batch.mask)


def packed_scores(
    model: Any, table: tuple[Tensor, Tensor] | None, *, kernel: bool, exact: bool
) -> Callable[[Packed], ScoredBatch]:
    """How a model scores lists end to end; `table` holds the documents (features, labels) that rows count, None: the batch does."""
    halved = isinstance(model, Transformer) and not model.document.categories  # whose codes must stay as they are
    wanted = model.input.weight.dtype if halved else None  # None: as they are

    def score(batch: Packed) -> ScoredBatch:
        features, labels = (batch.features, batch.labels) if table is None else table
        assert features is not None
        assert labels is not None
        rows, slots, offsets, queries, width, *_ = batch
        lists = len(queries)
        if kernel:
            from rankgrad.kernels.encoder.gather import gather, spread

            documents = gather(features, rows, slots, lists * width, wanted or features.dtype)
            scores = model.packed(documents, PackedLayout(offsets, width, kernel, exact))
            return ScoredBatch(*spread(scores, labels, rows, slots, offsets, lists, width))
        documents = features[rows].masked_fill((slots == lists * width)[:, None], 0.0)
        scores = model.packed(documents, PackedLayout(offsets, width, kernel, exact))
        # The padding rows go to a slot that is cut off again; its backward is a gather, where that of indexing would be a slow sum.
        flat = scores.new_zeros(lists * width + 1, *scores.shape[1:]).index_copy(0, slots, scores)
        return ScoredBatch(flat[:-1].unflatten(0, (lists, width)), *padded(rows, offsets, lists, width, labels))

    return score
