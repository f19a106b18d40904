"""Measure the latency and bandwidth between the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import Pattern, Round
from tritoncomm_kernels import devices

# Size of the large message in words, and number of measurements of each size.
_PROBE_WORDS, _PROBES = 1 << 20, 5


def measure_link(group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> Link:
    """Return the latency and bandwidth between neighboring ranks of ``group``. All ranks return the same link.

    Every rank sends to the next rank and receives from the previous one, first one word and then 4 MiB. The times
    include the overhead of the scheduler. The fastest of several measurements counts, because other load on the machine
    only slows them down. The slowest pair of ranks determines the result.
    """
    device = torch.device(device)
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
            devices.synchronize(device)
            scheduler.meter.settle()
            seconds.append(scheduler.meter.waited)
        return min(seconds)

    times = torch.tensor([best(1), best(_PROBE_WORDS)], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    latency, long = times.tolist()
    return Link(latency, cost.WORD * _PROBE_WORDS / max(long - latency, 1e-9))
