"""Adam update for sparse gradients whose coordinates are delivered with a delay.

The staleness tau of a delivery is the number of steps since the coordinate's last delivery. A delivered sum s is
treated as tau steps with gradient s / tau.

How many steps it counts for depends on whether gradients are steady. Successive deliveries of a coordinate then have
the same sign. If they are noise, or if the step before went too far, they have not. This is counted for each tensor.

Powers of the betas are products from a table of repeated squares, so every device computes the same bits.
``1 - beta^tau`` is summed from the same table, without cancellation. The distance that a tensor moves is summed in
integers, because integer sums do not depend on the order. Signs are counted in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tritoncomm_kernels.adam_layout import Scalars
from tritoncomm_kernels.checks import INDEX_LIMIT, check_vector
from tritoncomm_kernels.rms import square_root
from tritoncomm_kernels.workspace import copied_to

POWERS = 31  # repeated squares of beta, one per value bit of tau (int32)
# Squared distances are summed as int64, in units of 1/32 of a learning rate. One coordinate counts for at most 2^31,
# which is a distance of 1448 learning rates. A sum of 2^31 such squares does not overflow.
FINE, LARGEST_SQUARE = 32.0, 2.0**31
# A delivery of steady gradients counts for at most this many times max_catch_up. An entry without gradients for 1000
# steps waits as long, and the one that then comes stands for none of them.
STEADY = 3.0
# The steps before a delivery count for at least so many where they limit the weight of the second moment. The limit is
# then above 0.95^tau. A shorter memory ends higher at 0.95, and far higher at high rates
# (benchmarks/results/second_moment.json).
MEMORY = 78.0
# A mean that is so many times the root of its second moment counts for one step: most of it is one gradient, to which
# dense Adam, too, gives about one step at a time. A moment of less weight than the second number is not compared.
OUTLIER, LEAST_WEIGHT = 5.0, 2.0**-16
# Two counts in one int64 sum: an entry that agrees counts 1, and one that disagrees this. A tensor has fewer than 2^31
# entries (INDEX_LIMIT).
DISAGREES = 1 << 32


@dataclass(frozen=True)
class AdamState:
    """Optimizer state of one parameter. Every tensor except ``param_rms`` has the shape of the parameter.

    ``first`` and ``second`` are Adam's moments. ``maximum`` is the running maximum of the second moment for AMSGrad,
    or None. ``last`` (int32) is the clock of each coordinate's last delivery. ``param_rms`` (fp32, one element) is the
    root mean square of the parameter and may be some steps old.
    """

    first: torch.Tensor
    second: torch.Tensor
    last: torch.Tensor
    param_rms: torch.Tensor
    maximum: torch.Tensor | None = None


@dataclass(frozen=True)
class AdamControl:
    """Settings of one step. Numbers that change between steps are in device memory.

    New numbers therefore need no new compilation, and a captured CUDA graph can be replayed with them. To replay a
    captured step, write the next numbers into ``scalars`` outside the graph. Write ``param_rms`` of
    :class:`AdamState` too, whenever it is computed again.

    ``scalars`` (fp64) holds the numbers of :class:`~tritoncomm_kernels.adam_layout.Scalars`, in this order.

    ``betas`` and ``maximize`` are Adam's options. Coupled weight decay is not among them: gradients must contain it.
    """

    scalars: torch.Tensor
    betas: tuple[float, float]
    maximize: bool = False

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
        maximize: bool = False,
        max_sqrt_staleness: float = 3.0,
        max_relative_update: float = 0.05,
        clock: int | None = None,
    ) -> AdamControl:
        """Build the settings of step number ``steps`` on ``device`` from the hyper-parameters of the optimizer.

        ``clock`` is the number of the step in which ages are counted: tau = ``clock`` - ``last``. Default: ``steps``.

        A delivery moves its coordinate as far as f dense steps would. f is between two numbers. For steady gradients it
        is min(tau, 3 * ``max_catch_up``). For others it is min(tau, ``max_catch_up``, ``max_sqrt_staleness`` *
        sqrt(tau)). The root mean square of a tensor's change by the latter is limited to ``max_relative_update`` times
        ``param_rms``, or to one learning rate where that is more. Above the limit, every such number shrinks by the
        same factor, but not below 1.

        In the second moment, a mean over tau steps is smaller than gradients of single steps, such as those of a dense
        start. With a beta2 near 1, these would count for a thousand steps, in which all moves are too short. What the
        bias-corrected moment holds of earlier steps therefore weighs at most (b / (b + tau))^4 where the moment becomes
        smaller by this, with b = max(t - tau, 78). A beta2 of 0.95 or less forgets sooner by itself. Where gradients
        grow, as those of adapters do, forgetting would make the steps shorter.

        A mean of more than 5 times the root of the moment before counts for one step, if that moment is not 0, unless
        gradients are steady: most of it is one gradient, such as that of a broken batch, and dense Adam moves by about
        one step at a time, too.

        The weight of the first number is 0 where q = (a - d - 3 sqrt(n)) / n is at most 1/4, 1 from 1/2 on, and linear
        between. Of the n delivered entries of a tensor, a have the sign of their first moment, and d have the other
        one. Entries that are 0, or have a moment of 0, do not count. Language models have q below 1/4 in nearly all
        steps. 3 sqrt(n) are three standard deviations, so that a tensor with few entries is not steady by chance.
        """
        correct1, correct2 = (1 - beta**steps for beta in betas)
        scalars = Scalars(
            steps=steps,
            clock=steps if clock is None else clock,
            rate=learning_rate / correct1,
            correction=correct2,
            per_correction=1 / correct2,
            root=math.sqrt(correct2),
            epsilon=epsilon,
            catch_up=max_catch_up,
            steady=STEADY * max_catch_up,
            walk=max_sqrt_staleness,
            distance=FINE / correct1,
            change=FINE * max_relative_update / learning_rate if learning_rate else 0.0,  # a rate of 0 moves nothing
        )
        on_device = copied_to(torch.tensor(scalars, dtype=torch.float64), device)
        return cls(on_device, betas, maximize)


def adam_update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: AdamState,
    control: AdamControl,
    indices: torch.Tensor | None = None,
) -> None:
    """Apply one Adam step to the delivered coordinates of ``parameter``, in place.

    ``indices`` (int64 ``[k]``, unique) are the delivered coordinates of the flattened ``parameter``. None means all.
    ``parameter`` and ``state`` change at these coordinates only. An index outside ``[0, parameter.numel())`` is
    ignored. ``gradient`` has the shape of the parameter. Half precision is computed in fp32. This is the reference,
    in torch operators on any device: kernels update many tensors, see :class:`AdamMany` and :class:`AdamFlat`. Raises
    ``ValueError`` naming the invalid argument.
    """
    _check(parameter, gradient, state, control, indices)
    if parameter.numel() == 0 or (indices is not None and indices.numel() == 0):
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
) -> None:
    """Raise ``ValueError`` unless the arguments are valid."""
    named = {"parameter": parameter, "gradient": gradient, "first": state.first, "second": state.second}
    if state.maximum is not None:
        named["maximum"] = state.maximum
    for name, tensor in {**named, "last": state.last}.items():
        if tensor.shape != parameter.shape or tensor.device != parameter.device:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on {tensor.device}: "
                f"expected {tuple(parameter.shape)} on {parameter.device}, like the parameter"
            )
    if state.last.dtype != torch.int32:
        raise ValueError(f"last has dtype {state.last.dtype}: convert it to torch.int32")
    if control.scalars.numel() != len(Scalars._fields):
        held, expected = control.scalars.numel(), len(Scalars._fields)
        raise ValueError(f"control has {held} scalars, expected {expected}: create it with AdamControl.of")
    check_vector("param_rms", state.param_rms.reshape(-1), numel=1, like=parameter)
    if parameter.numel() > INDEX_LIMIT:
        raise ValueError(f"parameter has {parameter.numel()} elements: split it into parts of at most {INDEX_LIMIT}")
    if indices is not None:
        check_vector("indices", indices, dtypes=(torch.int64,), like=parameter)


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: AdamState,
    control: AdamControl,
    indices: torch.Tensor | None,
) -> None:
    """Reference of :func:`adam_update`, in torch operators with one rounding per operation."""
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
        shorter = forgetting(waited, power, complement, scalars)
        outlier = is_outlier(held, square, shorter[2], scalars)
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
        factor = factor + steadiness(votes, at.dtype) * (waited.minimum(scalars.steady) - factor)
        move = factor * move
    at.write(parameter, values - scalars.rate * move)


def _length(moves: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the root mean square over ``numel`` elements: ``moves``, and zeros. The order does not matter."""
    squares = moves * moves
    total = torch.where(squares < LARGEST_SQUARE, squares, LARGEST_SQUARE).to(torch.int64).sum()
    return square_root(total.to(moves.dtype) / torch.full_like(total, numel).to(moves.dtype))


def _votes(before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return how many entries agree in sign, plus :data:`DISAGREES` times how many do not (int64)."""
    agrees = ((before > 0) & (mean > 0)) | ((before < 0) & (mean < 0))
    disagrees = ((before > 0) & (mean < 0)) | ((before < 0) & (mean > 0))
    return agrees.sum() + disagrees.sum() * DISAGREES


def steadiness(votes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a full catch-up, from 0 to 1, for the ``votes`` of a tensor. See :meth:`AdamControl.of`."""
    agree, disagree = votes & (DISAGREES - 1), votes >> 32
    count = (agree + disagree).clamp(min=1).to(dtype)
    return (4 * (((agree - disagree).to(dtype) - 3 * square_root(count)) / count) - 1).clamp(0.0, 1.0)


def decays(
    tau: torch.Tensor,
    powers: torch.Tensor | Sequence[float],
    complements: torch.Tensor | Sequence[float],
    bits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(beta^tau, 1 - beta^tau)``, built from the lowest bit of tau upwards.

    ``powers`` and ``complements`` are those of 1, 2, 4, ..., on the device of ``tau`` or as fp32 numbers. ``bits`` is
    how many tau has at most. The host waits for a GPU to know it, unless it is given.
    """
    dtype = powers.dtype if isinstance(powers, torch.Tensor) else torch.float32
    power = torch.ones(tau.shape, dtype=dtype, device=tau.device)
    complement = torch.zeros_like(power)
    if bits is None:
        bits = int(tau.max()).bit_length() if tau.numel() else 0
    for bit in range(bits):
        used = ((tau >> bit) & 1).bool()
        # 1 - b^(s+t) = (1 - b^s) + b^s (1 - b^t) adds positive terms only, so nothing cancels.
        complement = torch.where(used, complement + power * complements[bit], complement)
        power = torch.where(used, power * powers[bit], power)
    return power, complement


def forgetting(
    waited: torch.Tensor, power: torch.Tensor, complement: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return other factors of the second moment and of the squared mean than ``(beta2^tau, 1 - beta2^tau)``.

    With these, the moment weighs at most (b / (b + tau))^4 in the bias-corrected average, where
    b = max(t - tau, 78), see :meth:`AdamControl.of`. The third result is its weight without this limit. ``waited`` is
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


def is_outlier(held: torch.Tensor, square: torch.Tensor, weight: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Return which means are more than :data:`OUTLIER` times the root of the bias-corrected moment before.

    ``held`` is what is left of that moment, with this ``weight``, and ``square`` the squared mean.
    """
    known = (held > 0) & (weight > LEAST_WEIGHT)
    above: torch.Tensor = square * (scalars.correction * weight) > held * (OUTLIER * OUTLIER)
    return known & above


@lru_cache(maxsize=64)
def beta_tables(betas: tuple[float, float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``[4, POWERS]``: beta1^(2^i), 1 - beta1^(2^i), and the same for beta2, computed in double precision."""
    rows = [row for beta in betas for row in _squares(beta)]
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)


def _squares(beta: float) -> list[list[float]]:
    if beta == 0:
        return [[0.0] * POWERS, [1.0] * POWERS]
    logs = [math.log(beta) * 2.0**i for i in range(1, POWERS)]
    return [[beta, *map(math.exp, logs)], [1 - beta, *(-math.expm1(log) for log in logs)]]


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
