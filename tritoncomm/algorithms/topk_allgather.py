"""Local top-k and all-gather: the simplest sparse exchange. Its volume grows with the number of workers.

It is "TopkA" in the comparison table of Ok-Topk: bandwidth 2k(P-1) words, latency log P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tritoncomm.algorithms.base import BudgetedAlgorithm, EntryRecipe, Stateless
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import all_gather_mean, dense_exchange
from tritoncomm.primitives.selection import entries_to_keep, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.static_gather import all_gather_mean_static, rows_of, static_traffic
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.wire import PLAIN, Encoding


@dataclass(frozen=True, kw_only=True)
class TopkAllgather(EntryRecipe):
    """Send the k largest entries of every worker to all workers. The union is delivered."""

    name: ClassVar[str] = "topk_allgather"
    averages_when_dense: ClassVar[bool] = True
    has_static_form: ClassVar[bool] = True

    def build(self, numel: int) -> TopkAllgatherAlgorithm:
        """See :meth:`Recipe.build`."""
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
        """See :meth:`Algorithm.reduce`."""
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
        rows = rows_of(self.encoding, self.numel, self.k, world_size, acc.device)
        mean, sent = yield from all_gather_mean_static(acc.top_k_padded(self.k), rows, acc, verdict, world_size)
        acc.subtract_padded(sent, rounded=rows.rounds)
        yield from verdict.settle(world_size)
        return mean

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1) words in plain messages."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if self.static:
            return static_traffic(self.encoding, self.numel, self.k, world_size)
        return Forecast({"all-gather": both(cost.bruck(self.encoding.words(self.numel, self.k), world_size))})
