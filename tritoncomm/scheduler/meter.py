"""Traffic and waiting time of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tritoncomm.scheduler.cost import Traffic, total
from tritoncomm.scheduler.span import Span


@dataclass
class Meter:
    """Traffic and waiting time of one step on one rank. A scheduler fills it in.

    ``sent_by_phase``, ``received_by_phase`` and ``seconds`` (waiting time) are by phase. On a GPU, ``spans`` are times
    that were not known yet when they were added. See :meth:`settle`.
    """

    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    sent_by_phase: dict[str, Traffic] = field(default_factory=dict)
    received_by_phase: dict[str, Traffic] = field(default_factory=dict)
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def count(self, phase: str, sent: Traffic, received: Traffic) -> None:
        """Add traffic of ``phase``."""
        if phase in self.sent_by_phase:
            sent, received = self.sent_by_phase[phase].plus(sent), self.received_by_phase[phase].plus(received)
        self.sent_by_phase[phase], self.received_by_phase[phase] = sent, received

    def add(self, other: Meter) -> None:
        """Add the traffic and the waiting time of ``other``."""
        for phase, sent in other.sent_by_phase.items():
            self.count(phase, sent, other.received_by_phase[phase])
        for phase, seconds in other.seconds.items():
            self.wait(phase, seconds)
        self.spans += other.spans

    def wait(self, phase: str, seconds: float) -> None:
        """Add ``seconds`` of waiting for the network in ``phase``."""
        self.seconds[phase] += seconds

    def time(self, phase: str, span: Span) -> None:
        """Add the time of ``span``, which has ended, to the waiting time in ``phase``."""
        if span.is_known:
            self.seconds[phase] += span.seconds
        else:
            self.spans.append((phase, span))

    def settle(self) -> None:
        """Add the spans that have ended to ``seconds``. Those of the last step are known one step later."""
        spans, self.spans = self.spans, []
        for phase, span in spans:
            self.time(phase, span)

    @property
    def sent(self) -> Traffic:
        """What was sent in all phases."""
        return total(self.sent_by_phase.values())

    @property
    def received(self) -> Traffic:
        """What was received in all phases."""
        return total(self.received_by_phase.values())

    @property
    def waited(self) -> float:
        """Seconds of waiting for the network in all phases."""
        return sum(self.seconds.values(), 0.0)


class Ratio(float):
    """A figure of a vector that is no amount: of several vectors, the largest counts."""


def of_all(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each named amount, and the maximum of each :class:`Ratio`. What a mapping lacks is left out."""
    found: dict[str, list[float]] = {}
    for one in figures:
        for name, figure in one.items():
            found.setdefault(name, []).append(figure)
    return {name: float(max(each)) if isinstance(each[0], Ratio) else sum(each) for name, each in found.items()}
