"""Runs: from a configuration to a run directory, and back. Room 5, its last floor.

A run directory is the whole truth of a run:

    config.toml           the configuration, complete
    history.jsonl         a line per epoch
    model.safetensors     the best weights, the feature scaling, and what is needed to use them
    report.json           metrics of every split under every rule for empty queries; seed, versions, machine, seconds
    queries.safetensors   per query of the split that was judged: metrics, NDCG@k by k, list length, relevant documents
    checkpoint*.safetensors   where to go on after an interruption
    tensorboard/          the curves again, if asked for

Under torchrun every process calls `begin` and `advance`; the first alone writes there, and tells the others what the folder
says, so that they need not see it. The first process of each machine reads the data and lends the others what it made of it.
"""

import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rankgrad.training import distributed as processes
from rankgrad.files import (
    Rotation,
    load_tensors,
    pack,
    save_tensors,
    unpack,
    write_atomically,
)
from rankgrad.training.config import Config, dumps, load, loads
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import Scaling
from rankgrad.data.load import Columns, check_source, read_lists
from rankgrad.training.evaluate import decides, evaluate, score
from rankgrad.training.precision import threads_and_precision
from rankgrad.training.distributed import InterruptedRunError as InterruptedRunError  # raised by `advance`
from rankgrad.runs.provenance import FIRST_EPOCH, LAST_EPOCH, judged, record, versions, wanted, without_nan
from rankgrad.training.build import make_device, make_model, make_objective, parse_loss, resolve
from rankgrad.training.data import ScaledSplits, scaled, shared_splits
from rankgrad.training.loop import Epoch, Learner, Step, finished, make_optimiser, train

# --- training a run ---------------------------------------------------------------------------------------------------


def begin(config: Config, out: Path) -> None:
    """Make a run directory; nothing that exists is touched. Under torchrun the first process makes it."""
    config = resolve(config)
    if _is_run(config.data.path):
        raise ValueError(
            f"{config.data.path} is a run; expected lists to train on; name them, or go on with the run by --resume"
        )
    check_source(config.data.path, fold=config.data.fold)
    if Path(config.data.path).exists():  # so that the run goes on from any folder
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, path=os.path.abspath(config.data.path))
        )
    if processes.rank() > 0:
        return
    if out.exists() and (not out.is_dir() or any(path.suffix != ".writing" for path in out.iterdir())):
        raise ValueError(f"{out} exists already; expected a new folder; choose another --out, or --resume {out}")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "config.toml", dumps(config).encode())


SplitReader = Callable[[Config, Path, int], ScaledSplits]  # of the configuration, the run's folder, the processes


def advance(out: Path, *, read: SplitReader = shared_splits) -> Iterator[Step | Epoch]:
    """Train the run in a directory from where it stands to its end, yielding what happens; writes as it goes.

    `read` gives its lists; whoever trains many runs on the same lists need not read them again for each.
    SIGTERM and Ctrl-C let the current step finish, save, and raise `InterruptedRunError`; so does the loss of another
    process of the run.
    """
    words = b""
    if processes.rank() == 0:
        config_file = out / "config.toml"
        if not config_file.is_file():
            raise ValueError(f"{out} is not a run: it has no config.toml; expected a folder that `rankgrad train` made")
        if (out / "report.json").exists():
            raise ValueError(f"the run {out} is finished; there is nothing to resume")
        load(config_file)  # before joining: a process that fails alone leaves the others waiting
        words = config_file.read_bytes()
        if not words.strip():
            raise ValueError(
                f"{config_file} is empty; expected the configuration that the run was begun with; put a copy of it back, or "
                "start a new run"
            )
        for stray in out.glob(".scaled-*"):  # of processes that were killed while they read
            shutil.rmtree(stray)
    # Signals are handled once all have met, because nothing interrupts that wait, and until they have parted.
    with processes.Signals(out) as signals, processes.joined() as (rank, world):
        signals.listen()
        try:
            config = loads(processes.told_by_first(words).decode(), str(out / "config.toml"))
            with threads_and_precision(config.train.threads, config.train.precision):
                yield from _advance(config, out, rank, world, signals, read)
        except RuntimeError as error:
            if world == 1 or not _lost_a_process(error):
                raise
            raise InterruptedRunError(
                "another process of the run ended, and its own message says why; what was learned is saved; go on with: "
                f"rankgrad train --resume {out}"
            ) from error
        finally:
            signals.patient = True


def _advance(
    config: Config, out: Path, rank: int, world: int, signals: processes.Signals, read: SplitReader
) -> Iterator[Step | Epoch]:
    device = make_device(config.train.device)
    versions()  # asks for the commit now, not when something else may have been checked out
    splits, scaling, fingerprint = read(config, out, world)
    if rank == 0 and "test" in splits and judged(splits) != "test":
        print(
            f"no query in the test split of {config.data.path} has a relevant document: the run is judged by validation alone",
            file=sys.stderr,
        )
    train_set = splits["train"]
    units = max(1, int(train_set.labels.max())) if parse_loss(config.loss.name)[0] == "ordinal" else 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = make_model(config.model, train_set.features.shape[1], units, config.loss.name).to(device)
    learner = Learner(model, make_optimiser(model, config.optimiser))
    rotation, journal = Rotation(out), Journal(out / "history.jsonl")
    spent = 0.0
    state = processes.told_by_first(_checkpoint(rotation) if rank == 0 else b"")
    if state:
        tensors, facts = unpack(state, f"the checkpoint of {out}")
        spent = facts.pop("seconds")
        if facts.pop("data") != fingerprint:
            raise ValueError(f"the data of {out} changed since the run began; expected the same lists; start a new run")
        learner.restore(tensors, facts)
    board = None
    if rank == 0:
        journal.cut(learner.progress.epoch)
        board = _tensorboard(out, learner.progress.epoch) if config.train.tensorboard else None
    started = time.perf_counter()

    def seconds() -> float:
        return spent + time.perf_counter() - started

    def save() -> None:
        if rank == 0:
            rotation.save(learner.tensors(), learner.facts() | {"seconds": seconds(), "data": fingerprint})

    signals.patient = True
    loop = train(
        learner, make_objective(config), train_set, splits["vali"], config, device, stop=lambda: signals.received
    )
    try:
        for event in loop:
            if isinstance(event, Epoch):
                if rank == 0:
                    journal.add(event._asdict() | {"seconds": round(seconds(), 3)})
                    if board is not None:
                        board.add_scalar("loss", event.loss, event.epoch)
                        board.add_scalar(config.train.metric, event.metric, event.epoch)
                save()
            yield event
    except RuntimeError as error:
        if world > 1 and _lost_a_process(error):
            save()  # the step that failed has changed nothing
        raise
    if board is not None:
        board.close()
    if not finished(learner.progress, config.train):
        save()
        processes.wait_for_all()
        raise InterruptedRunError(
            f"stopped in epoch {learner.progress.epoch + 1} and saved; go on with: rankgrad train --resume {out}"
        )
    signals.impatient()
    if config.train.select == "best":
        model.load_state_dict(learner.best)
    results = {
        split: evaluate(model, splits[split], metrics, device=device, rank=rank, world=world)
        for split, metrics in wanted(splits, config.train.metrics).items()
    }
    if rank == 0:
        best = config.train.select == "best"
        facts = {
            "selection": _selection(splits["vali"], config.train.metric) if best else LAST_EPOCH,
            "best_epoch": learner.progress.best_epoch if best else learner.progress.epoch,
            "epochs": learner.progress.epoch,
            "seconds": round(seconds(), 3),
            "processes": world,
            "path": learner.path._asdict() if learner.path else None,  # None: resumed after its last epoch
        }
        _finish(out, config, model, units, scaling, splits, results, device, facts)
    del loop
    gc.collect()
    processes.wait_for_all()


def _selection(validation: RankingDataset, metric: str) -> str:
    return "best epoch by validation" if decides(validation, metric) else FIRST_EPOCH


def _finish(
    out: Path,
    config: Config,
    model: nn.Module,
    units: int,
    scaling: Scaling,
    splits: dict[str, RankingDataset],
    results: dict[str, dict[str, np.ndarray]],
    device: torch.device,
    facts: dict[str, Any],
) -> None:
    """Write the model, the per-query metrics and, last, the report: its presence means the run is finished."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"scaling.{name}": torch.from_numpy(np.array(value)) for name, value in scaling.to_state().items()}
    width, names = splits["train"].features.shape[1], splits["train"].feature_names
    save_tensors(out / "model.safetensors", tensors, {"features": width, "units": units, "feature_names": names})
    facts = {"loss": config.loss.name, "data": config.data.path, "seed": config.train.seed, **facts}
    record(out, splits, results, config.train.metrics, facts, device=device, threads=config.train.threads)


# --- using a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run, ready to score lists."""

    folder: Path
    config: Config
    model: nn.Module
    scaling: Scaling
    features: int
    device: torch.device
    feature_names: tuple[str, ...] | None = None

    @classmethod
    def open(cls, folder: Path, device: str = "auto") -> "Run":
        """Load a run; no code from the folder is executed."""
        if (folder / "trees.json").is_file():
            raise ValueError(
                f"{folder} holds trees of another library, and they score with that library alone; expected a run of "
                "`rankgrad train`; load its model file yourself, or use `rankgrad compare` and `rankgrad report`"
            )
        for name in ("model.safetensors", "config.toml"):
            if not (folder / name).is_file():
                state = "has not finished" if (folder / "config.toml").is_file() else "is not a run"
                raise ValueError(
                    f"{folder} {state}: it has no {name}; expected a folder that `rankgrad train` finished"
                )
        config = load(folder / "config.toml")
        tensors, facts = load_tensors(folder / "model.safetensors", "; put a copy of it back, or train the run again")
        with torch.random.fork_rng(devices=[]):  # a fresh model draws its start
            model = make_model(config.model, facts["features"], facts["units"], config.loss.name)
        try:
            model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        except RuntimeError:
            raise ValueError(
                f"{folder / 'model.safetensors'} does not fit [model] of {folder / 'config.toml'}; "
                "expected them as training wrote them; was one of them changed?"
            ) from None
        scaling = Scaling.from_state(
            {k.removeprefix("scaling."): v.numpy() for k, v in tensors.items() if k.startswith("scaling.")}
        )
        place = make_device(device)
        names = None if facts["feature_names"] is None else tuple(facts["feature_names"])
        return cls(folder, config, model.to(place).eval(), scaling, facts["features"], place, names)

    def read(self, source: str, *, split: str = "test", labelled: bool = True) -> RankingDataset:
        """Lists of the width this model expects, as they are in the source; `labelled`: as in `read_lists`."""
        if _is_run(source):
            raise ValueError(
                f"{source} is a run; expected DATA, the lists it is to rank, after the runs; name them last"
            )
        return read_lists(
            source,
            split=split,
            fold=self.config.data.fold,
            features=self.features,
            names=self.feature_names,
            labelled=labelled,
            columns=Columns(self.config.data.label, self.config.data.qid),  # weights are for learning
        )

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        return score(self.model, scaled(data, self.scaling), device=self.device)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        return evaluate(
            self.model, scaled(data, self.scaling), metrics or self.config.train.metrics, device=self.device
        )


def _is_run(source: str) -> bool:
    """Whether a folder is a run; a config.toml alone may lie beside lists too."""
    folder = Path(source)
    return (folder / "config.toml").is_file() and any(
        (folder / name).is_file() for name in ("history.jsonl", "model.safetensors")
    )


# --- what a run writes while it goes on, and its machine ---------------------------------------------------------------


class Journal:
    """history.jsonl: a line per epoch, rewritten whole, because a line that was cut short helps nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def cut(self, epochs: int) -> None:
        """Keep the lines of the first epochs, which the checkpoint knows of."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._lines = lines[:epochs]
        self._write()

    def add(self, line: dict[str, Any]) -> None:
        """Add an epoch."""
        self._lines.append(json.dumps(without_nan(line)))
        self._write()

    def _write(self) -> None:
        write_atomically(self._path, "".join(f"{line}\n" for line in self._lines).encode())


def _checkpoint(rotation: Rotation) -> bytes:
    """The newest good checkpoint; nothing if the run has none yet."""
    if not rotation.exists():
        return b""
    tensors, facts, complaints = rotation.load()
    for complaint in complaints:
        print(f"{complaint}; going on from the checkpoint before it", file=sys.stderr)
    return pack(tensors, facts)


def _lost_a_process(error: RuntimeError) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _tensorboard(out: Path, epochs: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(out / "tensorboard", purge_step=epochs + 1)
