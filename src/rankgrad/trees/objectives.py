"""Our losses as objectives of LightGBM and XGBoost: in each round a gradient and a second derivative per document."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankgrad.checks import one_of
from rankgrad.losses import LossSpec
from rankgrad.training.build import as_spec, make_objectives, parse_loss
from rankgrad.training.config import Config, Loss
from rankgrad.training.step import Objective

FLOOR = 1e-3  # least second derivative: at 0 a leaf's step g / h would be infinite, or the libraries refuse to split
PAIRS = 2**18  # lists x longest^2 of a chunk: what a loss over pairs of documents makes at once stays in the cache
HESSIANS = ("auto", "abs", "one")

Curvature = Callable[[Tensor, Tensor, Tensor], Tensor]  # scores, labels, mask [B, L] -> [B, L]
TreeObjective = Callable[..., tuple[np.ndarray, np.ndarray]]


class Chunk(NamedTuple):
    """Lists of similar length, padded: rows of their documents (0 under the padding) and mask, [B, L]; their numbers [B]."""

    rows: Tensor
    mask: Tensor
    lists: np.ndarray


def objective(
    loss: str | LossSpec | Callable[..., Tensor],
    sizes: Any = None,
    hessian: str | Curvature = "auto",
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> TreeObjective:
    """A loss as `lightgbm.train({"objective": f}, ...)` and `xgboost.train(..., obj=f)` take it: f(preds, dataset) -> (g, h).

    g_i = d/ds_i (sum of the loss over lists), by autograd in float64; h_i is how far from flat the loss is taken to be, so
    that a leaf moves its documents by -sum g / sum h.

    - `loss`: a name of `LOSSES`, "neural_ndcg@10" for a cut-off; a `LossSpec`; or a function like every loss here.
    - `sizes`: documents of each list. None: the groups of the dataset, or those that LGBMRanker(objective=f) passes on.
    - `hessian`: "abs" is |g| + 0.001: every leaf moves by about the learning rate, however flat the loss is there. "one" is 1.
      "auto" is "abs", or the second derivative of a loss where that is a constant (query_rmse). A function of scores,
      labels and mask, [B, L] each, gives its own. Never below 0.001.
    - `options`: of the loss, such as tau=0.5. Losses through a relaxed sort take one round of Sinkhorn unless told otherwise.

    Lists that the loss cannot learn from have g = 0 and h = 0.001. Weights of the dataset multiply g and h.

    >>> f = objective("query_rmse", sizes=[2])
    >>> f(np.array([0.0, 2.0]), np.array([0.0, 0.0]))  # labels first, as scikit-learn's wrappers call it
    (array([ 2., -2.]), array([2., 2.]))
    """
    if isinstance(loss, str):
        name, (spec, _) = loss, parse_loss(loss)
    else:
        spec = as_spec(loss)
        name = spec.name
    if spec.units(2) > 1:
        raise ValueError(
            f"the loss {spec.name} needs several outputs per document, and trees have one; choose another loss"
        )
    if not callable(hessian):
        one_of("hessian", hessian, HESSIANS)
    if "sinkhorn_iters" in spec.parameters:  # more change nothing in how well trees rank, and take most of the time
        options = {"sinkhorn_iters": 1} | options
    own = None if isinstance(loss, str) else loss
    value = make_objectives(Config(loss=Loss(name, options)), own)[name]
    random = torch.Generator().manual_seed(0) if generator is None else generator
    given = None if sizes is None else _whole_sizes(sizes)
    planned: dict[bytes, list[Chunk]] = {}  # of the last sizes: they are the same in every round

    def tree_objective(
        preds: Any, dataset: Any, sample_weight: Any = None, group: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if hasattr(dataset, "get_label"):
            scores, labels = np.asarray(preds, np.float64), np.asarray(dataset.get_label(), np.float64)
            weight, lengths = dataset.get_weight(), _groups(dataset) if given is None else given
        else:  # scikit-learn's wrappers give labels, then predictions
            scores, labels = np.asarray(dataset, np.float64), np.asarray(preds, np.float64)
            weight, lengths = sample_weight, group if given is None else given
        lengths = _expect_sizes(lengths, len(scores))
        key = lengths.tobytes()
        if key not in planned:
            planned.clear()
            planned[key] = _chunks(lengths)
        first, second = _derivatives(value, spec, hessian, planned[key], scores, labels, random)
        weights = _weights(weight, lengths, len(scores))
        return first * weights, np.maximum(second * weights, FLOOR)

    return tree_objective


def _derivatives(
    value: Objective,
    spec: LossSpec,
    hessian: str | Curvature,
    chunks: list[Chunk],
    scores: np.ndarray,
    labels: np.ndarray,
    generator: torch.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    first, second = (
        torch.zeros(len(scores), dtype=torch.float64),
        torch.full((len(scores),), FLOOR, dtype=torch.float64),
    )
    all_scores, all_labels = torch.from_numpy(scores), torch.from_numpy(labels)
    for rows, mask, lists in chunks:
        s, y = all_scores[rows].requires_grad_(), all_labels[rows]
        with torch.enable_grad():
            (g,) = torch.autograd.grad(value.values(s, y, mask, generator).sum(), s)
        h = _second(hessian, spec, g, s.detach(), y, mask)
        h = torch.where(value.counts(y, mask)[:, None], h, FLOOR)
        bad = (mask & ~(g.isfinite() & h.isfinite())).any(-1)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            where = rows[at][mask[at]]
            raise ValueError(
                f"the derivatives of {spec.name} for query {lists[at]} (counted from 0; rows {where[0]} to {where[-1]}) are not "
                "finite; expected finite scores, and labels that are finite and 0 or above; look at its labels, or lower the "
                "learning rate"
            )
        first[rows[mask]], second[rows[mask]] = g[mask], h[mask]
    return first.numpy(), second.numpy()


def _second(
    hessian: str | Curvature, spec: LossSpec, g: Tensor, scores: Tensor, labels: Tensor, mask: Tensor
) -> Tensor:
    if callable(hessian):
        return hessian(scores, labels, mask).detach().double()
    if hessian == "one":
        return torch.ones_like(g)
    if hessian == "auto" and spec.curvature is not None:
        return torch.full_like(g, spec.curvature)
    return g.abs() + FLOOR


def _chunks(lengths: np.ndarray) -> list[Chunk]:
    """Lists by length, as many at a time as `PAIRS` allows; lists without documents are left out."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    chunks, start = [], 0
    while start < len(order):
        longest = int(lengths[order[start]])
        lists = order[start : start + max(1, PAIRS // longest**2)]
        place = np.arange(longest)
        mask = place < lengths[lists, None]
        rows = np.where(mask, offsets[lists, None] + place, 0)
        chunks.append(Chunk(torch.from_numpy(rows), torch.from_numpy(mask), lists))
        start += len(lists)
    return chunks


def _groups(dataset: Any) -> Any:
    """Documents of each list, as a LightGBM Dataset or an XGBoost DMatrix has them; None if it has none."""
    if hasattr(dataset, "get_group"):
        return dataset.get_group()
    ends = dataset.get_uint_info("group_ptr")
    return np.diff(ends.astype(np.int64)) if len(ends) else None


def _expect_sizes(lengths: Any, documents: int) -> np.ndarray:
    if lengths is None:
        raise ValueError(
            "the dataset has no groups; expected to know which documents are of one query; give it group= (LightGBM) or qid= "
            "(XGBoost), or give objective(..., sizes=)"
        )
    lengths = _whole_sizes(lengths)
    if lengths.sum() != documents:
        raise ValueError(
            f"the sizes of the lists sum to {lengths.sum()} and there are {documents} documents; expected a size for each list of "
            "the training set; give the sizes of the data that is trained on"
        )
    return lengths


def _whole_sizes(sizes: Any) -> np.ndarray:
    lengths = np.asarray(sizes)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise ValueError(f"sizes must be whole numbers, the documents of each list, got {sizes!r}")
    return lengths.astype(np.int64)


def _weights(weight: Any, lengths: np.ndarray, documents: int) -> np.ndarray | float:
    """One per document; XGBoost holds one per list."""
    if weight is None or not len(weight):
        return 1.0
    weights = np.asarray(weight, np.float64)
    return weights if len(weights) == documents else np.repeat(weights, lengths)
