"""A fitted scaling in operations of torch that torch.export and ONNX have.

It computes in float64 what `Scaling.apply` computes with numpy in float64, so that the two differ by the last bits alone. Quantiles
are found by halving: neither ONNX nor Vespa has a search in a sorted table, both have comparisons, sums and lookups.
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
    """Straight lines between quantiles; a column's quantiles are padded with infinity to a power of two."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__(scaling)
        starts, nodes, scores = (scaling.arrays[name] for name in ("starts", "nodes", "scores"))
        columns, longest = scaling.columns, int(np.diff(starts).max())
        self.width = 2 ** longest.bit_length()  # above the longest, so that every column ends in infinity
        node = np.full((columns, self.width), np.inf)
        score, slope = np.zeros((2, columns, self.width))
        for column, (start, end) in enumerate(pairwise(starts)):
            count = end - start
            node[column, :count], score[column, :count] = nodes[start:end], scores[start:end]
            slope[column, : count - 1] = np.diff(scores[start:end]) / np.diff(nodes[start:end])
        self.register_buffer("first", torch.arange(columns) * self.width)
        self.register_buffer("lowest", torch.from_numpy(node[:, 0].copy()))
        for name, table in (("node", node), ("score", score), ("slope", slope)):
            self.register_buffer(name, torch.from_numpy(table.ravel()))
        self.first: Tensor
        self.lowest: Tensor
        self.node: Tensor
        self.score: Tensor
        self.slope: Tensor

    def curve(self, x: Tensor) -> Tensor:
        """By halving the part of the table in which the value must lie."""
        shape, x = x.shape, torch.maximum(x, self.lowest).reshape(-1)
        place = self.first.expand(shape).reshape(-1)
        step = self.width // 2
        while step:
            further = place + step
            place = torch.where(self.node.index_select(0, further) <= x, further, place)
            step //= 2
        node, score, slope = (table.index_select(0, place) for table in (self.node, self.score, self.slope))
        return (slope * (x - node) + score).reshape(shape)
