"""Randomness of the losses: given as noise, or drawn from the caller's generator, or from torch's global one."""

import math

import torch
from torch import Tensor

from rankgrad.core.operators import has_values


def gumbel(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard Gumbel noise, -log(-log U), of the dtype and device of `like`; None draws from torch's global generator."""
    check_generator(generator)
    draws = torch.empty(shape, dtype=like.dtype, device=like.device)
    draws.exponential_(generator=generator)
    return draws.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()


def check_generator(generator: torch.Generator | None) -> None:
    """A generator, or None for torch's global one, which `torch.manual_seed` makes repeatable."""
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise ValueError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")


def check_noise(noise: Tensor) -> None:
    """Given noise is a floating-point tensor."""
    if not isinstance(noise, Tensor) or not noise.is_floating_point():
        came = noise.dtype if isinstance(noise, Tensor) else type(noise).__name__
        raise ValueError(f"noise must be a floating-point tensor, got {came}")


def cleaned_noise(noise: Tensor, mask: Tensor) -> Tensor:
    """Given noise with zeros under the padding: on the lists' device and, checked on the CPU alone, finite at real documents."""
    if noise.device != mask.device:
        raise ValueError(f"noise must be on the scores' device {mask.device}, got {noise.device}")
    clean = torch.where(mask, noise, 0.0)
    if clean.device.type == "cpu" and clean.numel() and has_values(clean):
        lowest, highest = (float(bound) for bound in clean.aminmax())
        if not (lowest > -math.inf and highest < math.inf):
            raise ValueError("noise of real documents must be finite, got NaN or infinity")
    return clean
