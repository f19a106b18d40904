"""Shared random-k: all workers use the same random coordinates, so only values are sent and summed densely.

"Sparsified SGD with Memory" (S. Stich, J.-B. Cordonnier, M. Jaggi, NeurIPS 2018), with random numbers that all workers
share. Each step draws one coordinate from each of k strata, without replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, Counted, Recipe, check_number
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange, shared_mean
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.shared_random import Words, draws
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern

import tritoncomm_kernels as kernels

_PHASE = "values"
_HALF = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True)
class RandomK(Recipe):
    """Deliver k random coordinates per step. They are drawn from ``seed``, which must be the same on all workers."""

    name: ClassVar[str] = "random_k"
    averages_when_dense: ClassVar[bool] = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "seed", whole=True)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. Entries are drawn at random."""
        return False

    def build(self, numel: int, bounds: Bounds = ()) -> RandomKAlgorithm:
        return RandomKAlgorithm(self, numel)


class RandomKAlgorithm(BudgetedAlgorithm):
    """Each step draws one coordinate per stratum. Stratum i is ``[i n / k, (i + 1) n / k)``."""

    state: Counted

    def __init__(self, recipe: RandomK, numel: int) -> None:
        super().__init__(numel)
        self.seed = recipe.seed
        self.k = entries_to_keep(numel, recipe.density)
        self.state = Counted()

    @property
    def has_shared_verdict(self) -> bool:
        return True

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        indices = kernels.copied_to(self.indices(self.state.step), acc.device)
        mean = yield from shared_mean(acc, indices, world_size, phase=_PHASE)
        self.state = replace(self.state, step=self.state.step + 1)
        return mean

    def indices(self, step: int) -> torch.Tensor:
        """Return the coordinates of ``step``, ascending int32 ``[k]``."""
        edges = np.arange(self.k + 1, dtype=np.int64) * self.numel // self.k
        drawn = edges[:-1] + all_below(draws(self.seed, step, 0, self.k), np.diff(edges))
        return torch.from_numpy(drawn.astype(np.int32))

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1)/P values."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        return Forecast({_PHASE: both(cost.all_reduce(self.k, cost.WORD, world_size))})


def all_below(bits: Words, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Apply :func:`~tritoncomm.primitives.shared_random.below` elementwise. ``bounds`` must be below 2^32."""
    wide = bounds.astype(np.uint64)
    high, low = bits >> np.uint64(32), bits & _HALF
    product = (high * wide + ((low * wide) >> np.uint64(32))) >> np.uint64(32)
    return np.asarray(product, dtype=np.int64)
