"""Losses: pure functions `loss(scores, labels, mask=None, *, ...)` of tensors [..., L], mask True = a real document.

Each computes one value per list and reduces it last: `reduction="mean"` (over the lists it can learn from), `"sum"`, or
`"none"` (one value per list). `check=None` refuses bad values of real documents on CPU tensors, True everywhere, False
nowhere: an unchecked bad list comes out as NaN. Half-precision scores are computed in float32.

Losses that are sums over documents or pairs take `weights` [..., L], 0 or above and constant: what a document counts, or a pair the
product of its two. The others are functions of a ranking, of which no document is a term.

A new loss is a function in one of these files, a line in LOSS_TABLE, and its plain loops in tests/references/loops.py: the
tests walk the table. Files: neural (over relaxed_sort), smooth_rank, pairwise, listwise, pointwise; informative has the rules
which lists count, spec what a line of the table says.
"""

from collections.abc import Callable

from torch import Tensor

from rankgrad.losses.informative import has_document, has_error, has_match, has_pair, has_relevant
from rankgrad.losses.listwise import listmle, listnet, query_rmse, softmax, xe_ndcg
from rankgrad.losses.neural import (
    neural_err,
    neural_map,
    neural_mrr,
    neural_ndcg,
    neural_ndcg_transposed,
    neural_precision,
)
from rankgrad.losses.pairwise import lambdarank, ndcg_loss1, ndcg_loss2, ndcg_loss2pp, ranknet
from rankgrad.losses.pointwise import bce, logits_of_levels, ordinal, rmse
from rankgrad.losses.smooth_rank import approx_ndcg, soft_rank
from rankgrad.losses.spec import LossSpec

LOSS_TABLE = (
    LossSpec(neural_ndcg, counts=has_relevant, tanh=True, gain=True),
    LossSpec(neural_ndcg_transposed, counts=has_relevant, tanh=True, gain=True),
    LossSpec(approx_ndcg, counts=has_relevant, gain=True),
    LossSpec(listnet, counts=has_relevant, weights=True),
    LossSpec(listmle, counts=has_relevant, weights=True),
    LossSpec(ranknet, counts=has_pair, weights=True),
    LossSpec(lambdarank, counts=has_pair, gain=True, weights=True),
    LossSpec(ndcg_loss1, counts=has_pair, gain=True, weights=True),
    LossSpec(ndcg_loss2, counts=has_pair, gain=True, weights=True),
    LossSpec(ndcg_loss2pp, counts=has_pair, gain=True, weights=True),
    LossSpec(rmse, counts=has_document, weights=True),
    LossSpec(ordinal, counts=has_document, units=logits_of_levels, weights=True),
    LossSpec(bce, counts=has_document, weights=True),
    LossSpec(softmax, counts=has_relevant, weights=True),
    LossSpec(xe_ndcg, counts=has_relevant, gain=True, weights=True),
    LossSpec(soft_rank, counts=has_relevant, gain=True),
    LossSpec(neural_map, counts=has_match, tanh=True),
    LossSpec(neural_mrr, counts=has_match, tanh=True),
    LossSpec(neural_err, counts=has_relevant, tanh=True),
    LossSpec(neural_precision, counts=has_match, tanh=True),
    LossSpec(query_rmse, counts=has_error, unit="document", curvature=2.0, weights=True),
)

LOSSES: dict[str, Callable[..., Tensor]] = {spec.name: spec.function for spec in LOSS_TABLE}

# A literal: type checkers read it.
__all__ = [
    "LOSSES",
    "LOSS_TABLE",
    "LossSpec",
    "approx_ndcg",
    "bce",
    "lambdarank",
    "listmle",
    "listnet",
    "ndcg_loss1",
    "ndcg_loss2",
    "ndcg_loss2pp",
    "neural_err",
    "neural_map",
    "neural_mrr",
    "neural_ndcg",
    "neural_ndcg_transposed",
    "neural_precision",
    "ordinal",
    "query_rmse",
    "ranknet",
    "rmse",
    "soft_rank",
    "softmax",
    "xe_ndcg",
]
