"""Residual plus gradient, in fp32, with one rounding."""

from __future__ import annotations

import math

import torch

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_LIMIT = 2**31


def accumulate(residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``out = residual + scale * gradient`` with one rounding; returns ``out``.

    ``residual`` and ``out`` are contiguous fp32 ``[n]`` and may be the same tensor; ``gradient`` is
    contiguous fp32, bf16 or fp16 ``[n]``. Raises ``ValueError`` naming the argument that does not fit.
    """
    check_vector("residual", residual)
    check_vector("gradient", gradient, dtypes=GRADIENT_DTYPES, numel=residual.numel())
    check_vector("out", out, numel=residual.numel())
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite: unscale the gradient first")
    return torch.add(residual, gradient, alpha=scale, out=out)


def check_vector(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    numel: int | None = None,
) -> None:
    """Raise ``ValueError`` naming ``name`` unless it is a contiguous 1-D tensor of a legal dtype."""
    if tensor.dtype not in dtypes:
        legal = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}: convert it to {legal}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: flatten it to one dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: call .contiguous() on it")
    if tensor.numel() >= INDEX_LIMIT:
        raise ValueError(f"{name} has {tensor.numel()} elements: split it below 2^31, indices are int32")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
