"""The static form of ExDyna: room for a fixed number of entries per rank, and counts that the host reads at the end.

See :mod:`tritoncomm.algorithms.exdyna` for the method, and :class:`~tritoncomm.algorithms.base.StaticRecipe` for the
form. The threshold and the borders of the partitions follow from the counts of all ranks, as in the exact form. The
counts are part of the message that the host reads for the threshold. The borders stay on the device, where the counts
are, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import checked_counts
from tritoncomm.primitives.packing import Encoding, Rows
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, AllReduce, Pattern
from tritoncomm_kernels import Padded


class Counts(NamedTuple):
    """Per rank, how many entries ``passed`` the threshold, and whether the accumulator has a non-zero (1 or 0)."""

    passed: list[int]
    non_zero: list[int]


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of the vector, int32, on one device. Nothing writes them after they were computed.

    ``blocks`` (``[P]``) is the number of blocks of each. ``bounds`` (``[P + 1]``) holds their first elements, and the
    end of the last one.
    """

    blocks: torch.Tensor
    bounds: torch.Tensor


class MessageFormat(NamedTuple):
    """The messages of a step: at most ``room`` indices of a vector with ``numel`` elements from each of the ranks.

    Every message has the span of the whole vector, because borders move. Its length therefore never changes.
    """

    encoding: Encoding
    numel: int
    room: int
    world_size: int

    def rows(self, device: torch.device) -> Rows:
        """Return the layout of the messages of all ranks. Each row covers the whole vector, from coordinate 0 on."""
        return Rows(self.encoding, kernels.constant((0,) * self.world_size, device), self.numel, self.room)

    @property
    def union(self) -> int:
        """Largest number of entries of all ranks."""
        return min(self.world_size * self.room, self.numel)

    @property
    def forecast(self) -> Forecast:
        """The exact traffic of one step."""
        words = self.rows(torch.device("cpu")).words
        gathered = both(cost.all_gather(words, cost.WORD, self.world_size))
        reduced = both(cost.all_reduce(self.union, cost.WORD, self.world_size))
        return with_verdict(Forecast({"indices": gathered, "values": reduced}), self.world_size, figures=2)


def exchange_static(
    acc: Accumulator, verdict: Verdict, messages: MessageFormat, *, threshold: float, span: torch.Tensor, step: int
) -> Pattern[tuple[SparseVector, Counts]]:
    """Do the same as the exact form, but each rank sends at most ``messages.room`` entries, its largest ones.

    ``span`` holds the bounds of this rank's partition on the device, int32 ``[2]``. Its entries above ``threshold``
    that have no room stay in the residual.
    """
    world_size, held = messages.world_size, acc.workspace
    extremes = torch.stack(torch.aminmax(acc.dense()))  # one pass over the vector finds NaN, Inf and non-zeros
    verdict.check_gradient(extremes)
    own, passed = _select(acc, threshold, span, messages.room)
    rows = messages.rows(acc.device)
    message, _ = rows.encode(Padded(own.indices[None], own.values[None]), workspace=held)
    gathered = (yield AllGather("indices", message[0])) if world_size > 1 else message
    lists, malformed = rows.decode(gathered, workspace=held)
    verdict.check_messages(malformed)
    # Rank r selects in partition (step + r) mod P. In partition order the indices ascend.
    lists = lists._replace(indices=torch.roll(lists.indices, step % world_size, 0))
    union = kernels.joined(lists, workspace=held).indices[: messages.union]
    verdict.check_messages(_descents(union))
    sums = kernels.values_at(acc.dense(), union)
    if world_size > 1:
        sums = yield AllReduce("values", sums)
    verdict.check_sums(sums)
    acc.subtract_padded(Padded(union, sums), rounded=False)  # every rank contributed its value at every index
    non_zero = (extremes != 0).any().to(torch.int32).reshape(1)
    figures = yield from verdict.settle(world_size, [passed, non_zero])
    counts = Counts(*(list(column) for column in zip(*figures, strict=True)))
    checked_counts("verdict", counts.passed, acc.numel)  # the next borders depend on them
    return SparseVector.padded(Padded(union, sums / world_size), acc.numel), counts


def _select(acc: Accumulator, threshold: float, span: torch.Tensor, room: int) -> tuple[Padded, torch.Tensor]:
    """Return the largest entries inside ``span`` that reach the threshold, ``[room]``, and how many reach it."""
    values, held = acc.dense(), acc.workspace
    # In fp64 first, because a threshold above the fp32 range means Inf.
    reach = torch.full((1,), threshold, dtype=torch.float64, device=acc.device).float()
    budget = kernels.constant((room,), acc.device)
    largest = kernels.top_k_rows(values, span, budget, room, workspace=held).row(0)
    passed = kernels.count_inside(values, reach, span, workspace=held)
    return kernels.reaching(largest, reach, workspace=held), passed


def _descents(indices: torch.Tensor) -> torch.Tensor:
    """Return how many of ``indices`` do not ascend, int32 ``[1]``. Padding, which stands at the end, does not count."""
    before, after = indices[:-1], indices[1:]
    return ((after <= before) & (after >= 0)).sum(dtype=torch.int32).reshape(1)
