"""Dropout and noise as functions of where a run is, so that nothing random has to be stored."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from rankgrad.data.order import mix


class StepRandomness:
    """Makes dropout and the losses' noise functions of where the run is."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._seed, self._rank = seed, rank
        self.generator = torch.Generator(device)  # of the losses
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._models = torch.cuda.default_generators[index]
        else:
            self._models = torch.default_generator
        self.generators = (self._models, self.generator)

    @contextlib.contextmanager
    def at(self, epoch: int, step: int) -> Iterator[None]:
        """In here random numbers belong to a step; afterwards torch's own random state is the caller's again."""
        key = np.array(self._seed, np.int64)
        with np.errstate(over="ignore"):
            for number in (epoch, step, self._rank):
                key = mix(key + 1 + number)
        number = int(key) & (2**63 - 1)
        before = self._models.get_state()
        self._models.manual_seed(number)
        self.generator.manual_seed(number ^ 1)
        try:
            yield
        finally:
            self._models.set_state(before)
