"""Apache Solr's NeuralNetworkModel: JSON of normalised features and layers, for its module of learning to rank.

Solr scores one document at a time, in float32, and knows no missing values: a feature that it cannot extract has its default value.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rankgrad.data.dataset import MAX_FLOAT32
from rankgrad.data.scaling import AS_IS
from rankgrad.models import MLP, Linear, SharedMLP
from rankgrad.ranker import Ranker

NORMALISER = "org.apache.solr.ltr.norm.StandardNormalizer"
MODEL = "org.apache.solr.ltr.model.NeuralNetworkModel"


def write_solr(ranker: Ranker, path: Path, facts: dict[str, Any]) -> None:  # noqa: ARG001 (Solr refuses keys it does not know)
    """Write the model, named after the file; a ValueError says what Solr has no form for."""
    path.write_text(json.dumps(solr_model(ranker, path.stem), indent=1) + "\n")


def solr_model(ranker: Ranker, name: str) -> dict[str, Any]:
    """What is uploaded to Solr's model store; the features must be in its feature store under the same names."""
    model, scaling = ranker.model, ranker.scaling
    if type(model) not in (MLP, Linear):
        what = "members that share weights" if isinstance(model, SharedMLP) else f"a model {type(model).__name__}"
        raise _refused(what, "layers of one network")
    assert isinstance(model, MLP | Linear)
    if model.inputs != "features":
        raise _refused("inputs relative to the list", "features of one document")
    if scaling.levels:
        raise _refused("categories", "numbers", "train without those columns: --set data.ignore=")
    if len(scaling.indicators):
        never = "features that were never missing in training"
        raise _refused(
            "indicators of missing values", never, "fill them with the defaults that Solr has, and train on that"
        )
    p = scaling.arrays
    if scaling.kind == "quantile" or (p["curve"] != AS_IS).any() or (p["limit"] < MAX_FLOAT32).any():
        raise _refused(f"the scaling {scaling.kind!r} of this run", "standard or none")
    layers: list[tuple[np.ndarray, np.ndarray, str]] = []
    for layer in model.layers if isinstance(model, MLP) else ():
        assert isinstance(layer, nn.Linear)
        layers.append((*_weights(layer), "relu"))
    last = "tanh" if model.tanh else "identity"
    layers.append((*_weights(model.output), last if ranker.units == 1 else "sigmoid"))
    if ranker.units > 1:
        if model.tanh:
            raise _refused("a sigmoid of tanh", "one function after a layer")
        layers.append((np.ones((1, ranker.units)), np.zeros(1), "identity"))
    # What float32 loses of the mean goes into the bias, what a normaliser cannot do into the weights.
    sign, mean, factor = (np.asarray(p[key], np.float64) for key in ("sign", "mean", "factor"))
    average = (sign * mean).astype(np.float32).astype(np.float64)
    weight, bias, after = layers[0]
    weight = weight * sign * (factor != 0)
    layers[0] = weight, bias + weight @ ((average - sign * mean) * factor), after
    names = ranker.names or [f"feature_{number}" for number in range(1, ranker.features + 1)]
    features: list[dict[str, Any]] = []
    for column, feature in enumerate(names):
        deviation = 1 / factor[column] if factor[column] else 1.0
        plain = average[column] == 0 and deviation == 1
        norm = {"class": NORMALISER, "params": {"avg": str(float(average[column])), "std": str(float(deviation))}}
        features.append({"name": feature} if plain else {"name": feature, "norm": norm})
    written = [{"matrix": w.tolist(), "bias": b.tolist(), "activation": a} for w, b, a in layers]
    return {"class": MODEL, "name": name, "features": features, "params": {"layers": written}}


def solr_scores(path: Path) -> Any:
    """(features, sizes) -> scores, computed from the file as Solr does."""
    written = json.loads(path.read_text())
    norms = [feature.get("norm", {"params": {"avg": 0, "std": 1}})["params"] for feature in written["features"]]
    average, deviation = (np.array([norm[key] for norm in norms], np.float32) for key in ("avg", "std"))
    activations = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "identity": lambda x: x}

    def scores(features: Any, sizes: Any) -> Any:  # noqa: ARG001 (documents are scored alone)
        x = torch.from_numpy((features - average) / deviation)
        for layer in written["params"]["layers"]:
            matrix, bias = (torch.tensor(layer[key], dtype=torch.float32) for key in ("matrix", "bias"))
            x = activations[layer["activation"]](x @ matrix.T + bias)
        return x[:, 0].numpy()

    return scores


def _weights(layer: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    return tuple(p.detach().cpu().double().numpy() for p in (layer.weight, layer.bias))  # type: ignore[return-value]


DISTIL = "distil the run first: rankgrad distil RUN DATA --into mlp:64,32 --set data.scaling=standard"


def _refused(found: str, expected: str, remedy: str = DISTIL) -> ValueError:
    return ValueError(f"Solr's NeuralNetworkModel cannot express {found}; expected {expected}; {remedy}")
