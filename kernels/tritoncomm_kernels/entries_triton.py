# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.entries`: compaction, unions and sums of rows, and single entries.

Numbers of entries stay in device memory. Every program derives what it needs from them, so the launches depend on the
shapes alone. Sums are added in row order, without float atomics: one program owns a part of the output, and indices are
unique inside a row. Every access through an index has a bounds check.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import memory
from tritoncomm_kernels.bits_triton import bits_in
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.lists import PADDING, Entries
from tritoncomm_kernels.select_triton import GROUP, GROUP_WARPS, count_bits_kernel, expand_kernel, sum_before

FLAT, FLAT_WARPS = 1024, 4
MOVE, WARPS = 1024, 8
BORDERS = 128
ENTRIES = 256
# A union tile is set to zero by its program. A dense tile is only read where entries are, so it may be longer.
UNION_TILE, DENSE_TILE = 1024, 1 << 15


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=["indices_ptr"])
def mark_indices_kernel(indices_ptr, bits_ptr, count, n, BLOCK: tl.constexpr):
    """Set the bit of every index that is inside the vector."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    inside = (index >= 0) & (index < n)
    tl.atomic_or(bits_ptr + (index >> 5), 1 << (index & 31), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["indices_ptr"])
def count_used_kernel(indices_ptr, counts_ptr, stride, BLOCK: tl.constexpr):
    """Count the entries of each block of a row that are no padding."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + row * stride + at, mask=at < stride, other=-1)
    own = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts_ptr + own, tl.sum((index >= 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def join_rows_kernel(indices_ptr, values_ptr, counts_ptr, out_indices_ptr, out_values_ptr, stride, BLOCK: tl.constexpr):
    """Write the entries of one block of a row behind those before it, and its padding behind all entries."""
    program, blocks, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < stride
    index = tl.load(indices_ptr + row * stride + at, mask=inside, other=-1)
    used = (index >= 0).to(tl.int32)
    rank = sum_before(counts_ptr + row * blocks, program) + tl.cumsum(used, axis=0) - used
    total = sum_before(counts_ptr + row * blocks, blocks)
    slot = row * stride + tl.where(used != 0, rank, total + at - rank)
    value = tl.load(values_ptr + row * stride + at, mask=used != 0, other=0.0)
    tl.store(out_indices_ptr + slot, index, mask=inside)
    tl.store(out_values_ptr + slot, value, mask=inside)


@triton.jit(
    do_not_specialize=["room", "tiles", "steps", "size", "offset"], do_not_specialize_on_alignment=["indices_ptr"]
)
def row_borders_kernel(
    indices_ptr, union_ptr, bounds_ptr, room, tiles, steps, size, offset,
    TILE: tl.constexpr, BORDERS: tl.constexpr,
):  # fmt: skip
    """Set ``bounds[r, t]`` to the first entry of row r that belongs to tile t or a later one.

    Tiles divide the slots of the union, or without one the coordinates from ``offset`` on.
    """
    border = tl.program_id(0) * BORDERS + tl.arange(0, BORDERS)
    row = tl.program_id(1).to(tl.int64)
    sought = border.to(tl.int64) * TILE
    if union_ptr is not None:
        index = tl.load(union_ptr + sought, mask=sought < size, other=-1)
        sought = tl.where(index < 0, 0x7FFFFFFF, index).to(tl.int64)
    else:
        sought += offset
    low = tl.zeros([BORDERS], tl.int32)
    high = low + room
    while steps > 0:
        middle = low + (high - low) // 2
        open_range = low < high
        index = tl.load(indices_ptr + row * room + middle, mask=open_range, other=-1)
        earlier = (index >= 0) & (index < sought)  # padding belongs behind all tiles
        low = tl.where(open_range & earlier, middle + 1, low)
        high = tl.where(open_range & (earlier == 0), middle, high)
        steps -= 1
    tl.store(bounds_ptr + row * (tiles + 1) + border, low, mask=border <= tiles)


@triton.jit(do_not_specialize=["size", "offset", "span", "room", "tiles", "rows", "scale"])
def add_rows_kernel(
    indices_ptr, values_ptr, bounds_ptr, bits_ptr, ranks_ptr, out_ptr, size, offset, span, room, tiles, rows, scale,
    TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Add all rows to one tile of ``out``, in row order. With a union's bits, slots are ranks, and sums start at 0."""
    tile = tl.program_id(0)
    start = tile * TILE
    stop = tl.minimum(start + TILE, size)
    if bits_ptr is not None:
        at = start + tl.arange(0, TILE)
        tl.store(out_ptr + at, tl.zeros([TILE], tl.float32), mask=at < size)
        tl.debug_barrier()
    row = 0
    while row < rows:
        bounds = bounds_ptr + tl.cast(row, tl.int64) * (tiles + 1) + tile
        entry = tl.load(bounds)
        end = tl.load(bounds + 1)
        while entry < end:
            lane = entry + tl.arange(0, ENTRIES)
            place = tl.cast(row, tl.int64) * room + lane
            index = tl.load(indices_ptr + place, mask=lane < end, other=-1)
            slot = index - offset
            inside = (index >= 0) & (slot >= 0) & (slot < span)
            if bits_ptr is not None:
                word = tl.load(bits_ptr + (index >> 5), mask=inside, other=0)
                lower = bits_in(word & ((1 << (index & 31)) - 1))
                slot = tl.load(ranks_ptr + (index >> 5), mask=inside, other=0) + lower
            inside = inside & (slot >= start) & (slot < stop)
            value = tl.load(values_ptr + place, mask=inside, other=0.0)
            total = tl.load(out_ptr + slot, mask=inside, other=0.0) + value * scale
            tl.store(out_ptr + slot, total, mask=inside)
            entry += ENTRIES
        tl.debug_barrier()  # the next row may add to the same slots
        row += 1


@triton.jit(
    do_not_specialize=["count", "n", "offset", "scale"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"]
)
def place_kernel(
    indices_ptr, values_ptr, out_ptr, count, n, offset, scale,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the elements of ``out`` at unique indices to values, or to 0 without values. With ``ADD``, add to them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    slot = index - offset
    inside = (index >= 0) & (slot >= 0) & (slot < n)
    if values_ptr is None:
        tl.store(out_ptr + slot, 0.0, mask=inside)
    else:
        value = tl.load(values_ptr + at, mask=inside, other=0.0)
        if ADD:
            value = tl.load(out_ptr + slot, mask=inside, other=0.0) + value * scale
        tl.store(out_ptr + slot, value, mask=inside)


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def pick_values_kernel(values_ptr, indices_ptr, out_ptr, count, n, BLOCK: tl.constexpr):
    """Compute ``out = values[indices]``, and 0 for an index that is padding or out of bounds."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    inside = (index >= 0) & (index < n)
    tl.store(out_ptr + at, tl.load(values_ptr + index, mask=inside, other=0.0), mask=at < count)


def joined(rows: Entries) -> Entries:
    """Launch the kernels on rows with at least one slot, ``[rows, room]``. Each row is joined by itself."""
    (count, room), indices = rows.indices.shape, rows.indices
    grid = triton.cdiv(room, MOVE), count
    counts = memory.scratch(count * grid[0], torch.int32, indices)
    launch(count_used_kernel, grid, indices, counts, room, like=indices, warps=WARPS, BLOCK=MOVE)
    return moved(rows, counts)


def moved(rows: Entries, counts: torch.Tensor) -> Entries:
    """Launch the kernel that moves the padding of each row behind its entries. ``counts`` are those of each block."""
    (count, room), out = rows.indices.shape, Entries.empty(rows.indices.shape, rows.values)
    launch(
        join_rows_kernel, (triton.cdiv(room, MOVE), count), *rows, counts, *out, room,
        like=rows.values, warps=WARPS, BLOCK=MOVE,
    )  # fmt: skip
    return out


def merge_rows(rows: Entries, numel: int, capacity: int) -> Entries:
    """Launch a merge through a bit mask of the union, with at least one slot of output."""
    indices, values = rows.indices.contiguous(), rows.values.contiguous()
    words = triton.cdiv(numel, 32)
    groups = triton.cdiv(words, GROUP)
    bits, ranks, counts, found = (memory.scratch(size, torch.int32, values) for size in (words, words, groups, 1))
    bits.zero_()
    union = indices.new_full((capacity,), PADDING)
    launch(
        mark_indices_kernel, (triton.cdiv(indices.numel(), FLAT),), indices, bits, indices.numel(), numel,
        like=values, warps=FLAT_WARPS, BLOCK=FLAT,
    )  # fmt: skip
    launch(count_bits_kernel, (groups,), bits, counts, words, 0, 0, like=values, warps=GROUP_WARPS, WORDS=GROUP)
    launch(
        expand_kernel, (groups,),
        None, None, bits, counts.cumsum(0, dtype=torch.int32), union, None, ranks, found, words, capacity, numel,
        0, 0, 0,
        like=values, warps=GROUP_WARPS, TILES=1, WORDS=GROUP, SUMMED=True, ROWS=False,
    )  # fmt: skip
    sums = values.new_empty(capacity)
    _add_tiles(sums, Entries(indices, values), union=(union, bits, ranks, numel), offset=0, scale=1.0)
    return Entries(union, sums)


def add_rows(out: torch.Tensor, rows: Entries, offset: int, scale: float) -> None:
    """Launch the kernels that add rows ``[rows, room]`` with at least one slot to ``out``, in row order."""
    indices, values = rows.indices.contiguous(), rows.values.contiguous()
    if indices.shape[0] > 1:
        _add_tiles(out, Entries(indices, values), union=None, offset=offset, scale=scale)
    else:  # the indices are unique, so no order has to be kept
        set_at(out, indices, values, offset=offset, scale=scale, add=True)


def set_at(
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor | None,
    *,
    offset: int = 0,
    scale: float = 1.0,
    add: bool = False,
) -> None:
    """Launch the kernel on checked, non-empty arguments. With ``add``, it adds ``scale`` times the values."""
    launch(
        place_kernel, (triton.cdiv(indices.numel(), FLAT),),
        indices.contiguous(), None if values is None else values.contiguous(), out,
        indices.numel(), out.numel(), offset, scale, like=out, warps=FLAT_WARPS, ADD=add, BLOCK=FLAT,
    )  # fmt: skip


def values_at(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments."""
    indices = indices.contiguous()
    found = values.new_empty(indices.shape)
    launch(
        pick_values_kernel, (triton.cdiv(indices.numel(), FLAT),), values, indices, found, indices.numel(),
        values.numel(), like=values, warps=FLAT_WARPS, BLOCK=FLAT,
    )  # fmt: skip
    return found


def _add_tiles(
    out: torch.Tensor,
    rows: Entries,
    *,
    union: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None,
    offset: int,
    scale: float,
) -> None:
    """Find the entries of each tile of ``out``, then add them. ``union`` has indices, bits, ranks and their range."""
    size, (count, room) = out.numel(), rows.indices.shape
    indices, bits, ranks, span = union if union is not None else (None, None, None, size)
    tile = DENSE_TILE if union is None else UNION_TILE
    tiles = triton.cdiv(size, tile)
    bounds = memory.scratch(count * (tiles + 1), torch.int32, out)
    launch(
        row_borders_kernel, (triton.cdiv(tiles + 1, BORDERS), count),
        rows.indices, indices, bounds, room, tiles, room.bit_length(), size, offset,
        like=out, warps=1, TILE=tile, BORDERS=BORDERS,
    )  # fmt: skip
    launch(
        add_rows_kernel, (tiles,), *rows, bounds, bits, ranks, out, size, offset, span, room, tiles, count, scale,
        like=out, warps=WARPS, TILE=tile, ENTRIES=ENTRIES,
    )  # fmt: skip
