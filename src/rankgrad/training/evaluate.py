"""Scoring lists with a model, and judging the scores. Room 5: imports data, mathematics and models.

Per-query values are kept with NaN at empty queries (nothing relevant), so that every rule for those can be applied later:
`summarise` gives all three. Models score without dropout and in float32, however they are trained; scores that are not
finite are an error, because a ranking by them would be a plausible wrong number.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.core.gains import LARGEST_LABEL
from rankgrad.data.batches import Batch, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.metrics import parse_metric
from rankgrad.models import ranking_scores

LISTS_AT_ONCE = 256
DOCUMENTS_AT_ONCE = 2**16
ON_A_GPU = 8  # times as many lists: fewer launches; as many documents, because longer batches pad more
RULES = {"empty=1": 1.0, "empty=0": 0.0, "skipped": np.nan}


def scored(
    model: nn.Module, dataset: RankingDataset, *, device: torch.device, rank: int = 0, world: int = 1
) -> Iterator[tuple[Batch, Tensor]]:
    """Every query once at full length, lists of similar length together: batches and their scores [B, L]."""
    training = model.training
    model.eval()
    more = ON_A_GPU if device.type == "cuda" else 1
    lists = batches(
        dataset,
        more * LISTS_AT_ONCE,
        list_size=None,
        shuffle=False,
        device=device,
        rank=rank,
        world=world,
        max_documents=DOCUMENTS_AT_ONCE,
    )
    try:
        for batch in lists:
            with torch.no_grad():
                output = model(batch.features, batch.mask)
                scores = ranking_scores(output.float(), 1 if output.dim() == 2 else output.shape[-1])
            yield batch, scores
    finally:
        model.train(training)


def score(model: nn.Module, dataset: RankingDataset, *, device: torch.device) -> np.ndarray:
    """One score per document, in the dataset's order, [N] float32."""
    scores = np.empty(len(dataset.labels), dtype=np.float32)
    first, lengths = dataset.offsets[:-1], dataset.lengths
    for batch, values in scored(model, dataset, device=device):
        queries = batch.queries.cpu().numpy()
        place = np.arange(batch.mask.shape[1])
        mask = place < lengths[queries, None]
        scores[(first[queries, None] + place)[mask]] = values.cpu().numpy()[mask]
    return scores


def evaluate(
    model: nn.Module,
    dataset: RankingDataset,
    metrics: Sequence[str],
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> dict[str, np.ndarray]:
    """Per-query values of each metric, [Q] float64, NaN at empty queries.

    Of `world` processes each judges its share of the lists, and all of them get all values.
    """
    functions = [parse_metric(name) for name in metrics]
    expect_grades(dataset, metrics)
    values = torch.zeros(len(metrics), len(dataset), dtype=torch.float64, device=device)
    broken = torch.zeros(len(dataset), dtype=torch.float64, device=device)
    for batch, scores in scored(model, dataset, device=device, rank=rank, world=world):
        broken[batch.queries] = (batch.mask & ~scores.isfinite()).any(-1).double()
        for row, function in zip(values, functions):
            row[batch.queries] = function(scores.double(), batch.labels, batch.mask, empty=np.nan, check=False)
    if world > 1:
        dist.all_reduce(values)  # a query is one process's alone: all others add 0
        dist.all_reduce(broken)
    bad = np.flatnonzero(broken.cpu().numpy())
    if len(bad):
        others = f", nor are those of {len(bad) - 1} more queries" if len(bad) > 1 else ""
        raise ValueError(
            f"the scores of query {dataset.query_ids[bad[0]]} are not finite{others}; "
            "expected finite scores; look at the features there, or train again with a lower learning rate"
        )
    return dict(zip(metrics, values.cpu().numpy()))


def expect_grades(dataset: RankingDataset, metrics: Sequence[str]) -> None:
    """Refuse labels that a metric has no gain for: such a query would look like an empty one."""
    for name in metrics:
        if name.partition("@")[0] in ("ndcg", "dcg"):
            expect_gains(dataset, name, ", or choose a metric without gains, such as map")


def expect_gains(dataset: RankingDataset, of: str, mend: str = "") -> None:
    """Refuse labels whose gain is beyond all numbers; `of` says what takes it, `mend` what else may be done."""
    if dataset.labels.max() > LARGEST_LABEL:
        place = int(dataset.labels.argmax())
        query = dataset.query_ids[np.searchsorted(dataset.offsets, place, side="right") - 1]
        raise ValueError(
            f"a label of query {query} is {dataset.labels[place]:g}, and its gain 2^label - 1, of which {of} is made, is no "
            f"number; expected grades of relevance such as 0 to 4, {LARGEST_LABEL} at most; map your labels to grades{mend}"
        )


def decides(dataset: RankingDataset, metric: str) -> bool:
    """Whether a metric can tell one ranking of these lists from another: not if all queries are empty to it."""
    return not np.isnan(judge(np.zeros(len(dataset.labels)), dataset, [metric])[metric]).all()


def judge(scores: np.ndarray, dataset: RankingDataset, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Per-query values of each metric for scores [N] in the dataset's order, [Q] float64, NaN at empty queries."""
    scores = np.asarray(scores)
    if scores.shape != dataset.labels.shape:
        raise ValueError(f"scores have shape {scores.shape}; expected one for each of {len(dataset.labels)} documents")
    given = RankingDataset(_places(scores, dataset)[:, None], dataset.labels, dataset.offsets, dataset.query_ids)
    return evaluate(_FirstFeature(), given, metrics, device=torch.device("cpu"))


def summarise(values: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """The mean of each metric under each rule for empty queries: counted 1, counted 0, left out.

    >>> summarise({"map": np.array([0.5, np.nan])})["map"]
    {'empty=1': 0.75, 'empty=0': 0.25, 'skipped': 0.5}
    """
    return {name: {rule: mean(value, empty) for rule, empty in RULES.items()} for name, value in values.items()}


def mean(values: np.ndarray, empty: float) -> float:
    """The mean over queries with NaN counted as `empty`; NaN leaves them out."""
    if not np.isnan(empty):
        return float(np.where(np.isnan(values), empty, values).mean())
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _places(scores: np.ndarray, dataset: RankingDataset) -> np.ndarray:
    """Each score's place among those of its list from worst to best, equal ones together: float32 holds it exactly."""
    if not np.isfinite(scores).all():
        return scores.astype(np.float32)  # to be refused where lists are judged
    query = np.repeat(np.arange(len(dataset)), dataset.lengths)
    order = np.lexsort((scores, query))
    ranked = scores[order]
    rises = (ranked[1:] > ranked[:-1]) & (query[1:] == query[:-1])
    climbed = np.concatenate([[0], np.cumsum(rises)])
    places = np.empty(len(scores), np.float32)
    places[order] = climbed - climbed[dataset.offsets[:-1]][query]
    return places


class _FirstFeature(nn.Module):
    """A "model" whose score is the first feature: lets given scores take the same path as a model's."""

    def forward(self, features: Tensor, mask: Any) -> Tensor:  # noqa: ARG002 (the call every model has)
        return features[..., 0]
