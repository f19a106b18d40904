"""The sums of one region of the vector, which its owner computes from the entries of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries, Workspace
from tritoncomm_kernels.lists import PADDING

Count = int | torch.Tensor  # a number that the host knows, or int32 [1] on the device

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
        self._lists: list[Entries] = []
        self._merged: Entries | None = None
        self._dense: torch.Tensor | None = None
        if device.type != "cpu" or _SPARSE_FROM * entries > high - low:
            self._dense = torch.zeros(high - low, dtype=torch.float32, device=device)

    def add(self, lists: Sequence[Entries]) -> None:
        """Add ``lists`` (at least one), in order. The indices of a list ascend and are inside the region."""
        if self._dense is not None:
            entries, counts = Entries.join(lists), [each.indices.shape[0] for each in lists]
            kernels.scatter_add_lists(self._dense, entries.indices - self._low, entries.values, counts)
        else:
            self._lists += lists

    def at_least(self, threshold: float) -> Entries:
        """Return the non-zero sums with magnitude at least ``threshold``, ascending by index. Call it after all adds.

        NaN and Inf are always selected.
        """
        if self._dense is not None:
            found = kernels.select(self._dense, threshold, workspace=self._workspace)
            return found._replace(indices=found.indices + self._low)
        if self._merged is None:
            self._merged = kernels.merge(self._lists, self._high, workspace=self._workspace)
        reaching = kernels.select(self._merged.values, threshold, workspace=self._workspace)
        return Entries(self._merged.indices[reaching.indices.long()], reaching.values)


class OwnedSums(ABC):
    """The sums of this rank's region, and what this rank has sent to all regions.

    ``load`` is the number of entries that all ranks have for this region. ``sent`` are the entries of this rank in the
    sums of all regions, with the values that were sent.
    """

    def __init__(self, load: Count, sent: Entries) -> None:
        self.load, self.sent = load, sent

    @abstractmethod
    def select(self, threshold: float) -> None:
        """Let only the sums that reach ``threshold`` be candidates for the result. Call this first, and once."""

    @abstractmethod
    def count(self, threshold: float) -> Count:
        """Return how many candidates reach ``threshold``."""

    @abstractmethod
    def largest(self, room: int) -> Entries:
        """Return the ``room`` largest candidates."""


class ListedSums(OwnedSums):
    """Sums whose candidates are listed with exact length.

    ``fits`` returns those entries that a message can hold together, and ``check`` looks for NaN and Inf.
    """

    def __init__(
        self,
        region: RegionSums,
        load: int,
        sent: Entries,
        fits: Callable[[Entries], Entries],
        check: Callable[[torch.Tensor], None],
        workspace: Workspace,
    ) -> None:
        super().__init__(load, sent)
        self._region, self._fits, self._check, self._workspace = region, fits, check, workspace

    def select(self, threshold: float) -> None:
        self._candidates = self._fits(self._region.at_least(threshold))
        self._keys = kernels.magnitude_keys(self._candidates.values)
        self._check(self._candidates.values)

    def count(self, threshold: float) -> Count:
        return int((self._keys >= kernels.threshold_key(threshold)).sum())

    def largest(self, room: int) -> Entries:
        return kernels.largest(self._candidates, room, workspace=self._workspace)


class DenseSums(OwnedSums):
    """Sums (fp32 ``[span]``) of the coordinates from ``low`` on, of which the host knows nothing."""

    def __init__(
        self,
        sums: torch.Tensor,
        low: int,
        load: torch.Tensor,
        sent: Entries,
        check: Callable[[torch.Tensor], None],
        workspace: Workspace,
    ) -> None:
        super().__init__(load, sent)
        self._sums, self._low, self._check, self._workspace = sums, low, check, workspace

    def select(self, threshold: float) -> None:
        self._threshold = threshold

    def count(self, threshold: float) -> Count:
        return kernels.count_reaching(self._sums, threshold)

    def largest(self, room: int) -> Entries:
        sums, held = self._sums, self._workspace
        found = kernels.top_k_padded(sums, None, sums, min(room, sums.numel()), workspace=held)
        self._check(found.values)
        found = kernels.reaching(found, self._threshold, workspace=held)
        return found._replace(indices=torch.where(found.indices < 0, PADDING, found.indices + self._low))
