"""The static form of TopkDSA: the same exchange in messages of a fixed length. The host reads results once, at the end.

See :mod:`tritoncomm.algorithms.topk_dsa` for the method, and :class:`~tritoncomm.algorithms.base.StaticRecipe` for the
form. Every rank has room for the same number of entries in each region. With room for all entries, the result has the
same bits as that of the exact form if both send the sums in the same way, as entries or as dense values, and if the
exact form packs rounded values, too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.static_regions import ROUNDED_MARGIN, only, read_regions, region_starts
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Pattern
from tritoncomm.scheduler.wire import Encoding, Rows, rounded_quotients
from tritoncomm_kernels import Padded
from tritoncomm_kernels.padded import stacked


@dataclass(frozen=True)
class StaticForm:
    """The fixed lengths of the static form.

    ``cuts`` are those of the regions. A rank sends at most ``room`` entries of a region. See
    :class:`~tritoncomm.TopkDSA` for ``dense_switch``.
    """

    encoding: Encoding
    cuts: tuple[int, ...]
    room: int
    dense_switch: float

    @property
    def numel(self) -> int:
        """Length of the vector."""
        return self.cuts[-1]

    @property
    def world_size(self) -> int:
        """Number of regions and of ranks."""
        return len(self.cuts) - 1

    @property
    def span(self) -> int:
        """Width of the widest region."""
        return max(high - low for low, high in itertools.pairwise(self.cuts))

    @property
    def most_sums(self) -> int:
        """The largest number of sums of one region."""
        return min(self.span, self.world_size * self.room)

    @property
    def goes_dense(self) -> bool:
        """True if the sums of all regions travel as dense values, because entries have too many words."""
        words = self.gathered_rows(torch.zeros(self.world_size, dtype=torch.int32)).words
        return self.world_size * words >= self.dense_switch * self.numel

    def sent_rows(self, lows: torch.Tensor) -> Rows:
        """Return the format of messages to the owners of the regions that start at ``lows``."""
        return Rows(self.encoding, lows, self.span, self.room)

    def gathered_rows(self, lows: torch.Tensor) -> Rows:
        """Return the format of messages with the sums of the regions that start at ``lows``."""
        return Rows(self.encoding, lows, self.span, self.most_sums, divisor=self.world_size)

    def forecast(self) -> Forecast:
        """Return the traffic of a step. It is exact."""
        lows, world_size = torch.zeros(self.world_size, dtype=torch.int32), self.world_size
        if world_size == 1:
            return Forecast({})
        words = self.span if self.goes_dense else self.gathered_rows(lows).words
        phases = {
            "split-and-reduce": both(cost.all_to_all(self.sent_rows(lows).words, cost.WORD, world_size)),
            "all-gather": both(cost.all_gather(words, cost.WORD, world_size)),
        }
        return with_verdict(Forecast(phases), world_size)


class StaticStep:
    """One step of the static form on one rank."""

    def __init__(self, form: StaticForm, acc: Accumulator, verdict: Verdict, rank: int) -> None:
        self.form = form
        self.acc = acc
        self.verdict = verdict
        self.rank = rank
        self.workspace = acc.workspace
        self.bounds = kernels.constant(form.cuts, acc.device)

    def run(self, k: int) -> Pattern[Padded]:
        """Return the means. See :meth:`TopkDSAAlgorithm.reduce`."""
        own = self.acc.top_k_padded(k)
        self.verdict.check_gradient(own.values)
        if self.form.world_size == 1:
            self.acc.subtract_padded(own, rounded=False)
            yield from self.verdict.settle(1)
            return own
        region = yield from self._split_and_reduce(own)
        self.verdict.check_sums(region * ROUNDED_MARGIN if self.form.encoding.rounds else region)
        mean = yield from (self._all_gather_dense(region) if self.form.goes_dense else self._all_gather(region))
        yield from self.verdict.settle(self.form.world_size)
        return mean

    def _split_and_reduce(self, own: Padded) -> Pattern[torch.Tensor]:
        """Return the dense sum over this rank's region (fp32 ``[span]``), with zeros behind it.

        Entries are added in rank order. Those that are in a sum are removed from the accumulator.
        """
        form, rank, held = self.form, self.rank, self.workspace
        rows = form.sent_rows(self.bounds[:-1])
        budgets = kernels.constant((rows.room,) * form.world_size, self.acc.device)
        starts = region_starts(own, self.bounds, form.numel)
        parts = kernels.top_k_rows(own.values, starts, budgets, rows.room, indices=own.indices, workspace=held)
        messages, sent = rows.pack(parts, workspace=held)
        received = yield AllToAll("split-and-reduce", messages)
        arriving = form.sent_rows(self.bounds[rank : rank + 1].repeat(form.world_size))
        lists = read_regions(arriving, received, form.cuts[rank + 1], self.verdict, workspace=held)
        # This rank's own region is not sent, and not rounded.
        lists, delivered = (_with_row(entries, rank, parts) for entries in (lists, sent))
        region = torch.zeros(form.span, dtype=torch.float32, device=self.acc.device)
        kernels.add_rows(region, lists, offset=form.cuts[rank], workspace=held)
        self.acc.subtract_padded(delivered, rounded=rows.rounds)
        return region

    def _all_gather(self, region: torch.Tensor) -> Pattern[Padded]:
        """Gather the sums of all regions as entries, and return the means."""
        rows, low = self.form.gathered_rows(self.bounds[:-1]), self.form.cuts[self.rank]
        sums = self._non_zeros(region, self.form.most_sums, low)
        message, sent = rows.pack(stacked([sums]), workspace=self.workspace, first=self.rank)
        if rows.rounds:
            self.acc.add_rest_padded(sums, sent)
        gathered = yield AllGather("all-gather", message[0])
        lists = read_regions(rows, gathered, self.bounds[1:, None], self.verdict, workspace=self.workspace)
        return kernels.joined(lists, workspace=self.workspace)

    def _all_gather_dense(self, region: torch.Tensor) -> Pattern[Padded]:
        """Gather the means of all regions as dense values, and return those that are not zero."""
        form, (low, high) = self.form, self.form.cuts[self.rank : self.rank + 2]
        means = region / form.world_size
        if form.encoding.rounds:
            means = rounded_quotients(region, form.world_size)
            rest = (region - means * form.world_size)[: high - low]
            self.acc.replace_range(low, self.acc.dense()[low:high] + rest)
        gathered = yield AllGather("all-gather", means.view(torch.int32))
        widths = [stop - start for start, stop in itertools.pairwise(form.cuts)]
        dense = torch.cat([row[:width] for row, width in zip(gathered, widths, strict=True)])
        return self._non_zeros(dense.view(torch.float32), form.numel)

    def _non_zeros(self, values: torch.Tensor, room: int, low: int = 0) -> Padded:
        """Return the entries of ``values`` (fp32 ``[n]``) that are not zero, with room for all of them.

        ``low`` is added to their indices.
        """
        places = torch.arange(low, low + values.numel(), dtype=torch.int32, device=values.device)
        found = only(Padded(places[None], values[None]), values != 0)
        indices, entries = kernels.joined(found, workspace=self.workspace)
        return Padded(indices[:room], entries[:room])


def _with_row(rows: Padded, number: int, replacement: Padded) -> Padded:
    """Return ``rows`` with the row of that ``number`` from ``replacement``."""
    indices, values = rows.indices.clone(), rows.values.clone()
    indices[number], values[number] = replacement.indices[number], replacement.values[number]
    return Padded(indices, values)
