"""Ok-Topk: sparse all-reduce with near-optimal communication volume.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.

The vector is split into one region per rank. In phase 1 every rank sends its selected entries to the owners of
their regions, and each owner sums what it receives. In phase 2 the owners select the largest sums, balance them
across ranks and gather them on all ranks. Exact thresholds are computed periodically. The steps in between reuse
them, corrected by the observed counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, EntryRecipe, StaticRecipe, check, check_at_least
from tritoncomm.algorithms.ok_topk_rules import TRIGGERS, Figures, OkTopkState, Own, Rules, Triggers, agree_on_cuts
from tritoncomm.algorithms.ok_topk_traffic import Caps
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.collectives import checked_counts, dense_exchange
from tritoncomm.primitives.distributed_topk import largest_shares
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.fixed_exchange import step_of
from tritoncomm.primitives.region_cuts import propose_cuts, widest
from tritoncomm.primitives.region_sums import Count, OwnedSums
from tritoncomm.primitives.selection import entries_to_keep, smallest_key
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.meter import Ratio
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Entries

# With strict_volume, gathering unbalanced blocks must not cost more than balancing and then gathering them.
_STRICT_BALANCE_TRIGGER = 2.0
# With strict_volume, the room of an owner in the static form.
_STRICT_OWNER_SHARE = 1.5


@dataclass(frozen=True, kw_only=True)
class OkTopk(EntryRecipe, StaticRecipe):
    """Settings of Ok-Topk. The defaults are the paper's values where it gives one.

    * ``repartition_every``: tau, the period of space repartition in sparse steps (section "space repartition").
    * ``reevaluate_every``: tau', the period of threshold re-evaluation in sparse steps (section "threshold
      re-evaluation"). The first re-evaluations are at steps 0, 1, 2, 4, 8, ... because residuals, and therefore
      magnitudes, grow fastest at the start.
    * ``bucket_width``: number of messages in flight together in phase 1.

    Other steps do the same if :class:`~tritoncomm.algorithms.ok_topk_rules.Triggers` say so. A re-evaluation
    counts magnitudes to find the k largest sums. The paper gathers all sums instead, which grows with the world size.

    Extensions of the paper:

    * ``local_cap``, ``global_cap``: largest number of entries that a rank selects, and that a step delivers, in
      multiples of k.
    * ``correct_thresholds``: correct reused thresholds by the observed counts.
    * ``strict_volume``: guarantee at most 6k(P-1)/P words and O(P) on every step that reuses thresholds. The latter are
      counts, and what rounding k/P up to whole entries adds. Both caps become 1, and no pair of ranks exchanges more
      than k/P entries in phase 1.
    * ``static_room``: room of a message of the static form, in multiples of an even share of the caps. With
      ``strict_volume`` it is 1 in phase 1, and at most 1.5 in phase 2. Entries above it stay in the residual, and
      nothing is balanced. If more sums than the global cap arrive, all ranks keep the largest of them. Steps that
      re-evaluate thresholds first exchange counts, and have room for every entry.
    """

    name: ClassVar[str] = "oktopk"
    averages_when_dense: ClassVar[bool] = True
    repartition_every: int = 64
    reevaluate_every: int = 32
    bucket_width: int = 4
    local_cap: float = 1.0
    global_cap: float = 1.0
    correct_thresholds: bool = True
    strict_volume: bool = False
    static_room: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "repartition_every", "reevaluate_every", "bucket_width", whole=True)
        check_at_least(self, 1, "local_cap", "global_cap", "static_room")
        check(self, "local_cap", math.isfinite(self.local_cap), "must be a finite multiple of k")
        check(self, "global_cap", math.isfinite(self.global_cap), "must be a finite multiple of k")
        check(self, "static_room", math.isfinite(self.static_room), "must be a finite multiple of an even share")

    def build(self, numel: int, bounds: Bounds = ()) -> OkTopkAlgorithm:
        return OkTopkAlgorithm(self, numel)


class OkTopkAlgorithm(BudgetedAlgorithm):
    """Ok-Topk on one rank. :meth:`reduce` follows the paper from top to bottom."""

    state: OkTopkState

    def __init__(self, recipe: OkTopk, numel: int, triggers: Triggers = TRIGGERS) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.encoding = recipe.encoding
        self.carried_by = Carriers({"scatter": "split-and-reduce", "gather": "all-gather"}, recipe.bucket_width)
        self.k = entries_to_keep(numel, recipe.density)
        strict, trigger = recipe.strict_volume, triggers.balance
        self.local_cap = math.ceil(self.k * (1.0 if strict else recipe.local_cap))
        self.global_cap = math.ceil(self.k * (1.0 if strict else recipe.global_cap))
        self.balance_trigger = min(trigger, _STRICT_BALANCE_TRIGGER) if strict else trigger
        pair_share = owner_share = recipe.static_room if self.static else math.inf
        if strict:  # 2k and 3k words. The rest of 6k is for counts, figures and rounding up.
            pair_share, owner_share = 1.0, min(owner_share, _STRICT_OWNER_SHARE)
        self.caps = Caps(
            numel, self.k, self.encoding, self.local_cap, self.global_cap, pair_share, owner_share, self.balance_trigger
        )
        self.rules = Rules(numel, self.k, recipe.correct_thresholds, triggers, self.encoding)
        self.state = OkTopkState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        state = self._state_for(world_size)
        reevaluate, repartition = self._due(state)
        step = step_of(acc, self.encoding, rank, world_size, self.recipe.bucket_width)
        # L, the local selection: by threshold, or exactly on re-evaluation steps.
        exactly, threshold = reevaluate or state.local_threshold <= 0, self.rules.lowered(state.local_threshold)
        local = acc.top_k(self.k) if exactly else step.at_least(threshold, self.local_cap)
        step.check_gradient(local.values)
        selected, kth = kernels.count_entries(local), smallest_key(local, self.k)
        if world_size == 1:
            return (yield from self._alone(step, local, state, [selected, kth], exactly=exactly))

        # Phase 1 (sections "space repartition" and "split and reduce").
        if repartition:
            cuts = yield from agree_on_cuts(propose_cuts(local, world_size), self.numel)
            state = replace(state, cuts=cuts)
        room = None if reevaluate else self.caps.pair_room(world_size)
        lowered = 0.0 if reevaluate else self.rules.lowered(state.global_threshold)
        sums = yield from step.to_owners("split-and-reduce", local, state.cuts, room, lowered)

        # Phase 2: global selection, data balancing, all-gather.
        if reevaluate:
            chosen, rooms = yield from self._largest_sums(step, sums)
        else:
            chosen, rooms = yield from self._reaching_sums(step, sums, lowered, state.global_threshold)
        limit = self.k if reevaluate else self.global_cap
        gathered = yield from step.gather_regions(
            "all-gather", chosen, state.cuts, rooms, limit=limit, trigger=self.balance_trigger,
            figures=self._edge(step, chosen, reevaluate=reevaluate),
        )  # fmt: skip

        # Residual update: remove an entry if and only if this rank sent it and the global selection kept it.
        result = gathered.entries
        step.subtract(sums.sent, result)
        if self.encoding.rounds:
            acc.add(*step.rest(gathered))
        least = smallest_key(result, self.k) if gathered.least is None else gathered.least
        figures, numbers = yield from step.settle([kernels.count_entries(result), least, selected, kth])
        rows, own = [Figures(*row) for row in figures], Own(*numbers)
        acc.selected = own.selected
        loads = [row.load for row in rows]
        self.report = {
            **step.rounding(),
            "reevaluated": Ratio(reevaluate),
            "repartitioned": Ratio(repartition),
            "region_imbalance": Ratio(max(loads) * world_size / max(1, sum(loads))),
            "candidates": float(sum([row.candidates for row in rows])),
        }
        self.state = self.rules.after(state, rows, own, reevaluate=reevaluate, exactly=exactly, is_fixed=self.static)
        return step.vector(result)

    def _alone(
        self, step: Step, local: Entries, state: OkTopkState, figures: list[Count], *, exactly: bool
    ) -> Pattern[SparseVector]:
        """Return the result for a world size of 1, which is the local selection."""
        step.acc.clear(local.indices)
        _, (selected, kth) = yield from step.settle(figures)
        step.acc.selected = selected
        threshold = self.rules.local_after(state, selected, kth, exactly=exactly)
        self.state = replace(state, step=state.step + 1, local_threshold=threshold, force_reevaluate=False)
        self.report = {}
        return step.vector(local)

    def _state_for(self, world_size: int) -> OkTopkState:
        """Return the state for ``world_size``. A change of world size invalidates all thresholds and cuts."""
        if self.state.world_size == world_size:
            return self.state
        return replace(OkTopkState(), step=self.state.step, world_size=world_size)

    def _due(self, state: OkTopkState) -> tuple[bool, bool]:
        """Return whether this step re-evaluates thresholds, and whether it repartitions."""
        reevaluate = state.force_reevaluate or self.scheduled(state.step)
        repartition = state.force_repartition or state.step % self.recipe.repartition_every == 0
        return reevaluate, repartition

    def scheduled(self, step: int) -> bool:
        """Return True if ``step`` is 0, 1, 2, 4, 8, ... below tau', or a multiple of tau'."""
        period = self.recipe.reevaluate_every
        early = step < period and step & (step - 1) == 0
        return early or step % period == 0

    def _reaching_sums(
        self, step: Step, sums: OwnedSums, lowered: float, threshold: float
    ) -> Pattern[tuple[Entries, list[int]]]:
        """Global selection with a reused ``threshold``: the sums of this rank that go into phase 2, and all rooms."""
        figures = [sums.count(lowered), sums.load, sums.count(threshold)]
        rooms = yield from step.rooms("sizes", figures, self.caps.owner_room(step.world_size), self.global_cap)
        return sums.largest(rooms[step.rank]), rooms

    def _largest_sums(self, step: Step, sums: OwnedSums) -> Pattern[tuple[Entries, list[int]]]:
        """Global selection in a re-evaluation: exactly the k largest sums of all ranks, which histograms find."""
        wanted = sums.count(0.0)
        rooms = yield from step.rooms("sizes", [wanted, sums.load, wanted], None, self.numel)
        found = sums.largest(min(self.k, max(1, *rooms)))
        if sum(rooms) > self.k:
            rooms = checked_counts("shares", (yield from largest_shares(found, self.k)), self.k)
            found = step.largest(found, rooms[step.rank], max(1, *rooms))
        return found, rooms

    def _edge(self, step: Step, chosen: Entries, *, reevaluate: bool) -> list[Count]:
        """Return ``edge`` of :class:`Figures`, if it is needed: thresholds must not be learnt from rounded values."""
        if not (self.static and self.encoding.rounds):
            return []
        k = self.k if reevaluate else math.ceil(self.k / step.world_size)
        return [smallest_key(chosen, k)]

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: everything except the local threshold, which differs between ranks."""
        return {field: value for field, value in self.state_dict().items() if field != "local_threshold"}

    def invalidate_thresholds(self) -> None:
        """See :meth:`Algorithm.invalidate_thresholds`: the next step re-evaluates them."""
        self.state = replace(self.state, local_threshold=0.0, force_reevaluate=True)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: the most that the caps of the next step allow, or an even step."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if world_size == 1:
            return Forecast({})
        if ordinary and self.is_static:
            return self.caps.fixed(world_size, -(-self.numel // world_size))
        if ordinary:
            return self.caps.even(world_size)
        state = self._state_for(world_size)
        reevaluate, repartition = self._due(state)
        width = widest(state.cuts) if state.cuts and not repartition else None  # None before the cuts are computed
        kinds = {"reevaluate": reevaluate, "repartition": repartition}
        if self.is_static:
            return self.caps.fixed(world_size, None if reevaluate else width, **kinds)
        return self.caps.most(world_size, width or self.numel, **kinds)
