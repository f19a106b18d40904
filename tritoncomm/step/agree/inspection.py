"""Whether somebody else averages gradients beside the exchange, such as a DDP module that it was not told of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tritoncomm.scheduler.ranks import speaks
from tritoncomm.step.agree.number import number_of
from tritoncomm.step.tensors.shards import local, stored

logger = logging.getLogger("tritoncomm")

_LARGE = 1024  # elements


class Inspection:
    """Compares the gradients of all ranks before they are exchanged. Averaged ones are equal.

    This is due in the first step, and when parameters are compared: after 1, 10 and every 100 updates.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def run(
        self,
        group: dist.ProcessGroup | None,
        named: Sequence[tuple[torch.Tensor, str]],
        step: int,
        compare: Callable[[torch.Tensor], tuple[list[bool], list[bool]]],
        device: torch.device,
    ) -> None:
        """Log once which gradients are equal on all ranks of ``group``, which all call this together.

        Every ``.grad`` must still be this rank's own. Zeros say nothing, and neither does a bias, unless all gradients
        are equal.

        Args:
            group: The process group of the exchange.
            named: The parameters, each with its name.
            step: Number of the step, for messages.
            compare: Returns for each of some numbers whether it is not 0, and whether all ranks pass the same.
            device: Device of these numbers.
        """
        there, equal = compare(torch.stack([_number_of(parameter.grad, device) for parameter, _ in named]))
        found = [each for each, is_there, same in zip(named, there, equal, strict=True) if is_there and same]
        averaged = found if len(found) == sum(there) else [each for each in found if _tells(each[0])]
        if averaged and not self._has_warned and speaks(group):
            logger.warning(
                "in step %d, the gradients of %d parameters are equal on all ranks before the exchange, the first is "
                "that of %s. Somebody has averaged them densely, or all ranks have the same data. For a model in "
                "DistributedDataParallel, pass model=ddp_model to tritoncomm.wrap(), and for a module that was built "
                "later call optimizer.reset_process_group(model=ddp_model), which keeps residuals. Of two "
                "wrapped optimizers with the same parameters, each needs a backward pass of its own after zero_grad(). "
                "Otherwise do not average gradients before step(), and give each rank other data",
                step,
                len(averaged),
                averaged[0][1],
            )
        self._has_warned |= bool(averaged)


def _tells(parameter: torch.Tensor) -> bool:
    """Return False for a tensor whose gradients may be equal by nature, such as a last bias."""
    return parameter.dim() > 1 or parameter.numel() >= _LARGE


def _number_of(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a number that equal gradients have in common, int64 ``[]``.

    It is zero for none, for one of zeros, and for one with NaN or Inf, which may be equal because the loss is.
    """
    if gradient is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    own = stored(local(gradient).detach())
    return torch.where(torch.isfinite(own).all(), number_of(own), 0).to(device)
