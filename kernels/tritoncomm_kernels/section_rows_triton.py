"""Kernels of :mod:`tritoncomm_kernels.section_rows`: sections of all rows at once, with one layout.

The second dimension of a grid is the row. What is done to a row is that of :mod:`tritoncomm_kernels.sections_triton`
and :mod:`tritoncomm_kernels.quantize_triton`, with the number of its entries in device memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import quantize
from tritoncomm_kernels.bits_triton import bits_in, key_of
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.expand_triton import CHUNK, sum_before
from tritoncomm_kernels.padded import Padded
from tritoncomm_kernels.padded_triton import count_used_kernel
from tritoncomm_kernels.quantize_triton import (
    CHOOSE_WARPS,
    NAN_HEADER,
    TABLES,
    header_of,
    kept_bits,
    least_key,
    rule,
)
from tritoncomm_kernels.sections import delivered_limit, least_sendable
from tritoncomm_kernels.sections_triton import (
    BLOCK,
    HIGH_WARPS,
    HIGH_WORDS,
    VERDICT,
    WARPS,
    WORDS,
    join_entries,
    menu_of,
    shape,
    write_high,
    write_planes,
    write_positions,
)
from tritoncomm_kernels.workspace import Workspace

SAMPLE = tl.constexpr(quantize.SAMPLE)
_OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}


@triton.jit
def _store_extent(extents_ptr, keys, held):
    """Write the smallest and the largest key of this program's block."""
    own_ptr = extents_ptr + 2 * (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0))
    tl.store(own_ptr, tl.min(tl.where(held, keys, 0x7FFFFFFF), axis=0))
    tl.store(own_ptr + 1, tl.max(tl.where(held, keys, 0), axis=0))


@triton.jit
def _entries(indices_ptr, values_ptr, stride, BLOCK: tl.constexpr):
    """Return positions, indices and values of a block of entries, and which of them are no padding."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1).to(tl.int64) * stride + at
    index = tl.load(indices_ptr + place, mask=at < stride, other=-1)
    return at, index, tl.load(values_ptr + place, mask=index >= 0, other=0.0), index >= 0


@triton.jit
def _sendable(value, used, extents_ptr, divisor, cover, half, fixed, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Return which entries of a block can be sent beside the largest one of the row."""
    blocks = tl.num_programs(0)
    row_ptr = extents_ptr + tl.program_id(1).to(tl.int64) * 2 * blocks
    least, partial = least_key(row_ptr, blocks, divisor, cover, half, fixed, KEPT, BLOCK)
    return used & (key_of(tl.div_rn(value, divisor)) >= tl.where(partial != 0, least, 0))


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def row_extents_kernel(indices_ptr, values_ptr, extents_ptr, stride, BLOCK: tl.constexpr):
    """Write the smallest and the largest magnitude of each block of a row, as integer keys."""
    _, _, value, used = _entries(indices_ptr, values_ptr, stride, BLOCK)
    _store_extent(extents_ptr, key_of(value), used)


@triton.jit(
    do_not_specialize=["stride", "divisor", "cover", "half", "fixed"],
    do_not_specialize_on_alignment=["indices_ptr", "values_ptr"],
)
def count_rows_kernel(
    indices_ptr, values_ptr, extents_ptr, counts_ptr, kept_ptr, stride, divisor, cover, half, fixed,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the entries of each block of a row that are sent, and write their extent."""
    _, _, value, used = _entries(indices_ptr, values_ptr, stride, BLOCK)
    keep = _sendable(value, used, extents_ptr, divisor, cover, half, fixed, KEPT, BLOCK)
    _store_extent(kept_ptr, key_of(value), keep)
    own = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts_ptr + own, tl.sum(keep.to(tl.int32), axis=0))


@triton.jit(
    do_not_specialize=["stride", "divisor", "cover", "half", "fixed"],
    do_not_specialize_on_alignment=["indices_ptr", "values_ptr"],
)
def keep_rows_kernel(
    indices_ptr, values_ptr, extents_ptr, counts_ptr, sent_indices_ptr, kept_values_ptr, out_values_ptr,
    stride, divisor, cover, half, fixed,
    KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries that are sent to the front of their row, and padding behind them."""
    program, blocks, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    at, index, value, used = _entries(indices_ptr, values_ptr, stride, BLOCK)
    keep = _sendable(value, used, extents_ptr, divisor, cover, half, fixed, KEPT, BLOCK)
    kept = keep.to(tl.int32)
    rank = sum_before(counts_ptr + row * blocks, program, CHUNK) + tl.cumsum(kept, axis=0) - kept
    count = sum_before(counts_ptr + row * blocks, blocks, CHUNK)
    place = row * stride + tl.where(keep, rank, count + at - rank)
    inside = at < stride
    tl.store(sent_indices_ptr + place, tl.where(keep, index, -1), mask=inside)
    tl.store(kept_values_ptr + place, value, mask=keep)
    tl.store(out_values_ptr + place, 0.0, mask=inside & (keep == 0))


@triton.jit(do_not_specialize=["stride", "blocks", "words", "divisor", "cover"])
def choose_rows_kernel(
    values_ptr, extents_ptr, menu_ptr, counts_ptr, words_ptr, stride, blocks, words, divisor, cover,
    KEPT: tl.constexpr, HALVINGS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the header of each row. The header of a row without entries is 0."""
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks, CHUNK)
    header = header_of(
        values_ptr + row * stride, extents_ptr + row * 2 * blocks, menu_ptr,
        count, blocks, tl.maximum(tl.cdiv(count, SAMPLE), 1), divisor, cover, KEPT, HALVINGS, BLOCK,
    )  # fmt: skip
    tl.store(words_ptr + row * words + 1, tl.where(count > 0, header, 0))


@triton.jit(
    do_not_specialize=["stride", "blocks", "words", "heads", "high_words", "steps"],
    do_not_specialize_on_alignment=["indices_ptr"],
)
def high_rows_kernel(
    indices_ptr, counts_ptr, lows_ptr, words_ptr, stride, blocks, words, heads, high_words, steps,
    LOW_BITS: tl.constexpr, PLAIN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the high part of each row."""
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks, CHUNK)
    write_high(
        indices_ptr + row * stride, words_ptr + row * words + heads, count, tl.load(lows_ptr + row), high_words, steps,
        LOW_BITS, PLAIN, BLOCK,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["stride", "blocks", "words", "room", "first", "divisor", "limit"],
    do_not_specialize_on_alignment=["indices_ptr", "values_ptr"],
)
def planes_rows_kernel(
    indices_ptr, values_ptr, counts_ptr, lows_ptr, words_ptr, menu_ptr, out_values_ptr,
    stride, blocks, words, room, first, divisor, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write count, planes and values of each row."""
    row = tl.program_id(1).to(tl.int64)
    count = sum_before(counts_ptr + row * blocks, blocks, CHUNK)
    write_planes(
        indices_ptr + row * stride, values_ptr + row * stride, words_ptr + row * words, menu_ptr,
        out_values_ptr + row * stride, count, tl.load(lows_ptr + row), room, first, divisor, limit,
        LOW_BITS, BITS, PLANES, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words", "heads", "high_words"])
def count_high_kernel(words_ptr, counts_ptr, malformed_ptr, words, heads, high_words, WORDS: tl.constexpr):
    """Count the set bits of each tile of the high part of a row. Also set the number of malformed rows to 0."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * WORDS + tl.arange(0, WORDS)
    mask = tl.load(words_ptr + row * words + heads + at, mask=at < high_words, other=0)
    tl.store(counts_ptr + row * tl.num_programs(0) + tile, tl.sum(bits_in(mask), axis=0))
    if (tile == 0) & (row == 0):
        tl.store(malformed_ptr, 0)


@triton.jit(do_not_specialize=["words", "heads", "high_words", "room", "verdicts"])
def position_rows_kernel(
    words_ptr, counts_ptr, slots_ptr, verdict_ptr, words, heads, high_words, room, verdicts,
    WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the positions of the set bits of each row."""
    row = tl.program_id(1).to(tl.int64)
    before = sum_before(counts_ptr + row * tl.num_programs(0), tl.program_id(0), CHUNK)
    write_positions(
        words_ptr + row * words + heads, slots_ptr + row * room, verdict_ptr + row * verdicts,
        before, high_words, room, WORDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words", "verdicts", "room", "span", "first", "limit"])
def join_sections_kernel(
    slots_ptr, lows_ptr, words_ptr, menu_ptr, out_indices_ptr, out_values_ptr, verdict_ptr,
    words, verdicts, room, span, first, limit,
    LOW_BITS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of each row, and padding behind them."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    padding = (at >= tl.load(words_ptr + row * words)) & (at < room)
    tl.store(out_indices_ptr + row * room + at, -1, mask=padding)
    tl.store(out_values_ptr + row * room + at, 0.0, mask=padding)
    join_entries(
        slots_ptr + row * room, words_ptr + row * words, menu_ptr, out_indices_ptr + row * room,
        out_values_ptr + row * room, verdict_ptr + row * verdicts, tl.load(lows_ptr + row), room, span, first, limit,
        LOW_BITS, BITS, PLANES, PLAIN, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["verdicts", "room", "quantized"])
def refuse_rows_kernel(
    verdict_ptr, out_indices_ptr, out_values_ptr, malformed_ptr, verdicts, room, quantized,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the malformed rows, and replace their entries by padding."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_ptr = verdict_ptr + row * verdicts
    count = tl.load(row_ptr)
    wrong = (count < 0) | (count > room) | (tl.load(row_ptr + 2) != count)
    wrong = wrong | (sum_before(row_ptr + 3, verdicts - 3, CHUNK) != 0)
    header = tl.load(row_ptr + 1)
    scale = header & -65536
    known = (header == NAN_HEADER) | (((header & 0xFFFF) < TABLES) & (scale > 0) & (scale < 0x7F800000))
    wrong = wrong | ((quantized != 0) & (count > 0) & (known == 0))
    if wrong:
        at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_indices_ptr + row * room + at, -1, mask=at < room)
        tl.store(out_values_ptr + row * room + at, 0.0, mask=at < room)
        if program == 0:
            tl.atomic_add(malformed_ptr, 1, sem="relaxed")


def write_rows(
    layout: Any, lows: torch.Tensor, entries: Padded, messages: torch.Tensor, divisor: int, workspace: Workspace
) -> Padded:
    """Launch the kernels on checked arguments with at least one row and slot. ``messages`` are overwritten."""
    indices, values = entries.indices.contiguous(), entries.values.contiguous()
    rows, stride = indices.shape
    grid = blocks, _ = triton.cdiv(stride, BLOCK), rows
    counts, kept, found = (
        workspace.buffer(f"rows {name}", size * rows * blocks, torch.int32, values.device)
        for name, size in (("counts", 1), ("kept", 2), ("extents", 2))
    )
    sent = Padded(indices, values)
    with on_device_of(values):
        if layout.bits in (0, 32):
            count_used_kernel[grid](indices, counts, stride, BLOCK=BLOCK, **_OPTIONS)
        else:
            numbers = stride, float(divisor), *rule(layout.bits, least_sendable(layout.bits))
            common = {"KEPT": kept_bits(divisor), "BLOCK": BLOCK} | _OPTIONS
            sent = Padded(torch.empty_like(indices), torch.empty_like(values))
            held = workspace.buffer("rows values", rows * stride, torch.float32, values.device)
            row_extents_kernel[grid](indices, values, found, stride, BLOCK=BLOCK, **_OPTIONS)
            count_rows_kernel[grid](indices, values, found, counts, kept, *numbers, **common)
            keep_rows_kernel[grid](
                indices, values, found, counts, sent.indices, held, sent.values, *numbers, CHUNK=CHUNK, **common
            )
            indices, values = sent.indices, held
        if layout.quantized:
            choose_rows_kernel[1, rows](
                values, kept, menu_of(layout, values.device), counts, messages, stride, blocks, layout.words,
                float(divisor), float(quantize.lookup(layout.bits).cover),
                KEPT=kept_bits(divisor), HALVINGS=layout.bits - 1, CHUNK=CHUNK, BLOCK=BLOCK,
                num_warps=CHOOSE_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        _write(layout, lows, indices, values, counts, messages, sent.values, divisor)
    return sent


def _write(
    layout: Any,
    lows: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    messages: torch.Tensor,
    delivered: torch.Tensor,
    divisor: int,
) -> None:
    """Launch the kernels that write high parts, planes and values. Headers are already in ``messages``."""
    rows, stride = indices.shape
    lengths = stride, counts.numel() // rows, layout.words
    high_rows_kernel[triton.cdiv(layout.high_words, HIGH_WORDS), rows](
        indices, counts, lows, messages, *lengths, layout.heads, layout.high_words, layout.room.bit_length(),
        LOW_BITS=layout.low_bits, PLAIN=layout.plain, CHUNK=CHUNK, BLOCK=HIGH_WORDS,
        num_warps=HIGH_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    planes_rows_kernel[triton.cdiv(layout.room, BLOCK), rows](
        indices, values, counts, lows, messages, menu_of(layout, messages.device), delivered, *lengths, layout.room,
        layout.heads + layout.high_words, float(divisor), delivered_limit(layout, divisor),
        **shape(layout), CHUNK=CHUNK, **_OPTIONS,
    )  # fmt: skip


def read_rows(
    layout: Any, lows: torch.Tensor, messages: torch.Tensor, divisor: int, workspace: Workspace
) -> tuple[Padded, torch.Tensor]:
    """Launch the kernels on checked arguments with at least one row and slot."""
    messages = messages.contiguous()
    rows, room, words, high_words = len(lows), layout.room, layout.words, layout.high_words
    tiles, blocks = triton.cdiv(high_words, WORDS), triton.cdiv(room, BLOCK)
    verdicts = VERDICT + blocks
    counts, slots, verdict = (
        workspace.buffer(f"rows {name}", rows * size, torch.int32, messages.device)
        for name, size in (("bits", tiles), ("slots", room), ("verdict", verdicts))
    )
    malformed = messages.new_empty(1)
    found = Padded(messages.new_empty((rows, room)), messages.new_empty((rows, room), dtype=torch.float32))
    with on_device_of(messages):
        count_high_kernel[tiles, rows](
            messages, counts, malformed, words, layout.heads, high_words, WORDS=WORDS, **_OPTIONS
        )
        position_rows_kernel[tiles, rows](
            messages, counts, slots, verdict, words, layout.heads, high_words, room, verdicts,
            WORDS=WORDS, CHUNK=CHUNK, **_OPTIONS,
        )  # fmt: skip
        join_sections_kernel[blocks, rows](
            slots, lows, messages, menu_of(layout, messages.device), *found, verdict, words, verdicts, room,
            layout.span, layout.heads + high_words, quantize.limit(divisor),
            **shape(layout), PLAIN=layout.plain, **_OPTIONS,
        )  # fmt: skip
        refuse_rows_kernel[blocks, rows](
            verdict, *found, malformed, verdicts, room, int(layout.quantized),
            CHUNK=CHUNK, BLOCK=BLOCK, **_OPTIONS,
        )  # fmt: skip
    return found, malformed
