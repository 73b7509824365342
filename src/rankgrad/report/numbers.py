"""The numbers of a report: pure functions of the entries' per-query values.

Figures and per-query tables leave out queries without a relevant document (NaN), where every ranking is as good.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rankgrad.report.gather import Entry
from rankgrad.runs.compare import with_interval
from rankgrad.runs.folder import PerDocument
from rankgrad.runs.significance import Comparison, compare, holm
from rankgrad.training.evaluate import RULES

SIGNIFICANT = 0.05
BINS = 5  # groups of queries, of about equal size, in the figures by length and by relevant documents
QUERIES = 5  # shown as won most and as lost most
EXAMPLES = 2  # of either whose documents are shown
PLACES = 10  # at the top of a list that are shown of it


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval; NaN where no query counts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """An entry under one metric."""

    name: str
    rules: dict[str, Interval]  # by rule for empty queries
    against: Comparison | None  # this entry minus the first; None for the first, and where no query counts
    p: float  # Holm-corrected over the entries set against the first; NaN where there is none


class Bin(NamedTuple):
    """Queries whose count lies in low..high, and the mean of each entry over them."""

    low: int
    high: int
    queries: int
    means: list[Interval]

    @property
    def label(self) -> str:
        """The range as a person writes it."""
        return str(self.low) if self.low == self.high else f"{self.low}–{self.high}"


class Query(NamedTuple):
    """One query under two entries (or one); documents and relevant are None where no run kept them."""

    query: Any
    documents: int | None
    relevant: int | None
    first: float
    other: float


class Moved(NamedTuple):
    """A document of an example, with its place, from 1, by the first entry and by the other."""

    document: str
    label: float
    before: int
    after: int


class Example(NamedTuple):
    """A list under two entries: the documents that either puts among the first, as the other ranks them."""

    query: Query
    documents: list[Moved]


@dataclass(frozen=True)
class Contest:
    """An entry against the first: differences of the queries that count, and where they are largest."""

    index: int
    result: Comparison
    differences: np.ndarray
    won: list[Query]
    lost: list[Query]
    examples: list[Example]  # none where an entry kept no scores


def headline(metrics: Sequence[str]) -> str:
    """The metric of the figures: NDCG@10 if it is there, another NDCG, or else the first.

    >>> headline(["map", "ndcg@5"])
    'ndcg@5'
    """
    ndcgs = [name for name in metrics if name.startswith("ndcg")]
    return "ndcg@10" if "ndcg@10" in ndcgs else [*ndcgs, *metrics][0]


def metric_table(entries: Sequence[Entry], metric: str) -> list[Row]:
    """Every entry under one metric: all rules for empty queries, and the paired comparison with the first entry."""
    values = [entry.per_query.metrics[metric] for entry in entries]
    countable = bool(np.isfinite(values[0]).any())
    against = [None, *(compare(own, values[0]) if countable else None for own in values[1:])]
    corrected = iter(holm([found.p_value for found in against if found is not None]))
    return [
        Row(
            name=entry.name,
            rules={rule: Interval(**with_interval(own, empty)) for rule, empty in RULES.items()},
            against=found,
            p=np.nan if found is None else next(corrected),
        )
        for entry, own, found in zip(entries, values, against)
    ]


def by_count(counts: np.ndarray, values: Sequence[np.ndarray]) -> list[Bin]:
    """The means of each entry over groups of queries of similar count, from few to many; none if no query counts."""
    known = np.isfinite(values[0])
    if not known.any():
        return []
    own = np.sort(counts[known])
    highest = np.unique(own[[-(-len(own) * part // BINS) - 1 for part in range(1, BINS + 1)]])
    lowest = [own[0], *(highest[:-1] + 1)]
    bins = []
    for low, high in zip(lowest, highest):
        inside = known & (counts >= low) & (counts <= high)
        means = [Interval(**with_interval(value[inside], np.nan)) for value in values]
        bins.append(Bin(int(counts[inside].min()), int(counts[inside].max()), int(inside.sum()), means))
    return bins


def curve(entry: Entry) -> dict[int, float]:
    """Mean NDCG@k by k, up to the longest list."""
    longest = np.inf if entry.per_query.documents is None else entry.per_query.documents.max()
    found = {}
    for k, values in entry.per_query.curve.items():
        known = values[np.isfinite(values)]
        if len(known):
            found[k] = float(known.mean(dtype=np.float64))
        if k >= longest:  # beyond it nothing changes
            break
    return found


def contests(entries: Sequence[Entry], metric: str, rows: Sequence[Row]) -> list[Contest]:
    """Every entry but the first against the first; `rows` is the table of the same metric."""
    values = [entry.per_query.metrics[metric] for entry in entries]
    known = np.flatnonzero(np.isfinite(values[0]))
    found = []
    for index, row in enumerate(rows):
        if row.against is None:
            continue
        differences = (values[index] - values[0])[known]
        order = known[np.argsort(-differences, kind="stable")]
        won, lost = order[: min(QUERIES, row.against.wins)], order[::-1][: min(QUERIES, row.against.losses)]
        queries = [[_query(entries[0], values[0], values[index], place) for place in places] for places in (won, lost)]
        chosen = [
            (place, query) for of, places in zip(queries, (won, lost)) for place, query in zip(places[:EXAMPLES], of)
        ]
        examples = _examples(entries[0], entries[index], chosen)
        found.append(Contest(index, row.against, differences, queries[0], queries[1], examples))
    return found


def _examples(first: Entry, other: Entry, chosen: Sequence[tuple[np.intp, Query]]) -> list[Example]:
    """Lists under two entries; none where the two did not keep the scores of the same documents."""
    a, b, lengths = first.per_document, other.per_document, first.per_query.documents
    if a is None or b is None or lengths is None:
        return []
    if len(a.labels) != lengths.sum() or not np.array_equal(a.labels, b.labels) or not np.array_equal(a.rows, b.rows):
        return []
    starts = np.cumsum(lengths) - lengths
    return [Example(query, _moved(a, b, int(starts[place]), int(lengths[place]))) for place, query in chosen]


def _moved(first: PerDocument, other: PerDocument, start: int, count: int) -> list[Moved]:
    """The documents from `start` that either puts among its first places, as the other ranks them."""
    first = first if first.ids is not None else replace(first, ids=other.ids)
    before, after = (_places(of.scores[start : start + count]) for of in (first, other))
    shown = np.flatnonzero(np.minimum(before, after) <= PLACES)
    return [
        Moved(
            f"row {first.rows[start + at] + 1}" if first.ids is None else str(first.ids[start + at]),
            float(first.labels[start + at]),
            int(before[at]),
            int(after[at]),
        )
        for at in shown[np.argsort(after[shown])]
    ]


def _places(scores: np.ndarray) -> np.ndarray:
    """The place of each document, from 1; ties in input order, as the metrics have it.

    >>> _places(np.array([0.5, 2.0, 0.5])).tolist()
    [2, 1, 3]
    """
    places = np.empty(len(scores), np.int64)
    places[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return places


def hardest(entry: Entry, values: np.ndarray) -> list[Query]:
    """The queries a single entry ranks worst."""
    known = np.flatnonzero(np.isfinite(values))
    worst = known[np.argsort(values[known], kind="stable")][: 2 * QUERIES]
    return [_query(entry, values, values, place) for place in worst]


def _query(entry: Entry, first: np.ndarray, other: np.ndarray, place: np.intp) -> Query:
    of = entry.per_query
    documents, relevant = (None if counts is None else int(counts[place]) for counts in (of.documents, of.relevant))
    return Query(of.query_ids[place], documents, relevant, float(first[place]), float(other[place]))
