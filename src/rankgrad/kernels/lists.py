"""Pointwise and listwise losses: value and gradient of a list by one program, then the mean over lists.

From eager code a small loss costs its launches: a dozen operations of torch and as many backward, here two launches in all. Padding
may be anywhere and hold anything; sums are float32, differences of labels float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.kernels.summary import cleaned, log1p, real_at

KINDS = {"listnet": 0, "softmax": 1, "xe_ndcg": 2, "query_rmse": 3, "rmse": 4, "bce": 5, "ordinal": 6, "listmle": 7}
SEVERAL_SCORES, ALL_PAIRS = KINDS["ordinal"], KINDS["listmle"]  # which have kernels of their own
_LARGEST_SUMMABLE = tl.constexpr(3.4028234663852886e38 / 2.0**24)  # see `rankgrad.core.lists`
_LARGEST_SQUARABLE = tl.constexpr(2.0**50)
_TILE = 64


def list_loss(
    name: str,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    option: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss `name` of `rankgrad.losses.listwise` or `pointwise`, scores [..., L], and d loss / d scores in float32.

    `option` is what the loss has of its own: levels, threshold, or 1 for `count_empty`; `noise` [..., L] is that of XE-NDCG, and for
    ListMLE breaks ties at random.
    """
    kind, width = KINDS[name], scores.shape[-1]
    length = labels.shape[-1]
    lists = labels.numel() // length
    scores, labels = scores.contiguous(), labels.contiguous()
    real = labels if mask is None else mask.contiguous()  # not read unless given, as the noise
    keys = labels if noise is None else noise.contiguous()
    gradient = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    work = torch.empty(
        2 * lists + (2 * lists * length if kind == ALL_PAIRS else 0), dtype=torch.float32, device=scores.device
    )
    block = max(16, triton.next_power_of_2(length))
    given = {"MASKED": mask is not None, "num_warps": 4 if block <= 1024 else 8, "enable_fp_fusion": True}
    with torch.cuda.device_of(scores):
        if kind == ALL_PAIRS:
            tile = min(_TILE, block)
            _listmle[(lists,)](
                scores, labels, real, keys, gradient, work, length, RANDOM=noise is not None, BLOCK=block, TILE=tile, **given
            )  # fmt: skip
        elif kind == SEVERAL_SCORES:
            _ordinal[(lists,)](scores, labels, real, gradient, work, length, width, BLOCK=block, **given)
        else:
            _document_by_document[(lists,)](
                scores, labels, real, keys, gradient, work, length, option, KIND=kind, BLOCK=block, **given
            )  # fmt: skip
        values = work[:lists]
        if reduction == "none":
            return values.view(labels.shape[:-1]), gradient
        if reduction == "sum":
            return values.sum(), gradient
        loss = torch.empty((), dtype=torch.float32, device=scores.device)
        _mean[(lists,)](work, gradient, loss, gradient.numel() // lists, BLOCK=1024, num_warps=4)
    return loss, gradient


@triton.jit
def _store(work, gradient, at, inside, real, value, slope, informative, valid, size):
    """A list's value, its gradient and its size in the mean, as `rankgrad.core.lists.reduce` has them."""
    b = tl.program_id(0)
    nan = float("nan")
    tl.store(work + b, tl.where(valid, tl.where(informative, value, 0.0), nan))
    tl.store(work + tl.num_programs(0) + b, tl.where(informative | (valid == 0), size, 0.0))
    slope = tl.where(valid, slope, nan)
    tl.store(gradient + at, tl.where(real & informative, slope, 0.0), mask=inside)


@triton.jit
def _mean(work, gradient, loss, width, BLOCK: tl.constexpr):
    """The mean of the lists' values, and one list's gradient divided by what the mean is divided by."""
    b = tl.program_id(0)
    lists = tl.num_programs(0)
    values = tl.zeros([BLOCK], dtype=tl.float32)
    sizes = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, lists, BLOCK):
        other = start + tl.arange(0, BLOCK)
        values += tl.load(work + other, mask=other < lists, other=0.0)
        sizes += tl.load(work + lists + other, mask=other < lists, other=0.0)
    total = tl.maximum(tl.sum(sizes, axis=0), 1.0)
    if b == 0:
        tl.store(loss, tl.sum(values, axis=0) / total)
    row = gradient + b.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(row + i, tl.load(row + i, mask=i < width, other=0.0) / total, mask=i < width)


@triton.jit
def _sigmoid(s):
    e = tl.exp(-tl.abs(s))
    return tl.where(s >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _cross_entropy(s, relevant):
    """Binary cross-entropy of logits s."""
    return tl.maximum(s, 0.0) - s * relevant + log1p(tl.exp(-tl.abs(s)))


@triton.jit
def _summable(s):
    """What scores are multiplied by so that sums of them stay finite."""
    return tl.where(tl.max(tl.abs(s), axis=0) > _LARGEST_SUMMABLE, 1.0 / 16777216.0, 1.0)


@triton.jit
def _document_by_document(
    scores, labels, mask, noise, gradient, work, L, option,
    KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < L
    at = tl.program_id(0).to(tl.int64) * L + i
    s, y, real, bad = cleaned(scores, labels, mask, at, inside, MASKED)
    n = tl.sum(real.to(tl.int32), axis=0)
    valid = tl.max(bad.to(tl.int32), axis=0) == 0
    documents = tl.maximum(n, 1).to(tl.float32)
    size = 1.0
    highest = tl.max(tl.where(real, y, 0.0), axis=0)
    informative = (n >= 2) & (highest > 0.0)
    if KIND <= 2:
        factor = _summable(s)
        s = s * factor
        if KIND == 0:
            target = tl.where(real, tl.exp((y - highest).to(tl.float32)), 0.0)
            target = target / tl.where(n > 0, tl.sum(target, axis=0), 1.0)
        elif KIND == 1:
            target = y.to(tl.float32)
        else:
            gamma = tl.load(noise + at, mask=real, other=0.0).to(tl.float64)
            rho = tl.where(real, tl.exp2(y) - gamma, 0.0)
            total = tl.sum(rho, axis=0)
            target = (rho / tl.where(total > 0.0, total, 1.0)).to(tl.float32)
        target = tl.where(informative, target, 0.0)
        top = tl.where(n > 0, tl.max(tl.where(real, s, -float("inf")), axis=0), 0.0)
        chance = tl.where(real, tl.exp(s - top), 0.0)
        whole = tl.where(n > 0, tl.sum(chance, axis=0), 1.0)
        cost = target * ((top - s) + tl.log(whole))
        value = tl.sum(tl.where(real, cost, 0.0), axis=0)
        slope = factor * (tl.sum(target, axis=0) * (chance / whole) - target)
    elif KIND == 3:
        informative = (n >= 2) & ((highest > 0.0) | (option != 0.0))
        size = documents
        largest = tl.max(tl.abs(s), axis=0)
        factor = tl.exp2(-tl.ceil(tl.log2(tl.maximum(largest / _LARGEST_SQUARABLE, 1.0))))
        error = tl.where(real, y.to(tl.float32) - s * factor, 0.0)
        error = tl.where(real, error - tl.sum(error, axis=0) / documents, 0.0)
        value = tl.sum(error * error, axis=0)
        slope = -2.0 * factor * error
    else:
        informative = n >= 1
        if KIND == 4:
            chance = _sigmoid(s)
            error = tl.where(real, y.to(tl.float32) - option * chance, 0.0)
            value = tl.sqrt(tl.sum(error * error, axis=0) / documents)
            root = tl.where(value > 0.0, value, 1.0)  # a perfect fit gets a gradient of 0
            slope = -option * error * (chance * (1.0 - chance)) / (documents * root)
        else:
            factor = _summable(s)
            s = s * factor
            relevant = tl.where(y >= option, 1.0, 0.0)
            value = tl.sum(tl.where(real, _cross_entropy(s, relevant), 0.0), axis=0) / documents
            slope = factor * (_sigmoid(s) - relevant) / documents
    _store(work, gradient, at, inside, real & (bad == 0), value, slope, informative, valid, size)


@triton.jit
def _ordinal(scores, labels, mask, gradient, work, L, K, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < L
    at = tl.program_id(0).to(tl.int64) * L + i
    real = real_at(mask, at, inside, MASKED)
    y = tl.load(labels + at, mask=real, other=0).to(tl.float64)
    good = (y >= 0.0) & (y < float("inf"))
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(K):
        s = tl.abs(tl.load(scores + at * K + t, mask=real, other=0.0).to(tl.float32))
        good = good & (s < float("inf"))
        largest = tl.maximum(largest, s)
    n = tl.sum(real.to(tl.int32), axis=0)
    valid = tl.sum((real & (good == 0)).to(tl.int32), axis=0) == 0
    usable = real & good
    documents = tl.maximum(n, 1).to(tl.float32)
    factor = tl.where(largest > _LARGEST_SUMMABLE, 1.0 / 16777216.0, 1.0)
    cost = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(K):
        s = tl.where(usable, tl.load(scores + at * K + t, mask=usable, other=0.0).to(tl.float32) * factor, 0.0)
        relevant = tl.where(usable & (y > t), 1.0, 0.0)
        cost += _cross_entropy(s, relevant)
        slope = factor * (_sigmoid(s) - relevant) / documents
        slope = tl.where(valid, slope, float("nan"))
        tl.store(gradient + at * K + t, tl.where(usable, slope, 0.0), mask=inside)
    value = tl.sum(tl.where(real, cost, 0.0), axis=0) / documents
    b = tl.program_id(0)
    tl.store(work + b, tl.where(valid, value, float("nan")))
    tl.store(work + tl.num_programs(0) + b, tl.where((n >= 1) | (valid == 0), 1.0, 0.0))


@triton.jit
def _not_above(y_j, u_j, j, y_i, u_i, i, RANDOM: tl.constexpr):
    """Whether j, of lower label or behind i by the random keys of a tie, is among those i was chosen from; [J, I]."""
    if RANDOM:
        behind = (u_j[:, None] < u_i[None, :]) | ((u_j[:, None] == u_i[None, :]) & (j[:, None] <= i[None, :]))
        return (y_j[:, None] < y_i[None, :]) | ((y_j[:, None] == y_i[None, :]) & behind)
    return y_j[:, None] <= y_i[None, :]


@triton.jit
def _document(scores, labels, mask, noise, base, i, L, MASKED: tl.constexpr, RANDOM: tl.constexpr):
    inside = i < L
    s, y, real, bad = cleaned(scores, labels, mask, base + i, inside, MASKED)
    u = y
    if RANDOM:
        u = tl.load(noise + base + i, mask=real, other=0.0).to(tl.float64)
    return s, y, u, real, bad


@triton.jit
def _listmle(
    scores, labels, mask, noise, gradient, work, L,
    MASKED: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    tops = work + 2 * tl.num_programs(0) + base
    log_sums = tops + tl.num_programs(0).to(tl.int64) * L
    whole = tl.arange(0, BLOCK)
    s, y, real, bad = cleaned(scores, labels, mask, base + whole, whole < L, MASKED)
    n = tl.sum(real.to(tl.int32), axis=0)
    informative = (n >= 2) & (tl.max(tl.where(real, y, 0.0), axis=0) > 0.0)
    valid = tl.sum(bad.to(tl.int32), axis=0) == 0
    factor = _summable(s)
    value = tl.zeros([TILE], dtype=tl.float32)
    for first in range(0, L, TILE):
        i = first + tl.arange(0, TILE)
        s_i, y_i, u_i, real_i, _bad = _document(scores, labels, mask, noise, base, i, L, MASKED, RANDOM)
        s_i = s_i * factor
        top = s_i
        for start in range(0, L, TILE):
            j = start + tl.arange(0, TILE)
            s_j, y_j, u_j, real_j, bad_j = _document(scores, labels, mask, noise, base, j, L, MASKED, RANDOM)
            among = real_j[:, None] & _not_above(y_j, u_j, j, y_i, u_i, i, RANDOM)
            top = tl.maximum(top, tl.max(tl.where(among, (s_j * factor)[:, None], -float("inf")), axis=0))
        total = tl.zeros([TILE], dtype=tl.float32)
        for start in range(0, L, TILE):
            j = start + tl.arange(0, TILE)
            s_j, y_j, u_j, real_j, bad_j = _document(scores, labels, mask, noise, base, j, L, MASKED, RANDOM)
            among = real_j[:, None] & _not_above(y_j, u_j, j, y_i, u_i, i, RANDOM)
            total += tl.sum(tl.exp(tl.where(among, (s_j * factor)[:, None] - top[None, :], -float("inf"))), axis=0)
        log_sum = tl.log(tl.where(real_i, total, 1.0))
        value += tl.where(real_i, (top - s_i) + log_sum, 0.0)
        tl.store(tops + i, top, mask=i < L)
        tl.store(log_sums + i, log_sum, mask=i < L)
    tl.debug_barrier()  # every document's sum is written before another reads it
    for first in range(0, L, TILE):
        j = first + tl.arange(0, TILE)
        s_j, y_j, u_j, real_j, bad_j = _document(scores, labels, mask, noise, base, j, L, MASKED, RANDOM)
        slope = tl.zeros([TILE], dtype=tl.float32) - 1.0
        for start in range(0, L, TILE):
            i = start + tl.arange(0, TILE)
            _s_i, y_i, u_i, real_i, _bad = _document(scores, labels, mask, noise, base, i, L, MASKED, RANDOM)
            top = tl.load(tops + i, mask=real_i, other=0.0)
            log_sum = tl.load(log_sums + i, mask=real_i, other=0.0)
            among = real_i[None, :] & _not_above(y_j, u_j, j, y_i, u_i, i, RANDOM)
            share = ((s_j * factor)[:, None] - top[None, :]) - log_sum[None, :]
            slope += tl.sum(tl.exp(tl.where(among, share, -float("inf"))), axis=1)
        slope = tl.where(valid, factor * slope, float("nan"))
        tl.store(gradient + base + j, tl.where(real_j & (bad_j == 0) & informative, slope, 0.0), mask=j < L)
    total_value = tl.sum(value, axis=0)
    tl.store(work + b, tl.where(valid, tl.where(informative, total_value, 0.0), float("nan")))
    tl.store(work + tl.num_programs(0) + b, tl.where(informative | (valid == 0), 1.0, 0.0))
