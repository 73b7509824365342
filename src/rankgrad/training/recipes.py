"""Recipes: functions that return a configuration to start from. Imports config alone.

`paper` is the model and schedule of the NeuralNDCG paper, `small` is for a few hundred lists, `dasalc` is the strongest
published neural ranker on tabular features, in the plain form this library has.
"""

from collections.abc import Callable, Mapping

from rankgrad.training.config import Config, Data, Loss, Model, Optimiser, Train


def paper() -> Config:
    """ArXiv 2102.07831: two encoder blocks of width 96, 100 epochs of Adam, lr / 10 after epoch 50."""
    return Config()


def small() -> Config:
    """A third of the paper's width, at most 30 epochs, small batches, stopped early by validation."""
    return Config(
        model=Model(width=32, feedforward=64),
        optimiser=Optimiser(schedule="constant"),
        train=Train(epochs=30, batch_size=16, patience=8),
    )


def dasalc() -> Config:
    """Qin et al. 2021, "Are Neural Rankers still Outperformed by Gradient Boosted Decision Trees?", as for Web30K.

    Their sizes: sign(x) log(1 + |x|), noise of deviation 1.5 on standardised inputs, 4 layers of attention with 2 heads of
    100, hidden layers of 512, dropout 0.4, softmax loss, batches of 128 lists of at most 200, 15,000 steps (100 epochs of
    Web30K). The differences: their attention modulates a second network beside it (a "latent cross", and batch norms
    inside), ours is one pre-norm encoder of that width; they normalise inputs by batch, we by the train split. Their last
    ingredient is an ensemble: train several seeds, and give all runs to `rankgrad evaluate` or `rank`.
    """
    return Config(
        data=Data(scaling="symlog", list_size=200),
        model=Model(width=200, layers=4, heads=2, feedforward=512, dropout=0.4, input_noise=1.5),
        loss=Loss("softmax"),
        optimiser=Optimiser(schedule="constant"),
        train=Train(epochs=100, batch_size=128),
    )


RECIPES: Mapping[str, Callable[[], Config]] = {"paper": paper, "small": small, "dasalc": dasalc}
