"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019) in one process, for comparison. PyTorch provides it as a DDP hook.

Each gradient matrix is averaged as a product of two factors of low rank. The factors come from one step of power
iteration, which starts from the factor of the last step. The approximation error is added to the next gradient. Vectors
travel dense. So do matrices whose factors would be at least half as large as the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tritoncomm import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Traffic


class PowerSGDWorld:
    """``world_size`` workers that average gradients of tensors of ``shapes``. Factors have up to ``rank`` columns.

    The first ``warmup`` steps are dense.
    """

    def __init__(self, world_size: int, shapes: Sequence[torch.Size], rank: int, warmup: int) -> None:
        self.world_size = world_size
        self.warmup = warmup
        self.shapes = list(shapes)
        self.steps = 0
        self.errors = torch.zeros(world_size, sum(shape.numel() for shape in shapes))
        self.words = 0
        generator = torch.Generator().manual_seed(0)
        self._right: list[torch.Tensor | None] = []
        for shape in shapes:
            rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
            width = min(rank, rows, columns)
            compresses = 2 * width * (rows + columns) < rows * columns
            self._right.append(torch.randn(columns, width, generator=generator) if compresses else None)

    def step(self, gradients: torch.Tensor) -> list[SparseVector]:
        """Return the mean of ``gradients`` (``[world_size, numel]``), the same for every worker."""
        total = gradients + self.errors
        self.steps += 1
        self.words = 0
        parts = torch.split(total, [shape.numel() for shape in self.shapes], dim=1)
        means = [self._average(index, part) for index, part in enumerate(parts)]
        mean = torch.cat(means)
        self.errors = total - mean if self.steps > self.warmup else torch.zeros_like(total)
        for index, error in enumerate(torch.split(self.errors, [shape.numel() for shape in self.shapes], dim=1)):
            if self._right[index] is None:  # travels dense, without error
                error.zero_()
        return [SparseVector.full(mean)] * self.world_size

    def _average(self, index: int, part: torch.Tensor) -> torch.Tensor:
        shape, right = self.shapes[index], self._right[index]
        if right is None or self.steps <= self.warmup:
            self.words += part.shape[1]
            return part.mean(0)
        matrices = part.view(self.world_size, shape[0], -1)
        left = torch.linalg.qr((matrices @ right).mean(0)).Q
        right = (matrices.transpose(1, 2) @ left).mean(0)
        self._right[index] = right
        self.words += left.numel() + right.numel()
        return (left @ right.t()).reshape(-1)

    @property
    def traffic(self) -> list[Traffic]:
        """What each worker sent in the last step, counted as ring all-reduces."""
        return [cost.all_reduce(self.words, cost.WORD, self.world_size)] * self.world_size
