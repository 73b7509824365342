"""Every relaxation, loss and metric once more: plain float64 loops over one list, written from the formulas.

Each function takes Python lists of the real documents' scores and labels (no padding exists here) and returns a float.
`LOSS_REFERENCES` and `METRIC_REFERENCES` have the names of LOSSES and METRICS. Slow on purpose.
"""

import math

# --- conventions ------------------------------------------------------------------------------------------------------


def gain_of(y, gain="exp2"):
    if isinstance(gain, list):
        return float(gain[int(y)])
    return {"exp2": lambda y: 2.0**y - 1, "linear": float}.get(gain, gain)(y)


def discount(rank):
    return 1 / math.log2(rank + 1)


def max_dcg(labels, k=None, gain="exp2"):
    best = sorted((gain_of(y, gain) for y in labels), reverse=True)
    return sum(g * discount(j) for j, g in enumerate(best[:k], start=1))


def ranking(scores):
    """Document indices from best to worst, ties in input order."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def ranks(scores):
    result = [0] * len(scores)
    for rank, i in enumerate(ranking(scores), start=1):
        result[i] = rank
    return result


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def normal_cdf(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def log_softmax(values):
    top = max(values)
    log_sum = top + math.log(sum(math.exp(v - top) for v in values))
    return [v - log_sum for v in values]


# --- relaxed sorts ----------------------------------------------------------------------------------------------------


def neural_sort(scores, tau=1.0):
    n = len(scores)
    b = [sum(abs(s - t) for t in scores) for s in scores]
    return [
        [math.exp(p) for p in log_softmax([((n + 1 - 2 * i) * s - b_j) / tau for s, b_j in zip(scores, b)])]
        for i in range(1, n + 1)
    ]


def soft_sort(scores, tau=1.0):
    return [
        [math.exp(p) for p in log_softmax([-abs(s_i - s) / tau for s in scores])]
        for s_i in sorted(scores, reverse=True)
    ]


def sinkhorn(matrix, iters=30, tol=1e-6):
    matrix = [list(row) for row in matrix]
    for _ in range(iters):
        sums = [sum(column) for column in zip(*matrix)]
        matrix = [[x / s if s else 0.0 for x, s in zip(row, sums)] for row in matrix]
        matrix = [[x / sum(row) if sum(row) else 0.0 for x in row] for row in matrix]
        off = [abs(sum(line) - 1) for line in [*matrix, *zip(*matrix)] if any(line)]
        if tol > 0 and max(off, default=0.0) < tol:
            break
    return matrix


def transport_plan(scores, tau=1.0, rounds=20_000):
    """n times the entropic optimal-transport plan between scores and targets n + 1 - 2 i, squared cost, in the log domain."""
    n = len(scores)
    cost = [[(s - (n + 1 - 2 * i)) ** 2 for s in scores] for i in range(1, n + 1)]
    f, g = [0.0] * n, [0.0] * n
    epsilon = 2 * tau

    def log_sum(values):
        top = max(values)
        return top + math.log(sum(math.exp(v - top) for v in values))

    for _ in range(rounds):
        previous = g
        f = [-log_sum([g[j] - cost[i][j] / epsilon for j in range(n)]) for i in range(n)]
        g = [-log_sum([f[i] - cost[i][j] / epsilon for i in range(n)]) for j in range(n)]
        if max(abs(x - y) for x, y in zip(previous, g)) < 1e-13:
            break
    return [[math.exp(f[i] + g[j] - cost[i][j] / epsilon) for j in range(n)] for i in range(n)]


def transpose(matrix):
    return [list(column) for column in zip(*matrix)]


def times(matrix, vector):
    return [sum(x * v for x, v in zip(row, vector)) for row in matrix]


def perturb(scores, noise, beta=0.1, log_scores=True, perturb="paper"):
    if not log_scores:
        return [s + beta * g for s, g in zip(scores, noise)]
    lowest = min(scores)
    scale = beta if perturb == "paper" else 1.0
    return [scale * math.log(s - lowest + 1e-10) + beta * g for s, g in zip(scores, noise)]


# --- losses -----------------------------------------------------------------------------------------------------------


def two_and_one_relevant(labels, threshold=None):
    relevant = [y > 0 if threshold is None else y >= threshold for y in labels]
    return len(labels) >= 2 and any(relevant)


def through_relaxed_sort(metric, transposed=False):
    """A loss from a metric of (q, labels) by the paper's recipe; the values x of a label are `metric.values`."""

    def loss(scores, labels, *, tau=1.0, sinkhorn_iters=30, sinkhorn_tol=1e-6, sort=neural_sort, noise=None,
             beta=0.1, log_scores=True, perturb_as="paper", threshold=None, **options):  # fmt: skip
        if not two_and_one_relevant(labels, threshold):
            return 0.0
        copies = [scores] if noise is None else [perturb(scores, g, beta, log_scores, perturb_as) for g in noise]
        total = 0.0
        for s in copies:
            matrix = sort(s, tau)
            matrix = sinkhorn(transpose(matrix) if transposed else matrix, sinkhorn_iters, sinkhorn_tol)
            if threshold is not None:
                options["threshold"] = threshold
            total += metric(matrix, labels, **options)
        return -total / len(copies)

    return loss


def _ndcg_through(matrix, labels, k=None, gain="exp2"):
    q = times(matrix, [gain_of(y, gain) for y in labels])
    return sum(x * discount(j) for j, x in enumerate(q[:k], start=1)) / max_dcg(labels, k, gain)


def _ndcg_transposed_through(matrix, labels, k=None, gain="exp2"):
    n = len(labels)
    d = [discount(j) if k is None or j <= k else 0.0 for j in range(1, n + 1)]
    return sum(gain_of(y, gain) * x for y, x in zip(labels, times(matrix, d))) / max_dcg(labels, k, gain)


def _map_through(matrix, labels, k=None, threshold=1):
    q = times(matrix, [float(y >= threshold) for y in labels])
    return sum(q[i] / (i + 1) * sum(q[: i + 1]) for i in range(len(q)) if k is None or i < k) / sum(
        y >= threshold for y in labels
    )


def _cascade(stops, k=None):
    total, reaches = 0.0, 1.0
    for i, p in enumerate(stops[:k], start=1):
        total += p / i * reaches
        reaches *= 1 - p
    return total


def _mrr_through(matrix, labels, k=None, threshold=1):
    return _cascade(times(matrix, [float(y >= threshold) for y in labels]), k)


def _err_through(matrix, labels, k=None, max_label=4):
    return _cascade(times(matrix, [(2 ** min(y, max_label) - 1) / 2**max_label for y in labels]), k)


def _precision_through(matrix, labels, k=None, threshold=1):
    q = times(matrix, [float(y >= threshold) for y in labels])
    return sum(q[:k]) / (len(q) if k is None else k)


def pairs_of(scores, labels, k=None, pairs="any", ordered=True):
    """(i, j) with y_i > y_j (or all i != j), under the cut-off."""
    pi = ranks(scores)
    for i in range(len(scores)):
        for j in range(len(scores)):
            top = [k is None or pi[i] <= k, k is None or pi[j] <= k]
            wanted = labels[i] > labels[j] if ordered else i != j
            if wanted and (any(top) if pairs == "any" else all(top)):
                yield i, j


def ranknet(scores, labels, *, k=None, pairs="any", weights=None):
    w = weights or [1.0] * len(scores)
    return sum(w[i] * w[j] * softplus(scores[j] - scores[i]) for i, j in pairs_of(scores, labels, k, pairs))


def _pairs_with_gains(scores, labels, k, gain, pairs, factor, weights):
    w = weights or [1.0] * len(scores)
    if len({y for y, v in zip(labels, w) if v > 0}) < 2:
        return 0.0
    best, pi = max_dcg(labels, k, gain), ranks(scores)
    return sum(
        w[i] * w[j] * abs(gain_of(labels[i], gain) - gain_of(labels[j], gain)) / best * factor(pi[i], pi[j])
        * softplus(scores[j] - scores[i])
        for i, j in pairs_of(scores, labels, k, pairs)
    )  # fmt: skip


def _lambda_factor(a, b):
    return abs(discount(a) - discount(b))


def _distance_factor(a, b):
    return discount(abs(a - b)) - discount(abs(a - b) + 1)


def lambdarank(scores, labels, *, k=None, gain="exp2", pairs="any", weights=None):
    return _pairs_with_gains(scores, labels, k, gain, pairs, _lambda_factor, weights)


def ndcg_loss1(scores, labels, *, k=None, gain="exp2", pairs="any", weights=None):
    w = weights or [1.0] * len(scores)
    if len({y for y, v in zip(labels, w) if v > 0}) < 2:
        return 0.0
    best, pi = max_dcg(labels, k, gain), ranks(scores)
    return sum(
        w[i] * w[j] * gain_of(labels[i], gain) / best * discount(pi[i]) * softplus(scores[j] - scores[i])
        for i, j in pairs_of(scores, labels, k, pairs, ordered=False)
    )


def ndcg_loss2(scores, labels, *, k=None, gain="exp2", pairs="any", weights=None):
    return _pairs_with_gains(scores, labels, k, gain, pairs, _distance_factor, weights)


def ndcg_loss2pp(scores, labels, *, k=None, gain="exp2", pairs="any", mu=10.0, weights=None):
    return _pairs_with_gains(
        scores, labels, k, gain, pairs, lambda a, b: _lambda_factor(a, b) + mu * _distance_factor(a, b), weights
    )


def mean_over_documents(terms, weights):
    w = weights or [1.0] * len(terms)
    return sum(v * x for v, x in zip(w, terms)) / sum(w) if sum(w) else 0.0


def rmse(scores, labels, *, levels=5.0, weights=None):
    return math.sqrt(mean_over_documents([(y - levels * sigmoid(s)) ** 2 for s, y in zip(scores, labels)], weights))


def bce(scores, labels, *, threshold=1, weights=None):
    return mean_over_documents([softplus(-s if y >= threshold else s) for s, y in zip(scores, labels)], weights)


def ordinal(scores, labels, *, weights=None):
    terms = [sum(softplus(-s if y > t else s) for t, s in enumerate(units)) for units, y in zip(scores, labels)]
    return mean_over_documents(terms, weights)


def that_weigh(values, weights):
    """The values of documents that weigh more than 0."""
    return [x for x, v in zip(values, weights or [1.0] * len(values)) if v > 0]


def _cross_entropy(target, scores, weights):
    w = weights or [1.0] * len(scores)
    return -sum(v * t * p for v, t, p in zip(w, target, log_softmax(scores)))


def listnet(scores, labels, *, weights=None):
    if not two_and_one_relevant(that_weigh(labels, weights)):
        return 0.0
    return _cross_entropy([math.exp(p) for p in log_softmax([float(y) for y in labels])], scores, weights)


def softmax(scores, labels, *, weights=None):
    return _cross_entropy(labels, scores, weights) if two_and_one_relevant(that_weigh(labels, weights)) else 0.0


def xe_ndcg(scores, labels, *, noise, weights=None):
    if not two_and_one_relevant(that_weigh(labels, weights)):
        return 0.0
    rho = [2.0**y - gamma for y, gamma in zip(labels, noise)]
    return _cross_entropy([r / sum(rho) for r in rho], scores, weights)


def query_rmse(scores, labels, *, count_empty=False, weights=None):
    weighing = that_weigh(labels, weights)
    if not (len(weighing) >= 2 if count_empty else two_and_one_relevant(weighing)):
        return 0.0
    w = weights or [1.0] * len(scores)
    errors = [y - s for s, y in zip(scores, labels)]
    mean = mean_over_documents(errors, w)
    return sum(v * (e - mean) ** 2 for v, e in zip(w, errors))


def listmle(scores, labels, *, ties="group", noise=None, weights=None):
    if not two_and_one_relevant(that_weigh(labels, weights)):
        return 0.0
    w = weights or [1.0] * len(scores)
    total = 0.0
    for i in range(len(scores)):
        # what is still to be picked when i is: labels not above its own, or what comes after it in the random order
        left = [
            s
            for j, s in enumerate(scores)
            if labels[j] < labels[i] or (labels[j] == labels[i] and (ties == "group" or noise[j] <= noise[i]))
        ]
        top = max(left)
        total += w[i] * (top + math.log(sum(math.exp(s - top) for s in left)) - scores[i])
    return total


def approx_ndcg(scores, labels, *, alpha=1.0, gain="exp2"):
    if not two_and_one_relevant(labels):
        return 0.0
    total = 0.0
    for j, y in enumerate(labels):
        rank = 1 + sum(sigmoid(alpha * (s - scores[j])) for i, s in enumerate(scores) if i != j)
        total += gain_of(y, gain) / math.log2(1 + rank)
    return -total / max_dcg(labels, None, gain)


def soft_rank(scores, labels, *, k=None, sigma=1.0, gain="exp2", method="gaussian"):
    if not two_and_one_relevant(labels):
        return 0.0
    n = len(scores)
    total = 0.0
    for j, y in enumerate(labels):
        wins = [normal_cdf((s - scores[j]) / (sigma * math.sqrt(2))) for i, s in enumerate(scores) if i != j]
        if method == "exact":
            chance = [1.0] + [0.0] * (n - 1)
            for win in wins:
                chance = [chance[r] * (1 - win) + (chance[r - 1] * win if r else 0.0) for r in range(n)]
        else:
            mean = 1 + sum(wins)
            deviation = math.sqrt(max(sum(w * (1 - w) for w in wins), 1e-6))
            edges = [0.0] + [normal_cdf((r + 0.5 - mean) / deviation) for r in range(1, n)] + [1.0]
            chance = [edges[r] - edges[r - 1] for r in range(1, n + 1)]
        total += gain_of(y, gain) * sum(p * discount(r) for r, p in enumerate(chance[:k], start=1))
    return -total / max_dcg(labels, k, gain)


LOSS_REFERENCES = {
    "neural_ndcg": through_relaxed_sort(_ndcg_through),
    "neural_ndcg_transposed": through_relaxed_sort(_ndcg_transposed_through, transposed=True),
    "neural_map": lambda s, y, threshold=1, **o: through_relaxed_sort(_map_through)(s, y, threshold=threshold, **o),
    "neural_mrr": lambda s, y, threshold=1, **o: through_relaxed_sort(_mrr_through)(s, y, threshold=threshold, **o),
    "neural_err": through_relaxed_sort(_err_through),
    "neural_precision": lambda s, y, threshold=1, **o: through_relaxed_sort(_precision_through)(
        s, y, threshold=threshold, **o
    ),
    "approx_ndcg": approx_ndcg,
    "soft_rank": soft_rank,
    "listnet": listnet,
    "query_rmse": query_rmse,
    "listmle": listmle,
    "softmax": softmax,
    "xe_ndcg": xe_ndcg,
    "ranknet": ranknet,
    "lambdarank": lambdarank,
    "ndcg_loss1": ndcg_loss1,
    "ndcg_loss2": ndcg_loss2,
    "ndcg_loss2pp": ndcg_loss2pp,
    "rmse": rmse,
    "ordinal": ordinal,
    "bce": bce,
}


# --- metrics ----------------------------------------------------------------------------------------------------------


def dcg(scores, labels, *, k=None, gain="exp2", empty=0.0):
    if not any(y > 0 for y in labels):
        return empty
    return sum(gain_of(labels[i], gain) * discount(j) for j, i in enumerate(ranking(scores)[:k], start=1))


def ndcg(scores, labels, *, k=None, gain="exp2", empty=1.0):
    if not any(y > 0 for y in labels):
        return empty
    return dcg(scores, labels, k=k, gain=gain) / max_dcg(labels, k, gain)


def _hits(scores, labels, threshold):
    return [labels[i] >= threshold for i in ranking(scores)]


def average_precision(scores, labels, *, k=None, threshold=1, empty=0.0):
    hits = _hits(scores, labels, threshold)
    if not any(hits):
        return empty
    return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits[:k]) if hit) / sum(hits)


def reciprocal_rank(scores, labels, *, k=None, threshold=1, empty=0.0):
    hits = _hits(scores, labels, threshold)
    if not any(hits):
        return empty
    return next((1 / (i + 1) for i, hit in enumerate(hits[:k]) if hit), 0.0)


def err(scores, labels, *, k=None, max_label=4, empty=0.0):
    if not any(y > 0 for y in labels):
        return empty
    return _cascade([(2 ** min(labels[i], max_label) - 1) / 2**max_label for i in ranking(scores)], k)


def precision(scores, labels, *, k=None, threshold=1, empty=0.0):
    hits = _hits(scores, labels, threshold)
    return sum(hits[:k]) / (len(hits) if k is None else k) if any(hits) else empty


def recall(scores, labels, *, k=None, threshold=1, empty=0.0):
    hits = _hits(scores, labels, threshold)
    return sum(hits[:k]) / sum(hits) if any(hits) else empty


def hit_rate(scores, labels, *, k=None, threshold=1, empty=0.0):
    hits = _hits(scores, labels, threshold)
    return float(any(hits[:k])) if any(hits) else empty


METRIC_REFERENCES = {
    "ndcg": ndcg,
    "dcg": dcg,
    "map": average_precision,
    "mrr": reciprocal_rank,
    "err": err,
    "precision": precision,
    "recall": recall,
    "hit_rate": hit_rate,
}
