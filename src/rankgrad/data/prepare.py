"""What is known of the public ranking datasets, and how a folder of theirs becomes memory-mapped data.

`recognise` looks at file names and first lines; `prepare` reads the text of a folder and writes a `prepared` folder.
Nothing is ever downloaded: every entry of `CATALOGUE` says where a person gets the files and under what licence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.checks import whole
from rankgrad.data.catalogue import CATALOGUE, SPLITS, Entry
from rankgrad.data.dataset import Description, RankingDataset
from rankgrad.data.folder import is_saved, replacing
from rankgrad.data.svmlight.reader import read_svmlight
from rankgrad.data.svmlight.text import blocks
from rankgrad.data.tables.arrow import kind_of

SUMMARY = "summary.txt"
VALIDATION_SEED = 0
Progress = Callable[[int, int], None]

# The queries of the TREC Million Query tracks tell MQ2007 (topics up to 10000) and MQ2008 (from 10001) apart.
_LAST_MQ2007_QUERY = 10_000

_SPLIT_NAMES = {
    "train": ("train", "training", "trainingset", "set1.train"),
    "vali": ("vali", "valid", "validation", "validationset", "set1.valid"),
    "test": ("test", "testset", "set1.test"),
}
_FILE = re.compile(r"(.+?)\.(?i:txt|svm|letor|dat)(?i:\.(?:gz|bz2|zst))?")


@dataclass(frozen=True)
class Layout:
    """What `recognise` found: the entry's name (None: a ranking folder of no known name) and the files of each split."""

    dataset: str | None
    fold: int
    files: Mapping[str, tuple[Path, ...]]


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


def recognise(folder: str | Path, *, dataset: str | None = None, fold: int = 1) -> Layout:
    """Find the split files of a ranking dataset under a folder and say which dataset of the catalogue it is.

    Looked for are train, vali (valid, validation) and test with .txt, .svm, .letor or .dat, also .gz, .bz2, .zst,
    in the folder itself, in `Fold1` and in the places the catalogue names; or the five parts S1 to S5 of MQ2008.
    `dataset` overrules the name. A folder `Fold3` is that fold; another `fold` than it (or the usual 1) is refused.
    """
    if dataset is not None and dataset not in CATALOGUE:
        raise ValueError(f"there is no dataset {dataset!r} in the catalogue; expected one of {', '.join(CATALOGUE)}")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected the folder of an unpacked ranking dataset")
    if not 1 <= whole("fold", fold) <= 5:
        raise ValueError(f"there is no fold {fold}; expected 1 to 5")
    files = _parts(folder, fold)
    if not files:
        places = dict.fromkeys(
            Path(file.format(fold=fold)).parent for e in CATALOGUE.values() for file in e.files.values()
        )
        places |= dict.fromkeys(Path(version, f"Fold{fold}") for version in ("QueryLevelNorm", "MIN"))
        found = [_split_files(folder / place) for place in (Path(), *places)]
        files = next((split_files for split_files in found if "train" in split_files), {})
    if not files:
        table = next((path.name for path in sorted(folder.iterdir()) if kind_of(path)), None)
        hint = f"; to read the table {table} give its path, or call it train" if table else ""
        raise ValueError(
            f"{folder} holds no training file; expected train.txt, vali.txt and test.txt (.svm, .letor, .dat; .gz, .bz2, "
            f".zst) in it or in Fold{fold}{hint}"
        )
    name = dataset or _name(files)
    if name and fold > CATALOGUE[name].folds:
        raise ValueError(f"there is no fold {fold} of {name}; it has no folds; leave the fold out")
    inside = re.fullmatch(r"Fold([1-5])", files["train"][0].resolve().parent.name)
    own = int(inside[1]) if inside else fold
    if fold not in (1, own):
        raise ValueError(f"{folder} is fold {own}; fold {fold} was asked for; give that fold's folder or the one above")
    return Layout(name, own, files)


def prepare(
    folder: str | Path,
    *,
    dataset: str | None = None,
    out: str | Path | None = None,
    fold: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PreparedSummary:
    """Read the text of a dataset, compare its counts with the catalogue, and write it memory-mapped with a summary.

    Written are `train`, `vali` and `test` (for `RankingDataset.open`) and `summary.txt`, into `<folder>/prepared` or
    `out`. Where there is no validation file, a quarter of the train queries becomes one, always the same.
    `progress` is called with the bytes read so far and in all.
    """
    layout = recognise(folder, dataset=dataset, fold=fold)
    entry = CATALOGUE.get(layout.dataset or "")
    target = (Path(folder, "prepared") if out is None else Path(out)).resolve()
    _refuse_occupied(target, overwrite)
    notes: list[str] = []
    described: dict[str, Description] = {}
    written: dict[str, Description] = {}
    clamped = width = 0
    with replacing(target) as building:
        for split, data in read_layout(layout, progress):
            described[split] = data.describe()
            clamped += data.provenance["clamped"]
            width = max(width, data.provenance["largest_index"])
            pieces = {split: data}
            if split == "train" and "vali" not in layout.files:
                pieces = set_aside(data, layout.files["train"][0])
                notes.append(
                    "there is no validation file: a quarter of the train queries, always the same, was set aside"
                )
            for name, piece in pieces.items():
                known = {"dataset": layout.dataset, "fold": layout.fold, "split": name}
                dataclasses.replace(piece, provenance={**data.provenance, **known}).save(building / name)
                written[name] = piece.describe()
        if "test" not in layout.files:
            notes.append("there is no test file")
        if clamped:
            notes.append(f"{clamped:,} values beyond float32 were clamped")
        differences = _differences(entry, layout.fold, described, width) if entry else ()
        if entry and differences:
            notes = [*entry.quirks, *notes]
        splits = {split: written[split] for split in SPLITS if split in written}
        summary = PreparedSummary(layout.dataset, layout.fold, target, splits, differences, tuple(notes))
        (building / SUMMARY).write_text(f"{summary}\n", encoding="utf-8")
    return summary


def set_aside(train: RankingDataset, path: Path) -> dict[str, RankingDataset]:
    """Train and validation of a train split, the latter a quarter of the queries and one at least."""
    if len(train) < 2:
        raise ValueError(
            f"{path} holds one query and there is no validation file; expected at least two queries, one of them to "
            "be set aside; add a file vali.txt"
        )
    quarter = max(1, round(len(train) / 4))
    return dict(zip(("train", "vali"), train.split([len(train) - quarter, quarter], seed=VALIDATION_SEED)))


def _parts(folder: Path, fold: int) -> dict[str, tuple[Path, ...]]:
    """MQ2008's five parts: fold f trains on three consecutive ones from Sf on, cyclic, then validation, then test."""
    found = _stems(folder)
    names = [f"S{1 + (fold - 1 + i) % 5}" for i in range(5)]
    if not all(name in found for name in names):
        return {}
    parts = [found[name] for name in names]
    return {"train": tuple(parts[:3]), "vali": (parts[3],), "test": (parts[4],)}


def _split_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    found = _stems(folder)
    files: dict[str, tuple[Path, ...]] = {}
    for split, names in _SPLIT_NAMES.items():
        fitting = [found[name] for name in names if name in found]
        if len(fitting) > 1:
            raise _two_files(fitting[0], fitting[1])
        if fitting:
            files[split] = (fitting[0],)
    return files


def _stems(folder: Path) -> dict[str, Path]:
    """Data files of a folder by name without extensions."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and path.is_file():
            if match[1] in found:
                raise _two_files(found[match[1]], path)
            found[match[1]] = path
    return found


def _two_files(one: Path, other: Path) -> ValueError:
    return ValueError(f"{one} and {other.name} may both be meant; expected one file for each split; move one away")


def _name(files: Mapping[str, tuple[Path, ...]]) -> str | None:
    """The catalogue's name for these files: by file names, features of the first lines, then folder name or size."""
    path = files["train"][0]
    if path.name.startswith("set1.train."):
        return "yahoo"
    text, _ = next(blocks(path))
    body = b"\n".join(line.partition(b"#")[0] for line in text.split(b"\n"))
    width = max((int(index) for index in re.findall(rb"[ \t](\d{1,9}):", body)), default=0)
    fitting = [name for name, entry in CATALOGUE.items() if entry.features == width]
    fitting = [name for name in fitting if set(CATALOGUE[name].files) == set(files)] or fitting
    if "mq2008" in fitting:
        queries = [int(query) for query in re.findall(rb"qid:(\d{1,18})\s", body)]
        return "mq2007" if queries and max(queries) <= _LAST_MQ2007_QUERY else "mq2008"
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    place = "/".join(path.resolve().parent.parts[-3:]).lower()
    named = [name for name in fitting if name.removeprefix("web") in place]
    if named:
        return named[0]
    documents = sum(_estimated_documents(p) for paths in files.values() for p in paths)
    off = {name: abs(log(documents / (CATALOGUE[name].total.documents or 1))) for name in fitting}
    nearest = min(fitting, key=off.__getitem__)
    return nearest if off[nearest] < log(2) else fitting[0]


def _estimated_documents(path: Path) -> float:
    text, used = next(blocks(path))
    return text.count(b"\n") * path.stat().st_size / max(used, 1)


def read_layout(layout: Layout, progress: Progress | None = None) -> Iterator[tuple[str, RankingDataset]]:
    """The splits of a recognised folder, one after the other; without an entry all are read first, to give them one width."""
    entry = CATALOGUE.get(layout.dataset or "")
    total = sum(p.stat().st_size for paths in layout.files.values() for p in paths)
    done = 0

    def read(paths: tuple[Path, ...]) -> RankingDataset:
        nonlocal done
        start, size = done, sum(p.stat().st_size for p in paths)
        done += size
        tell = None if progress is None else lambda now, of: progress(start + size * now // max(of, 1), total)
        return read_svmlight(paths, features=entry.features if entry else None, progress=tell)

    if entry:
        for split, paths in layout.files.items():
            yield split, read(paths)
        return
    all_read = {split: read(paths) for split, paths in layout.files.items()}
    width = max(data.features.shape[1] for data in all_read.values())
    for split, data in all_read.items():
        lacking = width - data.features.shape[1]
        yield (
            split,
            dataclasses.replace(data, features=np.pad(data.features, ((0, 0), (0, lacking)))) if lacking else data,
        )


def _refuse_occupied(target: Path, overwrite: bool) -> None:
    """Say before hours of reading that there is no place to write; only what `prepare` wrote is replaced."""
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
        raise ValueError(f"{target} holds {strange[0]}, which is no prepared data; choose another folder (out)")


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
