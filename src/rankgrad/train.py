"""The training loop. Room 5: imports data, losses, evaluate and config; writes nothing, prints nothing.

`train` is a generator: it yields a `Step` after every step and an `Epoch` after every epoch, and whoever runs it draws bars
and writes files. Everything random is a function of (seed, epoch, step, process), so `Progress` plus the tensors of
`Learner` are all there is to a run: stopped anywhere and resumed, it goes on as if nothing had happened.

With several processes (torchrun) each takes its share of every batch. The loss is world x local sum / count of teaching
lists over all, which averaged over processes is the gradient of one process with the whole batch.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.arguments import one_of
from rankgrad.config import Config, Optimiser
from rankgrad.data.batching import Batch, batches
from rankgrad.data.dataset import RankingDataset, mix
from rankgrad.evaluate import evaluate, mean
from rankgrad.metrics import parse_metric

LAG = 8  # steps a GPU may be ahead of what the host has read of it


class Step(NamedTuple):
    """After a step: where the run is, and the newest loss that has been read (None: a GPU is still at it)."""

    epoch: int  # from 0
    step: int  # steps done of this epoch
    steps: int  # of an epoch
    loss: float | None


class Epoch(NamedTuple):
    """After an epoch, from 1: what a line of the history holds."""

    epoch: int
    loss: float
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
    loss_sum: float = 0.0  # of the current epoch
    loss_count: int = 0
    skipped: int = 0
    best: float | None = None
    best_epoch: int = 0
    stale: int = 0  # epochs since the best
    drops: int = 0  # times the plateau schedule lowered the rate
    stale_since_drop: int = 0


@dataclass
class Learner:
    """The tensors of a run: the model, its optimiser, and the best weights so far."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    best: dict[str, Tensor] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

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
        self.model.load_state_dict(_under(tensors, "model."))
        self.best = _under(tensors, "best.")
        for name, parameter in self.model.named_parameters():
            state = {
                key: tensors[f"optimiser.{key}.{name}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimiser.{key}.{name}" in tensors
            }
            if state:
                self.optimiser.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


class NonFiniteError(ValueError):
    """A step's loss or gradient was not finite; the weights are those of the step before."""


class Objective(NamedTuple):
    """A loss of scores, labels and mask -> one value per list, and the rule which lists it learns from."""

    values: Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]
    teaches: Callable[[Tensor, Tensor], Tensor]


def make_optimiser(model: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """Adam or AdamW; fused, because the fused step can refuse itself on the device."""
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds[one_of("optimiser.name", settings.name, kinds)]
    return kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)


def learning_rate(settings: Optimiser, progress: Progress, steps: int, epochs: int) -> float:
    """The rate of the next step.

    >>> learning_rate(Optimiser(milestones=(2,)), Progress(epoch=2), 10, 5)
    0.0001
    """
    one_of("optimiser.schedule", settings.schedule, ("constant", "step", "cosine", "plateau"))
    done = progress.epoch * steps + progress.step
    rate = settings.lr
    if settings.schedule == "step":
        rate *= settings.gamma ** sum(progress.epoch >= milestone for milestone in settings.milestones)
    elif settings.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * done / max(1, epochs * steps)))
    elif settings.schedule == "plateau":
        rate *= settings.gamma**progress.drops
    return rate * min(1.0, (done + 1) / (settings.warmup + 1))


def train(
    learner: Learner,
    objective: Objective,
    train_set: RankingDataset,
    vali_set: RankingDataset,
    config: Config,
    device: torch.device,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Step | Epoch]:
    """Train until the last epoch, early stopping, or `stop()` says so on any process; see the module's docstring."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    progress, settings = learner.progress, config.train
    model: nn.Module = learner.model
    if world > 1:
        model = nn.parallel.DistributedDataParallel(learner.model)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    weights = None
    if train_set.weights is not None:
        weights = torch.from_numpy(np.array(train_set.weights)).to(device)
    learner.model.train()
    while progress.epoch < settings.epochs:
        data = batches(
            train_set,
            settings.batch_size,
            list_size=config.data.list_size,
            seed=settings.seed,
            epoch=progress.epoch,
            rank=rank,
            world=world,
            device=device,
            start=progress.step,
        )
        steps, readings = progress.step + len(data), Readings(device, train_set.query_ids)
        rate = learning_rate(config.optimiser, progress, steps, settings.epochs)
        for batch in data:
            generator = _seed_step(settings.seed, progress.epoch, progress.step, rank, device)
            rate = learning_rate(config.optimiser, progress, steps, settings.epochs)
            with amp:
                scores = model(batch.features, batch.mask)
            reading = _update(learner, scores.float(), batch, objective, weights, generator, config, rate, stop())
            progress.step += 1
            stopping = readings.push(progress, reading, batch, settings.nonfinite)
            if stopping:
                readings.finish(progress, settings.nonfinite)
            yield Step(progress.epoch, progress.step, steps, readings.loss)
            if stopping:
                return
        readings.finish(progress, settings.nonfinite)
        yield _end_epoch(learner, vali_set, config, device, rate, rank, world)
        if settings.patience is not None and progress.stale >= settings.patience:
            return


def _update(
    learner: Learner,
    scores: Tensor,
    batch: Batch,
    objective: Objective,
    weights: Tensor | None,
    generator: torch.Generator,
    config: Config,
    rate: float,
    stop: bool,
) -> Tensor:
    """One step, refused on the device if anything is not finite; returns [loss, refused, stop] without reading them."""
    values = objective.values(scores, batch.labels, batch.mask, generator)
    teaches = objective.teaches(batch.labels, batch.mask)
    share = teaches.to(values.dtype) if weights is None else teaches * weights[batch.queries].to(values.dtype)
    local = (values * share).sum()
    totals = torch.stack([local.detach().double(), share.sum().double(), local.new_tensor(float(stop)).double()])
    world = 1
    if dist.is_initialized():
        world = dist.get_world_size()
        dist.all_reduce(totals)
    count = torch.where(totals[1] > 0, totals[1], 1.0)
    (world * local / count.to(local.dtype)).backward()
    limit = config.optimiser.clip
    norm = nn.utils.clip_grad_norm_(learner.model.parameters(), math.inf if limit is None else limit)
    loss = totals[0] / count
    refused = ~(loss.isfinite() & norm.isfinite())
    for group in learner.optimiser.param_groups:
        group["lr"] = rate
    # A fused optimiser leaves weights and moments alone where found_inf is set: nothing has to be asked of the device.
    learner.optimiser.found_inf = refused.float()  # type: ignore[attr-defined]
    learner.optimiser.grad_scale = None  # type: ignore[attr-defined]
    learner.optimiser.step()
    learner.optimiser.zero_grad(set_to_none=True)
    return torch.stack([loss, refused.double(), totals[2]])


class Readings:
    """What steps report, read in order: at once on a CPU, `LAG` steps later on a GPU, which so never waits for the host."""

    def __init__(self, device: torch.device, query_ids: np.ndarray) -> None:
        self.loss: float | None = None
        self._lag = 0 if device.type == "cpu" else LAG
        self._query_ids = query_ids
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Tensor, int]] = deque()

    def push(self, progress: Progress, reading: Tensor, batch: Batch, nonfinite: str) -> bool:
        """Take a step's reading, take in the one that is due; True if some process asked to stop."""
        event = None
        if reading.device.type == "cuda":
            reading = reading.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((reading, event, batch.queries, progress.step))
        return len(self._waiting) > self._lag and self._take(progress, nonfinite)

    def finish(self, progress: Progress, nonfinite: str) -> None:
        """Take in all that is still waiting."""
        while self._waiting:
            self._take(progress, nonfinite)

    def _take(self, progress: Progress, nonfinite: str) -> bool:
        reading, event, queries, step = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        loss, refused, stop = reading.tolist()
        if refused:
            if nonfinite == "stop":
                ids = self._query_ids[queries.cpu().numpy()].tolist()
                raise NonFiniteError(
                    f"the loss or gradient of step {step} in epoch {progress.epoch + 1} was not finite and the step was refused; "
                    f"look at queries {', '.join(map(str, ids))}, lower the learning rate, clip gradients, or skip such "
                    "steps with train.nonfinite = 'skip'"
                )
            progress.skipped += 1
        else:
            self.loss = loss
            progress.loss_sum += loss
            progress.loss_count += 1
        return bool(stop)


def _end_epoch(
    learner: Learner, vali_set: RankingDataset, config: Config, device: torch.device, rate: float, rank: int, world: int
) -> Epoch:
    """Judge on the validation split, keep the best weights, count what early stopping and plateaus go by."""
    progress, name = learner.progress, config.train.metric
    values = evaluate(learner.model, vali_set, [name], device=device, rank=rank, world=world)[name]
    if world > 1:
        shared = torch.from_numpy(values).to(device)
        dist.all_reduce(shared)
        values = shared.cpu().numpy()
    metric = mean(values, parse_metric(name).func.__kwdefaults__["empty"])  # type: ignore[attr-defined]
    progress.epoch, progress.step = progress.epoch + 1, 0
    better = progress.best is None or metric > progress.best
    if better:
        progress.best, progress.best_epoch, progress.stale, progress.stale_since_drop = metric, progress.epoch, 0, 0
        learner.best = {key: tensor.detach().clone() for key, tensor in learner.model.state_dict().items()}
    else:
        progress.stale += 1
        progress.stale_since_drop += 1
        if progress.stale_since_drop >= config.optimiser.plateau:
            progress.drops, progress.stale_since_drop = progress.drops + 1, 0
    loss = progress.loss_sum / progress.loss_count if progress.loss_count else math.nan
    patience = config.train.patience
    record = Epoch(
        epoch=progress.epoch,
        loss=loss,
        metric=metric,
        best=better,
        lr=rate,
        skipped=progress.skipped,
        stop=patience is not None and progress.stale >= patience,
    )
    progress.loss_sum, progress.loss_count, progress.skipped = 0.0, 0, 0
    return record


def _seed_step(seed: int, epoch: int, step: int, rank: int, device: torch.device) -> torch.Generator:
    """Make dropout and the losses' noise functions of where the run is: returns the losses' generator."""
    key = torch.tensor(seed, dtype=torch.int64)
    for number in (epoch, step, rank):
        key = mix(key + 1 + number)
    number = int(key) & (2**63 - 1)
    torch.manual_seed(number)
    return torch.Generator(device).manual_seed(number ^ 1)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
