"""The teams of SparDL: who sends which blocks to whom, how many entries, and how B-SAG's h changes.

See :mod:`tritoncomm.algorithms.spardl`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tritoncomm.primitives.region_cuts import widest
from tritoncomm.scheduler import cost


@dataclass(frozen=True)
class SparDLState:
    """State of B-SAG's controller for this rank's block.

    ``h`` is the number of entries that each team sends, and 0 before the first step. ``step`` is the next change of
    ``h``. ``inertia`` is True after one confirmation of the direction.
    """

    world_size: int = 0
    h: int = 0
    step: int = 0
    inertia: bool = False

    def after(self, union: int, budget: int, teams: int) -> SparDLState:
        """Return the next state, after a step in which the teams' entries had a union of ``union`` entries.

        The first step has the smallest h for a block of ``budget``.
        """
        least = fewest(budget, teams)
        h, step = (self.h, self.step) if self.h else (least, max(1, (budget - least) // 100))
        h, step, inertia = adapted(h, step, self.inertia, union, budget, least)
        return replace(self, h=h, step=step, inertia=inertia)


class Place(NamedTuple):
    """Position of one rank in the teams, with the bounds (``cuts``) and the budgets of all blocks."""

    rank: int
    teams: int
    team_size: int
    cuts: list[int]
    budgets: list[int]

    @property
    def position(self) -> int:
        """w: the rank's position in its team, and the index of its block after the reduce-scatter."""
        return self.rank % self.team_size

    @property
    def team(self) -> list[int]:
        """All ranks of this rank's team."""
        first = self.rank - self.position
        return list(range(first, first + self.team_size))

    @property
    def column(self) -> list[int]:
        """The ranks at this rank's position in every team."""
        return list(range(self.position, self.world_size, self.team_size))

    @property
    def world_size(self) -> int:
        """P, the number of ranks of all teams."""
        return self.teams * self.team_size

    @property
    def budget(self) -> int:
        """The budget of the rank's block."""
        return self.budgets[self.position]

    @property
    def room(self) -> int:
        """The largest budget of a block."""
        return max(self.budgets)

    @property
    def widest(self) -> int:
        """The largest number of elements of a block."""
        return widest(self.cuts)

    @property
    def share(self) -> float:
        """The part of what all teams cut from the same block that this rank keeps.

        Equal parts are exact if the number of teams is a power of two. Otherwise the first team keeps all of it.
        """
        return 1 / self.teams if power_of_two(self.teams) else float(self.rank < self.team_size)

    def bag(self, first: int, count: int) -> list[int]:
        """Return ``count`` consecutive blocks from ``first`` on, modulo Q, in ascending order."""
        return sorted((first + i) % self.team_size for i in range(count))


def reduce_scatter_schedule(team_size: int) -> list[tuple[int, int]]:
    """Return (distance, number of blocks) for every round of Spar-Reduce-Scatter, largest distance first.

    A partial sum reaches its owner along the binary digits of their distance, highest digit first. Only the first
    round can send fewer blocks than its distance.
    """
    distances = [1 << s for s in reversed(range(cost.log2(team_size)))]
    return [(distance, min(distance, team_size - distance)) for distance in distances]


def adapted(h: int, step: int, inertia: bool, union: int, budget: int, least: int) -> tuple[int, int, bool]:
    """Return the next (h, step, inertia) of B-SAG's controller.

    It adapts ``h`` until the ``union`` of the teams' entries has about ``budget`` entries. The step doubles at the
    second confirmation of its direction. It halves and reverses after an overshoot. Beyond the paper, h stays between
    ``least`` (teams with disjoint entries) and ``budget`` (teams with the same entries), and reverses there.
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


def fewest(budget: int, teams: int) -> int:
    """Return the smallest h: the entries of each team if ``teams`` without common entries fill the ``budget``."""
    return math.ceil(budget / teams)


def power_of_two(count: int) -> bool:
    """Return True if ``count`` is a power of two."""
    return count & (count - 1) == 0
