"""Training on a GPU: the fast path against the plain one, per step and per epoch, in one run.

    python benchmarks/training.py [--shape web30k] [--epochs 3] [--precision bf16] [--loss neural_ndcg]

The paper's model and batch on made-up data of a public dataset's shape, validation at full length after every epoch. `plain` is
float32 in padded batches, step by step, not recorded (the data is on the GPU, the loss takes its kernels); `fast` is
what a run takes by itself, and is measured first. Times per step and epoch are medians over the epochs after the first; `first` is what the
first epoch took beyond that: compiling (nearly nothing where Triton's cache is filled), recording; `all` is every epoch together.

Nothing is printed if the metric after one epoch differs by more than 0.002 between the fast path and the fast path in float32,
which draws the same dropout, or by more than 0.01 between the fast and the plain path, which does not.
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time

import torch

from rankgrad.training.build import make_objectives, make_state
from rankgrad.training.config import Config, Data, Loss, Model, Train
from rankgrad.training.data import load_splits
from rankgrad.training.loop import Epoch, Step, train
from rankgrad.training.precision import threads_and_precision

AGREE, ROUGHLY = 0.002, 0.01
ISTELLA = Model(width=128), 110  # model and batch size
PAPER = {"istella": ISTELLA, "istella-full": ISTELLA}  # else those of Web30K
PLAIN = {"precision": "float32", "pack": False, "graph": False, "resident": True}


def measure(splits, config, epochs):
    """Seconds of steps and of whole epochs, metrics, peak memory."""
    device = torch.device("cuda")
    torch.manual_seed(config.train.seed)
    state = make_state(config, splits["train"], device)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=epochs))
    torch.cuda.reset_peak_memory_stats()
    steps, whole, metrics = [], [], []
    begin = time.perf_counter()
    with threads_and_precision(torch.get_num_threads(), config.train.precision):
        for event in train(state, make_objectives(config), splits["train"], splits["vali"], config, device):
            if isinstance(event, Step) and event.step == event.steps:
                torch.cuda.synchronize()
                steps.append((time.perf_counter() - begin) / event.steps)
            if isinstance(event, Epoch):
                whole.append(time.perf_counter() - begin)
                metrics.append(event.metric)
                begin = time.perf_counter()
    return steps, whole, metrics, torch.cuda.max_memory_allocated() / 2**20, state.plan


def row(name, measured, plain):
    steps, whole, metrics, memory, _ = measured
    step, epoch = statistics.median(steps[1:] or steps), statistics.median(whole[1:] or whole)
    ratio = f"{plain / epoch:.1f}" if plain else "1.0"
    print(
        f"| {name} | {1e3 * step:.3f} | {epoch:.3f} | {1 / step:,.0f} | {whole[0] - epoch:.1f} | {sum(whole):.1f} | "
        f"{memory:,.0f} | {metrics[0]:.4f} | {metrics[-1]:.4f} | {ratio} |",
        flush=True,
    )
    return epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", default="web30k", help="tiny, small, web30k, istella (lists as long as Istella-S's), istella-full"
    )
    parser.add_argument("--epochs", type=int, default=3, help="of the fast path; 100 is the paper's run")
    parser.add_argument("--precision", default="bf16", help="of the fast path: float32, tf32, bf16")
    parser.add_argument("--loss", default="neural_ndcg")
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

    fast = measure(splits, with_(precision=arguments.precision), arguments.epochs)
    twin = measure(splits, with_(precision="float32"), 2)
    plain = measure(splits, with_(**PLAIN), 2)
    after = [metrics[0] for _, _, metrics, _, _ in (plain, twin, fast)]
    if not (abs(after[2] - after[1]) <= AGREE and abs(after[2] - after[0]) <= ROUGHLY):
        sys.exit("after one epoch the metrics are " + ", ".join(f"{m:.4f}" for m in after) + "; nothing is printed")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, commit {commit or '?'}"
    )
    counts = splits["train"]
    print(
        f"{arguments.shape}: {len(counts):,} lists, {len(counts.labels):,} documents, {counts.features.shape[1]} features "
        f"({loading:.0f} s to make and scale); {arguments.loss}, batch {batch_size}, list size 240; {fast[4]}\n"
    )
    print(
        "| path | ms a step | s an epoch | steps/s | first s | all s | MiB | ndcg@10 after 1 | at the end | plain / this |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    before = row("plain float32", plain, None)
    row("fast float32", twin, before)
    row(f"fast {arguments.precision}, {arguments.epochs} epochs", fast, before)


if __name__ == "__main__":
    main()
