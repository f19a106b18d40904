"""Dense all-reduce: the baseline, and the behavior of every method at density 1."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tritoncomm.algorithms.base import Algorithm, Bounds, Recipe, Stateless
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.rounds import Pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Recipe):
    """Deliver all entries in every step.

    ``density`` has no effect, so the repr does not show it. It is accepted because all recipes have this field.
    """

    name: ClassVar[str] = "dense"
    averages_when_dense: ClassVar[bool] = True
    density: float = dataclasses.field(default=1.0, repr=False)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. All entries are delivered."""
        return False

    def always_dense(self) -> bool:
        return True

    def build(self, numel: int, bounds: Bounds = ()) -> DenseAlgorithm:
        return DenseAlgorithm(numel)


class DenseAlgorithm(Algorithm):
    """One all-reduce of residual plus gradient."""

    goes_dense = True

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        return dense_exchange(acc, world_size)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        return cost.dense(self.numel, world_size)
