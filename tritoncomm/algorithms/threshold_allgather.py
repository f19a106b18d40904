"""All-gather of whatever passes a threshold: hard, fitted by a normal law, fitted by a Pareto law.

Cheaper to select than top-k, and as dear to exchange: the volume grows with the workers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, Stateless, check, check_at_least, check_number
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import all_gather_sum, dense_exchange, share_rows
from tritoncomm.primitives.selection import entries_to_keep, gaussian_selection, sidco_selection
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, Formula, both
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm_kernels import Selection

# SIDCo adapts its stages every so many calls, when the count was off by more than a fifth.
_WINDOW, _TOLERANCE, _STAGES = 5, 0.2, 3


@dataclass(frozen=True, kw_only=True)
class HardThreshold(Recipe):
    """Whatever reaches ``threshold`` in magnitude, from the first step to the last; nothing larger is ever owed.

    A. Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization", NeurIPS 2021: over a whole
    run a constant threshold is the optimum for a given volume. The volume of a step is not bounded. With
    ``threshold=None`` it is the mean over workers of the quantile that ``density`` is at the first step.
    """

    name: ClassVar[str] = "hard_threshold"
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_number(self, "threshold")
            check(self, "threshold", 0 < self.threshold < math.inf, "choose a finite magnitude above 0, or None")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`: when exactly k pass."""
        words = 2 * entries_to_keep(numel, self.density) * (world_size - 1)
        return Formula(2 * cost.log2(world_size), words, words)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`: the threshold is in units of the gradient."""
        return False

    def build(self, numel: int) -> HardThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return HardThresholdAlgorithm(numel, entries_to_keep(numel, self.density), self.threshold or 0.0)


@dataclass(frozen=True, kw_only=True)
class GaussianK(Recipe):
    """About k entries by a normal fit to the accumulator; at most ``max_ratio`` times k, then the largest."""

    name: ClassVar[str] = "gaussiank"
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_ratio")
        check(self, "max_ratio", math.isfinite(self.max_ratio), "choose a finite multiple of k")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`: when exactly k pass."""
        words = 2 * entries_to_keep(numel, self.density) * (world_size - 1)
        return Formula(2 * cost.log2(world_size), words, words)

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return GaussianKAlgorithm(numel, entries_to_keep(numel, self.density), self.max_ratio)


@dataclass(frozen=True, kw_only=True)
class SIDCo(GaussianK):
    """About k entries by generalised Pareto fits (SIDCo-P) with three stages to begin with, adapted by the counts."""

    name: ClassVar[str] = "sidco"

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return SIDCoAlgorithm(numel, entries_to_keep(numel, self.density), self.max_ratio)


class ThresholdAlgorithm(Algorithm):
    """What the three have in common: counts first, then exactly the entries."""

    def __init__(self, numel: int, k: int, room: int) -> None:
        super().__init__(numel)
        self.k = k
        self.room = min(numel, room)

    @abstractmethod
    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        """The entries of this rank, and the state after a step that goes through."""

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        finite = acc.is_finite()
        passed, state = yield from self._select(acc, finite, world_size)
        own = kernels.largest(passed, self.room, workspace=self.workspace)
        (counts,) = yield from share_rows([own.found], finite, world_size, acc.device, phase="counts")
        indices, sums = yield from all_gather_sum(own, counts, acc, rank, world_size)
        acc.clear(own.indices)
        acc.selected = own.found
        self.report = {"passed": float(passed.found)}
        self.state = state
        return SparseVector(indices, sums / world_size, self.numel)

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: everybody sends as much as it may."""
        return self._forecast(self.room, world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: k entries from everybody; 2k(P-1) words."""
        return self._forecast(self.k, world_size)

    def _forecast(self, entries: int, world_size: int) -> Forecast:
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        return Forecast(
            {
                "counts": both(cost.all_gather(1, 8, world_size)),
                "all-gather": both(cost.bruck(2 * entries, world_size)),
            }
        )


@dataclass(frozen=True)
class HardThresholdState:
    """The threshold; 0 while it is to be found."""

    threshold: float = 0.0


class HardThresholdAlgorithm(ThresholdAlgorithm):
    """Everything that reaches the threshold, however much that is."""

    state: HardThresholdState

    def __init__(self, numel: int, k: int, threshold: float) -> None:
        super().__init__(numel, k, numel)
        self.state = HardThresholdState(threshold)

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        state = self.state
        if state.threshold == 0:
            own = kernels.kth_magnitude(acc.dense(), self.k) if finite else 0.0
            words = torch.tensor([own], dtype=torch.float64, device=acc.device)
            everybody = (yield AllGather("calibration", words)) if world_size > 1 else words
            # In rank order, so that all ranks find the same bits.
            state = replace(state, threshold=sum(everybody.flatten().tolist()) / world_size)
        return acc.at_least(state.threshold), state

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: as much as the whole vector, and once the calibration."""
        forecast = super().predicted_traffic(world_size)
        if self.k >= self.numel or self.state.threshold:
            return forecast
        return Forecast({"calibration": both(cost.all_gather(1, 8, world_size)), **forecast.phases})


class GaussianKAlgorithm(ThresholdAlgorithm):
    """A fit every step, from scratch."""

    def __init__(self, numel: int, k: int, max_ratio: float) -> None:
        super().__init__(numel, k, math.ceil(k * max_ratio))
        self.state = Stateless()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        yield from ()
        passed = gaussian_selection(acc.dense(), self.k) if finite else Selection.of(*acc.at_least(math.inf)[:2])
        return passed, self.state


@dataclass(frozen=True)
class SIDCoState:
    """This rank's stages, and what its last fits let through in multiples of k."""

    stages: int = _STAGES
    ratios: tuple[float, ...] = ()


class SIDCoAlgorithm(ThresholdAlgorithm):
    """Pareto fits; exact top-k where there is nothing to fit."""

    state: SIDCoState

    def __init__(self, numel: int, k: int, max_ratio: float) -> None:
        super().__init__(numel, k, math.ceil(k * max_ratio))
        self.state = SIDCoState()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        yield from ()
        if not finite:
            return acc.at_least(math.inf), self.state
        fitted = sidco_selection(acc.dense(), self.k, self.state.stages)
        if fitted is None:
            return acc.top_k(self.k), self.state
        return fitted, self._adapted(fitted.found / self.k)

    def _adapted(self, ratio: float) -> SIDCoState:
        """One stage fewer when too many pass on average, one more when too few."""
        ratios = (*self.state.ratios, ratio)
        if len(ratios) < _WINDOW:
            return replace(self.state, ratios=ratios)
        mean = sum(ratios) / _WINDOW
        change = (mean < 1 - _TOLERANCE) - (mean > 1 + _TOLERANCE)
        most = max(1, math.ceil(math.log(self.k / self.numel, 0.5)))
        return SIDCoState(min(max(self.state.stages + change, 1), most))

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: every rank fits its own accumulator."""
        return {}
