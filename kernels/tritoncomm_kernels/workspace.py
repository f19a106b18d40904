"""Scratch memory that is reused between steps."""

from __future__ import annotations

import torch

from tritoncomm_kernels.devices import is_asynchronous


class Workspace:
    """Named device buffers. They are allocated at first use and kept, so later steps of the same size allocate nothing.

    Each vector has its own workspace, which belongs to the owner of the vector. Two streams must not share a
    workspace, because kernels pass data to later kernels through its buffers. A larger request replaces a buffer.
    Therefore capture a CUDA graph only after a call of the largest size.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def buffer(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the first ``size`` elements of the buffer ``name``. A new buffer is zero. Others keep their data."""
        held = self._buffers.get((name, dtype, device))
        if held is None or held.numel() < size:
            held = torch.zeros(size, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = held
        return held[:size]

    def holds(self, name: str, dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if the buffer ``name`` exists and may hold data of an earlier step."""
        return (name, dtype, device) in self._buffers

    @property
    def nbytes(self) -> int:
        """Total size of all buffers in bytes."""
        return sum(held.numel() * held.element_size() for held in self._buffers.values())


def copied_to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of ``host`` on ``device``. A GPU copies it from pinned memory, so the host does not wait."""
    return host.pin_memory().to(device, non_blocking=True) if is_asynchronous(device) else host.to(device)
