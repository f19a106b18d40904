"""Ok-Topk: sparse allreduce with near-optimal volume.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022. The
coordinate space is cut into one region per worker. Phase 1 sends every locally selected entry to the
owner of its region, which adds them up; phase 2 selects globally, evens out and gathers the result.
Exact thresholds are found every now and then and reused, corrected by the counts, in between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, check, check_at_least
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives import collectives, distributed_topk
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.distributed_topk import largest_shares
from tritoncomm.primitives.region_cuts import consensus_cuts, offsets, propose_cuts, trimmed_sizes
from tritoncomm.primitives.selection import entries_to_keep, following_threshold, largest_parts
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Flow, Forecast, Formula, both
from tritoncomm.scheduler.rounds import AllReduce, Inbox, Pattern
from tritoncomm_kernels import Selection

# Corrected thresholds are used a little low. What was delivered is gone from the residuals, so the k-th
# magnitude of one step lets almost nothing through at the next when gradients are small beside residuals;
# at 0.98 there are usually k entries or more, and then the k largest of them are known exactly.
# Re-evaluation looks at this share of the old threshold first, too: if k sums reach it, the k largest are
# among them and the other reduced non-zeros, often several k, need not travel.
WARM_START = 0.98
# With strict_volume an unbalanced all-gather must not cost more than balancing plus a balanced one.
_STRICT_BALANCE_TRIGGER = 2.0


@dataclass(frozen=True, kw_only=True)
class OkTopk(Recipe):
    """Settings of Ok-Topk; the defaults are the paper's where it names one.

    ``repartition_every`` is tau (section "space repartition") and ``reevaluate_every`` tau' (section
    "threshold re-evaluation"), both in sparse steps. Re-evaluation starts at steps 0, 1, 2, 4, 8, ...
    because residuals, and with them the magnitudes, grow fastest at the start.

    ``bucket_width`` messages are on the wire together in phase 1. ``balance_trigger``: even out when
    the largest block exceeds this multiple of the mean (1 always, inf never). ``skew_trigger``: cut
    anew when an owner receives more than this multiple of the mean. ``drift_low`` and ``drift_high``:
    re-evaluate when the global count leaves this window, in multiples of k.

    Beyond the paper: ``local_cap`` and ``global_cap`` limit, in multiples of k, what a worker selects
    and what is delivered; ``correct_thresholds`` lets reused thresholds follow the counts.
    ``strict_volume`` makes 6k(P-1)/P words an upper bound by construction on every step that reuses
    thresholds: both caps become 1 and no pair of workers exchanges more than k/P entries in phase 1.
    ``exact_select`` is how a re-evaluation finds the k largest sums: ``"gather"`` all reduced non-zeros,
    as the paper does, which grows with the workers; ``"histogram"`` by counts of magnitudes, which does not;
    ``"auto"`` whichever moves less. The result is the same. Density 1 travels dense unless ``force_sparse``.
    """

    name: ClassVar[str] = "oktopk"
    repartition_every: int = 64
    reevaluate_every: int = 32
    bucket_width: int = 4
    balance_trigger: float = 4.0
    skew_trigger: float = 2.0
    drift_low: float = 0.5
    drift_high: float = 2.0
    local_cap: float = 1.0
    global_cap: float = 1.0
    correct_thresholds: bool = True
    strict_volume: bool = False
    exact_select: str = "auto"
    force_sparse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "repartition_every", "reevaluate_every", "bucket_width", whole=True)
        check_at_least(self, 1, "balance_trigger", "skew_trigger", "local_cap", "global_cap")
        check_at_least(self, 0, "drift_low", "drift_high")
        known = self.exact_select in ("auto", "gather", "histogram")
        check(self, "exact_select", known, "choose auto, gather or histogram")
        check(self, "drift_high", self.drift_high > self.drift_low, "choose more than drift_low")
        check(self, "local_cap", math.isfinite(self.local_cap), "choose a finite multiple of k")
        check(self, "global_cap", math.isfinite(self.global_cap), "choose a finite multiple of k")

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`: from full overlap to disjoint supports."""
        words = entries_to_keep(numel, self.density) * (world_size - 1) / world_size
        return Formula(2 * world_size + 2 * cost.log2(world_size), 2 * words, 6 * words)

    def build(self, numel: int) -> OkTopkAlgorithm:
        """See :meth:`Recipe.build`."""
        return OkTopkAlgorithm(self, numel)


@dataclass(frozen=True)
class OkTopkState:
    """What is carried to the next step. A threshold of 0 is invalid: find it exactly before using it.

    ``global_threshold`` is compared with sums over workers, never with means.
    """

    step: int = 0
    world_size: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    cuts: tuple[int, ...] = ()
    force_reevaluate: bool = True
    force_repartition: bool = True


@dataclass(frozen=True)
class _Sizes:
    """By owner: candidates for the result, and load in phase 1; in all: sums reaching the threshold itself."""

    candidates: list[int]
    loads: list[int]
    reaching: int


@dataclass(frozen=True)
class _Delivered:
    """Outcome of phase 2: the support and sums of the result, and what the next step learns from it."""

    indices: torch.Tensor
    sums: torch.Tensor
    threshold: float
    force_reevaluate: bool


class OkTopkAlgorithm(Algorithm):
    """One rank's Ok-Topk. :meth:`reduce` is the paper from top to bottom."""

    state: OkTopkState

    def __init__(self, recipe: OkTopk, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.local_cap = math.ceil(self.k * (1.0 if recipe.strict_volume else recipe.local_cap))
        self.global_cap = math.ceil(self.k * (1.0 if recipe.strict_volume else recipe.global_cap))
        self.balance_trigger = recipe.balance_trigger
        if recipe.strict_volume:
            self.balance_trigger = min(recipe.balance_trigger, _STRICT_BALANCE_TRIGGER)
        self.state = OkTopkState()

    @property
    def goes_dense(self) -> bool:
        """True when everything is to be delivered anyway."""
        return self.numel == 0 or (self.k >= self.numel and not self.recipe.force_sparse)

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if self.goes_dense:
            return (yield from collectives.dense_exchange(acc, world_size))
        state = self._state_for(world_size)
        reevaluate, repartition = self._due(state)

        local, local_threshold = self._select_local(acc, state, reevaluate)
        finite = not kernels.has_non_finite(local.values)
        if world_size == 1:
            return self._alone(acc, local, local_threshold, finite)
        cuts = state.cuts
        if repartition:
            cuts = yield from self._repartition(local.indices, world_size)
        if self.recipe.strict_volume and not reevaluate:
            # No pair of workers exchanges more than k/P entries; what is cut stays in the residual.
            limits = [math.ceil(self.k / world_size) if p != rank else self.k for p in range(world_size)]
            local = largest_parts(local, offsets(local.indices, cuts), limits, workspace=self.workspace)
        region, received = yield from self._split_and_reduce(local, cuts, finite, rank, world_size)

        floor = self._lowered(state.global_threshold) if not reevaluate else WARM_START * state.global_threshold
        candidates = self._candidates(region, floor, cuts[rank])
        shared = yield from self._share_sizes(candidates, received, state.global_threshold, world_size)
        if reevaluate:
            if floor > 0 and sum(shared.candidates) < self.k:  # the k largest are not all among them: look again
                candidates = self._candidates(region, 0.0, cuts[rank])
                shared = yield from self._share_sizes(candidates, received, state.global_threshold, world_size)
            delivered = yield from self._global_top_k(candidates, shared, state, rank, world_size)
        else:
            delivered = yield from self._balance_and_gather(candidates, shared, state, rank, world_size)

        # A coordinate is cleared iff this rank sent it and the global selection kept it.
        acc.clear(local.indices[kernels.common_positions(local.indices, delivered.indices)])
        loads = shared.loads
        skewed = max(loads) * world_size > self.recipe.skew_trigger * sum(loads)
        self.report = {
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
            force_repartition=skewed and self.k >= world_size,  # with fewer entries nobody can propose cuts
        )
        return SparseVector(delivered.indices, delivered.sums / world_size, self.numel)

    def _alone(self, acc: Accumulator, local: Selection, threshold: float, finite: bool) -> SparseVector:
        """One worker: what it selects is what is delivered."""
        if not finite:
            raise NonFiniteError("rank 0 holds a NaN or Inf gradient; nothing was applied", [0])
        acc.clear(local.indices)
        state = self._state_for(1)
        self.state = replace(state, step=state.step + 1, local_threshold=threshold, force_reevaluate=False)
        return SparseVector(local.indices, local.values, self.numel)

    def _state_for(self, world_size: int) -> OkTopkState:
        """Thresholds are on sums and cuts are per worker: another world size starts both anew."""
        if self.state.world_size == world_size:
            return self.state
        return replace(OkTopkState(), step=self.state.step, world_size=world_size)

    def _due(self, state: OkTopkState) -> tuple[bool, bool]:
        """Whether this step re-evaluates thresholds, and whether it repartitions."""
        reevaluate = state.force_reevaluate or self.scheduled(state.step)
        repartition = state.force_repartition or state.step % self.recipe.repartition_every == 0
        return reevaluate, repartition

    def scheduled(self, step: int) -> bool:
        """Re-evaluation falls on 0, 1, 2, 4, 8, ... up to tau', and on every multiple of tau'."""
        period = self.recipe.reevaluate_every
        early = step < period and step & (step - 1) == 0
        return early or step % period == 0

    def _select_local(self, acc: Accumulator, state: OkTopkState, reevaluate: bool) -> tuple[Selection, float]:
        """L: this rank's selection, and the threshold it hands to the next step (0 when invalid)."""
        if reevaluate or state.local_threshold <= 0:
            local = acc.top_k(self.k)
            enough = local.found == self.k
            return local, kernels.smallest_magnitude(local.values) if enough else 0.0
        threshold = self._lowered(state.local_threshold)
        local = acc.at_least(threshold)
        following = self._corrected(threshold, local, local.found)
        return kernels.largest(local, self.local_cap, workspace=self.workspace), following

    def _lowered(self, threshold: float) -> float:
        return threshold * (WARM_START if self.recipe.correct_thresholds else 1.0)

    def _corrected(self, threshold: float, passed: Selection, count: int) -> float:
        """What would have let k entries pass."""
        if not self.recipe.correct_thresholds:
            return threshold
        return following_threshold(threshold, passed, count, self.k, self.numel, workspace=self.workspace)

    def _repartition(self, indices: torch.Tensor, world_size: int) -> Pattern[tuple[int, ...]]:
        """Space repartition: everybody proposes cuts that halve its own load; the mean is taken."""
        proposal = propose_cuts(indices, world_size)
        total = yield AllReduce("repartition", proposal)
        return consensus_cuts(total.tolist(), self.numel)

    def _split_and_reduce(
        self, local: Selection, cuts: Sequence[int], finite: bool, rank: int, world_size: int
    ) -> Pattern[tuple[torch.Tensor, int]]:
        """Phase 1: the dense sum over this rank's own region, and how many entries came in for it.

        Summed in rotation order, rank r, r-1, r-2, ..., whatever the order of arrival.
        """
        low, high = cuts[rank], cuts[rank + 1]
        region = torch.zeros(high - low, device=local.values.device)
        starts = offsets(local.indices, cuts)
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        incoming = yield from collectives.share_counts(counts, finite, local.indices.device)

        def add(arrived: Inbox) -> None:
            lists = list(arrived.values())
            counts = [message.numel() // 2 for message in lists]
            indices, values = wire.unpack_parts(lists)
            wire.check_indices(indices, low, high, counts)
            kernels.scatter_add_lists(region, indices - low, values, counts)

        messages = wire.pack_parts(local.indices, local.values, counts)
        add({rank: messages[rank]})
        sends = {p: message for p, message in enumerate(messages) if p != rank}
        receives = {p: 2 * count for p, count in enumerate(incoming) if p != rank}
        width = self.recipe.bucket_width
        yield from collectives.rotate(sends, receives, add, rank, world_size, width=width, phase="split-and-reduce")
        return region, sum(incoming)

    def _candidates(self, region: torch.Tensor, threshold: float, offset: int) -> Selection:
        """The owner's side of the global selection: reduced non-zeros that reach ``threshold``."""
        found = kernels.select(region, threshold, workspace=self.workspace)
        return found._replace(indices=found.indices + offset)

    def _share_sizes(self, candidates: Selection, received: int, threshold: float, world_size: int) -> Pattern[_Sizes]:
        """What everybody must know of the owners before anything is gathered."""
        finite = not kernels.has_non_finite(candidates.values)
        reaching = kernels.magnitude_keys(candidates.values) >= kernels.threshold_key(threshold)
        row = [candidates.found, received, int(reaching.sum())]
        sizes, loads, reached = yield from collectives.share_rows(
            row, finite, world_size, candidates.values.device, phase="sizes", reason=collectives.OVERFLOW
        )
        return _Sizes(sizes, loads, sum(reached))

    def _global_top_k(
        self, candidates: Selection, shared: _Sizes, state: OkTopkState, rank: int, world_size: int
    ) -> Pattern[_Delivered]:
        """Phase 2 of a re-evaluation step: exactly the k largest sums, gathered from all or found by histograms."""
        if sum(shared.candidates) <= self._worth_gathering(world_size):
            gathered = yield from collectives.gather_blocks(
                candidates, shared.candidates, self.numel, rank, world_size, phase="re-evaluation"
            )
        else:
            shares = yield from largest_shares(candidates, self.k)
            gathered = yield from self._even_out_and_gather(candidates, shares, rank, world_size)
        kept = kernels.largest(gathered, self.k, workspace=self.workspace)
        # Nothing to learn a threshold from: keep the old one and look again next step.
        threshold = kernels.smallest_magnitude(kept.values) or state.global_threshold
        return _Delivered(kept.indices, kept.values, threshold, force_reevaluate=kept.found == 0)

    def _worth_gathering(self, world_size: int) -> int:
        """Up to how many reduced non-zeros it is cheaper to gather them all than to look for the k largest."""
        if self.recipe.exact_select != "auto":
            return self.numel if self.recipe.exact_select == "gather" else self.k
        return self.k + distributed_topk.forecast(world_size).received.bytes // (2 * cost.WORD)

    def _balance_and_gather(
        self, candidates: Selection, shared: _Sizes, state: OkTopkState, rank: int, world_size: int
    ) -> Pattern[_Delivered]:
        """Phase 2 of a reuse step: trim to the cap, even out if it pays, gather."""
        wanted = sum(shared.candidates)
        sizes = trimmed_sizes(shared.candidates, self.global_cap)
        gathered = yield from self._even_out_and_gather(candidates, sizes, rank, world_size)
        low, high = self.recipe.drift_low * self.k, self.recipe.drift_high * self.k
        threshold = self._corrected(self._lowered(state.global_threshold), gathered, wanted)
        return _Delivered(gathered.indices, gathered.values, threshold, not low <= shared.reaching <= high)

    def _even_out_and_gather(
        self, candidates: Selection, sizes: list[int], rank: int, world_size: int
    ) -> Pattern[Selection]:
        """The ``sizes[r]`` largest candidates of every rank r."""
        block = kernels.largest(candidates, sizes[rank], workspace=self.workspace)
        return collectives.balanced_gather(
            block, sizes, self.numel, rank, world_size, trigger=self.balance_trigger, width=self.recipe.bucket_width
        )

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: all but the local threshold, which is private."""
        return {field: value for field, value in self.state_dict().items() if field != "local_threshold"}

    def invalidate_thresholds(self) -> None:
        """See :meth:`Algorithm.invalidate_thresholds`: thresholds are evaluated anew."""
        self.state = replace(self.state, local_threshold=0.0, force_reevaluate=True)

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: what the caps of the next step allow."""
        return self._forecast(world_size, *self._due(self._state_for(world_size)))

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: a step that reuses thresholds and cuts."""
        return self._forecast(world_size, reevaluate=False, repartition=False)

    def _forecast(self, world_size: int, reevaluate: bool, repartition: bool) -> Forecast:
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if world_size == 1:
            return Forecast({})
        peers, rounds = world_size - 1, cost.log2(world_size)
        sent = self.k if reevaluate else self.local_cap
        pair = math.ceil(self.k / world_size) if self.recipe.strict_volume and not reevaluate else sent
        sizes = cost.all_gather(3, 8, world_size)
        phases = {
            "counts": both(cost.all_to_all(1, 8, world_size)),
            # A rank sends every entry once; an owner may be sent everybody's.
            "split-and-reduce": Flow(
                cost.messages(peers, 2 * min(sent, peers * pair)), cost.messages(peers, 2 * peers * pair)
            ),
            # Once more when the warm start of a re-evaluation did not suffice.
            "sizes": both(sizes.plus(sizes) if reevaluate else sizes),
        }
        if repartition:
            phases["repartition"] = both(cost.all_reduce(world_size, 8, world_size))
        if reevaluate:
            gathered = min(self.numel, world_size * self.k, self._worth_gathering(world_size))
            phases["re-evaluation"] = Flow(
                cost.messages(rounds, 2 * rounds * gathered), cost.messages(rounds, 2 * gathered)
            )
            if gathered == min(self.numel, world_size * self.k):
                return Forecast(phases)
            phases.update(distributed_topk.forecast(world_size).phases)
        delivered = self.k if reevaluate else self.global_cap
        share = math.ceil(delivered / world_size)
        largest = max(share, math.ceil(min(delivered, self.balance_trigger * delivered / world_size)))
        if self.balance_trigger < world_size:
            phases["balance"] = Flow(cost.messages(peers, 2 * delivered), cost.messages(peers, 2 * share))
        # Bruck: everything arrives once; a large block of its own a rank sends in every round.
        leaving = min(rounds * delivered, peers * largest)
        phases["all-gather"] = Flow(cost.messages(rounds, 2 * leaving), cost.messages(rounds, 2 * delivered))
        return Forecast(phases)
