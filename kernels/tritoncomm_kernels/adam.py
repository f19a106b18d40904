"""Adam's update over late, sparse gradients: a coordinate delivered after tau steps makes up for tau steps.

A delivery of sum s after tau steps is tau steps with gradient s / tau. Powers of the betas are products from
a table of repeated squares, so that every device computes the same bits; ``1 - beta^tau`` is summed from
the same table and never cancels. How far a tensor moves in all is summed up in integers, whose order does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from tritoncomm_kernels.checks import GRADIENT_DTYPES, INDEX_LIMIT, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs

POWERS = 31  # squares of beta: tau is int32
# Squares of distances are summed as integers, in 1/32 of a learning rate, each counting for 1448 rates at most: 2^31
# of them fit.
FINE, LARGEST_SQUARE = 32.0, 2.0**31
_SCALARS = 9  # of AdamControl
_PART = 1 << 20  # elements whose squares are held at a time


@dataclass(frozen=True)
class AdamState:
    """The tensors of one parameter that a step updates, each shaped like the parameter.

    ``first`` and ``second`` are Adam's moments, ``maximum`` (or None) the running maximum of the second for
    AMSGrad, ``last`` (int32) the step of each coordinate's last delivery. ``param_rms`` (fp32, one element) is the
    parameter's root mean square, now or not long ago.
    """

    first: torch.Tensor
    second: torch.Tensor
    last: torch.Tensor
    param_rms: torch.Tensor
    maximum: torch.Tensor | None = None


@dataclass(frozen=True)
class AdamControl:
    """The numbers of one step, in device memory: a kernel does not have to be compiled or launched anew for them.

    To replay a captured step, write the next numbers into ``scalars`` (and, when it has been looked at again, the
    param_rms of :class:`AdamState`) outside the graph.

    ``scalars`` (fp64 ``[9]``): step count, learning rate over the first bias correction, square root of
    the second, epsilon, the limit on tau for the distance, coupled weight decay, the limit in square roots of tau,
    32 over the first bias correction, and how many 32nds of a learning rate are the largest share of its param_rms
    by which a tensor may change.
    """

    scalars: torch.Tensor
    betas: tuple[float, float]
    maximize: bool = False
    coupled: bool = False
    limited: bool = True  # whether there is a largest share; without one, lengths are not added up

    @classmethod
    def of(
        cls,
        *,
        steps: int,
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        max_catch_up: float,
        device: torch.device,
        bias_correction: bool = True,
        coupled_decay: float = 0.0,
        maximize: bool = False,
        max_sqrt_staleness: float = 3.0,
        max_relative_update: float = 0.2,
    ) -> AdamControl:
        """Fill in the formulas."""
        correct1, correct2 = (1 - beta**steps if bias_correction else 1.0 for beta in betas)
        rate, root = learning_rate / correct1, math.sqrt(correct2)
        change = FINE * max_relative_update / learning_rate if learning_rate else 0.0  # nothing moves at a rate of 0
        scalars = [steps, rate, root, epsilon, max_catch_up, coupled_decay, max_sqrt_staleness, FINE / correct1, change]
        on_device = torch.tensor(scalars, dtype=torch.float64).to(device, non_blocking=True)
        return cls(on_device, betas, maximize, coupled_decay != 0, not math.isinf(max_relative_update))


def adam_update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: AdamState,
    control: AdamControl,
    indices: torch.Tensor | None = None,
) -> None:
    """Update the coordinates ``indices`` (int64 ``[k]``, unique, of the flattened ``parameter``); None for all.

    ``parameter`` and ``state`` are updated in place, only in the delivered coordinates; an index outside
    of ``[0, parameter.numel())`` updates nothing. All tensors have one shape. Half precision is computed
    in fp32; fp64 and strided tensors are left to torch's operators, on a GPU too. Raises ``ValueError``
    naming the argument that does not fit.
    """
    floats = _check(parameter, gradient, state, control, indices)
    if parameter.numel() == 0 or (indices is not None and indices.numel() == 0):
        return
    plain = all(t.dtype in GRADIENT_DTYPES and t.is_contiguous() for t in floats) and state.last.is_contiguous()
    if plain and triton_runs(parameter):
        torch.autograd.graph.increment_version(parameter)
        tables = _tables(control.betas, torch.float32, parameter.device)
        kernel("adam_triton").update(
            parameter, gradient, state.first, state.second, state.maximum, state.last, state.param_rms, indices,
            control.scalars, tables, maximize=control.maximize, coupled=control.coupled, limited=control.limited,
        )  # fmt: skip
        return
    if indices is not None:
        inside = (indices >= 0) & (indices < parameter.numel())
        indices = indices if bool(inside.all()) else indices[inside]
    _update(parameter, gradient, state, control, indices)


def _check(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: AdamState,
    control: AdamControl,
    indices: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Raise ``ValueError`` unless all tensors fit together; returns the floating-point ones."""
    named = {"parameter": parameter, "gradient": gradient, "first": state.first, "second": state.second}
    if state.maximum is not None:
        named["maximum"] = state.maximum
    for name, tensor in {**named, "last": state.last}.items():
        if tensor.shape != parameter.shape or tensor.device != parameter.device:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on {tensor.device}: "
                f"make it {tuple(parameter.shape)} on {parameter.device}, like the parameter"
            )
    if state.last.dtype != torch.int32:
        raise ValueError(f"last has dtype {state.last.dtype}: convert it to torch.int32")
    if control.scalars.numel() != _SCALARS:
        held = control.scalars.numel()
        raise ValueError(f"control has {held} scalars, expected {_SCALARS}: make it by AdamControl.of")
    check_vector("param_rms", state.param_rms.reshape(-1), numel=1, like=parameter)
    if parameter.numel() > INDEX_LIMIT:
        raise ValueError(f"parameter has {parameter.numel()} elements: split it into parts of at most {INDEX_LIMIT}")
    if indices is not None:
        check_vector("indices", indices, dtypes=(torch.int64,), like=parameter)
    return list(named.values())


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: AdamState,
    control: AdamControl,
    indices: torch.Tensor | None,
) -> None:
    """The reference, in torch operators, one rounding per operation."""
    at = _Coordinates(indices, torch.promote_types(parameter.dtype, torch.float32))
    _, rate, root, epsilon, limit, decay, walk, fine, change = control.scalars.to(at.dtype).unbind()
    tables = _tables(control.betas, at.dtype, parameter.device)
    steps = control.scalars[0].to(torch.int32)
    tau = (steps - at.integers(state.last)).clamp(min=1)
    waited = tau.to(at.dtype)
    values = at.read(parameter)
    mean = at.read(gradient) / waited
    if control.maximize:
        mean = -mean
    if control.coupled:
        mean = mean + decay * values
    late = not bool((tau == 1).all())  # else there is nothing to multiply, and nothing to catch up with
    power, complement = _powers(tau, tables[0], tables[1]) if late else tables[:2, 0]
    first = power * at.read(state.first) + complement * mean
    power, complement = _powers(tau, tables[2], tables[3]) if late else tables[2:, 0]
    second = power * at.read(state.second) + complement * (mean * mean)
    at.write(state.first, first)
    at.write(state.second, second)
    at.write(state.last, steps.expand(tau.shape))
    if state.maximum is not None:
        second = torch.maximum(at.read(state.maximum), second)
        at.write(state.maximum, second)
    move = first / (_square_root(second) / root + epsilon)  # of one step
    if late:
        factor = waited.minimum(limit).minimum(walk * _square_root(waited))
        if control.limited:
            length = _length(factor * move * fine, parameter.numel())
            reach = change * state.param_rms.to(at.dtype)
            reach = torch.where(reach > FINE, reach, FINE)  # not for NaN
            factor = torch.where(length > reach, (factor * (reach / length)).clamp(min=1.0), factor)
        move = factor * move
    at.write(parameter, values - rate * move)


def _length(moves: torch.Tensor, numel: int) -> torch.Tensor:
    """Root mean square over ``numel`` coordinates of which all but ``moves`` are 0; the same bits in any order."""
    squares = moves * moves
    total = torch.where(squares < LARGEST_SQUARE, squares, LARGEST_SQUARE).to(torch.int64).sum()
    return _square_root(total.to(moves.dtype) / torch.full_like(total, numel).to(moves.dtype))


def root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Of all of ``tensor`` (any float dtype, not empty), as fp32 ``[]``: the same bits however it is summed.

    Squares are rounded down to multiples of 2^-24 of the largest, so what is less than 1/4096 of the largest counts as
    0. NaN where anything is not finite.
    """
    low, high = tensor.detach().aminmax()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    top = torch.maximum(-low, high).to(wide).clamp(min=torch.finfo(wide).tiny)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, _PART if tensor.device.type == "cpu" else 4 * _PART):
        share = part.to(wide) / top
        total += (share * share * 2.0**24).to(torch.int32).sum(dtype=torch.int64)
    mean = total.to(wide) / torch.full_like(top, tensor.numel() * 2.0**24)
    return torch.where(top.isfinite(), top * _square_root(mean), math.nan).to(torch.float32)


def _powers(tau: torch.Tensor, powers: torch.Tensor, complements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(beta^tau, 1 - beta^tau)``, multiplied up from the lowest bit of tau."""
    power = torch.ones(tau.shape, dtype=powers.dtype, device=tau.device)
    complement = torch.zeros_like(power)
    for bit in range(int(tau.max()).bit_length()):
        used = ((tau >> bit) & 1).bool()
        # 1 - b^(s+t) = (1 - b^s) + b^s (1 - b^t): sums of positive terms
        complement = torch.where(used, complement + power * complements[bit], complement)
        power = torch.where(used, power * powers[bit], power)
    return power, complement


def _square_root(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded; on the CPU torch's own is off by one unit for one value in eight."""
    if values.device.type == "cpu":
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))
    return values.sqrt()


@lru_cache(maxsize=64)
def _tables(betas: tuple[float, float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[4, POWERS]``: beta1^(2^i), 1 - beta1^(2^i), and the same of beta2; computed in double precision."""
    rows = [row for beta in betas for row in _squares(beta)]
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)


def _squares(beta: float) -> list[list[float]]:
    if beta == 0:
        return [[0.0] * POWERS, [1.0] * POWERS]
    logs = [math.log(beta) * 2.0**i for i in range(1, POWERS)]
    return [[beta, *map(math.exp, logs)], [1 - beta, *(-math.expm1(log) for log in logs)]]


@dataclass(frozen=True)
class _Coordinates:
    """Some coordinates of flattened tensors, or all of them, computed in ``dtype``."""

    indices: torch.Tensor | None
    dtype: torch.dtype

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.integers(tensor).to(self.dtype)

    def integers(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        return flat if self.indices is None else flat[self.indices]

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
