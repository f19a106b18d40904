"""Who owns which coordinates, and who moves which entries: the integer arithmetic of Ok-Topk.

S. Li, T. Hoefler, PPoPP 2022, sections on space repartition and data balancing. Cuts are a tuple
``(0, ..., numel)`` of P + 1 ascending bounds; rank r owns ``[cuts[r], cuts[r + 1])``, possibly nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def propose_cuts(indices: torch.Tensor, world_size: int) -> torch.Tensor:
    """This rank's proposal, int64 ``[P]``: P - 1 cuts that split ``indices`` evenly, and a valid flag.

    A rank with fewer entries than workers has no opinion: all zeros, flag 0. int64, because the sum
    over ranks exceeds 2^31 long before an index does.
    """
    count = indices.numel()
    proposal = torch.zeros(world_size, dtype=torch.int64, device=indices.device)
    if count >= world_size:
        chunk_starts = [count * j // world_size for j in range(1, world_size)]
        proposal[:-1] = indices[chunk_starts]
        proposal[-1] = 1
    return proposal


def consensus_cuts(total: Sequence[int], numel: int) -> tuple[int, ...]:
    """The elementwise integer mean of the valid proposals, from their sum; equal cuts without any."""
    *sums, valid = total
    world_size = len(total)
    if valid == 0:
        return tuple(numel * j // world_size for j in range(world_size + 1))
    return (0, *(s // valid for s in sums), numel)


def offsets(indices: torch.Tensor, cuts: Sequence[int]) -> list[int]:
    """Where each region starts in ascending ``indices``: P + 1 positions, one slice per owner."""
    bounds = torch.tensor(cuts, dtype=indices.dtype, device=indices.device)
    positions: list[int] = torch.searchsorted(indices, bounds).tolist()
    return positions


def trimmed_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """``sizes`` scaled down to ``limit`` in all, by largest remainder, ties to the lower rank.

    Everybody computes the same from the same sizes. Rounding every share down would leave up to P - 1
    places empty, all of them when ``limit`` is below P.
    """
    total = sum(sizes)
    if total <= limit:
        return list(sizes)
    trimmed = [size * limit // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (-(sizes[rank] * limit % total), rank))
    for rank in by_remainder[: limit - sum(trimmed)]:
        trimmed[rank] += 1
    return trimmed


def balanced_sizes(total: int, world_size: int) -> list[int]:
    """``total`` entries in P blocks whose sizes differ by at most one, larger ones first."""
    share, extra = divmod(total, world_size)
    return [share + (rank < extra) for rank in range(world_size)]


def moves(sizes: Sequence[int], rank: int) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """What ``rank`` does so that blocks of ``sizes`` become balanced in the same global order.

    Returns the slices of its own block by destination, and the number of entries by source, itself
    included in both. Old and new blocks are intervals of one concatenation; what moves from a to b is
    the intersection of a's old interval with b's new one, so that nothing need be negotiated.
    """
    world_size = len(sizes)
    old = [0, *accumulate(sizes)]
    new = [0, *accumulate(balanced_sizes(old[-1], world_size))]
    leaving: dict[int, tuple[int, int]] = {}
    arriving: dict[int, int] = {}
    for other in range(world_size):
        start, stop = max(old[rank], new[other]), min(old[rank + 1], new[other + 1])
        if start < stop:
            leaving[other] = (start - old[rank], stop - old[rank])
        start, stop = max(old[other], new[rank]), min(old[other + 1], new[rank + 1])
        if start < stop:
            arriving[other] = stop - start
    return leaving, arriving
