"""Kernels of :mod:`tritoncomm_kernels.padded`: top-k per segment, compaction, unions and sums of rows, and gathers.

Numbers of entries stay in device memory. Every program derives what it needs from them, so the launches depend on the
shapes alone. Sums are added in row order: one program owns a part of the output, and indices are unique inside a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.bits_triton import bits_in, key_of, lowest_bit, pack_words
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.expand_triton import CHUNK, SCAN_CHUNK, scan_counts_kernel, sum_before
from tritoncomm_kernels.padded import PADDING, Padded
from tritoncomm_kernels.scatter_triton import WORDS, count_words_kernel, mark_indices_kernel, union_kernel
from tritoncomm_kernels.threshold_triton import PROGRAMS
from tritoncomm_kernels.workspace import Workspace

BLOCK, WARPS = 4096, 8
DIGITS = tl.constexpr(4)  # of a key
RESIDENT = 1024  # programs of 8 warps that a large GPU runs at a time
FLAT, FLAT_WARPS = 1024, 4
MOVE = 1024
BORDERS = 128
ENTRIES = 256
# A union tile is set to zero by its program. A dense tile is only read where entries are, so it may be longer.
UNION_TILE, DENSE_TILE = 1024, 1 << 15
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def _segment(bounds_ptr, n, BLOCK: tl.constexpr):
    """Return the start and end of the row's segment, and the blocks from and to which this program reads it.

    Blocks are aligned, so only those at the ends of a segment need masks. The segment is inside the vector, whatever
    the bounds are.
    """
    row = tl.program_id(1)
    start = tl.minimum(tl.maximum(tl.load(bounds_ptr + row), 0), n)
    stop = tl.minimum(tl.maximum(tl.load(bounds_ptr + row + 1), start), n)
    last = tl.cdiv(stop, BLOCK)
    each = tl.cdiv(last - start // BLOCK, tl.num_programs(0))
    first = start // BLOCK + tl.program_id(0) * each
    return start, stop, first, tl.minimum(first + each, last)


@triton.jit
def _keys(values_ptr, block, start, stop, BLOCK: tl.constexpr):
    """Return the keys of a block. Outside the segment they are 0, which is never selected."""
    first = block * BLOCK
    at = first + tl.arange(0, BLOCK)
    if (first >= start) & (first + BLOCK <= stop):
        values = tl.load(values_ptr + at)
    else:
        values = tl.load(values_ptr + at, mask=(at >= start) & (at < stop), other=0.0)
    return key_of(values)


@triton.jit
def _kth(histogram_ptr, budgets_ptr, digits, room):
    """Return the first ``digits`` digits of the k-th key of this row, and how many entries with these digits to take.

    Digits have 8 bits from bit 30 down. The last one repeats a bit, which all its keys share. Every program computes
    this from the counts of the digits. A kernel that picks a digit would be a launch more per digit.
    """
    lane = tl.arange(0, 256)
    prefix = tl.zeros([], tl.int32)
    remaining = tl.minimum(tl.maximum(tl.load(budgets_ptr + tl.program_id(1)), 0), room)
    digit = 0
    while digit < digits:
        counts = tl.load(histogram_ptr + (digit * tl.num_programs(1) + tl.program_id(1)) * 256 + lane)
        found = tl.sum(counts, axis=0)
        reached = found - tl.cumsum(counts, axis=0) + counts
        remaining = tl.minimum(remaining, found)  # at most as many entries as there are non-zeros
        value = tl.max(tl.where(reached >= remaining, lane, 0), axis=0)
        prefix = prefix | (value << tl.maximum(23 - 8 * digit, 0))
        remaining -= tl.sum(tl.where(lane > value, counts, 0), axis=0)
        digit += 1
    return prefix, remaining


@triton.jit(do_not_specialize=["n", "room", "digit"], do_not_specialize_on_alignment=["bounds_ptr"])
def segment_histogram_kernel(values_ptr, bounds_ptr, budgets_ptr, histogram_ptr, n, room, digit, BLOCK: tl.constexpr):
    """Build the histogram of one digit over the non-zero keys of a segment that match the digits so far."""
    prefix, _ = _kth(histogram_ptr, budgets_ptr, digit, room)
    start, stop, block, last = _segment(bounds_ptr, n, BLOCK)
    counts = tl.zeros([256], tl.int32)
    while block < last:
        keys = _keys(values_ptr, block, start, stop, BLOCK)
        agree = (keys > 0) & (((keys ^ prefix) >> (31 - 8 * digit)) == 0)
        counts += tl.histogram((keys >> tl.maximum(23 - 8 * digit, 0)) & 255, 256, mask=agree)
        block += 1
    own_ptr = histogram_ptr + (digit * tl.num_programs(1) + tl.program_id(1)) * 256
    tl.atomic_add(own_ptr + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "room"], do_not_specialize_on_alignment=["bounds_ptr"])
def segment_count_kernel(
    values_ptr, bounds_ptr, budgets_ptr, histogram_ptr, above_ptr, equal_ptr, n, room, BLOCK: tl.constexpr
):
    """Count, per program, the keys of its share that are above the k-th key of the row, and those equal to it."""
    row = tl.program_id(1)
    kth, _ = _kth(histogram_ptr, budgets_ptr, DIGITS, room)
    start, stop, block, last = _segment(bounds_ptr, n, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    while block < last:
        keys = _keys(values_ptr, block, start, stop, BLOCK)
        above += (keys > kth).to(tl.int32)
        equal += (keys == kth).to(tl.int32)
        block += 1
    own = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(above_ptr + own, tl.sum(above, axis=0))
    tl.store(equal_ptr + own, tl.sum(equal, axis=0))


@triton.jit(do_not_specialize=["n", "room"], do_not_specialize_on_alignment=["indices_ptr", "bounds_ptr"])
def segment_emit_kernel(
    values_ptr, indices_ptr, bounds_ptr, budgets_ptr, histogram_ptr, above_ptr, equal_ptr,
    out_indices_ptr, out_values_ptr, n, room,
    NAMED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries above the k-th key of a row, the first ones equal to it, and padding, in order of position.

    With ``NAMED``, the index of an entry is read from ``indices``. Otherwise it is the position.
    """
    program, programs, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    kth, ties = _kth(histogram_ptr, budgets_ptr, DIGITS, room)
    start, stop, block, last = _segment(bounds_ptr, n, BLOCK)
    lane = tl.arange(0, PROGRAMS)
    counts = tl.load(above_ptr + row * programs + lane, mask=lane < programs, other=0)
    taken = tl.sum(counts, axis=0) + ties
    above = tl.sum(tl.where(lane < program, counts, 0), axis=0)
    equal = tl.sum(tl.load(equal_ptr + row * programs + lane, mask=lane < program, other=0), axis=0)
    out_indices_ptr += row.to(tl.int64) * room
    out_values_ptr += row.to(tl.int64) * room
    word = tl.arange(0, BLOCK // 32) * 32
    while block < last:
        keys = _keys(values_ptr, block, start, stop, BLOCK)
        tied = pack_words(keys == kth, BLOCK)
        mask = pack_words(keys > kth, BLOCK) | tied
        tied_here = bits_in(tied)
        above_here = bits_in(mask) - tied_here
        tied_before = equal + tl.cumsum(tied_here, axis=0) - tied_here
        above_before = above + tl.cumsum(above_here, axis=0) - above_here
        left = tl.max(above_here + tied_here, axis=0)
        while left > 0:  # each iteration takes the lowest set bit of every word
            is_tied = ((tied & mask & (0 - mask)) != 0).to(tl.int32)
            slot = above_before + tl.minimum(tied_before, ties)
            take = (mask != 0) & ((is_tied == 0) | (tied_before < ties)) & (slot < room)
            element = block * BLOCK + word + lowest_bit(mask)
            index = tl.load(indices_ptr + element, mask=take, other=0) if NAMED else element
            tl.store(out_indices_ptr + slot, index, mask=take)
            tl.store(out_values_ptr + slot, tl.load(values_ptr + element, mask=take, other=0.0), mask=take)
            tied_before += is_tied
            above_before += 1 - is_tied
            mask = mask & (mask - 1)
            left -= 1
        above += tl.sum(above_here, axis=0)
        equal += tl.sum(tied_here, axis=0)
        block += 1
    taken += program * PROGRAMS
    while taken < room:
        tl.store(out_indices_ptr + taken + lane, -1, mask=lane < room - taken)
        tl.store(out_values_ptr + taken + lane, 0.0, mask=lane < room - taken)
        taken += programs * PROGRAMS


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["indices_ptr"])
def count_used_kernel(indices_ptr, counts_ptr, stride, BLOCK: tl.constexpr):
    """Count the entries of each block of a row that are no padding."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + row * stride + at, mask=at < stride, other=-1)
    own = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts_ptr + own, tl.sum((index >= 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def join_rows_kernel(
    indices_ptr,
    values_ptr,
    counts_ptr,
    out_indices_ptr,
    out_values_ptr,
    count,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the entries of one block behind those before it, and its padding behind all entries."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    index = tl.load(indices_ptr + at, mask=inside, other=-1)
    used = (index >= 0).to(tl.int32)
    rank = sum_before(counts_ptr, program, CHUNK) + tl.cumsum(used, axis=0) - used
    total = sum_before(counts_ptr, tl.num_programs(0), CHUNK)
    slot = tl.where(used != 0, rank, total + at - rank)
    value = tl.load(values_ptr + at, mask=used != 0, other=0.0)
    tl.store(out_indices_ptr + slot, index, mask=inside)
    tl.store(out_values_ptr + slot, value, mask=inside)


@triton.jit(
    do_not_specialize=["room", "tiles", "steps", "size", "offset"], do_not_specialize_on_alignment=["indices_ptr"]
)
def row_borders_kernel(
    indices_ptr, union_ptr, bounds_ptr, room, tiles, steps, size, offset,
    TILE: tl.constexpr, BORDERS: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """Set ``bounds[r, t]`` to the first entry of row r that belongs to tile t or a later one.

    Tiles divide the slots of the union, or the coordinates from ``offset`` on.
    """
    border = tl.program_id(0) * BORDERS + tl.arange(0, BORDERS)
    row = tl.program_id(1).to(tl.int64)
    sought = border.to(tl.int64) * TILE
    if UNION:
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
    TILE: tl.constexpr, ENTRIES: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """Add all rows to one tile of ``out``, in row order. With ``UNION``, slots are ranks, and the tile starts at 0."""
    tile = tl.program_id(0)
    start = tile * TILE
    stop = tl.minimum(start + TILE, size)
    if UNION:
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
            if UNION:
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
    ADD: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the elements of ``out`` at unique indices to values, or to 0 with ``CLEAR``. With ``ADD``, add to them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    slot = index - offset
    inside = (index >= 0) & (slot >= 0) & (slot < n)
    if CLEAR:
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


def top_k_rows(
    values: torch.Tensor,
    bounds: torch.Tensor,
    budgets: torch.Tensor,
    room: int,
    indices: torch.Tensor | None,
    workspace: Workspace,
    *,
    block: int = BLOCK,
    resident: int = RESIDENT,
) -> Padded:
    """Launch a radix select per segment, and the ordered emit, on checked arguments with at least one row and slot."""
    n, rows = values.numel(), budgets.numel()
    if values.data_ptr() % 16:  # the kernels need twice the registers for such a tensor, and few are long
        values = values.clone()
    programs = max(1, min(PROGRAMS, triton.cdiv(n, block), triton.cdiv(resident, rows)))
    histogram = workspace.buffer("segment histogram", 256 * DIGITS.value * rows, torch.int32, values.device).zero_()
    above, equal = (
        workspace.buffer(f"segment {name}", rows * programs, torch.int32, values.device) for name in ("above", "equal")
    )
    out = _empty((rows, room), values)
    source, grid = (values, bounds, budgets, histogram), (programs, rows)
    with on_device_of(values):
        for digit in range(DIGITS.value):
            segment_histogram_kernel[grid](*source, n, room, digit, BLOCK=block, num_warps=WARPS, **_OPTIONS)
        segment_count_kernel[grid](*source, above, equal, n, room, BLOCK=block, num_warps=WARPS, **_OPTIONS)
        segment_emit_kernel[grid](
            values, indices, *source[1:], above, equal, *out, n, room,
            NAMED=indices is not None, PROGRAMS=PROGRAMS, BLOCK=block, num_warps=WARPS, **_OPTIONS,
        )  # fmt: skip
    return out


def joined(indices: torch.Tensor, values: torch.Tensor, workspace: Workspace, *, block: int = MOVE) -> Padded:
    """Launch the kernels on ``[m]`` entries and padding, with ``m`` at least 1."""
    count = indices.numel()
    tiles = triton.cdiv(count, block)
    counts = workspace.buffer("joined counts", tiles, torch.int32, indices.device)
    out = _empty((count,), values)
    with on_device_of(values):
        count_used_kernel[tiles, 1](indices, counts, count, BLOCK=block, num_warps=WARPS, **_OPTIONS)
        join_rows_kernel[(tiles,)](
            indices, values, counts, *out, count, CHUNK=CHUNK, BLOCK=block, num_warps=WARPS, **_OPTIONS
        )
    return out


def merge_rows(
    rows: Padded, numel: int, capacity: int, workspace: Workspace, *, tile: int = UNION_TILE, entries: int = ENTRIES
) -> Padded:
    """Launch a merge through a bit mask of the union, with at least one slot of output."""
    indices, values = rows.indices.contiguous(), rows.values.contiguous()
    words = triton.cdiv(numel, 32)
    groups = triton.cdiv(words, WORDS)

    def integers(name: str, size: int) -> torch.Tensor:
        return workspace.buffer(f"merge rows {name}", size, torch.int32, values.device)

    bits, ranks = integers("bits", words).zero_(), integers("ranks", words)
    counts, offsets = integers("counts", groups), integers("offsets", groups)
    union = indices.new_full((capacity,), PADDING)
    with on_device_of(values):
        mark_indices_kernel[(triton.cdiv(indices.numel(), FLAT),)](
            indices, bits, None, indices.numel(), numel, COUNT=False, BLOCK=FLAT, num_warps=FLAT_WARPS, **_OPTIONS
        )
        count_words_kernel[(groups,)](bits, counts, words, WORDS=WORDS, num_warps=WARPS, **_OPTIONS)
        scan_counts_kernel[(1,)](counts, offsets, groups, CHUNK=SCAN_CHUNK, num_warps=WARPS, **_OPTIONS)
        union_kernel[(groups,)](bits, offsets, ranks, union, words, WORDS=WORDS, num_warps=WARPS, **_OPTIONS)
    sums = values.new_empty(capacity)
    found = Padded(indices, values)
    _add_tiles(
        sums, found, workspace, union=(union, bits, ranks, numel), offset=0, scale=1.0, tile=tile, entries=entries
    )
    return Padded(union, sums)


def add_rows(
    out: torch.Tensor,
    rows: Padded,
    offset: int,
    scale: float,
    workspace: Workspace,
    *,
    tile: int = DENSE_TILE,
    entries: int = ENTRIES,
) -> None:
    """Launch the kernels that add rows ``[rows, room]`` with at least one slot to ``out``, in row order."""
    indices, values = rows.indices.contiguous(), rows.values.contiguous()
    if indices.shape[0] > 1:
        _add_tiles(
            out, Padded(indices, values), workspace, union=None, offset=offset, scale=scale, tile=tile, entries=entries
        )
    else:  # the indices are unique, so no order has to be kept
        _place(out, indices, values, offset=offset, scale=scale, add=True)


def set_at(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor | None) -> None:
    """Launch the kernel on checked, non-empty arguments ``[m]``."""
    _place(out, indices.contiguous(), None if values is None else values.contiguous(), offset=0, scale=1.0, add=False)


def values_at(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments."""
    indices = indices.contiguous()
    found = values.new_empty(indices.shape)
    with on_device_of(values):
        pick_values_kernel[(triton.cdiv(indices.numel(), FLAT),)](
            values, indices, found, indices.numel(), values.numel(), BLOCK=FLAT, num_warps=FLAT_WARPS, **_OPTIONS
        )
    return found


def _add_tiles(
    out: torch.Tensor,
    rows: Padded,
    workspace: Workspace,
    *,
    union: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None,
    offset: int,
    scale: float,
    tile: int,
    entries: int,
) -> None:
    """Find the entries of each tile of ``out``, then add them. ``union`` has indices, bits, ranks and their range."""
    size, (count, room) = out.numel(), rows.indices.shape
    indices, bits, ranks, span = union if union is not None else (None, None, None, size)
    tiles = triton.cdiv(size, tile)
    bounds = workspace.buffer("row borders", count * (tiles + 1), torch.int32, out.device)
    with on_device_of(out):
        row_borders_kernel[(triton.cdiv(tiles + 1, BORDERS), count)](
            rows.indices, indices, bounds, room, tiles, room.bit_length(), size, offset,
            TILE=tile, BORDERS=BORDERS, UNION=union is not None, num_warps=1, **_OPTIONS,
        )  # fmt: skip
        add_rows_kernel[(tiles,)](
            *rows, bounds, bits, ranks, out, size, offset, span, room, tiles, count, scale,
            TILE=tile, ENTRIES=entries, UNION=union is not None, num_warps=WARPS, **_OPTIONS,
        )  # fmt: skip


def _place(
    out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor | None, *, offset: int, scale: float, add: bool
) -> None:
    with on_device_of(out):
        place_kernel[(triton.cdiv(indices.numel(), FLAT),)](
            indices, values, out, indices.numel(), out.numel(), offset, scale,
            ADD=add, CLEAR=values is None, BLOCK=FLAT, num_warps=FLAT_WARPS, **_OPTIONS,
        )  # fmt: skip


def _empty(shape: tuple[int, ...], values: torch.Tensor) -> Padded:
    return Padded(values.new_empty(shape, dtype=torch.int32), values.new_empty(shape))
