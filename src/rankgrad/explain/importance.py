"""Permutation importance: what a metric loses where the values of a feature are dealt out anew.

Nothing depends on a random stream: where the value of a document goes is a function of (seed, feature, repeat, query id, place
in the list).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rankgrad.checks import one_of, whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import GAMMA, mix, random_keys
from rankgrad.explain.groups import correlated_groups
from rankgrad.metrics import Metric, parse_metric
from rankgrad.ranker import Ranker
from rankgrad.runs.compare import with_interval
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.run import Run
from rankgrad.runs.trees import TreeRun
from rankgrad.training.data import scaled
from rankgrad.training.evaluate import measure, score

WAYS = ("within", "across")

Scores = Callable[[RankingDataset], np.ndarray]
Scorer = Ranker | Run | TreeRun | Ensemble | Scores


@dataclass(frozen=True)
class Importance:
    """What the metric loses without a feature, or a group of them: the mean over queries and its 95 % bootstrap interval."""

    features: tuple[str, ...]
    loss: float
    low: float
    high: float


def feature_importances(
    ranker: Scorer,
    data: RankingDataset,
    *,
    metric: str | Metric = "ndcg@10",
    permute: str = "within",
    correlated: float | None = None,
    repeats: int = 5,
    seed: int = 0,
) -> list[Importance]:
    """What a metric loses where a feature is permuted, the largest loss first.

    - `ranker`: a `rankgrad.Ranker`, a run, several as one, or a function that gives the scores [N] of a dataset.
    - `data`: lists with labels, of queries it has not learned from.
    - `metric`: whose mean over queries with a relevant document is looked at: a name, or what `parse_metric` gives.
    - `permute`: "within" deals the values out anew among the documents of a list: what the feature says about their order.
      "across" deals them out among all documents: what it says about the query too.
    - `correlated`: None takes each feature by itself; a number permutes those together that are correlated by at least so much
      within lists (`correlated_groups`): of two that say the same, neither is missed alone.
    - `repeats`: how many times a feature is permuted; a query's loss is the mean over them.
    - `seed`: of the permutations.

    >>> x = np.random.default_rng(0).normal(size=(60, 3))
    >>> lists = RankingDataset(x, labels=x[:, 1] > 0.5, offsets=np.arange(0, 61, 10), query_ids=np.arange(6))
    >>> first, second, third = feature_importances(lambda lists: lists.features[:, 1], lists)
    >>> first.features, first.low > 0, second.loss
    (('feature 2',), True, 0.0)
    """
    groups = [[c] for c in range(data.features.shape[1])] if correlated is None else correlated_groups(data, correlated)
    found = list(importances(prepare(ranker, data, metric), groups, permute, repeats=repeats, seed=seed))
    return sorted(found, key=lambda importance: -importance.loss)


class Prepared(NamedTuple):
    """Lists as they are scored again and again, and how good their ranking is as they are."""

    data: RankingDataset
    sources: np.ndarray  # the feature that each column of the data follows from
    score: Scores
    metric: Metric
    values: np.ndarray  # of the metric, [Q], NaN at empty queries
    names: tuple[str, ...]  # of the features


def prepare(ranker: Scorer, data: RankingDataset, metric: str | Metric) -> Prepared:
    """Score the lists as they are; features of networks are scaled once and for all, which is a function of single values."""
    ranker = ranker.ranker if isinstance(ranker, Run) else ranker
    metric = parse_metric(metric)
    width = data.features.shape[1]
    names = data.feature_names or tuple(f"feature {column + 1}" for column in range(width))
    sources, lists = np.arange(width), data
    scores: Scores
    if isinstance(ranker, Ranker):
        model, device, scaling = ranker.model, ranker.device, ranker.scaling
        lists = replace(scaled(data, scaling), feature_names=None)
        sources = np.concatenate([sources, scaling.indicators])

        def scores(lists: RankingDataset) -> np.ndarray:
            return score(model, lists, device=device)
    elif isinstance(ranker, TreeRun | Ensemble):
        scores = ranker.score
    elif callable(ranker):
        scores = ranker
    else:
        raise ValueError(
            f"cannot score with {type(ranker).__name__}; expected a Ranker, a run, or a function of a dataset; of a NeuralRanker "
            "pass its ranker_"
        )
    values = measure(scores(lists), lists, [metric])[metric.name]
    if np.isnan(values).all():
        raise ValueError(
            f"no query has a relevant document, so that {metric.name} has nothing to lose; expected labels above 0; take other lists"
        )
    return Prepared(lists, sources, scores, metric, values, names)


def importances(
    prepared: Prepared, groups: Sequence[Sequence[int]], permute: str = "within", *, repeats: int = 5, seed: int = 0
) -> Iterator[Importance]:
    """The importance of each group of features, one after the other."""
    one_of("permute", permute, WAYS)
    whole("repeats", repeats, 1)
    data, metric = prepared.data, prepared.metric
    features = np.array(data.features[:])  # changed and put back
    for group in groups:
        columns = np.flatnonzero(np.isin(prepared.sources, group))
        before = features[:, columns]  # a copy
        losses = np.zeros(len(data))
        for repeat in range(repeats):
            moved = before[permutation(data, permute, whole("seed", seed), group[0], repeat)]
            if np.array_equal(moved, before, equal_nan=True):
                continue  # constant within lists: nothing is lost, to the last bit
            features[:, columns] = moved
            lists = replace(data, features=features)  # a new one: a dataset keeps what it has moved to a GPU
            losses += (prepared.values - measure(prepared.score(lists), lists, [metric])[metric.name]) / repeats
        features[:, columns] = before
        found = with_interval(np.where(np.isnan(prepared.values), np.nan, losses), np.nan)
        names = tuple(prepared.names[feature] for feature in group)
        yield Importance(names, found["mean"], found["low"], found["high"])


def permutation(data: RankingDataset, permute: str, *numbers: int) -> np.ndarray:
    """Which document's value each document gets, [N]: one of its own list, or any.

    >>> lists = RankingDataset(np.zeros((5, 1)), np.zeros(5), [0, 2, 5], [7, 9])
    >>> sorted(permutation(lists, "within", 0, 1)[:2].tolist()), sorted(permutation(lists, "across", 0, 1).tolist())
    ([0, 1], [0, 1, 2, 3, 4])
    """
    which = np.repeat(np.arange(len(data)), data.lengths)
    place = np.arange(len(which)) - data.offsets[which]
    keys = mix(random_keys(data.query_ids, *numbers)[which] + place * GAMMA)
    return np.argsort(keys, kind="stable") if permute == "across" else np.lexsort((keys, which))
