# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.adam_many`: gather, update and scatter over the delivered coordinates.

There are two kernels, because how far one coordinate moves depends on its whole tensor: on the distance that the tensor
would move, and on how many of its entries agree in sign with their moments. The first kernel computes these two sums.
The second computes the moves again and applies them. Only the sums are stored in between. A launch serves many tensors,
and finds them through a table of addresses.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tritoncomm_kernels import adam
from tritoncomm_kernels.adam import DISAGREES, FINE, LARGEST_SQUARE, OUTLIER
from tritoncomm_kernels.adam_layout import Row, Scalars
from tritoncomm_kernels.devices import on
from tritoncomm_kernels.workspace import copied_to

BLOCK, WARPS = 128, 4  # 256 spills on sm_90 in bf16 with Triton 3.6, and 512 on sm_80

# Positions in ``control``, and columns in a table of tensors.
STEPS = tl.constexpr(Scalars._fields.index("steps"))
CLOCK = tl.constexpr(Scalars._fields.index("clock"))
RATE = tl.constexpr(Scalars._fields.index("rate"))
OUTLIER_SQUARED, LEAST_WEIGHT = tl.constexpr(OUTLIER**2), tl.constexpr(adam.LEAST_WEIGHT)
MEMORY = tl.constexpr(adam.MEMORY)
PER_CORRECTION = tl.constexpr(Scalars._fields.index("per_correction"))
CORRECTION = tl.constexpr(Scalars._fields.index("correction"))
ROOT = tl.constexpr(Scalars._fields.index("root"))
EPSILON = tl.constexpr(Scalars._fields.index("epsilon"))
CATCH_UP = tl.constexpr(Scalars._fields.index("catch_up"))
STEADY = tl.constexpr(Scalars._fields.index("steady"))
WALK = tl.constexpr(Scalars._fields.index("walk"))
DISTANCE = tl.constexpr(Scalars._fields.index("distance"))
CHANGE = tl.constexpr(Scalars._fields.index("change"))
COLUMNS = tl.constexpr(len(Row._fields))
PARAMETER = tl.constexpr(Row._fields.index("parameter"))
GRADIENT = tl.constexpr(Row._fields.index("gradient"))
FIRST = tl.constexpr(Row._fields.index("first"))
SECOND = tl.constexpr(Row._fields.index("second"))
LAST = tl.constexpr(Row._fields.index("last"))
PARAM_RMS = tl.constexpr(Row._fields.index("param_rms"))
MAXIMUM = tl.constexpr(Row._fields.index("maximum"))
NUMEL = tl.constexpr(Row._fields.index("numel"))
INDICES = tl.constexpr(Row._fields.index("indices"))
ENTRIES = tl.constexpr(Row._fields.index("entries"))
SUMS = tl.constexpr(2)  # of a tensor: squared distance, then votes, both int64


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
def _forgetting(waited, power, complement, control_ptr):
    """Return other factors of the second moment and of the squared mean, see ``forgetting`` of the reference."""
    steps = tl.load(control_ptr + STEPS).to(tl.float32)
    correction = tl.load(control_ptr + CORRECTION).to(tl.float32)
    before = tl.maximum(steps - waited, MEMORY)
    left = tl.div_rn(before, before + waited)
    limit = (left * left) * (left * left)
    weight = 1 - complement * tl.load(control_ptr + PER_CORRECTION).to(tl.float32)
    above = (waited > 1) & (weight > limit)
    power = tl.where(above, power * tl.div_rn(limit, weight), power)
    return power, tl.where(above, correction * (1 - limit), complement), weight


@triton.jit
def _is_outlier(held, square, weight, control_ptr):
    """Return which means are far above their second moment, see ``is_outlier`` of the reference."""
    correction = tl.load(control_ptr + CORRECTION).to(tl.float32)
    known = (held > 0) & (weight > LEAST_WEIGHT)
    return known & (square * (correction * weight) > held * OUTLIER_SQUARED)


@triton.jit
def _step(
    gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside, gradient_at,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Return the new moments, the move of one dense step, the number of steps waited, and the vote.

    The number of steps is negative for an outlier.

    ``at`` are the coordinates, and ``gradient_at`` the positions of their gradients. A vote is 1 if the delivery has
    the sign of the moment, and -1 if it has the other.
    """
    clock = tl.load(control_ptr + CLOCK).to(tl.int32)
    root = tl.load(control_ptr + ROOT).to(tl.float32)
    epsilon = tl.load(control_ptr + EPSILON).to(tl.float32)
    tau = tl.maximum(clock - tl.load(last_ptr + at, mask=inside, other=0), 1)
    waited = tau.to(tl.float32)
    mean = tl.div_rn(tl.load(gradient_ptr + gradient_at, mask=inside, other=0.0).to(tl.float32), waited)
    if MAXIMIZE:
        mean = -mean
    # The second moment comes first: fewer numbers are then kept over its divisions.
    power, complement = _decay(tau, tables_ptr + 2 * POWERS, POWERS)
    old, square = tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32), mean * mean
    held = power * old
    second = held + complement * square
    power, complement, weight = _forgetting(waited, power, complement, control_ptr)
    shorter = power * old + complement * square
    second = tl.where((shorter < second) | (shorter != shorter), shorter, second)
    # By a subtraction, because no GPU has been asked what neg.f32 makes of NaN.
    waited = tl.where(_is_outlier(held, square, weight, control_ptr), waited - 2 * waited, waited)
    power, complement = _decay(tau, tables_ptr, POWERS)
    before = tl.load(first_ptr + at, mask=inside, other=0.0).to(tl.float32)
    vote = tl.where(before > 0, 1, tl.where(before < 0, -1, 0)) * tl.where(mean > 0, 1, tl.where(mean < 0, -1, 0))
    first = power * before + complement * mean
    largest = second
    if AMSGRAD:
        maximum = tl.load(maximum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.where((maximum > second) | (maximum != maximum), maximum, second)
    move = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(largest), root) + epsilon)
    return first, second, largest, move, waited, vote


@triton.jit
def _caught_up(waited, control_ptr):
    """Return how many dense steps a delivery counts for if gradients are not steady, before the limit of its tensor."""
    limit = tl.load(control_ptr + CATCH_UP).to(tl.float32)
    walk = tl.load(control_ptr + WALK).to(tl.float32)
    return tl.where(waited < 0, 1.0, tl.minimum(tl.minimum(waited, limit), walk * tl.sqrt_rn(tl.abs(waited))))


@triton.jit
def _summed(move, waited, vote, control_ptr, LARGEST_SQUARE: tl.constexpr):
    """Return the squared distance of each entry (int64), and its vote in 32 bits, in which a block can be summed."""
    distance = _caught_up(waited, control_ptr) * move * tl.load(control_ptr + DISTANCE).to(tl.float32)
    square = distance * distance
    square = tl.where(square < LARGEST_SQUARE, square, LARGEST_SQUARE)  # NaN counts as the largest
    return square.to(tl.int64), tl.where(vote > 0, 1, tl.where(vote < 0, 1 << 16, 0))


@triton.jit
def _widened(votes, DISAGREES: tl.constexpr):
    """Return ``votes`` of a block, or of each entry, as int64."""
    return (votes & 0xFFFF).to(tl.int64) + (votes >> 16).to(tl.int64) * DISAGREES


@triton.jit
def _steadiness(votes, DISAGREES: tl.constexpr):
    """Return the weight of a full catch-up, from 0 to 1, see ``steadiness`` of :mod:`tritoncomm_kernels.adam`."""
    agree = votes & (DISAGREES - 1)
    disagree = votes >> 32
    count = tl.maximum(agree + disagree, 1).to(tl.float32)
    surplus = tl.div_rn((agree - disagree).to(tl.float32) - 3 * tl.sqrt_rn(count), count)
    return tl.minimum(tl.maximum(4 * surplus - 1, 0.0), 1.0)


@triton.jit
def _write(
    parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
    parameter, first, second, largest, move, waited, param_rms, total, votes, n,
    AMSGRAD: tl.constexpr, FINE: tl.constexpr, DISAGREES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the results of :func:`_step`, and move the parameter. ``total`` and ``votes`` are sums of its tensor.

    It moves by less if the tensor of ``n`` elements would move too far, and by more if gradients are steady.
    """
    tl.debug_barrier()  # the stores may use other threads than the loads
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    if AMSGRAD:
        tl.store(maximum_ptr + at, largest, mask=inside)
    tl.store(last_ptr + at, tl.full([BLOCK], 0, tl.int32) + tl.load(control_ptr + CLOCK).to(tl.int32), mask=inside)
    rate = tl.load(control_ptr + RATE).to(tl.float32)
    change = tl.load(control_ptr + CHANGE).to(tl.float32)
    reach = change * param_rms
    reach = tl.where(reach > FINE, reach, FINE)  # at least one learning rate, also if it is NaN
    reach = tl.where(change == float("inf"), change, reach)
    length = tl.sqrt_rn(tl.div_rn(total.to(tl.float32), n.to(tl.float32)))
    factor = _caught_up(waited, control_ptr)
    factor = tl.where(length > reach, tl.maximum(factor * tl.div_rn(reach, length), 1.0), factor)
    far = tl.minimum(tl.abs(waited), tl.load(control_ptr + STEADY).to(tl.float32))
    factor = factor + _steadiness(votes, DISAGREES) * (far - factor)
    tl.store(parameter_ptr + at, parameter - rate * (factor * move), mask=inside)


@triton.jit
def _delivered_of(table_ptr, places_ptr, BLOCK: tl.constexpr):
    """Return this program's tensor, its row, its coordinates, a mask of those inside, and their places in a list.

    ``places`` has two numbers per program: the tensor, and the block of this tensor.
    """
    tensor = tl.load(places_ptr + 2 * tl.program_id(0))
    row_ptr = table_ptr + tensor * COLUMNS
    lane = tl.load(places_ptr + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    indices = tl.load(row_ptr + INDICES)
    count = tl.load(row_ptr + ENTRIES)
    n = tl.load(row_ptr + NUMEL)
    listed = tl.where(indices == 0, 0, count)  # an address of 0 means all coordinates
    at = tl.load(indices.to(tl.pointer_type(tl.int64)) + lane, mask=lane < listed, other=-1)
    at = tl.where(lane < listed, at, lane)
    inside = (lane < count) & (at >= 0) & (at < n)
    return tensor, row_ptr, at, inside, lane


@triton.jit
def _address(row_ptr, column, DTYPE: tl.constexpr):
    return tl.load(row_ptr + column).to(tl.pointer_type(DTYPE))


@triton.jit
def sums_many_kernel(
    table_ptr, places_ptr, control_ptr, tables_ptr, total_ptr,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, POWERS: tl.constexpr,
    LARGEST_SQUARE: tl.constexpr, DISAGREES: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Sum squared distances and votes of ``BLOCK`` coordinates of one tensor, in integers. Nothing is updated.

    With ``COMPACT``, the gradients in the table are those of the delivered coordinates only.
    """
    tensor, row_ptr, at, inside, lane = _delivered_of(table_ptr, places_ptr, BLOCK)
    _, _, _, move, waited, vote = _step(
        _address(row_ptr, GRADIENT, DTYPE), _address(row_ptr, FIRST, DTYPE), _address(row_ptr, SECOND, DTYPE),
        _address(row_ptr, MAXIMUM, DTYPE), _address(row_ptr, LAST, tl.int32),
        control_ptr, tables_ptr, at, inside, lane if COMPACT else at, AMSGRAD, MAXIMIZE, POWERS,
    )  # fmt: skip
    square, votes = _summed(move, waited, vote, control_ptr, LARGEST_SQUARE)
    tl.atomic_add(total_ptr + SUMS * tensor, tl.sum(tl.where(inside, square, 0), axis=0), sem="relaxed")
    votes = _widened(tl.sum(tl.where(inside, votes, 0), axis=0), DISAGREES)
    tl.atomic_add(total_ptr + SUMS * tensor + 1, votes, sem="relaxed")


@triton.jit
def adam_many_kernel(
    table_ptr, places_ptr, control_ptr, tables_ptr, total_ptr,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, POWERS: tl.constexpr,
    FINE: tl.constexpr, DISAGREES: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Update ``BLOCK`` coordinates of one tensor. An index outside of it updates nothing. ``COMPACT`` is as above."""
    tensor, row_ptr, at, inside, lane = _delivered_of(table_ptr, places_ptr, BLOCK)
    parameter_ptr = _address(row_ptr, PARAMETER, DTYPE)
    first_ptr = _address(row_ptr, FIRST, DTYPE)
    second_ptr = _address(row_ptr, SECOND, DTYPE)
    last_ptr = _address(row_ptr, LAST, tl.int32)
    maximum_ptr = _address(row_ptr, MAXIMUM, DTYPE)
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first, second, largest, move, waited, _ = _step(
        _address(row_ptr, GRADIENT, DTYPE), first_ptr, second_ptr, maximum_ptr, last_ptr,
        control_ptr, tables_ptr, at, inside, lane if COMPACT else at, AMSGRAD, MAXIMIZE, POWERS,
    )  # fmt: skip
    _write(
        parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
        parameter, first, second, largest, move, waited, tl.load(_address(row_ptr, PARAM_RMS, tl.float32)),
        tl.load(total_ptr + SUMS * tensor), tl.load(total_ptr + SUMS * tensor + 1), tl.load(row_ptr + NUMEL),
        AMSGRAD, FINE, DISAGREES, BLOCK,
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
    compact: bool = False,
) -> None:
    """Launch the kernels for many tensors once, on checked arguments. All floats are of one dtype and contiguous.

    If ``compact``, each of ``gradients`` has one value per delivered coordinate.

    One copy to the device holds the table of addresses, a :class:`~tritoncomm_kernels.adam_layout.Row` per tensor, and
    the list of blocks, ``[blocks, 2]``, both int64. A block is a tensor's number and the block's number in that tensor.
    """
    device = parameters[0].device
    rows = [
        Row(
            parameter=parameter.data_ptr(),
            gradient=gradients[i].data_ptr(),
            first=first[i].data_ptr(),
            second=second[i].data_ptr(),
            last=last[i].data_ptr(),
            param_rms=param_rms[i].data_ptr(),
            maximum=0 if maximum is None else maximum[i].data_ptr(),
            numel=parameter.numel(),
            indices=0 if at is None else at.data_ptr(),
            entries=parameter.numel() if at is None else at.numel(),
        )
        for i, (parameter, at) in enumerate(zip(parameters, indices, strict=True))
    ]
    blocks = [(i, j) for i, row in enumerate(rows) for j in range(triton.cdiv(row.entries, BLOCK))]
    if not blocks:
        return
    table, places = np.array(rows, np.int64).reshape(-1), np.array(blocks, np.int64).reshape(-1)
    on_device = copied_to(torch.from_numpy(np.concatenate([table, places])), device)
    total = torch.zeros(SUMS.value * len(parameters), dtype=torch.int64, device=device)
    arguments = on_device, on_device[table.size :], control, tables, total
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[parameters[0].dtype]
    with on(parameters[0].device):
        sums_many_kernel[(len(blocks),)](
            *arguments, DTYPE=dtype, AMSGRAD=maximum is not None, MAXIMIZE=maximize,
            POWERS=tables.numel() // 4, LARGEST_SQUARE=LARGEST_SQUARE, DISAGREES=DISAGREES, BLOCK=BLOCK,
            COMPACT=compact, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        adam_many_kernel[(len(blocks),)](
            *arguments, DTYPE=dtype, AMSGRAD=maximum is not None, MAXIMIZE=maximize,
            POWERS=tables.numel() // 4, FINE=FINE, DISAGREES=DISAGREES, BLOCK=BLOCK,
            COMPACT=compact, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
