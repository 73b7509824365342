"""The rows of Table 2 of arXiv 2102.07831: a recipe for each, and the paper's numbers beside it. Imports config, recipes and trees.

The paper's numbers are NDCG@5 and NDCG@10 in percent on the test split, gain 2^y - 1, a query without a relevant document
counted 1. Its rows with a cut-off are those of its reference code, where RankNet and LambdaRank count a pair only if both
documents stand in the current top k (`pairs="both"`). Our rows after them are marked by having no number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from rankgrad.training.config import Config, Data, Loss, Option
from rankgrad.training.recipes import RECIPES
from rankgrad.trees.fit import Trees

TABLE_RECIPES = ("paper", "small")
METRICS = ("ndcg@5", "ndcg@10", "map", "mrr")  # of every cell's report; the table shows the first two


@dataclass(frozen=True)
class Setting:
    """What all rows of a table share; `levels` is the number of different labels, 5 for labels 0..4."""

    dataset: str | None
    recipe: str
    path: str
    fold: int
    seed: int
    scaling: str
    levels: int
    device: str
    threads: int
    epochs: int | None  # None: the recipe's own
    paper_protocol: bool


Recipe = Callable[[Setting], Config | Trees]


@dataclass(frozen=True)
class Row:
    """A row: how it is called, what makes it, and the paper's NDCG@5 and NDCG@10 by dataset."""

    title: str
    recipe: Recipe
    paper: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    package: str | None = None  # what must be installed for it


def base(setting: Setting) -> Config:
    """The table's recipe on its lists, with its seed, on its machine; what the paper did differently for Istella too."""
    config = RECIPES[setting.recipe]()
    model, train = config.model, config.train
    if setting.recipe == "paper":
        if (setting.dataset or "").startswith("istella"):
            model, train = replace(model, width=128), replace(train, batch_size=110)
        if setting.device.startswith("cuda"):
            train = replace(train, precision="bf16")
    if setting.paper_protocol:
        train = replace(train, select="last", patience=None)
    train = replace(
        train,
        epochs=setting.epochs or train.epochs,
        seed=setting.seed,
        device=setting.device,
        threads=setting.threads,
        metrics=METRICS,
    )
    data = Data(path=setting.path, fold=setting.fold, scaling=setting.scaling)
    return replace(config, data=data, model=model, train=train)


def _trained_with(name: str, options: Mapping[str, Option], setting: Setting) -> Config:
    """The table's recipe with this loss."""
    return replace(base(setting), loss=Loss(name, options))


def _by(name: str, **options: Option) -> Recipe:
    return partial(_trained_with, name, options)


def _rmse(setting: Setting) -> Config:
    """Labels 0..4 are five levels in the paper; other data has its own number of them."""
    return _trained_with("rmse", {"levels": float(setting.levels)}, setting)


def _grown_by(library: str, setting: Setting) -> Trees:
    """Trees of one library, tuned on validation over its small fixed grid (see trees.py)."""
    return Trees(
        library=library,
        path=setting.path,
        fold=setting.fold,
        seed=setting.seed,
        threads=setting.threads,
        large=setting.recipe == "paper",
        tuned=not setting.paper_protocol,
        metrics=METRICS,
    )


def _numbers(web30k: tuple[float, float], istella: tuple[float, float]) -> Mapping[str, tuple[float, float]]:
    return {"web30k": web30k, "istella": istella}


ROWS: Mapping[str, Row] = {
    "neural_ndcg@5": Row("NeuralNDCG@5", _by("neural_ndcg@5"), _numbers((50.32, 52.01), (65.32, 69.97))),
    "neural_ndcg@10": Row("NeuralNDCG@10", _by("neural_ndcg@10"), _numbers((50.89, 52.77), (65.65, 70.68))),
    "neural_ndcg@max": Row("NeuralNDCG@max", _by("neural_ndcg@max"), _numbers((51.56, 53.46), (65.69, 70.55))),
    "neural_ndcg_transposed@5": Row(
        "NeuralNDCG^T@5", _by("neural_ndcg_transposed@5"), _numbers((50.50, 52.14), (65.46, 69.95))
    ),
    "neural_ndcg_transposed@10": Row(
        "NeuralNDCG^T@10", _by("neural_ndcg_transposed@10"), _numbers((50.85, 52.70), (66.02, 71.02))
    ),
    "neural_ndcg_transposed@max": Row(
        "NeuralNDCG^T@max", _by("neural_ndcg_transposed@max"), _numbers((51.45, 53.49), (65.60, 70.53))
    ),
    "approx_ndcg": Row("ApproxNDCG", _by("approx_ndcg"), _numbers((49.07, 50.90), (63.14, 67.94))),
    "listnet": Row("ListNet", _by("listnet"), _numbers((50.75, 52.80), (65.62, 70.70))),
    "listmle": Row("ListMLE", _by("listmle"), _numbers((49.81, 51.82), (59.85, 66.24))),
    "ranknet@5": Row("RankNet@5", _by("ranknet@5", pairs="both"), _numbers((49.14, 50.75), (64.45, 68.74))),
    "ranknet@10": Row("RankNet@10", _by("ranknet@10", pairs="both"), _numbers((50.95, 52.69), (65.75, 70.68))),
    "ranknet@max": Row("RankNet@max", _by("ranknet@max"), _numbers((49.84, 51.82), (64.57, 70.37))),
    "lambdarank@5": Row("LambdaRank@5", _by("lambdarank@5", pairs="both"), _numbers((48.70, 50.10), (63.50, 67.75))),
    "lambdarank@10": Row("LambdaRank@10", _by("lambdarank@10", pairs="both"), _numbers((49.66, 51.34), (65.21, 69.82))),
    "lambdarank@max": Row("LambdaRank@max", _by("lambdarank@max"), _numbers((51.55, 53.47), (65.90, 71.09))),
    "rmse": Row("RMSE", _rmse, _numbers((50.51, 52.46), (65.62, 70.76))),
    "xgboost": Row(
        "XGBoost (rank:pairwise)",
        partial(_grown_by, "xgboost"),
        _numbers((46.80, 49.17), (61.04, 65.74)),
        package="xgboost",
    ),
    # What the paper lacks.
    "lightgbm": Row("LightGBM (lambdarank)", partial(_grown_by, "lightgbm"), package="lightgbm"),
    "catboost": Row("CatBoost (YetiRank)", partial(_grown_by, "catboost"), package="catboost"),
    "ranknet@5-any": Row("RankNet@5, any pair", _by("ranknet@5", pairs="any")),
    "ranknet@10-any": Row("RankNet@10, any pair", _by("ranknet@10", pairs="any")),
    "lambdarank@5-any": Row("LambdaRank@5, any pair", _by("lambdarank@5", pairs="any")),
    "lambdarank@10-any": Row("LambdaRank@10, any pair", _by("lambdarank@10", pairs="any")),
    "ndcg_loss2pp": Row("NDCGLoss2++", _by("ndcg_loss2pp")),
    "soft_rank": Row("SoftRank", _by("soft_rank")),
    "neural_map": Row("NeuralMAP", _by("neural_map")),
}
NEURAL_NDCG = tuple(name for name in ROWS if name.startswith("neural_ndcg"))
OF_THE_PAPER = tuple(name for name, row in ROWS.items() if row.paper)


def chosen(names: str | None) -> list[str]:
    """Row names from a comma-separated list; all of them where it is None.

    >>> chosen("listnet,rmse")
    ['listnet', 'rmse']
    """
    if names is None:
        return list(ROWS)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in ROWS:
            raise ValueError(f"there is no row {name!r}; expected some of {', '.join(ROWS)}")
    if not asked:
        raise ValueError(f"no row was named; expected some of {', '.join(ROWS)}, separated by commas")
    return [name for name in ROWS if name in asked]
