"""Kernel of :mod:`tritoncomm_kernels.mark`. It reads each input once, and writes the sum and one bit per element.

Compaction is a separate kernel that reads the bit mask. One scattered store per element here would cost more
instructions than the memory traffic can hide. See kernels/README.md.
"""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.accumulate_triton import add_tile, warps
from tritoncomm_kernels.bits_triton import key_of, pack_words, threshold_key
from tritoncomm_kernels.dispatch import on_device_of


@triton.jit
def write_marks(
    keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr,
    TILE: tl.constexpr, SPAN: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Compare the keys with the threshold, pack the bits, count them, and flag Inf and NaN."""
    chosen = keys >= threshold_key(threshold_ptr, IS_KEY)
    if SPAN:
        chosen = chosen & (at >= tl.load(span_ptr)) & (at < tl.load(span_ptr + 1))
    tile = tl.program_id(0)
    tl.store(bits_ptr + tile * (TILE // 32) + tl.arange(0, TILE // 32), pack_words(chosen, TILE))
    tl.store(counts_ptr + tile, tl.sum(chosen.to(tl.int32), axis=0))
    tl.atomic_or(flags_ptr, 1, mask=tl.max(keys, axis=0) >= 0x7F800000, sem="relaxed")


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["span_ptr"])
def mark_kernel(
    residual_ptr, gradient_ptr, out_ptr, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, n,
    TILE: tl.constexpr, ADD: tl.constexpr, SPAN: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Mark the elements of one tile that reach the threshold. With ``ADD``, first add and store the sum."""
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        keys = key_of(add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=ADD, WHOLE=True))
    else:
        total = add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=ADD, WHOLE=False)
        keys = tl.where(at < n, key_of(total), 0)
    write_marks(keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, TILE, SPAN, IS_KEY)


def mark(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    threshold: torch.Tensor,
    span: torch.Tensor | None,
    bits: torch.Tensor,
    counts: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Launch the kernel on checked, non-empty arguments. Without ``gradient`` nothing is added."""
    tile = 32 * bits.numel() // counts.numel()
    with on_device_of(out):
        mark_kernel[(counts.numel(),)](
            residual,
            gradient,
            out,
            threshold,
            span,
            bits,
            counts,
            flags,
            out.numel(),
            TILE=tile,
            ADD=gradient is not None,
            SPAN=span is not None,
            IS_KEY=threshold.dtype == torch.int32,
            num_warps=warps(tile),
            enable_fp_fusion=False,
        )
