"""Lion, as users have it: X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients, with decoupled weight decay.

    The state of a parameter is ``exp_avg``, the average of gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss
