"""Kernels of :mod:`tritoncomm_kernels.expand`: expand a bit mask into ascending (index, value) pairs."""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.bits_triton import bits_in, lowest_bit
from tritoncomm_kernels.dispatch import on_device_of

# Mask words per program: 8192 elements. On an H200, with 100 million elements and 1 % of them marked, this takes 39 us,
# and 44 us with 1024 words and 8 warps.
WORDS, WARPS = 256, 2
CHUNK = 2048
SCAN_CHUNK, SCAN_WARPS = 8192, 8  # three iterations for 100 million elements
# Up to this many tiles, every program sums the counts of the tiles before its own, which are in the L2 cache. That work
# grows with the square of the number of tiles, so larger vectors use a separate scan kernel.
TILES_SUMMED_IN_PLACE = 8192


@triton.jit(do_not_specialize=["tiles"])
def scan_counts_kernel(counts_ptr, offsets_ptr, tiles, CHUNK: tl.constexpr):
    """Compute the exclusive prefix sum of the tile counts, in one program."""
    before = tl.zeros([], tl.int32)
    start = 0
    while start < tiles:
        at = start + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + at, mask=at < tiles, other=0)
        tl.store(offsets_ptr + at, before + tl.cumsum(counts, axis=0) - counts, mask=at < tiles)
        before += tl.sum(counts, axis=0)
        start += CHUNK


@triton.jit
def sum_before(counts_ptr, end, CHUNK: tl.constexpr):
    """Return the sum of the first ``end`` counts."""
    total = tl.zeros([], tl.int32)
    start = 0
    while start < end:
        at = start + tl.arange(0, CHUNK)
        total += tl.sum(tl.load(counts_ptr + at, mask=at < end, other=0), axis=0)
        start += CHUNK
    return total


@triton.jit(do_not_specialize=["words", "capacity", "n"])
def expand_kernel(
    values_ptr, bits_ptr, counts_ptr, out_indices_ptr, out_values_ptr, found_ptr, words, capacity, n,
    TILES: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Write the entries of ``TILES`` tiles. With ``OFFSETS``, ``counts`` already holds exclusive offsets."""
    program = tl.program_id(0)
    before = tl.load(counts_ptr + program * TILES) if OFFSETS else sum_before(counts_ptr, program * TILES, CHUNK)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = tl.load(bits_ptr + at, mask=at < words, other=0)
    counts = bits_in(mask)
    position = before + tl.cumsum(counts, axis=0) - counts
    if program == tl.num_programs(0) - 1:
        tl.store(found_ptr, (before + tl.sum(counts, axis=0)).to(tl.int64))
    left = tl.max(counts, axis=0)
    while left > 0:
        # Each iteration takes the lowest set bit of every word. The word with the most bits sets the iteration count.
        element = at * 32 + lowest_bit(mask)
        write = (mask != 0) & (position < capacity) & (element < n)
        tl.store(out_indices_ptr + position, element, mask=write)
        tl.store(out_values_ptr + position, tl.load(values_ptr + element, mask=write, other=0.0), mask=write)
        position += 1
        mask = mask & (mask - 1)
        left -= 1


def expand(
    values: torch.Tensor,
    bits: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    found: torch.Tensor,
    *,
    words: int = WORDS,
    tiles_summed_in_place: int = TILES_SUMMED_IN_PLACE,
) -> None:
    """Launch the kernels on checked arguments. ``offsets`` (int32, shape of ``counts``) is scratch memory."""
    tiles = counts.numel()
    per_tile = bits.numel() // tiles
    words = max(words, per_tile)
    scanned = tiles > tiles_summed_in_place
    with on_device_of(values):
        if scanned:
            scan_counts_kernel[(1,)](
                counts, offsets, tiles, CHUNK=SCAN_CHUNK, num_warps=SCAN_WARPS, enable_fp_fusion=False
            )
        expand_kernel[(triton.cdiv(bits.numel(), words),)](
            values,
            bits,
            offsets if scanned else counts,
            indices,
            out,
            found,
            bits.numel(),
            indices.numel(),
            values.numel(),
            TILES=words // per_tile,
            WORDS=words,
            CHUNK=CHUNK,
            OFFSETS=scanned,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
