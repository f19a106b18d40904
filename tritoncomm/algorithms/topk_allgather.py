"""Local top-k and all-gather: the simplest sparse exchange. Its volume grows with the number of workers.

It is "TopkA" in the comparison table of Ok-Topk: bandwidth 2k(P-1) words, latency log P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, EntryRecipe, Stateless, StaticRecipe
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.fixed_exchange import step_of
from tritoncomm.primitives.packing import PLAIN, Encoding
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern

_PHASE = "all-gather"


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

    carried_by = Carriers({"gather": _PHASE})

    def __init__(self, numel: int, k: int, encoding: Encoding = PLAIN, *, static: bool = False) -> None:
        super().__init__(numel)
        self.k = k
        self.encoding = encoding
        self.static = static
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        step = step_of(acc, self.encoding, rank, world_size)
        own = acc.top_k(self.k)
        union, sent = yield from step.union(_PHASE, own, [self.k] * world_size)
        acc.subtract(sent, rounded=step.encoding.rounds)
        step.count_rounding(own, sent)
        self.report = step.rounding()
        yield from step.settle()
        return step.vector(union)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1) words in plain messages."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if self.static:
            words = self.encoding.of_rows.words(self.numel, self.k)
            gathered = both(cost.all_gather(words, cost.WORD, world_size))
            return with_verdict(Forecast({_PHASE: gathered}), world_size, phase=_PHASE)
        return Forecast({_PHASE: both(cost.bruck(self.encoding.words(self.numel, self.k), world_size))})
