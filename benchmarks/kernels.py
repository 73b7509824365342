"""Kernels on a GPU: textbook against torch path against Triton, forward+backward of one batch, in one run.

    python benchmarks/kernels.py [--lists 64] [--length 240]

Times are medians: `graph` is a captured CUDA graph replayed back to back, `eager` a call from Python until the device is done.
Memory is the peak beyond the inputs. The textbook keeps [B, L, L] tensors, for NeuralNDCG one per half-round of Sinkhorn.
Sinkhorn runs 30 rounds without early stop on all sides. Nothing is printed if value or gradient of the twins disagree, or if
NeuralNDCG's gradient is off by more than 1e-4 from the float64 textbook.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from rankgrad.losses import LOSSES

ROUNDS = 30
TEXTBOOK_ROUNDS = {"sinkhorn_iters": ROUNDS, "sinkhorn_tol": 0.0}
NDCG = ("neural_ndcg", "neural_ndcg_transposed")
NAMES = (*NDCG, "neural_map", "ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp", "approx_ndcg")


def textbook_neural_ndcg(scores, labels, transposed=False, tau=1.0):
    n = scores.shape[-1]
    ranks = torch.arange(1, n + 1, device=scores.device, dtype=scores.dtype)
    b = (scores[:, :, None] - scores[:, None, :]).abs().sum(-1)
    matrix = torch.softmax(((n + 1 - 2 * ranks)[:, None] * scores[:, None, :] - b[:, None, :]) / tau, -1)
    matrix = matrix.mT if transposed else matrix
    for _ in range(ROUNDS):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    matrix = matrix.mT if transposed else matrix
    gains, discounts, best = ideal(scores, labels)
    return -((torch.bmm(matrix, gains[:, :, None])[:, :, 0] * discounts).sum(-1) / best).mean()


def textbook_ranknet(scores, labels):
    gap = scores[:, :, None] - scores[:, None, :]
    above = labels[:, :, None] > labels[:, None, :]
    return torch.where(above, torch.nn.functional.softplus(-gap), 0.0).sum((-1, -2)).mean()


def textbook_lambdarank(scores, labels):
    gains, discounts, best = ideal(scores, labels)
    current = discounts[scores.detach().argsort(descending=True, stable=True).argsort()]
    gap = scores[:, :, None] - scores[:, None, :]
    above = labels[:, :, None] > labels[:, None, :]
    weights = (gains[:, :, None] - gains[:, None, :]).abs() * (current[:, :, None] - current[:, None, :]).abs()
    losses = torch.where(above, weights * torch.nn.functional.softplus(-gap), 0.0)
    return (losses.sum((-1, -2)) / best).mean()


def textbook_approx_ndcg(scores, labels):
    gains, _, best = ideal(scores, labels)
    ranks = 0.5 + torch.sigmoid(scores[:, None, :] - scores[:, :, None]).sum(-1)  # the document itself gives 1/2
    return -((gains / torch.log2(1 + ranks)).sum(-1) / best).mean()


def ideal(scores, labels):
    gains = (2.0**labels - 1).to(scores.dtype)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    discounts = 1 / torch.log2(ranks + 1)
    return gains, discounts, (gains.sort(descending=True).values * discounts).sum(-1)


TEXTBOOK = {
    "neural_ndcg": textbook_neural_ndcg,
    "neural_ndcg_transposed": lambda scores, labels: textbook_neural_ndcg(scores, labels, transposed=True),
    "ranknet": textbook_ranknet,
    "lambdarank": textbook_lambdarank,
    "approx_ndcg": textbook_approx_ndcg,
}


def implementation(name, path):
    if path == "textbook":
        return TEXTBOOK[name]
    options = TEXTBOOK_ROUNDS if name.startswith("neural") else {}
    return lambda scores, labels: LOSSES[name](scores, labels, backend=path, **options)


def value_and_gradient(function, scores, labels):
    leaf = scores.detach().clone().requires_grad_()
    loss = function(leaf, labels)
    loss.backward()
    return loss.detach().double(), leaf.grad.double()


def refuse_disagreement(name, scores, labels):
    value, gradient = value_and_gradient(implementation(name, "torch"), scores.double(), labels)
    for path in ("triton", "textbook"):
        if path == "textbook" and name not in TEXTBOOK:
            continue
        precise = scores.double() if path == "textbook" else scores
        other, slope = value_and_gradient(implementation(name, path), precise, labels)
        off = max(float((other - value).abs() / value.abs()), float((slope - gradient).norm() / gradient.norm()))
        if not off < 1e-4:
            sys.exit(f"{name}: {path} and torch disagree by {off:.1e}; nothing is measured")


def in_a_graph(function, scores, labels):
    """Milliseconds of one replay: the median of 15 runs of back-to-back replays."""
    leaf = scores.detach().clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            leaf.grad = None
            function(leaf, labels).backward()
        leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function(leaf, labels).backward()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times, repeats = [], max(3, min(100, int(30 / start.elapsed_time(end))))
        for _ in range(15):
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def in_eager_code(function, scores, labels):
    leaf = scores.detach().clone().requires_grad_()
    times = []
    for _ in range(25):
        leaf.grad = None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function(leaf, labels).backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


def peak_memory(function, scores, labels):
    """MiB beyond the inputs."""
    leaf = scores.detach().clone().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(leaf, labels).backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def gradient_errors(draw):
    """Relative gradient errors of float32 NeuralNDCG against the float64 textbook, 8 lists of 240."""
    normal = torch.randn(8, 240, generator=draw).cuda()
    labels = torch.randint(0, 5, normal.shape, generator=draw).float().cuda()
    rows = []
    for what, scores, tau in (
        ("tanh", normal.tanh(), 1.0),
        ("N(0,1)", normal, 1.0),
        ("N(0,10)", 10 * normal, 1.0),
        ("tanh", normal.tanh(), 0.1),
    ):
        for name in NDCG:
            transposed = name == "neural_ndcg_transposed"
            _, exact = value_and_gradient(
                lambda s, y: textbook_neural_ndcg(s, y, transposed, tau), scores.double(), labels  # noqa: B023
            )  # fmt: skip
            errors = []
            for path in ("torch", "triton"):
                _, gradient = value_and_gradient(
                    lambda s, y: LOSSES[name](s, y, tau=tau, backend=path, **TEXTBOOK_ROUNDS), scores, labels  # noqa: B023
                )  # fmt: skip
                errors.append(float((gradient - exact).norm() / exact.norm()))
            if not errors[1] < 1e-4:
                sys.exit(f"{name} on {what} scores at tau {tau}: gradient off by {errors[1]:.1e}; nothing is printed")
            rows.append(f"| {name} | {what}, tau {tau:g} | {errors[0]:.1e} | {errors[1]:.1e} |")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lists", type=int, default=64)
    parser.add_argument("--length", type=int, default=240)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a CUDA device")
    import triton

    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(arguments.lists, arguments.length, generator=draw).tanh().cuda()
    labels = torch.randint(0, 5, scores.shape, generator=draw).float().cuda()
    for name in NAMES:
        refuse_disagreement(name, scores, labels)
    errors = gradient_errors(draw)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, commit {commit or '?'}"
    )
    print(f"{arguments.lists} lists of {arguments.length}, tanh scores, forward+backward\n")
    print("| loss | path | graph ms | eager ms | MiB | textbook / this (graph) |\n|---|---|---|---|---|---|")
    for name in NAMES:
        slowest = None
        for path in ("textbook", "torch", "triton"):
            if path == "textbook" and name not in TEXTBOOK:
                continue
            function = implementation(name, path)
            graph, eager = in_a_graph(function, scores, labels), in_eager_code(function, scores, labels)
            slowest = graph if path == "textbook" else slowest
            ratio = f"{slowest / graph:.1f}" if slowest else "-"
            memory = peak_memory(function, scores, labels)
            print(f"| {name} | {path} | {graph:.3f} | {eager:.3f} | {memory:.1f} | {ratio} |", flush=True)
    print("\n| gradient error against float64, n = 240 | scores | torch float32 | triton |\n|---|---|---|---|")
    print("\n".join(errors))


if __name__ == "__main__":
    main()
