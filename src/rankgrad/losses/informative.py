"""Which lists a loss can learn from: rules on labels and mask, [..., L] -> [...] bool.

A list that a loss cannot learn from weighs nothing in its mean. The trainer asks the same rules how many lists of a step
count. A rule may take options of its loss by name, such as `threshold`.
"""

import torch
from torch import Tensor


def has_document(_labels: Tensor, mask: Tensor) -> Tensor:
    """Pointwise losses: a real document."""
    return mask.any(-1)


def has_pair(labels: Tensor, mask: Tensor) -> Tensor:
    """Pairwise losses: two documents with different labels."""
    highest = labels.masked_fill(~mask, -torch.inf).amax(-1)
    lowest = labels.masked_fill(~mask, torch.inf).amin(-1)
    return highest > lowest


def has_relevant(labels: Tensor, mask: Tensor) -> Tensor:
    """Listwise losses: two documents, one of them relevant (y > 0)."""
    return _two_with_one(labels > 0, mask)


def has_error(labels: Tensor, mask: Tensor, count_empty: bool = False) -> Tensor:
    """Squared errors within the list: two documents, one of them relevant unless `count_empty`."""
    return mask.sum(-1) >= 2 if count_empty else has_relevant(labels, mask)


def has_match(labels: Tensor, mask: Tensor, threshold: float = 1.0) -> Tensor:
    """Losses of binary metrics: two documents, one of them relevant (y >= threshold)."""
    return _two_with_one(labels >= threshold, mask)


def _two_with_one(relevant: Tensor, mask: Tensor) -> Tensor:
    return (mask.sum(-1) >= 2) & (mask & relevant).any(-1)
