"""Collectives on ``torch.distributed``: short ones are messages on a CPU, and the backend performs all others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Collective, Round

# Bytes and ranks of a collective that is a message to each other rank on a CPU. All messages are under way at once,
# and those of gloo's rings follow one another. But each takes work: with 16 ranks, a ring is faster without a delay.
SMALL, FEW = 2048, 8
# The name of the collective since PyTorch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The last collective of this process is kept until the next one starts. A collective from a backward pass holds a
# Python object. If a gloo thread releases it last, while the interpreter exits, the process ends with SIGABRT.
_last: list[Any] = []


def perform(op: Collective, messages: Messages, frame: wire.Frame) -> torch.Tensor:
    """Return the result of ``op`` on this rank. ``frame`` is the header of its ``messages``, in whose group it is."""
    tensor, group = op.tensor.contiguous(), messages.group
    is_short = 0 < tensor.nbytes <= SMALL and tensor.element_size() % cost.WORD == 0
    if is_short and messages.world_size <= FEW and messages.uses_gloo:
        return _by_messages(op, tensor, messages, frame)
    if isinstance(op, AllReduce):
        result = tensor.clone()
        work = dist.all_reduce(result, group=group, async_op=True)
    elif isinstance(op, AllToAll):
        result = torch.empty_like(tensor)
        work = dist.all_to_all_single(result, tensor, group=group, async_op=True)
    else:
        assert isinstance(op, AllGather)
        result = tensor.new_empty(messages.world_size, tensor.numel())
        work = _all_gather(result.view(-1), tensor, group=group, async_op=True)
    _last[:] = [work]  # before the wait, which may fail: the process may exit then
    messages.wait_for(work)
    return result


def _by_messages(op: Collective, tensor: torch.Tensor, messages: Messages, frame: wire.Frame) -> torch.Tensor:
    """Send a message to each rank. All are under way at once. Ranks are added in order."""
    rank, world_size = messages.rank, messages.world_size
    words = tensor.view(-1).view(torch.int32)
    parts = words.chunk(world_size) if isinstance(op, AllToAll) else [words] * world_size
    peers = [peer for peer in range(world_size) if peer != rank]
    round_ = Round(op.phase, {peer: parts[peer] for peer in peers}, {peer: parts[peer].numel() for peer in peers})
    arrived = messages.wait(messages.post(round_, frame)) | {rank: parts[rank]}
    rows = torch.stack([arrived[peer] for peer in range(world_size)]).view(tensor.dtype)
    if isinstance(op, AllGather):
        return rows
    if isinstance(op, AllToAll):
        return rows.view(tensor.shape)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.view(tensor.shape)
