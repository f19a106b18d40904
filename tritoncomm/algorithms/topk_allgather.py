"""Local top-k and all-gather: the simplest sparse exchange. Its volume grows with the number of workers.

It is "TopkA" in the comparison table of Ok-Topk: bandwidth 2k(P-1) words, latency log P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, EntryRecipe, Stateless, StaticRecipe
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import all_gather_mean, dense_exchange
from tritoncomm.primitives.packing import PLAIN, Encoding, Rows
from tritoncomm.primitives.selection import entries_to_keep, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm_kernels import Padded


@dataclass(frozen=True, kw_only=True)
class TopkAllgather(EntryRecipe, StaticRecipe):
    """Send the k largest entries of every worker to all workers. The union is delivered."""

    name: ClassVar[str] = "topk_allgather"
    averages_when_dense: ClassVar[bool] = True

    def build(self, numel: int, bounds: Bounds = ()) -> TopkAllgatherAlgorithm:
        k = entries_to_keep(numel, self.density)
        return TopkAllgatherAlgorithm(numel, k, self.encoding, static=self.static is True)


class TopkAllgatherAlgorithm(BudgetedAlgorithm):
    """Blocks have a fixed size of k entries, so no sizes are exchanged."""

    def __init__(self, numel: int, k: int, encoding: Encoding = PLAIN, *, static: bool = False) -> None:
        super().__init__(numel)
        self.k = k
        self.encoding = encoding
        self.static = static
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        if acc.verdict is not None:
            return (yield from self._reduce_static(acc, acc.verdict, world_size))
        own = acc.top_k(self.k)
        rooms = [self.k] * world_size
        mean, sent = yield from all_gather_mean(own, rooms, self.encoding, acc, rank, world_size)
        acc.subtract(sent, rounded=self.encoding.rounds)
        self.report = rounding_figures(own, sent) if self.encoding.rounds else {}
        return mean

    def _reduce_static(self, acc: Accumulator, verdict: Verdict, world_size: int) -> Pattern[SparseVector]:
        """Do the same as :meth:`reduce` without waiting for a GPU before the verdict."""
        own, rows = acc.top_k_padded(self.k), self._rows(world_size, acc.device)
        verdict.check_gradient(own.values)
        message, sent = rows.encode(Padded(own.indices[None], own.values[None]), workspace=acc.workspace)
        gathered = (yield AllGather("all-gather", message[0])) if world_size > 1 else message
        lists, malformed = rows.decode(gathered, workspace=acc.workspace)
        verdict.check_messages(malformed)
        union = kernels.merge_rows(lists, self.numel, workspace=acc.workspace)
        verdict.check_sums(union.values)
        acc.subtract_padded(sent, rounded=rows.rounds)
        yield from verdict.settle(world_size)
        mean = union.values if rows.rounds else union.values / world_size
        return SparseVector.padded(union._replace(values=mean), self.numel)

    def _rows(self, world_size: int, device: torch.device) -> Rows:
        """Return the format of the messages of the static form: one section with room for k entries from each rank."""
        encoding = self.encoding if world_size > 1 else PLAIN
        lows = kernels.constant((0,) * world_size, device)
        return Rows(encoding, lows, self.numel, self.k, divisor=world_size if encoding.rounds else 1)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1) words in plain messages."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if self.static:
            words = self._rows(world_size, torch.device("cpu")).words
            gathered = both(cost.all_gather(words, cost.WORD, world_size))
            return with_verdict(Forecast({"all-gather": gathered}), world_size)
        return Forecast({"all-gather": both(cost.bruck(self.encoding.words(self.numel, self.k), world_size))})
