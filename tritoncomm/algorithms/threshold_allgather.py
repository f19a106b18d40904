"""All-gather of the entries that pass a threshold: constant, from a normal fit, or from a Pareto fit.

Selection is cheaper than top-k. The exchange costs as much: its volume grows with the number of workers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
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
from tritoncomm.primitives.selection import (
    GAUSSIAN_MARGIN,
    entries_to_keep,
    gaussian_padded,
    gaussian_selection,
    rounding_figures,
    sidco_padded,
    sidco_selection,
)
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.static_gather import all_gather_mean_static, rows_of, static_traffic
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, Pattern, read
from tritoncomm_kernels import Padded, Selection

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
    magnitude, where k follows from ``density``. In the static form a rank has room for ``static_room`` times k entries,
    its largest ones. The others stay in the residual.
    """

    name: ClassVar[str] = "hard_threshold"
    averages_when_dense: ClassVar[bool] = True
    has_static_form: ClassVar[bool] = True
    threshold: float | None = None
    static_room: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_number(self, "threshold")
            check(self, "threshold", 0 < self.threshold < math.inf, "must be a finite magnitude above 0, or None")
        check_at_least(self, 1, "static_room")
        check(self, "static_room", math.isfinite(self.static_room), "must be a finite multiple of k")

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. The threshold is in gradient units."""
        return False

    def build(self, numel: int) -> HardThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return HardThresholdAlgorithm(self, numel)


@dataclass(frozen=True, kw_only=True)
class GaussianK(EntryRecipe):
    """Deliver about k entries, found by a normal fit to the accumulator.

    At most ``max_ratio`` times k entries are sent, the largest ones.
    """

    name: ClassVar[str] = "gaussiank"
    averages_when_dense: ClassVar[bool] = True
    has_static_form: ClassVar[bool] = True
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_ratio")
        check(self, "max_ratio", math.isfinite(self.max_ratio), "must be a finite multiple of k")

    def can_be_static(self) -> bool:
        """See :meth:`StaticRecipe.can_be_static`. The fit must see more entries than it accepts."""
        return self.max_ratio > GAUSSIAN_MARGIN

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return GaussianKAlgorithm(self, numel)


@dataclass(frozen=True, kw_only=True)
class SIDCo(GaussianK):
    """Deliver about k entries, found by generalized Pareto fits (SIDCo-P).

    The number of stages starts at three and is adapted to the observed counts. ``max_ratio`` is that of
    :class:`GaussianK`.
    """

    name: ClassVar[str] = "sidco"

    def can_be_static(self) -> bool:
        """See :meth:`StaticRecipe.can_be_static`. The fits see the whole vector."""
        return True

    def build(self, numel: int) -> ThresholdAlgorithm:
        """See :meth:`Recipe.build`."""
        return SIDCoAlgorithm(self, numel)


class ThresholdAlgorithm(BudgetedAlgorithm):
    """Base class of the three methods. It exchanges the counts first, then exactly the selected entries.

    ``room`` is the largest number of entries that a rank sends, and ``static_room`` that of the static form, in which
    the host reads that number of ``figures`` of each rank.
    """

    figures: ClassVar[int] = 1

    def __init__(self, recipe: EntryRecipe, numel: int, *, ratio: float = math.inf, static_ratio: float) -> None:
        super().__init__(numel)
        self.encoding = recipe.encoding
        self.k = entries_to_keep(numel, recipe.density)
        self.room, self.static_room = (self._room(each) for each in (ratio, static_ratio))
        self.static = recipe.static is True

    def _room(self, ratio: float) -> int:
        return math.ceil(min(self.numel, self.k * ratio))

    @abstractmethod
    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        """Return the entries of this rank, and the state after a successful step."""

    @abstractmethod
    def _select_padded(self, acc: Accumulator, world_size: int) -> Pattern[tuple[Padded, list[torch.Tensor], Any]]:
        """Return the entries of this rank, :attr:`figures` about them (int32 ``[1]``), and the next state.

        The first figure is the number of entries that have passed. Nothing waits for a GPU after the first step.
        """

    def _adapted_to(self, state: Any, figures: Sequence[int]) -> Any:
        """Return the state after a step with these :attr:`figures`. ``state`` is what the selection returned."""
        return state

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        if acc.verdict is not None:
            return (yield from self._reduce_static(acc, acc.verdict, rank, world_size))
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

    def _reduce_static(self, acc: Accumulator, verdict: Verdict, rank: int, world_size: int) -> Pattern[SparseVector]:
        """Do the same as :meth:`reduce` with ``static_room``, without waiting for a GPU before the verdict."""
        own, counted, state = yield from self._select_padded(acc, world_size)
        rows = rows_of(self.encoding, self.numel, self.static_room, world_size, acc.device)
        mean, sent = yield from all_gather_mean_static(own, rows, acc, verdict, world_size)
        acc.subtract_padded(sent, rounded=rows.rounds)
        everybody = yield from verdict.settle(world_size, counted)
        figures = everybody[rank]
        acc.selected = min(figures[0], self.static_room)
        self.report = {"passed": float(figures[0])}
        self.state = self._adapted_to(state, figures)
        return mean

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. All ranks send as many entries as they may, or k: 2k(P-1) words."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if self.is_static:
            return static_traffic(self.encoding, self.numel, self.static_room, world_size, figures=self.figures)
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
        super().__init__(recipe, numel, static_ratio=recipe.static_room)
        self.state = HardThresholdState(recipe.threshold or 0.0)

    def _calibrated(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[HardThresholdState]:
        """Return the state with a threshold, which the first step sets."""
        state = self.state
        if state.threshold == 0:
            own = kernels.kth_magnitude(acc.dense(), self.k) if finite else 0.0
            words = torch.tensor([own], dtype=torch.float64, device=acc.device)
            everybody = (yield AllGather("calibration", words)) if world_size > 1 else words
            # Added in rank order, so that all ranks get the same bits.
            mean = sum((yield from read("calibration", everybody.flatten()))) / world_size
            state = replace(state, threshold=mean if math.isfinite(mean) else math.inf)
        return state

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        state = yield from self._calibrated(acc, finite, world_size)
        return acc.at_least(state.threshold), state

    def _select_padded(self, acc: Accumulator, world_size: int) -> Pattern[tuple[Padded, list[torch.Tensor], Any]]:
        entries = acc.top_k_padded(self.static_room)
        # From a NaN or Inf follows a threshold that only NaN and Inf reach. The verdict then rejects the step.
        state = yield from self._calibrated(acc, True, world_size)
        own = kernels.reaching(entries, state.threshold, workspace=self.workspace)
        return own, [kernels.count_reaching(acc.dense(), state.threshold)], state

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. Up to the whole vector, plus the calibration in the first step."""
        forecast = super().predicted_traffic(world_size, ordinary=ordinary)
        if ordinary or self.goes_dense or self.state.threshold:
            return forecast
        return Forecast({"calibration": both(cost.all_gather(1, 8, world_size)), **forecast.phases})


class GaussianKAlgorithm(ThresholdAlgorithm):
    """Fit the threshold from scratch in every step."""

    def __init__(self, recipe: GaussianK, numel: int) -> None:
        super().__init__(recipe, numel, ratio=recipe.max_ratio, static_ratio=recipe.max_ratio)
        self.state = Stateless()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        yield from ()
        passed = gaussian_selection(acc.dense(), self.k) if finite else acc.at_least(math.inf)
        return passed, self.state

    def _select_padded(self, acc: Accumulator, world_size: int) -> Pattern[tuple[Padded, list[torch.Tensor], Any]]:
        yield from ()
        entries = acc.top_k_padded(self.static_room)
        own, passed = gaussian_padded(acc.dense(), entries, self.k, workspace=self.workspace)
        return own, [passed], self.state


@dataclass(frozen=True)
class SIDCoState:
    """This rank's number of stages, and the counts of its last fits as multiples of k."""

    stages: int = _STAGES
    ratios: tuple[float, ...] = ()


class SIDCoAlgorithm(ThresholdAlgorithm):
    """Select by Pareto fits, or by exact top-k if there is no tail to fit."""

    figures: ClassVar[int] = 2
    state: SIDCoState

    def __init__(self, recipe: SIDCo, numel: int) -> None:
        super().__init__(recipe, numel, ratio=recipe.max_ratio, static_ratio=recipe.max_ratio)
        self.state = SIDCoState()

    def _select(self, acc: Accumulator, finite: bool, world_size: int) -> Pattern[tuple[Selection, Any]]:
        yield from ()
        if not finite:
            return acc.at_least(math.inf), self.state
        fitted = sidco_selection(acc.dense(), self.k, self.state.stages)
        if fitted is None:
            return acc.top_k(self.k), self.state
        return fitted, self._adapted(fitted.found / self.k)

    def _select_padded(self, acc: Accumulator, world_size: int) -> Pattern[tuple[Padded, list[torch.Tensor], Any]]:
        yield from ()
        entries = acc.top_k_padded(self.static_room)
        own, *figures = sidco_padded(acc.dense(), entries, self.k, self.state.stages, workspace=self.workspace)
        return own, figures, self.state

    def _adapted_to(self, state: Any, figures: Sequence[int]) -> Any:
        passed, has_tail = figures
        return self._adapted(passed / self.k) if has_tail else state

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
