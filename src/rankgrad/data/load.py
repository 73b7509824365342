"""From what a person names as data (`synthetic`, a file, a folder) to lists.

synthetic, synthetic:SIZE   generated from a seed, three splits (sizes: tiny, small, web30k, istella, istella-full)
a text file                 LETOR/SVMLight, plain or compressed
a table                     Parquet, CSV or Arrow, by its ending, with columns label and qid (or as `Columns` says)
a folder                    of text files train, vali, test (any layout the catalogue knows), of tables of those names
                            or parts of them (data/tables/files.py), what `prepare` wrote, or one saved dataset
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rankgrad.data.catalogue import CATALOGUE, SPLITS, Progress, read_layout, recognise
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.folder import MANIFEST, SUMMARY, read_manifest
from rankgrad.data.svmlight.reader import read_svmlight
from rankgrad.data.synthetic import SIZES, synthetic
from rankgrad.data.tables.columns import matches
from rankgrad.data.tables.files import is_table, table_files
from rankgrad.data.tables.reader import read_table
from rankgrad.files import refuse_links

Splits = dict[str, Callable[[], RankingDataset]]  # each read when it is asked for


class Columns(NamedTuple):
    """How files are to be understood: which columns of a table hold what (see `read_table`), and what is missing where.

    `features` and `ignore` choose the columns that are learned from, () is all; `categorical`, `by_type` and `pandas_categories` say which of them
    hold categories. `missing`: "zero" (a feature that a line of text does not name is 0), "nan" (it is missing, and a line may write nan for a value), or "all_zero" (as "zero", and null and NaN of tables are 0 too, as they were to
    runs whose configuration does not say what is missing). `zero_based`: the first feature of text has index 0.
    """

    label: str = "label"
    qid: str = "qid"
    weight: str | None = None
    missing: str = "zero"
    zero_based: bool = False
    features: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    document: str | None = None
    document_weight: str | None = None
    categorical: tuple[str, ...] = ()
    by_type: bool = True
    pandas_categories: bool = True

    def of_table(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """What `read_table` is told; `names` are the features a model expects, if there is one."""
        chosen = (
            {"features": self.features or None, "ignore": self.ignore}
            if names is None
            else {"features": names, "ignore": ()}
        )
        roles = {name: getattr(self, name) for name in ("label", "qid", "weight", "document", "document_weight")}
        kinds = {name: getattr(self, name) for name in ("categorical", "by_type", "pandas_categories")}
        return {**roles, **chosen, **kinds, "missing": 0.0 if self.missing == "all_zero" else math.nan}

    def of_text(self) -> dict[str, Any]:
        """What `read_svmlight` is told."""
        missing = math.nan if self.missing == "nan" else 0.0
        return {"missing": missing, "zero_based": self.zero_based, "sparse": True}


DEFAULT_COLUMNS = Columns()


def check_source(source: str, *, fold: int = 1) -> None:
    """Refuse a name that is not data, without reading any."""
    if _splits_of(source) is None and not Path(source).is_file():
        recognise(source, fold=fold)


def is_text_folder(source: str) -> bool:
    """Whether a source is a folder of LETOR/SVMLight text, which has to be read before it can be used.

    >>> is_text_folder("synthetic")
    False
    """
    return _splits_of(source) is None and not Path(source).is_file()


def read_splits(
    source: str, *, fold: int = 1, columns: Columns = DEFAULT_COLUMNS, progress: Progress | None = None
) -> dict[str, RankingDataset]:
    """Every split a source has, `train` at least.

    - `source`: a name as above; a single file or saved dataset is `train`.
    - `fold`: which fold to read of a folder of texts that has several.
    - `columns`: what the columns of tables are called, and what is missing where.
    - `progress`: called with the bytes read so far and the bytes of all files, for text.

    >>> {split: len(data) for split, data in read_splits("synthetic:tiny").items()}
    {'train': 30, 'vali': 10, 'test': 10}
    """
    for key in ("features", "ignore", "weight", "document_weight", "categorical"):
        kept = key not in ("features", "ignore") and _saved_in(Path(source))  # which holds weights and categories
        if getattr(columns, key) and not kept:
            _expect_tables(source, key)
    if Path(source).is_file():
        return {"train": _read_file(Path(source), None, None, progress, columns)}
    found = _splits_of(source, columns=columns)
    if found is None:
        return dict(read_layout(recognise(source, fold=fold), progress, **columns.of_text()))
    if "train" not in found:
        raise ValueError(f"{source} has no train split; it has {', '.join(found)}; add one")
    first = found["train"]()
    if first.feature_names is not None:  # the others hold categories where it does, whatever their types
        known = tuple(first.feature_names[column] for column in first.categories)
        for pattern in columns.categorical if _saved_in(Path(source)) else ():
            if not any(matches(name, [pattern]) for name in known):
                warnings.warn(
                    f"{source} was prepared with no column {pattern!r} of categories; expected that of data.categorical; give it to "
                    "rankgrad prepare",
                    stacklevel=2,
                )
        columns = columns._replace(categorical=known, by_type=False)
        found = _splits_of(source, first.feature_names, columns=columns) or found  # tables by the names of its columns
    splits = {split: first if split == "train" else read() for split, read in found.items()}
    for split, data in splits.items():
        if (data.features.shape[1], data.feature_names) != (first.features.shape[1], first.feature_names):
            raise ValueError(
                f"the splits train and {split} of {source} have different features; "
                "expected the same columns in the same order; change one of them"
            )
    return splits


def read_lists(
    source: str,
    *,
    split: str = "test",
    fold: int = 1,
    features: int | None = None,
    names: Sequence[str] | None = None,
    labelled: bool = True,
    columns: Columns = DEFAULT_COLUMNS,
    progress: Progress | None = None,
) -> RankingDataset:
    """The lists to evaluate or rank.

    - `source`: a name as above.
    - `split`: the split to read, where the source has several; a source without splits is read whole.
    - `fold`: which fold to read of a folder of texts that has several.
    - `features`: the number of features a model expects; narrower text is padded with what is missing in it, anything else
      that differs is refused.
    - `names`: the columns a model expects; those of a table are taken by name, whatever their order.
    - `labelled`: False also reads tables without labels, to be ranked.
    - `columns`: what the columns of tables are called, and what is missing where.
    - `progress`: called with the bytes read so far and the bytes of all files, for text.
    """
    path = Path(source)
    if path.is_file():
        data = _read_file(path, features, names, progress, columns, labelled=labelled)
    else:
        found = _splits_of(source, names, labelled=labelled, columns=columns)
        if found is None:
            layout = recognise(path, fold=fold)
            entry = CATALOGUE.get(layout.dataset or "")
            width = features or (entry.features if entry else None)
            read = partial(read_svmlight, features=width, progress=progress, **columns.of_text())
            found = {name: partial(read, files) for name, files in layout.files.items()}
        if split not in found and len(found) > 1:
            raise ValueError(f"{source} has no split {split!r}; it has {', '.join(found)}; choose one of them")
        data = (found.get(split) or next(iter(found.values())))()
    if features is not None and data.features.shape[1] != features:
        raise ValueError(
            f"{source} has {data.features.shape[1]} features; the model expects {features}; "
            "give it data with the columns it was trained on"
        )
    if names is not None and data.feature_names is not None and tuple(names) != data.feature_names:
        raise ValueError(
            f"the columns of {source} are not those the model was trained on, or in another order; "
            f"expected {', '.join(names)}; give it data with these columns"
        )
    return data


def _splits_of(
    source: str, names: Sequence[str] | None = None, *, labelled: bool = True, columns: Columns = DEFAULT_COLUMNS
) -> Splits | None:
    """The splits of a source that is synthetic, saved or of tables; None for a file and for a folder of texts."""
    path = Path(source)
    kind, _, size = source.partition(":")
    if kind == "synthetic" and not path.exists():
        if (size or "small") not in SIZES:
            raise ValueError(f"there is no synthetic data of size {size!r}; expected one of {', '.join(SIZES)}")
        return {split: partial(synthetic, size or "small", split) for split in SPLITS}
    if path.is_file():
        return None
    if not path.is_dir():
        raise ValueError(
            f"{source} does not exist; expected a file or folder of ranking data, or synthetic[:SIZE]; check the path"
        )
    if (path / MANIFEST).exists():
        return {"train": partial(RankingDataset.open, path)}
    saved = _saved_in(path)
    if saved:
        refuse_links(path)
        _refuse_unfinished(path, saved)
        return {split: partial(RankingDataset.open, path / split) for split in saved}
    read = partial(read_table, labelled=labelled, **columns.of_table(names))
    return {split: partial(read, parts) for split, parts in table_files(path).items()} or None


def _read_file(
    path: Path,
    features: int | None,
    names: Sequence[str] | None,
    progress: Progress | None,
    columns: Columns,
    *,
    labelled: bool = True,
) -> RankingDataset:
    if is_table(path):
        return read_table(path, labelled=labelled, **columns.of_table(names))
    return read_svmlight(path, features=features, progress=progress, **columns.of_text())


def _expect_tables(source: str, key: str) -> None:
    """Refuse to name columns of what has none: all would be taken, and no weights, without a word."""
    path = Path(source)
    if not (is_table(path) if path.is_file() else path.is_dir() and table_files(path) and not _saved_in(path)):
        raise ValueError(
            f"data.{key} names columns of tables, and {source} is none; expected Parquet, CSV or Arrow; leave it out, or give it "
            "to rankgrad prepare where the data was prepared from tables"
        )


def _saved_in(folder: Path) -> list[str]:
    """The splits that are saved in a folder, train if it is itself a saved dataset."""
    if (folder / MANIFEST).exists():
        return ["train"]
    return [split for split in SPLITS if (folder / split / MANIFEST).exists()]


def _refuse_unfinished(folder: Path, splits: Sequence[str]) -> None:
    """`prepare` writes its summary last: without it, the splits it wrote may not be all."""
    for split in splits if not (folder / SUMMARY).is_file() else ():
        origin = read_manifest(folder / split).get("provenance", {})
        if origin.get("split") == split and "fold" in origin and "selected" not in origin:
            raise ValueError(
                f"{folder} was prepared but its {SUMMARY} is missing, so it may be incomplete; expected the whole "
                "folder; prepare the data again with overwrite"
            )
