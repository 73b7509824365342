"""The rows of Table 2 of arXiv 2102.07831, of the ablations and of DASALC's ingredients: what is trained for each.

The paper's numbers are NDCG@5 and NDCG@10 in percent on the test split, gain 2^y - 1, a query without a relevant document
counted 1. Its rows with a cut-off are those of its reference code, where RankNet and LambdaRank count a pair only if both
documents are in the current top k (`pairs="both"`). Rows without a number of the paper are ours.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rankgrad.training.config import NATIVE, RECIPES, Config, Data, Loss, Members, Model, Option, Train, dasalc
from rankgrad.trees.settings import TreeConfig

TABLE_RECIPES = ("paper", "small")
REPORTED = ("ndcg@5", "ndcg@10", "map", "mrr")  # by every trial; the tables show the first two


@dataclass(frozen=True)
class Setting:
    """What a trial shares with others; `levels` is the number of different labels, 5 for labels 0..4."""

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


Numbers = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """A row: its title and how it differs from the recipe; or the library whose trees it is."""

    title: str
    loss: str = "neural_ndcg"
    options: Mapping[str, Option | Callable[[Setting], Option]] = field(default_factory=dict)
    tanh: bool | None = None  # None: as the paper has it for this loss
    ingredients: tuple[str, ...] = ()  # of DASALC: symlog, noise, wider
    library: str | None = None
    recipe: str | None = None  # its own, in place of the table's
    trials: int = 0  # of trees: random settings, the five best averaged; 0: the best of a small grid
    paper: Numbers = field(default_factory=dict)  # NDCG@5 and NDCG@10 by dataset


def config_of(row: Row, setting: Setting) -> Config | TreeConfig:
    """What a row trains under a setting."""
    if row.recipe is not None or row.trials:
        return _by_itself(row, setting)
    if row.library is not None:
        return TreeConfig(
            library=row.library,
            path=setting.path,
            fold=setting.fold,
            seed=setting.seed,
            threads=setting.threads,
            large=setting.recipe == "paper",
            tuned=not setting.paper_protocol,
            metrics=REPORTED,
        )
    options = {key: value(setting) if callable(value) else value for key, value in row.options.items()}
    config = base(setting)
    config = replace(config, loss=Loss(row.loss, options), model=replace(config.model, tanh=row.tanh))
    wider = WIDER[setting.recipe]
    if "symlog" in row.ingredients:
        config = replace(config, data=replace(config.data, scaling="symlog"))
    if "noise" in row.ingredients:
        config = replace(config, model=replace(config.model, input_noise=wider.input_noise))
    if "wider" in row.ingredients:
        config = replace(config, model=wider)
    return config


def _by_itself(row: Row, setting: Setting) -> Config:
    """What a person gets who names a recipe, or boosted trees and a number of trials, and nothing else."""
    if row.recipe is not None:
        config = RECIPES[row.recipe]()
        data, train = config.data, config.train
    else:
        assert row.library is not None
        config = Config(model=Model(kind=row.library), loss=Loss(row.loss), members=Members(count=row.trials, keep=5))
        data, train = config.data, Train(epochs=1_000, patience=50)
    train = replace(
        train,
        epochs=setting.epochs or train.epochs,
        seed=setting.seed,
        device=setting.device if row.recipe else "cpu",
        threads=setting.threads,
        metrics=REPORTED,
    )
    return replace(config, data=replace(data, path=setting.path, fold=setting.fold), train=train)


def base(setting: Setting) -> Config:
    """The recipe on a trial's lists, with its seed, on its machine, and with what the paper changed for Istella."""
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
        metrics=REPORTED,
    )
    data = Data(path=setting.path, fold=setting.fold, scaling=setting.scaling)
    return replace(config, data=data, model=model, train=train)


# The encoder and the noise that "wider" means for each recipe: DASALC's own, and a third of it for a few hundred lists.
WIDER = {
    "paper": dasalc().model,
    "small": replace(dasalc().model, width=64, layers=2, feedforward=256, dropout=0.3, input_noise=0.5),
}


def _levels(setting: Setting) -> float:
    """Labels 0..4 are five levels in the paper; other data has its own number of them."""
    return float(setting.levels)


def _numbers(web30k: tuple[float, float], istella: tuple[float, float]) -> Numbers:
    return {"web30k": web30k, "istella": istella}


_BOTH, _ANY = {"pairs": "both"}, {"pairs": "any"}

TABLE2: Mapping[str, Row] = {
    "neural_ndcg@5": Row("NeuralNDCG@5", "neural_ndcg@5", paper=_numbers((50.32, 52.01), (65.32, 69.97))),
    "neural_ndcg@10": Row("NeuralNDCG@10", "neural_ndcg@10", paper=_numbers((50.89, 52.77), (65.65, 70.68))),
    "neural_ndcg@max": Row("NeuralNDCG@max", "neural_ndcg@max", paper=_numbers((51.56, 53.46), (65.69, 70.55))),
    "neural_ndcg_transposed@5": Row(
        "NeuralNDCG^T@5", "neural_ndcg_transposed@5", paper=_numbers((50.50, 52.14), (65.46, 69.95))
    ),
    "neural_ndcg_transposed@10": Row(
        "NeuralNDCG^T@10", "neural_ndcg_transposed@10", paper=_numbers((50.85, 52.70), (66.02, 71.02))
    ),
    "neural_ndcg_transposed@max": Row(
        "NeuralNDCG^T@max", "neural_ndcg_transposed@max", paper=_numbers((51.45, 53.49), (65.60, 70.53))
    ),
    "approx_ndcg": Row("ApproxNDCG", "approx_ndcg", paper=_numbers((49.07, 50.90), (63.14, 67.94))),
    "listnet": Row("ListNet", "listnet", paper=_numbers((50.75, 52.80), (65.62, 70.70))),
    "listmle": Row("ListMLE", "listmle", paper=_numbers((49.81, 51.82), (59.85, 66.24))),
    "ranknet@5": Row("RankNet@5", "ranknet@5", _BOTH, paper=_numbers((49.14, 50.75), (64.45, 68.74))),
    "ranknet@10": Row("RankNet@10", "ranknet@10", _BOTH, paper=_numbers((50.95, 52.69), (65.75, 70.68))),
    "ranknet@max": Row("RankNet@max", "ranknet@max", paper=_numbers((49.84, 51.82), (64.57, 70.37))),
    "lambdarank@5": Row("LambdaRank@5", "lambdarank@5", _BOTH, paper=_numbers((48.70, 50.10), (63.50, 67.75))),
    "lambdarank@10": Row("LambdaRank@10", "lambdarank@10", _BOTH, paper=_numbers((49.66, 51.34), (65.21, 69.82))),
    "lambdarank@max": Row("LambdaRank@max", "lambdarank@max", paper=_numbers((51.55, 53.47), (65.90, 71.09))),
    "rmse": Row("RMSE", "rmse", {"levels": _levels}, paper=_numbers((50.51, 52.46), (65.62, 70.76))),
    "xgboost": Row(
        "XGBoost (rank:pairwise)", library="xgboost", paper=_numbers((46.80, 49.17), (61.04, 65.74))
    ),
    "lightgbm": Row("LightGBM (lambdarank)", library="lightgbm"),
    "catboost": Row("CatBoost (YetiRank)", library="catboost"),
    "ranknet@5-any": Row("RankNet@5, any pair", "ranknet@5", _ANY),
    "ranknet@10-any": Row("RankNet@10, any pair", "ranknet@10", _ANY),
    "lambdarank@5-any": Row("LambdaRank@5, any pair", "lambdarank@5", _ANY),
    "lambdarank@10-any": Row("LambdaRank@10, any pair", "lambdarank@10", _ANY),
    "ndcg_loss2pp": Row("NDCGLoss2++", "ndcg_loss2pp"),
    "soft_rank": Row("SoftRank", "soft_rank"),
    "neural_map": Row("NeuralMAP", "neural_map"),
}  # fmt: skip
NEURAL_NDCG = tuple(name for name in TABLE2 if name.startswith("neural_ndcg"))
OF_THE_PAPER = tuple(name for name, row in TABLE2.items() if row.paper)

_TEMPERATURES = (0.01, 0.1, 10.0, 100.0)  # of tau and of alpha; 1 is the baseline's
_ROUNDS = (0, 1, 3, 10, 100)  # of Sinkhorn; 30 are the baseline's
_SAMPLES = 32  # of the reference code

ABLATIONS: Mapping[str, Row] = {
    "neural_ndcg": Row("NeuralNDCG"),
    "stochastic-paper": Row(
        f"stochastic, {_SAMPLES} samples, as in the paper", options={"samples": _SAMPLES, "perturb": "paper"}
    ),
    "stochastic-allrank": Row(
        f"stochastic, {_SAMPLES} samples, as in the reference code", options={"samples": _SAMPLES, "perturb": "allrank"}
    ),
    **{f"tau-{tau:g}": Row(f"tau = {tau:g}", options={"tau": tau}) for tau in _TEMPERATURES},
    "no-tanh": Row("no tanh", tanh=False),
    **{
        f"sinkhorn-{rounds}": Row(f"{rounds} round{'s' * (rounds != 1)}", options={"sinkhorn_iters": rounds})
        for rounds in _ROUNDS
    },
    "approx_ndcg": TABLE2["approx_ndcg"],
    **{f"alpha-{alpha:g}": Row(f"alpha = {alpha:g}", "approx_ndcg", {"alpha": alpha}) for alpha in _TEMPERATURES},
}

# Qin et al. 2021: each row keeps what the rows before it added. Titles are filled in by `ingredient_title`.
INGREDIENTS: Mapping[str, Row] = {
    "softmax": Row("recipe {recipe}, softmax loss", "softmax"),
    "symlog": Row("+ symmetric log", "softmax", ingredients=("symlog",)),
    "noise": Row("+ input noise {wider.input_noise:g}", "softmax", ingredients=("symlog", "noise")),
    "wider": Row(
        "+ wider (width {wider.width}, {wider.layers} layers, {wider.heads} heads, dropout {wider.dropout:g})",
        "softmax",
        ingredients=("symlog", "noise", "wider"),
    ),
}
# Rows that train nothing: the mean of the standardised scores of all seeds of another row.
ENSEMBLES = {
    "ensemble": ("wider", "+ ensemble of {seeds} seeds"),
    "softmax-ensemble": ("softmax", "the first row, ensemble of {seeds} seeds"),
}

# The recipe that is taken where none is named, and boosted trees after a search.
STRONG: Mapping[str, Row] = {
    "strong": Row("strong: members averaged", recipe="strong"),
    "lightgbm-24": Row("LightGBM, 24 trials", NATIVE, library="lightgbm", trials=24),
    "xgboost-8": Row("XGBoost, 8 trials", NATIVE, library="xgboost", trials=8),
    "catboost-24": Row("CatBoost QueryRMSE, 24 trials", f"{NATIVE}:QueryRMSE", library="catboost", trials=24),
    "catboost-8": Row("CatBoost YetiRank, 8 trials", f"{NATIVE}:YetiRank", library="catboost", trials=8),
}

ROWS: Mapping[str, Row] = {**TABLE2, **ABLATIONS, **INGREDIENTS, **STRONG}


def ingredient_title(name: str, recipe: str, seeds: int) -> str:
    """What a row of the table of ingredients is called.

    >>> ingredient_title("noise", "small", 3)
    '+ input noise 0.5'
    """
    title = ENSEMBLES[name][1] if name in ENSEMBLES else INGREDIENTS[name].title
    return title.format(recipe=recipe, wider=WIDER[recipe], seeds=seeds)


def choose(names: str | None, known: Iterable[str], what: str) -> list[str]:
    """Some of the known names from a comma-separated list, in their own order; all of them where it is None.

    >>> choose("rmse, listnet", ("listnet", "listmle", "rmse"), "row")
    ['listnet', 'rmse']
    """
    known = list(known)
    asked = known if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; expected some of {', '.join(known)}")
    if not asked:
        raise ValueError(f"no {what} was named; expected some of {', '.join(known)}, separated by commas")
    return [name for name in known if name in asked]
