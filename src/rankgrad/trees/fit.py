"""Boosted trees as rivals: XGBoost, LightGBM and CatBoost, trained and judged on the same lists as our models. Room 5.

Imports data, evaluate and records; the libraries themselves only when trees are grown. A folder
of trees is a run folder as far as `compare` and `report` go; its model is a file in the library's own format. Features go in
as they are: trees do not care for scaling.
"""

import dataclasses
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.files import write_atomically
from rankgrad.runs.provenance import record, versions, wanted
from rankgrad.training.evaluate import judge, mean

METRIC = "ndcg@10"  # that tuning goes by, on the validation split
STALE = 50  # rounds without a better validation metric before growing stops
EXTRAS = {"xgboost": "gbdt", "lightgbm": "gbdt", "catboost": "catboost"}


@dataclass(frozen=True)
class Trees:
    """What is grown on which lists. Tuned: the best of a fixed grid by validation; else the grid's first, all rounds."""

    library: str
    path: str
    fold: int
    seed: int
    threads: int  # 0: as many as the library likes
    large: bool  # data of thousands of queries: larger trees
    tuned: bool
    metrics: tuple[str, ...]


class Grown(NamedTuple):
    """A fitted model: its scores of a split [N], how many rounds it keeps of how many grown, and how to save it."""

    score: Callable[[RankingDataset], np.ndarray]
    kept: int
    rounds: int
    save: Callable[[Path], object]


def missing(library: str) -> str | None:
    """The sentence to say if a library is not installed."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed; expected it for these trees; install it with: pip install 'rankgrad[{EXTRAS[library]}]'"


def grid(trees: Trees) -> list[dict[str, Any]]:
    """The settings to choose from: four, the first being the one for those who cannot choose.

    >>> grid(Trees("lightgbm", "data", 1, seed=0, threads=1, large=False, tuned=True, metrics=("ndcg@10",)))[0]
    {'num_leaves': 7, 'min_data_in_leaf': 20}
    """
    choices = GRIDS[trees.library, trees.large]
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def grow(trees: Trees, splits: Mapping[str, RankingDataset], out: Path) -> None:
    """Fit trees and leave a folder like that of a run: model, trees.json, queries.safetensors and, last, report.json."""
    started = time.perf_counter()
    versions()  # asks for the commit now, not when something else may have been checked out
    tried: list[dict[str, Any]] = []
    best: Grown | None = None
    for settings in grid(trees)[: None if trees.tuned else 1]:
        grown = LIBRARIES[trees.library](trees, settings, splits["train"], splits["vali"] if trees.tuned else None)
        value = mean(judge(grown.score(splits["vali"]), splits["vali"], [METRIC])[METRIC], 1.0)
        if not tried or value > max(entry["validation"] for entry in tried):
            best = grown
        tried.append({**settings, "rounds": grown.kept, "validation": value})
    assert best is not None
    chosen = max(tried, key=lambda entry: entry["validation"])
    out.mkdir(parents=True, exist_ok=True)
    best.save(out / MODEL_FILES[trees.library])
    facts = {**dataclasses.asdict(trees), "version": version_of(trees.library), "chosen": chosen, "tried": tried}
    write_atomically(out / "trees.json", (json.dumps(facts, indent=2) + "\n").encode())
    record(
        out,
        splits,
        {
            split: judge(best.score(splits[split]), splits[split], metrics)
            for split, metrics in wanted(splits, trees.metrics).items()
        },
        trees.metrics,
        {
            "loss": f"{trees.library} {OBJECTIVES[trees.library]}",
            "selection": f"best of {len(tried)} settings, stopped by validation" if trees.tuned else "fixed settings",
            "data": trees.path,
            "seed": trees.seed,
            "best_epoch": best.kept,
            "epochs": best.rounds,
            "seconds": round(time.perf_counter() - started, 3),
            "processes": 1,
        },
        device=torch.device("cpu"),
        threads=trees.threads,
    )


def version_of(library: str) -> str:
    """The installed version; xgboost comes in a package of another name too."""
    names = ("xgboost-cpu", "xgboost") if library == "xgboost" else (library,)
    for name in names:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


# --- the libraries ----------------------------------------------------------------------------------------------------


def _lightgbm(trees: Trees, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None) -> Grown:
    import lightgbm

    rounds = _rounds(trees)
    parameters = {
        "objective": OBJECTIVES["lightgbm"],
        "metric": "ndcg",
        "eval_at": [10],
        "learning_rate": 0.05,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": trees.threads,
        "verbosity": -1,
        "seed": trees.seed,
        **settings,
    }
    fitted = lightgbm.Dataset(train.features, train.labels, group=train.lengths)
    judges = [] if vali is None else [fitted.create_valid(vali.features, vali.labels, group=vali.lengths)]
    stop: list[Any] = [lightgbm.early_stopping(STALE, verbose=False)] if judges else []
    booster = lightgbm.train(parameters, fitted, rounds, valid_sets=judges, callbacks=stop)
    kept = booster.best_iteration if judges else rounds
    return Grown(
        lambda data: np.asarray(booster.predict(data.features, num_iteration=kept, num_threads=trees.threads)),
        kept,
        booster.current_iteration(),
        lambda path: booster.save_model(path, num_iteration=kept),
    )


def _xgboost(trees: Trees, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None) -> Grown:
    import xgboost

    def matrix(data: RankingDataset) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        return xgboost.DMatrix(data.features, data.labels, qid=query, nthread=trees.threads or None)

    rounds = _rounds(trees)
    parameters = {
        "objective": OBJECTIVES["xgboost"],
        "eval_metric": METRIC,
        "learning_rate": 0.05,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
        "tree_method": "hist",
        "nthread": trees.threads,
        "verbosity": 0,
        "seed": trees.seed,
        **settings,
    }
    judges = [] if vali is None else [(matrix(vali), "vali")]
    booster = xgboost.train(
        parameters,
        matrix(train),
        rounds,
        evals=judges,
        early_stopping_rounds=STALE if judges else None,
        verbose_eval=False,
    )
    kept = booster.best_iteration + 1 if judges else rounds
    return Grown(
        lambda data: booster.predict(matrix(data), iteration_range=(0, kept)),
        kept,
        booster.num_boosted_rounds(),
        lambda path: booster[:kept].save_model(path),
    )


def _catboost(trees: Trees, settings: Mapping[str, Any], train: RankingDataset, vali: RankingDataset | None) -> Grown:
    import catboost

    def pool(data: RankingDataset) -> Any:
        query = np.repeat(np.arange(len(data)), data.lengths)
        return catboost.Pool(data.features, data.labels, group_id=query)

    parameters = {
        "loss_function": OBJECTIVES["catboost"],
        "eval_metric": "NDCG:top=10;type=Exp",
        "iterations": _rounds(trees),
        "learning_rate": 0.05,
        "thread_count": trees.threads or -1,
        "random_seed": trees.seed,
        "allow_writing_files": False,
        "logging_level": "Silent",
        **settings,
    }
    model = catboost.CatBoost(parameters)
    model.fit(pool(train), eval_set=vali and pool(vali), early_stopping_rounds=STALE if vali else None)
    kept = model.tree_count_  # CatBoost itself drops what came after the best round
    curves = [curve for of_split in model.get_evals_result().values() for curve in of_split.values()]
    return Grown(
        lambda data: model.predict(pool(data)),
        kept,
        max([kept, *map(len, curves)]),
        lambda path: model.save_model(path),
    )


def _rounds(trees: Trees) -> int:
    return 1_000 if trees.large else 500


LIBRARIES: Mapping[str, Callable[..., Grown]] = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}
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
