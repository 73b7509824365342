"""LightGBM with our losses as its objective beside its own lambdarank: MQ2008, five folds, chosen on validation alone.

    python reproduce/tree_objectives.py --data FOLDER [--losses neural_ndcg neural_ndcg@10 query_rmse] [--seeds 3] [--threads 1]

Every objective is fitted with the same four settings per fold, with early stopping; the best by validation NDCG@10 is measured on the
test part. Queries without a relevant document count 0. Values are means over seeds, which draw rows and columns for each tree; the
comparison with lambdarank is paired over queries.
"""

import argparse
import time

import numpy as np
import torch

from rankgrad.data.load import read_splits
from rankgrad.runs.significance import compare
from rankgrad.runs.text import table
from rankgrad.training.evaluate import mean, measure
from rankgrad.trees.fit import PATIENCE, fit_trees
from rankgrad.trees.settings import ROUNDS, Boosting, TreeConfig, grid

METRIC = "ndcg@10"


def fit_folds(data: str, loss: str | None, seed: int, threads: int) -> tuple[float, np.ndarray, float]:
    """The mean validation metric of what was chosen, test metrics of all queries, seconds; without a loss: LightGBM's lambdarank."""
    how = Boosting(
        "lightgbm",
        loss or "lambdarank",
        seed=seed,
        threads=threads,
        rounds=ROUNDS[False],
        patience=PATIENCE,
        own=bool(loss),
    )
    settings = grid(TreeConfig("lightgbm", data, 1, seed, threads, large=False, tuned=True, metrics=(METRIC,)))
    started, chosen, test = time.perf_counter(), [], []
    for fold in range(1, 6):
        splits = read_splits(data, fold=fold)
        fitted = [fit_trees(how, choice, splits["train"], splits["vali"]) for choice in settings]
        values = [mean(measure(trees.score(splits["vali"]), splits["vali"], [METRIC])[METRIC], 0.0) for trees in fitted]
        best = int(np.argmax(values))
        chosen.append(values[best])
        test.append(measure(fitted[best].score(splits["test"]), splits["test"], [METRIC])[METRIC])
    return float(np.mean(chosen)), np.nan_to_num(np.concatenate(test)), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--losses", nargs="+", default=["neural_ndcg", "neural_ndcg@10", "query_rmse"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [("objective", "validation", METRIC, "of each seed", "against lambdarank", "seconds")]
    own = None
    for loss in (None, *options.losses):
        seeds = [fit_folds(options.data, loss, seed, options.threads) for seed in range(options.seeds)]
        values = np.mean([test for _, test, _ in seeds], axis=0)
        own = values if own is None else own
        c = compare(values, own)
        rows.append(
            (
                loss or "LightGBM's lambdarank",
                f"{np.mean([validation for validation, _, _ in seeds]):.4f}",
                f"{values.mean():.4f}",
                " ".join(f"{test.mean():.4f}" for _, test, _ in seeds),
                f"{c.difference:+.4f} [{c.low:+.4f}, {c.high:+.4f}], p = {c.p_value:.3f}" if loss else "",
                f"{sum(seconds for _, _, seconds in seeds):.0f}",
            )
        )
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
