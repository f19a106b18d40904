"""The operations (:data:`Op`) that an exchange pattern yields. A scheduler performs them.

A pattern is a generator and never accesses the network itself. Point-to-point messages are one-dimensional int32
tensors, see :mod:`tritoncomm.primitives.packing`. All ranks must yield the same kinds of operations, with the same
phases, in the same order. A branch around an operation may therefore depend only on values that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import torch

from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Traffic

Result = TypeVar("Result")
Inbox = dict[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Round:
    """One exchange of point-to-point messages.

    ``sends`` maps each peer to its message (int32 ``[w]``). ``receives`` maps each peer to the expected length in
    words. Yielding a round returns the :data:`Inbox`, a dict from peer to int32 tensor. It has no entry for a peer that
    sends nothing. Empty messages are removed from both mappings. Both ends skip them, and none is posted.
    """

    phase: str
    sends: Mapping[int, torch.Tensor]
    receives: Mapping[int, int]

    def __post_init__(self) -> None:
        if 0 in map(torch.numel, self.sends.values()):
            object.__setattr__(self, "sends", {p: t for p, t in self.sends.items() if t.numel()})
        if 0 in self.receives.values():
            object.__setattr__(self, "receives", {p: w for p, w in self.receives.items() if w})


@dataclass(frozen=True, eq=False)
class Post:
    """Start a round without waiting for it. Yielding a post returns a :class:`Ticket`."""

    round: Round

    @property
    def phase(self) -> str:
        """The phase of the posted round."""
        return self.round.phase


@dataclass(frozen=True, eq=False)
class Ticket:
    """A posted round. ``token`` belongs to the scheduler that issued the ticket."""

    phase: str
    token: Any


@dataclass(frozen=True, eq=False)
class Wait:
    """Wait for a posted round. Yielding a wait returns the :data:`Inbox`."""

    ticket: Ticket

    @property
    def phase(self) -> str:
        """The phase of the posted round."""
        return self.ticket.phase


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum ``tensor`` over all ranks. It has the same shape and dtype on all ranks. Yielding it returns a new tensor."""

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row ``i`` of ``tensor`` (``[world_size]`` or ``[world_size, m]``) to rank ``i``.

    Yielding it returns a tensor of the same shape, with row ``i`` from rank ``i``.
    """

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Gather ``tensor`` (``[m]``, the same length on all ranks). Yielding it returns ``[world_size, m]``."""

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class InSubgroup:
    """Run ``pattern`` among ``ranks``. Inside the pattern, these ranks are numbered from 0.

    Yielding it returns the result of the pattern, or raises the error that the pattern raised. All ranks yield it
    together, each with the subgroup that it belongs to. All ranks of a subgroup pass the same ``ranks``, in ascending
    order.
    """

    phase: str
    ranks: tuple[int, ...]
    pattern: Generator[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Read:
    """Read ``tensor`` on the host, which waits for the GPU. Yielding it returns nested lists.

    Nothing is sent. A scheduler may read for several patterns at once, so that the host waits once for all of them.
    """

    phase: str
    tensor: torch.Tensor


Collective = AllReduce | AllToAll | AllGather
Op = Round | Post | Wait | InSubgroup | Collective | Read
OPERATIONS: tuple[type, ...] = get_args(Op)
# A pattern yields operations. It receives the reply to each (an Inbox, a Ticket, a tensor or a list), and returns a
# result.
Pattern = Generator[Op, Any, Result]


def no_operation(op: object) -> TypeError:
    """Return the error for ``op``, which a pattern has yielded, and whose class is none of :data:`OPERATIONS`."""
    kinds = ", ".join(each.__name__ for each in OPERATIONS)
    return TypeError(f"a pattern has yielded {op!r}, which is no operation: yield one of {kinds}")


def round_of(op: Op) -> Round:
    """Return the point-to-point messages of ``op``, an empty round for a collective, a wait or a subgroup."""
    if isinstance(op, Post):
        return op.round
    return op if isinstance(op, Round) else Round(op.phase, {}, {})


def traffic(op: Round | Collective, world_size: int) -> tuple[Traffic, Traffic]:
    """Return what a rank sends and receives in ``op``.

    The headers of messages count. Those of collectives, and what else a transport adds, do not.
    """
    match op:
        case Round():
            sent, received = map(torch.numel, op.sends.values()), op.receives.values()
            return cost.messages(len(op.sends), sum(sent)), cost.messages(len(op.receives), sum(received))
        case AllReduce():
            each = cost.all_reduce(op.tensor.numel(), op.tensor.itemsize, world_size)
        case AllToAll():
            each = cost.all_to_all(op.tensor.numel() // world_size, op.tensor.itemsize, world_size)
        case AllGather():
            each = cost.all_gather(op.tensor.numel(), op.tensor.itemsize, world_size)
    return each, each


def read(phase: str, tensor: torch.Tensor) -> Pattern[Any]:
    """Return ``tensor`` as nested lists. On a GPU this yields a :class:`Read`, and waits. On a CPU it does neither."""
    return tensor.tolist() if tensor.device.type == "cpu" else (yield Read(phase, tensor))
