"""What changes while a run trains: the model, its optimiser, the best weights so far, and how far the run is.

`Progress` and the tensors of `TrainState` are all there is to a run: written down and restored, it goes on as if nothing had
happened.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.checks import one_of
from rankgrad.training.config import Optimiser, Train
from rankgrad.training.execution import ExecutionPlan

SCHEDULES = ("constant", "step", "cosine", "plateau")
OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass
class Progress:
    """How far a run is: every number a checkpoint needs beside tensors."""

    epoch: int = 0  # epochs finished
    step: int = 0  # steps done of the current epoch
    loss_sum: float = 0.0  # of the lists of the current epoch
    loss_count: float = 0.0  # lists (or documents) that counted, by weight
    skipped: int = 0
    best: float | None = None
    best_epoch: int = 0
    stale: int = 0  # epochs since the best
    drops: int = 0  # times the plateau schedule lowered the rate
    stale_since_drop: int = 0


@dataclass
class TrainState:
    """The tensors of a run: the model, its optimiser, and the best weights so far."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    best: dict[str, Tensor] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    plan: ExecutionPlan | None = None  # how it trains, once it does

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        named |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                named[f"optimiser.{key}.{name}"] = value
        return named

    def facts(self) -> dict[str, Any]:
        """The numbers, for a checkpoint."""
        return asdict(self.progress)

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go back to what `tensors` and `facts` gave."""
        self.progress = Progress(**facts)
        self.model.load_state_dict(under(tensors, "model."))
        self.best = under(tensors, "best.")
        for name, parameter in self.model.named_parameters():
            state = {
                key: tensors[f"optimiser.{key}.{name}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimiser.{key}.{name}" in tensors
            }
            if state:
                self.optimiser.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def make_optimiser(model: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """Adam or AdamW; fused, because the fused step can refuse itself on the device."""
    kind = OPTIMISERS[one_of("optimiser.name", settings.name, OPTIMISERS)]
    on_gpu = next(model.parameters()).is_cuda
    return kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True, capturable=on_gpu)


def learning_rate(settings: Optimiser, progress: Progress, steps: int, epochs: int) -> float:
    """The rate of the next step.

    >>> learning_rate(Optimiser(milestones=(2,)), Progress(epoch=2), 10, 5)
    0.0001
    """
    one_of("optimiser.schedule", settings.schedule, SCHEDULES)
    done = progress.epoch * steps + progress.step
    rate = settings.lr
    if settings.schedule == "step":
        rate *= settings.gamma ** sum(progress.epoch >= milestone for milestone in settings.milestones)
    elif settings.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * done / max(1, epochs * steps)))
    elif settings.schedule == "plateau":
        rate *= settings.gamma**progress.drops
    return rate * min(1.0, (done + 1) / (settings.warmup + 1))


def finished(progress: Progress, settings: Train) -> bool:
    """Whether the last epoch is done, or early stopping has ended the run."""
    patience = settings.patience
    return progress.epoch >= settings.epochs or (patience is not None and progress.stale >= patience)


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
