"""Kernels of :mod:`tritoncomm_kernels.mark`. They read each input once, and write the sum and one bit per element.

Compaction is a separate kernel that reads the bit mask. One scattered store per element here would cost more
instructions than the memory traffic can hide. See kernels/README.md.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.accumulate_triton import add_tile, warps
from tritoncomm_kernels.bits_triton import key_of, pack_words, threshold_key
from tritoncomm_kernels.dispatch import on_device_of


@triton.jit
def momentum_tile(gradient_ptr, velocity_ptr, residual_ptr, factor, momentum, at, n, WHOLE: tl.constexpr):
    """Update velocity and residual at ``at`` and return the residual."""
    inside = None if WHOLE else at < n
    other = None if WHOLE else 0.0
    gradient = tl.load(gradient_ptr + at, mask=inside, other=other, eviction_policy="evict_first").to(tl.float32)
    velocity = tl.load(velocity_ptr + at, mask=inside, other=other)
    velocity = tl.fma(velocity, momentum, gradient * factor)
    tl.store(velocity_ptr + at, velocity, mask=inside)
    total = tl.load(residual_ptr + at, mask=inside, other=other) + velocity
    tl.store(residual_ptr + at, total, mask=inside)
    return total


@triton.jit
def write_marks(
    keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr,
    TILE: tl.constexpr, SPAN: tl.constexpr, SELECT_NAN: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Compare the keys with the threshold, pack the bits, count them, and flag Inf and NaN."""
    chosen = keys >= threshold_key(threshold_ptr, IS_KEY)
    if not SELECT_NAN:
        chosen = chosen & (keys <= 0x7F800000)
    if SPAN:
        chosen = chosen & (at >= tl.load(span_ptr)) & (at < tl.load(span_ptr + 1))
    tile = tl.program_id(0)
    tl.store(bits_ptr + tile * (TILE // 32) + tl.arange(0, TILE // 32), pack_words(chosen, TILE))
    tl.store(counts_ptr + tile, tl.sum(chosen.to(tl.int32), axis=0))
    tl.atomic_or(flags_ptr, 1, mask=tl.max(keys, axis=0) >= 0x7F800000, sem="relaxed")


@triton.jit(do_not_specialize=["n", "scale"], do_not_specialize_on_alignment=["span_ptr"])
def mark_kernel(
    residual_ptr, gradient_ptr, out_ptr, scale, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, n,
    TILE: tl.constexpr, ADD: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr,
    SPAN: tl.constexpr, SELECT_NAN: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Mark the elements of one tile that reach the threshold. With ``ADD``, first add and store the sum."""
    factor = tl.load(scale) if SCALE_IN_MEMORY else scale
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        keys = key_of(add_tile(residual_ptr, gradient_ptr, out_ptr, factor, at, n, ADD=ADD, WHOLE=True))
    else:
        # Lanes beyond the end must not be marked, even if 0 * scale is NaN.
        total = add_tile(residual_ptr, gradient_ptr, out_ptr, factor, at, n, ADD=ADD, WHOLE=False)
        keys = tl.where(at < n, key_of(total), 0)
    write_marks(keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, TILE, SPAN, SELECT_NAN, IS_KEY)


@triton.jit(do_not_specialize=["n", "scale", "momentum"])
def mark_momentum_kernel(
    gradient_ptr, velocity_ptr, residual_ptr, scale, momentum, threshold_ptr, span_ptr,
    bits_ptr, counts_ptr, flags_ptr, n,
    TILE: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr,
    SPAN: tl.constexpr, SELECT_NAN: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Add momentum to velocity and residual in place, and set a bit for each residual that reaches the threshold."""
    factor = tl.load(scale) if SCALE_IN_MEMORY else scale
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        keys = key_of(momentum_tile(gradient_ptr, velocity_ptr, residual_ptr, factor, momentum, at, n, WHOLE=True))
    else:
        total = momentum_tile(gradient_ptr, velocity_ptr, residual_ptr, factor, momentum, at, n, WHOLE=False)
        keys = tl.where(at < n, key_of(total), 0)
    write_marks(keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, TILE, SPAN, SELECT_NAN, IS_KEY)


def mark(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    scale: float | torch.Tensor,
    threshold: torch.Tensor,
    span: torch.Tensor | None,
    bits: torch.Tensor,
    counts: torch.Tensor,
    flags: torch.Tensor,
    *,
    select_nan: bool,
) -> None:
    """Launch the kernel on checked, non-empty arguments. Without ``gradient`` nothing is added."""
    with on_device_of(out):
        mark_kernel[(counts.numel(),)](
            residual,
            gradient,
            out,
            scale,
            threshold,
            span,
            bits,
            counts,
            flags,
            out.numel(),
            ADD=gradient is not None,
            **_options(scale, threshold, span, bits, counts, select_nan=select_nan),
        )


def mark_momentum(
    gradient: torch.Tensor,
    velocity: torch.Tensor,
    residual: torch.Tensor,
    scale: float | torch.Tensor,
    momentum: float,
    threshold: torch.Tensor,
    span: torch.Tensor | None,
    bits: torch.Tensor,
    counts: torch.Tensor,
    flags: torch.Tensor,
    *,
    select_nan: bool,
) -> None:
    """Launch the kernel on checked, non-empty arguments."""
    with on_device_of(residual):
        mark_momentum_kernel[(counts.numel(),)](
            gradient,
            velocity,
            residual,
            scale,
            momentum,
            threshold,
            span,
            bits,
            counts,
            flags,
            residual.numel(),
            **_options(scale, threshold, span, bits, counts, select_nan=select_nan),
        )


def _options(
    scale: float | torch.Tensor,
    threshold: torch.Tensor,
    span: torch.Tensor | None,
    bits: torch.Tensor,
    counts: torch.Tensor,
    *,
    select_nan: bool,
) -> dict[str, Any]:
    """Return the compile-time constants and launch options that both kernels share."""
    tile = 32 * bits.numel() // counts.numel()
    return {
        "TILE": tile,
        "SCALE_IN_MEMORY": isinstance(scale, torch.Tensor),
        "SPAN": span is not None,
        "SELECT_NAN": select_nan,
        "IS_KEY": threshold.dtype == torch.int32,
        "num_warps": warps(tile),
        "enable_fp_fusion": False,
    }
