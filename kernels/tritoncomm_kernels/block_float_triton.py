# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.block_float`: one launch for each step of a quantized mean over ranks.

A program handles one block. Sums and scales are in fp64, as in the reference. A scale is a power of two, so that every
product with it is exact, and only the rounding to integers, the division by the number of ranks, and the conversion of
the owner's remainder round.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import block_float
from tritoncomm_kernels.dispatch import launch

WARPS = 4
WIDTH = tl.constexpr(block_float.BLOCK)
BIAS = tl.constexpr(block_float.BIAS)
NOT_FINITE = tl.constexpr(block_float.NOT_FINITE)
TO_INTEGER = tl.constexpr(1.5 * 2.0**52)  # added to a small fp64 number, it rounds to an integer, ties to even


@triton.jit
def power_of_two(exponent):
    """Return 2 to the power of ``exponent`` (int32) in fp64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def scale_of(code):
    """Return the scale of a block: NaN for the code of a block that is not finite."""
    return tl.where(code == NOT_FINITE, float("nan"), power_of_two(code - BIAS))


@triton.jit
def read_block(bytes_ptr, block, length, held, BITS: tl.constexpr):
    """Return the values (fp64) of a block of the message at ``bytes_ptr``, whose integers take ``held`` bytes."""
    at = block * WIDTH + tl.arange(0, WIDTH)
    inside = at < length
    if BITS == 8:
        integers = tl.load(bytes_ptr + at, mask=inside, other=0).to(tl.int32)
    else:
        pair = tl.load(bytes_ptr + at // 2, mask=inside, other=0).to(tl.int32)
        integers = tl.where(at % 2 == 0, (pair & 15 ^ 8) - 8, pair >> 4)
    code = tl.load(bytes_ptr + held + block).to(tl.int32) & 255
    return integers.to(tl.float64) * scale_of(code)


@triton.jit
def write_block(values, bytes_ptr, block, length, held, size, BITS: tl.constexpr):
    """Write ``values`` (fp64 ``[WIDTH]``, zeros behind ``length``) as a block of a message of ``size`` bytes.

    Return the values as they are read.
    """
    exponents = ((values.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    code = tl.max(exponents, axis=0) - (BITS - 2) + BIAS
    code = tl.minimum(tl.maximum(code, 0), NOT_FINITE)
    top = (1 << (BITS - 1)) - 1
    scaled = values * power_of_two(-code + BIAS)
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # NaN becomes 0
    scaled = tl.minimum(tl.maximum(scaled, -top), top)
    rounded = (scaled + TO_INTEGER) - TO_INTEGER
    integers = rounded.to(tl.int32)
    if BITS == 8:
        at = block * WIDTH + tl.arange(0, WIDTH)
        tl.store(bytes_ptr + at, integers.to(tl.int8), mask=at < held)
    else:
        halves = tl.reshape(integers & 15, (WIDTH // 2, 2))
        pairs = tl.sum(halves << (4 * tl.arange(0, 2))[None, :], axis=1)
        at = block * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        tl.store(bytes_ptr + at, pairs.to(tl.int8), mask=at < held)
    # The code, and zeros in place of those behind the last block.
    lane = tl.arange(0, 4)
    mask = (lane == 0) | ((block + lane >= tl.cdiv(length, WIDTH)) & (held + block + lane < size))
    tl.store(bytes_ptr + held + block + lane, tl.where(lane == 0, code, 0).to(tl.int8), mask=mask)
    return rounded * scale_of(code)


@triton.jit(do_not_specialize=["count", "length", "held", "size"], do_not_specialize_on_alignment=["values_ptr"])
def quantize_parts_kernel(values_ptr, bytes_ptr, left_ptr, count, length, held, size, BITS: tl.constexpr):
    """Write one block of one part, and what it leaves out."""
    block, part = tl.program_id(0), tl.program_id(1)
    within = block * WIDTH + tl.arange(0, WIDTH)
    at = tl.cast(part, tl.int64) * length + within
    inside = (within < length) & (at < count)
    values = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float64)
    sent = write_block(values, bytes_ptr + tl.cast(part, tl.int64) * size, block, length, held, size, BITS)
    tl.store(left_ptr + at, (values - sent).to(tl.float32), mask=inside)


@triton.jit(
    do_not_specialize=["count", "length", "held", "size", "part", "parts"],
    do_not_specialize_on_alignment=["values_ptr"],
)
def quantize_mean_kernel(
    messages_ptr, values_ptr, bytes_ptr, left_ptr, count, length, held, size, part, parts, BITS: tl.constexpr
):
    """Add one block of the messages in order, write the block of their mean, and what it leaves out."""
    block = tl.program_id(0)
    within = block * WIDTH + tl.arange(0, WIDTH)
    at = tl.cast(part, tl.int64) * length + within
    inside = (within < length) & (at < count)
    own = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float64)
    total = tl.zeros([WIDTH], tl.float64)
    row = 0
    while row < parts:
        received = read_block(messages_ptr + tl.cast(row, tl.int64) * size, block, length, held, BITS)
        total += tl.where(row == part, own, received)
        row += 1
    ranks = tl.cast(parts, tl.float64)
    sent = write_block(total / ranks, bytes_ptr, block, length, held, size, BITS)
    tl.store(left_ptr + at, (total - ranks * sent).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["count", "length", "held", "size"], do_not_specialize_on_alignment=["values_ptr"])
def dequantize_parts_kernel(bytes_ptr, values_ptr, count, length, held, size, BITS: tl.constexpr):
    """Read one block of one part."""
    block, part = tl.program_id(0), tl.program_id(1)
    within = block * WIDTH + tl.arange(0, WIDTH)
    at = tl.cast(part, tl.int64) * length + within
    values = read_block(bytes_ptr + tl.cast(part, tl.int64) * size, block, length, held, BITS)
    tl.store(values_ptr + at, values.to(tl.float32), mask=(within < length) & (at < count))


def quantize_parts(values: torch.Tensor, messages: torch.Tensor, left: torch.Tensor, length: int, bits: int) -> None:
    """Launch the kernel on checked arguments: write all words of ``messages``, and ``left``."""
    launch(
        quantize_parts_kernel, (triton.cdiv(length, block_float.BLOCK), len(messages)),
        values, messages.view(torch.int8), left, values.numel(), *_layout(messages, length, bits),
        like=values, warps=WARPS, BITS=bits,
    )  # fmt: skip


def quantize_mean(
    messages: torch.Tensor,
    values: torch.Tensor,
    left: torch.Tensor,
    block: torch.Tensor,
    part: int,
    length: int,
    bits: int,
) -> None:
    """Launch the kernel on checked arguments: write all words of ``block``, and the owner's part of ``left``."""
    launch(
        quantize_mean_kernel, (triton.cdiv(length, block_float.BLOCK),),
        messages.view(torch.int8), values, block.view(torch.int8), left, values.numel(),
        *_layout(messages, length, bits), part, len(messages),
        like=values, warps=WARPS, BITS=bits,
    )  # fmt: skip


def dequantize_parts(messages: torch.Tensor, values: torch.Tensor, length: int, bits: int) -> None:
    """Launch the kernel on checked arguments: write all ``values``."""
    launch(
        dequantize_parts_kernel, (triton.cdiv(length, block_float.BLOCK), len(messages)),
        messages.view(torch.int8), values, values.numel(), *_layout(messages, length, bits),
        like=messages, warps=WARPS, BITS=bits,
    )  # fmt: skip


def _layout(messages: torch.Tensor, length: int, bits: int) -> tuple[int, int, int]:
    """Return the values per message, the bytes of its integers, and all of its bytes."""
    return length, 4 * block_float.value_words(length, bits), 4 * messages.shape[1]
