"""A training step on the CPU, NeuralNDCG by torch and by numba's kernel: the paper's model, and the strong recipe's members.

    python benchmarks/cpu_training.py [--threads 2] [--steps 12] [--data FOLDER]

Made-up lists of Web30K's shape for the paper's model (64 lists a step); FOLDER's train split for the members (MQ2008's Fold1, say), else
made-up lists of its size. Both paths run in turn, in one process; medians over the steps after the first two.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from members import small_lists

from rankgrad import jit
from rankgrad.data import fit_scaling, read_splits, synthetic
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES, Config, Loss, Train, replaced
from rankgrad.training.data import scaled
from rankgrad.training.loop import Step, train

DEVICE = torch.device("cpu")


def step_times(config, splits, steps, compiled):
    """Milliseconds of CPU and on the wall for each step, by numba's kernel if `compiled`."""
    before, jit.COMPILED = jit.COMPILED, compiled
    try:
        config = fit_to_data(config, splits["train"], DEVICE, validated=True)
        events = train(
            make_state(config, splits["train"], DEVICE), make_objectives(config), splits["train"], splits["vali"], config, DEVICE
        )  # fmt: skip
        cpu, wall = [], []
        mark = time.process_time(), time.perf_counter()
        for event in events:
            if isinstance(event, Step):
                cpu.append(1e3 * (time.process_time() - mark[0]))
                wall.append(1e3 * (time.perf_counter() - mark[1]))
            if len(cpu) == steps:
                break
            mark = time.process_time(), time.perf_counter()
        events.close()
    finally:
        jit.COMPILED = before
    return statistics.median(cpu[2:]), statistics.median(wall[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--data")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    web30k = synthetic("web30k", "train").select(np.arange(64 * (given.steps + 2)))
    raw = read_splits(given.data) if given.data else {"train": small_lists(470, 1), "vali": small_lists(157, 2)}
    quantiles = fit_scaling(raw["train"], "quantile_auto")
    members = {name: scaled(raw[name], quantiles) for name in ("train", "vali")}
    plain = scaled(web30k, fit_scaling(web30k, "auto"))
    strong = replaced(RECIPES["strong"](), "train.device", "cpu")
    cases = {
        "the paper's model": (
            Config(loss=Loss("neural_ndcg"), train=Train(device="cpu")),
            {"train": plain, "vali": plain.select([0])},
        ),
        "members": (strong, members),
        "members, all by NeuralNDCG": (replaced(strong, "loss.name", "neural_ndcg@10"), members),
    }
    print(
        f"{given.threads} threads\n\n| step of | path | CPU ms | wall ms | torch / this, CPU | wall |\n|---|---|---|---|---|---|"
    )
    for name, (config, splits) in cases.items():
        times = {path: step_times(config, splits, given.steps, path == "numba") for path in ("torch", "numba")}
        for path, (cpu, wall) in times.items():
            ratios = f"{times['torch'][0] / cpu:.2f} | {times['torch'][1] / wall:.2f}"
            print(f"| {name} | {path} | {cpu:.1f} | {wall:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
