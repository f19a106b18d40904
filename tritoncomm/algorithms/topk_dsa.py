"""TopkDSA (dynamic sparse all-reduce): split and all-gather, with a switch to dense values.

C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019. Every worker sums one
region of the vector and sends the result to all others. It sends (index, value) pairs, or only values if too many
entries of the vector are non-zero. The result equals that of the all-gather of local top-k, except that sums of exactly
0 are not listed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import BudgetedAlgorithm, EntryRecipe, Stateless, check, check_at_least
from tritoncomm.algorithms.topk_dsa_static import StaticForm, StaticStep
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import (
    LARGEST_ROUNDED,
    OVERFLOW,
    bruck_all_gather,
    dense_exchange,
    rotate,
    share_counts,
    share_rows,
)
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.selection import entries_to_keep, rest_of, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Flow, Forecast, both
from tritoncomm.scheduler.rounds import Inbox, Pattern
from tritoncomm.scheduler.wire import Section
from tritoncomm_kernels import Selection


@dataclass(frozen=True, kw_only=True)
class TopkDSA(EntryRecipe):
    """Settings of TopkDSA.

    Regions travel dense if their pairs would take at least ``dense_switch`` times the words of the dense vector (2/3 in
    the authors' code). ``bucket_width`` is the number of peers per bucket of the rotation. In the static form a rank
    has room for ``static_room`` times k/P entries in each region, its largest ones. The others stay in the residual.
    The switch then depends on these lengths alone, so all steps of a run are alike. The static form sends as much for
    workers that select the same entries as for workers that share none. The exact form sends less then.
    """

    name: ClassVar[str] = "topk_dsa"
    averages_when_dense: ClassVar[bool] = True
    has_static_form: ClassVar[bool] = True
    dense_switch: float = 2 / 3
    bucket_width: int = 4
    static_room: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "dense_switch")
        check(self, "dense_switch", self.dense_switch <= 1, "must be at most 1: beyond it, dense values are shorter")
        check_at_least(self, 1, "bucket_width", whole=True)
        check_at_least(self, 1, "static_room")
        check(self, "static_room", math.isfinite(self.static_room), "must be a finite multiple of k/P")

    def build(self, numel: int) -> TopkDSAAlgorithm:
        """See :meth:`Recipe.build`."""
        return TopkDSAAlgorithm(self, numel)


class TopkDSAAlgorithm(BudgetedAlgorithm):
    """TopkDSA on one rank. The vector has one region per rank, equal up to rounding, and rank r sums region r."""

    def __init__(self, recipe: TopkDSA, numel: int) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.k = entries_to_keep(numel, recipe.density)
        self.encoding = recipe.encoding
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        if acc.verdict is not None:
            entries = yield from StaticStep(self._static_form(world_size), acc, acc.verdict, rank).run(self.k)
            return SparseVector.padded(entries, self.numel)
        own = acc.top_k(self.k)
        if world_size == 1:
            if kernels.has_non_finite(own.values):
                raise NonFiniteError("rank 0 holds a NaN or Inf gradient; nothing was applied", [0])
            acc.clear(own.indices)
            return SparseVector(own.indices, own.values, self.numel)
        cuts = self._cuts(world_size)
        region, sent = yield from self._split_and_reduce(own, cuts, rank, world_size)
        mean, rest = yield from self._all_gather(region, cuts, rank, world_size)
        acc.subtract(sent, rounded=self.encoding.rounds)
        self.report = rounding_figures(own, sent) if self.encoding.rounds else {}
        if self.encoding.rounds:
            acc.add(rest.indices, rest.values)
        return SparseVector(mean.indices, mean.values, self.numel)

    def _cuts(self, world_size: int) -> list[int]:
        return [self.numel * p // world_size for p in range(world_size + 1)]

    def _static_form(self, world_size: int) -> StaticForm:
        room = math.ceil(min(self.k, self.recipe.static_room * self.k / world_size))
        return StaticForm(self.encoding, tuple(self._cuts(world_size)), room, self.recipe.dense_switch)

    def _split_and_reduce(
        self, own: Selection, cuts: Sequence[int], rank: int, world_size: int
    ) -> Pattern[tuple[torch.Tensor, Selection]]:
        """Return the dense sum over this rank's region, and the entries of this rank in all sums.

        Entries are added in rank order, as in an all-gather of all lists.
        """
        low, high, encoding = cuts[rank], cuts[rank + 1], self.encoding
        parts = [own.slice(start, stop) for start, stop in itertools.pairwise(offsets(own.indices, cuts))]
        # This rank's own region is not sent, and not rounded.
        sections = [self._section(cuts, p, part.found) for p, part in enumerate(parts)]
        parts = [part if p == rank else sections[p].sendable(part) for p, part in enumerate(parts)]
        sections = [self._section(cuts, p, part.found) for p, part in enumerate(parts)]
        finite = not kernels.has_non_finite(own.values)
        incoming = yield from share_counts([part.found for part in parts], finite, own.values.device, limit=high - low)
        packed = [section.pack(part.indices, part.values) for section, part in zip(sections, parts, strict=True)]
        arriving = {p: encoding.section(low, high, count) for p, count in enumerate(incoming) if p != rank}
        messages: Inbox = {}
        yield from rotate(
            {p: message for p, (message, _) in enumerate(packed) if p != rank},
            {p: section.words for p, section in arriving.items()},
            messages.update,
            rank,
            world_size,
            width=self.recipe.bucket_width,
            phase="split-and-reduce",
        )
        region = torch.zeros(high - low, dtype=torch.float32, device=own.values.device)
        for source in sorted({rank, *messages}):
            part = parts[rank] if source == rank else arriving[source].unpack(messages[source])
            kernels.scatter_add(region, part.indices - low, part.values)
        return region, Selection.join([parts[p] if p == rank else sent for p, (_, sent) in enumerate(packed)])

    def _section(self, cuts: Sequence[int], owner: int, room: int, divisor: int = 1) -> Section:
        return self.encoding.section(cuts[owner], cuts[owner + 1], room, divisor=divisor)

    def _all_gather(
        self, region: torch.Tensor, cuts: Sequence[int], rank: int, world_size: int
    ) -> Pattern[tuple[Selection, Selection]]:
        """Gather all regions as means, in entries while these are short and as dense values otherwise.

        Also returns what rounding has taken away from the sums of this rank's region.
        """
        sums = kernels.select(region, 0.0, workspace=self.workspace)
        sums = sums._replace(indices=sums.indices + cuts[rank])
        entries = self._section(cuts, rank, sums.found, world_size).sendable(sums)
        section = self._section(cuts, rank, entries.found, world_size)
        message, sent = section.pack(entries.indices, entries.values)
        finite = not kernels.has_non_finite(sums.values)
        if section.rounds and sums.found:  # what rounding cuts off must not overflow in the residual
            finite = finite and float(sums.values.abs().max()) < LARGEST_ROUNDED
        (sizes,) = yield from share_rows(
            [entries.found], finite, world_size, region.device, phase="sizes", limit=self.numel, reason=OVERFLOW
        )
        sections = [self._section(cuts, owner, size, world_size) for owner, size in enumerate(sizes)]
        words = [section.words for section in sections]
        if self._goes_dense(sum(words)):
            widths = [high - low for low, high in itertools.pairwise(cuts)]
            means = wire.rounded_quotients(region, world_size) if self.encoding.rounds else region / world_size
            blocks = yield from bruck_all_gather(means.view(torch.int32), widths, rank, world_size, phase="all-gather")
            mean = kernels.select(torch.cat(blocks).view(torch.float32), 0.0, workspace=self.workspace)
            return mean, sums._replace(values=sums.values - means[sums.indices.long() - cuts[rank]] * world_size)
        blocks = yield from bruck_all_gather(message, words, rank, world_size, phase="all-gather")
        mean = Selection.join([section.unpack(block) for section, block in zip(sections, blocks, strict=True)])
        return mean, rest_of(sums, sent)

    def _goes_dense(self, words: int) -> bool:
        """Return True if ``words`` for all entries are too many."""
        return words >= self.recipe.dense_switch * self.numel

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. One owner may receive all entries, and supports may be disjoint.

        In an ordinary step, regions are even, and supports are disjoint: (2k + min(2kP, n))(P-1)/P words.
        """
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if self.is_static:
            return self._static_form(world_size).forecast()
        peers, rounds, region = world_size - 1, cost.log2(world_size), -(-self.numel // world_size)
        if ordinary:
            section = self.encoding.words(region, -(-self.k // world_size))
            gathered = self.encoding.words(region, min(region, self.k))
            if self._goes_dense(world_size * gathered):
                gathered = region
            splitting = both(cost.messages(peers, peers * section))
            return self._forecast(splitting, both(cost.messages(rounds, peers * gathered)), world_size)
        union = min(self.numel, world_size * self.k)
        words = self.encoding.words_at_most
        received, largest = words(self.numel, union, world_size), words(region, min(region, union), 1)
        if self._goes_dense(received):  # the bound also holds just below the switch
            received, largest = self.numel, 2 * region
        sent = min(rounds * received, peers * largest)
        gathering = Flow(cost.messages(rounds, sent), cost.messages(rounds, received))
        hot = cost.messages(peers, peers * words(region, min(self.k, region), 1))
        cold = cost.messages(peers, words(self.numel, self.k, peers))
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
