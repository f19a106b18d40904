"""The mean over ranks of a dense vector whose values travel in 8 or 4 bits, with error feedback.

A reduce-scatter and an all-gather, both of quantized values. Each rank owns one part of the vector. It returns what
quantization cut off, for the residual: of its own values, and of the mean that it sends as an owner. Compressing both
directions with an error at the worker and one at the server follows "DoubleSqueeze" (H. Tang et al., ICML 2019).
"""

from __future__ import annotations

import torch

import tritoncomm_kernels as kernels
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives import block_float
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather, rotate
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, both
from tritoncomm.scheduler.rounds import Inbox, Pattern

FORMATS = ("fp32", "8bit", "4bit")
BITS = {"8bit": 8, "4bit": 4}
_BUCKET = 8  # messages of a rank that are in transit at a time


def quantized_mean(
    values: torch.Tensor, rank: int, world_size: int, *, bits: int, phase: str, finite: bool = True
) -> Pattern[tuple[torch.Tensor, torch.Tensor]]:
    """Return the mean over ranks of ``values`` (fp32 ``[m]``), and this rank's residual (fp32 ``[m]``).

    The mean is the same on all ranks, to the bit. World size times mean plus all residuals is the sum of ``values`` on
    all ranks. A residual is exact, except that the owner of a part rounds its own once to fp32. A rank's values in its
    own part are not quantized. Ranks are added in order, in fp64. A single worker sends nothing and has no residual.

    ``bits`` is 8 or 4. All ranks raise :class:`~tritoncomm.NonFiniteError` if any rank holds a NaN or Inf, or is not
    ``finite``, for a NaN or Inf elsewhere. Values that :func:`~tritoncomm.primitives.block_float.encode` cannot
    represent count as such.
    """
    if not finite:
        values = torch.full_like(values, torch.nan)
    if world_size == 1 or not values.numel():
        return _checked(values.clone()), torch.zeros_like(values)
    length = -(-values.numel() // world_size)
    padded = torch.nn.functional.pad(values.double(), (0, world_size * length - values.numel()))
    parts = padded.view(world_size, length)
    messages = block_float.encode(parts, bits)
    words, arrived = messages.shape[1], {rank: messages[rank]}

    def keep(inbox: Inbox) -> None:
        arrived.update(inbox)

    peers = [peer for peer in range(world_size) if peer != rank]
    yield from rotate(
        {peer: messages[peer] for peer in peers},
        dict.fromkeys(peers, words),
        keep,
        rank,
        world_size,
        width=_BUCKET,
        phase=f"{phase}-scatter",
    )
    received = block_float.decode(torch.stack([arrived[source] for source in range(world_size)]), length, bits)
    received[rank] = parts[rank]
    total = kernels.sum_rows(received)
    block = block_float.encode((total / world_size)[None], bits)[0]
    lengths = [words] * world_size
    blocks = yield from bruck_all_gather(block, lengths, rank, world_size, phase=f"{phase}-gather")
    means = block_float.decode(torch.stack(blocks), length, bits)
    residual = parts - block_float.decode(messages, length, bits)
    residual[rank] = total - world_size * means[rank]
    mean, left = (rows.view(-1)[: values.numel()].float() for rows in (means, residual))
    return _checked(mean), left


def deliver_quantized(
    acc: Accumulator, indices: torch.Tensor, finite: bool, rank: int, world_size: int, *, bits: int, phase: str
) -> Pattern[SparseVector]:
    """Return the mean over ranks at ``indices`` (int32, the same on all ranks), and leave the residual in ``acc``.

    See :func:`quantized_mean`. A coordinate whose mean is rounded to zero is not delivered: it still waits.
    """
    own = acc.dense()[indices.long()]
    mean, left = yield from quantized_mean(own, rank, world_size, bits=bits, phase=phase, finite=finite)
    acc.replace(indices, left)
    delivered = mean != 0
    return SparseVector(indices[delivered], mean[delivered], acc.numel)


def traffic(numel: int, world_size: int, *, bits: int, phase: str) -> dict[str, Flow]:
    """Return the traffic of :func:`quantized_mean` for ``numel`` values by phase. It is exact."""
    if world_size == 1 or not numel:
        return {}
    words = block_float.words(-(-numel // world_size), bits)
    peers = world_size - 1
    return {
        f"{phase}-scatter": both(cost.messages(peers, peers * words)),
        f"{phase}-gather": both(cost.bruck(words, world_size)),
    }


def _checked(mean: torch.Tensor) -> torch.Tensor:
    if kernels.has_non_finite(mean):
        raise NonFiniteError(
            "a gradient, or the mean of the gradients, has a NaN or Inf or is too large; nothing was applied"
        )
    return mean
