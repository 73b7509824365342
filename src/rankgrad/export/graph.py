"""A ranker as one module without data-dependent Python: raw features and list sizes in, scores out."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from rankgrad.export.scaling import scaling_module
from rankgrad.models import MLP, AveragedMembers, Linear, list_inputs, ranking_scores, standardised
from rankgrad.ranker import Ranker

ROUNDING = 1e-6  # of a member's scores, in units of max(1, |score|)


class ScoringGraph(nn.Module):
    """Scores [N] float32 of raw documents [N, F] float32, list after list; sizes [Q] int64 says how many each list has.

    Scaling, list-relative inputs and averaged members are inside. Lists are padded to the longest for the model, as everywhere:
    lists of very different lengths are cheaper apart. Sizes that do not add up to N, or a negative one, make every score NaN:
    a graph cannot say more.
    """

    def __init__(self, ranker: Ranker, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype  # in which the model computes
        self.scaling = scaling_module(ranker.scaling)
        self.model = copy.deepcopy(ranker.model).cpu().to(dtype).eval().requires_grad_(False)
        self.averaged = _Averaged(self.model) if isinstance(self.model, AveragedMembers) else None
        self.units = ranker.units
        self.alone = isinstance(self.model, MLP | Linear) and self.model.inputs == "features"

    def forward(self, features: Tensor, sizes: Tensor) -> Tensor:
        """[N, F], [Q] -> [N]."""
        rows, width = features.shape
        # The row more is for padding; and onnxruntime has no sums of no rows.
        x = self.scaling(torch.cat([features, features.new_zeros(1, width)])).to(self.dtype)
        fits = (sizes.sum() == rows) & (sizes >= 0).all()
        scores = self._scored(x[None], None)[0, :rows] if self.alone else self._in_lists(x, rows, sizes.clamp(0, rows))
        return torch.where(fits, scores, torch.nan)

    def _scored(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.averaged is not None:
            return self.averaged(x, mask)
        return ranking_scores(self.model(x, mask).float(), self.units)

    def _in_lists(self, x: Tensor, rows: int, sizes: Tensor) -> Tensor:
        """Padded, scored, and back in their rows."""
        first = sizes.cumsum(0) - sizes
        longest = cast(int, torch.cat([sizes, sizes.new_full((1,), 2)]).max().item())  # int() would fix it
        torch._check(longest >= 2)  # attention to one document is another graph to torch.export
        place = torch.arange(longest)
        real = place < sizes[:, None]  # [Q, longest]
        source = torch.where(real, first[:, None] + place, rows).clamp(max=rows)
        padded = x.index_select(0, source.reshape(-1)).reshape(sizes.shape[0], longest, x.shape[1])
        scores = self._scored(padded, real).reshape(-1)
        # A list's first row adds 1 to the number of the list that every later row belongs to; empty lists add nothing to see.
        begins = torch.zeros(rows + 1, dtype=torch.int64).scatter_add(0, first.clamp(max=rows), torch.ones_like(first))
        number = begins.cumsum(0)[:rows] - 1
        within = torch.arange(rows) - first.index_select(0, number)
        return scores.index_select(0, (number * longest + within).clamp(0, scores.shape[0] - 1))


class _Averaged(nn.Module):
    """`AveragedMembers` with weights where runtimes want them: the first layers of all members are one matrix, known beforehand.

    What comes after the networks is in float64: where a member's scores are nearly equal, standardising them enlarges what tanh
    loses in float32.
    """

    def __init__(self, model: AveragedMembers) -> None:
        super().__init__()
        self.members = members = model.members
        count, (before, after) = len(members.weights), members.shapes[0]
        split = [part.detach() for part in members.weights.split(members.sizes, 1)]
        layers = list(zip(members.shapes, split[::2], split[1::2]))
        matrices = [weight.view(count, *shape) for shape, weight, _ in layers]
        numbers = before - members.document.embedding  # inputs that are the same to all members
        self.register_buffer("first", matrices[0][:, :numbers].transpose(0, 1).reshape(numbers, count * after).clone())
        self.register_buffer("of_vectors", matrices[0][:, numbers:].clone())
        for number, (matrix, (_, _, bias)) in enumerate(zip(matrices, layers)):
            self.register_buffer(f"bias{number}", bias[:, None].clone())
            if number:
                self.register_buffer(f"weight{number}", matrix.clone())
        self.tables = [part.clone() for part in split[2 * len(members.shapes) :]]
        self.count, self.layers = count, len(layers)
        self.first: Tensor
        self.of_vectors: Tensor

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Scores [B, L] of scaled documents [B, L, F]."""
        lists, longest, _ = x.shape
        numbers, codes = self.members.document.parts(x, mask, self.first.dtype)
        inputs = list_inputs(numbers, mask, self.members.inputs).flatten(0, 1)
        hidden = (inputs @ self.first).unflatten(-1, (self.count, -1)).transpose(0, 1)  # [K, T, H]
        if codes is not None:
            hidden = hidden + self.members.category_vectors(codes.flatten(0, 1), self.tables) @ self.of_vectors
        hidden = hidden + self.get_buffer("bias0")
        for layer in range(1, self.layers):
            hidden = hidden.relu() @ self.get_buffer(f"weight{layer}") + self.get_buffer(f"bias{layer}")
        scores = self.members.scaled(hidden.squeeze(-1).double()).reshape(self.count, lists, longest)
        return standardised(_equal_but_for_rounding(scores, mask), mask).mean(0).float()


def _equal_but_for_rounding(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores [K, B, L] with 0 in lists whose scores are equal: runtimes round equal rows of one product differently."""
    hidden = None if mask is None else ~mask
    low, high = ((scores if hidden is None else scores.masked_fill(hidden, end)) for end in (torch.inf, -torch.inf))
    low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    equal = high - low <= ROUNDING * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return torch.where(equal, 0.0, scores)
