# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.midrise`: one launch for each step of a mean over ranks.

A program handles ``TILE`` blocks. Sums over ranks are in fp64, as in the reference. Scales have few significant bits,
so that every product with a level is exact. The sum of magnitudes that chooses a scale with 1 bit has another order
than in the reference. It only decides at the sender, and the scale travels.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import midrise
from tritoncomm_kernels.bits_triton import key_of, pack_words
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.quantize import scale_bits

TILE, WARPS = 16, 4
WIDTH = tl.constexpr(midrise.BLOCK)
LIMIT = tl.constexpr(midrise.LIMIT)
NAN_BITS = tl.constexpr(midrise.NAN_BITS)


@triton.jit
def chosen_scale(values, held, dropped, BITS: tl.constexpr):
    """Return the scale of each block of ``values`` (fp32 ``[blocks, WIDTH]``), which holds ``held`` values.

    The lowest ``dropped`` bits of its significand are 0.
    """
    if BITS == 1:
        found = tl.div_rn(tl.sum(tl.abs(values), axis=1), tl.maximum(held, 1).to(tl.float32))
        rounding = 1 << (dropped - 1)
    else:
        found = tl.max(key_of(values), axis=1).to(tl.float32, bitcast=True) * (1.0 / (1 << BITS))
        rounding = (1 << dropped) - 1
    rounded = (found.to(tl.int32, bitcast=True) + rounding) & (-1 << dropped)
    return tl.where(found < LIMIT, rounded, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def code_of(values, scales, inside, BITS: tl.constexpr):
    """Return the codes (int32 ``[blocks, WIDTH]``) of ``values``, 0 where they are not ``inside``."""
    negative = (values.to(tl.int32, bitcast=True) >> 31) & 1
    if BITS == 1:
        code = negative
    else:
        top = (1 << (BITS - 1)) - 1
        step = tl.where(scales == 0, 1.0, 2 * scales)
        level = tl.div_rn(tl.abs(values), tl.broadcast_to(step[:, None], values.shape))
        level = tl.where(level == level, tl.minimum(level, top), 0.0)  # NaN becomes 0
        code = (top - level.to(tl.int32)) ^ (negative * (2 * top + 1))
    return tl.where(inside, code, 0)


@triton.jit
def level_of(codes, BITS: tl.constexpr):
    """Return the levels (fp32) of ``codes``, in units of their scales."""
    return ((1 << BITS) - 1 - 2 * codes).to(tl.float32)


@triton.jit
def write_blocks(
    codes, scales, words_ptr, halves_ptr, block, length, held, size, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Write the ``codes`` and ``scales`` of ``TILE`` blocks from ``block`` on to a message of ``size`` words.

    Its codes take ``held`` words.
    """
    flat = tl.reshape(codes, (TILE * WIDTH,))
    group = block * (WIDTH // 32) + tl.arange(0, TILE * (WIDTH // 32))
    for bit in tl.static_range(BITS):
        packed = pack_words((flat >> bit) & 1, TILE * WIDTH)
        tl.store(words_ptr + group * BITS + bit, packed, mask=group * 32 < length)
    number = block + tl.arange(0, TILE)
    half = (scales.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(halves_ptr + 2 * held + number, half, mask=number < 2 * (size - held))


@triton.jit
def read_blocks(words_ptr, halves_ptr, block, length, held, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return the levels (fp32 ``[TILE, WIDTH]``) and the scales (fp32 ``[TILE]``) of blocks of a message."""
    number = block + tl.arange(0, TILE)
    within = number[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = within < length
    codes = tl.zeros([TILE, WIDTH], tl.int32)
    for bit in tl.static_range(BITS):
        word = tl.load(words_ptr + (within // 32) * BITS + bit, mask=inside, other=0)
        codes |= ((word >> (within % 32)) & 1) << bit
    half = tl.load(halves_ptr + 2 * held + number, mask=number * WIDTH < length, other=0).to(tl.int32)
    scales = (half << 16).to(tl.float32, bitcast=True)
    valid = (scales >= 0) & (scales <= 2 * LIMIT)
    return level_of(codes, BITS), tl.where(valid, scales, float("nan"))


@triton.jit(
    do_not_specialize=["count", "length", "held", "size", "part", "dropped"],
    do_not_specialize_on_alignment=["values_ptr"],
)
def round_parts_kernel(
    values_ptr, words_ptr, halves_ptr, count, length, held, size, part, dropped, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Write blocks of the message of one part, and subtract them. The message of number ``part`` is all zeros."""
    block, row = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    within = (block + tl.arange(0, TILE))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row * length + within
    inside = (within < length) & (at < tl.where(row == part, 0, count))
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    scales = chosen_scale(values, tl.sum(inside.to(tl.int32), axis=1), dropped, BITS)
    codes = code_of(values, scales, inside, BITS)
    write_blocks(
        codes, scales, words_ptr + row * size, halves_ptr + row * 2 * size, block, length, held, size, BITS, TILE
    )
    tl.store(values_ptr + at, values - level_of(codes, BITS) * scales[:, None], mask=inside)


@triton.jit(
    do_not_specialize=["count", "length", "held", "size", "part", "parts", "dropped"],
    do_not_specialize_on_alignment=["values_ptr"],
)
def round_mean_kernel(
    messages_ptr, message_halves_ptr, values_ptr, words_ptr, halves_ptr,
    count, length, held, size, part, parts, dropped, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add blocks of the messages in order, write the blocks of their mean, and what it leaves out."""
    block = tl.program_id(0) * TILE
    within = (block + tl.arange(0, TILE))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = tl.cast(part, tl.int64) * length + within
    inside = (within < length) & (at < count)
    own = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float64)
    total = tl.zeros([TILE, WIDTH], tl.float64)
    row = 0
    while row < parts:
        first = tl.cast(row, tl.int64) * size
        levels, scales = read_blocks(
            messages_ptr + first, message_halves_ptr + 2 * first, block, length, held, BITS, TILE
        )
        total += tl.where(row == part, own, (levels * scales[:, None]).to(tl.float64))
        row += 1
    total = tl.where(inside, total, 0.0)
    ranks = tl.cast(parts, tl.float32)
    mean = tl.div_rn(total.to(tl.float32), tl.broadcast_to(ranks, total.shape))
    scales = chosen_scale(mean, tl.sum(inside.to(tl.int32), axis=1), dropped, BITS)
    codes = code_of(mean, scales, inside, BITS)
    write_blocks(codes, scales, words_ptr, halves_ptr, block, length, held, size, BITS, TILE)
    sent = (level_of(codes, BITS) * scales[:, None]).to(tl.float64)
    tl.store(values_ptr + at, (total - ranks.to(tl.float64) * sent).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["count", "length", "held", "size"], do_not_specialize_on_alignment=["values_ptr"])
def read_parts_kernel(
    words_ptr, halves_ptr, values_ptr, count, length, held, size, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Read blocks of one part."""
    block, row = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    within = (block + tl.arange(0, TILE))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row * length + within
    levels, scales = read_blocks(words_ptr + row * size, halves_ptr + row * 2 * size, block, length, held, BITS, TILE)
    tl.store(values_ptr + at, levels * scales[:, None], mask=(within < length) & (at < count))


def round_parts(values: torch.Tensor, messages: torch.Tensor, part: int, length: int, bits: int) -> None:
    """Launch the kernel on checked arguments: write all words of ``messages``, and the parts of ``values`` but one."""
    launch(
        round_parts_kernel, (_tiles(length), len(messages)),
        values, messages, messages.view(torch.int16), values.numel(), *_layout(messages, length, bits), part,
        24 - scale_bits(1), like=values, warps=WARPS, BITS=bits, TILE=TILE,
    )  # fmt: skip


def round_mean(
    messages: torch.Tensor, values: torch.Tensor, block: torch.Tensor, part: int, length: int, bits: int
) -> None:
    """Launch the kernel on checked arguments: write all words of ``block``, and the owner's part of ``values``."""
    launch(
        round_mean_kernel, (_tiles(length),),
        messages, messages.view(torch.int16), values, block, block.view(torch.int16), values.numel(),
        *_layout(messages, length, bits), part, len(messages), 24 - scale_bits(len(messages)),
        like=values, warps=WARPS, BITS=bits, TILE=TILE,
    )  # fmt: skip


def read_parts(messages: torch.Tensor, values: torch.Tensor, length: int, bits: int) -> None:
    """Launch the kernel on checked arguments: write all ``values``."""
    launch(
        read_parts_kernel, (_tiles(length), len(messages)),
        messages, messages.view(torch.int16), values, values.numel(), *_layout(messages, length, bits),
        like=messages, warps=WARPS, BITS=bits, TILE=TILE,
    )  # fmt: skip


def _tiles(length: int) -> int:
    """Return the number of programs for a message. Its scales may have an unused half behind them."""
    return -(-length // (2 * midrise.BLOCK) * 2 // TILE)


def _layout(messages: torch.Tensor, length: int, bits: int) -> tuple[int, int, int]:
    """Return the values per message, the words of its codes, and all of its words."""
    return length, midrise.code_words(length, bits), messages.shape[1]
