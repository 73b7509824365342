"""NeuralNDCG on long lists: forward+backward time, memory and accuracy of the Triton kernels on a GPU.

    python benchmarks/long_lists.py [--without-flat]

Times are medians: `graph` is a captured CUDA graph replayed back to back, `eager` a call from Python until the device is done.
Memory is the peak beyond the inputs. 30 rounds without early stop, tau 1. Spread scores are tanh of normal numbers, so that each
row sees a window; flat scores are all equal and have none: the cost is dense. Gradients are compared with the float64 textbook (up
to 4,096 documents) or the float64 torch path (20,000), the value of 100,000 documents with a float64 computation tile by tile.
Nothing is printed if any of them is off by more than 1e-4 (2e-2 for bfloat16 scores).
"""

import argparse
import statistics
import subprocess
import sys

import torch

from losses import (
    ROUNDS,
    TEXTBOOK_ROUNDS,
    in_a_graph,
    in_eager_code,
    peak_memory,
    textbook_neural_ndcg,
    value_and_gradient,
)
from rankgrad.losses import LOSSES

NDCG = ("neural_ndcg", "neural_ndcg_transposed")
SHAPES = ((16, 1024), (4, 4096), (1, 20_000), (1, 100_000))


def kernel(name, tau=1.0):
    return lambda scores, labels: LOSSES[name](scores, labels, tau=tau, backend="triton", **TEXTBOOK_ROUNDS)


def torch_path(name):
    return lambda scores, labels: LOSSES[name](scores, labels, backend="torch", **TEXTBOOK_ROUNDS)


def example(lists, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(lists, length, generator=draw).cuda()
    return scores, torch.randint(0, 5, scores.shape, generator=draw).float().cuda()


def gradient_errors():
    """Relative errors of the gradient, by name, scores and length."""
    normal, labels = example(2, 1024, seed=1)
    long, long_labels = example(1, 4096, seed=2)
    longest, longest_labels = example(1, 20_000, seed=3)
    for what, scores, judged, tau, limit in (
        ("tanh", normal.tanh(), labels, 1.0, 1e-4),
        ("N(0,1)", normal, labels, 1.0, 1e-4),
        ("N(0,10)", 10 * normal, labels, 1.0, 1e-4),
        ("tanh", normal.tanh(), labels, 0.1, 1e-4),
        ("bfloat16 tanh", normal.tanh().bfloat16(), labels, 1.0, 2e-2),
        ("tanh", long.tanh(), long_labels, 1.0, 1e-4),
        ("tanh", longest.tanh(), longest_labels, 1.0, 1e-4),
    ):
        for name in NDCG:
            if scores.shape[-1] <= 4096:
                transposed = name == "neural_ndcg_transposed"

                def exact(scores, labels, transposed=transposed, tau=tau):
                    return textbook_neural_ndcg(scores, labels, transposed=transposed, tau=tau)

                against = "textbook"
            else:
                exact, against = torch_path(name), "torch path"
            value, gradient = value_and_gradient(exact, scores.double(), judged)
            other, slope = value_and_gradient(kernel(name, tau), scores, judged)
            off_value = float((other - value).abs() / value.abs())
            off = float((slope - gradient).norm() / gradient.norm())
            if not max(off, off_value) < limit:
                sys.exit(f"{name} on {what} scores at tau {tau:g}: off by {off:.1e}; nothing is measured")
            yield f"| {name} | {scores.shape[-1]:,} | {what}, tau {tau:g} | {against} | {off_value:.1e} | {off:.1e} |"


def value_by_tiles(scores, labels, height=1000):
    """NeuralNDCG of one list in float64: the textbook's matrix made anew for each half-round, `height` rows at a time.

    Columns are taken in the order of the scores, and entries of a tile beyond the last above exp(-100) are left out.
    """
    s, order = scores.double().sort(descending=True)
    n = len(s)
    rank = torch.arange(1, n + 1, device=s.device, dtype=s.dtype)
    prefix = s.cumsum(0)
    b = (prefix - rank * s) + ((n - rank) * s - (prefix[-1] - prefix))
    r = n + 1 - 2 * rank
    tiles = []
    for start in range(0, n, height):
        rows = slice(start, start + height)
        logits = r[rows, None] * s - b
        total = logits.logsumexp(-1, keepdim=True)
        seen = (logits - total > -100).any(0).nonzero()
        tiles.append((rows, slice(int(seen[0]), int(seen[-1]) + 1), total))

    def tile(rows, columns, total):
        return torch.exp(r[rows, None] * s[columns] - b[columns] - total)

    u, v = torch.ones_like(s), torch.ones_like(s)
    for _ in range(ROUNDS):
        sums = torch.zeros_like(s)
        for rows, columns, total in tiles:
            sums[columns] += u[rows] @ tile(rows, columns, total)
        v = 1 / sums
        for rows, columns, total in tiles:
            u[rows] = 1 / (tile(rows, columns, total) @ v[columns])
    gains = 2.0 ** labels.double() - 1
    discounts = 1 / torch.log2(rank + 1)
    sorted_gains = v * gains[order]
    dcg = sum(
        (discounts[rows] * u[rows] * (tile(rows, columns, total) @ sorted_gains[columns])).sum()
        for rows, columns, total in tiles
    )
    return -dcg / (gains.sort(descending=True).values * discounts).sum()


def value_error():
    normal, labels = example(1, 100_000)
    exact = value_by_tiles(normal[0].tanh(), labels[0])
    value = kernel("neural_ndcg")(normal.tanh(), labels).double()
    off = float((value - exact).abs() / exact.abs())
    if not off < 1e-4:
        sys.exit(f"the value of 100,000 documents is off by {off:.1e}; nothing is measured")
    return f"Value of 100,000 documents against float64, tile by tile: {float(exact):.9f}, off by {off:.1e}."


def dense_time(function, scores, labels):
    """Milliseconds of one call on the device: the median of three, for calls too long to be captured many times."""
    leaf = scores.detach().clone().requires_grad_()
    times = []
    for _ in range(4):
        leaf.grad = None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(leaf, labels).backward()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-flat", action="store_true", help="leave out the dense cases")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/long_lists.py needs a CUDA device")
    import triton

    errors = list(gradient_errors())
    value = value_error()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, commit {commit or '?'}"
    )
    print(f"forward+backward, {ROUNDS} rounds, tau 1\n")
    print("| lists | scores | loss | graph ms | eager ms | MiB |\n|---|---|---|---|---|---|")
    for lists, length in SHAPES:
        normal, labels = example(lists, length)
        for what, scores in (("tanh", normal.tanh()), ("flat", torch.zeros_like(normal))):
            if what == "flat" and arguments.without_flat:
                continue
            for name in NDCG:
                function = kernel(name)
                if what == "flat" and length > 4096:
                    graph, eager = "-", f"{dense_time(function, scores, labels):.1f}"
                else:
                    graph = f"{in_a_graph(function, scores, labels):.3f}"
                    eager = f"{in_eager_code(function, scores, labels):.3f}"
                memory = peak_memory(function, scores, labels)
                print(f"| {lists} x {length:,} | {what} | {name} | {graph} | {eager} | {memory:.1f} |", flush=True)
    print("\n| loss | documents | scores | float64 by | value off by | gradient off by |\n|---|---|---|---|---|---|")
    print("\n".join(errors))
    print(f"\n{value}")


if __name__ == "__main__":
    main()
