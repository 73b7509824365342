"""The lists of a table: found, checked against the catalogue, read once per fold and kept scaled for every cell.

Imports data and splits. Under the table's folder `data/` there is for every fold

    fold1/          train, vali and test as they are, where the source is text or lacks a validation split
    fold1-scaled/   the same, scaled by the train split, as the models see them
    fold1.json      what is known of them; written last
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rankgrad.checkpoint import write_atomically
from rankgrad.config import Config, Data
from rankgrad.data._published import CATALOGUE, SPLITS
from rankgrad.data.catalogue import Progress, prepare, recognise, set_aside
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.sources import is_text_folder, read_splits
from rankgrad.splits import ScaledSplits, load_splits, open_scaled, save_scaled


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
        known = json.loads(facts.read_text())
        return Fold(**{**known, "differences": tuple(known["differences"]), "notes": tuple(known["notes"])})
    for stray in (folder / f"fold{fold}", folder / f"fold{fold}-scaled", *folder.glob(f".fold{fold}.*")):
        shutil.rmtree(stray, ignore_errors=True)  # of a command that was killed while it read
    made = _collect(folder / f"fold{fold}", source, dataset, fold, full=full, progress=progress)
    config = Config(data=Data(path=made.path, fold=made.path_fold, scaling=made.scaling))
    save_scaled(folder / f"fold{fold}-scaled", *load_splits(config))
    write_atomically(facts, json.dumps(dataclasses.asdict(made), indent=2).encode())
    return made


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
    if "vali" not in names and full:
        splits["train"] = RankingDataset.concatenate([splits["train"], splits["vali"]])
        notes = (*notes, "models are trained on the queries set aside too: their validation numbers mean nothing")
    if "vali" not in names and (full or not own):
        for name in SPLITS if not own else ("train",):
            splits[name].save(place / name, overwrite=True)
        path, path_fold = str(place), 1
    return Fold(
        fold=fold,
        path=os.path.abspath(path) if Path(path).exists() else path,
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
