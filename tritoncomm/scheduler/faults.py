"""A network that misbehaves, for simulation: what a message may suffer, and what the receiver then sees."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

import numpy as np
import torch

from tritoncomm.errors import ConfigurationError, ExchangeTimeoutError, ProtocolMismatchError
from tritoncomm.scheduler import wire
from tritoncomm.scheduler.cost import HEADER_WORDS

KINDS = ("drop", "delay", "duplicate", "reorder", "corrupt")


class Faults:
    """Does ``kind`` to one of the first ``messages`` of round ``number``, drawn by ``seed``, and counts it in ``done``.

    ``seen`` counts the messages of every round.

    ``drop``: it never arrives. ``delay``: it arrives late, but before the time-out. ``duplicate``: it arrives twice.
    ``reorder``: the next message between the two ranks overtakes it. ``corrupt``: one bit of it flips. Messages are
    framed and checked as on a real network.
    """

    def __init__(self, kind: str, number: int, seed: int, messages: int = 1) -> None:
        if kind not in KINDS:
            raise ConfigurationError(f"kind={kind!r}: choose one of {', '.join(KINDS)}")
        self.kind = kind
        self.number = number
        self.seed = seed
        self.done = 0
        self.seen: Counter[int] = Counter()
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._before = self._random.randrange(messages)  # of the round that are spared
        # What has been sent and not yet taken, between each pair of ranks.
        self._under_way: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._overtaken: dict[tuple[int, int], torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"Faults({self.kind!r}, {self.number}, seed={self.seed})"

    def carry(self, payload: torch.Tensor, source: int, peer: int, number: int, phase: str) -> torch.Tensor:
        """What ``peer`` takes from the network when it expects ``payload``, sent in round ``number``, from ``source``.

        Raises :class:`~tritoncomm.ExchangeTimeoutError` when nothing is there, and
        :class:`~tritoncomm.ProtocolMismatchError` when it is something else.
        """
        frame = wire.Frame(0, number, phase, 0)
        pair, message = (source, peer), wire.framed(payload, frame)
        queue = self._under_way[pair]
        overtaken = self._overtaken.pop(pair, None)
        self.seen[number] += 1
        self._before -= number == self.number
        if self._before < 0 and not self.done:
            self.done += 1
            self._strike(pair, message)
        else:
            queue.append(message)
        if overtaken is not None:
            queue.append(overtaken)
        where = f"round {number}, phase {phase!r}, rank {peer} from rank {source}, {self!r}"
        if not queue:
            raise ExchangeTimeoutError(f"{where}: nothing arrives", [source])
        arrived = queue.popleft()
        try:
            total = wire.check_frame(arrived[:HEADER_WORDS], frame, payload.numel())
            wire.check_payload(arrived[HEADER_WORDS:], total)
        except ProtocolMismatchError as error:
            raise ProtocolMismatchError(f"{where}: {error}") from error
        return arrived[HEADER_WORDS:].clone()

    def _strike(self, pair: tuple[int, int], message: torch.Tensor) -> None:
        queue = self._under_way[pair]
        if self.kind == "delay":
            queue.append(message)  # the receiver waits for it: a round ends when all of it has arrived
        elif self.kind == "duplicate":
            queue.extend([message, message])
        elif self.kind == "reorder":
            self._overtaken[pair] = message
        elif self.kind == "corrupt":
            at, bit = self._random.randrange(message.numel()), self._random.randrange(32)
            message[at] ^= int(np.uint32(1 << bit).view(np.int32))
            queue.append(message)
