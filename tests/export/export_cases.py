"""Small rankers of every kind, untrained: what they score does not matter here, only that it is the same elsewhere."""

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import fit_scaling
from rankgrad.models import AveragedMembers
from rankgrad.ranker import Ranker
from rankgrad.training.build import make_state
from rankgrad.training.config import Config, Data, Loss, Members, Model
from rankgrad.training.data import scaled

CPU = torch.device("cpu")
KINDS = {
    "linear": Members(),
    "mlp": Members(),
    "transformer": Members(),
    "mlp+members": Members(count=4, keep=4),
    "mlp+share": Members(count=3, share=True),
    "transformer+share": Members(count=2, share=True),
}


def lists(columns=7, queries=40, seed=0, names=None, missing=0.03, brands=()):
    """Columns of many kinds: counts with a heavy tail, signed ones too, a constant one, a share of values missing, one absurd;
    with `brands` the last is one of categories."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, queries)
    x = rng.normal(size=(lengths.sum(), columns))
    x[:, 0] = np.floor(np.exp(2 * x[:, 0]))
    x[:, 1] = 1000 + 3 * x[:, 1]
    x[:, 2] = x[:, 2] ** 7
    x[:, 3] = 5.0
    if brands:
        x[:, -1] = rng.integers(len(brands), size=len(x))
    x[rng.random(x.shape) < missing] = np.nan
    x[7, 4] = 3e38
    labels = rng.integers(0, 4, len(x))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    levels = {columns - 1: brands} if brands else {}
    return RankingDataset(
        x.astype(np.float32), labels, offsets, np.arange(queries), feature_names=names, categories=levels
    )


def ranker_of(kind="mlp", loss="rmse", scaling="auto", inputs="features", data=None, hidden=(9, 5)):
    data = lists() if data is None else data
    model = Model(kind.partition("+")[0], width=8, heads=2, layers=1, feedforward=8, hidden=hidden, inputs=inputs)
    config = Config(Data(scaling=scaling), model, Loss(loss), members=KINDS[kind])
    torch.manual_seed(0)
    fitted = fit_scaling(data, scaling)
    made = make_state(config, scaled(data, fitted), CPU).model
    made = AveragedMembers(made) if kind.endswith("+members") else made
    return Ranker.of(made, fitted, config, data, CPU)
