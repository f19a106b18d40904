"""All-gather of the entries that pass a threshold: constant, from a normal fit, or from a Pareto fit.

Selection is cheaper than top-k. The exchange costs as much: its volume grows with the number of workers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import (
    BudgetedAlgorithm,
    EntryRecipe,
    Stateless,
    check,
    check_at_least,
    check_number,
)
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import all_gather_mean, dense_exchange, share_rows
from tritoncomm.primitives.selection import entries_to_keep, gaussian_selection, rounding_figures, sidco_selection
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, Formula, both
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm.scheduler.wire import Encoding
from tritoncomm_kernels import Selection

# SIDCo averages the relative count over a window of steps. It changes the number of stages if this mean differs from 1
# by more than the tolerance.
_WINDOW, _TOLERANCE, _STAGES = 5, 0.2, 3


@dataclass(frozen=True, kw_only=True)
class HardThreshold(EntryRecipe):
    """Deliver all entries whose magnitude is at least ``threshold``.

    With fp32 values, no residual reaches the threshold after a step.

    A. Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization", NeurIPS 2021: a constant threshold
    is the optimum over a whole run for a given volume. The volume of a single step is not bounded. With
    ``threshold=None`` the first step sets the threshold. It is then the mean over workers of the k-th largest
    magnitude, where k follows from ``density``.
    """

    name: ClassVar[str] = "hard_threshold"
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_number(self, "threshold")
            check(self, "threshold", 0 < self.threshold < math.inf, "must be a finite magnitude above 0, or None")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`. Assumes that exactly k entries pass."""
        words = self.entry_words(numel) * entries_to_keep(numel, self.density) * (world_size - 1)
        return Formula(2 * cost.log2(world_size), words, words)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. The threshold is in gradient units."""
        return False

    def build(self, numel: int) -> HardThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        k = entries_to_keep(numel, self.density)
        return HardThresholdAlgorithm(numel, k, self.threshold or 0.0, self.encoding)


@dataclass(frozen=True, kw_only=True)
class GaussianK(EntryRecipe):
    """Deliver about k entries, found by a normal fit to the accumulator.

    At most ``max_ratio`` times k entries are sent, the largest ones.
    """

    name: ClassVar[str] = "gaussiank"
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_ratio")
        check(self, "max_ratio", math.isfinite(self.max_ratio), "must be a finite multiple of k")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`. Assumes that exactly k entries pass."""
        words = self.entry_words(numel) * entries_to_keep(numel, self.density) * (world_size - 1)
        return Formula(2 * cost.log2(world_size), words, words)

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return GaussianKAlgorithm(numel, entries_to_keep(numel, self.density), self.max_ratio, self.encoding)


@dataclass(frozen=True, kw_only=True)
class SIDCo(GaussianK):
    """Deliver about k entries, found by generalized Pareto fits (SIDCo-P).

    The number of stages starts at three and is adapted to the observed counts. ``max_ratio`` is that of
    :class:`GaussianK`.
    """

    name: ClassVar[str] = "sidco"

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return SIDCoAlgorithm(numel, entries_to_keep(numel, self.density), self.max_ratio, self.encoding)


class ThresholdAlgorithm(BudgetedAlgorithm):
    """Base class of the three methods. It exchanges the counts first, then exactly the selected entries."""

    def __init__(self, numel: int, k: int, room: int, encoding: Encoding) -> None:
        super().__init__(numel)
        self.k = k
        self.encoding = encoding
        self.room = min(numel, room)

    @abstractmethod
    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        """Return the entries of this rank, and the state after a successful step."""

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        finite = acc.is_finite()
        passed, state = yield from self._select(acc, finite, world_size)
        own = kernels.largest(passed, self.room, workspace=self.workspace)
        encoding = self.encoding
        chosen = own
        if world_size > 1:
            own = encoding.section(0, self.numel, own.found, divisor=world_size).sendable(own)
        (counts,) = yield from share_rows([own.found], finite, world_size, acc.device, phase="counts", limit=self.numel)
        mean, sent = yield from all_gather_mean(own, counts, encoding, acc, rank, world_size)
        acc.subtract(sent, rounded=encoding.rounds)
        acc.selected = own.found
        rounding = rounding_figures(chosen, sent) if encoding.rounds else {}
        self.report = {"passed": float(passed.found), **rounding}
        self.state = state
        return mean

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. All ranks send as many entries as they may."""
        return self._forecast(self.encoding.words_at_most(self.numel, self.room, 1), world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`. Each rank sends k entries: 2k(P-1) words."""
        return self._forecast(self.encoding.words(self.numel, self.k), world_size)

    def _forecast(self, words: int, world_size: int) -> Forecast:
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        return Forecast(
            {
                "counts": both(cost.all_gather(1, 8, world_size)),
                "all-gather": both(cost.bruck(words, world_size)),
            }
        )


@dataclass(frozen=True)
class HardThresholdState:
    """The threshold, or 0 until the first step sets it."""

    threshold: float = 0.0


class HardThresholdAlgorithm(ThresholdAlgorithm):
    """Send all entries that reach the threshold, without a limit on their number."""

    state: HardThresholdState

    def __init__(self, numel: int, k: int, threshold: float, encoding: Encoding) -> None:
        super().__init__(numel, k, numel, encoding)
        self.state = HardThresholdState(threshold)

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        state = self.state
        if state.threshold == 0:
            own = kernels.kth_magnitude(acc.dense(), self.k) if finite else 0.0
            words = torch.tensor([own], dtype=torch.float64, device=acc.device)
            everybody = (yield AllGather("calibration", words)) if world_size > 1 else words
            # Added in rank order, so that all ranks get the same bits.
            state = replace(state, threshold=sum(everybody.flatten().tolist()) / world_size)
        return acc.at_least(state.threshold), state

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. Up to the whole vector, plus the calibration in the first step."""
        forecast = super().predicted_traffic(world_size)
        if self.goes_dense or self.state.threshold:
            return forecast
        return Forecast({"calibration": both(cost.all_gather(1, 8, world_size)), **forecast.phases})


class GaussianKAlgorithm(ThresholdAlgorithm):
    """Fit the threshold from scratch in every step."""

    def __init__(self, numel: int, k: int, max_ratio: float, encoding: Encoding) -> None:
        super().__init__(numel, k, math.ceil(k * max_ratio), encoding)
        self.state = Stateless()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        yield from ()
        passed = gaussian_selection(acc.dense(), self.k) if finite else acc.at_least(math.inf)
        return passed, self.state


@dataclass(frozen=True)
class SIDCoState:
    """This rank's number of stages, and the counts of its last fits as multiples of k."""

    stages: int = _STAGES
    ratios: tuple[float, ...] = ()


class SIDCoAlgorithm(ThresholdAlgorithm):
    """Select by Pareto fits, or by exact top-k if there is no tail to fit."""

    state: SIDCoState

    def __init__(self, numel: int, k: int, max_ratio: float, encoding: Encoding) -> None:
        super().__init__(numel, k, math.ceil(k * max_ratio), encoding)
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
        """Return the next state: one stage fewer if too many entries pass on average, one more if too few pass."""
        ratios = (*self.state.ratios, ratio)
        if len(ratios) < _WINDOW:
            return replace(self.state, ratios=ratios)
        mean = sum(ratios) / _WINDOW
        change = (mean < 1 - _TOLERANCE) - (mean > 1 + _TOLERANCE)
        most = max(1, math.ceil(math.log(self.k / self.numel, 0.5)))
        return SIDCoState(min(max(self.state.stages + change, 1), most))

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`. It is empty, because every rank fits its own accumulator."""
        return {}
