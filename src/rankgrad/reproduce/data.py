"""The lists of a table: found, checked against the catalogue, read once per fold and kept scaled for every trial.

In the folder `data/` of the table there are for every fold

    fold1/          train, vali and test as they are, where the source is text or lacks a validation split
    fold1-scaled/   the same, scaled by the train split, as the models see them
    fold1.json      what is known of them; written last, so that its presence means all is there
"""

import json
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rankgrad.data.catalogue import CATALOGUE, SPLITS, Progress, recognise
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import is_text_folder, read_splits
from rankgrad.data.prepare import prepare, set_aside
from rankgrad.files import parsed_json, write_atomically
from rankgrad.runs.folder import kept_split
from rankgrad.training.config import Config, Data
from rankgrad.training.data import ScaledSplits, load_splits, open_scaled, save_scaled


@dataclass(frozen=True)
class Fold:
    """Lists that are ready to be trained on: `path` and `path_fold` are what a run's configuration says of them."""

    fold: int
    folder: Path  # of the table's data
    path: str
    path_fold: int  # of our own folders, which hold one fold, 1
    scaling: str
    levels: int  # different labels, 5 for labels 0..4
    counts: dict[str, dict[str, int]]
    differences: tuple[str, ...]  # to the published counts
    notes: tuple[str, ...]


def find_source(dataset: str | None, data: str | None) -> tuple[str | None, str]:
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


def choose_folds(source: str, dataset: str | None, asked: str) -> list[int]:
    """The folds named by a text such as 1,3 or all.

    >>> choose_folds("synthetic:tiny", None, "all")
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


def absolute(source: str) -> str:
    """A source as a name that is valid in any working directory; synthetic lists have no path."""
    return os.path.abspath(source) if Path(source).exists() else source


def open_fold(
    folder: Path, source: str, dataset: str | None, fold: int, *, full: bool, progress: Progress | None = None
) -> Fold:
    """The lists of a fold, read if they have not been. `full`: train on what would be set aside for validation too."""
    file = folder / f"fold{fold}.json"
    if not file.exists():
        for rest in (folder / f"fold{fold}", folder / f"fold{fold}-scaled", *folder.glob(f".fold{fold}.*")):
            shutil.rmtree(rest, ignore_errors=True)  # of a command that was killed while it read
        facts = _read(folder / f"fold{fold}", source, dataset, fold, full=full, progress=progress)
        scaled_folder(_fold(folder, source, facts), facts["scaling"])
        write_atomically(file, json.dumps(facts, indent=2).encode())
    try:
        return _fold(folder, source, parsed_json(file.read_text()))
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{file} is damaged; expected what is known of a fold's lists, in JSON; put a copy of it back, or choose another --out"
        ) from None


def _fold(folder: Path, source: str, facts: dict[str, Any]) -> Fold:
    fold = facts["fold"]
    own = folder / f"fold{fold}"
    return Fold(
        fold=fold,
        folder=folder,
        path=os.path.abspath(own) if own.exists() else absolute(source),
        path_fold=1 if own.exists() else fold,
        scaling=facts["scaling"],
        levels=facts["levels"],
        counts=facts["counts"],
        differences=tuple(facts["differences"]),
        notes=tuple(facts["notes"]),
    )


def _read(
    own: Path, source: str, dataset: str | None, fold: int, *, full: bool, progress: Progress | None
) -> dict[str, Any]:
    """What is known of lists with all three splits; they are written to `own` unless the source itself can be trained on."""
    entry = CATALOGUE.get(dataset or "")
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names = set(entry.files) if entry else set(SPLITS)
    if is_text_folder(source):
        names = set(recognise(source, dataset=dataset, fold=fold).files)
        _expect_test(source, names)
        summary = prepare(source, dataset=dataset, fold=fold, out=own, progress=progress)
        differences, notes = summary.differences, summary.notes
    splits = read_splits(str(own)) if own.exists() else read_splits(source, fold=fold)
    _expect_test(source, set(splits))
    if "vali" not in splits:
        splits |= set_aside(splits["train"], Path(source))
        notes = ("there is no validation split: a quarter of the train queries, always the same, was set aside",)
        names.discard("vali")
    if kept_split(splits) != "test":
        raise ValueError(
            f"no query in the test split of {source} has a relevant document, so that no model is better than another there; "
            "expected labels above 0; look at the labels"
        )
    if "vali" not in names and full:
        splits["train"] = RankingDataset.concatenate([splits["train"], splits["vali"]])
        notes = (*notes, "models are trained on the queries set aside too: their validation numbers mean nothing")
    if "vali" not in names and (full or not own.exists()):
        for name in ("train",) if own.exists() else SPLITS:
            splits[name].save(own / name, overwrite=True)
    return {
        "fold": fold,
        "scaling": entry.scaling if entry else "auto",
        "levels": int(splits["train"].labels.max()) + 1,
        "counts": {name: {"queries": len(splits[name]), "documents": len(splits[name].labels)} for name in SPLITS},
        "differences": differences,
        "notes": notes,
    }


def _expect_test(source: str, splits: set[str]) -> None:
    if "test" not in splits:
        raise ValueError(f"{source} has no test split; expected train and test, and perhaps vali; add one")


def scaled_folder(fold: Fold, scaling: str) -> str:
    """The folder of a fold's lists under a scaling; they are scaled if they have not been."""
    folder = fold.folder / f"fold{fold.fold}-{'scaled' if scaling == fold.scaling else scaling}"
    if not (folder / "scaling.safetensors").exists():  # it is written last
        shutil.rmtree(folder, ignore_errors=True)
        save_scaled(folder, *load_splits(Config(data=Data(path=fold.path, fold=fold.path_fold, scaling=scaling))))
    return os.path.abspath(folder)


@lru_cache(maxsize=2)
def scaled_splits(folder: str) -> ScaledSplits:
    """The scaled lists in a folder, mapped into memory once in every process."""
    return open_scaled(Path(folder))


@lru_cache(maxsize=2)
def raw_splits(path: str, fold: int) -> dict[str, RankingDataset]:
    """The lists of a fold as they are, for trees and ensembles."""
    return read_splits(path, fold=fold)
