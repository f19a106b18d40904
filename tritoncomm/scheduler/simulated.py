"""Run one pattern per rank in lock step, in one thread.

Runs are deterministic, and any number of ranks is possible. A disagreement between two ranks raises an error at once
and never hangs. Patterns can therefore be tested here before they run on a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.clock import VirtualClock
from tritoncomm.scheduler.faults import Faults
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.ranks import members, named, rank_text
from tritoncomm.scheduler.rounds import (
    OPERATIONS,
    AllGather,
    AllToAll,
    Inbox,
    InSubgroup,
    Op,
    Pattern,
    Post,
    Read,
    Result,
    Round,
    Ticket,
    Wait,
    no_operation,
    traffic,
)

BeforeRound = Callable[[int, Sequence[Op]], None]
# The inbox of a rank, and the virtual time at which it is complete.
Posted = tuple[Inbox, float]


@dataclass(frozen=True)
class _Raised:
    """A reply that is thrown into the pattern as an error."""

    error: BaseException


class SimulatedScheduler:
    """Runs all ranks of an exchange in one process.

    Messages are delivered whole and in rank order. Sums are taken in rank order. ``meters`` holds the traffic of each
    rank in the last run. With a ``clock``, the meters also hold the time that each phase would take on its network.
    ``raised`` holds the errors of the last run by rank.
    """

    def __init__(self, world_size: int, clock: VirtualClock | None = None) -> None:
        self.world_size = world_size
        self.clock = clock
        self.meters = [Meter() for _ in range(world_size)]
        self.raised: dict[int, BaseException] = {}
        self._faults: Faults | None = None
        self._posted: set[Ticket] = set()  # rounds for which no pattern has waited

    def run(
        self,
        patterns: Sequence[Pattern[Result]],
        before_round: BeforeRound | None = None,
        faults: Faults | None = None,
    ) -> list[Result]:
        """Run all patterns to their end and return their results by rank.

        ``before_round(number, operations)`` is called before every round with the operation of each rank. It may raise
        to inject a failure. ``faults`` injects faults into messages. An error in any pattern stops all patterns.
        ``raised`` then holds the errors of that round by rank, and the error of the lowest rank is raised here.
        """
        self.meters = [Meter() for _ in range(self.world_size)]
        self.raised, self._posted = {}, set()
        self._faults = faults
        replies: list[Any] = [None] * self.world_size
        number = 0
        try:
            while True:
                ops, results = self._advance(patterns, replies)
                if len(results) == self.world_size:
                    for ticket in self._posted:
                        raise ProtocolMismatchError(
                            f"phase {ticket.phase!r}: a round was posted, and nothing has waited for it: yield "
                            "Wait(ticket) once for each Post"
                        )
                    return [results[rank] for rank in range(self.world_size)]
                self._check_same_op(number, ops, results)
                reads = [op.tensor.tolist() for op in ops.values() if isinstance(op, Read)]
                if reads:  # of all ranks, and nothing is sent
                    replies = reads
                    continue
                if before_round is not None:
                    before_round(number, [ops[rank] for rank in range(self.world_size)])
                replies = self._perform(number, [ops[rank] for rank in range(self.world_size)])
                number += 1
        finally:
            for pattern in patterns:
                pattern.close()

    def _advance(
        self, patterns: Sequence[Pattern[Result]], replies: Sequence[Any]
    ) -> tuple[dict[int, Op], dict[int, Result]]:
        ops: dict[int, Op] = {}
        results: dict[int, Result] = {}
        for rank, pattern in enumerate(patterns):
            reply = replies[rank]
            try:
                ops[rank] = pattern.throw(reply.error) if isinstance(reply, _Raised) else pattern.send(reply)
            except StopIteration as stop:
                results[rank] = stop.value
            except Exception as error:  # advance the other ranks, too, before one error is raised
                self.raised[rank] = error
        self.raised |= {rank: no_operation(op) for rank, op in ops.items() if op.__class__ not in OPERATIONS}
        if self.raised:
            raise self.raised[min(self.raised)]
        return ops, results

    def _check_same_op(self, number: int, ops: dict[int, Op], done: dict[int, Any]) -> None:
        sides = {rank: _describe(op) for rank, op in ops.items()}
        sides |= dict.fromkeys(done, "has finished")
        for rank in range(1, self.world_size):
            if sides[rank] != sides[0]:
                first, other = map(rank_text, named([0, rank]))
                raise ProtocolMismatchError(
                    f"round {number}: {first} {sides[0]}, but {other} {sides[rank]}; "
                    "all ranks must yield the same operations in the same order"
                )

    def _perform(self, number: int, ops: list[Any]) -> list[Any]:
        first = ops[0]
        if isinstance(first, Round):
            return self._complete(self._deliver_messages(number, ops), first.phase)
        if isinstance(first, Post):
            tickets = [Ticket(first.phase, token) for token in self._deliver_messages(number, [op.round for op in ops])]
            self._posted.update(tickets)
            return tickets
        if isinstance(first, Wait):
            if not self._posted.issuperset(op.ticket for op in ops):
                raise ProtocolMismatchError(
                    f"round {number}, phase {first.phase!r}: a ticket is waited for once, and this was done before"
                )
            self._posted.difference_update(op.ticket for op in ops)
            return self._complete([op.ticket.token for op in ops], first.phase)
        if isinstance(first, InSubgroup):
            return self._in_subgroups(number, ops)
        return self._collective(number, ops)

    def _in_subgroups(self, number: int, ops: list[Any]) -> list[Any]:
        """Run the subgroups one after the other. Errors are thrown into the patterns that yielded the operation."""
        replies: list[Any] = [None] * len(ops)
        for ranks in dict.fromkeys(op.ranks for op in ops):
            inside = [rank for rank, op in enumerate(ops) if op.ranks == ranks]
            if sorted(ranks) != inside:
                raise ProtocolMismatchError(
                    f"round {number}, phase {ops[0].phase!r}: the subgroup of {rank_text(*named(ranks))} is yielded by "
                    f"{rank_text(*named(inside))}, but exactly the ranks of a subgroup must yield it"
                )
            clock = self.clock.part(ranks) if self.clock is not None else None
            group = SimulatedScheduler(len(ranks), clock)
            if self._faults is not None:
                self._faults.subgroup = ranks
            around = members.set(named(ranks))
            try:
                results: list[Any] = group.run([ops[rank].pattern for rank in ranks], faults=self._faults)
            except Exception as error:
                results = [_Raised(group.raised.get(position, error)) for position in range(len(ranks))]
            finally:
                members.reset(around)
            for position, rank in enumerate(ranks):
                replies[rank] = results[position]
                self.meters[rank].add(group.meters[position])
            if self.clock is not None and clock is not None:
                self.clock.adopt(ranks, clock)
        if self._faults is not None:
            self._faults.subgroup = ()
        return replies

    def _complete(self, tokens: list[Posted], phase: str) -> list[Inbox]:
        if self.clock is not None:
            for rank, (_, done) in enumerate(tokens):
                self.meters[rank].wait(phase, self.clock.wait(rank, done))
        return [inbox for inbox, _ in tokens]

    def _deliver_messages(self, number: int, rounds: list[Round]) -> list[Posted]:
        inboxes: list[Inbox] = [{} for _ in rounds]
        for source, round_ in enumerate(rounds):
            for peer, payload in round_.sends.items():
                expected = rounds[peer].receives.get(source) if 0 <= peer < len(rounds) else None
                fits = payload.dtype == torch.int32 and payload.ndim == 1
                if expected != payload.numel() or not fits or peer == source:
                    own, other = map(rank_text, named([source, peer]))
                    raise ProtocolMismatchError(
                        f"round {number}, phase {round_.phase!r}: {own} sends a message of shape "
                        f"{tuple(payload.shape)}, {payload.dtype}, to {other}, which expects {expected or 'nothing'}; "
                        "a message must be one-dimensional int32, and as long as the peer expects"
                    )
                if self._faults is None:
                    inboxes[peer][source] = payload.clone()
                else:
                    inboxes[peer][source] = self._faults.carry(payload, source, peer, number, round_.phase)
        for rank, round_ in enumerate(rounds):
            for source, expected in round_.receives.items():
                if source not in inboxes[rank]:
                    own, other = map(rank_text, named([rank, source]))
                    raise ProtocolMismatchError(
                        f"round {number}, phase {round_.phase!r}: {own} expects {expected} words "
                        f"from {other}, which sends nothing to it"
                    )
            self.meters[rank].count(round_.phase, *traffic(round_, self.world_size))
        sizes = [{peer: cost.messages(1, sent.numel()).bytes for peer, sent in r.sends.items()} for r in rounds]
        done = self.clock.exchange(sizes) if self.clock is not None else [0.0] * len(rounds)
        return list(zip(inboxes, done, strict=True))

    def _collective(self, number: int, ops: list[Any]) -> list[torch.Tensor]:
        first, tensors = ops[0], [op.tensor for op in ops]
        shape = first.tensor.shape
        if isinstance(first, AllToAll) and shape[:1] != (self.world_size,):
            raise ProtocolMismatchError(
                f"round {number}, phase {first.phase!r}: AllToAll has shape {tuple(shape)}, and must have a row for "
                f"each of {self.world_size} ranks"
            )
        for rank, tensor in enumerate(tensors):
            if tensor.shape != shape or tensor.dtype != first.tensor.dtype:
                own, other = map(rank_text, named([0, rank]))
                raise ProtocolMismatchError(
                    f"round {number}, phase {first.phase!r}: {own} passes shape {tuple(shape)}, "
                    f"{first.tensor.dtype}, but {other} passes shape {tuple(tensor.shape)}, {tensor.dtype}; they "
                    "must be equal"
                )
        sent, received = traffic(first, self.world_size)
        for meter in self.meters:
            meter.count(first.phase, sent, received)
        if self.clock is not None:
            # The messages of an all-to-all are sent directly and at once, so their latencies overlap.
            hops, link = 1 if isinstance(first, AllToAll) else sent.messages, self.clock.link
            end = self.clock.synchronize(hops * link.latency + link.transfer(sent.bytes))
            for rank, meter in enumerate(self.meters):
                meter.wait(first.phase, self.clock.wait(rank, end))
        if isinstance(first, AllToAll):
            return list(torch.stack(tensors, dim=1).unbind())
        if isinstance(first, AllGather):
            gathered = torch.stack(tensors)
            return [gathered.clone() for _ in tensors]
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return [total.clone() for _ in tensors]


def _describe(op: Op) -> str:
    return f"yields {type(op).__name__} in phase {op.phase!r}"
