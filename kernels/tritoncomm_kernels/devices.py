"""What depends on the kind of a device, in both packages: which kinds there are, and what the host does for each.

A kind is the type of a ``torch.device``. To add one, add it to ``_BACKENDS``, and to :func:`runs_triton` if the kernels
run on it. Its module in torch, such as ``torch.xpu``, must have the functions that are used here. Elsewhere, only
``"cpu"`` is told from all other kinds, because the host reads a CPU tensor without a copy and without a wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Kinds of accelerators, whose host only enqueues work, and the backend of torch.distributed for each.
_BACKENDS = {"cuda": "nccl"}
KINDS = ("cpu", *_BACKENDS)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return True if compiled Triton kernels run on the device of ``tensor``."""
    return tensor.is_cuda  # faster than its device.type


def is_asynchronous(device: torch.device) -> bool:
    """Return True if the host only enqueues work on ``device``, in streams.

    Each launch then costs time, and to read a result the host waits for all work before it. Kinds that are not in
    ``KINDS`` are treated like a CPU here.
    """
    return device.type in _BACKENDS


def has_addresses(device: torch.device) -> bool:
    """Return True if ``data_ptr()`` of a tensor on ``device`` is an address in memory."""
    return device.type in KINDS


def available() -> str:
    """Return the kind of the accelerator of this machine, or ``"cpu"``."""
    return next((kind for kind in _BACKENDS if _module(kind).is_available()), "cpu")


def backend_of(kind: str) -> str:
    """Return the backend of a process group for tensors on devices of ``kind``."""
    return _BACKENDS.get(kind, "gloo")


def chosen(kind: str, index: int) -> torch.device:
    """Make device ``index`` of ``kind`` the current one, and return it. All indices are the same CPU."""
    if kind == "cpu":
        return torch.device(kind)
    _module(kind).set_device(index)
    return torch.device(kind, index)


def on(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current one of its kind. For a CPU and for None it does nothing."""
    if device is None or not is_asynchronous(device):
        return nullcontext()
    context: AbstractContextManager[Any] = _module(device.type).device(device)
    return context


def synchronize(device: torch.device) -> None:
    """Wait for all work on ``device``. A CPU has none left."""
    if is_asynchronous(device):
        _module(device.type).synchronize(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of ``device``, or None on a CPU."""
    return _module(device.type).current_stream(device) if is_asynchronous(device) else None


def timed_event(device: torch.device) -> Any:
    """Return an event with a time, recorded on the current stream of ``device``, an accelerator."""
    event = _module(device.type).Event(enable_timing=True)
    event.record(current_stream(device))  # the device may not be the current one
    return event


def has_ended(event: Any, device: torch.device) -> bool:
    """Return True if ``device``, an accelerator, has reached ``event``.

    With another current device, such as that of a new thread, a query would create a context there, which takes half a
    gigabyte.
    """
    with on(device):
        return bool(event.query())


def _module(kind: str) -> Any:
    return getattr(torch, kind)
