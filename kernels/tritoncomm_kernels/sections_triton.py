"""Parts of the kernels in :mod:`tritoncomm_kernels.section_rows_triton`: what is done to one section.

Writing needs no atomics and no memory set to zero, because every word has one program that writes it. Reading never
trusts the words: loops are bounded by the layout, and stores by its room. What is wrong is counted in a verdict, which
the host reads once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import sections
from tritoncomm_kernels.bits_triton import bits_in, lowest_bit, pack_words
from tritoncomm_kernels.quantize_triton import NAN_HEADER, TABLES, level_of, menu

BLOCK, WARPS = 1024, 8  # entries per program
WORDS = 1024  # words of the high part per program when reading
# Words per program when writing. Each lane reads up to 32 entries, so few words keep many processors busy.
HIGH_WORDS, HIGH_WARPS = 128, 4
BF16_NAN = tl.constexpr(sections.BF16_NAN)
VERDICT = 3  # words before the counts of bad entries: count, header, bits in the high part


@triton.jit
def _place(indices_ptr, at, inside, low, LOW_BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return the bit of the high part that entry ``at`` sets."""
    offset = tl.load(indices_ptr + at, mask=inside, other=0) - low
    return offset if PLAIN else (offset >> LOW_BITS) + at


@triton.jit
def write_high(
    indices_ptr, words_ptr, count, low, words, steps,
    LOW_BITS: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the high part. Each lane finds the first entry of its word by halving, and reads on from there."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = word * 32
    first = tl.zeros([BLOCK], tl.int32)
    stop = first + count
    while steps > 0:
        middle = first + (stop - first) // 2
        open_range = first < stop
        before = _place(indices_ptr, middle, open_range, low, LOW_BITS, PLAIN) < start
        first = tl.where(open_range & before, middle + 1, first)
        stop = tl.where(open_range & (before == 0), middle, stop)
        steps -= 1
    bits = tl.zeros([BLOCK], tl.int32)
    for ahead in tl.static_range(32):
        at = first + ahead
        inside = at < count
        shift = _place(indices_ptr, at, inside, low, LOW_BITS, PLAIN) - start
        bits = bits | tl.where(inside & (shift < 32), 1 << (shift & 31).to(tl.int32), 0)
    tl.store(words_ptr + word, bits, mask=word < words)


@triton.jit
def _half(value, limit):
    """Return the bits of the nearest bf16 number, ties to even. A finite one above ``limit`` is rounded down.

    All NaN become one, because the bits of a NaN depend on the device that computed it.
    """
    bits = value.to(tl.int32, bitcast=True)
    largest = (tl.zeros_like(value) + limit).to(tl.int32, bitcast=True) >> 16
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    nearest = nearest - ((nearest & 0x7FFF) > largest).to(tl.int32)
    key = bits & 0x7FFFFFFF
    return tl.where(key < 0x7F800000, nearest, tl.where(key > 0x7F800000, BF16_NAN, (bits >> 16) & 0xFFFF))


@triton.jit
def _decode(code, header, menu_ptr, limit, inside, BITS: tl.constexpr):
    """Return the values of codes. A table outside the menu is refused by the host, and reads the last one here."""
    table = tl.minimum(header & 0xFFFF, TABLES - 1)
    scale = (header & -65536).to(tl.float32, bitcast=True)
    level = code & ((1 << (BITS - 1)) - 1)
    value = tl.load(menu_ptr + (table << (BITS - 1)) + level, mask=inside, other=0.0) * scale
    value = tl.where(value < limit, value, limit)
    value = tl.where((code >> (BITS - 1)) != 0, 0.0 - value, value)
    return tl.where(header == NAN_HEADER, float("nan"), value)


@triton.jit
def write_planes(
    indices_ptr, values_ptr, words_ptr, menu_ptr, out_values_ptr, count, low, room, first, divisor, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the count, the planes and the values. Also write what the receiver decodes, unless that is the value."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    offset = tl.where(held, tl.load(indices_ptr + at, mask=held, other=0) - low, 0)
    if BITS > 0:
        value = tl.load(values_ptr + at, mask=held, other=0.0)
    if program == 0:
        tl.store(words_ptr, count)
    groups = tl.cdiv(room, 32)
    group = program * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    row_ptr = words_ptr + first + group * PLANES
    for bit in tl.static_range(LOW_BITS):
        tl.store(row_ptr + bit, pack_words((offset >> bit) & 1, BLOCK), mask=group < groups)
    behind_ptr = words_ptr + first + groups.to(tl.int64) * PLANES
    if BITS == 0:  # indices alone
        pass
    elif BITS < 16:
        header = tl.load(words_ptr + 1)
        scale = (header & -65536).to(tl.float32, bitcast=True)
        ratio = tl.div_rn(tl.div_rn(tl.abs(value), divisor), scale)
        level = level_of(ratio, menu_ptr, header & 0xFFFF, held, BITS - 1)
        code = level | (((value.to(tl.int32, bitcast=True) >> 31) & 1) << (BITS - 1))
        code = tl.where(held & (header != NAN_HEADER), code, 0)
        for bit in tl.static_range(BITS):
            tl.store(row_ptr + LOW_BITS + bit, pack_words((code >> bit) & 1, BLOCK), mask=group < groups)
        tl.store(out_values_ptr + at, _decode(code, header, menu_ptr, limit, held, BITS) * divisor, mask=held)
    elif BITS == 16:
        half = tl.where(held, _half(tl.div_rn(value, divisor), limit), 0)
        pair = program * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        pairs = tl.sum(tl.reshape(half, (BLOCK // 2, 2)) << (16 * tl.arange(0, 2))[None, :], axis=1)
        tl.store(behind_ptr + pair, pairs, mask=pair < tl.cdiv(room, 2))
        tl.store(out_values_ptr + at, (half << 16).to(tl.float32, bitcast=True) * divisor, mask=held)
    else:
        bits = tl.where(held, value.to(tl.int32, bitcast=True), 0)
        tl.store(behind_ptr + at, bits, mask=at < room)


@triton.jit
def write_positions(words_ptr, slots_ptr, verdict_ptr, before, words, room, WORDS: tl.constexpr):
    """Write the ascending positions of the first ``room`` set bits, and their number to the verdict.

    ``before`` is the number of bits in earlier blocks.
    """
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = tl.load(words_ptr + at, mask=at < words, other=0)
    counts = bits_in(mask)
    rank = before + tl.cumsum(counts, axis=0) - counts
    if program == tl.num_programs(0) - 1:
        tl.store(verdict_ptr + 2, before + tl.sum(counts, axis=0))
    left = tl.max(counts, axis=0)
    while left > 0:  # at most 32, whatever the words are
        tl.store(slots_ptr + rank, at * 32 + lowest_bit(mask), mask=(mask != 0) & (rank < room))
        rank += 1
        mask = mask & (mask - 1)
        left -= 1


@triton.jit
def _bits(row_ptr, lane, inside, BITS: tl.constexpr):
    """Return the numbers of ``BITS`` bits whose bit j is at ``lane`` in word j from ``row_ptr`` on."""
    found = tl.zeros_like(lane)
    for bit in tl.static_range(BITS):
        found = found | (((tl.load(row_ptr + bit, mask=inside, other=0) >> lane) & 1) << bit)
    return found


@triton.jit
def _offset(slots_ptr, planes_ptr, at, inside, LOW_BITS: tl.constexpr, PLANES: tl.constexpr, PLAIN: tl.constexpr):
    """Return the high bits and the offset of entry ``at``."""
    place = tl.load(slots_ptr + at, mask=inside, other=0)
    high = place if PLAIN else place - at.to(tl.int32)
    lane = (at & 31).to(tl.int32)
    low = _bits(planes_ptr + (at >> 5) * PLANES, lane, inside, LOW_BITS)
    return high, (high << LOW_BITS) | low


@triton.jit
def join_entries(
    slots_ptr, words_ptr, menu_ptr, out_indices_ptr, out_values_ptr, verdict_ptr, low, room, span, first, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write indices and values of a block, and count its entries that do not ascend inside the range."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(words_ptr)
    header = tl.load(words_ptr + 1)
    if program == 0:
        tl.store(verdict_ptr, count)
        tl.store(verdict_ptr + 1, header)
    # A section with fewer set bits than entries is refused later. Behind them, nobody has written a position.
    held = at < tl.minimum(tl.minimum(count, room), tl.load(verdict_ptr + 2))
    planes_ptr = words_ptr + first
    high, offset = _offset(slots_ptr, planes_ptr, at, held, LOW_BITS, PLANES, PLAIN)
    _, before = _offset(slots_ptr, planes_ptr, at - 1, held & (at > 0), LOW_BITS, PLANES, PLAIN)
    # The comparison of the high bits comes first, because larger ones overflow when they are shifted.
    inside = (high >= 0) & (high <= ((span - 1) >> LOW_BITS)) & (offset < span) & ((at == 0) | (before < offset))
    bad = tl.sum((held & (inside == 0)).to(tl.int32), axis=0)
    tl.store(verdict_ptr + 3 + program, bad)
    tl.store(out_indices_ptr + at, low + offset, mask=held)
    behind_ptr = planes_ptr + tl.cdiv(room, 32).to(tl.int64) * PLANES
    if BITS == 0:
        value = tl.zeros([BLOCK], tl.float32)
    elif BITS < 16:
        code = _bits(planes_ptr + (at >> 5) * PLANES + LOW_BITS, (at & 31).to(tl.int32), held, BITS)
        value = _decode(code, header, menu_ptr, limit, held, BITS)
    elif BITS == 16:
        pair = tl.load(behind_ptr + (at >> 1), mask=held, other=0)
        half = (pair >> (16 * (at & 1)).to(tl.int32)) & 0xFFFF
        value = (half << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(behind_ptr + at, mask=held, other=0).to(tl.float32, bitcast=True)
    tl.store(out_values_ptr + at, value, mask=held)


def shape(layout: Any) -> dict[str, Any]:
    """Return the constants of a layout."""
    return {"LOW_BITS": layout.low_bits, "BITS": layout.bits, "PLANES": layout.planes, "BLOCK": BLOCK}


def menu_of(layout: Any, device: torch.device) -> torch.Tensor | None:
    """Return the tables of a layout with quantized values on ``device``, or None."""
    return menu(layout.bits, device) if layout.quantized else None
