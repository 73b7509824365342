"""The public ranking datasets: their files, published counts and quirks, and how to tell which one a folder holds.

Counts are held only where they are certain; None is not known and not checked. Nothing is ever downloaded: every entry
of `CATALOGUE` says where a person gets the files and under what licence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.checks import whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.spool import widened_on_disk
from rankgrad.data.svmlight.reader import read_svmlight
from rankgrad.data.svmlight.text import blocks
from rankgrad.data.tables.arrow import kind_of

Progress = Callable[[int, int], None]  # called with the bytes read so far and the bytes of all files
SPLITS = ("train", "vali", "test")


@dataclass(frozen=True)
class Counts:
    """Published numbers of a split or a whole dataset; None where unknown."""

    queries: int | None = None
    documents: int | None = None
    empty_queries: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Entry:
    """One public dataset. `files` maps split to its path under the unpacked folder, `{fold}` where there are folds."""

    title: str
    files: Mapping[str, str]
    features: int
    max_label: int
    scaling: str
    source: str
    licence: str
    total: Counts
    fold1: Mapping[str, Counts] = field(default_factory=dict)  # of the first fold, or of the only one
    folds: int = 1
    quirks: tuple[str, ...] = ()
    features_used: int | None = None  # how many of the features occur at all, where not every one does

    @property
    def used(self) -> int:
        """A file's largest index is at least this."""
        return self.features_used or self.features


_FOLDS = {split: f"Fold{{fold}}/{split}.txt" for split in SPLITS}
_MSLR: dict[str, Any] = {
    "files": _FOLDS,
    "folds": 5,
    "features": 136,
    "max_label": 4,
    "scaling": "web30k",
    "source": "https://www.microsoft.com/en-us/research/project/mslr/",
    "licence": "Microsoft Research licence agreement, research use",
}
_ISTELLA: dict[str, Any] = {
    "features": 220,
    "max_label": 4,
    "scaling": "auto",
    "source": "http://quickrank.isti.cnr.it/istella-dataset/",
    "licence": "Istella LETOR licence agreement, non-commercial use",
    "quirks": ("missing numbers are written 1.797e308; they are clamped on reading and tamed by the scaling",),
}
_LETOR: dict[str, Any] = {
    "folds": 5,
    "max_label": 2,
    "scaling": "standard",
    "source": "https://www.microsoft.com/en-us/research/project/letor-learning-rank-information-retrieval/",
    "licence": "Microsoft Research LETOR, research use",
}
_NULL_QUIRK = "take the QueryLevelNorm or MIN version: the NULL version holds the word NULL and is refused"

# Where the first lines fit several entries, the first listed is taken unless the folder's name or size says otherwise.
CATALOGUE: Mapping[str, Entry] = {
    "web30k": Entry(
        title="MSLR-WEB30K",
        total=Counts(31_531, 3_771_125, longest=1_251),
        fold1={
            "train": Counts(18_919, 2_270_296, empty_queries=602),
            "vali": Counts(6_306, 747_218, empty_queries=191),
            "test": Counts(6_306, 753_611, empty_queries=189),
        },
        **_MSLR,
    ),
    "web10k": Entry(
        title="MSLR-WEB10K",
        total=Counts(10_000, 1_200_192),
        fold1={
            "train": Counts(6_000, 723_412),
            "vali": Counts(2_000, 235_259),
            "test": Counts(2_000, 241_521),
        },
        **_MSLR,
    ),
    "istella": Entry(
        title="Istella LETOR (full)",
        files={"train": "full/train.txt", "test": "full/test.txt"},
        total=Counts(33_018, 10_454_629, empty_queries=50),
        fold1={"train": Counts(23_219, 7_325_625), "test": Counts(9_799, 3_129_004)},
        **_ISTELLA,
    ),
    "istella-s": Entry(
        title="Istella-S LETOR",
        files={split: f"sample/{split}.txt" for split in SPLITS},
        total=Counts(33_018, 3_408_630),
        fold1={
            "train": Counts(19_245, 2_043_304),
            "vali": Counts(7_211, 684_076),
            "test": Counts(6_562, 681_250),
        },
        **_ISTELLA,
    ),
    "istella-x": Entry(
        title="Istella-X LETOR",
        files={split: f"{split}.txt" for split in SPLITS},
        total=Counts(10_000, 26_791_447),
        **_ISTELLA,
    ),
    "yahoo": Entry(
        title="Yahoo! Learning to Rank Challenge, set 1",
        files={"train": "set1.train.txt", "vali": "set1.valid.txt", "test": "set1.test.txt"},
        features=700,
        features_used=519,
        max_label=4,
        scaling="standard",
        source="https://webscope.sandbox.yahoo.com/ (dataset C14)",
        licence="Yahoo Webscope agreement, non-commercial research",
        total=Counts(29_921, 709_877),
        fold1={
            "train": Counts(19_944, 473_134),
            "vali": Counts(2_994, 71_083),
            "test": Counts(6_983, 165_660),
        },
        quirks=("features lie in [0, 1] already; of the 700, 519 are used by set 1",),
    ),
    "mq2008": Entry(
        title="LETOR 4.0 MQ2008",
        files=_FOLDS,
        features=46,
        total=Counts(784, 15_211, empty_queries=220, longest=121),
        quirks=(_NULL_QUIRK, "the five parts S1 to S5 are recognised too; fold f trains on three parts from Sf"),
        **_LETOR,
    ),
    "mq2007": Entry(
        title="LETOR 4.0 MQ2007",
        files=_FOLDS,
        features=46,
        total=Counts(1_692, 69_623),
        quirks=(_NULL_QUIRK,),
        **_LETOR,
    ),
    "ohsumed": Entry(
        title="LETOR 3.0 OHSUMED",
        files={split: f"Fold{{fold}}/{name}set.txt" for split, name in zip(SPLITS, ("training", "validation", "test"))},
        features=45,
        total=Counts(106, 16_140),
        quirks=(_NULL_QUIRK,),
        **_LETOR,
    ),
}

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
    """What `recognise` found: the dataset's name in the catalogue (None: not in it) and the files of each split."""

    dataset: str | None
    fold: int
    files: Mapping[str, tuple[Path, ...]]


def recognise(folder: str | Path, *, dataset: str | None = None, fold: int = 1) -> Layout:
    """Find the split files of a ranking dataset under a folder and say which dataset of the catalogue it is.

    - `folder`: looked for in it, in its `Fold1` and in the places the catalogue names are train, vali (valid,
      validation) and test with the ending .txt, .svm, .letor or .dat, also .gz, .bz2, .zst; or the five parts S1 to S5
      of MQ2008.
    - `dataset`: a name of the catalogue, taken instead of the one found.
    - `fold`: 1 to 5. A folder `Fold3` is fold 3, whether fold 3 or the default 1 is asked for; another fold is refused.
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
            f".zst) in it or in Fold{fold}, or tables of these names, or the parts of one table (.parquet, .csv){hint}"
        )
    name = dataset or _name(files)
    if name and fold > CATALOGUE[name].folds:
        raise ValueError(f"there is no fold {fold} of {name}; it has no folds; leave the fold out")
    inside = re.fullmatch(r"Fold([1-5])", files["train"][0].resolve().parent.name)
    own = int(inside[1]) if inside else fold
    if fold not in (1, own):
        raise ValueError(f"{folder} is fold {own}; fold {fold} was asked for; give that fold's folder or the one above")
    return Layout(name, own, files)


def read_layout(
    layout: Layout,
    progress: Progress | None = None,
    *,
    missing: float = 0.0,
    zero_based: bool = False,
    sparse: bool = False,
    spool: Path | None = None,
) -> Iterator[tuple[str, RankingDataset]]:
    """The splits of a recognised folder, one after the other; `missing`, `zero_based` and `sparse` as in `read_svmlight`.

    The catalogue says how many features a dataset has. Where it has no entry, all splits are read first and the
    narrower ones are padded with `missing`. With a `spool` features are kept in files of that folder instead of memory.
    """
    entry = CATALOGUE.get(layout.dataset or "")
    total = sum(p.stat().st_size for paths in layout.files.values() for p in paths)
    done = 0

    def read(split: str) -> RankingDataset:
        nonlocal done
        paths = layout.files[split]
        start, size = done, sum(p.stat().st_size for p in paths)
        done += size
        report = None if progress is None else lambda now, of: progress(start + size * now // max(of, 1), total)
        return read_svmlight(
            paths,
            features=entry.features if entry else None,
            progress=report,
            missing=missing,
            zero_based=zero_based,
            sparse=sparse,
            spool=None if spool is None else spool / split,
        )

    if entry:
        for split in layout.files:
            yield split, read(split)
        return
    all_read = {split: read(split) for split in layout.files}
    width = max(data.features.shape[1] for data in all_read.values())
    for split, data in all_read.items():
        lacking = width - data.features.shape[1]
        if lacking and spool is not None:
            wide = widened_on_disk(data.features, spool / f"{split}.wide", width, missing)
            data = dataclasses.replace(data, features=wide)
        elif lacking and isinstance(data.features, FeatureRows):
            data = dataclasses.replace(data, features=data.features.widened(width))
        elif lacking:
            padded = np.pad(data.features, ((0, 0), (0, lacking)), constant_values=missing)
            data = dataclasses.replace(data, features=padded)
        yield split, data


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
    return ValueError(f"{one} and {other.name} are of the same split; expected one file for each; move one away")


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
