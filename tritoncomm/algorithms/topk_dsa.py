"""TopkDSA (dynamic sparse all-reduce): split and all-gather, with a switch to dense values.

C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019. Every worker sums one
region of the vector and sends the result to all others. It sends (index, value) pairs, or only values if too many
entries of the vector are non-zero. The result equals that of the all-gather of local top-k, except that sums of exactly
0 are not listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, Stateless, check, check_at_least
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import (
    OVERFLOW,
    bruck_all_gather,
    dense_exchange,
    rotate,
    share_counts,
    share_rows,
)
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Flow, Forecast, Formula, both
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Selection


@dataclass(frozen=True, kw_only=True)
class TopkDSA(Recipe):
    """Settings of TopkDSA.

    Regions travel dense if their pairs would take at least ``dense_switch`` times the words of the dense vector (2/3 in
    the authors' code). ``bucket_width`` is the number of peers per bucket of the rotation.
    """

    name: ClassVar[str] = "topk_dsa"
    dense_switch: float = 2 / 3
    bucket_width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "dense_switch")
        check(self, "dense_switch", self.dense_switch <= 1, "must be at most 1: beyond it, dense values are shorter")
        check_at_least(self, 1, "bucket_width", whole=True)

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`. The range is from full overlap to full regions."""
        k, share = entries_to_keep(numel, self.density), (world_size - 1) / world_size
        return Formula(world_size + 2 * cost.log2(world_size), 4 * k * share, (2 * k + numel) * share)

    def build(self, numel: int) -> TopkDSAAlgorithm:
        """See :meth:`Recipe.build`."""
        return TopkDSAAlgorithm(self, numel)


class TopkDSAAlgorithm(Algorithm):
    """TopkDSA on one rank. The vector has one region per rank, equal up to rounding, and rank r sums region r."""

    def __init__(self, recipe: TopkDSA, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        own = acc.top_k(self.k)
        if world_size == 1:
            if kernels.has_non_finite(own.values):
                raise NonFiniteError("rank 0 holds a NaN or Inf gradient; nothing was applied", [0])
            acc.clear(own.indices)
            return SparseVector(own.indices, own.values, self.numel)
        cuts = self._cuts(world_size)
        region = yield from self._split_and_reduce(own, cuts, rank, world_size)
        union = yield from self._all_gather(region, cuts, rank, world_size)
        acc.clear(own.indices)
        return SparseVector(union.indices, union.values / world_size, self.numel)

    def _cuts(self, world_size: int) -> list[int]:
        return [self.numel * p // world_size for p in range(world_size + 1)]

    def _split_and_reduce(
        self, own: Selection, cuts: Sequence[int], rank: int, world_size: int
    ) -> Pattern[torch.Tensor]:
        """Return the dense sum over this rank's region.

        Entries are added in rank order, as in an all-gather of all lists.
        """
        starts = offsets(own.indices, cuts)
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        finite = not kernels.has_non_finite(own.values)
        incoming = yield from share_counts(counts, finite, own.values.device)
        packed = wire.pack_parts(own.indices, own.values, counts)
        sends = {p: message for p, message in enumerate(packed) if p != rank}
        receives = {p: 2 * count for p, count in enumerate(incoming) if p != rank}
        messages = {rank: packed[rank]}
        yield from rotate(
            sends, receives, messages.update, rank, world_size,
            width=self.recipe.bucket_width, phase="split-and-reduce",
        )  # fmt: skip
        low, high = cuts[rank], cuts[rank + 1]
        region = torch.zeros(high - low, device=own.values.device)
        for source in sorted(messages):
            indices, values = wire.unpack(messages[source])
            wire.check_indices(indices, low, high)
            kernels.scatter_add(region, indices - low, values)
        return region

    def _all_gather(self, region: torch.Tensor, cuts: Sequence[int], rank: int, world_size: int) -> Pattern[Selection]:
        """Gather all regions, as pairs while they are short and as values otherwise."""
        entries = kernels.select(region, 0.0, workspace=self.workspace)
        finite = not kernels.has_non_finite(entries.values)
        (sizes,) = yield from share_rows(
            [entries.found], finite, world_size, region.device, phase="sizes", reason=OVERFLOW
        )
        if self._goes_dense(sum(sizes)):
            widths = [high - low for low, high in itertools.pairwise(cuts)]
            message = region.view(torch.int32)
            blocks = yield from bruck_all_gather(message, widths, rank, world_size, phase="all-gather")
            return kernels.select(torch.cat(blocks).view(torch.float32), 0.0, workspace=self.workspace)
        message = wire.pack(entries.indices + cuts[rank], entries.values)
        blocks = yield from bruck_all_gather(
            message, [2 * size for size in sizes], rank, world_size, phase="all-gather"
        )
        union = Selection.of(*wire.unpack_parts(blocks))
        wire.check_indices(union.indices, 0, self.numel)
        return union

    def _goes_dense(self, entries: int) -> bool:
        return 2 * entries >= self.recipe.dense_switch * self.numel

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. One owner may receive all entries, and supports may be disjoint."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        peers, rounds, region = world_size - 1, cost.log2(world_size), -(-self.numel // world_size)
        union = min(self.numel, world_size * self.k)
        if self._goes_dense(union):  # the bound also holds just below the switch
            received, largest = self.numel, 2 * region
        else:
            received, largest = 2 * union, 2 * min(region, union)
        sent = min(rounds * received, peers * largest)
        gathering = Flow(cost.messages(rounds, sent), cost.messages(rounds, received))
        hot = cost.messages(peers, 2 * peers * min(self.k, region))
        return self._forecast(Flow(cost.messages(peers, 2 * self.k), hot), gathering, world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`. Even regions, disjoint supports: (2k + min(2kP, n))(P-1)/P words."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        peers, rounds = world_size - 1, cost.log2(world_size)
        union = min(self.numel, world_size * self.k)
        gathered = self.numel if self._goes_dense(union) else 2 * union
        return self._forecast(
            both(cost.messages(peers, 2 * self.k * peers // world_size)),
            both(cost.messages(rounds, gathered * peers // world_size)),
            world_size,
        )

    def _forecast(self, splitting: Flow, gathering: Flow, world_size: int) -> Forecast:
        return Forecast(
            {
                "counts": both(cost.all_to_all(1, 8, world_size)),
                "split-and-reduce": splitting,
                "sizes": both(cost.all_gather(1, 8, world_size)),
                "all-gather": gathering,
            }
        )
