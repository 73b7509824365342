"""Training on a GPU: the fast path against the plain one, per step and per epoch, in one run.

    python benchmarks/training.py [--shape web30k] [--epochs 3] [--precision bf16] [--loss neural_ndcg]

The paper's model and batch on made-up data of a public dataset's shape, validation at full length after every epoch. `plain` is
float32 with every option of [train] off: padded batches, eager torch. Times per step and epoch are medians over the epochs after
the first; `first` is what the first epoch took beyond that: compiling, recording; `all` is every epoch together. Nothing is
printed if the metric after one epoch differs by more than 0.002 between the two (means over --seeds runs).
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time

import torch

from rankgrad.config import Config, Data, Loss, Model, Train
from rankgrad.numerics import threads_and_precision
from rankgrad.resolve import make_model, make_objective
from rankgrad.splits import load_splits
from rankgrad.train import Epoch, Learner, Step, make_optimiser, train

AGREE = 0.002
PAPER = {"istella": (Model(width=128), 110)}  # model and batch size; else those of Web30K
PLAIN = {"precision": "float32", "pack": False, "compile": False, "graph": False, "resident": True}


def measure(splits, config, epochs):
    """Seconds of steps and of whole epochs, metrics, peak memory."""
    device = torch.device("cuda")
    torch.manual_seed(config.train.seed)
    model = make_model(config.model, splits["train"].features.shape[1], 1, config.loss.name).to(device)
    learner = Learner(model, make_optimiser(model, config.optimiser))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=epochs))
    torch.cuda.reset_peak_memory_stats()
    steps, whole, metrics = [], [], []
    begin = time.perf_counter()
    with threads_and_precision(torch.get_num_threads(), config.train.precision):
        for event in train(learner, make_objective(config), splits["train"], splits["vali"], config, device):
            if isinstance(event, Step) and event.step == event.steps:
                torch.cuda.synchronize()
                steps.append((time.perf_counter() - begin) / event.steps)
            if isinstance(event, Epoch):
                whole.append(time.perf_counter() - begin)
                metrics.append(event.metric)
                begin = time.perf_counter()
    return steps, whole, metrics, torch.cuda.max_memory_allocated() / 2**20, learner.path


def row(name, steps, whole, metric, memory, plain):
    later = slice(1, None) if len(steps) > 1 else slice(None)
    step, epoch = statistics.median(steps[later]), statistics.median(whole[later])
    ratio = f"{plain / epoch:.1f}" if plain else "1.0"
    print(
        f"| {name} | {1e3 * step:.3f} | {epoch:.3f} | {1 / step:,.0f} | {whole[0] - epoch:.1f} | {sum(whole):.1f} | "
        f"{memory:,.0f} | {metric:.4f} | {ratio} |",
        flush=True,
    )
    return epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="web30k", help="tiny, small, web30k, istella")
    parser.add_argument("--epochs", type=int, default=3, help="of the fast path; 100 is the paper's run")
    parser.add_argument("--plain-epochs", type=int, default=2)
    parser.add_argument("--precision", default="bf16", help="of the fast path: float32, tf32, bf16")
    parser.add_argument("--loss", default="neural_ndcg")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/training.py needs a CUDA device")
    import triton

    begin = time.perf_counter()
    model, batch_size = PAPER.get(arguments.shape, (Model(), 64))
    config = Config(Data(path=f"synthetic:{arguments.shape}"), model, Loss(arguments.loss))
    splits, _, _ = load_splits(config)
    loading = time.perf_counter() - begin

    def with_(**changes):
        return dataclasses.replace(config, train=dataclasses.replace(Train(batch_size=batch_size), **changes))

    fast = {"precision": arguments.precision, "compile": True}
    plain_runs = [
        measure(splits, with_(seed=seed, **PLAIN), arguments.plain_epochs if seed == 0 else 1)
        for seed in range(arguments.seeds)
    ]
    fast_runs = [
        measure(splits, with_(seed=seed, **fast), arguments.epochs if seed == 0 else 1)
        for seed in range(arguments.seeds)
    ]
    metrics = [statistics.mean(run[2][0] for run in runs) for runs in (plain_runs, fast_runs)]
    if not abs(metrics[0] - metrics[1]) <= AGREE:
        sys.exit(f"the metric after one epoch is {metrics[0]:.4f} and {metrics[1]:.4f}; nothing is printed")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, commit {commit or '?'}"
    )
    counts = splits["train"]
    print(
        f"{arguments.shape}: {len(counts):,} lists, {len(counts.labels):,} documents, {counts.features.shape[1]} features "
        f"({loading:.0f} s to make and scale); {arguments.loss}, batch {batch_size}, list size 240; path {fast_runs[0][4]}\n"
    )
    print("| path | ms a step | s an epoch | steps/s | first s | all s | MiB | ndcg@10 after 1 | plain / this |")
    print("|---|---|---|---|---|---|---|---|---|")
    plain = row("plain float32", *plain_runs[0][:2], metrics[0], plain_runs[0][3], None)
    row(f"fast {arguments.precision}, {arguments.epochs} epochs", *fast_runs[0][:2], metrics[1], fast_runs[0][3], plain)


if __name__ == "__main__":
    main()
