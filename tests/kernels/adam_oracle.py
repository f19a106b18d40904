"""The update of Adam for one tensor, in operators of torch: the oracle of the flat update, for its reference, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritoncomm_kernels.adam import (
    DISAGREES,
    FINE,
    LARGEST_SQUARE,
    LEAST_WEIGHT,
    MEMORY,
    OUTLIER,
    AdamControl,
    AdamStates,
    Scalars,
    beta_tables,
    decays,
)
from tritoncomm_kernels.rms import square_root


class State(NamedTuple):
    """The state of one parameter, see ``AdamStates``."""

    first: torch.Tensor
    second: torch.Tensor
    last: torch.Tensor
    param_rms: torch.Tensor
    maximum: torch.Tensor | None

    @classmethod
    def of(cls, states: AdamStates, position: int) -> State:
        """Return the state of the parameter at ``position``."""
        maximum = None if states.maximum is None else states.maximum[position]
        held = states.first, states.second, states.last, states.param_rms
        return cls(*(column[position] for column in held), maximum)


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    control: AdamControl,
    indices: torch.Tensor | None = None,
) -> None:
    """Apply one step to the coordinates ``indices`` (int64) of the flattened ``parameter``, or to all of them.

    ``gradient`` has the shape of the parameter. Operators of torch round once per operation.
    """
    if not parameter.numel() or (indices is not None and not indices.numel()):
        return
    at = _Coordinates(indices, torch.promote_types(parameter.dtype, torch.float32))
    scalars = Scalars(*control.scalars.to(at.dtype).unbind())
    tables = beta_tables(control.betas, at.dtype, parameter.device)
    clock = Scalars(*control.scalars.unbind()).clock.to(torch.int32)
    tau = (clock - at.integers(state.last)).clamp(min=1)
    waited = tau.to(at.dtype)
    values = at.read(parameter)
    mean = at.read(gradient) / waited
    if control.maximize:
        mean = -mean
    delayed = not bool((tau == 1).all())  # with tau = 1 everywhere this is a plain Adam step
    power, complement = decays(tau, tables[0], tables[1]) if delayed else tables[:2, 0]
    before = at.read(state.first)
    votes = _votes(before, mean)  # now, because ``before`` may be a view of the state
    first = power * before + complement * mean
    power, complement = decays(tau, tables[2], tables[3]) if delayed else tables[2:, 0]
    old, square = at.read(state.second), mean * mean
    held = power * old
    second = held + complement * square
    outlier = torch.zeros_like(tau, dtype=torch.bool)
    if delayed:
        shorter = _forgetting(waited, power, complement, scalars)
        outlier = _is_outlier(held, square, shorter[2], scalars)
        second = torch.minimum(second, shorter[0] * old + shorter[1] * square)
    at.write(state.first, first)
    at.write(state.second, second)
    at.write(state.last, clock.expand(tau.shape))
    if state.maximum is not None:
        second = torch.maximum(at.read(state.maximum), second)
        at.write(state.maximum, second)
    move = first / (square_root(second) / scalars.root + scalars.epsilon)  # of one dense step
    if delayed:
        factor = waited.minimum(scalars.catch_up).minimum(scalars.walk * square_root(waited))
        factor = torch.where(outlier, 1.0, factor)
        length = _length(factor * move * scalars.distance, parameter.numel())
        reach = scalars.change * state.param_rms.to(at.dtype)
        reach = torch.where(reach > FINE, reach, FINE)  # at least one learning rate, also if it is NaN
        reach = torch.where(scalars.change == math.inf, scalars.change, reach)
        factor = torch.where(length > reach, (factor * (reach / length)).clamp(min=1.0), factor)
        factor = factor + _steadiness(votes, at.dtype) * (waited.minimum(scalars.steady) - factor)
        move = factor * move
    at.write(parameter, values - scalars.rate * move)


def _length(moves: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the root mean square over ``numel`` elements: ``moves``, and zeros. The order does not matter."""
    squares = moves * moves
    total = torch.where(squares < LARGEST_SQUARE, squares, LARGEST_SQUARE).to(torch.int64).sum()
    return square_root(total.to(moves.dtype) / torch.full_like(total, numel).to(moves.dtype))


def _votes(before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return how many entries agree in sign, plus ``DISAGREES`` times how many do not (int64)."""
    agrees = ((before > 0) & (mean > 0)) | ((before < 0) & (mean < 0))
    disagrees = ((before > 0) & (mean < 0)) | ((before < 0) & (mean > 0))
    return agrees.sum() + disagrees.sum() * DISAGREES


def _steadiness(votes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a full catch-up, from 0 to 1, for the ``votes`` of a tensor. See ``AdamControl.of``."""
    agree, disagree = votes & (DISAGREES - 1), votes >> 32
    count = (agree + disagree).clamp(min=1).to(dtype)
    return (4 * (((agree - disagree).to(dtype) - 3 * square_root(count)) / count) - 1).clamp(0.0, 1.0)


def _forgetting(
    waited: torch.Tensor, power: torch.Tensor, complement: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return other factors of the second moment and of the squared mean than ``(beta2^tau, 1 - beta2^tau)``.

    With these, the moment weighs at most (b / (b + tau))^4 in the bias-corrected average, where
    b = max(t - tau, 78), see ``AdamControl.of``. The third result is its weight without this limit. ``waited`` is
    tau in the float type of the others.
    """
    before = (scalars.steps - waited).clamp(min=MEMORY)
    left = before / (before + waited)
    limit = (left * left) * (left * left)
    weight = 1 - complement * scalars.per_correction
    above = (waited > 1) & (weight > limit)
    return (
        torch.where(above, power * (limit / weight), power),
        torch.where(above, scalars.correction * (1 - limit), complement),
        weight,
    )


def _is_outlier(held: torch.Tensor, square: torch.Tensor, weight: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Return which means are more than ``OUTLIER`` times the root of the bias-corrected moment before.

    ``held`` is what is left of that moment, with this ``weight``, and ``square`` the squared mean.
    """
    known = (held > 0) & (weight > LEAST_WEIGHT)
    above: torch.Tensor = square * (scalars.correction * weight) > held * (OUTLIER * OUTLIER)
    return known & above


@dataclass(frozen=True)
class _Coordinates:
    """Access to the delivered coordinates of flattened tensors, or to all of them, in ``dtype``."""

    indices: torch.Tensor | None
    dtype: torch.dtype

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.integers(tensor).to(self.dtype)

    def integers(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        return flat if self.indices is None else flat[self.indices]

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` in place, for any strides of ``tensor``."""
        values = values.to(tensor.dtype)
        if self.indices is None:
            tensor.copy_(values.view(tensor.shape))
        elif tensor.is_contiguous():
            tensor.view(-1)[self.indices] = values
        else:
            flat = tensor.reshape(-1)
            flat[self.indices] = values
            tensor.copy_(flat.view(tensor.shape))
