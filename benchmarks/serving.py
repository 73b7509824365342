"""Latency of one query: the strong ranker in Python and as ONNX, a distilled network as ONNX, LightGBM's predict, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/serving.py [--calls 2000] [--documents 100] [--features 136]

Milliseconds of one call, p50 and p99, each ranker in turn within every round, so that whatever else the machine does meets all of them; the last
column is the ratio of medians to LightGBM's. Weights are drawn, not trained: they do not change what is computed. `strong`: 16 kept members, quantile
inputs, as the recipe has them. `distilled`: mlp:64,32 on automatic scaling, as `rankgrad distil` makes it. LightGBM: 500 trees of 31 leaves. The
`predict` of both estimators, NeuralRanker's and LGBMRanker's, checks its arguments as scikit-learn's do.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rankgrad import NeuralRanker
from rankgrad.data import RankingDataset, fit_scaling
from rankgrad.export import export_ranker
from rankgrad.export.onnx import session
from rankgrad.ranker import Ranker
from rankgrad.runs.distil import student_config
from rankgrad.training.build import make_averaged, make_scorer
from rankgrad.training.config import RECIPES, replaced

CPU = torch.device("cpu")


def lists(features, queries=300, seed=0):
    """Counts with heavy tails, signed numbers and shares, as text features are; labels that depend on some of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(50, 150, queries)
    x = rng.normal(size=(lengths.sum(), features))
    x[:, ::3] = np.floor(np.exp(1.5 * x[:, ::3]))
    x[:, 1::3] = 1 / (1 + np.exp(-x[:, 1::3]))
    labels = np.clip((x[:, 1] + x[:, 4] - x[:, 2] * 0.3 + rng.normal(0, 0.3, len(x))) * 2 - 1, 0, 4).round()
    return RankingDataset(x.astype(np.float32), labels, np.concatenate([[0], np.cumsum(lengths)]), np.arange(queries))


def lightgbm_scores(data):
    import lightgbm

    settings = {"objective": "lambdarank", "num_leaves": 31, "min_data_in_leaf": 5, "num_threads": 1, "verbosity": -1}
    fitted = lightgbm.Dataset(data.features, data.labels, group=data.lengths)
    booster = lightgbm.train(settings, fitted, 500)
    leaves = np.mean([tree["num_leaves"] for tree in booster.dump_model()["tree_info"]])
    print(f"LightGBM: {booster.num_trees()} trees of {leaves:.1f} leaves")
    return lambda rows: booster.predict(rows, num_threads=1)


def predictions(data, documents):
    """How the two estimators predict, by name."""
    import lightgbm

    theirs = lightgbm.LGBMRanker(n_estimators=500, num_leaves=31, min_child_samples=5, n_jobs=1, verbose=-1)
    theirs.fit(data.features, data.labels, group=data.lengths)
    ours = NeuralRanker(members=16, scaling="quantile", epochs=1, n_jobs=1, random_state=0, verbose=0)
    ours.fit(data.features, data.labels, group=data.lengths)
    group = [documents]
    return {"LGBMRanker.predict": theirs.predict, "NeuralRanker.predict": lambda rows: ours.predict(rows, group=group)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--features", type=int, default=136)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = lists(given.features)
    recipe = replaced(RECIPES["strong"](), "model.inputs", "pieces")
    scaling = fit_scaling(data, "quantile")
    strong = Ranker.of(make_averaged(recipe, scaling.inputs, 16), scaling, recipe, data, CPU)
    config = student_config(dataclasses.replace(recipe), "data", "mlp:64,32", {}, ())
    scaling = fit_scaling(data, config.data.scaling)
    student = Ranker.of(make_scorer(config, scaling.inputs, 1, tanh=False), scaling, config, data, CPU)
    rows, sizes = np.ascontiguousarray(data.features[: given.documents]), np.array([given.documents])
    scorers = {"LightGBM, 500 trees x 31 leaves": lightgbm_scores(data)}
    with tempfile.TemporaryDirectory() as folder:
        for name, ranker in (("strong, 16 members", strong), ("distilled, mlp:64,32", student)):
            file = Path(folder) / "ranker.onnx"
            written = export_ranker(ranker, file, overwrite=True)
            print(f"{name}: ONNX of {written['bytes'] / 2**20:.1f} MB, agrees to {written['checked']['largest']:.0e}")
            run = session(file).run
            scorers[f"{name}, Ranker.score"] = ranker.score
            scorers[f"{name}, ONNX"] = lambda rows, run=run: run(None, {"features": rows, "sizes": sizes})
    scorers |= predictions(data, given.documents)
    taken = {name: [] for name in scorers}
    for number in range(given.calls + 50):
        for name, score in scorers.items():
            begin = time.perf_counter()
            score(rows)
            if number >= 50:  # warm
                taken[name].append(time.perf_counter() - begin)
    base = np.median(taken["LightGBM, 500 trees x 31 leaves"])
    print(f"\n{given.documents} documents x {given.features} features, {given.calls} calls, one thread")
    print(f"{'':36}{'p50 ms':>9}{'p99 ms':>9}{'of LightGBM':>13}")
    for name, seconds in taken.items():
        p50, p99 = 1e3 * np.percentile(seconds, [50, 99])
        print(f"{name:36}{p50:9.3f}{p99:9.3f}{np.median(seconds) / base:13.2f}")


if __name__ == "__main__":
    main()
