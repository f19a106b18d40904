"""State tensors of many parameters in one buffer, so that one call can read or write entries of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
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


class StepCounts:
    """The entry ``step`` of several states as views of one tensor, to read and count them at once.

    All are equal, unless somebody else writes to them. To pickle a single one takes the memory of all, as for every
    view. ``torch.save`` of a whole state dict writes their memory once.
    """

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        self._counts = torch.stack([state["step"] for state in states])
        self._held = list(self._counts.unbind())
        for state, count in zip(states, self._held, strict=True):
            state["step"] = count

    @classmethod
    def of(cls, states: Sequence[dict[str, Any]]) -> StepCounts | None:
        """Return the counts of complete ``states``. Return None if they differ, or are not plain CPU tensors."""
        counts = [state["step"] for state in states]
        kinds = {(type(count), count.device.type, count.dtype, count.dim(), count.item()) for count in counts}
        return cls(states) if len(kinds) == 1 and next(iter(kinds))[:2] == (torch.Tensor, "cpu") else None

    def common(self, states: Sequence[dict[str, Any]]) -> int | None:
        """Return the step of all ``states``. Return None if counts differ, or a tensor has been replaced."""
        if len(self._held) != len(states) or not all(map(is_, self._held, [state.get("step") for state in states])):
            return None
        counts = self._counts.tolist()
        return int(counts[0]) if counts.count(counts[0]) == len(counts) else None

    def advance(self) -> None:
        """Count a step in all states."""
        self._counts += 1


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
