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
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, Recipe, Stateless, check, check_at_least
from tritoncomm.primitives import packing
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import (
    OVERFLOW,
    bruck_all_gather,
    dense_exchange,
    rotate,
    share_counts,
    share_rows,
)
from tritoncomm.primitives.packing import PLAIN, quotients
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import non_finite
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Forecast, both
from tritoncomm.scheduler.rounds import Inbox, Pattern

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries


@dataclass(frozen=True, kw_only=True)
class TopkDSA(Recipe):
    """Settings of TopkDSA.

    Regions travel dense if their pairs would take at least ``dense_switch`` times the words of the dense vector (2/3 in
    the authors' code). ``bucket_width`` is the number of peers per bucket of the rotation.
    """

    name: ClassVar[str] = "topk_dsa"
    averages_when_dense: ClassVar[bool] = True
    dense_switch: float = 2 / 3
    bucket_width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "dense_switch")
        check(self, "dense_switch", self.dense_switch <= 1, "must be at most 1: beyond it, dense values are shorter")
        check_at_least(self, 1, "bucket_width", whole=True)

    def build(self, numel: int, bounds: Bounds = ()) -> TopkDSAAlgorithm:
        return TopkDSAAlgorithm(self, numel)


class TopkDSAAlgorithm(BudgetedAlgorithm):
    """TopkDSA on one rank. The vector has one region per rank, equal up to rounding, and rank r sums region r."""

    def __init__(self, recipe: TopkDSA, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        own = acc.top_k(self.k)
        if world_size == 1:
            if kernels.has_non_finite(own.values):
                raise non_finite([0])
            acc.clear(own.indices)
            return SparseVector(own.indices, own.values, self.numel)
        cuts = [self.numel * p // world_size for p in range(world_size + 1)]
        region = yield from self._split_and_reduce(own, cuts, rank, world_size)
        mean = yield from self._all_gather(region, cuts, rank, world_size)
        acc.clear(own.indices)
        return SparseVector(mean.indices, mean.values, self.numel)

    def _split_and_reduce(self, own: Entries, cuts: Sequence[int], rank: int, world_size: int) -> Pattern[torch.Tensor]:
        """Return the dense sum over this rank's region. Entries are added in rank order, as in an all-gather."""
        low, high = cuts[rank], cuts[rank + 1]
        parts = [own.slice(start, stop) for start, stop in itertools.pairwise(offsets(own.indices, cuts))]
        finite = not kernels.has_non_finite(own.values)
        incoming = yield from share_counts([part.room for part in parts], finite, own.values.device, limit=high - low)
        arriving = {p: PLAIN.section(low, high, count) for p, count in enumerate(incoming) if p != rank}
        messages: Inbox = {}
        yield from rotate(
            {p: packing.encode(part.indices, part.values) for p, part in enumerate(parts) if p != rank},
            {p: section.words for p, section in arriving.items()},
            messages.update,
            rank,
            world_size,
            width=self.recipe.bucket_width,
            phase="split-and-reduce",
        )
        region = torch.zeros(high - low, dtype=torch.float32, device=own.values.device)
        for source in sorted({rank, *messages}):
            part = parts[rank] if source == rank else arriving[source].decode(messages[source])
            kernels.scatter_add(region, part.indices - low, part.values)
        return region

    def _all_gather(self, region: torch.Tensor, cuts: Sequence[int], rank: int, world_size: int) -> Pattern[Entries]:
        """Gather all regions as means, in entries while these are short and as dense values otherwise."""
        sums = kernels.select(region, 0.0)
        sums = sums._replace(indices=sums.indices + cuts[rank])
        finite = not kernels.has_non_finite(sums.values)
        (sizes,) = yield from share_rows(
            [sums.room], finite, world_size, region.device, phase="sizes", limit=self.numel, reason=OVERFLOW
        )
        sections = [
            PLAIN.section(low, high, size, divisor=world_size)
            for (low, high), size in zip(itertools.pairwise(cuts), sizes, strict=True)
        ]
        words = [section.words for section in sections]
        if self._goes_dense(sum(words)):
            widths = [high - low for low, high in itertools.pairwise(cuts)]
            means = quotients(region, world_size).view(torch.int32)
            blocks = yield from bruck_all_gather(means, widths, rank, world_size, phase="all-gather")
            return kernels.select(torch.cat(blocks).view(torch.float32), 0.0)
        message = packing.encode(sums.indices, sums.values)
        blocks = yield from bruck_all_gather(message, words, rank, world_size, phase="all-gather")
        return Entries.join([section.decode(block) for section, block in zip(sections, blocks, strict=True)])

    def _goes_dense(self, words: int) -> bool:
        """Return True if ``words`` for all entries are too many."""
        return words >= self.recipe.dense_switch * self.numel

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. One owner may receive all entries, and supports may be disjoint.

        In an ordinary step, regions are even, and supports are disjoint: (2k + min(2kP, n))(P-1)/P words.
        """
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        peers, rounds, region = world_size - 1, cost.log2(world_size), -(-self.numel // world_size)
        if ordinary:
            section, gathered = 2 * min(region, -(-self.k // world_size)), 2 * min(region, self.k)
            if self._goes_dense(world_size * gathered):
                gathered = region
            splitting = both(cost.messages(peers, peers * section))
            return self._forecast(splitting, both(cost.messages(rounds, peers * gathered)), world_size)
        union = min(self.numel, world_size * self.k)
        received, largest = 2 * union, 2 * min(region, union)
        if self._goes_dense(received):  # the bound also holds just below the switch
            received, largest = self.numel, 2 * region
        sent = min(rounds * received, peers * largest)
        gathering = Flow(cost.messages(rounds, sent), cost.messages(rounds, received))
        hot = cost.messages(peers, peers * 2 * min(self.k, region))
        cold = cost.messages(peers, 2 * self.k)
        return self._forecast(Flow(cold, hot), gathering, world_size)

    def _forecast(self, splitting: Flow, gathering: Flow, world_size: int) -> Forecast:
        return Forecast(
            {
                "counts": both(cost.all_to_all(1, 8, world_size)),
                "split-and-reduce": splitting,
                "sizes": both(cost.all_gather(1, 8, world_size)),
                "all-gather": gathering,
            }
        )
