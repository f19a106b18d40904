"""Virtual time: computes how long an exchange would take on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritoncomm.scheduler.cost import Link


class VirtualClock:
    """A virtual clock and a full-duplex network interface for each rank.

    An interface sends one message at a time, and receives one at a time. A message starts when its sender is ready
    and the sender's interface is free. It arrives after the latency of ``link``, and is received when the receiver's
    interface is free. Sending and receiving each keep an interface busy for the transfer time. Messages of one round
    start in the given order, and are received in the order of their arrival. ``now`` holds the time of each rank in
    seconds.
    """

    def __init__(self, world_size: int, link: Link) -> None:
        self.link = link
        self.now = [0.0] * world_size
        self._sending_until = [0.0] * world_size  # time until which the interface is busy
        self._receiving_until = [0.0] * world_size

    def part(self, ranks: Sequence[int]) -> VirtualClock:
        """Return a separate clock for ``ranks`` that starts at their current times. :meth:`adopt` copies it back."""
        clock = VirtualClock(len(ranks), self.link)
        for ours, theirs in zip(self._all(), clock._all(), strict=True):
            theirs[:] = [ours[rank] for rank in ranks]
        return clock

    def adopt(self, ranks: Sequence[int], clock: VirtualClock) -> None:
        """Copy the times of ``clock``, made by :meth:`part` for ``ranks``, back into this clock."""
        for ours, theirs in zip(self._all(), clock._all(), strict=True):
            for rank, value in zip(ranks, theirs, strict=True):
                ours[rank] = value

    def _all(self) -> tuple[list[float], list[float], list[float]]:
        return self.now, self._sending_until, self._receiving_until

    def charge(self, rank: int, seconds: float) -> None:
        """Advance the clock of ``rank`` by ``seconds`` of computation."""
        self.now[rank] += seconds

    def exchange(self, sends: Sequence[Mapping[int, int]]) -> list[float]:
        """Start the messages of every rank, and return the time at which each rank has finished sending and receiving.

        ``sends`` holds for each rank the bytes of its message to each peer. The clocks do not advance.
        """
        done = list(self.now)
        arrivals = []
        for source, messages in enumerate(sends):
            for peer, size in messages.items():
                start = max(self.now[source], self._sending_until[source])
                self._sending_until[source] = start + self.link.transfer(size)
                arrivals.append((start + self.link.latency, source, peer, size))
                done[source] = self._sending_until[source]
        for arrival, _, peer, size in sorted(arrivals):
            self._receiving_until[peer] = max(arrival, self._receiving_until[peer]) + self.link.transfer(size)
            done[peer] = max(done[peer], self._receiving_until[peer])
        return done

    def wait(self, rank: int, until: float) -> float:
        """Advance the clock of ``rank`` to ``until`` if that is later, and return the seconds waited."""
        waited = max(0.0, until - self.now[rank])
        self.now[rank] += waited
        return waited

    def synchronize(self, seconds: float) -> float:
        """Run a collective that takes ``seconds`` once all ranks and interfaces are ready, and return its end time.

        All interfaces are busy until then. The clocks do not advance.
        """
        end = max(*self.now, *self._sending_until, *self._receiving_until) + seconds
        ranks = len(self.now)
        self._sending_until, self._receiving_until = [end] * ranks, [end] * ranks
        return end
