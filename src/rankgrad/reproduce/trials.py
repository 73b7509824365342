"""A folder of trials that grows command by command: every row on every fold with every seed.

    settings.json   what must stay the same while it grows: data, recipe, protocol, epochs, device
    data/           the lists of each fold, read once (see data.py)
    runs/ROW/       an ordinary run folder for each trial, fold1-seed0 and so on; finished when report.json is there
    results.jsonl   a line for each finished trial

The same command again goes on where it was stopped, and several tables may be made from the same trials.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rankgrad.checks import one_of, whole
from rankgrad.errors import InterruptedRunError
from rankgrad.files import locked, parsed_json, write_atomically
from rankgrad.inert import inert_line
from rankgrad.reproduce.data import (
    Fold,
    absolute,
    choose_folds,
    find_source,
    open_fold,
    raw_splits,
    scaled_folder,
    scaled_splits,
)
from rankgrad.reproduce.rows import ROWS, TABLE_RECIPES, Setting, config_of
from rankgrad.runs.folder import is_finished, read_config, read_per_query, read_report
from rankgrad.runs.provenance import ask_other_programs
from rankgrad.runs.run import train_run
from rankgrad.runs.trees import fit_trees_run, grow_run
from rankgrad.training.build import validate
from rankgrad.training.config import TREES, Config, Train
from rankgrad.training.progress import make_bar
from rankgrad.trees.settings import TreeConfig


@dataclass(frozen=True)
class Request:
    """What a person asked for."""

    dataset: str | None = None
    data: str | None = None
    out: Path | None = None
    rows: str | None = None
    seeds: int = 3
    folds: str = "1"
    recipe: str = "paper"
    epochs: int | None = None
    device: str = "auto"
    paper_protocol: bool = False
    jobs: int = 1


@dataclass(frozen=True)
class Experiment:
    """A table's folder with its lists read, and what was asked for."""

    request: Request
    out: Path
    dataset: str | None  # name in the catalogue
    source: str
    device: str
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Trial:
    """One row on one fold with one seed; `scaled` is the folder of its lists as a model sees them."""

    row: str
    fold: int
    seed: int
    folder: Path
    config: Config | TreeConfig
    scaled: str

    def __str__(self) -> str:
        return f"{self.row} fold {self.fold} seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return is_finished(self.folder)


# --- the folder -------------------------------------------------------------------------------------------------------


def open_experiment(request: Request, kind: str, held: contextlib.ExitStack, *, quiet: bool) -> Experiment:
    """The folder that was asked for, with its lists read; `kind` begins its name where none was given.

    Until `held` is closed another process that asks for the same folder is refused.
    """
    one_of("--recipe", request.recipe, TABLE_RECIPES)
    whole("--seeds", request.seeds, 1)
    whole("--jobs", request.jobs, 1)
    if request.epochs is not None:
        whole("--epochs", request.epochs, 1)
    device = validate(Config(train=Train(device=request.device))).train.device
    dataset, source = find_source(request.dataset, request.data)
    numbers = choose_folds(source, dataset, request.folds)
    out = request.out or Path("runs") / _default_name(kind, dataset, source, request)
    settings = {
        "dataset": dataset or request.dataset,
        "data": absolute(source),
        "recipe": request.recipe,
        "paper_protocol": request.paper_protocol,
        "epochs": request.epochs,
        "device": device,
    }
    ask_other_programs()
    with _settled(out, settings, held):
        folds = tuple(_read(out / "data", source, dataset, number, request, quiet) for number in numbers)
    return Experiment(request, out, dataset, source, device, folds)


def _default_name(kind: str, dataset: str | None, source: str, request: Request) -> str:
    what = dataset or ("-".join(source.split(":")) if not Path(source).exists() else Path(source).resolve().name)
    return f"{kind}-{what}-{request.recipe}{'-paper-protocol' if request.paper_protocol else ''}"


@contextlib.contextmanager
def _settled(out: Path, settings: dict[str, Any], held: contextlib.ExitStack) -> Iterator[None]:
    """Make the folder or go on in it; other settings are refused. A new folder none of whose lists can be read is removed."""
    file = out / "settings.json"
    new = not file.exists()
    made = [path for path in (out, *out.parents) if not path.exists()]
    if new:
        if out.exists() and (not out.is_dir() or any(path.name[0] != "." for path in out.iterdir())):
            raise ValueError(f"{out} exists and holds no table; expected a new folder; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(out))
    if new:
        write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())
    else:
        _expect_same(file, settings)
    try:
        yield
    except BaseException:
        if new and not any((out / "data").glob("fold*.json")):
            shutil.rmtree(out / "data", ignore_errors=True)
            file.unlink()
            with contextlib.suppress(OSError):  # of a folder that holds something else
                for path in made:
                    path.rmdir()
        raise


def _expect_same(file: Path, settings: dict[str, Any]) -> None:
    try:
        found = parsed_json(file.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{file} is damaged; expected the settings that a table was begun with, in JSON; put a copy of it back, or choose "
            "another --out"
        )
    for key, value in settings.items():
        if found.get(key) != value:
            raise ValueError(
                f"the table in {file.parent} was begun with {key} = {found.get(key)!r} and now {value!r} was asked for; "
                "expected the same settings; choose another --out"
            )


def _read(folder: Path, source: str, dataset: str | None, fold: int, request: Request, quiet: bool) -> Fold:
    columns = TextColumn(f"reading fold {fold}"), BarColumn(), TimeRemainingColumn()
    with make_bar(*columns, quiet=quiet, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        return open_fold(
            folder,
            source,
            dataset,
            fold,
            full=request.paper_protocol,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def trials_of(experiment: Experiment, rows: Sequence[str]) -> list[Trial]:
    """Trials in an order that gives a first table early and stays with one fold's lists as long as it can."""
    seeds = range(experiment.request.seeds)
    return [_trial(experiment, row, fold, seed) for seed in seeds for fold in experiment.folds for row in rows]


def _trial(experiment: Experiment, row: str, fold: Fold, seed: int) -> Trial:
    request = experiment.request
    setting = Setting(
        dataset=experiment.dataset,
        recipe=request.recipe,
        path=fold.path,
        fold=fold.path_fold,
        seed=seed,
        scaling=fold.scaling,
        levels=fold.levels,
        device=experiment.device,
        threads=1 if request.jobs > 1 else 0,
        epochs=request.epochs,
        paper_protocol=request.paper_protocol,
    )
    config = config_of(ROWS[row], setting)
    scaled = scaled_folder(fold, config.data.scaling if isinstance(config, Config) else fold.scaling)
    return Trial(row, fold.fold, seed, experiment.out / "runs" / row / f"fold{fold.fold}-seed{seed}", config, scaled)


# --- training ---------------------------------------------------------------------------------------------------------

Results = dict[tuple[str, int, int], dict[str, Any]]  # by row, fold and seed: the line of a finished trial


def run_trials(experiment: Experiment, trials: Sequence[Trial], *, quiet: bool) -> tuple[Results, list[str]]:
    """Train what is not finished, showing how it goes: the lines of all finished trials, and a sentence for each that failed."""
    for trial in trials:
        _expect_same_recipe(trial)
    results = _read_results(experiment.out)
    _write_results(experiment.out, results)
    left = [trial for trial in trials if not trial.finished]
    before, count, failed = len(trials) - len(left), 0, list[str]()
    started = time.perf_counter()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with (
            make_bar(*columns, quiet=quiet) as bar,
            contextlib.closing(_train_all(left, experiment.request.jobs)) as outcomes,
        ):
            task = bar.add_task("trials", total=len(left))
            for trial, outcome in outcomes:
                count += 1
                if isinstance(outcome, str):
                    failed.append(outcome)
                    shown = f"failed: {outcome}"
                else:
                    results[trial.row, trial.fold, trial.seed] = outcome
                    _write_results(experiment.out, results)
                    value = outcome["test"]["ndcg@10"]["empty=1"]
                    shown = f"{trial}: test ndcg@10 {value:.4f}, {outcome['seconds']:.1f} s"
                bar.update(task, advance=1, description=str(trial))
                if bar.disable and not quiet:
                    rest = (time.perf_counter() - started) / count * (len(left) - count)
                    time_left = f"{rest:.0f} s" if rest < 100 else f"{rest / 60:.0f} min"
                    line = f"{before + count}/{len(trials)} {shown}; {time_left} left"
                    print(inert_line(line), file=sys.stderr, flush=True)
    except (InterruptedRunError, KeyboardInterrupt, BrokenProcessPool) as error:
        killed = "a training process was killed, for lack of memory perhaps"
        raise InterruptedRunError(
            f"{killed if isinstance(error, BrokenProcessPool) else 'stopped'}; {before + count - len(failed)} of {len(trials)} "
            "trials are finished and kept; go on by giving the same command again",
            getattr(error, "status", 130),
        ) from None
    return results, failed


def _expect_same_recipe(trial: Trial) -> None:
    """Refuse a run that was begun with another configuration; threads and the place of the lists may differ."""
    if isinstance(trial.config, TreeConfig) or not (trial.folder / "config.toml").is_file():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that goes on warns of settings that no longer exist
        found = read_config(trial.folder)
    asked = _with_numbers_of(validate(trial.config), found)
    train = dataclasses.replace(asked.train, threads=found.train.threads)
    data = dataclasses.replace(asked.data, path=found.data.path)
    if found != dataclasses.replace(asked, train=train, data=data):
        raise ValueError(
            f"{trial.folder} was made with other settings than this version's recipe for {trial.row}; expected the same; "
            "choose another --out, or remove that folder"
        )


def _with_numbers_of(asked: Config, found: Config) -> Config:
    """The configuration asked for, with what it leaves to the data (0) as a run has found it."""
    sections = {
        section: dataclasses.replace(
            getattr(asked, section),
            **{
                key: getattr(getattr(found, section), key) for key in keys if getattr(getattr(asked, section), key) == 0
            },
        )
        for section, keys in {"members": ("count", "keep", "bag"), "train": ("epochs", "batch_size")}.items()
    }
    return dataclasses.replace(asked, **sections)


def _read_results(out: Path) -> Results:
    """The lines of all finished trials in a table's folder, whoever asked for them."""
    folders = sorted(file.parent for file in out.glob("runs/*/fold*-seed*/report.json"))
    lines = map(_line, folders)
    return {(line["row"], line["fold"], line["seed"]): line for line in lines}


def _write_results(out: Path, results: Results) -> None:
    write_atomically(out / "results.jsonl", "".join(f"{json.dumps(line)}\n" for line in results.values()).encode())


def _line(folder: Path) -> dict[str, Any]:
    """What results.jsonl holds of a finished trial."""
    file = folder / "report.json"
    try:
        fold, seed = folder.name.removeprefix("fold").split("-seed")
        report = read_report(folder)
        return {
            "row": folder.parent.name,
            "fold": int(fold),
            "seed": int(seed),
            "run": "/".join(folder.parts[-3:]),
            **{split: report["metrics"][split] for split in ("vali", "test")},
            **{key: report[key] for key in ("best_epoch", "epochs", "seconds", "commit")},
        }
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{file} is damaged; expected what training wrote; remove the folder {folder} and the trial is trained again"
        ) from None


def train_trial(trial: Trial) -> dict[str, Any] | str:
    """Train a trial to its end; its line in results.jsonl, or what went wrong with it alone, such as a loss that is not finite."""
    try:
        if isinstance(trial.config, TreeConfig):
            fit_trees_run(trial.folder, trial.config, raw_splits(trial.config.path, trial.config.fold))
        else:
            begun = (trial.folder / "config.toml").is_file()
            config = None if begun else trial.config
            events: Iterator[Any] = (
                grow_run(trial.folder, config)
                if trial.config.model.kind in TREES
                else train_run(trial.folder, config, read=lambda *_: scaled_splits(trial.scaled))
            )
            for _ in events:
                pass
        return _line(trial.folder)
    except (ValueError, MemoryError, RuntimeError) as error:
        return f"{trial}: {error or 'there is not enough memory'}"


def _train_all(trials: Sequence[Trial], jobs: int) -> Generator[tuple[Trial, dict[str, Any] | str], None, None]:
    """Every trial as it is finished. One job is this process; Ctrl-C and SIGTERM stop all jobs after the step they are at."""
    if jobs == 1 or len(trials) <= 1:
        for trial in trials:
            yield trial, train_trial(trial)
        return
    context = multiprocessing.get_context("forkserver")  # processes that inherit no lock and no GPU
    context.set_forkserver_preload([__name__])
    stop, running = context.Pipe(duplex=False)  # the workers stop when `running` is closed, by us or by our death
    pool = ProcessPoolExecutor(min(jobs, len(trials)), context, initializer=_start_worker, initargs=(stop,))
    with _stopped_by_sigterm():
        try:
            futures = {pool.submit(_train_in_worker, trial): trial for trial in trials}
            for future in as_completed(futures):
                yield futures[future], future.result()
            pool.shutdown()
        finally:
            running.close()
            pool.shutdown(cancel_futures=True)
            stop.close()


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield
        return

    def stop(number: int, _: object) -> None:
        raise InterruptedRunError(status=128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_stopping, _training = threading.Event(), threading.Lock()  # of a worker


def _start_worker(stop: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process: the first one decides
    threading.Thread(target=_await_stop, args=(stop,), daemon=True).start()


def _await_stop(stop: Connection) -> None:
    """End this worker when the first process says so or is gone, after the run at hand has saved its place."""
    wait([stop])
    _stopping.set()
    os.kill(os.getpid(), signal.SIGTERM)  # handled by a run that is being trained; trees have nothing to save
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    with _training:
        os._exit(1)


def _train_in_worker(trial: Trial) -> dict[str, Any] | str:
    with _training:
        if _stopping.is_set():  # the pool hands out one trial more than it has processes
            raise InterruptedRunError
        return train_trial(trial)


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The trials of a table, finished or failed, and what they measured."""

    experiment: Experiment
    trials: list[Trial]
    results: Results
    failed: list[str]  # a sentence for each
    values: dict[
        str, dict[str, np.ndarray]
    ]  # row -> metric -> [seeds, queries], where all trials of a row are finished


def train_rows(
    request: Request,
    kind: str,
    rows: Sequence[str],
    metrics: Sequence[str],
    *,
    quiet: bool,
    joining: Iterable[str] = (),
) -> Outcome:
    """Every row on every fold with every seed; rows that are `joining` are not trained, and included if they have been."""
    with contextlib.ExitStack() as held:
        experiment = open_experiment(request, kind, held, quiet=quiet)
        trials = trials_of(experiment, rows)
        results, failed = run_trials(experiment, trials, quiet=quiet)
    known = {row for row, _, _ in results}
    for row in joining:
        if row in known and row not in rows:
            of_row = trials_of(experiment, [row])
            trials += of_row if all(trial.finished for trial in of_row) else []
    by_row = {row: [trial for trial in trials if trial.row == row] for row in dict.fromkeys(t.row for t in trials)}
    complete = {row: of_row for row, of_row in by_row.items() if all(trial.finished for trial in of_row)}
    if not complete:
        raise ValueError(f"no row has all of its trials; expected one at least; the first that failed is {failed[0]}")
    values = {row: _values(of_row, metrics) for row, of_row in complete.items()}
    return Outcome(experiment, trials, results, failed, values)


def _values(trials: Sequence[Trial], metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Per-query values [seeds, queries] of each metric, the queries of the folds one after the other."""
    found = {(trial.seed, trial.fold): read_per_query(trial.folder) for trial in trials}
    seeds, folds = sorted({seed for seed, _ in found}), sorted({fold for _, fold in found})
    for fold in folds:
        if any(found[seed, fold].query_ids != found[seeds[0], fold].query_ids for seed in seeds):
            raise ValueError(
                f"the runs of fold {fold} have different test queries; expected the same; choose another --out"
            )
    return {
        metric: np.stack([np.concatenate([found[seed, fold].metrics[metric] for fold in folds]) for seed in seeds])
        for metric in metrics
    }
