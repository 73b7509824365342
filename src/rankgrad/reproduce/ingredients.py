"""What DASALC (Qin et al. 2021) adds to a ranker, one ingredient after the other. Pure. Imports config, recipes, variants.

The last ingredient, the ensemble, trains nothing: it is the mean of the standardised scores of all seeds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankgrad.reproduce.claims import Values, standing
from rankgrad.reproduce.variants import compared
from rankgrad.training.config import Config, Loss, Model
from rankgrad.training.recipes import dasalc

STEPS = ("softmax", "symlog", "noise", "wider")  # each keeps what the ones before it added
ENSEMBLE, PLAIN_ENSEMBLE = "ensemble", "softmax-ensemble"

# The encoder and the noise that each recipe is widened to: DASALC's own, and a third of it for a few hundred lists.
WIDER: Mapping[str, Model] = {
    "paper": dasalc().model,
    "small": replace(dasalc().model, width=64, layers=2, feedforward=256, dropout=0.3, input_noise=0.5),
}


def added(step: str, recipe: str, config: Config) -> Config:
    """The recipe's configuration with the ingredients up to a step."""
    wider, count = WIDER[recipe], STEPS.index(step)
    config = replace(config, loss=Loss("softmax"))
    if count >= STEPS.index("symlog"):
        config = replace(config, data=replace(config.data, scaling="symlog"))
    if count >= STEPS.index("noise"):
        config = replace(config, model=replace(config.model, input_noise=wider.input_noise))
    if count >= STEPS.index("wider"):
        config = replace(config, model=wider)
    return config


def titles(recipe: str, seeds: int) -> dict[str, str]:
    """What each row of the table is called."""
    wider = WIDER[recipe]
    size = f"width {wider.width}, {wider.layers} layers, {wider.heads} heads, dropout {wider.dropout:g}"
    return {
        "softmax": f"recipe {recipe}, softmax loss",
        "symlog": "+ symmetric log",
        "noise": f"+ input noise {wider.input_noise:g}",
        "wider": f"+ wider ({size})",
        ENSEMBLE: f"+ ensemble of {seeds} seeds",
        PLAIN_ENSEMBLE: f"the first row, ensemble of {seeds} seeds",
    }


def judged(values: Values, recipe: str, seeds: int) -> dict[str, Any]:
    """Every row beside the one before it, and beside the first, each with Holm's p-values over its column."""
    named = titles(recipe, seeds)
    rows: dict[str, dict[str, Any]] = {
        name: {"title": title, "metrics": standing(values[name])} for name, title in named.items() if name in values
    }
    first, *later = rows
    before = dict(zip(later, (*rows,)))
    before[PLAIN_ENSEMBLE] = first
    steps = compared(values, [(name, before[name]) for name in later])
    wholes = compared(values, [(name, first) for name in later])
    for name, step, whole in zip(later, steps, wholes):
        rows[name] |= {"step": {"difference": step[0], "p": step[1]}, "whole": {"difference": whole[0], "p": whole[1]}}
    return {"rows": rows}
