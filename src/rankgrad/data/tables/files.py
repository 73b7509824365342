"""The tables of each split in a folder: a file for each, or parts of it.

train.parquet               a split in one file; vali may be called valid or validation
train-00000-of-00002.csv    a part of a split, any name that goes on after train- or train_
train/ or train.parquet/    a folder of parts, of any names
part-00000.parquet          a folder of parts without the name of a split is train; so is one of day_1.csv, day_2.csv, alike but for numbers
"""

from __future__ import annotations

import re
from pathlib import Path

from rankgrad.data.tables.arrow import kind_of

SPLIT_OF = {"train": "train", "vali": "vali", "valid": "vali", "validation": "vali", "test": "test"}
_PART = re.compile(rf"({'|'.join(SPLIT_OF)})[-_].+")
_NUMBER = re.compile(r"\d+")
_ANY_PART = re.compile(r"part[-_.]?\d.*")


def is_table(path: Path) -> bool:
    """Whether a path is a file whose ending says that it is a table."""
    return path.is_file() and kind_of(path) is not None


def table_files(folder: Path) -> dict[str, list[Path]]:
    """The tables of each split in a folder, in the order of the splits; parts in the order of their names."""
    found: dict[str, dict[str, list[Path]]] = {}  # by split, then by what names it
    for path in sorted(folder.iterdir()):
        stem = path.name.split(".")[0]
        part = _PART.fullmatch(stem)
        if path.is_dir() and stem in SPLIT_OF:
            parts = [inside for inside in sorted(path.iterdir()) if is_table(inside)]
            if parts:
                found.setdefault(SPLIT_OF[stem], {})[path.name] = parts
        elif is_table(path) and stem in SPLIT_OF:
            found.setdefault(SPLIT_OF[stem], {})[path.name] = [path]
        elif is_table(path) and part:
            found.setdefault(SPLIT_OF[part[1]], {}).setdefault(f"{part[1]}-...", []).append(path)
    for split, sources in found.items():
        if len(sources) > 1:
            one, other, *_ = sources
            raise ValueError(
                f"{folder / one} and {other} are both tables of {split}; expected one for each split; move one away"
            )
    tables: dict[str, list[Path]] = {
        split: next(iter(found[split].values())) for split in dict.fromkeys(SPLIT_OF.values()) if split in found
    }
    if not tables:
        everything = [path for path in sorted(folder.iterdir()) if path.name[0] not in "._"]
        parts = [path for path in everything if is_table(path)]
        alike = len({_NUMBER.sub("0", path.name) for path in everything}) == 1 < len(parts)
        if not alike:  # the others may be texts of the splits
            parts = [path for path in parts if _ANY_PART.fullmatch(path.name)]
        tables = {"train": parts} if parts else {}
    return tables
