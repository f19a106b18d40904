"""Gradients to try methods on, without a model: layered and heavy-tailed, all in one place, or recorded."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from tritoncomm.errors import ConfigurationError

LAYERS = 24
SIGNAL = 0.3  # size of the part that all workers have in common, beside the noise
DECADES = 1.5  # how far the scales of layers lie apart
HOT = 0.02  # share of the vector that holds everything in adversarial gradients


class Gradients(Protocol):
    """One rank's gradients, fp32 ``[numel]`` for every step."""

    def at(self, step: int) -> torch.Tensor:
        """The gradient of ``step``; a new tensor."""


class LayeredGradients:
    """Heavy-tailed (Laplace), with a scale per layer: a signal common to all ranks, and noise of each rank and step."""

    def __init__(self, numel: int, rank: int, *, seed: int = 0) -> None:
        self.scale, self.signal = _common(numel, seed)
        self.noise = _two_sided_exponential(numel, torch.Generator().manual_seed(1_000_003 * seed + 1 + rank))

    def at(self, step: int) -> torch.Tensor:
        """See :meth:`Gradients.at`; the noise is the same stretch of numbers, elsewhere each time."""
        shift = step * 7_368_787 % max(1, self.noise.numel())
        return self.noise.roll(shift).add_(self.signal).mul_(self.scale)


class AdversarialGradients:
    """Everything in one narrow stretch, which no fixed partition is ready for."""

    def __init__(self, numel: int, rank: int, *, seed: int = 0) -> None:
        self.numel = numel
        self.inside = LayeredGradients(max(1, int(numel * HOT)), rank, seed=seed) if numel else None
        self.start = random.Random(seed).randrange(max(1, numel - int(numel * HOT)))  # noqa: S311 - not for secrets

    def at(self, step: int) -> torch.Tensor:
        """See :meth:`Gradients.at`."""
        gradient = torch.zeros(self.numel)
        if self.inside is not None:
            part = self.inside.at(step)
            gradient[self.start : self.start + part.numel()] = part
        return gradient


class RecordedGradients:
    """What ``python -m tritoncomm demo --record`` kept: real gradients, tiled or cut to ``numel``.

    Ranks and steps beyond those recorded start over, each rank a little further along the vector, so that
    many workers are not copies of a few.
    """

    def __init__(self, numel: int, rank: int, recording: torch.Tensor) -> None:
        self.numel = numel
        self.recording = recording[:, rank % recording.shape[1]]
        self.shift = rank // recording.shape[1] * 9973

    def at(self, step: int) -> torch.Tensor:
        """See :meth:`Gradients.at`."""
        row = self.recording[step % len(self.recording)].float().roll(self.shift)
        return row.repeat(-(-self.numel // row.numel()))[: self.numel].clone()


def load_recording(path: Path) -> torch.Tensor:
    """``[steps, workers, numel]`` from a file that the demo wrote.

    Raises :class:`~tritoncomm.ConfigurationError` for anything else.
    """
    try:
        recording = torch.load(path, weights_only=True)["gradients"]
    except Exception as error:
        raise ConfigurationError(
            f"{path} is not a recording of the demo (--record), nor one of layered and adversarial: {error}"
        ) from error
    if not isinstance(recording, torch.Tensor) or recording.dim() != 3 or 0 in recording.shape:  # noqa: PLR2004
        raise ConfigurationError(f"{path} does not hold gradients of [steps, workers, elements]: record it anew")
    if not recording.is_floating_point() or not bool(recording.isfinite().all()):
        raise ConfigurationError(f"{path} holds {recording.dtype} values, not all of them finite: record it anew")
    return recording


@lru_cache(maxsize=1)
def _common(numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and signal, of which all ranks in a process share one copy."""
    generator = torch.Generator().manual_seed(1_000_003 * seed)
    scale = torch.logspace(0, -DECADES, LAYERS, base=10)[torch.randperm(LAYERS, generator=generator)]
    signal = SIGNAL * _two_sided_exponential(numel, generator)
    return scale.repeat_interleave(-(-numel // LAYERS))[:numel], signal


def _two_sided_exponential(numel: int, generator: torch.Generator) -> torch.Tensor:
    """The Laplace distribution."""
    signs = torch.randint(0, 2, (numel,), generator=generator).mul_(2).sub_(1)
    return torch.empty(numel).exponential_(generator=generator).mul_(signs)
