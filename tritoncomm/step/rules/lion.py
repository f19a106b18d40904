"""Lion for gradients that are delivered late.

X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023). Lion steps by the sign of an average of
gradients. A delivery of the sum s after tau steps enters both of its averages as tau steps with the gradient s / tau.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tritoncomm.step.rules.late import Held, LateRule
from tritoncomm.step.torch_internals import original_class

# Options of public implementations, with the values at which their step is that of the paper.
_PLAIN = {
    "maximize": False,
    "caution": False,
    "cautious": False,
    "cautious_factor": 1.0,
    "weight_decouple": True,
    "fixed_decay": False,
    "corrected_weight_decay": False,
}
# Names that say nothing about the step.
_SILENT = ("lr", "betas", "weight_decay", "foreach", "fused")


class LateLion(LateRule):
    """The rule for optimizers called ``Lion``, with ``betas`` and decoupled weight decay, and ``exp_avg`` in the state.

    torch has no Lion. Those of other libraries have these names.
    """

    held: ClassVar[tuple[str, ...]] = ("exp_avg",)
    others: ClassVar[tuple[str, ...]] = ("Lion",)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for a class called ``Lion`` whose options are those of Lion, and none changes its step.

        Options are in the groups, or attributes. One that is not known and is set may change the step.
        """
        if original_class(optimizer).__name__ != "Lion":
            return False
        options, groups = {*optimizer.defaults, *_PLAIN}, optimizer.param_groups
        if not all(name in each for each in groups for name in ("lr", "betas", "weight_decay")):
            return False
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if isinstance(value, (bool, int, float)) and not name.startswith("_")
        }
        given = [attributes, *({name: each[name] for name in options & each.keys()} for each in groups)]
        return all(_is_plain(name, value) for each in given for name, value in each.items())

    def advance(
        self, group: Mapping[str, Any], held: Held, mean: torch.Tensor, tau: torch.Tensor
    ) -> tuple[torch.Tensor, Held]:
        average = held["exp_avg"]
        (read, added), (kept, entered) = (self.powers(float(beta), tau) for beta in group["betas"])
        direction = (read * average + added * mean).sign()
        return direction, {"exp_avg": kept * average + entered * mean}

    def decay(self, group: Mapping[str, Any]) -> float:
        return 1.0 - float(group["lr"]) * float(group["weight_decay"])


def _is_plain(name: str, value: Any) -> bool:
    """Return True if the option ``name`` with this ``value`` leaves the step of the paper as it is."""
    if name in _PLAIN:
        return bool(value == _PLAIN[name])
    return name in _SILENT or not value
