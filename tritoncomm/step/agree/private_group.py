"""Process groups that no other exchange uses at the same time. They are used again when their owner is gone."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from tritoncomm.scheduler.failure_report import is_broken
from tritoncomm.scheduler.new_group import needs_all_ranks
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.watcher import timeout_of
from tritoncomm.step import agree
from tritoncomm.step.torch_internals import is_interruption, number_of_groups

# Groups without an owner, by their name, for each time-out. They belong to the default process group of the time: its
# successor has other connections.
_free: dict[timedelta, dict[str, dist.ProcessGroup]] = {}
_world: dist.ProcessGroup | None = None


def scheduler_of_all_shards(method: str, timeout: timedelta | None, device: torch.device) -> ProcessGroupScheduler:
    """Return a scheduler of all ranks, in a process group of its own, for :attr:`Scope.all_shards`.

    No shard of a model may step alone. All ranks of the default process group call this together.

    torch keeps every group until the process ends, so a group whose scheduler is gone is used again. Ranks collect
    garbage at different times. They therefore agree on a group that is free on all of them.

    Args:
        method: Name of the method, for messages.
        timeout: Time-out of the group. None is that of the default group.
        device: Device of the exchange.

    Raises:
        ExchangeError: A rank was lost or did not take part.
    """
    global _world  # noqa: PLW0603 - there is one default group
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _free.clear()
    limit = timeout or timeout_of(None, device)  # torch would use its own default
    free = _free.setdefault(limit, {})
    usable = [name for name, each in list(free.items()) if not is_broken(each)]
    offered = [set(fields["free"]) for fields in agree.all_gather({"free": usable}, None, device).values()]
    common = set.intersection(*offered)
    chosen: dist.ProcessGroup = free.pop(min(common)) if common else dist.new_group(timeout=limit)
    scheduler = ProcessGroupScheduler(
        chosen, timeout, device, f"{method} of all shards", is_interruption=is_interruption
    )
    weakref.finalize(scheduler, free.__setitem__, chosen.group_name, chosen).atexit = False
    return scheduler


def numbered_groups() -> dict[str, int]:
    """Return what ranks compare before some of them create a process group, which finds its members by this number."""
    field = (
        "number of process groups of this rank (a group of some ranks counts on these alone: make one of the others)"
    )
    return {} if needs_all_ranks() else {field: number_of_groups()}
