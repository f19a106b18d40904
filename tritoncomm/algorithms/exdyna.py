"""ExDyna: every worker selects alone in a partition of its own, by one threshold that is scaled online.

D. Yoon, S. Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024. Partitions are disjoint, so selections never overlap and the volume does not grow with the
workers; partitions rotate among workers, and their borders follow the load. With fixed partitions this is
MiCRO (the same authors, HiPC 2023).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, check, check_at_least
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, dense_exchange, share_rows
from tritoncomm.primitives.region_cuts import offsets, trimmed_sizes
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Flow, Forecast, Formula, both
from tritoncomm.scheduler.rounds import AllGather, AllReduce, Pattern
from tritoncomm_kernels import Selection
from tritoncomm_kernels.rebalance import MAX_PARTITIONS

_LINE = 32  # fp32 values in 128 bytes: partitions start at a line
_TINY = 1e-30
# A threshold is looked for among every 17th magnitude (odd, or a matrix width that divides it would show the same
# columns only), but among at least this many where there are as many.
_SAMPLE_STRIDE, _SAMPLE_LEAST = 17, 4096
# Borders may jump by up to 16 blocks while the busiest worker has 1.5 times its share; later that would be jitter.
_FAST_FROM, _FAST_MOVE = 1.5, 16
# The paper's code: more than 1.1 k raise by 0.5 %, fewer than 0.909 k lower by 0.5 %, else a quarter of that.
_DENSE, _SPARSE = 1.1, 0.909
_RAISE, _RAISE_FINE, _LOWER_FINE, _LOWER = 1.005, 1.00125, 0.9987, 0.995
_LARGEST_CHANGE = 0.05
# Beyond this factor between what passed and what was asked for, following takes longer than starting over.
_LOST, _NOISE = 8.0, 3.0
_MANY = 16  # entries, from which on counts are taken for their mean


@dataclass(frozen=True, kw_only=True)
class ExDyna(Recipe):
    """Settings of ExDyna.

    ``mode="paper"`` is the authors' code to the last bit: blocks of a multiple of 32 elements with a tail
    that belongs to the last partition, one block per border and step, thresholds from 1 / (2 sqrt k) by
    fixed factors, at least one index from every worker. ``mode="robust"`` keeps what makes the method and
    replaces what fails outside the paper's setting. A field left at ``"auto"`` follows the mode:

    ``layout``: ``"paper"`` (``"tight"`` below ``32 * blocks`` elements, where the paper's has empty blocks) or
    ``"tight"``. ``rebalance``: ``"paper"``, ``"pair_ratio"``, ``"prefix"`` (robust) or ``"off"``, which is MiCRO
    with partitions of equal size. ``threshold_rule``: ``"ref"`` (paper), ``"ref_fixed"`` (with the branch that its
    code cannot reach), ``"prop"`` (robust: in proportion to the error, with a gain that falls with the
    density) or ``"off"`` (hold).

    ``blocks`` is how many blocks the vector is cut into, ``min_blocks`` how many a partition keeps (the paper's
    layout: a quarter of an equal share). Robust mode only: the first threshold is the quantile of the
    accumulators times ``lift``, because what is not sent grows; when eight times too many or too few entries
    pass, it is looked for again, without the lift; no more than ``capacity`` times
    k entries are delivered, of every worker the largest of what passed.
    """

    name: ClassVar[str] = "exdyna"
    mode: str = "robust"
    layout: str = "auto"
    rebalance: str = "auto"
    threshold_rule: str = "auto"
    blocks: int = 1024
    min_blocks: int = 1
    capacity: float = 2.0
    lift: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, choices in (
            ("mode", ("robust", "paper")),
            ("layout", ("auto", "tight", "paper")),
            ("rebalance", ("auto", "paper", "pair_ratio", "prefix", "off")),
            ("threshold_rule", ("auto", "ref", "ref_fixed", "prop", "off")),
        ):
            check(self, field, getattr(self, field) in choices, f"choose one of {', '.join(choices)}")
        check_at_least(self, 1, "blocks", "min_blocks", whole=True)
        check_at_least(self, 1, "capacity", "lift")
        check(self, "lift", math.isfinite(self.lift), "choose a finite multiple of the quantile")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`: three rings, over k entries that are evenly spread."""
        words = 3 * entries_to_keep(numel, self.density) * (world_size - 1) / world_size
        return Formula(4 * (world_size - 1), words, words)

    def build(self, numel: int) -> ExDynaAlgorithm:
        """See :meth:`Recipe.build`."""
        return ExDynaAlgorithm(self, numel)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`: one lane of the rebalancing kernel per partition."""
        if world_size > MAX_PARTITIONS and self.chosen("rebalance") != "off":
            raise ConfigurationError(
                f"{world_size} workers: partitions are balanced for at most {MAX_PARTITIONS}, choose rebalance='off'"
            )

    @property
    def parity(self) -> bool:
        """Whether to do as the authors' code does."""
        return self.mode == "paper"

    def chosen(self, field: str) -> str:
        """What ``"auto"`` means."""
        by_mode = {
            "layout": ("tight", "paper"),
            "rebalance": ("prefix", "paper"),
            "threshold_rule": ("prop", "ref"),
        }
        value: str = getattr(self, field)
        return by_mode[field][self.parity] if value == "auto" else value


@dataclass(frozen=True, kw_only=True)
class MiCRO(ExDyna):
    """ExDyna with partitions of equal size that never move."""

    name: ClassVar[str] = "micro"
    rebalance: str = "off"


@dataclass(frozen=True)
class ExDynaState:
    """Common to all ranks: everything follows from counts that all of them know.

    ``threshold`` 0 means to be found, for the first time unless ``settled``; ``blocks`` holds the blocks of each
    partition for the next step.
    """

    step: int = 0
    world_size: int = 0
    threshold: float = 0.0
    settled: bool = False
    blocks: tuple[int, ...] = ()


class Layout(NamedTuple):
    """How a vector is cut into blocks: elements per block, blocks per partition at first, and the floor."""

    block: int
    blocks: tuple[int, ...]
    least: int


class ExDynaAlgorithm(Algorithm):
    """One rank's ExDyna. :meth:`reduce` is the paper from top to bottom."""

    state: ExDynaState

    def __init__(self, recipe: ExDyna, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = ExDynaState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        layout = self.layout(world_size)
        state = self._state_for(world_size, layout)
        threshold = state.threshold or (yield from self._first_threshold(acc, world_size))
        bounds = self.bounds(layout, state.blocks)

        own, finite = self._select(acc, threshold, bounds, (state.step + rank) % world_size, state.step)
        alive = own.found > 0 or bool(acc.dense().any())
        # By rank: entries that passed, and whether there is anything but zeros.
        found, living = yield from share_rows([own.found, alive], finite, world_size, acc.device, phase="counts")
        kept = trimmed_sizes(found, self.capacity)
        capped = kernels.largest(own, kept[rank], workspace=self.workspace)
        union = yield from self._all_gather(capped.indices, kept, bounds, state.step, rank, world_size)
        sums = acc.dense()[union.long()]
        if world_size > 1 and union.numel():
            sums = yield AllReduce("values", sums)
        if kernels.has_non_finite(sums):  # on all ranks alike, they hold the same sums
            raise NonFiniteError("finite gradients overflow when summed; nothing was applied")

        acc.selected = capped.found
        acc.clear(union)  # everybody contributed its value at every selected index
        total = sum(found)
        self.report = {
            "threshold": threshold,
            "passed": float(total),
            "imbalance": max(found) * world_size / total if total else 1.0,
        }
        self.state = replace(
            state,
            step=state.step + 1,
            threshold=self._scaled(threshold, total) if any(living) else threshold,
            settled=state.settled or threshold > 0,
            blocks=self._rebalanced(state, layout, found, acc.device),
        )
        return SparseVector(union, sums / world_size, self.numel)

    def _state_for(self, world_size: int, layout: Layout) -> ExDynaState:
        """Another world size starts with equal partitions; the threshold is per worker and stays."""
        state = self.state
        if state.world_size != world_size:
            state = replace(state, world_size=world_size, blocks=layout.blocks)
        if self.recipe.parity and state.threshold == 0:
            state = replace(state, threshold=1 / (2 * math.sqrt(self.k)))
        return state

    def layout(self, world_size: int) -> Layout:
        """Block-based partitioning: contiguous runs of blocks, as many to each partition."""
        if self.recipe.rebalance == "off":
            return Layout(1, _shares(self.numel, world_size), 0)
        blocks = self.recipe.blocks
        block = self.numel // blocks // _LINE * _LINE
        if self.recipe.chosen("layout") == "paper" and block:
            return Layout(block, _shares(blocks, world_size), -(-blocks // (4 * world_size)))
        block = tight_block(self.numel, world_size, blocks)
        return Layout(block, _shares(-(-self.numel // block), world_size), self.recipe.min_blocks)

    def bounds(self, layout: Layout, blocks: Sequence[int]) -> list[int]:
        """Where each partition starts, and the end: the last one reaches to it, with or without a tail."""
        starts = itertools.accumulate(blocks[:-1], initial=0)
        return [*(min(start * layout.block, self.numel) for start in starts), self.numel]

    def _first_threshold(self, acc: Accumulator, world_size: int) -> Pattern[float]:
        """The mean over ranks of the quantile that k is, raised by ``lift``; 0 while hardly anything is non-zero."""
        stride = max(1, min(_SAMPLE_STRIDE, self.numel // _SAMPLE_LEAST)) | 1
        sample = acc.dense()[::stride].contiguous()
        quantile = kernels.kth_magnitude(sample, entries_to_keep(sample.numel(), self.recipe.density))
        words = torch.tensor([quantile], dtype=torch.float64, device=acc.device)
        everybody = (yield AllGather("start", words)) if world_size > 1 else words
        # In rank order, so that all ranks find the same bits. A sample with a NaN lets only NaN and Inf through.
        mean = sum(everybody.flatten().tolist()) / world_size
        lift = 1.0 if self.state.settled else self.recipe.lift
        return mean * lift if math.isfinite(mean) else math.inf

    def _select(
        self, acc: Accumulator, threshold: float, bounds: Sequence[int], partition: int, step: int
    ) -> tuple[Selection, bool]:
        """Exclusive selection in ``partition``, and whether all of this rank is finite.

        The pass goes over the whole vector, as it must to add, and so meets every NaN and Inf.
        """
        start, stop = bounds[partition], bounds[partition + 1]
        passed = acc.at_least(threshold)
        finite = not kernels.has_non_finite(passed.values)
        low, high = offsets(passed.indices, (start, stop))
        own = passed.slice(low, high)
        if self.recipe.parity and own.found == 0 and start < stop:  # nobody sends nothing
            forced = torch.tensor([start + step % (stop - start)], dtype=torch.int32, device=acc.device)
            own = Selection.of(forced, acc.dense()[forced.long()])
        return own, finite

    def _all_gather(
        self, own: torch.Tensor, kept: list[int], bounds: Sequence[int], step: int, rank: int, world_size: int
    ) -> Pattern[torch.Tensor]:
        """The union: disjoint by construction, ascending because it is put into partition order."""
        blocks = yield from bruck_all_gather(own, kept, rank, world_size, phase="indices")
        owners = [(partition - step) % world_size for partition in range(world_size)]
        for partition, owner in enumerate(owners):
            wire.check_indices(blocks[owner], bounds[partition], bounds[partition + 1])
        return torch.cat([blocks[owner] for owner in owners])

    def _rebalanced(
        self, state: ExDynaState, layout: Layout, found: list[int], device: torch.device
    ) -> tuple[int, ...]:
        """Dynamic partition allocation, from counts by rank; all ranks compute the same."""
        rule = self.recipe.chosen("rebalance")
        if rule == "off" or state.world_size == 1:
            return state.blocks

        def integers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        blocks = integers(state.blocks)
        kernels.rebalance(
            blocks,
            torch.empty_like(blocks),
            integers(found),
            integers([state.step]),
            integers([0, 0]),
            rank=0,
            block=layout.block,
            numel=self.numel,
            min_blocks=layout.least,
            rule=rule,
            max_step=_FAST_MOVE if max(found) * state.world_size > _FAST_FROM * sum(found) else 1,
        )
        return tuple(blocks.tolist())

    def _scaled(self, threshold: float, found: int) -> float:
        """Online threshold scaling, from how many passed in all."""
        ratio = found / self.k
        rule = self.recipe.chosen("threshold_rule")
        if rule == "off" or threshold == 0:
            return threshold
        far = abs(found - self.k) > _NOISE * math.sqrt(self.k) and not 1 / _LOST <= ratio <= _LOST
        if far and not self.recipe.parity:
            return 0.0  # hundreds of steps away: find it anew
        if rule == "prop":
            gain = min(max(5 * self.recipe.density, 1e-3), _LARGEST_CHANGE)
            # With few entries the logarithm of the count is not the logarithm of its mean.
            error = math.log(max(found, 1) / self.k) if self.k >= _MANY else ratio - 1
            change = gain * error
            factor = math.exp(min(max(change, -_LARGEST_CHANGE), _LARGEST_CHANGE))
        elif ratio > _DENSE:
            factor = _RAISE
        elif ratio <= _SPARSE:
            factor = _LOWER
        else:
            # In the authors' code the second branch cannot be reached.
            factor = _RAISE_FINE if ratio > 1 or rule == "ref" else _LOWER_FINE
        return min(max(threshold * factor, _TINY), 1 / _TINY)

    @property
    def capacity(self) -> int:
        """How many entries are delivered at most."""
        room = self.recipe.capacity * self.k
        return self.numel if self.recipe.parity or math.isinf(room) else min(self.numel, math.ceil(room))

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: as much as may be delivered, all of it from one worker."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        layout = self.layout(world_size)
        bounds = self.bounds(layout, self._state_for(world_size, layout).blocks)
        largest = max(stop - start for start, stop in itertools.pairwise(bounds))
        forecast = self._forecast(world_size, min(self.capacity, largest), self.capacity)
        if self._state_for(world_size, layout).threshold:
            return forecast
        return Forecast({"start": both(cost.all_gather(1, 8, world_size)), **forecast.phases})

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: k entries, as many from every worker; 3k(P-1)/P words."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        return self._forecast(world_size, -(-self.k // world_size), self.k)

    def _forecast(self, world_size: int, own: int, total: int) -> Forecast:
        rounds, leaving = cost.log2(world_size), (world_size - 1) * own
        return Forecast(
            {
                "counts": both(cost.all_gather(3, 8, world_size)),
                "indices": Flow(cost.messages(rounds, leaving), cost.messages(rounds, min(leaving, total))),
                "values": both(cost.all_reduce(total, cost.WORD, world_size)),
            }
        )


def tight_block(numel: int, world_size: int, blocks: int) -> int:
    """Elements per block so that no tail is left over and, while there are enough, no partition is empty."""
    for line in (_LINE if numel >= _LINE * world_size else 1, 1):
        wanted = min(max(blocks, 4 * world_size), max(world_size, numel // line))
        block = line * -(-numel // (line * wanted))
        if -(-numel // block) >= world_size:
            break
    return block


def _shares(total: int, parts: int) -> tuple[int, ...]:
    """``total`` in ``parts`` that differ by at most one, larger ones first."""
    share, extra = divmod(total, parts)
    return tuple(share + (part < extra) for part in range(parts))
