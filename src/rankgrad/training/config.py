"""What a run is: frozen dataclasses, read strictly from TOML and written back resolved. Imports nothing of rankgrad.

`Config()` is the paper's recipe. A TOML file may leave anything out; what it holds must exist here, and a key that does
not is an error that names its neighbours.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Option = bool | int | float | str


@dataclass(frozen=True)
class Data:
    """Where the lists come from and how their features are scaled."""

    path: str = "synthetic"  # a folder or file of ranking data, a prepared folder, or synthetic[:SIZE]
    fold: int = 1  # of datasets that come in folds
    scaling: str = "auto"  # auto, web30k, symlog, standard, quantile, none
    list_size: int = 240  # longer lists are subsampled in training, never in evaluation
    validation: float = 0.2  # share of the train queries held out where the data has no validation split
    label: str = "label"  # what a table calls its grades,
    qid: str = "qid"  # its query ids,
    weight: str | None = None  # and its weights of queries, if it has any


@dataclass(frozen=True)
class Model:
    """Which scorer; `tanh` left out means: for the losses through a relaxed sort (neural_...) only, as in the paper."""

    kind: str = "transformer"  # transformer, mlp, linear
    width: int = 96
    layers: int = 2
    heads: int = 1
    feedforward: int = 384
    hidden: tuple[int, ...] = (256, 128, 64)  # of the mlp
    dropout: float = 0.1
    input_noise: float = 0.0  # deviation of the noise added to scaled features in training
    tanh: bool | None = None


@dataclass(frozen=True)
class Loss:
    """A loss by name, `neural_ndcg@10` for a cut-off, and options it takes."""

    name: str = "neural_ndcg"
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimiser:
    """Adam or AdamW and the learning rate's schedule."""

    name: str = "adam"  # adam, adamw
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float | None = None  # largest gradient norm
    schedule: str = "step"  # constant, step, cosine, plateau
    milestones: tuple[int, ...] = (50,)  # step: epochs after which lr is multiplied by gamma
    gamma: float = 0.1  # step, plateau
    plateau: int = 5  # plateau: epochs without a better validation metric before lr falls
    warmup: int = 0  # steps over which lr rises from zero


@dataclass(frozen=True)
class Train:
    """The loop: how long, how large, on what, and what happens when a number is not finite."""

    epochs: int = 100
    batch_size: int = 64  # lists of a step, over all processes together
    seed: int = 0
    metric: str = "ndcg@10"  # on the validation split: picks the best epoch
    select: str = "best"  # best, last: the epoch whose weights are kept
    patience: int | None = None  # epochs without a better metric before the run stops
    nonfinite: str = "stop"  # stop, skip: what to do after refusing a step whose loss or gradient is not finite
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    precision: str = "float32"  # float32, tf32, bf16
    threads: int = 0  # CPU threads; 0 = torch's choice, written down when the run starts
    tensorboard: bool = False
    metrics: tuple[str, ...] = ("ndcg@5", "ndcg@10", "map", "mrr")  # of the report
    resident: bool | str = "auto"  # auto, true, false: the train split in the device's memory
    pack: bool | str = "auto"  # auto, true, false: lists end to end, without padding
    compile: bool | str = "auto"  # auto, true, false: the model by torch.compile
    graph: bool | str = "auto"  # auto, true, false: steps recorded as CUDA graphs


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
    train: Train = field(default_factory=Train)


def loads(text: str, source: str = "the configuration") -> Config:
    r"""A Config from TOML; every key must be known and of its type.

    >>> loads("[train]\nepoch = 8")
    Traceback (most recent call last):
    ...
    ValueError: the configuration: unknown key 'epoch' in [train]; did you mean 'epochs'?
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{source} is not TOML: {error}; expected lines such as epochs = 8 under a line [train]; mend it there"
        ) from None
    config = _build(Config, table, "", source)
    assert isinstance(config, Config)
    return config


def load(file: Path) -> Config:
    """The configuration in a file."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text; expected a configuration in TOML") from None
    return loads(text, str(file))


def dumps(config: Config) -> str:
    """The configuration as TOML: complete, so that a changed default never changes an old run."""
    parts = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        lines = [f"[{section.name}]"]
        tables = []
        for key in dataclasses.fields(values):
            value = getattr(values, key.name)
            if isinstance(value, Mapping):
                lines_of_table = [f"{name} = {_toml(item)}" for name, item in value.items()]
                tables.append("\n".join([f"\n[{section.name}.{key.name}]", *lines_of_table]) if value else "")
            elif value is not None:
                lines.append(f"{key.name} = {_toml(value)}")
            elif key.default is not None:  # TOML has no null: an absent key is the default
                raise ValueError(f"{section.name}.{key.name} is None; expected a value such as {key.default!r}")
        parts.append("\n".join([*lines, *filter(None, tables)]))
    return "\n\n".join(parts) + "\n"


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
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{source}: {name} must be a table, written [{name}], got {value!r}")
        return _build(typing.cast(type, kind), value, name, source)
    if isinstance(kind, types.UnionType):  # X | None: TOML cannot say None, so a value must be an X
        kinds = [option for option in typing.get_args(kind) if option is not type(None)]
        kind = next((option for option in kinds if type(value) is option), kinds[0])
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"{source}: {name} must be a list, got {value!r}")
        return tuple(_value(item, entry, name, source) for entry in value)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(v, (bool, int, float, str)) for v in value.values()):
            raise ValueError(f"{source}: {name} must be a table of plain values, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{source}: {name} must be of type {kind.__name__}, got {value!r}")
    return value


def _toml(value: Any) -> str:
    """A value as TOML writes it; JSON's strings, numbers and booleans are TOML's too, with two exceptions."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
