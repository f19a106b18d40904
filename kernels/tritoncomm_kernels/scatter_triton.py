"""Kernels of :mod:`tritoncomm_kernels.scatter`: sums in rank order, without float atomics.

Lists are added one after the other, in launches of their own. Indices are unique inside a list. Every access through an
index has a bounds check.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.bits_triton import bits_in, lowest_bit
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.expand_triton import SCAN_CHUNK, scan_counts_kernel

WARPS = 8
BLOCK = 1024
WORDS = 1024


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=["indices_ptr"])
def mark_indices_kernel(
    indices_ptr, bits_ptr, invalid_ptr, count, n, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Set the bit of every index of one list. With ``COUNT``, also count the indices that are invalid."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    index = tl.load(indices_ptr + at, mask=held, other=-1)
    inside = (index >= 0) & (index < n)
    tl.atomic_or(bits_ptr + (index >> 5), 1 << (index & 31), mask=inside, sem="relaxed")
    if COUNT:
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
                    indices,
                    bits,
                    invalid,
                    indices.numel(),
                    n,
                    COUNT=True,
                    BLOCK=BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
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
