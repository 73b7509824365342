"""Members trained at once: how long many take against one, and on data of Web30K's shape.

    python benchmarks/members.py [--data FOLDER] [--large] [--lightgbm]

FOLDER holds ranking data with a train and a validation split (MQ2008's Fold1, say); made-up data of MQ2008's size without it. `one` is
one member through the same code. Times are after a first epoch, which compiles and records. --large: 32 members, 20 epochs of
NeuralNDCG@10 on data of Web30K's shape, batches of 64 lists (needs a GPU). --lightgbm: 24 configurations of LightGBM beside it.
"""

import argparse
import time

import numpy as np
import torch

from rankgrad.data import RankingDataset, fit_scaling, read_splits, synthetic
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES, Config, Loss, Members, Model, Optimiser, Train, replaced
from rankgrad.training.data import scaled
from rankgrad.training.loop import Epoch, train


def timed(config, splits, device):
    """Seconds of all epochs after the first, scaled to all of them, and the first's extra; peak memory in MiB."""
    config = fit_to_data(config, splits["train"], device, validated=True)
    state = make_state(config, splits["train"], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [time.perf_counter()]
    for event in train(state, make_objectives(config), splits["train"], splits["vali"], config, device):
        if isinstance(event, Epoch):
            if device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
    later = (marks[-1] - marks[1]) / max(1, len(marks) - 2)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
    return later * config.train.epochs, marks[1] - marks[0] - later, memory, config, state


def small_lists(queries, seed):
    """As many short lists as MQ2008's: 46 columns in [0, 1], labels 0 to 2."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(2.3, 0.9, queries).astype(int), 5, 121)
    features = draw.random((lengths.sum(), 46)).astype(np.float32)
    labels = np.clip(
        (features[:, 0] + features[:, 1] * features[:, 2] + draw.normal(0, 0.4, len(features))) * 2 - 1, 0, 2
    )
    return RankingDataset(
        features, labels.round(), np.concatenate([[0], np.cumsum(lengths)]), np.arange(queries) + 10_000 * seed
    )


def lightgbm_time(splits, configurations=24):
    import lightgbm

    draw = np.random.default_rng(0)
    begin = time.perf_counter()
    for _ in range(configurations):
        settings = {
            "objective": "lambdarank",
            "eval_at": [10],
            "verbosity": -1,
            "learning_rate": 10 ** draw.uniform(-2, -0.7),
            "num_leaves": int(draw.choice([4, 7, 15, 31, 63])),
            "min_data_in_leaf": int(draw.choice([5, 20, 50, 100])),
        }
        lists = {name: (part.features, part.labels) for name, part in splits.items()}
        fitted = lightgbm.Dataset(*lists["train"], group=splits["train"].lengths)
        judge = fitted.create_valid(*lists["vali"], group=splits["vali"].lengths)
        lightgbm.train(
            settings, fitted, 500, valid_sets=[judge], callbacks=[lightgbm.early_stopping(50, verbose=False)]
        )
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--lightgbm", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = read_splits(given.data) if given.data else {"train": small_lists(470, 1), "vali": small_lists(157, 2)}
    scaling = fit_scaling(raw["train"], "quantile_auto")
    splits = {name: scaled(raw[name], scaling) for name in ("train", "vali")}
    config = replaced(RECIPES["strong"](), "train.device", str(device))
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU, ' + str(torch.get_num_threads()) + ' threads'}"
    )
    print(
        f"{len(splits['train'])} train queries, {len(splits['train'].labels)} documents, {splits['train'].features.shape[1]} features"
    )
    whole, first, memory, made, _ = timed(config, splits, device)
    alone, *_ = timed(replaced(replaced(config, "members.count", 2), "members.keep", 1), splits, device)
    epochs = made.train.epochs
    print(
        f"{made.members.count} members x {epochs} epochs  {whole:6.2f} s  (first epoch {first:+.2f} s, {memory:.0f} MiB)"
    )
    print(f" 2 members x {epochs} epochs  {alone:6.2f} s  ratio {whole / alone:.2f}")
    if given.lightgbm:
        print(f"LightGBM, 24 configurations  {lightgbm_time(raw):6.1f} s on the CPU")
    if given.large:
        parts = {name: synthetic("web30k", name) for name in ("train", "vali")}
        scaling = fit_scaling(parts["train"], "auto")
        parts = {name: scaled(part, scaling) for name, part in parts.items()}
        parts["vali"] = parts["vali"].select(np.arange(1_000))
        config = Config(
            model=Model(kind="mlp", hidden=(128, 128), inputs="list"),
            loss=Loss("neural_ndcg@10"),
            optimiser=Optimiser(name="adamw", schedule="cosine", warmup_epochs=2),
            members=Members(count=32, keep=16),
            train=Train(epochs=20, batch_size=64, device=str(device), precision="bf16"),
        )
        whole, first, memory, _, state = timed(config, parts, device)
        print(
            f"Web30K's shape, 32 members x 20 epochs of NeuralNDCG@10  {whole:.1f} s  (first epoch {first:+.1f} s, {memory:.0f} MiB)"
        )
        print(f"  validation of the members {state.values[:, -1].mean():.4f}; {state.plan._asdict()}")


if __name__ == "__main__":
    main()
