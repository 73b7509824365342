"""What a distilled network keeps of the gain of networks and trees together, on MQ2008.

    python reproduce/distil_mq2008.py FOLDER [--folds 1 2 3 4 5] [--out runs/distil] [--seed 0]

FOLDER holds S1.txt.gz to S5.txt.gz, the five official parts. For each fold the strong recipe and LightGBM (24 settings, the best five averaged) are
trained as `rankgrad train` does, then both together are distilled into mlp:64,32 and into XGBoost's trees. Test queries of all folds are joined:
NDCG@10 with empty queries counted 0, and paired differences with 95 % intervals. What is there already is not trained again.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

from rankgrad.runs.distil import distil
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.folder import is_finished
from rankgrad.runs.run import train_run
from rankgrad.runs.significance import compare
from rankgrad.runs.trees import grow_run
from rankgrad.training.config import configure

TREES = {"model.kind": "lightgbm", "loss.name": "native", "train.epochs": 1_000, "train.patience": 50, "members.bag": 1}
STUDENTS = {"distilled, mlp:64,32": "mlp:64,32", "distilled, xgboost": "xgboost"}


def write_fold(parts, fold, folder):
    """Train on three parts, validate on the next, test on the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, offsets in (("train", (0, 1, 2)), ("vali", (3,)), ("test", (4,))):
        numbers = [(fold - 1 + offset) % 5 + 1 for offset in offsets]
        text = "".join(
            gzip.decompress((parts / f"S{number}.txt.gz").read_bytes()).decode("latin-1") for number in numbers
        )
        (folder / f"{split}.txt").write_text(text)
    return str(folder)


def scores_of_fold(parts, fold, out, seed):
    """NDCG@10 of the test queries, NaN where empty, by ranker."""
    data, place = write_fold(parts, fold, out / f"data{fold}"), out / f"fold{fold}"
    strong, trees = place / "strong", place / "trees"
    if not is_finished(strong):
        [*train_run(strong, configure(data, {"train.seed": seed}, []))]
    if not is_finished(trees):
        options = {**TREES, "members.count": 24, "members.keep": 5, "train.seed": seed}
        [*grow_run(trees, configure(data, options, []))]
    found = {}
    for name, folders in {"strong": [strong], "trees": [trees], "together": [strong, trees]}.items():
        ranker = Ensemble.open(folders)
        found[name] = ranker.evaluate(ranker.read(data), ("ndcg@10",))["ndcg@10"]
    for name, into in STUDENTS.items():
        folder = place / into.partition(":")[0]
        if not is_finished(folder):
            *_, last = distil([strong, trees], data, into, folder, given={"train.seed": seed})
            print(f"fold {fold}, {name}: {last.report['distilled']['times_faster']:.1f} times faster", flush=True)
        ranker = Ensemble.open([folder])
        found[name] = ranker.evaluate(ranker.read(data), ("ndcg@10",))["ndcg@10"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("--folds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=Path("runs/distil"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folds = [scores_of_fold(given.parts, fold, given.out, given.seed) for fold in given.folds]
    values = {name: np.nan_to_num(np.concatenate([fold[name] for fold in folds])) for name in folds[0]}
    for name, of_queries in values.items():
        against = compare(of_queries, values["together"])
        print(
            f"{name:24}{of_queries.mean():.4f}   - together {against.difference:+.4f} [{against.low:+.4f}, {against.high:+.4f}]"
        )
    for base in ("strong", "trees"):
        for name in ("together", *STUDENTS):
            gain = compare(values[name], values[base])
            print(
                f"{name} - {base} alone: {gain.difference:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}], p = {gain.p_value:.3g}"
            )


if __name__ == "__main__":
    main()
