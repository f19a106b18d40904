"""The words an exchange pattern may yield. A pattern never touches the network itself.

Point-to-point messages are one-dimensional int32 tensors, packed by :mod:`tritoncomm.scheduler.wire`.
All ranks must yield the same kind of word with the same phase in the same order; every branch that
guards one may therefore depend only on what all ranks know.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Inbox = dict[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Round:
    """One symmetric exchange: ``sends`` to peers, and how many words to expect from which peer.

    Yielding it gives the :data:`Inbox`, peer -> int32 tensor, without the peers that send nothing.
    Empty messages are dropped here, so that both ends skip them and none is ever posted.
    """

    phase: str
    sends: Mapping[int, torch.Tensor]
    receives: Mapping[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sends", {p: t for p, t in self.sends.items() if t.numel()})
        object.__setattr__(self, "receives", {p: w for p, w in self.receives.items() if w})


@dataclass(frozen=True, eq=False)
class Post:
    """Start a round and go on; yielding it gives a :class:`Ticket`."""

    round: Round

    @property
    def phase(self) -> str:
        """The phase of the posted round."""
        return self.round.phase


@dataclass(frozen=True, eq=False)
class Ticket:
    """A round under way; only the scheduler that issued it looks inside ``token``."""

    phase: str
    token: Any


@dataclass(frozen=True, eq=False)
class Wait:
    """Finish a posted round; yielding it gives the :data:`Inbox`."""

    ticket: Ticket

    @property
    def phase(self) -> str:
        """The phase of the round waited for."""
        return self.ticket.phase


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum of ``tensor`` (same shape and dtype everywhere) over ranks; gives a new tensor."""

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Entry ``i`` of ``tensor`` (``[world_size]``) goes to rank ``i``; gives ``[world_size]`` by source."""

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """``tensor`` (``[m]``, equally long everywhere) of every rank; gives ``[world_size, m]``."""

    phase: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class InSubgroup:
    """Run ``pattern`` among ``ranks``, which count from 0 inside; gives its result, or raises what it raised.

    All ranks yield it together, each with the group that it is in and that all of that group name alike.
    """

    phase: str
    ranks: tuple[int, ...]
    pattern: Generator[Any, Any, Any]


Collective = AllReduce | AllToAll | AllGather
Op = Round | Post | Wait | InSubgroup | Collective
# What a pattern yields, what it is sent back (an Inbox, a Ticket or a tensor), what it returns.
Pattern = Generator[Op, Any, Result]
