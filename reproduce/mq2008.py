"""NeuralNDCG, LambdaRank and ListNet beside LightGBM's lambdarank on MQ2008, five folds, tuned on validation alone.

    python reproduce/mq2008.py tune --data FOLDER --out FOLDER [--jobs 2] [--rankers neural_ndcg lambdarank listnet lightgbm]
    python reproduce/mq2008.py table --data FOLDER --out FOLDER

`tune` fits the same number of randomly drawn configurations for every ranker and fold and keeps their validation metric
and their scores of the test documents; it never computes a test metric. What is done already is skipped. `table` picks by
validation within each fold (`vali`: mean ndcg@10 of the single best there), and only then looks at the test parts, once: the
single best configuration, and the mean of the standardised scores of the best five (of each loss, for the three losses
together). Queries without a relevant document count 0.
"""

import argparse
import dataclasses
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.data.scaling import fit_scaling
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.runs.run import Run, train_run
from rankgrad.runs.significance import compare
from rankgrad.training.config import Config, Data, Loss, Model, Optimiser, Train
from rankgrad.training.data import scaled
from rankgrad.training.evaluate import mean, measure

RANKERS = ("neural_ndcg", "lambdarank", "listnet", "lightgbm")
BUDGET = 24  # configurations per ranker and fold
BEST = 5
METRICS = ("ndcg@5", "ndcg@10", "map")


def draw_config(ranker: str, index: int) -> Config:
    """Configuration number `index` of a ranker: the same for every fold."""
    rng = np.random.default_rng([RANKERS.index(ranker), index])

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    kind = pick("mlp", "mlp", "transformer")
    width = pick(32, 64)
    model = Model(
        kind=kind,
        hidden=pick((32,), (64,), (64, 32), (128, 64)),
        width=width,
        feedforward=2 * width,
        layers=pick(1, 2),
        dropout=pick(0.1, 0.2, 0.3, 0.5),
    )
    options, name = {}, ranker
    if ranker == "neural_ndcg":
        options = {"tau": pick(0.1, 0.3, 1.0)}
    if ranker != "listnet":
        name = ranker + pick("", "@10")
    optimiser = Optimiser(
        name="adamw", lr=pick(3e-4, 1e-3, 3e-3), weight_decay=pick(1e-3, 1e-2, 1e-1), schedule="constant", clip=1.0
    )
    return Config(
        data=Data(scaling=pick("standard", "quantile", "auto")),
        model=model,
        loss=Loss(name, options),
        optimiser=optimiser,
        train=Train(epochs=60, patience=15, batch_size=pick(16, 32, 64), seed=index, threads=1, device="cpu"),
    )


def fit_neural(config: Config, data: str, fold: int, splits: dict[str, RankingDataset]) -> tuple[float, np.ndarray]:
    """Validation metric of the best epoch, and its scores of the test documents."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data, fold=fold))
    scaling = fit_scaling(splits["train"], config.data.scaling)
    seen = {name: scaled(splits[name], scaling) for name in ("train", "vali")}  # the run never sees the test part
    with tempfile.TemporaryDirectory() as folder:
        for _ in train_run(Path(folder), config, read=lambda *_: (seen, scaling, "")):
            pass
        run = Run.open(Path(folder), "cpu")
    return mean_ndcg(run.score(splits["vali"]), splits["vali"]), run.score(splits["test"])


def fit_lightgbm(index: int, splits: dict[str, RankingDataset]) -> tuple[float, np.ndarray]:
    """The same for LightGBM's lambdarank, its usual parameters drawn at random."""
    import lightgbm

    rng = np.random.default_rng([len(RANKERS), index])
    parameters = {
        "objective": "lambdarank",
        "metric": "ndcg",
        "eval_at": [10],
        "learning_rate": float(rng.choice([0.02, 0.05, 0.1])),
        "num_leaves": int(rng.choice([7, 15, 31])),
        "min_data_in_leaf": int(rng.choice([10, 20, 50, 100])),
        "feature_fraction": float(rng.choice([0.5, 0.8, 1.0])),
        "bagging_fraction": float(rng.choice([0.7, 1.0])),
        "bagging_freq": 1,
        "lambda_l2": float(rng.choice([0.0, 1.0, 10.0])),
        "lambdarank_truncation_level": int(rng.choice([10, 30])),
        "num_threads": 1,
        "verbosity": -1,
        "seed": index,
    }
    sets = {k: lightgbm.Dataset(v.features, v.labels, group=v.lengths) for k, v in splits.items() if k != "test"}
    booster = lightgbm.train(
        parameters,
        sets["train"],
        num_boost_round=600,
        valid_sets=[sets["vali"]],
        callbacks=[lightgbm.early_stopping(50, verbose=False)],
    )
    vali, test = (booster.predict(splits[k].features).astype(np.float32) for k in ("vali", "test"))
    return mean_ndcg(vali, splits["vali"]), test


def mean_ndcg(scores: np.ndarray, data: RankingDataset) -> float:
    return mean(measure(scores, data, ["ndcg@10"])["ndcg@10"], 0.0)


def fit(data: str, out: str, ranker: str, fold: int, index: int) -> str:
    """One fit, kept in a file of its own."""
    torch.set_num_threads(1)
    splits = read_splits(data, fold=fold)
    if ranker == "lightgbm":
        vali, test = fit_lightgbm(index, splits)
    else:
        vali, test = fit_neural(draw_config(ranker, index), data, fold, splits)
    path = place(Path(out), ranker, fold, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, vali=vali, test=test)
    partial.replace(path)
    return f"{ranker} fold {fold} #{index}: validation {vali:.4f}"


def place(out: Path, ranker: str, fold: int, index: int) -> Path:
    return out / f"{ranker}-fold{fold}" / f"{index}.npz"


def tune(options: argparse.Namespace) -> None:
    wanted = [(ranker, fold, index) for index in range(BUDGET) for ranker in options.rankers for fold in range(1, 6)]
    left = [job for job in wanted if not place(Path(options.out), *job).exists()]
    print(f"{len(wanted)} fits, {len(left)} to do")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(fit, options.data, options.out, *job) for job in left]
        for done, job in enumerate(as_completed(jobs), start=1):
            print(f"{done}/{len(left)} {job.result()}", flush=True)


def table(options: argparse.Namespace) -> None:
    results, chosen, validation = {}, {}, {}
    together = {fold: [] for fold in range(1, 6)}
    for ranker in RANKERS:
        folds = {"best": [], f"mean of {BEST}": []}
        for fold in range(1, 6):
            test = read_splits(options.data, fold=fold)["test"]
            fits = [np.load(place(Path(options.out), ranker, fold, i)) for i in range(BUDGET)]
            order = np.argsort([-float(f["vali"]) for f in fits], kind="stable")
            chosen[ranker, fold] = int(order[0])
            validation.setdefault(ranker, []).append(float(fits[order[0]]["vali"]))
            best = fits[order[0]]["test"].astype(np.float64)
            several = mean_of_standardised([fits[i]["test"] for i in order[:BEST]], test.offsets)
            if ranker != "lightgbm":
                together[fold].append(several)
            for rule, scores in zip(folds, (best, several)):
                folds[rule].append(measure(scores.astype(np.float32), test, METRICS))
        for rule, values in folds.items():
            results[ranker, rule] = {m: np.nan_to_num(np.concatenate([v[m] for v in values])) for m in METRICS}
    tests = {fold: read_splits(options.data, fold=fold)["test"] for fold in together}
    pooled = [measure(np.mean(together[fold], axis=0).astype(np.float32), tests[fold], METRICS) for fold in together]
    results["three losses", f"mean of {BEST}"] = {
        m: np.nan_to_num(np.concatenate([v[m] for v in pooled])) for m in METRICS
    }
    validation["three losses"] = [np.nan]
    print(
        f"{'ranker':14} {'chosen':10} {'vali':>8} "
        + " ".join(f"{m:>8}" for m in METRICS)
        + "   against LightGBM, same rule (ndcg@10)"
    )
    for (ranker, rule), values in results.items():
        means = " ".join(f"{values[m].mean():8.4f}" for m in METRICS)
        against = ""
        if ranker != "lightgbm":
            c = compare(values["ndcg@10"], results["lightgbm", rule]["ndcg@10"])
            against = f"   {c.difference:+.4f} [{c.low:+.4f}, {c.high:+.4f}], p = {c.p_value:.3f}"
        print(f"{ranker:14} {rule:10} {np.mean(validation[ranker]):8.4f} {means}{against}")
    for ranker in RANKERS[:-1]:
        for fold in range(1, 6):
            config = draw_config(ranker, chosen[ranker, fold])
            model, opt = config.model, config.optimiser
            size = model.hidden if model.kind == "mlp" else (model.width, model.layers)
            print(
                f"{config.loss.name} fold {fold}: {model.kind} {size}, dropout {model.dropout}, {config.data.scaling}, "
                f"lr {opt.lr:g}, decay {opt.weight_decay:g}, batch {config.train.batch_size} {json.dumps(dict(config.loss.options))}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("tune", "table"))
    parser.add_argument("--data", required=True, help="folder with S1.txt.gz ... S5.txt.gz")
    parser.add_argument("--out", required=True, help="folder for the fits")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rankers", nargs="+", choices=RANKERS, default=list(RANKERS))
    options = parser.parse_args()
    {"tune": tune, "table": table}[options.action](options)


if __name__ == "__main__":
    main()
