"""A run of several processes, and traps in one of them; in a module of its own because torchrun's processes import it."""

import os
import signal
import sys
import time
from pathlib import Path

from children import Trap
from rankgrad.training.config import Config, Data, Loss, Model, Optimiser, Train

# 30 queries in batches of 7: the last batch has two. No dropout, because processes draw their own.
CONFIG = Config(
    data=Data("synthetic:tiny", list_size=12),
    model=Model(kind="transformer", width=8, layers=1, feedforward=8, dropout=0.0),
    loss=Loss("neural_ndcg@5"),
    optimiser=Optimiser(lr=0.01, clip=1.0),
    train=Train(epochs=3, batch_size=7, threads=1, device="cpu"),
)


class OnOne(Trap):
    """A trap in one process alone."""

    def __init__(self, rank, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rank = str(rank)

    def spring(self):
        if os.environ["RANK"] == self.rank:
            super().spring()


class Wait(Trap):
    """Stand still at a step until a signal comes."""

    def __init__(self, number, seen):
        super().__init__(number, at="step")
        self.seen = seen

    def spring(self):
        Path(self.seen).touch()
        signals = signal.getsignal(signal.SIGTERM).__self__
        while not signals.received:
            time.sleep(0.05)


class NumbaSeen:
    """Leaves a file beside the run for every process whose steps took the compiled relaxed sort, which is imported when it is called."""

    def __init__(self, out):
        self.out = out

    def __call__(self):
        assert "rankgrad.kernels.neural_ndcg.cpu" not in sys.modules

    def see(self, event):
        if type(event).__name__ == "Step" and "rankgrad.kernels.neural_ndcg.cpu" in sys.modules:
            Path(f"{self.out}.numba-{os.environ['RANK']}").touch()
