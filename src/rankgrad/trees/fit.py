"""Growing, scoring, saving and loading trees of XGBoost, LightGBM and CatBoost.

A library is imported when its trees are fitted or loaded. Features are not scaled: the splits of a tree do not
depend on it. Missing values stay missing, and categories go to the libraries as categories.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.training.evaluate import mean, measure
from rankgrad.trees.objectives import TreeObjective, objective
from rankgrad.trees.settings import EXTRAS, ROUNDS, Boosting, TreeConfig, grid

METRIC = "ndcg@10"  # chooses among the settings of a grid, on the validation split
PATIENCE = 50

Scorer = Callable[[RankingDataset], np.ndarray]  # documents' scores, [N]


class FittedTrees(NamedTuple):
    """A fitted model: its scores of a split [N], the rounds it keeps of those boosted, and how to save it."""

    score: Scorer
    kept: int
    rounds: int
    save: Callable[[Path], object]


class LoadedTrees(NamedTuple):
    """A model read from a file: its scores of a split [N], and how many features a document has."""

    score: Scorer
    features: int


def missing(library: str) -> str | None:
    """Why a library cannot be used and how to install it; None if it is installed."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed; expected it for these trees; install it with: pip install 'rankgrad[{EXTRAS[library]}]'"


def expect_library(library: str) -> None:
    """Refuse to go on without a library."""
    sentence = missing(library)
    if sentence is not None:
        raise ValueError(sentence)


def version_of(library: str) -> str:
    """The installed version; xgboost comes in a package of another name too."""
    for name in ("xgboost-cpu", "xgboost") if library == "xgboost" else (library,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def fit_trees(
    how: Boosting, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    """Trees with given settings, as many as validation likes best; without validation, of all rounds."""
    if train.document_weights is not None and (how.library != "lightgbm" or how.own):
        raise ValueError(
            f"{how.library} with the objective {how.objective} takes no weights of documents (data.document_weight); expected weights "
            "of queries; leave them out, or take lightgbm with its own objective"
        )
    try:
        return LIBRARIES[how.library](how, settings, train, vali)
    except Exception as error:
        if type(error).__name__ not in ERRORS:
            raise
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"{how.library} refused these lists: {said}; expected grades such as 0 to 4 and settings it takes; see its documentation"
        ) from error


def load_trees(library: str, path: Path) -> LoadedTrees:
    """What `FittedTrees.save` wrote."""
    expect_library(library)
    try:
        return LOADERS[library](path)
    except Exception as error:
        if type(error).__name__ not in ERRORS:
            raise
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"{library} cannot read {path} ({said}); expected what it wrote; train the run again"
        ) from error


def fit_grid(config: TreeConfig, splits: Mapping[str, RankingDataset]) -> tuple[FittedTrees, list[dict[str, Any]]]:
    """The trees that are best on validation, and every setting that was tried with its rounds and validation metric."""
    how = Boosting(config.library, config.objective, config.seed, config.threads, ROUNDS[config.large], PATIENCE)
    tried: list[dict[str, Any]] = []
    best: FittedTrees | None = None  # the others are let go of: each holds a copy of the train split
    for settings in grid(config)[: None if config.tuned else 1]:
        trees = fit_trees(how, settings, splits["train"], splits["vali"] if config.tuned else None)
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
    how: Boosting, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import lightgbm

    parameters = {
        "objective": _own_objective(how) if how.own else how.objective,
        "metric": "ndcg",
        "eval_at": [how.cutoff],
        "learning_rate": 0.05,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": how.threads,
        "verbosity": -1,
        "seed": how.seed,
        **settings,
    }
    weight = None if train.weights is None else np.repeat(train.weights, train.lengths)
    if train.document_weights is not None:
        weight = train.document_weights if weight is None else weight * train.document_weights
    fitted = lightgbm.Dataset(
        _matrix(train),
        train.labels,
        group=train.lengths,
        weight=weight,
        categorical_feature=[*train.categories],
    )
    validation = [] if vali is None else [fitted.create_valid(_matrix(vali), vali.labels, group=vali.lengths)]
    stop: list[Any] = [lightgbm.early_stopping(how.patience, verbose=False)] if validation else []
    booster = lightgbm.train(parameters, fitted, how.rounds, valid_sets=validation, callbacks=stop)
    kept = booster.best_iteration if validation else how.rounds
    return FittedTrees(
        lambda data: np.asarray(booster.predict(_matrix(data), num_iteration=kept, num_threads=how.threads)),
        kept,
        min(how.rounds, kept + how.patience) if validation else how.rounds,  # what came after the best round is dropped
        lambda path: booster.save_model(path, num_iteration=kept),
    )


def _load_lightgbm(path: Path) -> LoadedTrees:
    import lightgbm

    booster = lightgbm.Booster(model_file=path)
    return LoadedTrees(lambda data: np.asarray(booster.predict(_matrix(data))), booster.num_feature())


def _xgboost(
    how: Boosting, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import xgboost

    def matrix(data: RankingDataset, weights: np.ndarray | None = None) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        known = {"weight": weights, "qid": query, "nthread": how.threads or None}
        return xgboost.DMatrix(_matrix(data), data.labels, **known, **_xgboost_types(data))

    parameters = {
        **({"base_score": 0.0} if how.own else {"objective": how.objective}),
        "eval_metric": f"ndcg@{how.cutoff}",
        "learning_rate": 0.05,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
        "tree_method": "hist",
        "nthread": how.threads,
        "verbosity": 0,
        "seed": how.seed,
        **settings,
    }
    validation = [] if vali is None else [(matrix(vali), "vali")]
    booster = xgboost.train(
        parameters,
        matrix(train, train.weights),
        how.rounds,
        evals=validation,
        obj=_own_objective(how) if how.own else None,
        early_stopping_rounds=how.patience if validation else None,
        verbose_eval=False,
    )
    kept = booster.best_iteration + 1 if validation else how.rounds
    return FittedTrees(
        lambda data: booster.predict(matrix(data), iteration_range=(0, kept)),
        kept,
        booster.num_boosted_rounds(),
        lambda path: booster[:kept].save_model(path),
    )


def _load_xgboost(path: Path) -> LoadedTrees:
    import xgboost

    booster = xgboost.Booster(model_file=path)
    return LoadedTrees(
        lambda data: booster.predict(xgboost.DMatrix(_matrix(data), **_xgboost_types(data))), booster.num_features()
    )


def _xgboost_types(data: RankingDataset) -> dict[str, Any]:
    if not data.categories:
        return {}
    kinds = ["c" if column in data.categories else "q" for column in range(data.features.shape[1])]
    return {"feature_types": kinds, "enable_categorical": True}


def _catboost(
    how: Boosting, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None
) -> FittedTrees:
    import catboost

    def pool(data: RankingDataset, weights: np.ndarray | None = None) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        weighted = {} if weights is None else {"group_weight": np.repeat(weights, data.lengths)}
        return catboost.Pool(
            _catboost_matrix(data), data.labels, cat_features=[*data.categories], group_id=query, **weighted
        )

    parameters = {
        "loss_function": how.objective,
        "eval_metric": f"NDCG:top={how.cutoff};type=Exp",
        "iterations": how.rounds,
        "learning_rate": 0.05,
        "thread_count": how.threads or -1,
        "random_seed": how.seed,
        "allow_writing_files": False,
        "logging_level": "Silent",
        **settings,
    }
    model = catboost.CatBoost(parameters)
    stop = how.patience if vali else None
    model.fit(pool(train, train.weights), eval_set=vali and pool(vali), early_stopping_rounds=stop)
    kept = model.tree_count_  # CatBoost itself drops what came after the best round
    curves = [curve for of_split in model.get_evals_result().values() for curve in of_split.values()]
    return FittedTrees(
        lambda data: model.predict(pool(data)),
        kept,
        max([kept, *map(len, curves)]),
        lambda path: model.save_model(path),
    )


def _load_catboost(path: Path) -> LoadedTrees:
    import catboost

    model = catboost.CatBoost()
    model.load_model(str(path))
    return LoadedTrees(lambda data: model.predict(_catboost_matrix(data)), len(model.feature_names_))


def _catboost_matrix(data: RankingDataset) -> np.ndarray:
    """CatBoost takes categories as integers; -1 is an unknown or a missing one."""
    features = _matrix(data)
    if data.categories:
        features, numbers = features.astype(object), features
        for column in data.categories:
            features[:, column] = np.nan_to_num(numbers[:, column], nan=-1).astype(np.int64)
    return features


def _matrix(data: RankingDataset) -> np.ndarray:
    """The features [N, F], NaN where a value is missing or a category unknown; codes must be those of the train split."""
    features = np.asarray(data.features)
    if data.categories:
        columns = [*data.categories]
        features = features.copy()
        features[:, columns] = np.where(features[:, columns] < 0, np.nan, features[:, columns])
    return features


def _own_objective(how: Boosting) -> TreeObjective:
    return objective(how.objective, generator=torch.Generator().manual_seed(how.seed), **how.options)


LIBRARIES: Mapping[str, Callable[..., FittedTrees]] = {
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "catboost": _catboost,
}
LOADERS: Mapping[str, Callable[[Path], LoadedTrees]] = {
    "xgboost": _load_xgboost,
    "lightgbm": _load_lightgbm,
    "catboost": _load_catboost,
}
ERRORS = ("XGBoostError", "LightGBMError", "CatBoostError")  # by name: they are in libraries that may not be installed
