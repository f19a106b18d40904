"""Gradients for trying methods without a model: layered and heavy-tailed, concentrated in one range, or recorded."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from tritoncomm.errors import ConfigurationError

LAYERS = 24
SIGNAL = 0.3  # scale of the part that all workers share, relative to the noise
DECADES = 1.5  # the scales of the layers span this many powers of ten
HOT = 0.02  # fraction of the vector that is non-zero in adversarial gradients


class Gradients(Protocol):
    """One rank's gradients: an fp32 tensor ``[numel]`` for each step."""

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient of ``step`` as a new tensor."""


class LayeredGradients:
    """Heavy-tailed (Laplace) gradients with one scale per layer.

    A gradient is a signal that all ranks share plus noise of each rank and step.
    """

    def __init__(self, numel: int, rank: int, *, seed: int = 0) -> None:
        self.scale, self.signal = _common(numel, seed)
        self.noise = _two_sided_exponential(numel, torch.Generator().manual_seed(1_000_003 * seed + 1 + rank))

    def at(self, step: int) -> torch.Tensor:
        """See :meth:`Gradients.at`. The noise is the same vector in every step, rotated by another offset."""
        shift = step * 7_368_787 % max(1, self.noise.numel())
        return self.noise.roll(shift).add_(self.signal).mul_(self.scale)


class AdversarialGradients:
    """Gradients that are non-zero in one narrow range only: the worst case for a fixed partition."""

    def __init__(self, numel: int, rank: int, *, seed: int = 0) -> None:
        self.numel = numel
        self.inside = LayeredGradients(max(1, int(numel * HOT)), rank, seed=seed) if numel else None
        self.start = random.Random(seed).randrange(max(1, numel - int(numel * HOT)))  # noqa: S311 - not for secrets

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient in ``step``: fp32 ``[numel]``."""
        gradient = torch.zeros(self.numel, dtype=torch.float32)
        if self.inside is not None:
            part = self.inside.at(step)
            gradient[self.start : self.start + part.numel()] = part
        return gradient


class RecordedGradients:
    """Real gradients from ``python -m tritoncomm demo --record``, tiled or cut to ``numel``.

    ``recording`` is the tensor that :func:`load_recording` returns. Ranks and steps beyond the recorded ones reuse
    these. Such a rank rotates its gradients, because otherwise many workers would be copies of a few.
    """

    def __init__(self, numel: int, rank: int, recording: torch.Tensor) -> None:
        self.numel = numel
        self.recording = recording[:, rank % recording.shape[1]]
        self.shift = rank // recording.shape[1] * 9973

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient in ``step``: fp32 ``[numel]``."""
        row = self.recording[step % len(self.recording)].float().roll(self.shift)
        return row.repeat(-(-self.numel // row.numel()))[: self.numel].clone()


def load_recording(path: Path) -> torch.Tensor:
    """Return the gradients, ``[steps, workers, numel]``, from a file that ``demo --record`` wrote.

    Raises :class:`~tritoncomm.ConfigurationError` for any other file.
    """
    try:
        recording = torch.load(path, weights_only=True)["gradients"]
    except Exception as error:
        raise ConfigurationError(
            f"{path} is not a recording: pass layered, adversarial, or a file that demo --record wrote ({error})"
        ) from error
    if not isinstance(recording, torch.Tensor) or recording.dim() != 3 or 0 in recording.shape:  # noqa: PLR2004
        raise ConfigurationError(
            f"{path} does not hold gradients of shape [steps, workers, numel]: record it again with demo --record"
        )
    if not recording.is_floating_point() or not bool(recording.isfinite().all()):
        raise ConfigurationError(
            f"{path} must hold finite floating-point gradients, got dtype {recording.dtype} or a NaN or Inf: "
            "record it again with demo --record"
        )
    return recording


@lru_cache(maxsize=1)
def _common(numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and signal. They are cached, because all ranks of a process share them."""
    generator = torch.Generator().manual_seed(1_000_003 * seed)
    scale = torch.logspace(0, -DECADES, LAYERS, base=10)[torch.randperm(LAYERS, generator=generator)]
    signal = SIGNAL * _two_sided_exponential(numel, generator)
    return scale.repeat_interleave(-(-numel // LAYERS))[:numel], signal


def _two_sided_exponential(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``numel`` values of the Laplace distribution."""
    signs = torch.randint(0, 2, (numel,), generator=generator).mul_(2).sub_(1)
    return torch.empty(numel, dtype=torch.float32).exponential_(generator=generator).mul_(signs)
