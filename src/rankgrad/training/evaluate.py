"""Scoring lists with a model, and measuring how good given scores are.

Per-query values are kept with NaN at empty queries (nothing relevant), so that every rule for those can be applied later:
`summarise` gives all three. Models score without dropout and in float32, however they are trained; scores that are not
finite are an error, because a ranking by them would be a plausible wrong number.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.core.gains import LARGEST_LABEL, Gain, checked_table, is_table
from rankgrad.data.batches import Batch, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import rows_at_once
from rankgrad.metrics import Metric, parse_metric
from rankgrad.models import ranking_scores
from rankgrad.training.config import Config

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
    try:
        for batch in _all_lists(dataset, device, rank, world):
            with torch.no_grad():
                output = model(batch.features, batch.mask)
                scores = ranking_scores(output.float(), 1 if output.dim() == 2 else output.shape[-1])
            yield batch, scores
    finally:
        model.train(training)


def score(model: nn.Module, dataset: RankingDataset, *, device: torch.device) -> np.ndarray:
    """One score per document, in the dataset's order, [N] float32."""
    scores = np.empty(len(dataset.labels), dtype=np.float32)
    for _ in _kept(scored(model, dataset, device=device), dataset, scores):
        pass
    return scores


def _kept(
    lists: Iterator[tuple[Batch, Tensor]], dataset: RankingDataset, scores: np.ndarray
) -> Iterator[tuple[Batch, Tensor]]:
    """The same batches, their scores written down in the dataset's order, [N], on the way."""
    for batch, values in lists:
        documents, mask = _documents(batch, dataset)
        scores[documents[mask]] = values.cpu().numpy()[mask]
        yield batch, values


def evaluate(
    model: nn.Module,
    dataset: RankingDataset,
    metrics: Sequence[str | Metric],
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> dict[str, np.ndarray]:
    """By name the per-query values of each metric, [Q] float64, NaN at empty queries.

    Of `world` processes each evaluates its share of the lists, and all of them get all values.
    """
    return _measured(scored(model, dataset, device=device, rank=rank, world=world), dataset, metrics, device, world)


def evaluate_and_score(
    model: nn.Module,
    dataset: RankingDataset,
    metrics: Sequence[str | Metric],
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What `evaluate` gives, and the scores it measured: one per document, in the dataset's order, [N] float32."""
    scores = np.zeros(len(dataset.labels), dtype=np.float32)
    lists = _kept(scored(model, dataset, device=device, rank=rank, world=world), dataset, scores)
    values = _measured(lists, dataset, metrics, device, world)
    if world > 1:
        everyones = torch.from_numpy(scores).to(device)
        dist.all_reduce(everyones)  # a query is one process's alone: all others add 0
        scores = everyones.cpu().numpy()
    return values, scores


def measure(scores: np.ndarray, dataset: RankingDataset, metrics: Sequence[str | Metric]) -> dict[str, np.ndarray]:
    """Per-query values of each metric for scores [N] in the dataset's order, [Q] float64, NaN at empty queries."""
    scores = np.asarray(scores)
    if scores.shape != dataset.labels.shape:
        raise ValueError(f"scores have shape {scores.shape}; expected one for each of {len(dataset.labels)} documents")

    unseen = np.zeros((len(scores), 1), np.float32)
    lists = dataclasses.replace(dataset, features=unseen, feature_names=None, categories={})

    def given() -> Iterator[tuple[Batch, Tensor]]:
        for batch in _all_lists(lists, device):
            documents, mask = _documents(batch, dataset)
            yield batch, torch.from_numpy(np.where(mask, scores[np.where(mask, documents, 0)], 0).astype(np.float64))

    device = torch.device("cpu")
    return _measured(given(), dataset, metrics, device)


def _measured(
    lists: Iterator[tuple[Batch, Tensor]],
    dataset: RankingDataset,
    metrics: Sequence[str | Metric],
    device: torch.device,
    world: int = 1,
) -> dict[str, np.ndarray]:
    functions = [parse_metric(name) for name in metrics]
    expect_grades(dataset, functions)
    values = torch.zeros(len(metrics), len(dataset), dtype=torch.float64, device=device)
    broken = torch.zeros(len(dataset), dtype=torch.float64, device=device)
    for batch, scores in lists:
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
    return dict(zip((function.name for function in functions), values.cpu().numpy()))


def _all_lists(dataset: RankingDataset, device: torch.device, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    return iter(
        batches(
            dataset,
            (ON_A_GPU if device.type == "cuda" else 1) * LISTS_AT_ONCE,
            list_size=None,
            shuffle=False,
            device=device,
            rank=rank,
            world=world,
            max_documents=rows_at_once(dataset.features, DOCUMENTS_AT_ONCE),
        )
    )


def _documents(batch: Batch, dataset: RankingDataset) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a batch at full length stand in the dataset, and the mask, both [B, L]."""
    queries, place = batch.queries.cpu().numpy(), np.arange(batch.mask.shape[1])
    return dataset.offsets[queries, None] + place, place < dataset.lengths[queries, None]


def metrics_of(config: Config, names: Sequence[str]) -> list[Metric]:
    """Metrics by name, with what a label is worth by a configuration."""
    return [parse_metric(name, config.data.gain) for name in names]


def metric_that_chooses(config: Config, own: Metric | None = None) -> Metric:
    """What picks the best epoch: the caller's own, or that of the configuration."""
    return own or parse_metric(config.train.metric, config.data.gain)


def expect_grades(dataset: RankingDataset, metrics: Sequence[str | Metric]) -> None:
    """Refuse labels that a metric has no gain for: such a query would look like an empty one."""
    for metric in map(parse_metric, metrics):
        if metric.takes_gain:
            expect_gains(dataset, metric.name, ", or choose a metric without gains, such as map", gain=metric.gain)


def expect_gains(dataset: RankingDataset, of: str, remedy: str = "", *, gain: Gain = "exp2") -> None:
    """Refuse labels whose gain overflows, or that a table has no gain for; `of` says what takes it, `remedy` what else may be done."""
    labels = dataset.labels
    if is_table(gain):
        entries = len(checked_table(gain))
        bad = (labels != np.rint(labels)) | (labels >= entries)
        why, expected = "has no gain", f"the grades 0 to {entries - 1} that the gain has entries for"
    elif gain == "exp2":
        bad = labels > LARGEST_LABEL
        why = "is too large"
        expected = f"grades of relevance such as 0 to 4, {LARGEST_LABEL} at most"
    else:
        return
    if bad.any():
        place = int(np.where(bad, labels, -1).argmax())
        query = dataset.query_ids[np.searchsorted(dataset.offsets, place, side="right") - 1]
        because = f": its gain 2^{labels[place]:g} - 1 overflows" if why == "is too large" else ""
        raise ValueError(
            f"label {labels[place]:g} of query {query} {why} for {of}{because}; expected {expected}; map your labels to "
            f"grades{remedy}"
        )


def can_choose(dataset: RankingDataset, metric: str | Metric) -> bool:
    """Whether a metric can tell one ranking of these lists from another: not if all queries are empty to it."""
    (values,) = measure(np.zeros(len(dataset.labels)), dataset, [metric]).values()
    return not np.isnan(values).all()


def summarise(values: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """The mean of each metric under each rule for empty queries: counted 1, counted 0, left out.

    >>> summarise({"map": np.array([0.5, np.nan])})["map"]
    {'empty=1': 0.75, 'empty=0': 0.25, 'skipped': 0.5}
    """
    return {name: {rule: mean(value, empty) for rule, empty in RULES.items()} for name, value in values.items()}


def mean(values: np.ndarray, empty: float, weights: np.ndarray | None = None) -> float:
    """The mean over queries, by their weights, with NaN counted as `empty`; NaN leaves them out."""
    if not np.isnan(empty):
        values = np.where(np.isnan(values), empty, values)
    known = ~np.isnan(values)
    if not known.any():
        return float("nan")
    return float(values[known].mean() if weights is None else np.average(values[known], weights=weights[known]))
