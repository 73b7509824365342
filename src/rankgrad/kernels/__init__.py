"""Twins of the mathematics and of parts of a training step, in Triton and CUDA C++, and which path a tensor gets.

Imports nothing of rankgrad, and triton only when used. A twin of a loss computes the same values and gradients as its torch
path, in float32, without an [L, L] tensor. `choose` decides:

    backend="torch"    the torch path, always
    backend="triton"   the kernels, or a ValueError that says why they cannot run
    backend="auto"     the kernels for CUDA tensors of float32, bfloat16 or float16 when triton is installed; the torch
                       path otherwise (CPU tensors, float64, empty tensors)

Under TRITON_INTERPRET=1 (set before triton is first imported) backend="triton" also takes CPU tensors: that is how the
tests run, and far slower than the torch path.
"""

import importlib.util
import os

import torch
from torch import Tensor

LARGEST_HEAD = 128  # wider heads of attention would not fit the registers
LONGEST_IN_REGISTERS = 256  # documents: a relaxed sort keeps the matrix of such a list; longer ones go tile by tile

_INSTALLED = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(backend: str, scores: Tensor) -> str:
    """The path, "torch" or "triton", of scores [..., L].

    >>> choose("auto", torch.zeros(3))
    'torch'
    >>> choose("fast", torch.zeros(3))
    Traceback (most recent call last):
    ...
    ValueError: backend must be one of 'auto', 'torch', 'triton', got 'fast'
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be one of 'auto', 'torch', 'triton', got {backend!r}")
    if backend == "torch" or not isinstance(scores, Tensor):
        return "torch"  # what is not a tensor is refused there
    reason = _why_not(scores)
    if not reason:
        # The interpreter is for tests: nobody gets it without asking.
        return "triton" if backend == "triton" or scores.device.type == "cuda" else "torch"
    if backend == "triton" and scores.numel():
        raise ValueError(f"backend='triton' cannot run here: {reason}")
    return "torch"


def in_registers(scores: Tensor) -> bool:
    """Whether relaxed sorts of scores [..., L] are for `rankgrad.kernels.neural_ndcg.short.launch`, or for `rankgrad.kernels.neural_ndcg.long.launch`."""
    return scores.shape[-1] <= LONGEST_IN_REGISTERS


def why_none(device: torch.device) -> str:
    """What keeps kernels from a device; empty if nothing does.

    >>> why_none(torch.device("cpu"))
    'kernels need a CUDA device'
    """
    if device.type != "cuda":
        return "kernels need a CUDA device"
    return "" if _INSTALLED else "triton is not installed"


def why_no_attention(device: torch.device, head: int) -> str:
    """What keeps the attention kernel from heads of `head` dimensions on a device; empty if nothing does."""
    if device.type == "cuda" and head > LARGEST_HEAD:
        return f"the attention kernel takes heads of up to {LARGEST_HEAD} dimensions, got {head}"
    return why_none(device)


def why_no_compiler(device: torch.device) -> str:
    """What keeps torch.compile from a device; empty if nothing does."""
    return why_none(device) if device.type == "cuda" else ""


def _why_not(scores: Tensor) -> str:
    """What keeps the kernels from these scores, as half a sentence; empty if nothing does."""
    if scores.device.type != "cuda" and not (scores.device.type == "cpu" and _interpreted()):
        return f"the scores are on {scores.device}; move them to a CUDA device, or use backend='auto'"
    if scores.dtype not in _DTYPES:
        return (
            f"kernels compute in float32 and the scores are {scores.dtype}; call scores.float(), or use backend='auto'"
        )
    if scores.dim() < 1 or scores.numel() == 0:
        return "there are no scores"
    if not _INSTALLED:
        return "triton is not installed; pip install triton, or use backend='auto'"
    return ""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
