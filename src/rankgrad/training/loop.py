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

from rankgrad import kernels
from rankgrad.checks import one_of
from rankgrad.data.batches import Batch, Batches, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.packed import Packed, PackedLists, packed_lists
from rankgrad.data.prefetch import prefetch_to_device
from rankgrad.metrics import parse_metric
from rankgrad.models import rounded
from rankgrad.training.config import Config, Optimiser, Train
from rankgrad.training.cuda_graph import Captured, Compiler
from rankgrad.training.evaluate import evaluate, mean
from rankgrad.training.execution import Path, choose_path
from rankgrad.training.precision import usable_bfloat16
from rankgrad.training.step import NUMBERS, Objective, Rounded, Scored, Update, packed_scores, padded_scores
from rankgrad.training.step_rng import Randomness
from rankgrad.training.warmup import rehearse

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
    path: Path | None = None  # how it trains, once it does

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

    Queries of weight 0 are never seen. While it works `device` is the current GPU; between events the caller's is.
    """
    events = _train(learner, objective, train_set, vali_set, config, device, stop)
    while True:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            event = next(events, None)
        if event is None:
            return
        yield event


def _train(
    learner: Learner,
    objective: Objective,
    train_set: RankingDataset,
    vali_set: RankingDataset,
    config: Config,
    device: torch.device,
    stop: Callable[[], bool],
) -> Iterator[Step | Epoch]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    progress, settings = learner.progress, config.train
    train_set, weights = _weighted(train_set, device)
    steps = -(-len(train_set) // settings.batch_size)
    path = choose_path(settings, learner.model, train_set, device, steps=steps * settings.epochs, world=world)
    learner.path = path
    learner.model.train()
    randomness = Randomness(settings.seed, rank, device)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    compiler = Compiler(on=path.compile, required=settings.compile is True)
    update = _make_update(learner, objective, train_set, weights, config, path, amp, randomness.generator, compiler)
    with randomness.at(progress.epoch, progress.step):
        _compile_kernels(learner, objective, train_set, config, path, device)
    step: Callable[[Any], Tensor] = update
    if path.graph:
        step = Captured(update, randomness.generators, device, required=settings.graph is True)
    while not finished(progress, settings):
        readings = Readings(progress, settings.nonfinite, train_set, device)
        for batch, lists in _epoch_lists(train_set, config, progress, path, device, rank, world):
            update.prepare(learning_rate(config.optimiser, progress, steps, settings.epochs), asked=stop())
            with randomness.at(progress.epoch, progress.step), usable_bfloat16(amp):
                report = step(batch)
            progress.step += 1
            stopping = readings.push(report, batch.queries) or (world == 1 and update.asked)
            if stopping:
                readings.finish()
            yield Step(progress.epoch, progress.step, steps, readings.loss, lists)
            if stopping:
                return
        readings.finish()
        learner.path = path.without(compile=compiler.reason, graph=getattr(step, "reason", ""))
        yield _end_epoch(learner, vali_set, config, device, steps, rank, world)


def _compile_kernels(
    learner: Learner, objective: Objective, train_set: RankingDataset, config: Config, path: Path, device: torch.device
) -> None:
    """Those of packed steps, unless nothing is left to do or the batches would have to be copied for it."""
    progress, settings = learner.progress, config.train
    if (
        kernels.why_none(device)
        or finished(progress, settings)
        or not (path.pack and path.resident and not path.compile)
    ):
        return
    lists = _epoch_lists(train_set, config, progress, path, device, rank=0, world=1)
    packed = [batch for batch, _ in lists if isinstance(batch, Packed)]
    rehearse(learner.model, objective, settings, packed, train_set.features.shape[1], device)


def _make_update(
    learner: Learner,
    objective: Objective,
    train_set: RankingDataset,
    weights: Tensor | None,
    config: Config,
    path: Path,
    amp: torch.autocast,
    generator: torch.Generator,
    compiler: Compiler,
) -> Update:
    """The step of a run, on the path that was chosen for it."""
    model, settings, device = learner.model, config.train, generator.device
    score: Callable[[Any], Scored]
    rounding = None
    if path.pack:
        twin = rounded(model) if settings.precision == "bf16" and device.type == "cuda" else None
        rounding = None if twin is None else Rounded(model, twin)
        table = train_set.tensors(device)[:2] if path.resident else None
        exact, kernel = settings.precision == "float32", not kernels.why_none(device)
        score = packed_scores(twin or model, table, compiler, kernel=kernel, exact=exact)
    else:
        if dist.is_initialized() and dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        score = padded_scores(model, compiler)
    if path.graph:  # which reads the rate from the device
        for group in learner.optimiser.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], device=device, dtype=torch.float32)
    return Update(
        score,
        objective,
        list(model.parameters()),
        learner.optimiser,
        weights=weights,
        clip=config.optimiser.clip,
        halts=settings.nonfinite == "stop",
        amp=amp,
        generator=generator,
        rounded=rounding,
        compiler=compiler,
    )


def _epoch_lists(
    data: RankingDataset, config: Config, progress: Progress, path: Path, device: torch.device, rank: int, world: int
) -> Iterator[tuple[Batch | Packed, int]]:
    """The batches of an epoch from where the run stands, on the device, each with its number of lists over all processes."""
    size, home = config.train.batch_size, device if path.resident else torch.device("cpu")
    common: dict[str, Any] = {"list_size": config.data.list_size, "seed": config.train.seed, "epoch": progress.epoch}
    common |= {"device": home, "start": progress.step}
    lists: PackedLists | Batches
    if path.pack:
        lists = packed_lists(data, size, **common)
    else:
        lists = batches(data, size, rank=rank, world=world, pad="fixed" if path.graph else "longest", **common)
    items = ((batch, lists.lists) for batch in lists)
    return items if path.resident else prefetch_to_device(items, data, device)


class Readings:
    """What steps report, read in order: at once on a CPU, `LAG` steps later on a GPU, which so never waits for the host."""

    def __init__(self, progress: Progress, nonfinite: str, data: RankingDataset, device: torch.device) -> None:
        self.loss: float | None = None
        self._progress, self._nonfinite, self._query_ids = progress, nonfinite, data.query_ids
        self._lag = 0 if device.type == "cpu" else LAG
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Tensor, int]] = deque()

    def push(self, report: Tensor, queries: Tensor) -> bool:
        """Take a step's report, read the one that is due; True if some process asked to stop."""
        event = None
        if report.device.type == "cuda":
            report = report.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((report, event, queries, self._progress.step))
        return len(self._waiting) > self._lag and self._read()

    def finish(self) -> None:
        """Read all that is still waiting."""
        while self._waiting:
            self._read()

    def _read(self) -> bool:
        report, event, queries, step = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        (total, count, refused, stop), suspects = report[:NUMBERS].tolist(), report[NUMBERS:] > 0
        if refused and self._nonfinite == "stop":
            ids = self._query_ids[_marked(len(self._query_ids), queries, suspects.to(queries.device))].tolist()
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


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
