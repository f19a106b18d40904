"""How the entries of a step travel: in messages of exact lengths, or with fixed room (:mod:`.fixed_exchange`).

The two differ only in how many slots a message has. Exact lengths cost a message with counts, which the host reads.
Fixed room costs bytes. Nothing then waits for a GPU before the end of the step, entries without a slot stay in the
residual, and collectives replace messages between two ranks. If all entries have slots, both deliver the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import (
    OVERFLOW,
    Gathered,
    Regions,
    bruck_all_gather,
    gather_regions,
    rotate,
    share_counts,
    share_rows,
)
from tritoncomm.primitives.packing import NO_VALUES, Encoding, quotients
from tritoncomm.primitives.region_cuts import offsets, trimmed_sizes
from tritoncomm.primitives.region_sums import Count, ListedSums, OwnedSums, RegionSums
from tritoncomm.primitives.selection import RoundingError, before_rounding
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import NAN_OR_INF, SUMS_OVERFLOW, non_finite
from tritoncomm.scheduler.ranks import named, rank_text
from tritoncomm.scheduler.rounds import Inbox, Pattern
from tritoncomm_kernels import Entries

Ranges = Sequence[tuple[int, int]]
Ring = Sequence[int] | None  # the ranks that gather, by position
# Sums of 2^126 and more count as overflow if values are rounded, because what rounding cuts off must not overflow in
# the residual. This factor makes them infinite.
ROUNDED_MARGIN = 4.0


class Step:
    """One step of one rank, in messages of exact lengths. The receiver of a malformed message raises the error.

    With exact lengths, a list of entries has no padding. With fixed room
    (:class:`~tritoncomm.primitives.fixed_exchange.FixedStep`), only the device knows where padding begins.
    ``encoding`` is the format of messages. A single worker neither packs nor rounds. ``width`` is the number of
    messages between two ranks that are in transit together. ``is_finite`` says that this rank has found no NaN or Inf.
    """

    def __init__(self, acc: Accumulator, encoding: Encoding, rank: int, world_size: int, width: int = 1) -> None:
        alone = Encoding(NO_VALUES if encoding.values == NO_VALUES else "fp32")
        self.encoding = encoding if world_size > 1 else alone
        self.acc, self.rank, self.world_size, self.width = acc, rank, world_size, width
        self.is_finite = True
        # Not with fixed room, where the host would wait for each figure.
        self._rounding = RoundingError() if self.encoding.rounds and acc.verdict is None else None
        self._rows: list[list[int]] = [[] for _ in range(world_size)]
        self._reason = NAN_OR_INF
        self.terms: list[Entries] = []  # for the selection of blocks, which adds them in its pass

    @property
    def divisor(self) -> int:
        """What receivers divide values by. Rounded values travel as means: a quotient of one would not be exact."""
        return self.world_size if self.encoding.rounds else 1

    def vector(self, entries: Entries) -> SparseVector:
        """Return the result of the step: the mean, of ``entries`` that hold means if values are rounded, else sums."""
        if self.world_size > 1 and not self.encoding.rounds:
            entries = entries._replace(values=quotients(entries.values, self.world_size))
        return self.acc.vector(entries)

    def at_least(self, threshold: float, most: int) -> Entries:
        """Return the entries of the accumulator that reach ``threshold``, but only the ``most`` largest of them."""
        return kernels.largest(self.acc.at_least(threshold), most)

    def check_gradient(self, values: torch.Tensor) -> None:
        """Let all ranks reject the step if one of ``values``, which this rank has selected, is NaN or Inf.

        A selection includes every NaN and Inf.
        """
        self.is_finite = not kernels.has_non_finite(values)

    def check_sums(self, sums: torch.Tensor) -> None:
        """Let all ranks reject the step if one of ``sums`` is NaN or Inf, also if only this rank holds it."""
        if kernels.has_non_finite(sums):
            raise NonFiniteError(SUMS_OVERFLOW)

    def add(self, entries: Entries) -> None:
        """Add received ``entries`` to the accumulator, until its :meth:`~Accumulator.undo`.

        Their coordinates are in :class:`~tritoncomm.primitives.blocks.Blocks` of which none is selected yet.
        """
        self.terms.append(entries)

    def _check_own_sums(self, sums: torch.Tensor) -> None:
        self.is_finite = not kernels.has_non_finite(sums * ROUNDED_MARGIN if self.encoding.rounds else sums)
        self._reason = OVERFLOW

    def rooms(self, phase: str, figures: Sequence[Count], room: int | None, total: int) -> Pattern[list[int]]:
        """Return the number of slots of each rank's message.

        With exact lengths, all ranks exchange their ``figures``. The first of them is the number of entries, and the
        slots are these numbers, scaled down if they exceed ``total``. With fixed room, each message has ``room`` slots.
        If it is None, the slots are the numbers of entries, too. The figures travel with the last message.
        :meth:`settle` returns those of all ranks.
        """
        row, device, limit = [int(figure) for figure in figures], self.acc.device, self.acc.numel
        columns = yield from share_rows(
            row, self.is_finite, self.world_size, device, phase=phase, limit=limit, reason=self._reason
        )
        self._rows = [list(each) for each in zip(*columns, strict=True)]
        return trimmed_sizes(columns[0], total)

    def largest(self, entries: Entries, count: int, room: int) -> Entries:
        """Return the ``count`` largest ``entries``, with fixed room in a list of ``room``."""
        return kernels.largest(entries, count)

    def to_owners(
        self, phase: str, entries: Entries, cuts: Sequence[int], room: int | None, threshold: float
    ) -> Pattern[OwnedSums]:
        """Send ``entries`` to the owners of their regions, between ``cuts``. Return the sums of this rank's region.

        No owner gets more than the ``room`` largest ones, if that is given. Terms are added in rotation order: those of
        rank r, r-1, r-2, ..., regardless of the order of arrival. Sums that do not reach ``threshold`` are no
        candidates for the result.
        """
        rank, encoding, device = self.rank, self.encoding, self.acc.device
        low, high = cuts[rank], cuts[rank + 1]
        parts = [entries.slice(start, stop) for start, stop in itertools.pairwise(offsets(entries.indices, cuts))]
        if room is not None:
            parts = [p if i == rank else kernels.largest(p, room) for i, p in enumerate(parts)]
        sends, delivered = {}, list(parts)  # this rank's own region is not sent, and not rounded
        for p, part in enumerate(parts):
            if p != rank:
                sends[p], delivered[p] = encoding.encode(cuts[p], cuts[p + 1], part)
        counts = [part.indices.shape[0] for part in delivered]
        incoming = yield from share_counts(counts, self.is_finite, device, limit=high - low)
        load = sum(incoming)
        arriving = {p: encoding.section(low, high, count) for p, count in enumerate(incoming) if p != rank}
        region = RegionSums(low, high, load, device)

        def add(arrived: Inbox) -> None:
            region.add([arriving[source].decode(message) for source, message in arrived.items()])

        region.add([parts[rank]])
        sent = Entries.join(delivered)
        receives = {p: section.words for p, section in arriving.items()}
        yield from rotate(sends, receives, add, rank, self.world_size, width=self.width, phase=phase)
        if self._rounding is not None:
            self._rounding.add(Entries.join(parts), sent)

        found = region.at_least(threshold)
        found = encoding.section(low, high, found.room, divisor=self.divisor).sendable(found)
        self._check_own_sums(found.values)
        return ListedSums(found, kernels.magnitude_keys(found.values), load, sent)

    def gather_parts(
        self, phase: str, entries: Entries, ranges: Ranges, rooms: Sequence[int], order: Sequence[int], ring: Ring
    ) -> Pattern[Gathered]:
        """Gather the entries of all ranks, whose ranges are disjoint.

        Args:
            phase: Name of the messages.
            entries: Those of this rank.
            ranges: Where the entries of each rank lie: from the first number up to the second.
            rooms: Slots of each rank's message. With exact lengths, they are numbers of entries.
            order: The order of ranks in which indices ascend.
            ring: The ranks that gather, if it is not all of them. ``ranges``, ``rooms`` and ``order`` are then by
                position in the ring.
        """
        lists, sent = yield from self._gather(phase, entries, ranges, rooms, ring, divisor=self.divisor)
        return Gathered(Entries.join([lists[rank] for rank in order]), entries, sent)

    def gather_regions(
        self,
        phase: str,
        entries: Entries,
        cuts: Sequence[int],
        rooms: Sequence[int],
        *,
        limit: int,
        trigger: float,
        figures: Sequence[Count],
    ) -> Pattern[Gathered]:
        """Gather the entries of all ranks, each of which has those of its region, between ``cuts``.

        Args:
            phase: Name of the messages.
            entries: Those of this rank.
            cuts: The bounds of the regions, in the order of ranks.
            rooms: See :meth:`gather_parts`.
            limit: With fixed room, the largest entries are returned, as many as this.
            trigger: With exact lengths, messages are balanced first if one exceeds so many times the mean. No entry of
                fixed room moves, because all messages have the same length.
            figures: With fixed room, further figures for :meth:`settle`.
        """
        regions = Regions(cuts, list(rooms), self.encoding, self.divisor)
        return gather_regions(
            entries, regions, self.rank, self.world_size, trigger=trigger, width=self.width, phase=phase
        )

    def union(self, phase: str, entries: Entries, rooms: Sequence[int]) -> Pattern[tuple[Entries, Entries]]:
        """Gather the entries of all ranks. Return their union with the sums, and what was sent of ``entries``.

        The message of rank r has ``rooms[r]`` slots. Terms are added in rank order, so all ranks get the same bits. If
        an entry or a sum is NaN or Inf, all ranks reject the step: every selection includes NaN and Inf.
        """
        every = [(0, self.acc.numel)] * self.world_size
        lists, sent = yield from self._gather(phase, entries, every, rooms, None, divisor=self.divisor)
        union = self._merged(lists)
        if kernels.has_non_finite(union.values):
            bad = [source for source, part in enumerate(lists) if kernels.has_non_finite(part.values)]
            raise non_finite(bad) if bad else NonFiniteError(SUMS_OVERFLOW)
        return union, sent

    def merged(
        self, phase: str, entries: Entries, bounds: tuple[int, int], room: int, ring: Sequence[int], *, span: int
    ) -> Pattern[tuple[Entries, Entries]]:
        """Do the same as :meth:`union` between the ranks of ``ring``, without a check.

        All entries lie inside of ``bounds``, and no rank has more than ``room``. Terms are added in the order of the
        ring. With fixed room, messages are those for ``span`` coordinates, and no index beyond ``bounds`` is rejected.
        """
        size = len(ring)
        lists, sent = yield from self._gather(phase, entries, [bounds] * size, [room] * size, ring, divisor=1)
        return self._merged(lists), sent

    def _merged(self, lists: Sequence[Entries]) -> Entries:
        return kernels.merge(lists, self.acc.numel)

    def _gather(
        self, phase: str, entries: Entries, ranges: Ranges, rooms: Sequence[int], ring: Ring, *, divisor: int
    ) -> Pattern[tuple[list[Entries], Entries]]:
        """Return the entries of all ranks, or of those of ``ring``, and what was sent of ``entries``."""
        place = self.rank if ring is None else ring.index(self.rank)
        if entries.room > rooms[place]:
            raise ProtocolMismatchError(
                f"phase {phase!r}: {rank_text(*named([self.rank]))} has {entries.room} entries, but received "
                f"{rooms[place]}"
            )
        sections = [
            self.encoding.section(low, high, room, divisor=divisor)
            for (low, high), room in zip(ranges, rooms, strict=True)
        ]
        values = entries.values[:0] if self.encoding.values == NO_VALUES else entries.values
        message, sent = sections[place].encode(entries.indices, values)
        words = [section.words for section in sections]
        blocks = yield from bruck_all_gather(message, words, place, len(sections), phase=phase, ring=ring)
        return [section.decode(block) for section, block in zip(sections, blocks, strict=True)], sent

    def subtract(self, sent: Entries, result: Entries) -> None:
        """Remove those of the ``sent`` entries that are in ``result`` from the accumulator."""
        kept = kernels.common_positions(sent.indices, result.indices)
        self.acc.subtract(Entries(sent.indices[kept], sent.values[kept]), rounded=self.encoding.rounds)

    def rest(self, gathered: Gathered) -> Entries:
        """Return what rounding has cut off from the sums of this rank that are in the result."""
        before = before_rounding(gathered.own, gathered.sent)
        return Entries(gathered.sent.indices, before - gathered.sent.values)

    def count_rounding(self, entries: Entries, sent: Entries) -> None:
        """Count what rounding takes from ``entries``, of which ``sent`` was sent. Exact lengths only."""
        if self._rounding is not None:
            self._rounding.add(entries, sent)

    def rounding(self) -> dict[str, float]:
        """Return figures about what :meth:`count_rounding` was given."""
        return {} if self._rounding is None else self._rounding.figures()

    def settle(self, own: Sequence[Count] = ()) -> Pattern[tuple[list[list[int]], list[int]]]:
        """Return the figures of all ranks, ``[world_size][figures]``, and ``own`` numbers of this rank.

        This ends the step. With fixed room, the host waits for a GPU here, and all ranks raise the same error.
        """
        yield from ()
        if not self.is_finite:
            raise non_finite([self.rank])
        return self._rows, [int(number) for number in own]


def all_gather_mean(
    own: Entries, rooms: Sequence[int], encoding: Encoding, acc: Accumulator, rank: int, world_size: int
) -> Pattern[tuple[SparseVector, Entries]]:
    """Return the mean over ranks of all ranks' entries, and the part of ``own`` that is in it, with the values sent.

    See :meth:`Step.union`. Messages have exact lengths: rank r sends up to ``rooms[r]`` entries.
    """
    step = Step(acc, encoding, rank, world_size)
    union, sent = yield from step.union("all-gather", own, rooms)
    return step.vector(union), sent
