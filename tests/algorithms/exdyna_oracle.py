"""A reference implementation of ExDyna and MiCRO in plain Python lists, for all ranks at once.

Blocks, partitions, rotation, thresholds and residuals, as Yoon and Oh's reference programs compute them
("Preserving Near-Optimal Gradient Sparsification Cost" and "MiCRO", both 2023-24), and the variants of this library:
another way to move borders, and another one to scale the threshold. Gradients must be finite. Accumulators never round
here: compare with fp32 only where its sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import numpy as np

TINY, HUGE = 1e-30, 1e30


@dataclass(frozen=True)
class Layout:
    """Partition ``j`` has ``counts[j]`` blocks from block ``starts[j]``. The last one also has ``tail`` elements."""

    block: int
    counts: list[int]
    starts: list[int]
    numel: int
    tail: int = 0
    least: int = 1

    def bounds(self, j: int) -> tuple[int, int]:
        """Return start and stop of partition ``j`` in elements."""
        # Without a tail the very last block may be short.
        start, stop = (min(b * self.block, self.numel) for b in (self.starts[j], self.starts[j] + self.counts[j]))
        return start, stop + self.tail * (j == len(self.counts) - 1)

    def recounted(self, counts: list[int]) -> Layout:
        """Return the same blocks with other counts per partition."""
        return replace(self, counts=counts, starts=_starts(counts))


def paper_layout(numel: int, world_size: int, blocks: int = 1024) -> Layout:
    """Return equal blocks of a multiple of 32 elements. The last partition keeps the remaining elements."""
    block = numel // blocks // 32 * 32
    counts = _shares(blocks, world_size)
    return Layout(block, counts, _starts(counts), numel, numel - block * blocks, -(-blocks // (4 * world_size)))


def static_layout(numel: int, world_size: int) -> Layout:
    """Return MiCRO's fixed partitions: equal to within one element, the larger ones first."""
    sizes = _shares(numel, world_size)
    return Layout(1, sizes, _starts(sizes), numel)


def by_partition(counts: Sequence[int], t: int) -> list[int]:
    """Return the counts by rank of iteration ``t``, in which rank r selects from partition t + r, by partition."""
    return [counts[(j - t) % len(counts)] for j in range(len(counts))]


def rebalance_paper(layout: Layout, kappa: Sequence[int]) -> Layout:
    """Move one block across a border where one side is 5% above the mean count and the other 5% below it."""
    mean = sum(kappa) // len(kappa)
    # 0.95238 is the reference's own literal for 1 / 1.05.
    return _sweep(layout, kappa, lambda full, empty: 100 * full > 105 * mean and 100000 * empty < 95238 * mean)


def rebalance_prefix(layout: Layout, kappa: Sequence[int], max_step: int = 1) -> Layout:
    """Move every border independently, towards the place where the counts before it add up to its share."""
    size, total = len(kappa), sum(kappa)
    if total < size:
        return layout
    moves = [_border_move(layout, kappa, i, max_step) for i in range(size - 1)]
    # Entry j is the border before partition j, entry j + 1 the one after it; a positive move goes left.
    around = [0, *moves, 0]
    left = [layout.counts[j] - max(around[j + 1], 0) - max(-around[j], 0) for j in range(size)]
    for i, move in enumerate(moves):
        if left[i if move > 0 else i + 1] < layout.least:
            around[i + 1] = 0
    return layout.recounted([layout.counts[j] + around[j] - around[j + 1] for j in range(size)])


def threshold_ref(delta: float, total: int, k: int) -> float:
    """Return the next threshold of the reference program, which only raises it inside the band."""
    x = total / k
    return delta * (1.005 if x > 1.1 else 1.00125 if x > 0.909 else 0.995)


def threshold_prop(delta: float, raw: int, k: int, density: float) -> float:
    """Return the next threshold of a proportional controller, whose gain grows with the density."""
    gain = min(max(5 * density, 1e-3), 0.05)
    change = min(max(gain * math.log(max(raw, 1) / k), -0.05), 0.05)
    return min(max(delta * math.exp(change), TINY), HUGE)


class ExDynaOracle:
    """State of all ranks. ExDyna as in the reference program, or without ``moving`` borders MiCRO.

    After a step, ``layout`` and ``delta`` are those that the step used, and ``counts`` are its counts by rank.
    """

    def __init__(self, world_size: int, numel: int, density: float, layout: Layout, *, moving: bool) -> None:
        self.world_size, self.layout, self.moving = world_size, layout, moving
        self.k = max(1, int(density * numel))
        self.delta = 1 / (2 * math.sqrt(self.k))
        self.number = 0
        self.counts: list[int] = []
        self.residuals: list[list[float]] = [[0.0] * numel for _ in range(world_size)]

    def step(self, gradients: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
        """Run one iteration. Return the selected indices, ascending, and the sums over all ranks there."""
        pairs = zip(self.residuals, gradients, strict=True)
        acc = [[e + g for e, g in zip(*pair, strict=True)] for pair in pairs]
        t, self.number = self.number, self.number + 1
        if t > 0:
            # Both follow from the counts of the previous iteration, which every rank has.
            if self.moving:
                self.layout = rebalance_paper(self.layout, by_partition(self.counts, t - 1))
            self.delta = threshold_ref(self.delta, sum(self.counts), self.k)
        chosen = [self._choose(acc[r], (t + r) % self.world_size, t) for r in range(self.world_size)]
        self.counts = [len(c) for c in chosen]
        indices = sorted(i for c in chosen for i in c)
        sums = [sum(a[i] for a in acc) for i in indices]
        # Each sum contains the values of all ranks, so every rank clears all selected elements.
        for a in acc:
            for i in indices:
                a[i] = 0
        self.residuals = acc
        return indices, sums

    def _choose(self, acc: list[float], j: int, t: int) -> list[int]:
        start, stop = self.layout.bounds(j)
        limit = float(np.float32(self.delta))
        chosen = [i for i in range(start, stop) if abs(acc[i]) >= limit]
        # A rank selects at least one element, unless its partition is empty.
        return chosen if chosen or start == stop else [start + t % (stop - start)]


def _sweep(layout: Layout, kappa: Sequence[int], sheds: Callable[[int, int], bool]) -> Layout:
    """Move borders from left to right. Each move updates the estimated counts for the next border."""
    counts, load = list(layout.counts), list(kappa)
    if sum(load) < len(load):
        return layout
    per_block = layout.block * sum(load) // layout.numel
    for i in range(len(load) - 1):
        if sheds(load[i], load[i + 1]) and counts[i] - 1 >= layout.least:
            moved = 1
        elif sheds(load[i + 1], load[i]) and counts[i + 1] - 1 >= layout.least:
            moved = -1
        else:
            continue
        counts[i], counts[i + 1] = counts[i] - moved, counts[i + 1] + moved
        load[i], load[i + 1] = load[i] - moved * per_block, load[i + 1] + moved * per_block
    return layout.recounted(counts)


def _border_move(layout: Layout, kappa: Sequence[int], i: int, max_step: int) -> int:
    """Return by how many blocks the border after partition ``i`` should move to the left."""
    size, total = len(kappa), sum(kappa)
    u = Fraction(i + 1, size)
    excess = sum(kappa[: i + 1]) - u * total
    off = abs(excess) * size / total
    if off <= Fraction(1, 20) or off**2 <= size**2 * u * (1 - u) / total:
        return 0
    shrinks = i if excess > 0 else i + 1
    # An empty partition cannot shrink: its move is cancelled later.
    per_block = Fraction(max(kappa[shrinks], 1), max(layout.counts[shrinks], 1))
    blocks = min(max(math.floor(abs(excess) / 4 / per_block), 1), max_step)
    return blocks if excess > 0 else -blocks


def _shares(total: int, size: int) -> list[int]:
    return [total // size + (j < total % size) for j in range(size)]


def _starts(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
