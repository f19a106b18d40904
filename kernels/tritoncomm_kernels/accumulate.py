"""Add the gradient to the residual, in fp32 with one rounding."""

from __future__ import annotations

import torch

from tritoncomm_kernels.checks import GRADIENT_DTYPES, check_apart, check_in_place, check_same, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs


def accumulate(residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out = residual + gradient`` and return ``out``.

    ``residual`` and ``out`` are contiguous fp32 ``[n]`` and may be the same tensor. ``gradient`` is contiguous fp32,
    bf16 or fp16 ``[n]`` and shares no memory with ``out``. Raises ``ValueError`` naming the invalid argument.
    """
    check_addends(residual, gradient, out)
    if out.numel() == 0:
        return out
    if triton_runs(out):
        kernel("accumulate_triton").accumulate(residual, gradient, out)
        return out
    return add(residual, gradient, out)


def add(residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Reference of :func:`accumulate`."""
    return torch.add(residual, gradient, out=out)


def check_addends(residual: torch.Tensor, gradient: torch.Tensor | None, out: torch.Tensor) -> None:
    """Raise ``ValueError`` unless dtypes, sizes, devices and aliasing are valid.

    Without ``gradient``, nothing is added: the other two must be the same tensor.
    """
    if gradient is None:
        check_vector("out", out)
        check_same("residual", residual, "out", out)
        return
    check_vector("residual", residual)
    check_vector("gradient", gradient, dtypes=GRADIENT_DTYPES, numel=residual.numel(), like=residual)
    check_vector("out", out, numel=residual.numel(), like=residual)
    check_apart("gradient", gradient, "out", out)
    check_in_place("residual", residual, "out", out)
