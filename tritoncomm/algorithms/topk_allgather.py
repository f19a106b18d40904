"""Local top-k and all-gather: the simplest sparse exchange, whose volume grows with the workers.

"TopkA" in the comparison table of Ok-Topk: bandwidth 2k(P-1) words, latency log P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm import cost, wire
from tritoncomm.accumulator import Accumulator
from tritoncomm.algorithms.base import Algorithm, Recipe, Stateless
from tritoncomm.collectives import bruck_all_gather, dense_exchange
from tritoncomm.cost import Forecast, both
from tritoncomm.errors import NonFiniteError
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.selection import entries_to_keep
from tritoncomm.sparse import SparseVector

_NON_FINITE = -1


@dataclass(frozen=True, kw_only=True)
class TopkAllgather(Recipe):
    """Every worker sends its k largest entries to everybody; the union is delivered."""

    name: ClassVar[str] = "topk_allgather"

    def build(self, numel: int) -> TopkAllgatherAlgorithm:
        """See :meth:`Recipe.build`."""
        return TopkAllgatherAlgorithm(numel, entries_to_keep(numel, self.density))


class TopkAllgatherAlgorithm(Algorithm):
    """Blocks have a fixed size, ``[count | k indices | k values]``, so nothing is negotiated."""

    def __init__(self, numel: int, k: int) -> None:
        super().__init__(numel)
        self.k = k
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        own = acc.top_k(self.k)
        finite = not kernels.has_non_finite(own.values)
        block = self._pack(own, finite)
        words = [block.numel()] * world_size
        blocks = yield from bruck_all_gather(block, words, rank, world_size, phase="all-gather")
        lists = self._unpack(blocks)
        indices, sums = kernels.merge(lists, acc.numel, workspace=acc.workspace)
        if kernels.has_non_finite(sums):  # on all ranks alike, they hold the same sums
            raise NonFiniteError("finite gradients overflow when summed; nothing was applied")
        acc.clear(own.indices)
        return SparseVector(indices, sums / world_size, self.numel)

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: 2k(P-1) words and a count per block, exactly."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        return Forecast({"all-gather": both(cost.bruck(1 + 2 * self.k, world_size))})

    def _pack(self, own: kernels.Selection, finite: bool) -> torch.Tensor:
        block = torch.zeros(1 + 2 * self.k, dtype=torch.int32, device=own.indices.device)
        pairs = block[1:].view(2, self.k)
        block[0] = own.found if finite else _NON_FINITE
        pairs[0, : own.found] = own.indices
        pairs[1, : own.found] = own.values.view(torch.int32)
        return block

    def _unpack(self, blocks: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        counts = torch.stack([block[0] for block in blocks]).tolist()
        bad = [rank for rank, count in enumerate(counts) if count == _NON_FINITE]
        if bad:
            raise NonFiniteError(f"ranks {bad} hold a NaN or Inf gradient; nothing was applied", bad)
        lists = []
        for block, count in zip(blocks, counts, strict=True):
            indices, values = wire.unpack(block[1:].view(2, self.k)[:, :count].reshape(-1))
            wire.check_indices(indices, 0, self.numel)
            lists.append((indices, values))
        return lists
