"""Scratch memory that outlives a step."""

from __future__ import annotations

import torch


class Workspace:
    """Named device buffers, allocated at first use and kept: no allocation in later steps of the same size.

    Whoever owns a vector owns one workspace for it. Two streams must not share one: what a kernel leaves
    in a buffer is read by the next. A larger request replaces a buffer, so capture a CUDA graph only after
    a call of the largest size.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def buffer(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first ``size`` elements of the buffer ``name``; zeros when new, else what was left there."""
        held = self._buffers.get((name, dtype, device))
        if held is None or held.numel() < size:
            held = torch.zeros(size, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = held
        return held[:size]

    def holds(self, name: str, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the buffer ``name`` exists, so that it may carry something over from an earlier step."""
        return (name, dtype, device) in self._buffers

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.numel() * held.element_size() for held in self._buffers.values())
