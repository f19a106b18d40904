"""A reference implementation of SparDL in plain Python, for all ranks at once.

It is only for inputs whose sums are exact in any order. It sends nothing: it follows every block along the tree of its
contributions, and only counts messages. It shares nothing with the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Entries = dict[int, float]

# By workers and teams: latencies, words/k of B-SAG from and to, words/k of R-SAG.
SPARDL_TABLE = {
    (4, 1): (4, 3.00, 3.00, None), (4, 2): (3, 2.50, 3.00, 3.00), (4, 4): (2, 1.50, 6.00, 4.00),
    (6, 1): (6, 3.33, 3.33, None), (6, 2): (5, 3.00, 3.33, 3.33), (6, 3): (4, 2.67, 4.00, None),
    (6, 6): (3, 1.67, 10.0, None), (8, 1): (6, 3.50, 3.50, None), (8, 2): (5, 3.25, 3.50, 3.50),
    (8, 4): (4, 2.75, 5.00, 4.00), (8, 8): (3, 1.75, 14.0, 6.00), (14, 1): (8, 3.71, 3.71, None),
    (14, 2): (7, 3.57, 3.71, 3.71), (14, 7): (5, 2.86, 8.00, None), (14, 14): (4, 1.86, 26.0, None),
    (16, 1): (8, 3.75, 3.75, None), (16, 2): (7, 3.63, 3.75, 3.75),
    (16, 4): (6, 3.38, 4.50, 4.00), (16, 8): (5, 2.88, 9.00, 5.00),
    (16, 16): (4, 1.88, 30.0, 8.00), (64, 1): (12, 3.94, 3.94, None), (64, 2): (11, 3.91, 3.94, 3.94),
    (64, 4): (10, 3.84, 4.13, 4.00), (64, 8): (9, 3.72, 5.25, 4.25), (64, 16): (8, None, None, 5.00),
    (64, 64): (6, None, None, 12.0),
}  # fmt: skip


class SparDLOracle:
    """The state of all ranks.

    ``residuals`` are the residuals of each rank. Of the last step there are also ``dropped``, all values that each rank
    discarded, and ``sent``, the messages and words that each rank sent. ``h`` is the size of the lists of Bruck's
    Spar-All-Gather in the next step.
    """

    def __init__(
        self,
        world_size: int,
        numel: int,
        k: int,
        teams: int = 1,
        sag: Literal["recursive", "bruck"] = "recursive",
        residuals: Literal["global", "partial", "local"] = "global",
    ) -> None:
        self.world_size, self.numel, self.teams, self.kind = world_size, numel, teams, residuals
        self.team_size = size = world_size // teams
        self.bruck = sag == "bruck" and teams > 1
        self.blocks = [range(b * numel // size, (b + 1) * numel // size) for b in range(size)]
        shares = [(b + 1) * k // size - b * k // size for b in range(size)]
        # Each block gets at least one entry and at most its length, so an empty block gets none.
        self.budgets = [min(max(1, share), len(block)) for share, block in zip(shares, self.blocks, strict=True)]
        self.lowest = [-(-budget // teams) for budget in self.budgets]
        self.h = list(self.lowest if self.bruck else self.budgets)
        starts = [max(1, (budget - low) // 100) for budget, low in zip(self.budgets, self.lowest, strict=True)]
        self._controllers = [(start, False) for start in starts]
        self.residuals = [[0.0] * numel for _ in range(world_size)]
        self.dropped = [[0.0] * numel for _ in range(world_size)]
        self.sent = [(0, 0)] * world_size

    def step(self, gradients: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
        """Return the final indices, ascending, and the sums over all ranks that are delivered there."""
        acc = [
            [e + g for e, g in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self.residuals, gradients, strict=True)
        ]
        self._count_messages()  # before the controllers move: this step still sends the old number of entries
        self.dropped = [list(mine) for mine in acc]
        # Indices that a rank put into its own lists, for partial and local residuals.
        chosen: list[set[int]] = [set() for _ in range(self.world_size)]
        final: Entries = {}
        for b in range(self.team_size):
            lists = [self._reduce_scatter(team, b, chosen) for team in range(self.teams)]
            final |= self._merge_bruck(lists, b) if self.bruck else self._merge_recursive(lists, b)
        self.residuals = [
            [self._left_over(r, j, acc[r][j], j in chosen[r], j in final) for j in range(self.numel)]
            for r in range(self.world_size)
        ]
        return sorted(final), [final[j] for j in sorted(final)]

    def _left_over(self, rank: int, j: int, own: float, chosen: bool, survived: bool) -> float:
        """Return the residual of one rank at one index."""
        if self.kind == "global":
            return self.dropped[rank][j] if survived else own
        gone = chosen and (survived or self.kind == "local")
        return 0.0 if gone else own

    def _rank(self, team: int, worker: int) -> int:
        return team * self.team_size + worker % self.team_size

    def _reduce_scatter(self, team: int, b: int, chosen: list[set[int]]) -> Entries:
        """Return the sparse sum of one team's block on its last worker, whose number is the block's.

        A partial sum leaves the worker ``offset`` places before that end in the step whose distance is the highest bit
        of ``offset``, and lands where the offset lacks this bit. Everything that reaches a worker therefore comes from
        a larger offset, and descending offsets are a valid order.
        """
        for offset in range(self.team_size - 1, 0, -1):
            rank, target = (self._rank(team, b - o) for o in (offset, offset - highest_bit(offset)))
            for j, value in self._take(rank, b, self.budgets[b], chosen).items():
                self.dropped[target][j] += value
        return self._take(self._rank(team, b), b, self.h[b], chosen)

    def _take(self, rank: int, b: int, count: int, chosen: list[set[int]]) -> Entries:
        """Take the largest entries of a block away from a rank. The remaining entries are dropped there."""
        row = self.dropped[rank]
        taken = largest({j: row[j] for j in self.blocks[b] if row[j]}, count)
        for j in taken:
            row[j] = 0.0
        chosen[rank] |= taken.keys()
        return taken

    def _merge_recursive(self, lists: list[Entries], b: int) -> Entries:
        """Spar-All-Gather by recursive doubling: one cut after every pairwise sum."""
        distance = 1
        while distance < self.teams:
            merged = [add_up([lists[team], lists[team ^ distance]]) for team in range(self.teams)]
            lists = [largest(entries, self.budgets[b]) for entries in merged]
            for team in range(self.teams):
                # All ranks that hold this sum drop the same entries, and each keeps its share.
                self._drop(team, b, merged[team], lists[team], 2 * distance)
            distance *= 2
        return lists[0]

    def _merge_bruck(self, lists: list[Entries], b: int) -> Entries:
        """Spar-All-Gather after Bruck: one cut of the sum of all lists, and an update of the controller."""
        merged = add_up(lists)
        kept = largest(merged, self.budgets[b])
        for team in range(self.teams):
            self._drop(team, b, merged, kept, self.teams)
        if self.budgets[b]:
            move, inertia = self._controllers[b]
            self.h[b], move, inertia = adapt(self.h[b], move, inertia, len(merged), self.budgets[b], self.lowest[b])
            self._controllers[b] = (move, inertia)
        return kept

    def _drop(self, team: int, b: int, merged: Entries, kept: Entries, holders: int) -> None:
        for j in merged.keys() - kept.keys():
            self.dropped[self._rank(team, b)][j] += merged[j] / holders

    def _count_messages(self) -> None:
        """Count the messages of each rank. A message has all its slots, filled or not, of two words each."""
        size = self.team_size
        distances = [1 << i for i in range(max(size, self.teams).bit_length())]
        for rank in range(self.world_size):
            w = rank % size
            # The reduce-scatter sends blocks by the highest bit of their offset; the gather, its own and the next.
            scatter = [[self.budgets[(w + o) % size] for o in range(gap, min(2 * gap, size))] for gap in distances]
            gather = [[self.budgets[(w + p) % size] for p in range(min(gap, size - gap))] for gap in distances]
            if self.bruck:
                column = [[self.h[w]] * min(gap, self.teams - gap) for gap in distances]
            else:
                column = [[self.budgets[w]] for gap in distances if gap < self.teams]
            slots = [sum(message) for message in (*scatter, *column, *gather)]
            self.sent[rank] = (sum(count > 0 for count in slots), 2 * sum(slots))


def adapt(h: int, step: int, inertia: bool, union: int, K: int, lo: int) -> tuple[int, int, bool]:  # noqa: N803
    """Adapt the size of the lists so that their union has about K entries. Return ``h, step, inertia``."""
    if (union > K) != (step > 0):
        # The right direction: every second confirmation in a row doubles the step.
        step, inertia = (2 * step, False) if inertia else (step, True)
    else:
        turned = -(abs(step) // 2 or 1)  # halves toward zero, but never stands still
        step, inertia = (turned if step > 0 else -turned), False
    limit = max(1, K // 4)
    step = min(max(step, -limit), limit)
    if h + step < lo:
        return lo, 1, False
    if h + step > K:
        return K, -1, False
    return h + step, step, inertia


def add_up(lists: list[Entries]) -> Entries:
    """Sum sparse lists in order. An index whose values cancel stays, with value zero."""
    total: Entries = {}
    for entries in lists:
        for j, value in entries.items():
            total[j] = total.get(j, 0.0) + value
    return total


def largest(entries: Entries, k: int) -> Entries:
    """Return the ``k`` entries of largest magnitude, ties to the lower index."""
    kept = sorted(entries, key=lambda j: (-abs(entries[j]), j))[:k]
    return {j: entries[j] for j in kept}


def highest_bit(number: int) -> int:
    """Return the largest power of two in a positive number."""
    return 1 << (number.bit_length() - 1)
