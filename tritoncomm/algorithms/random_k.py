"""Shared random-k: the same random coordinates on all workers, so that values alone are summed densely.

"Sparsified SGD with Memory" (S. Stich, J.-B. Cordonnier, M. Jaggi, NeurIPS 2018) with a generator that all
workers share. One coordinate out of each of k strata, without replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from tritoncomm.algorithms.base import Algorithm, Recipe, check_number
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange, shared_sum
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.shared_random import all_below, draws
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, Formula, both
from tritoncomm.scheduler.rounds import Pattern


@dataclass(frozen=True, kw_only=True)
class RandomK(Recipe):
    """k random coordinates per step, drawn from ``seed``, which is common to all workers."""

    name: ClassVar[str] = "random_k"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "seed", whole=True)

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`."""
        words = 2 * entries_to_keep(numel, self.density) * (world_size - 1) / world_size
        return Formula(2 * cost.log2(world_size), words, words)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`: they are drawn."""
        return False

    def build(self, numel: int) -> RandomKAlgorithm:
        """See :meth:`Recipe.build`."""
        return RandomKAlgorithm(self, numel)


@dataclass(frozen=True)
class RandomKState:
    """Exchanges that went through: what the next coordinates are drawn from."""

    step: int = 0


class RandomKAlgorithm(Algorithm):
    """Stratum i is ``[i n / k, (i + 1) n / k)``; every step draws one coordinate of each."""

    state: RandomKState

    def __init__(self, recipe: RandomK, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = RandomKState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        indices = self.indices(self.state.step).to(acc.device)
        finite = acc.is_finite()
        own = acc.dense()[indices.long()]
        sums = yield from shared_sum(own, finite, world_size, phase="values")
        acc.clear(indices)
        acc.selected = self.k
        self.state = replace(self.state, step=self.state.step + 1)
        return SparseVector(indices, sums / world_size, self.numel)

    def indices(self, step: int) -> torch.Tensor:
        """The coordinates of ``step``, ascending int32 ``[k]``."""
        edges = np.arange(self.k + 1, dtype=np.int64) * self.numel // self.k
        drawn = edges[:-1] + all_below(draws(self.recipe.seed, step, 0, self.k), np.diff(edges))
        return torch.from_numpy(drawn.astype(np.int32))

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: 2k(P-1)/P words, exactly."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        return Forecast({"values": both(cost.all_reduce(self.k, cost.WORD, world_size))})
