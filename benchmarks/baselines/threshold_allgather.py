"""All-gather of the entries that pass a threshold: constant, from a normal fit, or from a Pareto fit.

Selection is cheaper than top-k. The exchange costs as much: its volume grows with the number of workers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from tritoncomm.algorithms.base import (
    Bounds,
    BudgetedAlgorithm,
    EntryRecipe,
    Stateless,
    check,
    check_at_least,
    check_number,
)
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange, mean_over_ranks, share_rows
from tritoncomm.primitives.exchange import all_gather_mean
from tritoncomm.primitives.selection import entries_to_keep, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries

# As in the GaussianK code released with Ok-Topk: up to 20 corrections of 2 %, until the count is within 25 % of k.
_GAUSSIAN_TRIES, _GAUSSIAN_STEP, _GAUSSIAN_MARGIN = 20, 1.02, 1.25
# The thresholds that are tried, as multiples of the first one, which is in the middle.
_GAUSSIAN_SCALES = [_GAUSSIAN_STEP**power for power in range(-_GAUSSIAN_TRIES, _GAUSSIAN_TRIES + 1)]
# SIDCo: the share that passes the first of several stages, the smallest k that is fitted, and the largest shape of a
# Pareto distribution that is treated as exponential.
_FIRST_STAGE, _FEWEST, _EXPONENTIAL = 0.25, 4, 1e-9
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
    averages_when_dense: ClassVar[bool] = True
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_number(self, "threshold")
            check(self, "threshold", 0 < self.threshold < math.inf, "must be a finite magnitude above 0, or None")

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. The threshold is in gradient units."""
        return False

    def build(self, numel: int, bounds: Bounds = ()) -> HardThresholdAlgorithm:
        return HardThresholdAlgorithm(self, numel)


@dataclass(frozen=True, kw_only=True)
class GaussianK(EntryRecipe):
    """Deliver about k entries, found by a normal fit to the accumulator.

    At most ``max_ratio`` times k entries are sent, the largest ones.
    """

    name: ClassVar[str] = "gaussiank"
    averages_when_dense: ClassVar[bool] = True
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_ratio")
        check(self, "max_ratio", math.isfinite(self.max_ratio), "must be a finite multiple of k")

    def build(self, numel: int, bounds: Bounds = ()) -> ThresholdAlgorithm:
        return GaussianKAlgorithm(self, numel)


@dataclass(frozen=True, kw_only=True)
class SIDCo(GaussianK):
    """Deliver about k entries, found by generalized Pareto fits (SIDCo-P).

    The number of stages starts at three and is adapted to the observed counts. ``max_ratio`` is that of
    :class:`GaussianK`.
    """

    name: ClassVar[str] = "sidco"

    def build(self, numel: int, bounds: Bounds = ()) -> ThresholdAlgorithm:
        return SIDCoAlgorithm(self, numel)


class ThresholdAlgorithm(BudgetedAlgorithm):
    """Base class of the three methods. It exchanges the counts first, then exactly the selected entries.

    A rank sends at most ``ratio`` times k entries, the largest ones.
    """

    def __init__(self, recipe: EntryRecipe, numel: int, *, ratio: float = math.inf) -> None:
        super().__init__(numel)
        self.encoding = recipe.encoding
        self.k = entries_to_keep(numel, recipe.density)
        self.room = math.ceil(min(numel, self.k * ratio))

    @abstractmethod
    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Entries, Any]]:
        """Return the entries of this rank, and the state after a successful step."""

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        finite = acc.is_finite()
        passed, state = yield from self._select(acc, finite, world_size)
        own = kernels.largest(passed, self.room)
        encoding = self.encoding
        chosen = own
        if world_size > 1:
            own = encoding.section(0, self.numel, own.room, divisor=world_size).sendable(own)
        (counts,) = yield from share_rows([own.room], finite, world_size, acc.device, phase="counts", limit=self.numel)
        mean, sent = yield from all_gather_mean(own, counts, encoding, acc, rank, world_size)
        acc.subtract(sent, rounded=encoding.rounds)
        acc.selected = own.room
        rounding = rounding_figures(chosen, sent) if encoding.rounds else {}
        self.report = {"passed": float(passed.room), **rounding}
        self.state = state
        return mean

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. All ranks send as many entries as they may, or k: 2k(P-1) words."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        most = self.encoding.words_at_most(self.numel, self.room, 1)
        words = self.encoding.words(self.numel, self.k) if ordinary else most
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

    def __init__(self, recipe: HardThreshold, numel: int) -> None:
        super().__init__(recipe, numel)
        self.state = HardThresholdState(recipe.threshold or 0.0)

    def _calibrated(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[HardThresholdState]:
        """Return the state with a threshold, which the first step sets."""
        state = self.state
        if state.threshold == 0:
            own = kernels.kth_magnitude(acc.dense(), self.k) if finite else 0.0
            threshold = yield from mean_over_ranks(own, world_size, acc.device, phase="calibration")
            state = replace(state, threshold=threshold)
        return state

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Entries, Any]]:
        state = yield from self._calibrated(acc, finite, world_size)
        return acc.at_least(state.threshold), state

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. Up to the whole vector, plus the calibration in the first step."""
        forecast = super().predicted_traffic(world_size, ordinary=ordinary)
        if ordinary or self.goes_dense or self.state.threshold:
            return forecast
        return Forecast({"calibration": both(cost.all_gather(1, 8, world_size)), **forecast.phases})


class GaussianKAlgorithm(ThresholdAlgorithm):
    """Fit the threshold from scratch in every step."""

    def __init__(self, recipe: GaussianK, numel: int) -> None:
        super().__init__(recipe, numel, ratio=recipe.max_ratio)
        self.state = Stateless()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Entries, Any]]:
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

    def __init__(self, recipe: SIDCo, numel: int) -> None:
        super().__init__(recipe, numel, ratio=recipe.max_ratio)
        self.state = SIDCoState()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Entries, Any]]:
        yield from ()
        if not finite:
            return acc.at_least(math.inf), self.state
        fitted = sidco_selection(acc.dense(), self.k, self.state.stages)
        if fitted is None:
            return acc.top_k(self.k), self.state
        return fitted, self._adapted(fitted.room / self.k)

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


def gaussian_selection(values: torch.Tensor, k: int) -> Entries:
    """Return about the ``k`` largest entries of fp32 ``values``, by a normal fit.

    The threshold is mean + z sigma, corrected by counting. With tails heavier than normal more entries pass than
    requested. At low density it can be several times as many. S. Shi et al., "Understanding Top-k Sparsification in
    Distributed Deep Learning", 2019.
    """
    double = values.double()
    sigma = double.std() if values.numel() > 1 else 0.0
    first = float(double.mean() + NormalDist().inv_cdf(1 - k / values.numel() / 2) * sigma)
    candidates = kernels.select(values, first * _GAUSSIAN_SCALES[0])
    keys = kernels.magnitude_keys(candidates.values)

    def passed(place: int) -> torch.Tensor:
        return keys >= kernels.threshold_key(first * _GAUSSIAN_SCALES[place])

    def count(place: int) -> int:
        return int(torch.count_nonzero(passed(place)))

    place = _GAUSSIAN_TRIES
    while place > 0 and count(place) < k * (2 - _GAUSSIAN_MARGIN):
        place -= 1
    if place == _GAUSSIAN_TRIES:
        while place < 2 * _GAUSSIAN_TRIES and count(place) > k * _GAUSSIAN_MARGIN:
            place += 1
    chosen = passed(place)
    if not chosen.any():  # the values have no tail
        return kernels.top_k(values, k)
    return Entries(candidates.indices[chosen], candidates.values[chosen])


def sidco_selection(values: torch.Tensor, k: int, stages: int) -> Entries | None:
    """Return about the ``k`` largest entries of fp32 ``values``, by generalized Pareto fits in ``stages`` stages.

    Each stage fits the tail above the threshold of the previous one. The result is None if there is no tail to fit: too
    few values, or values without spread. A. Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression
    Technique for Distributed Training Systems" (SIDCo), MLSys 2021, variant P.
    """
    if k < _FEWEST:
        return None
    tail = Entries(torch.arange(values.numel(), dtype=torch.int32, device=values.device), values)
    shift = 0.0
    for share in _sidco_shares(k, values.numel(), stages):
        excess = tail.values.abs().double() - shift
        mean, variance = excess.mean(), excess.var() if tail.room > 1 else excess.new_zeros(())
        if not (variance > 0 and mean > 0):
            return None
        threshold = shift + float(_pareto_excess(mean, variance, share))
        passed = kernels.magnitude_keys(tail.values) >= kernels.threshold_key(threshold)
        tail = Entries(tail.indices[passed], tail.values[passed])
        if tail.room == 0:
            return None
        shift = kernels.smallest_magnitude(tail.values)
    return tail


def _sidco_shares(k: int, numel: int, stages: int) -> list[float]:
    """Return the share of the entries of the previous stage that passes each stage."""
    density = k / numel
    if stages == 1 or density >= _FIRST_STAGE:
        return [density]
    return [_FIRST_STAGE, *[(density / _FIRST_STAGE) ** (1 / (stages - 1))] * (stages - 1)]


def _pareto_excess(mean: torch.Tensor, variance: torch.Tensor, share: float) -> torch.Tensor:
    """Return the value that a ``share`` of a generalized Pareto distribution with this mean and variance exceeds."""
    ratio = mean * mean / variance
    shape, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    exponential = -scale * math.log(share)
    return torch.where(shape.abs() < _EXPONENTIAL, exponential, scale * (1 - share**shape) / shape)
