"""The lists of a table: found, checked against the catalogue, read once per fold and kept scaled for every cell.

Imports data and splits. Under the table's folder `data/` there is for every fold

    fold1/          train, vali and test as they are, where the source is text or lacks a validation split
    fold1-scaled/   the same, scaled by the train split, as the models see them
    fold1.json      what is known of them and of the files they were read from; written last, and kept as long as there are cells
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rankgrad.data.catalogue import CATALOGUE, SPLITS
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import files_of, is_text_folder, read_splits
from rankgrad.data.prepare import Progress, prepare, recognise, set_aside
from rankgrad.files import write_atomically
from rankgrad.runs.provenance import judged
from rankgrad.training.config import Config, Data
from rankgrad.training.data import ScaledSplits, load_splits, open_scaled, save_scaled


@dataclass(frozen=True)
class Fold:
    """Lists that are ready: where a run finds them, their scaled twin, and what the catalogue says of them."""

    fold: int
    path: str
    path_fold: int  # what a run must call the fold: prepared folders hold one, the first
    scaled: str
    scaling: str
    levels: int  # different labels, 5 for labels 0..4
    counts: dict[str, dict[str, int]]
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # the source's, by name: see `_seen`


def name_of(dataset: str | None, data: str | None) -> tuple[str | None, str]:
    """The catalogue's name of what was asked for (None: it has none) and its source."""
    if dataset is not None and dataset.partition(":")[0] == "synthetic":
        if data is not None:
            raise ValueError(f"--dataset {dataset} is made up and needs no --data; leave one of them out")
        return None, dataset
    if dataset is not None and dataset not in CATALOGUE:
        raise ValueError(
            f"there is no dataset {dataset!r} in the catalogue; expected synthetic[:SIZE] or one of {', '.join(CATALOGUE)}; "
            "leave --dataset out for lists of your own"
        )
    if data is None:
        wanted = f"the folder of {CATALOGUE[dataset].title}" if dataset else "--dataset synthetic, or your lists"
        raise ValueError(f"there is no data; expected {wanted} as --data FOLDER; nothing is downloaded")
    if is_text_folder(data):
        return dataset or recognise(data).dataset, data
    return dataset, data


def folds_of(source: str, dataset: str | None, asked: str) -> list[int]:
    """The folds named by a text such as 1,3 or all.

    >>> folds_of("synthetic:tiny", None, "all")
    [1]
    """
    found = [1]
    if is_text_folder(source):
        first = recognise(source, dataset=dataset)
        found = [first.fold]
        for fold in range(1, 6) if first.dataset is None or CATALOGUE[first.dataset].folds > 1 else ():
            try:
                layout = recognise(source, dataset=dataset, fold=fold)
            except ValueError:  # there is no such fold here
                continue
            if layout.files != first.files:
                found.append(fold)
        found = sorted(set(found))
    if asked == "all":
        return found
    try:
        wanted = sorted({int(part) for part in asked.split(",")})
    except ValueError:
        raise ValueError(f"--folds {asked} names no folds; expected all, or numbers such as 1,2") from None
    lacking = [fold for fold in wanted if fold not in found]
    if lacking:
        raise ValueError(f"{source} has no fold {lacking[0]}; expected some of {', '.join(map(str, found))}, or all")
    return wanted


def ready(
    folder: Path, source: str, dataset: str | None, fold: int, *, full: bool, progress: Progress | None = None
) -> Fold:
    """The lists of a fold, read if they have not been. `full`: train on what would be set aside for validation too."""
    facts = folder / f"fold{fold}.json"
    if facts.exists():
        return _known(facts)
    for stray in (folder / f"fold{fold}", folder / f"fold{fold}-scaled", *folder.glob(f".fold{fold}.*")):
        shutil.rmtree(stray, ignore_errors=True)  # of a command that was killed while it read
    # Looked at before they are read: a change in between is then one since the table was begun.
    files = {name: _seen(file) for name, file in _files(source, dataset, fold).items()}
    made = _collect(folder / f"fold{fold}", source, dataset, fold, full=full, progress=progress)
    made = dataclasses.replace(made, files=files)
    config = Config(data=Data(path=made.path, fold=made.path_fold, scaling=made.scaling))
    save_scaled(folder / f"fold{fold}-scaled", *load_splits(config))
    _write(folder, made)
    return made


def _known(facts: Path) -> Fold:
    """What was written of a fold; lists that lie beside it are found there, wherever the table was moved."""
    try:
        told = json.loads(facts.read_text())
        known = Fold(**{**told, "differences": tuple(told["differences"]), "notes": tuple(told["notes"])})
        here, path, scaled = facts.parent, Path(known.path), Path(known.scaled)
        own = os.path.abspath(here / path.name) if path.parent == scaled.parent else known.path
        return dataclasses.replace(known, path=own, scaled=os.path.abspath(here / scaled.name))
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{facts} is damaged; expected what is known of a fold's lists, in JSON; put a copy of it back, or choose another --out"
        ) from None


def expect_unchanged(folder: Path, source: str, dataset: str | None, before: str) -> None:
    """Refuse a source that is not, file by file, what the folds in `folder` were read from; `before` is where it was.

    One that was copied or moved since is noted where it is now, so that it is not read through a second time.
    """
    moved = absolute(source) != before
    found = {known.fold: known for known in map(_known, sorted(folder.glob("fold*.json")))}
    cells = (re.fullmatch(r"fold(\d+)-seed\d+", cell.name) for cell in folder.parent.glob("runs/*/*"))
    trained = {int(cell[1]) for cell in cells if cell}
    for fold in sorted(trained - found.keys()):
        raise ValueError(
            f"{folder / f'fold{fold}.json'} is gone, and only it knows which lists the table's cells of fold {fold} were trained on; "
            "expected it beside them; put a copy of it back, or choose another --out"
        )
    for fold, known in found.items():
        now, then = _files(source, dataset, fold), known.files
        seen = {name: _as_seen(file, then.get(name)) for name, file in now.items()}
        told = _told(then, seen) if then else ""  # older tables know nothing of their files
        if moved and (told or not then):
            raise ValueError(
                f"the table in {folder.parent} was begun with data = {before!r} and now {source!r} was asked for"
                f"{told and f', where {told}'}; expected the same lists; choose another --out"
            )
        if told:
            raise ValueError(
                f"the lists in {source} changed since the table in {folder.parent} was begun: {told}; expected the same in all of "
                "its cells; put the old files back, or choose another --out"
            )
        own = Path(known.path).parent == Path(known.scaled).parent
        here = dataclasses.replace(known, path=known.path if own else absolute(source), files=seen if then else {})
        if here != known:
            _write(folder, here)


def _told(then: dict[str, Any], now: dict[str, Any]) -> str:
    """How files that were seen differ from those of a table, in words; nothing if they do not."""
    changed = [name for name in sorted(then.keys() & now.keys()) if now[name]["blake2b"] != then[name]["blake2b"]]
    lacking, more = sorted(then.keys() - now.keys()), sorted(now.keys() - then.keys())
    parts = [
        changed and f"{', '.join(changed)} {'differs' if len(changed) == 1 else 'differ'}",
        lacking and f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} lacking",
        more and f"{', '.join(more)} {'was' if len(more) == 1 else 'were'} added",
    ]
    return " and ".join(part for part in parts if part)


def _write(folder: Path, fold: Fold) -> None:
    write_atomically(folder / f"fold{fold.fold}.json", json.dumps(dataclasses.asdict(fold), indent=2).encode())


def absolute(source: str) -> str:
    """A source as a name that holds in any folder; synthetic lists have no path."""
    return os.path.abspath(source) if Path(source).exists() else source


def _files(source: str, dataset: str | None, fold: int) -> dict[str, Path]:
    return {file.relative_to(source).as_posix(): file for file in files_of(source, dataset=dataset, fold=fold)}


def _seen(file: Path) -> dict[str, Any]:
    """What tells a file from another: its content, and for a quick look its size and time."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "blake2b").hexdigest()
    return {"bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns, "blake2b": digest}


def _as_seen(file: Path, seen: dict[str, Any] | None) -> dict[str, Any]:
    """What tells a file from another; read only if it is new, or was touched or copied since it was seen."""
    size, modified = file.stat().st_size, file.stat().st_mtime_ns
    return seen if seen and (size, modified) == (seen["bytes"], seen["modified"]) else _seen(file)


def _collect(
    place: Path, source: str, dataset: str | None, fold: int, *, full: bool, progress: Progress | None
) -> Fold:
    """Lists with all three splits: the source itself where it has them, else a folder of our own at `place`."""
    entry = CATALOGUE.get(dataset or "")
    path, path_fold, own = source, fold, False
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names = set(entry.files) if entry else set(SPLITS)
    if is_text_folder(source):
        names = set(recognise(source, dataset=dataset, fold=fold).files)
        _expect_test(source, names)
        summary = prepare(source, dataset=dataset, fold=fold, out=place, progress=progress)
        differences, notes = summary.differences, summary.notes
        path, path_fold, own = str(place), 1, True
    splits = read_splits(path, fold=path_fold)
    _expect_test(source, set(splits))
    if "vali" not in splits:
        splits |= set_aside(splits["train"], Path(source))
        notes = ("there is no validation split: a quarter of the train queries, always the same, was set aside",)
        names.discard("vali")
    if judged(splits) != "test":
        raise ValueError(
            f"no query in the test split of {source} has a relevant document, so that there is nothing to judge a model by; "
            "expected labels above 0 there; look at the labels"
        )
    if "vali" not in names and full:
        splits["train"] = RankingDataset.concatenate([splits["train"], splits["vali"]])
        notes = (*notes, "models are trained on the queries set aside too: their validation numbers mean nothing")
    if "vali" not in names and (full or not own):
        for name in SPLITS if not own else ("train",):
            splits[name].save(place / name, overwrite=True)
        path, path_fold = str(place), 1
    return Fold(
        fold=fold,
        path=absolute(path),
        path_fold=path_fold,
        scaled=os.path.abspath(f"{place}-scaled"),
        scaling=entry.scaling if entry else "auto",
        levels=int(splits["train"].labels.max()) + 1,
        counts={name: {"queries": len(splits[name]), "documents": len(splits[name].labels)} for name in SPLITS},
        differences=differences,
        notes=notes,
    )


def _expect_test(source: str, splits: set[str]) -> None:
    if "test" not in splits:
        raise ValueError(f"{source} has no test split; expected train and test, and perhaps vali; add one")


@lru_cache(maxsize=2)
def scaled_splits(folder: str) -> ScaledSplits:
    """The scaled lists of a fold, mapped into memory once in every process."""
    return open_scaled(Path(folder))


@lru_cache(maxsize=2)
def raw_splits(path: str, fold: int) -> dict[str, RankingDataset]:
    """The lists of a fold as they are, for trees."""
    return read_splits(path, fold=fold)
