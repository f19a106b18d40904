"""Warm-up: take the first steps dense, then continue with a method at its own density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tritoncomm.algorithms.base import Algorithm, Bounds, check, check_at_least
from tritoncomm.algorithms.wrapper import WrapperAlgorithm, WrapperRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.quantized_mean import QuantizedMean
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels.formats import DENSE_FORMATS, FORMATS

_PHASE = "dense"


@dataclass(frozen=True, kw_only=True)
class Warmup(WrapperRecipe):
    """Run ``recipe`` at density 1 during the first ``steps`` steps.

    The step counter of ``recipe`` starts after the warm-up. ``values`` is the format in which values then travel in
    both directions, one of those of :class:`Quantized`. Every entry is delivered, and what quantization cuts off stays
    in the residual. This is not possible with a method whose dense steps do more than average gradients.
    """

    name: ClassVar[str] = "warmup"
    steps: int
    values: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "steps", whole=True)
        check(self, "recipe", not isinstance(self.recipe, WrapperRecipe), "must be a method, not a wrapper recipe")
        check(self, "values", self.values in DENSE_FORMATS, f"must be one of {', '.join(DENSE_FORMATS)}")
        exact = self.values == "fp32"
        fix = f"must be 'fp32' for {self.recipe.name!r}, whose dense steps may do more than average gradients"
        check(self, "values", exact or self.recipe.averages_when_dense, fix)
        object.__setattr__(self, "name", self.recipe.name)  # checkpoints and errors name the method

    def build(self, numel: int, bounds: Bounds = ()) -> WarmupAlgorithm:
        return WarmupAlgorithm(self, numel, bounds)


class WarmupAlgorithm(WrapperAlgorithm):
    """Count the steps, and delegate everything else to the method, at density 1 during the warm-up."""

    def __init__(self, recipe: Warmup, numel: int, bounds: Bounds) -> None:
        super().__init__(numel)
        self.recipe, self._bounds = recipe, bounds
        # Its messages have a fixed length, and so they may travel by collectives.
        is_static = getattr(recipe.recipe, "static", False) is True
        self._rounded = QuantizedMean(FORMATS[recipe.values], _PHASE, is_static)
        self._dense: Algorithm | None = None
        self._method: Algorithm | None = None
        self._take(0)

    def _take(self, taken: int) -> None:
        """Let so many steps be completed. ``inner`` is the algorithm of the next one."""
        self._taken, self.inner = taken, self._after(taken)

    def _after(self, taken: int) -> Algorithm:
        """Return the algorithm of the step after ``taken`` completed ones. The method is built when it begins."""
        if taken < self.recipe.steps:
            self._dense = self._dense or self.recipe.recipe.dense_form().build(self.numel, self._bounds)
            return self._dense
        self._method = self._method or self.recipe.recipe.build(self.numel, self._bounds)
        return self._method

    @property
    def is_dense(self) -> bool:
        """True if the next step is dense: because of the warm-up, or because all steps are."""
        return self.inner is self._dense or self.recipe.always_dense()

    @property
    def quantizes(self) -> bool:
        """True if :attr:`is_dense` holds, and the values of this step are quantized."""
        return self.recipe.values != "fp32" and self.inner is self._dense and not self.recipe.always_dense()

    @property
    def has_shared_verdict(self) -> bool:
        """See :attr:`Algorithm.has_shared_verdict`. All ranks check the same mean in a quantized step."""
        return self.quantizes or self.inner.has_shared_verdict

    @property
    def is_static(self) -> bool:
        return self._rounded.collective if self.quantizes else self.inner.is_static

    @property
    def state(self) -> tuple[int, Any]:
        """The number of completed steps, and the state of the inner algorithm."""
        return self._taken, self.inner.state

    @state.setter
    def state(self, state: tuple[int, Any]) -> None:
        taken, inner = state
        self._take(taken)
        if self.inner is self._dense:
            self._method = None  # it begins from scratch
        self.inner.state = inner

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        before = self.inner
        if self.quantizes:
            mean = yield from self._rounded.deliver_all(acc, rank, world_size)
        else:
            mean = yield from before.reduce(acc, rank, world_size)
        self.report = before.report
        self._take(self._taken + 1)
        return mean

    def carriers(self, world_size: int, *, ordinary: bool = False) -> Carriers:
        if ordinary:
            return self.recipe.recipe.build(self.numel, self._bounds).carriers(world_size, ordinary=True)
        return Carriers() if self.quantizes else self.inner.carriers(world_size)

    def prepare(self, acc: Accumulator, world_size: int) -> None:
        self.inner.prepare(acc, world_size)

    def dense_update(self, mean: torch.Tensor) -> torch.Tensor:
        """See :meth:`Algorithm.dense_update`. It belongs to the step that the inner algorithm is about to take."""
        return self.inner.dense_update(mean)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact in quantized steps. Ordinary ones follow."""
        if ordinary:
            return self.recipe.recipe.build(self.numel, self._bounds).predicted_traffic(world_size, ordinary=True)
        if not self.quantizes:
            return self.inner.predicted_traffic(world_size)
        return Forecast(self._rounded.traffic(self.numel, world_size))

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`. Copies the number of completed steps.

        A state that was saved without a warm-up counts as one after its warm-up.
        """
        if "taken" not in common:
            self._take(self.recipe.steps)
            self.inner.migrate(states, share, common)
            return
        self._take(int(common["taken"]))
        self.inner.migrate([state["inner"] for state in states], share, common["inner"])

    def common_state(self) -> dict[str, Any]:
        return {"taken": self._taken, "inner": self.inner.common_state()}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"taken", "inner"}:
            raise ConfigurationError(f"not a state of a warm-up: expected keys 'inner', 'taken', got {sorted(state)}")
        taken = int(state["taken"])
        self._after(taken).load_state_dict(state["inner"])
        self._take(taken)


def warmup_of(algorithm: Algorithm) -> WarmupAlgorithm | None:
    """Return the warm-up that ``algorithm`` is, or has inside, if any."""
    while isinstance(algorithm, WrapperAlgorithm):
        if isinstance(algorithm, WarmupAlgorithm):
            return algorithm
        algorithm = algorithm.inner
    return None
