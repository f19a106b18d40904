"""Process groups that no other exchange uses at the same time. They are used again when their owner is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tritoncomm.scheduler.failure_report import is_broken
from tritoncomm.scheduler.new_group import needs_all_ranks, new_group
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.scheduler.watcher import timeout_of
from tritoncomm.step import agree
from tritoncomm.step.torch_internals import is_interruption, number_of_groups

_Groups = dict[str, dist.ProcessGroup]
# Groups without an owner, by their name, for each set of ranks and time-out. They belong to the default process group
# of the time: its successor has other connections.
_free: dict[tuple[tuple[int, ...], timedelta | None], _Groups] = {}
_world: dist.ProcessGroup | None = None


def private_group(
    group: dist.ProcessGroup | None, timeout: timedelta | None, device: torch.device | None = None
) -> tuple[dist.ProcessGroup, Callable[[object], None]]:
    """Return a group of the ranks of ``group`` that nothing else uses. All of its ranks call this together.

    torch keeps every group until the process ends, so a group whose owner is gone is used again. Ranks collect garbage
    at different times. They therefore agree on a group that is free on all of them.

    Args:
        group: Process group with the same ranks. None is the default group.
        timeout: Time-out of the new group. None is that of ``group``.
        device: Device of the exchange. See :func:`~tritoncomm.step.agree.all_gather`.

    Returns:
        The group, and a function. Call it with the owner: the group is free when the owner is garbage.

    Raises:
        ConfigMismatchError: Ranks of a part of the default group have different numbers of process groups.
        ConfigurationError: All ranks of the default group would have to take part.
        ExchangeError: A rank was lost or did not take part.
    """
    global _world  # noqa: PLW0603 - there is one default group
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _free.clear()
    ranks = tuple(global_ranks(group))
    timeout = timeout or timeout_of(group, device or torch.device("cpu"))  # torch would use its own default
    free = _free.setdefault((ranks, timeout), {})
    usable = [name for name, each in list(free.items()) if not is_broken(each)]
    offered = [set(fields["free"]) for fields in agree.all_gather({"free": usable}, group, device).values()]
    common = set.intersection(*offered)
    chosen = free.pop(min(common)) if common else _new_group(group, ranks, timeout, device)

    def belongs_to(owner: object) -> None:
        weakref.finalize(owner, free.__setitem__, chosen.group_name, chosen).atexit = False

    return chosen, belongs_to


def scheduler_of_all_shards(method: str, timeout: timedelta | None, device: torch.device) -> ProcessGroupScheduler:
    """Return a scheduler of all ranks, in a process group of its own, for :attr:`GradientExchange.all_shards`.

    No shard of a model may step alone. All ranks of the default process group call this together.
    """
    everybody, belongs_to = private_group(None, timeout, device)
    scheduler = ProcessGroupScheduler(
        everybody, timeout, device, f"{method} of all shards", is_interruption=is_interruption
    )
    belongs_to(scheduler)
    return scheduler


def numbered_groups() -> dict[str, int]:
    """Return what ranks compare before some of them create a process group, which finds its members by this number."""
    return (
        {} if needs_all_ranks() else {"number of process groups of this rank, which must be equal": number_of_groups()}
    )


def _new_group(
    group: dist.ProcessGroup | None, ranks: tuple[int, ...], timeout: timedelta | None, device: torch.device | None
) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        everybody: dist.ProcessGroup = dist.new_group(timeout=timeout)
        return everybody
    agree.compare(numbered_groups(), group, device)
    some = new_group(ranks, timeout, ranks)
    assert some is not None
    return some
