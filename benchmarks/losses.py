"""NeuralNDCG against the textbook: forward+backward time and peak memory growth, a fresh process for each number.

    python benchmarks/losses.py [--threads 2] [--repeats 5]

The textbook keeps an n x n matrix per Sinkhorn round and lets autograd run back through all of them. Both sides do 30
rounds (no early stop). Nothing is printed if the two disagree in value or gradient.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from rankgrad import neural_ndcg

ROUNDS = 30


def textbook(scores, labels, mask):
    """NeuralNDCG as the formula reads, for padded lists."""
    n = mask.sum(-1)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    pair = mask[:, :, None] & mask[:, None, :]
    b = torch.where(pair, (scores[:, :, None] - scores[:, None, :]).abs(), 0.0).sum(-1)
    r = (n[:, None] + 1 - 2 * ranks).to(scores.dtype)
    logits = r[:, :, None] * scores[:, None, :] - b[:, None, :]
    matrix = torch.softmax(logits.masked_fill(~mask[:, None, :], -1e30), -1)
    matrix = matrix * (ranks <= n[:, None])[:, :, None]
    for _ in range(ROUNDS):
        columns = matrix.sum(-2, keepdim=True)
        matrix = matrix / (columns + (columns == 0))
        rows = matrix.sum(-1, keepdim=True)
        matrix = matrix / (rows + (rows == 0))
    gains = torch.where(mask, 2.0**labels - 1, 0.0)
    discounts = (1 / torch.log2(ranks + 1)).to(scores.dtype)
    best = (gains.sort(dim=-1, descending=True).values * discounts).sum(-1)
    return -((torch.bmm(matrix, gains[:, :, None])[:, :, 0] * discounts).sum(-1) / best).mean()


def ours(scores, labels, mask):
    return neural_ndcg(scores, labels, mask, sinkhorn_iters=ROUNDS, sinkhorn_tol=0)


IMPLEMENTATIONS = {"textbook": textbook, "rankgrad": ours}


def lists_of_240(_):
    return torch.full((64,), 240)


def lists_like_web30k(draw):
    """Log-normal lengths with a mean of about 120, the longest of 64 several times that."""
    return torch.exp(4.6 + 0.6 * torch.randn(64, generator=draw)).round().long().clamp(2, 1251)


CASES = {"64 lists of 240": lists_of_240, "64 lists, Web30K-like lengths": lists_like_web30k}


def batch(case):
    draw = torch.Generator().manual_seed(0)
    counts = CASES[case](draw)
    mask = torch.arange(int(counts.max())) < counts[:, None]
    scores = torch.tanh(torch.randn(mask.shape, generator=draw))
    labels = torch.randint(0, 5, mask.shape, generator=draw).float()
    return scores.requires_grad_(), labels, mask


def measure(case, name, repeats):
    """In a process of its own: seconds per forward+backward, growth of the peak memory, value and gradient."""
    function = IMPLEMENTATIONS[name]
    small = torch.rand(2, 3, requires_grad=True)  # loads libraries and threads before memory is watched
    function(small, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)).backward()
    scores, labels, mask = batch(case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats + 1):
        scores.grad = None
        start = time.perf_counter()
        value = function(scores, labels, mask)
        value.backward()
        seconds.append(time.perf_counter() - start)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds": statistics.median(seconds[1:]),
        "mebibytes": growth / 1024,
        "value": value.item(),
        "grad": scores.grad.flatten().tolist(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(*options.measure, options.repeats)))
        return
    lines = [f"torch {torch.__version__}, {options.threads} threads, {ROUNDS} rounds, median of {options.repeats}"]
    for case in CASES:
        results = {}
        for name in IMPLEMENTATIONS:
            command = [sys.executable, __file__, "--threads", str(options.threads), "--repeats", str(options.repeats)]
            done = subprocess.run([*command, "--measure", case, name], capture_output=True, text=True, check=True)
            results[name] = json.loads(done.stdout)
        slow, fast = results["textbook"], results["rankgrad"]
        grads = torch.tensor(slow["grad"]), torch.tensor(fast["grad"])
        error = ((grads[0] - grads[1]).norm() / grads[0].norm()).item()
        # what difference there is, is mostly the textbook's: in float32 it loses three digits
        if abs(slow["value"] - fast["value"]) > 1e-5 or not error < 5e-3:
            sys.exit(f"{case}: the two disagree (values {slow['value']}, {fast['value']}; gradients by {error:.1e})")
        lines.append(f"\n{case}  (gradients agree to {error:.0e})")
        for name, result in results.items():
            lines.append(f"  {name:10} {1e3 * result['seconds']:9.1f} ms   {result['mebibytes']:8.1f} MiB")
        faster, leaner = slow["seconds"] / fast["seconds"], slow["mebibytes"] / max(fast["mebibytes"], 1e-3)
        lines.append(f"  {'ratio':10} {faster:8.1f} x     {leaner:8.1f} x")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
