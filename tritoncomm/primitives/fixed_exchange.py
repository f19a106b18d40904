"""How the entries of a step travel in messages with fixed room, which cost no message with counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import Gathered, bruck_all_gather, checked_counts
from tritoncomm.primitives.exchange import ROUNDED_MARGIN, Ranges, Ring, Step
from tritoncomm.primitives.packing import Encoding, Section
from tritoncomm.primitives.region_cuts import widest
from tritoncomm.primitives.region_sums import Count, DenseSums, OwnedSums
from tritoncomm.primitives.selection import among, ascending
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Pattern, read
from tritoncomm_kernels import Entries
from tritoncomm_kernels.lists import PADDING


def step_of(acc: Accumulator, encoding: Encoding, rank: int, world_size: int, width: int = 1) -> Step:
    """Return the step for ``acc``: with fixed room if it has a verdict, otherwise with exact lengths."""
    if acc.verdict is None:
        return Step(acc, encoding, rank, world_size, width)
    return FixedStep(acc, acc.verdict, encoding, rank, world_size, width)


class FixedStep(Step):
    """Messages with fixed room. What is wrong is counted on each device, and raised by all ranks at the end."""

    def __init__(
        self, acc: Accumulator, verdict: Verdict, encoding: Encoding, rank: int, world_size: int, width: int
    ) -> None:
        super().__init__(acc, encoding, rank, world_size, width)
        self.encoding = self.encoding.of_rows
        self.verdict = verdict
        self._figures: list[torch.Tensor] = []

    def at_least(self, threshold: float, most: int) -> Entries:
        largest = self.acc.top_k(min(most, self.acc.numel))
        return kernels.reaching(largest, threshold)

    def check_gradient(self, values: torch.Tensor) -> None:
        self.verdict.check_gradient(values)

    def check_sums(self, sums: torch.Tensor) -> None:
        self.verdict.check_sums(sums)

    def add(self, entries: Entries) -> None:
        self.acc.remember(entries.indices)
        self.acc.add(*entries)

    def _check_own_sums(self, sums: torch.Tensor) -> None:
        self.verdict.check_sums(sums * ROUNDED_MARGIN if self.encoding.rounds else sums)

    def rooms(self, phase: str, figures: Sequence[Count], room: int | None, total: int) -> Pattern[list[int]]:
        self._figures = [figure for figure in figures if isinstance(figure, torch.Tensor)]
        if room is not None:
            return [room] * self.world_size
        return (yield from self._counts(phase, self._figures[0], self.acc.numel))

    def _counts(self, phase: str, count: torch.Tensor, limit: int) -> Pattern[list[int]]:
        """Return the ``count`` (int32 ``[1]``) of all ranks. The host waits for a GPU."""
        everybody = yield from read(phase, (yield AllGather(phase, count)).flatten())
        return checked_counts(phase, everybody, limit)

    def largest(self, entries: Entries, count: int, room: int) -> Entries:
        if count >= entries.room == room:
            return entries
        return kernels.largest_padded(entries, count, room)

    def to_owners(
        self, phase: str, entries: Entries, cuts: Sequence[int], room: int | None, threshold: float
    ) -> Pattern[OwnedSums]:
        rank, world_size, device = self.rank, self.world_size, self.acc.device
        low, high, ranges = cuts[rank], cuts[rank + 1], list(itertools.pairwise(cuts))
        bounds = kernels.constant(cuts, device)
        starts = torch.searchsorted(ascending(entries.indices, self.acc.numel), bounds, out_int32=True)
        counts = starts[1:] - starts[:-1]
        foreign = kernels.constant([int(owner != rank) for owner in range(world_size)], device)
        if room is None:
            room = max(1, *(yield from self._counts("rooms", (counts * foreign).amax().reshape(1), entries.room)))
        section = self.encoding.section(0, widest(cuts), room)
        room = section.layout.room
        parts = kernels.top_k_rows(entries.values, starts, room * foreign, room, indices=entries.indices)
        messages, sent = section.encode_rows(self.lows(ranges), parts)
        received = yield AllToAll(phase, torch.cat([messages, counts[:, None]], dim=1))
        order = kernels.constant([(rank - turn) % world_size for turn in range(1, world_size)], device)
        arrived = received.index_select(0, order)[:, :-1].contiguous()
        lists = self.read(arrived, [(low, high)] * (world_size - 1), section)
        inside = (entries.indices >= low) & (entries.indices < high)
        own = kernels.joined(entries.only(inside))
        sums = torch.zeros(widest(cuts), dtype=torch.float32, device=device)
        for terms in (own, lists):
            kernels.add_rows(sums, terms, offset=low)
        every = Entries(*(torch.cat([mine, part.reshape(-1)]) for mine, part in zip(own, sent, strict=True)))
        load = received[:, -1].sum(dtype=torch.int32).reshape(1)
        return DenseSums(sums, low, threshold, load, every, self._check_own_sums, self.acc.guesses["region"])

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
        return Gathered(kernels.largest_padded(every, limit), entries, sent)

    def _joined(self, rows: Entries) -> Entries:
        """Return the entries of all ``rows`` as one list, with no more room than there are coordinates."""
        return kernels.joined(rows).slice(0, self.acc.numel)

    def union(self, phase: str, entries: Entries, rooms: Sequence[int]) -> Pattern[tuple[Entries, Entries]]:
        self.verdict.check_gradient(entries.values)
        every = [(0, self.acc.numel)] * self.world_size
        lists, sent = yield from self._gather_rows(phase, entries, every, None, divisor=self.divisor)
        union = kernels.merge_rows(lists, self.acc.numel)
        self.verdict.check_sums(union.values)
        return union, sent

    def merged(
        self, phase: str, entries: Entries, bounds: tuple[int, int], room: int, ring: Sequence[int], *, span: int
    ) -> Pattern[tuple[Entries, Entries]]:
        every = [(bounds[0], bounds[0] + span)] * len(ring)
        lists, sent = yield from self._gather_rows(phase, entries, every, ring, divisor=1)
        return kernels.merge_rows(lists, self.acc.numel), sent

    def _gather_rows(
        self, phase: str, entries: Entries, ranges: Ranges, ring: Ring, *, divisor: int
    ) -> Pattern[tuple[Entries, Entries]]:
        """Return one row for each rank, or each of ``ring``, and what was sent of ``entries``.

        Without a ring, this is the last message of a step.
        """
        place = self.rank if ring is None else ring.index(self.rank)
        section = self.encoding.section(0, max(high - low for low, high in ranges), entries.room, divisor=divisor)
        own, low = Entries(entries.indices[None], entries.values[None]), self.lows(ranges)[place : place + 1]
        message, sent = section.encode_rows(low, own)
        if ring is None:
            told = torch.cat([message[0], self.verdict.words(self._figures)])
            gathered = (yield AllGather(phase, told)) if self.world_size > 1 else told[None]
            self.verdict.hear(gathered[:, section.words :])
            messages = gathered[:, : section.words].contiguous()
        else:
            words = [section.words] * len(ring)
            parts = yield from bruck_all_gather(message[0], words, place, len(ring), phase=phase, ring=ring)
            messages = torch.cat(parts).view(-1, section.words)
        return self.read(messages, ranges, section), sent.row(0)

    def lows(self, ranges: Ranges) -> torch.Tensor:
        """Return where ``ranges`` begin, int32 on the device."""
        return kernels.constant([low for low, _ in ranges], self.acc.device)

    def read(self, messages: torch.Tensor, ranges: Ranges, section: Section) -> Entries:
        """Return the entries of received ``messages``, one row for each, which hold entries in ``ranges``.

        The ``section`` is as wide as the widest range of all ranks. Entries behind their range are reported as
        malformed. The format itself only ensures that they are inside the widest one.
        """
        lists, malformed = section.decode_rows(self.lows(ranges), messages)
        if any(high - low < section.high for low, high in ranges):
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
        return (yield from self.verdict.settle(self.world_size, numbers))
