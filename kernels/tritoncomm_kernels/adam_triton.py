"""Kernels of :mod:`tritoncomm_kernels.adam`: gather, update and scatter over the delivered coordinates.

There are two kernels, because the limit for one coordinate depends on the distance that its whole tensor would move.
The first kernel sums that distance. The second computes the moves again and applies them. Only the sum is stored in
between.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.adam import FINE, LARGEST_SQUARE
from tritoncomm_kernels.dispatch import on_device_of

BLOCK, WARPS = 512, 4  # 1024 would need 160 registers, and spill on sm_80 with all options on


@triton.jit
def _decay(tau, table_ptr, POWERS: tl.constexpr):
    """Return ``(beta^tau, 1 - beta^tau)`` from a table of both for tau = 1, 2, 4, ..., lowest bit of tau first."""
    power = tl.full(tau.shape, 1.0, tl.float32)
    complement = tl.full(tau.shape, 0.0, tl.float32)
    left = tl.max(tau, axis=0)
    bit = 0
    while left > 0:
        step_power = tl.load(table_ptr + bit)
        step_complement = tl.load(table_ptr + POWERS + bit)
        used = ((tau >> bit) & 1) != 0
        complement = tl.where(used, complement + power * step_complement, complement)
        power = tl.where(used, power * step_power, power)
        left = left >> 1
        bit += 1
    return power, complement


@triton.jit
def _delivered(indices_ptr, count, n, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the coordinates of this program, and a mask of those inside the parameter."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVERY:
        at = lane
        inside = lane < n
    else:
        at = tl.load(indices_ptr + lane, mask=lane < count, other=-1)
        inside = (at >= 0) & (at < n)
    return at, inside


@triton.jit
def _step(
    parameter_ptr, gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Return the new moments, the move of one dense step, and the factor by which the delivery multiplies it."""
    steps = tl.load(control_ptr).to(tl.int32)
    root = tl.load(control_ptr + 2).to(tl.float32)
    epsilon = tl.load(control_ptr + 3).to(tl.float32)
    limit = tl.load(control_ptr + 4).to(tl.float32)
    walk = tl.load(control_ptr + 6).to(tl.float32)
    tau = tl.maximum(steps - tl.load(last_ptr + at, mask=inside, other=0), 1)
    waited = tau.to(tl.float32)
    mean = tl.div_rn(tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32), waited)
    if MAXIMIZE:
        mean = -mean
    if COUPLED:
        parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = mean + tl.load(control_ptr + 5).to(tl.float32) * parameter
    power, complement = _decay(tau, tables_ptr, POWERS)
    first = power * tl.load(first_ptr + at, mask=inside, other=0.0).to(tl.float32) + complement * mean
    power, complement = _decay(tau, tables_ptr + 2 * POWERS, POWERS)
    second = power * tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32) + complement * (mean * mean)
    largest = second
    if AMSGRAD:
        maximum = tl.load(maximum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.where((maximum > second) | (maximum != maximum), maximum, second)
    move = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(largest), root) + epsilon)
    factor = tl.minimum(tl.minimum(waited, limit), walk * tl.sqrt_rn(waited))
    return first, second, largest, move, factor


@triton.jit(do_not_specialize=["count", "n"])
def length_kernel(
    parameter_ptr, gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, indices_ptr, control_ptr, tables_ptr,
    total_ptr, count, n,
    EVERY: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    POWERS: tl.constexpr, LARGEST_SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squared distances that ``BLOCK`` delivered coordinates would move, in integers. Nothing is updated."""
    at, inside = _delivered(indices_ptr, count, n, EVERY, BLOCK)
    _, _, _, move, factor = _step(
        parameter_ptr, gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside,
        AMSGRAD, MAXIMIZE, COUPLED, POWERS,
    )  # fmt: skip
    distance = factor * move * tl.load(control_ptr + 7).to(tl.float32)
    square = distance * distance
    square = tl.where(square < LARGEST_SQUARE, square, LARGEST_SQUARE)  # NaN counts as the largest
    tl.atomic_add(total_ptr, tl.sum(tl.where(inside, square, 0.0).to(tl.int64), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["count", "n"])
def adam_kernel(
    parameter_ptr, gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, indices_ptr, control_ptr, tables_ptr,
    total_ptr, param_rms_ptr, count, n,
    EVERY: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    POWERS: tl.constexpr, FINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update ``BLOCK`` delivered coordinates. An index out of bounds updates nothing."""
    at, inside = _delivered(indices_ptr, count, n, EVERY, BLOCK)
    # Loading the parameter later, where it is used, spills registers on sm_100.
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first, second, largest, move, factor = _step(
        parameter_ptr, gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside,
        AMSGRAD, MAXIMIZE, COUPLED, POWERS,
    )  # fmt: skip
    tl.debug_barrier()  # the stores may use other threads than the loads
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    if AMSGRAD:
        tl.store(maximum_ptr + at, largest, mask=inside)
    tl.store(last_ptr + at, tl.full([BLOCK], 0, tl.int32) + tl.load(control_ptr).to(tl.int32), mask=inside)
    rate = tl.load(control_ptr + 1).to(tl.float32)
    reach = tl.load(control_ptr + 8).to(tl.float32) * tl.load(param_rms_ptr)
    reach = tl.where(reach > FINE, reach, FINE)  # at least one learning rate, also if it is NaN
    length = tl.sqrt_rn(tl.div_rn(tl.load(total_ptr).to(tl.float32), n.to(tl.float32)))
    factor = tl.where(length > reach, tl.maximum(factor * tl.div_rn(reach, length), 1.0), factor)
    tl.store(parameter_ptr + at, parameter - rate * (factor * move), mask=inside)


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    maximum: torch.Tensor | None,
    last: torch.Tensor,
    param_rms: torch.Tensor,
    indices: torch.Tensor | None,
    control: torch.Tensor,
    tables: torch.Tensor,
    *,
    maximize: bool,
    coupled: bool,
    limited: bool,
    block: int = BLOCK,
) -> None:
    """Launch the kernels on checked, non-empty arguments."""
    n = parameter.numel()
    count = n if indices is None else indices.numel()
    total = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    grid = (triton.cdiv(count, block),)
    tensors = (parameter, gradient, first, second, maximum, last, indices, control, tables, total)
    with on_device_of(parameter):
        if limited:  # without a limit the distance is not needed
            length_kernel[grid](
                *tensors, count, n,
                EVERY=indices is None, AMSGRAD=maximum is not None, MAXIMIZE=maximize, COUPLED=coupled,
                POWERS=tables.numel() // 4, LARGEST_SQUARE=LARGEST_SQUARE, BLOCK=block, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
        adam_kernel[grid](
            *tensors, param_rms, count, n,
            EVERY=indices is None, AMSGRAD=maximum is not None, MAXIMIZE=maximize, COUPLED=coupled,
            POWERS=tables.numel() // 4, FINE=FINE, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
