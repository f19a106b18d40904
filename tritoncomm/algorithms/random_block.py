"""Random-block sparsification: all workers send the same contiguous block of coordinates, summed densely.

N. Foroutan Eghlidi, M. Jaggi, "Sparse Communication for Training Deep Networks", 2020. The method needs no selection
and sends no indices. Its volume does not depend on the number of workers. The drawback is that a coordinate waits for
its turn even if it is large.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from tritoncomm.algorithms.base import Algorithm, Bounds, Counted, StaticRecipe, check, check_at_least, check_number
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange, shared_mean
from tritoncomm.primitives.quantized_mean import QuantizedMean
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.shared_random import below, draw, draws
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels.formats import DENSE_FORMATS, FORMATS

_PHASE = "block"

# Below this density, error feedback is stable only at learning rates far below those of dense training.
_SAFE_DENSITY = 1 / 32


@dataclass(frozen=True, kw_only=True)
class RandomBlock(StaticRecipe):
    """Settings of random-block sparsification.

    ``mode="perm"`` visits the blocks of a grid in random order. Each block is visited once per round, and every round
    has a new order. ``mode="grid"`` draws one block of the grid in each step. ``mode="wrap"`` draws a block that may
    start at any coordinate and wraps around at the end. Blocks of a grid are rounded up to a multiple of ``alignment``
    elements. ``seed`` must be the same on all workers.

    ``values`` is the format in which values travel, one of those of :class:`Quantized`. What quantization cuts off
    stays in the residuals. A coordinate whose mean is rounded to zero is not delivered. Messages always have a fixed
    length. The static form sends quantized values by collectives.

    The gradients of a waiting coordinate accumulate and arrive as one large update. With error feedback, gradient
    descent is therefore stable only up to a lower learning rate. For ``perm`` the limit is about ``density`` times that
    of dense training, and for the other modes half of this. The constructor warns if the density is below 1/32. Set
    ``reduced_lr`` to state that the learning rate has been lowered accordingly.
    """

    name: ClassVar[str] = "random_block"
    averages_when_dense: ClassVar[bool] = True
    mode: str = "perm"
    seed: int = 0
    alignment: int = 128
    reduced_lr: bool = False
    values: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "mode", self.mode in ("perm", "grid", "wrap"), "must be 'perm', 'grid' or 'wrap'")
        check_number(self, "seed", whole=True)
        check_at_least(self, 1, "alignment", whole=True)
        check(self, "values", self.values in DENSE_FORMATS, f"must be one of {', '.join(DENSE_FORMATS)}")
        if self.density < _SAFE_DENSITY and not self.reduced_lr:
            ceiling = self.density * (1.0 if self.mode == "perm" else 0.5)
            warnings.warn(
                f"random_block at density {self.density}: residuals arrive as large updates, and training is stable "
                f"only up to about {ceiling:.2g} of the learning rate that is stable for dense training; lower the "
                "learning rate and set reduced_lr=True, or use a density of at least 1/32",
                stacklevel=3,
            )

    def block_size(self, numel: int) -> int:
        """Return the number of elements per block for a vector of ``numel`` elements."""
        size = entries_to_keep(numel, self.density)
        line = 1 if self.mode == "wrap" else self.alignment
        return min(numel, -(-size // line) * line)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. Entries are drawn at random."""
        return False

    def build(self, numel: int, bounds: Bounds = ()) -> RandomBlockAlgorithm:
        return RandomBlockAlgorithm(self, numel)


class RandomBlockAlgorithm(Algorithm):
    """The block of a step depends only on seed and step."""

    state: Counted
    has_shared_verdict = True

    def __init__(self, recipe: RandomBlock, numel: int) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.size = recipe.block_size(numel)
        self.rounded = QuantizedMean(FORMATS[recipe.values], _PHASE, self.static)
        self.state = Counted()
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def goes_dense(self) -> bool:
        return self.size >= self.numel

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        ranges = self.ranges(self.state.step)
        indices = torch.cat([torch.arange(*bounds, dtype=torch.int32, device=acc.device) for bounds in ranges])
        if self.recipe.values == "fp32":
            mean = yield from shared_mean(acc, indices, world_size, phase=_PHASE)
        else:
            mean = yield from self.rounded.deliver(acc, indices, rank, world_size)
        self.state = replace(self.state, step=self.state.step + 1)
        return mean

    def ranges(self, step: int) -> list[tuple[int, int]]:
        """Return the coordinates of ``step``: one range, or two if the block wraps around."""
        seed, mode = self.recipe.seed, self.recipe.mode
        if mode == "wrap":
            start = below(draw(seed, step), self.numel)
            stop = start + self.size
            return [(0, stop - self.numel), (start, self.numel)] if stop > self.numel else [(start, stop)]
        count = -(-self.numel // self.size)
        block = below(draw(seed, step), count) if mode == "grid" else self._permuted(step, count)
        return [(block * self.size, min((block + 1) * self.size, self.numel))]

    def _permuted(self, step: int, count: int) -> int:
        """Return the block of ``step`` in the permutation of its round.

        Blocks are sorted by a random key each. Ties go to the lower block.
        """
        round_, place = divmod(step, count)
        if self._order[0] != round_ or len(self._order[1]) != count:
            self._order = round_, np.argsort(draws(self.recipe.seed, round_, 0, count), kind="stable")
        return int(self._order[1][place])

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1)/P words. The last block may be shorter."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        values = self.size if ordinary else sum(stop - start for start, stop in self.ranges(self.state.step))
        if self.recipe.values != "fp32":
            return Forecast(self.rounded.traffic(values, world_size))
        return Forecast({_PHASE: both(cost.all_reduce(values, cost.WORD, world_size))})
