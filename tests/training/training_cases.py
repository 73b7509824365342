"""What tests of training share: small scaled lists, a small configuration, and a run of the loop over them."""

from dataclasses import replace
from itertools import count

import torch

from rankgrad.data.scaling import fit_scaling
from rankgrad.data.synthetic import synthetic
from rankgrad.training.build import losses_of, make_model, make_objectives
from rankgrad.training.config import Config, Data, Loss, Model, Optimiser, Train
from rankgrad.training.data import scaled
from rankgrad.training.loop import Epoch, train
from rankgrad.training.state import TrainState, make_optimiser

CPU = torch.device("cpu")
SCALING = fit_scaling(synthetic("tiny", "train"), "standard")
TRAIN, VALI = (scaled(synthetic("tiny", split), SCALING) for split in ("train", "vali"))
CONFIG = Config(
    data=Data("synthetic:tiny"),
    model=Model(kind="mlp", hidden=(8,), dropout=0.1),
    loss=Loss("softmax"),
    optimiser=Optimiser(lr=0.01),
    train=Train(epochs=2, batch_size=8, device="cpu", threads=1),
)


def with_(config=CONFIG, **changes):
    """A configuration with other values: with_(train_epochs=3)."""
    for key, value in changes.items():
        section, name = key.split("_", 1)
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def new_state(config, seed=0, device=CPU, units=1):
    """A model that has learned nothing yet, and its optimiser."""
    torch.manual_seed(seed)
    model = make_model(config.model, 136, units, tanh=losses_of(config)[config.loss.name][0].tanh).to(device)
    return TrainState(model, make_optimiser(model, config.optimiser))


def run(config, train_set=TRAIN, vali_set=VALI, state=None, stop=lambda: False):
    """Train to the end: the state, the epochs, all events."""
    state = state or new_state(config)
    events = list(train(state, make_objectives(config), train_set, vali_set, config, CPU, stop=stop))
    return state, [event for event in events if isinstance(event, Epoch)], events


def stops_at(time):
    """Says yes when it is asked for the time-th time."""
    asked = count(1)
    return lambda: next(asked) == time


def same(one, other):
    """Whether two sets of named tensors are equal to the bit."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
