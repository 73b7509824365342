"""XGBoost, LightGBM and CatBoost: settings to choose from, fitting, scoring.

A library is imported when its trees are fitted. Features are not scaled: the splits of a tree do not depend on it.
"""

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankgrad.data.dataset import RankingDataset
from rankgrad.training.evaluate import mean, measure

METRIC = "ndcg@10"  # chooses among settings, on the validation split
PATIENCE = 50  # rounds without a better validation metric before boosting stops
EXTRAS = {"xgboost": "gbdt", "lightgbm": "gbdt", "catboost": "catboost"}


@dataclass(frozen=True)
class TreeConfig:
    """Trees of one library on one dataset. Tuned: the best of a grid by validation; else its first settings, all rounds."""

    library: str
    path: str
    fold: int
    seed: int
    threads: int  # 0: the library's choice
    large: bool  # larger trees, for data of thousands of queries
    tuned: bool
    metrics: tuple[str, ...]


class FittedTrees(NamedTuple):
    """A fitted model: its scores of a split [N], the rounds it keeps of those boosted, and how to save it."""

    score: Callable[[RankingDataset], np.ndarray]
    kept: int
    rounds: int
    save: Callable[[Path], object]


def missing(library: str) -> str | None:
    """Why a library cannot be used and how to install it; None if it is installed."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed; expected it for these trees; install it with: pip install 'rankgrad[{EXTRAS[library]}]'"


def version_of(library: str) -> str:
    """The installed version; xgboost comes in a package of another name too."""
    for name in ("xgboost-cpu", "xgboost") if library == "xgboost" else (library,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def grid(config: TreeConfig) -> list[dict[str, Any]]:
    """The four settings to choose from; the first is taken where nothing is tuned.

    >>> grid(TreeConfig("lightgbm", "data", 1, seed=0, threads=1, large=False, tuned=True, metrics=("ndcg@10",)))[0]
    {'num_leaves': 7, 'min_data_in_leaf': 20}
    """
    choices = GRIDS[config.library, config.large]
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def fit(config: TreeConfig, splits: Mapping[str, RankingDataset]) -> tuple[FittedTrees, list[dict[str, Any]]]:
    """The trees that are best on validation, and every setting that was tried with its rounds and validation metric."""
    tried: list[dict[str, Any]] = []
    best: FittedTrees | None = None  # the others are let go of: each holds a copy of the train split
    for settings in grid(config)[: None if config.tuned else 1]:
        trees = LIBRARIES[config.library](config, settings, splits["train"], splits["vali"] if config.tuned else None)
        value = mean(measure(trees.score(splits["vali"]), splits["vali"], [METRIC])[METRIC], 1.0)
        tried.append({**settings, "rounds": trees.kept, "validation": value})
        best = trees if best is None or best_of(tried) is tried[-1] else best
    assert best is not None
    return best, tried


def best_of(tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of the settings with the highest validation metric."""
    return max(tried, key=lambda entry: entry["validation"])


# --- the libraries ----------------------------------------------------------------------------------------------------


def _lightgbm(
    config: TreeConfig, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import lightgbm

    rounds = _rounds(config)
    parameters = {
        "objective": OBJECTIVES["lightgbm"],
        "metric": "ndcg",
        "eval_at": [10],
        "learning_rate": 0.05,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": config.threads,
        "verbosity": -1,
        "seed": config.seed,
        **settings,
    }
    fitted = lightgbm.Dataset(train.features, train.labels, group=train.lengths)
    validation = [] if vali is None else [fitted.create_valid(vali.features, vali.labels, group=vali.lengths)]
    stop: list[Any] = [lightgbm.early_stopping(PATIENCE, verbose=False)] if validation else []
    booster = lightgbm.train(parameters, fitted, rounds, valid_sets=validation, callbacks=stop)
    kept = booster.best_iteration if validation else rounds
    return FittedTrees(
        lambda data: np.asarray(booster.predict(data.features, num_iteration=kept, num_threads=config.threads)),
        kept,
        booster.current_iteration(),
        lambda path: booster.save_model(path, num_iteration=kept),
    )


def _xgboost(
    config: TreeConfig, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import xgboost

    def matrix(data: RankingDataset) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        return xgboost.DMatrix(data.features, data.labels, qid=query, nthread=config.threads or None)

    rounds = _rounds(config)
    parameters = {
        "objective": OBJECTIVES["xgboost"],
        "eval_metric": METRIC,
        "learning_rate": 0.05,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
        "tree_method": "hist",
        "nthread": config.threads,
        "verbosity": 0,
        "seed": config.seed,
        **settings,
    }
    validation = [] if vali is None else [(matrix(vali), "vali")]
    booster = xgboost.train(
        parameters,
        matrix(train),
        rounds,
        evals=validation,
        early_stopping_rounds=PATIENCE if validation else None,
        verbose_eval=False,
    )
    kept = booster.best_iteration + 1 if validation else rounds
    return FittedTrees(
        lambda data: booster.predict(matrix(data), iteration_range=(0, kept)),
        kept,
        booster.num_boosted_rounds(),
        lambda path: booster[:kept].save_model(path),
    )


def _catboost(
    config: TreeConfig, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import catboost

    def pool(data: RankingDataset) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        return catboost.Pool(data.features, data.labels, group_id=query)

    parameters = {
        "loss_function": OBJECTIVES["catboost"],
        "eval_metric": "NDCG:top=10;type=Exp",
        "iterations": _rounds(config),
        "learning_rate": 0.05,
        "thread_count": config.threads or -1,
        "random_seed": config.seed,
        "allow_writing_files": False,
        "logging_level": "Silent",
        **settings,
    }
    model = catboost.CatBoost(parameters)
    model.fit(pool(train), eval_set=vali and pool(vali), early_stopping_rounds=PATIENCE if vali else None)
    kept = model.tree_count_  # CatBoost itself drops what came after the best round
    curves = [curve for of_split in model.get_evals_result().values() for curve in of_split.values()]
    return FittedTrees(
        lambda data: model.predict(pool(data)),
        kept,
        max([kept, *map(len, curves)]),
        lambda path: model.save_model(path),
    )


def _rounds(config: TreeConfig) -> int:
    return 1_000 if config.large else 500


LIBRARIES: Mapping[str, Callable[..., FittedTrees]] = {
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "catboost": _catboost,
}
OBJECTIVES = {"xgboost": "rank:pairwise", "lightgbm": "lambdarank", "catboost": "YetiRank"}
MODEL_FILES = {"xgboost": "model.json", "lightgbm": "model.txt", "catboost": "model.cbm"}
GRIDS: Mapping[tuple[str, bool], Mapping[str, tuple[float, ...]]] = {
    ("lightgbm", False): {"num_leaves": (7, 31), "min_data_in_leaf": (20, 100)},
    ("lightgbm", True): {"num_leaves": (63, 255), "min_data_in_leaf": (20, 200)},
    ("xgboost", False): {"max_depth": (3, 6), "min_child_weight": (1, 10)},
    ("xgboost", True): {"max_depth": (6, 9), "min_child_weight": (1, 50)},
    ("catboost", False): {"depth": (4, 6), "l2_leaf_reg": (3, 30)},
    ("catboost", True): {"depth": (6, 8), "l2_leaf_reg": (3, 30)},
}
