"""Where lists of up to 256 documents take one launch after the sort: chips that have clusters of blocks (Hopper and later).

`short_lists.cu` does what `rounds_kernel` and `gradient_kernel` do, for NeuralNDCG with its gradient: the same mathematics (see
`rankgrad.kernels.scaled_sort`), in CUDA C++ because Triton can neither keep sums inside a warp nor reach the shared memory of
the block next door. The vectors of all rounds stay in shared memory, so it takes up to about 70 rounds.
"""

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from rankgrad.kernels.nvrtc import Kernel

_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_ROWS = 128  # of a block
_THREADS = 256


def find(scores: Tensor, iters: int, transposed: bool) -> Kernel | None:
    """The kernel for these lists [..., L], or None where it cannot run."""
    if not scores.is_cuda or torch.version.hip or torch.cuda.get_device_capability(scores.device)[0] < 9:
        return None
    width = width_of(scores.shape[-1])
    room: int = torch.cuda.get_device_properties(scores.device).shared_memory_per_block_optin
    return _kernel(scores.device, width, transposed) if _shared(width, iters) <= room else None


def launch(
    kernel: Kernel, work: Tensor, gradient: Tensor, loss: Tensor, iters: int, tol: float, tau: float, depth: int, reduction: str
) -> None:  # fmt: skip
    """Gradient [..., L] and loss from pages without vectors."""
    length = gradient.shape[-1]
    lists, width = gradient.numel() // length, width_of(length)
    kernel(
        lists * (width // _ROWS), _THREADS, _shared(width, iters),
        work, gradient, loss, lists, length, iters, float(tol), float(tau), min(depth, length), _REDUCTIONS[reduction],
    )  # fmt: skip


def width_of(length: int) -> int:
    """Columns that the matrix of a list is padded to."""
    return _ROWS if length <= _ROWS else 2 * _ROWS


def _shared(width: int, iters: int) -> int:
    """Bytes of `Room` in short_lists.cu."""
    words = 4 * (width + 1) + 4 * width + 16 * width + 8 + 3 * _ROWS + 2 * width
    return 4 * (words + (2 * iters + 1) * (_ROWS + width))


@functools.cache
def _kernel(device: torch.device, width: int, transposed: bool) -> Kernel | None:
    source = Path(__file__).with_name("short_lists.cu")
    try:
        with torch.cuda.device(device):
            return Kernel(source, "neural_ndcg", (f"N={width}", f"TRANSPOSED={int(transposed)}"))
    except (OSError, RuntimeError) as error:  # no NVRTC, or an older one, or an older driver
        warnings.warn(f"rankgrad takes its slower kernels for short lists: {error}", stacklevel=2)
        return None
