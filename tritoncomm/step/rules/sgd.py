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

from tritoncomm.step.rules.late import Held, LateRule
from tritoncomm.step.torch_internals import steps_as


class LateSGD(LateRule):
    """The rule for ``torch.optim.SGD`` that was made with momentum and without dampening. It may be ``nesterov``.

    A group may have another momentum, which may change, also to 0. SGD that was made without momentum has no rule.
    Coupled weight decay is not added: ``.grad`` must contain it, see :func:`~tritoncomm.step.rules.step.coupled_decay`.
    """

    held: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    is_proportional: ClassVar[bool] = True
    unsupported: ClassVar[tuple[str, ...]] = ("dampening", "differentiable")

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for SGD whose defaults have momentum, and no dampening. Those of its groups may change."""
        defaults = optimizer.defaults
        return (
            steps_as(optimizer, (torch.optim.SGD,))
            and float(defaults["momentum"]) > 0
            and float(defaults["dampening"]) == 0
        )

    def advance(
        self, group: Mapping[str, Any], held: Held, mean: torch.Tensor, tau: torch.Tensor
    ) -> tuple[torch.Tensor, Held]:
        momentum = float(group["momentum"])
        mean = -mean if group["maximize"] else mean
        if momentum == 0:
            return mean, held
        kept, lost = self.powers(momentum, tau)
        # 1 + momentum + ... + momentum^(tau - 1), which is not rounded where a gradient is not late
        steps = tau if momentum == 1 else torch.where(tau == 1, 1.0, lost / (1 - momentum))
        buffer = kept * held["momentum_buffer"] + steps * mean
        direction = torch.add(mean, buffer, alpha=momentum) if group["nesterov"] else buffer
        return direction, {"momentum_buffer": buffer}
