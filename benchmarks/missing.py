"""How well the default recipe ranks where LightGBM is at home: by what is missing, and by a category of 200 levels.

    python benchmarks/missing.py            # minutes
    python benchmarks/missing.py --quick    # fewer members and epochs

Made-up lists, the same for both: trained on 300 queries, stopped by 100, measured on 200. LightGBM gets NaN and the dtype `category`.
"""

import argparse

import lightgbm
import numpy as np
import pandas as pd
import torch

from rankgrad import NeuralRanker
from rankgrad.metrics import ndcg

DOCUMENTS, LEVELS = 10, 200
EFFECT = np.random.default_rng(9).standard_normal(LEVELS)


def missing(queries: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Labels are which of the first two of eight features are missing."""
    rng = np.random.default_rng(seed)
    gone = rng.random((DOCUMENTS * queries, 8)) < 0.4
    x = np.where(gone, np.nan, rng.standard_normal(gone.shape))
    return pd.DataFrame(x, columns=[f"f{i}" for i in range(8)]), 2 * gone[:, 0] + gone[:, 1]


def category(queries: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Labels follow the effect of a level, a little of a number, and noise."""
    rng = np.random.default_rng(seed)
    level, x = rng.integers(0, LEVELS, DOCUMENTS * queries), rng.standard_normal((DOCUMENTS * queries, 3))
    score = EFFECT[level] + 0.3 * x[:, 0] + 0.5 * rng.standard_normal(len(level))
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame["brand"] = pd.Categorical([f"b{i}" for i in level], [f"b{i}" for i in range(LEVELS)])
    return frame, np.digitize(score, [0.3, 1.0, 1.6, 2.2])


def measured(scores: np.ndarray, labels: np.ndarray) -> float:
    """NDCG@10, the mean over queries."""
    lists = (torch.from_numpy(np.asarray(values)).view(-1, DOCUMENTS) for values in (scores, labels))
    return float(ndcg(*lists, k=10).mean())


def main() -> None:
    """A line for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    how = {"members": 4, "epochs": 20, "hidden": (32, 32)} if parser.parse_args().quick else {}
    for make in (missing, category):
        (frame, y), (vali, vali_y), (test, test_y) = make(300, 0), make(100, 1), make(200, 2)
        qid, vali_qid, test_qid = (
            np.repeat(np.arange(len(part) // DOCUMENTS), DOCUMENTS) for part in (frame, vali, test)
        )
        trees = lightgbm.LGBMRanker(n_estimators=500, learning_rate=0.05, verbose=-1)
        trees.fit(
            frame,
            y,
            group=[DOCUMENTS] * 300,
            eval_X=vali,
            eval_y=vali_y,
            eval_group=[[DOCUMENTS] * 100],
            callbacks=[lightgbm.early_stopping(50, verbose=False)],
        )
        ranker = NeuralRanker(random_state=0, **how).fit(frame, y, qid=qid, eval_set=(vali, vali_y, vali_qid))
        ours, theirs = measured(ranker.predict(test, qid=test_qid), test_y), measured(trees.predict(test), test_y)
        print(f"{make.__name__:<10} NDCG@10 NeuralRanker {ours:.4f}, LightGBM {theirs:.4f}", flush=True)


if __name__ == "__main__":
    main()
