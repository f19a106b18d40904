"""Kernel of :mod:`tritoncomm_kernels.accumulate`. It moves 12 bytes per element, or 10 with a 16-bit gradient."""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.dispatch import on_device_of

# 16 elements per thread. 32 would double the registers of the larger kernels. All kernels use one size, so their tiles
# are comparable.
TILE, WARPS = 4096, 8


@triton.jit
def add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD: tl.constexpr, WHOLE: tl.constexpr):
    """Return ``residual + gradient`` at ``at`` and store it to ``out``.

    Without ``ADD``, return the residual and store nothing. ``WHOLE`` means that the tile ends at or before ``n`` and
    needs no mask. Triton then uses 128-bit accesses whatever ``n`` is.
    """
    inside = None if WHOLE else at < n
    other = None if WHOLE else 0.0
    total = tl.load(residual_ptr + at, mask=inside, other=other)
    if ADD:
        gradient = tl.load(gradient_ptr + at, mask=inside, other=other, eviction_policy="evict_first")
        total = total + gradient.to(tl.float32)
        tl.store(out_ptr + at, total, mask=inside)
    return total


@triton.jit(do_not_specialize=["n"])
def accumulate_kernel(residual_ptr, gradient_ptr, out_ptr, n, TILE: tl.constexpr):
    """Compute ``out = residual + gradient`` on one tile."""
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if start + TILE <= n:
        add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=True, WHOLE=True)
    else:
        add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=True, WHOLE=False)


def warps(tile: int) -> int:
    """Return the number of warps for a tile, with at least 128 elements per warp.

    With fewer elements than threads, several threads would hold the same element. In place, one thread could then
    read an element after another has written it.
    """
    return max(1, min(WARPS, tile // 128))


def accumulate(residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, *, tile: int = TILE) -> None:
    """Launch the kernel on checked, non-empty arguments."""
    n = residual.numel()
    with on_device_of(out):
        accumulate_kernel[(triton.cdiv(n, tile),)](
            residual,
            gradient,
            out,
            n,
            TILE=tile,
            num_warps=warps(tile),
            enable_fp_fusion=False,
        )
