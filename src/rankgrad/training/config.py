"""What a run is: frozen dataclasses, read strictly from TOML; recipes to start from, and single keys changed by text.

`Config()` is the paper's recipe. A TOML file may leave anything out; what it holds must exist here, and a key that does
not is an error that names its neighbours. Whether the values make sense together is checked by `build.validate`.
Nothing here imports torch: the command line shows these defaults in its help.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankgrad.checks import positive

Option = bool | int | float | str | tuple[float, ...]

TREES = ("lightgbm", "xgboost", "catboost")  # kinds of model that other libraries grow
ARRAYS = "arrays given to NeuralRanker.fit"  # data.path of an estimator
NATIVE = "native"  # loss.name of trees: the library's own objective; native:NAME is another one of its own

# Keys that configurations had once. Runs written with them still open: they are left out, with a warning.
MOST_OF_CONFIG, DEPTH = 1 << 24, 64  # bytes of a file, parts of a key
GONE = {"train": ("compile",)}


@dataclass(frozen=True)
class Data:
    """Where the lists come from and how their features are scaled."""

    path: str = "synthetic"  # a folder or file of ranking data, a prepared folder, or synthetic[:SIZE]
    fold: int = 1  # of datasets that come in folds
    scaling: str = "auto"  # auto, web30k, symlog, standard, quantile, quantile_auto, none
    list_size: int = 240  # longer lists are subsampled in training, never in evaluation
    validation: float = 0.2  # share of the train queries held out where the data has no validation split
    label: str = "label"  # what a table calls its grades,
    qid: str = "qid"  # its query ids,
    weight: str | None = None  # and its weights of queries, if it has any
    features: tuple[str, ...] = ()  # columns of a table to learn from, by name or pattern (bm25*); empty: all others
    ignore: tuple[str, ...] = ()  # columns of a table that are no features, by name or pattern
    document: str | None = None  # what a table calls its ids of documents, which `rank` writes,
    document_weight: str | None = None  # and its weights of documents, if it has any
    missing: str = "zero"  # zero, nan: a feature that a line of text leaves out; all_zero: empty cells of tables too
    zero_based: bool = False  # the first feature of text has index 0
    categorical: tuple[str, ...] = ()  # columns of categories, by name or pattern, beside those whose type says so
    pandas_categories: bool = True  # so does pandas in Parquet, which keeps no type of numbers that are categories
    gain: str | tuple[float, ...] = "exp2"  # what a label is worth to loss and metrics: exp2, linear, [0, 1, 3, 7, 15]


@dataclass(frozen=True)
class Model:
    """Which scorer; `tanh` left out means: for the losses through a relaxed sort (neural_...) only, as in the paper."""

    kind: str = "transformer"  # transformer, mlp, linear; lightgbm, xgboost, catboost; module:Class of your own
    width: int = 96  # of the transformer
    layers: int = 2  # encoder blocks of the transformer
    heads: int = 1  # of its attention; they divide the width
    feedforward: int = 384  # hidden width inside a block
    hidden: tuple[int, ...] = (256, 128, 64)  # of the mlp
    dropout: float = 0.1  # share of the units set to zero in training
    input_noise: float = 0.0  # deviation of the noise added to scaled features in training
    tanh: bool | None = None  # on the scores
    inputs: str = "features"  # features; list: beside their place in the list; pieces: both in 4 pieces too; auto
    options: Mapping[str, Option] = field(default_factory=dict)  # of a network of your own: Class(features, **options)


@dataclass(frozen=True)
class Ranges:
    """From where to where members' hyper-parameters are drawn: dropout uniform, the others log-uniform."""

    lr: tuple[float, ...] = (3e-4, 6e-3)  # learning rate
    dropout: tuple[float, ...] = (0.0, 0.5)  # share of the units set to zero
    weight_decay: tuple[float, ...] = (1e-4, 0.3)  # of AdamW
    scale: tuple[float, ...] = (0.5, 4.0)  # of tanh on the scores, for losses that take it


@dataclass(frozen=True)
class Members:
    """Many networks trained at once, each with hyper-parameters of its own; the best are averaged.

    0 leaves a number to the data and the device: see `build.fit_to_data`.
    """

    count: int = 1  # 1: one network, by [model] and [optimiser] alone
    first: int = 0  # number of the first; what a member is follows from the seed and its number
    keep: int = 16  # members whose scores are averaged, the best on validation
    share: bool = False  # one network with member vectors on shared weights (TabM) instead of networks of their own
    bag: int = 1  # folds of the queries: a member learns from all but one of them and is validated on that one
    smooth: int = 1  # epochs whose validation values are averaged to choose a member's epoch
    ranges: Ranges = field(default_factory=Ranges)


@dataclass(frozen=True)
class Loss:
    """A loss by name, `neural_ndcg@10` for a cut-off, and options it takes; members are dealt out among several names."""

    name: str | tuple[str, ...] = "neural_ndcg"  # of `rankgrad.LOSSES`, @k for a cut-off; several for members
    options: Mapping[str, Option] = field(default_factory=dict)  # its arguments: loss.options.tau = 0.5

    @property
    def names(self) -> tuple[str, ...]:
        """One, or several for members."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def title(self) -> str:
        """For reports and folders."""
        return "+".join(self.names)


@dataclass(frozen=True)
class Optimiser:
    """Adam or AdamW and the learning rate's schedule."""

    name: str = "adam"  # adam, adamw
    lr: float = 1e-3  # learning rate
    weight_decay: float = 0.0  # decoupled from the gradient for adamw
    clip: float | None = None  # largest gradient norm
    schedule: str = "step"  # constant, step, cosine, plateau
    milestones: tuple[int, ...] = (50,)  # step: epochs after which lr is multiplied by gamma
    gamma: float = 0.1  # step, plateau
    plateau: int = 5  # plateau: epochs without a better validation metric before lr falls
    warmup: int = 0  # steps over which lr rises from zero
    warmup_epochs: int = 0  # and epochs
    restarts: tuple[int, ...] = ()  # cosine: epochs after which it begins again; where a run was extended


@dataclass(frozen=True)
class Train:
    """The loop: how long, how large, on what, and what happens when a number is not finite."""

    epochs: int = 100  # 0: fewer, the more queries there are
    batch_size: int = 64  # lists of a step, over all processes together; 0: more, the more queries there are
    seed: int = 0  # everything random follows from it
    metric: str = "ndcg@10"  # on the validation split: picks the best epoch
    select: str = "best"  # best, last: the epoch whose weights are kept
    patience: int | None = None  # epochs without a better metric before the run stops
    nonfinite: str = "stop"  # stop, skip: what to do after refusing a step whose loss or gradient is not finite
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    precision: str = "float32"  # float32, tf32, bf16
    threads: int = 0  # of the CPU; 0: as many as pay at the moment, or as a step is worth, which is then written down
    tensorboard: bool = False  # write the curves for TensorBoard too
    metrics: tuple[str, ...] = ("ndcg@5", "ndcg@10", "map", "mrr")  # of the report
    resident: bool | str = "auto"  # auto, true, false: the train split in the device's memory
    pack: bool | str = "auto"  # auto, true, false: lists end to end, without padding
    graph: bool | str = "auto"  # auto, true, false: steps recorded as CUDA graphs
    init: str | None = None  # a finished run or a saved ranker whose weights and scaling it starts from


@dataclass(frozen=True)
class Config:
    """Everything a run needs to be repeated.

    >>> config = Config(loss=Loss("lambdarank@10"), train=Train(epochs=8))
    >>> loads(dumps(config)) == config
    True
    """

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    optimiser: Optimiser = field(default_factory=Optimiser)
    members: Members = field(default_factory=Members)
    train: Train = field(default_factory=Train)


LEFT_OPEN = ("count", "keep", "bag", "batch_size", "epochs", "threads")  # numbers that are 0 until the data are known


def became(config: Config, found: Config) -> bool:
    """Whether `found` is this configuration, or what it became when the data were known.

    >>> became(Config(), Config(train=Train(threads=2))), became(Config(), Config(train=Train(seed=2)))
    (True, False)
    >>> became(strong(), replaced(strong(), "model.inputs", "pieces"))
    True
    """
    if config.loss != found.loss and set(found.loss.names) < set(
        config.loss.names
    ):  # the others take no weights of documents
        return became(dataclasses.replace(config, loss=found.loss), found)
    for section in dataclasses.fields(config):
        ours, theirs = getattr(config, section.name), getattr(found, section.name)
        for key in dataclasses.fields(ours):
            own = getattr(ours, key.name)
            left_open = (key.name in LEFT_OPEN and own == 0) or (key.name == "inputs" and own == "auto")
            if own != getattr(theirs, key.name) and not left_open and key.name != "select":
                return False
    return True


def loads(text: str, source: str = "the configuration", *, of_run: bool = False) -> Config:
    r"""A Config from TOML; every key must be known and of its type.

    `of_run`: the text was written by a run or a saved ranker, perhaps long ago: keys that are gone are left out, with a
    warning, and empty cells of tables are 0 unless it says what is missing, or was written by an estimator.

    >>> loads("[train]\nepoch = 8")
    Traceback (most recent call last):
    ...
    ValueError: the configuration: unknown key 'epoch' in [train]; did you mean 'epochs'?
    """
    table = parse_toml(text, source)
    if of_run:
        _leave_out_gone(table, source)
        if isinstance(table.setdefault("data", {}), dict):
            table["data"].setdefault("pandas_categories", False)
            # As all readers had it then; NaN of arrays has always been missing.
            table["data"].setdefault("missing", "zero" if table["data"].get("path") == ARRAYS else "all_zero")
    try:
        return _build(Config, table, "", source)
    except RecursionError:  # in a value that a message would show
        raise ValueError(f"{source} is nested too deeply; expected a configuration; mend it there") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """A table from TOML of somebody else's; a ValueError where it is none or nested deeper than any configuration."""
    try:
        # A key a.a.a takes the square of its length.
        if max(part.count(".") for part in re.split(r"[,={}\n]", text)) > DEPTH:
            raise ValueError("it is nested too deeply")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(
            f"{source} is not TOML: {words}; expected lines such as epochs = 8 under a line [train]; mend it there"
        ) from None


def load(file: Path, *, of_run: bool = False) -> Config:
    """The configuration in a file; `of_run` as in `loads`."""
    if file.stat().st_size > MOST_OF_CONFIG:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes; expected a configuration of at most {MOST_OF_CONFIG:,}"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text; expected a configuration in TOML") from None
    return loads(text, str(file), of_run=of_run)


def dumps(config: Config) -> str:
    """The configuration as TOML: complete, so that a changed default never changes an old run."""
    parts = []
    for section, values in _sections(config):
        plain = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
        tables = {f"{section}.{key}": value for key, value in values.items() if isinstance(value, Mapping) and value}
        lines = [f"[{section}]", *plain]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def checked_types(config: Config) -> Config:
    """The same configuration, after the checks of types that one read from a file has passed."""
    return _build(Config, dict(_sections(config)), "", "the configuration")


def _sections(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sections with the keys that have a value; TOML has no null: an absent key is the default."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        known = {key.name: _plain(getattr(values, key.name)) for key in dataclasses.fields(values)}
        for key in dataclasses.fields(values):
            if known[key.name] is None and key.default is not None:
                raise ValueError(f"{section.name}.{key.name} is None; expected a value such as {key.default!r}")
        yield section.name, {key: value for key, value in known.items() if value is not None}


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _leave_out_gone(table: dict[str, Any], source: str) -> None:
    sections = {section: values for section, values in table.items() if isinstance(values, dict)}
    found = [f"{section}.{key}" for section, keys in GONE.items() for key in keys if key in sections.get(section, {})]
    for name in found:
        section, _, key = name.partition(".")
        del table[section][key]
    if found:
        warnings.warn(f"{source}: {', '.join(found)} no longer exists and is ignored", stacklevel=2)


def _build(kind: type, table: Mapping[str, Any], place: str, source: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in hints:
            where = f"in [{place}]" if place else "at the top"
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(hints)}"
            raise ValueError(f"{source}: unknown key {key!r} {where}; {hint}")
    values = {}
    for key, value in table.items():
        name = f"{place}.{key}" if place else key
        values[key] = _value(hints[key], value, name, source)
    return kind(**values)


def _value(kind: Any, value: Any, name: str, source: str) -> Any:
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{source}: {name} must be a number that a float holds, got one of {value.bit_length()} bits")
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{source}: {name} must be a table, written [{name}], got {value!r}")
        return _build(typing.cast(type, kind), value, name, source)
    if isinstance(kind, types.UnionType):  # X | None: TOML cannot say None, so a value must be an X
        kinds = [option for option in typing.get_args(kind) if option is not type(None)]
        lists = [option for option in kinds if typing.get_origin(option) is tuple and isinstance(value, list | tuple)]
        kind = next((option for option in [*lists, *kinds] if option in lists or type(value) is option), kinds[0])
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list | tuple):
            example = '["a", "b"]' if item is str else "[1, 2]"
            raise ValueError(f"{source}: {name} must be a list such as {example}, got {value!r}")
        return tuple(_value(item, entry, name, source) for entry in value)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(_is_option(*option) for option in value.items()):
            raise ValueError(f"{source}: {name} must be a table of plain values, got {value!r}")
        return {key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{source}: {name} must be of type {kind.__name__}, got {value!r}")
    return value


def _is_option(key: str, value: Any) -> bool:
    """Whether a loss may be given it: a plain value, or as its gain a list of numbers."""
    if isinstance(value, list | tuple):
        return key == "gain" and all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in value)
    return isinstance(value, bool | int | float | str)


def _toml_key(key: str) -> str:
    """A key that a person may have chosen: bare if TOML lets it be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    """A value as TOML writes it; JSON's strings, numbers and booleans are TOML's too, with two exceptions."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- recipes ----------------------------------------------------------------------------------------------------------


def paper() -> Config:
    """ArXiv 2102.07831: two encoder blocks of width 96, 100 epochs of Adam, lr / 10 after epoch 50."""
    return Config()


def small() -> Config:
    """A third of the paper's width, at most 30 epochs, small batches, stopped early by validation."""
    return Config(
        model=Model(width=32, feedforward=64),
        optimiser=Optimiser(schedule="constant"),
        train=Train(epochs=30, batch_size=16, patience=8),
    )


def strong() -> Config:
    """Many small networks at once on list-relative inputs in pieces, four losses dealt out among them, the best averaged.

    The way to beat boosted trees without tuning: sizes, folds, scaling and inputs follow the data and the device.
    """
    return Config(
        data=Data(scaling="quantile_auto"),
        model=Model(kind="mlp", hidden=(64, 64), inputs="auto"),
        loss=Loss(("softmax", "query_rmse", "neural_ndcg@10", "lambdarank@10")),
        optimiser=Optimiser(name="adamw", schedule="cosine", warmup_epochs=2),
        members=Members(count=0, keep=0, bag=0),
        train=Train(epochs=0, batch_size=0),
    )


def dasalc() -> Config:
    """Qin et al. 2021, "Are Neural Rankers still Outperformed by Gradient Boosted Decision Trees?", as for Web30K.

    Their sizes: sign(x) log(1 + |x|), noise of deviation 1.5 on standardised inputs, 4 layers of attention with 2 heads of
    100, hidden layers of 512, dropout 0.4, softmax loss, batches of 128 lists of at most 200, 15,000 steps (100 epochs of
    Web30K). The differences: their attention modulates a second network beside it (a "latent cross", and batch norms
    inside), ours is one pre-norm encoder of that width; they normalise inputs by batch, we by the train split. Their last
    ingredient is an ensemble: train several seeds, and give all runs to `rankgrad evaluate` or `rank`.
    """
    return Config(
        data=Data(scaling="symlog", list_size=200),
        model=Model(width=200, layers=4, heads=2, feedforward=512, dropout=0.4, input_noise=1.5),
        loss=Loss("softmax"),
        optimiser=Optimiser(schedule="constant"),
        train=Train(epochs=100, batch_size=128),
    )


RECIPES: Mapping[str, Callable[[], Config]] = {"strong": strong, "paper": paper, "small": small, "dasalc": dasalc}


# --- single keys, as the command line gives them ----------------------------------------------------------------------


def configure(
    data: str,
    given: Mapping[str, Any],
    settings: Sequence[str],
    recipe: str | None = None,
    *,
    base: Config | None = None,
) -> Config:
    """A configuration from DATA (or a TOML file), values by key such as "train.epochs", and texts SECTION.KEY=VALUE.

    What they leave open follows the recipe; if none is named `base`, where there is one, `strong`, or the paper's where something
    of [model] is given.

    >>> configure("synthetic", {"train.epochs": 8}, ["loss.options.tau=0.5"]).loss.options
    {'tau': 0.5}
    """
    file = Path(data)
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}; expected one of {', '.join(RECIPES)}")
    if recipe is not None and file.suffix == ".toml":
        raise ValueError(f"--recipe {recipe} and {data} are two configurations; expected one; leave one of them out")
    if file.suffix == ".toml":
        if not file.is_file():
            raise ValueError(f"{data} does not exist; expected a configuration file; check the path")
        config = load(file)
    elif base is not None and recipe is None:
        config = replaced(base, "data.path", data)
    else:
        names_model = any(name.strip().startswith("model.") for name in (*given, *settings))
        config = replaced(RECIPES[recipe or ("paper" if names_model else "strong")](), "data.path", data)
    return with_settings(config, given, settings)


def with_settings(config: Config, given: Mapping[str, Any], settings: Sequence[str]) -> Config:
    """The configuration with values by key such as "train.epochs", and then with texts SECTION.KEY=VALUE."""
    for name, value in given.items():
        config = replaced(config, name, value)
    if config.members.count != 1 and "optimiser.lr" in given:  # members draw their own: one value for all of them
        rate = positive("optimiser.lr", given["optimiser.lr"])
        ranges = dataclasses.replace(config.members.ranges, lr=(rate, rate))
        config = replaced(config, "members.ranges", ranges)
    for text in settings:
        config = _set(config, text)
    if config.train.metric not in config.train.metrics:  # what picks the epoch belongs into the report
        config = replaced(config, "train.metrics", (*config.train.metrics, config.train.metric))
    return config


def replaced(config: Config, name: str, value: Any) -> Config:
    """The configuration with another value of SECTION.KEY."""
    section, _, key = name.partition(".")
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})


def _set(config: Config, text: str) -> Config:
    """Apply SECTION.KEY=VALUE; a VALUE that is not TOML is a word."""
    text = text.strip()
    if len(text.splitlines()) > 1:  # TOML would take what follows for other keys, and nobody would look at them
        raise ValueError(f"--set {text!r} has several lines; expected one SECTION.KEY=VALUE; give --set for each key")
    name, equals, value = (part.strip() for part in text.partition("="))
    section, dot, key = (part.strip() for part in name.rpartition("."))
    options = section in ("loss.options", "model.options")  # whose keys are a caller's own
    if not (equals and dot and re.fullmatch(r"\w+(\.\w+)*", section) and (key if options else key.isidentifier())):
        raise ValueError(f"--set {text} is not a setting; expected SECTION.KEY=VALUE, such as --set train.epochs=8")
    try:
        tomllib.loads(f"value = {value}")
        value = '"nan"' if value == "nan" else value  # a word of data.missing; no setting is the number
    except (ValueError, RecursionError):
        value = json.dumps(value)
    part = loads(f"[{section}]\n{key} = {value}", f"--set {text}")
    if options:
        of, now = section.partition(".")[0], config
        return replaced(config, section, {**getattr(now, of).options, **getattr(part, of).options})
    if section == "members.ranges":
        ranges = dataclasses.replace(config.members.ranges, **{key: getattr(part.members.ranges, key)})
        return replaced(config, section, ranges)
    return replaced(config, f"{section}.{key}", getattr(getattr(part, section), key))
