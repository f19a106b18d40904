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


def merge(lists: Sequence[SparseList], numel: int) -> SparseList:
    """Sum sparse lists of one vector of ``numel`` elements; each ascending and unique by index.

    Returns the ascending union of the supports (int32) and the sums (fp32). Per coordinate the terms
    are added in the order of ``lists``, so every rank that holds the same lists gets the same bits.
    """
    supports = [indices for indices, _ in lists]
    union = _union(supports, numel)
    sums = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
    for indices, values in lists:
        scatter_add(sums, torch.searchsorted(union, indices), values)
    return union, sums


def common_positions(sought: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Positions in ``sought`` whose element also stands in ``among``; both ascending and unique."""
    if among.numel() == 0 or sought.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=sought.device)
    where = torch.searchsorted(among, sought).clamp_(max=among.numel() - 1)
    return positions(among[where] == sought)


def _union(supports: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    joined = torch.cat(list(supports))
    if len(supports) == 1:
        return joined
    # A mark per coordinate beats sorting once the lists cover more than about 1/64 of the vector.
    if joined.numel() * 64 > numel:
        marks = torch.zeros(numel, dtype=torch.bool, device=joined.device)
        marks[joined.long()] = True
        return positions(marks).to(torch.int32)
    union: torch.Tensor = torch.unique_consecutive(torch.sort(joined).values)
    return union
