"""A fitted scaling in operations of torch that torch.export and ONNX have.

It computes in float64 what `Scaling.apply` computes with numpy in float64, so that the two differ by the last bits alone. ONNX has no
search in a sorted table: quantiles are found by comparisons and sums.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad.data.scaling import ABSURD, LOG, SYMLOG, Scaling


def scaling_module(scaling: Scaling) -> nn.Module:
    """Raw features [N, F] float32 -> what `Scaling.apply` makes of them, [N, inputs] float32."""
    return _Quantiles(scaling) if scaling.kind == "quantile" else _Curves(scaling)


class _Tamed(nn.Module):
    """What all scalings do: absurd values become the end of the ordinary range, missing ones 0, and indicators follow.

    A column of categories holds the place of its text among the levels of the scaling, and comes out as a model's code.
    """

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        low, high = (torch.from_numpy(np.array(scaling.arrays[name], np.float64)) for name in ("low", "high"))
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("too_low", low.clamp(max=-ABSURD))
        self.register_buffer("too_high", high.clamp(min=ABSURD))
        levels = [len(scaling.levels.get(column, ())) for column in range(scaling.columns)]
        self.register_buffer("levels", torch.tensor(levels, dtype=torch.float32))
        places = [column in scaling.levels for column in range(scaling.columns)]
        self.register_buffer("categories", torch.tensor(places))
        self.coded = any(places)
        self.register_buffer("indicators", torch.tensor(scaling.indicators.tolist(), dtype=torch.int64))
        self.low: Tensor
        self.high: Tensor
        self.too_low: Tensor
        self.too_high: Tensor
        self.levels: Tensor
        self.categories: Tensor
        self.indicators: Tensor

    def forward(self, features: Tensor) -> Tensor:
        missing, x = features.isnan(), features.double()
        x = torch.where(x >= self.too_high, self.high, x)
        x = torch.where(x <= self.too_low, self.low, x)
        scaled = torch.where(missing, 0.0, self.curve(torch.where(missing, 0.0, x)).float())
        if self.coded:  # a number that is no level's is unknown, the code after theirs; missing is the next
            known = (features >= 0) & (features < self.levels)
            codes = torch.where(known, features.floor(), torch.where(missing, self.levels + 1, self.levels))
            scaled = torch.where(self.categories, codes, scaled)
        if not len(self.indicators):
            return scaled
        return torch.cat([scaled, missing.index_select(1, self.indicators).float()], 1)

    def curve(self, x: Tensor) -> Tensor:
        """The scaled value of an ordinary one, both float64."""
        raise NotImplementedError


class _Curves(_Tamed):
    """(curve(x) - mean) * factor, cut at the limit."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__(scaling)
        p = {name: torch.from_numpy(np.array(array)) for name, array in scaling.arrays.items()}
        for name in ("sign", "unit", "mean", "factor", "limit"):
            self.register_buffer(name, p[name].double())
        groups = [torch.nonzero((p["curve"] != LOG) & (p["curve"] != SYMLOG))[:, 0]]
        groups += [torch.nonzero(p["curve"] == curve)[:, 0] for curve in (LOG, SYMLOG)]
        for name, columns in zip(("plain", "log", "symlog"), groups):
            self.register_buffer(name, columns)
        self.register_buffer("back", torch.cat(groups).argsort())
        self.sign: Tensor
        self.unit: Tensor
        self.mean: Tensor
        self.factor: Tensor
        self.limit: Tensor
        self.plain: Tensor
        self.log: Tensor
        self.symlog: Tensor
        self.back: Tensor

    def curve(self, x: Tensor) -> Tensor:
        """Logarithms are taken of their columns alone: they are what costs time here."""
        x = x * self.sign
        if len(self.plain) < x.shape[1]:
            log, symlog = x.index_select(1, self.log), x.index_select(1, self.symlog)
            log = torch.log(log.clamp(min=0.0) + self.unit[self.log])
            symlog = symlog.sign() * torch.log(1 + symlog.abs() / self.unit[self.symlog])
            x = torch.cat([x.index_select(1, self.plain), log, symlog], 1).index_select(1, self.back)
        scaled = (x - self.mean) * self.factor
        return torch.minimum(torch.maximum(scaled, -self.limit), self.limit)


class _Quantiles(_Tamed):
    """Straight lines between quantiles, of which the right one is found by comparing and counting, three times with ten of them.

    A column's quantiles are padded with infinity to 11^3: ten cut them into eleven parts, ten more cut the part found, ten the
    part of that. The cuts are in float32, as features are: rounded up, they are passed by the same features.
    """

    def __init__(self, scaling: Scaling) -> None:
        super().__init__(scaling)
        starts, nodes, scores = (scaling.arrays[name] for name in ("starts", "nodes", "scores"))
        columns, longest = scaling.columns, int(np.diff(starts).max())
        parts = next(parts for parts in range(2, longest + 2) if parts**3 >= longest)
        node = np.full((columns, parts**3), np.inf)
        score, slope = np.zeros((2, columns, parts**3))
        for column, (start, end) in enumerate(pairwise(starts)):
            count = end - start
            node[column, :count], score[column, :count] = nodes[start:end], scores[start:end]
            slope[column, : count - 1] = np.diff(scores[start:end]) / np.diff(nodes[start:end])
        near = node.astype(np.float32)
        near = np.where(near < node, np.nextafter(near, np.float32(np.inf)), near)
        cuts = near.reshape(columns, parts, parts, parts)
        self.parts = parts
        self.register_buffer("lowest", torch.from_numpy(node[:, 0].copy()))
        self.register_buffer("column", torch.arange(columns))
        self.register_buffer("coarse", torch.from_numpy(cuts[:, 1:, 0, 0].copy()))
        self.register_buffer("middle", torch.from_numpy(cuts[:, :, 1:, 0].reshape(-1, parts - 1)))
        self.register_buffer("fine", torch.from_numpy(cuts[:, :, :, 1:].reshape(-1, parts - 1)))
        lines = np.stack([np.where(np.isinf(node), 0.0, node), score, slope], -1)
        self.register_buffer("lines", torch.from_numpy(lines.reshape(-1, 3)))
        self.lowest: Tensor
        self.column: Tensor
        self.coarse: Tensor
        self.middle: Tensor
        self.fine: Tensor
        self.lines: Tensor

    def curve(self, x: Tensor) -> Tensor:
        """The line of the last quantile that is not above the value."""
        x = torch.maximum(x, self.lowest)
        value = x.float()[..., None]
        place = self.column * self.parts + _passed(value, self.coarse)
        for cuts in (self.middle, self.fine):
            found = cuts.index_select(0, place.reshape(-1)).reshape(*place.shape, self.parts - 1)
            place = place * self.parts + _passed(value, found)
        line = self.lines.index_select(0, place.reshape(-1)).reshape(*place.shape, 3)
        return line[..., 2] * (x - line[..., 0]) + line[..., 1]


def _passed(value: Tensor, cuts: Tensor) -> Tensor:
    """How many cuts [..., C] are not above a value [..., 1], int64."""
    return (cuts <= value).float().sum(-1).long()
