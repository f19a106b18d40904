"""gTop-k: a tree that merges sparse vectors and reduces every sum to its k largest entries.

S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019, extended to any number of workers. The paper returns entries outside the final k to the workers that sent
them. This loses a partial sum that was dropped inside the tree if its coordinate is in the final k. Here the worker
that drops an entry keeps it in its residual, so nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from tritoncomm.algorithms.base import Bounds, BudgetedAlgorithm, Recipe, Stateless
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.packing import PLAIN
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Forecast
from tritoncomm.scheduler.rounds import Inbox, Pattern, Round

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries


@dataclass(frozen=True, kw_only=True)
class GTopk(Recipe):
    """Deliver exactly k entries. They are not always the k largest sums, because each merge sees only its subtree."""

    name: ClassVar[str] = "gtopk"
    averages_when_dense: ClassVar[bool] = True

    def build(self, numel: int, bounds: Bounds = ()) -> GTopkAlgorithm:
        return GTopkAlgorithm(numel, entries_to_keep(numel, self.density))


class GTopkAlgorithm(BudgetedAlgorithm):
    """Reduce along a binomial tree to rank 0 and broadcast back. Messages have a fixed size, so no sizes are exchanged.

    Workers beyond the largest power of two send their entries to a partner first, and receive the result last.
    """

    def __init__(self, numel: int, k: int) -> None:
        super().__init__(numel)
        self.k = k
        self.state = Stateless()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`.

        A NaN or Inf is larger than all other magnitudes. It is therefore never dropped and reaches all ranks.
        """
        if self.goes_dense:
            return (yield from dense_exchange(acc, world_size))
        merged = acc.top_k(self.k)
        acc.clear(merged.indices)
        edges = tree(world_size)
        to_parent = PLAIN.section(0, self.numel, self.k)
        for pairs in edges:
            message = to_parent.encode(merged.indices, merged.values)[0] if rank in pairs else None
            inbox = yield from _step("reduce", message, to_parent.words, pairs, rank)
            for peer, arrived in inbox.items():
                assert rank < peer, "messages go to the lower rank"
                union = kernels.merge([merged, to_parent.decode(arrived)], self.numel)
                merged = kernels.largest(union, self.k)
                cut = torch.ones(union.room, dtype=torch.bool, device=acc.device)
                cut[kernels.common_positions(union.indices, merged.indices)] = False
                dropped = Entries(union.indices[cut], union.values[cut])
                acc.add(dropped.indices, dropped.values)
                if kernels.has_non_finite(acc.dense()[dropped.indices.long()]):  # NaN reaches all ranks, and all reject
                    merged = merged._replace(values=torch.full_like(merged.values, torch.nan))
        # Rank 0 packs the result once. The others forward its message, so all ranks decode the same bits.
        result = PLAIN.section(0, self.numel, self.k, divisor=world_size)
        message = result.encode(merged.indices, merged.values)[0] if rank == 0 else None
        for pairs in reversed(edges):
            downwards = {parent: child for child, parent in pairs.items()}
            inbox = yield from _step("broadcast", message, result.words, downwards, rank)
            message = next(iter(inbox.values()), message)
        assert message is not None
        mean = result.decode(message)
        if kernels.has_non_finite(mean.values):  # all ranks hold the same entries
            raise NonFiniteError(REJECTED)
        return SparseVector(mean.indices, mean.values, self.numel)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. A message has 2k words.

        A rank sends its sum once and receives the result once. Rank 0, the busiest, receives a sum and then sends the
        result in every level, and nothing else.
        """
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        if world_size == 1:
            return Forecast({})
        levels = cost.log2(world_size)
        words = PLAIN.words(self.numel, self.k)
        one, every = cost.messages(1, words), cost.messages(levels, words * levels)
        if ordinary:
            return Forecast({"reduce": Flow(received=every), "broadcast": Flow(sent=every)})
        return Forecast({"reduce": Flow(one, every), "broadcast": Flow(every, one)})


def _step(phase: str, message: torch.Tensor | None, words: int, pairs: dict[int, int], rank: int) -> Pattern[Inbox]:
    """Run one level of the tree. ``pairs`` maps senders to receivers. Other ranks take part without a message."""
    sends = {pairs[rank]: message} if rank in pairs and message is not None else {}
    receives = {sender: words for sender, receiver in pairs.items() if receiver == rank}
    inbox: Inbox = yield Round(phase, sends, receives)
    return inbox


def tree(world_size: int) -> list[dict[int, int]]:
    """Return the levels of the reduction tree, leaves first. Rank 0 is the root. A level maps senders to receivers."""
    core = 1 << (world_size.bit_length() - 1)
    fold = {rank: rank - core for rank in range(core, world_size)}
    halves = [1 << s for s in range(core.bit_length() - 1)]
    levels = [{rank + half: rank for rank in range(0, core, 2 * half)} for half in halves]
    return [fold, *levels] if fold else levels
