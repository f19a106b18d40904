"""Ok-Topk: sparse all-reduce with near-optimal communication volume.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.

The vector is split into one region per rank. In phase 1 every rank sends its selected entries to the owners of
their regions, and each owner sums what it receives. In phase 2 the owners select the largest sums, balance them
across ranks and gather them on all ranks. Exact thresholds are computed periodically. The steps in between reuse
them, corrected by the observed counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, EntryRecipe, StaticRecipe, check, check_at_least
from tritoncomm.algorithms.ok_topk_static import OkTopkStaticStep, StaticForm
from tritoncomm.algorithms.ok_topk_thresholds import TRIGGERS, OkTopkState, Rules, Triggers, agree_on_cuts
from tritoncomm.algorithms.ok_topk_traffic import Caps
from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives import collectives
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.distributed_topk import largest_shares
from tritoncomm.primitives.region_cuts import offsets, propose_cuts, trimmed_sizes, widest
from tritoncomm.primitives.region_sums import RegionSums
from tritoncomm.primitives.selection import before_rounding, entries_to_keep, largest_parts, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.ranks import named
from tritoncomm.scheduler.rounds import Inbox, Pattern
from tritoncomm_kernels import Selection

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

    Other steps do the same if :class:`~tritoncomm.algorithms.ok_topk_thresholds.Triggers` say so. A re-evaluation
    counts magnitudes to find the k largest sums. The paper gathers all sums instead, which grows with the world size.

    Extensions of the paper:

    * ``local_cap``, ``global_cap``: largest number of entries that a rank selects, and that a step delivers, in
      multiples of k.
    * ``correct_thresholds``: correct reused thresholds by the observed counts.
    * ``strict_volume``: guarantee at most 6k(P-1)/P words on every step that reuses thresholds. Both caps become 1,
      and no pair of ranks exchanges more than k/P entries in phase 1.
    * ``static_room``: room of a message of the static form, in multiples of an even share of the caps. With
      ``strict_volume`` it is 1 in phase 1, and at most 1.5 in phase 2. See
      :mod:`tritoncomm.algorithms.ok_topk_static`.
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

    @property
    def static_shares(self) -> tuple[float, float]:
        """The room of messages of the static form, in multiples of an even share: in phase 1, and in phase 2."""
        if self.strict_volume:  # 2k and 3k words. The rest of 6k is for counts, figures and rounding up.
            return 1.0, min(self.static_room, _STRICT_OWNER_SHARE)
        return self.static_room, self.static_room

    def build(self, numel: int, bounds: Bounds = ()) -> OkTopkAlgorithm:
        return OkTopkAlgorithm(self, numel)


@dataclass(frozen=True)
class _Sizes:
    """Result of the size exchange.

    ``candidates`` and ``loads`` count, per owner, its candidates for the result and its entries in phase 1.
    ``reaching`` is the total number of sums that reach the global threshold itself, not the lowered one.
    """

    candidates: list[int]
    loads: list[int]
    reaching: int


@dataclass(frozen=True)
class _Delivered:
    """Outcome of phase 2: the mean, and the threshold state for the next step.

    ``rest`` is the part of the sums that rounding has cut off on this rank.
    """

    mean: Selection
    threshold: float
    force_reevaluate: bool
    rest: Selection | None = None


class OkTopkAlgorithm(BudgetedAlgorithm):
    """Ok-Topk on one rank. :meth:`reduce` follows the paper from top to bottom."""

    state: OkTopkState

    def __init__(self, recipe: OkTopk, numel: int, triggers: Triggers = TRIGGERS) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.encoding = recipe.encoding
        self.k = entries_to_keep(numel, recipe.density)
        strict, trigger = recipe.strict_volume, triggers.balance
        self.local_cap = math.ceil(self.k * (1.0 if strict else recipe.local_cap))
        self.global_cap = math.ceil(self.k * (1.0 if strict else recipe.global_cap))
        self.balance_trigger = min(trigger, _STRICT_BALANCE_TRIGGER) if strict else trigger
        self.caps = Caps(numel, self.k, self.encoding, self.local_cap, self.global_cap, strict, self.balance_trigger)
        self.rules = Rules(numel, self.k, recipe.correct_thresholds, triggers, self.encoding.is_coarse)
        self.static_form = StaticForm(self.rules, self.encoding, self.local_cap, self.global_cap, *recipe.static_shares)
        self.state = OkTopkState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from collectives.dense_exchange(acc, world_size))
        state = self._state_for(world_size)
        reevaluate, repartition = self._due(state)
        if acc.verdict is not None:
            step = OkTopkStaticStep(
                self.static_form, acc, acc.verdict, self.workspace, state, rank, reevaluate, repartition
            )
            mean, self.state, self.report = yield from step.run()
            return mean

        # Local selection by threshold, or exactly on re-evaluation steps.
        local, local_threshold = self._select_local(acc, state, reevaluate)
        finite = not kernels.has_non_finite(local.values)
        if world_size == 1:
            return self._alone(acc, local, local_threshold, finite)
        # Phase 1 (sections "space repartition" and "split and reduce").
        cuts = state.cuts
        if repartition:
            cuts = yield from agree_on_cuts(propose_cuts(local.indices, world_size), self.numel)
        if self.recipe.strict_volume and not reevaluate:
            # Each pair of ranks exchanges at most k/P entries. Entries above the limit stay in the residual.
            limits = [math.ceil(self.k / world_size) if p != rank else self.k for p in range(world_size)]
            local = largest_parts(local, offsets(local.indices, cuts), limits, workspace=self.workspace)
        region, received, sent = yield from self._split_and_reduce(local, cuts, finite, rank, world_size)

        # Phase 2: global selection, data balancing, all-gather.
        floor = 0.0 if reevaluate else self.rules.lowered(state.global_threshold)
        candidates = self._candidates(region, floor, cuts, rank)
        shared = yield from self._share_sizes(candidates, received, state.global_threshold, world_size)
        if reevaluate:
            delivered = yield from self._global_top_k(candidates, shared, cuts, state, rank)
        else:
            delivered = yield from self._balance_and_gather(candidates, shared, cuts, state, rank)

        # Residual update: remove an entry if and only if this rank sent it and the global selection kept it.
        kept = kernels.common_positions(sent.indices, delivered.mean.indices)
        acc.subtract(Selection.of(sent.indices[kept], sent.values[kept]), rounded=self.encoding.rounds)
        if delivered.rest is not None:
            acc.add(delivered.rest.indices, delivered.rest.values)
        loads = shared.loads
        rounding = rounding_figures(local, sent) if self.encoding.rounds else {}
        self.report = {
            **rounding,
            "reevaluated": float(reevaluate),
            "repartitioned": float(repartition),
            "region_imbalance": max(loads) * world_size / max(1, sum(loads)),
            "candidates": float(sum(shared.candidates)),
        }
        self.state = replace(
            state,
            step=state.step + 1,
            local_threshold=local_threshold,
            global_threshold=delivered.threshold,
            cuts=cuts,
            force_reevaluate=delivered.force_reevaluate,
            force_repartition=self.rules.skewed(loads),
        )
        return SparseVector(delivered.mean.indices, delivered.mean.values, self.numel)

    def _alone(self, acc: Accumulator, local: Selection, threshold: float, finite: bool) -> SparseVector:
        """Return the result for a world size of 1, which is the local selection."""
        if not finite:
            (alone,) = named([0])
            raise NonFiniteError(f"rank {alone} holds a NaN or Inf gradient; nothing was applied", [alone])
        acc.clear(local.indices)
        state = self._state_for(1)
        self.state = replace(state, step=state.step + 1, local_threshold=threshold, force_reevaluate=False)
        return SparseVector(local.indices, local.values, self.numel)

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

    def _select_local(self, acc: Accumulator, state: OkTopkState, reevaluate: bool) -> tuple[Selection, float]:
        """Return L, this rank's selection, and the local threshold for the next step (0 if invalid)."""
        if reevaluate or state.local_threshold <= 0:
            local = acc.top_k(self.k)
            enough = local.found == self.k
            return local, kernels.smallest_magnitude(local.values) if enough else 0.0
        threshold = self.rules.lowered(state.local_threshold)
        local = acc.at_least(threshold)
        kept = kernels.largest(local, self.local_cap, workspace=self.workspace)  # at least k, if as many have passed
        return kept, self._corrected(threshold, kept, local.found)

    def _corrected(self, threshold: float, passed: Selection, count: int) -> float:
        """Return the threshold for the next step. With ``correct_thresholds``, k entries would have reached it."""
        kth = 0.0
        if self.recipe.correct_thresholds and count >= self.k and passed.found:
            kth = kernels.smallest_magnitude(kernels.largest(passed, self.k, workspace=self.workspace).values)
        return self.rules.following(threshold, count, kth)

    def _split_and_reduce(
        self, local: Selection, cuts: Sequence[int], finite: bool, rank: int, world_size: int
    ) -> Pattern[tuple[RegionSums, int, Selection]]:
        """Phase 1, split and reduce: the sums of this rank's region.

        Also returns the number of entries in them, and the entries of this rank in all sums, with the values that it
        sent. Entries are added in rotation order, rank r, r-1, r-2, ..., regardless of the order of arrival.
        """
        low, high, encoding = cuts[rank], cuts[rank + 1], self.encoding
        parts = [local.slice(start, stop) for start, stop in itertools.pairwise(offsets(local.indices, cuts))]
        sections = [encoding.section(cuts[p], cuts[p + 1], part.found) for p, part in enumerate(parts)]
        if encoding.rounds:  # this rank's own region is not sent, and not rounded
            parts = [part if p == rank else sections[p].sendable(part) for p, part in enumerate(parts)]
            sections = [encoding.section(cuts[p], cuts[p + 1], part.found) for p, part in enumerate(parts)]
        counts = [part.found for part in parts]
        incoming = yield from collectives.share_counts(counts, finite, local.indices.device, limit=high - low)
        arriving = {p: encoding.section(low, high, count) for p, count in enumerate(incoming) if p != rank}
        region = RegionSums(low, high, sum(incoming), local.values.device, self.workspace)

        def add(arrived: Inbox) -> None:
            found = [arriving[source].decode(message) for source, message in arrived.items()]
            region.add(Selection.join(found), [part.found for part in found])

        region.add(parts[rank], [counts[rank]])
        packed = [section.encode(part.indices, part.values) for section, part in zip(sections, parts, strict=True)]
        sent = Selection.join([parts[p] if p == rank else delivered for p, (_, delivered) in enumerate(packed)])
        sends = {p: message for p, (message, _) in enumerate(packed) if p != rank}
        receives = {p: section.words for p, section in arriving.items()}
        width = self.recipe.bucket_width
        yield from collectives.rotate(sends, receives, add, rank, world_size, width=width, phase="split-and-reduce")
        return region, sum(incoming), sent

    def _candidates(self, region: RegionSums, threshold: float, cuts: Sequence[int], rank: int) -> Selection:
        """Return the reduced non-zeros of this rank's region that reach ``threshold``, with global indices.

        If values are rounded, only those that a message can hold together are candidates.
        """
        low, high = cuts[rank], cuts[rank + 1]
        found = region.at_least(threshold)
        return self.encoding.section(low, high, found.found, divisor=len(cuts) - 1).sendable(found)

    def _share_sizes(self, candidates: Selection, received: int, threshold: float, world_size: int) -> Pattern[_Sizes]:
        """Size exchange: gather every owner's counts. Raise ``NonFiniteError`` on all ranks if a sum overflows."""
        finite = not kernels.has_non_finite(candidates.values)
        if self.encoding.rounds and candidates.found:  # what rounding cuts off must not overflow in the residual
            finite = finite and float(candidates.values.abs().max()) < collectives.LARGEST_ROUNDED
        reaching = kernels.magnitude_keys(candidates.values) >= kernels.threshold_key(threshold)
        row = [candidates.found, received, int(reaching.sum())]
        sizes, loads, reached = yield from collectives.share_rows(
            row,
            finite,
            world_size,
            candidates.values.device,
            phase="sizes",
            limit=self.numel,
            reason=collectives.OVERFLOW,
        )
        return _Sizes(sizes, loads, sum(reached))

    def _global_top_k(
        self, candidates: Selection, shared: _Sizes, cuts: Sequence[int], state: OkTopkState, rank: int
    ) -> Pattern[_Delivered]:
        """Phase 2 of a re-evaluation step: deliver exactly the k largest sums, which histograms find."""
        shares = shared.candidates
        if sum(shares) > self.k:
            shares = yield from largest_shares(candidates, self.k)
        gathered = yield from self._even_out_and_gather(candidates, shares, cuts, rank, state.world_size)
        entries = gathered.entries
        if gathered.least is None:
            # Without any sum there is no new threshold. Keep the old one and re-evaluate at the next step.
            threshold = kernels.smallest_magnitude(entries.values) or state.global_threshold
            mean = entries._replace(values=entries.values / state.world_size)
            return _Delivered(mean, threshold, entries.found == 0)
        threshold = gathered.least if entries.found else state.global_threshold
        return _Delivered(entries, threshold, entries.found == 0, self._rest(gathered.own, gathered.sent))

    def _rest(self, sums: Selection, sent: Selection) -> Selection:
        """Return what rounding has cut off from the ``sent`` entries of ``sums``."""
        return sent._replace(values=before_rounding(sums, sent) - sent.values)

    def _balance_and_gather(
        self, candidates: Selection, shared: _Sizes, cuts: Sequence[int], state: OkTopkState, rank: int
    ) -> Pattern[_Delivered]:
        """Phase 2 of a reuse step: trim to the global cap, balance if the trigger is exceeded, and gather."""
        wanted = sum(shared.candidates)
        sizes = trimmed_sizes(shared.candidates, self.global_cap)
        gathered = yield from self._even_out_and_gather(candidates, sizes, cuts, rank, state.world_size)
        drifted = self.rules.drifted(shared.reaching)
        before, entries = self.rules.lowered(state.global_threshold), gathered.entries
        if gathered.least is None:
            threshold = self._corrected(before, entries, wanted)
            return _Delivered(entries._replace(values=entries.values / state.world_size), threshold, drifted)
        threshold = self.rules.following(before, wanted, gathered.least if entries.found == self.k else 0.0)
        return _Delivered(entries, threshold, drifted, self._rest(gathered.own, gathered.sent))

    def _even_out_and_gather(
        self, candidates: Selection, sizes: list[int], cuts: Sequence[int], rank: int, world_size: int
    ) -> Pattern[collectives.Gathered]:
        """Gather the ``sizes[r]`` largest candidates of every rank r, balanced first if the trigger is exceeded."""
        if not 0 <= sizes[rank] <= candidates.found or min(sizes) < 0 or sum(sizes) > self.numel:
            (own,) = named([rank])
            raise ProtocolMismatchError(
                f"phase 'all-gather': received sizes {sizes}, but rank {own} has {candidates.found} candidates"
            )
        block = kernels.largest(candidates, sizes[rank], workspace=self.workspace)
        divisor = world_size if self.encoding.rounds else 1
        regions = collectives.Regions(cuts, sizes, self.encoding, divisor)
        return collectives.gather_regions(
            block, regions, rank, world_size,
            trigger=self.balance_trigger, width=self.recipe.bucket_width, phase="all-gather",
        )  # fmt: skip

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
            return self.static_form.forecast(world_size, -(-self.numel // world_size))
        if ordinary:
            return self.caps.even(world_size)
        state = self._state_for(world_size)
        reevaluate, repartition = self._due(state)
        width = widest(state.cuts) if state.cuts and not repartition else None  # None before the cuts are computed
        kinds = {"reevaluate": reevaluate, "repartition": repartition}
        if self.is_static:
            span = None if reevaluate else width
            return self.static_form.forecast(world_size, span, **kinds)
        return self.caps.most(world_size, width or self.numel, **kinds)
