"""The mean of several rankers' scores.

Scores of different losses and seeds live on different scales, and only their order and spacing within a list mean
anything; standardised, each ranker weighs the same in every list.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def mean_of_standardised(scores: Sequence[ArrayLike], offsets: ArrayLike) -> NDArray[np.float64]:
    """The mean over rankers of (s - mean) / deviation within each list; a list whose scores are all equal gives 0.

    `scores` holds one vector [N] per ranker, `offsets` [Q + 1] cuts it into lists; the deviation is the population's.

    >>> mean_of_standardised([[1, 3, 7, 7], [10, 10, 2, 6]], offsets=[0, 2, 4]).tolist()
    [-0.5, 0.5, -0.5, 0.5]
    """
    starts = np.asarray(offsets)[:-1]
    lengths = np.diff(offsets)
    total = np.zeros(int(lengths.sum()))
    if not len(scores):
        raise ValueError("there are no scores to take the mean of; expected those of at least one ranker")
    for of_ranker in scores:
        values = np.asarray(of_ranker, dtype=np.float64)
        if values.shape != total.shape:
            raise ValueError(f"scores have shape {list(values.shape)}; expected one for each of {len(total)} documents")
        if not np.isfinite(values).all():
            raise ValueError("the scores of a ranker are not finite; expected finite scores; look at its features")
        # From 0 to 1 first: equal scores become exactly 0, and no square is too large or too small.
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        values = (values - np.repeat(low, lengths)) / np.repeat(np.where(high > low, high - low, 1.0), lengths)
        centred = values - np.repeat(np.add.reduceat(values, starts) / lengths, lengths)
        variance = np.add.reduceat(centred**2, starts) / lengths
        total += centred / np.repeat(np.sqrt(np.where(variance > 0, variance, 1.0)), lengths)
    return total / len(scores)
