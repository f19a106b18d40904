# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.sections`: sections of many rows at once, with one layout.

The second dimension of a grid is the row. Writing needs no atomics and no memory set to zero for the words, because
every word has one program that writes it. Reading never trusts the words: loops are bounded by the layout, and stores
by its room. What is wrong is counted in a verdict.

The squared errors of the tables are summed in fp64 in one program. The order of the sum differs from the reference, and
could only matter for tables whose errors agree to 15 digits. Everything else is one rounding, or integer.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import memory, quantize
from tritoncomm_kernels.bits_triton import key_of, pack_words
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.entries_triton import MOVE, count_used_kernel, moved
from tritoncomm_kernels.formats import Format
from tritoncomm_kernels.lists import Entries
from tritoncomm_kernels.select_triton import GROUP, GROUP_WARPS, count_bits_kernel, expand_kernel, sum_before

BLOCK, WARPS = MOVE, 8  # entries per program, as where they are moved
# Words per program when writing. Each lane reads up to 32 entries, so few words keep many processors busy.
HIGH_WORDS, HIGH_WARPS = 128, 4
CHOOSE_WARPS = 16  # with 4, Triton 3.6 spills a register at 8 bits, and with 8, Triton 3.9 spills two on sm_80
NAN_HEADER = tl.constexpr(quantize.NAN_HEADER)
INFINITY_KEY = tl.constexpr(0x7F800000)
REACH = tl.constexpr(quantize.REACH)
LEAST_SCALE = tl.constexpr(quantize.LEAST_SCALE)
SAMPLE = tl.constexpr(quantize.SAMPLE)
EXTENT = tl.constexpr(2)  # numbers of a row: the largest key subtracted from 2**31 - 1 or not, both raised from 0
VERDICT = tl.constexpr(2)  # numbers of a row: set bits of the high part, entries that do not ascend inside the range


@triton.jit
def _extent(extents_ptr, divisor):
    """Return the smallest and the largest magnitude of a row divided by ``divisor``, and the largest key."""
    own_ptr = extents_ptr + EXTENT * tl.program_id(1).to(tl.int64)
    smallest = (0x7FFFFFFF - tl.load(own_ptr)).to(tl.int32).to(tl.float32, bitcast=True)
    key = tl.load(own_ptr + 1).to(tl.int32)
    return tl.div_rn(smallest, divisor), tl.div_rn(key.to(tl.float32, bitcast=True), divisor), key


@triton.jit
def _raise_extent(extents_ptr, keys, held):
    """Let the extent of this program's row include the ``keys`` that are ``held``. The order does not matter."""
    own_ptr = extents_ptr + EXTENT * tl.program_id(1).to(tl.int64)
    smallest = tl.max(tl.where(held, 0x7FFFFFFF - keys, 0), axis=0).to(tl.int64)
    tl.atomic_max(own_ptr, smallest, sem="relaxed")
    tl.atomic_max(own_ptr + 1, tl.max(tl.where(held, keys, 0), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _scale(smallest, largest, cover, KEPT: tl.constexpr):
    """Return the scale: about the smallest magnitude, rounded towards zero to the bits of the mask ``KEPT``."""
    covered = tl.maximum(tl.maximum(smallest, tl.div_rn(largest, cover)), LEAST_SCALE)
    return (covered.to(tl.int32, bitcast=True) & KEPT).to(tl.float32, bitcast=True)


@triton.jit
def level_of(ratio, menu_ptr, table, inside, TABLES: tl.constexpr, HALVINGS: tl.constexpr):
    """Return the level of each ratio: the number of midpoints below the centre of its bf16 cell."""
    centre = ((ratio.to(tl.int32, bitcast=True) & -65536) | 0x8000).to(tl.float32, bitcast=True)
    midpoints_ptr = menu_ptr + ((TABLES + table) << HALVINGS)
    level = tl.zeros_like(centre).to(tl.int32)
    for step in tl.static_range(HALVINGS):
        probe = level + (1 << (HALVINGS - 1 - step))
        midpoint = tl.load(midpoints_ptr + probe - 1, mask=inside, other=0.0)
        level = tl.where(midpoint < centre, probe, level)
    return level


@triton.jit
def _entries(indices_ptr, values_ptr, stride, BLOCK: tl.constexpr):
    """Return positions, indices and values of a block of entries, and which of them are no padding."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1).to(tl.int64) * stride + at
    index = tl.load(indices_ptr + place, mask=at < stride, other=-1)
    return at, index, tl.load(values_ptr + place, mask=index >= 0, other=0.0), index >= 0


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def row_extents_kernel(indices_ptr, values_ptr, extents_ptr, stride, BLOCK: tl.constexpr):
    """Find the smallest and the largest magnitude of each row, as integer keys."""
    _, _, value, used = _entries(indices_ptr, values_ptr, stride, BLOCK)
    _raise_extent(extents_ptr, key_of(value), used)


@triton.jit(
    do_not_specialize=["stride", "divisor", "cover", "half"],
    do_not_specialize_on_alignment=["indices_ptr", "values_ptr"],
)
def drop_rows_kernel(
    indices_ptr, values_ptr, extents_ptr, kept_ptr, counts_ptr, out_indices_ptr, out_values_ptr,
    stride, divisor, cover, half, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace entries that cannot be sent beside the largest one of their row by padding, and count the others.

    The least magnitude that can be sent is the scale times ``half``.
    """
    at, index, value, used = _entries(indices_ptr, values_ptr, stride, BLOCK)
    smallest, largest, key = _extent(extents_ptr, divisor)
    least = (_scale(smallest, largest, cover, KEPT) * half).to(tl.int32, bitcast=True)
    least = tl.where((key < INFINITY_KEY) & (smallest.to(tl.int32, bitcast=True) < least), least, 0)
    keep = used & (key_of(tl.div_rn(value, divisor)) >= least)
    _raise_extent(kept_ptr, key_of(value), keep)
    row = tl.program_id(1).to(tl.int64)
    tl.store(counts_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(keep.to(tl.int32), axis=0))
    tl.store(out_indices_ptr + row * stride + at, tl.where(keep, index, -1), mask=at < stride)
    tl.store(out_values_ptr + row * stride + at, tl.where(keep, value, 0.0), mask=at < stride)


@triton.jit(do_not_specialize=["stride", "blocks", "words", "divisor", "cover"])
def choose_rows_kernel(
    values_ptr, extents_ptr, menu_ptr, counts_ptr, words_ptr, stride, blocks, words, divisor, cover,
    KEPT: tl.constexpr, TABLES: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the header of each row: the scale, and the table with the least squared error over a sample of the values.

    The header of a row without entries is 0.
    """
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks)
    values_ptr += row * stride
    smallest, most, largest = _extent(extents_ptr, divisor)
    scale = _scale(smallest, most, cover, KEPT)
    stride_of_sample = tl.maximum(tl.cdiv(count, SAMPLE), 1)
    samples = tl.cdiv(count, stride_of_sample)
    table = 0
    least = tl.full([], float("inf"), tl.float64)
    candidate = 0
    while candidate < TABLES:
        errors = tl.zeros([BLOCK], tl.float64)
        start = 0
        while start < samples:
            at = start + tl.arange(0, BLOCK)
            held = at < samples
            value = tl.load(values_ptr + at.to(tl.int64) * stride_of_sample, mask=held, other=0.0)
            ratio = tl.div_rn(tl.div_rn(tl.abs(value), divisor), scale)
            level = level_of(ratio, menu_ptr, candidate, held, TABLES, HALVINGS)
            miss = ratio - tl.load(menu_ptr + (candidate << HALVINGS) + level, mask=held, other=0.0)
            errors += tl.where(held, miss * miss, 0.0).to(tl.float64)
            start += BLOCK
        total = tl.sum(errors, axis=0)
        top = tl.load(menu_ptr + ((candidate + 1) << HALVINGS) - 1)
        better = (total < least) & (tl.div_rn(most, scale) <= REACH * top)
        table = tl.where(better, candidate, table)
        least = tl.where(better, total, least)
        candidate += 1
    header = scale.to(tl.int32, bitcast=True) | table
    header = tl.where(largest >= INFINITY_KEY, NAN_HEADER, header)
    tl.store(words_ptr + row * words + 1, tl.where(count > 0, header, 0))


@triton.jit
def _place(indices_ptr, at, inside, low, LOW_BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return the bit of the high part that entry ``at`` sets."""
    offset = tl.load(indices_ptr + at, mask=inside, other=0) - low
    return offset if PLAIN else (offset >> LOW_BITS) + at


@triton.jit(
    do_not_specialize=["stride", "blocks", "words", "heads", "high_words", "steps"],
    do_not_specialize_on_alignment=["indices_ptr"],
)
def high_rows_kernel(
    indices_ptr, counts_ptr, lows_ptr, words_ptr, stride, blocks, words, heads, high_words, steps,
    LOW_BITS: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the high part of each row. Each lane finds the first entry of its word by halving, and reads on."""
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks)
    low = tl.load(lows_ptr + row)
    indices_ptr += row * stride
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
    tl.store(words_ptr + row * words + heads + word, bits, mask=word < high_words)


@triton.jit
def _decode(code, header, menu_ptr, limit, inside, TABLES: tl.constexpr, BITS: tl.constexpr):
    """Return the values of codes. A table beyond those of the format is refused later, and reads the last one here."""
    table = tl.minimum(header & 0xFFFF, TABLES - 1)
    scale = (header & -65536).to(tl.float32, bitcast=True)
    level = code & ((1 << (BITS - 1)) - 1)
    value = tl.load(menu_ptr + (table << (BITS - 1)) + level, mask=inside, other=0.0) * scale
    value = tl.where(value < limit, value, limit)
    value = tl.where((code >> (BITS - 1)) != 0, 0.0 - value, value)
    return tl.where(header == NAN_HEADER, float("nan"), value)


@triton.jit(
    do_not_specialize=["stride", "blocks", "words", "room", "first", "divisor", "limit"],
    do_not_specialize_on_alignment=["indices_ptr", "values_ptr"],
)
def planes_rows_kernel(
    indices_ptr, values_ptr, counts_ptr, lows_ptr, words_ptr, menu_ptr,
    stride, blocks, words, room, first, divisor, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write count, planes and values of each row. Rounded values are replaced by what the receiver decodes."""
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks)
    low = tl.load(lows_ptr + row)
    indices_ptr += row * stride
    values_ptr += row * stride
    words_ptr += row * words
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
    elif BITS < 32:
        header = tl.load(words_ptr + 1)
        scale = (header & -65536).to(tl.float32, bitcast=True)
        ratio = tl.div_rn(tl.div_rn(tl.abs(value), divisor), scale)
        level = level_of(ratio, menu_ptr, header & 0xFFFF, held, TABLES, BITS - 1)
        code = level | (((value.to(tl.int32, bitcast=True) >> 31) & 1) << (BITS - 1))
        code = tl.where(held & (header != NAN_HEADER), code, 0)
        for bit in tl.static_range(BITS):
            tl.store(row_ptr + LOW_BITS + bit, pack_words((code >> bit) & 1, BLOCK), mask=group < groups)
        tl.debug_barrier()  # the stores may use other threads than the loads
        tl.store(values_ptr + at, _decode(code, header, menu_ptr, limit, held, TABLES, BITS) * divisor, mask=held)
    else:
        bits = tl.where(held, value.to(tl.int32, bitcast=True), 0)
        tl.store(behind_ptr + at, bits, mask=at < room)


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


@triton.jit(do_not_specialize=["words", "room", "span", "first", "limit"])
def join_sections_kernel(
    slots_ptr, lows_ptr, words_ptr, menu_ptr, out_indices_ptr, out_values_ptr, verdict_ptr,
    words, room, span, first, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, TABLES: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of each row, and padding behind them. Count entries that do not ascend inside the range."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(lows_ptr + row)
    words_ptr += row * words
    slots_ptr += row * room
    out_indices_ptr += row * room
    out_values_ptr += row * room
    verdict_ptr += VERDICT * row
    padding = (at >= tl.load(words_ptr)) & (at < room)
    tl.store(out_indices_ptr + at, -1, mask=padding)
    tl.store(out_values_ptr + at, 0.0, mask=padding)
    count = tl.load(words_ptr)
    header = tl.load(words_ptr + 1)
    # A section with fewer set bits than entries is refused later. Behind them, nobody has written a position.
    held = at < tl.minimum(tl.minimum(count, room), tl.load(verdict_ptr))
    planes_ptr = words_ptr + first
    high, offset = _offset(slots_ptr, planes_ptr, at, held, LOW_BITS, PLANES, PLAIN)
    _, before = _offset(slots_ptr, planes_ptr, at - 1, held & (at > 0), LOW_BITS, PLANES, PLAIN)
    # The comparison of the high bits comes first, because larger ones overflow when they are shifted.
    inside = (high >= 0) & (high <= ((span - 1) >> LOW_BITS)) & (offset < span) & ((at == 0) | (before < offset))
    bad = tl.sum((held & (inside == 0)).to(tl.int32), axis=0)
    tl.atomic_add(verdict_ptr + 1, bad, sem="relaxed")
    tl.store(out_indices_ptr + at, low + offset, mask=held)
    behind_ptr = planes_ptr + tl.cdiv(room, 32).to(tl.int64) * PLANES
    if BITS == 0:
        value = tl.zeros([BLOCK], tl.float32)
    elif BITS < 32:
        code = _bits(planes_ptr + (at >> 5) * PLANES + LOW_BITS, (at & 31).to(tl.int32), held, BITS)
        value = _decode(code, header, menu_ptr, limit, held, TABLES, BITS)
    else:
        value = tl.load(behind_ptr + at, mask=held, other=0).to(tl.float32, bitcast=True)
    tl.store(out_values_ptr + at, value, mask=held)


@triton.jit(do_not_specialize=["words", "room"])
def refuse_rows_kernel(
    words_ptr, verdict_ptr, out_indices_ptr, out_values_ptr, malformed_ptr, words, room, TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the malformed rows, and replace their entries by padding."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(words_ptr + row * words)
    wrong = (count < 0) | (count > room) | (tl.load(verdict_ptr + VERDICT * row) != count)
    wrong = wrong | (tl.load(verdict_ptr + VERDICT * row + 1) != 0)
    if TABLES > 0:
        header = tl.load(words_ptr + row * words + 1)
        scale = header & -65536
        known = (header == NAN_HEADER) | (((header & 0xFFFF) < TABLES) & (scale > 0) & (scale < 0x7F800000))
        wrong = wrong | ((count > 0) & (known == 0))
    if wrong:
        at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_indices_ptr + row * room + at, -1, mask=at < room)
        tl.store(out_values_ptr + row * room + at, 0.0, mask=at < room)
        if program == 0:
            tl.atomic_add(malformed_ptr, 1, sem="relaxed")


@cache
def menu(fmt: Format, device: torch.device) -> torch.Tensor | None:
    """Return levels and midpoints of the tables (fp32 ``[2, tables, levels]``) on ``device``. The last is infinity.

    Values that are no codes have no tables.
    """
    return levels_and_midpoints(quantize.menu(fmt), device) if fmt.tables else None


def levels_and_midpoints(tables: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """Return what :func:`level_of` reads (fp32 ``[2, tables, levels]``) of ``tables`` of levels."""
    levels = torch.tensor(tables, dtype=torch.float64, device="cpu")
    midpoints = torch.full_like(levels, torch.inf)
    midpoints[:, :-1] = (levels[:, 1:] + levels[:, :-1]) / 2
    return torch.stack([levels, midpoints]).float().to(device)


def write_rows(layout: Any, lows: torch.Tensor, entries: Entries, messages: torch.Tensor) -> Entries:
    """Launch the kernels on checked arguments with at least one row and slot. ``messages`` are overwritten."""
    sent = Entries(entries.indices.contiguous(), entries.values.contiguous())
    rows, stride = sent.indices.shape
    grid = blocks, _ = triton.cdiv(stride, BLOCK), rows
    counts = memory.scratch(rows * blocks, torch.int32, messages)
    tables, divisor = menu(layout.fmt, messages.device), float(layout.divisor)
    size: dict[str, Any] = {"like": messages, "warps": WARPS, "BLOCK": BLOCK}
    if not layout.quantized:
        launch(count_used_kernel, grid, sent.indices, counts, stride, **size)
    else:
        extents = memory.scratch(2 * rows * EXTENT.value, torch.int64, messages).zero_()
        found, kept = extents.view(2, -1)
        held = Entries(
            *(memory.scratch(rows * stride, kind, messages).view(rows, stride) for kind in (torch.int32, torch.float32))
        )
        scale_mask = -1 << (24 - quantize.scale_bits(layout.divisor))  # of the bits of a scale that are kept, signed
        known = quantize.lookup(layout.fmt)
        launch(row_extents_kernel, grid, *sent, found, stride, **size)
        launch(
            drop_rows_kernel, grid, *sent, found, kept, counts, *held, stride, divisor, known.cover,
            known.half_least, KEPT=scale_mask, **size,
        )  # fmt: skip
        sent = moved(held, counts)
        launch(
            choose_rows_kernel, (1, rows), sent.values, kept, tables, counts, messages, stride, blocks,
            layout.words, divisor, known.cover, like=messages, warps=CHOOSE_WARPS,
            KEPT=scale_mask, TABLES=len(layout.fmt.tables), HALVINGS=layout.fmt.bits - 1, BLOCK=BLOCK,
        )  # fmt: skip
    lengths, first = (stride, blocks, layout.words), layout.heads + layout.high_words
    launch(
        high_rows_kernel, (triton.cdiv(layout.high_words, HIGH_WORDS), rows), sent.indices, counts, lows, messages,
        *lengths, layout.heads, layout.high_words, layout.room.bit_length(), like=messages, warps=HIGH_WARPS,
        LOW_BITS=layout.low_bits, PLAIN=layout.plain, BLOCK=HIGH_WORDS,
    )  # fmt: skip
    launch(
        planes_rows_kernel, (triton.cdiv(layout.room, BLOCK), rows), *sent, counts, lows, messages, tables,
        *lengths, layout.room, first, divisor, quantize.limit(layout.divisor),
        **_shape(layout), **size,
    )  # fmt: skip
    return sent


def read_rows(layout: Any, lows: torch.Tensor, messages: torch.Tensor) -> tuple[Entries, torch.Tensor]:
    """Launch the kernels on checked arguments with at least one row and slot."""
    messages, rows, room = messages.contiguous(), len(lows), layout.room
    words, heads, high_words = layout.words, layout.heads, layout.high_words
    tiles, blocks = triton.cdiv(high_words, GROUP), triton.cdiv(room, BLOCK)
    counts, slots = (memory.scratch(rows * size, torch.int32, messages) for size in (tiles, room))
    checks = messages.new_zeros(rows * VERDICT.value + 1)
    verdict, malformed = checks[:-1], checks[-1:]
    found = Entries.empty((rows, room), messages)
    groups: dict[str, Any] = {"like": messages, "warps": GROUP_WARPS, "WORDS": GROUP}
    size: dict[str, Any] = {"like": messages, "warps": WARPS, "BLOCK": BLOCK}
    launch(count_bits_kernel, (tiles, rows), messages, counts, high_words, words, heads, **groups)
    launch(
        expand_kernel, (tiles, rows), None, None, messages, counts, slots, None, None, verdict, high_words, room,
        32 * high_words, words, heads, VERDICT.value, TILES=1, SUMMED=False, ROWS=True, **groups,
    )  # fmt: skip
    launch(
        join_sections_kernel, (blocks, rows), slots, lows, messages, menu(layout.fmt, messages.device), *found,
        verdict, words, room, layout.span, heads + high_words, quantize.limit(layout.divisor),
        **_shape(layout), PLAIN=layout.plain, **size,
    )  # fmt: skip
    launch(
        refuse_rows_kernel, (blocks, rows), messages, verdict, *found, malformed, words, room,
        TABLES=len(layout.fmt.tables), **size,
    )  # fmt: skip
    return found, malformed


def _shape(layout: Any) -> dict[str, Any]:
    """Return the constants of a layout."""
    fmt = layout.fmt
    return {"LOW_BITS": layout.low_bits, "BITS": fmt.bits, "PLANES": layout.planes, "TABLES": len(fmt.tables)}
