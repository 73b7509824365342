"""The encoder's operators by torch: twins of the kernels in `fused`, and the path of every device without kernels.

Dropout without seeds draws from torch's generator; with seeds it drops what the kernels drop.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear as linear


def project(x: Tensor, layer: nn.Linear) -> tuple[Tensor, None]:
    """A layer's output, and no bias that would have yet to be added: torch adds it within the product."""
    return layer(x), None


def add_norm(
    hidden: Tensor | None,
    product: Tensor,
    bias: Tensor | None,
    norm: nn.LayerNorm,
    dtype: torch.dtype,  # noqa: ARG001 (autocast rounds what a product takes)
    dropout: float,
    seeds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Hidden (None: 0) + dropout(product + bias), and its layer norm, [..., W]."""
    branch = _dropped(product if bias is None else product + bias, dropout, seeds)
    total = branch.to(norm.weight.dtype) if hidden is None else hidden + branch
    return total, norm(total)


def relu_dropout(product: Tensor, bias: Tensor | None, dropout: float, seeds: Tensor | None) -> Tensor:
    """dropout(relu(product + bias)), [..., W]."""
    return _dropped((product if bias is None else product + bias).relu(), dropout, seeds)


def kept(shape: Sequence[int], dropout: float, seeds: Tensor) -> Tensor:
    """What dropout leaves of a tensor: True with probability 1 - dropout, by a hash of two int32 seeds and the position."""
    position = torch.arange(math.prod(shape), dtype=torch.int32, device=seeds.device).view(*shape)
    mixed = position ^ seeds[0]  # the constants are lowbias32's, the best hash of two multiplications known
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = ((mixed ^ seeds[1]) ^ (mixed >> 15)) * (0x846CA68B - 2**32)
    mixed = (mixed ^ (mixed >> 16)) & 0x7FFFFFFF
    return mixed >= int(dropout * 2**31)


def _dropped(x: Tensor, dropout: float, seeds: Tensor | None) -> Tensor:
    if dropout == 0:
        return x
    if seeds is None:
        return functional.dropout(x, dropout)
    return x * kept(x.shape, dropout, seeds) * (1 / (1 - dropout))
