"""The sums of one region of the vector, which its owner computes from the entries of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries, Guess
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

    def __init__(self, low: int, high: int, entries: int, device: torch.device) -> None:
        self._low, self._high = low, high
        self._lists: list[Entries] = []
        self._dense: torch.Tensor | None = None
        if device.type != "cpu" or _SPARSE_FROM * entries > high - low:
            self._dense = torch.zeros(high - low, dtype=torch.float32, device=device)

    def add(self, lists: Sequence[Entries]) -> None:
        """Add ``lists`` (at least one), in order. The indices of a list ascend and are inside the region."""
        if self._dense is not None:
            for indices, values in lists:
                kernels.scatter_add(self._dense, indices - self._low, values)
        else:
            self._lists += lists

    def at_least(self, threshold: float) -> Entries:
        """Return the non-zero sums with magnitude at least ``threshold``, ascending by index. Call it after all adds.

        NaN and Inf are always selected.
        """
        if self._dense is not None:
            found = kernels.select(self._dense, threshold)
            return found._replace(indices=found.indices + self._low)
        merged = kernels.merge(self._lists, self._high)
        reaching = kernels.select(merged.values, threshold)
        return Entries(merged.indices[reaching.indices.long()], reaching.values)


@dataclass(frozen=True)
class ListedSums:
    """The sums of this rank's region that reach a threshold, and what this rank has sent to all regions.

    ``candidates`` for the result are these sums, of exact length, and ``keys`` their magnitudes. ``load`` is the number
    of entries that all ranks have for this region. ``sent`` are the entries of this rank in the sums of all regions,
    with the values that were sent.
    """

    candidates: Entries
    keys: torch.Tensor
    load: int
    sent: Entries

    def count(self, threshold: float) -> Count:
        """Return how many candidates reach ``threshold``."""
        return int((self.keys >= kernels.threshold_key(threshold)).sum())

    def largest(self, room: int) -> Entries:
        """Return the ``room`` largest candidates."""
        return kernels.largest(self.candidates, room)


@dataclass(frozen=True)
class DenseSums:
    """The same as :class:`ListedSums` if the host does not know which sums reach the ``threshold``.

    ``sums`` (fp32 ``[span]``) are those of all coordinates from ``low`` on. ``check`` looks for NaN and Inf, and
    ``guess`` says where a search for the largest begins.
    """

    sums: torch.Tensor
    low: int
    threshold: float
    load: torch.Tensor
    sent: Entries
    check: Callable[[torch.Tensor], None]
    guess: Guess

    def count(self, threshold: float) -> Count:
        """Return how many sums reach ``threshold``."""
        return kernels.count_reaching(self.sums, threshold)

    def largest(self, room: int) -> Entries:
        """Return the ``room`` largest sums that reach the threshold."""
        sums = self.sums
        found = kernels.top_k_padded(sums, None, sums, min(room, sums.numel()), guess=self.guess)
        self.check(found.values)
        found = kernels.reaching(found, self.threshold)
        return found._replace(indices=torch.where(found.indices < 0, PADDING, found.indices + self.low))


OwnedSums = ListedSums | DenseSums
