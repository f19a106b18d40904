"""Traffic and waiting time of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tritoncomm.scheduler.cost import Traffic


@dataclass
class Meter:
    """Traffic and waiting time of one step on one rank. A scheduler fills it in.

    ``sent`` and ``received`` are totals. ``sent_by_phase``, ``received_by_phase`` and ``seconds`` (waiting time) are by
    phase.
    """

    sent: Traffic = Traffic()
    received: Traffic = Traffic()
    seconds: dict[str, float] = field(default_factory=dict)
    sent_by_phase: dict[str, Traffic] = field(default_factory=dict)
    received_by_phase: dict[str, Traffic] = field(default_factory=dict)

    def count(self, phase: str, sent: Traffic, received: Traffic) -> None:
        """Add traffic of ``phase``."""
        self.sent = self.sent.plus(sent)
        self.received = self.received.plus(received)
        self.sent_by_phase[phase] = self.sent_by_phase.get(phase, Traffic()).plus(sent)
        self.received_by_phase[phase] = self.received_by_phase.get(phase, Traffic()).plus(received)

    def add(self, other: Meter) -> None:
        """Add the traffic and the waiting time of ``other``."""
        for phase, sent in other.sent_by_phase.items():
            self.count(phase, sent, other.received_by_phase[phase])
        for phase, seconds in other.seconds.items():
            self.wait(phase, seconds)

    def wait(self, phase: str, seconds: float) -> None:
        """Add ``seconds`` of waiting for the network in ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def waited(self) -> float:
        """Seconds of waiting for the network in all phases."""
        return sum(self.seconds.values(), 0.0)


def summed(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each named figure. A figure that a mapping lacks counts as 0."""
    names = dict.fromkeys(name for one in figures for name in one)
    return {name: sum(one.get(name, 0.0) for one in figures) for name in names}
