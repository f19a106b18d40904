"""What an exchange costs: counted the same way by both schedulers and by every prediction.

All bytes are per rank and direction. A collective is counted as its ring algorithm, whatever the
backend picks, so that a count depends on the method alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tritoncomm.errors import ConfigurationError

WORD = 4
# Every point-to-point message starts with sequence, phase, length and a checksum of these.
HEADER_WORDS = 8


class Traffic(NamedTuple):
    """Messages and bytes that one rank sends (or receives) in one step."""

    messages: int = 0
    bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """The traffic of both."""
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def within(self, bound: Traffic) -> bool:
        """No more messages and no more bytes than ``bound``."""
        return self.messages <= bound.messages and self.bytes <= bound.bytes


_UNITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Link(NamedTuple):
    """A network interface: ``latency`` in seconds per message, ``bandwidth`` in bytes per second and direction."""

    latency: float = 30e-6
    bandwidth: float = 1.25e9

    @classmethod
    def parse(cls, text: str) -> Link:
        """From "10gbit,30us": bandwidth in bit, kbit, mbit or gbit per second, latency in ns, us, ms or s.

        Raises :class:`~tritoncomm.ConfigurationError` for anything else.
        """
        found = re.fullmatch(r"(\d+\.?\d*)(k|m|g)?bit,(\d+\.?\d*)(n|u|m)?s", text.strip().lower())
        if found is None:
            raise ConfigurationError(f"link {text!r}: write bandwidth and latency, for example 10gbit,30us")
        bandwidth, unit, latency, fraction = found.groups()
        link = cls(float(latency) * _TIMES[f"{fraction or ''}s"], float(bandwidth) * _UNITS[f"{unit or ''}bit"])
        if not link.bandwidth > 0:
            raise ConfigurationError(f"link {text!r}: the bandwidth must be above 0")
        return link

    def transfer(self, size: float) -> float:
        """Seconds that ``size`` bytes keep the interface busy."""
        return size / self.bandwidth

    def seconds(self, traffic: Traffic) -> float:
        """One message after the other: a latency for each, and the time of the bytes."""
        return traffic.messages * self.latency + self.transfer(traffic.bytes)


class Flow(NamedTuple):
    """What one rank sends and what it receives."""

    sent: Traffic = Traffic()
    received: Traffic = Traffic()


@dataclass(frozen=True)
class Forecast:
    """Upper bound of one step's traffic per rank, phase by phase, each direction on its own."""

    phases: Mapping[str, Flow]

    @property
    def sent(self) -> Traffic:
        """What a rank sends at most."""
        return total(flow.sent for flow in self.phases.values())

    @property
    def received(self) -> Traffic:
        """What a rank receives at most."""
        return total(flow.received for flow in self.phases.values())

    def seconds(self, link: Link) -> float:
        """Time on ``link``, phase after phase, both directions at once (the alpha-beta model)."""
        return sum(max(link.seconds(flow.sent), link.seconds(flow.received)) for flow in self.phases.values())

    def allows(self, phase: str, sent: Traffic, received: Traffic) -> bool:
        """Whether this much in ``phase`` stays within the bound."""
        flow = self.phases.get(phase, Flow())
        return sent.within(flow.sent) and received.within(flow.received)


class Formula(NamedTuple):
    """A row of the papers' comparison tables: latencies, and words per rank from ``low`` to ``high``.

    A word is 4 bytes, an (index, value) pair two words. Where the two differ the volume depends on the data.
    """

    latencies: float
    low: float
    high: float

    def seconds(self, link: Link) -> tuple[float, float]:
        """The alpha-beta model: from and to."""
        low, high = (self.latencies * link.latency + link.transfer(WORD * words) for words in (self.low, self.high))
        return low, high


def log2(count: int) -> int:
    """Rounds of a doubling scheme among ``count``: ceil(log2 count)."""
    return (count - 1).bit_length()


def both(traffic: Traffic) -> Flow:
    """The same in both directions."""
    return Flow(traffic, traffic)


def message(words: int) -> Traffic:
    """One point-to-point message of ``words`` payload words; nothing at all when it is empty."""
    return Traffic(1, WORD * (words + HEADER_WORDS)) if words else Traffic()


def messages(count: int, words: int) -> Traffic:
    """``count`` point-to-point messages with ``words`` payload words in all."""
    return Traffic(count, WORD * (words + count * HEADER_WORDS))


def all_reduce(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Ring all-reduce: reduce-scatter and all-gather of ``world_size`` equal chunks."""
    hops = 2 * (world_size - 1)
    chunk = -(-numel // world_size)
    return Traffic(hops, hops * chunk * itemsize)


def dense(numel: int, world_size: int) -> Forecast:
    """The dense exchange of ``numel`` fp32 values; one worker sends nothing."""
    return Forecast({"all-reduce": both(all_reduce(numel, WORD, world_size))})


def bruck(words: int, world_size: int) -> Traffic:
    """Bruck all-gather of ``words`` from every rank: each block but the own one arrives once."""
    return messages(log2(world_size), (world_size - 1) * words)


def all_gather(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Ring all-gather of ``numel`` elements from every rank."""
    hops = world_size - 1
    return Traffic(hops, hops * numel * itemsize)


def all_to_all(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Direct all-to-all of ``numel`` elements to every rank."""
    return all_gather(numel, itemsize, world_size)


def total(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of all ``parts``."""
    result = Traffic()
    for part in parts:
        result = result.plus(part)
    return result
