"""State tensors of many parameters in one buffer, so that one call can read or write entries of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def share_buffers(states: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Replace the tensors of each name by views of one new buffer, if each of them has memory of its own.

    The views have the values and shapes of the tensors. Only contiguous CPU tensors of one dtype are replaced. Tensors
    that are views already keep their memory, for example those of a checkpoint in which they shared a buffer.

    Args:
        states: State of each parameter.
        names: Names of the entries to replace. Each state has a tensor under each name.
    """
    for name in names:
        tensors = [state[name] for state in states]
        if len(tensors) > 1 and all(_movable(tensor, tensors[0].dtype) for tensor in tensors):
            buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
            views = torch.split(buffer, [tensor.numel() for tensor in tensors])
            for state, view, tensor in zip(states, views, tensors, strict=True):
                state[name] = view.view(tensor.shape)


def _movable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if ``tensor`` is a plain CPU tensor of ``dtype`` that uses all of its memory, within this process."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.untyped_storage().is_shared()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
