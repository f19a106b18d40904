"""Send small tensors dense, in one all-reduce, and the rest of the vector by any method.

A bias or the scale of a norm layer has only a few values, and every step should update them. They take so few bytes
that a selection is not worthwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, check_at_least
from tritoncomm.algorithms.wrapper import WrapperAlgorithm, WrapperRecipe
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllReduce, Pattern

_PHASE = "small tensors"


@dataclass(frozen=True, kw_only=True)
class DenseTail(WrapperRecipe):
    """Send the last ``tail`` coordinates dense and the others by ``recipe``. Small tensors are placed last."""

    name: ClassVar[str] = "dense_tail"
    tail: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "tail", whole=True)

    def build(self, numel: int) -> DenseTailAlgorithm:
        """See :meth:`Recipe.build`."""
        tail = min(self.tail, numel)
        return DenseTailAlgorithm(self.recipe.build(numel - tail), tail)


class DenseTailAlgorithm(WrapperAlgorithm):
    """Run the inner algorithm on the head of the vector. The tail has no state and no residual."""

    def __init__(self, inner: Algorithm, tail: int) -> None:
        super().__init__(inner.numel + tail)
        self._inner = inner
        self.tail = tail

    @property
    def inner(self) -> Algorithm:
        """The algorithm for the head of the vector."""
        return self._inner

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if not self.tail:
            mean = yield from self.inner.reduce(acc, rank, world_size)
            self.report = self.inner.report
            return mean
        self.inner.prepare(acc, world_size)
        head, small = acc.split(self.inner.numel)
        sums = small.dense()
        if world_size > 1:
            sums = yield AllReduce(_PHASE, sums)
        if kernels.has_non_finite(sums):
            raise NonFiniteError("the sum of the gradients of small tensors has a NaN or Inf; nothing was applied")
        mean = yield from self.inner.reduce(head, rank, world_size)
        dense = self.inner.dense_update(sums / world_size)
        if kernels.has_non_finite(dense):
            raise NonFiniteError("the update of small tensors has a NaN or Inf; nothing was applied")
        small.clear_all()
        acc.absorb(head, small)
        self.report = self.inner.report
        values = torch.cat([mean.values, dense])
        if mean.is_full:
            return SparseVector.full(values)
        places = torch.arange(self.inner.numel, self.numel, dtype=torch.int32, device=values.device)
        return SparseVector(torch.cat([mean.indices, places]), values, self.numel)

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`."""
        return self._with_tail(self.inner.predicted_traffic(world_size), world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`. The dense tail is added to the traffic of the inner method."""
        return self._with_tail(self.inner.ordinary_traffic(world_size), world_size)

    def _with_tail(self, forecast: Forecast, world_size: int) -> Forecast:
        if not self.tail:
            return forecast
        return Forecast({**forecast.phases, _PHASE: both(cost.all_reduce(self.tail, cost.WORD, world_size))})
