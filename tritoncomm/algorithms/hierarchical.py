"""Exchange dense inside nodes and sparse between nodes.

Fast links carry all values, and slow links carry only the selected ones.

The workers of a node sum their gradients and divide the vector among themselves. Each worker exchanges its part with
the workers of the same local rank in the other nodes, and keeps the residual of this part. Every network card is thus
in use. A vector crosses between nodes once per node, not once per worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Bounds, check, check_at_least
from tritoncomm.algorithms.wrapper import WrapperAlgorithm, WrapperRecipe
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives import packing
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange, gather_blocks, share_rows
from tritoncomm.primitives.packing import quotients
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, AllReduce, InSubgroup, Pattern
from tritoncomm_kernels import Entries

_SUM, _COUNTS, _GATHER, _BETWEEN = "node sum", "node counts", "node gather", "between nodes"


@dataclass(frozen=True, kw_only=True)
class Hierarchical(WrapperRecipe):
    """Apply ``recipe`` between nodes of ``node_size`` workers each. Consecutive ranks are in one node."""

    name: ClassVar[str] = "hierarchical"
    node_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "recipe", not isinstance(self.recipe, Hierarchical), "must not be a Hierarchical itself")
        check_at_least(self, 1, "node_size", whole=True)

    def check_world_size(self, world_size: int) -> None:
        if world_size == 1:
            return
        if world_size % self.node_size:
            raise ConfigurationError(
                f"world_size={world_size} is not a multiple of node_size={self.node_size}: nodes must be equally large"
            )
        self.recipe.check_world_size(world_size // self.node_size)

    def subgroups(self, world_size: int) -> list[tuple[int, ...]]:
        """See :meth:`Recipe.subgroups`. Returns the nodes, and for each local rank its workers in all nodes."""
        if world_size == 1:
            return []
        size = self.node_size
        nodes = [tuple(range(first, first + size)) for first in range(0, world_size, size)]
        return nodes + [tuple(range(local, world_size, size)) for local in range(size)]

    def build(self, numel: int, bounds: Bounds = ()) -> HierarchicalAlgorithm:
        return HierarchicalAlgorithm(self, numel)


class HierarchicalAlgorithm(WrapperAlgorithm):
    """Run the inner algorithm on this worker's part of the vector."""

    def __init__(self, recipe: Hierarchical, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self._share = -(-numel // recipe.node_size)
        self.inner = recipe.recipe.build(self._share)  # for one part, of which all are padded to the same size

    @property
    def has_shared_verdict(self) -> bool:
        """See :attr:`Algorithm.has_shared_verdict`. Those who share a part do. A dense step has no verdict."""
        return self.is_static and self.inner.has_shared_verdict

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        if world_size == 1:
            return (yield from dense_exchange(acc, world_size))
        size = self.recipe.node_size
        local, nodes = rank % size, world_size // size
        node, rail = tuple(range(rank - local, rank - local + size)), tuple(range(local, world_size, size))
        start = local * self._share
        # Padding makes all parts equally long, so all workers of a node run the same inner algorithm.
        padding = size * self._share - self.numel
        own = slice(start, start + self._share)
        held = torch.nn.functional.pad(acc.residual, (0, padding))
        residual = held[own].clone()
        # The residual of the own part enters the inner exchange, not the node sum. Outside the own part the residual
        # is zero, unless an earlier layout left values there.
        held[own] = 0.0
        total = held + torch.nn.functional.pad(acc.gradient.float(), (0, padding))
        if size > 1:
            total = yield InSubgroup(_SUM, node, _sum(total))
        part = total[own].clone()
        # All workers of the node put NaN there, so all workers of all nodes reject the step.
        if acc.verdict is not None:
            part = torch.where((total - total == 0).all(), part, torch.nan)
        elif kernels.has_non_finite(total):
            part.fill_(torch.nan)
        left = torch.empty_like(part)
        inner = Accumulator(residual, part, left, acc.guesses, acc.verdict)
        mean, rejected = SparseVector(part[:0].view(torch.int32), part[:0], self._share), False
        try:
            mean = yield InSubgroup(_BETWEEN, rail, self.inner.reduce(inner, rank // size, nodes))
        except NonFiniteError:
            rejected = True
        self.report = self.inner.report
        kept = max(0, min(self._share, self.numel - start))
        inside = (mean.indices >= 0) & (mean.indices < kept)  # neither padding of a list nor of the vector
        found, exact = Entries(mean.indices + start, quotients(mean.values, size)).only(inside), acc.verdict is None
        if exact:
            found = found.trimmed()
        if size > 1:
            gather = _gather(found, not rejected, self.numel, local, size, exact=exact)
            found = yield InSubgroup(_GATHER, node, gather)
        elif rejected:
            raise NonFiniteError(REJECTED)
        acc.clear_all()
        acc.replace_range(start, left[:kept])
        acc.absorb(inner)
        if not exact:
            found = kernels.joined(found).slice(0, self.numel)
        return acc.vector(found)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        size = self.recipe.node_size
        between = self.inner.predicted_traffic(max(1, world_size // size), ordinary=ordinary)
        if size == 1:
            return between
        words = 2 * self._share
        gathered = cost.all_gather(words, cost.WORD, size) if self.is_static else cost.bruck(words, size)
        return Forecast(
            {
                **between.phases,
                _SUM: both(cost.all_reduce(size * self._share, cost.WORD, size)),
                _COUNTS: both(cost.all_gather(1, 2 * cost.WORD, size)),
                _GATHER: both(gathered),  # upper bound: all entries are delivered
            }
        )

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`. Parts move to other workers, so only the common state is kept."""
        self.inner.migrate([], share, common)

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`. It is empty, because each part of the vector has its own state."""
        return {}


def _sum(total: torch.Tensor) -> Pattern[torch.Tensor]:
    summed: torch.Tensor = yield AllReduce(_SUM, total)
    return summed


def _gather(block: Entries, finite: bool, numel: int, rank: int, size: int, *, exact: bool) -> Pattern[Entries]:
    """Return the entries of all workers of the node, with padding unless ``exact``."""
    own = [len(block.indices)]
    try:
        (counts,) = yield from share_rows(own, finite, size, block.values.device, phase=_COUNTS, limit=numel)
    except NonFiniteError:  # its ranks are local to the node, and the NaN or Inf may be in another node
        raise NonFiniteError(REJECTED) from None
    if exact:
        return (yield from gather_blocks(block, counts, numel, rank, size, phase=_GATHER))
    rows = yield AllGather(_GATHER, packing.encode(*block.padded(max(counts))))
    return Entries.join([packing.decode(row) for row in rows])
