"""A loss as a module, and flat documents as padded lists: what a training loop of one's own needs beside the functions."""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad.checks import one_of
from rankgrad.kernels import BACKENDS
from rankgrad.losses import LossSpec
from rankgrad.training.build import parse_loss

PER_CALL = ("scores", "labels", "mask", "weights", "generator", "noise")  # what belongs to a batch, not to the loss


class RankingLoss(nn.Module):
    """A loss by name, with its options, as a module without parameters.

    - `name`: one of `rankgrad.LOSSES`, `@k` for a cut-off: "neural_ndcg@10".
    - `options`: keyword arguments of that function (`tau=`, `reduction=`, `backend=`, ...), checked here, once.

    >>> loss = RankingLoss("neural_ndcg@10", tau=0.5)
    >>> loss
    RankingLoss('neural_ndcg@10', tau=0.5)
    >>> round(loss(torch.tensor([[0.3, 0.1, 0.2]]), torch.tensor([[0, 2, 1]])).item(), 4)
    -0.7299
    >>> RankingLoss(**loss.config())
    RankingLoss('neural_ndcg@10', tau=0.5)
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        spec, cutoff = parse_loss(name)
        _check_options(spec, cutoff, options)
        self.name, self.options = name, options
        self._function, self._given, self._takes = spec.function, cutoff | options, frozenset(spec.parameters)

    def forward(
        self,
        scores: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch of lists.

        - `scores`: [..., L] ([..., L, K] for "ordinal").
        - `labels`: relevance, [..., L].
        - `mask`: True at real documents, [..., L]; None: all are real.
        - `weights`: of documents, [..., L], for losses that take them.
        - `generator`, `noise`: the randomness of a stochastic loss.
        """
        given = {"weights": weights, "generator": generator, "noise": noise}
        batch = {key: value for key, value in given.items() if value is not None}
        for key in batch:
            if key not in self._takes:
                raise ValueError(f"the loss {self.name} takes no {key}; leave it out, or choose a loss that does")
        return self._function(scores, labels, mask, **self._given, **batch)

    if TYPE_CHECKING:  # torch's own gives Any

        def __call__(
            self,
            scores: Tensor,
            labels: Tensor,
            mask: Tensor | None = None,
            *,
            weights: Tensor | None = None,
            generator: torch.Generator | None = None,
            noise: Tensor | None = None,
        ) -> Tensor: ...

    def config(self) -> dict[str, Any]:
        """Name and options: `RankingLoss(**config)` is this loss again."""
        return {"name": self.name, **self.options}

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"{type(self).__name__}({self.name!r}{options})"


def pad_lists(values: Tensor, sizes: Sequence[int] | NDArray[Any] | Tensor) -> tuple[Tensor, Tensor]:
    """Lists that stand end to end, [N, ...], as padded lists [B, L, ...] and their mask [B, L].

    - `values`: scores, labels or features of all documents, on any device; gradients flow through.
    - `sizes`: how many documents each list has, in order; together N, and 0 is allowed. L is the largest of them.

    Padding is zero. Sizes on a GPU are read by the host, which waits for them.

    >>> scores, mask = pad_lists(torch.tensor([0.3, 0.1, 0.2]), [1, 2])
    >>> scores.tolist()
    [[0.30000001192092896, 0.0], [0.10000000149011612, 0.20000000298023224]]
    >>> mask.tolist()
    [[True, False], [True, True]]
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        came = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"values must be a tensor [N, ...] of one row per document, got {came}")
    lengths = _lengths(sizes, len(values))
    lists, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    row = torch.arange(lists).repeat_interleave(lengths)
    column = torch.arange(len(values)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    place = row.to(values.device), column.to(values.device)
    mask = torch.arange(longest) < lengths[:, None]
    padded = values.new_zeros(lists, longest, *values.shape[1:]).index_put(place, values)
    return padded, mask.to(values.device)


def unpad_lists(padded: Tensor, mask: Tensor) -> Tensor:
    """The real documents of padded lists, list after list: the inverse of `pad_lists`.

    - `padded`: [..., L, ...], for instance the scores of a batch; gradients flow through.
    - `mask`: True at real documents, of the first dimensions of `padded`.

    >>> unpad_lists(torch.tensor([[0.3, 0.0], [0.1, 0.2]]), torch.tensor([[True, False], [True, True]])).tolist()
    [0.30000001192092896, 0.10000000149011612, 0.20000000298023224]
    """
    for name, tensor in (("padded", padded), ("mask", mask)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be of dtype torch.bool (True = a real document), got {mask.dtype}; call mask.bool()"
        )
    if mask.dim() == 0 or padded.shape[: mask.dim()] != mask.shape:
        raise ValueError(
            f"mask must have the shape of the first dimensions of padded, {tuple(padded.shape)}, got {tuple(mask.shape)}"
        )
    return padded[mask]


def _lengths(sizes: Any, documents: int) -> Tensor:
    """Sizes as an int64 tensor of the host, after a look at them."""
    try:
        found = (sizes if isinstance(sizes, Tensor) else torch.from_numpy(np.asarray(sizes))).detach().cpu()
    except (TypeError, ValueError):
        raise ValueError(f"sizes must be whole numbers, one per list, got {sizes!r}") from None
    whole = not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
    if found.dim() != 1 or not (whole or found.numel() == 0):  # numpy makes [] floats
        raise ValueError(f"sizes must be whole numbers, one per list, got {found.dtype} of shape {tuple(found.shape)}")
    lengths = found.long()
    if (lengths < 0).any():
        raise ValueError(f"sizes must be 0 or above, got {int(lengths.min())} for list {int(lengths.argmin())}")
    if int(lengths.sum()) != documents:
        raise ValueError(
            f"sizes say {int(lengths.sum())} documents and values have {documents}; expected the number of rows of each "
            "list; were rows left out?"
        )
    return lengths


def _check_options(spec: LossSpec, cutoff: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse options that the loss does not have, and values that it refuses on a list of two documents."""
    known = [key for key in spec.parameters if key not in PER_CALL]
    for key in options:
        if key in PER_CALL:
            raise ValueError(
                f"{key} belongs to a batch, not to the loss; expected it in the call, loss(..., {key}={key})"
            )
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"the loss {spec.name} has no option {key!r}; {hint}")
    if cutoff and "k" in options:
        raise ValueError(f"the cut-off is given twice, @{cutoff['k']} and k={options['k']!r}; leave one of them out")
    tried = cutoff | options
    if "backend" in options:
        one_of("backend", options["backend"], (*BACKENDS, "numba") if "sort" in known else BACKENDS)
    if "backend" in known:
        tried["backend"] = "torch"  # some kernels want tensors of a GPU, the other is compiled when first called
    if "generator" in spec.parameters:
        tried["generator"] = torch.Generator()  # the global one stays as it is
    units = spec.units(2)
    spec.function(torch.zeros(1, 2, units) if units > 1 else torch.zeros(1, 2), torch.ones(1, 2), **tried)
