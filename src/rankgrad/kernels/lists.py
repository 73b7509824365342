"""What every kernel needs of a list first: clean scores, ranks, normalised gains, and whether the list teaches.

Two launches and no sort: ranks by counting (tile by tile, O(L^2) comparisons), then one program per list. Padding may
stand anywhere and hold anything. Ties keep the input order. Gains, discounts and the ideal DCG are float64 until stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIR, RELEVANT = (
    0,
    1,
)  # which lists teach: two different labels; or two documents, one of them relevant, and an ideal DCG
GAINS = {"exp2": 0, "linear": 1}  # 2 = given as a tensor


class Summary(NamedTuple):
    """Lists as the kernels read them, B lists of L documents; what was not asked for holds nothing of use."""

    scores: Tensor  # [B, L] float32, 0 under the padding
    labels: Tensor  # [B, L] float64, 0 under the padding
    mask: Tensor  # [B, L] uint8, 1 = a real document
    rank: Tensor  # [B, L] int32 from 0, padding last
    smooth_rank: Tensor  # [B, L] float32 from 1, ApproxNDCG's
    gain: Tensor  # [B, L] float32, divided by the ideal DCG@k; 0 where a list has none
    discount: Tensor  # [B, L] float32 at the current rank
    steps: Tensor  # [L] float32, d(m) - d(m + 1) for a distance m of ranks
    ordered: Tensor  # [B, L] float32 scores from best to worst
    ordered_gain: Tensor  # [B, L] float32 gains in that order
    order: Tensor  # [B, L] int32, the document at each rank
    counts: Tensor  # [B] int32 real documents
    value_scale: Tensor  # [B] float32: 1 where a list teaches, 0 where not, NaN where it is unsound
    grad_scale: Tensor  # [B] float32: the same, but 0 where an unsound list does not teach
    weighs: Tensor  # [B] float32: 1 where a list counts in the mean


def summarise(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    gain: str | Tensor,
    k: int | None,
    teaches: int,
    alpha: float | None = None,
) -> Summary:
    """Scores [B, L] of any dtype the kernels take, labels and mask alike; `gain` may be a float64 tensor [B, L].

    With `alpha` the smooth ranks of ApproxNDCG are computed instead of the ranks and what hangs on them.
    """
    lists, length = scores.shape
    scores = scores.contiguous()
    labels = (labels.to(torch.uint8) if labels.dtype == torch.bool else labels).contiguous()
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.contiguous()
    real = mask.view(torch.uint8)
    given = gain.contiguous() if isinstance(gain, Tensor) else labels  # not read unless given
    which = 2 if isinstance(gain, Tensor) else GAINS[gain]
    smooth = alpha is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        return torch.empty(shape, dtype=dtype, device=scores.device).unbind()

    clean_labels, gains, ideal = empty(3, lists, length, dtype=torch.float64)
    clean, smooth_rank, gain_out = empty(3, lists, length)
    discount, ordered, ordered_gain = (clean,) * 3 if smooth else empty(3, lists, length)
    rank, order = (real,) * 2 if smooth else empty(2, lists, length, dtype=torch.int32)
    steps, counts = torch.empty_like(clean[0]), torch.empty_like(clean[:, 0], dtype=torch.int32)
    value_scale, grad_scale, weighs = empty(3, lists)
    block_i, block_j = 32, min(64, max(16, triton.next_power_of_2(length)))
    _rank[(lists, triton.cdiv(length, block_i))](
        scores, labels, real, given, clean, clean_labels, gains, ideal, rank, smooth_rank,
        length, 2**31 - 1 if k is None else k, 1.0 if alpha is None else alpha,
        GAIN=which, SMOOTH=smooth, BI=block_i, BJ=block_j, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _summary[(lists,)](
        scores, labels, real, clean, gains, ideal, rank,
        gain_out, discount, steps, ordered, ordered_gain, order, counts, value_scale, grad_scale, weighs,
        length, TEACHES=teaches, SMOOTH=smooth, BLOCK=min(1024, max(16, triton.next_power_of_2(length))), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return Summary(
        clean, clean_labels, real, rank, smooth_rank, gain_out, discount, steps,
        ordered, ordered_gain, order, counts, value_scale, grad_scale, weighs,
    )  # fmt: skip


@triton.jit
def cleaned(scores, labels, real, at, inside):
    """Score, label and whether the document is real; zeros where a value is bad or the document is padding."""
    s = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(labels + at, mask=inside, other=0).to(tl.float64)
    here = tl.load(real + at, mask=inside, other=0) != 0
    good = (tl.abs(s) < float("inf")) & (y >= 0.0) & (y < float("inf"))  # NaN fails every comparison
    usable = here & good
    return tl.where(usable, s, 0.0), tl.where(usable, y, 0.0), here, here & (good == 0)


@triton.jit
def _rank(
    scores, labels, real, given, clean, clean_labels, gains, ideal, rank, smooth_rank, L, k, alpha,
    GAIN: tl.constexpr, SMOOTH: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * L
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    in_i = i < L
    s_i, y_i, real_i, _bad_i = cleaned(scores, labels, real, base + i, in_i)
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
        s_j, y_j, real_j, _bad_j = cleaned(scores, labels, real, base + j, in_j)
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
    tl.store(clean + base + i, s_i, mask=in_i)
    tl.store(clean_labels + base + i, y_i, mask=in_i)
    tl.store(gains + base + i, g, mask=in_i)
    tl.store(ideal + base + i, part, mask=in_i)
    if SMOOTH:
        tl.store(smooth_rank + base + i, 1.0 + tl.sum(beatens, axis=0), mask=in_i)
    else:
        tl.store(rank + base + i, tl.sum(befores, axis=0), mask=in_i)


@triton.jit
def _summary(
    scores, labels, real, clean, gains, ideal, rank,
    gain_out, discount, steps, ordered, ordered_gain, order, counts, value_scale, grad_scale, weighs,
    L, TEACHES: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    base = b.to(tl.int64) * L
    count = tl.zeros([BLOCK], dtype=tl.int32)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    highest = tl.zeros([BLOCK], dtype=tl.float64) - float("inf")
    lowest = tl.zeros([BLOCK], dtype=tl.float64) + float("inf")
    best = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        _s, y, here, broken = cleaned(scores, labels, real, base + i, in_i)
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
    tl.store(counts + b, n)
    tl.store(value_scale + b, tl.where(sound, one, float("nan")))
    tl.store(grad_scale + b, tl.where(sound | (teaches == 0), one, float("nan")))
    tl.store(weighs + b, tl.where(sound, one, 1.0))
    safe = tl.where(has_ideal, total, 1.0)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_i = i < L
        at = base + i
        g = tl.load(gains + at, mask=in_i, other=0.0)
        g = tl.where(has_ideal, g / safe, 0.0).to(tl.float32)
        tl.store(gain_out + at, g, mask=in_i)
        if not SMOOTH:
            place = tl.load(rank + at, mask=in_i, other=0)
            s = tl.load(clean + at, mask=in_i, other=0.0)
            tl.store(discount + at, (1.0 / tl.log2(place.to(tl.float64) + 2.0)).to(tl.float32), mask=in_i)
            tl.store(ordered + base + place, s, mask=in_i)
            tl.store(ordered_gain + base + place, g, mask=in_i)
            tl.store(order + base + place, i, mask=in_i)
            if b == 0:
                m = tl.maximum(i, 1).to(tl.float64)
                step = 1.0 / tl.log2(m + 1.0) - 1.0 / tl.log2(m + 2.0)
                tl.store(steps + i, tl.where(i > 0, step, 0.0).to(tl.float32), mask=in_i)
