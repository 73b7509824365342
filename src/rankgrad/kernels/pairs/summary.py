"""What the pairwise kernels need of a list first: clean scores, ranks, normalised gains, and whether the list teaches.

Two launches and no sort: ranks by counting (tile by tile, O(L^2) comparisons), then one program per list. Padding may
stand anywhere and hold anything. Ties keep the input order. Gains, discounts and the ideal DCG are float64 until stored.
What they leave for the kernels after them lies in one tensor of float32 words, cut by offsets inside the kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIR, RELEVANT = 0, 1  # which lists teach: two different labels; or two documents, one relevant, and an ideal DCG
GAINS = {"exp2": 0, "linear": 1}  # 2 = given as a tensor
_TAU = (1e-37, 1e37)  # kernels take numbers as float32; beyond these limits a temperature changes nothing any more

# Regions of the workspace of B lists of L documents, in multiples of B L words; documents keep the input order.
_IDEAL = tl.constexpr(0)  # float64: what a document adds to the ideal DCG, then the gain itself
_GAINS = tl.constexpr(2)
LABEL = tl.constexpr(4)  # float64, 0 under the padding
SCORE = tl.constexpr(6)  # 0 under the padding
RANK = tl.constexpr(7)  # int32 from 0, padding last; for ApproxNDCG the smooth rank from 1
GAIN_OVER_IDEAL = tl.constexpr(8)  # divided by the ideal DCG@k; 0 where a list has none
DISCOUNT = tl.constexpr(9)  # at the current rank
LISTS = tl.constexpr(10)  # then a word for each list:
VALUE_SCALE = tl.constexpr(0)  # 1 where it teaches, 0 where not, NaN where it is unsound,
GRAD_SCALE = tl.constexpr(1)  # the same, but 0 where an unsound list does not teach,
WEIGHS = tl.constexpr(2)  # 1 where it counts in the mean;
_AFTER = tl.constexpr(3)
STEPS = tl.constexpr(
    4
)  # then three words: tickets of lists and blocks that are done, and how many lists count in the mean;
# then, L words, d(m) - d(m + 1) for a distance m of ranks; then the values, a word for each block of documents


def temperature(tau: float) -> float:
    """A temperature that float32 can hold."""
    return min(max(tau, _TAU[0]), _TAU[1])


def summarise(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    gain: str | Tensor,
    k: int | None,
    teaches: int,
    blocks: int,
    alpha: float | None = None,
) -> Tensor:
    """The workspace of scores [..., L] of any dtype the kernels take; `gain` may be a float64 tensor [..., L].

    With `alpha` the smooth ranks of ApproxNDCG are computed instead of the ranks and what hangs on them. `blocks` of a list
    will leave a value each.
    """
    length = scores.shape[-1]
    lists = scores.numel() // length
    scores, labels = scores.contiguous(), labels.contiguous()
    real = labels if mask is None else mask.contiguous()  # not read unless given, as the gain
    given = gain.contiguous() if isinstance(gain, Tensor) else labels
    size = 10 * lists * length + 3 * lists + 4 + length + lists * blocks
    work = torch.empty(size, dtype=torch.float32, device=scores.device)
    block_i, block_j = 32, min(64, max(16, triton.next_power_of_2(length)))
    _rank[(lists, triton.cdiv(length, block_i))](
        scores, labels, real, given, work, length, 2**31 - 1 if k is None else k, 1.0 if alpha is None else alpha,
        GAIN=2 if isinstance(gain, Tensor) else GAINS[gain], SMOOTH=alpha is not None, MASKED=mask is not None,
        BI=block_i, BJ=block_j, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _summary[(lists,)](
        scores, labels, real, work, length, TEACHES=teaches, SMOOTH=alpha is not None, MASKED=mask is not None,
        BLOCK=min(1024, max(16, triton.next_power_of_2(length))), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return work


@triton.jit
def region(work, lists, L, number):
    """A region with a word for each document of each list."""
    return work + number * lists.to(tl.int64) * L


@triton.jit
def about(work, lists, L, number):
    """A region with a word for each list; number 3 is where the tickets are."""
    return region(work, lists, L, LISTS) + number * lists


@triton.jit
def tickets(work, lists, L):
    """Lists that are summarised, blocks that are done."""
    return about(work, lists, L, _AFTER).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def weight(work, lists, L):
    """Where it says how many lists count in the mean, one at least."""
    return about(work, lists, L, _AFTER) + 2


@triton.jit
def steps_of(work, lists, L):
    """d(m) - d(m + 1) for a distance m of ranks, [L]."""
    return about(work, lists, L, _AFTER) + STEPS


@triton.jit
def values_of(work, lists, L):
    """The value of each block, [B, blocks]."""
    return about(work, lists, L, _AFTER) + STEPS + L


@triton.jit
def wide(pointer):
    """Words read as float64."""
    return pointer.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def cleaned(scores, labels, real, at, inside, MASKED: tl.constexpr = True):
    """Score, label, whether the document is real and whether it is bad; zeros where it is bad or padding."""
    s = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(labels + at, mask=inside, other=0).to(tl.float64)
    if MASKED:
        here = tl.load(real + at, mask=inside, other=0) != 0
    else:
        here = inside
    good = (tl.abs(s) < float("inf")) & (y >= 0.0) & (y < float("inf"))  # NaN fails every comparison
    usable = here & good
    return tl.where(usable, s, 0.0), tl.where(usable, y, 0.0), here, here & (good == 0)


@triton.jit
def _rank(
    scores, labels, real, given, work, L, k, alpha,
    GAIN: tl.constexpr, SMOOTH: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    lists = tl.num_programs(0)
    base = tl.program_id(0).to(tl.int64) * L
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    in_i = i < L
    s_i, y_i, real_i, _bad_i = cleaned(scores, labels, real, base + i, in_i, MASKED)
    if GAIN == 2:
        key_i = tl.load(given + base + i, mask=in_i, other=0.0)
    else:
        key_i = y_i  # gains grow with labels: the same order
    # Tiles are [BJ, BI], rivals first: a thread keeps its document and sums over rivals by itself until the end.
    befores = tl.zeros([BJ, BI], dtype=tl.int32)
    betters = tl.zeros([BJ, BI], dtype=tl.int32)
    beatens = tl.zeros([BJ, BI], dtype=tl.float32)
    for start in range(0, L, BJ):
        j = start + tl.arange(0, BJ)
        in_j = j < L
        s_j, y_j, real_j, _bad_j = cleaned(scores, labels, real, base + j, in_j, MASKED)
        if GAIN == 2:
            key_j = tl.load(given + base + j, mask=in_j, other=0.0)
        else:
            key_j = y_j
        earlier = j[:, None] < i[None, :]
        richer = (key_j[:, None] > key_i[None, :]) | ((key_j[:, None] == key_i[None, :]) & earlier)
        betters += (richer & real_j[:, None]).to(tl.int32)
        if SMOOTH:
            x = alpha * (s_j[:, None] - s_i[None, :])
            e = tl.exp(-tl.abs(x))
            beaten = tl.where(x >= 0.0, 1.0, e) / (1.0 + e)
            beatens += tl.where(real_j[:, None] & (j[:, None] != i[None, :]), beaten, 0.0)
        else:
            ahead = (s_j[:, None] > s_i[None, :]) | ((s_j[:, None] == s_i[None, :]) & earlier)
            same = real_j[:, None] == real_i[None, :]
            first = (same & ahead) | ((same == 0) & real_j[:, None])
            befores += (first & in_j[:, None]).to(tl.int32)
    better = tl.sum(betters, axis=0)
    if GAIN == 0:
        g = tl.exp2(y_i) - 1.0
    else:
        g = key_i
    g = tl.where(real_i, g, 0.0)
    part = tl.where(real_i & (better < k), g / tl.log2(better.to(tl.float64) + 2.0), 0.0)
    tl.store(region(work, lists, L, SCORE) + base + i, s_i, mask=in_i)
    tl.store(wide(region(work, lists, L, LABEL)) + base + i, y_i, mask=in_i)
    tl.store(wide(region(work, lists, L, _GAINS)) + base + i, g, mask=in_i)
    tl.store(wide(region(work, lists, L, _IDEAL)) + base + i, part, mask=in_i)
    if SMOOTH:
        tl.store(region(work, lists, L, RANK) + base + i, 1.0 + tl.sum(beatens, axis=0), mask=in_i)
    else:
        rank = region(work, lists, L, RANK).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(rank + base + i, tl.sum(befores, axis=0), mask=in_i)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(tickets(work, lists, L), 0)
        tl.store(tickets(work, lists, L) + 1, 0)


@triton.jit
def _summary(
    scores, labels, real, work, L,
    TEACHES: tl.constexpr, SMOOTH: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    lists = tl.num_programs(0)
    ideal = wide(region(work, lists, L, _IDEAL))
    gains = wide(region(work, lists, L, _GAINS))
    base = b.to(tl.int64) * L
    count = tl.zeros([BLOCK], dtype=tl.int32)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    highest = tl.zeros([BLOCK], dtype=tl.float64) - float("inf")
    lowest = tl.zeros([BLOCK], dtype=tl.float64) + float("inf")
    best = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        _s, y, here, broken = cleaned(scores, labels, real, base + i, in_i, MASKED)
        count += here.to(tl.int32)
        bad += broken.to(tl.int32)
        highest = tl.maximum(highest, tl.where(here, y, -float("inf")))
        lowest = tl.minimum(lowest, tl.where(here, y, float("inf")))
        best += tl.load(ideal + base + i, mask=in_i, other=0.0)
    n = tl.sum(count, axis=0)
    top = tl.max(highest, axis=0)
    total = tl.sum(best, axis=0)
    has_ideal = (total <= 0.0) == 0  # NaN stays, to be seen
    if TEACHES == 0:
        teaches = top > tl.min(lowest, axis=0)
    else:
        teaches = (n >= 2) & (top > 0.0) & has_ideal
    sound = tl.sum(bad, axis=0) == 0
    one = tl.where(teaches, 1.0, 0.0)
    tl.store(about(work, lists, L, VALUE_SCALE) + b, tl.where(sound, one, float("nan")))
    tl.store(about(work, lists, L, GRAD_SCALE) + b, tl.where(sound | (teaches == 0), one, float("nan")))
    tl.store(about(work, lists, L, WEIGHS) + b, tl.where(sound, one, 1.0))
    counts = teaches & has_ideal  # a gain that is not finite, of a list that teaches nothing, must not reach the sums
    safe = tl.where(counts, total, 1.0)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        at = base + i
        g = tl.load(gains + at, mask=in_i, other=0.0)
        g = tl.where(counts, g / safe, 0.0).to(tl.float32)
        tl.store(region(work, lists, L, GAIN_OVER_IDEAL) + at, g, mask=in_i)
        if not SMOOTH:
            rank = region(work, lists, L, RANK).to(tl.pointer_type(tl.int32), bitcast=True)
            place = tl.load(rank + at, mask=in_i, other=0).to(tl.float64)
            tl.store(region(work, lists, L, DISCOUNT) + at, (1.0 / tl.log2(place + 2.0)).to(tl.float32), mask=in_i)
            if b == 0:
                m = tl.maximum(i, 1).to(tl.float64)
                step = 1.0 / tl.log2(m + 1.0) - 1.0 / tl.log2(m + 2.0)
                tl.store(steps_of(work, lists, L) + i, tl.where(i > 0, step, 0.0).to(tl.float32), mask=in_i)
    tl.debug_barrier()  # whether this list counts is written before its ticket is
    if tl.atomic_add(tickets(work, lists, L), 1) == lists - 1:
        counted = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, lists, BLOCK):
            other = start + tl.arange(0, BLOCK)
            at = about(work, lists, L, WEIGHS) + other
            counted += tl.load(at, mask=other < lists, other=0.0, cache_modifier=".cg")
        tl.store(weight(work, lists, L), tl.maximum(tl.sum(counted, axis=0), 1.0))
