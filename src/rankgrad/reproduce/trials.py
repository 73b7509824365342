"""What table 2 and the ablations share: a folder of cells that grows, command by command. Room 6.

    settings.json   what must stay the same while it grows: data, recipe, protocol, epochs, device
    data/           the lists of each fold, read once (see lists.py)
    runs/ROW/       a run folder for each cell, fold1-seed0 and so on (see cells.py)
    results.jsonl   a line for each finished cell

It is resumable at any point, and several tables may stand on the same cells.
"""

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rankgrad import report
from rankgrad.checks import one_of, whole
from rankgrad.data.catalogue import CATALOGUE
from rankgrad.files import write_atomically
from rankgrad.reproduce.cells import Cell, check, finished, line
from rankgrad.reproduce.claims import METRICS
from rankgrad.reproduce.data import Fold, absolute, expect_unchanged, folds_of, name_of, ready
from rankgrad.reproduce.rows import TABLE_RECIPES, Setting
from rankgrad.reproduce.workers import filled
from rankgrad.runs.folder import kept
from rankgrad.training.build import resolve
from rankgrad.training.config import Config, Train
from rankgrad.training.distributed import InterruptedRunError
from rankgrad.training.progress import make_bar
from rankgrad.trees.fit import Trees


@dataclass(frozen=True)
class Order:
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
class Campaign:
    """A folder that is ours for now, its lists, and what was asked for."""

    order: Order
    out: Path
    dataset: str | None  # name in the catalogue
    source: str
    device: str
    lists: tuple[Fold, ...]


Make = Callable[
    [str, Setting, Fold], tuple[Config | Trees, str]
]  # a row -> its work, and the folder of its scaled lists


@contextlib.contextmanager
def opened(order: Order, kind: str, *, quiet: bool) -> Iterator[Campaign]:
    """The folder that was asked for, with its lists read; `kind` begins its name where none was given."""
    one_of("--recipe", order.recipe, TABLE_RECIPES)
    whole("--seeds", order.seeds, 1)
    whole("--jobs", order.jobs, 1)
    if order.epochs is not None:
        whole("--epochs", order.epochs, 1)
    device = resolve(Config(train=Train(device=order.device))).train.device
    dataset, source = name_of(order.dataset, order.data)
    folds = folds_of(source, dataset, order.folds)
    out = order.out or Path("runs") / _default_name(kind, dataset, source, order)
    with _occupied(out, _settings(order, dataset, source, device)) as begun_with:
        with make_bar(TextColumn("{task.description}"), quiet=quiet, transient=True) as bar:
            bar.add_task("looking whether the lists are those of the table")  # minutes, for gigabytes that were copied
            expect_unchanged(out / "data", source, dataset, begun_with["data"])
        lists = tuple(_read(out / "data", source, dataset, fold, order, quiet) for fold in folds)
        yield Campaign(order, out, dataset, source, device, lists)


def cells_of(campaign: Campaign, rows: Sequence[str], make: Make) -> list[Cell]:
    """Cells in an order that gives a first table early and stays with one fold's lists as long as it can."""
    return [
        _cell(campaign, make, seed, lists, row)
        for seed in range(campaign.order.seeds)
        for lists in campaign.lists
        for row in rows
    ]


def _cell(campaign: Campaign, make: Make, seed: int, lists: Fold, row: str) -> Cell:
    order = campaign.order
    setting = Setting(
        dataset=campaign.dataset,
        recipe=order.recipe,
        path=lists.path,
        fold=lists.path_fold,
        seed=seed,
        scaling=lists.scaling,
        levels=lists.levels,
        device=campaign.device,
        threads=1 if order.jobs > 1 else 0,
        epochs=order.epochs,
        paper_protocol=order.paper_protocol,
    )
    work, scaled = make(row, setting, lists)
    folder = campaign.out / "runs" / row / f"fold{lists.fold}-seed{seed}"
    return Cell(row, lists.fold, seed, folder, scaled, work)


# --- the folder -------------------------------------------------------------------------------------------------------


def _default_name(kind: str, dataset: str | None, source: str, order: Order) -> str:
    what = dataset or ("-".join(source.split(":")) if not Path(source).exists() else Path(source).resolve().name)
    return f"{kind}-{what}-{order.recipe}{'-paper-protocol' if order.paper_protocol else ''}"


def _settings(order: Order, dataset: str | None, source: str, device: str) -> dict[str, Any]:
    return {
        "dataset": dataset or order.dataset,
        "data": absolute(source),
        "recipe": order.recipe,
        "paper_protocol": order.paper_protocol,
        "epochs": order.epochs,
        "device": device,
    }


@contextlib.contextmanager
def _occupied(out: Path, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make the table's folder or go on in it, alone; what it was begun with. Other settings are refused.

    Where the data lie is told, not refused here. A new table none of whose lists could be read leaves nothing behind.
    """
    file = out / "settings.json"
    made = [path for path in (out, *out.parents) if not path.exists()]
    new = not file.exists()
    if new:
        if out.exists() and (not out.is_dir() or any(path.name[0] != "." for path in out.iterdir())):
            raise ValueError(f"{out} exists and holds no table; expected a new folder; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())
    found = _settings_in(file)
    for key, value in settings.items():
        if found.get(key) != value and key != "data":
            raise ValueError(
                f"the table in {out} was begun with {key} = {found.get(key)!r} and now {value!r} was asked for; expected "
                "the same settings; choose another --out"
            )
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another command is at work on the table in {out}; wait for it, or choose another --out"
            ) from None
        try:
            yield found
        finally:
            if new and not any((out / "data").glob("fold*.json")):
                _take_away(out, made)


def _settings_in(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("data"), str):
        raise ValueError(
            f"{file} is damaged; expected the settings that a table was begun with, in JSON; put a copy of it back, or choose "
            "another --out"
        )
    return found


def _take_away(out: Path, made: Sequence[Path]) -> None:
    """What `_occupied` and a reading that failed left in a folder, and the folders made for it."""
    shutil.rmtree(out / "data", ignore_errors=True)
    for name in ("settings.json", ".lock"):
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # of a folder that holds something else
        for path in made:
            path.rmdir()


def _read(folder: Path, source: str, dataset: str | None, fold: int, order: Order, quiet: bool) -> Fold:
    columns = TextColumn(f"reading fold {fold}"), BarColumn(), TimeRemainingColumn()
    with make_bar(*columns, quiet=quiet, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        return ready(
            folder,
            source,
            dataset,
            fold,
            full=order.paper_protocol,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


# --- doing it ---------------------------------------------------------------------------------------------------------


class Results:
    """results.jsonl: a line per finished cell, rewritten whole, because a line that was cut short helps nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self.known: dict[tuple[str, int, int], dict[str, Any]] = {}
        text = path.read_text(errors="replace") if path.exists() else ""
        for number, words in enumerate(text.split("\n"), 1):
            try:
                if words:
                    self._note(words, json.loads(words))
            except (ValueError, LookupError, TypeError):
                if number <= text.count("\n"):
                    raise ValueError(
                        f"{path}, line {number}, is damaged; expected a finished cell as JSON; take the line out: what a cell's "
                        "run reports is written down again"
                    ) from None
                print(f"the last line of {path} was cut short and is left out", file=sys.stderr)

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line."""
        self._note(json.dumps(entry), entry)
        write_atomically(self._path, "".join(f"{line}\n" for line in self._lines).encode())

    def _note(self, words: str, entry: dict[str, Any]) -> None:
        if not {"commit", "seconds"} <= entry.keys():
            raise ValueError("a cell without an end")
        self.known[entry["row"], entry["fold"], entry["seed"]] = entry
        self._lines.append(words)


def fill(campaign: Campaign, cells: Sequence[Cell], *, quiet: bool) -> tuple[Results, list[str]]:
    """Train the cells that are not finished, showing how it goes; a sentence for each that failed."""
    for cell in cells:
        check(cell)
    journal = Results(campaign.out / "results.jsonl")
    done = [cell for cell in cells if finished(cell)]
    for cell in done:
        if (cell.row, cell.fold, cell.seed) not in journal.known:  # it ended as the command was killed
            journal.add(line(cell))
    left = [cell for cell in cells if not finished(cell)]
    failed: list[str] = []
    started, count = time.perf_counter(), 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with make_bar(*columns, quiet=quiet) as bar:
            task = bar.add_task("cells", total=len(left))
            for cell, outcome in filled(left, campaign.order.jobs):
                count += 1
                if isinstance(outcome, ValueError):
                    failed.append(str(outcome))
                    said = f"failed: {outcome}"
                else:
                    journal.add(outcome)
                    said = (
                        f"{cell}: test ndcg@10 {outcome['test']['ndcg@10']['empty=1']:.4f}, {outcome['seconds']:.1f} s"
                    )
                bar.update(task, advance=1, description=str(cell))
                if bar.disable and not quiet:
                    rest = (time.perf_counter() - started) / count * (len(left) - count)
                    print(f"{len(done) + count}/{len(cells)} {said}; {_spoken(rest)} left", file=sys.stderr, flush=True)
    except (InterruptedRunError, KeyboardInterrupt) as error:
        why = str(error) if "was killed" in str(error) else "stopped"
        raise InterruptedRunError(
            f"{why}; {len(done) + count - len(failed)} of {len(cells)} cells are finished and kept; go on by giving the same "
            "command again"
        ) from None
    return journal, failed


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# --- what it adds up to -----------------------------------------------------------------------------------------------


def facts_of(campaign: Campaign, cells: Sequence[Cell], journal: Results) -> dict[str, Any]:
    """What stands above a table: data, recipe, protocol, machine, commits."""
    dataset, order = campaign.dataset, campaign.order
    commits = dict.fromkeys(journal.known[cell.row, cell.fold, cell.seed]["commit"] for cell in cells if finished(cell))
    return {
        "title": CATALOGUE[dataset].title if dataset else None,
        "dataset": dataset or order.dataset,
        "data": campaign.source,
        "recipe": order.recipe,
        "recipe_words": _recipe_words(cells),
        "selection": _selection(order.paper_protocol, any(isinstance(cell.work, Trees) for cell in cells)),
        "paper_protocol": order.paper_protocol,
        "folds": [
            {"fold": of.fold, "counts": of.counts, "differences": list(of.differences), "notes": list(of.notes)}
            for of in campaign.lists
        ],
        "queries": sum(of.counts["test"]["queries"] for of in campaign.lists),
        "seeds": list(range(order.seeds)),
        "device": campaign.device,
        "commits": [commit or "unknown" for commit in commits],
    }


def values_of(cells: Sequence[Cell], failed: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """Per-query values [seeds, queries] by row and metric, of the rows all of whose cells are finished."""
    by_row: dict[str, list[Cell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, []).append(cell)
    complete = {row: of_row for row, of_row in by_row.items() if all(map(finished, of_row))}
    if not complete:
        raise ValueError(f"no row has all of its cells; expected one at least; the first that failed is {failed[0]}")
    return {row: _values(of_row) for row, of_row in complete.items()}


def _values(cells: Sequence[Cell]) -> dict[str, np.ndarray]:
    """Per-query values [seeds, queries] of each metric, the queries of the folds one after the other."""
    seeds = sorted({cell.seed for cell in cells})
    judged = {(cell.seed, cell.fold): kept(cell.folder) for cell in cells}
    folds = sorted({cell.fold for cell in cells})
    for fold in folds:
        if any(judged[seed, fold].query_ids != judged[seeds[0], fold].query_ids for seed in seeds):
            raise ValueError(f"the runs of fold {fold} were judged on different queries; make the table anew")
    return {
        metric: np.stack([np.concatenate([judged[seed, fold].metrics[metric] for fold in folds]) for seed in seeds])
        for metric in METRICS
    }


def report_on(campaign: Campaign, rows: Sequence[str], cells: Sequence[Cell], file: str, what: str) -> str:
    """Write an HTML report, the first row its baseline; where it is, or why there is none: an extra is missing, or cells do not fit."""
    place = campaign.out / file
    title = f"{what} on {CATALOGUE[campaign.dataset].title if campaign.dataset else campaign.source}"
    try:
        folders = [campaign.out / "runs" / row for row in rows]
        report.write(folders, place, title=title, overwrite=True, only=[cell.folder for cell in cells])
    except (ImportError, ValueError) as error:
        place.unlink(missing_ok=True)  # an older one would show other cells
        return f"none: {error}"
    return str(place)


def _recipe_words(cells: Sequence[Cell]) -> str:
    """What the recipe is, from a configuration it gave."""
    config = next((cell.work for cell in cells if isinstance(cell.work, Config)), None)
    if config is None:
        return "trees alone"
    model, train = config.model, config.train
    epochs = f"{train.epochs} epoch{'s' * (train.epochs > 1)}"
    stop = f"at most {epochs}, stopped early after {train.patience} without a better one"
    return (
        f"Transformer of width {model.width}, feed-forward {model.feedforward}, {model.layers} layers, batches of "
        f"{train.batch_size} lists, {stop if train.patience else epochs}, {train.precision}"
    )


def _selection(paper_protocol: bool, trees: bool) -> str:
    if paper_protocol:
        also = "; trees with fixed settings" if trees else ""
        return f"none (--paper-protocol): the last epoch of the full training fold{also}"
    also = ", for trees the best of four settings" if trees else ""
    return f"on validation only: the best epoch by ndcg@10{also}; test is judged once"
