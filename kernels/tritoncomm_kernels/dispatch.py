"""Dispatch rule: operations on GPU tensors launch Triton kernels, and those on CPU tensors run their reference."""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from typing import Any

import torch

from tritoncomm_kernels import devices

VARIABLE = "TRITONCOMM_KERNELS"
CHOICES = ("auto", "triton")
OLDEST_TRITON = (3, 6)
MAX_ROWS = 65535  # limit of the second dimension of a CUDA grid
choice = os.environ.get(VARIABLE) or "auto"
"""The value of the environment variable ``TRITONCOMM_KERNELS`` when this module was imported."""


def triton_runs(tensor: torch.Tensor) -> bool:
    """Return True if operations on ``tensor`` launch a Triton kernel, which those on a GPU do.

    Kernels also run on CPU tensors, in Triton's interpreter, if :data:`choice` is ``triton``. ``auto`` is the default.
    Raises ``ValueError`` for any other value, and ``RuntimeError`` if a kernel is needed and cannot run.
    """
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r}: set it to one of {', '.join(CHOICES)}")
    on_gpu = devices.runs_triton(tensor)
    if not on_gpu and choice == "auto":
        return False
    if not _installed():
        found = _version()
        state = "is not installed" if found is None else f"is version {found}"
        raise RuntimeError(
            f"Triton {state}, and operations on a GPU need Triton {'.'.join(map(str, OLDEST_TRITON))} or newer, which "
            "comes with torch 2.11: install it, or move the model to a CPU"
        )
    if not on_gpu and not interpreted():
        raise RuntimeError(
            f"{VARIABLE}=triton, but the tensor is on {tensor.device}: move it to a GPU, set TRITON_INTERPRET=1 "
            f"before the first import to run the kernels in Triton's interpreter, or unset {VARIABLE}"
        )
    return True


def kernel(module: str) -> Any:
    """Return the kernel module ``module`` (a ``*_triton`` name), imported at its first use."""
    return importlib.import_module(f"tritoncomm_kernels.{module}")


def launch(
    function: Any, grid: tuple[int, ...], *arguments: Any, like: torch.Tensor, warps: int, **constants: Any
) -> None:
    """Launch the kernel ``function`` on the device of ``like``, with ``warps`` warps per program.

    Triton launches on the current device. Products and sums are rounded separately. The second dimension of the grid is
    that of rows. Raises ``ValueError`` for more of them than a GPU can handle in one launch.
    """
    if grid[-1] > MAX_ROWS and len(grid) > 1:
        raise ValueError(f"{grid[-1]} rows are too many for one launch: pass at most {MAX_ROWS}")
    with devices.on(like.device):
        function[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)


def interpreted() -> bool:
    """Return True if Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    """Return True if a Triton version is installed that the kernels support."""
    found = _version()
    return found is not None and tuple(int(part) for part in re.findall(r"\d+", found)[:2]) >= OLDEST_TRITON


def _version() -> str | None:
    try:
        found: str = importlib.import_module("triton").__version__  # the distribution has other names on some platforms
    except ImportError:
        return None
    return found
