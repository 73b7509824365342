"""Lists as files that others read too: LETOR text and Parquet tables, one for each split."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.tables.arrow import import_pyarrow
from rankgrad.files import replacing

BLOCK = 4096  # rows written at once


def write_splits(folder: Path, splits: Iterable[tuple[str, RankingDataset]], file_format: str) -> dict[str, Any]:
    """Write a folder of train, vali and test files, whole or not at all; how many queries and documents each holds.

    - `folder`: one that is new or empty.
    - `splits`: lists by the name of their split; one is in memory at a time if they are made when asked for.
    - `file_format`: "letor" or "parquet".
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; expected a new folder; choose another --out")
    ending, write = FORMATS[file_format]
    if file_format == "parquet":
        import_pyarrow()  # which may be missing: said before lists are made
    counts = {}
    with replacing(folder.resolve()) as building:
        for split, data in splits:
            write(building / f"{split}.{ending}", data)
            counts[split] = {"queries": len(data), "documents": len(data.labels)}
    return counts


def write_letor(path: Path, data: RankingDataset) -> None:
    """Text, `label qid:ID 1:value 2:value ...`, in nine digits: read again, the numbers are the same."""
    with path.open("w", encoding="utf-8") as file:
        _write_lines(file, data)


def _write_lines(file: TextIO, data: RankingDataset) -> None:
    columns = data.features.shape[1]
    line = " ".join(["%.9g qid:%s", *(f"{column}:%.9g" for column in range(1, columns + 1))]) + "\n"
    ids = np.repeat(data.query_ids, data.lengths)
    for first in range(0, len(data.labels), BLOCK):
        rows = slice(first, first + BLOCK)
        block = zip(data.labels[rows].tolist(), ids[rows].tolist(), data.features[rows].tolist())
        file.writelines(line % (label, query, *values) for label, query, values in block)


def write_parquet(path: Path, data: RankingDataset) -> None:
    """A table with the columns label, qid, and one for each feature: its name, or f1, f2, ..."""
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    features = np.asarray(data.features)
    names = data.feature_names or [f"f{column}" for column in range(1, data.features.shape[1] + 1)]
    columns: Mapping[str, Any] = {
        "label": data.labels,
        "qid": np.repeat(data.query_ids, data.lengths),
        **{name: np.ascontiguousarray(features[:, number]) for number, name in enumerate(names)},
    }
    parquet.write_table(pyarrow.table(columns), path)


FORMATS = {"letor": ("txt", write_letor), "parquet": ("parquet", write_parquet)}
