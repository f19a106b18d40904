"""Measures the network: latency and bandwidth between the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import Pattern, Round

# What is sent, and how often.
_PROBE_WORDS, _PROBES = 1 << 20, 5


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
