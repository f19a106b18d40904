"""Gradients that ``DistributedDataParallel`` has averaged already must not be exchanged again."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.errors import ConfigurationError


def check_not_reduced(parameters: Iterable[torch.Tensor]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` when a living DDP module reduces one of ``parameters``.

    DDP leaves no mark on its parameters, so its modules are looked for among all living objects; once or twice
    in a run, some milliseconds each.
    """
    wanted = {id(parameter) for parameter in parameters}
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]:
        hooks = [hook for hook, _ in getattr(module, "_comm_hooks", [])]
        if noop_hook in hooks:
            continue
        for name, parameter in module.module.named_parameters():
            if id(parameter) in wanted and parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter {name!r} belongs to a DistributedDataParallel module, which averages its gradient "
                    "densely before this optimizer sees it: train the plain module (ddp_model.module), or keep DDP "
                    "and call tritoncomm.ddp.register(ddp_model) instead of wrap()"
                )
