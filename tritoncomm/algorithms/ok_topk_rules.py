"""What Ok-Topk remembers, and how it follows from the figures of a step: thresholds, triggers, and the regions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.primitives.packing import Encoding
from tritoncomm.primitives.region_cuts import consensus_cuts
from tritoncomm.primitives.selection import NO_KEY, magnitude_of
from tritoncomm.scheduler.rounds import AllReduce, Pattern, read

# Factor by which a reused threshold is lowered. Delivered entries leave the residuals. When gradients are small
# compared with the residuals, the exact k-th magnitude of one step would therefore select almost nothing at the next.
# At 0.98, usually at least k entries pass, and then the k largest of them are known exactly.
WARM_START = 0.98
# A reused threshold never changes by more than this factor in one step.
MAX_CORRECTION = 2.0
_INFINITE_KEY = 0x7F800000


@dataclass(frozen=True)
class OkTopkState:
    """State carried to the next step.

    ``local_threshold`` applies to this rank's accumulator. ``global_threshold`` applies to sums over ranks, never to
    means. A threshold of 0 is invalid and must be computed exactly before use. ``cuts`` holds the P + 1 bounds of
    the regions. The ``force_`` flags request a re-evaluation or a repartition at the next step.
    """

    step: int = 0
    world_size: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    cuts: tuple[int, ...] = ()
    force_reevaluate: bool = True
    force_repartition: bool = True


class Triggers(NamedTuple):
    """When a step balances, and when the next one repartitions or re-evaluates besides the periods.

    Blocks are balanced if the largest exceeds ``balance`` times the mean size. The next step repartitions if an owner
    receives more than ``skew`` times the mean, and re-evaluates if the number of sums that reach the global threshold
    is not between ``drift_low`` and ``drift_high`` times k.
    """

    balance: float = 4.0
    skew: float = 2.0
    drift_low: float = 0.5
    drift_high: float = 2.0


TRIGGERS = Triggers()


class Figures(NamedTuple):
    """What a rank tells the others of a step.

    ``candidates`` and ``reaching`` count the sums of its region that reach the lowered global threshold, and the
    threshold itself. ``load`` is the number of entries that all ranks have for its region, including those without
    room. ``edge``, with rounded values and fixed room only, is the key of the smallest of the k (k/P in a step that
    reuses thresholds) largest sums that this rank sends.
    """

    candidates: int
    load: int
    reaching: int
    edge: int = NO_KEY


class Own(NamedTuple):
    """What a rank knows of a step beside all :class:`Figures`.

    ``found`` is the number of delivered entries. ``least`` is the key of the smallest of the k largest ones, or, if
    values are rounded and have exact lengths, of all before rounding. Both are equal on all ranks. ``selected`` is the
    number of its own entries that reach its local threshold, and ``kth`` the key of the smallest of the k largest ones.
    """

    found: int
    least: int
    selected: int
    kth: int


@dataclass(frozen=True)
class Rules:
    """The decisions that a rank takes from observed counts.

    ``numel``, ``k``, the settings of the recipe and the ``encoding`` of messages are those of the exchange.
    """

    numel: int
    k: int
    correct_thresholds: bool
    triggers: Triggers
    encoding: Encoding

    def after(
        self, state: OkTopkState, rows: Sequence[Figures], own: Own, *, reevaluate: bool, exactly: bool, is_fixed: bool
    ) -> OkTopkState:
        """Return the state after a step.

        Args:
            state: The state before it.
            rows: The figures of each rank.
            own: What this rank knows beside them.
            reevaluate: Whether the step has computed thresholds.
            exactly: Whether this rank has selected its k largest entries.
            is_fixed: Whether messages had fixed room.
        """
        by_owner = is_fixed and self.encoding.rounds
        edges = _magnitudes([row.edge for row in rows] if by_owner else [own.least], found=own.found)
        if reevaluate:
            # Without any sum there is no new threshold. Keep the old one and re-evaluate at the next step.
            threshold = min(edges) if own.found else state.global_threshold
            again = own.found == 0
        else:
            lowered, wanted = self.lowered(state.global_threshold), sum([row.candidates for row in rows])
            # The smallest of more than k sums is not the k-th one.
            is_known = own.found == self.k if self.encoding.rounds else own.found >= self.k
            kth = self._mean_edge(rows, edges, lowered) if by_owner else min(edges) if is_known else 0.0
            threshold = self.following(lowered, wanted, kth)
            again = self.drifted(sum([row.reaching for row in rows]))
        return OkTopkState(
            step=state.step + 1,
            world_size=state.world_size,
            local_threshold=self.local_after(state, own.selected, own.kth, exactly=exactly),
            global_threshold=threshold,
            cuts=state.cuts,
            force_reevaluate=again,
            force_repartition=self.skewed([row.load for row in rows]),
        )

    def local_after(self, state: OkTopkState, selected: int, kth: int, *, exactly: bool) -> float:
        """Return the local threshold for the next step, 0 if it has to be computed exactly there.

        ``selected`` and ``kth`` are those of :class:`Figures`.
        """
        known = magnitude_of(kth) if selected >= self.k else 0.0
        return known if exactly else self.following(self.lowered(state.local_threshold), selected, known)

    def _mean_edge(self, rows: Sequence[Figures], edges: Sequence[float], lowered: float) -> float:
        """Return about the k-th largest sum, of which no rank knows all exactly: the mean of the owners' (k/P)-th sums.

        The candidates of this step reach ``lowered``.
        """
        enough = [row.candidates * len(rows) >= self.k for row in rows]
        known = [edge if has else lowered for has, edge in zip(enough, edges, strict=True)]
        return math.fsum(known) / len(rows)

    def lowered(self, threshold: float) -> float:
        """Return the threshold that a step uses instead of ``threshold``, which the last step has left."""
        return threshold * (WARM_START if self.correct_thresholds else 1.0)

    def following(self, threshold: float, count: int, kth: float) -> float:
        """Return the threshold for the next step, given that ``count`` entries reached ``threshold``.

        ``kth`` is the k-th largest magnitude of these entries, or 0 if it is unknown.
        """
        if not self.correct_thresholds:
            return threshold
        return kth if count >= self.k and kth > 0 else corrected_threshold(threshold, count, self.k, self.numel)

    def drifted(self, reaching: int) -> bool:
        """Return True if so few or so many sums reach the global threshold that the next step has to re-evaluate it."""
        # With few levels, sums are equal by the thousand and pass a threshold together. Too many of them are no drift.
        low, high = self.triggers.drift_low * self.k, self.triggers.drift_high * self.k
        return reaching < low or (reaching > high and not self.encoding.is_coarse)

    def skewed(self, loads: Sequence[int]) -> bool:
        """Return True if an owner gets so many of all entries that the next step has to repartition."""
        # With fewer entries than ranks, no rank can propose cuts.
        return max(loads) * len(loads) > self.triggers.skew * sum(loads) and self.k >= len(loads)


def _magnitudes(keys: Sequence[int], *, found: int) -> list[float]:
    """Return the magnitudes of ``keys``, infinite for ranks without sums. ``found`` sums are delivered."""
    wrong = [key for key in keys if not 0 < key < _INFINITE_KEY and key != NO_KEY]
    if wrong or (found and min(keys) == NO_KEY):
        raise ProtocolMismatchError(
            f"phase 'all-gather': received {keys} as keys of smallest magnitudes: not in (0, {_INFINITE_KEY})"
        )
    return [magnitude_of(key) for key in keys]


def agree_on_cuts(proposal: torch.Tensor, numel: int) -> Pattern[tuple[int, ...]]:
    """Space repartition: return the mean of all ranks' proposals (:func:`~.region_cuts.propose_cuts`)."""
    total = yield from read("repartition", (yield AllReduce("repartition", proposal)))
    cuts = consensus_cuts(total, numel)
    if any(not 0 <= low <= high <= numel for low, high in itertools.pairwise(cuts)):
        raise ProtocolMismatchError(
            f"phase 'repartition': received proposals whose mean {cuts} does not ascend from 0 to {numel}"
        )
    return cuts


def corrected_threshold(threshold: float, count: int, wanted: int, numel: int) -> float:
    """Return the threshold for the next step, given that ``count`` of ``numel`` entries passed ``threshold``.

    ``wanted`` entries should pass. Gradient magnitudes have roughly exponential tails: count = numel x exp(-t / scale).
    The new threshold is therefore t x log(numel / wanted) / log(numel / count). It changes by at most a factor of
    :data:`MAX_CORRECTION` in either direction.
    """
    have = math.log(numel / max(0.5, min(count, numel)))
    want = math.log(numel / wanted)
    if have * MAX_CORRECTION <= want:
        return threshold * MAX_CORRECTION
    return threshold * min(MAX_CORRECTION, max(1 / MAX_CORRECTION, want / have))
