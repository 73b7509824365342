"""The training loop. Room 5: imports data, losses, evaluate and config; writes nothing, prints nothing.

`train` is a generator: it yields a `Step` after every step and an `Epoch` after every epoch, and whoever runs it draws bars
and writes files. Everything random is a function of (seed, epoch, step, process), so `Progress` plus the tensors of
`Learner` are all there is to a run: stopped anywhere and resumed, it goes on as if nothing had happened.

With several processes (torchrun) each takes its share of every batch. The loss is world x local sum / count of teaching
lists over all, which averaged over processes is the gradient of one process with the whole batch.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.arguments import one_of
from rankgrad.config import Config, Optimiser, Train
from rankgrad.data.batching import Batch, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.randomness import mix
from rankgrad.evaluate import evaluate, mean
from rankgrad.metrics import parse_metric
from rankgrad.numerics import usable_bfloat16

LAG = 8  # steps a GPU may be ahead of what the host has read of it
SCHEDULES = ("constant", "step", "cosine", "plateau")
OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class Step(NamedTuple):
    """After a step: where the run is, and the newest loss that has been read (None: a GPU is still at it)."""

    epoch: int  # from 0
    step: int  # steps done of this epoch
    steps: int  # of an epoch
    loss: float | None
    lists: int  # of this step, over all processes


class Epoch(NamedTuple):
    """After an epoch, from 1: what a line of the history holds."""

    epoch: int
    loss: float  # mean over the lists that taught; NaN if none did
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
    loss_count: float = 0.0  # lists that taught, by weight
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
    kind = OPTIMISERS[one_of("optimiser.name", settings.name, OPTIMISERS)]
    return kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)


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
    """Train until the last epoch, early stopping, or `stop()` says so on any process; see the module's docstring.

    Queries of weight 0 are never seen.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    progress, settings = learner.progress, config.train
    train_set, weights = _weighted(train_set, device)
    model: nn.Module = learner.model
    if world > 1:
        model = nn.parallel.DistributedDataParallel(learner.model)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    learner.model.train()
    while not finished(progress, settings):
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
        steps, readings = progress.step + len(data), Readings(progress, settings.nonfinite, train_set, device)
        for batch in data:
            rate = learning_rate(config.optimiser, progress, steps, settings.epochs)
            with _seeded(settings.seed, progress.epoch, progress.step, rank, device) as generator, usable_bfloat16(amp):
                with amp:
                    scores = model(batch.features, batch.mask)
                report = _update(learner, scores.float(), batch, objective, weights, generator, config, rate, stop())
            progress.step += 1
            stopping = readings.push(report, batch)
            if stopping:
                readings.finish()
            yield Step(progress.epoch, progress.step, steps, readings.loss, data.lists)
            if stopping:
                return
        readings.finish()
        yield _end_epoch(learner, vali_set, config, device, steps, rank, world)


class Report(NamedTuple):
    """What a step leaves on the device, to be read later."""

    numbers: Tensor  # [4] float64: sum of the lists' losses, sum of their weights, whether refused, whether to stop
    suspects: Tensor  # [B] bool: lists of this process whose loss or gradient is not finite


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
) -> Report:
    """One step, refused on the device if anything is not finite; nothing is read back here."""
    scores.retain_grad()
    values = objective.values(scores, batch.labels, batch.mask, generator)  # [B]
    share = objective.teaches(batch.labels, batch.mask).to(values.dtype)
    if weights is not None:
        share = share * weights[batch.queries].to(values.dtype)
    local = (values * share).sum()  # a list of share 0 is 0, or NaN if its loss is
    asked = torch.full((), float(stop), dtype=torch.float64, device=local.device)  # a fill, where a copy would stall
    totals = torch.stack([local.detach().double(), share.sum().double(), asked])
    world = 1
    if dist.is_initialized():
        world = dist.get_world_size()
        dist.all_reduce(totals)
    count = torch.where(totals[1] > 0, totals[1], 1.0)
    (world * local / count.to(local.dtype)).backward()
    parameters = [p for p in learner.model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if config.optimiser.clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, config.optimiser.clip, norm)
    refused = ~(totals[0].isfinite() & norm.isfinite())
    for group in learner.optimiser.param_groups:
        group["lr"] = rate
    # A fused optimiser leaves weights and moments alone where found_inf is set: nothing has to be asked of the device.
    learner.optimiser.found_inf = refused.float()  # type: ignore[attr-defined]
    learner.optimiser.grad_scale = None  # type: ignore[attr-defined]
    learner.optimiser.step()
    learner.optimiser.zero_grad(set_to_none=True)
    assert scores.grad is not None
    suspects = ~(values.detach().isfinite() & scores.grad.isfinite().flatten(1).all(1))
    return Report(torch.stack([totals[0], totals[1], refused.double(), totals[2]]), suspects)


class Readings:
    """What steps report, read in order: at once on a CPU, `LAG` steps later on a GPU, which so never waits for the host."""

    def __init__(self, progress: Progress, nonfinite: str, data: RankingDataset, device: torch.device) -> None:
        self.loss: float | None = None
        self._progress, self._nonfinite, self._query_ids = progress, nonfinite, data.query_ids
        self._lag = 0 if device.type == "cpu" else LAG
        self._waiting: deque[tuple[Report, torch.cuda.Event | None, Tensor, int]] = deque()

    def push(self, report: Report, batch: Batch) -> bool:
        """Take a step's report, read the one that is due; True if some process asked to stop."""
        event = None
        if report.numbers.device.type == "cuda":
            report = report._replace(numbers=report.numbers.to("cpu", non_blocking=True))
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((report, event, batch.queries, self._progress.step))
        return len(self._waiting) > self._lag and self._read()

    def finish(self) -> None:
        """Read all that is still waiting."""
        while self._waiting:
            self._read()

    def _read(self) -> bool:
        report, event, queries, step = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        total, count, refused, stop = report.numbers.tolist()
        if refused and self._nonfinite == "stop":
            ids = self._query_ids[_marked(len(self._query_ids), queries, report.suspects)].tolist()
            more = f" and {len(ids) - 100} more" if len(ids) > 100 else ""
            raise NonFiniteError(
                f"the loss or gradient of step {step} in epoch {self._progress.epoch + 1} was not finite and the step was "
                f"refused; look at {'query' if len(ids) == 1 else 'queries'} {', '.join(map(str, ids[:100]))}{more}, "
                "lower the learning rate, clip gradients, or skip such steps with train.nonfinite = 'skip'"
            )
        if refused:
            self._progress.skipped += 1
        else:
            self.loss = total / count if count else self.loss
            self._progress.loss_sum += total
            self._progress.loss_count += count
        return bool(stop)


def _marked(size: int, queries: Tensor, suspects: Tensor) -> np.ndarray:
    """Positions of the lists that spoilt a step, over all processes; all lists of the step if none did by itself."""
    for chosen in (queries[suspects], queries):
        marks = torch.zeros(size, device=queries.device)
        marks[chosen] = 1.0
        if dist.is_initialized():
            dist.all_reduce(marks)
        if bool(marks.any()):
            break
    return np.flatnonzero(marks.cpu().numpy())


def _end_epoch(
    learner: Learner, vali_set: RankingDataset, config: Config, device: torch.device, steps: int, rank: int, world: int
) -> Epoch:
    """Judge on the validation split, keep the best weights, count what early stopping and plateaus go by."""
    progress, name = learner.progress, config.train.metric
    last = replace(progress, step=steps - 1)
    values = evaluate(learner.model, vali_set, [name], device=device, rank=rank, world=world)[name]
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
    record = Epoch(
        epoch=progress.epoch,
        loss=progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
        metric=metric,
        best=better,
        lr=learning_rate(config.optimiser, last, steps, config.train.epochs),
        skipped=progress.skipped,
        stop=config.train.patience is not None and progress.stale >= config.train.patience,
    )
    progress.loss_sum, progress.loss_count, progress.skipped = 0.0, 0.0, 0
    return record


def _weighted(data: RankingDataset, device: torch.device) -> tuple[RankingDataset, Tensor | None]:
    """The queries that weigh anything, and their weights [Q] on the device."""
    if data.weights is None:
        return data, None
    if not data.weights.any():
        raise ValueError("every query has weight 0; expected a weight above 0 somewhere; mend the weights")
    if not data.weights.all():
        data = data.select(data.weights > 0)
    return data, torch.from_numpy(np.array(data.weights)).to(device)


@contextlib.contextmanager
def _seeded(seed: int, epoch: int, step: int, rank: int, device: torch.device) -> Iterator[torch.Generator]:
    """Make dropout and the losses' noise functions of where the run is: gives the losses' generator.

    torch's own random state is the caller's again afterwards.
    """
    key = torch.tensor(seed, dtype=torch.int64)
    for number in (epoch, step, rank):
        key = mix(key + 1 + number)
    number = int(key) & (2**63 - 1)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        yield torch.Generator(device).manual_seed(number ^ 1)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
