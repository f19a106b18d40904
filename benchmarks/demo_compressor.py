"""DeMo (Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024) in one process, for comparison.

Every worker adds its gradient to a momentum of its own. Each tensor is cut into chunks of at most 64 values per
dimension, and each chunk of the momentum is transformed by a DCT. The largest coefficients of each chunk are removed
from the momentum and gathered from all workers. A coefficient is averaged over the workers that sent it. The inverse
transform gives the update, of which the optimizer uses the sign. The momentum is not dense at the start, and no tensor
travels dense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tritoncomm import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Traffic

COUNT = 32  # coefficients of a chunk
SIDE = 64  # of a chunk
DECAY = 0.999  # of the momentum
COEFFICIENT_WORDS = 3  # a 64-bit index and an fp32 value, as the authors' code sends them


class DeMoWorld:
    """``world_size`` workers that exchange momenta of tensors of ``shapes``.

    They send ``count`` coefficients of each chunk. A step multiplies momenta by ``decay``.
    """

    def __init__(self, world_size: int, shapes: Sequence[torch.Size], count: int = COUNT, decay: float = DECAY) -> None:
        self.world_size = world_size
        self.momenta = torch.zeros(world_size, sum(shape.numel() for shape in shapes))
        self.words = 0
        self._count, self._decay = count, decay
        self._chunks = [_Chunks(shape, SIDE) for shape in shapes]
        self._sizes = [shape.numel() for shape in shapes]

    def step(self, gradients: torch.Tensor) -> list[SparseVector]:
        """Return the sign of the update for ``gradients`` (``[world_size, numel]``), the same for every worker."""
        self.momenta.mul_(self._decay).add_(gradients)
        self.words = 0
        parts = torch.split(self.momenta, self._sizes, dim=1)
        updates = [self._exchange(chunks, part) for chunks, part in zip(self._chunks, parts, strict=True)]
        return [SparseVector.full(torch.cat(updates).sign())] * self.world_size

    def _exchange(self, chunks: _Chunks, momenta: torch.Tensor) -> torch.Tensor:
        """Remove what is sent of one tensor from ``momenta`` (``[world_size, numel]``). Return the averaged update."""
        coefficients = chunks.transform(momenta)
        count = min(self._count, coefficients.shape[-1])
        places = coefficients.abs().topk(count, dim=-1).indices
        sent = torch.zeros_like(coefficients).scatter_(-1, places, coefficients.gather(-1, places))
        senders = torch.zeros_like(coefficients).scatter_(-1, places, 1.0).sum(0).clamp(min=1)
        momenta.sub_(chunks.inverse(sent))
        self.words += COEFFICIENT_WORDS * places[0].numel()
        return chunks.inverse((sent.sum(0) / senders).unsqueeze(0))[0]

    @property
    def traffic(self) -> list[Traffic]:
        """What each worker sent in the last step, counted as a ring all-gather."""
        return [cost.all_gather(self.words, cost.WORD, self.world_size)] * self.world_size


class _Chunks:
    """Cuts a tensor of ``shape`` into equal chunks of at most ``side`` per dimension, and transforms them."""

    def __init__(self, shape: torch.Size, side: int) -> None:
        rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        self.rows, self.columns = _largest_divisor(rows, side), _largest_divisor(columns, side)
        self.across = columns // self.columns
        self._left, self._right = _dct(self.rows), _dct(self.columns)

    def transform(self, values: torch.Tensor) -> torch.Tensor:
        """Return the coefficients (``[workers, chunks, values per chunk]``) of ``values`` (``[workers, numel]``)."""
        blocks = values.view(len(values), -1, self.rows, self.across, self.columns).transpose(2, 3)
        return (self._left @ blocks @ self._right.t()).reshape(len(values), -1, self.rows * self.columns)

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Return the values (``[workers, numel]``) of ``coefficients``."""
        blocks = coefficients.view(len(coefficients), -1, self.across, self.rows, self.columns)
        return (self._left.t() @ blocks @ self._right).transpose(2, 3).reshape(len(coefficients), -1)


def _largest_divisor(length: int, limit: int) -> int:
    return next(divisor for divisor in range(min(length, limit), 0, -1) if length % divisor == 0)


def _dct(length: int) -> torch.Tensor:
    """Return the matrix of the orthonormal DCT of type 2 (``[length, length]``)."""
    row = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    column = torch.arange(length, dtype=torch.float64).unsqueeze(0)
    matrix = torch.cos(math.pi / length * (column + 0.5) * row) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
