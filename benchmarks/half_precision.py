"""A dense exchange of gradients in fp16 in one process, for comparison. PyTorch provides it as a DDP hook."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tritoncomm import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Traffic

_BYTES = 2


@dataclass(frozen=True)
class HalfPrecision:
    """Settings of the exchange in fp16. There are none."""

    name: str = "dense, fp16"


class HalfPrecisionWorld:
    """``world_size`` workers that average fp16 gradients of ``numel`` values. Nothing is kept of what rounding loses.

    The mean is taken in fp32, which rounds less than the all-reduce in fp16 of a real backend.
    """

    def __init__(self, world_size: int, numel: int) -> None:
        self.world_size = world_size
        self.traffic = [Traffic()] * world_size
        self._each = cost.all_reduce(numel, _BYTES, world_size)

    def step(self, gradients: torch.Tensor) -> list[SparseVector]:
        """Return the mean of ``gradients`` (``[world_size, numel]``), the same for every worker."""
        self.traffic = [self._each] * self.world_size
        return [SparseVector.full(gradients.half().float().mean(0))] * self.world_size
