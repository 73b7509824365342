"""Losses: pure functions `loss(scores, labels, mask=None, *, ...)` of tensors [..., L], mask True = a real document.

Each computes one value per list and reduces it last: `reduction="mean"` (over the lists that can teach), `"sum"`, or
`"none"` (one value per list). `check=None` refuses bad values of real documents on CPU tensors, True everywhere, False
nowhere: an unchecked bad list comes out as NaN. Half-precision scores are computed in float32.

A new loss is a function in one of these files and a line in LOSSES; the tests walk the table.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rankgrad.losses.informative import has_document, has_pair, has_relevant
from rankgrad.losses.listwise import listmle, listnet, softmax, xe_ndcg
from rankgrad.losses.neural import (
    neural_err,
    neural_map,
    neural_mrr,
    neural_ndcg,
    neural_ndcg_transposed,
    neural_precision,
)
from rankgrad.losses.pairwise import lambdarank, ndcg_loss1, ndcg_loss2, ndcg_loss2pp, ranknet
from rankgrad.losses.pointwise import bce, ordinal, rmse
from rankgrad.losses.smooth_rank import approx_ndcg, soft_rank

LOSSES: dict[str, Callable[..., Tensor]] = {
    "neural_ndcg": neural_ndcg,
    "neural_ndcg_transposed": neural_ndcg_transposed,
    "approx_ndcg": approx_ndcg,
    "listnet": listnet,
    "listmle": listmle,
    "ranknet": ranknet,
    "lambdarank": lambdarank,
    "ndcg_loss1": ndcg_loss1,
    "ndcg_loss2": ndcg_loss2,
    "ndcg_loss2pp": ndcg_loss2pp,
    "rmse": rmse,
    "ordinal": ordinal,
    "bce": bce,
    "softmax": softmax,
    "xe_ndcg": xe_ndcg,
    "soft_rank": soft_rank,
    "neural_map": neural_map,
    "neural_mrr": neural_mrr,
    "neural_err": neural_err,
    "neural_precision": neural_precision,
}

POINTWISE = ("rmse", "ordinal", "bce")
PAIRWISE = ("ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp")


def teaching(name: str, labels: Tensor, mask: Tensor, *, threshold: float | None = None) -> Tensor:
    """Which lists the loss `name` takes into its mean, [..., L] -> [...] bool; `threshold` as the loss was given it."""
    return teaching_rule(name, threshold)(labels, mask)


def teaching_rule(name: str, threshold: float | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """The same as a function of labels and mask: few functions serve all losses, so that few are compiled."""
    if name in POINTWISE:
        return has_document
    if name in PAIRWISE:
        return has_pair
    if name in ("neural_map", "neural_mrr", "neural_precision"):
        return partial(has_relevant, threshold=1.0 if threshold is None else threshold)
    return has_relevant


__all__ = ["LOSSES", "teaching", *LOSSES]
