"""A fitted ranker: a model, how its features are scaled, and what they are called. What runs, ensembles and estimators score with.

On disk it is one safetensors file that says how its model is built; loading it executes nothing.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad import __version__
from rankgrad.data.categories import (
    Levels,
    blame_a_column,
    frame_names,
    is_frame,
    numbers_of,
    split_frame,
    with_codes,
)
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import Features
from rankgrad.data.grouping import as_float32, as_sparse_rows
from rankgrad.data.scaling import Scaling
from rankgrad.data.sparse import is_sparse
from rankgrad.files import load_tensors, save_tensors
from rankgrad.models import ranking_scores
from rankgrad.training.build import OwnLoss, losses_of, make_averaged, make_device, make_scorer
from rankgrad.training.config import Config, dumps, loads
from rankgrad.training.data import scaled
from rankgrad.training.evaluate import DOCUMENTS_AT_ONCE, evaluate, metrics_of, score
from rankgrad.training.network import OwnModel, expect_own, make_network
from rankgrad.training.state import under
from rankgrad.training.threads import threads_asleep, threads_worth, weights_of


@dataclass(frozen=True)
class Ranker:
    """Scores raw documents.

    >>> from rankgrad.data import synthetic, fit_scaling
    >>> lists = synthetic("tiny")
    >>> model = make_scorer(Config(), 136, 1, tanh=True)
    >>> ranker = Ranker.of(model, fit_scaling(lists), Config(), lists, torch.device("cpu"))
    >>> ranker.score(lists.features[:10], sizes=[4, 6]).shape
    (10,)
    """

    model: nn.Module
    scaling: Scaling
    config: Config
    device: torch.device
    units: int = 1  # outputs of the model per document
    tanh: bool = False  # whether the loss it was trained with puts tanh on the scores
    names: tuple[str, ...] | None = None  # of the features
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else was saved with it

    @classmethod
    def of(
        cls,
        model: nn.Module,
        scaling: Scaling,
        config: Config,
        data: RankingDataset,
        device: torch.device,
        loss: OwnLoss = None,
    ) -> "Ranker":
        """A model that was trained by a configuration on lists like `data`."""
        spec, _ = next(iter(losses_of(config, loss).values()))
        units = spec.units(int(data.labels.max()))
        names = data.feature_names if data.feature_names is None else data.feature_names[: scaling.columns]
        return cls(model.eval(), scaling, config, device, units, spec.tanh, names)

    @property
    def features(self) -> int:
        """How many columns a document has."""
        return self.scaling.columns

    def score(self, features: Any, sizes: Any = None) -> np.ndarray:
        """Scores [N] float32 of documents [N, F]; `sizes` says how many rows each list has, None: all are one list.

        They are an array, a sparse matrix of scipy, or a frame of pandas, polars or pyarrow, whose columns are taken by name, unless
        none of them has the name of a feature. NaN is a missing value, categories are given as they were in training, and infinity is
        refused.
        """
        rows, levels = self._documents(features)
        lengths = np.array([len(rows)]) if sizes is None else np.asarray(sizes)
        whole = lengths.ndim == 1 and (lengths.dtype.kind in "iu" or not lengths.size)  # numpy makes [] floats
        if not whole or (lengths < 0).any() or lengths.sum() != len(rows):
            raise ValueError(f"sizes are {sizes!r}; expected the number of rows of each list, {len(rows)} together")
        lengths = lengths[lengths > 0]
        if not len(lengths):
            return np.empty(0, np.float32)
        if len(lengths) == 1:  # no dataset is made of it
            return self._score_one(rows, replace(self.scaling, source=levels) if levels else self.scaling)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        labels = np.zeros(len(rows), np.float32)
        return self.score_lists(RankingDataset(rows, labels, offsets, np.arange(len(lengths)), categories=levels))

    def _documents(self, features: Any) -> tuple[Features, Levels]:
        """Documents [N, F] as float32, and the levels of their categories."""
        if is_frame(features) and self.names is not None:
            features = self._named(features)
        if is_sparse(features):
            if self.scaling.levels:
                raise ValueError(
                    "features are sparse and the model was trained on categories; expected a frame or an array; give one"
                )
            _expect_shape(features.shape, self.features)
            return as_sparse_rows(features, self.names), {}
        rest, found = split_frame(features, None, self.scaling.levels)
        try:
            rows = with_codes(numbers_of(rest), found) if found else numbers_of(rest)
        except (TypeError, ValueError):
            blame_a_column(rest)
            raise
        levels = {column: texts for column, (_, texts) in found.items()}
        _expect_shape(rows.shape, self.features)
        rows = as_float32(rows if rows.dtype.kind == "f" else rows.astype(np.float32), self.names)
        return rows, levels

    def _named(self, frame: Any) -> Any:
        """The columns of a frame that are features, where it has any of their names; it must then have all."""
        wanted, given = list(self.names or ()), set(frame_names(frame))
        missing = [name for name in wanted if name not in given]
        if len(missing) == len(wanted):
            return frame
        if missing:
            raise ValueError(
                f"features have no column {missing[0]!r}, which the model was trained on; expected {', '.join(map(repr, wanted[:12]))}"
                f"{' and more' if len(wanted) > 12 else ''}; add it, filled with NaN if it is missing"
            )
        return frame.select(wanted) if hasattr(frame, "select") else frame[wanted]

    def score_lists(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        if len(data) == 1:
            return self._score_one(data.features, self.scaling.of(data))
        with self._threads(len(data.labels)):
            return score(self.model, scaled(data, self.scaling), device=self.device)

    def _score_one(self, rows: Features, scaling: Scaling) -> np.ndarray:
        """Of one list, as a request of a service is: what batches need costs as much as a small model."""
        with torch.inference_mode(), self._threads(len(rows)):
            output = self.model(torch.from_numpy(scaling.apply(rows[:])).to(self.device)[None], None)
            return ranking_scores(output.float(), self.units)[0].cpu().numpy()

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        wanted = metrics_of(self.config, metrics)
        with self._threads(len(data.labels)):
            return evaluate(self.model, scaled(data, self.scaling), wanted, device=self.device)

    def _threads(self, documents: int) -> AbstractContextManager[None]:
        """As many threads as scoring so many documents is worth: one for the list of a service."""
        if self.device.type != "cpu":
            return nullcontext()
        return threads_asleep(threads_worth(min(documents, DOCUMENTS_AT_ONCE) * self._size))

    @functools.cached_property
    def _size(self) -> int:
        return weights_of(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and scaling by name."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        return tensors | {
            f"scaling.{name}": torch.from_numpy(np.array(a)) for name, a in self.scaling.to_state().items()
        }

    def description(self) -> dict[str, Any]:
        """What is needed beside the tensors to build it again, for JSON."""
        names = None if self.names is None else list(self.names)
        built = {"features": self.features, "units": self.units, "tanh": self.tanh, "feature_names": names}
        return built | {"config": dumps(self.config)}

    @property
    def provenance(self) -> dict[str, Any]:
        """Where it comes from: loss, data, seed, versions; of a run's folder also its commit and machine."""
        config = self.config
        known = {"loss": config.loss.title, "data": config.data.path, "seed": config.train.seed}
        return known | dict(self.facts.get("provenance", {}))

    def save(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write it into one file, with facts of the caller's."""
        provenance = {"versions": {"rankgrad": __version__, "torch": torch.__version__}} | self.provenance
        save_tensors(path, self.tensors(), {**(facts or {}), **self.description(), "provenance": provenance})

    @classmethod
    def load(
        cls, path: Path, device: str = "auto", *, model: OwnModel = None, config: Config | None = None, hint: str = ""
    ) -> "Ranker":
        """What `save` wrote; `model` is the network of one's own it was trained with, which no file holds.

        `config` is that of a run whose file does not hold it yet, `hint` what to do about a bad file.
        """
        tensors, facts = load_tensors(path, hint)
        try:
            return cls.restore(tensors, facts, device, own=model, config=config, source=str(path))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold what a ranker needs ({type(error).__name__}: {error}); expected a file that Ranker.save wrote"
            ) from error

    @classmethod
    def restore(
        cls,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        device: str = "auto",
        *,
        own: OwnModel = None,
        config: Config | None = None,
        source: str = "the ranker",
    ) -> "Ranker":
        """A ranker from its tensors and description; `own` as in `load`."""
        tensors = dict(tensors)
        if config is None:
            if "config" not in facts:
                raise ValueError(
                    f"{source} does not say how its model is built; expected a file that Ranker.save wrote"
                )
            config = loads(facts["config"], f"the configuration in {source}", of_run=True)
        scaling = Scaling.from_state({name: tensor.numpy() for name, tensor in under(tensors, "scaling.").items()})
        weights = under(tensors, "model.")
        # Files before 0.1.0 hold neither: their models follow the loss's name and their own weights.
        units = facts["units"] if "units" in facts else len(weights["output.weight"])
        tanh = facts["tanh"] if "tanh" in facts else next(iter(losses_of(config).values()))[0].tanh
        model: nn.Module
        misfit = ValueError(
            f"the weights in {source} do not fit [model] of its configuration; "
            "expected them as training wrote them; was one of them changed?"
        )
        make: Callable[[], nn.Module]
        if "members.weights" in weights:
            members = len(weights["members.weights"])
            make = functools.partial(make_averaged, config, scaling.inputs, members, scaling.codes)
        else:
            expect_own(config, own, source)
            make = functools.partial(make_scorer, config, scaling.inputs, units, scaling.codes, tanh=tanh)
            if own is None and max(config.model.layers, len(config.model.hidden)) > max(64, len(weights)):
                raise misfit
        with torch.random.fork_rng(devices=[]):  # a fresh model draws its start
            if own is not None and "members.weights" not in weights:
                model = make_network(own, scaling.inputs, config.model.options)
            else:
                try:  # without memory at first: a file may speak of more weights than it has
                    with torch.device("meta"):
                        shapes = {name: tensor.shape for name, tensor in make().state_dict().items()}
                except (RuntimeError, TypeError, OverflowError):
                    raise misfit from None
                if shapes != {name: tensor.shape for name, tensor in weights.items()}:
                    raise misfit
                model = make()
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            if own is None:
                raise misfit from None
            raise ValueError(
                f"the weights in {source} do not fit the network that was given; expected {config.model.kind} as it was when it "
                f"was trained ({' '.join(str(error).split())})"
            ) from None
        place = make_device(device)
        names = tuple(facts["feature_names"]) if facts.get("feature_names") else None
        return cls(model.to(place).eval(), scaling, config, place, units, tanh, names, facts)


def _expect_shape(shape: tuple[int, ...], columns: int) -> None:
    if len(shape) != 2 or shape[1] != columns:
        raise ValueError(f"features have shape {shape}; expected [documents, {columns}]")
