"""The cost of an exchange in messages, bytes and seconds.

Both schedulers and all predictions count in the same way. All bytes are per rank and direction. A collective is counted
as its ring algorithm, whichever algorithm the backend picks, and also where it is messages to each rank, whose headers
do not count (:mod:`tritoncomm.scheduler.group_collectives`). The counts therefore depend only on the method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tritoncomm.errors import ConfigurationError

WORD = 4
# Length of the header of a point-to-point message. ``wire.Frame.header`` lists its fields.
HEADER_WORDS = 8


class Traffic(NamedTuple):
    """Messages and bytes that one rank sends (or receives) in one step."""

    messages: int = 0
    bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of this traffic and ``other``."""
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def within(self, bound: Traffic) -> bool:
        """Return True if neither messages nor bytes exceed ``bound``."""
        return self.messages <= bound.messages and self.bytes <= bound.bytes


_RATES = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
_UNITS = {name.lower().removesuffix("/s"): size for name, size in _RATES.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Four digits are printed of numbers below this one.
_LONG = 1000


class Link(NamedTuple):
    """A network interface: ``latency`` in seconds per message, ``bandwidth`` in bytes per second and direction."""

    latency: float = 30e-6
    bandwidth: float = 1.25e9

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link that a text such as "10gbit,30us" describes.

        The bandwidth is in bit, kbit, mbit or gbit per second, the latency in ns, us, ms or s.
        Raises :class:`~tritoncomm.ConfigurationError` for anything else.
        """
        found = re.fullmatch(r"(\d+\.?\d*)(k|m|g)?bit,(\d+\.?\d*)(n|u|m)?s", text.strip().lower())
        if found is None:
            raise ConfigurationError(f"invalid link {text!r}: give bandwidth and latency, for example '10gbit,30us'")
        bandwidth, unit, latency, fraction = found.groups()
        link = cls(float(latency) * _TIMES[f"{fraction or ''}s"], float(bandwidth) * _UNITS[f"{unit or ''}bit"])
        if not link.bandwidth > 0:
            raise ConfigurationError(f"invalid link {text!r}: the bandwidth must be above 0, for example '10gbit,30us'")
        return link

    def readable(self) -> str:
        """Return the link as text in readable units, for example ``"10 Mbit/s, 50 ms"``."""
        return f"{_with_unit(self.bandwidth, _RATES)}, {_with_unit(self.latency, _TIMES)}"

    def transfer(self, size: float) -> float:
        """Return the seconds that the interface needs to transfer ``size`` bytes, without latency."""
        return size / self.bandwidth

    def seconds(self, traffic: Traffic) -> float:
        """Return the seconds for ``traffic``: one latency per message, plus the transfer time of all bytes."""
        return traffic.messages * self.latency + self.transfer(traffic.bytes)


def _with_unit(amount: float, units: Mapping[str, float]) -> str:
    """Return ``amount`` in the largest of ``units``, from small to large, in which it is at least 1."""
    fitting = [name for name, size in units.items() if amount >= 0.9999 * size]  # which rounds up to 1
    unit = fitting[-1] if fitting else next(iter(units))
    value = amount / units[unit]
    return f"{value:{'.4g' if value < _LONG else ',.0f'}} {unit}"


class Flow(NamedTuple):
    """Traffic that one rank sends and receives."""

    sent: Traffic = Traffic()
    received: Traffic = Traffic()


@dataclass(frozen=True)
class Forecast:
    """The traffic of one rank in one step, or an upper bound on it, for each phase and direction."""

    phases: Mapping[str, Flow]

    @property
    def sent(self) -> Traffic:
        """The traffic that a rank sends in all phases."""
        return total(flow.sent for flow in self.phases.values())

    @property
    def received(self) -> Traffic:
        """The traffic that a rank receives in all phases."""
        return total(flow.received for flow in self.phases.values())

    def seconds(self, link: Link) -> float:
        """Return the seconds on ``link`` in the alpha-beta model.

        Phases follow one another. Within a phase both directions overlap.
        """
        return sum(max(link.seconds(flow.sent), link.seconds(flow.received)) for flow in self.phases.values())

    def allows(self, phase: str, sent: Traffic, received: Traffic) -> bool:
        """Return True if ``sent`` and ``received`` in ``phase`` are within the bound."""
        flow = self.phases.get(phase, Flow())
        return sent.within(flow.sent) and received.within(flow.received)


def log2(count: int) -> int:
    """Return the rounds of a doubling scheme among ``count`` ranks: ceil(log2 count)."""
    return (count - 1).bit_length()


def both(traffic: Traffic) -> Flow:
    """Return a flow with ``traffic`` in both directions."""
    return Flow(traffic, traffic)


def messages(count: int, words: int) -> Traffic:
    """Return the traffic of ``count`` point-to-point messages with ``words`` payload words in total."""
    return Traffic(count, WORD * (words + count * HEADER_WORDS))


def all_reduce(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Return the traffic of a ring all-reduce: reduce-scatter and all-gather of ``world_size`` equal chunks."""
    hops = 2 * (world_size - 1)
    chunk = -(-numel // world_size)
    return Traffic(hops, hops * chunk * itemsize)


def dense(numel: int, world_size: int) -> Forecast:
    """Return the forecast for a dense exchange of ``numel`` fp32 values. A single worker sends nothing."""
    return Forecast({"all-reduce": both(all_reduce(numel, WORD, world_size))})


def bruck(words: int, world_size: int) -> Traffic:
    """Return the traffic of a Bruck all-gather of ``words`` from every rank. A rank gets every other block once."""
    return messages(log2(world_size), (world_size - 1) * words)


def all_gather(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Return the traffic of a ring all-gather of ``numel`` elements from every rank."""
    hops = world_size - 1
    return Traffic(hops, hops * numel * itemsize)


def all_to_all(numel: int, itemsize: int, world_size: int) -> Traffic:
    """Return the traffic of a direct all-to-all of ``numel`` elements to every rank."""
    return all_gather(numel, itemsize, world_size)


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of ``parts``."""
    return Traffic(*map(sum, zip(*parts, strict=True)))
