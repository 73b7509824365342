"""A network of the caller's own in place of one of `rankgrad.models`.

It is an `nn.Module`, or a class or function that makes one of the number of features, and it is called like ours:
`network(features [B, L, F], mask [B, L]) -> scores [B, L]`. mask is True at real documents and None where all are; what stands
under the padding must not change the scores of the others. For a loss with several outputs per document the scores are
[B, L, units]. Features come scaled, in float32, with an indicator of missing values for each column that has some.

A file keeps the name "module:Class" and the weights, never code: whoever loads one passes the network again. Nothing but
`import_network` imports by that name, and it is called for names that a person typed or wrote into a configuration to train,
never for one that a run or a saved ranker holds.
"""

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.training.config import Config

OwnModel = nn.Module | Callable[..., nn.Module] | None  # a caller's own, None: that of the configuration's kind

EXPECTED = "expected a network that is called with features [B, L, F] and mask [B, L] and gives scores [B, L]"
CLOSE = 1e-3  # of scores that must be equal but for rounding, and for what float32 loses in a network nobody knows


def is_own(kind: str) -> bool:
    """Whether model.kind names a network that is not of this package.

    >>> is_own("mypackage.networks:Tower"), is_own("mlp")
    (True, False)
    """
    return ":" in kind


def network_name(model: nn.Module | Callable[..., nn.Module]) -> str:
    """What files call it: module:Class.

    >>> network_name(nn.Linear(3, 1)), network_name(functools.partial(nn.Linear, bias=False))
    ('torch.nn.modules.linear:Linear', 'torch.nn.modules.linear:Linear')
    """
    made_by: Any = model.func if isinstance(model, functools.partial) else model
    made_by = made_by if hasattr(made_by, "__qualname__") else type(made_by)
    return f"{made_by.__module__}:{made_by.__qualname__}"


def expect_network(model: OwnModel, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be or make a network."""
    if isinstance(model, nn.Module):
        if options:
            raise ValueError(
                f"model.options ({', '.join(options)}) were given for a network that is made already; expected none; pass its class "
                "to have it made with them"
            )
    elif not callable(model):
        raise ValueError(
            f"the network is of type {type(model).__name__}; expected an nn.Module, or a class or function that makes one of the "
            "number of features"
        )


def expect_own(config: Config, own: OwnModel, source: str) -> None:
    """Refuse to build what `source` holds without the network it was trained with, or with one that it was not."""
    kind = config.model.kind
    if is_own(kind) and own is None:
        raise ValueError(
            f"{source} was trained with a network of your own, {kind}, and loading it executes no code; expected the network; pass "
            f"model={kind.rpartition(':')[2]}, on the command line --model {kind}"
        )
    if own is not None and not is_own(kind):
        raise ValueError(f"{source} was trained with {kind}, a network of rankgrad; expected no model=; leave it out")


def import_network(kind: str) -> Callable[..., nn.Module]:
    """The class or function of a name "module:Class"; modules in the working directory are found too."""
    module, _, name = kind.partition(":")
    if not module or not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(
            f"{kind!r} is not a network that can be imported; expected MODULE:CLASS, such as mypackage.networks:Tower; pass one "
            "that is made inside a function as model="
        )
    if os.getcwd() not in sys.path and "" not in sys.path:  # a command that was installed does not look there
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{kind!r}: there is no module {error.name}; expected one that Python finds from here; install it, or start where it "
            "lies"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{kind!r}: the module {module} has no {name}; expected a class or function of it")
        found = getattr(found, part)
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ValueError(f"{kind!r} is not a class of networks; expected a torch.nn.Module")
    expect_network(found, {})
    return found


def make_network(
    model: nn.Module | Callable[..., nn.Module], features: int, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """A network for so many features: a copy of the caller's, or a new one."""
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(model)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied ({error}); expected a network that can; pass its class instead"
            ) from error
    name = network_name(model)
    try:
        made = model(features, **(options or {}))
    except TypeError as error:
        raise ValueError(
            f"{name} could not be made of the number of features, {features}, and model.options ({error}); expected a class or "
            "function that takes them"
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{name} gave {type(made).__name__}; expected a torch.nn.Module")
    return made


def check_network(network: nn.Module, features: int, units: int) -> None:
    """Try a network on two small lists, and say what is missing from its interface."""
    name = type(network).__name__
    training = network.training
    network.eval()
    with torch.random.fork_rng(devices=[]):
        lists = torch.randn(2, 3, features, generator=torch.Generator().manual_seed(0))
        mask = torch.tensor([[True, True, True], [True, True, False]])
        scores = _tried(network, lists, mask, units)
        other = lists.clone()
        other[~mask] = 7.0
        changed = _tried(network, other, mask, units)
        whole = _tried(network, lists[:1], None, units)
    network.train(training)
    if not scores.requires_grad:
        raise ValueError(
            f"the scores of {name} have no gradient; {EXPECTED} computed by parameters that learn; look for detach(), no_grad() or "
            "requires_grad_(False)"
        )
    if not _close(changed[mask], scores[mask]):
        raise ValueError(
            f"the scores {name} gives to documents depend on what stands under the padding; {EXPECTED} that leaves out documents "
            "where mask is False, in every mean, sum, maximum and attention over a list"
        )
    if not _close(whole[0], scores[0]):
        raise ValueError(
            f"{name} scores a list without padding differently with mask=None and with a mask that is True throughout, or differently "
            "each time in eval mode; expected the same scores"
        )
    for key, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the state of {name} holds {key}, which is no tensor; expected tensors alone, because files hold no code"
            )


def _tried(network: nn.Module, features: Tensor, mask: Tensor | None, units: int) -> Tensor:
    """The scores of a network, after a look at their kind."""
    name, given = type(network).__name__, f"features {list(features.shape)} and mask "
    given += "None" if mask is None else str(list(mask.shape))
    try:
        scores = network(features, mask)
    except Exception as error:
        raise ValueError(
            f"{name} fails when it is called with {given} ({type(error).__name__}: {error}); {EXPECTED}; the data have "
            f"{features.shape[-1]} features, indicators of missing values among them, and mask is None where all documents are real"
        ) from error
    expected = [*features.shape[:2], *([] if units == 1 else [units])]
    if not isinstance(scores, Tensor):
        raise ValueError(f"{name} gave {type(scores).__name__} for {given}; expected a tensor of scores {expected}")
    if list(scores.shape) != expected or not scores.is_floating_point():
        hint = "; squeeze(-1) its last dimension" if list(scores.shape) == [*expected, 1] else ""
        several = f", {units} per document for this loss" if units > 1 else ""
        raise ValueError(
            f"{name} gave {scores.dtype} {list(scores.shape)} for {given}; expected floating-point scores {expected}{several}{hint}"
        )
    real = scores if mask is None else scores[mask]
    if not real.isfinite().all():
        raise ValueError(f"{name} gave scores that are not finite for {given}; expected finite ones")
    return scores


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.detach().float(), expected.detach().float(), rtol=CLOSE, atol=CLOSE)
