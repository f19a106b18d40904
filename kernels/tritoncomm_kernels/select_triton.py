# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.select`: mark elements with one bit each, count bits, and expand them.

Marking reads each input once, and writes the sum and one bit per element. Compaction is a separate kernel that reads
the bit mask. One scattered store per element here would cost more instructions than the memory traffic can hide. See
kernels/README.md. Unions of lists and sections of messages are bit masks, too, and are counted and expanded here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import memory
from tritoncomm_kernels.bits_triton import bits_in, divided, key_of, lowest_bit, pack_words
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.lists import Entries
from tritoncomm_kernels.select import TILE, TILES_SUMMED_IN_PLACE, Sum

WARPS = 8  # of a tile of 4096 elements: 16 per thread. 32 would double the registers.
# Mask words per program: 8192 elements. On an H200, with 25 million elements of which 3 % are marked, marking and
# expanding take 137 us together, and 145 us with one bit of each word at a time.
WORDS, EXPAND_WARPS = 256, 2
CHUNK = tl.constexpr(2048)  # counts that are summed at a time
GROUP, GROUP_WARPS = 1024, 8  # words per program where words are counted first


@triton.jit
def add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, WHOLE: tl.constexpr):
    """Return ``residual + gradient`` at ``at`` and store it to ``out``.

    Without a gradient, return the residual and store nothing. ``WHOLE`` means that the tile ends at or before ``n`` and
    needs no mask. Triton then uses 128-bit accesses whatever ``n`` is.
    """
    inside = None if WHOLE else at < n
    other = None if WHOLE else 0.0
    total = tl.load(residual_ptr + at, mask=inside, other=other)
    if gradient_ptr is not None:
        gradient = tl.load(gradient_ptr + at, mask=inside, other=other, eviction_policy="evict_first")
        total = total + gradient.to(tl.float32)
        tl.store(out_ptr + at, total, mask=inside)
    return total


@triton.jit
def write_marks(keys, at, least_ptr, span_ptr, bits_ptr, counts_ptr, TILE: tl.constexpr):
    """Compare the keys with the least one, pack the bits, and count them."""
    chosen = keys >= tl.load(least_ptr)
    if span_ptr is not None:
        chosen = chosen & (at >= tl.load(span_ptr)) & (at < tl.load(span_ptr + 1))
    tile = tl.program_id(0)
    tl.store(bits_ptr + tile * (TILE // 32) + tl.arange(0, TILE // 32), pack_words(chosen, TILE))
    tl.store(counts_ptr + tile, tl.sum(chosen.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["span_ptr"])
def mark_kernel(
    residual_ptr, gradient_ptr, divisor_ptr, out_ptr, least_ptr, span_ptr, bits_ptr, counts_ptr, n,
    TILE: tl.constexpr,
):  # fmt: skip
    """Mark the elements of one tile that reach the least key. With a gradient, first add and store the sum.

    With a divisor, quotients are compared. The sum that is stored is not divided.
    """
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        total = add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, WHOLE=True)
        keys = key_of(divided(total, divisor_ptr, at, None))
    else:
        total = add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, WHOLE=False)
        keys = tl.where(at < n, key_of(divided(total, divisor_ptr, at, at < n)), 0)
    write_marks(keys, at, least_ptr, span_ptr, bits_ptr, counts_ptr, TILE)


@triton.jit
def sum_before(counts_ptr, end):
    """Return the sum of the first ``end`` counts."""
    total = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < end:
        at = start + tl.arange(0, CHUNK)
        total += tl.sum(tl.load(counts_ptr + at, mask=at < end, other=0), axis=0)
        start += CHUNK
    return total


@triton.jit(do_not_specialize=["words", "stride", "first"])
def count_bits_kernel(bits_ptr, counts_ptr, words, stride, first, WORDS: tl.constexpr):
    """Count the set bits of each group of ``WORDS`` words of a row, whose words begin at ``first``."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = tl.load(bits_ptr + row * stride + first + at, mask=at < words, other=0)
    tl.store(counts_ptr + row * tl.num_programs(0) + program, tl.sum(bits_in(mask), axis=0))


@triton.jit(do_not_specialize=["words", "capacity", "n", "stride", "first", "found_stride"])
def expand_kernel(
    values_ptr, divisor_ptr, bits_ptr, counts_ptr, out_indices_ptr, out_values_ptr, ranks_ptr, found_ptr,
    words, capacity, n, stride, first, found_stride,
    TILES: tl.constexpr, WORDS: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the ascending positions of the bits in ``WORDS`` words, which have ``TILES`` counts, and their values.

    With ``SUMMED``, a count includes all before it. With ``ROWS``, a row has its bits from word ``first`` on, and the
    next one ``stride`` words behind. ``ranks`` receive the number of bits before each word. Values, their divisor and
    ranks may be None. ``found`` receives the number of bits of the row.
    """
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if ROWS:
        bits_ptr += row * stride + first
        counts_ptr += row * tl.num_programs(0) * TILES
        out_indices_ptr += row * capacity
        found_ptr += row * found_stride
    if SUMMED:
        before = tl.where(program > 0, tl.load(counts_ptr + tl.maximum(program * TILES, 1) - 1), 0)
    else:
        before = sum_before(counts_ptr, program * TILES)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = tl.load(bits_ptr + at, mask=at < words, other=0)
    counts = bits_in(mask)
    position = before + tl.cumsum(counts, axis=0) - counts
    if ranks_ptr is not None:
        tl.store(ranks_ptr + at, position, mask=at < words)
    if program == tl.num_programs(0) - 1:
        tl.store(found_ptr, (before + tl.sum(counts, axis=0)).to(found_ptr.dtype.element_ty))
    left = tl.max(counts, axis=0)
    while left > 0:  # at most 16 times, whatever the words are
        # Each iteration takes the two lowest set bits of every word, and waits for their values together. The word with
        # the most bits sets the number of iterations.
        rest = mask & (mask - 1)
        element, second = at * 32 + lowest_bit(mask), at * 32 + lowest_bit(rest)
        write = (mask != 0) & (position < capacity) & (element < n)
        also = (rest != 0) & (position + 1 < capacity) & (second < n)
        if values_ptr is not None:
            one = tl.load(values_ptr + element, mask=write, other=0.0)
            two = tl.load(values_ptr + second, mask=also, other=0.0)
            one, two = divided(one, divisor_ptr, element, write), divided(two, divisor_ptr, second, also)
            tl.store(out_values_ptr + position, one, mask=write)
            tl.store(out_values_ptr + position + 1, two, mask=also)
        tl.store(out_indices_ptr + position, element, mask=write)
        tl.store(out_indices_ptr + position + 1, second, mask=also)
        position += 2
        mask = rest & (rest - 1)
        left -= 2


def warps(tile: int) -> int:
    """Return the number of warps for a tile, with at least 128 elements per warp.

    With fewer elements than threads, several threads would hold the same element. In place, one thread could then
    read an element after another has written it.
    """
    return max(1, min(WARPS, tile // 128))


class Marks(NamedTuple):
    """A selection as a bit mask, on the device of its vector.

    * ``bits`` (int32 ``[tiles * tile / 32]``): bit j of word w is set if element 32 w + j is marked.
    * ``counts`` (int32 ``[tiles]``): number of marked elements per tile.
    """

    bits: torch.Tensor
    counts: torch.Tensor


def empty_marks(like: torch.Tensor, *, tile: int = TILE) -> Marks:
    """Allocate marks for the elements of ``like``."""
    tiles = triton.cdiv(like.numel(), tile)
    bits = memory.scratch(tiles * tile // 32, torch.int32, like)
    return Marks(bits, memory.scratch(tiles, torch.int32, like))


def mark(total: Sum, least: torch.Tensor, marks: Marks, *, span: torch.Tensor | None = None) -> None:
    """Launch the kernel on checked, non-empty arguments: compute the sum, and write ``marks``.

    Elements are marked if their key, or that of their quotient, is at least the key ``least`` (int32 ``[1]``, above 0).
    ``span`` (int32 ``[2]``) restricts marking to positions ``span[0] <= i < span[1]``.
    """
    residual, gradient, out, divisor = total
    tile = 32 * marks.bits.numel() // marks.counts.numel()
    launch(
        mark_kernel, (marks.counts.numel(),), residual, gradient, divisor, out, least, span, *marks, out.numel(),
        like=out, warps=warps(tile), TILE=tile,
    )  # fmt: skip


def expand(total: Sum, marks: Marks, indices: torch.Tensor, values: torch.Tensor, found: torch.Tensor) -> None:
    """Launch the kernel on checked, non-empty arguments: write the marked elements to ``indices`` and ``values``.

    Slots after the last entry keep their content. ``found`` (int64 ``[1]``) is set to the number of marked elements,
    which may exceed the capacity.
    """
    bits, counts = marks
    tiles = counts.numel()
    per_tile = bits.numel() // tiles
    words = max(WORDS, per_tile)
    summed = tiles > TILES_SUMMED_IN_PLACE
    if summed:
        counts = counts.cumsum(0, dtype=torch.int32)
    launch(
        expand_kernel, (triton.cdiv(bits.numel(), words),),
        total.out, total.divisor, bits, counts, indices, values, None, found,
        bits.numel(), indices.numel(), total.out.numel(), 0, 0, 0,
        like=total.out, warps=EXPAND_WARPS,
        TILES=words // per_tile, WORDS=words, SUMMED=summed, ROWS=False,
    )  # fmt: skip


def select_keys(total: Sum, key: int) -> Entries:
    """Mark and expand. The only host synchronization is between the two, to allocate exactly what is needed."""
    out, marks = total.out, empty_marks(total.out)
    mark(total, memory.scratch(1, torch.int32, out).fill_(key), marks)
    entries = Entries.empty((int(marks.counts.sum()),), out)
    expand(total, marks, *entries, memory.scratch(1, torch.int64, out))
    return entries


def count_inside(values: torch.Tensor, key: int, span: torch.Tensor) -> torch.Tensor:
    """Return how many of the ``values`` in the ``span`` reach the ``key``, int32 ``[1]``."""
    marks = empty_marks(values)
    mark(Sum(values, None, values), memory.scratch(1, torch.int32, values).fill_(key), marks, span=span)
    return marks.counts.sum(dtype=torch.int32).reshape(1)
