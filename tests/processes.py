"""Which processes another one has started, and whether they have ended. What workers run that end in some way."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist


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
