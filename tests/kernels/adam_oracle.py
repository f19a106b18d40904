"""The update of Adam for one tensor, in operators of torch: the oracle of the flat update, for its reference, too."""

from __future__ import annotations

import math

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


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: AdamStates,
    position: int,
    control: AdamControl,
    indices: torch.Tensor | slice,
) -> None:
    """Apply one step to the coordinates ``indices`` (int64, or a slice) of the flattened ``parameter``.

    Its states are those at ``position``. ``gradient`` are all of its elements, flat. Operators of torch round once per
    operation.
    """
    if not parameter.numel():
        return
    dtype = torch.promote_types(parameter.dtype, torch.float32)

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[indices].to(dtype, copy=True)

    def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
        flat = tensor.reshape(-1)  # a copy, if the tensor has other strides
        flat[indices] = values.to(tensor.dtype)
        tensor.copy_(flat.view(tensor.shape))

    scalars = Scalars(*control.scalars.to(dtype).unbind())
    tables = beta_tables(control.betas, dtype, parameter.device)
    clock = Scalars(*control.scalars.unbind()).clock.to(torch.int32)
    tau = (clock - states.last[position].reshape(-1)[indices]).clamp(min=1)
    waited = tau.to(dtype)
    mean = read(gradient) / waited
    if control.maximize:
        mean = -mean
    power, complement = decays(tau, tables[0], tables[1])
    before = read(states.first[position])
    first = power * before + complement * mean
    power, complement = decays(tau, tables[2], tables[3])
    old, square = read(states.second[position]), mean * mean
    held = power * old
    shorter = _forgetting(waited, power, complement, scalars)
    outlier = _is_outlier(held, square, shorter[2], scalars)
    second = torch.minimum(held + complement * square, shorter[0] * old + shorter[1] * square)
    write(states.first[position], first)
    write(states.second[position], second)
    write(states.last[position], clock.expand(tau.shape))
    if states.maximum is not None:
        second = torch.maximum(read(states.maximum[position]), second)
        write(states.maximum[position], second)
    move = first / (square_root(second) / scalars.root + scalars.epsilon)  # of one dense step
    factor = waited.minimum(scalars.catch_up).minimum(scalars.walk * square_root(waited))
    factor = torch.where(outlier, 1.0, factor)
    length = _length(factor * move * scalars.distance, parameter.numel())
    reach = scalars.change * states.param_rms[position].to(dtype)
    reach = torch.where(reach > FINE, reach, FINE)  # at least one learning rate, also if it is NaN
    reach = torch.where(scalars.change == math.inf, scalars.change, reach)
    factor = torch.where(length > reach, (factor * (reach / length)).clamp(min=1.0), factor)
    factor = factor + _steadiness(_votes(before, mean), dtype) * (waited.minimum(scalars.steady) - factor)
    write(parameter, read(parameter) - scalars.rate * (factor * move))


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
