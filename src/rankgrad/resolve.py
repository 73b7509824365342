"""Strings become objects, in one place: losses, models, devices of a configuration, checked before any data is read.

Room 5: imports config, losses, metrics and models.
"""

import dataclasses
import difflib
import inspect
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.arguments import one_of, whole
from rankgrad.config import Config, Model
from rankgrad.losses import LOSSES, teaching
from rankgrad.metrics import parse_metric
from rankgrad.models import MLP, Linear, Transformer
from rankgrad.train import Objective


def parse_loss(text: str) -> tuple[str, dict[str, Any]]:
    """A loss's name and its cut-off: "neural_ndcg@10" -> ("neural_ndcg", {"k": 10}).

    >>> parse_loss("lambdarank@5")
    ('lambdarank', {'k': 5})
    """
    name, at, depth = text.partition("@")
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
    options |= config.loss.options
    function = partial(LOSSES[name], **options, reduction="none", check=False)
    threshold = options.get("threshold")

    def values(scores: Tensor, labels: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        if name == "ordinal" and scores.dim() == 2:
            scores = scores[..., None]
        return (
            function(scores, labels, mask, generator=generator)
            if "generator" in parameters
            else function(scores, labels, mask)
        )

    objective = Objective(values, lambda labels, mask: teaching(name, labels, mask, threshold=threshold))
    probe = torch.zeros(1, 2, 1) if name == "ordinal" else torch.zeros(1, 2)
    objective.values(probe, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.Generator())  # options are good
    return objective


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
            units=units,
            tanh=tanh,
        )
    if settings.kind == "mlp":
        return MLP(features, hidden=settings.hidden, dropout=settings.dropout, units=units, tanh=tanh)
    one_of("model.kind", settings.kind, ("transformer", "mlp", "linear"))
    return Linear(features, units=units, tanh=tanh)


def make_device(name: str) -> torch.device:
    """The device of a name; "auto" takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device; expected auto, cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{name!r} was asked for and this machine has no usable GPU; choose device = 'cpu'")
        local = int(os.environ.get("LOCAL_RANK", device.index or 0)) if dist.is_initialized() else device.index or 0
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def resolve(config: Config) -> Config:
    """Check everything that can be checked before data is read, and write down what the machine decides."""
    make_objective(config)
    settings = config.train
    for name in (settings.metric, *settings.metrics):
        parse_metric(name)
    one_of("train.precision", settings.precision, ("float32", "tf32", "bf16"))
    one_of("train.nonfinite", settings.nonfinite, ("stop", "skip"))
    one_of("optimiser.name", config.optimiser.name, ("adam", "adamw"))
    one_of("optimiser.schedule", config.optimiser.schedule, ("constant", "step", "cosine", "plateau"))
    whole("train.epochs", settings.epochs, 1)
    whole("train.batch_size", settings.batch_size, 1)
    whole("data.list_size", config.data.list_size, 2)
    make_model(config.model, 1, 1, config.loss.name)
    threads = settings.threads or torch.get_num_threads()
    return dataclasses.replace(config, train=dataclasses.replace(settings, threads=threads))
