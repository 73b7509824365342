"""Randomness of the losses: always the caller's, by a generator or as given noise."""

import torch
from torch import Tensor


def gumbel(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard Gumbel noise, -log(-log U), of the dtype and device of `like`; see `random_source` for `generator`."""
    draws = torch.empty(shape, dtype=like.dtype, device=like.device)
    draws.exponential_(generator=random_source(generator, like.device))
    return draws.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()


def random_source(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The caller's generator, or a fresh one seeded by the operating system: the global state is never touched."""
    if generator is None:
        generator = torch.Generator(device)
        generator.seed()
    elif not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    return generator


def check_noise(noise: Tensor) -> None:
    """Given noise is a floating-point tensor."""
    if not isinstance(noise, Tensor) or not noise.is_floating_point():
        came = noise.dtype if isinstance(noise, Tensor) else type(noise).__name__
        raise ValueError(f"noise must be a floating-point tensor, got {came}")


def refuse_bad_noise(noise: Tensor, mask: Tensor) -> None:
    """Given noise is on the lists' device and, checked on the CPU alone, finite at real documents."""
    if noise.device != mask.device:
        raise ValueError(f"noise must be on the scores' device {mask.device}, got {noise.device}")
    if noise.device.type == "cpu" and not bool((noise.isfinite() | ~mask).all()):
        raise ValueError("noise of real documents must be finite, got NaN or infinity")
