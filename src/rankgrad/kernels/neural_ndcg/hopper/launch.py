"""NeuralNDCG of lists of 33 to 256 documents on chips that have clusters of blocks (Hopper and later): two launches in CUDA C++.

The same mathematics as `rankgrad.kernels.neural_ndcg.short.launch`, which stays the path of other chips. `sort.cu` sorts the lists,
`rounds.cu` runs all rounds and the backward pass to the scores. Triton can neither keep sums inside a warp nor write into the
shared memory of another block; this takes two thirds of its time. The vectors of all rounds stay in shared memory: with the 227
KB of a Hopper block that is enough for 106 rounds of up to 128 documents, 66 of more; with fewer (99 KB: 42 and 23) Triton's kernels
take over earlier. Of 64 documents both are as fast and one compilation is saved; of 32 and fewer Triton's are faster.
"""

import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.kernels.cuda import Kernel, shared_memory
from rankgrad.kernels.neural_ndcg.short.workspace import words
from rankgrad.kernels.summary import GAINS

SORT, ROUNDS = (
    tuple(Path(__file__).with_name(f"{name}.cu") for name in ("ptx", "workspace", last)) for last in ("sort", "rounds")
)  # files of one source
_KINDS = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
]  # fmt: skip
_KIND = {kind: number for number, kind in enumerate(_KINDS)} | {torch.bool: _KINDS.index(torch.uint8)}
_REDUCTION = {"none": 0, "sum": 1, "mean": 2}
_ROWS = 128  # of a block
_SHORTEST = 33
_THREADS = 256


class Kernels(NamedTuple):
    """For lists whose matrix is padded to `width` columns."""

    sort: Kernel
    rounds: Kernel
    width: int


def find(scores: Tensor, labels: Tensor, iters: int, transposed: bool) -> Kernels | None:
    """The kernels for lists [..., L], or None where Triton's are to be used."""
    length = scores.shape[-1]
    if length < _SHORTEST or not scores.is_cuda or labels.dtype not in _KIND:
        return None
    width = _ROWS if length <= _ROWS else 2 * _ROWS
    return (
        _kernels(scores.device, width, transposed)
        if _shared_bytes(width, iters) <= _shared_limit(scores.device)
        else None
    )


def value_and_gradient(
    kernels: Kernels, scores: Tensor, labels: Tensor, mask: Tensor | None, *,
    depth: int, tau: float, gain: str | Tensor, iters: int, tol: float, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and d loss / d scores in float32."""
    length = scores.shape[-1]
    lists = scores.numel() // length
    given = gain if isinstance(gain, Tensor) else None
    work = scores.new_empty(words(lists, length, 0, kernels.width), dtype=torch.float32)
    gradient = scores.new_empty(scores.shape, dtype=torch.float32)
    loss = scores.new_empty(scores.shape[:-1] if reduction == "none" else (), dtype=torch.float32)
    depth, tau = min(depth, length), float(tau)
    # bound to names, so that their memory is not freed before the launch
    scores, labels = scores.contiguous(), labels.contiguous()
    real, given = (tensor if tensor is None else tensor.contiguous() for tensor in (mask, given))
    with torch.cuda.device_of(scores):
        stream = torch.cuda.current_stream().cuda_stream
        kernels.sort(
            stream, lists, _THREADS, 0,
            scores, _KIND[scores.dtype], labels, _KIND[labels.dtype], real, given, work, length, tau, depth,
            2 if isinstance(gain, Tensor) else GAINS[gain],
        )  # fmt: skip
        kernels.rounds(
            stream, lists * (kernels.width // _ROWS), _THREADS, _shared_bytes(kernels.width, iters),
            work, gradient, loss, lists, length, iters, float(tol), tau, depth, _REDUCTION[reduction],
        )  # fmt: skip
    return loss, gradient


def _shared_bytes(width: int, iters: int) -> int:
    """The size of `Shared` in rounds.cu."""
    once = 4 * (width + 1) + 4 + 2 * width + 16 * width + 8 + 3 * _ROWS + 2 * width
    return 4 * (once + (2 * iters + 1) * (_ROWS + width))


@functools.cache
def _shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block can have, 0 on chips without clusters."""
    clusters = not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9
    return shared_memory(device) if clusters else 0


@functools.cache
def _kernels(device: torch.device, width: int, transposed: bool) -> Kernels | None:
    if torch.cuda.is_current_stream_capturing():  # functools.cache does not keep exceptions
        raise RuntimeError(
            "kernels cannot be loaded while a CUDA graph is recorded; call the loss once before recording"
        )
    try:
        with torch.cuda.device(device):
            return Kernels(
                Kernel("sort_lists", SORT, (f"N={width}",)),
                Kernel("neural_ndcg", ROUNDS, (f"N={width}", f"TRANSPOSED={int(transposed)}"), _shared_limit(device)),
                width,
            )
    except (OSError, RuntimeError) as error:  # no NVRTC, or one too old for the chip, or a driver too old for it
        warnings.warn(f"rankgrad takes its slower kernels for lists of up to 256 documents: {error}", stacklevel=2)
        return None
