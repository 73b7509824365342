"""Kernels in Triton, CUDA C++ and numba: one function for each computation that has them, and which path a tensor gets.

A kernel is the twin of a torch path: same arguments, same values and gradients, computed in float32, without an [L, L]
tensor. `choose` decides between them:

    backend="torch"    the torch path, always
    backend="triton"   the kernels for GPUs, or a ValueError that says why they cannot run
    backend="numba"    the kernel for CPUs, which the relaxed sort has, or a ValueError that says why it cannot run
    backend="auto"     for float32, bfloat16 or float16: on CUDA tensors the kernels when triton is installed, on CPU tensors the
                       relaxed sort's when numba is; the torch path otherwise (all else on the CPU, float64, empty tensors)

Under TRITON_INTERPRET=1 (set before triton is first imported) backend="triton" also takes CPU tensors: that is how the
tests run, and far slower than the torch path.
"""

import ctypes
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from rankgrad.checks import one_of
from rankgrad.kernels.encoder import reference

BACKENDS = ("auto", "torch", "triton")  # and "numba" where there is a kernel for CPUs

LARGEST_HEAD = 128  # wider heads of attention would not fit the registers
LONGEST_IN_REGISTERS = (
    256  # documents: the matrix of such a list fits the registers; longer lists are done tile by tile
)
LONGEST_IN_A_PROGRAM = 4096  # documents of a list that one program of `lists` holds
LONGEST_COMPARED = (
    1024  # documents: `metrics` and ListMLE compare every one with every other; a sort is faster for longer lists
)

_INSTALLED = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def neural_ndcg_kernel(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    gains: Tensor | None,
    gain: str,
    k: int | None,
    tau: float,
    iters: int,
    tol: float,
    transposed: bool,
    backend: str,
    reduction: str,
    wants_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """`rankgrad.losses.neural.neural_ndcg` without samples, or its transposed form, and d loss / d scores in float32.

    Here and below: `gains` [..., L] float64, or None for the gain of that name. The kernel for CPUs leaves out a gradient that
    nobody wants; those for GPUs have it nearly for nothing.
    """
    value_alone = {"wants_gradient": False} if backend == "numba" and not wants_gradient else {}
    return _relaxed_sort(scores, backend).value_and_gradient(
        scores,
        labels,
        mask,
        k=k,
        tau=tau,
        gain=gain if gains is None else gains,
        iters=iters,
        tol=tol,
        transposed=transposed,
        reduction=reduction,
        **value_alone,
    )


def scaled_sort_kernel(scores: Tensor, backend: str) -> type[torch.autograd.Function]:
    """The twin of `rankgrad.core.sinkhorn.scaled_sort` for such scores: scale(P) values of sorted scores [B, L], or scale(P^T) values."""
    return _relaxed_sort(scores, backend).ScaledSort


def pairwise_kernel(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    gains: Tensor | None,
    gain: str,
    name: str,
    k: int | None,
    pairs: str,
    mu: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss `name` of `rankgrad.losses.pairwise`, and d loss / d scores in float32."""
    from rankgrad.kernels.pairs.launch import pairwise

    given = gain if gains is None else gains
    return pairwise(name, scores, labels, mask, k=k, gain=given, pairs=pairs, mu=mu, reduction=reduction)


def approx_ndcg_kernel(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    gains: Tensor | None,
    gain: str,
    alpha: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """`rankgrad.losses.smooth_rank.approx_ndcg`, and d loss / d scores in float32."""
    from rankgrad.kernels.pairs.launch import approx_ndcg

    return approx_ndcg(scores, labels, mask, alpha=alpha, gain=gain if gains is None else gains, reduction=reduction)


def soft_rank_kernel(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    gains: Tensor | None,
    gain: str,
    k: int | None,
    sigma: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """`rankgrad.losses.smooth_rank.soft_rank` by its Gaussian method, and d loss / d scores in float32."""
    from rankgrad.kernels.pairs.soft_rank import soft_rank

    given = gain if gains is None else gains
    return soft_rank(scores, labels, mask, k=k, sigma=sigma, gain=given, reduction=reduction)


def list_loss_kernel(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    option: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss `name` of `rankgrad.losses.listwise` or `pointwise`, and d loss / d scores in float32."""
    from rankgrad.kernels.lists import list_loss

    return list_loss(name, scores, labels, mask, noise, option, reduction)


def metric_kernel(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    gains: Tensor | None,
    gain: str,
    k: int | None,
    empty: float,
    option: float,
) -> Tensor:
    """The metric `name` of `rankgrad.metrics`, one value per list, [...] float32."""
    from rankgrad.kernels.metrics import metric

    given = gain if gains is None else gains
    return metric(name, scores, labels, mask, k=k, empty=empty, gain=given, option=option)


def encoder_operators(kernel: bool) -> ModuleType:
    """The operators of a Transformer encoder, `project`, `linear`, `add_norm` and `relu_dropout`, by kernels or by torch."""
    if not kernel:
        return reference
    from rankgrad.kernels.encoder import fused

    return fused


def list_attention_kernel(
    qkv: Tensor, offsets: Tensor, longest: int, dropout: float, seed: Tensor, exact: bool
) -> Tensor:
    """Attention within packed lists, see `rankgrad.kernels.encoder.attention`: [T, 3, H, D] -> [T, H, D]."""
    from rankgrad.kernels.encoder.attention import list_attention

    return list_attention(qkv, offsets, longest, dropout, seed, exact)


def choose(backend: str, scores: Tensor, weights: Tensor | None = None, *, on_cpu: bool = False) -> str:
    """The path, "torch", "triton" or "numba", of scores [..., L]; kernels do not know weights. `on_cpu`: there is one for CPUs.

    >>> choose("auto", torch.zeros(3))
    'torch'
    >>> choose("fast", torch.zeros(3))
    Traceback (most recent call last):
    ...
    ValueError: backend must be one of 'auto', 'torch', 'triton', got 'fast'
    """
    one_of("backend", backend, (*BACKENDS, "numba") if on_cpu else BACKENDS)
    if weights is not None and backend == "triton":
        raise ValueError("backend='triton' has no kernels for weights; use backend='auto', or leave weights out")
    if backend == "torch" or weights is not None or not isinstance(scores, Tensor):
        return "torch"  # whose checks refuse what is not a tensor
    if backend == "auto":  # Triton's interpreter is for tests: nobody gets it without asking
        kernel = "triton" if scores.device.type == "cuda" else "numba" if on_cpu else "torch"
    else:
        kernel = backend
    reason = _why_not(scores) if kernel == "triton" else _why_no_numba(scores) if kernel == "numba" else ""
    if not reason:
        return kernel
    if backend != "auto" and scores.numel():
        raise ValueError(f"backend={backend!r} cannot run here: {reason}")
    return "torch"


def in_one_launch(
    backend: str, scores: Tensor, weights: Tensor | None, longest: int, *numbers: float, dim: int = -1
) -> bool:
    """Whether a kernel that keeps a list in one program takes these scores, whose documents are along `dim`.

    `numbers` are compared with labels by the kernel, which gets them as float32: those that it would round are not for it.
    """
    if choose(backend, scores, weights) != "triton" or scores.dim() < -dim:
        return False
    length = scores.shape[dim]
    if length <= longest and all(ctypes.c_float(number).value == number for number in numbers):
        return True
    if backend == "triton":
        raise ValueError(
            f"backend='triton' takes lists of up to {longest} documents here, and thresholds that float32 holds, got lists "
            f"of {length} and {', '.join(map(str, numbers)) or 'no threshold'}; use backend='auto'"
        )
    return False


def why_none(device: torch.device) -> str:
    """Why there are no kernels for a device; empty if there are.

    >>> why_none(torch.device("cpu"))
    'kernels need a CUDA device'
    """
    if device.type != "cuda":
        return "kernels need a CUDA device"
    return "" if _INSTALLED else "triton is not installed"


def why_no_attention(device: torch.device, head: int) -> str:
    """Why the attention kernel cannot take heads of `head` dimensions on a device; empty if it can."""
    if device.type == "cuda" and head > LARGEST_HEAD:
        return f"the attention kernel takes heads of up to {LARGEST_HEAD} dimensions, got {head}"
    return why_none(device)


def _why_not(scores: Tensor) -> str:
    """Why the kernels cannot take these scores, as half a sentence; empty if they can."""
    if scores.device.type != "cuda" and not (scores.device.type == "cpu" and _interpreted()):
        return f"the scores are on {scores.device}; move them to a CUDA device, or use backend='auto'"
    if reason := _why_not_in_float32(scores):
        return reason
    if not _INSTALLED:
        return "triton is not installed; pip install triton, or use backend='auto'"
    return ""


def _why_no_numba(scores: Tensor) -> str:
    """Why numba's kernel cannot take these scores, as half a sentence; empty if it can."""
    if scores.device.type != "cpu":
        return f"the scores are on {scores.device}; move them to the CPU, or use backend='auto'"
    return _why_not_in_float32(scores) or why_no_numba()


def why_no_numba() -> str:
    """Why numba compiles nothing here; empty if it does.

    >>> why_no_numba()
    ''
    """
    from rankgrad.jit import COMPILED

    return (
        "" if COMPILED else "numba is not installed, or told not to compile; pip install numba, or use backend='auto'"
    )


def _why_not_in_float32(scores: Tensor) -> str:
    if scores.dtype not in _DTYPES:
        return (
            f"kernels compute in float32 and the scores are {scores.dtype}; call scores.float(), or use backend='auto'"
        )
    return "there are no scores" if scores.dim() < 1 or scores.numel() == 0 else ""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _relaxed_sort(scores: Tensor, backend: str) -> ModuleType:
    """The relaxed sort of lists as long as these, "triton" or "numba"."""
    if backend == "numba":
        from rankgrad.kernels.neural_ndcg import cpu

        return cpu
    if scores.shape[-1] <= LONGEST_IN_REGISTERS:
        from rankgrad.kernels.neural_ndcg.short import launch as short

        return short
    from rankgrad.kernels.neural_ndcg.long import launch as long

    return long
