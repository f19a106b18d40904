"""Dispatch rule: CUDA tensors use the Triton kernel if Triton 3.6 or newer is installed, others the torch reference."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from tritoncomm_kernels import devices

VARIABLE = "TRITONCOMM_KERNELS"
CHOICES = ("auto", "torch", "triton")
OLDEST_TRITON = (3, 6)


def triton_runs(tensor: torch.Tensor) -> bool:
    """Return True if operations on ``tensor`` launch a Triton kernel.

    The environment variable ``TRITONCOMM_KERNELS`` is read at every call. ``torch`` forces the reference. ``triton``
    forces the kernel, which needs Triton's interpreter on CPU tensors. ``auto`` is the default. It warns once if a GPU
    tensor takes the reference because Triton is missing or too old. Raises ``ValueError`` for any other value, and
    ``RuntimeError`` if ``triton`` is set but the kernel cannot run.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r}: set it to one of {', '.join(CHOICES)}")
    if choice == "triton":
        _demand(tensor)
        return True
    if choice == "torch" or not devices.runs_triton(tensor):
        return False
    if not _installed():
        _warn_about_reference()
        return False
    return True


def kernel(module: str) -> Any:
    """Return the kernel module ``module`` (a ``*_triton`` name), imported at its first use."""
    return importlib.import_module(f"tritoncomm_kernels.{module}")


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the device of ``tensor`` is current. Triton launches on the current device."""
    return devices.on(tensor.device)


def interpreted() -> bool:
    """Return True if Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    """Return True if a Triton version is installed that the kernels support. Older ones use the reference."""
    found = _version()
    return found is not None and tuple(int(part) for part in re.findall(r"\d+", found)[:2]) >= OLDEST_TRITON


def _version() -> str | None:
    try:
        found: str = importlib.import_module("triton").__version__  # the distribution has other names on some platforms
    except ImportError:
        return None
    return found


@cache
def _warn_about_reference() -> None:
    """Warn, once per process, that operations on GPU tensors run without Triton kernels."""
    found = _version()
    state = "is not installed" if found is None else f"is version {found}"
    warnings.warn(
        f"Triton {state}: operations on GPU tensors run as several PyTorch operations, which is slower. To launch "
        f"Triton kernels, install Triton {'.'.join(map(str, OLDEST_TRITON))} or newer. To silence this, set "
        f"{VARIABLE}=torch",
        RuntimeWarning,
        stacklevel=3,
    )


def _demand(tensor: torch.Tensor) -> None:
    if not _installed():
        needed = ".".join(map(str, OLDEST_TRITON))
        raise RuntimeError(f"{VARIABLE}=triton needs Triton {needed} or newer: install it, or unset {VARIABLE}")
    if not devices.runs_triton(tensor) and not interpreted():
        raise RuntimeError(
            f"{VARIABLE}=triton, but the tensor is on {tensor.device}: move it to a GPU, set TRITON_INTERPRET=1 "
            f"before the first import to run the kernels in Triton's interpreter, or unset {VARIABLE}"
        )
