"""From what a person typed to a run that trains: configuration, folder, and the other processes of torchrun. Room 6."""

import contextlib
import dataclasses
import datetime
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad.runs.run import InterruptedRunError, advance, begin
from rankgrad.training.config import Config, load, loads
from rankgrad.training.distributed import joined, told_by_first
from rankgrad.training.loop import NonFiniteError
from rankgrad.training.progress import watch
from rankgrad.training.recipes import RECIPES


class SilentError(Exception):
    """Another process has already said what went wrong."""


def configure(data: str, given: Mapping[str, Any], settings: Sequence[str], recipe: str | None = None) -> Config:
    """A configuration from DATA (or a TOML file), values by key such as "train.epochs", and texts SECTION.KEY=VALUE.

    What they leave open follows the recipe, the paper's if none is named.

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
    else:
        config = _replaced(RECIPES[recipe or "paper"](), "data", "path", data)
    for name, value in given.items():
        section, _, key = name.partition(".")
        config = _replaced(config, section, key, value)
    for text in settings:
        config = _set(config, text)
    if config.train.metric not in config.train.metrics:  # what picks the epoch belongs into the report
        config = _replaced(config, "train", "metrics", (*config.train.metrics, config.train.metric))
    return config


def _set(config: Config, text: str) -> Config:
    """Apply SECTION.KEY=VALUE; a VALUE that is not TOML is a word."""
    name, equals, value = (part.strip() for part in text.partition("="))
    section, dot, key = name.rpartition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"--set {text} is not a setting; expected SECTION.KEY=VALUE, such as --set train.epochs=8")
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        value = json.dumps(value)
    part = loads(f"[{section}]\n{key} = {value}", f"--set {text}")
    if section == "loss.options":
        return _replaced(config, "loss", "options", {**config.loss.options, **part.loss.options})
    return _replaced(config, section, key, getattr(getattr(part, section), key))


def _replaced(config: Config, section: str, key: str, value: Any) -> Config:
    changed = dataclasses.replace(getattr(config, section), **{key: value})
    return dataclasses.replace(config, **{section: changed})


def new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist, named after what is run and when."""
    now = datetime.datetime.now()
    first = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    return next(path for path in (first, *(Path(f"{first}-{n}") for n in range(2, 1_000))) if not path.exists())


def start(config: Config, out: Path | None) -> Path:
    """Make the folder of a new run."""
    folder = new_folder(config.loss.name) if out is None else out
    begin(config, folder)
    return folder


def train_to_the_end(
    place: Callable[[], Path], *, fresh: bool, quiet: bool, title: str = "epoch"
) -> dict[str, Any] | None:
    """Train the run that `place` makes or names; its report, or None in all processes but the first.

    Under torchrun the first process alone calls `place` and shows anything. A fresh run that fails before it has learned
    anything leaves no folder behind, so that the same command can be given again.
    """
    with joined() as (rank, _):
        run = _agreed(place, rank)
        if rank > 0:
            for _ in advance(run):
                pass
            return None
        try:
            watch(advance(run), _configuration_of(run), quiet=quiet, title=title)
        except (InterruptedRunError, NonFiniteError):
            raise
        except Exception:
            if fresh:
                _discard(run)
            raise
    return {"run": str(run), **json.loads((run / "report.json").read_text())}


def _agreed(place: Callable[[], Path], rank: int) -> Path:
    """The run of the first process; where that one failed, it has said so and the others leave."""
    try:
        answer = str(place()).encode() if rank == 0 else b""
    except BaseException:
        told_by_first(b"")
        raise
    answer = told_by_first(answer)
    if not answer:
        raise SilentError
    return Path(answer.decode())


def _configuration_of(run: Path) -> Config:
    file = run / "config.toml"
    return load(file) if file.is_file() else Config()  # what is no run is refused by `advance`


def _discard(run: Path) -> None:
    if any(run.glob("checkpoint*")):
        return
    with contextlib.suppress(OSError):
        for name in ("history.jsonl", "config.toml"):
            (run / name).unlink(missing_ok=True)
        run.rmdir()
