"""A cell of the table: one row on one fold with one seed, trained in a run folder of its own. Imports run and trees.

A cell whose folder holds a report is finished. One that was interrupted goes on where its checkpoint is.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankgrad.reproduce.data import raw_splits, scaled_splits
from rankgrad.runs.run import advance, begin
from rankgrad.training.build import resolve
from rankgrad.training.config import Config, load
from rankgrad.trees.fit import Trees, grow


@dataclass(frozen=True)
class Cell:
    """What is trained and where; `scaled` is the folder of its lists as a model sees them."""

    row: str
    fold: int
    seed: int
    folder: Path
    scaled: str
    work: Config | Trees

    def __str__(self) -> str:
        return f"{self.row} fold {self.fold} seed {self.seed}"


def finished(cell: Cell) -> bool:
    """Whether there is nothing left to do."""
    return (cell.folder / "report.json").is_file()


def check(cell: Cell) -> None:
    """Refuse a folder that was made with other settings; threads and the place of the lists are none of them."""
    config = cell.folder / "config.toml"
    if isinstance(cell.work, Config) and config.is_file():
        found = load(config)
        asked = resolve(cell.work)
        train = dataclasses.replace(asked.train, threads=found.train.threads)
        data = dataclasses.replace(asked.data, path=found.data.path)
        if found != dataclasses.replace(asked, train=train, data=data):
            raise ValueError(
                f"{cell.folder} was made with other settings than this version's recipe for {cell.row}; expected the same; "
                "choose another --out, or take that folder away"
            )


def fill(cell: Cell) -> dict[str, Any]:
    """Train a cell to its end, unless it has been; what its line in results.jsonl says."""
    if not finished(cell):
        if isinstance(cell.work, Trees):
            grow(cell.work, raw_splits(cell.work.path, cell.work.fold), cell.folder)
        else:
            if not (cell.folder / "config.toml").is_file():
                begin(cell.work, cell.folder)
            for _ in advance(cell.folder, read=lambda *_: scaled_splits(cell.scaled)):
                pass
    return line(cell)


def line(cell: Cell) -> dict[str, Any]:
    """What results.jsonl holds of a finished cell."""
    file = cell.folder / "report.json"
    try:
        report = json.loads(file.read_text())
        return {
            "row": cell.row,
            "fold": cell.fold,
            "seed": cell.seed,
            "run": "/".join(cell.folder.parts[-3:]),
            **{split: report["metrics"][split] for split in ("vali", "test")},
            **{key: report[key] for key in ("best_epoch", "epochs", "seconds", "commit")},
        }
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{file} is damaged; expected what training wrote; take the folder {cell.folder} away and the cell is trained again"
        ) from None
