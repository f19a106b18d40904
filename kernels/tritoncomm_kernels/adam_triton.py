"""Kernels of :mod:`tritoncomm_kernels.adam`: gather, update and scatter over the delivered coordinates.

There are two kernels, because the limit for one coordinate depends on the distance that its whole tensor would move.
The first kernel sums that distance. The second computes the moves again and applies them. Only the sum is stored in
between. Both exist for one tensor and for many. Those for many find the tensors through a table of addresses.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tritoncomm_kernels.adam import FINE, LARGEST_SQUARE
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.workspace import copied_to

COLUMNS = 10  # int64 numbers per tensor in the table of the kernels for many tensors
BLOCK, WARPS = 512, 4  # 1024 would need 160 registers, and spill on sm_80 with all options on
MANY = 256  # block of the kernels for many tensors: 512 would spill on sm_90 with all options on, under Triton 3.6


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
    gradient_at,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Return the new moments, the move of one dense step, and the factor by which the delivery multiplies it.

    ``at`` are the coordinates, and ``gradient_at`` the positions of their gradients.
    """
    steps = tl.load(control_ptr).to(tl.int32)
    root = tl.load(control_ptr + 2).to(tl.float32)
    epsilon = tl.load(control_ptr + 3).to(tl.float32)
    limit = tl.load(control_ptr + 4).to(tl.float32)
    walk = tl.load(control_ptr + 6).to(tl.float32)
    tau = tl.maximum(steps - tl.load(last_ptr + at, mask=inside, other=0), 1)
    waited = tau.to(tl.float32)
    mean = tl.div_rn(tl.load(gradient_ptr + gradient_at, mask=inside, other=0.0).to(tl.float32), waited)
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


@triton.jit
def _write(
    parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
    parameter, first, second, largest, move, factor, param_rms, total, n,
    AMSGRAD: tl.constexpr, FINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the results of :func:`_step`, and move the parameter, by less if its tensor of ``n`` would move too far."""
    tl.debug_barrier()  # the stores may use other threads than the loads
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    if AMSGRAD:
        tl.store(maximum_ptr + at, largest, mask=inside)
    tl.store(last_ptr + at, tl.full([BLOCK], 0, tl.int32) + tl.load(control_ptr).to(tl.int32), mask=inside)
    rate = tl.load(control_ptr + 1).to(tl.float32)
    reach = tl.load(control_ptr + 8).to(tl.float32) * param_rms
    reach = tl.where(reach > FINE, reach, FINE)  # at least one learning rate, also if it is NaN
    length = tl.sqrt_rn(tl.div_rn(total.to(tl.float32), n.to(tl.float32)))
    factor = tl.where(length > reach, tl.maximum(factor * tl.div_rn(reach, length), 1.0), factor)
    tl.store(parameter_ptr + at, parameter - rate * (factor * move), mask=inside)


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
        at, AMSGRAD, MAXIMIZE, COUPLED, POWERS,
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
        at, AMSGRAD, MAXIMIZE, COUPLED, POWERS,
    )  # fmt: skip
    _write(
        parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
        parameter, first, second, largest, move, factor, tl.load(param_rms_ptr), tl.load(total_ptr), n,
        AMSGRAD, FINE, BLOCK,
    )  # fmt: skip


@triton.jit
def _delivered_of(table_ptr, places_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row of this program's tensor, its coordinates, a mask of those inside, and their places in a list."""
    row_ptr = table_ptr + tl.load(places_ptr + 2 * tl.program_id(0)) * COLUMNS
    lane = tl.load(places_ptr + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    indices = tl.load(row_ptr + 7)
    count = tl.load(row_ptr + 8)
    n = tl.load(row_ptr + 9)
    listed = tl.where(indices == 0, 0, count)  # an address of 0 means all coordinates
    at = tl.load(indices.to(tl.pointer_type(tl.int64)) + lane, mask=lane < listed, other=-1)
    at = tl.where(lane < listed, at, lane)
    inside = (lane < count) & (at >= 0) & (at < n)
    return row_ptr, at, inside, lane


@triton.jit
def length_many_kernel(
    table_ptr, places_ptr, control_ptr, tables_ptr, total_ptr,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    POWERS: tl.constexpr, LARGEST_SQUARE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Do as ``length_kernel`` for ``BLOCK`` coordinates of one of many tensors. ``total_ptr`` has a sum for each.

    With ``COMPACT``, the gradients in the table are those of the delivered coordinates only.
    """
    row_ptr, at, inside, lane = _delivered_of(table_ptr, places_ptr, COLUMNS, BLOCK)
    _, _, _, move, factor = _step(
        tl.load(row_ptr).to(tl.pointer_type(DTYPE)), tl.load(row_ptr + 1).to(tl.pointer_type(DTYPE)),
        tl.load(row_ptr + 2).to(tl.pointer_type(DTYPE)), tl.load(row_ptr + 3).to(tl.pointer_type(DTYPE)),
        tl.load(row_ptr + 6).to(tl.pointer_type(DTYPE)), tl.load(row_ptr + 4).to(tl.pointer_type(tl.int32)),
        control_ptr, tables_ptr, at, inside, lane if COMPACT else at, AMSGRAD, MAXIMIZE, COUPLED, POWERS,
    )  # fmt: skip
    distance = factor * move * tl.load(control_ptr + 7).to(tl.float32)
    square = distance * distance
    square = tl.where(square < LARGEST_SQUARE, square, LARGEST_SQUARE)  # NaN counts as the largest
    total = tl.sum(tl.where(inside, square, 0.0).to(tl.int64), axis=0)
    tl.atomic_add(total_ptr + tl.load(places_ptr + 2 * tl.program_id(0)), total, sem="relaxed")


@triton.jit
def adam_many_kernel(
    table_ptr, places_ptr, control_ptr, tables_ptr, total_ptr,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    POWERS: tl.constexpr, FINE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Do as ``adam_kernel`` for ``BLOCK`` coordinates of one of many tensors. ``COMPACT`` is as above."""
    row_ptr, at, inside, lane = _delivered_of(table_ptr, places_ptr, COLUMNS, BLOCK)
    parameter_ptr = tl.load(row_ptr).to(tl.pointer_type(DTYPE))
    first_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(DTYPE))
    second_ptr = tl.load(row_ptr + 3).to(tl.pointer_type(DTYPE))
    last_ptr = tl.load(row_ptr + 4).to(tl.pointer_type(tl.int32))
    maximum_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(DTYPE))
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first, second, largest, move, factor = _step(
        parameter_ptr, tl.load(row_ptr + 1).to(tl.pointer_type(DTYPE)), first_ptr, second_ptr, maximum_ptr, last_ptr,
        control_ptr, tables_ptr, at, inside, lane if COMPACT else at, AMSGRAD, MAXIMIZE, COUPLED, POWERS,
    )  # fmt: skip
    _write(
        parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
        parameter, first, second, largest, move, factor,
        tl.load(tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32))),
        tl.load(total_ptr + tl.load(places_ptr + 2 * tl.program_id(0))), tl.load(row_ptr + 9),
        AMSGRAD, FINE, BLOCK,
    )  # fmt: skip


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


def update_many(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    last: Sequence[torch.Tensor],
    param_rms: Sequence[torch.Tensor],
    maximum: Sequence[torch.Tensor] | None,
    indices: Sequence[torch.Tensor | None],
    control: torch.Tensor,
    tables: torch.Tensor,
    *,
    maximize: bool,
    coupled: bool,
    limited: bool,
    compact: bool = False,
    block: int = MANY,
) -> None:
    """Launch the kernels for many tensors once, on checked arguments. All floats are of one dtype and contiguous.

    If ``compact``, each of ``gradients`` has one value per delivered coordinate.

    One copy to the device holds the table of addresses and the list of blocks: ``[tensors, COLUMNS]`` and
    ``[blocks, 2]``, int64. A block is a tensor's number and the block's number in that tensor.
    """
    device = parameters[0].device
    maxima = [None] * len(parameters) if maximum is None else maximum
    columns: list[Sequence[torch.Tensor | None]]
    columns = [parameters, gradients, first, second, last, param_rms, maxima, indices]
    table = np.zeros((len(parameters), COLUMNS), np.int64)
    for number, column in enumerate(columns):
        table[:, number] = [0 if tensor is None else tensor.data_ptr() for tensor in column]
    table[:, 9] = [parameter.numel() for parameter in parameters]
    table[:, 8] = [n if at is None else at.numel() for n, at in zip(table[:, 9], indices, strict=True)]
    blocks = [(i, j) for i, count in enumerate(table[:, 8].tolist()) for j in range(triton.cdiv(count, block))]
    if not blocks:
        return
    host = torch.from_numpy(np.concatenate([table.reshape(-1), np.array(blocks, np.int64).reshape(-1)]))
    on_device = copied_to(host, device)
    total = torch.zeros(len(parameters), dtype=torch.int64, device=device)
    arguments = on_device, on_device[table.size :], control, tables, total
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[parameters[0].dtype]
    with on_device_of(parameters[0]):
        if limited:
            length_many_kernel[(len(blocks),)](
                *arguments, DTYPE=dtype, AMSGRAD=maximum is not None, MAXIMIZE=maximize, COUPLED=coupled,
                POWERS=tables.numel() // 4, LARGEST_SQUARE=LARGEST_SQUARE, COLUMNS=COLUMNS, BLOCK=block,
                COMPACT=compact, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        adam_many_kernel[(len(blocks),)](
            *arguments, DTYPE=dtype, AMSGRAD=maximum is not None, MAXIMIZE=maximize, COUPLED=coupled,
            POWERS=tables.numel() // 4, FINE=FINE, COLUMNS=COLUMNS, BLOCK=block, COMPACT=compact,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
