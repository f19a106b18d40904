"""Runs one pattern per rank in lock step, in one thread: deterministic, any number of ranks.

Whatever two ranks disagree about is an error at once, never a hang: this is where a pattern is
proved before it meets a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritoncomm import cost
from tritoncomm.cost import Traffic
from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.metrics import Meter
from tritoncomm.scheduler.rounds import (
    AllGather,
    AllReduce,
    AllToAll,
    Inbox,
    Pattern,
    Post,
    Result,
    Round,
    Ticket,
    Wait,
    Word,
)

BeforeRound = Callable[[int, Sequence[Word]], None]


class SimulatedScheduler:
    """All ranks of an exchange in one process; ``meters`` holds each rank's last traffic.

    Messages are delivered whole and in rank order, sums are taken in rank order.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.meters = [Meter() for _ in range(world_size)]
        self.raised: dict[int, BaseException] = {}

    def run(self, patterns: Sequence[Pattern[Result]], before_round: BeforeRound | None = None) -> list[Result]:
        """Run all patterns to their end and return their results by rank.

        ``before_round(round_number, words)`` sees what each rank is about to do and may raise: that is
        how a failure is injected. An error in any pattern stops all of them; ``raised`` tells which
        ranks raised in that round, and the error of the lowest is raised here.
        """
        self.meters = [Meter() for _ in range(self.world_size)]
        self.raised = {}
        replies: list[Any] = [None] * self.world_size
        number = 0
        try:
            while True:
                words, results = self._advance(patterns, replies)
                if len(results) == self.world_size:
                    return [results[rank] for rank in range(self.world_size)]
                self._same_kind(number, words, results)
                if before_round is not None:
                    before_round(number, [words[rank] for rank in range(self.world_size)])
                replies = self._perform(number, [words[rank] for rank in range(self.world_size)])
                number += 1
        finally:
            for pattern in patterns:
                pattern.close()

    def _advance(
        self, patterns: Sequence[Pattern[Result]], replies: Sequence[Any]
    ) -> tuple[dict[int, Word], dict[int, Result]]:
        words: dict[int, Word] = {}
        results: dict[int, Result] = {}
        for rank, pattern in enumerate(patterns):
            try:
                words[rank] = pattern.send(replies[rank])
            except StopIteration as stop:
                results[rank] = stop.value
            except Exception as error:  # every rank gets to its own verdict before one is raised
                self.raised[rank] = error
        if self.raised:
            raise self.raised[min(self.raised)]
        return words, results

    def _same_kind(self, number: int, words: dict[int, Word], done: dict[int, Any]) -> None:
        sides = {rank: _describe(word) for rank, word in words.items()}
        sides |= dict.fromkeys(done, "has finished")
        for rank in range(1, self.world_size):
            if sides[rank] != sides[0]:
                raise ProtocolMismatchError(f"round {number}: rank 0 {sides[0]}, but rank {rank} {sides[rank]}")

    def _perform(self, number: int, words: list[Any]) -> list[Any]:
        first = words[0]
        if isinstance(first, Round):
            return self._deliver(number, words)
        if isinstance(first, Post):
            inboxes = self._deliver(number, [word.round for word in words])
            return [Ticket(first.phase, inbox) for inbox in inboxes]
        if isinstance(first, Wait):
            return [word.ticket.token for word in words]
        return self._collective(number, words)

    def _deliver(self, number: int, rounds: list[Round]) -> list[Inbox]:
        inboxes: list[Inbox] = [{} for _ in rounds]
        for source, round_ in enumerate(rounds):
            for peer, payload in round_.sends.items():
                expected = rounds[peer].receives.get(source) if 0 <= peer < len(rounds) else None
                if expected != payload.numel() or payload.dtype != torch.int32 or peer == source:
                    raise ProtocolMismatchError(
                        f"round {number}, phase {round_.phase!r}: rank {source} sends {payload.numel()} words "
                        f"of {payload.dtype} to rank {peer}, which expects {expected or 'nothing'}"
                    )
                inboxes[peer][source] = payload.clone()
        for rank, round_ in enumerate(rounds):
            for source, expected in round_.receives.items():
                if source not in inboxes[rank]:
                    raise ProtocolMismatchError(
                        f"round {number}, phase {round_.phase!r}: rank {rank} expects {expected} words "
                        f"from rank {source}, which sends nothing to it"
                    )
            sent = cost.total(cost.message(payload.numel()) for payload in round_.sends.values())
            received = cost.total(cost.message(words) for words in round_.receives.values())
            self.meters[rank].count(round_.phase, sent, received)
        return inboxes

    def _collective(self, number: int, words: list[Any]) -> list[torch.Tensor]:
        first, tensors = words[0], [word.tensor for word in words]
        shape = first.tensor.shape
        for rank, tensor in enumerate(tensors):
            if tensor.shape != shape or tensor.dtype != first.tensor.dtype:
                raise ProtocolMismatchError(
                    f"round {number}, phase {first.phase!r}: rank 0 brings {tuple(shape)} {first.tensor.dtype}, "
                    f"but rank {rank} brings {tuple(tensor.shape)} {tensor.dtype}"
                )
        size, itemsize = first.tensor.numel(), first.tensor.element_size()
        if isinstance(first, AllReduce):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            self._count(first.phase, cost.all_reduce(size, itemsize, self.world_size))
            return [total.clone() for _ in tensors]
        if isinstance(first, AllToAll):
            self._count(first.phase, cost.all_to_all(1, itemsize, self.world_size))
            return list(torch.stack(tensors, dim=1).unbind())
        assert isinstance(first, AllGather)
        self._count(first.phase, cost.all_gather(size, itemsize, self.world_size))
        gathered = torch.stack(tensors)
        return [gathered.clone() for _ in tensors]

    def _count(self, phase: str, traffic: Traffic) -> None:
        for meter in self.meters:
            meter.count(phase, traffic, traffic)


def _describe(word: Word) -> str:
    return f"yields {type(word).__name__} in phase {word.phase!r}"
