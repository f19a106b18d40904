"""Adam and AdamW over late, sparse gradients.

Error feedback delivers a coordinate's gradient late and in one burst: zeros for tau - 1 steps, then the
sum of tau gradients. Adam takes the zeros for gradients: both moments decay, then the burst enters the
second moment squared, and a steady coordinate moves only 1/sqrt(tau) of what it should. Here a delivery
of sum s after tau steps *is* tau steps with gradient s / tau, and a coordinate without delivery had no
step. Everything used is the same on all ranks, so replicas stay bit-identical and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError

_REFUSED = ("capturable", "differentiable")


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for exactly Adam and AdamW, whose step is known here; a subclass may have changed it."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class StalenessAwareAdam:
    """Takes the step of a ``torch.optim.Adam`` or ``AdamW`` over the delivered coordinates only.

    The optimizer keeps its own state (``step``, ``exp_avg``, ``exp_avg_sq``) and gains
    ``last_delivered`` (int32, like the parameter): the step of each coordinate's last delivery.
    ``max_catch_up`` limits one delivery to so many dense steps. With every coordinate delivered every
    step this is torch's own rule up to rounding. Work is O(delivered), but for weight decay.
    ``foreach`` and ``fused`` only choose among torch's own loops and have no meaning here.
    """

    optimizer: torch.optim.Optimizer
    max_catch_up: float = 20.0
    bias_correction: bool = True

    def __post_init__(self) -> None:
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
            for parameter in group["params"]:
                if id(parameter) in where and parameter.grad is not None and parameter.numel():
                    self._update(group, parameter, where[id(parameter)])

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, indices: torch.Tensor | None) -> None:
        state = self._state(group, parameter)
        state["step"] += 1
        steps = int(state["step"])
        learning_rate, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))
        if decoupled and decay:
            parameter.mul_(1 - learning_rate * decay)
        if indices is not None and indices.numel() == 0:
            return
        # Half-precision state is updated in fp32; fp64 stays what it is.
        at = _Coordinates(indices, torch.promote_types(parameter.dtype, torch.float32))
        tau = steps - at.read(state["last_delivered"])
        assert parameter.grad is not None
        mean = at.read(parameter.grad) / tau
        if group["maximize"]:
            mean = -mean
        if decay and not decoupled:
            mean = mean + decay * at.read(parameter)
        beta1, beta2 = map(float, group["betas"])
        first = _average(at.read(state["exp_avg"]), mean, beta1, tau)
        second = _average(at.read(state["exp_avg_sq"]), mean * mean, beta2, tau)
        at.write(state["exp_avg"], first)
        at.write(state["exp_avg_sq"], second)
        at.write(state["last_delivered"], torch.full_like(tau, steps))
        if group["amsgrad"]:
            second = torch.maximum(at.read(state["max_exp_avg_sq"]), second)
            at.write(state["max_exp_avg_sq"], second)
        correct1 = 1 - beta1**steps if self.bias_correction else 1.0
        correct2 = 1 - beta2**steps if self.bias_correction else 1.0
        denominator = second.sqrt() / math.sqrt(correct2) + group["eps"]
        distance = self.catch_up(tau, steps) * (first / denominator)
        at.write(parameter, at.read(parameter) - learning_rate / correct1 * distance)

    def catch_up(self, tau: torch.Tensor, steps: int) -> torch.Tensor:
        """For how many dense steps a delivery after ``tau`` steps counts, at step ``steps``."""
        return tau.clamp(max=self.max_catch_up)

    def _state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        if "last_delivered" not in state:
            # State of the bare optimizer: it has stepped every coordinate every time.
            state["last_delivered"] = torch.full_like(parameter, int(state["step"]), dtype=torch.int32)
        return state


@dataclass(frozen=True)
class _Coordinates:
    """Some coordinates of flattened tensors, or all of them."""

    indices: torch.Tensor | None
    dtype: torch.dtype

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        return (flat if self.indices is None else flat[self.indices]).to(self.dtype)

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """In place, whatever the strides of ``tensor``."""
        values = values.to(tensor.dtype)
        if self.indices is None:
            tensor.copy_(values.view(tensor.shape))
        elif tensor.is_contiguous():
            tensor.view(-1)[self.indices] = values
        else:
            flat = tensor.reshape(-1)
            flat[self.indices] = values
            tensor.copy_(flat.view(tensor.shape))


def _average(old: torch.Tensor, new: torch.Tensor, beta: float, tau: torch.Tensor) -> torch.Tensor:
    """The exponential average after ``tau`` steps that all saw ``new``."""
    if beta == 0:
        return new
    # expm1 keeps 1 - beta^tau exact to rounding where beta is close to 1. Not old + share * (new - old):
    # once beta^tau is tiny a small new value would drown in the rounding of a large old one.
    exponent = tau * math.log(beta)
    return torch.exp(exponent) * old - torch.expm1(exponent) * new
