"""Which lists can teach a loss anything: rules on labels and mask, [..., L] -> [...] bool.

A list that cannot teach weighs nothing in a mean. The trainer asks the same rules how many lists of a step can.
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


def has_relevant(labels: Tensor, mask: Tensor, threshold: float | None = None) -> Tensor:
    """Listwise and direct losses: two documents, one of them relevant (y > 0, or y >= threshold for binary metrics)."""
    relevant = labels > 0 if threshold is None else labels >= threshold
    return (mask.sum(-1) >= 2) & (mask & relevant).any(-1)
