"""From LETOR/SVMLight text or tables to a folder of memory-mapped splits, in bounded memory; compared with the published counts.

Features go from the files to a temporary file beside the result, and from there, brought together by query, into the
result: twice the disk space for a while, and in memory a block of rows and some numbers for each document.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankgrad.data.catalogue import CATALOGUE, SPLITS, Entry, Layout, Progress, read_layout, recognise
from rankgrad.data.dataset import Description, RankingDataset
from rankgrad.data.folder import SUMMARY, is_saved
from rankgrad.data.load import DEFAULT_COLUMNS, Columns
from rankgrad.data.tables.files import is_table, table_files
from rankgrad.data.tables.stream import spool_tables
from rankgrad.files import replacing

SPOOL = ".spool"  # the folder of temporary files
VALIDATION_SEED = 0


@dataclass(frozen=True)
class PreparedSummary:
    """What `prepare` wrote and how it compares with the catalogue; print it, or take `as_dict` for JSON."""

    dataset: str | None
    fold: int
    folder: Path
    splits: Mapping[str, Description]
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **dataclasses.asdict(self),
            "folder": str(self.folder),
            "splits": {split: dataclasses.asdict(description) for split, description in self.splits.items()},
        }

    def __str__(self) -> str:
        entry = CATALOGUE.get(self.dataset or "")
        lines = [f"{entry.title} ({self.dataset})" if entry else "a dataset that is not in the catalogue"]
        if entry:
            lines += [f"fold {self.fold} of {entry.folds}"] if entry.folds > 1 else []
            lines += [f"source: {entry.source}", f"licence: {entry.licence}", f"suggested scaling: {entry.scaling}"]
        for split, description in self.splits.items():
            lines += ["", split, *(f"  {line}" for line in str(description).splitlines())]
        lines.append("")
        if entry:
            verdict = "differs from the published counts:" if self.differences else "agrees with the published counts"
            lines += [verdict, *(f"  {difference}" for difference in self.differences)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def prepare(
    folder: str | Path,
    *,
    dataset: str | None = None,
    out: str | Path | None = None,
    fold: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
    columns: Columns = DEFAULT_COLUMNS,
) -> PreparedSummary:
    """Read the text or the tables of a dataset, compare counts with the catalogue, and write it memory-mapped with a summary.

    Written are `train`, `vali` and `test` (for `RankingDataset.open`) and `summary.txt`, all at once at the end. Where
    there is no validation file, a quarter of the train queries becomes one, always the same. The memory this takes does
    not grow with the features: tables and text larger than memory can be prepared. The rows of a query may be scattered.

    - `folder`: the unpacked dataset, in a layout that `recognise` knows; a folder of tables (Parquet, CSV, Arrow) called
      train, vali and test, each in one file, in files train-*, or in a folder of parts; or a single file.
    - `dataset`: its name in the catalogue; None finds it out.
    - `out`: the folder to write; None is `prepared` in the folder, or beside the file.
    - `fold`: which fold to read, where the dataset has several.
    - `overwrite`: replace what an earlier call wrote there; anything else is never replaced.
    - `progress`: called with the bytes read so far and the bytes of all files.
    - `columns`: what the columns of tables are called, and what is missing where.
    """
    source = Path(folder)
    layout, tables = _contents(source, dataset, fold)
    entry = CATALOGUE.get(layout.dataset or "")
    beside = source if source.is_dir() else source.parent
    target = (beside / "prepared" if out is None else Path(out)).resolve()
    _refuse_occupied(target, overwrite)
    notes: list[str] = []
    described: dict[str, Description] = {}
    written: dict[str, Description] = {}
    clamped = width = 0
    with _writing(target) as building:
        spool = building / SPOOL
        spool.mkdir()
        if tables:
            splits = _read_tables(tables, spool, columns, progress)
        else:
            splits = read_layout(layout, progress, spool=spool, **columns.of_text())
        for split, data in splits:
            described[split] = data.describe()
            clamped += data.provenance["clamped"]
            width = max(width, data.provenance.get("largest_index", 0))
            pieces = {split: data}
            if split == "train" and "vali" not in (tables or layout.files):
                pieces = set_aside(data, (tables or layout.files)["train"][0])
                notes.append(
                    "there is no validation file: a quarter of the train queries, always the same, was set aside"
                )
            for name, piece in pieces.items():
                known = {"dataset": layout.dataset, "fold": layout.fold, "split": name}
                dataclasses.replace(piece, provenance={**data.provenance, **known}).save(building / name)
                written[name] = piece.describe()
            del data, pieces, piece  # before the next is read
        shutil.rmtree(spool)
        if "test" not in (tables or layout.files):
            notes.append("there is no test file")
        if clamped:
            notes.append(f"{clamped:,} values beyond float32 were clamped")
        differences = _differences(entry, layout.fold, described, width) if entry else ()
        if entry and differences:
            notes = [*entry.quirks, *notes]
        found = {split: written[split] for split in SPLITS if split in written}
        summary = PreparedSummary(layout.dataset, layout.fold, target, found, differences, tuple(notes))
        (building / SUMMARY).write_text(f"{summary}\n", encoding="utf-8")
    return summary


def _contents(source: Path, dataset: str | None, fold: int) -> tuple[Layout, dict[str, list[Path]]]:
    """The texts of a folder or file, or its tables; a folder of texts may hold other tables, but none of train."""
    if source.is_file():
        if is_table(source):
            return Layout(None, fold, {}), {"train": [source]}
        return Layout(dataset, fold, {"train": (source,)}), {}
    if not source.exists():
        raise ValueError(f"{source} does not exist; expected a file or folder of ranking data; check the path")
    tables = table_files(source) if source.is_dir() and dataset is None else {}
    try:
        layout = recognise(source, dataset=dataset, fold=fold)
    except ValueError:
        if not tables:
            raise
        if "train" not in tables:
            raise ValueError(f"{source} has no train split; it has {', '.join(tables)}; add one") from None
        return Layout(None, fold, {}), tables
    if "train" in tables:  # which `rankgrad train` would take
        raise ValueError(
            f"{layout.files['train'][0]} and {tables['train'][0].name} are both of train; expected text or a table; move one away, "
            "or give the file itself"
        )
    return layout, {}


def _read_tables(
    tables: Mapping[str, list[Path]], spool: Path, columns: Columns, progress: Progress | None
) -> Iterator[tuple[str, RankingDataset]]:
    """The splits one after the other, all with the features of train."""
    total = sum(path.stat().st_size for paths in tables.values() for path in paths)
    done = 0
    names: tuple[str, ...] | None = None
    for split, paths in tables.items():
        report = None if progress is None else lambda now, _, start=done: progress(start + now, total)
        data = spool_tables(paths, spool / split, columns.of_table(names), report)
        done += sum(path.stat().st_size for path in paths)
        if names is None and data.feature_names is not None:  # the others hold categories where train does
            names = data.feature_names
            columns = columns._replace(categorical=tuple(names[n] for n in data.categories), by_type=False)
        yield split, data
        del data  # before the next is read: the caller has let go of it


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """`replacing`, with a word about where else to write."""
    try:
        with replacing(target) as building:
            yield building
    except OSError as error:
        if error.filename is not None and Path(error.filename).resolve().is_relative_to(target.parent):
            raise ValueError(
                f"{target} cannot be written: {error.strerror}; expected a folder to write into; give another with --out (out= in "
                "Python)"
            ) from None
        raise


def set_aside(train: RankingDataset, path: Path) -> dict[str, RankingDataset]:
    """Train and validation of a train split, the latter a quarter of the queries and one at least."""
    if len(train) < 2:
        raise ValueError(
            f"{path} holds one query and there is no validation file; expected at least two queries, one of them to "
            "be set aside; add a file vali.txt"
        )
    quarter = max(1, round(len(train) / 4))
    return dict(zip(("train", "vali"), train.split([len(train) - quarter, quarter], seed=VALIDATION_SEED)))


def _refuse_occupied(target: Path, overwrite: bool) -> None:
    """Refuse an occupied folder before hours of reading; only what `prepare` wrote is replaced."""
    nearest = next(path for path in (target, *target.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file; expected a folder to write into; choose another (out)")
    if nearest != target:
        return
    if any(target.iterdir()) and not overwrite:
        raise ValueError(f"{target} exists and is not empty; choose another folder (out) or allow it (overwrite)")
    ours = {target / SUMMARY, *(target / split for split in SPLITS if is_saved(target / split))}
    strange = sorted(path.name for path in set(target.iterdir()) - ours)
    if strange:
        raise ValueError(f"{target} holds {strange[0]}, which `prepare` did not write; choose another folder (out)")


def _differences(entry: Entry, fold: int, splits: Mapping[str, Description], width: int) -> tuple[str, ...]:
    """Sentences about every published count that the files do not have; `width` is the largest index in them."""
    published = {**(entry.fold1 if fold == 1 else {}), "all splits together": entry.total}
    together = list(splits.values()) if set(splits) == set(entry.files) else []
    found = [f"features: {width}; published are {entry.features}"] if width < entry.used else []
    found += [f"{split}: missing" for split in entry.files if split not in splits]
    found += [
        f"{split}: a label {max(d.labels):g}; published labels end at {entry.max_label}"
        for split, d in splits.items()
        if max(d.labels) > entry.max_label
    ]
    for where, counts in published.items():
        have = [splits[where]] if where in splits else together if where == "all splits together" else []
        if not have:
            continue
        sums = {
            "queries": sum(d.queries for d in have),
            "documents": sum(d.documents for d in have),
            "empty_queries": sum(d.empty_queries for d in have),
            "longest": max(int(d.lengths["max"]) for d in have),
        }
        for name, number in sums.items():
            expected = getattr(counts, name)
            if expected is not None and number != expected:
                what = {
                    "empty_queries": "queries without a relevant document",
                    "longest": "documents in the longest list",
                }
                found.append(f"{where}: {number:,} {what.get(name, name)}; published are {expected:,}")
    return tuple(found)
