"""Whether somebody else averages gradients beside the exchange, such as a DDP module that it was not told of."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.model import Named, averages_nothing
from tritoncomm.step.replicas import Replica
from tritoncomm.step.shards import local
from tritoncomm.step.torch_internals import ddp_modules
from tritoncomm.step.vector import VectorExchange

logger = logging.getLogger("tritoncomm")


class Inspection:
    """Compares the gradients of all ranks before they are exchanged. Averaged ones are equal.

    This is due in the first step, and when parameters are compared: after 1, 10 and every 100 updates.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def is_due(self, updates: int, group: dist.ProcessGroup | None) -> bool:
        """Return True if gradients are to be compared in the step behind this number of ``updates``."""
        if not is_distributed() or dist.get_world_size(group) == 1:
            return False
        return Replica.is_due(updates)

    def run(
        self,
        group: dist.ProcessGroup | None,
        owners: Mapping[int, torch.Tensor],
        step: int,
        vectors: Sequence[VectorExchange],
    ) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if a DDP module has averaged gradients before the exchange.

        Averaged gradients are equal on all ranks of ``group``. Only then does this look for a DDP module. All ranks
        call this together, while every ``.grad`` is still the rank's own. Zeros say nothing. What else looks averaged
        is logged once.

        Args:
            group: The process group of the exchange.
            owners: The parameters for which others are exchanged, by the ids of these.
            step: Number of the step, for messages.
            vectors: The vectors of the exchange.
        """
        parameters = [owners.get(id(each), each) for vector in vectors for each in vector.parameters]
        anchors = [each for vector in vectors if vector.options.is_anchor for each in vector.parameters]
        device = vectors[0].flat.device
        digests = [_digest(each.grad, device) for each in (*parameters, *anchors)]
        there, equal = vectors[0].equal_on_all_ranks(torch.stack(digests))
        own = list(zip(parameters, there[: len(parameters)], equal[: len(parameters)], strict=True))
        differ = {id(parameter) for parameter, is_there, same in own if is_there and not same}
        chosen = zip(anchors, there[len(parameters) :], equal[len(parameters) :], strict=True)
        changed = {id(anchor) for anchor, change, same in chosen if change and same}
        averaged = {id(parameter) for parameter, is_there, same in own if is_there and same}
        if averaged:
            _check_modules(averaged, differ)
        reason = _unlike_local_steps(
            [
                (owners[id(each)], vector.name_of(each))
                for vector in vectors
                for each in vector.parameters
                if id(each) in changed and id(owners[id(each)]) in differ
            ]
        )
        if averaged and len(averaged) == sum(is_there for _, is_there, _ in own):
            reason = reason or (
                f"the gradients of all ranks are equal in step {step}: give each rank other data, and do not average "
                "gradients before step()"
            )
        if reason and not self._has_warned and dist.get_rank(group) == 0:
            logger.warning("%s", reason)
        self._has_warned |= bool(reason)


def _check_modules(averaged: Container[int], differ: Container[int]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if a DDP module has averaged the parameters with these ids.

    Gradients of some parameters, such as a last bias, may be equal by nature. A module averages all or none, so one
    with parameters that ``differ`` between ranks has not been used.
    """
    for module in ddp_modules():
        if averages_nothing(module) or any(id(each) in differ for each in module.module.parameters()):
            continue
        for name, parameter in module.module.named_parameters():
            if id(parameter) in averaged:
                raise ConfigurationError(
                    f"parameter {name!r} belongs to a DistributedDataParallel module, which averages its gradient "
                    "densely before this optimizer sees it: pass model=ddp_model to tritoncomm.wrap(). For a module "
                    "that was built later, also around the same layers, call "
                    "optimizer.reset_process_group(model=ddp_model), which keeps residuals. Copies of a module and its "
                    "optimizer have to be wrapped again"
                )


_LARGE = 1024  # elements. Steps by a sign are equal by chance for smaller tensors


def _unlike_local_steps(changed: Named) -> str:
    """Return what is wrong if steps on all ranks have ``changed`` large parameters equally, whose gradients differ."""
    found = [name for each, name in changed if each.dim() > 1 and each.numel() >= _LARGE]
    if not found:
        return ""
    return (
        f"in a step, all ranks have changed {len(found)} large parameters equally, the first is {found[0]}, although "
        "their gradients differ: the optimizer seems to exchange parameters or updates in its own step(), so that each "
        "parameter is trained by the gradient of one rank. Pass an optimizer that steps on each rank by itself, or "
        "exchange='gradients' and algo='dense'"
    )


def _digest(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a number that equal gradients have in common, int64 ``[]``. It is zero for none, and for one of zeros."""
    if gradient is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    own = local(gradient).detach()
    values = own.coalesce().values() if own.is_sparse else own
    return values.float().view(torch.int32).sum(dtype=torch.int64).to(device)
