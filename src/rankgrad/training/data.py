"""The lists of a run: read, a part held out where there is no validation split, scaled, shared between processes.

The test split is scaled like the others and otherwise left alone.
"""

import contextlib
import dataclasses
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.data.load import Columns, read_splits
from rankgrad.data.memory import affordable
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.files import load_tensors, save_tensors
from rankgrad.training import distributed
from rankgrad.training.config import Config, Data
from rankgrad.training.evaluate import expect_gains

ScaledSplits = tuple[dict[str, RankingDataset], Scaling, str]  # by name, how they were scaled, a fingerprint


def shared_splits(config: Config, out: Path, world: int, form: "ListsLike | None" = None) -> ScaledSplits:
    """The splits, scaled. Of several processes the first of a machine reads the text; the others map what it made.

    `form`: whose columns and scaling they are given; None: their own.
    """
    if world == 1:
        return load_splits(config, form)
    local, number = distributed.place_on_machine()
    folder = out / f".scaled-{number}"
    if local == 0:
        shutil.rmtree(folder, ignore_errors=True)
        save_scaled(folder, *load_splits(config, form))
    distributed.barrier()
    lent = open_scaled(folder)
    distributed.barrier()
    if local == 0:
        shutil.rmtree(folder)  # the mapped files live on until the last process lets go of them
        with contextlib.suppress(OSError):  # on another machine the folder was made for this alone
            out.rmdir()
    return lent


def save_scaled(folder: Path, splits: dict[str, RankingDataset], scaling: Scaling, fingerprint: str) -> None:
    """Write what `load_splits` gives; scaling.safetensors comes last, so that its presence means all is there."""
    for name, split in splits.items():
        split.save(folder / name)
    state = {name: torch.from_numpy(np.array(value)) for name, value in scaling.to_state().items()}
    save_tensors(folder / "scaling.safetensors", state, {"splits": list(splits), "fingerprint": fingerprint})


def open_scaled(folder: Path) -> ScaledSplits:
    """What `save_scaled` wrote, memory-mapped."""
    tensors, facts = load_tensors(
        folder / "scaling.safetensors", "; put a copy of it back, or begin again in another folder"
    )
    scaling = Scaling.from_state({name: tensor.numpy() for name, tensor in tensors.items()})
    return {name: RankingDataset.open(folder / name) for name in facts["splits"]}, scaling, facts["fingerprint"]


def hold_out(data: RankingDataset, share: float, seed: int) -> tuple[RankingDataset, RankingDataset]:
    """Two parts of two queries or more: one to train, and a share, at least one query, to judge epochs by."""
    judges = min(max(1, round(share * len(data))), len(data) - 1)
    fitted, held_out = data.split([len(data) - judges, judges], seed=seed)
    return fitted, held_out


def columns_of(data: Data) -> Columns:
    """How a configuration wants files to be understood; before there were categories truth values were numbers."""
    given = {name: getattr(data, name) for name in Columns._fields if name != "by_type"}
    return Columns(**given, by_type=data.missing != "all_zero")


def unscaled_splits(config: Config) -> dict[str, RankingDataset]:
    """The splits as they are read, a part of train held out where there is no validation split."""
    splits = read_splits(config.data.path, fold=config.data.fold, columns=columns_of(config.data))
    if "vali" not in splits and config.members.bag == 1:
        share, train_set = config.data.validation, splits.pop("train")
        if len(train_set) < 2:
            raise ValueError(
                f"{config.data.path} has one query; expected at least two, one to train and one to validate"
            )
        fitted, validation = hold_out(train_set, share, config.train.seed)
        splits = {"train": fitted, "vali": validation, **splits}
    # Ids of documents are for rankings, those that are measured: nothing looks at them here.
    splits["train"] = dataclasses.replace(splits["train"], document_ids=None)
    for split in splits.values():
        expect_gains(split, "the NDCG that every run records", gain=config.data.gain)
    return splits


class ListsLike(Protocol):
    """What lists must look like for weights that were learned before: see `rankgrad.training.start`."""

    def in_order(self, data: RankingDataset) -> RankingDataset:
        """The same lists with their columns in the order that is wanted."""

    def scaling_for(self, train: RankingDataset) -> Scaling:
        """How they are scaled."""


def load_splits(config: Config, form: ListsLike | None = None) -> ScaledSplits:
    """The splits scaled by what the train split shows, or as `form` wants them, and a fingerprint of them as they were read."""
    splits = unscaled_splits(config)
    if form is None:
        scaling = fit_scaling(splits["train"], config.data.scaling)
    else:
        splits = {name: form.in_order(data) for name, data in splits.items()}
        scaling = form.scaling_for(splits["train"])
    fingerprint = fingerprint_of(splits)
    for name in splits:  # one at a time: what was read is let go
        splits[name] = scaled(splits[name], scaling)
    return splits, scaling, fingerprint


def without_zero_weights(data: RankingDataset) -> RankingDataset:
    """The queries that weigh anything."""
    if data.document_weights is not None and not data.document_weights.any():
        raise ValueError("every document has weight 0; expected a weight above 0 somewhere; correct the weights")
    if data.weights is None or data.weights.all():
        return data
    if not data.weights.any():
        raise ValueError("every query has weight 0; expected a weight above 0 somewhere; correct the weights")
    return data.select(data.weights > 0)


def scaled(data: RankingDataset, scaling: Scaling) -> RankingDataset:
    """The same lists with scaled features and indicators of missing values.

    At once, or where that copy is too large batch by batch, to the same bits.
    """
    features, names = data.features, data.feature_names
    if names is not None:
        names = (*names, *(f"{names[column]} (missing, input {column})" for column in scaling.indicators))
    own = scaling.of(data)
    made: Features = FeatureRows([features], scaling=own)
    if not isinstance(features, FeatureRows) and affordable(made.nbytes):
        made = own.apply(features)
    return dataclasses.replace(data, features=made, feature_names=names, categories=scaling.levels)


def fingerprint_of(splits: Mapping[str, RankingDataset]) -> str:
    """Tells the lists that are learned from, as they were read, from others."""
    return " ".join(_fingerprint(splits[name]) for name in ("train", "vali") if name in splits)


def _fingerprint(data: RankingDataset) -> str:
    """Enough of the data to notice that it is not the same: sizes, labels, list lengths, weights, a thousand rows."""
    rows = data.features[:: max(1, len(data.features) // 1000)]
    arrays = [data.labels, data.offsets, np.ascontiguousarray(rows)]
    arrays += [weights for weights in (data.weights, data.document_weights) if weights is not None]
    return f"{data.features.shape} " + "".join(f"{zlib.crc32(array.tobytes()):08x}" for array in arrays)
