"""SparDL: sparse allreduce whose messages have sizes known in advance, for any number of workers.

X. Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", ICDE
2024. P workers form d teams of Q = P/d. Spar-Reduce-Scatter adds up the Q blocks of the vector inside a
team, cutting a block to its budget whenever it is about to leave; Spar-All-Gather merges the teams' blocks;
a Bruck all-gather spreads them. Global residual collection keeps whatever was cut, wherever that was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, check, check_at_least
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, dense_exchange
from tritoncomm.primitives.selection import entries_to_keep, left_out
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Forecast, Formula, Link, both
from tritoncomm.scheduler.rounds import Inbox, Pattern, Round
from tritoncomm_kernels import Selection


@dataclass(frozen=True, kw_only=True)
class SparDL(Recipe):
    """Settings of SparDL.

    ``teams`` is d, a divisor of the number of workers: more teams take fewer rounds and, from three on, more
    words. ``"auto"`` takes the d that the cost model predicts to be fastest when one message's latency is as
    long as ``latency_words`` words take (30 us at 10 Gbit/s, unless set). ``sag`` chooses how teams merge:
    ``"recursive"`` (R-SAG, needs a power of two), ``"bruck"`` (B-SAG, any d; each team sends h entries per
    block, and h follows the size of the union), ``"auto"`` recursive where possible.

    ``residuals="global"`` is the paper's GRES and loses nothing. ``"partial"`` (PRES) and ``"local"`` (LRES)
    are there to be compared with: they lose what was cut on the way.

    Every block delivers at least one entry, so that none starves: with fewer than Q entries asked for, Q are
    delivered.
    """

    name: ClassVar[str] = "spardl"
    teams: int | str = 1
    sag: str = "auto"
    residuals: str = "global"
    latency_words: float = 9375.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "latency_words")
        check(self, "sag", self.sag in ("auto", "recursive", "bruck"), "choose auto, recursive or bruck")
        check(self, "residuals", self.residuals in ("global", "partial", "local"), "choose global, partial or local")
        if self.teams != "auto":
            check_at_least(self, 1, "teams", whole=True)

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`: for B-SAG from disjoint teams to teams that agree."""
        k = entries_to_keep(numel, self.density)
        return self._formula(self.teams_for(world_size, k), world_size, k)

    def _formula(self, d: int, world_size: int, k: int) -> Formula:
        size = world_size // d
        k = max(k, size)  # every block delivers something
        latencies = 2 * cost.log2(size) + cost.log2(d)
        within = 4 * k * (size - 1) / size
        if self.recursive(d):
            words = within + 2 * k / size * cost.log2(d)
            return Formula(latencies, words, words)
        return Formula(latencies, within + 2 * k / world_size * (d - 1), within + 2 * k / size * (d - 1))

    def build(self, numel: int) -> SparDLAlgorithm:
        """See :meth:`Recipe.build`."""
        return SparDLAlgorithm(self, numel)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`: teams are equally large."""
        self.teams_for(world_size, 1)

    def teams_for(self, world_size: int, k: int) -> int:
        """The d that is used with ``world_size`` workers; one worker is one team, whatever is asked for."""
        if world_size == 1:
            return 1
        if self.teams == "auto":
            divisors = (d for d in range(1, world_size + 1) if world_size % d == 0 and self._can_merge(d))
            link = Link(self.latency_words * cost.WORD, 1.0)
            return min(divisors, key=lambda d: (self._formula(d, world_size, k).seconds(link)[1], d))
        assert isinstance(self.teams, int)
        if world_size % self.teams:
            raise ConfigurationError(f"teams={self.teams} does not divide {world_size} workers: choose a divisor")
        if not self._can_merge(self.teams):
            raise ConfigurationError(
                f"sag='recursive' with teams={self.teams}: that takes a power of two, choose sag='bruck'"
            )
        return self.teams

    def recursive(self, teams: int) -> bool:
        """Whether ``teams`` merge by R-SAG."""
        return self.sag == "recursive" or (self.sag == "auto" and _power_of_two(teams))

    def _can_merge(self, teams: int) -> bool:
        return self.sag != "recursive" or _power_of_two(teams)


@dataclass(frozen=True)
class SparDLState:
    """B-SAG's controller for the block of this rank's column; ``h`` 0 means not yet started."""

    world_size: int = 0
    h: int = 0
    step: int = 0
    inertia: bool = False


class _Place(NamedTuple):
    """Where a rank stands, and how the vector is cut."""

    rank: int
    teams: int
    team_size: int
    cuts: list[int]
    budgets: list[int]

    @property
    def position(self) -> int:
        """w: the rank's position in its team, and the block it ends up with."""
        return self.rank % self.team_size

    @property
    def team(self) -> list[int]:
        """The ranks of this rank's team."""
        first = self.rank - self.position
        return list(range(first, first + self.team_size))

    @property
    def column(self) -> list[int]:
        """The ranks at this position of every team."""
        return list(range(self.position, self.teams * self.team_size, self.team_size))

    def bag(self, first: int, count: int) -> list[int]:
        """``count`` blocks from ``first`` on, around the end, in ascending order."""
        return sorted((first + i) % self.team_size for i in range(count))

    def words(self, blocks: Sequence[int]) -> int:
        """Length of the message that carries ``blocks``."""
        return 2 * sum(self.budgets[b] for b in blocks)


class _Ledger:
    """W: the accumulator, out of which entries are taken and into which received ones are added.

    What is left in W at the end is what this rank has cut.
    """

    def __init__(self, acc: Accumulator, place: _Place) -> None:
        self.place = place
        self.values = acc.workspace.buffer("spardl", acc.numel, torch.float32, acc.device).copy_(acc.dense())
        self.taken: list[torch.Tensor] = []

    def take(self, blocks: Sequence[int], budget: int | None = None) -> Selection:
        """The largest entries of each of ``blocks``, as many as its budget allows, removed from W."""
        cuts, parts = self.place.cuts, []
        for first, last in runs(blocks):
            start, stop = cuts[first], cuts[last + 1]
            bounds = [cut - start for cut in cuts[first : last + 2]]
            budgets = self.place.budgets[first : last + 1] if budget is None else [budget]
            part = kernels.top_k_segments(self.values[start:stop], bounds, budgets)
            parts.append(part._replace(indices=part.indices + start))
        taken = parts[0] if len(parts) == 1 else Selection.join(parts)
        self.values.index_fill_(0, taken.indices.long(), 0.0)
        self.taken.append(taken.indices)
        return taken

    def add(self, entries: Selection) -> None:
        """Add what has arrived."""
        kernels.scatter_add(self.values, entries.indices, entries.values)

    def unscale_from(self, cut: Selection, share: float) -> bool:
        """Owe ``share`` of what was cut; False when that is more than a float holds."""
        kernels.scatter_add(self.values, cut.indices, cut.values * share)
        return not kernels.has_non_finite(self.values[cut.indices.long()])


class SparDLAlgorithm(Algorithm):
    """One rank's SparDL. :meth:`reduce` is the paper from top to bottom."""

    state: SparDLState

    def __init__(self, recipe: SparDL, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = SparDLState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`.

        A NaN or Inf is larger than everything else, so it survives every cut and reaches all ranks.
        """
        place = self._place(rank, world_size)
        if place is None:
            return (yield from dense_exchange(acc, world_size))
        state = self.state if self.state.world_size == world_size else SparDLState(world_size)
        ledger = _Ledger(acc, place)
        yield from self._reduce_scatter(ledger, place)
        if place.teams == 1:
            own = ledger.take([place.position])
        elif self.recipe.recursive(place.teams):
            own = yield from self._merge_recursively(ledger, place)
        else:
            own, state = yield from self._merge_by_bruck(ledger, place, state)
        delivered = yield from self._all_gather(own, place)
        if kernels.has_non_finite(delivered.values):  # on all ranks alike, they hold the same blocks
            raise NonFiniteError("a gradient, or a sum of gradients, has a NaN or Inf; nothing was applied")
        self._commit_backward(acc, ledger, delivered.indices)
        acc.selected = sum(len(indices) for indices in ledger.taken)
        self.report = {"delivered": float(delivered.found), "h": float(state.h)}
        self.state = state
        return SparseVector(delivered.indices, delivered.values / world_size, self.numel)

    def _place(self, rank: int, world_size: int) -> _Place | None:
        """None when everything is to be delivered anyway."""
        teams = self.recipe.teams_for(world_size, self.k)
        size = world_size // teams
        cuts = [self.numel * b // size for b in range(size + 1)]
        widths = [stop - start for start, stop in itertools.pairwise(cuts)]
        shares = [(b + 1) * self.k // size - b * self.k // size for b in range(size)]
        budgets = [min(width, max(1, share)) for width, share in zip(widths, shares, strict=True)]
        return None if budgets == widths else _Place(rank, teams, size, cuts, budgets)

    def _reduce_scatter(self, ledger: _Ledger, place: _Place) -> Pattern[None]:
        """Spar-Reduce-Scatter: a block is cut only at the moment it leaves, with all it has received so far."""
        team, w, size = place.team, place.position, place.team_size
        for distance, count in reduce_scatter_schedule(size):
            to, source = team[(w + distance) % size], team[(w - distance) % size]
            leaving, arriving = place.bag(w + distance, count), place.bag(w, count)
            message = wire.pack_padded(*ledger.take(leaving)[:2], place.words(leaving))
            inbox: Inbox = yield Round("reduce-scatter", {to: message}, {source: place.words(arriving)})
            ledger.add(self._entries(inbox[source], arriving, place))

    def _merge_recursively(self, ledger: _Ledger, place: _Place) -> Pattern[Selection]:
        """R-SAG: recursive doubling over the teams; the 2^(s+1) ranks that cut the same entry share it."""
        w = place.position
        own = ledger.take([w])
        for s in range(cost.log2(place.teams)):
            peer = ((place.rank // place.team_size) ^ (1 << s)) * place.team_size + w
            words = place.words([w])
            inbox: Inbox = yield Round("merge", {peer: wire.pack_padded(own.indices, own.values, words)}, {peer: words})
            lists = [own, self._entries(inbox[peer], [w], place)]
            union = Selection.of(*kernels.merge([part[:2] for part in lists], self.numel, workspace=self.workspace))
            kept = kernels.largest(union, place.budgets[w], workspace=self.workspace)
            # What the last round cuts is in nobody's result, so everybody owes its own part of it anyway.
            if s + 1 < cost.log2(place.teams) and not ledger.unscale_from(left_out(union, kept), 1 / (2 << s)):
                kept = kept._replace(values=torch.full_like(kept.values, torch.nan))
            own = kept
        return own

    def _merge_by_bruck(
        self, ledger: _Ledger, place: _Place, state: SparDLState
    ) -> Pattern[tuple[Selection, SparDLState]]:
        """B-SAG: all teams' h largest, summed in ascending team order on every rank, cut once."""
        w, team = place.position, place.rank // place.team_size
        budget = place.budgets[w]
        least = math.ceil(budget / place.teams)
        if state.h == 0:
            state = replace(state, h=least, step=max(1, (budget - least) // 100))
        own = ledger.take([w], state.h)
        words = 2 * state.h
        message = wire.pack_padded(own.indices, own.values, words)
        blocks = yield from bruck_all_gather(
            message, [words] * place.teams, team, place.teams, phase="merge", ring=place.column
        )
        lists = [self._entries(block, [w], place)[:2] for block in blocks]
        union = Selection.of(*kernels.merge(lists, self.numel, workspace=self.workspace))
        h, step, inertia = adapted(state.h, state.step, state.inertia, union.found, budget, least)
        own = kernels.largest(union, budget, workspace=self.workspace)
        return own, replace(state, h=h, step=step, inertia=inertia)

    def _all_gather(self, own: Selection, place: _Place) -> Pattern[Selection]:
        """Every block, from the team member that holds it; columns hold the same bits in all teams."""
        words = [place.words([b]) for b in range(place.team_size)]
        message = wire.pack_padded(own.indices, own.values, words[place.position])
        blocks = yield from bruck_all_gather(
            message, words, place.position, place.team_size, phase="all-gather", ring=place.team
        )
        return Selection.join([self._entries(block, [b], place) for b, block in enumerate(blocks)])

    def _commit_backward(self, acc: Accumulator, ledger: _Ledger, final: torch.Tensor) -> None:
        """The new residual: the accumulator, with W where the result has an entry (GRES)."""
        if self.recipe.residuals == "global":
            acc.replace(final, ledger.values[final.long()])
            return
        sent = torch.cat(ledger.taken).sort().values
        acc.clear(sent if self.recipe.residuals == "local" else sent[kernels.common_positions(sent, final)])

    def _entries(self, message: torch.Tensor, blocks: Sequence[int], place: _Place) -> Selection:
        """The entries of a received message, which must lie in ``blocks``."""
        entries = Selection.of(*wire.unpack_padded(message))
        (first, last), *rest = runs(blocks)
        if not rest:
            wire.check_indices(entries.indices, place.cuts[first], place.cuts[last + 1])
            return entries
        # Around the end: blocks from 0 on, and blocks up to the last.
        end = place.cuts[last + 1]
        low = int(torch.searchsorted(entries.indices, end))
        wire.check_indices(entries.indices[:low], 0, end)
        wire.check_indices(entries.indices[low:], place.cuts[rest[0][0]], self.numel)
        return entries

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: the controllers differ between columns."""
        return {"world_size": self.state.world_size}

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: exact where the budgets of all blocks are equal."""
        return self._forecast(world_size, self.state.h if self.state.world_size == world_size else 0)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: B-SAG at its dearest, h = K."""
        return self._forecast(world_size, self.k)

    def _forecast(self, world_size: int, h: int) -> Forecast:
        place = self._place(0, world_size)
        if place is None:
            return cost.dense(self.numel, world_size)
        budget, peers, teams = max(place.budgets), place.team_size - 1, place.teams
        h = min(budget, max(h, math.ceil(budget / teams)))
        words = 2 * budget * cost.log2(teams) if self.recipe.recursive(teams) else 2 * h * (teams - 1)
        within = both(cost.messages(cost.log2(place.team_size), 2 * budget * peers))
        return Forecast(
            {"reduce-scatter": within, "merge": both(cost.messages(cost.log2(teams), words)), "all-gather": within}
        )


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ``blocks`` as (first, last) of each stretch without a gap."""
    gaps = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return [(blocks[a], blocks[b - 1]) for a, b in itertools.pairwise([0, *gaps, len(blocks)])]


def reduce_scatter_schedule(team_size: int) -> list[tuple[int, int]]:
    """(distance, number of blocks) of every round of Spar-Reduce-Scatter, largest distance first.

    A partial sum travels its offset to the owner bit by bit; only the first round can carry fewer blocks
    than its distance.
    """
    distances = [1 << s for s in reversed(range(cost.log2(team_size)))]
    return [(distance, min(distance, team_size - distance)) for distance in distances]


def adapted(h: int, step: int, inertia: bool, union: int, budget: int, least: int) -> tuple[int, int, bool]:
    """B-SAG's controller: steers ``h`` so that the union of the teams' entries has about ``budget`` of them.

    Two confirmations of the direction double the step, overshooting halves and reverses it. Beyond the
    paper, h stays between ``least`` (disjoint teams) and ``budget`` (teams that agree), and turns around there.
    """
    if (union > budget) != (step > 0):
        step, inertia = (2 * step, False) if inertia else (step, True)
    else:
        step, inertia = (math.trunc(-0.5 * step) if abs(step) > 1 else -step), False
    limit = max(1, budget // 4)
    step = max(-limit, min(limit, step))
    if h + step < least:
        return least, 1, False
    if h + step > budget:
        return budget, -1, False
    return h + step, step, inertia


def _power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
