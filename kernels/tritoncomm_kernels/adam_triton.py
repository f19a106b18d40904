# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.adam_flat`: gather, update and scatter over the delivered coordinates.

There are two launches, because how far one coordinate moves depends on its whole tensor: on the distance that the
tensor would move, and on how many of its entries agree in sign with their moments. The first launch computes these two
sums. The second computes the moves again and applies them. Only the sums are stored in between. There are no more
launches for more tensors: an entry finds its tensor by halving, in a table of addresses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import adam
from tritoncomm_kernels.adam import AdamControl, Scalars, beta_tables
from tritoncomm_kernels.checks import channels_last
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.memory import copied_to

BLOCK, WARPS = 128, 4  # 256 spills on sm_90 in bf16 with Triton 3.6, and 512 on sm_80
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Row(NamedTuple):
    """One tensor in a table of int64 numbers: addresses, then its size and place.

    An address of 0 stands for a tensor that there is not. ``start`` is the index of the first element in the flat
    vector. ``channels`` and ``positions`` are those of an image whose channels are innermost in memory.
    """

    parameter: int
    first: int
    second: int
    last: int
    param_rms: int
    maximum: int
    numel: int
    start: int
    channels: int
    positions: int


# Positions in ``control``, and columns in a table of tensors: in the order of Scalars and of Row.
STEPS, CLOCK, RATE, CORRECTION, PER_CORRECTION, ROOT, EPSILON, CATCH_UP, STEADY, WALK, DISTANCE, CHANGE = map(
    tl.constexpr, range(len(Scalars._fields))
)
PARAMETER, FIRST, SECOND, LAST, PARAM_RMS, MAXIMUM, NUMEL, START, CHANNELS, POSITIONS = map(
    tl.constexpr, range(len(Row._fields))
)
COLUMNS = tl.constexpr(len(Row._fields))
POWERS, MEMORY, LEAST_WEIGHT = tl.constexpr(adam.POWERS), tl.constexpr(adam.MEMORY), tl.constexpr(adam.LEAST_WEIGHT)
OUTLIER_SQUARED, DISAGREES = tl.constexpr(adam.OUTLIER**2), tl.constexpr(adam.DISAGREES)
FINE, LARGEST_SQUARE = tl.constexpr(adam.FINE), tl.constexpr(adam.LARGEST_SQUARE)
SUMS = tl.constexpr(2)  # of a tensor: squared distance, then votes, both int64


@triton.jit
def _decay(tau, table_ptr):
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
    """Return other factors of the second moment and of the squared mean, see the reference."""
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
    """Return which means are far above their second moment, see the reference."""
    correction = tl.load(control_ptr + CORRECTION).to(tl.float32)
    known = (held > 0) & (weight > LEAST_WEIGHT)
    return known & (square * (correction * weight) > held * OUTLIER_SQUARED)


@triton.jit
def _step(
    gradient, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Return the new moments, the move of one dense step, the number of steps waited, and the vote.

    The number of steps is negative for an outlier. ``at`` are the places of the coordinates. A vote is 1 if the
    delivery has the sign of the moment, and -1 if it has the other.
    """
    clock = tl.load(control_ptr + CLOCK).to(tl.int32)
    tau = tl.maximum(clock - tl.load(last_ptr + at, mask=inside, other=0), 1)
    waited = tau.to(tl.float32)
    mean = tl.div_rn(gradient, waited)
    if MAXIMIZE:
        mean = -mean
    # The second moment comes first: fewer numbers are then kept over its divisions.
    power, complement = _decay(tau, tables_ptr + 2 * POWERS)
    old, square = tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32), mean * mean
    held = power * old
    second = held + complement * square
    power, complement, weight = _forgetting(waited, power, complement, control_ptr)
    shorter = power * old + complement * square
    second = tl.where((shorter < second) | (shorter != shorter), shorter, second)
    # By a subtraction, because no GPU has been asked what neg.f32 makes of NaN.
    waited = tl.where(_is_outlier(held, square, weight, control_ptr), waited - 2 * waited, waited)
    power, complement = _decay(tau, tables_ptr)
    before = tl.load(first_ptr + at, mask=inside, other=0.0).to(tl.float32)
    vote = tl.where(before > 0, 1, tl.where(before < 0, -1, 0)) * tl.where(mean > 0, 1, tl.where(mean < 0, -1, 0))
    first = power * before + complement * mean
    largest = second
    if AMSGRAD:
        maximum = tl.load(maximum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.where((maximum > second) | (maximum != maximum), maximum, second)
    root = tl.load(control_ptr + ROOT).to(tl.float32)
    epsilon = tl.load(control_ptr + EPSILON).to(tl.float32)
    move = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(largest), root) + epsilon)
    return first, second, largest, move, waited, vote


@triton.jit
def _caught_up(waited, control_ptr):
    """Return how many dense steps a delivery counts for if gradients are not steady, before the limit of its tensor."""
    limit = tl.load(control_ptr + CATCH_UP).to(tl.float32)
    walk = tl.load(control_ptr + WALK).to(tl.float32)
    return tl.where(waited < 0, 1.0, tl.minimum(tl.minimum(waited, limit), walk * tl.sqrt_rn(tl.abs(waited))))


@triton.jit
def _summed(move, waited, vote, control_ptr):
    """Return the squared distance of each entry (int64), and its vote in 32 bits, in which a block can be summed."""
    distance = _caught_up(waited, control_ptr) * move * tl.load(control_ptr + DISTANCE).to(tl.float32)
    square = distance * distance
    square = tl.where(square < LARGEST_SQUARE, square, LARGEST_SQUARE)  # NaN counts as the largest
    return square.to(tl.int64), tl.where(vote > 0, 1, tl.where(vote < 0, 1 << 16, 0))


@triton.jit
def _widened(votes):
    """Return ``votes`` of a block, or of each entry, as int64."""
    return (votes & 0xFFFF).to(tl.int64) + (votes >> 16).to(tl.int64) * DISAGREES


@triton.jit
def _steadiness(votes):
    """Return the weight of a full catch-up, from 0 to 1, see the reference."""
    agree = votes & (DISAGREES - 1)
    disagree = votes >> 32
    count = tl.maximum(agree + disagree, 1).to(tl.float32)
    surplus = tl.div_rn((agree - disagree).to(tl.float32) - 3 * tl.sqrt_rn(count), count)
    return tl.minimum(tl.maximum(4 * surplus - 1, 0.0), 1.0)


@triton.jit
def _write(
    parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
    parameter, first, second, largest, move, waited, param_rms, total, votes, n,
    AMSGRAD: tl.constexpr, BLOCK: tl.constexpr,
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
    factor = factor + _steadiness(votes) * (far - factor)
    tl.store(parameter_ptr + at, parameter - rate * (factor * move), mask=inside)


@triton.jit
def _owner(indices_ptr, table_ptr, count, tensors, steps, BLOCK: tl.constexpr, IMAGES: tl.constexpr):
    """Return the lanes of this program, the tensor of each entry, its row and place there, and a mask of entries.

    Without indices, every lane is an entry, and its number is the index.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if indices_ptr is None:
        index = tl.where(lane < count, lane, -1).to(tl.int64)
    else:
        index = tl.load(indices_ptr + lane, mask=lane < count, other=-1).to(tl.int64)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + tensors
    while steps > 0:  # number of tensors that start at the entry or before it
        middle = low + (high - low) // 2
        unknown = low < high
        start = tl.load(table_ptr + middle.to(tl.int64) * COLUMNS + START, mask=unknown, other=0)
        low = tl.where(unknown & (start <= index), middle + 1, low)
        high = tl.where(unknown & (start > index), middle, high)
        steps -= 1
    held = (index >= 0) & (low > 0)
    tensor = tl.where(held, low - 1, 0)
    row_ptr = table_ptr + tensor.to(tl.int64) * COLUMNS
    at = index - tl.load(row_ptr + START, mask=held, other=0)
    inside = held & (at < tl.load(row_ptr + NUMEL, mask=held, other=0))
    at = tl.where(inside, at, 0)
    if IMAGES:  # the coordinate counts channels before positions, and memory positions before channels
        channels = tl.load(row_ptr + CHANNELS, mask=inside, other=1)
        positions = tl.load(row_ptr + POSITIONS, mask=inside, other=1)
        within = at % (channels * positions)
        at = at - within + within % positions * channels + within // positions
    return lane, tensor, row_ptr, at, inside


@triton.jit
def _address(row_ptr, column, inside, DTYPE: tl.constexpr):
    return tl.load(row_ptr + column, mask=inside, other=0).to(tl.pointer_type(DTYPE))


@triton.jit
def _add_to_sums(total_ptr, square, votes, tensor, tensors, inside):
    """Add squared distances and votes of entries to the sums of their tensors, in integers."""
    first = tl.min(tl.where(inside, tensor, tensors), axis=0)
    last = tl.max(tl.where(inside, tensor, -1), axis=0)
    if first == last:  # entries of one tensor are summed first: atomics at one address wait for each other
        tl.atomic_add(total_ptr + SUMS * first, tl.sum(tl.where(inside, square, 0), axis=0), sem="relaxed")
        summed = _widened(tl.sum(tl.where(inside, votes, 0), axis=0))
        tl.atomic_add(total_ptr + SUMS * first + 1, summed, sem="relaxed")
    else:
        tl.atomic_add(total_ptr + SUMS * tensor, square, mask=inside, sem="relaxed")
        tl.atomic_add(total_ptr + SUMS * tensor + 1, _widened(votes), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count", "tensors", "steps"], do_not_specialize_on_alignment=["indices_ptr"])
def adam_kernel(
    indices_ptr, values_ptr, table_ptr, control_ptr, tables_ptr, total_ptr, count, tensors, steps,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, IMAGES: tl.constexpr, APPLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum squared distances and votes of the entries of each tensor. With ``APPLY``, the sums are known: update.

    A program has ``BLOCK`` entries of the list. Padding, and entries of no tensor in the table, count for nothing.
    """
    lane, tensor, row_ptr, at, inside = _owner(indices_ptr, table_ptr, count, tensors, steps, BLOCK, IMAGES)
    first_ptr = _address(row_ptr, FIRST, inside, DTYPE)
    second_ptr = _address(row_ptr, SECOND, inside, DTYPE)
    last_ptr = _address(row_ptr, LAST, inside, tl.int32)
    maximum_ptr = _address(row_ptr, MAXIMUM, inside, DTYPE)
    if APPLY:
        parameter_ptr = _address(row_ptr, PARAMETER, inside, DTYPE)
        parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(values_ptr + lane, mask=inside, other=0.0).to(DTYPE).to(tl.float32)
    first, second, largest, move, waited, vote = _step(
        gradient, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside, AMSGRAD, MAXIMIZE
    )
    if APPLY:
        _write(
            parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
            parameter, first, second, largest, move, waited,
            tl.load(_address(row_ptr, PARAM_RMS, inside, tl.float32), mask=inside, other=0.0),
            tl.load(total_ptr + SUMS * tensor, mask=inside, other=0),
            tl.load(total_ptr + SUMS * tensor + 1, mask=inside, other=0),
            tl.load(row_ptr + NUMEL, mask=inside, other=1),
            AMSGRAD, BLOCK,
        )  # fmt: skip
    else:
        square, votes = _summed(move, waited, vote, control_ptr)
        _add_to_sums(total_ptr, square, votes, tensor, tensors, inside)


def table_of(
    parameters: Sequence[torch.Tensor],
    addresses: Sequence[Sequence[int]],
    starts: Sequence[int],
) -> torch.Tensor:
    """Return a :class:`Row` for each of ``parameters`` on their device.

    ``addresses`` are those of the parameters, and of each field of their states.
    """
    rows = []
    for tensor, start, *held in zip(parameters, starts, *addresses, strict=True):
        maximum = [] if len(held) > MAXIMUM.value else [0]
        image = None if tensor.is_contiguous() else channels_last(tensor)
        rows.append(Row._make((*held, *maximum, tensor.numel(), start, *(image or (1, 1)))))
    return copied_to(torch.tensor(rows, dtype=torch.int64, device="cpu"), parameters[0].device)


def update(
    indices: torch.Tensor | None,
    values: torch.Tensor,
    table: torch.Tensor,
    control: AdamControl,
    count: int,
    *,
    dtype: torch.dtype,
    amsgrad: bool,
    images: bool,
) -> None:
    """Launch the kernel twice on checked arguments. ``count`` is the number of entries, not 0.

    ``images`` is True if a tensor in the ``table`` has its channels innermost in memory.
    """
    tensors = table.shape[0]
    total = torch.zeros(SUMS.value * tensors, dtype=torch.int64, device=table.device)
    tables = beta_tables(control.betas, torch.float32, table.device)
    for applies in (False, True):
        launch(
            adam_kernel, (triton.cdiv(count, BLOCK),), indices, values, table, control.scalars, tables, total,
            count, tensors, tensors.bit_length(), like=table, warps=WARPS,
            DTYPE=TYPES[dtype], AMSGRAD=amsgrad, MAXIMIZE=control.maximize, IMAGES=images, APPLY=applies, BLOCK=BLOCK,
        )  # fmt: skip
