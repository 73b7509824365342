"""Is one ranker better than another, or was it luck? Paired tests over the queries both have ranked.

Imports numpy alone. What is compared are two vectors with one metric value per query, in the same order of queries. NaN
marks a query to leave out (nothing relevant, say), and both vectors must leave out the same ones. Two values closer
than one part in 10^12 are a tie: that is rounding, not ranking. Everything here is a function of its inputs and the
seed; memory stays at tens of megabytes however many queries and rounds there are.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
ROUNDING = 1e-12
EXACT = 13  # up to so many differences every one of the 2^n sign patterns is tried: fewer than the usual 10,000 rounds
CHUNK = 2**21  # random numbers drawn at once


@dataclass(frozen=True)
class Comparison:
    """Two rankers on the same queries; difference = mean_a - mean_b, and a wins a query where its value is larger."""

    mean_a: float
    mean_b: float
    difference: float
    low: float  # the 95 % bootstrap interval of the difference
    high: float
    p_value: float  # two-sided paired permutation test
    wins: int
    ties: int
    losses: int
    queries: int

    def __str__(self) -> str:
        return (
            f"{self.mean_a:.4f} against {self.mean_b:.4f}: difference {self.difference:+.4f}, "
            f"{LEVEL:.0%} interval [{self.low:+.4f}, {self.high:+.4f}], p = {self.p_value:.3g}; "
            f"{self.wins} wins, {self.ties} ties, {self.losses} losses over {self.queries} queries"
        )


def compare(a: ArrayLike, b: ArrayLike, *, seed: int = 0, rounds: int = 10_000) -> Comparison:
    """Everything there is to say about two rankers, from their metric values per query, [Q] each.

    >>> print(compare([0.9, 0.5, 0.7, 0.4, 0.8], [0.6, 0.5, 0.5, 0.3, 0.4]))
    0.6600 against 0.4600: difference +0.2000, 95% interval [+0.0800, +0.3200], p = 0.125; 4 wins, 1 ties, 0 losses over 5 queries
    """
    a, b, differences = _pairs(a, b)
    low, high = bootstrap_interval(differences, level=LEVEL, rounds=rounds, seed=seed)
    return Comparison(
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=_sign_flips(differences, rounds, seed),
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
        queries=len(differences),
    )


def paired_permutation_test(a: ArrayLike, b: ArrayLike, *, rounds: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of the mean difference of a and b, [Q] each, under random swaps of the two values of a query.

    p = (1 + #{rounds with |sum_q +-d_q| >= |sum_q d_q|}) / (1 + rounds), or, where at most 13 differences are not zero,
    the exact share of all sign patterns. The order of a and b and the order of the queries do not matter.

    >>> paired_permutation_test([0.9, 0.8, 0.7], [0.5, 0.5, 0.5])
    0.25
    """
    return _sign_flips(_pairs(a, b)[2], rounds, seed)


def bootstrap_interval(
    values: ArrayLike, *, level: float = LEVEL, rounds: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values [Q]: queries are drawn again with replacement.

    >>> bootstrap_interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be a number between 0 and 1, such as 0.95, got {level!r}")
    kept = _present(_vector("values", values))
    random = np.random.Generator(np.random.PCG64(seed))
    means = [
        kept[random.integers(len(kept), size=(count, len(kept)), dtype=np.int32)].mean(1)
        for count in _chunks(rounds, len(kept))
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for many comparisons: the i-th smallest of m becomes max_{j<=i} min(1, (m + 1 - j) p_j).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p_values must be a list of numbers from 0 to 1, got {p_values!r}")
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(p), 0, -1)))
    return corrected.tolist()


def _sign_flips(differences: Floats, rounds: int, seed: int) -> float:
    # Zeros are the same under either sign. Sizes in sorted order: p does not depend on the order of the queries.
    sizes = np.sort(np.abs(differences[differences != 0]))
    chunks = _chunks(rounds, len(sizes))
    total = sizes.sum()
    # A pattern that ties with what was observed counts, whatever order its sum was rounded in.
    bar = abs(differences.sum()) - ROUNDING * total
    if len(sizes) <= EXACT:
        patterns = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes)) & 1  # [2^n, n] of 0 and 1
        return float((np.abs(2 * (patterns @ sizes) - total) >= bar).mean())
    random = np.random.Generator(np.random.PCG64(seed))
    extreme = 0
    for count in chunks:
        octets = np.frombuffer(random.bytes(count * -(-len(sizes) // 8)), np.uint8).reshape(count, -1)
        signs = np.unpackbits(octets, axis=1, count=len(sizes)).astype(np.float64)  # [count, n] of 0 and 1
        extreme += int((np.abs(2 * (signs @ sizes) - total) >= bar).sum())
    return (1 + extreme) / (1 + rounds)


def _pairs(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """The values of the queries that count, and their differences, exactly zero where they tie."""
    a, b = _vector("a", a), _vector("b", b)
    if len(a) != len(b):
        raise ValueError(f"a and b must hold one value for each of the same queries, got {len(a)} and {len(b)} values")
    disagree = np.flatnonzero(np.isnan(a) != np.isnan(b))
    if len(disagree):
        raise ValueError(
            f"a and b must leave out (NaN) the same queries, but they disagree at {len(disagree)} of {len(a)}, first at "
            f"index {disagree[0]}; compute both with the same rule for queries without relevant documents"
        )
    a, b = _present(a), _present(b)
    tied = np.abs(a - b) <= ROUNDING * np.maximum(np.abs(a), np.abs(b))
    return a, b, np.where(tied, 0.0, a - b)


def _vector(name: str, values: ArrayLike) -> Floats:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} must hold one metric value per query, shape [Q], got shape {list(vector.shape)}")
    if np.isinf(vector).any():
        raise ValueError(f"{name} must be finite or NaN (a query to leave out), got an infinite value")
    return vector


def _present(values: Floats) -> Floats:
    kept = values[~np.isnan(values)]
    if not len(kept):
        raise ValueError(f"there must be at least one query with a value, got none among {len(values)}")
    return kept


def _chunks(rounds: Any, each: int) -> Iterator[int]:
    """How many rounds to draw at a time, for `each` numbers a round."""
    try:
        left = operator.index(rounds)
    except TypeError:
        left = 0
    if left < 1:
        raise ValueError(f"rounds must be a whole number, 1 or above, got {rounds!r}")
    at_once = max(1, CHUNK // max(1, each))
    return (min(at_once, left - start) for start in range(0, left, at_once))
