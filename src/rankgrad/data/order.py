"""Random numbers that are functions of what they are for, not of a stream: shuffles and subsamples sort by them.

Pure functions of arrays or tensors, the same on every device; numpy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Integers = TypeVar("Integers", np.ndarray, "torch.Tensor")


def mix(values: Integers) -> Integers:
    """Scramble int64 numbers, array or tensor: the finaliser of splitmix64, a bijection.

    >>> mix(np.array([0, 1, 2])).tolist()
    [0, 6238072747940578789, -2606959012126976886]
    """
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # the masks make the shifts logical
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return values ^ (values >> 31 & (1 << 33) - 1)


def random_keys(ids: np.ndarray, *numbers: int) -> np.ndarray:
    """Pseudo-random int64 keys [Q], each a function of its query id (integer or text) and the numbers alone.

    >>> int(random_keys(np.array([3, 4]), 0)[1]) == int(random_keys(np.array([4, 5]), 0)[0])
    True
    """
    keys = np.zeros(len(ids), np.int64)
    for number in numbers:
        keys = mix(keys + 1) ^ np.int64((number + 2**63) % 2**64 - 2**63)
    if ids.dtype.kind != "U":
        return mix(mix(keys + 1) ^ mix(ids))
    letters = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), -1).astype(np.int64)
    for letter in letters.T:
        keys = np.where(letter, mix(keys + 1) ^ letter, keys)  # 0 is the filling of shorter texts
    return mix(keys)
