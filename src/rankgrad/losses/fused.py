"""The losses' door to the kernels: checks what the torch path would check, then one value-and-gradient kernel.

Each function is the twin of the loss it is named after; `rankgrad.kernels.choose` says when a tensor comes here.
"""

from torch import Tensor

from rankgrad.checks import one_of
from rankgrad.core.gains import Gain, gains
from rankgrad.core.lists import inspect, prepare
from rankgrad.kernels import in_registers


def pairwise(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    k: int | None,
    gain: Gain,
    pairs: str,
    reduction: str,
    check: bool | None,
    mu: float = 0.0,
) -> Tensor:
    """A loss of `rankgrad.losses.pairwise`, [..., L] -> scalar."""
    from rankgrad.kernels.pairs.launch import pairwise

    inspect(scores, labels, mask, check, gain=gain)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    gain_values = _gain(scores, labels, mask, gain)
    return pairwise(name, scores, labels, mask, gain=gain_values, k=k, pairs=pairs, mu=mu, reduction=reduction)


def approx_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    alpha: float,
    gain: Gain,
    reduction: str,
    check: bool | None,
) -> Tensor:
    """ApproxNDCG, [..., L] -> scalar."""
    from rankgrad.kernels.pairs.launch import approx_ndcg

    inspect(scores, labels, mask, check, gain=gain)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    gain_values = _gain(scores, labels, mask, gain)
    return approx_ndcg(scores, labels, mask, alpha=alpha, gain=gain_values, reduction=reduction)


def neural_ndcg(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    k: int | None,
    tau: float,
    gain: Gain,
    iters: int,
    tol: float,
    transposed: bool,
    reduction: str,
    check: bool | None,
) -> Tensor:
    """NeuralNDCG without samples, or its transposed form, [..., L] -> scalar."""
    if in_registers(scores):
        from rankgrad.kernels.neural_ndcg.short.launch import neural_ndcg
    else:
        from rankgrad.kernels.neural_ndcg.long.launch import neural_ndcg

    inspect(scores, labels, mask, check, gain=gain)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    return neural_ndcg(
        scores,
        labels,
        mask,
        k=k,
        tau=tau,
        gain=_gain(scores, labels, mask, gain),
        iters=iters,
        tol=tol,
        transposed=transposed,
        reduction=reduction,
    )


def _gain(scores: Tensor, labels: Tensor, mask: Tensor | None, gain: Gain) -> str | Tensor:
    """Gains the kernels know by name, others as a float64 tensor."""
    if isinstance(gain, str) and gain in ("exp2", "linear"):
        return gain
    lists = prepare(scores.detach(), labels, mask, False)
    return gains(lists.labels, lists.mask, gain)
