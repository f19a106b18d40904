"""W, the working vector of SparDL, and the lists of entries that leave and enter it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.algorithms.spardl_teams import Place
from tritoncomm.primitives.blocks import Blocks, ExactBlocks, FixedBlocks
from tritoncomm.primitives.collectives import Gathered
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.fixed_exchange import FixedStep
from tritoncomm.primitives.selection import among, ascending
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Entries
from tritoncomm_kernels.lists import PADDING


class WorkingVector:
    """W: the accumulator during the exchange. At the end, it holds the values that this rank has truncated.

    W is the accumulator itself. Selected entries are removed from it, and received entries are added to it. The
    accumulator remembers what each change has overwritten, and :meth:`collect_residuals` restores that. Unless a sum is
    exactly zero, W is the same with messages of exact lengths and with fixed room.
    """

    def __init__(self, step: Step, place: Place) -> None:
        self.step, self.acc, self.place = step, step.acc, place
        self._taken: list[torch.Tensor] = []

    def blocks(self, numbers: Sequence[int], h: int | None = None, room: int | None = None) -> Blocks:
        """Return the blocks with these ``numbers``, with their budgets, or ``h`` entries of each.

        ``room`` is the fixed room for ``h`` entries.
        """
        cuts, budgets = self.place.cuts, self.place.budgets
        ranges = [(cuts[b], cuts[b + 1], budgets[b] if h is None else h) for b in numbers]
        if isinstance(self.step, FixedStep):
            return FixedBlocks(self.step, ranges, self.place.widest, room or self.place.room)
        return ExactBlocks(self.step, ranges)

    def take(self, blocks: Blocks) -> Entries:
        """Return the largest entries of ``blocks``. :meth:`remove` then removes what is sent of them."""
        taken = blocks.largest()
        self.acc.remember(*taken)
        self._taken.append(taken.indices)
        return taken

    def take_own(self, h: int | None = None, room: int | None = None) -> Entries:
        """Return the largest entries of this rank's block, as one list."""
        taken = self.take(self.blocks([self.place.position], h, room))
        return Entries(*(part.reshape(-1) for part in taken))

    def remove(self, taken: Entries, sent: Entries) -> None:
        """Remove those of the ``taken`` entries that were ``sent``. What rounding takes away stays."""
        self.step.count_rounding(taken, sent)
        self.acc.subtract(sent, rounded=self.step.encoding.rounds)

    def keep_rest(self, entries: Entries, sent: Entries, share: float) -> None:
        """Add ``share`` times what rounding takes away from merged ``entries``, of which ``sent`` was sent."""
        if not self.step.encoding.rounds:
            return
        self.step.count_rounding(entries, sent)
        held = self.acc.values_at(entries.indices)
        self.acc.remember(entries.indices, held)
        self.acc.replace(*entries)
        self.acc.add(*sent, scale=-1.0)
        rest = self.acc.values_at(entries.indices)
        self.acc.replace(entries.indices, held + (rest if share == 1.0 else share * rest))

    def merge(self, own: Entries, ring: Sequence[int], room: int | None = None) -> Pattern[tuple[Entries, Entries]]:
        """Return the sums of the ``own`` entries of all ranks in ``ring``, and what was sent of those of this rank.

        The ranks have the same block, and no more than ``room`` entries. By default, this is its budget.
        """
        place, w = self.place, self.place.position
        bounds, room = (place.cuts[w], place.cuts[w + 1]), room or place.budget
        return (yield from self.step.merged("merge", own, bounds, room, ring, span=place.widest))

    def truncated(self, union: Entries, share: float | None) -> Entries:
        """Return the largest entries of ``union``, as many as the budget. W gets ``share`` times the others."""
        kept = self.step.largest(union, self.place.budget, self.place.room)
        if share is not None:
            self.acc.remember(union.indices)
            before = self.acc.values_at(kept.indices)
            self.acc.add(*union, scale=share)
            self.acc.replace(kept.indices, before)
        return kept

    def all_gather(self, own: Entries) -> Pattern[Gathered]:
        """Gather the blocks of the members of the team. All ranks gather if there is one team."""
        place = self.place
        ranges = list(zip(place.cuts, place.cuts[1:], strict=False))
        ring = None if place.teams == 1 < place.team_size else place.team  # one worker alone has nobody to tell
        order = range(place.team_size)
        return (yield from self.step.gather_parts("all-gather", own, ranges, place.budgets, order, ring))

    def collect_residuals(self, residuals: str, final: torch.Tensor) -> None:
        """Write the new residual. ``final`` are the indices of the result.

        GRES keeps the accumulator, and W where the result has an entry. LRES clears every entry that this rank sent.
        PRES clears the sent entries that the result contains.
        """
        left = self.acc.values_at(final)
        self.acc.undo()
        if residuals == "global":
            if self.place.teams > 1:  # what several ranks truncate at one coordinate can overflow
                self.step.check_sums(left)
            self.acc.replace(final, left)
            return
        kept = ascending(final, self.acc.numel)
        for sent in self._taken:
            self.acc.clear(sent if residuals == "local" else torch.where(among(kept, sent), sent, PADDING))
