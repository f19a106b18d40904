"""What PyTorch has no public function for. Each use of a private name in the exchange is here, with its reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def current_backward() -> int:
    """Return a number that identifies the backward pass in which this is called, or -1 outside of one.

    FSDP calls a hook several times in a pass, and the first call begins the step. DDP's ``join()`` calls a hook outside
    of a pass.
    """
    number: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass in which this is called, after callbacks that are queued now.

    An error in it is raised by ``backward()``. DDP and FSDP2 finish their passes in the same way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def number_of_groups() -> int:
    """Return the number of process groups of this rank.

    With ``use_local_synchronization``, torch names a new group by this number. Ranks with other numbers never meet.
    """
    return len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001


def joins(model: DistributedDataParallel) -> bool:
    """Return True if the last ``join()`` of ``model`` lets ranks go on without a batch.

    The hook cannot see ``join()`` on the ranks that have a batch.
    """
    settings = model._join_config  # noqa: SLF001
    return bool(settings.enable and not settings.throw_on_early_termination)
