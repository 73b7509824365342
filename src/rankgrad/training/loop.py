"""The training loop: it writes nothing and prints nothing.

`train` is a generator: it yields a `Step` after every step and an `Epoch` after every epoch, and whoever runs it draws bars
and writes files. Everything random is a function of (seed, epoch, step, process), so a run that is stopped anywhere and
resumed goes on as if nothing had happened.

With several processes (torchrun) each takes its share of every batch. The loss is world x local sum / count over all
processes, which averaged over processes is the gradient of one process with the whole batch.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import kernels
from rankgrad.data.batches import Batch, Batches, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.packed import Packed, PackedLists, packed_lists
from rankgrad.data.prefetch import prefetch_to_device
from rankgrad.metrics import parse_metric
from rankgrad.models import bf16_twin
from rankgrad.training.config import Config
from rankgrad.training.cuda_graph import GraphedStep
from rankgrad.training.evaluate import evaluate, mean
from rankgrad.training.execution import ExecutionPlan, plan_execution
from rankgrad.training.precision import usable_bfloat16
from rankgrad.training.readback import StepReports
from rankgrad.training.state import Progress, TrainState, finished, learning_rate
from rankgrad.training.step import Bf16Shadow, Objective, ScoredBatch, TrainStep, packed_scores, padded_scores
from rankgrad.training.step_rng import StepRandomness
from rankgrad.training.warmup import compile_kernels


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
    loss: float  # mean over the lists (or documents) that counted; NaN if none did
    metric: float  # on the validation split
    best: bool
    lr: float
    skipped: int  # steps refused in this epoch
    stop: bool  # no better metric for `patience` epochs


def train(
    state: TrainState,
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
    events = _train(state, objective, train_set, vali_set, config, device, stop)
    while True:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            event = next(events, None)
        if event is None:
            return
        yield event


def _train(
    state: TrainState,
    objective: Objective,
    train_set: RankingDataset,
    vali_set: RankingDataset,
    config: Config,
    device: torch.device,
    stop: Callable[[], bool],
) -> Iterator[Step | Epoch]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    progress, settings = state.progress, config.train
    train_set, weights = _weighted(train_set, device)
    steps = -(-len(train_set) // settings.batch_size)
    plan = plan_execution(settings, state.model, train_set, device, world=world)
    state.plan = plan
    state.model.train()
    randomness = StepRandomness(settings.seed, rank, device)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    train_step = _make_step(state, objective, train_set, weights, config, plan, amp, randomness.generator)
    with randomness.at(progress.epoch, progress.step):
        _compile_kernels(state, objective, train_set, config, plan, device)
    step: Callable[[Any], Tensor] = train_step
    if plan.graph:
        step = GraphedStep(train_step, randomness.generators, device, required=settings.graph is True)
    while not finished(progress, settings):
        reports = StepReports(progress, settings.nonfinite, train_set, device)
        for batch, lists in _epoch_lists(train_set, config, progress, plan, device, rank, world):
            train_step.prepare(learning_rate(config.optimiser, progress, steps, settings.epochs), asked=stop())
            with randomness.at(progress.epoch, progress.step), usable_bfloat16(amp):
                report = step(batch)
            progress.step += 1
            stopping = reports.push(report, batch.queries) or (world == 1 and train_step.asked)
            if stopping:
                reports.read_all()
            yield Step(progress.epoch, progress.step, steps, reports.loss, lists)
            if stopping:
                return
        reports.read_all()
        state.plan = plan.without(graph=getattr(step, "reason", ""))
        yield _end_epoch(state, vali_set, config, device, steps, rank, world)


def _compile_kernels(
    state: TrainState,
    objective: Objective,
    train_set: RankingDataset,
    config: Config,
    plan: ExecutionPlan,
    device: torch.device,
) -> None:
    """Those of packed steps, unless nothing is left to do or the batches would have to be copied for it."""
    progress, settings = state.progress, config.train
    if kernels.why_none(device) or finished(progress, settings) or not (plan.pack and plan.resident):
        return
    lists = _epoch_lists(train_set, config, progress, plan, device, rank=0, world=1)
    packed = [batch for batch, _ in lists if isinstance(batch, Packed)]
    compile_kernels(state.model, objective, settings, packed, train_set.features.shape[1], device)


def _make_step(
    state: TrainState,
    objective: Objective,
    train_set: RankingDataset,
    weights: Tensor | None,
    config: Config,
    plan: ExecutionPlan,
    amp: torch.autocast,
    generator: torch.Generator,
) -> TrainStep:
    """The step of a run, executed as planned."""
    model, settings, device = state.model, config.train, generator.device
    score: Callable[[Any], ScoredBatch]
    shadow = None
    if plan.pack:
        twin = bf16_twin(model) if settings.precision == "bf16" and device.type == "cuda" else None
        shadow = None if twin is None else Bf16Shadow(model, twin)
        table = train_set.tensors(device)[:2] if plan.resident else None
        exact, kernel = settings.precision == "float32", not kernels.why_none(device)
        score = packed_scores(twin or model, table, kernel=kernel, exact=exact)
    else:
        if dist.is_initialized() and dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        score = padded_scores(model)
    if plan.graph:  # which reads the rate from the device
        for group in state.optimiser.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], device=device, dtype=torch.float32)
    return TrainStep(
        score,
        objective,
        list(model.parameters()),
        state.optimiser,
        weights=weights,
        clip=config.optimiser.clip,
        halts=settings.nonfinite == "stop",
        amp=amp,
        generator=generator,
        shadow=shadow,
    )


def _epoch_lists(
    data: RankingDataset,
    config: Config,
    progress: Progress,
    plan: ExecutionPlan,
    device: torch.device,
    rank: int,
    world: int,
) -> Iterator[tuple[Batch | Packed, int]]:
    """The batches of an epoch from where the run stands, on the device, each with its number of lists over all processes."""
    size, home = config.train.batch_size, device if plan.resident else torch.device("cpu")
    common: dict[str, Any] = {"list_size": config.data.list_size, "seed": config.train.seed, "epoch": progress.epoch}
    common |= {"device": home, "start": progress.step}
    lists: PackedLists | Batches
    if plan.pack:
        lists = packed_lists(data, size, **common)
    else:
        lists = batches(data, size, rank=rank, world=world, pad="fixed" if plan.graph else "longest", **common)
    items = ((batch, lists.lists) for batch in lists)
    return items if plan.resident else prefetch_to_device(items, data, device)


def _end_epoch(
    state: TrainState, vali_set: RankingDataset, config: Config, device: torch.device, steps: int, rank: int, world: int
) -> Epoch:
    """Evaluate on the validation split, keep the best weights, count what early stopping and plateaus go by."""
    progress, chosen_by = state.progress, parse_metric(config.train.metric)
    last = replace(progress, step=steps - 1)
    values = evaluate(state.model, vali_set, [chosen_by.name], device=device, rank=rank, world=world)
    metric = mean(values[chosen_by.name], chosen_by.empty)
    progress.epoch, progress.step = progress.epoch + 1, 0
    better = progress.best is None or metric > progress.best
    if better:
        progress.best, progress.best_epoch, progress.stale, progress.stale_since_drop = metric, progress.epoch, 0, 0
        state.best = {key: tensor.detach().clone() for key, tensor in state.model.state_dict().items()}
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
        lr=learning_rate(config.optimiser, last, steps, config.train.epochs),
        skipped=progress.skipped,
        stop=config.train.patience is not None and progress.stale >= config.train.patience,
    )
    progress.loss_sum, progress.loss_count, progress.skipped = 0.0, 0.0, 0
    return ended


def _weighted(data: RankingDataset, device: torch.device) -> tuple[RankingDataset, Tensor | None]:
    """The queries that weigh anything, and their weights [Q] on the device."""
    if data.weights is None:
        return data, None
    if not data.weights.any():
        raise ValueError("every query has weight 0; expected a weight above 0 somewhere; correct the weights")
    if not data.weights.all():
        data = data.select(data.weights > 0)
    return data, torch.from_numpy(np.array(data.weights)).to(device)
