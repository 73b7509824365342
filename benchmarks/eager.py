"""Every loss and metric from eager code, beside its textbook form, in one run: forward and backward of a loss, a metric alone.

    python benchmarks/eager.py                   # the device there is: 64 lists of 240 on a GPU, 16 of 20 on the CPU
    python benchmarks/eager.py --device cpu --names listnet ndcg --repeats 2000

A training loop calls a loss once a step, so what counts is the time until the call is over and the device is done: on small lists
that is Python and launches, not arithmetic. The textbook is what one would write from the formula for padded lists with a mask:
no checks, no guard against lists that have nothing to learn from, no care for half precision. Values must agree. Times are medians of
calls that take turns; the last column is ours divided by the textbook's.
"""

import argparse
import inspect
import statistics
import time

import torch
from torch.nn import functional

from rankgrad.losses import LOSSES
from rankgrad.metrics import METRICS

ROUNDS = 30
UNITS = 4


def gaps(scores):
    return scores[:, :, None] - scores[:, None, :]


def real_pairs(mask):
    return mask[:, :, None] & mask[:, None, :]


def ranks_of(scores, mask):
    return scores.detach().masked_fill(~mask, -torch.inf).argsort(descending=True, stable=True).argsort()


def positions(scores):
    return torch.arange(1, scores.shape[-1] + 1, device=scores.device)


def ideal(scores, labels, mask):
    gains = torch.where(mask, 2.0**labels - 1, 0.0)
    discounts = 1 / torch.log2(positions(scores) + 1.0)
    return gains, discounts, (gains.sort(descending=True).values * discounts).sum(-1)


def scaled_sort(scores, mask, transposed=False):
    ranks, n = positions(scores), mask.sum(-1, keepdim=True)
    b = torch.where(real_pairs(mask), gaps(scores).abs(), 0.0).sum(-1)
    logits = (n + 1 - 2 * ranks)[:, :, None] * scores[:, None, :] - b[:, None, :]
    matrix = logits.masked_fill(~mask[:, None, :], -1e30).softmax(-1) * (ranks <= n)[:, :, None]
    matrix = matrix.mT if transposed else matrix
    for _ in range(ROUNDS):
        for dim in (-2, -1):
            matrix = matrix / matrix.sum(dim, keepdim=True).clamp(min=1e-30)
    return matrix


def relaxed(scores, values, mask, transposed=False):
    return torch.bmm(scaled_sort(scores, mask, transposed), values[:, :, None])[:, :, 0]


def neural_ndcg(scores, labels, mask):
    gains, discounts, best = ideal(scores, labels, mask)
    return -((relaxed(scores, gains, mask) * discounts).sum(-1) / best).mean()


def neural_ndcg_transposed(scores, labels, mask):
    gains, discounts, best = ideal(scores, labels, mask)
    return -((relaxed(scores, discounts.expand_as(gains), mask, True) * gains).sum(-1) / best).mean()


def neural_map(scores, labels, mask):
    relevant = (mask & (labels >= 1)).float()
    q = relaxed(scores, relevant, mask)
    return -((q * q.cumsum(-1) / positions(scores)).sum(-1) / relevant.sum(-1)).mean()


def cascade(stops):
    reached = functional.pad((1 - stops).cumprod(-1)[:, :-1], (1, 0), value=1.0)
    return (stops * reached / positions(stops)).sum(-1)


def neural_mrr(scores, labels, mask):
    return -cascade(relaxed(scores, (mask & (labels >= 1)).float(), mask)).mean()


def neural_err(scores, labels, mask):
    return -cascade(relaxed(scores, torch.where(mask, (2.0**labels - 1) / 16, 0.0), mask)).mean()


def neural_precision(scores, labels, mask):
    return -(relaxed(scores, (mask & (labels >= 1)).float(), mask).sum(-1) / mask.sum(-1)).mean()


def listnet(scores, labels, mask):
    target = labels.masked_fill(~mask, -torch.inf).softmax(-1)
    return -(target * scores.masked_fill(~mask, -1e30).log_softmax(-1)).sum(-1).mean()


def softmax(scores, labels, mask):
    target = labels.masked_fill(~mask, 0.0)
    return -(target * scores.masked_fill(~mask, -1e30).log_softmax(-1)).sum(-1).mean()


def xe_ndcg(scores, labels, mask, noise):
    target = torch.where(mask, 2.0**labels - noise, 0.0)
    target = target / target.sum(-1, keepdim=True)
    return -(target * scores.masked_fill(~mask, -1e30).log_softmax(-1)).sum(-1).mean()


def listmle(scores, labels, mask, noise):
    order = (labels + noise / 2).masked_fill(~mask, torch.inf).argsort()  # ties broken at random
    ascending = scores.gather(-1, order)
    return ((ascending.logcumsumexp(-1) - ascending) * mask.gather(-1, order)).sum(-1).mean()


def query_rmse(scores, labels, mask):
    error = torch.where(mask, labels - scores, 0.0)
    error = error - error.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return torch.where(mask, error.square(), 0.0).sum() / mask.sum()


def ranknet(scores, labels, mask):
    above = real_pairs(mask) & (labels[:, :, None] > labels[:, None, :])
    return torch.where(above, functional.softplus(-gaps(scores)), 0.0).sum((-1, -2)).mean()


def weighted_pairs(scores, labels, mask, weigh):
    gains, discounts, best = ideal(scores, labels, mask)
    gains = gains / best[:, None]
    above = real_pairs(mask) & (labels[:, :, None] > labels[:, None, :])
    weights = (gains[:, :, None] - gains[:, None, :]).abs() * weigh(discounts, ranks_of(scores, mask))
    return torch.where(above, weights * functional.softplus(-gaps(scores)), 0.0).sum((-1, -2)).mean()


def by_discount(discounts, ranks):
    return gaps(discounts[ranks]).abs()


def by_distance(discounts, ranks):
    steps = functional.pad(discounts[:-1] - discounts[1:], (1, 1))
    return steps[gaps(ranks).abs()]


def lambdarank(scores, labels, mask):
    return weighted_pairs(scores, labels, mask, by_discount)


def ndcg_loss2(scores, labels, mask):
    return weighted_pairs(scores, labels, mask, by_distance)


def ndcg_loss2pp(scores, labels, mask):
    return weighted_pairs(scores, labels, mask, lambda d, r: by_discount(d, r) + 10 * by_distance(d, r))


def ndcg_loss1(scores, labels, mask):
    gains, discounts, best = ideal(scores, labels, mask)
    weights = gains / best[:, None] * discounts[ranks_of(scores, mask)]
    counted = real_pairs(mask) & ~torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    losses = weights[:, :, None] * functional.softplus(-gaps(scores))
    return torch.where(counted, losses, 0.0).sum((-1, -2)).mean()


def approx_ndcg(scores, labels, mask):
    gains, _, best = ideal(scores, labels, mask)
    ranks = 0.5 + torch.where(real_pairs(mask), torch.sigmoid(-gaps(scores)), 0.0).sum(
        -1
    )  # the document itself gives 1/2
    return -((gains / torch.log2(1 + ranks)).sum(-1) / best).mean()


def soft_rank(scores, labels, mask):
    gains, discounts, best = ideal(scores, labels, mask)
    others = real_pairs(mask) & ~torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    wins = torch.where(others, torch.special.ndtr(-gaps(scores) / 2**0.5), 0.0)
    mean, deviation = 1 + wins.sum(-1), (wins * (1 - wins)).sum(-1).clamp(min=1e-6).sqrt()
    edges = positions(scores)[:-1]
    below = torch.special.ndtr((edges + 0.5 - mean[..., None]) / deviation[..., None])
    count = mask.sum(-1)
    steps = torch.where(edges < count[:, None], discounts[:-1] - discounts[1:], 0.0)
    expected = discounts[count - 1][:, None] + (below * steps[:, None, :]).sum(-1)
    return -((gains * expected).sum(-1) / best).mean()


def rmse(scores, labels, mask):
    error = (labels - 5 * scores.sigmoid()).square()
    return (torch.where(mask, error, 0.0).sum(-1) / mask.sum(-1)).sqrt().mean()


def bce(scores, labels, mask):
    losses = functional.binary_cross_entropy_with_logits(scores, (labels >= 1).float(), reduction="none")
    return (torch.where(mask, losses, 0.0).sum(-1) / mask.sum(-1)).mean()


def ordinal(scores, labels, mask):
    exceeds = (labels[..., None] > torch.arange(UNITS, device=labels.device)).float()
    losses = functional.binary_cross_entropy_with_logits(scores, exceeds, reduction="none").sum(-1)
    return (torch.where(mask, losses, 0.0).sum(-1) / mask.sum(-1)).mean()


def sorted_labels(scores, labels, mask):
    order = scores.masked_fill(~mask, -torch.inf).argsort(descending=True, stable=True)
    return torch.where(mask, labels, 0.0).gather(-1, order)


def dcg(scores, labels, mask):
    return ((2.0 ** sorted_labels(scores, labels, mask) - 1) / torch.log2(positions(scores) + 1.0)).sum(-1)


def ndcg(scores, labels, mask):
    best = dcg(labels, labels, mask)
    return torch.where(best > 0, dcg(scores, labels, mask) / best, 1.0)


def hits(scores, labels, mask):
    return (sorted_labels(scores, labels, mask) >= 1).float()


def average_precision(scores, labels, mask):
    found = hits(scores, labels, mask)
    return (found * found.cumsum(-1) / positions(scores)).sum(-1) / found.sum(-1).clamp(min=1)


def reciprocal_rank(scores, labels, mask):
    return (hits(scores, labels, mask) / positions(scores)).amax(-1)


def err(scores, labels, mask):
    return cascade((2.0 ** sorted_labels(scores, labels, mask) - 1) / 16)


def precision(scores, labels, mask):
    return hits(scores, labels, mask).sum(-1) / mask.sum(-1)


def recall(scores, labels, mask):
    found = hits(scores, labels, mask)
    return found.sum(-1) / found.sum(-1).clamp(min=1)


def hit_rate(scores, labels, mask):
    return hits(scores, labels, mask).amax(-1)


TEXTBOOK = {name: globals()[function.__name__] for name, function in {**LOSSES, **METRICS}.items()}


def calls(name, lists, length, device):
    """Ours and the textbook's: functions that run forward and, for a loss, backward, and return the value."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(length // 2, length + 1, (lists, 1), generator=draw)
    mask = (torch.arange(length) < counts).to(device)
    labels = torch.randint(0, 5, (lists, length), generator=draw).float().to(device)
    shape = (lists, length, UNITS) if name == "ordinal" else (lists, length)
    scores = torch.randn(shape, generator=draw).to(device).requires_grad_(name in LOSSES)
    noise = torch.rand(lists, length, generator=draw).to(device)
    ours, textbook = {**LOSSES, **METRICS}[name], TEXTBOOK[name]
    given = {"noise": noise} if "noise" in inspect.signature(textbook).parameters else {}
    options = given | ({"ties": "random"} if name == "listmle" else {})
    if "sinkhorn_tol" in inspect.signature(ours).parameters:
        options |= {"sinkhorn_tol": 0.0}

    def run(function, options):
        value = function(scores, labels, mask, **options)
        if name in LOSSES:
            scores.grad = None
            value.backward()
        return value

    return lambda: run(ours, options), lambda: run(textbook, given)


def measure(name, lists, length, device, repeats):
    """Milliseconds of ours and of the textbook."""
    both = calls(name, lists, length, device)
    values = [call().detach() for call in both]
    if name != "listmle":  # whose textbook breaks ties by the same noise in another order of float32
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)
    times = ([], [])
    for turn in range(repeats + repeats // 5):
        for call, taken in zip(both, times):
            begin = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= repeats // 5:  # the first calls warm up
                taken.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(taken) for taken in times]


def main():
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    parser.add_argument("--lists", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--names", nargs="+", default=list(TEXTBOOK), choices=list(TEXTBOOK), metavar="NAME")
    given = parser.parse_args()
    lists, length = (64, 240) if given.device == "cuda" else (16, 20)
    lists, length = given.lists or lists, given.length or length
    if given.device == "cpu":
        torch.set_num_threads(1)
    print(f"{lists} lists of {length}, {given.device}, torch {torch.__version__}, median of {given.repeats} calls\n")
    print("| | ours, ms | textbook, ms | ours / textbook |\n|---|---|---|---|")
    for name in given.names:
        ours, textbook = measure(name, lists, length, given.device, given.repeats)
        print(f"| {name} | {ours:.3f} | {textbook:.3f} | {ours / textbook:.2f} |", flush=True)


if __name__ == "__main__":
    main()
