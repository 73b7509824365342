"""Whether an exported ranker scores as the ranker does, on 256 lists made to be difficult."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import ABSURD
from rankgrad.export.graph import ScoringGraph
from rankgrad.ranker import Ranker

TOLERANCE = 1e-5  # times max(1, |score|)
KNOWN = 0.1  # share of it within which the ranker's own float32 score must be right, to be compared with
LISTS = 256
LONG = 1_000  # documents of the longest lists
SCORED_AT_ONCE = 32  # lists of similar length

UNKNOWN = {"neither", "nor"}  # texts, of which a level may be one

Scores = NDArray[np.float32]


class Agreement(NamedTuple):
    """What was compared, and the largest difference, in units of max(1, |score|)."""

    lists: int
    documents: int
    largest: float


def agreement(
    ranker: Ranker, scores_of: Callable[[Scores, NDArray[np.int64]], Scores], *, missing: bool = True
) -> Agreement:
    """Compare `scores_of(features, sizes)` with the ranker's own scores; a ValueError says where they differ.

    Documents count whose score the ranker itself knows: float32 agrees with float64. There is no such score where features
    of 10^38 overflow, or where scores are equal but for rounding and then standardised. `missing`: whether NaN and huge
    features are among the lists.
    """
    exact = ScoringGraph(ranker, torch.float64)
    compared, largest = 0, 0.0
    for features, sizes in difficult_lists(ranker, missing=missing):
        own, theirs = own_scores(ranker, features, sizes), np.asarray(scores_of(features, sizes))
        if theirs.shape != own.shape:
            raise ValueError(
                f"the exported ranker gives {theirs.shape} scores for {len(own)} documents; expected one each"
            )
        with torch.no_grad():
            ideal = exact(torch.from_numpy(features), torch.from_numpy(sizes)).numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            scale = np.maximum(1.0, np.abs(own))
            known = np.isfinite(own) & (np.abs(own - ideal) <= KNOWN * TOLERANCE * scale)
            difference = np.where(known, np.abs(theirs - own) / scale, 0.0)
        if not (difference <= TOLERANCE).all():
            worst = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
            raise ValueError(
                f"the exported ranker scores a document {theirs[worst]:.7g} and the ranker {own[worst]:.7g}; expected a difference "
                f"of at most {TOLERANCE:g}; nothing was written; please report it with the versions that `rankgrad info` shows"
            )
        _expect_order(own, theirs, known, sizes)
        compared, largest = compared + int(known.sum()), max(largest, float(difference.max(initial=0.0)))
    if not compared:
        raise ValueError(
            "no score of this ranker is the same in float32 and float64, so that no export of it can be checked; expected a "
            "ranker of finite weights; train it on scaled features"
        )
    return Agreement(LISTS, compared, largest)


def own_scores(ranker: Ranker, features: Scores, sizes: NDArray[np.int64]) -> Scores:
    """The ranker's scores of rows whose categories are given as the places of their texts, one place more being unknown."""
    levels = {column: (*texts, *UNKNOWN - {*texts}) for column, texts in ranker.scaling.levels.items()}
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    labels = np.zeros(len(features), np.float32)
    return ranker.score_lists(RankingDataset(features, labels, offsets, np.arange(len(sizes)), categories=levels))


def _expect_order(own: Scores, theirs: Scores, known: NDArray[np.bool_], sizes: NDArray[np.int64]) -> None:
    """No document may pass one that the ranker puts above it by more than rounding."""
    for rows in np.split(np.arange(len(own)), np.cumsum(sizes)[:-1]):
        rows = rows[known[rows]]
        rows = rows[np.argsort(-own[rows], kind="stable")]
        gain = np.diff(theirs[rows]) / np.maximum(1.0, np.abs(own[rows[1:]]))
        if (gain > TOLERANCE).any():
            raise ValueError("the exported ranker orders documents differently; nothing was written; please report it")


def difficult_lists(ranker: Ranker, *, missing: bool = True) -> Iterator[tuple[Scores, NDArray[np.int64]]]:
    """Raw features [N, F] and sizes [Q], 256 lists in all: ordinary ones, and with missing, huge or equal features, or 1,000 documents."""
    rng = np.random.default_rng(0)
    low, high = (np.asarray(ranker.scaling.arrays[name], np.float64) for name in ("low", "high"))
    unbounded = ~((np.abs(low) < ABSURD) & (np.abs(high) < ABSURD))  # nothing was scaled: any number may come
    low, high = np.where(unbounded, -2.0, low), np.where(unbounded, 2.0, high)
    numbers = ~np.isin(np.arange(ranker.features), list(ranker.scaling.levels))
    lists = []
    for number in range(LISTS):
        length = LONG if number < 2 else 1 if number < 18 else int(rng.integers(2, 40))
        place = rng.random((length, ranker.features))
        place = (
            place**6 if number % 2 else place * 1.2 - 0.1
        )  # crowded at the low end, as counts are; or a little outside
        rows = (low + place * (high - low)).astype(np.float32)
        for column, texts in ranker.scaling.levels.items():
            rows[:, column] = rng.integers(len(texts) + 1, size=length)
        if number % 8 == 3:
            rows[:] = rows[0]
        if number % 8 == 5:
            rows[rng.random(rows.shape) < 0.3] = 0.0
        if missing and number % 4 == 0:
            rows[rng.random(rows.shape) < 0.2] = np.nan
        if missing and number % 16 == 2:
            rows[rng.integers(length)] = np.nan
        if missing and number % 8 == 1:
            hostile = (rng.random(rows.shape) < 0.05) & numbers
            rows[hostile] = rng.choice([3e38, -3e38, 1e31, -1e31], hostile.sum())
        if length == LONG:
            rows[:, number::2] = rows[0, number::2]  # as features of the query are
        lists.append(rows)
    lists.sort(key=len)
    for start in range(0, LISTS, SCORED_AT_ONCE):
        part = lists[start : start + SCORED_AT_ONCE]
        if len(part[-1]) == LONG:  # not padded together with short ones
            for rows in part[-2:]:
                yield rows, np.array([LONG])
            part = part[:-2]
        yield np.concatenate(part), np.array([len(rows) for rows in part])
