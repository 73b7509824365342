"""What each feature gives to a score: integrated gradients (arXiv 1703.01365) on the scaled inputs of a network.

The features of a document go on a straight line from a reference to what they are, and the gradient of its score is summed up
along the way. Whatever else the score depends on (the other documents, averaged and standardised members) is in it: it is the
final score that is differentiated. What the amounts add up to is the difference of the two scores, but for a remainder, which
is given: it is small unless the score jumps on the way, as standardised scores of a list of two documents do. A category has no
way from one value to another: it gives what the score jumps by where it changes, half before the numbers go, half after.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankgrad.data.categories import Levels
from rankgrad.data.dataset import RankingDataset
from rankgrad.models import ranking_scores, standardised
from rankgrad.ranker import Ranker

POINTS = 64  # on the way, doubled until the remainder is small,
SMALL = 1e-4  # as a share of the difference,
LARGEST = 2**17  # or so many documents have been scored: seconds, whatever the list's length
AT_ONCE = 2**13

Score = Callable[[Tensor], Tensor]  # [S, L, inputs] -> [S, L]


@dataclass(frozen=True)
class Contribution:
    """What a feature gives, and its raw values: the document's, and the other document's or the list's mean.

    A category has texts for values, and the most common of the list for a mean.
    """

    feature: str
    amount: float
    value: float | str
    reference: float | str


@dataclass(frozen=True)
class Attribution:
    """The score of a document, what it is set against, and what each feature gives to the difference, in their order.

    score - reference = the sum of the amounts + remainder
    """

    score: float
    reference: float
    contributions: tuple[Contribution, ...]
    remainder: float


def attributions(
    ranker: Ranker | Sequence[Ranker], data: RankingDataset, document: int, against: int | None = None
) -> Attribution:
    """Why a document has its score.

    - `ranker`: of a network; of several, the mean of their scores, standardised within each list.
    - `data`: lists.
    - `document`: its place in `data`, from 0.
    - `against`: the place of another document of the same list: why the one stands above the other. The two change places on
      the way, so that the reference is the other's score. None: a document of the list's mean (scaled) features in its place.
    """
    rankers = [ranker] if isinstance(ranker, Ranker) else list(ranker)
    for name, place in (("document", document), ("against", against)):
        if place is not None and not 0 <= place < len(data.labels):
            raise ValueError(f"{name} is {place}; expected a place from 0 to {len(data.labels) - 1}")
    query = int(np.searchsorted(data.offsets, document, side="right")) - 1
    first, end = int(data.offsets[query]), int(data.offsets[query + 1])
    if against is not None and (not first <= against < end or against == document):
        raise ValueError(
            f"documents {document} and {against} cannot be set against each other; expected two documents of one list, this one's "
            f"are {first} to {end - 1}"
        )
    rows = np.asarray(data.features[first:end])
    other = None if against is None else against - first
    parts = [_attributed(one, data, rows, document - first, other, standardise=len(rankers) > 1) for one in rankers]
    amounts = np.mean([part[0] for part in parts], axis=0)
    score, reference = (float(np.mean([part[which] for part in parts])) for which in (1, 2))
    names = data.feature_names or tuple(f"feature {column + 1}" for column in range(rows.shape[1]))
    own, beside = rows[document - first], _typical(rows, data.categories) if other is None else rows[other]
    contributions = tuple(
        Contribution(name, float(amount), *(_shown(row[column], data.categories.get(column)) for row in (own, beside)))
        for column, (name, amount) in enumerate(zip(names, amounts))
    )
    return Attribution(score, reference, contributions, score - reference - float(amounts.sum()))


def _typical(rows: np.ndarray, categories: Levels) -> np.ndarray:
    """The mean of each column [F] of a list's rows, missing values aside; the most common code of a category."""
    known = ~np.isnan(rows)
    means = np.where(known, rows, 0.0).sum(0, dtype=np.float64) / np.maximum(known.sum(0), 1)
    typical = np.where(known.any(0), means, np.nan)
    for column in categories:
        typical[column] = _most_common(rows[:, column])
    return typical


def _most_common(values: np.ndarray) -> float:
    found, counts = np.unique(values, return_counts=True)  # NaN is one value
    return float(found[np.argmax(counts)])


def _shown(value: float, texts: Sequence[str] | None) -> float | str:
    """A raw value, or the text that a code stands for; one that is no category of the data is missing or unknown."""
    if texts is None:
        return float(value)
    return texts[int(value)] if 0 <= value < len(texts) else "missing"


def _attributed(
    ranker: Ranker, data: RankingDataset, rows: np.ndarray, document: int, against: int | None, *, standardise: bool
) -> tuple[np.ndarray, float, float]:
    """Amounts [F], the score and the reference of one ranker."""
    model = copy.deepcopy(ranker.model).double().eval().requires_grad_(False)

    def scores(features: Tensor) -> Tensor:
        found = ranking_scores(model(features, None), ranker.units)
        return standardised(found, None) if standardise else found

    categories = list(ranker.scaling.levels)
    inputs = ranker.scaling.of(data).apply(rows)
    end = torch.from_numpy(inputs).to(ranker.device).double()
    start = end.clone()
    if against is None:
        start[document] = end.mean(0)
        for column in categories:
            start[document, column] = _most_common(inputs[:, column])
    else:
        start[[document, against]] = end[[against, document]]
    amounts, score, reference = _with_categories(scores, start, end, document, categories)
    sources = np.concatenate([np.arange(rows.shape[1]), ranker.scaling.indicators])
    return np.bincount(sources, amounts, rows.shape[1]), score, reference


def _with_categories(
    scores: Score, start: Tensor, end: Tensor, document: int, categories: Sequence[int]
) -> tuple[np.ndarray, float, float]:
    """`integrated_gradients` of the numbers, and the jumps of categories: the mean of these before those, and after."""
    if not categories:
        return integrated_gradients(scores, start, end, document)
    numbers = end.clone()
    numbers[:, categories] = start[:, categories]
    after, _, reference = integrated_gradients(scores, start, numbers, document)
    after = after + _jumps(scores, numbers, end, document, categories)
    changed = start.clone()
    changed[:, categories] = end[:, categories]
    before, score, _ = integrated_gradients(scores, changed, end, document)
    before = before + _jumps(scores, start, changed, document, categories[::-1])
    return (before + after) / 2, score, reference


def _jumps(scores: Score, start: Tensor, end: Tensor, document: int, categories: Sequence[int]) -> np.ndarray:
    """What the score changes by as one category after the other changes, [inputs]."""
    lists = [start]
    for column in categories:
        lists.append(lists[-1].clone())
        lists[-1][:, column] = end[:, column]
    with torch.no_grad():
        found = scores(torch.stack(lists))[:, document].diff()
    jumps = start.new_zeros(start.shape[1])
    jumps[list(categories)] = found
    return jumps.cpu().numpy()


def integrated_gradients(scores: Score, start: Tensor, end: Tensor, document: int) -> tuple[np.ndarray, float, float]:
    """What each input gives to the change of a document's score as a list goes from start to end, [L, inputs] each.

    amount_f = sum_i integral_0^1 ds_document / dx_if (start + t (end - start)) dt * (end - start)_if

    by the midpoint rule with as many points as make the sum of the amounts the difference of the scores, the two of which
    come back too.

    >>> start, end = torch.zeros(2, 2).double(), torch.tensor([[1.0, 2.0], [0.0, 0.0]]).double()
    >>> amounts, *_ = integrated_gradients(lambda x: x[..., 0] * x[..., 1] + x[..., 0], start, end, 0)
    >>> amounts.round(6).tolist()
    [2.0, 1.0]
    """
    with torch.no_grad():
        reference, score = scores(torch.stack([start, end]))[:, document].tolist()
    points = POINTS
    while True:
        amounts = _summed(scores, start, end, document, points)
        remainder = abs(score - reference - float(amounts.sum()))
        if remainder <= max(SMALL * abs(score - reference), 1e-9) or 2 * points * len(start) > LARGEST:
            return amounts.cpu().numpy(), score, reference
        points *= 2


def _summed(scores: Score, start: Tensor, end: Tensor, document: int, points: int) -> Tensor:
    at = (torch.arange(points, dtype=start.dtype, device=start.device) + 0.5) / points
    total = torch.zeros_like(start)
    for part in at.split(max(1, AT_ONCE // len(start))):
        lists = (start + part[:, None, None] * (end - start)).requires_grad_()
        (slope,) = torch.autograd.grad(scores(lists)[:, document].sum(), lists)
        total += slope.sum(0)
    return (total * (end - start)).sum(0) / points
