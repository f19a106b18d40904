"""SparDL: sparse all-reduce with message sizes known in advance, for any world size.

X. Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", ICDE 2024.

P ranks form d teams of Q = P/d ranks. The vector is split into Q blocks, each with a budget of entries.
Spar-Reduce-Scatter (SRS) sums the blocks inside each team and truncates a block to its budget just before sending it.
Spar-All-Gather (SAG) merges the blocks of the teams. A Bruck all-gather distributes the merged blocks inside each
team. Global residual collection (GRES) keeps all truncated values as residuals.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, EntryRecipe, StaticRecipe, check, check_at_least
from tritoncomm.algorithms.spardl_teams import Place, SparDLState, fewest, power_of_two, reduce_scatter_schedule
from tritoncomm.algorithms.spardl_working import WorkingVector
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.fixed_exchange import step_of
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import check_same, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.meter import Ratio
from tritoncomm.scheduler.rounds import Inbox, Pattern, Round
from tritoncomm_kernels import Entries, count_entries


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

    def build(self, numel: int, bounds: Bounds = ()) -> SparDLAlgorithm:
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
        step = step_of(acc, self.recipe.encoding, rank, world_size)
        working = WorkingVector(step, place)
        # Spar-Reduce-Scatter (SRS) inside the team.
        yield from self._reduce_scatter(working, place)
        # Spar-All-Gather (SAG) across teams. Then a Bruck all-gather inside the team.
        union = None
        if place.teams == 1 or self.recipe.recursive(place.teams):
            own = yield from self._merge_recursively(working, place)
        else:
            own, union = yield from self._merge_by_bruck(working, place, state.h)
        delivered, _, sent, _ = yield from working.all_gather(own)
        if place.teams == 1:
            working.remove(own, sent)
        else:  # all teams round the same block
            working.keep_rest(own, sent, place.share)
        check_same(delivered.values, acc.verdict)
        # Global residual collection (GRES).
        working.collect_residuals(self.recipe.residuals, delivered.indices)
        counts = [count_entries(entries) for entries in (delivered, union) if entries is not None]
        _, (found, *size) = yield from step.settle(counts)
        if union is not None:
            state = state.after(size[0], place.budget, place.teams)
        self.report = {"delivered": float(found), "h": Ratio(state.h), **step.rounding()}
        self.state = state
        return step.vector(delivered)

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
        return None if budgets == widths else Place(rank, teams, size, cuts, budgets)

    def _reduce_scatter(self, working: WorkingVector, place: Place) -> Pattern[None]:
        """SRS: truncate a block only when it is sent, after everything that it has received is added."""
        team, w, size = place.team, place.position, place.team_size
        for distance, count in reduce_scatter_schedule(size):
            to, source = team[(w + distance) % size], team[(w - distance) % size]
            leaving, arriving = working.blocks(place.bag(w + distance, count)), working.blocks(place.bag(w, count))
            taken = working.take(leaving)
            message, sent = leaving.encode(*taken)
            working.remove(taken, sent)
            inbox: Inbox = yield Round("reduce-scatter", {to: message}, {source: arriving.words})
            working.step.add(arriving.decode(inbox[source]))

    def _merge_recursively(self, working: WorkingVector, place: Place) -> Pattern[Entries]:
        """R-SAG: recursive doubling over the teams. A single team has nothing to merge.

        In round s, 2^(s+1) ranks truncate the same entries. Each of them keeps an equal share as residual.
        """
        rounds, own = cost.log2(place.teams), working.take_own()
        for s in range(rounds):
            peer = ((place.rank // place.team_size) ^ (1 << s)) * place.team_size + place.position
            union, sent = yield from working.merge(own, sorted((place.rank, peer)))
            if s:  # 2^s ranks hold the same entries, and round them alike
                working.keep_rest(own, sent, 1 / (1 << s))
            else:
                working.remove(own, sent)
            # Entries truncated in the last round are in no result. Every rank keeps its own accumulator there.
            own = working.truncated(union, 1 / (2 << s) if s + 1 < rounds else None)
        return own

    def _merge_by_bruck(self, working: WorkingVector, place: Place, h: int) -> Pattern[tuple[Entries, Entries]]:
        """B-SAG: gather the h largest entries of every team, sum them, and truncate once.

        Every rank sums in ascending team order, so all ranks compute the same bits. Also returns the union, to whose
        size h adapts. Before the first step ``h`` is 0.
        """
        room, h = h or fewest(place.room, place.teams), h or fewest(place.budget, place.teams)
        own = working.take_own(h, room)
        union, sent = yield from working.merge(own, place.column, h)
        working.remove(own, sent)
        return working.truncated(union, None), union

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: the state of the controller differs between columns."""
        return {"world_size": self.state.world_size}

    def carriers(self, world_size: int, *, ordinary: bool = False) -> Carriers:
        """See :meth:`Algorithm.carriers`. Only a single team gathers from all ranks."""
        place = self._place(0, world_size)
        return Carriers({"gather": "all-gather"}) if place is not None and place.teams == 1 else Carriers()

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: exact if all blocks have the same budget.

        For B-SAG, h of an ordinary step is the largest one, the budget of a block.
        """
        place = self._place(0, world_size)
        if place is None:
            dense = cost.dense(self.numel, world_size)
            return with_verdict(dense, world_size) if self.is_static else dense
        encoding, teams, least = self.recipe.encoding, place.teams, fewest(place.room, place.teams)
        h = self.k if ordinary else self.state.h if self.state.world_size == world_size else 0
        if self.is_static:
            block = encoding.of_rows.words(place.widest, place.room)
            merged = encoding.of_rows.words(place.widest, min(place.room, h or least))
        else:
            widths = (stop - start for start, stop in itertools.pairwise(place.cuts))
            block = max(encoding.words(*each) for each in zip(widths, place.budgets, strict=True))
            # Fewer entries may need more words.
            merged = encoding.words_at_most(place.widest, min(place.room, max(h, least)), 1)
        rounds, within = cost.log2(teams), both(cost.bruck(block, place.team_size))
        between = cost.messages(rounds, rounds * block) if self.recipe.recursive(teams) else cost.bruck(merged, teams)
        phases = {"reduce-scatter": within, "merge": both(between), "all-gather": within}
        if not self.is_static:
            return Forecast(phases)
        if teams > 1:
            return with_verdict(Forecast(phases), world_size)
        phases["all-gather"] = both(cost.all_gather(block, cost.WORD, world_size))
        return with_verdict(Forecast(phases), world_size, phase="all-gather")
