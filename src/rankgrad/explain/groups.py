"""Groups of features that say the same within lists: permuted one by one, each looks needless beside the others."""

import numpy as np

from rankgrad.data.dataset import RankingDataset

THRESHOLD = 0.8  # from which the correlation of two features puts them together


def correlated_groups(data: RankingDataset, threshold: float = THRESHOLD) -> list[list[int]]:
    """Columns in groups, in the order of their first: within a group every two are correlated by at least `threshold`.

    - `data`: the lists.
    - `threshold`: above 0, 1 at most. The two groups whose least correlated columns are most correlated are joined first,
      until none are left that may be joined (complete linkage).

    The correlation is that of ranks within lists (Spearman's, over all documents), its sign aside: what a feature says about
    the order of a list, whatever its scale. A missing value ranks lowest; a column that is constant within lists is
    correlated with none.

    >>> x = np.array([[1.0, 10.0, 5.0], [2.0, 100.0, 5.0], [3.0, 1e9, 4.0], [0.0, 1.0, 4.0]])
    >>> correlated_groups(RankingDataset(x, [0, 1, 1, 0], [0, 4], ["q"]))
    [[0, 1], [2]]
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise ValueError(f"the threshold of correlation must be a number above 0, 1 at most, got {threshold!r}")
    likeness = np.abs(correlation_within_lists(data))
    np.fill_diagonal(likeness, -1.0)
    groups = [[column] for column in range(len(likeness))]
    while True:
        a, b = sorted(np.unravel_index(np.argmax(likeness), likeness.shape))
        if likeness[a, b] < threshold - 1e-9:  # rounding: a copy of a column is correlated by 1
            return [sorted(group) for group in groups if group]
        groups[a], groups[b] = groups[a] + groups[b], []
        likeness[a] = likeness[:, a] = np.minimum(likeness[a], likeness[b])
        likeness[b] = likeness[:, b] = likeness[a, a] = -1.0


def correlation_within_lists(data: RankingDataset) -> np.ndarray:
    """Correlations [F, F] of the columns' ranks within lists; 0 where a column is constant within all of them."""
    features = np.asarray(data.features[:])
    lengths = data.lengths
    which = np.repeat(np.arange(len(data)), lengths)
    centred = np.empty(features.shape, np.float32)
    for column, values in enumerate(features.T):
        ranks = _mid_ranks(np.where(np.isnan(values), -np.inf, values), which)
        centred[:, column] = ranks / np.repeat(lengths, lengths)
    centred -= np.repeat(np.add.reduceat(centred, data.offsets[:-1]) / lengths[:, None], lengths, axis=0)
    products = centred.astype(np.float64).T @ centred
    size = np.sqrt(np.diag(products))
    varies = size > 1e-6 * np.sqrt(len(features))  # what rounding leaves of a constant
    size = np.where(varies, size, 1.0)
    return np.where(np.outer(varies, varies), products / np.outer(size, size), 0.0)


def _mid_ranks(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The rank [N] of each value among those of its list, from low to high; equal ones share the mean of theirs.

    >>> _mid_ranks(np.array([5.0, 5.0, 1.0, 7.0]), np.array([0, 0, 0, 1])).tolist()
    [1.5, 1.5, 0.0, 3.0]
    """
    order = np.lexsort((values, which))
    ordered, lists = values[order], which[order]
    new = np.ones(len(values), np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]) | (lists[1:] != lists[:-1])
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(values))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + ends - 1) / 2, ends - starts)
    return ranks
