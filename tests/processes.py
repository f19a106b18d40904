"""Which processes another one has started, and whether they have ended. What workers run that end in some way."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Round


def is_running(process: int) -> bool:
    """Whether the process with this number exists and is not a zombie."""
    with suppress(OSError):
        return "State:\tZ" not in Path("/proc", str(process), "status").read_text()
    return False


def end_soon(processes: Sequence[int]) -> bool:
    """Wait until all processes have ended, at most ten seconds. Return whether they have."""
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, processes))


def children(process: int) -> list[int]:
    """Return the numbers of the running processes that this one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{process}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def parent(process: int) -> int:
    """Return the number of the process that has started this one."""
    status = Path("/proc", str(process), "status").read_text()
    return int(status.partition("\nPPid:\t")[2].partition("\n")[0])


def fails(rank: int, world_size: int, send) -> None:
    """Rank 1 fails while the others are in a collective."""
    if rank == 1:
        raise ZeroDivisionError("the bug of rank 1")
    dist.barrier()


def vanishes(rank: int, world_size: int, send) -> None:
    """Rank 0 dies without a traceback."""
    if rank == 0:
        os._exit(9)
    time.sleep(600)


def ends(rank: int, world_size: int, send) -> int:
    """Return the number of threads."""
    return torch.get_num_threads()


def taken_by_rounds(rank: int, world_size: int, send) -> list[float]:
    """Return the seconds that a round of messages and three collectives take.

    They are a median: a rank may be ahead of another one by two rounds, and a busy machine is slow now and then.
    """
    words = torch.ones(300, dtype=torch.int32)  # a packet: more of them need more delays after one was late
    ring = Round("ring", {(rank + 1) % world_size: words}, {(rank - 1) % world_size: 300})
    sums, lists, rows = AllReduce("sum", torch.ones(9)), AllGather("all", torch.ones(2)), torch.ones(world_size)
    scheduler, found = ProcessGroupScheduler(), []

    def pattern(op):
        yield op

    for op in (ring, sums, lists, AllToAll("rows", rows)):
        scheduler.run(pattern(op))
        taken = []
        for _ in range(9):
            started = time.monotonic()
            scheduler.run(pattern(op))
            taken.append(time.monotonic() - started)
        found.append(sorted(taken)[4])
    return found
