"""What both forms of Ok-Topk share: the state, the rules for thresholds and triggers, and the repartition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.primitives.region_cuts import consensus_cuts
from tritoncomm.scheduler.rounds import AllReduce, Pattern, read

# Factor by which a reused threshold is lowered. Delivered entries leave the residuals. When gradients are small
# compared with the residuals, the exact k-th magnitude of one step would therefore select almost nothing at the next.
# At 0.98, usually at least k entries pass, and then the k largest of them are known exactly.
WARM_START = 0.98
# A reused threshold never changes by more than this factor in one step.
MAX_CORRECTION = 2.0


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


@dataclass(frozen=True)
class Rules:
    """The decisions that a rank takes from observed counts.

    ``numel``, ``k`` and the settings of the recipe are those of the exchange. ``is_coarse`` says that values have few
    levels (:attr:`~tritoncomm.primitives.packing.Encoding.is_coarse`).
    """

    numel: int
    k: int
    correct_thresholds: bool
    triggers: Triggers
    is_coarse: bool

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
        return reaching < low or (reaching > high and not self.is_coarse)

    def skewed(self, loads: Sequence[int]) -> bool:
        """Return True if an owner gets so many of all entries that the next step has to repartition."""
        # With fewer entries than ranks, no rank can propose cuts.
        return max(loads) * len(loads) > self.triggers.skew * sum(loads) and self.k >= len(loads)


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
