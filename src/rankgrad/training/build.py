"""Names of a configuration become objects, in one place: losses, models, devices; `validate` checks them before data is read."""

import dataclasses
import difflib
import importlib.util
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.checks import non_negative, one_of, positive, probability, whole
from rankgrad.core.gains import checked_table, is_table
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import KINDS, codes_of
from rankgrad.losses import LOSS_TABLE, LOSSES, LossSpec
from rankgrad.metrics import Metric, parse_metric
from rankgrad.models import (
    INPUTS,
    MLP,
    MODELS,
    NO_CATEGORIES,
    AveragedMembers,
    Categories,
    Linear,
    Members,
    SharedMLP,
    SharedTransformer,
    Transformer,
)
from rankgrad.training.config import TREES, Config, Model, Optimiser, Train, checked_types, replaced
from rankgrad.training.execution import CHOICES
from rankgrad.training.members import MemberState
from rankgrad.training.network import OwnModel, check_network, expect_network, is_own, make_network
from rankgrad.training.precision import PRECISIONS
from rankgrad.training.state import OPTIMISERS, SCHEDULES, TrainState, make_optimiser
from rankgrad.training.step import Objective

MANY_FEATURES = 1_024  # inputs in pieces are ten times as many: of more features they would be most of the work
FEWEST_TO_BAG = 10  # queries: fewer cannot choose anything
SHARING = 16  # members that share their weights, where their number is left to the data

SUGGESTED = {  # what metrics, and others, are called
    "ndcg": "neural_ndcg", "map": "neural_map", "mrr": "neural_mrr", "err": "neural_err", "precision": "neural_precision",
    "rank_xendcg": "xe_ndcg", "xendcg": "xe_ndcg", "rank:ndcg": "lambdarank", "lambdamart": "lambdarank", "mse": "rmse",
    "rank:pairwise": "ranknet", "pairwise": "ranknet", "rank:map": "neural_map", "queryrmse": "query_rmse",
    "querysoftmax": "softmax", "cross_entropy": "softmax",
}  # fmt: skip

OwnLoss = LossSpec | Callable[..., Tensor] | None  # a caller's own, None: that of the configuration's name


def as_spec(loss: LossSpec | Callable[..., Tensor]) -> LossSpec:
    """A caller's own loss: as it is, or a bare function with the signature of every loss; ours have their line of the table.

    Files keep the name alone, so one that is not ours must not be called like one of ours: it would be taken for it there.
    """
    if isinstance(loss, LossSpec):
        spec = loss
    else:
        spec = next((spec for spec in LOSS_TABLE if spec.function is loss), None) or LossSpec(loss)
    if spec.name in LOSSES and spec != parse_loss(spec.name)[0]:
        raise ValueError(
            f"a loss of your own is called {spec.name!r}, as one of rankgrad's is, and a run that is resumed would take that one; "
            "expected a name of its own; pass LossSpec(function, name='...')"
        )
    return spec


def parse_loss(text: str) -> tuple[LossSpec, dict[str, Any]]:
    """A loss by name, in upper or lower case, and its cut-off: "neural_ndcg@10" -> its line of LOSS_TABLE, {"k": 10}.

    >>> spec, options = parse_loss("LambdaRank@5")
    >>> spec.name, options
    ('lambdarank', {'k': 5})
    """
    name = text.partition("@")[0].strip().lower() if isinstance(text, str) else repr(text)
    if name not in LOSSES:
        near = [SUGGESTED[name]] if name in SUGGESTED else difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{text!r} is not a loss; expected one of {', '.join(LOSSES)}{hint}; a loss of your own is "
            "not kept in files: in Python pass the function as loss= again"
        )
    spec = next((spec for spec in LOSS_TABLE if spec.name == name), None) or LossSpec(LOSSES[name], name)
    return spec, _cutoff(spec, text)


def losses_of(config: Config, loss: OwnLoss = None) -> dict[str, tuple[LossSpec, dict[str, Any]]]:
    """By name the losses of a configuration, or the caller's own, and all options each is given."""
    return {name: _loss_of(config, name, loss) for name in config.loss.names}


def _loss_of(config: Config, name: str, loss: OwnLoss) -> tuple[LossSpec, dict[str, Any]]:
    options = config.loss.options
    if loss is None:
        spec, cutoff = parse_loss(name)
    else:
        spec = as_spec(loss)
        cutoff = _cutoff(spec, name)
    if len(config.loss.names) > 1:  # of several losses each is given the options it takes
        options = {key: value for key, value in options.items() if key in spec.parameters}
    gain = {} if config.data.gain == "exp2" or "gain" not in spec.parameters else {"gain": config.data.gain}
    return spec, cutoff | gain | dict(options)


def _cutoff(spec: LossSpec, text: str) -> dict[str, Any]:
    _, at, depth = (part.strip().lower() for part in text.partition("@"))
    if not at or depth == "max":
        return {}
    if not (depth.isascii() and depth.isdigit() and int(depth) >= 1):
        raise ValueError(f"{text!r} is not a loss; expected a whole number, 1 or above, or max, after the @")
    if "k" not in spec.parameters:
        raise ValueError(f"{text!r}: the loss {spec.name} has no cut-off; write {spec.name}")
    return {"k": int(depth)}


def make_objectives(config: Config, loss: OwnLoss = None) -> dict[str, Objective]:
    """The losses of a configuration: one value per list, unchecked (the loop has its own policy for bad numbers)."""
    losses = losses_of(config, loss)
    for key in config.loss.options:
        if len(losses) > 1 and not any(key in options for _, options in losses.values()):
            raise ValueError(
                f"none of the losses {', '.join(losses)} has an option {key!r}; expected one that some loss takes"
            )
    made = {name: _make_objective(spec, options) for name, (spec, options) in losses.items()}
    return {name: _mean_over_members(own) for name, own in made.items()} if shares_weights(config) else made


def shares_weights(config: Config) -> bool:
    """Whether members are one network with vectors of their own, which trains as one model does."""
    return config.members.share and config.members.count != 1


def _mean_over_members(objective: Objective) -> Objective:
    """The same for scores [B, L, K] of members: each has its own loss, and their mean is a list's."""

    def values(scores: Tensor, labels: Tensor, mask: Tensor, generator: torch.Generator, *weights: Tensor) -> Tensor:
        scores = scores[..., None] if scores.dim() == labels.dim() else scores
        of_members = scores.movedim(-1, 0)  # [K, B, L]
        like = of_members.shape
        given = (weight.expand(like) for weight in weights)
        return objective.values(of_members, labels.expand(like), mask.expand(like), generator, *given).mean(0)

    return objective._replace(values=values)


def _make_objective(spec: LossSpec, options: dict[str, Any]) -> Objective:
    parameters = spec.parameters
    own = {"scores", "labels", "mask", "weights", "k", "check", "reduction", "generator", "noise", "sort", "backend"}
    known = [key for key in parameters if key not in own]
    for key in options:
        if key not in (*known, "k"):
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"the loss {spec.name} has no option {key!r}; {takes}")
        if isinstance(parameters[key].default, bool) and not isinstance(options[key], bool):
            raise ValueError(f"{key} must be true or false, got {options[key]!r}")
    function = partial(spec.function, **options, reduction="none", check=False)
    many_units, random = spec.units(2) > 1, "generator" in parameters

    def values(
        scores: Tensor, labels: Tensor, mask: Tensor, generator: torch.Generator, weights: Tensor | None = None
    ) -> Tensor:
        if many_units and scores.dim() == labels.dim():
            scores = scores[..., None]
        given: dict[str, Any] = {"generator": generator} if random else {}
        if weights is not None:
            given["weights"] = weights
        return function(scores, labels, mask, **given)

    objective = Objective(values, spec.counting(options), spec.unit == "document", spec.weights)
    labels, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    tried = objective.values(torch.zeros(1, 2), labels, mask, torch.Generator())  # bad options are refused here
    if not isinstance(tried, Tensor) or tried.shape != (1,):
        came = list(tried.shape) if isinstance(tried, Tensor) else type(tried).__name__
        raise ValueError(
            f"the loss {spec.name} must give one value per list for reduction='none', [1] for one list, got {came}"
        )
    return objective


def for_weighted_documents(config: Config, loss: OwnLoss = None) -> Config:
    """The configuration with those of its losses alone that learn from documents of different weights; refused if there are none."""
    losses = losses_of(config, loss)
    able = tuple(name for name, (spec, _) in losses.items() if spec.weights)
    if not able:
        others = ", ".join(other.name for other in LOSS_TABLE if other.weights)
        raise ValueError(
            f"the loss {config.loss.title} takes no weights of documents (data.document_weight), because it is a function of the whole "
            f"ranking, of which no document is a term; expected one of {others}; choose one, or leave the weights out"
        )
    if len(able) == len(losses):
        return config
    taken = {key: value for key, value in config.loss.options.items() if any(key in losses[name][1] for name in able)}
    return replaced(replaced(config, "loss.name", able), "loss.options", taken)


def takes_gain(config: Config, loss: OwnLoss = None) -> bool:
    """Whether the loss of a configuration takes the gain 2^y - 1 of a label, which the largest labels do not have."""
    specs = losses_of(config, loss).values()
    return any(spec.gain and options.get("gain", "exp2") == "exp2" for spec, options in specs)


def fit_to_data(config: Config, data: RankingDataset, device: torch.device, *, validated: bool) -> Config:
    """The configuration with what was left to the data (0, "auto") filled in; `validated`: there is a validation split.

    Inputs are in pieces unless there are very many features. Batches grow and epochs fall with the number of queries; members fall in
    number where one costs more than on a few hundred queries; without a validation split, members are bagged.
    """
    if config.model.inputs == "auto":
        few = data.features.shape[1] <= MANY_FEATURES and not is_own(config.model.kind)
        inputs = "pieces" if few else "features"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, inputs=inputs))
    members, settings, queries = config.members, config.train, len(data)
    if members.count == 1:
        return config
    batch_size = settings.batch_size or (16 if queries < 1_000 else 32 if queries < 5_000 else 64)
    epochs = settings.epochs or (60 if queries < 5_000 else 30 if queries < 15_000 else 20)
    count = members.count
    if count == 0 and members.share:
        count = SHARING
    if count == 0:
        most, affordable = (64, 2e10) if device.type == "cuda" else (16, 2.3e8)
        sizes = [INPUTS[config.model.inputs] * data.features.shape[1], *config.model.hidden, 1]
        cost = len(data.labels) * sum(before * after for before, after in pairwise(sizes))  # of a member's epoch
        count = max(4, most // 8, min(most, int(most * affordable / cost)))
    bag = members.bag or (1 if validated or queries < FEWEST_TO_BAG else 5)
    bag = min(bag, count)  # a fold that no member leaves out would be measured by those that learned from it
    keep = min(members.keep or max(16, count // 2), count)
    return dataclasses.replace(
        config,
        members=dataclasses.replace(members, count=count, keep=keep, bag=bag),
        train=dataclasses.replace(settings, batch_size=batch_size, epochs=epochs),
    )


def make_state(
    config: Config, data: RankingDataset, device: torch.device, loss: OwnLoss = None, own: OwnModel = None
) -> TrainState | MemberState:
    """What is trained on lists like `data`, at its start; one model draws its weights from torch's global generator."""
    specs = [spec for spec, _ in losses_of(config, loss).values()]
    if config.members.count > 1 and not shares_weights(config):
        return MemberState.build(config, data, [spec.tanh for spec in specs], device)
    units = specs[0].units(int(data.labels.max()))
    features = data.features.shape[1]
    if own is None:
        model = make_scorer(config, features, units, codes_of(data), tanh=specs[0].tanh)
    else:
        model = make_network(own, features, config.model.options)
        check_network(model, features, units)
    model = model.to(device)
    return TrainState(model, make_optimiser(model, config.optimiser))


def make_model(
    settings: Model, features: int, units: int, categories: Categories = NO_CATEGORIES, *, tanh: bool
) -> nn.Module:
    """The scorer of a configuration; `tanh` where the configuration does not say."""
    tanh = tanh if settings.tanh is None else settings.tanh
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
            inputs=settings.inputs,
            categories=categories,
        )
    if settings.kind == "mlp":
        return MLP(
            features,
            hidden=settings.hidden,
            dropout=settings.dropout,
            input_noise=settings.input_noise,
            units=units,
            tanh=tanh,
            inputs=settings.inputs,
            categories=categories,
        )
    one_of("model.kind", settings.kind, ("transformer", "mlp", "linear"))
    return Linear(
        features,
        input_noise=settings.input_noise,
        units=units,
        tanh=tanh,
        inputs=settings.inputs,
        categories=categories,
    )


def make_scorer(
    config: Config, features: int, units: int, categories: Categories = NO_CATEGORIES, *, tanh: bool
) -> nn.Module:
    """The one network of a configuration; its members, if it has any, share it."""
    settings = config.model
    if not shares_weights(config):
        return make_model(settings, features, units, categories, tanh=tanh)
    tanh = tanh if settings.tanh is None else settings.tanh
    if settings.kind == "mlp":
        return SharedMLP(
            features,
            members=config.members.count,
            hidden=settings.hidden,
            dropout=settings.dropout,
            input_noise=settings.input_noise,
            tanh=tanh,
            inputs=settings.inputs,
            categories=categories,
        )
    return SharedTransformer(
        features,
        members=config.members.count,
        width=settings.width,
        layers=settings.layers,
        heads=settings.heads,
        feedforward=settings.feedforward,
        dropout=settings.dropout,
        input_noise=settings.input_noise,
        tanh=tanh,
        inputs=settings.inputs,
        categories=categories,
    )


def make_averaged(
    config: Config, features: int, members: int, categories: Categories = NO_CATEGORIES
) -> AveragedMembers:
    """The average of some members, to be given their weights."""
    hidden = config.model.hidden if config.model.kind == "mlp" else ()
    inputs = config.model.inputs
    return AveragedMembers(Members(features, ids=range(members), hidden=hidden, inputs=inputs, categories=categories))


def make_device(name: str) -> torch.device:
    """The device of a name; "auto" takes a GPU if there is one."""
    device = _device(name)
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", device.index or 0)) if dist.is_initialized() else device.index or 0
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def validate(config: Config, loss: OwnLoss = None, metric: Metric | None = None, own: OwnModel = None) -> Config:
    """Check everything that can be checked before data is read, and write down what the machine decides.

    `loss`, `metric` and `own` are the caller's own loss, metric and network, in place of those that the configuration names.
    """
    config = _plainly_named(checked_types(config), loss, metric)
    one_of("data.scaling", config.data.scaling, KINDS)
    one_of("data.missing", config.data.missing, ("zero", "nan", "all_zero"))
    whole("data.fold", config.data.fold, 1)
    whole("data.list_size", config.data.list_size, 2)
    if not 0 < positive("data.validation", config.data.validation) < 1:
        raise ValueError(f"data.validation must be above 0 and below 1, got {config.data.validation!r}")
    if is_table(config.data.gain):
        checked_table(config.data.gain)
    else:
        one_of("data.gain", config.data.gain, ("exp2", "linear"))
    if config.model.kind in TREES:
        _check_trees(config)
    else:
        make_objectives(config, loss)
        if config.data.document_weight is not None:
            config = for_weighted_documents(config, loss)
        if own is not None:
            expect_network(own, config.model.options)
        if is_own(config.model.kind):
            _check_own_model(config)
        else:
            _check_model(config.model)
        _check_members(config, loss)
        if shares_weights(config) and config.members.bag == 0:
            config = dataclasses.replace(config, members=dataclasses.replace(config.members, bag=1))
    _check_optimiser(config.optimiser)
    settings = config.train
    _check_train(settings, least=1 if config.members.count == 1 else 0)  # 0: by the data, which members alone know
    threads = settings.threads or (torch.get_num_threads() if config.model.kind in TREES else 0)
    device = str(_device(settings.device))
    return dataclasses.replace(config, train=dataclasses.replace(settings, threads=threads, device=device))


def _plainly_named(config: Config, loss: OwnLoss, metric: Metric | None) -> Config:
    """Losses and metrics by the names they have here, whatever their spelling; an unknown one is refused."""
    train, losses = config.train, config.loss.names
    named = dataclasses.replace(
        train,
        metric=train.metric if metric else parse_metric(train.metric).name,
        metrics=tuple(parse_metric(name).name for name in train.metrics),
    )
    if not losses:
        raise ValueError(f"loss names no loss; expected one of {', '.join(LOSSES)}, or several of them")
    if loss is None and config.model.kind not in TREES:
        losses = tuple(_plain_name(name) for name in losses)
    name = losses if isinstance(config.loss.name, tuple) else losses[0]
    return dataclasses.replace(config, train=named, loss=dataclasses.replace(config.loss, name=name))


def _plain_name(text: str) -> str:
    spec, _ = parse_loss(text)
    return spec.name + "".join(text.partition("@")[1:]).replace(" ", "").lower()


def _check_model(settings: Model) -> None:
    """By making one, which on the meta device takes neither memory nor random numbers; what other kinds read is checked too."""
    one_of("model.kind", settings.kind, MODELS)
    if settings.options:
        raise ValueError(
            f"model.options are for a network of your own, and model.kind is {settings.kind!r}; leave them out"
        )
    for name in ("width", "layers", "heads", "feedforward"):
        whole(f"model.{name}", getattr(settings, name), 1)
    for size in settings.hidden:
        whole("every size in model.hidden", size, 1)
    probability("model.dropout", settings.dropout)
    if one_of("model.inputs", settings.inputs, (*INPUTS, "auto")) == "auto":
        settings = dataclasses.replace(settings, inputs="features")
    try:
        with torch.device("meta"):
            make_model(settings, 1, 1, tanh=False)
    except ValueError as error:
        raise ValueError(f"in [model], {error}") from None


def _check_own_model(config: Config) -> None:
    """Nothing of [model] but kind and options is for a network of the caller's own, which may do it itself."""
    settings, kind = config.model, config.model.kind
    if config.members.count != 1:
        raise ValueError(
            f"members are networks of rankgrad, trained at once, and {kind} is your own; expected members.count = 1, as in the "
            "recipes paper and small"
        )
    for name, ours in (("tanh", (None,)), ("inputs", ("features", "auto")), ("input_noise", (0.0,))):
        if getattr(settings, name) not in ours:
            raise ValueError(f"model.{name} is for networks of rankgrad, and {kind} is your own; do it in the network")


def _check_trees(config: Config) -> None:
    """What trees read of a configuration beside their loss, which `rankgrad.runs.trees` knows."""
    for name in ("count", "keep", "bag"):
        whole(f"members.{name}", getattr(config.members, name), 1)
    whole("train.epochs", config.train.epochs, 1)


def _check_members(config: Config, loss: OwnLoss) -> None:
    members = config.members
    for name, least in (("count", 0), ("first", 0), ("keep", 0), ("bag", 0), ("smooth", 1)):
        whole(f"members.{name}", getattr(members, name), least)
    for name, low in (("lr", 0.0), ("dropout", -1.0), ("weight_decay", -1.0), ("scale", 0.0)):
        given = getattr(members.ranges, name)
        if len(given) != 2 or not low < given[0] <= given[1] < (1 if name == "dropout" else math.inf):
            raise ValueError(
                f"members.ranges.{name} must be two numbers, from the least to the most, got {list(given)}"
            )
    if members.count == 1:
        if len(config.loss.names) > 1:
            raise ValueError(
                f"loss.name names {len(config.loss.names)} losses and members.count is 1; expected one loss, or members to deal "
                "them out among, such as members.count = 64"
            )
        if members.bag != 1:
            raise ValueError("members.bag needs members to bag; expected members.count above 1")
        return
    if members.share:
        _check_sharing(config)
    elif config.model.kind not in ("mlp", "linear"):
        raise ValueError(
            f"members with weights of their own are of kind mlp or linear, got model.kind = {config.model.kind!r}; choose one of "
            "these, or members.share = true"
        )
    if config.train.select == "last" and members.bag > 1:
        raise ValueError(
            "train.select = 'last' chooses nothing, and members.bag holds queries out to choose by; leave one out"
        )
    for spec, options in losses_of(config, loss).values():
        if spec.units(4) > 1:
            raise ValueError(f"the loss {spec.name} needs several outputs per document, which members do not have")
        if options.get("samples") is not None:
            raise ValueError(
                f"the loss {spec.name} with samples draws noise for all members together, and a member would depend on the "
                "others; leave samples out, or train one network with members.count = 1"
            )


def _check_sharing(config: Config) -> None:
    if config.model.kind not in ("mlp", "transformer"):
        raise ValueError(
            f"members.share = true is for model.kind mlp and transformer, got {config.model.kind!r}; choose one of these"
        )
    if len(config.loss.names) > 1:
        raise ValueError(
            f"loss.name names {len(config.loss.names)} losses and members that share their weights learn from one; name one, "
            "such as query_rmse"
        )
    if config.members.bag > 1:
        raise ValueError(
            "members.bag holds queries out of a member's own weights, and members.share = true has one set of weights for all; "
            "leave one out"
        )


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
    for restart in settings.restarts:
        whole("every one of optimiser.restarts", restart, 1)
    whole("optimiser.plateau", settings.plateau, 1)
    whole("optimiser.warmup", settings.warmup, 0)
    whole("optimiser.warmup_epochs", settings.warmup_epochs, 0)


def _check_train(settings: Train, least: int) -> None:
    whole("train.epochs", settings.epochs, least)
    whole("train.batch_size", settings.batch_size, least)
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
