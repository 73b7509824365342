"""Training into a run folder, and scoring with a finished one.

Under torchrun every process calls `train_run`; the first alone touches the folder and sends the others what it says, so that
they need not see it. The first process of each machine reads the data and shares what it made of it with the others there.
"""

import gc
import glob
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rankgrad.checks import one_of, whole
from rankgrad.data.categories import Levels
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import check_source, read_lists
from rankgrad.errors import InterruptedRunError, NonFiniteError
from rankgrad.files import locked, pack, unpack, write_atomically
from rankgrad.inert import inert_line
from rankgrad.ranker import Ranker
from rankgrad.runs import folder as files
from rankgrad.runs.load import load
from rankgrad.runs.provenance import ask_other_programs
from rankgrad.training import distributed
from rankgrad.training.build import (
    OwnLoss,
    as_spec,
    fit_to_data,
    for_weighted_documents,
    make_device,
    make_objectives,
    make_state,
    validate,
)
from rankgrad.training.config import TREES, Config, became, dumps, loads, replaced, with_settings
from rankgrad.training.data import ScaledSplits, columns_of, shared_splits, without_zero_weights
from rankgrad.training.distributed import Signals, lost_a_process
from rankgrad.training.evaluate import evaluate, evaluate_and_score, metrics_of, score
from rankgrad.training.loop import Epoch, Step, train
from rankgrad.training.members import MemberState
from rankgrad.training.network import OwnModel, expect_network, expect_own, import_network, is_own, network_name
from rankgrad.training.precision import threads_and_precision
from rankgrad.training.start import Start
from rankgrad.training.state import TrainState
from rankgrad.training.threads import set_threads, threads_asleep, threads_of_training


class Started(NamedTuple):
    """The first event of `train_run`: the folder is there and the configuration is known."""

    folder: Path
    config: Config
    note: str = ""  # what a person should know before it goes on


class Finished(NamedTuple):
    """The last event of `train_run`, in the first process: everything is written; what report.json holds."""

    report: dict[str, Any]


RESTARTED = "torchrun has started the processes again, and the run goes on from its newest checkpoint"
Event = Started | Step | Epoch | Finished
SplitReader = Callable[[Config, Path, int], ScaledSplits]  # of the configuration, the run's folder, the processes


def train_run(
    folder: Path,
    config: Config | None = None,
    *,
    epochs: int | None = None,
    loss: OwnLoss = None,
    model: OwnModel = None,
    read: SplitReader = shared_splits,
) -> Iterator[Event]:
    """Train a run to its end, yielding what happens; writes as it goes.

    - `folder`: of the run. With a `config` it must be new; without one the run in it goes on from where it stands.
    - `epochs`: a finished run goes on until it has had so many, and is then what it would be if it had been given them at
      first. A cosine schedule begins again over those that are added; members that stopped early stay as they are. Its
      files are replaced at the end.
    - `loss`: a loss of your own, a `LossSpec` or a function, in place of the configuration's; to be given again on resuming.
    - `model`: a network of your own in place of the configuration's, an `nn.Module` or what makes one of the number of features
      (see `rankgrad.training.network`); to be given again on resuming. A configuration may name it, model.kind = "module:Class".
    - `read`: gives its lists; whoever trains many runs on the same lists need not read them again for each.

    SIGTERM and Ctrl-C let the current step finish, save, and raise `InterruptedRunError`; so does the loss of another
    process of the run. A new run that fails before it has learned anything leaves no folder behind. While it trains, another
    process that would train in the same folder is refused. Where torchrun has started the processes again
    (`--max-restarts`), a run in the folder that has this configuration goes on; one that is finished is left as it is.
    """
    if model is None and config is not None and is_own(config.model.kind):
        model = import_network(config.model.kind)
    ask_other_programs()
    with Signals(folder, files.is_done) as signals, distributed.process_group() as (rank, world), ExitStack() as held:
        started, place = distributed.from_first(
            lambda: _begin(folder, config, epochs, loss, model, held), _sent, _received
        )
        signals.listen()  # not before: nothing interrupts the wait for the other processes
        fresh, (folder, config, _) = config is not None, started
        remedy = f"; go on from the newest checkpoint with: rankgrad train --resume {folder}"
        distributed.advise(remedy)
        try:
            yield started
            if distributed.restarted() and _is_done(folder, rank):
                if rank == 0:
                    yield Finished({"run": str(folder), **files.read_report(folder)})
                return
            with threads_and_precision(config.train.threads, config.train.precision):
                yield from _train_run(config, folder, place, rank, world, signals, loss, model, read)
        except (InterruptedRunError, NonFiniteError, GeneratorExit):
            raise
        except Exception as error:
            if world > 1 and isinstance(error, RuntimeError) and lost_a_process(error):
                raise InterruptedRunError(f"another process of the run ended{remedy}") from error
            if (fresh or place != folder) and rank == 0:
                files.discard_unlearned(place)
            raise
        finally:
            signals.patient = True


def _begin(
    folder: Path, config: Config | None, epochs: int | None, loss: OwnLoss, model: OwnModel, held: ExitStack
) -> tuple[Started, Path]:
    """Begin a run, go on with one, or extend one; and where it writes."""
    if config is not None and epochs is not None:
        raise ValueError("epochs= extends a finished run; expected no configuration with it; set train.epochs there")
    if distributed.restarted() and files.is_done(folder):
        found = files.read_config(folder)
        if (
            became(_settled_with_start(config, loss, model)[0], found)
            if config
            else epochs in (None, found.train.epochs)
        ):
            return Started(folder, found, RESTARTED), folder
    if config is None and (epochs is not None or files.is_extending(folder)):
        return _begin_extension(folder, epochs, model, held), files.extension(folder)
    return begin_run(folder, config, held, loss, model), folder


def _begin_extension(folder: Path, epochs: int | None, model: OwnModel, held: ExitStack) -> Started:
    """Make the folder of the longer run within that of the finished one, or look at it."""
    files.expect_run(folder)
    held.enter_context(locked(folder))
    config, place = files.read_config(folder), files.extension(folder)
    expect_own(config, model, str(folder))
    had = config.train.epochs
    if files.is_extending(folder):
        config = files.read_config(place)
        if epochs not in (None, config.train.epochs):
            raise ValueError(
                f"{folder} is being extended to {config.train.epochs} epochs; expected that to end before another number; go on "
                f"with: rankgrad train --resume {folder}"
            )
        _remove_strays(place)
    else:
        if config.model.kind in TREES:
            raise ValueError(
                f"{folder} holds trees, and what {config.model.kind} needs to grow more is not kept with them; expected a run of "
                "networks; train a new run with more --epochs"
            )
        if not files.is_finished(folder):
            raise ValueError(
                f"the run {folder} is not finished; expected one that is, to give it more epochs; finish it first with: rankgrad "
                f"train --resume {folder}"
            )
        if whole("epochs", epochs, 1) <= had:
            raise ValueError(f"{folder} has been given {had} epochs; expected more than these in all, got {epochs}")
        if not files.Checkpoints(folder).exist():
            raise ValueError(
                f"{folder} has no checkpoint, which holds the optimiser's state; expected checkpoint.safetensors, as training "
                "left it; put a copy back, or start a new run from its weights with --init"
            )
        config = replaced(config, "train.epochs", epochs)
        if config.optimiser.schedule == "cosine":
            config = replaced(config, "optimiser.restarts", (*config.optimiser.restarts, had))
        shutil.rmtree(place, ignore_errors=True)  # left by one that was killed when all was done
        files.make_folder(place, config)
    again = (
        f"the cosine schedule begins again: epochs {had + 1} to {config.train.epochs} lead from the full rate to zero"
    )
    return Started(folder, config, again if config.optimiser.schedule == "cosine" else "")


def _remove_strays(folder: Path) -> None:
    """What processes left that were killed while they read or wrote; the folder is locked, so that none of them is at work."""
    for stray in folder.glob(".scaled-*"):
        shutil.rmtree(stray)
    for half in folder.glob(".*.writing"):
        half.unlink()


def begin_run(
    folder: Path, config: Config | None, held: ExitStack, loss: OwnLoss = None, model: OwnModel = None
) -> Started:
    """Make the folder of a new run, or look at that of one to resume; until `held` is closed no other process can."""
    if config is None:
        files.expect_run(folder)
        held.enter_context(locked(folder))
        config = files.read_config(folder)
        if files.is_finished(folder):
            further = f"; --epochs above {config.train.epochs} would train it further"
            raise ValueError(
                f"the run {folder} is finished; there is nothing to resume{'' if config.model.kind in TREES else further}"
            )
        expect_own(config, model, str(folder))
        _remove_strays(folder)
        if config.train.init is not None and not (folder / files.INIT).is_file():  # it was killed before it had a copy
            write_atomically(folder / files.INIT, files.read_start(Path(config.train.init)).packed())
        return Started(folder, config)
    config, start = _settled_with_start(config, loss, model)
    if distributed.restarted() and (folder / files.CONFIG).is_file() and became(config, files.read_config(folder)):
        return begin_run(folder, None, held, loss, model)._replace(note=RESTARTED)
    files.expect_new(folder)
    held.enter_context(locked(folder, make=True))
    files.make_folder(folder, config)
    if start is None:
        return Started(folder, config)
    write_atomically(folder / files.INIT, start.packed())
    note = f"it starts from the weights of {start.source} and keeps its scaling ({start.scaling.kind}), which they depend on"
    return Started(folder, config, note)


def begun_before_restart(name: str, config: Config) -> Path | None:
    """The folder under runs/ that these processes began before torchrun started them again; None: there is none."""
    if not distributed.restarted() or distributed.rank() > 0:
        return None
    wanted, _ = _settled_with_start(config)
    found = [file.parent for file in Path("runs").glob(f"{glob.escape(name)}-*/{files.CONFIG}")]
    begun = [run for run in found if not files.is_finished(run) and became(wanted, files.read_config(run))]
    return max(begun, key=lambda run: (run / files.CONFIG).stat().st_mtime, default=None)


def _settled_with_start(config: Config, loss: OwnLoss = None, model: OwnModel = None) -> tuple[Config, Start | None]:
    """The configuration that a new run is begun with, as it is read from its folder, and the weights it starts from."""
    config, start = settled(config, loss, model), None
    if config.train.init is not None:
        start = files.read_start(Path(config.train.init))
        config = replaced(config, "train.init", os.path.abspath(config.train.init))
        config = replaced(config, "data.scaling", start.scaling.kind)
    return loads(dumps(config)), start


def _is_done(folder: Path, rank: int) -> bool:
    """Whether the run in the first process's folder is finished, in every process."""
    done = rank == 0 and files.is_done(folder)
    return bool(distributed.broadcast_bytes(b"done" if done else b""))


def settled(config: Config, loss: OwnLoss = None, model: OwnModel = None) -> Config:
    """The configuration that a new run is begun with: validated, its lists looked for, what is the caller's own named."""
    if loss is not None:
        _, at, depth = config.loss.names[0].partition("@")
        config = replaced(config, "loss.name", f"{as_spec(loss).name}{at}{depth}")
    if model is not None:
        expect_network(model, config.model.options)
        config = replaced(config, "model.kind", network_name(model))
    config = validate(config, loss, own=model)
    source = config.data.path
    if files.is_run(source):
        raise ValueError(f"{source} is a run; expected lists to train on; name them, or go on with the run by --resume")
    check_source(source, fold=config.data.fold)
    if Path(source).exists():  # so that the run can be resumed from any working directory
        config = replaced(config, "data.path", os.path.abspath(source))
    return config


def _sent(begun: tuple[Started, Path]) -> bytes:
    (folder, config, note), place = begun
    return json.dumps([str(folder), dumps(config), note, str(place)]).encode()


def _received(content: bytes) -> tuple[Started, Path]:
    folder, config, note, place = json.loads(content)
    return Started(Path(folder), loads(config, f"the configuration of {folder}"), note), Path(place)


def _train_run(
    config: Config,
    folder: Path,
    place: Path,
    rank: int,
    world: int,
    signals: Signals,
    loss: OwnLoss,
    own: OwnModel,
    read: SplitReader,
) -> Iterator[Step | Epoch | Finished]:
    """Train what has begun; `place` is where it writes, the folder itself unless a finished run is extended."""
    device = make_device(config.train.device)
    start = _start_of(folder, config, rank)
    if start is None:
        splits, scaling, fingerprint = read(config, place, world)
    else:
        if read is not shared_splits:
            raise ValueError(
                "lists of the caller's own are scaled already, and train.init keeps the scaling of another run; expected one of them; "
                "leave out read= or init"
            )
        splits, scaling, fingerprint = shared_splits(config, place, world, start)
        added = start.new_columns(splits["train"])[: scaling.columns - start.scaling.columns]
        if rank == 0 and added:
            sentence = f"columns that {start.source} did not know begin with weight 0: {', '.join(added)}"
            print(inert_line(sentence), file=sys.stderr)
    if rank == 0 and "test" in splits and files.kept_split(splits) != "test":
        sentence = f"no query in the test split of {config.data.path} has a relevant document: the run is judged by validation alone"
        print(inert_line(sentence), file=sys.stderr)
    config = _fitted_to_data(config, place, splits, device, rank, loss)
    train_set = splits["train"]
    if config.members.bag > 1:  # every query teaches some members and validates others
        parts = [splits[name] for name in ("train", "vali") if name in splits]
        train_set = splits["vali"] = without_zero_weights(RankingDataset.concatenate(parts))
    vali_set = splits["vali"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        state = make_state(config, train_set, device, loss, own)
    if start is not None:
        start.give(state, scaling, config.model.inputs)
    threads = threads_of_training(config, state.model, train_set, device)
    config = _with_threads(config, place, threads, rank, fingerprint)
    before = folder if place != folder else None
    record = _Record(place, config, state, fingerprint, before, writes=rank == 0)
    record.restore()
    if before is not None and state.finished(config.train) and state.progress.epoch < config.train.epochs:
        raise ValueError(
            f"{folder} stopped early, after {config.train.patience} epochs without a better {config.train.metric}, and would have "
            f"stopped there however many it was given; expected a run that ended with its last epoch; start a new one from its "
            "weights with --init, or train anew with a larger --patience"
        )
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
            distributed.watch_no_more()
            if device.type == "cpu" and state.shares_lists and not any(True for _ in state.model.buffers()):
                record.save()  # the step that failed has changed nothing; on a GPU that is not known
        raise
    record.close()
    if not state.finished(config.train):
        record.save()
        distributed.barrier()
        raise InterruptedRunError(
            f"stopped in epoch {state.progress.epoch + 1} and saved; go on with: rankgrad train --resume {folder}"
        )
    signals.stop_at_once()
    with threads_asleep(config.train.threads or torch.get_num_threads()):
        model, selected, on_validation = state.result(config, vali_set, device)
        ranker = Ranker.of(model, scaling, config, splits["train"], device, loss)
        results, kept, scores = {}, files.kept_split(splits), None
        for split, metrics in files.metrics_to_measure(splits, config.train.metrics).items():
            where: dict[str, Any] = {"device": device, "rank": rank, "world": world}
            if split == "vali":
                results[split] = on_validation(metrics)
            elif split == kept:
                results[split], scores = evaluate_and_score(model, splits[split], metrics_of(config, metrics), **where)
            else:
                results[split] = evaluate(model, splits[split], metrics_of(config, metrics), **where)
        if (
            rank == 0 and kept == "vali" and config.members.bag == 1
        ):  # bagged members are measured each on its own queries
            scores = score(model, vali_set, device=device)
    if rank == 0:
        files.write_ranker(place, ranker)
        facts = {
            "loss": config.loss.title,
            "data": config.data.path,
            "seed": config.train.seed,
            **({} if config.train.init is None else {"init": config.train.init}),
            **selected,
            "epochs": state.progress.epoch,
            "seconds": round(record.seconds(), 3),
            "processes": world,
            "execution": state.plan._asdict() if state.plan else None,  # None: resumed after its last epoch
        }
        settings = config.train
        report = files.write_results(
            place,
            splits,
            results,
            settings.metrics,
            facts,
            device=device,
            threads=settings.threads,
            scores=scores,
            convention=files.convention_of(config.data.gain),
        )
        if place != folder:
            files.adopt_extension(folder)
        yield Finished({"run": str(folder), **report})
    del loop
    gc.collect()
    try:
        distributed.barrier()
    except RuntimeError as error:
        if rank > 0 or not lost_a_process(
            error
        ):  # to the first, which has written everything, it does not matter any more
            raise


def _start_of(folder: Path, config: Config, rank: int) -> Start | None:
    """What a run starts from, in every process; the first alone sees the folder."""
    if config.train.init is None:
        return None
    file = folder / files.INIT
    content = distributed.broadcast_bytes(file.read_bytes() if rank == 0 and file.is_file() else b"")
    if not content:
        raise ValueError(f"{file} is gone; expected the weights that the run started from; put a copy of it back")
    return Start.unpacked(content, str(file))


def _fitted_to_data(
    config: Config, folder: Path, splits: dict[str, RankingDataset], device: torch.device, rank: int, loss: OwnLoss
) -> Config:
    """The configuration with what it leaves to the data filled in, written down for a resumption."""
    fitted = fit_to_data(config, splits["train"], device, validated="vali" in splits)
    if splits["train"].document_weights is not None:  # prepared data keep them, whatever the configuration says
        fitted = for_weighted_documents(fitted, loss)
    if fitted.members.bag == 1 and "vali" not in splits:  # too few queries to bag: nothing is held out, nothing chosen
        splits["vali"] = splits["train"]
        fitted = replaced(fitted, "train.select", "last")
    if fitted != config and rank == 0:
        files.rewrite_config(folder, fitted)
    return fitted


def _with_threads(config: Config, folder: Path, threads: int, rank: int, fingerprint: str) -> Config:
    """The configuration with so many threads, which torch takes from here on, written down for a resumption; 0: as it trains."""
    if threads:
        set_threads(threads)
    chosen = replaced(config, "train.threads", threads)
    begun = rank == 0 and files.Checkpoints(folder).exist()
    if rank == 0 and (chosen != config or not begun):
        files.rewrite_config(folder, chosen, None if begun else fingerprint)  # checkpoints bear the run's identity
    return chosen


class _Record:
    """What a run writes while it trains: checkpoints, the history, TensorBoard's events. One process writes, the others do not."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        state: TrainState | MemberState,
        fingerprint: str,
        before: Path | None,
        *,
        writes: bool,
    ) -> None:
        self._folder, self._config, self._state, self._fingerprint, self._writes = (
            folder, config, state, fingerprint, writes,
        )  # fmt: skip
        self._before = before  # the finished run that this one extends
        self._checkpoints, self._history = files.Checkpoints(folder), files.HistoryFile(folder)
        self._board: Any = None
        self._spent, self._started = 0.0, time.perf_counter()

    def restore(self) -> None:
        """Go on from the newest good checkpoint, in every process; from the start if there is none."""
        content, known = distributed.broadcast_bytes(self._newest() if self._writes else b""), None
        if content:
            tensors, facts = unpack(content, f"the checkpoint of {self._folder}")
            self._spent, known = facts.pop("seconds"), facts.pop("history", None)
            if facts.pop("data") != self._fingerprint:
                raise ValueError(
                    f"the data of {self._folder} changed since the run began; expected the same lists; start a new run"
                )
            self._state.restore(tensors, facts)
        if self._writes:
            self._history.cut(self._state.progress.epoch, self._before, known)
            if self._config.train.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(self._folder / "tensorboard", purge_step=self._state.progress.epoch + 1)
        self._started = time.perf_counter()

    def _newest(self) -> bytes:
        found = self._checkpoints
        extends = self._before if not found.exist() else None
        found = found if extends is None else files.Checkpoints(extends)
        if not found.exist():
            return b""
        tensors, facts, complaints = found.load()
        if extends is not None:  # its last checkpoint was before its last evaluation
            facts["seconds"] = files.read_report(extends)["seconds"]
        for complaint in complaints:
            print(inert_line(f"{complaint}; going on from the checkpoint before it"), file=sys.stderr)
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
            facts = {"seconds": self.seconds(), "data": self._fingerprint, "history": self._history.facts()}
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

    @property
    def categories(self) -> Levels:
        """The levels of those that hold categories, by column."""

    def read(
        self,
        source: str,
        *,
        split: str = "test",
        labelled: bool = True,
        document: str | None = None,
        settings: Sequence[str] = (),
    ) -> RankingDataset:
        """Lists of the width this model expects, as they are in the source.

        `labelled` as in `read_lists`; `document` is a table's column of ids, None: that of the configuration. `settings`, such as
        data.missing=nan, say how this source is to be read, where it is otherwise than the lists of training.
        """

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""


OF_READING = ("data.missing", "data.zero_based", "data.label", "data.qid", "data.fold")  # what may differ between lists


def read_for(
    run: ScoringRun,
    source: str,
    *,
    split: str,
    labelled: bool,
    document: str | None = None,
    settings: Sequence[str] = (),
) -> RankingDataset:
    """`ScoringRun.read` of any run."""
    if files.is_run(source):
        raise ValueError(f"{source} is a run; expected DATA, the lists it is to rank, after the runs; name them last")
    others = [text for text in settings if text.partition("=")[0].strip() not in OF_READING]
    if others:
        raise ValueError(f"--set {others[0]} is not about how lists are read; expected one of {', '.join(OF_READING)}")
    data = with_settings(run.config, {}, settings).data
    one_of("data.missing", data.missing, ("zero", "nan", "all_zero"))
    columns = columns_of(data)._replace(weight=None, document_weight=None)  # weights are for learning
    if run.names is not None:  # what the lists hold does not tell any more which columns are categories
        known = tuple(run.names[column] for column in run.categories)
        columns = columns._replace(categorical=known, by_type=False)
    if labelled or document is not None:  # ids are for rankings
        columns = columns._replace(document=document)
    lists = read_lists(
        source,
        split=split,
        fold=data.fold,
        features=run.features,
        names=run.names,
        labelled=labelled,
        columns=columns,
    )
    if document is not None and lists.document_ids is None:
        raise ValueError(f"{source} has no column {document!r} of document ids; expected one; name another, or none")
    return lists


@dataclass(frozen=True)
class Run:
    """A finished run of networks, or a saved ranker, ready to score lists; `folder` is where it lies."""

    folder: Path
    ranker: Ranker

    @classmethod
    def open(cls, folder: Path, device: str = "auto", model: OwnModel = None) -> "Run":
        """Load a run, or a file that `NeuralRanker.save` or `Ranker.save` wrote; no code of theirs is executed.

        `model`: the network of one's own it was trained with.
        """
        return cls(folder, load(folder, device, model=model))

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

    @property
    def categories(self) -> Levels:
        """The levels of those that hold categories, by column."""
        return self.ranker.scaling.levels

    def read(
        self,
        source: str,
        *,
        split: str = "test",
        labelled: bool = True,
        document: str | None = None,
        settings: Sequence[str] = (),
    ) -> RankingDataset:
        """Lists of the width this model expects, as they are in the source; see `ScoringRun`."""
        return read_for(self, source, split=split, labelled=labelled, document=document, settings=settings)

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        return self.ranker.score_lists(data)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        return self.ranker.evaluate(data, metrics or self.config.train.metrics)
