"""How the entries of a step travel: in messages of exact lengths, or in messages with fixed room.

The two differ only in how many slots a message has. Exact lengths cost a message with counts, which the host reads.
Fixed room costs bytes. Nothing then waits for a GPU before the end of the step, entries without a slot stay in the
residual, and collectives replace messages between two ranks. If all entries have slots, both deliver the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, share_rows
from tritoncomm.primitives.packing import NO_VALUES, Encoding, Rows
from tritoncomm.primitives.region_cuts import trimmed_sizes
from tritoncomm.primitives.selection import rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import SUMS_OVERFLOW, Verdict, non_finite
from tritoncomm.scheduler.ranks import named
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm_kernels import Padded, Selection

Count = int | torch.Tensor  # a number that the host knows, or int32 [1] on the device
Ranges = Sequence[tuple[int, int]]


class Step(ABC):
    """One step of one rank. Lists of entries are :class:`~tritoncomm_kernels.Padded`.

    With exact lengths, a list has no padding. With fixed room, only the device knows where padding begins.
    ``encoding`` is the format of messages. A single worker neither packs nor rounds. ``is_finite`` says that this rank
    has found no NaN or Inf. ``figures`` (integers ``[world_size, figures]``) are those of :meth:`rooms`.
    """

    figures: torch.Tensor

    def __init__(self, acc: Accumulator, encoding: Encoding, rank: int, world_size: int) -> None:
        alone = Encoding(NO_VALUES if encoding.values == NO_VALUES else "fp32")
        self.encoding = encoding if world_size > 1 else alone
        self.acc, self.rank, self.world_size = acc, rank, world_size
        self.is_finite = True

    @staticmethod
    def of(acc: Accumulator, encoding: Encoding, rank: int, world_size: int) -> Step:
        """Return the step for ``acc``: with fixed room if it has a verdict, otherwise with exact lengths."""
        if acc.verdict is None:
            return ExactStep(acc, encoding, rank, world_size)
        return FixedStep(acc, acc.verdict, encoding, rank, world_size)

    @property
    def is_exact(self) -> bool:
        """True if messages have exact lengths."""
        return isinstance(self, ExactStep)

    @property
    def divisor(self) -> int:
        """What receivers divide values by. Rounded values travel as means: a quotient of one would not be exact."""
        return self.world_size if self.encoding.rounds else 1

    def vector(self, entries: Padded) -> SparseVector:
        """Return the result of the step: the mean, of ``entries`` that hold means if values are rounded, else sums."""
        values = entries.values if self.encoding.rounds else entries.values / self.world_size
        return self._vector(entries._replace(values=values))

    @abstractmethod
    def _vector(self, entries: Padded) -> SparseVector:
        """Return ``entries`` as a sparse vector."""

    @abstractmethod
    def top_k(self, k: int) -> Padded:
        """Return the ``k`` largest entries of the accumulator."""

    @abstractmethod
    def largest(self, entries: Padded, count: int) -> Padded:
        """Return the ``count`` largest of ``entries``. With fixed room, these are all that have a slot."""

    @abstractmethod
    def rooms(self, phase: str, figures: Sequence[Count], room: int, total: int) -> Pattern[list[int]]:
        """Return the number of slots of each rank's message.

        With exact lengths, all ranks exchange their ``figures``. The first of them is the number of entries, and the
        slots are these numbers, scaled down if they exceed ``total``. With fixed room, each message has ``room`` slots,
        and the figures are part of the verdict. :meth:`settle` returns those of all ranks.
        """

    @abstractmethod
    def to_all(
        self, phase: str, entries: Padded, ranges: Ranges, rooms: Sequence[int], order: Sequence[int]
    ) -> Pattern[tuple[Padded, Padded]]:
        """Gather the entries of all ranks. Return them as one ascending list, and what was sent of ``entries``.

        Rank r holds entries from ``ranges[r][0]`` up to ``ranges[r][1]``, and its message has ``rooms[r]`` slots. In
        the ``order`` of ranks that is given, their indices ascend.
        """

    @abstractmethod
    def union(self, phase: str, entries: Padded, rooms: Sequence[int]) -> Pattern[tuple[Padded, Padded]]:
        """Gather the entries of all ranks. Return their union with the sums, and what was sent of ``entries``.

        The message of rank r has ``rooms[r]`` slots. Terms are added in rank order, so all ranks get the same bits. If
        an entry or a sum is NaN or Inf, all ranks reject the step: every selection includes NaN and Inf.
        """

    @abstractmethod
    def check_sums(self, sums: torch.Tensor) -> None:
        """Let all ranks, which hold the same ``sums``, reject the step if one of them is NaN or Inf."""

    @abstractmethod
    def settle(self) -> Pattern[list[list[int]]]:
        """Return the figures of all ranks, ``[world_size][figures]``. The device has them in :attr:`figures`.

        This ends the step. With fixed room, the host waits for a GPU here, and all ranks raise the same error.
        """

    @abstractmethod
    def rounding(self, entries: Padded, sent: Padded) -> dict[str, float]:
        """Return figures about what rounding takes from ``entries``, of which ``sent`` was sent. Exact lengths only."""


class ExactStep(Step):
    """Messages of exact lengths. The receiver of a malformed message raises the error."""

    def __init__(self, acc: Accumulator, encoding: Encoding, rank: int, world_size: int) -> None:
        super().__init__(acc, encoding, rank, world_size)
        self._rows: list[list[int]] = []

    def top_k(self, k: int) -> Padded:
        return tight(self.acc.top_k(k))

    def largest(self, entries: Padded, count: int) -> Padded:
        return tight(kernels.largest(Selection.of(*entries), count, workspace=self.acc.workspace))

    def rooms(self, phase: str, figures: Sequence[Count], room: int, total: int) -> Pattern[list[int]]:
        row = [int(figure) for figure in figures]
        columns = yield from share_rows(
            row, self.is_finite, self.world_size, self.acc.device, phase=phase, limit=self.acc.numel
        )
        self._rows = [list(each) for each in zip(*columns, strict=True)]
        return trimmed_sizes(columns[0], total)

    def to_all(
        self, phase: str, entries: Padded, ranges: Ranges, rooms: Sequence[int], order: Sequence[int]
    ) -> Pattern[tuple[Padded, Padded]]:
        lists, sent = yield from self._gather(phase, entries, ranges, rooms)
        joined = Selection.join([lists[rank] for rank in order])
        return tight(joined), sent

    def union(self, phase: str, entries: Padded, rooms: Sequence[int]) -> Pattern[tuple[Padded, Padded]]:
        lists, sent = yield from self._gather(phase, entries, [(0, self.acc.numel)] * self.world_size, rooms)
        indices, sums = kernels.merge([part[:2] for part in lists], self.acc.numel, workspace=self.acc.workspace)
        if kernels.has_non_finite(sums):
            bad = [source for source, part in enumerate(lists) if kernels.has_non_finite(part.values)]
            raise non_finite(bad) if bad else NonFiniteError(SUMS_OVERFLOW)
        return Padded(indices, sums), sent

    def _gather(
        self, phase: str, entries: Padded, ranges: Ranges, rooms: Sequence[int]
    ) -> Pattern[tuple[list[Selection], Padded]]:
        rank = self.rank
        if entries.room > rooms[rank]:
            raise ProtocolMismatchError(
                f"phase {phase!r}: rank {named([rank])[0]} has {entries.room} entries, but received {rooms[rank]}"
            )
        sections = [
            self.encoding.section(low, high, room, divisor=self.divisor)
            for (low, high), room in zip(ranges, rooms, strict=True)
        ]
        values = entries.values[:0] if self.encoding.values == NO_VALUES else entries.values
        message, sent = sections[rank].encode(entries.indices, values)
        words = [section.words for section in sections]
        blocks = yield from bruck_all_gather(message, words, rank, self.world_size, phase=phase)
        return [section.decode(block) for section, block in zip(sections, blocks, strict=True)], tight(sent)

    def check_sums(self, sums: torch.Tensor) -> None:
        if kernels.has_non_finite(sums):
            raise NonFiniteError(SUMS_OVERFLOW)

    def settle(self) -> Pattern[list[list[int]]]:
        yield from ()
        self.figures = torch.tensor(self._rows, dtype=torch.int64)
        return self._rows

    def rounding(self, entries: Padded, sent: Padded) -> dict[str, float]:
        return rounding_figures(Selection.of(*entries), Selection.of(*sent)) if self.encoding.rounds else {}

    def _vector(self, entries: Padded) -> SparseVector:
        return SparseVector(entries.indices, entries.values, self.acc.numel)


class FixedStep(Step):
    """Messages with fixed room. What is wrong is counted on each device, and raised by all ranks at the end."""

    def __init__(self, acc: Accumulator, verdict: Verdict, encoding: Encoding, rank: int, world_size: int) -> None:
        super().__init__(acc, encoding, rank, world_size)
        self.verdict = verdict
        self._figures: list[torch.Tensor] = []

    def top_k(self, k: int) -> Padded:
        found = self.acc.top_k_padded(k)
        self.verdict.check_gradient(found.values)
        return found

    def largest(self, entries: Padded, count: int) -> Padded:
        return entries

    def rooms(self, phase: str, figures: Sequence[Count], room: int, total: int) -> Pattern[list[int]]:
        yield from ()
        self._figures = [figure for figure in figures if isinstance(figure, torch.Tensor)]
        return [room] * self.world_size

    def to_all(
        self, phase: str, entries: Padded, ranges: Ranges, rooms: Sequence[int], order: Sequence[int]
    ) -> Pattern[tuple[Padded, Padded]]:
        lists, sent = yield from self._gather(phase, entries, ranges, rooms)
        ranks = kernels.constant(order, self.acc.device)
        ascending = Padded(lists.indices.index_select(0, ranks), lists.values.index_select(0, ranks))
        joined = kernels.joined(ascending, workspace=self.acc.workspace)
        joined = Padded(*(part[: self.acc.numel] for part in joined))
        before, after = joined.indices[:-1], joined.indices[1:]
        descents = (after <= before) & (after >= 0)  # padding, which stands at the end, does not count
        self.verdict.check_messages(descents.sum(dtype=torch.int32).reshape(1))
        return joined, sent

    def union(self, phase: str, entries: Padded, rooms: Sequence[int]) -> Pattern[tuple[Padded, Padded]]:
        lists, sent = yield from self._gather(phase, entries, [(0, self.acc.numel)] * self.world_size, rooms)
        union = kernels.merge_rows(lists, self.acc.numel, workspace=self.acc.workspace)
        self.verdict.check_sums(union.values)
        return union, sent

    def _gather(
        self, phase: str, entries: Padded, ranges: Ranges, rooms: Sequence[int]
    ) -> Pattern[tuple[Padded, Padded]]:
        """Return one row for each rank, and what was sent of ``entries``."""
        rows, held = self.rows(ranges, max(rooms)), self.acc.workspace
        own = Padded(entries.indices[None], entries.values[None])
        message, sent = rows.encode(own, workspace=held, first=self.rank)
        gathered = (yield AllGather(phase, message[0])) if self.world_size > 1 else message
        lists, malformed = rows.decode(gathered, workspace=held)
        self.verdict.check_messages(malformed)
        return lists, sent.row(0)

    def rows(self, ranges: Ranges, room: int) -> Rows:
        """Return the format of messages with ``room`` slots, of which row r holds entries in ``ranges[r]``."""
        lows = kernels.constant([low for low, _ in ranges], self.acc.device)
        return Rows(self.encoding, lows, max(high - low for low, high in ranges), room, divisor=self.divisor)

    def check_sums(self, sums: torch.Tensor) -> None:
        self.verdict.check_sums(sums)

    def settle(self) -> Pattern[list[list[int]]]:
        rows = yield from self.verdict.settle(self.world_size, self._figures)
        self.figures = self.verdict.figures
        return rows

    def rounding(self, entries: Padded, sent: Padded) -> dict[str, float]:
        return {}

    def _vector(self, entries: Padded) -> SparseVector:
        return SparseVector.padded(entries, self.acc.numel)


def all_gather_mean(
    own: Selection, rooms: Sequence[int], encoding: Encoding, acc: Accumulator, rank: int, world_size: int
) -> Pattern[tuple[SparseVector, Selection]]:
    """Return the mean over ranks of all ranks' entries, and the part of ``own`` that is in it, with the values sent.

    See :meth:`Step.union`. Messages have exact lengths: rank r sends up to ``rooms[r]`` entries.
    """
    step = ExactStep(acc, encoding, rank, world_size)
    union, sent = yield from step.union("all-gather", tight(own), rooms)
    return step.vector(union), Selection.of(*sent)


def tight(entries: Selection) -> Padded:
    """Return ``entries`` as a list without padding."""
    return Padded(entries.indices, entries.values)
