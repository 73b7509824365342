"""What a person may name as data: `synthetic`, a file, a folder. From that name to lists.

synthetic, synthetic:SIZE   made up from a seed, three splits (sizes: tiny, small, web30k, istella)
a text file                 LETOR/SVMLight, plain or compressed; a table: .parquet, .csv, .tsv, .arrow, .feather, .ipc
a folder                    of text files train, vali, test (any layout the catalogue knows), of tables of those names,
what `prepare` wrote, or one saved dataset
"""

from pathlib import Path

from rankgrad.data.catalogue import Progress, read_layout, recognise
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.storage import MANIFEST
from rankgrad.data.svmlight import read_svmlight
from rankgrad.data.synthetic import synthetic
from rankgrad.data.tables import read_table

SPLITS = ("train", "vali", "test")
TABLES = (".parquet", ".csv", ".tsv", ".arrow", ".feather", ".ipc")


def read_splits(source: str, *, fold: int = 1, progress: Progress | None = None) -> dict[str, RankingDataset]:
    """Every split a source has, `train` at least; a single file or saved dataset is `train`.

    >>> {split: len(data) for split, data in read_splits("synthetic:tiny").items()}
    {'train': 30, 'vali': 10, 'test': 10}
    """
    kind, _, size = source.partition(":")
    if kind == "synthetic" and not Path(source).exists():
        return {split: synthetic(size or "small", split) for split in SPLITS}
    path = Path(source)
    if path.is_file():
        return {"train": _read_file(path, None, progress)}
    if not path.is_dir():
        raise ValueError(
            f"{source} does not exist; expected a file or folder of ranking data, or synthetic[:SIZE]; check the path"
        )
    if (path / MANIFEST).exists():
        return {"train": RankingDataset.open(path)}
    prepared = [path / split for split in SPLITS if (path / split / MANIFEST).exists()]
    if prepared:
        return _with_train(source, {folder.name: RankingDataset.open(folder) for folder in prepared})
    tables = {file.stem: file for file in sorted(path.iterdir()) if _is_table(file) and file.stem in SPLITS}
    if tables:
        return _with_train(source, {split: read_table(tables[split]) for split in SPLITS if split in tables})
    return dict(read_layout(recognise(path, fold=fold), progress))


def read_lists(
    source: str, *, split: str = "test", fold: int = 1, features: int | None = None, progress: Progress | None = None
) -> RankingDataset:
    """The lists to judge or rank: of a source with splits the one named, else all of it.

    `features` is the width a model expects; narrower text is padded with zeros, anything else that differs is refused.
    """
    path = Path(source)
    if path.is_file():
        data = _read_file(path, features, progress)
    else:
        splits = read_splits(source, fold=fold, progress=progress)
        if split not in splits and len(splits) > 1:
            raise ValueError(f"{source} has no split {split!r}; it has {', '.join(splits)}; choose one of them")
        data = splits.get(split) or splits["train"]
    if features is not None and data.features.shape[1] != features:
        raise ValueError(
            f"{source} has {data.features.shape[1]} features; the model expects {features}; "
            "give it data with the columns it was trained on"
        )
    return data


def _read_file(path: Path, features: int | None, progress: Progress | None) -> RankingDataset:
    if _is_table(path):
        return read_table(path)
    return read_svmlight(path, features=features, progress=progress)


def _is_table(path: Path) -> bool:
    name = path.stem if path.suffix in (".gz", ".bz2", ".zst") else path.name
    return path.is_file() and name.endswith(TABLES)


def _with_train(source: str, splits: dict[str, RankingDataset]) -> dict[str, RankingDataset]:
    if "train" not in splits:
        raise ValueError(f"{source} has no train split; it has {', '.join(splits)}; add one")
    return splits
