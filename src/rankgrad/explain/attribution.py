"""What each feature gives to a score: integrated gradients (arXiv 1703.01365) on the scaled inputs of a network.

The features of a document go on a straight line from a reference to what they are, and the gradient of its score is summed up
along the way. Whatever else the score depends on (the other documents, averaged and standardised members) is in it: it is the
final score that is differentiated. What the amounts add up to is the difference of the two scores, but for a remainder, which
is given: it is small unless the score jumps on the way, as standardised scores of a list of two documents do.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """What a feature gives, and its raw values: the document's, and the other document's or the list's mean."""

    feature: str
    amount: float
    value: float
    reference: float


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
    parts = [_attributed(one, rows, document - first, other, standardise=len(rankers) > 1) for one in rankers]
    amounts = np.mean([part[0] for part in parts], axis=0)
    score, reference = (float(np.mean([part[which] for part in parts])) for which in (1, 2))
    names = data.feature_names or tuple(f"feature {column + 1}" for column in range(rows.shape[1]))
    known = ~np.isnan(rows)
    means = np.where(known, rows, 0.0).sum(0, dtype=np.float64) / np.maximum(known.sum(0), 1)
    beside = np.where(known.any(0), means, np.nan) if other is None else rows[other]
    contributions = tuple(
        Contribution(name, float(amount), float(value), float(reference_value))
        for name, amount, value, reference_value in zip(names, amounts, rows[document - first], beside)
    )
    return Attribution(score, reference, contributions, score - reference - float(amounts.sum()))


def _attributed(
    ranker: Ranker, rows: np.ndarray, document: int, against: int | None, *, standardise: bool
) -> tuple[np.ndarray, float, float]:
    """Amounts [F], the score and the reference of one ranker."""
    model = copy.deepcopy(ranker.model).double().eval().requires_grad_(False)

    def scores(features: Tensor) -> Tensor:
        found = ranking_scores(model(features), ranker.units)
        return standardised(found, None) if standardise else found

    end = torch.from_numpy(ranker.scaling.apply(rows)).to(ranker.device).double()
    start = end.clone()
    if against is None:
        start[document] = end.mean(0)
    else:
        start[[document, against]] = end[[against, document]]
    amounts, score, reference = integrated_gradients(scores, start, end, document)
    sources = np.concatenate([np.arange(rows.shape[1]), ranker.scaling.indicators])
    return np.bincount(sources, amounts, rows.shape[1]), score, reference


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
