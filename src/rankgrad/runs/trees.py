"""Boosted trees as run folders: growing them into one, and scoring with a finished one.

A folder holds what every run leaves, trees.json with what was tried and kept, and the models in their library's own format.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rankgrad.data.categories import Levels
from rankgrad.data.dataset import RankingDataset
from rankgrad.errors import InterruptedRunError
from rankgrad.runs import folder as files
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.runs.provenance import ask_other_programs
from rankgrad.runs.run import Finished, Started, begin_run, read_for
from rankgrad.training.build import parse_loss
from rankgrad.training.config import NATIVE, Config, Data, Model, Train, replaced
from rankgrad.training.data import fingerprint_of, unscaled_splits, without_zero_weights
from rankgrad.training.distributed import Signals
from rankgrad.training.evaluate import can_choose, mean, measure, metric_that_chooses, metrics_of
from rankgrad.training.members import folds_of
from rankgrad.training.precision import threads_and_precision
from rankgrad.trees.fit import (
    FittedTrees,
    Scorer,
    best_of,
    expect_library,
    fit_grid,
    fit_trees,
    load_trees,
    version_of,
)
from rankgrad.trees.objectives import objective
from rankgrad.trees.settings import LARGE, MODEL_FILES, OBJECTIVES, Boosting, TreeConfig, drawn


class Grown(NamedTuple):
    """An event of `grow_run`: one of the settings has been tried."""

    number: int  # from 1
    of: int
    rounds: int  # trees that validation likes best
    validation: float
    best: bool  # better than all before


class _Tried(NamedTuple):
    """Trees of one of the settings, one model for each fold, and their scores of the queries that were held out."""

    entry: dict[str, Any]  # for trees.json
    models: list[FittedTrees]
    held_out: np.ndarray


def grow_run(folder: Path, config: Config | None = None) -> Iterator[Started | Grown | Finished]:
    """Grow the trees that a configuration with model.kind = "lightgbm", "xgboost" or "catboost" asks for, yielding what happens.

    - `folder`: of the run. With a `config` it must be new; without one the run in it, which was interrupted, begins again.

    `members.count` settings are tried and the `members.keep` best on validation averaged; with `members.bag` = K each is fitted on
    K splits of the training and validation queries. Ctrl-C and SIGTERM finish the run with what has been grown, and raise
    `InterruptedRunError`; a run that has grown nothing yet leaves no folder behind.
    """
    fresh = config is not None
    if config is not None:
        config = replaced(config, "train.device", "cpu")
    ask_other_programs()
    with Signals(folder, files.is_done) as signals, ExitStack() as held:
        started = begin_run(folder, config, held)
        try:
            yield started
            with threads_and_precision(started.config.train.threads, "float32"):
                signals.listen()
                yield from _grow_run(started.folder, started.config)
        except InterruptedRunError:
            raise
        except KeyboardInterrupt:
            if fresh:
                files.discard_unlearned(folder)
            raise InterruptedRunError("stopped before the first trees were grown; nothing was kept") from None
        except Exception:
            if fresh:
                files.discard_unlearned(folder)
            raise


def boosting_of(config: Config) -> Boosting:
    """How a configuration's trees are grown; refuses a library that is not installed and a loss it cannot take."""
    library, name, options = config.model.kind, config.loss.title, dict[str, Any](config.loss.options)
    expect_library(library)
    natives = {NATIVE: OBJECTIVES[library][0], **{f"{NATIVE}:{own}": own for own in OBJECTIVES[library]}}
    if name not in natives:
        if library == "catboost" or name.startswith(NATIVE):
            also = "" if library == "catboost" else ", or a loss of ours such as neural_ndcg@10"
            raise ValueError(f"{library} has no objective {name!r}; expected one of {', '.join(natives)}{also}")
        if config.data.gain != "exp2" and "gain" in parse_loss(name)[0].parameters:
            options = {"gain": config.data.gain, **options}
        objective(name, **options)
    elif config.data.gain != "exp2":
        raise ValueError(
            f"data.gain is for losses of ours, and {name} is {library}'s own, which takes 2^y - 1; expected a loss such as "
            "lambdarank; or leave data.gain out"
        )
    elif options:
        raise ValueError(f"loss.options are for losses of ours, and {name} is {library}'s; leave them out")
    settings = config.train
    metric = metric_that_chooses(config)
    return Boosting(
        library,
        natives.get(name, name),
        settings.seed % 2**31,  # as much as the libraries take
        settings.threads,
        settings.epochs,
        settings.patience or settings.epochs,
        cutoff=metric.k or 10,
        own=name not in natives,
        options=options,
    )


def _grow_run(folder: Path, config: Config) -> Iterator[Grown | Finished]:
    started = time.perf_counter()
    how, count = boosting_of(config), config.members.count
    splits = unscaled_splits(config)
    splits = {name: split.recoded(splits["train"].categories) for name, split in splits.items()}
    files.rewrite_config(folder, config, fingerprint_of(splits))
    folds = _folds(config, splits)
    metric = metric_that_chooses(config)
    if not can_choose(splits["vali"], metric):
        raise ValueError(
            f"no validation query of {config.data.path} has a relevant document; expected some, to choose how many trees are "
            "kept; hold others out, or use --bag 5"
        )
    tried: list[dict[str, Any]] = []
    kept: list[_Tried] = []
    try:
        for number in range(count):
            settings = drawn(how, number, large=len(splits["train"].labels) >= LARGE)
            one = _try(how, settings, folds, splits["vali"])
            value = mean(measure(one.held_out, splits["vali"], [metric])[metric.name], metric.empty)
            one.entry.update(number=number, validation=value)
            tried.append(one.entry)
            # The others are let go of: each may hold a copy of the train split.
            kept = sorted([*kept, one], key=lambda other: -other.entry["validation"])[: config.members.keep]
            yield Grown(number + 1, count, one.entry["rounds"], value, best_of(tried) is one.entry)
    except (KeyboardInterrupt, InterruptedRunError):  # Ctrl-C, SIGTERM
        if not tried:
            raise KeyboardInterrupt from None
        _finish(folder, config, how, splits, kept, tried, time.perf_counter() - started)
        raise InterruptedRunError(
            f"stopped after {len(tried)} of {count} settings; the run in {folder} is finished with the best of them"
        ) from None
    yield Finished(_finish(folder, config, how, splits, kept, tried, time.perf_counter() - started))


Fold = tuple[
    RankingDataset, RankingDataset, np.ndarray
]  # to learn from, held out, the latter's documents in splits["vali"]


def _folds(config: Config, splits: dict[str, RankingDataset]) -> list[Fold]:
    """The splits as they are; with bagging, train and validation together, of which each fold is held out once."""
    bag = config.members.bag
    if bag > 1:
        parts = [splits[name] for name in ("train", "vali") if name in splits]
        splits["vali"] = without_zero_weights(RankingDataset.concatenate(parts))
        everything = splits["vali"]
        if len(everything) < bag:
            raise ValueError(f"{len(everything)} queries cannot be cut into {bag} folds; lower --bag")
        fold = folds_of(everything, bag, config.train.seed)
        document = np.repeat(fold, everything.lengths)
        return [
            (everything.select(fold != f), everything.select(fold == f), np.flatnonzero(document == f))
            for f in range(bag)
        ]
    return [(without_zero_weights(splits["train"]), splits["vali"], np.arange(len(splits["vali"].labels)))]


def _try(how: Boosting, settings: dict[str, Any], folds: Sequence[Fold], vali: RankingDataset) -> _Tried:
    models, held_out = [], np.empty(len(vali.labels))
    for train, part, documents in folds:
        models.append(fit_trees(how, settings, train, part))
        held_out[documents] = models[-1].score(part)
    rounds = [model.kept for model in models]
    entry = {**settings, "rounds": int(np.median(rounds)), "boosted": max(model.rounds for model in models)}
    return _Tried(entry, models, held_out)


def _finish(
    folder: Path,
    config: Config,
    how: Boosting,
    splits: Mapping[str, RankingDataset],
    kept: Sequence[_Tried],
    tried: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Write the models and all results; the report."""
    best, metric, bag = kept[0].entry, metric_that_chooses(config), config.members.bag
    loss = f"{how.library} {'with ' if how.own else ''}{how.objective}"
    models = [model for one in kept for model in one.models]
    facts = {
        "library": how.library,
        "objective": how.objective,
        "own": how.own,
        "path": config.data.path,
        "fold": config.data.fold,
        "seed": how.seed,
        "threads": how.threads,
        "metrics": config.train.metrics,
        "chosen": best,
        "kept": [one.entry["number"] for one in kept],
        "bag": bag,
        "tried": tried,
    }
    write_models(folder, how.library, models, splits["train"], facts)
    score = averaged([model.score for model in models])

    held_out = averaged([lambda _, one=one: one.held_out for one in kept])  # type: ignore[misc]
    scores = {split: (held_out if split == "vali" else score)(data) for split, data in splits.items()}
    results = {
        split: measure(scores[split], splits[split], metrics_of(config, metrics))
        for split, metrics in files.metrics_to_measure(splits, config.train.metrics).items()
    }
    report = files.write_results(
        folder,
        splits,
        results,
        config.train.metrics,
        {
            "loss": loss,
            "selection": f"the {len(kept)} best of {len(tried)} settings by validation"
            if len(tried) > 1
            else "stopped by validation",
            "data": config.data.path,
            "seed": how.seed,
            "best_epoch": best["rounds"],
            "epochs": best["boosted"],
            "seconds": round(seconds, 3),
            "processes": 1,
            "trees": {
                "library": how.library,
                "version": version_of(how.library),
                "settings": len(tried),
                "kept": len(kept),
                "bag": bag,
                "models": len(models),
                "validation_of_best": best["validation"],
                "validation_of_average": mean(
                    measure(scores["vali"], splits["vali"], [metric])[metric.name], metric.empty
                ),
            },
        },
        device=torch.device("cpu"),
        threads=how.threads,
        scores=scores[files.kept_split(splits)],
        convention=files.convention_of(config.data.gain),
    )
    return {"run": str(folder), **report}


def fit_trees_run(folder: Path, config: TreeConfig, splits: Mapping[str, RankingDataset]) -> dict[str, Any]:
    """Fit the best of a small grid and write its folder, which reads like that of a run; its report."""
    started = time.perf_counter()
    ask_other_programs()
    trees, tried = fit_grid(config, splits)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**dataclasses.asdict(config), "chosen": best_of(tried), "tried": tried}
    identity = files.digest_of(repr(config), fingerprint_of(splits))
    write_models(folder, config.library, [trees], splits["train"], facts, identity)
    scores = {split: trees.score(data) for split, data in splits.items()}
    return files.write_results(
        folder,
        splits,
        {
            split: measure(scores[split], splits[split], metrics)
            for split, metrics in files.metrics_to_measure(splits, config.metrics).items()
        },
        config.metrics,
        {
            "loss": f"{config.library} {config.objective}",
            "selection": f"best of {len(tried)} settings, stopped by validation" if config.tuned else "fixed settings",
            "data": config.path,
            "seed": config.seed,
            "best_epoch": trees.kept,
            "epochs": trees.rounds,
            "seconds": round(time.perf_counter() - started, 3),
            "processes": 1,
        },
        device=torch.device("cpu"),
        threads=config.threads,
        scores=scores[files.kept_split(splits)],
        identity=identity,
    )


def write_models(
    folder: Path,
    library: str,
    models: Sequence[FittedTrees],
    data: RankingDataset,
    facts: Mapping[str, Any],
    identity: str | None = None,
) -> None:
    """The model files, and trees.json, which names them; `identity` is that of a folder without a configuration."""
    name = Path(MODEL_FILES[library])
    written = []
    for number, model in enumerate(models, start=1):
        file = folder / (name if len(models) == 1 else f"{name.stem}-{number}{name.suffix}")
        model.save(file)
        written.append({"file": file.name, "rounds": model.kept, "sha256": _digest(file)})
    names = None if data.feature_names is None else list(data.feature_names)
    columns: dict[str, Any] = {"features": data.features.shape[1], "feature_names": names}
    if data.categories:
        columns["categories"] = {str(column): texts for column, texts in data.categories.items()}
    known = {**facts, "version": version_of(library), **columns, "models": written}
    files.write_sealed(folder, files.TREES, known, identity)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def averaged(scorers: Sequence[Scorer]) -> Scorer:
    """One ranker as it is; of several the mean of their scores, standardised within each list."""
    if len(scorers) == 1:
        return scorers[0]
    return lambda data: mean_of_standardised([score(data) for score in scorers], data.offsets)


# --- a finished run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeRun:
    """A finished run of trees, ready to score lists."""

    folder: Path
    config: Config
    features: int
    names: tuple[str, ...] | None
    scores: Callable[[RankingDataset], np.ndarray]
    categories: Levels = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> "TreeRun":
        """Load a run with its library; no code from the folder is executed."""
        facts = _read_facts(folder)
        library = facts["library"]
        expect_library(library)
        models = []
        for entry in facts.get(
            "models", [{"file": MODEL_FILES[library]}]
        ):  # once there was one model, and no list of them
            file = folder / Path(entry["file"]).name
            files.expect_finished(folder, file.name)
            if entry.get("sha256", _digest(file)) != _digest(file):
                raise ValueError(
                    f"{file} is damaged or was changed; expected what training wrote; put a copy of it back, or train the run again"
                )
            models.append(load_trees(library, file))
        names = facts.get("feature_names")
        score = averaged([model.score for model in models])
        levels = {int(column): tuple(texts) for column, texts in facts.get("categories", {}).items()}
        known = tuple(names) if names else None
        return cls(folder, _config_of(folder, facts), models[0].features, known, score, levels)

    def read(
        self,
        source: str,
        *,
        split: str = "test",
        labelled: bool = True,
        document: str | None = None,
        settings: Sequence[str] = (),
    ) -> RankingDataset:
        """Lists of the width these trees expect, as they are in the source; see `ScoringRun`."""
        return read_for(self, source, split=split, labelled=labelled, document=document, settings=settings)

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        if {*data.categories} != {*self.categories}:
            raise ValueError(
                f"columns {sorted(data.categories)} of the lists hold categories and {sorted(self.categories)} of {self.folder} do; "
                "expected the same; read them with its `read`"
            )
        return self.scores(data.recoded(self.categories)).astype(np.float32)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries."""
        return measure(self.score(data), data, metrics_of(self.config, metrics or self.config.train.metrics))


def _read_facts(folder: Path) -> dict[str, Any]:
    remedy = "expected what training wrote; put a copy of it back, or train the run again"
    facts = files.read_sealed(folder, files.TREES, remedy)
    if facts.get("library") not in MODEL_FILES:
        raise ValueError(f"{folder / files.TREES} is damaged; {remedy}")
    return facts


def _config_of(folder: Path, facts: Mapping[str, Any]) -> Config:
    """What the trees were grown with; trees of a table of a reproduction have no configuration of their own."""
    if (folder / files.CONFIG).is_file():
        return files.read_config(folder)
    return Config(
        data=Data(facts["path"], facts["fold"]),
        model=Model(kind=facts["library"]),
        train=Train(seed=facts["seed"], metrics=tuple(facts["metrics"]), device="cpu"),
    )
