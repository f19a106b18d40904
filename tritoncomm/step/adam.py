"""Adam and AdamW for sparse gradients that are delivered with a delay.

With error feedback, a coordinate receives zeros for tau - 1 steps, then the sum of tau gradients. Unmodified Adam
treats the zeros as gradients. Both moments decay, the sum enters the second moment squared, and a coordinate with a
steady gradient moves only 1/sqrt(tau) of the distance that it should.

Here, a delivery of the sum s after tau steps counts as tau steps with gradient s / tau. A coordinate without a delivery
takes no step. The update uses only values that are equal on all ranks: replicas stay bit-identical, nothing is sent.

The arithmetic is in :mod:`tritoncomm_kernels.adam`. This module holds the optimizer's state and settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm_kernels import AdamControl, AdamState, adam_update, root_mean_square

# Steps between updates of ``param_rms``. During 20 later steps a norm changes little, or it grows and is
# underestimated. The first 20 steps update it every time, because weights may start at zero.
_UPDATE_RMS_EVERY = 20
_EXACT = 4  # bytes of a float type that holds any step count
_UNSUPPORTED = ("capturable", "differentiable")


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for ``Adam`` and ``AdamW``, but not for subclasses, which may change the step."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class StalenessAwareAdam:
    """Takes the step of a ``torch.optim.Adam`` or ``AdamW`` for the delivered coordinates only.

    The optimizer keeps its state (``step``, ``exp_avg``, ``exp_avg_sq``). The state of each parameter gains three
    entries. ``last_delivered`` (int32, shaped like the parameter) is the step of each coordinate's last delivery.
    ``last_aware`` is the last step that this class took. ``param_rms`` (fp32) is the root mean square of the parameter,
    updated every 20 steps.

    A delivery after tau steps counts for up to tau dense steps: it catches up. Three limits shorten this, but never to
    less than one dense step. If every coordinate is delivered in every step, the result is torch's own up to rounding.
    The cost is proportional to the number of delivered entries, except for weight decay and ``param_rms``. ``foreach``
    and ``fused`` only select among torch's loops and have no effect.

    Attributes:
        optimizer: The Adam or AdamW optimizer.
        max_catch_up: Maximum number of dense steps that one delivery counts for, at least 1.
        max_sqrt_staleness: A delivery after tau steps counts for at most this many times sqrt(tau) steps, at least 1.
            Noise would have moved the coordinate by about sqrt(tau) steps.
        max_relative_update: Maximum change of a tensor in one step, as a fraction of its norm. A root mean square
            change of one learning rate is always allowed.
        bias_correction: Whether the moments are divided by ``1 - beta**step``.
    """

    optimizer: torch.optim.Optimizer
    max_catch_up: float = 20.0
    max_sqrt_staleness: float = 3.0
    max_relative_update: float = 0.2
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_catch_up", 1), ("max_sqrt_staleness", 1), ("max_relative_update", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: must be at least {least}")
        self.check_options()

    def check_options(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""
        for group in self.optimizer.param_groups:
            for option in _UNSUPPORTED:
                if group.get(option):
                    raise ConfigurationError(
                        f"{option}=True is not supported by the staleness-aware step: "
                        f'build the optimizer without it, or pass staleness="off"'
                    )

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], delivered: Sequence[torch.Tensor | None]) -> None:
        """Update ``parameters`` from the averaged gradients in ``.grad``.

        Args:
            parameters: Parameters to update. Other parameters of the optimizer do not change.
            delivered: Ascending int64 indices of the delivered coordinates of each flattened parameter. None means all.
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
        """Return the maximum number of dense steps that one delivery counts for at step ``steps``."""
        return self.max_catch_up

    def corrects(self, steps: int) -> bool:
        """Return True if the moments are divided by ``1 - beta**steps`` at step ``steps``."""
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
            # load_state_dict() of the original optimizer cast it to the parameter's dtype. A 16-bit float cannot
            # hold step counts.
            last = state.pop("last_delivered")
            state.pop("param_rms", None)
            if last.element_size() >= _EXACT:
                state["last_delivered"] = last.to(torch.int32)
        if "last_delivered" not in state or state["last_aware"] != state["step"]:
            # The original optimizer took the last step by itself. It steps every coordinate.
            state["last_delivered"] = torch.full_like(parameter, int(state["step"]), dtype=torch.int32)
            state.pop("param_rms", None)
        step = int(state["step"])
        if "param_rms" not in state:
            state["param_rms"] = root_mean_square(parameter)
        elif step < _UPDATE_RMS_EVERY or step % _UPDATE_RMS_EVERY == 0:
            state["param_rms"].copy_(root_mean_square(parameter))
        return state
