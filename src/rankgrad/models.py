"""Models that score documents: the context-aware ranker of the NeuralNDCG paper, an MLP and a linear model.

Imports torch, and the encoder's kernels where they are used. All share one call and its manners: `model(features [B, L, F], mask [B, L]) -> scores [B, L]`, or
[B, L, units] for more than one unit per document. mask is True at real documents, None = all are real. Padding may
stand anywhere and hold anything, NaN included; it scores 0 and is seen by nobody, so that a list scores the same alone
and in any batch (to rounding). Reordering documents reorders their scores. Weight matrices start Glorot-uniform, biases
at torch's default; dropout, input noise and the start draw from torch's global generator. Features are taken to the dtype of the
weights, and under autocast only the products inside are rounded: sums along the layers and the scores stay in the
dtype of the weights, because scores in bfloat16 would tie by the dozen.

`model.packed(features [T, F], lists)` scores the same lists laid end to end, without padding: a training step has half the
documents to look at. It agrees with the call above to rounding; dropout and noise are drawn anew.
"""

import copy
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class EndToEnd(NamedTuple):
    """Where lists lie that follow each other without padding: list b is the rows offsets[b] to offsets[b + 1]."""

    offsets: Tensor  # [B + 1] int32, from 0 to the number of rows
    longest: int  # no list is longer
    kernel: bool = False  # by kernels, which need a GPU; else the lists are padded for the attention
    exact: bool = True  # in the kernel: float32 products, or TF32 where the projection is float32


class Transformer(nn.Module):
    """The context-aware ranker of arXiv 2102.07831: a document's score depends on the other documents of its list.

    A linear layer to `width` without activation, `layers` pre-norm Transformer encoder blocks, a layer norm, a linear
    output, and tanh only on request. No positional encoding: a list is a set. Without padding pass mask=None, which
    leaves torch the choice of its fastest attention.

    >>> model = Transformer(136).eval()
    >>> model(torch.zeros(2, 5, 136), torch.tensor([[True] * 5, [False] * 5]))[1].tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        features: int,
        *,
        width: int = 96,
        layers: int = 2,
        heads: int = 1,
        feedforward: int = 384,
        dropout: float = 0.1,
        input_noise: float = 0.0,
        units: int = 1,
        tanh: bool = False,
    ) -> None:
        super().__init__()
        width, heads, dropout = _size("width", width), _size("heads", heads), _probability("dropout", dropout)
        feedforward = _size("feedforward", feedforward)
        if width % heads:
            raise ValueError(f"width must be divisible by heads, got width {width} and {heads} heads")
        self.features = _size("features", features)
        self.head = width // heads  # dimensions of one
        self.noise = _Noise(input_noise)
        self.input = nn.Linear(self.features, width)
        self.blocks = nn.ModuleList(_Block(width, heads, feedforward, dropout) for _ in range(_size("layers", layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, _size("units", units))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        features = _clean(features, mask, self.features, self.input.weight.dtype)
        # A list without a document attends to its padding: a softmax over nothing is NaN on some of torch's paths.
        keys = None if mask is None else (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]  # [B, 1, 1, L]
        return _score(self._encode(features, keys), mask, self.output, self.tanh)

    def packed(self, features: Tensor, lists: EndToEnd) -> Tensor:
        """Scores [T], or [T, units], of lists end to end: features [T, F]. Kernels read the layers' weights; their hooks are not called."""
        features = _clean(features[None], None, self.features, self.input.weight.dtype)
        if lists.kernel and self.norm.weight.dtype == torch.float32 and not torch.compiler.is_compiling():
            return _score(self._fused(features[0], lists), None, self.output, self.tanh)
        return _score(self._encode(features, lists), None, self.output, self.tanh)[0]

    def _fused(self, features: Tensor, lists: EndToEnd) -> Tensor:
        """`_encode` of lists end to end [T, F] by kernels, which end a branch, add it and begin the next in one go."""
        product = self.noise(features) @ self.input.weight.t()
        seeds = _seeds(features.device, len(self.blocks), 4)  # for every dropout of a step, in one draw
        branch = _Branch(product, self.input.bias, 0.0, seeds)
        hidden: Tensor | None = None
        for block, draws in zip(self.blocks, seeds):
            assert isinstance(block, _Block)
            hidden, branch = block.fused(hidden, branch, lists, draws)
        return branch.added(hidden, self.norm, self.output.weight.dtype)[1]

    def _encode(self, features: Tensor, seen: Tensor | EndToEnd | None) -> Tensor:
        """Documents that have looked at what `seen` says: keys [B, 1, 1, L], the lists they lie in, or all of their row."""
        hidden = self.input(self.noise(features)).to(self.norm.weight.dtype)  # [B, L, width]
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.norm(hidden)


class MLP(nn.Module):
    """Linear layers of the sizes `hidden`, each followed by ReLU and dropout, and a linear output.

    >>> MLP(136, units=4)(torch.zeros(2, 5, 136)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        features: int,
        *,
        hidden: Sequence[int] = (256, 128, 64),
        dropout: float = 0.0,
        input_noise: float = 0.0,
        units: int = 1,
        tanh: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(hidden, Sequence):
            raise ValueError(f"hidden must be a sequence of layer sizes such as (256, 128, 64), got {hidden!r}")
        self.features = _size("features", features)
        self.noise = _Noise(input_noise)
        sizes = [self.features, *(_size("every size in hidden", size) for size in hidden)]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.dropout = _Dropout(_probability("dropout", dropout))
        self.output = nn.Linear(sizes[-1], _size("units", units))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        hidden = self.noise(_clean(features, mask, self.features, self.output.weight.dtype))
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).relu())
        return _score(hidden, mask, self.output, self.tanh)

    def packed(self, features: Tensor, lists: EndToEnd) -> Tensor:  # noqa: ARG002 (documents do not look at each other)
        """Scores [T], or [T, units], of lists end to end: features [T, F]."""
        scores: Tensor = self(features[None])
        return scores[0]


class Linear(nn.Module):
    """A weighted sum of the features: the model every other has to beat.

    >>> Linear(136)(torch.zeros(2, 5, 136)).shape
    torch.Size([2, 5])
    """

    def __init__(self, features: int, *, input_noise: float = 0.0, units: int = 1, tanh: bool = False) -> None:
        super().__init__()
        self.features = _size("features", features)
        self.noise = _Noise(input_noise)
        self.output = nn.Linear(self.features, _size("units", units))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        features = self.noise(_clean(features, mask, self.features, self.output.weight.dtype))
        return _score(features, mask, self.output, self.tanh)

    def packed(self, features: Tensor, lists: EndToEnd) -> Tensor:  # noqa: ARG002 (documents do not look at each other)
        """Scores [T], or [T, units], of lists end to end: features [T, F]."""
        scores: Tensor = self(features[None])
        return scores[0]


MODELS: dict[str, Callable[..., nn.Module]] = {"transformer": Transformer, "mlp": MLP, "linear": Linear}


def ranking_scores(output: Tensor, units: int) -> Tensor:
    """The scores [B, L] to rank by: a model's output itself, or for more than one unit the sum of their sigmoids.

    >>> ranking_scores(torch.zeros(1, 2, 4), units=4)
    tensor([[2., 2.]])
    """
    if units == 1:
        return output
    if output.dim() == 0 or output.shape[-1] != units:
        raise ValueError(f"an output of {units} units must have the shape [..., {units}], got {list(output.shape)}")
    return output.sigmoid().sum(-1)


def rounded(model: nn.Module) -> nn.Module | None:
    """A twin whose products hold bfloat16 weights, for use under autocast, which then has none to round in each step.

    It shares all other parameters. None for models that are not of this file: what they do outside autocast is not known.
    """
    if type(model) not in MODELS.values():
        return None
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not model.output]
    rounding = {id(parameter) for layer in layers for parameter in layer.parameters()}
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in rounding})
    for layer in twin.modules():
        if isinstance(layer, nn.Linear) and layer is not twin.output:
            layer.to(torch.bfloat16)
    return twin


class _Noise(nn.Module):
    """x + deviation * N(0, 1) for every feature of every document, anew in each training step; nothing in evaluation."""

    def __init__(self, deviation: float) -> None:
        super().__init__()
        if isinstance(deviation, bool) or not isinstance(deviation, int | float) or not 0 <= deviation < math.inf:
            raise ValueError(f"input_noise must be a deviation, a finite number of 0 or above, got {deviation!r}")
        self.deviation = float(deviation)

    def forward(self, features: Tensor) -> Tensor:
        if not self.training or self.deviation == 0:
            return features
        return features + self.deviation * torch.randn_like(features)


class _Dropout(nn.Dropout):
    """nn.Dropout; where it is compiled, a hash of (seed, place) decides, which takes a third of the time of Philox there."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name it has in torch)
        if not (torch.compiler.is_compiling() and self.training and self.p > 0):
            return super().forward(input)
        return input * kept(input.shape, self.p, _seeds(input.device)) * (1 / (1 - self.p))


def kept(shape: Sequence[int], dropout: float, seeds: Tensor) -> Tensor:
    """What dropout leaves of a tensor: True with probability 1 - dropout, by a hash of two int32 seeds and the place."""
    place = torch.arange(math.prod(shape), dtype=torch.int32, device=seeds.device).view(*shape)
    mixed = place ^ seeds[0]  # the constants are lowbias32's, the best hash of two multiplications known
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = ((mixed ^ seeds[1]) ^ (mixed >> 15)) * (0x846CA68B - 2**32)
    mixed = (mixed ^ (mixed >> 16)) & 0x7FFFFFFF
    return mixed >= int(dropout * 2**31)


def _seeds(device: torch.device, *shape: int) -> Tensor:
    """Seeds of a hash, [..., 4]: two are enough, and four begin where a kernel may expect it, at multiples of 16 bytes."""
    return torch.randint(-(2**31), 2**31 - 1, (*shape, 4), dtype=torch.int32, device=device)


class _Branch(NamedTuple):
    """What has yet to be added to the sum along the layers: dropout(product + bias)."""

    product: Tensor  # [T, width]
    bias: Tensor
    dropout: float
    seeds: Tensor

    def added(self, hidden: Tensor | None, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum, and its norm in a dtype."""
        from rankgrad.kernels.encoder.fused import add_norm

        scale = norm.weight, norm.bias, norm.eps
        return add_norm(hidden, self.product, self.bias, scale, dtype, self.dropout, self.seeds)


class _Block(nn.Module):
    """One pre-norm encoder block: x + attention(norm(x)), then x + feed-forward(norm(x)), each through dropout."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.feedforward_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, feedforward)
        self.narrow = nn.Linear(feedforward, width)
        self.dropout = _Dropout(dropout)

    def forward(self, hidden: Tensor, seen: Tensor | EndToEnd | None) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), seen))
        inner = self.dropout(self.widen(self.feedforward_norm(hidden)).relu())
        return hidden + self.dropout(self.narrow(inner))

    def fused(self, hidden: Tensor | None, branch: _Branch, lists: EndToEnd, seeds: Tensor) -> tuple[Tensor, _Branch]:
        """The same by kernels, from the end of the branch before to the products of its own last one; seeds [4, 4]."""
        from rankgrad.kernels.encoder.fused import linear, relu_dropout

        dropout, dtype, merge = self.dropout.p if self.training else 0.0, self.widen.weight.dtype, self.attention.merge
        hidden, normed = branch.added(hidden, self.attention_norm, dtype)
        found = self.attention.packed(normed, lists, seeds[0], linear)
        branch = _Branch(found @ merge.weight.t(), merge.bias, dropout, seeds[1])
        hidden, normed = branch.added(hidden, self.feedforward_norm, dtype)
        inner = relu_dropout(normed @ self.widen.weight.t(), self.widen.bias, dropout, seeds[2])
        return hidden, _Branch(inner @ self.narrow.weight.t(), self.narrow.bias, dropout, seeds[3])


class _Attention(nn.Module):
    """Every document of a list looks at every real one: softmax(Q K^T / sqrt(width / heads)) V, per head."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)

    def forward(self, hidden: Tensor, seen: Tensor | EndToEnd | None) -> Tensor:
        if isinstance(seen, EndToEnd):
            return self.merge(self.packed(hidden[0], seen)[None])
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, L, width / H]
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        return self.merge(found.transpose(1, 2).flatten(-2))

    def packed(
        self,
        hidden: Tensor,
        lists: EndToEnd,
        seeds: Tensor | None = None,
        linear: Callable[..., Tensor] = functional.linear,
    ) -> Tensor:
        """What the documents [T, width] of lists end to end find, [T, width]; the three projections are one product."""
        parts = (self.query, self.key, self.value)
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        projected = linear(hidden, weight, bias).unflatten(-1, (3, self.heads, -1))  # [T, 3, H, width / H]
        dropout = self.dropout if self.training else 0.0
        if lists.kernel:
            from rankgrad.kernels.encoder.attention import list_attention

            seed = (_seeds(hidden.device) if seeds is None else seeds)[:1]
            found, _ = list_attention(projected, lists.offsets, lists.longest, dropout, seed, lists.exact)
            return found.flatten(-2)
        # Elsewhere: padded for the attention alone.
        place = torch.arange(lists.longest, device=hidden.device)
        first, end = lists.offsets[:-1, None].long(), lists.offsets[1:, None].long()
        real = place < end - first  # [B, longest]
        rows = (first + place).where(real, 0)
        query, key, value = (projected[rows, part].transpose(1, 2) for part in range(3))  # [B, H, longest, width / H]
        keys = (real | ~real.any(-1, keepdim=True))[:, None, None, :]
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=keys, dropout_p=dropout)
        target = rows.where(real, len(hidden)).flatten()  # padding goes to a row that is cut off again
        found = found.transpose(1, 2).flatten(2).flatten(0, 1)
        return found.new_zeros(len(hidden) + 1, found.shape[-1]).index_copy(0, target, found)[:-1]


def _clean(features: Tensor, mask: Tensor | None, width: int, dtype: torch.dtype) -> Tensor:
    """The features a model may look at: shapes checked, padding zeroed before any arithmetic, the weights' dtype."""
    if features.dim() != 3 or features.shape[-1] != width:
        raise ValueError(
            f"features must have the shape [lists, documents, {width}] this model was made for, "
            f"got {list(features.shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != features.shape[:-1]):
        raise ValueError(
            f"mask must be of dtype torch.bool (True = a real document) and shape {list(features.shape[:-1])}, "
            f"got {mask.dtype} and {list(mask.shape)}"
        )
    features = features.to(dtype)
    return features if mask is None else features.masked_fill(~mask[..., None], 0.0)


def _score(hidden: Tensor, mask: Tensor | None, output: nn.Linear, tanh: bool) -> Tensor:
    """The linear output, outside autocast, with zeros under the padding."""
    device = hidden.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        scores = output(hidden.to(output.weight.dtype))  # [B, L, units]
    scores = scores.tanh() if tanh else scores
    scores = scores if mask is None else scores.masked_fill(~mask[..., None], 0.0)
    return scores.squeeze(-1) if output.out_features == 1 else scores


def _glorot(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def _size(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name} must be a whole number, 1 or above, got {value!r}")
    return number


def _probability(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number from 0 up to but not including 1, got {value!r}")
    return float(value)
