"""Dense steps first, then another method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tritoncomm import cost
from tritoncomm.accumulator import Accumulator
from tritoncomm.algorithms.base import Algorithm, Recipe, check_at_least
from tritoncomm.collectives import dense_exchange
from tritoncomm.cost import Forecast
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.sparse import SparseVector


@dataclass(frozen=True, kw_only=True)
class Warmup(Recipe):
    """``steps`` dense steps, then ``recipe``, whose own step counter starts only there."""

    name: ClassVar[str] = "warmup"
    recipe: Recipe
    steps: int
    density: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        check_at_least(self, 0, "steps", whole=True)
        object.__setattr__(self, "density", self.recipe.density)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`."""
        self.recipe.check_world_size(world_size)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Recipe.check_optimizer`."""
        self.recipe.check_optimizer(optimizer)

    def build(self, numel: int) -> WarmupAlgorithm:
        """See :meth:`Recipe.build`."""
        return WarmupAlgorithm(self.recipe.build(numel), self.steps)


class WarmupAlgorithm(Algorithm):
    """Counts the dense steps; everything else is the inner algorithm's."""

    def __init__(self, inner: Algorithm, steps: int) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.steps = steps
        self._taken = 0

    @property
    def state(self) -> tuple[int, Any]:
        """Dense steps taken, and the inner state."""
        return self._taken, self.inner.state

    @state.setter
    def state(self, state: tuple[int, Any]) -> None:
        self._taken, self.inner.state = state

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self._taken >= self.steps:
            mean = yield from self.inner.reduce(acc, rank, world_size)
            self.report = self.inner.report
            return mean
        mean = yield from dense_exchange(acc, world_size)
        self._taken += 1
        return mean

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`."""
        if self._taken >= self.steps:
            return self.inner.predicted_traffic(world_size)
        return cost.dense(self.numel, world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`."""
        return self.inner.ordinary_traffic(world_size)

    def inherit(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.inherit`: the steps taken."""
        assert isinstance(other, WarmupAlgorithm)
        self._taken = other._taken  # noqa: SLF001 - of the same class

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`."""
        return {"taken": self._taken, "inner": self.inner.common_state()}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Algorithm.state_dict`."""
        return {"taken": self._taken, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.load_state_dict`."""
        if set(state) != {"taken", "inner"}:
            raise ConfigurationError(f"this is not a state of a warm-up: it has {sorted(state)}")
        self.inner.load_state_dict(state["inner"])
        self._taken = int(state["taken"])
