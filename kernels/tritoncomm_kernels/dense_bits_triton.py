# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.dense_bits`: one launch for each step of a mean over ranks.

A program handles ``TILE`` blocks. Sums over ranks are in fp64, as in the reference. Scales have few significant bits,
so that every product with a level is exact. The sum of magnitudes that chooses a scale with 1 bit has another order
than in the reference. It only decides at the sender, and the scale travels.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import dense_bits
from tritoncomm_kernels.bits_triton import key_of, pack_words
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.formats import Format
from tritoncomm_kernels.quantize import scale_bits
from tritoncomm_kernels.sections_triton import level_of, levels_and_midpoints

TILE, WARPS = 16, 4
WIDTH = tl.constexpr(dense_bits.BLOCK)
LIMIT = tl.constexpr(dense_bits.LIMIT)
NAN_BITS = tl.constexpr(dense_bits.NAN_BITS)


@triton.jit
def chosen_scale(values, held, cover, dropped, BITS: tl.constexpr):
    """Return the scale of each block of ``values`` (fp32 ``[blocks, WIDTH]``), which holds ``held`` values.

    The lowest ``dropped`` bits of its significand are 0.
    """
    if BITS == 1:
        found = tl.div_rn(tl.sum(tl.abs(values), axis=1), tl.maximum(held, 1).to(tl.float32))
        rounding = 1 << (dropped - 1)
    else:
        largest = tl.max(key_of(values), axis=1).to(tl.float32, bitcast=True)
        found = tl.div_rn(largest, tl.zeros_like(largest) + cover)
        rounding = (1 << dropped) - 1
    rounded = (found.to(tl.int32, bitcast=True) + rounding) & (-1 << dropped)
    return tl.where(found < LIMIT, rounded, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def code_of(values, scales, inside, levels_ptr, BITS: tl.constexpr):
    """Return the codes (int32 ``[blocks, WIDTH]``) of ``values``, 0 where they are not ``inside``."""
    code = ((values.to(tl.int32, bitcast=True) >> 31) & 1) << (BITS - 1)
    if BITS > 1:
        step = tl.where(scales == 0, 1.0, scales)
        ratio = tl.div_rn(tl.abs(values), tl.broadcast_to(step[:, None], values.shape))
        code = tl.where(ratio == ratio, code | level_of(ratio, levels_ptr, 0, inside, 1, BITS - 1), 0)  # NaN becomes 0
    return tl.where(inside, code, 0)


@triton.jit
def value_of(codes, levels_ptr, inside, BITS: tl.constexpr):
    """Return the levels (fp32) of ``codes``, in units of their scales."""
    level = tl.load(levels_ptr + (codes & ((1 << (BITS - 1)) - 1)), mask=inside, other=0.0)
    return level * tl.where((codes >> (BITS - 1)) != 0, -1.0, 1.0)  # a zero has its sign, too


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
def read_blocks(words_ptr, halves_ptr, levels_ptr, block, length, held, BITS: tl.constexpr, TILE: tl.constexpr):
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
    return value_of(codes, levels_ptr, inside, BITS), tl.where(valid, scales, float("nan"))


@triton.jit(
    do_not_specialize=["count", "length", "held", "size", "part", "cover", "dropped"],
    do_not_specialize_on_alignment=["values_ptr"],
)
def round_parts_kernel(
    values_ptr, words_ptr, halves_ptr, levels_ptr, count, length, held, size, part, cover, dropped,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write blocks of the message of one part, and subtract them. The message of number ``part`` is all zeros."""
    block, row = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    within = (block + tl.arange(0, TILE))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row * length + within
    inside = (within < length) & (at < tl.where(row == part, 0, count))
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    scales = chosen_scale(values, tl.sum(inside.to(tl.int32), axis=1), cover, dropped, BITS)
    codes = code_of(values, scales, inside, levels_ptr, BITS)
    write_blocks(
        codes, scales, words_ptr + row * size, halves_ptr + row * 2 * size, block, length, held, size, BITS, TILE
    )
    sent = value_of(codes, levels_ptr, inside, BITS) * scales[:, None]
    tl.store(values_ptr + at, values - sent, mask=inside)


@triton.jit(
    do_not_specialize=["count", "length", "held", "size", "part", "parts", "cover", "dropped"],
    do_not_specialize_on_alignment=["values_ptr"],
)
def round_mean_kernel(
    messages_ptr, message_halves_ptr, values_ptr, words_ptr, halves_ptr, levels_ptr,
    count, length, held, size, part, parts, cover, dropped, BITS: tl.constexpr, TILE: tl.constexpr,
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
            messages_ptr + first, message_halves_ptr + 2 * first, levels_ptr, block, length, held, BITS, TILE
        )
        total += tl.where(row == part, own, (levels * scales[:, None]).to(tl.float64))
        row += 1
    total = tl.where(inside, total, 0.0)
    ranks = tl.cast(parts, tl.float32)
    mean = tl.div_rn(total.to(tl.float32), tl.broadcast_to(ranks, total.shape))
    scales = chosen_scale(mean, tl.sum(inside.to(tl.int32), axis=1), cover, dropped, BITS)
    codes = code_of(mean, scales, inside, levels_ptr, BITS)
    write_blocks(codes, scales, words_ptr, halves_ptr, block, length, held, size, BITS, TILE)
    sent = (value_of(codes, levels_ptr, inside, BITS) * scales[:, None]).to(tl.float64)
    tl.store(values_ptr + at, (total - ranks.to(tl.float64) * sent).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["count", "length", "held", "size"], do_not_specialize_on_alignment=["values_ptr"])
def read_parts_kernel(
    words_ptr, halves_ptr, levels_ptr, values_ptr, count, length, held, size, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Read blocks of one part."""
    block, row = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    within = (block + tl.arange(0, TILE))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row * length + within
    levels, scales = read_blocks(
        words_ptr + row * size, halves_ptr + row * 2 * size, levels_ptr, block, length, held, BITS, TILE
    )
    tl.store(values_ptr + at, levels * scales[:, None], mask=(within < length) & (at < count))


@cache
def table(fmt: Format, device: torch.device) -> torch.Tensor:
    """Return the levels of a format and the midpoints between them (fp32 ``[2, 1, levels]``) on ``device``."""
    return levels_and_midpoints([fmt.levels], device)


def round_parts(values: torch.Tensor, messages: torch.Tensor, part: int, length: int, fmt: Format) -> None:
    """Launch the kernel on checked arguments: write all words of ``messages``, and the parts of ``values`` but one."""
    launch(
        round_parts_kernel, (_tiles(length), len(messages)),
        values, messages, messages.view(torch.int16), table(fmt, values.device), values.numel(),
        *_layout(messages, length, fmt), part, dense_bits.lookup(fmt).cover, 24 - scale_bits(1),
        **_shape(values, fmt),
    )  # fmt: skip


def round_mean(
    messages: torch.Tensor, values: torch.Tensor, block: torch.Tensor, part: int, length: int, fmt: Format
) -> None:
    """Launch the kernel on checked arguments: write all words of ``block``, and the owner's part of ``values``."""
    launch(
        round_mean_kernel, (_tiles(length),),
        messages, messages.view(torch.int16), values, block, block.view(torch.int16), table(fmt, values.device),
        values.numel(), *_layout(messages, length, fmt), part, len(messages), dense_bits.lookup(fmt).cover,
        24 - scale_bits(len(messages)), **_shape(values, fmt),
    )  # fmt: skip


def read_parts(messages: torch.Tensor, values: torch.Tensor, length: int, fmt: Format) -> None:
    """Launch the kernel on checked arguments: write all ``values``."""
    launch(
        read_parts_kernel, (_tiles(length), len(messages)),
        messages, messages.view(torch.int16), table(fmt, values.device), values, values.numel(),
        *_layout(messages, length, fmt), **_shape(values, fmt),
    )  # fmt: skip


def _tiles(length: int) -> int:
    """Return the number of programs for a message. Its scales may have an unused half behind them."""
    return -(-length // (2 * dense_bits.BLOCK) * 2 // TILE)


def _layout(messages: torch.Tensor, length: int, fmt: Format) -> tuple[int, int, int]:
    """Return the values per message, the words of its codes, and all of its words."""
    return length, dense_bits.code_words(length, fmt), messages.shape[1]


def _shape(values: torch.Tensor, fmt: Format) -> dict[str, Any]:
    """Return how each kernel is launched."""
    return {"like": values, "warps": WARPS, "BITS": fmt.bits, "TILE": TILE}
