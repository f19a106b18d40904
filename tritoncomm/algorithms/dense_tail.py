"""Small tensors at the end of the vector travel dense, in one all-reduce; the rest by any method.

A bias or the scale of a norm is a handful of values that every step should move; the few bytes that they take
are not worth a selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm import cost
from tritoncomm.accumulator import Accumulator
from tritoncomm.algorithms.base import Algorithm, Recipe, check, check_at_least
from tritoncomm.cost import Forecast, both
from tritoncomm.errors import NonFiniteError
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.sparse import SparseVector

_PHASE = "small tensors"


@dataclass(frozen=True, kw_only=True)
class DenseTail(Recipe):
    """The last ``tail`` coordinates, where small tensors are put, go dense; the others by ``recipe``."""

    name: ClassVar[str] = "dense_tail"
    recipe: Recipe
    tail: int
    density: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        check(self, "recipe", isinstance(self.recipe, Recipe), "give a recipe, for example OkTopk(density=0.01)")
        check_at_least(self, 0, "tail", whole=True)
        object.__setattr__(self, "density", self.recipe.density)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`."""
        self.recipe.check_world_size(world_size)

    def subgroups(self, world_size: int) -> list[tuple[int, ...]]:
        """See :meth:`Recipe.subgroups`."""
        return self.recipe.subgroups(world_size)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Recipe.check_optimizer`."""
        self.recipe.check_optimizer(optimizer)

    def build(self, numel: int) -> DenseTailAlgorithm:
        """See :meth:`Recipe.build`."""
        tail = min(self.tail, numel)
        return DenseTailAlgorithm(self.recipe.build(numel - tail), tail)


class DenseTailAlgorithm(Algorithm):
    """The inner algorithm for the head of the vector; the tail has no state and owes nothing."""

    def __init__(self, inner: Algorithm, tail: int) -> None:
        super().__init__(inner.numel + tail)
        self.inner = inner
        self.tail = tail

    @property
    def state(self) -> Any:
        """The inner algorithm's."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

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
        """See :meth:`Algorithm.ordinary_traffic`."""
        return self._with_tail(self.inner.ordinary_traffic(world_size), world_size)

    def _with_tail(self, forecast: Forecast, world_size: int) -> Forecast:
        if not self.tail:
            return forecast
        return Forecast({**forecast.phases, _PHASE: both(cost.all_reduce(self.tail, cost.WORD, world_size))})

    def inherit(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.inherit`."""
        assert isinstance(other, DenseTailAlgorithm)
        self.inner.inherit(other.inner)

    def follow(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.follow`."""
        assert isinstance(other, DenseTailAlgorithm)
        self.inner.follow(other.inner)

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`."""
        self.inner.migrate(states, share, common)

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`."""
        return self.inner.common_state()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Algorithm.state_dict`: the inner algorithm's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.load_state_dict`."""
        self.inner.load_state_dict(state)
