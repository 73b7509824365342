"""Training into a run folder, and scoring with a finished one.

Under torchrun every process calls `train_run`; the first alone touches the folder and sends the others what it says, so that
they need not see it. The first process of each machine reads the data and shares what it made of it with the others there.
"""

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import check_source, read_lists
from rankgrad.errors import InterruptedRunError, NonFiniteError
from rankgrad.files import pack, unpack
from rankgrad.ranker import Ranker
from rankgrad.runs import folder as files
from rankgrad.runs.provenance import versions
from rankgrad.training import distributed
from rankgrad.training.build import OwnLoss, as_spec, fit_to_data, make_device, make_objectives, make_state, validate
from rankgrad.training.config import Config, dumps, loads, replaced
from rankgrad.training.data import ScaledSplits, columns_of, shared_splits, without_zero_weights
from rankgrad.training.distributed import Signals, lost_a_process
from rankgrad.training.evaluate import evaluate, evaluate_and_score, score
from rankgrad.training.loop import Epoch, Step, train
from rankgrad.training.members import MemberState
from rankgrad.training.precision import threads_and_precision
from rankgrad.training.state import TrainState


class Started(NamedTuple):
    """The first event of `train_run`: the folder is there and the configuration is known."""

    folder: Path
    config: Config


class Finished(NamedTuple):
    """The last event of `train_run`, in the first process: everything is written; what report.json holds."""

    report: dict[str, Any]


Event = Started | Step | Epoch | Finished
SplitReader = Callable[[Config, Path, int], ScaledSplits]  # of the configuration, the run's folder, the processes


def train_run(
    folder: Path, config: Config | None = None, *, loss: OwnLoss = None, read: SplitReader = shared_splits
) -> Iterator[Event]:
    """Train a run to its end, yielding what happens; writes as it goes.

    - `folder`: of the run. With a `config` it must be new; without one the run in it goes on from where it stands.
    - `loss`: a loss of your own, a `LossSpec` or a function, in place of the configuration's; to be given again on resuming.
    - `read`: gives its lists; whoever trains many runs on the same lists need not read them again for each.

    SIGTERM and Ctrl-C let the current step finish, save, and raise `InterruptedRunError`; so does the loss of another
    process of the run. A new run that fails before it has learned anything leaves no folder behind.
    """
    with Signals(folder) as signals, distributed.process_group() as (rank, world):
        started = distributed.from_first(lambda: begin_run(folder, config, loss), _sent, _received)
        signals.listen()  # not before: nothing interrupts the wait for the other processes
        fresh, (folder, config) = config is not None, started
        try:
            yield started
            with threads_and_precision(config.train.threads, config.train.precision):
                yield from _train_run(config, folder, rank, world, signals, loss, read)
        except (InterruptedRunError, NonFiniteError, GeneratorExit):
            raise
        except Exception as error:
            if world > 1 and isinstance(error, RuntimeError) and lost_a_process(error):
                raise InterruptedRunError(
                    "another process of the run ended, and its own message says why; what was learned is saved; go on with: "
                    f"rankgrad train --resume {folder}"
                ) from error
            if fresh and rank == 0:
                files.discard_unlearned(folder)
            raise
        finally:
            signals.patient = True


def begin_run(folder: Path, config: Config | None, loss: OwnLoss) -> Started:
    """Make the folder of a new run, or look at that of one to resume."""
    if config is None:
        config = files.read_config(folder)
        if files.is_finished(folder):
            raise ValueError(f"the run {folder} is finished; there is nothing to resume")
        for stray in folder.glob(".scaled-*"):  # of processes that were killed while they read
            shutil.rmtree(stray)
        return Started(folder, config)
    if loss is not None:
        _, at, depth = config.loss.names[0].partition("@")
        config = replaced(config, "loss.name", f"{as_spec(loss).name}{at}{depth}")
    config = validate(config, loss)
    source = config.data.path
    if files.is_run(source):
        raise ValueError(f"{source} is a run; expected lists to train on; name them, or go on with the run by --resume")
    check_source(source, fold=config.data.fold)
    if Path(source).exists():  # so that the run can be resumed from any working directory
        config = replaced(config, "data.path", os.path.abspath(source))
    files.make_folder(folder, config)
    return Started(folder, config)


def _sent(started: Started) -> bytes:
    return json.dumps([str(started.folder), dumps(started.config)]).encode()


def _received(content: bytes) -> Started:
    folder, config = json.loads(content)
    return Started(Path(folder), loads(config, f"the configuration of {folder}"))


def _train_run(
    config: Config, folder: Path, rank: int, world: int, signals: Signals, loss: OwnLoss, read: SplitReader
) -> Iterator[Step | Epoch | Finished]:
    device = make_device(config.train.device)
    versions()  # asks for the commit now, not when something else may have been checked out
    splits, scaling, fingerprint = read(config, folder, world)
    if rank == 0 and "test" in splits and files.kept_split(splits) != "test":
        print(
            f"no query in the test split of {config.data.path} has a relevant document: the run is judged by validation alone",
            file=sys.stderr,
        )
    config = _fitted_to_data(config, folder, splits, device, rank)
    train_set = splits["train"]
    if config.members.bag > 1:  # every query teaches some members and validates others
        parts = [splits[name] for name in ("train", "vali") if name in splits]
        train_set = splits["vali"] = without_zero_weights(RankingDataset.concatenate(parts))
    vali_set = splits["vali"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        state = make_state(config, train_set, device, loss)
    record = _Record(folder, config, state, fingerprint, writes=rank == 0)
    record.restore()
    signals.patient = True
    objectives = make_objectives(config, loss)
    loop = train(state, objectives, train_set, vali_set, config, device, stop=lambda: signals.received)
    try:
        for event in loop:
            if isinstance(event, Epoch):
                record.add(event)
            yield event
    except RuntimeError as error:
        if world > 1 and lost_a_process(error):
            record.save()  # the step that failed has changed nothing
        raise
    record.close()
    if not state.finished(config.train):
        record.save()
        distributed.barrier()
        raise InterruptedRunError(
            f"stopped in epoch {state.progress.epoch + 1} and saved; go on with: rankgrad train --resume {folder}"
        )
    signals.stop_at_once()
    model, selected, on_validation = state.result(config, vali_set, device)
    ranker = Ranker.of(model, scaling, config, splits["train"], device, loss)
    results, kept, scores = {}, files.kept_split(splits), None
    for split, metrics in files.metrics_to_measure(splits, config.train.metrics).items():
        where: dict[str, Any] = {"device": device, "rank": rank, "world": world}
        if split == "vali":
            results[split] = on_validation(metrics)
        elif split == kept:
            results[split], scores = evaluate_and_score(model, splits[split], metrics, **where)
        else:
            results[split] = evaluate(model, splits[split], metrics, **where)
    if rank == 0:
        if kept == "vali" and config.members.bag == 1:  # bagged members are measured each on its own queries
            scores = score(model, vali_set, device=device)
        files.write_ranker(folder, ranker)
        facts = {
            "loss": config.loss.title,
            "data": config.data.path,
            "seed": config.train.seed,
            **selected,
            "epochs": state.progress.epoch,
            "seconds": round(record.seconds(), 3),
            "processes": world,
            "execution": state.plan._asdict() if state.plan else None,  # None: resumed after its last epoch
        }
        settings = config.train
        report = files.write_results(
            folder, splits, results, settings.metrics, facts, device=device, threads=settings.threads, scores=scores
        )
        yield Finished({"run": str(folder), **report})
    del loop
    gc.collect()
    distributed.barrier()


def _fitted_to_data(
    config: Config, folder: Path, splits: dict[str, RankingDataset], device: torch.device, rank: int
) -> Config:
    """The configuration with what it leaves to the data filled in, written down for a resumption."""
    fitted = fit_to_data(config, splits["train"], device, validated="vali" in splits)
    if fitted.members.bag == 1 and "vali" not in splits:  # too few queries to bag: nothing is held out, nothing chosen
        splits["vali"] = splits["train"]
        fitted = replaced(fitted, "train.select", "last")
    if fitted != config and rank == 0:
        files.rewrite_config(folder, fitted)
    return fitted


class _Record:
    """What a run writes while it trains: checkpoints, the history, TensorBoard's events. One process writes, the others do not."""

    def __init__(
        self, folder: Path, config: Config, state: TrainState | MemberState, fingerprint: str, *, writes: bool
    ) -> None:
        self._folder, self._config, self._state, self._fingerprint, self._writes = (
            folder, config, state, fingerprint, writes,
        )  # fmt: skip
        self._checkpoints, self._history = files.Checkpoints(folder), files.HistoryFile(folder)
        self._board: Any = None
        self._spent, self._started = 0.0, time.perf_counter()

    def restore(self) -> None:
        """Go on from the newest good checkpoint, in every process; from the start if there is none."""
        content = distributed.broadcast_bytes(self._newest() if self._writes else b"")
        if content:
            tensors, facts = unpack(content, f"the checkpoint of {self._folder}")
            self._spent = facts.pop("seconds")
            if facts.pop("data") != self._fingerprint:
                raise ValueError(
                    f"the data of {self._folder} changed since the run began; expected the same lists; start a new run"
                )
            self._state.restore(tensors, facts)
        if self._writes:
            self._history.cut(self._state.progress.epoch)
            if self._config.train.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(self._folder / "tensorboard", purge_step=self._state.progress.epoch + 1)
        self._started = time.perf_counter()

    def _newest(self) -> bytes:
        if not self._checkpoints.exist():
            return b""
        tensors, facts, complaints = self._checkpoints.load()
        for complaint in complaints:
            print(f"{complaint}; going on from the checkpoint before it", file=sys.stderr)
        return pack(tensors, facts)

    def seconds(self) -> float:
        """Spent on this run, before interruptions too."""
        return self._spent + time.perf_counter() - self._started

    def add(self, epoch: Epoch) -> None:
        """Write an epoch down, and a checkpoint."""
        if self._writes:
            self._history.add(epoch._asdict() | {"seconds": round(self.seconds(), 3)})
            if self._board is not None:
                self._board.add_scalar("loss", epoch.loss, epoch.epoch)
                self._board.add_scalar(self._config.train.metric, epoch.metric, epoch.epoch)
        self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        tensors = self._state.tensors()  # in every process: members are gathered for it
        if self._writes:
            facts = {"seconds": self.seconds(), "data": self._fingerprint}
            self._checkpoints.save(tensors, self._state.facts() | facts)

    def close(self) -> None:
        """No more events."""
        if self._board is not None:
            self._board.close()


class ScoringRun(Protocol):
    """A finished run, ready to score lists: of networks (`Run`) or of trees (`rankgrad.runs.trees.TreeRun`)."""

    @property
    def folder(self) -> Path:
        """Where it lies."""

    @property
    def config(self) -> Config:
        """What it was trained with."""

    @property
    def features(self) -> int:
        """How many columns a document has."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """What they are called."""

    def read(self, source: str, *, split: str = "test", labelled: bool = True) -> RankingDataset:
        """Lists of the width this model expects, as they are in the source; `labelled`: as in `read_lists`."""

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""


def read_for(run: ScoringRun, source: str, *, split: str, labelled: bool) -> RankingDataset:
    """`ScoringRun.read` of any run."""
    if files.is_run(source):
        raise ValueError(f"{source} is a run; expected DATA, the lists it is to rank, after the runs; name them last")
    data = run.config.data
    return read_lists(
        source,
        split=split,
        fold=data.fold,
        features=run.features,
        names=run.names,
        labelled=labelled,
        columns=columns_of(data)._replace(weight=None),  # weights are for learning
    )


@dataclass(frozen=True)
class Run:
    """A finished run of networks, ready to score lists."""

    folder: Path
    ranker: Ranker

    @classmethod
    def open(cls, folder: Path, device: str = "auto") -> "Run":
        """Load a run; no code from the folder is executed."""
        return cls(folder, files.read_ranker(folder, device))

    @property
    def config(self) -> Config:
        """What it was trained with."""
        return self.ranker.config

    @property
    def features(self) -> int:
        """How many columns a document has."""
        return self.ranker.features

    @property
    def names(self) -> tuple[str, ...] | None:
        """What they are called."""
        return self.ranker.names

    def read(self, source: str, *, split: str = "test", labelled: bool = True) -> RankingDataset:
        """Lists of the width this model expects, as they are in the source; `labelled`: as in `read_lists`."""
        return read_for(self, source, split=split, labelled=labelled)

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        return self.ranker.score_lists(data)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        return self.ranker.evaluate(data, metrics or self.config.train.metrics)
