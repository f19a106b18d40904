"""ExDyna: each rank selects in its own partition of the vector, with one global threshold that is scaled online.

D. Yoon, S. Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024.

Partitions are disjoint. Selections therefore never overlap, and the volume does not grow with the world size.
Partitions rotate among the ranks, and their borders move to balance the number of selected entries. With fixed
partitions the method is MiCRO (same authors, HiPC 2023).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, IndexRecipe, StaticRecipe, check, check_at_least
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.collectives import checked_counts, dense_exchange, mean_over_ranks
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.fixed_exchange import step_of
from tritoncomm.primitives.region_cuts import balanced_sizes, widest
from tritoncomm.primitives.region_sums import Count
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Forecast, both
from tritoncomm.scheduler.meter import Ratio
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm_kernels import Entries
from tritoncomm_kernels.memory import copied_to
from tritoncomm_kernels.rebalance import MAX_PARTITIONS

_LINE = 32  # fp32 values in 128 bytes; blocks are multiples of it, except in short vectors
_TINY = 1e-30
# The first threshold is estimated from every 17th magnitude, or from more of them if that gives fewer than 4096.
# The stride is odd, so it is no multiple of an even matrix width and does not sample the same columns in every row.
_SAMPLE_STRIDE, _SAMPLE_LEAST = 17, 4096
# Borders move by up to 16 blocks per step while the busiest rank has more than 1.5 times its share. Below that, large
# moves would only cause jitter.
_FAST_FROM, _FAST_MOVE = 1.5, 16
# From the paper's code: a count above 1.1 k raises the threshold by 0.5 %, and a count of at most 0.909 k lowers it by
# 0.5 %. Between them it rises by 0.125 %.
_MANY_PASS, _FEW_PASS = 1.1, 0.909
_RAISE, _RAISE_FINE, _LOWER = 1.005, 1.00125, 0.995
_LARGEST_CHANGE = 0.05
# In robust mode the threshold is estimated again if the count differs from k by more than a factor of 8, and by more
# than 3 sqrt(k). Scaling it online would take longer. With a k of at most 9, which an empty step does not differ from
# by that much, all empty steps in a row count as one.
_RESTART, _NOISE = 8.0, 3.0
_MANY = 16  # smallest k for which the logarithm of a count is close to the logarithm of its mean


@dataclass(frozen=True, kw_only=True)
class ExDyna(IndexRecipe, StaticRecipe):
    """Settings of ExDyna.

    * ``mode``: ``"paper"`` reproduces the authors' code bit for bit. Block sizes are multiples of 32 elements, and
      the last partition also holds the remaining elements. A border moves by one block per step. The threshold starts
      at 1 / (2 sqrt k) and changes by fixed factors. Every rank sends at least one index. ``"robust"`` keeps the
      method and replaces the parts that fail outside the paper's setting.
    * ``rebalance``: ``"paper"``, ``"prefix"`` or ``"off"``. ``"off"`` is MiCRO, with partitions of equal size.
    * ``threshold_rule``: ``"ref"`` is the rule of the authors' code. ``"prop"`` changes the threshold in proportion to
      the error of the count, with a smaller gain at lower density. ``"off"`` keeps the threshold constant.
    * ``blocks``: number of blocks that the vector is split into.
    * ``min_blocks``: smallest number of blocks of a partition. The paper's layout uses a quarter of an equal share.

    The default ``"auto"`` of ``rebalance`` and ``threshold_rule`` means ``"paper"`` and ``"ref"`` in paper mode, and
    ``"prefix"`` and ``"prop"`` in robust mode. Blocks of the robust mode cover the vector without a rest. So do those
    of the paper mode below ``32 * blocks`` elements, where the paper's blocks would be empty.

    In robust mode only:

    * ``lift``: the first threshold is a quantile of the accumulators times ``lift``, because residuals grow until
      they are sent. If eight times too many or too few entries pass, the threshold is estimated again, without
      ``lift``.
    * ``capacity``: at most ``capacity`` times k entries are delivered. Each rank keeps its largest ones. In the static
      form every rank has room for ``capacity`` times k/P entries, rounded up, and sends its largest ones.

    Only robust mode has the static form. Steps that estimate the threshold wait for a GPU more often than others.
    """

    name: ClassVar[str] = "exdyna"
    averages_when_dense: ClassVar[bool] = True
    mode: str = "robust"
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
            ("rebalance", ("auto", "paper", "prefix", "off")),
            ("threshold_rule", ("auto", "ref", "prop", "off")),
        ):
            check(self, field, getattr(self, field) in choices, f"must be one of {', '.join(choices)}")
        check_at_least(self, 1, "blocks", "min_blocks", whole=True)
        check_at_least(self, 1, "capacity", "lift")
        check(self, "lift", math.isfinite(self.lift), "must be a finite multiple of the quantile")

    def build(self, numel: int, bounds: Bounds = ()) -> ExDynaAlgorithm:
        return ExDynaAlgorithm(self, numel)

    def check_world_size(self, world_size: int) -> None:
        """See :meth:`Recipe.check_world_size`: the rebalancing kernel has one lane per partition."""
        if world_size > MAX_PARTITIONS and self.chosen("rebalance") != "off":
            raise ConfigurationError(
                f"world_size={world_size}: rebalancing supports at most {MAX_PARTITIONS}, choose rebalance='off'"
            )

    def can_be_static(self) -> bool:
        """See :meth:`StaticRecipe.can_be_static`: the authors' code has no limit on the entries of a rank."""
        return not self.parity

    @property
    def parity(self) -> bool:
        """True if the authors' code is reproduced exactly."""
        return self.mode == "paper"

    def chosen(self, field: str) -> str:
        """Return the value of ``field``, with ``"auto"`` resolved by the mode."""
        by_mode = {"rebalance": ("prefix", "paper"), "threshold_rule": ("prop", "ref")}
        value: str = getattr(self, field)
        return by_mode[field][self.parity] if value == "auto" else value


@dataclass(frozen=True, kw_only=True)
class MiCRO(ExDyna):
    """MiCRO: ExDyna with partitions of equal size that never move (HiPC 2023)."""

    name: ClassVar[str] = "micro"
    rebalance: str = "off"


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of the vector, int32, on one device. Nothing writes them after they were computed.

    ``blocks`` (``[P]``) is the number of blocks of each. ``bounds`` (``[P + 1]``) holds their first elements, and the
    end of the last one.
    """

    blocks: torch.Tensor
    bounds: torch.Tensor


@dataclass(frozen=True)
class ExDynaState:
    """State carried to the next step. It is the same on all ranks, because it depends on shared counts only.

    A ``threshold`` of 0 must be estimated before use. ``settled`` is True once a positive threshold was in use.
    ``empty`` is the number of last steps in which nothing passed, although there was something. ``blocks`` is the
    number of blocks of each partition at the next step. In the static form on a GPU, only the GPU knows it.
    """

    step: int = 0
    world_size: int = 0
    threshold: float = 0.0
    settled: bool = False
    empty: int = 0
    blocks: tuple[int, ...] | Partitions = ()


class Layout(NamedTuple):
    """Elements per block, initial blocks per partition, and the smallest number of blocks of a partition."""

    block: int
    blocks: tuple[int, ...]
    least: int


class ExDynaAlgorithm(BudgetedAlgorithm):
    """ExDyna on one rank. :meth:`reduce` follows the paper from top to bottom."""

    state: ExDynaState
    carried_by = Carriers({"gather": "indices"})

    def __init__(self, recipe: ExDyna, numel: int) -> None:
        super().__init__(numel)
        self.encoding = recipe.encoding
        self.recipe, self.static = recipe, recipe.static is True
        self.k = entries_to_keep(numel, recipe.density)
        self.state = ExDynaState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        # Block-based gradient vector partitioning.
        layout = self.layout(world_size)
        state = self._state_for(world_size, layout)
        threshold = state.threshold or (yield from self._first_threshold(acc, world_size))
        partitions = self._partitions(state, layout, torch.device("cpu") if acc.verdict is None else acc.device)
        mean, passed, has_any = yield from self._exchange(
            acc, threshold, partitions.bounds, state.step, rank, world_size
        )
        total = sum(passed)
        imbalance = max(passed) * world_size / total if total else 1.0
        self.report = {"threshold": Ratio(threshold), "passed": float(total), "imbalance": Ratio(imbalance)}
        # Online threshold scaling and dynamic partition allocation, for the next step.
        if has_any:
            empty = 0 if total else state.empty + 1
            scaled = self._scaled(threshold, total, max(1, empty))
            state = replace(state, threshold=scaled, empty=empty if scaled else 0)
        else:
            state = replace(state, threshold=threshold)
        counts = torch.tensor(passed, dtype=torch.int32, device="cpu")
        if acc.verdict is not None:  # they are where the partitions are
            counts = acc.verdict.figures[:, 0].contiguous()
        self.state = replace(
            state,
            step=state.step + 1,
            settled=state.settled or threshold > 0,
            blocks=self._rebalanced(partitions, layout, counts, state.step, imbalance),
        )
        return mean

    def _exchange(
        self, acc: Accumulator, threshold: float, bounds: torch.Tensor, number: int, rank: int, world_size: int
    ) -> Pattern[tuple[SparseVector, list[int], bool]]:
        """Select, exchange, and remove what is delivered in step ``number``.

        Returns the mean, per rank how many entries passed the threshold, and whether there is any non-zero. ``bounds``
        are those of the partitions, int32 ``[P + 1]``. Borders move, so messages with fixed room have the span of the
        whole vector.
        """
        step = step_of(acc, self.encoding, rank, world_size)
        # Partition-wise exclusive gradient selection. The partitions rotate among the ranks.
        partitions = [(number + owner) % world_size for owner in range(world_size)]
        place, ranges = partitions[rank], [(0, self.numel)] * world_size
        if acc.verdict is None:
            cuts = bounds.tolist()
            ranges = [(cuts[partition], cuts[partition + 1]) for partition in partitions]
            own, figures = self._select(step, threshold, *ranges[rank], number)
        else:
            own, figures = self._select_padded(step, threshold, bounds[place : place + 2])
        rooms = yield from step.rooms("counts", figures, self._room(world_size), self.capacity)
        order = [(partition - number) % world_size for partition in range(world_size)]
        own = step.largest(own, rooms[rank], max(rooms))
        union = (yield from step.gather_parts("indices", own, ranges, rooms, order, None)).entries
        sums = acc.values_at(union.indices)
        if world_size > 1 and union.room:
            sums = yield AllReduce("values", sums)
        acc.clear(union.indices)  # every rank contributed its value at every selected index
        step.check_sums(sums)
        rows, _ = yield from step.settle()
        passed, non_zero = (list(column) for column in zip(*rows, strict=True))
        checked_counts("counts", passed, self.numel)  # the next borders depend on them
        acc.selected = min(passed[rank], rooms[rank])
        return step.vector(union._replace(values=sums)), passed, any(non_zero)

    def _state_for(self, world_size: int, layout: Layout) -> ExDynaState:
        """Return the state for ``world_size``. A change of world size starts with equal partitions.

        The threshold stays valid, because it is compared with the values of a single rank.
        """
        state = self.state
        if state.world_size != world_size:
            state = replace(state, world_size=world_size, blocks=layout.blocks)
        if self.recipe.parity and state.threshold == 0:
            state = replace(state, threshold=1 / (2 * math.sqrt(self.k)))
        return state

    def layout(self, world_size: int) -> Layout:
        """Block-based partitioning: return the blocks, in contiguous partitions of equal numbers of blocks."""
        if self.recipe.rebalance == "off":
            return Layout(1, tuple(balanced_sizes(self.numel, world_size)), 0)
        blocks = self.recipe.blocks
        block = self.numel // blocks // _LINE * _LINE
        if self.recipe.parity and block:
            return Layout(block, tuple(balanced_sizes(blocks, world_size)), -(-blocks // (4 * world_size)))
        block = tight_block(self.numel, world_size, blocks)
        shares = balanced_sizes(-(-self.numel // block), world_size)
        return Layout(block, tuple(shares), self.recipe.min_blocks)

    def bounds(self, layout: Layout, blocks: Sequence[int]) -> list[int]:
        """Return the first element of each partition, and ``numel``, the end of the last partition."""
        starts = itertools.accumulate(blocks[:-1], initial=0)
        return [*(min(start * layout.block, self.numel) for start in starts), self.numel]

    def _first_threshold(self, acc: Accumulator, world_size: int) -> Pattern[float]:
        """Return the (1 - density) quantile of the sampled magnitudes, averaged over ranks, times ``lift``.

        ``lift`` applies to the first estimate only. The result is 0 while the samples have almost no non-zeros.
        """
        stride = max(1, min(_SAMPLE_STRIDE, self.numel // _SAMPLE_LEAST)) | 1
        sample = acc.dense()[::stride].contiguous()
        quantile = kernels.kth_magnitude(sample, entries_to_keep(sample.numel(), self.recipe.density))
        # If a quantile is NaN or Inf, only NaN and Inf pass.
        mean = yield from mean_over_ranks(quantile, world_size, acc.device, phase="start")
        return mean * (1.0 if self.state.settled else self.recipe.lift)

    def _select(self, step: Step, threshold: float, start: int, stop: int, number: int) -> tuple[Entries, list[Count]]:
        """Exclusive selection: return the entries from ``start`` up to ``stop`` that reach the threshold.

        Also returns the figures of this rank: how many they are, and whether the accumulator has a non-zero. The pass
        adds residual and gradient over the whole vector, so it finds every NaN and Inf.
        """
        acc = step.acc
        own, step.is_finite = acc.at_least_inside(threshold, start, stop)
        if self.recipe.parity and own.room == 0 and start < stop:  # every rank sends at least one index
            forced = torch.tensor([start + number % (stop - start)], dtype=torch.int32, device=acc.device)
            own = Entries(forced, acc.dense()[forced.long()])
        return own, [own.room, own.room > 0 or bool(acc.dense().any())]

    def _select_padded(self, step: Step, threshold: float, span: torch.Tensor) -> tuple[Entries, list[Count]]:
        """Return the largest entries inside ``span`` (int32 ``[2]``) that reach the threshold, as many as have room.

        Also returns the figures of :meth:`_select`. Entries without room stay in the residual. Nothing waits for a GPU.
        """
        acc, room = step.acc, self._room(step.world_size)
        values = acc.dense()
        extremes = torch.stack(torch.aminmax(values))  # one pass over the vector finds NaN, Inf and non-zeros
        step.check_gradient(extremes)
        budget = kernels.constant((room,), acc.device)
        largest = kernels.top_k_rows(values, span, budget, room).row(0)
        passed = kernels.count_inside(values, threshold, span)
        non_zero = (extremes != 0).any().to(torch.int32).reshape(1)
        return kernels.reaching(largest, threshold), [passed, non_zero]

    def _partitions(self, state: ExDynaState, layout: Layout, device: torch.device) -> Partitions:
        """Return the partitions of this step, as tensors on ``device``. Nothing waits for a GPU."""
        if isinstance(state.blocks, Partitions):
            return state.blocks
        content = state.blocks, self.bounds(layout, state.blocks)
        return Partitions(
            *(copied_to(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device) for numbers in content)
        )

    def _rebalanced(
        self, partitions: Partitions, layout: Layout, passed: torch.Tensor, step: int, imbalance: float
    ) -> tuple[int, ...] | Partitions:
        """Dynamic partition allocation: return the blocks per partition for the next step.

        ``passed`` holds the counts by rank, int32 ``[P]``, on the device of ``partitions``. All ranks compute the same
        result, and on a GPU it stays there.
        """
        rule = self.recipe.chosen("rebalance")
        if rule != "off" and passed.numel() > 1:
            partitions = Partitions(partitions.blocks.clone(), torch.empty_like(partitions.bounds))
            kernels.rebalance(
                partitions.blocks,
                partitions.bounds,
                passed,
                iteration=step,
                block=layout.block,
                numel=self.numel,
                min_blocks=layout.least,
                rule=rule,
                max_step=_FAST_MOVE if imbalance > _FAST_FROM else 1,
            )
        return tuple(partitions.blocks.tolist()) if passed.device.type == "cpu" else partitions

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers. If the blocks of the partitions are on a GPU, the host waits for them."""
        blocks = self.state.blocks
        numbers = tuple(blocks.blocks.tolist()) if isinstance(blocks, Partitions) else blocks
        return asdict(replace(self.state, blocks=numbers))

    def _scaled(self, threshold: float, found: int, steps: int = 1) -> float:
        """Online threshold scaling: return the next threshold after ``found`` entries passed in ``steps`` steps."""
        ratio, expected = found / self.k, self.k * steps
        rule = self.recipe.chosen("threshold_rule")
        if rule == "off" or threshold == 0:
            return threshold
        far = abs(found - expected) > _NOISE * math.sqrt(expected) and not 1 / _RESTART <= ratio <= _RESTART
        if far and not self.recipe.parity:
            return 0.0  # estimate it again, because scaling could take hundreds of steps
        if rule == "prop":
            gain = min(max(5 * self.recipe.density, 1e-3), _LARGEST_CHANGE)
            # With few entries the logarithm of a count differs from the logarithm of its mean.
            error = math.log(max(found, 1) / self.k) if self.k >= _MANY else ratio - 1
            change = gain * error
            factor = math.exp(min(max(change, -_LARGEST_CHANGE), _LARGEST_CHANGE))
        elif ratio > _MANY_PASS:
            factor = _RAISE
        elif ratio <= _FEW_PASS:
            factor = _LOWER
        else:
            factor = _RAISE_FINE  # the authors' code has a branch that lowers it, and cannot reach it
        return min(max(threshold * factor, _TINY), 1 / _TINY)

    @property
    def capacity(self) -> int:
        """Largest number of entries that a step delivers."""
        room = self.recipe.capacity * self.k
        return self.numel if self.recipe.parity else math.ceil(min(self.numel, room))

    def _room(self, world_size: int) -> int:
        """Return the room of a rank in the static form: its share of ``capacity`` times k entries."""
        return math.ceil(min(self.numel, self.recipe.capacity * self.k / world_size))

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: the largest number of entries, all selected by one rank.

        In an ordinary step, all ranks select the same number of k entries: 3k(P-1)/P words.
        """
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        layout = self.layout(world_size)
        if self.is_static:
            words = self.encoding.of_rows.words(self.numel, self._room(world_size))
            gathered = both(cost.all_gather(words, cost.WORD, world_size))
            union = min(world_size * self._room(world_size), self.numel)
            reduced = both(cost.all_reduce(union, cost.WORD, world_size))
            phases = {"indices": gathered, "values": reduced}
            forecast = with_verdict(Forecast(phases), world_size, figures=2, phase="indices")
        else:
            peers, rounds, delivered = world_size - 1, cost.log2(world_size), self.k if ordinary else self.capacity
            if ordinary:
                leaving = peers * self.encoding.words(-(-self.numel // world_size), -(-self.k // world_size))
                arriving = leaving
            else:
                state = self._state_for(world_size, layout)
                bounds = self._partitions(state, layout, torch.device("cpu")).bounds.tolist()
                leaving = peers * self.encoding.words_at_most(self.numel, min(delivered, widest(bounds)), 1)
                arriving = min(leaving, self.encoding.words_at_most(self.numel, delivered, world_size))
            phases = {
                "counts": both(cost.all_gather(3, 8, world_size)),
                "indices": Flow(cost.messages(rounds, leaving), cost.messages(rounds, arriving)),
                "values": both(cost.all_reduce(delivered, cost.WORD, world_size)),
            }
            forecast = Forecast(phases)
        if ordinary or self._state_for(world_size, layout).threshold:
            return forecast
        return Forecast({"start": both(cost.all_gather(1, 8, world_size)), **forecast.phases})


def tight_block(numel: int, world_size: int, blocks: int) -> int:
    """Return the elements per block for about ``blocks`` blocks that cover the vector without a tail.

    No partition is empty if there are at least ``world_size`` elements.
    """
    for line in (_LINE if numel >= _LINE * world_size else 1, 1):
        wanted = min(max(blocks, 4 * world_size), max(world_size, numel // line))
        block = line * -(-numel // (line * wanted))
        if -(-numel // block) >= world_size:
            break
    return block
