"""What may be chosen of each library: how trees are grown, a grid of four settings, settings drawn at random."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGE = 100_000  # documents from which on larger trees are tried
ROUNDS = {False: 500, True: 1_000}  # at most, of small trees and of large ones

EXTRAS = {"xgboost": "gbdt", "lightgbm": "gbdt", "catboost": "catboost"}  # of our package: what installs each library
MODEL_FILES = {"xgboost": "model.json", "lightgbm": "model.txt", "catboost": "model.cbm"}
OBJECTIVES = {  # of the libraries themselves, the usual one first
    "lightgbm": ("lambdarank", "rank_xendcg"),
    "xgboost": ("rank:pairwise", "rank:ndcg", "rank:map"),
    "catboost": ("QueryRMSE", "YetiRank"),
}


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

    @property
    def objective(self) -> str:
        """The usual one of the library; CatBoost's YetiRank, which tables of the literature have."""
        return "YetiRank" if self.library == "catboost" else OBJECTIVES[self.library][0]


@dataclass(frozen=True)
class Boosting:
    """How trees are grown, whatever their settings."""

    library: str
    objective: str  # of the library, or a loss of ours if `own`
    seed: int
    threads: int
    rounds: int
    patience: int  # rounds without a better validation metric before boosting stops
    cutoff: int = 10  # of the NDCG that stops it
    own: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of our loss


def grid(config: TreeConfig) -> list[dict[str, Any]]:
    """The four settings to choose from; the first is taken where nothing is tuned.

    >>> grid(TreeConfig("lightgbm", "data", 1, seed=0, threads=1, large=False, tuned=True, metrics=("ndcg@10",)))[0]
    {'num_leaves': 7, 'min_data_in_leaf': 20}
    """
    choices = GRIDS[config.library, config.large]
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def drawn(how: Boosting, number: int, *, large: bool) -> dict[str, Any]:
    """Settings number 0, 1, ...: a function of the seed and the number. Number 0 is not random: the first of the grid.

    >>> drawn(Boosting("xgboost", "rank:pairwise", seed=0, threads=1, rounds=10, patience=5), 0, large=False)
    {'max_depth': 3, 'min_child_weight': 1}
    """
    if number == 0:
        first = {name: values[0] for name, values in GRIDS[how.library, large].items()}
        return first | {"min_child_weight": 0.1} if how.own and how.library == "xgboost" else first
    ranges = {**RANGES[how.library], **(LARGER[how.library] if large else {}), **(OWN[how.library] if how.own else {})}
    if how.objective == "lambdarank" and not how.own:
        ranges["lambdarank_truncation_level"] = (10, 30)
    rng = np.random.default_rng([how.seed, number])
    return {name: values[rng.integers(len(values))] for name, values in ranges.items()}


GRIDS: Mapping[tuple[str, bool], Mapping[str, tuple[float, ...]]] = {
    ("lightgbm", False): {"num_leaves": (7, 31), "min_data_in_leaf": (20, 100)},
    ("lightgbm", True): {"num_leaves": (63, 255), "min_data_in_leaf": (20, 200)},
    ("xgboost", False): {"max_depth": (3, 6), "min_child_weight": (1, 10)},
    ("xgboost", True): {"max_depth": (6, 9), "min_child_weight": (1, 50)},
    ("catboost", False): {"depth": (4, 6), "l2_leaf_reg": (3, 30)},
    ("catboost", True): {"depth": (6, 8), "l2_leaf_reg": (3, 30)},
}

# From where random settings are drawn.
RANGES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "lightgbm": {
        "learning_rate": (0.02, 0.05, 0.1),
        "num_leaves": (7, 15, 31),
        "min_data_in_leaf": (10, 20, 50, 100),
        "feature_fraction": (0.5, 0.8, 1.0),
        "bagging_fraction": (0.7, 1.0),
        "lambda_l2": (0.0, 1.0, 10.0),
    },
    "xgboost": {
        "learning_rate": (0.02, 0.05, 0.1),
        "max_depth": (2, 3, 4, 6),
        "min_child_weight": (0.1, 1.0, 10.0),
        "subsample": (0.6, 0.8, 1.0),
        "colsample_bytree": (0.5, 0.8, 1.0),
        "reg_lambda": (0.1, 1.0, 10.0),
    },
    "catboost": {
        "learning_rate": (0.03, 0.05, 0.1),
        "depth": (4, 5, 6, 8),
        "l2_leaf_reg": (1, 3, 10, 30),
        "random_strength": (0.5, 1, 2),
    },
}
LARGER: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "lightgbm": {"num_leaves": (31, 63, 127, 255), "min_data_in_leaf": (20, 50, 100, 200)},
    "xgboost": {"max_depth": (6, 7, 8, 9), "min_child_weight": (1.0, 10.0, 50.0)},
    "catboost": {"depth": (6, 7, 8)},
}
# Second derivatives of our losses are |gradient|, some hundredths: sums of them are compared with these.
OWN: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "lightgbm": {"lambda_l2": (0.0, 0.1, 1.0)},
    "xgboost": {"min_child_weight": (0.0, 0.1, 1.0), "reg_lambda": (0.0, 0.1, 1.0)},
}
