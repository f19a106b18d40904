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
from tritoncomm.scheduler.rounds import AllGather, AllReduce, Pattern, read
from tritoncomm_kernels import Entries

# The 31 bits of a magnitude are split into four digits, the exponent and three of the mantissa: lowest bit and width of
# each. The counts of a digit are short, so that up to 64 ranks get them in two rounds of messages, see
# :mod:`tritoncomm.scheduler.group_collectives`. With three digits, they travelled around a ring: 2.4 instead of 0.65
# seconds for such a step of four ranks with a delay of 50 ms.
_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))
_COUNT_BYTES = 4


def largest_shares(own: Entries, k: int) -> Pattern[list[int]]:
    """Return how many of the ``k`` largest entries of all ranks each rank holds.

    ``own`` holds this rank's entries. A rank contributes its largest ones. Ties go to the lower rank. This is the lower
    index if ranks hold consecutive parts of a vector. Within a rank :func:`tritoncomm_kernels.largest` prefers the
    lower index too. The ranks must hold more than ``k`` non-zeros in total. Zeros are ignored. On a GPU the host waits
    once, for the shares.
    """
    keys = kernels.magnitude_keys(own.values)
    kth = yield from _kth_key(keys, k)
    above, equal = torch.count_nonzero(keys > kth), torch.count_nonzero(keys == kth)
    everybody = yield AllGather("shares", torch.stack([above, equal]))
    larger, ties = yield from read("shares", everybody.t())
    left = k - sum(larger)
    shares = []
    for count, tied in zip(larger, ties, strict=True):
        taken = min(tied, left)
        left -= taken
        shares.append(count + taken)
    return shares


def _kth_key(keys: torch.Tensor, k: int) -> Pattern[torch.Tensor]:
    # Fix one digit of the k-th largest key (int32 [1]) per round, from the highest digit down.
    prefix, left = keys.new_zeros(1), torch.full((1,), k, device=keys.device)
    for low, width in _DIGITS:
        others = 1 << width  # counted apart: the keys with other leading digits
        inside = (keys >> (low + width)) == (prefix >> (low + width))
        digits = torch.where(inside, (keys >> low) & (others - 1), others)
        counts = keys.new_zeros(others + 1).scatter_add_(0, digits.long(), torch.ones_like(keys))
        total = yield AllReduce("histogram", counts[:others])
        from_top = torch.nn.functional.pad(total.flip(0).cumsum(0), (1, 0))
        place = torch.searchsorted(from_top[1:], left)
        left = left - from_top[place]
        prefix = prefix | ((others - 1 - place) << low).to(torch.int32)
    return prefix


def forecast(world_size: int) -> Forecast:
    """Return the exact traffic of :func:`largest_shares`."""
    histograms = cost.total(cost.all_reduce(1 << width, _COUNT_BYTES, world_size) for _, width in _DIGITS)
    return Forecast({"histogram": both(histograms), "shares": both(cost.all_gather(2, 8, world_size))})
