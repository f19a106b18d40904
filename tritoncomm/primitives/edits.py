"""Changes of a vector in place, of entries with padding."""

from __future__ import annotations

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Padded, Workspace


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
