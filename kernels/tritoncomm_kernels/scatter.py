"""Sparse lists back into dense vectors, and several lists into one, summed in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm_kernels.compact import positions

SparseList = tuple[torch.Tensor, torch.Tensor]


def scatter_add(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """``out[indices] += values``; ``indices`` (int32 or int64) must be unique, so order cannot matter."""
    out.index_add_(0, indices, values)


def decompress(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``out`` (``[n]``) with the dense form of one sparse list; returns ``out``."""
    return out.zero_().index_copy_(0, indices.long(), values)


def merge(lists: Sequence[SparseList]) -> SparseList:
    """Sum sparse lists of one vector, each ascending and unique by index; at least one list.

    Returns the ascending union of the supports (int32) and the sums (fp32). Per coordinate the terms
    are added in the order of ``lists``, so every rank that holds the same lists gets the same bits.
    """
    joined, order = torch.sort(torch.cat([indices for indices, _ in lists]), stable=True)
    union, places = torch.unique_consecutive(joined, return_inverse=True)
    where = torch.empty_like(places)
    where[order] = places
    sums = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
    # One list at a time: inside a list indices are unique, so the order of additions is that of the lists
    # on every device.
    starts = torch.split(where, [indices.numel() for indices, _ in lists])
    for at, (_, values) in zip(starts, lists, strict=True):
        scatter_add(sums, at, values)
    return union, sums


def common_positions(sought: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Positions in ``sought`` whose element also stands in ``among``; both ascending and unique."""
    if among.numel() == 0 or sought.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=sought.device)
    where = torch.searchsorted(among, sought).clamp_(max=among.numel() - 1)
    return positions(among[where] == sought)
