"""Two patterns at once: the messages of a small one travel in those of a large one, and cost no delay of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from tritoncomm.scheduler.cost import HEADER_WORDS, WORD, Flow, Forecast, Traffic
from tritoncomm.scheduler.rounds import AllGather, AllToAll, Inbox, Op, Pattern, Post, Round, Ticket, Wait

Result = TypeVar("Result")
Other = TypeVar("Other")
Parted = Callable[[Any], tuple[Any, Any]]  # the reply to a joint operation, as the replies to both


class Carriers(NamedTuple):
    """What can carry other values in a step of a method.

    ``phases`` may have ``"scatter"``, a phase in which each rank sends a message to each other one, and ``"gather"``, a
    later one in which all gather something. ``width`` is the number of messages of the former that are in transit
    together, by :func:`~tritoncomm.primitives.collectives.rotate`.
    """

    phases: Mapping[str, str] = MappingProxyType({})
    width: int = 8


class _Rider:
    """The small pattern, whose next operation is known. What it posts is sent when it waits for it."""

    op: Op | None

    def __init__(self, pattern: Pattern[Any], carriers: Mapping[str, str]) -> None:
        self._pattern, self._carriers = pattern, carriers
        self._posted: dict[int, Round] = {}
        self.answer(None)

    def answer(self, reply: Any) -> None:
        """Give the pattern the ``reply`` to its operation, and run it up to the next one."""
        try:
            self.op = self._pattern.send(reply)
            while type(self.op) is Post:
                ticket = Ticket(self.op.phase, len(self._posted))
                self._posted[ticket.token] = self.op.round
                self.op = self._pattern.send(ticket)
        except StopIteration as stop:
            self.op, self.result = None, stop.value
        if type(self.op) is Wait:
            self.op = self._posted[self.op.ticket.token]

    def alone(self, *carriers: str) -> Pattern[None]:
        """Perform operations up to one that has one of these ``carriers``, or else to the end."""
        while self.op is not None and self._carriers.get(self.op.phase) not in carriers:
            self.answer((yield self.op))


def carried(
    large: Pattern[Result], small: Pattern[Other], carriers: Mapping[str, str]
) -> Pattern[tuple[Result, Other]]:
    """Run both patterns, and return their results.

    ``carriers`` maps phases of ``small`` to phases of ``large``, in the order of both. An operation of such a phase
    travels in the next one of its carrier. All others of ``small`` are performed alone, before the next carrier or at
    the end. ``small`` gets its replies first. It has therefore ended when ``large`` ends with a carrier. Of messages
    between two ranks, those to the same peer become one.
    """
    if not carriers:
        other = yield from small
        return (yield from large), other
    try:
        rider, posted = _Rider(small, carriers), dict[Any, Parted]()
        phases = tuple(carriers.values())
        yield from rider.alone(*phases)
        reply: Any = None
        while True:
            try:
                op = large.send(reply)
            except StopIteration as stop:
                yield from rider.alone()
                return stop.value, rider.result
            parted = None
            if type(op) is Wait:
                parted = posted.pop(op.ticket, None)
            elif op.phase in phases and not posted:
                yield from rider.alone(op.phase)
                op, parted = _joint(op, rider.op)
            reply = yield op
            if parted is not None and type(op) is Post:
                posted[reply] = parted
            elif parted is not None:
                reply, own = parted(reply)
                rider.answer(own)
    finally:
        large.close()
        small.close()


def _joint(large: Op, small: Op | None) -> tuple[Op, Parted | None]:
    """Return one operation that does what both do, or ``large`` alone if there is no ``small`` one of its kind."""
    one = large.round if type(large) is Post else large
    if type(one) is Round and type(small) is Round:
        both = Round(large.phase, _joined(one.sends, small.sends), _added(one.receives, small.receives))

        def parted(inbox: Inbox) -> tuple[Inbox, Inbox]:
            halves: tuple[Inbox, Inbox] = {}, {}
            for peer, words in inbox.items():
                cut = one.receives.get(peer, 0)
                for half, part in zip(halves, (words[:cut], words[cut:]), strict=True):
                    if part.shape[0]:
                        half[peer] = part
            return halves

        return (Post(both) if type(large) is Post else both), parted
    if isinstance(large, AllToAll | AllGather) and type(large) is type(small):
        cut = large.tensor.shape[-1]
        tensor = torch.cat([large.tensor, small.tensor], dim=-1)
        return type(large)(large.phase, tensor), lambda reply: (
            reply[:, :cut].contiguous(),
            reply[:, cut:].contiguous(),
        )
    return large, None


def _joined(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    both = one.keys() & other.keys()
    return {**one, **other, **{peer: torch.cat([one[peer], other[peer]]) for peer in both}}


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {**one, **other, **{peer: one[peer] + other[peer] for peer in one.keys() & other.keys()}}


def with_carried(large: Forecast, small: Mapping[str, Flow], carriers: Mapping[str, str], *, framed: bool) -> Forecast:
    """Return the traffic of :func:`carried`. ``framed`` says that the messages of ``small`` have headers."""
    phases = dict(large.phases)
    for phase, flow in small.items():
        carrier = carriers.get(phase)
        if carrier not in phases:
            phases[phase] = flow
            continue
        pairs = zip(phases[carrier], flow, strict=True)
        phases[carrier] = Flow(*(_together(one, other, framed=framed) for one, other in pairs))
    return Forecast(phases)


def _together(one: Traffic, other: Traffic, *, framed: bool) -> Traffic:
    shared = min(one.messages, other.messages)
    saved = WORD * HEADER_WORDS * shared if framed else 0
    return Traffic(one.messages + other.messages - shared, one.bytes + other.bytes - saved)
