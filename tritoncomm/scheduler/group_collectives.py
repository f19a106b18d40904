"""Collectives on ``torch.distributed``: short ones are messages on a CPU, and the backend performs all others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.scheduler import cost, wire
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Collective

# A collective on a CPU consists of messages if its tensor, and those of all ranks together, have at most so many bytes.
# A rank sends up to 7 messages at once, and passes on what it has received in the next round: two rounds for up to 64
# ranks. In gloo's rings, one message or two for each rank follow one another.
SMALL, SMALL_TOGETHER, RADIX = 2048, 65536, 8
# The name of the collective since PyTorch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The last collective of this process is kept until the next one starts. A collective from a backward pass holds a
# Python object. If a gloo thread releases it last, while the interpreter exits, the process ends with SIGABRT.
_last: list[Any] = []


def perform(op: Collective, messages: Messages, frame: wire.Frame) -> torch.Tensor:
    """Return the result of ``op`` on this rank. ``frame`` is the header of its ``messages``, in whose group it is."""
    tensor = op.tensor.contiguous()
    if messages.uses_gloo and _is_short(op, messages.world_size):
        return _by_messages(op, tensor, messages, frame)
    group = messages.group
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


def _is_short(op: Collective, world_size: int) -> bool:
    """Return whether ``op`` consists of messages on a CPU. gloo's all-to-all is one round for any number of ranks."""
    whole = op.tensor.itemsize % cost.WORD == 0  # messages have words
    at_once = world_size <= RADIX or not isinstance(op, AllToAll)
    return whole and at_once and 0 < op.tensor.nbytes <= min(SMALL, SMALL_TOGETHER // world_size)


def _by_messages(op: Collective, tensor: torch.Tensor, messages: Messages, frame: wire.Frame) -> torch.Tensor:
    """Return the result of a short collective. Ranks are added in order."""
    words, world_size = tensor.view(-1).view(torch.int32), messages.world_size
    if isinstance(op, AllToAll):
        parts, rank = words.chunk(world_size), messages.rank
        sends = {peer: part for peer, part in enumerate(parts) if peer != rank}
        receives = dict.fromkeys(sends, parts[rank].shape[0])
        arrived = messages.wait(messages.post(sends, receives, frame)) | {rank: parts[rank]}
        return torch.stack([arrived[peer] for peer in range(world_size)]).view(tensor.dtype).view(tensor.shape)
    rows = torch.stack(_gathered(words, messages, frame)).view(tensor.dtype)
    if isinstance(op, AllGather):
        return rows
    total = rows[0].clone()
    for peer in range(1, world_size):
        total += rows[peer]
    return total.view(tensor.shape)


def _gathered(words: torch.Tensor, messages: Messages, frame: wire.Frame) -> list[torch.Tensor]:
    """Return the ``words`` of each rank. Their number is the same on all ranks.

    This is the algorithm of Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
    Message-Passing Systems", for :data:`RADIX` - 1 ports.
    """
    rank, world_size, size = messages.rank, messages.world_size, words.shape[0]
    held = [words]  # by distance: of this rank, of the next one, ...
    while (have := len(held)) < world_size:
        hops = range(have, min(RADIX * have, world_size), have)
        sends = {(rank - hop) % world_size: torch.cat(held[: world_size - hop]) for hop in hops}
        receives = {(rank + hop) % world_size: min(have, world_size - hop) * size for hop in hops}
        arrived = messages.wait(messages.post(sends, receives, frame))
        for hop in hops:
            held += arrived[(rank + hop) % world_size].view(-1, size).unbind()
    return [held[(peer - rank) % world_size] for peer in range(world_size)]
