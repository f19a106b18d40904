"""The sums of one region of the vector, which its owner computes from the entries of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Selection, Workspace

# On a CPU, lists are merged if the region has more coordinates than this multiple of their entries. Otherwise they are
# added to a dense region. A merge costs 10 to 15 ns per entry, a dense region 2 ns per coordinate and 8 ns per entry.
_SPARSE_FROM = 4


class RegionSums:
    """The sums of the entries of all ranks at the coordinates ``[low, high)``.

    The terms of a coordinate are added in the order of the calls of :meth:`add`. ``entries`` is the number of entries
    that will be added. A region with few entries has no dense form on a CPU: it is not allocated, cleared or searched.
    """

    def __init__(self, low: int, high: int, entries: int, device: torch.device, workspace: Workspace) -> None:
        self._low, self._high, self._workspace = low, high, workspace
        self._lists: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._merged: Selection | None = None
        self._dense: torch.Tensor | None = None
        if device.type != "cpu" or _SPARSE_FROM * entries > high - low:
            self._dense = torch.zeros(high - low, dtype=torch.float32, device=device)

    def add(self, entries: Selection, counts: Sequence[int]) -> None:
        """Add consecutive lists of ``counts`` entries each. The indices of a list ascend and are inside the region."""
        if self._dense is not None:
            kernels.scatter_add_lists(self._dense, entries.indices - self._low, entries.values, counts)
        else:
            parts = (torch.split(tensor, list(counts)) for tensor in (entries.indices, entries.values))
            self._lists += zip(*parts, strict=True)

    def at_least(self, threshold: float) -> Selection:
        """Return the non-zero sums with magnitude at least ``threshold``, ascending by index. Call it after all adds.

        NaN and Inf are always selected.
        """
        if self._dense is not None:
            found = kernels.select(self._dense, threshold, workspace=self._workspace)
            return found._replace(indices=found.indices + self._low)
        if self._merged is None:
            self._merged = Selection.of(*kernels.merge(self._lists, self._high, workspace=self._workspace))
        reaching = kernels.select(self._merged.values, threshold, workspace=self._workspace)
        return reaching._replace(indices=self._merged.indices[reaching.indices.long()])
