# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.adam_flat`: an entry of a flat list finds its parameter by halving.

Like the kernels in :mod:`tritoncomm_kernels.adam_triton`, the first computes two sums for each tensor, and the second
computes the moves again and applies them. Both are launched once, however many parameters there are.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.adam import DISAGREES, FINE, LARGEST_SQUARE
from tritoncomm_kernels.adam_layout import Row
from tritoncomm_kernels.adam_triton import (
    COLUMNS,
    FIRST,
    GRADIENT,
    LAST,
    MAXIMUM,
    NUMEL,
    PARAM_RMS,
    PARAMETER,
    SECOND,
    SUMS,
    _step,
    _summed,
    _widened,
    _write,
)
from tritoncomm_kernels.devices import on

BLOCK, WARPS = 128, 4
# Further columns in a table of tensors.
START = tl.constexpr(Row._fields.index("start"))
CHANNELS = tl.constexpr(Row._fields.index("channels"))
POSITIONS = tl.constexpr(Row._fields.index("positions"))


@triton.jit
def _owner(indices_ptr, table_ptr, capacity, tensors, steps, BLOCK: tl.constexpr, IMAGES: tl.constexpr):
    """Return the lanes of this program, the tensor of each entry, its place in memory there, and a mask of entries."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + lane, mask=lane < capacity, other=-1).to(tl.int64)
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


@triton.jit(do_not_specialize=["capacity", "tensors", "steps"], do_not_specialize_on_alignment=["indices_ptr"])
def sums_flat_kernel(
    indices_ptr, delivered_ptr, table_ptr, control_ptr, tables_ptr, total_ptr, capacity, tensors, steps,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, POWERS: tl.constexpr,
    LARGEST_SQUARE: tl.constexpr, DISAGREES: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Sum squared distances and votes of the entries of each tensor, in integers. Nothing is updated.

    With ``COMPACT``, ``delivered_ptr`` has the gradient of each entry. Otherwise it is read from the tensor's gradient.
    """
    lane, tensor, row_ptr, at, inside = _owner(indices_ptr, table_ptr, capacity, tensors, steps, BLOCK, IMAGES)
    gradient_ptr = delivered_ptr + lane if COMPACT else _address(row_ptr, GRADIENT, inside, DTYPE) + at
    _, _, _, move, waited, vote = _step(
        gradient_ptr,
        _address(row_ptr, FIRST, inside, DTYPE), _address(row_ptr, SECOND, inside, DTYPE),
        _address(row_ptr, MAXIMUM, inside, DTYPE), _address(row_ptr, LAST, inside, tl.int32),
        control_ptr, tables_ptr, at, inside, 0, AMSGRAD, MAXIMIZE, POWERS,
    )  # fmt: skip
    square, votes = _summed(move, waited, vote, control_ptr, LARGEST_SQUARE)
    tl.atomic_add(total_ptr + SUMS * tensor, square, mask=inside, sem="relaxed")
    tl.atomic_add(total_ptr + SUMS * tensor + 1, _widened(votes, DISAGREES), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "tensors", "steps"], do_not_specialize_on_alignment=["indices_ptr"])
def adam_flat_kernel(
    indices_ptr, delivered_ptr, table_ptr, control_ptr, tables_ptr, total_ptr, capacity, tensors, steps,
    DTYPE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, POWERS: tl.constexpr,
    FINE: tl.constexpr, DISAGREES: tl.constexpr, BLOCK: tl.constexpr,
    COMPACT: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Update ``BLOCK`` entries of the list. Padding, and entries of no tensor in the table, update nothing."""
    lane, tensor, row_ptr, at, inside = _owner(indices_ptr, table_ptr, capacity, tensors, steps, BLOCK, IMAGES)
    gradient_ptr = delivered_ptr + lane if COMPACT else _address(row_ptr, GRADIENT, inside, DTYPE) + at
    parameter_ptr = _address(row_ptr, PARAMETER, inside, DTYPE)
    first_ptr = _address(row_ptr, FIRST, inside, DTYPE)
    second_ptr = _address(row_ptr, SECOND, inside, DTYPE)
    last_ptr = _address(row_ptr, LAST, inside, tl.int32)
    maximum_ptr = _address(row_ptr, MAXIMUM, inside, DTYPE)
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first, second, largest, move, waited, _ = _step(
        gradient_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, tables_ptr, at, inside, 0,
        AMSGRAD, MAXIMIZE, POWERS,
    )  # fmt: skip
    _write(
        parameter_ptr, first_ptr, second_ptr, maximum_ptr, last_ptr, control_ptr, at, inside,
        parameter, first, second, largest, move, waited,
        tl.load(_address(row_ptr, PARAM_RMS, inside, tl.float32), mask=inside, other=0.0),
        tl.load(total_ptr + SUMS * tensor, mask=inside, other=0),
        tl.load(total_ptr + SUMS * tensor + 1, mask=inside, other=0),
        tl.load(row_ptr + NUMEL, mask=inside, other=1),
        AMSGRAD, FINE, DISAGREES, BLOCK,
    )  # fmt: skip


def update(
    indices: torch.Tensor,
    delivered: torch.Tensor | None,
    table: torch.Tensor,
    control: torch.Tensor,
    tables: torch.Tensor,
    dtype: torch.dtype,
    *,
    amsgrad: bool,
    maximize: bool,
    images: bool = False,
) -> None:
    """Launch the kernels on checked, non-empty arguments. ``delivered`` is in ``dtype``, or None to read gradients.

    ``images`` is True if any tensor in the ``table`` has its channels innermost in memory.
    """
    tensors = table.shape[0]
    total = torch.zeros(SUMS.value * tensors, dtype=torch.int64, device=indices.device)
    grid = (triton.cdiv(indices.numel(), BLOCK),)
    lists = indices, indices if delivered is None else delivered
    arguments = *lists, table, control, tables, total, indices.numel(), tensors, tensors.bit_length()
    options: dict[str, Any] = {
        "DTYPE": {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype],
        "AMSGRAD": amsgrad,
        "MAXIMIZE": maximize,
        "POWERS": tables.numel() // 4,
        "DISAGREES": DISAGREES,
        "BLOCK": BLOCK,
        "COMPACT": delivered is not None,
        "IMAGES": images,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    with on(indices.device):
        sums_flat_kernel[grid](*arguments, LARGEST_SQUARE=LARGEST_SQUARE, **options)
        adam_flat_kernel[grid](*arguments, FINE=FINE, **options)
