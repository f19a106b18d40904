"""Find the k largest entries of a vector that is distributed over workers, without gathering its non-zeros.

This is a distributed radix select. All workers count their magnitudes by leading bits and sum the counts. The next
round looks only at magnitudes that share the leading bits of the k-th one. The cost does not depend on the number of
entries.
"""

from __future__ import annotations

import torch

import tritoncomm_kernels as kernels
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, AllReduce, Pattern
from tritoncomm_kernels import Selection

# The 31 bits of a magnitude are split into three digits: lowest bit and width of each.
_DIGITS = ((20, 11), (10, 10), (0, 10))
_COUNT_BYTES = 4


def largest_shares(own: Selection, k: int) -> Pattern[list[int]]:
    """Return how many of the ``k`` largest entries of all ranks each rank holds.

    ``own`` holds this rank's entries. A rank contributes its largest ones. Ties go to the lower rank. This is the lower
    index if ranks hold consecutive parts of a vector. Within a rank :func:`tritoncomm_kernels.largest` prefers the
    lower index too. The ranks must hold more than ``k`` entries in total, and none may be zero, NaN or Inf.
    """
    keys = kernels.magnitude_keys(own.values)
    kth = yield from _kth_key(keys, k)
    above, equal = torch.count_nonzero(keys > kth), torch.count_nonzero(keys == kth)
    everybody = yield AllGather("shares", torch.stack([above, equal]))
    larger, ties = everybody.t().tolist()
    left = k - sum(larger)
    shares = []
    for count, tied in zip(larger, ties, strict=True):
        taken = min(tied, left)
        left -= taken
        shares.append(count + taken)
    return shares


def _kth_key(keys: torch.Tensor, k: int) -> Pattern[int]:
    # Fix one digit of the k-th largest key per round, from the highest digit down.
    prefix = 0
    for low, width in _DIGITS:
        inside = keys[(keys >> (low + width)) == (prefix >> (low + width))]
        digits = (inside >> low) & ((1 << width) - 1)
        counts = torch.bincount(digits, minlength=1 << width).to(torch.int32)
        total = yield AllReduce("histogram", counts)
        from_top = total.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k))
        k -= int(from_top[place - 1]) if place else 0
        prefix |= ((1 << width) - 1 - place) << low
    return prefix


def forecast(world_size: int) -> Forecast:
    """Return the exact traffic of :func:`largest_shares`."""
    histograms = cost.total(cost.all_reduce(1 << width, _COUNT_BYTES, world_size) for _, width in _DIGITS)
    return Forecast({"histogram": both(histograms), "shares": both(cost.all_gather(2, 8, world_size))})
