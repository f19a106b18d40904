"""How the entries of a step travel: in messages of exact lengths, or in messages with fixed room.

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
    checked_counts,
    gather_regions,
    rotate,
    share_counts,
    share_rows,
)
from tritoncomm.primitives.packing import NO_VALUES, Encoding, Rows, quotients
from tritoncomm.primitives.region_cuts import offsets, trimmed_sizes, widest
from tritoncomm.primitives.region_sums import Count, DenseSums, ListedSums, OwnedSums, RegionSums
from tritoncomm.primitives.selection import RoundingError, among, ascending, before_rounding
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED, SUMS_OVERFLOW, Verdict, non_finite
from tritoncomm.scheduler.ranks import named
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Inbox, Pattern, read
from tritoncomm_kernels import Entries
from tritoncomm_kernels.lists import PADDING

Ranges = Sequence[tuple[int, int]]
Ring = Sequence[int] | None  # the ranks that gather, by position
# Sums of 2^126 and more count as overflow if values are rounded, because what rounding cuts off must not overflow in
# the residual. This factor makes them infinite.
_ROUNDED_MARGIN = 4.0


class Step:
    """One step of one rank, in messages of exact lengths. The receiver of a malformed message raises the error.

    With exact lengths, a list of entries has no padding. With fixed room (:class:`FixedStep`), only the device knows
    where padding begins.
    ``encoding`` is the format of messages. A single worker neither packs nor rounds. ``width`` is the number of
    messages between two ranks that are in transit together. ``is_finite`` says that this rank has found no NaN or Inf.
    ``figures`` (integers ``[world_size, figures]``) are those of :meth:`settle`.
    """

    figures: torch.Tensor

    def __init__(self, acc: Accumulator, encoding: Encoding, rank: int, world_size: int, width: int = 1) -> None:
        alone = Encoding(NO_VALUES if encoding.values == NO_VALUES else "fp32")
        self.encoding = encoding if world_size > 1 else alone
        self.acc, self.rank, self.world_size, self.width = acc, rank, world_size, width
        self.is_finite = True
        # Not with fixed room, where the host would wait for each figure.
        self._rounding = RoundingError() if self.encoding.rounds and acc.verdict is None else None
        self._rows: list[list[int]] = [[] for _ in range(world_size)]
        self._reason = "hold a NaN or Inf gradient"
        self.terms: list[Entries] = []  # for the selection of blocks, which adds them in its pass

    @staticmethod
    def of(acc: Accumulator, encoding: Encoding, rank: int, world_size: int, width: int = 1) -> Step:
        """Return the step for ``acc``: with fixed room if it has a verdict, otherwise with exact lengths."""
        if acc.verdict is None:
            return Step(acc, encoding, rank, world_size, width)
        return FixedStep(acc, acc.verdict, encoding, rank, world_size, width)

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
        return kernels.largest(self.acc.at_least(threshold), most, workspace=self.acc.workspace)

    def check_gradient(self, values: torch.Tensor) -> None:
        """Let all ranks reject the step if one of ``values``, which this rank has selected, is NaN or Inf.

        A selection includes every NaN and Inf.
        """
        self.is_finite = not kernels.has_non_finite(values)

    def check_sums(self, sums: torch.Tensor) -> None:
        """Let all ranks reject the step if one of ``sums`` is NaN or Inf, also if only this rank holds it."""
        if kernels.has_non_finite(sums):
            raise NonFiniteError(SUMS_OVERFLOW)

    def check_result(self, values: torch.Tensor) -> None:
        """Let all ranks, which hold the same ``values``, reject the step if one is NaN or Inf, whatever its origin."""
        if kernels.has_non_finite(values):
            raise NonFiniteError(REJECTED)

    def add(self, entries: Entries) -> None:
        """Add received ``entries`` to the accumulator, until its :meth:`~Accumulator.undo`.

        Their coordinates are in :class:`~tritoncomm.primitives.blocks.Blocks` of which none is selected yet.
        """
        self.terms.append(entries)

    def _check_own_sums(self, sums: torch.Tensor) -> None:
        self.is_finite = not kernels.has_non_finite(sums * _ROUNDED_MARGIN if self.encoding.rounds else sums)
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

    def largest(self, entries: Entries, counts: Sequence[int], room: int | None = None) -> Entries:
        """Return as many of the largest ``entries`` as ``counts`` has for this rank.

        With fixed room, the list has ``room``. By default it is that for the largest of ``counts``, but no more than
        that of ``entries``.
        """
        return kernels.largest(entries, counts[self.rank], workspace=self.acc.workspace)

    def to_owners(
        self, phase: str, entries: Entries, cuts: Sequence[int], room: int | None, threshold: float
    ) -> Pattern[OwnedSums]:
        """Send ``entries`` to the owners of their regions, between ``cuts``. Return the sums of this rank's region.

        No owner gets more than the ``room`` largest ones, if that is given. Terms are added in rotation order: those of
        rank r, r-1, r-2, ..., regardless of the order of arrival. Sums that do not reach ``threshold`` are no
        candidates for the result.
        """
        rank, encoding, device, held = self.rank, self.encoding, self.acc.device, self.acc.workspace
        low, high = cuts[rank], cuts[rank + 1]
        parts = [entries.slice(start, stop) for start, stop in itertools.pairwise(offsets(entries.indices, cuts))]
        if room is not None:
            parts = [p if i == rank else kernels.largest(p, room, workspace=held) for i, p in enumerate(parts)]
        sends, delivered = {}, list(parts)  # this rank's own region is not sent, and not rounded
        for p, part in enumerate(parts):
            if p != rank:
                sends[p], delivered[p] = encoding.encode(cuts[p], cuts[p + 1], part)
        counts = [part.indices.shape[0] for part in delivered]
        incoming = yield from share_counts(counts, self.is_finite, device, limit=high - low)
        load = sum(incoming)
        arriving = {p: encoding.section(low, high, count) for p, count in enumerate(incoming) if p != rank}
        region = RegionSums(low, high, load, device, held)

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
        return ListedSums(found, kernels.magnitude_keys(found.values), load, sent, held)

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
        return kernels.merge(lists, self.acc.numel, workspace=self.acc.workspace)

    def _gather(
        self, phase: str, entries: Entries, ranges: Ranges, rooms: Sequence[int], ring: Ring, *, divisor: int
    ) -> Pattern[tuple[list[Entries], Entries]]:
        """Return the entries of all ranks, or of those of ``ring``, and what was sent of ``entries``."""
        place = self.rank if ring is None else ring.index(self.rank)
        if entries.room > rooms[place]:
            raise ProtocolMismatchError(
                f"phase {phase!r}: rank {named([self.rank])[0]} has {entries.room} entries, but received {rooms[place]}"
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
        self.figures = torch.tensor(self._rows, dtype=torch.int64, device="cpu")
        return self._rows, [int(number) for number in own]


class FixedStep(Step):
    """Messages with fixed room. What is wrong is counted on each device, and raised by all ranks at the end."""

    def __init__(
        self, acc: Accumulator, verdict: Verdict, encoding: Encoding, rank: int, world_size: int, width: int
    ) -> None:
        super().__init__(acc, encoding, rank, world_size, width)
        self.verdict = verdict
        self._figures: list[torch.Tensor] = []

    def at_least(self, threshold: float, most: int) -> Entries:
        largest = self.acc.top_k(min(most, self.acc.numel))
        return kernels.reaching(largest, threshold, workspace=self.acc.workspace)

    def check_gradient(self, values: torch.Tensor) -> None:
        self.verdict.check_gradient(values)

    def check_sums(self, sums: torch.Tensor) -> None:
        self.verdict.check_sums(sums)

    def check_result(self, values: torch.Tensor) -> None:
        self.verdict.check_result(values)

    def add(self, entries: Entries) -> None:
        self.acc.remember(entries.indices)
        self.acc.add(*entries)

    def _check_own_sums(self, sums: torch.Tensor) -> None:
        self.verdict.check_sums(sums * _ROUNDED_MARGIN if self.encoding.rounds else sums)

    def rooms(self, phase: str, figures: Sequence[Count], room: int | None, total: int) -> Pattern[list[int]]:
        self._figures = [figure for figure in figures if isinstance(figure, torch.Tensor)]
        if room is not None:
            return [room] * self.world_size
        return (yield from self._counts(phase, self._figures[0], self.acc.numel))

    def _counts(self, phase: str, count: torch.Tensor, limit: int) -> Pattern[list[int]]:
        """Return the ``count`` (int32 ``[1]``) of all ranks. The host waits for a GPU."""
        everybody = yield from read(phase, (yield AllGather(phase, count)).flatten())
        return checked_counts(phase, everybody, limit)

    def largest(self, entries: Entries, counts: Sequence[int], room: int | None = None) -> Entries:
        if counts[self.rank] >= entries.room and room in (None, entries.room):
            return entries
        room = room or min(entries.room, max(1, *counts))
        # Made on the device: rooms change, and the host would wait for the copy of a new constant.
        bounds = torch.arange(0, entries.room + 1, entries.room, dtype=torch.int32, device=self.acc.device)
        budget = bounds.new_full((1,), counts[self.rank])
        rows = kernels.top_k_rows(
            entries.values, bounds, budget, room, indices=entries.indices, workspace=self.acc.workspace
        )
        return rows.row(0)

    def to_owners(
        self, phase: str, entries: Entries, cuts: Sequence[int], room: int | None, threshold: float
    ) -> Pattern[OwnedSums]:
        rank, world_size, held, device = self.rank, self.world_size, self.acc.workspace, self.acc.device
        low, high, ranges = cuts[rank], cuts[rank + 1], list(itertools.pairwise(cuts))
        bounds = kernels.constant(cuts, device)
        starts = torch.searchsorted(ascending(entries.indices, self.acc.numel), bounds, out_int32=True)
        counts = starts[1:] - starts[:-1]
        foreign = kernels.constant([int(owner != rank) for owner in range(world_size)], device)
        if room is None:
            room = max(1, *(yield from self._counts("rooms", (counts * foreign).amax().reshape(1), entries.room)))
        rows = self.rows(ranges, room, divisor=1)
        parts = kernels.top_k_rows(
            entries.values, starts, rows.room * foreign, rows.room, indices=entries.indices, workspace=held
        )
        messages, sent = rows.encode(parts, workspace=held)
        received = yield AllToAll(phase, torch.cat([messages, counts[:, None]], dim=1))
        order = kernels.constant([(rank - turn) % world_size for turn in range(1, world_size)], device)
        arrived = received.index_select(0, order)[:, :-1].contiguous()
        lists = self.read(arrived, [(low, high)] * (world_size - 1), widest(cuts), room, divisor=1)
        inside = (entries.indices >= low) & (entries.indices < high)
        own = kernels.joined(entries.only(inside), workspace=held)
        sums = held.buffer("region", widest(cuts), torch.float32, device).zero_()
        for terms in (own, lists):
            kernels.add_rows(sums, terms, offset=low, workspace=held)
        every = Entries(*(torch.cat([mine, part.reshape(-1)]) for mine, part in zip(own, sent, strict=True)))
        load = received[:, -1].sum(dtype=torch.int32).reshape(1)
        return DenseSums(sums, low, threshold, load, every, self._check_own_sums, held)

    def gather_parts(
        self, phase: str, entries: Entries, ranges: Ranges, rooms: Sequence[int], order: Sequence[int], ring: Ring
    ) -> Pattern[Gathered]:
        lists, sent = yield from self._gather_rows(phase, entries, ranges, ring, divisor=self.divisor)
        if list(order) != sorted(order):
            ranks = kernels.constant(order, self.acc.device)
            lists = Entries(lists.indices.index_select(0, ranks), lists.values.index_select(0, ranks))
        joined = self._joined(lists)
        if any(below[1] > above[0] for below, above in itertools.pairwise(ranges)):
            before, after = joined.indices[:-1], joined.indices[1:]
            descents = (after <= before) & (after >= 0)  # padding, which stands at the end, does not count
            self.verdict.check_messages(descents.sum(dtype=torch.int32).reshape(1))
        return Gathered(joined, entries, sent)

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
        self._figures += [figure for figure in figures if isinstance(figure, torch.Tensor)]
        ranges = list(itertools.pairwise(cuts))
        lists, sent = yield from self._gather_rows(phase, entries, ranges, None, divisor=self.divisor)
        if limit >= lists.indices.numel():
            return Gathered(self._joined(lists), entries, sent)
        every = Entries(lists.indices.reshape(-1), lists.values.reshape(-1))
        limit = min(limit, self.acc.numel)
        return Gathered(kernels.largest_padded(every, limit, workspace=self.acc.workspace), entries, sent)

    def _joined(self, rows: Entries) -> Entries:
        """Return the entries of all ``rows`` as one list, with no more room than there are coordinates."""
        return kernels.joined(rows, workspace=self.acc.workspace).slice(0, self.acc.numel)

    def union(self, phase: str, entries: Entries, rooms: Sequence[int]) -> Pattern[tuple[Entries, Entries]]:
        self.verdict.check_gradient(entries.values)
        every = [(0, self.acc.numel)] * self.world_size
        lists, sent = yield from self._gather_rows(phase, entries, every, None, divisor=self.divisor)
        union = kernels.merge_rows(lists, self.acc.numel, workspace=self.acc.workspace)
        self.verdict.check_sums(union.values)
        return union, sent

    def merged(
        self, phase: str, entries: Entries, bounds: tuple[int, int], room: int, ring: Sequence[int], *, span: int
    ) -> Pattern[tuple[Entries, Entries]]:
        every = [(bounds[0], bounds[0] + span)] * len(ring)
        lists, sent = yield from self._gather_rows(phase, entries, every, ring, divisor=1)
        return kernels.merge_rows(lists, self.acc.numel, workspace=self.acc.workspace), sent

    def _gather_rows(
        self, phase: str, entries: Entries, ranges: Ranges, ring: Ring, *, divisor: int
    ) -> Pattern[tuple[Entries, Entries]]:
        """Return one row for each rank, or each of ``ring``, and what was sent of ``entries``.

        Without a ring, this is the last message of a step.
        """
        place = self.rank if ring is None else ring.index(self.rank)
        rows = self.rows(ranges, entries.room, divisor=divisor)
        own = Entries(entries.indices[None], entries.values[None])
        message, sent = rows.encode(own, workspace=self.acc.workspace, first=place)
        if ring is None:
            told = torch.cat([message[0], self.verdict.words(self._figures)])
            gathered = (yield AllGather(phase, told)) if self.world_size > 1 else told[None]
            self.verdict.hear(gathered[:, rows.words :])
            messages = gathered[:, : rows.words].contiguous()
        else:
            words = [rows.words] * len(ring)
            parts = yield from bruck_all_gather(message[0], words, place, len(ring), phase=phase, ring=ring)
            messages = torch.cat(parts).view(-1, rows.words)
        return self.read(messages, ranges, rows.span, entries.room, divisor=divisor), sent.row(0)

    def rows(self, ranges: Ranges, room: int, *, divisor: int, span: int | None = None) -> Rows:
        """Return the format of messages with ``room`` slots, of which row r holds entries in ``ranges[r]``.

        ``span`` is the width of the widest range of all ranks. By default it is that of ``ranges``.
        """
        lows = kernels.constant([low for low, _ in ranges], self.acc.device)
        return Rows(self.encoding, lows, span or max(high - low for low, high in ranges), room, divisor=divisor)

    def read(self, messages: torch.Tensor, ranges: Ranges, span: int, room: int, *, divisor: int) -> Entries:
        """Return the entries of received ``messages`` in the format of :meth:`rows`, one row for each.

        Those behind their range are reported as malformed. The format itself only ensures that they are inside the
        widest one.
        """
        rows = self.rows(ranges, room, divisor=divisor, span=span)
        lists, malformed = rows.decode(messages, workspace=self.acc.workspace)
        if any(high - low < span for low, high in ranges):
            highs = kernels.constant([high for _, high in ranges], self.acc.device)
            outside = lists.indices >= highs[:, None]
            malformed = malformed + outside.sum(dtype=torch.int32)
            lists = lists.only(~outside)
        self.verdict.check_messages(malformed)
        return lists

    def subtract(self, sent: Entries, result: Entries) -> None:
        kept = among(ascending(result.indices, self.acc.numel), sent.indices)
        self.acc.subtract(sent.only(kept), rounded=self.encoding.rounds)

    def rest(self, gathered: Gathered) -> Entries:
        own, sent, numel = gathered.own, gathered.sent, self.acc.numel
        places = torch.searchsorted(ascending(own.indices, numel), sent.indices).clamp_(max=own.room - 1)
        kept = among(ascending(gathered.entries.indices, numel), sent.indices)
        rest = sent._replace(values=own.values[places] - sent.values)
        return rest.only(kept & (sent.indices != PADDING))

    def settle(self, own: Sequence[Count] = ()) -> Pattern[tuple[list[list[int]], list[int]]]:
        numbers = [number for number in own if isinstance(number, torch.Tensor)]
        rows, values = yield from self.verdict.settle(self.world_size, numbers)
        self.figures = self.verdict.figures
        return rows, values


def all_gather_mean(
    own: Entries, rooms: Sequence[int], encoding: Encoding, acc: Accumulator, rank: int, world_size: int
) -> Pattern[tuple[SparseVector, Entries]]:
    """Return the mean over ranks of all ranks' entries, and the part of ``own`` that is in it, with the values sent.

    See :meth:`Step.union`. Messages have exact lengths: rank r sends up to ``rooms[r]`` entries.
    """
    step = Step(acc, encoding, rank, world_size)
    union, sent = yield from step.union("all-gather", own, rooms)
    return step.vector(union), sent
