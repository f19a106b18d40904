"""Virtual time: what an exchange would take on a network, without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritoncomm.scheduler.cost import Link


class VirtualClock:
    """One clock per rank, and one network interface each that sends one stream of bytes at a time and receives one.

    A message leaves when its sender is there and its interface is free, arrives after the latency, and is
    received when the receiver's interface is free, for as long as its bytes take. Messages of one round leave
    in the order in which they were given; what arrives first is received first.
    """

    def __init__(self, world_size: int, link: Link) -> None:
        self.link = link
        self.now = [0.0] * world_size
        self._sending = [0.0] * world_size  # busy until
        self._receiving = [0.0] * world_size

    def part(self, ranks: Sequence[int]) -> VirtualClock:
        """The clocks of ``ranks`` by themselves, to go on from here; :meth:`adopt` brings them back."""
        clock = VirtualClock(len(ranks), self.link)
        for ours, theirs in zip(self._all(), clock._all(), strict=True):
            theirs[:] = [ours[rank] for rank in ranks]
        return clock

    def adopt(self, ranks: Sequence[int], clock: VirtualClock) -> None:
        """Set the clocks of ``ranks`` to what :meth:`part` has become."""
        for ours, theirs in zip(self._all(), clock._all(), strict=True):
            for rank, value in zip(ranks, theirs, strict=True):
                ours[rank] = value

    def _all(self) -> tuple[list[float], list[float], list[float]]:
        return self.now, self._sending, self._receiving

    def charge(self, rank: int, seconds: float) -> None:
        """``rank`` computes for ``seconds``."""
        self.now[rank] += seconds

    def exchange(self, sends: Sequence[Mapping[int, int]]) -> list[float]:
        """Every rank starts its messages, bytes by peer, and goes on; when each will have sent and received its own."""
        done = list(self.now)
        arrivals = []
        for source, messages in enumerate(sends):
            for peer, size in messages.items():
                start = max(self.now[source], self._sending[source])
                self._sending[source] = start + self.link.transfer(size)
                arrivals.append((start + self.link.latency, source, peer, size))
                done[source] = self._sending[source]
        for arrival, _, peer, size in sorted(arrivals):
            self._receiving[peer] = max(arrival, self._receiving[peer]) + self.link.transfer(size)
            done[peer] = max(done[peer], self._receiving[peer])
        return done

    def wait(self, rank: int, until: float) -> float:
        """``rank`` waits ``until`` then, if that is not past; how long that was."""
        waited = max(0.0, until - self.now[rank])
        self.now[rank] += waited
        return waited

    def synchronize(self, seconds: float) -> float:
        """A collective that takes ``seconds`` from the moment everybody is there; when it ends."""
        end = max(*self.now, *self._sending, *self._receiving) + seconds
        ranks = len(self.now)
        self._sending, self._receiving = [end] * ranks, [end] * ranks
        return end
