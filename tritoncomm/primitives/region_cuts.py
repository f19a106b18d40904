"""Integer arithmetic of Ok-Topk: which rank owns which coordinates, and which entries move between ranks.

S. Li, T. Hoefler, PPoPP 2022, sections on space repartition and data balancing. Cuts are a tuple ``(0, ..., numel)`` of
P + 1 ascending bounds. Rank r owns the region ``[cuts[r], cuts[r + 1])``, which may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from tritoncomm_kernels import Entries, count_entries


def widest(cuts: Sequence[int]) -> int:
    """Return the width of the widest region."""
    return max(high - low for low, high in pairwise(cuts))


def propose_cuts(entries: Entries, world_size: int) -> torch.Tensor:
    """Return this rank's proposal, int64 ``[P]``: P - 1 cuts that split ``entries`` evenly, then a valid flag.

    A rank with fewer entries than workers proposes no cuts: all zeros, with flag 0. The dtype is int64 because the sum
    over ranks can exceed 2^31 even if every index is below it. Nothing waits for a GPU.
    """
    count = count_entries(entries).long()
    if entries.room < world_size:
        return count.new_zeros(world_size)
    starts = torch.arange(1, world_size, device=count.device) * count // world_size
    proposal = torch.cat([entries.indices[starts].long(), torch.ones_like(count)])
    return proposal * (count >= world_size)


def consensus_cuts(total: Sequence[int], numel: int) -> tuple[int, ...]:
    """Return the cuts: the elementwise integer mean of all valid proposals.

    ``total`` is the sum of the proposals over ranks. Without any valid proposal the regions have equal sizes.
    """
    *sums, valid = total
    world_size = len(total)
    if valid == 0:
        return tuple(numel * j // world_size for j in range(world_size + 1))
    return (0, *(s // valid for s in sums), numel)


def offsets(indices: torch.Tensor, cuts: Sequence[int]) -> list[int]:
    """Return where each region starts in ascending ``indices``: P + 1 positions, so each region is one slice."""
    bounds = torch.tensor(cuts, dtype=indices.dtype, device=indices.device)
    positions: list[int] = torch.searchsorted(indices, bounds).tolist()
    return positions


def trimmed_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Scale ``sizes`` down to a total of ``limit`` by largest remainder. Ties go to the lower rank.

    All ranks compute the same result from the same sizes. Rounding every share down would leave up to P - 1 places
    unused. If ``limit`` is below P, this can be every place.
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
    """Split ``total`` entries into P block sizes that differ by at most one, larger ones first."""
    share, extra = divmod(total, world_size)
    return [share + (rank < extra) for rank in range(world_size)]


def balanced_pieces(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pieces of every balanced block: (old owner, number of entries), in order. Pieces are not empty."""
    pieces: list[list[tuple[int, int]]] = []
    owner, left = -1, 0
    for room in balanced_sizes(sum(sizes), len(sizes)):
        block: list[tuple[int, int]] = []
        while room:
            while not left:
                owner += 1
                left = sizes[owner]
            count = min(room, left)
            block.append((owner, count))
            room, left = room - count, left - count  # noqa: PLW2901
        pieces.append(block)
    return pieces


def moves(sizes: Sequence[int], rank: int) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Return the moves of ``rank`` that balance blocks of ``sizes`` and keep the global order.

    The result holds the slices of its own block by destination, and the number of entries by source. Both include
    ``rank`` itself. Rank a sends to rank b its piece of b's balanced block, so nothing has to be negotiated.
    """
    blocks = [dict(pieces) for pieces in balanced_pieces(sizes)]
    counts = {other: block[rank] for other, block in enumerate(blocks) if rank in block}
    stops = accumulate(counts.values())
    leaving = {other: (stop - counts[other], stop) for other, stop in zip(counts, stops, strict=True)}
    return leaving, blocks[rank]
