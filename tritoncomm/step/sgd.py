"""SGD with momentum for gradients that are delivered late.

The step of SGD is linear: a late sum moves a coordinate as far as its parts. With momentum it does so in the steps
after the delivery, in which nothing tells that the coordinate has arrived. At the rates that are best for dense
training, it overshoots. Here, the sum s after tau steps enters the momentum as tau steps with the gradient s / tau, and
the momentum moves a coordinate only when it is delivered: as far as in tau steps, within the limit per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tritoncomm.step.late import Held, LateRule
from tritoncomm.step.torch_internals import steps_as


class LateSGD(LateRule):
    """The rule for ``torch.optim.SGD`` with momentum, with or without ``nesterov``, and without ``dampening``.

    SGD without momentum needs none. Coupled weight decay is not added: ``.grad`` must contain it, see
    :func:`~tritoncomm.step.update.coupled_decay`.
    """

    held: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    is_proportional: ClassVar[bool] = True

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for SGD whose groups all have momentum, and no dampening."""
        return steps_as(optimizer, (torch.optim.SGD,)) and all(
            float(group["momentum"]) > 0 and float(group["dampening"]) == 0 for group in optimizer.param_groups
        )

    def advance(
        self, group: Mapping[str, Any], held: Held, mean: torch.Tensor, tau: torch.Tensor
    ) -> tuple[torch.Tensor, Held]:
        momentum = float(group["momentum"])
        kept = torch.pow(momentum, tau)
        mean = -mean if group["maximize"] else mean
        # momentum^tau m + (1 + momentum + ... + momentum^(tau - 1)) mean
        buffer = kept * held["momentum_buffer"] + (1 - kept) / (1 - momentum) * mean
        return mean + momentum * buffer if group["nesterov"] else buffer, {"momentum_buffer": buffer}
