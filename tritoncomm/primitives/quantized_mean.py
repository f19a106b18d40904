"""The mean over ranks of a dense vector whose values travel in 1 to 8 bits, with error feedback.

A reduce-scatter and an all-gather, both of quantized values. Each rank owns one part of the vector. What quantization
cuts off stays in the residual: of a rank's own values, and of the mean that it sends as an owner. Compressing both
directions with an error at the worker and one at the server follows "DoubleSqueeze" (H. Tang et al., ICML 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, rotate
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict, check_same
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, both
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Pattern
from tritoncomm_kernels import Entries, dense_bits
from tritoncomm_kernels.formats import Format

_LEAST = 2.0**-149  # the smallest magnitude that is not zero
_TOO_LARGE = (
    "a gradient, or the mean of the gradients, has a NaN or Inf, or is about 2**104 or larger, which quantized values "
    "cannot hold; nothing was applied. For finite gradients as large as that, pass small='fp32' and values='fp32'"
)
BUCKET = 8  # messages of a rank that are in transit at a time
Edit = Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


class QuantizedMean(NamedTuple):
    """The mean over ranks of dense values, which travel as levels of ``fmt``: see :mod:`tritoncomm_kernels.dense_bits`.

    What is cut off from a value stays with the rank that has rounded it. The mean is the same on all ranks, to the bit.
    World size times mean plus all residuals is the sum of the values on all ranks, if sums and differences fit into
    fp32; otherwise each rounds once. A rank's values in its own part are not rounded. Ranks are added in order, in
    fp64, and the owner of a part rounds in units of the mean. A single worker sends nothing and has no residual.

    ``phase`` begins the names of both phases. ``collective`` sends by an all-to-all and an all-gather instead of
    messages between two ranks, of which ``width`` are in transit at a time.

    All ranks raise :class:`~tritoncomm.NonFiniteError` if any rank holds a NaN or Inf. Values that are too large for
    the format count as such. With a verdict, this is reported there instead, and nothing waits for a GPU.
    """

    fmt: Format
    phase: str
    collective: bool = False
    width: int = BUCKET

    def of(
        self, values: torch.Tensor, rank: int, world_size: int, verdict: Verdict | None = None
    ) -> Pattern[tuple[torch.Tensor, torch.Tensor]]:
        """Return the mean over ranks of ``values`` (fp32 ``[m]``), and this rank's residual (fp32 ``[m]``)."""
        if world_size == 1 or not values.shape[0]:
            return _checked(values.clone(), verdict), torch.zeros_like(values)
        left = values.clone()
        blocks = yield from self._blocks(lambda work: work(left), rank, world_size)
        mean = kernels.read_parts(blocks, values.shape[0], self.fmt)
        return _checked(mean, verdict), left

    def deliver(self, acc: Accumulator, indices: torch.Tensor, rank: int, world_size: int) -> Pattern[SparseVector]:
        """Return the mean over ranks at ``indices`` (int32, the same on all ranks), and leave the residual in ``acc``.

        A coordinate whose mean is rounded to zero is not delivered: it still waits. A NaN or Inf at any coordinate,
        also at others, is an error on all ranks.
        """
        mean, left = yield from self.of(acc.values_or_nan(indices), rank, world_size, acc.verdict)
        acc.replace(indices, left)
        acc.selected = indices.numel()
        if acc.verdict is not None:
            yield from acc.verdict.settle(world_size)
            return acc.vector(kernels.reaching(Entries(indices, mean), _LEAST))
        delivered = mean.nonzero()[:, 0]
        return acc.vector(Entries(indices[delivered], mean[delivered]))

    def deliver_all(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """Return the mean over ranks at every coordinate, and leave the residual in ``acc``.

        The sum of ``acc`` is rounded in place. Coordinates whose mean is rounded to zero count as delivered.
        """
        if world_size == 1 or not acc.numel:
            mean = _checked(acc.dense().clone(), acc.verdict)
            acc.clear_all()
        else:
            blocks = yield from self._blocks(acc.edit, rank, world_size)
            _checked(dense_bits.scales_of(blocks, acc.numel, self.fmt).view(-1), acc.verdict)
            mean = kernels.read_parts(blocks, acc.numel, self.fmt)
        if acc.verdict is not None:
            yield from acc.verdict.settle(world_size)
        return SparseVector.full(mean)

    def _blocks(self, edit: Edit, rank: int, world_size: int) -> Pattern[torch.Tensor]:
        """Return the rounded means of all parts (int32 ``[world_size, words]``), by their owner.

        ``edit`` gives its argument the values of this rank, and leaves their residual in place of them.
        """
        messages = edit(lambda values: kernels.round_parts(values, world_size, rank, self.fmt))

        def average(arrived: torch.Tensor) -> torch.Tensor:
            return edit(lambda values: kernels.round_mean(arrived, values, rank, self.fmt))

        scatter, gather = f"{self.phase}-scatter", f"{self.phase}-gather"
        if self.collective:
            arrived = yield AllToAll(scatter, messages)
            gathered: torch.Tensor = yield AllGather(gather, average(arrived))
            return gathered
        arrived = yield from _scattered(messages, rank, world_size, self.width, scatter)
        lengths, block = [messages.shape[1]] * world_size, average(arrived)
        return torch.stack((yield from bruck_all_gather(block, lengths, rank, world_size, phase=gather)))

    def traffic(self, numel: int, world_size: int) -> dict[str, Flow]:
        """Return the traffic for ``numel`` values by phase. It is exact."""
        if world_size == 1 or not numel:
            return {}
        words = dense_bits.words(dense_bits.part_length(numel, world_size), self.fmt)
        peers = world_size - 1
        if self.collective:
            scattered = gathered = both(cost.all_gather(words, cost.WORD, world_size))
        else:
            scattered, gathered = both(cost.messages(peers, peers * words)), both(cost.bruck(words, world_size))
        return {f"{self.phase}-scatter": scattered, f"{self.phase}-gather": gathered}


def _scattered(messages: torch.Tensor, rank: int, world_size: int, width: int, phase: str) -> Pattern[torch.Tensor]:
    """Send row r of ``messages`` to rank r. Return the row from each rank, by rank."""
    arrived = {rank: messages[rank]}
    peers = [peer for peer in range(world_size) if peer != rank]
    sends, receives = {peer: messages[peer] for peer in peers}, dict.fromkeys(peers, messages.shape[1])
    yield from rotate(sends, receives, arrived.update, rank, world_size, width=width, phase=phase)
    return torch.stack([arrived[source] for source in range(world_size)])


def _checked(mean: torch.Tensor, verdict: Verdict | None) -> torch.Tensor:
    check_same(mean, verdict, _TOO_LARGE)
    return mean
