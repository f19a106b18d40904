"""Gradients for trying methods without a model: layered and heavy-tailed, or concentrated in one range."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch

LAYERS = 24
SIGNAL = 0.3  # scale of the part that all workers share, relative to the noise
DECADES = 1.5  # the scales of the layers span this many powers of ten
HOT = 0.02  # fraction of the vector that is non-zero in adversarial gradients


class Gradients(Protocol):
    """One rank's gradients: an fp32 tensor ``[numel]`` for each step."""

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient of ``step`` as a new tensor."""


Source = Callable[[int, int], Gradients]  # (numel, rank) -> gradients


class LayeredGradients:
    """Heavy-tailed (Laplace) gradients with one scale per layer.

    A gradient is a signal that all ranks share plus noise of each rank and step.
    """

    def __init__(self, numel: int, rank: int) -> None:
        self.scale, self.signal = _common(numel)
        self.noise = _two_sided_exponential(numel, torch.Generator().manual_seed(1 + rank))

    def at(self, step: int) -> torch.Tensor:
        """See :meth:`Gradients.at`. The noise is the same vector in every step, rotated by another offset."""
        shift = step * 7_368_787 % max(1, self.noise.numel())
        return self.noise.roll(shift).add_(self.signal).mul_(self.scale)


class AdversarialGradients:
    """Gradients that are non-zero in one narrow range only: the worst case for a fixed partition."""

    def __init__(self, numel: int, rank: int) -> None:
        self.numel = numel
        self.inside = LayeredGradients(max(1, int(numel * HOT)), rank) if numel else None
        self.start = random.Random(0).randrange(max(1, numel - int(numel * HOT)))  # noqa: S311 - not for secrets

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient in ``step``: fp32 ``[numel]``."""
        gradient = torch.zeros(self.numel, dtype=torch.float32)
        if self.inside is not None:
            part = self.inside.at(step)
            gradient[self.start : self.start + part.numel()] = part
        return gradient


# By the names of ``simulate --gradients``.
SOURCES: dict[str, Source] = {"layered": LayeredGradients, "adversarial": AdversarialGradients}


@lru_cache(maxsize=1)
def _common(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and signal. They are cached, because all ranks of a process share them."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -DECADES, LAYERS, base=10)[torch.randperm(LAYERS, generator=generator)]
    signal = SIGNAL * _two_sided_exponential(numel, generator)
    return scale.repeat_interleave(-(-numel // LAYERS))[:numel], signal


def _two_sided_exponential(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``numel`` values of the Laplace distribution."""
    signs = torch.randint(0, 2, (numel,), generator=generator).mul_(2).sub_(1)
    return torch.empty(numel, dtype=torch.float32).exponential_(generator=generator).mul_(signs)
