"""Kernels of :mod:`tritoncomm_kernels.scatter`: sums in rank order, without float atomics.

One program owns a tile of the output and adds the lists one after the other. Indices are unique inside a list, so a
barrier between two lists is enough to fix the order. Every access through an index has a bounds check.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.bits_triton import bits_in, lowest_bit
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.expand_triton import SCAN_CHUNK, scan_counts_kernel

TILE, ENTRIES, WARPS = 4096, 256, 8
BORDERS = 128
BLOCK = 1024
WORDS = 1024


@triton.jit(do_not_specialize=["stride", "tiles", "steps"])
def tile_bounds_kernel(
    indices_ptr, counts_ptr, bounds_ptr, invalid_ptr, stride, tiles, steps,
    TILE: tl.constexpr, BORDERS: tl.constexpr,
):  # fmt: skip
    """Set ``bounds[p, t]`` to the first position in list p with an index of at least ``t * TILE``."""
    border = tl.program_id(0) * BORDERS + tl.arange(0, BORDERS)
    row = tl.program_id(1).to(tl.int64)
    count = tl.maximum(tl.minimum(tl.load(counts_ptr + row), stride), 0)
    sought = border.to(tl.int64) * TILE
    low = tl.zeros([BORDERS], tl.int32)
    high = low + count
    while steps > 0:
        middle = low + (high - low) // 2
        open_range = low < high
        index = tl.load(indices_ptr + row * stride + middle, mask=open_range, other=0)
        right = open_range & (index.to(tl.int64) < sought)
        left = open_range & (index.to(tl.int64) >= sought)
        low = tl.where(right, middle + 1, low)
        high = tl.where(left, middle, high)
        steps -= 1
    tl.store(bounds_ptr + row * (tiles + 1) + border, low, mask=border <= tiles)
    # Entries before the first tile or after the last tile are invalid.
    outside = tl.where(border == 0, low, 0) + tl.where(border == tiles, count - low, 0)
    stray = tl.sum(outside, axis=0)
    tl.atomic_add(invalid_ptr, stray, mask=stray > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "stride", "tiles", "lists", "scale"])
def sum_lists_kernel(
    indices_ptr, values_ptr, bounds_ptr, out_ptr, invalid_ptr, n, stride, tiles, lists, scale,
    TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the dense sum."""
    tile = tl.program_id(0)
    start = tile * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        tl.store(out_ptr + at, tl.zeros([TILE], tl.float32))
    else:
        tl.store(out_ptr + at, tl.zeros([TILE], tl.float32), mask=at < n)
    stop = tl.minimum(start + TILE, n)
    tl.debug_barrier()
    row = 0
    while row < lists:
        bounds = bounds_ptr + row * (tiles + 1) + tile
        entry = tl.load(bounds)
        end = tl.load(bounds + 1)
        while entry < end:
            lane = entry + tl.arange(0, ENTRIES)
            held = lane < end
            place = tl.cast(row, tl.int64) * stride + lane
            index = tl.load(indices_ptr + place, mask=held, other=-1)
            inside = (index >= start) & (index < stop)
            value = tl.load(values_ptr + place, mask=inside, other=0.0)
            total = tl.load(out_ptr + index, mask=inside, other=0.0) + value * scale
            tl.store(out_ptr + index, total, mask=inside)
            stray = tl.sum((held & (index < start)).to(tl.int32) + (held & (index >= stop)).to(tl.int32), axis=0)
            tl.atomic_add(invalid_ptr, stray, mask=stray > 0, sem="relaxed")
            entry += ENTRIES
        tl.debug_barrier()
        row += 1


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=["indices_ptr"])
def mark_indices_kernel(indices_ptr, bits_ptr, invalid_ptr, count, n, BLOCK: tl.constexpr):
    """Set the bit of every index of one list."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    index = tl.load(indices_ptr + at, mask=held, other=-1)
    inside = (index >= 0) & (index < n)
    tl.atomic_or(bits_ptr + (index >> 5), 1 << (index & 31), mask=inside, sem="relaxed")
    stray = tl.sum(held.to(tl.int32), axis=0) - tl.sum(inside.to(tl.int32), axis=0)
    tl.atomic_add(invalid_ptr, stray, mask=stray > 0, sem="relaxed")


@triton.jit(do_not_specialize=["words"])
def count_words_kernel(bits_ptr, counts_ptr, words, WORDS: tl.constexpr):
    """Count the set bits of one group of ``WORDS`` words."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = tl.load(bits_ptr + at, mask=at < words, other=0)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(bits_in(mask), axis=0))


@triton.jit(do_not_specialize=["words"])
def union_kernel(bits_ptr, offsets_ptr, ranks_ptr, out_ptr, words, WORDS: tl.constexpr):
    """Write the ascending union. For every word, also write the number of union elements before it."""
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = tl.load(bits_ptr + at, mask=at < words, other=0)
    counts = bits_in(mask)
    position = tl.load(offsets_ptr + program) + tl.cumsum(counts, axis=0) - counts
    tl.store(ranks_ptr + at, position, mask=at < words)
    left = tl.max(counts, axis=0)
    while left > 0:
        # The output has exactly one slot per set bit.
        tl.store(out_ptr + position, at * 32 + lowest_bit(mask), mask=mask != 0)
        position += 1
        mask = mask & (mask - 1)
        left -= 1


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"])
def add_list_kernel(indices_ptr, values_ptr, bits_ptr, ranks_ptr, sums_ptr, count, n, BLOCK: tl.constexpr):
    """Add one list to the sums. Launches are issued in rank order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    inside = (index >= 0) & (index < n)
    word = tl.load(bits_ptr + (index >> 5), mask=inside, other=0)
    lower = bits_in(word & ((1 << (index & 31)) - 1))
    slot = tl.load(ranks_ptr + (index >> 5), mask=inside, other=0) + lower
    value = tl.load(values_ptr + at, mask=inside, other=0.0)
    tl.store(sums_ptr + slot, tl.load(sums_ptr + slot, mask=inside, other=0.0) + value, mask=inside)


@triton.jit(do_not_specialize=["n", "capacity"])
def gather_kernel(
    values_ptr, indices_ptr, out_ptr, count_ptr, invalid_ptr, n, capacity, CLEAR: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute ``out = values[indices]``. With ``CLEAR``, set these elements of ``values`` to 0.

    An index out of bounds reads 0 and clears nothing.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < tl.minimum(tl.load(count_ptr), capacity)
    index = tl.load(indices_ptr + at, mask=held, other=-1)
    inside = (index >= 0) & (index < n)
    tl.store(out_ptr + at, tl.load(values_ptr + index, mask=inside, other=0.0), mask=held)
    if CLEAR:
        tl.debug_barrier()  # the store may use other threads than the load
        tl.store(values_ptr + index, 0.0, mask=inside)
    stray = tl.sum(held.to(tl.int32), axis=0) - tl.sum(inside.to(tl.int32), axis=0)
    tl.atomic_add(invalid_ptr, stray, mask=stray > 0, sem="relaxed")


def sum_lists(
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    invalid: torch.Tensor,
    scale: float,
    *,
    tile: int = TILE,
    entries: int = ENTRIES,
) -> None:
    """Launch the kernels on checked arguments. ``bounds`` (int32, ``lists * (tiles + 1)``) is scratch memory."""
    (lists, stride), n = indices.shape, out.numel()
    tiles = triton.cdiv(n, tile)
    steps = max(1, stride).bit_length() + 1
    with on_device_of(out):
        tile_bounds_kernel[(triton.cdiv(tiles + 1, BORDERS), lists)](
            indices,
            counts,
            bounds,
            invalid,
            stride,
            tiles,
            steps,
            TILE=tile,
            BORDERS=BORDERS,
            num_warps=1,
            enable_fp_fusion=False,
        )
        sum_lists_kernel[(tiles,)](
            indices, values, bounds, out, invalid, n, stride, tiles, lists, scale,
            TILE=tile, ENTRIES=entries, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def mark_union(
    lists: list[tuple[torch.Tensor, torch.Tensor]],
    bits: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    invalid: torch.Tensor,
    n: int,
) -> None:
    """Launch the first half of a merge: compute the union as a bit mask, and its size per group of words."""
    bits.zero_()
    with on_device_of(bits):
        for indices, _ in lists:
            if indices.numel():
                mark_indices_kernel[(triton.cdiv(indices.numel(), BLOCK),)](
                    indices, bits, invalid, indices.numel(), n, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
                )
        count_words_kernel[(counts.numel(),)](
            bits, counts, bits.numel(), WORDS=WORDS, num_warps=WARPS, enable_fp_fusion=False
        )
        scan_counts_kernel[(1,)](
            counts, offsets, counts.numel(), CHUNK=SCAN_CHUNK, num_warps=WARPS, enable_fp_fusion=False
        )


def add_union(
    lists: list[tuple[torch.Tensor, torch.Tensor]],
    bits: torch.Tensor,
    offsets: torch.Tensor,
    ranks: torch.Tensor,
    union: torch.Tensor,
    sums: torch.Tensor,
    n: int,
) -> None:
    """Launch the second half of a merge: write the union and add the lists in order. ``sums`` must be all zeros."""
    with on_device_of(bits):
        union_kernel[(offsets.numel(),)](
            bits, offsets, ranks, union, bits.numel(), WORDS=WORDS, num_warps=WARPS, enable_fp_fusion=False
        )
        for indices, values in lists:
            if indices.numel():
                add_list_kernel[(triton.cdiv(indices.numel(), BLOCK),)](
                    indices, values, bits, ranks, sums, indices.numel(), n,
                    BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip


def gather(
    values: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    count: torch.Tensor,
    invalid: torch.Tensor,
    *,
    clear: bool,
    block: int = BLOCK,
) -> None:
    """Launch the kernel on checked, non-empty arguments."""
    with on_device_of(values):
        gather_kernel[(triton.cdiv(indices.numel(), block),)](
            values, indices, out, count, invalid, values.numel(), indices.numel(),
            CLEAR=clear, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
