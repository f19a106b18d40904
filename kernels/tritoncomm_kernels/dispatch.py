"""One rule: CUDA tensor and Triton present -> kernel, else the torch reference."""

from __future__ import annotations

import importlib
import os
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

VARIABLE = "TRITONCOMM_KERNELS"
CHOICES = ("auto", "torch", "triton")
OLDEST_TRITON = (3, 6)


def triton_runs(tensor: torch.Tensor) -> bool:
    """True when operations on ``tensor`` launch a Triton kernel.

    The environment variable ``TRITONCOMM_KERNELS``, read at every call, forces it: ``torch`` never,
    ``triton`` always, which on CPU tensors needs Triton's interpreter. Raises ``ValueError`` for
    another value of the variable and ``RuntimeError`` when what it demands is not possible.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r}: set it to one of {', '.join(CHOICES)}")
    if choice == "triton":
        _demand(tensor)
        return True
    return choice == "auto" and tensor.device.type == "cuda" and _installed()


def kernel(module: str) -> Any:
    """The module of that name with Triton kernels, imported at its first use."""
    return importlib.import_module(f"tritoncomm_kernels.{module}")


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``tensor`` current: Triton launches there and nowhere else."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def interpreted() -> bool:
    """True when Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    """Whether there is a Triton on which the kernels are tested; older ones get the reference."""
    try:
        found: str = importlib.import_module("triton").__version__  # the distribution is not called triton everywhere
    except ImportError:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2]) >= OLDEST_TRITON


def _demand(tensor: torch.Tensor) -> None:
    if not _installed():
        needed = ".".join(map(str, OLDEST_TRITON))
        raise RuntimeError(f"{VARIABLE}=triton needs Triton {needed} or newer: install it, or unset {VARIABLE}")
    if tensor.device.type != "cuda" and not interpreted():
        raise RuntimeError(
            f"{VARIABLE}=triton, but the tensor is on {tensor.device}: move it to a GPU, set TRITON_INTERPRET=1 "
            f"before the first import to run the kernels interpreted, or unset {VARIABLE}"
        )
