"""Add a scaled gradient to the residual, in fp32 with one rounding."""

from __future__ import annotations

import torch

from tritoncomm_kernels.checks import GRADIENT_DTYPES, check_apart, check_in_place, check_scale, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs


def accumulate(
    residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Compute ``out = residual + scale * gradient`` with one rounding and return ``out``.

    ``residual`` and ``out`` are contiguous fp32 ``[n]`` and may be the same tensor. ``gradient`` is contiguous fp32,
    bf16 or fp16 ``[n]`` and shares no memory with ``out``. ``scale`` is a finite number, or an fp32 ``[1]`` tensor on
    the same device. The value of a tensor is not checked. Raises ``ValueError`` naming the invalid argument.
    """
    check_addends(residual, gradient, out, scale)
    if out.numel() == 0:
        return out
    if triton_runs(out):
        kernel("accumulate_triton").accumulate(residual, gradient, out, as_argument(scale))
        return out
    return add(residual, gradient, out, scale)


def add(
    residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Reference of :func:`accumulate`. torch's scaled addition rounds once, on the CPU and on CUDA."""
    return torch.add(residual, gradient, alpha=float(scale), out=out)


def as_argument(scale: float | torch.Tensor) -> float | torch.Tensor:
    """Return ``scale`` as a kernel argument. Triton compiles a separate variant for int and rejects numpy scalars."""
    return scale if isinstance(scale, torch.Tensor) else float(scale)


def check_addends(
    residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, scale: float | torch.Tensor = 1.0
) -> None:
    """Raise ``ValueError`` unless dtypes, sizes, devices, aliasing and ``scale`` are valid."""
    check_vector("residual", residual)
    check_vector("gradient", gradient, dtypes=GRADIENT_DTYPES, numel=residual.numel(), like=residual)
    check_vector("out", out, numel=residual.numel(), like=residual)
    check_apart("gradient", gradient, "out", out)
    check_in_place("residual", residual, "out", out)
    if isinstance(scale, torch.Tensor):
        check_vector("scale", scale, numel=1, like=residual)
    else:
        check_scale(scale)
