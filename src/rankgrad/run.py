"""Runs: from a configuration to a run directory, and back. Room 5, its last floor.

A run directory is the whole truth of a run:

    config.toml           the configuration, complete
    history.jsonl         a line per epoch
    model.safetensors     the best weights, the feature scaling, and what is needed to use them
    report.json           metrics of every split under every rule for empty queries; seed, versions, machine, seconds
    queries.safetensors   per-query metrics of the split that was judged, for paired comparisons
    checkpoint*.safetensors   where to go on after an interruption
"""

import contextlib
import dataclasses
import gc
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rankgrad import __version__
from rankgrad.checkpoint import Rotation, load_tensors, save_tensors, write_atomically
from rankgrad.config import Config, dumps, loads
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.data.sources import read_lists, read_splits
from rankgrad.evaluate import evaluate, score, summarise
from rankgrad.resolve import make_device, make_model, make_objective, parse_loss, resolve
from rankgrad.train import Epoch, Learner, Step, make_optimiser, train

# --- training a run ---------------------------------------------------------------------------------------------------


class InterruptedRunError(Exception):
    """The run was asked to stop and has saved its place."""


def begin(config: Config, out: Path) -> None:
    """Make a run directory; nothing that exists is touched."""
    config = resolve(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; expected a new folder; choose another --out, or --resume {out}")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "config.toml", dumps(config).encode())


def advance(out: Path) -> Iterator[Step | Epoch]:
    """Train the run in a directory from where it stands to its end, yielding what happens; writes as it goes.

    SIGTERM and Ctrl-C let the current step finish, save, and raise `InterruptedRunError`.
    """
    config_file = out / "config.toml"
    if not config_file.is_file():
        raise ValueError(f"{out} is not a run: it has no config.toml; expected a folder that `rankgrad train` made")
    if (out / "report.json").exists():
        raise ValueError(f"the run {out} is finished; there is nothing to resume")
    config = loads(config_file.read_text(), str(config_file))
    with _processes() as (rank, world), _signals() as stop:
        yield from _advance(config, out, rank, world, stop)


def _advance(config: Config, out: Path, rank: int, world: int, stop: list[bool]) -> Iterator[Step | Epoch]:
    device = make_device(config.train.device)
    torch.set_num_threads(config.train.threads)
    torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")
    splits, scaling = _shared_splits(config, out, rank, world)
    train_set = splits["train"]
    units = max(1, int(train_set.labels.max())) if parse_loss(config.loss.name)[0] == "ordinal" else 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = make_model(config.model, train_set.features.shape[1], units, config.loss.name).to(device)
    learner = Learner(model, make_optimiser(model, config.optimiser))
    rotation, history = Rotation(out), out / "history.jsonl"
    spent = 0.0
    fingerprint = _fingerprint(train_set)
    if rotation.last.exists() or rotation.before.exists():
        tensors, facts, complaints = rotation.load()
        for complaint in complaints:
            print(f"{complaint}; going on from the checkpoint before it", file=sys.stderr)
        spent = facts.pop("seconds")
        if facts.pop("data") != fingerprint:
            raise ValueError(f"the data of {out} changed since the run began; expected the same lists; start a new run")
        learner.restore(tensors, facts)
    if rank == 0:
        lines = history.read_text().splitlines(keepends=True) if history.exists() else []
        write_atomically(history, "".join(lines[: learner.progress.epoch]).encode())
    board = _tensorboard(out) if config.train.tensorboard and rank == 0 else None
    started = time.perf_counter()

    def save() -> None:
        if rank == 0:
            facts = learner.facts() | {"seconds": spent + time.perf_counter() - started, "data": fingerprint}
            rotation.save(learner.tensors(), facts)

    finished = learner.progress.epoch >= config.train.epochs
    loop = train(learner, make_objective(config), train_set, splits["vali"], config, device, stop=lambda: stop[0])
    for event in loop:
        if isinstance(event, Epoch):
            finished = event.stop or event.epoch >= config.train.epochs
            if rank == 0:
                line = event._asdict() | {"seconds": round(spent + time.perf_counter() - started, 3)}
                _append(history, json.dumps(line) + "\n")
                if board is not None:
                    board.add_scalar("loss", event.loss, event.epoch)
                    board.add_scalar(config.train.metric, event.metric, event.epoch)
            save()
        yield event
    del loop
    gc.collect()  # a gloo group that outlives its DistributedDataParallel aborts at exit now and then
    if not finished:
        save()
        raise InterruptedRunError(
            f"stopped in epoch {learner.progress.epoch + 1} and saved; go on with: rankgrad train --resume {out}"
        )
    if rank == 0:
        if board is not None:
            board.close()
        model.load_state_dict(learner.best)
        _finish(out, config, model, units, scaling, splits, device, learner, spent + time.perf_counter() - started)


def _finish(
    out: Path,
    config: Config,
    model: nn.Module,
    units: int,
    scaling: Scaling,
    splits: dict[str, RankingDataset],
    device: torch.device,
    learner: Learner,
    seconds: float,
) -> None:
    """Write the model, the per-query metrics and, last, the report: its presence means the run is finished."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"scaling.{name}": torch.from_numpy(np.array(value)) for name, value in scaling.to_state().items()}
    facts = {
        "features": splits["train"].features.shape[1],
        "units": units,
        "feature_names": splits["train"].feature_names,
    }
    save_tensors(out / "model.safetensors", tensors, facts)
    results = {split: evaluate(model, data, config.train.metrics, device=device) for split, data in splits.items()}
    judged = "test" if "test" in splits else "vali"
    save_tensors(
        out / "queries.safetensors",
        {name: torch.from_numpy(values) for name, values in results[judged].items()},
        {"split": judged, "query_ids": splits[judged].query_ids.tolist()},
    )
    report = {
        "loss": config.loss.name,
        "metrics": {split: summarise(values) for split, values in results.items()},
        "convention": "gain 2^y - 1, discount 1 / log2(rank + 1), ties in input order; best epoch by validation",
        "splits": {split: {"queries": len(data), "documents": len(data.labels)} for split, data in splits.items()},
        "best_epoch": learner.progress.best_epoch,
        "epochs": learner.progress.epoch,
        "seed": config.train.seed,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "machine": {"platform": platform.platform(), "device": _device_name(device), "threads": config.train.threads},
    }
    write_atomically(out / "report.json", (json.dumps(report, indent=2) + "\n").encode())


def _shared_splits(config: Config, out: Path, rank: int, world: int) -> tuple[dict[str, RankingDataset], Scaling]:
    """The splits, scaled. Of several processes the first of a machine reads the text; the others map what it made."""
    if world == 1:
        return _load_splits(config)
    local, node = int(os.environ.get("LOCAL_RANK", rank)), os.environ.get("GROUP_RANK", "0")
    folder = out / f".scaled-{node}"
    if local == 0:
        shutil.rmtree(folder, ignore_errors=True)
        splits, scaling = _load_splits(config)
        for name, split in splits.items():
            split.save(folder / name)
        state = {name: torch.from_numpy(np.array(value)) for name, value in scaling.to_state().items()}
        save_tensors(folder / "scaling.safetensors", state, {})
    dist.barrier()
    names = sorted((p.name for p in folder.iterdir() if p.is_dir()), key=["train", "vali", "test"].index)
    splits = {name: RankingDataset.open(folder / name) for name in names}
    tensors, _ = load_tensors(folder / "scaling.safetensors")
    dist.barrier()
    if local == 0:
        shutil.rmtree(folder)  # the mapped files live on until the last process lets go of them
    return splits, Scaling.from_state({name: tensor.numpy() for name, tensor in tensors.items()})


def _load_splits(config: Config) -> tuple[dict[str, RankingDataset], Scaling]:
    splits = read_splits(config.data.path, fold=config.data.fold)
    if "vali" not in splits:
        share = config.data.validation
        if not 0 < share < 1:
            raise ValueError(f"data.validation must be between 0 and 1, got {share}")
        if len(splits["train"]) < 2:
            raise ValueError(
                f"{config.data.path} has one query; expected at least two, one to train and one to validate"
            )
        fitted, held_out = splits["train"].split([1 - share, share], seed=config.train.seed)
        splits = {"train": fitted, "vali": held_out, **{k: v for k, v in splits.items() if k != "train"}}
    scaling = fit_scaling(splits["train"], config.data.scaling)
    return {name: scaled(data, scaling) for name, data in splits.items()}, scaling


def scaled(data: RankingDataset, scaling: Scaling) -> RankingDataset:
    """The same lists with scaled features."""
    return dataclasses.replace(data, features=scaling.apply(data.features))


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

    @classmethod
    def open(cls, folder: Path, device: str = "auto") -> "Run":
        """Load a run; no code from the folder is executed."""
        if not (folder / "model.safetensors").is_file():
            state = "has not finished" if (folder / "config.toml").is_file() else "is not a run"
            raise ValueError(f"{folder} {state}: it has no model.safetensors; train it with `rankgrad train`")
        config = loads((folder / "config.toml").read_text(), str(folder / "config.toml"))
        tensors, facts = load_tensors(folder / "model.safetensors")
        model = make_model(config.model, facts["features"], facts["units"], config.loss.name)
        model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        scaling = Scaling.from_state(
            {k.removeprefix("scaling."): v.numpy() for k, v in tensors.items() if k.startswith("scaling.")}
        )
        place = make_device(device)
        return cls(folder, config, model.to(place).eval(), scaling, facts["features"], place)

    def read(self, source: str, *, split: str = "test") -> RankingDataset:
        """Lists of the width this model expects, as they are in the source."""
        return read_lists(source, split=split, fold=self.config.data.fold, features=self.features)

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        return score(self.model, scaled(data, self.scaling), device=self.device)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        return evaluate(
            self.model, scaled(data, self.scaling), metrics or self.config.train.metrics, device=self.device
        )


def query_metrics(folder: Path) -> tuple[dict[str, np.ndarray], list[Any], str]:
    """The per-query metrics a run left: values by metric [Q], query ids, and the split they were measured on."""
    tensors, facts = load_tensors(folder / "queries.safetensors")
    return {name: tensor.numpy() for name, tensor in tensors.items()}, facts["query_ids"], facts["split"]


def versions() -> dict[str, str | None]:
    """What ran: the library, its commit where it runs from a checkout, Python, torch, numpy."""
    here = Path(__file__).parent
    commit = None
    with contextlib.suppress(OSError):  # no git here
        asked = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = asked.stdout.strip() or None
    return {
        "rankgrad": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


# --- the machine ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes() -> Iterator[tuple[int, int]]:
    """Join the other processes under torchrun; (rank, world)."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def _signals() -> Iterator[list[bool]]:
    """A flag that SIGTERM and Ctrl-C set, so that a step always finishes."""
    flag = [False]

    def raise_flag(*_: Any) -> None:
        flag[0] = True

    try:
        before = {number: signal.signal(number, raise_flag) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: its owner handles signals
        before = {}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _fingerprint(data: RankingDataset) -> str:
    """Enough of the data to notice that it is not the same: sizes, labels, list lengths."""
    return f"{data.features.shape} {zlib.crc32(data.labels.tobytes()):08x} {zlib.crc32(data.offsets.tobytes()):08x}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("train.tensorboard needs tensorboard; install it with: pip install tensorboard") from None
    return SummaryWriter(out / "tensorboard")
