"""Real text that every Python installation contains: the source files of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tritoncomm.errors import ConfigurationError

# One file in ten is held out for validation.
HELD_OUT = 10


class Text(NamedTuple):
    """Training and validation text, as uint8 vectors of bytes."""

    train: torch.Tensor
    validation: torch.Tensor


def standard_library() -> Text:
    """Return the top-level modules of the standard library in the order of their names, split by file.

    Raises :class:`~tritoncomm.ConfigurationError` when there are too few source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(sources) < HELD_OUT:
        raise ConfigurationError(
            f"{folder} holds only {len(sources)} .py files: run the demo with a Python that includes library sources"
        )
    held_out = b"".join(sources[::HELD_OUT])
    kept = b"".join(s for i, s in enumerate(sources) if i % HELD_OUT)
    return Text(_vector(kept), _vector(held_out))


def batch(text: torch.Tensor, rows: int, context: int, seed: int, step: int, rank: int) -> torch.Tensor:
    """Return random windows, int64 ``[rows, context + 1]``. The same arguments give the same windows."""
    generator = np.random.default_rng([seed, step, rank])
    starts = torch.from_numpy(generator.integers(0, text.numel() - context, size=rows))
    return text[starts[:, None] + torch.arange(context + 1)].long()


def validation_batches(text: torch.Tensor, rows: int, context: int, count: int) -> list[torch.Tensor]:
    """Return ``count`` batches, spread evenly over ``text``. They are the same in every call."""
    starts = torch.linspace(0, text.numel() - context - 1, rows * count, dtype=torch.float32).long()
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return list(torch.split(windows, rows))


def _vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
