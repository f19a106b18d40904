"""Fault injection for the simulated network: faults in messages, and the resulting errors at the receiver."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

import numpy as np
import torch

from tritoncomm.errors import ConfigurationError, ExchangeTimeoutError, ProtocolMismatchError
from tritoncomm.scheduler import wire
from tritoncomm.scheduler.cost import HEADER_WORDS
from tritoncomm.scheduler.ranks import named, rank_text

_Pair = tuple[tuple[int, ...], int, int]
KINDS = ("drop", "duplicate", "reorder", "corrupt")


class Faults:
    """Injects one fault of type ``kind`` into a message of round ``number``.

    ``seed`` draws the message from the first ``messages`` messages of that round. Messages have headers and are
    checked as on a real network. ``done`` counts the injected faults, ``seen`` the messages of every round.
    ``subgroup`` holds the ranks that exchange at present, if they are a subgroup: its messages have a network of their
    own. Values of ``kind``:

    * ``drop``: the message never arrives.
    * ``duplicate``: the message arrives twice.
    * ``reorder``: the next message from the same rank to the same peer arrives first.
    * ``corrupt``: one bit of the message flips.
    """

    def __init__(self, kind: str, number: int, seed: int, messages: int = 1) -> None:
        if kind not in KINDS:
            raise ConfigurationError(f"kind={kind!r} is not a fault: use one of {', '.join(KINDS)}")
        self.kind = kind
        self.number = number
        self.seed = seed
        self.done = 0
        self.seen: Counter[int] = Counter()
        self._random = random.Random(seed)  # noqa: S311 - not used for cryptography
        # Messages of the round that pass before the one with the fault.
        self._passing = self._random.randrange(messages)
        self.subgroup: tuple[int, ...] = ()
        # Messages that were sent and not yet received, by the subgroup and its ranks (source, peer).
        self._in_transit: defaultdict[_Pair, deque[torch.Tensor]] = defaultdict(deque)
        self._held_back: dict[_Pair, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"Faults({self.kind!r}, {self.number}, seed={self.seed})"

    def carry(self, payload: torch.Tensor, source: int, peer: int, number: int, phase: str) -> torch.Tensor:
        """Send ``payload`` from ``source`` to ``peer`` in round ``number``, and return what ``peer`` receives.

        Raises :class:`~tritoncomm.ExchangeTimeoutError` when no message arrives, and
        :class:`~tritoncomm.ProtocolMismatchError` when the message that arrives is another one or corrupt.
        """
        frame = wire.Frame(0, number, phase, 0)
        pair, message = (self.subgroup, source, peer), wire.framed(payload, frame)
        queue = self._in_transit[pair]
        held_back = self._held_back.pop(pair, None)
        self.seen[number] += 1
        self._passing -= number == self.number
        if self._passing < 0 and not self.done:
            self.done += 1
            self._inject(pair, message)
        else:
            queue.append(message)
        if held_back is not None:
            queue.append(held_back)
        sender, receiver = named([source, peer])
        where = f"round {number}, phase {phase!r}, message to {rank_text(receiver)} from {rank_text(sender)}, {self!r}"
        if not queue:
            raise ExchangeTimeoutError(f"{where}: no message arrived", [sender])
        arrived = queue.popleft()
        try:
            total = wire.check_frame(arrived[:HEADER_WORDS], frame, payload.numel())
            wire.check_payload(arrived[HEADER_WORDS:], total)
        except ProtocolMismatchError as error:
            raise ProtocolMismatchError(f"{where}: {error}") from error
        return arrived[HEADER_WORDS:].clone()

    def _inject(self, pair: _Pair, message: torch.Tensor) -> None:
        queue = self._in_transit[pair]
        if self.kind == "duplicate":
            queue.extend([message, message])
        elif self.kind == "reorder":
            self._held_back[pair] = message
        elif self.kind == "corrupt":
            at, bit = self._random.randrange(message.numel()), self._random.randrange(32)
            message[at] ^= int(np.uint32(1 << bit).view(np.int32))
            queue.append(message)
        # A dropped message is not queued.
