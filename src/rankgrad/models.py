"""Models that score documents: the context-aware ranker of the NeuralNDCG paper, an MLP, a linear model, and many of them at once.

All are called alike: `model(features [B, L, F], mask [B, L]) -> scores [B, L]`, or [B, L, units] for more than one unit per
document. mask is True at real documents, None = all are real. Padding may be anywhere and hold anything, NaN included; it
scores 0 and no document attends to it, so that a list scores the same alone and in any batch (to rounding). Reordering
documents reorders their scores. Weight matrices start Glorot-uniform, biases at torch's default; dropout, input noise and
the initial weights draw from torch's global generator. Features are converted to the dtype of the weights, and under
autocast only the products inside are rounded: sums along the layers and the scores stay in the dtype of the weights,
because in bfloat16 many scores would be equal.

`categories` names the columns that hold codes of categories, as `rankgrad.data.Scaling` gives them, and how many codes there are:
levels, then one for unknown values and one for missing ones. Each code has a vector, which is learned; the vectors follow the other
inputs. In training a few values are forgotten at random, which teaches the vector of unknown ones.

`model.packed(features [T, F], lists)` scores the same lists one after the other, without padding, which halves the documents
of a typical training step. It agrees with the call above to rounding; dropout and noise are drawn anew.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rankgrad.checks import one_of, probability, whole
from rankgrad.data.order import hash_of
from rankgrad.kernels import encoder_operators, list_attention_kernel

# Where a scaled feature is cut into pieces: at the quarters of a normal distribution, whose ends are cut off.
CUTS = (-2.5, -0.6744897501960817, 0.0, 0.6744897501960817, 2.5)
INPUTS = {"features": 1, "list": 2, "pieces": 2 * len(CUTS)}  # columns per feature
LARGEST_KEPT = 2**22  # numbers of members' first layers that are laid out a second time
MEMBERS_IN_ONE = 512  # documents: a product of fewer depends on the number of threads, where it is of many members
WORTH_ONEDNN = 2**22  # multiplications of a product: of fewer the conversion takes longer
ONEDNN = torch.backends.mkldnn.is_available()
WIDEST_EMBEDDING, VECTOR_DEVIATION = 16, 0.1  # of the vectors of categories, the latter at their start
FORGOTTEN = (
    5 / 256
)  # share of the categories that are unknown in a step of training, so that this has a vector that learned

Categories = Mapping[int, int]  # by column: how many codes there are, the last two for unknown and missing ones
NO_CATEGORIES: Categories = {}


class PackedLayout(NamedTuple):
    """Where the lists are that follow each other without padding: list b is the rows offsets[b] to offsets[b + 1]."""

    offsets: Tensor  # [B + 1] int32, from 0 to the number of rows
    longest: int  # no list is longer
    kernel: bool = False  # by kernels, which need a GPU; else the lists are padded for the attention
    exact: bool = True  # in the attention kernel: float32 products, else TF32 where the projection is float32


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
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
    ) -> None:
        super().__init__()
        width, heads, dropout = whole("width", width, 1), whole("heads", heads, 1), probability("dropout", dropout)
        feedforward = whole("feedforward", feedforward, 1)
        if width % heads:
            raise ValueError(f"width must be divisible by heads, got width {width} and {heads} heads")
        self.features, self.inputs = whole("features", features, 1), one_of("inputs", inputs, INPUTS)
        self.head = width // heads  # dimensions of one
        self.document = _Document(self.features, inputs, categories)
        self.noise = _Noise(input_noise, self.document.embedding)
        self.input = nn.Linear(self.document.width, width)
        self.blocks = nn.ModuleList(
            _Block(width, heads, feedforward, dropout) for _ in range(whole("layers", layers, 1))
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, whole("units", units, 1))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        features = self.document(features, mask, self.input.weight.dtype)
        # A list without a document attends to its padding: a softmax over nothing is NaN on some of torch's paths.
        keys = None if mask is None else (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]  # [B, 1, 1, L]
        return _score(self._encode(features, keys), mask, self.output, self.tanh)

    def packed(self, features: Tensor, lists: PackedLayout) -> Tensor:
        """Scores [T], or [T, units], of packed lists: features [T, F]. Kernels read the layers' weights: no hook is called."""
        features = self.document.packed(features, lists.offsets, self.input.weight.dtype)
        return _score(self._encode(features, lists), None, self.output, self.tanh)

    def _encode(self, features: Tensor, seen: Tensor | PackedLayout | None) -> Tensor:
        """Documents [..., width] that attended to what `seen` says: keys [B, 1, 1, L], packed lists, or their whole row.

        A kernel ends a branch, adds it to the sum along the layers and norms the sum for the next branch in one launch. So
        the loop does too: a branch is the input `x` of the `layer` that ends it, until `add_norm` takes it.
        """
        kernel = isinstance(seen, PackedLayout) and seen.kernel
        dtype = self.input.weight.dtype
        operators = encoder_operators(kernel and self.norm.weight.dtype == torch.float32)
        add_norm, project = operators.add_norm, operators.project
        x, layer, dropout = self.noise(features), self.input, 0.0
        seeds = _seeds(features.device, len(self.blocks), 4) if kernel else [[None] * 4] * len(self.blocks)
        seed, hidden = seeds[0][0], None
        for block, draws in zip(self.blocks, seeds):
            assert isinstance(block, _Block)
            hidden, normed = add_norm(hidden, *project(x, layer), block.attention_norm, dtype, dropout, seed)
            dropout = block.dropout.p if block.dropout.training else 0.0
            x, layer = block.attention(normed, seen, operators.linear, draws[0]), block.attention.merge
            hidden, normed = add_norm(hidden, *project(x, layer), block.feedforward_norm, dtype, dropout, draws[1])
            x, layer = operators.relu_dropout(*project(normed, block.widen), dropout, draws[2]), block.narrow
            seed = draws[3]
        return add_norm(hidden, *project(x, layer), self.norm, self.output.weight.dtype, dropout, seed)[1]


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
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
    ) -> None:
        super().__init__()
        if not isinstance(hidden, Sequence):
            raise ValueError(f"hidden must be a sequence of layer sizes such as (256, 128, 64), got {hidden!r}")
        self.features, self.inputs = whole("features", features, 1), one_of("inputs", inputs, INPUTS)
        self.document = _Document(self.features, inputs, categories)
        self.noise = _Noise(input_noise, self.document.embedding)
        sizes = [self.document.width, *(whole("every size in hidden", size, 1) for size in hidden)]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.dropout = nn.Dropout(probability("dropout", dropout))
        self.output = nn.Linear(sizes[-1], whole("units", units, 1))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        return self._scored(self.document(features, mask, self.output.weight.dtype), mask)

    def packed(self, features: Tensor, lists: PackedLayout) -> Tensor:
        """Scores [T], or [T, units], of packed lists: features [T, F]."""
        return self._scored(self.document.packed(features, lists.offsets, self.output.weight.dtype), None)

    def _scored(self, features: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.noise(features)
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).relu())
        return _score(hidden, mask, self.output, self.tanh)


class Linear(nn.Module):
    """A weighted sum of the features: the model every other has to beat.

    >>> Linear(136)(torch.zeros(2, 5, 136)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        features: int,
        *,
        input_noise: float = 0.0,
        units: int = 1,
        tanh: bool = False,
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
    ) -> None:
        super().__init__()
        self.features, self.inputs = whole("features", features, 1), one_of("inputs", inputs, INPUTS)
        self.document = _Document(self.features, inputs, categories)
        self.noise = _Noise(input_noise, self.document.embedding)
        self.output = nn.Linear(self.document.width, whole("units", units, 1))
        self.tanh = tanh
        _glorot(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L], or [B, L, units]."""
        features = self.document(features, mask, self.output.weight.dtype)
        return _score(self.noise(features), mask, self.output, self.tanh)

    def packed(self, features: Tensor, lists: PackedLayout) -> Tensor:
        """Scores [T], or [T, units], of packed lists: features [T, F]."""
        features = self.document.packed(features, lists.offsets, self.output.weight.dtype)
        return _score(self.noise(features), None, self.output, self.tanh)


class Members(nn.Module):
    """Many MLPs side by side: member k of the K trained at once has weights, dropout and score scale of its own.

    All weights are one matrix [K, P], a row per member, so that an optimiser, a checkpoint and a choice of members are
    operations on rows. `ids` name the members: where one starts is a function of (seed, id) alone. `scale`: the scores of a
    member are scale * tanh(s), or s itself where it is 0. Dropout is drawn from `seeds` [K, layers, 2] int32, which whoever
    trains sets for each step; a member drops the same whoever trains beside it.

    >>> Members(136, ids=range(3))(torch.zeros(2, 5, 136)).shape
    torch.Size([3, 2, 5])
    """

    def __init__(
        self,
        features: int,
        *,
        ids: Sequence[int],
        hidden: Sequence[int] = (128, 128),
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
        dropout: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.features, self.inputs = whole("features", features, 1), one_of("inputs", inputs, INPUTS)
        self.document = _Document(self.features, inputs, categories, tables=False)
        self.categories, tables = dict(categories), self.document.shapes
        widths = [self.document.width, *(whole("every size in hidden", size, 1) for size in hidden), 1]
        self.shapes = list(pairwise(widths))
        self.sizes = [size for before, after in self.shapes for size in (before * after, after)]
        self.sizes += [rows * width for rows, width in tables]
        starts = [_start(self.shapes, seed, number, tables) for number in ids]
        self.weights = nn.Parameter(torch.stack(starts))  # [K, P]
        drop = torch.zeros(len(starts)) if dropout is None else torch.tensor([*dropout], dtype=torch.float64)
        # Eight bits decide about a unit: a dropout is rounded to 1/256.
        self.register_buffer("threshold", (drop * 256).round().to(torch.uint8), persistent=False)
        self.register_buffer("scale", torch.zeros(len(starts)) if scale is None else torch.tensor([*scale]))
        # 1 for entries of matrices, 0 for biases and the vectors of categories, which weight decay leaves alone
        matrices = range(0, 2 * len(self.shapes), 2)
        decays = [torch.full((size,), float(number in matrices)) for number, size in enumerate(self.sizes)]
        self.register_buffer("decays", torch.cat(decays), persistent=False)
        self.seeds: Tensor | None = None
        self._beside: dict[bool, tuple[tuple[Any, ...], Tensor, Tensor, Tensor]] = {}  # see `_first_layer`
        self.threshold: Tensor
        self.scale: Tensor
        self.decays: Tensor

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [K, B, L]."""
        numbers, codes = self.document.parts(features, mask, self.weights.dtype)
        scores = self.score(list_inputs(numbers, mask, self.inputs), codes)
        return scores if mask is None else scores.masked_fill(~mask, 0.0)

    def packed(self, features: Tensor, lists: PackedLayout) -> Tensor:
        """Scores [K, T] of packed lists: features [T, F]."""
        numbers, codes = self.document.parts(features[None], None, self.weights.dtype)
        codes = None if codes is None else codes[0]
        return self.score(_packed_inputs(numbers[0], lists.offsets, self.inputs), codes)

    def score(self, x: Tensor, codes: Tensor | None) -> Tensor:
        """Scores [K, ...] of what the first layer takes of numbers [..., W], and codes of categories [..., C]."""
        members, shape = len(self.weights), x.shape[:-1]
        hidden = x.flatten(0, -2)  # also of no columns, where all are categories
        split = self.weights.split(self.sizes, 1)
        parts = iter(split)
        if codes is not None:
            vectors = self.category_vectors(codes.reshape(-1, codes.shape[-1]), split[2 * len(self.shapes) :])
            hidden = torch.cat([hidden.expand(members, *hidden.shape), vectors], -1)  # [K, T, F + E]
        in_one = codes is None and len(self.shapes) > 1 and self._in_one(x)
        for layer, (before, after) in enumerate(self.shapes):
            weight, bias = next(parts).view(members, before, after), next(parts)[:, None, :]
            if layer == 0 and in_one:
                hidden = self._first_layer(hidden, weight, bias).relu_()
                hidden = hidden.view(-1, members, after).transpose(0, 1)
            elif layer == len(self.shapes) - 1:
                hidden = (hidden * weight.mT).sum(-1) + bias[..., 0]  # [K, T]: one output, no product of matrices
            elif hidden.dim() == 2:
                hidden = self._dropped((torch.matmul(hidden, weight) + bias).relu(), layer)
            else:
                hidden = self._dropped(torch.baddbmm(bias, hidden, weight).relu(), layer)
        return self.scaled(hidden.view(members, *shape))

    def _in_one(self, x: Tensor) -> bool:
        """Whether the first layer of all members is done in one product: where the CPU scores, and nobody learns or records.

        Not of wide features, whose matrices are too large to have them twice; and of few documents by rankers only, not in training, where
        what is measured must not depend on the number of threads.
        """
        if x.device.type != "cpu" or self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        enough = torch.is_inference_mode_enabled() or x.shape[:-1].numel() >= MEMBERS_IN_ONE
        return enough and len(self.weights) * self.sizes[0] <= LARGEST_KEPT

    def _first_layer(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[T, K A] of x [T, W]: one product with the matrices of all members, which are kept until the weights change.

        Of a single list, which rankers score in inference mode, oneDNN computes it: by one thread twice as fast as MKL on AMD's CPUs.
        All other scores are torch's own product, which was tried to be the same with any number of threads.
        """
        large = x.numel() * weight[:, 0].numel() >= WORTH_ONEDNN
        alone = torch.is_inference_mode_enabled() and large and x.dtype == torch.float32 and ONEDNN
        weights = self.weights
        # Of tensors made in inference mode changes in place are not counted, so nothing is kept of them.
        version = object() if weights.is_inference() else weights._version
        state = version, weights.data_ptr(), weights.dtype
        if alone not in self._beside or self._beside[alone][0] != state:
            matrices, biases = weight.transpose(1, 2).flatten(0, 1).contiguous(), bias.flatten()
            kept = (matrices.to_mkldnn(), biases.to_mkldnn()) if alone else (matrices, biases)
            # With the weights they are of, so that no others can come to lie where these did.
            self._beside[alone] = state, *kept, weights.detach()
        matrices, biases = self._beside[alone][1:3]
        return functional.linear(x.to_mkldnn() if alone else x, matrices, biases).to_dense()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: without the matrices that are kept, which may be in a form that cannot be copied."""
        return self.__dict__ | {"_beside": {}}

    def scaled(self, scores: Tensor) -> Tensor:
        """The scores [K, ...] with scale * tanh(s) of the members that have a scale."""
        scale = self.scale.to(scores.dtype).view(-1, *[1] * (scores.dim() - 1))
        return torch.where(scale > 0, scale * scores.tanh(), scores)

    def category_vectors(self, codes: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """Of categories [T, C], from each member's own tables [K, rows * width]: [K, T, E]."""
        members = len(self.weights)
        codes = codes.expand(members, *codes.shape)
        if self.training and self.seeds is not None:
            kept = _kept_by_member(
                codes.shape, self.threshold.new_full((members,), round(256 * FORGOTTEN)), ~self.seeds[:, 0]
            )
            codes = torch.where(kept, codes, self.document.unknown)
        own = torch.arange(members, device=codes.device)[:, None, None]
        found = [
            functional.embedding(codes[..., columns] + starts + own * rows, table.reshape(-1, width)).flatten(-2)
            for (columns, starts), (rows, width), table in zip(self.document.groups, self.document.shapes, tables)
        ]
        return torch.cat(found, -1)

    def _dropped(self, hidden: Tensor, layer: int) -> Tensor:
        if not self.training or self.seeds is None:
            return hidden
        kept = _kept_by_member(hidden.shape, self.threshold, self.seeds[:, layer])
        scale = (256 / (256 - self.threshold.to(hidden.dtype)))[:, None, None]
        return hidden * (kept * scale)  # (hidden * kept) * scale would have two large products in the backward pass

    def select(self, members: Sequence[int]) -> "Members":
        """Some of the members, by place."""
        chosen = copy.deepcopy(self)
        chosen.seeds = None
        chosen.weights = nn.Parameter(self.weights.detach()[list(members)].clone())
        chosen.threshold, chosen.scale = self.threshold[list(members)].clone(), self.scale[list(members)].clone()
        return chosen


class SharedMLP(MLP):
    """K MLPs that share their weight matrices (TabM, arXiv 2410.24210); what member k has of its own are vectors.

    h <- dropout(relu(((h * r_k) W^T) * s_k + b_k)) for every layer, then a linear output of its own. All vectors start equal but
    the first r, which are random signs. In training the scores of all members come back, [B, L, K], so that each has a loss
    of its own; afterwards their mean, [B, L].

    >>> model = SharedMLP(136, members=16)
    >>> model(torch.zeros(2, 5, 136)).shape, model.eval()(torch.zeros(2, 5, 136)).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        features: int,
        *,
        members: int,
        hidden: Sequence[int] = (256, 128, 64),
        dropout: float = 0.0,
        input_noise: float = 0.0,
        tanh: bool = False,
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
    ) -> None:
        super().__init__(
            features,
            hidden=hidden,
            dropout=dropout,
            input_noise=input_noise,
            units=whole("members", members, 1),
            tanh=tanh,
            inputs=inputs,
            categories=categories,
        )
        plain = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        self.layers = nn.ModuleList(
            _SharedLinear(layer, members, signs=number == 0) for number, layer in enumerate(plain)
        )
        self.output.reset_parameters()

    def _scored(self, features: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.noise(features).expand(self.output.out_features, *features.shape)  # [K, ..., F]
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).relu())
        return _scores_of_members(hidden, mask, self.output, tanh=self.tanh, each=self.training)

    def vectors(self) -> list[nn.Parameter]:
        """What is no matrix of weights: weight decay leaves it alone."""
        shared = {id(layer.weight) for layer in self.layers}
        return [p for p in self.parameters() if id(p) not in shared and p is not self.output.weight]


class SharedTransformer(Transformer):
    """K context-aware rankers that share all but what stands before and after the encoder ("TabM-mini", arXiv 2410.24210).

    Member k multiplies a document's features by a vector of its own, which starts as random signs, and has a linear output
    of its own; the encoder sees K times as many lists. Scores come back as from `SharedMLP`.

    >>> SharedTransformer(136, members=4).eval()(torch.zeros(2, 5, 136)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        features: int,
        *,
        members: int,
        width: int = 96,
        layers: int = 2,
        heads: int = 1,
        feedforward: int = 384,
        dropout: float = 0.1,
        input_noise: float = 0.0,
        tanh: bool = False,
        inputs: str = "features",
        categories: Categories = NO_CATEGORIES,
    ) -> None:
        super().__init__(
            features,
            width=width,
            layers=layers,
            heads=heads,
            feedforward=feedforward,
            dropout=dropout,
            input_noise=input_noise,
            units=whole("members", members, 1),
            tanh=tanh,
            inputs=inputs,
            categories=categories,
        )
        self.first = nn.Parameter(_signs(members, self.input.in_features))
        self.output.reset_parameters()

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L, K] in training, their mean [B, L] afterwards."""
        features = self.document(features, mask, self.input.weight.dtype)
        members = len(self.first)
        keys = None
        if mask is not None:
            keys = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :].repeat(members, 1, 1, 1)  # [K * B, 1, 1, L]
        hidden = self._encode((features * self.first[:, None, None]).flatten(0, 1), keys).unflatten(0, (members, -1))
        return _scores_of_members(hidden, mask, self.output, tanh=self.tanh, each=self.training)

    def packed(self, features: Tensor, lists: PackedLayout) -> Tensor:
        """The same of packed lists: features [T, F] -> [T, K] or [T]."""
        features = self.document.packed(features, lists.offsets, self.input.weight.dtype)
        members, rows = len(self.first), len(features)
        begins = rows * torch.arange(members, dtype=lists.offsets.dtype, device=features.device)
        offsets = torch.cat([(lists.offsets[:-1] + begins[:, None]).flatten(), lists.offsets[-1:] + begins[-1]])
        hidden = self._encode((features * self.first[:, None]).flatten(0, 1), lists._replace(offsets=offsets))
        hidden = hidden.unflatten(0, (members, rows))
        return _scores_of_members(hidden, None, self.output, tanh=self.tanh, each=self.training)

    def vectors(self) -> list[nn.Parameter]:
        """What is no matrix of weights: weight decay leaves it alone."""
        return [p for p in self.parameters() if p.dim() == 1 or p is self.first]


class AveragedMembers(nn.Module):
    """One ranker of many members: the mean of their scores, standardised within each list."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self.members = members
        self.features = members.features

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores [B, L]."""
        return standardised(self.members(features, mask), mask).mean(0)


def standardised(scores: Tensor, mask: Tensor | None) -> Tensor:
    """(s - mean) / deviation within each list, [..., B, L]; 0 for a list whose scores are all equal, and for padding.

    >>> standardised(torch.tensor([[1.0, 3.0], [7.0, 7.0]]), None).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    largest = torch.finfo(scores.dtype).max
    low = (scores if mask is None else scores.masked_fill(~mask, largest)).amin(-1, keepdim=True)
    high = (scores if mask is None else scores.masked_fill(~mask, -largest)).amax(-1, keepdim=True)
    # From 0 to 1 first: equal scores become exactly 0, and no square is too large or too small.
    differ = high > low
    known = differ if mask is None else mask & differ
    unit = torch.where(known, (scores - low) / torch.where(differ, high - low, 1.0), 0.0)
    count = scores.shape[-1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
    centred = unit - unit.sum(-1, keepdim=True) / count
    centred = centred if mask is None else torch.where(mask, centred, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / count
    return centred / torch.where(variance > 0, variance, 1.0).sqrt()


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


def bf16_twin(model: nn.Module) -> nn.Module | None:
    """A copy whose products have bfloat16 weights, for use under autocast, which then has none to round in each step.

    It shares all other parameters. None for models of other files: what they compute outside autocast is not known.
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


class _Document(nn.Module):
    """What the first layer takes of a document: its features, where they stand within their list, vectors of its categories.

    Without `tables` the vectors are those of whoever asks for `parts`.
    """

    def __init__(self, features: int, inputs: str, categories: Categories, *, tables: bool = True) -> None:
        super().__init__()
        places = sorted(categories)
        if places and not 0 <= places[0] <= places[-1] < features:
            raise ValueError(f"categories are in the columns {places}; expected columns from 0 to {features - 1}")
        counts = [whole("the codes of a category", categories[place], 2) for place in places]
        self.features, self.inputs, self.categories = features, inputs, places
        numbers = [place for place in range(features) if place not in categories]
        widths = [min(WIDEST_EMBEDDING, 1 + math.ceil(math.log2(max(2, count - 2)))) for count in counts]
        grouped = {width: [at for at, own in enumerate(widths) if own == width] for width in dict.fromkeys(widths)}
        self.shapes = [(sum(counts[at] for at in columns), width) for width, columns in grouped.items()]  # rows, width
        self.embedding = sum(widths)
        self.width = INPUTS[inputs] * len(numbers) + self.embedding
        if self.width == 0:
            raise ValueError("a document has no inputs; expected a feature, or a category")
        indices = {"numbers": numbers, "places": places, "unknown": [count - 2 for count in counts]} if places else {}
        for name, values in indices.items():  # none without categories: processes would send them to each other
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)
        for number, columns in enumerate(grouped.values()):
            starts = [0, *accumulate(counts[at] for at in columns)][:-1]
            self.register_buffer(f"columns{number}", torch.tensor(columns), persistent=False)
            self.register_buffer(f"starts{number}", torch.tensor(starts), persistent=False)
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in self.shapes if tables)
        self.numbers: Tensor
        self.places: Tensor
        self.unknown: Tensor

    @property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """For each table the categories in it, and where each one's rows begin."""
        return [(getattr(self, f"columns{n}"), getattr(self, f"starts{n}")) for n in range(len(self.shapes))]

    def forward(self, features: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[B, L, F] -> [B, L, width]."""
        numbers, codes = self.parts(features, mask, dtype)
        return self._with_vectors(list_inputs(numbers, mask, self.inputs), codes)

    def packed(self, features: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of packed lists: [T, F] -> [T, width]."""
        numbers, codes = self.parts(features[None], None, dtype)
        return self._with_vectors(_packed_inputs(numbers[0], offsets, self.inputs), None if codes is None else codes[0])

    def parts(self, features: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Numbers [B, L, N] of a dtype and codes [B, L, C] of documents [B, L, F], 0 under the padding."""
        if not self.categories:
            return _clean(features, mask, self.features, dtype), None
        features = _clean(features, mask, self.features, features.dtype)  # codes are not for half precision
        return features[..., self.numbers].to(dtype), features[..., self.places].long()

    def _with_vectors(self, numbers: Tensor, codes: Tensor | None) -> Tensor:
        if codes is None:
            return numbers
        if self.training:
            codes = torch.where(torch.rand(codes.shape, device=codes.device) < FORGOTTEN, self.unknown, codes)
        found = [
            functional.embedding(codes[..., columns] + starts, table).flatten(-2).to(numbers.dtype)
            for (columns, starts), table in zip(self.groups, self.tables)
        ]
        return torch.cat([numbers, *found], -1)


class _Noise(nn.Module):
    """x + deviation * N(0, 1) for every feature of every document, anew in each training step; nothing in evaluation.

    The last columns, as many as `spared`, are left alone.
    """

    def __init__(self, deviation: float, spared: int = 0) -> None:
        super().__init__()
        if isinstance(deviation, bool) or not isinstance(deviation, int | float) or not 0 <= deviation < math.inf:
            raise ValueError(f"input_noise must be a deviation, a finite number of 0 or above, got {deviation!r}")
        self.deviation, self.spared = float(deviation), spared

    def forward(self, features: Tensor) -> Tensor:
        if not self.training or self.deviation == 0:
            return features
        noise = torch.randn_like(features)
        if self.spared:
            noise[..., -self.spared :] = 0.0
        return features + self.deviation * noise


def _seeds(device: torch.device, *shape: int) -> Tensor:
    """Seeds of a hash, [..., 4]: two are enough, and four begin where a kernel may expect it, at multiples of 16 bytes."""
    return torch.randint(-(2**31), 2**31 - 1, (*shape, 4), dtype=torch.int32, device=device)


class _Block(nn.Module):
    """The layers of a pre-norm encoder block: x + attention(norm(x)), then x + feed-forward(norm(x)), each through dropout."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.feedforward_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, feedforward)
        self.narrow = nn.Linear(feedforward, width)
        self.dropout = nn.Dropout(dropout)


class _SharedLinear(nn.Module):
    """((x * r_k) W^T) * s_k + b_k for member k: [K, ..., before] -> [K, ..., after]."""

    def __init__(self, layer: nn.Linear, members: int, *, signs: bool) -> None:
        super().__init__()
        layer.reset_parameters()  # as TabM starts: uniform within 1 / sqrt(before)
        before, after = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.r = nn.Parameter(_signs(members, before) if signs else torch.ones(members, before))
        self.s = nn.Parameter(torch.ones(members, after))
        self.bias = nn.Parameter(layer.bias.detach().repeat(members, 1))

    def forward(self, x: Tensor) -> Tensor:
        r, s, bias = (v.view(len(v), *[1] * (x.dim() - 2), -1) for v in (self.r, self.s, self.bias))
        return functional.linear(x * r, self.weight) * s + bias


class _Attention(nn.Module):
    """Every document of a list attends to every real one: softmax(Q K^T / sqrt(width / heads)) V, per head.

    `merge` is the layer after it.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)

    def forward(
        self, hidden: Tensor, seen: Tensor | PackedLayout | None, linear: Callable[..., Tensor], seeds: Tensor | None
    ) -> Tensor:
        """[..., width] before `merge`."""
        dropout = self.dropout if self.training else 0.0
        if isinstance(seen, PackedLayout):
            return self._packed(hidden, seen, linear, dropout, seeds)
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, L, width / H]
            for project in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        return found.transpose(1, 2).flatten(-2)

    def _packed(
        self, hidden: Tensor, lists: PackedLayout, linear: Callable[..., Tensor], dropout: float, seeds: Tensor | None
    ) -> Tensor:
        """The same of packed lists [T, width]; the three projections are one product."""
        parts = (self.query, self.key, self.value)
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        projected = linear(hidden, weight, bias).unflatten(-1, (3, self.heads, -1))  # [T, 3, H, width / H]
        if lists.kernel:
            assert seeds is not None
            where = lists.offsets, lists.longest
            return list_attention_kernel(projected, *where, dropout, seeds[:1], lists.exact).flatten(-2)
        # Elsewhere: padded for the attention alone.
        position = torch.arange(lists.longest, device=hidden.device)
        first, end = lists.offsets[:-1, None].long(), lists.offsets[1:, None].long()
        real = position < end - first  # [B, longest]
        rows = (first + position).where(real, 0)
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


def _scores_of_members(hidden: Tensor, mask: Tensor | None, output: nn.Linear, *, tanh: bool, each: bool) -> Tensor:
    """Member k's output is row k of the linear layer: [K, ..., d] -> scores [..., K] of each, or their mean [...]."""
    device = hidden.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        scores = torch.einsum("k...d,kd->...k", hidden.to(output.weight.dtype), output.weight) + output.bias
    scores = scores.tanh() if tanh else scores
    scores = scores if mask is None else scores.masked_fill(~mask[..., None], 0.0)
    return scores if each else scores.mean(-1)


def _signs(*shape: int) -> Tensor:
    """1 or -1 at random."""
    return 2.0 * torch.randint(2, shape) - 1


def _glorot(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    for part in model.modules():
        if isinstance(part, _Document):
            for table in part.tables:
                nn.init.normal_(table, std=VECTOR_DEVIATION)


def _start(shapes: Sequence[tuple[int, int]], seed: int, member: int, tables: Sequence[tuple[int, int]] = ()) -> Tensor:
    """The weights a member starts with, [P]: matrices Glorot-uniform, biases uniform as torch's are, vectors of categories normal."""
    generator = torch.Generator().manual_seed(hash_of(seed, member))
    parts = []
    for before, after in shapes:
        for size, bound in ((before * after, math.sqrt(6 / (before + after))), (after, 1 / math.sqrt(before))):
            parts.append((2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1) * bound)
    for rows, width in tables:
        parts.append(VECTOR_DEVIATION * torch.randn(rows * width, generator=generator, dtype=torch.float64))
    return torch.cat(parts).to(torch.get_default_dtype())


def list_inputs(features: Tensor, mask: Tensor | None, inputs: str) -> Tensor:
    """What the first layer takes, [B, L, F], [B, L, 2 F] or [B, L, 10 F]: features, and where they stand within their list.

    That is (x - mean) / deviation over the list's documents, 0 where they are all equal. With `pieces` also both of them in pieces.
    """
    if inputs == "features":
        return features
    count = features.shape[1] if mask is None else mask.sum(1).clamp(min=1)[:, None, None]
    # Other runtimes sum float32 one by one: a feature that is equal throughout a list of 1,000 would not be equal to its mean.
    x = features.double() if torch.compiler.is_exporting() else features
    away = x - x.sum(1, keepdim=True) / count  # padding is 0 already
    away = away if mask is None else away.masked_fill(~mask[..., None], 0.0)
    relative = _over_deviation(away, away.square().sum(1, keepdim=True) / count)
    return _in_pieces(torch.cat([features, relative.to(features.dtype)], -1), inputs)


def _packed_inputs(features: Tensor, offsets: Tensor, inputs: str) -> Tensor:
    """The same of packed lists, [T, F] -> [T, F], [T, 2 F] or [T, 10 F]."""
    if inputs == "features":
        return features
    rows = torch.arange(len(features), dtype=offsets.dtype, device=offsets.device)
    lists, ends = torch.searchsorted(offsets[1:], rows, right=True), offsets.long()

    def mean(values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "mean", offsets=ends, axis=0, unsafe=True)[lists]

    away = features - mean(features)
    return _in_pieces(torch.cat([features, _over_deviation(away, mean(away.square()))], -1), inputs)


def _in_pieces(values: Tensor, inputs: str) -> Tensor:
    """[..., W] -> [..., 5 W]: with `pieces`, how far a value has come through each piece between two cuts, from 0 to 1.

    A first layer on these is a curve of each feature, as trees have them, where on the feature alone it is a line: piecewise-linear
    embeddings (arXiv 2203.05556) with cuts that need no data, because features are scaled.
    """
    if inputs != "pieces":
        return values
    parts = [((values - low) / (high - low)).clamp(0, 1) for low, high in pairwise(CUTS)]
    return torch.cat([values, *parts], -1)


def _over_deviation(away: Tensor, variance: Tensor) -> Tensor:
    constant = variance < 1e-12  # of scaled features: what is left of equal ones after rounding
    return torch.where(constant, 0.0, away / torch.where(constant, 1.0, variance).sqrt())


def _kept_by_member(shape: Sequence[int], threshold: Tensor, seeds: Tensor) -> Tensor:
    """What dropout leaves, [K, T, W] bool, by a hash of a member's two seeds and the position; four units share a word."""
    members, rows, width = shape
    words = -(-width // 4)
    position = torch.arange(rows * words, dtype=torch.int32, device=seeds.device).view(rows, words)
    first, second = seeds[:, 0, None, None], seeds[:, 1, None, None]
    mixed = position ^ first  # [K, T, words]; lowbias32; the masks make the shifts logical
    mixed = (mixed ^ (mixed >> 16 & 0xFFFF)) * 0x7FEB352D
    mixed = ((mixed ^ second) ^ (mixed >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    mixed = mixed ^ (mixed >> 16 & 0xFFFF)
    return mixed.view(torch.uint8).view(members, rows, 4 * words)[..., :width] >= threshold[:, None, None]
