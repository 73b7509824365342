"""Importances and attributions of finished runs on data: computing them, and the file in a run's folder that a report shows."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankgrad.checks import whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import random_keys
from rankgrad.explain.attribution import Attribution, Contribution, attributions
from rankgrad.explain.groups import THRESHOLD, correlated_groups
from rankgrad.explain.importance import Importance, importances, prepare
from rankgrad.metrics import parse_metric
from rankgrad.ranker import Ranker
from rankgrad.runs.ensemble import Ensemble, Network
from rankgrad.runs.folder import EXPLANATION, read_sealed, write_sealed
from rankgrad.runs.run import Run

TREES = "trees have no gradients to attribute a score by; importances are theirs too"


class Permuted(NamedTuple):
    """An event of `explain_runs`: so many of all importances are known."""

    done: int
    of: int


@dataclass(frozen=True)
class Missed:
    """What the metric loses without a feature, or a group of them: permuted within lists, and across them."""

    features: tuple[str, ...]
    within: Importance
    across: Importance


@dataclass(frozen=True)
class Explained:
    """Why a document of a query has its score, against its list's mean, or against another document ("" if none)."""

    query: str
    document: str
    against: str
    place: int  # in the ranking, from 1
    against_place: int  # 0 if none
    attribution: Attribution


@dataclass(frozen=True)
class Explanation:
    """What a ranking of lists rests on; the features and groups that are missed most come first."""

    data: str
    split: str
    metric: str
    value: float  # of the metric, over the queries with a relevant document
    queries: int  # with one
    repeats: int
    seed: int
    correlated: float
    features: tuple[Missed, ...]
    groups: tuple[Missed, ...]  # of two features or more
    examples: tuple[Explained, ...]
    note: str  # why there is no example


def explain_runs(
    folders: Sequence[Path],
    source: str,
    *,
    split: str = "test",
    metric: str | None = None,
    queries: int = 1_000,
    repeats: int = 3,
    seed: int = 0,
    correlated: float = THRESHOLD,
    query: str | None = None,
    document: str | None = None,
    above: str | None = None,
    networks: Sequence[Network] = (),
) -> Iterator[Permuted | Explanation]:
    """Explain a run, or several together, on data: progress, and at the end the explanation, which a single run's folder keeps.

    - `folders`, `source`, `split`: as in `evaluate`.
    - `metric`: that of the first run's validation if none is named.
    - `queries`: at most so many are permuted, chosen by seed and query id.
    - `repeats`, `seed`, `correlated`: as in `feature_importances`.
    - `query`, `document`, `above`: what is to be explained: a query id, and one or two of its documents, by id, or by row of the
      source counted from 1. By default the query ranked worst, its first document, and that above the best of the others.
    - `networks`: those of one's own that the runs were trained with.
    """
    whole("queries", queries, 1)
    if above is not None and document is None:
        raise ValueError(
            f"--above {above} was given without --document; expected the document that stands above it too"
        )
    ensemble = Ensemble.open(folders, networks)
    config = ensemble.runs[0].config
    ranker: Any = ensemble if len(folders) > 1 else ensemble.runs[0]
    rankers = [run.ranker for run in ensemble.runs if isinstance(run, Run)]
    asked = query is not None or document is not None
    if asked and len(rankers) < len(ensemble.runs):
        raise ValueError(f"{TREES}; expected runs of networks; leave --query and --document out")
    lists = ranker.read(source, split=split, document=config.data.document)
    chosen = _sample(lists, queries, seed)
    prepared = prepare(ranker, chosen, parse_metric(metric or config.train.metric, config.data.gain))
    examples: tuple[Explained, ...] = ()
    if len(rankers) == len(ensemble.runs):
        where = lists if asked else chosen
        examples = tuple(
            _explained(rankers, where, ranker.score(where), _asked(where, prepared.values, query, document), above)
        )
    alone = [[column] for column in range(chosen.features.shape[1])]
    together = [group for group in correlated_groups(chosen, correlated) if len(group) > 1]
    found: dict[str, list[Importance]] = {"within": [], "across": []}
    of = 2 * len(alone + together)
    for way, known in found.items():
        for one in importances(prepared, alone + together, way, repeats=repeats, seed=seed):
            known.append(one)
            yield Permuted(sum(map(len, found.values())), of)
    missed = [Missed(within.features, within, across) for within, across in zip(*found.values())]
    countable = prepared.values[~np.isnan(prepared.values)]
    explanation = Explanation(
        data=source,
        split=split,
        metric=prepared.metric.name,
        value=float(countable.mean()),
        queries=len(countable),
        repeats=repeats,
        seed=seed,
        correlated=float(correlated),
        features=_most_first(missed[: len(alone)]),
        groups=_most_first(missed[len(alone) :]),
        examples=examples,
        note="" if examples else TREES,
    )
    if len(folders) == 1 and folders[0].is_dir():
        write_sealed(folders[0], EXPLANATION, dataclasses.asdict(explanation))
    yield explanation


def _sample(lists: RankingDataset, queries: int, seed: int) -> RankingDataset:
    """At most so many queries that have a relevant document, in their order; all lists if none has."""
    countable = np.flatnonzero(np.maximum.reduceat(lists.labels, lists.offsets[:-1]) > 0)
    if len(countable) <= queries:
        return lists
    order = np.argsort(random_keys(lists.query_ids[countable], seed), kind="stable")
    return lists.select(np.sort(countable[order[:queries]]))


def _most_first(missed: Sequence[Missed]) -> tuple[Missed, ...]:
    return tuple(sorted(missed, key=lambda one: (-one.within.loss, -one.across.loss)))


# --- one document, or two ---------------------------------------------------------------------------------------------


def _asked(
    lists: RankingDataset, values: np.ndarray, query: str | None, document: str | None
) -> tuple[int, int | None]:
    """The list to explain and, where it was named, the document in the dataset; by default the list of the least value [Q]."""
    if document is None:
        return (int(np.nanargmin(values)) if query is None else _query(lists, query)), None
    place = _place(lists, document, query, "--document")
    return int(np.searchsorted(lists.offsets, place, side="right")) - 1, place


def _explained(
    rankers: Sequence[Ranker],
    lists: RankingDataset,
    scores: np.ndarray,
    asked: tuple[int, int | None],
    above: str | None,
) -> Iterator[Explained]:
    """A document against its list's mean and, where the list has another, above that."""
    number, place = asked
    query, names = str(lists.query_ids[number]), _names(lists)
    first, end = int(lists.offsets[number]), int(lists.offsets[number + 1])
    ranked = (first + np.argsort(-scores[first:end], kind="stable")).tolist()
    one = ranked[0] if place is None else place
    yield Explained(query, names[one], "", ranked.index(one) + 1, 0, attributions(rankers, lists, one))
    others = [at for at in ranked if at != one]
    if above is not None:
        other = _place(lists, above, query, "--above")
    elif others:
        other = max(others, key=lambda at: lists.labels[at])  # the first ranked of several
    else:
        return
    found = attributions(rankers, lists, one, other)
    yield Explained(query, names[one], names[other], ranked.index(one) + 1, ranked.index(other) + 1, found)


def _names(lists: RankingDataset) -> list[str]:
    return list(map(str, lists.document_names().tolist()))


def _query(lists: RankingDataset, query: str) -> int:
    found = [at for at, own in enumerate(lists.query_ids.tolist()) if str(own) == query]
    if not found:
        raise ValueError(
            f"the lists have no query {query!r}; expected the id of one, such as {str(lists.query_ids[0])!r}; choose with --query"
        )
    return found[0]


def _place(lists: RankingDataset, document: str, query: str | None, option: str) -> int:
    names = _names(lists)
    first, end = 0, len(names)
    if query is not None:
        number = _query(lists, query)
        first, end = int(lists.offsets[number]), int(lists.offsets[number + 1])
    found = [at for at in range(first, end) if names[at] == document]
    if len(found) != 1:
        of = "the lists have" if query is None else f"query {query!r} has"
        many = "no document" if not found else f"{len(found)} documents"
        raise ValueError(
            f"{of} {many} {document!r}; expected one document, such as {names[first]!r}; choose with {option}"
            + (" and --query" if query is None and found else "")
        )
    return found[0]


# --- on disk ----------------------------------------------------------------------------------------------------------


def read_explanation(folder: Path) -> Explanation | None:
    """What `rankgrad explain` wrote into the folder of a run; None if it has not."""
    file = folder / EXPLANATION
    if not file.is_file():
        return None
    remedy = "expected what `rankgrad explain` wrote; explain the run again, or remove the file"
    known = read_sealed(folder, EXPLANATION, remedy)
    try:
        return _restored(known)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{file} is damaged; {remedy}") from None


def _restored(known: Mapping[str, Any]) -> Explanation:
    def importance(of: Mapping[str, Any]) -> Importance:
        return Importance(tuple(map(str, of["features"])), *(_number(of[name]) for name in ("loss", "low", "high")))

    def missed(of: Mapping[str, Any]) -> Missed:
        return Missed(tuple(map(str, of["features"])), importance(of["within"]), importance(of["across"]))

    def explained(of: Mapping[str, Any]) -> Explained:
        own = of["attribution"]
        contributions = tuple(
            Contribution(str(c["feature"]), _number(c["amount"]), _value(c["value"]), _value(c["reference"]))
            for c in own["contributions"]
        )
        found = Attribution(_number(own["score"]), _number(own["reference"]), contributions, _number(own["remainder"]))
        query, document, against = (str(of[name]) for name in ("query", "document", "against"))
        return Explained(query, document, against, int(of["place"]), int(of["against_place"]), found)

    return Explanation(
        data=str(known["data"]),
        split=str(known["split"]),
        metric=str(known["metric"]),
        value=_number(known["value"]),
        queries=int(known["queries"]),
        repeats=int(known["repeats"]),
        seed=int(known["seed"]),
        correlated=_number(known["correlated"]),
        features=tuple(missed(of) for of in known["features"]),
        groups=tuple(missed(of) for of in known["groups"]),
        examples=tuple(explained(of) for of in known["examples"]),
        note=str(known["note"]),
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _value(value: Any) -> float | str:
    return value if isinstance(value, str) else _number(value)
