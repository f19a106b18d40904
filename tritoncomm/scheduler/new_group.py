"""Create process groups of some ranks of the default process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import rank_text


def needs_all_ranks() -> bool:
    """Return True if every rank of the default process group must take part in the creation of a new group.

    ``init_process_group(device_id=...)`` binds the default group to a device. NCCL then makes the communicator of a new
    group by splitting that of the default group, which is a collective of all its ranks.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    return device is not None and bool(world._get_backend(device).supports_splitting)  # type: ignore[union-attr]  # noqa: SLF001 - no public function returns it


def new_group(ranks: Sequence[int], timeout: timedelta | None, callers: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a new group of the global ``ranks``.

    Args:
        ranks: The members. They call this, or all ranks if :func:`needs_all_ranks`.
        timeout: Time-out of the new group. None is the default of torch.
        callers: Global ranks of the exchange, which can call this together.

    Returns:
        The group. On a rank that is not in it, what torch returns there.

    Raises:
        ConfigurationError: All ranks must take part, and some are not in the exchange.
    """
    if not needs_all_ranks():
        group: dist.ProcessGroup | None = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return group
    if len(callers) < dist.get_world_size():
        raise ConfigurationError(
            f"the exchange is among {rank_text(*callers)} of {dist.get_world_size()} and needs a new process group, "
            "but the default process group is bound to a device, and NCCL then needs all ranks to create a group: call "
            "init_process_group without device_id"
        )
    split: dist.ProcessGroup | None = dist.new_group(list(ranks), timeout=timeout)
    return split
