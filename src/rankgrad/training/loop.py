"""The training loop: it writes nothing and prints nothing.

`train` is a generator: it yields a `Step` after every step and an `Epoch` after every epoch, and whoever runs it draws bars
and writes files. Everything random is a function of (seed, epoch, step, process), so a run that is stopped anywhere and
resumed goes on as if nothing had happened.

With several processes (torchrun) each takes its share of every batch. The loss is world x local sum / count over all
processes, which averaged over processes is the gradient of one process with the whole batch.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad import kernels
from rankgrad.data.batches import Batch, Batches, batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.packed import Packed, PackedLists, packed_lists
from rankgrad.data.prefetch import prefetch_to_device
from rankgrad.training import distributed
from rankgrad.training.config import Config
from rankgrad.training.cuda_graph import GraphedStep
from rankgrad.training.data import without_zero_weights
from rankgrad.training.execution import ExecutionPlan, plan_execution
from rankgrad.training.members import MemberState
from rankgrad.training.paces import Pace, Paces, Way, work_of
from rankgrad.training.precision import usable_bfloat16
from rankgrad.training.readback import StepReports
from rankgrad.training.room import Room
from rankgrad.training.state import Epoch as Epoch, Progress, Step as Step, TrainState, learning_rate
from rankgrad.training.step import Objective
from rankgrad.training.step_rng import StepRandomness
from rankgrad.training.threads import paces_of_training, working
from rankgrad.training.warmup import compile_kernels

Objectives = dict[str, Objective]  # by name: one, or several for members


def train(
    state: TrainState | MemberState,
    objectives: Objectives,
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
    follows_load = config.train.threads == 0 and distributed.place()[1] == 1
    pace = paces_of_training(follows_load) if device.type == "cpu" else None
    with working() as work:
        events = _train(state, objectives, train_set, vali_set, config, device, stop, pace, work)
        while True:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                event = next(events, None)
            if event is None:
                return
            yield event


def _train(
    state: TrainState | MemberState,
    objectives: Objectives,
    train_set: RankingDataset,
    vali_set: RankingDataset,
    config: Config,
    device: torch.device,
    stop: Callable[[], bool],
    pace: Paces | None,
    work: Callable[[Way], None],
) -> Iterator[Step | Epoch]:
    """`pace` says how threads `work`, by what pays at the moment."""
    rank, world = distributed.place() if state.shares_lists else (0, 1)
    progress, settings = state.progress, config.train
    train_set = without_zero_weights(train_set)
    if train_set.document_weights is not None:
        _expect_weighted(objectives)
    weights = None if train_set.weights is None else torch.from_numpy(np.array(train_set.weights)).to(device)
    steps = -(-len(train_set) // settings.batch_size)
    plan = plan_execution(settings, state.model, train_set, device, world=world)
    state.plan = plan
    state.model.train()
    randomness = StepRandomness(settings.seed, rank, device)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    train_step: Any = state.make_step(objectives, train_set, weights, config, plan, amp, randomness.generator)
    with randomness.at(progress.epoch, progress.step):
        _compile_kernels(state, objectives, train_set, config, plan, device)
    step: Callable[[Any], Tensor] = train_step
    if plan.graph:
        step = GraphedStep(train_step, randomness.generators, device, required=settings.graph is True)
    # Members have rates of their own, of which the schedule gives a share.
    schedule = replace(config.optimiser, lr=1.0) if isinstance(state, MemberState) else config.optimiser
    if pace is not None:
        work(next(pace))
        room = Room()
    while not state.finished(settings):
        of_members = isinstance(state, MemberState)
        reports = StepReports(progress, settings.nonfinite, train_set, device, members=of_members)
        for batch, lists in _epoch_lists(train_set, config, progress, plan, device, rank, world):
            train_step.prepare(learning_rate(schedule, progress, steps, settings.epochs), asked=stop())
            begun, begun_at_work = time.perf_counter(), time.thread_time()
            with randomness.at(progress.epoch, progress.step), usable_bfloat16(amp):
                report = step(batch)
            if pace is not None:
                seconds, at_work = time.perf_counter() - begun, time.thread_time() - begun_at_work
                work(pace.send(Pace(seconds, _work_of(batch), at_work / seconds, room())))
            progress.step += 1
            stopping = reports.push(report, batch.queries) or (distributed.place()[1] == 1 and train_step.asked)
            if stopping:
                reports.read_all()
            yield Step(progress.epoch, progress.step, steps, reports.loss, lists, settings.epochs)
            if stopping:
                return
        reports.read_all()
        state.plan = plan.without(graph=getattr(step, "reason", ""))
        last = learning_rate(schedule, replace(progress, step=steps - 1), steps, settings.epochs)
        yield state.end_epoch(vali_set, config, device, last)


def _work_of(batch: Batch | Packed) -> float:
    return (
        work_of(batch.rows.numel()) if isinstance(batch, Packed) else work_of(batch.mask.numel(), batch.mask.shape[-1])
    )


def _expect_weighted(objectives: Objectives) -> None:
    for name, objective in objectives.items():
        if not objective.weighted:
            raise ValueError(
                f"the documents to learn from have weights, and the loss {name} takes none: it is a function of the whole ranking, "
                "of which no document is a term; choose another loss, such as softmax or lambdarank, or leave the weights out"
            )


def _compile_kernels(
    state: TrainState | MemberState,
    objectives: Objectives,
    train_set: RankingDataset,
    config: Config,
    plan: ExecutionPlan,
    device: torch.device,
) -> None:
    """Those of packed steps, unless nothing is left to do or the batches would have to be copied for it."""
    progress, settings = state.progress, config.train
    if kernels.why_none(device) or state.finished(settings) or not (plan.pack and plan.resident):
        return
    if isinstance(state, MemberState):
        return  # it has none of its own, and the first step compiles those of losses
    lists = _epoch_lists(train_set, config, progress, plan, device, rank=0, world=1)
    packed = [batch for batch, _ in lists if isinstance(batch, Packed)]
    (objective,) = objectives.values()
    compile_kernels(state.model, objective, settings, packed, train_set.features.shape[1], device)


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
        lists = packed_lists(data, size, row_multiple=plan.row_multiple, **common)
    else:
        lists = batches(data, size, rank=rank, world=world, pad="fixed" if plan.graph else "longest", **common)
    items = ((batch, lists.lists) for batch in lists)
    return items if plan.resident else prefetch_to_device(items, data, device)
