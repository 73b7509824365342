"""What every loss kernel needs of a list: clean values, gains, whether the list is informative, and what that scales."""

import triton
import triton.language as tl

GAINS = {"exp2": 0, "linear": 1}  # 2 = given as a tensor
_TAU = (1e-37, 1e37)  # kernels take numbers as float32; a temperature beyond these limits has no further effect


def temperature(tau: float) -> float:
    """A temperature that float32 can hold."""
    return min(max(tau, _TAU[0]), _TAU[1])


@triton.jit
def cleaned(scores, labels, mask, at, inside, MASKED: tl.constexpr = True):
    """Score, label, whether the document is real and whether a value of it is bad; zeros where it is bad or padding."""
    s = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(labels + at, mask=inside, other=0).to(tl.float64)
    if MASKED:
        real = tl.load(mask + at, mask=inside, other=0) != 0
    else:
        real = inside
    good = (tl.abs(s) < float("inf")) & (y >= 0.0) & (y < float("inf"))  # NaN fails every comparison
    usable = real & good
    return tl.where(usable, s, 0.0), tl.where(usable, y, 0.0), real, real & (good == 0)


@triton.jit
def real_at(mask, at, inside, MASKED: tl.constexpr):
    """Whether documents are real."""
    real = inside
    if MASKED:
        real = tl.load(mask + at, mask=inside, other=0) != 0
    return real


@triton.jit
def log1p(e):
    """log(1 + e) for 0 <= e <= 1 to 1e-7 of itself: 2 artanh(e / (2 + e))."""
    z = e / (2.0 + e)
    q = z * z
    p = 1.0 / 13.0
    p = p * q + 1.0 / 11.0
    p = p * q + 1.0 / 9.0
    p = p * q + 1.0 / 7.0
    p = p * q + 1.0 / 5.0
    p = p * q + 1.0 / 3.0
    return 2.0 * z * (p * q + 1.0)


@triton.jit
def gains_of(y, real, given, at, inside, GAIN: tl.constexpr):
    """Gains of labels y in float64, 0 under the padding."""
    if GAIN == 0:
        g = tl.exp2(y) - 1.0
    elif GAIN == 1:
        g = y
    else:
        g = tl.load(given + at, mask=inside, other=0.0)
    return tl.where(real, g, 0.0)


@triton.jit
def is_positive_or_nan(ideal):
    """Whether a list has an ideal DCG; NaN counts as one, so that the loss shows it."""
    return (ideal <= 0.0) == 0


@triton.jit
def has_relevant(documents, highest, ideal):
    """Two documents, one of them relevant, and an ideal DCG: the rule of `rankgrad.losses.informative`."""
    return (documents >= 2) & (highest > 0) & is_positive_or_nan(ideal)


@triton.jit
def store_scales(value_scale, grad_scale, weight, informative, valid):
    """What a list's value and gradient are multiplied by, and whether it counts in the mean.

    1 where the list is informative and 0 where not; NaN where it is not valid, but a list that is not informative has a
    gradient of 0 even then.
    """
    one = tl.where(informative, 1.0, 0.0)
    tl.store(value_scale, tl.where(valid, one, float("nan")))
    tl.store(grad_scale, tl.where(valid | (informative == 0), one, float("nan")))
    tl.store(weight, tl.where(valid, one, 1.0))


@triton.jit
def over_ideal(gain, ideal, informative):
    """Gains divided by the ideal DCG; 0 in other lists, whose gains need not be finite and must not reach the sums."""
    return tl.where(informative, gain / tl.where(informative, ideal, 1.0), 0.0)
