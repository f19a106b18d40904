"""An estimate of the norm of the mean of vectors, from a short sketch of each.

A sketch has ``WIDTH`` sums of entries with random signs. The sum of the sketches of all ranks is the sketch of the sum
of their vectors, and the expectation of its squared norm is that of this sum: M. Charikar, K. Chen, M. Farach-Colton,
"Finding Frequent Items in Data Streams" (ICALP 2002); N. Alon, Y. Matias, M. Szegedy, "The Space Complexity of
Approximating the Frequency Moments" (STOC 1996). The standard deviation of the norm is about ``1 / sqrt(2 * WIDTH)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritoncomm.scheduler.rounds import AllReduce, Pattern

WIDTH = 509  # 3 % standard deviation
# A long vector is added up in pieces of this length first, each with a sign. It is a prime: at the same place of two
# pieces there are then entries of different columns of a matrix. Those of one column are correlated.
_PIECE = 65_521
_PHASE = "gradient norm"


class Signs(NamedTuple):
    """The signs of the pieces of a vector, and of the entries of a piece, fp32. They are the same in every step."""

    pieces: torch.Tensor
    entries: torch.Tensor

    @classmethod
    def of(cls, numel: int, device: torch.device | str) -> Signs:
        """Return the signs for vectors of ``numel`` entries."""
        generator = torch.Generator().manual_seed(WIDTH)
        entries, pieces = (
            torch.randint(0, 2, (count,), generator=generator, dtype=torch.float32).mul_(2).sub_(1).to(device)
            for count in (_PIECE, -(-numel // _PIECE))
        )
        return cls(pieces, entries)


def sketch(vector: torch.Tensor, signs: Signs) -> torch.Tensor:
    """Return the sketch of ``vector`` (fp32 ``[numel]``), fp32 ``[WIDTH]``. It reads ``vector`` once."""
    pieces, rest = divmod(vector.numel(), _PIECE)
    piece = torch.mv(vector[: pieces * _PIECE].view(pieces, _PIECE).t(), signs.pieces[:pieces])
    if rest:
        piece[:rest] += signs.pieces[pieces] * vector[pieces * _PIECE :]
    piece *= signs.entries
    return torch.nn.functional.pad(piece, (0, -_PIECE % WIDTH)).view(-1, WIDTH).sum(0)


def norm_of_mean(vector: torch.Tensor, signs: Signs, world_size: int) -> Pattern[torch.Tensor]:
    """Return an estimate of the norm of the mean of ``vector`` over the ranks, fp32 ``[]``, the same on all ranks."""
    total = yield AllReduce(_PHASE, sketch(vector, signs))
    norm: torch.Tensor = total.norm()
    return norm / world_size
