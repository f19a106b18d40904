"""The static form of Ok-Topk: messages of a fixed length.

The host waits for a GPU once in a step that reuses thresholds, whatever the world size. The steps are those of
:mod:`tritoncomm.algorithms.ok_topk`. Three things differ. A message has room for a fixed number
of entries, and entries above it stay in the residual. There is no data balancing, because all blocks have the same
length. If more sums than the global cap arrive, all ranks keep the largest of them. Steps that re-evaluate thresholds
first exchange counts, and then use the same messages with room for every entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.ok_topk_thresholds import OkTopkState, Rules, agree_on_cuts
from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.primitives import distributed_topk
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import checked_counts
from tritoncomm.primitives.distributed_topk import largest_shares
from tritoncomm.primitives.packing import Encoding, Rows
from tritoncomm.primitives.region_cuts import propose_cuts_padded, widest
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.static_regions import ROUNDED_MARGIN, among, ascending, only, read_regions, region_starts
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Pattern, read
from tritoncomm_kernels import Padded, Selection, Workspace
from tritoncomm_kernels.entries import PADDING

_NO_KEY = 0x7FFFFFFF  # above the key of every finite magnitude
_INFINITE_KEY = 0x7F800000


class Figures(NamedTuple):
    """What a rank reports at the end of a step.

    ``load`` is the number of entries that all ranks have for its region, including those that did not fit. ``wanted``
    and ``reaching`` count the sums of its region that reach the lowered global threshold, and the threshold itself.
    ``found`` is the number of delivered entries. ``edge`` is the key of the smallest of the k largest ones, or, if
    values are rounded, of the k (k/P in a step that reuses thresholds) largest sums of this rank. ``selected`` is the
    number of its own entries that reach its local threshold, and ``kth`` the key of its k-th largest entry, or 0 if it
    has fewer.
    """

    load: int
    wanted: int
    reaching: int
    found: int
    edge: int
    selected: int
    kth: int


class Outcome(NamedTuple):
    """The result of a step: the mean, the state for the next step, and figures for the metrics."""

    mean: SparseVector
    state: OkTopkState
    report: dict[str, float]


@dataclass(frozen=True)
class StaticForm:
    """The fixed lengths of the static form, and the traffic that follows from them.

    ``local_cap`` and ``global_cap`` are the largest number of entries that a rank selects, and that a step delivers.
    ``pair_share`` and ``owner_share`` are the room of a message, for one owner and of one owner, in multiples of an
    even share of these caps.
    """

    rules: Rules
    encoding: Encoding
    local_cap: int
    global_cap: int
    pair_share: float
    owner_share: float

    def pair_room(self, world_size: int) -> int:
        """Return the largest number of entries that a rank sends to one owner in a step that reuses thresholds."""
        return math.ceil(min(self.local_cap, self.pair_share * self.local_cap / world_size))

    def owner_room(self, world_size: int) -> int:
        """Return the largest number of sums that one owner sends in a step that reuses thresholds."""
        return math.ceil(min(self.global_cap, self.owner_share * self.global_cap / world_size))

    def rows(self, lows: torch.Tensor, span: int, room: int, *, divisor: int = 1) -> Rows:
        """Return the format of messages with ``room`` entries in ``span`` coordinates from ``lows`` on."""
        return Rows(self.encoding, lows, span, room, divisor=divisor if self.encoding.rounds else 1)

    def forecast(
        self,
        world_size: int,
        span: int | None,
        *,
        reevaluate: bool = False,
        repartition: bool = False,
    ) -> Forecast:
        """Return the traffic of a step. It is exact if ``span``, the width of the widest region, is given.

        Without ``span`` it is an upper bound.
        """
        numel, k = self.rules.numel, self.rules.k
        rooms = (k, k) if reevaluate else (self.pair_room(world_size), self.owner_room(world_size))
        pair, block = (self._words(room, span) for room in rooms)
        phases = {
            "split-and-reduce": both(cost.all_to_all(pair + 1, cost.WORD, world_size)),
            "all-gather": both(cost.all_gather(block, cost.WORD, world_size)),
        }
        if repartition:
            phases["repartition"] = both(cost.all_reduce(world_size, 2 * cost.WORD, world_size))
        if reevaluate:
            phases["rooms"] = both(cost.all_gather(1, cost.WORD, world_size))
            phases["sizes"] = both(cost.all_gather(1, cost.WORD, world_size))
            if min(numel, world_size * k) > k:
                phases.update(distributed_topk.forecast(world_size).phases)
        return with_verdict(Forecast(phases), world_size, len(Figures._fields))

    def _words(self, room: int, span: int | None) -> int:
        if span is not None:
            return self.rows(torch.zeros(1, dtype=torch.int32), span, room).words
        packed = "always" if self.encoding.rounds else self.encoding.packed  # see Rows
        return self.encoding._replace(packed=packed).words_at_most(self.rules.numel, room, 1)


@dataclass(frozen=True)
class _Regions:
    """The regions of all ranks: ``bounds`` (int32 ``[P + 1]``, on the device) are the cuts."""

    cuts: tuple[int, ...]
    rank: int
    bounds: torch.Tensor

    @property
    def low(self) -> int:
        """First coordinate of this rank's region."""
        return self.cuts[self.rank]

    @property
    def high(self) -> int:
        """First coordinate behind this rank's region."""
        return self.cuts[self.rank + 1]

    @property
    def span(self) -> int:
        """Width of the widest region."""
        return widest(self.cuts)


class _Reduced(NamedTuple):
    """Outcome of phase 1.

    ``sums`` (fp32 ``[span]``) are those of this rank's region, with zeros behind it. ``own`` and ``sent`` are the
    entries of this rank in all sums: those of its own region, and one row for each owner with the values sent. ``load``
    is that of :class:`Figures`.
    """

    sums: torch.Tensor
    own: Padded
    sent: Padded
    load: torch.Tensor


class _Chosen(NamedTuple):
    """The sums of this rank that go into phase 2, at most ``room``, with their global indices.

    ``limit`` is the largest number of delivered entries. ``wanted`` and ``reaching`` are those of :class:`Figures`.
    """

    entries: Padded
    limit: int
    wanted: torch.Tensor
    reaching: torch.Tensor


@dataclass(frozen=True, eq=False)
class OkTopkStaticStep:
    """One step of the static form on one rank. :meth:`run` follows the paper from top to bottom.

    ``state`` is that before the step.
    """

    form: StaticForm
    acc: Accumulator
    verdict: Verdict
    workspace: Workspace
    state: OkTopkState
    rank: int
    reevaluate: bool
    repartition: bool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.state.world_size

    @property
    def rules(self) -> Rules:
        """The rules of the exchange."""
        return self.form.rules

    def run(self) -> Pattern[Outcome]:
        """Run the exchange. Everything that the host has to know is read at its end, with the verdict."""
        local, kth = self._select_local()
        selected = kernels.count_entries(local)
        if self.world_size == 1:
            return (yield from self._alone(local, selected, kth))
        # Phase 1 (sections "space repartition" and "split and reduce").
        cuts = self.state.cuts
        if self.repartition:
            cuts = yield from agree_on_cuts(propose_cuts_padded(local, self.world_size), self.rules.numel)
        regions = _Regions(cuts, self.rank, kernels.constant(cuts, self.acc.device))
        reduced = yield from self._split_and_reduce(local, regions)
        # Phase 2: global selection and all-gather.
        if self.reevaluate:
            chosen = yield from self._largest_sums(reduced.sums)
        else:
            chosen = self._candidates(reduced.sums)
        result, sent = yield from self._gather(chosen, regions)
        # Residual update: remove an entry if and only if this rank sent it and the global selection kept it.
        kept = ascending(result.indices, self.rules.numel)
        for part in (reduced.own, reduced.sent):
            self._subtract(part, among(kept, part.indices))
        if sent is not None:
            self._keep_rest(sent, among(kept, sent.indices), reduced, regions)
        found, edge = kernels.count_entries(result), self._edge(result, chosen)
        figures = (reduced.load, chosen.wanted, chosen.reaching, found, edge, selected, kth)
        rows = yield from self.verdict.settle(self.world_size, figures)
        values = result.values if self.form.encoding.rounds else result.values / self.world_size
        mean = SparseVector.padded(result._replace(values=values), self.rules.numel)
        return self._outcome(mean, cuts, [Figures(*row) for row in rows])

    def _select_local(self) -> tuple[Padded, torch.Tensor]:
        """Return this rank's selection, and the key of its k-th largest entry (int32 ``[1]``), 0 if it has fewer."""
        threshold, k = self.state.local_threshold, self.rules.k
        room = k if self._selects_exactly else min(self.form.local_cap, self.rules.numel)
        largest = self.acc.top_k_padded(room)
        self.verdict.check_gradient(largest.values)
        first = largest if room <= k else kernels.largest_padded(largest, k, workspace=self.acc.workspace)
        kth = kernels.magnitude_keys(first.values).amin().reshape(1)  # padding has the value 0, entries have not
        if self._selects_exactly:
            return largest, kth
        lowered = self.rules.lowered(threshold)
        return kernels.reaching(largest, lowered, workspace=self.acc.workspace), kth

    @property
    def _selects_exactly(self) -> bool:
        return self.reevaluate or self.state.local_threshold <= 0

    def _alone(self, local: Padded, selected: torch.Tensor, kth: torch.Tensor) -> Pattern[Outcome]:
        """Return the result for a world size of 1, which is the local selection."""
        self.acc.subtract(local, rounded=False)
        (row,) = yield from self.verdict.settle(1, (selected, kth))
        self.acc.selected = row[0]
        threshold = self._following_local(*row)
        state = replace(self.state, step=self.state.step + 1, local_threshold=threshold, force_reevaluate=False)
        return Outcome(SparseVector.padded(local, self.rules.numel), state, {})

    def _split_and_reduce(self, local: Padded, regions: _Regions) -> Pattern[_Reduced]:
        """Phase 1. Entries are added in rotation order, rank r, r-1, r-2, ..., as in the other form."""
        rank, world_size, held, device = self.rank, self.world_size, self.acc.workspace, self.acc.device
        starts = region_starts(local, regions.bounds, self.rules.numel)
        counts = starts[1:] - starts[:-1]
        foreign = kernels.constant([int(owner != rank) for owner in range(world_size)], device)
        room = self.form.pair_room(world_size)
        if self.reevaluate:
            room = yield from self._widest_pair(counts * foreign)
        rows = self.form.rows(regions.bounds[:-1], regions.span, room)
        parts = kernels.top_k_rows(
            local.values, starts, rows.room * foreign, rows.room, indices=local.indices, workspace=held
        )
        messages, sent = rows.encode(parts, workspace=held)
        received = yield AllToAll("split-and-reduce", torch.cat([messages, counts[:, None]], dim=1))
        order = kernels.constant([(rank - turn) % world_size for turn in range(1, world_size)], device)
        arrived = received.index_select(0, order)[:, :-1].contiguous()
        lows = regions.bounds[rank : rank + 1].repeat(world_size - 1)
        lists = read_regions(
            self.form.rows(lows, regions.span, room), arrived, regions.high, self.verdict, workspace=held
        )
        own = only(local, (local.indices >= regions.low) & (local.indices < regions.high))
        own = kernels.joined(Padded(own.indices[None], own.values[None]), workspace=held)
        sums = self.workspace.buffer("region", regions.span, torch.float32, device).zero_()
        for entries in (own, lists):
            kernels.add_rows(sums, entries, offset=regions.low, workspace=held)
        return _Reduced(sums, own, sent, received[:, -1].sum(dtype=torch.int32).reshape(1))

    def _widest_pair(self, counts: torch.Tensor) -> Pattern[int]:
        """Return the room for all entries: the largest of all ranks' ``counts`` (int32 ``[P]``)."""
        everybody = yield from read("rooms", (yield AllGather("rooms", counts.amax().reshape(1))).flatten())
        return max(1, *checked_counts("rooms", everybody, self.rules.k))

    def _candidates(self, sums: torch.Tensor) -> _Chosen:
        """Choose the sums of a step that reuses thresholds: the largest ones that reach the lowered threshold."""
        threshold = self.state.global_threshold
        lowered = self.rules.lowered(threshold)
        found = self._largest(sums, self.form.owner_room(self.world_size), lowered)
        wanted = kernels.count_reaching(sums, lowered)
        return _Chosen(found, self.form.global_cap, wanted, kernels.count_reaching(sums, threshold))

    def _largest_sums(self, sums: torch.Tensor) -> Pattern[_Chosen]:
        """Choose the k largest sums of all ranks for a re-evaluation. Histograms find how many of them a rank holds."""
        k, held = self.rules.k, self.acc.workspace
        wanted = kernels.count_reaching(sums, 0.0)
        everybody = yield from read("sizes", (yield AllGather("sizes", wanted)).flatten())
        counts = checked_counts("sizes", everybody, self.rules.numel)
        found = self._largest(sums, min(k, max(1, *counts)), 0.0)
        if sum(counts) > k:
            shares = yield from largest_shares(Selection.of(*found), k)
            room = min(found.room, max(1, *checked_counts("shares", shares, k)))
            bounds = found.room * torch.arange(2, dtype=torch.int32, device=sums.device)
            budget = bounds.new_full((1,), shares[self.rank])
            rows = kernels.top_k_rows(found.values, bounds, budget, room, indices=found.indices, workspace=held)
            found = rows.row(0)
        return _Chosen(found, k, wanted, wanted)

    def _largest(self, sums: torch.Tensor, room: int, threshold: float) -> Padded:
        """Return the ``room`` largest of ``sums`` (fp32 ``[span]``), without those below ``threshold``."""
        found = kernels.top_k_padded(sums, None, sums, min(room, sums.numel()), workspace=self.workspace)
        return kernels.reaching(found, threshold, workspace=self.acc.workspace)

    def _gather(self, chosen: _Chosen, regions: _Regions) -> Pattern[tuple[Padded, Padded | None]]:
        """Gather the chosen sums of all ranks, and keep the largest ones if they are more than the limit.

        The result holds means if values are rounded, otherwise sums. Also returns the sums of this rank as they were
        sent, or None if they were not rounded.
        """
        entries, rounds, held = chosen.entries, self.form.encoding.rounds, self.acc.workspace
        self.verdict.check_sums(entries.values * ROUNDED_MARGIN if rounds else entries.values)
        indices = torch.where(entries.indices < 0, PADDING, entries.indices + regions.low)
        rows = self.form.rows(regions.bounds[:-1], regions.span, entries.room, divisor=self.world_size)
        message, sent = rows.encode(Padded(indices[None], entries.values[None]), workspace=held, first=self.rank)
        gathered = yield AllGather("all-gather", message[0])
        lists = read_regions(rows, gathered, regions.bounds[1:, None], self.verdict, workspace=held)
        if lists.indices.numel() <= chosen.limit:
            result = kernels.joined(lists, workspace=held)
        else:
            result = Padded(lists.indices.reshape(-1), lists.values.reshape(-1))
            result = kernels.largest_padded(result, chosen.limit, workspace=held)
        return result, sent.row(0) if rounds else None

    def _subtract(self, sent: Padded, kept: torch.Tensor) -> None:
        """Remove the ``kept`` ones of the ``sent`` entries from the sum."""
        if self.form.encoding.rounds:
            values = torch.where(kept, sent.values, 0.0)
            self.acc.subtract(sent._replace(values=values), rounded=True)
        else:
            self.acc.subtract(only(sent, kept), rounded=False)

    def _keep_rest(self, sent: Padded, kept: torch.Tensor, reduced: _Reduced, regions: _Regions) -> None:
        """Add what rounding has cut off from the ``kept`` ones of the ``sent`` sums to the residual of their owner."""
        places = torch.where(sent.indices < 0, PADDING, sent.indices - regions.low)
        excess = torch.where(kept, sent.values - kernels.values_at(reduced.sums, places), 0.0)
        self.acc.subtract(sent._replace(values=excess), rounded=True)

    def _edge(self, result: Padded, chosen: _Chosen) -> torch.Tensor:
        """Return ``edge`` of :class:`Figures`. Thresholds must not be learnt from rounded values."""
        entries, k = result, self.rules.k
        if self.form.encoding.rounds:
            entries, k = chosen.entries, k if self.reevaluate else math.ceil(k / self.world_size)
        if entries.room > k:
            entries = kernels.largest_padded(entries, k, workspace=self.acc.workspace)
        keys = kernels.magnitude_keys(entries.values)
        return torch.where(entries.indices < 0, _NO_KEY, keys).amin().reshape(1)

    def _outcome(self, mean: SparseVector, cuts: tuple[int, ...], rows: Sequence[Figures]) -> Outcome:
        """Return the outcome for the figures of all ranks."""
        own, state, rules = rows[self.rank], self.state, self.rules
        self.acc.selected = own.selected
        loads, wanted = [row.load for row in rows], sum(row.wanted for row in rows)
        if self.reevaluate:
            # Without any sum there is no new threshold. Keep the old one and re-evaluate at the next step.
            threshold = min(self._edges(rows)) if own.found else state.global_threshold
            reevaluate = own.found == 0
        else:
            lowered = rules.lowered(state.global_threshold)
            threshold = rules.following(lowered, wanted, self._kth(rows, lowered))
            reevaluate = rules.drifted(sum(row.reaching for row in rows))
        state = replace(
            state,
            step=state.step + 1,
            local_threshold=self._following_local(own.selected, own.kth),
            global_threshold=threshold,
            cuts=cuts,
            force_reevaluate=reevaluate,
            force_repartition=rules.skewed(loads),
        )
        report = {
            "reevaluated": float(self.reevaluate),
            "repartitioned": float(self.repartition),
            "region_imbalance": max(loads) * self.world_size / max(1, sum(loads)),
            "candidates": float(wanted),
        }
        return Outcome(mean, state, report)

    def _kth(self, rows: Sequence[Figures], lowered: float) -> float:
        """Return the k-th largest sum, or 0 if it is unknown. The chosen sums of this step reach ``lowered``.

        If values are rounded, no rank knows all sums exactly. The result is then the mean of the owners' (k/P)-th sums.
        """
        edges, k = self._edges(rows), self.rules.k
        if self.form.encoding.rounds:
            known = [edge if row.wanted * len(rows) >= k else lowered for row, edge in zip(rows, edges, strict=True)]
            return math.fsum(known) / len(rows)
        return min(edges) if rows[self.rank].found >= k else 0.0

    def _edges(self, rows: Sequence[Figures]) -> list[float]:
        """Return the magnitudes ``edge`` of all ranks, infinite for those without sums."""
        keys = [row.edge for row in rows]
        wrong = [key for key in keys if not 0 < key < _INFINITE_KEY and key != _NO_KEY]
        if wrong or (rows[self.rank].found and min(keys) == _NO_KEY):
            raise ProtocolMismatchError(
                f"phase 'verdict': received {keys} as keys of smallest magnitudes: not in (0, {_INFINITE_KEY})"
            )
        return [_magnitude(key) if key != _NO_KEY else math.inf for key in keys]

    def _following_local(self, selected: int, kth: int) -> float:
        """Return the local threshold for the next step, 0 if it has to be computed exactly there."""
        if self._selects_exactly:
            return _magnitude(kth)
        return self.rules.following(self.rules.lowered(self.state.local_threshold), selected, _magnitude(kth))


def _magnitude(key: int) -> float:
    """Return the magnitude that has this ``key``."""
    return float(np.array(key, np.int32).view(np.float32))
