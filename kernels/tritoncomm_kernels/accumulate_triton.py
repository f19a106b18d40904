"""Kernel of :mod:`tritoncomm_kernels.accumulate`: 12 bytes per fp32 element, 10 with a 16-bit gradient."""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.dispatch import on_device_of

# 16 elements per thread: 32 double the registers of the larger kernels, and one size keeps tiles comparable.
TILE, WARPS = 4096, 8


@triton.jit
def add_tile(residual_ptr, gradient_ptr, out_ptr, factor, at, n, ADD: tl.constexpr, WHOLE: tl.constexpr):
    """``fma(gradient, factor, residual)`` at ``at``, stored to ``out``; without ``ADD`` just the residual.

    ``WHOLE`` tiles need no mask, and only then Triton uses 128-bit accesses whatever n is.
    """
    inside = None if WHOLE else at < n
    other = None if WHOLE else 0.0
    total = tl.load(residual_ptr + at, mask=inside, other=other)
    if ADD:
        gradient = tl.load(gradient_ptr + at, mask=inside, other=other, eviction_policy="evict_first")
        total = tl.fma(gradient.to(tl.float32), factor, total)
        tl.store(out_ptr + at, total, mask=inside)
    return total


@triton.jit(do_not_specialize=["n", "scale"])
def accumulate_kernel(residual_ptr, gradient_ptr, out_ptr, scale, n, TILE: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr):
    """``out = fma(gradient, scale, residual)`` on one tile."""
    factor = tl.load(scale) if SCALE_IN_MEMORY else scale
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        add_tile(residual_ptr, gradient_ptr, out_ptr, factor, at, n, ADD=True, WHOLE=True)
    else:
        add_tile(residual_ptr, gradient_ptr, out_ptr, factor, at, n, ADD=True, WHOLE=False)


def warps(tile: int) -> int:
    """At least 128 elements for each warp.

    With fewer than it has threads, several would hold one element, and one could read it in place after
    another has written it.
    """
    return max(1, min(WARPS, tile // 128))


def accumulate(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    scale: float | torch.Tensor,
    *,
    tile: int = TILE,
) -> None:
    """Launch; the arguments have been checked and are not empty."""
    n = residual.numel()
    with on_device_of(out):
        accumulate_kernel[(triton.cdiv(n, tile),)](
            residual,
            gradient,
            out,
            scale,
            n,
            TILE=tile,
            SCALE_IN_MEMORY=isinstance(scale, torch.Tensor),
            num_warps=warps(tile),
            enable_fp_fusion=False,
        )
