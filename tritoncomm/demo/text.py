"""Real text that every Python installation carries: the standard library's own source files."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tritoncomm.errors import ConfigurationError

# One file in ten is never trained on.
HELD_OUT = 10


class Text(NamedTuple):
    """Bytes as uint8 vectors."""

    train: torch.Tensor
    validation: torch.Tensor


def standard_library() -> Text:
    """The top-level modules of the standard library, in name order, split by file."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(sources) < HELD_OUT:
        raise ConfigurationError(
            f"{folder} holds {len(sources)} source files: run the demo with a Python that ships them"
        )
    held_out = b"".join(sources[::HELD_OUT])
    kept = b"".join(s for i, s in enumerate(sources) if i % HELD_OUT)
    return Text(_vector(kept), _vector(held_out))


def batch(text: torch.Tensor, rows: int, context: int, seed: int, step: int, rank: int) -> torch.Tensor:
    """Random windows, int64 ``[rows, context + 1]``, a function of seed, step and rank alone."""
    generator = np.random.default_rng([seed, step, rank])
    starts = torch.from_numpy(generator.integers(0, text.numel() - context, size=rows))
    return text[starts[:, None] + torch.arange(context + 1)].long()


def validation_batches(text: torch.Tensor, rows: int, context: int, count: int) -> list[torch.Tensor]:
    """The same ``count`` batches every time, spread evenly over ``text``."""
    starts = torch.linspace(0, text.numel() - context - 1, rows * count).long()
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return list(torch.split(windows, rows))


def _vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
