"""W, the working vector of SparDL, and the lists of entries that leave and enter it, in both forms.

With exact lengths, a list has no padding, and a block as many entries as its budget. In the static form
(:class:`~tritoncomm.algorithms.base.StaticRecipe`), all blocks have the room of the largest budget and the span of the
widest block, and the host reads results once, at the end. A block still takes no more than its own budget. Unless a sum
is exactly zero, both forms give the same bits.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.spardl_teams import Place, reduce_scatter_schedule, runs
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather
from tritoncomm.primitives.packing import Rows, Sections
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.selection import RoundingError, among, ascending, left_out, rest_of
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED, Verdict
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm_kernels import Padded, Selection
from tritoncomm_kernels.entries import PADDING
from tritoncomm_kernels.select import SparseList

_GATHER = "all-gather"


class WorkingVector(ABC):
    """W: the accumulator during the exchange. At the end, it holds the values that this rank has truncated.

    W is the accumulator itself. Selected entries are removed from it, and received entries are added to it. A log holds
    what each change has overwritten, and :meth:`collect_residuals` restores it.
    """

    def __init__(self, acc: Accumulator, place: Place) -> None:
        self.acc = acc
        self.place = place
        self._log: list[Padded] = []
        self._taken: list[torch.Tensor] = []

    @abstractmethod
    def words(self, blocks: Sequence[int], h: int | None = None, room: int | None = None) -> int:
        """Return the words of a message with ``blocks``, or with ``h`` entries of one block.

        ``room`` is that of the static form for ``h`` entries.
        """

    @abstractmethod
    def send(
        self, blocks: Sequence[int], h: int | None = None, room: int | None = None, *, divisor: int = 1
    ) -> tuple[torch.Tensor, Padded]:
        """Move the largest entries of ``blocks`` from W to a message, as many as their budgets, or ``h`` of one block.

        Also returns what the receivers get, times ``divisor``. What rounding takes away stays in W.
        """

    @abstractmethod
    def forward(self, entries: Padded, *, share: float, divisor: int = 1) -> tuple[torch.Tensor, Padded]:
        """Return the message with the merged ``entries`` of this rank's block, and what its receivers get.

        W gets ``share`` times what rounding takes away.
        """

    @abstractmethod
    def add(self, message: torch.Tensor, blocks: Sequence[int]) -> None:
        """Add the entries of a received message with ``blocks`` to W. None of them is selected yet."""

    @abstractmethod
    def union(
        self, messages: Sequence[torch.Tensor], own: Padded | None = None, h: int | None = None, room: int | None = None
    ) -> tuple[Padded, int | torch.Tensor]:
        """Return the sums of ``own`` and of the entries of received messages with this rank's block, and their number.

        The number is int32 ``[1]`` in the static form.
        """

    @abstractmethod
    def truncated(self, union: Padded, share: float | None) -> Padded:
        """Return the largest entries of ``union``, as many as the budget. W gets ``share`` times the others."""

    @abstractmethod
    def all_gather(self, message: torch.Tensor) -> Pattern[Padded]:
        """Gather the blocks of the members of the team, as means."""

    @abstractmethod
    def settle(
        self, delivered: Padded, union: int | torch.Tensor | None
    ) -> Pattern[tuple[SparseVector, int, int, dict[str, float]]]:
        """Return the mean, its number of entries, that of ``union``, and figures. All ranks reject NaN and Inf."""

    @abstractmethod
    def _values_at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return W at the ``indices`` of a list."""

    def _set(self, entries: Padded) -> None:
        self.acc.replace(*entries)

    def _check_residual(self, left: torch.Tensor) -> None:  # noqa: B027 - exact lengths check each change
        """Check the values that W holds at the entries of the result."""

    def _note(self, indices: torch.Tensor) -> None:
        self._log.append(Padded(indices, self._values_at(indices)))

    def collect_residuals(self, residuals: str, final: torch.Tensor) -> None:
        """Write the new residual. ``final`` are the indices of the result.

        GRES keeps the accumulator, and W where the result has an entry. LRES clears every entry that this rank sent.
        PRES clears the sent entries that the result contains.
        """
        left = self._values_at(final)
        for before in reversed(self._log):
            self._set(before)
        if residuals == "global":
            self._check_residual(left)
            self._set(Padded(final, left))
            return
        kept = ascending(final, self.acc.numel)
        for sent in self._taken:
            cleared = sent if residuals == "local" else torch.where(among(kept, sent), sent, PADDING)
            self.acc.clear(cleared)


class ExactVector(WorkingVector):
    """W with lists of exact lengths. A part of the accumulator is computed when its blocks are selected."""

    def __init__(self, acc: Accumulator, place: Place) -> None:
        super().__init__(acc, place)
        schedule = reduce_scatter_schedule(place.team_size)
        bags = [*(place.bag(place.position + distance, count) for distance, count in schedule), [place.position]]
        cuts = place.cuts
        self._parts = {run: acc.part(cuts[run[0]], cuts[run[1] + 1]) for bag in bags for run in runs(bag)}
        acc.absorb()
        self._received: list[Selection] = []
        self._error = RoundingError()

    def words(self, blocks: Sequence[int], h: int | None = None, room: int | None = None) -> int:
        return self.place.message(blocks, room=h).words

    def send(
        self, blocks: Sequence[int], h: int | None = None, room: int | None = None, *, divisor: int = 1
    ) -> tuple[torch.Tensor, Padded]:
        taken = self._take(blocks, h)
        self._note(taken.indices)
        self.acc.clear(taken.indices)
        self._taken.append(taken.indices)
        return self._encoded(taken, self.place.message(blocks, room=h, divisor=divisor), 1.0)

    def forward(self, entries: Padded, *, share: float, divisor: int = 1) -> tuple[torch.Tensor, Padded]:
        layout = self.place.message([self.place.position], divisor=divisor)
        return self._encoded(Selection.of(*entries), layout, share)

    def add(self, message: torch.Tensor, blocks: Sequence[int]) -> None:
        self._received.append(self.place.message(blocks).decode(message))

    def union(
        self, messages: Sequence[torch.Tensor], own: Padded | None = None, h: int | None = None, room: int | None = None
    ) -> tuple[Padded, int | torch.Tensor]:
        layout = self.place.message([self.place.position], room=h)
        lists = [layout.decode(message)[:2] for message in messages]
        known = [] if own is None else [(own.indices, own.values)]
        union = Padded(*kernels.merge([*known, *lists], self.acc.numel, workspace=self.acc.workspace))
        return union, union.room

    def truncated(self, union: Padded, share: float | None) -> Padded:
        every = Selection.of(*union)
        kept = kernels.largest(every, self.place.budget, workspace=self.acc.workspace)
        if share is not None and not self._add_share(left_out(every, kept), share):
            # The share overflows. NaN makes all ranks reject the step.
            kept = kept._replace(values=torch.full_like(kept.values, torch.nan))
        return Padded(kept.indices, kept.values)

    def all_gather(self, message: torch.Tensor) -> Pattern[Padded]:
        place = self.place
        layouts = [place.message([b], divisor=place.world_size) for b in range(place.team_size)]
        words = [layout.words for layout in layouts]
        blocks = yield from bruck_all_gather(
            message, words, place.position, place.team_size, phase=_GATHER, ring=place.team
        )
        delivered = Selection.join([layout.decode(block) for layout, block in zip(layouts, blocks, strict=True)])
        return Padded(delivered.indices, delivered.values)

    def settle(
        self, delivered: Padded, union: int | torch.Tensor | None
    ) -> Pattern[tuple[SparseVector, int, int, dict[str, float]]]:
        yield from ()
        if kernels.has_non_finite(delivered.values):  # raised on all ranks, because all hold the same blocks
            raise NonFiniteError(REJECTED)
        self.acc.absorb(*self._parts.values())
        figures = self._error.figures() if self.place.encoding.rounds else {}
        return SparseVector(*delivered, self.acc.numel), delivered.room, int(union or 0), figures

    def _take(self, blocks: Sequence[int], h: int | None) -> Selection:
        """Return the largest entries of ``blocks`` in W, after everything that was received for them is added."""
        cuts, parts = self.place.cuts, []
        for first, last in runs(blocks):
            start, stop = cuts[first], cuts[last + 1]
            bounds = [cut - start for cut in cuts[first : last + 2]]
            budgets = self.place.budgets[first : last + 1] if h is None else [h]
            terms = self._received_in(start, stop)
            part = self._parts[first, last].top_k_segments(bounds, budgets, terms)
            for indices, values in terms:
                self._note(indices + start)
                self.acc.add(indices + start, values)
            parts.append(part._replace(indices=part.indices + start))
        return parts[0] if len(parts) == 1 else Selection.join(parts)

    def _received_in(self, start: int, stop: int) -> list[SparseList]:
        """Return what was received for the coordinates from ``start`` up to ``stop``, counted from ``start``."""
        parts = [entries.slice(*offsets(entries.indices, (start, stop))) for entries in self._received]
        return [(part.indices - start, part.values) for part in parts if part.found]

    def _encoded(self, entries: Selection, layout: Sections, share: float) -> tuple[torch.Tensor, Padded]:
        """Return the message with ``entries``, and what its receivers get. See :meth:`forward`.

        If W overflows, all values become NaN, and all ranks reject the step.
        """
        message, sent = layout.encode(entries.indices, entries.values)
        if self.place.encoding.rounds:
            self._error.add(entries, sent)
            if not self._add_share(rest_of(entries, sent), share):
                message, sent = layout.encode(entries.indices, torch.full_like(entries.values, torch.nan))
        return message, Padded(sent.indices, sent.values)

    def _add_share(self, cut: Selection, share: float) -> bool:
        """Add ``share`` times ``cut``, which this rank truncated, to W. Return False if a sum there is not finite."""
        self._note(cut.indices)
        self.acc.add(cut.indices, cut.values * share)
        return not kernels.has_non_finite(self._values_at(cut.indices))

    def _values_at(self, indices: torch.Tensor) -> torch.Tensor:
        return self.acc.dense().index_select(0, indices)  # without padding, torch is faster than the kernels


class StaticVector(WorkingVector):
    """W with lists that have padding. Nothing waits for a GPU before :meth:`settle`."""

    def __init__(self, acc: Accumulator, place: Place, verdict: Verdict) -> None:
        super().__init__(acc, place)
        self.verdict = verdict
        self.workspace = acc.workspace
        acc.selected = 0

    def words(self, blocks: Sequence[int], h: int | None = None, room: int | None = None) -> int:
        return len(blocks) * self._rows(blocks, room).words

    def send(
        self, blocks: Sequence[int], h: int | None = None, room: int | None = None, *, divisor: int = 1
    ) -> tuple[torch.Tensor, Padded]:
        cuts, budgets, gap = self.place.segments(blocks)
        if h is not None:
            budgets = [h]
        bounds = kernels.constant(cuts, self.acc.device)
        rows = Rows(self.place.encoding, bounds[:-1], self.place.widest, room or self.place.room, divisor=divisor)
        selected = self.acc.selected + sum(min(rows.room, budget) for budget in budgets)
        limits = kernels.constant(budgets, self.acc.device)
        taken = kernels.top_k_rows(self.acc.dense(), bounds, limits, rows.room, workspace=self.workspace)
        self.acc.selected = selected
        self._note(taken.indices)
        message, sent = rows.encode(taken, workspace=self.workspace)
        if rows.rounds:
            self.acc.add(*sent, scale=-1.0)
        else:
            self.acc.clear(taken.indices)
        self._taken.append(taken.indices)
        if gap is not None:
            message = torch.cat([message[:gap], message[gap + 1 :]])
        return message.reshape(-1), sent

    def forward(self, entries: Padded, *, share: float, divisor: int = 1) -> tuple[torch.Tensor, Padded]:
        rows = self._rows([self.place.position], divisor=divisor)
        message, sent = rows.encode(entries, workspace=self.workspace)
        if rows.rounds:
            self._note(entries.indices)
            held = self._log[-1].values
            self._set(entries)
            self.acc.add(*sent, scale=-1.0)
            rest = self._values_at(entries.indices)
            self._set(entries._replace(values=held + (rest if share == 1.0 else share * rest)))
        return message.reshape(-1), sent

    def add(self, message: torch.Tensor, blocks: Sequence[int]) -> None:
        received = self._read(self._rows(blocks), message)
        self._note(received.indices)
        self.acc.add(*received)

    def union(
        self, messages: Sequence[torch.Tensor], own: Padded | None = None, h: int | None = None, room: int | None = None
    ) -> tuple[Padded, int | torch.Tensor]:
        lists = self._read(self._rows([self.place.position] * len(messages), room), torch.cat(list(messages)))
        if own is not None:
            lists = Padded(*(torch.cat(parts) for parts in zip(own, lists, strict=True)))
        union = kernels.merge_rows(lists, self.acc.numel, workspace=self.workspace)
        return union, kernels.count_entries(union)

    def truncated(self, union: Padded, share: float | None) -> Padded:
        # Made on the device: the room changes with h, and the host would wait for the copy of a new constant.
        bounds = torch.arange(0, union.room + 1, union.room, dtype=torch.int32, device=self.acc.device)
        budget = kernels.constant((self.place.budget,), self.acc.device)
        kept = kernels.top_k_rows(
            union.values, bounds, budget, self.place.room, indices=union.indices, workspace=self.workspace
        )
        if share is not None:
            self._note(union.indices)
            before = self._values_at(kept.indices)
            self.acc.add(*union, scale=share)
            self._set(kept._replace(values=before))
        return kept

    def all_gather(self, message: torch.Tensor) -> Pattern[Padded]:
        place = self.place
        rows = self._rows(range(place.team_size), divisor=place.world_size)
        if place.teams > 1:
            words = [rows.words] * place.team_size
            parts = yield from bruck_all_gather(
                message, words, place.position, place.team_size, phase=_GATHER, ring=place.team
            )
            message = torch.cat(parts)
        elif place.world_size > 1:  # the last message, which all ranks gather
            every = yield AllGather(_GATHER, torch.cat([message, self.verdict.words()]))
            self.verdict.hear(every[:, message.numel() :])
            message = every[:, : message.numel()].contiguous()
        gathered = self._read(rows, message)
        if any(stop - start < place.widest for start, stop in itertools.pairwise(place.cuts)):
            # A row may reach one element into the next block, unless its message is malformed.
            stops = kernels.constant(place.cuts[1:], self.acc.device)
            self.verdict.check_messages((gathered.indices >= stops[:, None]).sum(dtype=torch.int32).reshape(1))
        return kernels.joined(gathered, workspace=self.workspace)

    def settle(
        self, delivered: Padded, union: int | torch.Tensor | None
    ) -> Pattern[tuple[SparseVector, int, int, dict[str, float]]]:
        self.verdict.check_result(delivered.values)
        further = [union] if isinstance(union, torch.Tensor) else []
        counts = [kernels.count_entries(delivered), *further]
        _, own = yield from self.verdict.settle(self.place.world_size, counts)
        return SparseVector.padded(delivered, self.acc.numel), own[0], sum(own[1:]), {}

    def _values_at(self, indices: torch.Tensor) -> torch.Tensor:
        return self.acc.values_at(indices)

    def _check_residual(self, left: torch.Tensor) -> None:
        if self.place.teams > 1:  # what several ranks truncate at one coordinate can overflow
            self.verdict.check_sums(left)

    def _rows(self, blocks: Sequence[int], room: int | None = None, *, divisor: int = 1) -> Rows:
        """Return the layout of messages that hold one row for each of ``blocks``."""
        lows = kernels.constant([self.place.cuts[b] for b in blocks], self.acc.device)
        return Rows(self.place.encoding, lows, self.place.widest, room or self.place.room, divisor=divisor)

    def _read(self, rows: Rows, message: torch.Tensor) -> Padded:
        """Return the entries of a received message, one row for each block."""
        entries, malformed = rows.decode(message.view(-1, rows.words), workspace=self.workspace)
        self.verdict.check_messages(malformed)
        return entries
