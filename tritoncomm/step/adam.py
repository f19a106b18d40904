"""Adam and AdamW over late, sparse gradients.

Error feedback delivers a coordinate's gradient late and in one burst: zeros for tau - 1 steps, then the
sum of tau gradients. Adam takes the zeros for gradients: both moments decay, then the burst enters the
second moment squared, and a steady coordinate moves only 1/sqrt(tau) of what it should. Here a delivery
of sum s after tau steps *is* tau steps with gradient s / tau, and a coordinate without delivery had no
step. Everything used is the same on all ranks, so replicas stay bit-identical and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm_kernels import AdamControl, AdamState, adam_update, root_mean_square

# Steps between looks at a parameter's norm, which after as many steps changes by little, or grows and is taken for
# smaller than it is. Until then every step looks: weights may start at zero.
_LOOK_EVERY = 20
_EXACT = 4  # bytes of a float that holds any step count
_REFUSED = ("capturable", "differentiable")


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for exactly Adam and AdamW, whose step is known here; a subclass may have changed it."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class StalenessAwareAdam:
    """Takes the step of a ``torch.optim.Adam`` or ``AdamW`` over the delivered coordinates only.

    The optimizer keeps its own state (``step``, ``exp_avg``, ``exp_avg_sq``) and gains
    ``last_delivered`` (int32, like the parameter): the step of each coordinate's last delivery,
    ``last_aware``: the last step that was taken here, and ``param_rms``.
    ``max_catch_up`` limits one delivery to so many dense steps. ``max_sqrt_staleness`` (at least 1) limits it to so
    many times the square root of the steps it stands for, which is how far noise would have carried it in them. Where
    much of a tensor arrives at once, catching up is shortened until the tensor changes by no more than
    ``max_relative_update`` of its norm (or by a learning rate per coordinate where that is more), but never to less
    than a dense step. With every coordinate
    delivered every step this is torch's own rule up to rounding. Work is O(delivered), but for weight decay and for
    ``param_rms``, each parameter's root mean square, which is looked at every 20 steps.
    ``foreach`` and ``fused`` only choose among torch's own loops and have no meaning here.
    """

    optimizer: torch.optim.Optimizer
    max_catch_up: float = 20.0
    max_sqrt_staleness: float = 3.0
    max_relative_update: float = 0.2
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_catch_up", 1), ("max_sqrt_staleness", 1), ("max_relative_update", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give a number from {least} on")
        self.check_options()

    def check_options(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` for options that this step cannot honour."""
        for group in self.optimizer.param_groups:
            for option in _REFUSED:
                if group.get(option):
                    raise ConfigurationError(
                        f"{option}=True is not supported by the staleness-aware step: "
                        f'build the optimizer without it, or pass staleness="off"'
                    )

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], delivered: Sequence[torch.Tensor | None]) -> None:
        """One step. ``delivered[i]`` (int64, ascending) indexes the flattened ``parameters[i]``; None is all.

        The averaged gradient is read from ``.grad``. Parameters that are not listed do not move.
        """
        self.check_options()
        where = {id(p): indices for p, indices in zip(parameters, delivered, strict=True)}
        for group in self.optimizer.param_groups:
            controls: dict[tuple[int, torch.device], AdamControl] = {}
            for parameter in group["params"]:
                if id(parameter) in where and parameter.grad is not None and parameter.numel():
                    self._update(group, parameter, where[id(parameter)], controls)

    def _update(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        indices: torch.Tensor | None,
        controls: dict[tuple[int, torch.device], AdamControl],
    ) -> None:
        state = self._state(group, parameter)
        state["step"] += 1
        state["last_aware"] = state["step"].clone()
        learning_rate, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))
        if decoupled and decay:
            parameter.mul_(1 - learning_rate * decay)
        if indices is not None and indices.numel() == 0:
            return
        assert parameter.grad is not None
        at = int(state["step"]), parameter.device
        if at not in controls:  # one copy to the device for all parameters of a group
            coupled = 0.0 if decoupled else decay
            controls[at] = self._control(group, *at, learning_rate, coupled)
        maximum = state["max_exp_avg_sq"] if group["amsgrad"] else None
        tensors = AdamState(state["exp_avg"], state["exp_avg_sq"], state["last_delivered"], state["param_rms"], maximum)
        adam_update(parameter, parameter.grad, tensors, controls[at], indices)

    def _control(
        self, group: dict[str, Any], steps: int, device: torch.device, learning_rate: float, coupled: float
    ) -> AdamControl:
        beta1, beta2 = map(float, group["betas"])
        return AdamControl.of(
            steps=steps,
            learning_rate=learning_rate,
            betas=(beta1, beta2),
            epsilon=float(group["eps"]),
            max_catch_up=self.catch_up(steps),
            max_sqrt_staleness=self.max_sqrt_staleness,
            max_relative_update=self.max_relative_update,
            device=device,
            bias_correction=self.corrects(steps),
            coupled_decay=coupled,
            maximize=group["maximize"],
        )

    def catch_up(self, steps: int) -> float:
        """For how many dense steps one delivery counts at most, at step ``steps``."""
        return self.max_catch_up

    def corrects(self, steps: int) -> bool:
        """Whether the moments are divided by ``1 - beta**steps`` at step ``steps``."""
        return self.bias_correction

    def _state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        if "last_delivered" in state and state["last_delivered"].dtype != torch.int32:
            # The bare optimizer's load_state_dict has cast it to the parameter's dtype; 16 bits hold no step counts.
            last = state.pop("last_delivered")
            state.pop("param_rms", None)
            if last.element_size() >= _EXACT:
                state["last_delivered"] = last.to(torch.int32)
        if "last_delivered" not in state or state["last_aware"] != state["step"]:
            # The bare optimizer came last: it has stepped every coordinate every time.
            state["last_delivered"] = torch.full_like(parameter, int(state["step"]), dtype=torch.int32)
            state.pop("param_rms", None)
        step = int(state["step"])
        if "param_rms" not in state:
            state["param_rms"] = root_mean_square(parameter)
        elif step < _LOOK_EVERY or step % _LOOK_EVERY == 0:
            state["param_rms"].copy_(root_mean_square(parameter))
        return state
