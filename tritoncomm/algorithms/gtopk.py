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

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, Recipe, Stateless
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.selection import entries_to_keep, left_out
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.cost import Forecast, Formula, both
from tritoncomm.scheduler.rounds import Inbox, Pattern, Round
from tritoncomm_kernels import Selection


@dataclass(frozen=True, kw_only=True)
class GTopk(Recipe):
    """Deliver exactly k entries. They are not always the k largest sums, because each merge sees only its subtree."""

    name: ClassVar[str] = "gtopk"

    def formula(self, numel: int, world_size: int) -> Formula:
        """See :meth:`Recipe.formula`."""
        words = 4 * entries_to_keep(numel, self.density) * cost.log2(world_size)
        return Formula(2 * cost.log2(world_size), words, words)

    def build(self, numel: int) -> GTopkAlgorithm:
        """See :meth:`Recipe.build`."""
        return GTopkAlgorithm(numel, entries_to_keep(numel, self.density))


class GTopkAlgorithm(Algorithm):
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
        if self.k >= self.numel:
            return (yield from dense_exchange(acc, world_size))
        own = acc.top_k(self.k)
        acc.clear(own.indices)
        merged, edges = own, tree(world_size)
        for pairs in edges:
            inbox = yield from self._step("reduce", merged, pairs, rank)
            for peer, message in inbox.items():
                assert rank < peer, "messages go to the lower rank"
                lists = [merged[:2], self._entries(message)]
                union = Selection.of(*kernels.merge(lists, self.numel, workspace=self.workspace))
                merged = kernels.largest(union, self.k, workspace=self.workspace)
                cut = left_out(union, merged)
                acc.add(cut.indices, cut.values)
                if kernels.has_non_finite(acc.dense()[cut.indices.long()]):
                    # The residual would overflow. NaN values reach all ranks, so that all reject the step.
                    merged = merged._replace(values=torch.full_like(merged.values, torch.nan))
        for pairs in reversed(edges):
            inbox = yield from self._step("broadcast", merged, {parent: child for child, parent in pairs.items()}, rank)
            for message in inbox.values():
                merged = Selection.of(*self._entries(message))
        if kernels.has_non_finite(merged.values):  # all ranks hold the same entries
            raise NonFiniteError("a gradient, or a sum of gradients, has a NaN or Inf; nothing was applied")
        return SparseVector(merged.indices, merged.values / world_size, self.numel)

    def _step(self, phase: str, entries: Selection, pairs: dict[int, int], rank: int) -> Pattern[Inbox]:
        """Run one level of the tree. ``pairs`` maps senders to receivers. Other ranks take part without a message."""
        words = 2 * self.k
        sends = {pairs[rank]: wire.pack_padded(entries.indices, entries.values, words)} if rank in pairs else {}
        receives = {sender: words for sender, receiver in pairs.items() if receiver == rank}
        inbox: Inbox = yield Round(phase, sends, receives)
        return inbox

    def _entries(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = wire.unpack_padded(message)
        wire.check_indices(indices, 0, self.numel)
        return indices, values

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. Rank 0 takes part in every level, with 2k words each."""
        if self.k >= self.numel:
            return cost.dense(self.numel, world_size)
        levels = cost.log2(world_size)
        phase = both(cost.messages(levels, 2 * self.k * levels))
        return Forecast({"reduce": phase, "broadcast": phase})


def tree(world_size: int) -> list[dict[int, int]]:
    """Return the levels of the reduction tree, leaves first. Rank 0 is the root. A level maps senders to receivers."""
    core = 1 << (world_size.bit_length() - 1)
    fold = {rank: rank - core for rank in range(core, world_size)}
    halves = [1 << s for s in range(core.bit_length() - 1)]
    levels = [{rank + half: rank for rank in range(0, core, 2 * half)} for half in halves]
    return [fold, *levels] if fold else levels
