"""Strings become objects, in one place: losses, models, devices of a configuration, checked before any data is read.

Room 5: imports config, losses, metrics, models, train and the names of scalings.
"""

import dataclasses
import difflib
import importlib.util
import inspect
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.checks import non_negative, one_of, positive, whole
from rankgrad.data.scaling import KINDS
from rankgrad.losses import LOSSES, teaching_rule
from rankgrad.metrics import parse_metric
from rankgrad.models import MLP, MODELS, Linear, Transformer
from rankgrad.training.config import Config, Model, Optimiser, Train, dumps, loads
from rankgrad.training.execution import CHOICES
from rankgrad.training.loop import OPTIMISERS, SCHEDULES
from rankgrad.training.precision import PRECISIONS
from rankgrad.training.step import Objective


def parse_loss(text: str) -> tuple[str, dict[str, Any]]:
    """A loss's name and its cut-off: "neural_ndcg@10" -> ("neural_ndcg", {"k": 10}).

    >>> parse_loss("lambdarank@5")
    ('lambdarank', {'k': 5})
    """
    name, at, depth = text.partition("@") if isinstance(text, str) else (repr(text), "", "")
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{text!r} is not a loss; expected one of {', '.join(LOSSES)}{hint}")
    if not at or depth == "max":
        return name, {}
    if not (depth.isascii() and depth.isdigit() and int(depth) >= 1):
        raise ValueError(f"{text!r} is not a loss; expected a whole number, 1 or above, or max, after the @")
    if "k" not in inspect.signature(LOSSES[name]).parameters:
        raise ValueError(f"{text!r}: the loss {name} has no cut-off; write {name}")
    return name, {"k": int(depth)}


def make_objective(config: Config) -> Objective:
    """The loss of a configuration: one value per list, unchecked (the loop has its own policy for bad numbers)."""
    name, options = parse_loss(config.loss.name)
    parameters = inspect.signature(LOSSES[name]).parameters
    own = {"scores", "labels", "mask", "k", "check", "reduction", "generator", "noise", "sort", "backend"}
    known = [key for key in parameters if key not in own]
    for key in config.loss.options:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"the loss {name} has no option {key!r}; {takes}")
        if isinstance(parameters[key].default, bool) and not isinstance(config.loss.options[key], bool):
            raise ValueError(f"{key} must be true or false, got {config.loss.options[key]!r}")
    options |= config.loss.options
    function = partial(LOSSES[name], **options, reduction="none", check=False)

    def values(scores: Tensor, labels: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        if name == "ordinal" and scores.dim() == 2:
            scores = scores[..., None]
        return (
            function(scores, labels, mask, generator=generator)
            if "generator" in parameters
            else function(scores, labels, mask)
        )

    objective = Objective(values, teaching_rule(name, options.get("threshold")))
    probe = torch.zeros(1, 2, 1) if name == "ordinal" else torch.zeros(1, 2)
    objective.values(probe, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.Generator())  # options are good
    return objective


def takes_gain(config: Config) -> bool:
    """Whether the loss of a configuration takes the gain 2^y - 1 of a label, which the largest labels do not have."""
    name = parse_loss(config.loss.name)[0]
    graded = "gain" in inspect.signature(LOSSES[name]).parameters
    return name == "xe_ndcg" or (graded and config.loss.options.get("gain", "exp2") == "exp2")


def make_model(settings: Model, features: int, units: int, loss: str) -> nn.Module:
    """The scorer of a configuration."""
    tanh = loss.startswith("neural_") if settings.tanh is None else settings.tanh
    if settings.kind == "transformer":
        return Transformer(
            features,
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            feedforward=settings.feedforward,
            dropout=settings.dropout,
            input_noise=settings.input_noise,
            units=units,
            tanh=tanh,
        )
    if settings.kind == "mlp":
        return MLP(
            features,
            hidden=settings.hidden,
            dropout=settings.dropout,
            input_noise=settings.input_noise,
            units=units,
            tanh=tanh,
        )
    one_of("model.kind", settings.kind, ("transformer", "mlp", "linear"))
    return Linear(features, input_noise=settings.input_noise, units=units, tanh=tanh)


def make_device(name: str) -> torch.device:
    """The device of a name; "auto" takes a GPU if there is one."""
    device = _device(name)
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", device.index or 0)) if dist.is_initialized() else device.index or 0
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def resolve(config: Config) -> Config:
    """Check everything that can be checked before data is read, and write down what the machine decides."""
    config = loads(dumps(config))  # types, as of a file
    one_of("data.scaling", config.data.scaling, KINDS)
    whole("data.fold", config.data.fold, 1)
    whole("data.list_size", config.data.list_size, 2)
    if not 0 < positive("data.validation", config.data.validation) < 1:
        raise ValueError(f"data.validation must be above 0 and below 1, got {config.data.validation!r}")
    _check_model(config.model)
    make_objective(config)
    with torch.device("meta"):  # sizes that do not fit together, found without taking memory or random numbers
        make_model(config.model, 1, 1, config.loss.name)
    _check_optimiser(config.optimiser)
    settings = config.train
    _check_train(settings)
    threads, device = settings.threads or torch.get_num_threads(), str(_device(settings.device))
    return dataclasses.replace(config, train=dataclasses.replace(settings, threads=threads, device=device))


def _check_model(settings: Model) -> None:
    one_of("model.kind", settings.kind, MODELS)
    for name in ("width", "layers", "heads", "feedforward"):
        whole(f"model.{name}", getattr(settings, name), 1)
    for size in settings.hidden:
        whole("every size in model.hidden", size, 1)
    if non_negative("model.dropout", settings.dropout) >= 1:
        raise ValueError(f"model.dropout must be 0 or above and below 1, got {settings.dropout!r}")
    non_negative("model.input_noise", settings.input_noise)


def _check_optimiser(settings: Optimiser) -> None:
    one_of("optimiser.name", settings.name, OPTIMISERS)
    one_of("optimiser.schedule", settings.schedule, SCHEDULES)
    positive("optimiser.lr", settings.lr)
    positive("optimiser.gamma", settings.gamma)
    non_negative("optimiser.weight_decay", settings.weight_decay)
    if settings.clip is not None:
        positive("optimiser.clip", settings.clip)
    for milestone in settings.milestones:
        whole("every one of optimiser.milestones", milestone, 1)
    whole("optimiser.plateau", settings.plateau, 1)
    whole("optimiser.warmup", settings.warmup, 0)


def _check_train(settings: Train) -> None:
    whole("train.epochs", settings.epochs, 1)
    whole("train.batch_size", settings.batch_size, 1)
    whole("train.threads", settings.threads, 0)
    if whole("train.seed", settings.seed, 0) >= 2**63:
        raise ValueError(f"train.seed must be below 2^63, got {settings.seed}")
    if settings.patience is not None:
        whole("train.patience", settings.patience, 1)
    one_of("train.precision", settings.precision, PRECISIONS)
    one_of("train.nonfinite", settings.nonfinite, ("stop", "skip"))
    if one_of("train.select", settings.select, ("best", "last")) == "last" and settings.patience is not None:
        raise ValueError(
            "train.select = 'last' keeps the last epoch, and train.patience picks which one that is by validation; "
            "leave patience out, or select the best"
        )
    for name in CHOICES:
        if not isinstance(getattr(settings, name), bool) and getattr(settings, name) != "auto":
            raise ValueError(f"train.{name} must be 'auto', true or false, got {getattr(settings, name)!r}")
    for name in (settings.metric, *settings.metrics):
        parse_metric(name)
    if not settings.metrics:
        raise ValueError("train.metrics is empty; expected at least one metric for the report, such as 'ndcg@10'")
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("train.tensorboard needs tensorboard; install it with: pip install tensorboard")


def _device(name: str) -> torch.device:
    """The device of a name, if this machine has it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} is not a device; expected auto, cpu, cuda or cuda:NUMBER")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name!r} was asked for and this machine has no usable GPU; choose device = 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name!r} was asked for and this machine has {torch.cuda.device_count()} GPUs, from cuda:0 on"
        )
    return device
