"""What changes while a run trains: the model, its optimiser, the best weights so far, and how far the run is.

`Progress` and the tensors of `TrainState` are all there is to a run: written down and restored, it goes on as if nothing had
happened.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad import kernels
from rankgrad.checks import one_of
from rankgrad.data.dataset import RankingDataset
from rankgrad.metrics import Metric
from rankgrad.models import SharedMLP, SharedTransformer, bf16_twin
from rankgrad.training import distributed
from rankgrad.training.config import Config, Optimiser, Train
from rankgrad.training.evaluate import can_choose, evaluate, mean, metric_that_chooses, metrics_of
from rankgrad.training.execution import ExecutionPlan
from rankgrad.training.one_order import InOneOrder
from rankgrad.training.step import Bf16Shadow, Objective, ScoredBatch, TrainStep, packed_scores, padded_scores
from rankgrad.training.threads import NETWORKS

LAST_EPOCH = "last epoch, whatever validation said"
FIRST_EPOCH = "first epoch, because no validation query tells one ranking from another"
BEST_EPOCH = "best epoch by validation"
SCHEDULES = ("constant", "step", "cosine", "plateau")
OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class Step(NamedTuple):
    """After a step: where the run is, and the newest loss that has been read (None: a GPU is still at it)."""

    epoch: int  # from 0
    step: int  # steps done of this epoch
    steps: int  # of an epoch
    loss: float | None
    lists: int  # of this step, over all processes
    epochs: int  # in all, unless training stops early


class Epoch(NamedTuple):
    """After an epoch, from 1: what a line of the history holds."""

    epoch: int
    loss: float  # mean over the lists (or documents) that counted; NaN if none did
    metric: float  # on the validation split
    best: bool
    lr: float
    skipped: int  # steps refused in this epoch
    stop: bool  # no better metric for `patience` epochs


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
    metric: Metric | None = None  # that picks the epoch, if it is the caller's own
    shares_lists = True  # of several processes each takes a part of every batch

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

    def make_step(
        self,
        objectives: dict[str, Objective],
        train_set: RankingDataset,
        weights: Tensor | None,
        config: Config,
        plan: ExecutionPlan,
        amp: torch.autocast,
        generator: torch.Generator,
    ) -> TrainStep:
        """The step of a run, executed as planned."""
        (objective,) = objectives.values()
        model, settings, device = self.model, config.train, generator.device
        score: Callable[[Any], ScoredBatch]
        shadow = None
        if plan.pack:
            twin = bf16_twin(model) if settings.precision == "bf16" and device.type == "cuda" else None
            shadow = None if twin is None else Bf16Shadow(model, twin)
            table = train_set.tensors(device)[:2] if plan.resident else None
            exact, kernel = settings.precision == "float32", not kernels.why_none(device)
            score = packed_scores(twin or model, table, kernel=kernel, exact=exact)
        else:
            if distributed.place()[1] > 1:
                model = nn.parallel.DistributedDataParallel(model)
            score = padded_scores(model)
        if self._threads_vary(settings, device):
            score = InOneOrder.of(score)
        if plan.graph:  # which reads the rate from the device
            for group in self.optimiser.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], device=device, dtype=torch.float32)
        return TrainStep(
            score,
            objective,
            list(model.parameters()),
            self.optimiser,
            weights=weights,
            clip=config.optimiser.clip,
            halts=settings.nonfinite == "stop",
            amp=amp,
            generator=generator,
            shadow=shadow,
            document_weights=train_set.weight_tensor(device) if plan.resident else None,
        )

    def end_epoch(self, vali_set: RankingDataset, config: Config, device: torch.device, lr: float) -> Epoch:
        """Evaluate on the validation split, keep the best weights, count what early stopping and plateaus go by."""
        progress, chosen_by = self.progress, metric_that_chooses(config, self.metric)
        rank, world = distributed.place()
        with InOneOrder() if self._threads_vary(config.train, device) else contextlib.nullcontext():
            values = evaluate(self.model, vali_set, [chosen_by], device=device, rank=rank, world=world)
        metric = mean(values[chosen_by.name], chosen_by.empty)
        progress.epoch, progress.step = progress.epoch + 1, 0
        better = progress.best is None or metric > progress.best
        if better:
            progress.best, progress.best_epoch, progress.stale, progress.stale_since_drop = metric, progress.epoch, 0, 0
            self.best = {key: tensor.detach().clone() for key, tensor in self.model.state_dict().items()}
        else:
            progress.stale += 1
            progress.stale_since_drop += 1
            if progress.stale_since_drop >= config.optimiser.plateau:
                progress.drops, progress.stale_since_drop = progress.drops + 1, 0
        ended = Epoch(
            epoch=progress.epoch,
            loss=progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
            metric=metric,
            best=better,
            lr=lr,
            skipped=progress.skipped,
            stop=config.train.patience is not None and progress.stale >= config.train.patience,
        )
        progress.loss_sum, progress.loss_count, progress.skipped = 0.0, 0.0, 0
        return ended

    def measure(self, data: RankingDataset, metrics: Sequence[Metric], device: torch.device) -> dict[str, float]:
        """The mean of each metric for the weights of the moment."""
        values = evaluate(self.model, data, metrics, device=device) if metrics else {}
        return {metric.name: mean(values[metric.name], metric.empty) for metric in metrics}

    def result(
        self, config: Config, vali_set: RankingDataset, device: torch.device, *, choose: bool = True
    ) -> tuple[nn.Module, dict[str, Any], Callable[[Sequence[str]], dict[str, np.ndarray]]]:
        """The trained model, of the best epoch if one is to be chosen, what a report says of that, and its validation."""
        if choose and config.train.select == "best":
            self.model.load_state_dict(self.best)
            chosen_by = metric_that_chooses(config, self.metric)
            selection = BEST_EPOCH if can_choose(vali_set, chosen_by) else FIRST_EPOCH
            facts = {"selection": selection, "best_epoch": self.progress.best_epoch}
        else:
            facts = {"selection": LAST_EPOCH, "best_epoch": self.progress.epoch}

        def measured(metrics: Sequence[str]) -> dict[str, np.ndarray]:
            rank, world = distributed.place()
            return evaluate(self.model, vali_set, metrics_of(config, metrics), device=device, rank=rank, world=world)

        return self.model, facts, measured

    def _threads_vary(self, settings: Train, device: torch.device) -> bool:
        """Whether their number follows the load, which must not change what is learned."""
        return settings.threads == 0 and device.type == "cpu" and type(self.model) in NETWORKS

    def finished(self, settings: Train) -> bool:
        """Whether the last epoch is done, or early stopping has ended the run."""
        patience, progress = settings.patience, self.progress
        return progress.epoch >= settings.epochs or (patience is not None and progress.stale >= patience)


def make_optimiser(model: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """Adam or AdamW; fused, because the fused step can refuse itself on the device. Vectors of members do not decay."""
    kind = OPTIMISERS[one_of("optimiser.name", settings.name, OPTIMISERS)]
    on_gpu = next(model.parameters()).is_cuda
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if isinstance(model, SharedMLP | SharedTransformer):
        vectors = model.vectors()
        free = {id(parameter) for parameter in vectors}
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in free]},
            {"params": vectors, "weight_decay": 0.0},
        ]
    return kind(groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=True, capturable=on_gpu)


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
        begin = max(at for at in (0, *settings.restarts) if at <= progress.epoch)
        end = min(at for at in (*settings.restarts, epochs) if at > begin or at == epochs)
        rate *= 0.5 * (1 + math.cos(math.pi * (done - begin * steps) / max(1, (end - begin) * steps)))
    elif settings.schedule == "plateau":
        rate *= settings.gamma**progress.drops
    warmup = settings.warmup + settings.warmup_epochs * steps
    return rate * min(1.0, (done + 1) / (warmup + 1))


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
