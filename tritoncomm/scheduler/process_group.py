"""Runs a pattern on ``torch.distributed``: batched point-to-point messages and a few collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm import cost, wire
from tritoncomm.cost import Link
from tritoncomm.errors import ExchangeError, ProtocolMismatchError
from tritoncomm.metrics import Meter
from tritoncomm.scheduler.rounds import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Inbox,
    Pattern,
    Post,
    Result,
    Round,
    Ticket,
    Wait,
    Word,
)

# Tags keep rounds apart on backends that have them; gloo reserves the high values for itself.
_TAGS = 1 << 15
# What the measurement of a link sends, and how often.
_PROBE_WORDS, _PROBES = 1 << 20, 5


class ProcessGroupScheduler:
    """One rank's end of the exchange. ``group=None`` is the default process group.

    ``device`` is where messages are received: the device of the vector that is exchanged.
    ``timeout`` limits each wait; None leaves it to the process group's own time-out. ``meter`` holds
    the traffic and waiting time of the last pattern that was run.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        device: torch.device | str = "cpu",
        stamp: str = "",
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.meter = Meter()
        self._sequence = 0
        self._global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)

    def run(self, pattern: Pattern[Result]) -> Result:
        """Run ``pattern`` to its end and return its result.

        Raises :class:`ExchangeError` when the network fails, :class:`ProtocolMismatchError` when a
        message belongs elsewhere, and whatever the pattern raises; the pattern is closed then.
        """
        self.meter = Meter()
        reply: Any = None
        try:
            while True:
                reply = self._perform(pattern.send(reply))
        except StopIteration as stop:
            result: Result = stop.value
            return result
        finally:
            pattern.close()

    def _perform(self, word: Word) -> Any:
        self._sequence += 1
        started = time.perf_counter()
        try:
            if isinstance(word, Round):
                return self._wait(self._post(word))
            if isinstance(word, Post):
                return self._post(word.round)
            if isinstance(word, Wait):
                return self._wait(word.ticket)
            return self._collective(word)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ProtocolMismatchError):
                raise
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size}, round {self._sequence}, phase {word.phase!r}"
                f"{_peers(word)}: {error}"
            ) from error
        finally:
            self.meter.wait(word.phase, time.perf_counter() - started)

    def _post(self, round_: Round) -> Ticket:
        sequence = self._sequence
        tag = sequence % _TAGS
        buffers: dict[int, torch.Tensor] = {}
        sends: list[torch.Tensor] = []
        operations: list[dist.P2POp] = []
        for peer, words in round_.receives.items():
            buffers[peer] = torch.empty(words + cost.HEADER_WORDS, dtype=torch.int32, device=self.device)
            operations.append(self._operation(dist.irecv, buffers[peer], peer, tag))
        for peer, payload in round_.sends.items():
            sends.append(wire.frame(payload, sequence, round_.phase))
            operations.append(self._operation(dist.isend, sends[-1], peer, tag))
        works = dist.batch_isend_irecv(operations) if operations else []
        self._count(round_)
        # The framed sends must live until the wait: the backend reads them in the background.
        return Ticket(round_.phase, (sequence, works, buffers, sends))

    def _operation(self, kind: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._global_ranks[peer], self.group, tag)

    def _wait(self, ticket: Ticket) -> Inbox:
        sequence, works, buffers, _ = ticket.token
        for work in works:
            self._finish(work)
        inbox: Inbox = {}
        for peer, buffer in buffers.items():
            try:
                inbox[peer] = wire.unframe(buffer, sequence, ticket.phase)
            except ProtocolMismatchError as error:
                raise ProtocolMismatchError(f"rank {self.rank} from rank {peer}: {error}") from error
        return inbox

    def _collective(self, word: Collective) -> torch.Tensor:
        tensor = word.tensor.contiguous()
        size, itemsize = tensor.numel(), tensor.element_size()
        if isinstance(word, AllReduce):
            result = tensor.clone()
            self._finish(dist.all_reduce(result, group=self.group, async_op=True))
            traffic = cost.all_reduce(size, itemsize, self.world_size)
        elif isinstance(word, AllToAll):
            result = torch.empty_like(tensor)
            self._finish(dist.all_to_all_single(result, tensor, group=self.group, async_op=True))
            traffic = cost.all_to_all(1, itemsize, self.world_size)
        else:
            assert isinstance(word, AllGather)
            result = tensor.new_empty(self.world_size, size)
            self._finish(dist.all_gather(list(result), tensor, group=self.group, async_op=True))
            traffic = cost.all_gather(size, itemsize, self.world_size)
        self.meter.count(word.phase, traffic, traffic)
        return result

    def _finish(self, work: Any) -> None:
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)

    def _count(self, round_: Round) -> None:
        sent = [cost.message(payload.numel()) for payload in round_.sends.values()]
        received = [cost.message(words) for words in round_.receives.values()]
        self.meter.count(round_.phase, cost.total(sent), cost.total(received))


def _peers(word: Word) -> str:
    round_ = word if isinstance(word, Round) else word.round if isinstance(word, Post) else None
    if round_ is None:
        return ""
    return f" (sends to {sorted(round_.sends)}, expects from {sorted(round_.receives)})"


def measure_link(group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> Link:
    """Latency and bandwidth between neighbouring ranks of ``group``, at the slowest pair; the same on all ranks.

    Every rank sends to the next and receives from the one before, a word and 4 MiB at a time, with all of the
    scheduler's own work included. The best of several attempts counts, as the others were disturbed.
    """
    scheduler = ProcessGroupScheduler(group, device=device)
    rank, world_size = scheduler.rank, scheduler.world_size

    def pattern(words: int) -> Pattern[None]:
        message = torch.zeros(words, dtype=torch.int32, device=device)
        yield Round("link", {(rank + 1) % world_size: message}, {(rank - 1) % world_size: words})

    def best(words: int) -> float:
        scheduler.run(pattern(words))
        seconds = []
        for _ in range(_PROBES):
            scheduler.run(pattern(words))
            seconds.append(scheduler.meter.waited)
        return min(seconds)

    times = torch.tensor([best(1), best(_PROBE_WORDS)], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    latency, long = times.tolist()
    return Link(latency, cost.WORD * _PROBE_WORDS / max(long - latency, 1e-9))
