"""SparDL: sparse all-reduce with message sizes known in advance, for any world size.

X. Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", ICDE 2024.

P ranks form d teams of Q = P/d ranks. The vector is split into Q blocks, each with a budget of entries.
Spar-Reduce-Scatter (SRS) sums the blocks inside each team and truncates a block to its budget just before sending it.
Spar-All-Gather (SAG) merges the blocks of the teams. A Bruck all-gather distributes the merged blocks inside each
team. Global residual collection (GRES) keeps all truncated values as residuals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import BudgetedAlgorithm, EntryRecipe, StaticRecipe, check, check_at_least
from tritoncomm.algorithms.spardl_static import SparDLStaticStep, static_forecast
from tritoncomm.algorithms.spardl_teams import (
    Place,
    SparDLState,
    fewest,
    power_of_two,
    reduce_scatter_schedule,
    runs,
)
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, dense_exchange
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.selection import RoundingError, entries_to_keep, left_out, rest_of
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED, with_verdict
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Inbox, Pattern, Round
from tritoncomm.scheduler.wire import Sections
from tritoncomm_kernels import Selection
from tritoncomm_kernels.select import SparseList


@dataclass(frozen=True, kw_only=True)
class SparDL(EntryRecipe, StaticRecipe):
    """Settings of SparDL.

    * ``teams``: d, the number of teams. It must divide the world size. More teams need fewer rounds, but three or
      more teams also send more words. ``"auto"`` picks the d that is fastest in the cost model.
    * ``latency_words``: latency of a message in the cost model of ``teams="auto"``, as the number of words that the
      link transfers in that time. The default is 30 us at 10 Gbit/s.
    * ``sag``: how teams merge. ``"recursive"`` is R-SAG and needs a power-of-two number of teams. ``"bruck"`` is
      B-SAG and works for any number: each team sends h entries per block, and h adapts to the size of the union.
      ``"auto"`` uses R-SAG where possible.
    * ``residuals``: ``"global"`` is the paper's GRES and loses nothing. ``"partial"`` (PRES) and ``"local"`` (LRES)
      exist for comparison. They lose values that are truncated on the way.

    Every block delivers at least one entry, because a block without a budget would never be delivered. If k is below
    Q, Q entries are delivered.
    """

    name: ClassVar[str] = "spardl"
    averages_when_dense: ClassVar[bool] = True
    teams: int | str = 1
    sag: str = "auto"
    residuals: str = "global"
    latency_words: float = 9375.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "latency_words")
        check(self, "sag", self.sag in ("auto", "recursive", "bruck"), "must be auto, recursive or bruck")
        check(self, "residuals", self.residuals in ("global", "partial", "local"), "must be global, partial or local")
        if self.teams != "auto":
            check_at_least(self, 1, "teams", whole=True)

    def build(self, numel: int) -> SparDLAlgorithm:
        return SparDLAlgorithm(self, numel)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`: all teams have the same size."""
        self.teams_for(world_size, 1)

    def teams_for(self, world_size: int, k: int) -> int:
        """Return d, the number of teams for ``world_size`` ranks and ``k`` entries. A world size of 1 is one team.

        Raises :class:`~tritoncomm.ConfigurationError` if ``teams`` and ``sag`` do not fit the world size.
        """
        if world_size == 1:
            return 1
        if self.teams == "auto":
            divisors = (d for d in range(1, world_size + 1) if world_size % d == 0 and self._can_merge(d))
            return min(divisors, key=lambda d: (self._words(d, world_size, k), d))
        assert isinstance(self.teams, int)
        if world_size % self.teams:
            raise ConfigurationError(f"teams={self.teams} does not divide world_size={world_size}: choose a divisor")
        if not self._can_merge(self.teams):
            raise ConfigurationError(
                f"sag='recursive' with teams={self.teams}: teams must be a power of two, or choose sag='bruck'"
            )
        return self.teams

    def _words(self, d: int, world_size: int, k: int) -> float:
        """Return the most words that d teams receive in plain messages. A message counts as ``latency_words`` more."""
        size = world_size // d
        k = max(k, size)  # every block delivers at least one entry
        between = cost.log2(d) if self.recursive(d) else d - 1
        messages = 2 * cost.log2(size) + cost.log2(d)
        return 4 * k * (size - 1) / size + 2 * k / size * between + self.latency_words * messages

    def recursive(self, teams: int) -> bool:
        """Return True if ``teams`` teams merge by R-SAG."""
        return self.sag == "recursive" or (self.sag == "auto" and power_of_two(teams))

    def _can_merge(self, teams: int) -> bool:
        return self.sag != "recursive" or power_of_two(teams)


class _Bag(NamedTuple):
    """The part of W with the blocks from coordinate ``start`` up to ``stop``, after their selection.

    ``sums`` are those of residual and gradient. ``received`` are the lists that were added to W before the selection,
    and ``taken`` are the indices of the selected entries, which are 0 in W. Indices count from ``start``. With
    ``delivers``, the result has no other entries of these blocks.
    """

    start: int
    stop: int
    sums: Accumulator
    received: list[SparseList]
    taken: torch.Tensor
    delivers: bool

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return W at ascending ``indices``, which count from ``start``."""
        values = self.sums.values_at(indices)
        for entries in self.received:
            values = _with_terms(values, indices, *entries)
        is_taken, _ = kernels.find(indices, self.taken)
        return values.masked_fill_(is_taken, 0.0)


class _WorkingVector:
    """W: the accumulator during the exchange.

    Selected entries are removed from W, and received entries are added to it. At the end, W holds the values that
    this rank has truncated. W itself is not stored: the accumulator stays as it is, and the changes are kept as lists.
    A part of the accumulator is computed when its blocks are selected. Each block is selected once.
    """

    def __init__(self, acc: Accumulator, place: Place) -> None:
        self.acc = acc
        self.place = place
        self.bags: list[_Bag] = []
        self.received: list[Selection] = []
        self.shares: list[SparseList] = []  # added after the selection of their blocks
        self.taken: list[torch.Tensor] = []
        self.error = RoundingError()

    def take(self, blocks: Sequence[int], budget: int | None = None, *, delivers: bool = False) -> Selection:
        """Remove the largest entries of each of ``blocks`` from W, up to the block's budget, and return them.

        ``budget`` replaces the budget of a single block. With ``delivers``, the result has no other entries of
        ``blocks``.
        """
        cuts, parts = self.place.cuts, []
        for first, last in runs(blocks):
            start, stop = cuts[first], cuts[last + 1]
            bounds = [cut - start for cut in cuts[first : last + 2]]
            budgets = self.place.budgets[first : last + 1] if budget is None else [budget]
            sums, received = self.acc.part(start, stop), self._received(start, stop)
            part = sums.top_k_segments(bounds, budgets, received)
            self.bags.append(_Bag(start, stop, sums, received, part.indices, delivers))
            parts.append(part._replace(indices=part.indices + start))
        taken = parts[0] if len(parts) == 1 else Selection.join(parts)
        self.taken.append(taken.indices)
        return taken

    def encode(self, entries: Selection, layout: Sections, share: float = 1.0) -> tuple[torch.Tensor, Selection]:
        """Return the message with ``entries``, and the entries that its receivers will decode.

        W gets ``share`` times what rounding takes away. If W overflows, all values become NaN, and all ranks reject the
        step.
        """
        message, sent = layout.encode(entries.indices, entries.values)
        if self.place.encoding.rounds:
            self.error.add(entries, sent)
        if self.place.encoding.rounds and not self.add_share(rest_of(entries, sent), share):
            message, sent = layout.encode(entries.indices, torch.full_like(entries.values, torch.nan))
        return message, sent

    def add(self, entries: Selection) -> None:
        """Add received entries to W, in blocks that are not selected yet."""
        self.received.append(entries)

    def add_share(self, cut: Selection, share: float) -> bool:
        """Add ``share`` times ``cut``, which this rank truncated, to W. Return False if a sum there is not finite."""
        if cut.found:
            self.shares.append((cut.indices, cut.values * share))
        return not kernels.has_non_finite(self.at(cut.indices))

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return W at ascending ``indices`` of entries that were truncated or are in the result."""
        values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
        cuts = iter(offsets(indices, [cut for bag in self.bags for cut in (bag.start, bag.stop)]))
        for bag, first, last in zip(self.bags, cuts, cuts, strict=True):
            if first < last and not bag.delivers:  # there, all of them were taken
                values[first:last] = bag.at(indices[first:last] - bag.start)
        for entries in self.shares:
            values = _with_terms(values, indices, *entries)
        return values

    def _received(self, start: int, stop: int) -> list[SparseList]:
        """Return what was received for the coordinates from ``start`` up to ``stop``, counted from ``start``."""
        parts = [entries.slice(*offsets(entries.indices, (start, stop))) for entries in self.received]
        return [(part.indices - start, part.values) for part in parts if part.found]


def _with_terms(values: torch.Tensor, indices: torch.Tensor, others: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Return ``values`` at ``indices``, plus ``terms`` where these are also in ``others`` (not empty)."""
    is_there, where = kernels.find(indices, others)
    return torch.where(is_there, values + terms[where], values)


class SparDLAlgorithm(BudgetedAlgorithm):
    """SparDL on one rank. :meth:`reduce` follows the paper from top to bottom."""

    state: SparDLState

    def __init__(self, recipe: SparDL, numel: int) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.k = entries_to_keep(numel, recipe.density)
        self.state = SparDLState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`.

        NaN and Inf rank above every finite magnitude. They survive every truncation and reach all ranks.
        """
        place = self._place(rank, world_size)
        if place is None:
            return (yield from dense_exchange(acc, world_size))
        state = self.state if self.state.world_size == world_size else SparDLState(world_size)
        if acc.verdict is not None:
            step = SparDLStaticStep(acc, acc.verdict, place, self.recipe.residuals)
            entries, self.state, self.report = yield from step.run(state, recursive=self.recipe.recursive(place.teams))
            return SparseVector.padded(entries, self.numel)
        working = _WorkingVector(acc, place)
        # Spar-Reduce-Scatter (SRS) inside the team.
        yield from self._reduce_scatter(working, place)
        # Spar-All-Gather (SAG) across teams.
        if place.teams == 1:
            own = working.take([place.position], delivers=True)
        elif self.recipe.recursive(place.teams):
            own = yield from self._merge_recursively(working, place)
        else:
            own, state = yield from self._merge_by_bruck(working, place, state)
        # Bruck all-gather inside the team.
        delivered = yield from self._all_gather(working, own, place)
        if kernels.has_non_finite(delivered.values):  # raised on all ranks, because all hold the same blocks
            raise NonFiniteError(REJECTED)
        # Global residual collection (GRES).
        self._collect_residuals(acc, working, delivered.indices)
        acc.selected = sum(len(indices) for indices in working.taken)
        rounding = working.error.figures() if place.encoding.rounds else {}
        self.report = {"delivered": float(delivered.found), "h": float(state.h), **rounding}
        self.state = state
        return SparseVector(delivered.indices, delivered.values, self.numel)

    def _place(self, rank: int, world_size: int) -> Place | None:
        """Return this rank's place, or None if every entry is delivered and the exchange is dense.

        With some numbers of workers, this is so at a density just below 1, where :attr:`goes_dense` is False.
        """
        teams = self.recipe.teams_for(world_size, self.k)
        size = world_size // teams
        cuts = [self.numel * b // size for b in range(size + 1)]
        widths = [stop - start for start, stop in itertools.pairwise(cuts)]
        shares = [(b + 1) * self.k // size - b * self.k // size for b in range(size)]
        budgets = [min(width, max(1, share)) for width, share in zip(widths, shares, strict=True)]
        encoding = self.recipe.encoding if world_size > 1 else wire.PLAIN
        return None if budgets == widths else Place(rank, teams, size, cuts, budgets, encoding)

    def _reduce_scatter(self, working: _WorkingVector, place: Place) -> Pattern[None]:
        """SRS: truncate a block only when it is sent, after everything that it has received is added."""
        team, w, size = place.team, place.position, place.team_size
        for distance, count in reduce_scatter_schedule(size):
            to, source = team[(w + distance) % size], team[(w - distance) % size]
            leaving, arriving = place.bag(w + distance, count), place.message(place.bag(w, count))
            message, _ = working.encode(working.take(leaving), place.message(leaving))
            inbox: Inbox = yield Round("reduce-scatter", {to: message}, {source: arriving.words})
            working.add(arriving.decode(inbox[source]))

    def _merge_recursively(self, working: _WorkingVector, place: Place) -> Pattern[Selection]:
        """R-SAG: recursive doubling over the teams.

        In round s, 2^(s+1) ranks truncate the same entries. Each of them keeps an equal share as residual.
        """
        w, layout = place.position, place.message([place.position])
        own = working.take([w])
        for s in range(cost.log2(place.teams)):
            peer = ((place.rank // place.team_size) ^ (1 << s)) * place.team_size + w
            # 2^s ranks hold the same entries, and round them alike.
            message, own = working.encode(own, layout, 1 / (1 << s))
            inbox: Inbox = yield Round("merge", {peer: message}, {peer: layout.words})
            lists = [own, layout.decode(inbox[peer])]
            union = Selection.of(*kernels.merge([part[:2] for part in lists], self.numel, workspace=self.workspace))
            kept = kernels.largest(union, place.budget, workspace=self.workspace)
            # Entries truncated in the last round are in no result. Every rank keeps its own accumulator there.
            if s + 1 < cost.log2(place.teams) and not working.add_share(left_out(union, kept), 1 / (2 << s)):
                # The share overflows. NaN makes all ranks reject the step.
                kept = kept._replace(values=torch.full_like(kept.values, torch.nan))
            own = kept
        return own

    def _merge_by_bruck(
        self, working: _WorkingVector, place: Place, state: SparDLState
    ) -> Pattern[tuple[Selection, SparDLState]]:
        """B-SAG: gather the h largest entries of every team, sum them, truncate once, and adapt h.

        Every rank sums in ascending team order, so all ranks compute the same bits.
        """
        w, team = place.position, place.rank // place.team_size
        state = state.started(place.budget, place.teams)
        layout = place.message([w], room=state.h)
        message, _ = working.encode(working.take([w], state.h), layout)
        blocks = yield from bruck_all_gather(
            message, [layout.words] * place.teams, team, place.teams, phase="merge", ring=place.column
        )
        lists = [layout.decode(block)[:2] for block in blocks]
        union = Selection.of(*kernels.merge(lists, self.numel, workspace=self.workspace))
        own = kernels.largest(union, place.budget, workspace=self.workspace)
        return own, state.after(union.found, place.budget, place.teams)

    def _all_gather(self, working: _WorkingVector, own: Selection, place: Place) -> Pattern[Selection]:
        """Gather all blocks from the members of the team, as means. A block has the same bits in every team."""
        layouts = [place.message([b], divisor=place.world_size) for b in range(place.team_size)]
        message, _ = working.encode(own, layouts[place.position], place.share)  # all teams round the same block
        words = [layout.words for layout in layouts]
        blocks = yield from bruck_all_gather(
            message, words, place.position, place.team_size, phase="all-gather", ring=place.team
        )
        return Selection.join([layout.decode(block) for layout, block in zip(layouts, blocks, strict=True)])

    def _collect_residuals(self, acc: Accumulator, working: _WorkingVector, final: torch.Tensor) -> None:
        """Write the new residual.

        GRES keeps the accumulator, and W where the result has an entry. LRES clears every entry that this rank sent.
        PRES clears the sent entries that the result contains.
        """
        acc.absorb(*(bag.sums for bag in working.bags))
        if self.recipe.residuals == "global":
            acc.replace(final, working.at(final))
            return
        sent = torch.cat(working.taken).sort().values
        acc.clear(sent if self.recipe.residuals == "local" else sent[kernels.common_positions(sent, final)])

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: the state of the controller differs between columns."""
        return {"world_size": self.state.world_size}

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: exact if all blocks have the same budget.

        For B-SAG, h of an ordinary step is the largest one, the budget of a block.
        """
        h = self.k if ordinary else self.state.h if self.state.world_size == world_size else 0
        place = self._place(0, world_size)
        if place is None:
            dense = cost.dense(self.numel, world_size)
            return with_verdict(dense, world_size) if self.is_static else dense
        if self.is_static:
            return static_forecast(place, min(h, place.room), self.recipe.recursive(place.teams))
        budget, peers, teams = place.room, place.team_size - 1, place.teams
        h = min(budget, max(h, fewest(budget, teams)))
        blocks = range(place.team_size)
        block = max(place.message([b]).words for b in blocks)
        if self.recipe.recursive(teams):
            between = block * cost.log2(teams)
        else:
            # Fewer entries may need more words.
            between = place.encoding.words_at_most(place.widest, h, 1) * (teams - 1)
        within = both(cost.messages(cost.log2(place.team_size), block * peers))
        return Forecast(
            {"reduce-scatter": within, "merge": both(cost.messages(cost.log2(teams), between)), "all-gather": within}
        )
