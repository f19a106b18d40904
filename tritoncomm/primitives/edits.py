"""Changes of a vector in place: of entries with padding, and ones that can be undone without a copy of the vector."""

from __future__ import annotations

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Padded, Selection, Workspace


def add_rest(
    values: torch.Tensor, entries: Padded, sent: Padded, *, share: float = 1.0, workspace: Workspace
) -> torch.Tensor:
    """Add ``share`` times what rounding has cut off to ``values`` (fp32 ``[n]``): ``entries`` less what was ``sent``.

    Nothing waits for a GPU. Returns the new values at ``entries``.
    """
    held = kernels.values_at(values, entries.indices)
    kernels.set_at(values, entries)
    kernels.add_rows(values, sent, scale=-1.0, workspace=workspace)
    rest = kernels.values_at(values, entries.indices)
    left = held + (rest if share == 1.0 else share * rest)
    kernels.set_at(values, entries._replace(values=left))
    return left


def add_truncated(
    values: torch.Tensor, union: Padded, kept: Padded, *, share: float = 1.0, workspace: Workspace
) -> None:
    """Add ``share`` times the entries of ``union``, but those that were ``kept``, to ``values`` (fp32 ``[n]``).

    Nothing waits for a GPU.
    """
    before = kernels.values_at(values, kept.indices)
    kernels.add_rows(values, union, scale=share, workspace=workspace)
    kernels.set_at(values, kept._replace(values=before))


class Edits:
    """Changes of ``values`` (fp32 ``[n]``), in place. :meth:`undo` restores every bit.

    What a change overwrites is kept. This costs as much as the changed entries, and not as much as the vector.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._before: list[Selection] = []

    def clear(self, entries: Selection) -> None:
        """Set the values at ``entries`` to zero. ``entries`` hold the present values."""
        self._before.append(entries)
        self.values.index_fill_(0, entries.indices.long(), 0.0)

    def add(self, indices: torch.Tensor, terms: torch.Tensor) -> None:
        """Add ``terms`` to the values at ``indices`` (unique)."""
        self._before.append(Selection.of(indices, self.at(indices)))
        kernels.scatter_add(self.values, indices, terms)

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the present values at ``indices``."""
        return self.values.index_select(0, indices)

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        while self._before:
            entries = self._before.pop()
            self.values.index_copy_(0, entries.indices.long(), entries.values)
